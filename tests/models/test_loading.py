"""Tensors on their way to a device: equal to the file's, read once each, in any order, wherever they are cut; tables
that stay on the host, in memory of their size, locked as long as somebody has them; scales that are no numbers."""

import ctypes
import gc
import mmap
import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benthic import plan
from benthic.engine.llm import LLM
from benthic.errors import HostMemoryNotLocked, NonFiniteTensor, OutOfMemory, TruncatedFile
from benthic.kernels import backends, engram
from benthic.kernels.native import stage
from benthic.models import deepseek_v41, loading
from benthic.models.deepseek_v41 import MoE
from benthic.models.deepseek_v41_config import ModelConfig, tensors
from benthic.models.loading import ALIGNMENT, Part, StagedCheckpoint, batches, locked
from benthic.models.modules import packed_weights
from benthic.models.weights import Checkpoint, Stored
from benthic.testing.checkpoints import make_tiny, random_tensors, tiny_config
from benthic.types import NUMERICS, SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_tiny(tmp_path_factory.mktemp("loading") / "tiny", shard_bytes=3 << 20))


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, some tensors of many jobs, and little read ahead."""
    monkeypatch.setattr(loading, "JOB_BYTES", 100_000)
    monkeypatch.setattr(loading, "AHEAD_BYTES", 1 << 20)


@pytest.fixture(params=["in C", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who takes a job's pieces from the file."""
    if request.param == "in Python":
        monkeypatch.setattr(stage, "available", lambda: False)
    elif not stage.available():
        pytest.skip("no native kernels")
    return request.param


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit."""
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize("order", ["as given", "reversed", "by name"])
@pytest.mark.parametrize(("workers", "piece_bytes"), [(1, 1 << 20), (3, 7001)])
def test_tensors_are_those_of_the_file(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, way: str, order: str, workers: int, piece_bytes: int
) -> None:
    names = list(checkpoint.specs)
    asked = {"as given": names, "reversed": names[::-1], "by name": sorted(names)}[order]
    counts: list[int] = []
    if way == "in C":
        fetch = stage.Lane.fetch

        def seen(lane: stage.Lane, runs: list[stage.Run], start: int, end: int, out: int) -> Any:
            counts.extend(min(run.at + run.nbytes, end) - max(run.at, start) for run in runs)
            return fetch(lane, runs, start, end, out)

        monkeypatch.setattr(stage.Lane, "fetch", seen)
    else:
        plain = os.preadv

        def counted(file: int, rooms: list[Any], offset: int) -> int:
            counts.append(plain(file, rooms, offset))
            return counts[-1]

        monkeypatch.setattr(os, "preadv", counted)
    taken: list[int] = []

    class Progress:
        def update(self, nbytes: int) -> None:
            taken.append(nbytes)

    total = sum(checkpoint.stored[name].nbytes for name in names)
    with StagedCheckpoint(checkpoint, CPU, names, Progress(), workers=workers, piece_bytes=piece_bytes) as source:
        for name in asked:
            assert equal(source.tensor(name), checkpoint.tensor(name)), name
            assert source._ahead_bytes >= 0
        assert source._ahead_bytes == 0
        assert not source._waiting
    assert sum(counts) == sum(taken) == total, "each byte is read once, asked for in whatever order"


def test_batches_hold_every_name_once_and_in_order(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "JOB_BYTES", 100_000)
    names = list(checkpoint.specs)
    made = batches(checkpoint.stored, names)
    assert [name for batch in made for name in batch.parts] == names
    assert len(made) > 50
    for batch in made:
        end = 0
        for stored, at in batch.parts.values():
            assert at % ALIGNMENT == 0
            assert end <= at < end + ALIGNMENT
            end = at + stored.nbytes
        assert batch.nbytes == end
        assert end <= 100_000 or len(batch.parts) == 1, "a larger tensor is alone"
        spans = list(batch.spans)
        assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
        assert spans[-1][1] == end
        assert all(b - a <= 100_000 for a, b in spans)


@pytest.mark.usefixtures("small_jobs")
def test_little_is_read_ahead_and_nothing_is_kept(checkpoint: Checkpoint) -> None:
    names = list(checkpoint.specs)
    largest = max(stored.nbytes for stored in checkpoint.stored.values())
    with StagedCheckpoint(checkpoint, CPU, names) as source:
        for name in names:
            assert source._ahead_bytes < loading.AHEAD_BYTES + max(largest, loading.JOB_BYTES)
            source.tensor(name)
        assert not source._batch_of
    with StagedCheckpoint(checkpoint, CPU, names) as source:
        last = source._batch_of[names[-1]]
        for name in list(last.parts):
            assert last.out is None or last.begun
            source.tensor(name)
        assert last in source._waiting, "its turn comes much later"
        assert last.out is None, "but its buffer goes when all is taken"


def test_again_and_beside(checkpoint: Checkpoint) -> None:
    """A tensor that is asked for twice is read twice; one that was not announced is the file's own."""
    names = list(checkpoint.specs)
    with StagedCheckpoint(checkpoint, CPU, names[1:]) as source:
        first, again = source.tensor(names[5]), source.tensor(names[5])
        assert equal(first, again)
        assert first.data_ptr() != again.data_ptr()
        assert equal(source.tensor(names[0]), checkpoint.tensor(names[0]))
        with pytest.raises(KeyError):
            source.tensor("layers.0.nothing")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("taken", [0, 1])
