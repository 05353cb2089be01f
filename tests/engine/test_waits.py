"""While steps decode, the host waits for the device in one place: where it asks for a step's tokens."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from benthic.cache.manager import CacheManager
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.loop import Loop
from benthic.engine.runner import Runner
from benthic.engine.sampler import Sampler
from benthic.engine.scheduler import Prefixes, Scheduler
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS, Request, SamplingParams
from tests.engine.test_graphs import FakeRecorder
from tests.engine.waits import Refused, Waited, watched

BLOCK = 16
REQUESTS = [
    Request(1, tuple(range(10, 40)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), seed=1),
    Request(2, (7, 8, 9), SamplingParams(temperature=0.8, top_p=0.9, max_tokens=15, ignore_eos=True), seed=2),
    Request(3, tuple(range(50, 63)), SamplingParams(temperature=1.2, top_k=9, max_tokens=9, n=2), seed=3),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    return from_checkpoint(Checkpoint.open(make_tiny(tmp_path_factory.mktemp("waits") / "tiny")), NUMERICS["float"])


def loop_of(model: DeepseekV41, *, ahead: bool, record: bool, device: str = "cpu") -> Loop:
    storage = Storage(model.cache_spec, 41, 7, device, block_tokens=BLOCK, states=4)
    cache = CacheManager(41, 7, BLOCK, prefix=True, snapshots=4)
    scheduler = Scheduler(
        cache,
        token_budget=64,
        max_context_tokens=model.max_positions,
        vocab_size=model.vocab_size,
        prefixes=Prefixes(windows=model.windows, mode="snapshot"),
    )
    sampler = Sampler(model.vocab_size, device)
    runner = Runner(model, storage, sampler, on_device=True, ahead=ahead, graph_rows=64)
    if record:
        runner.capture(FakeRecorder() if device == "cpu" else None)
    return Loop(scheduler, runner, ahead=ahead)


def answers(loop: Loop, requests: Sequence[Request]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for request in requests:
        loop.inbox.put(request)
    while loop.busy:
        loop.step()
        for event in loop.outbox.take():
            assert event.error is None
            found.setdefault((event.request, event.branch), []).extend(event.tokens)
    return found


@pytest.fixture(scope="module")
def usual(tiny: DeepseekV41) -> dict[tuple[int, int], list[int]]:
    return answers(loop_of(tiny, ahead=False, record=False), REQUESTS)


@pytest.mark.parametrize("record", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_decode_waits_for_nothing(
    tiny: DeepseekV41,
    usual: dict[tuple[int, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
    record: bool,
):
    loop = loop_of(tiny, ahead=ahead, record=record)
    with watched(loop, monkeypatch) as steps:
        assert answers(loop, REQUESTS) == usual
    assert len(steps) >= 12


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: bool(x.any()),
        lambda x: int(x[0, 0]),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, 0),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1, 2]),
        lambda x: x[0].repeat_interleave(x[0].abs()),
    ],
)
@pytest.mark.parametrize("place", ["begin", "end"])
def test_a_wait_is_seen(tiny: DeepseekV41, monkeypatch: pytest.MonkeyPatch, wait: Callable[..., Any], place: str):
    """Of each kind, where a step is begun and where its end is enqueued."""
    loop = loop_of(tiny, ahead=True, record=False)
    if place == "begin":
        decode = Runner._start_on_device

        def begin(self: Runner, plan: Any, uploads: Any) -> Any:
            wait(self.storage.tables)
            return decode(self, plan, uploads)

        monkeypatch.setattr(Runner, "_start_on_device", begin)
    else:
        finish = batches.finish

        def end(step: Any, storage: Storage, *rest: Any) -> Any:
            wait(storage.tables)
            return finish(step, storage, *rest)

        monkeypatch.setattr(batches, "finish", end)
    with pytest.raises(Waited), watched(loop, monkeypatch):
        answers(loop, REQUESTS)


def test_what_is_the_hosts_own_may_be_read():
    own, other = torch.zeros(4), torch.zeros(4)
    with Refused(lambda: [own]):
        assert own.tolist() == [*own[1:].numpy().tolist(), 0.0]
        with pytest.raises(Waited, match="tolist"):
            other.tolist()


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minnow() -> Callable[[str], DeepseekV41]:
    return cache(lambda numerics: from_checkpoint(Checkpoint.open("minnow"), NUMERICS[numerics], "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("record", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("numerics", ["reference", "production", "fast"])
def test_decode_on_a_gpu_waits_for_nothing(
    minnow: Callable[[str], DeepseekV41], monkeypatch: pytest.MonkeyPatch, numerics: str, ahead: bool, record: bool
):
    """Under torch's own watch: kernels and all. What is set up on first use has been."""
    model = minnow(numerics)
    want = answers(loop_of(model, ahead=False, record=False, device="cuda"), REQUESTS)
    loop = loop_of(model, ahead=ahead, record=record, device="cuda")
    with watched(loop, monkeypatch) as steps:
        assert {key: len(tokens) for key, tokens in answers(loop, REQUESTS).items()} == {
            key: len(tokens) for key, tokens in want.items()
        }
    assert len(steps) >= 12
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_a_wait_on_a_gpu_is_refused(minnow: Callable[[str], DeepseekV41], monkeypatch: pytest.MonkeyPatch):
    loop = loop_of(minnow("production"), ahead=True, record=False, device="cuda")
    finish = batches.finish

    def end(step: Any, storage: Storage, *rest: Any) -> Any:
        storage.tables.sum().item()
        return finish(step, storage, *rest)

    monkeypatch.setattr(batches, "finish", end)
    with pytest.raises(RuntimeError, match="synchroniz"), watched(loop, monkeypatch):
        answers(loop, REQUESTS)
