"""Text of the target's own for its drafter: the prompts of the training prose, answered by the engine again.

A drafter meets what the target writes, not what the corpus says. A completion that its token limit cuts is dropped,
since its end would teach a wrong one; so is one that loops.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benthic.engine.llm import LLM
from benthic.errors import BadTrainingData
from benthic.train import data
from benthic.train.data import Collected, Ids
from benthic.train.loss import Ids as SpecialIds
from benthic.types import SamplingParams

GROUP = 2048  # requests handed to the engine at a time


class Written(NamedTuple):
    ids: Ids  # documents, one after another, each from BOS to its end token
    documents: int
    looping: int  # dropped
    cut: int  # dropped


def prompts_of(ids: Ids, special: SpecialIds) -> list[Ids]:
    """The prompt of each document, up to where the answer begins; documents that do not think."""
    starts = data.document_starts(ids, special.bos)
    modes = np.flatnonzero((ids == special.think_close) | (ids == special.think_open))
    first = np.append(modes, len(ids))[np.searchsorted(modes, starts[:-1])]  # of each document, or beyond it
    return [
        ids[start : mode + 1]
        for (start, end), mode in zip(pairwise(starts), first, strict=True)
        if mode < end and ids[mode] == special.think_close
    ]


def write(
    llm: LLM,
    prompts: Sequence[Ids],
    tokens: int,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Written:
    """Completions until there are `tokens` ids in the documents that are kept, or a few more.

    prompts       drawn from without replacement, then all over again in another order
    temperatures  taken in turn
    progress      called with the number of ids so far, dropped documents included
    """
    assert prompts, "no prompts to complete"
    kept: list[Ids] = []
    made = cut = looping = 0
    size = written = 0
    todo = _endless(prompts, temperatures, max_tokens, seed)
    while size < tokens:
        # as many as the rest needs at the mean length so far, so that all of them may finish
        mean = size / made if made else 200
        number = min(GROUP, max(int((tokens - size) / mean) + 1, 8))
        rows, params = zip(*(next(todo) for _ in range(number)), strict=True)
        group: list[tuple[int, ...]] = [()] * number
        for piece in llm.generate(list(rows), list(params), stream=True):
            written += len(piece.token_ids)
            progress(written)
            if piece.completion is None:
                continue
            if piece.completion.error is not None:
                raise piece.completion.error
            if piece.completion.finish_reason == "stop":
                group[piece.prompt] = (*piece.completion.prompt_token_ids, *piece.completion.token_ids)
        collected = Collected()
        for document in filter(None, group):
            collected.add(document)
        ids, count_kept, bad = data.without_loops(*collected.flat())
        cut += number - count_kept - bad
        kept.append(ids)
        made, looping, size = made + count_kept, looping + bad, size + len(ids)
        if not made and cut + looping >= 64:
            raise BadTrainingData("the target", f"none of {cut + looping} completions ended within {max_tokens} tokens")
    return Written(np.concatenate(kept), made, looping, cut)


def _endless(
    prompts: Sequence[Ids], temperatures: Sequence[float], max_tokens: int, seed: int
) -> Iterator[tuple[list[int], SamplingParams]]:
    rng, number = random.Random(seed), 0
    for _ in count():
        for i in rng.sample(range(len(prompts)), len(prompts)):
            temperature = temperatures[number % len(temperatures)]
            own = rng.getrandbits(62)
            yield prompts[i].tolist(), SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=own)
            number += 1


def read(path: Path, special: SpecialIds, vocab_size: int) -> Ids:
    """A file of such documents. Raises BadTrainingData."""
    ids = data.read_ids(path)
    if not len(ids) or ids[0] != special.bos or int(ids.max()) >= vocab_size:
        what = (
            f"{len(ids)} ids up to {ids.max(initial=0)}, want documents of ids below {vocab_size} that begin with BOS"
        )
        raise BadTrainingData(path, f"it holds {what}; make it with `benthic train generate`")
    return ids
