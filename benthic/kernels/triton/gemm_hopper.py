"""The product of `gemm.py` on Hopper from 17 rows up, where copies, unpacking and matrix instructions must overlap.

In Triton's explicit dialect (Gluon), because Triton proper has all warps of a program do the same at the same time:

    a warp           copies 128 columns of weight rows and of x at a time into a ring in shared memory, and runs ahead
                     from one piece of work to the next
    two warpgroups   multiply half of the weight rows each. "blocks" go through registers to bf16, 64 columns while the
                     64 before are multiplied; "rows" are multiplied where they lie, and their FP8 sums move to f32
                     every 128 columns
    a piece          HEIGHT weight rows, ROWS rows of x, and a slice of K; sums go out as f32 where there are several

Sums run along K as in `gemm.py`. Issue slots a weight of "blocks": 2.7, a fifth of what there are when weights come at
full bandwidth; beside 128 rows of x, a third of the time of the products, which they do not wait for.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK = 128  # columns a stage

REGISTERS: gl.constexpr = gl.constexpr(168)  # of 12 warps; dealt out unevenly, matrix instructions would not overlap

# Two E4M3 codes in 16 bits -> two bf16. Each byte is stretched to 16 bits with its sign, then shifted by 4: the sign
# stays on top, exponent and mantissa meet those of bf16, and what is read there is the code's value times 2^-120,
# subnormals included. One multiplication by 2^120 times the scale finishes it: four instructions for two weights.
DEQUANTISE: gl.constexpr = gl.constexpr("""{
    .reg .b32 t, none;
    cvt.u32.u16 t, $1;
    mov.b32 none, 0;
    prmt.b32 t, t, none, 0x9180;
    shl.b32 t, t, 4;
    and.b32 t, t, 0x87f087f0;
    mul.rn.bf16x2 $0, t, $2;
}""")


# Who has what of a warpgroup's weight rows, as the matrix instruction takes them from registers in bf16: lane =
# 4 * (row % 8) + thread of the row, warp = strip of 16 rows % 4. The same thing as a plane and in blocks of scales.


@gluon.constexpr_function
def _plane_layout(height, groups):
    """[row, column], 32 columns a group"""
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], *([[0, 32]] * (groups == 2)), *([[64, 0]] * (height == 128))],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [height, groups * 32],
    )


@gluon.constexpr_function
def _blocks_layout(height, groups):
    """[strip, row of it, group, column of it]"""
    in_strip = [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 0, 16]]
    return gl.DistributedLinearLayout(
        [*in_strip, *([[0, 0, 1, 0]] * (groups == 2)), *([[4, 0, 0, 0]] * (height == 128))],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [height // 16, 16, groups, 32],
    )


@gluon.jit
def _dequantise(codes, words, FIRST: gl.constexpr, operand: gl.constexpr):
    """Codes [N, K] in `_plane_layout`, and scales, a word of four for a strip, from FIRST on -> bf16 [N, K]."""
    strips: gl.constexpr = words.shape[0]
    groups: gl.constexpr = codes.shape[1] // 32
    blocks: gl.constexpr = _blocks_layout(16 * strips, groups)
    of_groups: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, blocks)))
    shift = gl.expand_dims(gl.expand_dims(8 * (FIRST + gl.arange(0, groups, of_groups)), 0), 1)
    byte = (gl.expand_dims(gl.expand_dims(words, 1), 2) >> shift) & 0xFF
    factor = ((gl.minimum(byte, 135) + 120) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    codes = gl.convert_layout(gl.reshape(codes, (strips, 16, groups, 32)), blocks, assert_trivial=True)
    factor = gl.broadcast(gl.expand_dims(factor, 3), codes)[0]
    values = gl.inline_asm_elementwise(
        DEQUANTISE, "=r,h,r", [codes.to(gl.uint8, bitcast=True), factor], dtype=gl.bfloat16, is_pure=False, pack=2
    )
    return gl.convert_layout(gl.reshape(values, (16 * strips, groups * 32)), operand, assert_trivial=True)


@gluon.jit
def _place(piece, sizes, HEIGHT: gl.constexpr, ROWS: gl.constexpr):
    """Of a piece: its slice, first weight row, first row of x, first and last step along K."""
    rows, n, _, _, slices, steps = sizes
    m_tiles = gl.cdiv(rows, ROWS)
    tiles = m_tiles * gl.cdiv(n, HEIGHT)
    part = piece // tiles
    tile = piece % tiles
    return part, tile // m_tiles * HEIGHT, tile % m_tiles * ROWS, part * steps // slices, (part + 1) * steps // slices


@gluon.jit
def _pieces(sizes, HEIGHT: gl.constexpr, ROWS: gl.constexpr):
    return gl.cdiv(sizes[0], ROWS) * gl.cdiv(sizes[1], HEIGHT) * sizes[4]


@gluon.jit
def _producer(rings, bars, descs, sizes, PDL: gl.constexpr):
    """Stage after stage of piece after piece. Weights of the first stages come before the rows are there."""
    w_ring, x_ring = rings
    full, empty = bars
    w_desc, x_desc = descs
    STAGES: gl.constexpr = w_ring.shape[0]
    HEIGHT: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    stage_bytes: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    _, _, k, group_width, _, _ = sizes
    ahead = 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        _part, column, row, first, last = _place(gl.program_id(0), sizes, HEIGHT, ROWS)
        ahead = gl.minimum(STAGES, last - first)
        for stage in range(ahead):
            mbarrier.expect(full.index(stage), stage_bytes)
            at = [column, (first + stage) * 128]
            tma.async_copy_global_to_shared(w_desc, at, full.index(stage), w_ring.index(stage))
        tl.extra.cuda.gdc_wait()
    stage = 0
    phase = 1
    for piece in range(gl.program_id(0), _pieces(sizes, HEIGHT, ROWS), gl.num_programs(0)):
        _part, column, row, first, last = _place(piece, sizes, HEIGHT, ROWS)
        x_first = column // group_width * k
        for step in range(first, last):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, stage_bytes, pred=ahead <= 0)
            tma.async_copy_global_to_shared(w_desc, [column, step * 128], bar, w_ring.index(stage), pred=ahead <= 0)
            tma.async_copy_global_to_shared(x_desc, [row, x_first + step * 128], bar, x_ring.index(stage))
            ahead -= 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _store(acc, y_ptr, piece, sizes, PART: gl.constexpr):
    """A warpgroup's sums [N, M] of a piece to y [parts, M, N]; a thread has 16 bytes of one row."""
    rows, n, _, _, _, _ = sizes
    part, column, row, _first, _last = _place(piece, sizes, 2 * acc.shape[0], acc.shape[1])
    column += PART * acc.shape[0]
    y = acc.to(y_ptr.dtype.element_ty)
    wide: gl.constexpr = y.shape[0]
    many: gl.constexpr = 128 // y.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout(
        [many, 1], [min(wide // many, 32), max(32 * many // wide, 1)], [1, gl.num_warps()], [0, 1]
    )
    y = gl.convert_layout(y, layout)
    channel = column + gl.arange(0, wide, gl.SliceLayout(1, layout))
    token = row + gl.arange(0, y.shape[1], gl.SliceLayout(0, layout))
    at = part.to(gl.int64) * rows * n + token.to(gl.int64) * n
    live = gl.expand_dims(token < rows, 0) & gl.expand_dims(channel < n, 1)
    gl.store(y_ptr + gl.expand_dims(at, 0) + gl.expand_dims(channel, 1), y, mask=live)


@gluon.jit
def _blocks(rings, bars, pointers, sizes, scale_stride, PART: gl.constexpr):
    """A warpgroup's half of the weight rows of each piece, E4M3 codes under scales of blocks of 32 by 32."""
    w_ring, x_ring = rings
    full, empty = bars
    scales_ptr, _, y_ptr = pointers
    STAGES: gl.constexpr = w_ring.shape[0]
    HEIGHT: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    half: gl.constexpr = HEIGHT // 2
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    GROUPS: gl.constexpr = 2 if half == 64 and ROWS <= 128 else 1  # unpacked at a time; registers are few
    plane: gl.constexpr = _plane_layout(half, GROUPS)
    strips: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _blocks_layout(half, GROUPS))))
    stage = 0
    phase = 0
    before = STAGES - 1
    for piece in range(gl.program_id(0), _pieces(sizes, HEIGHT, ROWS), gl.num_programs(0)):
        _part, column, _row, first, last = _place(piece, sizes, HEIGHT, ROWS)
        strip = column + PART * half + 16 * gl.arange(0, half // 16, strips)
        words_ptr = scales_ptr + gl.minimum(strip, sizes[1] - 1) // 32 * scale_stride
        acc = gl.full((half, ROWS), 0.0, gl.float32, sums)
        ahead = gl.load(words_ptr + first)
        for step in range(first, last):
            words = ahead
            ahead = gl.load(words_ptr + gl.minimum(step + 1, last - 1))
            mbarrier.wait(full.index(stage), phase)
            w, x = w_ring.index(stage).slice(PART * half, half), x_ring.index(stage)
            for group in gl.static_range(0, 4, GROUPS):
                a = _dequantise(w.slice(32 * group, 32 * GROUPS, 1).load(plane), words, group, operand)
                b = x.slice(32 * group, 32 * GROUPS, 1).permute((1, 0))
                acc = warpgroup_mma(a, b, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if group == 0:
                    mbarrier.arrive(empty.index(before), count=1, pred=step > first)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        _store(acc, y_ptr, piece, sizes, PART)


@gluon.jit
def _rows(rings, bars, pointers, sizes, groups, PART: gl.constexpr):
    """A warpgroup's half of the weight rows of each piece, E4M3 codes under a scale a row, as x."""
    w_ring, x_ring = rings
    full, empty = bars
    scales_ptr, x_scales_ptr, y_ptr = pointers
    STAGES: gl.constexpr = w_ring.shape[0]
    HEIGHT: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    half: gl.constexpr = HEIGHT // 2
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    stage = 0
    phase = 0
    for piece in range(gl.program_id(0), _pieces(sizes, HEIGHT, ROWS), gl.num_programs(0)):
        _part, column, row, first, last = _place(piece, sizes, HEIGHT, ROWS)
        group = column // sizes[3]
        column += PART * half
        acc = gl.full((half, ROWS), 0.0, gl.float32, sums)
        total = gl.full((half, ROWS), 0.0, gl.float32, sums)
        for _ in range(first, last):
            mbarrier.wait(full.index(stage), phase)
            w, x = w_ring.index(stage).slice(PART * half, half), x_ring.index(stage)
            acc = warpgroup_mma(w, x.permute((1, 0)), acc, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(stage), count=1)
            total += acc
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        weight_row = gl.minimum(column + gl.arange(0, half, gl.SliceLayout(1, sums)), sizes[1] - 1)
        token = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(0, sums)), sizes[0] - 1)
        total *= gl.expand_dims(gl.load(scales_ptr + weight_row), 1)
        total *= gl.expand_dims(gl.load(x_scales_ptr + token * groups + group), 0)
        _store(total, y_ptr, piece, sizes, PART)


