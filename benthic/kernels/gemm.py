"""Matrix products with float32 accumulation and one rounding. Source: model specification, section 6.2."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, quant


def linear_reference(x: Tensor, weight: quant.Matrix, out_dtype: torch.dtype | None = None) -> Tensor:
    out_dtype = out_dtype or x.dtype
    if isinstance(weight, quant.RowMatrix):
        x = quant.roundtrip_carry(x)
    weight = quant.values(weight, x.dtype)
    if x.dtype == weight.dtype == out_dtype:
        return F.linear(x, weight)
    return F.linear(x.float(), weight.float()).to(out_dtype)


def linear(x: Tensor, weight: quant.Matrix, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight^T.

    x          [..., K] bf16 or f32; no row or one row is fine.
    weight     [N, K] bf16 or f32, or packed: its values count. With a `RowMatrix`, x is carried in the same way.
    out_dtype  of the result; None: dtype of x. With f32, bf16 operands are widened first, so nothing is rounded.
    returns    [..., N].
    Error      summation order only: relative to sum |x||w|, 2^-20 plus one rounding to `out_dtype`.
    Cost       2 * rows * N * K FLOP; weight bound at few rows.
    Raises     ShapeError.
    """
    if len(weight.shape) != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ShapeError("linear: x", want=f"[..., K] for weight {tuple(weight.shape)}", got=tuple(x.shape))
    run = backends.pick("linear", x, weight if isinstance(weight, Tensor) else None) or linear_reference
    return run(x, weight, out_dtype)


def grouped_linear_reference(x: Tensor, weight: quant.Matrix) -> Tensor:
    if isinstance(weight, quant.RowMatrix):
        x = quant.roundtrip_carry(x)
    weight = quant.values(weight, x.dtype)
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def grouped_linear(x: Tensor, weight: quant.Matrix) -> Tensor:
    """One matrix a group: out[t, g] = x[t, g] @ weight[g]^T. Section 2.5, the grouped output projection.

    x        [T, G, K] bf16 or f32, any strides. T may be 0.
    weight   [G, N, K], dtype of x, or packed. With a `RowMatrix`, each x[t, g] is carried in the same way.
    returns  [T, G, N], dtype of x; f32 accumulation, one rounding. Strides are free.
    Error    as `linear`.
    Cost     2 * T * G * N * K FLOP.
    Raises   ShapeError.
    """
    if x.ndim != 3 or len(weight.shape) != 3 or (weight.shape[0], weight.shape[2]) != tuple(x.shape[1:]):
        raise ShapeError("grouped_linear: x", want=f"[T, G, K] for weight {tuple(weight.shape)}", got=tuple(x.shape))
    run = backends.pick("grouped_linear", x, weight if isinstance(weight, Tensor) else None) or grouped_linear_reference
    return run(x, weight)
