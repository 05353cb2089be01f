"""The training run of the backbone: rows in, steps by the wall clock, a log, a saved state to resume from.

Three phases by share of the training time: dense visibility; top-k in force; top-k and quantisers in force. Time spent
on compiling is not training time. Source of the settings: the minnow specification, sections 5.3 and 5.5.
"""

import csv
import logging
import math
import pickle
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benthic.errors import BadSetting, BadTrainingData, BadTrainingState, MissingDependency
from benthic.models.base import Batch
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.text.tokenizer import Tokenizer
from benthic.train import backbone, data
from benthic.train.kernels import TrainingKernels
from benthic.train.loss import head_loss, history, response_weights, targets
from benthic.train.memory import Mode, RowMemory, RowShapes
from benthic.train.optim import Optimiser
from benthic.types import NUMERICS, Numerics

log = logging.getLogger(__name__)

MAX_LENGTH = (1 << 16) - 2  # of a row, tokens: entry numbers are 16 bits of a selection key
STATE_FILE, LOG_FILE, PLOT_FILE = "state.pt", "log.csv", "loss.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. Rows of the skills stand first in a batch, so that the index loss sees them."""

    rows: int = 64  # a batch
    length: int = 1024  # tokens a row
    needle_rows: int = 6
    copy_rows: int = 2
    index_rows: int = 16  # first rows on which the index loss is taken
    seconds: float = 420.0  # training time
    topk_from: float = 0.5  # share of the time from which top-k is in force
    quantise_from: float = 0.8  # and from which quantisers are
    warm_up: float = 0.04  # learning rate: linear up,
    flat_until: float = 0.4  # flat, then linear down
    floor: float = 0.03  # to this factor
    needle_weight: float = 4.0
    balance_weight: float = 1e-3
    index_weight: float = 1.0
    bias_step: float = 2e-3  # router bias, a batch
    seed: int = 0

    def check(self) -> None:
        """Raises BadSetting."""

        def need(ok: bool, key: str, want: str) -> None:
            if not ok:
                raise BadSetting(key, getattr(self, key), want, "the settings of the run")

        need(self.rows >= 1, "rows", "at least 1")
        need(2 <= self.length <= MAX_LENGTH and self.length % 2 == 0, "length", f"an even number in [2, {MAX_LENGTH}]")
        for key in ("needle_rows", "copy_rows"):
            need(getattr(self, key) >= 0, key, "at least 0")
        skills, rows = self.needle_rows + self.copy_rows, self.rows
        need(rows > skills, "rows", f"more than the {skills} needle and copy rows, so that there is a row of prose")
        need(0 <= self.index_rows <= rows, "index_rows", f"a number in [0, rows], rows is {rows}")
        need(0 < self.seconds < math.inf, "seconds", "a time above 0")
        for key in ("topk_from", "quantise_from", "floor"):
            need(0 <= getattr(self, key) <= 1, key, "a number in [0, 1]")
        need(0 <= self.flat_until < 1, "flat_until", "a number in [0, 1)")
        need(0 <= self.warm_up <= self.flat_until, "warm_up", f"a number in [0, flat_until], that is {self.flat_until}")
        for key in ("needle_weight", "balance_weight", "index_weight", "bias_step"):
            need(0 <= getattr(self, key) < math.inf, key, "a number of at least 0")
        need(0 <= self.seed < 2**63, "seed", "a number in [0, 2**63)")


class Phase(NamedTuple):
    topk: bool
    quantised: bool


def phase_at(share: float, settings: Settings) -> Phase:
    """share: training time spent, of all."""
    return Phase(share >= settings.topk_from, share >= settings.quantise_from)


def rate_factor(share: float, settings: Settings) -> float:
    """Learning rate factor after `share` of the training time."""
    if share < settings.warm_up:
        return max(share / settings.warm_up, 0.01)
    if share < settings.flat_until:
        return 1.0
    down = (min(share, 1.0) - settings.flat_until) / (1.0 - settings.flat_until)
    return 1.0 + (settings.floor - 1.0) * down


