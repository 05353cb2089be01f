"""Bit equality with the reference quantisers, over every bfloat16 value and every rounding tie."""

import pytest
import torch
from torch import Tensor

from benthic.kernels import backends, kv_copy, quant
from benthic.kernels.native import kv_copy as native_kv
from benthic.kernels.native import quant as native

EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NAMES = ("roundtrip_fp8", "roundtrip_mxfp4", "roundtrip_nvfp4")


def bits(x: Tensor) -> Tensor:
    """Bits, with one NaN."""
    whole = x.view(torch.int16) if x.dtype == torch.bfloat16 else x.view(torch.int32)
    return torch.where(x.isnan(), 0x7FC0, whole.int())


def both(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    with backends.reference():
        want = getattr(quant, name)(x)
    return bits(getattr(native, name)(x)), bits(want)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_sets_the_scale(name: str) -> None:
    """Each of the 65536 values is the largest of one group, NaN and infinity included."""
    group = torch.zeros(1 << 16, 32, dtype=torch.bfloat16)
    group[:, 0] = EVERY_BF16
    group[:, 17] = -EVERY_BF16 * 0.37
    assert torch.equal(*both(name, group))
    assert torch.equal(*both(name, group.float()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top", [448.0, 6.0, 1.0, 3e-5, 2e20, 300.0])
def test_every_value_below_a_scale(name: str, top: float) -> None:
    """Each finite value below a fixed maximum: every code and every tie."""
    values = EVERY_BF16[EVERY_BF16.isfinite() & (EVERY_BF16.abs() <= top)]
    values = torch.nn.functional.pad(values, (0, -len(values) % 15)).unflatten(0, (-1, 15))
    head = torch.full((len(values), 1), top, dtype=torch.bfloat16)
    groups = torch.cat([head, values, head, values.flip(1)], dim=1)
    assert torch.equal(*both(name, groups))


@pytest.mark.parametrize("name", NAMES)
def test_ties_go_to_the_even_code(name: str) -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.zeros(1, 32)
    x[0, :7], x[0, 7:14], x[0, 14:16], x[0, 16] = midpoints, -midpoints, 6.0, 6.0
    got, want = both(name, x)
    assert torch.equal(got, want)
    if name == "roundtrip_mxfp4":
        assert native.roundtrip_mxfp4(x)[0, :7].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 2, 96), (65, 256), (32,)])
@pytest.mark.parametrize("name", NAMES)
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 50
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(*both(name, x.to(dtype)))


def test_not_contiguous() -> None:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(2)).t()  # [10, 64]
    assert torch.equal(*both("roundtrip_fp8", x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_fp8_code_and_scale(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)  # [256, 256]
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)
    kept = torch.arange(256) != 0  # 2^-127 times a code may lie below the normal numbers
    got = native.dequantise_fp8(codes[kept], scales[kept], dtype)
    with backends.reference():
        want = quant.dequantise_fp8(codes[kept], scales[kept], dtype)
    normal = (want.abs() >= 2.0**-126) | (want == 0) | want.isnan()
    assert torch.equal(bits(got)[normal], bits(want)[normal])


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "nvfp4"])
def test_packed_bytes(form: str) -> None:
    """What is written is what the reference writes, byte for byte, and nothing else is touched."""
    values = torch.randn(70, 128, generator=torch.Generator().manual_seed(3)) * 4
    values[3], values[4, 5], values[5] = 0, torch.inf, 1e-30
    poison = torch.full((9, 24000), 0x5A, dtype=torch.uint8)
    ids = torch.randperm(9 * 64, generator=torch.Generator().manual_seed(4))[:70]
    pools = []
    for write in (kv_copy.write_records_reference, native_kv.write_records):
        paged = kv_copy.Paged(poison.clone(), 64, 64 + 64 * 132, 64, 128, form)
        write(paged, ids, values)
        write(paged, ids[:0], values[:0])
        pools.append(paged.pool)
    assert torch.equal(*pools)
    paged = kv_copy.Paged(pools[0], 64, 64 + 64 * 132, 64, 128, form)
    asked = torch.cat([ids, torch.tensor([-1])]).unsqueeze(1)
    assert torch.equal(bits(native_kv.read_records(paged, asked)), bits(kv_copy.read_records_reference(paged, asked)))
