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
from benthic.kernels import backends

TARGET = 0  # purposes of a random number: the token itself;
RESIDUAL = 1  # the token after a rejected draft;
ACCEPT = 2  # the test of a draft

_UNIT = float(2**40)  # weight of the best token; 2**40 * 2**23 tokens still fit into int64
_CANDIDATES = 64  # tokens sorted for top-p before more are
_LOWEST = float("-inf")
_NEVER_REACHED = 2.0**62  # above any sum of weights


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


def apply_penalties(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Step 1, for tokens that stand in prompt or output; the others keep their logits.

    logits      [N] f32, of N such tokens, of any rows.
    counts      [N] f32, how often each stands in its row's output.
    repetition, presence, frequency   [N] f32, of its row.
    returns     [N] f32.
    """
    logits = logits.clamp(min=0) / repetition + logits.clamp(max=0) * repetition
    return logits - frequency * counts - presence * (counts > 0)


def token_weights(logits: Tensor, peaks: Tensor, temperature: Tensor) -> Tensor:
    """Step 3: probabilities as integers, floor(2^40 exp((logit - peak) / temperature)).

    logits       [R, V] f32, -inf where a token is not allowed.
    peaks        [R] f32, each row's largest logit, finite.
    temperature  [R] f64, > 0.
    returns      [R, V] int64; 2^40 at the peak, 0 where the logit is -inf.
    """
    x = logits.double()  # a copy, changed in place from here on
    return x.sub_(peaks[:, None]).div_(temperature[:, None]).exp_().mul_(_UNIT).to(torch.int64)


def keep_share(weights: Tensor, min_p: Sequence[float]) -> Tensor:
    """Step 4 for rows with min-p alone: zero the weights below this share of the best token's.

    weights [R, V] int64; min_p: R numbers in [0, 1), 0: off. returns [R, V] int64.
    """
    floor = (torch.tensor(min_p, dtype=torch.float64, device=weights.device) * _UNIT).ceil().to(torch.int64)
    return weights.masked_fill(weights < floor[:, None], 0)


class Narrow(NamedTuple):
    """What the filters leave of R rows, in the form of m candidates each."""

    ids: Tensor  # [R, m] int64, ascending
    weights: Tensor  # [R, m] int64; 0: dropped after all


def narrow(
    logits: Tensor,
    peaks: Tensor,
    temperature: Tensor,
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> Narrow:
    """Steps 3 and 4 for rows with top-k or top-p: few candidates instead of the whole vocabulary.

    logits, peaks, temperature   as in `token_weights`; no NaN.
    top_k    R integers; 0, V and above: off. Ties: lowest id first.
    top_p    R numbers in (0, 1]; 1: off. Kept: tokens in order of falling probability while the sum before them is
             below top_p of what top-k leaves; the token that crosses the line stays. Ties: lowest id first.
    min_p    R numbers in [0, 1); 0: off.
    returns  the candidates. The best token always stays.
    Cost     a partial sort of each row. Where top_p < 1 comes without top_k, one pass over R * V, and a larger partial
             sort as long as the candidates hold too little of the distribution.
    """
    vocab, device = logits.shape[1], logits.device
    bounds = [k if 0 < k < vocab else vocab for k in top_k]
    open_rows = [p < 1 and k == vocab for k, p in zip(bounds, top_p, strict=True)]
    most = max((k for k in bounds if k < vocab), default=1)
    if any(open_rows):
        most = max(most, _CANDIDATES)
    if any(k == vocab and p == 1 for k, p in zip(bounds, top_p, strict=True)):
        most = vocab  # a row without either: everything is a candidate
    limit = torch.tensor(bounds, dtype=torch.int64, device=device)
    share = torch.tensor(top_p, dtype=torch.float64, device=device)
    every = token_weights(logits, peaks, temperature) if any(open_rows) else None
    whole = every.sum(dim=1) if every is not None else None
    most = min(most, vocab)
    enlarged = False
    while True:
        values, ids = _best(logits, most)  # [R, m] falling
        weights = token_weights(values, peaks, temperature)
        most = weights.shape[1]
        cumulative = weights.cumsum(dim=1)
        total = cumulative.gather(1, (limit.clamp(max=most) - 1)[:, None])[:, 0]
        total = total if whole is None else torch.where(limit < vocab, total, whole)
        line = torch.where(share < 1, share * total.double(), _NEVER_REACHED).ceil().to(torch.int64)
        if most == vocab or every is None or whole is None:
            break
        short = (cumulative[:, -1] < line)[open_rows]
        if not bool(short.any()):
            break
        # tokens below an even share of what top-p leaves out are left out, all of them
        even = ((1 - share) * whole.double() / vocab).to(torch.int64)
        above = (every >= even[:, None]).sum(dim=1)[open_rows][short]
        most = vocab if enlarged else max(most, int(above.max()))
        enlarged = True
    # the first token stays, and every one after a sum below the line
    count = 1 + (cumulative[:, :-1] < line[:, None]).sum(dim=1)
    count = torch.minimum(count, limit)
    edge = values.gather(1, (count - 1)[:, None])
    room = count - (values > edge).sum(dim=1)
    ids, order = ids.sort(dim=1)
    values, weights = values.gather(1, order), weights.gather(1, order)
    level = values == edge
    keep = (values > edge) | (level & (level.cumsum(dim=1) <= room[:, None]))
    weights = weights.masked_fill(~keep, 0)
    return Narrow(ids, keep_share(weights, min_p) if any(min_p) else weights)


def _best(logits: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Values and ids, [R, m] each, of the m highest logits, falling; ties at the edge: lowest ids. No NaN."""
    rows, vocab = logits.shape
    if m == vocab or logits.device.type != "cpu":
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values[:, :m], ids[:, :m]
    values, ids = logits.topk(m, dim=1)
    if rows and bool(((logits >= values[:, -1:]).sum(dim=1) > m).any()):
        edge = values[:, -1:]
        level = logits == edge
        room = m - (values > edge).sum(dim=1, keepdim=True)
        ids = ((logits > edge) | (level & (level.cumsum(dim=1) <= room))).nonzero()[:, 1].view(rows, m)
        values, order = logits.gather(1, ids).sort(dim=1, descending=True)
        ids = ids.gather(1, order)
    return values, ids


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


# ---- all at once, on a device ----------------------------------------------------------------------------------------


def sample_rows_reference(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    vocab = logits.shape[1]
    logits = logits if mask is None else logits + mask
    peaks, best = logits.max(dim=1)
    bad, greedy = ~peaks.isfinite(), temperature == 0
    logits = logits.masked_fill(bad[:, None], 0.0)
    weights = token_weights(logits, peaks.masked_fill(bad, 0.0), temperature.masked_fill(greedy, 1.0))
    order = logits.sort(dim=1, descending=True, stable=True).indices
    falling = weights.gather(1, order)
    before = falling.cumsum(dim=1) - falling
    limit = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)[:, None]
    total = (before + falling).gather(1, limit - 1)
    share = top_p[:, None]
    line = torch.where(share < 1, share * total.double(), _NEVER_REACHED).ceil().to(torch.int64)
    rank = torch.arange(vocab, device=logits.device)
    falling = falling.masked_fill((rank >= limit) | ((rank > 0) & (before >= line)), 0)
    weights = torch.zeros_like(weights).scatter_(1, order, falling)
    floor = (min_p * _UNIT).ceil().to(torch.int64)
    weights = weights.masked_fill(weights < floor[:, None], 0)
    drawn = draw(weights, random_bits(seeds, positions))
    return torch.where(greedy, best, drawn).masked_fill(bad, 0), peaks


def sample_rows(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Steps 3 to 5 for whole rows, each with settings of its own that stay on the device: `token_weights`, the filters
    of `narrow` and `draw`, with the same integers.

    logits       [R, V] f32, left as they are. R may be 0.
    seeds, positions   [R] int64, of `random_bits`.
    temperature  [R] f64; 0: the arg-max, the lowest id among equals, whatever the other settings say.
    top_k        [R] int64; top_p, min_p [R] f64, as in `narrow`.
    mask         [V] f32 added to every row first, 0 or -inf; None: nothing.
    returns      tokens [R] int64; peaks [R] f32, each row's largest logit under the mask, NaN or inf if one is NaN. A
                 row whose peak is not finite has token 0, which means nothing.
    Error        a weight is within 1 of `token_weights`; sums of weights are exact, so a row is the same in any batch.
    Cost         memory bound: one pass over the logits, and what the filters keep once more; a row with
                 thousands of likely tokens is read three times more. The reference sorts.
    Raises       ShapeError.
    """
    if logits.ndim != 2 or logits.shape[1] < 1 or logits.dtype != torch.float32:
        raise ShapeError("sample_rows: logits", want="[R, V] float32", got=(tuple(logits.shape), logits.dtype))
    settings = (seeds, positions, temperature, top_k, top_p, min_p)
    if any(column.shape != logits.shape[:1] for column in settings):
        got = tuple(tuple(column.shape) for column in settings)
        raise ShapeError("sample_rows: settings", want=f"[{logits.shape[0]}] each", got=got)
    if mask is not None and mask.shape != logits.shape[1:]:
        raise ShapeError("sample_rows: mask", want=f"[{logits.shape[1]}]", got=tuple(mask.shape))
    run = backends.pick("sample_rows", logits) or sample_rows_reference
    return run(logits, seeds, positions, temperature, top_k, top_p, min_p, mask)


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
    _, ids = _best(logits.nan_to_num(nan=_LOWEST, posinf=-_LOWEST, neginf=_LOWEST), k)
    ids = ids.sort(dim=1).values
    top, order = logprobs.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return Ranked(chosen, top, ids.gather(1, order))
