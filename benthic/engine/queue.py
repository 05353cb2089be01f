"""Who begins next: waiting branches by priority, by what their tenant has had, and by when they should have begun. No
torch, no clock.

1. Level: the priority, one better for every `patience` seconds of waiting, up to the best priority of all that wait. So
   each in time reaches the best level, and there age counts for nothing: a tenant that has more waiting than there is
   time for is not ahead of the others for that.
2. Tenant: the one that has been served least. Service is the seconds of steps that a tenant's rows cost, by the cost
   model. Who comes back after a while without requests begins with what the least served of the active ones has had:
   time away is no credit. Who left with more than that still has it when it comes back.
3. Due time: the deadline, or `patience` seconds after arrival if that is sooner, so that those who come later with
   deadlines close at hand do not pass for ever. Then order of arrival.

Bound. Once a branch has waited (its priority - the best one + 1) * patience, whoever comes later is behind it within
its tenant, and no better in level; other tenants are served first only until each has had as much as its own.
"""

import heapq
import math
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar


class Tenant:
    """What is known of one whose requests are here."""

    __slots__ = ("live", "name", "queues", "served")

    def __init__(self, name: str, served: float):
        self.name, self.served = name, served
        self.live = 0  # branches that have not ended
        self.queues: dict[int, list[tuple[float, int, int, Any]]] = {}  # priority -> heap of those that wait


class Waiter(Protocol):
    """What a branch tells the queue."""

    tenant: Tenant
    priority: int
    since: float  # when it came, seconds
    due: float
    order: int
    index: int
    ended: bool
    level: int  # when it was taken out


B = TypeVar("B", bound=Waiter)


class Queue(Generic[B]):
    """All that wait. Ended ones are skipped when they are met."""

    def __init__(self, patience: float):
        """patience  seconds; 0: priorities are strict, and only deadlines go before order of arrival."""
        self.patience = patience
        self.tenants: dict[str, Tenant] = {}
        self.contested = False  # is there more than one tenant to be fair to?
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[B]:
        """In no order."""
        for tenant in self.tenants.values():
            for heap in tenant.queues.values():
                yield from (entry[3] for entry in heap if not entry[3].ended)

    def due(self, since: float, deadline: float | None) -> float:
        latest = since + self.patience if self.patience else math.inf
        return latest if deadline is None else min(deadline, latest)

    # ---- tenants -----------------------------------------------------------------------------------------------------

    def join(self, name: str, branches: int) -> Tenant:
        """A request of so many branches has come."""
        least = min((tenant.served for tenant in self.tenants.values() if tenant.live), default=None)
        tenant = self.tenants.get(name)
        if tenant is None or not tenant.live:
            # whose lead is used up is a stranger
            gone = [t.name for t in self.tenants.values() if not t.live and (least is None or t.served <= least)]
            for other in gone:
                del self.tenants[other]
            tenant = self.tenants.setdefault(name, Tenant(name, 0.0 if least is None else least))
        tenant.live += branches
        self.contested = len(self.tenants) > 1
        return tenant

    def leave(self, b: B, waiting: bool) -> None:
        """A branch has ended."""
        b.tenant.live -= 1
        self._waiting -= waiting
        if not b.tenant.live:
            b.tenant.queues.clear()

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def push(self, b: B) -> None:
        heap = b.tenant.queues.setdefault(b.priority, [])
        heapq.heappush(heap, (b.due, b.order, b.index, b))
        self._waiting += 1

    def pop(self, now: float) -> B | None:
        """Take out the one that begins next."""
        heaps: list[list[tuple[float, int, int, B]]] = []
        for tenant in self.tenants.values():
            for heap in tenant.queues.values():
                while heap and heap[0][3].ended:
                    heapq.heappop(heap)
                if heap:
                    heaps.append(heap)
        if not heaps:
            return None
        best = min([heap[0][3].priority for heap in heaps])

        def key(heap: list[tuple[float, int, int, B]]) -> tuple[int, float, float, int]:
            due, order, _, b = heap[0]
            b.level = max(b.priority - (int((now - b.since) / self.patience) if self.patience else 0), best)
            return b.level, b.tenant.served, due, order

        self._waiting -= 1
        return heapq.heappop(min(heaps, key=key))[3]
