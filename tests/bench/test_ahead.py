"""Finding what benches will compile: every case and candidate counts, on memory that nobody touches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benthic.bench import ahead
from benthic.bench.tune import Choice
from benthic.errors import KernelBuildError
from benthic.kernels.triton.tuning import Asked

ROOT = Path(__file__).parents[2]


def compiled(cache: Path, *words: str) -> dict[str, object]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benthic.cli.main", "bench", "compile", "--json", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_command_fills_the_cache(tmp_path: Path) -> None:
    found = compiled(tmp_path, "--op", "rms_norm", "--models", "")
    assert (found["kernels"], found["failed"]) == (1, [])
    assert [path.name for path in tmp_path.glob("*/*.cubin")] == ["_rms_norm.cubin"]


def test_candidates_of_two_keys_are_tried_together_and_alone() -> None:
    listed = [Choice("a", "x", {"n": 1}), Choice("a", "y", {"n": 2}), Choice("b", "z", {"n": 3})]
    keys = {"k1": Asked(8, {"n": 0, "m": 5}), "k2": Asked(8, {"n": 9, "m": 6})}
    tried = list(ahead.candidates("op_a", keys, listed))
    assert tried == [
        {("op_a", "k1"): {"n": 1, "m": 5}, ("op_a", "k2"): {"n": 1, "m": 6}},
        {("op_a", "k1"): {"n": 2, "m": 5}, ("op_a", "k2"): {"n": 2, "m": 6}},
        {("op_a", "k1"): {"n": 1, "m": 5}},
        {("op_a", "k1"): {"n": 2, "m": 5}},
        {("op_a", "k2"): {"n": 1, "m": 6}},
        {("op_a", "k2"): {"n": 2, "m": 6}},
    ]


def test_experts_in_cuda_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], bool, int]] = []
    monkeypatch.setattr(ahead.cuda_build, "nvrtc", lambda: True)
    monkeypatch.setattr(
        ahead.cuda_experts,
        "compile_together",
        lambda names, carried, experts: asked.append(([*names], carried, experts)),
    )
    assert ahead.in_cuda(ahead.Options(op="linear"), print) == []
    assert ahead.in_cuda(ahead.Options(candidates=False), print) == []
    assert asked == []
    assert ahead.in_cuda(ahead.Options(op="expert"), print) == []
    assert [(carried, experts) for _, carried, experts in asked] == [(False, 48), (True, 48)]
    assert {"few", "some", "many"} <= set(asked[0][0]) & set(asked[1][0])

    def fails(*_: object) -> None:
        raise KernelBuildError("no room")

    monkeypatch.setattr(ahead.cuda_experts, "compile_together", fails)
    assert [failure["kernel"] for failure in ahead.in_cuda(ahead.Options(), print)] == ["stream_experts"]


@pytest.mark.slow
def test_all_of_it_is_found(tmp_path: Path) -> None:
    """Cases, candidates and the packaged model, without compiling: each adds kernels that the others lack."""
    code = (
        "from benthic.bench import ahead; import json\n"
        "of = lambda **o: {tuple(job) for job in ahead.found(ahead.Options(**o))}\n"
        "cases = of(candidates=False, models=()); tuned = of(models=()); model = of(kernels=False)\n"
        "print(json.dumps([len(cases), len(tuned), len(cases & tuned), len(model), len(model - tuned)]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cases, tuned, both, model, more = json.loads(done.stdout)
    assert 100 < cases == both < tuned
    assert 100 < more < model
