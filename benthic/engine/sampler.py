"""Logits and SamplingParams -> tokens and log-probabilities. The arithmetic is `kernels/sample.py`.

Rows that ask for nothing special share one arg-max; the rest pay for what they use.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benthic.engine.batch import Draws
from benthic.errors import BenthicError, NoAllowedToken, NonFiniteLogits
from benthic.kernels import sample
from benthic.types import Draw, SamplingParams, TokenLogprobs

_RECIPES = 1024  # prepared parameter sets that are kept
_NEVER = float("-inf")


class _Recipe(NamedTuple):
    """A parameter set, prepared once for all its tokens."""

    params: SamplingParams  # kept alive, so that its id() names it
    greedy: bool
    narrow: bool  # top-k or top-p
    edited: bool  # bias or masks
    plain: bool  # neither, and no log-probabilities
    bias_ids: Tensor
    bias_values: Tensor
    banned: Tensor
    allowed: Tensor | None  # [V] f32, 0 for allowed ids and -inf for the rest


class Sampled(NamedTuple):
    """One entry for each row: R tokens; what failed, and what was asked about log-probabilities, by row."""

    tokens: list[int]
    failures: dict[int, BenthicError]
    logprobs: dict[int, TokenLogprobs]
    digests: dict[int, bytes]  # of the row's logits, where a receipt is asked for


class Sampler:
    """Draws tokens. Holds no state that a token depends on."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", never: Sequence[int] = ()):
        """never: ids that no request may produce, such as control tokens that only a prompt may hold."""
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self._never: Tensor | None = None  # [V] added to all logits: -inf for these ids, 0 for the rest
        if never:
            self._never = torch.zeros(vocab_size, device=device)
            self._never[torch.tensor(sorted(set(never)), device=device)] = _NEVER
        self._recipes: dict[int, _Recipe] = {}
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def __call__(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], requests: Sequence[int] | None = None
    ) -> Sampled:
        """logits [R, V] f32, left as they are; R draws; the absolute positions of the tokens that are drawn; the
        requests they belong to, for error texts."""
        if not draws:
            return Sampled([], {}, {}, {})
        recipes = [self._recipe(d.params) for d in draws]
        # masks are added, not written: a NaN under a mask stays one, and its request fails
        work = logits if self._never is None else logits + self._never
        work = self._edit(work, draws, recipes)
        peaks, best = work.max(dim=1)  # the first of equal ones; a NaN wins
        drawn = [i for i, r in enumerate(recipes) if not r.greedy]
        if drawn:
            keys = [(draws[i].seed, positions[i]) for i in drawn]
            best = self._draw(work, peaks, best, [draws[i].params for i in drawn], keys, drawn, recipes)
        tokens: list[int] = best.tolist()
        failures: dict[int, BenthicError] = {}
        for i, peak in enumerate(peaks.tolist()):
            if not _NEVER < peak < float("inf"):
                failures[i] = self._failure(peak, draws[i], positions[i], requests[i] if requests is not None else i)
        wanted = [i for i, d in enumerate(draws) if d.params.logprobs is not None and i not in failures]
        logprobs: dict[int, TokenLogprobs] = {}
        if wanted:
            k = max(draws[i].params.logprobs or 0 for i in wanted)
            found = _rank(logits[torch.tensor(wanted, device=logits.device)], [tokens[i] for i in wanted], k)
            for i, entry in zip(wanted, found, strict=True):
                logprobs[i] = entry._replace(top=entry.top[: draws[i].params.logprobs])
        digests = {i: _digest(logits[i]) for i, d in enumerate(draws) if d.params.receipt}
        return Sampled(tokens, failures, logprobs, digests)

    def special(self, draws: Sequence[Draw]) -> list[int]:
        """Draws that `draw_rows` does not serve: penalties, a bias, masks of their own, log-probabilities, receipts."""
        known = self._recipes
        return [
            i
            for i, draw in enumerate(draws)
            if draw.context is not None
            or draw.blocked
            or not (known.get(id(draw.params)) or self._recipe(draw.params)).plain
        ]

    def draw_rows(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Tokens [R] int64 and peaks [R] f32, on the device alone; what makes a draw special is left out.

        logits  [R, V] f32.
        """
        filters = draws.top_k, draws.top_p, draws.min_p
        return sample.sample_rows(logits, draws.seeds, draws.positions, draws.temperature, *filters, mask=self._never)

    def finish_rows(
        self,
        tokens: list[int],
        peaks: np.ndarray,
        logits: Tensor,
        rows: Sequence[int],
        draws: Sequence[Draw],
        positions: Sequence[int],
        requests: Sequence[int],
        special: Sequence[int],
    ) -> Sampled:
        """What `draw_rows` decided, back on the host; special draws are decided here.

        tokens, peaks   of R or more rows, one of them for each draw: number rows[i] for draw i.
        special         as the method of this name found them; logits [len(special), V] f32 are theirs.
        """
        tokens = [tokens[row] for row in rows]
        failures: dict[int, BenthicError] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        digests: dict[int, bytes] = {}
        for i in np.flatnonzero(~np.isfinite(peaks[list(rows)])).tolist():
            failures[i] = self._failure(peaks[rows[i]], draws[i], positions[i], requests[i])
        if special:
            some = [[column[i] for i in special] for column in (positions, requests)]
            again = self(logits, [draws[i] for i in special], *some)
            for j, i in enumerate(special):
                tokens[i] = again.tokens[j]
                if j in again.failures:
                    failures[i] = again.failures[j]
                if j in again.logprobs:
                    logprobs[i] = again.logprobs[j]
                if j in again.digests:
                    digests[i] = again.digests[j]
        return Sampled(tokens, failures, logprobs, digests)

    def score(self, logits: Tensor, targets: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
        """Raw log-probabilities of prompt tokens. logits [R, V] f32, R targets."""
        return tuple(_rank(logits, targets, top))

    # ---- within ------------------------------------------------------------------------------------------------------

    def _failure(self, peak: float, draw: Draw, position: int, request: int) -> BenthicError:
        limited = self._never is not None or bool(draw.blocked) or self._recipe(draw.params).edited
        failure = NoAllowedToken if peak == _NEVER and limited else NonFiniteLogits
        return failure(request, position)

    def _recipe(self, params: SamplingParams) -> _Recipe:
        found = self._recipes.get(id(params))
        if found is not None:
            return found

        def listed(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device) if values else self._none

        allowed = None
        if params.allowed_ids:
            allowed = torch.full((self.vocab_size,), _NEVER, device=self.device)
            allowed[listed(params.allowed_ids)] = 0.0
        edited = bool(params.logit_bias or params.allowed_ids or params.banned_ids)
        recipe = _Recipe(
            params=params,
            greedy=params.temperature == 0,
            narrow=0 < params.top_k < self.vocab_size or params.top_p < 1,
            edited=edited,
            plain=not edited and params.logprobs is None and not params.receipt,
            bias_ids=listed([token for token, _ in params.logit_bias]),
            bias_values=listed([bias for _, bias in params.logit_bias], torch.float32),
            banned=listed(params.banned_ids),
            allowed=allowed,
        )
        if len(self._recipes) >= _RECIPES:
            del self._recipes[next(iter(self._recipes))]
        self._recipes[id(params)] = recipe
        return recipe

    def _edit(self, logits: Tensor, draws: Sequence[Draw], recipes: Sequence[_Recipe]) -> Tensor:
        """Penalties, bias, masks. A copy when anything changes."""
        penalised = [i for i, d in enumerate(draws) if d.context is not None]
        edited = [i for i, r in enumerate(recipes) if r.edited]
        blocked = [i * self.vocab_size + token for i, d in enumerate(draws) if d.blocked for token in d.blocked]
        if not penalised and not edited and not blocked:
            return logits
        logits = logits.clone() if logits.is_contiguous() else logits.contiguous()
        if penalised:
            self._penalise(logits, draws, penalised)
        flat = logits.view(-1)
        biased = [i for i in edited if len(recipes[i].bias_ids)]
        if biased:
            at = torch.cat([recipes[i].bias_ids + i * self.vocab_size for i in biased])
            flat.index_put_((at,), torch.cat([recipes[i].bias_values for i in biased]), accumulate=True)
        masked = [i for i in edited if recipes[i].allowed is not None]
        if masked:
            rows = torch.tensor(masked, device=self.device)
            logits[rows] += torch.stack([a for i in masked if (a := recipes[i].allowed) is not None])
        banned = [recipes[i].banned + i * self.vocab_size for i in edited if len(recipes[i].banned)]
        if blocked:
            banned.append(torch.tensor(blocked, device=self.device))
        if banned:
            at = torch.cat(banned)
            flat[at] += _NEVER
        return logits

    def _penalise(self, logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
        """Change the logits of every token that stands in its row's context; several mentions write the same value."""
        counts = torch.zeros(logits.numel(), dtype=torch.float32, device=self.device)
        mentioned: list[Tensor] = []
        output: list[Tensor] = []
        lengths: list[int] = []
        for i in rows:
            context = draws[i].context
            assert context is not None
            ids = torch.frombuffer(context, dtype=torch.int32).to(self.device, torch.int64) + i * self.vocab_size
            mentioned.append(ids)
            output.append(ids[draws[i].prompt_tokens :])
            lengths.append(len(context))
        at, produced = torch.cat(mentioned), torch.cat(output)
        counts.scatter_add_(0, produced, torch.ones_like(produced, dtype=torch.float32))  # whole numbers: exact
        params = [draws[i].params for i in rows]
        table = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
        settings = torch.tensor(table, device=self.device).repeat_interleave(
            torch.tensor(lengths, device=self.device), dim=0, output_size=len(at)
        )
        flat = logits.view(-1)
        flat[at] = sample.apply_penalties(flat[at], counts[at], *settings.unbind(dim=1))

    def _draw(
        self,
        logits: Tensor,
        peaks: Tensor,
        best: Tensor,
        params: Sequence[SamplingParams],
        keys: Sequence[tuple[int, int]],
        rows: Sequence[int],
        recipes: Sequence[_Recipe],
    ) -> Tensor:
        """`best` with the rows that are drawn replaced. params, keys (seed, position): of each of them."""
        device = self.device
        bad = ~peaks.isfinite()
        if device.type != "cpu" or bool(bad.any()):  # they fail later; here they must only do no harm
            logits, peaks = logits.masked_fill(bad[:, None], 0.0), peaks.masked_fill(bad, 0.0)
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
        seeds, positions = torch.tensor(keys, dtype=torch.int64, device=device).unbind(1)
        bits = sample.random_bits(seeds, positions)

        def part(chosen: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """Logits, peaks, temperatures and bits of some of the drawn rows."""
            if len(chosen) == len(recipes):
                return logits, peaks, temperature, bits
            at, own = torch.tensor([rows[j] for j in chosen], device=device), torch.tensor(chosen, device=device)
            return logits[at], peaks[at], temperature[own], bits[own]

        few = [j for j, i in enumerate(rows) if recipes[i].narrow]
        many = [j for j, i in enumerate(rows) if not recipes[i].narrow]
        for chosen in (few, many):
            if not chosen:
                continue
            x, peak, t, point = part(chosen)
            floor = [params[j].min_p for j in chosen]
            if chosen is few:
                top_k, top_p = [params[j].top_k for j in chosen], [params[j].top_p for j in chosen]
                ids, weights = sample.narrow(x, peak, t, top_k, top_p, floor)
                tokens = ids.gather(1, sample.draw(weights, point)[:, None])[:, 0]
            else:
                weights = sample.token_weights(x, peak, t)
                weights = sample.keep_share(weights, floor) if any(floor) else weights
                tokens = sample.draw(weights, point)
            if len(chosen) == len(recipes):
                return tokens
            best = best.index_copy(0, torch.tensor([rows[j] for j in chosen], device=device), tokens)
        return best


def _digest(row: Tensor) -> bytes:
    """Of the bits of one row of logits, whatever the device."""
    return hashlib.sha256(row.cpu().contiguous().numpy().tobytes()).digest()


def _rank(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    ranked = sample.rank_logprobs(logits, torch.tensor(tokens, dtype=torch.int64, device=logits.device), k)
    columns = zip(tokens, ranked.chosen.tolist(), ranked.ids.tolist(), ranked.top.tolist(), strict=True)
    return [TokenLogprobs(token, chosen, tuple(zip(ids, top, strict=True))) for token, chosen, ids, top in columns]
