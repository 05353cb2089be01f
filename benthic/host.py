"""What this process has: memory of the machine that it may use, and code of its own. No torch."""

import hashlib
import os
from functools import cache
from pathlib import Path

import benthic

GROUP = Path("/sys/fs/cgroup")  # of this process, inside a container


def memory_bytes() -> tuple[int, int]:
    """(total, free) of what this process may use: the machine's memory, or its control group's limit if lower.

    What files keep in memory counts as free: it goes when somebody wants the room.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    info = Path("/proc/meminfo")
    if info.exists():
        rows = dict(line.split(":", 1) for line in info.read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    limit = GROUP / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        held = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        files = int(held["file"]) - int(held["shmem"])
        total = min(total, int(text))
        free = min(free, int(text) - int((GROUP / "memory.current").read_text()) + files)
    return total, max(free, 0)


@cache
def source_digest() -> str:
    """Of the package's own code, 16 hexadecimal digits, so that an edited kernel is not taken for the one before."""
    root = Path(benthic.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".c", ".h", ".cu", ".cuh", ".json") and "minnow" not in path.relative_to(root).parts:
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]
