"""`_enter` of `hyper.py` on Hopper, for 4 bf16 streams.

In Triton's explicit dialect (Gluon), since the work must lie just so: copies of the streams run ahead into a ring in
shared memory, and what a thread writes into the streams is, in its registers, what the matrix instructions take.

    a unit    64 rows of 32 channels of every stream: a thread has 8 channels side by side of 2 rows, 16 bytes each
    a program 64 channels, two units a tile of rows; its part of `fn` stays in shared memory as three bf16 matrices

Matrix instructions take 16 channels at a time, of which a thread has 4 in two pairs. Which channels those are is free
as long as both operands agree, so `fn` is laid out for the channels that the threads have.

Cost: bytes of `hyper_read`. A program waits for no other's copies: 3 units in flight of two programs are 120 kB a
multiprocessor, three times what hides the memory's latency. 910 instructions of a warp a unit, half of what there is
time for while a unit's bytes come and go.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS: gl.constexpr = gl.constexpr(64)
UNIT: gl.constexpr = gl.constexpr(32)  # channels of a stream
STREAMS: gl.constexpr = gl.constexpr(4)
MIXES: gl.constexpr = gl.constexpr(24)

# How threads hold a unit: [row, channel].
_UNIT: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
_PLANE: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))  # a stream's, in shared memory
_PLANES: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=3))
_SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_FN: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))  # [mix, channel]

_ROUND: gl.constexpr = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_WIDEN: gl.constexpr = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_FOUR: gl.constexpr = gl.constexpr("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];")


@gluon.jit
def _turned(x):
    """[R, 32]: channels in the order of the matrix instructions, from that of the threads; nothing moves."""
    split = gl.reshape(x, (x.shape[0], 4, 2, 2, 2))  # thread, instruction, half, pair
    return gl.reshape(gl.permute(split, (0, 2, 3, 1, 4)), (x.shape[0], 32))


@gluon.jit
def _side_by_side(a, b):
    """[M, K], [M, K] -> [M, 2*K]."""
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@gluon.jit
def _all_streams(x):
    """4 of [M, K] -> [M, 4*K]."""
    return _side_by_side(_side_by_side(x[0], x[1]), _side_by_side(x[2], x[3]))


@gluon.jit
def _rounded(x):
    """f32 -> bf16, in a form that is done once."""
    return gl.inline_asm_elementwise(_ROUND, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def _wide(x):
    """bf16 -> f32, two from a register."""
    return gl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _four(ptr):
    """ptr[0] to ptr[3], at a multiple of 16 bytes."""
    kinds: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
    address = ptr.to(gl.int64, bitcast=True)
    a, b, c, d = gl.inline_asm_elementwise(_FOUR, "=f,=f,=f,=f,l", [address], dtype=kinds, is_pure=False, pack=1)
    return gl.expand_dims(a, 1), gl.expand_dims(b, 1), gl.expand_dims(c, 1), gl.expand_dims(d, 1)


@gluon.jit
def _row_weights(pre_ptr, post_ptr, comb_ptr, tile, rows, PENDING: gl.constexpr, READ: gl.constexpr):
    """Of every row of a tile, [64, 1] each: how it is read, how written, and how streams exchange."""
    row = tile.to(gl.int64) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, _UNIT))
    row = gl.minimum(row, rows - 1)
    found = ()
    if READ:
        found = found + _four(pre_ptr + row * STREAMS)
    if PENDING:
        found = found + _four(post_ptr + row * STREAMS)
        for j in gl.static_range(STREAMS):
            found = found + _four(comb_ptr + row * (STREAMS * STREAMS) + j * STREAMS)
    return found


@gluon.jit
def _fetch(descs, rings, bars, unit, units, step, PENDING: gl.constexpr, UNITS: gl.constexpr):
    """Begins to copy a unit; without effect past the last one."""
    s_desc, out_desc = descs
    s_ring, out_ring = rings
    stage = unit % s_ring.shape[0]
    row = (gl.program_id(1) + unit // UNITS * step) * ROWS
    column = (gl.program_id(0) * UNITS + unit % UNITS) * UNIT
    bar = bars.index(stage)
    there = unit < units
    mbarrier.expect(bar, (STREAMS + PENDING) * ROWS * UNIT * 2, pred=there)
    tma.async_copy_global_to_shared(s_desc, [0, row, column], bar, s_ring.index(stage), pred=there)
    if PENDING:
        tma.async_copy_global_to_shared(out_desc, [row, column], bar, out_ring.index(stage), pred=there)


@gluon.jit
def _keep(fn_ptr, kept, width, UNITS: gl.constexpr):
    """The program's part of `fn` as three bf16 matrices a unit, [mix, 4 streams of 32 channels], high part first."""
    mix = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, _FN)), 1)
    channel = gl.expand_dims(gl.program_id(0) * (UNITS * UNIT) + gl.arange(0, UNIT, gl.SliceLayout(0, _FN)), 0)
    units = ()
    for unit in gl.static_range(UNITS):
        found = ()
        for k in gl.static_range(STREAMS):
            at = mix * (STREAMS * width) + k * width + unit * UNIT + channel
            found = found + (_turned(gl.load(fn_ptr + at, mask=mix < MIXES, other=0.0)),)  # noqa: RUF005
        units = units + (_all_streams(found),)  # noqa: RUF005
    for unit in gl.static_range(UNITS):
        rest = units[unit]
        for level in gl.static_range(3):
            high = (rest.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
            rest = rest - high
            kept.index(unit * 3 + level).store(high.to(gl.bfloat16))


@gluon.jit(do_not_specialize=["rows", "pieces"])
def _enter(
    s_desc,  # [4, T, D]
    out_desc,  # [T, D], where a result is pending
    pre_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    settled_ptr,
    read_ptr,
    products_ptr,
    squares_ptr,
    rows,
    width,
    pieces,  # UNITS; not known to the compiler, that it does not write the loop out
    PENDING: gl.constexpr,
    READ: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    WRITE: gl.constexpr = STREAMS * READ  # places in a row's weights
    EXCHANGE: gl.constexpr = WRITE + STREAMS
    chunk, chunks = gl.program_id(0), gl.num_programs(0)
    first, step = gl.program_id(1), gl.num_programs(1)
    tiles = gl.cdiv(rows, ROWS)
    units = UNITS * ((tiles - first + step - 1) // step)
    s_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, STREAMS, ROWS, UNIT], s_desc.layout)
    out_ring = s_ring
    if PENDING:
        out_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, UNIT], out_desc.layout)
    descs, rings = (s_desc, out_desc), (s_ring, out_ring)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kept = gl.allocate_shared_memory(
        gl.bfloat16, [3 * UNITS, 32, STREAMS * UNIT], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(STAGES - 1):
        _fetch(descs, rings, bars, slot, units, step, PENDING, UNITS)
    ahead = _row_weights(pre_ptr, post_ptr, comb_ptr, first, rows, PENDING, READ)
    _keep(fn_ptr, kept, width, UNITS)
    fence_async_shared()

    unit = 0
    for tile in range(first, tiles, step):
        row = tile.to(gl.int64) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, _UNIT))
        live = gl.expand_dims(row < rows, 1)
        weights = ahead
        ahead = _row_weights(pre_ptr, post_ptr, comb_ptr, tile + step, rows, PENDING, READ)
        at = row * width + chunk * (UNITS * UNIT)
        channel = gl.arange(0, UNIT, gl.SliceLayout(0, _UNIT))
        read_at = gl.expand_dims(at, 1) + gl.expand_dims(channel, 0)
        settled_at = gl.expand_dims(at + row * (3 * width), 1) + gl.expand_dims(channel, 0)
        squares = gl.full((ROWS,), 0.0, gl.float32, gl.SliceLayout(1, _UNIT))
        read_squares = gl.full((ROWS,), 0.0, gl.float32, gl.SliceLayout(1, _UNIT))
        products = gl.full((ROWS, 32), 0.0, gl.float32, _SUMS)
        for piece in range(pieces):
            stage = unit % STAGES
            mbarrier.wait(bars.index(stage), unit // STAGES % 2)
            loaded = ()
            planes = s_ring.index(stage)._reinterpret(gl.bfloat16, [STREAMS, ROWS, UNIT], _PLANE)
            for j in gl.static_range(STREAMS):
                loaded = loaded + (planes.index(j).load(_UNIT),)  # noqa: RUF005
            if PENDING:
                out = _wide(out_ring.index(stage).load(_UNIT))
            gl.thread_barrier()  # all threads have passed the unit before, whose place is taken now
            _fetch(descs, rings, bars, unit + STAGES - 1, units, step, PENDING, UNITS)
            entering = ()
            read = gl.full((ROWS, UNIT), 0.0, gl.float32, _UNIT)
            square = gl.full((ROWS, UNIT), 0.0, gl.float32, _UNIT)
            for k in gl.static_range(STREAMS):
                stream = loaded[k]
                if PENDING:
                    mixed = weights[WRITE + k] * out
                    for j in gl.static_range(STREAMS):
                        mixed += weights[EXCHANGE + j * STREAMS + k] * _wide(loaded[j])
                    stream = _rounded(mixed)
                    gl.store(settled_ptr + settled_at + (k * width + piece * UNIT), stream, mask=live)
                value = _wide(stream)
                square += value * value
                if READ:
                    read += weights[k] * value
                entering = entering + (_turned(stream),)  # noqa: RUF005
            squares += gl.sum(square, 1)
            if READ:
                rounded = _rounded(read)
                gl.store(read_ptr + read_at + piece * UNIT, rounded, mask=live)
                value = _wide(rounded)
                read_squares += gl.sum(value * value, 1)
            x = gl.convert_layout(_all_streams(entering), gl.DotOperandLayout(0, _SUMS, 2), assert_trivial=True)
            sums = gl.full((ROWS, 32), 0.0, gl.float32, _SUMS)
            for level in gl.static_range(3):  # the lowest first
                y = kept.index(piece * 3 + 2 - level).permute((1, 0))
                sums = warpgroup_mma(x, y, sums, use_acc=level > 0, is_async=True)
            products += warpgroup_mma_wait(0, deps=(sums,))
            unit += 1
        share = row * chunks + chunk
        gl.store(squares_ptr + 2 * share, squares, mask=row < rows)
        if READ:
            gl.store(squares_ptr + 2 * share + 1, read_squares, mask=row < rows)
        row = tile.to(gl.int64) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, _SUMS))
        mix = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, _SUMS)), 0)
        at = gl.expand_dims((row * chunks + chunk) * MIXES, 1) + mix
        gl.store(products_ptr + at, products, mask=(mix < MIXES) & gl.expand_dims(row < rows, 1))


