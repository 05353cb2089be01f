"""The three block quantisers and their packing: FP8 (Q8), MXFP4 (Q4m) and NVFP4 (Q4n). Model specification, 5 and 6.1.

    Q8   groups of 32  a = max(max|x|, 1e-4)        s = 2^ceil(log2(a/448))  code = E4M3(clamp(x/s, +-448))
    Q4m  groups of 32  a = max(max|x|, 6 * 2^-126)  s = 2^ceil(log2(a/6))    code = E2M1(clamp(x/s, +-6))
    Q4n  groups of 16  a = max(max|x|, 6 * 2^-9)    s = E4M3(min(a/6, 448))  code = E2M1(clamp(x/s, +-6))

All arithmetic is float32; both code grids round to nearest, ties to even, and keep the sign of zero. Power-of-two
scales are UE8M0 bytes: b means 2^(b-127), 255 means NaN. Two E2M1 codes share a byte, the even channel in the low half.

A group that holds a NaN or an infinity gets the scale NaN, so that all of it reads back as NaN and nothing hides it.
Nothing here copies from the host or waits for the device.
"""

from functools import cache
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from benthic.errors import ShapeError
from benthic.kernels import backends

E4M3 = torch.float8_e4m3fn
FP8_MAX, FP4_MAX = 448.0, 6.0
FP8_FLOOR = 1e-4  # smallest group maximum of Q8
MXFP4_FLOOR = 6 * 2.0**-126
NVFP4_FLOOR = 6 * 2.0**-9  # the scale is then the smallest E4M3 number
MX_GROUP, NV_GROUP, WEIGHT_BLOCK = 32, 16, 32


# Scales


def _divide(a: Tensor, by: float) -> Tensor:
    """True division. On CUDA, dividing by a Python number multiplies by its rounded reciprocal instead."""
    return a / torch.full_like(a, by)


def e8m0_ceil(ratio: Tensor) -> Tensor:
    """2^ceil(log2(ratio)) as a UE8M0 byte, from the bits of the float32 ratio; 255 where it is not finite.

    ratio [...] f32, at least 2^-126.
    """
    exponent = ((ratio.view(torch.int32) + 0x7FFFFF) >> 23) & 0xFF
    return torch.where(torch.isfinite(ratio), exponent, 255).to(torch.uint8)


def e8m0_value(scales: Tensor) -> Tensor:
    """UE8M0 bytes [...] uint8 -> 2^(b-127) f32; 0 is the subnormal 2^-127, 255 is NaN."""
    bits = scales.to(torch.int32)
    value = (bits << 23).masked_fill(bits == 0, 0x00400000).masked_fill(bits == 255, 0x7FC00000)
    return value.view(torch.float32)


def _groups(op: str, x: Tensor, group: int) -> Tensor:
    """[..., K] -> f32 [..., K/group, group]."""
    if x.ndim == 0 or x.shape[-1] % group or not x.is_floating_point():
        raise ShapeError(
            f"{op}: x", want=f"floats [..., K], K a multiple of {group}", got=f"{x.dtype} {tuple(x.shape)}"
        )
    return x.float().unflatten(-1, (x.shape[-1] // group, group))


def _power_scale(amax: Tensor, floor: float, limit: float) -> Tensor:
    """Group maxima -> UE8M0 bytes by the Q8 and Q4m rule."""
    return e8m0_ceil(_divide(amax.clamp(min=floor), limit))


def _nvfp4_scale(x: Tensor) -> Tensor:
    """[..., group] f32 -> E4M3 [...]; NaN for a group that is not finite."""
    amax = x.abs().amax(-1)
    scale = _divide(amax.clamp(min=NVFP4_FLOOR), FP4_MAX).clamp(max=FP8_MAX)
    return torch.where(torch.isfinite(amax), scale, torch.nan).to(E4M3)


# E2M1: magnitudes 0 .5 1 1.5 2 3 4 6 for codes 0 to 7, sign in bit 3


def _round_e2m1(y: Tensor) -> Tensor:
    """Nearest E2M1 value of y f32, clamped to [-6, 6]; ties go to the even code. NaN stays NaN."""
    y = y.clamp(-FP4_MAX, FP4_MAX)
    size = y.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(y / step) * step  # torch.round breaks ties to even, and even multiples have even codes


def _encode_e2m1(y: Tensor) -> Tensor:
    """y f32 -> codes uint8; NaN gets code 0, its scale says that it is NaN."""
    value = _round_e2m1(y).nan_to_num(0.0)
    size = value.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, 0.5 * size + 4)).to(torch.uint8)
    return code | (torch.signbit(value).to(torch.uint8) << 3)


