"""Skills of plain text: held-out tasks apart from training, what is asked for stands there, lengths, depths."""

import random
import re
from typing import Any

import pytest

from benthic.skills import text
from benthic.skills.base import SKILLS, Split, Task
from tests.skills.small import MATERIAL, SPLITS
from tests.train.small import NAMES

STATEMENT = re.compile("|".join(s.format(key="(?:the )?([a-z]+ [a-z]+)", code=r"(\d{4})") for s in text.STATEMENTS))


def make(skill: str, seed: int, split: Split = "train", **options: Any) -> Task:
    return SKILLS[skill].make(random.Random(seed), MATERIAL, split, **options)


def turns(task: Task) -> list[tuple[str, str]]:
    contents = [message["content"] for message in task.messages]
    return list(zip(contents[::2], contents[1::2], strict=True))


# Copy and needle


@pytest.mark.parametrize("skill", ["needle", "copy"])
def test_held_out_codes_never_stand_in_training(skill: str) -> None:
    codes = {
        split: {c for seed in range(300) for turn in turns(make(skill, seed, split)) for c in _codes(*turn)}
        for split in SPLITS
    }
    assert all(code.endswith("7") for code in codes["held_out"])
    assert not any(code.endswith("7") for code in codes["train"])
    assert {code[-1] for code in codes["train"]} == set("012345689")
    assert len(codes["held_out"]) > 100


def _codes(*texts: str) -> list[str]:
    return [code for text in texts for code in re.findall(r"\b\d{4}\b", text)]


def test_every_held_out_line_to_copy_has_a_held_out_code() -> None:
    for seed in range(200):
        for _, answer in turns(make("copy", seed, "held_out")):
            assert re.search(r"\b\d{3}7\b", answer), answer


@pytest.mark.parametrize("split", SPLITS)
def test_a_needle_is_said_once_and_asked_for_by_its_key(split: Split) -> None:
    for seed in range(200):
        asked_for = turns(make("needle", seed, split, tokens=400))
        said = [(a or b or c or d, e or f or g or h) for a, e, b, f, c, g, d, h in STATEMENT.findall(asked_for[0][0])]
        codes = dict(said)
        assert 1 <= len(said) == len(codes) <= 6
        assert 1 <= len(asked_for) <= min(4, len(codes))
        asked: list[str] = []
        for user, answer in asked_for:
            question = user.rpartition("\n\n")[2]
            (key,) = (key for key in codes if re.search(rf"\b{key}\b", question))
            assert answer == codes[key]
            asked.append(key)
        assert len(set(asked)) == len(asked)


def needle_text(seed: int, **options: Any) -> str:
    return make("needle", seed, **options).messages[0]["content"]


def test_needles_and_questions_can_be_set() -> None:
    task = make("needle", 3, "held_out", needles=4, questions=1)
    assert len(STATEMENT.findall(task.messages[0]["content"])) == 4
    assert task.turns == (1,)


@pytest.mark.parametrize("tokens", [100, 270, 1000, 4000])
def test_needle_texts_are_about_as_long_as_asked(tokens: int) -> None:
    for seed in range(50):
        length = len(needle_text(seed, tokens=tokens, needles=4, questions=1))
        assert abs(length - tokens * text.CHARACTERS_PER_TOKEN) <= 250, (seed, length)


def test_no_room_leaves_the_needles_alone() -> None:
    alone = needle_text(1, tokens=1, needles=2, questions=1)
    assert not any(name in alone for name in NAMES)
    assert len(STATEMENT.findall(alone)) == 2


def place(seed: int, **options: Any) -> float:
    """Where the code that is asked for first stands, as a share of the text."""
    task = make("needle", seed, **options)
    user, answer = turns(task)[0]
    return user.index(answer) / user.rindex("\n\n")


def test_needles_stand_at_any_depth() -> None:
    places = [place(seed, tokens=800, needles=1) for seed in range(200)]
    assert min(places) < 0.1
    assert max(places) > 0.85
    assert 0.4 < sum(places) / len(places) < 0.6


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_depth_of_the_needle_that_is_asked_for_can_be_set(depth: float) -> None:
    for seed in range(50):
        assert abs(place(seed, tokens=2000, needles=4, depth=depth) - depth) < 0.05


def test_training_lengths_are_log_uniform() -> None:
    tasks = [make("needle", seed) for seed in range(600)]
    lengths = sorted(len(task.messages[0]["content"]) / text.CHARACTERS_PER_TOKEN for task in tasks)
    low, high = text.NEEDLE_TOKENS
    assert 0.7 * low <= lengths[0] < 1.5 * low
    assert 0.95 * high < lengths[-1] <= 1.02 * high
    assert abs(lengths[300] / (low * high) ** 0.5 - 1) < 0.2  # the geometric mean of the ends
    assert {task.level for task in tasks} == {f"{edge} tokens" for edge in text.NEEDLE_LEVELS}


