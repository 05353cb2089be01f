"""Triton version of `kernels/rope.py`; the contract is there.

Sine and cosine are worked out here, by the same instructions on every device: the angle is reduced by multiples of pi/2
in three parts of pi/2 with fused multiply-adds (exact but for the last bits up to 2^24), then Taylor's series. The
compiler's own take a slow path through memory for angles above 10^5.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import rope as plain
from benthic.kernels.triton.quant import FLOATS, INTERPRETED, narrow, widen
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two

ROWS, BLOCK, WARPS = 16, 64, 4  # heads of rows; channels that pass, 16 bytes a thread

# pi/2 = _HIGH + _MIDDLE + _LOW, each rounded to float32
_TURNS: tl.constexpr = tl.constexpr(2 / math.pi)
_EXACT: tl.constexpr = tl.constexpr(math.pi / 2)
_HIGH: tl.constexpr = tl.constexpr(1.5707963705062866)
_MIDDLE: tl.constexpr = tl.constexpr(-4.371138828673793e-08)
_LOW: tl.constexpr = tl.constexpr(-1.7151245100058819e-15)


@triton.jit
def _reduce(angle, quarter):
    """angle - quarter * pi/2. The interpreter's fused multiply-add rounds twice, so there it is done in float64."""
    if INTERPRETED:
        return (angle.to(tl.float64) - quarter.to(tl.float64) * _EXACT).to(tl.float32)
    angle = tl.fma(-quarter, tl.full(angle.shape, _HIGH, tl.float32), angle)
    angle = tl.fma(-quarter, tl.full(angle.shape, _MIDDLE, tl.float32), angle)
    return tl.fma(-quarter, tl.full(angle.shape, _LOW, tl.float32), angle)


@triton.jit
def turn(angle):
    """Cosine and sine of f32 angles, |angle| to 2^24; within 1e-7 of the exact values."""
    first = tl.floor(angle * _TURNS + 0.5)
    angle = _reduce(angle, first)
    second = tl.floor(angle * _TURNS + 0.5)  # large angles: the first count may be one off
    angle = _reduce(angle, second)
    quarter = first.to(tl.int32) + second.to(tl.int32)
    square = angle * angle
    sine = (((square * (1 / 362880) - 1 / 5040) * square + 1 / 120) * square - 1 / 6) * square
    sine = angle + angle * sine
    cosine = (((1 / 40320 - square * (1 / 3628800)) * square - 1 / 720) * square + 1 / 24) * square
    cosine = 1.0 + (cosine - 0.5) * square
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    cos = tl.where(((quarter + 1) & 2) != 0, -cos, cos)
    return cos, tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def turn_pairs(even, odd, cos, sin):
    """Pairs turned, f32 of one shape -> (even, odd). Which product of two is rounded is said here: left to it, the
    compiler chooses differently from kernel to kernel, and a row would have other bits in another."""
    return tl.fma(even, cos, -(odd * sin)), tl.fma(even, sin, odd * cos)


@triton.jit
def rotate_pairs(x, cos, sin):
    """x [R, 2*P] f32, adjacent channels a pair; cos, sin [R, P] -> [R, 2*P]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    even, odd = turn_pairs(even, odd, tl.broadcast_to(cos, even.shape), tl.broadcast_to(sin, even.shape))
    return tl.reshape(tl.join(even, odd), x.shape)


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x_ptr,
    positions_ptr,
    freqs_ptr,
    y_ptr,
    rows,
    heads,
    row_stride,
    head_stride,
    position_stride,
    PLAIN: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # a head of a row
    live = (line < rows * heads)[:, None]
    row = line // heads
    source = (row * row_stride + (line - row * heads) * head_stride)[:, None]
    target = (line * (PLAIN + 2 * PAIRS))[:, None]
    passing = ()
    for start in tl.static_range(0, PLAIN, BLOCK):  # all loads before any store, which might alias as far as is known
        col = (start + tl.arange(0, BLOCK))[None, :]
        passing = passing + (tl.load(x_ptr + source + col, mask=live & (col < PLAIN)),)  # noqa: RUF005

    pair = tl.arange(0, PAIR_BLOCK)
    position = tl.load(positions_ptr + row * position_stride, mask=line < rows * heads, other=0).to(tl.float32)
    freq = tl.load(freqs_ptr + pair, mask=pair < PAIRS, other=0.0)
    cos, sin = turn(position[:, None] * freq[None, :])
    col = tl.arange(0, 2 * PAIR_BLOCK)[None, :]
    x = widen(tl.load(x_ptr + source + PLAIN + col, mask=live & (col < 2 * PAIRS), other=0.0))
    y = rotate_pairs(x, cos, -sin if INVERSE else sin)
    for start in tl.static_range(0, PLAIN, BLOCK):
        to = (start + tl.arange(0, BLOCK))[None, :]
        tl.store(y_ptr + target + to, passing[start // BLOCK], mask=live & (to < PLAIN))
    tl.store(y_ptr + target + PLAIN + col, narrow(y, y_ptr.dtype.element_ty), mask=live & (col < 2 * PAIRS))


def rotate(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    if x.dtype not in FLOATS:
        return plain.rotate_reference(x, positions, freqs, inverse)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    pairs, channels = freqs.shape[0], x.shape[-1]
    x = x.reshape(x.shape[0], -1, channels)  # a copy where the heads are not evenly spaced
    if x.stride(2) != 1:
        x = x.contiguous()
    lines = x.shape[0] * x.shape[1]
    _rotate[(cdiv(lines, ROWS),)](
        x,
        positions,
        freqs.contiguous(),
        y,
        x.shape[0],
        x.shape[1],
        x.stride(0),
        x.stride(1),
        positions.stride(0),
        PLAIN=channels - 2 * pairs,
        PAIRS=pairs,
        PAIR_BLOCK=power_of_two(max(pairs, 1)),
        ROWS=ROWS,
        BLOCK=BLOCK,
        INVERSE=inverse,
        num_warps=WARPS,
    )
    return y
