"""Triton versions of `kernels/moe_experts.py` and of the whole sublayer; contracts are there and in `kernels/fused.py`.

    places      pair (token, slot) -> row, sorted by expert, then by pair; experts' rows cut into tiles
    spread      rows of tokens to rows of pairs, carried by one scale a row where the products want that
    product 1   gate and up rows, clamped SwiGLU, routing weight, FP8 grid
    product 2
    combine     each token's rows added in the order of its slots, and the shared expert's

Nothing is read by the host: buffers have the size of the worst case, and programs find their tile in a table.

On a Hopper GPU FP4 weights are streamed in an order of their own (`prepare`): by `moe_experts_hopper.py`, which has the
products, or by CUDA C++ that does all of that but the last line in two launches (`cuda/experts.py`). The kernel here
reads the checkpoint's bytes, or values, in the order they are in, and runs under the interpreter too.

T tokens, k slots, R = T*k rows, E experts, D hidden width, I expert width.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import moe_experts as plain
from benthic.kernels import quant
from benthic.kernels.triton import moe_experts_pack, moe_gate, tuning
from benthic.kernels.triton.gemm import Carried, carry, launch, products, start
from benthic.kernels.triton.quant import (
    INTERPRETED,
    bound,
    by_groups,
    carry_byte,
    e2m1_value,
    e4m3,
    e4m3_value,
    e8m0_value,
    flat,
    magnitude_bits,
    narrow,
    q8_values,
    widen,
)
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two
from benthic.kernels.triton.swiglu import gated
from benthic.types import Numerics

# ---- places ----------------------------------------------------------------------------------------------------------

CHUNK = 128  # pairs that a program places
SCAN = 2048  # ids that it reads at a time


class Places(NamedTuple):
    """Where each pair's row is, and how experts' rows are cut into tiles of at most `height` rows of one expert."""

    rows: Tensor  # [T, k] int32; -1 for a pair that has none, whose id is negative
    tiles: Tensor  # [capacity, 4] int32: expert, first row, number of rows, 0
    count: Tensor  # [1] int32: tiles in use
    height: int


@triton.jit(do_not_specialize=["pairs"])
def _place(
    ids_ptr,  # [T * k] int64
    rows_ptr,
    tiles_ptr,
    count_ptr,
    pairs,
    HEIGHT: tl.constexpr,
    E: tl.constexpr,  # experts, rounded up to a power of two
    CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program counts all pairs, and those before its own, by expert."""
    start(PDL)
    first = tl.program_id(0) * CHUNK
    counts = tl.zeros((2 * E,), tl.int32)  # of pairs from `first` on, then of those before
    for seen in range(0, bound(pairs), SCAN):
        pair = seen + tl.arange(0, SCAN)
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where(pair < first, ids + E, ids), 2 * E, mask=ids >= 0)
    counts = tl.reshape(counts, (2, E))
    total = tl.sum(counts, axis=0)
    before = tl.sum(tl.where(tl.arange(0, 2)[:, None] == 1, counts, 0), axis=0)
    starts = tl.cumsum(total, 0) - total

    pair = first + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    same = (ids[:, None] == ids[None, :]) & (pair[None, :] < pair[:, None])
    row = tl.gather(starts + before, tl.maximum(ids, 0), 0) + tl.sum(same.to(tl.int32), axis=1)
    tl.store(rows_ptr + pair, tl.where(ids >= 0, row, -1), mask=pair < pairs)

    expert = tl.arange(0, E)
    tiles = (total + HEIGHT - 1) // HEIGHT
    at = tiles_ptr + (tl.cumsum(tiles, 0) - tiles) * 4
    for tile in range(bound(tl.program_id(0)), bound(tl.max(tiles, axis=0)), bound(tl.num_programs(0))):
        live = tile < tiles
        tl.store(at + tile * 4, expert, mask=live)
        tl.store(at + tile * 4 + 1, starts + tile * HEIGHT, mask=live)
        tl.store(at + tile * 4 + 2, tl.minimum(total - tile * HEIGHT, HEIGHT), mask=live)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.sum(tiles, axis=0))


def place(ids: Tensor, experts: int, height: int) -> Places:
    """ids [T, k] int64, adjacent; T*k is at least 1."""
    pairs = ids.numel()
    capacity = pairs // height + min(pairs, experts)
    rows = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((capacity, 4), dtype=torch.int32, device=ids.device)
    count = torch.empty(1, dtype=torch.int32, device=ids.device)
    _place[(cdiv(pairs, CHUNK),)](
        ids,
        rows,
        tiles,
        count,
        pairs,
        HEIGHT=height,
        E=max(16, power_of_two(experts)),
        CHUNK=CHUNK,
        SCAN=SCAN,
        num_warps=8,
        **launch(),
    )
    return Places(rows, tiles, count, height)


