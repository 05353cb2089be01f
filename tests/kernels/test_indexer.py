"""Scores, selection and candidates against golden vectors, float64 and brute-force sorting."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import indexer, kv_copy, quant
from benthic.kernels.indexer import candidate_blocks, index_scores, index_select, select_entries, select_records
from benthic.testing.cases import INDEX, IndexCase
from benthic.testing.tolerances import assert_close

# a tile of keys holds poison behind the last one, whose scores are then left out
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


def brute_select(scores: list[float], visible: int, topk: int, candidates: list[int] | None, size: int) -> list[int]:
    allowed = [j for j in range(visible) if candidates is None or j // size in candidates]
    kept = sorted(sorted(allowed, key=lambda j: (-scores[j], j))[:topk])
    return kept + [-1] * (topk - len(kept))


def brute_candidates(scores: list[float], visible: int, blocks: int, size: int) -> list[int]:
    best = {}
    for j in range(visible):
        best[j // size] = max(best.get(j // size, -float("inf")), scores[j])
    if visible:
        best[(visible - 1) // size] = float("inf")
    kept = sorted(sorted(best, key=lambda b: (-best[b], b))[:blocks])
    return kept + [-1] * (blocks - len(kept))


def exact_scores(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
    shape = "thd,nd->thn" if keys.ndim == 2 else "thd,tnd->thn"
    return (torch.einsum(shape, q.double(), keys.double()).relu() * w.double()[..., None]).sum(1)


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_golden_scores(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    data = golden("indexer")
    q, w, keys = (torch.tensor(data[name], device=device) for name in ("q", "w", "keys"))
    exact = torch.tensor([data["exact"]], dtype=torch.float64)
    assert_close("index_scores", index_scores(q[None], w[None], keys, False), exact, 10.0)
    got = index_scores(q[None].bfloat16(), w[None].bfloat16(), keys, True)
    assert got.dtype == torch.float32
    assert got[0].tolist() == data["rounded"]  # three roundings of values far from ties: equal bits
    got = index_scores(q[None].bfloat16(), w[None].bfloat16(), keys, False)
    assert torch.equal(got, got.bfloat16().float())  # one rounding, of the sum
    assert_close("index_scores", got.bfloat16(), exact, 10.0)


@pytest.mark.parametrize("tile", [1, 1 << 22])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("case", INDEX, ids=lambda c: c.reason)
def test_scores(
    device: torch.device, case: IndexCase, per_row: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "TILE_ELEMENTS", tile)
    q = torch.randn(case.rows, case.heads, 2 * case.width, device=device)[..., case.width :]
    w = torch.randn(case.rows, case.heads, device=device)
    keys = torch.randn(*(case.rows,) * per_row, case.entries, case.width, device=device)
    got = index_scores(q, w, keys, False)
    assert_close("index_scores", got, exact_scores(q, w, keys), 100.0)
    rounded = index_scores(q.bfloat16(), w.bfloat16(), keys.bfloat16().float(), True)
    assert torch.equal(rounded, rounded.bfloat16().float())
    want = exact_scores(q.bfloat16(), w.bfloat16(), keys.bfloat16())
    assert_close("index_scores_rounded", rounded.bfloat16(), want, 40.0)


# ---- choice ----------------------------------------------------------------------------------------------------------


def test_golden_choices(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    data = golden("indexer")
    scores = torch.tensor([data["scores"]], device=device)
    for case in data["choices"]:
        candidates = None if case["candidates"] is None else torch.tensor([case["candidates"]], device=device)
        visible = torch.tensor([case["visible"]], device=device)
        got = select_entries(scores, visible, case["topk"], candidates, data["block_size"])
        assert got.dtype == torch.int32
        assert got.tolist() == [case["entries"]], case
    for case in data["blocks"]:
        visible = torch.tensor([case["visible"]], device=device)
        got = candidate_blocks(scores, visible, case["blocks"], data["block_size"])
        assert got.dtype == torch.int32
        assert got[0].tolist() == case["candidates"] + [-1] * (case["blocks"] - len(case["candidates"])), case


TIED = torch.tensor([-2.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("n", "k", "size"), [(0, 3, 2), (37, 8, 8), (200, 9, 4), (300, 5, 1), (700, 2, 2), (5000, 20, 2)]
)
def test_choices_of_tied_scores_equal_sorting(device: torch.device, n: int, k: int, size: int) -> None:
    scores = TIED[torch.randint(len(TIED), (4, n))]
    visible = torch.tensor([0, n // 3, max(n - 1, 0), n])
    lists = [sorted({0, v // 2 // size, max(v - 1, 0) // size, n // size + 1}) for v in visible.tolist()]
    candidates = torch.tensor([c + [-1] * (5 - len(c)) for c in lists])
    here, seen, given = scores.to(device), visible.to(device), candidates.to(device)
    entries, blocks = select_entries(here, seen, k), candidate_blocks(here, seen, k, size)
    within = select_entries(here, seen, k, given, size)
    for row, (s, v) in enumerate(zip(scores.tolist(), visible.tolist(), strict=True)):
        assert entries[row].tolist() == brute_select(s, v, k, None, size)
        assert blocks[row].tolist() == brute_candidates(s, v, k, size)
        assert within[row].tolist() == brute_select(s, v, k, lists[row], size)


@st.composite
def score_rows(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    """Scores with many ties, and how much of them each row sees."""
    n = draw(st.integers(0, 40))
    values = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.5, 1.0, 3.0])
    rows = draw(st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=4))
    return rows, [draw(st.integers(0, n)) for _ in rows]


@given(score_rows(), st.integers(1, 45))
def test_selection_equals_sorting(rows: tuple[list[list[float]], list[int]], topk: int) -> None:
    scores, visible = rows
    got = select_entries(torch.tensor(scores).view(len(scores), -1), torch.tensor(visible), topk)
    assert got.tolist() == [brute_select(s, v, topk, None, 8) for s, v in zip(scores, visible, strict=True)]


@given(score_rows(), st.integers(1, 12), st.integers(1, 9))
def test_candidates_equal_sorting(rows: tuple[list[list[float]], list[int]], blocks: int, size: int) -> None:
    scores, visible = rows
    got = candidate_blocks(torch.tensor(scores).view(len(scores), -1), torch.tensor(visible), blocks, size)
    assert got.tolist() == [brute_candidates(s, v, blocks, size) for s, v in zip(scores, visible, strict=True)]


@given(score_rows(), st.integers(1, 12), st.integers(1, 4), st.integers(1, 9))
def test_restricted_selection_equals_sorting(
    rows: tuple[list[list[float]], list[int]], topk: int, blocks: int, size: int
) -> None:
    scores, visible = rows
    candidates = [brute_candidates(s[::-1], v, blocks, size) for s, v in zip(scores, visible, strict=True)]
    got = select_entries(
        torch.tensor(scores).view(len(scores), -1), torch.tensor(visible), topk, torch.tensor(candidates), size
    )
    assert got.tolist() == [
        brute_select(s, v, topk, c, size) for s, v, c in zip(scores, visible, candidates, strict=True)
    ]


# ---- over the cache --------------------------------------------------------------------------------------------------


ENTRIES = 8  # records a block of the pool


def paged_keys(keys: list[Tensor], form: str, device: torch.device) -> tuple[kv_copy.Paged, Tensor]:
    """Keys of each sequence in blocks scattered over a pool of poison, and the table of those blocks."""
    width = 32
    data, scale = kv_copy.data_bytes(width, form), kv_copy.scale_bytes(width, form)
    pool = torch.full((64, 32 + ENTRIES * (data + scale)), 0xFF, dtype=torch.uint8, device=device)
    paged = kv_copy.Paged(pool, 32, 32 + ENTRIES * data, ENTRIES, width, form)
    free = (torch.randperm(63) + 1).tolist()
    tables = torch.zeros(len(keys), max((-(-k.shape[0] // ENTRIES) for k in keys), default=0), dtype=torch.int64)
    for c, key in enumerate(keys):
        for b in range(-(-key.shape[0] // ENTRIES)):
            tables[c, b] = free.pop()
        at = torch.arange(key.shape[0])
        ids = tables[c, at // ENTRIES] * ENTRIES + at % ENTRIES
        kv_copy.write_records(paged, ids.to(device), key.to(device))
    return paged, tables.to(device)


CHUNKS = {
    "decode, long and short sequences": [(40, 1), (3, 1), (61, 1), (0, 1)],
    "a chunk beside decode rows": [(33, 9), (50, 1), (5, 5)],
    "one chunk": [(70, 40)],
    "all short": [(4, 2), (6, 1), (8, 8)],
    "one more than may be kept": [(9, 1), (9, 3)],
    "an empty chunk": [(20, 0), (30, 2)],
    "nothing": [],
}


@pytest.mark.parametrize("form", ["f32", "mxfp4"])
@pytest.mark.parametrize(("emit", "size"), [(0, 4), (2, 2), (2, 4), (100, 4)])  # 2 x 2: less than topk
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_over_the_cache_equals_one_row_at_a_time(
    device: torch.device, chunks: list[tuple[int, int]], restricted: bool, emit: int, size: int, form: str
) -> None:
    """chunks: (entries of the sequence, rows in the step); row i of n sees all but the last n-1-i entries."""
    topk = 8
    keys = [torch.randn(n, 32) for n, _ in chunks]
    paged, tables = paged_keys(keys, form, device)
    starts = tuple(sum(rows for _, rows in chunks[:i]) for i in range(len(chunks) + 1))
    visible = [max(n - rows + 1 + i, 0) for n, rows in chunks for i in range(rows)]
    total = starts[-1]
    q = torch.randn(total, 3, 32, device=device)
    w = torch.randn(total, 3, device=device)
    restrict = None
    if restricted:
        some = [sorted({0, v // 8, max(v - 1, 0) // size}) for v in visible]
        restrict = torch.tensor([c + [-1] * (3 - len(c)) for c in some], dtype=torch.int32, device=device).view(
            total, 3
        )
    seen = torch.tensor(visible, dtype=torch.int64, device=device)
    entries, candidates = index_select(q, w, paged, tables, starts, seen, topk, False, restrict, emit, size)
    assert (entries.dtype, entries.shape) == (torch.int32, (total, topk))
    assert (candidates is None) == (emit == 0)
    for c, (n, rows) in enumerate(chunks):
        at = torch.arange(n, device=device)
        stored = kv_copy.read_records(paged, tables[c, at // ENTRIES] * ENTRIES + at % ENTRIES) if n else None
        for t in range(starts[c], starts[c] + rows):
            scores = [] if stored is None else index_scores(q[t : t + 1], w[t : t + 1], stored, False)[0].tolist()
            blocks = None if restrict is None else restrict[t].tolist()
            assert entries[t].tolist() == brute_select(scores, visible[t], topk, blocks, size)
            if candidates is not None:
                assert candidates[t].tolist() == brute_candidates(scores, visible[t], emit, size)


GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of FP4


def on_grid(*shape: int, most: int) -> Tensor:
    """Signed values of the grid, so small that sums of products of them are exact in any order."""
    return GRID[torch.randint(most + 1, shape)] * torch.randint(0, 2, shape).mul(2).sub(1)


def key_values(n: int, width: int) -> Tensor:
    """[n, width], many equal in all channels; scales of groups differ."""
    scales = 2.0 ** torch.randint(-2, 3, (n, -(-width // 32))).repeat_interleave(32, dim=1)[:, :width]
    return torch.where(torch.rand(n, 1) < 0.3, GRID[2], on_grid(n, width, most=7) * scales)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh tensors hold infinity, which ranks above every score, or ones; nothing may be written behind them.

    And the device has one processor, so that a program has parts of several rows.
    """
    fresh, behind = torch.empty, []

    def filled(*shape: Any, **kwargs: Any) -> Tensor:
        size = torch.Size(shape[0] if isinstance(shape[0], (tuple, list, torch.Size)) else shape)
        whole = fresh(size.numel() + 64, **kwargs)
        whole.fill_(torch.inf if whole.is_floating_point() else 1)
        behind.append(whole[size.numel() :])
        return whole[: size.numel()].view(size)

    monkeypatch.setattr(torch, "empty", filled)
    if find_spec("triton") is not None:
        from benthic.kernels.triton import indexer as triton_indexer

        monkeypatch.setattr(triton_indexer, "_processors", lambda device: 1)
    yield
    assert all((x == (torch.inf if x.is_floating_point() else 1)).all() for x in behind)


