"""How long device work takes, and how long it would at least: CUDA graph replay, cold and warm, and measured ceilings.

Cold: a sweep that reads four times the L2 stands before every run in the graph, and the time of the sweeps alone is
taken off. The sweep only reads, so no dirty line is left for the next kernel to write back. Warm: the runs follow one
another. On a CPU everything is timed by the clock, and cold is not told apart.
"""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benthic.engine.graphs import waits_refused

REPLAYS = 15
GRAPH_SECONDS = 3e-3  # a graph holds so many runs that one replay takes about this long
MOST_RUNS = 24
L2_BYTES = 60 << 20  # H200

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does, measured in the same run as what is held against it."""

    read_bytes: float  # per second, a pure read
    copy_bytes: float  # per second, read and written bytes together
    bf16_flops: float  # per second, torch matmul
    fp8_flops: float  # per second, torch._scaled_mm with one scale a row; bf16's where there is none
    link_bytes: float  # per second, pinned host memory to the device; a copy in memory where that is the device
    launch_seconds: float  # one small kernel after another in a graph

    def floor(self, nbytes: float, flops: float, kind: str = "bf16", over_link: float = 0.0) -> float:
        """Seconds that neither the bytes, nor the operations, nor the bytes from the host allow to beat."""
        rate = getattr(self, f"{kind}_flops")
        return max(nbytes / self.read_bytes, flops / rate, over_link / self.link_bytes)

    def json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one run, medians."""

    cold: float
    warm: float
    captured: bool  # in a CUDA graph; False: launched one by one, so that launches count


# ---- the clock -------------------------------------------------------------------------------------------------------


