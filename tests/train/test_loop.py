"""A step, and a run that pauses, breaks off and goes on."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benthic import plots
from benthic.errors import BadTrainingState, MissingDependency
from benthic.kernels import backends
from benthic.models.base import Batch
from benthic.models.deepseek_v41_vision import patches
from benthic.skills.shapes import draw
from benthic.train import data, loop
from benthic.train.loop import Trainer
from benthic.train.loss import history, response_weights
from benthic.train.memory import Mode, RowMemory, RowShapes
from benthic.train.rows import RowBatch, RowLoader
from benthic.train.settings import Form, Phase, Settings, phase_at, phases_from, rate_factor
from benthic.types import NUMERICS
from tests.train.conftest import random_masters
from tests.train.scripted import VISION, Folder, Make, Time, loader_of, quiet, rows_of
from tests.train.small import IDS, IMAGE, SMALL, only_prose, small_trainer

CPU = torch.device("cpu")
NAMES = ("needle", "prose", "copy", "shapes")
PHASES = phases_from(0.0, SMALL)


def whole_state(trainer: Trainer) -> list[Tensor]:
    """Everything that a run changes."""
    state = trainer.optimiser.state()
    return [t for part in (*state["muon"], *state["adam"]) for t in part] + list(trainer.biases().values())


# One step


def test_steps_learn_in_every_phase(folder: Folder) -> None:
    trainer = small_trainer(SMALL)
    loader = loader_of(folder)
    assert len(PHASES) == 5
    losses: list[float] = []
    with trainer.kernels.installed():
        for phase in PHASES:
            trainer.enter(phase)
            batch = loader.sample(phase.form)
            for _ in range(2):
                values = trainer.step(batch, phase, 1.0)
                assert values.shape == (len(loop.MEASURES) + 4,)
                assert torch.isfinite(values[: len(loop.MEASURES)]).all()
                shown = dict(zip(NAMES, torch.isfinite(values[len(loop.MEASURES) :]).tolist(), strict=True))
                assert shown == dict.fromkeys(NAMES[:3], True) | {"shapes": phase.form.images}
                losses.append(float(values[0]))
            assert losses[-2] > losses[-1]
            assert trainer.model.numerics.quantise == phase.quantised
    assert losses[0] == pytest.approx(torch.tensor(512.0).log().item(), rel=1e-3)  # the head begins at zero
    assert trainer.steps == 10


def test_a_step_is_repeatable(folder: Folder) -> None:
    batch = loader_of(folder).next(Form(images=True))
    values = []
    for _ in range(2):
        trainer = small_trainer(SMALL)
        with trainer.kernels.installed():
            values.append(trainer.step(batch, Phase(True, False, Form(images=True)), 1.0))
    assert torch.equal(*values)
    assert not torch.equal(
        small_trainer(SMALL).model.embed.weight, small_trainer(replace(SMALL, seed=1)).model.embed.weight
    )


@pytest.mark.parametrize("form", [Form(), Form(images=True), Form(True, True)])
def test_losses_are_weighted_as_the_settings_say(folder: Folder, form: Form) -> None:
    """Against a plain cross entropy over the graph's own hidden states."""
    batch = loader_of(folder).next(form)
    trainer = small_trainer(SMALL)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head = trainer.model.head.weight
        head.copy_(torch.randn(head.shape, generator=generator) * 0.05)
    rows, length = batch.ids.shape
    with trainer.kernels.installed():
        losses = trainer.losses(batch, True)
        hidden, _ = trainer.hidden(batch.ids, Mode(True, 0), trainer.embeds(batch))
    logits = F.linear(hidden, head.to(hidden.dtype)).float().unflatten(0, (rows, length))
    nats = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch.ids[:, 1:], reduction="none").detach()
    sums, counts = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
    owners = [run.part for run in batch.parts for _ in range(run.rows * run.length)]
    for r, row in enumerate(batch.ids.tolist()):
        inside = False
        for p, id in enumerate(row[:-1]):
            inside = (inside or (id == IDS.think_close and row[p - 1] == IDS.assistant)) and id != IDS.eos
            if inside:
                owner = owners[r * length + p]
                sums[owner] += float(nats[r, p])
                counts[owner] += 1.0
    weights = {"needle": 4.0, "prose": 1.0, "copy": 1.0, "shapes": 2.0}
    text = sum(weights[n] * sums[n] for n in NAMES) / sum(weights[n] * counts[n] for n in NAMES)
    assert float(losses.text) == pytest.approx(text, rel=1e-3)
    for name, value in zip(NAMES, losses.parts.tolist(), strict=True):
        if counts[name]:
            assert value == pytest.approx(sums[name] / counts[name], rel=2e-3), name
        else:
            assert value != value
            assert (name, form.images) == ("shapes", False)
    count = len(trainer.model.layers)
    want = losses.text + 1e-3 * count * losses.balance + losses.index
    torch.testing.assert_close(losses.total.detach(), want)
    tokens = SMALL.index_rows * SMALL.length  # the index loss is taken on as many in every form
    with trainer.kernels.installed():
        _, memory = trainer.hidden(batch.ids, Mode(True, tokens // length), trainer.embeds(batch))
        index = sum(memory.index_loss().values(), torch.zeros(())).detach()
    assert index > 0
    torch.testing.assert_close(losses.index, index)


def test_no_index_rows_no_index_loss(folder: Folder) -> None:
    trainer = small_trainer(replace(SMALL, index_rows=0))
    before = {name: master.clone() for name, master in trainer.optimiser.masters().items()}
    assert any("indexer" in name for name in before)
    with trainer.kernels.installed():
        values = trainer.step(loader_of(folder).next(), Phase(False, False), 1.0)
    assert values[loop.MEASURES.index("index")] == 0
    assert torch.isfinite(values[: len(loop.MEASURES)]).all()
    masters = trainer.optimiser.masters()
    assert all(torch.equal(masters[name], value) for name, value in before.items() if "indexer" in name)


@pytest.mark.parametrize("form", [Form(images=True), Form(True, True)])
def test_the_joint_gradient_is_that_of_a_plain_run(folder: Folder, form: Form) -> None:
    """Each row on its own, through the package's reference functions, each picture through the serving path."""
    settings = replace(SMALL, index_rows=0, balance_weight=0.0)
    trainer = small_trainer(settings, numerics=NUMERICS["float"])
    random_masters(trainer, 8)
    trainer.optimiser.publish(quantised=False)
    batch = loader_of(folder, settings).next(form)
    with trainer.kernels.installed():
        trainer.losses(batch, True).total.backward()
    leaves = [leaf for leaf in trainer.optimiser.leaves if leaf.group != "index"]
    got = {leaf.name: leaf.value.grad for leaf in leaves}
    for leaf in trainer.optimiser.leaves:
        leaf.value.grad = None

    spans = iter(shown_in(folder, batch))
    assert trainer.tower is not None
    assert VISION is not None
    total = count = torch.zeros(())
    owners = torch.tensor(
        [settings.weight(run.part) for run in batch.parts for _ in range(run.rows * run.length)]
    ).view_as(batch.ids)
    with backends.reference():
        for ids, weight in zip(batch.ids, owners, strict=True):
            length = len(ids)
            shapes = RowShapes(trainer.config, trainer.model.plan, 1, length, CPU, trainer.kernels)
            images = ids == IMAGE
            embeds = torch.zeros(length, trainer.config.text.hidden_size)
            at = 0
            while at < length:
                if images[at]:
                    span = trainer.tower(*patches(draw(next(spans)), VISION))
                    embeds = torch.cat([embeds[:at], span, embeds[at + len(span) :]])
                    at += len(span)
                at += 1
            plain = Batch(
                ids, shapes.positions, history(ids[None], 3), images, embeds, (0, length), (0,), (), (), ids[:0]
            )  # fmt: skip
            memory = RowMemory(shapes, NUMERICS["float"], Mode(True, 0))
            logits = trainer.model.logits(trainer.model(plain, memory).hidden)
            nats = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
            inside = response_weights(ids[None], IDS)[0, :-1] * weight[:-1]
            total, count = total + (nats * inside).sum(), count + inside.sum()
        (total / count).backward()
    assert next(spans, None) is None
    for leaf in leaves:
        want, have = leaf.value.grad, got[leaf.name]
        assert have is not None, leaf.name
        assert want is not None, leaf.name
        assert want.any() == have.any(), leaf.name
        torch.testing.assert_close(have, want, rtol=2e-3, atol=2e-5 * float(want.abs().max()) + 1e-7, msg=leaf.name)
    assert any(value is not None and value.any() for name, value in got.items() if name.startswith("vision."))


def shown_in(folder: Folder, batch: RowBatch) -> list[Any]:
    """The pictures of a batch in the order of its tokens; the third id of a document says which."""
    records = data.read_pictures(*folder, "shapes")
    flat = batch.ids.flatten().tolist()
    return [records[flat[i - 1] - 10] for i in range(1, len(flat)) if flat[i] == IMAGE and flat[i - 1] != IMAGE]


def test_a_picture_row_depends_on_its_picture_and_no_other_row_does(folder: Folder) -> None:
    trainer = small_trainer(replace(SMALL, index_rows=0))
    random_masters(trainer, 9)
    trainer.optimiser.publish(quantised=False)
    loader = loader_of(folder)
    batch = loader.next(Form(images=True))
    assert batch.pictures is not None
    other = batch._replace(pictures=batch.pictures._replace(pixels=255 - batch.pictures.pixels))
    with trainer.kernels.installed():
        one, two = (trainer.losses(b, False).parts for b in (batch, other))
        blind = trainer.losses(batch._replace(pictures=None), False).parts
    assert torch.equal(one[:3], two[:3])
    assert abs(float(one[3] - two[3])) > 1e-3
    assert abs(float(one[3] - blind[3])) > 1e-3


def test_both_lengths_give_a_document_the_same_loss() -> None:
    """At the beginning of a row: positions, n-grams and groups begin there, whatever stands behind."""
    settings = only_prose(rows=4, length=32, long_from=0.5, long_length=64)
    trainer = small_trainer(settings, numerics=NUMERICS["float"])
    random_masters(trainer, 10)
    trainer.optimiser.publish(quantised=False)
    document = torch.randint(10, 480, (31,))
    document[0], document[9], document[10], document[30] = IDS.bos, IDS.assistant, IDS.think_close, IDS.eos
    short, long = torch.full((4, 32), IDS.pad), torch.randint(10, 480, (2, 64))
    short[2, :31] = long[1, :31] = document
    with trainer.kernels.installed():
        for topk in (False, True):
            hidden = [trainer.hidden(ids, Mode(topk, 0))[0].view(*ids.shape, -1) for ids in (short, long)]
            torch.testing.assert_close(hidden[0][2, :31], hidden[1][1, :31], atol=1e-5, rtol=1e-5)
    assert hidden[0].std() > 0.1


def test_router_biases_move_towards_equal_loads() -> None:
    trainer = small_trainer(SMALL)
    text, images = torch.tensor([10.0, 2.0, 5.0, 7.0]), torch.tensor([1.0, 9.0, 5.0, 5.0])  # means 6 and 5
    trainer.kernels.loads.extend([torch.stack([text, images])] * len(trainer.model.layers))
    largest = trainer.balance_router(0.5)
    assert largest == pytest.approx(10 / 6)
    for layer in trainer.model.layers:
        assert layer.ffn.bias_vl is not None
        torch.testing.assert_close(layer.ffn.bias, torch.tensor([-1.0, 1.0, 1.0, -1.0]) * 2e-3 * 0.5)
        torch.testing.assert_close(layer.ffn.bias_vl, torch.tensor([1.0, -1.0, 0.0, 0.0]) * 2e-3 * 0.5)
    trainer.balance_router(0.0)  # never less than a tenth
    torch.testing.assert_close(trainer.model.layers[0].ffn.bias.abs(), torch.full((4,), 2e-3 * 0.6))


def test_the_bias_of_image_tokens_moves_by_image_tokens_alone(folder: Folder) -> None:
    trainer, loader = small_trainer(SMALL), loader_of(folder)
    with trainer.kernels.installed():
        trainer.step(loader.next(), Phase(False, False), 1.0)
        assert all(bias.any() != name.endswith("_vl") for name, bias in trainer.biases().items())
        batch = loader.next(Form(images=True))
        trainer.step(batch, Phase(False, False, Form(images=True)), 1.0)
    assert all(bias.any() for bias in trainer.biases().values())
    text, images = torch.stack(trainer.kernels.loads).sum(-1).unbind(1)
    chosen = trainer.config.text.num_experts_per_tok
    assert (images == chosen * (batch.ids == IMAGE).sum()).all()
    assert (text + images == chosen * batch.ids.numel()).all()


def test_warming_up_changes_nothing(folder: Folder) -> None:
    trainer, loader = small_trainer(SMALL), loader_of(folder)
    before = [t.clone() for t in whole_state(trainer)]
    at = loader.at
    with trainer.kernels.installed():
        trainer.warm_up(PHASES, loader.sample)
    assert all(map(torch.equal, before, whole_state(trainer)))
    assert trainer.steps == 0
    assert loader.at == at
    assert not any(bias.any() for bias in trainer.biases().values())
    assert all(leaf.value.grad is None for leaf in trainer.optimiser.leaves)


def test_a_profile_tells_where_a_step_goes(folder: Folder) -> None:
    settings = only_prose(rows=4, length=32, topk_from=0.5, quantise_from=1.0)
    trainer = small_trainer(settings)
    with trainer.kernels.installed():
        text = loop.profile(trainer, loader_of(folder, settings), steps=1)
    assert text.count("ms a step") == 2
    assert text.count("Self CPU time total") == 2


# A run


def test_a_run_goes_through_its_schedule(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    reported: list[dict[str, float]] = []
    last, done = loop.run(trainer, loader, tmp_path / "out", float("inf"), reported.append)
    assert done
    assert [entry[1] for entry in trainer.log] == [phase_at(i / 10, SMALL) for i in range(10)]
    assert [entry[2] for entry in trainer.log] == [rate_factor(i / 10, SMALL) for i in range(10)]
    assert trainer.entered == trainer.warmed == PHASES
    rows = rows_of(tmp_path / "out")
    assert tuple(rows[0]) == loop.columns(trainer)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["seconds"] for row in rows] == list(range(10))
    assert [row["tokens"] for row in rows] == [192 * i for i in range(1, 11)]
    assert [row["tokens_per_second"] for row in rows] == [0] + [192] * 9
    assert [row["topk"] for row in rows] == [0] * 5 + [1] * 5
    assert [row["quantised"] for row in rows] == [0] * 8 + [1] * 2
    assert [row["images"] for row in rows] == [0] * 3 + [1] * 7
    assert [row["long"] for row in rows] == [0] * 7 + [1] * 3
    for i, row in enumerate(rows, 1):
        assert [row[name] for name in (*loop.MEASURES, *NAMES)] == [i + k for k in range(9)]
    assert [{key: float(f"{value:.6g}") for key, value in row.items()} for row in reported] == rows
    assert last == reported[-1]


def test_phases_in_the_other_order_are_compiled_beforehand(make: Make, tmp_path: Path) -> None:
    trainer, loader = make(replace(SMALL, topk_from=0.8, quantise_from=0.2, long_from=0.1, images_from=1.0))
    loop.run(trainer, loader, tmp_path / "out", float("inf"), quiet)
    long = Form(True)
    assert trainer.entered == [
        Phase(False, False),
        Phase(False, False, long),
        Phase(False, True, long),
        Phase(True, True, long),
    ]
    assert trainer.entered == trainer.warmed


def test_a_run_that_goes_on_compiles_what_is_still_to_come(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    loop.run(trainer, loader, tmp_path / "out", trainer.clock.now + 6.0, quiet, pause=True)
    assert trainer.warmed == PHASES
    again, loader = make()
    loop.run(again, loader, tmp_path / "out", float("inf"), quiet)
    assert again.entered == again.warmed == PHASES[2:]


def test_a_paused_run_goes_on_as_if_never_stopped(make: Make, tmp_path: Path) -> None:
    whole, loader = make()
    loop.run(whole, loader, tmp_path / "whole", float("inf"), quiet)
    out = tmp_path / "parts"
    steps: list[Any] = []
    for limit, finished in ((3.0, False), (4.0, False), (100.0, True)):
        part, loader = make()
        last, done = loop.run(part, loader, out, part.clock.now + limit, quiet, pause=True)
        assert done == finished
        steps += part.log
        assert last["step"] == part.steps == len(steps)
        assert last["seconds"] == len(steps) - 1
    assert steps == whole.log  # same batches, phases and rates
    assert torch.equal(part.optimiser.groups[0].master, whole.optimiser.groups[0].master)
    rows, want = rows_of(out), rows_of(tmp_path / "whole")
    assert len(rows) == 10
    for row, other in zip(rows, want, strict=True):
        row.pop("tokens_per_second"), other.pop("tokens_per_second")
    assert rows == want


class Timed(Trainer):
    """A real trainer whose steps cost a second of scripted time."""

    clock: Time

    def step(self, batch: RowBatch, phase: Phase, factor: float) -> Tensor:
        self.clock.now += 1.0
        return super().step(batch, phase, factor)


def timed(folder: Folder, settings: Settings, clock: Time) -> tuple[Timed, RowLoader]:
    trainer = small_trainer(settings)
    trainer.__class__ = Timed
    assert isinstance(trainer, Timed)
    trainer.clock = clock
    return trainer, loader_of(folder, settings)


@pytest.mark.slow
def test_a_real_run_in_parts_is_the_whole_run_bit_for_bit(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through every phase; broken off before pictures, before top-k, and just behind the change of length."""
    clock = Time()
    monkeypatch.setattr(loop, "time", clock)
    whole, loader = timed(folder, SMALL, clock)
    with whole.kernels.installed():
        loop.run(whole, loader, tmp_path / "whole", float("inf"), quiet)
    for limit in (2.0, 2.0, 4.0, 100.0):
        part, loader = timed(folder, SMALL, clock)
        with part.kernels.installed():
            _, done = loop.run(part, loader, tmp_path / "parts", clock.now + limit, quiet, pause=True)
    assert done
    assert whole.steps == part.steps == 10
    assert all(map(torch.equal, whole_state(whole), whole_state(part)))
    rows, want = rows_of(tmp_path / "parts"), rows_of(tmp_path / "whole")
    for row in (*rows, *want):
        row.pop("tokens_per_second")
    assert str(rows) == str(want)  # as text: NaN is NaN


@pytest.mark.slow
def test_a_short_run_lowers_the_loss_of_every_part(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Time()
    monkeypatch.setattr(loop, "time", clock)
    settings = replace(SMALL, seconds=60.0, long_from=0.6, images_from=0.1, topk_from=0.4, quantise_from=0.8)
    trainer, loader = timed(folder, settings, clock)
    with trainer.kernels.installed():
        loop.run(trainer, loader, tmp_path / "out", float("inf"), quiet)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 60
    for name in NAMES:
        losses = [row[name] for row in rows if row[name] == row[name]]
        early, late = (sum(part) / len(part) for part in (losses[:5], losses[-5:]))
        assert late < 0.6 * early, (name, early, late)
    assert rows[-1]["quantised"] == rows[-1]["long"] == rows[-1]["images"] == 1


def test_without_pause_a_deadline_shortens_the_schedule(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    _, done = loop.run(trainer, loader, tmp_path / "out", trainer.clock.now + 5.0, quiet)
    assert done
    assert [entry[1] for entry in trainer.log] == [phase_at(i / 5, SMALL) for i in range(5)]
    assert trainer.log[-1][2] == rate_factor(0.8, SMALL)


def test_a_deadline_in_the_past_still_makes_a_step(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    _, done = loop.run(trainer, loader, tmp_path / "out", trainer.clock.now - 100.0, quiet, pause=True)
    assert not done
    assert trainer.steps == 1


def test_nothing_is_left_to_train(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    loop.run(trainer, loader, tmp_path / "out", float("inf"), quiet)
    rows = rows_of(tmp_path / "out")
    again, loader = make()
    assert loop.run(again, loader, tmp_path / "out", float("inf"), quiet) == ({}, True)
    assert again.steps == 10
    assert again.log == []
    assert rows_of(tmp_path / "out") == rows


@pytest.mark.parametrize("breaks_at", [4, 7])
def test_a_run_that_breaks_off_goes_on_from_its_last_save(make: Make, tmp_path: Path, breaks_at: int) -> None:
    whole, loader = make()
    loop.run(whole, loader, tmp_path / "whole", float("inf"), quiet)
    out = tmp_path / "broken"
    broken, loader = make()
    broken.breaks_at = breaks_at
    with pytest.raises(KeyboardInterrupt):
        loop.run(broken, loader, out, float("inf"), quiet, save_seconds=3.5)
    state = loop.read_state(out / loop.STATE_FILE, CPU)
    assert (state["steps"], state["seconds"]) == (4, 4.0)
    with (out / loop.LOG_FILE).open("a") as file:
        file.write("9,8.0,10")  # a line cut short
    rest, loader = make()
    loop.run(rest, loader, out, float("inf"), quiet)
    assert broken.log[:4] + rest.log == whole.log
    assert [row["step"] for row in rows_of(out)] == list(range(1, 11))


def test_a_new_run_starts_a_new_log(make: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / loop.LOG_FILE).write_text("old\n1\n")
    trainer, loader = make()
    loop.run(trainer, loader, tmp_path / "out", float("inf"), quiet)
    assert len(rows_of(tmp_path / "out")) == 10


def test_other_settings_are_refused(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    loop.run(trainer, loader, tmp_path, trainer.clock.now + 2.0, quiet, pause=True)
    before = (tmp_path / loop.STATE_FILE).read_bytes(), (tmp_path / loop.LOG_FILE).read_bytes()
    for changes in ({"seed": 1}, {"seconds": 11.0, "floor": 0.5}):
        other, loader = make(replace(SMALL, **changes))
        with pytest.raises(BadTrainingState, match=rf"state\.pt.*other settings \({', '.join(changes)}\)"):
            loop.run(other, loader, tmp_path, float("inf"), quiet)
        assert other.steps == 0
    assert ((tmp_path / loop.STATE_FILE).read_bytes(), (tmp_path / loop.LOG_FILE).read_bytes()) == before


def test_a_run_is_replanned(make: Make, folder: Folder, tmp_path: Path) -> None:
    """To the end, then with more time and other rows: the new schedule, from the rows where the old one ended."""
    first, loader = make()
    loop.run(first, loader, tmp_path, float("inf"), quiet)
    at = loader.at
    longer = replace(SMALL, seconds=20.0, parts="needle=2,prose,copy=1", shapes_rows=2, long_from=0.9)
    assert longer.names == SMALL.names
    assert longer.parts != SMALL.parts
    rest, loader = make(longer)
    _, done = loop.run(rest, loader, tmp_path, float("inf"), quiet, replan=True)
    assert done
    assert [entry[1:] for entry in rest.log] == [
        (phase_at(i / 20, longer), rate_factor(i / 20, longer)) for i in range(10, 20)
    ]
    assert rest.warmed == phases_from(0.5, longer)
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 21))
    expected = loader_of(folder, longer)
    expected.seek(at)
    assert rest.log[0][0] == expected.next(rest.log[0][1].form).ids.flatten().tolist()
    state = loop.read_state(tmp_path / loop.STATE_FILE, CPU)
    assert state["settings"] == asdict(longer)


def test_a_replanned_run_keeps_its_parts(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    loop.run(trainer, loader, tmp_path, float("inf"), quiet)
    other, loader = make(replace(SMALL, seconds=20.0, shapes_rows=0))
    with pytest.raises(BadTrainingState, match=r"log\.csv.*parts that it began with"):
        loop.run(other, loader, tmp_path, float("inf"), quiet, replan=True)
    assert other.steps == 0


# The state


def test_a_state_comes_back(folder: Folder, tmp_path: Path) -> None:
    """Through the file: the next real step is the same."""
    trainer, loader = small_trainer(SMALL), loader_of(folder)
    phase = Phase(True, False, Form(images=True))
    with trainer.kernels.installed():
        trainer.step(loader.next(phase.form), phase, 1.0)
    extra = {"settings": asdict(SMALL), "seconds": 1.5, "loader": loader.at}
    trainer.save(tmp_path / "state.pt", extra)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("state")) == ["state.pt"]
    state = loop.read_state(tmp_path / "state.pt", CPU)
    assert {key: state[key] for key in extra} == extra
    other, again = small_trainer(SMALL), loader_of(folder)
    other.restore(state, tmp_path / "state.pt")
    again.seek(state["loader"])
    values = []
    for one, rows in ((trainer, loader), (other, again)):
        with one.kernels.installed():
            one.enter(phase)
            values.append(one.step(rows.next(phase.form), phase, 1.0))
    assert torch.equal(*(part.nan_to_num() for part in values))
    assert other.steps == trainer.steps == 2
    assert all(map(torch.equal, whole_state(trainer), whole_state(other)))
    for name, bias in trainer.biases().items():
        assert torch.equal(bias, other.biases()[name])
    assert any(bias.any() for bias in other.biases().values())


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    path = tmp_path / loop.STATE_FILE
    with pytest.raises(BadTrainingState, match=r"state\.pt: no such file"):
        loop.read_state(path, CPU)
    trainer = small_trainer(SMALL)
    trainer.save(path, {"settings": asdict(SMALL), "seconds": 0.0, "loader": {}})
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:-20]):
        path.write_bytes(content)
        with pytest.raises(BadTrainingState, match=r"state\.pt: .*damaged") as caught:
            loop.read_state(path, CPU)
        assert caught.value.exit_code == 2
    for other in ([1], {"steps": 3}):
        torch.save(other, path)
        with pytest.raises(BadTrainingState, match=r"state\.pt: .*no saved state of a backbone run"):
            loop.read_state(path, CPU)


def test_the_state_of_another_model_is_refused_untouched(trainer: Trainer, tmp_path: Path) -> None:
    path = tmp_path / loop.STATE_FILE
    trainer.save(path, {"settings": asdict(SMALL), "seconds": 0.0, "loader": {}})
    small = small_trainer(SMALL)
    before = {name: master.clone() for name, master in small.optimiser.masters().items()}
    with pytest.raises(BadTrainingState, match="other shapes than the model config"):
        small.restore(loop.read_state(path, CPU), path)
    assert all(torch.equal(master, before[name]) for name, master in small.optimiser.masters().items())


# The plot


def test_the_loss_curves_are_drawn(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, loader = make()
    loop.run(trainer, loader, tmp_path / "out", float("inf"), quiet)
    drawn: list[Any] = []
    draw = plots.pyplot()
    monkeypatch.setattr(draw, "close", drawn.append)
    assert loop.plot(tmp_path / "out", SMALL).read_bytes().startswith(b"\x89PNG")
    curves = {line.get_label() for axis in drawn[0].axes for line in axis.lines}
    assert {*NAMES, "index", "balance", "norm", "tokens_per_second"} <= curves
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["images", "topk", "long", "quantised"]
    monkeypatch.undo()
    draw.close(drawn[0])


def test_matplotlib_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"matplotlib.*benthic\[train\]"):
        plots.pyplot()
