"""Free memory: the machine's, or what a control group leaves of it. A digest of the package's code."""

from pathlib import Path

import pytest

import benthic
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


@pytest.mark.parametrize("name", ["gemm.py", "gemm.c", "common.h", "experts.cu", "common.cuh", "h200.json"])
def test_a_digest_of_the_code_sees_every_kind_of_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = tmp_path / "package"
    (package / "kernels").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(benthic, "__file__", str(package / "__init__.py"))
    digest = host.source_digest.__wrapped__
    before = digest()
    (package / "kernels" / name).write_text("one")
    first = digest()
    (package / "kernels" / name).write_text("two")
    assert len({before, first, digest()}) == 3


def test_the_package_has_no_other_kind_of_source() -> None:
    """What is compiled, read as a table or run; not weights, texts and notes."""
    root = Path(benthic.__file__).parent
    kinds = {path.suffix for path in root.rglob("*") if path.is_file() and "minnow" not in path.relative_to(root).parts}
    assert kinds <= {".py", ".c", ".h", ".cu", ".cuh", ".json", ".pyc", ".typed", ".xz"}, kinds