class Timer:
    """Times functions on one device. It holds the buffer that is swept."""

    def __init__(self, device: torch.device, replays: int = REPLAYS):
        """replays: of a captured graph, or runs that are launched one by one; the median counts."""
        self.device, self.replays = device, replays
        self._sweeps: dict[int, float] = {}  # number of sweeps in a graph -> seconds
        self._sweep = None
        if device.type == "cuda":
            self._sweep = torch.ones(4 * L2_BYTES // 8, dtype=torch.int64, device=device)
            self._total = torch.zeros((), dtype=torch.int64, device=device)

    def sweep(self) -> None:
        if self._sweep is not None:
            torch.sum(self._sweep, dim=0, out=self._total)

    @torch.inference_mode()
    def time(self, run: Run, graph: bool = True) -> Timed:
        """Seconds of `run`, which works on the same tensors each time and may overwrite its own results.

        graph  it may be captured, unless it waits; False: work of the host is part of it.
        """
        if self.device.type != "cuda":
            took = self._clock(run)
            return Timed(took, took, False)
        runs = self._runs(run)
        if not graph or waits(run):
            warm = median(self._between(run) for _ in range(self.replays))
            return Timed(self._eager_cold(run), warm, False)
        return Timed(self._graph_cold(run, runs), self._graph([run] * runs) / runs, True)

    @torch.inference_mode()
    def cold(self, run: Run) -> float:
        """Seconds of `run`, cold alone. It does not wait for the device."""
        if self.device.type != "cuda":
            return self._clock(run)
        return self._graph_cold(run, self._runs(run))

    def _runs(self, run: Run) -> int:
        """How many go into a graph. Compiles what is to be compiled, and allocates."""
        for _ in range(2):
            run()
        torch.cuda.synchronize(self.device)
        return max(1, min(MOST_RUNS, int(GRAPH_SECONDS / max(self._between(run), 1e-7))))

    def _graph_cold(self, run: Run, runs: int) -> float:
        if runs not in self._sweeps:
            self._sweeps[runs] = self._graph([self.sweep] * runs)
        both = self._graph([self.sweep, run] * runs)
        return max(both - self._sweeps[runs], 0.0) / runs

    def _graph(self, work: list[Run]) -> float:
        """Seconds of one replay of all of `work`."""
        graph = capture(work, self.device)
        graph.replay()
        samples = [self._between(graph.replay) for _ in range(self.replays)]
        graph.reset()
        return median(samples)

    def _eager_cold(self, run: Run) -> float:
        samples: list[float] = []
        for _ in range(self.replays):
            self.sweep()
            samples.append(self._between(run))
        return median(samples)

    def _between(self, run: Run) -> float:
        """Seconds between two events around `run`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _clock(self, run: Run) -> float:
        run()
        samples: list[float] = []
        ends = perf_counter() + 0.02
        while len(samples) < 2 or (perf_counter() < ends and len(samples) < self.replays):
            started = perf_counter()
            run()
            samples.append(perf_counter() - started)
        return median(samples)


def waits(run: Run) -> bool:
    """Does something in it make the host wait for the device? Then no graph can hold it."""
    try:
        with waits_refused():
            run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    return False


def capture(work: list[Run], device: torch.device) -> torch.cuda.CUDAGraph:
    """One CUDA graph of all of `work`, in order. Each must have run before, and none of them may wait."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph):
            for run in work:
                run()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a capture that broke off leaves its own
        raise
    return graph


def release(device: torch.device) -> None:
    """Give back what graphs and results held that are gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- the ceilings ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure_ceilings(timer: Timer) -> Ceilings:
    """About a second on a GPU, less on a CPU."""
    device = timer.device
    large = device.type == "cuda"
    size = (2 << 30) if large else (16 << 20)
    source = torch.ones(size // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    copy = copy_seconds(source, target, timer)
    reads = [source, source.view(torch.float32), source.view(torch.bfloat16)]
    read = min(timer.time(lambda x=x: x.sum()).warm for x in reads)
    piece = torch.ones(size // 32, dtype=torch.int64, pin_memory=large)
    link = timer.time(lambda: target[: size // 32].copy_(piece, non_blocking=True), graph=False).warm
    n = 8192 if large else 256
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=generator, device=device).bfloat16() for _ in range(2))
    flops = 2.0 * n**3
    bf16 = flops / timer.time(lambda: a @ b.t()).warm
    fp8 = bf16
    if large:
        fp8 = flops / timer.time(scaled_mm(a, b)).warm
    few = torch.ones(64, device=device)
    launch = timer.time(lambda: few.add_(1)).warm
    return Ceilings(size / read, 2 * size / copy, bf16, fp8, size / 4 / link, launch)


def copy_seconds(source: Tensor, target: Tensor, timer: Timer) -> float:
    """The least that moving all of `source` into `target` takes, of the ways there are.

    A graph makes a node of `copy_` that copy engines may run, at two thirds of what memory does; so it is launched by
    itself, and kernels that read and write every word run beside it. Bytes moved are twice those of `source`.
    """
    ways = [timer.time(lambda: target.copy_(source), graph=False).warm]
    for dtype in (torch.int64, torch.int32):
        x, y = source.view(dtype), target.view(dtype)
        ways.append(timer.time(lambda x=x, y=y: torch.bitwise_not(x, out=y)).warm)
    return min(ways)


def scaled_mm(x: Tensor, weight: Tensor) -> Run:
    """cuBLAS on FP8 with one scale a row: x [M, K], weight [N, K], cast as they are -> [M, N] bf16."""
    a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    rows = torch.ones(x.shape[0], 1, device=x.device)
    columns = torch.ones(1, weight.shape[0], device=x.device)
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return lambda: product(a, b.t(), rows, columns, out_dtype=torch.bfloat16)


# ---- a trace ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """What a device did in one run, as a profiler saw it."""

    busy: float  # seconds in which at least one kernel ran
    kernels: dict[str, tuple[float, float]]  # name -> launches, seconds

    @property
    def kernel_seconds(self) -> float:
        return sum(seconds for _, seconds in self.kernels.values())


def trace(run: Run, times: int) -> Trace:
    """The mean of `times` runs on the GPU, back to back. Gaps between kernels are the profiler's own as well, so that
    idle time is told by `busy` against the time of a run that nobody watches."""
    profiler = watch()
    for _ in range(times):
        run()
    return seen(profiler, times)


def watch() -> Any:
    """From now on the GPU's work is recorded, until `seen`."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    profiler.start()
    return profiler


def seen(profiler: Any, times: int) -> Trace:
    """What was recorded since `watch`, in which the same work was done `times` times."""
    torch.cuda.synchronize()
    profiler.stop()
    spans: list[tuple[float, float]] = []
    kernels: dict[str, tuple[float, float]] = {}
    for event in profiler.events() or []:
        if event.device_type.name != "CUDA":
            continue
        start, end = event.time_range.start * 1e-6, event.time_range.end * 1e-6
        spans.append((start, end))
        count, took = kernels.get(event.name, (0.0, 0.0))
        kernels[event.name] = (count + 1 / times, took + (end - start) / times)
    return Trace(covered(spans) / times, kernels)


def covered(spans: list[tuple[float, float]]) -> float:
    """Time that lies in at least one of some intervals, which may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
