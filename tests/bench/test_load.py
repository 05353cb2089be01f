"""The load bench: what it makes is a checkpoint of the size asked for, what it loads is what it made; the report."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest
import torch

from benthic.bench import load
from benthic.bench.load import Options, content, cut, first_bytes, layout, scratch
from benthic.cli.main import main
from benthic.errors import BenchError, BenthicError
from benthic.models import deepseek_v41, loading
from benthic.models.deepseek_v41_config import ModelConfig, TensorSpec, tensors
from benthic.models.weights import Checkpoint, write_checkpoint
from benthic.types import NUMERICS

CPU = torch.device("cpu")


def size(config_json: dict[str, object]) -> int:
    return sum(spec.nbytes for spec in tensors(ModelConfig.from_json(config_json)).values())


@pytest.mark.parametrize(("gigabytes", "tiny"), [(6.0, False), (2.0, False), (0.05, True)])
def test_a_layout_has_the_size_asked_for(gigabytes: float, tiny: bool) -> None:
    """To half an expert in each layer."""
    found = layout(gigabytes, tiny)
    specs = tensors(ModelConfig.from_json(found))
    expert = sum(spec.nbytes for name, spec in specs.items() if ".ffn.experts.0." in name)
    assert abs(size(found) - 1e9 * gigabytes) <= expert
    if not tiny:
        release = tensors(ModelConfig.from_json(load.tiny_config("v41_flash")))
        for name in (
            "layers.1.attn.wq_b.weight",
            "layers.1.engram.wkv.weight",
            "layers.2.ffn.experts.5.w1.weight",
        ):
            assert specs[name] == release[name]
    assert size(layout(0.0, True)) == size(layout(0.001, True)), "never fewer experts than a token is sent to"


def test_content_is_numbers_and_all_of_the_inventory(tmp_path: Path) -> None:
    """Loading checks that they are numbers; each tensor is in the files as it was made, and loaded as it is there."""
    data = layout(0.02, True)
    config = ModelConfig.from_json(data)
    made = dict(content(config, 3))
    assert list(made) == list(tensors(config))
    path = write_checkpoint(tmp_path / "model", data, content(config, 3), shard_bytes=4 << 20)
    checkpoint = Checkpoint.open(path)
    assert len({stored.shard for stored in checkpoint.stored.values()}) > 3
    names = load.backbone(checkpoint)
    with loading.StagedCheckpoint(checkpoint, CPU, names) as source:
        for name in names:
            got, want = source.tensor(name), made[name]
            assert got.shape == want.shape
            assert got.contiguous().view(-1).view(torch.uint8).equal(want.contiguous().view(-1).view(torch.uint8)), name
    assert [name for name in tensors(config) if name not in names] == [n for n in made if n.startswith("mtp.")]
    deepseek_v41.from_checkpoint(checkpoint, NUMERICS["production"])
    codes = made["layers.0.attn.wq_b.weight"].float()
    assert codes.isfinite().all()
    assert codes.unique().numel() > 200, "all codes but those that are no numbers"
    scales = made["layers.0.attn.wq_b.scale"]
    assert 100 < scales.min() < scales.max() < 127
    assert (
        not made["layers.0.attn.wq_b.weight"]
        .view(torch.uint8)
        .equal(made["layers.1.attn.wq_b.weight"].view(torch.uint8))
    )
    assert not dict(content(config, 4))["norm.weight"].equal(made["norm.weight"])


def test_nothing_waits_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    data = layout(0.0, True)
    write_checkpoint(tmp_path / "a", data, content(ModelConfig.from_json(data), 0), synced=False)
    assert not synced
    write_checkpoint(tmp_path / "b", data, content(ModelConfig.from_json(data), 0))
    assert len(synced) == 3, "the shard, its index, the configuration"


def test_a_long_tensor_repeats_the_block() -> None:
    block = torch.arange(100, dtype=torch.float32)
    found = cut(block, "some name", TensorSpec((7, 50), "F32", "a.b")).flatten()
    assert found.shape == (350,)
    assert (found.diff() % 100 == 1).all()
    short = cut(block, "some name", TensorSpec((30,), "F32", "a.b"))
    assert short.equal(found[:30])


def test_the_first_bytes() -> None:
    assert first_bytes({"a": 3, "b": 4, "c": 5}, 4) == ["a", "b"]
    assert first_bytes({"a": 3, "b": 4}, 3) == ["a"]
    assert first_bytes({"a": 3, "b": 4}, 100) == ["a", "b"]


def test_the_report_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "load", "--device", "cpu", "--tiny", "--gigabytes", "0.04", "--workers", "1,2", "--pieces", "1"]
    words += ["--repeats", "2", "--folder", str(tmp_path / "scratch"), "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    (file,) = (tmp_path / "out").glob("*/load-tiny.json")
    assert json.loads(file.read_text()) == found
    assert not list((tmp_path / "scratch").iterdir()), "the checkpoint is gone"
    names = [measure["name"] for measure in found["measures"]]
    assert names == [
        "files, 1 worker", f"files, {loading.WORKERS} workers", "mapped",
        "staged, first", "staged", "whole, first", "whole",
        "files, 2 workers", "staged, 1 x 1 MiB", "staged, 2 x 1 MiB",
    ]  # fmt: skip
    for measure in found["measures"]:
        assert measure["unit"] == "GB/s"
        assert 0 < measure["value"] < 1000
        assert "target" not in measure or measure["target"] is None, "a CPU has no link"
    made = found["checkpoint"]
    assert abs(made["bytes"] - 4e7) < 2e6
    assert made["shards"] >= 1
    assert found["settings"]["workers"] == loading.WORKERS
    assert len(err.splitlines()) == len(names) + 2
    text = load.table(found)
    assert len(text.splitlines()) == len(names) + 1


def test_rates_are_held_against_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would report, with times given: 55 GB/s over the link, and two loads around three fifths of it."""
    data = layout(0.0, True)
    config = ModelConfig.from_json(data)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", data, content(config, 0)))
    total = sum(checkpoint.stored[name].nbytes for name in load.backbone(checkpoint))
    monkeypatch.setattr(load, "link", lambda device, repeats: [load.LINK_BYTES / 55e9] * repeats)
    monkeypatch.setattr(load, "release", lambda device: None)
    monkeypatch.setattr(load, "staged", lambda *args: total / 33.1e9)
    monkeypatch.setattr(load, "whole", lambda *args: load.Whole(total / 32.9e9, 0.02, 0.03))
    heard: list[str] = []
    options = Options(workers=(4,), pieces=(2,), repeats=2)
    measures = list(load._measures(checkpoint, options, torch.device("cuda"), math.inf, heard.append))
    by_name = {measure["name"]: measure for measure in measures}
    assert by_name["link"]["value"] == pytest.approx(55)
    assert by_name["staged"].get("verdict") == "met"
    assert by_name["whole"].get("verdict") == "missed"
    assert by_name["whole"].get("target") == pytest.approx(33)
    assert "60 % of the link" in by_name["staged"].get("note", "")
    assert "20 ms before the first tensor, 30 after the last" in by_name["whole"].get("note", "")
    assert "verdict" not in by_name["staged, first"]
    assert "mapped" not in by_name
    assert "staged, 4 x 2 MiB" in by_name
    assert any("at least 33.0: missed" in text for text in heard)
    late = list(load._measures(checkpoint, options, torch.device("cuda"), -math.inf, heard.append))
    assert [measure["name"] for measure in late][-1] == "whole", "only what is tried is left out for want of time"


def test_a_folder_without_room(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--folder"), scratch(tmp_path, 1 << 60):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has one")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(BenthicError, match="--device cpu --tiny"):
        load.run(Options())


def test_told_to_end_it_leaves_no_files(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from benthic.bench.load import scratch\n"
    code += (
        f"with scratch(Path({str(tmp_path)!r}), 1) as folder:\n (folder / 'model').write_bytes(b'x')\n time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    for _ in range(600):
        if list(tmp_path.glob("*/model")):
            break
        sleep(0.05)
    assert list(tmp_path.glob("*/model"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
