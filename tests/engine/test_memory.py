"""At the limit of its pools, under random aborts, an engine neither grows nor leaks.

The invariants of scheduler and cache are checked after every step. Memory is what the process has resident, what Python
has allocated, and how many tensors are alive.
"""

import gc
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest
import torch

from benthic.engine.llm import LLM
from benthic.testing.checkpoints import make_tiny
from benthic.types import Abort, CacheOptions, Request, SamplingParams

SLOTS, BLOCKS, LONGEST = 6, 8, 300  # three of the longest are more than the pool holds

MIB = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("memory") / "tiny", sliding_window=8, max_position_embeddings=LONGEST)


class Load:
    """More requests than run at a time, all day long, and aborts at any moment."""

    def __init__(self, llm: LLM, seed: int):
        self.llm, self.rng, self.made, self.ended, self.aborted = llm, random.Random(seed), 0, 0, 0
        self.live: set[tuple[int, int]] = set()
        self.stem = [self.rng.randrange(70, 4000) for _ in range(LONGEST)]

    def request(self) -> Request:
        rng = self.rng
        cut, length = rng.choice([0, 140, 250]), rng.choice([1, 60, 130, LONGEST - 40])
        ids = (self.stem[:cut] + [rng.randrange(70, 4000) for _ in range(length)])[:length]
        kinds = (
            SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 40)),
            SamplingParams(temperature=1.0, top_p=0.9, max_tokens=rng.randrange(1, 40)),
            SamplingParams(max_tokens=rng.randrange(1, 30), n=2, presence_penalty=0.5),
            SamplingParams(max_tokens=rng.randrange(1, 20), logprobs=3, prompt_logprobs=1),
        )
        self.made += 1
        options = CacheOptions(salt=rng.choice(["", "", "a"]), mode=rng.choice([None, "exact", "replay"]))
        return Request(10**6 + self.made, tuple(ids), rng.choice(kinds), seed=self.made, cache=options)

    def step(self) -> None:
        loop, rng = self.llm.loop, self.rng
        while len(self.live) < 2 * SLOTS:
            request = self.request()
            self.live |= {(request.id, i) for i in range(request.params.n)}
            loop.inbox.put(request)
        if rng.random() < 0.4:
            id, branch = rng.choice(sorted(self.live))
            loop.inbox.put(Abort(id, rng.choice([None, branch])))
            self.aborted += 1
        if rng.random() < 0.05:
            loop.scheduler.pin(self.stem[: rng.randrange(LONGEST)], CacheOptions(), rng.choice([0.01, 0.1, 1.0]))
        loop.step()
        loop.scheduler.check_invariants()
        self.take()

    def take(self) -> None:
        for event in self.llm.loop.outbox.take():
            assert event.error is None
            if event.usage is not None:
                self.live.remove((event.request, event.branch))
                self.ended += 1

    def drain(self) -> None:
        for id, branch in self.live:
            self.llm.loop.inbox.put(Abort(id, branch))
        while self.llm.loop.busy:
            self.llm.loop.step()
        self.take()
        scheduler = self.llm.loop.scheduler
        while scheduler.cache.give_way():
            pass
        scheduler.check_invariants()
        cache = scheduler.cache
        assert (cache.free_blocks, cache.slots.free) == (cache.blocks.usable, cache.slots.usable), "something leaked"
        snapshots = cache.snapshots
        assert len(snapshots) + len(snapshots._free) == len(snapshots.slots), "a kept state's slot leaked"
        assert not self.live
        assert not scheduler._live
        assert not scheduler.queue
        assert not scheduler._flights


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def tensors() -> tuple[int, int]:
    """How many are alive, and their bytes."""
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor or type(each) is torch.nn.Parameter]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
    return len(alive), sum(storages.values())


def measured() -> tuple[int, int, tuple[int, int]]:
    gc.collect()
    return resident(), tracemalloc.get_traced_memory()[0], tensors()


def drive(llm: LLM, seconds: float, seed: int) -> Load:
    """A third of the time brings everything in; over the rest nothing may grow."""
    load = Load(llm, seed)

    def until(end: float) -> None:
        while monotonic() < end:
            load.step()

    begun = monotonic()
    tracemalloc.start()
    try:
        until(begun + seconds / 3)
        load.drain()
        before = measured()
        until(begun + seconds)
        load.drain()
        after = measured()
    finally:
        tracemalloc.stop()
    assert after[0] - before[0] < 8 * MIB, f"resident: {before[0]} bytes, then {after[0]}"
    assert after[1] - before[1] < MIB // 2, f"allocated by Python: {before[1]} bytes, then {after[1]}"
    assert after[2] == before[2], f"tensors and their bytes: {before[2]}, then {after[2]}"
    assert load.ended > 5
    assert load.aborted > 1
    return load


def limited(tiny: Path, ahead: str) -> LLM:
    return LLM(
        tiny,
        device="cpu",
        cpu__threads=1,
        scheduler__ahead=ahead,
        scheduler__max_running=SLOTS,
        scheduler__token_budget=128,
        scheduler__worst_first=True,
        cache__blocks=BLOCKS,
        cache__snapshots=3,
        cache__ttl_seconds=2.0,
    )


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_a_few_seconds_at_the_limit(tiny: Path, ahead: str):
    with limited(tiny, ahead) as llm:
        drive(llm, 3.0, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["off", "on"])
def test_a_minute_at_the_limit(tiny: Path, ahead: str):
    with limited(tiny, ahead) as llm:
        load = drive(llm, 60.0, seed=2)
        assert llm.loop.scheduler.cache.evictions > 0
    assert load.ended > 100


@pytest.mark.parametrize(
    "leak",
    [
        lambda llm, kept: kept.append(bytearray(MIB)),
        lambda llm, kept: kept.append(torch.zeros(256)),
        lambda llm, kept: llm.loop.scheduler.cache.blocks.take(1) if not kept and not kept.append(0) else None,
    ],
    ids=["memory of Python's", "tensors", "a block"],
)
def test_a_leak_is_seen(tiny: Path, monkeypatch: pytest.MonkeyPatch, leak: Callable[[LLM, list[object]], None]):
    kept: list[object] = []
    with limited(tiny, "off") as llm:
        step = llm.loop.step

        def leaking() -> None:
            step()
            leak(llm, kept)

        monkeypatch.setattr(llm.loop, "step", leaking)
        with pytest.raises(AssertionError):
            drive(llm, 1.5, seed=3)
