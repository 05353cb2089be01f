"""Held-out measures against the same numbers taken document by document from the graph's own logits."""

import lzma
import math
import time
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
from benthic.train.loss import Ids
from benthic.train.memory import Mode, Pick
from benthic.train.settings import Phase
from tests.train.conftest import random_masters
from tests.train.small import COUNTS, IDS, only_prose, small_trainer, write_folder

LENGTH = 24
SETTINGS = only_prose(rows=2, length=LENGTH, long_from=0.5, long_length=2 * LENGTH)
Setting = tuple[loop.Trainer, Evaluator, Tokenizer, dict[str, list[list[int]]]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = build_tokenizer(folder)
    ids = Ids.of(tokenizer)
    trainer = small_trainer(SETTINGS, ids)
    random_masters(trainer, 5)
    trainer.optimiser.publish(quantised=False)
    plain = [id for id in range(3, 512) if id not in tokenizer.special_ids.values()]
    rng = np.random.default_rng(0)
    manifest = data.Manifest(data.FORMAT, 0, 512, {}, {}, {}, 0)
    lengths = {"short": ((3, 5), (4, 1), (2, 9), (6, 0), (1, 4)), "long": ((3, 5), (30, 4), (60, 4))}  # the last is cut
    documents: dict[str, list[list[int]]] = {}
    for name, parts in {"short": ("prose.valid", "copy.valid"), "long": ("needle-512.valid",)}.items():
        documents[name] = []
        for question, answer in lengths[name]:
            body = rng.choice(plain, question + answer).tolist()
            head = [ids.bos, *body[:question], ids.assistant, ids.think_close]
            documents[name].append([*head, *body[question:], ids.eos])
        flat = np.array([id for document in documents[name] for id in document], dtype="<u2")
        (folder / name).write_bytes(lzma.compress(flat.tobytes()))
        for part in parts:
            manifest.parts[part] = [name]
            manifest.tokens[part], manifest.documents[part] = len(flat), len(documents[name])
    return trainer, Evaluator(trainer, folder, manifest, tokenizer), tokenizer, documents


def by_hand(trainer: loop.Trainer, tokenizer: Tokenizer, documents: list[list[int]], pick: Pick) -> dict[str, Any]:
    nats = tokens = size = right = 0.0
    length = LENGTH if max(map(len, documents)) <= LENGTH else 2 * LENGTH
    for document in documents:
        document = document[:length]
        row = torch.tensor([document + [trainer.ids.pad] * (length - len(document))]).expand(2 * LENGTH // length, -1)
        with trainer.kernels.installed(), torch.no_grad():
            mode = Mode(False, 0) if pick == "all" else Mode(True, 0)
            hidden, _ = trainer.hidden(row, mode)
            logits = F.linear(hidden.float(), trainer.model.head.weight.float())[:length]
        if trainer.ids.think_close not in document:
            continue
        at = range(document.index(trainer.ids.think_close), len(document) - 1)
        wanted = torch.tensor([document[p + 1] for p in at])
        nats += float(F.cross_entropy(logits[list(at)], wanted, reduction="sum"))
        tokens += len(wanted)
        size += len(b"".join(tokenizer.token_bytes(id) for id in wanted.tolist() if id != trainer.ids.eos))
        right += bool((logits[list(at)].argmax(-1) == wanted).all())
    return {"nats": nats, "tokens": tokens, "bytes": size, "exact": right / len(documents)}


@pytest.mark.parametrize("pick", ["all", "index"])
@pytest.mark.parametrize(("part", "name"), [("prose.valid", "short"), ("needle-512.valid", "long")])
def test_a_part_is_scored_document_by_document(setting: Setting, part: str, name: str, pick: Pick) -> None:
    """In batches of two short rows or one long one: the last batch is filled up, and the filler does not count."""
    trainer, evaluator, tokenizer, documents = setting
    with trainer.kernels.installed():
        score = evaluator.score(part, pick=pick)
    want = by_hand(trainer, tokenizer, documents[name], pick)
    got = (score.documents, score.tokens, score.response_bytes)
    assert got == (len(documents[name]), want["tokens"], want["bytes"])
    assert score.nats == pytest.approx(want["nats"], rel=1e-3)
    assert score.exact == want["exact"]


def test_an_answer_counts_when_all_of_it_is_right(setting: Setting) -> None:
    """A head that knows the answers of the first documents by heart."""
    trainer, evaluator, _, made = setting
    documents = made["short"]
    known: list[tuple[int, int]] = []  # (row id, answer): what `head_scores` is told is wrong

    def rigged(hidden: torch.Tensor, head: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = seen.pop(0)
        right = torch.ones_like(ids, dtype=torch.bool)
        for row, position in known:
            right[(ids[:, 1] == documents[row][1]), position] = False
        return torch.ones(wanted.shape), right.flatten()

    seen: list[torch.Tensor] = []
    before = trainer.kernels.piece

    def watched(ids: torch.Tensor, pick: Pick, shown: Any) -> torch.Tensor:
        seen.append(ids)
        trainer.kernels.piece = lambda fn: rigged if fn is evaluate.head_scores else before(fn)
        try:
            return Evaluator._batch(evaluator, ids, pick, shown)
        finally:
            trainer.kernels.piece = before

    evaluator._batch = watched
    try:
        with trainer.kernels.installed():
            assert evaluator.score("prose.valid").exact == 1.0
            known.append((0, documents[0].index(trainer.ids.think_close) + 2))  # one token of the first answer
            assert evaluator.score("prose.valid").exact == 4 / 5
            known.append((1, 1))  # in a question: it does not matter
            assert evaluator.score("prose.valid").exact == 4 / 5
            known.append((2, len(documents[2]) - 2))  # the end token
            assert evaluator.score("prose.valid").exact == 3 / 5
            known.clear()
            documents = made["long"]
            assert evaluator.score("needle-512.valid").exact == 2 / 3  # the cut one has no answer to be right about
    finally:
        del evaluator._batch


def test_a_limit_takes_the_first_documents(setting: Setting) -> None:
    trainer, evaluator, tokenizer, documents = setting
    with trainer.kernels.installed():
        score = evaluator.score("prose.valid", limit=3)
    want = by_hand(trainer, tokenizer, documents["short"][:3], "index")
    assert (score.documents, score.tokens) == (3, want["tokens"])
    assert score.nats == pytest.approx(want["nats"], rel=1e-3)


def test_loads_are_those_of_the_routers(setting: Setting) -> None:
    trainer, evaluator, *_ = setting
    with trainer.kernels.installed():
        loads = evaluator.text_loads("prose.valid")
    ids = data.read_part(evaluator.folder, evaluator.manifest, "prose.valid")
    starts = data.document_starts(ids, trainer.ids.bos)
    rows = data.pack_rows(ids, starts, LENGTH, trainer.ids.pad, np.random.default_rng(0)).ids
    assert len(rows) == 3  # two batches of two, the first row a second time
    want = torch.zeros_like(loads)
    with trainer.kernels.installed(), torch.no_grad():
        for pair in ((0, 1), (2, 0)):
            trainer.hidden(torch.from_numpy(rows[list(pair)].astype(np.int64)), Mode(True, 0))
            want += torch.stack(trainer.kernels.loads).sum(1)
    assert torch.equal(loads, want)


def test_even_and_lopsided_loads() -> None:
    even, one = torch.full((4,), 7.0), torch.tensor([0.0, 9.0, 0.0, 0.0])
    half = torch.tensor([5.0, 5.0, 0.0, 0.0])
    assert evaluate.spread(torch.stack([even, one, half])) == [
        {"entropy": 1.0, "largest": 1.0},
        {"entropy": 0.0, "largest": 4.0},
        {"entropy": 0.5, "largest": 2.0},
    ]


def test_the_report_measures_every_part(setting: Setting) -> None:
    trainer, evaluator, *_ = setting
    with trainer.kernels.installed():
        result = evaluate.report(trainer, evaluator, documents=2)
    assert result["exact"].keys() == {"copy"}
    assert result["needle"].keys() == {"512"}
    assert result["needle"]["512"].keys() == {"topk", "dense", "random"}
    assert len(result["experts"]["text"]) == len(trainer.model.layers)
    assert result["packed_nats_per_token"] != result["float_nats_per_token"]
    ratio = math.exp(result["packed_nats_per_token"] - result["float_nats_per_token"])
    assert result["packed_over_float_perplexity"] == pytest.approx(ratio)
    assert "skipped" not in result
    assert trainer.model.numerics.quantise  # the skills are measured packed
    with trainer.kernels.installed():
        late = evaluate.report(trainer, evaluator, documents=2, deadline=time.monotonic() - 1)
    assert late["skipped"] == ["perplexity", "needle-512.valid", "copy.valid", "experts"]
    trainer.enter(Phase(False, False))


def test_pictures_are_shown(tmp_path: Path) -> None:
    """The score of a part with pictures changes with its pictures; its image tokens are counted apart."""
    tokenizer = build_tokenizer(tmp_path)
    trainer = small_trainer(only_prose(rows=4, length=32))
    random_masters(trainer, 6)
    trainer.optimiser.publish(quantised=False)
    _, manifest = write_folder(tmp_path)
    for part in COUNTS:
        manifest.parts[f"{part}.valid"] = manifest.parts.pop(part)
        manifest.tokens[f"{part}.valid"], manifest.documents[f"{part}.valid"] = manifest.tokens[part], COUNTS[part]
    data.pictures_file(tmp_path, "shapes").rename(data.pictures_file(tmp_path, "shapes.valid"))
    evaluator = Evaluator(trainer, tmp_path, manifest, tokenizer)
    with trainer.kernels.installed():
        score = evaluator.score("shapes.valid")
        tokens = int((data.read_part(tmp_path, manifest, "shapes.valid") == IDS.image).sum())
        loads = evaluator.image_loads
        data.pictures_file(tmp_path, "shapes.valid").unlink()
        blind = evaluator.score("shapes.valid")
    assert score.tokens == blind.tokens == 2 * COUNTS["shapes"]
    assert abs(score.nats - blind.nats) > 1e-2
    filler = 3 * 4  # image tokens of the first document, three times more at most
    assert (loads.sum(-1) >= 2 * tokens).all()
    assert (loads.sum(-1) <= 2 * (tokens + filler * 20)).all()


def test_scores_in_their_units() -> None:
    score = Score(documents=3, nats=10 * math.log(2), tokens=20, response_bytes=40, exact=0.5)
    assert score.bits_per_byte == pytest.approx(0.25)
    assert score.nats_per_token == pytest.approx(math.log(2) / 2)
    empty = Score(0, 0.0, 0, 0, 0.0)
    assert (empty.bits_per_byte, empty.nats_per_token) == (0.0, 0.0)


def test_a_part_without_documents(setting: Setting, tmp_path: Path) -> None:
    trainer, _, tokenizer, _ = setting
    data.write_ids(tmp_path / "empty", np.empty(0, dtype=np.uint16))
    manifest = data.Manifest(data.FORMAT, 0, 512, {"prose.valid": ["empty"]}, {"prose.valid": 0}, {"prose.valid": 0}, 0)
    score = Evaluator(trainer, tmp_path, manifest, tokenizer).score("prose.valid")
    assert score == (0, 0.0, 0, 0, 0.0)
