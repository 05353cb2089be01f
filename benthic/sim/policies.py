"""What is compared: the engine's scheduler, and simpler rules on top of the same code.

`ours`          prompts get what the latency target leaves beside decode rows.
`fixed N`       every step has up to N rows, decode rows first, whatever that takes.
`last goes`     ours, but when memory is short the one that came last gives way.
`in order`      ours, but all tenants are one.
`strict`        ours, but waiting never makes up for priority.
`prefill first` prompts are computed as soon as they are there, in steps of their own; decode rows wait meanwhile.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from benthic.cache.manager import CacheManager
from benthic.cache.replay import Windows
from benthic.config import SchedulerConfig
from benthic.engine.branch import Branch
from benthic.engine.cost import CostModel
from benthic.engine.scheduler import Prefixes, Scheduler
from benthic.sim.trace import VOCAB_SIZE
from benthic.types import Request, StepPlan

_DEFAULTS = SchedulerConfig()
OURS = {"itl_stretch": _DEFAULTS.itl_stretch, "prompt_slowdown": _DEFAULTS.prompt_slowdown}


class PrefillFirst(Scheduler):
    """Steps of prompts alone as long as there are prompts."""

    def plan(self) -> StepPlan:
        rows = {}
        room = self._room(rows, ())
        for b in tuple(self.running):
            count = self._chunk_rows(b, room) if b.lease is not None and b.length - b.planned > 1 else 0
            if count and self._make_room(b, b.planned + count, rows):
                rows[b] = count
                room.take(count, 0.0)
        if self.queue:
            self._start_waiting(rows, room)
        return self._plan_of(rows) if rows else super().plan()


class ByRankAlone(Scheduler):
    """Who gives way is who came last of the worst level, whatever that costs."""

    def _victim(self, b: Branch) -> Branch:
        return self.running[-1]


class InOrder(Scheduler):
    """Requests begin in the order in which they came, whoever sends them."""

    def _enqueue(self, request: Request) -> None:
        super()._enqueue(replace(request, tenant=""))


class World(NamedTuple):
    """What the engine of a simulation has."""

    slots: int
    blocks: int
    token_budget: int
    context: int
    windows: Windows
    snapshots: int = 64


class Policy(NamedTuple):
    name: str
    build: Callable[[World, CostModel], Scheduler]


def _scheduler(
    kind: type[Scheduler], world: World, cost: CostModel, settings: Mapping[str, float], budget: int = 0
) -> Scheduler:
    cache = CacheManager(world.blocks + 1, world.slots + 1, prefix=True, snapshots=world.snapshots)
    return kind(
        cache,
        token_budget=max(budget or world.token_budget, world.slots),
        max_context_tokens=world.context,
        vocab_size=VOCAB_SIZE,
        prefixes=Prefixes(windows=world.windows, mode="snapshot"),
        cost=cost,
        **settings,  # type: ignore[arg-type]
    )


def ours(**settings: float) -> Policy:
    return Policy("ours", lambda world, cost: _scheduler(Scheduler, world, cost, {**OURS, **settings}))


def fixed(rows: int) -> Policy:
    return Policy(f"fixed {rows}", lambda world, cost: _scheduler(Scheduler, world, cost, {}, rows))


def by_rank_alone() -> Policy:
    return Policy("last goes", lambda world, cost: _scheduler(ByRankAlone, world, cost, OURS))


def in_order() -> Policy:
    return Policy("in order", lambda world, cost: _scheduler(InOrder, world, cost, OURS))


def strict() -> Policy:
    return Policy("strict", lambda world, cost: _scheduler(Scheduler, world, cost, {**OURS, "patience": 0.0}))


def prefill_first() -> Policy:
    return Policy("prefill first", lambda world, cost: _scheduler(PrefillFirst, world, cost, {}))
