"""The training forms of kernels: same results as the package's, gradients as they should be, and put away again."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benthic.kernels import gemm, hyper, moe_experts, moe_gate, quant
from benthic.train import kernels
from benthic.train.kernels import TrainingKernels

T, E, K, D, WIDTH = 12, 6, 2, 32, 32


def make(sequences: int = 2) -> TrainingKernels:
    return TrainingKernels(torch.device("cpu"), sequences)


def dense(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ids.shape[0], E).scatter_(1, ids, weights)


@pytest.mark.parametrize("normalise", [True, False])
def test_dense_routing_equals_the_routers(normalise: bool) -> None:
    h, gate, bias = torch.randn(T, D), torch.randn(E, D), torch.tensor([-1.0, 0.0, 0.0, 0.0, -1.0, 0.0])
    h[3:5] = 0.0  # four scores are equal: the lowest ids win
    weights, loads, _ = kernels.dense_route(h, gate, bias, None, 2, K, normalise, 1.5)
    want = dense(*moe_gate.route_reference(h, gate, bias, K, normalise, 1.5))
    torch.testing.assert_close(weights, want, atol=1e-6, rtol=1e-5)
    assert torch.equal(loads[0], (want > 0).sum(0).float())
    assert loads.sum() == T * K
    assert not loads[1].any()


def test_image_tokens_are_routed_by_their_own_bias_and_counted_apart() -> None:
    h, gate, images = torch.randn(T, D), torch.randn(E, D), torch.arange(T) % 3 == 0
    bias = torch.where(images[:, None], torch.randn(E) * 3, torch.randn(E) * 3)
    weights, loads, _ = kernels.dense_route(h, gate, bias, images, 2, K, True, 1.5)
    want = dense(*moe_gate.route_reference(h, gate, bias, K, True, 1.5))
    torch.testing.assert_close(weights, want, atol=1e-6, rtol=1e-5)
    for part, tokens in zip(loads, (~images, images), strict=True):
        assert torch.equal(part, (want[tokens] > 0).sum(0).float())


def test_balance_is_one_when_balanced_and_more_otherwise() -> None:
    gate = torch.eye(E, D) * 20
    even = F.one_hot(torch.arange(E).repeat(2), D).float() + F.one_hot((torch.arange(E).repeat(2) + 1) % E, D).float()
    *_, balance = kernels.dense_route(even, gate, torch.zeros(E), None, 2, K, True, 1.0)
    assert float(balance) == pytest.approx(1.0, abs=1e-4)
    same = even[:1].expand(2 * E, -1)
    *_, balance = kernels.dense_route(same, gate, torch.zeros(E), None, 2, K, True, 1.0)
    assert float(balance) > 2.0
    # per sequence: two sequences that are each lopsided do not balance each other
    halves = torch.cat([even[:1].expand(E, -1), even[3:4].expand(E, -1)])
    *_, apart = kernels.dense_route(halves, gate, torch.zeros(E), None, 2, K, True, 1.0)
    *_, together = kernels.dense_route(halves, gate, torch.zeros(E), None, 1, K, True, 1.0)
    assert float(apart) > float(together) + 0.5


def test_balance_teaches_the_router_towards_idle_experts() -> None:
    h, gate = torch.rand(T, D), torch.zeros(E, D, requires_grad=True)
    *_, balance = kernels.dense_route(h, gate, torch.arange(E) * -0.1, None, 1, K, True, 1.0)
    balance.backward()
    assert gate.grad is not None
    push = -gate.grad.sum(1)
    assert (push[:K] < 0).all()
    assert (push[K:] > 0).all()


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_dense_experts_equal_the_chosen_ones(quantise: bool, limit: float) -> None:
    x, w13, w2 = torch.randn(T, D), torch.randn(E, 2 * WIDTH, D) * D**-0.5, torch.randn(E, D, WIDTH)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    weights = torch.rand(T, K) + 0.1
    want = moe_experts.experts_reference(x, ids, weights, w13, w2, limit, quantise, False)
    spread = dense(ids, weights)
    got = make()._experts(x, spread, spread, w13, w2, limit, quantise, False)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_rounding_passes_the_gradient_straight_through() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    rounded = make().straight(quant.roundtrip_fp8_reference)(x)
    assert torch.equal(rounded, quant.roundtrip_fp8_reference(x))
    assert not torch.equal(rounded, x)
    grad = torch.randn(4, 32)
    assert torch.equal(torch.autograd.grad(rounded, x, grad)[0], grad)
    h13 = torch.randn(T, E * 2 * WIDTH, requires_grad=True)
    weights = torch.rand(T, E)
    grad = torch.randn(T, E * WIDTH)
    back = [torch.autograd.grad(kernels.expert_hidden(h13, weights, 10.0, q), h13, grad)[0] for q in (False, True)]
    assert torch.equal(*back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_are_mixed_read_and_written_as_in_serving(dtype: torch.dtype) -> None:
    streams = 4
    s, fn = torch.randn(T, streams, D).to(dtype), torch.randn((2 + streams) * streams, streams * D) * 0.1
    scale, base = torch.rand(3), torch.randn((2 + streams) * streams)
    mixes = make()._mixes(s, fn, scale, base, 1e-6, 1e-6, 5)
    want = hyper.hyper_mixes_reference(s, fn, scale, base, 1e-6, 1e-6, 5)
    torch.testing.assert_close(mixes, want, atol=1e-5, rtol=1e-5)
    pre, post, comb = want
    torch.testing.assert_close(kernels.collapse(s, pre), hyper.hyper_collapse_reference(s, pre))
    out = torch.randn(T, D).to(dtype)
    torch.testing.assert_close(kernels.expand(out, s, post, comb), hyper.hyper_expand_reference(out, s, post, comb))


def test_linear_rounds_once_or_not_at_all() -> None:
    x, weight = torch.randn(T, D).bfloat16(), torch.randn(8, D)
    wide = kernels.linear(x, weight, torch.float32)
    torch.testing.assert_close(wide, x.float() @ weight.T)
    assert kernels.linear(x, weight).dtype == torch.bfloat16
    torch.testing.assert_close(kernels.linear(x, weight), gemm.linear_reference(x, weight.bfloat16(), None))


def test_sink_takes_its_share_of_the_softmax() -> None:
    logits, values, sink = torch.randn(T, 2, 9), torch.randn(9, D), torch.randn(2)
    full = torch.softmax(torch.cat([logits, sink.expand(T, 2).unsqueeze(-1)], -1), -1)[..., :-1] @ values
    got = kernels.sink_gate(torch.softmax(logits, -1) @ values, logits.logsumexp(-1), sink)
    torch.testing.assert_close(got, full)


def test_installed_functions_are_put_away_again() -> None:
    made = make()
    before: dict[tuple[Any, str], Any] = {(module, name): getattr(module, name) for module, name in made.table()}
    with made.installed():
        assert all(getattr(module, name) is not fn for (module, name), fn in before.items())
    assert all(getattr(module, name) is fn for (module, name), fn in before.items())

    def broken() -> None:
        with made.installed():
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    assert all(getattr(module, name) is fn for (module, name), fn in before.items())


def test_loads_and_balance_are_recorded_a_layer() -> None:
    made = make()
    h, gate = torch.randn(T, D), torch.randn(E, D, requires_grad=True)
    for _ in range(3):
        weights, same = made._route(h, gate, torch.zeros(E), K, True, 1.0)
        assert weights is same
    assert [load.sum() for load in made.loads] == [T * K] * 3
    assert all(part.requires_grad for part in made.balance)
    made.clear()
    assert not made.loads
    assert not made.balance
