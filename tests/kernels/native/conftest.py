"""The C kernels against the plain references. Without a C compiler there is nothing to test."""

import pytest

from benthic.kernels.native import build


@pytest.fixture(autouse=True)
def _library() -> None:
    found = build.status()
    if not found.available:
        pytest.skip(found.detail)
