"""Records, the checker, the material, the table."""

import json
import random
import sys
from typing import Any

import pytest

from benthic.errors import MissingDependency
from benthic.skills import base
from benthic.skills.base import SKILLS, Call, Material, Reply, Task, belongs, right, same_json, same_value, sentences_of
from tests.skills.small import MATERIAL, SPLITS


def ask(answer: str, skill: str = "copy") -> Task:
    return Task(skill, ({"role": "user", "content": "?"}, {"role": "assistant", "content": answer}))


# The checker


@pytest.mark.parametrize("answer", ["1234", " 1234", "1234\n", "\t1234 "])
def test_text_is_right(answer: str) -> None:
    assert right(ask("1234"), 1, Reply(answer))


@pytest.mark.parametrize("answer", ["", "123", "12345", "1235", "1234.", "the code is 1234", "12 34", "1234 1234"])
def test_text_is_wrong(answer: str) -> None:
    assert not right(ask("1234"), 1, Reply(answer))


def test_case_and_inner_space_are_told_apart() -> None:
    assert not right(ask("red box"), 1, Reply("Red box"))
    assert not right(ask("red box"), 1, Reply("red  box"))


VALUE = '{"name": "Tom", "age": 7, "tags": ["a", "b"], "glad": true, "size": 1.5, "home": null}'


@pytest.mark.parametrize("got", [VALUE, f" {VALUE}\n", json.dumps(json.loads(VALUE), indent=1, sort_keys=True)])
def test_json_is_right(got: str) -> None:
    assert same_value(VALUE, got)
    assert same_json(Reply(VALUE), Reply(got))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Tom", "tom"),
        ("7", "8"),
        ("7", "7.0"),
        ("7", '"7"'),
        ("true", "1"),
        ("true", '"true"'),
        ("null", '""'),
        ('"a", "b"', '"b", "a"'),
        ('"a", "b"', '"a"'),
        ("1.5", "1.50001"),
        ("1.5", "NaN"),
        ('"age": 7, ', ""),
        ('"age": 7', '"age": 8, "age": 7'),
        ('"age"', '"Age"'),
        ("null}", 'null, "more": 1}'),
        ("null}", "null"),
        ("null}", 'null} "'),
        ("{", "```json\n{"),
        ('"', "'"),
    ],
)
def test_json_is_wrong(old: str, new: str) -> None:
    changed = VALUE.replace(old, new)
    assert changed != VALUE
    assert not same_value(VALUE, changed)


def test_true_is_not_one() -> None:
    assert not same_value('{"a": 1}', '{"a": true}')
    assert not same_value("[1]", '[1, "x"]')
    assert not same_value("[]", "{}")
    assert not same_value("{}", "[" * 100_000)


def test_a_call_is_its_name_and_its_parsed_arguments() -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    task = Task("tools", ({"role": "user", "content": "?"}, message))
    want = Call(**function)
    assert Reply.of(message) == Reply("", "", (want,))
    for arguments in (want.arguments, '{"days":3,"city":"Paris"}'):
        assert right(task, 1, Reply("", "", (Call("get_weather", arguments),)))
    wrong: list[tuple[Call, ...]] = [
        (),
        (want, want),
        (Call("get_time", want.arguments),),
        (Call("get_weather", '{"city": "Paris"}'),),
        (Call("get_weather", '{"city": "Paris", "days": "3"}'),),
        (Call("get_weather", '{"city": "Paris", "days": 3'),),
        (Call("get_weather", ""),),
    ]
    for calls in wrong:
        assert not right(task, 1, Reply("", "", calls)), calls
    assert not right(ask("sunny"), 1, Reply("sunny", "", (want,)))  # no call was wanted


STEPS = "At first there are 20. 20 + 19 = 39. 39 - 12 = 27."


def think(reasoning: str) -> Task:
    message = {"role": "assistant", "content": "27", "reasoning_content": reasoning}
    return Task("thinking", ({"role": "user", "content": "?"}, message), thinking=True)


@pytest.mark.parametrize(
    "reasoning",
    [
        STEPS,
        "20 + 19 = 39, and 39 - 12 = 27",
        "20 - 12 = 8. 8 + 19 = 27.",
        f"{STEPS} Check: 27 + 12 = 39.",
        f" {STEPS}\n",
    ],
)
def test_any_sound_derivation_is_right(reasoning: str) -> None:
    assert right(think(STEPS), 1, Reply("27", reasoning))
    assert not right(think(STEPS), 1, Reply("28", reasoning))


@pytest.mark.parametrize(
    "reasoning",
    [
        "",
        "I know it.",
        "39 - 12 = 27.",  # one step
        "20 + 19 = 38. 38 - 12 = 26.",
        "20 + 19 = 39. 39 - 12 = 28.",
        "20 + 19 = 39. 39 + 12 = 51.",  # leads elsewhere
        f"{STEPS} 27 + 1 = 27.",
    ],
)
def test_an_unsound_derivation_is_wrong(reasoning: str) -> None:
    assert not right(think(STEPS), 1, Reply("27", reasoning))


