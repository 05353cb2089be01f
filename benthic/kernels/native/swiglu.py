"""C version of `kernels/swiglu.py`; the contract is there."""

import torch
from torch import Tensor

from benthic.kernels import swiglu as plain
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_swiglu = build.function("benthic_swiglu", "pppplllfiii")


def swiglu(
    gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    out_dtype = out_dtype or gate.dtype
    wide = build.wide(gate)
    if wide is None or up.dtype is not gate.dtype or gate.shape[1] % 16 or out_dtype not in (build.BF16, build.F32):
        return plain.swiglu_reference(gate, up, limit, weights, out_dtype)
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    if weights is not None:
        weights = weights.float().contiguous()
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=out_dtype)
    _swiglu(
        gate.data_ptr(),
        up.data_ptr(),
        None if weights is None else weights.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        gate.stride(0),
        limit,
        wide,
        int(out_dtype is build.F32),
        build.threads(),
    )
    return out