class RowLoader:
    """Batches [B, L] of row ids on the device: needle, copy and prose rows. An epoch of each part is packed ahead."""

    PARTS = ("needle", "copy", "prose")

    def __init__(self, folder: Path, manifest: data.Manifest, settings: Settings, tokens: "Ids", device: torch.device):
        self.settings, self.device, self.tokens = settings, device, tokens
        prose = settings.rows - settings.needle_rows - settings.copy_rows
        self.counts = {"needle": settings.needle_rows, "copy": settings.copy_rows, "prose": prose}
        self.ids: dict[str, data.Ids] = {}
        self.at: dict[str, tuple[int, int]] = {}  # part -> (epoch, next row)
        self.rows: dict[str, Tensor] = {}
        self._ahead: dict[str, Future[Tensor]] = {}
        self._pool = ThreadPoolExecutor(1)
        for part in self.PARTS:
            if self.counts[part]:
                ids = self.ids[part] = data.read_part(folder, manifest, part)
                if not len(ids) or ids[0] != tokens.bos:
                    raise BadTrainingData(folder, f"part {part} does not begin with a document of one token or more")
        self.seek(dict.fromkeys(self.ids, (0, 0)))

    def seek(self, at: dict[str, tuple[int, int]]) -> None:
        for part, (epoch, row) in at.items():
            self.at[part] = epoch, row
            self.rows[part] = self._pack(part, epoch)
            self._ahead[part] = self._pool.submit(self._pack, part, epoch + 1)

    def _pack(self, part: str, epoch: int) -> Tensor:
        ids, tokens = self.ids[part], self.tokens
        rng = np.random.default_rng([self.settings.seed, epoch, self.PARTS.index(part)])
        rows = data.pack_rows(ids, data.document_starts(ids, tokens.bos), self.settings.length, tokens.pad, rng)
        return torch.from_numpy(rows.ids.view(np.int16)).to(self.device)  # two bytes an id, whatever their sign

    def next(self) -> Tensor:
        """[B, L] int64."""
        parts: list[Tensor] = []
        for part in self.ids:
            need = self.counts[part]
            while need:
                epoch, row = self.at[part]
                taken = self.rows[part][row : row + need]
                parts.append(taken)
                need -= len(taken)
                self.at[part] = epoch, row + len(taken)
                if need:
                    self.rows[part] = self._ahead[part].result()
                    self.at[part] = epoch + 1, 0
                    self._ahead[part] = self._pool.submit(self._pack, part, epoch + 2)
        return torch.cat(parts).long() & 0xFFFF


class Ids(NamedTuple):
    """The special ids that training needs."""

    bos: int
    eos: int
    pad: int
    think_close: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Ids":
        ids = tokenizer.special_ids
        return cls(ids["bos"], ids["eos"], ids["pad"], ids["think_close"])


@dataclass(frozen=True, slots=True)
class Losses:
    total: Tensor  # what is minimised
    text: Tensor  # weighted nats a response token
    needle: Tensor  # nats a response token of the needle rows
    index: Tensor  # KL, nats a token, summed over layers
    balance: Tensor  # mean over layers, 1 when balanced


