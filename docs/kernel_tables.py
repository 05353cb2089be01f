"""The generated tables of kernels.md and the README's of GPUs: what was measured, from the files of results/.

A table whose file is not there yet says which command makes it.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
GPU, CPU = "nvidia-h200", "amd-epyc-2-cores"
Found = dict[str, Any]


def read(name: str, *machines: str) -> tuple[Found, str] | None:
    """A result of the first machine that has it, and the link to it; None: of none."""
    for machine in machines or (GPU,):
        path = RESULTS / machine / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8")), f"../results/{machine}/{name}.json"
    return None


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table; all but the first `words` columns are numbers."""
    bars = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, bars, *rows))


def absent(command: str) -> str:
    return f"Not measured yet: `{command}`."


def source(found: Found, link: str) -> str:
    machine = found["hardware"]
    commit = (found["commit"] or "unknown")[:12] + ("+" if (found["commit"] or "").endswith("+") else "")
    return f"From [{link.rsplit('/', 1)[1]}]({link}): {machine['gpu'] or machine['cpu']}, commit {commit}."


def percent(share: float) -> str:
    """Three digits that count."""
    return f"{100 * share:.3g} %"


# ---- number formats --------------------------------------------------------------------------------------------------

NUMERICS = "benthic bench numerics --data valid.jsonl.xz --device auto"


def by_value() -> str:
    """Schemes by their definitions; the same on any device but for the draw of random numbers."""
    got = read("numerics-minnow", GPU, CPU)
    if got is None:
        return absent(NUMERICS)
    found, link = got
    rows: list[list[str]] = []
    for part, prefix in (("synthetic", ""), ("products", "minnow: ")):
        for name, values in found.get(part, {}).items():
            schemes = [percent(values["schemes"][scheme]["error"]) for scheme in ("per 128", "per token", "carried")]
            spread = values["spread"]
            helped = [percent(part["error"]) for part in (values["guards"]["10"], values["in two"])]
            far = [percent(spread["above"]["10"]), str(spread["farthest"])]
            rows.append([f"{prefix}{name}", *schemes, *helped, *far])
    head = ("product", "per 128", "per token", "carried", "guard 10", "in two", "tokens above 10", "farthest, binades")
    return f"{source(found, link)}\n\n{grid(head, rows)}"


def on_device() -> str:
    got = read("numerics-minnow")
    if got is None:
        return absent(NUMERICS)
    found, link = got
    ways = list(found["sums"]["centred"])
    sums = grid(
        ("values", *ways), ([name, *(percent(errors[way]) for way in ways)] for name, errors in found["sums"].items())
    )
    kernels = grid(
        ("product, result in bf16", "exact", "carried"),
        (
            [name, *(percent(errors[way]) if way in errors else "" for way in ("exact", "carried"))]
            for name, errors in found["kernels"].items()
        ),
    )
    return f"{source(found, link)}\n\n{sums}\n\n{kernels}"


def in_a_model() -> str:
    got = read("numerics-minnow", GPU, CPU)
    if got is None:
        return absent(NUMERICS)
    found, link = got
    rows: list[list[str]] = []
    for name, values in found["profiles"].items():
        logits = values["logits"]
        numbers = [f"{logits['kl']:.2g}", f"{logits['kl 99 %']:.2g}", percent(logits["same first token"])]
        rows.append([name, *numbers, f"{logits['cosine min']:.5f}", percent(max(values["layers"]))])
    head = ("compared", "KL, nats", "KL, 99th percentile", "same first token", "cosine, least", "worst layer's error")
    users = grid(
        ("profile", "bits per byte", "needles"),
        (
            [name, f"{values['bits per byte']:.4f}" if "bits per byte" in values else "", percent(values["needles"])]
            for name, values in found["users"].items()
            if "needles" in values
        ),
    )
    return f"{source(found, link)}\n\n{grid(head, rows)}\n\n{users}"


