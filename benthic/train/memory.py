"""The training form of a model's memory: whole rows of tokens, every stored value still part of the graph.

B rows of L tokens run as one step of T = B L. Nothing is packed or paged: layers that own compressed KV leave it here,
later layers read it, and attention goes over [window ; compressed] keys of the own row at once. With top-k in force a
mask says which entries an index source chose; without it every visible entry is attended (dense visibility).

The index loss teaches the indexers: the distribution of their scores over visible entries against the attention mass
that the layers using the selection put there (heads summed, gradient stopped), as a sum of KL divergences. It is taken
on the first `index_rows` rows.

H heads, dh head width, Hi and di index heads and width, N = L // ratio compressed entries a row.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from benthic.cache.spec import Part
from benthic.kernels import quant
from benthic.models.base import ByGroups, Selection
from benthic.models.deepseek_v41_config import LayerPlan, ModelConfig
from benthic.train.kernels import TrainingKernels, sink_gate
from benthic.types import Numerics

TILE = 128  # block-sparse granularity of the attention kernel, in folded query rows and in keys


CHUNK = 1 << 29  # dot products of the indexers at a time, while entries are chosen
Pick = Literal["index", "all", "random"]


@dataclass(frozen=True, slots=True)
class Mode:
    """What is in force in a forward pass.

    topk        selections limit attention; else every visible entry is attended
    index_rows  first rows of the batch on which the index loss is taken; 0: none
    pick        of what selections are made: the indexers' scores; for measures, all that is visible, or chance
    """

    topk: bool
    index_rows: int
    pick: Pick = "index"


class Source(NamedTuple):
    """What one index source scored, on the rows of the index loss."""

    q: Tensor  # [b, L, Hi, di]
    weights: Tensor  # [b, L, Hi]
    keys: Tensor  # [b, N, di]
    allowed: Tensor | None  # [b, L, N] bool: selected entries; None: all visible
    ratio: int


class RowShapes:
    """What depends only on B, L and the config: positions, visibility, block masks, buffers. Built once a run."""

    def __init__(
        self, config: ModelConfig, plan: tuple[LayerPlan, ...], rows: int, length: int, device: torch.device,
        kernels: TrainingKernels,
    ):  # fmt: skip
        self.text, self.plan, self.kernels = config.text, plan, kernels
        self.rows, self.length, self.device = rows, length, device
        self.heads = config.text.num_attention_heads
        at = torch.arange(length, device=device)
        self.positions = at.repeat(rows)  # [T]
        self.groups = {r: length // r for r in sorted({p.ratio for p in plan} - {0})}  # entries a row
        self.group_positions = {r: (torch.arange(n, device=device) * r).repeat(rows) for r, n in self.groups.items()}
        self.visible = {r: (at + 1) // r for r in self.groups}  # [L] entries a token may see
        self._masks: dict[Any, Any] = {}
        self._chosen: dict[int, Tensor] = {}

    def window_mask(self, ratio: int) -> Tensor:
        """[L, L + N] bool: window keys, then compressed entries, dense visibility."""
        at = torch.arange(self.length, device=self.device)
        back = at[:, None] - at[None, :]
        window = (back >= 0) & (back < self.text.sliding_window)
        if not ratio:
            return window
        entries = torch.arange(self.groups[ratio], device=self.device)
        return torch.cat([window, entries[None, :] < self.visible[ratio][:, None]], dim=1)

    def chosen(self, source: int) -> Tensor:
        """[B, L, N] bool: the entries that an index source selected. One buffer a source, overwritten each step."""
        if source not in self._chosen:
            shape = self.rows, self.length, self.groups[self.plan[source].ratio]
            self._chosen[source] = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return self._chosen[source]

    def block_mask(self, ratio: int, source: int | None) -> BlockMask:
        """Which tiles the attention kernel visits. source: index source whose selection is in force, None for all.

        Heads are folded into the query axis (row = position * heads + head), so a tile of keys serves all heads.
        """
        key = ratio, source
        if key not in self._masks:
            self._masks[key] = self._make_mask(ratio, source)
        return self._masks[key]

    def _make_mask(self, ratio: int, source: int | None) -> BlockMask:
        heads, length, window = self.heads, self.length, self.text.sliding_window
        entries = self.groups.get(ratio, 0)

        def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            position = row // heads
            back = position - key
            inside = (key < length) & (back >= 0) & (back < window)
            if ratio == 0:
                return inside
            return inside | ((key >= length) & ((key - length + 1) * ratio <= position + 1))

        mask = create_block_mask(
            visible, None, None, length * heads, length + entries, device=self.device, BLOCK_SIZE=TILE
        )
        if source is None:
            return mask
        selected = self.chosen(source)

        def selecting(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            position = row // heads
            back = position - key
            inside = (key < length) & (back >= 0) & (back < window)
            return inside | ((key >= length) & selected[b, position, torch.clamp(key - length, min=0)])

        tiles = mask.to_dense()[:, :, : -(-length * heads // TILE), : -(-(length + entries) // TILE)].to(torch.int32)
        order = torch.argsort(tiles, dim=-1, descending=True, stable=True).to(torch.int32)
        return BlockMask.from_kv_blocks(
            tiles.sum(-1, dtype=torch.int32),
            order.contiguous(),
            BLOCK_SIZE=TILE,
            mask_mod=selecting,
            seq_lengths=(length * heads, length + entries),
        )


class RowMemory:
    """What the tokens of one training step can reach; made anew for each forward pass."""

    def __init__(self, shapes: RowShapes, numerics: Numerics, mode: Mode):
        self.shapes, self.numerics, self.mode = shapes, numerics, mode
        self.latents: dict[int, Tensor] = {}  # KV source -> [B, N, dh]
        self.keys: dict[int, Tensor] = {}  # KV source -> [B, N, di]
        self.sources: dict[int, Source] = {}
        self.mass: dict[int, list[tuple[Tensor, Tensor]]] = {}  # index source -> (target [b, L, N], its entropy)

    def layer(self, index: int) -> "RowLayer":
        return RowLayer(self, self.shapes.plan[index])

    def index_loss(self) -> dict[int, Tensor]:
        """Index source -> mean KL divergence a token, nats, summed over the layers that use the selection."""
        losses: dict[int, Tensor] = {}
        for index, source in self.sources.items():
            visible = self.shapes.visible[source.ratio]
            targets = torch.stack([target for target, _ in self.mass[index]]).sum(0)
            entropy = torch.stack([entropy for _, entropy in self.mass[index]]).sum()
            piece = self.shapes.kernels.piece(index_cross_entropy)
            losses[index] = piece(source.q, source.weights, source.keys, targets, visible, source.allowed) - entropy
        return losses


class RowLayer(ByGroups):
    """One layer's part of the memory. Implements `base.LayerMemory`."""

    def __init__(self, memory: RowMemory, plan: LayerPlan):
        self.memory, self.plan, self.shapes = memory, plan, memory.shapes

    def group_positions(self) -> Tensor:
        return self.shapes.group_positions[self.plan.ratio]

    def close_groups(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ratio, rows = self.plan.ratio, self.shapes.rows
        used = self.shapes.groups[ratio] * ratio  # an open group at the end of a row closes for nobody
        whole = [x.unflatten(0, (rows, -1))[:, :used].reshape(-1, ratio, x.shape[-1]) for x in (a, b)]
        return whole[0], whole[1]

    def store(self, part: Part, values: Tensor) -> None:
        memory, kept = self.memory, self.memory.latents if part == "main" else self.memory.keys
        if memory.numerics.quantise:
            latents = quant.roundtrip_nvfp4 if self.shapes.text.use_fp4_sparse_kv else quant.roundtrip_fp8
            values = latents(values) if part == "main" else quant.roundtrip_mxfp4(values)
        kept[self.plan.index] = values.unflatten(0, (self.shapes.rows, -1))

    def select(self, q: Tensor, weights: Tensor, shared: Selection | None) -> Selection:
        memory, shapes, plan = self.memory, self.shapes, self.plan
        assert plan.keys_from is not None, f"layer {plan.index} selects but has no index keys to score"
        q, weights = (x.unflatten(0, (shapes.rows, -1)) for x in (q, weights))
        keys = memory.keys[plan.keys_from]
        candidates = shared.candidates if shared is not None else None
        chosen = torch.empty(0, dtype=torch.bool, device=q.device)  # dense visibility
        if memory.mode.topk:
            chosen = shapes.chosen(plan.index)
            with torch.no_grad():
                emitted = self._choose(q, weights, keys, candidates, chosen)
            candidates = emitted if plan.makes_candidates else candidates
        if memory.mode.index_rows:
            b = memory.mode.index_rows
            allowed = chosen[:b] if memory.mode.topk else None
            memory.sources[plan.index] = Source(q[:b], weights[:b], keys[:b], allowed, plan.ratio)
            memory.mass[plan.index] = []
        return Selection(chosen, candidates)

    def _choose(self, q: Tensor, weights: Tensor, keys: Tensor, candidates: Tensor | None, into: Tensor) -> Tensor:
        """Write the selection into [B, L, N]; returns the candidate blocks, empty where the layer makes none."""
        shapes, plan, text, pick = self.shapes, self.plan, self.shapes.text, self.memory.mode.pick
        visible = shapes.visible[plan.ratio]
        if pick == "all":
            into.copy_(torch.arange(into.shape[-1], device=into.device) < visible.unsqueeze(-1))
            return into[..., :0]
        restrict = candidates if plan.candidates_from is not None and pick == "index" else None
        blocks = text.candidate_topk_blocks if plan.makes_candidates and pick == "index" else 0
        emitted: list[Tensor] = []
        rows = max(1, CHUNK // (shapes.length * q.shape[2] * into.shape[-1]))
        while shapes.rows % rows:
            rows -= 1
        for part in (slice(first, first + rows) for first in range(0, shapes.rows, rows)):
            if pick == "random":
                scores = torch.rand(into[part].shape, device=into.device).to(q.dtype)
                scores = shapes.kernels.piece(only_visible)(scores, visible)
            else:
                scores = shapes.kernels.piece(visible_scores)(q[part], weights[part], keys[part], visible)
            limit = None if restrict is None else restrict[part]
            into[part], made = choose(
                shapes.kernels, scores, visible, text.index_topk, limit, blocks, text.candidate_block_size
            )
            emitted.append(made)
        return torch.cat(emitted)

    def attend(self, q: Tensor, kw: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
        memory, shapes, plan = self.memory, self.shapes, self.plan
        rows, heads, width = shapes.rows, shapes.heads, q.shape[-1]
        keys = kw.unflatten(0, (rows, -1))  # [B, L, dh]
        compressed: Tensor | None = None
        if selection is not None:
            assert plan.kv_from is not None, f"layer {plan.index} attends to a selection but has no compressed KV"
            compressed = memory.latents[plan.kv_from]
            keys = torch.cat([keys, compressed], dim=1)
        source = plan.topk_from if selection is not None and memory.mode.topk else None
        folded = q.reshape(rows, 1, shapes.length * heads, width)
        attention = block_sparse if shapes.kernels.compiled else masked
        o, lse = attention(shapes, folded, keys, plan.ratio, source)
        lse = lse.reshape(-1, heads)
        if memory.mode.index_rows and compressed is not None and plan.topk_from in memory.sources:
            b = memory.mode.index_rows
            seen = memory.sources[plan.topk_from].allowed
            with torch.no_grad():
                target = shapes.kernels.piece(attention_mass)(
                    folded[:b, 0], compressed[:b], lse[: b * shapes.length].unflatten(0, (b, -1)), sink,
                    shapes.visible[plan.ratio], seen,
                )  # fmt: skip
            memory.mass[plan.topk_from].append(target)
        return shapes.kernels.piece(sink_gate)(o.reshape(-1, heads, width), lse, sink)


# ---- attention -------------------------------------------------------------------------------------------------------


def block_sparse(shapes: RowShapes, q: Tensor, keys: Tensor, ratio: int, source: int | None) -> tuple[Tensor, Tensor]:
    """q [B, 1, L H, dh] over keys [B, M, dh] -> outputs without a sink and their log-sum-exp, block-sparse."""
    k = keys.unsqueeze(1)
    mask = shapes.block_mask(ratio, source)
    o, aux = shapes.kernels.piece(flex_attention)(q, k, k, block_mask=mask, return_aux=AuxRequest(lse=True))
    return o, aux.lse


def masked(shapes: RowShapes, q: Tensor, keys: Tensor, ratio: int, source: int | None) -> tuple[Tensor, Tensor]:
    """The same with an explicit mask: the CPU path and the reference of the block-sparse one."""
    mask = shapes.window_mask(ratio)[None].expand(shapes.rows, -1, -1)
    if source is not None:
        mask = torch.cat([mask[..., : shapes.length], shapes.chosen(source)], dim=-1)
    mask = mask.repeat_interleave(shapes.heads, dim=1)  # [B, L H, M]
    logits = (q[:, 0].float() @ keys.float().transpose(1, 2)) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(-1)
    o = torch.exp(logits - lse.unsqueeze(-1)) @ keys.float()
    return o.to(q.dtype).unsqueeze(1), lse.unsqueeze(1)


# ---- the indexer -----------------------------------------------------------------------------------------------------


def scores_of(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [b, L, Hi, di], weights [b, L, Hi], keys [b, N, di] -> f32 [b, L, N]."""
    dots = q.flatten(1, 2) @ keys.transpose(1, 2)  # [b, L Hi, N]
    dots = dots.unflatten(1, (q.shape[1], q.shape[2])).float()
    return (F.relu(dots) * weights.float().unsqueeze(-1)).sum(2)


def ordered(values: Tensor) -> Tensor:
    """f32 -> int32 in the same order; -0 counts as 0."""
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def top_mask(scores: Tensor, k: int) -> Tensor:
    """The k largest of the last axis as a mask, lowest index first among equals; -inf is never taken. f32 [..., N].

    Score and index make one 48-bit key. The k-th key is found by 48 halvings. N is below 2^16. This is the CPU path
    and the reference of `select.top_mask`.
    """
    n = scores.shape[-1]
    keys = (ordered(scores).to(torch.int64) << 16) | (n - 1 - torch.arange(n, device=scores.device))
    low = torch.full_like(keys[..., :1], -(1 << 47))  # at least k keys are >= low, or low is below all keys
    high = torch.full_like(low, 1 << 47)
    for _ in range(48):
        middle = (low + high) >> 1
        enough = (keys >= middle).sum(-1, keepdim=True) >= k
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return (keys >= low) & ~torch.isneginf(scores)


def only_visible(scores: Tensor, visible: Tensor) -> Tensor:
    """[b, L, N] -> the same, -inf from entry visible [L] on."""
    return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= visible[:, None], -torch.inf)


def visible_scores(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """`scores_of` in the dtype of q, as serving compares them, -inf from entry visible [L] on. [b, L, N]."""
    return only_visible(scores_of(q, weights, keys).to(q.dtype), visible)


def block_scores(scores: Tensor, visible: Tensor, size: int) -> Tensor:
    """[b, L, N] -> [b, L, ceil(N / size)]: the best of each block; the newest, perhaps not full, is always kept."""
    best = F.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    newest = torch.arange(best.shape[-1], device=scores.device) == (visible.unsqueeze(-1) - 1) // size
    return best.masked_fill(newest & (visible.unsqueeze(-1) > 0), torch.inf)


def only_blocks(scores: Tensor, blocks: Tensor, size: int) -> Tensor:
    """scores [b, L, N] -> the same, -inf outside of blocks [b, L, ceil(N / size)] bool."""
    return scores.masked_fill(~blocks.repeat_interleave(size, dim=-1)[..., : scores.shape[-1]], -torch.inf)


def choose(
    kernels: TrainingKernels,
    scores: Tensor,
    visible: Tensor,
    topk: int,
    restrict: Tensor | None,
    blocks: int,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Chosen entries [b, L, N] bool; candidate blocks [b, L, ceil(N / size)] bool (empty when `blocks` is 0).

    scores    [b, L, N], of visible entries; the others are -inf.
    restrict  candidate blocks of an earlier source, as returned here: other entries are out.
    """
    emitted = scores.new_empty(len(scores), 0, dtype=torch.bool)
    if blocks:
        emitted = _top(kernels, kernels.piece(block_scores)(scores, visible, size), blocks)
    if restrict is not None:
        scores = kernels.piece(only_blocks)(scores, restrict, size)
    return _top(kernels, scores, topk), emitted


def _top(kernels: TrainingKernels, scores: Tensor, k: int) -> Tensor:
    if not kernels.compiled:
        return top_mask(scores.float(), k)
    from benthic.train import select

    return select.top_mask(scores, k)


def attention_mass(
    q: Tensor, compressed: Tensor, lse: Tensor, sink: Tensor, visible: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Share of the attention mass on each compressed entry, heads summed, and its entropy (nats, mean over tokens).

    q [b, L H, dh]; compressed [b, N, dh]; lse [b, L, H] without the sink. Returns f32 [b, L, N] and a scalar; rows
    that see no entry are zero.
    """
    heads = sink.shape[0]
    logits = (q @ compressed.transpose(1, 2)).unflatten(1, (-1, heads)).float() * q.shape[-1] ** -0.5  # [b, L, H, N]
    total = torch.logaddexp(lse, sink)
    mass = torch.exp(logits - total.unsqueeze(-1)).sum(2)  # [b, L, N]
    seen = torch.arange(mass.shape[-1], device=q.device) < visible.unsqueeze(-1)
    seen = seen if allowed is None else seen & allowed
    mass = torch.where(seen, mass, 0.0)
    share = mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)
    entropy = -(share * share.clamp(min=1e-30).log()).sum(-1)
    return share, entropy.mean()


def index_cross_entropy(
    q: Tensor, weights: Tensor, keys: Tensor, target: Tensor, visible: Tensor, allowed: Tensor | None
) -> Tensor:
    """Cross entropy (nats, mean over tokens) of the scores' softmax over allowed entries against target [b, L, N]."""
    scores = scores_of(q, weights, keys)
    seen = torch.arange(scores.shape[-1], device=q.device) < visible.unsqueeze(-1)
    seen = (seen if allowed is None else seen & allowed).expand_as(scores)
    scores = torch.where(seen, scores, -1e30)
    log_share = scores - torch.logsumexp(scores, dim=-1, keepdim=True)
    return -(torch.where(seen, target * log_share, 0.0)).sum(-1).mean()
