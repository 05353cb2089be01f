"""Attention's products taken together against the same steps one by one.

The steps are those of the model, on the plain references. Only the order of a product's sum may differ, which moves a
value to the next number of a grid now and then: few may, and by one step.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benthic.kernels import backends, fused, gemm, quant, rope
from benthic.testing.ops import ONE_BY_ONE, on_grid
from benthic.testing.tolerances import MOVED_RMS, MOVED_ROW, SUMS, regridded

EPS = 1e-20


class Sizes(NamedTuple):
    hidden: int
    rank: int
    heads: int
    width: int
    turned: int
    groups: int
    group_rank: int


SMALL = Sizes(128, 128, 4, 64, 32, 2, 64)
RELEASE = Sizes(5120, 1280, 64, 512, 64, 8, 1024)
PROFILES = [  # kind of the weights, one scale a row
    ("values", False),
    ("blocks", False),
    ("rows", True),
]


def matrix(kind: str, n: int, k: int, device: torch.device) -> quant.Matrix:
    blocks = quant.Fp8Matrix(*quant.quantise_weight_fp8(torch.randn(n, k, device=device) * k**-0.5))
    return {"blocks": blocks, "rows": quant.by_row(blocks), "values": quant.values(blocks)}[kind]


def assert_nearly_all(got: Tensor, want: Tensor, one_scale: bool = False) -> None:
    """No value differs by more than an eighth, the FP8 grid's step, of its row's largest, and at most 1 in 50 at all.

    FP8 products on a GPU add up with about 13 bits. In every row that moves a few codes of the next product's input,
    and each of them moves all results a little: there what tolerances.py derives holds instead.
    """
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if got.numel():
        got, want = got.float(), want.float()
        assert ((got - want).abs() <= want.abs().amax(-1, keepdim=True) / 8).all()
        if one_scale and got.is_cuda:
            off, size = (got - want).norm(dim=-1), want.norm(dim=-1)
            if len(got) >= 32:  # of few rows the mean may be far from what is expected
                assert off.norm() <= MOVED_RMS * size.norm(), f"{off.norm() / size.norm():.2e} of all rows"
            assert (off <= MOVED_ROW * size).all(), f"{(off / size).max():.2e} of a row"
        else:
            assert (got != want).float().mean() <= 0.02


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A GPU where there is one, else the interpreter; tests/kernels/native has the CPU's version.

    New memory is full of NaN: whatever is not written shows, and so does whatever is read before.
    """
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        memory = empty(*args, **options)
        memory.view(torch.uint8).fill_(0xFF)
        return memory

    monkeypatch.setattr(torch, "empty", poisoned)
    if torch.cuda.is_available():
        yield torch.device("cuda")
    elif find_spec("triton") is None:
        pytest.skip("needs triton")
    else:
        with backends.use("triton"):
            yield torch.device("cpu")


def check_inputs(sizes: Sizes, rows: int, kind: str, one_scale: bool, device: torch.device) -> None:
    h = torch.randn(rows, sizes.hidden, device=device).bfloat16()
    positions = torch.randint(0, 100000, (rows,), device=device)
    freqs = rope.rope_frequencies(sizes.turned, 10000.0).to(device)
    q_norm = 1 + 0.1 * torch.randn(sizes.rank, device=device)
    kv_norm = 1 + 0.1 * torch.randn(sizes.width, device=device)
    wqkv_a = matrix(kind, sizes.rank + sizes.width, sizes.hidden, device)
    wq_b = matrix(kind, sizes.heads * sizes.width, sizes.rank, device)
    arguments = (h, positions, freqs, wqkv_a, q_norm, wq_b, kv_norm, EPS, one_scale)
    taken = fused.attention_inputs(*arguments)
    assert taken is not None
    with backends.reference():
        wanted = ONE_BY_ONE["attention_inputs"](*arguments)
    for got, want in zip(taken, wanted, strict=True):
        assert_nearly_all(got, want, one_scale)


