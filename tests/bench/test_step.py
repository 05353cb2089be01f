"""The step bench: what it counts, what it reports, and that it measures the real engine."""

import json
from pathlib import Path

import pytest
import torch

from benthic.bench import report, step
from benthic.bench.report import Measure
from benthic.bench.step import Options, Prompts, Rates, Spent, estimate_work, seconds, timed_ops
from benthic.cli.main import main
from benthic.config import load
from benthic.errors import BenchError
from benthic.kernels import hyper, moe_experts, norm
from benthic.models.deepseek_v41_config import ModelConfig, tensors
from benthic.testing.checkpoints import make_tiny, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bench") / "tiny", max_position_embeddings=512)


def test_whole_run(folder: Path, tmp_path: Path) -> None:
    config = load(environ={}, overrides={"model": str(folder), "device": "cpu", "cpu.threads": 1})
    options = Options(prompts=(16, 9000), batches=(1, 3), tokens=6, repeats=2, start_ups=0)
    said: list[str] = []
    found = step.run(config, options, said.append)
    measures = {m["name"]: m for m in found["measures"]}
    assert list(measures) == [
        "prefill, 16 tokens",
        "prefill, 511 tokens",  # the longest the model takes with a token to spare
        "decode, batch 1",
        "decode, batch 3",
        "peak memory",
    ]
    assert all(m["value"] > 0 for m in found["measures"])
    assert len(measures["decode, batch 3"].get("samples", [])) == 2
    assert (measures["decode, batch 1"].get("estimate") or 0) > 0
    assert said == ["prefill 16", "prefill 511", "decode at batch 1", "decode at batch 3", "time by operation"]
    for shares in found["ops"].values():
        assert sum(spent["share"] for spent in shares.values()) == pytest.approx(1)
        assert 0 < shares["other"]["share"] < 1
    assert found["threads"] == 1
    assert {"commit", "command", "seed", "hardware", "versions"} <= set(found)
    path = report.save(found, tmp_path, "step-tiny")
    assert path.parent.name == report.slug(found["hardware"])
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))


def test_start_up_of_a_folder_without_text(folder: Path) -> None:
    config = load(environ={}, overrides={"model": str(folder), "device": "cpu", "cpu.threads": 1})
    assert 0.1 < step.first_token(config, folder) < 120
    with pytest.raises(BenchError, match="start-up run"):
        step.first_token(config, folder / "nowhere")


def test_command(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["bench", "step", "--model", str(folder), "--device", "cpu", "--prompts", "8", "--batches", "2"]
    words += ["--tokens", "3", "--repeats", "1", "--start-ups", "0", "--out", str(tmp_path)]
    assert main([*words, "--json", "--no-save", "--no-ops"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in found["measures"]] == ["prefill, 8 tokens", "decode, batch 2", "peak memory"]
    assert list(tmp_path.iterdir()) == []
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "prefill, 8 tokens" in text
    assert "time by operation: decode, batch 2" in text
    (file,) = tmp_path.glob("*/step-tiny-reference.json")
    assert str(file) in text


@pytest.mark.parametrize("words", [["--prompts", "0"], ["--prompts", "x"], ["--repeats", "-1"], ["--peer", "other"]])
def test_bad_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "step", *words])
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_peer_that_is_not_there(folder: Path) -> None:
    with pytest.raises(BenchError, match=r"pip install --no-deps ftllm==1\.9\.0"):
        step.run_peer("ftllm", "/nowhere/python", folder, 8, 2, 1, 0)


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_prompts_are_seeded_and_not_special() -> None:
    first, again, other = Prompts(4096, 1), Prompts(4096, 1), Prompts(4096, 2)
    ids = first.draw(500)
    assert ids == again.draw(500)
    assert ids != other.draw(500)
    assert ids != first.draw(500)
    assert 64 <= min(ids) <= max(ids) < 4096 - 64


def test_estimated_weights_are_the_checkpoints() -> None:
    """Every product a token passes, counted from the inventory: within 2 % of the estimate."""
    config = ModelConfig.from_json(tiny_config())
    text = config.text
    dense, experts, expert = step._weights(text)
    inventory = 0
    for name, spec in tensors(config).items():
        if not name.startswith("layers.") or name.endswith(".scale") or "engram.embed" in name or len(spec.shape) < 2:
            continue
        values = spec.parameters
        if ".experts." in name and "shared" not in name:
            continue
        inventory += values
    assert dense == pytest.approx(inventory, rel=0.02)
    assert experts == text.n_routed_experts
    assert expert == 3 * text.hidden_size * text.moe_intermediate_size


def test_estimate_grows_as_it_should() -> None:
    config = ModelConfig.from_json(tiny_config())
    one = estimate_work(config, "reference", 1, [10], 1)
    longer = estimate_work(config, "reference", 1, [4000], 1)
    batch = estimate_work(config, "reference", 32, [10], 32)
    wide = estimate_work(config, "float", 1, [10], 1)
    assert longer.multiply_adds > one.multiply_adds
    assert batch.multiply_adds == pytest.approx(32 * one.multiply_adds)
    assert one.weight_bytes < batch.weight_bytes < 4 * one.weight_bytes  # weights are shared by the batch
    assert wide.weight_bytes > 1.5 * one.weight_bytes
    slow, fast = Rates(1e9, 1e9, 0.0), Rates(1e12, 1e12, 0.0)
    assert seconds(one, slow) == pytest.approx(max(one.multiply_adds, one.weight_bytes) / 1e9)
    assert seconds(one, fast) < seconds(one, slow)


def test_own_time_of_nested_kernels() -> None:
    """Experts call other kernels on the reference path; their time is counted once."""
    spent = Spent()
    x = torch.randn(4, 32)
    before = norm.rms_norm
    with timed_ops(spent):
        assert norm.rms_norm is not before
        norm.rms_norm(x, torch.ones(32), 1e-6)
        ids, weights = torch.zeros(4, 1).long(), torch.ones(4, 1)
        moe_experts.experts(x, ids, weights, torch.randn(2, 64, 32), torch.randn(2, 32, 32), 10.0, False, True)
        with pytest.raises(Exception, match="hyper_collapse"):
            hyper.hyper_collapse(x, x)
    assert norm.rms_norm is before
    assert spent.calls["rms_norm"] == 1
    assert spent.calls["linear"] == 2
    assert spent.calls["hyper_collapse"] == 1
    assert spent.inner == []
    assert all(took >= 0 for took in spent.seconds.values())


def test_slug_and_table() -> None:
    machine = {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": 2, "gpu": None}
    assert report.slug(machine) == "intel-xeon-2-cores"
    assert report.slug({**machine, "gpu": "NVIDIA H200"}) == "nvidia-h200"
    rows = report.table(
        [
            Measure(name="a", value=5.0, unit="s", target=4.0, better="less"),
            Measure(name="b", value=5000.0, unit="tokens/s", estimate=6000.0, target=4000.0, better="more"),
        ]
    ).splitlines()
    assert rows[1].split() == ["a", "5", "<=", "4", "!", "s"]
    assert rows[2].split() == ["b", "5", "000", "6", "000", ">=", "4", "000", "tokens/s"]
