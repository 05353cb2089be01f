"""Makes the table of configurations of this device: runs each kernel case with every candidate and keeps the fastest.

A Triton module that has a choice lists it in `CANDIDATES`: group -> {name -> config}. A group serves the questions to
`tuning.config` whose op has its name, or ends in it ("blocks" serves "linear_blocks"); an op that none is named after
takes the groups that have the same knobs. A case is run once to hear what it asks; then the candidates of each op take
turns, first for all its keys alike, since kernels that work on one layout must agree, then key by key. One counts only
if it gives what the default gives, up to the order of sums, and replaces it only if it is faster beyond the noise.
One bucket of the table is one number of rows of the case list.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import benthic.kernels.triton
from benthic.bench import report
from benthic.bench.cases import RELEASE, SMALL, Case, Cases
from benthic.bench.timing import Run, Timer
from benthic.errors import BenchError
from benthic.kernels.triton import tuning
from benthic.kernels.triton.tuning import Asked, Config, Table

GAIN = 0.98  # of the default's time; less of a gain is taken for noise
ERROR = 0.02  # most relative difference (2-norm) of a floating-point result from the default's
FLIPPED = 0.03  # most share of integers that may differ: choices near a tie


@dataclass(frozen=True, slots=True)
class Options:
    op: str | None = None  # only cases, and only questions, whose op contains this
    budget_seconds: float = 420.0  # cases that would begin later keep what the table says
    device: str = "cuda"
    seed: int = 0


@torch.inference_mode()
def run(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; `say` hears each decision. Raises BenchError."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError("configurations on a GPU", "torch sees none")
    head = report.header("tune", options.seed, {"device": device.type, "op": options.op})
    sizes = RELEASE if device.type == "cuda" else SMALL
    started = perf_counter()
    timer = Timer(device, replays=5)
    cases = Cases(sizes, device, options.seed).all(experts_first=True)
    decisions = list(tune(_wanted(cases, options.op), timer, choices(), started + options.budget_seconds, say))
    return head | {
        "versions": report.versions(),
        "seconds": perf_counter() - started,
        "decisions": decisions,
        "table": merged(tuning.table(tuning.device_name()), decisions),
    }


def _wanted(cases: Iterable[Case], op: str | None) -> Iterator[Case]:
    return (
        case for case in cases if case.variant != "invariant" and not case.on_host and (op is None or op in case.op)
    )


class Choice(NamedTuple):
    group: str
    name: str
    config: Config


def choices() -> list[Choice]:
    """Every candidate of the modules of the Triton backend."""
    found: list[Choice] = []
    for module in iter_modules(benthic.kernels.triton.__path__):
        try:
            loaded = import_module(f"benthic.kernels.triton.{module.name}")
        except ImportError:  # no triton here
            continue
        for group, configs in getattr(loaded, "CANDIDATES", {}).items():
            found += [Choice(str(group), name, config) for name, config in configs.items()]
    return found


def fitting(listed: Sequence[Choice], op: str, default: Config) -> list[Choice]:
    """The candidates of a question; none has a knob which the wrapper does not know."""
    named = [choice for choice in listed if op == choice.group or op.endswith(f"_{choice.group}")]
    if named:
        return [choice for choice in named if set(choice.config) <= set(default)]
    return [choice for choice in listed if set(choice.config) == set(default)]


def tune(
    cases: Iterable[Case], timer: Timer, listed: Sequence[Choice], deadline: float, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """One decision a question that a case puts: op, key, rows, the times of all candidates in us, and the choice."""
    answered: set[tuple[str, str, int]] = set()
    for case in cases:
        if perf_counter() > deadline:
            return
        try:
            with tuning.trying() as trial:
                work = case.build()
                expected = _results(work)
        except Exception as error:
            say(f"{case.name}: {type(error).__name__}: {error}"[:200])
            continue
        open_questions: dict[str, dict[str, Asked]] = {}
        for (op, key), question in trial.asked.items():
            if (op, key, question.rows) not in answered and fitting(listed, op, question.default):
                answered.add((op, key, question.rows))
                open_questions.setdefault(op, {})[key] = question
        for op, questions in open_questions.items():
            for decision in Contest(op, questions, work, expected, timer, deadline).decide(listed):
                decision["case"] = case.name
                say(_line(decision))
                yield decision


@dataclass(slots=True)
class Contest:
    """The candidates of one op against each other, in one case."""

    op: str
    questions: dict[str, Asked]  # by key
    work: Run
    expected: list[Tensor]
    timer: Timer
    deadline: float

    def decide(self, listed: Sequence[Choice]) -> list[dict[str, Any]]:
        defaults = {key: question.default for key, question in self.questions.items()}
        default = self.time(defaults)
        if isinstance(default, str):
            return []
        best, best_time = dict(defaults), default
        times: dict[str, dict[str, float | str]] = {key: {"default": 1e6 * default} for key in defaults}
        rounds = [tuple(defaults)] + ([(key,) for key in defaults] if len(defaults) > 1 else [])
        for keys in rounds:  # all alike, then one by one beside the best of the others
            for choice in fitting(listed, self.op, defaults[keys[0]]):
                answers = best | {key: defaults[key] | choice.config for key in keys}
                if answers in (best, defaults) or perf_counter() > self.deadline:
                    continue
                took = self.time(answers)
                name = f"{choice.group}.{choice.name}" + (", all alike" if len(keys) > 1 else "")
                for key in keys:
                    times[key][name] = took if isinstance(took, str) else 1e6 * took
                if not isinstance(took, str) and took < best_time and took < GAIN * default:
                    best, best_time = answers, took
        return [
            {
                "op": self.op,
                "key": key,
                "rows": question.rows,
                "times_us": times[key],
                "config": best[key],
                "default_us": 1e6 * default,
                "best_us": 1e6 * best_time,
            }
            for key, question in self.questions.items()
        ]

    def time(self, answers: dict[str, Config]) -> float | str:
        """Seconds of the case, cold, or what is wrong with these answers."""
        try:
            with tuning.trying({(self.op, key): config for key, config in answers.items()}):
                wrong = mismatch(_results(self.work), self.expected)
                return self.timer.cold(self.work) if wrong is None else wrong
        except Exception as error:  # too much shared memory, or a shape it does not do
            return f"{type(error).__name__}: {error}"[:160]


def _results(work: Run) -> list[Tensor]:
    """Tensors that a run returned, copied: the next one may use their memory."""

    def flat(found: Any) -> Iterator[Tensor]:
        if isinstance(found, Tensor):
            yield found.clone()
        elif isinstance(found, tuple | list):
            for part in found:
                yield from flat(part)

    return list(flat(work()))


def mismatch(found: list[Tensor], expected: list[Tensor]) -> str | None:
    """What is wrong with a result, in words; None: it is the default's up to the order of sums."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return f"shapes {[tuple(x.shape) for x in found]}"
    for x, y in zip(found, expected, strict=True):
        if not y.numel():
            continue
        if not y.is_floating_point():
            share = (x != y).double().mean().item()
            if share > FLIPPED:
                return f"{100 * share:.1f} % of the integers differ"
            continue
        error = ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)).item()
        if not error <= ERROR:  # written so that a NaN fails too
            return f"relative error {error:.2g}"
    return None


