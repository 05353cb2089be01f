"""What must not change an answer: chunk size, batch mates, preemption. The real model, tiny, without quantisers.

Every position of a prompt is compared (its log-probability), and the whole logits row of every drawn token. `tiny` is
the configuration as it is; near ties in its top-k choices could in principle spread (model specification, section 6.4),
so `smooth` selects every entry and every expert: there only algebra is left.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor

from benthic.cache.manager import CacheManager
from benthic.cache.storage import Storage
from benthic.engine.loop import Loop
from benthic.engine.runner import Model, Runner
from benthic.engine.sampler import Sampled, Sampler
from benthic.engine.scheduler import Scheduler
from benthic.models.deepseek_v41 import from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS, Draw, Request, SamplingParams

TOLERANCE = 1e-5  # design, section 3: logits with quantisers off
SMOOTH = {"index_topk": 512, "candidate_topk_blocks": 128, "num_experts_per_tok": 16}
BLOCK = 16  # tokens; small blocks, so that short prompts have several


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def load(name: str) -> Model:
        folder = make_tiny(tmp_path_factory.mktemp("checkpoint") / name, **(SMOOTH if name == "smooth" else {}))
        return from_checkpoint(Checkpoint.open(folder), NUMERICS["float"])

    return load


@pytest.fixture(params=["tiny", "smooth"])
def model(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    return models(request.param)


@pytest.fixture
def tiny(models: Callable[[str], Model]) -> Model:
    return models("tiny")


class Watching(Sampler):
    """Keeps the logits it is given."""

    def __init__(self, vocab_size: int):
        super().__init__(vocab_size)
        self.rows: dict[tuple[int, int], Tensor] = {}  # (request, position)

    def __call__(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], requests: Sequence[int] | None = None
    ) -> Sampled:
        assert requests is not None
        for row, number, position in zip(logits, requests, positions, strict=True):
            assert (number, position) not in self.rows, "a token was drawn twice"
            self.rows[number, position] = row.clone()
        return super().__call__(logits, draws, positions, requests)


@dataclass
class Answers:
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    scores: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    preemptions: int = 0


def answer(
    model: Model, requests: Sequence[Request], *, budget: int = 4096, blocks: int = 80, slots: int = 1
) -> Answers:
    storage = Storage(model.cache_spec, blocks + 1, slots + 1, block_tokens=BLOCK)
    storage.poison()
    scheduler = Scheduler(
        CacheManager(blocks + 1, slots + 1, BLOCK),
        token_budget=budget,
        max_context_tokens=model.max_positions,
        vocab_size=model.vocab_size,
    )
    sampler = Watching(model.vocab_size)
    loop = Loop(scheduler, Runner(model, storage, sampler))
    for request in requests:
        loop.inbox.put(request)
    found = Answers(logits=sampler.rows)
    while loop.busy:
        loop.step()
        for event in loop.outbox.take():
            assert event.error is None, event.error
            found.tokens[event.request] += event.tokens
            found.scores[event.request] += [entry.logprob for entry in event.prompt_logprobs]
    scheduler.check_invariants()
    found.preemptions = scheduler.preemptions
    return found


def request(number: int, length: int, tokens: int = 6) -> Request:
    ids = torch.randint(3, 4000, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens, prompt_logprobs=0)
    return Request(number, tuple(ids), params, seed=0)


def assert_same(got: Answers, want: Answers, number: int) -> None:
    assert got.tokens[number] == want.tokens[number]
    assert got.scores[number] == pytest.approx(want.scores[number], abs=TOLERANCE)
    rows = {key for key in want.logits if key[0] == number}
    assert rows == {key for key in got.logits if key[0] == number}
    for key in rows:
        assert float((got.logits[key] - want.logits[key]).abs().max()) <= TOLERANCE, f"position {key[1]}"


@pytest.mark.parametrize("size", [37, 128])
def test_chunked_is_whole(model: Model, size: int):
    whole = answer(model, [request(1, 151)])
    assert_same(answer(model, [request(1, 151)], budget=size), whole, 1)


def test_token_by_token_is_whole(tiny: Model):
    whole = answer(tiny, [request(1, 135)])
    assert_same(answer(tiny, [request(1, 135)], budget=1), whole, 1)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_lengths_around_every_edge(tiny: Model, length: int):
    """Window 64, ratio-2 selection past 128 tokens, candidates past 128 entries; odd lengths leave a group open."""
    whole = answer(tiny, [request(length, length)])
    assert_same(answer(tiny, [request(length, length)], budget=41), whole, length)


def test_batched_is_alone(model: Model):
    requests = [request(i, length) for i, length in enumerate([1, 2, 64, 130, 151, 33])]
    together = answer(model, requests, budget=64, slots=6)
    for r in requests:
        assert_same(together, answer(model, [r]), r.id)


def test_preempted_is_not(tiny: Model):
    requests = [request(i, length, 34) for i, length in enumerate([64, 65, 73])]  # 5 blocks each, later 7
    tight = answer(tiny, requests, budget=64, blocks=18, slots=3)
    assert tight.preemptions >= 1
    for r in requests:
        assert_same(tight, answer(tiny, [r]), r.id)


def test_a_slot_used_before_is_as_good_as_new(tiny: Model):
    requests = [request(i, 40 + i) for i in range(3)]
    in_turn = answer(tiny, requests, slots=1)
    for r in requests:
        assert_same(in_turn, answer(tiny, [r]), r.id)
