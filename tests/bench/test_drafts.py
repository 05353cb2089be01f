"""The suite over a drafter: looping texts apart, every rate in its place, readable and as measures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benthic.bench import drafts as suite
from benthic.engine.llm import LLM
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.weights import write_checkpoint
from benthic.testing import acceptance
from benthic.testing.acceptance import Measured, Rounds, Text
from benthic.testing.checkpoints import random_tensors
from tests.train.small import small_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    temperatures = [1.0, 2.0, 1.0, 0.5, 1.0]
    made = small_json(engram_compressed_vocab_size=512, dspark_confidence_temperatures=temperatures)
    path = tmp_path_factory.mktemp("small") / "small"
    return write_checkpoint(path, made, random_tensors(ModelConfig.from_json(made)))


def test_the_suite_measures_the_checkpoints_own_drafter(folder: Path) -> None:
    prompts = [[0, i] for i in range(3, 9)]
    stages: list[tuple[str, int, int]] = []
    with LLM(folder, numerics="reference", cpu__threads=1) as llm:
        found = suite.drafts(
            llm, prompts, temperatures=(0.0, 0.7), max_tokens=20, seed=3, progress=lambda *news: stages.append(news)
        )
        again = suite.drafts(llm, prompts, temperatures=(0.7,), max_tokens=20, seed=3)
        drafter = acceptance.own_drafter(llm)
        texts, rounds = acceptance.measure(llm, prompts, 0.7, 20, 3, drafter=drafter)
    assert [part["temperature"] for part in found["temperatures"]] == [0.0, 0.7]
    assert found["texts"] == 6
    assert again["temperatures"][0] == found["temperatures"][1]  # repeatable
    part = found["temperatures"][1]
    assert part["all"] == acceptance.acceptance(rounds)
    assert part["all"]["tokens"] == sum(len(text.written) - 1 for text in texts)
    assert part["calibration"] == acceptance.calibration(rounds, drafter.config.dspark_confidence_temperatures)
    assert part["calibration"] != acceptance.calibration(rounds, [1.0] * 5)
    for stage in ("write at T = 0", "write at T = 0.7"):
        assert [news[1:] for news in stages if news[0] == stage] == [(i, 6) for i in range(1, 7)]
    for stage, part in zip(("replay at T = 0", "replay at T = 0.7"), found["temperatures"], strict=True):
        counts = [news[1:] for news in stages if news[0] == stage]
        assert counts == sorted(counts)
        assert counts[-1] == (part["all"]["tokens"],) * 2


LOOP = tuple(range(20, 28)) * 5
PLAIN = tuple(range(30, 60))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two texts, one of which loops and is drafted well."""
    texts = [Text((0, *LOOP), 1, False), Text((0, *PLAIN), 1, False)]
    rounds = Rounds(
        np.array([0, 0, 1, 1]),
        np.array([2, 2, 2, 2]),
        np.array([2, 2, 1, 0]),
        np.array([3, 3, 2, 1]),
        np.array([[9.0, 9.0], [9.0, 9.0], [0.0, -9.0], [0.0, -9.0]], dtype=np.float32),
        np.array([[1.0, 1.0], [1.0, 1.0], [0.5, 0.0], [0.5, np.nan]], dtype=np.float32),
    )

    class Drafter:
        class config:
            dspark_confidence_temperatures, dspark_block_size = (), 2

    monkeypatch.setattr(acceptance, "own_drafter", lambda llm: Drafter)
    monkeypatch.setattr(acceptance, "measure", lambda *a, **k: Measured(texts, rounds))
    return suite.drafts(None, [[0], [0]], temperatures=(1.0,))  # type: ignore[arg-type]


def test_texts_that_loop_are_counted_apart(told: dict[str, Any]) -> None:
    (part,) = told["temperatures"]
    assert part["looping"] == 1
    assert part["all"]["acceptance_length"] == 9 / 4
    assert part["looping_texts"]["acceptance_length"] == 3.0
    assert part["other_texts"]["acceptance_length"] == 1.5
    assert part["calibration"][0]["ece"] == pytest.approx(0.0, abs=1e-3)


def test_measures_leave_loops_out(told: dict[str, Any]) -> None:
    by_name = {m["name"]: m for m in suite.measures(told)}
    length = by_name["acceptance length, T = 1"]
    assert (length["value"], length["target"], length["better"]) == (1.5, 2.4, "more")
    assert by_name["texts that loop, T = 1"]["value"] == 0.5
    assert by_name["calibration error, T = 1"]["value"] == pytest.approx(0.0, abs=1e-3)


def test_the_table_has_a_line_for_each_slot(told: dict[str, Any]) -> None:
    title, _, first, second, *looping = suite.table(told).splitlines()
    assert title == "T = 1, 2 texts, 1 of them loop"
    assert first.split() == ["not", "looping", "1.50", "1", "0.500", "0.500", "0.500", "0.000"]
    assert second.split()[:3] == ["2", "0.000", "0.000"]
    assert looping[0].split() == ["looping", "3.00", "1", "1.000", "1.000", "1.000"]
    assert len(looping) == 2
