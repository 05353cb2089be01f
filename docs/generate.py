"""Write the generated pages, or with --check say which of them no longer match the code."""

import sys
from pathlib import Path

from benthic import config, metrics

PAGES = {"configuration.md": config.markdown, "metrics.md": metrics.markdown}


def main() -> int:
    check, stale = "--check" in sys.argv[1:], 0
    for name, render in PAGES.items():
        path, text = Path(__file__).parent / name, render()
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            print(f"docs/{name} does not match the code; run `make docs` and commit it", file=sys.stderr)
            stale += 1
        elif not check:
            path.write_text(text, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
