"""C versions of the round trips and of FP8 reading of `kernels/quant.py`; contracts are there. The same bits."""

from collections.abc import Callable

import torch
from torch import Tensor

from benthic.kernels import quant as plain
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

FORMATS = {"fp8": 0, "mxfp4": 1, "nvfp4": 2}  # as the C sources number them

_roundtrip = build.function("benthic_roundtrip", "ppliii")
_dequantise_fp8 = build.function("benthic_dequantise_fp8", "ppplii")


def roundtrip_fp8(x: Tensor, group: int = 32) -> Tensor:
    return plain.roundtrip_fp8_reference(x, group) if group != 32 else _round(x, 0, plain.roundtrip_fp8_reference)


def roundtrip_mxfp4(x: Tensor) -> Tensor:
    return _round(x, 1, plain.roundtrip_mxfp4_reference)


def roundtrip_nvfp4(x: Tensor) -> Tensor:
    return _round(x, 2, plain.roundtrip_nvfp4_reference)


def _round(x: Tensor, form: int, reference: Callable[[Tensor], Tensor]) -> Tensor:
    wide = build.wide(x)
    if wide is None or x.ndim == 0 or x.shape[-1] % 32:
        return reference(x)
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _roundtrip(x.data_ptr(), out.data_ptr(), x.numel() // 32, wide, form, build.threads())
    return out


def dequantise_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    channels = codes.shape[-1]
    if (
        dtype not in (build.BF16, build.F32)
        or channels != 32 * scales.shape[-1]
        or codes.shape[:-1] != scales.shape[:-1]
    ):
        return plain.dequantise_fp8_reference(codes, scales, dtype)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty(codes.shape, dtype=dtype)
    wide = int(dtype is build.F32)
    _dequantise_fp8(codes.data_ptr(), scales.data_ptr(), out.data_ptr(), scales.numel(), wide, build.threads())
    return out
