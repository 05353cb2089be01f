"""Triton versions of `kernels/rows.py`; contracts are there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import rows as plain
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two

ROWS = 128  # a program


@triton.jit(do_not_specialize=["rows"])
def _begin_rows(
    told_ptr,
    tables_ptr,
    last_ptr,
    kept_ptr,
    ids_ptr,
    history_ptr,
    numbers_ptr,
    following_ptr,
    rows,
    told_stride,
    kept_stride,
    KEPT: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    told = told_ptr + row
    id = tl.load(told, mask=live, other=0)
    position = tl.load(told + told_stride, mask=live, other=0)
    slot = tl.load(told + 2 * told_stride, mask=live, other=0)
    place = tl.load(told + 3 * told_stride, mask=live, other=0)
    block = tl.load(told + 4 * told_stride, mask=live, other=0)
    tl.store(tables_ptr + place, block.to(tl.int32), mask=live)
    last = tl.load(last_ptr + slot, mask=live & (id < 0), other=0)
    tl.store(ids_ptr + row, tl.where(id < 0, last, id), mask=live)
    tl.store(numbers_ptr + row, row, mask=live)
    tl.store(following_ptr + row, position + 1, mask=live)
    if KEPT:
        back = tl.arange(0, KEPT_BLOCK)[None, :]
        asked = live[:, None] & (back < KEPT)
        known = asked & (position[:, None] > back)
        before = tl.load(kept_ptr + slot[:, None] * kept_stride + back, mask=known, other=-1)
        tl.store(history_ptr + row[:, None] * KEPT + back, before, mask=asked)


def begin_rows(told: Tensor, tables: Tensor, last_token: Tensor, history: Tensor) -> plain.Begun:
    count, kept = told.shape[1], history.shape[1]
    assert tables.is_contiguous(), "places count in the flat tables"
    told = told if told.stride(1) == 1 else told.contiguous()
    history = history if history.stride(1) == 1 else history.contiguous()
    ids, numbers, following = (torch.empty(count, dtype=torch.int64, device=told.device) for _ in range(3))
    before = torch.empty(count, kept, dtype=torch.int64, device=told.device)
    if count:
        _begin_rows[(cdiv(count, ROWS),)](
            told,
            tables,
            last_token.contiguous(),
            history,
            ids,
            before,
            numbers,
            following,
            count,
            told.stride(0),
            history.stride(0),
            KEPT=kept,
            KEPT_BLOCK=power_of_two(max(kept, 1)),
            ROWS=ROWS,
            num_warps=4,
        )
    return plain.Begun(ids, before, numbers, following)


@triton.jit(do_not_specialize=["rows"])
def _group_records(
    positions_ptr,
    slots_ptr,
    tables_ptr,
    visible_ptr,
    records_ptr,
    rows,
    table_stride,
    TOKENS: tl.constexpr,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    position = tl.load(positions_ptr + row, mask=live, other=0)
    slot = tl.load(slots_ptr + row, mask=live, other=0)
    ends = (position + 1) % RATIO == 0
    block = tl.load(tables_ptr + slot * table_stride + position // TOKENS, mask=live & ends, other=0).to(tl.int64)
    record = block * (TOKENS // RATIO) + position % TOKENS // RATIO
    tl.store(visible_ptr + row, (position + 1) // RATIO, mask=live)
    tl.store(records_ptr + row, tl.where(ends, record, -1), mask=live)


def group_records(positions: Tensor, slots: Tensor, tables: Tensor, tokens: int, ratio: int) -> tuple[Tensor, Tensor]:
    if tables.stride(1) != 1:
        return plain.group_records_reference(positions, slots, tables, tokens, ratio)
    positions, slots = positions.contiguous(), slots.contiguous()
    visible, records = torch.empty_like(positions), torch.empty_like(positions)
    if positions.shape[0]:
        _group_records[(cdiv(positions.shape[0], ROWS),)](
            positions,
            slots,
            tables,
            visible,
            records,
            positions.shape[0],
            tables.stride(0),
            TOKENS=tokens,
            RATIO=ratio,
            ROWS=ROWS,
            num_warps=4,
        )
    return visible, records


@triton.jit(do_not_specialize=["rows"])
def _end_rows(
    ids_ptr,
    before_ptr,
    slots_ptr,
    tokens_ptr,
    peaks_ptr,
    last_ptr,
    kept_ptr,
    drawn_ptr,
    rows,
    before_stride,
    kept_stride,
    KEPT: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    slot = tl.load(slots_ptr + row, mask=live, other=0)
    token = tl.load(tokens_ptr + row, mask=live, other=0)
    tl.store(last_ptr + slot, token, mask=live)
    peak = tl.load(peaks_ptr + row, mask=live, other=0.0).to(tl.float64)
    tl.store(drawn_ptr + row, token, mask=live)
    tl.store(drawn_ptr + rows + row, peak.to(tl.int64, bitcast=True), mask=live)
    if KEPT:
        back = tl.arange(0, KEPT_BLOCK)[None, :]
        asked = live[:, None] & (back < KEPT)
        older = tl.load(before_ptr + row[:, None] * before_stride + back - 1, mask=asked & (back > 0), other=0)
        own = tl.load(ids_ptr + row, mask=live, other=0)
        tl.store(kept_ptr + slot[:, None] * kept_stride + back, tl.where(back > 0, older, own[:, None]), mask=asked)


def end_rows(
    ids: Tensor, before: Tensor, slots: Tensor, tokens: Tensor, peaks: Tensor, last_token: Tensor, history: Tensor
) -> Tensor:
    rows, kept = before.shape
    adjacent = all(x.stride(-1) == 1 for x in (last_token, history) if x.numel())
    if not adjacent:
        return plain.end_rows_reference(ids, before, slots, tokens, peaks, last_token, history)
    before = before if before.stride(1) == 1 else before.contiguous()
    drawn = torch.empty(2, rows, dtype=torch.int64, device=ids.device)
    if rows:
        _end_rows[(cdiv(rows, ROWS),)](
            ids.contiguous(),
            before,
            slots.contiguous(),
            tokens.contiguous(),
            peaks.contiguous(),
            last_token,
            history,
            drawn,
            rows,
            before.stride(0),
            history.stride(0),
            KEPT=kept,
            KEPT_BLOCK=power_of_two(max(kept, 1)),
            ROWS=ROWS,
            num_warps=4,
        )
    return drawn
