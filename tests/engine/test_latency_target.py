"""How much of a prompt goes into a step beside decode rows: as much as the latency target allows, and no less."""

import random

import pytest

from benthic.engine.cost import Coefficients, CostModel, Shape
from benthic.engine.loop import Loop
from benthic.types import Request, StepPlan
from tests.engine.fake import expected, fake_loop, greedy
from tests.engine.test_scheduler import drive, prompt, tokens_of

COST = Coefficients(fixed=4e-3, decode=1e-3, row=1e-4, context=1e-6, pair=2e-7, logit=1e-4)


def world(**scheduler: float) -> tuple[Loop, list[StepPlan]]:
    """A loop whose steps are noted, beside what it knows about their cost."""
    loop = fake_loop(blocks=400, slots=9, budget=120, scheduling={"cost": CostModel(COST), **scheduler})
    plans: list[StepPlan] = []
    start = loop.runner.start

    def noted(plan: StepPlan):
        plans.append(plan)
        return start(plan)

    loop.runner.start = noted  # type: ignore[method-assign]
    loop._learn = lambda plan, seconds: None  # type: ignore[method-assign]
    return loop, plans


def without_prompts(plan: StepPlan) -> float:
    ones = [chunk for chunk in plan.chunks if len(chunk.tokens) == 1]
    return CostModel(COST).seconds(Shape(len(ones), 0, sum(c.start + 1 for c in ones), 0, len(ones)))


def run_mixed(loop: Loop, decodes: int = 4) -> list[Request]:
    """Requests that decode, then a long prompt and a short one behind it."""
    requests = [Request(i, prompt(3, i), greedy(max_tokens=60, ignore_eos=True), seed=i) for i in range(decodes)]
    requests += [Request(8, prompt(330, 8), greedy(max_tokens=3, ignore_eos=True), seed=8)]
    requests += [Request(9, prompt(40, 9), greedy(max_tokens=3, ignore_eos=True), seed=9)]
    for request in requests[:decodes]:
        loop.inbox.put(request)
    loop.step()
    for request in requests[decodes:]:
        loop.inbox.put(request)
    events = drive(loop)
    for request in requests:
        assert tokens_of(events[request.id, 0]) == expected(request, 0)
    return requests


@pytest.mark.parametrize(
    "target", [{"itl_stretch": 1.5}, {"itl_seconds": 12e-3}, {"itl_seconds": 14e-3, "itl_stretch": 9.0}]
)
def test_a_step_with_decode_rows_takes_what_the_target_allows_and_no_row_less(target: dict[str, float]):
    loop, plans = world(**target)
    run_mixed(loop)
    mixed = 0
    for plan in plans:
        long = [chunk for chunk in plan.chunks if len(chunk.tokens) > 1]
        if not long or len(long) == len(plan.chunks):
            continue
        if any(len(c.tokens) == 1 and c.start < {8: 330, 9: 40}.get(c.request, 0) for c in plan.chunks):
            continue  # one row of a prompt, which costs what a decode row does
        most = target.get("itl_seconds") or target["itl_stretch"] * without_prompts(plan)
        rows = sum(len(chunk.tokens) for chunk in long)
        shape = Shape.of(plan)
        took = CostModel(COST).seconds(shape._replace(logits=len(plan.chunks) - len(long)))
        assert took <= most * (1 + 1e-9) or rows <= 16
        last = long[-1]
        if last.start + len(last.tokens) < 330 and not last.sample:
            mixed += 1
            more = CostModel(COST).chunk_seconds(last.start, len(last.tokens) + 1)
            more -= CostModel(COST).chunk_seconds(last.start, len(last.tokens))
            assert took + more > most or plan.tokens == 120
    assert mixed > 3


def test_a_prompt_goes_on_whatever_the_target_is():
    loop, plans = world(itl_seconds=1e-9, prefill_floor=5)
    run_mixed(loop)
    chunks = [len(c.tokens) for plan in plans for c in plan.chunks if c.request == 8 and c.start + len(c.tokens) <= 330]
    assert sum(chunks) == 330
    beside_decodes = [n for n in chunks if n <= 5]
    assert beside_decodes.count(5) > 10


def test_what_no_step_with_a_prompt_can_do_without_is_no_reason_for_short_chunks():
    """Where no graph holds such a step it takes ten times as long, with one row or with a hundred."""
    rows: list[float] = []
    for extra in (0.0, 0.1):
        loop, plans = world(itl_stretch=1.5, cost=CostModel(COST._replace(prompt=extra)))  # type: ignore[arg-type]
        run_mixed(loop)
        chunks = [[len(c.tokens) for c in plan.chunks if len(c.tokens) > 1] for plan in plans]
        beside = [sum(some) for some, plan in zip(chunks, plans, strict=True) if some and len(some) < len(plan.chunks)]
        rows.append(sum(beside) / len(beside))
    assert rows[0] < 50
    assert rows[1] > 80


