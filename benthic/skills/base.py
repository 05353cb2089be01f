"""What a model is asked to do, and whether it did exactly that. Source: the minnow specification, section 2.

A `Task` is a whole conversation in OpenAI chat form, with what a right model writes in it. Training renders it; an
evaluation asks for one assistant turn after another, with the right ones before it as history, and puts what came to
`right`. Generators are seeded, and their two splits are disjoint by construction: what is drawn (a code, two summands,
a name with a fact) belongs to one of them by its value, see `belongs`.
"""

import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from benthic.errors import MissingDependency

if TYPE_CHECKING:
    from benthic.skills.shapes import Picture

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Task:
    """One conversation; every assistant message in it is a target.

    messages         OpenAI chat form, right answers included; pictures stand in it as image_url parts with a data URL
    tools            OpenAI function tools
    thinking         whether the model thinks first; effort: "low", "high", "max", None is high
    response_format  OpenAI form, for tasks that state the schema of the answer in that way
    level            the bucket of a table: "512 tokens", "3 turns"
    pictures         what to draw, in the order of their places
    """

    skill: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    effort: str | None = None
    response_format: dict[str, Any] | None = None
    level: str = ""
    pictures: "tuple[Picture, ...]" = ()

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices of the assistant messages."""
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")

    def request(self, end: int | None = None) -> dict[str, Any]:
        """Arguments of `text.prompt.ChatEncoder.encode` for the messages before `end`; None: for all of them."""
        arguments: dict[str, Any] = {"messages": self.messages[:end], "thinking": self.thinking}
        if self.effort is not None:
            arguments["effort"] = self.effort
        if self.tools:
            arguments["tools"] = self.tools
        if self.response_format is not None:
            arguments["response_format"] = self.response_format
        return arguments


class Call(NamedTuple):
    name: str
    arguments: str  # JSON text


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model wrote in one turn."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[Call, ...] = ()

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Reply":
        """From an assistant message in OpenAI chat form, such as `text.reply.Message.as_dict()` or a server's."""
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        return cls(
            message.get("content") or "",
            message.get("reasoning_content") or "",
            tuple(Call(function["name"], function["arguments"]) for function in functions),
        )


@dataclass(frozen=True, slots=True)
class Material:
    """Prose to build from: small words and whole sentences, of the training or of the held-out corpus."""

    words: tuple[str, ...]
    sentences: tuple[str, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> "Material":
        """From pairs of a prompt, whose words are taken, and a response, whose sentences are."""
        words: set[str] = set()
        sentences: list[str] = []
        for prompt, response in pairs:
            words.update(re.findall(r"\b[a-z]{3,9}\b", prompt))
            sentences += sentences_of(response)
        return cls(tuple(sorted(words)), tuple(sentences))

    @property
    def lacks(self) -> str:
        """What it has too little of for the generators; empty when nothing."""
        if not self.sentences:
            return "it has 0 sentences of 20 to 200 characters in its responses, the skills need 1"
        if len(self.words) < MIN_WORDS:
            return (
                f"it has {len(self.words)} different words of 3 to 9 small letters in its prompts, "
                f"the skills need {MIN_WORDS}"
            )
        return ""


MIN_WORDS = 16  # pairs of them make lists of 100 different items


def sentences_of(text: str) -> list[str]:
    """Sentences of one response, 20 to 200 characters each, for use as filler."""
    parts = re.split(r"(?<=[.!?])\s+", text)
    return [part for part in parts if 20 <= len(part) <= 200]


class Make(Protocol):
    def __call__(self, rng: random.Random, material: Material, split: Split, **options: Any) -> Task: ...


@dataclass(frozen=True, slots=True)
class Skill:
    """One row of SKILLS.

    generator  "module.function" of this package, imported when it is first used: drawing needs Pillow
    guards     the mechanisms that the skill needs
    same       (wanted, got): is the answer right
    """

    name: str
    generator: str
    guards: str
    same: Callable[[Reply, Reply], bool]

    def make(self, rng: random.Random, material: Material, split: Split, **options: Any) -> Task:
        """A task; the generator documents its options. Raises MissingDependency: pictures are drawn by Pillow."""
        return _generator(self.generator)(rng, material, split, **options)


@cache
def _generator(name: str) -> Make:
    module, _, function = name.partition(".")
    try:
        return getattr(import_module(f"benthic.skills.{module}"), function)
    except ImportError as error:
        if error.name != "PIL":
            raise
        raise MissingDependency("pillow", "vision") from error


def right(task: Task, turn: int, reply: Reply) -> bool:
    """Whether `reply` is what assistant message `turn` (an index of `task.turns`) asks for, exactly."""
    want = Reply.of(task.messages[turn])
    if want.tool_calls or reply.tool_calls:
        return _same_calls(want, reply)
    return SKILLS[task.skill].same(want, reply)


def same_text(want: Reply, got: Reply) -> bool:
    """The same characters, but for white space at the ends."""
    return got.content.strip() == want.content.strip()


def same_json(want: Reply, got: Reply) -> bool:
    """The same value, key order and spacing free; nothing around it, no key twice, numbers of the same kind."""
    return same_value(want.content, got.content)


def same_value(want: str, got: str) -> bool:
    """Whether two JSON texts hold one value: true is not 1, 1 is not 1.0, key order is free."""
    try:
        return _typed(json.loads(want)) == _typed(json.loads(got, object_pairs_hook=_no_key_twice))
    except (ValueError, RecursionError):
        return False


def sound_reasoning(want: Reply, got: Reply) -> bool:
    """The answer, and when reasoning is wanted, equations in it that all hold, the last of which gives the answer."""
    if not same_text(want, got):
        return False
    if not want.reasoning:
        return not got.reasoning.strip()
    equations = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", got.reasoning)
    holds = all(int(a) + (int(b) if sign == "+" else -int(b)) == int(c) for a, sign, b, c in equations)
    return len(equations) >= 2 and holds and got.content.strip() in (equation[3] for equation in equations)


def _same_calls(want: Reply, got: Reply) -> bool:
    if len(want.tool_calls) != len(got.tool_calls):
        return False
    return all(
        a.name == b.name and same_value(a.arguments, b.arguments)
        for a, b in zip(want.tool_calls, got.tool_calls, strict=True)
    )


def _typed(value: Any) -> Any:
    """A form in which values of different JSON types are never equal."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return type(value), value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def belongs(split: Split, *key: object) -> bool:
    """Whether what is drawn belongs to a split: one value in ten is held out, by a hash that is the same everywhere."""
    held_out = zlib.crc32("/".join(map(str, key)).encode()) % 10 == 7
    return held_out == (split == "held_out")


_ROWS = (
    Skill("copy", "text.copy", "attention, window, rotary positions", same_text),
    Skill("needle", "text.needle", "compressor, indexer, top-k sharing, candidates, prefix cache", same_text),
    Skill("recall", "text.recall", "the same as needle, finer", same_text),
    Skill("arithmetic", "text.arithmetic", "experts, sampling", same_text),
    Skill("thinking", "text.thinking", "effort levels, reasoning parser", sound_reasoning),
    Skill("memory", "text.memory", "prefix reuse, encoding of turns", same_text),
    Skill("json", "structured.fill", "structured output", same_json),
    Skill("tools", "structured.tools", "tool calls, their parser, strict tools", same_text),
    Skill("shapes", "shapes.shapes", "vision tower, aligner, routing bias of image tokens, layout of spans", same_text),
)
SKILLS: dict[str, Skill] = {row.name: row for row in _ROWS}
