"""The records that travel between parts: plain data, no torch, no behaviour beyond their own checks."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, cast

from benthic.errors import BadField, BenthicError, TokenOutOfRange

PENDING = -1  # a token that is still on the device


@dataclass(frozen=True, slots=True)
class Numerics:
    """How values are rounded. Source: the model specification, sections 6.1 to 6.3.

    quantise       activations and cache entries go through the FP8/FP4 grids
    wide           activations are float32 instead of bfloat16
    quantise_wo_a  the grouped output projection also reads FP8 activations
    round_probs    unnormalised attention probabilities are rounded to bfloat16 before the value product
    round_hidden   an expert's activated product is rounded to bfloat16 before it goes onto the FP8 grid
    round_scores   index scores are rounded to bfloat16 after the dot, after the weight and after the head sum
    one_scale      products of FP8 activations carry one power-of-two scale a token and one a weight row: values far
                   below a row's largest lose bits (`kernels/quant.py`, `carry`)
    """

    name: str
    quantise: bool
    wide: bool
    quantise_wo_a: bool
    round_probs: bool
    round_hidden: bool
    round_scores: bool
    one_scale: bool


#                                    quantise wide   wo_a   probs  hidden scores one scale
NUMERICS = {
    "reference": Numerics("reference", True, False, False, True, True, True, False),
    "production": Numerics("production", True, False, True, False, False, False, False),
    "fast": Numerics("fast", True, False, True, False, False, False, True),
    "float": Numerics("float", False, True, False, False, False, False, False),
}


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence id, stop id or stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the caller asked


class Miss(StrEnum):
    """Why the cached prefix of a prompt ends where it does."""

    NEVER_SEEN = "never_seen"  # the block was not computed here, or so long ago that this is forgotten
    EVICTED = "evicted"  # it was there and had to make room
    EXPIRED = "expired"  # it was there and its time to live is over
    OTHER_NAMESPACE = "other_namespace"  # the same tokens are cached for another tenant, model, or kind of exactness
    IN_FLIGHT = "in_flight"  # another request computes it now
    TOO_SHORT = "too_short"  # what is cached is not longer than what has to be computed again
    DISABLED = "disabled"  # the request or the configuration does without


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Ranges are checked by `validate()`, which every entry point calls.

    The order in which the settings act is that of `kernels/sample.py`: penalties, bias, allowed and banned ids,
    temperature, top_k, top_p, min_p. Log-probabilities are raw: taken before all of them.
    """

    temperature: float = 1.0  # [0, 100]; 0: greedy, the arg-max with the lowest index
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1): keep tokens with at least this share of the best token's probability
    repetition_penalty: float = 1.0  # (0, 10]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), [-100, 100]
    allowed_ids: tuple[int, ...] = ()  # only these may be produced; empty: no restriction
    banned_ids: tuple[int, ...] = ()  # never produced
    stop: tuple[str, ...] = ()  # up to 16 strings that end the completion; never part of the text
    stop_ids: tuple[int, ...] = ()  # token ids that end it, beside the model's end-of-sequence id
    ignore_eos: bool = False
    min_tokens: int = 0  # no end before so many tokens, [0, max_tokens]
    max_tokens: int = 256  # >= 1
    n: int = 1  # completions for one prompt, [1, 128]
    seed: int | None = None  # [0, 2**63); None: drawn once when the request is made
    logprobs: int | None = None  # top-k raw log-probabilities of each output token; 0: the token's own; None: off
    prompt_logprobs: int | None = None  # the same for the prompt
    receipt: bool = False  # the answer brings a receipt, see `engine/receipt.py`

    def validate(self, vocab_size: int | None = None) -> None:
        """Check every range. vocab_size: ids must lie below it; None: not known here, ids need only be >= 0.

        Raises BadField, TokenOutOfRange: the field, its value and the range.
        """
        _number("temperature", self.temperature, "a number in [0, 100]", 0, 100)
        _number("top_p", self.top_p, "a number in (0, 1]", 0, 1, open_low=True)
        _number("min_p", self.min_p, "a number in [0, 1)", 0, 1, open_high=True)
        _number("repetition_penalty", self.repetition_penalty, "a number in (0, 10]", 0, 10, open_low=True)
        _number("presence_penalty", self.presence_penalty, "a number in [-2, 2]", -2, 2)
        _number("frequency_penalty", self.frequency_penalty, "a number in [-2, 2]", -2, 2)
        _integer("top_k", self.top_k, 0, _INT32_MAX)
        _integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("n", self.n, 1, 128)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _integer(name, count, 0, MAX_LOGPROBS if vocab_size is None else min(MAX_LOGPROBS, vocab_size))
        _flag("ignore_eos", self.ignore_eos)
        _flag("receipt", self.receipt)
        _stop_strings(self.stop)
        _token_ids("allowed_ids", self.allowed_ids, vocab_size)
        _token_ids("banned_ids", self.banned_ids, vocab_size)
        _token_ids("stop_ids", self.stop_ids, vocab_size)
        _biases(self.logit_bias, vocab_size)


