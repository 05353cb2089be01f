"""The training graph is the serving model: same weights, same logits; and every leaf has its official place."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benthic.cache.storage import Storage
from benthic.models.base import Batch
from benthic.models.deepseek_v41 import from_checkpoint
from benthic.models.deepseek_v41_config import tensors
from benthic.models.weights import Checkpoint
from benthic.train import backbone, loop
from benthic.train.memory import Mode
from benthic.types import NUMERICS
from tests.train.conftest import LENGTH, ROWS, random_masters
from tests.train.small import IDS, only_prose, small_trainer

SETTINGS = only_prose(rows=2, length=64, index_rows=2)


def serve(folder: Path, ids: Tensor) -> Tensor:
    """Logits [L, V] of one sequence through the paged memory, in chunks."""
    model = from_checkpoint(Checkpoint.open(folder), NUMERICS["float"])
    storage = Storage(model.cache_spec, 4, 2)
    storage.poison()
    logits: list[Tensor] = []
    padded = torch.cat([torch.full((3,), -1), ids])
    for first, last in ((0, 37), (37, 100), (100, len(ids))):
        count = last - first
        batch = Batch(
            ids=ids[first:last],
            positions=torch.arange(first, last),
            history=torch.stack([padded[first + 2 - i : last + 2 - i] for i in range(3)], dim=1),
            images=None,
            embeds=None,
            starts=(0, count),
            firsts=(first,),
            slots=(1,),
            tables=((3, 1, 2),),
            logit_rows=torch.arange(count),
        )
        with torch.inference_mode():
            out = model(batch, model.memory(storage, batch))
            logits.append(model.logits(out.hidden))
    return torch.cat(logits)


@pytest.mark.parametrize("seed", [0, 1])
def test_training_graph_equals_serving(trainer: loop.Trainer, packed: Path, seed: int):
    ids = torch.randint(6, 4000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    with trainer.kernels.installed():
        hidden, _ = trainer.hidden(ids, Mode(topk=True, index_rows=0))
        logits = torch.nn.functional.linear(hidden, trainer.model.head.weight).unflatten(0, (ROWS, LENGTH)).detach()
    for row in range(ROWS):
        want = serve(packed, ids[row])
        difference = (logits[row] - want).abs().amax(-1)
        # a near tie in a top-k may fall the other way in single rows and move those (and rows behind them)
        assert difference.median() < 1e-5
        assert difference.max() < 1e-4, difference
    assert logits.std() > 0.5


def test_every_leaf_has_its_place(trainer: loop.Trainer):
    specs = tensors(trainer.config)
    named = trainer.optimiser.masters() | trainer.biases()
    made = [official for name, value in named.items() for official, _ in backbone.official_parts(name, value)]
    rest = [name for name, _ in backbone.untrained(trainer.config, 0)]
    assert len(made) == len(set(made))
    assert sorted(made + rest) == sorted(name for name in specs if not name.endswith(".scale"))


def small_batch() -> Tensor:
    ids = torch.randint(6, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    ids[:, 10], ids[:, 50] = IDS.think_close, IDS.eos
    return ids


def moved(trainer: loop.Trainer) -> set[str]:
    leaves = trainer.optimiser.leaves
    return {leaf.name for leaf in leaves if leaf.value.grad is not None and bool(leaf.value.grad.any())}


@pytest.mark.parametrize("topk", [False, True])
def test_the_index_loss_teaches_the_indexers_alone_and_nothing_else_teaches_them(topk: bool):
    trainer = small_trainer(SETTINGS)
    random_masters(trainer, 6)
    indexers = {leaf.name for leaf in trainer.optimiser.leaves if leaf.group == "index"}
    assert indexers == {leaf.name for leaf in trainer.optimiser.leaves if ".indexer." in leaf.name}
    with trainer.kernels.installed():
        hidden, memory = trainer.hidden(small_batch(), Mode(topk, 2))
        losses = memory.index_loss()
        assert losses.keys() == {1, 2, 3}
        assert all(float(loss.detach()) > 0 for loss in losses.values())
        sum(losses.values(), torch.zeros(())).backward(retain_graph=True)
        assert moved(trainer) == indexers
        for leaf in trainer.optimiser.leaves:
            leaf.value.grad = None
        hidden.float().square().sum().backward()
    rest = {leaf.name for leaf in trainer.optimiser.leaves if leaf.group == "text"} - {"head.weight"}
    assert moved(trainer) >= {name for name in rest if not name.endswith("q_weight")}
    assert not moved(trainer) & indexers


def test_values_at_the_start():
    first, same, other = (small_trainer(only_prose(rows=1, length=32, seed=s)) for s in (0, 0, 1))
    values = {name: value.detach() for name, value in first.model.named_parameters()}
    assert all(torch.equal(value, dict(same.model.named_parameters())[name]) for name, value in values.items())
    streams, width = first.config.text.hc_mult, first.config.text.hidden_size
    for name, value in values.items():
        again = dict(other.model.named_parameters())[name]
        if name.endswith(
            ("wo_b.weight", "ffn.w2", "shared_w2.weight", "head.weight", "wgate.weight", "attn_sink", "bias", "bias_vl")
        ):
            assert not value.any(), name
        elif "norm" in name or name.endswith(("q_weight", "k_weight")):
            assert (value == 1).all(), name
        elif name.endswith((".base", ".scale")):
            assert torch.equal(value, again), name
        else:
            assert not torch.equal(value, again), name
            rows = value[: streams * width] if name.endswith("engram.wkv.weight") else value
            spread = 1.0 if name.endswith("embed.weight") else value.shape[-1] ** -0.5
            assert float(rows.float().std()) == pytest.approx(spread, rel=0.1), name
    assert first.tower is not None
    for name, value in first.tower.named_parameters():
        if name.endswith(("wo.weight", ".w2.weight", "bias")):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            spread = value.shape[-1] ** -0.5 if value.ndim == 2 else 1.0
            assert float(value.detach().float().std()) == pytest.approx(
                spread, rel=0.25 if value.ndim == 1 else 0.05
            ), name
    assert not values["layers.1.engram.wkv.weight"][streams * width :].any()  # the gate opens onto nothing
    sublayers = [values[f"layers.{layer}.hc_{part}.base"] for layer in range(4) for part in ("attn", "ffn")]
    for i, base in enumerate(sublayers):
        read, write, exchange = base.split([streams, streams, streams * streams])
        assert int(read.argmax()) == i % streams
        assert not write.any()
        assert torch.equal(exchange.view(streams, streams).argmax(-1), torch.arange(streams))


def test_matrices_go_to_muon_and_the_rest_to_adam():
    trainer = small_trainer(SETTINGS)
    leaves = {leaf.name: leaf for leaf in trainer.optimiser.leaves}
    text = trainer.config.text
    for name, rows in {
        "layers.0.attn.wq_a.weight": text.q_lora_rank,
        "layers.0.attn.wq_b.weight": text.head_dim,
        "layers.1.attn.indexer.wq_b.weight": text.index_head_dim,
        "layers.0.attn.wo_a.weight": text.o_lora_rank,
        "layers.0.ffn.w13": text.moe_intermediate_size,
        "layers.0.ffn.w2": text.hidden_size,
        "layers.0.ffn.shared_w13.weight": text.moe_intermediate_size,
        "layers.1.engram.wkv.weight": text.hidden_size,
        "vision.patch_embed.weight": 64,
        "vision.blocks.0.wqkv.weight": 64,
        "vision.blocks.0.w1.weight": 96,
        "vision.aligner_w1.weight": text.hidden_size,
    }.items():
        assert leaves[name].matrix == rows, name
    for name, rate in {
        "embed.weight": 6e-3,
        "layers.1.engram.embed.weight": 6e-3,
        "head.weight": 4e-3,
        "layers.0.attn_norm.weight": 4e-3,
        "layers.0.hc_attn.base": 4e-3,
        "layers.1.engram.q_weight": 4e-3,
        "layers.0.ffn.gate.weight": 2e-3,
        "layers.0.hc_ffn.fn": 2e-3,
        "layers.1.attn.indexer.weights_proj.weight": 2e-3,
        "layers.0.attn.attn_sink": 8e-3,
        "vision.patch_embed.bias": 4e-3,
        "vision.blocks.0.norm1": 4e-3,
        "vision.start": 4e-3,
    }.items():
        assert (leaves[name].matrix, leaves[name].rate) == (0, rate), name
    stores = {name: leaf.store for name, leaf in leaves.items()}
    assert stores["layers.1.engram.embed.weight"] == "fp8_rows"
    assert stores["layers.0.ffn.w13"] == stores["layers.0.ffn.w2"] == "fp4"
    assert stores["layers.0.attn.wq_b.weight"] == "fp8"
    assert stores["embed.weight"] == stores["head.weight"] == "bf16"
    assert stores["layers.0.attn.attn_sink"] == "f32"
    for name, leaf in leaves.items():
        assert (leaf.group == "vision") == name.startswith("vision."), name
        assert leaf.group != "vision" or leaf.store == "bf16"
