"""Rotary positions: adjacent pairs of the last channels are rotated. Source: model specification, section 2.4."""

import math

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends

Yarn = tuple[float, float, float, int]  # factor, beta_fast, beta_slow, original context length in tokens


def rope_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """Angle per position of each channel pair, f32 [dim/2] on the CPU.

    dim      rotated channels, even.
    theta    base: pair i turns by 1 / theta^(2i/dim) a token. Worked out in float32 in exactly this form, since the
             last bit is visible at positions near 2^20.
    yarn     stretches the slow pairs by `factor`; pairs between the two betas are blended.
    """
    if dim < 2 or dim % 2:
        raise ShapeError("rope_frequencies: dim", want="even, at least 2", got=dim)
    pairs = torch.arange(0, dim, 2, dtype=torch.float32)
    freqs = 1.0 / (theta ** (pairs / dim))
    if yarn is None:
        return freqs
    factor, beta_fast, beta_slow, original = yarn

    def pair_of(turns: float) -> float:  # the pair that makes `turns` turns over the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return freqs / factor * ramp + freqs * (1 - ramp)


def rotate_reference(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    angles = positions.float().unsqueeze(-1) * freqs  # [T, dr/2]
    angles = angles.view(angles.shape[0], *(1,) * (x.ndim - 2), angles.shape[1])
    cos, sin = angles.cos(), angles.sin()
    if inverse:
        sin = -sin
    plain, turned = x.split([x.shape[-1] - 2 * freqs.shape[0], 2 * freqs.shape[0]], dim=-1)
    even, odd = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([plain, turned.to(x.dtype)], dim=-1)


def rotate(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """Turn channel pairs (2i, 2i+1) of the last dr channels by position * freqs[i]; the rest passes unchanged.

    x          [T, ..., dh] bf16 or f32, any strides, dh >= dr.
    positions  [T] int64, 0 to 2^24 (exact in float32).
    freqs      [dr/2] f32, on the device of x.
    inverse    turn back: rotate(rotate(x), inverse=True) is x up to rounding.
    returns    a new tensor, shape and dtype of x; angles, sines and products in f32, one rounding.
    Error      at most 1 unit in the last place of the dtype of x against the reference.
    Cost       memory bound: reads and writes x once.
    Raises     ShapeError.
    """
    if x.ndim < 2 or x.shape[-1] < 2 * freqs.shape[0]:
        raise ShapeError("rotate: x", want=f"[T, ..., dh], dh >= {2 * freqs.shape[0]}", got=tuple(x.shape))
    if positions.shape != x.shape[:1]:
        raise ShapeError("rotate: positions", want=f"[{x.shape[0]}]", got=tuple(positions.shape))
    run = backends.pick("rotate", x, freqs) or rotate_reference
    return run(x, positions, freqs, inverse)
