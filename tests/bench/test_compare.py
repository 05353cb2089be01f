"""The comparison of two places: equal places pass, and a fault in one of them is named by the op that has it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benthic.bench import compare
from benthic.cli.main import main
from benthic.errors import BadField, BenchError
from benthic.kernels import attn_sparse, backends, compress, gemm, kv_copy, moe_experts, moe_gate, norm, quant
from benthic.kernels.native import moe_experts as native
from benthic.models.weights import Checkpoint
from benthic.testing import ops
from benthic.testing.checkpoints import make_tiny
from benthic.testing.tolerances import MOVED_ROW

PROMPTS = [[5, 900, 33, 7] * 10, [77, 4, 19]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("compare") / "tiny", seed=0)


@pytest.mark.parametrize("numerics", ["float", "production"])
def test_ops_of_native_and_reference_kernels(folder: Path, numerics: str) -> None:
    left, right = ops.place("cpu"), ops.place("cpu:reference")
    steps = compare.plans(PROMPTS, 24, 2)
    lines = compare.op_lines(Checkpoint.open(folder), numerics, left, right, steps)
    names = {line.name.partition(":")[0] for line in lines}
    absent = {"roundtrip_fp8", "roundtrip_mxfp4"} if numerics == "float" else set()
    assert names == {name for _, name in ops.OPS} - absent, "every op of a step is there"
    assert all(line.passed for line in lines), lines


def test_experts_that_one_place_prepares(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either side may have a form of its own, which the other cannot read."""

    class Own:
        def __init__(self, file: quant.Fp4Matrix):
            self.file, self.shape = file, file.shape

    seen: list[type] = []

    def experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Own, w2: Own, *rest: Any) -> Tensor:
        seen.append(type(w13))
        return moe_experts.experts_reference(x, ids, weights, w13.file, w2.file, *rest)

    experts.__module__ = native.__name__  # where `prepare` is looked for
    monkeypatch.setattr(native, "prepare", lambda w13, w2, numerics: (Own(w13), Own(w2)), raising=False)
    monkeypatch.setattr(native, "experts", experts)
    backends._load.cache_clear()
    reads = moe_experts.experts_reference
    forms: list[type] = []

    def watched(x: Tensor, ids: Tensor, weights: Tensor, w13: Any, *rest: Any) -> Tensor:
        forms.append(type(w13))
        return reads(x, ids, weights, w13, *rest)

    monkeypatch.setattr(moe_experts, "experts_reference", watched)
    steps = compare.plans(PROMPTS[1:], 24, 1)
    try:
        for names in (("cpu", "cpu:reference"), ("cpu:reference", "cpu")):
            left, right = map(ops.place, names)
            lines = compare.op_lines(Checkpoint.open(folder), "production", left, right, steps)
            assert all(line.passed for line in lines), lines
            assert "experts" in {line.name for line in lines}
    finally:
        backends._load.cache_clear()
    assert set(seen) == {Own}
    assert set(forms) == {quant.Fp4Matrix}


def test_layers_and_logits(folder: Path) -> None:
    left, right = ops.place("cpu"), ops.place("cpu:reference")
    steps = compare.plans(PROMPTS, 24, 2)
    checkpoint = Checkpoint.open(folder)
    lines = compare.layer_lines(checkpoint, "float", left, right, steps)
    assert [line.cases for line in lines] == [43] * 10
    lines += compare.logit_lines(checkpoint, "float", left, right, steps)
    assert all(line.passed for line in lines), lines


