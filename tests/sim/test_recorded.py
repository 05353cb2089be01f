"""A trace answered by the engine and its simulation: on a machine that is as linear as the model of it they are one."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benthic.config import Config, CpuConfig, SchedulerConfig
from benthic.engine import first_steps
from benthic.engine.cost import Coefficients, CostModel, Shape
from benthic.engine.llm import LLM, build_scheduler
from benthic.engine.loop import Loop
from benthic.errors import BenchError, PromptTooLong
from benthic.sim import recorded, trace
from benthic.sim.engine import Machine, Outcome, simulate
from benthic.sim.policies import Policy, World
from benthic.sim.recorded import Recording, machine_of, record, spelt
from benthic.sim.scenarios import measures
from benthic.sim.trace import Arrival, Lengths
from benthic.testing.checkpoints import make_tiny
from benthic.types import StepPlan, StepResult
from tests.engine.fake import VOCAB, FakeModel

COSTS = Coefficients(fixed=8e-3, decode=4e-4, row=2e-4, context=1e-7, pair=2e-8, logit=1e-4)
WORDS = list(range(10, VOCAB))


def test_prompts_that_begin_alike_still_do():
    first = Arrival(0.0, ((1, 40), (2, 9)), 5, 77, "chat", "a", 2, 3.0)
    second = Arrival(1.0, ((1, 40), (3, 9)), 6, 78)
    third = Arrival(2.0, ((1, 12),), 7, 79)
    found = spelt([first, second, third], WORDS)
    ids = [arrival.ids() for arrival in found]
    assert [len(each) for each in ids] == [49, 49, 12]
    assert ids[0][:40] == ids[1][:40]
    assert ids[0][40:] != ids[1][40:]
    assert ids[0][:12] == ids[2]
    assert len(set(ids[0])) > 15
    assert {token for each in ids for token in each} <= set(WORDS)
    one = found[0]
    assert (one.at, one.output, one.kind, one.tenant, one.priority, one.patience) == (0.0, 5, "chat", "a", 2, 3.0)


class Virtual:
    """A clock, and a runner whose steps take on it what the coefficients say."""

    def __init__(self) -> None:
        self.now, self.cost = 100.0, CostModel(COSTS)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + 1e-9  # a clock that did not move would be asked for ever

    def run(self, plan: StepPlan) -> StepResult:
        self.now += self.cost.seconds(Shape.of(plan))
        return StepResult([WORDS[0]] * len(plan.draws))

    def start(self, plan: StepPlan) -> Any:
        result = self.run(plan)
        return lambda: result

    def close(self) -> None: ...


def arrivals(seed: int) -> list[Arrival]:
    chats = trace.poisson(seed, seconds=20, rate=1.5, lengths=Lengths(60, 40, 300))
    return spelt(trace.merged(chats, trace.long_prompts(seed, seconds=20, every=7, tokens=900)), WORDS)


def stand(monkeypatch: pytest.MonkeyPatch, machine: Virtual) -> tuple[Any, Policy, World]:
    """An engine on a virtual clock, and what simulates it."""
    model: Any = FakeModel(2000)
    config = Config(scheduler=SchedulerConfig(max_running=6, token_budget=128))
    scheduler = build_scheduler(model, config, CostModel())
    limits = first_steps.Limits(6, scheduler.cache.blocks.usable, 128, 128, 2000)
    first_steps.calibrate(scheduler.cost, machine.run, limits, clock=lambda: machine.now)
    monkeypatch.setattr("benthic.engine.loop.perf_counter", lambda: machine.now)
    monkeypatch.setattr("time.sleep", machine.sleep)
    loop = Loop(scheduler, machine, clock=lambda: machine.now)
    world = World(6, scheduler.cache.blocks.usable, 128, 2000, model.windows)
    return SimpleNamespace(loop=loop), Policy("again", lambda _, cost: build_scheduler(model, config, cost)), world


def test_on_a_linear_machine_the_simulation_is_the_run(monkeypatch: pytest.MonkeyPatch):
    machine = Virtual()
    llm, policy, world = stand(monkeypatch, machine)
    wanted = arrivals(3)
    recording = record(llm, wanted)
    assert llm.loop.runner is machine
    fitted = machine_of("virtual", recording)
    assert fitted.host == 0.0
    assert max(map(abs, fitted.errors)) < 1e-3  # as far as the descent goes
    again = simulate(wanted, policy, world, fitted)
    lives = zip(recording.outcome.lives, again.lives, strict=True)
    assert all(len(a.tokens) == a.arrival.output and a.error is None for a in recording.outcome.lives)
    assert all(a.tokens == pytest.approx(b.tokens, abs=2e-3) for a, b in lives)
    got, want = measures(recording.outcome), measures(again)
    assert got == pytest.approx(want | {"cost_error": got["cost_error"]}, rel=1e-2, abs=1e-2)
    assert (got["steps"], recording.outcome.rows) == (want["steps"], again.rows)
    assert len(recording.steps) == recording.outcome.steps > 300


def test_what_is_beside_steps_is_the_hosts(monkeypatch: pytest.MonkeyPatch):
    machine = Virtual()
    llm, policy, world = stand(monkeypatch, machine)
    commit = llm.loop.scheduler.commit

    def slow(*arguments: Any) -> Any:
        machine.now += 3e-3
        return commit(*arguments)

    monkeypatch.setattr(llm.loop.scheduler, "commit", slow)
    recording = record(llm, arrivals(4))
    fitted = machine_of("virtual", recording)
    assert fitted.host == pytest.approx(3e-3)
    assert max(map(abs, fitted.errors)) < 1e-2
    again = simulate(arrivals(4), policy, world, fitted)
    assert again.seconds == pytest.approx(recording.outcome.seconds, rel=0.01)


def shapes(count: int) -> list[Shape]:
    rng = random.Random(0)
    return [Shape(n := rng.randrange(1, 9), rng.choice((0, 0, 64)), rng.randrange(5000), 0.0, n) for _ in range(count)]


def test_all_steps_weigh_alike():
    """A thousand steps of a slow machine and a thousand of a fast one: the fit is between both, and so are errors."""
    cost = CostModel(COSTS)
    seen = shapes(2000)
    steps = [(shape, cost.seconds(shape) * (0.9 if i < 1000 else 1.1)) for i, shape in enumerate(seen)]
    fitted = machine_of("", Recording(Outcome("", []), steps, 0.0))
    assert all(fitted.cost.seconds(shape) == pytest.approx(cost.seconds(shape), rel=0.03) for shape in seen)
    assert fitted.errors[0] == pytest.approx(-0.1, abs=0.03)
    assert fitted.errors[-1] == pytest.approx(0.1, abs=0.03)
    with pytest.raises(BenchError, match="no requests"):
        machine_of("", Recording(Outcome("", []), [], 0.0))


def test_steps_are_off_by_what_others_were_off_by():
    model: Any = FakeModel(2000)
    policy = Policy("again", lambda _, cost: build_scheduler(model, Config(), cost))
    world = World(4, 60, 128, 2000, model.windows)
    machine = Machine("", CostModel(Coefficients(fixed=0.01, decode=0.0, row=0.0)), errors=(0.5,), host=1e-3)
    life = simulate([Arrival(0.0, ((20, 1),) * 5, 4, 20)], policy, world, machine).lives[0]
    assert life.ttft == pytest.approx(0.016)
    assert life.gaps == pytest.approx([0.016] * 3)
    mixed = Machine("", machine.cost, errors=(0.0, 1.0), host=0.0)
    gaps = simulate([Arrival(0.0, ((20, 1),) * 5, 400, 20)], policy, world, mixed).lives[0].gaps
    assert {round(gap, 6) for gap in gaps} == {0.01, 0.02}
    assert 0.4 < sum(gap > 0.015 for gap in gaps) / len(gaps) < 0.6
    assert sum(a == pytest.approx(b) for a, b in pairwise(gaps)) < 20  # they alternate, but where a piece ends


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = make_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")
    return Config(model=str(folder), cpu=CpuConfig(threads=1))


def test_the_engine_answers_a_trace(tiny: Config):
    made = trace.poisson(1, seconds=1.0, rate=8.0, lengths=Lengths(30, 12, 60))
    found = recorded.run(tiny, "little", lambda: made, repeats=2)
    assert found["trace"] == {
        "name": "little",
        "requests": len(made),
        "prompt_tokens": sum(arrival.prompt_tokens for arrival in made),
        "output_tokens": sum(arrival.output for arrival in made),
    }
    for told in (found["recorded"], *found["simulated"]):
        assert told["unanswered"] == 0
        assert told["requests"] == len(made)
        assert 0 < told["itl_p50"] <= told["itl_p99"] <= told["itl_max"]
        assert 0 < told["ttft_p50"] <= told["ttft_p99"]
    assert found["recorded"]["steps"] >= max(arrival.output for arrival in made)
    assert len(found["simulated"]) == 2
    by_name = {m["name"]: m for m in found["measures"]}
    assert by_name["ITL p50"]["value"] == 1e3 * found["recorded"]["itl_p50"]
    assert all(m["low"] <= m["estimate"] <= m["high"] for m in found["measures"])
    assert found["machine"]["coefficients"].keys() == Coefficients()._asdict().keys()
    text = recorded.table(found)
    assert "TTFT p99, s" in text
    assert f"{len(made)} requests" in text


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_a_recording_is_what_the_engine_did(tiny: Config, ahead: str):
    made = [Arrival(0.05 * i, ((i, 20 + i),), 3 + i, 0) for i in range(5)]
    with LLM(config=replace(tiny, scheduler=SchedulerConfig(ahead=ahead))) as llm:
        words = list(range(3, 500))
        recording = record(llm, spelt(made, words))
        lives, seconds = recording.outcome.lives, recording.outcome.seconds
        assert [len(life.tokens) for life in lives] == [3, 4, 5, 6, 7]
        for life in lives:
            assert life.arrival.at <= cast(float, life.begun) < life.tokens[0]
            assert life.tokens == sorted(life.tokens)
            assert life.ended == life.tokens[-1] <= seconds
        assert sum(shape.rows + shape.decodes for shape, _ in recording.steps) == recording.outcome.rows
        assert recording.outcome.rows == sum(20 + i + 3 + i - 1 for i in range(5))
        assert 0 < sum(took for _, took in recording.steps) <= seconds


def test_a_request_that_does_not_fit_is_refused_before_the_run(tiny: Config):
    with pytest.raises(PromptTooLong):
        recorded.run(tiny, "long", lambda: [Arrival(0.0, ((1, 10**6),), 1, 0)])


def test_the_picture(tmp_path: Path):
    tails = {"recorded": [(1.0, 0.01), (0.1, 0.02)], "simulated": [(1.0, 0.01), (0.1, 0.03)]}
    found = {
        "machine": {"name": "m"},
        "trace": {"name": "t"},
        "tails": {"gap": tails, "first": {"recorded": [], "simulated": tails["simulated"]}},
    }
    assert recorded.picture(found, tmp_path / "a" / "b.png").read_bytes()[:4] == b"\x89PNG"