def test_nothing_reads_on_when_it_is_over(checkpoint: Checkpoint, taken: int) -> None:
    """Left early by an error: its threads have ended before its files are closed."""
    names = list(checkpoint.stored)
    with suppress(KeyboardInterrupt), StagedCheckpoint(checkpoint, CPU, names, workers=3) as source:
        for name in names[:taken]:
            source.tensor(name)
        assert [thread for thread in threading.enumerate() if thread.name.startswith("load")]
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]
    for file in source._files.values():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


@pytest.mark.usefixtures("way")
def test_a_model_is_the_same_over_either_way(checkpoint: Checkpoint) -> None:
    """Also inside inference mode, in which a step's caller may be."""
    numerics = NUMERICS["production"]
    want = deepseek_v41.from_checkpoint(checkpoint, numerics)
    model = deepseek_v41.from_checkpoint(checkpoint, numerics)
    for parameter in model.parameters():
        parameter.data.zero_()
    names = [name for name in tensors(checkpoint.config) if not name.startswith("mtp.")]
    with torch.inference_mode(), StagedCheckpoint(checkpoint, CPU, names) as source:
        model.load(source)
    for (name, a), (_, b) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert equal(a, b), name


@pytest.mark.parametrize("most", [1 << 30, 5, 1], ids=["whole", "five bytes", "byte by byte"])
def test_bytes_of_any_span_whatever_a_call_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Two tensors that follow each other, one that lies elsewhere, one of nothing, one of another file."""
    one, other = tmp_path / "one", tmp_path / "other"
    content = {one: bytes(range(100)), other: bytes(range(100, 200))}
    for path, data in content.items():
        path.write_bytes(data)
    lies = [(one, 10, 7), (one, 17, 8), (one, 60, 3), (one, 63, 0), (other, 5, 9)]
    parts: list[Part] = []
    at, want = 0, bytearray(b"\xee" * 128)
    for shard, offset, nbytes in lies:
        parts.append(Part(Stored(shard, offset, nbytes, "U8", (nbytes,)), at))
        want[at : at + nbytes] = content[shard][offset : offset + nbytes]
        at = -(-(at + nbytes) // 16) * 16
    calls: list[int] = []
    preadv = os.preadv

    def stingy(file: int, rooms: list[memoryview], where: int) -> int:
        calls.append(where)
        return preadv(file, rooms if most > 100 else [rooms[0][:most]], where)

    monkeypatch.setattr(os, "preadv", stingy)
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb")).fileno() for path in content}
        for start, end in ((0, 128), (3, 40), (16, 17), (20, 80), (64, 64)):
            room = bytearray(b"\xee" * (end - start))
            loading.read(files, parts, start, end, memoryview(room))
            assert room == want[start:end], (start, end)
        calls.clear()
        loading.read(files, parts, 0, 128, memoryview(bytearray(128)))
        assert most < 100 or calls == [10, 60, 5]


@pytest.mark.usefixtures("way")
def test_a_file_that_shrank(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny(tmp_path / "tiny"))
    name = list(checkpoint.specs)[-1]
    shard = checkpoint.stored[name].shard
    with StagedCheckpoint(checkpoint, CPU, [name]) as source:
        assert equal(source.tensor(name), checkpoint.tensor(name))
        os.truncate(shard, checkpoint.stored[name].offset + 1)
        with pytest.raises(TruncatedFile, match="cut short") as raised:
            source.tensor(name)
        stored = checkpoint.stored[name]
        assert str(raised.value) == str(TruncatedFile(shard, stored.offset + stored.nbytes, stored.offset + 1))


@pytest.mark.gpu
@pytest.mark.usefixtures("small_jobs", "way")
@pytest.mark.parametrize(("workers", "piece_bytes"), [(1, 1 << 20), (4, 7001)])
def test_tensors_on_a_gpu_are_those_of_the_file(checkpoint: Checkpoint, workers: int, piece_bytes: int) -> None:
    """Their memory is overwritten as soon as they are gone, so a copy that came early or late shows."""
    names = list(checkpoint.specs)
    kept: list[torch.Tensor] = []
    with StagedCheckpoint(checkpoint, torch.device("cuda"), names, workers=workers, piece_bytes=piece_bytes) as source:
        for name in sorted(names):
            tensor = source.tensor(name)
            assert tensor.is_cuda
            kept.append(tensor.clone())
            tensor.view(-1).view(torch.uint8).fill_(0xA5)
    for name, tensor in zip(sorted(names), kept, strict=True):
        assert equal(tensor.cpu(), checkpoint.tensor(name)), name


# ---- tables on the host ----------------------------------------------------------------------------------------------


class Driver:
    """What locks memory, in the place of CUDA's runtime: keeps what it is told."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}  # address -> bytes
        self.flags: set[int] = set()
        self.asleep = 0  # how often the device was waited for
        self.late = False  # was memory gone before it was unlocked?
        self.answer = 0

    class cudaError(int):
        success = 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error number {code}"

    def cudaHostRegister(self, at: int, nbytes: int, flags: int) -> int:
        if not self.answer:
            assert at not in self.held
            self.held[at] = nbytes
            self.flags.add(flags)
        return self.answer

    def cudaHostUnregister(self, at: int) -> int:
        self.late |= ctypes.CDLL(None).msync(ctypes.c_void_p(at), self.held.pop(at), 1) != 0  # fails where no pages are
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()

    def wait() -> None:
        made.asleep += 1

    monkeypatch.setattr(torch.cuda, "_cudart", made, raising=False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    return made


def table_names(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.specs if ".engram.embed." in name]


@pytest.mark.usefixtures("small_jobs")
def test_tables_are_those_of_the_file_in_memory_of_their_size(
    checkpoint: Checkpoint, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, taken, most = table_names(checkpoint), list[int](), list[int]()

    class Progress:
        def update(self, nbytes: int) -> None:
            taken.append(nbytes)

    plain = os.preadv

    def watched(file: int, rooms: list[Any], offset: int) -> int:
        most.append(len(rooms[0]))
        return plain(file, rooms, offset)

    monkeypatch.setattr(os, "preadv", watched)
    with torch.inference_mode(), StagedCheckpoint(checkpoint, CPU, [], Progress(), tables=tables) as source:
        held = {name: source.tensor(name) for name in tables}
    for name, tensor in held.items():
        assert equal(tensor, checkpoint.tensor(name)), name
        assert not tensor.is_inference()
        assert tensor.data_ptr() % mmap.PAGESIZE == 0
        assert driver.held[tensor.data_ptr()] == checkpoint.stored[name].nbytes
    assert driver.flags == {0}
    total = sum(driver.held.values())
    assert sum(taken) == total == plan.fit(checkpoint.config, plan.GPUS["H200"]).host_bytes, "as inspect --fit tells"
    assert max(most) <= loading.JOB_BYTES, "straight from the file, in pieces"
    assert max(taken) <= loading.JOB_BYTES, "and told as they come"


def test_memory_is_locked_as_long_as_a_tensor_lies_in_it(driver: Driver) -> None:
    def fill(room: memoryview) -> None:
        assert not driver.held, "pages are made before they are locked"
        room[:] = bytes(range(256)) * 40

    tensor = locked(10240, CPU, fill)
    at = tensor.data_ptr()
    assert tensor.tolist() == list(range(256)) * 40
    part = tensor[512:].view(torch.float32)
    del tensor
    gc.collect()
    assert driver.held == {at: 10240}
    assert driver.asleep == 0
    assert part.view(torch.uint8)[:3].tolist() == [0, 1, 2]
    del part
    gc.collect()
    assert not driver.held
    assert driver.asleep == 1, "a kernel may have been reading"
    assert not driver.late


def test_a_child_does_not_have_locked_memory(driver: Driver) -> None:
    """Else the system would copy all of it for a process that only starts another."""
    tensor = locked(1 << 20, CPU, lambda room: None)
    entry = re.search(rf"^{tensor.data_ptr():x}-.*?^VmFlags:([^\n]*)", smaps(), re.MULTILINE | re.DOTALL)
    if entry is None:
        pytest.skip("this system tells no flags of memory")
    assert "dc" in entry[1].split()
    assert driver.held


def smaps() -> str:
    try:
        with open("/proc/self/smaps") as file:
            return file.read()
    except OSError:
        return ""


def test_memory_that_is_not_locked(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.answer = 2
    for limit, said in ((8 << 20, "8388608 bytes"), (resource.RLIM_INFINITY, "unlimited")):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, resource.RLIM_INFINITY))
        with pytest.raises(HostMemoryNotLocked) as raised:
            locked(12345, CPU, lambda room: None)
        for part in ("12345 bytes", "error number 2", f"ulimit -l, is {said};", "memlock=-1", "gpu.engram_tables"):
            assert part in str(raised.value)
    with pytest.raises(HostMemoryNotLocked, match="cannot be had"):
        locked(1 << 60, CPU, lambda room: None)
    gc.collect()
    assert not driver.asleep, "nothing was locked, nothing is unlocked"


def test_tables_that_the_host_has_no_room_for(
    checkpoint: Checkpoint, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = table_names(checkpoint)
    need = sum(checkpoint.stored[name].nbytes for name in tables)
    monkeypatch.setattr(loading, "memory_bytes", lambda: (1 << 40, need))
    with StagedCheckpoint(checkpoint, CPU, [], tables=tables):
        pass
    monkeypatch.setattr(loading, "memory_bytes", lambda: (1 << 40, need - 1))
    with (
        pytest.raises(OutOfMemory, match=f"{need} bytes, {need - 1} are free.*gpu.engram_tables"),
        StagedCheckpoint(checkpoint, CPU, [], tables=tables),
    ):
        pass
    with StagedCheckpoint(checkpoint, CPU, tables):
        pass
    assert not driver.held


def test_a_table_whose_file_shrank(tmp_path: Path, driver: Driver) -> None:
    checkpoint = Checkpoint.open(make_tiny(tmp_path / "tiny"))
    name = table_names(checkpoint)[0]
    stored = checkpoint.stored[name]
    with StagedCheckpoint(checkpoint, CPU, [], tables=[name]) as source:
        os.truncate(stored.shard, stored.offset + stored.nbytes - 1)
        with pytest.raises(TruncatedFile, match="cut short"):
            source.tensor(name)
    assert not driver.held


@pytest.mark.gpu
def test_a_gpu_reads_tables_in_place(checkpoint: Checkpoint) -> None:
    model = deepseek_v41.from_checkpoint(checkpoint, NUMERICS["production"], "cuda", tables_on_host=True)
    far = [layer.engram.embed for layer in model.layers if layer.engram is not None]
    assert len(far) == 2
    for table in far:
        assert table.over_link
        assert table.codes.is_pinned()
        assert table.scales.is_pinned()
        rows = torch.randint(0, table.shape[0], (5, 7))
        want = engram.table_rows_reference(table.codes, table.scales, rows, torch.bfloat16)
        assert torch.equal(table(rows.cuda()).cpu(), want)
    stored = dict(
        zip(table_names(checkpoint), (part for table in far for part in (table.codes, table.scales)), strict=True)
    )
    for name, tensor in stored.items():
        assert equal(tensor, checkpoint.tensor(name)), name


@pytest.mark.gpu
def test_locked_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlocked when it is gone; and what the driver refuses is not told to the next launch."""
    device, nbytes, cuda = torch.device("cuda", torch.cuda.current_device()), 3 << 20, cast("Any", torch.cuda.cudart())
    tensor = locked(nbytes, device, lambda room: None)
    at = tensor.data_ptr()
    assert tensor.is_pinned()
    assert tensor[4097:].is_pinned()
    del tensor
    gc.collect()
    assert int(cuda.cudaHostUnregister(at)) != 0, "it is registered no more"
    with suppress(RuntimeError):
        torch.ones(1, device=device).item()  # takes that call's error with it
    refused = SimpleNamespace(cudaHostRegister=lambda at, nbytes, flags: cuda.cudaHostRegister(0, nbytes, flags))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refused)
    with pytest.raises(HostMemoryNotLocked):
        locked(nbytes, device, lambda room: None)
    assert torch.ones(3, device=device).add_(1).sum().item() == 6.0


@pytest.mark.gpu
def test_where_tables_lie_changes_no_token(checkpoint: Checkpoint) -> None:
    params, found = SamplingParams(max_tokens=8, temperature=0.0), list[Any]()
    for place in ("device", "host"):
        with LLM(str(checkpoint.path), device="cuda", gpu__engram_tables=place) as llm:
            found.append(llm.generate([[0, 17, 400, 23, 5], [0, 9]], params))
    assert [out.token_ids for out in found[0]] == [out.token_ids for out in found[1]]


# ---- scales of experts -----------------------------------------------------------------------------------------------


class Damaged:
    """Tensors by name; one scale of one of them is no number."""

    def __init__(self, held: dict[str, torch.Tensor], name: str = "", at: int = 0):
        self.held, self.name, self.at = held, name, at

    def tensor(self, name: str) -> torch.Tensor:
        found = self.held[name]
        if name == self.name:
            found = found.clone()
            found.view(torch.uint8).view(-1)[self.at] = 255
        return found


@pytest.fixture(scope="module")
def experts() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = ModelConfig.from_json(tiny_config(n_routed_experts=4, hidden_size=128, vision_config=None))
    return config, {name: value for name, value in random_tensors(config) if name.startswith("layers.3.ffn.")}


@pytest.fixture(params=["as they are", "for streaming"])
def prepared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Experts that keep their bytes, and in the form that a Hopper GPU streams, packed by an interpreter."""
    if request.param == "as they are":
        with packed_weights():
            yield "Fp4Matrix"
        return
    pytest.importorskip("triton")
    from benthic.kernels.triton import moe_experts, moe_experts_hopper

    monkeypatch.setattr(moe_experts, "_hopper", lambda: moe_experts_hopper)
    with packed_weights(), backends.use("triton"):
        yield "Packed"


@pytest.mark.parametrize(("expert", "part", "at"), [(0, "w1", 0), (2, "w1", -1), (3, "w3", 0), (1, "w2", 77)])
@pytest.mark.parametrize("numerics", ["production", "reference"])
def test_scales_of_packed_experts_that_are_no_numbers(
    experts: tuple[ModelConfig, dict[str, torch.Tensor]], prepared: str, numerics: str, expert: int, part: str, at: int
) -> None:
    config, held = experts
    moe = MoE(config.text, 4, 2, NUMERICS[numerics], images=False)
    name = f"layers.3.ffn.experts.{expert}.{part}.scale"
    with pytest.raises(NonFiniteTensor, match=re.escape(f"weight {name} holds")):
        moe.load(Damaged(held, name, at), "layers.3.ffn")


def test_packed_experts_that_are_numbers(experts: tuple[ModelConfig, dict[str, torch.Tensor]], prepared: str) -> None:
    """Also at the ends of what a scale may be."""
    config, held = experts
    held = {name: value.clone() for name, value in held.items()}
    held["layers.3.ffn.experts.1.w3.scale"].view(torch.uint8)[0] = 254
    held["layers.3.ffn.experts.1.w2.scale"].view(torch.uint8)[0] = 0
    moe = MoE(config.text, 4, 2, NUMERICS["production"], images=False)
    moe.load(Damaged(held), "layers.3.ffn")
    assert type(moe.w13).__name__ == type(moe.w2).__name__ == prepared
