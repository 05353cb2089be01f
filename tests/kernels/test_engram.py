"""N-gram hashing and its gate against golden vectors, Python integers and float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import quant
from benthic.kernels.engram import engram_gate, ngram_ids, ngram_rows, table_rows
from benthic.testing.cases import ROWS
from benthic.testing.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def few(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """At most 3 rows where Triton is interpreted: a row takes tens of milliseconds there."""
    interpreted = request.node.callspec.params["device"] == "interpreter"
    return lambda rows: min(rows, 3) if interpreted else rows


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_ids_end_at_images_and_the_start(device: torch.device, tokens: int, n: int) -> None:
    """Token 9 is an image; the history is part of a longer one."""
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(0, 12, (tokens,), generator=generator)
    history = torch.randint(-1, 12, (tokens, 5), generator=generator)
    classes = torch.randperm(12, generator=generator)
    got = ngram_ids(ids.to(device), history.to(device)[:, : n - 1], classes.to(device), 3, 9)
    assert got.dtype == torch.int64
    want = []
    for id, before in zip(ids.tolist(), history.tolist(), strict=True):
        kept = [id, *before[: n - 1]]
        end = next((i for i, x in enumerate(kept) if x in (-1, 9)), n)
        want.append([int(classes[x]) for x in kept[:end] + [3] * (n - end)])
    assert got.shape == (tokens, n)
    assert got.tolist() == want


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


def make_table(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Every code but NaN's two, scales around one."""
    codes = torch.randint(0, 254, (rows, width), dtype=torch.uint8)
    codes += (codes >= 127).to(torch.uint8)
    return codes.view(quant.E4M3), torch.randint(110, 140, (rows, width // 32), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (17,), (3, 24), (2, 0, 4)])
@pytest.mark.parametrize("width", [32, 96, 256])
def test_table(device: torch.device, shape: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    codes, scales = make_table(50, width)
    rows = torch.randint(0, 50, shape)
    got = table_rows(codes.to(device), scales.to(device), rows.to(device), dtype)
    assert got.shape == (*shape, width)
    want = codes[rows.flatten().tolist()].double() * torch.exp2(
        scales[rows.flatten().tolist()].double() - 127
    ).repeat_interleave(32, dim=-1)
    assert torch.equal(got.cpu().double().view(-1, width), want), "exact, in bf16 too"


def test_table_in_a_wider_one(device: torch.device) -> None:
    codes, scales = make_table(9, 192)
    codes, scales = codes[:, 64:128], scales[:, 2:4]
    rows = torch.tensor([8, 0, 8])
    want = quant.dequantise_fp8_reference(codes[rows], scales[rows])
    assert torch.equal(table_rows(codes.to(device), scales.to(device), rows.to(device), torch.float32).cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_table_of_a_gpu_beyond_32_bits_or_in_host_memory(pinned: bool) -> None:
    rows = 1_000_000 if pinned else 9_000_000  # 2.3e9 codes
    where = "cpu" if pinned else "cuda"
    codes = torch.zeros(rows, 256, dtype=torch.uint8, device=where)
    scales = torch.full((rows, 8), 127, dtype=torch.uint8, device=where)
    at = torch.tensor([0, rows - 1, rows // 2])
    codes[at.to(where)] = torch.tensor([[56], [64], [184]], dtype=torch.uint8, device=where)  # 1, 2, -1
    if pinned:
        codes, scales = codes.pin_memory(), scales.pin_memory()
    got = table_rows(codes.view(quant.E4M3), scales, at.cuda(), torch.bfloat16)
    assert torch.equal(got.cpu(), torch.tensor([[1.0], [2.0], [-1.0]]).expand(3, 256).bfloat16())


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
def test_gate(device: torch.device, few: Callable[[int], int], rows: int, size: float, dtype: torch.dtype) -> None:
    rows = few(rows)
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
