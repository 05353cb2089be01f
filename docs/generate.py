"""Write the generated pages and the tables of others, or with --check say which no longer match their sources."""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import gate_tables
import kernel_tables
import loop_tables
import minnow_tables
import schedule_tables

from benthic import config, metrics

FOLDER = Path(__file__).parent
BLOCK = re.compile(r"^(<!-- generated: (.+) -->\n)(?:.*\n)*?(<!-- end -->)$", re.MULTILINE)


def tables(name: str, blocks: Mapping[str, Callable[[], str]]) -> Callable[[], str]:
    """A page with its tables made anew; the text around them is written by hand."""

    def render() -> str:
        page = (FOLDER / name).read_text(encoding="utf-8")
        return BLOCK.sub(lambda at: f"{at[1]}\n{blocks[at[2]]()}\n\n{at[3]}", page)

    return render


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": config.markdown,
    "metrics.md": metrics.markdown,
    "kernels.md": tables("kernels.md", kernel_tables.BLOCKS),
    "../README.md": tables("../README.md", kernel_tables.README | minnow_tables.README),
    "cpu.md": tables("cpu.md", kernel_tables.OF_CPU),
    "minnow.md": tables("minnow.md", minnow_tables.OF_MINNOW),
    "correctness.md": tables("correctness.md", gate_tables.BLOCKS),
    "determinism.md": tables("determinism.md", loop_tables.BLOCKS),
    "cache.md": tables("cache.md", loop_tables.OF_CACHE),
    "scheduling.md": tables("scheduling.md", schedule_tables.BLOCKS),
}


def main() -> int:
    check, stale = "--check" in sys.argv[1:], 0
    for name, render in PAGES.items():
        path, text = FOLDER / name, render()
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            print(f"docs/{name} does not match its sources; run `make docs` and commit it", file=sys.stderr)
            stale += 1
        elif not check:
            path.write_text(text, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
