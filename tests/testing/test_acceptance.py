"""Replayed speculation: its law against the rule itself, its rounds against a drafter run token by token."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.engine.llm import LLM
from benthic.errors import BadConfigKey
from benthic.kernels import sample
from benthic.models import deepseek_v41_dspark
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.deepseek_v41_dspark import Choose, Draft, DSpark
from benthic.models.memory import PagedMemory
from benthic.models.weights import Checkpoint, write_checkpoint
from benthic.testing import acceptance
from benthic.testing.acceptance import Rounds, Text, replay_slot
from benthic.testing.checkpoints import random_tensors
from benthic.types import NUMERICS, SamplingParams
from tests.oracle.package import SLOT, Package, empty_batch
from tests.train.small import small_json

ONE = 2.0**53
CPU = torch.device("cpu")
FEW = (40, 41, 42, 43, 44)  # all that may be written where random weights must agree now and then


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = small_json(engram_compressed_vocab_size=512)
    return write_checkpoint(
        tmp_path_factory.mktemp("small") / "small", made, random_tensors(ModelConfig.from_json(made))
    )


def never() -> list[int]:
    return sorted(set(range(512)) - set(FEW))


# The law of a slot


def pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.softmax(3 * torch.randn(6, 8, generator=generator), -1) for _ in range(2))
    cut = p.clone()
    cut[:, :4] = 0  # the drafter offers what the target never says
    apart = torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0, 0.0]]), torch.tensor([[0, 0, 0.1, 0.2, 0.3, 0.4, 0, 0.0]])
    one = torch.eye(8)[:1], torch.eye(8)[3:4]
    rows = [(a[None], b[None]) for a, b in zip(p, q, strict=True)]
    rows += [(a[None] / a.sum(), b[None]) for a, b in zip(cut, q, strict=True)]
    return [*rows, (p[:1], p[:1]), apart, one, (one[0], one[0])]


def chance_of(p: Tensor, q: Tensor, wanted: int) -> float:
    """By bisection over the random bits: where `replay_slot` turns from accepting to refusing, in units of 2**-53."""
    low, high = 0, 1 << 53
    while low < high:
        middle = (low + high) // 2
        bits = torch.tensor([middle])
        _, accepted = replay_slot(p, q, torch.tensor([wanted]), torch.tensor([True]), bits, bits)
        low, high = (middle + 1, high) if bool(accepted) else (low, middle)
    return low / ONE


@pytest.mark.parametrize(("p", "q"), pairs())
def test_a_slot_has_the_law_of_the_rule(p: Tensor, q: Tensor) -> None:
    """Joint law of draft and emitted token, by enumeration: the replay's from the text's token, the rule's forward."""
    ps, qs = p[0].double(), q[0].double()
    overlap = torch.minimum(ps, qs)
    residual = (ps - qs).clamp(min=0)
    torch.testing.assert_close(overlap + residual, ps, atol=1e-6, rtol=0)  # what the rule emits is the target's

    grid = ((torch.arange(4096) + 0.5) / 4096 * ONE).to(torch.int64)
    many = grid.shape[0]
    for v in range(8):
        if ps[v] == 0:
            continue
        chance = chance_of(p, q, v)
        assert ps[v] * chance == pytest.approx(float(overlap[v]), abs=1e-6)
        assert ps[v] * (1 - chance) == pytest.approx(float(residual[v]), abs=1e-6)
        if chance >= 1:
            continue
        wanted, refuse = torch.full((many,), v), torch.full((many,), (1 << 53) - 1)
        alive = torch.ones(many, dtype=torch.bool)
        drafts, accepted = replay_slot(p.expand(many, -1), q.expand(many, -1), wanted, alive, refuse, grid)
        assert not accepted.any()
        got = torch.bincount(drafts, minlength=8).double() / many
        # forward: draft d is refused with q(d) - min(p, q)(d), whatever is emitted then
        excess = qs - overlap
        torch.testing.assert_close(got, excess / excess.sum(), atol=2 / 4096, rtol=0)


def test_after_a_refused_draft_the_drafter_goes_on_alone() -> None:
    p, q = (torch.softmax(torch.randn(1, 8), -1).expand(4096, -1) for _ in range(2))
    grid = ((torch.arange(4096) + 0.5) / 4096 * ONE).to(torch.int64)
    wanted = torch.full((4096,), 3)
    drafts, accepted = replay_slot(p, q, wanted, torch.zeros(4096, dtype=torch.bool), torch.zeros_like(grid), grid)
    assert not accepted.any()
    got = torch.bincount(drafts, minlength=8) / 4096
    torch.testing.assert_close(got, q[0], atol=2 / 4096, rtol=0)


