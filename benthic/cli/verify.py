"""`benthic verify`: does this machine compute the model's answers? One line a level; what deviates is named.

Exit code 0: it does, or did when this combination of weights, device, versions and settings was last looked at; 1: it
does not. `--make-goldens` writes what answers are measured by beside the weights, on a CPU, by the plain references.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from benthic import config
from benthic.errors import BadField
from benthic.types import NUMERICS

if TYPE_CHECKING:  # loads torch
    from benthic.gate import Outcome, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", metavar="MODEL", help="model to verify (default: the setting)")
    parser.add_argument("--gate", choices=["quick", "full"], default="quick", help="how thorough (default: quick)")
    parser.add_argument("--fresh", action="store_true", help="run even when a pass is on record")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--all", action="store_true", help="every line of every level")
    parser.add_argument(
        "--out", metavar="DIR", help="also keep the whole verdict in DIR/<hardware>/gate-MODEL-....json"
    )
    parser.add_argument("--make-goldens", action="store_true", help="write goldens into the checkpoint's folder")
    parser.add_argument(
        "--profiles", default="reference,production,float", help="with --make-goldens: numerics they are made in"
    )
    config.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    if args.target is not None:
        settings = replace(settings, model=args.target)
    if args.make_goldens:
        return _make(args, settings)
    from benthic import gate

    with tqdm(total=len(gate.LEVELS), file=sys.stderr, disable=None, leave=False, bar_format=_BAR) as bar:

        def finished(outcome: "Outcome") -> None:
            bar.update()
            if not args.json:
                with bar.external_write_mode(file=sys.stdout):
                    _show(outcome, args.all)

        verdict = gate.ensure(
            settings,
            args.gate,
            fresh=args.fresh,
            progress=lambda text: bar.set_postfix_str(text),
            finished=finished,
        )
    if args.out is not None:
        _keep(verdict, settings, args.out)
    if args.json:
        print(json.dumps(_body(verdict), ensure_ascii=False))
        return 0 if verdict.passed else 1
    if verdict.remembered:
        for outcome in verdict.outcomes:
            _show(outcome, args.all)
    print(_sentence(verdict))
    return 0 if verdict.passed else 1


_BAR = "{desc}{n_fmt}/{total_fmt} levels, {elapsed}{postfix}"


def _show(outcome: "Outcome", everything: bool) -> None:
    """One line: the level, what is closest to its bound, and how much room that leaves."""
    line = outcome.closest
    state = "skipped" if outcome.skipped else "ok" if outcome.passed else "FAILED"
    if outcome.skipped:
        text = outcome.skipped
    elif line is None or (line.margin == 1 and outcome.passed):
        text = f"{len(outcome.lines)} checks, nothing deviates"
    else:
        bound = f"of at most {line.bound:.3g}" if line.bound else "none allowed"
        room = f", {100 * line.margin:.0f} % of the room left" if outcome.passed else ""
        text = f"{len(outcome.lines)} checks; {line.name}: {line.error:.3g} {line.unit} ({bound}{room})"
    print(f"{outcome.level:<7} {state:<7} {outcome.seconds:6.1f} s  {text}", flush=True)
    if everything:
        for each in outcome.lines:
            bound = "" if each.bound is None else f"{each.bound:.3g}"
            mark = "" if each.passed else "  FAILED"
            print(f"    {each.name:<52}{each.cases:>7}{each.error:>12.3e}{bound:>10}  {each.unit}{mark}")


def _sentence(verdict: "Verdict") -> str:
    what = f"{verdict.model} ({verdict.key['numerics']}, {verdict.key['device']})"
    for outcome in verdict.outcomes:
        if (line := outcome.deviates) is not None:
            return f"{what} computes wrong answers here; the first that deviates: {outcome.level}, {line.name}"
    seconds = sum(outcome.seconds for outcome in verdict.outcomes)
    when = "passed earlier, on record" if verdict.remembered else f"passed in {seconds:.1f} s"
    skipped = [outcome.level for outcome in verdict.outcomes if outcome.skipped]
    return f"{what}: {when}" + (f"; not looked at: {', '.join(skipped)}" if skipped else "")


def _body(verdict: "Verdict") -> dict[str, Any]:
    outcomes = [
        {
            "level": outcome.level,
            "passed": outcome.passed,
            "skipped": outcome.skipped or None,
            "seconds": outcome.seconds,
            "lines": [
                asdict(line) | {"error": _finite(line.error), "passed": line.passed, "margin": _finite(line.margin)}
                for line in outcome.lines
            ],
        }
        for outcome in verdict.outcomes
    ]
    return {
        "model": verdict.model,
        "gate": verdict.depth,
        "passed": verdict.passed,
        "remembered": verdict.remembered,
        "seed": verdict.seed,
        "key": dict(verdict.key),
        "levels": outcomes,
    }


def _finite(x: float) -> float | None:
    """JSON knows no infinity: what cannot be measured, and the margin of what allows nothing, are null."""
    return x if math.isfinite(x) else None


def _keep(verdict: "Verdict", settings: config.Config, folder: str) -> None:
    from benthic.bench import report

    model = Path(verdict.model).name
    known = {"model": model, "numerics": settings.numerics, "threads": settings.cpu.threads}
    name = f"gate-{model}-{settings.numerics}" + ("-full" if verdict.depth == "full" else "")
    report.save(report.header("gate", verdict.seed, known) | _body(verdict), Path(folder), name)


def _make(args: argparse.Namespace, settings: config.Config) -> int:
    from benthic import gate
    from benthic.models.registry import model_dir
    from benthic.testing import goldens

    profiles = args.profiles.split(",")
    for name in profiles:
        if name not in NUMERICS:
            raise BadField("profiles", name, f"one of {', '.join(NUMERICS)}")
    folder = model_dir(settings.model)
    with tqdm(file=sys.stderr, disable=None, leave=False, bar_format="{desc} ({elapsed})") as bar:
        about, tensors = goldens.make(settings, profiles, bar.set_description_str, documents=gate.documents)
    size = goldens.write(folder, about, tensors)
    if args.json:
        print(json.dumps({"folder": str(folder), "bytes": size, "profiles": profiles}))
    else:
        print(f"goldens of {settings.model} in {', '.join(profiles)}: {size} bytes in {folder}")
    return 0
