"""The cost model: what it learns from steps, what it does not let itself be told, and what it says about chunks."""

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.engine.cost import MEMORY, Coefficients, CostModel, Shape
from benthic.engine.first_steps import Limits, calibrate
from benthic.types import Chunk, Draw, SamplingParams, Score, StepPlan

H200 = Coefficients(fixed=8e-3, decode=1e-4, row=7e-5, context=1e-9, pair=2e-10, logit=2e-6)


def shapes(seed: int, prompts: float = 0.5) -> Shape:
    rng = random.Random(seed)
    decodes = rng.randrange(0, 64)
    rows = rng.randrange(2, 2000) if rng.random() < prompts or not decodes else 0
    start = rng.randrange(0, 60000)
    context = decodes * rng.randrange(100, 60000) + (start + rows if rows else 0)
    return Shape(decodes, rows, context, rows * (start + rows / 2), decodes + (rows and rng.random() < 0.2))


def taught(truth: Coefficients, steps: int, noise: float = 0.0, prompts: float = 0.5) -> CostModel:
    model, true, rng = CostModel(), CostModel(truth), random.Random(1)
    for i in range(steps):
        shape = shapes(i, prompts)
        model.observe(shape, true.seconds(shape) * (1 + noise * rng.uniform(-1, 1)))
        if i == 40:
            model.settle()
    return model


def furthest(model: CostModel, truth: Coefficients, prompts: float = 0.5) -> float:
    true = CostModel(truth)
    return max(
        abs(model.seconds(s) / true.seconds(s) - 1) for s in (shapes(i, prompts) for i in range(10**6, 10**6 + 200))
    )


def test_it_learns_what_steps_cost():
    assert furthest(taught(H200, 300), H200) < 0.02
    assert furthest(taught(H200, 2000, noise=0.1), H200) < 0.08


def test_it_learns_what_a_step_costs_because_no_graph_holds_it():
    """A fifth of a second, whatever its rows are: their own cost is not blamed for it."""
    truth = H200._replace(prompt=0.2)
    model = taught(truth, 2000, noise=0.1)
    assert furthest(model, truth) < 0.08
    assert model.now.prompt == pytest.approx(0.2, rel=0.05)
    assert model.chunk_seconds(0, 1024) == pytest.approx(CostModel(truth).chunk_seconds(0, 1024), rel=0.3)


def test_its_error_is_the_noise_that_is_there():
    assert taught(H200, 2000).error < 0.01
    assert 0.03 < taught(H200, 2000, noise=0.1).error < 0.07  # the mean of |u| for u in [-0.1, 0.1] is 0.05


def test_no_coefficient_falls_below_zero_and_the_rest_is_the_best_there_is():
    """Against every choice of coefficients that are zero, each solved by a library."""
    rng = np.random.default_rng(0)
    terms = np.array([(1.0, *(shape := shapes(i)), float(shape.rows > 0)) for i in range(60)])
    seconds = terms @ np.array([5e-3, 1e-4, 1e-4, -2e-9, 3e-10, 0.0, 2e-3]) * rng.uniform(0.9, 1.1, 60)
    model = CostModel()
    model._products = [[0.0] * 7 for _ in range(7)]
    for row, took in zip(terms, seconds, strict=True):
        model.observe(Shape(*row[1:-1]), took)  # type: ignore[arg-type]
    model._solve(20000)
    keep = (1 - 1 / MEMORY) ** np.arange(59, -1, -1)
    weights = np.sqrt(keep) / seconds

    def loss(c: np.ndarray) -> float:
        return float(np.sum((weights * (terms @ c - seconds)) ** 2))

    best = np.inf
    for count in range(1, 8):
        for kept in combinations(range(7), count):
            scale = np.abs(terms[:, kept]).max(0)
            part = np.linalg.lstsq(weights[:, None] * terms[:, kept] / scale, weights * seconds, rcond=None)[0] / scale
            if (part >= 0).all():
                c = np.zeros(7)
                c[list(kept)] = part
                best = min(best, loss(c))
    assert min(model.now) >= 0.0
    assert loss(np.array(model.now)) <= best * 1.001


def test_a_stalled_machine_is_forgotten():
    model = taught(H200, 400, noise=0.05)
    shape = Shape(32, 0, 32000, 0, 32)
    before = model.seconds(shape)
    assert model.observe(shape, 100 * before) == pytest.approx(99)
    for i in range(32):
        model.observe(shapes(i), CostModel(H200).seconds(shapes(i)))
    assert model.seconds(shape) == pytest.approx(before, rel=0.03)


