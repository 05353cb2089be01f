"""Estimates against simulation and textbook cases; bars and verdicts; what of a command line is kept."""

import random
import statistics

import pytest

from benthic.bench import report
from benthic.bench.eval.measures import Estimate, exp, judged, measure, ratio, share


def test_a_ratio_of_equal_sizes_is_the_mean_with_its_error() -> None:
    values = [0.2, 0.5, 0.9, 0.4]
    found = ratio(values, [1.0] * 4)
    assert found.value == pytest.approx(statistics.mean(values))
    assert found.error == pytest.approx(statistics.stdev(values) / 2)
    assert found.n == 4


def test_the_error_of_a_ratio_is_the_spread_of_many_runs() -> None:
    rng = random.Random(3)

    def run() -> Estimate:
        sizes = [rng.randint(1, 9) for _ in range(40)]
        return ratio([sum(rng.random() < 0.3 for _ in range(size)) for size in sizes], sizes)

    runs = [run() for _ in range(600)]
    spread = statistics.stdev(one.value for one in runs)
    assert statistics.mean(one.error or 0 for one in runs) == pytest.approx(spread, rel=0.1)


def test_one_sample_has_no_error() -> None:
    assert ratio([3.0], [4.0]) == (0.75, None, 1)


@pytest.mark.parametrize(("rights", "value"), [([2.0, 1.0, 3.0], 1.0), ([0.0, 0.0, 0.0], 0.0)])
def test_a_share_at_the_edge_still_has_an_error(rights: list[float], value: float) -> None:
    found = share(rights, [2.0, 1.0, 3.0])
    assert found.value == value
    assert found.error == pytest.approx((0.8 * 0.2 / 3) ** 0.5)
    assert share([1.0, 1.0], [2.0, 1.0]) == ratio([1.0, 1.0], [2.0, 1.0])


def test_exp_carries_the_error() -> None:
    found = exp(Estimate(1.0, 0.01, 7))
    assert found == (pytest.approx(2.71828, rel=1e-5), pytest.approx(0.0271828, rel=1e-5), 7)
    assert exp(Estimate(0.0, None, 1), less_one=True) == (0.0, None, 1)


@pytest.mark.parametrize(
    ("value", "bars", "verdict"),
    [
        (0.95, {"least": 0.95}, "met"),
        (0.949, {"least": 0.95}, "missed"),
        (0.62, {"most": 0.62}, "met"),
        (0.621, {"most": 0.62}, "missed"),
        (0.5, {}, None),
        (0.0, {"least": 0.0}, "met"),
    ],
)
def test_verdicts(value: float, bars: dict[str, float], verdict: str | None) -> None:
    row = measure("x", Estimate(value, 0.1, 3), "share", note="so", **bars)
    assert row.get("verdict") == verdict
    assert row.get("target") == next(iter(bars.values()), None)
    assert (row.get("standard_error"), row.get("n"), row.get("note")) == (0.1, 3, "so")
    if "most" in bars:
        assert row.get("better") == "less"


def test_rows_of_others_are_judged_too() -> None:
    assert judged({"name": "x", "value": 2.9, "unit": "tokens", "target": 3.0, "better": "more"})["verdict"] == "missed"
    assert "verdict" not in judged({"name": "x", "value": 2.9, "unit": "tokens"})


def test_a_kept_command_line_holds_no_key_and_no_private_folder() -> None:
    words = [
        "bench",
        "--api-key",
        "s3cret",
        "--api-key=s3cret",
        "--base-url",
        "https://me:s3cret@host/v1",
        "/home/me/x",
    ]
    assert report.command(words) == ("benthic bench --api-key *** --api-key=*** --base-url https://***@host/v1 x")
