"""Training the drafter: its graph against serving's, its blocks against loops, what it learns, what is written."""

import csv
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.engine.llm import LLM
from benthic.errors import BadConfigKey, BadSetting, BadTrainingData, BadTrainingState
from benthic.kernels.attn_sparse import sink_attention_reference
from benthic.models import deepseek_v41, deepseek_v41_dspark
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.weights import Checkpoint, write_checkpoint
from benthic.testing import acceptance
from benthic.testing.acceptance import Rounds, Text
from benthic.testing.checkpoints import random_tensors
from benthic.train import data, drafter, loop
from benthic.train.drafter import Settings, Trainer
from benthic.train.kernels import TrainingKernels
from benthic.train.rows import RowBatch, RowLoader
from benthic.train.settings import Phase
from benthic.types import NUMERICS
from tests.train.conftest import random_masters
from tests.train.language import config_json, opening, rows_of, write_target
from tests.train.small import IDS

CPU = torch.device("cpu")
ROWS, LENGTH, ANCHORS, BLOCK = 2, 64, 12, 5
SMALL = Settings(rows=ROWS, length=LENGTH, anchors=ANCHORS, parts="prose", seconds=10.0)
PLAIN, QUANTISED = Phase(True, False), Phase(True, True)


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    data = config_json()
    path = tmp_path_factory.mktemp("random") / "random"
    return Checkpoint.open(write_checkpoint(path, data, random_tensors(ModelConfig.from_json(data))))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_target(tmp_path_factory.mktemp("target") / "target")


def trainer_of(checkpoint: Checkpoint, settings: Settings = SMALL, numerics: str = "float") -> Trainer:
    plain = {"numerics": NUMERICS["float"]} if numerics == "float" else {}
    return Trainer(checkpoint, IDS, settings, CPU, target_numerics=NUMERICS[numerics], **plain)


@pytest.fixture(scope="module")
def trained(random_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Checkpoint]:
    """Random masters on the grids of the checkpoint, and the checkpoint they are packed into."""
    made = trainer_of(random_checkpoint)
    random_masters(made, 3)  # type: ignore[arg-type]
    made.optimiser.publish(quantised=True)
    masters = drafter.official(made.config, made.masters())
    path = tmp_path_factory.mktemp("packed") / "packed"
    source = drafter.packed(random_checkpoint, masters)
    return made, Checkpoint.open(write_checkpoint(path, random_checkpoint.config_json, source))


def random_rows(seed: int, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(40, 500, (rows, length), generator=generator)
    ids[:, 2], ids[:, 3] = IDS.assistant, IDS.think_close
    ids[0, 40:44] = torch.tensor([IDS.eos, IDS.bos, IDS.assistant, IDS.think_close])
    return ids


def batch_of(ids: Tensor) -> RowBatch:
    return RowBatch(ids, ())


# Settings


def test_the_defaults_are_good() -> None:
    Settings().check()
    SMALL.check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", 0),
        ("length", 31),
        ("anchors", 0),
        ("anchors", LENGTH + 1),
        ("parts", "copy=1"),
        ("parts", "prose,copy=2"),
        ("seconds", 0.0),
        ("quantise_from", 1.5),
        ("token_weight", -0.1),
        ("distance_weight", math.nan),
        ("confidence_weight", math.inf),
        ("slot_decay", 0.0),
        ("balance_weight", -1.0),
        ("bias_step", -1.0),
        ("seed", -1),
    ],
)
def test_a_bad_setting_is_named(key: str, value: Any) -> None:
    with pytest.raises(BadSetting) as caught:
        replace(SMALL, **{key: value}).check()
    assert caught.value.key == ("rows" if value == "prose,copy=2" else key)


# Where a block looks


@pytest.mark.parametrize(("window", "block"), [(16, 5), (64, 5), (3, 5), (4, 2)])
def test_context_rows_are_those_before_the_anchor(window: int, block: int) -> None:
    length = 20
    anchors = torch.tensor([[1, 5, 19], [16, 17, 2]])
    places = drafter.Places.of(anchors, length, window, block)
    assert (places.rows.shape[1] + block) % 8 == 0
    for n, (row, anchor) in enumerate((r, a) for r in range(2) for a in anchors[r].tolist()):
        found = places.rows[n][~places.absent[n]].tolist()
        assert found == [row * length + p for p in range(max(anchor - window, 0), anchor)]
    assert int(places.rows.min()) >= 0
    assert int(places.rows.max()) < 2 * length


