"""What a model answers to fixed questions, through the engine: greedy text, distributions along a text, draws, drafts.

Everything here is computed twice, once where goldens are made, once where a gate looks at what is to be served, by the
same functions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benthic.cache.spec import blocks_for
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.batch import Draws
from benthic.engine.llm import LLM
from benthic.engine.sampler import Sampler
from benthic.models.deepseek_v41 import DeepseekV41
from benthic.models.deepseek_v41_config import cache_spec
from benthic.models.deepseek_v41_dspark import DSpark
from benthic.testing.layers import integers, uniform
from benthic.types import CacheOptions, Chunk, Draw, SamplingParams, StepPlan

QUESTIONS = (
    'Write a short story for a young child. Use the words "boat", "hold" and "red".',
    "Give me three tips for a good night's sleep.",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
)
COLD = CacheOptions(read=False, write=False)  # nothing that was computed before takes part
TOP = 8  # tokens whose probabilities are stored at a position
SEEN = 64  # tokens among which they are looked for


# ---- prompts ---------------------------------------------------------------------------------------------------------


def prompts(llm: LLM, seed: int) -> list[list[int]]:
    """Conversations where there is a tokenizer, else seeded ids; the last one is longer than a window and a block."""
    if llm.tokenizer is None:
        return [any_ids(llm, seed + i, count) for i, count in enumerate((9, 20, 33, 150))]
    asked = [list(llm.encoder.encode([{"role": "user", "content": text}]).ids) for text in QUESTIONS]
    return asked


def any_ids(llm: LLM, seed: int, count: int) -> list[int]:
    """Seeded ids that a text may hold: no image's."""
    image = llm.model.image_token_id
    return [id if (id := 3 + x) != image else 3 for x in integers(seed, count, llm.model.vocab_size - 3)]


class Document(NamedTuple):
    """A text whose tokens are scored."""

    ids: list[int]
    answer: tuple[int, int]  # which of them answer a question about the text; empty where there is none


# ---- greedy text -----------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A greedy completion."""

    ids: list[int]
    gaps: list[float]  # nats between the two best tokens of each position


def greedy(llm: LLM, asked: Sequence[Sequence[int]], tokens: int) -> list[Text]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    done = llm.generate([list(ids) for ids in asked], params, progress=False, cache=COLD)
    for completion in done:
        if completion.error is not None:
            raise completion.error
    return [Text(list(c.token_ids), [e.top[0][1] - e.top[1][1] for e in c.logprobs]) for c in done]


# ---- distributions ---------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Along the scored tokens of some rows, one after another."""

    nats: Tensor  # [N] f64, of the token that is there
    ids: Tensor  # [N, k] int64 likeliest tokens, best first
    logprobs: Tensor  # [N, k] f64


def score(llm: LLM, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int) -> list[Scores]:
    """Teacher-forced: of each row the tokens from `first` (at least 1) on."""
    top = min(top, llm.model.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=top)
    found: list[Scores] = []
    for first, done in zip(
        firsts, llm.generate([list(r) for r in rows], params, progress=False, cache=COLD), strict=True
    ):
        if done.error is not None:
            raise done.error
        entries = done.prompt_logprobs[first - 1 :]
        nats = torch.tensor([-entry.logprob for entry in entries], dtype=torch.float64)
        ids = torch.tensor([[id for id, _ in entry.top] for entry in entries], dtype=torch.int64)
        logprobs = torch.tensor([[p for _, p in entry.top] for entry in entries], dtype=torch.float64)
        found.append(Scores(nats, ids.reshape(len(entries), top), logprobs.reshape(len(entries), top)))
    return found


def divergence(want: Scores, got: Scores) -> Tensor:
    """[N] nats: Kullback-Leibler of `got` from `want`, over the tokens stored of `want` and all others together.

    A token that `got` does not list counts with the least probability that it lists.
    """
    same = want.ids[:, :, None] == got.ids[:, None, :]  # [N, k, K]
    floor = got.logprobs[:, -1:].expand_as(want.logprobs)
    q = torch.where(same.any(2), (same * got.logprobs[:, None, :].nan_to_num(neginf=-1e9)).sum(2), floor)
    p = want.logprobs
    rest_p, rest_q = (torch.log1p(-x.exp().sum(1).clamp(max=1 - 1e-9)) for x in (p, q))
    kl = (p.exp() * (p - q)).sum(1) + rest_p.exp() * (rest_p - rest_q)
    return kl.nan_to_num(nan=torch.inf)


def lead(want: Scores, got: Scores) -> Tensor:
    """[N] nats by which `got` prefers another token to the best of `want`; 0 where the best is the same."""
    best = want.ids[:, :1]
    there = (got.ids == best).any(1)
    own = torch.where(there, (got.logprobs.nan_to_num(neginf=-1e9) * (got.ids == best)).sum(1), got.logprobs[:, -1])
    return (got.logprobs[:, 0] - own).nan_to_num(nan=torch.inf)


