"""`benthic train generate | drafter | pack --drafter | calibrate` on a CPU; bad input is one line and its exit code."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benthic.models.deepseek_v41_dspark import drafter_names
from benthic.models.weights import Checkpoint
from benthic.testing.tokenizers import build_tokenizer
from benthic.train import data, loop
from benthic.train.loss import Ids
from tests.cli.test_train import good, refused
from tests.train.language import rows_of, write_target
from tests.train.small import only_prose, small_json

RUN = (
    *("--device", "cpu", "--rows", "2", "--length", "64", "--anchors", "8", "--parts", "prose"),
    *("--quantise-from", "0", "--seconds", "600"),
)
BRIEFLY = ("--limit-seconds", "8", "--reserve-seconds", "4")  # the schedule is cut to that
GENERATE = ("--tokens", "800", "--temperature", "1.0", "--max-tokens", "80", "--running", "8")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that wait for each other on a busy machine take minutes."""
    monkeypatch.setenv("BENTHIC_CPU__THREADS", "1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of a small language and a checkpoint that knows it."""
    root = tmp_path_factory.mktemp("drafter")
    folder = root / "data"
    folder.mkdir()
    tokenizer = build_tokenizer(folder)
    ids = Ids.of(tokenizer)
    (folder / "config.json").write_text(json.dumps(small_json()))
    tokens: dict[str, int] = {}
    counts: dict[str, int] = {}
    for seed, part in enumerate(("prose", "prose.valid")):
        rows = rows_of(1, 2000, seed, ids)[0].numpy().astype(np.uint16)
        data.write_ids(folder / f"{part}.ids.xz", rows)
        tokens[part], counts[part] = len(rows), int((rows == ids.bos).sum())
    data.Manifest(data.FORMAT, 0, 512, {p: [f"{p}.ids.xz"] for p in tokens}, tokens, counts, 0).write(folder)
    write_target(root / "target", tokenizer)
    return root


@pytest.mark.slow
def test_from_a_backbone_to_a_calibrated_drafter(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, out, packed = tmp_path / "own.ids.xz", tmp_path / "run", tmp_path / "packed"
    target = ("--data", root / "data", "--target", root / "target")
    result = good(capsys, "generate", "--model", root / "target", "--data", root / "data", "--out", written, *GENERATE)
    assert result["tokens"] == len(data.read_ids(written)) >= 800
    assert result["documents"] > 5
    command = ("drafter", *target, "--out", out, "--generated", written, *RUN)
    first = good(capsys, *command, "--pause", "--limit-seconds", "1", "--reserve-seconds", "1")
    assert not first["trained"]
    second = good(capsys, *command, *BRIEFLY, "--pack", packed)
    assert second["trained"]
    assert second["step"] > first["step"]
    assert second["quantised"] == 1
    assert 0 < second["held_out"]["accept_1"] < 1
    assert second["packed_bytes"] == sum(path.stat().st_size for path in packed.iterdir())
    assert json.loads((out / "result.json").read_text())["settings"]["parts"] == "generated=1,prose"
    assert str(tmp_path) not in (out / "result.json").read_text()
    assert (out / loop.PLOT_FILE).read_bytes().startswith(b"\x89PNG")
    with (out / loop.LOG_FILE).open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, second["step"] + 1))

    before, after = Checkpoint.open(root / "target"), Checkpoint.open(packed)
    changed = {n for n in after.specs if not torch.equal(*(c.tensor(n).view(torch.uint8) for c in (before, after)))}
    assert changed <= set(drafter_names(after.config))
    assert "mtp.0.main_proj.weight" in changed

    found = good(capsys, "calibrate", "--model", packed, "--data", root / "data", "--texts", "12", "--max-tokens", "40")
    stored = Checkpoint.open(packed).config.text.dspark_confidence_temperatures
    assert list(stored) == list(found["temperatures"].values())
    assert found["acceptance_length"] > 1
    assert found["before"].keys() == found["after"].keys()