def test_blocks_attend_as_serving_does() -> None:
    """Against the serving reference: context then block, a sink, nothing causal."""
    anchors, length, window, heads, width = torch.tensor([[1, 9, 30], [16, 17, 31]]), 32, 16, 4, 32
    num = anchors.numel()
    q, kw = torch.randn(num * BLOCK, heads, width), torch.randn(num * BLOCK, width)
    context, sink = torch.randn(2 * length, width), torch.randn(heads)
    memory = drafter.AnchorMemory(
        context, drafter.Places.of(anchors, length, window, BLOCK), BLOCK, TrainingKernels(CPU, 2)
    )
    got = memory.attend(q, kw, None, sink)
    for n, (row, anchor) in enumerate((r, a) for r in range(2) for a in anchors[r].tolist()):
        own = slice(n * BLOCK, (n + 1) * BLOCK)
        rows = torch.cat([context[row * length + max(anchor - window, 0) : row * length + anchor], kw[own]])
        begin, count = torch.zeros(BLOCK, dtype=torch.int64), torch.full((BLOCK,), len(rows))
        want = sink_attention_reference(q[own], rows, begin, count, None, None, sink, width**-0.5, False)
        torch.testing.assert_close(got[own], want, atol=1e-5, rtol=1e-5)


# Anchors and slots


def inside_of(ids: Tensor) -> Tensor:
    return drafter.response_weights(ids, IDS)


def test_anchors_are_response_tokens_that_another_follows() -> None:
    ids = random_rows(1)
    ids[1, 30:] = IDS.pad
    ids[1, 29] = IDS.eos
    inside = inside_of(ids)
    eligible = [{p for p in range(1, LENGTH) if inside[r, p - 1] and inside[r, p]} for r in range(ROWS)]
    assert eligible[1] == set(range(4, 29))
    generator = torch.Generator().manual_seed(0)
    seen: list[set[int]] = [set(), set()]
    for _ in range(30):
        anchors, found = drafter.choose_anchors(inside, ANCHORS, generator)
        assert found.all()
        for r in range(ROWS):
            picked = anchors[r].tolist()
            assert len(set(picked)) == ANCHORS
            assert set(picked) <= eligible[r]
            seen[r] |= set(picked)
    assert seen == eligible
    anchors, found = drafter.choose_anchors(inside, 40, generator)
    assert set(anchors[1][found[1]].tolist()) == eligible[1]
    assert (anchors[~found] == 1).all()
    none, found = drafter.choose_anchors(torch.zeros(2, LENGTH), 3, generator)
    assert (none == 1).all()
    assert not found.any()


def test_slots_are_the_tokens_after_the_anchor() -> None:
    ids = random_rows(2)
    inside = inside_of(ids)
    anchors = torch.tensor([[4, 36, 39, 50], [61, 62, 10, 1]])
    found = torch.tensor([[True, True, True, True], [True, True, True, False]])
    blocks = drafter.blocks_of(ids, inside, anchors, found, BLOCK)
    for n, (r, a, f) in enumerate(
        zip([0] * 4 + [1] * 4, anchors.flatten().tolist(), found.flatten().tolist(), strict=True)
    ):
        good = f
        for i in range(BLOCK):
            good = good and a + i < LENGTH and bool(inside[r, a + i])
            assert bool(blocks.valid[n, i]) == good
            if good:
                assert blocks.previous[n, i] == ids[r, a + i]
                assert blocks.wanted[n, i] == ids[r, a + i + 1]
                assert blocks.rows[n, i] == r * LENGTH + a + i
    assert blocks.valid.sum(1).tolist() == [5, 4, 1, 5, 2, 1, 5, 0]
    assert int(blocks.rows.max()) < ROWS * LENGTH


def test_each_step_has_anchors_of_its_own(random_checkpoint: Checkpoint) -> None:
    ids, made = random_rows(2), trainer_of(random_checkpoint)
    first, again = made.blocks(ids), made.blocks(ids)
    assert torch.equal(first.anchors, again.anchors)
    made.steps = 1
    other = trainer_of(random_checkpoint, replace(SMALL, seed=1)).blocks(ids)
    assert not torch.equal(first.anchors, made.blocks(ids).anchors)
    assert not torch.equal(first.anchors, other.anchors)


# Losses


