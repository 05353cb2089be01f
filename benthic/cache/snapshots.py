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

    def place(self, key: Key) -> int | None:
        """A slot for the state behind this block, written before anybody can find it. None: it is kept already, or
        there are no slots for states."""
        if key in self._kept or not (self._free or self._kept):
            return None
        slot = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
        self._kept[key] = slot
        return slot

    def forget(self, key: Key, slot: int) -> None:
        """The state was not written there after all."""
        if self._kept.get(key) == slot:
            del self._kept[key]
            self._free.append(slot)
