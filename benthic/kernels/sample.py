"""Logits -> token: penalties, filters and a draw that depends on (seed, position) and the row alone.

R rows, V vocabulary. The order of operations, top to bottom of this file:
1. penalties: repetition (prompt and output), then presence and frequency (output only)
2. logit bias, then masks: banned ids, ids outside the allowed ones, ids that would end the completion too early
3. temperature
4. top-k, then top-p on the distribution that top-k leaves, then min-p relative to the best token
5. the draw
Penalties and masks come first since they change what the model is taken to say; temperature before the filters, so that
top-p and min-p cut the distribution that is drawn from; top-k before top-p as most clients expect. Min-p commutes.

Probabilities become integers, 2^40 for the best token, and everything that sums them sums integers: the outcome does
not depend on the order of a reduction, so not on batch, row order or thread count. A token below 2^-40 of the best
token's probability is never drawn. Source: engine specification, sections 7.1 and 7.2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benthic.errors import ShapeError

TARGET = 0  # purposes of a random number: the token itself;
RESIDUAL = 1  # the token after a rejected draft;
ACCEPT = 2  # the test of a draft

_UNIT = float(2**40)  # weight of the best token; 2**40 * 2**23 tokens still fit into int64
_CANDIDATES = 512  # tokens sorted for top-p before the whole vocabulary is, on CPU


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """The SplitMix64 finaliser, on int64 that wraps; shifts are logical."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def random_bits(seeds: Tensor, positions: Tensor, purpose: int = TARGET) -> Tensor:
    """53 random bits for each (seed, position, purpose).

    seeds, positions  [R] int64.
    returns           [R] int64 in [0, 2**53).
    """
    x = _mix(seeds + _GOLDEN)
    x = _mix(x + (positions * 3 + (purpose + 1)) * _GOLDEN)
    return (x >> 11) & (2**53 - 1)


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Step 1.

    logits      [R, V] f32.
    seen        [R, V] bool, ids of prompt or output.
    counts      [R, V] f32, how often the output has an id.
    repetition, presence, frequency   [R] f32.
    returns     [R, V] f32.
    """
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repeated, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def token_weights(logits: Tensor, peaks: Tensor, temperature: Tensor) -> Tensor:
    """Step 3: probabilities as integers, floor(2^40 exp((logit - peak) / temperature)).

    logits       [R, V] f32, -inf where a token is not allowed.
    peaks        [R] f32, each row's largest logit, finite.
    temperature  [R] f64, > 0.
    returns      [R, V] int64; 2^40 at the peak, 0 where the logit is -inf.
    """
    x = (logits.double() - peaks.double()[:, None]) / temperature[:, None]
    return (x.exp_() * _UNIT).to(torch.int64)


def _highest(logits: Tensor, count: Tensor, most: int) -> Tensor:
    """[R, V] bool: the `count` [R] >= 1 highest logits of each row; ties: lowest id. most: the largest count."""
    threshold = logits.topk(most, dim=1).values.gather(1, (count - 1)[:, None])
    above, level = logits > threshold, logits == threshold
    room = count - above.sum(dim=1)
    return above | (level & (level.cumsum(dim=1) <= room[:, None]))


def filter_weights(
    logits: Tensor, weights: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> Tensor:
    """Step 4: zero the weights of tokens that a filter drops. The best token always stays.

    logits   [R, V] f32, the logits that `weights` come from.
    weights  [R, V] int64.
    top_k    R integers; 0, V and above: off. Ties: lowest id first.
    top_p    R numbers in (0, 1]; 1: off. Kept: tokens in order of falling probability while the sum before them is
             below top_p of what top-k leaves; the token that crosses the line stays. Ties: lowest id first.
    min_p    R numbers in [0, 1); 0: off. Kept: tokens with at least this share of the best token's probability.
    returns  [R, V] int64.
    Cost     a partial sort of each row; all of it where top_p < 1 without top_k meets a flat distribution.
    """
    rows, vocab = logits.shape
    device = logits.device
    bounds = [k if 0 < k < vocab else vocab for k in top_k]
    most = max((k for k in bounds if k < vocab), default=0)
    unbounded = [p < 1 and k == vocab for k, p in zip(bounds, top_p, strict=True)]
    if any(unbounded):
        most = max(most, min(_CANDIDATES, vocab) if device.type == "cpu" else vocab)
    keep = torch.ones_like(logits, dtype=torch.bool)
    if rows and most:
        limit = torch.tensor(bounds, device=device)
        share = torch.tensor(top_p, dtype=torch.float64, device=device)
        while True:
            cumulative = weights.gather(1, logits.topk(most, dim=1).indices).cumsum(dim=1)  # [R, most]
            total = cumulative.gather(1, (limit.clamp(max=most) - 1)[:, None])[:, 0]
            total = torch.where(limit < vocab, total, weights.sum(dim=1))
            line = share * total.double()
            # tokens before which the sum is below the line: the first one, and every one after a sum below it
            count = 1 + (cumulative[:, :-1].double() < line[:, None]).sum(dim=1)
            if most == vocab or not any(unbounded) or not bool((cumulative[:, -1].double() < line)[unbounded].any()):
                break
            most = vocab
        off = limit.eq(vocab) & share.eq(1)
        keep = _highest(logits, torch.minimum(count, limit), most) | off[:, None]
    if any(min_p):
        floor = torch.tensor(min_p, dtype=torch.float64, device=device) * _UNIT
        keep &= weights.double() >= floor[:, None]
    return torch.where(keep, weights, 0)


def draw(weights: Tensor, bits: Tensor) -> Tensor:
    """Step 5: invert the cumulative distribution at a random point.

    weights  [R, V] int64 >= 0, some of them positive in each row. A weight of 0 is never drawn.
    bits     [R] int64 in [0, 2**53), from `random_bits`.
    returns  [R] int64 token ids.
    Cost     one pass over R * V.
    """
    if weights.ndim != 2 or bits.shape != weights.shape[:1]:
        raise ShapeError("draw: weights, bits", want="[R, V], [R]", got=(tuple(weights.shape), tuple(bits.shape)))
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1]
    point = (bits.double() * 2.0**-53 * total.double()).to(torch.int64)
    point = torch.minimum(point, total - 1)
    return torch.searchsorted(cumulative, point[:, None], right=True)[:, 0].clamp(max=weights.shape[1] - 1)


class Ranked(NamedTuple):
    """Raw log-probabilities of R positions."""

    chosen: Tensor  # [R] f32
    top: Tensor  # [R, k] f32, falling
    ids: Tensor  # [R, k] int64; ties: lowest id first


def rank_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Ranked:
    """Log-softmax of the logits as they are: of each row's token, and of the k best tokens.

    logits  [R, V] f32; tokens [R] int64; k in [0, V].
    """
    logprobs = logits.float().log_softmax(dim=1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    rows = logits.shape[0]
    if not k or not rows:
        empty = logprobs.new_empty(rows, 0)
        return Ranked(chosen, empty, empty.to(torch.int64))
    ranked = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    keep = _highest(ranked, torch.full((rows,), k, device=logits.device), k)
    ids = keep.nonzero()[:, 1].view(rows, k)  # ascending in each row
    top, order = logprobs.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return Ranked(chosen, top, ids.gather(1, order))
