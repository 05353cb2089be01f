"""The generated tables of scheduling.md: simulations, from the files of results/."""

from collections.abc import Callable

from kernel_tables import CPU, absent, grid, read, source


def policies(name: str, command: str) -> str:
    """Every trace and policy of one machine, and what is asked of ours."""
    result = read(name, CPU)
    if result is None:
        return absent(command)
    found, link = result
    rows: list[list[str]] = []
    for run in found["runs"]:
        m = run["measures"]
        cells = [f"{1e3 * m[key]:.0f}" for key in ("itl_p50", "itl_p99", "itl_max")]
        cells += [f"{m[key]:.2f}" for key in ("ttft_p50", "ttft_p99", "longest_wait")]
        cells += [f"{m['output_tokens_per_second']:.0f}"]
        rows.append([run["scenario"], run["policy"], *cells])
    head = ["trace", "policy", "ITL p50, ms", "p99", "longest", "TTFT p50, s", "p99", "longest wait, s", "tokens/s"]
    asked = [f"{m['name']}: {m['value']:.2f} (at most {m['target']:g}, {m['verdict']})" for m in found["measures"]]
    asked = [text for text, m in zip(asked, found["measures"], strict=True) if m["unit"] == "times"]
    unanswered = sum(run["measures"]["unanswered"] for run in found["runs"])
    told = f"Asked of `ours`: {'; '.join(asked)}. Requests without an answer, over all runs: {unanswered}."
    return f"{grid(head, rows, 2)}\n\n{told} {source(found, link)}"


def tenants() -> str:
    """What the tenant beside a flood waits for its first token."""
    return _kinds("tenants", "ttft_other", "of the other tenant")


def priorities() -> str:
    """What a request of lower priority waits for while there are more of the better one than there is time for."""
    result = read("sim-h200", CPU)
    if result is None:
        return absent("benthic bench sim")
    runs = [run for run in result[0]["runs"] if run["scenario"] == "priorities"]
    keys = ("longest_wait_batch", "longest_wait_chat", "ttft_chat_p50")
    rows = [[run["policy"], *(f"{run['measures'][key]:.1f}" for key in keys)] for run in runs]
    return grid(["policy", "longest wait of priority 2, s", "of priority 0", "TTFT p50 of priority 0, s"], rows)


def memory() -> str:
    """What little memory costs."""
    result = read("sim-h200", CPU)
    if result is None:
        return absent("benthic bench sim")
    found, _ = result
    rows = [
        [
            run["policy"],
            str(run["measures"]["preemptions"]),
            f"{run['measures']['rows_again'] / 1e3:.0f}",
            f"{run['measures']['itl_max']:.0f}",
            f"{run['measures']['output_tokens_per_second']:.0f}",
        ]
        for run in found["runs"]
        if run["scenario"] == "little memory"
    ]
    return grid(["policy", "preemptions", "rows again, thousands", "longest gap, s", "tokens/s"], rows)


def _kinds(scenario: str, key: str, whose: str) -> str:
    result = read("sim-h200", CPU)
    if result is None:
        return absent("benthic bench sim")
    found, _ = result
    runs = [run for run in found["runs"] if run["scenario"] == scenario]
    rows = [[run["policy"], *(f"{run['measures'][f'{key}_{p}']:.2f}" for p in ("p50", "p99"))] for run in runs]
    return grid(["policy", f"TTFT p50 {whose}, s", "p99"], rows)


def recorded() -> str:
    """One trace answered by the engine, beside simulations of that run."""
    result = read("recorded-minnow", CPU)
    if result is None:
        return absent("benthic bench sim --recorded --cpu.threads 1")
    found, link = result
    rows = [
        [
            ", ".join(filter(None, (m["name"], m["unit"]))),
            *(f"{m[key]:.3g}" if m[key] < 100 else f"{m[key]:.0f}" for key in ("value", "estimate")),
            f"{m['low']:.3g} to {m['high']:.3g}" if m["high"] < 100 else f"{m['low']:.0f} to {m['high']:.0f}",
            f"{m['estimate'] / m['value']:.2f}" if m["value"] else "",
        ]
        for m in found["measures"]
    ]
    head = ["", "recorded", f"simulated, middle of {len(found['simulated'])}", "lowest to highest", "ratio"]
    trace, machine = found["trace"], found["machine"]
    told = (
        f"{trace['requests']} requests, {trace['prompt_tokens']} tokens of prompts and {trace['output_tokens']} of "
        f"answers. Eight of ten steps took from {-100 * machine['errors']['0.1']:.0f} % less to "
        f"{100 * machine['errors']['0.9']:.0f} % more than the fitted model says; load of the machine "
        f"{found['load_before']:.1f} before, {found['load_after']:.1f} after."
    )
    picture = link.replace(".json", ".png")
    shown = f"![Gaps and first tokens, recorded and simulated]({picture})"
    return f"{shown}\n\n{grid(head, rows)}\n\n{told} {source(found, link)}"


BLOCKS: dict[str, Callable[[], str]] = {
    "h200": lambda: policies("sim-h200", "benthic bench sim"),
    "here": lambda: policies("sim-minnow", "benthic bench sim --machine here"),
    "recorded": recorded,
    "tenants": tenants,
    "priorities": priorities,
    "memory": memory,
}
