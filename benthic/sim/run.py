"""Every policy on every trace: the numbers side by side, whether what is asked of ours holds, and a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benthic import plots
from benthic.sim.engine import Machine, Outcome, simulate
from benthic.sim.scenarios import Scale, Scenario, measures, tail
from benthic.sim.trace import Arrival

STRETCH_ALLOWED = 2.0  # p99 of gaps with long prompts arriving, over the same without
SHOWN = {  # columns of the table: key, heading, factor
    "itl_p50": ("ITL p50, ms", 1e3),
    "itl_p99": ("p99", 1e3),
    "itl_max": ("longest", 1e3),
    "ttft_p50": ("TTFT p50, s", 1.0),
    "ttft_p99": ("p99", 1.0),
    "output_tokens_per_second": ("tokens/s", 1.0),
    "hit_share": ("hits", 1.0),
}


def run(
    scale: Scale,
    machine: Machine,
    scenarios: Sequence[Scenario],
    *,
    seconds: float,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """All of it, as one object; times in seconds."""
    runs: list[dict[str, Any]] = []
    for scenario in scenarios:
        trace = scenario.make(scale, seed, seconds)
        if not trace:
            continue
        world = scale.world._replace(blocks=scale.scarce) if scenario.scarce else scale.world
        for policy in scenario.policies(scale):
            say(f"{scenario.name}, {policy.name}")
            runs.append(_entry(scenario.name, scenario.calm, trace, simulate(trace, policy, world, machine, seed)))
    return {
        "machine": {"name": machine.name, "noise": machine.noise, "stalls": machine.stall}
        | {"coefficients": machine.cost.now._asdict()},
        "world": scale.world._asdict() | {"windows": str(scale.world.windows)},
        "runs": runs,
        "measures": verdicts(runs),
    }


def _entry(scenario: str, calm: str | None, trace: Sequence[Arrival], outcome: Outcome) -> dict[str, Any]:
    return {
        "scenario": scenario,
        "calm": calm,
        "policy": outcome.policy,
        "prompt_tokens": sum(arrival.prompt_tokens for arrival in trace),
        "measures": measures(outcome),
        "gaps": tail([gap for life in outcome.lives for gap in life.gaps]),
    }


def verdicts(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked of the engine's own policy, in the form of bench results."""
    mine = {entry["scenario"]: entry for entry in runs if entry["policy"] == "ours"}
    found: list[dict[str, Any]] = []
    for name, entry in mine.items():
        calm = mine.get(entry["calm"] or "")
        if calm is not None:
            ratio = entry["measures"]["itl_p99"] / calm["measures"]["itl_p99"]
            found.append(_verdict(f"{name}: ITL p99 over that of {calm['scenario']}", ratio, "times", STRETCH_ALLOWED))
        found.append(_verdict(f"{name}: requests without an answer", entry["measures"]["unanswered"], "requests", 0.0))
    return found


def _verdict(name: str, value: float, unit: str, target: float) -> dict[str, Any]:
    verdict = "met" if value <= target else "missed"
    return {"name": name, "value": value, "unit": unit, "target": target, "better": "less", "verdict": verdict}


def table(found: dict[str, Any]) -> str:
    """Lines for a terminal."""
    lines = [f"{'':<30}" + "".join(f"{heading:>13}" for heading, _ in SHOWN.values())]
    for entry in found["runs"]:
        cells = "".join(f"{factor * entry['measures'][key]:>13.4g}" for key, (_, factor) in SHOWN.items())
        lines.append(f"{entry['scenario'] + ', ' + entry['policy']:<30}{cells}")
    return "\n".join(lines)


def picture(found: dict[str, Any], path: Path) -> Path:
    """Gaps between tokens, a panel for each trace: the share of gaps that are longer. Raises MissingDependency."""
    pyplot = plots.pyplot()
    from matplotlib.ticker import NullFormatter

    names = list(dict.fromkeys(entry["scenario"] for entry in found["runs"]))
    columns = min(len(names), 3)
    lines = -(-len(names) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(1 + 4 * columns, 1 + 3.2 * lines), squeeze=False)
    places = [axis for line in axes for axis in line]
    for axis in places[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(places, names, strict=False):
        for entry in found["runs"]:
            if entry["scenario"] == name:
                shares, gaps = zip(*entry["gaps"], strict=True)
                own = entry["policy"] == "ours"
                style = {"linewidth": 2.4, "color": "black"} if own else {"linewidth": 1.3}
                axis.plot([1e3 * gap for gap in gaps], shares, label=entry["policy"], **style)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())  # they run into each other where a trace has few decades
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("gap between tokens, ms")
        axis.set_ylabel("share of gaps that are longer")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(f"{found['machine']['name']}, simulated", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
