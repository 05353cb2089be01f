"""Kernels compiled ahead: what a run would compile is found without launching, and is in the cache for any process.

pytest's own process interprets Triton, so this file also is a script:

    python tests/kernels/test_warm.py build|find ORDER      with TRITON_CACHE_DIR set; prints one JSON object
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


# ---- the child -------------------------------------------------------------------------------------------------------


def child(what: str, order: str) -> dict[str, Any]:
    import torch

    from benthic.bench.ahead import pretending
    from benthic.kernels import gemm, norm, quant
    from benthic.kernels.triton import warm

    x, ones = torch.full((64, 1280), 3.0, dtype=torch.bfloat16), torch.ones(1280)
    weight = quant.Fp8Matrix(torch.empty(64, 1280, dtype=quant.E4M3), torch.zeros(2, 40, dtype=torch.uint8))
    runs = {"n": lambda: norm.rms_norm(x, ones, 1e-6), "g": lambda: gemm.linear(x[:16], weight, torch.float32)}
    jobs: dict[warm.Job, None] = {}
    with pretending():
        with warm.noted(jobs):
            for name in order:
                for _ in range(2):
                    runs[name]()
            torch.full((4096,), 9, dtype=torch.int64)  # freed: the next one of this size is likely to get its memory
            index = torch.empty(4096, dtype=torch.int64).unique().tolist()
        found: dict[str, Any] = {"jobs": [job.kernel for job in jobs], "index": index}
        taken: list[int] = []
        listed = [warm.kept(key, lambda: taken.append(1) or runs["n"]()) for key in ("a", "a", "b")]
        found["kept"] = ([[job.kernel for job in some] for some in listed], len(taken))
        found["missing"] = len(warm.missing(jobs))
        if what == "build":
            seen: list[tuple[int, int]] = []
            wrong = warm.Job(*next(iter(jobs))[:2], json.dumps(json.loads(next(iter(jobs)).data) | {"signature": {}}))
            found["failed"] = [f.error for f in warm.build([*jobs, wrong], 2, lambda done, of: seen.append((done, of)))]
            found["seen"] = seen
            found["left"] = len(warm.missing(jobs))
    return found


# ---- the tests -------------------------------------------------------------------------------------------------------


def run(cache: Path, *words: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, __file__, *words],
        capture_output=True,
        text=True,
        cwd=root,
        env=environment | {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(cache)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
def test_what_one_process_compiled_another_finds(tmp_path: Path) -> None:
    first = run(tmp_path, "build", "ng")
    assert set(first["jobs"]) >= {"_rms_norm", "_product"}
    assert len(set(first["jobs"])) == len(first["jobs"]) == first["missing"], "a kernel is noted once"
    assert first["index"] == [0], "whole numbers that no kernel wrote are zero"
    assert len(first["failed"]) == 1, "one that does not compile is told"
    count = len(first["jobs"]) + 1
    assert first["seen"] == [[done, count] for done in range(1, count + 1)]
    assert first["left"] == 0
    assert first["kept"] == [[["_rms_norm"]] * 3, 2], "what a key asks for is found out once"
    second = run(tmp_path, "find", "gn")  # in another order, in which Triton's own keys are others
    assert sorted(second["jobs"]) == sorted(first["jobs"])
    assert second["missing"] == 0
    assert second["kept"] == [[["_rms_norm"]] * 3, 0], "and by one process"


if __name__ == "__main__":
    print(json.dumps(child(*sys.argv[1:])))
