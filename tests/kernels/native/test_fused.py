"""Ops taken together have the bits of the same ops one by one."""

import pytest
import torch
from torch import Tensor

from benthic.kernels import backends, fused, gemm, hyper, moe_experts, moe_gate, norm, quant, rope, swiglu

EPS = 1e-20
FREQS = rope.rope_frequencies(64, 10000.0)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.fixture(params=[1, 3], autouse=True)
def _threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


rows_list = pytest.mark.parametrize("rows", [0, 1, 3, 33, 130])


@rows_list
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hyper_read(rows: int, dtype: torch.dtype) -> None:
    s, pre = draw(rows, 4, 256, dtype=dtype), draw(rows, 4, seed=1, dtype=torch.float32)
    fn, base = draw(24, 1024, dtype=torch.float32) / 32, draw(24, dtype=torch.float32)
    scale, weight = torch.tensor([0.5, 1.0, 2.0]), draw(256, dtype=torch.float32)
    out, post, comb = draw(rows, 256, dtype=dtype), pre.sigmoid(), draw(rows, 4, 4, dtype=torch.float32).softmax(-1)
    for streams in (hyper.Streams(s, pre), hyper.Streams(s, pre, out, post, comb)):
        got = fused.hyper_read(streams, fn, scale, base, weight, EPS, 1e-6, 20)
        assert got is not None
        settled = hyper.settle(streams)
        assert torch.equal(got[0], norm.rms_norm(hyper.hyper_collapse(settled, pre), weight, EPS))
        assert got[1].out is None
        want = (settled, *hyper.hyper_mixes(settled, fn, scale, base, EPS, 1e-6, 20))
        for a, b in zip((got[1].s, got[1].pre, got[1].post, got[1].comb), want, strict=True):
            assert a is not None
            assert torch.equal(a, b)


@rows_list
def test_attention_inputs(rows: int) -> None:
    h, positions = draw(rows, 256), torch.arange(rows) * 91
    wq_a, wq_b, wkv = draw(96, 256) / 16, draw(6 * 128, 96) / 10, draw(128, 256, seed=2) / 16
    q_norm, kv_norm = draw(96, dtype=torch.float32), draw(128, dtype=torch.float32)
    got = fused.attention_inputs(h, positions, FREQS, torch.cat([wq_a, wkv]), q_norm, wq_b, kv_norm, EPS, False)
    assert got is not None
    h8 = quant.roundtrip_fp8(h)
    qa = quant.roundtrip_fp8(norm.rms_norm(gemm.linear(h8, wq_a), q_norm, EPS))
    q = rope.rotate(gemm.linear(qa, wq_b).unflatten(1, (6, 128)), positions, FREQS)
    kw = rope.rotate(norm.rms_norm(gemm.linear(h8, wkv), kv_norm, EPS), positions, FREQS)
    for a, b in zip(got, (q.flatten(1), qa, quant.roundtrip_fp8(kw)), strict=True):
        assert torch.equal(a, b)


@rows_list
@pytest.mark.parametrize("quantise_wo_a", [False, True])
def test_attention_output(rows: int, quantise_wo_a: bool) -> None:
    o, positions = draw(rows, 8, 128), torch.arange(rows) * 17
    wo_a, wo_b = draw(4 * 32, 256) / 16, draw(256, 128, seed=3) / 11
    got = fused.attention_output(o, positions, FREQS, wo_a, wo_b, 4, quantise_wo_a, False)
    assert got is not None
    back = rope.rotate(o, positions, FREQS, inverse=True).reshape(rows, 4, 256)
    back = quant.roundtrip_fp8(back) if quantise_wo_a else back
    u = gemm.grouped_linear(back, wo_a.unflatten(0, (4, 32)))
    assert torch.equal(got, gemm.linear(quant.roundtrip_fp8(u.flatten(1)), wo_b))


@rows_list
@pytest.mark.parametrize("round_hidden", [False, True])
@pytest.mark.parametrize("per_row_bias", [False, True])
@pytest.mark.parametrize("wide_gate", [False, True])
def test_moe(rows: int, round_hidden: bool, per_row_bias: bool, wide_gate: bool) -> None:
    h, gate = draw(rows, 256), draw(12, 256) / 16
    gate = gate.float() if wide_gate else gate
    bias = draw(rows, 12, dtype=torch.float32) if per_row_bias else draw(12, dtype=torch.float32)
    w13, w2 = draw(12, 192, 256, seed=4) / 16, draw(12, 256, 96, seed=5) / 10
    shared_w13, shared_w2 = draw(192, 256, seed=6) / 16, draw(256, 96, seed=7) / 10
    got = fused.moe(h, gate, bias, w13, w2, shared_w13, shared_w2, 4, True, 1.5, 10.0, round_hidden, False)
    assert got is not None
    ids, weights = moe_gate.route(h, gate, bias, 4, True, 1.5)
    h8 = quant.roundtrip_fp8(h)
    routed = moe_experts.experts(h8, ids, weights, w13, w2, 10.0, True, round_hidden)
    a, b = gemm.linear(h8, shared_w13).chunk(2, dim=-1)
    y = swiglu.swiglu(a, b, 10.0, out_dtype=torch.bfloat16 if round_hidden else torch.float32)
    shared = gemm.linear(quant.roundtrip_fp8(y).bfloat16(), shared_w2)
    assert torch.equal(got, (routed + shared.float()).bfloat16())


def test_taken_apart() -> None:
    """None, and so the caller's own steps: when asked for, under the reference, with gradients, and for odd widths."""
    o, positions = draw(2, 8, 128), torch.arange(2)
    wo_a, wo_b = draw(4 * 32, 256), draw(256, 128)

    def run() -> Tensor | None:
        return fused.attention_output(o, positions, FREQS, wo_a, wo_b, 4, False, False)

    assert run() is not None
    with fused.apart():
        assert run() is None
        assert gemm.linear(o[:, 0], wo_b).shape == (2, 256)  # single ops go on
    with backends.reference():
        assert run() is None
    wo_b.requires_grad_()
    assert run() is None
    assert fused.attention_output(o[..., :100], positions, FREQS, wo_a, wo_b.detach(), 4, False, False) is None
