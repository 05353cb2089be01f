"""Triton version of `kernels/swiglu.py`; the contract is there. Element by element: bits depend on nothing else."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import swiglu as plain
from benthic.kernels.triton.quant import FLOATS, narrow, widen
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv

ROWS, BLOCK, WARPS = 4, 256, 4

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2_HIGH: tl.constexpr = tl.constexpr(0.693145751953125)  # 16 bits: its product with a whole number is exact
_LN2_LOW: tl.constexpr = tl.constexpr(1.428606765330187e-06)


@triton.jit
def exponential(x):
    """e^x, f32, a few units in the last place at any size: the hardware's 2^y alone loses |x| of them."""
    x = tl.clamp(x, -104.0, 89.0, propagate_nan=tl.PropagateNan.ALL)  # beyond, it is 0 and infinity
    whole = tl.maximum(tl.floor(x * _LOG2E + 0.5), -127.0)  # 2^-127 becomes 0, 2^128 infinity
    rest = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    return tl.exp2(rest * _LOG2E) * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def silu(x):
    """x * sigmoid(x), f32."""
    return x / (1.0 + exponential(-x))


@triton.jit
def gated(gate, up, limit, LIMITED: tl.constexpr):
    """silu(min(gate, limit)) * clamp(up, -limit, limit), f32; a NaN stays one."""
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return silu(gate) * up


@triton.jit(do_not_specialize=["rows"])
def _swiglu(
    gate_ptr,
    up_ptr,
    weights_ptr,
    y_ptr,
    rows,
    width,
    gate_stride,
    up_stride,
    weights_stride,
    limit,
    LIMITED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (col < width)[None, :]
    gate = widen(tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=live, other=0.0))
    up = widen(tl.load(up_ptr + row[:, None] * up_stride + col[None, :], mask=live, other=0.0))
    y = gated(gate, up, limit, LIMITED)
    if WEIGHTED:
        y *= widen(tl.load(weights_ptr + row * weights_stride, mask=row < rows, other=0.0))[:, None]
    tl.store(y_ptr + row[:, None] * width + col[None, :], narrow(y, y_ptr.dtype.element_ty), mask=live)


def swiglu(
    gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    out_dtype = out_dtype or gate.dtype
    if gate.dtype not in FLOATS or up.dtype not in FLOATS or out_dtype not in FLOATS:
        return plain.swiglu_reference(gate, up, limit, weights, out_dtype)
    rows, width = gate.shape
    y = torch.empty((rows, width), dtype=out_dtype, device=gate.device)
    if y.numel() == 0:
        return y
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    _swiglu[(cdiv(rows, ROWS), cdiv(width, BLOCK))](
        gate,
        up,
        weights,
        y,
        rows,
        width,
        gate.stride(0),
        up.stride(0),
        weights.stride(0) if weights is not None else 0,
        limit,
        LIMITED=limit > 0,
        WEIGHTED=weights is not None,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return y
