"""The indexer: scores compressed entries for each query and chooses which ones attention reads.

Source: model specification, sections 2.7 (scores, selection) and 2.8 (candidates). T rows, Hi index heads, di index
width, n entries of one sequence; a block here is `size` neighbouring entries, not a block of the cache.
"""

from itertools import pairwise

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, kv_copy

TILE_ELEMENTS = 1 << 22  # most elements of one temporary: 16 MB of float32


# ---- scores ----------------------------------------------------------------------------------------------------------


def _score_tile(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
    """q [t, Hi, di], w [t, Hi], keys [n, di] or [t, n, di], one dtype, in which each step is rounded -> [t, n] f32."""
    shared = keys.ndim == 2
    dots = (q.flatten(0, 1) @ keys.t()).unflatten(0, q.shape[:2]) if shared else q @ keys.transpose(1, 2)  # [t, Hi, n]
    return (torch.relu(dots) * w.unsqueeze(-1)).sum(dim=1, dtype=torch.float32)


def index_scores_reference(q: Tensor, w: Tensor, keys: Tensor, round_scores: bool) -> Tensor:
    step = torch.bfloat16 if round_scores else torch.float32
    tile = max(TILE_ELEMENTS // max(q.shape[1] * keys.shape[-2], 1), 1)
    some_q, some_w = q.to(step).split(tile), w.to(step).split(tile)
    some_keys = [keys.to(step)] * len(some_q) if keys.ndim == 2 else keys.to(step).split(tile)
    tiles = [_score_tile(*parts) for parts in zip(some_q, some_w, some_keys, strict=True)]
    return torch.cat(tiles).to(step if round_scores else q.dtype).float()


def index_scores(q: Tensor, w: Tensor, keys: Tensor, round_scores: bool) -> Tensor:
    """score[t, j] = sum over heads of w[t, h] * relu(<q[t, h], keys[j]>).

    q             [T, Hi, di] bf16 or f32; w [T, Hi].
    keys          [n, di], the same for all rows, or [T, n, di]; values that bf16 holds, as all on an FP4 grid are, when
                  `round_scores`. n and T may be 0.
    round_scores  round to bf16 after the dot, after the product with w and after the head sum; else f32 throughout and
                  one rounding to the dtype of q at the end.
    returns       f32 [T, n]; entries the row may not see are scored too.
    Error         summation order; with rounding, 1 unit in the last place of bf16 for each of the steps.
    Cost          2*T*Hi*n*di FLOP; temporaries stay near 16 MB.
    Raises        ShapeError.
    """
    if q.ndim != 3 or w.shape != q.shape[:2]:
        raise ShapeError("index_scores: q, w", want="[T, Hi, di], [T, Hi]", got=(tuple(q.shape), tuple(w.shape)))
    if keys.ndim not in (2, 3) or keys.shape[-1] != q.shape[2] or (keys.ndim == 3 and keys.shape[0] != q.shape[0]):
        want = f"[n, {q.shape[2]}] or [{q.shape[0]}, n, {q.shape[2]}]"
        raise ShapeError("index_scores: keys", want=want, got=tuple(keys.shape))
    run = backends.pick("index_scores", q, w, keys) or index_scores_reference
    return run(q, w, keys, round_scores)


# ---- choice ----------------------------------------------------------------------------------------------------------


def _ascending(mask: Tensor, width: int) -> Tensor:
    """mask [T, n] -> int32 [T, width]: columns that are set, ascending, -1 behind. At most `width` a row are set."""
    place = torch.where(mask, mask.cumsum(dim=1) - 1, width)  # the rest goes to a column that is cut off
    columns = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device).expand_as(mask)
    out = torch.full((mask.shape[0], width + 1), -1, dtype=torch.int32, device=mask.device)
    return out.scatter_(1, place, columns)[:, :width].contiguous()


def _largest(values: Tensor, allowed: Tensor, k: int) -> Tensor:
    """Mask [T, n] of the k largest allowed values of each row, the lowest index first among equals."""
    if values.shape[1] <= k:
        return allowed
    values = values.masked_fill(~allowed, -torch.inf)
    kth = values.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above = values > kth
    level = (values == kth) & allowed
    room = k - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1) <= room))


