"""Parts in processes of their own: limits, failures, what is kept, and going on where an earlier call ended."""

import json
import os
from pathlib import Path
from time import perf_counter, sleep

import pytest

from benthic.bench import all as everything
from benthic.bench import report
from benthic.bench.all import Done, Options, Part, parts
from benthic.cli.main import _parser, main
from benthic.errors import BenchError


def part(name: str, code: str, **changes: object) -> Part:
    return Part(**{"name": name, "words": ("-c", code), "seconds": 1, "limit": 30, "headline": first} | changes)  # pyright: ignore[reportArgumentType]


def first(found: dict[str, object], text: str) -> str:
    return str(found.get("said", "")) + text.partition("\n")[0]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setattr(report, "commit", lambda: "abc")
    return Options(out=tmp_path / "results", logs=tmp_path / "logs")


def test_each_part_is_told_kept_and_timed(options: Options) -> None:
    heard: list[str] = []
    found = everything.run(
        options, heard.append, [part("a", "print('well')"), part("b", "import sys; print(9, file=sys.stderr)")]
    )
    assert [(done.name, done.ok, done.headline) for done in found] == [("a", True, "well"), ("b", True, "")]
    assert (options.logs / "a.out").read_text() == "well\n"
    assert (options.logs / "b.err").read_text() == "9\n"
    assert [line.partition(":")[0] for line in heard] == ["a", "a", "b", "b"]
    book = json.loads((everything.folder(options) / "parts.json").read_text())["parts"]
    assert [entry["commit"] for entry in book.values()] == ["abc", "abc"]
    assert "a " in everything.table(found)


def test_a_failure_or_a_timeout_stops_nothing(options: Options) -> None:
    """The second sleeps with a child of its own, which ends with it."""
    marker = options.logs / "alive"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(marker)!r}).touch()"
    sleeper = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    listed = [
        part("fails", "import sys; print('so', file=sys.stderr); sys.exit(3)"),
        part("sleeps", sleeper, limit=1.5),
        part("unreadable", "print('no JSON')", keeps="report", prints=True),
        part("runs", "print('well')"),
    ]
    started = perf_counter()
    found = everything.run(options, of=listed)
    assert [(done.name, done.ok) for done in found] == [
        ("fails", False), ("sleeps", False), ("unreadable", False), ("runs", True),
    ]  # fmt: skip
    assert found[0].headline == "exit 3: so"
    assert "out of time after 2 s" in found[1].headline
    assert found[2].headline.startswith("no report")
    sleep(max(started + 6.5 - perf_counter(), 0))
    assert not marker.exists(), "what a part started ends with it"


