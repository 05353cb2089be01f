"""What doctor says of a machine that lacks something."""

import argparse
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from benthic.cli import doctor
from benthic.cli.doctor import Finding, Status
from benthic.config import Config, CpuConfig
from benthic.errors import NativeBuildError
from benthic.kernels import backends
from benthic.kernels.native import build

OFF = CpuConfig(native="off")  # nothing is compiled


@pytest.fixture(autouse=True)
def _native_as_it_was() -> Iterator[None]:
    """What these tests switch off is on again for the next file of this process."""
    yield
    build.setup("auto")
    backends._load.cache_clear()


def checkpoint(folder: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * 2_000_000)
    return folder


def find(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(argv))


def test_a_complete_machine_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", str(checkpoint(tmp_path)), "--cpu.native", "off") == 0
    out = capsys.readouterr().out
    assert out.endswith("Benthic can run here.\n")
    assert "2.0 MB in 1 files" in out


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--model", str(tmp_path), "--cpu.native", "off") == 1
    body = json.loads(capsys.readouterr().out)
    assert body["able"] is False
    model = body["findings"][-1]
    assert (model["name"], model["status"]) == ("model", "failed")
    assert "config.json, tokenizer.json" in model["detail"]


def test_every_finding_that_falls_short_has_a_remedy(tmp_path: Path) -> None:
    settings = Config(model=str(tmp_path / "absent"), cpu=CpuConfig(native="off", compiler="no-such-compiler"))
    findings = doctor.examine(settings)
    assert find(findings, "model").status is Status.FAILED
    assert find(findings, "compiler").status is Status.SLOW
    assert find(findings, "native").status is Status.SLOW
    for finding in findings:
        assert finding.status is Status.OK or finding.remedy, finding
        assert "\n" not in finding.detail + finding.remedy


def test_a_checkpoint_without_weights_is_not_usable(tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "model.safetensors").unlink()
    assert "*.safetensors" in find(doctor.examine(Config(model=str(tmp_path), cpu=OFF)), "model").detail


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "tokenizers":
            raise metadata.PackageNotFoundError(name)
        return "0.1.0" if name == "deepseek-recipe" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    findings = doctor.examine(Config(model=str(checkpoint(tmp_path)), cpu=OFF))
    missing, wrong = find(findings, "tokenizers"), find(findings, "deepseek-recipe")
    assert (missing.status, wrong.status) == (Status.FAILED, Status.FAILED)
    assert "pip install 'tokenizers" in missing.remedy
    assert wrong.detail == "0.1.0, but 0.2.0 is needed"


def test_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (8 << 30, 1 << 30))
    found = find(doctor.examine(Config(cpu=OFF)), "memory")
    assert found.status is Status.SLOW
    assert found.detail == "1.0 GiB free of 8.0"


def test_native_kernels_that_are_asked_for_and_missing_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def setup(mode: str, compiler: str, cache_dir: str) -> build.Status:
        raise NativeBuildError(f"{mode} {compiler} {cache_dir}")

    monkeypatch.setattr(build, "setup", setup)
    found = find(doctor.examine(Config(cpu=CpuConfig(native="on", compiler="abc", cache_dir="d"))), "native")
    assert found.status is Status.FAILED
    assert "on abc d" in found.remedy
