"""Text of the target's own: which prompts, which completions are kept, how many, and files that come back."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benthic.engine.llm import LLM
from benthic.errors import BadTrainingData
from benthic.train import data, generate
from benthic.types import SamplingParams
from tests.train.language import opening, write_target
from tests.train.small import IDS

BOS, EOS, CLOSE, OPEN = IDS.bos, IDS.eos, IDS.think_close, IDS.think_open


def flat(*documents: Sequence[int]) -> data.Ids:
    return np.array([id for document in documents for id in document], dtype=np.uint16)


def test_prompts_end_where_the_answer_begins() -> None:
    ids = flat(
        [BOS, 20, CLOSE, 30, 31, EOS],
        [BOS, 21, OPEN, 30, CLOSE, 31, EOS],  # thinks: its answer begins elsewhere
        [BOS, 22, 23],  # has none
        [BOS, 24, CLOSE, EOS, 25, CLOSE, 26, EOS],  # two turns: the first
        [BOS, CLOSE],
    )
    want = [[BOS, 20, CLOSE], [BOS, 24, CLOSE], [BOS, CLOSE]]
    assert [prompt.tolist() for prompt in generate.prompts_of(ids, IDS)] == want
    assert generate.prompts_of(ids[:0], IDS) == []


class Scripted:
    """An engine that answers at once, the last prompt first; what it does depends on the prompt's second id."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], list[SamplingParams]]] = []

    def generate(self, prompts: list[list[int]], params: list[SamplingParams], *, stream: bool) -> Iterator[Any]:
        assert stream
        self.calls.append((prompts, params))
        for i in reversed(range(len(prompts))):
            kind = prompts[i][1]
            rng = random.Random(f"{prompts[i]} {params[i].temperature} {params[i].seed}")
            answer = [rng.randrange(100, 200) for _ in range(20)]
            if kind == 51:
                answer = [*range(100, 108)] * 4
            reason = "length" if kind == 52 else "stop"
            answer = answer if kind == 52 else [*answer, EOS]
            error = RuntimeError("broken") if kind == 53 else None
            yield SimpleNamespace(prompt=i, token_ids=answer[:5], completion=None)
            done = SimpleNamespace(
                prompt_token_ids=tuple(prompts[i]), token_ids=tuple(answer), finish_reason=reason, error=error
            )
            yield SimpleNamespace(prompt=i, token_ids=answer[5:], completion=done)


def prompts(*kinds: int) -> list[data.Ids]:
    return [flat([BOS, kind, 60 + i, CLOSE]) for i, kind in enumerate(kinds)]


def test_what_ended_and_does_not_loop_is_kept() -> None:
    llm, seen = Scripted(), list[int]()
    made = generate.write(llm, prompts(50, 51, 52, 50), 1000, (0.7, 1.0), 40, 5, seen.append)  # type: ignore[arg-type]
    starts = data.document_starts(made.ids, BOS)
    documents = [made.ids[a:b].tolist() for a, b in pairwise(starts)]
    assert len(documents) == made.documents
    assert len(made.ids) >= 1000 > len(made.ids) - 25 * generate.GROUP
    assert {document[1] for document in documents} == {50}
    assert all(document[-1] == EOS and len(document) == 25 for document in documents)
    calls = [(row, params) for call in llm.calls for row, params in zip(*call, strict=True)]
    assert (made.looping, made.cut) == tuple(sum(row[1] == kind for row, _ in calls) for kind in (51, 52))
    assert [params.temperature for _, params in calls] == [(0.7, 1.0)[i % 2] for i in range(len(calls))]
    assert {params.max_tokens for _, params in calls} == {40}
    assert len({params.seed for _, params in calls}) == len(calls)
    for i in range(0, len(calls) - 4, 4):  # every prompt once before any comes again
        assert {row[2] for row, _ in calls[i : i + 4]} == {60, 61, 62, 63}
    assert seen == sorted(seen)
    # in the order of the prompts, whatever ended first
    asked = [row for row, _ in calls if row[1] == 50]
    assert [document[:4] for document in documents] == asked


def test_the_seed_says_what_is_written() -> None:
    first, again, other = (
        generate.write(Scripted(), prompts(50, 51, 50), 500, (1.0,), 40, seed).ids.tolist()  # type: ignore[arg-type]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_request_that_fails_is_raised() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        generate.write(Scripted(), prompts(53), 500, (1.0,), 40, 0)  # type: ignore[arg-type]


def test_a_target_that_never_ends_is_refused() -> None:
    with pytest.raises(BadTrainingData, match=r"none of \d+ completions ended within 40 tokens"):
        generate.write(Scripted(), prompts(52, 51), 500, (1.0,), 40, 0)  # type: ignore[arg-type]


def test_a_real_engine_writes_the_targets_language(tmp_path: Path) -> None:
    checkpoint = write_target(tmp_path / "target")
    with LLM(checkpoint.path, numerics="float", cpu__threads=1) as llm:
        made = generate.write(llm, [np.array(opening(), dtype=np.uint16)], 300, (1.0,), 60, 0)
    assert made.documents > 3
    assert made.ids[:4].tolist() == list(opening())
    assert int((made.ids == EOS).sum()) == made.documents
    path = tmp_path / "generated.ids.xz"
    data.write_ids(path, made.ids)
    assert generate.read(path, IDS, 512).tolist() == made.ids.tolist()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.ids.xz"
    for ids in ([], [5, BOS, 7], [BOS, 512]):
        data.write_ids(path, np.array(ids, dtype=np.uint16))
        with pytest.raises(BadTrainingData, match=r"other\.ids\.xz.*benthic train generate"):
            generate.read(path, IDS, 512)
