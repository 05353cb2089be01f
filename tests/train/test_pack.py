"""Trained masters -> the official file: what serving reads is what training had in force, and nothing is missing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benthic.errors import BadConfigJSON, CheckpointError, CheckpointExists, MissingCheckpointFile
from benthic.kernels import quant
from benthic.models.deepseek_v41 import Engram, from_checkpoint
from benthic.models.deepseek_v41_config import ModelConfig, tensors
from benthic.models.weights import Checkpoint
from benthic.text.tokenizer import FILE_NAME, Tokenizer
from benthic.train import backbone, loop, pack
from benthic.types import NUMERICS
from tests.train.conftest import random_masters
from tests.train.small import only_prose, small_json, small_trainer

SETTINGS = only_prose(rows=1, length=32)


def masters_of(trainer: loop.Trainer) -> dict[str, torch.Tensor]:
    return trainer.optimiser.masters() | trainer.biases()


@pytest.fixture(scope="module")
def small() -> loop.Trainer:
    made = small_trainer(SETTINGS)
    random_masters(made, 4)
    return made


@pytest.fixture
def written(small: loop.Trainer, data_folder: Path, tmp_path: Path) -> tuple[Path, int]:
    out = tmp_path / "checkpoint"
    return out, pack.write(out, data_folder, small_json(), masters_of(small), 7, replace=False)


@pytest.mark.parametrize("numerics", ["float", "production"])
def test_serving_reads_the_weights_that_training_had_in_force(
    small: loop.Trainer, written: tuple[Path, int], numerics: str
) -> None:
    """Every parameter of the serving model is the quantised leaf, to the bit."""
    small.optimiser.publish(quantised=True)
    serving = from_checkpoint(Checkpoint.open(written[0]), NUMERICS[numerics])
    served = dict(serving.named_parameters())
    for name, module in serving.named_modules():
        if isinstance(module, Engram):
            served[f"{name}.embed.weight"] = quant.dequantise_fp8(module.embed.codes, module.embed.scales)
    assert small.tower is not None
    tower = {f"vision.{name}": value for name, value in small.tower.named_parameters()}
    trained = {**dict(small.model.named_parameters()), **tower}
    assert served.keys() == trained.keys()
    for name, value in trained.items():
        assert torch.equal(served[name].detach().float(), value.detach().float()), name
        assert name not in tower or value.any(), name
    # the random masters are not on any grid by themselves
    small.optimiser.publish(quantised=False)
    name = "layers.2.ffn.w13"
    assert not torch.equal(served[name].detach().float(), dict(small.model.named_parameters())[name].detach().float())


def test_every_tensor_is_there_in_its_format(small: loop.Trainer, written: tuple[Path, int]) -> None:
    opened = Checkpoint.open(written[0])
    found = dict(opened.items())
    assert found.keys() == tensors(small.config).keys()
    for name, value in found.items():
        if value.dtype in (torch.float32, torch.bfloat16) or value.dtype == torch.float8_e4m3fn:
            assert torch.isfinite(value.float()).all(), name
    biases = small.biases()
    for layer in range(small.config.text.num_hidden_layers):
        for part in ("bias", "bias_vl"):
            value = opened.tensor(f"layers.{layer}.ffn.gate.{part}")
            assert value.any()
            assert torch.equal(value, biases[f"layers.{layer}.ffn.{part}"])


def test_official_names_come_through_as_they_are(small: loop.Trainer) -> None:
    """What another run trained: it takes the place of the initial values, nothing else changes."""
    name = "mtp.0.attn.wq_a.weight"
    mine = torch.randn(small.config.text.q_lora_rank, small.config.text.hidden_size)
    with_it = dict(pack.official(small.config, masters_of(small) | {name: mine}, 7))
    without = dict(pack.official(small.config, masters_of(small), 7))
    assert with_it.keys() == without.keys() == tensors(small.config).keys()
    scale = name.replace("weight", "scale")
    codes, scales = quant.quantise_weight_fp8(mine)
    assert torch.equal(with_it[name].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(with_it[scale].view(torch.uint8), scales.view(torch.uint8))
    for other, value in without.items():
        same = torch.equal(value.view(torch.uint8), with_it[other].view(torch.uint8))
        assert same == (other not in (name, scale)), other


def test_untrained_parts_stand_at_their_initialisation(small: loop.Trainer, written: tuple[Path, int]) -> None:
    opened = Checkpoint.open(written[0])
    groups: dict[str, int] = {}
    for spec in opened.specs.values():
        section = spec.group.partition(".")[0]
        groups[section] = groups.get(section, 0) + 1
    assert groups["dspark"] > 30
    assert groups["vision"] > 15
    made = dict(backbone.untrained(small.config, 7))
    assert {spec.group.partition(".")[0] for name, spec in opened.specs.items() if name in made} == {"dspark"}
    other = dict(backbone.untrained(small.config, 8))
    same = [name for name, value in made.items() if torch.equal(value, other[name])]
    assert len(same) < len(made)
    for name, value in made.items():
        got = opened.tensor(name)
        if opened.specs[name].dtype in ("BF16", "F32"):
            assert torch.equal(got.float(), value.to(got.dtype).float()), name
        if "norm" in name and value.ndim == 1:
            assert (value == 1).all(), name
        if name.endswith("wo_b.weight"):
            assert not value.any(), name
        elif value.ndim == 2 and value.any() and "norm" not in name and not name.endswith("embed.weight"):
            assert float(value.std()) == pytest.approx(value.shape[1] ** -0.5, rel=0.2), name


def test_the_folder_is_complete_and_counted(written: tuple[Path, int], data_folder: Path) -> None:
    out, size = written
    assert size == sum(path.stat().st_size for path in out.iterdir())
    assert (out / FILE_NAME).read_bytes() == (data_folder / FILE_NAME).read_bytes()
    assert len(Tokenizer.from_dir(out)) == 512
    assert Checkpoint.open(out).config_json == small_json()


def test_packing_is_repeatable(
    small: loop.Trainer, written: tuple[Path, int], data_folder: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    pack.write(again, data_folder, small_json(), masters_of(small), 7, replace=False)
    for path in written[0].iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_a_checkpoint_is_replaced_only_when_asked(
    small: loop.Trainer, written: tuple[Path, int], data_folder: Path
) -> None:
    out, _ = written
    digest = Checkpoint.open(out).digest()
    with pytest.raises(CheckpointExists):
        pack.write(out, data_folder, small_json(), masters_of(small), 8, replace=False)
    assert Checkpoint.open(out).digest() == digest
    pack.write(out, data_folder, small_json(), masters_of(small), 8, replace=True)
    assert Checkpoint.open(out).digest() != digest


def test_too_large_a_checkpoint_is_refused_before_anything_is_written(
    small: loop.Trainer, written: tuple[Path, int], data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = written[1]
    monkeypatch.setattr(pack, "MAX_BYTES", size - 1)
    out = tmp_path / "large"
    with pytest.raises(CheckpointError, match=rf"bytes, \d+ over the limit of {size - 1}"):
        pack.write(out, data_folder, small_json(), masters_of(small), 7, replace=False)
    assert not out.exists()
    # what is counted beforehand is no less than what is written, and not much more
    monkeypatch.setattr(pack, "MAX_BYTES", size + len(tensors(small.config)) * pack.NAME_BYTES)
    pack.check_size(small.config, data_folder)


def test_the_shipped_model_is_within_the_limit(data_folder: Path) -> None:
    config = ModelConfig.from_json(Path(pack.__file__).with_name("minnow.json"))
    pack.check_size(config, data_folder)
    text = replace(config.text, vocab_size=2 * config.text.vocab_size)
    with pytest.raises(CheckpointError, match="over the limit of 40000000"):
        pack.check_size(replace(config, text=text), data_folder)


def test_config_of_a_data_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointFile, match=r"config\.json"):
        pack.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadConfigJSON, match=r"config\.json"):
        pack.read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert pack.read_config(tmp_path) == {"a": 1}
