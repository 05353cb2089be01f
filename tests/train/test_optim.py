"""Muon against singular values, AdamW against torch's, the clip, what is published, and a state that goes on."""

import pytest
import torch
from torch import Tensor, nn

from benthic.kernels import quant
from benthic.train import optim
from benthic.train.backbone import Group, Leaf, Store
from benthic.train.optim import Optimiser, on_grid, orthogonalise
from tests.train.small import only_prose, small_trainer

ONE = torch.ones(())


def leaf(
    name: str, *shape: int, matrix: int = 0, rate: float = 1e-2, group: Group = "text", store: Store = "f32"
) -> Leaf:
    return Leaf(name, nn.Parameter(torch.randn(*shape)), store, matrix, rate, group)


def give(leaves: list[Leaf], scale: float = 1e-3) -> list[Tensor]:
    """A random gradient for each."""
    for item in leaves:
        item.value.grad = torch.randn_like(item.value) * scale
    return [item.value.grad.clone() for item in leaves if item.value.grad is not None]


# Muon


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 7), (3, 4, 4), (2, 5, 33), (1, 32, 64)])
def test_orthogonalise_acts_on_singular_values_alone(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape) * 100
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    a, b, c = optim.NEWTON_SCHULZ
    value = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        value = a * value + b * value**3 + c * value**5
    torch.testing.assert_close(orthogonalise(x), u @ torch.diag_embed(value) @ v, atol=2e-4, rtol=0)


def test_orthogonalised_matrices_are_nearly_orthogonal() -> None:
    x = torch.randn(4, 16, 64)  # well conditioned, as gradients with momentum are not always
    values = torch.linalg.svdvals(orthogonalise(x))
    assert values.min() > 0.65
    assert values.max() < 1.25


@pytest.mark.parametrize("scale", [1e-3, 1e15])
def test_orthogonalise_forgets_the_scale(scale: float) -> None:
    x = torch.randn(2, 8, 16)
    torch.testing.assert_close(orthogonalise(x * scale), orthogonalise(x), atol=1e-2, rtol=0)


def test_orthogonalise_of_nothing_is_nothing() -> None:
    assert not orthogonalise(torch.zeros(2, 3, 5)).any()


