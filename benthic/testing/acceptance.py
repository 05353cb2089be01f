"""How much of what a drafter proposes its target takes: rounds of speculation replayed over the target's own texts.

The target writes texts as the engine does; then it reads each of them once, for the drafter's context rows and for its
own distributions p. Rounds follow one another as in speculation: the drafter proposes a block after the anchor, the
target takes the first m drafts, one more token is emitted, and that is the next anchor.

At T = 0 a draft is taken where it is the text's token. At T > 0 the rule draws a draft x from the drafter's q, takes it
with probability min(1, p(x)/q(x)), and emits max(p - q, 0) normalised instead. So a slot emits v having taken it with
probability min(p, q)(v), and having refused another draft with max(p - q, 0)(v): together p(v). A text that the target
sampled is therefore a text that speculation emits, and given its token v the draft was v, taken, with probability
min(1, q(v)/p(v)); else it was refused, of law max(q - p, 0) normalised. `replay_slot` draws just that. Text, drafts
and decisions then have the law they have in speculation, and nothing runs twice. Source: speculation specification,
sections 2 and 7.

N rounds side by side, B block length, V vocabulary, D hidden width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benthic.cache.spec import blocks_for
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.llm import LLM
from benthic.kernels import kv_copy, sample
from benthic.models import deepseek_v41_dspark
from benthic.models.deepseek_v41 import DeepseekV41
from benthic.models.deepseek_v41_config import TextConfig
from benthic.models.deepseek_v41_dspark import Choose, Draft
from benthic.models.weights import Checkpoint
from benthic.types import NUMERICS, Chunk, Numerics, SamplingParams, StepPlan

READ_ROWS = 2048  # most rows of one step of reading
BINS = 20  # of the calibration error, equally wide

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""How many are done, of how many."""


def silent(done: int, total: int) -> None:
    """No progress shown."""


class Drafter(Protocol):
    """What is measured; `DSpark` is one."""

    def observe(
        self, rings: list[kv_copy.Ring], taps: tuple[Tensor, ...], slots: Tensor, positions: Tensor
    ) -> None: ...

    def draft(
        self,
        backbone: DeepseekV41,
        rings: list[kv_copy.Ring],
        slots: Tensor,
        anchors: Tensor,
        last: Tensor,
        choose: Choose,
        block: int | None = None,
    ) -> Draft: ...


