"""N-gram hashing and its gate against golden vectors, Python integers and float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels.engram import engram_gate, ngram_rows
from benthic.testing.cases import ROWS
from benthic.testing.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16)


def test_golden_rows(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    data = golden("engram")
    ids, multipliers, primes, offsets, want = (
        torch.tensor(data[name], device=device) for name in ("ids", "multipliers", "primes", "offsets", "rows")
    )
    got = ngram_rows(ids, multipliers, primes, offsets)
    assert got.dtype == torch.int64
    assert torch.equal(got, want)
    assert torch.equal(ngram_rows(ids[::2], multipliers, primes, offsets), want[::2])
    assert ngram_rows(ids[:0], multipliers, primes, offsets).shape == (0, 6)


@given(
    st.lists(st.lists(st.integers(0, 99091), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.integers(1, 2**46), min_size=3, max_size=3),
    st.lists(st.integers(2, 2**24), min_size=4, max_size=4),
)
def test_rows_equal_python_integers(ids: list[list[int]], multipliers: list[int], sizes: list[int]) -> None:
    offsets = [0, sizes[0], sum(sizes[:2]), sum(sizes[:3])]
    want = []
    for a, b, c in ids:
        two = (a * multipliers[0]) ^ (b * multipliers[1])
        three = two ^ (c * multipliers[2])
        want.append([mixed % sizes[i] + offsets[i] for i, mixed in enumerate((two, two, three, three))])
    tables = [torch.tensor(x).view(2, 2) for x in (sizes, offsets)]
    assert ngram_rows(torch.tensor(ids), torch.tensor(multipliers), *tables).tolist() == want


def exact_gate(s: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    s, keys = s.double(), keys.double()

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    d = (normed(s) * weight.double() * normed(keys)).sum(-1) / s.shape[-1] ** 0.5
    root = d.abs().clamp(min=1e-6).sqrt()
    gate = torch.sigmoid(torch.where(d < 0, -root, root))
    return s + gate[..., None] * value.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_gate(golden: Callable[[str], dict[str, Any]], device: torch.device, dtype: torch.dtype) -> None:
    data = golden("engram")
    weight = torch.tensor(data["weight"], device=device)
    value = torch.tensor([data["value"]], dtype=dtype, device=device)
    for case in data["cases"]:
        s, keys = (torch.tensor([case[name]], dtype=dtype, device=device) for name in ("s", "keys"))
        y = engram_gate(s, keys, value, weight, data["eps"])
        assert y.dtype == dtype
        assert_close("engram_gate", y, torch.tensor([case["y"]], dtype=torch.float64), 4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e3, 1e-8])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_gate(device: torch.device, rows: int, size: float, dtype: torch.dtype) -> None:
    s = (size * torch.randn(rows, 4, 96, device=device)).to(dtype)
    both = torch.randn(rows, 5 * 96, device=device).to(dtype)
    keys, value = both[:, : 4 * 96].unflatten(1, (4, 96)), both[:, 4 * 96 :]  # parts of one product: strided
    weight = torch.randn(4, 96, device=device)
    want = exact_gate(s, keys, value, weight, 1e-20)
    assert_close("engram_gate", engram_gate(s, keys, value, weight, 1e-20), want, 40.0)


def test_image_rows_stay(device: torch.device) -> None:
    s, keys = torch.randn(2, 5, 2, 32, device=device).unbind(0)
    value, weight = torch.full((5, 32), torch.inf, device=device), torch.ones(2, 32, device=device)
    images = torch.tensor([False, True, True, False, True], device=device)
    y = engram_gate(s, keys, value, weight, 1e-20, images)
    assert torch.equal(y[images], s[images])
    assert y[~images].isinf().all()


def test_gate_gradient(device: torch.device) -> None:
    def run(kind: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        tensors = [
            torch.randn(shape, generator=generator).to(device, kind).requires_grad_()
            for shape in ((3, 2, 16), (3, 2, 16), (3, 16), (2, 16))
        ]
        gate = exact_gate if kind == torch.float64 else engram_gate
        s, keys, value, weight = tensors
        gate(s, keys, value, weight, 1e-6).square().sum().backward()
        return [x.grad for x in tensors if x.grad is not None]

    got, want = run(torch.float32), run(torch.float64)
    assert len(got) == len(want) == 4
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-3, rtol=1e-3)


def test_refuses() -> None:
    ids, numbers = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(ShapeError, match="ngram_rows: ids"):
        ngram_rows(ids.int(), numbers[0, :3], numbers, numbers)
    with pytest.raises(ShapeError, match="ngram_rows: multipliers"):
        ngram_rows(ids, numbers[0], numbers, numbers)
    with pytest.raises(ShapeError, match="ngram_rows: primes"):
        ngram_rows(ids, numbers[0, :3], numbers[:1], numbers[:1])
    s, value, weight = torch.zeros(2, 4, 8), torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ShapeError, match="engram_gate: keys"):
        engram_gate(s, s[:1], value, weight, 1e-6)
    with pytest.raises(ShapeError, match="engram_gate: value"):
        engram_gate(s, s, value[:1], weight, 1e-6)
    with pytest.raises(ShapeError, match="engram_gate: weight"):
        engram_gate(s, s, value, weight[:1], 1e-6)
    with pytest.raises(ShapeError, match="engram_gate: images"):
        engram_gate(s, s, value, weight, 1e-6, torch.zeros(3, dtype=torch.bool))
