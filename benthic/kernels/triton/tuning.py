"""Which configuration a kernel runs with: a fixed function of op, shape and device.

The table of a device is `tuned/<its name>.json`, written by `benthic bench tune` and committed:

    {op: {key: [[max_rows, config], ...]}}        ascending in max_rows

`key` names what a configuration may depend on beside the rows, usually the shape of a matrix ("4608x5120"). Nothing is
timed here, so that two processes on one kind of device compute the same bits.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, wraps
from importlib.resources import files
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from benthic.kernels import backends

Config = dict[str, Any]
Table = dict[str, dict[str, list[tuple[int, Config]]]]
P = ParamSpec("P")
T = TypeVar("T")


def device_slug(name: str) -> str:
    """A device's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def device_name() -> str:
    """The GPU of this process; empty where there is none, as under Triton's interpreter."""
    return device_slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""


@cache
def table(device: str) -> Table:
    """The packaged table of a device; empty for one that nobody tuned."""
    path = files("benthic.kernels.triton") / "tuned" / f"{device}.json"
    return json.loads(path.read_text(encoding="utf-8")) if device and path.is_file() else {}


MOST_ROWS = 1 << 30  # the last bucket of a table


def config(op: str, key: str, rows: int, default: Mapping[str, Any], *, decides_bits: bool = False) -> Config:
    """The configuration for `rows` rows: `default` with what the table says laid over it.

    op, key  as in the table. Rows beyond its last bucket take that bucket.
    default  the kernel's own choice, for every other device and shape. It lists all knobs there are: an entry of the
             table with one that it lacks was made for an older kernel, and is not used.
    decides_bits  two of its configurations may give two results: inside `backends.invariant()` it has one, that of the
             last bucket, for all rows.
    returns  a new dict.
    Cost     a dictionary lookup or two; no device work, no timing.
    """
    if decides_bits and backends.is_invariant():
        rows = MOST_ROWS
    trial = _trial.get()
    if trial is not None:
        trial.asked[op, key] = Asked(rows, dict(default))
        if (op, key) in trial.answers:
            return dict(default) | trial.answers[op, key]
    return dict(default) | _entry(device_name(), op, key, rows, frozenset(default))


@lru_cache(maxsize=4096)
def _entry(device: str, op: str, key: str, rows: int, knobs: frozenset[str]) -> Config:
    buckets = table(device).get(op, {}).get(key, [])
    entry = next((entry for most, entry in buckets if rows <= most), buckets[-1][1] if buckets else {})
    return entry if knobs.issuperset(entry) else {}


def bucket(rows: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds so many rows, at least 1. Decisions are made for it
    and not for the rows themselves, so that steps of these sizes show all kernels that any step will need."""
    power = 1 << max(rows - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def buckets(most: int) -> tuple[int, ...]:
    """All of them up to the one that holds `most`."""
    found = [1]
    while found[-1] < most:
        found.append(bucket(found[-1] + 1))
    return tuple(found)


def remembered(decide: Callable[P, T]) -> Callable[P, T]:
    """A decision that rests on hashable arguments, the device, its table and `backends.invariant()` alone, made once
    for each: a step has hundreds of launches, and what the host spends on them the GPU waits for."""

    @lru_cache(maxsize=1 << 14)
    def kept(device: str, invariant: bool, *args: P.args, **kwargs: P.kwargs) -> T:
        del device, invariant
        return decide(*args, **kwargs)

    @wraps(decide)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        if _trial.get() is not None:
            return decide(*args, **kwargs)
        return kept(device_name(), backends.is_invariant(), *args, **kwargs)

    return ask


# ---- for whoever makes a table ---------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A question that a kernel's wrapper put."""

    rows: int
    default: Config


class Trial(NamedTuple):
    answers: dict[tuple[str, str], Config]  # (op, key) -> what it gets instead of the table's entry
    asked: dict[tuple[str, str], Asked]  # filled as questions come


_trial: ContextVar[Trial | None] = ContextVar("trial", default=None)


@contextmanager
def trying(answers: Mapping[tuple[str, str], Config] | None = None) -> Iterator[Trial]:
    """Inside this block questions are noted, and some get these answers."""
    trial = Trial(dict(answers or {}), {})
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        _trial.reset(token)
