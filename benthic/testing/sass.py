"""What the assembler made of a kernel, read for one fault that no run on a CPU can show.

A warp-group matrix instruction that takes an operand from registers reads them after it was issued, until a wait for
its group. Nothing stops an assembler that was told otherwise from writing to them before.
"""

import re
import subprocess
import tempfile
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import triton

_PRODUCT = re.compile(r"[HQI]GMMA\S*\s+R\d+, R(\d+), ")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_WRITE = re.compile(r"(\S+)\s+(?:P\d+, )?R(\d+)\b")
_NO_WRITE = ("ST", "BAR", "SYNCS", "RED", "R2UR", "BRA", "ISETP", "FSETP", "WARP", "ATOMS")  # name no register they set


class _Read(NamedTuple):
    """Registers that an instruction in flight still reads."""

    first: int
    at: int


def listing(cubin: bytes) -> str:
    """Disassembled, with labels."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def overwritten(text: str) -> list[str]:
    """Writes to an operand of a matrix instruction that may not have read it yet, in the loops of a `listing`.

    Each innermost loop is gone through twice, so that what is in flight where it begins again counts.
    """
    steps, loops = _loops(text)
    found: dict[str, None] = {}
    for first, last in loops:
        groups: list[list[_Read]] = []
        begun: list[_Read] = []
        for at in [*range(first, last + 1)] * 2:
            step = re.sub(r"^@!?U?P\w+\s+", "", steps[at])
            if product := _PRODUCT.match(step):
                begun.append(_Read(int(product[1]), at))
            if re.match(r"[HQI]GMMA", step):
                if "gsb0" in step:
                    groups, begun = [*groups, begun], []
            elif wait := _WAIT.match(step):
                left = int(wait[1], 16)
                groups = groups[len(groups) - left :] if left else []
            else:
                for read in chain(*groups, begun):
                    if _writes(step, read.first):
                        found[f"{step} before {steps[read.at]} has read it"] = None
    return list(found)


def _loops(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The instructions, and first and last of each innermost loop with matrix instructions."""
    steps: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(steps)
        if step := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            steps.append(step[1])
    loops: list[tuple[int, int]] = []
    for at, step in enumerate(steps):
        back = re.search(r"BRA `\((\.L_x_\d+)\)", step)
        if back and labels.get(back[1], at) < at and any("GMMA" in inside for inside in steps[labels[back[1]] : at]):
            loops.append((labels[back[1]], at))
    inner = [
        loop
        for loop in loops
        if not any(loop != other and loop[0] <= other[0] <= other[1] <= loop[1] for other in loops)
    ]
    return steps, inner


def _writes(step: str, first: int) -> bool:
    """Does an instruction write to one of the four registers from `first` on?"""
    write = _WRITE.match(step)
    if write is None or write[1].startswith(_NO_WRITE):
        return False
    wide = 4 if ".128" in write[1] else 2 if ".64" in write[1] or "WIDE" in write[1] else 1
    return int(write[2]) <= first + 3 and int(write[2]) + wide - 1 >= first
