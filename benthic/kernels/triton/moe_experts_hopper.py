"""The two products of the routed experts on Hopper, from FP4 weights in an order of their own.

    packed     what `pack` makes of an `Fp4Matrix`, once, when it is loaded: 0.53 bytes a weight, as before
    product    rows grouped by expert times their expert's matrix, streamed once

A weight is unpacked in the registers where the matrix instruction wants it, four to eight codes an instruction, so that
neither shared memory nor a shuffle stands between the load and the product. Weight rows are the 64 rows of the
instruction, tokens its columns. In Triton's explicit dialect (Gluon):

    copies        bring 128 columns of weights, scales and rows at a time into a ring in shared memory, in bulk
    warpgroups    unpack 64 of the columns while the 64 before, or other warpgroups' columns, are multiplied
    a program     goes from one piece of work (128 or 256 weight rows, one tile of rows, all of K) to the next, and
                  the copies run ahead over that border

Sums run along K in one order whatever the tile, so a row's bits do not depend on the number of rows.

Issue slots a weight, of about 3.7 that there are at full bandwidth: exact 2.8 (0.9 of them on the integer pipe, which
has 1.8), carried 2.0, all of the loop counted.

Two forms of one weight, by what the rows are:

    exact      rows bf16. A code lies in a bf16 register so that it reads as the number times 2^-126, subnormal or not;
               one multiplication by 2^(126 + its group's scale below the row's largest) makes it exact.
    carried    rows E4M3 against one scale a row (`quant.carry`), weights too. A group's scale below the row's picks a
               table of the 8 magnitudes as E4M3 bytes, and a byte permutation looks 4 of them up.

E experts, N weight rows, K columns, R rows (pairs of a token and a slot, sorted by expert).
"""

import logging
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benthic.errors import KernelBuildError
from benthic.kernels import quant
from benthic.kernels.cuda import build
from benthic.kernels.cuda import experts as stream
from benthic.kernels.triton import tuning
from benthic.kernels.triton.gemm import launch
from benthic.kernels.triton.moe_experts_pack import (
    BLOCK,
    KEPT,
    REST,
    REST_TURNS,
    TURNS,
    Packed,
    tables,
)
from benthic.kernels.triton.moe_experts_pack import columns as columns
from benthic.kernels.triton.moe_experts_pack import interleave as interleave
from benthic.kernels.triton.moe_experts_pack import pack as pack
from benthic.kernels.triton.quant import carry_byte, e8m0_value
from benthic.kernels.triton.swiglu import gated

log = logging.getLogger(__name__)

# ---- unpacking -------------------------------------------------------------------------------------------------------


def _exact_text(half: int) -> str:
    """Words $8..$11 of a thread's row and block, scales $12 -> 8 registers of two bf16, of columns 64*half and on."""
    a, b = f"${8 + 2 * half}", f"${9 + 2 * half}"
    lines = [".reg .b32 unit, other, rest, t;"]
    for name, group in (("unit", 2 * half), ("other", 2 * half + 1)):
        lines += [f"prmt.b32 {name}, $12, 0, 0x4{group}4{group};", f"shl.b32 {name}, {name}, 7;"]
    lines += ["shl.b32 t, " + b + ", 2;", f"lop3.b32 rest, {a}, t, {REST:#x}, 0xe4;"]
    for pair in range(8):
        source = a if pair < 3 else b if pair < 6 else "rest"
        turn = TURNS[pair % 3] if pair < 6 else REST_TURNS[pair - 6]
        if turn > 6:
            lines.append(f"shf.l.wrap.b32 t, {source}, {source}, {turn};")
        elif turn:
            lines.append(f"shl.b32 t, {source}, {turn};")
        lines.append(f"and.b32 t, {'t' if turn else source}, {KEPT:#x};")
        lines.append(f"mul.rn.bf16x2 ${pair}, t, {'unit' if pair < 4 else 'other'};")
    return "{\n" + "\n".join(lines) + "\n}"


def _carried_text(half: int) -> str:
    """Words $4..$7, table $8 (low half) and $12 -> 4 registers of four E4M3, of places 64*half and on."""
    lines = [".reg .b32 m, t;"]
    for word in range(2):
        w = f"${4 + 2 * half + word}"
        lines += [
            f"and.b32 m, {w}, 0x77777777;",
            "prmt.b32 t, $8, $12, m;",
            f"lop3.b32 ${2 * word}, t, {w}, 0x80808080, 0xf8;",
            "shr.u32 m, m, 16;",
            "prmt.b32 m, $8, $12, m;",
            f"shl.b32 t, {w}, 4;",
            f"lop3.b32 ${2 * word + 1}, m, t, 0x80808080, 0xf8;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_EXACT: gl.constexpr = gl.constexpr((_exact_text(0), _exact_text(1)))
_CARRIED: gl.constexpr = gl.constexpr((_carried_text(0), _carried_text(1)))
_EXACT_ARGS: gl.constexpr = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))
_CARRIED_ARGS: gl.constexpr = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 12))

