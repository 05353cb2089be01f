"""Probes: each against a model that is built that way, or against a slow count; nothing of them stays behind."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.kernels import engram, fused, moe_gate
from benthic.models.deepseek_v41 import DeepseekV41
from benthic.testing import probe
from benthic.testing.checkpoints import make_tiny
from benthic.types import Chunk, SamplingParams, StepPlan

TEXTS = [[3 + (i * i * 37 + i * seed) % 4000 for i in range(length)] for seed, length in ((5, 90), (11, 170))]
ASK = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
SMALL = {"index_topk": 16, "candidate_topk_blocks": 8}  # so that short texts have more entries than are chosen

Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """The tiny model; keys of its configuration and settings of the engine can be replaced, its weights stay."""
    opened: list[LLM] = []

    @cache
    def checkpoint(topk: int, blocks: int) -> Path:
        folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
        return make_tiny(folder, index_topk=topk, candidate_topk_blocks=blocks)

    @cache
    def make(topk: int = SMALL["index_topk"], blocks: int = SMALL["candidate_topk_blocks"], budget: int = 1024) -> LLM:
        opened.append(
            LLM(
                checkpoint(topk, blocks),
                numerics="float",
                cpu__threads=1,
                cache__prefix=False,
                scheduler__token_budget=budget,
            )
        )
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def scores(llm: LLM, texts: Sequence[Sequence[int]] = TEXTS) -> torch.Tensor:
    done = llm.generate(texts, ASK, progress=False)
    return torch.tensor([entry.logprob for one in done for entry in one.prompt_logprobs])


def test_dense_visibility_is_a_top_k_that_takes_all(llm: Open) -> None:
    plain = scores(llm())
    with probe.sees(llm(), probe.everything):
        dense = scores(llm())
    torch.testing.assert_close(dense, scores(llm(topk=512, blocks=512)), rtol=0, atol=2e-4)
    assert (dense - plain).abs().max() > 0.01, "the top-k was not in force"
    assert torch.equal(scores(llm()), plain), "something of the probe stayed"


def test_a_random_choice_is_of_the_same_size_and_the_same_in_any_chunks(llm: Open) -> None:
    seen: list[tuple[probe.Sight, torch.Tensor]] = []

    def watched(sight: probe.Sight) -> torch.Tensor:
        seen.append((sight, probe.at_random(3)(sight)))
        return seen[-1][1]

    with probe.sees(llm(), watched):
        drawn = scores(llm())
    assert {sight.layer for sight, _ in seen} == {2, 4, 6, 8}
    for sight, entries in seen:
        assert torch.equal((entries >= 0).sum(1), sight.visible.clamp(max=sight.topk))
        assert (entries < sight.visible[:, None]).all()
        rises = entries[:, 1:] > entries[:, :-1]
        assert (rises | (entries[:, 1:] < 0)).all(), "ascending, without repeats"
    later = [(s, e) for s, e in seen if s.layer == 6 and len(s.ids) > 160]
    (sight, entries) = later[0]
    share = torch.bincount(entries[-60:].flatten().clamp(min=0), minlength=200)[1:110].float()
    assert share.max() < 6 * share.mean(), "far from uniform"
    with probe.sees(llm(), probe.at_random(3)):
        assert torch.equal(scores(llm()), drawn)
    with probe.sees(llm(budget=48), probe.at_random(3)):
        torch.testing.assert_close(scores(llm(budget=48)), drawn, rtol=0, atol=2e-4)
    with probe.sees(llm(), probe.at_random(4)):
        assert (scores(llm()) - drawn).abs().max() > 0.01


@torch.inference_mode()
def test_both_forms_of_a_step_see_the_same(llm: Open) -> None:
    model = llm().model
    assert isinstance(model, DeepseekV41)
    ids = tuple(TEXTS[1])

    def logits(on_device: bool) -> torch.Tensor:
        storage = Storage(model.cache_spec, 5, 2)
        found: list[torch.Tensor] = []
        for start, end in ((0, 70), (70, len(ids))):
            plan = StepPlan(0, (Chunk(0, start, ids[start:end], 0, False, 1, (3, 1)),), ())
            batch = batches.Uploads(storage).step(plan).batch if on_device else batches.build(plan, storage)
            found.append(model.logits(model.forward(batch, model.memory(storage, batch)).hidden))
            batches.remember(batch, storage)
        return torch.cat(found)

    for choose in (probe.everything, probe.at_random(7)):
        with probe.sees(llm(), choose):
            torch.testing.assert_close(logits(True), logits(False), rtol=0, atol=1e-3)


def test_without_engram_nothing_is_added(llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = scores(llm())
    with probe.without_engram(llm()):
        off = scores(llm())
    assert (off - plain).abs().max() > 0.01
    assert torch.equal(scores(llm()), plain)
    monkeypatch.setattr(engram, "engram_gate", lambda s, *rest: s)
    torch.testing.assert_close(off, scores(llm()), rtol=0, atol=1e-4)


def test_loads_are_what_the_router_says(llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with probe.expert_loads(llm()) as loads:
        scores(llm())
    counted = [load.clone() for load in loads]
    scores(llm())
    assert all(torch.equal(a, b) for a, b in zip(loads, counted, strict=True)), "it counts after the block"
    chosen: list[torch.Tensor] = []
    plain = moe_gate.route

    def route(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = plain(*args)  # type: ignore[arg-type]
        chosen.append(ids)
        return ids, weights

    monkeypatch.setattr(moe_gate, "route", route)
    with fused.apart():
        scores(llm())
    layers = len(counted)
    rows = sum(map(len, TEXTS))
    for i, load in enumerate(counted):
        want = torch.cat([ids.flatten() for ids in chosen[i::layers]])
        assert int(load.sum()) == 4 * rows == len(want)
        assert torch.equal(load, torch.bincount(want, minlength=16))


def test_a_kept_prefix_would_reach_across(tmp_path: Path) -> None:
    with LLM(make_tiny(tmp_path / "tiny"), cpu__threads=1) as keeping:
        for probing in (
            probe.sees(keeping, probe.everything),
            probe.without_engram(keeping),
            probe.expert_loads(keeping),
        ):
            with pytest.raises(BenchError, match=r"stays in the cache; set cache\.prefix to false"), probing:
                pass


def test_a_graph_would_hide_a_probe(llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm().loop.runner, "_graphs", object())
    for probing in (probe.sees(llm(), probe.everything), probe.without_engram(llm()), probe.expert_loads(llm())):
        with pytest.raises(BenchError, match=r"CUDA graphs; set gpu\.graphs to false"), probing:
            pass
