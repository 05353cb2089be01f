"""Triton versions of `kernels/engram.py`; contracts are there. Bits of a row depend on nothing but the row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import engram as plain
from benthic.kernels.triton.norm import chunked
from benthic.kernels.triton.quant import FLOATS, bound, e4m3_value, e8m0_value, narrow, widen
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two
from benthic.kernels.triton.swiglu import exponential

CLASSED = 128  # tokens of `ngram_ids`, a program
TOKENS = 16  # of `ngram_rows`, a program
GATHERED = 16  # rows of the table, a program
GATES = 528  # programs of `engram_gate` at most
GROUP: tl.constexpr = tl.constexpr(32)


@triton.jit(do_not_specialize=["tokens", "pad", "image"])
def _ngram_ids(
    ids_ptr,
    history_ptr,
    classes_ptr,
    classed_ptr,
    tokens,
    id_stride,
    token_stride,
    pad,
    image,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    padding = tl.load(classes_ptr + pad)
    whole = live
    for i in tl.static_range(N):
        if i == 0:
            id = tl.load(ids_ptr + token * id_stride, mask=live, other=0)
        else:
            id = tl.load(history_ptr + token * token_stride + (i - 1), mask=live, other=0)
        whole = whole & (id >= 0) & (id != image)
        found = tl.load(classes_ptr + id, mask=whole, other=0)
        tl.store(classed_ptr + token * N + i, tl.where(whole, found, padding), mask=live)


def ngram_ids(ids: Tensor, history: Tensor, classes: Tensor, pad: int, image: int) -> Tensor:
    history = history if history.stride(1) == 1 else history.contiguous()
    tokens, n = ids.shape[0], history.shape[1] + 1
    classed = torch.empty((tokens, n), dtype=torch.int64, device=ids.device)
    if tokens:
        _ngram_ids[(cdiv(tokens, CLASSED),)](
            ids,
            history,
            classes.contiguous(),
            classed,
            tokens,
            ids.stride(0),
            history.stride(0),
            pad,
            image,
            N=n,
            TOKENS=CLASSED,
            num_warps=4,
        )
    return classed


@triton.jit(do_not_specialize=["tokens"])
def _ngram_rows(
    ids_ptr,
    multipliers_ptr,
    primes_ptr,
    offsets_ptr,
    rows_ptr,
    tokens,
    token_stride,
    id_stride,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.arange(0, HEAD_BLOCK)
    live = token < tokens
    mixed = tl.load(ids_ptr + token * token_stride, mask=live, other=0) * tl.load(multipliers_ptr)
    for size in tl.static_range(1, N):
        other = tl.load(ids_ptr + token * token_stride + size * id_stride, mask=live, other=0)
        mixed = mixed ^ (other * tl.load(multipliers_ptr + size))
        at = (size - 1) * HEADS + head
        prime = tl.load(primes_ptr + at, mask=head < HEADS, other=1)
        offset = tl.load(offsets_ptr + at, mask=head < HEADS, other=0)
        row = mixed[:, None] % prime[None, :] + offset[None, :]
        to = token[:, None] * ((N - 1) * HEADS) + at[None, :]
        tl.store(rows_ptr + to, row, mask=live[:, None] & (head < HEADS)[None, :])


def ngram_rows(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    tokens, n = ids.shape
    heads = primes.shape[1]
    rows = torch.empty((tokens, (n - 1) * heads), dtype=torch.int64, device=ids.device)
    if rows.numel():
        _ngram_rows[(cdiv(tokens, TOKENS),)](
            ids,
            multipliers.contiguous(),
            primes.contiguous(),
            offsets.contiguous(),
            rows,
            tokens,
            ids.stride(0),
            ids.stride(1),
            N=n,
            HEADS=heads,
            HEAD_BLOCK=power_of_two(heads),
            TOKENS=TOKENS,
            num_warps=4,
        )
    return rows


@triton.jit(do_not_specialize=["count"])
def _table_rows(
    codes_ptr,
    scales_ptr,
    rows_ptr,
    y_ptr,
    count,
    codes_stride,
    scales_stride,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows_ptr + number, mask=number < count, other=0)
    group = tl.arange(0, GROUP_BLOCK)
    live = (number < count)[:, None] & (group < GROUPS)[None, :]
    channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = row[:, None, None] * codes_stride + channel[None, :, :]
    codes = tl.load(codes_ptr + at, mask=live[:, :, None], other=0.0)
    scales = tl.load(scales_ptr + row[:, None] * scales_stride + group[None, :], mask=live, other=0)
    y = e4m3_value(codes) * e8m0_value(scales)[:, :, None]
    to = number[:, None, None] * (GROUPS * GROUP) + channel[None, :, :]
    tl.store(y_ptr + to, narrow(y, y_ptr.dtype.element_ty), mask=live[:, :, None])


def table_rows(codes: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    width = codes.shape[1]
    if dtype not in FLOATS or width % GROUP.value or codes.stride(1) != 1 or scales.stride(1) != 1:
        return plain.table_rows_reference(codes, scales, rows, dtype)
    y = torch.empty((*rows.shape, width), dtype=dtype, device=rows.device)
    if y.numel():
        rows = rows.contiguous()
        groups = width // GROUP.value
        _table_rows[(cdiv(rows.numel(), GATHERED),)](
            codes,
            scales,
            rows,
            y,
            rows.numel(),
            codes.stride(0),
            scales.stride(0),
            GROUPS=groups,
            GROUP_BLOCK=power_of_two(groups),
            ROWS=GATHERED,
            num_warps=4,
        )
    return y


@triton.jit
def _added(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit(do_not_specialize=["rows"])
def _engram_gate(
    s_ptr,
    keys_ptr,
    value_ptr,
    weight_ptr,
    images_ptr,
    y_ptr,
    rows,
    width,
    s_row,
    s_stream,
    keys_row,
    keys_stream,
    value_row,
    weight_stream,
    eps,
    root,
    STREAMS: tl.constexpr,
    FLOOR: tl.constexpr,
    IMAGES: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    stream = tl.program_id(0) % STREAMS  # streams of a row side by side: they share its value
    s_ptr += stream * s_stream
    keys_ptr += stream * keys_stream
    weights = ()  # loaded once: a row's are more bytes than the row
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + stream * weight_stream + col, mask=col < width, other=0.0)
        weights = weights + (weight,)  # noqa: RUF005
    first, step = tl.program_id(0) // STREAMS, tl.num_programs(0) // STREAMS
    for number in range(bound(first), bound(rows), bound(step)):
        row = tl.cast(number, tl.int64)
        streams, keys, values = (), (), ()  # all loads first
        for chunk in tl.static_range(CHUNKS):
            col = chunk * BLOCK + tl.arange(0, BLOCK)
            streams = streams + (tl.load(s_ptr + row * s_row + col, mask=col < width, other=0.0),)  # noqa: RUF005
            keys = keys + (tl.load(keys_ptr + row * keys_row + col, mask=col < width, other=0.0),)  # noqa: RUF005
        for chunk in tl.static_range(CHUNKS):
            col = chunk * BLOCK + tl.arange(0, BLOCK)
            values = values + (tl.load(value_ptr + row * value_row + col, mask=col < width, other=0.0),)  # noqa: RUF005
        stays = tl.load(images_ptr + row) != 0 if IMAGES else False
        dots = tl.zeros((BLOCK,), tl.float32)
        stream_squares = tl.zeros((BLOCK,), tl.float32)
        key_squares = tl.zeros((BLOCK,), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            x, key = widen(streams[chunk]), widen(keys[chunk])
            dots += x * widen(weights[chunk]) * key
            stream_squares += x * x
            key_squares += key * key
        dot, stream_square, key_square = tl.reduce((dots, stream_squares, key_squares), 0, _added)
        dot *= tl.rsqrt(stream_square / width + eps) * tl.rsqrt(key_square / width + eps) * root
        size = tl.sqrt(tl.maximum(tl.abs(dot), FLOOR, propagate_nan=tl.PropagateNan.ALL))
        gate = 1.0 / (1.0 + exponential(tl.where(dot < 0, size, -size)))
        for chunk in tl.static_range(CHUNKS):
            col = chunk * BLOCK + tl.arange(0, BLOCK)
            y = narrow(widen(streams[chunk]) + gate * widen(values[chunk]), y_ptr.dtype.element_ty)
            if IMAGES:
                y = tl.where(stays, streams[chunk], y)
            tl.store(y_ptr + (row * STREAMS + stream) * width + col, y, mask=col < width)


def engram_gate(
    s: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float, images: Tensor | None = None
) -> Tensor:
    if not all(x.dtype in FLOATS for x in (s, keys, value, weight)):
        return plain.engram_gate_reference(s, keys, value, weight, eps, images)
    rows, streams, width = s.shape
    y = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    if y.numel():
        s, keys, value, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (s, keys, value, weight))
        chunks, block = chunked(width)
        _engram_gate[(min(rows, GATES // streams) * streams,)](
            s,
            keys,
            value,
            weight,
            images.contiguous() if images is not None else None,
            y,
            rows,
            width,
            s.stride(0),
            s.stride(1),
            keys.stride(0),
            keys.stride(1),
            value.stride(0),
            weight.stride(0),
            eps,
            width**-0.5,
            STREAMS=streams,
            FLOOR=plain.GATE_FLOOR,
            IMAGES=images is not None,
            CHUNKS=chunks,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 16),
        )
    return y
