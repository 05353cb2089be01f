"""`benthic bench eval`: bits per byte against a plain sum over the model's logits, documents, the command."""

import json
import lzma
import math
from pathlib import Path

import pytest
import torch

from benthic.bench import eval as evaluation
from benthic.cache.storage import Storage
from benthic.cli import main
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.models.base import Batch
from benthic.text.prompt import ChatEncoder

DOCUMENTS = [
    {"kind": "story", "prompt": "Tell me of a fox.", "response": "A fox ran home."},
    {"kind": "qa", "prompt": "What is 2 + 2?", "response": "4, that is four — quatre."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "valid.jsonl.xz"
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(document) + "\n" for document in DOCUMENTS)
    return path


@torch.inference_mode()
def plain_nats(llm: LLM, head: list[int], ids: list[int]) -> float:
    """- sum of log p over ids[len(head):], the whole row in one forward, no engine."""
    storage = Storage(llm.model.cache_spec, 3, 2)
    count = len(ids)
    history = [[ids[p - 1 - i] if p > i else -1 for i in range(3)] for p in range(count)]
    batch = Batch(
        ids=torch.tensor(ids),
        positions=torch.arange(count),
        history=torch.tensor(history),
        images=None,
        embeds=None,
        starts=(0, count),
        firsts=(0,),
        slots=(1,),
        tables=((1, 2),),
        logit_rows=torch.arange(count),
    )
    logits = llm.model.logits(llm.model.forward(batch, llm.model.memory(storage, batch)).hidden)
    scores = logits.double().log_softmax(-1)
    return -sum(float(scores[p - 1, ids[p]]) for p in range(len(head), count))


def test_bits_are_the_plain_sum_over_response_and_end_token(corpus: Path) -> None:
    with LLM("minnow", numerics="float", cpu__threads=1) as llm:
        seen: list[int] = []
        got = evaluation.bits(llm, evaluation.read_documents(corpus), seen.append)
        assert llm.tokenizer is not None
        encoder, want, tokens = ChatEncoder(llm.tokenizer), 0.0, 0
        for document in DOCUMENTS:
            head = list(encoder.encode([{"role": "user", "content": document["prompt"]}]).ids)
            response = [*llm.tokenizer.encode(document["response"], bos=False), llm.tokenizer.eos_id]
            want += plain_nats(llm, head, head + response)
            tokens += len(response)
    assert seen == [2]
    assert (got.documents, got.tokens) == (2, tokens)
    assert got.bytes == sum(len(document["response"].encode()) for document in DOCUMENTS)
    assert got.nats == pytest.approx(want, abs=1e-3)
    assert got.per_byte == pytest.approx(want / math.log(2) / got.bytes, rel=1e-5)
    assert got.perplexity == pytest.approx(math.exp(want / tokens), rel=1e-4)


def test_a_bad_document_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "valid.jsonl"
    path.write_text(json.dumps(DOCUMENTS[0]) + '\n{"kind": "story"}\n')
    assert len(list(evaluation.read_documents(path, 1))) == 1
    with pytest.raises(BenchError, match=r"valid\.jsonl, line 2 is no JSON object with kind, prompt and response"):
        list(evaluation.read_documents(path))


@pytest.mark.parametrize("name", ["absent.jsonl", "cut.jsonl.xz"])
def test_an_unreadable_file_is_one_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.startswith("cut"):
        path.write_bytes(lzma.compress(json.dumps(DOCUMENTS[0]).encode() * 50)[:-30])
    with pytest.raises(BenchError, match=r"cannot read the documents"):
        list(evaluation.read_documents(path))


def test_the_command_writes_its_report(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "eval", "--data", str(corpus), "--stories", "1", "--json", "--out", str(tmp_path / "results")]
    assert main.main([*words, "--model", "minnow", "--cpu.threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    (saved,) = (tmp_path / "results").rglob("eval-minnow-*.json")
    assert json.loads(saved.read_text()) == found
    assert found["documents"] == 2
    assert 0.1 < found["measures"][0]["value"] < 5
    (story,) = found["stories"]
    assert story["prompt"] == DOCUMENTS[0]["prompt"]
    assert len(story["text"]) > 20
