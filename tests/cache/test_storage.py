"""The tensors behind the cache have the shapes the layouts state."""

import pytest
import torch

from benthic.cache.spec import AppendEntry, CacheSpec, CarryEntry, RingEntry
from benthic.cache.storage import Storage
from benthic.errors import OutOfMemory

SPEC = CacheSpec(
    append=(
        AppendEntry(layer=2, part="main", channels=128, format="nvfp4", ratio=2),
        AppendEntry(layer=2, part="index", channels=128, format="mxfp4", ratio=2),
    ),
    rings=(RingEntry(layer=0, channels=128, format="fp8", window=64), RingEntry(2, 128, "f32", 64)),
    carries=(CarryEntry(layer=2, channels=128, ratio=2),),
    history_ids=3,
)


def test_shapes_and_bytes():
    storage = Storage(SPEC, 5, 4, rollback=3)
    assert storage.pool.shape == (5, 64 * (72 + 68))
    assert {layer: tuple(ring.shape) for layer, ring in storage.rings.items()} == {0: (4, 67, 132), 2: (4, 67, 512)}
    assert storage.carry[2].shape == (4, 5, 2, 128)
    assert storage.carry[2].dtype == torch.float32
    assert storage.history.tolist() == [[-1, -1, -1]] * 4
    held = storage.pool.nbytes + sum(t.nbytes for t in (*storage.rings.values(), *storage.carry.values()))
    assert held + storage.history.nbytes <= storage.bytes  # parts are padded to 32 bytes


def test_poison_reads_as_nan():
    storage = Storage(SPEC, 2, 2)
    storage.poison()
    assert storage.rings[2].view(torch.float32).isnan().all()
    assert storage.carry[2].isnan().all()
    assert storage.rings[0][..., :128].view(torch.float8_e4m3fn).float().isnan().all()


def test_a_pool_that_does_not_fit_is_a_typed_error(monkeypatch: pytest.MonkeyPatch):
    def full(self: Storage) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Storage, "_carve", full)
    with pytest.raises(OutOfMemory, match=r"cache of 3 blocks and 2 slots needs \d+ bytes"):
        Storage(SPEC, 3, 2)