@contextmanager
def jitter(model: DeepseekV41, size: float, seed: int) -> Iterator[None]:
    """Inside this block one value in sixteen that a sublayer gives is off by `size` of itself, up or down.

    What a change in the order of sums does, and somewhat more: the noise floor of everything end to end.
    """
    generator = torch.Generator().manual_seed(seed)

    def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        value = out[0] if isinstance(out, tuple) else out
        dice = torch.rand(value.shape, generator=generator)
        moved = (value * (1 + size * ((dice < 1 / 32).float() - (dice > 31 / 32).float()))).to(value.dtype)
        return (moved, *out[1:]) if isinstance(out, tuple) else moved

    handles = [part.register_forward_hook(hook) for layer in model.layers for part in (layer.attn, layer.ffn)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- draws -----------------------------------------------------------------------------------------------------------

DRAWS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=40),
    SamplingParams(temperature=1.0, min_p=0.02),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=2.0, top_k=7, top_p=0.8),
)


def draws(sampler: Sampler, seed: int) -> list[int]:
    """Tokens drawn from fixed logits by every kind of setting, at several seeds and positions.

    On a GPU by the kernel that steps use, on a CPU by the sampler's own path.
    """
    cases = [Draw(params, 1000 + 17 * i, (), None, 0) for i, params in enumerate(DRAWS) for _ in range(4)]
    positions = [5 + 31 * j for _ in DRAWS for j in range(4)]
    vocab, device = sampler.vocab_size, sampler.device
    logits = (6 * uniform(seed, len(cases), vocab)).to(device)
    if device.type != "cuda":
        return sampler(logits, cases, positions).tokens
    params = [case.params for case in cases]

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    told = Draws(
        column([0] * len(cases), torch.int64),
        column(positions, torch.int64),
        column([case.seed for case in cases], torch.int64),
        column([p.temperature for p in params], torch.float64),
        column([p.top_k for p in params], torch.int64),
        column([p.top_p for p in params], torch.float64),
        column([p.min_p for p in params], torch.float64),
    )
    return sampler.draw_rows(logits, told)[0].tolist()


# ---- drafts ----------------------------------------------------------------------------------------------------------


ANCHORS = 8  # of one text


class Drafts(NamedTuple):
    """Of N anchors along known texts."""

    tokens: Tensor  # [N, B] int64, drafted greedily
    accepted: Tensor  # [N] int64, how many of them, from the first on, are what follows
    taps: Tensor  # [N, t * D] f32, what the drafter saw at the token before


@torch.inference_mode()
def draft(model: DeepseekV41, drafter: DSpark, rows: Sequence[Sequence[int]], firsts: Sequence[int]) -> Drafts:
    """Draft at up to ANCHORS places of each row from `first` on; the target's tokens are those of the row."""
    device, text = model.classes.device, model.config.text
    block = text.dspark_block_size
    every = [max((len(row) - block - first) // ANCHORS, 1) for row, first in zip(rows, firsts, strict=True)]
    spec = cache_spec(model.config, packed=model.numerics.quantise)
    counts = [blocks_for(len(row)) for row in rows]
    storage = Storage(spec, sum(counts) + 1, len(rows) + 1, device, rollback=block)
    storage.poison()
    uploads = batches.Uploads(storage) if device.type == "cuda" else None
    tables = [tuple(range(1 + sum(counts[:i]), 1 + sum(counts[: i + 1]))) for i in range(len(rows))]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    done = [0] * len(rows)
    while True:
        chunks: list[Chunk] = []
        for i, row in enumerate(rows):
            end = firsts[i] if done[i] < firsts[i] else done[i] + every[i]
            if end + block < len(row):
                table = tables[i][: blocks_for(end)]
                chunks.append(Chunk(i, done[i], tuple(row[done[i] : end]), 0, True, i + 1, table))
                done[i] = end
        if not chunks:
            break
        settings = tuple(Draw(SamplingParams(temperature=0), 0, (), None, 0) for _ in chunks)
        plan = StepPlan(0, tuple(chunks), settings)
        step = uploads.step(plan) if uploads is not None else None
        batch = batches.build(plan, storage) if step is None else step.batch
        memory: Any = model.memory(storage, batch)
        out = model.forward(batch, memory, taps=True)
        if step is None:
            batches.remember(batch, storage)
        else:
            batches.finish(step, storage, None)
        slots = torch.tensor([c.slot for c in chunks for _ in c.tokens], device=device)
        rings = [memory.ring(plan.index) for plan in drafter.plan]
        drafter.observe(rings, out.taps, slots, batch.positions)
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        anchors = torch.tensor([rows[c.request][end] for c, end in zip(chunks, ends, strict=True)], device=device)
        made = drafter.draft(
            model,
            rings,
            torch.tensor([c.slot for c in chunks], device=device),
            anchors,
            torch.tensor(ends, device=device) - 1,
            lambda logits, _: logits.argmax(-1),
        )
        follow = torch.tensor([rows[c.request][e + 1 : e + 1 + block] for c, e in zip(chunks, ends, strict=True)])
        tokens = made.tokens.cpu()
        accepted = (tokens[:, : follow.shape[1]] == follow).int().cumprod(1).sum(1)
        taps = torch.cat([tap[batch.logit_rows] for tap in out.taps], dim=1).float().cpu()
        found.append((tokens, accepted, taps))
    return Drafts(*(torch.cat(parts) for parts in zip(*found, strict=True)))
