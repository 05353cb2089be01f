"""Checkpoint bytes to a device: read ahead by several threads, copied over the link while the next ones are read.

Tensors travel in batches of at most JOB_BYTES, larger ones in several jobs, so that what Python does for each future,
buffer and copy is paid once for many small tensors, and a large one is not left to one thread. Each worker owns two
pinned pieces of host memory and a stream: while one piece is on its way to the device, the other is filled from the
file; nobody waits for a copy but who needs its piece or its stream again. Nothing is converted here; a module that
takes a tensor copies it to its place on the device.

Of a job's pieces C takes care where there are native kernels (`kernels/native/stage.c`); without, the same loop runs in
Python, on larger pieces. On an H200, files in memory, that is 49 GB/s of the link's 55 (`benthic bench load`).

Tables that stay on the host are read by the same threads straight to the memory in which a GPU will read them.
"""

import mmap
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from benthic.errors import HostMemoryNotLocked, OutOfMemory, TruncatedFile
from benthic.host import memory_bytes
from benthic.kernels.native import stage
from benthic.models.weights import TORCH_DTYPES, Checkpoint, Stored

WORKERS = 12
PIECE_BYTES = 4 << 20  # one copy over the link: two a worker stay in a processor's caches
PLAIN_PIECE_BYTES = 16 << 20  # without native kernels, where each piece costs a wait for Python's lock
JOB_BYTES = 32 << 20  # what a worker fetches at a time, and most of a batch that has more than one tensor
AHEAD_BYTES = 2 << 30  # most device memory that holds tensors nobody has taken yet
ALIGNMENT = 256  # bytes, of tensors in a batch
MOST_BUFFERS = 1024  # that one call fills


class Part(NamedTuple):
    """One tensor of a batch."""

    stored: Stored
    at: int  # its first byte in the batch


@dataclass(eq=False, slots=True)
class Batch:
    """Tensors that share a buffer on the device, where they lie one behind the other."""

    parts: dict[str, Part] = field(default_factory=dict[str, Part])
    nbytes: int = 0  # of the buffer
    begun: bool = False
    out: Tensor | None = None  # [nbytes] uint8, while somebody may still ask for a tensor
    jobs: list["Future[torch.cuda.Event | None]"] = field(default_factory=list["Future[torch.cuda.Event | None]"])

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """First byte and end of each job."""
        return ((start, min(start + JOB_BYTES, self.nbytes)) for start in range(0, self.nbytes, JOB_BYTES))