# The law of rounds

VOCAB, DRAFTS = 4, 3
Table = list[list[float]]


def toy(seed: int) -> tuple[Tensor, Tensor]:
    """Target and drafter of first order: next-token distributions [V, V] by the token before."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.softmax(1.5 * torch.randn(VOCAB, VOCAB, generator=generator), -1) for _ in range(2))
    return p, q


def speculate(p: Table, q: Table, rng: random.Random) -> tuple[int, list[int]]:
    """Plain speculation, forward, until three tokens are there: what the first round accepted, and the tokens."""
    ids, emitted = range(VOCAB), [0]  # the anchor
    first = -1
    while len(emitted) < 4:
        drafts = list(itertools.accumulate(range(DRAFTS), lambda d, _: rng.choices(ids, q[d])[0], initial=emitted[-1]))
        accepted = 0
        for before, draft in itertools.pairwise(drafts):
            target, proposal = p[before], q[before]
            if rng.random() >= target[draft] / proposal[draft]:
                residual = [max(a - b, 0) for a, b in zip(target, proposal, strict=True)]
                emitted.append(rng.choices(ids, residual)[0])
                break
            emitted.append(draft)
            accepted += 1
        else:
            emitted.append(rng.choices(ids, p[emitted[-1]])[0])
        first = accepted if first < 0 else first
    return first, emitted[1:4]


def replayed(p: Tensor, q: Tensor, count: int, seed: int) -> list[tuple[int, list[int]]]:
    """The same from texts of the target."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.zeros(count, dtype=torch.int64)]
    for _ in range(DRAFTS):
        tokens.append(torch.multinomial(p[tokens[-1]], 1, generator=generator)[:, 0])
    previous, alive = tokens[0], torch.ones(count, dtype=torch.bool)
    accepted, numbers = torch.zeros(count, dtype=torch.int64), torch.arange(count) + (seed << 32)
    for k in range(DRAFTS):
        keys = numbers, torch.full_like(numbers, k)
        bits = [sample.random_bits(*keys, purpose) for purpose in (sample.ACCEPT, sample.RESIDUAL)]
        previous, alive = replay_slot(p[tokens[k]], q[previous], tokens[k + 1], alive, *bits)
        accepted += alive
    return list(zip(accepted.tolist(), torch.stack(tokens[1:4], 1).tolist(), strict=True))


def cells(outcomes: list[tuple[int, list[int]]]) -> np.ndarray:
    flat = [((m * VOCAB + a) * VOCAB + b) * VOCAB + c for m, (a, b, c) in outcomes]
    return np.bincount(flat, minlength=(DRAFTS + 1) * VOCAB**3).astype(float)


