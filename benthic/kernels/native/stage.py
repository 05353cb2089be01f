"""File bytes over pinned pieces to a device, in C; for `models/loading.py`, whose own loop does the same in Python."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benthic.kernels.native import build
from benthic.kernels.native.build import LONG, POINTER
from benthic.kernels.native.build import available as available

DONE, NOT_READ, CUT_SHORT, NOT_COPIED = range(4)
PIECES = 2


class Run(ctypes.Structure):
    """Bytes that follow each other in a file and in the batch: descriptor, first byte there, first byte here, bytes."""

    _fields_ = (("file", LONG), ("offset", LONG), ("at", LONG), ("nbytes", LONG))


class _Lane(ctypes.Structure):
    _fields_ = (
        ("pieces", POINTER * PIECES),
        ("events", POINTER * PIECES),
        ("nbytes", LONG),
        ("turn", LONG),
        ("stream", POINTER),
    )


class Driver(ctypes.Structure):
    """Addresses of what copies, records an event and waits for one; all 0: the host's memory is written."""

    _fields_ = (("copy", POINTER), ("record", POINTER), ("wait", POINTER))


class _Failure(ctypes.Structure):
    _fields_ = (("code", LONG), ("run", LONG), ("offset", LONG))


class Missing(NamedTuple):
    """A file ends before a run does."""

    run: int
    offset: int  # the first byte that is missing


@lru_cache(maxsize=1)
def cuda() -> Driver:
    """The driver of NVIDIA's GPUs, whose handles are those of the runtime and of torch."""
    library = ctypes.CDLL("libcuda.so.1")
    names = ("cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventSynchronize")
    return Driver(*(ctypes.cast(getattr(library, name), POINTER) for name in names))


@lru_cache(maxsize=1)
def _function() -> Any:
    return build.function("benthic_stage", "pllllppp", ctypes.c_int32)


class Lane:
    """One thread's pieces in the form that C reads; they are used in turn, over all calls.

    pieces  PIECES tensors of the same size in host memory, pinned where the device is a GPU.
    events  of each piece's last copy, as handles; 0 without a GPU.
    stream  its handle.
    """

    def __init__(self, pieces: Sequence[Tensor], events: Sequence[int], stream: int, driver: Driver):
        addresses = [piece.data_ptr() for piece in pieces]
        self._pieces = pieces  # kept as long as C may write there
        self._lane = _Lane(
            (POINTER * PIECES)(*addresses), (POINTER * PIECES)(*events), len(pieces[0]), PIECES - 1, stream
        )
        self._driver = driver

    def fetch(self, runs: Sequence[Run], start: int, end: int, out: int) -> Missing | None:
        """Bytes start .. end-1 of a batch, which begins at the address `out`; the last copies may be under way.

        Without a driver and with 0 for `out` the bytes are read, and nothing else.

        runs     by their place in the batch; what lies between them gets any value.
        returns  what a file lacks; None: nothing.
        Raises   OSError; torch.cuda.CudaError.
        """
        failure = _Failure()
        given = (Run * len(runs))(*runs)
        near = [ctypes.byref(one) for one in (given, self._lane, self._driver, failure)]
        found = _function()(near[0], len(runs), start, end, out, *near[1:])
        if found == CUT_SHORT:
            return Missing(failure.run, failure.offset)
        if found == NOT_READ:
            raise OSError(failure.code, "a file of the checkpoint is not read")
        if found == NOT_COPIED:
            torch.cuda.check_error(failure.code)
        return None
