"""Muon for matrices, AdamW for the rest, on float32 masters in a few large buffers; written back to the model's leaves.

Matrices of one shape and one storage format form a stack that is orthogonalised in one batch. With quantisation in
force the leaves get the values of the packed checkpoint, and the gradient is taken there (straight-through).
Source of the settings: the minnow specification, section 5.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benthic.kernels import quant
from benthic.train.backbone import Leaf, Store

MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.01
ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-10
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that drives singular values towards 1 in 5 steps
CLIP = 1.0  # global gradient norm


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
    index: bool
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
    index: bool
    master: Tensor
    first: Tensor
    second: Tensor


class Optimiser:
    """Holds the masters of all leaves.

    step count and learning rate factor are tensors on the device, so that nothing waits for the host.
    """

    def __init__(self, leaves: Sequence[Leaf]):
        self.leaves = list(leaves)
        device = self.leaves[0].value.device
        self.count = torch.zeros((), device=device)
        self.stacks: list[MuonStack] = []
        self.groups: list[AdamGroup] = []
        stacks: dict[Any, list[Leaf]] = {}
        groups: dict[Any, list[Leaf]] = {}
        for leaf in self.leaves:
            if leaf.matrix:
                rows, columns = leaf.matrix, leaf.value.shape[-1]
                stacks.setdefault((rows, columns, leaf.store, leaf.index), []).append(leaf)
            else:
                groups.setdefault((leaf.rate, leaf.index), []).append(leaf)
        for (rows, columns, store, index), members in stacks.items():
            stack = MuonStack(members, rows > columns, store, index, torch.empty(0), torch.empty(0), 1.0)
            stack.gain = max(1.0, rows / columns) ** 0.5
            values = [stack.matrices(leaf.value.detach().float(), leaf) for leaf in members]
            stack.master = torch.cat(values).contiguous()
            stack.momentum = torch.zeros_like(stack.master)
            self.stacks.append(stack)
        for (rate, index), members in groups.items():
            master = torch.cat([leaf.value.detach().float().flatten() for leaf in members])
            self.groups.append(
                AdamGroup(members, rate, index, master, torch.zeros_like(master), torch.zeros_like(master))
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
        """One update from the leaves' gradients, which are consumed. factor: learning rate factor. Returns the norm."""
        grads = [_gradient(leaf) for leaf in self.leaves]
        norms = torch._foreach_norm(grads, 2, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        norm = torch.stack([n for n, leaf in zip(norms, self.leaves, strict=True) if not leaf.index]).norm()
        finite = torch.isfinite(torch.stack(norms)).all() & torch.isfinite(norm)
        scale = torch.where(finite, (CLIP / (norm + 1e-6)).clamp(max=1.0), 0.0)
        self.count += 1
        for stack in self.stacks:
            grad = torch.cat([stack.matrices(_gradient(leaf), leaf) for leaf in stack.leaves]).float()
            grad = _scaled(grad, scale, stack.index, finite)
            stack.momentum.mul_(MUON_MOMENTUM).add_(grad)
            update = orthogonalise(grad.add_(stack.momentum, alpha=MUON_MOMENTUM))
            stack.master.mul_(1 - MUON_RATE * MUON_DECAY * factor)
            stack.master.sub_(update * (MUON_RATE * stack.gain * factor))
        first_left, second_left = 1 - ADAM_BETAS[0] ** self.count, 1 - ADAM_BETAS[1] ** self.count
        for group in self.groups:
            grad = torch.cat([_gradient(leaf).float().flatten() for leaf in group.leaves])
            grad = _scaled(grad, scale, group.index, finite)
            group.first.lerp_(grad, 1 - ADAM_BETAS[0])
            group.second.lerp_(grad.square_(), 1 - ADAM_BETAS[1])
            denominator = (group.second / second_left).sqrt_().add_(ADAM_EPS)
            group.master.sub_(group.first / first_left / denominator * (group.rate * factor))
        for leaf in self.leaves:
            leaf.value.grad = None
        return norm

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

    def state(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "muon": [(stack.master, stack.momentum) for stack in self.stacks],
            "adam": [(group.master, group.first, group.second) for group in self.groups],
        }

    def fits(self, state: dict[str, Any]) -> bool:
        """Is this the state of an optimiser of the same leaves?"""

        def shapes(of: dict[str, Any]) -> list[list[tuple[int, ...]]]:
            return [[tuple(tensor.shape) for tensor in part] for part in (*of["muon"], *of["adam"])]

        return shapes(state) == shapes(self.state())

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state that fits."""
        self.count.copy_(state["count"])
        for stack, (master, momentum) in zip(self.stacks, state["muon"], strict=True):
            stack.master.copy_(master)
            stack.momentum.copy_(momentum)
        for group, (master, first, second) in zip(self.groups, state["adam"], strict=True):
            group.master.copy_(master)
            group.first.copy_(first)
            group.second.copy_(second)


def _gradient(leaf: Leaf) -> Tensor:
    if leaf.value.grad is None:
        assert leaf.index, f"{leaf.name} got no gradient"  # an indexer gets none when the index loss is off
        leaf.value.grad = torch.zeros_like(leaf.value)
    return leaf.value.grad


def _scaled(grad: Tensor, scale: Tensor, index: bool, finite: Tensor) -> Tensor:
    """Clipped; a gradient that is not finite anywhere counts as zero everywhere."""
    return torch.where(finite, grad * (finite if index else scale), 0.0)
