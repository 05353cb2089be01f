"""Quantisers against exact arithmetic: golden groups by hand, every bf16 number, and float64 tables written here."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, quant
from tests.golden import make_quant

GOLDEN = Path(__file__).parents[1] / "golden" / "quant.json"
KINDS: dict[str, tuple[Callable, Callable, Callable, int]] = {
    "fp8": (quant.quantise_fp8, quant.dequantise_fp8, quant.roundtrip_fp8, 32),
    "mxfp4": (quant.quantise_mxfp4, quant.dequantise_mxfp4, quant.roundtrip_mxfp4, 32),
    "nvfp4": (quant.quantise_nvfp4, quant.dequantise_nvfp4, quant.roundtrip_nvfp4, 16),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_path = pytest.mark.usefixtures("path")
CODES = {"fp8": np.array([float(v) for v in make_quant.E4M3]), "fp4": np.array([float(v) for v in make_quant.E2M1])}


INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()


@pytest.fixture(params=["reference", "backend", *(["interpreter"] if INTERPRETED else [])])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plain torch; whatever the table of backends gives on this machine; Triton on CPU tensors."""
    places = {"reference": backends.reference, "backend": nullcontext, "interpreter": lambda: backends.use("triton")}
    with places[request.param](), np.errstate(over="ignore"):  # the largest numbers round to infinity, here as there
        yield


def all_bf16() -> Tensor:
    """Every finite bf16 number, 65 280 of them."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[torch.isfinite(x)]


def code_bytes(kind: str, codes: Tensor) -> np.ndarray:
    """Codes as small integers, one per channel, unpacked without the package."""
    raw = codes.cpu().view(torch.uint8).numpy()
    if kind == "fp8":
        return raw
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)


def slow_scale(kind: str, top: np.ndarray) -> np.ndarray:
    """float32 group maxima -> scale bytes, by frexp and by distance to every E4M3 number."""
    top = top.astype(np.float32)
    if kind == "nvfp4":
        ratio = np.minimum(np.maximum(top, np.float32(6 * 2.0**-9)) / np.float32(6), np.float32(448))
        return slow_codes(ratio.astype(np.float64), CODES["fp8"])
    floor, limit = (np.float32(1e-4), 448) if kind == "fp8" else (np.float32(6 * 2.0**-126), 6)
    mantissa, exponent = np.frexp(np.maximum(top, floor) / np.float32(limit))  # mantissa in [0.5, 1)
    return (exponent - (mantissa == 0.5) + 127).astype(np.uint8)


def slow_codes(size: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Nearest entry of the table, ties to the even code, by measuring every distance in float64."""
    distance = np.abs(size[..., None] - table)
    best = distance.argmin(-1)
    tie = np.take_along_axis(distance, np.minimum(best + 1, len(table) - 1)[..., None], -1)[..., 0]
    up = (tie == distance.min(-1)) & (best % 2 == 1) & (best + 1 < len(table))
    return (best + up).astype(np.uint8)


def slow_value(kind: str, scales: np.ndarray) -> np.ndarray:
    if kind == "nvfp4":
        return CODES["fp8"][scales]
    return np.ldexp(1.0, scales.astype(np.int64) - 127)


