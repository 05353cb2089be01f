"""States of sequences at block boundaries, kept so that another one goes on from there. Integers only, no torch."""

from collections import OrderedDict
from collections.abc import Sequence

from benthic.cache.prefix import Key


class Snapshots:
    """Slots beyond those of running sequences, by the key of the last block before the state. The oldest goes first."""

    def __init__(self, slots: Sequence[int]):
        self.slots = slots
        self._free = list(slots)
        self._kept: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, keys: Sequence[Key]) -> tuple[int, int] | None:
        """(blocks before it, slot) of the latest state among the ends of these blocks."""
        for blocks in range(len(keys), 0, -1):
            slot = self._kept.get(keys[blocks - 1])
            if slot is not None:
                self._kept.move_to_end(keys[blocks - 1])
                return blocks, slot
        return None

    def reserve(self) -> int | None:
        """A slot to write a state to; None: there is none."""
        if self._free:
            return self._free.pop()
        return self._kept.popitem(last=False)[1] if self._kept else None

    def keep(self, key: Key, slot: int) -> None:
        """The state in a reserved slot is the one behind this block."""
        if key in self._kept:
            self._kept.move_to_end(key)
            self._free.append(slot)
        else:
            self._kept[key] = slot

    def free(self, slot: int) -> None:
        """No state was written to a reserved slot after all."""
        self._free.append(slot)
