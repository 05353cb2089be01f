"""CacheManager: the only door through which the scheduler reaches the cache. Integers only, no torch, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from benthic.cache.blocks import BlockPool, SlotPool
from benthic.cache.eviction import POLICIES
from benthic.cache.prefix import Key, Node, PrefixIndex
from benthic.cache.snapshots import Snapshots
from benthic.cache.spec import BLOCK_TOKENS, blocks_for
from benthic.types import Miss


@dataclass(slots=True, eq=False)
class Lease:
    """What one running sequence holds: a state slot, and blocks for `capacity` positions."""

    slot: int
    blocks: list[int] = field(default_factory=list[int])
    table: tuple[int, ...] = ()  # the same blocks, as steps carry them
    capacity: int = 0  # positions
    cached: int = 0  # blocks at the front that other sequences may read too
    announced: Sequence[Key] = ()  # blocks it said it would compute


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt, at the moment it was looked up."""

    nodes: Sequence[Node] = ()
    miss: Miss | None = Miss.DISABLED


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks kept for somebody who is not running, until a deadline."""

    blocks: list[int]
    until: float


class CacheManager:
    """Hands out state slots and blocks, and finds blocks again by what they hold. The pools are sized once."""

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        block_tokens: int = BLOCK_TOKENS,
        *,
        prefix: bool = False,
        eviction: str = "s3-fifo",
        ttl_seconds: float = 0.0,
        snapshots: int = 0,
    ):
        """num_blocks and num_slots count the reserved number 0.

        prefix       complete blocks are kept when their sequence ends, and found by the next that begins alike.
        eviction     which of them go first: a name in `eviction.POLICIES`.
        ttl_seconds  see `PrefixIndex`.
        snapshots    states kept of cached prefixes, in the slots from num_slots on.
        """
        self.block_tokens = block_tokens
        self.blocks = BlockPool(num_blocks)
        self.slots = SlotPool(num_slots)
        usable = self.blocks.usable
        self.prefix = PrefixIndex(POLICIES[eviction](usable), usable, ttl_seconds) if prefix else None
        self.snapshots = Snapshots(range(num_slots, num_slots + snapshots))
        self.evictions = 0
        self._pins: list[Pin] = []

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out now: free ones, and idle ones that would be given up."""
        return self.blocks.free + (self.prefix.idle if self.prefix is not None else 0)

    @property
    def cached_blocks(self) -> int:
        """Blocks that a prompt may find."""
        return 0 if self.prefix is None else len(self.prefix)

    @property
    def usable_tokens(self) -> int:
        """Positions one sequence could have if it were alone."""
        return self.blocks.usable * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return blocks_for(tokens, self.block_tokens)

    # ---- leases ------------------------------------------------------------------------------------------------------

    def open(self) -> Lease | None:
        """A state slot and no blocks yet, or None when all slots are held."""
        slot = self.slots.take()
        return None if slot is None else Lease(slot)

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Make room for positions 0 .. tokens-1. False, and nothing changed, when too few blocks are free."""
        if tokens <= lease.capacity:
            return True
        taken = self._take(self.blocks_for(tokens) - len(lease.blocks))
        if taken is None:
            return False
        self._append(lease, taken)
        return True

    def close(self, lease: Lease) -> None:
        """Give everything back. The lease is empty afterwards and must not be used again."""
        if self.prefix is not None:
            self.prefix.withdraw(lease.announced, lease)
        self._let_go(lease.blocks)
        self.slots.release(lease.slot)
        lease.blocks, lease.table, lease.capacity, lease.cached, lease.announced = [], (), 0, 0, ()

    # ---- prefixes ----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[Key], now: float) -> Match:
        """The longest prefix of these blocks that is cached."""
        if self.prefix is None:
            return Match()
        found = self.prefix.find(keys, now)
        if found.miss is Miss.EXPIRED:
            self.blocks.free_again(self.prefix.expire(keys[len(found.nodes)], now, self._is_idle))
        return Match(found.nodes, found.miss)

    def in_flight(self, key: Key) -> bool:
        """Is a block with this key being computed by some lease?"""
        return self.prefix is not None and self.prefix.in_flight(key)

    def seen_elsewhere(self, ids: Sequence[int], root: Key) -> bool:
        """Did this first block of ids come before under another root?"""
        return self.prefix is not None and self.prefix.seen_elsewhere(ids, root)

    def idle_blocks(self, match: Match) -> int:
        """How many blocks fewer are free once `match` is attached."""
        return sum(not self.blocks.references[node.block] for node in match.nodes)

    def attach(self, lease: Lease, match: Match, now: float) -> None:
        """The lease, still empty, holds the blocks of the match. Right after `find`: nothing may have come between."""
        assert self.prefix is not None, "no prefixes are kept"
        assert not lease.blocks, f"the lease holds {len(lease.blocks)} blocks already"
        self._hold(match.nodes)
        self.prefix.touch(match.nodes, now)
        self._append(lease, [node.block for node in match.nodes])
        lease.cached = len(match.nodes)

    def announce(self, lease: Lease, keys: Sequence[Key]) -> None:
        """The lease is about to compute these blocks; others may wait for them."""
        if self.prefix is not None:
            self.prefix.announce(keys, lease)
            lease.announced = keys

    def publish(self, lease: Lease, keys: Sequence[Key], now: float) -> None:
        """The lease's first len(keys) blocks are complete and their step is over: others may read them from now on.

        Where a key is cached already, the lease takes that block and gives its own back, so that a block that somebody
        holds never follows one that nobody holds.
        """
        index = self.prefix
        if index is None or len(keys) <= lease.cached:
            return
        for i in range(lease.cached, len(keys)):
            block = lease.blocks[i]
            node = index.add(keys[i], keys[i - 1] if i else None, block, now)
            if node.block != block:
                self._hold([node])
                lease.blocks[i] = node.block
                lease.table = ()
                self._let_go([block])
        lease.cached = len(keys)
        if not lease.table:
            lease.table = tuple(lease.blocks)

    def fork(self, lease: Lease, source: Lease, tokens: int) -> tuple[int, int] | None:
        """The lease, still empty, shares the source's whole blocks of `tokens` positions. Of one that is not whole it
        gets its own: returns both, for the copy. There must be a free block for it."""
        whole, rest = divmod(tokens, self.block_tokens)
        self.blocks.share(source.blocks[:whole])
        self._append(lease, source.blocks[:whole])
        lease.cached = min(source.cached, whole)
        if not rest:
            return None
        grown = self.grow(lease, tokens)
        assert grown, "no block is free for the end of the prompt"
        return source.blocks[whole], lease.blocks[whole]

    # ---- pins --------------------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[Key], now: float, until: float) -> Pin:
        """Keep what is cached of this prefix until then or `unpin`, unless nobody could go on otherwise."""
        nodes = self.find(keys, now).nodes
        self._hold(nodes)
        pin = Pin([node.block for node in nodes], until)
        self._pins.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """End a pin. One that has ended already stays so."""
        if pin in self._pins:
            self._pins.remove(pin)
            self._let_go(pin.blocks)
            pin.blocks = []

    def give_way(self) -> bool:
        """End the pin that ends first, since somebody cannot go on otherwise. False: there is none."""
        if not self._pins:
            return False
        self.unpin(min(self._pins, key=attrgetter("until")))
        return True

    @property
    def pinned(self) -> list[int]:
        """Blocks held by pins, once for each."""
        return [block for pin in self._pins for block in pin.blocks]

    def tick(self, now: float) -> None:
        """End the pins whose time is over."""
        if self._pins:
            for pin in [pin for pin in self._pins if pin.until <= now]:
                self.unpin(pin)

    # ---- within ------------------------------------------------------------------------------------------------------

    def _is_idle(self, block: int) -> bool:
        return not self.blocks.references[block]

    def _take(self, count: int) -> list[int] | None:
        if count > self.free_blocks:
            return None
        while self.blocks.free < count:
            assert self.prefix is not None
            self.blocks.free_again([self.prefix.give_up()])
            self.evictions += 1
        return self.blocks.take(count)

    def _append(self, lease: Lease, blocks: list[int]) -> None:
        lease.blocks += blocks
        lease.table = tuple(lease.blocks)
        lease.capacity = len(lease.blocks) * self.block_tokens

    def _hold(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if self._is_idle(node.block):
                assert self.prefix is not None
                self.prefix.held(node)
            self.blocks.share([node.block])

    def _let_go(self, blocks: list[int]) -> None:
        for block in self.blocks.release(blocks):
            node = None if self.prefix is None else self.prefix.of_block(block)
            if node is None or self.prefix is None:
                self.blocks.free_again([block])
            else:
                self.prefix.let_go(node)

    def check(self) -> None:
        """For tests: the invariants of the pools and of the index."""
        idle: list[int] = []
        if self.prefix is not None:
            self.prefix.check()
            nodes = self.prefix.nodes.values()
            idle = [node.block for node in nodes if self._is_idle(node.block)]
            assert len(idle) == self.prefix.idle, f"{len(idle)} idle blocks, the policy knows {self.prefix.idle}"
            for node in nodes:
                parent = node.parent
                assert parent is None or self._is_idle(node.block) or not self._is_idle(parent.block), (
                    f"block {node.block} is held, block {parent.block} before it is not"
                )
        self.blocks.check(idle)
        self.slots.check()
