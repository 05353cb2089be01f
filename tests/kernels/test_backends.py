"""The table of implementations: who is asked, and when the reference runs instead."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benthic.kernels import backends, norm

MODULE = "tests_kernels_fake_backend"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A backend that answers rms_norm with sevens."""
    module = ModuleType(MODULE)
    module.__dict__["available"] = lambda: True
    module.__dict__["rms_norm"] = lambda x, weight, eps: torch.full_like(x, 7.0)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setitem(backends.TABLE, "rms_norm", {"cpu": MODULE})
    backends._load.cache_clear()
    yield module
    backends._load.cache_clear()


def call(x: Tensor) -> float:
    return norm.rms_norm(x, torch.ones(4), 1e-6)[0].item()


def test_table_decides(fake: ModuleType) -> None:
    assert call(torch.full((4,), 2.0)) == 7.0


def test_reference_is_forced_inside_the_block_only(fake: ModuleType) -> None:
    with backends.reference():
        assert call(torch.full((4,), 2.0)) == pytest.approx(1.0)
    assert call(torch.full((4,), 2.0)) == 7.0


def test_gradients_take_the_reference(fake: ModuleType) -> None:
    x = torch.full((4,), 2.0, requires_grad=True)
    assert call(x) == pytest.approx(1.0)
    with torch.no_grad():
        assert call(x) == 7.0


def test_backend_that_cannot_run_is_passed_over(fake: ModuleType) -> None:
    fake.__dict__["available"] = lambda: False
    assert call(torch.full((4,), 2.0)) == pytest.approx(1.0)


def test_other_devices_and_ops_have_none(fake: ModuleType) -> None:
    assert backends.pick("rms_norm", torch.empty(1, device="meta")) is None
    assert backends.pick("no such op", torch.empty(1)) is None


def test_every_listed_implementation_exists() -> None:
    for op in backends.TABLE:
        for device in backends.TABLE[op]:
            if device == "cpu":
                run = backends.pick(op, torch.empty(1))
                assert run is None or callable(run)