def slow_quantise(kind: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 groups [n, g] -> (codes [n, g], scale bytes [n])."""
    scales = slow_scale(kind, np.abs(x).max(-1))
    table = CODES["fp8" if kind == "fp8" else "fp4"]
    quotient = (np.abs(x) / slow_value(kind, scales).astype(np.float32)[:, None]).astype(np.float32)
    codes = slow_codes(np.minimum(quotient.astype(np.float64), table[-1]), table)
    return codes | (np.signbit(x).astype(np.uint8) << (7 if kind == "fp8" else 3)), scales


def test_the_golden_file_is_what_its_script_makes() -> None:
    assert GOLDEN.read_text() == make_quant.make()


@every_path
@pytest.mark.parametrize("row", json.loads(GOLDEN.read_text()), ids=lambda row: f"{row['kind']}: {row['title']}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_groups(row: dict, dtype: torch.dtype) -> None:
    quantise, dequantise, roundtrip, _ = KINDS[row["kind"]]
    x = torch.tensor(row["values"], dtype=torch.float32).to(dtype)
    codes, scales = quantise(x)
    assert scales.view(torch.uint8).tolist() == [row["scale"]]
    assert code_bytes(row["kind"], codes).tolist() == row["codes"]
    assert torch.equal(roundtrip(x), dequantise(codes, scales).to(dtype))


@every_kind
def test_scale_of_every_bf16_maximum(kind: str) -> None:
    quantise, _, _, group = KINDS[kind]
    top = all_bf16()
    x = torch.zeros(len(top), group, dtype=torch.bfloat16)
    x[:, 3] = top
    _, scales = quantise(x)
    want = slow_scale(kind, top.float().abs().numpy())
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy()[:, 0], want)


def edges(kind: str) -> Tensor:
    """A few float32 steps around each maximum where the scale changes: ceiling and ties look at the last bit."""
    limit = 448 if kind == "fp8" else 6
    if kind == "nvfp4":
        middles = limit * (CODES["fp8"][1:] + CODES["fp8"][:-1]) / 2
    else:
        middles = limit * np.ldexp(1.0, np.arange(-20, 60))
    bits = middles.astype(np.float32).view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)
    x = torch.zeros(bits.size, KINDS[kind][3])
    x[:, -1] = torch.from_numpy(bits.reshape(-1).view(np.float32))
    return x


@every_kind
def test_scale_of_float32_maxima_around_every_boundary(kind: str) -> None:
    x = edges(kind)
    _, scales = KINDS[kind][0](x)
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy()[:, 0], slow_scale(kind, x[:, -1].numpy()))


@every_kind
def test_code_of_every_bf16_number_under_its_own_scale(kind: str) -> None:
    """Groups of neighbouring bf16 numbers: all mantissas, all exponents, both signs."""
    quantise, _, _, group = KINDS[kind]
    x = all_bf16()
    x = x[: len(x) // group * group].reshape(-1, group)
    codes, scales = quantise(x)
    want_codes, want_scales = slow_quantise(kind, x.float().numpy())
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy()[:, 0], want_scales)
    np.testing.assert_array_equal(code_bytes(kind, codes), want_codes)


@every_kind
@pytest.mark.parametrize("spread", [1e-6, 1.0, 300.0, 1e4])
def test_random_groups_of_wide_range(kind: str, spread: float) -> None:
    quantise, _, _, group = KINDS[kind]
    x = torch.randn(400, group) * torch.exp(2 * torch.randn(400, group)) * spread
    for dtype in (torch.float32, torch.bfloat16):
        codes, scales = quantise(x.to(dtype))
        want_codes, want_scales = slow_quantise(kind, x.to(dtype).float().numpy())
        np.testing.assert_array_equal(scales.view(torch.uint8).numpy()[:, 0], want_scales)
        np.testing.assert_array_equal(code_bytes(kind, codes), want_codes)


def test_nvfp4_ties_need_true_division() -> None:
    """Every scale times every midpoint: multiplying by the rounded reciprocal would flip some of these."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    scales = torch.tensor(CODES["fp8"][1:], dtype=torch.float32)
    x = torch.zeros(len(scales), 16)
    x[:, 0] = 6 * scales
    x[:, 1:8] = scales[:, None] * middles
    x[:, 8:15] = -x[:, 1:8]
    codes, got = quant.quantise_nvfp4(x)
    assert torch.equal(got[:, 0].float(), scales)
    want = [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 0]
    np.testing.assert_array_equal(code_bytes("nvfp4", codes), np.tile(want, (len(scales), 1)))


@every_path
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_roundtrip_is_dequantise_of_quantise_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    quantise, dequantise, roundtrip, group = KINDS[kind]
    x = torch.randn(33, 4 * group).mul(torch.exp(3 * torch.randn(33, 1))).to(dtype)
    x[0] = 0
    x[1] = -0.0
    codes, scales = quantise(x)
    got, want = roundtrip(x), dequantise(codes, scales, dtype)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert torch.equal(got, want)
    assert torch.equal(torch.signbit(got), torch.signbit(want))
    assert torch.signbit(got[1]).all(), "the sign of zero is kept"


@every_path
@every_kind
def test_reading_what_was_written_is_the_identity(kind: str) -> None:
    quantise, dequantise, roundtrip, group = KINDS[kind]
    once = roundtrip(torch.randn(200, 2 * group).bfloat16())
    assert torch.equal(dequantise(*quantise(once), torch.bfloat16), once)
    assert torch.equal(roundtrip(once), once)


@every_path
@every_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_takes_its_group_and_nothing_else(kind: str, bad: float) -> None:
    quantise, dequantise, roundtrip, group = KINDS[kind]
    x = torch.randn(3, 3 * group)
    clean = roundtrip(x)
    x[1, group + 5] = bad
    hit = torch.zeros(3, 3 * group, dtype=torch.bool)
    hit[1, group : 2 * group] = True
    for got in (roundtrip(x), dequantise(*quantise(x))):
        assert torch.equal(got.isnan(), hit)
        assert torch.equal(got[~hit], clean[~hit])


@every_path
@every_kind
def test_layout_does_not_matter_and_empty_is_fine(kind: str) -> None:
    quantise, dequantise, roundtrip, group = KINDS[kind]
    wide = torch.randn(4 * group, 6, 5)
    x = wide.permute(2, 1, 0)  # [5, 6, 4 groups], last dimension strided
    assert not x.is_contiguous()
    codes, scales = quantise(x)
    plain_codes, plain_scales = quantise(x.contiguous())
    assert torch.equal(codes.view(torch.uint8), plain_codes.view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8), plain_scales.view(torch.uint8))
    assert torch.equal(roundtrip(x), roundtrip(x.contiguous()))
    assert scales.shape == (5, 6, 4)
    for shape in ((0, group), (3, 0), (0,), (2, 0, 2 * group), (1, group)):
        empty = torch.zeros(shape)
        assert dequantise(*quantise(empty)).shape == shape
        assert roundtrip(empty).shape == shape


