"""Triton versions of `fused.attention_inputs` and `fused.attention_output`. Source: model specification, section 2.5.

Between two products everything is one small kernel, which also adds up the slices of the product before it:

    inputs   h -> FP8 grid | wqkv_a | sum, both norms, rotation of the window row, FP8 grid | wq_b, queries rotated
    output   o turned back -> FP8 grid | wo_a, group by group | sum -> FP8 grid | wo_b | sum

A product of a `RowMatrix` takes its rows as FP8 codes with one scale (`quant.carry`), written by the same kernels.
Values are rounded where the single ops round them, so a result differs only by the order of a product's sum.
Cost: the bytes of the weights at few rows; each small kernel reads and writes its rows once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import quant
from benthic.kernels.triton.gemm import Carried, Turn, add_up, carried, launch, products, start
from benthic.kernels.triton.norm import chunked
from benthic.kernels.triton.quant import (
    by_groups,
    carry_byte,
    e8m0_value,
    flat,
    magnitude_bits,
    narrow,
    q8_values,
    widen,
)
from benthic.kernels.triton.rope import rotate_pairs, turn
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two


@triton.jit
def _on_grid(x):
    """x f32 [R, K] through bf16 and the FP8 grid."""
    return flat(q8_values(by_groups(widen(narrow(x, tl.bfloat16)), 32)))


@triton.jit
def _onto_grid(
    x_ptr,
    positions_ptr,
    freqs_ptr,
    y_ptr,  # [T, groups * HEADS * WIDTH] bf16, or codes float8e4nv where CARRY
    scales_ptr,  # [T, groups] f32 where CARRY
    rows,
    groups,
    row_stride,
    HEADS: tl.constexpr,  # of a group
    WIDTH: tl.constexpr,  # channels of a head
    BLOCK: tl.constexpr,  # channels taken at a time; 2 * PAIRS where heads are turned
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,  # channel pairs at a head's end to turn back; 0: none
    QUANTISE: tl.constexpr,
    CARRY: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes one group of ROWS rows: turned back, on the FP8 grid, carried."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS * HEADS) // HEADS
    head = tl.program_id(1) * HEADS + tl.arange(0, ROWS * HEADS) % HEADS
    live = (row < rows)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    source = (row * row_stride + head * WIDTH)[:, None] + col
    target = ((row * groups * HEADS + head) * WIDTH)[:, None] + col
    pieces = ()
    top = tl.full((ROWS * HEADS,), 0, tl.int32)
    for chunk in tl.static_range(WIDTH // BLOCK):
        x = widen(tl.load(x_ptr + source + chunk * BLOCK, mask=live, other=0.0))
        if PAIRS > 0 and chunk == WIDTH // BLOCK - 1:
            position = tl.load(positions_ptr + row, mask=row < rows, other=0).to(tl.float32)
            cos, sin = turn(position[:, None] * tl.load(freqs_ptr + tl.arange(0, PAIRS))[None, :])
            x = widen(narrow(rotate_pairs(x, cos, -sin), tl.bfloat16))
        if QUANTISE:
            x = _on_grid(x)
        if CARRY:
            pieces = pieces + (x,)  # noqa: RUF005, the compiler knows no starred tuples
            top = tl.maximum(top, magnitude_bits(x))
        else:
            tl.store(y_ptr + target + chunk * BLOCK, narrow(x, tl.bfloat16), mask=live)
    if CARRY:
        byte = carry_byte(tl.max(tl.reshape(top, (ROWS, HEADS)), axis=1))
        each = tl.reshape(tl.broadcast_to(byte[:, None], (ROWS, HEADS)), (ROWS * HEADS,))
        for chunk in tl.static_range(WIDTH // BLOCK):
            tl.store(y_ptr + target + chunk * BLOCK, carried(pieces[chunk], each), mask=live)
        line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(scales_ptr + line * groups + tl.program_id(1), e8m0_value(byte), mask=line < rows)


@triton.jit
def _added(parts_ptr, at, part_stride, live, PARTS: tl.constexpr):
    """The sum, in order, of what PARTS parts hold at offsets `at`, as a bf16 product would be: f32 [1, N]."""
    total = widen(tl.load(parts_ptr + at, mask=live, other=0.0))
    for part in tl.static_range(1, PARTS):
        total += widen(tl.load(parts_ptr + part * tl.cast(part_stride, tl.int64) + at, mask=live, other=0.0))
    return widen(narrow(total, tl.bfloat16))


@triton.jit
def _query_row(
    parts_ptr,
    norm_ptr,
    y_ptr,
    codes_ptr,
    scale_ptr,
    part_stride,
    eps,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CARRY: tl.constexpr,
):
    """Sum, norm, FP8 grid; carried too where CARRY. All pointers stand at the row."""
    col = tl.arange(0, BLOCK)[None, :]
    sums = ()
    squares = tl.zeros((1, BLOCK), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        x = _added(parts_ptr, chunk * BLOCK + col, part_stride, col + chunk * BLOCK < RANK, PARTS)
        sums = sums + (x,)  # noqa: RUF005, the compiler knows no starred tuples
        squares += x * x
    statistic = tl.rsqrt(tl.sum(squares, axis=1) / RANK + eps)[:, None]
    values = ()
    top = tl.full((1,), 0, tl.int32)
    for chunk in tl.static_range(CHUNKS):
        live = col + chunk * BLOCK < RANK
        weight = widen(tl.load(norm_ptr + chunk * BLOCK + col, mask=live, other=0.0))
        x = _on_grid(sums[chunk] * statistic * weight)
        tl.store(y_ptr + chunk * BLOCK + col, narrow(x, tl.bfloat16), mask=live)
        if CARRY:
            values = values + (x,)  # noqa: RUF005
            top = tl.maximum(top, magnitude_bits(x))
    if CARRY:
        byte = carry_byte(top)
        for chunk in tl.static_range(CHUNKS):
            live = col + chunk * BLOCK < RANK
            tl.store(codes_ptr + chunk * BLOCK + col, carried(values[chunk], byte), mask=live)
        tl.store(scale_ptr + tl.arange(0, 1), e8m0_value(byte))


@triton.jit
def _window_row(
    parts_ptr,
    norm_ptr,
    y_ptr,
    position,
    freqs_ptr,
    part_stride,
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Sum, norm, rotation of the last channels, FP8 grid. All pointers stand at the row."""
    col = tl.arange(0, BLOCK)[None, :]
    live = col < WIDTH
    x = _added(parts_ptr, col, part_stride, live, PARTS)
    statistic = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    x = widen(narrow(x * statistic * widen(tl.load(norm_ptr + col, mask=live, other=0.0)), tl.bfloat16))
    pair = tl.arange(0, BLOCK // 2) - (WIDTH // 2 - PAIRS)
    freqs = tl.load(freqs_ptr + pair, mask=(pair >= 0) & (pair < PAIRS), other=0.0)
    cos, sin = turn(position * freqs[None, :])
    tl.store(y_ptr + col, narrow(_on_grid(rotate_pairs(x, cos, sin)), tl.bfloat16), mask=live)


@triton.jit
def _norms(
    parts_ptr,  # [PARTS, T, RANK + WIDTH]
    positions_ptr,
    freqs_ptr,
    q_norm_ptr,
    kv_norm_ptr,
    qa_ptr,  # [T, RANK] bf16
    codes_ptr,  # [T, RANK] float8e4nv where CARRY
    scales_ptr,  # [T] f32 where CARRY
    kw_ptr,  # [T, WIDTH] bf16
    part_stride,
    row_stride,
    eps,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    CARRY: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes the query part of a row, or its window part."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = parts_ptr + row * row_stride
    if tl.program_id(1) == 0:
        _query_row(
            source,
            q_norm_ptr,
            qa_ptr + row * RANK,
            codes_ptr + row * RANK,
            scales_ptr + row,
            part_stride,
            eps,
            PARTS,
            RANK,
            CHUNKS,
            BLOCK,
            CARRY,
        )
    else:
        _window_row(
            source + RANK,
            kv_norm_ptr,
            kw_ptr + row * WIDTH,
            tl.load(positions_ptr + row).to(tl.float32),
            freqs_ptr,
            part_stride,
            eps,
            PARTS,
            WIDTH,
            WIDTH_BLOCK,
            PAIRS,
        )


@triton.jit
def _sum_onto_grid(
    parts_ptr,  # [PARTS, groups, T, WIDTH]
    y_ptr,  # [T, groups * WIDTH] bf16, or codes where CARRY
    scales_ptr,  # [T] f32 where CARRY
    part_stride,
    group_stride,
    row_stride,
    groups,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,  # that a program takes: all where CARRY
    CARRY: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    col = tl.arange(0, BLOCK)[None, :]
    live = col < WIDTH
    target = (row * groups + first) * WIDTH + col
    pieces = ()
    top = tl.full((1,), 0, tl.int32)
    for group in tl.static_range(GROUPS):
        at = (first + group) * tl.cast(group_stride, tl.int64) + row * row_stride + col
        x = _on_grid(_added(parts_ptr, at, part_stride, live, PARTS))
        if CARRY:
            pieces = pieces + (x,)  # noqa: RUF005
            top = tl.maximum(top, magnitude_bits(x))
        else:
            tl.store(y_ptr + target + group * WIDTH, narrow(x, tl.bfloat16), mask=live)
    if CARRY:
        byte = carry_byte(top)
        for group in tl.static_range(GROUPS):
            tl.store(y_ptr + target + group * WIDTH, carried(pieces[group], byte), mask=live)
        tl.store(scales_ptr + row + tl.arange(0, 1), e8m0_value(byte))


def _grid_rows(
    x: Tensor,
    groups: int,
    heads: int,
    carry: bool,
    quantise: bool = True,
    turned: Turn | None = None,
) -> Tensor | Carried:
    """x [T, groups * heads * width] bf16, T at least 1, turned back and on the FP8 grid as asked."""
    rows, span = x.shape[0], x.shape[1] // groups
    width = span // heads
    pairs = 0 if turned is None else turned.freqs.shape[0]
    block = 2 * pairs if pairs else min(width & -width, 1024)
    y = torch.empty(x.shape, dtype=quant.E4M3 if carry else x.dtype, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    each = max(1, 8192 // span)
    each = 1 << (min(each, 8, rows).bit_length() - 1)
    _onto_grid[(cdiv(rows, each), groups)](
        x,
        x if turned is None else turned.positions,
        x if turned is None else turned.freqs,
        y,
        scales,
        rows,
        groups,
        x.stride(0),
        HEADS=heads,
        WIDTH=width,
        BLOCK=block,
        ROWS=each,
        PAIRS=pairs,
        QUANTISE=quantise,
        CARRY=carry,
        num_warps=4,
        **launch(),
    )
    return Carried(y, scales) if carry else y


def attention_inputs(
    h: Tensor,
    positions: Tensor,
    freqs: Tensor,
    wqkv_a: quant.Matrix,
    q_norm: Tensor,
    wq_b: quant.Matrix,
    kv_norm: Tensor,
    eps: float,
    one_scale: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    rows, hidden = h.shape
    rank, width, pairs = q_norm.shape[0], kv_norm.shape[0], freqs.shape[0]
    inner = wq_b.shape[0]
    if not _fits(h, positions, one_scale, wqkv_a, wq_b) or hidden % 32 or rank % 32 or width % 32 or inner % width:
        return None
    q = torch.empty((rows, inner), dtype=h.dtype, device=h.device)
    qa = torch.empty((rows, rank), dtype=h.dtype, device=h.device)
    kw = torch.empty((rows, width), dtype=h.dtype, device=h.device)
    if rows == 0:
        return q, qa, kw
    carry = isinstance(wq_b, quant.RowMatrix)
    h8 = _grid_rows(h, 1, 1, isinstance(wqkv_a, quant.RowMatrix))
    parts = products(h8, wqkv_a, h.dtype)  # [parts, 1, T, Rq + dh]
    codes = torch.empty((rows, rank), dtype=quant.E4M3, device=h.device) if carry else qa
    scales = torch.empty((rows, 1), dtype=torch.float32, device=h.device) if carry else qa
    chunks, block = chunked(rank)
    _norms[(rows, 2)](
        parts,
        positions,
        freqs,
        q_norm,
        kv_norm,
        qa,
        codes,
        scales,
        kw,
        parts.stride(0),
        parts.stride(2),
        eps,
        PARTS=parts.shape[0],
        RANK=rank,
        CHUNKS=chunks,
        BLOCK=block,
        WIDTH=width,
        WIDTH_BLOCK=power_of_two(width),
        PAIRS=pairs,
        CARRY=carry,
        num_warps=4,
        **launch(),
    )
    turned = products(Carried(codes, scales) if carry else qa, wq_b, h.dtype, turn=Turn(positions, freqs, width))
    return turned[0, 0], qa, kw


def attention_output(
    o: Tensor,
    positions: Tensor,
    freqs: Tensor,
    wo_a: quant.Matrix,
    wo_b: quant.Matrix,
    groups: int,
    quantise_wo_a: bool,
    one_scale: bool,
) -> Tensor | None:
    rows, heads, width = o.shape
    rank, pairs, hidden = wo_a.shape[0] // groups, freqs.shape[0], wo_b.shape[0]
    each = heads // groups
    if not _fits(o, positions, one_scale, wo_a, wo_b) or rank % 64 or width % 32 or heads % groups or each & (each - 1):
        return None
    if pairs % 16 or pairs & (pairs - 1) or width % (2 * pairs):
        return None
    if rows == 0:
        return torch.empty((0, hidden), dtype=o.dtype, device=o.device)
    turned = Turn(positions, freqs, width)
    back = _grid_rows(o.view(rows, -1), groups, each, isinstance(wo_a, quant.RowMatrix), quantise_wo_a, turned)
    parts = products(back, wo_a, o.dtype, groups)  # [parts, groups, T, R]
    carry = isinstance(wo_b, quant.RowMatrix)
    u = torch.empty((rows, groups * rank), dtype=quant.E4M3 if carry else o.dtype, device=o.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=o.device) if carry else u
    together = groups if carry else 1
    _sum_onto_grid[(rows, groups // together)](
        parts,
        u,
        scales,
        parts.stride(0),
        parts.stride(1),
        parts.stride(2),
        groups,
        PARTS=parts.shape[0],
        WIDTH=rank,
        BLOCK=power_of_two(rank),
        GROUPS=together,
        CARRY=carry,
        num_warps=4,
        **launch(),
    )
    return add_up(products(Carried(u, scales) if carry else u, wo_b, o.dtype), o.dtype)


def _fits(x: Tensor, positions: Tensor, one_scale: bool, *weights: quant.Matrix) -> bool:
    """Else the steps are taken one by one."""
    if one_scale and not all(isinstance(weight, quant.RowMatrix) for weight in weights):
        return False
    dense = all(weight.dtype == torch.bfloat16 for weight in weights if isinstance(weight, Tensor))
    return dense and x.dtype == torch.bfloat16 and x.is_contiguous() and positions.is_contiguous()
