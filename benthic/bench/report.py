"""What every bench result carries, and where it is kept: one JSON file a run, under results/<hardware>/."""

import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

import benthic
from benthic.kernels.native import build


class Measure(TypedDict):
    """One number. Lists are in the order in which they were measured."""

    name: str
    value: float
    unit: str
    estimate: NotRequired[float | None]  # worked out from bytes and operations before the measurement, same unit
    target: NotRequired[float | None]  # what the project wants
    better: NotRequired[str]  # "more" or "less"
    samples: NotRequired[list[float]]
    standard_error: NotRequired[float]  # of the value, same unit
    n: NotRequired[int]  # independent samples behind it
    verdict: NotRequired[str]  # "met" or "missed", where there is a target
    note: NotRequired[str]


def hardware() -> dict[str, Any]:
    """The machine, as far as a CPU bench depends on it."""
    names = _cpuinfo("model name") or _cpuinfo("Model") or [platform.machine()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    flags = set((_cpuinfo("flags") or _cpuinfo("Features") or [""])[0].split())
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
    return {
        "cpu": names[0],
        "cores": cores,
        "extensions": [flag for flag in known if flag in flags],
        "memory_bytes": pages,
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def _cpuinfo(key: str) -> list[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key]


def slug(machine: dict[str, Any]) -> str:
    """A folder name for this hardware, as in "amd-epyc-2-cores"."""
    name = machine["gpu"] or machine["cpu"]
    name = re.sub(r"\(.*?\)|@.*|\b(cpu|processor)\b", " ", name, flags=re.IGNORECASE)
    if machine["gpu"] is None:
        name += f" {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str]:
    found = {"benthic": benthic.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    found["numpy"] = metadata.version("numpy")
    native = build.status()
    return found | {"native": native.detail if native.available else f"absent: {native.detail}"}


def commit() -> str | None:
    """Revision of the source tree this package lies in, "+" behind it when files differ; None outside a checkout."""
    folder = Path(benthic.__file__).parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


SECRETS = ("--api-key",)  # flags whose value is no one else's business


def command(words: list[str]) -> str:
    """The command line as it is kept: without folders that only this machine has, and without keys."""
    kept = ["benthic"]
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, _ = word.partition("=")
        if before in SECRETS:
            word = "***"
        elif equals and flag in SECRETS:
            word = f"{flag}=***"
        word = re.sub(r"://[^/@]*@", "://***@", word)
        kept.append(Path(word).name if Path(word).is_absolute() else word)
    return " ".join(kept)


def header(bench: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """All but the numbers, and but `versions`, which can be told once the engine has chosen its kernels."""
    return {
        "bench": bench,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command(sys.argv[1:]),
        "seed": seed,
        "settings": settings,
        "hardware": hardware(),
        "load_before": os.getloadavg()[0],  # other work on the machine spoils the numbers
    }


def save(report: dict[str, Any], folder: Path, name: str) -> Path:
    """Write results/<hardware>/<name>.json; an older file of that name is replaced, history keeps it."""
    path = folder / slug(report["hardware"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def table(measures: list[Measure]) -> str:
    """Lines for a terminal: name, value, estimate, target."""
    lines = [f"{'':<34}{'measured':>12}{'estimate':>12}{'target':>12}"]
    for m in measures:
        estimate, target = m.get("estimate"), m.get("target")
        mark = ""
        if target is not None:
            sign = "<=" if m.get("better") == "less" else ">="
            met = m["value"] <= target if sign == "<=" else m["value"] >= target
            mark = f"{sign} {_short(target)}{'' if met else ' !'}"
        estimated = "" if estimate is None else _short(estimate)
        lines.append(f"{m['name']:<34}{_short(m['value']):>12}{estimated:>12}{mark:>12}  {m['unit']}")
    return "\n".join(lines)


def _short(x: float) -> str:
    return f"{x:,.0f}".replace(",", " ") if abs(x) >= 100 else f"{x:.3g}"
