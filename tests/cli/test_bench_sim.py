"""`benthic bench sim`: traces there and back, what is written, and what is refused."""

import json
from pathlib import Path

import pytest

from benthic.cli.main import main
from benthic.errors import BadTrace
from benthic.sim.scenarios import H200_RANK
from benthic.testing.checkpoints import make_tiny

LITTLE = ["bench", "sim", "--seconds", "4"]


def test_policies_side_by_side_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*LITTLE, "--scenarios", "chat, long prompts", "--json", "--out", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    (folder,) = tmp_path.iterdir()
    name = "sim-h200-chat-long-prompts"
    assert {file.name for file in folder.iterdir()} == {f"{name}.json", f"{name}.png"}
    assert json.loads((folder / f"{name}.json").read_text()) == told
    policies = ["ours", "fixed 512", "fixed 2048", "fixed 8192", "prefill first"]
    assert [run["policy"] for run in told["runs"]] == 2 * policies
    assert all(run["measures"]["unanswered"] == 0 for run in told["runs"])
    assert told["machine"]["coefficients"] == H200_RANK._asdict()


def test_a_trace_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mine.jsonl"
    assert main(["bench", "sim", "--seconds", "30", "--write-trace", str(file)]) == 0
    requests = len(file.read_text().splitlines())
    assert requests > 3
    assert main([*LITTLE, "--trace", str(file), "--json", "--no-save"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["measures"]["requests"] for run in runs] == [requests] * 5
    assert main([*LITTLE, "--trace", str(file), "--no-save"]) == 0
    assert "prefill first" in capsys.readouterr().out


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*LITTLE, "--scenarios", "quiet"]) == 1
    assert "no scenario quiet; there are chat, long prompts" in capsys.readouterr().err
    assert main([*LITTLE, "--trace", str(tmp_path / "none")]) == BadTrace.exit_code == 2
    assert "none is no trace" in capsys.readouterr().err


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = make_tiny(tmp_path / "tiny")
    words = ["--machine", "here", "--model", str(model), "--cpu.threads", "1"]
    assert main([*LITTLE, *words, "--json", "--no-save"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["machine"]["coefficients"]["fixed"] + told["machine"]["coefficients"]["decode"] > 0
    assert {run["policy"] for run in told["runs"]} >= {"ours", "fixed 128", "in order", "last goes"}
    assert {run["scenario"] for run in told["runs"]} >= {"chat", "tenants", "little memory"}
    assert all(run["measures"]["unanswered"] == 0 for run in told["runs"])


def test_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, out = make_tiny(tmp_path / "tiny"), tmp_path / "out"
    words = ["bench", "sim", "--recorded", "--model", str(model), "--cpu.threads", "1", "--out", str(out)]
    assert main([*words, "--scenarios", "chat", "--seconds", "0.9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (folder,) = out.iterdir()
    assert {file.name for file in folder.iterdir()} == {"recorded-tiny-chat.json", "recorded-tiny-chat.png"}
    assert json.loads((folder / "recorded-tiny-chat.json").read_text()) == told
    assert told["recorded"]["requests"] == told["simulated"][0]["requests"] > 0
    assert told["load_after"] >= 0
    assert main([*words, "--scenarios", "chat, bursts"]) == 1
    assert "one trace at a time, not 2" in capsys.readouterr().err
