"""The grouped GEMMs of an optional package: everything around them on a CPU with a stand-in, the products on a GPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benthic.errors import ShapeError
from benthic.kernels import backends, quant
from benthic.kernels.humming import moe_experts as humming
from benthic.kernels.moe_experts import experts_reference
from benthic.kernels.swiglu import swiglu_reference
from benthic.testing.tolerances import assert_close
from benthic.types import NUMERICS

ROWS = (1, 2, 7, 33)


def stack(experts: int, n: int, k: int, device: str = "cpu", spread: int = 4) -> quant.Fp4Matrix:
    """Random FP4 matrices whose group scales differ by up to `spread` binades."""
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
    top = 127 - round(math.log2(2.9 * math.sqrt(k)))
    scales = torch.randint(top - spread, top + 1, (experts, n, k // 32), dtype=torch.uint8, device=device)
    return quant.Fp4Matrix(codes, scales)


def tokens(rows: int, width: int, k: int, experts: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    x = quant.roundtrip_fp8(torch.randn(rows, width, device=device).bfloat16())
    ids = torch.rand(rows, experts, device=device).argsort(1)[:, :k].contiguous()
    return x, ids, torch.rand(rows, k, device=device)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pack` and `grouped_gemm` in plain torch, by the values that each variant defines."""

    def pack(weight: quant.Fp4Matrix, variant: str) -> humming.Prepared:
        values = quant.values(weight)
        values = quant.roundtrip_carry(values) if variant == "carry" else values
        return humming.Prepared(weight.shape, variant, "", values, weight.scales, None, weight.codes)

    def grouped_gemm(x: Tensor, scales: Tensor | None, matrix: humming.Prepared, offsets: Tensor) -> Tensor:
        x = x if scales is None else (x.float() * scales).bfloat16()
        out = torch.full((x.shape[0], matrix.shape[1]), math.nan, dtype=torch.bfloat16)
        for expert, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            out[start:end] = F.linear(x[start:end], matrix.weight[expert])
        return out

    monkeypatch.setattr(humming, "pack", pack)
    monkeypatch.setattr(humming, "grouped_gemm", grouped_gemm)


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("round_hidden", [False, True])
@pytest.mark.parametrize("rows", [0, *ROWS])
def test_the_steps_around_the_products_are_the_reference(
    stand_in: None, rows: int, round_hidden: bool, one_scale: bool
) -> None:
    w13, w2 = stack(6, 256, 128), stack(6, 128, 128)
    x, ids, weights = tokens(rows, 128, 3, 6)
    numerics = NUMERICS["fast" if one_scale else "production"]
    prepared = humming.prepare(w13, w2, numerics)
    assert {m.variant for m in prepared} == {"carry" if one_scale else "exact"}
    with backends.reference():
        want = experts_reference(x, ids, weights, w13, w2, 10.0, True, round_hidden, one_scale)
        for pair in (prepared, (w13, w2)):
            got = humming.experts(x, ids, weights, *pair, 10.0, True, round_hidden, one_scale)
            assert got.dtype == torch.float32
            assert torch.equal(got, want)


def test_other_weights_take_the_reference() -> None:
    w13, w2 = (quant.values(m) for m in (stack(3, 256, 128), stack(3, 128, 128)))
    x, ids, weights = tokens(4, 128, 2, 3)
    with backends.reference():
        want = experts_reference(x, ids, weights, w13, w2, 10.0, True, True)
        assert torch.equal(humming.experts(x, ids, weights, w13, w2, 10.0, True), want)


@pytest.mark.parametrize("experts", [1, 5])
@pytest.mark.parametrize("rows", ROWS)
def test_plan(rows: int, experts: int) -> None:
    ids = torch.randint(0, experts, (rows, 3))
    order, back, offsets = humming.plan(ids, experts)
    flat = ids.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert order[back].tolist() == list(range(len(flat)))
    assert offsets.tolist() == [sum(e < bound for e in flat) for bound in range(experts + 1)]


def test_sum_is_float32_in_slot_order() -> None:
    """2^24 + 1 - 2^24 is 0 in this order only, and 257 is no bfloat16."""
    routed = humming.plan(torch.tensor([[2, 0, 1], [0, 1, 2]]), 3)
    parts = torch.empty(6, 1, dtype=torch.bfloat16)
    parts[routed.back, 0] = torch.tensor([2.0**24, 1.0, -(2.0**24), 256.0, 1.0, 0.0]).bfloat16()
    assert humming.combine(parts, routed, 3).flatten().tolist() == [0.0, 257.0]
    weights = torch.tensor([[1.0, 1.0, 0.0], [0.5, 2.0, 1.0]])
    assert humming.combine(parts, routed, 3, weights).flatten().tolist() == [2.0**24, 130.0]


