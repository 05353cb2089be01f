"""Matrix products against golden vectors and float64: float32 accumulation, one rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, quant
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


PACKED = ("blocks", "rows")


def packed(kind: str, n: int, k: int, device: torch.device, *leading: int) -> quant.Matrix:
    """A weight with scales that differ from block to block."""
    spread = torch.exp2(torch.randint(-6, 3, (*leading, -(-n // 32), -(-k // 32)), device=device).float())
    spread = spread.repeat_interleave(32, -2)[..., :n, :].repeat_interleave(32, -1)[..., :k]
    blocks = quant.Fp8Matrix(*quant.quantise_weight_fp8(torch.randn(*leading, n, k, device=device) * spread))
    return blocks if kind == "blocks" else quant.by_row(blocks)


def entering(x: Tensor, kind: str) -> Tensor:
    """The values of x that a product with a packed weight takes."""
    return quant.roundtrip_carry(x) if kind == "rows" else x


def rule(kind: str, device: torch.device) -> str:
    """Which tolerance a product has: on a GPU, rows of FP8 codes meet in FP8 products."""
    return "linear_fp8" if kind == "rows" and device.type == "cuda" else "linear"


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (96, 65), (256, 96), (1000, 8)])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
@pytest.mark.parametrize("kind", PACKED)
def test_packed(
    device: torch.device, kind: str, rows: int, inputs: int, outputs: int, out_dtype: torch.dtype | None
) -> None:
    x = torch.randn(rows, inputs, device=device).bfloat16()
    weight = packed(kind, outputs, inputs, device)
    y = linear(x, weight, out_dtype)
    assert y.dtype == (out_dtype or x.dtype)
    want, size = exact(entering(x, kind), quant.values(weight, torch.float32))
    assert_close(rule(kind, device), y, want, size)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_codes(device: torch.device, kind: str) -> None:
    """Every E4M3 number, under scales from far below to 2^7, comes through a product with the identity unchanged."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = torch.where(codes & 127 == 127, 0, codes).view(quant.E4M3).expand(256, 256).t().contiguous()
    scales = torch.arange(64, dtype=torch.uint8, device=device).view(8, 8) + 71
    weight: quant.Matrix = quant.Fp8Matrix(codes, scales)
    if kind == "rows":
        weight = quant.RowMatrix(codes, quant.e8m0_value(scales).flatten().repeat_interleave(4))
    eye = torch.eye(256, device=device).bfloat16()
    y = linear(eye, weight, torch.float32)
    assert torch.equal(y, quant.values(weight, torch.float32).t())


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, under the interpreter
def test_scale_that_is_no_number(device: torch.device) -> None:
    weight = packed("blocks", 64, 64, device)
    assert isinstance(weight, quant.Fp8Matrix)
    weight.scales[1, 1] = 255
    y = linear(torch.ones(2, 64, device=device).bfloat16(), weight)
    assert torch.isfinite(y[:, :32]).all()
    assert not torch.isfinite(y[:, 32:]).any()


@pytest.mark.parametrize("outputs", [64, 96])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
@pytest.mark.parametrize("kind", PACKED)
def test_grouped_packed(device: torch.device, kind: str, rows: int, outputs: int) -> None:
    x = torch.randn(rows, 3, 144, device=device).bfloat16()[..., 16:]
    weight = packed(kind, outputs, 128, device, 3)
    want, size = exact(entering(x, kind).transpose(0, 1), quant.values(weight, torch.float32))
    assert_close(rule(kind, device), grouped_linear(x, weight), want.transpose(0, 1), size.transpose(0, 1))


@pytest.mark.parametrize("kind", ["blocks", "rows", "values", "wide"])
def test_poisoned_memory(device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN: whatever is not written shows, and so does whatever is read before."""
    weight = packed(kind, 96, 768, device) if kind in PACKED else torch.randn(96, 768, device=device)
    x = torch.randn(5, 768, device=device)
    if kind != "wide":
        x = x.bfloat16()
        weight = weight.bfloat16() if isinstance(weight, Tensor) else weight
    want, size = exact(entering(x, kind), quant.values(weight, torch.float32))
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        memory = empty(*args, **options)
        memory.view(torch.uint8).fill_(0xFF)
        return memory

    monkeypatch.setattr(torch, "empty", poisoned)
    y = linear(x, weight)
    monkeypatch.undo()
    assert_close(rule(kind, device), y, want, size)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [40, 130])
@pytest.mark.parametrize("kind", PACKED)
def test_every_configuration(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges in both directions, one slice and several; then groups, each with its columns of x."""
    from benthic.kernels.triton import gemm, tuning

    device = torch.device("cuda")
    x, weight = torch.randn(rows, 1280, device=device).bfloat16(), packed(kind, 672, 1280, device)
    want, size = exact(entering(x, kind), quant.values(weight, torch.float32))
    several, stack = torch.randn(rows, 3, 256, device=device).bfloat16(), packed(kind, 512, 256, device, 3)
    group_want, group_size = exact(entering(several, kind).transpose(0, 1), quant.values(stack, torch.float32))
    for config in gemm.CANDIDATES[kind].values():
        monkeypatch.setattr(tuning, "config", lambda op, key, few, default, this=config: {**default, **this})
        for slices in (1, 3):

            def cut(config: tuning.Config, _rows: int, _n: int, k: int, slices: int = slices) -> tuple[int, int]:
                steps = -(-k // config["BLOCK_K"])
                return min(slices, steps), steps

            monkeypatch.setattr(gemm, "_slices", cut)
            assert_close(rule(kind, device), linear(x, weight), want, size)
            y = grouped_linear(several, stack)
            assert_close(rule(kind, device), y, group_want.transpose(0, 1), group_size.transpose(0, 1))


@pytest.mark.gpu
def test_beyond_2_to_31_elements() -> None:
    device = torch.device("cuda")
    memory = torch.empty(70000, 32768, dtype=torch.bfloat16, device=device)
    x = memory[:, :128].normal_()
    weight = packed("blocks", 32768, 128, device)
    with backends.invariant():
        y = linear(x, weight)
        assert torch.equal(y[-3:], linear(x[-3:], weight))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["blocks", "rows", "values", "wide"])
def test_row_has_the_same_bits_in_any_batch(kind: str) -> None:
    """K is long enough for several slices, and 130 rows for programs that go through all of them."""
    device = torch.device("cuda")
    weight = packed(kind, 96, 768, device) if kind in PACKED else torch.randn(96, 768, device=device)
    x = torch.randn(300, 768, device=device)
    if kind != "wide":
        x = x.bfloat16()
        weight = weight.bfloat16() if isinstance(weight, Tensor) else weight
    with backends.invariant():
        alone = torch.cat([linear(row[None], weight) for row in x])
        for rows in (1, 2, 16, 17, 33, 64, 65, 130, 300):
            assert torch.equal(linear(x[:rows], weight), alone[:rows]), rows


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
