"""What the gate looks at, what it says, and what it remembers. That it bites is `test_faults.py`."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benthic import gate
from benthic.config import Config
from benthic.engine.llm import LLM
from benthic.errors import BadGoldens, GateFailed
from benthic.gate import Outcome, Verdict
from benthic.kernels import backends, gemm, moe_experts, moe_gate
from benthic.models.deepseek_v41 import from_checkpoint
from benthic.models.deepseek_v41_config import ModelConfig, TextConfig, layer_plan
from benthic.models.modules import Linear, packed_weights
from benthic.models.weights import Checkpoint, write_checkpoint
from benthic.testing import answers, goldens, layers
from benthic.testing.checkpoints import make_tiny, random_tensors, tiny_config
from benthic.testing.ops import Line
from benthic.testing.tolerances import SUMS
from benthic.types import NUMERICS, Chunk
from tests.gate.conftest import SMALL, settings


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(gate, "LEVELS", {name: gate.LEVELS[name] for name in names})


def verdict(folder: Path, **overrides: object) -> Verdict:
    with LLM(config=settings(folder, **overrides)) as llm:
        return gate.run(llm, seed=1)


# ---- levels ----------------------------------------------------------------------------------------------------------


def test_what_is_right_passes_at_every_level(golden: Path) -> None:
    found = verdict(golden)
    assert found.passed, [(o.level, o.deviates) for o in found.outcomes]
    assert [outcome.level for outcome in found.outcomes] == list(gate.LEVELS)
    assert not any(outcome.skipped for outcome in found.outcomes)
    names = {line.name for outcome in found.outcomes for line in outcome.lines}
    for part in (
        "loaded, layers.0.attn.freqs",
        "index_select: entries, choice",
        "layer 4, n-gram memory",
        "layer 6, candidates",
        "layer 9, experts, driven rows",
        "head",
        "draws from fixed logits",
        "preempted and resumed",
        "what the drafter sees",
    ):
        assert part in names
    assert all(line.margin <= 1 for outcome in found.outcomes for line in outcome.lines)
    assert found.require() is found


def test_without_goldens_the_reference_serves_and_the_rest_says_why_not(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "bytes", "layers", "text", "depth", "drafts")
    found = verdict(bare)
    assert found.passed
    by_name = {outcome.level: outcome for outcome in found.outcomes}
    assert {name for name, outcome in by_name.items() if outcome.skipped} == {"text", "depth", "drafts"}
    assert "--make-goldens" in by_name["text"].skipped
    assert len(by_name["bytes"].lines) == 10 + 3, "every layer, and what is outside of layers"
    assert any(line.name == "layer 9, streams" for line in by_name["layers"].lines)


def test_of_a_large_checkpoint_some_layers_are_looked_at(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind, and what they read; the reference keeps their weights packed."""
    monkeypatch.setattr(gate, "LARGE_BYTES", 0)
    only(monkeypatch, "bytes", "layers")
    found = verdict(bare)
    assert found.passed
    seen = {line.name.split(",")[0] for line in found.outcomes[1].lines}
    assert seen == {f"layer {i}" for i in (0, 1, 2, 3, 4, 6, 7, 8, 9)}
    assert any(line.name == "loaded, layers.8" for line in found.outcomes[0].lines)


def test_steps_in_the_form_of_a_gpu_pass_the_same_levels(golden: Path) -> None:
    """Here on the plain references, where nothing else serves their ops; entries of a layer have the same numbers."""
    with LLM(config=settings(golden)) as llm:
        subject = gate.Subject(llm, "quick", lambda _: None, 1)
        subject.on_device = True
        lines = [line for level in ("ops", "layers") for line in gate.LEVELS[level](subject)]
    assert not [line for line in lines if not line.passed]
    names = {line.name for line in lines}
    assert {"select_records: entries, choice", "compress_store: codes", "attend", "layer 9, streams"} <= names


def test_a_profile_without_goldens_is_told(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "text")
    found = verdict(golden, numerics="production")
    assert found.outcomes[0].skipped == "the goldens have no profile production"


