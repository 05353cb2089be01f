"""Checkpoint bytes to a device: read ahead by several threads, copied over the link while the next ones are read.

Each worker owns two pinned pieces of host memory and a stream: while one piece is on its way to the device, the other
is filled from the file. Nothing is converted here; a module that takes a tensor copies it to its place on the device.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from benthic.errors import TruncatedFile
from benthic.models.weights import TORCH_DTYPES, Checkpoint, Stored

WORKERS = 8  # one reads a file from memory at 5 to 8 GB/s, a link takes 55
PIECE_BYTES = 16 << 20
AHEAD_BYTES = 2 << 30  # most device memory that holds tensors nobody has taken yet


class _Lane:
    """What one worker needs: two pinned pieces, each with the event that says its copy is done."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied = [torch.cuda.Event(), torch.cuda.Event()]

    def fetch(self, file: int, stored: Stored, out: Tensor) -> None:
        """Bytes of one tensor -> out [nbytes] uint8 on the device."""
        with torch.cuda.stream(self.stream):
            for i, start in enumerate(range(0, stored.nbytes, PIECE_BYTES)):
                piece, copied = self.pieces[i % 2], self.copied[i % 2]
                copied.synchronize()
                count = min(PIECE_BYTES, stored.nbytes - start)
                room: Any = piece[:count].numpy()  # a writable buffer
                got = os.preadv(file, [room], stored.offset + start)
                if got != count:
                    raise TruncatedFile(stored.shard, stored.offset + stored.nbytes, stored.offset + start + got)
                out[start : start + count].copy_(piece[:count], non_blocking=True)
                copied.record(self.stream)
        self.stream.synchronize()


class StagedCheckpoint:
    """A checkpoint whose tensors are on a device when they are handed out. Implements `modules.TensorSource`.

    The names given at the start are fetched in that order, ahead of being asked for; asking in another order costs
    speed, nothing else. Each is handed out once. A name outside of them stays on the host, a view of the mapped file.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, names: Sequence[str], progress: Any = None):
        self.checkpoint, self.device, self.progress = checkpoint, device, progress
        self._names = frozenset(names)
        self._waiting = deque(names)
        self._ahead: dict[str, Future[Tensor]] = {}
        self._ahead_bytes = 0
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        for _ in range(WORKERS):
            self._lanes.put(_Lane(device))
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="load")
        shards = {stored.shard for stored in checkpoint.stored.values()}
        self._files = {shard: os.open(shard, os.O_RDONLY) for shard in shards}
        self._fill()

    def tensor(self, name: str) -> Tensor:
        """One tensor in its stored dtype (F8_E8M0 as uint8). KeyError: no such name."""
        if name not in self._names:
            return self.checkpoint.tensor(name)
        stored = self.checkpoint.stored[name]
        future = self._ahead.pop(name, None)
        if future is not None:
            self._ahead_bytes -= stored.nbytes
        else:
            future = self._start(stored)
        raw = future.result()
        self._fill()
        if self.progress is not None:
            self.progress.update(stored.nbytes)
        return raw.view(TORCH_DTYPES[stored.dtype]).reshape(stored.shape)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            os.close(file)

    def _fill(self) -> None:
        while self._waiting and self._ahead_bytes < AHEAD_BYTES:
            name = self._waiting.popleft()
            stored = self.checkpoint.stored[name]
            self._ahead[name] = self._start(stored)
            self._ahead_bytes += stored.nbytes

    def _start(self, stored: Stored) -> "Future[Tensor]":
        with torch.inference_mode(False):  # a worker fills it, whatever mode the caller is in
            out = torch.empty(stored.nbytes, dtype=torch.uint8, device=self.device)
        ready = torch.cuda.Event()
        ready.record()  # the memory may have been somebody's on the main stream

        def run() -> Tensor:
            lane = self._lanes.get()
            try:
                lane.stream.wait_event(ready)
                lane.fetch(self._files[stored.shard], stored, out)
            finally:
                self._lanes.put(lane)
            return out

        return self._pool.submit(run)


@contextmanager
def staged(
    checkpoint: Checkpoint, device: torch.device, names: Sequence[str], progress: Any = None
) -> Iterator[StagedCheckpoint]:
    """A `StagedCheckpoint` that is closed at the end. progress: has `update(bytes)`; None: silent.

    Raises TruncatedFile when a file has shrunk since it was opened.
    """
    source = StagedCheckpoint(checkpoint, device, names, progress)
    try:
        yield source
    finally:
        source.close()
