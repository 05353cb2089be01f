"""What is predicted, with what weight, and how well. Source: the minnow specification, sections 3 and 5.3.

B rows of L tokens, T = B L, D hidden width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def history(ids: Tensor, n: int) -> Tensor:
    """ids [B, L] -> [B L, n] int64: column i is the id i + 1 places before in the same row, -1 before its start."""
    back = [F.pad(ids, (i, 0), value=-1)[:, : ids.shape[1]] for i in range(1, n + 1)]
    return torch.stack(back, dim=-1).flatten(0, 1)


def targets(ids: Tensor) -> Tensor:
    """ids [B, L] -> [B L] the next id of the row; 0 at its end, which has no weight."""
    return F.pad(ids[:, 1:], (0, 1)).flatten()


def response_weights(ids: Tensor, opened: int, closed: int) -> Tensor:
    """ids [B, L] -> f32 [B, L]: 1 where the next token belongs to a response, its end token included.

    A response stands between the id `opened` (`</think>`) and the id `closed` (end of sentence).
    """
    inside = ((ids == opened).int().cumsum(1) - (ids == closed).int().cumsum(1)) > 0
    inside[:, -1] = False
    return inside.float()


def head_loss(hidden: Tensor, head: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [T, D] after the last norm, head [V, D], wanted and weights [T] -> weighted nats, summed; nats [T]."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    nats = torch.logsumexp(logits, -1) - logits.gather(1, wanted.unsqueeze(1)).squeeze(1)
    return (nats * weights).sum(), nats.detach()


def head_scores(hidden: Tensor, head: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The same for evaluation, products in float32: nats [T], and whether the best logit is the wanted one [T]."""
    logits = F.linear(hidden.float(), head.float())
    nats = torch.logsumexp(logits, -1) - logits.gather(1, wanted.unsqueeze(1)).squeeze(1)
    return nats, logits.argmax(-1) == wanted
