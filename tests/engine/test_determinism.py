"""With `deterministic = true` an answer has the same bits, tokens and logits, however it came about. Whole engines.

Receipts are compared: tokens, and a digest over the logits of each. Every prompt is first answered alone, whole, by one
thread, without a cache, one step at a time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from benthic.engine.llm import LLM
from benthic.engine.receipt import Receipt
from benthic.kernels.native import build
from benthic.testing.checkpoints import make_tiny
from benthic.types import SamplingParams, StepPlan

pytestmark = pytest.mark.skipif(not build.status().available, reason="plain torch promises no bits")

Answers = list[tuple[tuple[int, ...], str]]  # tokens, digest


def prompts(vocab: int, count: int, longest: int) -> list[list[int]]:
    """Some share a beginning, and one is another's beginning."""
    rng = random.Random(count)
    stem = [rng.randrange(70, vocab - 70) for _ in range(longest)]
    found = [stem[: longest // 2], stem]
    while len(found) < count:
        cut = rng.choice([0, 0, longest // 3, longest - 9])
        more = [rng.randrange(70, vocab - 70) for _ in range(rng.randrange(1, longest - cut + 1))]
        found.append(stem[:cut] + more)
    return found


def params(count: int, tokens: int = 6) -> list[SamplingParams]:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0, presence_penalty=0.5),
        SamplingParams(temperature=1.3, top_k=20),
    ]
    return [replace(kinds[i % 4], max_tokens=tokens, seed=i, ignore_eos=True, receipt=True) for i in range(count)]


def bits(receipts: Sequence[Receipt | None]) -> Answers:
    return [(each.tokens, each.digest) for each in receipts if each is not None]


def together(llm: LLM, todo: list[list[int]], settings: list[SamplingParams]) -> Answers:
    found = bits([done.receipt for done in llm.generate(todo, settings, progress=False)])
    assert len(found) == len(todo)
    return found


def one_by_one(llm: LLM, todo: list[list[int]], settings: list[SamplingParams]) -> Answers:
    found = [together(llm, [ids], [each]) for ids, each in zip(todo, settings, strict=True)]
    return [answer for (answer,) in found]


def in_another_order(llm: LLM, todo: list[list[int]], settings: list[SamplingParams]) -> Answers:
    order = list(range(len(todo)))
    random.Random(1).shuffle(order)
    found = together(llm, [todo[i] for i in order], [settings[i] for i in order])
    return [found[order.index(i)] for i in range(len(todo))]


def as_they_come(llm: LLM, todo: list[list[int]], settings: list[SamplingParams]) -> Answers:
    """The next one when the one before it has two tokens, some given up on the way."""
    receipts: dict[int, Receipt | None] = {}
    streams = []
    for i, (ids, each) in enumerate(zip(todo, settings, strict=True)):
        if i % 3 == 1:
            given_up = llm.generate([ids[::-1]], each, stream=True)
            next(given_up)
            given_up.close()  # type: ignore[attr-defined]
        stream = llm.generate([ids], each, stream=True)
        streams.append((i, stream))
        for _ in range(2):
            next(stream)
    for i, stream in streams:
        for piece in stream:
            if piece.completion is not None:
                receipts[i] = piece.completion.receipt
    return bits([receipts[i] for i in range(len(todo))])


def twice(llm: LLM, todo: list[list[int]], settings: list[SamplingParams]) -> Answers:
    """The second time from what the first one left in the cache."""
    together(llm, todo, settings)
    done = llm.generate(todo, settings, progress=False)
    assert sum(each.usage.cached_tokens for each in done) > 0
    return bits([each.receipt for each in done])


def preempted(llm: LLM, todo: list[list[int]], settings: list[SamplingParams]) -> Answers:
    """One of those that run has to begin anew before almost every step."""
    scheduler, rng, plan = llm.loop.scheduler, random.Random(2), llm.loop.scheduler.plan

    def preempting() -> StepPlan:
        if len(scheduler.running) > 1 and rng.random() < 0.8:
            scheduler._preempt(rng.choice(scheduler.running))
        return plan()

    scheduler.plan = preempting
    found = together(llm, todo, settings)
    assert scheduler.preemptions > 3
    return found


ALONE = {"scheduler__ahead": "off", "cache__prefix": False}
WAYS: dict[str, tuple[Callable[..., Answers], dict[str, object]]] = {
    "in one batch": (together, {}),
    "in small chunks": (together, {"scheduler__token_budget": 64, "cache__prefix": False}),
    "in another order": (in_another_order, {"scheduler__ahead": "on"}),
    "as they come": (as_they_come, {"scheduler__token_budget": 64}),
    "cached, state kept": (twice, {"cache__mode": "snapshot"}),
    "cached, computed again": (twice, {"cache__mode": "exact", "scheduler__ahead": "on"}),
    "preempted": (preempted, {}),
}


def engine(folder: str | Path, **settings: object) -> LLM:
    usual = {"device": "cpu", "cpu__threads": 1, "scheduler__max_running": 64}
    return LLM(folder, deterministic=True, **{**usual, **settings})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("determinism") / "tiny", sliding_window=8)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Answers:
    with engine(tiny, **ALONE) as llm:
        return one_by_one(llm, prompts(4096, 12, 150), params(12))


def same_whatever(way: str, folder: str | Path, todo: list[list[int]], alone: Answers, **settings: object) -> None:
    how, own = WAYS[way]
    with engine(folder, **{**settings, **own}) as llm:
        assert how(llm, todo, params(len(todo))) == alone
        llm.loop.scheduler.check_invariants()
    assert len(set(alone)) == len(alone)


def same_drawn_ahead(folder: str | Path, todo: list[list[int]], alone: Answers, **settings: object) -> None:
    """A receipt or a penalty has its token decided by the host. Without, it is still on the device when it is used."""
    free = [i for i, each in enumerate(params(len(todo))) if not each.presence_penalty]
    with engine(folder, **{"scheduler__ahead": "on", "scheduler__itl_stretch": 0.0, **settings}) as llm:
        asked = [replace(params(len(todo))[i], receipt=False) for i in free]
        done = llm.generate([todo[i] for i in free], asked, progress=False)
        steps = len(llm.loop.times)
    assert [each.token_ids for each in done] == [alone[i][0] for i in free]
    assert steps < 30, "tokens of the host's were waited for"


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_the_same_whatever_the_way(tiny: Path, alone: Answers, way: str):
    same_whatever(way, tiny, prompts(4096, 12, 150), alone)


def test_tokens_that_the_host_does_not_know_yet(tiny: Path, alone: Answers):
    same_drawn_ahead(tiny, prompts(4096, 12, 150), alone)


@pytest.mark.parametrize("size", [2, 64])
def test_in_batches_of_many_sizes(tiny: Path, alone: Answers, size: int):
    """The same twelve among others, whose number makes up the batch."""
    todo, settings = prompts(4096, 12, 150), params(12)
    others = [[(31 * i + j) % 3900 + 90 for j in range(1 + 7 * i % 40)] for i in range(max(size - 12, 0))]
    with engine(tiny, scheduler__max_running=size, scheduler__ahead="on") as llm:
        found = together(llm, [*others, *todo], [*params(len(others)), *settings])
    assert found[len(others) :] == alone


@pytest.mark.parametrize("numerics", ["reference", "production"])
def test_one_and_two_threads(numerics: str):
    """The packaged model, whose products are large enough to be shared by threads."""
    todo, settings = prompts(4096, 3, 150), params(3, 3)
    found: list[Answers] = []
    for threads, ahead in ((1, "off"), (2, "off"), (2, "on")):
        with engine("minnow", numerics=numerics, cpu__threads=threads, scheduler__ahead=ahead) as llm:
            assert torch.get_num_threads() == threads
            found.append(together(llm, todo, settings))
    assert found[0] == found[1] == found[2]


# ---- on a GPU --------------------------------------------------------------------------------------------------------

ON_GPU = [("production", way) for way in WAYS]
ON_GPU += [(numerics, way) for numerics in ("reference", "fast") for way in ("in one batch", "cached, state kept")]


LONGEST = 2000  # tokens, more than what all windows of the packaged model see together


@pytest.fixture(scope="module")
def alone_on_gpu() -> Callable[[str], Answers]:
    @cache
    def made(numerics: str) -> Answers:
        with engine("minnow", device="cuda", numerics=numerics, **ALONE) as llm:
            return one_by_one(llm, prompts(4096, 12, LONGEST), params(12))

    return made


@pytest.mark.gpu
@pytest.mark.parametrize(("numerics", "way"), ON_GPU)
def test_an_answer_of_a_gpu_is_the_same_whatever_the_way(
    alone_on_gpu: Callable[[str], Answers], numerics: str, way: str
):
    """Begun ahead, in chunks, in batches, from the cache: as alone on the same GPU."""
    settings = {"device": "cuda", "numerics": numerics}
    same_whatever(way, "minnow", prompts(4096, 12, LONGEST), alone_on_gpu(numerics), **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launched"])
@pytest.mark.parametrize("numerics", ["reference", "production", "fast"])
def test_tokens_of_a_gpu_that_the_host_does_not_know_yet(
    alone_on_gpu: Callable[[str], Answers], numerics: str, graphs: bool
):
    settings = {"device": "cuda", "numerics": numerics, "gpu__graphs": graphs}
    same_drawn_ahead("minnow", prompts(4096, 12, LONGEST), alone_on_gpu(numerics), **settings)
