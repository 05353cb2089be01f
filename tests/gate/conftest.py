"""A small random checkpoint with goldens of its own, made once a process."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benthic import gate
from benthic.config import Config, load
from benthic.testing import goldens
from benthic.testing.checkpoints import make_tiny

# every mechanism is there, and nothing is large
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "o_groups": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "dspark_n_routed_experts": 2,
    "engram_n_heads": 1,
}


def settings(folder: Path, **overrides: object) -> Config:
    """One thread: the machine may have other work."""
    return load(overrides={"model": str(folder), "cpu.threads": 1, **overrides})


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    folder = make_tiny(tmp_path_factory.mktemp("gate") / "small", **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(goldens, "TOKENS", 8)
        patch.setattr(gate, "LENGTHS", (150,))
        about, tensors = goldens.make(settings(folder), ["reference"], documents=gate.documents)
    goldens.write(folder, about, tensors)
    return folder


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    """To damage."""
    return Path(shutil.copytree(golden, tmp_path / "copy"))


@pytest.fixture
def bare(golden: Path, tmp_path: Path) -> Path:
    """Without goldens."""
    return Path(shutil.copytree(golden, tmp_path / "bare", ignore=shutil.ignore_patterns("goldens.*")))


@pytest.fixture(autouse=True)
def records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of a test: what the real one holds is none of its business."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(gate, "user_cache_dir", lambda: folder)
    return folder
