"""The largest steps: as large as the configuration admits, taken before anything is served, and without a trace."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benthic import metrics
from benthic.engine import first_steps
from benthic.engine import llm as llm_module
from benthic.engine.first_steps import Limits
from benthic.engine.llm import LLM
from benthic.engine.runner import Runner
from benthic.errors import OutOfMemory
from benthic.testing.checkpoints import make_tiny
from benthic.types import ImageInput, SamplingParams, StepPlan


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


def blank(tokens: int) -> ImageInput | None:
    """Spans of 10 tokens, or of 4."""
    return ImageInput(0, 10 if tokens >= 10 else 4, "") if tokens >= 4 else None


@pytest.mark.parametrize(
    ("limit", "rows"),
    [
        (math.inf, [(3, 3), (3, 3), (1, 64), (1, 64), (0, 0)]),
        (1000.0, [(3, 3), (3, 3), (1, 32), (1, 64), (1, 32), (0, 0), (1, 64), (0, 0)]),
        (
            25.0,  # twice the time of 32 rows is left for prompts, and three times, which is too little, for images
            [(3, 3), (3, 3), (1, 32), (1, 64), (1, 32), (0, 0)],
        ),
        (15.0, [(3, 3), (3, 3), (1, 32), (1, 32), (0, 0)]),  # half of it is too little for 64 rows
        (1.0, [(3, 3), (3, 3), (1, 32), (1, 32), (0, 0)]),
    ],
)
def test_sizes_of_a_model_that_reads_images(limit: float, rows: list[tuple[int, int]]):
    clock, limits = Clock(), Limits(3, 9, 128, 64, 1000, image_tokens=200)
    assert first_steps.take_largest(clock.run, limits, limit, clock, blank) == max(count for _, count in rows)
    assert clock.rows == rows


@pytest.mark.parametrize(("context", "rows"), [(1000, 200), (90, 200), (90, 7), (7, 7), (90, 3)])
def test_image_rows_reach_the_end_of_the_prompt_and_the_limit(context: int, rows: int):
    limits = Limits(3, 9, 128, 50, context, image_tokens=rows)
    plan = first_steps.image_step(limits, min(5, context), rows, blank)
    if plan is None:
        assert rows < 4
        return
    (chunk,) = plan.chunks
    assert chunk.end == context
    assert [request for request, _ in plan.images] == list(range(len(plan.images)))
    spans = dict(plan.images)[chunk.request]
    assert spans[-1].first + spans[-1].tokens == context
    for _, images in plan.images:
        ends = [0, *(image.first + image.tokens for image in images)]
        assert all(image.first >= end for image, end in zip(images, ends, strict=False))
        assert len({image.digest for image in images}) == min(len(images), 2)
    assert rows - 4 < sum(image.tokens for _, images in plan.images for image in images) <= rows


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


@pytest.mark.parametrize("seconds", [math.inf, 1e-9])
def test_image_rows_are_made_and_let_go_of(tiny: Path, monkeypatch: pytest.MonkeyPatch, seconds: float):
    """All that the configuration admits are kept at a time; when there is no time, a few."""
    kept: list[int] = []
    run = Runner.run

    def watched(self: Runner, plan: StepPlan) -> object:
        result = run(self, plan)
        kept.append(self.image_tokens)
        return result

    monkeypatch.setattr(Runner, "run", watched)
    monkeypatch.setattr(llm_module, "_WORST_SECONDS", seconds)
    read = metrics.REGISTRY.get_sample_value("benthic_images_read_total")
    open_engine(tiny, scheduler__image_tokens=700).close()
    if seconds == math.inf:
        assert 700 - 4 < max(kept) <= 700
    else:
        assert 0 < max(kept) <= 32
    assert kept[-1] == 0
    assert metrics.REGISTRY.get_sample_value("benthic_images_read_total") == read, "nobody asked for these"


@pytest.mark.parametrize("fails", [torch.OutOfMemoryError, MemoryError])
def test_without_room_for_them_no_engine_starts(tiny: Path, monkeypatch: pytest.MonkeyPatch, fails: type[Exception]):
    def too_large(plan: StepPlan) -> None:
        raise fails("no room")

    take: Callable[..., int] = first_steps.take_largest
    monkeypatch.setattr(first_steps, "take_largest", lambda run, *sizes, **more: take(too_large, *sizes, **more))
    with pytest.raises(OutOfMemory, match=r"a step of 64 rows, or of 4 requests at 300 tokens.*lower cache\.bytes"):
        open_engine(tiny)


def test_they_can_be_left_out(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(first_steps, "take_largest", lambda *given, **more: pytest.fail("it was taken"))
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
