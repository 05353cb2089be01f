"""Can Triton kernels run in this process: on a GPU, or under Triton's interpreter, which runs them on CPU tensors."""

from functools import cache

import torch


@cache
def available() -> bool:
    try:
        from triton import knobs
    except ImportError:
        return False
    return torch.cuda.is_available() or bool(knobs.runtime.interpret)
