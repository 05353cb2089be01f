"""Triton versions of `kernels/quant.py`, and the device functions that fused kernels build on. Contracts are there.

Device functions take the group as the last axis: x [..., 32] f32 (16 for NVFP4), any leading axes. `by_groups` and
`flat` go between [R, K] and [R, K/32, 32] without moving data.

    widen(x) -> f32, narrow(x, dtype)                conversions between f32 and what is stored, to nearest even
    e4m3(y) -> float8e4nv, e4m3_value(codes) -> f32  the same for FP8; y within +-448 or NaN
    e8m0_value(byte) -> f32                          byte int32 or uint8
    bound(x)                                         a number known on the device only, as an end of a loop
    q8(x) -> codes [..., 32] float8e4nv, byte [...] int32        q8_values(x) -> f32
    q4m(x) -> nibbles [..., 32] int32, byte [...] int32          q4m_values(x) -> f32
    q4n(x) -> nibbles [..., 16] int32, scale [...] float8e4nv    q4n_values(x) -> f32
    e2m1_values(words, factor) -> bf16 [N, W, 2, 2, 2]           eight codes a word; by the instructions of E2M1_PAIRS
    carry_byte(maximum bits) -> byte                 the scale of `quant.carry`, from a row's `magnitude_bits`
    pack(nibbles [R, K]) -> uint8 [R, K/2]           the even channel in the low nibble

Scales come from the bits of the group's largest magnitude alone: max/448 is above 2^k exactly where max is above
448 * 2^k = 1.75 * 2^(k+8), in float32 too, since the next number after it is more than half a step away. So the
exponent field moves up where the mantissa exceeds that of 448 (of 6 for Q4m), and no division is left. Magnitudes are
compared as integers: a NaN is above infinity, so that it wins and nothing hides it.

The interpreter truncates where the hardware rounds, and has no FP8 NaN. INTERPRETED selects plain arithmetic of the
same result for those conversions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import quant as plain
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))

_FINITE: tl.constexpr = tl.constexpr(0x7F800000)  # magnitude bits below this are numbers
_Q8_FLOOR: tl.constexpr = tl.constexpr(0x38D1B717)  # bits of 1e-4
_Q4M_FLOOR: tl.constexpr = tl.constexpr(0x01C00000)  # bits of 6 * 2^-126
_Q4N_FLOOR: tl.constexpr = tl.constexpr(0x3C400000)  # bits of 6 * 2^-9


# Conversions


@triton.jit
def widen(x):
    """Stored values -> f32; exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return ((x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """f32 -> dtype, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        number = (bits & 0x7FFFFFFF) <= _FINITE
        rounded = tl.where(number, bits.to(tl.int64) + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def e4m3(y):
    """f32 within +-448, or NaN -> float8e4nv, to nearest, ties to even; keeps the sign of zero."""
    if INTERPRETED:
        bits = y.to(tl.int32, bitcast=True)
        size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, 121)  # 2^-6 and below share the step 2^-9
        shift = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
        size = tl.where(size == size, size + shift - shift, 0.0)
        small = (size * 512.0).to(tl.int32)
        code = tl.where(size < 0.015625, small, (size.to(tl.int32, bitcast=True) >> 20) - 960)
        code = tl.where(y == y, code | ((bits >> 24) & 0x80), 0x7F)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return y.to(tl.float8e4nv)


@triton.jit
def e4m3_value(codes):
    """float8e4nv -> f32; exact."""
    if INTERPRETED:
        code = codes.to(tl.uint8, bitcast=True).to(tl.int32)
        size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        size = tl.where((code & 0x7F) == 0x7F, float("nan"), size)
        return (size.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return codes.to(tl.float32)


@triton.jit
def e8m0_value(byte):
    """UE8M0 bytes -> 2^(b-127) f32; 0 is the subnormal 2^-127, 255 is NaN."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bound(x):
    """A loop bound. Under the interpreter a number on the device is an array of one, which `range` does not take."""
    if INTERPRETED:
        return x.handle.data.item()
    return x


# Groups


@triton.jit
def by_groups(x, GROUP: tl.constexpr):
    """[R, K] -> [R, K/GROUP, GROUP]."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))


@triton.jit
def flat(x):
    """[R, G, N] -> [R, G*N]."""
    return tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))


@triton.jit
def magnitude_bits(x):
    """Largest magnitude along the last axis of x f32, as its bits."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=-1)


@triton.jit
def _inverse(byte, number):
    """1 / 2^(byte-127), byte 1 to 253; NaN where the group is no number."""
    return tl.where(number, (254 - byte) << 23, 0x7FC00000).to(tl.float32, bitcast=True)


# Q8


@triton.jit
def _q8_exponent(top):
    return ((tl.maximum(top, _Q8_FLOOR) + 0x1FFFFF) >> 23) - 8


@triton.jit
def _clamp(y, LIMIT: tl.constexpr):
    return tl.clamp(y, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def carry_byte(top):
    """`magnitude_bits` of a row or group -> UE8M0 byte int32 by the Q8 rule; 255 where it is no number."""
    return tl.where(top < _FINITE, _q8_exponent(top), 255)


@triton.jit
def q8(x):
    top = magnitude_bits(x)
    byte = _q8_exponent(top)
    codes = e4m3(_clamp(x * tl.expand_dims(_inverse(byte, top < _FINITE), -1), 448.0))
    return codes, tl.where(top < _FINITE, byte, 255)


@triton.jit
def q8_values(x):
    codes, byte = q8(x)
    return e4m3_value(codes) * tl.expand_dims(e8m0_value(byte), -1)


# E2M1: adding 2^23 steps rounds to whole steps, ties to even, and leaves their number in the low bits


@triton.jit
def _e2m1_steps(y):
    """|y| clamped to 6 and what to add to it: 2^23 steps of 0.5 below 2, of 1 below 4, of 2 above."""
    size = tl.minimum(tl.abs(y), 6.0)
    return size, tl.where(size < 2.0, 4194304.0, tl.where(size < 4.0, 8388608.0, 16777216.0))


@triton.jit
def e2m1(y):
    """Nearest E2M1 code of y f32 as int32, sign in bit 3; ties to the even code, beyond 6 it is 6, NaN is 0."""
    size, shift = _e2m1_steps(y)
    steps = (size + shift).to(tl.int32, bitcast=True) & 7
    code = steps + tl.where(size < 2.0, 0, tl.where(size < 4.0, 2, 4))
    return tl.where(y == y, code | ((y.to(tl.int32, bitcast=True) >> 28) & 8), 0)


@triton.jit
def e2m1_value(code):
    """Codes int32 0 to 15 -> f32."""
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # E2M1 is f32's top bits times 2^126
    return (size.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _round_e2m1(y):
    """Nearest E2M1 value; keeps the sign of zero and NaN."""
    size, shift = _e2m1_steps(y)
    size = (size + shift) - shift
    signed = size.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & -0x80000000)
    return tl.where(y == y, signed.to(tl.float32, bitcast=True), y)


# Eight E2M1 codes of a word ($4) and a factor, twice in a register ($5) -> pairs of bf16: codes (0, 4), (1, 5), (2, 6)
# and (3, 7) times 2^-126 and the factor. A code's sign goes to bit 15, its magnitude to bits 8..6, where bf16 reads it
# as the value times 2^-126, subnormal or not. Codes 16 bits apart are moved by one multiplication: their bits cannot
# run into each other.
E2M1_PAIRS: tl.constexpr = tl.constexpr("""{
.reg .b32 word, a, b, c, d;
shr.u32 word, $4, 8;
and.b32 a, $4, 0x000F000F;
and.b32 b, $4, 0x00F000F0;
and.b32 c, word, 0x000F000F;
and.b32 d, word, 0x00F000F0;
mul.lo.u32 a, a, 0x1040;
mul.lo.u32 b, b, 0x0104;
mul.lo.u32 c, c, 0x1040;
mul.lo.u32 d, d, 0x0104;
and.b32 a, a, 0x81C081C0;
and.b32 b, b, 0x81C081C0;
and.b32 c, c, 0x81C081C0;
and.b32 d, d, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $5;
}""")


@triton.jit
def _plain_pair(words, factor, FIRST: tl.constexpr):
    """Codes FIRST and FIRST+4 of each word times 2^-126 and the factor, as two bf16 in a word."""
    scale = ((factor & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    low, high = (words >> (4 * FIRST)) & 15, (words >> (4 * FIRST + 16)) & 15
    low = (((low & 7) << 22) | ((low & 8) << 28)).to(tl.float32, bitcast=True) * scale
    high = (((high & 7) << 22) | ((high & 8) << 28)).to(tl.float32, bitcast=True) * scale
    return (low.to(tl.uint32, bitcast=True) >> 16) | (high.to(tl.uint32, bitcast=True) & 0xFFFF0000)


@triton.jit
def e2m1_values(words, factor):
    """Packed words of eight codes, and a bf16 twice in a word: uint32 [N, W] each -> bf16 [N, W, 2, 2, 2].

    Code 4*half + 2*b + a of a word is at [a, b, half], times 2^-126 and the factor.
    """
    if INTERPRETED:
        p0, p1 = _plain_pair(words, factor, 0), _plain_pair(words, factor, 1)
        p2, p3 = _plain_pair(words, factor, 2), _plain_pair(words, factor, 3)
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            E2M1_PAIRS, "=&r,=&r,=&r,=&r,r,r", [words, factor], dtype=(tl.uint32,) * 4, is_pure=True, pack=1
        )
    pairs = tl.join(tl.join(p0, p1), tl.join(p2, p3))
    low = (pairs & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True))


@triton.jit
def pack(nibbles):
    """[R, K] int32 codes below 16 -> [R, K/2] uint8, the even channel in the low nibble."""
    low, high = tl.split(tl.reshape(nibbles, (nibbles.shape[0], nibbles.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


# Q4m


@triton.jit
def _q4m_scaled(x):
    """x over its group's scale, and that scale's byte."""
    top = magnitude_bits(x)
    byte = ((tl.maximum(top, _Q4M_FLOOR) + 0x3FFFFF) >> 23) - 2
    return x * tl.expand_dims(_inverse(byte, top < _FINITE), -1), tl.where(top < _FINITE, byte, 255)


@triton.jit
def q4m(x):
    y, byte = _q4m_scaled(x)
    return e2m1(y), byte


@triton.jit
def q4m_values(x):
    y, byte = _q4m_scaled(x)
    return _round_e2m1(y) * tl.expand_dims(e8m0_value(byte), -1)


# Q4n


@triton.jit
def _q4n_scaled(x):
    """x over its group's scale, by true division, and that scale."""
    top = magnitude_bits(x)
    wide = tl.maximum(top, _Q4N_FLOOR).to(tl.float32, bitcast=True)
    ratio = tl.minimum(tl.div_rn(wide, tl.full(wide.shape, 6.0, tl.float32)), 448.0)
    scale = e4m3(tl.where(top < _FINITE, ratio, float("nan")))
    divisor = tl.broadcast_to(tl.expand_dims(e4m3_value(scale), -1), x.shape)
    return tl.div_rn(x, divisor), scale


@triton.jit
def q4n(x):
    y, scale = _q4n_scaled(x)
    return e2m1(y), scale


@triton.jit
def q4n_values(x):
    y, scale = _q4n_scaled(x)
    return _round_e2m1(y) * tl.expand_dims(e4m3_value(scale), -1)


# The ops. A program takes BLOCK groups, whatever rows they are in, so that bits do not depend on the number of rows.

BLOCK = 128  # groups; 4096 channels of Q8, 32 a thread
WARPS = 4


@triton.jit
def _group_offsets(groups, per_row, row_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [BLOCK], offsets [BLOCK, GROUP] of their channels in rows that are row_stride apart, and who is live."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = group // per_row
    first = row * row_stride + (group - row * per_row) * GROUP
    live = group < groups
    return group, first[:, None] + tl.arange(0, GROUP)[None, :], live


@triton.jit(do_not_specialize=["groups"])
def _roundtrip(x_ptr, y_ptr, groups, per_row, row_stride, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    group, at, live = _group_offsets(groups, per_row, row_stride, GROUP, BLOCK)
    x = widen(tl.load(x_ptr + at, mask=live[:, None], other=0.0))
    if KIND == "fp8":
        y = q8_values(x)
    elif KIND == "mxfp4":
        y = q4m_values(x)
    else:
        y = q4n_values(x)
    to = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(y_ptr + to, narrow(y, y_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["groups"])
def _quantise(
    x_ptr,
    codes_ptr,
    scales_ptr,
    groups,
    per_row,
    row_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, at, live = _group_offsets(groups, per_row, row_stride, GROUP, BLOCK)
    x = widen(tl.load(x_ptr + at, mask=live[:, None], other=0.0))
    if KIND == "fp8":
        codes, scale = q8(x)
        codes = codes.to(tl.uint8, bitcast=True)
        scale = scale.to(tl.uint8)
        to = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    else:
        if KIND == "mxfp4":
            nibbles, scale = q4m(x)
            scale = scale.to(tl.uint8)
        else:
            nibbles, scale = q4n(x)
            scale = scale.to(tl.uint8, bitcast=True)
        codes = pack(nibbles)
        to = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    tl.store(codes_ptr + to, codes, mask=live[:, None])
    tl.store(scales_ptr + group, scale, mask=live)


@triton.jit(do_not_specialize=["groups"])
def _dequantise_fp8(codes_ptr, scales_ptr, y_ptr, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scale = e8m0_value(tl.load(scales_ptr + group, mask=live, other=0))
    y = e4m3_value(tl.load(codes_ptr + at, mask=live[:, None], other=0.0)) * scale[:, None]
    tl.store(y_ptr + at, narrow(y, y_ptr.dtype.element_ty), mask=live[:, None])


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _rows(x: Tensor, group: int) -> tuple[Tensor, int, int, int] | None:
    """x with evenly spaced rows, number of groups, groups a row, elements between rows; None: not for these kernels."""
    if x.ndim == 0 or x.shape[-1] % group or x.dtype not in FLOATS or group & (group - 1):
        return None
    if x.ndim != 2 or x.stride(1) != 1:
        x = x.contiguous()
    width = x.shape[-1]
    return x, x.numel() // group, max(width // group, 1), x.stride(0) if x.ndim == 2 else width


def _round(kind: str, x: Tensor, group: int) -> Tensor | None:
    """None: the reference says what is wrong with x, or takes it."""
    rows = _rows(x, group)
    if rows is None:
        return None
    x, groups, per_row, stride = rows
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if groups:
        _roundtrip[(cdiv(groups, BLOCK),)](
            x, y, groups, per_row, stride, KIND=kind, GROUP=group, BLOCK=BLOCK, num_warps=WARPS
        )
    return y


def _codes(kind: str, x: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    rows = _rows(x, group)
    if rows is None:
        return None
    x, groups, per_row, stride = rows
    bytes_a_row = x.shape[-1] if kind == "fp8" else x.shape[-1] // 2
    codes = torch.empty((*x.shape[:-1], bytes_a_row), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*x.shape[:-1], x.shape[-1] // group), dtype=torch.uint8, device=x.device)
    if groups:
        _quantise[(cdiv(groups, BLOCK),)](
            x, codes, scales, groups, per_row, stride, KIND=kind, GROUP=group, BLOCK=BLOCK, num_warps=WARPS
        )
    return codes.view(plain.E4M3) if kind == "fp8" else codes, scales.view(scale_dtype)


def roundtrip_fp8(x: Tensor, group: int = plain.MX_GROUP) -> Tensor:
    y = _round("fp8", x, group)
    return plain.roundtrip_fp8_reference(x, group) if y is None else y


def roundtrip_mxfp4(x: Tensor) -> Tensor:
    y = _round("mxfp4", x, plain.MX_GROUP)
    return plain.roundtrip_mxfp4_reference(x) if y is None else y


def roundtrip_nvfp4(x: Tensor) -> Tensor:
    y = _round("nvfp4", x, plain.NV_GROUP)
    return plain.roundtrip_nvfp4_reference(x) if y is None else y


def quantise_fp8(x: Tensor, group: int = plain.MX_GROUP) -> tuple[Tensor, Tensor]:
    return _codes("fp8", x, group, torch.uint8) or plain.quantise_fp8(x, group)


def quantise_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    return _codes("mxfp4", x, plain.MX_GROUP, torch.uint8) or plain.quantise_mxfp4(x)


def quantise_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    return _codes("nvfp4", x, plain.NV_GROUP, plain.E4M3) or plain.quantise_nvfp4(x)


def dequantise_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    count = scales.shape[-1]
    group = codes.shape[-1] // count if count else 0
    if dtype not in FLOATS or group == 0 or group & (group - 1) or codes.shape[-1] % count:
        return plain.dequantise_fp8_reference(codes, scales, dtype)
    codes, scales = codes.contiguous(), scales.contiguous()
    y = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if scales.numel():
        _dequantise_fp8[(cdiv(scales.numel(), BLOCK),)](
            codes, scales, y, scales.numel(), GROUP=group, BLOCK=BLOCK, num_warps=WARPS
        )
    return y
