"""Sink attention against golden vectors (grouped rounding included) and a dense softmax in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import attn_sparse, backends, kv_copy, quant
from benthic.kernels.attn_sparse import attend, sink_attention
from benthic.testing.cases import ATTEND, ATTENTION, AttendCase, AttentionCase
from benthic.testing.tolerances import assert_close


def dense(
    q: Tensor, rows: Tensor, begin: Tensor, count: Tensor, entries: Tensor, records: Tensor | None, sink: Tensor
) -> Tensor:
    """One row at a time: softmax over its rows and the sink, float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for t in range(q.shape[0]):
        k = rows[int(begin[t]) : int(begin[t] + count[t])]
        if records is not None:
            k = torch.cat([k, entries[records[t][records[t] >= 0]].to(k.dtype)])
        logits = q[t].double() @ k.double().t() * q.shape[2] ** -0.5
        logits = torch.cat([logits, sink.double()[:, None]], dim=1)
        out[t] = logits.softmax(1)[:, :-1] @ k.double()
    return out


def store(entries: Tensor) -> kv_copy.Paged:
    """The entries as float32 records, record i holding entry i, poison around them."""
    blocks = entries.shape[0] // 8 + 1
    width = 4 * entries.shape[1]
    pool = torch.full((blocks, 64 + 8 * width), 0xFF, dtype=torch.uint8, device=entries.device)
    paged = kv_copy.Paged(pool, 32, 0, 8, entries.shape[1], "f32")
    kv_copy.write_records(paged, torch.arange(entries.shape[0], device=entries.device), entries)
    return paged


def make(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    span = case.window + case.rows
    count = torch.randint(1, case.window + 1, (case.rows,), device=device)
    begin = (torch.rand(case.rows, device=device) * (span - count + 1)).long()
    records = None
    if case.entries:
        chosen = torch.rand(case.rows, case.stored, device=device).argsort(1)[:, : case.entries].sort(1).values
        kept = torch.randint(0, case.entries + 1, (case.rows, 1), device=device)
        records = torch.where(torch.arange(case.entries, device=device) < kept, chosen, -1)
    return {
        "q": (2 * torch.randn(case.rows, case.heads, case.width, device=device)).to(dtype),
        "rows": torch.randn(span, case.width, device=device).to(dtype),
        "begin": begin,
        "count": count,
        "entries": torch.randn(case.stored, case.width, device=device).to(dtype).float(),
        "records": records,
        "sink": torch.randn(case.heads, device=device),
    }


def run(made: dict[str, Any], round_probs: bool, *, whole_rows: bool = False) -> Tensor:
    paged = None
    if made["records"] is not None:
        paged = made["entries"] if whole_rows else store(made["entries"])
    scale = made["q"].shape[2] ** -0.5
    q, rows, begin, count = (made[n] for n in ("q", "rows", "begin", "count"))
    return sink_attention(q, rows, begin, count, paged, made["records"], made["sink"], scale, round_probs)


@pytest.mark.parametrize("rounded", [False, True])
def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device, rounded: bool) -> None:
    """In float32 the rounded probabilities show at 1e-3, so the groups of 64 and their running maxima are seen."""
    data = golden("attn_sparse")
    q, rows, entries, sink = (torch.tensor(data[n], device=device) for n in ("q", "rows", "entries", "sink"))
    for case in data["cases"]:
        begin, count = (torch.tensor([case[n]], device=device) for n in ("begin", "count"))
        records = None if case["records"] is None else torch.tensor([case["records"]], device=device)
        paged = None if records is None else store(entries)
        y = sink_attention(q[None], rows, begin, count, paged, records, sink, data["scale"], rounded)
        want = torch.tensor([case["rounded" if rounded else "exact"]], dtype=torch.float64)
        assert_close("sink_attention", y, want, 2.0)


def test_golden_tells_the_roundings_apart(golden: Callable[[str], dict[str, Any]]) -> None:
    cases = golden("attn_sparse")["cases"]
    gaps = [(torch.tensor(c["exact"]) - torch.tensor(c["rounded"])).abs().max().item() for c in cases]
    assert max(gaps) > 2e-4


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.reason)
def test_shapes(device: torch.device, case: AttentionCase, dtype: torch.dtype, rounded: bool) -> None:
    made = make(case, dtype, device)
    y = run(made, rounded)
    assert y.dtype == dtype
    names = ("q", "rows", "begin", "count", "entries", "records", "sink")
    assert_close("sink_attention_rounded" if rounded else "sink_attention", y, dense(*(made[n] for n in names)), 4.0)