def batches(stored: Mapping[str, Stored], names: Iterable[str]) -> list[Batch]:
    """All names, in their order, by JOB_BYTES; a tensor that is larger is alone."""
    out: list[Batch] = []
    for name in names:
        batch = out[-1] if out else Batch()
        at = -(-batch.nbytes // ALIGNMENT) * ALIGNMENT
        if not out or (batch.parts and at + stored[name].nbytes > JOB_BYTES):
            batch, at = Batch(), 0
            out.append(batch)
        batch.parts[name] = Part(stored[name], at)
        batch.nbytes = at + stored[name].nbytes
    return out


def open_files(checkpoint: Checkpoint) -> dict[Path, int]:
    """A descriptor of each shard, which the caller closes."""
    return {shard: os.open(shard, os.O_RDONLY) for shard in {stored.shard for stored in checkpoint.stored.values()}}


class _Run:
    """Bytes that follow each other in one file, and where they go."""

    def __init__(self, shard: Path, start: int):
        self.shard, self.start, self.end = shard, start, start
        self.rooms: list[memoryview] = []

    def fill(self, file: int) -> None:
        rooms, at = deque(self.rooms), self.start
        while rooms:
            got = os.preadv(file, list(islice(rooms, MOST_BUFFERS)), at)
            if not got:
                raise TruncatedFile(self.shard, self.end, at)
            at += got
            while rooms and got >= len(rooms[0]):
                got -= len(rooms.popleft())
            if got:
                rooms[0] = rooms[0][got:]


def usual_piece_bytes() -> int:
    return PIECE_BYTES if stage.available() else PLAIN_PIECE_BYTES


def read(files: Mapping[Path, int], parts: Iterable[Part], start: int, end: int, room: memoryview) -> None:
    """Bytes start .. end-1 of a batch into `room`; what lies between tensors is left as it is. Raises TruncatedFile.

    Tensors that follow each other in a file are read by one call: threads that come back from calls wait for one lock.
    """
    run: _Run | None = None
    for stored, at in parts:
        first, last = max(at, start), min(at + stored.nbytes, end)
        if first >= last:
            continue
        where = stored.offset + first - at
        if run is None or run.end != where or run.shard != stored.shard:
            if run is not None:
                run.fill(files[run.shard])
            run = _Run(stored.shard, where)
        run.rooms.append(room[first - start : last - start])
        run.end += last - first
    if run is not None:
        run.fill(files[run.shard])


def locked(nbytes: int, device: torch.device, fill: Callable[[memoryview], object]) -> Tensor:
    """Host memory of this size, to the page, that kernels of a GPU read in place.

    Pinned tensors would be rounded up to a power of two. The memory is given back when the last tensor that lies in it
    goes; the device is waited for then. A child that the process forks does not have it.

    nbytes   > 0.
    fill     puts the content there, before the memory is locked: threads then share the work of making its pages.
    returns  [nbytes] uint8 on the CPU, page aligned; `is_pinned()` is true of it.
    Raises   HostMemoryNotLocked; what `fill` raises.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryNotLocked(nbytes, _lock_limit(), f"it cannot be had, {error}") from error
    with suppress(OSError):  # a system without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to make, to lock and to translate
    pages.madvise(mmap.MADV_DONTFORK)  # of locked pages a child would get copies at once
    array = np.frombuffer(pages, dtype=np.uint8)
    fill(memoryview(pages))
    at = array.ctypes.data
    cuda: Any = torch.cuda.cudart()
    with _on(device):
        try:
            torch.cuda.check_error(cuda.cudaHostRegister(at, nbytes, 0))  # 0: mapped for kernels, of every GPU
        except torch.cuda.CudaError as error:
            with suppress(RuntimeError):
                torch.ones(1, device=device)  # the next launch is told of it, and must not be somebody else's
            raise HostMemoryNotLocked(nbytes, _lock_limit(), str(error)) from error
    # Tensors hold the array, the array holds the pages; what is registered here runs before they go. At exit it does
    # not run at all, since threads may still be launching kernels; the system then takes everything back.
    weakref.finalize(array, _unlock, at, device).atexit = False
    return torch.from_numpy(array)


def _unlock(at: int, device: torch.device) -> None:
    cuda: Any = torch.cuda.cudart()
    with _on(device):
        torch.cuda.synchronize()  # a kernel may be reading there
        torch.cuda.check_error(cuda.cudaHostUnregister(at))


def _lock_limit() -> int | None:
    """Bytes that this process may lock; None: any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _on(device: torch.device) -> Any:
    """Makes it the current one, so that nothing is set up on another."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Lane:
    """What one worker needs: two pieces, pinned where the device is a GPU, each with the event of its last copy."""

    def __init__(self, device: torch.device, piece_bytes: int):
        gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if gpu else None
        with _on(device):
            self.pieces = [
                torch.empty(piece_bytes, dtype=torch.uint8, device="cpu", pin_memory=gpu) for _ in range(stage.PIECES)
            ]
        arrays: list[Any] = [piece.numpy() for piece in self.pieces]
        self.rooms = [memoryview(array) for array in arrays]
        # of each piece's last copy; blocking, or whoever waits takes a core
        self.copied = [torch.cuda.Event(blocking=True) if gpu else None for _ in self.pieces]
        self.turn = 0
        self.native: stage.Lane | None = None
        if stage.available():
            handles: list[int] = []
            for event in self.copied:
                if event is not None:
                    event.record(self.stream)  # before it has none
                handles.append(0 if event is None else event.cuda_event)
            stream, driver = (0, stage.Driver()) if self.stream is None else (self.stream.cuda_stream, stage.cuda())
            self.native = stage.Lane(self.pieces, handles, stream, driver)

    def fetch(
        self,
        files: Mapping[Path, int],
        parts: Sequence[Part],
        start: int,
        end: int,
        out: Tensor | None,
        ready: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event | None:
        """Bytes start .. end-1 of a batch -> there in `out`, the batch's buffer; None: they are only read.

        ready    from then on `out` may be written.
        returns  when they are there; None: now.
        Raises   TruncatedFile.
        """
        if self.stream is None:
            self._fetch(files, parts, start, end, out)
            return None
        if ready is not None:
            self.stream.wait_event(ready)
        with torch.cuda.stream(self.stream):
            self._fetch(files, parts, start, end, out)
            done = torch.cuda.Event()
            done.record(self.stream)
        return done

    def _fetch(
        self, files: Mapping[Path, int], parts: Sequence[Part], start: int, end: int, out: Tensor | None
    ) -> None:
        if self.native is not None:
            self._fetch_native(self.native, files, parts, start, end, out)
            return
        for first in range(start, end, len(self.rooms[0])):
            self.turn = (self.turn + 1) % len(self.rooms)
            piece, copied, before = self.pieces[self.turn], self.copied[self.turn], first
            behind = min(before + len(piece), end)
            if copied is not None:
                copied.synchronize()
            read(files, parts, before, behind, self.rooms[self.turn])
            if out is not None:
                out[before:behind].copy_(piece[: behind - before], non_blocking=True)
            if copied is not None:
                copied.record(self.stream)

    def _fetch_native(
        self,
        native: stage.Lane,
        files: Mapping[Path, int],
        parts: Sequence[Part],
        start: int,
        end: int,
        out: Tensor | None,
    ) -> None:
        met = [part for part in parts if part.at < end and part.at + part.stored.nbytes > start]
        runs = [stage.Run(files[stored.shard], stored.offset, at, stored.nbytes) for stored, at in met]
        missing = native.fetch(runs, start, end, 0 if out is None else out.data_ptr())
        if missing is not None:
            stored = met[missing.run].stored
            raise TruncatedFile(stored.shard, stored.offset + stored.nbytes, missing.offset)


class StagedCheckpoint:
    """A checkpoint whose tensors are on a device when they are handed out. Implements `modules.TensorSource`.

    The names given at the start are fetched in that order, ahead of being asked for; asking in another order costs
    speed, nothing else. Each is read once, unless it is asked for again. All are asked for by one thread on one stream,
    for which they are ready. A name outside of them stays on the host, a view of the mapped file. A tensor that is kept
    keeps its batch's buffer.

    It reads while it is a context; what was handed out stays. Raises TruncatedFile when a file has shrunk since.

    device    a GPU, as a rule; on the CPU tensors are copies in memory.
    progress  has `update(bytes)`; None: silent.
    piece_bytes  of one copy over the link; None: `usual_piece_bytes()`.
    tables  further names, whose tensors stay on the host and are read in place by the GPU (`locked`); each is read when
            it is asked for, straight to its place.
    Raises  OutOfMemory when the host has no room for the tables.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        names: Sequence[str],
        progress: Any = None,
        workers: int = WORKERS,
        piece_bytes: int | None = None,
        tables: Collection[str] = (),
    ):
        if tables:
            need, (_, free) = sum(checkpoint.stored[name].nbytes for name in tables), memory_bytes()
            if need > free:
                remedy = "free memory of the host, or set gpu.engram_tables to device"
                raise OutOfMemory("holding tables in host memory", need, free, remedy)
        if device.type == "cuda" and device.index is None:  # other threads have another current one
            device = torch.device("cuda", torch.cuda.current_device())
        self.checkpoint, self.device, self.progress = checkpoint, device, progress
        self._names, self._tables = frozenset(names), frozenset(tables)
        self._waiting = deque(batches(checkpoint.stored, names))
        self._batch_of = {name: batch for batch in self._waiting for name in batch.parts}
        self._ahead_bytes = 0
        usual = usual_piece_bytes()  # whether there are native kernels is found out here, not by every worker
        self._piece_bytes = usual if piece_bytes is None else piece_bytes
        self._own = threading.local()  # of a worker: its lane, made when it first works
        self._lanes: list[Lane] = []
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="load")
        self._files = open_files(checkpoint)
        self._fill()

    def tensor(self, name: str) -> Tensor:
        """One tensor in its stored dtype (F8_E8M0 as uint8). KeyError: no such name. Raises HostMemoryNotLocked."""
        if name in self._tables:
            return self._table(name)
        if name not in self._names:
            return self.checkpoint.tensor(name)
        batch = self._batch_of.pop(name, None)
        if batch is None:
            (batch,) = batches(self.checkpoint.stored, [name])
        if not batch.begun:
            self._begin(batch)
        out = batch.out
        assert out is not None, f"the buffer of {name} is gone"
        for job in batch.jobs:
            done = job.result()
            if done is not None:
                torch.cuda.current_stream(self.device).wait_event(done)
        batch.jobs.clear()
        stored, at = batch.parts.pop(name)
        if not batch.parts:
            batch.out = None
        self._ahead_bytes -= stored.nbytes
        self._fill()
        if self.progress is not None:
            self.progress.update(stored.nbytes)
        return out[at : at + stored.nbytes].view(TORCH_DTYPES[stored.dtype]).view(stored.shape)

    def _table(self, name: str) -> Tensor:
        (batch,) = batches(self.checkpoint.stored, [name])
        (part,) = batch.parts.values()

        def fill(room: memoryview) -> None:
            spans = list(batch.spans)
            jobs = [self._pool.submit(read, self._files, [part], start, end, room[start:end]) for start, end in spans]
            for job, (start, end) in zip(jobs, spans, strict=True):
                job.result()
                if self.progress is not None:
                    self.progress.update(end - start)

        with torch.inference_mode(False):
            out = locked(batch.nbytes, self.device, fill)
            return out.view(TORCH_DTYPES[part.stored.dtype]).view(part.stored.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for lane in self._lanes:
            if lane.stream is not None:
                lane.stream.synchronize()  # buffers that nobody has taken are free now
        for file in self._files.values():
            os.close(file)

    def _fill(self) -> None:
        while self._waiting and self._ahead_bytes < AHEAD_BYTES:
            batch = self._waiting.popleft()
            if not batch.begun:
                self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        with torch.inference_mode(False):  # a worker fills it, whatever mode the caller is in
            out = torch.empty(batch.nbytes, dtype=torch.uint8, device=self.device)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))  # the memory may have been somebody's there
        batch.begun, batch.out = True, out
        parts = tuple(batch.parts.values())  # a copy: the batch loses them as they are taken
        self._ahead_bytes += sum(part.stored.nbytes for part in parts)
        for start, end in batch.spans:
            batch.jobs.append(self._pool.submit(self._fetch, parts, start, end, out, ready))

    def _fetch(
        self, parts: Sequence[Part], start: int, end: int, out: Tensor, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        lane: Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = Lane(self.device, self._piece_bytes)
            self._lanes.append(lane)
        return lane.fetch(self._files, parts, start, end, out, ready)