def _visible(visible: Tensor, n: int) -> Tensor:
    return torch.arange(n, device=visible.device) < visible.unsqueeze(1)


def _in_candidates(candidates: Tensor, n: int, size: int) -> Tensor:
    """candidates int [T, B] blocks, -1 padded -> mask [T, n]."""
    blocks = -(-n // size)
    kept = torch.zeros(candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device)
    at = torch.where((candidates < 0) | (candidates >= blocks), blocks, candidates).long()
    kept.scatter_(1, at, True)
    return kept[:, :blocks].repeat_interleave(size, dim=1)[:, :n]


def candidate_blocks_reference(scores: Tensor, visible: Tensor, blocks: int, size: int) -> Tensor:
    n = scores.shape[1]
    num_blocks = -(-n // size)
    best = scores.masked_fill(~_visible(visible, n), -torch.inf)
    best = torch.nn.functional.pad(best, (0, num_blocks * size - n), value=-torch.inf)
    best = best.unflatten(1, (num_blocks, size)).amax(dim=2)  # [T, blocks of the sequence]
    exists = _visible((visible + size - 1) // size, num_blocks)
    newest = (visible.unsqueeze(1) - 1) // size == torch.arange(num_blocks, device=scores.device)
    best = best.masked_fill(newest, torch.inf)
    return _ascending(_largest(best, exists, blocks), blocks)


def candidate_blocks(scores: Tensor, visible: Tensor, blocks: int, size: int) -> Tensor:
    """The blocks of entries that later indexers may choose from.

    scores   [T, n] f32, finite. n and T may be 0.
    visible  [T] int64, 0 to n: the row sees entries 0 .. visible-1.
    blocks   how many are kept; size entries each. A block counts with its best visible score; the newest block, which
             may be partial, is always kept; ties go to the lowest index.
    returns  int32 [T, blocks] ascending, -1 padded; all blocks where the row sees no more than that.
    Raises   ShapeError.
    """
    _check_choice("candidate_blocks", scores, visible)
    if blocks < 1 or size < 1:
        raise ShapeError("candidate_blocks: blocks, size", want="at least 1", got=(blocks, size))
    run = backends.pick("candidate_blocks", scores) or candidate_blocks_reference
    return run(scores, visible, blocks, size)


def select_entries_reference(
    scores: Tensor, visible: Tensor, topk: int, candidates: Tensor | None = None, size: int = 8
) -> Tensor:
    n = scores.shape[1]
    allowed = _visible(visible, n)
    if candidates is not None:
        allowed = allowed & _in_candidates(candidates, n, size)
    return _ascending(_largest(scores, allowed, topk), topk)


def select_entries(
    scores: Tensor, visible: Tensor, topk: int, candidates: Tensor | None = None, size: int = 8
) -> Tensor:
    """The entries a row attends: the `topk` best visible ones, all of them where it sees no more.

    scores      [T, n] f32, finite. n and T may be 0.
    visible     [T] int64, 0 to n.
    candidates  int [T, B] blocks of `size` entries, -1 padded: entries outside are excluded, and where fewer than
                `topk` are left, only those are chosen. None: no restriction.
    returns     int32 [T, topk] ascending, -1 padded; ties at the boundary go to the lowest index.
    Raises      ShapeError.
    """
    _check_choice("select_entries", scores, visible)
    if topk < 1 or size < 1:
        raise ShapeError("select_entries: topk, size", want="at least 1", got=(topk, size))
    if candidates is not None and (candidates.ndim != 2 or candidates.shape[0] != scores.shape[0]):
        raise ShapeError("select_entries: candidates", want=f"[{scores.shape[0]}, B]", got=tuple(candidates.shape))
    run = backends.pick("select_entries", scores) or select_entries_reference
    return run(scores, visible, topk, candidates, size)


def _check_choice(op: str, scores: Tensor, visible: Tensor) -> None:
    if scores.ndim != 2 or visible.shape != scores.shape[:1]:
        got = (tuple(scores.shape), tuple(visible.shape))
        raise ShapeError(f"{op}: scores, visible", want="[T, n], [T]", got=got)


# ---- over the cache --------------------------------------------------------------------------------------------------


def _entry_records(tables: Tensor, n: int, entries: int) -> Tensor:
    """tables [C, B] -> record ids [C, n] of entries 0 .. n-1 of each sequence."""
    at = torch.arange(n, device=tables.device)
    return tables[:, at // entries] * entries + at % entries


def index_select_reference(
    q: Tensor,
    w: Tensor,
    keys: kv_copy.Paged,
    tables: Tensor,
    starts: tuple[int, ...],
    visible: Tensor,
    topk: int,
    round_scores: bool,
    restrict: Tensor | None = None,
    emit: int = 0,
    block_size: int = 8,
) -> tuple[Tensor, Tensor | None]:
    rows = q.shape[0]
    entries = torch.full((rows, topk), -1, dtype=torch.int32, device=q.device)
    emitted = torch.full((rows, emit), -1, dtype=torch.int32, device=q.device) if emit else None
    seen = visible.tolist()

    def choose(part: slice | Tensor, scores: Tensor) -> None:
        candidates = None if restrict is None else restrict[part]
        entries[part] = select_entries_reference(scores, visible[part], topk, candidates, block_size)
        if emitted is not None:
            emitted[part] = candidate_blocks_reference(scores, visible[part], emit, block_size)

    unscored: list[int] = []  # rows that take all they may see
    alone: list[int] = []  # chunks of one row, scored together
    for chunk, (start, end) in enumerate(pairwise(starts)):
        most = max(seen[start:end], default=0)
        if most <= topk and most <= (emit * block_size or topk):
            unscored.extend(range(start, end))
        elif end - start == 1:
            alone.append(chunk)
        else:
            stored = kv_copy.read_records_reference(
                keys, _entry_records(tables[chunk : chunk + 1], most, keys.entries)[0]
            )
            choose(slice(start, end), index_scores_reference(q[start:end], w[start:end], stored, round_scores))
    if len(unscored) == rows:
        n = max(seen, default=0)
        choose(slice(0, rows), q.new_zeros(rows, n, dtype=torch.float32))
    elif unscored:
        some = torch.tensor(unscored, device=q.device)
        n = max(seen[row] for row in unscored)
        choose(some, q.new_zeros(len(unscored), n, dtype=torch.float32))
    if alone:
        at = [starts[chunk] for chunk in alone]
        most = max(seen[row] for row in at)
        fit = max(TILE_ELEMENTS // (most * keys.channels), 1)
        for i in range(0, len(alone), fit):
            some = torch.tensor(at[i : i + fit], device=q.device)
            stored = kv_copy.read_records_reference(
                keys, _entry_records(tables[alone[i : i + fit]], most, keys.entries)
            )
            choose(some, index_scores_reference(q[some], w[some], stored, round_scores))
    return entries, emitted


def index_select(
    q: Tensor,
    w: Tensor,
    keys: kv_copy.Paged,
    tables: Tensor,
    starts: tuple[int, ...],
    visible: Tensor,
    topk: int,
    round_scores: bool,
    restrict: Tensor | None = None,
    emit: int = 0,
    block_size: int = 8,
) -> tuple[Tensor, Tensor | None]:
    """`index_scores`, `select_entries` and `candidate_blocks` for the chunks of a step, over keys in the cache.

    q           [T, Hi, di]; w [T, Hi]. T may be 0.
    keys        where the index keys are.
    tables      [C, B] int64 block tables of the chunks; entry j of chunk c is record tables[c, j // e] * e + j % e,
                e = keys.entries. Padding is never read.
    starts      C+1 row offsets, starts[C] = T.
    visible     [T] int64: row t sees entries 0 .. visible[t]-1 of its sequence.
    restrict    int [T, B] candidate blocks of `block_size` entries, or None.
    emit        candidate blocks to return; 0: none.
    returns     entries int32 [T, topk], numbers inside the sequence, ascending, -1 padded; candidates
                int32 [T, emit] in the same form, or None.
    Error       as `index_scores`; the choice itself is exact.
    Cost        2*Hi*di FLOP for each row and entry it sees; nothing is scored where a row sees no more than it may
                keep. Rows of one-row chunks are scored together, longer chunks one after another.
    Raises      ShapeError.
    """
    if q.ndim != 3 or w.shape != q.shape[:2] or q.shape[2] != keys.channels:
        got = (tuple(q.shape), tuple(w.shape))
        raise ShapeError("index_select: q, w", want=f"[T, Hi, {keys.channels}], [T, Hi]", got=got)
    if len(starts) - 1 != tables.shape[0] or starts[-1] != q.shape[0] or visible.shape != q.shape[:1]:
        got = (tuple(tables.shape), len(starts), starts[-1], tuple(visible.shape))
        want = f"[C, B], C+1, {q.shape[0]}, [{q.shape[0]}]"
        raise ShapeError("index_select: tables, starts, starts[-1], visible", want=want, got=got)
    if restrict is not None and (restrict.ndim != 2 or restrict.shape[0] != q.shape[0]):
        raise ShapeError("index_select: restrict", want=f"[{q.shape[0]}, B]", got=tuple(restrict.shape))
    run = backends.pick("index_select", q, w, keys.pool) or index_select_reference
    return run(q, w, keys, tables, starts, visible, topk, round_scores, restrict, emit, block_size)


def select_records_reference(
    q: Tensor,
    w: Tensor,
    keys: kv_copy.Paged,
    tables: Tensor,
    rows: kv_copy.Rows,
    visible: Tensor,
    topk: int,
    round_scores: bool,
    restrict: Tensor | None = None,
    emit: int = 0,
    block_size: int = 8,
    chunked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    starts = tuple(range(q.shape[0] + 1))  # each row by itself
    entries, candidates = index_select_reference(
        q, w, keys, tables[rows.slots].long(), starts, visible, topk, round_scores, restrict, emit, block_size
    )
    at = entries.clamp(min=0).long()
    blocks = tables[rows.slots[:, None], at // keys.entries].long()
    records = torch.where(entries < 0, -1, blocks * keys.entries + at % keys.entries).int()
    return records, candidates


def select_records(
    q: Tensor,
    w: Tensor,
    keys: kv_copy.Paged,
    tables: Tensor,
    rows: kv_copy.Rows,
    visible: Tensor,
    topk: int,
    round_scores: bool,
    restrict: Tensor | None = None,
    emit: int = 0,
    block_size: int = 8,
    chunked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`index_select` from device tensors alone, and its answer as records of the pool.

    q, w, keys  as `index_select`. T may be 0.
    tables      int32 [slots, B]: block table of each state slot; row t reads that of rows.slots[t].
    rows        where the rows stand.
    visible     [T] int64: row t sees entries 0 .. visible[t]-1; at most B * keys.entries.
    restrict, emit, block_size   as `index_select`; candidates are block numbers inside the sequence.
    chunked     rows come in chunks of four and more, whose rows may share the reading of keys.
    returns     records int32 [T, topk], block * keys.entries + slot, in the order of the entries, -1 padded;
                candidates int32 [T, emit] or None. Main KV of a layer has as many records a block as its index keys.
    Error, Cost, Raises   as `index_select`.
    """
    if q.ndim != 3 or w.shape != q.shape[:2] or q.shape[2] != keys.channels:
        got = (tuple(q.shape), tuple(w.shape))
        raise ShapeError("select_records: q, w", want=f"[T, Hi, {keys.channels}], [T, Hi]", got=got)
    if tables.ndim != 2 or visible.shape != q.shape[:1] or rows.slots.shape != q.shape[:1]:
        got = (tuple(tables.shape), tuple(visible.shape), tuple(rows.slots.shape))
        raise ShapeError("select_records: tables, visible, slots", want="[slots, B], [T], [T]", got=got)
    if restrict is not None and (restrict.ndim != 2 or restrict.shape[0] != q.shape[0]):
        raise ShapeError("select_records: restrict", want=f"[{q.shape[0]}, B]", got=tuple(restrict.shape))
    run = backends.pick("select_records", q, w, keys.pool) or select_records_reference
    return run(q, w, keys, tables, rows, visible, topk, round_scores, restrict, emit, block_size, chunked)
