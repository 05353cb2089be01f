"""Muon for matrices, AdamW for the rest, on float32 masters in a few large buffers; written back to the model's leaves.

Matrices of one shape and one storage format form a stack that is orthogonalised in one batch. With quantisation in
force the leaves get the values of the packed checkpoint, and the gradient is taken there (straight-through).
Source of the settings: the minnow specification, section 5.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benthic.kernels import quant
from benthic.train.backbone import Group, Leaf, Store

MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.01
ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-10
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that drives singular values towards 1 in 5 steps
CLIP = 1.0  # gradient norm of a group


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """[n, r, c], r <= c -> nearly semi-orthogonal matrices with the same row spaces, bfloat16 inside."""
    a, b, c = NEWTON_SCHULZ
    dtype = torch.bfloat16 if stack.is_cuda else torch.float32
    x = (stack / (stack.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.float()


def on_grid(master: Tensor, store: Store) -> Tensor:
    """The values that a stored weight keeps. master f32 [..., N, K] as stored (or [N] for norms)."""
    if store == "fp8":
        return quant.dequantise_weight_fp8(*quant.quantise_weight_fp8(master), torch.float32)
    if store == "fp4":
        return quant.dequantise_weight_fp4(*quant.quantise_weight_fp4(master), torch.float32)
    if store == "fp8_rows":
        return quant.dequantise_fp8(*quant.quantise_fp8(master))
    return master.bfloat16().float() if store == "bf16" else master


@dataclass(slots=True)
class MuonStack:
    """Matrices [n, r, c] of one shape and format; a matrix taller than wide is kept transposed."""

    leaves: list[Leaf]
    flipped: bool
    store: Store
    group: Group
    master: Tensor
    momentum: Tensor
    gain: float

    def matrices(self, tensor: Tensor, leaf: Leaf) -> Tensor:
        """A leaf-shaped tensor as [n, r, c]."""
        stack = tensor.reshape(-1, leaf.matrix, tensor.shape[-1])
        return stack.mT if self.flipped else stack


@dataclass(slots=True)
class AdamGroup:
    """Parameters of one learning rate, end to end in flat buffers."""

    leaves: list[Leaf]
    rate: float
    group: Group
    master: Tensor
    first: Tensor
    second: Tensor
    count: Tensor  # updates so far, f32


class Optimiser:
    """Holds the masters of all leaves.

    Step counts and the learning rate factor are tensors on the device, so that nothing waits for the host.
    """

    def __init__(self, leaves: Sequence[Leaf]):
        self.leaves = list(leaves)
        self.stacks: list[MuonStack] = []
        self.groups: list[AdamGroup] = []
        stacks: dict[Any, list[Leaf]] = {}
        groups: dict[Any, list[Leaf]] = {}
        for leaf in self.leaves:
            if leaf.matrix:
                rows, columns = leaf.matrix, leaf.value.shape[-1]
                stacks.setdefault((rows, columns, leaf.store, leaf.group), []).append(leaf)
            else:
                groups.setdefault((leaf.rate, leaf.group), []).append(leaf)
        for (rows, columns, store, group), members in stacks.items():
            stack = MuonStack(members, rows > columns, store, group, torch.empty(0), torch.empty(0), 1.0)
            stack.gain = max(1.0, rows / columns) ** 0.5
            values = [stack.matrices(leaf.value.detach().float(), leaf) for leaf in members]
            stack.master = torch.cat(values).contiguous()
            stack.momentum = torch.zeros_like(stack.master)
            self.stacks.append(stack)
        for (rate, group), members in groups.items():
            master = torch.cat([leaf.value.detach().float().flatten() for leaf in members])
            count = torch.zeros((), device=master.device)
            self.groups.append(
                AdamGroup(members, rate, group, master, torch.zeros_like(master), torch.zeros_like(master), count)
            )

    def masters(self) -> dict[str, Tensor]:
        """Leaf name -> its f32 master, leaf-shaped; a view where memory order allows."""
        out: dict[str, Tensor] = {}
        for stack in self.stacks:
            at = 0
            for leaf in stack.leaves:
                count = leaf.value.numel() // (stack.master.shape[1] * stack.master.shape[2])
                part = stack.master[at : at + count]
                out[leaf.name] = (part.mT if stack.flipped else part).reshape(leaf.value.shape)
                at += count
        for group in self.groups:
            parts = group.master.split([leaf.value.numel() for leaf in group.leaves])
            for leaf, part in zip(group.leaves, parts, strict=True):
                out[leaf.name] = part.view(leaf.value.shape)
        return out

    @torch.no_grad()
    def step(self, factor: Tensor) -> Tensor:
        """One update from the leaves' gradients, which are consumed. factor: learning rate factor.

        Returns the gradient norm of the group "text", before clipping. A gradient that is not finite anywhere counts
        as zero everywhere.
        """
        given = [leaf for leaf in self.leaves if leaf.value.grad is not None]
        missing = [leaf.name for leaf in self.leaves if leaf.value.grad is None and leaf.group == "text"]
        assert not missing, f"no gradient: {', '.join(missing)}"
        grads = [_gradient(leaf) for leaf in given]
        norms = torch._foreach_norm(grads, 2, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        by_group: dict[Group, list[Tensor]] = {}
        for leaf, norm in zip(given, norms, strict=True):
            by_group.setdefault(leaf.group, []).append(norm)
        totals = {group: torch.stack(parts).norm() for group, parts in by_group.items()}
        finite = torch.isfinite(torch.stack(list(totals.values()))).all()
        scales = {
            group: finite.float() if group == "index" else torch.where(finite, (CLIP / (norm + 1e-6)).clamp(max=1.0), 0)
            for group, norm in totals.items()
        }
        for stack in self.stacks:
            if not _any_gradient(stack.leaves):
                continue
            grad = torch.cat([stack.matrices(_gradient(leaf), leaf) for leaf in stack.leaves]).float()
            grad = torch.where(finite, grad * scales[stack.group], 0.0)
            stack.momentum.mul_(MUON_MOMENTUM).add_(grad)
            update = orthogonalise(grad.add_(stack.momentum, alpha=MUON_MOMENTUM))
            stack.master.mul_(1 - MUON_RATE * MUON_DECAY * factor)
            stack.master.sub_(update * (MUON_RATE * stack.gain * factor))
        for group in self.groups:
            if not _any_gradient(group.leaves):
                continue
            group.count += 1
            first_left, second_left = 1 - ADAM_BETAS[0] ** group.count, 1 - ADAM_BETAS[1] ** group.count
            grad = torch.cat([_gradient(leaf).float().flatten() for leaf in group.leaves])
            grad = torch.where(finite, grad * scales[group.group], 0.0)
            group.first.lerp_(grad, 1 - ADAM_BETAS[0])
            group.second.lerp_(grad.square_(), 1 - ADAM_BETAS[1])
            denominator = (group.second / second_left).sqrt_().add_(ADAM_EPS)
            group.master.sub_(group.first / first_left / denominator * (group.rate * factor))
        for leaf in self.leaves:
            leaf.value.grad = None
        return totals["text"]

    @torch.no_grad()
    def publish(self, quantised: bool) -> None:
        """Write the masters into the leaves; quantised: as the packed checkpoint would hold them."""
        for stack in self.stacks:
            values = stack.master.mT if stack.flipped else stack.master
            if quantised:
                values = on_grid(values.contiguous(), stack.store)
            at = 0
            for leaf in stack.leaves:
                target = leaf.value.view(-1, leaf.matrix, leaf.value.shape[-1])
                target.copy_(values[at : at + target.shape[0]])
                at += target.shape[0]
        for group in self.groups:
            parts = group.master.split([leaf.value.numel() for leaf in group.leaves])
            for leaf, part in zip(group.leaves, parts, strict=True):
                value = part.view(leaf.value.shape)
                leaf.value.copy_(on_grid(value, leaf.store) if quantised else value)

    @torch.no_grad()
    def begin_at(self, masters: Mapping[str, Tensor]) -> None:
        """Take over masters by name, as `masters` gives them; momenta and counts begin at zero."""
        for stack in self.stacks:
            values = [stack.matrices(masters[leaf.name].to(stack.master.device), leaf) for leaf in stack.leaves]
            stack.master.copy_(torch.cat(values))
            stack.momentum.zero_()
        for group in self.groups:
            group.master.copy_(torch.cat([masters[leaf.name].flatten() for leaf in group.leaves]))
            for kept in (group.first, group.second, group.count):
                kept.zero_()

    def state(self) -> dict[str, Any]:
        return {
            "muon": [(stack.master, stack.momentum) for stack in self.stacks],
            "adam": [(group.master, group.first, group.second, group.count) for group in self.groups],
        }

    def fits(self, state: dict[str, Any]) -> bool:
        """Is this the state of an optimiser of the same leaves?"""

        def shapes(of: dict[str, Any]) -> list[list[tuple[int, ...]]]:
            return [[tuple(tensor.shape) for tensor in part] for part in (*of["muon"], *of["adam"])]

        return shapes(state) == shapes(self.state())

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state that fits."""
        for stack, (master, momentum) in zip(self.stacks, state["muon"], strict=True):
            stack.master.copy_(master)
            stack.momentum.copy_(momentum)
        for group, (master, first, second, count) in zip(self.groups, state["adam"], strict=True):
            group.master.copy_(master)
            group.first.copy_(first)
            group.second.copy_(second)
            group.count.copy_(count)


def _any_gradient(leaves: list[Leaf]) -> bool:
    return any(leaf.value.grad is not None for leaf in leaves)


def _gradient(leaf: Leaf) -> Tensor:
    return torch.zeros_like(leaf.value) if leaf.value.grad is None else leaf.value.grad
