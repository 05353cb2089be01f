"""`benthic bench step`: how fast this machine runs a model, and in how much memory. Explained in docs/cpu.md."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benthic import config

if TYPE_CHECKING:  # loads torch
    from benthic.bench.step import Options


def _numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(",") if part)
    if any(value < 1 for value in values):
        raise ValueError
    return values


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("step",), help="step: the engine's steps, by way of real requests")
    parser.add_argument("--json", action="store_true", help="the whole report as one JSON object")
    parser.add_argument(
        "--prompts", type=_numbers, default=(512, 4096), metavar="N,N", help="prompt lengths, tokens (default 512,4096)"
    )
    parser.add_argument(
        "--batches", type=_numbers, default=(1, 8, 32), metavar="N,N", help="requests that decode (default 1,8,32)"
    )
    parser.add_argument("--tokens", type=_count, default=64, help="new tokens a request (default 64)")
    parser.add_argument("--repeats", type=_count, default=3, help="runs of each kind, the median counts (default 3)")
    parser.add_argument("--start-ups", type=_count, default=3, help="fresh processes timed; 0: none (default 3)")
    parser.add_argument("--no-ops", action="store_true", help="leave out the time by operation")
    parser.add_argument("--peer", choices=("ftllm",), help="run this engine on the same checkpoint too, a thread each")
    parser.add_argument(
        "--peer-python",
        default=".venv-oracles/bin/python",
        metavar="FILE",
        help="interpreter of the peer's environment",
    )
    parser.add_argument("--out", default="results", metavar="DIR", help="folder of results (default results)")
    parser.add_argument("--no-save", action="store_true", help="write no file")
    parser.add_argument("--seed", type=_count, default=0, help="of the random prompts (default 0)")
    config.add_arguments(parser, skip=("seed",))


def run(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    from benthic.bench import report, step

    quiet = args.json or not sys.stderr.isatty()
    found = step.run(settings, _options(args), lambda text: None if quiet else print(f"{text} ...", file=sys.stderr))
    path = None
    if not args.no_save:
        path = report.save(found, Path(args.out), f"step-{Path(settings.model).name}-{settings.numerics}")
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print(_text(found))
        if path is not None:
            print(f"written to {path}")
    return 0


def _options(args: argparse.Namespace) -> "Options":
    from benthic.bench.step import Options

    return Options(
        prompts=args.prompts,
        batches=args.batches,
        tokens=max(args.tokens, 2),
        repeats=max(args.repeats, 1),
        start_ups=args.start_ups,
        ops=not args.no_ops,
        peer=args.peer,
        peer_python=args.peer_python,
        seed=args.seed,
    )


def _text(found: dict[str, Any]) -> str:
    from benthic.bench import report

    machine = found["hardware"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {found['threads']} threads, torch {found['versions']['torch']}, "
        f"native kernels {found['versions']['native']}",
        f"load before {found['load_before']:.1f}; other work on the machine spoils the numbers",
        "",
        report.table(found["measures"]),
    ]
    for name, shares in found["ops"].items():
        lines += ["", f"time by operation: {name}"]
        for op, spent in shares.items():
            calls = f"{spent['calls']:>7} calls {spent['us_per_call']:>9.1f} us" if "calls" in spent else ""
            lines.append(f"  {op:<18}{100 * spent['share']:>6.1f} %{calls}")
    return "\n".join(lines)
