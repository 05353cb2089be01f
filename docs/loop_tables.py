"""The generated tables of determinism.md: what the loop and the deterministic mode cost, from the files of results/."""

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


def number(x: float) -> str:
    return f"{x:,.0f}".replace(",", " ") if abs(x) >= 100 else f"{x:.1f}"


BLOCKS: dict[str, Callable[[], str]] = {"loop": loop, "mode": mode}
