"""Held-out measures against the same numbers taken document by document from the graph's own logits."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benthic.testing.tokenizers import build_tokenizer
from benthic.text.tokenizer import Tokenizer
from benthic.train import data, evaluate, loop
from benthic.train.evaluate import Evaluator, Score
from benthic.train.memory import Mode
from tests.train.conftest import random_masters
from tests.train.small import small_trainer

LENGTH = 24
SETTINGS = loop.Settings(rows=2, length=LENGTH, needle_rows=0, copy_rows=0, index_rows=0)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[loop.Trainer, Evaluator, Tokenizer, list[list[int]]]:
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = build_tokenizer(folder)
    ids = loop.Ids.of(tokenizer)
    trainer = small_trainer(SETTINGS, ids)
    random_masters(trainer, 5)
    trainer.optimiser.publish(quantised=False)
    plain = [id for id in range(3, 512) if id not in tokenizer.special_ids.values()]
    rng = np.random.default_rng(0)
    documents = []
    for question, answer in ((3, 5), (4, 1), (2, 9), (6, 0), (30, 4)):  # the last is cut before its answer
        body = rng.choice(plain, question + answer).tolist()
        documents.append([ids.bos, *body[:question], ids.think_close, *body[question:], ids.eos])
    flat = np.array([id for document in documents for id in document], dtype=np.uint16)
    data.write_ids(folder / "part", flat)
    names = ("prose.valid", "copy.valid", "needle-512.valid")
    parts = {name: ["part"] for name in names}
    tokens, counts = dict.fromkeys(names, len(flat)), dict.fromkeys(names, 5)
    manifest = data.Manifest(data.FORMAT, 0, 512, parts, tokens, counts, 0)
    return trainer, Evaluator(trainer, folder, manifest, tokenizer), tokenizer, documents


def by_hand(trainer: loop.Trainer, tokenizer: Tokenizer, documents: list[list[int]], topk: bool) -> dict[str, Any]:
    nats = tokens = size = right = 0.0
    for document in documents:
        document = document[:LENGTH]
        row = torch.tensor([document + [trainer.ids.pad] * (LENGTH - len(document))]).expand(2, -1)
        with trainer.kernels.installed(), torch.no_grad():
            hidden, _ = trainer.hidden(row, Mode(topk, 0))
            logits = F.linear(hidden.float(), trainer.model.head.weight.float())[:LENGTH]
        if trainer.ids.think_close not in document:
            continue
        at = range(document.index(trainer.ids.think_close), len(document) - 1)
        wanted = torch.tensor([document[p + 1] for p in at])
        nats += float(F.cross_entropy(logits[list(at)], wanted, reduction="sum"))
        tokens += len(wanted)
        size += len(b"".join(tokenizer.token_bytes(id) for id in wanted.tolist() if id != trainer.ids.eos))
        right += bool((logits[list(at)].argmax(-1) == wanted).all())
    return {"nats": nats, "tokens": tokens, "bytes": size, "exact": right / len(documents)}


@pytest.mark.parametrize("topk", [False, True])
def test_a_part_is_scored_document_by_document(setting: Any, topk: bool) -> None:
    """Five documents in batches of two: the last batch is filled up, and the filler does not count."""
    trainer, evaluator, tokenizer, documents = setting
    with trainer.kernels.installed():
        score = evaluator.score("prose.valid", topk=topk)
    want = by_hand(trainer, tokenizer, documents, topk)
    assert (score.documents, score.tokens, score.response_bytes) == (5, want["tokens"], want["bytes"])
    assert score.nats == pytest.approx(want["nats"], rel=1e-3)
    assert score.exact == want["exact"]


def test_an_answer_counts_when_all_of_it_is_right(setting: Any) -> None:
    """A head that knows the answers of the first documents by heart."""
    trainer, evaluator, _, documents = setting
    known: list[tuple[int, int]] = []  # (row id, answer): what `head_scores` is told is right

    def rigged(hidden: torch.Tensor, head: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = seen.pop(0)
        right = torch.ones_like(ids, dtype=torch.bool)
        for row, position in known:
            right[(ids[:, 1] == documents[row][1]), position] = False
        return torch.ones(wanted.shape), right.flatten()

    seen: list[torch.Tensor] = []
    before = trainer.kernels.piece

    def watched(ids: torch.Tensor, topk: bool) -> torch.Tensor:
        seen.append(ids)
        trainer.kernels.piece = lambda fn: rigged if fn is evaluate.head_scores else before(fn)
        try:
            return Evaluator._batch(evaluator, ids, topk)
        finally:
            trainer.kernels.piece = before

    evaluator._batch = watched
    try:
        with trainer.kernels.installed():
            assert (
                evaluator.score("prose.valid", topk=True).exact == 4 / 5
            )  # the cut one has no answer to be right about
            known.append((0, documents[0].index(trainer.ids.think_close) + 2))  # one token of the first answer
            assert evaluator.score("prose.valid", topk=True).exact == 3 / 5
            known.append((1, 1))  # in a question: it does not matter
            assert evaluator.score("prose.valid", topk=True).exact == 3 / 5
            known.append((2, len(documents[2]) - 2))  # the end token
            assert evaluator.score("prose.valid", topk=True).exact == 2 / 5
    finally:
        del evaluator._batch


def test_a_limit_takes_the_first_documents(setting: Any) -> None:
    trainer, evaluator, tokenizer, documents = setting
    with trainer.kernels.installed():
        score = evaluator.score("prose.valid", topk=True, limit=3)
    want = by_hand(trainer, tokenizer, documents[:3], True)
    assert (score.documents, score.tokens) == (3, want["tokens"])
    assert score.nats == pytest.approx(want["nats"], rel=1e-3)


def test_the_report_measures_every_part_in_both_numerics(setting: Any) -> None:
    trainer, evaluator, *_ = setting
    with trainer.kernels.installed():
        result = evaluate.report(trainer, evaluator, documents=2)
    parts = {f"packed_exact_{part}{dense}" for part in ("copy.valid", "needle-512.valid") for dense in ("", "_dense")}
    assert parts < result.keys()
    assert result["packed_nats_per_token"] != result["float_nats_per_token"]
    ratio = math.exp(result["packed_nats_per_token"] - result["float_nats_per_token"])
    assert result["packed_over_float_perplexity"] == pytest.approx(ratio)
    assert trainer.model.numerics.quantise  # the skills are measured packed
    trainer.enter(loop.Phase(False, False))


def test_scores_in_their_units() -> None:
    score = Score(documents=3, nats=10 * math.log(2), tokens=20, response_bytes=40, exact=0.5)
    assert score.bits_per_byte == pytest.approx(0.25)
    assert score.nats_per_token == pytest.approx(math.log(2) / 2)
    empty = Score(0, 0.0, 0, 0, 0.0)
    assert (empty.bits_per_byte, empty.nats_per_token) == (0.0, 0.0)


def test_a_part_without_documents(setting: Any, tmp_path: Path) -> None:
    trainer, _, tokenizer, _ = setting
    data.write_ids(tmp_path / "empty", np.empty(0, dtype=np.uint16))
    manifest = data.Manifest(data.FORMAT, 0, 512, {"prose.valid": ["empty"]}, {"prose.valid": 0}, {"prose.valid": 0}, 0)
    score = Evaluator(trainer, tmp_path, manifest, tokenizer).score("prose.valid", topk=True)
    assert score == (0, 0.0, 0, 0, 0.0)
