"""What it costs that a row's bits do not depend on the other rows: each kernel of a step with and without the mode.

The mode is `deterministic`, in code `backends.invariant()`. Kernels run at sizes of decode steps, from CUDA graphs
and cold, as in `kernel.py`; both times are of the same operands.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benthic.bench import report
from benthic.bench.cases import RELEASE, SMALL, Case, Cases
from benthic.bench.kernel import MESSAGE, lost, served
from benthic.bench.timing import Run, Timer, release
from benthic.errors import BenchError
from benthic.kernels import backends

MOST_COST = {"experts": 0.10, "moe": 0.10}  # of the usual time; others have no target
CONTEXT = 4096  # tokens that each request has


@dataclass(frozen=True, slots=True)
class Options:
    op: str | None = None  # only cases whose op or row contains this
    rows: tuple[int, ...] = (1, 64, 256)  # of a decode step
    budget_seconds: float = 300.0  # cases that would begin later are left out, and counted
    device: str = "cuda"
    seed: int = 0


@torch.inference_mode()
def run(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; `say` hears each case. A case that fails is reported as such and the rest go on. Raises BenchError."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError("kernels on a GPU", "torch sees none; --device cpu runs a reduced list")
    head = report.header("invariance", options.seed, {"device": device.type, "op": options.op, "rows": options.rows})
    started, timer = perf_counter(), Timer(device)
    found: list[dict[str, Any]] = []
    left_out = 0
    for rows, case in decode_cases(options, device):
        if options.op is not None and options.op not in case.op and options.op not in case.row:
            continue
        if perf_counter() - started > options.budget_seconds:
            left_out += 1
            continue
        found.append(measure(rows, case, timer))
        say(_line(found[-1]))
        release(device)
        if "error" in found[-1] and lost(device):
            raise BenchError(case.name, f"the device does not answer any more: {found[-1]['error']}")
    if not found and not left_out:
        raise BenchError(f"op {options.op!r}", "no case has it in the name of its op or row")
    return head | {"versions": report.versions(), "cases": found, "left_out": left_out}


def decode_cases(options: Options, device: torch.device) -> Iterator[tuple[int, Case]]:
    """The kernels of a decode step of each number of rows, one row a request."""
    most, large = max(options.rows), device.type == "cuda"
    context = CONTEXT if large else 256
    sizes = replace(RELEASE if large else SMALL, attend=((most, 1),), contexts=((context, most, 1),))
    cases = Cases(replace(sizes, pool_blocks=8193) if large else sizes, device, options.seed)
    matrices = cases.matrices()
    profiles = (False, True) if large else (False,)  # a CPU has no weights of the profile "fast"
    kinds: list[Callable[[int], Case]] = [partial(cases.moe, fast=fast) for fast in profiles]
    kinds += [partial(cases.experts, variant="fast" if fast else "exact") for fast in profiles]
    kinds.append(cases.route)
    for build in (cases.attention_inputs, cases.attention_output):
        kinds += [partial(build, fast=fast) for fast in profiles]
    for name in ("indexer wq_b", "engram wkv"):
        n, k = matrices[name]
        kinds += [partial(cases.linear, name, n, k, fast=fast) for fast in profiles]
    kinds += [cases.head, cases.hyper_read, partial(cases.attend, per=1, phase="decode")]
    kinds += [partial(cases.compressor, per=1), partial(cases.select_records, context, per=1, restricted=False)]
    kinds += [cases.sample_rows]
    for kind in kinds:
        for rows in options.rows:
            yield rows, kind(rows)
        cases.forget()


def measure(rows: int, case: Case, timer: Timer) -> dict[str, Any]:
    """One case as JSON: both times in us, the cost as a share of the usual time, and whether that is good enough."""
    result: dict[str, Any] = {"op": case.op, "shape": case.shape, "variant": case.variant, "rows": rows}
    try:
        if not served(case.op, timer.device):
            raise BenchError(case.op, f"no backend serves it on {timer.device.type}")
        work = case.build()
        usual, fixed = timer.time(work), timer.time(partial(in_mode, work))
        cost = fixed.cold / max(usual.cold, 1e-9) - 1
        most = MOST_COST.get(case.op)
        result |= {
            "usual_us": 1e6 * usual.cold,
            "invariant_us": 1e6 * fixed.cold,
            "usual_warm_us": 1e6 * usual.warm,
            "invariant_warm_us": 1e6 * fixed.warm,
            "cost": cost,
            "target": most,
            "met": None if most is None else cost <= most,
        }
    except Exception as error:  # one broken kernel must not hide the others
        text = str(error).strip().splitlines() or [""]
        result["error"] = f"{type(error).__name__}: {text[0]}"[:MESSAGE]
    return result


def in_mode(work: Run) -> object:
    with backends.invariant():
        return work()


def _line(result: dict[str, Any]) -> str:
    name = f"{result['op']} {result['shape']}" + (", fast" if result["variant"] == "fast" else "")
    if "error" in result:
        return f"{name:<52} failed: {result['error']}"
    mark = {True: "met", False: "missed", None: ""}[result["met"]]
    times = f"{result['usual_us']:>10.1f}{result['invariant_us']:>11.1f}"
    return f"{name:<52}{times}{100 * result['cost']:>+9.1f} %  {mark}".rstrip()


def table(found: dict[str, Any]) -> str:
    """For a terminal: a line a case."""
    lines = [f"{'us, cold':<52}{'usual':>10}{'invariant':>11}{'cost':>11}"]
    lines += [_line(result) for result in found["cases"]]
    if found["left_out"]:
        lines.append(f"left out for want of time: {found['left_out']} cases")
    return "\n".join(lines)