@pytest.mark.parametrize(("rows", "columns"), [(8, 24), (24, 8), (16, 16)])
def test_muon_equals_its_textbook_form(rows: int, columns: int) -> None:
    """Two leaves of one shape, one of them two matrices: a stack of three."""
    leaves = [leaf("a", rows, columns, matrix=rows), leaf("b", 2 * rows, columns, matrix=rows)]
    optimiser = Optimiser(leaves)
    assert len(optimiser.stacks) == 1
    matrices = [m.clone() for item in leaves for m in item.value.detach().split(rows)]
    momenta = [torch.zeros(rows, columns) for _ in matrices]
    for factor in (0.3, 1.0, 0.5):
        grads = [m for grad in give(leaves) for m in grad.split(rows)]
        optimiser.step(torch.tensor(factor))
        for i, grad in enumerate(grads):
            momenta[i] = 0.95 * momenta[i] + grad
            nesterov = grad + 0.95 * momenta[i]
            wide = nesterov if rows <= columns else nesterov.T
            update = orthogonalise(wide[None])[0]
            update = update if rows <= columns else update.T
            rate = 0.02 * factor
            matrices[i] = matrices[i] * (1 - rate * 0.01) - rate * max(1, rows / columns) ** 0.5 * update
    masters = optimiser.masters()
    torch.testing.assert_close(masters["a"], matrices[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(masters["b"], torch.cat(matrices[1:]), atol=1e-5, rtol=1e-5)


# AdamW


def test_adam_equals_torchs() -> None:
    leaves = [
        leaf("a", 5, 7),
        leaf("b", 3, rate=2e-3),
        leaf("c", 11, rate=2e-3),
        leaf("d", 4, rate=2e-3, group="index"),
    ]
    optimiser = Optimiser(leaves)
    assert len(optimiser.groups) == 3
    mine = {item.name: nn.Parameter(item.value.detach().clone()) for item in leaves}
    groups = [{"params": [mine[item.name]], "lr": item.rate} for item in leaves]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for step in range(6):
        factor = 1.0 / (1 + step)
        for group, item in zip(theirs.param_groups, leaves, strict=True):
            group["lr"] = item.rate * factor
        for item, grad in zip(leaves, give(leaves), strict=True):
            mine[item.name].grad = grad
        optimiser.step(torch.tensor(factor))
        theirs.step()
    for name, value in optimiser.masters().items():
        torch.testing.assert_close(value, mine[name].detach(), atol=1e-6, rtol=1e-5)


# The gradient


def test_each_group_is_clipped_by_its_own_norm_and_indexers_not_at_all() -> None:
    leaves = [
        leaf("a", 4, 6, matrix=4), leaf("b", 9),
        leaf("c", 5, group="index"), leaf("d", 4, 4, matrix=4, group="index"),
        leaf("e", 7, group="vision"), leaf("f", 3, 4, matrix=3, group="vision"),
    ]  # fmt: skip
    optimiser = Optimiser(leaves)
    grads = give(leaves, scale=10.0)
    want = [grad.clone() for grad in grads]
    norms: list[Tensor] = []
    for members in ((0, 1), (4, 5)):
        counted = [nn.Parameter(torch.zeros_like(grads[i])) for i in members]
        for parameter, i in zip(counted, members, strict=True):
            parameter.grad = want[i]
        norms.append(nn.utils.clip_grad_norm_(counted, 1.0))  # in place
    norm = optimiser.step(ONE)
    torch.testing.assert_close(norm, norms[0])
    assert norm > 10
    first = {group.leaves[0].name: group.first for group in optimiser.groups}
    momenta = {stack.leaves[0].name: stack.momentum[0] for stack in optimiser.stacks}
    for name, i in (("b", 1), ("c", 2), ("e", 4)):
        torch.testing.assert_close(first[name], 0.1 * want[i], rtol=1e-4, atol=1e-7)
    for name, i in (("a", 0), ("d", 3), ("f", 5)):
        torch.testing.assert_close(momenta[name], want[i], rtol=1e-4, atol=1e-7)
    assert torch.equal(want[2], grads[2])
    assert want[4].norm() < 1.0


def test_a_small_gradient_is_not_scaled() -> None:
    leaves = [leaf("a", 4, 6, matrix=4)]
    optimiser = Optimiser(leaves)
    (grad,) = give(leaves, scale=1e-2)
    norm = optimiser.step(ONE)
    torch.testing.assert_close(norm, grad.norm())
    torch.testing.assert_close(optimiser.stacks[0].momentum[0], grad)


@pytest.mark.parametrize("broken", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(broken: int, value: float) -> None:
    leaves = [
        leaf("a", 4, 6, matrix=4),
        leaf("b", 9),
        leaf("c", 5, group="index"),
        leaf("d", 4, 4, matrix=4, group="index"),
    ]
    optimiser = Optimiser(leaves)
    before = {name: master.clone() for name, master in optimiser.masters().items()}
    give(leaves)
    grad = leaves[broken].value.grad
    assert grad is not None
    grad.view(-1)[1] = value
    optimiser.step(ONE)
    for name, master in optimiser.masters().items():
        torch.testing.assert_close(master, before[name], atol=1e-3, rtol=1e-3)  # weight decay goes on
    give(leaves)
    optimiser.step(ONE)
    assert all(torch.isfinite(master).all() for master in optimiser.masters().values())
    assert all(not torch.equal(master, before[name]) for name, master in optimiser.masters().items())


@pytest.mark.parametrize("group", ["index", "vision"])
def test_what_has_no_gradient_stays_and_only_indexers_and_the_tower_may(group: Group) -> None:
    leaves = [leaf("a", 4, 6, matrix=4), leaf("c", 5, group=group), leaf("d", 3, 3, matrix=3, group=group)]
    optimiser = Optimiser(leaves)
    before = {name: master.clone() for name, master in optimiser.masters().items()}
    for _ in range(3):
        give(leaves[:1])
        optimiser.step(ONE)
    assert all(torch.equal(optimiser.masters()[name], before[name]) for name in "cd")  # no decay either
    assert all(item.value.grad is None for item in leaves)
    assert [int(g.count) for g in optimiser.groups] == [0]
    fresh = Optimiser(leaves)
    give(leaves)
    grads = [item.value.grad.clone() for item in leaves if item.value.grad is not None]
    optimiser.step(ONE)
    for item, grad in zip(leaves, grads, strict=True):
        item.value.grad = grad
    fresh.step(ONE)
    assert all(torch.equal(optimiser.masters()[name], fresh.masters()[name]) for name in "cd")  # begins like new
    give(leaves[1:])
    with pytest.raises(AssertionError, match="no gradient: a"):
        optimiser.step(ONE)


# Masters and leaves


def test_every_parameter_of_the_model_has_a_master() -> None:
    trainer = small_trainer(only_prose(rows=2, length=32, index_rows=1))
    masters = trainer.optimiser.masters()
    assert trainer.tower is not None
    named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    named |= {f"vision.{name}": p for name, p in trainer.tower.named_parameters()}
    assert masters.keys() == named.keys()
    for name, value in named.items():
        assert torch.equal(masters[name], value.detach().float()), name


@pytest.mark.parametrize(
    ("store", "shape", "matrix"),
    [
        ("fp8", (64, 96), 64),
        ("fp8", (96, 64), 32),
        ("fp8", (128, 32), 128),
        ("fp4", (3, 32, 64), 32),
        ("fp4", (3, 64, 32), 64),
        ("bf16", (5, 64), 0),
        ("fp8_rows", (7, 64), 0),
        ("f32", (7,), 0),
    ],
)
def test_publish_writes_what_the_file_will_hold(store: Store, shape: tuple[int, ...], matrix: int) -> None:
    item = leaf("a", *shape, matrix=matrix, store=store)
    optimiser = Optimiser([item])
    master = item.value.detach().clone() * 3.0
    optimiser.load_state({k: [tuple(t * 3.0 for t in part) for part in v] for k, v in optimiser.state().items()})
    torch.testing.assert_close(optimiser.masters()["a"], master)
    optimiser.publish(quantised=False)
    assert torch.equal(item.value.detach(), master)
    optimiser.publish(quantised=True)
    if store == "fp8":
        want = quant.dequantise_weight_fp8(*quant.quantise_weight_fp8(master), torch.float32)
    elif store == "fp4":
        want = torch.stack([quant.dequantise_weight_fp4(*quant.quantise_weight_fp4(m), torch.float32) for m in master])
    elif store == "fp8_rows":
        want = quant.roundtrip_fp8(master)
    else:
        want = master.bfloat16().float() if store == "bf16" else master
    assert torch.equal(item.value.detach(), want)
    assert torch.equal(on_grid(want, store), want)  # what is on the grid stays there
    assert (store == "f32") == torch.equal(want, master)


# The state


def test_a_saved_state_goes_on_as_if_never_stopped() -> None:
    def made() -> list[Leaf]:
        torch.manual_seed(3)
        return [leaf("a", 4, 6, matrix=4), leaf("b", 9, 3, matrix=9), leaf("c", 5), leaf("d", 2, group="index")]

    whole, first, second = (Optimiser(made()) for _ in range(3))
    torch.manual_seed(4)
    grads = [give(whole.leaves) for _ in range(5)]
    for step, values in enumerate(grads):
        if step == 3:
            saved = {k: [tuple(t.clone() for t in part) for part in v] for k, v in first.state().items()}
            assert second.fits(saved)
            second.load_state(saved)
        for optimiser in (whole, first if step < 3 else second):
            for item, grad in zip(optimiser.leaves, values, strict=True):
                item.value.grad = grad.clone()
            optimiser.step(ONE * 0.7)
    for name, master in whole.masters().items():
        assert torch.equal(master, second.masters()[name]), name


def test_the_state_of_other_leaves_does_not_fit() -> None:
    optimiser = Optimiser([leaf("a", 4, 6, matrix=4), leaf("c", 5)])
    for other in (
        [leaf("a", 4, 6, matrix=4), leaf("c", 6)],
        [leaf("a", 4, 7, matrix=4), leaf("c", 5)],
        [leaf("c", 5)],
        [leaf("a", 4, 6, matrix=4), leaf("c", 5), leaf("d", 3, rate=1.0)],
    ):
        assert not optimiser.fits(Optimiser(other).state())
    assert optimiser.fits(optimiser.state())
