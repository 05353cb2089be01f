"""The run: settings, schedule, batches, a step, and a run that pauses, breaks off and goes on."""

import csv
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.errors import BadSetting, BadTrainingData, BadTrainingState, MissingDependency
from benthic.testing.tokenizers import build_tokenizer
from benthic.train import data, loop
from benthic.train.loop import Phase, RowLoader, Settings, Trainer, phase_at, rate_factor
from tests.train.small import IDS, small_trainer

CPU = torch.device("cpu")
SMALL = Settings(rows=4, length=32, needle_rows=1, copy_rows=1, index_rows=2, seconds=10.0)


# Settings


def test_the_defaults_are_good() -> None:
    Settings().check()
    SMALL.check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", 0),
        ("rows", 2),
        ("length", 31),
        ("length", 0),
        ("length", 1 << 16),
        ("needle_rows", -1),
        ("needle_rows", 3),
        ("copy_rows", -1),
        ("index_rows", -1),
        ("index_rows", 5),
        ("seconds", 0.0),
        ("seconds", -1.0),
        ("seconds", float("inf")),
        ("seconds", float("nan")),
        ("topk_from", 1.5),
        ("topk_from", -0.1),
        ("quantise_from", float("nan")),
        ("warm_up", -0.1),
        ("warm_up", 0.5),
        ("flat_until", 1.0),
        ("floor", -1.0),
        ("needle_weight", -1.0),
        ("balance_weight", float("nan")),
        ("index_weight", float("inf")),
        ("bias_step", -1e-3),
        ("seed", -1),
    ],
)
def test_a_bad_setting_is_named(key: str, value: float) -> None:
    with pytest.raises(BadSetting) as caught:
        replace(SMALL, **{key: value}).check()
    named = "rows" if (key, value) == ("needle_rows", 3) else key
    assert caught.value.key == named
    assert caught.value.exit_code == 2
    assert f"setting {named} is " in str(caught.value)


def test_every_setting_is_checked() -> None:
    for field in fields(Settings):
        with pytest.raises(BadSetting):
            replace(SMALL, **{field.name: -5}).check()


# The schedule


def test_phases_follow_the_time() -> None:
    settings = replace(SMALL, topk_from=0.5, quantise_from=0.8)
    assert phase_at(0.0, settings) == phase_at(0.499, settings) == Phase(False, False)
    assert phase_at(0.5, settings) == phase_at(0.799, settings) == Phase(True, False)
    assert phase_at(0.8, settings) == phase_at(1.0, settings) == Phase(True, True)
    assert phase_at(0.0, replace(settings, topk_from=0.0)) == Phase(True, False)


def test_rate_goes_up_stays_and_goes_down() -> None:
    settings = replace(SMALL, warm_up=0.04, flat_until=0.4, floor=0.03)
    want = {0.0: 0.01, 0.01: 0.25, 0.02: 0.5, 0.04: 1.0, 0.2: 1.0, 0.4: 1.0, 0.7: 0.515, 1.0: 0.03, 1.5: 0.03}
    for share, factor in want.items():
        assert rate_factor(share, settings) == pytest.approx(factor), share
    assert rate_factor(0.0, replace(settings, warm_up=0.0)) == 1.0
    down = [rate_factor(share / 100, settings) for share in range(40, 101)]
    assert down == sorted(down, reverse=True)


# Batches


def folder_of(path: Path, seed: int = 0, vocab_size: int = 512, **counts: int) -> tuple[Path, data.Manifest]:
    """Documents of 5 to 20 ids; the second id says which part, the third and fourth which document."""
    rng = np.random.default_rng(seed)
    documents = {"needle": 5, "copy": 4, "prose": 40} | counts
    tokens: dict[str, int] = {}
    for number, (part, count) in enumerate(documents.items()):
        ids: list[int] = []
        for i in range(count):
            body = rng.integers(10, vocab_size, int(rng.integers(2, 17)))
            ids += [IDS.bos, 10 + number, 10 + i, IDS.think_close, *body.tolist(), IDS.eos]
        data.write_ids(path / part, np.array(ids, dtype=np.uint16))
        tokens[part] = len(ids)
    manifest = data.Manifest(data.FORMAT, seed, vocab_size, {p: [p] for p in documents}, tokens, documents, 0)
    return path, manifest


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, data.Manifest]:
    return folder_of(tmp_path)


