"""Triton versions of `kernels/indexer.py`; contracts are there. Source: model specification, sections 2.7 and 2.8.

Two kernels a call, whatever the rows are: `_score` writes the scores of each row and the best of every block of SIZE of
them, `_choose` finds the k best from those. Nothing depends on the host but shapes and the width of the block tables.

Scores. Keys are the M side of the product, heads the N side, and a program unpacks a tile of KEYS keys in registers,
straight into the order in which the matrix unit takes its left operand: a thread loads the 16 bytes (32 channels, one
scale) of a key, and the queries' channels are put into the order that results. E2M1 codes become bfloat16 by moving
their bits and one multiplication by the scale, exact for scales from 2^-93 to 2^33. Programs are a fixed number; each
takes an equal share of all tiles of all rows, so that one long context does not wait for one program. Up to TOGETHER
rows of a chunk share the unpacking.

Choice. The k best of n scores are inside the k blocks whose best is highest, ties to the lowest index at both levels:
an entry of any other block has k entries before it. So a program goes down a tree, over the children of k nodes a step,
and finds the k-th largest bit by bit. Exact, and no step depends on how many values are equal.

Scratch: rows * (positions + positions/SIZE + ...) * 2 bytes (4 for float32), kept under SCRATCH_BYTES by taking rows
in portions. Cost: 68 bytes a key and request, 2*heads*128 FLOP a key and row.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import indexer as plain
from benthic.kernels import kv_copy
from benthic.kernels.triton import tuning
from benthic.kernels.triton.quant import INTERPRETED, bound, e2m1_values, narrow, widen
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two

SCRATCH_BYTES = 256 << 20
ROWS_AT_ONCE = 1024  # rows of one launch; a program adds up their tiles at its start


# Scores


@triton.jit
def _key_of_row(row, KEYS: tl.constexpr, WARPS: tl.constexpr):
    """Key of each loaded row. Loads give a warp 8 rows at a time; a thread's rows are keys side by side."""
    return row % (8 * WARPS) * (KEYS // (8 * WARPS)) + row // (8 * WARPS)


@triton.jit
def _in_key_order(x, KEYS: tl.constexpr, WARPS: tl.constexpr):
    """[KEYS, C], one for each row of the product of `_mxfp4_keys`, to the order of keys."""
    x = tl.reshape(x, (KEYS // (16 * WARPS), WARPS, 2, 8, x.shape[1]))
    return tl.reshape(tl.permute(x, (1, 3, 0, 2, 4)), (KEYS, x.shape[4]))


@triton.jit
def _mxfp4_keys(codes_ptr, scales_ptr, KEYS: tl.constexpr, WARPS: tl.constexpr):
    """Word pointers of each loaded row's codes and scales [KEYS] -> bf16 [KEYS, 128] times 2^-32.

    The matrix unit takes 16 rows of a warp: two loads. Channel 32*quarter + 8*word + 4*half + 2*b + a of a key is at
    [word, b, a, quarter, half].
    """
    word = tl.arange(0, 16)
    words = tl.load(codes_ptr[:, None] + word[None, :]).to(tl.uint32, bitcast=True)
    scales = tl.load(scales_ptr).to(tl.uint32, bitcast=True)
    byte = (scales[:, None] >> (word // 4 * 8)[None, :].to(tl.uint32)) & 0xFF
    factor = tl.minimum(byte + 94, 255) * 0x00800080  # 2^(byte - 127 + 126 - 32), as bf16, twice
    keys = tl.reshape(e2m1_values(words, factor), (KEYS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(keys, (0, 2, 1, 3, 5, 7, 6, 4, 8)), (KEYS, 128))


@triton.jit
def _mxfp4_queries(q, COLUMNS: tl.constexpr):
    """q [COLUMNS, 128] -> times 2^31, channels in the order of `_mxfp4_keys`."""
    q = narrow(widen(q) * 2147483648.0, tl.bfloat16)
    q = tl.permute(tl.reshape(q, (COLUMNS, 4, 4, 2, 2, 2)), (0, 2, 4, 5, 1, 3))
    return tl.reshape(q, (COLUMNS, 128))


@triton.jit
def _product(a, b):
    """a @ b in f32. The interpreter takes bf16 for integers."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _listed(tile, loaded, list_ptr, LISTED: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Blocks of entries that a tile's loaded rows belong to, -1 behind the list; nothing without one."""
    if LISTED:
        at = tile * KEYS + loaded
        return tl.load(list_ptr + at // SIZE, mask=at < LISTED * SIZE, other=-1)
    else:
        return tile


@triton.jit
def _home(
    tile,
    listed,
    loaded,
    table,
    most,
    ENTRIES: tl.constexpr,
    LISTED: tl.constexpr,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Block of the pool, one or one a loaded row, and place in it of a tile's keys; of others where it has fewer."""
    if LISTED:
        entry = listed * SIZE + loaded % SIZE
        entry = tl.where((listed >= 0) & (entry < most), entry, 0)
        block, inside = entry // ENTRIES, entry % ENTRIES
    elif ENTRIES % KEYS == 0:
        block, inside = tl.minimum(tile * KEYS, most - 1) // ENTRIES, tile * KEYS % ENTRIES + loaded
    else:
        entry = tl.minimum(tile * KEYS + loaded, most - 1)
        block, inside = entry // ENTRIES, entry % ENTRIES
    return tl.load(table + block), inside


@triton.jit
def _sweep(
    row,  # the first of the rows, int64
    members,  # how many there are
    begin,  # tiles
    end,
    q_ptr,
    w_ptr,
    pool_ptr,
    tables_ptr,
    slots_ptr,
    visible_ptr,
    restrict_ptr,
    scores_ptr,
    best_ptr,
    pool_stride,
    data_offset,
    scale_offset,
    table_stride,
    width,
    best_width,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    FORMAT: tl.constexpr,
    ENTRIES: tl.constexpr,
    LISTED: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    KEYS: tl.constexpr,
    ROUND: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles begin .. end-1 of up to TOGETHER rows of one chunk."""
    column = tl.arange(0, TOGETHER * H)
    live = (column % H < HEADS) & (column // H < members)
    head = (row + column // H) * HEADS + column % H
    q = tl.load(q_ptr + head[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :], mask=live[:, None], other=0.0)
    q = _mxfp4_queries(q, TOGETHER * H) if FORMAT == "mxfp4" else 0.5 * q
    q = tl.trans(q)
    w = widen(tl.load(w_ptr + head, mask=live, other=0.0))
    member = tl.arange(0, TOGETHER)
    seen = tl.load(visible_ptr + row + member, mask=member < members, other=0).to(tl.int32)
    most = tl.max(seen, axis=0)
    table = tables_ptr + tl.load(slots_ptr + row) * table_stride
    loaded = tl.arange(0, KEYS)
    loaded = _key_of_row(loaded, KEYS, WARPS) if FORMAT == "mxfp4" else loaded
    # where the keys of a tile are is loaded one tile ahead, what the list says two
    listed = _listed(begin, loaded, restrict_ptr + row * LISTED, LISTED, SIZE, KEYS)
    home, inside = _home(begin, listed, loaded, table, most, ENTRIES, LISTED, SIZE, KEYS)
    listed = _listed(begin + 1, loaded, restrict_ptr + row * LISTED, LISTED, SIZE, KEYS)
    for tile in tl.range(bound(begin), bound(end), num_stages=STAGES):
        base = home.to(tl.int64) * pool_stride
        within = inside
        home, inside = _home(tile + 1, listed, loaded, table, most, ENTRIES, LISTED, SIZE, KEYS)
        listed = _listed(tile + 2, loaded, restrict_ptr + row * LISTED, LISTED, SIZE, KEYS)
        base = tl.multiple_of(base + data_offset, 4)
        if FORMAT == "mxfp4":
            codes = pool_ptr + base + within * (CHANNELS // 8)
            keys = _mxfp4_keys(codes, pool_ptr + (base - data_offset + scale_offset + within), KEYS, WARPS)
        else:
            at = (base + within * CHANNELS)[:, None] + tl.arange(0, CHANNELS)[None, :]
            keys = tl.load(pool_ptr + at)
        dots = _product(keys, q)  # [KEYS, TOGETHER * H], halved
        if ROUND:
            dots = widen(narrow(dots, tl.bfloat16))
        if TOGETHER > 2:  # again for each tile: too many registers to keep
            w = widen(tl.load(w_ptr + head, mask=live, other=0.0))
        parts = (dots + tl.abs(dots)) * w[None, :]  # relu by an addition: the units for maxima are busy
        if ROUND:
            parts = widen(narrow(parts, tl.bfloat16))
        scores = tl.sum(tl.reshape(parts, (KEYS, TOGETHER, H)), axis=2)
        scores = _in_key_order(scores, KEYS, WARPS) if FORMAT == "mxfp4" else scores
        position = tile * KEYS + tl.arange(0, KEYS)[:, None]
        to = (row + member[None, :]) * width + position
        wanted = (member < members)[None, :]
        tl.store(scores_ptr + to, narrow(scores, scores_ptr.dtype.element_ty), mask=wanted)
        if LISTED:
            block = tl.load(restrict_ptr + row * LISTED + position // SIZE, mask=position < LISTED * SIZE, other=-1)
            entry = block * SIZE + position % SIZE
            counts = (block >= 0) & (entry < most)
        else:
            counts = position < seen[None, :]
        best = tl.where(counts, scores, -float("inf"))
        best = tl.max(tl.reshape(best, (KEYS // SIZE, SIZE, TOGETHER)), axis=1)
        to = (row + member[None, :]) * best_width + tile * (KEYS // SIZE) + tl.arange(0, KEYS // SIZE)[:, None]
        tl.store(best_ptr + to, narrow(best, best_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def _tiles(
    t,
    starts_ptr,
    visible_ptr,
    rows,
    first,
    least,
    LISTED: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Rows t -> how many rows are taken together from each on, and in how many tiles: 0 for all but the first."""
    live = t < rows
    start = tl.load(starts_ptr + t, mask=live, other=0)
    members = live.to(tl.int32)
    for i in tl.static_range(1, TOGETHER):
        members += (tl.load(starts_ptr + t + i, mask=t + i < rows, other=-1) == start).to(tl.int32)
    leads = live & ((t - tl.maximum(start - first, 0)) % TOGETHER == 0)
    seen = tl.load(visible_ptr + t + members - 1, mask=leads, other=0).to(tl.int32)
    positions = seen
    if LISTED:
        positions = tl.minimum((seen + SIZE - 1) // SIZE, LISTED) * SIZE
    return members, tl.where(leads & (seen > least), (positions + KEYS - 1) // KEYS, 0)


@triton.jit(do_not_specialize=["rows", "first", "least"])
def _score(
    q_ptr,  # [T, HEADS, CHANNELS] bf16; f32 for FORMAT "f32"
    w_ptr,  # [T, HEADS]
    pool_ptr,  # 32-bit words of the pool, or floats; offsets and strides in these
    tables_ptr,  # [slots, table_stride] int32
    slots_ptr,  # [T] int64
    starts_ptr,  # [T] int64, counted from row -first
    visible_ptr,  # [T] int64
    restrict_ptr,  # [T, LISTED] int32; unused if LISTED is 0
    scores_ptr,  # [T, width]
    best_ptr,  # [T, best_width]: of each block
    rows,
    first,
    least,  # rows that see no more are not scored
    pool_stride,
    data_offset,
    scale_offset,
    table_stride,
    width,
    best_width,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    FORMAT: tl.constexpr,
    ENTRIES: tl.constexpr,
    LISTED: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = tl.arange(0, ROWS)
    _, tiles = _tiles(t, starts_ptr, visible_ptr, rows, first, least, LISTED, SIZE, TOGETHER, KEYS)
    ends = tl.cumsum(tiles, axis=0)
    total = tl.max(ends, axis=0)
    share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.minimum(tl.program_id(0) * share, total)
    end = tl.minimum(begin + share, total)
    if begin < end:
        row = tl.sum((ends <= begin).to(tl.int32), axis=0)
        low = begin - tl.sum(tl.where(t == row, ends - tiles, 0), axis=0)
        left = end - begin
        # not `for`: what that carries and only bounds of loops inside it read, Triton 3.6 takes for constant
        while left > 0:
            members, own = _tiles(row, starts_ptr, visible_ptr, rows, first, least, LISTED, SIZE, TOGETHER, KEYS)
            high = tl.minimum(low + left, own)
            left -= high - low
            at = row.to(tl.int64)
            if own > 0:
                if (members == 1) | (TOGETHER == 1):
                    _sweep(
                        at, 1, low, high, q_ptr, w_ptr, pool_ptr, tables_ptr, slots_ptr, visible_ptr, restrict_ptr,
                        scores_ptr, best_ptr, pool_stride, data_offset, scale_offset, table_stride, width, best_width,
                        HEADS, H, CHANNELS, FORMAT, ENTRIES, LISTED, SIZE, 1, KEYS, ROUND, WARPS, STAGES,
                    )  # fmt: skip
                elif TOGETHER > 1:
                    parts: tl.constexpr = KEYS // SHARED_KEYS
                    _sweep(
                        at, members, low * parts, high * parts, q_ptr, w_ptr, pool_ptr, tables_ptr, slots_ptr,
                        visible_ptr, restrict_ptr, scores_ptr, best_ptr, pool_stride, data_offset, scale_offset,
                        table_stride, width, best_width, HEADS, H, CHANNELS, FORMAT, ENTRIES, LISTED, SIZE, TOGETHER,
                        SHARED_KEYS, ROUND, WARPS, STAGES,
                    )  # fmt: skip
            row += members  # to the next that leads
            low *= 0


# Choice


@triton.jit
def _ordered(x, BITS: tl.constexpr):
    """Floats -> uint32 in the same order, never 0 for a number. Only the BITS upper bits of a float32 are in use."""
    bits = (widen(x) + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True) >> (32 - BITS)


@triton.jit
def _kth(keys, k):
    """A bound that exactly k of keys uint32 [N] reach, else the k-th largest; 0 where no more than k are above 0."""
    most = tl.max(keys, axis=0)
    differ = most ^ tl.min(tl.where(keys > 0, keys, most), axis=0)
    for i in tl.static_range(5):
        differ = differ | (differ >> (1 << i))  # all bits from the first in which keys differ
    found = most & (differ ^ 0xFFFFFFFF)
    bit = differ ^ (differ >> 1)
    number = tl.sum((keys > 0).to(tl.int32), axis=0)
    if number <= k:
        found = found & 0
        bit = bit & 0
    while (bit > 0) & (number != k):
        trial = found | bit
        reach = tl.sum((keys >= trial).to(tl.int32), axis=0)
        found = tl.where(reach >= k, trial, found)
        number = tl.where(reach >= k, reach, number)
        bit = bit >> 1
    return found


@triton.jit
def _best_of(keys, k):
    """keys uint32 [N], 0: not there. -> the k largest, first ones first among equals: mask, place in order, number."""
    kth = _kth(keys, k)
    above = (keys > kth).to(tl.int32)
    level = ((keys == kth) & (keys > 0)).to(tl.int32)
    sums = tl.cumsum(above + (level << 16), axis=0)  # N < 2^15
    totals = tl.max(sums, axis=0)  # the last
    before = sums - above - (level << 16)
    room = k - (totals & 0xFFFF)
    equals = before >> 16
    chosen = (above > 0) | ((level > 0) & (equals < room))
    number = (totals & 0xFFFF) + tl.minimum(totals >> 16, room)
    return chosen, (before & 0xFFFF) + tl.minimum(equals, room), number


@triton.jit
def _children(parents_ptr, nodes, N: tl.constexpr, K: tl.constexpr, FAN: tl.constexpr):
    """Nodes under K chosen parents, or the first N where there are no more: numbers [N/FAN, FAN], whether to load them.

    What lies behind the last node, up to a multiple of FAN, may be loaded.
    """
    whole = nodes <= N
    parent = tl.arange(0, N // FAN)
    chosen = tl.load(parents_ptr + parent, mask=(parent < K) & (whole == 0), other=-1)
    parent = tl.where(whole, parent, chosen)
    live = (parent >= 0) & (parent * FAN < nodes)
    return parent[:, None] * FAN + tl.arange(0, FAN)[None, :], live[:, None]


@triton.jit
def _list(out_ptr, values, chosen, at, number, K: tl.constexpr, K_PAD: tl.constexpr):
    """Store the chosen values in order, -1 behind them: K in all."""
    tl.store(out_ptr + at, values, mask=chosen)
    k = tl.arange(0, K_PAD)
    tl.store(out_ptr + k, tl.full((K_PAD,), -1, tl.int32), mask=(k >= number) & (k < K))


@triton.jit
def _raise(from_ptr, to_ptr, nodes, below, FAN: tl.constexpr, PART: tl.constexpr):
    """Best of each FAN values: from_ptr [below] -> to_ptr [nodes]."""
    for part in range(0, bound((nodes + PART - 1) // PART)):
        node = part * PART + tl.arange(0, PART)
        at = node[:, None] * FAN + tl.arange(0, FAN)[None, :]
        values = widen(tl.load(from_ptr + at, mask=(node < nodes)[:, None], other=0.0))
        values = tl.max(tl.where(at < below, values, -float("inf")), axis=1)
        tl.store(to_ptr + node, narrow(values, to_ptr.dtype.element_ty), mask=node < nodes)


@triton.jit
def _descend(
    values_ptr,
    parents_ptr,
    out_ptr,
    nodes,
    newest,
    scored,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    N: tl.constexpr,
    FAN: tl.constexpr,
    BITS: tl.constexpr,
    PIN: tl.constexpr,
):
    """One step down: list the K best of the nodes under the chosen parents, or of all if they are no more than N."""
    node, live = _children(parents_ptr, nodes, N, K_PAD, FAN)
    there = live & (node < nodes)
    keys = _ordered(tl.load(values_ptr + node, mask=live & scored, other=0.0), BITS)
    if PIN:
        keys = tl.where(node == newest, 0xFFFFFFFF >> (32 - BITS), keys)
    chosen, at, number = _best_of(tl.reshape(tl.where(there, keys, 0), (N,)), K)
    _list(out_ptr, tl.reshape(node, (N,)), chosen, at, number, K, K_PAD)


@triton.jit(do_not_specialize=["least"])
def _choose(
    scores_ptr,  # [T, width]
    best_ptr,  # [T, best_width]: of each block
    upper_ptr,  # [T, upper_width]: of FAN blocks, then, from top_at on, of FAN times as many
    lists_ptr,  # [T, 3, K_PAD] int32: chosen nodes
    tables_ptr,  # [slots, table_stride] int32; unused if ENTRIES is 0
    slots_ptr,  # [T] int64; as tables
    visible_ptr,  # [T] int64
    restrict_ptr,  # [T, LISTED] int32; unused if LISTED is 0
    out_ptr,  # [T, K] int32
    least,  # rows that see no more have no scores, and everything is chosen
    width,
    best_width,
    upper_width,
    top_at,
    table_stride,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    ENTRIES: tl.constexpr,  # records a block of the pool; 0: entries are asked for, not records
    BLOCKS: tl.constexpr,  # blocks of entries are asked for, the newest among them
    DEPTH: tl.constexpr,  # levels above the scores that the longest row can need
    BITS: tl.constexpr,
    N: tl.constexpr,  # nodes of a step
    FAN: tl.constexpr,  # children of a node
    PART: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible_ptr + t).to(tl.int32)
    scored = seen > least
    positions = seen
    if LISTED:
        positions = tl.minimum((seen + SIZE - 1) // SIZE, LISTED) * SIZE
    blocks = (positions + SIZE - 1) // SIZE
    newest = (seen + SIZE - 1) // SIZE - 1
    upper = (blocks + FAN - 1) // FAN
    top = (upper + FAN - 1) // FAN
    scores_ptr += t * width
    best_ptr += t * best_width
    upper_ptr += t * upper_width
    top_ptr = upper_ptr + top_at
    lists_ptr += t * 3 * K_PAD
    out_ptr += t * K
    if DEPTH >= 2:  # noqa: SIM102 - a constant by itself: what it rules out is not compiled
        if blocks > N:
            _raise(best_ptr, upper_ptr, upper, blocks, FAN, PART)
            tl.debug_barrier()
            if DEPTH >= 3:  # noqa: SIM102
                if upper > N:
                    _raise(upper_ptr, top_ptr, top, upper, FAN, PART)
                    tl.debug_barrier()
                    _descend(
                        top_ptr,
                        lists_ptr,
                        lists_ptr,
                        top,
                        newest // (FAN * FAN),
                        scored,
                        K_PAD,
                        K_PAD,
                        N,
                        FAN,
                        BITS,
                        BLOCKS,
                    )
                    tl.debug_barrier()
            to = lists_ptr + K_PAD
            _descend(upper_ptr, lists_ptr, to, upper, newest // FAN, scored, K_PAD, K_PAD, N, FAN, BITS, BLOCKS)
            tl.debug_barrier()
    if BLOCKS:
        _descend(best_ptr, lists_ptr + K_PAD, out_ptr, blocks, newest, scored, K, K_PAD, N, FAN, BITS, True)
    else:
        if DEPTH >= 1:  # noqa: SIM102
            if positions > N:
                to = lists_ptr + 2 * K_PAD
                _descend(best_ptr, lists_ptr + K_PAD, to, blocks, newest, scored, K_PAD, K_PAD, N, FAN, BITS, False)
                tl.debug_barrier()
        position, live = _children(lists_ptr + 2 * K_PAD, positions, N, K_PAD, SIZE)
        there = live & (position < positions)
        entry = position
        if LISTED:
            block = tl.load(restrict_ptr + t * LISTED + position // SIZE, mask=there, other=-1)
            entry = block * SIZE + position % SIZE
            there = there & (block >= 0) & (entry < seen)
        keys = _ordered(tl.load(scores_ptr + position, mask=live & scored, other=0.0), BITS)
        chosen, at, number = _best_of(tl.reshape(tl.where(there, keys, 0), (N,)), K)
        entry = tl.reshape(entry, (N,))
        if ENTRIES:
            table = tables_ptr + tl.load(slots_ptr + t) * table_stride
            entry = tl.load(table + entry // ENTRIES, mask=chosen, other=0) * ENTRIES + entry % ENTRIES
        _list(out_ptr, entry, chosen, at, number, K, K_PAD)


@triton.jit
def _collect(
    scores_ptr,  # [T, n] f32
    visible_ptr,  # [T]
    restrict_ptr,  # [T, LISTED] int32
    listed_ptr,  # [T, width] f32: scores of the listed blocks; unused if LISTED is 0
    best_ptr,  # [T, best_width] f32
    n,
    width,
    best_width,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    PART: tl.constexpr,
):
    """Scores that exist already, into the form that `_choose` takes."""
    t = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(visible_ptr + t), n).to(tl.int32)
    position = tl.program_id(1) * PART + tl.arange(0, PART)
    entry = position
    counts = position < seen
    if LISTED:
        block = tl.load(restrict_ptr + t * LISTED + position // SIZE, mask=position < LISTED * SIZE, other=-1)
        entry = block * SIZE + position % SIZE
        counts = (block >= 0) & (entry < seen)
    scores = tl.load(scores_ptr + t * n + entry, mask=counts, other=-float("inf"))
    if LISTED:
        tl.store(listed_ptr + t * width + position, scores, mask=position < width)
    block = tl.program_id(1) * (PART // SIZE) + tl.arange(0, PART // SIZE)
    best = tl.max(tl.reshape(scores, (PART // SIZE, SIZE)), axis=1)
    tl.store(best_ptr + t * best_width + block, best, mask=block < best_width)


# The ops


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _blocks(width: int, size: int) -> int:
    """Blocks of a row, up to a multiple of 16: kernels read them by 8, and rows then begin at 32 bytes."""
    return cdiv(max(width, 1), 16 * size) * 16


def _fan(k_pad: int) -> int:
    return 4 if k_pad > 1024 else 8


def _take(
    scores: Tensor,
    best: Tensor,
    out: Tensor,
    visible: Tensor,
    least: int,
    size: int,
    *,
    places: tuple[Tensor, Tensor, int] | None = None,
    restrict: Tensor | None = None,
    blocks: bool = False,
) -> None:
    """Fill out [rows, k] from scores and best [rows, blocks of a row].

    places: tables, slots and entries a block of the pool, where records are wanted.
    """
    rows, k = out.shape
    if not rows:
        return
    k_pad = max(power_of_two(k), 16)
    fan = _fan(k_pad)
    upper, top = (cdiv(best.shape[1], fan**i * 16) * 16 for i in (1, 2))
    n = max(k_pad * fan, 1 if blocks else k_pad * size, power_of_two(top))
    depth = sum(level > n for level in (scores.shape[1], best.shape[1], upper))
    assert n < 1 << 15, f"choosing {k} of {scores.shape[1]}: {n} values a step are too many"
    above = torch.empty(rows, upper + top, dtype=scores.dtype, device=out.device)
    tables, slots, entries = places or (out, visible, 0)
    choice = tuning.config("choose", str(n), tuning.bucket(rows), {"warps": 8})
    _choose[(rows,)](
        scores,
        best,
        above,
        torch.empty(rows, 3, k_pad, dtype=torch.int32, device=out.device),
        tables,
        slots,
        visible,
        out if restrict is None else restrict,
        out,
        least,
        scores.shape[1],
        best.shape[1],
        above.shape[1],
        upper,
        tables.stride(0),
        K=k,
        K_PAD=k_pad,
        SIZE=size,
        LISTED=0 if restrict is None else restrict.shape[1],
        ENTRIES=entries,
        BLOCKS=blocks,
        DEPTH=depth,
        BITS=16 if scores.dtype == torch.bfloat16 else 32,
        N=n,
        FAN=fan,
        PART=min(n, 2048),
        num_warps=choice["warps"],
        maxnreg=min(2048 // choice["warps"], 255),
    )


def _fits(size: int, *most: int) -> bool:
    """Can `_choose` take so many of blocks of this size?"""
    return size & (size - 1) == 0 and size <= 64 and all(k * max(_fan(k), size) <= 1 << 14 for k in most)


def _served(q: Tensor, keys: kv_copy.Paged, size: int, *most: int) -> bool:
    """Can `_score` read these keys, and `_choose` take so many?"""
    pool, channels = keys.pool, keys.channels
    if keys.format == "mxfp4":
        fits = channels == 128 and q.dtype == torch.bfloat16
    else:
        fits = keys.format == "f32" and q.dtype == torch.float32 and channels in (16, 32, 64, 128)
    offsets = pool.data_ptr() | pool.stride(0) | keys.data_offset | keys.scale_offset
    return fits and _fits(size, *most) and offsets % 16 == 0 and pool.shape[1] % 4 == 0 and q.shape[1] <= 128


def _portion(rows: int, row_bytes: float) -> int:
    """Rows of one launch: as few launches as the scratch allows, and no first row at an odd address."""
    most = max(min(int(SCRATCH_BYTES / row_bytes), ROWS_AT_ONCE), 1)
    most -= most % 16 if most > 16 else 0
    return min(cdiv(rows, 16 * cdiv(rows, most)) * 16, most, rows)


class _Launch(NamedTuple):
    """How `_score` cuts its work."""

    keys: int  # a tile of one row
    together: int  # rows that share the unpacking
    shared_keys: int  # a tile of theirs: part of one
    warps: int
    stages: int
    programs: int  # a processor
    registers: int  # a thread, at most


_ALONE = {"keys": 128, "together": 2, "shared_keys": 64, "warps": 4, "stages": 4, "programs": 3, "registers": 168}
_CHUNKS = {"keys": 64, "together": 8, "shared_keys": 64, "warps": 4, "stages": 4, "programs": 2, "registers": 255}
_LISTED = {"keys": 128, "together": 1, "shared_keys": 128, "warps": 4, "stages": 5, "programs": 3, "registers": 168}
_FLOATS = {"keys": 32, "together": 1, "shared_keys": 32, "warps": 4, "stages": 1, "programs": 4, "registers": 255}

# no sum has another order in any of them
CANDIDATES = {
    "scores_alone": {
        "pairs": _ALONE,
        "pairs, deep": _ALONE | {"stages": 6},
        "pairs, shallow": _ALONE | {"stages": 3},
        "pairs, four programs": _ALONE | {"programs": 4, "registers": 128},
        "pairs, two programs": _ALONE | {"programs": 2, "registers": 255, "stages": 6},
        "fours": _ALONE | {"together": 4},
        "single": _ALONE | {"together": 1},
        "single, four programs": _ALONE | {"together": 1, "programs": 4, "registers": 128},
    },
    "scores_chunks": {
        "eights": _CHUNKS,
        "eights, shallow": _CHUNKS | {"stages": 3},
        "fours": _CHUNKS | {"together": 4, "programs": 3, "registers": 168},
        "fours, four programs": _CHUNKS | {"together": 4, "programs": 4, "registers": 128},
    },
    "scores_listed": {
        "three programs": _LISTED,
        "three programs, deep": _LISTED | {"stages": 8},
        "four programs": _LISTED | {"programs": 4, "registers": 128},
    },
    "choose": {"narrow": {"warps": 4}, "medium": {"warps": 8}, "wide": {"warps": 16}},
}


def _launch(keys: kv_copy.Paged, rows: int, heads: int, listed: bool, chunked: bool) -> _Launch:
    """No configuration changes a bit of a score."""
    if keys.format == "f32":
        kind, default = "floats", _FLOATS
    elif listed:
        kind, default = "listed", _LISTED
    elif chunked:
        kind, default = "chunks", _CHUNKS
    else:
        kind, default = "alone", _ALONE
    return _Launch(**tuning.config(f"scores_{kind}", f"{heads}x{keys.channels}", tuning.bucket(rows), default))


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
    size = block_size if emit or restrict is not None else 8
    if not _served(q, keys, size, topk, emit) or (round_scores and q.dtype != torch.bfloat16):
        return plain.select_records_reference(
            q, w, keys, tables, rows, visible, topk, round_scores, restrict, emit, block_size, chunked
        )
    common = (q, w, keys, tables, rows, visible, topk, round_scores)
    if restrict is not None and emit:  # candidates come from all scores
        records, _ = select_records(*common, restrict, 0, size, chunked)
        return records, select_records(*common, None, emit, size, chunked)[1]
    q, w, visible = q.contiguous(), w.contiguous(), visible.contiguous()
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    slots, row_starts = rows.slots.contiguous(), rows.starts.contiguous()
    restrict = None if restrict is None else restrict.to(torch.int32).contiguous()
    total, heads, channels = q.shape
    device = q.device
    records = torch.empty(total, topk, dtype=torch.int32, device=device)
    emitted = torch.empty(total, emit, dtype=torch.int32, device=device) if emit else None
    if restrict is not None and not restrict.shape[1]:
        restrict = restrict.new_full((total, 1), -1)
    listed = 0 if restrict is None else restrict.shape[1]
    most = listed * size if restrict is not None else tables.shape[1] * keys.entries
    if not total:
        return records, emitted
    launch = _launch(keys, total, heads, restrict is not None, chunked)
    w = w.to(torch.bfloat16) if round_scores else w
    w = w.float() if launch.together > 2 else w
    width = max(cdiv(most, launch.keys), 1) * launch.keys
    dtype = torch.bfloat16 if round_scores or q.dtype == torch.bfloat16 else torch.float32
    portion = _portion(total, dtype.itemsize * width * (1 + 1.2 / size))
    least = min(topk, emit * size) if emit else topk
    scores = torch.empty(portion, width, dtype=dtype, device=device)
    best = torch.empty(portion, _blocks(width, size), dtype=dtype, device=device)
    pool = keys.pool.view(torch.int32 if keys.format == "mxfp4" else torch.float32)
    for first in range(0, total, portion):
        part = slice(first, min(first + portion, total))
        count = part.stop - first
        seen = visible[part]
        some = None if restrict is None else restrict[part]
        _score[(_processors(device) * launch.programs,)](
            q[part],
            w[part],
            pool,
            tables,
            slots[part],
            row_starts[part],
            seen,
            tables if some is None else some,
            scores,
            best,
            count,
            first,
            least,
            pool.stride(0),
            keys.data_offset // 4,
            keys.scale_offset // 4,
            tables.stride(0),
            width,
            best.shape[1],
            HEADS=heads,
            H=max(power_of_two(heads), 16),
            CHANNELS=channels,
            FORMAT=keys.format,
            ENTRIES=keys.entries,
            LISTED=listed,
            SIZE=size,
            TOGETHER=launch.together,
            KEYS=launch.keys,
            SHARED_KEYS=launch.shared_keys,
            ROWS=64 if portion <= 64 else ROWS_AT_ONCE,  # few values: each is compiled for itself
            ROUND=round_scores,
            WARPS=launch.warps,
            STAGES=launch.stages,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )
        places = (tables, slots[part], keys.entries)
        _take(scores, best, records[part], seen, least, size, places=places, restrict=some)
        if emitted is not None:
            _take(scores, best, emitted[part], seen, least, size, blocks=True)
    return records, emitted


def candidate_blocks(scores: Tensor, visible: Tensor, blocks: int, size: int) -> Tensor:
    if not _fits(size, blocks):
        return plain.candidate_blocks_reference(scores, visible, blocks, size)
    return _dense(scores, visible, blocks, None, size, blocks=True)


def select_entries(
    scores: Tensor, visible: Tensor, topk: int, candidates: Tensor | None = None, size: int = 8
) -> Tensor:
    if not _fits(size, topk):
        return plain.select_entries_reference(scores, visible, topk, candidates, size)
    return _dense(scores, visible, topk, candidates, size, blocks=False)


def _dense(scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None, size: int, *, blocks: bool) -> Tensor:
    scores, visible = scores.float().contiguous(), visible.contiguous()
    rows, n = scores.shape
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if not rows:
        return out
    restrict = None if candidates is None else candidates.to(torch.int32).contiguous()
    width = n if restrict is None else restrict.shape[1] * size
    if restrict is None and n % size:  # whole blocks may be loaded
        scores = torch.nn.functional.pad(scores, (0, -n % size))
    best = torch.empty(rows, _blocks(width, size), dtype=scores.dtype, device=scores.device)
    listed = scores if restrict is None else torch.empty(rows, max(width, 1), dtype=scores.dtype, device=scores.device)
    part = max(1024, size)
    _collect[(rows, max(cdiv(width, part), 1))](
        scores,
        visible,
        out if restrict is None else restrict,
        listed,
        best,
        scores.shape[1],
        listed.shape[1],
        best.shape[1],
        SIZE=size,
        LISTED=0 if restrict is None else restrict.shape[1],
        PART=part,
    )
    _take(listed, best, out, visible, -1, size, restrict=restrict, blocks=blocks)
    return out