@every_path
@every_kind
def test_wrong_widths_are_refused(kind: str) -> None:
    quantise, dequantise, roundtrip, group = KINDS[kind]
    for x in (torch.zeros(2, group + 8), torch.tensor(1.0), torch.zeros(2, group, dtype=torch.int64)):
        with pytest.raises(ShapeError, match=f"{kind}: x"):
            quantise(x)
        with pytest.raises(ShapeError, match=f"{kind}: x"):
            roundtrip(x)
    codes, scales = quantise(torch.zeros(2, 4 * group))
    with pytest.raises(ShapeError, match="scales"):
        dequantise(codes, scales[:, :3])


@every_path
def test_rows_do_not_depend_on_their_neighbours() -> None:
    x = torch.randn(64, 96)
    for _, _, roundtrip, _ in KINDS.values():
        assert torch.equal(roundtrip(x)[17], roundtrip(x[17]))


def test_nibbles() -> None:
    codes = torch.arange(256).to(torch.uint8)
    low_high = torch.stack([codes & 15, codes >> 4], dim=-1).flatten()
    packed = quant.pack_nibbles(low_high)
    assert packed.tolist() == list(range(256)), "the even channel is the low nibble"
    for form in (packed, packed.view(torch.int8)):
        assert torch.equal(quant._unpack_e2m1(form, torch.float32), quant._decode_e2m1(low_high))


