"""Can Triton kernels run in this process: on a GPU, or under Triton's interpreter, which runs them on CPU tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. For wrappers on the host, which run before every launch: Triton's takes 50 times as long."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; n in [1, 2**62]. For wrappers on the host, as `cdiv`."""
    return 1 << (n - 1).bit_length()


_elsewhere = False  # they are only compiled here, for a GPU that is not


def available() -> bool:
    """Asked before a kernel of this package is launched for the first time."""
    return _elsewhere or _here()


@cache
def _here() -> bool:
    try:
        from triton import knobs
    except ImportError:
        return False
    keys_of_their_own()
    return torch.cuda.is_available() or bool(knobs.runtime.interpret)


@contextmanager
def compiling_elsewhere() -> Iterator[None]:
    """Inside this block kernels count as available; whoever enters it sees to it that none is launched."""
    global _elsewhere
    before, _elsewhere = _elsewhere, True
    keys_of_their_own()
    try:
        yield
    finally:
        _elsewhere = before


@cache
def keys_of_their_own() -> None:
    """Make a kernel's key in Triton's cache depend on nothing but the kernel.

    The key counts the globals of every function that the kernel calls. Triton takes them over before it has looked for
    them, unless somebody asked for that function's own key before. So the key would depend on which kernels came first,
    and another process would compile again what is in the cache.
    """
    from triton.runtime import jit

    finder = jit.DependenciesFinder
    take = finder._update_hash

    def look_first(self: jit.DependenciesFinder, function: jit.JITCallable) -> None:
        _ = function.cache_key
        take(self, function)

    finder._update_hash = look_first
