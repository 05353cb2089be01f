"""Cache records byte by byte, and window rings against a list of all rows ever written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import kv_copy, quant
from benthic.kernels.kv_copy import Paged, Ring
from benthic.testing.cases import ROWS

POISON = 0xFF  # reads as NaN in every format
ROUNDTRIP: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": quant.roundtrip_fp8,
    "nvfp4": quant.roundtrip_nvfp4,
    "mxfp4": quant.roundtrip_mxfp4,
    "f32": lambda x: x,
}


def paged(form: str, channels: int, device: torch.device, blocks: int = 6, entries: int = 8) -> Paged:
    """A pool of poison with 32 bytes before the records, and 64 between data and scales and at the end."""
    data, scale = kv_copy.data_bytes(channels, form), kv_copy.scale_bytes(channels, form)
    offset = 32 + entries * data + 64
    pool = torch.full((blocks, offset + entries * (data + scale) + 64), POISON, dtype=torch.uint8, device=device)
    return Paged(pool, 32, offset, entries, channels, form)


def test_record_sizes_of_the_release() -> None:
    def size(channels: int, form: str) -> int:
        return kv_copy.data_bytes(channels, form) + kv_copy.scale_bytes(channels, form)

    assert [size(512, "fp8"), size(512, "nvfp4"), size(128, "mxfp4"), size(512, "f32")] == [528, 288, 68, 2048]


@pytest.mark.parametrize("form", kv_copy.FORMATS)
def test_golden_bytes(golden: Callable[[str], dict[str, Any]], device: torch.device, form: str) -> None:
    data = golden("kv_copy")
    want = data["records"][form]
    store = paged(form, 32, device)
    untouched = store.pool.clone()
    x = torch.tensor([data["x"]], device=device).bfloat16()
    kv_copy.write_records(store, torch.tensor([2 * 8 + 3], device=device), x)  # block 2, slot 3

    num_data, num_scales = len(want["data"]), len(want["scales"])
    stride = num_data + (0 if form == "mxfp4" else num_scales)
    first = 32 + 3 * stride
    first_scale = store.scale_offset + 3 * num_scales if form == "mxfp4" else first + num_data
    assert store.pool[2, first : first + num_data].tolist() == want["data"]
    assert store.pool[2, first_scale : first_scale + num_scales].tolist() == want["scales"]
    store.pool[2, first : first + num_data] = POISON
    store.pool[2, first_scale : first_scale + num_scales] = POISON
    assert torch.equal(store.pool, untouched)  # not one byte beside the record


@pytest.mark.parametrize("form", kv_copy.FORMATS)
def test_golden_values(golden: Callable[[str], dict[str, Any]], device: torch.device, form: str) -> None:
    data = golden("kv_copy")
    store = paged(form, 32, device)
    at = torch.tensor([13], device=device)
    kv_copy.write_records(store, at, torch.tensor([data["x"]], device=device).bfloat16())
    got = kv_copy.read_records(store, at)
    assert got.dtype == torch.float32
    assert got[0].tolist() == data["records"][form]["values"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e-8])
@pytest.mark.parametrize("channels", [32, 128, 512])
@pytest.mark.parametrize("form", kv_copy.FORMATS)
def test_reads_what_the_quantiser_says(
    device: torch.device, form: str, channels: int, size: float, dtype: torch.dtype
) -> None:
    store = paged(form, channels, device, blocks=12)
    for rows in (r.rows for r in ROWS):
        x = (size * torch.randn(rows, 2 * channels, device=device)).to(dtype)[:, channels:]
        ids = torch.randperm(96, device=device)[:rows]
        kv_copy.write_records(store, ids, x)
        assert torch.equal(kv_copy.read_records(store, ids), ROUNDTRIP[form](x.float()))


@pytest.mark.parametrize("form", kv_copy.FORMATS)
def test_minus_one_reads_zeros_from_poison(device: torch.device, form: str) -> None:
    store = paged(form, 64, device)
    x = torch.randn(2, 64, device=device)
    kv_copy.write_records(store, torch.tensor([9, 11], device=device), x)
    ids = torch.tensor([[9, -1], [-1, 11]], dtype=torch.int32, device=device)
    got = kv_copy.read_records(store, ids)
    assert got.shape == (2, 2, 64)
    assert torch.equal(got[0, 0], ROUNDTRIP[form](x)[0])
    assert torch.equal(got[1, 1], ROUNDTRIP[form](x)[1])
    assert torch.equal(got[0, 1], torch.zeros(64, device=device))
    assert torch.equal(got[1, 0], torch.zeros(64, device=device))
    assert kv_copy.read_records(store, ids[:0]).shape == (0, 2, 64)


@pytest.mark.parametrize("form", kv_copy.FORMATS)
def test_minus_one_is_not_stored(device: torch.device, form: str) -> None:
    store = paged(form, 64, device)
    x = torch.randn(5, 64, device=device)
    kv_copy.write_records(store, torch.tensor([-1, 9, -1, 11, -1], device=device), x)
    kept = torch.tensor([9, 11], device=device)
    assert torch.equal(kv_copy.read_records(store, kept), ROUNDTRIP[form](x[[1, 3]]))
    assert int((store.pool != POISON).any(dim=1).sum()) == 1  # both are in block 1
    kv_copy.write_records(store._replace(pool=store.pool.clone()), torch.full((5,), -1, device=device), x)


def test_records_lie_beyond_2_to_the_31(device: torch.device) -> None:
    pool = torch.empty(9, (1 << 28) + 32, dtype=torch.uint8, device=device)  # 2.25 GiB, touched in two places
    store = Paged(pool, 0, 0, 8, 64, "nvfp4")
    x = torch.randn(2, 64, device=device)
    ids = torch.tensor([8 * 8 + 7, 0], device=device)
    kv_copy.write_records(store, ids, x)
    assert torch.equal(kv_copy.read_records(store, ids), quant.roundtrip_nvfp4(x))


def test_pool_may_be_part_of_a_larger_one(device: torch.device) -> None:
    store = paged("nvfp4", 64, device)
    whole = torch.full((6, store.pool.shape[1] + 96), POISON, dtype=torch.uint8, device=device)
    inner = store._replace(pool=whole[:, 96:])
    x = torch.randn(3, 64, device=device)
    ids = torch.tensor([0, 17, 47], device=device)
    kv_copy.write_records(inner, ids, x)
    assert torch.equal(kv_copy.read_records(inner, ids), quant.roundtrip_nvfp4(x))
    assert (whole[:, :96] == POISON).all()


@given(
    st.sampled_from(kv_copy.FORMATS),
    st.lists(st.lists(st.integers(0, 47), min_size=0, max_size=12, unique=True), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_last_write_wins(form: str, writes: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    store, held = paged(form, 32, torch.device("cpu")), {}
    for ids in writes:
        x = torch.randn(len(ids), 32, generator=generator)
        kv_copy.write_records(store, torch.tensor(ids, dtype=torch.int64), x)
        held.update(zip(ids, ROUNDTRIP[form](x), strict=True))
    for at, row in held.items():
        assert torch.equal(kv_copy.read_records(store, torch.tensor([at]))[0], row)


# ---- rings -----------------------------------------------------------------------------------------------------------


def ring(form: str, channels: int, slots: int, rows: int, device: torch.device) -> Ring:
    record = kv_copy.data_bytes(channels, form) + kv_copy.scale_bytes(channels, form)
    return Ring(torch.full((slots, rows, record), POISON, dtype=torch.uint8, device=device), channels, form)


def row_of(store: Ring, slots: list[int], positions: list[int]) -> Tensor:
    device = store.bytes.device
    return kv_copy.read_ring(store, torch.tensor(slots, device=device), torch.tensor(positions, device=device))


def test_ring_bytes_are_the_record(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    data = golden("kv_copy")
    store = ring("fp8", 32, 2, 5, device)
    at = torch.tensor([1], device=device)
    kv_copy.ring_write(
        store, torch.tensor([data["x"]], device=device).bfloat16(), at, torch.tensor([13], device=device)
    )
    want = data["records"]["fp8"]
    assert store.bytes[1, 13 % 5].tolist() == want["data"] + want["scales"]
    assert int((store.bytes != POISON).any(2).sum()) == 1
    assert row_of(store, [1], [13])[0].tolist() == want["values"]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 23])
def test_long_chunk_leaves_its_last_rows(device: torch.device, length: int) -> None:
    store = ring("f32", 32, 3, 5, device)
    kw = torch.randn(length + 2, 32, device=device)
    slots = torch.tensor([1] * length + [2] * 2, device=device)
    positions = torch.tensor([7 + i for i in range(length)] + [0, 1], device=device)
    kv_copy.ring_write(store, kw, slots, positions)
    for i in range(max(length - 5, 0), length):
        assert torch.equal(row_of(store, [1], [7 + i])[0], kw[i])
    assert torch.equal(row_of(store, [2, 2], [0, 1]), kw[length:])
    assert (store.bytes[0] == POISON).all()


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, list[list[tuple[int, int]]]]:
    """(window, ring rows, steps); a step is a list of (sequence, tokens)."""
    window = draw(st.integers(1, 9))
    rows = draw(st.integers(max(window - 1, 1), window + 4))
    step = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=3, unique_by=lambda c: c[0])
    return window, rows, draw(st.lists(step, min_size=1, max_size=6))


@given(schedules(), st.sampled_from(["fp8", "f32"]), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_windows_of_any_chunking_equal_the_whole(
    schedule: tuple[int, int, list[list[tuple[int, int]]]], form: str, dtype: torch.dtype
) -> None:
    window, rows, steps = schedule
    store = ring(form, 32, 4, rows, torch.device("cpu"))
    slot_of = (3, 1, 2)
    written: list[list[Tensor]] = [[], [], []]
    generator = torch.Generator().manual_seed(7)
    for step in steps:
        slots = tuple(slot_of[sequence] for sequence, _ in step)
        firsts = tuple(len(written[sequence]) for sequence, _ in step)
        starts = tuple(sum(n for _, n in step[:i]) for i in range(len(step) + 1))
        kw = ROUNDTRIP[form](torch.randn(starts[-1], 32, generator=generator).to(dtype))
        got, begin, count = kv_copy.window_rows(store, kw, slots, firsts, starts, window)
        assert got.dtype == dtype
        row_slots, positions = [], []
        for (sequence, tokens), start in zip(step, starts[:-1], strict=True):
            for i in range(tokens):
                written[sequence].append(kw[start + i])
                at = len(written[sequence]) - 1
                row_slots.append(slot_of[sequence])
                positions.append(at)
                first, num = int(begin[start + i]), int(count[start + i])
                assert torch.equal(got[first : first + num], torch.stack(written[sequence][max(0, at + 1 - window) :]))
        kv_copy.ring_write(store, kw, torch.tensor(row_slots), torch.tensor(positions))


def test_window_rows_lays_history_then_own_rows(device: torch.device) -> None:
    store = ring("f32", 32, 2, 8, device)
    old = torch.randn(6, 32, device=device)
    kv_copy.ring_write(store, old, torch.ones(6, dtype=torch.int64, device=device), torch.arange(6, device=device))
    kw = torch.randn(2, 32, device=device)
    rows, begin, count = kv_copy.window_rows(store, kw, (1,), (6,), (0, 2), 4)
    assert torch.equal(rows, torch.cat([old[3:], kw]))
    assert (begin.tolist(), count.tolist()) == ([0, 1], [4, 4])


def test_empty_step(device: torch.device) -> None:
    store = ring("fp8", 32, 2, 8, device)
    kw = torch.empty(0, 32, device=device)
    rows, begin, count = kv_copy.window_rows(store, kw, (), (), (0,), 4)
    assert (rows.shape, begin.shape, count.shape) == ((0, 32), (0,), (0,))
    kv_copy.ring_write(store, kw, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def test_gradient_passes_to_the_steps_own_rows(device: torch.device) -> None:
    store = ring("f32", 32, 3, 8, device)
    kw = torch.randn(4, 32, device=device, requires_grad=True)
    store.bytes.zero_()
    rows, _, _ = kv_copy.window_rows(store, kw, (1, 2), (3, 1), (0, 1, 4), 4)
    rows.sum().backward()
    assert kw.grad is not None
    assert torch.equal(kw.grad, torch.ones_like(kw))


def test_plan_made_in_inference_serves_training(device: torch.device) -> None:
    store = ring("f32", 32, 3, 8, device)
    kw = torch.randn(3, 32, device=device)
    with torch.inference_mode():
        kv_copy.window_rows(store, kw, (2, 1), (5, 2), (0, 1, 3), 3)
    kw.requires_grad_()
    rows, begin, _ = kv_copy.window_rows(store, kw, (2, 1), (5, 2), (0, 1, 3), 3)
    rows[begin].square().sum().backward()


# ---- carries ---------------------------------------------------------------------------------------------------------


# (sequence, first position, rows) of each chunk; one goes back over rejected rows, one is longer than a carry
STEPS = (
    ((0, 0, 3), (1, 0, 9)),
    ((1, 9, 1), (0, 3, 4)),
    ((0, 4, 3), (2, 0, 1)),
    ((2, 1, 2), (1, 10, 2), (0, 7, 1)),
    ((0, 8, 4), (1, 12, 1), (2, 3, 17)),
)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_groups_of_any_chunking_equal_the_whole(device: torch.device, ratio: int) -> None:
    carry = torch.full((4, ratio + 3, 2, 24), float("nan"), device=device)
    written = [torch.full((2, 20, 24), float("nan"), device=device) for _ in range(3)]
    slot_of = (3, 1, 2)
    for chunks in STEPS:
        where = [
            (slot_of[sequence], first + i, first, sum(n for _, _, n in chunks[:c]))
            for c, (sequence, first, count) in enumerate(chunks)
            for i in range(count)
        ]
        where += [(0, 0, 0, len(where) + i) for i in range(3)]  # padding
        rows = kv_copy.Rows(*torch.tensor(where, device=device).unbind(1))
        ab = torch.randn(len(where), 2, 24, device=device)
        a, b = ab.unbind(1)
        row = 0
        for sequence, first, count in chunks:
            written[sequence][:, first : first + count] = ab[row : row + count].transpose(0, 1)
            row += count
        groups = kv_copy.close_groups(a, b, carry, rows, ratio)
        row = 0
        for sequence, first, count in chunks:
            for position in range(first, first + count):
                if (position + 1) % ratio == 0:
                    for part in range(2):
                        whole = written[sequence][part, position + 1 - ratio : position + 1]
                        assert torch.equal(groups[part][row], whole)
                row += 1


def test_carry_of_an_empty_step(device: torch.device) -> None:
    none, empty = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, 24, device=device)
    carry = torch.zeros(2, 3, 2, 24, device=device)
    a, b = kv_copy.close_groups(empty, empty, carry, kv_copy.Rows(none, none, none, none), 2)
    assert (a.shape, b.shape) == ((0, 2, 24), (0, 2, 24))


def test_refuses() -> None:
    store = paged("fp8", 32, torch.device("cpu"))
    one, row = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 32)
    with pytest.raises(ShapeError, match="write_records: ids, values"):
        kv_copy.write_records(store, one, torch.zeros(1, 31))
    with pytest.raises(ShapeError, match="read_records: format"):
        kv_copy.read_records(store._replace(format="fp7"), one)
    with pytest.raises(ShapeError, match="read_records: pool"):
        kv_copy.read_records(store._replace(pool=store.pool.int()), one)
    with pytest.raises(ShapeError, match="read_records: block_bytes"):
        kv_copy.read_records(store._replace(entries=99), one)
    with pytest.raises(ShapeError, match="read_records: block_bytes"):
        kv_copy.read_records(store._replace(format="mxfp4", scale_offset=store.pool.shape[1]), one)
    window = ring("fp8", 32, 2, 4, torch.device("cpu"))
    with pytest.raises(ShapeError, match="ring_write: kw"):
        kv_copy.ring_write(window, torch.zeros(1, 31), one, one)
    with pytest.raises(ShapeError, match="ring_write: slots"):
        kv_copy.ring_write(window, row, one[:0], one)
    with pytest.raises(ShapeError, match="read_ring: format"):
        kv_copy.read_ring(window._replace(format="nvfp4"), one, one)
    with pytest.raises(ShapeError, match="read_ring: ring"):
        kv_copy.read_ring(window._replace(channels=64), one, one)
    with pytest.raises(ShapeError, match="read_ring: positions"):
        kv_copy.read_ring(window, one, one[:0])
    rows, carry = kv_copy.Rows(one, one, one, one), torch.zeros(2, 3, 2, 32)
    with pytest.raises(ShapeError, match="close_groups: a"):
        kv_copy.close_groups(row, row[:, :16], carry, rows, 2)
    with pytest.raises(ShapeError, match="close_groups: ratio"):
        kv_copy.close_groups(row, row, carry, rows, 4)
    with pytest.raises(ShapeError, match="window_rows: window"):
        kv_copy.window_rows(window, row, (1,), (0,), (0, 1), 6)
    with pytest.raises(ShapeError, match="window_rows: slots"):
        kv_copy.window_rows(window, row, (1,), (0,), (0, 2), 4)
    with pytest.raises(ShapeError, match="window_rows: kw"):
        kv_copy.window_rows(window, torch.zeros(1, 31), (1,), (0,), (0, 1), 4)
