"""Triton version of `kernels/norm.py`; the contract is there.

A row stays in registers between its sum of squares and its result. It is taken in CHUNKS pieces of BLOCK channels,
BLOCK a power of two, so that a width such as 5120 fills its threads; the sum is chunk after chunk in a thread, then
over threads. Rows a program depend on the width alone, so a row has the same bits in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import norm as plain
from benthic.kernels.triton.quant import FLOATS, narrow, widen
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x_ptr,
    weight_ptr,
    y_ptr,
    rows,
    width,
    row_stride,
    eps,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    live = (row < rows)[:, None]
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    pieces = ()
    for chunk in tl.static_range(CHUNKS):
        here = live & (col + chunk * BLOCK < width)[None, :] if MASKED else live
        at = row[:, None] * row_stride + (chunk * BLOCK + col)[None, :]
        piece = tl.load(x_ptr + at, mask=here, other=0.0)
        pieces = pieces + (piece,)  # noqa: RUF005, the compiler knows no starred tuples
        squares += widen(piece) * widen(piece)
    statistic = tl.rsqrt(tl.sum(squares, axis=1) / width + eps)[:, None]
    for chunk in tl.static_range(CHUNKS):
        here = live & (col + chunk * BLOCK < width)[None, :] if MASKED else live
        # for every row, though all are the same: one a column would be laid out otherwise and go through shared memory
        weight_at = tl.broadcast_to((chunk * BLOCK + col)[None, :], (ROWS, BLOCK))
        weight = widen(tl.load(weight_ptr + weight_at, mask=here, other=0.0))
        y = widen(pieces[chunk]) * statistic * weight
        to = row[:, None] * width + (chunk * BLOCK + col)[None, :]
        tl.store(y_ptr + to, narrow(y, y_ptr.dtype.element_ty), mask=here)


def chunked(width: int, most: int = 1024) -> tuple[int, int]:
    """(chunks, block): a width as chunks of a power of two, at most `most` channels; else one block that is masked."""
    block = min(width & -width, most)
    even = width > most and block >= 32 and width // block <= 16
    return (width // block, block) if even else (1, power_of_two(width))


def even_rows(x: Tensor) -> Tensor:
    """x [..., D] as [R, D] with adjacent channels and evenly spaced rows; a copy only where x has no such view."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    if x.dtype not in FLOATS:
        return plain.rms_norm_reference(x, weight, eps)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, weight = even_rows(x), weight.contiguous()
    chunks, block = chunked(width)
    rows_each = max(1, 1024 // power_of_two(width))
    _rms_norm[(cdiv(x.shape[0], rows_each),)](
        x,
        weight,
        y,
        x.shape[0],
        width,
        x.stride(0),
        eps,
        ROWS=rows_each,
        CHUNKS=chunks,
        BLOCK=block,
        MASKED=chunks * block != width,
        num_warps=min(max(rows_each * block // 256, 1), 16),  # 8 channels a thread: one load of 16 bytes
    )
    return y
