"""All kernels that steps will ask for are known before the first request: none is compiled while somebody waits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("numerics", "context"), [("production", 1 << 20), ("fast", 16384)])
def test_random_steps_ask_for_no_kernel_that_was_not_rehearsed(numerics: str, context: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.surprises", numerics, "60", str(context)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["rehearsed"] > 50
    assert found["surprises"] == {}
    assert found["waits"] == []  # each would keep the step out of a graph
