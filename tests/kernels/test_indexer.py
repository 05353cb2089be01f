"""Scores, selection and candidates against golden vectors, float64 and brute-force sorting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import indexer, kv_copy
from benthic.kernels.indexer import candidate_blocks, index_scores, index_select, select_entries
from benthic.testing.cases import INDEX, IndexCase
from benthic.testing.tolerances import assert_close


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