@pytest.mark.parametrize("row_base", [False, True])
def test_groups_outside_the_window_are_counted(row_base: bool) -> None:
    weight = stack(3, 64, 128, spread=14)
    want: list[int] = []
    for expert in weight.scales.tolist():
        top = max(max(row) for row in expert)
        want.append(sum((max(row) if row_base else top) - scale > 11 for row in expert for scale in row))
    assert humming.outside_window(weight, row_base).tolist() == want
    assert sum(want) > 0


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_activation_as_the_package_gets_it(limit: float) -> None:
    """The CUDA expression, read as Python."""
    text = humming.activation(limit).replace("1.f", "1.0").replace("5f", "5")
    names: dict[str, Any] = {"fminf": min, "fmaxf": max, "expf": math.exp}
    for a, b in [(0.3, 0.7), (-2.0, 3.0), (4.0, -3.0), (0.0, 1.0)]:
        want = swiglu_reference(torch.tensor([[a]]), torch.tensor([[b]]), limit)
        assert eval(text, names | {"a": a, "b": b}) == pytest.approx(want.item(), rel=1e-6)


def test_refuses_what_the_package_cannot_hold() -> None:
    for n, k in ((96, 128), (64, 96)):
        with pytest.raises(ShapeError, match="pack: weight"):
            humming.pack(stack(2, n, k), "exact")


# ---- on a GPU, with the package --------------------------------------------------------------------------------------

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not humming.available(), reason="needs an SM90 GPU and the package humming-kernels"),
]


def gpu(*values: Any, **options: Any) -> Any:
    return pytest.param(*values, marks=on_gpu, **options)


@pytest.mark.parametrize("variant", [gpu(v) for v in humming.VARIANTS])
def test_packed_weights_are_the_weights(variant: str) -> None:
    """Rows of the identity give the matrices back, to the bit: E2M1 times a power of two is a bfloat16."""
    weight = stack(3, 256, 128, "cuda", spread=8)
    before = [part.clone() for part in weight]
    matrix = humming.pack(weight, variant)
    assert all(torch.equal(a, b) for a, b in zip(before, weight, strict=True))
    eye = torch.eye(128, device="cuda").repeat(3, 1)
    group = humming.VARIANTS[variant].group
    scales = None if variant == "exact" else torch.ones(3 * 128, 128 // group if group else 1, device="cuda")
    x = eye.bfloat16() if variant == "exact" else eye.to(quant.E4M3)
    offsets = torch.arange(4, device="cuda") * 128
    got = humming.grouped_gemm(x, scales, matrix, offsets, (512,))
    assert torch.equal(got.view(3, 128, 256).transpose(1, 2), quant.values(weight))


@pytest.mark.parametrize(("variant", "rows"), [gpu(v, r) for v in ("exact", "carry") for r in (1, 33, 300)])
def test_experts(variant: str, rows: int) -> None:
    w13, w2 = stack(8, 512, 256, "cuda"), stack(8, 256, 256, "cuda")
    x, ids, weights = tokens(rows, 256, 3, 8, "cuda")
    one_scale = variant == "carry"
    with backends.reference():
        want = experts_reference(x, ids, weights, w13, w2, 10.0, True, False, one_scale)
    got = humming.experts(x, ids, weights, humming.pack(w13, variant), humming.pack(w2, variant), 10.0, True, False)
    assert_close("experts_rounded", got, want.double(), float(want.abs().max()))


@pytest.mark.parametrize("variant", [gpu("group"), gpu("token")])
def test_the_public_chain_is_near(variant: str) -> None:
    w13, w2 = stack(8, 512, 256, "cuda"), stack(8, 256, 256, "cuda")
    x, ids, weights = tokens(33, 256, 3, 8, "cuda")
    with backends.reference():
        want = experts_reference(x, ids, weights, w13, w2, 10.0, True, False)
    got = humming.experts(x, ids, weights, humming.pack(w13, variant), humming.pack(w2, variant), 10.0, True)
    assert float((got - want).norm() / want.norm()) < 0.08  # each of its two quantisers moves a value by 2.6 %


@pytest.mark.parametrize("variant", [gpu("exact"), gpu("carry")])
def test_same_bits_alone_and_in_company(variant: str) -> None:
    w13, w2 = (humming.pack(m, variant) for m in (stack(8, 512, 256, "cuda"), stack(8, 256, 256, "cuda")))
    x, ids, weights = tokens(65, 256, 3, 8, "cuda")
    with backends.invariant():
        whole = humming.experts(x, ids, weights, w13, w2, 10.0, True)
        for rows in (1, 7, 40):
            part = humming.experts(x[:rows], ids[:rows], weights[:rows], w13, w2, 10.0, True)
            assert torch.equal(part, whole[:rows])


@pytest.mark.parametrize("variant", [gpu(v) for v in humming.VARIANTS])
def test_in_a_graph(variant: str) -> None:
    w13, w2 = (humming.pack(m, variant) for m in (stack(8, 512, 256, "cuda"), stack(8, 256, 256, "cuda")))
    x, ids, weights = tokens(17, 256, 3, 8, "cuda")
    humming.experts(x, ids, weights, w13, w2, 10.0, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = humming.experts(x, ids, weights, w13, w2, 10.0, True)
    other = tokens(17, 256, 3, 8, "cuda")
    for mine, new in zip((x, ids, weights), other, strict=True):
        mine.copy_(new)
    graph.replay()
    want = humming.experts(*other, w13, w2, 10.0, True)
    assert_close("experts_rounded", out, want.double(), float(want.abs().max()))
