"""What makes a host wait for a device, caught where it is called. On a GPU torch refuses most of it; on a CPU, where
nothing ever waits, the calls themselves are refused.

The kernels are left out on a CPU: they are other functions there. What stands around them is the same.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import benthic
from benthic.engine import runner as runners
from benthic.engine.batch import Uploads
from benthic.engine.graphs import waits_refused
from benthic.engine.loop import Loop
from benthic.types import StepPlan

SOURCE = Path(benthic.__file__).parent
KERNELS = str(SOURCE / "kernels")
TO_HOST = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__len__"}
BY_VALUE = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "bincount"}
FROM_HOST = {"tensor", "as_tensor", "from_numpy", "scalar_tensor"}


class Waited(AssertionError):
    """The host would have waited."""


class Refused(TorchFunctionMode):
    """Refuses what waits, but on tensors of the host's own."""

    def __init__(self, host: Callable[[], list[Tensor]]):
        super().__init__()
        self.host, self.paused, self.seen = host, False, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.paused:
            self.seen += 1
            why = self.reason(getattr(func, "__name__", ""), args, kwargs)
            if why is not None and not _in_kernels():
                raise Waited(f"{why} makes the host wait for the device")
        return func(*args, **kwargs)

    def reason(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if name == "__len__" or (args and isinstance(args[0], Tensor) and self._of_host(args[0])):
            return None
        if name in TO_HOST | BY_VALUE | FROM_HOST:
            return name
        if name == "where" and len(args) == 1:
            return "where without values"
        if name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[-1], Tensor):
            return "repeat_interleave without its size"
        if name in ("__getitem__", "__setitem__") and _has_mask(args[1]):
            return "a mask as an index"
        if name == "copy_" and not kwargs.get("non_blocking") and args[0].device != args[1].device:
            return "a blocking copy"
        return None

    def _of_host(self, tensor: Tensor) -> bool:
        return any(
            own.data_ptr() <= tensor.data_ptr() < own.data_ptr() + own.numel() * own.element_size()
            for own in self.host()
        )


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _in_kernels() -> bool:
    """Is the nearest frame of the package one of its kernels?"""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(KERNELS):
            return True
        if file.startswith(str(SOURCE)):
            return False
        frame = frame.f_back
    return False


@contextmanager
def watched(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Inside this block no step of decode rows may wait for the device but where tokens are asked for.

    Yields the numbers of the steps that were watched.
    """
    runner = loop.runner
    assert isinstance(runner, runners.Runner)
    uploads = runner._uploads
    assert isinstance(uploads, Uploads), "the runner does not run steps in their GPU form"
    cuda = runner.storage.device.type == "cuda"
    backs, steps = runner._backs, list[int]()
    refused = Refused(lambda: [*uploads._buffers, *[back._host for back in backs]])
    start, wait = runner.start, runners._Back.wait

    def decodes(plan: StepPlan) -> bool:
        return bool(plan.chunks) and all(len(chunk.tokens) == 1 and chunk.before is None for chunk in plan.chunks)

    def guarded(plan: StepPlan) -> Any:
        if not decodes(plan):
            return start(plan)
        steps.append(plan.step)
        with waits_refused() if cuda else refused:
            found = start(plan)

        def result() -> Any:
            with nullcontext() if cuda else refused:
                return found()

        return result

    def asked(back: Any) -> Any:
        before, refused.paused = refused.paused, True
        try:
            return wait(back)
        finally:
            refused.paused = before

    monkeypatch.setattr(runner, "start", guarded)
    monkeypatch.setattr(runners._Back, "wait", asked)
    yield steps
    monkeypatch.undo()
    assert cuda or refused.seen or not steps