def test_every_fp4_code_and_every_scale_byte_reads_back() -> None:
    packed = torch.arange(256).to(torch.uint8).reshape(-1, 16)  # 16 rows of one group
    for byte in (0, 1, 100, 127, 252):
        got = quant.dequantise_mxfp4(packed, torch.full((16, 1), byte, dtype=torch.uint8))
        codes = code_bytes("mxfp4", packed)
        want = np.where(codes >= 8, -1, 1) * CODES["fp4"][codes & 7] * 2.0 ** (byte - 127)
        np.testing.assert_array_equal(got.numpy(), want.astype(np.float32))
    values = quant.e8m0_value(torch.arange(256).to(torch.uint8))
    np.testing.assert_array_equal(values.numpy()[:255], np.ldexp(1.0, np.arange(255) - 127).astype(np.float32))
    assert values[255].isnan()


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (33, 70), (1, 1), (3, 40, 64), (0, 64)])
def test_weight_fp8(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    codes, scales = quant.quantise_weight_fp8(weight)
    n, k = shape[-2:]
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape == shape
    assert scales.shape == (*shape[:-2], -(-n // 32), -(-k // 32))
    if not weight.numel():
        return
    flat, flat_codes = weight.reshape(-1, n, k), codes.view(torch.uint8).reshape(-1, n, k)
    flat_scales = scales.reshape(-1, *scales.shape[-2:])
    for b in range(flat.shape[0]):
        for i in range(flat_scales.shape[1]):
            for j in range(flat_scales.shape[2]):
                rows, cols = slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32)
                block = flat[b, rows, cols].reshape(1, -1).numpy()
                want, scale = slow_quantise("fp8", block)
                assert flat_scales[b, i, j] == scale[0]
                np.testing.assert_array_equal(flat_codes[b, rows, cols].reshape(1, -1).numpy(), want)
    back = quant.dequantise_weight_fp8(codes, scales)
    assert back.dtype == torch.bfloat16
    assert torch.equal(quant.dequantise_weight_fp8(*quant.quantise_weight_fp8(back)), back)
    assert torch.equal(back.float(), quant.dequantise_weight_fp8(codes, scales, torch.float32)), "exact in bf16"


@every_path
def test_weight_fp4_is_q4m_along_k_in_signed_bytes() -> None:
    weight = torch.randn(3, 8, 64)
    packed, scales = quant.quantise_weight_fp4(weight)
    assert packed.dtype == torch.int8
    assert packed.shape == (3, 8, 32)
    assert scales.shape == (3, 8, 2)
    assert torch.equal(quant.dequantise_weight_fp4(packed, scales).float(), quant.roundtrip_mxfp4(weight))
    assert quant.dequantise_weight_fp4(packed, scales).dtype == torch.bfloat16


@every_kind
def test_every_bf16_number_goes_the_same_way_on_every_path(kind: str) -> None:
    quantise, dequantise, roundtrip, _ = KINDS[kind]
    x = all_bf16()
    x = torch.cat([x[: len(x) // 32 * 32], x.flip(0)[: len(x) // 32 * 32]]).reshape(-1, 32)
    for value in (x, x.float(), x.float() * 1.0001):
        want = dequantise(*quantise(value), value.dtype)
        assert torch.equal(roundtrip(value), want)
        with backends.reference():
            assert torch.equal(roundtrip(value), want)
            assert torch.equal(dequantise(*quantise(value), value.dtype), want)


def test_weight_scales_of_the_wrong_shape_are_refused() -> None:
    codes, scales = quant.quantise_weight_fp8(torch.randn(64, 96))
    with pytest.raises(ShapeError, match="scales"):
        quant.dequantise_weight_fp8(codes, scales.T)
    with pytest.raises(ShapeError, match="weight"):
        quant.quantise_weight_fp8(torch.zeros(32))


@every_kind
def test_triton_codes_are_the_same_bits(kind: str) -> None:
    kernels = pytest.importorskip("benthic.kernels.triton.quant")
    quantise, _, _, group = KINDS[kind]
    of_triton = getattr(kernels, quantise.__name__)
    place = "cpu" if INTERPRETED else "cuda"
    x = all_bf16()
    x = x[: len(x) // 32 * 32].reshape(-1, 4 * group if kind == "nvfp4" else 32)
    wide = torch.randn(40, 6 * group) * torch.exp(3 * torch.randn(40, 1))
    strided = (wide[:, : 2 * group], wide.T.contiguous().T, wide[:0])
    for value in (edges(kind), x, x.float() * 1.0001, wide, wide.half(), *strided):
        for got, want in zip(of_triton(value.to(place)), quantise(value), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
    wide[3, 5] = torch.nan
    _, scales = of_triton(wide.to(place))
    assert torch.equal(scales.cpu().view(torch.uint8), quantise(wide)[1].view(torch.uint8)), "a NaN is not hidden"


@pytest.mark.gpu
@every_kind
def test_addresses_beyond_32_bits(kind: str) -> None:
    roundtrip = KINDS[kind][2]
    x = torch.ones(420_000, 5120, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.randn(2, 5120, device="cuda")
    assert torch.equal(roundtrip(x)[-2:], roundtrip(x[-2:]))


@pytest.mark.gpu
@every_kind
def test_cuda_gives_the_same_bits(kind: str) -> None:
    quantise, _, roundtrip, group = KINDS[kind]
    x = all_bf16()
    x = x[: len(x) // group * group].reshape(-1, group)
    for value in (x, torch.randn(1000, 4 * group) * 20):
        for here, there in zip(
            (*quantise(value), roundtrip(value)), (*quantise(value.cuda()), roundtrip(value.cuda())), strict=True
        ):
            assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
