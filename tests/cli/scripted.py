"""An engine that answers by a script, for the commands that talk to one. No torch, so that a process starts at once.

`forever` never ends, `fail` breaks on the way, `long` is refused; any other prompt is answered word by word.
"""

import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benthic.cli import chat, generate
from benthic.cli.main import main
from benthic.errors import BenthicError, EngineClosed, PromptTooLong
from benthic.text.reply import Message
from benthic.types import SamplingParams, Usage


class Timing(NamedTuple):
    ttft_seconds: float
    total_seconds: float
    tpot_seconds: float


_TIMING = Timing(0.25, 1.5, 0.125)


@dataclass(frozen=True)
class Choice:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    timing: Timing = _TIMING
    message: Message | None = None
    error: BenthicError | None = None


@dataclass(frozen=True)
class Completion:
    choices: tuple[Choice, ...]
    usage: Usage


@dataclass(frozen=True)
class Piece:
    prompt: int
    choice: int
    text: str = ""
    reasoning: str = ""
    tool_call: Any = None
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: BenthicError | None = None
    completion: Completion | None = None


@dataclass
class ScriptedEngine:
    """What was asked of it is kept in `asked`."""

    asked: list[tuple[Any, SamplingParams, dict[str, Any]]] = field(default_factory=list)
    closed: int = 0
    ended: list[str] = field(default_factory=list)  # prompts whose stream was closed early

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed += 1

    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams], *, stream: bool) -> Iterator[Piece]:
        assert stream
        assert len(prompts) == len(params)
        for prompt, p in zip(prompts, params, strict=True):
            self.asked.append((prompt, p, {}))
            _refuse(prompt)
        return self._all(
            [self._pieces(i, text, p, "") for i, (text, p) in enumerate(zip(prompts, params, strict=True))]
        )

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, **options: Any) -> Iterator[Piece]:
        self.asked.append(([dict(message) for message in messages], params, options))
        last = messages[-1]["content"]
        if not isinstance(last, str):  # pictures, then the text
            last = last[-1]["text"]
        _refuse(last)
        return self._pieces(0, last, params, "let me think" if options["thinking"] else "", chat=True)

    def _all(self, streams: list[Iterator[Piece]]) -> Iterator[Piece]:
        """The last prompt is always ahead, so that what belongs first comes last."""
        while streams:
            for stream in reversed(list(streams)):
                piece = next(stream, None)
                if piece is None:
                    streams.remove(stream)
                else:
                    yield piece

    def _pieces(self, index: int, prompt: str, p: SamplingParams, think: str, chat: bool = False) -> Iterator[Piece]:
        if prompt.startswith("forever"):
            try:
                while True:
                    yield Piece(index, 0, text="on and on ", token_ids=(5,))
                    time.sleep(0.002)
            finally:
                self.ended.append(prompt)
        answers = [f" answer {choice} to {prompt}"[: 8 * p.max_tokens] for choice in range(p.n)]
        choices: list[Choice] = []
        for choice, answer in enumerate(answers):
            if think:
                yield Piece(index, choice, reasoning=think, token_ids=(3,))
            for word in answer.split(" ")[1:]:
                yield Piece(index, choice, text=f" {word}", token_ids=(7,))
            error = EngineClosed() if prompt == "fail" else None
            finish = None if error else "stop"
            message = Message(think, answer) if chat else None
            choices.append(Choice(answer, (7,) * answer.count(" "), finish, message=message, error=error))
            whole = Completion(tuple(choices), Usage(4, 9)) if choice == p.n - 1 else None
            yield Piece(index, choice, finish_reason=finish, error=error, completion=whole)


class Buffered(io.StringIO):
    """Standard output whose reader sees only what was flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def _refuse(prompt: str) -> None:
    if prompt == "long":
        raise PromptTooLong(100, 64)


def install(engine: ScriptedEngine) -> None:
    """Make the commands use it."""
    generate.open_engine = chat.open_engine = lambda settings: engine


if __name__ == "__main__":
    install(ScriptedEngine())
    sys.exit(main())
