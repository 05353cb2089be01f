"""Rotary positions against golden vectors, complex multiplication in float64, and their own inverse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels.rope import rope_frequencies, rotate
from benthic.testing.cases import ROWS
from benthic.testing.tolerances import assert_close


def exact(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    pairs = freqs.shape[0]
    wide = x.double()
    turned = torch.view_as_complex(wide[..., -2 * pairs :].unflatten(-1, (pairs, 2)).contiguous())
    angles = (positions.double()[:, None] * freqs.double()).reshape(-1, *(1,) * (x.ndim - 2), pairs)
    turned = torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([wide[..., : -2 * pairs], turned], dim=-1)


def test_golden_frequencies(golden: Callable[[str], dict[str, Any]]) -> None:
    for case in golden("rope")["frequencies"]:
        yarn = tuple(case["yarn"]) if case["yarn"] else None
        got = rope_frequencies(case["dim"], case["theta"], yarn)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), torch.tensor(case["f"], dtype=torch.float64), rtol=3e-7, atol=0)


def test_release_blends_pairs_15_to_25() -> None:
    plain = rope_frequencies(64, 160000.0)
    ratio = plain / rope_frequencies(64, 160000.0, (16, 32, 1, 65536))
    assert torch.equal(ratio[:16], torch.ones(16))
    assert torch.equal(ratio[25:], torch.full((7,), 16.0))
    assert ((ratio[16:25] > 1) & (ratio[16:25] < 16)).all()


def test_frequencies_are_one_over_a_float32_power() -> None:
    """The stated form and its last bit: not exp of a logarithm, not a power of the reciprocal."""
    steps = torch.arange(0, 64, 2, dtype=torch.float32) / 64
    assert torch.equal(rope_frequencies(64, 10000.0), 1.0 / torch.pow(torch.tensor(10000.0), steps))


def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    data = golden("rope")
    freqs = torch.tensor(data["freqs"], device=device)
    positions = torch.tensor(data["positions"], device=device)
    x = torch.tensor([data["x"]] * len(data["positions"]), device=device)
    for want, inverse in ((data["turned"], False), (data["back"], True)):
        assert_close("rotate", rotate(x, positions, freqs, inverse), torch.tensor(want, dtype=torch.float64), 6.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
@pytest.mark.parametrize("heads", [(), (1,), (5,), (2, 3)])
def test_shapes(device: torch.device, rows: int, heads: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(rows, *heads, 48, device=device).to(dtype)
    positions = torch.randint(0, 3000, (rows,), device=device)
    freqs = rope_frequencies(32, 10000.0).to(device)
    y = rotate(x, positions, freqs)
    assert y.dtype == dtype
    # the angle itself is rounded to float32: 3000 * 2^-24 radians
    assert_close("rotate", y, exact(x, positions, freqs), 300.0)
    assert torch.equal(y[..., :16], x[..., :16])


def test_last_position_of_the_context(device: torch.device) -> None:
    x = torch.randn(2, 64, device=device)
    positions = torch.tensor([1048575, 1048574], device=device)
    freqs = rope_frequencies(64, 10000.0).to(device)
    assert_close("rotate_far", rotate(x, positions, freqs), exact(x, positions, freqs), 4.0)
    angle = (positions.float()[:, None] * freqs).double()  # rounded where the specification rounds
    by_rounded_angle = torch.stack([exact(x[i : i + 1], torch.ones(1, device=device), angle[i])[0] for i in range(2)])
    assert_close("rotate", rotate(x, positions, freqs), by_rounded_angle, 4.0)


def test_strides(device: torch.device) -> None:
    whole = torch.randn(7, 6, 128, device=device).bfloat16()
    positions = torch.arange(14, device=device)
    freqs = rope_frequencies(16, 10000.0).to(device)
    for x, at in (
        (whole[:, ::2, 32:96], positions[:7]),
        (whole[..., 64:], positions[::2]),
        (whole.transpose(0, 1), positions[:6]),
    ):
        assert_close("rotate", rotate(x, at, freqs), exact(x, at, freqs), 8.0)


@pytest.mark.gpu
def test_addresses_beyond_32_bits() -> None:
    x = torch.ones(70_000, 64, 512, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.randn(2, 64, 512, device="cuda")
    at, freqs = torch.arange(70_000, device="cuda"), rope_frequencies(64, 10000.0).cuda()
    assert torch.equal(rotate(x, at, freqs)[-2:], rotate(x[-2:], at[-2:], freqs))


@given(st.integers(0, 1 << 20), st.integers(1, 8), st.integers(0, 5))
def test_inverse_undoes(position: int, pairs: int, plain: int) -> None:
    x = torch.randn(1, 3, plain + 2 * pairs, generator=torch.Generator().manual_seed(position))
    freqs, at = rope_frequencies(2 * pairs, 10000.0), torch.tensor([position])
    back = rotate(rotate(x, at, freqs), at, freqs, inverse=True)
    torch.testing.assert_close(back, x, atol=1e-5, rtol=0)


@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 500))
def test_products_depend_on_distance_only(a: int, b: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(a)
    q, k = torch.randn(2, 1, 16, generator=generator).unbind(0)
    freqs = rope_frequencies(16, 10000.0)

    def product(first: int, second: int) -> Tensor:
        return (rotate(q, torch.tensor([first]), freqs) * rotate(k, torch.tensor([second]), freqs)).sum()

    torch.testing.assert_close(product(a, b), product(a + shift, b + shift), atol=2e-2, rtol=0)


def test_refuses() -> None:
    freqs = rope_frequencies(16, 10000.0)
    with pytest.raises(ShapeError, match="rotate: x"):
        rotate(torch.zeros(2, 15), torch.zeros(2, dtype=torch.int64), freqs)
    with pytest.raises(ShapeError, match="rotate: positions"):
        rotate(torch.zeros(2, 16), torch.zeros(3, dtype=torch.int64), freqs)
    with pytest.raises(ShapeError, match="rope_frequencies: dim"):
        rope_frequencies(7, 10000.0)
