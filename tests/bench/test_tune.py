"""Configuration tables: how a kernel looks its entry up, and how a table is made from candidates."""

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from benthic.bench import tune
from benthic.bench.cases import Case
from benthic.bench.timing import Run, Timer
from benthic.bench.tune import Choice, choices, fitting, merged, mismatch
from benthic.cli.main import main
from benthic.errors import BenchError
from benthic.kernels.triton import tuning
from benthic.kernels.triton.tuning import Asked

CPU = torch.device("cpu")
TABLE = {"product": {"64x32": [[16, {"BLOCK": 16}], [64, {"BLOCK": 64, "warps": 8}]], "old": [[1, {"GONE": 1}]]}}
DEFAULT = {"BLOCK": 32, "warps": 4}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tuning._entry.cache_clear()
    monkeypatch.setattr(tuning, "device_name", lambda: "some-device")
    monkeypatch.setattr(tuning, "table", lambda device: TABLE if device == "some-device" else {})
    yield
    tuning._entry.cache_clear()


# ---- looking up ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("rows", "want"),
    [
        (0, {"BLOCK": 16, "warps": 4}),
        (16, {"BLOCK": 16, "warps": 4}),
        (17, {"BLOCK": 64, "warps": 8}),
        (64, {"BLOCK": 64, "warps": 8}),
        (100000, {"BLOCK": 64, "warps": 8}),
    ],
)
def test_bucket_of_rows(rows: int, want: dict[str, int]) -> None:
    assert tuning.config("product", "64x32", rows, DEFAULT) == want


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(("op", "key"), [("product", "other"), ("other", "64x32"), ("product", "old")])
def test_default_where_the_table_has_nothing_to_say(op: str, key: str) -> None:
    """An entry with a knob that the kernel does not have is as good as none."""
    found = tuning.config(op, key, 1, DEFAULT)
    assert found == DEFAULT
    found["BLOCK"] = 0  # the caller's own
    assert tuning.config(op, key, 1, DEFAULT) == DEFAULT


def test_unknown_device() -> None:
    assert tuning.table("nobody-has-this") == {}
    assert tuning.table("") == {}
    assert tuning.device_slug("NVIDIA H200") == "nvidia-h200"


def test_packaged_tables_are_sorted() -> None:
    for path in Path(tuning.__file__).parent.glob("tuned/*.json"):
        for keys in json.loads(path.read_text()).values():
            for buckets in keys.values():
                assert [most for most, _ in buckets] == sorted({most for most, _ in buckets})


@pytest.mark.usefixtures("written")
def test_trial() -> None:
    with tuning.trying({("product", "64x32"): {"BLOCK": 128}}) as trial:
        assert tuning.config("product", "64x32", 5, DEFAULT) == {"BLOCK": 128, "warps": 4}
        assert tuning.config("product", "else", 6, DEFAULT) == DEFAULT
    assert trial.asked == {("product", "64x32"): Asked(5, DEFAULT), ("product", "else"): Asked(6, DEFAULT)}
    assert tuning.config("product", "64x32", 5, DEFAULT) == {"BLOCK": 16, "warps": 4}


# ---- making a table --------------------------------------------------------------------------------------------------


class Fake(Timer):
    """An op whose time and result depend on the configuration it is given."""

    def __init__(self, seconds: dict[int, float]):
        super().__init__(CPU)
        self.seconds = seconds
        self.last: dict[str, Any] = {}

    def build(self) -> Run:
        def run() -> torch.Tensor:
            self.last = tuning.config("fake_product", "8x8", 7, DEFAULT)
            if self.last["BLOCK"] == 256:
                raise RuntimeError("out of resources")
            wrong = 1.5 if self.last["BLOCK"] == 128 else 1.0
            return torch.full((4,), wrong)

        return run

    def cold(self, run: Run) -> float:
        run()
        return self.seconds[self.last["BLOCK"]]


LISTED = [
    Choice("product", "same", DEFAULT),
    Choice("product", "small", {"BLOCK": 16}),
    Choice("product", "large", {"BLOCK": 64}),
    Choice("product", "wrong", {"BLOCK": 128}),
    Choice("product", "broken", {"BLOCK": 256}),
    Choice("product", "foreign", {"BLOCK": 1, "STAGES": 3}),
    Choice("duct", "no part of the name", {"BLOCK": 2}),
    Choice("False", "by its knobs", {"BLOCK": 4, "warps": 1}),
]


def decisions(seconds: dict[int, float], deadline: float = 10.0) -> list[dict[str, Any]]:
    timer = Fake(seconds)
    case = Case("a row", "fake", "8x8", "decode", 1.0, 1.0, timer.build)
    return list(tune.tune([case, case], timer, LISTED, perf_counter() + deadline, lambda _: None))


def test_the_fastest_right_one_is_kept() -> None:
    (found,) = decisions({32: 10e-6, 16: 9e-6, 64: 6e-6, 128: 1e-6})
    assert found["config"] == {"BLOCK": 64, "warps": 4}
    assert found["times_us"]["default"] == pytest.approx(10)
    assert found["times_us"]["product.large"] == pytest.approx(6)
    assert found["times_us"]["product.wrong"] == "relative error 0.5"
    assert found["times_us"]["product.broken"] == "RuntimeError: out of resources"
    assert len(found["times_us"]) == 5
    assert (found["op"], found["key"], found["rows"]) == ("fake_product", "8x8", 7)