def test_losses_are_those_of_the_specification() -> None:
    base, correction, target = torch.randn(7, 9), torch.randn(7, 9), 2 * torch.randn(7, 9)
    wanted, confidence, weights = torch.randint(0, 9, (7,)), torch.randn(7), torch.rand(7)
    got = drafter.slot_losses(base, correction, target, wanted, confidence, weights)
    token = distance = sure = 0.0
    for m in range(7):
        q = np.exp((base + correction)[m].double().numpy())
        p = np.exp(target[m].double().numpy())
        q, p = q / q.sum(), p / p.sum()
        accepted = np.minimum(p, q).sum()
        assert float(got[3][m]) == pytest.approx(accepted, abs=1e-5)
        assert np.abs(p - q).sum() == pytest.approx(2 * (1 - accepted))
        chance = 1 / (1 + math.exp(-float(confidence[m])))
        w = float(weights[m])
        token -= w * math.log(q[wanted[m]])
        distance += w * np.abs(p - q).sum()
        sure -= w * (accepted * math.log(chance) + (1 - accepted) * math.log(1 - chance))
    assert [float(x) for x in got[:3]] == pytest.approx([token, distance, sure], rel=1e-5)


def test_a_step_weighs_its_losses_as_the_settings_say(trained: tuple[Trainer, Checkpoint]) -> None:
    """Against sums slot by slot over the graph's own logits; every value of the log too."""
    made, _ = trained
    ids = random_rows(5)
    with made.kernels.installed():
        loss, values = made.losses(ids)
        balance = [float(b.detach()) for b in made.kernels.balance]
        blocks = made.blocks(ids)
        taps, hidden = made.read(ids)
        with torch.no_grad():
            slots = made.slots(taps, blocks)
    logits = torch.nn.functional.linear(hidden, made.target.head.weight)[blocks.rows]
    p = torch.softmax(logits, -1)
    q = torch.softmax(slots.base + slots.correction, -1).view_as(p)
    weights = blocks.valid * torch.exp(-torch.arange(5) / 4.0)
    overlap = torch.minimum(p, q).sum(-1)
    token = -(q.gather(-1, blocks.wanted[..., None])[..., 0].log() * weights).sum() / weights.sum()
    distance = ((p - q).abs().sum(-1) * weights).sum() / weights.sum()
    chance = torch.sigmoid(slots.confidence.double()).view_as(overlap)
    sure = -((overlap * chance.log() + (1 - overlap) * (1 - chance).log()) * weights).sum() / weights.sum()
    want = 0.1 * token + 0.9 * distance + sure + 1e-3 * sum(balance)
    assert float(loss.detach()) == pytest.approx(float(want), rel=1e-4)
    named = dict(zip(made.measures, values.tolist(), strict=False))
    assert named["token"] == pytest.approx(float(token), rel=1e-4)
    assert named["distance"] == pytest.approx(float(distance), rel=1e-4)
    assert named["confidence"] == pytest.approx(float(sure), rel=1e-4)
    assert named["balance"] == pytest.approx(np.mean(balance), rel=1e-4)
    length = 1.0
    for k in range(BLOCK):
        valid = blocks.valid[:, k]
        assert named[f"accept_{k + 1}"] == pytest.approx(float(overlap[valid, k].mean()), rel=1e-4)
        length += float(overlap[valid, : k + 1].prod(1).mean())
    assert named["length"] == pytest.approx(length, rel=1e-4)


# The graph


