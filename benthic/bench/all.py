"""Everything that is measured on a GPU, one part after another, each in a process of its own with a time limit.

A part that fails or runs out of time stops nothing. Reports are written as they come; logs are kept; `parts.json` says
what was done at which commit, so that a later call goes on where this one ended. Timings have the machine to
themselves; comparisons, which stand one behind the other in the list, run side by side.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from os import sched_getaffinity
from pathlib import Path
from time import perf_counter, sleep, time
from typing import Any

from benthic.bench import report
from benthic.errors import BenchError
from benthic.types import NUMERICS

Found = dict[str, Any]
SAVING = 15.0  # seconds that a bench has after its budget, for what it is doing and its report
LEAST = 20.0  # with less time left no part is begun
TINY = ("tiny", "tiny_512")  # configurations of `testing/checkpoints.py` that are compared beside the packaged model


@dataclass(frozen=True, slots=True)
class Options:
    out: Path = Path("results")
    logs: Path = Path("runs/all")
    only: tuple[str, ...] = ()  # parts; empty: all
    limit_seconds: float | None = None  # of the whole
    resume: bool = False  # leave out what was done at this commit with these settings
    device: str = "cuda"
    model: str = "minnow"
    data: Path | None = None  # documents for numerics and text
    texts: Path | None = None  # completions of the CPU, kept or found
    prompts: int = 500  # that are continued


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    words: tuple[str, ...]  # after the interpreter
    seconds: float  # that it is thought to take
    limit: float  # most that it may take
    headline: Callable[[Found, str], str]  # of its report and what it printed
    keeps: str = ""  # name of its report under results/<hardware>/
    prints: bool = False  # it prints the report's body as JSON, and does not save it
    budget: bool = False  # it has --budget-seconds, and ends in time by itself
    beside: bool = False  # it may run beside its neighbours in the list
    ready: Callable[[], object] = field(default=lambda: None)  # what must be there before


@dataclass(slots=True)
class Done:
    """How it went."""

    name: str
    seconds: float
    ok: bool
    headline: str
    words: list[str]
    commit: str | None
    skipped: bool = False


# ---- the parts -------------------------------------------------------------------------------------------------------


def parts(options: Options) -> list[Part]:
    """In the order of what matters most, preparation first."""
    gpu, model, small = options.device, options.model, options.device == "cpu"
    bench = ("-m", "benthic.cli.main", "bench")
    saved = ("--out", str(options.out))
    workers = str(max(len(sched_getaffinity(0)) - 2, 1))
    # many at once fill Triton's cache side by side; a file that a package is missing for must not hide the others
    pytest = ("-m", "pytest", "-q", "-rfE", "-m", "gpu", "-n", workers, "--dist", "worksteal", "-p", "no:cacheprovider")
    pytest += ("--continue-on-collection-errors",)
    listed = [
        Part("compile", (*bench, "compile"), 40, 200, lambda found, text: last(text)),
        Part("tests", (*pytest, "-p", "no:benchmark"), 120, 240, lambda found, text: last(text)),
        Part(
            "tune",
            (*bench, "tune", "--device", gpu, "--table", str(options.logs / f"{folder(options).name}.json"), *saved),
            200,
            300,
            tuned,
            keeps="tune",
            budget=True,
        ),
        Part("kernel", (*bench, "kernel", "--device", gpu, *saved), 150, 240, cases, keeps="kernel", budget=True),
    ]
    for numerics in ("production", "fast"):
        words = (*bench, "rank", "--ranks", "8", "--numerics", numerics, "--device", gpu, *saved)
        words += ("--tiny", "--rows", "4,12", "--contexts", "512", "--prefill", "1K", "--chunk", "256") if small else ()
        kept = f"rank-{'tiny' if small else 'ep8'}-{numerics}"
        listed.append(Part(f"rank-{numerics}", words, 100, 180, steps, keeps=kept, budget=True))
    words = (*bench, "load", "--device", gpu, *saved)
    words += ("--tiny", "--gigabytes", "0.05", "--workers", "2", "--pieces", "1") if small else ()
    listed.append(Part("load", words, 45, 90, loaded, keeps="load-tiny" if small else "load", budget=True))
    numerics = "production"
    words = (*bench, "step", "--model", model, "--device", gpu, "--numerics", numerics, "--start-ups", "1", *saved)
    listed.append(Part("step", words, 70, 120, measured, keeps=f"step-{Path(model).name}-{numerics}"))
    words = (*bench, "invariance", "--device", gpu, *saved)
    listed.append(Part("invariance", words, 60, 120, cases, keeps="invariance", budget=True))
    words = (*bench, "numerics", "--model", model, "--device", gpu, *saved)
    if options.data is not None:
        words += ("--data", str(options.data))
    name = "numerics" if options.data is None else f"numerics-{Path(model).name}"
    listed.append(Part("numerics", words, 150, 300, profiles, keeps=name, beside=True))
    compare = (
        "-m",
        "benthic.cli.main",
        "doctor",
        "--json",
        "--compare",
        "cpu,cpu:reference" if small else f"cpu,{gpu}",
    )
    for numerics in NUMERICS if options.data is not None else ():
        words = (*compare, model, "--levels", "text", "--profiles", numerics)
        words += ("--data", str(options.data), "--prompts", str(options.prompts))
        if options.texts is not None:
            words += ("--texts", str(options.texts))
        name = f"text-{numerics}"
        listed.append(Part(name, words, 120, 240, texts, keeps=f"{name}-{Path(model).name}", prints=True, beside=True))
    for name in (model, *TINY):
        target = str(options.logs / name) if name in TINY else name
        words = (*compare, target, "--levels", "op,layer,logits", "--profiles", ",".join(NUMERICS))
        ready = (lambda name=name: tiny(options.logs / name, name)) if name in TINY else lambda: None
        name = f"compare-{Path(name).name}"
        listed.append(Part(name, words, 100, 240, compared, keeps=name, prints=True, beside=True, ready=ready))
    return listed


def tiny(path: Path, name: str) -> None:
    from benthic.testing.checkpoints import make_tiny

    if not path.exists():
        make_tiny(path, name)


def folder(options: Options) -> Path:
    return options.out / report.slug(report.hardware())


# ---- headlines -------------------------------------------------------------------------------------------------------


def last(text: str) -> str:
    lines = [line.strip("= ") for line in text.splitlines() if line.strip("= ")]
    return lines[-1] if lines else ""


def tuned(found: Found, text: str) -> str:
    decisions = found["decisions"]
    changed = [d for d in decisions if d["best_us"] < d["default_us"]]
    gain = sum(1 - d["best_us"] / d["default_us"] for d in changed) / max(len(changed), 1)
    return f"{len(decisions)} questions, {len(changed)} not the default, {100 * gain:.0f} % faster there"


def cases(found: Found, text: str) -> str:
    """Of `kernel` and `invariance`."""
    ran = [case for case in found["cases"] if "error" not in case]
    wanted = [case["met"] for case in ran if case["met"] is not None]
    left = found["left_out"] if isinstance(found["left_out"], int) else len(found["left_out"])
    failed = len(found["cases"]) - len(ran)
    return f"{len(ran)} cases, {sum(wanted)} of {len(wanted)} targets met, {failed} failed, {left} left out"


def steps(found: Found, text: str) -> str:
    ran = [step for step in found["steps"] if "error" not in step]
    told = [
        f"{step['rows']}: {step['step_ms']:.1f} ms, {step['times_floor']:.2f} times"
        for step in ran
        if step["context"] == 32768
    ]
    told += [f"{len(found['steps']) - len(ran)} failed, {len(found['left_out'])} left out"]
    prefill = found["prefill"].get("encoder")
    return "; ".join(told + ([f"prefill {prefill['tokens_per_second']:.0f} tokens/s"] if prefill else []))


def loaded(found: Found, text: str) -> str:
    shown = {m["name"]: m for m in found["measures"] if m["name"] in ("link", "staged", "whole")}
    told = [f"{name} {m['value']:.1f} {m.get('verdict', '')}".rstrip() for name, m in shown.items()]
    return ", ".join(told) + " GB/s"


def measured(found: Found, text: str) -> str:
    wanted = [m for m in found["measures"] if m["name"].startswith(("prefill", "decode"))]
    return ", ".join(f"{m['name']} {m['value']:.0f}" for m in wanted)


def profiles(found: Found, text: str) -> str:
    told = [f"{name}: KL {values['logits']['kl']:.2g}" for name, values in found.get("profiles", {}).items()]
    return ", ".join(told) or f"{len(found['synthetic'])} products"


def compared(found: Found, text: str) -> str:
    """The line nearest to its bound, or beyond it."""
    bounded = [(line, name) for name, lines in found["profiles"].items() for line in lines if line["bound"] is not None]
    failed = [line for line, _ in bounded if line["error"] > line["bound"]]
    shares = [(line["error"] / line["bound"], f"{name} {line['name']}") for line, name in bounded if line["bound"]]
    share, name = max(shares, default=(0.0, "none"))
    return f"{len(bounded) - len(failed)} of {len(bounded)} within bounds; nearest: {name}, {share:.2f} of it"


def texts(found: Found, text: str) -> str:
    (lines,) = found["profiles"].values()
    return ", ".join(f"{line['name']} {line['error']:.3g}" for line in lines if line["name"].count("(") == 0)


# ---- the run ---------------------------------------------------------------------------------------------------------


def run(options: Options, say: Callable[[str], None] = lambda _: None, of: Sequence[Part] | None = None) -> list[Done]:
    """Run the parts; `say` hears each begin and end. Raises BenchError for a part that is not in the list."""
    listed = list(parts(options) if of is None else of)
    unknown = set(options.only) - {part.name for part in listed}
    if unknown:
        raise BenchError(f"the parts {', '.join(sorted(unknown))}", f"known are {', '.join(p.name for p in listed)}")
    wanted = [part for part in listed if not options.only or part.name in options.only]
    options.logs.mkdir(parents=True, exist_ok=True)
    book = Book(folder(options) / "parts.json")
    ends = perf_counter() + (options.limit_seconds if options.limit_seconds is not None else float("inf"))
    commit, found = report.commit(), list[Done]()
    for beside, group in groupby(wanted, key=lambda part: part.beside):
        running: list[Running] = []
        together = list(group)
        threads = max(len(sched_getaffinity(0)) // len(together), 1) if beside else 1
        for part in together:
            known = book.done.get(part.name)
            if options.resume and known is not None and known.ok and same(known, part, commit):
                found.append(known)
                known.skipped = True
                say(f"{part.name}: done before")
                continue
            left = ends - perf_counter()
            if left < LEAST:
                say(f"{part.name}: no time left")
                continue
            running.append(Running(part, options, min(part.limit, left), commit, threads))
            say(f"{part.name}: begun, at most {running[-1].limit:.0f} s")
            if not beside:
                found += finished(running, book, say)
        found += finished(running, book, say)
    return found


def same(known: Done, part: Part, commit: str | None) -> bool:
    """Was it done with these words, at this commit, with no change beside it?"""
    return known.words == told(part) and commit is not None and known.commit == commit and commit[-1] != "+"


def told(part: Part) -> list[str]:
    """Its words without the folders of this machine."""
    return [Path(word).name if Path(word).is_absolute() else word for word in part.words]


class Book:
    """What was done, in a file that is written after each part."""

    def __init__(self, path: Path):
        self.path = path
        self.done: dict[str, Done] = {}
        if path.is_file():
            self.done = {name: Done(**entry) for name, entry in json.loads(path.read_text())["parts"].items()}

    def add(self, done: Done) -> None:
        self.done[done.name] = done
        body: Found = {"bench": "all", "hardware": report.hardware()}
        body["parts"] = {
            name: {key: getattr(each, key) for key in ("name", "seconds", "ok", "headline", "words", "commit")}
            for name, each in self.done.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Running:
    """A part's process."""

    def __init__(self, part: Part, options: Options, limit: float, commit: str | None, threads: int = 1):
        self.part, self.options, self.limit, self.commit = part, options, limit, commit
        self.outs = [options.logs / f"{part.name}.{kind}" for kind in ("out", "err")]
        self.started, self.began = perf_counter(), time()
        part.ready()
        words = [*part.words]
        if part.budget:
            words += ["--budget-seconds", str(int(max(limit - SAVING, 5)))]
        # variables of a child, whose settings and libraries read them
        command = ["env", f"OMP_NUM_THREADS={threads}", f"BENTHIC_CPU__THREADS={threads}", sys.executable, *words]
        with open(self.outs[0], "wb") as out, open(self.outs[1], "wb") as err:
            # a session of its own, so that what it started ends with it
            self.process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)

    def over(self) -> bool:
        if self.process.poll() is not None:
            return True
        if perf_counter() - self.started > self.limit:
            self.end()
            return True
        return False

    def end(self) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def result(self) -> Done:
        """Its report, if it is the part's own and new, and how it went."""
        took, part = perf_counter() - self.started, self.part
        text, errors = (path.read_text(encoding="utf-8", errors="replace") for path in self.outs)
        code = self.process.returncode
        ok, headline = code == 0, ""
        try:
            found = self._report(text) if part.keeps else {}
            headline = part.headline(found, text)
        except Exception as error:  # whatever a part left behind, the others still run
            ok, headline = False, f"no report: {type(error).__name__}: {error}"
        if took > self.limit:
            headline = f"out of time after {self.limit:.0f} s; {headline}"
        elif code:
            headline = f"exit {code}: {headline or last(errors)}"
        return Done(part.name, took, ok, headline[:300], told(part), self.commit)

    def _report(self, text: str) -> Found:
        part = self.part
        path = folder(self.options) / f"{part.keeps}.json"
        if part.prints:
            body = json.loads(text.splitlines()[-1])
            head = report.header(part.name, 0, {}) | {"command": " ".join(["benthic", *told(part)[2:]])}
            report.save(head | body, self.options.out, part.keeps)
        elif path.stat().st_mtime < self.began - 1:
            raise OSError(f"{path.name} is an older run's")
        return json.loads(path.read_text(encoding="utf-8"))


def finished(running: list[Running], book: Book, say: Callable[[str], None]) -> Iterator[Done]:
    """Wait for processes, and tell of each as it ends; the list is empty then."""
    try:
        while running:
            for each in [each for each in running if each.over()]:
                running.remove(each)
                done = each.result()
                book.add(done)
                say(f"{done.name}: {'ok' if done.ok else 'failed'} after {done.seconds:.0f} s; {done.headline}")
                yield done
            sleep(0.05)
    finally:
        for each in running:
            each.end()


def table(found: Sequence[Done]) -> str:
    lines = [f"{'part':<18}{'seconds':>8}  {'':<7}headline"]
    for done in found:
        mark = "ok" if done.ok else "FAILED"
        lines.append(f"{done.name:<18}{done.seconds:>8.0f}  {mark:<7}{done.headline}")
    return "\n".join(lines)