def test_a_gain_within_the_noise_changes_nothing() -> None:
    (found,) = decisions({32: 10e-6, 16: 9.9e-6, 64: 12e-6})
    assert found["config"] == DEFAULT


def test_time_is_up() -> None:
    assert decisions({32: 1e-6}, deadline=-1.0) == []


def test_candidates_of_a_question() -> None:
    names = ["same", "small", "large", "wrong", "broken"]
    assert [choice.name for choice in fitting(LISTED, "fake_product", DEFAULT)] == names
    assert [choice.name for choice in fitting(LISTED, "product", DEFAULT)] == names
    assert [choice.name for choice in fitting(LISTED, "products", DEFAULT)] == ["same", "by its knobs"]
    assert fitting(LISTED, "products", {"other": 1}) == []


class Pair(Timer):
    """Two kernels that must agree on BLOCK, and may differ in warps."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.last: list[dict[str, Any]] = []

    def build(self) -> Run:
        def run() -> torch.Tensor:
            self.last = [tuning.config("pair", key, 3, DEFAULT) for key in ("first", "second")]
            assert self.last[0]["BLOCK"] == self.last[1]["BLOCK"], "they share a layout"
            return torch.ones(1)

        return run

    def cold(self, run: Run) -> float:
        run()
        return sum(100 / one["BLOCK"] + abs(one["warps"] - warps) for one, warps in zip(self.last, (1, 8), strict=True))


def test_kernels_that_must_agree_are_tuned_together() -> None:
    listed = [Choice("pair", f"{b} {w}", {"BLOCK": b, "warps": w}) for b in (16, 64) for w in (1, 4, 8)]
    timer = Pair()
    case = Case("a row", "pair", "", "decode", 1.0, 1.0, timer.build)
    first, second = tune.tune([case], timer, listed, perf_counter() + 10, lambda _: None)
    assert (first["key"], first["config"]) == ("first", {"BLOCK": 64, "warps": 1})
    assert (second["key"], second["config"]) == ("second", {"BLOCK": 64, "warps": 8})


@pytest.mark.parametrize(
    ("found", "expected", "wrong"),
    [
        ([torch.ones(3)], [torch.ones(3) * 1.001], False),
        ([torch.ones(3)], [torch.ones(3) * 1.1], True),
        ([torch.ones(3)], [torch.ones(4)], True),
        ([torch.tensor([1.0, float("nan")])], [torch.ones(2)], True),
        ([torch.arange(100)], [torch.arange(100)], False),
        ([torch.arange(100)], [torch.arange(100) + 1], True),
        ([torch.empty(0)], [torch.empty(0)], False),
        ([], [], False),
    ],
)
def test_mismatch(found: list[torch.Tensor], expected: list[torch.Tensor], wrong: bool) -> None:
    assert (mismatch(found, expected) is not None) is wrong


def test_merging_keeps_what_was_not_asked() -> None:
    before: tuning.Table = {"a": {"1x1": [(4, {"B": 1}), (16, {"B": 2})]}, "b": {"2x2": [(1, {"C": 1})]}}
    made = [
        {"op": "a", "key": "1x1", "rows": 8, "config": {"B": 9}},
        {"op": "a", "key": "1x1", "rows": 4, "config": {"B": 8}},
        {"op": "c", "key": "3x3", "rows": 1, "config": {"D": 1}},
    ]
    after = merged(before, made)
    assert after["a"]["1x1"] == [(4, {"B": 8}), (8, {"B": 9}), (16, {"B": 2})]
    assert after["b"] == before["b"]
    assert after["c"]["3x3"] == [(1, {"D": 1})]
    assert before["a"]["1x1"] == [(4, {"B": 1}), (16, {"B": 2})]


def test_a_table_on_disk(tmp_path: Path) -> None:
    table = merged({}, [{"op": "a", "key": f"{n}x1", "rows": n, "config": {"B": n}} for n in (1, 2)])
    path = tune.save(table, tmp_path / "tuned" / "x.json")
    assert json.loads(path.read_text()) == {"a": {"1x1": [[1, {"B": 1}]], "2x1": [[2, {"B": 2}]]}}
    assert tune.packaged_path().parent == Path(tuning.__file__).parent / "tuned"


def test_choices_are_configurations() -> None:
    for choice in choices():
        assert all(isinstance(part, str) for part in (choice.group, choice.name, *choice.config))
        assert json.loads(json.dumps(choice.config)) == choice.config


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = decisions({32: 10e-6, 16: 9e-6, 64: 6e-6})
    found = {"bench": "tune", "decisions": made, "table": merged({}, made)}
    monkeypatch.setattr(tune, "run", lambda options, say: found)
    assert main(["bench", "tune", "--no-save", "--table", str(tmp_path / "t.json")]) == 0
    assert "1 questions, 1 not the default, 40 % faster" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["fake_product"]["8x8"] == [[7, {"BLOCK": 64, "warps": 4}]]


def test_nothing_asks_on_a_cpu() -> None:
    found = tune.run(tune.Options(device="cpu", op="rms_norm"))
    assert found["decisions"] == []
    assert tune.text(found) == "nothing asked for a configuration that has candidates"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(BenchError, match="torch sees none"):
        tune.run(tune.Options())
