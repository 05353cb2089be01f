"""Records of the cache: written into blocks and rings as packed bytes, read back as float32 rows.

Source: model specification, sections 4.1 (records) and 2.5 (window). Where a record lies in a block is the caller's
layout; how its bytes read is this file's. Formats:

    "fp8"    channels E4M3 codes, then channels/32 UE8M0 scales; one record after another
    "nvfp4"  channels/2 bytes of E2M1 pairs (low nibble = even channel), then channels/16 E4M3 scales; one after another
    "mxfp4"  channels/2 bytes a record for all records, and apart from them channels/32 UE8M0 scales a record
    "f32"    channels float32
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, quant

FORMATS = ("fp8", "nvfp4", "mxfp4", "f32")


class Paged(NamedTuple):
    """One layer's records in the block pool. Record id = block * entries + slot."""

    pool: Tensor  # [blocks, block_bytes] uint8, shared by all layers
    data_offset: int  # bytes from the start of a block to the first record's data
    scale_offset: int  # to the first record's scales; read for "mxfp4" only
    entries: int  # records a block
    channels: int
    format: str


class Ring(NamedTuple):
    """One layer's window KV. Position p of a sequence lies in row p mod rows of its slot."""

    bytes: Tensor  # [slots, rows, record_bytes] uint8
    channels: int
    format: str  # "fp8" or "f32"


class Rows(NamedTuple):
    """Where each row of a step stands, on the device. A padding row has slot 0 and position 0."""

    slots: Tensor  # [T] int64 state slot of the row's sequence
    positions: Tensor  # [T] int64 absolute
    firsts: Tensor  # [T] int64 position of the first row of its chunk
    starts: Tensor  # [T] int64 number of that row in the step
    lows: Tensor | None = None  # [T] int64 position below which the row sees no window row; None: 0 for all


# ---- bytes of one record ---------------------------------------------------------------------------------------------


