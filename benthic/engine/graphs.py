"""CUDA graphs of steps: captured once for each of a few numbers of rows, replayed for every step that fits.

A step of n rows runs in the smallest size that holds it; the rows beyond are padding (slot 0, position 0, block 0). All
that a step is told lies in one buffer at a fixed place, so a replay is one copy and one launch. Sizes are captured from
the largest down and share one memory pool, so the small ones need none of their own; what a size leaves (hidden states,
logits, tokens, peaks) is read before the next replay.
"""

import gc
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def sizes(most: int) -> tuple[int, ...]:
    """Rows that graphs of decode steps are captured for: 1, 2, 4, ... and `most`."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*powers, most)


def prompt_sizes(most: int) -> tuple[int, ...]:
    """The same for steps with prompts: 16, 32, ..., 256, 384, 512, 768, ... as far as `most`.

    Small steps take as long as their launches, so padding costs nothing; from 256 rows on it is a third at most.
    """
    found = {rows for i in range(4, max(most.bit_length(), 1)) for rows in (1 << i, 3 << i >> 1)}
    return tuple(sorted(rows for rows in found if rows <= most and (rows > 256 or rows & (rows - 1) == 0)))


class Recorded(NamedTuple, Generic[T]):
    """A run that can be repeated: the same kernels on the same tensors."""

    result: T
    replay: Callable[[], object]


class Record(Protocol):
    """`CudaRecorder()`; a test on a CPU has its own."""

    def __call__(self, run: Callable[[], T]) -> Recorded[T]: ...


class Graphs(Generic[T]):
    """Recorded runs of `step`, one a size.

    columns  [c, the largest size] int64: what a step is told. Size n reads its first c * n numbers as [c, n].
    sizes    rising.
    step     computes one on the device alone.
    """

    def __init__(self, columns: Tensor, sizes: Sequence[int], step: Callable[[Tensor], T], record: Record):
        self.sizes, self._columns = tuple(sizes), columns
        columns.zero_()  # every row is padding
        self._recorded = {n: record(lambda n=n: step(self.columns(n))) for n in reversed(self.sizes)}

    def size(self, rows: int) -> int | None:
        """The size that holds so many rows; None: there is none."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if rows > 0 and at < len(self.sizes) else None

    def columns(self, size: int) -> Tensor:
        count = self._columns.shape[0]
        return self._columns.view(-1)[: count * size].view(count, size)

    def run(self, size: int) -> T:
        """Repeat the step on what `columns(size)` says now. The result is overwritten by the next run of any size."""
        recorded = self._recorded[size]
        recorded.replay()
        return recorded.result


class NotCapturable(Exception):
    """The step waits for the device somewhere, so no graph can hold it."""


class CudaRecorder:
    """Captures on one stream into one pool. Before each capture the step runs twice: first whatever is set up on first
    use (compilation, tables) is, then any wait for the device raises NotCapturable, and capture sees it refused too."""

    def __init__(self, device: torch.device):
        gc.collect()  # graphs of an engine that is gone
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], T]) -> Recorded[T]:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run()
            try:
                with waits_refused():
                    run()
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                raise NotCapturable(str(error).splitlines()[0]) from error
        torch.cuda.current_stream().wait_stream(self.stream)
        with (
            uncollected(),
            torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"),
            waits_refused(),
        ):
            result = run()
        return Recorded(result, graph.replay)


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside this block nothing is collected: a graph that is freed while another is captured breaks it."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def waits_refused() -> Iterator[None]:
    """Inside this block whatever makes the host wait for the device raises RuntimeError, for the whole process."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
