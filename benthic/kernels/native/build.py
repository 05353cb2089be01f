"""The C kernels: compiled once into the user's cache folder, loaded through ctypes.

The sources beside this file become one shared object at first use, by the system's C compiler. Its name has a hash
of the sources, the compiler's version, the flags and the processor, so that a change of any of them builds anew; a lock
file keeps two processes apart, and the finished file appears in one rename. Without a compiler the plain torch kernels
run: one log line and `status()` say why.

Threads are those of torch's own OpenMP pool, since the object is linked against the library torch brings along.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benthic import config
from benthic.errors import NativeBuildError

try:
    import fcntl
except ImportError:  # no POSIX locks here: two first starts at once may both compile, and the rename settles it
    fcntl = None

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")  # tried in this order after the configured one
COMPILE_SECONDS = 60  # a compiler that needs longer for one file is given up

# kinds of arguments for `function`
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
KINDS = {"p": POINTER, "l": LONG, "i": INT, "f": FLOAT}


@dataclass(frozen=True, slots=True)
class Status:
    available: bool
    detail: str  # what is in use, or why nothing is
    path: Path | None = None
    compiled_seconds: float = 0.0  # 0: it was in the cache


class Failed(Exception):
    """Why there is no library; never leaves this file."""


@dataclass(slots=True)
class Settings:
    mode: str = "auto"  # "auto", "on" or "off", as cpu.native
    compiler: str = "cc"
    cache_dir: str = ""


_settings = Settings()
_library: ctypes.CDLL | None = None
_status: Status | None = None


def setup(mode: str, compiler: str = "cc", cache_dir: str = "") -> Status:
    """Choose before the first kernel runs; values as the settings cpu.native, cpu.compiler and cpu.cache_dir.

    Raises  NativeBuildError when mode is "on" and there is no library.
    """
    global _library, _status
    chosen = Settings(mode, compiler, cache_dir)
    if (chosen.mode, chosen.compiler, chosen.cache_dir) != (_settings.mode, _settings.compiler, _settings.cache_dir):
        _settings.mode, _settings.compiler, _settings.cache_dir = mode, compiler, cache_dir
        if _library is None:
            _status = None
        else:
            # the loaded object stays loaded; only whether it is used can still change
            _status = Status(False, "switched off by cpu.native") if mode == "off" else _loaded(Path(_library._name))
    found = status()
    if mode == "on" and not found.available:
        raise NativeBuildError(found.detail)
    return found


def status() -> Status:
    """What is in use; compiles or loads when that has not happened yet."""
    global _library, _status
    if _status is not None:
        return _status
    if _settings.mode == "off":
        _status = Status(False, "switched off by cpu.native")
        return _status
    started = time.perf_counter()
    try:
        path, built = _find_or_build()
        _library = ctypes.CDLL(str(path))
        _library.benthic_keep_memory()
        seconds = time.perf_counter() - started if built else 0.0
        _status = _loaded(path, seconds)
        if built:
            log.info("native kernels compiled", extra={"path": path, "seconds": round(seconds, 2)})
    except (Failed, OSError) as error:
        _library = None
        _status = Status(False, str(error))
        log.warning("native kernels not available, plain torch runs instead", extra={"reason": str(error)})
    return _status


def _loaded(path: Path, seconds: float = 0.0) -> Status:
    return Status(True, f"{path.name}, {_pool()[1]}", path, seconds)


def available() -> bool:
    return status().available


def function(name: str, kinds: str, result: Any = None) -> Callable[..., Any]:
    """A C function of the library, or a stand-in that is never called when there is no library.

    kinds   one letter an argument: p pointer, l int64, i int32, f float.
    result  ctypes type of what it returns; None: nothing.
    """
    if not available() or _library is None:
        return _absent
    found = getattr(_library, name)
    found.argtypes = [KINDS[kind] for kind in kinds]
    found.restype = result
    return found


def _absent(*_: object) -> None:
    raise NativeBuildError(status().detail)


def check(code: int) -> None:
    """For C functions that return 1 when memory ran out."""
    if code:
        raise MemoryError("a native CPU kernel found no memory for its temporaries")


# ---- what the wrappers share ---------------------------------------------------------------------------------------

threads = torch.get_num_threads
BF16, F32 = torch.bfloat16, torch.float32


def wide(x: Tensor) -> int | None:
    """1 for float32, 0 for bfloat16, None for what the C kernels do not take."""
    dtype = x.dtype
    return 0 if dtype is BF16 else 1 if dtype is F32 else None


def rows_of(x: Tensor) -> Tensor:
    """x with its last axis contiguous, copied if need be."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


# ---- compiling -------------------------------------------------------------------------------------------------------


def _find_or_build() -> tuple[Path, bool]:
    """(shared object, whether it was compiled now). Raises Failed."""
    compiler = _compiler()
    version = _run([compiler, "--version"]).splitlines()[0]
    gomp, _ = _pool()
    sources = sorted(HERE.glob("*.c"))
    key = hashlib.sha256()
    for file in [*sources, *sorted(HERE.glob("*.h"))]:
        key.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    for text in (version, " ".join(FLAGS), _processor(), str(gomp)):
        key.update(text.encode() + b"\0")
    folder = Path(_settings.cache_dir) if _settings.cache_dir else config.user_cache_dir()
    folder = folder / "native"
    path = folder / f"kernels-{key.hexdigest()[:20]}.so"
    if path.exists():
        return path, False
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not path.exists():
            _compile(compiler, sources, gomp, path)
            return path, True
    return path, False


def _compiler() -> str:
    for name in dict.fromkeys((_settings.compiler, *COMPILERS)):
        found = shutil.which(name)
        if found:
            return found
    raise Failed(f"no C compiler ({', '.join(dict.fromkeys((_settings.compiler, *COMPILERS)))}) on the path")


def _compile(compiler: str, sources: list[Path], gomp: Path | None, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        for openmp in (["-fopenmp"], []):
            objects = [Path(room) / f"{source.stem}.o" for source in sources]
            commands = [
                [compiler, *FLAGS, *openmp, "-c", str(source), "-o", str(target)]
                for source, target in zip(sources, objects, strict=True)
            ]
            out = Path(room) / "kernels.so"
            # torch's pool by its own file; the compiler's choice only where torch brings none
            pool = [str(gomp)] if gomp and openmp else openmp
            link = [compiler, "-shared", "-o", str(out), *map(str, objects), *pool, "-lm"]
            try:
                with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool_of_compilers:
                    list(pool_of_compilers.map(_run, commands))
                _run(link)
                os.replace(out, path)
                return
            except Failed as error:
                if not openmp or not re.search(r"openmp|omp\.h|-l\w*omp", str(error)):
                    raise


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise Failed(f"{Path(command[0]).name} failed: {lines[0][:300]}")
    return done.stdout or done.stderr or "?"


def _pool() -> tuple[Path | None, str]:
    """The OpenMP library torch brings along, and a word on it."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return (found[0], "torch's OpenMP pool") if found else (None, "an OpenMP pool of its own")


def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    kept = {line for line in lines if line.startswith(("flags", "Features", "model\t", "cpu family"))}
    return "\n".join([platform.machine(), platform.system(), *sorted(kept)])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