def _decode_e2m1(codes: Tensor) -> Tensor:
    """Codes uint8 -> f32."""
    code = (codes & 7).float()
    size = torch.where(code < 4, 0.5 * code, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes >= 8, -size, size)


@cache
@torch.inference_mode(False)
def _pairs(device: torch.device) -> Tensor:
    """[256] int32: the two bf16 values of a byte, one behind the other."""
    values = _decode_e2m1(torch.arange(16, dtype=torch.uint8, device=device)).bfloat16()
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1).view(torch.int32)[:, 0]


@cache
@torch.inference_mode(False)
def _e4m3_values(device: torch.device) -> Tensor:
    """[256] bf16: the values of E4M3 bytes."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(E4M3).bfloat16()


def _unpack_e2m1(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K/2] uint8 or int8 -> values [..., K]. By table: five times as fast on a CPU as arithmetic on codes."""
    return _pairs(packed.device)[packed.view(torch.uint8).int()].view(torch.bfloat16).to(dtype)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [..., K] uint8, each below 16 -> [..., K/2] uint8, the even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


# FP8: window KV, activations of quantised products


def quantise_fp8(x: Tensor, group: int = MX_GROUP) -> tuple[Tensor, Tensor]:
    """Q8.

    x        [..., K] floats, K a multiple of group; any strides, may be empty
    returns  codes [..., K] float8_e4m3fn, scales [..., K/group] uint8 UE8M0
    Raises   ShapeError.
    """
    parts = _groups("quantise_fp8", x, group)
    scales = _power_scale(parts.abs().amax(-1), FP8_FLOOR, FP8_MAX)
    codes = (parts / e8m0_value(scales)[..., None]).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return codes.flatten(-2), scales