class Placed(NamedTuple):
    """A step: each chunk's keys in blocks scattered over a pool of poison."""

    keys: kv_copy.Paged
    tables: Tensor
    rows: kv_copy.Rows
    visible: Tensor
    starts: tuple[int, ...]


def placed(chunks: list[tuple[int, int]], form: str, width: int, entries: int, device: torch.device) -> Placed:
    """chunks: (entries of the sequence, rows in the step); row i of n sees all but the last n-1-i entries."""
    data, scale = kv_copy.data_bytes(width, form), kv_copy.scale_bytes(width, form)
    scale_offset = 32 + -(-entries * data // 32) * 32
    block = scale_offset + -(-entries * scale // 32) * 32
    counts = [-(-n // entries) for n, _ in chunks]
    pool = torch.full((sum(counts) + 2, block), 0xFF, dtype=torch.uint8, device=device)
    keys = kv_copy.Paged(pool, 32, scale_offset, entries, width, form)
    tables = torch.zeros(len(chunks) + 1, max(counts, default=0) + 1, dtype=torch.int32)
    free = (torch.randperm(sum(counts) + 1) + 1).tolist()
    where: list[tuple[int, int, int, int]] = []
    for c, (n, rows) in enumerate(chunks):
        tables[c + 1, : counts[c]] = torch.tensor([free.pop() for _ in range(counts[c])], dtype=torch.int32)
        at = torch.arange(n)
        ids = tables[c + 1, at // entries].long() * entries + at % entries
        kv_copy.write_records(keys, ids.to(device), key_values(n, width).to(device))
        where += [(c + 1, n - rows + i, n - rows, i) for i in range(rows)]
    slots, positions, firsts, at = torch.tensor(where, dtype=torch.int64).reshape(-1, 4).unbind(1)
    rows = kv_copy.Rows(*(x.to(device) for x in (slots, positions, firsts, torch.arange(len(where)) - at)))
    starts = tuple(sum(rows for _, rows in chunks[:i]) for i in range(len(chunks) + 1))
    wider = torch.full((len(chunks) + 1, tables.shape[1] + 3), -1, dtype=torch.int32, device=device)
    wider[:, :-3] = tables.to(device)
    return Placed(keys, wider[:, :-3], rows, (rows.positions + 1).clamp(min=0), starts)


class StepCase(NamedTuple):
    chunks: list[tuple[int, int]]
    reason: str
    form: str = "mxfp4"
    width: int = 128
    entries: int = 8  # records a block of the pool
    topk: int = 8
    emit: int = 0
    size: int = 4
    restricted: bool = False
    rounded: bool = False
    chunked: bool = False


STEP_CASES = [
    StepCase([], "nothing", emit=3),
    StepCase([(n, 1) for n in (40, 3, 61, 0, 20, 130, 12, 33)], "decode, long and short sequences"),
    StepCase([(40, 1), (3, 1), (61, 1), (0, 1)], "the same, candidates too, fewer than are attended", emit=1, size=2),
    StepCase([(33, 3), (50, 1), (5, 5)], "several rows of a sequence"),
    StepCase([(500, 3)], "rounded", entries=128, topk=40, emit=20, rounded=True),
    StepCase([(140, 5), (20, 4)], "long chunks", entries=64, chunked=True),
    StepCase([(300, 2)], "a tile is part of a block", entries=128, emit=5, size=8),
    StepCase([(70, 1), (9, 1)], "restricted", restricted=True),
    StepCase([(70, 1), (9, 2)], "restricted, and candidates of all", restricted=True, emit=2, size=2),
    StepCase([(1501, 1)], "a tree of three levels", entries=128, topk=16, emit=16, size=2),
    StepCase([(600, 1)], "a tree of two levels", entries=128, topk=16, emit=16, size=2),
    StepCase([(40, 2), (70, 1)], "float32", form="f32", width=32, emit=3),
    StepCase([(70, 1)], "float32, restricted", form="f32", width=32, restricted=True),
    StepCase([(40, 1)], "a width that no kernel has", form="f32", width=24),
]


def check_step(device: torch.device, case: StepCase, heads: int = 3) -> None:
    step = placed(case.chunks, case.form, case.width, case.entries, device)
    total, dtype = step.starts[-1], torch.float32 if case.form == "f32" else torch.bfloat16
    q = on_grid(total, heads, case.width, most=5).to(device, dtype)
    w = torch.randint(128, 256, (total, heads)) / 128 if case.rounded else on_grid(total, heads, most=4)
    w = w.to(device, dtype)
    seen = step.visible.tolist()
    restrict = None
    if case.restricted:
        lists = [sorted({0, v // 2 // case.size, max(v - 1, 0) // case.size}) for v in seen]
        restrict = torch.tensor([c + [-1] * (3 - len(c)) for c in lists], dtype=torch.int32, device=device)
    records, candidates = select_records(
        q, w, step.keys, step.tables, step.rows, step.visible, case.topk, case.rounded,
        restrict, case.emit, case.size, case.chunked,
    )  # fmt: skip
    assert (records.dtype, records.shape) == (torch.int32, (total, case.topk))
    assert (candidates is None) == (case.emit == 0)
    for t, slot in enumerate(step.rows.slots.tolist()):
        at = torch.arange(seen[t], device=device)
        ids = step.tables[slot, at // case.entries].long() * case.entries + at % case.entries
        stored = kv_copy.read_records(step.keys, ids)
        scores = indexer.index_scores_reference(q[t : t + 1], w[t : t + 1], stored, case.rounded)[0].tolist()
        blocks = None if restrict is None else restrict[t].tolist()
        want = brute_select(scores, seen[t], case.topk, blocks, case.size)
        assert records[t].tolist() == [-1 if j < 0 else ids[j].item() for j in want]
        if candidates is not None:
            assert candidates[t].tolist() == brute_candidates(scores, seen[t], case.emit, case.size)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", STEP_CASES, ids=lambda c: c.reason)
def test_records_of_a_step_equal_one_row_at_a_time(device: torch.device, case: StepCase) -> None:
    check_step(device, case)


@pytest.mark.usefixtures("poison")
def test_a_step_in_portions(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch for three rows, so that portions begin inside a chunk."""
    if find_spec("triton") is not None:
        from benthic.kernels.triton import indexer as triton_indexer

        monkeypatch.setattr(triton_indexer, "ROWS_AT_ONCE", 3)
    check_step(device, StepCase([(30, 1), (40, 6)], "portions", emit=2))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("rows", [1, 2])
def test_entries_that_a_row_does_not_see_do_not_count(device: torch.device, rows: int) -> None:
    """Each block has one good entry, so that all that may be kept are needed; what comes later would be better."""
    step = placed([(300, rows)], "mxfp4", 128, 8, device)
    values = torch.where(torch.arange(300) % 8 == 5, 1.0, 0.5)
    values[291:] = 6.0
    ids = step.tables[1].cpu()[torch.arange(300) // 8].long() * 8 + torch.arange(300) % 8
    kv_copy.write_records(step.keys, ids.to(device), values[:, None].expand(-1, 128).to(device))
    q = torch.ones(rows, 1, 128, dtype=torch.bfloat16, device=device)
    seen = torch.full((rows,), 291, device=device)
    best = list(range(5, 8 * 16, 8))
    got, blocks = select_records(
        q, q[..., 0], step.keys, step.tables, step.rows, seen, 16, False, None, 16, 8, False
    )  # fmt: skip
    assert got.tolist() == [ids[best].tolist()] * rows
    assert blocks is not None
    assert blocks.tolist() == [[*range(15), 36]] * rows


@pytest.mark.parametrize(
    ("dots", "heads", "weight"), [((256.0, 257.0), 1, 1.5), ((127.0, 127.5), 3, 129 / 128)], ids=["dot", "product"]
)
def test_each_step_is_rounded_where_asked(
    device: torch.device, dots: tuple[float, float], heads: int, weight: float
) -> None:
    """Two entries that only the rounding of this step makes equal: then the first is chosen, else the better."""
    step = placed([(2, 1)], "mxfp4", 128, 8, device)
    values = torch.zeros(2, 128)
    for row, dot in enumerate(dots):
        values[row, : int(dot // 4)] = 4.0
        values[row, 100], values[row, 101] = dot % 4 // 1, dot % 1
    ids = step.tables[1].cpu()[0].long() * 8 + torch.arange(2)
    kv_copy.write_records(step.keys, ids.to(device), values.to(device))
    assert kv_copy.read_records(step.keys, ids.to(device)).sum(1).tolist() == list(dots)
    q = torch.ones(1, heads, 128, dtype=torch.bfloat16, device=device)
    w = torch.full((1, heads), weight, dtype=torch.bfloat16, device=device)
    for rounded, best in ((True, 0), (False, 1)):
        got, _ = select_records(q, w, step.keys, step.tables, step.rows, step.visible, 1, rounded)
        assert got[0].tolist() == [ids[best].item()]


def test_scores_of_keys_and_queries_of_all_sizes(device: torch.device) -> None:
    """One entry stands out, by keys from 2^-20 to 2^20 and through subnormal codes."""
    step = placed([(40, 1)], "mxfp4", 128, 8, device)
    for power in (-20, 0, 20):
        keys = 2.0**power * torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0, 0.0]).repeat(40, 16)
        best = torch.tensor([3, 17])
        keys[best, 5::8] *= 1.5  # 4 becomes 6
        at = torch.arange(40)
        ids = step.tables[1].cpu()[at // 8].long() * 8 + at % 8
        kv_copy.write_records(step.keys, ids.to(device), keys.to(device))
        assert torch.equal(kv_copy.read_records(step.keys, ids.to(device)).cpu(), keys)
        q = quant.roundtrip_mxfp4(torch.randn(1, 2, 128).abs().bfloat16()).to(device)
        w = torch.ones(1, 2, dtype=torch.bfloat16, device=device)
        got, _ = select_records(q, w, step.keys, step.tables, step.rows, step.visible, 2, False)
        assert got[0].tolist() == ids[best].tolist()


def test_nothing_is_scored_where_all_is_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    paged, tables = paged_keys([torch.randn(8, 32), torch.randn(5, 32)], "f32", device)
    monkeypatch.setattr(indexer, "index_scores_reference", None)
    monkeypatch.setattr(kv_copy, "read_records_reference", None)
    visible = torch.tensor([7, 8, 5], device=device)
    q, w = torch.randn(3, 2, 32, device=device), torch.randn(3, 2, device=device)
    entries, candidates = index_select(q, w, paged, tables, (0, 2, 3), visible, 8, True, None, 2, 4)
    assert entries.tolist() == [[*range(7), -1], [*range(8)], [*range(5), -1, -1, -1]]
    assert candidates is not None
    assert candidates.tolist() == [[0, 1], [0, 1], [0, 1]]


def test_refuses() -> None:
    q, w, keys = torch.zeros(2, 3, 32), torch.zeros(2, 3), torch.zeros(5, 32)
    visible, scores = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5)
    with pytest.raises(ShapeError, match="index_scores: q, w"):
        index_scores(q, w[:1], keys, True)
    with pytest.raises(ShapeError, match="index_scores: keys"):
        index_scores(q, w, keys[:, :16], True)
    with pytest.raises(ShapeError, match="index_scores: keys"):
        index_scores(q, w, torch.zeros(3, 5, 32), True)
    with pytest.raises(ShapeError, match="candidate_blocks: scores"):
        candidate_blocks(scores, visible[:1], 2, 8)
    with pytest.raises(ShapeError, match="candidate_blocks: blocks"):
        candidate_blocks(scores, visible, 0, 8)
    with pytest.raises(ShapeError, match="select_entries: scores"):
        select_entries(scores[0], visible, 2)
    with pytest.raises(ShapeError, match="select_entries: topk"):
        select_entries(scores, visible, 0)
    with pytest.raises(ShapeError, match="select_entries: candidates"):
        select_entries(scores, visible, 2, torch.zeros(3, 2))
    paged, tables = paged_keys([torch.randn(8, 32)], "f32", torch.device("cpu"))
    with pytest.raises(ShapeError, match="index_select: q, w"):
        index_select(q[..., :16], w, paged, tables, (0, 2), visible, 4, True)
    with pytest.raises(ShapeError, match="index_select: tables"):
        index_select(q, w, paged, tables, (0, 1), visible, 4, True)
    with pytest.raises(ShapeError, match="index_select: restrict"):
        index_select(q, w, paged, tables, (0, 2), visible, 4, True, torch.zeros(1, 2, dtype=torch.int32))
