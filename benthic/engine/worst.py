"""The largest steps that the configuration admits, taken before there is a request: what they need is there from then
on, and where it does not fit the engine does not start. No torch.

Largest is: as many rows as the token budget at the end of the longest context, the last with prompt log-probabilities;
and a decode row for each slot, all with that context and with every setting of a draw that takes memory.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from time import perf_counter

from benthic.types import Chunk, Draw, SamplingParams, Score, StepPlan

_SCORED = 512  # prompt tokens whose log-probabilities are asked for; more are taken in turns
_LISTED = 20  # alternatives beside each
_FEW = 32  # rows of the step that tells how long more would take
_USUAL = SamplingParams(temperature=1.0, top_p=0.9)
_LARGE = SamplingParams(
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


def take(
    run: Callable[[StepPlan], object],
    *,
    slots: int,
    blocks: int,
    block_tokens: int,
    token_budget: int,
    max_context_tokens: int,
    limit_seconds: float = math.inf,
    clock: Callable[[], float] = perf_counter,
) -> int:
    """Take the largest steps. Returns the rows of the largest.

    run            computes a plan and waits for it. It is handed slots 1 .. slots and the first blocks; what it leaves
                   there is what an ended request leaves.
    blocks         usable ones of one sequence, numbered from 1.
    limit_seconds  a step expected to take longer is taken with fewer rows.
    """
    context = min(max_context_tokens, blocks * block_tokens)
    for plan in decode_steps(slots, context, block_tokens):
        run(plan)
    most = min(token_budget, context)
    rows = most if limit_seconds == math.inf else min(_FEW, most)
    begun = clock()
    run(prompt_step(rows, context, block_tokens))
    if rows < most:
        affordable = rows * limit_seconds / max(clock() - begun, 1e-6)
        rows = min(most, 1 << max(int(affordable), 1).bit_length() - 1)
        if rows > _FEW:
            run(prompt_step(rows, context, block_tokens))
    return max(rows, min(_FEW, most), slots)


def prompt_step(rows: int, context: int, block_tokens: int) -> StepPlan:
    """The last rows of the longest prompt, with log-probabilities."""
    start, scored = context - rows, min(rows - 1, _SCORED)
    chunk = Chunk(0, start, (0,) * rows, 0, True, 1, _table(context, block_tokens), before=() if start else None)
    scores = ((0, Score(0, (0,) * scored, _LISTED)),) if scored else ()
    return StepPlan(0, (chunk,), (Draw(_USUAL, 0, context, (), None, 1),), scores)


def decode_steps(slots: int, context: int, block_tokens: int) -> Sequence[StepPlan]:
    """A row for each slot, drawn from as usual, and with everything."""
    at, table = context - 1, _table(context, block_tokens)  # all share one: where they write does not matter here
    chunks = tuple(Chunk(0, at, (0,), 0, True, s, table, before=() if at else None) for s in range(1, slots + 1))
    ids = array("i", bytes(4 * context))
    plans: list[StepPlan] = []
    for params, held in ((_USUAL, None), (_LARGE, ids)):
        plans.append(StepPlan(0, chunks, tuple(Draw(params, s, context, (), held, 1) for s in range(1, slots + 1))))
    return plans


def _table(context: int, block_tokens: int) -> tuple[int, ...]:
    return tuple(range(1, 1 + -(-context // block_tokens)))
