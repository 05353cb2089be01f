"""The loop bench: engines side by side, every part of a step counted once, the table as the pages want it."""

import json
from pathlib import Path

import pytest

from benthic.bench import loop
from benthic.bench.loop import ARMS, Arm
from benthic.cli.main import main
from benthic.config import load
from benthic.engine import batch as batches
from benthic.engine.loop import StepTimes
from benthic.testing.checkpoints import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("loop") / "tiny", max_position_embeddings=128)


def test_command(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    build = batches.build
    words = ["bench", "step", "--profile", "--model", str(folder), "--device", "cpu", "--cpu.threads", "1"]
    words += ["--batches", "1,2", "--prompts", "9000", "--tokens", "4", "--repeats", "1", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (file,) = tmp_path.glob("*/loop-tiny-reference.json")
    assert json.loads(file.read_text()) == found
    parts = ("decode", "device idle", "planned and committed", "plan", "commit", "text", "batch built")
    units = dict.fromkeys(parts, "us") | {"decode": "tokens/s", "device idle": "%"}
    rows = [f"{part}, batch {size}, {units[part]}" for size in (1, 2) for part in parts]
    assert list(found["table"]) == [*rows, "prefill, 127 tokens, tokens/s"]  # the longest the model takes
    for row in found["table"].values():
        assert list(row) == ["one by one", "ahead", "one by one, deterministic", "ahead, deterministic"]
        assert all(value >= 0 for value in row.values())
    assert batches.build is build
    text = loop.text(found)
    assert all(row in text for row in rows)


def test_parts_of_a_step() -> None:
    times = [StepTimes(8, 8, 40e-6, 10e-6, 800e-6, 60e-6, 700e-6, 1000e-6)]
    made = loop._of_steps(Arm(True, False), 32, [1.0], times, [], cpu=False)
    values = {m["name"].split(",")[0]: m["value"] for m in made}
    assert values == pytest.approx(
        {"decode": 1.0, "device idle": 30.0, "planned and committed": 100.0, "plan": 40.0, "commit": 60.0, "text": 90.0}
    )
    assert not any("target" in m for m in made)
    for batch, cpu in ((32, True), (8, True)):
        made = loop._of_steps(ARMS[0], batch, [1.0], times, [], cpu)
        wanted = ["planned and committed, batch 32, one by one"] if batch == 32 else []
        assert [m["name"] for m in made if "target" in m] == wanted


def test_arms_differ_in_what_they_say(folder: Path) -> None:
    config = load(environ={}, overrides={"model": str(folder)})
    made = [loop._of(config, arm) for arm in ARMS]
    assert [(each.scheduler.ahead, each.deterministic) for each in made] == [
        ("off", False),
        ("on", False),
        ("off", True),
        ("on", True),
    ]
    assert not any(each.cache.prefix for each in made)