# ---- kernels ---------------------------------------------------------------------------------------------------------


OPS = {"head": "linear, head", "candidates": "select_records, candidates"}  # rows whose op is in others too


def op_of(case: Found) -> str:
    return OPS[case["row"]] if case["row"] in OPS else case["op"]


def shares() -> str:
    """An op and variant a line: worst and best share of the floor, and how many targets are met."""
    got = read("kernel")
    if got is None:
        return absent("benthic bench kernel")
    found, link = got
    groups: dict[tuple[str, str], list[Found]] = {}
    for case in found["cases"]:
        groups.setdefault((op_of(case), case["variant"]), []).append(case)
    rows: list[list[str]] = []
    for (op, variant), cases in groups.items():
        ran = [case for case in cases if "error" not in case]
        wanted = [case["met"] for case in ran if case["met"] is not None]
        spans = [span(case["share"] for case in ran if case["phase"] == phase) for phase in ("decode", "prefill")]
        met = f"{sum(wanted)} of {len(wanted)}" if wanted else ""
        rows.append([f"`{op}`", variant, *spans, met, str(len(cases) - len(ran) or "")])
    head = ("op", "variant", "of the floor, decode", "prefill", "targets met", "failed")
    return f"{source(found, link)}\n\n{grid(head, rows, 2)}"


def fixed() -> str:
    """Products of few rows as a fixed time and a rate, by least squares of relative errors over the weights."""
    got = read("kernel")
    if got is None:
        return absent("benthic bench kernel")
    found, link = got
    rows: list[list[str]] = []
    for variant in ("exact", "fast"):
        for few in (1, 16, 64):
            points = [
                (case["bytes"], case["cold_us"])
                for case in found["cases"]
                if case["op"] == "linear" and case["variant"] == variant and case["shape"].endswith(f" M={few}")
                and not case["shape"].startswith("head")
            ]  # fmt: skip
            # us = a + b * bytes, each point weighed by 1 / us
            ones, sizes = [1 / us for _, us in points], [size / us for size, us in points]
            p, q, r = (sum(x * y for x, y in zip(u, v, strict=True)) for u, v in
                       ((ones, ones), (ones, sizes), (sizes, sizes)))  # fmt: skip
            c, d = sum(ones), sum(sizes)
            a, b = (c * r - d * q) / (p * r - q * q), (d * p - c * q) / (p * r - q * q)
            worst = max(abs(a + b * size - us) / us for size, us in points)
            rows.append([variant, f"{few}", f"{a:.1f}", f"{1e-6 / b:.2f}", percent(worst)])
    head = ("variant", "rows", "fixed, us", "TB/s", "farthest from it")
    return f"{source(found, link)}\n\n{grid(head, rows)}"


def span(shares: Iterable[float]) -> str:
    known = [f"{100 * share:.0f}" for share in sorted(shares)]
    return f"{' to '.join(dict.fromkeys((known[0], known[-1])))} %" if known else ""


def times() -> str:
    got = read("kernel")
    if got is None:
        return absent("benthic bench kernel")
    found, link = got
    lines: dict[tuple[str, str, str], list[str]] = {}
    for case in found["cases"]:
        if "error" in case:
            continue
        name, size = parted(case["shape"])
        peers = [f"{peer} {times['cold_us']:.1f}" for peer, times in case["peers"].items() if "cold_us" in times]
        beside = f"; {', '.join(peers)}" if peers else ""
        op = op_of(case)
        lines.setdefault((op, "" if name in op else name, case["variant"]), []).append(
            f"{size}: {case['cold_us']:.1f} ({100 * case['share']:.0f} %{beside})"
        )
    rows = [[f"`{op}` {name}".strip(), variant, "<br>".join(cells)] for (op, name, variant), cells in lines.items()]
    limits = found["ceilings"]
    ceilings = (
        f"Ceilings of that run: reading {limits['read_bytes'] / 1e12:.2f} TB/s, bf16 products "
        f"{limits['bf16_flops'] / 1e12:.0f} TFLOP/s, FP8 {limits['fp8_flops'] / 1e12:.0f} TFLOP/s, host link "
        f"{limits['link_bytes'] / 1e9:.0f} GB/s, a kernel in a graph {1e6 * limits['launch_seconds']:.1f} us."
    )
    head = ("op", "variant", "us cold (share of the floor; peers, us)")
    return f"{source(found, link)} {ceilings}\n\n{grid(head, rows, 3)}"


