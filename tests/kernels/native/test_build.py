"""Compile once, load from the cache, say why not."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from benthic.kernels.native import build

SAY = (
    "from benthic.kernels.native import build; import logging; logging.basicConfig(level=logging.INFO);"
    "s = build.setup({mode!r}, {compiler!r}, {cache!r}); print(s.available, s.compiled_seconds > 0, s.detail)"
)


def say(cache: Path, mode: str = "auto", compiler: str = "cc", path: str | None = None) -> subprocess.Popen[str]:
    """A fresh process that sets up the library and prints (available, compiled now, detail)."""
    code = SAY.format(mode=mode, compiler=compiler, cache=str(cache))
    environment = {"PATH": path if path is not None else "/usr/local/bin:/usr/bin:/bin", "HOME": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def answer(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, err = process.communicate(timeout=300)
    return out.split(maxsplit=2), err


def test_two_first_starts_at_once_then_one_from_the_cache(tmp_path: Path) -> None:
    first, second = (answer(process) for process in [say(tmp_path), say(tmp_path)])
    assert [first[0][0], second[0][0]] == ["True", "True"]
    assert sorted([first[0][1], second[0][1]]) == ["False", "True"]  # one compiled, the other waited
    (library,) = (tmp_path / "native").glob("*.so")
    (found, built, _), log = answer(say(tmp_path))
    assert (found, built) == ("True", "False")
    assert "compiled" not in log
    assert list((tmp_path / "native").iterdir()) != []
    assert {entry.name for entry in (tmp_path / "native").iterdir()} == {library.name, "lock"}


def test_without_a_compiler(tmp_path: Path) -> None:
    (found, _, detail), log = answer(say(tmp_path, path=str(tmp_path)))
    assert found == "False"
    assert "no C compiler (cc, gcc, clang)" in detail
    assert log.count("native kernels not available") == 1


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo broken 1 && exit 0\necho 'x.c:1: error: no luck' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    (found, _, detail), _ = answer(say(tmp_path, compiler=str(broken)))
    assert found == "False"
    assert "no luck" in detail
    out, log = answer(say(tmp_path, mode="on", compiler=str(broken)))
    assert out == []
    assert "NativeBuildError" in log


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag names an x86 processor")
@pytest.mark.parametrize(("level", "works"), [("x86-64-v3", False), ("skylake-avx512", True)])
def test_other_processors(tmp_path: Path, level: str, works: bool) -> None:
    """Without AVX-512 nothing is built, and the reason is said at once; its bfloat16 instructions are not needed."""
    code = (
        "import torch; from benthic.kernels import backends, quant; from benthic.kernels.native import build;"
        f"build.FLAGS = (*build.FLAGS, '-march={level}'); print(build.setup('auto', 'cc', {str(tmp_path)!r}).detail);"
        "x = torch.randn(9, 64).bfloat16(); y = quant.roundtrip_fp8(x);"
        "print(torch.equal(y, quant.roundtrip_fp8_reference(x)), backends.pick('roundtrip_fp8', x) is not None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    detail, result = done.stdout.splitlines()
    assert ("no AVX-512" in detail) is not works
    assert result == f"True {works}"


def test_switched_off(tmp_path: Path) -> None:
    (found, _, detail), log = answer(say(tmp_path, mode="off"))
    assert found == "False"
    assert "switched off by cpu.native" in detail
    assert log == ""
    assert not (tmp_path / "native").exists()


def test_status_of_this_process() -> None:
    found = build.status()
    assert found.available
    assert found.path is not None
    assert found.path.name in found.detail
    with pytest.raises(AttributeError):
        build.function("benthic_no_such_function", "p")


def test_status_after_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.status()
    monkeypatch.setattr(build, "_settings", build.Settings("auto", "cc", str(build._settings.cache_dir)))
    monkeypatch.setattr(build, "_status", before)
    assert not build.setup("off", "cc", build._settings.cache_dir).available
    after = build.setup("auto", "cc", build._settings.cache_dir)
    assert (after.available, after.detail, after.path) == (before.available, before.detail, before.path)