_WORDS_SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))  # two rows' words a line
_SCALES_SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=1))


# Who has what of HEIGHT weight rows: lane = 4 * (row % 8) + thread of the row, warp = row // 16 as far as there are
# warps, registers the rest.


@gluon.constexpr_function
def _rows(height, warps):
    """Row numbers that the bits of register, lane and warp stand for."""
    in_warps = [16 << i for i in range(warps.bit_length() - 1)]
    return [8] + [row for row in (64, 128) if 16 * warps <= row < height], [1, 2, 4], in_warps


@gluon.constexpr_function
def _words_layout(height, warps):
    """[row, word]"""
    registers, lanes, in_warps = _rows(height, warps)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *([row, 0] for row in registers)],
        [[0, 4], [0, 8], *([row, 0] for row in lanes)],
        [[row, 0] for row in in_warps],
        [],
        [height, 16],
    )


@gluon.constexpr_function
def _lines_layout(height, warps):
    """[row // 2, row % 2 and word]"""
    registers, lanes, in_warps = _rows(height, warps)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *([row // 2, 0] for row in registers)],
        [[0, 4], [0, 8], [0, 16], *([row // 2, 0] for row in lanes[1:])],
        [[row // 2, 0] for row in in_warps],
        [],
        [height // 2, 32],
    )


@gluon.constexpr_function
def _fours_layout(height, warps):
    """[row, thread of the row, word of the thread]"""
    registers, lanes, in_warps = _rows(height, warps)
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *([row, 0, 0] for row in registers)],
        [[0, 1, 0], [0, 2, 0], *([row, 0, 0] for row in lanes)],
        [[row, 0, 0] for row in in_warps],
        [],
        [height, 4, 4],
    )


@gluon.jit
def _unpack(weights, HALF: gl.constexpr, FORM: gl.constexpr):
    """What `_weights` gives -> [N, 64] E4M3 or bf16, K in the order of `columns`."""
    words, low, high = weights
    height: gl.constexpr = words.shape[0]
    if not (FORM & CARRIED):
        part = gl.inline_asm_elementwise(
            _EXACT[HALF], _EXACT_ARGS, [words, low], dtype=(gl.bfloat16,) * 4, is_pure=False, pack=4
        )
        a = gl.join(gl.join(part[0], part[1]), gl.join(part[2], part[3]))
        a = gl.permute(gl.reshape(a, (height, 4, 2, 2, 2, 2)), (0, 5, 4, 2, 1, 3))
    else:
        part = gl.inline_asm_elementwise(
            _CARRIED[HALF], _CARRIED_ARGS, [words, low, high], dtype=(gl.float8e4nv,) * 4, is_pure=False, pack=4
        )
        a = gl.join(gl.join(part[0], part[1]), gl.join(part[2], part[3]))
        a = gl.permute(a, (0, 3, 2, 1))
    return gl.reshape(a, (height, 64))


# ---- the product -----------------------------------------------------------------------------------------------------


# What a product does, as bits of FORM
CARRIED: gl.constexpr = gl.constexpr(1)  # FP8; its unit keeps few bits of a long sum, which moves to f32 block by block
FIRST: gl.constexpr = gl.constexpr(4)  # gate and up rows meet in the activation
LIMITED: gl.constexpr = gl.constexpr(8)
ROUND: gl.constexpr = gl.constexpr(16)
EARLY: gl.constexpr = gl.constexpr(32)  # started while the kernel before still runs


@gluon.jit
def _wait(FORM: gl.constexpr):
    """What the kernels before have written is there; and the next kernel may start, which relies on that."""
    if FORM & EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _piece(tiles_ptr, piece, COLUMNS, BLOCKS):
    """First block of a piece's weights, its first row."""
    at = tiles_ptr + piece // COLUMNS * 4
    return (gl.load(at) * COLUMNS + piece % COLUMNS) * BLOCKS, gl.load(at + 1)


@gluon.jit
def _fetch_weights(rings, bar, descs, stage, block, K_BLOCKS, live):
    """One thread asks for a block of words and scales; the barrier then also waits for the rows."""
    words_ring, scales_ring, _ = rings
    words_desc, scales_desc, x_desc = descs
    parts: gl.constexpr = words_ring.shape[1] // 64
    weight_bytes: gl.constexpr = words_desc.block_type.nbytes + scales_desc.block_type.nbytes
    x_bytes: gl.constexpr = x_desc.block_type.nbytes
    mbarrier.expect(bar, parts * weight_bytes + x_bytes, pred=live)
    for part in gl.static_range(parts):
        at = block + part * K_BLOCKS
        words = words_ring.index(stage).slice(part * 64, 64)
        tma.async_copy_global_to_shared(words_desc, [at * 64, 0], bar, words, pred=live)
        scales = scales_ring.index(stage).slice(part * 128, 128)
        tma.async_copy_global_to_shared(scales_desc, [at * 128], bar, scales, pred=live)


@gluon.jit
def _fetch_rows(rings, bar, descs, stage, row, k, live):
    tma.async_copy_global_to_shared(descs[2], [row, k * 128], bar, rings[2].index(stage), pred=live)


@gluon.jit
def _producer(rings, bars, descs, tiles_ptr, count_ptr, sizes, STAGES: gl.constexpr, FORM: gl.constexpr):
    """Brings block after block of K for piece after piece. Weights of the first ones come before the rows are there."""
    full, empty = bars
    columns, K_BLOCKS, N = sizes
    blocks = K_BLOCKS * (N // columns // 128)
    pieces = gl.load(count_ptr) * columns
    first = gl.program_id(0)
    ahead = 0
    if FORM & EARLY:  # noqa: SIM102, known when compiled
        if first < pieces:
            ahead = gl.minimum(STAGES, K_BLOCKS)
            block, row = _piece(tiles_ptr, first, columns, blocks)
            for k in range(ahead):
                _fetch_weights(rings, full.index(k), descs, k, block + k, K_BLOCKS, True)
    _wait(FORM)
    stage = 0
    phase = 1
    for piece in range(first, pieces, gl.num_programs(0)):
        block, row = _piece(tiles_ptr, piece, columns, blocks)
        for k in range(K_BLOCKS):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            _fetch_weights(rings, bar, descs, stage, block + k, K_BLOCKS, ahead <= 0)
            _fetch_rows(rings, bar, descs, stage, row, k, True)
            ahead -= 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _weights(lines, scales, tables_ptr, FORM: gl.constexpr):
    """A block's words and scales in shared memory -> what `_unpack` takes."""
    height: gl.constexpr = scales.shape[0]
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = _words_layout(height, warps)
    words = gl.reshape(lines.load(_lines_layout(height, warps)), (height, 16))
    words = gl.convert_layout(words, layout, assert_trivial=True)
    if FORM & CARRIED:
        fours: gl.constexpr = _fours_layout(height, warps)
        threads: gl.constexpr = gl.SliceLayout(2, fours)
        offsets = gl.expand_dims(scales.load(gl.SliceLayout(1, threads)), 1)
        index = (offsets >> gl.expand_dims(8 * gl.arange(0, 4, gl.SliceLayout(0, threads)), 0)) & 31
        table = gl.expand_dims(gl.load(tables_ptr + index), 2)
        table = gl.broadcast(table, gl.full((height, 4, 4), 0, gl.int64, fours))[0]
        table = gl.convert_layout(gl.reshape(table, (height, 16)), layout, assert_trivial=True)
        return words, table.to(gl.int32), (table >> 32).to(gl.int32)
    else:
        units = gl.expand_dims(scales.load(gl.SliceLayout(1, layout)), 1)
        units = gl.broadcast(units, words)[0]
        return words, units, units


@gluon.jit
def _part(rings, stage, tables_ptr, PART: gl.constexpr, FORM: gl.constexpr):
    """Words and scales of 64 rows of a piece, as `_weights` gives them."""
    lines = rings[0].index(stage).slice(PART * 32, 32)
    scales = rings[1].index(stage).slice(PART * 64, 64)
    return _weights(lines, scales, tables_ptr, FORM)


@gluon.jit
def _half(acc, total, weights, x, HALF: gl.constexpr, PENDING: gl.constexpr, FORM: gl.constexpr):
    """Unpacks half a block and begins its product, the one before being done meanwhile; all but PENDING are waited for.

    None are left where other warpgroups fill the time: registers for one half at a time are then enough.
    """
    deep: gl.constexpr = 32 if FORM & CARRIED else 16
    layout: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, deep // 8)
    a = gl.convert_layout(_unpack(weights, HALF, FORM), layout, assert_trivial=True)
    b = x.slice(64 * HALF, 64, 1).permute((1, 0))
    if (FORM & CARRIED) and HALF == 0:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        total = warpgroup_mma_wait(0, deps=(total + acc,))  # added before the next product begins
        acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
        return (acc if PENDING else warpgroup_mma_wait(0, deps=(acc,))), total
    else:
        acc = warpgroup_mma(a, b, acc, is_async=True)
        return warpgroup_mma_wait(PENDING, deps=(acc,)), total


@gluon.jit
def _consumer(
    rings,
    bars,
    sources,
    outs,
    sizes,
    limit,
    PART: gl.constexpr,  # which 64 rows of a piece
    AHEAD: gl.constexpr,
    FORM: gl.constexpr,
):
    """Multiplies and finishes piece after piece."""
    parts: gl.constexpr = rings[1].shape[1] // 64
    _wait(FORM)
    pieces = gl.load(sources[1]) * sizes[0]
    at = (0, 0, rings[2].shape[0] - 1)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        acc, stage, phase, before = _consume(rings, bars, sources, sizes, at, PART, AHEAD, FORM)
        at = (stage, phase, before)
        _finish(acc, piece // sizes[0], piece % sizes[0] * parts + PART, sources, outs, sizes[2], limit, FORM)


@gluon.jit
def _consume(
    rings,
    bars,
    sources,
    sizes,
    at,  # stage, phase, stage before
    PART: gl.constexpr,
    AHEAD: gl.constexpr,
    FORM: gl.constexpr,
):
    """Sums of a warpgroup's 64 weight rows, and where its ring is then."""
    _, scales_ring, x_ring = rings
    full, empty = bars
    _, K_BLOCKS, _ = sizes
    parts: gl.constexpr = scales_ring.shape[1] // 64
    TOKENS: gl.constexpr = x_ring.shape[1]
    PENDING: gl.constexpr = 0 if parts > 2 or (TOKENS == 128 and FORM & CARRIED) else 1
    STAGES: gl.constexpr = x_ring.shape[0]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32 if FORM & CARRIED else 16])
    stage, phase, before = at
    acc = gl.full((64, TOKENS), 0.0, gl.float32, sums)
    total = gl.full((64, TOKENS), 0.0, gl.float32, sums)
    if AHEAD:
        mbarrier.wait(full.index(stage), phase)
        weights = _part(rings, stage, sources[2], PART, FORM)
    for k in range(K_BLOCKS):
        if not AHEAD:
            mbarrier.wait(full.index(stage), phase)
            weights = _part(rings, stage, sources[2], PART, FORM)
        acc, total = _half(acc, total, weights, x_ring.index(stage), 0, PENDING, FORM)
        mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
        before = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        following = weights
        if AHEAD and k + 1 < K_BLOCKS:
            mbarrier.wait(full.index(stage), phase)
            following = _part(rings, stage, sources[2], PART, FORM)
        acc, total = _half(acc, total, weights, x_ring.index(before), 1, PENDING, FORM)
        weights = following
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before), count=1)
    if FORM & CARRIED:
        acc += total
    return acc, stage, phase, before


@gluon.jit
def _ring_product(
    words_desc,
    scales_desc,
    x_desc,
    tiles_ptr,  # [capacity, 4] int32: expert, first row, number of rows
    count_ptr,  # [1] int32: tiles in use
    tables_ptr,  # [24] int64
    base_ptr,  # [E, N] f32
    row_scales_ptr,  # [R] f32
    pair_weights_ptr,  # [R] f32
    out_ptr,
    out_scales_ptr,
    limit,
    N,
    K_BLOCKS,
    HEIGHT: gl.constexpr,  # weight rows of a piece
    ROWS: gl.constexpr,  # rows of a tile
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    REGISTERS: gl.constexpr,
    FORM: gl.constexpr,
):
    """One warp copies, and a warpgroup for each 64 weight rows of a piece multiplies.

    AHEAD   a warpgroup has the words of the block after in its registers before it unpacks the second half of a block.
    """
    words_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEIGHT // 2, 32], words_desc.layout)
    scales_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEIGHT], scales_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=HEIGHT // 64)
    rings = (words_ring, scales_ring, x_ring)
    bars = (full, empty)
    descs = (words_desc, scales_desc, x_desc)
    sources = (tiles_ptr, count_ptr, tables_ptr, base_ptr, row_scales_ptr, pair_weights_ptr)
    outs = (out_ptr, out_scales_ptr)
    sizes = (N // HEIGHT, K_BLOCKS, N)
    copies = (rings, bars, descs, tiles_ptr, count_ptr, sizes, STAGES, FORM)
    if HEIGHT == 128:
        gl.warp_specialize(
            [
                (_consumer, (rings, bars, sources, outs, sizes, limit, 0, AHEAD, FORM)),
                (_consumer, (rings, bars, sources, outs, sizes, limit, 1, AHEAD, FORM)),
                (_producer, copies),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],  # 65536 for 384 threads, in eights
        )
    else:
        gl.static_assert(HEIGHT == 256)
        gl.warp_specialize(
            [
                (_consumer, (rings, bars, sources, outs, sizes, limit, 0, AHEAD, FORM)),
                (_consumer, (rings, bars, sources, outs, sizes, limit, 1, AHEAD, FORM)),
                (_consumer, (rings, bars, sources, outs, sizes, limit, 2, AHEAD, FORM)),
                (_consumer, (rings, bars, sources, outs, sizes, limit, 3, AHEAD, FORM)),
                (_producer, copies),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )


@gluon.jit
def _solo_product(
    words_desc,
    scales_desc,
    x_desc,
    tiles_ptr,
    count_ptr,
    tables_ptr,
    base_ptr,
    row_scales_ptr,
    pair_weights_ptr,
    out_ptr,
    out_scales_ptr,
    limit,
    N,
    K_BLOCKS,
    HEIGHT: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
):
    """All warps multiply, each having all registers; one of their threads copies. Arguments as `_ring_product`."""
    words_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEIGHT // 2, 32], words_desc.layout)
    scales_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEIGHT], scales_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    rings = (words_ring, scales_ring, x_ring)
    descs = (words_desc, scales_desc, x_desc)
    sources = (tiles_ptr, count_ptr, tables_ptr, base_ptr, row_scales_ptr, pair_weights_ptr)
    outs = (out_ptr, out_scales_ptr)
    _wait(FORM)
    columns = N // HEIGHT
    blocks = K_BLOCKS * (HEIGHT // 128)
    pieces = gl.load(count_ptr) * columns
    step = gl.num_programs(0)

    # what is asked for runs STAGES - 1 blocks ahead of what is multiplied
    ask = gl.program_id(0)
    ask_k = 0
    ask_block, ask_row = _piece(tiles_ptr, gl.minimum(ask, pieces - 1), columns, blocks)
    for stage in gl.static_range(STAGES - 1):
        _fetch_weights(rings, full.index(stage), descs, stage, ask_block + ask_k, K_BLOCKS, ask < pieces)
        _fetch_rows(rings, full.index(stage), descs, stage, ask_row, ask_k, ask < pieces)
        ask_k += 1
        if ask_k == K_BLOCKS:
            ask_k = 0
            ask += step
            ask_block, ask_row = _piece(tiles_ptr, gl.minimum(ask, pieces - 1), columns, blocks)
    bounds = (pieces, columns, K_BLOCKS, blocks)
    at = (ask, ask_k, ask_block, ask_row, 0, 0)
    for piece in range(gl.program_id(0), pieces, step):
        acc, at = _solo_piece(rings, full, descs, sources, bounds, at, FORM)
        _finish(acc, piece // columns, piece % columns, sources, outs, N, limit, FORM)


@gluon.jit
def _solo_piece(
    rings,
    full,
    descs,
    sources,
    bounds,
    at,  # what is asked for next; stage, phase
    FORM: gl.constexpr,
):
    """Sums of a piece, and what is next."""
    words_ring, scales_ring, x_ring = rings
    pieces, columns, K_BLOCKS, blocks = bounds
    ask, ask_k, ask_block, ask_row, stage, phase = at
    HEIGHT: gl.constexpr = scales_ring.shape[1]
    STAGES: gl.constexpr = x_ring.shape[0]
    TOKENS: gl.constexpr = x_ring.shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, TOKENS, 32 if FORM & CARRIED else 16]
    )
    tiles_ptr, tables_ptr = sources[0], sources[2]
    acc = gl.full((HEIGHT, TOKENS), 0.0, gl.float32, sums)
    total = gl.full((HEIGHT, TOKENS), 0.0, gl.float32, sums)
    for _ in range(K_BLOCKS):
        mbarrier.wait(full.index(stage), phase)
        weights = _weights(words_ring.index(stage), scales_ring.index(stage), tables_ptr, FORM)
        acc, total = _half(acc, total, weights, x_ring.index(stage), 0, 1, FORM)
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        gl.thread_barrier()
        _fetch_weights(rings, full.index(before), descs, before, ask_block + ask_k, K_BLOCKS, ask < pieces)
        _fetch_rows(rings, full.index(before), descs, before, ask_row, ask_k, ask < pieces)
        ask_k += 1
        if ask_k == K_BLOCKS:
            ask_k = 0
            ask += gl.num_programs(0)
            ask_block, ask_row = _piece(tiles_ptr, gl.minimum(ask, pieces - 1), columns, blocks)
        acc, total = _half(acc, total, weights, x_ring.index(stage), 1, 1, FORM)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if FORM & CARRIED:
        acc += total
    return acc, (ask, ask_k, ask_block, ask_row, stage, phase)


# ---- what is done with sums ------------------------------------------------------------------------------------------


@gluon.jit
def _finish(acc, tile, part, sources, outs, N, limit, FORM: gl.constexpr):
    """Sums [H, tokens] of weight rows H*part .. and a tile's rows -> what is stored."""
    tiles_ptr, _, _, base_ptr, row_scales_ptr, _ = sources
    sums: gl.constexpr = acc.type.layout
    height: gl.constexpr = acc.shape[0]
    tokens: gl.constexpr = acc.shape[1]
    expert = gl.load(tiles_ptr + tile * 4)
    row = gl.load(tiles_ptr + tile * 4 + 1)
    count = gl.load(tiles_ptr + tile * 4 + 2)
    channel = gl.arange(0, height, gl.SliceLayout(1, sums))
    acc *= gl.expand_dims(gl.load(base_ptr + expert.to(gl.int64) * N + part * height + channel), 1)
    if FORM & CARRIED:
        token = gl.arange(0, tokens, gl.SliceLayout(0, sums))
        acc *= gl.expand_dims(gl.load(row_scales_ptr + row + token, mask=token < count, other=0.0), 0)
    if FORM & FIRST:
        if tokens > 64:  # in two parts, for want of registers
            halves = gl.permute(gl.reshape(acc, (height, 2, tokens // 2)), (0, 2, 1))
            left, right = gl.split(halves)
            _activate(left, row, count, part, sources, outs, N, limit, FORM)
            _activate(right, row + tokens // 2, count - tokens // 2, part, sources, outs, N, limit, FORM)
        else:
            _activate(acc, row, count, part, sources, outs, N, limit, FORM)
    else:
        _store(acc.to(gl.bfloat16), row, count, outs[0], part, N)


@gluon.jit
def _activate(acc, row, count, part, sources, outs, N, limit, FORM: gl.constexpr):
    """Gate and up rows -> clamped SwiGLU times the pair's weight, on the FP8 grid, 32 channels a group."""
    out_ptr, out_scales_ptr = outs
    height: gl.constexpr = acc.shape[0]
    tokens: gl.constexpr = acc.shape[1]
    groups: gl.constexpr = height // 64
    rounded = acc.to(gl.bfloat16).to(gl.float32)
    both = gl.permute(gl.reshape(rounded, (height // 16, 2, 8, tokens)), (0, 2, 3, 1))
    gate, up = gl.split(both)
    gate, up = gl.reshape(gate, (groups, 32, tokens)), gl.reshape(up, (groups, 32, tokens))
    token = gl.arange(0, tokens, gl.SliceLayout(0, gl.SliceLayout(0, gate.type.layout)))
    weight = gl.load(sources[5] + row + token, mask=token < count, other=0.0)
    y = gated(gate, up, limit, FORM & LIMITED) * gl.expand_dims(gl.expand_dims(weight, 0), 0)
    if FORM & ROUND:
        y = y.to(gl.bfloat16).to(gl.float32)
    byte = carry_byte(gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))  # [groups, tokens]
    inverse = gl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(gl.float32, bitcast=True)
    codes = (y * gl.expand_dims(inverse, 1)).to(gl.float8e4nv)
    if FORM & CARRIED:
        by_token: gl.constexpr = byte.type.layout
        group = gl.arange(0, groups, gl.SliceLayout(1, by_token))
        token = gl.arange(0, tokens, gl.SliceLayout(0, by_token))
        at = (row + token).to(gl.int64) * (N // 64) + part * groups
        to = out_scales_ptr + gl.expand_dims(at, 0) + gl.expand_dims(group, 1)
        gl.store(to, byte.to(gl.uint8), mask=gl.expand_dims(token < count, 0))
        _store(gl.reshape(codes, (height // 2, tokens)), row, count, out_ptr, part, N // 2)
    else:
        values = (codes.to(gl.float32) * gl.expand_dims(e8m0_value(byte), 1)).to(gl.bfloat16)
        _store(gl.reshape(values, (height // 2, tokens)), row, count, out_ptr, part, N // 2)


@gluon.jit
def _store(y, row, count, out_ptr, part, width):
    """y [channels, tokens] to rows of `width` channels; a thread has 16 bytes of one row."""
    wide: gl.constexpr = y.shape[0]
    tokens: gl.constexpr = y.shape[1]
    many: gl.constexpr = 128 // y.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout(
        [many, 1], [min(wide // many, 32), max(32 * many // wide, 1)], [1, gl.num_warps()], [0, 1]
    )
    y = gl.convert_layout(y, layout)
    channel = gl.arange(0, wide, gl.SliceLayout(1, layout))
    token = gl.arange(0, tokens, gl.SliceLayout(0, layout))
    at = (row + token).to(gl.int64) * width + part * wide
    gl.store(out_ptr + gl.expand_dims(at, 0) + gl.expand_dims(channel, 1), y, mask=gl.expand_dims(token < count, 0))


# ---- configurations and launch ---------------------------------------------------------------------------------------

_MULTIPROCESSORS = 132  # where nobody can ask

Config = dict[str, Any]


def _ring(rows: int, stages: int, height: int = 128, registers: int = 168, ahead: bool = False) -> Config:
    """Warpgroups multiply 64 weight rows each, one warp copies."""
    return {
        "KIND": "ring",
        "ROWS": rows,
        "HEIGHT": height,
        "STAGES": stages,
        "AHEAD": ahead,
        "num_warps": 4,
        "registers": registers,
    }


def _solo(rows: int, stages: int) -> Config:
    """All warps multiply, one thread copies."""
    return {
        "KIND": "solo",
        "ROWS": rows,
        "HEIGHT": 256,
        "STAGES": stages,
        "num_warps": 8,
        "registers": 255,
    }


CONFIGS: dict[str, dict[str, Config]] = {  # form of the weights -> name; all sum in one order
    "exact": {
        "ring16": _ring(16, 12),
        "ring32": _ring(32, 12),
        "ring64": _ring(64, 8),
        "ring128": _ring(128, 4),
        "ahead16": _ring(16, 16, ahead=True),
        "ahead32": _ring(32, 12, ahead=True),
        "ahead64": _ring(64, 8, ahead=True),
        "four16": _ring(16, 10, 256, 96),
        "four32": _ring(32, 8, 256, 96),
        "four16a": _ring(16, 10, 256, 96, ahead=True),
        "four32a": _ring(32, 8, 256, 96, ahead=True),
        "wide64": _solo(64, 6),
        "wide128": _solo(128, 4),
    },
    "carried": {
        "ring16": _ring(16, 16),
        "ring32": _ring(32, 14),
        "ring64": _ring(64, 12),
        "ring128": _ring(128, 8, registers=208),
        "ahead16": _ring(16, 20, ahead=True),
        "ahead32": _ring(32, 16, ahead=True),
        "ahead64": _ring(64, 12, ahead=True),
        "four16": _ring(16, 11, 256, 96),
        "four32": _ring(32, 10, 256, 96),
        "four16a": _ring(16, 11, 256, 96, ahead=True),
        "four32a": _ring(32, 10, 256, 96, ahead=True),
        "wide64": _solo(64, 8),
    },
}


def form_of(carried: bool) -> str:
    return "carried" if carried else "exact"


def default(carried: bool, rows: int, experts: int) -> str:
    """By the rows that an expert gets on average, when `rows` of them fall on `experts`."""
    each = rows / experts
    tile = next(height for height, most in ((16, 11), (32, 24), (64, 80), (128, each)) if each <= most)
    if carried and tile == 128:  # with sums moved to float32 on the way, 128 rows would not fit in registers
        return "wide64"
    return f"{'wide' if tile == 128 else 'ring'}{tile}"


def config_for(name: str, matrix: Packed) -> Config:
    """Of this name, in pieces that the matrix's weight rows divide into."""
    config = CONFIGS[form_of(matrix.carried)][name]
    if matrix.shape[1] % config["HEIGHT"] == 0:
        return config
    ring = {"registers": 168} if config["KIND"] == "ring" else {}  # of the fewer warpgroups
    return config | {"HEIGHT": BLOCK} | ring


# what `benthic bench tune` tries: all of these, and the shapes of `cuda/experts.py`
CANDIDATES: dict[str, dict[str, tuning.Config]] = {
    form: {name: {"name": name} for name in [*stream.SHAPES[form], *configs]} for form, configs in CONFIGS.items()
}


STREAMS = False  # are shapes of `cuda/experts.py` taken where no table says what is? They have not run on a device yet


@cache
def _streams(carried: bool, experts: int, width: int, name: str) -> bool:
    """Is this shape of `cuda/experts.py` there to be used? Compiles it."""
    if not build.available():
        return False
    try:
        stream.ready(name, carried, experts, width)
    except KernelBuildError as error:
        log.warning("Triton's experts run instead", extra={"reason": str(error)})
        return False
    return True


def _wanted(rows: int, carried: bool, shape: torch.Size) -> str:
    """What the table of the device says for w13 of this shape."""
    usual = stream.shape_for(rows, shape[0]) if STREAMS else default(carried, rows, shape[0])
    key = "x".join(str(size) for size in shape)
    return tuning.config(f"experts_{form_of(carried)}", key, rows, {"name": usual})["name"]


def choose(rows: int, w13: Packed, w2: Packed) -> str:
    """What runs for so many rows: the name of a shape of `cuda/experts.py`, or of one of CONFIGS.

    A fixed function of the arguments, the device and its table. No two of them give different bits.
    """
    carried, experts, n = w13.carried, w13.shape[0], (w13.shape[1], w2.shape[1])
    name = _wanted(rows, carried, w13.shape)
    if name in CONFIGS[form_of(carried)]:
        return name
    there = stream.fits(name, carried, n) and _streams(carried, experts, w2.shape[1], name)
    return name if there else default(carried, rows, experts)


@cache
def warm(carried: bool, shape: torch.Size, width: int) -> None:
    """Compile what w13 of this shape, with w2 of so many rows, is likely to ask for, so that no step waits for it."""
    if not build.available():
        return
    names = {_wanted(each * shape[0], carried, shape) for each in (1, 8, 24, 64, 256)}
    with suppress(KernelBuildError):  # told when it is asked for
        stream.compile_together(
            [name for name in names if stream.fits(name, carried, (shape[1], width))], carried, shape[0]
        )


class First(NamedTuple):
    """What the first product needs for its activation."""

    pair_weights: Tensor  # [R] f32
    limit: float
    round_hidden: bool


def product(
    x: Tensor,
    row_scales: Tensor | None,
    matrix: Packed,
    tiles: Tensor,
    count: Tensor,
    config: Config,
    first: First | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rows sorted by expert times their expert's matrix.

    x           [R, K] bf16, or E4M3 in the order of `columns` with row_scales [R] f32, as the matrix was packed.
    tiles       [capacity, 4] int32, and count [1] int32 of them in use: expert, first row, number of rows.
    first       activate: then the matrix's rows are in the order of `interleave`.
    returns     [R, N] bf16 and None; activated, on the FP8 grid: [R, N/2] bf16 and None, or its codes E4M3 in the order
                of channels and [R, N/64] uint8 scales.
    """
    _, n, k = matrix.shape
    pairs, carried = x.shape[0], matrix.carried
    rows, height = config["ROWS"], config["HEIGHT"]
    assert n % height == 0, f"{n} weight rows are no tiles of {height}"
    scales = None
    if first is None:
        out = torch.empty((pairs, n), dtype=torch.bfloat16, device=x.device)
    else:
        out = torch.empty((pairs, n // 2), dtype=quant.E4M3 if carried else torch.bfloat16, device=x.device)
        if carried:
            scales = torch.empty((pairs, n // 64), dtype=torch.uint8, device=x.device)
    options = launch()
    x_shared = gl.NVMMASharedLayout(128, 8 if carried else 16, rank=2)
    unused = matrix.base
    arguments = (
        TensorDescriptor.from_tensor(matrix.words, [64, 32], _WORDS_SHARED.value),
        TensorDescriptor.from_tensor(matrix.scales, [128], _SCALES_SHARED.value),
        TensorDescriptor.from_tensor(x, [rows, BLOCK], x_shared),
        tiles,
        count,
        tables(x.device) if carried else tiles,
        matrix.base,
        row_scales if carried else unused,
        first.pair_weights if first is not None else unused,
        out,
        scales if scales is not None else out,
        first.limit if first is not None else 0.0,
        n,
        k // BLOCK,
    )
    form = CARRIED.value if carried else 0
    if first is not None:
        form |= FIRST.value | (LIMITED.value if first.limit > 0 else 0) | (ROUND.value if first.round_hidden else 0)
    form |= EARLY.value if options.pop("PDL") else 0
    common = {"HEIGHT": height, "ROWS": rows, "STAGES": config["STAGES"], "FORM": form, **options}
    common["num_warps"] = config["num_warps"]
    grid = (_multiprocessors(x.device),)
    if config["KIND"] == "ring":
        threads = 32 * (height // 16 + 4)
        common |= {"AHEAD": config["AHEAD"], "REGISTERS": config["registers"], "maxnreg": 65536 // threads // 8 * 8}
        _ring_product[grid](*arguments, **common)
    else:
        _solo_product[grid](*arguments, maxnreg=config["registers"], **common)
    return out, scales


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _MULTIPROCESSORS