class Trainer:
    """Model, kernels, masters and what one step does with a batch."""

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
        self.shapes = RowShapes(config, self.model.plan, settings.rows, settings.length, device, self.kernels)
        self.optimiser = Optimiser(leaves)
        self.steps = 0
        count = settings.rows * settings.length
        self._geometry: dict[str, Any] = dict(
            images=None,
            embeds=None,
            starts=tuple(range(0, count + 1, settings.length)),
            firsts=(0,) * settings.rows,
            slots=(),
            tables=(),
            logit_rows=torch.empty(0, dtype=torch.int64, device=device),
        )
        weights = torch.ones(settings.rows, 1, device=device)
        weights[: settings.needle_rows] = settings.needle_weight
        self._row_weights = weights

    def hidden(self, ids: Tensor, mode: Mode) -> tuple[Tensor, RowMemory]:
        """ids [B, L] -> [B L, D] after the last norm, and what the memory collected. Kernels must be installed."""
        self.kernels.clear()
        memory = RowMemory(self.shapes, self.model.numerics, mode)
        past = history(ids, max(self.config.text.engram_max_ngram_size - 1, 0))
        batch = Batch(ids=ids.flatten(), positions=self.shapes.positions, history=past, **self._geometry)
        output = self.model(batch, memory)
        return self.model.norm(output.hidden), memory

    def losses(self, ids: Tensor, topk: bool) -> Losses:
        settings = self.settings
        hidden, memory = self.hidden(ids, Mode(topk, settings.index_rows))
        plain = response_weights(ids, self.ids.think_close, self.ids.eos)
        weights = (plain * self._row_weights).flatten()
        total, nats = self.kernels.piece(head_loss)(hidden, self.model.head.weight, targets(ids), weights)
        text = total / weights.sum()
        needle = plain[: settings.needle_rows].flatten()
        needle_nats = (nats[: needle.numel()] * needle).sum() / needle.sum().clamp(min=1)
        balance = torch.stack(self.kernels.balance).sum()
        index = torch.zeros((), device=self.device)
        for part in memory.index_loss().values():
            index = index + part
        loss = text + settings.balance_weight * balance + settings.index_weight * index
        return Losses(loss, text.detach(), needle_nats, index.detach(), balance.detach() / len(self.kernels.balance))

    def step(self, ids: Tensor, phase: Phase, factor: float) -> Tensor:
        """One update. Returns f32 [6] on the device: text, needle, index, balance, gradient norm, largest load."""
        losses = self.losses(ids, phase.topk)
        losses.total.backward()
        rate = torch.full((), factor, device=self.device)
        norm = self.optimiser.step(rate)
        largest = self.balance_router(factor)
        self.optimiser.publish(phase.quantised)
        self.steps += 1
        return torch.stack([losses.text, losses.needle, losses.index, losses.balance, norm, largest]).float()

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

    def warm_up(self, ids: Tensor, phases: Iterator[Phase]) -> None:
        """Run each phase once without an update, so that everything is compiled before the clock starts."""
        for phase in phases:
            begin = time.monotonic()
            self.enter(phase)
            self.losses(ids, phase.topk).total.backward()
            for leaf in self.optimiser.leaves:
                leaf.value.grad = None
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            log.info("phase compiled", extra={**phase._asdict(), "seconds": time.monotonic() - begin})

    def biases(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if not p.requires_grad}

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        state = {"optimiser": self.optimiser.state(), "biases": self.biases(), "steps": self.steps, **extra}
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


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """What `Trainer.save` wrote. Raises BadTrainingState."""
    if not path.is_file():
        raise BadTrainingState(path, "no such file; `benthic train backbone` makes it")
    if not zipfile.is_zipfile(path):  # cut short, or anything else: torch would take it for a pickle
        raise BadTrainingState(path, "it is no saved state, or a damaged one")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise BadTrainingState(path, f"it is no saved state, or a damaged one: {reason}") from error
    keys = {"optimiser", "biases", "steps", "settings", "seconds", "loader"}
    if not isinstance(state, dict) or state.keys() != keys:
        raise BadTrainingState(path, "it is no saved state of a backbone run")
    return state


# ---- the run ---------------------------------------------------------------------------------------------------------


COLUMNS: tuple[str, ...] = (
    "step", "seconds", "tokens", "tokens_per_second", "factor", "topk", "quantised", "text", "needle", "index",
    "balance", "norm", "largest_load",
)  # fmt: skip

Report = Callable[[dict[str, float]], None]


class Clock:
    """Training seconds: wall time since `start`, plus what earlier runs spent."""

    def __init__(self, spent: float):
        self._spent, self._begin = spent, time.monotonic()

    def seconds(self) -> float:
        return self._spent + time.monotonic() - self._begin


def run(
    trainer: Trainer,
    loader: RowLoader,
    out: Path,
    deadline: float,
    report: Report,
    *,
    pause: bool = False,
    save_seconds: float = 120.0,
) -> tuple[dict[str, float], bool]:
    """Train until the settings' time is spent or `deadline` (monotonic seconds) comes; resume from a state in `out`.

    pause   False: a deadline that cuts the time short cuts the schedule too, its shares are of the time there is.
            True: the schedule stands, and what the deadline leaves undone is for a later call with the same settings.
    report  called with each logged row.
    Returns the last row, empty when there was nothing left to train, and whether the schedule is done.
    """
    settings = trainer.settings
    out.mkdir(parents=True, exist_ok=True)
    state_file = out / STATE_FILE
    spent = 0.0
    if state_file.is_file():
        state = read_state(state_file, trainer.device)
        if state["settings"] != asdict(settings):
            changed = [key for key, value in asdict(settings).items() if state["settings"].get(key) != value]
            detail = f"it belongs to a run with other settings ({', '.join(changed)}); give the same, or another --out"
            raise BadTrainingState(state_file, detail)
        trainer.restore(state, state_file)
        spent = state["seconds"]
        loader.seek(state["loader"])
        log.info("resumed", extra={"step": trainer.steps, "seconds": spent})
    first = loader.next()
    shares = (spent / settings.seconds, settings.topk_from, settings.quantise_from, 1.0)
    phases = dict.fromkeys(phase_at(share, settings) for share in shares)
    trainer.warm_up(first, iter(phases))
    batches = chain([first], (loader.next() for _ in repeat(None)))
    phase = phase_at(spent / settings.seconds, settings)
    trainer.enter(phase)
    until = min(settings.seconds, spent + max(deadline - time.monotonic(), 1.0))
    total = settings.seconds if pause else until
    clock, saved = Clock(spent), time.monotonic()
    tokens_a_step = settings.rows * settings.length
    pending: deque[tuple[dict[str, float], Tensor]] = deque()
    last: dict[str, float] = {}
    new_file = not (out / LOG_FILE).is_file() or trainer.steps == 0
    if not new_file:
        _cut_log(out / LOG_FILE, trainer.steps)
    with (out / LOG_FILE).open("w" if new_file else "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new_file:
            writer.writeheader()
        started, before = clock.seconds(), trainer.steps

        def flush(keep: int) -> None:
            nonlocal last
            while len(pending) > keep:
                row, values = pending.popleft()
                names = ("text", "needle", "index", "balance", "norm", "largest_load")
                row |= dict(zip(names, values.tolist(), strict=True))  # waits for that step only
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
            values = trainer.step(next(batches), phase, factor)
            done = trainer.steps - 1 - before  # when this step began
            row: dict[str, float] = dict(
                step=trainer.steps,
                seconds=seconds,
                tokens=trainer.steps * tokens_a_step,
                tokens_per_second=done * tokens_a_step / max(seconds - started, 1e-9),
                factor=factor,
                topk=float(phase.topk),
                quantised=float(phase.quantised),
            )
            pending.append((row, values))
            flush(keep=2)
            if time.monotonic() - saved > save_seconds:
                saved = time.monotonic()
                flush(keep=0)  # the log first: it may hold more than the state, never less
                file.flush()
                trainer.save(state_file, _extra(settings, clock, loader))
        flush(keep=0)
    trainer.save(state_file, _extra(settings, clock, loader))
    return last, clock.seconds() >= total


def _cut_log(path: Path, steps: int) -> None:
    """Drop what a run that was cut off logged after its last saved step; those steps are done again."""
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == len(COLUMNS)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows[:1] + [row for row in rows[1:] if float(row[0]) <= steps])