def test_a_machine_that_stays_slow_is_believed():
    model = taught(H200, 400, noise=0.05)
    slow = Coefficients(*(3 * c for c in H200))
    for i in range(1500):
        model.observe(shapes(i), CostModel(slow).seconds(shapes(i)))
    assert furthest(model, slow) < 0.1


def test_what_no_step_shows_stays_known():
    model = taught(H200, 400)
    for i in range(5000):
        shape = shapes(i, prompts=0.0)
        shape = shape._replace(decodes=max(shape.decodes, 1), rows=0, pairs=0.0)
        model.observe(shape, CostModel(H200).seconds(shape))
    assert furthest(model, H200, prompts=1.0) < 0.05


@settings(deadline=None)
@given(
    st.builds(
        Coefficients,
        row=st.floats(1e-7, 1e-2),
        context=st.sampled_from([0.0, 1e-9, 1e-6]),
        pair=st.sampled_from([0.0, 1e-12, 1e-9, 1e-7]),
    ),
    st.floats(1e-6, 10.0),
    st.integers(0, 10**6),
)
def test_rows_within_is_the_most_that_fits(coefficients: Coefficients, seconds: float, start: int):
    model = CostModel(coefficients)
    rows = model.rows_within(seconds, start)
    if rows:
        assert model.chunk_seconds(start, rows) <= seconds * (1 + 1e-6)
    assert model.chunk_seconds(start, rows + 1) >= seconds * (1 - 1e-6)


def test_rows_within_no_time_and_any_time():
    model = CostModel(H200)
    assert model.rows_within(0.0, 0) == model.rows_within(-1.0, 5) == 0
    assert model.rows_within(float("inf"), 5) >= 10**9
    assert CostModel(Coefficients(row=0.0)).rows_within(1.0, 0) >= 10**9


def test_a_shape_counts_what_a_plan_holds():
    def chunk(start: int, rows: int) -> Chunk:
        return Chunk(1, start, (5,) * rows, 0, rows == 1, 1, (1,))

    params = SamplingParams()
    plan = StepPlan(
        1,
        (chunk(40, 1), chunk(9, 1), chunk(100, 6)),
        (Draw(params, 0, (), None, 3),) * 2,
        ((2, Score(1, (7, 7, 7), 1)),),
    )
    pairs = sum(position + 0.5 for position in range(100, 106))  # a row's own position counts half
    assert Shape.of(plan) == (2, 6, 41 + 10 + 106, pairs, 2 + 3)


class Machine:
    """Takes as long as the coefficients say, on a clock of its own."""

    def __init__(self, truth: Coefficients):
        self.truth, self.now, self.plans = CostModel(truth), 0.0, list[StepPlan]()

    def clock(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        first = sum(Shape.of(p) == Shape.of(plan) for p in self.plans) == 1
        self.now += self.truth.seconds(Shape.of(plan)) * (1.7 if first else 1.0)


@pytest.mark.parametrize("slots", [1, 2, 32, 256])
@pytest.mark.parametrize("blocks", [1, 4, 600])
@pytest.mark.parametrize("prompt", [0.0, 0.05])
def test_steps_at_start_tell_what_others_will_cost(slots: int, blocks: int, prompt: float):
    machine, model = Machine(H200._replace(prompt=prompt)), CostModel()
    calibrate(model, machine.run, Limits(slots, blocks, 128, 2048, 65536), limit_seconds=5.0, clock=machine.clock)
    assert model.ready
    for plan in machine.plans:
        assert plan.tokens <= 2048
        assert [c.end for c in plan.drawn] == [c.start + 1 for c in plan.chunks if c.sample]
        assert len(plan.drawn) == len(plan.draws)
        for c in plan.chunks:
            assert 1 <= c.slot <= slots
            assert max(c.blocks) <= blocks
            assert len(c.blocks) * 128 >= c.start + len(c.tokens)
            assert c.start + len(c.tokens) <= 65536
    prompts = Shape(1, 30, 200, 450, 1) if slots > 1 else Shape(0, 30, 30, 450, 0)  # one slot has not both
    for shape in (Shape(1, 0, 100, 0, 1), Shape(slots, 0, 100 * slots, 0, slots), prompts):
        assert model.seconds(shape) == pytest.approx(machine.truth.seconds(shape), rel=0.05)


def test_steps_at_start_end_in_time():
    machine, model = Machine(Coefficients(*(100 * c for c in H200))), CostModel()
    calibrate(model, machine.run, Limits(32, 600, 128, 4096, 65536), clock=machine.clock)
    assert model.ready
    assert machine.now <= 0.5 + 1.7 * 1.0  # the first step's cost is not known before
