"""The records that travel between parts: plain data, no torch, no behaviour beyond their own checks."""

from dataclasses import dataclass
from enum import StrEnum

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
    """

    name: str
    quantise: bool
    wide: bool
    quantise_wo_a: bool
    round_probs: bool
    round_hidden: bool
    round_scores: bool


#                                    quantise wide   wo_a   probs  hidden scores
NUMERICS = {
    "reference": Numerics("reference", True, False, False, True, True, True),
    "production": Numerics("production", True, False, True, False, False, False),
    "float": Numerics("float", False, True, False, False, False, False),
}


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence id, stop id or stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the caller asked


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Ranges are checked by `validate()`, which every entry point calls."""

    temperature: float = 1.0  # 0: greedy, the arg-max with the lowest index
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1): keep tokens with at least this share of the best token's probability
    repetition_penalty: float = 1.0  # (0, 10]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), [-100, 100]
    allowed_ids: tuple[int, ...] = ()  # only these may be produced; empty: no restriction
    banned_ids: tuple[int, ...] = ()  # never produced
    stop: tuple[str, ...] = ()  # strings that end the completion; never part of the text
    stop_ids: tuple[int, ...] = ()  # token ids that end it, beside the model's end-of-sequence id
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 256  # >= 1
    n: int = 1  # completions for one prompt, [1, 128]
    seed: int | None = None  # None: drawn once when the request is made
    logprobs: int | None = None  # top-k raw log-probabilities of each output token; 0: the token's own; None: off
    prompt_logprobs: int | None = None  # the same for the prompt


@dataclass(slots=True)
class Request:
    """One unit of work for the engine: a prompt, how to sample, and where it stands in the queue."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    priority: int = 0  # smaller runs first; equal: first come, first served
    arrival_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's tokens in one step. Prefill: many known. Decode: one. Verification: one and its drafts."""

    request: int  # request id
    start: int  # position of the first token, counted from 0
    tokens: tuple[int, ...]  # known tokens, then drafts; PENDING for one that is still on the device
    drafts: int  # how many at the end are unverified drafts
    sample: bool  # does the last row yield a token, or is this a middle chunk of a prompt
    slot: int  # state slot: window rings, compressor carry, token history
    blocks: tuple[int, ...]  # block table: block i holds positions 128 i .. 128 i + 127