def test_the_frozen_target_is_the_serving_model(random_checkpoint: Checkpoint) -> None:
    made = trainer_of(random_checkpoint)
    ids = random_rows(3)
    with made.kernels.installed():
        taps, hidden = made.read(ids)
        logits = made.target.head(hidden)
    model = deepseek_v41.from_checkpoint(random_checkpoint, NUMERICS["float"])
    reading = acceptance.read(model, [Text(tuple(row.tolist()), 1, False) for row in ids], CPU)
    for got, want in zip(taps, reading.taps, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(logits, model.logits(reading.hidden), atol=2e-5, rtol=1e-5)


def served(checkpoint: Checkpoint, ids: Tensor, blocks: drafter.Blocks, numerics: str) -> deepseek_v41_dspark.Draft:
    """`DSpark.draft` after the same anchors, one sequence a row, its tokens those of the text."""
    model = deepseek_v41.from_checkpoint(checkpoint, NUMERICS[numerics])
    serving = deepseek_v41_dspark.from_checkpoint(checkpoint, NUMERICS[numerics])
    texts = [Text(tuple(row.tolist()), 1, False) for row in ids]
    reading = acceptance.read(model, texts, CPU)
    rings = acceptance.context_rings(checkpoint.config.text, NUMERICS[numerics], len(texts), ids.shape[1], CPU)
    for i in range(len(texts)):
        own = tuple(tap[i * LENGTH : (i + 1) * LENGTH] for tap in reading.taps)
        serving.observe(rings, own, torch.full((LENGTH,), i + 1), torch.arange(LENGTH))
    slots = torch.arange(1, len(texts) + 1).repeat_interleave(ANCHORS)
    last = blocks.anchors.flatten() - 1

    def choose(logits: Tensor, i: int) -> Tensor:
        return blocks.previous[:, i + 1] if i + 1 < BLOCK else logits.argmax(-1)

    with torch.inference_mode():
        return serving.draft(model, rings, slots, blocks.previous[:, 0], last, choose)


def test_training_computes_what_serving_does(trained: tuple[Trainer, Checkpoint]) -> None:
    """Logits and confidence of every slot, to 1e-5, from anchors within and beyond the window."""
    made, packed = trained
    ids = random_rows(4)
    with made.kernels.installed():
        blocks = made.blocks(ids)
        taps, _ = made.read(ids)
        slots = made.slots(taps, blocks)
    assert int(blocks.anchors.min()) < made.config.text.sliding_window < int(blocks.anchors.max())
    want = served(packed, ids, blocks, "float")
    logits = (slots.base + slots.correction).view_as(want.logits)
    torch.testing.assert_close(logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slots.confidence.view_as(want.confidence), want.confidence, atol=1e-5, rtol=1e-5)
    assert float(logits.detach().std()) > 0.5


def test_quantised_training_computes_what_serving_does(random_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """bfloat16 and all quantisers: roundings differ here and there, nothing else."""
    made = trainer_of(random_checkpoint, numerics="production")
    random_masters(made, 3)  # type: ignore[arg-type]
    made.enter(QUANTISED)
    source = drafter.packed(random_checkpoint, drafter.official(made.config, made.masters()))
    packed = Checkpoint.open(write_checkpoint(tmp_path / "packed", random_checkpoint.config_json, source))
    ids = random_rows(4)
    with made.kernels.installed():
        blocks = made.blocks(ids)
        taps, _ = made.read(ids)
        slots = made.slots(taps, blocks)
        made.enter(PLAIN)
        plain = made.slots(taps, blocks)
    want = served(packed, ids, blocks, "production").logits

    def distance(got: drafter.Slots) -> float:
        logits = (got.base + got.correction).detach().view_as(want)
        return 1 - float(torch.cosine_similarity(logits.flatten(0, 1), want.flatten(0, 1), dim=-1).median())

    # random weights make rounding chaotic: no farther than two profiles of serving are from each other
    other = served(packed, ids, blocks, "reference").logits
    between = 1 - float(torch.cosine_similarity(other.flatten(0, 1), want.flatten(0, 1), dim=-1).median())
    assert distance(slots) < between
    assert distance(slots) < 0.6 * distance(plain)  # and quantisers are in force


def test_gradients_reach_the_drafter_and_nothing_else(trained: tuple[Trainer, Checkpoint]) -> None:
    made, _ = trained
    with made.kernels.installed():
        made.losses(random_rows(6))[0].backward()
    try:
        for leaf in made.optimiser.leaves:
            assert leaf.value.grad is not None
            assert leaf.value.grad.any(), leaf.name
        assert {leaf.name for leaf in made.optimiser.leaves} | set(made.biases()) == {
            name for name, _ in made.model.named_parameters()
        }
        for name, parameter in made.target.named_parameters():
            assert not parameter.requires_grad, name
            assert parameter.grad is None, name
    finally:
        for leaf in made.optimiser.leaves:
            leaf.value.grad = None


def test_the_target_stays_as_it_is(random_checkpoint: Checkpoint) -> None:
    made = trainer_of(random_checkpoint, numerics="production")
    before = {name: value.clone() for name, value in made.target.state_dict().items()}
    with made.kernels.installed():
        for phase in (PLAIN, QUANTISED):
            made.enter(phase)
            made.step(batch_of(random_rows(7)), phase, 1.0)
    assert all(torch.equal(value, before[name]) for name, value in made.target.state_dict().items())


# Steps


def test_router_biases_move_towards_equal_loads(random_checkpoint: Checkpoint) -> None:
    made = trainer_of(random_checkpoint)
    loads = torch.tensor([10.0, 2.0, 5.0, 7.0])  # mean 6
    made.kernels.loads.extend([torch.stack([loads, torch.zeros(4)])] * len(made.model.stages))
    assert made.balance_router(0.5) == pytest.approx(10 / 6)
    for stage in made.model.stages:
        torch.testing.assert_close(stage.ffn.bias, torch.tensor([-1.0, 1.0, 1.0, -1.0]) * 2e-3 * 0.5)


def test_a_state_comes_back(random_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Through the file: steps after it are the same, bit for bit, anchors included."""
    made, path = trainer_of(random_checkpoint, numerics="production"), tmp_path / "state.pt"
    with made.kernels.installed():
        made.step(batch_of(random_rows(1)), PLAIN, 1.0)
    made.save(path, {"settings": {}, "seconds": 1.5, "loader": {}})
    other = trainer_of(random_checkpoint, numerics="production")
    other.restore(loop.read_state(path, CPU, "drafter"), path)
    for seed, phase in ((2, PLAIN), (3, QUANTISED)):
        values = []
        for one in (made, other):
            with one.kernels.installed():
                one.enter(phase)
                values.append(one.step(batch_of(random_rows(seed)), phase, 1.0))
        assert torch.equal(*values)
    assert other.steps == made.steps == 3
    for name, value in made.masters().items():
        assert torch.equal(value, other.masters()[name]), name


def test_a_state_of_another_target_is_refused(
    random_checkpoint: Checkpoint, target: Checkpoint, tmp_path: Path
) -> None:
    made, path = trainer_of(random_checkpoint), tmp_path / "state.pt"
    made.save(path, {"settings": {}, "seconds": 0.0, "loader": {}})
    with pytest.raises(BadTrainingState, match="a target with other weights"):
        trainer_of(target).restore(loop.read_state(path, CPU, "drafter"), path)
    with pytest.raises(BadTrainingState, match="no saved state of a backbone run"):
        loop.read_state(path, CPU)


def test_the_digest_is_of_the_backbone_alone(trained: tuple[Trainer, Checkpoint], target: Checkpoint) -> None:
    made, packed = trained
    same, other = (drafter.backbone_digest(part.config, part.tensor) for part in (packed, target))
    assert same == made.target_digest != other


def test_masters_come_from_a_run_folder(
    trained: tuple[Trainer, Checkpoint], target: Checkpoint, tmp_path: Path
) -> None:
    made, packed = trained
    made.save(tmp_path / loop.STATE_FILE, {"settings": {}, "seconds": 0.0, "loader": {}})
    got = drafter.from_run(packed.config, tmp_path, dict(packed.items()))
    want = drafter.official(packed.config, made.masters())
    assert got.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in got.items())
    with pytest.raises(BadTrainingState, match="a target with other weights"):
        drafter.from_run(packed.config, tmp_path, dict(target.items()))
    two = ModelConfig.from_json(config_json(num_nextn_predict_layers=2, compress_ratios=[0, 2, 1, 1, 0, 0]))
    with pytest.raises(BadTrainingState, match="other shapes"):
        drafter.from_run(two, tmp_path, dict(packed.items()))


# What it learns


@pytest.fixture(scope="module")
def learned(target: Checkpoint) -> Trainer:
    """A short run over the target's language."""
    settings = Settings(rows=4, length=48, anchors=12, parts="prose")
    made, steps = trainer_of(target, settings, "production"), 50
    with made.kernels.installed():
        for i in range(steps):
            phase = PLAIN if i < 40 else QUANTISED
            if i in (0, 40):
                made.enter(phase)
            made.step(batch_of(rows_of(4, 48, i)), phase, loop.rate_factor(i / steps, settings))
    return made


def overlaps(made: Trainer, ids: Tensor, markov: bool) -> list[float]:
    """Acceptance by slot, given the text before it."""
    with made.kernels.installed(), torch.no_grad():
        blocks = made.blocks(ids)
        taps, hidden = made.read(ids)
        slots = made.slots(taps, blocks)
        p = torch.softmax(made.target.head(hidden)[blocks.rows], -1)
        q = torch.softmax(slots.base + slots.correction * markov, -1).view_as(p)
        shares = torch.minimum(p, q).sum(-1) * blocks.valid
    return (shares.sum(0) / blocks.valid.sum(0)).tolist()


def test_a_short_run_raises_acceptance(learned: Trainer, target: Checkpoint) -> None:
    ids = rows_of(4, 48, 1000)
    before, after = overlaps(trainer_of(target, learned.settings), ids, True), overlaps(learned, ids, True)
    assert max(before[1:]) < 0.2
    assert after[0] > 0.9
    assert min(after) > 0.4


def test_without_the_markov_head_later_slots_fall(learned: Trainer) -> None:
    """Slots after the first cannot know which of three tokens came before them."""
    ids = rows_of(4, 48, 1000)
    with_head, without = overlaps(learned, ids, True), overlaps(learned, ids, False)
    for k in range(1, BLOCK):
        assert without[k] < with_head[k] - 0.15, k
    assert without[0] > without[1] + 0.15


def test_all_slots_of_a_known_text_come_out_alike(random_checkpoint: Checkpoint) -> None:
    """A periodic text of few symbols, learned by heart: no slot lags, the last one least of all."""
    settings = Settings(rows=4, length=48, anchors=12, parts="prose", token_weight=1.0, distance_weight=0.0)
    made, steps = trainer_of(random_checkpoint, settings), 50
    period = torch.randint(10, 16, (23,), generator=torch.Generator().manual_seed(0))

    def rows(seed: int) -> Tensor:
        phase = torch.randint(0, 23, (4, 1), generator=torch.Generator().manual_seed(seed))
        ids = period[(phase + torch.arange(48)) % 23]
        ids[:, 0], ids[:, 1] = IDS.assistant, IDS.think_close
        return ids

    right = torch.zeros(2, BLOCK)
    with made.kernels.installed():
        made.enter(PLAIN)
        for i in range(steps):
            made.step(batch_of(rows(i)), PLAIN, loop.rate_factor(i / steps, settings))
        count = torch.zeros(BLOCK)
        for seed in range(100, 104):
            ids = rows(seed)
            blocks = made.blocks(ids)
            taps, _ = made.read(ids)
            slots = made.slots(taps, blocks)
            for j, logits in enumerate((slots.base + slots.correction, slots.base)):
                right[j] += ((logits.argmax(-1).view_as(blocks.wanted) == blocks.wanted) & blocks.valid).sum(0)
            count += blocks.valid.sum(0)
    shares = right / count
    assert shares[0].min() > 0.9  # with the Markov head
    assert shares[1].min() > 0.8  # and by the stages alone
    assert shares.std(1).max() < 0.06


# The checkpoint


def test_every_tensor_of_the_drafter_is_made(trained: tuple[Trainer, Checkpoint]) -> None:
    made, packed = trained
    masters = drafter.official(made.config, made.masters())
    names = deepseek_v41_dspark.drafter_names(made.config)
    assert set(masters) == {name for name in names if not name.endswith(".scale")}
    original = dict(drafter.packed(packed, masters))
    assert original.keys() == packed.specs.keys()
    for stage in range(made.config.text.num_nextn_predict_layers):
        biases = [packed.tensor(f"mtp.{stage}.ffn.gate.{part}") for part in ("bias", "bias_vl")]
        assert torch.equal(*biases)
        assert biases[0].any()


def test_serving_reads_what_training_had_in_force(
    trained: tuple[Trainer, Checkpoint], random_checkpoint: Checkpoint
) -> None:
    """Every parameter of the serving drafter is the quantised leaf, to the bit; the backbone's bytes are as before."""
    made, packed = trained
    made.optimiser.publish(quantised=True)
    serving = dict(deepseek_v41_dspark.from_checkpoint(packed, NUMERICS["float"]).named_parameters())
    for name, value in made.model.named_parameters():
        if not name.endswith("bias_vl"):
            assert torch.equal(serving[name].detach().float(), value.detach().float()), name
    for name, spec in packed.specs.items():
        if not spec.group.startswith("dspark"):
            assert torch.equal(packed.tensor(name).view(torch.uint8), random_checkpoint.tensor(name).view(torch.uint8))


# Calibration


def confident(seed: int, count: int, slope: float) -> Rounds:
    """Rounds whose confidence logits are `slope` times what they should be."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 1.5, (count, 3))
    happened = rng.random((count, 3)) < 1 / (1 + np.exp(-logits))
    accepted = happened.cumprod(1).sum(1)
    return Rounds(
        np.arange(count) % 40,
        np.full(count, 3),
        accepted,
        accepted + 1,
        (logits * slope).astype(np.float32),
        np.full((count, 3), np.nan, dtype=np.float32),
    )


@pytest.mark.parametrize("slope", [3.0, 0.4])
def test_temperatures_undo_a_wrong_slope(slope: float) -> None:
    found = drafter.calibrate(confident(1, 20_000, slope), 40)
    assert found.temperatures == pytest.approx([slope] * 3, rel=0.15)
    for before, after in zip(found.before, found.after, strict=True):
        assert after["ece"] < 0.02 < before["ece"]
        assert after["auroc"] == pytest.approx(before["auroc"], abs=0.02)  # the order hardly changes


def test_texts_that_were_fitted_do_not_judge() -> None:
    """Every other text has another slope: only the first ones are fitted, only the second ones judged."""
    one, two = confident(1, 20_000, 3.0), confident(3, 20_000, 1.0)
    mixed = Rounds(
        *(
            np.concatenate([getattr(one.of(range(0, 40, 2)), name), getattr(two.of(range(1, 40, 2)), name)])
            for name in Rounds.__slots__
        )
    )
    found = drafter.calibrate(mixed, 40)
    assert found.temperatures == pytest.approx([3.0] * 3, rel=0.15)
    assert all(before["ece"] < 0.02 < after["ece"] for before, after in zip(found.before, found.after, strict=True))


def test_a_good_confidence_is_left_alone() -> None:
    found = drafter.calibrate(confident(2, 20_000, 1.0), 40)
    assert found.temperatures == pytest.approx([1.0] * 3, rel=0.1)
    assert drafter.fit_temperatures(confident(2, 0, 1.0)) == (1.0, 1.0, 1.0)


def test_few_events_fit_nothing() -> None:
    """A slot that hardly ever comes out one way keeps its temperature; those before it are fitted."""
    found = confident(4, 4000, 3.0)
    rare = replace(found, accepted=np.minimum(found.accepted, 1 + (np.arange(4000) < 25)))
    assert (rare.accepted == 2).sum() < drafter.FEWEST
    first, *rest = drafter.fit_temperatures(rare)
    assert first == pytest.approx(3.0, rel=0.2)
    assert rest == [1.0, 1.0]


def test_temperatures_are_stored_in_the_config(trained: tuple[Trainer, Checkpoint], tmp_path: Path) -> None:
    _, packed = trained
    path = write_checkpoint(tmp_path / "copy", packed.config_json, packed.items())
    drafter.store_temperatures(path, (1.0, 2.0, 0.5, 1.5, 3.0))
    assert Checkpoint.open(path).config.text.dspark_confidence_temperatures == (1.0, 2.0, 0.5, 1.5, 3.0)
    with pytest.raises(BadConfigKey, match="5 entries"):
        drafter.store_temperatures(path, (1.0, 2.0))
    assert Checkpoint.open(path).config.text.dspark_confidence_temperatures == (1.0, 2.0, 0.5, 1.5, 3.0)
    assert sorted(p.name for p in path.iterdir()) == sorted(p.name for p in packed.path.iterdir())


def test_a_trained_drafter_is_taken_by_the_engine(learned: Trainer, target: Checkpoint, tmp_path: Path) -> None:
    """All the way: packed, served quantised, measured over what the target writes, calibrated."""
    source = drafter.packed(target, drafter.official(target.config, learned.masters()))
    path = write_checkpoint(tmp_path / "packed", target.config_json, source)
    prompts = [list(opening())] * 60
    with LLM(path, numerics="production", cpu__threads=1) as llm:
        texts, rounds = acceptance.measure(llm, prompts, 1.0, 60, 0)
    with LLM(target.path, numerics="production", cpu__threads=1) as llm:
        untrained = acceptance.measure(llm, prompts, 1.0, 60, 0)
    after, before = (acceptance.acceptance(found)["acceptance_length"] for found in (rounds, untrained.rounds))
    assert after > 2.5 > 2.2 > before
    first = acceptance.acceptance(rounds)["slots"][0]
    assert first["conditional"] > 0.85
    found = drafter.calibrate(rounds, len(texts))
    errors = [np.mean([slot["ece"] for slot in part]) for part in (found.before, found.after)]
    assert errors[1] < errors[0]


# A run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, data.Manifest]:
    """Documents of the language as prose, and others as a skill; a file that the target wrote."""
    path = tmp_path_factory.mktemp("data")
    tokens: dict[str, int] = {}
    counts: dict[str, int] = {}
    for seed, part in enumerate(("prose", "copy", "prose.valid")):
        ids = rows_of(1, 1500, seed)[0].numpy().astype(np.uint16)
        data.write_ids(path / part, ids)
        tokens[part], counts[part] = len(ids), int((ids == IDS.bos).sum())
    data.write_ids(path / "written.xz", rows_of(1, 1000, 9)[0].numpy().astype(np.uint16))
    manifest = data.Manifest(data.FORMAT, 0, 512, {part: [part] for part in tokens}, tokens, counts, 0)
    return path, manifest


RUN = replace(SMALL, rows=3, parts="prose,generated=1,copy=1", seconds=4.0, quantise_from=0.5)


def test_generated_text_is_a_part_like_any_other(folder: tuple[Path, data.Manifest]) -> None:
    path, manifest = folder
    whole = drafter.with_generated(path, manifest, path / "written.xz", IDS)
    assert {part: whole.parts[part] for part in manifest.parts} == manifest.parts
    batch = RowLoader(path, whole, RUN, IDS, CPU).next()
    written = data.read_ids(path / "written.xz")
    starts = data.document_starts(written, IDS.bos)
    first = batch.ids[1].tolist()
    first = first[: first.index(IDS.bos, 1) if IDS.bos in first[1:] else None]
    first = first[: first.index(IDS.eos) + 1] if IDS.eos in first else first
    assert first in [written[a:b][: len(first)].tolist() for a, b in itertools.pairwise(starts)]
    with pytest.raises(BadTrainingData, match="no part 'generated'"):
        RowLoader(path, manifest, RUN, IDS, CPU)


class Ticking(Trainer):
    """Real steps, each of which takes one second of a clock that nothing else moves."""

    now = 0.0

    def step(self, batch: RowBatch, phase: Phase, factor: float) -> Tensor:
        Ticking.now += 1.0
        return super().step(batch, phase, factor)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    target: Checkpoint, folder: tuple[Path, data.Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, manifest = folder
    manifest = drafter.with_generated(path, manifest, path / "written.xz", IDS)
    monkeypatch.setattr(loop.time, "monotonic", lambda: Ticking.now)

    def part_of_run(out: Path, limit: float) -> tuple[Trainer, bool]:
        made = Ticking(target, IDS, RUN, CPU)
        loader = RowLoader(path, manifest, RUN, IDS, CPU)
        with made.kernels.installed():
            _, done = loop.run(made, loader, out, Ticking.now + limit, lambda row: None, pause=True)
        return made, done

    whole, done = part_of_run(tmp_path / "whole", math.inf)
    assert done
    assert whole.steps == 4
    for limit, finished in ((1.0, False), (2.0, False), (9.0, True)):
        made, done = part_of_run(tmp_path / "parts", limit)
        assert done == finished
    for name, value in whole.masters().items():
        assert torch.equal(value, made.masters()[name]), name
    logs = []
    for out in ("whole", "parts"):
        with (tmp_path / out / loop.LOG_FILE).open(newline="") as file:
            logs.append([{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)])
    assert logs[0] == logs[1]
    assert [row["quantised"] for row in logs[0]] == ["0", "0", "1", "1"]
    assert set(whole.measures) < set(logs[0][0])
    assert drafter.plot(tmp_path / "whole").read_bytes().startswith(b"\x89PNG")
    with whole.kernels.installed():
        held_out = drafter.held_out(whole, data.read_part(path, manifest, "prose.valid"), 2)
    assert held_out.keys() == set(whole.measures) - {"norm", "largest_load"}


def test_held_out_measures_are_means_over_batches(learned: Trainer, target: Checkpoint) -> None:
    ids = rows_of(1, 1200, 77)[0].numpy().astype(np.uint16)
    with learned.kernels.installed():
        both, one = drafter.held_out(learned, ids, 2), drafter.held_out(learned, ids, 1)
        none = drafter.held_out(learned, ids[:40], 2)
    assert 0.3 < both["accept_5"] < both["accept_1"] < 1
    assert both["length"] > 2.5
    assert one["token"] != both["token"]
    assert none == {}
