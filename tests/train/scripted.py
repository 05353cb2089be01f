"""Runs on a clock that steps move, and nothing else."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benthic.models.deepseek_v41_config import ModelConfig
from benthic.train import data, loop
from benthic.train.loop import Trainer
from benthic.train.rows import RowBatch, RowLoader
from benthic.train.settings import Phase, Settings
from tests.train.small import IDS, SMALL, small_json

VISION = ModelConfig.from_json(small_json()).vision
Folder = tuple[Path, data.Manifest]


def loader_of(folder: Folder, settings: Settings = SMALL) -> RowLoader:
    return RowLoader(*folder, settings, IDS, torch.device("cpu"), VISION)


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

    def warm_up(self, phases: Any, sample: Any) -> None:
        self.warmed = list(phases)

    def enter(self, phase: Phase) -> None:
        self.entered.append(phase)

    def step(self, batch: RowBatch, phase: Phase, factor: float) -> Tensor:
        if self.steps == self.breaks_at:
            raise KeyboardInterrupt
        assert phase == self.entered[-1]
        self.log.append((batch.ids.flatten().tolist(), phase, factor))
        self.clock.now += 1.0
        self.steps += 1
        self.optimiser.groups[0].master += 1.0
        return torch.arange(float(len(loop.MEASURES) + len(self.settings.names))) + self.steps


Make = Callable[..., tuple[Scripted, RowLoader]]


def rows_of(out: Path) -> list[dict[str, float]]:
    with (out / loop.LOG_FILE).open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def quiet(row: dict[str, float]) -> None:
    pass
