"""Triton versions of `kernels/compress.py`; contracts are there. Source: model specification, sections 2.6 and 2.7.

`compress_store` is one kernel from products to the stored record and the latent, and one that brings the carry up: rows
of this step take the places of rows that others still read. Bits of a row depend on the row alone. Cost: memory bound,
at 512 channels and ratio 2 about 4 kB read and 1.3 kB written a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import compress as plain
from benthic.kernels import kv_copy as records
from benthic.kernels.triton.kv_copy import carry_rows, group_member, paged_record, put_record, record_offsets
from benthic.kernels.triton.quant import FLOATS, INTERPRETED, narrow, widen
from benthic.kernels.triton.rope import turn, turn_pairs
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two
from benthic.kernels.triton.swiglu import exponential

ROWS = 16 if INTERPRETED.value else 1  # a program; the interpreter's time goes by programs
MOST = 8  # tokens of a group that a program keeps in registers


@triton.jit
def _pooled(values, logits, RATIO: tl.constexpr):
    """Tuples of RATIO tensors -> their mean, weighted with a softmax of the logits."""
    peak = logits[0]
    for i in tl.static_range(1, RATIO):
        peak = tl.maximum(peak, logits[i], propagate_nan=tl.PropagateNan.ALL)
    total = exponential(logits[0] - peak)
    mean = total * values[0]
    for i in tl.static_range(1, RATIO):
        weight = exponential(logits[i] - peak)
        total += weight
        mean += weight * values[i]
    return tl.div_rn(mean, total)


@triton.jit(do_not_specialize=["groups"])
def _pool_groups(
    a_ptr,
    b_ptr,
    y_ptr,
    groups,
    width,
    a_group,
    a_token,
    b_group,
    b_token,
    RATIO: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
):
    group = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, N)[None, :]
    live = (group < groups) & (col < width)
    values, logits = (), ()
    for i in tl.static_range(RATIO):
        value = tl.load(a_ptr + group * a_group + i * a_token + col, mask=live, other=0.0)
        logit = tl.load(b_ptr + group * b_group + i * b_token + col, mask=live, other=0.0)
        values = values + (widen(value),)  # noqa: RUF005, the compiler knows no starred tuples
        logits = logits + (widen(logit),)  # noqa: RUF005
    tl.store(y_ptr + group * width + col, _pooled(values, logits, RATIO), mask=live)


def pool_groups(a: Tensor, b: Tensor) -> Tensor:
    groups, ratio, width = a.shape
    if ratio > MOST or a.dtype not in FLOATS or b.dtype not in FLOATS:
        return plain.pool_groups_reference(a, b)
    a, b = (x if x.stride(2) == 1 else x.contiguous() for x in (a, b))
    y = torch.empty(groups, width, dtype=torch.float32, device=a.device)
    padded = power_of_two(width)
    if y.numel():
        _pool_groups[(cdiv(groups, ROWS),)](
            a,
            b,
            y,
            groups,
            width,
            a.stride(0),
            a.stride(1),
            b.stride(0),
            b.stride(1),
            RATIO=ratio,
            N=padded,
            ROWS=ROWS,
            num_warps=max(1, min(padded // 256, 4)),
        )
    return y


@triton.jit(do_not_specialize=["rows"])
def _normed_record(
    a_ptr,
    b_ptr,
    carry_ptr,
    slots_ptr,
    positions_ptr,
    starts_ptr,
    weight_ptr,
    freqs_ptr,
    normed_ptr,
    bytes_ptr,
    ids_ptr,
    rows,
    a_stride,
    b_stride,
    eps,
    block_stride,
    data_offset,
    scale_offset,
    POOLED: tl.constexpr,  # rows of a group to be pooled
    GROUP: tl.constexpr,  # tokens of a group
    CARRIED: tl.constexpr,
    KEEP: tl.constexpr,  # is the normed row wanted?
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    PAIRS: tl.constexpr,
    FORMAT: tl.constexpr,
    ENTRIES: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    APART: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pool, norm, turn at the group's first token, quantise, store; nothing for a row without a record.

    The dtype of normed_ptr is the one rounded to.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    ids = tl.load(ids_ptr + row, mask=here, other=-1).to(tl.int64)
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    if tl.max(ids, axis=0) >= 0:
        position = tl.load(positions_ptr + row, mask=here, other=0)
        at_row, col = row[:, None], tl.arange(0, N)[None, :]
        live = here[:, None] & (col < CHANNELS)
        if POOLED > 1:
            slot, start = tl.load(slots_ptr + row, mask=here, other=0), tl.load(starts_ptr + row, mask=here, other=0)
            values, logits = (), ()
            for i in tl.static_range(POOLED):
                value = group_member(
                    a_ptr, carry_ptr, at_row, slot[:, None], position[:, None], start[:, None], POOLED - 1 - i,
                    col, live, a_stride, CARRIED, 0, CHANNELS,
                )  # fmt: skip
                logit = group_member(
                    b_ptr, carry_ptr, at_row, slot[:, None], position[:, None], start[:, None], POOLED - 1 - i,
                    col, live, b_stride, CARRIED, 1, CHANNELS,
                )  # fmt: skip
                values = values + (value,)  # noqa: RUF005
                logits = logits + (logit,)  # noqa: RUF005
            x = _pooled(values, logits, POOLED)
        else:
            x = widen(tl.load(a_ptr + at_row * a_stride + col, mask=live, other=0.0))
        x = widen(narrow(x, dtype))
        statistic = tl.rsqrt(tl.sum(x * x, axis=1) / CHANNELS + eps)[:, None]
        weight = widen(tl.load(weight_ptr + tl.broadcast_to(col, (ROWS, N)), mask=live, other=0.0))
        y = narrow(x * statistic * weight, dtype)
        if KEEP:
            tl.store(normed_ptr + at_row * CHANNELS + col, y, mask=live)

        first = tl.maximum(position + 1 - GROUP, 0).to(tl.float32)
        pair = tl.arange(0, N // 2) - (CHANNELS // 2 - PAIRS)
        turned = (pair >= 0) & (pair < PAIRS)
        freq = tl.load(freqs_ptr + pair, mask=turned, other=0.0)
        cos, sin = turn(first[:, None] * freq[None, :])
        even, odd = tl.split(tl.reshape(widen(y), (ROWS, N // 2, 2)))
        real, imaginary = turn_pairs(even, odd, cos, sin)
        turned = turned[None, :]
        y = tl.join(tl.where(turned, real, even), tl.where(turned, imaginary, odd))
        y = widen(narrow(tl.reshape(y, (ROWS, N)), dtype))
        at, scale_at = record_offsets(
            tl.maximum(ids, 0), block_stride, data_offset, scale_offset, ENTRIES, DATA, SCALES, APART, ALIGN
        )
        put_record(bytes_ptr, at, scale_at, y, ids >= 0, CHANNELS, FORMAT)


def _store(
    a: Tensor,
    b: Tensor | None,
    carry: Tensor | None,
    rows: records.Rows,
    ratio: int,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    paged: records.Paged,
    ids: Tensor,
    normed: Tensor | None,
    dtype: torch.dtype,
) -> None:
    count, channels = a.shape
    record = paged_record(paged)
    _normed_record[(cdiv(count, ROWS),)](
        a,
        a if b is None else b,
        a if carry is None else carry,
        rows.slots.contiguous(),
        rows.positions.contiguous(),
        rows.starts.contiguous(),
        weight.contiguous(),
        freqs.contiguous(),
        a.new_empty(0, dtype=dtype) if normed is None else normed,
        paged.pool,
        ids.contiguous(),
        count,
        a.stride(0),
        0 if b is None else b.stride(0),
        eps,
        paged.pool.stride(0),
        paged.data_offset,
        paged.scale_offset,
        POOLED=1 if b is None else ratio,
        GROUP=ratio,
        CARRIED=1 if carry is None else carry.shape[1],
        KEEP=normed is not None,
        CHANNELS=channels,
        N=record.padded,
        PAIRS=freqs.shape[0],
        FORMAT=record.form,
        ENTRIES=paged.entries,
        DATA=record.data,
        SCALES=record.scales,
        APART=record.form == "mxfp4",
        ALIGN=record.align,
        ROWS=ROWS,
        num_warps=max(1, min(record.padded // 256, 4)),
    )


def compress_store(
    a: Tensor,
    b: Tensor | None,
    carry: Tensor | None,
    rows: records.Rows,
    ratio: int,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    paged: records.Paged,
    ids: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    pooled = b is not None and carry is not None
    floats = (a,) if b is None or carry is None else (a, b, carry)
    if ratio > MOST or dtype not in FLOATS or any(x.dtype not in FLOATS or x.stride(-1) != 1 for x in floats):
        return plain.compress_store_reference(a, b, carry, rows, ratio, weight, eps, freqs, paged, ids, dtype)
    if pooled and not carry.is_contiguous():
        return plain.compress_store_reference(a, b, carry, rows, ratio, weight, eps, freqs, paged, ids, dtype)
    latent = torch.empty(a.shape, dtype=dtype, device=a.device)
    if a.shape[0]:
        _store(a, b, carry, rows, ratio, weight, eps, freqs, paged, ids, latent, dtype)
        if pooled:
            carry_rows(a, b, carry, rows.slots.contiguous(), rows.positions.contiguous())
    return latent


def key_store(
    k: Tensor,
    rows: records.Rows,
    ratio: int,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    paged: records.Paged,
    ids: Tensor,
) -> None:
    if k.dtype not in FLOATS or k.stride(1) != 1:
        return plain.key_store_reference(k, rows, ratio, weight, eps, freqs, paged, ids)
    if k.shape[0]:
        _store(k, None, None, rows, ratio, weight, eps, freqs, paged, ids, None, k.dtype)
    return None
