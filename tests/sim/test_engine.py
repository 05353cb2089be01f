"""The simulation: its clock against a count by hand, what it must never do, and what is asked of the scheduler."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benthic.cache.replay import Windows
from benthic.engine.cost import Coefficients, CostModel, Shape
from benthic.sim import run, trace
from benthic.sim.engine import HOST_SECONDS, Machine, simulate
from benthic.sim.policies import World, fixed, ours, prefill_first, strict
from benthic.sim.scenarios import H200, H200_RANK, SCENARIOS, jain, measures, quantile, tail
from benthic.sim.trace import Arrival

ROOT = Path(__file__).parents[2]
WORLD = World(slots=4, blocks=400, token_budget=1000, context=20000, windows=Windows(128, 2, 2), snapshots=8)
EXACT = Machine("exact", CostModel(Coefficients(fixed=0.01, decode=0.001, row=1e-4)), noise=0.0, stall=0.0)


def test_one_request_takes_what_its_steps_take():
    arrival = Arrival(5.0, ((1, 2500),), 4, 9)
    life = simulate([arrival], fixed(1000), WORLD, EXACT).lives[0]
    first = 4 * (0.01 + HOST_SECONDS) + 2500 * 1e-4  # 1000, 1000, 432 up to the last whole block, 68
    assert life.begun == 5.0
    assert life.ttft == pytest.approx(first)
    assert life.gaps == pytest.approx([0.011 + HOST_SECONDS] * 3)
    assert life.ended == life.tokens[-1]


def test_a_turn_finds_what_the_one_before_it_said():
    first = Arrival(0.0, ((1, 1280),), 128 * 10, 9)
    second = Arrival(100.0, ((1, 1280), (9, 1280), (2, 10)), 3, 8)
    lives = simulate([first, second], ours(), WORLD, EXACT).lives
    assert lives[0].cached == 0
    assert lives[1].cached == 1280 + 1280 - 128  # the last token of an answer is not computed, and so neither its block


def test_prefill_first_lets_decode_rows_wait():
    chat = Arrival(0.0, ((1, 10),), 200, 9)
    long = Arrival(0.5, ((2, 6000),), 1, 8)
    for policy, most in ((prefill_first(), 6 * 0.11), (fixed(100), 0.021), (ours(itl_stretch=1.5), 0.0166)):
        life = simulate([chat, long], policy, WORLD, EXACT).lives[0]
        assert max(life.gaps) == pytest.approx(most + 0.0, rel=0.05)


@pytest.mark.parametrize("policy", [ours(), fixed(256), fixed(1000), prefill_first()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("blocks", [130, 400])
def test_every_request_is_answered_whole_and_in_time(policy, blocks: int):
    rng = random.Random(blocks)
    arrivals = trace.merged(
        trace.poisson(1, seconds=30, rate=1.5, lengths=trace.Lengths(200, 60, 4000)),
        trace.long_prompts(2, seconds=30, every=8, tokens=9000),
    )
    machine = Machine("noisy", EXACT.cost, noise=0.2, stall=0.01)
    outcome = simulate(arrivals, policy, WORLD._replace(blocks=blocks), machine, rng.randrange(99))
    for life in outcome.lives:
        assert life.error is None
        assert len(life.tokens) == life.arrival.output
        assert life.arrival.at <= life.begun <= life.tokens[0]
        assert all(a < b for a, b in pairwise(life.tokens))
    assert outcome.rows >= sum(life.arrival.prompt_tokens - life.cached for life in outcome.lives)
    again = simulate(arrivals, policy, WORLD._replace(blocks=blocks), machine, random.Random(blocks).randrange(99))
    assert [life.tokens for life in again.lives] == [life.tokens for life in outcome.lives]


def test_long_prompts_do_not_double_the_latency_of_the_others():
    machine = Machine("H200 rank", CostModel(H200_RANK))
    chosen = [scenario for scenario in SCENARIOS if scenario.name in ("chat", "long prompts")]
    found = run.run(H200._replace(fixed=(2048,)), machine, chosen, seconds=40)
    assert [verdict["verdict"] for verdict in found["measures"]] == ["met"] * 3
    p99 = {(e["scenario"], e["policy"]): e["measures"]["itl_p99"] for e in found["runs"]}
    assert p99["long prompts", "ours"] <= 2 * p99["chat", "ours"]
    assert p99["long prompts", "fixed 2048"] > 2 * p99["long prompts", "ours"]
    assert all(e["measures"]["unanswered"] == 0 for e in found["runs"])


def test_a_low_priority_waits_no_longer_than_the_bound():
    """Chats for four times what there is time for; the batch requests beside them begin all the same."""
    chats = trace.poisson(1, seconds=150, rate=6.0, lengths=trace.Lengths(100, 60, 1000))
    batch = [replace(one, priority=2) for one in trace.poisson(1, seconds=100, rate=0.1, kind="batch")]
    waits = {}
    for policy in (ours(), strict()):
        lives = simulate(trace.merged(chats, batch), policy, WORLD, EXACT).lives
        waits[policy.name] = max(life.begun - life.arrival.at for life in lives if life.arrival.kind == "batch")
    longest = 1100 * 0.012  # s, until one of four slots is free
    assert waits["ours"] <= (2 + 1) * 30.0 + longest
    assert waits["strict"] > 2 * waits["ours"]


def test_what_is_said_of_a_run():
    outcome = simulate([Arrival(0.0, ((1, 10),), 50, 9), Arrival(0.1, ((2, 10),), 5, 8, "b")], ours(), WORLD, EXACT)
    found = measures(outcome)
    gaps = sorted(gap for life in outcome.lives for gap in life.gaps)
    assert found["itl_max"] == gaps[-1]
    assert found["itl_p50"] == gaps[len(gaps) // 2]
    assert found["output_tokens_per_second"] == pytest.approx(55 / outcome.seconds)
    assert found["ttft_b_p99"] == outcome.lives[1].ttft
    points = tail(gaps[::-1], 10, least=1e-3)
    assert points[0] == (1.0, pytest.approx(gaps[0], rel=1e-3))
    assert points[-1] == (0.001, pytest.approx(gaps[-1], rel=1e-3))
    assert all(sum(gap >= at * 0.999 for gap in gaps) / len(gaps) >= share * 0.99 for share, at in points)
    assert tail([]) == []
    assert (quantile([], 0.5), quantile([3.0, 1.0, 2.0], 0.99), quantile([1.0, 2.0], 0.0)) == (0.0, 3.0, 1.0)
    assert (jain([1, 1, 1]), jain([0, 0, 5]), jain([])) == (pytest.approx(1), pytest.approx(1 / 3), 1.0)


def test_the_machine_is_what_was_measured():
    """In the rank's bench that is kept; who measures it anew and finds it elsewhere simulates anew."""
    kept = json.loads((ROOT / "results" / "nvidia-h200" / "rank-ep8-production.json").read_text())
    steps = {step["rows"]: step["step_ms"] / 1e3 for step in kept["steps"] if step["context"] == 1 << 15}
    cost = CostModel(H200_RANK)
    assert cost.seconds(Shape(64, 0, 64 << 15, 0, 64)) == pytest.approx(steps[64], rel=0.03)
    assert cost.seconds(Shape(384, 0, 64 << 15, 0, 384)) == pytest.approx(steps[384], rel=0.03)
    prompt = sum(cost.chunk_seconds(start, 4096) for start in range(0, 1 << 15, 4096))
    assert (1 << 15) / prompt == pytest.approx(kept["prefill"]["all layers"]["tokens_per_second"], rel=0.05)


def test_what_is_asked_of_ours_is_missed_where_it_is_not_there():
    def entry(scenario: str, policy: str, p99: float, unanswered: int, calm: str | None = None) -> dict[str, object]:
        return {
            "scenario": scenario,
            "policy": policy,
            "calm": calm,
            "measures": {"itl_p99": p99, "unanswered": unanswered},
        }

    runs = [entry("chat", "ours", 0.02, 0), entry("chat", "fixed 8", 1.0, 7)]
    runs += [entry("long", "ours", 0.05, 1, "chat"), entry("bursts", "ours", 0.04, 0, "chat")]
    found = {v["name"]: (v["value"], v["verdict"]) for v in run.verdicts(runs)}
    assert found == {
        "chat: requests without an answer": (0, "met"),
        "long: ITL p99 over that of chat": (2.5, "missed"),
        "long: requests without an answer": (1, "missed"),
        "bursts: ITL p99 over that of chat": (2.0, "met"),
        "bursts: requests without an answer": (0, "met"),
    }
