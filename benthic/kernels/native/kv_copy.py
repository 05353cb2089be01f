"""C versions of `kernels/kv_copy.py`; the contracts are there. Records in float32 take the reference.

Bytes written are those of the quantisers; rows read are exactly the stored values.
"""

import ctypes
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from benthic.kernels import kv_copy as plain
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available
from benthic.kernels.native.quant import FORMATS

_write_records = build.function("benthic_write_records", "plllllippllii")
_read_records = build.function("benthic_read_records", "plllllippli")
_ring_write = build.function("benthic_ring_write", "pllppplli")
_read_ring = build.function("benthic_read_ring", "pllpppli")
_window_rows = build.function("benthic_window_rows", "pllplpllppl")


def _fits(channels: int, form: str) -> bool:
    return form in FORMATS and channels % 32 == 0 and channels <= 1024


def write_records(paged: plain.Paged, ids: Tensor, values: Tensor) -> None:
    wide = build.wide(values)
    if wide is None or not _fits(paged.channels, paged.format):
        plain.write_records_reference(paged, ids, values)
        return
    values, ids = build.rows_of(values), ids.long().contiguous()
    _write_records(
        paged.pool.data_ptr(),
        paged.pool.stride(0),
        paged.data_offset,
        paged.scale_offset,
        paged.entries,
        paged.channels,
        FORMATS[paged.format],
        ids.data_ptr(),
        values.data_ptr(),
        ids.shape[0],
        values.stride(0),
        wide,
        build.threads(),
    )


def read_records(paged: plain.Paged, ids: Tensor) -> Tensor:
    if not _fits(paged.channels, paged.format):
        return plain.read_records_reference(paged, ids)
    ids = ids.long().contiguous()
    out = torch.empty((*ids.shape, paged.channels), dtype=torch.float32)
    _read_records(
        paged.pool.data_ptr(),
        paged.pool.stride(0),
        paged.data_offset,
        paged.scale_offset,
        paged.entries,
        paged.channels,
        FORMATS[paged.format],
        ids.data_ptr(),
        out.data_ptr(),
        ids.numel(),
        build.threads(),
    )
    return out


def _ring_fits(ring: plain.Ring) -> bool:
    return ring.format == "fp8" and _fits(ring.channels, "fp8") and ring.bytes.is_contiguous()


def ring_write(ring: plain.Ring, kw: Tensor, slots: Tensor, positions: Tensor) -> None:
    wide = build.wide(kw)
    if wide is None or not _ring_fits(ring):
        plain.ring_write_reference(ring, kw, slots, positions)
        return
    kw, slots, positions = build.rows_of(kw), slots.long().contiguous(), positions.long().contiguous()
    _ring_write(
        ring.bytes.data_ptr(),
        ring.bytes.shape[1],
        ring.channels,
        kw.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        kw.shape[0],
        kw.stride(0),
        wide,
    )


def read_ring(ring: plain.Ring, slots: Tensor, positions: Tensor) -> Tensor:
    if not _ring_fits(ring):
        return plain.read_ring_reference(ring, slots, positions)
    slots, positions = slots.long().contiguous(), positions.long().contiguous()
    out = torch.empty((*slots.shape, ring.channels), dtype=torch.float32)
    _read_ring(
        ring.bytes.data_ptr(),
        ring.bytes.shape[1],
        ring.channels,
        slots.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        slots.numel(),
        1,
    )
    return out


def window_rows(
    ring: plain.Ring, kw: Tensor, slots: tuple[int, ...], firsts: tuple[int, ...], starts: tuple[int, ...], window: int
) -> tuple[Tensor, Tensor, Tensor]:
    if kw.dtype is not build.BF16 or not _ring_fits(ring):
        return plain.window_rows_reference(ring, kw, slots, firsts, starts, window)
    chunks, history = _geometry(slots, firsts, starts, window)
    kw = build.rows_of(kw)
    total = kw.shape[0]
    out = kw if not history else torch.empty((history + total, ring.channels), dtype=kw.dtype)
    reach = torch.empty((2, total), dtype=torch.int64)  # begin, count
    _window_rows(
        ring.bytes.data_ptr(),
        ring.bytes.shape[1],
        ring.channels,
        kw.data_ptr(),
        kw.stride(0),
        ctypes.addressof(chunks),
        len(slots),
        window,
        out.data_ptr() if history else None,
        reach.data_ptr(),
        total,
    )
    return out, reach[0], reach[1]


@lru_cache(maxsize=8)
def _geometry(
    slots: tuple[int, ...], firsts: tuple[int, ...], starts: tuple[int, ...], window: int
) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    """(slot, first position, first row, rows) of each chunk, and how many stored rows all windows reach back to."""
    flat = [x for c, (start, end) in enumerate(pairwise(starts)) for x in (slots[c], firsts[c], start, end - start)]
    return (ctypes.c_int64 * len(flat))(*flat), sum(min(first, window - 1) for first in firsts)
