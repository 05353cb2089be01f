"""Triton versions of `kernels/kv_copy.py`; contracts are there. Source: model specification, sections 2.5, 2.6 and 4.1.

A program takes ROWS rows of one width, whatever rows there are. `put_record` is also the last step of fused kernels.
Addresses are 64-bit byte offsets. Cost: memory bound.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import kv_copy as plain
from benthic.kernels.triton.quant import (
    FLOATS,
    INTERPRETED,
    by_groups,
    e2m1_value,
    e4m3_value,
    e8m0_value,
    flat,
    pack,
    q4m,
    q4n,
    q8,
    widen,
)
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two

ROWS = 64 if INTERPRETED.value else 4  # a program; the interpreter's time goes by programs


# Records


@triton.jit
def _floats(bytes_ptr):
    return bytes_ptr.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _put(bytes_ptr, at, values, live, width):
    """values uint8 [R, N] to `width` bytes from each offset on."""
    col = tl.arange(0, values.shape[1])[None, :]
    tl.store(bytes_ptr + at[:, None] + col, values, mask=live[:, None] & (col < width))


@triton.jit
def put_record(bytes_ptr, at, scale_at, x, live, CHANNELS: tl.constexpr, FORMAT: tl.constexpr):
    """Quantise rows x f32 [R, N], N >= CHANNELS, 0 beyond, and store them. at, scale_at [R]: offsets in bytes."""
    if FORMAT == "f32":
        col = tl.arange(0, x.shape[1])[None, :]
        tl.store(_floats(bytes_ptr + at)[:, None] + col, x, mask=live[:, None] & (col < CHANNELS))
    elif FORMAT == "fp8":
        codes, scale = q8(by_groups(x, 32))
        _put(bytes_ptr, at, flat(codes).to(tl.uint8, bitcast=True), live, CHANNELS)
        _put(bytes_ptr, scale_at, scale.to(tl.uint8), live, CHANNELS // 32)
    elif FORMAT == "mxfp4":
        codes, scale = q4m(by_groups(x, 32))
        _put(bytes_ptr, at, pack(flat(codes)), live, CHANNELS // 2)
        _put(bytes_ptr, scale_at, scale.to(tl.uint8), live, CHANNELS // 32)
    else:
        codes, scale = q4n(by_groups(x, 16))
        _put(bytes_ptr, at, pack(flat(codes)), live, CHANNELS // 2)
        _put(bytes_ptr, scale_at, scale.to(tl.uint8, bitcast=True), live, CHANNELS // 16)


@triton.jit
def _get(bytes_ptr, at, live, width, N: tl.constexpr):
    col = tl.arange(0, N)[None, :]
    return tl.load(bytes_ptr + at[:, None] + col, mask=live[:, None] & (col < width), other=0)


@triton.jit
def get_record(bytes_ptr, at, scale_at, live, CHANNELS: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr):
    """f32 [R, N], zeros where a row is not live and beyond CHANNELS."""
    if FORMAT == "f32":
        col = tl.arange(0, N)[None, :]
        return tl.load(_floats(bytes_ptr + at)[:, None] + col, mask=live[:, None] & (col < CHANNELS), other=0.0)
    if FORMAT == "fp8":
        codes = _get(bytes_ptr, at, live, CHANNELS, N).to(tl.float8e4nv, bitcast=True)
        scale = e8m0_value(_get(bytes_ptr, scale_at, live, CHANNELS // 32, N // 32))
        return flat(by_groups(e4m3_value(codes), 32) * scale[:, :, None])
    pairs = _get(bytes_ptr, at, live, CHANNELS // 2, N // 2).to(tl.int32)
    codes = flat(tl.join(pairs & 15, pairs >> 4))
    if FORMAT == "mxfp4":
        scale = e8m0_value(_get(bytes_ptr, scale_at, live, CHANNELS // 32, N // 32))
        return flat(by_groups(e2m1_value(codes), 32) * scale[:, :, None])
    scale = e4m3_value(_get(bytes_ptr, scale_at, live, CHANNELS // 16, N // 16).to(tl.float8e4nv, bitcast=True))
    return flat(by_groups(e2m1_value(codes), 16) * scale[:, :, None])


@triton.jit
def record_offsets(
    ids,
    block_stride,
    data_offset,
    scale_offset,
    ENTRIES: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    APART: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Record ids int64, 0 and up -> offsets of their data and scales, `data_offset` and so on as in `kv_copy.Paged`."""
    block = ids // ENTRIES
    slot = ids - block * ENTRIES
    if APART:
        at = block * block_stride + data_offset + slot * DATA
        return tl.multiple_of(at, ALIGN), block * block_stride + scale_offset + slot * SCALES
    at = tl.multiple_of(block * block_stride + data_offset + slot * (DATA + SCALES), ALIGN)
    return at, at + DATA


