"""Where a kernel test runs: the plain reference, and whatever serves the public function, on every device there is."""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benthic.kernels import backends

GOLDEN = Path(__file__).parent.parent / "golden" / "kernels"


PLACES = ["reference", "cpu"]
if torch.cuda.is_available():  # listed only then: hundreds of skipped tests would hide the rest
    PLACES += [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda-reference", "cuda")]
elif (
    find_spec("triton") is not None
):  # the Triton kernels on CPU tensors; tests/conftest.py switches the interpreter on
    PLACES += ["interpreter"]


@pytest.fixture(scope="module", params=PLACES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device for a test's tensors; under the two "reference" names the backends are off."""
    name: str = request.param
    where = torch.device("cuda" if name.startswith("cuda") else "cpu")
    if name.endswith("reference"):
        with backends.reference():
            yield where
    elif name == "interpreter":
        with backends.use("triton"):
            yield where
    else:
        yield where


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """`golden("norm")` -> the vectors of tests/golden/kernels/norm.json."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((GOLDEN / f"{name}.json").read_text())

    return read