@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.reason)
def test_whole_rows_serve_like_records(device: torch.device, case: AttentionCase) -> None:
    made = make(case, torch.float32, device)
    assert_close("sink_attention", run(made, False, whole_rows=True), run(made, False), 4.0)


@pytest.mark.parametrize("tile", [1, 1 << 12, 1 << 15])
def test_tiles_do_not_show(device: torch.device, monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    made = make(ATTENTION[3], torch.float32, device)
    whole = run(made, True)
    monkeypatch.setattr(attn_sparse, "TILE_ELEMENTS", tile)
    assert_close("sink_attention", run(made, True), whole, 4.0)


@given(st.integers(1, 20), st.integers(0, 200), st.integers(0, 90), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_equals_dense_softmax(rows: int, count: int, entries: int, shared: bool, seed: int) -> None:
    """Any split between window rows and entries; `shared`: all rows see the same, which takes the dense way."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(300, 16, generator=generator)
    stored = torch.randn(100, 16, generator=generator)
    begin = torch.randint(0, 100, (1 if shared else rows,), generator=generator).expand(rows)
    records = torch.rand(1 if shared else rows, 100, generator=generator).argsort(1)[:, :entries].sort(1).values
    made = {
        "q": torch.randn(rows, 2, 16, generator=generator),
        "rows": table,
        "begin": begin,
        "count": torch.full((rows,), count),
        "entries": stored,
        "records": records.expand(rows, -1),
        "sink": torch.randn(2, generator=generator),
    }
    want = dense(*(made[n] for n in ("q", "rows", "begin", "count", "entries", "records", "sink")))
    assert_close("sink_attention", run(made, False), want, 4.0)


def test_rows_that_nobody_lists_do_not_matter(device: torch.device) -> None:
    made = make(ATTENTION[3], torch.float32, device)
    seen = torch.zeros(made["rows"].shape[0], dtype=torch.bool, device=device)
    for begin, count in zip(made["begin"].tolist(), made["count"].tolist(), strict=True):
        seen[begin : begin + count] = True
    clean = run(made, False)
    assert not seen.all()
    made["rows"][~seen] = torch.nan
    assert torch.equal(run(made, False), clean)


def test_skipped_records_read_nothing(device: torch.device) -> None:
    """Record 0 is poison; a -1 must not reach it."""
    made = make(ATTENTION[3], torch.float32, device)
    made["records"] = torch.where(made["records"] == 0, -1, made["records"]).sort(1, descending=True).values
    paged = store(made["entries"])
    args = (made["q"], made["rows"], made["begin"], made["count"], paged, made["records"], made["sink"], 0.2, False)
    clean = sink_attention(*args)
    paged.pool[0, 32 : 32 + 4 * made["q"].shape[2]] = 0xFF
    assert kv_copy.read_records(paged, torch.tensor([0], device=device)).isnan().all()
    assert torch.equal(sink_attention(*args), clean)


def test_extreme_logits(device: torch.device) -> None:
    made = make(ATTENTION[1], torch.float32, device)
    names = ("q", "rows", "begin", "count", "entries", "records", "sink")
    for q_size, sink in ((1e3, 0.0), (1e3, 1e4), (1e-8, -1e4), (0.0, 0.0), (1.0, 80.0)):
        case = made | {"q": made["q"] * q_size, "sink": torch.full_like(made["sink"], sink)}
        y = run(case, False)
        assert y.isfinite().all()
        assert_close("sink_attention", y, dense(*(case[n] for n in names)), 100.0)


def test_row_without_anything_to_see_is_zero(device: torch.device) -> None:
    made = make(ATTENTION[3], torch.float32, device)
    made["count"][4] = 0
    made["records"][4] = -1
    y = run(made, True)
    assert torch.equal(y[4], torch.zeros_like(y[4]))
    assert y.isfinite().all()


def test_strides(device: torch.device) -> None:
    made = make(ATTENTION[3], torch.bfloat16, device)
    whole = run(made, False)
    made["q"] = torch.cat([made["q"], made["q"]], 2)[..., : made["q"].shape[2]]
    made["rows"] = made["rows"].t().contiguous().t()
    made["records"] = made["records"].t().contiguous().t()
    assert torch.equal(run(made, False), whole)


def test_gradient(device: torch.device) -> None:
    case = ATTENTION[3]
    made = make(case, torch.float32, device)
    results = []
    for kind in (torch.float32, torch.float64):
        leaves = [made[n].detach().to(kind).requires_grad_() for n in ("q", "rows", "entries", "sink")]
        copy = made | dict(zip(("q", "rows", "entries", "sink"), leaves, strict=True))
        y = run(copy, False, whole_rows=True) if kind == torch.float32 else differentiable_dense(copy)
        y.square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for got, want in zip(*results, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


def differentiable_dense(made: dict[str, Any]) -> Tensor:
    rows = []
    for t in range(made["q"].shape[0]):
        k = made["rows"][int(made["begin"][t]) : int(made["begin"][t] + made["count"][t])]
        k = torch.cat([k, made["entries"][made["records"][t][made["records"][t] >= 0]]])
        logits = made["q"][t] @ k.t() * made["q"].shape[2] ** -0.5
        rows.append(torch.cat([logits, made["sink"][:, None]], dim=1).softmax(1)[:, :-1] @ k)
    return torch.stack(rows)


def test_refuses() -> None:
    q, rows, at, sink = torch.zeros(2, 3, 32), torch.zeros(5, 32), torch.zeros(2, dtype=torch.int64), torch.zeros(3)
    records = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ShapeError, match="sink_attention: q, rows"):
        sink_attention(q, torch.zeros(5, 16), at, at, None, None, sink, 1.0, False)
    with pytest.raises(ShapeError, match="sink_attention: begin, count, sink"):
        sink_attention(q, rows, at, at, None, None, sink[:2], 1.0, False)
    with pytest.raises(ShapeError, match="sink_attention: paged, records"):
        sink_attention(q, rows, at, at, None, records, sink, 1.0, False)
    with pytest.raises(ShapeError, match="sink_attention: records"):
        sink_attention(q, rows, at, at, rows, records[:1], sink, 1.0, False)
    with pytest.raises(ShapeError, match="sink_attention: paged channels"):
        sink_attention(q, rows, at, at, torch.zeros(5, 16), records, sink, 1.0, False)


# attend


def make_step(case: AttendCase, device: torch.device, *, wide: bool = False) -> dict[str, Any]:
    """Arguments of `attend` but round_probs, in FP8 and NVFP4 or in float32; whatever nobody may read is poison."""
    dtype, forms = (torch.float32, ("f32", "f32")) if wide else (torch.bfloat16, ("fp8", "nvfp4"))
    width, listed = case.width, case.listed
    chunks = [*case.chunks, *[(0, 0, 1)] * case.padding]
    rows = [(slot, first + i, first) for slot, first, length in chunks for i in range(length)]
    starts = [start for start, chunk in zip(starts_of(chunks), chunks, strict=True) for _ in range(chunk[2])]
    columns = [[row[i] for row in rows] for i in range(3)]
    where = kv_copy.Rows(*(torch.tensor(c, dtype=torch.int64, device=device) for c in (*columns, starts)))
    kept = case.window + 3
    record = kv_copy.data_bytes(width, forms[0]) + kv_copy.scale_bytes(width, forms[0])
    ring_bytes = torch.full((4, kept, record), 0xFF, dtype=torch.uint8, device=device)
    ring = kv_copy.Ring(ring_bytes, width, forms[0])
    for slot, first, _ in case.chunks:
        at = torch.arange(max(first - kept, 0), first, device=device)
        kv_copy.ring_write(ring, torch.randn(at.shape[0], width, device=device), torch.full_like(at, slot), at)
    kw = torch.randn(len(rows), width, device=device).to(dtype)
    paged = records = None
    if listed:
        record = kv_copy.data_bytes(width, forms[1]) + kv_copy.scale_bytes(width, forms[1])
        blocks = case.stored // case.entries + 2
        pool = torch.full((blocks, 64 + case.entries * record + -case.entries * record % 32), 0xFF, dtype=torch.uint8)
        paged = kv_copy.Paged(pool.to(device), 32, 0, case.entries, width, forms[1])
        ids = torch.randperm(blocks * case.entries, device=device)[: case.stored]
        kv_copy.write_records(paged, ids, torch.randn(case.stored, width, device=device))
        picked = torch.rand(len(rows), case.stored, device=device).argsort(1)[:, :listed]
        count = torch.randint(0, listed + 1, (len(rows), 1), device=device)
        count[:1] = listed
        records = torch.where(torch.arange(listed, device=device) < count, ids[picked].sort(1).values, -1).int()
    return {
        "q": (2 * torch.randn(len(rows), case.heads, width, device=device)).to(dtype),
        "kw": kw if wide else quant.roundtrip_fp8(kw),
        "ring": ring,
        "rows": where,
        "window": case.window,
        "paged": paged,
        "records": records,
        "sink": torch.randn(case.heads, device=device),
        "scale": width**-0.5,
    }


def starts_of(chunks: list[tuple[int, int, int]]) -> list[int]:
    return [sum(length for _, _, length in chunks[:i]) for i in range(len(chunks))]


def dense_step(made: dict[str, Any]) -> Tensor:
    """One row at a time, float64, from `kv_copy`'s references."""
    rows, out = made["rows"], torch.zeros(made["q"].shape, dtype=torch.float64, device=made["q"].device)
    lows = [0] * len(rows.slots) if rows.lows is None else rows.lows.tolist()
    for t, (slot, position, first, start) in enumerate(zip(*(column.tolist() for column in rows[:4]), strict=True)):
        oldest = max(lows[t], position - made["window"] + 1)
        at = torch.arange(oldest, max(first, oldest), device=out.device)
        keys = [kv_copy.read_ring_reference(made["ring"], torch.full_like(at, slot), at)]
        keys.append(made["kw"][start + max(oldest, first) - first : start + position - first + 1])
        if made["records"] is not None:
            ids = made["records"][t]
            keys.append(kv_copy.read_records_reference(made["paged"], ids[ids >= 0]))
        k = torch.cat([part.double() for part in keys])
        logits = torch.cat([made["q"][t].double() @ k.t() * made["scale"], made["sink"].double()[:, None]], dim=1)
        out[t] = logits.softmax(1)[:, :-1] @ k
    return out


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(
    ("case", "wide"),
    [pytest.param(c, w, id=f"{c.reason}, {w}") for c in ATTEND for w in (False, True) if not w or c.width < 512],
)
def test_attend(device: torch.device, case: AttendCase, wide: bool, rounded: bool) -> None:
    made = make_step(case, device, wide=wide)
    y = attend(**made, round_probs=rounded)
    assert y.dtype == made["q"].dtype
    assert_close("sink_attention_rounded" if rounded else "sink_attention", y, dense_step(made), 4.0)


@pytest.mark.parametrize("spans", [1, 2, 3])
@pytest.mark.parametrize("case", [ATTEND[2], ATTEND[6]], ids=lambda c: c.reason)
def test_attend_in_spans(device: torch.device, monkeypatch: pytest.MonkeyPatch, case: AttendCase, spans: int) -> None:
    """A list cut into spans, some of them without any key."""
    if backends.pick("attend", torch.empty(0, device=device)) is not None:
        from benthic.kernels.triton import attn_sparse as kernels

        monkeypatch.setattr(kernels, "spans", lambda *_: spans)
    made = make_step(case, device)
    made["records"][1:] = -1
    assert_close("sink_attention", attend(**made, round_probs=False), dense_step(made), 4.0)


def test_attend_equals_sink_attention(device: torch.device) -> None:
    """The same rows laid side by side: in float32 to the last bits, whatever finds them."""
    case = ATTEND[3]
    made = make_step(case, device, wide=True)
    chunks = tuple(zip(*case.chunks, strict=True))
    starts = (*starts_of(list(case.chunks)), made["q"].shape[0])
    rows, begin, count = kv_copy.window_rows(made["ring"], made["kw"], chunks[0], chunks[1], starts, case.window)
    others = [made[n] for n in ("paged", "records", "sink", "scale")]
    assert_close(
        "sink_attention",
        attend(**made, round_probs=True),
        sink_attention(made["q"], rows, begin, count, *others, True),
        8 * 2.0**-8 / 1e-5,  # a probability may round the other way
    )
    assert_close(
        "sink_attention",
        attend(**made, round_probs=False),
        sink_attention(made["q"], rows, begin, count, *others, False),
        4.0,
    )


def test_attend_leaves_the_ring_alone_and_reads_only_what_is_listed(device: torch.device) -> None:
    made = make_step(ATTEND[2], device)
    before = made["ring"].bytes.clone()
    clean = attend(**made, round_probs=False)
    assert torch.equal(made["ring"].bytes, before)
    assert clean.isfinite().all()
    read = torch.zeros(made["paged"].pool.shape[0] * made["paged"].entries, dtype=torch.bool, device=device)
    read[made["records"][made["records"] >= 0].long()] = True
    record = kv_copy.data_bytes(128, "nvfp4") + kv_copy.scale_bytes(128, "nvfp4")
    body = made["paged"].pool[:, 32 : 32 + made["paged"].entries * record].unflatten(1, (-1, record))
    body[~read.view(body.shape[:2])] = 0xFF
    assert torch.equal(attend(**made, round_probs=False), clean)


@pytest.mark.parametrize("case", [0, 2, 3, len(ATTEND) - 1])
def test_attend_sees_no_window_row_below_a_rows_lowest(device: torch.device, case: int) -> None:
    """What the ring holds below is another sequence's: here it reads as NaN."""
    made = make_step(ATTEND[case], device)
    rows, ring = made["rows"], made["ring"]
    everything = attend(**made, round_probs=False)
    lows = (rows.positions - torch.arange(len(rows.slots), device=device) % 5).clamp(min=0)
    lows = torch.where(lows > rows.firsts, lows, torch.minimum(lows, rows.firsts))
    made["rows"] = rows._replace(lows=lows)
    for slot, lowest in zip(rows.slots.tolist(), lows.tolist(), strict=True):
        least = int(lows[rows.slots == slot].min())
        held = int(rows.firsts[rows.slots == slot].min()) - ring.bytes.shape[1]  # the oldest position that is there
        at = torch.arange(max(held, 0), least, device=device)
        ring.bytes[slot, at % ring.bytes.shape[1]] = 0xFF
        assert lowest >= least
    got = attend(**made, round_probs=False)
    assert_close("sink_attention", got, dense_step(made), 4.0)
    assert not got.numel() or not torch.equal(everything, got)


def test_attend_takes_strides(device: torch.device) -> None:
    made = make_step(ATTEND[3], device)
    whole = attend(**made, round_probs=True)
    made["q"] = torch.cat([made["q"], made["q"]], 2)[..., : made["q"].shape[2]]
    made["kw"] = made["kw"].t().contiguous().t()
    made["records"] = made["records"].t().contiguous().t()
    made["rows"] = kv_copy.Rows(*(torch.stack([x, x], 1)[:, 0] for x in made["rows"][:4]))
    pool = made["paged"].pool
    made["paged"] = made["paged"]._replace(pool=torch.cat([pool, pool[:, :64]], 1)[:, : pool.shape[1]])
    assert torch.equal(attend(**made, round_probs=True), whole)


def test_attend_far_into_the_pool(device: torch.device) -> None:
    """Records beyond 2^31 bytes: pages that nobody touches cost nothing."""
    made = make_step(ATTEND[2]._replace(listed=3, stored=4), device)
    pool = torch.empty(3, (1 << 30) + 64, dtype=torch.uint8, device=device)
    paged = made["paged"]._replace(pool=pool, data_offset=(1 << 30) - 4096)
    ids = torch.tensor([0, 33, 70], device=device)  # entries of blocks 0, 1 and 2
    kv_copy.write_records(paged, ids, torch.randn(3, 128, device=device))
    made["paged"], made["records"] = paged, ids.int().expand(made["q"].shape[0], 3)
    assert_close("sink_attention", attend(**made, round_probs=False), dense_step(made), 4.0)


def test_attend_same_bits_in_any_batch(device: torch.device) -> None:
    made = make_step(ATTEND[2], device)
    if backends.pick("attend", made["q"]) is None:
        return  # the plain version makes no such promise
    with backends.invariant():
        whole = attend(**made, round_probs=False)
        for t in range(3):  # chunks of one row each
            rows = kv_copy.Rows(*(x[t : t + 1] for x in made["rows"][:3]), torch.zeros_like(made["rows"].starts[:1]))
            one = made | {"q": made["q"][t : t + 1], "kw": made["kw"][t : t + 1], "rows": rows}
            one["records"] = made["records"][t : t + 1]
            assert torch.equal(attend(**one, round_probs=False)[0], whole[t])


def test_attend_refuses() -> None:
    made = make_step(ATTEND[1], torch.device("cpu"))
    for changed, match in (
        ({"kw": made["kw"][:, :64]}, "q, kw, ring channels"),
        ({"sink": made["sink"][:2]}, "sink, rows"),
        ({"window": made["ring"].bytes.shape[1] + 2}, "window"),
        ({"records": None}, "paged, records"),
        ({"records": made["records"][0]}, "records"),
        ({"paged": made["paged"]._replace(channels=64)}, "paged channels"),
    ):
        with pytest.raises(ShapeError, match=f"attend: {match}"):
            attend(**(made | changed), round_probs=False)
