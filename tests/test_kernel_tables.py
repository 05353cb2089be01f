"""The generators of tables in docs/: what they make of result files, and what stands there without them."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HEAD = {"hardware": {"gpu": "A GPU", "cpu": "A CPU"}, "commit": "0123456789abcdef+"}
CEILINGS = {
    "read_bytes": 4.15e12,
    "bf16_flops": 733e12,
    "fp8_flops": 1.25e15,
    "link_bytes": 55e9,
    "launch_seconds": 1e-6,
}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "docs"), *sys.path])
    module = import_module("kernel_tables")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def keep(folder: Path, name: str, found: dict[str, Any]) -> None:
    path = folder / "nvidia-h200" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(HEAD | found))


def test_without_results_each_table_names_its_command(tables: ModuleType) -> None:
    for render in tables.BLOCKS.values():
        assert "Not measured yet: `benthic bench " in render()


def case(op: str, shape: str, phase: str, share: float, **more: Any) -> dict[str, Any]:
    common = {"row": "a row", "variant": "exact", "cold_us": 12.34, "met": None, "peers": {}}
    return common | {"op": op, "shape": shape, "phase": phase, "share": share} | more


def test_kernels(tables: ModuleType, tmp_path: Path) -> None:
    cases = [
        case("linear", "wq_b 32768x1280 M=1", "decode", 0.456, met=True, peers={"cuBLAS": {"cold_us": 20.0}}),
        case("linear", "wq_b 32768x1280 M=16", "decode", 0.6, met=False, peers={"other": {"error": "absent"}}),
        case("linear", "wq_b 32768x1280 M=16", "decode", 0.5, variant="fast"),
        case("linear", "head M=64", "decode", 0.9, row="head"),
        case("rms_norm", "64x1280", "decode", 0.1),
        {"op": "rms_norm", "shape": "4096x1280", "row": "a row", "variant": "exact", "phase": "prefill", "error": "no"},
    ]
    keep(tmp_path, "kernel", {"cases": cases, "ceilings": CEILINGS})
    assert tables.shares().splitlines() == [
        "From [kernel.json](../results/nvidia-h200/kernel.json): A GPU, commit 0123456789ab+.",
        "",
        "| op | variant | of the floor, decode | prefill | targets met | failed |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| `linear` | exact | 46 to 60 % |  | 1 of 2 |  |",
        "| `linear` | fast | 50 % |  |  |  |",
        "| `linear, head` | exact | 90 % |  |  |  |",
        "| `rms_norm` | exact | 10 % |  |  | 1 |",
    ]
    times = tables.times()
    assert "reading 4.15 TB/s, bf16 products 733 TFLOP/s, FP8 1250 TFLOP/s, host link 55 GB/s" in times
    line = "| `linear` wq_b 32768x1280 | exact | M=1: 12.3 (46 %; cuBLAS 20.0)<br>M=16: 12.3 (60 %) |"
    assert line in times.splitlines()
    assert "| `linear, head` | exact | M=64: 12.3 (90 %) |" in times.splitlines()
    assert "| `rms_norm` | exact | 64x1280: 12.3 (10 %) |" in times.splitlines()


def test_numerics(tables: ModuleType, tmp_path: Path) -> None:
    schemes = {name: {"error": 0.037} for name in ("exact", "per 128", "per token")} | {"carried": {"error": 1.234e-6}}
    spread = {"above": {"10": 0.25}, "farthest": 13}
    product = {"schemes": schemes, "guards": {"10": {"error": 1e-7}}, "in two": {"error": 0.0}, "spread": spread}
    logits = {"kl": 0.001234, "kl 99 %": 0.02, "same first token": 0.99, "cosine min": 0.999}
    keep(
        tmp_path,
        "numerics-minnow",
        {
            "synthetic": {"normal": product},
            "products": {"attn.wq_b": product},
            "sums": {"centred": {"bf16 operands": 1e-6, "FP8 operands": 1e-4}},
            "kernels": {"normal": {"carried": 0.00225, "exact": 0.00166}, "uneven": {"carried": 0.002}},
            "profiles": {"reference : fast": {"logits": logits, "layers": [0.01, 0.03]}},
            "users": {"reference": {"bits per byte": 0.61234, "needles": 0.75}, "fast": {}},
        },
    )
    rows = tables.by_value().splitlines()
    assert "| normal | 3.7 % | 3.7 % | 0.000123 % | 1e-05 % | 0 % | 25 % | 13 |" in rows
    assert "| minnow: attn.wq_b | 3.7 % | 3.7 % | 0.000123 % | 1e-05 % | 0 % | 25 % | 13 |" in rows
    rows = tables.on_device().splitlines()
    assert "| centred | 0.0001 % | 0.01 % |" in rows
    assert "| normal | 0.166 % | 0.225 % |" in rows
    assert "| uneven |  | 0.2 % |" in rows
    rows = tables.in_a_model().splitlines()
    assert "| reference : fast | 0.0012 | 0.02 | 99 % | 0.99900 | 3 % |" in rows
    assert "| reference | 0.6123 | 75 % |" in rows


def test_rank(tables: ModuleType, tmp_path: Path) -> None:
    step = {
        "rows": 384,
        "requests": 64,
        "context": 131072,
        "step_ms": 17.234,
        "floor_ms": 15.7,
        "times_floor": 1.0977,
        "tokens_per_second": 13000.4,
        "tokens_per_second_a_user": 203.1,
        "idle_share": 0.004,
        "parts_ms": {"head": 0.5, "experts": 11.0},
        "floors_ms": {"experts": 10.0},
    }
    encoder = {"tokens_per_second": 21000.0, "floor_seconds": 1.0}
    pieces = {"tokens": 4096, "chunk": 512, "seconds": 0.5, "launch_seconds": 0.4}
    pieces |= {"tokens_per_second": 8192.0, "floor_seconds": 0.125}
    prefill = {"tokens": 32768, "chunk": 4096, "encoder": encoder, "all layers in short chunks": pieces}
    prefill["all layers in short chunks, replayed"] = pieces | {"launch_seconds": 0.1}
    steps = [step, {"rows": 64, "context": 4096, "error": "no"}]
    keep(tmp_path, "rank-ep8-fast", {"steps": steps, "prefill": prefill})
    lines = tables.rank().splitlines()
    assert "Not measured yet: `benthic bench rank --ranks 8 --numerics production`." in lines
    assert "| 384 | 64 | 128K | 17.23 | 15.70 | 1.10 | 13000 | 203 | 0.4 % |" in lines
    at = lines.index("| experts | 11.00 / 10.00 |")
    assert lines[at + 1] == "| head | 0.50 / 0.00 |"
    assert "Prefill of 32768 tokens, encoder, 4096 at a time: 21000 tokens/s, floor 32768." in lines
    short = "Prefill of 4096 tokens, all layers in short chunks, 512 at a time: 8192 tokens/s, floor 32768; the host"
    assert f"{short} launched for 80 % of the time." in lines
    assert f"{short.replace('chunks,', 'chunks, replayed,')} launched for 20 % of the time." in lines


def test_invariance_and_minnow(tables: ModuleType, tmp_path: Path) -> None:
    cases = [
        {"op": "moe", "shape": "T=1", "variant": "exact", "usual_us": 100.0, "cost": 0.07},
        {"op": "moe", "shape": "T=64", "variant": "exact", "error": "no"},
        {"op": "linear", "shape": "head M=1", "variant": "fast", "usual_us": 9.0, "cost": -0.01},
    ]
    keep(tmp_path, "invariance", {"cases": cases})
    assert tables.invariance().splitlines()[2:] == [
        "| op | variant | us cold as usual, and what the mode adds |",
        "| --- | --- | --- |",
        "| `moe` | exact | T=1: 100.0 +7 %<br>T=64: failed |",
        "| `linear` head | fast | M=1: 9.0 -1 % |",
    ]
    measures = [{"name": "decode, batch 1", "value": 774.4, "unit": "tokens/s", "estimate": 900.0, "note": "so"}]
    keep(tmp_path, "step-minnow-production", {"measures": measures})
    assert tables.minnow().splitlines()[-1] == "| decode, batch 1 | 774.4 | 900 | tokens/s | so |"


def line(level: str, name: str, error: float, bound: float | None = None, cases: int = 500) -> dict[str, Any]:
    return {"level": level, "name": name, "cases": cases, "error": error, "bound": bound, "unit": "x"}


def test_cpu_and_gpu(tables: ModuleType, tmp_path: Path) -> None:
    lines = [line("op", "linear", 0.5, 2.0), line("op", "route", 0.0, 0.01), line("layer", "layer 0", 3e-3, 2e-3)]
    keep(tmp_path, "compare-tiny", {"profiles": {"fast": [*lines, line("logits", "KL", 0.1)]}})
    assert tables.compared().splitlines()[-2:] == [
        "| tiny | fast | op | 2 of 2 | linear | 25 % |",
        "| tiny | fast | layer | 0 of 1 | layer 0 | 150 % |",
    ]
    values = (0.25, 0.01, 0.94, 50.24, 0.0123)
    text = [line("text", name, value) for name, value in zip(tables.TEXT, values, strict=True)]
    floor = [part | {"name": f"{part['name']} (cpu:reference)", "cases": 64} for part in text]
    keep(tmp_path, "text-production-minnow", {"profiles": {"production": [*text, *floor]}})
    assert tables.texts().splitlines()[-2:] == [
        "| production | CPU : GPU | 500 | 25 % | 1 % | 94 % | 50.2 | 0.012 |",
        "| production | floor | 64 | 25 % | 1 % | 94 % | 50.2 | 0.012 |",
    ]


def test_gate(tables: ModuleType, tmp_path: Path) -> None:
    gate = import_module("gate_tables")
    assert gate.levels() == "Not measured yet: `benthic verify minnow --fresh --out results`."
    assert gate.faults() == "Not measured yet: `python -m tests.gate.faults --out results`."

    def level(name: str, *margins: float) -> dict[str, Any]:
        lines = [{"bound": 1.0, "margin": margin} for margin in margins]
        return {"level": name, "seconds": 1.26, "lines": [*lines, {"bound": None, "margin": 0.0}]}

    keep(tmp_path, "gate-minnow-reference", {"levels": [level("bytes"), level("ops", 0.04, 0.5)]})
    keep(tmp_path, "gate-minnow-production", {"levels": [level("ops", -2.0)]})
    assert gate.levels().splitlines()[2:] == [
        "| level | reference, GPU | production, GPU |",
        "| --- | ---: | ---: |",
        "| `bytes` | 1.3 s, 1 |  |",
        "| `ops` | 1.3 s, 3, 4 % | 1.3 s, 2, -200 % |",
        "| together | 2.5 s | 1.3 s |",
    ]
    faults = [
        {"fault": "a", "kind": "kernel", "guards": "2.5", "level": "ops", "line": "attend"},
        {"fault": "b", "kind": "engine", "guards": "-", "level": None, "line": ""},
    ]
    keep(tmp_path, "gate-faults", {"faults": faults, "caught": 1})
    assert gate.faults().splitlines()[0].endswith("commit 0123456789ab+. 1 of 2 caught.")
    assert gate.faults().splitlines()[-2:] == [
        "| a | kernel | 2.5 | `ops` | attend |",
        "| b | engine | - | **not caught** |  |",
    ]


def test_minnow(tables: ModuleType, tmp_path: Path) -> None:
    minnow = import_module("minnow_tables")
    assert minnow.bars("") == minnow.parts("") == "Not measured yet: `benthic bench eval --data valid.jsonl.xz`."
    share = {"unit": "share right", "n": 64, "standard_error": 0.012}
    measures: list[dict[str, Any]] = [
        {"name": "bits per byte", "value": 0.61234, "unit": "bits/byte", "target": 0.62, "better": "less"},
        share | {"name": "needle among 512 tokens", "value": 0.94, "target": 0.95, "better": "more"},
        share | {"name": "needle among 512 tokens, dense", "value": 1.0},
        share | {"name": "needle among 512 tokens, random", "value": 0.02, "target": 0.1, "better": "less"},
        {"name": "perplexity", "value": 5.3, "unit": "per token"},
    ]
    told = [
        {"prompt": f"Story {i}", "temperature": t, "seed": i, "text": f"One.\n\nTwo {i}.\n", "loops": i == 1}
        for t in (0.0, 0.8)
        for i in range(3)
    ]
    found = {
        "measures": measures,
        "suites": {
            "bits": {"measures": measures[:1]},
            "ladder": {"measures": measures[1:3]},
            "stories": {"samples": told},
        },
    }
    path = tmp_path / "amd-epyc-2-cores" / "eval-minnow-reference.json"
    path.parent.mkdir()
    path.write_text(json.dumps(HEAD | found))
    assert minnow.bars("").splitlines()[0].startswith("From [eval-minnow-reference.json](results/amd-epyc-2-cores/")
    assert minnow.bars("../").splitlines()[4:] == [
        "| bits per byte | 0.612 | <= 0.62 | met |  |",
        "| needle among 512 tokens | 94.0 ± 1.2 % | >= 95 % | missed | dense 100.0 ± 1.2 %; random 2.0 ± 1.2 % |",
    ]
    assert minnow.parts("../").splitlines()[4:] == [
        "| `bits` | bits per byte | 0.612 | bits/byte |  |",
        "| `ladder` | needle among 512 tokens | 94.0 ± 1.2 % | share right | 64 |",
        "|  | needle among 512 tokens, dense | 100.0 ± 1.2 % | share right | 64 |",
    ]
    first, second = "**Story 0** (seed 0)\n\n> One.\n>\n> Two 0.", "**Story 1** (seed 1, falls into a loop)"
    assert minnow.stories(2) == f"{first}\n\n{second}\n\n> One.\n>\n> Two 1."


def test_loop(tables: ModuleType, tmp_path: Path) -> None:
    loop = import_module("loop_tables")
    command = "Not measured yet: `benthic bench step --profile --model minnow --device cpu`."
    assert loop.loop() == loop.mode() == command

    def row(*values: float) -> dict[str, float]:
        return dict(
            zip(("one by one", "ahead", "one by one, deterministic", "ahead, deterministic"), values, strict=True)
        )

    table = {
        "decode, batch 32, tokens/s": row(1000.0, 1500.0, 800.0, 1500.0),
        "plan, batch 32, us": row(50.0, 60.0, 1, 1),
        "prefill, 64 tokens, tokens/s": row(3000.0, 3000.0, 3000.0, 2000.0),
    }
    keep(tmp_path, "loop-minnow-reference", {"table": table, "threads": 1})
    assert loop.loop().splitlines()[2:4] == [
        "| decode, tokens/s | 32 | 1 000 | 1 500 |",
        "| plan, us | 32 | 50.0 | 60.0 |",
    ]
    assert loop.mode().splitlines()[2:6] == [
        "| decode, batch 32, one by one | 1 000 | 800 | +25.0 % |",
        "| decode, batch 32, ahead | 1 500 | 1 500 | +0.0 % |",
        "| prefill, 64 tokens, one by one | 3 000 | 3 000 | +0.0 % |",
        "| prefill, 64 tokens, ahead | 3 000 | 2 000 | +50.0 % |",
    ]


def test_a_fixed_part_and_a_rate_are_found_again(tables: ModuleType, tmp_path: Path) -> None:
    def case(variant: str, rows: int, nbytes: float, us: float, name: str = "a") -> dict[str, Any]:
        return {"op": "linear", "variant": variant, "shape": f"{name} 1x1 M={rows}", "bytes": nbytes, "cold_us": us}

    sizes = (1e6, 4e6, 2e7, 9e7)
    cases = [case(v, m, size, 5.0 + size / 2e6) for v in ("exact", "fast") for m in (1, 16, 64) for size in sizes]
    cases += [case("exact", 1, 1e6, 900.0, "head"), case("exact", 384, 1e6, 900.0)]
    keep(tmp_path, "kernel", {"cases": cases})
    rows = [line for line in tables.fixed().splitlines() if line.startswith("| exact")]
    assert [row.split("|")[2:5] for row in rows] == [[f" {m} ", " 5.0 ", " 2.00 "] for m in (1, 16, 64)]


def test_the_readme_has_steps_at_32k_and_prompts(tables: ModuleType, tmp_path: Path) -> None:
    assert "Not measured yet" in tables.rank_in_short()
    step = {"rows": 64, "requests": 64, "step_ms": 20.0, "floor_ms": 10.0, "times_floor": 2.0}
    step |= {"tokens_per_second": 3200.0, "tokens_per_second_a_user": 50.0}
    prefill = {"tokens": 32768, "encoder": {"seconds": 2.0, "tokens_per_second": 16384.0, "floor_seconds": 0.5}}
    steps = [step | {"context": 4096, "rows": 1}, step | {"context": 32768}, {"context": 32768, "error": "it failed"}]
    keep(tmp_path, "rank-ep8-fast", {"steps": steps, "prefill": prefill})
    text = tables.rank_in_short()
    assert "(results/nvidia-h200/rank-ep8-fast.json)" in text, "links start at the README"
    assert [line for line in text.splitlines() if line.startswith("| fast")] == [
        "| fast | decode step, 64 rows of 64 requests | 20.0 ms | 10.0 ms | 2.00 | 3200, 50 a user |",
        "| fast | prefill of 32768 tokens | 2.00 s | 0.50 s | 4.00 | 16384 |",
    ]
