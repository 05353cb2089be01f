"""Clamped SwiGLU against golden vectors and float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels.swiglu import swiglu
from benthic.testing.cases import ROWS, WIDTHS
from benthic.testing.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16)


def exact(gate: Tensor, up: Tensor, limit: float, weights: Tensor | None) -> Tensor:
    a, b = gate.double(), up.double()
    if limit > 0:
        a = torch.where(a > limit, limit, a)
        b = torch.where(b > limit, limit, torch.where(b < -limit, -limit, b))
    y = a / (1 + torch.exp(-a)) * b
    return y if weights is None else y * weights.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device, dtype: torch.dtype) -> None:
    data = golden("swiglu")
    gate, up = (torch.tensor([data[name]], dtype=dtype, device=device) for name in ("gate", "up"))
    for case in data["cases"]:
        weights = torch.tensor([case["weight"]], device=device)
        y = swiglu(gate, up, case["limit"], weights)
        assert y.dtype == dtype
        assert_close("swiglu", y, torch.tensor([case["y"]], dtype=torch.float64))


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [w.width for w in WIDTHS])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_shapes(
    device: torch.device, rows: int, width: int, weighted: bool, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    both = (8 * torch.randn(rows, 2 * width, device=device)).to(dtype)
    gate, up = both.chunk(2, dim=-1)  # halves of one product: strided
    weights = torch.rand(rows, device=device) if weighted else None
    y = swiglu(gate, up, 10.0, weights, out_dtype)
    assert y.dtype == (out_dtype or dtype)
    assert_close("swiglu", y, exact(gate, up, 10.0, weights))


def test_product_is_rounded_once(device: torch.device) -> None:
    """The routing weight multiplies the unrounded product."""
    gate, up = torch.randn(2, 64, 96, device=device).bfloat16().unbind(0)
    weights = torch.rand(64, device=device)
    assert torch.equal(
        swiglu(gate, up, 10.0, weights), swiglu(gate, up, 10.0, weights, torch.float32).to(torch.bfloat16)
    )


@pytest.mark.gpu
def test_addresses_beyond_32_bits() -> None:
    both = torch.ones(940_000, 4608, dtype=torch.bfloat16, device="cuda")
    both[-2:] = torch.randn(2, 4608, device="cuda")
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(swiglu(gate, up, 10.0)[-2:], swiglu(gate[-2:], up[-2:], 10.0))


def test_what_is_no_number_stays_so(device: torch.device) -> None:
    gate = torch.tensor([[torch.nan, torch.inf, -torch.inf, -200.0, 200.0, -88.0, 1.0]], device=device)
    up = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, torch.nan]], device=device)
    for limit, high in ((10.0, 9.999546), (0.0, torch.inf)):
        with np.errstate(invalid="ignore"):  # the interpreter warns where a GPU does not
            y = swiglu(gate, up, limit)[0].tolist()
        assert y[0] != y[0]
        assert y[6] != y[6]
        assert y[1] == pytest.approx(high)
        assert abs(y[3]) + abs(y[5]) < 1e-35


def test_refuses() -> None:
    with pytest.raises(ShapeError, match="swiglu: up"):
        swiglu(torch.zeros(2, 3), torch.zeros(2, 4), 10.0)
    with pytest.raises(ShapeError, match="swiglu: weights"):
        swiglu(torch.zeros(2, 3), torch.zeros(2, 3), 10.0, torch.zeros(3))
