"""C version of `kernels/moe_gate.py`; the contract is there."""

import torch
from torch import Tensor

from benthic.kernels import moe_gate as plain
from benthic.kernels.native import build, gemm
from benthic.kernels.native.build import available as available

_route = build.function("benthic_route", "pplpplllifi")


def route(h: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scale: float) -> tuple[Tensor, Tensor]:
    rows, experts = h.shape[0], gate.shape[0]
    if build.wide(h) is None or build.wide(gate) is None:
        return plain.route_reference(h, gate, bias, k, normalise, scale)
    scores = gemm.linear(h, gate, torch.float32)
    bias = bias.float().contiguous()
    ids = torch.empty((rows, k), dtype=torch.int64)
    weights = torch.empty((rows, k), dtype=torch.float32)
    _route(
        scores.data_ptr(),
        bias.data_ptr(),
        0 if bias.ndim == 1 else experts,
        ids.data_ptr(),
        weights.data_ptr(),
        rows,
        experts,
        k,
        normalise,
        scale,
        build.threads(),
    )
    return ids, weights
