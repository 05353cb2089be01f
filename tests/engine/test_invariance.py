"""In `deterministic` mode a request has the same bits alone, in any batch, and in chunks of any size, with padding too.

Compared are the hidden state of every position and the logits of every drawn token. On a GPU with minnow, in every
profile, launched one by one and from graphs; on a CPU with a tiny model, where the native kernels make the promise.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benthic.cache.manager import CacheManager
from benthic.cache.storage import Storage
from benthic.engine.loop import Loop
from benthic.engine.runner import Decided, Passed, Runner
from benthic.engine.sampler import Sampler
from benthic.engine.scheduler import Scheduler
from benthic.kernels.native import build
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.registry import model_dir
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS, Request, SamplingParams, StepPlan, StepResult

NEW = 5  # tokens a request draws
BLOCKS = 3  # of 128 tokens, at most, for each request

Bits = dict[tuple[str, int, int], Tensor]  # "hidden" or "logits", request, position -> row


class Watched:
    """A model whose last results can be looked at."""

    def __init__(self, model: DeepseekV41):
        self.model = model
        self.hidden = self.rows = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *arguments: Any) -> Any:
        output = self.model.forward(*arguments)
        self.hidden = output.hidden
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows = self.model.logits(hidden)
        return self.rows


class Watching(Runner):
    """Keeps hidden states and logits of what it computes."""

    def __init__(self, model: DeepseekV41, storage: Storage, *, graphs: bool):
        self.watched, self.replayed = Watched(model), False
        self.bits: Bits = {}
        sampler = Sampler(model.vocab_size, storage.device)
        super().__init__(self.watched, storage, sampler, deterministic=True, graph_rows=256 if graphs else 0)
        if not graphs:
            return
        self.capture()
        assert self._graphs is not None
        assert self._whole is not None
        replay, replay_prompts = self._graphs.run, self._whole.run

        def run(size: int) -> Decided:
            decided = replay(size)
            self.watched.hidden, self.watched.rows, self.replayed = decided.hidden, decided.logits, True
            return decided

        def run_prompts(size: int) -> Passed:
            passed = replay_prompts(size)
            self.watched.hidden = passed.hidden
            return passed

        self._graphs.run, self._whole.run = run, run_prompts

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.replayed = False
        result = super().start(plan)()
        row = draw = 0
        for index, chunk in enumerate(plan.chunks):
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                self._keep("hidden", chunk.request, position, self.watched.hidden[row])
                row += 1
            if chunk.sample:
                at = index if self.replayed else draw
                self._keep("logits", chunk.request, chunk.start + len(chunk.tokens), self.watched.rows[at])
                draw += 1
        return lambda: result

    def _keep(self, what: str, request: int, position: int, row: Tensor) -> None:
        assert (what, request, position) not in self.bits, "computed twice"
        self.bits[what, request, position] = row.clone()


def compute(
    model: DeepseekV41, requests: Sequence[Request], device: str, *, budget: int = 4096, graphs: bool = False
) -> Bits:
    slots = len(requests) + 1
    storage = Storage(model.cache_spec, BLOCKS * len(requests) + 1, slots, torch.device(device))
    storage.poison()
    scheduler = Scheduler(
        CacheManager(BLOCKS * len(requests) + 1, slots),
        token_budget=max(budget, len(requests)),
        max_context_tokens=model.max_positions,
        vocab_size=model.vocab_size,
    )
    runner = Watching(model, storage, graphs=graphs)
    loop = Loop(scheduler, runner)
    for request in requests:
        loop.inbox.put(request)
    while loop.busy:
        loop.step()
        for event in loop.outbox.take():
            assert event.error is None, event.error
    return runner.bits


def request(number: int, length: int) -> Request:
    ids = torch.randint(70, 4000, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return Request(number, tuple(ids), SamplingParams(temperature=0, max_tokens=NEW), seed=0)


def assert_same(got: Bits, want: Bits, requests: Iterable[Request], where: str = "") -> None:
    for one in requests:
        keys = {key for key in want if key[1] == one.id}
        assert keys == {key for key in got if key[1] == one.id}
        assert len(keys) == len(one.prompt) + 2 * NEW - 1
        for key in sorted(keys, key=lambda key: key[2]):  # the first position that differs
            assert torch.equal(got[key].view(torch.uint8), want[key].view(torch.uint8)), (where, *key)


def batch(subjects: Sequence[Request], size: int) -> list[Request]:
    """`size` requests of many lengths, the subjects spread among them."""
    if size < len(subjects):
        return list(subjects[:size])
    others = iter([request(1000 + i, 1 + 37 * i % 90) for i in range(size)])
    every = [(size - 1) * i // max(len(subjects) - 1, 1) for i in range(len(subjects))]
    found: list[Request] = []
    for i in range(size):
        found.append(subjects[every.index(i)] if i in every else next(others))
    return found


# ---- on a CPU --------------------------------------------------------------------------------------------------------

native = pytest.mark.skipif(not build.status().available, reason=f"no native kernels: {build.status().detail}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DeepseekV41]:
    folder = make_tiny(tmp_path_factory.mktemp("model") / "tiny")
    return cache(lambda numerics: from_checkpoint(Checkpoint.open(folder), NUMERICS[numerics]))


@native
@pytest.mark.parametrize("numerics", ["reference", "production"])
def test_native_kernels_keep_bits(tiny: Callable[[str], DeepseekV41], numerics: str) -> None:
    model, subjects = tiny(numerics), [request(1, 140), request(2, 3)]
    alone = {key: row for one in subjects for key, row in compute(model, [one], "cpu").items()}
    for budget in (7, 64, 4096):
        assert_same(compute(model, subjects[:1], "cpu", budget=budget), alone, subjects[:1])
        assert_same(compute(model, batch(subjects, 6), "cpu", budget=budget), alone, subjects)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minnow() -> Callable[[str], DeepseekV41]:
    return cache(lambda numerics: from_checkpoint(Checkpoint.open(model_dir("minnow")), NUMERICS[numerics], "cuda"))


@pytest.fixture(scope="module")
def alone(minnow: Callable[[str], DeepseekV41]) -> Callable[[str], tuple[list[Request], Bits]]:
    """Three requests, each in a step of its own, the whole prompt at once."""

    @cache
    def made(numerics: str) -> tuple[list[Request], Bits]:
        subjects = [request(1, 300), request(2, 65), request(3, 1)]
        return subjects, {k: v for one in subjects for k, v in compute(minnow(numerics), [one], "cuda").items()}

    return made


Alone = Callable[[str], tuple[list[Request], Bits]]


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["reference", "production", "fast"])
def test_a_request_has_its_bits_in_any_batch(minnow: Callable[[str], DeepseekV41], alone: Alone, numerics: str) -> None:
    """From graphs: as many rows as there are slots, fewer at the end, and padding rows up to the size of a graph."""
    subjects, want = alone(numerics)
    for size in (1, 2, 3, 17, 64, 65, 128, 200, 256):
        together = batch(subjects, size)
        here = [one for one in subjects if one in together]
        assert_same(compute(minnow(numerics), together, "cuda", budget=1000, graphs=True), want, here, f"of {size}")
        assert_same(compute(minnow(numerics), together, "cuda", budget=777), want, here, f"of {size}, no graphs")


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["reference", "production", "fast"])
def test_a_prompt_has_its_bits_in_any_chunks(minnow: Callable[[str], DeepseekV41], alone: Alone, numerics: str) -> None:
    subjects, want = alone(numerics)
    for budget in (1, 2, 3, 16, 17, 63, 64, 65, 128, 200):
        for one in subjects[:2]:
            found = compute(minnow(numerics), [one], "cuda", budget=budget, graphs=budget in (1, 3, 17, 64, 200))
            assert_same(found, want, [one], f"chunks of {budget}")
