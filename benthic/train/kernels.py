"""Training forms of the package's kernel functions: the same results with a backward pass made for speed.

The training graph is the package's own model. Its modules look their kernels up by name at each call, and
`TrainingKernels.installed()` puts the functions of the table below under those names for the length of a block. Nothing
else of the model is replaced but the two lookup tables (`train/backbone.py`).

On CUDA the small pieces are compiled, one graph a piece, shared by all layers. Differences from serving: linears take
bfloat16 operands and round once; all experts are computed as one pair of products with zero weights for the unchosen;
quantisers pass their gradient straight through; Sinkhorn is one kernel each way.

T rows, S streams, D hidden width, E experts, I expert width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benthic.kernels import compress, engram, gemm, hyper, moe_experts, moe_gate, norm, quant, rope, swiglu


class StraightThrough(torch.autograd.Function):
    """A rounding in the forward direction, nothing in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Sinkhorn(torch.autograd.Function):
    """hyper.sinkhorn on CUDA, with the exact backward of `train/sinkhorn.py`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, eps: float, iters: int) -> Tensor:
        from benthic.train import sinkhorn

        comb, sums = sinkhorn.forward(logits, eps, iters)
        ctx.save_for_backward(comb, sums)
        ctx.eps = eps
        return comb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from benthic.train import sinkhorn

        comb, sums = ctx.saved_tensors
        return sinkhorn.backward(comb, sums, grads[0], ctx.eps), None, None


# ---- the pieces ------------------------------------------------------------------------------------------------------


def mix_logits(
    s: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    streams = s.shape[1]
    v = s.flatten(1).float()
    z = F.linear(v, fn) * torch.rsqrt(v.square().mean(dim=-1, keepdim=True) + norm_eps)
    z_pre, z_post, z_comb = z.split([streams, streams, streams * streams], dim=-1)
    b_pre, b_post, b_comb = base.split([streams, streams, streams * streams])
    pre = torch.sigmoid(z_pre * scale[0] + b_pre) + hc_eps
    post = 2 * torch.sigmoid(z_post * scale[1] + b_post)
    return pre, post, (z_comb * scale[2] + b_comb).unflatten(-1, (streams, streams))


def collapse(s: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * s.float()).sum(1).to(s.dtype)


def expand(out: Tensor, s: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = (comb.unsqueeze(-1) * s.float().unsqueeze(2)).sum(1)  # [T, S_out, D]
    return (post.unsqueeze(-1) * out.float().unsqueeze(1) + mixed).to(s.dtype)


def dense_route(
    h: Tensor, gate: Tensor, bias: Tensor, images: Tensor | None, sequences: int, k: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Routing weights of all experts, zero for the unchosen [T, E]; tokens per expert [2, E]; sequence balance loss.

    bias [E] or [T, E]. Tokens are counted apart: those of text, then those of images [T] bool (None: there are none).
    The balance loss is the mean over sequences of sum_e f_e P_e, f_e = E / k times the share of tokens that chose e,
    P_e the mean normalised score; 1 when balanced.
    """
    scores = F.softplus(F.linear(h.float(), gate)).sqrt()  # [T, E]
    rank = (scores + bias).detach()
    experts = rank.shape[1]
    earlier = torch.arange(experts, device=h.device)
    better = (rank[:, None, :] > rank[:, :, None]) | (
        (rank[:, None, :] == rank[:, :, None]) & (earlier[None, None, :] < earlier[None, :, None])
    )
    chosen = (better.sum(-1) < k).float()  # [T, E]
    weights = scores * chosen
    if normalise and k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + moe_gate.NORMALISER_FLOOR)
    shares = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (sequences, -1)).mean(1)
    loads = chosen.unflatten(0, (sequences, -1)).mean(1)  # [B, E]
    balance = (loads * shares).sum(-1).mean() * (experts / k)
    of_images = torch.zeros_like(gate[:, 0]) if images is None else (chosen * images.unsqueeze(-1)).sum(0)
    return weights * scale, torch.stack([chosen.sum(0) - of_images, of_images]), balance


def expert_hidden(h13: Tensor, weights: Tensor, limit: float, quantise: bool) -> Tensor:
    """[T, E*2I] -> [T, E*I], weighted; on the FP8 grid with the gradient passed straight through when `quantise`."""
    experts = weights.shape[1]
    gate, up = h13.unflatten(-1, (experts, 2, -1)).float().unbind(2)  # [T, E, I]
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = F.silu(gate) * up * weights.unsqueeze(-1)
    if quantise:
        y = y + (quant.roundtrip_fp8_reference(y) - y).detach()
    return y.flatten(1).to(h13.dtype)