MAX_LOGPROBS = 1000  # most alternatives listed beside one token
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
_INT32_MAX = 2**31 - 1


def _number(
    field: str, value: object, want: str, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadField(field, value, want)
    if value < low or value > high or (open_low and value == low) or (open_high and value == high):
        raise BadField(field, value, want)


def _integer(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadField(field, value, f"an integer in [{low}, {high}]")


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadField(field, value, "true or false")


def _sequence(field: str, value: object, want: str) -> Sequence[object]:
    if not isinstance(value, tuple | list):
        raise BadField(field, value, want)
    return cast(Sequence[object], value)


def _stop_strings(value: object) -> None:
    stops = _sequence("stop", value, "a tuple of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise BadField("stop", stops, f"at most {MAX_STOP_STRINGS} strings, not {len(stops)}")
    for i, text in enumerate(stops):
        if not isinstance(text, str) or not 0 < len(text.encode(errors="replace")) <= MAX_STOP_BYTES:
            raise BadField(f"stop[{i}]", text, f"a string of 1 to {MAX_STOP_BYTES} bytes")


def _token_id(field: str, token: object, vocab_size: int | None) -> None:
    if isinstance(token, bool) or not isinstance(token, int):
        raise BadField(field, token, "an integer token id")
    limit = _INT32_MAX if vocab_size is None else vocab_size
    if not 0 <= token < limit:
        raise TokenOutOfRange(field, token, limit)


def _token_ids(field: str, value: object, vocab_size: int | None) -> None:
    for i, token in enumerate(_sequence(field, value, "a tuple of token ids")):
        _token_id(f"{field}[{i}]", token, vocab_size)


def _biases(value: object, vocab_size: int | None) -> None:
    want = "a tuple of pairs (token id, bias)"
    for i, entry in enumerate(_sequence("logit_bias", value, want)):
        pair = _sequence(f"logit_bias[{i}]", entry, "a pair (token id, bias)")
        if len(pair) != 2:
            raise BadField(f"logit_bias[{i}]", entry, "a pair (token id, bias)")
        _token_id(f"logit_bias[{i}]", pair[0], vocab_size)
        _number(f"logit_bias[{i}]", pair[1], "a bias in [-100, 100]", -100, 100)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a prompt: where its span stands, and what the model's vision tower reads of it."""

    first: int  # position of the span's first token
    tokens: int  # of the span, delimiters included; the prompt has the model's image token at each of them
    digest: str  # SHA-256 of the encoded image and of how it is scaled: the same digest, the same rows
    patches: object = field(default=None, repr=False, compare=False)  # made by the model family, opaque to the engine


MODES = ("snapshot", "exact", "replay")  # how a sequence goes on behind a cached prefix, see `cache.mode`
TRUNCATIONS = ("halo", "off", "compact", "mask")  # what some layers skip of a prompt, see `cache.truncation`


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What a request does with cached prefixes."""

    read: bool = True  # begin with what is cached
    write: bool = True  # leave blocks for others
    salt: str = ""  # whoever uses the same one shares a cache, and nobody else does
    mode: str | None = None  # what is computed again behind a hit; None: the configuration's
    truncation: str | None = None  # what prompts do not compute; None: the configuration's


CACHED = CacheOptions()  # what a request does that says nothing


@dataclass(slots=True)
class Request:
    """One unit of work for the engine: a prompt, how to sample, and where it stands in the queue.

    `params.n` completions are its branches 0 .. n-1. Each branch ends exactly once, with a finish reason or an error.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int  # of branch 0; the others derive theirs from it
    priority: int = 0  # smaller runs first; equal: first come, first served
    arrival_seconds: float = 0.0
    images: tuple[ImageInput, ...] = ()  # in the order of their spans
    cache: CacheOptions = CACHED
    tenant: str = ""  # who shares the engine fairly with others, see `engine/queue.py`
    deadline: float | None = None  # seconds on the loop's clock; it is refused if it has not begun by then

    @property
    def image_tokens(self) -> int:
        """Prompt tokens that stand for images."""
        return sum(image.tokens for image in self.images)


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or one branch of it, before its time. Unknown and finished ones are ignored."""

    request: int
    branch: int | None = None  # None: all of them
    reason: FinishReason = FinishReason.ABORT  # STOP: a stop string was found in the text


class Chunk(NamedTuple):
    """One request's tokens in one step. Prefill: many known. Decode: one. Verification: one and its drafts.

    A named tuple: one is made for every token produced.
    """

    request: int  # request id
    start: int  # position of the first token, counted from 0
    tokens: tuple[int, ...]  # known tokens, then drafts; PENDING for one that is still on the device
    drafts: int  # how many at the end are unverified drafts
    sample: bool  # does the last row yield a token, or is this a middle chunk of a prompt
    slot: int  # state slot: window rings, compressor carry, token history
    blocks: tuple[int, ...]  # block table: block i holds positions 128 i .. 128 i + 127
    branch: int = 0  # which completion of the request
    # of a sequence that began with a cached prefix, and of prompts whose beginning some layers skip
    low: int = 0  # no window row is there below this position
    stored: int = 0  # the blocks hold what belongs to positions below this one; it is not written again
    cuts: tuple[tuple[int, int], ...] = ()  # (layer, position), rising: from this layer on, positions from this one on
    masked: bool = False  # of a cut: they compute all, and see no window rows below it
    before: tuple[int, ...] | None = (
        None  # ids before `start`, newest last, for a slot that was not there; None: it was
    )

    @property
    def end(self) -> int:
        """Position behind the last token: of the one that `sample` draws."""
        return self.start + len(self.tokens)


class Draw(NamedTuple):
    """How a branch's rows of logits become tokens, wherever they stand: many draws of a branch are the same object."""

    params: SamplingParams
    seed: int  # of this branch
    blocked: tuple[int, ...]  # ids that would end the completion before `min_tokens`
    context: "array[int] | None"  # prompt and output so far, array("I"), when a penalty is on
    prompt_tokens: int  # how many of `context` are the prompt


class Score(NamedTuple):
    """Log-probabilities wanted of prompt tokens: row `first + i` of the chunk predicts `targets[i]`."""

    first: int
    targets: tuple[int, ...]
    top: int  # alternatives listed beside each


class SlotCopy(NamedTuple):
    """All state of one slot goes to another one, and a block that is not complete yet to another block."""

    source: int
    target: int
    blocks: tuple[int, int] | None = None  # source and target


class StepPlan(NamedTuple):
    """One step: what every rank computes. Copies are made before it, saves after it."""

    step: int
    chunks: tuple[Chunk, ...]
    draws: tuple[Draw, ...]  # one for each chunk with `sample`, in the order of the chunks
    scores: tuple[tuple[int, Score], ...] = ()  # (index of the chunk, what to score)
    over: tuple[int, ...] = ()  # requests whose image rows no step needs any more; let go of before anything else
    # (request, its images to come) whose rows are made now
    images: tuple[tuple[int, tuple[ImageInput, ...]], ...] = ()
    copies: tuple[SlotCopy, ...] = ()
    saves: tuple[SlotCopy, ...] = ()

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return sum([len(chunk.tokens) for chunk in self.chunks])

    @property
    def drawn(self) -> Sequence[Chunk]:
        """The chunk of each draw."""
        chunks = self.chunks
        return chunks if len(self.draws) == len(chunks) else [chunk for chunk in chunks if chunk.sample]


class TokenLogprobs(NamedTuple):
    """Raw log-probabilities at one position: log-softmax of the logits as the model gives them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), best first; ties: lowest id first


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step decided. `tokens`, `failures` and `logprobs` have one entry for each of the plan's draws."""

    tokens: list[int]
    failures: dict[int, BenthicError] = field(
        default_factory=dict[int, BenthicError]
    )  # index of the draw -> why it yields no token
    logprobs: dict[int, TokenLogprobs] = field(
        default_factory=dict[int, TokenLogprobs]
    )  # index of the draw -> what was asked for
    scores: dict[int, tuple[TokenLogprobs, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprobs, ...]]
    )  # index of the chunk -> prompt rows
    digests: dict[int, bytes] = field(default_factory=dict[int, bytes])  # index of the draw -> of the logits
    device_seconds: float = 0.0  # for which the device was busy with it, and with earlier ones that decided nothing


class Usage(NamedTuple):
    """Tokens counted for one branch. Every produced token counts, the one that ended it too."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the cache; those computed again for their windows count too
    miss: Miss | None = None  # why not more of it was found; None: all that could be was


class TokenEvent(NamedTuple):
    """News of one branch: tokens it gained in a step, and how it ended. Exactly one event of a branch has `usage`."""

    request: int
    branch: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens 1, 2, ... as far as they are new
    finish: FinishReason | None = None
    error: BenthicError | None = None
    usage: Usage | None = None  # set on the last event of the branch
    digests: tuple[bytes, ...] = ()  # of the logits that `tokens` were drawn from, when a receipt is asked for
