"""The pool of cache blocks and the pool of state slots: integers, reference counts, order of reuse. No torch.

Number 0 of each pool is reserved for padding rows and is never handed out. Source: engine specification, section 3.3.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence


class BlockPool:
    """Fixed number of blocks. A block is free, or held by as many owners as its reference count says, or idle: without
    an owner and not free, since what it holds may be wanted again. Who keeps idle blocks says when they are free."""

    def __init__(self, num_blocks: int):
        """num_blocks counts block 0; at least 2."""
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none to hand out, want at least 2"
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._free = deque(range(1, num_blocks))

    @property
    def usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and nothing taken when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each; also the first one again of a block that `release` said was idle."""
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """One owner less for each. Those that lost their last one, a sequence's end first; they are not free yet."""
        idle: list[int] = []
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} has no owner and was released again"
            self.references[block] -= 1
            if not self.references[block]:
                idle.append(block)
        return idle

    def free_again(self, blocks: Iterable[int]) -> None:
        """Blocks without an owner, to be handed out when their turn comes."""
        for block in blocks:
            assert not self.references[block], f"block {block} has {self.references[block]} owners"
            self._free.append(block)

    def check(self, idle: Collection[int] = ()) -> None:
        """The pool's invariant: every block but 0 is free once, or idle, or has an owner."""
        assert self.references[0] == 0, "block 0 was handed out"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        held = {block for block, count in enumerate(self.references) if count}
        assert not free & held, f"blocks {sorted(free & held)} are free and referenced"
        assert not set(idle) & (free | held), f"blocks {sorted(set(idle) & (free | held))} are idle and something else"
        total = len(free) + len(held) + len(idle)
        assert total == self.usable, f"{len(free)} free, {len(held)} held and {len(idle)} idle blocks of {self.usable}"


class SlotPool:
    """Fixed number of state slots, one per running sequence. The slot freed last is used first: its bytes are warm."""

    def __init__(self, num_slots: int):
        """num_slots counts slot 0; at least 2."""
        assert num_slots >= 2, f"a pool of {num_slots} slots has none to hand out, want at least 2"
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._held: set[int] = set()

    @property
    def usable(self) -> int:
        return self.num_slots - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot, or None when all are held."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        assert slot in self._held, f"slot {slot} is free and was released again"
        self._held.remove(slot)
        self._free.append(slot)

    def check(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is in the free list twice"
        assert 0 not in free | self._held, "slot 0 was handed out"
        assert not free & self._held, f"slots {sorted(free & self._held)} are free and held"
        assert len(free) + len(self._held) == self.usable, f"{len(free)} free and {len(self._held)} held slots"
