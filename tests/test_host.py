"""Free memory: the machine's, or what a control group leaves of it."""

from pathlib import Path

import pytest

from benthic import host


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "GROUP", tmp_path)
    return tmp_path


def test_without_a_limit_it_is_the_machine(group: Path) -> None:
    total, free = host.memory_bytes()
    assert 0 < free <= total
    (group / "memory.max").write_text("max\n")
    assert host.memory_bytes()[0] == total


@pytest.mark.parametrize(
    ("used", "file", "shmem", "free"),
    [(0, 0, 0, 1000), (900, 0, 0, 100), (990, 700, 0, 710), (990, 700, 300, 410), (1200, 0, 0, 0)],
)
def test_a_limit_and_what_files_keep_in_memory(group: Path, used: int, file: int, shmem: int, free: int) -> None:
    """That counts as free, unless the files are memory themselves."""
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 7\nfile {file}\nkernel 5\nshmem {shmem}\n")
    assert host.memory_bytes() == (1000, free)
