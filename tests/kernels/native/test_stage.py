"""Pieces in turn: bytes of any span, copied only when somebody waits, and what is told when something fails."""

import ctypes
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benthic.kernels.native import build, stage
from benthic.kernels.native.build import POINTER

pytestmark = pytest.mark.skipif(not build.status().available, reason=f"no native kernels: {build.status().detail}")

COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Device:
    """Copies what a piece holds when its event is waited for, as late as a device may; refuses what it is told to."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, int, int]] = []  # where to, piece, bytes; not yet under an event
        self.under: dict[int, list[tuple[int, int, int]]] = {}
        self.streams: set[int] = set()
        self.pieces: list[int] = []  # that were copied
        self.refuses = ""
        self.made = (COPY(self.copy), RECORD(self.record), WAIT(self.wait))

    @property
    def driver(self) -> stage.Driver:
        return stage.Driver(*(ctypes.cast(one, POINTER) for one in self.made))

    def copy(self, to: int, piece: int, nbytes: int, stream: int) -> int:
        self.orders.append((to, piece, nbytes))
        self.pieces.append(piece)
        self.streams.add(stream)
        return 700 if self.refuses == "copy" else 0

    def record(self, event: int, stream: int) -> int:
        assert not self.under.get(event), "an event that somebody still has to wait for"
        self.under[event], self.orders = self.orders, []
        self.streams.add(stream)
        return 701 if self.refuses == "record" else 0

    def wait(self, event: int) -> int:
        for to, piece, nbytes in self.under.pop(event, []):
            ctypes.memmove(to, piece, nbytes)
        return 702 if self.refuses == "wait" else 0

    def finish(self) -> None:
        for event in list(self.under):
            self.wait(event)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(200)))
    number = os.open(path, os.O_RDONLY)
    yield number
    os.close(number)


def lane(nbytes: int, device: Device | None = None) -> stage.Lane:
    pieces = [torch.full((nbytes,), 0xEE, dtype=torch.uint8) for _ in range(stage.PIECES)]
    driver = stage.Driver() if device is None else device.driver
    return stage.Lane(pieces, [0, 0] if device is None else [11, 12], 0 if device is None else 77, driver)


@pytest.mark.parametrize("nbytes", [1, 7, 16, 100])
@pytest.mark.parametrize("late", [False, True], ids=["memory", "device"])
def test_bytes_of_any_span(file: int, nbytes: int, late: bool) -> None:
    """Three runs with gaps between them; one is of nothing. The lane is used again and again, as a worker does."""
    lies = ((10, 0, 20), (100, 32, 9), (0, 48, 0), (60, 48, 16))
    runs = [stage.Run(file, *one) for one in lies]
    want = {at + i: offset + i for offset, at, count in lies for i in range(count)}
    device = Device() if late else None
    one = lane(nbytes, device)
    for start, end in ((0, 64), (3, 40), (19, 33), (40, 41), (20, 20), (5, 64)):
        out = torch.full((64,), 0xAA, dtype=torch.uint8)
        assert one.fetch(runs, start, end, out.data_ptr()) is None
        if device is not None:
            device.finish()
            assert device.streams <= {77}
        got = out.tolist()
        for at in range(64):
            if not start <= at < end:
                assert got[at] == 0xAA, "nothing is written beside the span"
            elif at in want:
                assert got[at] == want[at], (start, end, at)


def test_bytes_that_are_only_read(file: int) -> None:
    assert lane(16).fetch([stage.Run(file, 0, 0, 50)], 0, 50, 0) is None


def test_pieces_take_turns(file: int) -> None:
    """Over calls too, so that one is filled while the other is on its way."""
    device = Device()
    one, out = lane(16, device), torch.zeros(200, dtype=torch.uint8)
    for _ in range(2):
        one.fetch([stage.Run(file, 0, 0, 200)], 0, 3 * 16, out.data_ptr())
        device.finish()
    used = device.pieces
    assert len(set(used)) == stage.PIECES
    assert all(a != b for a, b in pairwise(used))
    assert len(used) == 6


@pytest.mark.parametrize("late", [False, True], ids=["memory", "device"])
def test_a_file_that_ends_early(file: int, late: bool) -> None:
    device = Device() if late else None
    out = torch.zeros(64, dtype=torch.uint8)
    runs = [stage.Run(file, 10, 0, 20), stage.Run(file, 190, 20, 30)]
    assert lane(16, device).fetch(runs, 0, 50, out.data_ptr()) == stage.Missing(1, 200)


def test_a_file_that_is_not_read() -> None:
    with pytest.raises(OSError, match="not read") as raised:
        lane(16).fetch([stage.Run(1 << 20, 0, 0, 20)], 0, 20, 0)
    assert raised.value.errno == 9


@pytest.mark.parametrize(("what", "code"), [("copy", 700), ("record", 701), ("wait", 702)])
def test_what_the_driver_refuses(file: int, monkeypatch: pytest.MonkeyPatch, what: str, code: int) -> None:
    device = Device()
    device.refuses = what
    told: list[int] = []
    monkeypatch.setattr(torch.cuda, "check_error", told.append)
    out = torch.zeros(64, dtype=torch.uint8)
    lane(16, device).fetch([stage.Run(file, 0, 0, 64)], 0, 64, out.data_ptr())
    assert told == [code]
    assert len(device.orders) + sum(map(len, device.under.values())) <= 1, "and it ends there"