def serves(s: Tensor, *others: Tensor | None) -> bool:
    """4 bf16 streams side by side, whole units, and addresses that copies take; `others` is what enters beside s."""
    (_, streams, width), out = s.shape, others[0]
    whole = streams == STREAMS.value and s.stride(1) == width and width % (2 * UNIT.value) == 0
    tensors = [s, *(x for x in others if x is not None)]
    rows = all(
        x.dtype is torch.bfloat16 and x.stride(-1) == 1 and x.stride(0) % 8 == 0 for x in (s, out) if x is not None
    )
    return whole and rows and all(x.data_ptr() % 16 == 0 for x in tensors)


def shares_each(rows: int, chunks: int, programs: int) -> int:
    """Shares of a chunk of 64 channels: for few rows two, so that twice as many programs work side by side."""
    return 2 if 2 * chunks * -(-rows // ROWS.value) <= programs else 1


def enter(
    s: Tensor,
    out: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    fn: Tensor,
    settled: Tensor | None,
    read: Tensor | None,
    products: Tensor,
    squares: Tensor,
    programs: int,
    stages: int,
    options: dict[str, bool],
) -> None:
    """Fills settled, read, products and squares, as `hyper._enter`.

    products  [T, C, M]: D/C, the channels of a share, are 64 or 32; two of 32 add up to the same bits as one of 64.
    programs  in all, at most; more rows than for so many: each goes farther. `stages` units are in flight in each.
    """
    rows, streams, width = s.shape
    chunks = products.shape[1]
    unit = [ROWS.value, UNIT.value]
    planes = s.transpose(0, 1)
    _enter[(chunks, max(min(-(-rows // ROWS.value), programs // chunks), 1))](
        TensorDescriptor(planes, list(planes.shape), list(planes.stride()), [streams, *unit], _PLANES.value),
        TensorDescriptor(out, list(out.shape), list(out.stride()), unit, _PLANE.value) if out is not None else None,
        pre,
        post,
        comb,
        fn,
        settled,
        read,
        products,
        squares,
        rows,
        width,
        width // (chunks * UNIT.value),
        PENDING=out is not None,
        READ=read is not None,
        UNITS=width // (chunks * UNIT.value),
        STAGES=stages,
        num_warps=4,
        **options,
    )
