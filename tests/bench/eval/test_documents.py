"""Held-out documents: the packaged ones, and what is said of a file that holds none."""

import json
import lzma
from pathlib import Path

import pytest

from benthic.bench.eval.documents import Document, digest, packaged, read_documents
from benthic.errors import BenchError
from benthic.skills.base import Material

LINE = {"kind": "story", "prompt": "Tell me of a fox.", "response": "A fox ran home."}


def test_the_package_carries_documents_of_every_kind() -> None:
    documents = tuple(read_documents(packaged()))
    assert len(documents) == 256
    assert {document.kind for document in documents} == {"story", "qa", "explain", "tips", "dialog", "poem", "code"}
    assert not Material.of((document.prompt, document.response) for document in documents).lacks
    assert digest(documents) == digest((*documents[:255], Document(*documents[255]))) != digest(documents[:255])
    assert packaged().stat().st_size < 64_000


@pytest.mark.parametrize("name", ["valid.jsonl", "valid.jsonl.xz"])
def test_plain_and_packed_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = (json.dumps(LINE) + "\n") * 3
    path.write_bytes(lzma.compress(text.encode()) if name.endswith("xz") else text.encode())
    assert list(read_documents(path)) == [Document(**LINE)] * 3
    assert len(list(read_documents(path, 2))) == 2


def test_a_bad_document_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "valid.jsonl"
    path.write_text(json.dumps(LINE) + '\n{"kind": "story"}\n')
    assert len(list(read_documents(path, 1))) == 1
    with pytest.raises(BenchError, match=r"valid\.jsonl, line 2 is no JSON object with kind, prompt and response"):
        list(read_documents(path))


@pytest.mark.parametrize("name", ["absent.jsonl", "cut.jsonl.xz"])
def test_an_unreadable_file_is_one_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.startswith("cut"):
        path.write_bytes(lzma.compress(json.dumps(LINE).encode() * 50)[:-30])
    with pytest.raises(BenchError, match=r"cannot read the documents"):
        list(read_documents(path))