@gluon.jit
def _consumer(rings, bars, pointers, sizes, scale_stride, PART: gl.constexpr, CARRIED: gl.constexpr):
    if CARRIED:
        _rows(rings, bars, pointers, sizes, scale_stride, PART)
    else:
        _blocks(rings, bars, pointers, sizes, scale_stride, PART)


@gluon.jit(do_not_specialize=["rows", "group_width", "slices", "steps"])
def _ring_product(
    w_desc,  # [N, K] float8e4nv
    x_desc,  # [M, ..] bf16, or float8e4nv of "rows"
    scales_ptr,  # [ceil(N/32), scale_stride] words of four UE8M0, or [N] f32 of "rows"
    x_scales_ptr,  # [M, groups] f32 of "rows"
    y_ptr,  # [slices, M, N]
    rows,
    n,
    k,
    group_width,  # rows of the weight a group has; its columns of x follow those of the group before
    slices,
    steps,  # of 128 columns, in all
    scale_stride,
    CARRIED: gl.constexpr,
    HEIGHT: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, HEIGHT, 128], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    rings = (w_ring, x_ring)
    bars = (full, empty)
    pointers = (scales_ptr, x_scales_ptr, y_ptr)
    sizes = (rows, n, k, group_width, slices, steps)
    gl.warp_specialize(
        [
            (_consumer, (rings, bars, pointers, sizes, scale_stride, 0, CARRIED)),
            (_consumer, (rings, bars, pointers, sizes, scale_stride, 1, CARRIED)),
            (_producer, (rings, bars, (w_desc, x_desc), sizes, PDL)),
        ],
        [4, 1],
        [REGISTERS, REGISTERS],
    )


