"""Matrix products against golden vectors and float64: float32 accumulation, one rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels.gemm import grouped_linear, linear
from benthic.testing.cases import ROWS
from benthic.testing.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16)


def exact(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and the sum of magnitudes behind each element."""
    return x.double() @ weight.double().mT, x.double().abs() @ weight.double().abs().mT


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device, dtype: torch.dtype) -> None:
    data = golden("gemm")

    def tensor(name: str) -> Tensor:
        return torch.tensor(data[name], dtype=dtype, device=device)

    assert torch.equal(linear(tensor("x"), tensor("weight")), tensor("y"))
    assert torch.equal(grouped_linear(tensor("grouped_x"), tensor("grouped_weight")), tensor("grouped_y"))


def test_accumulates_in_float32(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    """256 and six ones: bfloat16 accumulators stay at 256; float32 ones give 262, which bfloat16 holds."""
    data = golden("gemm")
    row = torch.tensor([data["long_row"]], dtype=torch.bfloat16, device=device)
    assert linear(row, torch.ones_like(row)).item() == data["long_sum"]
    assert grouped_linear(row[None], torch.ones_like(row)[None]).item() == data["long_sum"]


def test_wide_result_is_not_rounded(device: torch.device) -> None:
    row = torch.tensor([[256.0, 1.0]], device=device).bfloat16()
    assert linear(row, torch.ones_like(row), out_dtype=torch.float32).item() == 257.0  # bfloat16 has 256 and 258
    assert linear(row, torch.ones(1, 2, device=device), out_dtype=torch.float32).item() == 257.0


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (33, 65), (256, 96), (1024, 7)])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_shapes(
    device: torch.device, rows: int, inputs: int, outputs: int, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    y = linear(x, weight, out_dtype)
    assert y.dtype == (out_dtype or dtype)
    want, size = exact(x, weight)
    assert_close("linear", y, want, size)


def test_leading_axes_and_strides(device: torch.device) -> None:
    x = torch.randn(4, 6, 96, device=device).bfloat16()[:, ::2, 32:]
    weight = torch.randn(64, 128, device=device).bfloat16()[::2, 64:]
    want, size = exact(x, weight)
    assert_close("linear", linear(x, weight), want, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_grouped(device: torch.device, rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 3, 80, device=device).to(dtype)[..., 16:]
    weight = torch.randn(3, 17, 64, device=device).to(dtype)
    y = grouped_linear(x, weight)
    assert y.dtype == dtype
    want, size = exact(x.transpose(0, 1), weight)
    assert_close("linear", y, want.transpose(0, 1), size.transpose(0, 1))


def test_gradient(device: torch.device) -> None:
    x = torch.randn(3, 5, device=device, requires_grad=True)
    weight = torch.randn(4, 5, device=device, requires_grad=True)
    linear(x.bfloat16(), weight.bfloat16(), torch.float32).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(3, 5), atol=0.05, rtol=0.02)
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(4, 5), atol=0.05, rtol=0.02)


def test_refuses() -> None:
    with pytest.raises(ShapeError, match="linear: x"):
        linear(torch.zeros(2, 3), torch.zeros(4, 5))
    with pytest.raises(ShapeError, match="grouped_linear: x"):
        grouped_linear(torch.zeros(2, 3, 4), torch.zeros(2, 5, 4))