def loader_of(folder: tuple[Path, data.Manifest], settings: Settings = SMALL) -> RowLoader:
    return RowLoader(*folder, settings, IDS, CPU)


def documents_in(rows: Tensor) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for row in rows.tolist():
        row = row[: len(row) - next(i for i, id in enumerate(reversed(row)) if id != IDS.pad)]
        starts = [i for i, id in enumerate(row) if id == IDS.bos]
        out += [tuple(row[a:b]) for a, b in zip(starts, [*starts[1:], len(row)], strict=True)]
    return out


def test_a_batch_has_needle_copy_and_prose_rows_in_this_order(folder: tuple[Path, data.Manifest]) -> None:
    loader = loader_of(folder)
    for _ in range(12):
        batch = loader.next()
        assert batch.shape == (4, 32)
        assert batch.dtype == torch.int64
        assert [{d[1] - 10 for d in documents_in(row[None])} for row in batch] == [{0}, {1}, {2}, {2}]


def test_an_epoch_has_every_document_once(folder: tuple[Path, data.Manifest]) -> None:
    ids = data.read_part(*folder, "prose")
    starts = data.document_starts(ids, IDS.bos)
    want = sorted(tuple(ids[a:b].tolist()) for a, b in pairwise(starts))
    loader = loader_of(folder, replace(SMALL, rows=3))  # one row of prose in a batch
    orders = []
    for _ in range(2):
        epoch = loader.at["prose"][0]
        rows = []
        while loader.at["prose"][0] == epoch and loader.at["prose"][1] < len(loader.rows["prose"]):
            rows.append(loader.next()[2:])
        assert sorted(documents_in(torch.cat(rows))) == want
        orders.append(documents_in(torch.cat(rows)))
        loader.next()
        loader.seek({"prose": (1, 0)})
    assert orders[0] != orders[1]


def test_a_seek_goes_on_with_the_same_batches(folder: tuple[Path, data.Manifest]) -> None:
    loader = loader_of(folder)
    batches, places = [], []
    for _ in range(40):  # several epochs of every part
        places.append(dict(loader.at))
        batches.append(loader.next())
    assert min(epoch for epoch, _ in loader.at.values()) >= 2
    for start in (0, 1, 13, 30):
        other = loader_of(folder)
        other.seek(places[start])
        for want in batches[start : start + 8]:
            assert torch.equal(other.next(), want)


def test_the_seed_changes_the_order(folder: tuple[Path, data.Manifest]) -> None:
    first, other = (loader_of(folder, replace(SMALL, seed=seed)).next() for seed in (0, 1))
    assert not torch.equal(first, other)


def test_more_rows_than_an_epoch_has(folder: tuple[Path, data.Manifest]) -> None:
    batch = loader_of(folder, replace(SMALL, rows=60, needle_rows=20)).next()
    assert batch.shape == (60, 32)
    assert {d[1] for d in documents_in(batch[:20])} == {10}


def test_parts_without_rows_are_not_read(folder: tuple[Path, data.Manifest]) -> None:
    (folder[0] / "needle").unlink()
    batch = loader_of(folder, replace(SMALL, needle_rows=0)).next()
    assert [{d[1] for d in documents_in(row[None])} for row in batch] == [{11}, {12}, {12}, {12}]
    with pytest.raises(BadTrainingData, match="needle"):
        loader_of(folder)


def test_large_ids_come_through(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, vocab_size=65536)
    loader = loader_of(folder)
    seen = torch.cat([loader.next() for _ in range(20)])
    assert int(seen.min()) == 0
    assert int(seen.max()) > 60_000
    known = {id for part in ("needle", "copy", "prose") for id in data.read_part(*folder, part).tolist()}
    assert set(seen.flatten().tolist()) <= known | {IDS.pad}


def test_a_part_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrainingData, match="part copy"):
        loader_of(folder_of(tmp_path, copy=0))
    folder = folder_of(tmp_path)
    data.write_ids(tmp_path / "copy", np.array([7] * folder[1].tokens["copy"], dtype=np.uint16))
    with pytest.raises(BadTrainingData, match="part copy"):
        loader_of(folder)


def test_ids_come_from_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    special = tokenizer.special_ids
    ids = loop.Ids.of(tokenizer)
    assert ids == (special["bos"], special["eos"], special["pad"], special["think_close"])


# One step


