"""What every model family shares: the tensors of one step, and how a layer finds what earlier steps stored.

T rows in the step, C chunks, H heads, dh head width, di index width, G groups that close in the step.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from benthic.cache.spec import Part
from benthic.kernels import compress, rope
from benthic.kernels.kv_copy import Rows
from benthic.models.modules import RMSNorm


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, chunks one after another. Built by `engine/batch.py`; a training row set has the same form."""

    ids: Tensor  # [T] int64 token ids
    positions: Tensor  # [T] int64 absolute positions
    history: Tensor  # [T, n] int64: column i is the id at position p-1-i, -1 before the start
    images: Tensor | None  # [T] bool, every position of an image span; None: no image in the step
    embeds: Tensor | None  # [T, D] rows for image positions; None: no image in the step
    starts: tuple[int, ...]  # C + 1 offsets: chunk c is rows starts[c] .. starts[c+1] - 1
    firsts: tuple[int, ...]  # C absolute positions of the first row of each chunk
    slots: tuple[int, ...]  # C state slots
    tables: tuple[tuple[int, ...], ...]  # C block tables
    logit_rows: Tensor  # [R] int64 rows whose logits are wanted
    rows: Rows | None = None  # firsts, slots and starts row by row, on the device; None: a step that the host describes
    lows: tuple[int, ...] = ()  # C positions below which a chunk's rows see no window rows; empty: 0 for all
    stored: tuple[int, ...] = ()  # C positions below which compressed entries are there already; empty: 0 for all
    floors: Tensor | None = None  # [T] int64, the same row by row, for a step on the device; None: 0 for all
    layer_lows: Tensor | None = None  # [L, T] int64: `rows.lows` layer by layer; None: the same in all
    chunked: bool = False  # rows come in long chunks, which only the device knows
    cuts: "tuple[Cut, ...]" = ()  # by layer: where rows end that nobody above needs

    @classmethod
    def on_device(cls, ids: Tensor, history: Tensor, rows: Rows, logit_rows: Tensor, chunked: bool = False) -> "Batch":
        """A step of text of which the host knows no chunk: graphs hold such ones."""
        return cls(
            ids=ids,
            positions=rows.positions,
            history=history,
            images=None,
            embeds=None,
            starts=(),
            firsts=(),
            slots=(),
            tables=(),
            logit_rows=logit_rows,
            rows=rows,
            chunked=chunked,
        )

    @property
    def outputs(self) -> "Batch":
        """The batch whose rows come out of the last layer."""
        return self.cuts[-1].batch if self.cuts else self


class Cut(NamedTuple):
    """The rows of a step that are computed from one layer on: the ends of prompts."""

    layer: int  # the first that computes these alone
    kept: Tensor  # [T'] int64 their numbers among the rows of the layer below, ascending
    batch: Batch  # of these rows alone; chunks without any are left out, `logit_rows` count in it
    starts: dict[int, int]  # of each chunk of the step that has rows here, the number of the first


class Selection(NamedTuple):
    """Entries chosen by an indexer, handed down to the layers that reuse them. The memory decides the form."""

    entries: Tensor  # [T, K] which compressed entries each row attends to, -1 padded; or a training form
    candidates: Tensor | None  # [T, B] blocks the later indexers may choose from

    def at(self, rows: Tensor) -> "Selection":
        """The same of some rows."""
        return Selection(self.entries[rows], None if self.candidates is None else self.candidates[rows])


class LayerMemory(Protocol):
    """One layer's stored state, read and written by this step's rows."""

    def compress(self, a: Tensor, b: Tensor | None, norm: RMSNorm, freqs: Tensor, dtype: torch.dtype) -> Tensor:
        """One latent for every group that closes in this step; its rotation is stored as compressed KV.

        a, b     [T, dh] f32, values and gate logits; rows of open groups are carried over. Each row is a group of its
                 own where b is None; a may have any float dtype then.
        freqs    [dr/2] of the rotation at the group's first token.
        returns  [G, dh] dtype, pooled and normed, not rotated. Where the memory works on all rows, G is T.
        """
        ...

    def store_keys(self, k: Tensor, norm: RMSNorm, freqs: Tensor) -> None:
        """Norm, rotate at the group's first token and store index keys; k [G, di] is made from `compress`'s latents."""
        ...

    def select(self, q: Tensor, weights: Tensor, shared: Selection | None) -> Selection:
        """Score q [T, Hi, di], weights [T, Hi] against this layer's index keys and choose entries."""
        ...

    def attend(self, q: Tensor, kw: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
        """q [T, H, dh] over the window (kw [T, dh] are this step's rows, stored here) and selected entries."""
        ...


class Memory(Protocol):
    def layer(self, index: int) -> LayerMemory: ...
    def of(self, batch: Batch) -> "Memory":
        """The same memory for the rows of another batch, a step's `Cut`."""
        ...


class ByGroups(Protocol):
    """`compress` and `store_keys` of a `LayerMemory` step by step, on the G groups that close alone. 2.6, 2.7."""

    def compress(self, a: Tensor, b: Tensor | None, norm: RMSNorm, freqs: Tensor, dtype: torch.dtype) -> Tensor:
        pooled = a if b is None else compress.pool_groups(*self.close_groups(a, b))
        latent = norm(pooled.to(dtype))
        self.store("main", rope.rotate(latent, self.group_positions(), freqs))
        return latent

    def store_keys(self, k: Tensor, norm: RMSNorm, freqs: Tensor) -> None:
        self.store("index", rope.rotate(norm(k), self.group_positions(), freqs))

    def close_groups(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, dh] f32 in; the rows of groups that close, [G, r, dh] each, out. Open rows are carried over."""
        ...

    def group_positions(self) -> Tensor:
        """[G] int64, position of the first token of every group that closes in this step (ratio 1: each row)."""
        ...

    def store(self, part: Part, values: Tensor) -> None:
        """Store compressed KV ("main") [G, dh] or index keys ("index") [G, di]; quantises as it stores."""
        ...
