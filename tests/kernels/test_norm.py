"""The root-mean-square norm against golden vectors and float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels.norm import rms_norm
from benthic.testing.cases import ROWS, WIDTHS
from benthic.testing.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16)


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device, dtype: torch.dtype) -> None:
    data = golden("norm")
    weight = torch.tensor(data["weight"], device=device)
    for case in data["cases"]:
        y = rms_norm(torch.tensor(case["x"], dtype=dtype, device=device), weight, data["eps"])
        assert y.dtype == dtype
        assert_close("rms_norm", y, torch.tensor(case["y"], dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [w.width for w in WIDTHS])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e-8])
def test_shapes(device: torch.device, rows: int, width: int, dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(rows, width, device=device) * size).to(dtype)
    weight = torch.randn(width, device=device)
    assert_close("rms_norm", rms_norm(x, weight, 1e-20), exact(x, weight, 1e-20))


def test_weight_may_be_bfloat16(device: torch.device) -> None:
    x, weight = torch.randn(3, 64, device=device), torch.randn(64, device=device).bfloat16()
    assert_close("rms_norm", rms_norm(x, weight, 1e-6), exact(x, weight, 1e-6))


def test_strides(device: torch.device) -> None:
    whole = torch.randn(6, 4, 96, device=device).bfloat16()
    weight = torch.randn(32, device=device)
    for x in (whole[::2, 1:3, 32:64], whole.transpose(0, 1)[..., 64:], whole[:, 2, :32]):
        assert_close("rms_norm", rms_norm(x, weight, 1e-20), exact(x, weight, 1e-20))


@pytest.mark.gpu
def test_addresses_beyond_32_bits() -> None:
    x, weight = torch.ones(420_000, 5120, dtype=torch.bfloat16, device="cuda"), torch.randn(5120, device="cuda")
    x[-2:] = torch.randn(2, 5120, device="cuda")
    assert torch.equal(rms_norm(x, weight, 1e-6)[-2:], rms_norm(x[-2:], weight, 1e-6))


def test_rows_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    x, weight = torch.randn(37, 1280, device=device).bfloat16(), torch.randn(1280, device=device)
    assert torch.equal(rms_norm(x, weight, 1e-6)[30:31], rms_norm(x[30:31], weight, 1e-6))


def test_gradient(device: torch.device) -> None:
    x = torch.randn(3, 8, dtype=torch.float64, device=device)
    x32, weight = x.float().requires_grad_(), torch.randn(8, device=device, requires_grad=True)
    rms_norm(x32, weight, 1e-6).square().sum().backward()
    wide, wide_weight = x.clone().requires_grad_(), weight.detach().double().requires_grad_()
    exact(wide, wide_weight, 1e-6).square().sum().backward()
    assert wide.grad is not None
    assert x32.grad is not None
    torch.testing.assert_close(x32.grad.double(), wide.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(31,), (33,), (1,), (4, 32)])
def test_refuses_weight(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="rms_norm: weight"):
        rms_norm(torch.zeros(4, 32), torch.zeros(shape), 1e-6)
