"""The generated tables of correctness.md: what the gate took and saw, and what it says of each fault."""

from collections.abc import Callable

from kernel_tables import CPU, GPU, absent, grid, read, source

PROFILES = ("reference", "production", "float")


def levels() -> str:
    """Of the packaged model, one column a profile and machine."""
    runs = [
        (f"{profile}, {'GPU' if machine == GPU else 'CPU'}", got)
        for machine in (CPU, GPU)
        for profile in PROFILES
        if (got := read(f"gate-minnow-{profile}", machine)) is not None
    ]
    if not runs:
        return absent("benthic verify minnow --fresh --out results")
    head = ["level", *(name for name, _ in runs)]
    rows: list[list[str]] = []
    for level in runs[0][1][0]["levels"]:
        cells: list[str] = []
        for _, (found, _) in runs:
            one = next((one for one in found["levels"] if one["level"] == level["level"]), None)
            bounded = [line["margin"] for line in one["lines"] if line["bound"]] if one else []  # none, or 0: exact
            least = f", {100 * min(bounded):.0f} %" if bounded else ""
            cells.append(f"{one['seconds']:.1f} s, {len(one['lines'])}{least}" if one else "")
        rows.append([f"`{level['level']}`", *cells])
    total = [f"{sum(one['seconds'] for one in found['levels']):.1f} s" for _, (found, _) in runs]
    rows.append(["together", *total])
    return "\n\n".join([" ".join(source(*got) for _, got in runs), grid(head, rows)])


def faults() -> str:
    """Which level catches which fault, on each machine that they were tried on."""
    parts: list[str] = []
    for machine in (CPU, GPU):
        got = read("gate-faults", machine)
        if got is None:
            continue
        found, link = got
        rows = [
            [
                one["fault"],
                one["kind"],
                one["guards"],
                f"`{one['level']}`" if one["level"] else "**not caught**",
                one["line"],
            ]
            for one in found["faults"]
        ]
        caught = f"{found['caught']} of {len(rows)} caught."
        head = ["fault", "where", "6.5 or section", "caught by", "first that deviates"]
        parts.append(f"{source(found, link)} {caught}\n\n{grid(head, rows, words=5)}")
    return "\n\n".join(parts) or absent("python -m tests.gate.faults --out results")


BLOCKS: dict[str, Callable[[], str]] = {"levels": levels, "faults": faults}
