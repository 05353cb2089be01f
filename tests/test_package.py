"""The wheel, as a user gets it: built from the tree, installed outside it, run from another folder."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import benthic

ROOT = Path(__file__).parents[1]
MINNOW = ROOT / "benthic" / "minnow"


def run(*command: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command outside the tree. The environment keeps no path that could lead back into it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BENTHIC_"))} | environ
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network, from a copy that holds what a commit holds."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "benthic", folder / "benthic", ignore=shutil.ignore_patterns("__pycache__"))
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=folder)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; the packages it needs are read from the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index"]
    done = run(*pip, "--quiet", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    # appended by path, so that the .pth files there, which lead to the tree, are not read
    parents = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "packages_of_the_tests.pth").write_text("\n".join(parents) + "\n")
    return folder


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's cache folder that is empty at first, so that the kernels compile from the installed sources."""
    return str(tmp_path_factory.mktemp("cache"))


def test_the_wheel_is_small_and_holds_code_data_and_licence(wheel: Path) -> None:
    assert wheel.name == f"benthic-{benthic.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 45_000_000
    names = zipfile.ZipFile(wheel).namelist()
    in_tree = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "benthic").rglob("*")
        if path.is_file() and path.suffix in (".py", ".c", ".h", ".json", ".safetensors", ".typed")
    ]
    assert set(in_tree) <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs")) or "__pycache__" in name]


def test_the_installed_command_runs_outside_the_tree(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "bin" / "benthic", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"benthic {benthic.__version__}\n"), done.stderr
    done = run(installed / "bin" / "python", "-c", "import benthic; print(benthic.__file__)", cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed)


def test_the_installed_doctor_reports_this_machine(installed: Path, tmp_path: Path, cache_dir: str) -> None:
    done = run(installed / "bin" / "benthic", "doctor", "--json", cwd=tmp_path, XDG_CACHE_HOME=cache_dir)
    body = json.loads(done.stdout)
    assert done.returncode == (0 if body["able"] else 1), done.stderr
    assert body["version"] == benthic.__version__
    found = {finding["name"]: finding["status"] for finding in body["findings"]}
    assert found["torch"] == found["packages"] == "ok"
    assert found["model"] == ("ok" if MINNOW.is_dir() else "failed")


@pytest.mark.skipif(not MINNOW.is_dir(), reason="the tree holds no packaged model")
def test_the_installed_command_generates_text(installed: Path, tmp_path: Path, cache_dir: str) -> None:
    done = run(
        installed / "bin" / "benthic",
        *("generate", "--model", "minnow", "--device", "cpu", "--prompt", "Once upon a time"),
        *("--max-tokens", "12", "--temperature", "0", "--json"),
        cwd=tmp_path,
        XDG_CACHE_HOME=cache_dir,
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout.splitlines()[0])
    assert len(body["token_ids"]) == 12
    assert body["text"].strip()
