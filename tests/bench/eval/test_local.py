"""The engine as a subject: scores against a plain sum over logits, views against engines that are opened that way."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benthic.bench import drafts
from benthic.bench.eval import local, rendering
from benthic.bench.eval.documents import Document
from benthic.bench.eval.local import LocalSubject
from benthic.bench.eval.questions import (
    Answer,
    Chat,
    Draft,
    Drafted,
    Load,
    Loads,
    Missing,
    Question,
    Said,
    Score,
    Scored,
    View,
)
from benthic.cache.storage import Storage
from benthic.config import Config, load
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.models.base import Batch
from benthic.skills.base import Reply
from benthic.testing import probe
from benthic.testing.checkpoints import make_tiny
from benthic.types import SamplingParams

DOCUMENTS = (
    Document("story", "Tell me of a fox.", "A fox ran home."),
    Document("qa", "What is 2 + 2?", "4, that is four — quatre."),
)
SETTINGS = load(environ={}, overrides={"cpu.threads": 1, "numerics": "float"})


class Opened:
    """Engines as they are opened, and with what settings."""

    def __init__(self) -> None:
        self.settings: list[Config] = []
        self.last: LLM | None = None

    def __call__(self, settings: Config) -> LLM:
        self.settings.append(settings)
        self.last = LLM(config=settings)
        return self.last


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened()


@pytest.fixture(scope="module")
def subject(opened: Opened) -> Iterator[LocalSubject]:
    one = LocalSubject(SETTINGS, opened)
    yield one
    one.close()


def ask(subject: LocalSubject, questions: Sequence[Question]) -> list[Answer | Missing]:
    came = list(subject.answers(questions))
    assert sorted(id(question) for question, _ in came) == sorted(map(id, questions))
    return [next(answer for other, answer in came if other is question) for question in questions]


def scored(subject: LocalSubject, question: Score) -> Scored:
    (answer,) = ask(subject, [question])
    assert isinstance(answer, Scored), answer
    return answer


def scored_close(one: Scored, other: Scored) -> bool:
    return [span.nats for span in one.spans] == pytest.approx([span.nats for span in other.spans], rel=1e-5)


def llm_of(opened: Opened) -> LLM:
    assert opened.last is not None
    return opened.last


@torch.inference_mode()
def plain_logprobs(llm: LLM, ids: Sequence[int]) -> list[float]:
    """log p of ids[1:], the whole row in one forward, no engine."""
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
    return [float(scores[p, ids[p + 1]]) for p in range(count - 1)]


@pytest.mark.parametrize("documents", [DOCUMENTS[:1], DOCUMENTS[1:], DOCUMENTS], ids=["fox", "sum", "both"])
def test_scores_are_the_plain_sum_over_responses_and_end_tokens(
    subject: LocalSubject, opened: Opened, documents: tuple[Document, ...]
) -> None:
    spans = scored(subject, Score(documents)).spans
    llm = llm_of(opened)
    assert llm.tokenizer is not None
    ids: list[int] = []
    borders: list[tuple[int, int]] = []
    for document in documents:
        ids += llm.encoder.encode([{"role": "user", "content": document.prompt}]).ids
        response = [*llm.tokenizer.encode(document.response, bos=False), llm.tokenizer.eos_id]
        borders.append((len(ids), len(response)))
        ids += response
    values = plain_logprobs(llm, ids)
    assert [(span.first, span.tokens) for span in spans] == borders
    for span, (first, count) in zip(spans, borders, strict=True):
        assert span.nats == pytest.approx(-sum(values[first - 1 : first - 1 + count]), abs=1e-3)
    assert sum(map(subject.length, documents)) == len(ids)


def test_bits_per_byte_of_one_engine(subject: LocalSubject, opened: Opened) -> None:
    spans = [scored(subject, Score((document,))).spans[0] for document in DOCUMENTS]
    seen: list[int] = []
    got = local.bits_per_byte(llm_of(opened), iter(DOCUMENTS), seen.append)
    size = sum(len(document.response.encode()) for document in DOCUMENTS)
    assert seen == [1, 2]
    assert got == pytest.approx(sum(span.nats for span in spans) / math.log(2) / size)


def test_texts_come_some_at_a_time(subject: LocalSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [Score((document,)) for document in DOCUMENTS * 2]
    whole = ask(subject, questions)
    monkeypatch.setattr(local, "_WINDOW_TOKENS", 40)
    assert [a.spans[0].nats for a in ask(subject, questions) if isinstance(a, Scored)] == pytest.approx(
        [a.spans[0].nats for a in whole if isinstance(a, Scored)], rel=1e-5
    )


def test_conversations_are_those_of_the_engine(subject: LocalSubject, opened: Opened) -> None:
    texts = ["Tell me of a fox.", "What is 2 + 2?", "Why is the sky blue?", "A poem of rain."]
    requests = [{"messages": ({"role": "user", "content": text},), "thinking": i == 2} for i, text in enumerate(texts)]
    questions = [Chat(request, 5 + i, temperature=0.8 if i == 1 else 0.0, seed=i) for i, request in enumerate(requests)]
    running = replace(SETTINGS, scheduler=replace(SETTINGS.scheduler, max_running=2))
    subject.settings, usual = running, subject.settings  # fewer places than questions
    try:
        came = ask(subject, questions)
    finally:
        subject.settings = usual
    for question, answer in zip(questions, came, strict=True):
        params = SamplingParams(temperature=question.temperature, max_tokens=question.max_tokens, seed=question.seed)
        done = llm_of(opened).chat(**question.request, params=params)
        assert done.message is not None
        assert answer == Said(Reply.of(done.message.as_dict()), done.finish_reason, *done.usage[:2])


def test_what_cannot_be_asked_is_missing_with_its_reason(subject: LocalSubject) -> None:
    long = "word " * 20_000
    messages = ({"role": "user", "content": long},)
    odd = ({"role": "robot", "content": "x"},)
    questions: list[Question] = [
        Chat({"messages": messages, "thinking": False}, 5),
        Chat({"messages": odd, "thinking": False}, 5),
        Score((Document("qa", "x", long),)),
    ]
    came = ask(subject, questions)
    for missing, reason in zip(came, ("over the limit of 163", "robot", "over the limit of 16383"), strict=True):
        assert isinstance(missing, Missing)
        assert missing.refused
        assert reason in missing.reason


@pytest.mark.slow
def test_views_are_engines_opened_that_way(subject: LocalSubject, opened: Opened) -> None:
    question = Score(DOCUMENTS[:1])
    row = rendering.row(llm_of(opened).encoder, DOCUMENTS[:1])
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)

    def direct(llm: LLM) -> Scored:
        (done,) = llm.generate([row.ids], params)
        return row.scored([entry.logprob for entry in done.prompt_logprobs])

    plain = scored(subject, question)
    with LLM(config=replace(SETTINGS, numerics="reference")) as llm:
        assert scored(subject, replace(question, view=View(numerics="reference"))) == direct(llm) != plain
    with LLM(config=replace(SETTINGS, cache=replace(SETTINGS.cache, prefix=False, truncation="off"))) as llm:
        assert scored_close(plain, direct(llm))
        with probe.without_engram(llm):
            assert scored(subject, replace(question, view=View(engram=False))) == direct(llm) != plain
        ways = {"dense": probe.everything, "random": probe.at_random(local.RANDOM_SEED)}
        for sight, choose in ways.items():
            with probe.sees(llm, choose):
                assert scored(subject, replace(question, view=View(sight=sight))) == direct(llm)
        with probe.expert_loads(llm) as loads:
            llm.generate([rendering.row(llm.encoder, [document]).ids for document in DOCUMENTS], params)
        (answer,) = ask(subject, [Load(DOCUMENTS)])
        assert answer == Loads(tuple(tuple(load.tolist()) for load in loads))
    assert scored(subject, question) == plain


@pytest.mark.slow
def test_a_view_never_runs_in_graphs_nor_in_the_engine_that_serves(subject: LocalSubject, opened: Opened) -> None:
    scored(subject, Score(DOCUMENTS[:1]))
    del opened.settings[:]
    served = llm_of(opened)
    views = [View(), View(numerics="float"), View(engram=False), View(sight="dense"), View(sight="random"), View()]
    ask(subject, [Score(DOCUMENTS[:1], view) for view in views])
    assert [settings.gpu.graphs for settings in opened.settings] == [False, False, False, True]
    assert [settings.cache.prefix for settings in opened.settings] == [False, False, False, True]
    assert llm_of(opened) is not served


def test_drafts_are_those_of_the_bench(subject: LocalSubject, opened: Opened) -> None:
    (answer,) = ask(subject, [Draft(("Tell me of a fox.",), 0.0, 7, 3)])
    llm = llm_of(opened)
    ids = llm.encoder.encode([{"role": "user", "content": "Tell me of a fox."}]).ids
    want = drafts.drafts(llm, [ids], temperatures=(0.0,), max_tokens=7, seed=3)
    assert answer == Drafted(want["temperatures"][0])


def test_stopping_early_leaves_the_engine_at_rest(subject: LocalSubject, opened: Opened) -> None:
    request = {"messages": ({"role": "user", "content": "Tell me of a fox."},), "thinking": False}
    stream = subject.answers([Chat(request, 1), Chat(request, 200), Chat(request, 201)])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm_of(opened).loop.busy


def test_a_checkpoint_without_a_tokenizer_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"has no tokenizer\.json"):
        LocalSubject(replace(SETTINGS, model=str(make_tiny(tmp_path / "tiny"))))


def test_the_identity_changes_with_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("config.json", "{}"), ("tokenizer.json", "[]"), ("model.safetensors", "abc" * 100)):
        (tmp_path / name).write_text(text)
    (tmp_path / "notes.txt").write_text("of no account")
    found = local.checkpoint_digest(tmp_path)
    monkeypatch.setattr(local, "_WHOLE_BYTES", 10)
    assert local.checkpoint_digest(tmp_path) == found, "small files are read whole in any case"
    monkeypatch.setattr(local, "_SAMPLE_BYTES", 8)
    sampled = local.checkpoint_digest(tmp_path)
    seen = {found, sampled}
    for at in (0, 152, 299):
        data = bytearray(b"abc" * 100)
        data[at] ^= 1
        (tmp_path / "model.safetensors").write_bytes(data)
        seen.add(local.checkpoint_digest(tmp_path))
    (tmp_path / "model.safetensors").write_text("abc" * 101)
    seen.add(local.checkpoint_digest(tmp_path))
    (tmp_path / "notes.txt").write_text("changed")
    assert local.checkpoint_digest(tmp_path) in seen
    assert len(seen) == 6


def test_identity_and_context(subject: LocalSubject) -> None:
    told = subject.identity()
    assert told["numerics"] == "float"
    assert told["device"] == "cpu"
    assert len(told["digest"]) == 16
    assert subject.context == 16384
