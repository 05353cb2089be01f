"""The order in which idle blocks are given up. Keys only, no torch.

A policy knows the cached blocks that nobody holds. S3-FIFO (Yang et al., SOSP 2023), for blocks that are held between
uses: a block nobody came back for waits in the small queue and leaves from there, so that prompts seen once do not push
out what is shared; one that was hit, or whose key comes back soon after it left, goes to the main queue, and there
passes once more for each hit.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

MOST_PASSES = 3  # hits that count
SMALL_SHARE = 0.1  # of the pool


class Policy(Protocol):
    def __len__(self) -> int:
        """Idle blocks."""
        ...

    def idle(self, key: bytes, hits: int) -> None:
        """Nobody holds `key` any more; it was hit so often since it was idle last, or came."""
        ...

    def hold(self, key: bytes) -> None:
        """Somebody holds the idle block again."""
        ...

    def drop(self, key: bytes) -> None:
        """The idle block is given up."""
        ...

    def victim(self) -> bytes:
        """The idle block to give up next. There must be one; nothing is dropped yet."""
        ...


class Lru:
    """First the block that has been idle longest."""

    def __init__(self, capacity: int):
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def idle(self, key: bytes, hits: int) -> None:
        self._idle[key] = None

    def hold(self, key: bytes) -> None:
        del self._idle[key]

    def drop(self, key: bytes) -> None:
        del self._idle[key]

    def victim(self) -> bytes:
        return next(iter(self._idle))


class S3Fifo:
    """Two queues, and the memory of what left the small one."""

    def __init__(self, capacity: int):
        """capacity: blocks of the pool."""
        self._target, self._remembered = max(int(capacity * SMALL_SHARE), 1), capacity
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()  # key -> passes left
        self._held: dict[bytes, int] = {}  # keys of the main queue that are held for now -> passes left
        self._left: OrderedDict[bytes, None] = OrderedDict()  # keys that left from the small queue

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def idle(self, key: bytes, hits: int) -> None:
        passes = self._held.pop(key, None)
        if passes is not None:
            self._main[key] = min(passes + hits, MOST_PASSES)
        elif hits or key in self._left:
            self._left.pop(key, None)
            self._main[key] = min(max(hits - 1, 0), MOST_PASSES)
        else:
            self._small[key] = None

    def hold(self, key: bytes) -> None:
        if key in self._small:
            del self._small[key]
        else:
            self._held[key] = self._main.pop(key)

    def drop(self, key: bytes) -> None:
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._left[key] = None
        if len(self._left) > self._remembered:
            self._left.popitem(last=False)

    def victim(self) -> bytes:
        while True:
            if self._small and (len(self._small) > self._target or not self._main):
                return next(iter(self._small))
            key, passes = next(iter(self._main.items()))
            if not passes:
                return key
            self._main[key] = passes - 1
            self._main.move_to_end(key)


POLICIES: dict[str, Callable[[int], Policy]] = {"s3-fifo": S3Fifo, "lru": Lru}
