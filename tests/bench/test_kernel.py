"""The kernel bench: its formulas, what it reports of a case that fails, and that every case runs at small sizes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benthic.bench import kernel, report
from benthic.bench.cases import RELEASE, SMALL, Case, Cases, Target
from benthic.bench.kernel import Options
from benthic.bench.timing import Ceilings, Run, Timed, Timer, measure_ceilings
from benthic.cli.main import main
from benthic.errors import BenchError
from benthic.kernels import backends

CPU = torch.device("cpu")
H200 = Ceilings(4.15e12, 4.26e12, bf16_flops=730e12, fp8_flops=1250e12, link_bytes=55e9, launch_seconds=1e-6)
SERVED = {"attention_inputs", "attention_output", "moe", "hyper_read"}  # runs of ops, which need a backend


@pytest.fixture(scope="module")
def small() -> list[Case]:
    return list(Cases(SMALL, CPU, 0).all())


@pytest.fixture(scope="module")
def release() -> list[Case]:
    """Nothing is allocated before a case is built, so this is cheap."""
    return list(Cases(RELEASE, CPU, 0).all())


def test_experts_may_come_first(release: list[Case]) -> None:
    first = list(Cases(RELEASE, CPU, 0).all(experts_first=True))
    assert sorted(case.name for case in first) == sorted(case.name for case in release)
    count = sum(case.op in ("experts", "moe", "route") for case in release)
    assert {case.op for case in first[:count]} == {"experts", "moe", "route"}


# ---- formulas --------------------------------------------------------------------------------------------------------


def test_floors_are_those_of_the_kernel_specification() -> None:
    """Per layer and EP8 rank at 64 rows: section 3's table, in microseconds."""
    cases = Cases(RELEASE, CPU, 0)
    weights = cases.attention_inputs(0, False).nbytes + cases.attention_output(0, False).nbytes
    one_token = cases.hyper_read(65).nbytes - cases.hyper_read(64).nbytes - 2 * 2 * 5120  # less h and the result
    gathered = cases.attend(64, 1, "decode").nbytes / 64 - 2 * 512 * (2 * 64 + 1)  # less q, the result, its own row
    bytes_us = {
        "shared and routed experts": (cases.moe(4096, False).nbytes - 4 * 4096 * 5120, 226),
        "attention weights": (weights, 30),
        "mHC fn of two sublayers": (2 * cases.hyper_read(0).nbytes, 1.0),
        "streams of a token, two sublayers": (2 * one_token, 0.04),
        "attention of a token": (gathered, 0.052),
        "index keys at 128K": (cases.select_records(131072, 1, 1, False).nbytes, 2.1),
    }
    for name, (nbytes, us) in bytes_us.items():
        assert 1e6 * H200.floor(nbytes, 0) == pytest.approx(us, rel=0.06), name


def test_operations_are_those_of_the_kernel_specification() -> None:
    """Per row and layer: projections 0.253 GFLOP, shared and routed experts 0.071 and 0.425."""
    cases = Cases(RELEASE, CPU, 0)
    projections = cases.attention_inputs(1, False).flops + cases.attention_output(1, False).flops
    assert projections == pytest.approx(0.253e9, rel=0.01)
    assert cases.experts(1, "exact").flops == pytest.approx(0.425e9, rel=0.01)
    assert cases.moe(1, False).flops - cases.experts(1, "exact").flops == pytest.approx(0.071e9, rel=0.02)
    assert cases.attend(1, 6, "decode").flops == 6 * 4 * 64 * 512 * (128 + 512)
    assert cases.select_records(1000, 2, 3, False).flops == 6 * 1003 * 2 * 32 * 128
    assert cases.select_records(100000, 2, 3, True).flops == 6 * 2048 * 8 * 2 * 32 * 128
    assert cases.head(7).flops == 2 * 7 * 129280 * 5120
    at_384 = cases.moe(384, False).flops + 384 * projections
    assert at_384 == pytest.approx(287e9, rel=0.02)


def test_every_row_of_the_kernel_table_has_cases(release: list[Case]) -> None:
    found = {case.row for case in release}
    assert found == {
        "norm, rope, Q8, window store",
        "dense FP8",
        "attention inputs",
        "grouped wo_a",
        "MoE",
        "sparse MQA",
        "indexer",
        "candidates",
        "compressor, key, pack",
        "mHC",
        "Engram gather",
        "Engram gate",
        "head",
        "sampling",
    }
    dense = {case.shape for case in release if case.row == "dense FP8" and case.variant == "exact"}
    assert {"wq_b 32768x1280 M=1", "wo_b 5120x8192 M=4096", "shared w13 4608x5120 M=384"} <= dense
    routed = {case.shape for case in release if case.op == "experts"}
    assert {f"R={r} on 48" for r in (48, 144, 384, 1152, 3072, 12288, 49152)} == routed
    assert {case.op for case in release} <= set(backends.FILES) | {"compress_store"}


def test_targets(release: list[Case]) -> None:
    named = {(case.op, case.shape, case.variant): case.target for case in release}
    assert named["experts", "R=384 on 48", "fast"].us == 232
    assert named["experts", "R=384 on 48", "invariant"].us == pytest.approx(1.1 * 232)
    assert named["experts", "R=144 on 48", "exact"].us is None
    assert named["linear", "wo_b 5120x8192 M=64", "exact"].share == 0.75
    assert named["linear", "wo_b 5120x8192 M=384", "exact"].share == 0.65
    assert named["linear", "wo_b 5120x8192 M=1536", "fast"].share == 0.85
    assert named["sample_rows", "R=256, top-p 0.95, peaked logits", "exact"].us == 60
    assert named["sample_rows", "R=256, top-p 0.95, flat logits", "exact"].us is None


