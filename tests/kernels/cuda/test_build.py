"""Compiling CUDA C++ without a GPU, keeping it, and saying what is wrong."""

import ctypes
from pathlib import Path

import pytest

from benthic.errors import KernelBuildError
from benthic.kernels.cuda import build

needs_nvrtc = pytest.mark.skipif(build.nvrtc() is None, reason="NVRTC is not installed")
DEFINES = (("CARRIED", 0), ("RAW", 0), ("EXPERTS", 4))


@needs_nvrtc
def test_compiled_once_then_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.config, "user_cache_dir", lambda: tmp_path)
    first = build.binary("rows.cu", DEFINES)
    assert first[:4] == b"\x7fELF"
    (file,) = (tmp_path / "cuda").iterdir()
    assert file.name.startswith("rows-")
    file.write_bytes(b"as it was left")
    assert build.binary("rows.cu", DEFINES) == b"as it was left"
    assert build.binary("rows.cu", (*DEFINES, ("OTHER", 1)))[:4] == b"\x7fELF"
    assert len(list((tmp_path / "cuda").iterdir())) == 2


@needs_nvrtc
def test_ptx() -> None:
    assert b".target sm_90a" in build.compiled("rows.cu", DEFINES, kind="PTX").code


@needs_nvrtc
def test_what_the_compiler_says_is_told() -> None:
    with pytest.raises(KernelBuildError, match=r"rows\.cu does not compile: .*EXPERTS"):
        build.compiled("rows.cu", DEFINES[:2])


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "nvrtc", lambda: None)
    for ask in (build.version, lambda: build.compiled("rows.cu", DEFINES)):
        with pytest.raises(KernelBuildError, match="NVRTC, the CUDA compiler library, is not installed"):
            ask()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    build.available.cache_clear()
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    assert not build.available()
    build.available.cache_clear()


def test_what_the_driver_is_given_is_laid_out_as_it_wants() -> None:
    assert ctypes.sizeof(build._Attribute) == 72
    assert build._Attribute.value.offset == 8
    assert build._Launch.stream.offset == 32
    assert build._Launch.attributes.offset == 40
    assert build._Launch.count.offset == 48
