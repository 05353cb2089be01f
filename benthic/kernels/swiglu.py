"""Clamped SwiGLU, the activation between an expert's two matrices. Source: model specification, section 2.12."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends


def swiglu_reference(
    gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    a, b = gate.float(), up.float()
    if limit > 0:
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    y = F.silu(a) * b
    if weights is not None:
        y = y * weights.float().unsqueeze(-1)
    return y.to(out_dtype or gate.dtype)


def swiglu(
    gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, row by row, in float32.

    gate, up   [T, I] bf16 or f32, any strides (two halves of one product are fine). T may be 0.
    limit      clamp, in activation units; the gate only from above, the other half on both sides; <= 0: no clamp.
    weights    [T], routing weight of each row, or None for 1.
    out_dtype  of the result, which is rounded once; None: dtype of gate.
    returns    [T, I].
    Error      at most 1 unit in the last place of `out_dtype` against the reference.
    Cost       memory bound: reads 2*T*I elements, writes T*I.
    Raises     ShapeError.
    """
    if gate.ndim != 2 or gate.shape != up.shape:
        raise ShapeError("swiglu: up", want=f"[T, I] as gate {tuple(gate.shape)}", got=tuple(up.shape))
    if weights is not None and weights.shape != gate.shape[:1]:
        raise ShapeError("swiglu: weights", want=f"[{gate.shape[0]}]", got=tuple(weights.shape))
    run = backends.pick("swiglu", gate, up, weights) or swiglu_reference
    return run(gate, up, limit, weights, out_dtype)
