"""The paged form of a model's memory: window rings and compressor carries in state slots, everything else in blocks.

One object serves one step. What depends only on the step (which rows close a group, how many entries a row may see,
where its blocks are) is worked out once and shared by all layers. Training has its own form of the same protocol.
"""

from functools import cached_property

import torch
from torch import Tensor

from benthic.cache.spec import BlockPart, Part
from benthic.cache.storage import Storage
from benthic.kernels import attn_sparse, indexer, kv_copy
from benthic.models.base import Batch, ByGroups, Selection
from benthic.models.deepseek_v41_config import LayerPlan, ModelConfig
from benthic.types import Numerics


class PagedMemory:
    """What the rows of one step can reach."""

    def __init__(
        self, config: ModelConfig, plan: tuple[LayerPlan, ...], numerics: Numerics, storage: Storage, batch: Batch
    ):
        self.model, self.config, self.plan, self.numerics = config, config.text, plan, numerics
        self.storage, self.batch = storage, batch
        self.device = batch.ids.device
        self._steps: dict[int, RatioStep] = {}
        self._open_rows: dict[int, Tensor] = {}
        self._hidden: dict[int, Tensor] = {}

    def layer(self, index: int) -> "PagedLayer":
        return PagedLayer(self, self.plan[index])

    def of(self, batch: Batch) -> "PagedMemory":
        return PagedMemory(self.model, self.plan, self.numerics, self.storage, batch)

    def ratio(self, ratio: int) -> "RatioStep":
        if ratio not in self._steps:
            self._steps[ratio] = RatioStep(self, ratio)
        return self._steps[ratio]

    @cached_property
    def chunk_of_row(self) -> Tensor:
        """[T] int64."""
        starts = torch.tensor(self.batch.starts, device=self.device)
        return torch.repeat_interleave(starts.diff())

    @cached_property
    def row_slots(self) -> Tensor:
        """[T] int64 state slot of each row."""
        return torch.tensor(self.batch.slots, device=self.device)[self.chunk_of_row]

    @cached_property
    def tables(self) -> Tensor:
        """[C, B] int64 block tables, padded with the reserved block 0."""
        width = max((len(table) for table in self.batch.tables), default=0)
        rows = [table + (0,) * (width - len(table)) for table in self.batch.tables]
        return torch.tensor(rows, dtype=torch.int64, device=self.device).reshape(len(rows), width)

    def of_rows(self, per_chunk: tuple[int, ...]) -> Tensor:
        """[T] int64, a number of its chunk for each row."""
        return torch.tensor(per_chunk, device=self.device)[self.chunk_of_row]

    def hidden(self, window: int) -> Tensor:
        """[T] int64 rows at the old end of each row's window that it does not see."""
        if window not in self._hidden:
            oldest = (self.batch.positions - (window - 1)).clamp(min=0)
            self._hidden[window] = (self.of_rows(self.batch.lows) - oldest).clamp(min=0)
        return self._hidden[window]

    def open_rows(self, count: int) -> Tensor:
        """Rows among the last `count` of their chunk, [<= C count] int64: what a ring of that size keeps."""
        if count not in self._open_rows:
            ends = torch.tensor(self.batch.starts[1:], device=self.device)[self.chunk_of_row]
            rows = torch.arange(self.batch.ids.shape[0], device=self.device)
            self._open_rows[count] = (ends - rows <= count).nonzero()[:, 0]
        return self._open_rows[count]

    def ring(self, layer: int) -> kv_copy.Ring:
        where = next(ring for ring in self.storage.slot_layout.rings if ring.layer == layer)
        return kv_copy.Ring(self.storage.rings[layer], where.channels, where.format)

    def paged(self, layer: int, part: Part) -> kv_copy.Paged:
        where: BlockPart = self.storage.layout.part(layer, part)
        return kv_copy.Paged(
            self.storage.pool, where.data_offset, where.scale_offset, where.entries, where.channels, where.format
        )


