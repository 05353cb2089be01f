"""Tensors on their way to a device: equal to the file's, read once each, in any order, wherever they are cut."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benthic.errors import TruncatedFile
from benthic.models import deepseek_v41, loading
from benthic.models.deepseek_v41_config import tensors
from benthic.models.loading import ALIGNMENT, batches, staged
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_tiny(tmp_path_factory.mktemp("loading") / "tiny", shard_bytes=3 << 20))


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, some tensors of many jobs, and little read ahead."""
    monkeypatch.setattr(loading, "JOB_BYTES", 100_000)
    monkeypatch.setattr(loading, "AHEAD_BYTES", 1 << 20)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit."""
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize("order", ["as given", "reversed", "by name"])
@pytest.mark.parametrize(("workers", "piece_bytes"), [(1, 1 << 20), (3, 7001)])
def test_tensors_are_those_of_the_file(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, order: str, workers: int, piece_bytes: int
) -> None:
    names = list(checkpoint.specs)
    asked = {"as given": names, "reversed": names[::-1], "by name": sorted(names)}[order]
    plain, counts = os.preadv, list[int]()

    def counted(file: int, rooms: list[Any], offset: int) -> int:
        got = plain(file, rooms, offset)
        counts.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)
    taken: list[int] = []

    class Progress:
        def update(self, nbytes: int) -> None:
            taken.append(nbytes)

    total = sum(checkpoint.stored[name].nbytes for name in names)
    with staged(checkpoint, CPU, names, Progress(), workers=workers, piece_bytes=piece_bytes) as source:
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
    with staged(checkpoint, CPU, names) as source:
        for name in names:
            assert source._ahead_bytes < loading.AHEAD_BYTES + max(largest, loading.JOB_BYTES)
            source.tensor(name)
        assert not source._batch_of
    with staged(checkpoint, CPU, names) as source:
        last = source._batch_of[names[-1]]
        for name in list(last.parts):
            assert last.out is None or last.begun
            source.tensor(name)
        assert last in source._waiting, "its turn comes much later"
        assert last.out is None, "but its buffer goes when all is taken"


def test_again_and_beside(checkpoint: Checkpoint) -> None:
    """A tensor that is asked for twice is read twice; one that was not announced is the file's own."""
    names = list(checkpoint.specs)
    with staged(checkpoint, CPU, names[1:]) as source:
        first, again = source.tensor(names[5]), source.tensor(names[5])
        assert equal(first, again)
        assert first.data_ptr() != again.data_ptr()
        assert equal(source.tensor(names[0]), checkpoint.tensor(names[0]))
        with pytest.raises(KeyError):
            source.tensor("layers.0.nothing")


def test_a_model_is_the_same_over_either_way(checkpoint: Checkpoint) -> None:
    """Also inside inference mode, in which a step's caller may be."""
    numerics = NUMERICS["production"]
    want = deepseek_v41.from_checkpoint(checkpoint, numerics)
    model = deepseek_v41.from_checkpoint(checkpoint, numerics)
    for parameter in model.parameters():
        parameter.data.zero_()
    names = [name for name in tensors(checkpoint.config) if not name.startswith("mtp.")]
    with torch.inference_mode(), staged(checkpoint, CPU, names) as source:
        model.load(source)
    for (name, a), (_, b) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert equal(a, b), name


def test_a_file_that_shrank(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny(tmp_path / "tiny"))
    name = list(checkpoint.specs)[-1]
    shard = checkpoint.stored[name].shard
    with staged(checkpoint, CPU, [name]) as source:
        assert equal(source.tensor(name), checkpoint.tensor(name))
        os.truncate(shard, checkpoint.stored[name].offset + 1)
        with pytest.raises(TruncatedFile, match="cut short"):
            source.tensor(name)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize(("workers", "piece_bytes"), [(1, 1 << 20), (4, 7001)])
def test_tensors_on_a_gpu_are_those_of_the_file(checkpoint: Checkpoint, workers: int, piece_bytes: int) -> None:
    """Their memory is overwritten as soon as they are gone, so a copy that came early or late shows."""
    names = list(checkpoint.specs)
    kept: list[torch.Tensor] = []
    with staged(checkpoint, torch.device("cuda"), names, workers=workers, piece_bytes=piece_bytes) as source:
        for name in sorted(names):
            tensor = source.tensor(name)
            assert tensor.is_cuda
            kept.append(tensor.clone())
            tensor.view(-1).view(torch.uint8).fill_(0xA5)
    for name, tensor in zip(sorted(names), kept, strict=True):
        assert equal(tensor.cpu(), checkpoint.tensor(name)), name