class Sums:
    """Products of FP8 operands whose sums are off as a matrix unit's are."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def off(self, exact: Tensor) -> Tensor:
        noise = torch.randn(exact.shape, generator=self.generator)
        return exact + SUMS * exact.square().mean(-1, keepdim=True).sqrt() * noise

    def linear(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.off(x.float() @ weight.float().T).to(out_dtype or x.dtype)

    def grouped_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.off(torch.einsum("tgk,gnk->tgn", x.float(), weight.float())).to(x.dtype)


def test_what_sums_of_a_matrix_unit_move_turns_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of `fast` are within bounds where FP8 sums are off, since they go on from the reference's values where
    those choose; and what is wrong behind such a place is still seen."""
    with LLM("minnow", numerics="fast", cpu__threads=1) as llm, torch.inference_mode(), backends.reference():
        subject = gate.Subject(llm, "quick", lambda _: None, seed=1)
        subject.fp8 = True
        whole = gate._reference_run(subject, layers.probe(subject.checkpoint.config, goldens.SEED))
        monkeypatch.setattr(gate, "_reference_run", lambda *_: whole)
        sums, plain = Sums(), Linear.forward
        monkeypatch.setattr(
            Linear, "forward", lambda m, x: sums.linear(x, m.weight) if m.store == "fp8" else plain(m, x)
        )
        monkeypatch.setattr(gemm, "grouped_linear", sums.grouped_linear)
        monkeypatch.setattr(moe_experts, "gemm", sums)

        def deviates() -> list[str]:
            return [line.name for line in gate.layers_level(subject) if not line.passed]

        assert deviates() == []
        route = moe_gate.route

        def louder(*args: Any) -> tuple[Tensor, Tensor]:
            ids, weights = route(*args)
            return ids, 1.2 * weights

        with monkeypatch.context() as patch:
            patch.setattr(moe_gate, "route", louder)
            found = deviates()
        assert found[0] == "layer 0, experts"
        assert all("experts" in name or "streams" in name for name in found)
        monkeypatch.setattr(layers, "FED", ())
        assert {"layer 1, mixes", "layer 4, mixes"} <= set(deviates())


def test_goldens_of_other_weights_are_refused(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "bytes")
    other = make_tiny(tmp_path / "other", seed=1, **SMALL)
    for name in (goldens.JSON, goldens.TENSORS):
        shutil.copy(golden / name, other)
    found = verdict(other)
    assert not found.passed
    assert [line.name.split(",")[0] for line in found.outcomes[0].lines if not line.passed] == [
        "file",
        "file",
        "loaded",
    ]
    with pytest.raises(GateFailed, match="bytes, file, "):
        found.require()


def test_a_level_that_cannot_be_computed_is_a_finding(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(s: gate.Subject) -> Iterator[Line]:
        yield Line("ops", "first", 1, 0.0, 1.0, "")
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gate, "LEVELS", {"ops": broken, "layers": gate.LEVELS["layers"]})
    found = verdict(golden)
    assert [outcome.level for outcome in found.outcomes] == ["ops"], "what rests on it is not looked at"
    assert [line.passed for line in found.outcomes[0].lines] == [True, False]
    with pytest.raises(GateFailed, match="no kernel image"):
        found.require()


def test_weights_have_one_digest_whatever_their_form(golden: Path) -> None:
    checkpoint = Checkpoint.open(golden)
    plain = from_checkpoint(checkpoint, NUMERICS["reference"])
    wide = from_checkpoint(checkpoint, NUMERICS["float"])
    with packed_weights():
        packed = from_checkpoint(checkpoint, NUMERICS["production"])
    found = [
        {item.name: goldens.digest(item.value) for item in goldens.loaded(model) if item.value is not None}
        for model in (plain, wide, packed)
    ]
    assert found[0] == found[1] == found[2]
    assert "layers.3.ffn.w13, expert 3" in found[0]
    packed.layers[5].attn.wq_b.packed.scales[0, 0] += 1  # type: ignore[union-attr]
    changed = {item.name: goldens.digest(item.value) for item in goldens.loaded(packed) if item.value is not None}
    assert {name for name in changed if changed[name] != found[0][name]} == {"layers.5.attn.wq_b.weight"}


