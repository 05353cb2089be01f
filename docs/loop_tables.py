"""The generated tables of determinism.md and cache.md: what the loop and the deterministic mode cost, and what hits are
worth, from the files of results/."""

from collections.abc import Callable

from kernel_tables import CPU, GPU, absent, grid, read, source

COMMAND = "benthic bench step --profile --model minnow --device cpu"
PARTS = ("planned and committed", "plan", "commit", "batch built", "text", "device idle")


def loop() -> str:
    """Both loops side by side."""
    got = read("loop-minnow-reference", CPU, GPU)
    if got is None:
        return absent(COMMAND)
    found, link = got
    arms = ("one by one", "ahead")
    lines: list[list[str]] = []
    for name, values in found["table"].items():
        if name.startswith(("decode", *PARTS)):
            quantity, batch, unit = name.split(", ")
            lines.append([f"{quantity}, {unit}", batch.removeprefix("batch "), *[number(values[arm]) for arm in arms]])
    threads = "one thread" if found["threads"] == 1 else f"{found['threads']} threads"
    return f"{grid(['', 'requests', *arms], lines)}\n\n{source(found, link)} On {threads}; medians."


def mode() -> str:
    """Speed with the mode and without."""
    got = read("loop-minnow-reference", CPU, GPU)
    if got is None:
        return absent(COMMAND)
    found, link = got
    lines: list[list[str]] = []
    for name, values in found["table"].items():
        if not name.endswith("tokens/s"):
            continue
        for arm in ("one by one", "ahead"):
            usual, fixed = values[arm], values[f"{arm}, deterministic"]
            what = f"{name.removesuffix(', tokens/s')}, {arm}"
            lines.append([what, number(usual), number(fixed), f"{100 * (usual / fixed - 1):+.1f} %"])
    return f"{grid(['tokens/s', 'usual', 'deterministic', 'cost'], lines)}\n\n{source(found, link)}"


CACHE = "benthic bench cache --data valid.jsonl.xz"
WAYS = ("snapshot, halo", "exact, halo", "exact, off", "replay, halo", "replay, compact")


def worth() -> str:
    """Keys, look-ups, hits and agents, each beside what was asked of it."""
    got = read("cache-minnow-reference", CPU, GPU)
    if got is None:
        return absent(CACHE)
    found, link = got
    lines: list[list[str]] = []
    for measure in found["measures"]:
        if ":" in measure["name"] or measure["name"].startswith("hits, "):
            continue
        target = (
            "" if "target" not in measure else f"{'<=' if measure['better'] == 'less' else '>='} {measure['target']:g}"
        )
        lines.append([measure["name"], f"{measure['value']:.3g}", measure["unit"], target])
    return f"{grid(['', 'measured', 'unit', 'asked'], lines)}\n\n{source(found, link)}"


def ways() -> str:
    """What each way to answer behind a hit changes against a cold start."""
    got = read("cache-minnow-reference", CPU, GPU)
    if got is None:
        return absent(CACHE)
    found, link = got
    table: dict[str, dict[str, float]] = {}
    for measure in found["measures"]:
        way, colon, what = measure["name"].partition(": ")
        if colon:
            table.setdefault(way, {})[what] = measure["value"]
    needles = next((what for what in table.get("cold", {})), "needles")
    columns = (
        "KL of the next token",
        "bits per byte it adds",
        "same first token",
        "greedy tokens alike of 32",
        needles,
    )
    lines = [
        [way, *(f"{table[way][what]:.3g}" if what in table[way] else "" for what in columns)]
        for way in ("cold", *WAYS)
        if way in table
    ]
    return f"{grid(['mode, truncation', *columns], lines)}\n\n{source(found, link)}"


def number(x: float) -> str:
    return f"{x:,.0f}".replace(",", " ") if abs(x) >= 100 else f"{x:.1f}"


BLOCKS: dict[str, Callable[[], str]] = {"loop": loop, "mode": mode}
OF_CACHE: dict[str, Callable[[], str]] = {"worth": worth, "ways": ways}