class Text(NamedTuple):
    """A prompt and what the target wrote to it."""

    ids: tuple[int, ...]  # prompt, then completion
    prompt_tokens: int
    ended: bool  # by the end-of-sequence id, which is the last id then

    @property
    def written(self) -> tuple[int, ...]:
        return self.ids[self.prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Rounds:
    """R rounds over some texts. The first token of a text comes from its prompt, without drafts."""

    text: Integers  # [R] which text
    submitted: Integers  # [R] drafts that the target checks, 0 to B: fewer than B at the end of a text
    accepted: Integers  # [R] of these, from the first on
    emitted: Integers  # [R] tokens: the accepted ones and one more, unless the text ends before
    confidence: Floats  # [R, B] before temperature and sigmoid
    analytic: Floats  # [R, B] sum of min(p, q) where the drafts before were accepted, else NaN; NaN at T = 0

    def of(self, texts: Sequence[int]) -> "Rounds":
        """The rounds of these texts."""
        kept = np.isin(self.text, np.asarray(texts, dtype=np.int64))
        return Rounds(*(getattr(self, name)[kept] for name in self.__slots__))


# ---- one slot --------------------------------------------------------------------------------------------------------


def replay_slot(
    p: Tensor, q: Tensor, wanted: Tensor, alive: Tensor, accept_bits: Tensor, draw_bits: Tensor
) -> tuple[Tensor, Tensor]:
    """The draft of a slot and whether it is taken, given the token that the text has there.

    p, q         [N, V] f32, the target's and the drafter's distributions after all transforms.
    wanted       [N] int64 the text's token; alive [N] bool: the drafts before are the text's, so p is the target's.
    accept_bits, draw_bits   [N] int64 in [0, 2**53), independent.
    returns      drafts [N] int64; accepted [N] bool. Where not alive: a draw from q, not accepted.
    """
    at = wanted[:, None]
    chance = (q.gather(1, at) / p.gather(1, at).clamp(min=1e-30))[:, 0].double()
    accepted = alive & (accept_bits.double() * 2.0**-53 < chance)
    refused = (q - p).clamp(min=0)
    empty = refused.amax(1, keepdim=True) <= 0  # p = q but for rounding
    weights = torch.where(alive[:, None] & ~empty, refused, q).double()
    weights = (weights / weights.amax(1, keepdim=True) * 2.0**40).to(torch.int64)
    return torch.where(accepted, wanted, sample.draw(weights, draw_bits)), accepted


# ---- texts -----------------------------------------------------------------------------------------------------------


def write(
    llm: LLM, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int, seed: int, progress: Progress
) -> list[Text]:
    """One completion a prompt, seeds from `seed` on; progress counts them. Raises the error of the first to fail."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + i) for i in range(len(prompts))
    ]
    texts: list[Text | None] = [None] * len(prompts)
    done = 0
    for piece in llm.generate([list(prompt) for prompt in prompts], params, stream=True):
        if piece.completion is None:
            continue
        completion = piece.completion
        if completion.error is not None:
            raise completion.error
        ids = (*completion.prompt_token_ids, *completion.token_ids)
        texts[piece.prompt] = Text(ids, len(completion.prompt_token_ids), completion.finish_reason == "stop")
        done += 1
        progress(done, len(prompts))
    return cast("list[Text]", texts)


class Reading(NamedTuple):
    """What the target makes of all texts, one after another."""

    hidden: Tensor  # [sum of lengths, D]
    taps: tuple[Tensor, ...]  # likewise
    starts: Tensor  # [texts] int64 first row of each


@torch.inference_mode()
def read(model: DeepseekV41, texts: Sequence[Text], device: torch.device) -> Reading:
    """Run whole texts through the target, a few at a time."""
    found = [_read_group(model, group, device) for group in _groups(texts)]
    hidden = torch.cat([out.hidden for out in found])
    taps = tuple(torch.cat(parts) for parts in zip(*(out.taps for out in found), strict=True))
    lengths = torch.tensor([len(text.ids) for text in texts], device=device)
    return Reading(hidden, taps, lengths.cumsum(0) - lengths)


def _groups(texts: Sequence[Text]) -> Iterator[list[Text]]:
    group: list[Text] = []
    for text in texts:
        if group and sum(len(t.ids) for t in group) + len(text.ids) > READ_ROWS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def _read_group(model: DeepseekV41, group: Sequence[Text], device: torch.device) -> Any:
    sizes = [blocks_for(len(text.ids)) for text in group]
    storage = Storage(model.cache_spec, sum(sizes) + 1, len(group) + 1, device, table_blocks=max(sizes))
    chunks: list[Chunk] = []
    block = 1
    for i, (text, size) in enumerate(zip(group, sizes, strict=True)):
        blocks = tuple(range(block, block + size))
        chunks.append(Chunk(i, 0, text.ids, drafts=0, sample=False, slot=i + 1, blocks=blocks))
        block += size
    plan = StepPlan(0, tuple(chunks), ())
    batch = batches.build(plan, storage) if device.type == "cpu" else batches.Uploads(storage).step(plan).batch
    return model.forward(batch, model.memory(storage, batch), taps=True)


# ---- rounds ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def rounds(
    model: DeepseekV41,
    drafter: Drafter,
    texts: Sequence[Text],
    temperature: float,
    seed: int,
    device: torch.device,
    never: Sequence[int] = (),
    progress: Progress = silent,
) -> Rounds:
    """Replay speculation over texts that the target wrote at this temperature.

    never     ids that neither may produce.
    progress  counts tokens.
    """
    text_config, block = model.config.text, model.config.text.dspark_block_size
    at = {i: text.prompt_tokens for i, text in enumerate(texts) if len(text.ids) > text.prompt_tokens + 1}  # anchors
    if not at:
        none, empty = np.zeros(0, dtype=np.int64), np.zeros((0, block), dtype=np.float32)
        return Rounds(none, none, none, none, empty, empty)
    reading, longest = read(model, texts, device), max(len(text.ids) for text in texts)
    rings = context_rings(text_config, model.numerics, len(texts), longest, device)
    for i, text in enumerate(texts):
        begin, positions = int(reading.starts[i]), torch.arange(len(text.ids), device=device)
        own = tuple(tap[begin : begin + len(text.ids)] for tap in reading.taps)
        drafter.observe(rings, own, torch.full_like(positions, i + 1), positions)
    mask = torch.zeros(model.vocab_size, device=device)
    mask[torch.tensor(sorted(set(never)), dtype=torch.int64, device=device)] = -torch.inf
    ids = torch.cat([torch.tensor(text.ids, device=device) for text in texts])
    replay = _Replay(model, drafter, reading, rings, ids, mask, temperature, seed)
    parts: list[tuple[NDArray[Any], ...]] = []
    done, total = 0, sum(len(texts[i].ids) - 1 - first for i, first in at.items())
    while at:
        which = list(at)
        left = [len(texts[i].ids) - 1 - at[i] for i in which]  # tokens still to come
        cut = [0 if texts[i].ended else 1 for i in which]  # by a limit: the last token comes without a draft
        submitted = [min(block, n - e) for n, e in zip(left, cut, strict=True)]
        found = replay.round(which, [at[i] for i in which], submitted)
        emitted = [min(m + 1, n) for m, n in zip(found.accepted, left, strict=True)]
        columns = (np.array(column, dtype=np.int64) for column in (which, submitted, found.accepted, emitted))
        parts.append((*columns, found.confidence, found.analytic))
        for i, count in zip(which, emitted, strict=True):
            at[i] += count
            if at[i] >= len(texts[i].ids) - 1:
                del at[i]
        done += sum(emitted)
        progress(done, total)
    return Rounds(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def context_rings(
    text: TextConfig, numerics: Numerics, texts: int, longest: int, device: torch.device
) -> list[kv_copy.Ring]:
    """One a stage, for texts in slots 1, 2, ..., so long that nothing is overwritten. Slot 0 is for padding."""
    form = "fp8" if numerics.quantise else "f32"
    width = kv_copy.data_bytes(text.head_dim, form) + kv_copy.scale_bytes(text.head_dim, form)
    shape = texts + 1, max(text.sliding_window, longest), width
    return [
        kv_copy.Ring(torch.zeros(shape, dtype=torch.uint8, device=device), text.head_dim, form)
        for _ in range(text.num_nextn_predict_layers)
    ]


class _Round(NamedTuple):
    accepted: list[int]
    confidence: Floats
    analytic: Floats


class _Replay:
    """One round of some texts at a time, slot by slot as the drafter asks."""

    def __init__(
        self,
        model: DeepseekV41,
        drafter: Drafter,
        reading: Reading,
        rings: list[kv_copy.Ring],
        ids: Tensor,
        mask: Tensor,
        temperature: float,
        seed: int,
    ):
        """ids [sum of lengths]; mask [V] f32 added to all logits."""
        self.model, self.drafter, self.reading, self.rings = model, drafter, reading, rings
        self.ids, self.mask, self.temperature, self.seed = ids, mask, temperature, seed
        self.block = model.config.text.dspark_block_size

    def round(self, which: Sequence[int], at: Sequence[int], submitted: Sequence[int]) -> _Round:
        """which texts, the positions of their anchors, and how many drafts are checked."""
        device = self.ids.device
        texts, positions, checked = (torch.tensor(column, device=device) for column in (which, at, submitted))
        rows = self.reading.starts[texts] + positions  # of the anchors
        slots = torch.arange(self.block, device=device)
        inside = slots < checked[:, None]  # [N, B]
        reach = rows[:, None] + torch.where(inside, slots, 0)  # the row that checks each slot
        wanted = torch.where(inside, self.ids[(reach + 1).clamp(max=len(self.ids) - 1)], 0)
        target = self._target(reach)  # [N, B, V] or None
        alive, accepted = torch.ones_like(checked, dtype=torch.bool), torch.zeros_like(checked)
        analytic = torch.full(inside.shape, torch.nan, device=device)

        def choose(logits: Tensor, i: int) -> Tensor:
            nonlocal alive, accepted
            here = alive & inside[:, i]
            if target is None:
                tokens = (logits + self.mask).argmax(-1)
                alive = here & (tokens == wanted[:, i])
            else:
                q = torch.softmax((logits + self.mask) / self.temperature, -1)
                overlap = torch.minimum(target[:, i], q).sum(-1)
                analytic[:, i] = torch.where(here, overlap, torch.nan)
                # a position may be drafted again in a later round, in another slot: the slot is part of the key
                keys = self.seed + texts, (positions + 1 + i) * self.block + i
                bits = [sample.random_bits(*keys, purpose) for purpose in (sample.ACCEPT, sample.RESIDUAL)]
                tokens, alive = replay_slot(target[:, i], q, wanted[:, i], here, *bits)
            accepted += alive
            return tokens

        draft = self.drafter.draft(self.model, self.rings, texts + 1, self.ids[rows], positions - 1, choose, self.block)
        return _Round(accepted.tolist(), draft.confidence.float().cpu().numpy(), analytic.cpu().numpy())

    def _target(self, rows: Tensor) -> Tensor | None:
        """The target's distributions [N, B, V] f32 at these rows; None at T = 0, where the text says it all."""
        if self.temperature == 0:
            return None
        logits = self.model.logits(self.reading.hidden[rows.flatten()]) + self.mask
        return torch.softmax(logits / self.temperature, -1).unflatten(0, rows.shape)


# ---- what comes out --------------------------------------------------------------------------------------------------


def acceptance(found: Rounds) -> dict[str, Any]:
    """Lengths and shares of some rounds, slot by slot.

    A slot counts where it was checked. conditional: among rounds whose drafts before it were accepted; unconditional:
    of all rounds that checked it; analytic: the mean of sum of min(p, q) in place of the decision, where conditional.
    """
    slots: list[dict[str, Any]] = []
    for k in range(found.confidence.shape[1]):
        checked = found.submitted > k
        reached, passed = checked & (found.accepted >= k), checked & (found.accepted > k)
        overlap = found.analytic[reached, k]
        slots.append(
            {
                "slot": k + 1,
                "checked": int(checked.sum()),
                "conditional": _share(passed, reached),
                "unconditional": _share(passed, checked),
                "analytic": float(overlap.mean()) if len(overlap) and not np.isnan(overlap).any() else None,
            }
        )
    return {
        "rounds": len(found.text),
        "tokens": int(found.emitted.sum()),
        "acceptance_length": float(found.emitted.mean()) if len(found.text) else None,
        "accepted_of_checked": float(found.accepted.sum() / max(found.submitted.sum(), 1)),
        "slots": slots,
    }


def _share(some: NDArray[np.bool_], of: NDArray[np.bool_]) -> float | None:
    return float(some.sum() / of.sum()) if of.any() else None


def survival(found: Rounds, temperatures: Sequence[float]) -> Floats:
    """[R, n] the chance, as the confidence has it, that all drafts up to each of the first n slots are accepted."""
    logits = np.clip(found.confidence[:, : len(temperatures)] / np.asarray(temperatures, dtype=np.float32), -60, 60)
    return np.cumprod(1 / (1 + np.exp(-logits)), axis=1)


def calibration(found: Rounds, temperatures: Sequence[float]) -> list[dict[str, Any]]:
    """How well the survival of each slot is known: expected calibration error, Brier score, area under the curve."""
    chance = survival(found, temperatures)
    out: list[dict[str, Any]] = []
    for k in range(chance.shape[1]):
        checked = found.submitted > k
        forecast, happened = chance[checked, k], found.accepted[checked] > k
        out.append(
            {
                "slot": k + 1,
                "ece": expected_error(forecast, happened),
                "brier": float(np.square(forecast - happened).mean()) if len(forecast) else None,
                "auroc": area(forecast, happened),
            }
        )
    return out


def expected_error(forecast: Floats, happened: NDArray[np.bool_]) -> float | None:
    """Expected calibration error: mean distance of forecast and frequency, over equally wide bins of the forecast."""
    if not len(forecast):
        return None
    places = np.minimum((forecast * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(places, forecast - happened, BINS)
    return float(np.abs(gaps).sum() / len(forecast))


def area(forecast: Floats, happened: NDArray[np.bool_]) -> float | None:
    """Chance that a round where it happened has the higher forecast; ties count half. None: all rounds are alike."""
    good, bad = int(happened.sum()), int((~happened).sum())
    if not good or not bad:
        return None
    _, place, count = np.unique(forecast, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    return float((ranks[happened].sum() - good * (good + 1) / 2) / (good * bad))


# ---- all of it -------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    texts: list[Text]
    rounds: Rounds


def measure(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
    seed: int,
    *,
    drafter: Drafter | None = None,
    written: Progress = silent,
    replayed: Progress = silent,
) -> Measured:
    """Let the engine write, then replay. drafter: the checkpoint's own when None.

    written, replayed   count texts that are written, and tokens that are replayed.
    Raises              BadConfigKey when the checkpoint has no drafter; the errors of requests.
    """
    drafter = own_drafter(llm) if drafter is None else drafter
    texts = write(llm, prompts, temperature, max_tokens, seed, written)
    never = () if llm.tokenizer is None else llm.tokenizer.control_ids
    model = cast("DeepseekV41", llm.model)
    return Measured(texts, rounds(model, drafter, texts, temperature, seed, llm.device, never, replayed))


def own_drafter(llm: LLM) -> deepseek_v41_dspark.DSpark:
    """The drafter in the engine's checkpoint, on its device."""
    return deepseek_v41_dspark.from_checkpoint(Checkpoint.open(llm.path), NUMERICS[llm.config.numerics], llm.device)
