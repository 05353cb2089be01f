"""The traces that policies are compared on, the machines they run on, and what is reported of a run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from benthic.cache.replay import Windows
from benthic.engine.cost import Coefficients
from benthic.sim import trace
from benthic.sim.engine import Life, Outcome
from benthic.sim.policies import Policy, World, by_rank_alone, fixed, in_order, ours, prefill_first, strict
from benthic.sim.trace import Arrival, Lengths

# One rank of eight with V4.1-Flash on an H200, profile production, from docs/kernels.md: 64 decode rows at 32K take
# 21.8 ms, of which the 28K beyond 4K are 0.8; 384 rows take 45.7; a prompt of 32K goes at 13 500 tokens a second
# through all layers. That a tenth of the prompt's time grows with the tokens before it is assumed.
H200_RANK = Coefficients(fixed=16.1e-3, decode=7.47e-5, row=6.66e-5, context=4.4e-10, pair=4.5e-10)


class Scale(NamedTuple):
    """How large traces are for a machine."""

    world: World
    rate: float  # chats a second
    lengths: Lengths
    long_tokens: int
    long_every: float  # seconds
    agents: int  # sessions in 100 seconds
    turn: tuple[int, int, int]  # tokens: system prompt, new ones of a turn, most of a session
    hashed_rate: float  # conversations of the Mooncake form that begin in a second; 0: too long for this machine
    fixed: tuple[int, ...]  # rows a step, of the policies with fixed chunks
    scarce: int  # blocks, where memory is short


H200 = Scale(
    world=World(slots=128, blocks=60000, token_budget=8192, context=131072, windows=Windows(128, 21, 20)),
    rate=4.0,
    lengths=Lengths(400, 250, 16384),
    long_tokens=65536,
    long_every=20.0,
    agents=60,
    turn=(3000, 400, 60000),
    hashed_rate=0.25,
    fixed=(512, 2048, 8192),
    scarce=1000,
)
SMALL = Scale(
    world=World(slots=32, blocks=2000, token_budget=1024, context=16384, windows=Windows(128, 3, 3), snapshots=32),
    rate=2.0,
    lengths=Lengths(120, 80, 2000),
    long_tokens=4096,
    long_every=20.0,
    agents=30,
    turn=(800, 120, 8000),
    hashed_rate=0.0,
    fixed=(128, 512, 1024),
    scarce=120,
)


def _chunks(scale: Scale) -> list[Policy]:
    return [ours(), *(fixed(rows) for rows in scale.fixed), prefill_first()]


class Scenario(NamedTuple):
    name: str
    make: Callable[[Scale, int, float], list[Arrival]]
    calm: str | None = None  # the scenario that it is without what is hard about it
    policies: Callable[[Scale], list[Policy]] = _chunks
    scarce: bool = False  # blocks


def _chat(scale: Scale, seed: int, seconds: float) -> list[Arrival]:
    return trace.poisson(seed, seconds=seconds, rate=scale.rate, lengths=scale.lengths)


def _long(scale: Scale, seed: int, seconds: float) -> list[Arrival]:
    many = trace.long_prompts(seed, seconds=seconds, every=scale.long_every, tokens=scale.long_tokens)
    return trace.merged(_chat(scale, seed, seconds), many)


def _bursts(scale: Scale, seed: int, seconds: float) -> list[Arrival]:
    size = round(10 * scale.rate)
    some = trace.poisson(seed, seconds=seconds, rate=scale.rate / 2, lengths=scale.lengths)
    return trace.merged(some, trace.bursts(seed, seconds=seconds, every=20.0, size=size, lengths=scale.lengths))


def _agents(scale: Scale, seed: int, seconds: float) -> list[Arrival]:
    system, new, most = scale.turn
    sessions = max(round(scale.agents * seconds / 100), 1)
    return trace.agents(seed, seconds=seconds, sessions=sessions, system=system, new=new, most=most)


def _hashed(scale: Scale, seed: int, seconds: float) -> list[Arrival]:
    if not scale.hashed_rate:
        return []
    return trace.parse(trace.conversations(seed, seconds=seconds, rate=scale.hashed_rate))


def _tenants(scale: Scale, seed: int, seconds: float) -> list[Arrival]:
    """One sends four times what there is time for, for half of the time; the other a chat now and then."""
    flood = trace.poisson(seed, seconds=seconds / 2, rate=8 * scale.rate, lengths=scale.lengths, tenant="flood")
    other = trace.poisson(
        seed, seconds=seconds, rate=scale.rate / 4, lengths=scale.lengths, tenant="other", kind="other"
    )
    return trace.merged(flood, other)


def _priorities(scale: Scale, seed: int, seconds: float) -> list[Arrival]:
    """More chats than there is time for, for half of the time, and a few requests of lower priority beside them."""
    chats = trace.poisson(seed, seconds=seconds / 2, rate=6 * scale.rate, lengths=scale.lengths)
    batch = trace.poisson(seed, seconds=seconds / 2, rate=scale.rate / 8, lengths=scale.lengths, kind="batch")
    return trace.merged(chats, [replace(one, priority=2) for one in batch])


def _stories(scale: Scale, seed: int, seconds: float) -> list[Arrival]:
    """Long answers to long prompts; half of these begin with one of three common beginnings."""
    head, lengths = scale.turn[0], replace(scale.lengths, output=8 * scale.lengths.output)
    chats = trace.poisson(seed, seconds=seconds, rate=scale.rate / 3, lengths=lengths, kind="story")
    heads = [1 + i % 3 if i % 2 else 10 + i for i in range(len(chats))]
    return [replace(chat, prompt=((id, head), *chat.prompt)) for id, chat in zip(heads, chats, strict=True)]


SCENARIOS = [
    Scenario("chat", _chat),
    Scenario("long prompts", _long, calm="chat"),
    Scenario("bursts", _bursts, calm="chat"),
    Scenario("agents", _agents),
    Scenario("conversations", _hashed),
    Scenario("tenants", _tenants, policies=lambda scale: [ours(), in_order()]),
    Scenario("priorities", _priorities, policies=lambda scale: [ours(), strict()]),
    Scenario("little memory", _stories, policies=lambda scale: [ours(), by_rank_alone()], scarce=True),
]


# ---- what is said about a run ----------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def measures(outcome: Outcome) -> dict[str, float]:
    """Seconds, tokens a second, shares."""
    lives = outcome.lives
    answered = [life for life in lives if life.tokens]
    gaps = [gap for life in answered for gap in life.gaps]
    prompts = sum(life.arrival.prompt_tokens for life in answered)
    found = {
        "requests": len(lives),
        "unanswered": sum(life.ended is None or not life.tokens for life in lives),
        "output_tokens_per_second": sum(len(life.tokens) for life in lives) / outcome.seconds,
        "prompt_tokens_per_second": prompts / outcome.seconds,
        "hit_share": sum(life.cached for life in answered) / max(prompts, 1),
        "itl_p50": quantile(gaps, 0.5),
        "itl_p99": quantile(gaps, 0.99),
        "itl_max": max(gaps, default=0.0),
        "preemptions": outcome.preemptions,
        "rows_again": outcome.rows - sum(_rows(life) for life in answered),
        "steps": outcome.steps,
        "cost_error": outcome.cost_error,
    }
    for kind, name in ((None, "ttft"), *((kind, f"ttft_{kind}") for kind in _kinds(lives))):
        firsts = [life.ttft for life in answered if kind is None or life.arrival.kind == kind]
        found |= {f"{name}_p50": quantile(firsts, 0.5), f"{name}_p99": quantile(firsts, 0.99)}
        waits = [_wait(life, outcome) for life in lives if kind is None or life.arrival.kind == kind]
        found |= {f"{name.replace('ttft', 'longest_wait')}": max(waits, default=0.0)}
    return found


def _wait(life: Life, outcome: Outcome) -> float:
    return (outcome.seconds if life.begun is None else life.begun) - life.arrival.at


def _rows(life: Life) -> int:
    """What has to be computed for a request; the last token of an answer is not."""
    return life.arrival.prompt_tokens - life.cached + len(life.tokens) - 1


def _kinds(lives: Iterable[Life]) -> list[str]:
    found = sorted({life.arrival.kind for life in lives})
    return found if len(found) > 1 else []


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    return fmean(shares) ** 2 / fmean(share * share for share in shares) if any(shares) else 1.0


def tail(values: Sequence[float], points: int = 100, least: float = 1e-5) -> list[tuple[float, float]]:
    """(share, value): so many of the values are as large or larger. Shares from 1 to `least`, even in log; of four and
    three digits."""
    ordered = sorted(values)
    shares = [least ** (i / (points - 1)) for i in range(points)] if values else []
    at = [ordered[max(len(ordered) - 1 - int(share * (len(ordered) - 1)), 0)] for share in shares]
    return [(float(f"{share:.3g}"), float(f"{value:.4g}")) for share, value in zip(shares, at, strict=True)]
