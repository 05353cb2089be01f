"""The largest steps: as large as the configuration admits, taken before anything is served, and without a trace."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benthic.engine import first_steps
from benthic.engine.first_steps import Limits
from benthic.engine.llm import LLM
from benthic.errors import OutOfMemory
from benthic.testing.checkpoints import make_tiny
from benthic.types import SamplingParams, StepPlan


class Clock:
    """Each row takes a tenth of a second, a step another tenth."""

    def __init__(self) -> None:
        self.now, self.rows = 0.0, list[tuple[int, int]]()  # chunks and rows of each step

    def __call__(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> None:
        self.rows.append((len(plan.chunks), plan.tokens))
        self.now += 0.1 + 0.1 * plan.tokens


@pytest.mark.parametrize(
    ("limit", "budget", "rows"),
    [
        (math.inf, 1024, [(3, 3), (3, 3), (1, 1000)]),  # the context is shorter
        (math.inf, 64, [(3, 3), (3, 3), (1, 64)]),
        (math.inf, 8, [(3, 3), (3, 3), (1, 8)]),
        (100.0, 1024, [(3, 3), (3, 3), (1, 32), (1, 512)]),
        (1.0, 1024, [(3, 3), (3, 3), (1, 32)]),
        (1.0, 20, [(3, 3), (3, 3), (1, 20)]),
        (0.7, 1024, [(3, 3), (1, 32)]),  # nothing but what is taken in any case
    ],
)
def test_sizes(limit: float, budget: int, rows: list[tuple[int, int]]):
    clock = Clock()
    largest = first_steps.take_largest(clock.run, Limits(3, 9, 128, budget, 1000), limit, clock)
    assert clock.rows == rows
    assert largest == max(count for _, count in rows)


def test_what_steps_hold():
    limits = Limits(3, 9, 128, 1024, 300)
    decodes = first_steps.decode_steps(limits)
    assert [[chunk.start + 1 for chunk in plan.chunks] for plan in decodes] == [[300] * 3] * 2
    assert [chunk.slot for chunk in decodes[0].chunks] == [1, 2, 3]
    assert {chunk.blocks for plan in decodes for chunk in plan.chunks} == {(1, 2, 3)}
    assert all(len(draw.context or ()) == 300 for draw in decodes[0].draws)
    largest = decodes[0].draws[0].params
    largest.validate(61)
    plain = SamplingParams()
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "banned_ids", "logprobs"):
        assert getattr(largest, name) != getattr(plain, name), name
    (chunk,) = first_steps.prompt_step(limits, 200).chunks
    assert (chunk.start, len(chunk.tokens), chunk.blocks) == (100, 200, (1, 2, 3))
    ((_, score),) = first_steps.prompt_step(limits, 200).scores
    assert len(score.targets) == 199
    assert first_steps.prompt_step(limits._replace(max_context_tokens=1), 1).scores == ()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("worst") / "tiny", max_position_embeddings=300)


def open_engine(tiny: Path, **settings: Any) -> LLM:
    small = {"scheduler__max_running": 4, "scheduler__token_budget": 64, "cache__blocks": 6, "cpu__threads": 1}
    return LLM(tiny, scheduler__worst_first=True, **{**small, **settings})


@pytest.mark.parametrize("settings", [{}, {"scheduler__ahead": "on"}, {"scheduler__max_context_tokens": 1}])
def test_an_engine_answers_after_them_as_without(tiny: Path, settings: dict[str, Any]):
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    prompts = [[7], [9]] if "scheduler__max_context_tokens" in settings else [[7, 8, 9], list(range(5, 145))]
    with LLM(tiny, scheduler__max_running=4, cache__blocks=6, cpu__threads=1) as llm:
        want = [done.token_ids for done in llm.generate(prompts, greedy)]
    with open_engine(tiny, **settings) as llm:
        got = [done.token_ids for done in llm.generate(prompts, greedy)]
        llm.loop.scheduler.check_invariants()
    assert got == [ids[: len(found)] for ids, found in zip(want, got, strict=True)]


@pytest.mark.parametrize("fails", [torch.OutOfMemoryError, MemoryError])
def test_without_room_for_them_no_engine_starts(tiny: Path, monkeypatch: pytest.MonkeyPatch, fails: type[Exception]):
    def too_large(plan: StepPlan) -> None:
        raise fails("no room")

    take: Callable[..., int] = first_steps.take_largest
    monkeypatch.setattr(first_steps, "take_largest", lambda run, *sizes: take(too_large, *sizes))
    with pytest.raises(OutOfMemory, match=r"a step of 64 rows, or of 4 requests at 300 tokens.*lower cache\.bytes"):
        open_engine(tiny)


def test_they_can_be_left_out(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(first_steps, "take_largest", lambda run, *sizes: pytest.fail("it was taken"))
    LLM(tiny, scheduler__worst_first=False, scheduler__max_running=4, cpu__threads=1).close()


@pytest.mark.gpu
def test_nothing_is_first_allocated_in_service():
    """The allocator's reserve is the same after as many long requests as run together, with everything asked for."""
    settings = replace(first_steps.LARGE, max_tokens=8, receipt=False)
    with LLM("minnow", device="cuda", scheduler__worst_first=True, scheduler__max_running=8) as llm:
        reserved = torch.cuda.memory_reserved()
        for _ in range(2):
            prompts = [[100 + i] * 3000 for i in range(8)]
            llm.generate(prompts, settings, progress=False)
        assert torch.cuda.memory_reserved() == reserved
