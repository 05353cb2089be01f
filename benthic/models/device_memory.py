"""The paged form of a model's memory on a GPU: what `memory.py` does, with device tensors of fixed shape alone.

Nothing is read back and no shape depends on a value, so a CUDA graph can hold a step. All T rows go through the
compressors; one that closes no group has record id -1, which is not stored. `Selection.entries` are record ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from benthic.cache.spec import Part
from benthic.cache.storage import Storage
from benthic.kernels import attn_sparse, compress, indexer, kv_copy, rows
from benthic.models.base import Batch, Selection
from benthic.models.deepseek_v41_config import LayerPlan, ModelConfig
from benthic.models.modules import RMSNorm
from benthic.types import Numerics


class Entries(NamedTuple):
    """The step as layers of one compression ratio see it: one entry per `ratio` tokens."""

    visible: Tensor  # [T] int64 entries whose last token is at or before the row
    records: Tensor  # [T] int64 where the group that ends at the row is stored, -1 where none does


class DeviceMemory:
    """What the rows of one step can reach."""

    def __init__(
        self, config: ModelConfig, plan: tuple[LayerPlan, ...], numerics: Numerics, storage: Storage, batch: Batch
    ):
        assert batch.rows is not None, "the batch does not say on the device where its rows stand"
        self.model, self.config, self.plan, self.numerics = config, config.text, plan, numerics
        self.storage, self.rows, self.floors, self.layer_lows = storage, batch.rows, batch.floors, batch.layer_lows
        # where the host knows the blocks, no kernel sees the empty end of the tables: it may be a million tokens long
        most = max(map(len, batch.tables), default=storage.tables.shape[1])
        self.tables = storage.tables[:, :most]
        count = batch.ids.shape[0]
        self.chunked = batch.chunked or (4 * (len(batch.starts) - 1) <= count and bool(batch.starts))
        self._entries: dict[int, Entries] = {}

    def layer(self, index: int) -> "DeviceLayer":
        return DeviceLayer(self, self.plan[index])

    def of(self, batch: Batch) -> "DeviceMemory":
        return DeviceMemory(self.model, self.plan, self.numerics, self.storage, batch)

    def rows_of(self, layer: int) -> kv_copy.Rows:
        """The rows as the window of a layer sees them."""
        return self.rows if self.layer_lows is None else self.rows._replace(lows=self.layer_lows[layer])

    def entries(self, ratio: int) -> Entries:
        if ratio not in self._entries:
            slots, positions, storage = self.rows.slots, self.rows.positions, self.storage
            visible, records = rows.group_records(positions, slots, storage.tables, storage.block_tokens, ratio)
            if self.floors is not None:  # what is below was stored with the prefix, and other sequences read it
                records = torch.where(positions < self.floors, -1, records)
            self._entries[ratio] = Entries(visible, records)
        return self._entries[ratio]

    def ring(self, layer: int) -> kv_copy.Ring:
        where = self.storage.ring_layouts[layer]
        return kv_copy.Ring(self.storage.rings[layer], where.channels, where.format)

    def paged(self, layer: int, part: Part) -> kv_copy.Paged:
        where = self.storage.layout.part(layer, part)
        return kv_copy.Paged(
            self.storage.pool, where.data_offset, where.scale_offset, where.entries, where.channels, where.format
        )


class DeviceLayer:
    """One layer's part of the memory. Implements `base.LayerMemory`."""

    def __init__(self, memory: DeviceMemory, plan: LayerPlan):
        self.memory, self.plan = memory, plan

    def compress(self, a: Tensor, b: Tensor | None, norm: RMSNorm, freqs: Tensor, dtype: torch.dtype) -> Tensor:
        memory, plan = self.memory, self.plan
        carry = None if b is None else memory.storage.carry[plan.index]
        paged, records = memory.paged(plan.index, "main"), memory.entries(plan.ratio).records
        where = (memory.rows, plan.ratio)
        return compress.compress_store(a, b, carry, *where, norm.weight, norm.eps, freqs, paged, records, dtype)

    def store_keys(self, k: Tensor, norm: RMSNorm, freqs: Tensor) -> None:
        memory, plan = self.memory, self.plan
        paged, records = memory.paged(plan.index, "index"), memory.entries(plan.ratio).records
        compress.key_store(k, memory.rows, plan.ratio, norm.weight, norm.eps, freqs, paged, records)

    def select(self, q: Tensor, weights: Tensor, shared: Selection | None) -> Selection:
        memory, plan, text = self.memory, self.plan, self.memory.config
        assert plan.keys_from is not None, f"layer {plan.index} selects but has no index keys to score"
        kept = shared.candidates if shared is not None else None
        records, candidates = indexer.select_records(
            q,
            weights,
            memory.paged(plan.keys_from, "index"),
            memory.tables,
            memory.rows,
            memory.entries(plan.ratio).visible,
            text.index_topk,
            memory.numerics.round_scores,
            restrict=kept if plan.candidates_from is not None else None,
            emit=text.candidate_topk_blocks if plan.makes_candidates else 0,
            block_size=text.candidate_block_size,
            chunked=memory.chunked,
        )
        return Selection(records, candidates if plan.makes_candidates else kept)

    def attend(self, q: Tensor, kw: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
        memory, plan, rows = self.memory, self.plan, self.memory.rows_of(self.plan.index)
        ring = memory.ring(plan.index)
        paged = memory.paged(plan.kv_from, "main") if selection is not None and plan.kv_from is not None else None
        records = selection.entries if selection is not None else None
        scale, rounded = q.shape[-1] ** -0.5, memory.numerics.round_probs
        o = attn_sparse.attend(q, kw, ring, rows, plan.window, paged, records, sink, scale, rounded)
        kv_copy.ring_write(ring, kw, rows.slots, rows.positions)
        return o
