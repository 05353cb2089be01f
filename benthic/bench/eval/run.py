"""One evaluation: prepare the suites, ask what is not on record, measure, report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from benthic.bench import drafts, report
from benthic.bench.eval import documents as texts
from benthic.bench.eval import questions
from benthic.bench.eval.prepared import Measured, Plan, Prepared, Sizes, Skip, Suite
from benthic.bench.eval.questions import Chat, Draft, Missing, Question
from benthic.bench.eval.record import Record
from benthic.bench.eval.subject import Subject
from benthic.bench.eval.suites import SUITES
from benthic.bench.report import Measure
from benthic.errors import BenchError
from benthic.skills.base import Material

_ALONE = 3  # questions of a suite that are asked one by one; without an answer to any it is not asked further
_BROKEN_ENOUGH = 6  # failures in a row after which it is not, either


@dataclass(frozen=True, slots=True)
class Options:
    """suites: names of SUITES; data: held-out documents; record: file of answers to go on from, None: none is kept."""

    suites: tuple[str, ...]
    data: Path
    sizes: Sizes
    seed: int
    context: int | None = None  # instead of what the subject says
    record: Path | None = None


class Progress(Protocol):
    """total, done: work in tokens, about."""

    def begin(self, total: int) -> None: ...
    def step(self, suite: str, done: int, of: int, work: int) -> None: ...


class Silent:
    def begin(self, total: int) -> None:
        pass

    def step(self, suite: str, done: int, of: int, work: int) -> None:
        pass


def chosen(names: str) -> tuple[str, ...]:
    """Suites of a comma-separated list; empty: all. Raises ValueError naming those that do not exist."""
    found = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in found if name not in SUITES]
    if unknown:
        raise ValueError(f"no suites {', '.join(unknown)}; there are {', '.join(SUITES)}")
    return found or tuple(SUITES)


def run(subject: Subject, options: Options, progress: Progress | None = None) -> dict[str, Any]:
    """The whole report, ready for `report.save`."""
    documents = tuple(texts.read_documents(options.data))
    if not documents:
        raise BenchError("text", f"{options.data} holds no documents")
    identity = {**subject.identity(), "seed": options.seed, "documents": texts.digest(documents)}
    found = report.header("eval", options.seed, identity)
    record = Record(options.record, identity)
    try:
        plan = Plan(
            documents=documents,
            material=Material.of((document.prompt, document.response) for document in documents),
            sizes=options.sizes,
            seed=options.seed,
            context=options.context or subject.context,
            local=subject.local,
            numerics=subject.numerics,
            length=subject.length,
        )
        suites = _Run(subject, record, progress or Silent()).suites([SUITES[name] for name in options.suites], plan)
    finally:
        record.close()
    measures: list[Measure] = [row for suite in suites.values() for row in suite["measures"]]
    return found | {"versions": report.versions(), "subject": subject.name, "suites": suites, "measures": measures}


class _Run:
    def __init__(self, subject: Subject, record: Record, progress: Progress):
        self.subject, self.record, self.progress = subject, record, progress

    def suites(self, suites: Sequence[Suite], plan: Plan) -> dict[str, dict[str, Any]]:
        prepared: dict[str, Prepared | str] = {suite.name: self._prepare(suite, plan) for suite in suites}
        todo: dict[str, list[Question]] = {}
        seen: set[str] = set()
        for name, ready in prepared.items():
            todo[name] = []
            for question in () if isinstance(ready, str) else ready.questions:
                key = questions.digest(question)
                if key not in seen and self.record.get(question) is None:
                    todo[name].append(question)
                seen.add(key)
        self.progress.begin(sum(work(question) for some in todo.values() for question in some))
        missing: dict[str, Missing] = {}
        return {name: self._suite(name, ready, todo[name], missing) for name, ready in prepared.items()}

    def _prepare(self, suite: Suite, plan: Plan) -> Prepared | str:
        if suite.inside and not self.subject.local:
            return "it looks inside the model, which takes the engine in this process"
        try:
            return suite.prepare(plan)
        except Skip as reason:
            return str(reason)

    def _suite(
        self, name: str, ready: Prepared | str, todo: Sequence[Question], missing: dict[str, Missing]
    ) -> dict[str, Any]:
        """missing: by digest, what has no answer so far; questions of several suites stand there once."""
        if isinstance(ready, str):
            return {"skipped": ready, "measures": []}
        started = perf_counter()
        self._ask(name, todo, missing)
        keys = {questions.digest(question): question for question in ready.questions}
        answered = sum(self.record.get(question) is not None for question in keys.values())
        reasons = Counter(missing[key].reason for key in keys if key in missing)
        told: dict[str, Any] = {"questions": len(keys), "answered": answered}
        if reasons:
            told["missing"] = dict(reasons)
        if not answered:
            return {"skipped": next(iter(reasons)), "measures": [], **told}
        try:
            result = ready.measured(self.record.get)
        except Skip as skip:
            return {"skipped": str(skip), "measures": [], **told}
        _note_missing(result, len(keys) - answered)
        seconds = round(perf_counter() - started, 3)
        return {**told, "seconds": seconds, "measures": result.measures, **result.details}

    def _ask(self, name: str, todo: Sequence[Question], missing: dict[str, Missing]) -> None:
        """One by one until a question is answered or it is clear that none will be; then the rest, side by side."""
        for done, question in enumerate(todo[:_ALONE]):
            if self._some(name, [question], done, len(todo), missing):
                self._some(name, todo[done + 1 :], done + 1, len(todo), missing)
                return

    def _some(self, name: str, some: Sequence[Question], before: int, of: int, missing: dict[str, Missing]) -> int:
        """How many were answered. Ends early where one after another breaks."""
        answered = broken = 0
        stream = self.subject.answers(some)
        try:
            for done, (question, answer) in enumerate(stream, before + 1):
                if isinstance(answer, Missing):
                    missing[questions.digest(question)] = answer
                    broken += not answer.refused
                else:
                    self.record.add(question, answer)
                    answered, broken = answered + 1, 0
                self.progress.step(name, done, of, work(question))
                if broken >= _BROKEN_ENOUGH:
                    break
        finally:
            stream.close()  # type: ignore[attr-defined]
        return answered


def _note_missing(result: Measured, count: int) -> None:
    if count:
        for row in result.measures:
            row["note"] = "; ".join(
                part for part in (row.get("note", ""), f"{count} questions without an answer") if part
            )


def work(question: Question) -> int:
    """About how many tokens it takes, a produced one counting as four."""
    if isinstance(question, Draft):
        return 5 * question.max_tokens * len(question.prompts)
    if isinstance(question, Chat):
        letters = sum(len(str(message.get("content") or "")) for message in question.request["messages"])
        return letters // 4 + 4 * min(question.max_tokens, 64)
    return sum(len(document.prompt) + len(document.response) for document in question.documents) // 4


# ---- for a terminal --------------------------------------------------------------------------------------------------


def text(found: dict[str, Any]) -> str:
    """The report as a table, suite by suite."""
    lines = [f"{found['subject']}: " + ", ".join(f"{k} {v}" for k, v in found["settings"].items() if k != "model"), ""]
    lines.append(f"{'':<40}{'value':>10}{'±':>10}{'n':>7}{'bar':>10}  verdict")
    for name, suite in found["suites"].items():
        if "skipped" in suite:
            lines.append(f"{name:<40}{'skipped: ' + suite['skipped']}")
        lines += [_line(row) for row in suite["measures"]]
    for name, suite in found["suites"].items():
        for sight, grid in suite.get("by depth", {}).items():
            lines += ["", *_grid(f"{name} by depth, {sight}", grid)]
        for sample in suite.get("samples", ())[:2]:
            lines += ["", f"> {sample['prompt']}  (T = {sample['temperature']:g})", "", sample["text"]]
        if "drafts" in suite:
            lines += ["", drafts.table(suite["drafts"])]
    return "\n".join(lines)


def _line(row: Measure) -> str:
    error, bar = row.get("standard_error"), row.get("target")
    mark = "" if bar is None else f"{'<=' if row.get('better') == 'less' else '>='} {_short(bar)}"
    tail = "  ".join(part for part in (row.get("verdict", ""), row["unit"], row.get("note", "")) if part)
    shown = "" if error is None else _short(error)
    return f"{row['name']:<40}{_short(row['value']):>10}{shown:>10}{row.get('n', ''):>7}{mark:>10}  {tail}"


def _grid(title: str, grid: dict[str, dict[str, float]]) -> list[str]:
    depths = list(dict.fromkeys(at for row in grid.values() for at in row))
    lines = [f"{title:<28}" + "".join(f"{at:>8}" for at in depths)]
    for tokens, row in grid.items():
        lines.append(
            f"{tokens + ' tokens':>28}" + "".join(f"{_short(row[at]) if at in row else '-':>8}" for at in depths)
        )
    return lines


def _short(x: float) -> str:
    return f"{x:,.0f}".replace(",", " ") if abs(x) >= 1000 else f"{x:.4g}"