def test_a_direct_answer_has_no_derivation() -> None:
    assert right(ask("27", "thinking"), 1, Reply("27"))
    assert not right(ask("27", "thinking"), 1, Reply("27", STEPS))


def test_a_reply_is_read_from_a_message() -> None:
    assert Reply.of({"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": None}) == Reply(
        "", "so"
    )
    assert Reply.of({"content": "x"}) == Reply("x")


# Tasks


def test_a_task_says_what_to_ask() -> None:
    messages = tuple({"role": role, "content": str(i)} for i, role in enumerate(["user", "assistant"] * 3))
    task = Task("copy", messages)
    assert task.turns == (1, 3, 5)
    assert task.request(3) == {"messages": messages[:3], "thinking": False}
    assert task.request()["messages"] == messages
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    form = {"type": "json_object"}
    full = Task("tools", messages, tools=(tool,), thinking=True, effort="low", response_format=form)
    assert full.request(1) == {
        "messages": messages[:1],
        "thinking": True,
        "effort": "low",
        "tools": (tool,),
        "response_format": form,
    }


# Splits


def test_one_value_in_ten_is_held_out_and_every_value_is_in_one_split() -> None:
    held_out = [n for n in range(10_000) if belongs("held_out", "a", n)]
    assert 900 < len(held_out) < 1100
    assert [n for n in range(10_000) if not belongs("train", "a", n)] == held_out
    assert held_out[:4] == [11, 33, 50, 65]  # by a hash that is the same everywhere


# Material


def test_sentences_are_cut_at_their_ends_and_kept_by_length() -> None:
    short, long = "Too short.", "x" * 200 + "."
    kept = ["This one is long enough.", "And is it really so?", "And this is not one 3.5 m long!"]
    assert sentences_of(" ".join([short, kept[0], long]) + "\n\n" + " ".join(kept[1:])) == kept
    assert sentences_of("") == []


def test_material_is_words_of_prompts_and_sentences_of_responses() -> None:
    pairs = [("Write of a Cat and a dog, an elephantine dog.", "The cat sat on the mat. No."), ("The dog", "x")]
    material = Material.of(pairs)
    assert material == Material(("and", "dog"), ("The cat sat on the mat.",))
    assert material.lacks == "it has 2 different words of 3 to 9 small letters in its prompts, the skills need 16"
    assert "0 sentences of 20 to 200 characters" in Material.of(pairs[1:]).lacks
    assert not MATERIAL.lacks


# Every skill


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", SKILLS)
def test_tasks_are_seeded(name: str, split: Any) -> None:
    def tasks(first: int) -> list[Task]:
        return [SKILLS[name].make(random.Random(seed), MATERIAL, split) for seed in range(first, first + 20)]

    assert tasks(0) == tasks(0)
    assert len({repr(task.messages) for task in tasks(0)}) > 15
    assert tasks(0) != tasks(1)
    assert all(task.skill == name and task.level and task.turns for task in tasks(0))


@pytest.mark.parametrize("name", SKILLS)
def test_the_right_answer_is_right_and_a_changed_one_is_not(name: str) -> None:
    rng = random.Random(name)
    for seed in range(100):
        task = SKILLS[name].make(random.Random(seed), MATERIAL, "held_out")
        for turn in task.turns:
            want = Reply.of(task.messages[turn])
            assert right(task, turn, want)
            for reply in changed(rng, want):
                assert not right(task, turn, reply), (want, reply)


def changed(rng: random.Random, want: Reply) -> list[Reply]:
    """Answers that differ from the right one in one character, or say more or less."""
    text = want.content.strip()
    if want.tool_calls:
        call = want.tool_calls[0]
        return [
            Reply("", want.reasoning, ()),
            Reply("", want.reasoning, (*want.tool_calls, call)),
            Reply("", want.reasoning, (call._replace(name=call.name + "s"), *want.tool_calls[1:])),
            Reply("", want.reasoning, (call._replace(arguments="{}"), *want.tool_calls[1:])),
        ]
    at = rng.randrange(len(text))
    digit = next((i for i, c in enumerate(text) if c.isdigit()), None)
    out = [text + " x", text[:at] + text[at + 1 :] if text[at] != " " else "", "", text.swapcase() + "."]
    if digit is not None:
        out.append(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    return [Reply(value, want.reasoning) for value in out]


def test_pictures_without_pillow_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "benthic.skills.shapes", raising=False)
    base._generator.cache_clear()
    with pytest.raises(MissingDependency, match=r"pillow.*benthic\[vision\]"):
        SKILLS["shapes"].make(random.Random(0), MATERIAL, "train")
    assert SKILLS["copy"].make(random.Random(0), MATERIAL, "train").turns