def parted(shape: str) -> tuple[str, str]:
    """What a case is of, and its size: "wq_b 32768x1280 M=16" -> "wq_b 32768x1280", "M=16"."""
    words = shape.split(" ")
    at = next((i for i, word in enumerate(words) if word[:2] in ("M=", "T=", "R=", "n=")), None)
    return ("", shape) if at is None else (" ".join(words[:at]), " ".join(words[at:]))


def rank() -> str:
    parts: list[str] = []
    for numerics in ("production", "fast"):
        got = read(f"rank-ep8-{numerics}")
        command = f"benthic bench rank --ranks 8 --numerics {numerics}"
        parts.append(f"### Profile {numerics}\n\n{steps(*got) if got else absent(command)}")
    return "\n\n".join(parts)


def steps(found: Found, link: str) -> str:
    rows: list[list[str]] = []
    for step in found["steps"]:
        if "error" in step:
            continue
        context = f"{step['context'] / 1024:.0f}K"
        idle = percent(step["idle_share"]) if "idle_share" in step else ""
        rates = [f"{step[key]:.0f}" for key in ("tokens_per_second", "tokens_per_second_a_user")]
        took = [f"{step['step_ms']:.2f}", f"{step['floor_ms']:.2f}", f"{step['times_floor']:.2f}"]
        rows.append([f"{step['rows']}", f"{step['requests']}", context, *took, *rates, idle])
    head = ("rows", "requests", "context", "step, ms", "floor, ms", "times floor", "tokens/s", "a user", "idle")
    lines = [source(found, link), "", grid(head, rows, 0)]
    spent = [step for step in found["steps"] if "parts_ms" in step and step["context"] == found["steps"][0]["context"]]
    if spent:
        names = sorted(spent[0]["parts_ms"], key=lambda name: -spent[0]["parts_ms"][name])
        cells = (
            [name, *(f"{step['parts_ms'].get(name, 0):.2f} / {step['floors_ms'].get(name, 0):.2f}" for step in spent)]
            for name in names
        )
        lines += ["", "Where it goes at the first context, ms measured / floor:", ""]
        lines.append(grid(("part", *(f"{step['rows']} rows" for step in spent)), cells))
    whole = {key: found["prefill"][key] for key in ("tokens", "chunk") if key in found["prefill"]}
    for way, timed in found["prefill"].items():
        if isinstance(timed, dict):
            part = whole | timed
            tokens, best = part["tokens"], part["tokens"] / part["floor_seconds"]
            line = f"Prefill of {tokens} tokens, {way}, {part['chunk']} at a time: "
            line += f"{part['tokens_per_second']:.0f} tokens/s, floor {best:.0f}"
            if "launch_seconds" in part:
                line += f"; the host launched for {100 * part['launch_seconds'] / part['seconds']:.0f} % of the time"
            lines += ["", f"{line}."]
    drawn = Path(link).with_suffix(".png")
    if (Path(__file__).parent / drawn).is_file():
        lines += ["", f"![steps by part]({drawn.as_posix()})"]
    return "\n".join(lines)


