"""`attend` as a GPU runs it, without one: its PTX, run on numpy arrays, against the dense softmax in float64.

pytest's own process interprets Triton, so the work is done by this file as a script, in a process of its own:

    python tests/kernels/test_attn_sparse_hopper.py 6 2 1        number of a case of ATTEND, spans, rounded

prints the share of the tolerance that was used.
"""

import os
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


# ---- the child -------------------------------------------------------------------------------------------------------


def share(case: int, spans: int, rounded: bool) -> float:
    import torch

    from benthic.kernels import backends
    from benthic.kernels.triton import attn_sparse as kernels
    from benthic.testing.cases import ATTEND
    from benthic.testing.ptx import emulating
    from benthic.testing.tolerances import excess

    spec = spec_from_file_location("steps", HERE / "test_attn_sparse.py")
    assert spec is not None
    assert spec.loader is not None
    steps: Any = module_from_spec(spec)
    spec.loader.exec_module(steps)
    torch.manual_seed(1)
    with backends.reference():
        made = steps.make_step(ATTEND[case], torch.device("cpu"))
    kernels.spans = lambda *_: spans
    with emulating():
        y = kernels.attend(**made, round_probs=rounded)
    return excess("sink_attention_rounded" if rounded else "sink_attention", y, steps.dense_step(made), 4.0)


# ---- the tests -------------------------------------------------------------------------------------------------------


def there(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = HERE.parents[1]
    return subprocess.run(
        [sys.executable, __file__, *words],
        capture_output=True,
        text=True,
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
        timeout=900,
    )


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize(
    ("case", "spans", "rounded"),
    [
        (6, 2, False),
        (1, 1, True),  # of fewer heads: the kernel for any shape
        pytest.param(2, 2, False, marks=pytest.mark.slow),
        pytest.param(5, 1, True, marks=pytest.mark.slow),
        pytest.param(5, 3, False, marks=pytest.mark.slow),
        pytest.param(6, 1, False, marks=pytest.mark.slow),
        pytest.param(8, 1, True, marks=pytest.mark.slow),
        pytest.param(8, 2, True, marks=pytest.mark.slow),
    ],
)
def test_attend(case: int, spans: int, rounded: bool) -> None:
    done = there(str(case), str(spans), str(int(rounded)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) <= 1


if __name__ == "__main__":
    print(share(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"))
