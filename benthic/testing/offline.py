"""Triton kernels compiled for Hopper, or counted, on a machine without a GPU, by running the Python around them.

Inside `compiling()` every kernel launch becomes a compilation with the very arguments of that launch, so alignment and
constants are what they are on the device; nothing is computed. Inside `counting()` launches are only counted. Not in a
process that runs Triton's interpreter.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benthic.kernels.triton.warm import Hopper


class Built(NamedTuple):
    """One compiled kernel."""

    name: str
    registers: int  # a thread
    stack_bytes: int  # a thread; above 0 something spills or is indexed at run time
    shared_bytes: int  # a block
    warps: int
    wgmma: int  # warp-group matrix instructions in the PTX
    asm: dict[str, Any]  # "ttgir", "ptx", "cubin", ...


def _resources(kernel: Any) -> Built:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers is not None, text
    assert stack is not None, text
    meta = kernel.metadata
    wgmma = kernel.asm["ptx"].count("wgmma.mma_async")
    return Built(meta.name, int(registers[1]), int(stack[1]), meta.shared, meta.num_warps, wgmma, kernel.asm)


@contextmanager
def compiling() -> Iterator[list[Built]]:
    """Inside this block launches only compile; the list has one entry a launch."""
    built: list[Built] = []
    launch = JITFunction.__getitem__

    def compile_only(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            built.append(_resources(kernel.warmup(*args, grid=(1,), **options)))

        return call

    driver.set_active(cast("Any", Hopper()))
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
    try:
        yield built
    finally:
        JITFunction.__getitem__ = launch  # type: ignore[method-assign]


# operations of torch that launch nothing where this is used: views, new memory, and the zeros of `warm.noted`
# fmt: off
VIEWS = frozenset({
    "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "flatten", "narrow",
    "new_empty", "permute", "reshape", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t", "to",
    "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as", "zero_",
})
# fmt: on


class _Operations(TorchDispatchMode):
    """Counts operations of torch that would launch a kernel."""

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in VIEWS:
            self.counts[f"torch.{name}"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Inside this block kernels are counted by name and not launched; those of torch, which run, as "torch.<name>"."""
    counts: Counter[str] = Counter()
    launch = JITFunction.__getitem__

    def count_only(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            counts[kernel.fn.__name__] += 1

        return call

    JITFunction.__getitem__ = count_only  # type: ignore[method-assign]
    try:
        with _Operations(counts):
            yield counts
    finally:
        JITFunction.__getitem__ = launch  # type: ignore[method-assign]
