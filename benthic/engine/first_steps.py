"""Steps taken before there is a request: the largest that the configuration admits, so that what they need is there
from then on and an engine without room for them does not start; and a few of known shape, which tell what steps cost.
No torch.

Largest is: as many rows as the token budget at the end of the longest context, the last with prompt log-probabilities;
the same with all of them rows of images, beside as many that others have not read yet as may be kept; and a decode row
for each slot, all with that context and with every setting of a draw that takes memory.

All are handed slots 1 .. slots and the first blocks, and leave there what an ended request leaves. Decode rows share
one table: where they write does not matter here.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from benthic.engine.cost import CostModel, Shape
from benthic.types import Chunk, Draw, ImageInput, SamplingParams, Score, StepPlan

Run = Callable[[StepPlan], object]  # computes a plan and waits for it
Blank = Callable[[int], ImageInput | None]  # the largest image of so many tokens at most, or None if there is none
Clock = Callable[[], float]

_SCORED = 512  # prompt tokens whose log-probabilities are asked for; more are taken in turns
_LISTED = 20  # alternatives beside each
_FEW = 32  # rows of the step that tells how long more would take
_GREEDY = SamplingParams(temperature=0.0)
_USUAL = SamplingParams(temperature=1.0, top_p=0.9)
LARGE = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    banned_ids=(1,),
    logprobs=_LISTED,
    receipt=True,
)


class Limits(NamedTuple):
    """How large steps may be."""

    slots: int
    blocks: int  # usable ones of one sequence
    block_tokens: int
    token_budget: int
    max_context_tokens: int
    image_tokens: int = 0  # rows of images that are kept at a time

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.max_context_tokens, self.blocks * self.block_tokens)

    def chunk(self, slot: int, start: int, rows: int, sample: bool) -> Chunk:
        """Of token 0."""
        table = tuple(range(1, 1 + -(-(start + rows) // self.block_tokens)))
        return Chunk(0, start, (0,) * rows, 0, sample, slot, table, before=() if start else None)


# ---- the largest -----------------------------------------------------------------------------------------------------


def take_largest(
    run: Run,
    limits: Limits,
    limit_seconds: float = math.inf,
    clock: Clock = perf_counter,
    blank: Blank = lambda tokens: None,
) -> int:
    """Take the largest steps. Returns the rows of the largest.

    limit_seconds  for all of it: what is expected to end later is left out, or taken with fewer rows. The decode rows
                   with every setting and a step of a few rows are taken in any case, and so is one of a small image.
    blank          images of a model that reads them. Their cost grows faster than their rows; half of the time is kept
                   for them.
    """
    begun, most = clock(), min(limits.token_budget, limits.context)
    reads = blank(min(limits.image_tokens, limits.context)) is not None
    for plan in decode_steps(limits):
        at = clock()
        run(plan)
        if clock() - begun + (clock() - at) > limit_seconds:
            break

    def grow(take: Callable[[int], None], seconds: float, power: int) -> int:
        """A step of a few rows, then one of as many as will end so long after the beginning, if it takes as much longer
        as it has more rows, to that power."""
        rows = most if limit_seconds == math.inf else min(_FEW, most)
        at = clock()
        take(rows)
        if rows < most:
            left = max(begun + seconds - clock(), 0.0) / max(clock() - at, 1e-6)
            affordable = min(most, 1 << max(int(rows * left ** (1 / power)), 1).bit_length() - 1)
            if affordable > rows:
                rows = affordable
                take(rows)
        return rows

    def prompt(rows: int) -> None:
        run(prompt_step(limits, rows))

    def images(rows: int) -> None:
        plan = image_step(limits, rows, limits.image_tokens if limit_seconds == math.inf else rows, blank)
        if plan is not None:
            run(plan)
            run(StepPlan(plan.step, (), (), (), tuple([request for request, _ in plan.images])))

    rows = grow(prompt, limit_seconds / 2 if reads else limit_seconds, 1)
    if reads:
        rows = max(rows, grow(images, limit_seconds, 2))
    return max(rows, limits.slots)


def prompt_step(limits: Limits, rows: int) -> StepPlan:
    """The last rows of the longest prompt, with log-probabilities."""
    context, scored = limits.context, min(rows - 1, _SCORED)
    scores = ((0, Score(0, (0,) * scored, _LISTED)),) if scored else ()
    chunk = limits.chunk(1, context - rows, rows, True)
    return StepPlan(0, (chunk,), (Draw(_USUAL, 0, (), None, 1),), scores)


def image_step(limits: Limits, rows: int, image_rows: int, blank: Blank) -> StepPlan | None:
    """`prompt_step`, with images up to the prompt's end. It makes the rows of so many image tokens; those for which the
    prompt has no room are other requests'. None: no image is so small.

    Each request has two images, one of them many times: those that come again are not read again, but their rows are
    kept like any others.
    """
    plan, left = prompt_step(limits, rows), image_rows
    images: list[tuple[int, tuple[ImageInput, ...]]] = []
    while (image := blank(min(left, limits.context))) is not None:
        count = min(left, limits.context) // image.tokens
        first = limits.context - count * image.tokens
        same = [replace(image, first=first + i * image.tokens, digest=str(min(i, 1))) for i in range(count)]
        images.append((len(images), tuple(same)))
        left -= count * image.tokens
    return plan._replace(images=tuple(images)) if images else None


def decode_steps(limits: Limits) -> Sequence[StepPlan]:
    """A row for each slot, drawn from with everything, and as usual."""
    context, slots = limits.context, range(1, limits.slots + 1)
    chunks = tuple(limits.chunk(slot, context - 1, 1, True) for slot in slots)
    ids = array("I", bytes(4 * context))
    plans: list[StepPlan] = []
    for params, held in ((LARGE, ids), (_USUAL, None)):
        plans.append(StepPlan(0, chunks, tuple(Draw(params, slot, (), held, 1) for slot in slots)))
    return plans


# ---- of known shape --------------------------------------------------------------------------------------------------


def calibrate(
    model: CostModel, run: Run, limits: Limits, limit_seconds: float = 0.5, clock: Clock = perf_counter
) -> None:
    """Fit the model to a few steps of known shape.

    limit_seconds  no step is begun that would end later, as far as the ones before it tell.
    """
    begun = clock()
    for plan in _known_steps(limits):
        shape = Shape.of(plan)
        best = math.inf
        for _ in range(2):  # the first brings code and memory in
            expected = model.seconds(shape) if model.ready else 0.0
            if clock() - begun + expected > limit_seconds:
                break
            at = clock()
            run(plan)
            best = min(best, clock() - at)
        if best < math.inf:
            model.observe(shape, best)
            model.ready = False  # until all have been seen each counts in full
            model.settle()


def _known_steps(limits: Limits) -> Sequence[StepPlan]:
    """Small ones first."""

    def plan(chunks: Sequence[tuple[int, int, int]]) -> StepPlan:
        """Of (slot, start, rows); chunks of one row draw."""
        made = tuple(limits.chunk(slot, start, rows, rows == 1) for slot, start, rows in chunks)
        draws = (Draw(_GREEDY, 0, (), None, 1),) * sum(chunk.sample for chunk in made)
        return StepPlan(0, made, draws)

    room, slots = limits.context, limits.slots
    few, deep = min(room - 1, 64), room - 1
    most = min(room, limits.token_budget)
    lengths = [rows for rows in ((32, 256, 2048) if most >= 256 else (8, 32)) if rows <= most]
    found = [plan([(1, few, 1)]), *(plan([(1, 0, rows)]) for rows in lengths[:2])]
    counts = sorted({1, max(slots // 4, 1), slots})
    found += [plan([(slot, few, 1) for slot in range(1, count + 1)]) for count in counts[1:]]
    found += [plan([(slot, deep, 1) for slot in range(1, counts[-1] + 1)])]
    if lengths and slots > 1 and lengths[0] < limits.token_budget:
        found.append(plan([(1, few, 1), (2, 0, lengths[0])]))  # both kinds, which no sum of the others shows
    if lengths and deep - lengths[0] > 4 * few:
        found.append(plan([(1, deep - lengths[0], lengths[0])]))
    found += [plan([(1, 0, rows)]) for rows in lengths[2:]]
    return found