def test_the_order_of_sums_moves_no_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float32 that are off in their last bits move a code here and there, and every row behind it that sees it:
    layers are equal all the same, since what a step stored differently is not what the next one reads."""
    generator, real = torch.Generator().manual_seed(4), gemm.linear_reference

    def other_order(x: Tensor, weight: quant.Matrix, out_dtype: torch.dtype | None = None) -> Tensor:
        if backends.pick("rms_norm", x) is not None:
            return real(x, weight, out_dtype)
        sums = real(x.float(), quant.values(weight).float())
        sums += 2e-7 * sums.square().mean(-1, keepdim=True).sqrt() * torch.randn(sums.shape, generator=generator)
        return sums.to(out_dtype or x.dtype)

    monkeypatch.setattr(gemm, "linear_reference", other_order)
    checkpoint, left, right = Checkpoint.open(folder), ops.place("cpu"), ops.place("cpu:reference")
    prompts = [ids[:120] for ids in compare.probe(folder, (120,))]

    def passed(chunk: int) -> bool:
        lines = compare.layer_lines(checkpoint, "production", left, right, compare.plans(prompts, chunk, 2))
        return all(line.passed for line in lines)

    assert passed(compare.LAYER_CHUNK)
    monkeypatch.setattr(compare, "_cached", lambda storage: [])
    assert not passed(96)


@pytest.mark.parametrize(("numerics", "whole"), [("reference", True), ("production", False), ("float", False)])
def test_layers_are_compared_whole_where_spans_would_round_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, numerics: str, whole: bool
) -> None:
    """Spans, which few rows are cut into elsewhere, are no form of `deterministic` mode: on both sides."""
    attend, asked = attn_sparse.attend_reference, list[bool]()

    def watched(q: Tensor, *rest: Any) -> Tensor:
        asked.append(backends.is_invariant())
        return attend(q, *rest)

    monkeypatch.setattr(attn_sparse, "attend_reference", watched)
    left, right = ops.place("cpu"), ops.place("cpu:reference")
    lines = compare.layer_lines(Checkpoint.open(folder), numerics, left, right, compare.plans(PROMPTS[1:], 24, 1))
    assert asked == [whole] * (2 * len(lines) * 2), "two steps, two sides"
    assert not backends.is_invariant()


def test_rows_behind_a_tie_are_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest choice of all is called a tie: the rows of its request are left out from there on, no others."""
    steps = compare.plans(PROMPTS, 24, 2)
    checkpoint, place = Checkpoint.open(folder), ops.place("cpu")
    leads: list[Tensor] = []
    real = moe_gate.lead

    def told(*args: Any) -> Tensor:
        leads.append(real(*args))
        return leads[-1]

    monkeypatch.setattr(moe_gate, "lead", told)
    assert not compare.behind_ties(checkpoint, "float", place, steps).any()
    layers = checkpoint.config.text.num_hidden_layers
    nearest = torch.cat([torch.stack(leads[i : i + layers]).amin(0) for i in range(0, len(leads), layers)])
    rows = [(c.request, c.start + i) for step in steps for c in step.chunks for i in range(len(c.tokens))]
    request, position = rows[int(nearest.argmin())]
    monkeypatch.setattr(compare, "NEAR", float(nearest.min()) * 1.001)
    behind = compare.behind_ties(checkpoint, "float", place, steps).tolist()
    assert behind == [r == request and p >= position for r, p in rows]
    line, left_out, _ = compare.logit_lines(checkpoint, "float", place, ops.place("cpu:reference"), steps)
    assert line.cases == behind.count(False)
    assert left_out.error == behind.count(True)
    monkeypatch.setattr(compare, "NEAR", float("inf"))
    assert compare.behind_ties(checkpoint, "float", place, steps).all()
    line, *_ = compare.logit_lines(checkpoint, "float", place, ops.place("cpu:reference"), steps)
    assert not line.passed, "with nothing left to compare"


def test_what_is_said_of_all_rows_is_of_all_calls() -> None:
    """Nothing is lost of the worst one: it has the bound of a single row."""
    found = [ops.Finding("experts: all rows", error, 0.005) for error in (0.006, 0.001)]
    together, worst = compare._op_lines("experts: all rows", found)
    assert together.error == pytest.approx((37e-6 / 2) ** 0.5)
    assert (together.bound, worst.error, worst.bound) == (0.005, 0.006, MOVED_ROW)
    (line,) = compare._op_lines("experts", found)
    assert (line.error, line.bound) == (0.006, 0.005)


