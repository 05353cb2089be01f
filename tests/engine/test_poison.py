"""A request whose state is damaged fails alone: batch mates and later prompts have the bits they would have anyway."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benthic.engine.llm import LLM
from benthic.engine.receipt import Receipt
from benthic.errors import NonFiniteLogits
from benthic.kernels.native import build
from benthic.testing.checkpoints import make_tiny
from benthic.types import SamplingParams, StepPlan

pytestmark = pytest.mark.skipif(not build.status().available, reason="plain torch promises no bits")

STEM = list(range(300, 440))  # a cached block, and a piece
PROMPTS = [[*STEM, 7 * i, 9 * i + 1] for i in range(1, 5)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=12, receipt=True)
VICTIM = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("poison") / "tiny", sliding_window=8)


@pytest.fixture(params=["off", "on"], ids=["one by one", "ahead"])
def llm(tiny: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny, deterministic=True, cpu__threads=1, cache__blocks=40, scheduler__ahead=request.param) as llm:
        yield llm


def ask(llm: LLM) -> list[Any]:
    params = [replace(PARAMS, seed=i, receipt=True) for i in range(len(PROMPTS))]
    return llm.generate(PROMPTS, params, progress=False)


@pytest.mark.parametrize("at", [1, 7], ids=["as it begins", "on the way"])
def test_what_is_damaged_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int):
    """The victim's slot is filled with NaN before the step of one of its tokens."""
    want: list[Receipt | None] = [done.receipt for done in ask(llm)]
    runner, steps = llm.loop.runner, 0
    start = runner.start
    first = llm.loop.scheduler._order

    def damaging(plan: StepPlan) -> Any:
        nonlocal steps
        for chunk in plan.chunks:
            if chunk.request in ids and ids.index(chunk.request) == VICTIM and len(chunk.tokens) == 1:
                steps += 1
                if steps == at:
                    for ring in llm.loop.runner.storage.rings.values():  # type: ignore[attr-defined]
                        ring[chunk.slot].fill_(0xFF)
        return start(plan)

    ids: list[int] = []
    put = llm.loop.inbox.put

    def noted(message: Any) -> None:
        if hasattr(message, "prompt"):
            ids.append(message.id)
        put(message)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "start", damaging)
        patch.setattr(llm.loop.inbox, "put", noted)
        found = ask(llm)
    assert llm.loop.scheduler._order == first + len(PROMPTS)
    bad = found[VICTIM]
    assert isinstance(bad.error, NonFiniteLogits)
    assert bad.receipt is None
    assert len(bad.token_ids) < PARAMS.max_tokens
    good = [i for i in range(len(PROMPTS)) if i != VICTIM]
    assert [found[i].receipt for i in good] == [want[i] for i in good]
    # what it left in the cache is what it computed before; its slot is as good as new
    assert [done.receipt for done in ask(llm)] == want
    llm.loop.scheduler.check_invariants()
    assert not llm.loop.busy


def test_no_state_is_kept_of_a_step_that_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """The step that completes a block and would leave its state, and its key, is the one that fails."""
    prompt = list(range(500, 500 + 127))
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=1, receipt=True)
    want = llm.generate([prompt], params, progress=False)[0].receipt
    logits, calls = llm.model.logits, 0

    def damaged(hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        found = logits(hidden)
        if calls == 2:  # token 128 is the row
            found.fill_(float("nan"))
        return found

    other = [*prompt[:-1], 9]
    cache = llm.loop.scheduler.cache
    before = cache.cached_blocks, len(cache.snapshots), len(cache.snapshots._free)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "logits", damaged)
        with pytest.raises(NonFiniteLogits):
            llm.generate([other], params, progress=False)
    assert (cache.cached_blocks, len(cache.snapshots), len(cache.snapshots._free)) == before
    assert llm.generate([prompt], params, progress=False)[0].receipt == want