class RatioStep:
    """The step as layers of one compression ratio see it: one entry per `ratio` tokens."""

    def __init__(self, memory: PagedMemory, ratio: int):
        self.memory, self.ratio = memory, ratio
        self.per_block = memory.storage.layout.tokens // ratio
        self.shift = self.per_block.bit_length() - 1
        assert self.per_block == 1 << self.shift, f"{self.per_block} entries a block, want a power of two"
        positions = memory.batch.positions
        self.visible = (positions + 1) // ratio  # [T] entries whose last token is at or before the row
        self.closing = (
            torch.arange(positions.shape[0], device=positions.device)
            if ratio == 1
            else ((positions + 1) % ratio == 0).nonzero()[:, 0]
        )  # [G] rows that complete a group

    @cached_property
    def group_positions(self) -> Tensor:
        return self.memory.batch.positions[self.closing] + 1 - self.ratio

    @cached_property
    def records(self) -> Tensor:
        """[G] int64 where the groups that close are stored."""
        entries, batch = self.visible[self.closing] - 1, self.memory.batch
        if any(batch.stored):  # they were stored when the prefix was computed, and other sequences read them
            there = batch.positions < self.memory.of_rows(batch.stored)
            entries = torch.where(there[self.closing], -1, entries)
        return self.locate(entries, self.memory.chunk_of_row[self.closing])

    def locate(self, entries: Tensor, chunks: Tensor) -> Tensor:
        """Entry numbers of a sequence -> record ids in the pool; chunks broadcast against entries; -1 stays -1."""
        at = entries.clamp(min=0)  # a block holds a power of two of entries: shifts, since integer division is slow
        records = (self.memory.tables[chunks, at >> self.shift] << self.shift) | (at & (self.per_block - 1))
        return torch.where(entries < 0, -1, records)


class PagedLayer(ByGroups):
    """One layer's part of the memory. Implements `base.LayerMemory`."""

    def __init__(self, memory: PagedMemory, plan: LayerPlan):
        self.memory, self.plan = memory, plan

    def group_positions(self) -> Tensor:
        return self.memory.ratio(self.plan.ratio).group_positions

    def close_groups(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        memory, ratio = self.memory, self.plan.ratio
        carry = memory.storage.carry[self.plan.index]  # [slots, rows, 2, dh] f32
        positions, chunk = memory.batch.positions, memory.chunk_of_row
        closing = memory.ratio(ratio).closing
        back = torch.arange(ratio - 1, -1, -1, device=a.device)
        rows = closing[:, None] - back  # [G, r] rows of the group; before the chunk's first row they are in the carry
        starts = torch.tensor(memory.batch.starts, device=a.device)[chunk[closing]]
        here = (rows >= starts[:, None])[..., None]
        slots, at = memory.row_slots[closing][:, None], (positions[closing][:, None] - back) % carry.shape[1]
        kept = carry[slots, at]  # [G, r, 2, dh]
        rows = rows.clamp(min=0)
        groups = torch.where(here, a[rows], kept[:, :, 0]), torch.where(here, b[rows], kept[:, :, 1])
        open_rows = memory.open_rows(carry.shape[1])
        carry[memory.row_slots[open_rows], positions[open_rows] % carry.shape[1]] = torch.stack(
            [a[open_rows], b[open_rows]], dim=1
        )
        return groups

    def store(self, part: Part, values: Tensor) -> None:
        records = self.memory.ratio(self.plan.ratio).records
        kv_copy.write_records(self.memory.paged(self.plan.index, part), records, values)

    def select(self, q: Tensor, weights: Tensor, shared: Selection | None) -> Selection:
        memory, plan, text = self.memory, self.plan, self.memory.config
        assert plan.keys_from is not None, f"layer {plan.index} selects but has no index keys to score"
        step = memory.ratio(plan.ratio)
        restricted = plan.candidates_from is not None and shared is not None
        emits = plan.makes_candidates
        entries, candidates = indexer.index_select(
            q,
            weights,
            memory.paged(plan.keys_from, "index"),
            memory.tables,
            memory.batch.starts,
            step.visible,
            text.index_topk,
            memory.numerics.round_scores,
            restrict=shared.candidates if restricted and shared is not None else None,
            emit=text.candidate_topk_blocks if emits else 0,
            block_size=text.candidate_block_size,
        )
        records = step.locate(entries, memory.chunk_of_row[:, None])
        kept = shared.candidates if shared is not None else None
        return Selection(records, candidates if emits else kept)

    def attend(self, q: Tensor, kw: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
        memory, plan, batch = self.memory, self.plan, self.memory.batch
        ring = memory.ring(plan.index)
        rows, begin, count = kv_copy.window_rows(ring, kw, batch.slots, batch.firsts, batch.starts, plan.window)
        if any(batch.lows):
            hidden = memory.hidden(plan.window)
            begin, count = begin + hidden, count - hidden
        paged = memory.paged(plan.kv_from, "main") if selection is not None and plan.kv_from is not None else None
        records = selection.entries if selection is not None else None
        scale = q.shape[-1] ** -0.5
        o = attn_sparse.sink_attention(q, rows, begin, count, paged, records, sink, scale, memory.numerics.round_probs)
        kv_copy.ring_write(ring, kw, memory.row_slots, batch.positions)
        return o
