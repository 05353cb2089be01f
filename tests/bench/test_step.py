"""The step bench: what it counts, what it reports, and that it measures the real engine."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benthic.bench import report, step
from benthic.bench.report import Measure
from benthic.bench.step import Options, Prompts, Rates, Spent, Watched, estimate_work, seconds, timed_ops
from benthic.bench.timing import Ceilings, Trace
from benthic.cli.main import main
from benthic.config import load
from benthic.engine.llm import LLM
from benthic.engine.loop import StepTimes
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


def test_requests_that_never_run_together(folder: Path) -> None:
    """Prompts are computed 8 tokens a step, so the first of three ends before the last begins."""
    with (
        LLM(str(folder), scheduler__token_budget=8, scheduler__max_running=3, cpu__threads=1) as llm,
        pytest.raises(BenchError, match="never ran together"),
    ):
        step.decode_rate(llm, Prompts(4096, 0), 3, 20, 2)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def test_decode_steps_are_watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace begins when all requests run, holds whole steps, and is told how many."""
    asked: list[tuple[str, int]] = []
    with LLM(str(folder), cpu__threads=1) as llm:
        monkeypatch.setattr(step, "watch", lambda: len(llm.loop.times))
        monkeypatch.setattr(step, "WATCHED_STEPS", 4)

        def seen(before: int, times: int) -> Trace:
            after = list(llm.loop.times)[before:]
            asked.extend((f"{t.tokens} of {t.requests}", times) for t in after)
            return Trace(1e-6, {"a": (2.0, 6e-7), "b": (1.0, 4e-7)})

        monkeypatch.setattr(step, "seen", seen)
        watched = step.watch_decode(llm, Prompts(4096, 0), 3, 20, 12)
        assert not llm.loop.busy  # the requests were given up
    assert asked == [("3 of 3", 4)] * 4
    assert watched.steps == 4
    assert watched.idle == pytest.approx(1 - 1e-6 / watched.seconds)
    shares = watched.shares()
    assert list(shares) == ["a", "b", "other"]
    assert shares["a"]["us_per_call"] == pytest.approx(0.3)
    assert sum(each["share"] for each in shares.values()) == pytest.approx(1)


def test_rows_of_a_decode_step_on_a_gpu() -> None:
    watched = Watched(Trace(600e-6, {}), 16, 1000e-6)
    times = [StepTimes(8, 8, plan * 1e-6, 50e-6, 650e-6, 20e-6, 600e-6, 1000e-6) for plan in (10, 30, 11)]
    found = {m["name"]: m for m in step._on_gpu(8, watched, 800e-6, times, 15e-6)}
    names = ("idle share", "sampler", "plan", "begin", "wait", "commit", "rest")
    assert list(found) == [f"{name}, batch 8" for name in names]
    values = [m["value"] for m in found.values()]
    assert values == pytest.approx([40.0, 15.0, 11.0, 50.0, 650.0, 20.0, 269.0])
    assert "25.0 %" in found["idle share, batch 8"].get("note", "")


def test_estimate_of_a_graph() -> None:
    """Many launches at first, then bytes; a slower launch and a slower memory cost what they should."""
    config = ModelConfig.from_json(tiny_config())
    fast = Ceilings(4e12, 4e12, 700e12, 1200e12, 50e9, 1e-6)
    one, many = (step.gpu_step_seconds(config, "production", rows, 100, fast) for rows in (1, 256))
    layers = config.text.num_hidden_layers
    assert step.LAUNCHES * layers * 1e-6 < one < many < 60e-6 * layers
    assert step.gpu_step_seconds(config, "production", 1, 100, replace(fast, launch_seconds=2e-6)) > 1.9 * one
    slow = replace(fast, read_bytes=1e6)
    wide, packed = (step.gpu_step_seconds(config, numerics, 1, 100, slow) for numerics in ("float", "production"))
    assert wide > 1.5 * packed


def test_room_for_the_batches() -> None:
    text = ModelConfig.from_json(tiny_config())
    config = load(environ={}, overrides={"scheduler.token_budget": 64, "cache.bytes": 1 << 16})
    # no latency target: it would keep prompts from beginning together
    assert step.with_room(config, text, 1).scheduler == replace(config.scheduler, itl_stretch=0.0)
    more = step.with_room(config, text, 100)
    assert (more.scheduler.max_running, more.scheduler.token_budget) == (100, 100)
    assert more.cache.bytes % 200 == 0
    assert more.cache.bytes > 1 << 16


@pytest.mark.gpu
def test_whole_run_on_a_gpu() -> None:
    config = load(environ={}, overrides={"model": "minnow", "device": "cuda"})
    found = step.run(config, Options(prompts=(64,), batches=(1, 40), tokens=32, repeats=1, start_ups=0))
    measures = {m["name"]: m for m in found["measures"]}
    assert {"idle share, batch 1", "sampler, batch 40", "peak device memory"} <= set(measures)
    assert all(0 <= measures[f"idle share, batch {batch}"]["value"] < 100 for batch in (1, 40))
    assert measures["decode, batch 40"].get("estimate")
    assert measures["prefill, 64 tokens"].get("estimate") is None
    assert not any("target" in m and m["target"] for m in found["measures"])
    assert len(found["ops"]["decode, batch 40"]) > 5


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


COUNT = """
import torch
from benthic.bench.ahead import pretending
from benthic.bench.step import gpu_step_launches
from benthic.cache.storage import Storage
from benthic.engine import batch
from benthic.engine.runner import Runner
from benthic.engine.sampler import Sampler
from benthic.kernels.triton import warm
from benthic.models.deepseek_v41 import from_checkpoint
from benthic.models.modules import packed_weights
from benthic.models.weights import Checkpoint
from benthic.testing.offline import counting
from benthic.types import NUMERICS

cpu, columns = torch.device("cpu"), torch.zeros(batch.COLUMNS, 32, dtype=torch.int64)
with pretending(), packed_weights(), warm.noted({}):
    model = from_checkpoint(Checkpoint.open("minnow"), NUMERICS["production"])
    storage = Storage(model.cache_spec, 65, 33, cpu)
    runner = Runner(model, storage, Sampler(model.vocab_size, cpu), on_device=True)
    runner._compute(batch.unpack(columns, storage))  # what is made once
    with counting() as counts:
        runner._compute(batch.unpack(columns, storage))
print(gpu_step_launches(model.config.text), counts.total(), dict(counts))
"""


@pytest.mark.slow
def test_the_kernels_of_a_step_are_as_many_as_the_estimate_says() -> None:
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    expected, counted, rest = done.stdout.split(maxsplit=2)
    assert abs(int(counted) - int(expected)) <= 0.05 * int(expected), rest