def test_steps_learn_in_every_phase(folder: tuple[Path, data.Manifest]) -> None:
    trainer = small_trainer(SMALL)
    batch = loader_of(folder).next()
    losses = []
    with trainer.kernels.installed():
        for phase in [Phase(False, False)] * 3 + [Phase(True, False)] * 2 + [Phase(True, True)] * 2:
            trainer.enter(phase)
            values = trainer.step(batch, phase, 1.0)
            assert values.shape == (6,)
            assert torch.isfinite(values).all()
            losses.append(float(values[0]))
            assert trainer.model.numerics.quantise == phase.quantised
    assert losses[0] == pytest.approx(np.log(512), rel=1e-3)  # the head begins at zero
    assert losses == sorted(losses, reverse=True)
    assert trainer.steps == 7


def test_a_step_is_repeatable(folder: tuple[Path, data.Manifest]) -> None:
    batch = loader_of(folder).next()
    values = []
    for _ in range(2):
        trainer = small_trainer(SMALL)
        with trainer.kernels.installed():
            values.append(trainer.step(batch, Phase(True, False), 1.0))
    assert torch.equal(*values)
    assert not torch.equal(
        small_trainer(SMALL).model.embed.weight, small_trainer(replace(SMALL, seed=1)).model.embed.weight
    )


