"""`benthic bench step | eval`: how fast this machine runs a model, and what the model's text is worth."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benthic import config


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
    benches = parser.add_subparsers(dest="what", metavar="BENCH", required=True)
    step = benches.add_parser("step", help="speed and memory of the engine's steps", allow_abbrev=False)
    step.add_argument(
        "--prompts", type=_numbers, default=(512, 4096), metavar="N,N", help="prompt lengths, tokens (default 512,4096)"
    )
    step.add_argument(
        "--batches", type=_numbers, default=(1, 8, 32), metavar="N,N", help="requests that decode (default 1,8,32)"
    )
    step.add_argument("--tokens", type=_count, default=64, help="new tokens a request (default 64)")
    step.add_argument("--repeats", type=_count, default=3, help="runs of each kind, the median counts (default 3)")
    step.add_argument("--start-ups", type=_count, default=3, help="fresh processes timed; 0: none (default 3)")
    step.add_argument("--no-ops", action="store_true", help="leave out the time by operation")
    step.add_argument("--peer", choices=("ftllm",), help="run this engine on the same checkpoint too, a thread each")
    step.add_argument(
        "--peer-python",
        default=".venv-oracles/bin/python",
        metavar="FILE",
        help="interpreter of the peer's environment",
    )
    step.set_defaults(run_bench=_step)
    text = benches.add_parser("eval", help="bits per byte of held-out responses, sampled stories", allow_abbrev=False)
    text.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="documents, JSON lines of kind, prompt, response"
    )
    text.add_argument("--documents", type=_count, help="score the first N documents (default: all)")
    text.add_argument("--stories", type=_count, default=10, help="stories to sample at T = 0.8 (default 10)")
    text.set_defaults(run_bench=_eval)
    for bench in (step, text):
        bench.add_argument("--json", action="store_true", help="the whole report as one JSON object")
        bench.add_argument("--out", default="results", metavar="DIR", help="folder of results (default results)")
        bench.add_argument("--no-save", action="store_true", help="write no file")
        bench.add_argument("--seed", type=_count, default=0, help="of random prompts and of samples (default 0)")
        config.add_arguments(bench, skip=("seed",))


def run(args: argparse.Namespace) -> int:
    return args.run_bench(args)


def _step(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    from benthic.bench import step

    options = step.Options(
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
    quiet = args.json or not sys.stderr.isatty()
    found = step.run(settings, options, lambda text: None if quiet else print(f"{text} ...", file=sys.stderr))
    return _finish(args, settings, found, _step_text)


def _eval(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    from tqdm import tqdm

    from benthic.bench import eval as evaluation

    options = evaluation.Options(data=args.data, documents=args.documents, stories=args.stories, seed=args.seed)
    with tqdm(total=args.documents, unit="doc", file=sys.stderr, disable=args.json or None) as bar:

        def progress(stage: str, done: int) -> None:
            bar.set_description(stage)
            if stage == "documents":
                bar.update(done - bar.n)

        found = evaluation.run(settings, options, progress)
    return _finish(args, settings, found, _eval_text)


def _finish(
    args: argparse.Namespace, settings: config.Config, found: dict[str, Any], text: Callable[[dict[str, Any]], str]
) -> int:
    from benthic.bench import report

    path = None
    if not args.no_save:
        name = f"{args.what}-{Path(settings.model).name}-{settings.numerics}"
        plain = settings.cpu.native == "off"  # the torch references, kept beside the native kernels' numbers
        path = report.save(found, Path(args.out), f"{name}-plain" if plain else name)
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print(text(found))
        if path is not None:
            print(f"written to {path}")
    return 0


def _eval_text(found: dict[str, Any]) -> str:
    from benthic.bench import report

    lines = [
        f"{found['documents']} documents, {found['tokens']} tokens, {found['bytes']} bytes of responses",
        "",
        report.table(found["measures"]),
    ]
    for story in found["stories"]:
        lines += ["", f"> {story['prompt']}", "", story["text"]]
    return "\n".join(lines)


def _step_text(found: dict[str, Any]) -> str:
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
