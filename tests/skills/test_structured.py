"""Schemas and tools: what is asked stands in the text, what is declared is called, held-out requests stay apart."""

import json
import random
import re
from typing import Any

import pytest

from benthic.skills import structured
from benthic.skills.base import SKILLS, Call, Reply, Split, Task, right
from tests.skills.small import MATERIAL, SPLITS

KINDS = {"string": str, "integer": int, "boolean": bool, "array": list}


def make(skill: str, seed: int, split: Split = "train", **options: Any) -> Task:
    return SKILLS[skill].make(random.Random(seed), MATERIAL, split, **options)


# JSON


def schema_of(task: Task) -> dict[str, Any]:
    if task.response_format is not None:
        return task.response_format["json_schema"]["schema"]
    user = task.messages[0]["content"]
    return json.JSONDecoder().raw_decode(user[user.index("{") :])[0]


@pytest.mark.parametrize("split", SPLITS)
def test_answers_fill_the_schema_from_the_text(split: Split) -> None:
    forms = set()
    for seed in range(300):
        task = make("json", seed, split)
        user, answer = (message["content"] for message in task.messages)
        schema, value = schema_of(task), json.loads(answer)
        assert list(value) == list(schema["properties"]) == schema["required"]
        assert 2 <= len(value) <= 4
        forms.add(task.response_format is None)
        said = user.replace(json.dumps(schema), "")
        for key, item in value.items():
            assert type(item) is KINDS[schema["properties"][key]["type"]]
            if isinstance(item, bool):
                said_no = re.search(r"(?:is|has) not \w+", said)
                assert bool(said_no) != item, (said, value)
            else:
                for part in item if isinstance(item, list) else [item]:
                    assert re.search(rf"\b{part}\b", said), (said, value)
    assert forms == {True, False}


def test_the_form_of_the_schema_can_be_set() -> None:
    assert all(make("json", seed, form="prompt").response_format is None for seed in range(20))
    assert all(make("json", seed, form="format").response_format is not None for seed in range(20))


def test_records_that_are_held_out_never_stand_in_training() -> None:
    found = {}
    for split in SPLITS:
        values = [json.loads(make("json", seed, split).messages[1]["content"]) for seed in range(1500)]
        found[split] = {json.dumps(value, sort_keys=True) for value in values}
    assert len(found["held_out"]) > 500
    assert not found["train"] & found["held_out"]


def test_changes_of_a_value_are_wrong() -> None:
    for seed in range(100):
        task = make("json", seed)
        value = json.loads(task.messages[1]["content"])
        assert right(task, 1, Reply(json.dumps(value, indent=2, sort_keys=True)))
        for key, item in value.items():
            changes: list[Any] = [None, str(item) + " ", [item]]
            if isinstance(item, bool):
                changes += [not item, int(item)]
            elif isinstance(item, int):
                changes += [item + 1, float(item), str(item)]
            elif isinstance(item, list):
                changes += [item[::-1], item[1:], ", ".join(item)]
            for change in changes:
                assert not right(task, 1, Reply(json.dumps(value | {key: change}))), (value, key, change)
            assert not right(task, 1, Reply(json.dumps({k: v for k, v in value.items() if k != key})))


# Tools


def rounds(task: Task) -> list[list[dict[str, Any]]]:
    """Messages from one user turn to the next."""
    starts = [i for i, message in enumerate(task.messages) if message["role"] == "user"]
    return [list(task.messages[a:b]) for a, b in zip(starts, [*starts[1:], len(task.messages)], strict=True)]


@pytest.mark.parametrize("split", SPLITS)
def test_calls_are_of_declared_tools_with_what_was_asked_for(split: Split) -> None:
    calls_at_once, idle, used = set(), 0, set()
    for seed in range(400):
        task = make("tools", seed, split)
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
        assert 1 <= len(declared) == len(task.tools) <= 3
        ids = []
        for user, *rest in rounds(task):
            if len(rest) == 1:
                assert (user["content"], rest[0]["content"]) in [(q, a) for asks, a in structured.IDLE for q in asks]
                idle += 1
                continue
            calls = rest[0]["tool_calls"]
            calls_at_once.add(len(calls))
            results = rest[1:-1]
            assert [message["tool_call_id"] for message in results] == [call["id"] for call in calls]
            ids += [call["id"] for call in calls]
            answer = rest[-1]["content"]
            for call, result in zip(calls, results, strict=True):
                function = call["function"]
                used.add(function["name"])
                schema, arguments = declared[function["name"]], json.loads(function["arguments"])
                assert list(arguments) == schema["required"]
                for key, value in arguments.items():
                    assert type(value) is KINDS[schema["properties"][key]["type"]]
                    said = ("on" if value else "off") if isinstance(value, bool) else str(value)
                    assert re.search(rf"\b{said}\b", user["content"]), (user, arguments)
                for key, value in json.loads(result["content"]).items():
                    assert key == "status" or str(value) in answer
        assert len(set(ids)) == len(ids)
    assert calls_at_once == {1, 2}
    assert idle > 10
    assert used == {tool.name for tool in structured.TOOLS}


def test_sums_and_products_are_right() -> None:
    rng = random.Random(0)
    for tool in structured.TOOLS:
        if tool.name in ("add", "multiply"):
            a, b = tool.draw(rng).values()
            want = {"sum": a + b} if tool.name == "add" else {"product": a * b}
            assert tool.run(rng, {"a": a, "b": b}) == want


def test_the_number_of_tools_and_thinking_can_be_set() -> None:
    for seed in range(20):
        for declared in (1, 2, 3):
            for think in (True, False):
                task = make("tools", seed, declared=declared, think=think)
                assert len(task.tools) == declared
                assert task.thinking == think
                assert task.level == f"{declared} tools" + ", thinking" * think
                assert all(("reasoning_content" in task.messages[turn]) == think for turn in task.turns)


def requests(split: Split) -> set[str]:
    idle = {ask for asks, _ in structured.IDLE for ask in asks}
    tasks = [make("tools", seed, split) for seed in range(1500)]
    return {m["content"] for task in tasks for m in task.messages if m["role"] == "user"} - idle


def test_held_out_requests_never_stand_in_training() -> None:
    train, held_out = map(requests, SPLITS)
    assert len(held_out) > 250
    assert not train & held_out


@pytest.mark.parametrize("tool", structured.TOOLS, ids=lambda tool: tool.name)
@pytest.mark.parametrize("split", SPLITS)
def test_every_tool_has_requests_in_both_splits(tool: structured.Tool, split: Split) -> None:
    asks = {structured._request(random.Random(seed), split, tool)[0] for seed in range(30)}
    assert len(asks) >= 2


def test_a_call_with_another_argument_is_wrong() -> None:
    for seed in range(100):
        task = make("tools", seed)
        for turn in task.turns:
            calls = Reply.of(task.messages[turn]).tool_calls
            for i, call in enumerate(calls):
                arguments = json.loads(call.arguments)
                for key, value in arguments.items():
                    for other in ([value], str(value) + "x", not value, None):
                        changed = Call(call.name, json.dumps(arguments | {key: other}))
                        assert not right(task, turn, Reply("", "", (*calls[:i], changed, *calls[i + 1 :])))
                spaced = Call(call.name, json.dumps(arguments, indent=1, sort_keys=True))
                assert right(task, turn, Reply("", "", (*calls[:i], spaced, *calls[i + 1 :])))
            if len(calls) == 2:
                assert not right(task, turn, Reply("", "", calls[::-1]))