@pytest.mark.parametrize("split", SPLITS)
def test_a_line_is_copied_by_its_number(split: Split) -> None:
    for seed in range(200):
        asked_for = turns(make("copy", seed, split))
        lines = dict(re.findall(r"^(\d)\. (.*)$", asked_for[0][0], re.MULTILINE))
        assert 2 <= len(lines) <= 8
        numbers = []
        for user, answer in asked_for:
            (number,) = re.findall(r"line (\d)", user.rpartition("\n\n")[2])
            assert answer == lines[number]
            numbers.append(number)
        assert len(set(numbers)) == len(numbers)


# Recall


def listed(text: str) -> dict[str, str]:
    """The numbered items of a list, in any of its forms."""
    body = text.rpartition("\n\n")[0]
    items = re.findall(r"(?:^|\n|, )(?:Item )?(\d+)(?:\.|\)|:) ([a-z]+(?: [a-z]+)?)(?=$|\n|,|\. )", body)
    assert [int(n) for n, _ in items] == list(range(1, len(items) + 1))
    return dict(items)


@pytest.mark.parametrize("split", SPLITS)
def test_items_are_recalled_by_number_and_numbers_by_item(split: Split) -> None:
    kinds = set()
    for seed in range(300):
        task = make("recall", seed, split)
        asked_for = turns(task)
        items = listed(asked_for[0][0])
        assert 5 <= len(items) == len(set(items.values())) <= 100
        assert int(task.level.split()[0]) >= len(items)
        assert 1 <= len(asked_for) <= 4
        for user, answer in asked_for:
            question = user.rpartition("\n\n")[2]
            if numbers := re.findall(r"\d+", question):
                assert answer == items[numbers[0]]
            else:
                assert items[answer] in question
            kinds.add(bool(numbers))
    assert kinds == {True, False}


def test_the_length_of_a_list_can_be_set() -> None:
    for items in (5, 37, 100):
        for long in (True, False):
            task = make("recall", items, items=items, long=long)
            assert len(listed(task.messages[0]["content"])) == items
            assert task.level == f"{items} items"
            assert (len(task.messages[0]["content"]) > 35 * items) == long


def test_no_list_of_training_is_held_out() -> None:
    lists = {
        split: {tuple(listed(make("recall", s, split, items=5).messages[0]["content"]).values()) for s in range(500)}
        for split in SPLITS
    }
    assert len(lists["held_out"]) == 500
    assert not lists["train"] & lists["held_out"]


# Arithmetic


def counted(user: str) -> list[str]:
    """The word to be counted, and the list."""
    (word,) = re.findall(r"(?:the word|times is|often does) (\w+)", user)
    return [word, *re.sub(r"How often .*\? |Count the word \w+: |\nHow many .*$", "", user).split(", ")]


def reckoned(user: str) -> str:
    """The answer of a question, worked out from its words."""
    numbers = [int(n) for n in re.findall(r"\d+", user)]
    if re.search(r"^Count from|numbers from", user):
        return ", ".join(map(str, range(numbers[0], numbers[1] + 1)))
    if "Count the word" in user or "How often" in user or "How many times" in user:
        word, *body = counted(user)
        return str(body.count(word))
    a, b = numbers
    if re.search(r"\+|plus|Add", user):
        return str(a + b)
    if re.search(r"-|minus", user):
        return str(a - b)
    if "Take" in user:
        return str(b - a)
    if re.search(r"^Is ", user):
        return "yes" if a > b else "no"
    return str(max(a, b) if re.search(r"larger|greater", user) else min(a, b))


@pytest.mark.parametrize("kind", text.ARITHMETIC)
@pytest.mark.parametrize("split", SPLITS)
def test_what_is_reckoned_is_right(split: Split, kind: str) -> None:
    for seed in range(200):
        task = make("arithmetic", seed, split, kind=kind)
        assert task.level == kind
        assert 1 <= len(task.turns) <= 6
        for user, answer in turns(task):
            assert answer == reckoned(user), user


def operands(split: Split, kind: str) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for seed in range(2000):
        for user, _ in turns(make("arithmetic", seed, split, kind=kind)):
            numbers = re.findall(r"\d+", user)
            found.add(tuple(sorted(numbers) if numbers else counted(user)))
    return found