def on_a_cpu(up: str) -> str:
    """minnow's steps there, beside the estimate and what was asked. up: from the page's folder to the project's."""
    got = read("step-minnow-reference", CPU)
    if got is None:
        return absent("benthic bench step --model minnow --device cpu --peer ftllm")
    found, link = got
    rows: list[list[str]] = []
    for measure in found["measures"]:
        value, estimate, target = measure["value"], measure.get("estimate"), measure.get("target")
        share = "" if estimate is None else percent(value / estimate)
        asked = "" if target is None else f"{'<=' if measure['better'] == 'less' else '>='} {target:g}"
        shown = f"{value:.3g}" if value < 100 else f"{value:.0f}"
        rows.append(
            [measure["name"], shown, measure["unit"], "" if estimate is None else f"{estimate:.0f}", share, asked]
        )
    head = ("", "measured", "", "estimate", "share", "asked")
    return f"{source(found, up + link.removeprefix('../'))}\n\n{grid(head, rows)}"


def rank_in_short() -> str:
    """For the README, from whose folder links start: steps at 32K, and what a prompt takes."""
    rows: list[list[str]] = []
    sources: list[str] = []
    for numerics in ("production", "fast"):
        got = read(f"rank-ep8-{numerics}")
        if got is None:
            continue
        found, link = got
        sources.append(source(found, link.removeprefix("../")))
        for step in found["steps"]:
            if step["context"] == 32768 and "error" not in step:
                what = f"decode step, {step['rows']} rows of {step['requests']} requests"
                took = [f"{step['step_ms']:.1f} ms", f"{step['floor_ms']:.1f} ms", f"{step['times_floor']:.2f}"]
                rates = f"{step['tokens_per_second']:.0f}, {step['tokens_per_second_a_user']:.0f} a user"
                rows.append([numerics, what, *took, rates])
        part = found["prefill"].get("encoder")
        if part is not None:
            speed, least = part["tokens_per_second"], part["floor_seconds"]
            took = [f"{part['seconds']:.2f} s", f"{least:.2f} s", f"{part['seconds'] / least:.2f}", f"{speed:.0f}"]
            rows.append([numerics, f"prefill of {found['prefill']['tokens']} tokens", *took])
    head = ("profile", "what", "measured", "floor", "times", "tokens/s")
    return f"{' '.join(sources)}\n\n{grid(head, rows, 2)}" if rows else absent("benthic bench rank --ranks 8")


# ---- the mode with the same bits, minnow, CPU and GPU ----------------------------------------------------------------


def invariance() -> str:
    got = read("invariance")
    if got is None:
        return absent("benthic bench invariance")
    found, link = got
    lines: dict[tuple[str, str], list[str]] = {}
    for case in found["cases"]:
        name, size = parted(case["shape"])
        cell = f"{case['usual_us']:.1f} {100 * case['cost']:+.0f} %" if "error" not in case else "failed"
        key = (f"`{case['op']}` {'' if name in case['op'] else name}".strip(), case["variant"])
        lines.setdefault(key, []).append(f"{size}: {cell}")
    head = ("op", "variant", "us cold as usual, and what the mode adds")
    return f"{source(found, link)}\n\n{grid(head, ([*key, '<br>'.join(cells)] for key, cells in lines.items()), 3)}"


def minnow() -> str:
    got = read("step-minnow-production")
    if got is None:
        return absent("benthic bench step --device cuda --numerics production")
    found, link = got
    rows: list[list[str]] = []
    for measure in found["measures"]:
        estimate = measure.get("estimate")
        cells = [f"{measure['value']:.4g}", "" if estimate is None else f"{estimate:.4g}", measure["unit"]]
        rows.append([measure["name"], *cells, measure.get("note", "")])
    return f"{source(found, link)}\n\n{grid(('', 'measured', 'estimate', 'unit', ''), rows)}"