def test_losses_are_weighted_as_the_settings_say(folder: tuple[Path, data.Manifest]) -> None:
    """Against a plain cross entropy over the graph's own hidden states."""
    batch = loader_of(folder).next()
    trainer = small_trainer(SMALL)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head = trainer.model.head.weight
        head.copy_(torch.randn(head.shape, generator=generator) * 0.05)
    with trainer.kernels.installed():
        losses = trainer.losses(batch, True)
        hidden, _ = trainer.hidden(batch, loop.Mode(True, 0))
    logits = torch.nn.functional.linear(hidden, head.to(hidden.dtype)).float().unflatten(0, (4, 32))
    nats = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none")
    inside = torch.zeros(4, 31)
    for r, row in enumerate(batch.tolist()):
        open_ = False
        for p, id in enumerate(row[:-1]):
            open_ = (open_ or id == IDS.think_close) and id != IDS.eos
            inside[r, p] = open_
    weights = inside * torch.tensor([4.0, 1.0, 1.0, 1.0])[:, None]
    torch.testing.assert_close(losses.text, (nats * weights).sum() / weights.sum(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(losses.needle, (nats[0] * inside[0]).sum() / inside[0].sum(), rtol=1e-3, atol=1e-4)
    count = len(trainer.model.layers)
    want = losses.text + 1e-3 * count * losses.balance + losses.index
    torch.testing.assert_close(losses.total.detach(), want)
    assert losses.index > 0


def test_no_index_rows_no_index_loss(folder: tuple[Path, data.Manifest]) -> None:
    trainer = small_trainer(replace(SMALL, index_rows=0))
    before = {name: master.clone() for name, master in trainer.optimiser.masters().items() if "wk.weight" in name}
    assert before
    with trainer.kernels.installed():
        values = trainer.step(loader_of(folder).next(), Phase(False, False), 1.0)
    assert values[2] == 0
    assert torch.isfinite(values).all()
    masters = trainer.optimiser.masters()
    assert all(torch.equal(masters[name], value) or "indexer" in name for name, value in before.items())


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


def test_warming_up_changes_nothing(folder: tuple[Path, data.Manifest]) -> None:
    trainer = small_trainer(SMALL)
    state = trainer.optimiser.state()
    before = [t.clone() for part in (*state["muon"], *state["adam"]) for t in part]
    with trainer.kernels.installed():
        trainer.warm_up(loader_of(folder).next(), iter([Phase(False, False), Phase(True, True)]))
    state = trainer.optimiser.state()
    assert all(map(torch.equal, before, [t for part in (*state["muon"], *state["adam"]) for t in part]))
    assert trainer.steps == 0
    assert not any(bias.any() for bias in trainer.biases().values())
    assert all(leaf.value.grad is None for leaf in trainer.optimiser.leaves)


def test_a_profile_tells_where_a_step_goes(folder: tuple[Path, data.Manifest]) -> None:
    trainer = small_trainer(SMALL)
    with trainer.kernels.installed():
        text = loop.profile(trainer, loader_of(folder).next(), steps=1)
    assert text.count("ms a step") == 3
    assert text.count("Self CPU time total") == 3


# A run


class Time:
    """A clock that a step moves by a second, and nothing else."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Scripted(Trainer):
    """A trainer whose steps cost a second of scripted time and move one number."""

    clock: Time
    log: list[tuple[list[int], Phase, float]]
    entered: list[Phase]
    warmed: list[Phase]
    breaks_at: int = -1

    def warm_up(self, ids: Tensor, phases: Any) -> None:
        self.warmed = list(phases)

    def enter(self, phase: Phase) -> None:
        self.entered.append(phase)

    def step(self, ids: Tensor, phase: Phase, factor: float) -> Tensor:
        if self.steps == self.breaks_at:
            raise KeyboardInterrupt
        assert phase == self.entered[-1]
        self.log.append((ids.flatten().tolist(), phase, factor))
        self.clock.now += 1.0
        self.steps += 1
        self.optimiser.groups[0].master += 1.0
        return torch.arange(6.0) + self.steps


Make = Callable[..., tuple[Scripted, RowLoader]]


@pytest.fixture
def make(folder: tuple[Path, data.Manifest], monkeypatch: pytest.MonkeyPatch) -> Make:
    clock = Time()
    monkeypatch.setattr(loop, "time", clock)

    def made(settings: Settings = SMALL) -> tuple[Scripted, RowLoader]:
        trainer = small_trainer(settings)
        trainer.__class__ = Scripted
        assert isinstance(trainer, Scripted)
        trainer.clock, trainer.log, trainer.entered, trainer.warmed = clock, [], [], []
        return trainer, loader_of(folder, settings)

    return made


def rows_of(out: Path) -> list[dict[str, float]]:
    with (out / loop.LOG_FILE).open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def quiet(row: dict[str, float]) -> None:
    pass


def test_a_run_goes_through_its_schedule(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    reported: list[dict[str, float]] = []
    last, done = loop.run(trainer, loader, tmp_path / "out", float("inf"), reported.append)
    assert done
    assert [entry[1] for entry in trainer.log] == [phase_at(i / 10, SMALL) for i in range(10)]
    assert [entry[2] for entry in trainer.log] == [rate_factor(i / 10, SMALL) for i in range(10)]
    assert trainer.entered == [Phase(False, False), Phase(True, False), Phase(True, True)]
    assert trainer.warmed == trainer.entered
    rows = rows_of(tmp_path / "out")
    assert tuple(rows[0]) == loop.COLUMNS
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["seconds"] for row in rows] == list(range(10))
    assert [row["tokens"] for row in rows] == [128 * i for i in range(1, 11)]
    assert [row["tokens_per_second"] for row in rows] == [0] + [128] * 9
    assert [row["topk"] for row in rows] == [0] * 5 + [1] * 5
    assert [row["quantised"] for row in rows] == [0] * 8 + [1] * 2
    for i, row in enumerate(rows, 1):
        names = ("text", "needle", "index", "balance", "norm", "largest_load")
        assert [row[name] for name in names] == [i + k for k in range(6)]
    assert [{key: float(f"{value:.6g}") for key, value in row.items()} for row in reported] == rows
    assert last == reported[-1]


def test_phases_in_the_other_order_are_compiled_beforehand(make: Make, tmp_path: Path) -> None:
    trainer, loader = make(replace(SMALL, topk_from=0.8, quantise_from=0.5))
    loop.run(trainer, loader, tmp_path / "out", float("inf"), quiet)
    assert trainer.entered == [Phase(False, False), Phase(False, True), Phase(True, True)]
    assert set(trainer.entered) <= set(trainer.warmed)


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


# The state


def test_a_state_comes_back(folder: tuple[Path, data.Manifest], tmp_path: Path) -> None:
    """Through the file: the next real step is the same."""
    trainer, loader = small_trainer(SMALL), loader_of(folder)
    phase = Phase(True, False)
    with trainer.kernels.installed():
        trainer.step(loader.next(), phase, 1.0)
    extra = {"settings": asdict(SMALL), "seconds": 1.5, "loader": dict(loader.at)}
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
            values.append(one.step(rows.next(), phase, 1.0))
    assert torch.equal(*values)
    assert other.steps == trainer.steps == 2
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


def test_the_loss_curve_is_drawn(make: Make, tmp_path: Path) -> None:
    trainer, loader = make()
    loop.run(trainer, loader, tmp_path / "out", float("inf"), quiet)
    assert loop.plot(tmp_path / "out").read_bytes().startswith(b"\x89PNG")


def test_matplotlib_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"matplotlib.*benthic\[train\]"):
        loop.pyplot()
