"""Triton version of `kernels/moe_gate.py`; the contract is there.

Scores are a product of the dense kernel, in f32 from operands of 16 bits; a program then adds up their parts and takes
the best of a row, one after another. Bits depend on the number of rows as those of the product do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import moe_gate as plain
from benthic.kernels.triton.gemm import launch, products, start
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two
from benthic.kernels.triton.swiglu import exponential

MOST = 32  # experts a row, at most
ROWS = 4  # that a program takes, a warp each

_FLOOR: tl.constexpr = tl.constexpr(plain.NORMALISER_FLOOR)
_TAKEN: tl.constexpr = tl.constexpr(-(2**63))


@triton.jit
def softplus(x):
    """log(1 + e^x), f32, within a few units in the last place."""
    small = exponential(-tl.abs(x))
    # log(1 + s) = 2 atanh(s / (2 + s)); the quotient is at most a third
    quotient = small / (2.0 + small)
    square = quotient * quotient
    series = tl.full(x.shape, 1.0 / 17.0, tl.float32)
    for term in tl.static_range(7, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + 2.0 * quotient * series


@triton.jit
def _choose(
    parts_ptr,  # [PARTS, T, E] f32
    bias_ptr,  # [E] or [T, E] f32
    ids_ptr,  # [T, K] int64
    weights_ptr,  # [T, K] f32
    rows,
    E,
    part_stride,
    row_stride,
    bias_stride,
    scale,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # K, rounded up to a power of two
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, BLOCK)[None, :]
    live = (row < rows) & (expert < E)
    source = parts_ptr + row * row_stride + expert
    product = tl.load(source, mask=live, other=0.0)
    for part in tl.static_range(1, PARTS):
        product += tl.load(source + part * part_stride, mask=live, other=0.0)
    score = tl.sqrt_rn(softplus(product))
    rank = score + tl.load(bias_ptr + row * bias_stride + expert, mask=live, other=0.0)
    # one integer that orders by rank, then by the lower index; a NaN is above all numbers
    bits = rank.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
    order = tl.where(expert < E, order | (BLOCK - 1 - expert).to(tl.int64), _TAKEN)
    slot = tl.arange(0, SLOTS)[None, :]
    ids = tl.zeros((ROWS, SLOTS), tl.int64)
    weights = tl.zeros((ROWS, SLOTS), tl.float32)
    for k in tl.static_range(K):
        best = BLOCK - 1 - (tl.max(order, axis=1) & 0xFFFFFFFF)
        chosen = expert == best[:, None]
        ids = tl.where(slot == k, best[:, None], ids)
        weights = tl.where(slot == k, tl.sum(tl.where(chosen, score, 0.0), axis=1)[:, None], weights)
        order = tl.where(chosen, _TAKEN, order)
    if NORMALISE:
        weights = weights / (tl.sum(weights, axis=1) + _FLOOR)[:, None]
    tl.store(ids_ptr + row * K + slot, ids, mask=(row < rows) & (slot < K))
    tl.store(weights_ptr + row * K + slot, weights * scale, mask=(row < rows) & (slot < K))


def route(h: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scale: float) -> tuple[Tensor, Tensor]:
    rows, experts = h.shape[0], gate.shape[0]
    if k > MOST or bias.dtype != torch.float32 or h.shape[1] == 0:
        return plain.route_reference(h, gate, bias, k, normalise, scale)
    ids = torch.empty((rows, k), dtype=torch.int64, device=h.device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=h.device)
    if rows == 0:
        return ids, weights
    h = h if h.stride(1) == 1 else h.contiguous()
    parts = products(h, gate, torch.float32)[:, 0]  # [parts, T, E]
    bias = bias if bias.stride(-1) == 1 else bias.contiguous()
    _choose[(cdiv(rows, ROWS),)](
        parts,
        bias,
        ids,
        weights,
        rows,
        experts,
        parts.stride(0),
        parts.stride(1),
        bias.stride(0) if bias.ndim == 2 else 0,
        scale,
        PARTS=parts.shape[0],
        K=k,
        SLOTS=power_of_two(k),
        NORMALISE=normalise and k > 1,
        ROWS=ROWS,
        BLOCK=power_of_two(experts),
        num_warps=4,
        **launch(),
    )
    return ids, weights
