"""CacheManager: the only door through which the scheduler reaches the cache. Integers only, no torch."""

from dataclasses import dataclass, field

from benthic.cache.blocks import BlockPool, SlotPool
from benthic.cache.spec import BLOCK_TOKENS, blocks_for


@dataclass(slots=True)
class Lease:
    """What one running sequence holds: a state slot, and blocks for `capacity` positions."""

    slot: int
    blocks: list[int] = field(default_factory=list[int])
    table: tuple[int, ...] = ()  # the same blocks, as steps carry them
    capacity: int = 0  # positions


class CacheManager:
    """Hands out state slots and blocks. The pools are sized once and never grow."""

    def __init__(self, num_blocks: int, num_slots: int, block_tokens: int = BLOCK_TOKENS):
        """num_blocks and num_slots count the reserved number 0."""
        self.block_tokens = block_tokens
        self.blocks = BlockPool(num_blocks)
        self.slots = SlotPool(num_slots)

    @property
    def free_blocks(self) -> int:
        return self.blocks.free

    @property
    def usable_tokens(self) -> int:
        """Positions one sequence could have if it were alone."""
        return self.blocks.usable * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return blocks_for(tokens, self.block_tokens)

    def open(self) -> Lease | None:
        """A state slot and no blocks yet, or None when all slots are held."""
        slot = self.slots.take()
        return None if slot is None else Lease(slot)

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Make room for positions 0 .. tokens-1. False, and nothing changed, when too few blocks are free."""
        if tokens <= lease.capacity:
            return True
        taken = self.blocks.take(self.blocks_for(tokens) - len(lease.blocks))
        if taken is None:
            return False
        lease.blocks += taken
        lease.table = tuple(lease.blocks)
        lease.capacity = len(lease.blocks) * self.block_tokens
        return True

    def close(self, lease: Lease) -> None:
        """Give everything back. The lease is empty afterwards and must not be used again."""
        self.blocks.release(lease.blocks)
        self.slots.release(lease.slot)
        lease.blocks, lease.table, lease.capacity = [], (), 0

    def check(self) -> None:
        """The invariants of both pools."""
        self.blocks.check()
        self.slots.check()
