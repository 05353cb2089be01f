"""The invariance bench: every case runs at small sizes, and what it says of the mode's cost."""

import json
from pathlib import Path

import pytest
import torch

from benthic.bench import invariance
from benthic.bench.cases import Case
from benthic.bench.invariance import Options, measure
from benthic.bench.timing import Run, Timed, Timer
from benthic.cli.main import main
from benthic.errors import BenchError
from benthic.kernels import backends

CPU = torch.device("cpu")


@pytest.mark.slow
def test_whole_run_and_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["bench", "invariance", "--device", "cpu", "--rows", "1,3", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [case["rows"] for case in found["cases"]] == [1, 3] * (len(found["cases"]) // 2)
    ops = {"moe", "experts", "route", "attention_inputs", "attention_output", "linear", "hyper_read", "attend"}
    assert {case["op"] for case in found["cases"]} == ops | {"compress_store", "select_records", "sample_rows"}
    failed = {case["op"]: case["error"] for case in found["cases"] if "error" in case}
    assert all("no backend" in text for text in failed.values()), failed  # without native kernels
    assert len(err.splitlines()) == len(found["cases"]) + 1
    (file,) = tmp_path.glob("*/invariance.json")
    assert json.loads(file.read_text()) == found


def test_the_cost_is_held_against_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time is that of the mode."""
    modes: list[bool] = []
    taken = iter([100e-6, 109e-6, 100e-6, 111e-6, 100e-6, 150e-6])

    def time(self: Timer, run: Run, graph: bool = True) -> Timed:
        run()
        return Timed(next(taken), 50e-6, True)

    monkeypatch.setattr(Timer, "time", time)

    def case(op: str) -> Case:
        return Case("row", op, "3x4", "decode", 1.0, 1.0, lambda: lambda: modes.append(backends.is_invariant()))

    cheap, dear, other = (measure(3, case(op), Timer(CPU)) for op in ("moe", "experts", "linear"))
    assert modes == [False, True] * 3
    assert cheap["cost"] == pytest.approx(0.09)
    assert [result["met"] for result in (cheap, dear, other)] == [True, False, None]
    broken = measure(3, Case("row", "moe", "3x4", "decode", 1.0, 1.0, lambda: 1 / 0), Timer(CPU))  # pyright: ignore
    text = invariance.table({"cases": [cheap, dear, other, broken], "left_out": 2}).splitlines()
    assert [line.split()[-1] for line in text[1:4]] == ["met", "missed", "%"]
    assert "failed: ZeroDivisionError" in text[4]
    assert "2 cases" in text[5]


def test_no_such_op() -> None:
    with pytest.raises(BenchError, match="no case"):
        invariance.run(Options(op="nothing", device="cpu", rows=(1,)))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    found = invariance.run(Options(op="route", rows=(64,)))
    (case,) = found["cases"]
    assert case["usual_us"] > 0 < case["invariant_us"]
