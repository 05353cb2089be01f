"""Whole numbers of a step against plain Python."""

import pytest
import torch

from benthic.errors import ShapeError
from benthic.kernels.rows import begin_rows, end_rows, group_records


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_begin(device: torch.device, count: int, kept: int) -> None:
    """Each row its own slot; the last two rows of five and more are padding. One of the two has a pending id."""
    slots = count + 1
    rows = [(40 + i if i % 3 else -1, 2 * i, i + 1) for i in range(count)]
    if count >= 5:
        rows[-2:] = [(0, 0, 0)] * 2
    changes = [((7 * i) % (4 * slots), 100 + i) if i % 2 else (0, 0) for i in range(count)]
    told = torch.tensor([[*row, *change] for row, change in zip(rows, changes, strict=True)], dtype=torch.int64)
    told = told.reshape(count, 5).T.contiguous().to(device)
    tables = torch.full((slots, 4), 9, dtype=torch.int32, device=device)
    last = torch.arange(slots, device=device) + 1000
    history = torch.arange(slots * kept, device=device).reshape(slots, kept)
    got = begin_rows(told, tables, last, history)
    assert got.ids.tolist() == [1000 + slot if id < 0 else id for id, _, slot in rows]
    assert got.history.shape == (count, kept)
    want = [[slot * kept + i if position > i else -1 for i in range(kept)] for _, position, slot in rows]
    assert got.history.tolist() == want
    assert got.numbers.tolist() == list(range(count))
    assert got.following.tolist() == [position + 1 for _, position, _ in rows]
    flat = [9] * (4 * slots)
    for place, block in changes:
        flat[place] = block
    assert tables.flatten().tolist()[1:] == flat[1:]  # place 0 is padding's


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_records(device: torch.device, count: int, ratio: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tables = torch.randint(0, 2**31 - 1, (7, 9), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 8 * 16, (count,), generator=generator)
    slots = torch.randint(0, 7, (count,), generator=generator)
    visible, records = group_records(positions.to(device), slots.to(device), tables.to(device)[:, :8], 16, ratio)
    assert visible.dtype == records.dtype == torch.int64
    assert visible.tolist() == [(p + 1) // ratio for p in positions.tolist()]
    want = [
        int(tables[slot, p // 16]) * (16 // ratio) + p % 16 // ratio if (p + 1) % ratio == 0 else -1
        for p, slot in zip(positions.tolist(), slots.tolist(), strict=True)
    ]
    assert records.tolist() == want


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_end(device: torch.device, count: int, kept: int) -> None:
    """Rows in slots of their own, backwards; the last of five and more is padding."""
    slots = count + 2
    where = [slots - 1 - i for i in range(count)]
    if count >= 5:
        where[-1] = 0
    ids = torch.arange(count) + 50
    before = (torch.arange(count * kept) + 500).reshape(count, kept)
    tokens, peaks = torch.arange(count) + 9000, torch.randn(count) * 1e3
    last, history = torch.full((slots,), -5), torch.full((slots, kept), -6)
    on_device = [
        x.to(device) for x in (ids, before, torch.tensor(where, dtype=torch.int64), tokens, peaks, last, history)
    ]
    drawn = end_rows(*on_device)
    assert drawn.shape == (2, count)
    assert drawn[0].tolist() == tokens.tolist()
    assert drawn[1].view(torch.float64).tolist() == peaks.double().tolist()
    want_last, want_history = last.tolist(), history.tolist()
    for i, slot in enumerate(where):
        want_last[slot] = 9000 + i
        want_history[slot] = [50 + i, *before[i].tolist()][:kept]
    assert on_device[-2].tolist()[1:] == want_last[1:]  # slot 0 is padding's
    assert on_device[-1].tolist()[1:] == want_history[1:]


def test_refuses() -> None:
    told, tables = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int32)
    last, history = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="begin_rows: told"):
        begin_rows(told[:4], tables, last, history)
    with pytest.raises(ShapeError, match="begin_rows: tables"):
        begin_rows(told, tables, last[1:], history)
    with pytest.raises(ShapeError, match="group_records: positions"):
        group_records(told[0], told[1, :1], tables, 16, 2)
    with pytest.raises(ShapeError, match="group_records: tokens"):
        group_records(told[0], told[1], tables, 15, 2)
    peaks = torch.zeros(2)
    with pytest.raises(ShapeError, match="end_rows: ids"):
        end_rows(told[0], history[:2], told[2], told[0], peaks.double(), last, history)
    with pytest.raises(ShapeError, match="end_rows: before"):
        end_rows(told[0], history, told[2], told[0], peaks, last, history)
