"""The device tensors behind the blocks and the state slots. Carved once at start; nothing grows afterwards.

Block 0 and slot 0 are for padding rows. What a fresh block or slot holds is undefined: readers mask by position.
"""

import torch
from torch import Tensor

from benthic.cache.spec import BLOCK_TOKENS, CacheSpec, block_layout, slot_layout
from benthic.errors import OutOfMemory


class Storage:
    """Bytes of one model's cache on one device.

    pool     [num_blocks, block_bytes] uint8; the order inside a block is `layout.parts`
    rings    layer -> [num_slots, rows, record_bytes] uint8; position p lies in row p mod rows
    carry    layer -> [num_slots, rows, 2, channels] float32; row p mod rows holds the open (a, b) of position p
    history  [num_slots, n] int64; column i is the id at position next-1-i of the slot's sequence, -1 before its start
    tables   [num_slots, table_blocks] int32; block table of the slot's sequence. Kept up to date for a GPU, whose steps
             read it; a CPU step carries its tables with it
    last_token  [num_slots] int64; the id drawn last for the slot's sequence, for a step planned before it was known
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        rollback: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        table_blocks: int | None = None,
        states: int = 0,
    ):
        """num_blocks and num_slots count the reserved number 0.

        rollback      tokens a step may take back.
        table_blocks  most blocks of one sequence; None: all there are.
        states        slots from num_slots on, for states that are kept and never run.

        Raises OutOfMemory, before any of it is used.
        """
        self.spec, self.device = spec, torch.device(device)
        self.num_blocks, self.num_slots, self.block_tokens = num_blocks, num_slots, block_tokens
        self.states = states
        self.layout = block_layout(spec.append, block_tokens)
        self.slot_layout = slot_layout(spec, rollback)
        self.ring_layouts = {ring.layer: ring for ring in self.slot_layout.rings}
        self.table_blocks = max(num_blocks - 1, 1) if table_blocks is None else table_blocks
        self.bytes = num_blocks * self.layout.block_bytes + (num_slots + states) * self.slot_layout.slot_bytes
        try:
            self._carve()
        except (torch.OutOfMemoryError, MemoryError) as error:
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
            raise OutOfMemory(
                f"the cache of {num_blocks} blocks and {num_slots} slots",
                self.bytes,
                free,
                "lower cache.blocks, cache.bytes or scheduler.max_running",
            ) from error

    def _carve(self) -> None:
        slots, device = self.num_slots + self.states, self.device
        self.pool = torch.zeros(self.num_blocks, self.layout.block_bytes, dtype=torch.uint8, device=device)
        self.rings: dict[int, Tensor] = {
            ring.layer: torch.zeros(slots, ring.rows, ring.record_bytes, dtype=torch.uint8, device=device)
            for ring in self.slot_layout.rings
        }
        self.carry: dict[int, Tensor] = {
            carry.layer: torch.zeros(slots, carry.rows, 2, carry.channels, dtype=torch.float32, device=device)
            for carry in self.slot_layout.carries
        }
        self.history = torch.full((slots, self.spec.history_ids), -1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(slots, self.table_blocks, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)

    def copy(self, source: int, target: int, blocks: tuple[int, int] | None = None) -> None:
        """All state of slot `source` to slot `target`, and one block to another."""
        for part in (*self.rings.values(), *self.carry.values(), self.history, self.last_token):
            part[target].copy_(part[source])
        if blocks is not None:
            self.pool[blocks[1]].copy_(self.pool[blocks[0]])

    def poison(self) -> None:
        """Fill everything with patterns that read as NaN, so that a test sees who reads what nobody wrote."""
        self.pool.fill_(0xFF)
        for ring in self.rings.values():
            ring.fill_(0xFF)
        for carry in self.carry.values():
            carry.fill_(float("nan"))