def test_the_floor_is_the_larger_term() -> None:
    assert H200.floor(4.15e12, 0.0) == pytest.approx(1.0)
    assert H200.floor(4.15e12, 1460e12) == pytest.approx(2.0)
    assert H200.floor(0.0, 1250e12, "fp8") == pytest.approx(1.0)
    assert H200.floor(4.15e12, 0.0, over_link=110e9) == pytest.approx(2.0)


# ---- running ---------------------------------------------------------------------------------------------------------


def test_every_small_case_runs() -> None:
    with backends.reference():
        cases = Cases(SMALL, CPU, 0)
        for case in cases.all():
            if case.op in SERVED:
                with pytest.raises(BenchError, match="no backend takes it together"):
                    case.build()()
            else:
                case.build()()
            assert case.nbytes > 0
            assert not case.peers  # they are on GPUs


def test_operands_are_finite(small: list[Case]) -> None:
    with backends.reference():
        for case in small:
            if case.op in ("linear", "grouped_linear", "experts", "attend", "engram_gate", "table_rows", "rotate"):
                result = case.build()()
                assert isinstance(result, torch.Tensor)
                assert result.isfinite().all(), case.name
                assert 0 < result.float().square().mean() < 1e4, case.name


class StubTimer(Timer):
    """Says what it is told, after having run the work."""

    def __init__(self, seconds: float):
        super().__init__(CPU)
        self.seconds = seconds

    def time(self, run: Run, graph: bool = True) -> Timed:
        run()
        return Timed(self.seconds, self.seconds / 2, True)


def fake(build: Callable[[], Run], target: Target) -> Case:
    return Case("a row", "an_op", "1x1", "decode", nbytes=4.15e6, flops=1e6, build=build, target=target)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target(), None),
        (Target(share=0.5), True),
        (Target(share=0.51), False),
        (Target(us=2.0), True),
        (Target(us=1.9), False),
        (Target(share=0.5, us=1.9), False),
        (Target(tflops=0.5), True),
        (Target(tflops=0.6), False),
    ],
)
def test_judgement(target: Target, met: bool | None) -> None:
    found = kernel.measure(fake(lambda: lambda: None, target), StubTimer(2e-6), H200)
    assert found["met"] is met
    assert found["floor_us"] == pytest.approx(1.0)
    assert found["cold_us"] == pytest.approx(2.0)
    assert found["warm_us"] == pytest.approx(1.0)
    assert found["share"] == pytest.approx(0.5)
    assert found["terabytes_per_second"] == pytest.approx(4.15 / 2)


def test_a_failure_is_reported_and_the_rest_goes_on() -> None:
    def broken() -> Run:
        raise ValueError("out of shared memory\nand more")

    found = kernel.measure(fake(broken, Target(share=0.5)), StubTimer(1e-6), H200)
    assert found["error"] == "ValueError: out of shared memory"
    assert "share" not in found
    case = replace(fake(lambda: lambda: None, Target()), peers={"other": broken})
    found = kernel.measure(case, StubTimer(2e-6), H200)
    assert found["peers"]["other"]["error"].startswith("ValueError")
    assert "error" not in found


def test_an_op_without_a_kernel_is_not_timed() -> None:
    """On a GPU the reference would take its place."""
    assert kernel.served("no such op", CPU)
    assert not kernel.served("rms_norm", torch.device("meta"))
    timer = StubTimer(1e-6)
    timer.device = torch.device("meta")
    found = kernel.measure(fake(lambda: lambda: None, Target()), timer, H200)
    assert found["error"] == "BenchError: an_op could not be measured: no backend serves it on meta"


def test_table_says_what_failed_and_what_was_missed() -> None:
    ran = kernel.measure(fake(lambda: lambda: None, Target(share=0.6)), StubTimer(2e-6), H200)
    broken = {**ran, "error": "ValueError: no"}
    text = kernel.table({"cases": [ran, broken], "left_out": ["x 1"]}).splitlines()
    assert text[1].split() == ["a", "row,", "decode", "2", "1", "50", "to", "50", "%", "0", "of", "1"]
    assert text[2] == "failed: an_op 1x1: ValueError: no"
    assert "1 cases, x 1" in text[3]


def test_ceilings_of_a_cpu() -> None:
    found = measure_ceilings(Timer(CPU))
    assert all(value > 0 for value in found.json().values())
    assert found.read_bytes > 1e8
    assert found.bf16_flops > 1e7


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["bench", "kernel", "--device", "cpu", "--op", "rms_norm", "--out", str(tmp_path)]
    assert main([*words, "--json", "--no-save"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert [case["op"] for case in found["cases"]] == ["rms_norm"]
    assert {"commit", "command", "seed", "hardware", "versions", "ceilings"} <= set(found)
    assert "rms_norm 3x128" in out.err
    assert list(tmp_path.iterdir()) == []
    assert main(words) == 0
    assert "norm, rope, Q8, window store, decode" in capsys.readouterr().out
    (file,) = tmp_path.glob("*/kernel-rms_norm.json")
    assert file.parent.name == report.slug(found["hardware"])


def test_command_without_cases_or_time(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no case has it"):
        kernel.run(Options(op="nothing", device="cpu"))
    found = kernel.run(Options(op="rms_norm", device="cpu", budget_seconds=0.0))
    assert found["cases"] == []
    assert found["left_out"] == ["rms_norm 3x128"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernel"]) == 1
    assert "--device cpu" in capsys.readouterr().err
