"""`benthic bench`: how fast this machine runs a model (step), what the model's text is worth (eval), what number
formats cost in accuracy (numerics), how close kernels (kernel) and a rank of a large deployment (rank) come to what the
hardware allows, which configurations are fastest (tune), how the scheduler does on request traces (sim), and what it
costs that bits do not depend on the batch (invariance). `compile` only prepares those that need a GPU.
"""

import argparse
import json
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benthic import config
from benthic.errors import BadField, BenchError
from benthic.types import NUMERICS

if TYPE_CHECKING:
    from benthic.bench.eval.subject import Subject
    from benthic.sim.scenarios import Scenario

NEEDLE_TOKENS = (120, 270, 520, 930)  # lengths of the needle prompts that `bench numerics` asks


def _numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(",") if part)
    if any(value < 1 for value in values):
        raise ValueError
    return values


def _token_counts(text: str) -> tuple[int, ...]:
    """4K,1M: thousands and millions of 1024 and 1024 * 1024."""
    units = {"K": 1 << 10, "M": 1 << 20}
    parts = [part.strip().upper() for part in text.split(",") if part.strip()]
    return _numbers(",".join(str(int(part.rstrip("KM")) * units.get(part[-1], 1)) for part in parts))


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _profiles(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    known = [name for name in NUMERICS if name != "reference"]
    if not names or set(names) - set(known):
        raise argparse.ArgumentTypeError(f"not of {', '.join(known)}: {text!r}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="what", metavar="BENCH", required=True)
    step = benches.add_parser("step", help="speed and memory of the engine's steps", allow_abbrev=False)
    step.add_argument(
        "--prompts", type=_numbers, default=(512, 4096), metavar="N,N", help="prompt lengths, tokens (default 512,4096)"
    )
    step.add_argument(
        "--batches",
        type=_numbers,
        metavar="N,N",
        help="requests that decode (default 1,8,32; on a GPU 1,8,32,64,256)",
    )
    step.add_argument("--tokens", type=_count, default=64, help="new tokens a request (default 64)")
    step.add_argument("--repeats", type=_count, default=3, help="runs of each kind, the median counts (default 3)")
    step.add_argument("--start-ups", type=_count, default=3, help="fresh processes timed; 0: none (default 3)")
    step.add_argument("--no-ops", action="store_true", help="leave out the time by operation")
    step.add_argument(
        "--profile",
        action="store_true",
        help="instead: what the loop itself costs, steps one by one beside steps begun ahead, deterministic beside not",
    )
    step.add_argument("--peer", choices=("ftllm",), help="run this engine on the same checkpoint too, a thread each")
    step.add_argument(
        "--peer-python",
        default=".venv-oracles/bin/python",
        metavar="FILE",
        help="interpreter of the peer's environment",
    )
    step.set_defaults(run_bench=_step)
    text = benches.add_parser(
        "eval", help="what a model's answers are worth, here or behind a server", allow_abbrev=False
    )
    _eval_arguments(text)
    accuracy = benches.add_parser("numerics", help="what the number formats of products cost", allow_abbrev=False)
    accuracy.add_argument(
        "--data", type=Path, metavar="FILE", help="documents as in eval; none: synthetic products only"
    )
    accuracy.add_argument(
        "--documents", type=_count, default=200, help="score the first N with each profile (default 200)"
    )
    accuracy.add_argument(
        "--tokens", type=_count, default=1024, help="tokens whose products and logits are compared (default 1024)"
    )
    accuracy.add_argument(
        "--profiles",
        type=_profiles,
        default=("production", "fast"),
        metavar="NAME,NAME",
        help="held against reference (default production,fast)",
    )
    accuracy.add_argument(
        "--needles", type=_count, default=16, help="prompts of each length with a code to find (default 16)"
    )
    accuracy.set_defaults(run_bench=_numerics)
    cache = benches.add_parser("cache", help="what prefix hits cost and are worth", allow_abbrev=False)
    cache.add_argument("--part", metavar="NAME,NAME", help="of keys, eviction, hits, agents, modes (default: all)")
    cache.add_argument("--prompt", type=_count, default=4000, help="tokens of the prompt that is hit (default 4000)")
    cache.add_argument("--agents", type=_count, default=8, help="agents of the trace (default 8)")
    cache.add_argument("--turns", type=_count, default=8, help="turns of each (default 8)")
    cache.add_argument("--repeats", type=_count, default=5, help="runs of each kind, the median counts (default 5)")
    cache.add_argument(
        "--data", type=Path, metavar="FILE", help="held-out documents as in eval, for what approximate modes change"
    )
    cache.add_argument("--documents", type=_count, default=48, help="prompts made of them (default 48)")
    cache.add_argument(
        "--needles", type=_count, default=8, help="prompts of each length with a code to find (default 8)"
    )
    cache.set_defaults(run_bench=_cache)
    sim = benches.add_parser("sim", help="the scheduler on request traces, on a virtual clock", allow_abbrev=False)
    sim.add_argument(
        "--machine",
        choices=("h200", "here"),
        default="h200",
        help="whose steps: an H200 rank with V4.1-Flash, or this machine with --model (default h200)",
    )
    sim.add_argument("--scenarios", metavar="NAME,NAME", help="traces to run (default: all that are made up)")
    sim.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in the Mooncake form, instead")
    sim.add_argument("--write-trace", type=Path, metavar="FILE", help="write such a trace, made up, and run nothing")
    sim.add_argument(
        "--recorded",
        action="store_true",
        help="answer one trace with --model as it comes, and simulate that very run (default: long prompts, 60 s)",
    )
    sim.add_argument("--seconds", type=float, metavar="S", help="of each trace (default 120)")
    sim.set_defaults(run_bench=_sim)
    kernel = benches.add_parser("kernel", help="every kernel against the hardware's bound", allow_abbrev=False)
    kernel.add_argument("--op", metavar="NAME", help="only cases whose op or row has this in its name")
    kernel.set_defaults(run_bench=_kernel)
    same = benches.add_parser(
        "invariance", help="what it costs that a row's bits do not depend on the batch", allow_abbrev=False
    )
    same.add_argument("--op", metavar="NAME", help="only cases whose op or row has this in its name")
    same.add_argument(
        "--rows", type=_numbers, default=(1, 64, 256), metavar="N,N", help="rows of a decode step (default 1,64,256)"
    )
    same.set_defaults(run_bench=_invariance)
    rank = benches.add_parser("rank", help="one expert-parallel rank at full depth on one GPU", allow_abbrev=False)
    rank.add_argument("--ranks", type=_count, default=8, help="ranks that share the experts (default 8)")
    rank.add_argument(
        "--rows", type=_numbers, default=(64, 192, 384, 1536), metavar="N,N", help="decode rows of a step"
    )
    rank.add_argument(
        "--contexts",
        type=_token_counts,
        default=(1 << 12, 1 << 15, 1 << 17, 1 << 20),
        metavar="4K,1M",
        help="tokens each request has",
    )
    rank.add_argument("--prefill", type=_token_counts, default=(1 << 15,), metavar="32K", help="prompt to prefill")
    rank.add_argument("--chunk", type=_token_counts, default=(1 << 12,), metavar="4K", help="its rows a step")
    rank.add_argument("--numerics", default="production", choices=("reference", "production", "fast"))
    rank.add_argument("--tiny", action="store_true", help="a small model, which a CPU can do too")
    rank.set_defaults(run_bench=_rank)
    load = benches.add_parser("load", help="files to packed weights, beside the link", allow_abbrev=False)
    load.add_argument("--gigabytes", type=float, default=12.0, metavar="GB", help="of the checkpoint made (default 12)")
    load.add_argument(
        "--folder", type=Path, metavar="DIR", help="where it is made and removed (default: in memory if there is room)"
    )
    load.add_argument("--workers", type=_numbers, default=(16, 12, 8, 4), metavar="N,N", help="threads that are tried")
    load.add_argument(
        "--pieces", type=_numbers, default=(4, 2, 1, 8), metavar="MIB,MIB", help="sizes of a copy that are tried, MiB"
    )
    load.add_argument("--repeats", type=_count, default=3, metavar="N", help="of each measure (default 3)")
    load.add_argument("--numerics", default="production", choices=NUMERICS)
    load.add_argument("--tiny", action="store_true", help="widths of a small model, which a CPU can do too")
    load.set_defaults(run_bench=_load)
    tune = benches.add_parser("tune", help="write the table of kernel configurations", allow_abbrev=False)
    tune.add_argument("--op", metavar="NAME", help="only ops with this in their name; the others keep their entries")
    tune.add_argument("--table", type=Path, metavar="FILE", help="table to write (default: the package's own)")
    tune.set_defaults(run_bench=_tune)
    compile = benches.add_parser(
        "compile", help="compile what the GPU benches and a model need, side by side", allow_abbrev=False
    )
    compile.add_argument("--op", metavar="NAME", help="only kernel cases whose op has this in its name")
    compile.add_argument("--no-kernels", action="store_true", help="leave out the cases of bench kernel")
    compile.add_argument("--no-candidates", action="store_true", help="leave out what bench tune tries")
    compile.add_argument(
        "--models", default="minnow", metavar="NAME,NAME", help="models whose steps are compiled (default minnow)"
    )
    compile.add_argument("--workers", type=_count, metavar="N", help="processes (default: one a core)")
    compile.add_argument("--json", action="store_true", help="the whole report as one JSON object")
    compile.set_defaults(run_bench=_compile)
    everything = benches.add_parser(
        "all", help="all that is measured on a GPU, each part in a process of its own", allow_abbrev=False
    )
    everything.add_argument("--only", default="", metavar="PART,PART", help="these parts alone; --list names them")
    everything.add_argument("--list", action="store_true", help="say what the parts are, and run none")
    everything.add_argument("--limit-seconds", type=float, metavar="S", help="of all parts together (default: none)")
    everything.add_argument(
        "--resume", action="store_true", help="leave out what was done at this commit with the same settings"
    )
    everything.add_argument("--model", default="minnow", metavar="NAME", help="model of step, numerics, text, compare")
    everything.add_argument(
        "--data", type=Path, metavar="FILE", help="documents as in eval, for numerics and text; none: no text"
    )
    everything.add_argument(
        "--texts", type=Path, metavar="DIR", help="the CPU's completions, as doctor --texts keeps them"
    )
    everything.add_argument("--prompts", type=_count, default=500, help="of the documents, to continue (default 500)")
    everything.add_argument("--device", default="cuda", help="cuda, or cpu for reduced runs (default cuda)")
    everything.add_argument("--out", default="results", metavar="DIR", help="folder of results (default results)")
    everything.add_argument("--logs", default="runs/all", metavar="DIR", help="what parts print (default runs/all)")
    everything.add_argument("--json", action="store_true", help="how the parts went, as one JSON object")
    everything.set_defaults(run_bench=_all)
    for bench in (kernel, same, rank, tune, load):
        bench.add_argument("--device", default="cuda", help="cuda, or cpu for a reduced run (default cuda)")
        bench.add_argument(
            "--budget-seconds",
            type=float,
            default=480.0,
            metavar="S",
            help="begin nothing new after that (default 480)",
        )
        bench.add_argument("--json", action="store_true", help="the whole report as one JSON object")
        bench.add_argument("--out", default="results", metavar="DIR", help="folder of results (default results)")
        bench.add_argument("--no-save", action="store_true", help="write no file")
        bench.add_argument("--seed", type=_count, default=0, help="of random operands (default 0)")
    for bench, skip in ((step, ()), (text, ("model",)), (accuracy, ("numerics",)), (cache, ()), (sim, ())):
        bench.add_argument("--json", action="store_true", help="the whole report as one JSON object")
        bench.add_argument("--out", default="results", metavar="DIR", help="folder of results (default results)")
        bench.add_argument("--no-save", action="store_true", help="write no file")
        bench.add_argument("--seed", type=_count, default=0, help="of random prompts and of samples (default 0)")
        config.add_arguments(bench, skip=("seed", *skip))


def run(args: argparse.Namespace) -> int:
    return args.run_bench(args)


def _step(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    from benthic.bench import loop, step

    quiet = args.json or not sys.stderr.isatty()

    def say(text: str) -> None:
        if not quiet:
            print(f"{text} ...", file=sys.stderr)

    if args.profile:
        profile = loop.Options(
            batches=args.batches or loop.Options().batches,
            tokens=max(args.tokens, 2),
            prompt=max(args.prompts),
            repeats=max(args.repeats, 1),
            seed=args.seed,
        )
        return _finish(args, settings, loop.run(settings, profile, say), loop.text, "loop")
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
    return _finish(args, settings, step.run(settings, options, say), _step_text, "step")


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default="", metavar="A,B", help="suites to run (default: all that the subject can)")
    parser.add_argument("--list", action="store_true", help="print the suites and stop")
    parser.add_argument("--model", metavar="NAME", help="a packaged model, a checkpoint folder, or the server's name")
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="held-out documents, JSON lines of kind, prompt, response"
    )
    parser.add_argument("--quick", action="store_true", help="few questions of each suite, contexts up to 1024 tokens")
    parser.add_argument("--documents", type=_count, metavar="N", help="score the first N documents (default: all)")
    parser.add_argument("--tasks", type=_count, metavar="N", help="tasks of each skill (default 128)")
    parser.add_argument("--stories", type=_count, metavar="N", help="stories of each temperature (default 32)")
    parser.add_argument("--context", type=_count, metavar="TOKENS", help="longest text of ladder and depth")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep answers there, and go on from those it has")
    parser.add_argument("--name", help="of the result file (default: from model, numerics and suites)")
    server = parser.add_argument_group("a server that speaks the OpenAI protocol")
    server.add_argument("--base-url", metavar="URL", help="ask it instead of the engine here, as http://host:8000/v1")
    server.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable that holds the key")
    server.add_argument("--api-key", metavar="KEY", help="the key itself; others can see a command line")
    server.add_argument("--concurrency", type=_count, default=8, metavar="N", help="requests at a time (default 8)")
    server.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one reply, seconds (default 600)")
    server.add_argument("--tries", type=_count, default=5, metavar="N", help="of one request (default 5)")
    server.add_argument(
        "--thinking",
        choices=("deepseek", "template", "none"),
        default="deepseek",
        help="how thinking is asked for: the field `thinking`, `chat_template_kwargs`, or not at all",
    )
    server.add_argument(
        "--template",
        choices=("plain", "chatml", "llama3", "deepseek"),
        default="plain",
        help="the form of text that is scored (default plain)",
    )
    server.add_argument(
        "--tokenizer", metavar="NAME", help="score token ids, with the tokenizer of this model or checkpoint folder"
    )
    parser.set_defaults(run_bench=_eval)


def _eval(args: argparse.Namespace) -> int:
    from benthic.bench.eval import run

    if args.list:
        for suite in run.SUITES.values():
            print(f"{suite.name:<14}{suite.text}{' (the engine in this process alone)' if suite.inside else ''}")
        return 0
    from dataclasses import replace

    from benthic.bench.eval import documents, prepared

    try:
        names = run.chosen(args.suite)
    except ValueError as error:
        raise BadField("--suite", args.suite, str(error)) from error
    settings = config.from_arguments(args, **({"model": args.model} if args.model and not args.base_url else {}))
    given = {"documents": args.documents, "tasks": args.tasks, "stories": args.stories, "longest": args.context}
    sizes = prepared.QUICK if args.quick else prepared.Sizes()
    sizes = replace(sizes, **{key: value for key, value in given.items() if value is not None})
    options = run.Options(names, args.data or documents.packaged(), sizes, args.seed, args.context, args.resume)
    subject = _subject(args, settings)
    try:
        with _Bar(args.json) as bar:
            found = run.run(subject, options, bar)
    except (KeyboardInterrupt, Exception):
        if args.resume is not None and args.resume.exists():
            _say(f"answers so far are kept in {args.resume}; the same command goes on from there")
        raise
    finally:
        subject.close()
    name = args.name or _eval_name(args, subject.name, settings, names)
    return _show(args, found, f"eval-{name}", run.text(found))


def _subject(args: argparse.Namespace, settings: config.Config) -> "Subject":
    if args.base_url is None:
        from benthic.bench.eval.local import LocalSubject

        return LocalSubject(settings)
    from benthic.bench.eval.remote import RemoteSubject, Server
    from benthic.models.registry import model_dir
    from benthic.text.prompt import ChatEncoder
    from benthic.text.tokenizer import Tokenizer

    return RemoteSubject(
        Server(
            args.base_url,
            args.model or "",
            api_key=config.secret(args.api_key_env) if args.api_key_env else args.api_key or "",
            concurrency=max(args.concurrency, 1),
            timeout=args.timeout,
            tries=max(args.tries, 1),
            thinking=args.thinking,
            template=args.template,
            encoder=ChatEncoder(Tokenizer.from_dir(model_dir(args.tokenizer))) if args.tokenizer else None,
        )
    )


def _eval_name(args: argparse.Namespace, model: str, settings: config.Config, names: tuple[str, ...]) -> str:
    """What a result is of: model, how it was served, and what was asked when that is not everything."""
    from urllib.parse import urlsplit

    from benthic.bench.eval.suites import SUITES

    parts = [model, settings.numerics if args.base_url is None else f"at-{urlsplit(args.base_url).hostname}"]
    parts += [*(names if names != tuple(SUITES) else ()), *(["quick"] if args.quick else [])]
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)).strip("-")


