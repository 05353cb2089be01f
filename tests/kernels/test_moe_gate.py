"""The router against golden vectors and a brute-force sort in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benthic.errors import ShapeError
from benthic.kernels.moe_gate import lead, route, route_reference
from benthic.testing.cases import ROWS
from benthic.testing.tolerances import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device, dtype: torch.dtype) -> None:
    data = golden("moe_gate")
    gate = torch.tensor(data["gate"], dtype=dtype, device=device)
    for case in data["cases"]:
        h = torch.tensor([case["h"]], dtype=dtype, device=device)
        bias = torch.tensor(case["bias"], device=device)
        ids, weights = route(h, gate, bias, case["k"], case["normalise"], case["scale"])
        assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
        assert ids.tolist() == [case["ids"]], case["name"]
        assert_close("route", weights, torch.tensor([case["weights"]], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "k"), [(16, 4), (384, 6), (5, 5), (1, 1)])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_shapes(device: torch.device, rows: int, experts: int, k: int, dtype: torch.dtype) -> None:
    h = torch.randn(rows, 2 * 48, device=device).to(dtype)[:, 48:]
    gate = torch.randn(experts, 48, device=device).to(dtype)
    bias = 0.1 * torch.randn(rows, experts, device=device)  # one row each, as with image tokens
    ids, weights = route(h, gate, bias, k, True, 1.5)
    scores = torch.nn.functional.softplus(h.double() @ gate.double().t()).sqrt()
    rank = scores + bias
    assert ids.shape == weights.shape == (rows, k)
    kept = rank.gather(1, ids)
    best = rank.sort(1, descending=True).values[:, :k]
    torch.testing.assert_close(kept, best, atol=1e-5, rtol=0)  # order included, near ties apart
    assert (ids.sort(1).values.diff() > 0).all()  # no expert twice
    want = scores.gather(1, ids)
    want = (want / want.sum(1, keepdim=True) if k > 1 else want) * 1.5
    assert_close("route", weights, want)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.data())
def test_ties_go_to_the_lowest_index(levels: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(levels)))
    bias = torch.tensor(levels, dtype=torch.float32)
    ids, _ = route(torch.zeros(1, 2), torch.zeros(len(levels), 2), bias, k, True, 1.0)
    assert ids[0].tolist() == sorted(range(len(levels)), key=lambda e: (-levels[e], e))[:k]


def test_the_lead_is_what_a_bias_must_make_up_for() -> None:
    """A bias a little below it changes no choice, one a little above changes that row's."""
    generator = torch.Generator().manual_seed(5)
    h, gate = (torch.randn(n, 16, generator=generator) for n in (20, 8))
    bias = 0.1 * torch.randn(8, generator=generator)
    leads = lead(h, gate, bias, 3)
    before = route_reference(h, gate, bias, 4, True, 1.0)[0]
    for row, ahead in enumerate(leads.tolist()):
        last, next_best = before[row, 2], before[row, 3]
        for share, third in ((0.99, last), (1.01, next_best)):
            pushed = bias.index_add(0, next_best[None], torch.tensor([share * ahead]))
            assert route_reference(h[row : row + 1], gate, pushed, 3, True, 1.0)[0][0, 2] == third
    assert torch.isinf(lead(h, gate, bias, 8)).all()


def test_gradient_reaches_router_and_rows(device: torch.device) -> None:
    h, gate = torch.randn(3, 8, device=device, requires_grad=True), torch.randn(5, 8, device=device, requires_grad=True)
    _, weights = route(h, gate, torch.zeros(5, device=device), 2, True, 1.0)
    weights[:, 0].sum().backward()
    for tensor in (h, gate):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().max() > 0


def test_refuses() -> None:
    h, gate, bias = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3)
    with pytest.raises(ShapeError, match="route: gate"):
        route(h, torch.zeros(3, 5), bias, 1, True, 1.0)
    with pytest.raises(ShapeError, match="route: bias"):
        route(h, gate, torch.zeros(4), 1, True, 1.0)
    with pytest.raises(ShapeError, match="route: k"):
        route(h, gate, bias, 4, True, 1.0)
