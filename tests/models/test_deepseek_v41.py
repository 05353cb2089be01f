"""The model files as a whole: every tensor has a reader, and how rows are cut into chunks changes nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benthic.cache.storage import Storage
from benthic.errors import BadConfigKey
from benthic.models import deepseek_v41, deepseek_v41_dspark
from benthic.models.base import Batch
from benthic.models.deepseek_v41_config import ModelConfig, cache_spec
from benthic.models.deepseek_v41_dspark import DSpark
from benthic.models.deepseek_v41_vision import VisionTower
from benthic.models.weights import Checkpoint, write_checkpoint
from benthic.testing.checkpoints import make_tiny, random_tensors, tiny_config
from benthic.types import NUMERICS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_tiny(tmp_path_factory.mktemp("model") / "tiny", "tiny", seed=0))


class Reads:
    """A checkpoint that remembers which tensors were asked for."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.names = checkpoint, set[str]()

    def tensor(self, name: str) -> Tensor:
        self.names.add(name)
        return self.checkpoint.tensor(name)


def test_every_tensor_of_the_checkpoint_is_read(checkpoint: Checkpoint) -> None:
    numerics, reads = NUMERICS["reference"], Reads(checkpoint)
    for part in (deepseek_v41.DeepseekV41, DSpark, VisionTower):
        part(checkpoint.config, numerics).load(reads)
    assert reads.names == set(checkpoint.specs)


def run(model: deepseek_v41.DeepseekV41, ids: list[int], lengths: list[int], *, poison: bool = True) -> Tensor:
    """Logits of every position, the ids cut into chunks of `lengths`, one chunk a step, slot 2 and blocks from 5 on."""
    device = model.classes.device
    storage = Storage(model.cache_spec, 12, 3, device)
    if poison:
        storage.poison()
    out: list[Tensor] = []
    at = 0
    for length in lengths:
        rows = range(at, at + length)
        history = [[ids[p - 1 - i] if p - 1 - i >= 0 else -1 for i in range(3)] for p in rows]
        batch = Batch(
            ids=torch.tensor(ids[at : at + length], device=device),
            positions=torch.arange(at, at + length, device=device),
            history=torch.tensor(history, device=device),
            images=None,
            embeds=None,
            starts=(0, length),
            firsts=(at,),
            slots=(2,),
            tables=(tuple(range(5, 12)),),
            logit_rows=torch.arange(length, device=device),
        )
        with torch.inference_mode():
            out.append(model.logits(model.forward(batch, model.memory(storage, batch)).hidden).cpu())
        at += length
    return torch.cat(out)


