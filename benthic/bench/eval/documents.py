"""Held-out documents: what is scored, and the prose that generated tasks are built from.

The package carries the first 256 documents of the corpus's `valid.jsonl.xz`, which no training reads, so that every
suite runs on an installed package alone. They were made with SmolLM2-135M-Instruct (Apache-2.0), as all of the corpus.
"""

import hashlib
import json
import lzma
from collections.abc import Iterator
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from benthic.errors import BenchError


class Document(NamedTuple):
    kind: str  # "story", "qa", "explain", "tips", "dialog", "poem" or "code"
    prompt: str
    response: str


def packaged() -> Path:
    with as_file(files("benthic.bench.eval") / "documents.jsonl.xz") as path:
        return path


def read_documents(path: Path, limit: int | None = None) -> Iterator[Document]:
    """JSON lines of {"kind", "prompt", "response"}, plain or .xz; the first `limit`.

    Raises BenchError naming the file, or the line that is not a document.
    """
    opened = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, limit), 1):
                try:
                    row = json.loads(line)
                    yield Document(str(row["kind"]), str(row["prompt"]), str(row["response"]))
                except (ValueError, KeyError, TypeError) as error:
                    raise BenchError(
                        "text", f"{path}, line {number} is no JSON object with kind, prompt and response: {error!r}"
                    ) from error
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise BenchError("text", f"cannot read the documents {path}: {error}") from error


def digest(documents: tuple[Document, ...]) -> str:
    """16 hex digits that change with any character of them."""
    return hashlib.sha256(json.dumps(documents, ensure_ascii=False).encode()).hexdigest()[:16]
