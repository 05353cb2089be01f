"""The training run of the backbone: rows in, steps by the wall clock, a log, a saved state to resume from.

Phases by share of the training time (`settings.Phase`): dense visibility, then top-k in force; rows of pictures; long
rows; quantisers in force. Time spent on compiling is not training time. Source of the settings: the minnow
specification, sections 3, 5.3 and 5.5.
"""

import csv
import logging
import pickle
import shutil
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from benthic import plots
from benthic.errors import BadTrainingState
from benthic.models.base import Batch
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.train import backbone, carry
from benthic.train.kernels import TrainingKernels
from benthic.train.loss import Ids, head_loss, history, response_weights, targets
from benthic.train.memory import Mode, RowMemory, RowShapes
from benthic.train.optim import Optimiser
from benthic.train.rows import RowBatch, RowLoader
from benthic.train.settings import PROSE, Form, Phase, Run, Settings, phase_at, phases_from, rate_factor
from benthic.types import NUMERICS, Numerics

log = logging.getLogger(__name__)

STATE_FILE, LOG_FILE, PLOT_FILE = "state.pt", "log.csv", "loss.png"


@dataclass(frozen=True, slots=True)
class Losses:
    total: Tensor  # what is minimised
    text: Tensor  # weighted nats a response token
    parts: Tensor  # [parts] nats a response token of each of `Settings.names`; NaN where it has none in the batch
    index: Tensor  # KL, nats a token, summed over layers
    balance: Tensor  # mean over layers, 1 when balanced


