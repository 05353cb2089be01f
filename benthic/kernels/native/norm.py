"""C version of `kernels/norm.py`; the contract is there. Widths that are no multiple of 16 take the reference."""

import torch
from torch import Tensor

from benthic.kernels import norm as plain
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_rms_norm = build.function("benthic_rms_norm", "ppplllfii")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, width = build.wide(x), x.shape[-1]
    if wide is None or width % 16:
        return plain.rms_norm_reference(x, weight, eps)
    if x.ndim != 2 or x.stride(1) != 1:
        x = x.contiguous()
    if weight.dtype is not torch.float32 or not weight.is_contiguous():
        weight = weight.float().contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    stride = x.stride(0) if x.ndim == 2 else width
    _rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, stride, eps, wide, build.threads()
    )
    return out
