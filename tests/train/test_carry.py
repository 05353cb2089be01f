"""A run through a narrow door: what arrives, what is refused, and that it goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benthic.errors import BadTrainingState
from benthic.train import carry, loop
from tests.train.conftest import random_masters
from tests.train.scripted import Make, quiet, rows_of
from tests.train.small import SMALL, small_trainer

EXTRA = {"seconds": 12.5, "loader": {"prose 32": [1, 7]}}


@pytest.fixture
def some() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"a{i}": torch.randn(3, i + 1, 50, generator=generator) * 10.0**i for i in range(4)}
    return tensors | {"one": torch.tensor([-0.0]), "scalar": torch.tensor(3.0), "none": torch.zeros(0, 4)}


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_what_arrives_is_bfloat16_of_what_was_sent(
    some: dict[str, torch.Tensor], tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry, "PIECE", piece)
    monkeypatch.setattr(carry, "FILE_BYTES", 500)
    (tmp_path / "carry-99.bin").write_bytes(b"of an older, longer one")
    size = carry.write(tmp_path, some, EXTRA)
    made = carry.files(tmp_path)
    assert size == sum(path.stat().st_size for path in made)
    assert len(made) == -(-size // 500) > 2
    assert max(path.stat().st_size for path in made) <= 500
    tensors, extra = carry.read(tmp_path)
    assert extra == EXTRA
    assert tensors.keys() == some.keys()
    for name, value in some.items():
        assert torch.equal(tensors[name], value.bfloat16().float()), name


def test_weights_take_one_and_a_half_bytes_each(tmp_path: Path) -> None:
    weights = {"w": torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)) * 0.05}
    assert carry.write(tmp_path, weights, {}) < 1.6e6


@pytest.mark.parametrize("part", [0, 1, -1])
def test_what_did_not_arrive_whole_is_refused(some: dict[str, torch.Tensor], tmp_path: Path, part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carry, "FILE_BYTES", 500)
        carry.write(tmp_path, some, EXTRA)
    path = carry.files(tmp_path)[part]
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:30] + bytes([whole[30] ^ 1]) + whole[31:], b""):
        path.write_bytes(damaged)
        with pytest.raises(BadTrainingState, match="no carried run, or not all of it"):
            carry.read(tmp_path)
    path.unlink()
    with pytest.raises(BadTrainingState, match=r"files carry-\*\.bin are no carried run"):
        carry.read(tmp_path)


def test_a_run_goes_on_on_another_machine(make: Make, tmp_path: Path) -> None:
    whole, loader = make()
    loop.run(whole, loader, tmp_path / "whole", float("inf"), quiet)
    carried = tmp_path / "carried"
    first, loader = make()
    random_masters(first, 2)
    assert not loop.carry_in(first, carried, tmp_path / "one")  # nothing there yet
    _, done = loop.run(first, loader, tmp_path / "one", first.clock.now + 4.0, quiet, pause=True)
    assert not done
    size = loop.carry_out(first, tmp_path / "one", carried)
    assert size < 2 * sum(leaf.value.numel() for leaf in first.optimiser.leaves)
    assert not loop.carry_in(first, carried, tmp_path / "one")  # the run's own state goes first

    second, loader = make(replace(SMALL, seed=0))
    for group in second.optimiser.groups:
        group.first += 1.0
        group.count += 5
    assert loop.carry_in(second, carried, tmp_path / "two")
    want = first.optimiser.masters() | first.biases()
    for name, value in (second.optimiser.masters() | second.biases()).items():
        assert torch.equal(value, want[name].bfloat16().float()), name
    state = second.optimiser.state()
    assert not any(kept.any() for _, *rest in (*state["muon"], *state["adam"]) for kept in rest)
    _, done = loop.run(second, loader, tmp_path / "two", float("inf"), quiet)
    assert done
    assert first.log + second.log == whole.log  # same batches, phases and rates
    assert [row["step"] for row in rows_of(tmp_path / "two")] == list(range(1, 11))

    other, loader = make(replace(SMALL, seed=3))
    loop.carry_in(other, carried, tmp_path / "three")
    with pytest.raises(BadTrainingState, match=r"state\.pt: .*other settings \(seed\)"):
        loop.run(other, loader, tmp_path / "three", float("inf"), quiet)


def test_another_model_is_refused_untouched(tmp_path: Path) -> None:
    carry.write(tmp_path, {"embed.weight": torch.zeros(3)}, {"steps": 0, **EXTRA})
    trainer = small_trainer(SMALL)
    before = {name: master.clone() for name, master in trainer.optimiser.masters().items()}
    with pytest.raises(BadTrainingState, match="other shapes than the model config"):
        loop.carry_in(trainer, tmp_path, tmp_path / "out")
    assert all(torch.equal(master, before[name]) for name, master in trainer.optimiser.masters().items())
    assert not (tmp_path / "out").exists()
