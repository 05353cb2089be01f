"""Shared by all tests: fixed seeds, one compute thread, markers for hardware that is not there."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

SEED = 20260101

if not Path("/dev/nvidia0").exists():  # read when a kernel is defined, so before any import of one
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("BENTHIC_SCHEDULER__WORST_FIRST", "false")  # up to a second of each engine's start

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# the same examples on every machine, and no verdict from a slow one
settings.register_profile("benthic", derandomize=True, deadline=None)
settings.load_profile("benthic")


def pytest_report_header() -> str:
    return f"benthic: seed {SEED} before each test"


@pytest.fixture(autouse=True)
def _seeds() -> Iterator[None]:
    random.seed(SEED)
    np.random.seed(SEED)
    if "torch" in sys.modules:  # a test of the part without torch must not load it
        sys.modules["torch"].manual_seed(SEED)
    yield
    # an engine takes all cores, also for the tests behind it, and threads of several workers wait for each other
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[Any]"]]:
    """Starts processes as `Popen` does. None outlives the test: what one leaves would fail another later on."""
    started: list[subprocess.Popen[Any]] = []

    def begin(*arguments: Any, **settings: Any) -> "subprocess.Popen[Any]":
        started.append(subprocess.Popen(*arguments, **settings))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the hardware a marked test is skipped, with the reason."""
    wanted = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multigpu")]
    if not wanted:
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in wanted:
        need = 2 if item.get_closest_marker("multigpu") else 1
        if count < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA devices, {count} are here"))
