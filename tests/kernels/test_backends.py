"""The table of implementations: who is asked, and when the reference runs instead."""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benthic.kernels import backends, norm

MODULE = "benthic.kernels.fake.norm"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A backend that answers rms_norm with sevens."""
    module = ModuleType(MODULE)
    module.__dict__["available"] = lambda: True
    module.__dict__["rms_norm"] = lambda x, weight, eps: torch.full_like(x, 7.0)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setitem(backends.SERVES, "fake", frozenset({"rms_norm"}))
    monkeypatch.setitem(backends.ORDER, "cpu", ("fake",))
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


def test_a_backend_can_be_forced(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.ORDER, "cpu", ("native",))
    with backends.use("fake"):
        assert call(torch.full((4,), 2.0)) == 7.0
        assert backends.pick("rotate", torch.empty(1)) is None  # what it does not have runs the reference
    assert call(torch.full((4,), 2.0)) == pytest.approx(1.0)


def test_invariance_is_asked_for_inside_the_block_only() -> None:
    assert not backends.is_invariant()
    with backends.invariant():
        assert backends.is_invariant()
    assert not backends.is_invariant()


def test_every_listed_implementation_exists() -> None:
    for backend, ops in backends.SERVES.items():
        for op in ops:
            path = f"benthic.kernels.{backend}.{backends.FILES[op]}"
            if find_spec(backend) is None and backend != "native":
                continue  # an optional package that is not installed
            assert callable(getattr(import_module(path), op)), f"{path} has no {op}"
