"""The experts' products in CUDA C++: on a CPU how they are shared out, which is compiled for it and run, and that they
compile for SM90 as they should; on a GPU see `test_moe_experts_hopper.py`."""

import ctypes
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benthic.kernels.cuda import build
from benthic.kernels.cuda import experts as stream
from benthic.testing import sass

needs_nvrtc = pytest.mark.skipif(build.nvrtc() is None, reason="NVRTC is not installed")
SHAPES = [(form, name) for form, shapes in stream.SHAPES.items() for name in shapes]

# ---- how the work is shared out --------------------------------------------------------------------------------------

MOST, FLOOR, EXPERTS = 48, 24, 7
HARNESS = """
#include <cstdio>
#include <cstdlib>
#include <algorithm>
#define __device__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes)
#define CARRIED 0
#define WARPGROUPS 1
#define PARTS 1
#define TEAM 1
#define STAGES 2
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
struct float2 {{ float x, y; }};
using std::min; using std::max;
struct Numbers {{ u32 x; }} blockIdx, gridDim;
constexpr int MOST = {most}, FLOOR = {floor}, EXPERTS = {experts}, SHARED_BYTES = 1 << 20;
{constants}
{plan}
alignas(64) u8 room[sizeof(Shared)];
int main(int count, char** words) {{
    Shared& s = shared();
    Matrix matrix = {{nullptr, nullptr, nullptr, atoi(words[1]) * WIDE, atoi(words[2])}};
    gridDim.x = atoi(words[3]);
    for (int e = 0; e < EXPERTS; e++) {{
        int rows = atoi(words[4 + e]), tiles = tiles_of(rows);
        s.starts[e + 1] = s.starts[e] + rows;
        s.tiles[e + 1] = s.tiles[e] + tiles, s.costs[e + 1] = s.costs[e] + cost_of(rows, tiles);
    }}
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {{
        Run run(matrix);
        Segment found;
        for (int i = 0; run.segment(i, found); i++) {{
            Piece p = piece_of(found.piece, matrix.rows / WIDE);
            printf("%u %d %d %d %d %d %d %d %d\\n", blockIdx.x, found.piece, found.from, found.to, p.expert, p.column,
                   p.tile, p.row, p.rows);
        }}
    }}
}}
"""
Line = tuple[int, ...]  # program, piece, first block, end; expert, column, tile, first row, rows
Share = Callable[[int, int, int, list[int]], list[Line]]


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    """The plan of `experts.cu` for (columns, blocks, programs, rows of each expert)."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = (build.HERE / "experts.cu").read_text(encoding="utf-8")
    constants = text[text.index("constexpr int HEIGHT") : text.index("// ---- what there is to do")]
    plan = text[text.index("// ---- what there is to do") : text.index("// Where a thread is in the ring")]
    folder: Path = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(
        HARNESS.format(most=MOST, floor=FLOOR, experts=EXPERTS, constants=constants, plan=plan), encoding="utf-8"
    )
    subprocess.run([compiler, "-std=c++17", "-O1", "plan.cpp", "-o", "plan"], cwd=folder, check=True)

    def run(columns: int, blocks: int, programs: int, rows: list[int]) -> list[Line]:
        words = [str(word) for word in (columns, blocks, programs, *rows)]
        out = subprocess.run([str(folder / "plan"), *words], capture_output=True, text=True, check=True).stdout
        return [tuple(map(int, line.split())) for line in out.splitlines()]

    return run


def check(lines: list[Line], columns: int, blocks: int, programs: int, rows: list[int]) -> None:
    tiles = [-(-count // MOST) for count in rows]
    pieces: dict[int, list[Line]] = {piece: [] for piece in range(sum(tiles) * columns)}
    for line in lines:
        assert line[2] < line[3], "an empty segment"
        pieces[line[1]].append(line)
    starts = [sum(rows[:expert]) for expert in range(EXPERTS)]
    seen: dict[tuple[int, int], set[int]] = {}  # expert, column -> rows
    for found in pieces.values():
        found.sort()
        assert [line[2] for line in found] == [0, *(line[3] for line in found[:-1])]
        assert found[-1][3] == blocks
        assert [after[0] - before[0] for before, after in pairwise(found)] == [1] * (len(found) - 1)
        assert len({line[4:] for line in found}) == 1
        expert, column, tile, row, count = found[0][4:]
        assert 0 < count <= MOST
        assert sum(tiles[:expert]) <= tile < sum(tiles[: expert + 1])
        here = seen.setdefault((expert, column), set())
        assert not here & set(range(row, row + count))
        here |= set(range(row, row + count))
    for expert, count in enumerate(rows):
        for column in range(columns if count else 0):
            assert seen[expert, column] == set(range(starts[expert], starts[expert] + count))
    costs: dict[int, int] = dict.fromkeys(range(programs), 0)
    for program in range(programs):
        mine = [line for line in lines if line[0] == program]
        for at, line in enumerate(mine):  # what the next one waits for comes first, what waits for others last
            assert line[3] == blocks or at == 0
            assert line[2] == 0 or at == len(mine) - 1
            count = tiles[line[4]]
            height = ((rows[line[4]] + count - 1) // count + 7) // 8 * 8
            costs[program] += (line[3] - line[2]) * max(height, FLOOR) // 8
    if sum(rows):
        assert max(costs.values()) - min(costs.values()) <= 2 * MOST // 8  # a block more or less


@pytest.mark.parametrize("seed", range(40))
def test_every_block_is_done_once_and_in_order(share: Share, seed: int) -> None:
    draw = random.Random(seed)
    columns, blocks = draw.randint(1, 6), draw.randint(1, 9)
    programs = draw.randint(1, columns * blocks)
    rows = [draw.choice((0, 0, 1, 16, 47, 48, 49, 97, draw.randint(1, 300))) for _ in range(EXPERTS)]
    check(share(columns, blocks, programs, rows), columns, blocks, programs, rows)


@pytest.mark.parametrize("rows", [[0] * EXPERTS, [1] + [0] * (EXPERTS - 1), [3000] * EXPERTS])
def test_the_release(share: Share, rows: list[int]) -> None:
    for columns, blocks in ((18, 40), (20, 18)):
        check(share(columns, blocks, 132, rows), columns, blocks, 132, rows)


def test_one_expert_has_all_rows(share: Share) -> None:
    rows = [0, 40000] + [0] * (EXPERTS - 2)
    check(share(4, 180, 132, rows), 4, 180, 132, rows)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "name"), SHAPES)
def test_shapes(form: str, name: str) -> None:
    shape = stream.SHAPES[form][name]
    assert list(shape.widths) == sorted(set(shape.widths), reverse=True)
    assert all(width % 8 == 0 for width in shape.widths)
    assert shape.widths[0] % 16 == 0
    launched = 65536 // shape.threads // 8 * 8
    multiplying, copying = shape.registers
    assert 128 * (shape.warpgroups * multiplying + copying) <= launched * shape.threads, "they would wait for ever"
    assert multiplying % 8 == copying % 8 == 0
    for experts in (1, 48, 384):
        assert stream._stages(shape, form == "carried", experts) >= 3


def test_what_the_kernels_are_given_is_laid_out_as_they_want() -> None:
    assert ctypes.sizeof(stream._Matrix) == 32
    assert stream._Products.x.offset == 64
    assert stream._Products.sums.offset == 160
    assert ctypes.sizeof(stream._Products) == 200
    assert stream._Rows.many.offset == 48
    assert stream._Rows.x.offset == 56
    assert ctypes.sizeof(stream._Rows) == 104


# ---- compiled for SM90 -----------------------------------------------------------------------------------------------


def assembled(messages: str) -> None:
    assert "Potential Performance Loss" not in messages, messages
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", messages)
    assert spills is not None, messages
    assert spills.groups() == ("0", "0", "0")


def compile_shape(form: str, name: str) -> None:
    before, defines = stream.products_source(stream.SHAPES[form][name], form == "carried", 48)
    found = build.compiled("experts.cu", defines, before)
    assembled(found.messages)
    listing = sass.listing(found.code)
    assert "GMMA" in listing
    assert sass.overwritten(listing) == []


@needs_nvrtc
@pytest.mark.parametrize("form", list(stream.SHAPES))
def test_products_of_few_rows_compile(form: str) -> None:
    compile_shape(form, "few")


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(("form", "name"), [pair for pair in SHAPES if pair[1] != "few"])
def test_products_compile(form: str, name: str) -> None:
    compile_shape(form, name)


@needs_nvrtc
@pytest.mark.parametrize("carried", [False, True])
def test_placing_compiles(carried: bool) -> None:
    for raw in (False, True):
        assembled(build.compiled("rows.cu", stream.rows_defines(carried, raw, 48)).messages)


@needs_nvrtc
def test_shapes_compile_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.config, "user_cache_dir", lambda: tmp_path)
    monkeypatch.setitem(stream.SHAPES["exact"], "other", stream.SHAPES["exact"]["few"]._replace(widths=(16,)))
    stream.compile_together(["few", "other"], False, 4)
    assert len(list((tmp_path / "cuda").iterdir())) == 2