def lookup(rows: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(rows, weight)


def sink_gate(o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Attention output without a sink [T, H, dh], its log-sum-exp [T, H] -> with the sink in the denominator."""
    return (o.float() * torch.sigmoid(lse - sink).unsqueeze(-1)).to(o.dtype)


# ---- the table -------------------------------------------------------------------------------------------------------


class TrainingKernels:
    """The functions that stand in for the package's during training, and what they record.

    sequences  the balance loss is taken in so many equal parts of a step's tokens
    images     [T] bool, the image tokens of the passes to come; None: there are none
    loads      tokens per expert [2, E], of text and of images, one entry a layer, of the forward passes since `clear`
    balance    sequence balance loss, likewise
    """

    def __init__(self, device: torch.device, sequences: int):
        self.compiled = device.type == "cuda"
        self.sequences = sequences
        self.images: Tensor | None = None
        self.loads: list[Tensor] = []
        self.balance: list[Tensor] = []
        self._piece = cache(self._compile)
        if self.compiled:
            import torch._dynamo.config as dynamo

            dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1024  # one variant a shape, dtype and phase

    def _compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, dynamic=False, fullgraph=True) if self.compiled else fn

    def piece(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn, compiled once where the device gains from it."""
        return self._piece(fn)

    def clear(self) -> None:
        self.loads.clear()
        self.balance.clear()

    def straight(self, rounding: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: StraightThrough.apply(x, self.piece(rounding))

    def table(self) -> dict[tuple[Any, str], Callable[..., Any]]:
        piece = self.piece
        return {
            (gemm, "linear"): linear,
            (gemm, "grouped_linear"): gemm.grouped_linear_reference,
            (norm, "rms_norm"): piece(norm.rms_norm_reference),
            (rope, "rotate"): piece(rope.rotate_reference),
            (quant, "roundtrip_fp8"): self.straight(quant.roundtrip_fp8_reference),
            (quant, "roundtrip_mxfp4"): self.straight(quant.roundtrip_mxfp4_reference),
            (quant, "roundtrip_nvfp4"): self.straight(quant.roundtrip_nvfp4_reference),
            (swiglu, "swiglu"): piece(swiglu.swiglu_reference),
            (hyper, "hyper_mixes"): self._mixes,
            (hyper, "hyper_collapse"): piece(collapse),
            (hyper, "hyper_expand"): piece(expand),
            (compress, "pool_groups"): piece(compress.pool_groups_reference),
            (engram, "ngram_rows"): piece(engram.ngram_rows_reference),
            (engram, "engram_gate"): piece(engram.engram_gate_reference),
            (moe_gate, "route"): self._route,
            (moe_experts, "experts"): self._experts,
        }

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside this block the model's modules call the functions of the table."""
        table = self.table()
        before = {(module, name): getattr(module, name) for module, name in table}
        try:
            for (module, name), fn in table.items():
                setattr(module, name, fn)
            yield
        finally:
            for (module, name), fn in before.items():
                setattr(module, name, fn)

    def _mixes(
        self, s: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iters: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, logits = self.piece(mix_logits)(s, fn, scale, base, norm_eps, hc_eps)
        if self.compiled:
            return pre, post, Sinkhorn.apply(logits, hc_eps, iters)
        return pre, post, hyper.sinkhorn(logits, hc_eps, iters)

    def _route(
        self, h: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Dense form: no ids, and a weight for every expert; only `_experts` reads them."""
        route = self.piece(dense_route)
        weights, load, balance = route(h, gate, bias, self.images, self.sequences, k, normalise, scale)
        self.loads.append(load.detach())
        self.balance.append(balance)
        return weights, weights

    def _experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w13: Tensor,
        w2: Tensor,
        limit: float,
        quantise: bool,
        round_hidden: bool = True,
        one_scale: bool = False,
    ) -> Tensor:
        h13 = F.linear(x, w13.flatten(0, 1))  # [T, E*2I]
        y = self.piece(expert_hidden)(h13, weights, limit, quantise)
        return F.linear(y, w2.transpose(0, 1).flatten(1)).float()


def linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """gemm.linear with operands in the dtype of x; where a float32 result is wanted, in float32 (TF32 on CUDA)."""
    if out_dtype is torch.float32:
        return F.linear(x.float(), weight.float())
    return F.linear(x, weight.to(x.dtype))
