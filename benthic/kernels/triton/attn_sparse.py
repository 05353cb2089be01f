"""Triton versions of `kernels/attn_sparse.py`; the contract is there. Source: model specification, section 2.5.

A program takes one row, up to 64 of its heads and one span of its list of keys: first the window, oldest first, then
the records. Heads are the M side of both products, so a tile of keys is unpacked once into shared memory and serves all
heads twice: as keys (q @ tile^T) and as values (p @ tile). Spans of a row are merged by a second kernel, in order.

At 64 heads of 512 a key is 131 kFLOP on 288 bytes (NVFP4) or 528 (FP8): compute bound at any number of rows. That shape
has a kernel of its own on Hopper, in attn_sparse_hopper.py; `_attend` here is for any other.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import attn_sparse as plain
from benthic.kernels import backends, kv_copy
from benthic.kernels.triton.gemm import launch, start
from benthic.kernels.triton.quant import INTERPRETED, bound, e2m1_value, e4m3_value, e8m0_value, narrow, widen
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two

try:  # its dialect is not in every version of Triton
    from benthic.kernels.triton import attn_sparse_hopper
except ImportError:
    attn_sparse_hopper = None

_PEAK_START: tl.constexpr = tl.constexpr(-1e30)
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

# Eight E2M1 codes of a word and their scale, twice in a register -> eight bf16. A code's sign goes to bit 15, its
# magnitude to bits 8..6, where bf16 reads the value times 2^-126, subnormal or not. Codes 16 bits apart are moved by
# one multiplication: their bits cannot run into each other.
_UNPACK_E2M1: tl.constexpr = tl.constexpr("""
{
.reg .b32 word, a, b, c, d, unit;
mov.b32 unit, 0x7E807E80;
shr.u32 word, $8, 8;
and.b32 a, $8, 0x000F000F;
and.b32 b, $8, 0x00F000F0;
and.b32 c, word, 0x000F000F;
and.b32 d, word, 0x00F000F0;
mul.lo.u32 a, a, 0x1040;
mul.lo.u32 b, b, 0x0104;
mul.lo.u32 c, c, 0x1040;
mul.lo.u32 d, d, 0x0104;
and.b32 a, a, 0x81C081C0;
and.b32 b, b, 0x81C081C0;
and.b32 c, c, 0x81C081C0;
and.b32 d, d, 0x81C081C0;
mul.rn.bf16x2 a, a, unit;
mul.rn.bf16x2 b, b, unit;
mul.rn.bf16x2 c, c, unit;
mul.rn.bf16x2 d, d, unit;
mul.rn.bf16x2 a, a, $9;
mul.rn.bf16x2 b, b, $9;
mul.rn.bf16x2 c, c, $9;
mul.rn.bf16x2 d, d, $9;
mov.b32 {$0, $4}, a;
mov.b32 {$1, $5}, b;
mov.b32 {$2, $6}, c;
mov.b32 {$3, $7}, d;
}
""")


# Keys: records at offsets `at` [N] -> [N, WIDTH] in DTYPE, zeros where not live. Nothing else is read.


@triton.jit
def _fp8_keys(bytes_ptr, at, live, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    GROUPS: tl.constexpr = WIDTH // 32
    codes = tl.load(bytes_ptr + at[:, None] + tl.arange(0, WIDTH)[None, :], mask=live[:, None], other=0)
    scales = tl.load(bytes_ptr + at[:, None] + WIDTH + tl.arange(0, GROUPS)[None, :], mask=live[:, None], other=0)
    values = e4m3_value(codes.to(tl.float8e4nv, bitcast=True))
    values = tl.reshape(values, (at.shape[0], GROUPS, 32)) * e8m0_value(scales)[:, :, None]
    return narrow(tl.reshape(values, (at.shape[0], WIDTH)), DTYPE)


@triton.jit
def _nvfp4_keys(bytes_ptr, words_ptr, at, live, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """`at` in words. A word has eight channels, the first in its lowest nibble; a scale serves two words."""
    WORDS: tl.constexpr = WIDTH // 8
    N: tl.constexpr = at.shape[0]
    words = tl.load(words_ptr + at[:, None] + tl.arange(0, WORDS)[None, :], mask=live[:, None], other=0)
    scale_at = at[:, None] * 4 + (WIDTH // 2 + tl.arange(0, WORDS // 2)[None, :])
    scales = tl.load(bytes_ptr + scale_at, mask=live[:, None], other=0).to(tl.float8e4nv, bitcast=True)
    scales = tl.broadcast_to(e4m3_value(scales)[:, :, None], (N, WORDS // 2, 2))
    scales = tl.reshape(scales, (N, WORDS))
    if INTERPRETED or tl.bfloat16 != DTYPE:
        shifts = tl.arange(0, 8) * 4
        values = e2m1_value((words[:, :, None] >> shifts[None, None, :]) & 15) * scales[:, :, None]
        return narrow(tl.reshape(values, (N, WIDTH)), DTYPE)
    pair = (scales.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001
    c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
        _UNPACK_E2M1,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, pair],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))  # [N, WORDS, 4s, 2s]
    odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.reshape(tl.join(even, odd), (N, WIDTH))


@triton.jit
def _float_keys(values_ptr, at, live, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    values = tl.load(values_ptr + at[:, None] + tl.arange(0, WIDTH)[None, :], mask=live[:, None], other=0.0)
    return values if values.dtype == DTYPE else narrow(widen(values), DTYPE)


@triton.jit
def _product(a, b, acc):
    """acc + a @ b in f32. The interpreter takes bf16 for integers."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), acc)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _take(q, keys, live, m, total, acc, scale, ROUND: tl.constexpr):
    """One tile of keys into the running softmax: peak m and sum `total` [M], values acc [M, WIDTH], all base 2."""
    scores = _product(q, tl.trans(keys), tl.zeros((q.shape[0], keys.shape[0]), tl.float32))
    scores = tl.where(live[None, :], scores * scale, -float("inf"))
    peak = tl.maximum(m, tl.max(scores, axis=1))
    shrink = tl.exp2(m - peak)
    p = tl.exp2(scores - peak[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None]
    if keys.dtype == tl.float32:
        p = widen(narrow(p, tl.bfloat16)) if ROUND else p
        acc = _product(p, keys, acc)
    else:
        high = narrow(p, tl.bfloat16)
        acc = _product(high, keys, acc)
        if not ROUND:  # two terms hold 16 bits of a probability
            acc = _product(narrow(p - widen(high), tl.bfloat16), keys, acc)
    return peak, total, acc


@triton.jit(do_not_specialize=["spans", "span_tiles"])
def _attend(
    q_ptr,  # [T, H, WIDTH]
    kw_ptr,  # [N, WIDTH]
    ring_ptr,  # bytes, or floats for "f32"
    pool_bytes_ptr,
    pool_ptr,  # bytes, words for "nvfp4" or floats for "f32"
    slots_ptr,  # [T] each: `kv_copy.Rows`, or slots unused, (position, first) -> (count, begin) without a ring
    positions_ptr,
    firsts_ptr,
    starts_ptr,
    lows_ptr,
    records_ptr,  # [T, listed]
    sink_ptr,
    out_ptr,  # [T, H, WIDTH]
    part_ptr,  # [T, spans, H, WIDTH] f32, peaks and sums [T, spans, H] f32
    peaks_ptr,
    sums_ptr,
    heads,
    ring_rows,
    ring_stride,  # in units of its pointer, as all of these
    ring_record,
    pool_stride,
    pool_offset,
    pool_record,
    listed,
    scale,
    spans,
    span_tiles,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    LOWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    RING: tl.constexpr,
    POOL: tl.constexpr,
    RING_ALIGN: tl.constexpr,
    POOL_ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,  # one span
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    t = tl.program_id(0).to(tl.int64) // spans
    span = tl.program_id(0) % spans
    head = tl.program_id(1) * M + tl.arange(0, M)
    channel = tl.arange(0, WIDTH)
    slot_of_tile = tl.arange(0, TILE)
    q_at = (t * heads + head)[:, None] * WIDTH + channel[None, :]
    q = tl.load(q_ptr + q_at, mask=(head < heads)[:, None], other=0.0)
    if q.dtype != DTYPE:
        q = narrow(widen(q), DTYPE)
    m = tl.full((M,), _PEAK_START, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, WIDTH), tl.float32)
    log_scale = scale * _LOG2E

    # the window: place j has position oldest + j; before the chunk it is in the ring, else row base + j of kw
    position = tl.load(positions_ptr + t)
    first = tl.load(firsts_ptr + t)
    if RING == "none":
        count, stored, oldest, base, slot = position, first * 0, first * 0, first, first * 0
    else:
        oldest = tl.maximum(position - (WINDOW - 1), tl.load(lows_ptr + t) if LOWS else 0)
        count = position - oldest + 1
        stored = tl.minimum(tl.maximum(first - oldest, 0), count)
        base = tl.load(starts_ptr + t) + oldest - first
        slot = tl.load(slots_ptr + t)
    WINDOW_TILES: tl.constexpr = (WINDOW + TILE - 1) // TILE
    tiles = tl.cdiv(count, TILE).to(tl.int32)
    begin = span * span_tiles
    for tile in range(bound(begin), bound(tl.minimum(begin + span_tiles, tiles))):
        place = tile * TILE + slot_of_tile
        live = place < count
        own = live & (place >= stored)
        keys = _float_keys(kw_ptr, (base + place) * WIDTH, own, WIDTH, DTYPE)
        if RING != "none" and tile * TILE < stored:
            old = live & (place < stored)
            at = tl.multiple_of(slot * ring_stride + (oldest + place) % ring_rows * ring_record, RING_ALIGN)
            if RING == "fp8":
                kept = _fp8_keys(ring_ptr, at, old, WIDTH, DTYPE)
            else:
                kept = _float_keys(ring_ptr, at, old, WIDTH, DTYPE)
            keys = tl.where(old[:, None], kept, keys)
        m, total, acc = _take(q, keys, live, m, total, acc, log_scale, ROUND)

    if POOL != "none":
        begin = tl.maximum(begin - WINDOW_TILES, 0)
        end = tl.minimum((span + 1) * span_tiles - WINDOW_TILES, tl.cdiv(listed, TILE))
        for tile in range(bound(begin), bound(end)):
            place = tile * TILE + slot_of_tile
            record = tl.load(records_ptr + t * listed + place, mask=place < listed, other=-1).to(tl.int64)
            live = record >= 0
            if tl.max(record, axis=0) >= 0:
                at = pool_offset + record // ENTRIES * pool_stride + record % ENTRIES * pool_record
                at = tl.multiple_of(at, POOL_ALIGN)
                if POOL == "nvfp4":
                    keys = _nvfp4_keys(pool_bytes_ptr, pool_ptr, at, live, WIDTH, DTYPE)
                elif POOL == "fp8":
                    keys = _fp8_keys(pool_ptr, at, live, WIDTH, DTYPE)
                else:
                    keys = _float_keys(pool_ptr, at, live, WIDTH, DTYPE)
                m, total, acc = _take(q, keys, live, m, total, acc, log_scale, ROUND)

    if WHOLE:
        sink = tl.load(sink_ptr + head, mask=head < heads, other=0.0).to(tl.float32)
        acc = acc / (total + tl.exp2(tl.minimum(sink * _LOG2E - m, 126.0)))[:, None]
        tl.store(out_ptr + q_at, narrow(acc, out_ptr.dtype.element_ty), mask=(head < heads)[:, None])
    else:
        part = (t * spans + span) * heads + head
        tl.store(part_ptr + part[:, None] * WIDTH + channel[None, :], acc, mask=(head < heads)[:, None])
        tl.store(peaks_ptr + part, m, mask=head < heads)
        tl.store(sums_ptr + part, total, mask=head < heads)


@triton.jit
def _merge(
    part_ptr,
    peaks_ptr,
    sums_ptr,
    sink_ptr,
    out_ptr,
    heads,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    SPANS: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Spans of a row, first to last, over their common peak; the sink joins the denominator.

    ORDERED False: of each eight channels the parts have 0 4 1 5 2 6 3 7.
    """
    start(PDL)
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * M + tl.arange(0, M)
    live = head < heads
    peak = tl.full((M,), _PEAK_START, tl.float32)
    for span in tl.static_range(SPANS):
        peak = tl.maximum(peak, tl.load(peaks_ptr + (t * SPANS + span) * heads + head, mask=live, other=_PEAK_START))
    total = tl.exp2(tl.minimum(tl.load(sink_ptr + head, mask=live, other=0.0).to(tl.float32) * _LOG2E - peak, 126.0))
    acc = tl.zeros((M, WIDTH), tl.float32)
    for span in tl.static_range(SPANS):
        part = (t * SPANS + span) * heads + head
        weight = tl.exp2(tl.load(peaks_ptr + part, mask=live, other=_PEAK_START) - peak)
        total += tl.load(sums_ptr + part, mask=live, other=0.0) * weight
        at = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        acc += tl.load(part_ptr + at, mask=live[:, None], other=0.0) * weight[:, None]
    if not ORDERED:
        acc = tl.reshape(tl.permute(tl.reshape(acc, (M, WIDTH // 8, 4, 2)), (0, 1, 3, 2)), (M, WIDTH))
    to = (t * heads + head)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out_ptr + to, narrow(acc / total[:, None], out_ptr.dtype.element_ty), mask=live[:, None])


# The ops


def spans(programs: int, tiles: int, processors: int) -> int:
    """Into how many spans a row's list is cut, for `programs` rows times blocks of heads: what takes the least time.

    In units of one tile: 0.7 to begin and end a program; where spans are merged 0.5 for another kernel, and 1.75 to
    carry one unfinished output of every processor to memory and back.
    """

    def cost(count: int) -> float:
        waves = -(-programs * count // processors)
        merging = 0.5 + 1.75 * programs * count / processors if count > 1 else 0.0
        return waves * (0.7 + -(-tiles // count)) + merging

    return min(range(1, tiles + 1), key=lambda count: (cost(count), count))


def _align(tensor: Tensor, *offsets: int) -> int:
    """Largest power of two up to 16 that divides the tensor's address and all offsets, in bytes."""
    bits = tensor.data_ptr() | 16
    for offset in offsets:
        bits |= offset
    return bits & -bits


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache(maxsize=8)
def _is_hopper(device: torch.device) -> bool:
    """Without a GPU and outside the interpreter kernels are only compiled, for Hopper."""
    if INTERPRETED.value or attn_sparse_hopper is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


class _Records(NamedTuple):
    """Records as a kernel addresses them: two views of the same bytes and numbers in units of the second."""

    bytes: Tensor
    units: Tensor
    unit: int  # bytes
    align: int  # units that divide every record's offset
    record: int  # units a record


def _records(form: str, channels: int, storage: Tensor, *offsets: int) -> _Records | None:
    """storage uint8, last axis contiguous. None where the kernels cannot read it."""
    record = kv_copy.data_bytes(channels, form) + kv_copy.scale_bytes(channels, form)
    strides = [s for size, s in zip(storage.shape[:-1], storage.stride()[:-1], strict=True) if size > 1]
    align = _align(storage, record, *strides, *offsets)
    if form == "fp8":
        return _Records(storage, storage, 1, align, record)
    if align < 4 or storage.shape[-1] % 4 or form not in ("nvfp4", "f32"):
        return None
    units = storage.view(torch.int32 if form == "nvfp4" else torch.float32)
    return _Records(storage, units, 4, align // 4, record // 4)


def _launch(
    q: Tensor,
    kw: Tensor,
    ring: kv_copy.Ring | None,
    rows: kv_copy.Rows,
    window: int,
    paged: kv_copy.Paged | None,
    records: Tensor | None,
    sink: Tensor,
    scale: float,
    round_probs: bool,
) -> Tensor | None:
    """None where the kernels do not apply: a width that is no power of two, bytes that are not aligned to words."""
    total, heads, width = q.shape
    if width < 32 or width & (width - 1) or q.dtype not in (torch.float32, torch.bfloat16):
        return None
    kept = None if ring is None else _records(ring.format, width, ring.bytes)
    stored = None if paged is None else _records(paged.format, width, paged.pool, paged.data_offset)
    if (ring is not None and kept is None) or (paged is not None and stored is None):
        return None
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not out.numel():
        return out

    forms = ("none" if ring is None else ring.format, "none" if paged is None else paged.format)
    wide = q.dtype == torch.float32 or kw.dtype == torch.float32 or "f32" in forms
    hopper = (
        not wide
        and (width, heads % 64, forms[0]) == (512, 0, "fp8")
        and forms[1] in ("none", "nvfp4")
        and window <= 128
        and all(x is None or x.align * x.unit == 16 for x in (kept, stored))
        and (paged is None or paged.entries & (paged.entries - 1) == 0)
        and _is_hopper(q.device)
    )
    block = 64 if hopper else 16 if wide else min(64, max(16, power_of_two(heads)))
    tile = 128 if hopper else max(16, min(64, 8192 // width)) if wide else 64
    blocks = cdiv(heads, block)
    listed = 0 if records is None else records.shape[1]
    tiles = cdiv(window, tile) + cdiv(listed, tile)
    count = 1
    if ring is not None and not backends.is_invariant():
        count = spans(total * blocks, tiles, _processors(q.device))
    part = q.new_empty((total, count, heads, width) if count > 1 else 0, dtype=torch.float32)
    peaks, sums = q.new_empty((2, total, count, heads) if count > 1 else (2, 0), dtype=torch.float32)
    q, kw, sink = q.contiguous(), kw.contiguous(), sink.contiguous()
    slots, positions, firsts, starts = (x.contiguous() for x in rows[:4])
    lows = slots if rows.lows is None else rows.lows.contiguous()
    records = slots if records is None else records.contiguous()
    ends = (slots, positions, firsts, starts, lows, records, sink, out, part, peaks, sums, heads)
    ring_units, ring_rows = (kw, 1) if ring is None or kept is None else (kept.units, ring.bytes.shape[1])
    pool_units, pool_at = (
        (kw, 0) if paged is None or stored is None else (stored.units, paged.data_offset // stored.unit)
    )
    if hopper:
        attn_sparse_hopper.attend[(total * count, blocks)](
            q,
            kw.view(torch.int32),
            ring_units.view(torch.int32),
            ring_units,
            pool_units.view(torch.int32),
            *ends,
            ring_rows,
            ring_units.stride(0) // 4,
            pool_units.stride(0),
            pool_at,
            listed,
            scale,
            count,
            cdiv(tiles, count),
            WINDOW=window,
            LOWS=rows.lows is not None,
            ENTRY_BITS=0 if paged is None else paged.entries.bit_length() - 1,
            WHOLE=count == 1,
            ROUND=round_probs,
            num_warps=8,
            **launch(),
        )
    else:
        _attend[(total * count, blocks)](
            q,
            kw,
            ring_units,
            kw if stored is None else stored.bytes,
            pool_units,
            *ends,
            ring_rows,
            ring_units.stride(0),
            0 if kept is None else kept.record,
            pool_units.stride(0),
            pool_at,
            0 if stored is None else stored.record,
            listed,
            scale,
            count,
            cdiv(tiles, count) if ring is not None else 1 << 20,
            WIDTH=width,
            M=block,
            TILE=tile,
            WINDOW=window,
            LOWS=rows.lows is not None,
            ENTRIES=1 if paged is None else paged.entries,
            RING=forms[0],
            POOL=forms[1] if listed else "none",
            RING_ALIGN=1 if kept is None else kept.align,
            POOL_ALIGN=1 if stored is None else stored.align,
            WHOLE=count == 1,
            ROUND=round_probs,
            DTYPE=tl.float32 if wide else tl.bfloat16,
            num_warps=8 if block * width >= 16384 else 4,
            num_stages=1,
            **launch(),
        )
    if count > 1:
        most = max(1, 2048 // width)
        _merge[(total, cdiv(heads, most))](
            part,
            peaks,
            sums,
            sink,
            out,
            heads,
            WIDTH=width,
            M=most,
            SPANS=count,
            ORDERED=not hopper,
            num_warps=4,
            **launch(),
        )
    return out


def attend(
    q: Tensor,
    kw: Tensor,
    ring: kv_copy.Ring,
    rows: kv_copy.Rows,
    window: int,
    paged: kv_copy.Paged | None,
    records: Tensor | None,
    sink: Tensor,
    scale: float,
    round_probs: bool,
) -> Tensor:
    out = _launch(q, kw, ring, rows, window, paged, records, sink, scale, round_probs)
    if out is None:
        return plain.attend_reference(q, kw, ring, rows, window, paged, records, sink, scale, round_probs)
    return out


def sink_attention(
    q: Tensor,
    rows: Tensor,
    begin: Tensor,
    count: Tensor,
    paged: kv_copy.Paged | None,
    records: Tensor | None,
    sink: Tensor,
    scale: float,
    round_probs: bool,
) -> Tensor:
    where = kv_copy.Rows(count, count, begin, begin)
    out = _launch(q, rows, None, where, 0, paged, records, sink, scale, round_probs)
    if out is None:
        return plain.sink_attention_reference(q, rows, begin, count, paged, records, sink, scale, round_probs)
    return out