# ---- rows of pairs ---------------------------------------------------------------------------------------------------

PIECE = 1024  # columns that a program has in hand at a time


@triton.jit
def _carried(x, byte):
    """x f32 [N] against the scale of `carry_byte` [1] -> float8e4nv."""
    inverse = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    return e4m3(tl.clamp(x * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _grid_values(x, CARRIED: tl.constexpr):
    """x f32 [PIECE], in the order that `_spread` reads it in -> its values on the FP8 grid."""
    if CARRIED:
        blocks: tl.constexpr = x.shape[0] // 128
        groups = tl.permute(tl.reshape(x, (blocks, 8, 4, 4)), (0, 2, 1, 3))
        values = q8_values(tl.reshape(groups, (blocks * 4, 32)))
        return tl.reshape(tl.permute(tl.reshape(values, (blocks, 4, 8, 4)), (0, 2, 1, 3)), x.shape)
    else:
        return tl.reshape(q8_values(tl.reshape(x, (x.shape[0] // 32, 32))), x.shape)


@triton.jit
def _spread(
    x_ptr,  # [T, D]
    rows_ptr,  # [T, SLOTS]
    weights_ptr,  # [T, SLOTS] f32
    y_ptr,  # [R, D]
    row_scales_ptr,  # [R] f32
    pair_weights_ptr,  # [R] f32
    grid_ptr,  # [T, D]: x on the FP8 grid
    D,
    x_stride,
    SLOTS: tl.constexpr,
    CARRIED: tl.constexpr,  # codes against one scale a row, in the order of `moe_experts_hopper.columns`
    QUANTISE: tl.constexpr,  # x is not on the FP8 grid yet
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # the products take what was written before this kernel for granted, so they may start only now
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PIECE)
    column = place
    if CARRIED:
        column = (place & -128) + ((place >> 2) & 3) * 32 + ((place >> 4) & 7) * 4 + (place & 3)
    pieces = ()
    top = tl.full((1,), 0, tl.int32)
    for piece in tl.static_range(PIECES):
        at = piece * PIECE + column
        x = tl.load(x_ptr + token * x_stride + at, mask=at < D, other=0.0)
        if QUANTISE:
            x = narrow(_grid_values(widen(x), CARRIED), x.dtype)
            tl.store(grid_ptr + token * D + at, x, mask=at < D)
        if CARRIED:
            top = tl.maximum(top, magnitude_bits(widen(x)[None, :]))
        pieces = pieces + (x,)  # noqa: RUF005, the compiler knows no starred tuples
    byte = carry_byte(top)
    for slot in tl.static_range(SLOTS):
        row = tl.load(rows_ptr + token * SLOTS + slot).to(tl.int64)
        live = row >= 0
        tl.store(pair_weights_ptr + row, tl.load(weights_ptr + token * SLOTS + slot), mask=live)
        if CARRIED:
            tl.store(row_scales_ptr + row + tl.arange(0, 1), e8m0_value(byte), mask=live)
        for piece in tl.static_range(PIECES):
            at = piece * PIECE + place
            y = pieces[piece]
            if CARRIED:
                y = _carried(widen(y), byte)
            tl.store(y_ptr + row * D + at, y, mask=(at < D) & live)


@triton.jit
def _carry_hidden(
    codes_ptr,  # [R, I] E4M3
    scales_ptr,  # [R, I/32] uint8
    y_ptr,  # [R, I] E4M3
    row_scales_ptr,  # [R] f32
    inner,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows on the FP8 grid -> rows against one scale, in the order of `moe_experts_hopper.columns`."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PIECE)
    column = (place & -128) + ((place >> 2) & 3) * 32 + ((place >> 4) & 7) * 4 + (place & 3)
    pieces = ()
    top = tl.full((1,), 0, tl.int32)
    for piece in tl.static_range(PIECES):
        at = piece * PIECE + column
        codes = tl.load(codes_ptr + row * inner + at, mask=at < inner, other=0.0)
        scale = e8m0_value(tl.load(scales_ptr + row * (inner // 32) + at // 32, mask=at < inner, other=127))
        values = e4m3_value(codes) * scale
        top = tl.maximum(top, magnitude_bits(values[None, :]))
        pieces = pieces + (values,)  # noqa: RUF005
    byte = carry_byte(top)
    tl.store(row_scales_ptr + row + tl.arange(0, 1), e8m0_value(byte))
    for piece in tl.static_range(PIECES):
        at = piece * PIECE + place
        tl.store(y_ptr + row * inner + at, _carried(pieces[piece], byte), mask=at < inner)


@triton.jit
def _combine(
    y_ptr,  # [R, D]
    rows_ptr,  # [T, SLOTS]
    shared_ptr,  # [PARTS, T, D]
    out_ptr,  # [T, D]
    tokens,
    D,
    part_stride,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,  # of the shared expert's output, f32, or 1 in the dtype it is rounded to; 0: there is none
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (token < tokens)[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(rows_ptr + token * SLOTS + slot, mask=token < tokens, other=-1).to(tl.int64)
        source = y_ptr + row[:, None] * D + column[None, :]
        total += widen(tl.load(source, mask=live & (row >= 0)[:, None], other=0.0))
    if PARTS > 0:
        shared = widen(tl.load(shared_ptr + at, mask=live, other=0.0))
        for part in tl.static_range(1, PARTS):
            shared += widen(tl.load(shared_ptr + part * part_stride + at, mask=live, other=0.0))
        total += widen(narrow(shared, out_ptr.dtype.element_ty))
    tl.store(out_ptr + at, narrow(total, out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _activate(
    parts_ptr,  # [PARTS, T, 2*I]: gate, then up
    y_ptr,  # [T, I] bf16, or codes float8e4nv where CARRY
    scales_ptr,  # [T] f32
    inner,
    part_stride,
    limit,
    LIMITED: tl.constexpr,
    ROUND: tl.constexpr,
    CARRY: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The shared expert between its products: sum of the parts, activation, FP8 grid, one scale a row."""
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    pieces = ()
    top = tl.full((1,), 0, tl.int32)
    for piece in tl.static_range(PIECES):
        at = piece * PIECE + tl.arange(0, PIECE)
        source = parts_ptr + token * 2 * inner + at
        gate, up = (
            widen(tl.load(source, mask=at < inner, other=0.0)),
            widen(tl.load(source + inner, mask=at < inner, other=0.0)),
        )
        for part in tl.static_range(1, PARTS):
            gate += tl.load(source + part * part_stride, mask=at < inner, other=0.0)
            up += tl.load(source + part * part_stride + inner, mask=at < inner, other=0.0)
        y = gated(widen(narrow(gate, tl.bfloat16)), widen(narrow(up, tl.bfloat16)), limit, LIMITED)
        y = widen(narrow(y, tl.bfloat16)) if ROUND else y
        y = tl.reshape(q8_values(tl.reshape(y, (PIECE // 32, 32))), (PIECE,))
        if CARRY:
            top = tl.maximum(top, magnitude_bits(y[None, :]))
            pieces = pieces + (y,)  # noqa: RUF005
        else:
            tl.store(y_ptr + token * inner + at, narrow(y, tl.bfloat16), mask=at < inner)
    if CARRY:
        byte = carry_byte(top)
        tl.store(scales_ptr + token + tl.arange(0, 1), e8m0_value(byte))
        for piece in tl.static_range(PIECES):
            at = piece * PIECE + tl.arange(0, PIECE)
            tl.store(y_ptr + token * inner + at, _carried(pieces[piece], byte), mask=at < inner)


# ---- the products, in the order of the checkpoint --------------------------------------------------------------------


@triton.jit
def _multiply(weight, x, acc):
    """acc + weight [N, K] @ x [M, K]^T, f32."""
    if weight.dtype == tl.float32 or INTERPRETED:  # the interpreter multiplies no bf16
        return tl.dot(widen(weight), tl.trans(widen(x)), acc, input_precision="ieee")
    else:
        return tl.dot(weight, tl.trans(x), acc)


@triton.jit
def _weights(w_ptr, scales_ptr, rows, k, K, inside, FP4: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """Weight rows [N], columns k .. k+BLOCK_K-1 -> [N, BLOCK_K] in DTYPE."""
    if FP4:
        half: tl.constexpr = BLOCK_K // 2
        groups: tl.constexpr = BLOCK_K // 32
        at, group = k // 2 + tl.arange(0, half), k // 32 + tl.arange(0, groups)
        codes = tl.load(w_ptr + rows[:, None] * (K // 2) + at[None, :], mask=(at < K // 2)[None, :], other=0).to(
            tl.int32
        )
        scales = tl.load(
            scales_ptr + rows[:, None] * (K // 32) + group[None, :], mask=(group < K // 32)[None, :], other=0
        )
        values = tl.reshape(tl.join(e2m1_value(codes & 15), e2m1_value(codes >> 4)), (rows.shape[0], groups, 32))
        return narrow(flat(values * e8m0_value(scales)[:, :, None]), DTYPE)
    else:
        at = k + tl.arange(0, BLOCK_K)
        return tl.load(w_ptr + rows[:, None] * K + at[None, :], mask=inside[None, :], other=0.0)


@triton.jit
def _grouped(
    x_ptr,  # [R, K]
    w_ptr,  # [E, N, K], or [E, N, K/2] codes
    scales_ptr,  # [E, N, K/32]
    tiles_ptr,
    count_ptr,
    pair_weights_ptr,  # [R] f32
    y_ptr,  # [R, N], or [R, N/2] of the first product
    N,
    K,
    limit,
    FP4: tl.constexpr,
    FIRST: tl.constexpr,  # gate and up rows meet in the activation
    LIMITED: tl.constexpr,
    ROUND: tl.constexpr,
    QUANTISE: tl.constexpr,
    HEIGHT: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program multiplies a tile of rows with BLOCK_N weight rows (pairs of gate and up row)."""
    start(PDL)
    tile = tl.program_id(0)
    if tile < tl.load(count_ptr):
        width = N // 2 if FIRST else N
        expert = tl.load(tiles_ptr + tile * 4).to(tl.int64)
        row = tl.load(tiles_ptr + tile * 4 + 1)
        count = tl.load(tiles_ptr + tile * 4 + 2)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.arange(0, HEIGHT)
        source = (row + tl.minimum(place, count - 1)).to(tl.int64)
        target = expert * N + tl.minimum(column, width - 1)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        acc = tl.zeros((BLOCK_N, HEIGHT), tl.float32)
        other = tl.zeros((BLOCK_N, HEIGHT), tl.float32)
        for k in range(0, bound(K), BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + source[:, None] * K + at[None, :], mask=(at < K)[None, :], other=0.0)
            acc = _multiply(_weights(w_ptr, scales_ptr, target, k, K, at < K, FP4, BLOCK_K, dtype), x, acc)
            if FIRST:
                up = _weights(w_ptr, scales_ptr, target + width, k, K, at < K, FP4, BLOCK_K, dtype)
                other = _multiply(up, x, other)
        y = tl.trans(acc)
        if FIRST:
            gate, up = widen(narrow(y, dtype)), widen(narrow(tl.trans(other), dtype))
            weight = tl.load(pair_weights_ptr + source)
            y = gated(gate, up, limit, LIMITED) * weight[:, None]
            if ROUND:
                y = widen(narrow(y, dtype))
            if QUANTISE:
                y = flat(q8_values(by_groups(y, 32)))
        to = y_ptr + (row + place).to(tl.int64)[:, None] * width + column[None, :]
        tl.store(to, narrow(y, dtype), mask=(place < count)[:, None] & (column < width)[None, :])


def _product(
    x: Tensor,
    weight: quant.Matrix,
    places: Places,
    first: tuple[Tensor, float, bool, bool] | None,
) -> Tensor:
    """x [R, K] rows sorted by expert, times weight [E, N, K] -> [R, N], or [R, N/2] activated.

    first  of the first product: pair weights [R], limit, whether to round, whether to quantise.
    """
    _, n, k = weight.shape
    fp4 = isinstance(weight, quant.Fp4Matrix)
    codes, scales = (weight.codes.view(torch.uint8), weight.scales) if fp4 else (weight, weight)
    assert isinstance(codes, Tensor), "experts are FP4 or values"
    pair_weights, limit, round_hidden, quantise = first or (x, 0.0, False, False)
    width = n // 2 if first is not None else n
    y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    block_n, block_k = 64, 64
    _grouped[(places.tiles.shape[0], cdiv(width, block_n))](
        x,
        codes.contiguous(),
        scales.contiguous(),
        places.tiles,
        places.count,
        pair_weights,
        y,
        n,
        k,
        limit,
        FP4=fp4,
        FIRST=first is not None,
        LIMITED=limit > 0,
        ROUND=round_hidden,
        QUANTISE=quantise,
        HEIGHT=places.height,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
        **launch(),
    )
    return y


# ---- the ops ---------------------------------------------------------------------------------------------------------


@cache
def _hopper() -> Any:
    """The module with the packed products, where this device runs them."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return import_module("benthic.kernels.triton.moe_experts_hopper")


def prepare(w13: quant.Fp4Matrix, w2: quant.Fp4Matrix, numerics: Numerics) -> tuple[Any, Any]:
    """Both matrices of the experts of a layer in the form that `experts` streams. The arguments may then go.

    Where no other form is faster, the arguments.
    """
    hopper = _hopper()
    width, inner = w2.shape[1:]
    if hopper is None or width % hopper.BLOCK or inner % hopper.BLOCK:
        return w13, w2
    hopper.warm(numerics.one_scale, w13.shape, width)
    order = hopper.interleave(inner, w13.codes.device)
    return hopper.pack(w13, numerics.one_scale, order), hopper.pack(w2, numerics.one_scale)


def unprepare(w13: Any, w2: Any, expert: int) -> tuple[Tensor, Tensor]:
    """The values of one expert, [2*I, D] and [D, I] bf16, read back from what `prepare` made."""
    order = moe_experts_pack.interleave(w2.shape[2], w13.words.device)
    return moe_experts_pack.unpack(w13, expert)[order.argsort()], moe_experts_pack.unpack(w2, expert)


class _Rows(NamedTuple):
    """Rows of pairs, sorted by expert."""

    values: Tensor  # [R, D], or codes
    scales: Tensor  # [R] f32, of codes
    weights: Tensor  # [R] f32
    grid: Tensor  # [T, D]: what they were spread from, on the FP8 grid


def _spread_rows(x: Tensor, places: Places, weights: Tensor, carried: bool, quantise: bool) -> _Rows:
    tokens, width = x.shape
    slots = weights.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    pairs = tokens * slots
    values = torch.empty((pairs, width), dtype=quant.E4M3 if carried else x.dtype, device=x.device)
    scales, pair_weights = torch.empty((2, pairs), dtype=torch.float32, device=x.device).unbind()
    grid = torch.empty_like(x, memory_format=torch.contiguous_format) if quantise else x
    _spread[(tokens,)](
        x,
        places.rows,
        weights,
        values,
        scales,
        pair_weights,
        grid,
        width,
        x.stride(0),
        SLOTS=slots,
        CARRIED=carried,
        QUANTISE=quantise,
        PIECES=cdiv(width, PIECE),
        PIECE=PIECE,
        num_warps=4,
        **launch(),
    )
    return _Rows(values, scales, pair_weights, grid)


def _sum(y: Tensor, rows: Tensor, out_dtype: torch.dtype, shared: Tensor | None = None) -> Tensor:
    """y [R, D] by place, rows [T, k] int32 -> [T, D]; shared [parts, T, D]."""
    tokens, slots = rows.shape
    width = y.shape[1]
    out = torch.empty((tokens, width), dtype=out_dtype, device=y.device)
    block = min(256, power_of_two(width))
    _combine[(cdiv(tokens, 4), cdiv(width, block))](
        y,
        rows,
        out if shared is None else shared,
        out,
        tokens,
        width,
        0 if shared is None else shared.stride(0),
        SLOTS=slots,
        PARTS=0 if shared is None else shared.shape[0],
        TOKENS=4,
        BLOCK=block,
        num_warps=4,
        **launch(),
    )
    return out


def _expert_rows(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Any,
    w2: Any,
    limit: float,
    quantise: bool,
    round_hidden: bool,
    one_scale: bool,
    raw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each pair's output -> [R, D] by place; the places [T, k]; x on the FP8 grid, which it is not yet when `raw`."""
    ids, weights = ids.long().contiguous(), weights.float().contiguous()
    experts = w13.shape[0]
    packed = not isinstance(w13, (Tensor, quant.Fp4Matrix))
    if packed:
        hopper = _hopper()
        assert w13.carried == one_scale, "the experts are prepared for other numerics"
        assert quantise, "packed experts read rows on the FP8 grid"
        name = hopper.choose(tuning.bucket(ids.shape[0]) * ids.shape[1], w13, w2)
        if name not in hopper.CONFIGS[hopper.form_of(one_scale)]:
            early, stream = bool(launch()["PDL"]), hopper.stream
            rows = stream.place_rows(x, ids, w13, w2, raw, name, early)
            y = stream.products(rows, weights, w13, w2, limit, round_hidden, name, early)
            return y, rows.places, rows.grid
        configs = [hopper.config_for(name, matrix) for matrix in (w13, w2)]
        places = place(ids, experts, configs[0]["ROWS"])
        rows = _spread_rows(x, places, weights, one_scale, raw)
        tiles, first = places[1:3], hopper.First(rows.weights, limit, round_hidden)
        hidden, scales = hopper.product(rows.values, rows.scales, w13, *tiles, configs[0], first)
        if one_scale:
            hidden, scales = _carried_rows(hidden, scales)
        return hopper.product(hidden, scales, w2, *tiles, configs[1])[0], places.rows, rows.grid
    places = place(ids, experts, 64 if ids.numel() > 16 * experts else 16)
    if one_scale:  # by value
        w13, w2 = (quant.roundtrip_carry(quant.values(w, x.dtype)) for w in (w13, w2))
        grid = quant.roundtrip_fp8(x) if raw else x
        rows = _spread_rows(quant.roundtrip_carry(grid), places, weights, False, False)._replace(grid=grid)
    else:
        rows = _spread_rows(x, places, weights, False, raw)
    hidden = _product(rows.values, w13, places, (rows.weights, limit, round_hidden, quantise))
    if one_scale:
        hidden = quant.roundtrip_carry(hidden)
    return _product(hidden, w2, places, None), places.rows, rows.grid


def _carried_rows(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """[R, I] and [R, I/32] of the FP8 grid -> codes and [R] f32 scales, in the packed products' order."""
    pairs, inner = codes.shape
    out = torch.empty_like(codes)
    row_scales = torch.empty(pairs, dtype=torch.float32, device=codes.device)
    piece = min(PIECE, power_of_two(inner))
    _carry_hidden[(pairs,)](
        codes, scales, out, row_scales, inner, PIECES=cdiv(inner, piece), PIECE=piece, num_warps=4, **launch()
    )
    return out, row_scales


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Any,
    w2: Any,
    limit: float,
    quantise: bool,
    round_hidden: bool = True,
    one_scale: bool = False,
) -> Tensor:
    if ids.numel() == 0:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if quantise and w2.shape[2] % quant.MX_GROUP:
        return plain.experts_reference(x, ids, weights, w13, w2, limit, quantise, round_hidden, one_scale)
    y, rows, _ = _expert_rows(x, ids, weights, w13, w2, limit, quantise, round_hidden, one_scale, False)
    return _sum(y, rows, torch.float32)


def _shared_expert(grid: Tensor, w13: quant.Matrix, w2: quant.Matrix, limit: float, round_hidden: bool) -> Tensor:
    """grid [T, D] bf16 on the FP8 grid -> [parts, T, D]: one part in bf16, or several in f32."""
    tokens, inner = grid.shape[0], w2.shape[1]
    by_row = isinstance(w13, quant.RowMatrix)
    assert by_row == isinstance(w2, quant.RowMatrix), "both of the shared expert's weights are carried, or none"
    parts = products(carry(grid) if by_row else grid, w13, grid.dtype)[:, 0]
    hidden = torch.empty((tokens, inner), dtype=quant.E4M3 if by_row else grid.dtype, device=grid.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=grid.device)
    piece = min(PIECE, power_of_two(inner))
    _activate[(tokens,)](
        parts,
        hidden,
        scales,
        inner,
        parts.stride(0),
        limit,
        LIMITED=limit > 0,
        ROUND=round_hidden,
        CARRY=by_row,
        PARTS=parts.shape[0],
        PIECES=cdiv(inner, piece),
        PIECE=piece,
        num_warps=4,
        **launch(),
    )
    return products(Carried(hidden, scales) if by_row else hidden, w2, grid.dtype)[:, 0]


def moe(
    h: Tensor,
    gate: Tensor,
    bias: Tensor,
    w13: Any,
    w2: Any,
    shared_w13: quant.Matrix,
    shared_w2: quant.Matrix,
    k: int,
    normalise: bool,
    scale: float,
    limit: float,
    round_hidden: bool,
    one_scale: bool,
) -> Tensor | None:
    inner, shared = w2.shape[2], shared_w2.shape[1]
    if h.dtype != torch.bfloat16 or h.shape[1] % quant.MX_GROUP or inner % quant.MX_GROUP or shared % quant.MX_GROUP:
        return None
    if h.shape[0] == 0:
        return torch.empty_like(h)
    ids, weights = moe_gate.route(h, gate, bias, k, normalise, scale)
    y, rows, grid = _expert_rows(h, ids, weights, w13, w2, limit, True, round_hidden, one_scale, True)
    return _sum(y, rows, h.dtype, _shared_expert(grid, shared_w13, shared_w2, limit, round_hidden))
