"""Suites of generated tasks: one for each skill, and needles by length and depth.

Every assistant turn of a task is asked for greedily, with the right turns before it as history.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benthic.bench.eval.measures import Estimate, measure, share
from benthic.bench.eval.prepared import Answers, Measured, Plan, Prepared, Skip
from benthic.bench.eval.questions import SERVED, Chat, Said, View
from benthic.bench.report import Measure
from benthic.skills.base import SKILLS, Reply, Task, right
from benthic.skills.shapes import ASKS

LADDER_TOKENS = (128, 256, 512, 1024, 2048, 4000, 8000, 16000)

_BARS = {"copy": 0.95, "arithmetic, addition": 0.90, "tools": 0.90, "json": 0.90, "shapes, colour and shape": 0.95}
_TOGETHER = {"shapes": {"colour and shape": ("colour", "shape"), "others": ("position", "count", "picture")}}
_LADDER_BARS = {512: 0.95, 2048: 0.90, 4000: 0.85}
_ABLATED_TOKENS = 4000  # longest text that is also asked with dense and random visibility
_NEEDLE_TOKENS = (128, 256, 512, 1024)
_ROOM_TOKENS = 160  # of a context: template, question and answer around a needle's text
_ANSWER_TOKENS = 48  # of an answer beside its own characters: marks, and room to be wrong in
_CALL_TOKENS = 96  # of the marks around one tool call


# ---- skills ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """One assistant turn of a task, asked for with the right turns before it."""

    task: Task
    turn: int
    question: Chat


def targets(task: Task, view: View = SERVED) -> list[Target]:
    return [Target(task, turn, Chat(task.request(turn), _room(task.messages[turn]), view=view)) for turn in task.turns]


def _room(message: dict[str, Any]) -> int:
    """Most tokens of an answer: a byte is at most a token, and there is room for a longer wrong one."""
    want = Reply.of(message)
    calls = sum(_CALL_TOKENS + len(call.name) + len(call.arguments.encode()) for call in want.tool_calls)
    return _ANSWER_TOKENS + len(want.content.encode()) + len(want.reasoning.encode()) + calls


def _right(target: Target, reply: Reply) -> bool:
    return right(target.task, target.turn, reply)


def _holds(target: Target, reply: Reply) -> bool:
    """Right, or the wanted text with words around it, as models write it that were not trained on these tasks."""
    want = Reply.of(target.task.messages[target.turn]).content.strip()
    return _right(target, reply) or (bool(want) and want in reply.content)


def _share(
    groups: Iterable[Sequence[Target]], answers: Answers, counts: Callable[[Target, Reply], bool] = _right
) -> Estimate | None:
    """Turns that count among those answered; a task is one sample."""
    rights: list[float] = []
    asked: list[float] = []
    for group in groups:
        said = [(t, a) for t in group if isinstance(a := answers(t.question), Said)]
        if said:
            rights.append(float(sum(counts(t, a.reply) for t, a in said)))
            asked.append(float(len(said)))
    return share(rights, asked) if asked else None


def skill(name: str, plan: Plan) -> Prepared:
    if plan.material.lacks:
        raise Skip(plan.material.lacks)
    groups: list[list[Target]] = []
    for i in range(plan.sizes.tasks):
        try:
            task = SKILLS[name].make(plan.random(name, i), plan.material, "held_out", **_options(name, i))
            groups.append(targets(task))
        except ImportError as error:
            raise Skip(f"its tasks cannot be made: {error}") from error

    def measured(answers: Answers) -> Measured:
        counted, note = _without_ignored(plan, groups, answers)
        rows: list[Measure] = []
        whole, held = _share(counted, answers), _share(counted, answers, _holds)
        if whole is not None and held is not None:
            if held.value > whole.value:
                note = "; ".join(filter(None, (note, f"{held.value:.0%} hold the answer, with words around it or not")))
            rows.append(measure(name, whole, "share right", least=_BARS.get(name), note=note))
        for together, kinds in _TOGETHER.get(name, {}).items():
            part = _share((group for group in counted if group[0].task.level.startswith(kinds)), answers)
            if part is not None:
                label = f"{name}, {together}"
                rows.append(measure(label, part, "share right", least=_BARS.get(label)))
        for level in dict.fromkeys(group[0].task.level for group in sorted(counted, key=_in_order)):
            part = _share((group for group in counted if group[0].task.level == level), answers)
            if part is not None and level:
                rows.append(measure(f"{name}, {level}", part, "share right", least=_BARS.get(f"{name}, {level}")))
        wrong = [_shown(t, a) for group in counted for t in group if (a := _wrong(t, answers)) is not None]
        return Measured(rows, {"guards": SKILLS[name].guards, "wrong": wrong[:10]})

    return Prepared([t.question for group in groups for t in group], measured)


def _options(name: str, i: int) -> dict[str, Any]:
    """What the i-th task of a skill is made with, so that each kind comes equally often."""
    if name == "needle":
        return {"tokens": _NEEDLE_TOKENS[i % len(_NEEDLE_TOKENS)]}
    if name == "shapes":
        asks = tuple(ASKS)
        return {"ask": asks[i % len(asks)], "count": 1 + i // len(asks) % 2}
    return {}


def _in_order(group: Sequence[Target]) -> tuple[Any, ...]:
    """Levels in the order of the numbers in them."""
    parts = re.split(r"(\d+)", group[0].task.level)
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _wrong(target: Target, answers: Answers) -> Said | None:
    answer = answers(target.question)
    if not isinstance(answer, Said) or _right(target, answer.reply):
        return None
    return answer


def _shown(target: Target, answer: Said) -> dict[str, Any]:
    """A wrong answer beside what was wanted, for whoever wonders why."""
    want = Reply.of(target.task.messages[target.turn])
    asked = target.question.request["messages"][-1]["content"]
    return {
        "asked": asked[-400:] if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)[:400],
        "wanted": _flat(want),
        "got": _flat(answer.reply),
    }


def _flat(reply: Reply) -> str:
    calls = [f"{call.name}({call.arguments})" for call in reply.tool_calls]
    return "\n".join(part for part in (reply.reasoning, reply.content, *calls) if part)[:400]


def _without_ignored(
    plan: Plan, groups: Sequence[Sequence[Target]], answers: Answers
) -> tuple[list[Sequence[Target]], str]:
    """Tasks that count, and why others do not: a server that takes a field and does nothing with it would score 0 for
    what it cannot do. Raises Skip when none is left."""
    if plan.local:
        return list(groups), ""
    said = [(t, a.reply) for group in groups for t in group if isinstance(a := answers(t.question), Said)]
    calls = [reply for t, reply in said if Reply.of(t.task.messages[t.turn]).tool_calls]
    if calls and not any(reply.tool_calls for reply in calls):
        raise Skip(f"none of {len(calls)} replies held a tool call: the server reads none from the text")
    thought = [reply for t, reply in said if t.task.thinking]
    if not thought or any(reply.reasoning for reply in thought):
        return list(groups), ""
    reason = f"none of {len(thought)} replies held reasoning: the server turns no thinking on"
    kept = [group for group in groups if not group[0].task.thinking]
    if not kept:
        raise Skip(reason)
    return kept, f"without thinking; {reason}"


# ---- the needle ladder -----------------------------------------------------------------------------------------------

_SIGHTS = {"": SERVED, ", dense": View(sight="dense"), ", random": View(sight="random")}


def ladder(plan: Plan) -> Prepared:
    """One of four codes, by length and depth: as served and, inside the engine, beside dense and random visibility."""
    if plan.material.lacks:
        raise Skip(plan.material.lacks)
    limit = min(x for x in (plan.sizes.longest, plan.context, LADDER_TOKENS[-1] + _ROOM_TOKENS) if x is not None)
    lengths = [tokens for tokens in LADDER_TOKENS if tokens + (_ROOM_TOKENS if plan.context == limit else 0) <= limit]
    if not lengths:
        raise Skip(f"its shortest text has {LADDER_TOKENS[0]} tokens, the context {limit}")
    tasks: dict[tuple[int, float], list[Task]] = {}
    for tokens in lengths:
        for at in plan.sizes.depths:
            tasks[tokens, at] = [
                SKILLS["needle"].make(
                    plan.random("ladder", tokens, at, i),
                    plan.material,
                    "held_out",
                    tokens=tokens,
                    needles=4,
                    questions=1,
                    depth=at,
                )
                for i in range(plan.sizes.rung)
            ]
    sights = _SIGHTS if plan.local else {"": SERVED}
    cells = {
        (name, *cell): [targets(task, view) for task in some]
        for name, view in sights.items()
        for cell, some in tasks.items()
        if view == SERVED or cell[0] <= _ABLATED_TOKENS
    }

    def measured(answers: Answers) -> Measured:
        rows: list[Measure] = []
        grid: dict[str, dict[str, dict[str, float]]] = {}
        for tokens in lengths:
            for sight in sights:
                of_length = [cells.get((sight, tokens, at), []) for at in plan.sizes.depths]
                found = _share((group for groups in of_length for group in groups), answers)
                if found is None:
                    continue
                least = _LADDER_BARS.get(tokens) if sight == "" else None
                most = 0.10 if sight == ", random" and tokens >= 512 else None
                name = f"needle among {tokens} tokens{sight}"
                rows.append(measure(name, found, "share right", least=least, most=most))
                by_depth = grid.setdefault(sight.removeprefix(", ") or "served", {}).setdefault(str(tokens), {})
                for at, groups in zip(plan.sizes.depths, of_length, strict=True):
                    cell = _share(groups, answers)
                    if cell is not None:
                        by_depth[f"{at:g}"] = cell.value
        said = {tokens: _prompt_tokens(cells, tokens, answers) for tokens in lengths}
        return Measured(rows, {"by depth": grid, "prompt tokens": {str(k): v for k, v in said.items() if v}})

    return Prepared([t.question for groups in cells.values() for group in groups for t in group], measured)


def _prompt_tokens(
    cells: dict[tuple[str, int, float], list[list[Target]]], tokens: int, answers: Answers
) -> float | None:
    """Mean length of a rung's prompts as they were counted by whoever answered."""
    counts = [
        answer.prompt_tokens
        for (sight, length, _), groups in cells.items()
        if sight == "" and length == tokens
        for group in groups
        for target in group
        if isinstance(answer := answers(target.question), Said) and answer.prompt_tokens is not None
    ]
    return sum(counts) / len(counts) if counts else None