def save_backbone(folder: Path, seed: int = 0) -> None:
    """A run folder of an untrained backbone, as `train backbone` leaves it."""
    from benthic.models.deepseek_v41_config import ModelConfig

    tokenizer = build_tokenizer(folder)
    settings = only_prose(rows=2, length=64, seed=seed)
    trainer = loop.Trainer(
        ModelConfig.from_json(small_json()),
        torch.from_numpy(tokenizer.engram_classes()),
        Ids.of(tokenizer),
        settings,
        torch.device("cpu"),
    )
    trainer.save(folder / loop.STATE_FILE, {"settings": {"seed": seed}, "seconds": 0.0, "loader": {}})


@pytest.mark.slow
def test_a_drafter_on_a_run_folder_is_packed_with_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("run", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        save_backbone(tmp_path / name, seed)
    command = ("drafter", "--data", root / "data", "--target", tmp_path / "run", "--out", tmp_path / "drafter", *RUN)
    short = good(capsys, *command, "--pack", tmp_path / "direct", "--limit-seconds", "0")
    pack = ("pack", "--data", root / "data", "--drafter", tmp_path / "drafter")
    good(capsys, *pack, "--run", tmp_path / "run", "--out", tmp_path / "packed")
    assert Checkpoint.open(tmp_path / "packed").digest() == Checkpoint.open(tmp_path / "direct").digest()
    assert short["packed_bytes"] > 0
    error = refused(capsys, 2, *pack, "--run", tmp_path / "other", "--out", tmp_path / "wrong")
    assert "a target with other weights" in error
    assert not (tmp_path / "wrong").exists()


# Refused


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--anchors", "0"), "setting anchors is 0"),
        (("--parts", "copy=1"), "setting parts is 'copy=1'"),
        (("--slot-decay", "0"), "setting slot_decay is 0.0"),
        (("--seed", "-1"), "setting seed is -1"),
        (("--parts", "prose,copy=1"), "no part 'copy'"),
        (("--generated-rows", "0"), "'0' is no whole number of 1 or more"),
        (("--device", "cuda:99"), "device cuda:99 cannot be used"),
    ],
)
def test_bad_settings(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    command = ("drafter", "--data", root / "data", "--target", root / "target", "--out", tmp_path / "run", *RUN)
    assert text in refused(capsys, 2, *command, *arguments)
    assert not (tmp_path / "run").exists()


def test_settings_of_a_backbone_are_none_of_a_drafter(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("drafter", "--data", root / "data", "--target", root / "target", "--out", tmp_path / "run")
    assert "--topk-from" in refused(capsys, 2, *command, "--topk-from", "0.5")


def test_a_missing_target_or_file(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("drafter", "--data", root / "data", "--out", tmp_path / "run", *RUN)
    assert "no model" in refused(capsys, 2, *command, "--target", tmp_path / "absent")
    target = ("--target", root / "target")
    assert "absent.xz" in refused(capsys, 2, *command, *target, "--generated", tmp_path / "absent.xz")
    data.write_ids(tmp_path / "odd.xz", np.array([5, 6], dtype=np.uint16))
    assert "benthic train generate" in refused(capsys, 2, *command, *target, "--generated", tmp_path / "odd.xz")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / loop.STATE_FILE).write_bytes(b"no state")
    assert "damaged" in refused(capsys, 2, *command, "--target", tmp_path / "foreign")


def test_a_state_of_another_target(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("drafter", "--data", root / "data", "--out", tmp_path / "run", *RUN)
    good(capsys, *command, "--target", root / "target", "--limit-seconds", "0", "--pause")
    save_backbone(shutil.copytree(root / "data", tmp_path / "other"))
    error = refused(capsys, 2, *command, "--target", tmp_path / "other", "--limit-seconds", "0", "--pause")
    assert "a target with other weights" in error


@pytest.mark.parametrize("arguments", [("generate",), ("drafter", "--data", "x"), ("calibrate", "--model", "x")])
def test_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert "benthic train" in refused(capsys, 2, *arguments)
