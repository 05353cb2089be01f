"""The packed experts of a layer in two launches: places and tokens (`rows.cu`), then both products (`experts.cu`).

How the products go is told there. Weights are those of `triton/moe_experts_pack.py`. A row's bits depend on nothing but
the row and its experts' weights, and are those of the products in `triton/moe_experts_hopper.py`.

T tokens, k slots, R = T*k rows, E experts, D hidden width, I expert width.
"""

import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from benthic.kernels import quant
from benthic.kernels.cuda import build
from benthic.kernels.triton.moe_experts_pack import BLOCK, KEPT, REST, REST_TURNS, TURNS, Packed, tables

COPIERS = 128  # threads that copy


class Shape(NamedTuple):
    """How the products are cut. Bits do not depend on it."""

    warpgroups: int  # that multiply
    parts: int  # 64 weight rows each, of a warpgroup
    team: int  # programs that share a tile's rows: 1 or 2
    widths: tuple[int, ...]  # rows that an instruction takes, widest first: multiples of 8; no tile has more
    floor: int  # rows of a tile below which it takes no less time
    registers: tuple[int, int]  # of a thread that multiplies, and of one that copies

    @property
    def height(self) -> int:
        """Weight rows of a program."""
        return 64 * self.warpgroups * self.parts

    @property
    def wide(self) -> int:
        """Weight rows of a piece."""
        return self.height * self.team

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + COPIERS


# Few rows an expert: four warpgroups, so that nobody waits for unpacking, and the time is that of the weights' bytes.
# More: wide tiles, so that the time is that of the products, and many widths, so that little of a tile is empty.
# With FP8 a thread has room for half as many sums, so a program has half as many weight rows and reads rows twice as
# often; teams read them as often as before.
_SOME, _MANY = (96, 88, 80, 72, 64, 48), (144, 136, 128, 112)
SHAPES: dict[str, dict[str, Shape]] = {
    "exact": {
        "few": Shape(4, 1, 1, (32, 16), 32, (112, 32)),
        "some": Shape(2, 2, 1, (*_SOME, 32), 48, (232, 40)),
        "many": Shape(2, 2, 1, (*_MANY, 96, 64), 48, (232, 40)),
        "many2": Shape(2, 2, 2, (*_MANY, 96, 64), 48, (232, 40)),
    },
    "carried": {
        "few": Shape(4, 1, 1, (32, 16), 32, (112, 32)),
        "some": Shape(2, 1, 1, _SOME, 80, (232, 40)),
        "some2": Shape(2, 1, 2, _SOME, 80, (232, 40)),
        "many": Shape(2, 1, 1, _MANY, 112, (232, 40)),
        "many2": Shape(2, 1, 2, _MANY, 112, (232, 40)),
    },
}


def shape_for(rows: int, experts: int) -> str:
    """The one that is taken where nobody has measured."""
    each = rows / experts
    return "few" if each <= 32 else "some" if each <= 96 else "many"


def fits(name: str, carried: bool, n: tuple[int, int]) -> bool:
    """Is there a shape of this name, whose pieces so many weight rows of both matrices divide into?"""
    shape = SHAPES["carried" if carried else "exact"].get(name)
    return shape is not None and not any(rows % shape.wide for rows in n)


# ---- the kernels -----------------------------------------------------------------------------------------------------


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("words", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("blocks", ctypes.c_int),
    )


class _Products(ctypes.Structure):
    _fields_ = (
        ("first", _Matrix),
        ("second", _Matrix),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in ("x_scales", "starts", "pairs", "weights", "tables")),
        *((name, ctypes.c_void_p) for name in ("hidden", "hidden_scales", "carried", "carried_scales", "y")),
        *((name, ctypes.c_void_p) for name in ("sums", "left", "complete")),
        ("limit", ctypes.c_float),
        ("round", ctypes.c_int),
        ("slots", ctypes.c_int),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("pairs", ctypes.c_int),
        ("placing", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("places", "sources", "starts", "zeros")),
        ("many", ctypes.c_int),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in ("grid", "codes", "scales")),
        ("width", ctypes.c_int),
    )


PLACING, PREPARING = 1024, 256  # pairs that a program of `rows.cu` places; its threads