def data_bytes(channels: int, form: str) -> int:
    """Bytes of a record's values."""
    return {"fp8": channels, "nvfp4": channels // 2, "mxfp4": channels // 2, "f32": 4 * channels}[form]


def scale_bytes(channels: int, form: str) -> int:
    """Bytes of a record's scales."""
    return {"fp8": channels // 32, "nvfp4": channels // 16, "mxfp4": channels // 32, "f32": 0}[form]


def pack(values: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """values [G, channels] -> bytes of the data [G, data_bytes] and of the scales [G, scale_bytes], uint8."""
    if form == "f32":
        data = values.float().contiguous().view(torch.uint8)
        return data, data.new_empty(data.shape[0], 0)
    if form == "fp8":
        data, scales = quant.quantise_fp8(values)
    elif form == "mxfp4":
        data, scales = quant.quantise_mxfp4(values)
    else:
        data, scales = quant.quantise_nvfp4(values)
    return data.view(torch.uint8), scales.view(torch.uint8)


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """[256] int64: the two float32 values in a byte of E2M1 codes, the low nibble's first, side by side."""
    with torch.inference_mode(False):
        every_byte = torch.arange(256, dtype=torch.uint8, device=device).view(16, 16)
        ones = torch.full((16, 1), 127, dtype=torch.uint8, device=device)  # 2^0
        return quant.dequantise_mxfp4(every_byte, ones).view(256, 2).view(torch.int64).flatten()


def unpack(data: Tensor, scales: Tensor, form: str) -> Tensor:
    """Bytes as `pack` makes them, [..., data_bytes] and [..., scale_bytes] -> f32 [..., channels]."""
    data, scales = data.contiguous(), scales.contiguous()
    if form == "f32":
        return data.view(torch.float32)
    if form == "fp8":
        return quant.dequantise_fp8(data.view(quant.E4M3), scales)
    codes = _pairs(data.device).index_select(0, data.flatten().int()).view(torch.float32)  # one lookup for two channels
    factors = quant.e8m0_value(scales) if form == "mxfp4" else scales.view(quant.E4M3).float()
    group = 2 * data.shape[-1] // scales.shape[-1]
    return (codes.view(*scales.shape, group) * factors.unsqueeze(-1)).flatten(-2)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _check_paged(op: str, paged: Paged) -> None:
    if paged.format not in FORMATS:
        raise ShapeError(f"{op}: format", want=" or ".join(FORMATS), got=paged.format)
    if paged.pool.ndim != 2 or paged.pool.dtype != torch.uint8 or paged.pool.stride(1) != 1:
        got = (tuple(paged.pool.shape), paged.pool.dtype)
        raise ShapeError(f"{op}: pool", want="[blocks, block_bytes] uint8, rows contiguous", got=got)
    data, scale = data_bytes(paged.channels, paged.format), scale_bytes(paged.channels, paged.format)
    end = paged.data_offset + paged.entries * (data if paged.format == "mxfp4" else data + scale)
    if paged.format == "mxfp4":
        end = max(end, paged.scale_offset + paged.entries * scale)
    if end > paged.pool.shape[1]:
        raise ShapeError(f"{op}: block_bytes", want=f"at least {end} for its records", got=paged.pool.shape[1])


def _region(paged: Paged, offset: int, width: int) -> Tensor:
    """[blocks, entries, width] view of the pool: `width` bytes a record from `offset` on."""
    return paged.pool.narrow(1, offset, paged.entries * width).unflatten(1, (paged.entries, width))


def write_records_reference(paged: Paged, ids: Tensor, values: Tensor) -> None:
    kept = ids >= 0
    if not bool(kept.all()):
        ids, values = ids[kept], values[kept]
    block, slot = ids // paged.entries, ids % paged.entries
    data, scales = pack(values, paged.format)
    if paged.format == "mxfp4":
        _region(paged, paged.data_offset, data.shape[1])[block, slot] = data
        _region(paged, paged.scale_offset, scales.shape[1])[block, slot] = scales
    else:
        record = torch.cat([data, scales], dim=1)
        _region(paged, paged.data_offset, record.shape[1])[block, slot] = record


def write_records(paged: Paged, ids: Tensor, values: Tensor) -> None:
    """Quantise rows and store them in the pool.

    ids     [G] int64, each record at most once; -1: the row is not stored. G may be 0.
    values  [G, channels] bf16 or f32, any strides.
    Error   none: the bytes are those of `quant`'s quantisers.
    Cost    memory bound.
    Raises  ShapeError.
    """
    _check_paged("write_records", paged)
    if ids.ndim != 1 or values.shape != (ids.shape[0], paged.channels):
        got = (tuple(ids.shape), tuple(values.shape))
        raise ShapeError("write_records: ids, values", want=f"[G], [G, {paged.channels}]", got=got)
    run = backends.pick("write_records", paged.pool) or write_records_reference
    run(paged, ids, values)


def _bytes_at(pool: Tensor, at: Tensor, width: int) -> Tensor:
    """`width` bytes from each offset: at [...] int64, counted from the start of the pool -> [..., width]."""
    span = (pool.shape[0] - 1) * pool.stride(0) + pool.shape[1]
    windows = pool.as_strided((span - width + 1, width), (1, 1))  # one a byte, overlapping: a row is one copy
    return windows.index_select(0, at.flatten()).view(*at.shape, width)


def read_records_reference(paged: Paged, ids: Tensor) -> Tensor:
    kept = ids.long().clamp(min=0)
    start, slot = kept // paged.entries * paged.pool.stride(0), kept % paged.entries
    data, scale = data_bytes(paged.channels, paged.format), scale_bytes(paged.channels, paged.format)
    if paged.format == "mxfp4":
        codes = _bytes_at(paged.pool, start + paged.data_offset + slot * data, data)
        scales = _bytes_at(paged.pool, start + paged.scale_offset + slot * scale, scale)
    else:
        record = _bytes_at(paged.pool, start + paged.data_offset + slot * (data + scale), data + scale)
        codes, scales = record[..., :data], record[..., data:]
    return unpack(codes, scales, paged.format).masked_fill_((ids < 0).unsqueeze(-1), 0.0)


def read_records(paged: Paged, ids: Tensor) -> Tensor:
    """Rows of the pool.

    ids      [...] int64 or int32; -1 reads zeros, whatever the memory holds.
    returns  f32 [..., channels], exactly the stored values.
    Cost     memory bound.
    Raises   ShapeError.
    """
    _check_paged("read_records", paged)
    run = backends.pick("read_records", paged.pool) or read_records_reference
    return run(paged, ids)


# ---- rings -----------------------------------------------------------------------------------------------------------


def _check_ring(op: str, ring: Ring) -> None:
    if ring.format not in ("fp8", "f32"):
        raise ShapeError(f"{op}: format", want="fp8 or f32", got=ring.format)
    record = data_bytes(ring.channels, ring.format) + scale_bytes(ring.channels, ring.format)
    if ring.bytes.ndim != 3 or ring.bytes.dtype != torch.uint8 or ring.bytes.shape[2] != record:
        got = (tuple(ring.bytes.shape), ring.bytes.dtype)
        raise ShapeError(f"{op}: ring", want=f"[slots, rows, {record}] uint8", got=got)


def read_ring_reference(ring: Ring, slots: Tensor, positions: Tensor) -> Tensor:
    record = ring.bytes[slots, positions % ring.bytes.shape[1]]
    data = data_bytes(ring.channels, ring.format)
    return unpack(record[..., :data], record[..., data:], ring.format)


def read_ring(ring: Ring, slots: Tensor, positions: Tensor) -> Tensor:
    """Rows of the ring, whatever lies there.

    slots, positions  [...] int64, same shape. A position below 0 reads the row it would wrap to.
    returns           f32 [..., channels].
    Raises            ShapeError.
    """
    _check_ring("read_ring", ring)
    if slots.shape != positions.shape:
        raise ShapeError("read_ring: positions", want=tuple(slots.shape), got=tuple(positions.shape))
    run = backends.pick("read_ring", ring.bytes) or read_ring_reference
    return run(ring, slots, positions)


def ring_write_reference(ring: Ring, kw: Tensor, slots: Tensor, positions: Tensor) -> None:
    rows = ring.bytes.shape[1]
    if kw.shape[0] > rows:  # a row of the same chunk `rows` further on takes the same place: keep only the later one
        kept = torch.ones_like(slots, dtype=torch.bool)
        kept[:-rows] = slots[rows:] != slots[:-rows]
        kw, slots, positions = kw[kept], slots[kept], positions[kept]
    data, scales = pack(kw, ring.format)
    ring.bytes[slots, positions % rows] = torch.cat([data, scales], dim=1)


def ring_write(ring: Ring, kw: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Store this step's window rows; of a chunk longer than the ring only the last rows.

    kw         [T, dh] bf16 or f32, dh = ring.channels. T may be 0.
    slots      [T] int64. The rows of one slot are adjacent, and one slot has one run of rows in a step.
    positions  [T] int64, consecutive inside a run.
    Error      none: the bytes are those of `quant.quantise_fp8`.
    Raises     ShapeError.
    """
    _check_ring("ring_write", ring)
    if kw.ndim != 2 or kw.shape[1] != ring.channels:
        raise ShapeError("ring_write: kw", want=f"[T, {ring.channels}]", got=tuple(kw.shape))
    if slots.shape != kw.shape[:1] or positions.shape != kw.shape[:1]:
        got = (tuple(slots.shape), tuple(positions.shape))
        raise ShapeError("ring_write: slots, positions", want=f"[{kw.shape[0]}] both", got=got)
    run = backends.pick("ring_write", ring.bytes) or ring_write_reference
    run(ring, kw, slots, positions)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Where each row of a step finds its window; the same for every layer of one window size. Read only."""

    slots: Tensor  # [M] int64 history rows to read from the ring
    positions: Tensor  # [M] int64
    order: Tensor | None  # [M + T] int64: row i of the result is row order[i] of (history, kw); None: as they are
    begin: Tensor  # [T] int64
    count: Tensor  # [T] int64


@lru_cache(maxsize=16)
def window_plan(
    slots: tuple[int, ...], firsts: tuple[int, ...], starts: tuple[int, ...], window: int, device: torch.device
) -> WindowPlan:
    """Work out, once a step, what `window_rows` copies. Arguments as there."""
    with torch.inference_mode(False):  # what is kept may meet autograd later
        return _window_plan(slots, firsts, starts, window, device)


def _window_plan(
    slots: tuple[int, ...], firsts: tuple[int, ...], starts: tuple[int, ...], window: int, device: torch.device
) -> WindowPlan:
    lengths = [end - start for start, end in pairwise(starts)]
    histories = [min(first, window - 1) for first in firsts]
    num_history = sum(histories)
    chunk_slots, history_start, first, length, history = (
        torch.tensor(column, dtype=torch.int64, device=device)
        for column in (slots, [f - h for f, h in zip(firsts, histories, strict=True)], firsts, lengths, histories)
    )
    row_start = torch.tensor(starts[:-1], dtype=torch.int64, device=device)
    base = history.cumsum(0) - history + row_start  # first row of each chunk in the result

    def spread(per_chunk: Tensor, repeats: Tensor, total: int) -> Tensor:
        return torch.repeat_interleave(per_chunk, repeats, output_size=total)

    in_history = torch.arange(num_history, device=device) - spread(history.cumsum(0) - history, history, num_history)
    positions = spread(history_start, history, num_history) + in_history
    rows = starts[-1]
    in_chunk = torch.arange(rows, device=device) - spread(row_start, length, rows)
    at = spread(first, length, rows) + in_chunk  # position of each row
    begin = spread(base - history_start, length, rows) + (at - window + 1).clamp(min=0)
    count = (at + 1).clamp(max=window)
    order = None
    if num_history and len(slots) > 1:
        order = torch.empty(num_history + rows, dtype=torch.int64, device=device)
        order[spread(base, history, num_history) + in_history] = torch.arange(num_history, device=device)
        order[spread(base + history, length, rows) + in_chunk] = torch.arange(rows, device=device) + num_history
    return WindowPlan(spread(chunk_slots, history, num_history), positions, order, begin, count)


def window_rows_reference(
    ring: Ring, kw: Tensor, slots: tuple[int, ...], firsts: tuple[int, ...], starts: tuple[int, ...], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    plan = window_plan(slots, firsts, starts, window, kw.device)
    if not plan.slots.shape[0]:
        return kw, plan.begin, plan.count
    rows = torch.cat([read_ring(ring, plan.slots, plan.positions).to(kw.dtype), kw])
    return rows if plan.order is None else rows[plan.order], plan.begin, plan.count


def window_rows(
    ring: Ring, kw: Tensor, slots: tuple[int, ...], firsts: tuple[int, ...], starts: tuple[int, ...], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay the rows that windows reach side by side, chunk after chunk: [stored history | this step's own rows].

    ring     read only; call `ring_write` for kw afterwards.
    kw       [T, dh] this step's rows, bf16 or f32, chunk after chunk.
    slots    C state slots; firsts C positions of the first row of each chunk; starts C+1 row offsets, starts[C] = T.
             Tuples, so that the plan made from them is found again by every layer of the step.
    window   rows a query sees, itself included; at most rows of the ring + 1.
    returns  rows [N, dh] in the dtype of kw: for each chunk up to window-1 stored rows (positions
             max(0, first-window+1) .. first-1), then its own; begin [T], count [T] int64: row t's window is
             rows[begin : begin+count], oldest first, itself last. begin and count are shared between calls: read only.
    Raises   ShapeError.
    """
    _check_ring("window_rows", ring)
    if not len(slots) == len(firsts) == len(starts) - 1 or starts[-1] != kw.shape[0]:
        got = (len(slots), len(firsts), len(starts), kw.shape[0])
        raise ShapeError("window_rows: slots, firsts, starts, kw", want="C, C, C+1 and starts[C] rows", got=got)
    if kw.ndim != 2 or kw.shape[1] != ring.channels:
        raise ShapeError("window_rows: kw", want=f"[T, {ring.channels}]", got=tuple(kw.shape))
    if window < 1 or window > ring.bytes.shape[1] + 1:
        raise ShapeError("window_rows: window", want=f"1 to {ring.bytes.shape[1] + 1}", got=window)
    run = backends.pick("window_rows", kw, ring.bytes) or window_rows_reference
    return run(ring, kw, slots, firsts, starts, window)


# ---- carries ---------------------------------------------------------------------------------------------------------


def close_groups_reference(a: Tensor, b: Tensor, carry: Tensor, rows: Rows, ratio: int) -> tuple[Tensor, Tensor]:
    count, kept = a.shape[0], carry.shape[1]
    back = torch.arange(ratio - 1, -1, -1, device=a.device)
    row = torch.arange(count, device=a.device)
    source = row[:, None] - back  # [T, r]; before the chunk's first row the carry has it
    here = (source >= rows.starts[:, None])[..., None]
    stored = carry[rows.slots[:, None], (rows.positions[:, None] - back) % kept]  # [T, r, 2, dh]
    source = source.clamp(min=0)
    groups = torch.where(here, a[source], stored[:, :, 0]), torch.where(here, b[source], stored[:, :, 1])
    later = torch.zeros(count, dtype=torch.bool, device=a.device)  # a row that takes the same place comes later
    later[: max(count - kept, 0)] = rows.slots[kept:] == rows.slots[: max(count - kept, 0)]
    last = (~later).nonzero()[:, 0]
    carry[rows.slots[last], rows.positions[last] % kept] = torch.stack([a[last], b[last]], dim=1)
    return groups


def close_groups(a: Tensor, b: Tensor, carry: Tensor, rows: Rows, ratio: int) -> tuple[Tensor, Tensor]:
    """The group that ends at each row, from this step's rows and what earlier steps left; then the carry is brought up.

    a, b     [T, dh] f32, this step's rows, chunk after chunk. T may be 0.
    carry    [slots, n, 2, dh] f32, n >= ratio: row p mod n holds (a, b) of position p. Written: the last rows of each
             chunk. Rows of one slot other than 0 form one chunk.
    rows     where the rows stand.
    returns  [T, ratio, dh] each, oldest first; for a row that ends no group, whatever lies there.
    Cost     memory bound.
    Raises   ShapeError.
    """
    if a.ndim != 2 or b.shape != a.shape or carry.ndim != 4 or carry.shape[2:] != (2, a.shape[1]):
        got = (tuple(a.shape), tuple(b.shape), tuple(carry.shape))
        raise ShapeError("close_groups: a, b, carry", want="[T, dh], [T, dh], [slots, n, 2, dh]", got=got)
    if not 1 <= ratio <= carry.shape[1]:
        raise ShapeError("close_groups: ratio", want=f"1 to {carry.shape[1]}", got=ratio)
    run = backends.pick("close_groups", a, b, carry) or close_groups_reference
    return run(a, b, carry, rows, ratio)
