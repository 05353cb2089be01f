"""The training run of the backbone: rows in, steps by the wall clock, a log, a saved state to resume from.

Three phases by share of the training time: dense visibility; top-k in force; top-k and quantisers in force. Time spent
on compiling is not training time. Source of the settings: the minnow specification, sections 5.3 and 5.5.
"""

import csv
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benthic.errors import MissingDependency, TrainingError
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
        prose = self.rows - self.needle_rows - self.copy_rows
        if prose < 1 or not 0 <= self.index_rows <= self.rows or self.length % 2:
            raise TrainingError(
                f"{self.rows} rows of {self.length} tokens with {self.needle_rows} needle, {self.copy_rows} copy and "
                f"{self.index_rows} index rows; want a row of prose, index rows within the batch, an even length"
            )


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
                self.ids[part] = data.read_part(folder, manifest, part)
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
        return torch.from_numpy(rows.astype(np.int16)).to(self.device)

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
        return torch.cat(parts).long()


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
        backbone.initialise(self.model, settings.seed)
        self.model.to(device)
        self.shapes = RowShapes(config, self.model.plan, settings.rows, settings.length, device, self.kernels)
        self.optimiser = Optimiser(backbone.leaves(self.model))
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
        """Move router biases towards equal loads. Returns the largest expert load over the mean, all layers."""
        loads = torch.stack(self.kernels.loads)  # [layers, E]
        mean = loads.mean(-1, keepdim=True)
        steps = self.settings.bias_step * max(factor, 0.1) * torch.sign(mean - loads)
        for layer, step in zip(self.model.layers, steps, strict=True):
            layer.ffn.bias.add_(step)  # type: ignore[operator]
        return (loads / mean).max()

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
    def load(self, path: Path) -> dict[str, Any]:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.optimiser.load_state(state["optimiser"])
        for name, bias in self.biases().items():
            bias.copy_(state["biases"][name])
        self.steps = state["steps"]
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
        state = trainer.load(state_file)
        if state["settings"] != asdict(settings):
            raise TrainingError(f"{state_file} belongs to a run with other settings; choose another --out or the same")
        spent = state["seconds"]
        loader.seek(state["loader"])
        log.info("resumed", extra={"step": trainer.steps, "seconds": spent})
    first = loader.next()
    phases = dict.fromkeys(phase_at(share, settings) for share in (spent / settings.seconds, settings.topk_from, 1.0))
    trainer.warm_up(first, iter(phases))
    phase = phase_at(spent / settings.seconds, settings)
    trainer.enter(phase)
    until = min(settings.seconds, spent + max(deadline - time.monotonic(), 1.0))
    total = settings.seconds if pause else until
    clock, saved = Clock(spent), time.monotonic()
    tokens_a_step = settings.rows * settings.length
    pending: deque[tuple[dict[str, float], Tensor]] = deque()
    last: dict[str, float] = {}
    new_file = not (out / LOG_FILE).is_file() or trainer.steps == 0
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
                writer.writerow({key: f"{value:.6g}" for key, value in row.items()})
                last = row
                report(row)

        while (seconds := clock.seconds()) < until:
            share = seconds / total
            wanted = phase_at(share, settings)
            if wanted != phase:
                phase = wanted
                trainer.enter(phase)
            factor = rate_factor(share, settings)
            values = trainer.step(loader.next(), phase, factor)
            done = trainer.steps - before
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
                trainer.save(state_file, _extra(settings, clock, loader))
                file.flush()
        flush(keep=0)
    trainer.save(state_file, _extra(settings, clock, loader))
    return last, clock.seconds() >= total


def _extra(settings: Settings, clock: Clock, loader: RowLoader) -> dict[str, Any]:
    return {"settings": asdict(settings), "seconds": clock.seconds(), "loader": dict(loader.at)}


def profile(trainer: Trainer, ids: Tensor, steps: int = 5) -> str:
    """Wall time of a step in each phase, and where the device spends it: for a person. Disturbs the weights."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    text: list[str] = []
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
        with trace(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
            trainer.step(ids, phase, 0.0).tolist()
        text.append(traced.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90))
    return "\n".join(text)


def plot(out: Path) -> Path:
    """The loss curve of a log, as PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("matplotlib", "train") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with (out / LOG_FILE).open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
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
    pyplot.close(figure)
    return out / PLOT_FILE
