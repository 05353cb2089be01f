"""Checkpoints and slow runs, made once a session: the slow model is causal, so one run serves every shorter length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle import random_checkpoint
from tests.oracle.slow_v41 import Array, SlowModel

SEED = 0
LONG = {"tiny": (300, 4), "tiny_512": (130, 4)}  # tokens, and a seed of ids under which no choice is near a tie
LONGEST = {"tiny": (700, 2), "tiny_512": (700, 1)}
DRAFTED = (1, 2, 63, 64, 65, 129)  # lengths after which a slow run also drafts
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
    drafts: dict[int, tuple[list[int], Array, Array]]  # by tokens before the anchor: ids, logits, confidences


def run_slow(model: SlowModel, ids: list[int], drafted: Sequence[int] = ()) -> SlowRun:
    rows, drafts = [], {}
    for at, token in enumerate(ids):
        rows.append(model.step(token)[0])
        if at + 1 in drafted and at + 1 < len(ids):
            drafts[at + 1] = model.draft(ids[at + 1])
    return SlowRun(model, ids, np.stack(rows), drafts)


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
def slow_run(checkpoint: Callable[[str], Path]) -> Callable[[str], SlowRun]:
    """`slow_run("tiny")`: float mode, `LONG` tokens; causal, so it serves every shorter length."""
    made: dict[str, SlowRun] = {}

    def get(name: str) -> SlowRun:
        if name not in made:
            made[name] = run_slow(SlowModel(checkpoint(name)), tokens(*LONG[name]), DRAFTED)
        return made[name]

    return get