def serves(codes: Tensor, scales: Tensor, groups: int, height: int) -> bool:
    """codes [groups * N, K] of a weight: whole stages along K, and no tile that holds rows of two groups."""
    n, k = codes.shape
    words = scales.dtype != torch.uint8 or (scales.data_ptr() % 4 == 0 and scales.stride(0) % 4 == 0)
    return k % BLOCK == 0 and words and (groups == 1 or n // groups % height == 0)


def product(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    y: Tensor,
    groups: int,
    height: int,
    rows: int,
    stages: int,
    programs: int,
    options: dict[str, bool],
) -> None:
    """y [slices, M, groups * N] = x [M, groups * K] times weights [groups * N, K], group by group, a slice of K each.

    x, x_scales    bf16 and None, or E4M3 codes and [M, groups] f32; 16-byte aligned rows.
    codes, scales  E4M3; UE8M0 [N/32, K/32] bytes for bf16 rows, [groups * N] f32 else.
    height, rows   of a piece: 128 or 256 weight rows, rows of x; `stages` of 128 columns in flight, `programs` in all.
    options        of the launch.
    """
    (n, k), carried = codes.shape, x_scales is not None
    w_shared, x_shared = gl.NVMMASharedLayout(128, 8, rank=2), gl.NVMMASharedLayout(128, 8 if carried else 16, rank=2)
    _ring_product[(programs,)](
        TensorDescriptor.from_tensor(codes, [height, BLOCK], w_shared),
        TensorDescriptor.from_tensor(x, [rows, BLOCK], x_shared),
        scales if carried else scales.view(torch.int32),
        x_scales if carried else y,
        y,
        x.shape[0],
        n,
        k,
        n // groups,
        y.shape[0],
        k // BLOCK,
        groups if carried else scales.stride(0) // 4,
        CARRIED=carried,
        HEIGHT=height,
        ROWS=rows,
        STAGES=stages,
        num_warps=4,
        maxnreg=REGISTERS.value,
        **options,
    )
