"""Kernels compiled before they are needed, side by side.

Triton compiles a kernel at its first launch, one after another. Inside `noted` a launch only notes what it would
compile; `build` has processes of their own compile it into Triton's cache on disk, where the first launch finds it.
They never touch a GPU, so none is needed: `Hopper` stands in for its driver.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from os import sched_getaffinity
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, cast

import torch
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from benthic.kernels.triton.runtime import keys_of_their_own

keys_of_their_own()


class Job(NamedTuple):
    """A kernel to compile for certain arguments, as Triton itself writes it down."""

    module: str
    kernel: str
    data: str  # what the kernel's `preload` takes

    def preload(self) -> None:
        found: Any = import_module(self.module)
        for part in self.kernel.split("."):
            found = getattr(found, part)
        found.preload(self.data)


# ---- what a run would compile ----------------------------------------------------------------------------------------


class _Zeroed(TorchFunctionMode):
    """New whole numbers are zero, so that those which no kernel wrote are indices that exist."""

    NEW = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
    LARGE = 1 << 24  # elements; memory of a CPU that is never touched costs nothing, and no list is so long

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in self.NEW or found.dtype not in (torch.int32, torch.int64) or found.numel() > self.LARGE:
            return found
        return found.zero_()


@contextmanager
def noted(jobs: dict[Job, None]) -> Iterator[None]:
    """Inside this block a kernel that this process has not loaded is not launched, and joins `jobs` instead.

    Whole numbers that it would have written are zero, other values anything: shapes must not depend on them. Kernels
    that are loaded are launched. For one thread at a time.
    """

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        jobs[Job(fn.module, fn.jit_function.fn.__qualname__, compile["specialization_data"])] = None
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with _Zeroed():
            yield
    finally:
        knobs.runtime.jit_cache_hook = before


def kept(key: str, note: Callable[[], object]) -> list[Job]:
    """The jobs of `note()`, which launches; those of a call before with this key, which Triton's cache holds.

    key  everything that decides which kernels are launched, the package's code among it.
    """
    folder = get_cache_manager(sha256(key.encode()).hexdigest())
    path = folder.get_file("jobs.json")
    if path is not None:
        return [Job(*job) for job in json.loads(Path(path).read_text())]
    jobs: dict[Job, None] = {}
    with noted(jobs):
        note()
    folder.put(json.dumps([*jobs]), "jobs.json", binary=False)
    return [*jobs]


class _Keys(AsyncCompileMode):
    """Hears the key of what would be compiled, and compiles nothing."""

    def __init__(self) -> None:
        super().__init__(cast("Any", None))
        self.heard = ""

    def submit(self, key: str, compile_fn: Any, finalize_fn: Any) -> None:
        del compile_fn, finalize_fn
        self.heard = key


def missing(jobs: Iterable[Job]) -> list[Job]:
    """Those that Triton's cache does not have."""
    found: list[Job] = []
    with _Keys() as keys:
        for job in jobs:
            job.preload()
            folder = get_cache_manager(sha256(keys.heard.encode()).hexdigest())
            if folder.get_group(f"{job.kernel.rpartition('.')[2][:150]}.json") is None:
                found.append(job)
    return found


# ---- compiling them --------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A kernel that does not compile: its first launch will say so again, where it is launched."""

    job: Job
    error: str


def build(
    jobs: Iterable[Job], workers: int | None = None, done: Callable[[int, int], object] = lambda done, of: None
) -> list[Failure]:
    """Compile what the cache lacks, in processes side by side; returns what did not compile.

    workers  processes; None: as many as there are cores, and no more than jobs.
    done     is told after each kernel how many of how many there are.
    Cost     where nothing is missing, a few milliseconds a job; else 3 s and more to start the workers.
    """
    left = sorted(missing(jobs), key=lambda job: -len(job.data))  # those with many arguments take longest
    queue: SimpleQueue[Job] = SimpleQueue()
    for job in left:
        queue.put(job)
    workers = min(workers or len(sched_getaffinity(0)), len(left))
    failures: list[Failure] = []
    told: SimpleQueue[Failure | None] = SimpleQueue()
    threads = [Thread(target=_feed, args=(queue, told), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for i in range(len(left)):
        failure = told.get()
        if failure is not None:
            failures.append(failure)
        done(i + 1, len(left))
    for thread in threads:
        thread.join()
    return failures


def _feed(queue: "SimpleQueue[Job]", told: "SimpleQueue[Failure | None]") -> None:
    """Hand jobs to one worker as long as there are any; `told` hears of each. A worker that dies gets a successor."""
    worker: subprocess.Popen[str] | None = None
    try:
        while True:
            try:
                job = queue.get_nowait()
            except Empty:
                return
            if worker is None or worker.poll() is not None:
                worker = _worker()
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.flush()
                answer = worker.stdout.readline()
            except OSError:
                answer = ""
            error = json.loads(answer) if answer else f"the compiler ended with {worker.wait()}"
            told.put(Failure(job, error) if error else None)
    finally:
        if worker is not None:
            worker.communicate()


def _worker() -> "subprocess.Popen[str]":
    target = driver.active.get_current_target()
    words = [sys.executable, "-m", __name__, target.backend, str(target.arch), str(target.warp_size)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# ---- a worker --------------------------------------------------------------------------------------------------------


SM90 = GPUTarget("cuda", 90, 32)


class Hopper:
    """As much of a driver as compiling asks for, for one kind of GPU."""

    def __init__(self, target: GPUTarget = SM90):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def work(target: GPUTarget) -> None:
    """Compile the jobs on standard input, a line each; after each a line of JSON: null, or what is wrong."""
    driver.set_active(cast("Any", Hopper(target)))
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            Job(*json.loads(line)).preload()
            error = None
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"[:500]
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    backend, arch, warp_size = sys.argv[1:]
    work(GPUTarget(backend, int(arch), int(warp_size)))
