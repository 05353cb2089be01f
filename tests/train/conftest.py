"""A small trainer on the CPU: the tiny config, float32, random weights, and the checkpoint packed from it."""

from pathlib import Path

import pytest
import torch

from benthic.models.deepseek_v41_config import ModelConfig
from benthic.testing.checkpoints import tiny_config
from benthic.testing.tokenizers import write_tokenizer
from benthic.train import loop, pack
from benthic.train.rows import RowLoader
from benthic.train.settings import Settings
from benthic.types import NUMERICS
from tests.train.scripted import Folder, Make, Scripted, Time, loader_of
from tests.train.small import IDS, SMALL, only_prose, small_trainer, write_folder

ROWS, LENGTH = 2, 150


def random_masters(trainer: loop.Trainer, seed: int) -> None:
    """Weights with nothing at its neutral value: a zero head or unit norm would hide an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for leaf in trainer.optimiser.leaves:
            noise = torch.randn(leaf.value.shape, generator=generator)
            spread = 0.3 if leaf.value.ndim == 1 else leaf.value.shape[-1] ** -0.5
            leaf.value.add_(noise * spread)
        for bias in trainer.biases().values():
            bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)
    trainer.optimiser = type(trainer.optimiser)(trainer.optimiser.leaves)


@pytest.fixture(scope="session")
def trainer() -> loop.Trainer:
    """Weights on the grids of the checkpoint, quantisers of activations off."""
    config = ModelConfig.from_json(tiny_config())
    settings = only_prose(rows=ROWS, length=LENGTH, index_rows=1)
    classes = torch.arange(config.text.vocab_size)
    made = loop.Trainer(
        config, classes, IDS._replace(image=config.image_token_id), settings, torch.device("cpu"), NUMERICS["float"]
    )
    random_masters(made, 1)
    made.optimiser.publish(quantised=True)
    return made


@pytest.fixture(scope="session")
def packed(trainer: loop.Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder of `trainer`, without a tokenizer: its token classes are the identity."""
    folder = tmp_path_factory.mktemp("packed") / "checkpoint"
    masters = trainer.optimiser.masters() | trainer.biases()
    source = pack.official(trainer.config, masters, seed=0)
    pack.write_checkpoint(folder, tiny_config(), source)
    return folder


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write_tokenizer(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "data").mkdir()
    return write_folder(tmp_path / "data")


@pytest.fixture
def make(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Make:
    clock = Time()
    monkeypatch.setattr(loop, "time", clock)

    def made(settings: Settings = SMALL) -> tuple[Scripted, RowLoader]:
        trainer = small_trainer(settings)
        trainer.__class__ = Scripted
        assert isinstance(trainer, Scripted)
        trainer.clock, trainer.log, trainer.entered, trainer.warmed = clock, [], [], []
        return trainer, loader_of(folder, settings)

    return made
