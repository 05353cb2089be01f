"""C versions of `kernels/engram.py`; the contracts are there."""

import torch
from torch import Tensor

from benthic.kernels import engram as plain
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_ngram_rows = build.function("benthic_ngram_rows", "ppppplll")
_gate = build.function("benthic_engram_gate", "pppppplllllfii")


def ngram_rows(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    ids, multipliers = ids.contiguous(), multipliers.contiguous()
    primes, offsets = primes.contiguous(), offsets.contiguous()
    rows, n = ids.shape
    heads = primes.shape[1]
    out = torch.empty((rows, (n - 1) * heads), dtype=torch.int64)
    _ngram_rows(
        ids.data_ptr(), multipliers.data_ptr(), primes.data_ptr(), offsets.data_ptr(), out.data_ptr(), rows, n, heads
    )
    return out


def engram_gate(
    s: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float, images: Tensor | None = None
) -> Tensor:
    rows, streams, width = s.shape
    wide = build.wide(s)
    if wide is None or width % 16 or keys.dtype is not s.dtype or value.dtype is not s.dtype:
        return plain.engram_gate_reference(s, keys, value, weight, eps, images)
    s, weight = s.contiguous(), weight.float().contiguous()
    if keys.stride(2) != 1 or keys.stride(1) != width:
        keys = keys.contiguous()
    value = build.rows_of(value)
    if images is not None:
        images = images.bool().contiguous()
    out = torch.empty(s.shape, dtype=s.dtype)
    _gate(
        s.data_ptr(),
        keys.data_ptr(),
        value.data_ptr(),
        weight.data_ptr(),
        None if images is None else images.data_ptr(),
        out.data_ptr(),
        rows,
        streams,
        width,
        keys.stride(0),
        value.stride(0),
        eps,
        wide,
        build.threads(),
    )
    return out
