"""Pooling of groups against golden vectors and float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benthic.errors import ShapeError
from benthic.kernels.compress import pool_groups
from benthic.testing.cases import ROWS
from benthic.testing.tolerances import assert_close


def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    data = golden("compress")
    a, b = (torch.tensor(data[name], device=device) for name in ("a", "b"))
    assert_close("pool_groups", pool_groups(a, b), torch.tensor(data["y"], dtype=torch.float64), 100.0)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e-8])
@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("groups", [r.rows for r in ROWS])
def test_shapes(device: torch.device, groups: int, ratio: int, size: float) -> None:
    a, b = (torch.randn(groups, ratio, 66, device=device)[..., 1:65] for _ in range(2))
    a, b = a * size, b * 5
    weights = b.double().exp() / b.double().exp().sum(1, keepdim=True)
    y = pool_groups(a, b)
    assert y.dtype == torch.float32
    assert_close("pool_groups", y, (weights * a.double()).sum(1), 5 * size)


def test_each_channel_has_its_own_weights(device: torch.device) -> None:
    a = torch.tensor([[[1.0, 1.0], [5.0, 5.0]]], device=device)
    b = torch.tensor([[[90.0, -90.0], [-90.0, 90.0]]], device=device)
    assert pool_groups(a, b).tolist() == [[1.0, 5.0]]


def test_one_token_passes_unchanged(device: torch.device) -> None:
    a = torch.randn(5, 1, 32, device=device)
    assert torch.equal(pool_groups(a, 100 * torch.randn_like(a)), a[:, 0])


def test_refuses() -> None:
    with pytest.raises(ShapeError, match="pool_groups: a"):
        pool_groups(torch.zeros(2, 8), torch.zeros(2, 8))
    with pytest.raises(ShapeError, match="pool_groups: b"):
        pool_groups(torch.zeros(2, 2, 8), torch.zeros(2, 2, 7))