def chi_square(one: np.ndarray, two: np.ndarray) -> tuple[float, int]:
    """Two samples of one size against each other: the statistic and its degrees of freedom; small cells together."""
    both = one + two
    small = both < 20
    columns = [np.append(x[~small], x[small].sum()) for x in (one, two)]
    kept = columns[0] + columns[1] > 0
    a, b = (x[kept] for x in columns)
    return float(((a - b) ** 2 / (a + b)).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_replayed_rounds_have_the_law_of_speculation(seed: int) -> None:
    """What the first round accepts, jointly with the first three tokens: forward by the rule and replayed."""
    p, q = toy(seed)
    rng, count = random.Random(seed), 20_000
    forward = cells([speculate(p.tolist(), q.tolist(), rng) for _ in range(count)])
    statistic, free = chi_square(forward, cells(replayed(p, q, count, seed)))
    assert free > 60
    assert statistic < free + 3.1 * (2 * free) ** 0.5  # p > 1e-3
    # and the text is the target's
    exact = [p[0, a] * p[a, b] * p[b, c] for a, b, c in itertools.product(range(VOCAB), repeat=3)]
    plain = forward.reshape(DRAFTS + 1, -1).sum(0)
    expected = np.array([float(x) for x in exact]) * count
    free = len(expected) - 1
    assert ((plain - expected) ** 2 / expected).sum() < free + 3.1 * (2 * free) ** 0.5


def test_the_test_sees_a_wrong_rule() -> None:
    """A replay that accepts with q instead of min(1, q/p) is told apart."""
    p, q = toy(1)
    rng, count = random.Random(1), 20_000
    forward = cells([speculate(p.tolist(), q.tolist(), rng) for _ in range(count)])
    wrong = cells(replayed(p, (q + p) / 2, count, 1))
    statistic, free = chi_square(forward, wrong)
    assert statistic > free + 10 * (2 * free) ** 0.5


# Rounds against a drafter run token by token


def texts() -> list[Text]:
    """Shorter and longer than the window of 16, ended and cut; the second has nothing to draft."""
    rng = np.random.default_rng(3)
    made = [
        Text(tuple(rng.choice(FEW, prompt + written).tolist()), prompt, ended)
        for prompt, written, ended in ((3, 24, True), (5, 1, True), (21, 15, False), (1, 2, False), (14, 9, True))
    ]
    return made


def by_hand(folder: Path, text: Text, temperature: float) -> list[dict[str, Any]]:
    """Rounds of one text: every draft from a sequence run anew up to its anchor, every decision spelled out."""
    package = Package(folder, "float")
    mask = torch.full((512,), -torch.inf)
    mask[list(FEW)] = 0.0
    package.reset()
    logits = torch.from_numpy(package.step(text.ids)).float() + mask
    out: list[dict[str, Any]] = []
    at, last = text.prompt_tokens, len(text.ids) - 1
    while at < last:
        package.run(text.ids[:at], [at])
        checked = min(5, last - at - (not text.ended))
        state: dict[str, Any] = {"alive": True, "accepted": 0, "overlap": []}

        def choose(
            drafted: Tensor, i: int, state: dict[str, Any] = state, at: int = at, checked: int = checked
        ) -> Tensor:
            state["alive"] = state["alive"] and i < checked
            wanted = text.ids[min(at + 1 + i, last)]
            q = torch.softmax((drafted[0] + mask) / (temperature or 1.0), -1)
            p = torch.softmax(logits[min(at + i, last)] / (temperature or 1.0), -1)
            if state["alive"]:
                state["overlap"].append(float(torch.minimum(p, q).sum()))
            best = int((drafted[0] + mask).argmax())
            state["alive"] = state["alive"] and (best == wanted if temperature == 0 else True)
            state["accepted"] += state["alive"]
            return torch.tensor([best if temperature == 0 else wanted])

        with torch.inference_mode():
            anchor, before = torch.tensor([text.ids[at]]), torch.tensor([at - 1])
            rings = package_rings(package)
            draft = package.drafter.draft(package.model, rings, torch.tensor([SLOT]), anchor, before, choose)
        emitted = min(state["accepted"] + 1, last - at)
        out.append(
            {"at": at, "checked": checked, "emitted": emitted, "confidence": draft.confidence[0].tolist(), **state}
        )
        at += emitted
    return out


def package_rings(package: Package) -> list[Any]:
    memory = PagedMemory(package.config, package.plan, package.numerics, package.storage, empty_batch())
    return [memory.ring(plan.index) for plan in package.drafter.plan]


def of_folder(folder: Path) -> tuple[DeepseekV41, DSpark]:
    opened = Checkpoint.open(folder)
    return from_checkpoint(opened, NUMERICS["float"]), deepseek_v41_dspark.from_checkpoint(opened, NUMERICS["float"])


def test_greedy_rounds_are_those_of_a_drafter_run_token_by_token(folder: Path) -> None:
    model, drafter = of_folder(folder)
    seen: list[tuple[int, int]] = []
    found = acceptance.rounds(model, drafter, texts(), 0.0, 0, CPU, never(), lambda *news: seen.append(news))
    assert seen[-1] == (46, 46)  # all but the first token of each text
    for i, text in enumerate(texts()):
        want, own = by_hand(folder, text, 0.0), found.of([i])
        assert own.submitted.tolist() == [r["checked"] for r in want]
        assert own.accepted.tolist() == [r["accepted"] for r in want]
        assert own.emitted.sum() == max(len(text.written) - 1, 0)
        for got, r in zip(own.confidence, want, strict=True):
            assert got == pytest.approx(r["confidence"], abs=1e-4)
        assert np.isnan(own.analytic).all()
    assert 0 < found.accepted.sum() < found.submitted.sum()


def test_sampled_rounds_measure_the_overlap_of_both_distributions(folder: Path) -> None:
    """With a drafter that is always right the path is the text, and every slot can be checked by hand."""
    model, drafter = of_folder(folder)
    temperature = 0.7
    for i, text in enumerate(texts()):
        found = acceptance.rounds(model, drafter, [text], temperature, i, CPU, never())
        assert found.emitted.sum() == max(len(text.written) - 1, 0)
        at = text.prompt_tokens
        for r in range(len(found.text)):
            # by hand from the same anchor, along the text: what was alive is a prefix of it
            (want,) = by_hand(folder, text._replace(prompt_tokens=at), temperature)[:1]
            alive = min(int(found.accepted[r]) + 1, int(found.submitted[r]))
            assert found.submitted[r] == want["checked"]
            assert found.analytic[r, :alive] == pytest.approx(want["overlap"][:alive], abs=1e-4)
            assert np.isnan(found.analytic[r, alive:]).all()
            sure = min(int(found.accepted[r]) + 1, 5)
            assert found.confidence[r, :sure] == pytest.approx(want["confidence"][:sure], abs=1e-4)
            at += int(found.emitted[r])


def test_decisions_agree_with_the_overlap_on_the_average(folder: Path) -> None:
    model, drafter = of_folder(folder)
    with LLM(folder, numerics="float", cpu__threads=1) as llm:
        params = SamplingParams(max_tokens=60, allowed_ids=FEW, ignore_eos=True, seed=1)
        prompts = [[0, 40 + i % 5] for i in range(24)]
        written = llm.generate(prompts, params)
    sampled = [Text((*done.prompt_token_ids, *done.token_ids), 2, False) for done in written]
    found = acceptance.rounds(model, drafter, sampled, 1.0, 9, CPU, never())
    summary = acceptance.acceptance(found)
    for slot in summary["slots"][:3]:
        reached = slot["checked"] * (slot["unconditional"] / slot["conditional"])
        spread = (slot["analytic"] * (1 - slot["analytic"]) / reached) ** 0.5
        assert slot["conditional"] == pytest.approx(slot["analytic"], abs=3.5 * spread)
    assert summary["tokens"] == 24 * 59


# The ends of the scale


class Lookup:
    """A drafter that proposes from the target's own distributions over the text, read off beforehand."""

    def __init__(self, logits: list[Tensor]):
        self.logits = logits

    def observe(self, rings: Any, taps: tuple[Tensor, ...], slots: Tensor, positions: Tensor) -> None:
        assert positions[0] == 0

    def draft(
        self, backbone: Any, rings: Any, slots: Tensor, anchors: Tensor, last: Tensor, choose: Choose, block: int = 5
    ) -> Draft:
        at, out = (last + 1).tolist(), []
        for i in range(block):
            rows = [self.logits[slot - 1] for slot in slots.tolist()]
            logits = torch.stack([row[min(p + i, len(row) - 1)] for row, p in zip(rows, at, strict=True)])
            out.append((choose(logits, i), logits))
        tokens, logits = (torch.stack(column, 1) for column in zip(*out, strict=True))
        return Draft(tokens, logits, torch.zeros(tokens.shape))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_knows_the_target_is_always_taken(folder: Path, temperature: float) -> None:
    with LLM(folder, numerics="float", cpu__threads=1) as llm:
        prompts = [[0, 7, 8, 9], [0, 30, 31], [0, 200]]
        known = acceptance.write(llm, prompts, temperature, 37, 4, acceptance.silent)
        package = Package(folder, "float")
        logits = []
        for text in known:
            package.reset()
            logits.append(torch.from_numpy(package.step(text.ids)).float())
        found = acceptance.measure(llm, prompts, temperature, 37, 4, drafter=Lookup(logits))
    assert found.texts == known
    summary = acceptance.acceptance(found.rounds)
    assert summary["acceptance_length"] == 6.0  # 36 tokens after the first of each text
    assert all(slot["conditional"] == slot["unconditional"] == 1.0 for slot in summary["slots"])
    if temperature:
        assert all(slot["analytic"] == pytest.approx(1.0, abs=1e-4) for slot in summary["slots"])


@pytest.mark.parametrize(("temperature", "most"), [(0.0, 1.1), (1.0, 2.0)])  # at T = 1 both are nearly flat
def test_random_weights_are_hardly_ever_taken(folder: Path, temperature: float, most: float) -> None:
    with LLM(folder, numerics="reference", cpu__threads=1) as llm:
        seen: list[tuple[int, int]] = []
        prompts = [[0, i] for i in range(3, 11)]
        found = acceptance.measure(llm, prompts, temperature, 40, 0, written=lambda *news: seen.append(news))
    assert seen == [(i, 8) for i in range(1, 9)]
    summary = acceptance.acceptance(found.rounds)
    assert 1.0 <= summary["acceptance_length"] < most
    assert summary["tokens"] == sum(len(text.written) - 1 for text in found.texts)


def test_no_prompts_no_rounds(folder: Path) -> None:
    with LLM(folder, numerics="float", cpu__threads=1) as llm:
        found = acceptance.measure(llm, [], 1.0, 40, 0)
    assert found.texts == []
    summary = acceptance.acceptance(found.rounds)
    assert (summary["rounds"], summary["tokens"], summary["acceptance_length"]) == (0, 0, None)
    assert acceptance.calibration(found.rounds, [1.0] * 5)[0]["ece"] is None


def test_a_checkpoint_without_a_drafter_is_refused(tmp_path: Path) -> None:
    data = small_json(num_nextn_predict_layers=0, compress_ratios=[0, 2, 1, 1], engram_compressed_vocab_size=512)
    folder = write_checkpoint(tmp_path / "plain", data, random_tensors(ModelConfig.from_json(data)))
    with LLM(folder, numerics="float", cpu__threads=1) as llm, pytest.raises(BadConfigKey, match="no drafter"):
        acceptance.measure(llm, [[0, 5]], 0.0, 4, 0)


# Sums


def made(submitted: Sequence[int], accepted: Sequence[int], confidence: Any, analytic: Any) -> Rounds:
    emitted = np.array(accepted) + 1
    return Rounds(
        np.arange(len(emitted)) % 2,
        np.array(submitted),
        np.array(accepted),
        emitted,
        np.array(confidence, dtype=np.float32),
        np.array(analytic, dtype=np.float32),
    )


def test_shares_count_what_was_checked_and_reached() -> None:
    none = np.nan
    found = made(
        [2, 2, 2, 1, 0], [2, 0, 1, 1, 0], np.zeros((5, 2)),
        [[0.5, 0.3], [0.1, none], [0.7, 0.9], [0.9, none], [none, none]],
    )  # fmt: skip
    summary = acceptance.acceptance(found)
    assert (summary["rounds"], summary["tokens"], summary["acceptance_length"]) == (5, 9, 1.8)
    assert summary["accepted_of_checked"] == 4 / 7
    first, second = summary["slots"]
    assert (first["checked"], first["conditional"], first["unconditional"]) == (4, 0.75, 0.75)
    assert first["analytic"] == pytest.approx(0.55)
    assert (second["checked"], second["conditional"], second["unconditional"]) == (3, 0.5, 1 / 3)
    assert second["analytic"] == pytest.approx(0.6)
    half = acceptance.acceptance(found.of([1]))
    assert (half["rounds"], half["tokens"]) == (2, 3)


def test_survival_is_the_product_of_divided_confidences() -> None:
    logits = [[0.0, 2.0], [-1.0, 1e5]]
    chance = acceptance.survival(made([2, 2], [0, 0], logits, np.zeros((2, 2))), [2.0, 4.0])
    first = [1 / (1 + np.exp(-x[0] / 2.0)) for x in logits]
    assert chance[:, 0] == pytest.approx(first)
    assert chance[:, 1] == pytest.approx([first[0] / (1 + np.exp(-0.5)), first[1]], rel=1e-6)


def test_calibration_error_is_that_of_bins() -> None:
    rng = np.random.default_rng(0)
    forecast = np.append(rng.random(500), [0.0, 1.0, 0.05, 0.95]).astype(np.float32)
    happened = rng.random(504) < forecast**2
    want = 0.0
    for b in range(20):
        inside = (forecast >= b / 20) & (forecast < (b + 1) / 20 if b < 19 else forecast <= 1)
        if inside.any():
            want += inside.mean() * abs(forecast[inside].mean() - happened[inside].mean())
    assert acceptance.expected_error(forecast, happened) == pytest.approx(want, abs=2e-3)
    assert acceptance.expected_error(forecast, forecast > 2) == pytest.approx(float(forecast.mean()), rel=1e-5)


def test_area_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(1)
    forecast = (rng.integers(0, 12, 60) / 12).astype(np.float32)  # with ties
    happened = rng.random(60) < forecast
    pairs = [(a > b) + 0.5 * (a == b) for a in forecast[happened] for b in forecast[~happened]]
    assert acceptance.area(forecast, happened) == pytest.approx(np.mean(pairs))
    assert acceptance.area(forecast, forecast > 2) is None
    assert acceptance.area(forecast[:0], happened[:0]) is None


def test_calibration_counts_checked_slots_alone() -> None:
    found = made([2, 1, 2], [2, 1, 0], [[9.0, 9.0], [9.0, -9.0], [-9.0, -9.0]], np.zeros((3, 2)))
    first, second = acceptance.calibration(found, [1.0, 1.0])
    assert first["ece"] == pytest.approx(0, abs=1e-3)
    assert second["ece"] == pytest.approx(0, abs=1e-3)  # the unchecked slot of the second round is no mistake
    assert (first["auroc"], second["auroc"]) == (1.0, 1.0)
    assert first["brier"] < 1e-6
