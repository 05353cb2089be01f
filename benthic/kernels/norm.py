"""Root-mean-square norm over the last axis. Source: model specification, sections 2.3 and 6.3."""

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    statistic = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * statistic * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, in float32, rounded once at the end.

    x        [..., D] bf16 or f32, any strides; no row or one row is fine.
    weight   [D], read in f32.
    eps      added to the mean square; the released model has 1e-20, which float16 cannot hold.
    returns  shape and dtype of x.
    Error    at most 1 unit in the last place of the result's dtype against the reference.
    Cost     memory bound: reads and writes x once.
    Raises   ShapeError.
    """
    if x.ndim < 1 or weight.shape != x.shape[-1:]:
        raise ShapeError("rms_norm: weight", want=f"[D] with D of x {tuple(x.shape)}", got=tuple(weight.shape))
    run = backends.pick("rms_norm", x, weight) or rms_norm_reference
    return run(x, weight, eps)