def test_a_call_goes_on_where_the_last_one_ended(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [part("a", "print(1)"), part("b", "import sys; sys.exit(1)"), part("c", "print(3)")]
    everything.run(options, of=listed)
    again = Options(out=options.out, logs=options.logs, resume=True)
    changed = [listed[0], listed[1], part("c", "print(4)")]
    assert [(d.name, d.skipped) for d in everything.run(again, of=changed)] == [("a", True), ("b", False), ("c", False)]
    assert [d.skipped for d in everything.run(options, of=listed)] == [False] * 3, "without --resume all of it"
    monkeypatch.setattr(report, "commit", lambda: "abd")
    assert [d.skipped for d in everything.run(again, of=listed[:1])] == [False], "another commit"
    monkeypatch.setattr(report, "commit", lambda: "abd+")
    everything.run(again, of=listed[:1])
    assert [d.skipped for d in everything.run(again, of=listed[:1])] == [False], "a tree with changes is never known"


def test_neighbours_run_beside_each_other_and_others_alone(options: Options) -> None:
    """x and y wait for each other; what is before ends before them, and what is behind begins when both have ended."""
    head = f"import pathlib, sys, time; at = pathlib.Path({str(options.logs)!r})\n"

    def meets(own: str, other: str) -> str:
        wait = f"[time.sleep(0.05) for _ in range(600) if not (at / '{other}').exists()]\n"
        return f"{head}(at / '{own}').touch()\n{wait}sys.exit(not (at / '{other}').exists())"

    found = everything.run(
        options,
        of=[
            part("before", f"{head}time.sleep(0.3); sys.exit((at / 'x').exists() or (at / 'y').exists())"),
            part("x", meets("x", "y"), beside=True),
            part("y", meets("y", "x"), beside=True),
            part("behind", f"{head}sys.exit(not ((at / 'x').exists() and (at / 'y').exists()))"),
        ],
    )
    assert [done.name for done in found if not done.ok] == []


def test_time_is_shared_out(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench with a budget gets what is left, less what its end takes; without time nothing begins."""
    monkeypatch.setattr(everything, "LEAST", 1.0)
    heard: list[str] = []
    limited = Options(out=options.out, logs=options.logs, limit_seconds=40.0)
    found = everything.run(limited, of=[part("a", "import sys; print(sys.argv[1:])", limit=300, budget=True)])
    most = 40 - int(everything.SAVING)
    assert most - 5 < int(found[0].headline.split("'")[3]) < most
    limited = Options(out=options.out, logs=options.logs, limit_seconds=0.5)
    assert everything.run(limited, heard.append, [part("a", "print(1)")]) == []
    assert heard == ["a: no time left"]


def test_reports_are_the_parts_own(options: Options) -> None:
    """One prints its body, one writes a file; a file of an earlier run is none."""
    path = everything.folder(options) / "mine.json"
    make = f"import pathlib; p = pathlib.Path({str(path)!r}); p.parent.mkdir(parents=True, exist_ok=True)"
    write = make + '; p.write_text(\'{"said": "w"}\')'
    found = everything.run(options, of=[
        part("prints", "print('line'); print('{\"said\": \"p\"}')", keeps="printed", prints=True),
        part("writes", write, keeps="mine"),
    ])  # fmt: skip
    assert [done.headline for done in found] == ["pline", "w"]
    kept = json.loads((everything.folder(options) / "printed.json").read_text())
    assert kept["said"] == "p"
    assert {"commit", "hardware", "command", "time"} <= set(kept)
    os.utime(path, (1e9, 1e9))
    (stale,) = everything.run(options, of=[part("writes", "pass", keeps="mine")])
    assert not stale.ok
    assert "older run" in stale.headline


def test_the_list(options: Options, tmp_path: Path) -> None:
    """Every part is a command that the parser knows; without documents there is no text."""
    data, texts = tmp_path / "valid.jsonl.xz", tmp_path / "texts"
    listed = parts(Options(data=data, texts=texts))
    names = [each.name for each in listed]
    assert names[:6] == ["compile", "tests", "tune", "kernel", "rank-production", "rank-fast"]
    assert names[6:9] == ["load", "step", "invariance"]
    assert [name for name in names if name.startswith("text")] == [f"text-{n}" for n in everything.NUMERICS]
    assert names[-3:] == ["compare-minnow", "compare-tiny", "compare-tiny_512"]
    assert not [each.name for each in parts(Options()) if each.name.startswith("text")]
    for each in listed:
        if each.words[1] == "benthic.cli.main":
            extra = ["--budget-seconds", "5"] if each.budget else []
            _parser(each.words[2]).parse_args([*each.words[2:], *extra])
    assert sum(each.limit for each in listed if not each.beside) < 30 * 60
    with pytest.raises(BenchError, match="known are compile, tests"):
        everything.run(Options(only=("test",), out=options.out, logs=options.logs))
    assert not [word for each in listed for word in everything.told(each) if str(tmp_path) in word]


def test_headlines() -> None:
    kernel = {"cases": [{"met": True}, {"met": None}, {"met": False}, {"error": "x"}], "left_out": ["a"]}
    assert everything.cases(kernel, "") == "3 cases, 1 of 2 targets met, 1 failed, 1 left out"
    assert everything.cases(kernel | {"left_out": 2}, "").endswith("2 left out")
    line = {"level": "op", "name": "linear", "error": 0.5, "bound": 2.0}
    lines = [line, line | {"name": "route", "error": 0.03, "bound": 0.01}, line | {"bound": None}]
    assert (
        everything.compared({"profiles": {"fast": lines}}, "")
        == "1 of 2 within bounds; nearest: fast route, 3.00 of it"
    )
    step = {"rows": 64, "context": 32768, "step_ms": 20.0, "times_floor": 1.5}
    told = {"steps": [step, {"error": "x"}], "left_out": [], "prefill": {"encoder": {"tokens_per_second": 2e4}}}
    assert everything.steps(told, "") == "64: 20.0 ms, 1.50 times; 1 failed, 0 left out; prefill 20000 tokens/s"
    measure = {"name": "link", "value": 55.04}
    staged = measure | {"name": "staged", "value": 40.0, "verdict": "met"}
    told = {"measures": [measure, staged, measure | {"name": "staged, first"}]}
    assert everything.loaded(told, "") == "link 55.0, staged 40.0 met GB/s"
    assert everything.last("a\n=== 3 passed in 2 s ===\n\n") == "3 passed in 2 s"
    decisions = [{"best_us": 5.0, "default_us": 10.0}, {"best_us": 1.0, "default_us": 1.0}]
    assert everything.tuned({"decisions": decisions}, "") == "2 questions, 1 not the default, 50 % faster there"


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Done("kernel", 3.0, False, "so", [], None)
    seen: list[Options] = []
    monkeypatch.setattr(everything, "run", lambda options, say: seen.append(options) or [done])
    words = ["bench", "all", "--only", "kernel,tune", "--limit-seconds", "9", "--resume", "--out", str(tmp_path)]
    assert main(words) == 1, "a part that failed fails the whole"
    assert "FAILED" in capsys.readouterr().out
    assert (seen[0].only, seen[0].limit_seconds, seen[0].resume) == (("kernel", "tune"), 9.0, True)
    assert main(["bench", "all", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("compile")


def test_interrupted_it_leaves_no_process(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = options.logs / "alive"
    code = f"import time, pathlib; time.sleep(3); pathlib.Path({str(marker)!r}).touch()"

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(everything, "sleep", interrupted)
    started = perf_counter()
    with pytest.raises(KeyboardInterrupt):
        everything.run(options, of=[part("a", code)])
    sleep(max(started + 4 - perf_counter(), 0))
    assert not marker.exists()
