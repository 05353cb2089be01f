"""Checkpoints and slow runs, made once a session: the slow model is causal, so one run serves every shorter length."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle import random_checkpoint
from tests.oracle.slow_v41 import Array, NearTie, SlowModel

SEED = 0
SMOOTH: dict[str, Any] = {  # every entry and every expert is taken, so no choice can turn
    "index_topk": 4096,
    "num_experts_per_tok": 16,
    "candidate_source_layer_id": -1,
}


def tokens(count: int, seed: int = 1) -> list[int]:
    """Seeded ids below the special ones, with repeats, so that n-grams recur."""
    random = np.random.default_rng(seed)
    ids = random.integers(3, 4000, count)
    for at in range(0, count - 24, 40):
        ids[at + 20 : at + 24] = ids[at : at + 4]
    return [int(i) for i in ids]


@dataclass
class SlowRun:
    model: SlowModel
    ids: list[int]
    logits: Array  # [T, V]

    def first_tie(self) -> NearTie | None:
        return min(self.model.near_ties, key=lambda tie: tie.position, default=None)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint("tiny")` or `checkpoint("tiny_512")` -> its folder."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = random_checkpoint.write(tmp_path_factory.mktemp(name), name, SEED)
        return made[name]

    return get


@pytest.fixture(scope="session")
def slow_run(checkpoint: Callable[[str], Path]) -> Callable[..., SlowRun]:
    """`slow_run("tiny", 130)`: float mode unless a profile is named; `smooth` removes every choice."""
    made: dict[tuple[str, int, str | None, bool], SlowRun] = {}

    def get(name: str, count: int, profile: str | None = None, *, smooth: bool = False) -> SlowRun:
        key = (name, count, profile, smooth)
        if key not in made:
            model = SlowModel(checkpoint(name), profile, SMOOTH if smooth else None)
            ids = tokens(count)
            made[key] = SlowRun(model, ids, model.run(ids))
        return made[key]

    return get