# ---- goldens ---------------------------------------------------------------------------------------------------------


def test_goldens_read_back(golden: Path) -> None:
    known = goldens.read(golden)
    assert known is not None
    assert known.about["checkpoint"] == Checkpoint.open(golden).digest()
    assert known.profile("reference") is not None
    assert known.profile("float") is None
    assert len(known.rows()) == 11
    assert len(known.rows()[0].codes) == layers.KEPT_ROWS + 1
    assert sum((golden / name).stat().st_size for name in (goldens.JSON, goldens.TENSORS)) < 150_000


def test_making_them_again_gives_the_same(golden: Path) -> None:
    """The part that is cheap: what layers compute."""
    known = goldens.read(golden)
    assert known is not None
    with LLM(config=goldens.config_for(settings(golden), "reference")) as llm, gate.backends.reference():
        again = goldens.layer_sketches(llm.model, known.rows(), "reference")  # type: ignore[arg-type]
    stored = {name: value for name, value in known.tensors.items() if name in again}
    assert len(stored) == len(again) > 100
    assert all(torch.equal(value, again[name]) for name, value in stored.items())


@pytest.mark.parametrize("name", [goldens.JSON, goldens.TENSORS])
def test_damaged_goldens_are_a_typed_error(copy: Path, name: str) -> None:
    raw = bytearray((copy / name).read_bytes())
    raw[len(raw) // 2] ^= 4
    (copy / name).write_bytes(raw)
    if name == goldens.JSON:
        (copy / name).write_bytes(raw[: len(raw) // 2])
    with LLM(config=settings(copy)) as llm, pytest.raises(BadGoldens, match="make"):
        gate.run(llm)
    (copy / name).unlink()
    with pytest.raises(BadGoldens):
        goldens.read(copy)


def test_a_checkpoint_that_is_written_anew_loses_its_goldens(copy: Path) -> None:
    config = tiny_config(**SMALL)
    write_checkpoint(copy, config, random_tensors(Checkpoint.open(copy).config, 3), replace=True)
    assert goldens.read(copy) is None


@given(st.integers(1, 40), st.floats(1e-4, 0.3), st.integers(0, 2**31))
def test_sketches_measure_how_far_rows_are_apart(count: int, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 256 + count, generator=generator)
    y = x + size * torch.randn(x.shape, generator=generator)
    found = goldens.apart(goldens.sketch(x), goldens.sketch(y))
    assert 0.4 * size < float(found.median()) < 2.5 * size
    assert float(goldens.apart(goldens.sketch(x), goldens.sketch(x)).max()) == 0
    y[3] = torch.nan
    assert goldens.apart(goldens.sketch(x), goldens.sketch(y))[3] == torch.inf


def test_a_permutation_of_channels_is_seen() -> None:
    x = torch.randn(8, 512)
    assert float(goldens.apart(goldens.sketch(x), goldens.sketch(x.roll(1, 1))).median()) > 0.3


@given(st.lists(st.lists(st.integers(-1, 70), max_size=9, min_size=9), min_size=1, max_size=5))
def test_masks_hold_sets(rows: list[list[int]]) -> None:
    chosen = torch.tensor(rows)
    mask = goldens.bits(goldens.bitmask(chosen, 71))
    assert [set(row.nonzero()[:, 0].tolist()) for row in mask] == [{x for x in row if x >= 0} for row in rows]


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_random_words_are_splitmix() -> None:
    """The first outputs for seed 0, as published with the algorithm."""
    assert [int(x) for x in layers.random_words(0, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_a_probe_computes_every_token_once_in_order() -> None:
    config = ModelConfig.from_json(tiny_config())
    text, probe = config.text, layers.probe(config, 3)
    seen: dict[int, list[int]] = {}
    slots: dict[int, set[int]] = {}
    blocks: dict[int, tuple[int, ...]] = {}
    for step in probe.steps:
        for chunk in step.chunks:
            assert isinstance(chunk, Chunk)
            row = seen.setdefault(chunk.request, [])
            assert chunk.start == len(row)
            row += chunk.tokens
            slots.setdefault(chunk.request, set()).add(chunk.slot)
            before = blocks.get(chunk.request, ())
            assert chunk.blocks[: len(before)] == before
            blocks[chunk.request] = chunk.blocks
            assert len(chunk.blocks) == -(-len(row) // 128)
    assert [tuple(seen[i]) for i in range(3)] == list(probe.prompts)
    assert all(len(some) == 1 for some in slots.values())
    used = [block for some in blocks.values() for block in some]
    assert len(set(used)) == len(used)
    assert 0 not in used
    assert used != sorted(used), "out of order"
    assert len(probe.prompts[0]) > 2 * text.index_topk
    assert len(probe.prompts[0]) > text.candidate_topk_blocks * text.candidate_block_size
    assert len(set(probe.sampled.tolist())) == len(probe.sampled)
    assert sum(part.stop - part.start for part in probe.kinds.values()) == len(probe.sampled)


def tiny_text() -> TextConfig:
    return ModelConfig.from_json(tiny_config()).text


def test_special_rows_are_quiet_loud_and_driven() -> None:
    rows = layers.plain_rows(tiny_text())[0]
    s, pre = layers.spread(rows, 180, 1)
    size = s.square().mean((1, 2)).sqrt()
    usual = float(size.median())
    assert torch.allclose(size[layers.special("quiet", 180)] / usual, torch.tensor(layers.QUIET), rtol=0.6)
    assert torch.allclose(size[layers.special("loud", 180)] / usual, torch.tensor(layers.LOUD), rtol=0.6)
    driven = layers.special("driven", 180)
    assert torch.equal(s[driven], rows.values()[-1:].bfloat16().float().expand(len(driven), -1, -1))
    assert torch.equal(s, s.bfloat16().float())
    assert pre.shape == (180, 4)
    firsts = [row for kind in layers.SPECIAL for row in layers.special(kind, 1200).tolist()[:3]]
    assert len(set(firsts)) == 9


def test_closure_holds_what_layers_read() -> None:
    plan = layer_plan(ModelConfig.from_json(tiny_config()))
    assert layers.closure(plan, [9]) == [6, 8, 9]
    assert layers.closure(plan, [3, 0]) == [0, 2, 3]


def test_divergence_is_that_of_the_whole_distribution() -> None:
    logits, moved = torch.randn(5, 30).double().log_softmax(-1), torch.randn(5, 30).double().log_softmax(-1)

    def scores(x: Tensor, k: int) -> answers.Scores:
        top = x.topk(k)
        return answers.Scores(torch.zeros(5), top.indices, top.values)

    whole = (logits.exp() * (logits - moved)).sum(-1)
    assert torch.allclose(answers.divergence(scores(logits, 30), scores(moved, 30)), whole, atol=1e-6)
    part = answers.divergence(scores(logits, 8), scores(moved, 30))
    assert bool((part <= whole + 1e-9).all()), "what is lumped together only loses"
    assert float(answers.divergence(scores(logits, 8), scores(logits, 30)).abs().max()) < 1e-9
    assert float(answers.lead(scores(logits, 8), scores(logits, 30)).max()) == 0
    best = logits.argmax(-1, keepdim=True)
    want = moved.amax(-1) - moved.gather(1, best)[:, 0]
    assert torch.allclose(answers.lead(scores(logits, 8), scores(moved, 30)), want)


# ---- memory ----------------------------------------------------------------------------------------------------------

Count = list[str]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Count:
    """How often the gate ran; nothing is computed."""
    ran: Count = []

    def run(llm: LLM, depth: gate.Depth = "quick", **_: object) -> Verdict:
        ran.append(depth)
        lines = (Line("bytes", "file", 3, 0.0, 0.0, "tensors that differ"),)
        return Verdict(llm.config.model, depth, gate.combination(llm.config, depth), 1, (Outcome("bytes", lines, 0.1),))

    monkeypatch.setattr(gate, "run", run)
    return ran


def test_a_pass_is_remembered_for_its_combination(copy: Path, runs: Count) -> None:
    config = settings(copy)
    first, second = gate.ensure(config), gate.ensure(config)
    assert runs == ["quick"]
    assert (first.remembered, second.remembered) == (False, True)
    assert second.outcomes == first.outcomes
    gate.ensure(config, fresh=True)
    assert len(runs) == 2
    others = settings(copy, numerics="float"), settings(copy, **{"cpu.native": "off"})
    for other in others:
        gate.ensure(other)
    assert len(runs) == 4
    assert all(gate.ensure(known).remembered for known in (config, *others)), "side by side"
    path = copy / "config.json"
    path.write_text(path.read_text() + "\n")
    gate.ensure(config)
    assert len(runs) == 5


def test_a_shard_that_was_written_again_is_new(copy: Path, runs: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(copy)
    gate.ensure(config)
    (shard,) = copy.glob("model-*.safetensors")
    raw = shard.read_bytes()
    shard.write_bytes(raw)
    gate.ensure(config)
    assert len(runs) == 2
    monkeypatch.setattr(gate, "source_digest", lambda: "edited")
    gate.ensure(config)
    assert len(runs) == 3, "so is edited code"


def test_full_serves_for_quick_but_not_the_other_way(copy: Path, runs: Count) -> None:
    config = settings(copy)
    gate.ensure(config, "full")
    assert gate.ensure(config, "quick").depth == "full"
    other = settings(copy, numerics="float")
    gate.ensure(other, "quick")
    gate.ensure(other, "full")
    assert runs == ["full", "quick", "full"]


def test_an_engine_that_is_loaded_is_used(copy: Path, runs: Count) -> None:
    with LLM(config=settings(copy)) as llm:
        assert gate.ensure(llm).passed
        assert llm.generate([[5]], progress=False)[0].token_ids, "and stays open"
    assert gate.ensure(settings(copy)).remembered


def test_a_failure_is_not_remembered(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(copy)
    bad = Outcome("bytes", (Line("bytes", "file, norm.weight", 1, 1.0, 0.0, "tensors that differ"),), 0.1)
    monkeypatch.setattr(
        gate, "run", lambda llm, depth, **_: Verdict("m", depth, gate.combination(config, depth), 1, (bad,))
    )
    assert not gate.ensure(config).passed
    assert gate.recorded(config) is None
    assert gate.notice(config) is not None


def test_the_notice_is_for_what_is_not_on_record(copy: Path, runs: Count) -> None:
    config = settings(copy)
    text = gate.notice(config)
    assert text is not None
    assert "benthic verify" in text
    assert "\n" not in text
    gate.ensure(config)
    assert gate.notice(config) is None


def test_damaged_records_and_folders_that_cannot_be_written_cost_a_run(
    copy: Path, runs: Count, records: Path, tmp_path: Path
) -> None:
    config = settings(copy)
    gate.ensure(config)
    (record,) = (records / "gate").iterdir()
    record.write_text("{")
    assert gate.recorded(config) is None
    body = {"key": dict(gate.combination(config, "quick")), "seed": 1}
    record.write_text(json.dumps(body))
    assert gate.recorded(config) is None
    (tmp_path / "file").write_text("")
    blocked = dataclasses.replace(config, gate=dataclasses.replace(config.gate, cache_dir=str(tmp_path / "file")))
    assert gate.ensure(blocked).passed
    assert gate.recorded(blocked) is None


def test_records_lie_where_the_setting_says(copy: Path, runs: Count, tmp_path: Path) -> None:
    config: Config = settings(copy, **{"gate.cache_dir": str(tmp_path / "records")})
    gate.ensure(config)
    assert len(list((tmp_path / "records").iterdir())) == 1