@triton.jit(do_not_specialize=["rows"])
def _write_records(
    bytes_ptr,
    ids_ptr,
    values_ptr,
    rows,
    row_stride,
    block_stride,
    data_offset,
    scale_offset,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    ENTRIES: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    APART: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ids = tl.load(ids_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    live = ids >= 0
    col = tl.arange(0, N)[None, :]
    x = widen(tl.load(values_ptr + row[:, None] * row_stride + col, mask=live[:, None] & (col < CHANNELS), other=0.0))
    ids = tl.where(live, ids, 0)
    at, scale_at = record_offsets(
        ids, block_stride, data_offset, scale_offset, ENTRIES, DATA, SCALES, APART, ALIGN
    )  # fmt: skip
    put_record(bytes_ptr, at, scale_at, x, live, CHANNELS, FORMAT)


@triton.jit(do_not_specialize=["rows"])
def _read_records(
    bytes_ptr,
    ids_ptr,
    out_ptr,
    rows,
    block_stride,
    data_offset,
    scale_offset,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    ENTRIES: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    APART: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ids = tl.load(ids_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    live = ids >= 0
    ids = tl.where(live, ids, 0)
    at, scale_at = record_offsets(
        ids, block_stride, data_offset, scale_offset, ENTRIES, DATA, SCALES, APART, ALIGN
    )  # fmt: skip
    x = get_record(bytes_ptr, at, scale_at, live, CHANNELS, N, FORMAT)
    col = tl.arange(0, N)[None, :]
    tl.store(out_ptr + row[:, None] * CHANNELS + col, x, mask=(row < rows)[:, None] & (col < CHANNELS))


@triton.jit
def _ring_offsets(slots, positions, slot_stride, row_stride, ring_rows, ALIGN: tl.constexpr):
    place = positions % ring_rows
    place = tl.where(place < 0, place + ring_rows, place)
    return tl.multiple_of(slots * slot_stride + place * row_stride, ALIGN)


@triton.jit
def last_of_place(slots_ptr, row, live, rows, places):
    """Is this the last row of the step to take its place? Its chunk goes on `places` rows later, or it does not."""
    slot = tl.load(slots_ptr + row, mask=live, other=0)
    later = tl.load(slots_ptr + row + places, mask=live & (row + places < rows), other=-1)
    return slot, live & (later != slot)


@triton.jit(do_not_specialize=["rows"])
def _ring_write(
    bytes_ptr,
    kw_ptr,
    slots_ptr,
    positions_ptr,
    rows,
    kw_stride,
    slot_stride,
    row_stride,
    ring_rows,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    DATA: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot, live = last_of_place(slots_ptr, row, row < rows, rows, ring_rows)
    position = tl.load(positions_ptr + row, mask=live, other=0)
    at = _ring_offsets(slot, position, slot_stride, row_stride, ring_rows, ALIGN)
    col = tl.arange(0, N)[None, :]
    x = widen(tl.load(kw_ptr + row[:, None] * kw_stride + col, mask=live[:, None] & (col < CHANNELS), other=0.0))
    put_record(bytes_ptr, at, at + DATA, x, live, CHANNELS, FORMAT)


@triton.jit(do_not_specialize=["rows"])
def _read_ring(
    bytes_ptr,
    slots_ptr,
    positions_ptr,
    out_ptr,
    rows,
    slot_stride,
    row_stride,
    ring_rows,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    DATA: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    slot = tl.load(slots_ptr + row, mask=live, other=0)
    position = tl.load(positions_ptr + row, mask=live, other=0)
    at = _ring_offsets(slot, position, slot_stride, row_stride, ring_rows, ALIGN)
    x = get_record(bytes_ptr, at, at + DATA, live, CHANNELS, N, FORMAT)
    col = tl.arange(0, N)[None, :]
    tl.store(out_ptr + row[:, None] * CHANNELS + col, x, mask=live[:, None] & (col < CHANNELS))


# Carries


@triton.jit
def group_member(
    ptr,
    carry_ptr,
    row,
    slot,
    position,
    start,
    back,
    col,
    live,
    row_stride,
    CARRIED: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(a, PART 0, or b, PART 1) of the row `back` before: from this step, or, before its chunk, from the carry."""
    source = row - back
    here = source >= start
    place = (position - back) % CARRIED
    place = tl.where(place < 0, place + CARRIED, place)
    new = tl.load(ptr + source * row_stride + col, mask=live & here, other=0.0)
    old = tl.load(carry_ptr + ((slot * CARRIED + place) * 2 + PART) * WIDTH + col, mask=live & (here == 0), other=0.0)
    return tl.where(here, widen(new), old)


@triton.jit
def _close_groups(
    a_ptr,
    b_ptr,
    carry_ptr,
    slots_ptr,
    positions_ptr,
    starts_ptr,
    a_out_ptr,
    b_out_ptr,
    a_stride,
    b_stride,
    RATIO: tl.constexpr,
    CARRIED: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, position, start = tl.load(slots_ptr + row), tl.load(positions_ptr + row), tl.load(starts_ptr + row)
    col = tl.arange(0, N)
    live = col < WIDTH
    for i in tl.static_range(RATIO):
        back = RATIO - 1 - i
        to = (row * RATIO + i) * WIDTH + col
        a = group_member(
            a_ptr, carry_ptr, row, slot, position, start, back, col, live, a_stride, CARRIED, 0, WIDTH
        )  # fmt: skip
        b = group_member(
            b_ptr, carry_ptr, row, slot, position, start, back, col, live, b_stride, CARRIED, 1, WIDTH
        )  # fmt: skip
        tl.store(a_out_ptr + to, a, mask=live)
        tl.store(b_out_ptr + to, b, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _carry(
    a_ptr,
    b_ptr,
    carry_ptr,
    slots_ptr,
    positions_ptr,
    rows,
    a_stride,
    b_stride,
    CARRIED: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, last = last_of_place(slots_ptr, row, row < rows, rows, CARRIED)
    if last:
        col = tl.arange(0, N)
        live = col < WIDTH
        to = carry_ptr + (slot * CARRIED + tl.load(positions_ptr + row) % CARRIED) * 2 * WIDTH + col
        tl.store(to, tl.load(a_ptr + row * a_stride + col, mask=live), mask=live)
        tl.store(to + WIDTH, tl.load(b_ptr + row * b_stride + col, mask=live), mask=live)


# The ops


class Record(NamedTuple):
    """What the kernels must know of a format when they are compiled."""

    channels: int
    padded: int  # channels up to a power of two
    form: str
    data: int  # bytes
    scales: int
    align: int  # divides every record's offset, 16 at most; in bytes


def record_of(channels: int, form: str, storage: Tensor, *offsets: int) -> Record:
    """offsets: bytes that every record's place is a sum of multiples of."""
    data, scales = plain.data_bytes(channels, form), plain.scale_bytes(channels, form)
    step = data if form == "mxfp4" else data + scales
    bits = 16 | storage.data_ptr() | step
    for offset in offsets:
        bits |= offset
    return Record(channels, max(power_of_two(channels), 32), form, data, scales, bits & -bits)


def paged_record(paged: plain.Paged) -> Record:
    return record_of(paged.channels, paged.format, paged.pool, paged.pool.stride(0), paged.data_offset)


def ring_record(ring: plain.Ring) -> Record:
    return record_of(ring.channels, ring.format, ring.bytes, ring.bytes.stride(0), ring.bytes.stride(1))


def _rows(x: Tensor) -> Tensor:
    """x [T, C] with adjacent channels."""
    return x if x.stride(1) == 1 else x.contiguous()


def _warps(padded: int) -> int:
    return max(1, min(ROWS * padded // 512, 8))


def write_records(paged: plain.Paged, ids: Tensor, values: Tensor) -> None:
    if values.dtype not in FLOATS:
        return plain.write_records_reference(paged, ids, values)
    values, ids, record = _rows(values), ids.contiguous(), paged_record(paged)
    if values.shape[0]:
        _write_records[(cdiv(values.shape[0], ROWS),)](
            paged.pool,
            ids,
            values,
            values.shape[0],
            values.stride(0),
            paged.pool.stride(0),
            paged.data_offset,
            paged.scale_offset,
            CHANNELS=record.channels,
            N=record.padded,
            FORMAT=record.form,
            ENTRIES=paged.entries,
            DATA=record.data,
            SCALES=record.scales,
            APART=record.form == "mxfp4",
            ALIGN=record.align,
            ROWS=ROWS,
            num_warps=_warps(record.padded),
        )
    return None


def read_records(paged: plain.Paged, ids: Tensor) -> Tensor:
    ids, record = ids.contiguous(), paged_record(paged)
    out = torch.empty(*ids.shape, record.channels, dtype=torch.float32, device=paged.pool.device)
    if ids.numel():
        _read_records[(cdiv(ids.numel(), ROWS),)](
            paged.pool,
            ids,
            out,
            ids.numel(),
            paged.pool.stride(0),
            paged.data_offset,
            paged.scale_offset,
            CHANNELS=record.channels,
            N=record.padded,
            FORMAT=record.form,
            ENTRIES=paged.entries,
            DATA=record.data,
            SCALES=record.scales,
            APART=record.form == "mxfp4",
            ALIGN=record.align,
            ROWS=ROWS,
            num_warps=_warps(record.padded),
        )
    return out


def ring_write(ring: plain.Ring, kw: Tensor, slots: Tensor, positions: Tensor) -> None:
    if kw.dtype not in FLOATS or ring.bytes.stride(2) != 1:
        return plain.ring_write_reference(ring, kw, slots, positions)
    kw, record = _rows(kw), ring_record(ring)
    if kw.shape[0]:
        _ring_write[(cdiv(kw.shape[0], ROWS),)](
            ring.bytes,
            kw,
            slots.contiguous(),
            positions.contiguous(),
            kw.shape[0],
            kw.stride(0),
            ring.bytes.stride(0),
            ring.bytes.stride(1),
            ring.bytes.shape[1],
            CHANNELS=record.channels,
            N=record.padded,
            FORMAT=record.form,
            DATA=record.data,
            ALIGN=record.align,
            ROWS=ROWS,
            num_warps=_warps(record.padded),
        )
    return None


def read_ring(ring: plain.Ring, slots: Tensor, positions: Tensor) -> Tensor:
    if ring.bytes.stride(2) != 1:
        return plain.read_ring_reference(ring, slots, positions)
    record = ring_record(ring)
    out = torch.empty(*slots.shape, record.channels, dtype=torch.float32, device=ring.bytes.device)
    if slots.numel():
        _read_ring[(cdiv(slots.numel(), ROWS),)](
            ring.bytes,
            slots.contiguous(),
            positions.contiguous(),
            out,
            slots.numel(),
            ring.bytes.stride(0),
            ring.bytes.stride(1),
            ring.bytes.shape[1],
            CHANNELS=record.channels,
            N=record.padded,
            FORMAT=record.form,
            DATA=record.data,
            ALIGN=record.align,
            ROWS=ROWS,
            num_warps=_warps(record.padded),
        )
    return out


def carry_rows(a: Tensor, b: Tensor, carry: Tensor, slots: Tensor, positions: Tensor) -> None:
    """The carry takes this step's last rows. By itself, after whatever reads what it held: rows take others' places."""
    count, width = a.shape
    padded = power_of_two(width)
    if count:
        _carry[(count,)](
            a,
            b,
            carry,
            slots,
            positions,
            count,
            a.stride(0),
            b.stride(0),
            CARRIED=carry.shape[1],
            WIDTH=width,
            N=padded,
            num_warps=max(1, min(padded // 256, 4)),
        )


def close_groups(a: Tensor, b: Tensor, carry: Tensor, rows: plain.Rows, ratio: int) -> tuple[Tensor, Tensor]:
    if not (a.dtype == b.dtype == carry.dtype == torch.float32 and carry.is_contiguous()):
        return plain.close_groups_reference(a, b, carry, rows, ratio)
    a, b = _rows(a), _rows(b)
    count, width = a.shape
    slots, positions = rows.slots.contiguous(), rows.positions.contiguous()
    groups = tuple(torch.empty(count, ratio, width, dtype=a.dtype, device=a.device) for _ in range(2))
    padded = power_of_two(width)
    if count:
        _close_groups[(count,)](
            a,
            b,
            carry,
            slots,
            positions,
            rows.starts.contiguous(),
            *groups,
            a.stride(0),
            b.stride(0),
            RATIO=ratio,
            CARRIED=carry.shape[1],
            WIDTH=width,
            N=padded,
            num_warps=max(1, min(padded // 256, 4)),
        )
        carry_rows(a, b, carry, slots, positions)
    return groups[0], groups[1]