def dequantise_fp8_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    _check_scales("dequantise_fp8", codes.shape[-1], scales)
    parts = codes.float().unflatten(-1, (scales.shape[-1], codes.shape[-1] // max(scales.shape[-1], 1)))
    return (parts * e8m0_value(scales)[..., None]).flatten(-2).to(dtype)


def dequantise_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [..., K] float8_e4m3fn, scales [..., K/group] uint8 -> [..., K] dtype. Exact in f32 and bf16."""
    run = backends.pick("dequantise_fp8", codes) or dequantise_fp8_reference
    return run(codes, scales, dtype)


def roundtrip_fp8_reference(x: Tensor, group: int = MX_GROUP) -> Tensor:
    parts = _groups("roundtrip_fp8", x, group)
    scale = e8m0_value(_power_scale(parts.abs().amax(-1, keepdim=True), FP8_FLOOR, FP8_MAX))
    codes = (parts / scale).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def roundtrip_fp8(x: Tensor, group: int = MX_GROUP) -> Tensor:
    """dequantise(quantise(x)) in the dtype of x: x [..., K] floats, K a multiple of group."""
    run = backends.pick("roundtrip_fp8", x) or roundtrip_fp8_reference
    return run(x, group)


# MXFP4: index keys and index queries


def quantise_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q4m.

    x        [..., K] floats, K a multiple of 32; any strides, may be empty
    returns  packed codes [..., K/2] uint8, scales [..., K/32] uint8 UE8M0
    Raises   ShapeError.
    """
    parts = _groups("quantise_mxfp4", x, MX_GROUP)
    scales = _power_scale(parts.abs().amax(-1), MXFP4_FLOOR, FP4_MAX)
    return pack_nibbles(_encode_e2m1(parts / e8m0_value(scales)[..., None]).flatten(-2)), scales


def dequantise_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed [..., K/2] uint8, scales [..., K/32] uint8 -> [..., K] dtype. Exact in f32 and bf16."""
    _check_scales("dequantise_mxfp4", 2 * packed.shape[-1], scales, MX_GROUP)
    parts = _unpack_e2m1(packed, dtype).unflatten(-1, (scales.shape[-1], MX_GROUP))
    return (parts * e8m0_value(scales).to(dtype)[..., None]).flatten(-2)


def roundtrip_mxfp4_reference(x: Tensor) -> Tensor:
    parts = _groups("roundtrip_mxfp4", x, MX_GROUP)
    scale = e8m0_value(_power_scale(parts.abs().amax(-1, keepdim=True), MXFP4_FLOOR, FP4_MAX))
    return (_round_e2m1(parts / scale) * scale).flatten(-2).to(x.dtype)


def roundtrip_mxfp4(x: Tensor) -> Tensor:
    """dequantise(quantise(x)) in the dtype of x: x [..., K] floats, K a multiple of 32."""
    run = backends.pick("roundtrip_mxfp4", x) or roundtrip_mxfp4_reference
    return run(x)


# NVFP4: compressed KV


def quantise_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q4n. The scale is no power of two, so x/s is a true division.

    x        [..., K] floats, K a multiple of 16; any strides, may be empty. Beyond 2688 = 6 * 448 it saturates.
    returns  packed codes [..., K/2] uint8, scales [..., K/16] float8_e4m3fn
    Raises   ShapeError.
    """
    parts = _groups("quantise_nvfp4", x, NV_GROUP)
    scales = _nvfp4_scale(parts)
    return pack_nibbles(_encode_e2m1(parts / scales.float()[..., None]).flatten(-2)), scales


def dequantise_nvfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed [..., K/2] uint8, scales [..., K/16] float8_e4m3fn -> [..., K] dtype. Exact in f32 and bf16."""
    _check_scales("dequantise_nvfp4", 2 * packed.shape[-1], scales, NV_GROUP)
    parts = _unpack_e2m1(packed, torch.float32).unflatten(-1, (scales.shape[-1], NV_GROUP))
    return (parts * scales.float()[..., None]).flatten(-2).to(dtype)


def roundtrip_nvfp4_reference(x: Tensor) -> Tensor:
    parts = _groups("roundtrip_nvfp4", x, NV_GROUP)
    scale = _nvfp4_scale(parts).float()[..., None]
    return (_round_e2m1(parts / scale) * scale).flatten(-2).to(x.dtype)


def roundtrip_nvfp4(x: Tensor) -> Tensor:
    """dequantise(quantise(x)) in the dtype of x: x [..., K] floats, K a multiple of 16."""
    run = backends.pick("roundtrip_nvfp4", x) or roundtrip_nvfp4_reference
    return run(x)


def _check_scales(op: str, channels: int, scales: Tensor, group: int | None = None) -> None:
    count = scales.shape[-1]
    if (channels % count if count else channels) or (group is not None and channels != count * group):
        raise ShapeError(f"{op}: scales", want=f"one per {group or 'whole group'} of {channels} channels", got=count)


# Weights: dense FP8 in 32x32 blocks, expert FP4 in rows of 32


def quantise_weight_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per 32x32 block, from the block's maximum by the Q8 rule.

    weight   [..., N, K] floats; N and K need not be multiples of 32
    returns  codes [..., N, K] float8_e4m3fn, scales [..., ceil(N/32), ceil(K/32)] uint8 UE8M0
    Raises   ShapeError.
    """
    if weight.ndim < 2 or not weight.is_floating_point():
        raise ShapeError("quantise_weight_fp8: weight", want="floats [..., N, K]", got=tuple(weight.shape))
    n, k = weight.shape[-2:]
    blocks = F.pad(weight.float(), (0, -k % WEIGHT_BLOCK, 0, -n % WEIGHT_BLOCK))
    blocks = blocks.unflatten(-1, (-(-k // WEIGHT_BLOCK), WEIGHT_BLOCK))
    blocks = blocks.unflatten(-3, (-(-n // WEIGHT_BLOCK), WEIGHT_BLOCK))  # [..., N/32, 32, K/32, 32]
    scales = _power_scale(blocks.abs().amax((-3, -1)), FP8_FLOOR, FP8_MAX)
    codes = (weight.float() / _spread(scales, n, k)).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return codes, scales


def dequantise_weight_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """codes [..., N, K] float8_e4m3fn, scales [..., ceil(N/32), ceil(K/32)] uint8 -> [..., N, K] dtype. Exact."""
    n, k = codes.shape[-2:]
    want = (*codes.shape[:-2], -(-n // WEIGHT_BLOCK), -(-k // WEIGHT_BLOCK))
    if tuple(scales.shape) != want:
        raise ShapeError("dequantise_weight_fp8: scales", want=want, got=tuple(scales.shape))
    values = _e4m3_values(codes.device)[codes.view(torch.uint8).int()].to(dtype)
    return values * _spread(scales, n, k).to(dtype)


def _spread(scales: Tensor, n: int, k: int) -> Tensor:
    """Block scales [..., ceil(N/32), ceil(K/32)] -> f32 [..., N, K]."""
    rows = e8m0_value(scales).repeat_interleave(WEIGHT_BLOCK, dim=-2)[..., :n, :]
    return rows.repeat_interleave(WEIGHT_BLOCK, dim=-1)[..., :k]


def quantise_weight_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Q4m along K, in the checkpoint's dtypes: [..., N, K] -> (int8 [..., N, K/2], uint8 UE8M0 [..., N, K/32])."""
    packed, scales = quantise_mxfp4(weight)
    return packed.view(torch.int8), scales


def dequantise_weight_fp4(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """packed int8 or uint8 [..., N, K/2], scales uint8 [..., N, K/32] -> [..., N, K] dtype. Exact."""
    return dequantise_mxfp4(packed, scales, dtype)


# Weights as they lie on a device


class Fp8Matrix(NamedTuple):
    """A weight in the checkpoint's bytes: one scale per 32x32 block."""

    codes: Tensor  # [..., N, K] float8_e4m3fn
    scales: Tensor  # [..., ceil(N/32), ceil(K/32)] uint8 UE8M0

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


class Fp4Matrix(NamedTuple):
    """Expert weights in the checkpoint's bytes: one scale per 32 channels of a row."""

    codes: Tensor  # [..., N, K/2] uint8, the even channel in the low nibble
    scales: Tensor  # [..., N, K/32] uint8 UE8M0

    @property
    def shape(self) -> torch.Size:
        """Of the values: [..., N, K]."""
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))


class RowMatrix(NamedTuple):
    """A weight with one power-of-two scale a row."""

    codes: Tensor  # [..., N, K] float8_e4m3fn
    scales: Tensor  # [..., N] f32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


Matrix = Tensor | Fp8Matrix | Fp4Matrix | RowMatrix


def values(weight: Matrix, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A weight's values. Exact in bf16 and f32; a tensor is handed back as it is."""
    if isinstance(weight, Fp8Matrix):
        return dequantise_weight_fp8(weight.codes, weight.scales, dtype)
    if isinstance(weight, Fp4Matrix):
        return dequantise_weight_fp4(weight.codes, weight.scales, dtype)
    if isinstance(weight, RowMatrix):
        return (weight.codes.float() * weight.scales[..., None]).to(dtype)
    return weight


M = TypeVar("M", bound=Matrix)


def rows_of(weight: M, start: int, end: int) -> M:
    """Rows start .. end-1 of a matrix [N, K], without a copy; both are multiples of 32 where scales are in blocks."""
    if isinstance(weight, Tensor):
        part: Matrix = weight[start:end]
    elif isinstance(weight, Fp8Matrix):
        assert start % WEIGHT_BLOCK == 0, f"row {start} is inside a block of {WEIGHT_BLOCK}"
        part = Fp8Matrix(weight.codes[start:end], weight.scales[start // WEIGHT_BLOCK : -(-end // WEIGHT_BLOCK)])
    else:
        part = type(weight)(weight.codes[start:end], weight.scales[start:end])
    return cast("M", part)


def expert(weight: Fp4Matrix, index: int) -> Fp4Matrix:
    """One expert's matrix [N, K] of [E, N, K], without a copy."""
    return Fp4Matrix(weight.codes[index], weight.scales[index])


def grouped(weight: M, groups: int) -> M:
    """A matrix [G*N, K] as [G, N, K], without a copy; N is a multiple of 32 where scales are in blocks."""
    if isinstance(weight, Tensor):
        split: Matrix = weight.unflatten(0, (groups, -1))
    else:
        split = type(weight)(*(part.unflatten(0, (groups, -1)) for part in weight))
    return cast("M", split)


def carry(x: Tensor) -> tuple[Tensor, Tensor]:
    """One power-of-two scale a row: s = 2^e, the smallest with max|x|/s <= 448.

    x        [..., K] bf16 or f32, as a rule on the FP8 grid. Its values of at least 2^-6 s are carried exactly, smaller
             ones go to the nearest multiple of 2^-9 s: off by at most 2^-10 s, under 4.4e-6 of the row's largest.
    returns  codes [..., K] float8_e4m3fn, rounded to nearest, ties to even, and scales [...] f32.
             A row of zeros has the scale of 1e-4; a row with a NaN or infinity has the scale NaN.
    """
    wide = x.float()
    scales = e8m0_value(_power_scale(wide.abs().amax(-1), FP8_FLOOR, FP8_MAX))
    return (wide / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(E4M3), scales


def roundtrip_carry(x: Tensor) -> Tensor:
    """The values of `carry`, in the dtype of x: x [..., K] floats."""
    codes, scales = carry(x)
    return (codes.float() * scales[..., None]).to(x.dtype)


def by_row(weight: Tensor | Fp8Matrix | Fp4Matrix) -> RowMatrix:
    """A weight [..., N, K] with one scale a row, by the rule of `carry`."""
    return RowMatrix(*carry(values(weight, torch.float32)))
