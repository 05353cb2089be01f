"""The generated tables of minnow.md and the README's of minnow: what held-out questions gave, beside what was asked."""

from collections.abc import Callable, Mapping
from typing import Any

from kernel_tables import CPU, absent, grid, read, source

COMMAND = "benthic bench eval --data valid.jsonl.xz"
BESIDE = ("dense", "random")  # views of a needle row that stand in its own


def shown(measure: Mapping[str, Any]) -> str:
    """Its value with one standard error."""
    value, error = measure["value"], measure.get("standard_error")
    if measure["unit"].startswith("share"):
        around = "" if error is None else f" ± {100 * error:.1f}"
        return f"{100 * value:.1f}{around} %"
    return f"{value:.3f}{'' if error is None else f' ± {error:.3f}'}"


def asked(measure: Mapping[str, Any]) -> str:
    target = measure["target"]
    bar = f"{100 * target:g} %" if measure["unit"].startswith("share") else f"{target:g}"
    return f"{'<=' if measure['better'] == 'less' else '>='} {bar}"


def verdict(measure: Mapping[str, Any]) -> str:
    target, value = measure["target"], measure["value"]
    return "met" if (value <= target if measure["better"] == "less" else value >= target) else "missed"


def bars(up: str) -> str:
    """Every measure that something was asked of. up: from the page's folder to the project's."""
    got = read("eval-minnow-reference", CPU)
    if got is None:
        return absent(COMMAND)
    found, link = got
    measures = {measure["name"]: measure for measure in found["measures"]}
    rows: list[list[str]] = []
    for name, measure in measures.items():
        if measure.get("target") is None or name.endswith(BESIDE):
            continue
        beside = [f"{view} {shown(measures[f'{name}, {view}'])}" for view in BESIDE if f"{name}, {view}" in measures]
        rows.append([name, shown(measure), asked(measure), verdict(measure), "; ".join(beside)])
    head = ("held-out questions", "measured", "asked", "", "beside it")
    return f"{source(found, up + link.removeprefix('../'))}\n\n{grid(head, rows)}"


def parts(up: str) -> str:
    """Everything that was measured, suite by suite."""
    got = read("eval-minnow-reference", CPU)
    if got is None or "suites" not in got[0]:
        return absent(COMMAND)
    found, link = got
    rows = [
        [f"`{name}`" if i == 0 else "", measure["name"], shown(measure), measure["unit"], str(measure.get("n", ""))]
        for name, suite in found["suites"].items()
        for i, measure in enumerate(suite.get("measures", []))
    ]
    head = ("suite", "measure", "value", "unit", "samples")
    return f"{source(found, up + link.removeprefix('../'))}\n\n{grid(head, rows, words=2)}"


def stories(count: int) -> str:
    """The first stories at T = 0.8, unedited."""
    got = read("eval-minnow-reference", CPU)
    if got is None or "stories" not in got[0].get("suites", {}):
        return absent(COMMAND)
    told = [story for story in got[0]["suites"]["stories"]["samples"] if story["temperature"] == 0.8][:count]
    cut = ", falls into a loop"
    return "\n\n".join(
        f"**{story['prompt']}** (seed {story['seed']}{cut if story['loops'] else ''})\n\n"
        + "\n>\n".join(f"> {line.strip()}" for line in story["text"].strip().splitlines() if line.strip())
        for story in told
    )


README: dict[str, Callable[[], str]] = {"minnow answers": lambda: bars("")}
OF_MINNOW: dict[str, Callable[[], str]] = {
    "bars": lambda: bars("../"),
    "parts": lambda: parts("../"),
    "stories": lambda: stories(10),
}