class _Bar:
    """What runs, how far it is, and the time left, on a terminal."""

    def __init__(self, hidden: bool):
        self._hidden = hidden

    def __enter__(self) -> "_Bar":
        from tqdm import tqdm

        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
        self._bar = tqdm(total=1, file=sys.stderr, disable=self._hidden or None, bar_format=form, desc="preparing")
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, total: int) -> None:
        self._bar.reset(max(total, 1))

    def step(self, suite: str, done: int, of: int, work: int) -> None:
        self._bar.set_description(f"{suite} {done}/{of}", refresh=False)
        self._bar.update(work)


def _cache(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    from benthic.bench import cache, report

    parts = tuple(part.strip() for part in args.part.split(",")) if args.part else cache.PARTS
    if unknown := set(parts) - set(cache.PARTS):
        raise BenchError("cache", f"no part {', '.join(sorted(unknown))}; there are {', '.join(cache.PARTS)}")
    if args.part is None and args.data is None:
        parts = tuple(part for part in parts if part != "modes")
        _say("without --data the part `modes` is left out")
    options = cache.Options(
        parts=parts,
        prompt=args.prompt,
        repeats=max(args.repeats, 1),
        agents=max(args.agents, 1),
        turns=max(args.turns, 1),
        documents=args.documents,
        data=args.data,
        needles=_needles(args.data, args.needles, args.seed) if args.data and args.needles and "modes" in parts else (),
        seed=args.seed,
    )
    found = cache.run(settings, options, _say)
    name = f"cache-{Path(settings.model).name}-{settings.numerics}" + (f"-{'-'.join(parts)}" if args.part else "")
    shown = _show(args, found, name, report.table(found["measures"]))
    if "eviction" in parts and not args.no_save:
        cache.plot_eviction(found["measures"], Path(args.out) / report.slug(found["hardware"]) / f"{name}.png")
    return shown


def _numerics(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    from benthic.bench import numerics

    options = numerics.Options(
        data=args.data,
        documents=args.documents,
        tokens=max(args.tokens, 1),
        profiles=args.profiles,
        needles=_needles(args.data, args.needles, args.seed) if args.data and args.needles else (),
        seed=args.seed,
    )
    found = numerics.run(settings, options, _say)
    name = f"numerics-{Path(settings.model).name}" if args.data else "numerics"
    return _show(args, found, name, numerics.text(found))


def _needles(path: Path, count: int, seed: int) -> tuple[tuple[str, str], ...]:
    """`count` held-out needle prompts of each length, in prose of the documents: (prompt, answer)."""
    from benthic.bench.eval.documents import read_documents
    from benthic.skills.base import SKILLS, Material

    material = Material.of((document.prompt, document.response) for document in read_documents(path))
    if not material.sentences:
        raise BenchError(
            "needles", f"{path} has no sentence of 20 to 200 characters to hide them among; try --needles 0"
        )
    rng, make = random.Random(f"needles/{seed}"), SKILLS["needle"].make
    asked = [
        make(rng, material, "held_out", tokens=tokens, needles=4, questions=1)
        for tokens in NEEDLE_TOKENS
        for _ in range(count)
    ]
    return tuple((task.messages[0]["content"], task.messages[1]["content"]) for task in asked)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _sim(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    from benthic.engine.cost import CostModel
    from benthic.sim import run, scenarios, trace
    from benthic.sim.engine import Machine

    seconds = args.seconds or (60.0 if args.recorded else 120.0)
    if args.write_trace:
        lines = trace.conversations(args.seed, seconds=seconds, rate=scenarios.H200.hashed_rate)
        trace.write(args.write_trace, lines)
        _say(f"{len(lines)} requests in {args.write_trace}")
        return 0
    known = {scenario.name: scenario for scenario in scenarios.SCENARIOS}
    every = ["long prompts"] if args.recorded else list(known)
    names = [name.strip() for name in args.scenarios.split(",")] if args.scenarios else every
    if unknown := set(names) - set(known):
        raise BenchError("scheduling", f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = [known[name] for name in names]
    if args.trace:
        arrivals = trace.read(args.trace)
        chosen = [scenarios.Scenario(args.trace.name, lambda *_: arrivals)]
    if args.recorded:
        return _recorded(args, settings, chosen, seconds)
    if args.machine == "h200":
        scale, machine = scenarios.H200, Machine("H200 rank, V4.1-Flash", CostModel(scenarios.H200_RANK))
    else:
        from benthic.sim.fit import fit

        _say("measuring steps")
        scale, machine = scenarios.SMALL, fit(settings, args.seed)
    from benthic.bench import report

    found = report.header("sim", args.seed, {"seconds": seconds, "machine": args.machine})
    found |= run.run(scale, machine, chosen, seconds=seconds, seed=args.seed, say=_say)
    name = "sim-h200" if args.machine == "h200" else f"sim-{Path(settings.model).name}"
    name += "" if chosen == scenarios.SCENARIOS else f"-{'-'.join(one.name.replace(' ', '-') for one in chosen)}"
    shown = _show(args, found, name, run.table(found) + "\n" + report.table(found["measures"]))
    if not args.no_save:
        drawn = run.picture(found, Path(args.out) / report.slug(found["hardware"]) / f"{name}.png")
        _say(f"drawn in {drawn}")
    return shown


def _recorded(args: argparse.Namespace, settings: config.Config, chosen: Sequence["Scenario"], seconds: float) -> int:
    from benthic.bench import report
    from benthic.sim import recorded, scenarios

    if len(chosen) > 1:
        raise BenchError("a recorded run", f"one trace at a time, not {len(chosen)}; name one of --scenarios")
    one = chosen[0]
    name = f"recorded-{Path(settings.model).name}" + (
        "" if one.name == "long prompts" else f"-{one.name.replace(' ', '-')}"
    )
    kept = {"seconds": seconds, "model": Path(settings.model).name, "numerics": settings.numerics}
    found = report.header("recorded", args.seed, kept | {"device": settings.device})
    make = partial(one.make, scenarios.SMALL, args.seed, seconds)
    found |= recorded.run(settings, one.name, make, seed=args.seed, say=_say)
    found |= {"versions": report.versions(), "load_after": os.getloadavg()[0]}
    shown = _show(args, found, name, recorded.table(found))
    if not args.no_save:
        drawn = recorded.picture(found, Path(args.out) / report.slug(found["hardware"]) / f"{name}.png")
        _say(f"drawn in {drawn}")
    return shown


def _kernel(args: argparse.Namespace) -> int:
    from benthic.bench import kernel

    options = kernel.Options(op=args.op, budget_seconds=args.budget_seconds, device=args.device, seed=args.seed)
    found = kernel.run(options, _say)
    return _show(args, found, "kernel" if args.op is None else f"kernel-{args.op}", kernel.table(found))


def _invariance(args: argparse.Namespace) -> int:
    from benthic.bench import invariance

    options = invariance.Options(args.op, args.rows, args.budget_seconds, args.device, args.seed)
    found = invariance.run(options, _say)
    return _show(args, found, "invariance", invariance.table(found))


def _rank(args: argparse.Namespace) -> int:
    from benthic.bench import rank, report

    options = rank.Options(
        ranks=args.ranks,
        rows=args.rows,
        contexts=args.contexts,
        prefill=args.prefill[0] if args.prefill else 0,
        chunk=args.chunk[0],
        numerics=args.numerics,
        budget_seconds=args.budget_seconds,
        tiny=args.tiny,
        device=args.device,
        seed=args.seed,
    )
    found = rank.run(options, _say)
    name = f"rank-{'tiny' if args.tiny else f'ep{args.ranks}'}-{args.numerics}"
    shown = _show(args, found, name, rank.table(found))
    if not args.no_save:
        folder = Path(args.out) / report.slug(found["hardware"])
        drawn = rank.picture(found, folder / f"{name}.png")
        _say(f"drawn in {drawn}" if drawn else "no picture: matplotlib is not installed, or nothing was measured")
    return shown


def _compile(args: argparse.Namespace) -> int:
    if find_spec("triton") is None:
        raise BenchError("the GPU kernels", "triton is not installed: pip install 'benthic[gpu]'")
    from benthic.bench import ahead

    options = ahead.Options(
        kernels=not args.no_kernels,
        candidates=not args.no_candidates,
        models=tuple(name for name in args.models.split(",") if name),
        op=args.op,
        workers=args.workers or None,
    )
    found = ahead.run(options, _say)
    print(json.dumps(found, ensure_ascii=False) if args.json else ahead.text(found))
    return 0


def _load(args: argparse.Namespace) -> int:
    from benthic.bench import load

    options = load.Options(
        gigabytes=args.gigabytes,
        folder=args.folder,
        tiny=args.tiny,
        numerics=args.numerics,
        workers=args.workers,
        pieces=args.pieces,
        repeats=max(args.repeats, 1),
        budget_seconds=args.budget_seconds,
        device=args.device,
        seed=args.seed,
    )
    found = load.run(options, _say)
    return _show(args, found, "load-tiny" if args.tiny else "load", load.table(found))


def _all(args: argparse.Namespace) -> int:
    from benthic.bench import all as everything

    options = everything.Options(
        out=Path(args.out),
        logs=Path(args.logs),
        only=tuple(name for name in args.only.split(",") if name),
        limit_seconds=args.limit_seconds,
        resume=args.resume,
        device=args.device,
        model=args.model,
        data=args.data,
        texts=args.texts,
        prompts=args.prompts,
    )
    if args.list:
        for part in everything.parts(options):
            print(
                f"{part.name:<18}{part.seconds:>5.0f} s, at most {part.limit:.0f}  benthic {' '.join(part.words[2:])}"
            )
        return 0
    found = everything.run(options, _say)
    if args.json:
        print(json.dumps({"parts": [asdict(done) for done in found]}, ensure_ascii=False))
    else:
        print(everything.table(found))
    return 0 if all(done.ok for done in found) else 1


def _tune(args: argparse.Namespace) -> int:
    from benthic.bench import tune

    options = tune.Options(op=args.op, budget_seconds=args.budget_seconds, device=args.device, seed=args.seed)
    found = tune.run(options, _say)
    if found["decisions"]:
        _say(f"table written to {tune.save(found['table'], args.table or tune.packaged_path())}")
    return _show(args, found, "tune" if args.op is None else f"tune-{args.op}", tune.text(found))


def _show(args: argparse.Namespace, found: dict[str, Any], name: str, text: str) -> int:
    """Keep the report, and print it whole or in short."""
    from benthic.bench import report

    path = None if args.no_save else report.save(found, Path(args.out), name)
    print(json.dumps(found, ensure_ascii=False) if args.json else text)
    if path is not None:
        _say(f"written to {path}")
    return 0


def _finish(
    args: argparse.Namespace,
    settings: config.Config,
    found: dict[str, Any],
    text: Callable[[dict[str, Any]], str],
    name: str,
) -> int:
    from benthic.bench import report

    path = None
    if not args.no_save:
        name = f"{name}-{Path(settings.model).name}-{settings.numerics}"
        plain = settings.cpu.native == "off"  # the torch references, kept beside the native kernels' numbers
        path = report.save(found, Path(args.out), f"{name}-plain" if plain else name)
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print(text(found))
        if path is not None:
            print(f"written to {path}")
    return 0


def _step_text(found: dict[str, Any]) -> str:
    from benthic.bench import report

    machine = found["hardware"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {found['threads']} threads, torch {found['versions']['torch']}, "
        f"native kernels {found['versions']['native']}",
        *([f"on {machine['gpu']}"] if "ceilings" in found else []),
        f"load before {found['load_before']:.1f}; other work on the machine spoils the numbers",
        "",
        report.table(found["measures"]),
    ]
    for name, shares in found["ops"].items():
        lines += ["", f"time by operation: {name}"]
        for op, spent in shares.items():
            calls = f"{spent['calls']:>7.0f} calls {spent['us_per_call']:>9.1f} us" if "calls" in spent else ""
            lines.append(f"  {op:<18}{100 * spent['share']:>6.1f} %{calls}")
    return "\n".join(lines)