@pytest.mark.parametrize("kind", text.ARITHMETIC)
def test_held_out_operands_never_stand_in_training(kind: str) -> None:
    train, held_out = (operands(split, kind) for split in SPLITS)
    assert not train & held_out
    assert len(held_out) > 100
    if kind == "addition":
        assert all(10 <= int(n) <= 99 for pair in held_out for n in pair)


def test_all_kinds_of_arithmetic_come_up() -> None:
    assert {make("arithmetic", seed).level for seed in range(50)} == set(text.ARITHMETIC)


# Thinking


def test_derivations_lead_to_the_answer() -> None:
    levels = set()
    for seed in range(300):
        task = make("thinking", seed)
        (user, answer), message = turns(task)[0], task.messages[1]
        start, first, second = (int(n) for n in re.findall(r"\d+", user))
        ends = {start + a * first + b * second for a in (1, -1) for b in (1, -1)}
        assert int(answer) in ends
        assert int(answer) >= 0
        levels.add(task.level)
        assert task.thinking == ("reasoning_content" in message)
        if task.thinking:
            equations = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", message["reasoning_content"])
            assert len(equations) == (4 if task.effort == "max" else 2)
            for a, sign, b, c in equations:
                assert int(a) + int(f"{sign}{b}") == int(c)
            assert equations[0][0] == str(start)
            assert equations[1][0] == equations[0][3]
            assert equations[1][3] == answer
    assert levels == {"direct", "thinking, low", "thinking, high", "thinking, max"}


def test_more_effort_is_more_words() -> None:
    lengths: dict[str | None, list[int]] = {}
    for seed in range(300):
        task = make("thinking", seed, think=True)
        lengths.setdefault(task.effort, []).append(len(task.messages[1]["reasoning_content"]))
    low, high, most = (sum(lengths[effort]) / len(lengths[effort]) for effort in ("low", None, "max"))
    assert low < high < most
    assert not make("thinking", 1, think=False).thinking


def test_the_stories_say_what_the_derivation_does() -> None:
    gains, losses = r"buys|finds|more|gets", r"loses|sells|takes|gives \d+ to"
    for seed in range(200):
        task = make("thinking", seed, think=True)
        user = task.messages[0]["content"]
        signs = re.findall(r" ([+-]) \d+ =", task.messages[1]["reasoning_content"])[:2]
        for sign, step in zip(signs, user.split(". ")[1:3], strict=True):
            assert bool(re.search(gains, step)) == (sign == "+"), user
            assert bool(re.search(losses, step)) == (sign == "-"), user


def test_held_out_derivations_never_stand_in_training() -> None:
    found = {}
    for split in SPLITS:
        tasks = [make("thinking", seed, split, think=True) for seed in range(1500)]
        found[split] = {
            tuple(re.findall(r"(\d+ [+-] \d+) =", task.messages[1]["reasoning_content"])[:2]) for task in tasks
        }
    assert len(found["held_out"]) > 1000
    assert not found["train"] & found["held_out"]


# Memory


@pytest.mark.parametrize("split", SPLITS)
def test_names_and_facts_come_back(split: Split) -> None:
    asked_names = asked_facts = 0
    for seed in range(300):
        task = make("memory", seed, split)
        said = turns(task)
        assert 2 <= len(said) <= 6
        assert task.level == f"{len(said)} turns"
        (name,) = re.findall(r"(?:my name is|I am|My name is) (\w+)\.", said[0][0])
        assert said[0][1] == f"Hello, {name}!"
        (fact,) = re.findall(
            r"(?:colour is|colour|live in|home is in|food is|like to eat|have a|pet is a|lost my|find my) (\w+)"
            r"(?: best| at home)?\.$",
            said[0][0] if re.search(r"\. .", said[0][0]) else said[1][0],
        )
        for user, answer in said:
            if user in text.NAME_ASKS:
                assert answer == name
                asked_names += 1
            elif any(user in asks for _, asks, _ in text.FACTS):
                assert answer == fact
                asked_facts += 1
        assert said[-1][1] in (name, fact)
    assert asked_names > 150
    assert asked_facts > 150


def test_the_number_of_turns_can_be_set() -> None:
    for count in range(2, 7):
        assert len(turns(make("memory", count, turns=count))) == count


def test_a_held_out_name_never_goes_with_its_fact_in_training() -> None:
    found = {}
    for split in SPLITS:
        tasks = [turns(make("memory", seed, split, turns=4)) for seed in range(1500)]
        found[split] = {tuple(sorted((said[-1][1], said[-2][1]))) for said in tasks}
    assert len(found["held_out"]) > 200
    assert not found["train"] & found["held_out"]
