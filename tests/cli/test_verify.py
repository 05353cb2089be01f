"""`benthic verify` on the command line: lines, JSON, exit codes, and the line that generate and chat say."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benthic import gate
from benthic.cli import generate
from benthic.cli.main import main
from benthic.config import Config, load
from benthic.gate import Outcome, Verdict
from benthic.testing import answers, goldens
from benthic.testing.checkpoints import make_tiny
from benthic.testing.ops import Line

GOOD = (
    Outcome("bytes", (Line("bytes", "file", 9, 0.0, 0.0, "tensors that differ"),), 0.2),
    Outcome("ops", (Line("ops", "linear", 40, 0.5, 2.0, "of the op's tolerance"),), 1.5),
    Outcome("text", (), 0.0, "the checkpoint has no goldens"),
)
BAD = Outcome(
    "layers",
    (
        Line("layers", "layer 0, mixes", 9, 1e-6, 2e-5, "relative"),
        Line("layers", "layer 4, attention", 9, 7.5, 1.0, "of the rows' tolerance"),
        Line("layers", "layer 4, streams", 9, 90.0, 1.0, "of the rows' tolerance"),
    ),
    0.3,
)
Said = Callable[[tuple[Outcome, ...], bool], None]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Let the gate say this. What it was asked is in `Verdict.model` and `depth`."""

    def set_to(outcomes: tuple[Outcome, ...], remembered: bool = False) -> None:
        def ensure(config: Config, depth: gate.Depth, *, finished: Callable[[Outcome], None], **_: Any) -> Verdict:
            for outcome in () if remembered else outcomes:
                finished(outcome)
            key = {"numerics": config.numerics, "device": "cpu: a processor"}
            return Verdict(config.model, depth, key, 3, outcomes, remembered)

        monkeypatch.setattr(gate, "ensure", ensure)

    return set_to


def test_a_line_a_level_with_its_margin(says: Said, capsys: pytest.CaptureFixture[str]) -> None:
    says(GOOD, False)
    assert main(["verify", "minnow"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["bytes", "ok", "0.2", "s", "1", "checks,", "nothing", "deviates"]
    assert "linear: 0.5 of the op's tolerance (of at most 2, 75 % of the room left)" in lines[1]
    assert lines[2].split()[:2] == ["text", "skipped"]
    assert lines[2].endswith("the checkpoint has no goldens")
    assert lines[3] == "minnow (reference, cpu: a processor): passed in 1.7 s; not looked at: text"


def test_a_failure_names_the_first_that_deviates(says: Said, capsys: pytest.CaptureFixture[str]) -> None:
    says((GOOD[0], BAD), False)
    assert main(["verify", "--gate", "full"]) == 1
    out = capsys.readouterr().out
    assert "layers  FAILED" in out
    assert "layer 4, attention: 7.5 of the rows' tolerance" in out
    assert out.splitlines()[-1].endswith("the first that deviates: layers, layer 4, attention")
    assert "streams" not in out
    assert main(["verify", "--all"]) == 1
    assert "layer 4, streams" in capsys.readouterr().out


def test_json_is_one_object(says: Said, capsys: pytest.CaptureFixture[str]) -> None:
    says((GOOD[0], BAD), False)
    assert main(["verify", "minnow", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["passed"], body["gate"], body["seed"]) == (False, "quick", 3)
    assert [level["passed"] for level in body["levels"]] == [True, False]
    line = body["levels"][1]["lines"][1]
    assert (line["name"], line["passed"], line["margin"]) == ("layer 4, attention", False, -6.5)


def test_json_holds_no_infinity(says: Said, capsys: pytest.CaptureFixture[str]) -> None:
    says((Outcome("ops", (Line("ops", "no kernel image", 1, math.inf, 0.0, "error"),), 0.1),), False)
    assert main(["verify", "minnow", "--json"]) == 1
    body = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (line,) = body["levels"][0]["lines"]
    assert (line["error"], line["bound"], line["margin"], line["passed"]) == (None, 0.0, None, False)


def test_a_verdict_is_kept_where_the_flag_says(says: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says(GOOD, False)
    assert main(["verify", "minnow", "--gate", "full", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("*.json")
    assert path.name == "gate-minnow-reference-full.json"
    body = json.loads(path.read_text())
    assert (body["bench"], body["passed"], body["settings"]["model"]) == ("gate", True, "minnow")
    assert [level["seconds"] for level in body["levels"]] == [0.2, 1.5, 0.0]
    assert "passed" in capsys.readouterr().out


def test_what_is_on_record_is_told_as_such(says: Said, capsys: pytest.CaptureFixture[str]) -> None:
    says(GOOD, True)
    assert main(["verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "passed earlier, on record" in lines[-1]


@pytest.mark.parametrize(
    "words",
    [
        ["--gate", "deep"],
        ["no-such-model"],
        ["--make-goldens", "--profiles", "reference,rough"],
        ["--numerics", "rough"],
        ["--device", "tpu"],
    ],
)
def test_wrong_usage_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["verify", *words])
    except SystemExit as error:  # argparse
        code = error.code
    assert code == 2
    assert capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ensure(*_: Any, **__: Any) -> Verdict:
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "ensure", ensure)
    assert main(["verify"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_goldens_are_made_where_the_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.gate.conftest import SMALL

    folder = make_tiny(tmp_path / "small", **SMALL)
    monkeypatch.setattr(goldens, "TOKENS", 3)
    monkeypatch.setattr(gate, "LENGTHS", ())
    monkeypatch.setattr(answers, "ANCHORS", 1)
    words = ["verify", str(folder), "--make-goldens", "--profiles", "float", "--json", "--cpu.threads", "1"]
    assert main(words) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["bytes"] == sum((folder / name).stat().st_size for name in (goldens.JSON, goldens.TENSORS))
    known = goldens.read(folder)
    assert known is not None
    assert list(known.about["profiles"]) == ["float"]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_generate_and_chat_say_when_nothing_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both load through one function."""
    from tests.gate.conftest import SMALL

    folder = make_tiny(tmp_path / "small", **SMALL)
    config = load(overrides={"model": str(folder), "gate.cache_dir": str(tmp_path / "records"), "cpu.threads": 1})
    with generate.open_engine(config):
        pass
    said = capsys.readouterr().err
    assert "no passed gate on record" in said
    assert said.count("\n") == 1
    key = gate.combination(config, "quick")
    gate.remember(config, Verdict(config.model, "quick", key, 1, GOOD))
    with generate.open_engine(config):
        pass
    assert capsys.readouterr().err == ""
    with generate.open_engine(replace(config, numerics="float")):
        pass
    assert "float" in capsys.readouterr().err
