"""The engine in this process as the subject of an evaluation: its public face, and probes for what lies inside."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benthic.bench import drafts
from benthic.bench.eval import rendering
from benthic.bench.eval.documents import Document
from benthic.bench.eval.questions import (
    SERVED,
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
from benthic.bench.eval.rendering import Row
from benthic.config import Config
from benthic.engine.llm import LLM, Completion, Piece
from benthic.errors import BenchError, CheckpointError, PromptTooLong, RequestError
from benthic.skills.base import Reply
from benthic.testing import probe
from benthic.types import SamplingParams

RANDOM_SEED = 1  # of the choice by chance that stands beside the indexer's
_WINDOW_TOKENS = 1 << 15  # of scored texts handed to the engine at a time
_WHOLE_BYTES = 1 << 30  # checkpoints up to this size are digested whole
_SAMPLE_BYTES = 1 << 20  # of each file of a larger one: beginning, middle and end
_ONLY_PROMPT = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)

Open = Callable[[Config], LLM]
Come = Iterator[tuple[Question, Answer | Missing]]


def _open(settings: Config) -> LLM:
    return LLM(config=settings)


class LocalSubject:
    """Opens one engine at a time; another view closes it and opens the next, so that nothing cached is shared."""

    local = True

    def __init__(self, settings: Config, open: Open = _open):
        self.settings, self._open = settings, open
        self._llm: LLM | None = None
        self._opened: tuple[Config, View] | None = None
        llm = self._engine(SERVED)
        if llm.tokenizer is None:
            raise BenchError("text", f"{llm.path} has no tokenizer.json")
        self.path, self.device, self.name = llm.path, str(llm.device), Path(settings.model).name
        self.numerics: str | None = settings.numerics
        self.context: int | None = settings.scheduler.max_context_tokens or llm.model.max_positions

    def identity(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "digest": checkpoint_digest(self.path),
            "numerics": self.numerics,
            "device": self.device,
            "native": self.settings.cpu.native,
            "context_tokens": self.context,
        }

    def length(self, document: Document) -> int:
        return len(rendering.row(self._engine(SERVED).encoder, [document]).ids)

    def answers(self, questions: Sequence[Question]) -> Come:
        for (view, kind), group in groupby(questions, key=lambda question: (question.view, type(question))):
            llm = self._engine(view, watched=kind is Load)
            with ExitStack() as probes:
                if view.sight != "indexer":
                    choose = probe.everything if view.sight == "dense" else probe.at_random(RANDOM_SEED)
                    probes.enter_context(probe.sees(llm, choose))
                if not view.engram:
                    probes.enter_context(probe.without_engram(llm))
                some = list(group)
                yield from self._chats(llm, [question for question in some if isinstance(question, Chat)])
                yield from scores(llm, [question for question in some if isinstance(question, Score)])
                yield from self._loads(llm, [question for question in some if isinstance(question, Load)])
                yield from self._drafts(llm, [question for question in some if isinstance(question, Draft)])

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
        self._llm = self._opened = None

    def _engine(self, view: View, *, watched: bool = False) -> LLM:
        """The engine for a view. One that is looked into has no graphs and keeps no prefixes, as probes want it."""
        settings = self.settings
        if view.numerics is not None:
            settings = replace(settings, numerics=view.numerics)
        view = replace(view, numerics=None)
        if watched or view != SERVED:
            cache = replace(settings.cache, prefix=False, truncation="off")  # and every row is computed
            settings = replace(settings, gpu=replace(settings.gpu, graphs=False), cache=cache)
        if self._llm is None or (settings, view) != self._opened:
            self.close()
            self._llm, self._opened = self._open(settings), (settings, view)
        return self._llm

    def _chats(self, llm: LLM, questions: Sequence[Chat]) -> Come:
        """As many conversations at a time as the engine runs, all in the same steps."""
        waiting = deque(questions)
        live: deque[tuple[Chat, Iterator[Piece]]] = deque()
        try:
            while waiting or live:
                while waiting and len(live) < self.settings.scheduler.max_running:
                    question = waiting.popleft()
                    params = SamplingParams(
                        temperature=question.temperature, max_tokens=question.max_tokens, seed=question.seed
                    )
                    try:
                        live.append((question, llm.chat(**question.request, params=params, stream=True)))
                    except RequestError as error:
                        yield question, Missing(str(error))
                if live:
                    question, stream = live.popleft()
                    piece = next(stream)
                    if piece.completion is None:
                        live.append((question, stream))
                    else:
                        yield question, _said(piece.completion)
        finally:
            for _, stream in live:
                stream.close()  # type: ignore[attr-defined]

    def _loads(self, llm: LLM, questions: Sequence[Load]) -> Come:
        for question in questions:
            rows = [rendering.row(llm.encoder, [document]).ids for document in question.documents]
            with probe.expert_loads(llm) as loads:
                for done in llm.generate(rows, _ONLY_PROMPT, progress=False):
                    _sound(done)
            yield question, Loads(tuple(tuple(load.tolist()) for load in loads))

    def _drafts(self, llm: LLM, questions: Sequence[Draft]) -> Come:
        for question in questions:
            turns = [[{"role": "user", "content": prompt}] for prompt in question.prompts]
            prompts = [llm.encoder.encode(messages).ids for messages in turns]
            try:
                found = drafts.drafts(
                    llm,
                    prompts,
                    temperatures=(question.temperature,),
                    max_tokens=question.max_tokens,
                    seed=question.seed,
                )
            except CheckpointError as error:  # it has no drafter
                yield question, Missing(str(error))
            else:
                yield question, Drafted(found["temperatures"][0])


def scores(llm: LLM, questions: Iterable[Score]) -> Come:
    """Some texts at a time, so that their rows share steps and what they hold stays small."""
    limit = llm.config.scheduler.max_context_tokens or llm.model.max_positions
    window: list[tuple[Score, Row]] = []
    tokens = 0
    for question in questions:
        row = rendering.row(llm.encoder, question.documents)
        if len(row.ids) >= limit:
            yield question, Missing(str(PromptTooLong(len(row.ids), limit - 1)))
            continue
        if window and tokens + len(row.ids) > _WINDOW_TOKENS:
            yield from _window(llm, window)
            window, tokens = [], 0
        window.append((question, row))
        tokens += len(row.ids)
    if window:
        yield from _window(llm, window)


def _window(llm: LLM, window: Sequence[tuple[Score, Row]]) -> Come:
    for piece in llm.generate([row.ids for _, row in window], _ONLY_PROMPT, stream=True):
        if piece.completion is not None:
            question, row = window[piece.prompt]
            yield question, row.scored([entry.logprob for entry in _sound(piece.completion).prompt_logprobs])


def bits_per_byte(llm: LLM, documents: Iterable[Document], progress: Callable[[int], None]) -> float:
    """Of the documents' responses. progress is called with the number of documents done."""
    nats = size = 0.0
    for done, (question, answer) in enumerate(scores(llm, (Score((document,)) for document in documents)), 1):
        if isinstance(answer, Missing):
            raise BenchError("text", answer.reason)
        assert isinstance(question, Score), type(question)
        assert isinstance(answer, Scored), type(answer)
        nats += answer.spans[0].nats
        size += len(question.documents[0].response.encode())
        progress(done)
    return nats / math.log(2) / max(size, 1)


def _sound(done: Completion) -> Completion:
    """A completion without an error. The engine's own faults end an evaluation: no answer would mean anything."""
    if done.error is not None:
        raise done.error
    return done


def _said(done: Completion) -> Said:
    message = _sound(done).message
    assert message is not None, "a conversation's completion has a message"
    usage = done.usage
    return Said(Reply.of(message.as_dict()), done.finish_reason, usage.prompt_tokens, usage.completion_tokens)


def checkpoint_digest(folder: Path) -> str:
    """16 hex digits over configuration, tokenizer and weights: all bytes up to 1 GiB, else sizes and samples."""
    found = hashlib.sha256()
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    whole = sum(path.stat().st_size for path in files) <= _WHOLE_BYTES
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if whole or size <= 3 * _SAMPLE_BYTES:
                while part := file.read(1 << 24):
                    found.update(part)
            else:
                for at in (0, size // 2, size - _SAMPLE_BYTES):
                    file.seek(at)
                    found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()[:16]
