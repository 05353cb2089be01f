"""What is predicted, with what weight, and how well. Source: the minnow specification, sections 3 and 5.3.

B rows of L tokens, T = B L, D hidden width, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benthic.text.tokenizer import Tokenizer


class Ids(NamedTuple):
    """The special ids that training needs."""

    bos: int
    eos: int
    pad: int
    assistant: int
    think_open: int
    think_close: int
    image: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Ids":
        return cls(*(tokenizer.special_ids[name] for name in cls._fields))


def history(ids: Tensor, n: int) -> Tensor:
    """ids [B, L] -> [B L, n] int64: column i is the id i + 1 places before in the same row, -1 before its start."""
    back = [F.pad(ids, (i, 0), value=-1)[:, : ids.shape[1]] for i in range(1, n + 1)]
    return torch.stack(back, dim=-1).flatten(0, 1)


def targets(ids: Tensor) -> Tensor:
    """ids [B, L] -> [B L] the next id of the row; 0 at its end, which has no weight."""
    return F.pad(ids[:, 1:], (0, 1)).flatten()


def response_weights(ids: Tensor, special: Ids) -> Tensor:
    """ids [B, L] -> f32 [B, L]: 1 where the next token belongs to a response, its end token included.

    A response begins behind the mode token (`<think>` or `</think>`) that follows `<｜Assistant｜>`, and ends with
    the end token; thinking and tool calls are part of it. One that was cut ends where the next document begins.
    """
    at = torch.arange(ids.shape[1], device=ids.device)
    mode = (ids == special.think_open) | (ids == special.think_close)
    opened = mode & (F.pad(ids, (1, 0), value=-1)[:, :-1] == special.assistant)
    closed = (ids == special.eos) | (ids == special.bos)
    last_opened, last_closed = (torch.where(where, at, -1).cummax(1).values for where in (opened, closed))
    inside = (last_opened > last_closed)[:, :-1] & (ids[:, 1:] != special.bos)
    return F.pad(inside, (0, 1)).float()


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
