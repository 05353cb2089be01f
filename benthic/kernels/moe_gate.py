"""The router: which experts serve a token, and with what weight. Source: model specification, section 2.12."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends

NORMALISER_FLOOR = 1e-20


def _scores(h: Tensor, gate: Tensor) -> Tensor:
    """[T, E] f32, before the bias."""
    return F.softplus(h.float() @ gate.float().t()).sqrt()


def lead(h: Tensor, gate: Tensor, bias: Tensor, k: int) -> Tensor:
    """[T] f32: by how much the last expert that `route` chooses is ahead of the first that it does not; inf: none."""
    best = (_scores(h, gate) + bias).topk(min(k + 1, gate.shape[0]), dim=-1).values
    return best[:, k - 1] - best[:, k] if best.shape[1] > k else torch.full_like(best[:, 0], torch.inf)


def route_reference(
    h: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(h, gate)
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if normalise and k > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + NORMALISER_FLOOR)
    return ids, weights * scale


def route(h: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The k best experts of each row by sqrt(softplus(h @ gate^T)) + bias.

    h          [T, D] bf16 or f32, not quantised. T may be 0.
    gate       [E, D]; the product is in f32.
    bias       [E] or [T, E] f32: moves the choice, never the weight.
    k          1 to E.
    normalise  divide the k weights by their sum + 1e-20 (not when k is 1); then multiply by `scale`.
    returns    ids [T, k] int64, best first, the lowest index first among equals; weights [T, k] f32.
    Error      weights within 1e-6 relative; ids equal unless two ranks are closer than the product's summation error.
    Cost       2*T*E*D FLOP.
    Raises     ShapeError.
    """
    if h.ndim != 2 or gate.ndim != 2 or gate.shape[1] != h.shape[1]:
        raise ShapeError("route: gate", want=f"[E, D] for h {tuple(h.shape)}", got=tuple(gate.shape))
    experts = gate.shape[0]
    if bias.shape not in ((experts,), (h.shape[0], experts)):
        raise ShapeError("route: bias", want=f"[{experts}] or [{h.shape[0]}, {experts}]", got=tuple(bias.shape))
    if not 1 <= k <= experts:
        raise ShapeError("route: k", want=f"1 to {experts}", got=k)
    run = backends.pick("route", h, gate, bias) or route_reference
    return run(h, gate, bias, k, normalise, scale)