class Trainer:
    """Model, tower, kernels, masters and what one step does with a batch."""

    kind = "backbone"

    def __init__(
        self,
        config: ModelConfig,
        classes: Tensor,
        ids: Ids,
        settings: Settings,
        device: torch.device,
        numerics: Numerics = backbone.PLAIN,
    ):
        settings.check()
        self.config, self.ids, self.settings, self.device, self.plain = config, ids, settings, device, numerics
        self.kernels = TrainingKernels(device, settings.rows)
        self.model = backbone.build(config, classes, numerics, self.kernels)
        backbone.initialise(self.model, config.text, settings.seed)
        self.tower = backbone.build_tower(config, numerics)
        self.model.to(device)
        leaves = backbone.leaves(self.model)
        if self.tower is not None:
            backbone.initialise_tower(self.tower, settings.seed)
            leaves += backbone.tower_leaves(self.tower.to(device))
        self.optimiser = Optimiser(leaves)
        self.steps = 0
        self.measures = (*MEASURES, *settings.names)
        self.shapes = cache(self._shapes)
        self._units = cache(self._make_units)

    def _shapes(self, rows: int, length: int) -> RowShapes:
        return RowShapes(self.config, self.model.plan, rows, length, self.device, self.kernels)

    def hidden(self, ids: Tensor, mode: Mode, embeds: Tensor | None = None) -> tuple[Tensor, RowMemory]:
        """ids [B, L] -> [B L, D] after the last norm, and what the memory collected. Kernels must be installed.

        embeds  [B L, D] rows for the image positions, as `Shown.embeds` gives them; None: no picture is shown
        """
        rows, length = ids.shape
        self.kernels.clear()
        shapes = self.shapes(rows, length)
        memory = RowMemory(shapes, self.model.numerics, mode)
        # the mask is there in every step, so that a piece has one form in all phases
        images = None if self.tower is None else (ids == self.ids.image).flatten()
        self.kernels.images = images
        batch = Batch(
            ids=ids.flatten(),
            positions=shapes.positions,
            history=history(ids, max(self.config.text.engram_max_ngram_size - 1, 0)),
            images=images,
            embeds=embeds,
            starts=tuple(range(0, rows * length + 1, length)),
            firsts=(0,) * rows,
            slots=(),
            tables=(),
            logit_rows=ids.new_empty(0),
        )
        return self.model.norm(self.model(batch, memory).hidden), memory

    def embeds(self, batch: RowBatch) -> Tensor | None:
        """What the tower makes of the pictures in a batch."""
        if batch.pictures is None:
            return None
        assert self.tower is not None, "a batch has pictures and the model no vision tower"
        return batch.pictures.embeds(self.tower, batch.ids.numel())

    def _make_units(self, parts: tuple[Run, ...]) -> tuple[Tensor, Tensor]:
        """Weight of each unit [units, 1], and which units belong to which part [parts, units]."""
        names = [run.part for run in parts for _ in range(run.rows * run.length // self.settings.length)]
        weights = torch.tensor([[self.settings.weight(name)] for name in names], device=self.device)
        members = [[float(name == part) for name in names] for part in self.settings.names]
        return weights, torch.tensor(members, device=self.device)

    def losses(self, batch: RowBatch, topk: bool) -> Losses:
        settings, ids = self.settings, batch.ids
        index_rows = settings.index_rows * settings.length // ids.shape[1]
        hidden, memory = self.hidden(ids, Mode(topk, index_rows), self.embeds(batch))
        unit_weights, members = self._units(batch.parts)
        plain = response_weights(ids, self.ids).view(len(unit_weights), -1)
        weights = (plain * unit_weights).flatten()
        total, nats = self.kernels.piece(head_loss)(hidden, self.model.head.weight, targets(ids), weights)
        text = total / weights.sum()
        sums, counts = (nats.view_as(plain) * plain).sum(1), plain.sum(1)
        parts = (members * sums).sum(1) / (members * counts).sum(1)
        balance = torch.stack(self.kernels.balance).sum()
        index = torch.zeros((), device=self.device)
        for part in memory.index_loss().values():
            index = index + part
        loss = text + settings.balance_weight * balance + settings.index_weight * index
        balance = balance.detach() / len(self.kernels.balance)
        return Losses(loss, text.detach(), parts, index.detach(), balance)

    def step(self, batch: RowBatch, phase: Phase, factor: float) -> Tensor:
        """One update. Returns f32 on the device: MEASURES, then the loss of each part."""
        losses = self.losses(batch, phase.topk)
        losses.total.backward()
        norm = self.optimiser.step(torch.full((), factor, device=self.device))
        largest = self.balance_router(factor)
        self.optimiser.publish(phase.quantised)
        self.steps += 1
        measures = torch.stack([losses.text, losses.index, losses.balance, norm, largest])
        return torch.cat([measures, losses.parts]).float()

    @torch.no_grad()
    def balance_router(self, factor: float) -> Tensor:
        """Move router biases towards equal loads, those of image tokens by image tokens alone.

        Returns the largest expert load of text tokens over the mean, all layers.
        """
        loads = torch.stack(self.kernels.loads)  # [layers, 2, E]
        mean = loads.mean(-1, keepdim=True)
        steps = self.settings.bias_step * max(factor, 0.1) * torch.sign(mean - loads)
        for layer, (text, images) in zip(self.model.layers, steps, strict=True):
            layer.ffn.bias.add_(text)
            if layer.ffn.bias_vl is not None:
                layer.ffn.bias_vl.add_(images)
        return (loads[:, 0] / mean[:, 0]).max()

    def enter(self, phase: Phase) -> None:
        """Put quantisers in force or take them out, in modules and leaves."""
        backbone.set_numerics(self.model, NUMERICS["production"] if phase.quantised else self.plain)
        self.optimiser.publish(phase.quantised)

    def warm_up(self, phases: Iterable[Phase], sample: Callable[[Form], RowBatch]) -> None:
        """Run each phase once without an update, so that everything is compiled before the clock starts.

        sample  a batch of a form
        """
        for phase in phases:
            begin = time.monotonic()
            self.enter(phase)
            self.losses(sample(phase.form), phase.topk).total.backward()
            for leaf in self.optimiser.leaves:
                leaf.value.grad = None
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = round(time.monotonic() - begin, 1)
            log.info(
                "phase compiled",
                extra={"topk": phase.topk, "quantised": phase.quantised, **phase.form._asdict(), "seconds": seconds},
            )

    def biases(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if not p.requires_grad}

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        state = {
            "kind": self.kind,
            "optimiser": self.optimiser.state(),
            "biases": self.biases(),
            "steps": self.steps,
            **extra,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    @torch.no_grad()
    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Go on from a state that `read_state(path)` read. Raises BadTrainingState before anything is changed."""
        if not self.optimiser.fits(state["optimiser"]) or state["biases"].keys() != self.biases().keys():
            raise BadTrainingState(path, "its weights have other shapes than the model config of the data folder")
        self.optimiser.load_state(state["optimiser"])
        for name, bias in self.biases().items():
            bias.copy_(state["biases"][name])
        self.steps = state["steps"]


def read_state(path: Path, device: torch.device, kind: str = "backbone") -> dict[str, Any]:
    """What a run of that kind saved. Raises BadTrainingState."""
    if not path.is_file():
        raise BadTrainingState(path, f"no such file; `benthic train {kind}` makes it")
    if not zipfile.is_zipfile(path):  # cut short, or anything else: torch would take it for a pickle
        raise BadTrainingState(path, "it is no saved state, or a damaged one")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise BadTrainingState(path, f"it is no saved state, or a damaged one: {reason}") from error
    if not isinstance(state, dict) or state.get("kind") != kind:
        raise BadTrainingState(path, f"it is no saved state of a {kind} run")
    return state


# ---- the run ---------------------------------------------------------------------------------------------------------


MEASURES = ("text", "index", "balance", "norm", "largest_load")  # what a step returns, before the parts

Report = Callable[[dict[str, float]], None]


class Learner(Protocol):
    """What a run trains: the backbone's `Trainer`, or the drafter's."""

    @property
    def settings(self) -> Settings: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def steps(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def measures(self) -> tuple[str, ...]: ...  # what a step returns
    def warm_up(self, phases: Iterable[Phase], sample: Callable[[Form], RowBatch]) -> None: ...
    def enter(self, phase: Phase) -> None: ...
    def step(self, batch: RowBatch, phase: Phase, factor: float) -> Tensor: ...
    def save(self, path: Path, extra: dict[str, Any]) -> None: ...
    def restore(self, state: dict[str, Any], path: Path) -> None: ...


def columns(learner: Learner) -> tuple[str, ...]:
    """Of the log."""
    schedule = ("step", "seconds", "tokens", "tokens_per_second", "factor", "long", "images", "topk", "quantised")
    return (*schedule, *learner.measures)


class Clock:
    """Training seconds: wall time since `start`, plus what earlier runs spent."""

    def __init__(self, spent: float):
        self._spent, self._begin = spent, time.monotonic()

    def seconds(self) -> float:
        return self._spent + time.monotonic() - self._begin


class Coming(NamedTuple):
    """Values on their way from the device: reading them waits for the step that made them, and for none after it."""

    values: Tensor
    there: torch.cuda.Event | None

    @classmethod
    def of(cls, values: Tensor) -> "Coming":
        if not values.is_cuda:
            return cls(values, None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        there = torch.cuda.Event()
        there.record()
        return cls(host, there)

    def read(self) -> list[float]:
        if self.there is not None:
            self.there.synchronize()
        return self.values.tolist()


def run(
    trainer: Learner,
    loader: RowLoader,
    out: Path,
    deadline: float,
    report: Report,
    *,
    pause: bool = False,
    replan: bool = False,
    save_seconds: float = 120.0,
) -> tuple[dict[str, float], bool]:
    """Train until the settings' time is spent or `deadline` (monotonic seconds) comes; resume from a state in `out`.

    pause   False: a deadline that cuts the time short cuts the schedule too, its shares are of the time there is.
            True: the schedule stands, and what the deadline leaves undone is for a later call with the same settings.
    replan  go on with the settings at hand where the saved run had others: more time, other rows. Time that was spent
            counts, so the phase and the learning rate are those of its share of the new time.
    report  called with each logged row.
    Returns the last row, empty when there was nothing left to train, and whether the schedule is done.
    """
    settings = trainer.settings
    out.mkdir(parents=True, exist_ok=True)
    state_file = out / STATE_FILE
    spent = 0.0
    if state_file.is_file():
        state = read_state(state_file, trainer.device, trainer.kind)
        if not replan and state["settings"] != asdict(settings):
            changed = [key for key, value in asdict(settings).items() if state["settings"].get(key) != value]
            detail = f"it belongs to a run with other settings ({', '.join(changed)})"
            raise BadTrainingState(state_file, f"{detail}; give the same, --replan, or another --out")
        if (out / LOG_FILE).is_file() and _logged(out / LOG_FILE) != columns(trainer):
            raise BadTrainingState(
                out / LOG_FILE, "a run goes on with the parts that it began with, and this has others"
            )
        trainer.restore(state, state_file)
        spent = state["seconds"]
        loader.seek(state["loader"])
        log.info("resumed", extra={"step": trainer.steps, "seconds": spent})
    trainer.warm_up(phases_from(spent / settings.seconds, settings), loader.sample)
    phase = phase_at(spent / settings.seconds, settings)
    trainer.enter(phase)
    until = min(settings.seconds, spent + max(deadline - time.monotonic(), 1.0))
    total = settings.seconds if pause else until
    clock, saved = Clock(spent), time.monotonic()
    tokens_a_step = settings.rows * settings.length
    pending: deque[tuple[dict[str, float], Coming]] = deque()
    last: dict[str, float] = {}
    new_file = not (out / LOG_FILE).is_file() or trainer.steps == 0
    if not new_file:
        _cut_log(out / LOG_FILE, trainer.steps)
    with (out / LOG_FILE).open("w" if new_file else "a", newline="") as file:
        writer = csv.DictWriter(file, columns(trainer))
        if new_file:
            writer.writeheader()
        started, before = clock.seconds(), trainer.steps

        def flush(keep: int) -> None:
            nonlocal last
            while len(pending) > keep:
                row, coming = pending.popleft()
                row |= dict(zip(trainer.measures, coming.read(), strict=True))
                writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else str(v) for key, v in row.items()})
                last = row
                report(row)

        while (seconds := clock.seconds()) < until:
            share = seconds / total
            wanted = phase_at(share, settings)
            if wanted != phase:
                phase = wanted
                trainer.enter(phase)
            factor = rate_factor(share, settings)
            values = trainer.step(loader.next(phase.form), phase, factor)
            done = trainer.steps - 1 - before  # when this step began
            row: dict[str, float] = dict(
                step=trainer.steps,
                seconds=seconds,
                tokens=trainer.steps * tokens_a_step,
                tokens_per_second=done * tokens_a_step / max(seconds - started, 1e-9),
                factor=factor,
                long=float(phase.form.long),
                images=float(phase.form.images),
                topk=float(phase.topk),
                quantised=float(phase.quantised),
            )
            pending.append((row, Coming.of(values)))
            flush(keep=2)
            if time.monotonic() - saved > save_seconds:
                saved = time.monotonic()
                flush(keep=0)  # the log first: it may hold more than the state, never less
                file.flush()
                trainer.save(state_file, _extra(settings, clock, loader))
        flush(keep=0)
    trainer.save(state_file, _extra(settings, clock, loader))
    return last, clock.seconds() >= total


def carry_out(trainer: Trainer, out: Path, folder: Path) -> int:
    """Write the state that `run` saved in `out` once more, small, beside its log. Returns the bytes of the state."""
    state = read_state(out / STATE_FILE, torch.device("cpu"))
    extra = {key: state[key] for key in ("steps", "settings", "seconds", "loader")}
    size = carry.write(folder, trainer.optimiser.masters() | trainer.biases(), extra)
    shutil.copyfile(out / LOG_FILE, folder / LOG_FILE)
    return size


def carried(trainer: Trainer, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `carry_out` wrote: masters and router biases, and the rest of the state. Raises BadTrainingState."""
    tensors, extra = carry.read(folder)
    shapes = {name: tensor.shape for name, tensor in (trainer.optimiser.masters() | trainer.biases()).items()}
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise BadTrainingState(folder, "its weights have other shapes than the model config of the data folder")
    return tensors, extra


@torch.no_grad()
def carry_in(trainer: Trainer, folder: Path, out: Path) -> bool:
    """Make a state for `run` in `out` of what `carry_out` wrote, where there is no state and something was carried.

    Returns whether it did. Raises BadTrainingState.
    """
    if (out / STATE_FILE).is_file() or not carry.files(folder):
        return False
    tensors, extra = carried(trainer, folder)
    trainer.optimiser.begin_at(tensors)
    for name, bias in trainer.biases().items():
        bias.copy_(tensors[name])
    trainer.steps = extra["steps"]
    extra["loader"] = {key: tuple(at) for key, at in extra["loader"].items()}
    out.mkdir(parents=True, exist_ok=True)
    if (folder / LOG_FILE).is_file():
        shutil.copyfile(folder / LOG_FILE, out / LOG_FILE)
    trainer.save(out / STATE_FILE, extra)
    return True


def _logged(path: Path) -> tuple[str, ...]:
    """Columns of a log."""
    with path.open(newline="") as file:
        return tuple(next(csv.reader(file), ()))


def _cut_log(path: Path, steps: int) -> None:
    """Drop what a run that was cut off logged after its last saved step; those steps are done again."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    rows = [row for row in rows if len(row) == len(rows[0])]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows[:1] + [row for row in rows[1:] if float(row[0]) <= steps])


def _extra(settings: Settings, clock: Clock, loader: RowLoader) -> dict[str, Any]:
    return {"settings": asdict(settings), "seconds": clock.seconds(), "loader": loader.at}


def profile(trainer: Learner, loader: RowLoader, steps: int = 5) -> str:
    """Wall time of a step in each phase, and where the device spends it: for a person. Disturbs the weights."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    text: list[str] = []
    activities, sort_by = [ProfilerActivity.CPU], "self_cpu_time_total"
    if trainer.device.type == "cuda":
        activities, sort_by = [ProfilerActivity.CPU, ProfilerActivity.CUDA], "self_device_time_total"
    for phase in phases_from(0.0, trainer.settings):
        trainer.enter(phase)
        batch = loader.sample(phase.form)
        trainer.step(batch, phase, 0.0)
        trainer.step(batch, phase, 0.0).tolist()
        begin = time.monotonic()
        values = [trainer.step(batch, phase, 0.0) for _ in range(steps)]
        launched = time.monotonic() - begin
        values[-1].tolist()  # waits
        wall = time.monotonic() - begin
        text.append(
            f"{phase}: {1e3 * wall / steps:.1f} ms a step, {batch.ids.numel() * steps / wall:.0f} tokens/s, "
            f"{1e3 * launched / steps:.1f} ms to launch it"
        )
        with trace(activities=activities) as traced:
            trainer.step(batch, phase, 0.0).tolist()
        text.append(traced.key_averages().table(sort_by=sort_by, row_limit=45, max_name_column_width=90))
    return "\n".join(text)


def plot(out: Path, settings: Settings) -> Path:
    """The loss curves of a log, part by part, as PNG; where a phase begins there is a line."""
    draw = plots.pyplot()
    with (out / LOG_FILE).open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    figure, axes = draw.subplots(2, 2, figsize=(13, 8))
    (prose, skills), (rest, speed) = axes
    tokens = [row["tokens"] / 1e6 for row in rows]
    each = max(len(rows) // 400, 1)  # steps to a point: a batch holds few answers of a skill

    def curve(axis: Any, name: str) -> None:
        points: list[tuple[float, float]] = []
        for first in range(0, len(rows), each):
            values = [v for row in rows[first : first + each] if (v := row[name]) == v]
            if values:
                points.append((tokens[min(first + each, len(rows)) - 1], sum(values) / len(values)))
        axis.plot(*zip(*points, strict=True) if points else ([], []), label=name, linewidth=0.9)

    first, *others = sorted(settings.names, key=lambda name: name != PROSE)
    curve(prose, first)
    for name in others:
        curve(skills, name)
    for name in ("index", "balance", "norm"):
        curve(rest, name)
    curve(speed, "tokens_per_second")
    prose.set_ylim(1, 4)
    skills.set_yscale("symlog", linthresh=1e-3)
    skills.set_ylim(0, 10)
    rest.set_ylim(0, 3)
    for axis, unit in ((prose, "nats"), (skills, "nats"), (rest, "nats; balance and norm have none"), (speed, "1/s")):
        for begin in ("images", "topk", "long", "quantised"):
            at = next((t for t, row in zip(tokens, rows, strict=True) if row[begin]), None)
            if at is not None:
                axis.axvline(at, color="grey", linewidth=0.5)
                axis.text(at, 0.99, begin, rotation=90, fontsize=7, va="top", transform=axis.get_xaxis_transform())
        axis.set_xlabel("tokens, millions")
        axis.set_ylabel(unit)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out / PLOT_FILE, dpi=110)
    draw.close(figure)
    return out / PLOT_FILE