def loading() -> str:
    """Files to a device: the loader's own numbers, then what else was tried."""
    got = read("load")
    if got is None:
        return absent("benthic bench load")
    found, link = got
    made = found["checkpoint"]
    told = (
        f"{made['bytes'] / 1e9:.2f} GB, {made['tensors']} tensors in {made['shards']} shards: {made['layers']} layers "
        f"of {made['experts']} experts at the release's widths. Opened in {1e3 * made['open_seconds']:.0f} ms."
    )
    rows: list[list[str]] = []
    for measure in found["measures"]:
        estimate, target = measure.get("estimate"), measure.get("target")
        cells = [f"{measure['value']:.1f}", "" if estimate is None else f"{estimate:.1f}"]
        cells.append("" if target is None else f">= {target:.1f}, {measure['verdict']}")
        rows.append([measure["name"], *cells, measure.get("note", "")])
    return f"{source(found, link)} {told}\n\n{grid(('GB/s', 'measured', 'estimate', 'asked', ''), rows)}"


PROFILES = ("float", "reference", "production", "fast")
COMPARED = ("minnow", "tiny", "tiny_512")


def texts() -> str:
    """Greedy completions, and beside each profile the noise floor: the CPU against its own plain torch."""
    got = [(profile, read(f"text-{profile}-minnow")) for profile in PROFILES]
    known = [(profile, found) for profile, found in got if found is not None]
    if not known:
        return absent("benthic bench all --only text-float,text-production --data valid.jsonl.xz")
    rows: list[list[str]] = []
    for profile, (found, _) in known:
        lines = {line["name"]: line for line in found["profiles"][profile]}
        for of in ("", " (cpu:reference)"):
            if f"KL{of}" not in lines:
                continue
            share = [percent(lines[f"{name}{of}"]["error"]) for name in TEXT[:3]]
            length, kl = (lines[f"{name}{of}"]["error"] for name in TEXT[3:])
            count = lines[f"first token{of}"]["cases"]
            rows.append([profile, "floor" if of else "CPU : GPU", str(count), *share, f"{length:.1f}", f"{kl:.2g}"])
    head = ("profile", "compared", "prompts", "other text", "other at a tie", "same first token", "agreed length", "KL")
    return f"{source(*known[0][1])}\n\n{grid(head, rows, 2)}"


TEXT = ("other text, ties apart", "other text at a tie", "first token", "agreed length", "KL")


def compared() -> str:
    """How many lines of each level are within their bounds, and the one that is nearest to its own."""
    rows: list[list[str]] = []
    sources: list[str] = []
    for model in COMPARED:
        got = read(f"compare-{model}")
        if got is None:
            continue
        found, link = got
        sources.append(source(found, link))
        for profile, lines in found["profiles"].items():
            for level in dict.fromkeys(line["level"] for line in lines):
                bounded = [line for line in lines if line["level"] == level and line["bound"] is not None]
                shares = [(line["error"] / line["bound"], line["name"]) for line in bounded if line["bound"]]
                inside = sum(line["error"] <= line["bound"] for line in bounded)
                share, name = max(shares, default=(0.0, ""))
                if bounded:
                    told = [f"{inside} of {len(bounded)}", name, percent(share) if shares else ""]
                    rows.append([model, profile, level, *told])
    if not rows:
        return absent("benthic bench all --only compare-minnow,compare-tiny,compare-tiny_512")
    head = ("model", "profile", "level", "within bounds", "nearest", "of its bound")
    return f"{' '.join(sources)}\n\n{grid(head, rows, 3)}"


BLOCKS: dict[str, Callable[[], str]] = {
    "by value": by_value,
    "on the device": on_device,
    "in a model": in_a_model,
    "shares": shares,
    "times": times,
    "fixed": fixed,
    "rank": rank,
    "invariance": invariance,
    "minnow": minnow,
    "loading": loading,
    "texts": texts,
    "compared": compared,
}
README: dict[str, Callable[[], str]] = {"rank in short": rank_in_short, "minnow on a CPU": lambda: on_a_cpu("")}
OF_CPU: dict[str, Callable[[], str]] = {"measured": lambda: on_a_cpu("../")}