def test_without_decode_rows_a_prompt_gets_the_whole_budget():
    loop, plans = world(itl_seconds=1e-9)
    loop.inbox.put(Request(1, prompt(330), greedy(max_tokens=1), seed=0))
    drive(loop)
    assert [plan.tokens for plan in plans] == [120, 120, 90]


def test_without_a_target_or_without_knowledge_the_budget_is_the_limit():
    for settings in ({}, {"itl_seconds": 1e-9, "cost": None}):
        loop = fake_loop(blocks=400, slots=9, budget=120, scheduling={"cost": CostModel(COST), **settings})
        loop.inbox.put(Request(1, prompt(3), greedy(max_tokens=40, ignore_eos=True), seed=0))
        loop.step()
        loop.inbox.put(Request(2, prompt(200), greedy(max_tokens=2), seed=0))
        loop.step()
        assert loop.times[-1].tokens == 120


@pytest.mark.parametrize(("slowdown", "waited"), [(5.0, 1.0), (5.0, 4.0), (1.0, 4.0), (0.0, 4.0)])
def test_a_prompt_that_takes_too_long_makes_the_target_give_way(slowdown: float, waited: float):
    """By as much as it is late: what it may take is so many times what it takes alone, and two seconds."""
    loop, plans = world(itl_stretch=1.5, prompt_slowdown=slowdown)
    now = 0.0
    loop.clock = lambda: now
    loop.inbox.put(Request(1, prompt(3, 1), greedy(max_tokens=90, ignore_eos=True), 0))
    loop.step()
    loop.inbox.put(Request(2, prompt(350, 2), greedy(max_tokens=3), 0))
    loop.step()
    now = waited
    loop.step()
    (chunk,) = [chunk for chunk in plans[-1].chunks if chunk.request == 2]
    took = CostModel(COST).seconds(Shape.of(plans[-1]))
    base = without_prompts(plans[-1])
    late = max(waited / (2.0 + slowdown * CostModel(COST).chunk_seconds(0, 350)), 1.0) if slowdown else 1.0
    assert (late > 1.5) == (waited == 4.0 and slowdown > 0)
    one_more = CostModel(COST).chunk_seconds(chunk.start, len(chunk.tokens) + 1)
    one_more -= CostModel(COST).chunk_seconds(chunk.start, len(chunk.tokens))
    assert took <= 1.5 * late * base
    assert took + one_more > 1.5 * late * base


def test_a_prompt_that_waited_for_a_slot_is_not_late():
    loop, plans = world(itl_stretch=1.5, prompt_slowdown=1.0)
    now = 0.0
    loop.clock = lambda: now
    for i in range(8):
        loop.inbox.put(Request(i, prompt(3, i), greedy(max_tokens=2 if not i else 90, ignore_eos=True), 0))
    loop.inbox.put(Request(8, prompt(350, 8), greedy(max_tokens=3), 0))
    loop.inbox.put(Request(9, prompt(4, 9), greedy(max_tokens=3), 0))  # waits for a slot all the time
    while not any(chunk.request == 8 for plan in plans for chunk in plan.chunks):
        loop.step()
        now += 50.0
    loop.step()
    assert [chunk.request for chunk in plans[-1].chunks].count(8) == 1
    assert CostModel(COST).seconds(Shape.of(plans[-2])) <= 1.5 * without_prompts(plans[-2])
    now += 100.0  # since it began, that is
    loop.step()
    assert loop.scheduler.waiting == 1
    assert CostModel(COST).seconds(Shape.of(plans[-1])) > 1.5 * without_prompts(plans[-1])


class Whims(CostModel):
    """Predictions that change with every question, as a clock's do."""

    def __init__(self, seed: int):
        super().__init__(COST)
        self.random = random.Random(seed)

    def rows_within(self, seconds: float, start: int) -> int:
        return self.random.randrange(1, 60)


@pytest.mark.parametrize("grid", [1, 4, 16])
def test_chunks_end_on_the_grid_whatever_the_clock_says_and_answers_are_the_same(grid: int):
    ends: set[tuple[int, ...]] = set()
    for seed in range(4):
        loop, plans = world(itl_stretch=1.5, grid=grid)
        loop.scheduler.cost = Whims(seed)
        run_mixed(loop)
        chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.request == 8 and not chunk.sample]
        for chunk in chunks:
            end = chunk.start + len(chunk.tokens)
            step = grid
            while chunk.start + len(chunk.tokens) - chunk.start < step and end % step:
                step //= 2  # fewer rows than a cell of the grid: a finer one
            assert end % step == 0
        ends.add(tuple(chunk.start + len(chunk.tokens) for chunk in chunks))
    assert len(ends) > 1
