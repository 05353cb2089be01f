"""Every kernel of the step against what the machine could do: the case list, timed, beside its floor.

The ceilings are measured in the same run. The floor of a case is the larger of its bytes and its operations at those
ceilings, and never below what one small kernel takes in a graph. The public function is timed, cold and warm; the share
of the floor is that of the cold time. Peers (cuBLAS, another backend) run on operands of the same sizes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from benthic.bench import report
from benthic.bench.cases import RELEASE, SMALL, Case, Cases
from benthic.bench.timing import Ceilings, Run, Timed, Timer, measure_ceilings, release
from benthic.errors import BenchError
from benthic.kernels import backends

MESSAGE = 300  # characters of a failure that are kept


@dataclass(frozen=True, slots=True)
class Options:
    op: str | None = None  # only cases whose op or row contains this
    budget_seconds: float = 480.0  # cases that would begin later are left out, and listed
    device: str = "cuda"
    seed: int = 0


@torch.inference_mode()
def run(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; `say` hears each case. A case that fails is reported as such and the rest go on. Raises BenchError."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError("kernels on a GPU", "torch sees none; --device cpu runs a reduced list")
    sizes = RELEASE if device.type == "cuda" else SMALL
    head = report.header("kernel", options.seed, {"device": device.type, "op": options.op})
    started = perf_counter()
    timer = Timer(device)
    say("ceilings")
    ceilings = measure_ceilings(timer)
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    for case in _wanted(Cases(sizes, device, options.seed).all(), options.op):
        if perf_counter() - started > options.budget_seconds:
            left_out.append(case.name)
            continue
        result = measure(case, timer, ceilings)
        found.append(result)
        say(_line(result))
        release(device)
        if "error" in result and lost(device):
            raise BenchError(case.name, f"the device does not answer any more: {result['error']}")
    if not found and not left_out:
        raise BenchError(f"op {options.op!r}", "no case has it in the name of its op or row")
    return head | {
        "versions": report.versions(),
        "ceilings": ceilings.json(),
        "seconds": perf_counter() - started,
        "cases": found,
        "left_out": left_out,
    }


def _wanted(cases: Iterator[Case], op: str | None) -> Iterator[Case]:
    return (case for case in cases if op is None or op in case.op or op in case.row)


def measure(case: Case, timer: Timer, ceilings: Ceilings) -> dict[str, Any]:
    """One case as JSON: what it was, floor, times, peers, and whether the target is met; or the error."""
    floor = max(ceilings.floor(case.nbytes, case.flops, case.kind, case.over_link), ceilings.launch_seconds)
    result: dict[str, Any] = {
        "row": case.row,
        "op": case.op,
        "shape": case.shape,
        "phase": case.phase,
        "variant": case.variant,
        "bytes": case.nbytes,
        "flops": case.flops,
        "floor_us": 1e6 * floor,
        "target": {key: value for key, value in case.target._asdict().items() if value is not None},
    }
    try:
        if not served(case.op, timer.device):  # the reference would run, slowly, and wait for the device
            raise BenchError(case.op, f"no backend serves it on {timer.device.type}")
        timed = timer.time(case.build(), graph=not case.on_host)
        result |= judge(case, timed, floor)
        result["peers"] = {}
        for name, build in case.peers.items():
            result["peers"][name] = _peer(build, timer)
    except Exception as error:  # one broken kernel must not hide the others
        text = str(error).strip().splitlines() or [""]
        result["error"] = f"{type(error).__name__}: {text[0]}"[:MESSAGE]
    return result


def served(op: str, device: torch.device) -> bool:
    """Is there a kernel to measure? On a CPU the reference is as good."""
    return device.type == "cpu" or backends.pick(op, torch.empty(0, device=device)) is not None


def judge(case: Case, timed: Timed, floor: float) -> dict[str, Any]:
    """The numbers of a case that ran, and whether they are good enough (None: nothing is wanted of it)."""
    cold = max(timed.cold, 1e-9)
    share, tflops = floor / cold, case.flops / cold / 1e12
    share_wanted, us_wanted, tflops_wanted = case.target
    met = [
        share_wanted is None or share >= share_wanted,
        us_wanted is None or 1e6 * cold <= us_wanted,
        tflops_wanted is None or tflops >= tflops_wanted,
    ]
    return {
        "cold_us": 1e6 * timed.cold,
        "warm_us": 1e6 * timed.warm,
        "in_graph": timed.captured,
        "share": share,
        "terabytes_per_second": case.nbytes / cold / 1e12,
        "teraflops": tflops,
        "met": all(met) if any(want is not None for want in case.target) else None,
    }


def _peer(build: Callable[[], Run], timer: Timer) -> dict[str, Any]:
    try:
        timed = timer.time(build())
        return {"cold_us": 1e6 * timed.cold, "warm_us": 1e6 * timed.warm}
    except Exception as error:  # a peer that is not installed, or does not do this shape
        return {"error": f"{type(error).__name__}: {error}"[:MESSAGE]}


def lost(device: torch.device) -> bool:
    """Did a kernel break the device for the rest of this process?"""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError:
        return True
    return False


# ---- text ------------------------------------------------------------------------------------------------------------


def _line(result: dict[str, Any]) -> str:
    name = f"{result['op']} {result['shape']} {result['variant']}"
    if "error" in result:
        return f"{name:<58} failed: {result['error']}"
    mark = {True: "met", False: "missed", None: ""}[result["met"]]
    peers = " ".join(f"{peer} {times['cold_us']:.1f}" for peer, times in result["peers"].items() if "cold_us" in times)
    return (
        f"{name:<58}{result['cold_us']:>9.1f} us cold {result['warm_us']:>9.1f} warm {result['floor_us']:>9.1f} floor "
        f"{100 * result['share']:>4.0f} %{'' if result['in_graph'] else ' no graph'} {mark} {peers}"
    )


def table(found: dict[str, Any]) -> str:
    """Few lines for a terminal: a line a row and phase of the kernel table, its worst and best share."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for case in found["cases"]:
        groups.setdefault((case["row"], case["phase"], case["variant"]), []).append(case)
    lines = [f"{'':<42}{'cases':>6}{'failed':>7}{'share of floor':>16}{'targets met':>13}"]
    for (row, phase, variant), cases in groups.items():
        ran = [case for case in cases if "error" not in case]
        wanted = [case for case in ran if case["met"] is not None]
        shares = [case["share"] for case in ran]
        span = f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %" if shares else "-"
        name = f"{row}, {phase}" + ("" if variant == "exact" else f", {variant}")
        met = f"{sum(case['met'] for case in wanted)} of {len(wanted)}" if wanted else "-"
        lines.append(f"{name:<42}{len(cases):>6}{len(cases) - len(ran):>7}{span:>16}{met:>13}")
    failures = {case["error"]: case for case in found["cases"] if "error" in case}
    lines += [f"failed: {case['op']} {case['shape']}: {error}" for error, case in failures.items()]
    if found["left_out"]:
        lines.append(f"left out for want of time: {len(found['left_out'])} cases, {found['left_out'][0]} the first")
    return "\n".join(lines)