def _instruction(width: int, carried: bool) -> str:
    """`mma<width>`: 64 weight rows in registers times rows in shared memory, a step of K."""
    sums, step, kind = width // 2, 32 if carried else 16, "e4m3.e4m3" if carried else "bf16.bf16"
    to = ", ".join(f"%{i}" for i in range(sums))
    of = ", ".join(f"%{sums + i}" for i in range(4))
    registers = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    return (
        f"template <> __device__ __forceinline__ void mma<{width}>(float* sums, const u32* a, u64 b, int add) {{\n"
        f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{sums + 5}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{width}k{step}.f32.{kind} "
        f'{{{to}}}, {{{of}}}, %{sums + 4}, p, 1, 1{"" if carried else ", 0"};\\n}}" : {registers}'
        ' : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));\n}\n'
    )


def _stages(shape: Shape, carried: bool, experts: int) -> int:
    """Blocks that a program has room for."""
    most, warps = shape.widths[0], 4 * shape.warpgroups
    chunk = 16 if most <= 32 else 32
    apart = 512 * warps + shape.warpgroups * (32 * chunk + 8 * most + 4) + 4 * most + 12 * (experts + 1) + 512
    stage = most * (128 if carried else 256) + shape.height * 68
    return min((build.LARGEST_SHARED - apart) // stage, 16)


def products_source(shape: Shape, carried: bool, experts: int) -> tuple[str, tuple[tuple[str, int | str], ...]]:
    """What stands before `experts.cu`, and its macros."""
    before = (
        '#include "common.cuh"\ntemplate <int N> __device__ __forceinline__ void mma(float*, const u32*, u64, int);\n'
    )
    defines = {
        "CARRIED": int(carried),
        "TEAM": shape.team,
        "WARPGROUPS": shape.warpgroups,
        "PARTS": shape.parts,
        "STAGES": _stages(shape, carried, experts),
        "WIDTHS": ",".join(map(str, shape.widths)),
        "MOST": shape.widths[0],
        "FLOOR": shape.floor,
        "EXPERTS": experts,
        "SHARED_BYTES": build.LARGEST_SHARED,
        "MULTIPLYING_REGISTERS": shape.registers[0],
        "COPYING_REGISTERS": shape.registers[1],
        "KEPT": f"{KEPT:#x}",
        "REST": f"{REST:#x}",
        "TURN_1": TURNS[1],
        "TURN_2": TURNS[2],
        "REST_TURN_0": REST_TURNS[0],
        "REST_TURN_1": REST_TURNS[1],
    }
    return before + "".join(_instruction(width, carried) for width in shape.widths), tuple(defines.items())


def rows_defines(carried: bool, raw: bool, experts: int) -> tuple[tuple[str, int | str], ...]:
    return (("CARRIED", int(carried)), ("RAW", int(raw)), ("EXPERTS", experts))


@cache
def _products(name: str, carried: bool, experts: int) -> tuple[Shape, build.Kernel]:
    shape = SHAPES["carried" if carried else "exact"][name]
    before, defines = products_source(shape, carried, experts)
    threads, shared = shape.threads, build.LARGEST_SHARED
    return shape, build.kernel("experts.cu", "stream_experts", threads, shared, defines, before)


@cache
def _placing(carried: bool, raw: bool, experts: int, width: int) -> build.Kernel:
    shared = 2 * width if carried else 0
    return build.kernel("rows.cu", "place_rows", PREPARING, shared, rows_defines(carried, raw, experts))


# ---- the two launches ------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What the products are of."""

    places: Tensor  # [T, k] int32 row of each pair, -1 for one whose expert is not here
    pairs: Tensor  # [R] int32 pair of each row; rows are sorted by expert
    starts: Tensor  # [E + 1] int32 first row of each expert
    zeros: Tensor  # int32, that programs leave marks in: good for one use
    grid: Tensor  # [T, D] bf16: x on the FP8 grid
    codes: Tensor  # [T, D] E4M3 against one scale a token, in the order of `columns`; with exact weights, `grid`
    scales: Tensor  # [T] f32; empty with exact weights


def _teams(device: torch.device, shape: Shape, w13: Packed, w2: Packed) -> int:
    """One for so many multiprocessors as it has programs, and none without a block of its own."""
    blocks = min(matrix.shape[1] // shape.wide * (matrix.shape[2] // BLOCK) for matrix in (w13, w2))
    return min(torch.cuda.get_device_properties(device).multi_processor_count // shape.team, blocks)


def place_rows(x: Tensor, ids: Tensor, w13: Packed, w2: Packed, raw: bool, name: str, early: bool = False) -> Rows:
    """Sort pairs by expert, and bring tokens in the form that the first product reads.

    x     [T, D] bf16, on the FP8 grid unless `raw`; T > 0.
    ids   [T, k] int64, adjacent: expert of each pair, negative where it is not here.
    name  of the shape that the products will have, one that `fits`.
    """
    carried, experts, device = w13.carried, w13.shape[0], x.device
    shape = SHAPES["carried" if carried else "exact"][name]
    (tokens, slots), width = ids.shape, w2.shape[1]
    pairs = tokens * slots
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    marks = 2 * shape.team * _teams(device, shape, w13, w2) * shape.warpgroups
    marks += pairs // shape.widths[0] + min(pairs, experts)  # and the tiles
    numbers = torch.empty(2 * pairs + experts + 1 + marks, dtype=torch.int32, device=device)
    places, sources, starts, zeros = numbers.split((pairs, pairs, experts + 1, marks))
    grid = torch.empty((tokens, width), dtype=x.dtype, device=device) if raw else x
    codes = torch.empty((tokens, width), dtype=quant.E4M3, device=device) if carried else grid
    scales = torch.empty(tokens if carried else 0, dtype=torch.float32, device=device)
    placing = -(-pairs // PLACING)
    arguments = _Rows(
        ids=ids.data_ptr(),
        pairs=pairs,
        placing=placing,
        places=places.data_ptr(),
        sources=sources.data_ptr(),
        starts=starts.data_ptr(),
        zeros=zeros.data_ptr(),
        many=marks,
        x=x.data_ptr(),
        x_stride=x.stride(0),
        grid=grid.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        width=width,
    )
    kernel = _placing(carried, raw, experts, width)
    kernel.launch(placing + tokens * (raw or carried), arguments, early)
    return Rows(places.view(tokens, slots), sources, starts, zeros, grid, codes, scales)


def products(
    rows: Rows,
    weights: Tensor,
    w13: Packed,
    w2: Packed,
    limit: float,
    round_hidden: bool,
    name: str,
    early: bool = False,
) -> Tensor:
    """Each pair's output by place -> [R, D] bf16.

    weights  [T, k] f32, adjacent.
    """
    carried, device = w13.carried, weights.device
    (pairs,), width, inner = rows.pairs.shape, w2.shape[1], w2.shape[2]
    shape, kernel = _products(name, carried, w13.shape[0])
    programs = shape.team * _teams(device, shape, w13, w2)
    y = torch.empty((pairs, width), dtype=torch.bfloat16, device=device)
    hidden = torch.empty((pairs, inner), dtype=quant.E4M3 if carried else torch.bfloat16, device=device)
    again = torch.empty_like(hidden) if carried else hidden
    groups = torch.empty((pairs, inner // quant.MX_GROUP) if carried else (0,), dtype=torch.uint8, device=device)
    scales = torch.empty(pairs if carried else 0, dtype=torch.float32, device=device)
    sums = torch.empty(2 * programs * shape.height * shape.widths[0], dtype=torch.float32, device=device)
    arguments = _Products(
        first=_matrix(w13),
        second=_matrix(w2),
        x=rows.codes.data_ptr(),
        x_stride=rows.codes.stride(0) * rows.codes.element_size(),
        x_scales=rows.scales.data_ptr(),
        starts=rows.starts.data_ptr(),
        pairs=rows.pairs.data_ptr(),
        weights=weights.data_ptr(),
        tables=tables(device).data_ptr(),
        hidden=hidden.data_ptr(),
        hidden_scales=groups.data_ptr(),
        carried=again.data_ptr(),
        carried_scales=scales.data_ptr(),
        y=y.data_ptr(),
        sums=sums.data_ptr(),
        left=rows.zeros.data_ptr(),
        complete=rows.zeros[2 * programs * shape.warpgroups :].data_ptr(),
        limit=limit,
        round=round_hidden,
        slots=rows.places.shape[1],
    )
    kernel.launch(programs, arguments, early, together=shape.team == 1 and not early)
    return y


def ready(name: str, carried: bool, experts: int, width: int) -> None:
    """Compile and load what is launched. Raises KernelBuildError."""
    _products(name, carried, experts)
    for raw in (False, True):
        _placing(carried, raw, experts, width)


def compile_together(names: Iterable[str], carried: bool, experts: int) -> None:
    """Bring the products of several shapes into the cache folder, side by side. Raises KernelBuildError."""
    sources = [products_source(SHAPES["carried" if carried else "exact"][name], carried, experts) for name in names]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: build.binary("experts.cu", source[1], source[0]), sources))


def _matrix(matrix: Packed) -> _Matrix:
    pointers = (matrix.words.data_ptr(), matrix.scales.data_ptr(), matrix.base.data_ptr())
    return _Matrix(*pointers, matrix.shape[1], matrix.shape[2] // BLOCK)
