"""Triton versions of `kernels/gemm.py`; contracts are there. Source: model specification, section 6.2.

One kernel, `_product`, serves every kind of operands:

    blocks   x bf16, weight `Fp8Matrix`: its codes become bf16 in registers, which is exact, and meet x in bf16 products
    values   x and weight bf16
    rows     x carried by one scale a row (`Carried`), weight `RowMatrix`: FP8 products, both scales at the end
    wide     f32 on either side: f32 products in IEEE arithmetic, made for being right

The weight is the first operand, so that its rows fill the 64 rows of a Hopper matrix instruction and a tile of x may be
as narrow as 16. At few rows a product costs the weight's bytes: K is cut into slices so that every multiprocessor
streams its share, the slices' sums go to memory as f32, and whoever reads them adds them in order. Inside a slice the
sum runs along K, one matrix instruction after the other, whatever the tile is. So the bits of a row depend on the
number of slices alone; under `backends.invariant()` that does not depend on the rows, and where there are many of them
a program goes through all slices itself.

Where copies and unpacking should overlap the products, `gemm_hopper.py` has another form of it, the same sums.

From some number of rows up the vendor's library takes over. For `blocks` the weight is then written out as bf16 on the
way, 3 bytes of traffic a weight: an eighth of the product at 2048 rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benthic.kernels import backends, quant
from benthic.kernels import gemm as plain
from benthic.kernels.triton import gemm_hopper, tuning
from benthic.kernels.triton.gemm_hopper import DEQUANTISE
from benthic.kernels.triton.norm import chunked, even_rows
from benthic.kernels.triton.quant import (
    FLOATS,
    INTERPRETED,
    bound,
    carry_byte,
    e4m3,
    e4m3_value,
    e8m0_value,
    magnitude_bits,
    narrow,
    widen,
)
from benthic.kernels.triton.rope import rotate_pairs, turn, turn_pairs
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two

# ---- weights in registers --------------------------------------------------------------------------------------------


@triton.jit
def dequantise(codes, scales):
    """E4M3 codes [N, K] and UE8M0 bytes [N, K/32] -> bf16 [N, K]. Exact for scales to 2^7; infinite or NaN beyond."""
    if INTERPRETED:
        factor = tl.where(scales > 134, float("inf"), e8m0_value(scales))
    else:
        factor = (scales.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True) * tl.full(
            scales.shape, 2.0**120, tl.bfloat16
        )
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (scales.shape[0], scales.shape[1], 32)), codes.shape)
    if INTERPRETED:
        return narrow(e4m3_value(codes) * factor, tl.bfloat16)
    return tl.inline_asm_elementwise(
        DEQUANTISE, "=r,h,r", [codes.to(tl.uint8, bitcast=True), factor], dtype=tl.bfloat16, is_pure=True, pack=2
    )


# ---- the product -----------------------------------------------------------------------------------------------------


@triton.jit
def _multiply(weight, x, acc, KIND: tl.constexpr):
    """acc + weight [N, K] @ x [M, K]^T, f32."""
    if INTERPRETED and KIND == "rows":
        return tl.dot(e4m3_value(weight), tl.trans(e4m3_value(x)), acc)
    if KIND == "wide" or INTERPRETED:  # the interpreter multiplies no bf16
        return tl.dot(widen(weight), tl.trans(widen(x)), acc, input_precision="ieee")
    elif KIND == "rows":  # FP8 instructions keep 13 bits of a sum: it moves to f32 every 128 columns
        return tl.dot(weight, tl.trans(x), acc, max_num_imprecise_acc=128)
    else:
        return tl.dot(weight, tl.trans(x), acc)


@triton.jit
def _finished(acc):
    """acc, looked at: the matrix instructions behind it must have ended.

    They read the weight from registers, and the compiler lets those of the next step be written while the last
    instructions of this one still run.
    """
    if INTERPRETED:
        return acc
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _slice(
    x,
    w,
    s_at,
    row,
    column,
    x_first,
    part,
    slices,
    steps,
    K,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    BULK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Slice `part` of `slices`, which share `steps` times BLOCK_K columns: f32 [BLOCK_N, BLOCK_M].

    x, w, s_at  pointers to the tiles at column 0; with BULK x and w are descriptors and row, column, x_first say where.
    """
    step = part * steps // slices
    first = step * BLOCK_K
    if KIND == "blocks":
        s_at += step * (BLOCK_K // 32)
    if not BULK:
        x += first
        w += first
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for index in range(bound((part + 1) * steps // slices - step)):
        k = first + index * BLOCK_K
        if BULK:
            weight = w.load([column, k])
            values = x.load([row, x_first + k])
        elif EVEN:
            weight = tl.load(w)
            values = tl.load(x)
        else:
            inside = (k + tl.arange(0, BLOCK_K) < K)[None, :]
            weight = tl.load(w, mask=inside, other=0.0)
            values = tl.load(x, mask=inside, other=0.0)
        if KIND == "blocks":
            if EVEN:
                scales = tl.load(s_at)
            else:
                scales = tl.load(s_at, mask=(k + 32 * tl.arange(0, BLOCK_K // 32) < K)[None, :], other=0)
            weight = dequantise(weight, scales)
            s_at += BLOCK_K // 32
        acc = _multiply(weight, values, acc, KIND)
        if KIND == "blocks":
            acc = _finished(acc)
        if not BULK:
            w += BLOCK_K
            x += BLOCK_K
    return acc


@triton.jit
def turn_rows(y, first, positions, freqs_ptr, head_width, PAIRS: tl.constexpr):
    """y f32 [N, M]: channels first .. first+N-1 of heads of head_width, a token a column. N and head_width are even.

    Turns the last PAIRS channel pairs of each head by positions f32 [M] times freqs.
    """
    pair = ((first + 2 * tl.arange(0, y.shape[0] // 2)) % head_width) // 2 - (head_width // 2 - PAIRS)
    angle = tl.load(freqs_ptr + pair, mask=pair >= 0, other=0.0)[:, None] * positions[None, :]
    cos, sin = turn(angle)
    even, odd = tl.split(tl.permute(tl.reshape(y, (y.shape[0] // 2, 2, y.shape[1])), (0, 2, 1)))
    even, odd = turn_pairs(even, odd, cos, sin)
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), y.shape)


@triton.jit(do_not_specialize=["M", "group_width", "slices", "steps", "head_width"])
def _product(
    x,  # [M, ..], rows x_stride apart; group g of the weight's rows reads K columns from g * x_group_stride on
    x_scales_ptr,  # [M, groups] f32, of "rows"
    w,  # [N, K]
    w_scales_ptr,  # [ceil(N/32), scale_stride] uint8 of "blocks", [N] f32 of "rows"
    ahead_ptr,  # w, as a pointer
    y_ptr,  # [parts, M, N]
    positions_ptr,  # [M] int64
    freqs_ptr,  # [PAIRS] f32
    M,
    N,
    K,
    x_stride,
    x_group_stride,
    group_width,  # rows of the weight a group has
    scale_stride,
    slices,
    steps,  # of BLOCK_K columns, in all
    head_width,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,  # K is a whole number of BLOCK_K
    BULK: tl.constexpr,  # x and w are descriptors, for the bulk copy engine
    WHOLE: tl.constexpr,  # a program goes through all slices, not through one
    PAIRS: tl.constexpr,  # channel pairs to turn in each head; 0: none
    PDL: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # programs that run together share a few tiles of the weight and at most SPAN tiles of x
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first_m = tile // (SPAN * n_tiles) * SPAN
    height = tl.minimum(m_tiles - first_m, SPAN)
    tile = tile % (SPAN * n_tiles)
    row = (first_m + tile % height) * BLOCK_M
    column = tile // height * BLOCK_N
    part = tl.program_id(1)
    group = column // group_width

    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    source, target = tl.minimum(rows, M - 1).to(tl.int64), tl.minimum(columns, N - 1).to(tl.int64)
    if PDL:  # the weight does not come from the kernel before: fetch it while that one ends
        LINE: tl.constexpr = 1024 // ahead_ptr.dtype.element_ty.primitive_bitwidth
        first = part * steps // slices * BLOCK_K
        at = (target * K)[:, None] + first + (tl.arange(0, 8) * LINE)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ahead_ptr + at], tl.int32, is_pure=False, pack=1
        )
        tl.extra.cuda.gdc_wait()
    across = tl.arange(0, BLOCK_K)[None, :]
    if not BULK:
        x += source[:, None] * x_stride + group * x_group_stride + across
        w += target[:, None] * K + across
    s_at = w_scales_ptr
    if KIND == "blocks":
        line = (target // 32) * scale_stride
        if EVEN:  # scale_stride is then a multiple of BLOCK_K / 32
            line = tl.multiple_of(line, BLOCK_K // 32)
        s_at = w_scales_ptr + line[:, None] + tl.arange(0, BLOCK_K // 32)[None, :]

    x_first = group * x_group_stride
    if WHOLE:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for index in range(bound(slices)):
            acc += _slice(
                x,
                w,
                s_at,
                row,
                column,
                x_first,
                index,
                slices,
                steps,
                K,
                KIND,
                EVEN,
                BULK,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
    else:
        acc = _slice(
            x, w, s_at, row, column, x_first, part, slices, steps, K, KIND, EVEN, BULK, BLOCK_M, BLOCK_N, BLOCK_K
        )
    if KIND == "rows":
        acc *= tl.load(w_scales_ptr + target)[:, None]
        acc *= tl.load(x_scales_ptr + source * (N // group_width) + group)[None, :]

    live = (rows < M)[:, None] & (columns < N)[None, :]
    to = y_ptr + part.to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    dtype = y_ptr.dtype.element_ty
    if PAIRS > 0 and column % head_width + BLOCK_N > head_width - 2 * PAIRS:
        positions = tl.load(positions_ptr + source).to(tl.float32)
        turned = turn_rows(widen(narrow(acc, dtype)), column, positions, freqs_ptr, head_width, PAIRS)
        tl.store(to, tl.trans(narrow(turned, dtype)), mask=live)
    else:
        tl.store(to, tl.trans(narrow(acc, dtype)), mask=live)


@triton.jit
def start(PDL: tl.constexpr):
    """First in a kernel that was launched with `launch()`: let the next one start, wait for the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _sum_parts(parts_ptr, y_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y [size] = parts [PARTS, size] f32, added in order."""
    start(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = tl.load(parts_ptr + at, mask=live, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * tl.cast(size, tl.int64) + at, mask=live, other=0.0)
    tl.store(y_ptr + at, narrow(total, y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _weight_values(codes_ptr, scales_ptr, y_ptr, N, K, scale_stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """An `Fp8Matrix` [N, K] written out as bf16."""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    first = tl.program_id(1) * BLOCK_K
    across, blocks = first + tl.arange(0, BLOCK_K)[None, :], first // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
    live = (rows < N) & (across < K)
    codes = tl.load(codes_ptr + rows * K + across, mask=live, other=0.0)
    scales = tl.load(scales_ptr + rows // 32 * scale_stride + blocks, mask=(rows < N) & (blocks * 32 < K), other=0)
    tl.store(y_ptr + rows * K + across, dequantise(codes, scales), mask=live)


@triton.jit
def _turn_heads(
    y_ptr,
    positions_ptr,
    freqs_ptr,
    lines,
    heads,
    head_width,
    PAIRS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Turns, in place, the last PAIRS channel pairs of each head of y [T, heads * head_width]."""
    start(PDL)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    pair, col = tl.arange(0, PAIR_BLOCK), tl.arange(0, 2 * PAIR_BLOCK)
    live = (line < lines)[:, None] & (col < 2 * PAIRS)[None, :]
    position = tl.load(positions_ptr + line // heads, mask=line < lines, other=0).to(tl.float32)
    cos, sin = turn(position[:, None] * tl.load(freqs_ptr + pair, mask=pair < PAIRS, other=0.0)[None, :])
    at = y_ptr + ((line + 1) * head_width - 2 * PAIRS)[:, None] + col[None, :]
    y = rotate_pairs(widen(tl.load(at, mask=live, other=0.0)), cos, sin)
    tl.store(at, narrow(y, y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _carry_rows(
    x_ptr,
    codes_ptr,
    scales_ptr,
    lines,
    width,
    groups,
    row_stride,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`quant.carry` of x [T, groups, width]; a program takes ROWS times [width]."""
    start(PDL)
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = line // groups
    source = (row * row_stride + (line - row * groups) * width)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    pieces = ()
    top = tl.full((ROWS,), 0, tl.int32)
    for chunk in tl.static_range(CHUNKS):
        live = (line < lines)[:, None] & (col + chunk * BLOCK < width)
        piece = widen(tl.load(x_ptr + source + chunk * BLOCK + col, mask=live, other=0.0))
        pieces = pieces + (piece,)  # noqa: RUF005, the compiler knows no starred tuples
        top = tl.maximum(top, magnitude_bits(piece))
    byte = carry_byte(top)
    for chunk in tl.static_range(CHUNKS):
        live = (line < lines)[:, None] & (col + chunk * BLOCK < width)
        codes = carried(pieces[chunk], byte)
        tl.store(codes_ptr + (line * width)[:, None] + chunk * BLOCK + col, codes, mask=live)
    tl.store(scales_ptr + line, e8m0_value(byte), mask=line < lines)


@triton.jit
def carried(x, byte):
    """x f32 [R, K] against the scales of `carry_byte` [R] -> float8e4nv."""
    inverse = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    return e4m3(tl.clamp(x * inverse[:, None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL))


# ---- configurations --------------------------------------------------------------------------------------------------

SPAN = 16  # tiles of x that programs which run together share
MULTIPROCESSORS = 132
BYTE_US, OPERATION_US = 1 / 45e3, 1 / 4.5e6  # of one multiprocessor
ADDING_US = 1 / 5e6  # a byte of slices written or read
LIBRARY_ROWS = {"blocks": 2048, "values": 256, "rows": 192, "wide": 1 << 62}  # from here on the vendor's library
STAGES_BYTES = 192 << 10  # of shared memory; the rest is for results on their way out
SCRATCH = 1 << 26  # weights written out at a time, at most

torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # the library, too, adds up in f32


def _tile(
    rows: int,
    columns: int,
    depth: int,
    num_warps: int,
    num_stages: int,
    programs: int,
    *,
    bulk: bool = True,
    ring: bool = False,
) -> tuning.Config:
    """rows, columns, depth  of a tile: rows of x, rows of the weight, columns of both
    programs              that a multiprocessor should get; K is cut into slices until there are as many
    bulk                  tiles come by the bulk copy engine, where alignment allows
    ring                  by the kernel of gemm_hopper.py, where the operands allow
    """
    return {
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "BLOCK_K": depth,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "programs": programs,
        "bulk": bulk,
        "ring": ring,
        "library": False,  # let the vendor's library do it; not where bits must not depend on the rows
    }


# the last part of the op that `tuning.config` is asked about -> name -> what tuning tries
CANDIDATES: dict[str, dict[str, tuning.Config]] = {
    "blocks": {
        "128x128": _tile(128, 128, 128, 8, 3, 1),
        "128x128_two": _tile(128, 128, 128, 8, 2, 2),
        "128x256": _tile(128, 256, 128, 8, 3, 1),
        "32x128_ring": _tile(32, 128, 128, 8, 8, 1, ring=True),
        "64x128_ring": _tile(64, 128, 128, 8, 6, 1, ring=True),
        "64x256_ring": _tile(64, 256, 128, 8, 4, 1, ring=True),
        "128x128_ring": _tile(128, 128, 128, 8, 4, 1, ring=True),
    },
    "values": {"128x128": _tile(128, 128, 64, 8, 4, 1), "128x256": _tile(128, 256, 64, 8, 4, 1)},
    "rows": {
        "128x128": _tile(128, 128, 128, 8, 4, 1),
        "128x256": _tile(128, 256, 128, 8, 3, 1),
        "64x128_ring": _tile(64, 128, 128, 8, 8, 1, ring=True),
        "64x256_ring": _tile(64, 256, 128, 8, 4, 1, ring=True),
        "128x128_ring": _tile(128, 128, 128, 8, 6, 1, ring=True),
    },
    "wide": {"32x64": _tile(32, 64, 64, 4, 2, 1, bulk=False)},
}
for _kind in ("blocks", "values", "rows"):
    CANDIDATES[_kind]["library"] = CANDIDATES[_kind]["128x128"] | {"library": True}
for _m in (16, 32, 64):
    CANDIDATES["blocks"] |= {
        f"{_m}x64": _tile(_m, 64, 256, 4, 4, 3),
        f"{_m}x128": _tile(_m, 128, 128, 4, 4 if _m < 64 else 3, 2),
        f"{_m}x128_three": _tile(_m, 128, 128, 4, 4 if _m < 32 else 3, 3),
        f"{_m}x256": _tile(_m, 256, 128, 8, 4, 1),
    }
    CANDIDATES["values"] |= {
        f"{_m}x64": _tile(_m, 64, 128, 4, 4, 2),
        f"{_m}x128": _tile(_m, 128, 64, 4, 4, 2),
        f"{_m}x256": _tile(_m, 256, 64, 8, 4, 1),
    }
    CANDIDATES["rows"] |= {
        f"{_m}x64": _tile(_m, 64, 256, 4, 4, 3),
        f"{_m}x128": _tile(_m, 128, 128, 4, 4, 2),
        f"{_m}x256": _tile(_m, 256, 128, 8, 4, 1),
    }


def default(kind: str, rows: int, n: int, k: int) -> tuning.Config:
    """What a product of `rows` rows and a weight [n, k] runs with where no table says otherwise."""
    del k
    if kind == "wide":
        return CANDIDATES[kind]["32x64"]
    tile = next((m for m in (16, 32, 64) if rows <= m), 128)
    columns = 64 if n <= 512 and tile < 128 else 128
    if kind == "blocks" and tile == 64 and n >= 1024:
        columns = 256
    return CANDIDATES[kind][f"{tile}x{columns}"] | {"library": rows >= LIBRARY_ROWS[kind]}


def launch() -> dict[str, bool]:
    """Options of a kernel that begins with `start`: whether it may start while the kernel before it still runs."""
    return {"PDL": True, "launch_pdl": True} if _early() else {"PDL": False}


@tuning.remembered
def _early() -> bool:
    return tuning.config("launch", "early", 0, {"early": False})["early"]


class _Plan(NamedTuple):
    config: tuning.Config
    slices: int
    steps: int  # of BLOCK_K columns, in all
    whole: bool  # one program goes through all slices


@tuning.remembered
def _plan(kind: str, rows: int, n: int, k: int) -> _Plan:
    """A fixed function of the arguments and the device; under `backends.invariant()`, slices do not depend on rows."""
    key = f"{n}x{k}"
    few = 16 if backends.is_invariant() else tuning.bucket(rows)
    config = tuning.config(f"linear_{kind}", key, few, default(kind, few, n, k))
    slices, steps = _slices(config, few, n, k)
    if not backends.is_invariant() or kind == "wide":
        return _Plan(config, slices, steps, False)
    if rows <= 64:
        tile = next(m for m in (16, 32, 64) if rows <= m)
        stage = tile * (1 if kind == "rows" else 2) + config["BLOCK_N"] * (2 if kind == "values" else 1)
        fitting = max(STAGES_BYTES // (stage * config["BLOCK_K"]), 2)  # the stages were chosen for another tile
        few_stages = {"num_stages": min(config["num_stages"], fitting)}
        return _Plan(config | {"BLOCK_M": tile} | few_stages, slices, steps, False)
    square = CANDIDATES[kind]["128x128"] | {"BLOCK_K": config["BLOCK_K"], "num_stages": 2}
    return _Plan(square, slices, steps, True)


def _slices(config: tuning.Config, rows: int, n: int, k: int) -> tuple[int, int]:
    """How many slices K is cut into, and how many steps of BLOCK_K columns there are.

    The slices are what a simple model finds fastest. A step takes its bytes or its operations, on a
    multiprocessor; a program begins with two steps' latency; several slices are written, read and added up by
    a kernel of its own.
    """
    tile_m, tile_n, tile_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    steps = cdiv(k, tile_k)
    tiles = cdiv(n, tile_n) * cdiv(rows, tile_m)
    at_once = MULTIPROCESSORS * config["programs"]
    step = max((tile_n + 2 * tile_m) * tile_k * BYTE_US, 2 * tile_m * tile_n * tile_k * OPERATION_US)

    def microseconds(slices: int) -> float:
        waves = cdiv(tiles * slices, at_once)
        adding = 2.0 + 8 * slices * rows * n * ADDING_US if slices > 1 else 0.0
        return waves * (cdiv(steps, slices) + 2) * step * config["programs"] + adding

    return min(range(1, min(max(steps // 2, 1), 16) + 1), key=microseconds), steps


# ---- products --------------------------------------------------------------------------------------------------------


class Carried(NamedTuple):
    """Rows against one power-of-two scale for each group of their columns, as `quant.carry` gives them."""

    codes: Tensor  # [T, groups * K] float8_e4m3fn
    scales: Tensor  # [T, groups] f32


class Turn(NamedTuple):
    """Rotation of the last channels of each head of a result."""

    positions: Tensor  # [T] int64
    freqs: Tensor  # [dr/2] f32
    head_width: int


def carry(x: Tensor, groups: int = 1) -> Carried:
    """x [T, groups * K] bf16 or f32, adjacent channels."""
    rows, width = x.shape[0], x.shape[1] // groups
    codes = torch.empty((rows, groups * width), dtype=quant.E4M3, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        chunks, block = chunked(width)
        each = max(1, min(64, 2048 // block))
        _carry_rows[(cdiv(rows * groups, each),)](
            x,
            codes,
            scales,
            rows * groups,
            width,
            groups,
            x.stride(0),
            ROWS=each,
            CHUNKS=chunks,
            BLOCK=block,
            num_warps=4,
            **launch(),
        )
    return Carried(codes, scales)


def products(
    x: Tensor | Carried,
    weight: quant.Matrix,
    out_dtype: torch.dtype,
    groups: int = 1,
    turn: Turn | None = None,
) -> Tensor:
    """x [T, groups * K] times weight [groups * N, K], group by group, not yet added up.

    x        bf16 or f32, adjacent channels; carried where the weight is a `RowMatrix`. T is at least 1.
    turn     what to rotate in a result of one group; it is then in one part.
    returns  [parts, groups, T, N], any strides: one part in out_dtype, or several in f32 whose sum in order it is.
    """
    values = x.codes if isinstance(x, Carried) else x
    rows, (n, k) = values.shape[0], weight.shape
    kind = _kind(x, weight)
    if kind in ("values", "wide") and not isinstance(weight, Tensor):
        weight = quant.values(weight, values.dtype)
    plan = _plan(kind, rows, n, k)
    if plan.config["library"] and _library_does(kind, values, n // groups, k, out_dtype):
        y = _library(x, weight, out_dtype, groups)
        return (y if turn is None else _turned(y, turn))[None]
    if turn is not None and (plan.slices > 1 or rows > 64 or plan.config["ring"]):  # there are no registers for angles
        y = add_up(_launch(x, weight, out_dtype, groups, None, kind, plan), out_dtype)
        return _turned(y, turn)[None, None]
    return _launch(x, weight, out_dtype, groups, turn, kind, plan)


def _launch(
    x: Tensor | Carried,
    weight: quant.Matrix,
    out_dtype: torch.dtype,
    groups: int,
    turn: Turn | None,
    kind: str,
    plan: _Plan,
) -> Tensor:
    """`products` by this file's kernel."""
    values, config = x.codes if isinstance(x, Carried) else x, plan.config
    rows, (n, k) = values.shape[0], weight.shape
    tile_m, tile_n, tile_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    if groups > 1:  # a tile stays inside one group
        tile_n = min(tile_n, n // groups & -(n // groups))
    codes, scales = (weight, weight) if isinstance(weight, Tensor) else (weight[0], weight[1])
    codes, scales = codes.contiguous(), scales.contiguous()
    parts = 1 if plan.whole else plan.slices
    y = torch.empty((parts, rows, n), dtype=out_dtype if parts == 1 else torch.float32, device=values.device)
    even = k % tile_k == 0
    bulk = config["bulk"] and even and _aligned(values) and _aligned(codes)
    ring = config["ring"] and bulk and turn is None and not plan.whole
    if ring and gemm_hopper.serves(codes, scales, groups, tile_n):
        x_scales = x.scales if isinstance(x, Carried) else None
        programs = min(MULTIPROCESSORS, cdiv(rows, tile_m) * cdiv(n, tile_n) * parts)
        gemm_hopper.product(
            values, x_scales, codes, scales, y, groups, tile_n, tile_m, config["num_stages"], programs, launch()
        )
        return y.unflatten(-1, (groups, -1)).transpose(1, 2)
    _product[(cdiv(rows, tile_m) * cdiv(n, tile_n), parts)](
        TensorDescriptor.from_tensor(values, [tile_m, tile_k]) if bulk else values,
        x.scales if isinstance(x, Carried) else y,
        TensorDescriptor.from_tensor(codes, [tile_n, tile_k]) if bulk else codes,
        scales,
        codes,
        y,
        y if turn is None else turn.positions,
        y if turn is None else turn.freqs,
        rows,
        n,
        k,
        values.stride(0),
        k,
        n // groups,
        scales.stride(0) if kind == "blocks" else 0,
        plan.slices,
        plan.steps,
        2 if turn is None else turn.head_width,
        KIND=kind,
        EVEN=even,
        BULK=bulk,
        WHOLE=plan.whole,
        PAIRS=0 if turn is None else turn.freqs.shape[0],
        SPAN=SPAN,
        BLOCK_M=tile_m,
        BLOCK_N=tile_n,
        BLOCK_K=tile_k,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **launch(),
    )
    return y.unflatten(-1, (groups, -1)).transpose(1, 2)


def _kind(x: Tensor | Carried, weight: quant.Matrix) -> str:
    if isinstance(x, Carried):
        return "rows"
    if x.dtype != torch.bfloat16 or (isinstance(weight, Tensor) and weight.dtype != torch.bfloat16):
        return "wide"
    return "blocks" if isinstance(weight, quant.Fp8Matrix) else "values"


def _aligned(x: Tensor) -> bool:
    """What the bulk copy engine asks of a matrix [R, K] with adjacent columns."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(1) == 1


def add_up(parts: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[parts, 1, T, N] of `products` -> [T, N]."""
    if parts.shape[0] == 1:
        return parts[0, 0]
    y = torch.empty(parts.shape[2:], dtype=out_dtype, device=parts.device)
    _sum_parts[(cdiv(y.numel(), 1024),)](parts, y, y.numel(), PARTS=parts.shape[0], BLOCK=1024, num_warps=4, **launch())
    return y


def _library_does(kind: str, x: Tensor, n: int, k: int, out_dtype: torch.dtype) -> bool:
    if backends.is_invariant() or not x.is_cuda:
        return False
    return kind != "rows" or (n % 16 == k % 16 == 0 and out_dtype == torch.bfloat16)


def _library(x: Tensor | Carried, weight: quant.Matrix, out_dtype: torch.dtype, groups: int) -> Tensor:
    """The vendor's products: [groups, T, N]."""
    values = x.codes if isinstance(x, Carried) else x
    rows, n, k = values.shape[0], weight.shape[0] // groups, weight.shape[1]
    y = torch.empty((groups, rows, n), dtype=out_dtype, device=values.device)
    for group in range(groups):
        here = values[:, group * k : (group + 1) * k]
        part = quant.rows_of(weight, group * n, (group + 1) * n)
        if isinstance(x, Carried):
            assert isinstance(part, quant.RowMatrix)
            scales = x.scales[:, group : group + 1].contiguous(), part.scales[None, :]
            torch._scaled_mm(here, part.codes.t(), *scales, out_dtype=out_dtype, use_fast_accum=False, out=y[group])
        elif isinstance(part, Tensor):
            _multiply_into(here, part, y[group])
        else:
            step = max(SCRATCH // k // 32 * 32, 32)
            for first in range(0, n, step):
                last = min(first + step, n)
                _multiply_into(here, _written_out(quant.rows_of(part, first, last)), y[group, :, first:last])
    return y


def _turned(y: Tensor, turn: Turn) -> Tensor:
    """y [.., T, heads * head_width] of one group, turned in place."""
    pairs = turn.freqs.shape[0]
    lines = y.numel() // turn.head_width
    heads = y.shape[-1] // turn.head_width
    _turn_heads[(cdiv(lines, 32),)](
        y,
        turn.positions,
        turn.freqs,
        lines,
        heads,
        turn.head_width,
        PAIRS=pairs,
        PAIR_BLOCK=power_of_two(pairs),
        LINES=32,
        num_warps=4,
        **launch(),
    )
    return y


def _multiply_into(x: Tensor, weight: Tensor, y: Tensor) -> None:
    if y.dtype == x.dtype:
        torch.mm(x, weight.t(), out=y)
    else:
        y.copy_(torch.mm(x, weight.t(), out_dtype=y.dtype))


def _written_out(weight: quant.Fp8Matrix) -> Tensor:
    """The values of a weight [N, K] in bf16."""
    (n, k), scales = weight.shape, weight.scales
    y = torch.empty((n, k), dtype=torch.bfloat16, device=scales.device)
    _weight_values[(cdiv(n, 32), cdiv(k, 512))](
        weight.codes, scales, y, n, k, scales.stride(0), BLOCK_N=32, BLOCK_K=512, num_warps=8
    )
    return y


# ---- the ops ---------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: quant.Matrix, out_dtype: torch.dtype | None = None) -> Tensor:
    out_dtype = out_dtype or x.dtype
    n, k = weight.shape
    if not (_serves(x, weight) and out_dtype in FLOATS and k):
        return plain.linear_reference(x, weight, out_dtype)
    if x.numel() == 0 or n == 0:
        return torch.empty((*x.shape[:-1], n), dtype=out_dtype, device=x.device)
    rows = even_rows(x)
    operand = carry(rows) if isinstance(weight, quant.RowMatrix) else rows
    return add_up(products(operand, weight, out_dtype), out_dtype).view(*x.shape[:-1], n)


def grouped_linear(x: Tensor, weight: quant.Matrix) -> Tensor:
    rows, groups, k = x.shape
    n = weight.shape[1]
    if not (_serves(x, weight) and k):
        return plain.grouped_linear_reference(x, weight)
    if x.numel() == 0 or n == 0:
        return torch.empty((rows, groups, n), dtype=x.dtype, device=x.device)
    if n % 64:  # tiles would hold rows of two groups
        each = [linear(x[:, g], _group(weight, g)) for g in range(groups)]
        return torch.stack(each, dim=1)
    x = x.reshape(rows, groups * k)
    operand = carry(even_rows(x), groups) if isinstance(weight, quant.RowMatrix) else even_rows(x)
    parts = products(operand, flat_groups(weight), x.dtype, groups)
    if parts.shape[0] == 1:
        return parts[0].transpose(0, 1)
    together = parts.transpose(1, 2).flatten(2)  # [parts, T, groups * N], without a copy
    return add_up(together[:, None], x.dtype).unflatten(-1, (groups, n))


def flat_groups(weight: quant.Matrix) -> quant.Matrix:
    """[G, N, K] as [G*N, K]; N is a multiple of 32 where scales are in blocks."""
    if isinstance(weight, Tensor):
        return weight.flatten(0, 1)
    return type(weight)(*(part.flatten(0, 1) for part in weight))


def _group(weight: quant.Matrix, group: int) -> quant.Matrix:
    return weight[group] if isinstance(weight, Tensor) else type(weight)(*(part[group] for part in weight))


def _serves(x: Tensor, weight: quant.Matrix) -> bool:
    dtypes = (torch.float32, torch.bfloat16)
    return x.dtype in dtypes and (not isinstance(weight, Tensor) or weight.dtype in dtypes)