def check_output(
    sizes: Sizes, rows: int, kind: str, one_scale: bool, quantise_wo_a: bool, device: torch.device
) -> None:
    o = torch.randn(rows, sizes.heads, sizes.width, device=device).bfloat16()
    positions = torch.randint(0, 100000, (rows,), device=device)
    freqs = rope.rope_frequencies(sizes.turned, 10000.0).to(device)
    wo_a = matrix(kind, sizes.groups * sizes.group_rank, sizes.heads * sizes.width // sizes.groups, device)
    wo_b = matrix(kind, sizes.hidden, sizes.groups * sizes.group_rank, device)
    arguments = (o, positions, freqs, wo_a, wo_b, sizes.groups, quantise_wo_a, one_scale)
    taken = fused.attention_output(*arguments)
    assert taken is not None
    with backends.reference():
        assert_nearly_all(taken, ONE_BY_ONE["attention_output"](*arguments), one_scale)


@pytest.mark.parametrize(("kind", "one_scale"), PROFILES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_inputs(device: torch.device, rows: int, kind: str, one_scale: bool) -> None:
    check_inputs(SMALL, rows, kind, one_scale, device)


@pytest.mark.parametrize("quantise_wo_a", [False, True])
@pytest.mark.parametrize(("kind", "one_scale"), PROFILES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_output(device: torch.device, rows: int, kind: str, one_scale: bool, quantise_wo_a: bool) -> None:
    check_output(SMALL, rows, kind, one_scale, quantise_wo_a, device)


@pytest.mark.parametrize(("rows", "hidden"), [(3, 256), (3, 1024), (66, 128)])
def test_turned_product(device: torch.device, rows: int, hidden: int) -> None:
    """Tiles that begin inside a head; turned in the product, after several slices, and after a tall tile."""
    triton_gemm = pytest.importorskip("benthic.kernels.triton.gemm")
    x = torch.randn(rows, hidden, device=device).bfloat16()
    weight = matrix("blocks", 192, hidden, device)
    positions = torch.randint(0, 100000, (rows,), device=device)
    freqs = rope.rope_frequencies(32, 10000.0).to(device)
    got = triton_gemm.products(x, weight, x.dtype, turn=triton_gemm.Turn(positions, freqs, 96))
    with backends.reference():
        want = rope.rotate(gemm.linear(x, weight).unflatten(1, (2, 96)), positions, freqs).flatten(1)
    assert_nearly_all(got[0, 0], want)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "one_scale"), PROFILES)
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 200, 2100])
def test_release(device: torch.device, rows: int, kind: str, one_scale: bool) -> None:
    """Sizes of the release at every way that a number of rows is taken."""
    check_inputs(RELEASE, rows, kind, one_scale, device)
    check_output(RELEASE, rows, kind, one_scale, True, device)


@pytest.mark.parametrize("times", [1, 3, 15])
def test_what_moved_codes_may_cost(times: int) -> None:
    """The bounds of FP8 sums: they hold at three times the error, and sums that stay in the matrix unit break them."""
    x = torch.randn(4000, 1280)
    near, far = (on_grid(y.bfloat16(), True).float() for y in (x, x + times * SUMS * torch.randn(x.shape)))
    off, size = (near - far).norm(dim=1), near.norm(dim=1)
    rms = (off.norm() / size.norm()).item()
    assert rms == pytest.approx(regridded(times * SUMS, 1), rel=0.12)
    assert (rms <= MOVED_RMS) == (times <= 3)
    assert (off <= MOVED_ROW * size).all()


def test_declines_what_it_does_not_serve(device: torch.device) -> None:
    """Weights that are not carried under one scale a row: the steps are taken one by one."""
    o, positions = torch.zeros(2, 4, 64, device=device).bfloat16(), torch.zeros(2, dtype=torch.int64, device=device)
    freqs = torch.ones(16, device=device)
    wo_a, wo_b = matrix("blocks", 128, 128, device), matrix("blocks", 128, 128, device)
    assert fused.attention_output(o, positions, freqs, wo_a, wo_b, 2, True, True) is None
