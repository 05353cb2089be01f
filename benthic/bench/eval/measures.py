"""Numbers from answers: a ratio with its standard error, and the row of a table with bar and verdict."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from benthic.bench.report import Measure


class Estimate(NamedTuple):
    value: float
    error: float | None  # standard error; None: a single sample has none
    n: int  # samples


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> Estimate:
    """sum(tops) / sum(bottoms); the error is that of a ratio over samples drawn whole.

    A sample is a document or a task: what it holds (tokens, turns) is not independent, so it counts as one. The bottoms
    must not sum to 0.
    """
    n, total = len(tops), math.fsum(bottoms)
    value = math.fsum(tops) / total
    if n < 2:
        return Estimate(value, None, n)
    off = math.fsum((a - value * b) ** 2 for a, b in zip(tops, bottoms, strict=True))
    return Estimate(value, math.sqrt(off * n / (n - 1)) / abs(total), n)


def share(rights: Sequence[float], asked: Sequence[float]) -> Estimate:
    """`ratio` of what was right to what was asked. Where all or none was right, samples tell nothing of the spread: the
    error is then that of a share with one right and one wrong answer more."""
    found = ratio(rights, asked)
    if found.value not in (0.0, 1.0):
        return found
    p = (found.n * found.value + 1) / (found.n + 2)
    return found._replace(error=math.sqrt(p * (1 - p) / found.n))


def exp(found: Estimate, *, less_one: bool = False) -> Estimate:
    """exp of it, or exp - 1; the error by the derivative."""
    value = math.exp(found.value)
    return Estimate(value - less_one, None if found.error is None else value * found.error, found.n)


def measure(
    name: str,
    found: Estimate,
    unit: str,
    *,
    least: float | None = None,
    most: float | None = None,
    note: str = "",
) -> Measure:
    """A row. least or most: the bar, what the value has to reach or not to pass."""
    row: Measure = {"name": name, "value": found.value, "unit": unit, "n": found.n}
    if found.error is not None:
        row["standard_error"] = found.error
    bar = most if least is None else least
    if bar is not None:
        row["target"], row["better"] = bar, "more" if most is None else "less"
    if note:
        row["note"] = note
    return judged(row)


def judged(row: Measure) -> Measure:
    """With the verdict, where it has a bar."""
    bar = row.get("target")
    if bar is not None:
        met = row["value"] <= bar if row.get("better") == "less" else row["value"] >= bar
        row["verdict"] = "met" if met else "missed"
    return row
