"""C version of `kernels/rope.py`; the contract is there. Odd shapes take the reference."""

import torch
from torch import Tensor

from benthic.kernels import rope as plain
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_rotate = build.function("benthic_rotate", "pppplllllliii")


def rotate(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    wide, pairs = build.wide(x), freqs.shape[0]
    if wide is None or x.ndim > 3 or pairs % 8 or pairs > 128 or freqs.dtype is not torch.float32:
        return plain.rotate_reference(x, positions, freqs, inverse)
    if x.stride(-1) != 1:
        x = x.contiguous()
    if positions.dtype is not torch.int64 or not positions.is_contiguous():
        positions = positions.long().contiguous()
    freqs = freqs.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    heads, head_stride = (1, 0) if x.ndim == 2 else (x.shape[1], x.stride(1))
    _rotate(
        x.data_ptr(),
        out.data_ptr(),
        positions.data_ptr(),
        freqs.data_ptr(),
        x.shape[0],
        heads,
        x.shape[-1],
        pairs,
        x.stride(0),
        head_stride,
        inverse,
        wide,
        build.threads(),
    )
    return out
