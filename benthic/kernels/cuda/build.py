"""Compiles CUDA C++ with NVRTC, keeps what it made in the user's cache folder, and launches it through the driver.

No toolkit and no host compiler is needed: NVRTC comes with torch. The name of a compiled file has a hash of the
sources, the flags and the compiler's version, and it appears in one rename. Where NVRTC or the driver is missing,
`available()` is False and one log line says why.
"""

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benthic import config
from benthic.errors import KernelBuildError

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
ARCHITECTURE = "sm_90a"
LARGEST_SHARED = 232448  # bytes of shared memory that a program may have
_OK = 0


# ---- compiling -------------------------------------------------------------------------------------------------------


@cache
def nvrtc() -> ctypes.CDLL | None:
    """The compiler, from the packages that torch brings along, else from the system."""
    for folder in _folders():
        # the compiler asks for the second library by its bare name, which finds it only when it is there already
        for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
            for path in sorted(path for path in folder.glob(name) if ".alt." not in path.name):
                try:
                    library = ctypes.CDLL(str(path))
                except OSError:
                    continue
                if hasattr(library, "nvrtcCompileProgram"):
                    return library
    try:
        return ctypes.CDLL("libnvrtc.so")
    except OSError:
        return None


def _folders() -> Iterator[Path]:
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        yield from sorted(Path(folder).glob("*/lib"))
    yield from (path / "lib64" for path in sorted(Path("/usr/local").glob("cuda*")))


def version() -> str:
    """Of the compiler."""
    library = nvrtc()
    if library is None:
        raise KernelBuildError("NVRTC, the CUDA compiler library, is not installed")
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


Defines = Sequence[tuple[str, int | str]]


class Compiled(NamedTuple):
    code: bytes
    messages: str  # what the assembler says of registers, spills and matrix instructions, of a CUBIN


def compiled(file: str, defines: Defines, before: str = "", kind: str = "CUBIN") -> Compiled:
    """A file of this folder, compiled for SM90.

    defines  macros.
    before   text that stands before the file's.
    kind     "CUBIN", or "PTX".
    Raises   KernelBuildError, with the compiler's first complaint.
    """
    library, text = nvrtc(), before + (HERE / file).read_text(encoding="utf-8")
    if library is None:
        raise KernelBuildError("NVRTC, the CUDA compiler library, is not installed")
    headers = sorted(HERE.glob("*.cuh"))
    count = len(headers)
    contents = (ctypes.c_char_p * count)(*(path.read_bytes() for path in headers))
    names = (ctypes.c_char_p * count)(*(path.name.encode() for path in headers))
    program = ctypes.c_void_p()
    _told(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file.encode(), count, contents, names))
    try:
        flags = _flags(defines, kind)
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        code = library.nvrtcCompileProgram(program, len(flags), options)
        messages = _fetched(library, program, "ProgramLog").decode(errors="replace")
        if code != _OK:
            lines = messages.splitlines()
            wrong = [line for line in lines if "error" in line] or lines or [f"code {code}"]
            raise KernelBuildError(f"{file} does not compile: {wrong[0][:300]}")
        return Compiled(_fetched(library, program, kind), messages)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _flags(defines: Defines, kind: str) -> list[str]:
    target = ARCHITECTURE if kind == "CUBIN" else ARCHITECTURE.replace("sm", "compute")
    macros = [f"-D{name}={value}" for name, value in defines]
    return [*macros, "--std=c++17", f"--gpu-architecture={target}", "--ptxas-options=-v"]


def _fetched(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _told(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    room = ctypes.create_string_buffer(size.value)
    _told(getattr(library, f"nvrtcGet{what}")(program, room))
    return room.raw if what == "CUBIN" else room.value


def _told(code: int) -> None:
    if code != _OK:
        raise KernelBuildError(f"NVRTC failed with code {code}")


def binary(file: str, defines: Defines, before: str = "") -> bytes:
    """As `compiled`, from the cache folder where it is there."""
    key = hashlib.sha256()
    sources = [before.encode(), *(path.read_bytes() for path in (HERE / file, *sorted(HERE.glob("*.cuh"))))]
    for part in (*sources, version().encode(), " ".join(_flags(defines, "CUBIN")).encode()):
        key.update(part + b"\0")
    folder = config.user_cache_dir() / "cuda"
    path = folder / f"{Path(file).stem}-{key.hexdigest()[:20]}.cubin"
    if path.exists():
        return path.read_bytes()
    made = compiled(file, defines, before).code
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as room:
        room.write(made)
    os.replace(room.name, path)
    return made


# ---- launching -------------------------------------------------------------------------------------------------------


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def available() -> bool:
    """Can this process compile for its GPU and launch what it compiled?"""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        _driver()
    except OSError as error:
        log.warning("CUDA C++ kernels not available, Triton's run instead", extra={"reason": str(error)})
        return False
    if nvrtc() is None:
        log.warning("CUDA C++ kernels not available, Triton's run instead", extra={"reason": "NVRTC is not installed"})
        return False
    return True


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_TOGETHER, _EARLY = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE and _PROGRAMMATIC_STREAM_SERIALIZATION
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    handle: ctypes.c_void_p
    threads: int  # of a program
    shared_bytes: int

    def launch(self, programs: int, arguments: ctypes.Structure, early: bool = False, together: bool = False) -> None:
        """On torch's current stream.

        early     it may start while the kernel before still runs, and waits for it itself.
        together  programs wait for one another, so that all must be on the device at a time.
        Raises    RuntimeError with the driver's code.
        """
        kinds = [_TOGETHER] * together + [_EARLY] * early
        attributes = (_Attribute * max(len(kinds), 1))(*(_Attribute(number=kind, value=1) for kind in kinds))
        stream = torch.cuda.current_stream().cuda_stream
        one = ctypes.c_uint * 3
        config = _Launch(
            one(programs, 1, 1), one(self.threads, 1, 1), self.shared_bytes, stream, attributes, len(kinds)
        )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), self.handle, pointers, None)
        if code != _OK:
            raise RuntimeError(f"launch of {self.name} failed with the driver's code {code}")


@cache
def kernel(
    file: str,
    name: str,
    threads: int,
    shared_bytes: int,
    defines: tuple[tuple[str, int | str], ...],
    before: str = "",
) -> Kernel:
    """A kernel of a file of this folder, compiled and loaded when it is first asked for. Arguments as `compiled`."""
    driver, library, handle = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    code: Any = binary(file, defines, before)
    steps = (
        lambda: driver.cuLibraryLoadData(ctypes.byref(library), code, None, None, 0, None, None, 0),
        lambda: driver.cuLibraryGetKernel(ctypes.byref(handle), library, name.encode()),
        lambda: driver.cuKernelSetAttribute(_MOST_SHARED, shared_bytes, handle, torch.cuda.current_device()),
    )
    for step in steps:
        failed = step()
        if failed != _OK:
            raise KernelBuildError(f"{name} cannot be loaded: the driver's code {failed}")
    return Kernel(name, handle, threads, shared_bytes)