def test_a_fault_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right side's norm has another eps: the op says so, and no other op does."""
    real = norm.rms_norm_reference

    def faulty(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return real(x, weight * 1.001, eps)

    monkeypatch.setattr(norm, "rms_norm_reference", faulty)
    left, right = ops.place("cpu"), ops.place("cpu:reference")
    steps = compare.plans(PROMPTS[1:], 24, 1)
    checkpoint = Checkpoint.open(folder)
    failed = [line.name for line in compare.op_lines(checkpoint, "float", left, right, steps) if not line.passed]
    assert failed == ["rms_norm"]
    assert not all(line.passed for line in compare.layer_lines(checkpoint, "float", left, right, steps))


@pytest.mark.parametrize("numerics", ["float", "production"])
def test_a_fault_in_what_is_stored_is_named(folder: Path, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right side's index keys are turned by another position than the left side's."""
    real = compress.key_store_reference

    def faulty(k: Tensor, rows: kv_copy.Rows, ratio: int, *rest: Any) -> None:
        on_the_right = backends.pick("rms_norm", k) is None
        real(k, rows, ratio + 5 if on_the_right else ratio, *rest)

    monkeypatch.setattr(compress, "key_store_reference", faulty)
    left, right = ops.place("cpu"), ops.place("cpu:reference")
    steps = compare.plans(PROMPTS[:1], 24, 1)
    found = compare.op_lines(Checkpoint.open(folder), numerics, left, right, steps)
    failed = [line.name for line in found if not line.passed]
    assert failed == ["key_store: records" if numerics == "float" else "key_store: codes"]


def test_distance_of_logits() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    same = compare.distance(a, a + 5.0)  # a shift is the same distribution
    assert same.kl.abs().max() < 1e-12
    assert same.same.all()
    other = compare.distance(a, a.flip(1))
    assert other.same.tolist() == [False, False]
    p, q = a[0].softmax(0), a[0].flip(0).softmax(0)
    assert other.kl[0].item() == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


@pytest.mark.slow
def test_greedy_text_of_native_and_reference_kernels() -> None:
    """One prompt, a few tokens, the packaged model without quantisers: the same text."""
    left, right = ops.place("cpu"), ops.place("cpu:reference")
    lines = compare.text_lines("minnow", "float", left, right, [[0, 40, 50, 60]], 6)
    assert all(line.passed for line in lines)
    assert {line.error for line in lines if line.name == "agreed length"} == {6.0}


def test_completions_are_kept_for_the_same_prompts_alone(folder: Path, tmp_path: Path) -> None:
    where = ops.place("cpu")
    texts = compare.kept(tmp_path, folder, "float", where, [[5, 9], [7]], 3)
    assert [len(text.ids) for text in texts] == [3, 3]
    again = compare.kept(tmp_path, folder, "float", where, [[5, 9], [7]], 3)
    assert [text.ids for text in again] == [text.ids for text in texts]
    with pytest.raises(BenchError, match="other prompts"):
        compare.kept(tmp_path, folder, "float", where, [[5, 9], [8]], 3)


def test_the_floor_of_texts_is_that_of_a_few_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts are compared; the slow side continues one."""
    asked: list[tuple[str, int]] = []

    def greedy(model: Any, numerics: str, where: compare.Place, prompts: Any, tokens: int) -> list[compare.Text]:
        asked.append((where.name, len(prompts)))
        return [compare.Text([4, 5], [1.0, 1.0]) for _ in prompts]

    monkeypatch.setattr(compare, "greedy", greedy)
    monkeypatch.setattr(compare, "FORCED", 1)
    cpu = ops.place("cpu")
    lines = compare.text_lines(folder, "production", cpu, cpu, [[5], [6]], 2)
    assert asked == [("cpu", 2), ("cpu", 2), ("cpu:reference", 1)]
    shares = {line.name: line.cases for line in lines if line.name.startswith("first token")}
    assert shares == {"first token": 2, "first token (cpu:reference)": 1}


def test_agreement_counts_ties_apart(folder: Path) -> None:
    """The second completion leaves at a tie, the third where the first choice was clear."""
    mine = [compare.Text([4, 5], [1.0, 1.0]), compare.Text([4, 5], [1.0, 1e-4]), compare.Text([4, 5], [1.0, 1.0])]
    theirs = [mine[0], compare.Text([4, 6], [1.0, 1.0]), compare.Text([6, 5], [1.0, 1.0])]
    cpu = ops.place("cpu")
    found = compare.agreement(folder, "float", cpu, cpu, [[5], [6], [7]], 2, mine, theirs)
    assert (found.equal, found.first, found.length, found.ties) == (1 / 3, 2 / 3, 1.0, 1)
    assert found.kl == 0.0


@pytest.mark.slow
def test_from_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "probe", lambda model: PROMPTS[1:])
    command = ["doctor", str(folder), "--compare", "cpu,cpu:reference", "--profiles", "production"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "hyper_mixes" in text
    assert "KL floor (cpu:reference)" in text
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert main([*command, "--json", "--levels", "layer,logits"]) == 0
    lines = json.loads(capsys.readouterr().out)["profiles"]["production"]
    assert {line["level"] for line in lines} == {"layer", "logits"}
    assert main([*command, "--levels", "layers"]) == 2
    assert "op, layer, logits, text" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["gpu0", "cuda" if not torch.cuda.is_available() else "nowhere"])
def test_places_that_are_not(text: str) -> None:
    with pytest.raises(BadField, match="compare"):
        ops.place(text)


def test_backends_are_left_as_they_were(folder: Path) -> None:
    before = backends.pick("rms_norm", torch.empty(1))
    compare.op_lines(
        Checkpoint.open(folder),
        "float",
        ops.place("cpu"),
        ops.place("cpu:reference"),
        compare.plans([[5]], 4, 0),
    )
    assert backends.pick("rms_norm", torch.empty(1)) is before
    assert norm.rms_norm.__name__ == "rms_norm"
