"""The routed experts against golden vectors and a token-by-token float64 loop."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, fused, quant
from benthic.kernels.moe_experts import experts
from benthic.testing.cases import ROWS
from benthic.testing.ops import ONE_BY_ONE
from benthic.testing.tolerances import assert_close


def slow(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    rounded: torch.dtype | None = None,
    round_hidden: bool = True,
) -> Tensor:
    """One token and one expert at a time in float64.

    rounded  dtype of every product's result; the activation then goes onto the FP8 grid, and through the same dtype
             before that if `round_hidden`. None: nothing is rounded.
    """

    def rounding(y: Tensor) -> Tensor:
        return y if rounded is None else y.to(rounded).double()

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    inner = w2.shape[2]
    for t in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[t, slot])
            both = rounding(w13[expert].double() @ x[t].double())
            a, b = both[:inner].clamp(max=limit), both[inner:].clamp(-limit, limit)
            y = a / (1 + torch.exp(-a)) * b * weights[t, slot].double()
            if rounded is not None:
                y = quant.roundtrip_fp8_reference(rounding(y).float() if round_hidden else y.float()).double()
            out[t] += rounding(w2[expert].double() @ y)
    return out


def make(rows: int, k: int, num: int, width: int, inner: int, dtype: torch.dtype, device: torch.device) -> Any:
    x = torch.randn(rows, width, device=device).to(dtype)
    order = torch.rand(rows, num, device=device).argsort(1)
    weights = torch.rand(rows, k, device=device)
    w13 = (torch.randn(num, 2 * inner, width, device=device) / width**0.5).to(dtype)
    w2 = (torch.randn(num, width, inner, device=device) / inner**0.5).to(dtype)
    return x, order[:, :k].contiguous(), weights, w13, w2


def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    data = golden("moe_experts")
    x, weights, w13, w2 = (torch.tensor(data[name], device=device) for name in ("x", "weights", "w13", "w2"))
    ids = torch.tensor(data["ids"], device=device)
    y = experts(x, ids, weights, w13, w2, data["limit"], quantise=False, round_hidden=False)
    assert y.dtype == torch.float32
    assert_close("experts", y, torch.tensor(data["y"], dtype=torch.float64), 10.0)


@pytest.mark.parametrize(("num", "k"), [(16, 4), (3, 3), (8, 1)])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_float(device: torch.device, rows: int, num: int, k: int) -> None:
    x, ids, weights, w13, w2 = make(rows, k, num, 48, 40, torch.float32, device)
    y = experts(x, ids, weights, w13, w2, 1.0, quantise=False, round_hidden=False)
    assert_close("experts", y, slow(x, ids, weights, w13, w2, 1.0), 10.0)


@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_rounded(device: torch.device, rows: int) -> None:
    x, ids, weights, w13, w2 = make(rows, 2, 6, 64, 96, torch.bfloat16, device)
    x = quant.roundtrip_fp8(x)
    for round_hidden in (True, False):
        y = experts(x, ids, weights, w13, w2, 10.0, quantise=True, round_hidden=round_hidden)
        want = slow(x, ids, weights, w13, w2, 10.0, torch.bfloat16, round_hidden)
        assert_close("experts_rounded", y, want, 3.0)


def packed_stack(num: int, rows: int, width: int, device: torch.device) -> quant.Fp4Matrix:
    """Weights as in the checkpoint; a product's spread stays near one."""
    top = 127 - round(math.log2(2.9 * math.sqrt(width)))
    scales = torch.randint(top - 3, top + 1, (num, rows, width // 32), dtype=torch.uint8, device=device)
    return quant.Fp4Matrix(torch.randint(0, 256, (num, rows, width // 2), dtype=torch.uint8, device=device), scales)


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_packed_weights(device: torch.device, rows: int, one_scale: bool) -> None:
    w13, w2 = packed_stack(3, 128, 96, device), packed_stack(3, 96, 64, device)
    x, ids, weights, _, _ = make(rows, 2, 3, 96, 64, torch.bfloat16, device)
    x = quant.roundtrip_fp8_reference(x)
    y = experts(x, ids, weights, w13, w2, 10.0, quantise=True, round_hidden=True, one_scale=one_scale)
    values = (quant.values(w13), quant.values(w2))
    if one_scale:
        x, values = quant.roundtrip_carry(x), (quant.roundtrip_carry(values[0]), quant.roundtrip_carry(values[1]))
    # the oracle does not carry the activation; scales of its groups lie too close for that to matter
    assert_close("experts_rounded", y, slow(x, ids, weights, *values, 10.0, torch.bfloat16), 3.0)


def test_activation_goes_onto_the_fp8_grid(device: torch.device) -> None:
    """w2 picks single channels, so the grid is visible in the result: 1.17 is between the codes 1.125 and 1.25."""
    x = torch.ones(1, 32, device=device, dtype=torch.bfloat16)
    w13 = torch.zeros(1, 64, 32, device=device, dtype=torch.bfloat16)
    w13[0, :32, 0] = 20.0  # silu(20) = 20
    w13[0, 32:, 0] = 1.0
    w13[0, 33, 0] = 1.17 / 20
    w2 = torch.eye(32, device=device, dtype=torch.bfloat16)[None]
    ids, one = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.ones(1, 1, device=device)
    y = experts(x, ids, one, w13, w2, 0.0, quantise=True, round_hidden=True)
    assert y[0, 1].item() in (1.125, 1.25)
    plain = experts(x, ids, one, w13, w2, 0.0, quantise=False, round_hidden=True)
    assert plain[0, 1].item() not in (1.125, 1.25)


def test_hidden_is_rounded_before_the_grid_only_when_asked(device: torch.device) -> None:
    """28 * 0.96428 = 26.99984 lies just under 27, the tie between the FP8 codes 26 and 28: bfloat16 moves it onto the
    tie, which goes to the even 28; unrounded it goes to 26."""
    x = torch.ones(1, 32, device=device, dtype=torch.bfloat16)
    w13 = torch.zeros(1, 64, 32, device=device, dtype=torch.bfloat16)
    w13[0, :32, 0] = 28.0
    w13[0, 32:, 0] = 1.0
    w2 = torch.eye(32, device=device, dtype=torch.bfloat16)[None]
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    weight = torch.full((1, 1), 0.96428, device=device)
    rounded = experts(x, ids, weight, w13, w2, 0.0, quantise=True, round_hidden=True)
    direct = experts(x, ids, weight, w13, w2, 0.0, quantise=True, round_hidden=False)
    assert (rounded[0, 0].item(), direct[0, 0].item()) == (28.0, 26.0)


def test_sum_is_float32_in_slot_order(device: torch.device) -> None:
    """256 + 1 is lost in bfloat16 but not in the float32 sum of two experts' bfloat16 outputs."""
    x = torch.ones(1, 2, device=device, dtype=torch.bfloat16)
    w13 = torch.zeros(2, 2, 2, device=device, dtype=torch.bfloat16)
    w13[:, 0, 0] = 100.0
    w13[:, 1, 0] = 0.01 * 2**0.5
    w2 = torch.tensor([[[256.0], [0.0]], [[1.0], [0.0]]], device=device, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1]], device=device)
    product = float(w13[0, 0, 0].float() * w13[0, 1, 0].float())
    weights = torch.full((1, 2), 1.0 / product, device=device)
    y = experts(x, ids, weights, w13, w2, 0.0, quantise=False, round_hidden=True)
    assert y[0].tolist() == [257.0, 0.0]


def test_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    x, ids, weights, w13, w2 = make(9, 2, 4, 32, 32, torch.float32, device)
    whole = experts(x, ids, weights, w13, w2, 10.0, quantise=False, round_hidden=False)
    for t in range(9):
        part = slice(t, t + 1)
        alone = experts(x[part], ids[part], weights[part], w13, w2, 10.0, quantise=False, round_hidden=False)
        assert_close("experts", alone, whole[part], 10.0)


def test_strides(device: torch.device) -> None:
    x, ids, weights, w13, w2 = make(5, 2, 4, 64, 32, torch.float32, device)
    wide = torch.cat([x, x], 1)[:, :64]
    wide_ids, wide_weights = ids.repeat(1, 2)[:, 1:3], weights.repeat(1, 2)[:, 1:3]
    y = experts(wide, wide_ids, wide_weights, w13, w2, 10.0, quantise=False, round_hidden=False)
    assert_close("experts", y, slow(x, wide_ids, wide_weights, w13, w2, 10.0), 10.0)


@pytest.mark.parametrize("round_hidden", [False, True])
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_sublayer(device: torch.device, rows: int, one_scale: bool, round_hidden: bool) -> None:
    h = torch.randn(rows, 2 * 128, device=device).bfloat16()[:, 128:]
    gate, bias = torch.randn(4, 128, device=device).bfloat16(), 0.1 * torch.randn(4, device=device)
    shared = (torch.randn(128, 128, device=device) / 11, torch.randn(128, 64, device=device) / 8)
    matrices = [quant.Fp8Matrix(*quant.quantise_weight_fp8(w)) for w in shared]
    dense = [quant.by_row(m) for m in matrices] if one_scale else matrices
    args: Any = (packed_stack(4, 128, 128, device), packed_stack(4, 128, 64, device), *dense)
    args += (2, True, 1.5, 10.0, round_hidden, one_scale)
    y = fused.moe(h, gate, bias, *args)
    if y is None:  # nothing serves it at this place
        return
    assert (y.shape, y.dtype) == (h.shape, h.dtype)
    with backends.reference():
        want = ONE_BY_ONE["moe"](h, gate, bias, *args)
    assert_close("experts_rounded", y, want, 3.0)


def test_gradient(device: torch.device) -> None:
    tensors = make(5, 2, 4, 16, 8, torch.float32, device)
    got, want = [], []
    for kind in (torch.float32, torch.float64):
        x, weights, w13, w2 = (tensors[i].detach().to(kind).requires_grad_() for i in (0, 2, 3, 4))
        if kind == torch.float32:
            out = experts(x, tensors[1], weights, w13, w2, 10.0, quantise=False, round_hidden=False)
        else:
            out = slow(x, tensors[1], weights, w13, w2, 10.0)
        out.square().sum().backward()
        (got if kind == torch.float32 else want).extend([x.grad, weights.grad, w13.grad, w2.grad])
    for a, b in zip(got, want, strict=True):
        assert a is not None
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


def test_refuses() -> None:
    x, ids, weights, w13, w2 = make(2, 2, 3, 8, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(ShapeError, match="experts: x, ids, weights"):
        experts(x, ids[:1], weights, w13, w2, 10.0, False, False)
    with pytest.raises(ShapeError, match="experts: w13"):
        experts(x, ids, weights, w13[:, :7], w2, 10.0, False, False)
    with pytest.raises(ShapeError, match="experts: w2"):
        experts(x, ids, weights, w13, w2[:, :, :3], 10.0, False, False)
