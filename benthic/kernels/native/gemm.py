"""C version of `kernels/gemm.py`; the contract is there. A row has the same bits in any batch.

Widths that fill no vector, and packed weights, take the reference.
"""

import torch
from torch import Tensor

from benthic.kernels import gemm as plain
from benthic.kernels import quant
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_bf16 = build.function("benthic_linear_bf16", "pllllll" + "ppll" + "ii")
_f32 = build.function("benthic_linear_f32", "pillllppii", build.INT)


def linear(x: Tensor, weight: quant.Matrix, out_dtype: torch.dtype | None = None) -> Tensor:
    out_dtype = out_dtype or x.dtype
    if not isinstance(weight, Tensor):
        return plain.linear_reference(x, weight, out_dtype)
    n, k = weight.shape
    small = weight.dtype is build.BF16 and x.dtype is build.BF16
    if (
        k % (32 if small else 16)
        or not (small or weight.dtype is build.F32)
        or build.wide(x) is None
        or out_dtype not in (build.BF16, build.F32)
        or not weight.is_contiguous()
    ):
        return plain.linear_reference(x, weight, out_dtype)
    if x.ndim != 2 or x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=out_dtype)
    rows = x.numel() // k
    stride = x.stride(0) if x.ndim == 2 else k
    wide_out = int(out_dtype is build.F32)
    if small:
        _bf16(
            x.data_ptr(), rows, 1, k, n, stride, 0, weight.data_ptr(), out.data_ptr(), n, 0, wide_out, build.threads()
        )
    else:
        wide_in = int(x.dtype is build.F32)
        build.check(
            _f32(
                x.data_ptr(), wide_in, rows, k, n, stride, weight.data_ptr(), out.data_ptr(), wide_out, build.threads()
            )
        )
    return out


def grouped_linear(x: Tensor, weight: quant.Matrix) -> Tensor:
    if not isinstance(weight, Tensor):
        return plain.grouped_linear_reference(x, weight)
    groups, n, k = weight.shape
    if x.dtype is not build.BF16 or weight.dtype is not build.BF16 or k % 32 or not weight.is_contiguous():
        return plain.grouped_linear_reference(x, weight)
    if x.stride(2) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty((rows, groups, n), dtype=x.dtype)
    _bf16(
        x.data_ptr(),
        rows,
        groups,
        k,
        n,
        x.stride(0),
        x.stride(1),
        weight.data_ptr(),
        out.data_ptr(),
        groups * n,
        n,
        0,
        build.threads(),
    )
    return out