def tokens(count: int) -> list[int]:
    return torch.randint(3, 4000, (count,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("lengths", [[1] * 5 + [145], [37, 37, 37, 37, 2], [127, 1, 1, 1, 20], [64, 65, 21]])
def test_chunks_do_not_change_logits(checkpoint: Checkpoint, lengths: list[int]) -> None:
    model = deepseek_v41.from_checkpoint(checkpoint, NUMERICS["float"])
    ids = tokens(150)
    whole, cut = run(model, ids, [150]), run(model, ids, lengths)
    # a near tie in a selection may flip a row and those after it; these tokens have none
    assert (whole - cut).abs().max() < 2e-5
    assert torch.equal(whole.argmax(-1), cut.argmax(-1))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_logits(checkpoint: Checkpoint) -> None:
    on_cpu = deepseek_v41.from_checkpoint(checkpoint, NUMERICS["float"])
    on_gpu = deepseek_v41.from_checkpoint(checkpoint, NUMERICS["float"], "cuda")
    ids = tokens(150)
    assert (run(on_cpu, ids, [150]) - run(on_gpu, ids, [37, 112, 1])).abs().max() < 1e-4


@pytest.mark.parametrize("numerics", ["reference", "production"])
def test_what_nobody_wrote_is_never_read(checkpoint: Checkpoint, numerics: str) -> None:
    model = deepseek_v41.from_checkpoint(checkpoint, NUMERICS[numerics])
    ids = tokens(70)
    poisoned = run(model, ids, [3, 66, 1])
    assert torch.equal(poisoned, run(model, ids, [3, 66, 1], poison=False))
    assert poisoned.isfinite().all()


def test_what_is_joined_and_folded_once_changes_no_bit(checkpoint: Checkpoint) -> None:
    """The compressor's two products in one, the head weights' factor and the gate's two weights beforehand; whoever
    trains them has them apart, with gradients for each."""
    model = deepseek_v41.from_checkpoint(checkpoint, NUMERICS["production"])
    compressors = [layer.attn.compressor for layer in model.layers if layer.attn.compressor is not None]
    indexers = [layer.attn.indexer for layer in model.layers if layer.attn.indexer is not None]
    engrams = [layer.engram for layer in model.layers if layer.engram is not None]
    h = torch.randn(5, checkpoint.config.text.hidden_size).to(model.embed.weight.dtype)
    qa8, positions = torch.randn(5, checkpoint.config.text.q_lora_rank).to(h), torch.arange(5)
    assert {compressor.wgate is None for compressor in compressors} == {True, False}
    assert any(indexer.scaled is not None for indexer in indexers), "the factor is a power of two"
    for parts, outputs in (
        (compressors, lambda part: [x for x in part.products(h) if x is not None]),
        (indexers, lambda part: [part.query(h, qa8, positions, model.layers[0].attn.freqs)[1]]),
        (engrams, lambda part: [part.gate_weight()]),
    ):
        for part in parts:
            joined = outputs(part)
            for parameter in part.parameters():
                parameter.requires_grad_(True)
            with torch.no_grad():  # by the same kernels
                apart = outputs(part)
            assert all(torch.equal(a, b) for a, b in zip(joined, apart, strict=True))
            assert all(x.requires_grad for x in outputs(part))


def test_taps_are_the_streams_that_enter_the_target_layers(checkpoint: Checkpoint) -> None:
    model = deepseek_v41.from_checkpoint(checkpoint, NUMERICS["float"])
    targets = checkpoint.config.text.dspark_target_layer_ids
    seen: list[Tensor] = []
    for target in targets:
        model.layers[target].register_forward_pre_hook(lambda _, args: seen.append(args[0].s.mean(dim=1)))  # pyright: ignore
    storage = Storage(model.cache_spec, 2, 2)
    batch = Batch(
        ids=torch.tensor(tokens(4)),
        positions=torch.arange(4),
        history=torch.full((4, 3), -1),
        images=None,
        embeds=None,
        starts=(0, 4),
        firsts=(0,),
        slots=(1,),
        tables=((1,),),
        logit_rows=torch.arange(4),
    )
    with torch.inference_mode():
        taps = model.forward(batch, model.memory(storage, batch), taps=True).taps
    assert len(taps) == len(targets) == len(seen)
    for tap, want in zip(taps, seen, strict=True):
        torch.testing.assert_close(tap, want)


def test_vocabulary_that_does_not_compress_to_the_config_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "odd", "tiny", engram_compressed_vocab_size=4000)
    with pytest.raises(BadConfigKey, match="engram_compressed_vocab_size is 4000"):
        deepseek_v41.from_checkpoint(Checkpoint.open(folder), NUMERICS["float"])


def test_cache_spec_of_the_quantised_profiles_is_packed(checkpoint: Checkpoint) -> None:
    packed = deepseek_v41.DeepseekV41(checkpoint.config, NUMERICS["production"]).cache_spec
    wide = deepseek_v41.DeepseekV41(checkpoint.config, NUMERICS["float"]).cache_spec
    assert packed == cache_spec(checkpoint.config, packed=True, drafter=False)
    # 128-wide latents and 128-wide keys: (72 + 68) bytes an entry in FP4, 1024 in float32; 2.0 entries a token
    assert (packed.bytes_per_token(), wide.bytes_per_token()) == (280, 2048)


def test_the_drafter_is_opened_by_itself(checkpoint: Checkpoint, tmp_path: Path) -> None:
    opened = deepseek_v41_dspark.from_checkpoint(checkpoint, NUMERICS["float"])
    want = DSpark(checkpoint.config, NUMERICS["float"])
    reads = Reads(checkpoint)
    want.load(reads)
    assert reads.names == set(deepseek_v41_dspark.drafter_names(checkpoint.config))
    for (name, got), (_, value) in zip(opened.named_parameters(), want.named_parameters(), strict=True):
        assert torch.equal(got, value), name
    data = tiny_config(num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1, 1])
    config = ModelConfig.from_json(data)
    write_checkpoint(tmp_path / "plain", data, random_tensors(config))
    with pytest.raises(BadConfigKey, match="this checkpoint has no drafter"):
        deepseek_v41_dspark.from_checkpoint(Checkpoint.open(tmp_path / "plain"), NUMERICS["float"])