def merged(table: Table, decisions: list[dict[str, Any]]) -> Table:
    """The table with what was decided in the place of what it said about the same op and key."""
    found: Table = {op: dict(keys) for op, keys in table.items()}
    for decision in decisions:
        op, key, rows = decision["op"], decision["key"], decision["rows"]
        kept = [(most, config) for most, config in found.get(op, {}).get(key, []) if most != rows]
        found.setdefault(op, {})[key] = sorted([*kept, (rows, decision["config"])], key=lambda entry: entry[0])
    return found


def save(table: Table, path: Path) -> Path:
    """Write a table, one bucket a line."""
    lines: list[str] = []
    for op in sorted(table):
        keys = [
            f"  {json.dumps(key)}: [\n"
            + ",\n".join(f"   {json.dumps(list(bucket))}" for bucket in table[op][key])
            + "\n  ]"
            for key in sorted(table[op])
        ]
        lines.append(f" {json.dumps(op)}: {{\n" + ",\n".join(keys) + "\n }")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path


def packaged_path() -> Path:
    """Where the table of this device lies in the package."""
    folder = Path(benthic.kernels.triton.__path__[0]) / "tuned"
    return folder / f"{tuning.device_name() or 'none'}.json"


def _line(decision: dict[str, Any]) -> str:
    times = decision["times_us"]
    timed = sorted((took, name) for name, took in times.items() if not isinstance(took, str))
    best = ", ".join(f"{name} {took:.1f}" for took, name in timed[:3])
    asked = f"{decision['op']} {decision['key']} {decision['rows']} rows"
    failed = len(times) - len(timed)
    return f"{asked}: default {decision['default_us']:.1f} us, best {best}" + (f"; {failed} out" if failed else "")


def text(found: dict[str, Any]) -> str:
    """Few lines for a terminal: a line an op."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for decision in found["decisions"]:
        groups.setdefault(decision["op"], []).append(decision)
    lines: list[str] = []
    for op, decisions in groups.items():
        changed = [d for d in decisions if d["best_us"] < d["default_us"]]
        gains = [100 * (1 - d["best_us"] / d["default_us"]) for d in changed]
        told = f"{sum(gains) / len(gains):.0f} % faster on the mean" if gains else "the default everywhere"
        lines.append(f"{op:<24}{len(decisions):>4} questions, {len(changed)} not the default, {told}")
    return "\n".join(lines) or "nothing asked for a configuration that has candidates"