def _extra(settings: Settings, clock: Clock, loader: RowLoader) -> dict[str, Any]:
    return {"settings": asdict(settings), "seconds": clock.seconds(), "loader": dict(loader.at)}


def profile(trainer: Trainer, ids: Tensor, steps: int = 5) -> str:
    """Wall time of a step in each phase, and where the device spends it: for a person. Disturbs the weights."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    text: list[str] = []
    activities, sort_by = [ProfilerActivity.CPU], "self_cpu_time_total"
    if trainer.device.type == "cuda":
        activities, sort_by = [ProfilerActivity.CPU, ProfilerActivity.CUDA], "self_device_time_total"
    for phase in (Phase(False, False), Phase(True, False), Phase(True, True)):
        trainer.enter(phase)
        trainer.step(ids, phase, 0.0)
        trainer.step(ids, phase, 0.0).tolist()
        begin = time.monotonic()
        values = [trainer.step(ids, phase, 0.0) for _ in range(steps)]
        launched = time.monotonic() - begin
        values[-1].tolist()  # waits
        wall = time.monotonic() - begin
        text.append(
            f"{phase}: {1e3 * wall / steps:.1f} ms a step, {ids.numel() * steps / wall:.0f} tokens/s, "
            f"{1e3 * launched / steps:.1f} ms to launch it"
        )
        with trace(activities=activities) as traced:
            trainer.step(ids, phase, 0.0).tolist()
        text.append(traced.key_averages().table(sort_by=sort_by, row_limit=45, max_name_column_width=90))
    return "\n".join(text)


def pyplot() -> Any:
    """matplotlib's, drawing into files. Raises MissingDependency."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("matplotlib", "train") from error
    matplotlib.use("Agg")
    return import_module("matplotlib.pyplot")


def plot(out: Path) -> Path:
    """The loss curve of a log, as PNG."""
    draw = pyplot()
    with (out / LOG_FILE).open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    figure, (left, right) = draw.subplots(1, 2, figsize=(11, 4))
    tokens = [row["tokens"] / 1e6 for row in rows]
    for axis, names in ((left, ("text", "needle")), (right, ("index", "balance"))):
        for name in names:
            axis.plot(tokens, [row[name] for row in rows], label=name, linewidth=0.8)
        axis.set_xlabel("tokens, millions")
        axis.set_ylabel("nats")
        axis.legend()
    left.set_ylim(0, 4)
    right.set_ylim(0, 3)
    for begin in ("topk", "quantised"):
        at = next((t for t, row in zip(tokens, rows, strict=True) if row[begin]), None)
        if at is not None:
            left.axvline(at, color="grey", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(out / PLOT_FILE, dpi=120)
    draw.close(figure)
    return out / PLOT_FILE
