"""Where the time of a run goes: methods named as its parts leave marks when they begin and end.

On a GPU a mark is an event that the run's CUDA graph records, so that no launch is timed; on a CPU it is the clock.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benthic.bench.timing import Run, capture

Parts = Mapping[tuple[type, str], str]  # class, method -> name of the part


@dataclass(slots=True)
class Span:
    part: str
    depth: int
    start: Any
    end: Any


@dataclass(slots=True)
class Marks:
    """The spans of one run, in the order in which they began."""

    device: torch.device
    spans: list[Span] = field(default_factory=list[Span])
    depth: int = 0

    def now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        return event

    def around(self, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            span = Span(part, self.depth, self.now(), None)
            self.spans.append(span)
            self.depth += 1
            try:
                return run(*args, **kwargs)
            finally:
                self.depth -= 1
                span.end = self.now()

        return marked

    def seconds(self) -> dict[str, float]:
        """Own time of each part: a part inside another counts for itself alone."""
        spent: dict[str, float] = {}
        above: list[str] = []  # parts that are open
        for span in self.spans:
            length = self._length(span)
            del above[span.depth :]
            if above:
                spent[above[-1]] -= length
            above.append(span.part)
            spent[span.part] = spent.get(span.part, 0.0) + length
        return spent

    def _length(self, span: Span) -> float:
        return span.end - span.start if self.device.type != "cuda" else span.start.elapsed_time(span.end) / 1e3


@contextmanager
def marked(parts: Parts, marks: Marks) -> Iterator[None]:
    """Inside this block every call of a part leaves its marks."""
    plain = {(owner, name): getattr(owner, name) for owner, name in parts}
    for (owner, name), part in parts.items():
        setattr(owner, name, marks.around(part, plain[owner, name]))
    try:
        yield
    finally:
        for (owner, name), run in plain.items():
            setattr(owner, name, run)


def time_parts(run: Run, parts: Parts, device: torch.device, repeats: int = 5) -> dict[str, float]:
    """Seconds of each part, medians over some replays. `run` has run before, so that nothing is left to compile."""
    samples: list[dict[str, float]] = []
    marks = Marks(device)
    if device.type != "cuda":
        for _ in range(2):
            marks = Marks(device)
            with marked(parts, marks):
                run()
            samples.append(marks.seconds())
    else:
        with marked(parts, marks):
            graph = capture([run], device)
        for _ in range(repeats):
            graph.replay()
            torch.cuda.synchronize(device)
            samples.append(marks.seconds())
        graph.reset()
    return {part: median(sample[part] for sample in samples) for part in samples[0]}
