"""What is asked of a model, and what it answered: plain records with a JSON form. No torch.

A question says everything that its answer depends on, apart from the model, so its digest names the answer: suites that
ask the same share it, and a run that is taken up again does not ask twice.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from benthic.bench.eval.documents import Document
from benthic.skills.base import Call, Reply


@dataclass(frozen=True, slots=True)
class View:
    """How the model computes while it answers. Any other than the default needs the engine in this process.

    numerics  profile; None: the configured one
    sight     what attention sees of the compressed entries: "indexer", what the indexer chooses; "dense", all;
              "random", as many as the indexer would choose, by chance
    engram    whether the n-gram tables add anything
    """

    numerics: str | None = None
    sight: str = "indexer"
    engram: bool = True


SERVED = View()


@dataclass(frozen=True, slots=True)
class Chat:
    """The assistant's next turn. request: messages, thinking and what else `Task.request` gives."""

    request: dict[str, Any]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    view: View = SERVED


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of the responses, end tokens included, of documents that follow each other in one text."""

    documents: tuple[Document, ...]
    view: View = SERVED


@dataclass(frozen=True, slots=True)
class Load:
    """How many rows go to each expert over documents, each by itself."""

    documents: tuple[Document, ...]
    view: View = SERVED


@dataclass(frozen=True, slots=True)
class Draft:
    """What the checkpoint's own drafter is worth on completions of these user turns, in one: rates do not add up."""

    prompts: tuple[str, ...]
    temperature: float
    max_tokens: int
    seed: int
    view: View = SERVED


Question = Chat | Score | Load | Draft


def digest(question: Question) -> str:
    """24 hex digits: the same for equal questions on any machine."""
    told = {"kind": type(question).__name__, **asdict(question)}
    return hashlib.sha256(json.dumps(told, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:24]


class Span(NamedTuple):
    """One scored response: where its first token stands, its tokens with the end token, - sum of log p."""

    first: int
    tokens: int
    nats: float


@dataclass(frozen=True, slots=True)
class Said:
    """To Chat."""

    reply: Reply
    finish: str | None = None  # why it ended, as the engine or server names it
    prompt_tokens: int | None = None  # None: the server does not count
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """To Score: one span a document."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Loads:
    """To Load: rows by layer and expert."""

    layers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Drafted:
    """To Draft: the entry of `bench.drafts.drafts` for its temperature."""

    found: dict[str, Any]


Answer = Said | Scored | Loads | Drafted


@dataclass(frozen=True, slots=True)
class Missing:
    """No answer. It is not kept, so a later run asks again."""

    reason: str
    refused: bool = field(default=True)  # whoever was asked says no, and would say so again; else it broke on the way


def as_json(answer: Answer) -> dict[str, Any]:
    return {"kind": type(answer).__name__, **asdict(answer)}


def of_json(record: dict[str, Any]) -> Answer:
    """The inverse of `as_json`. Raises KeyError, TypeError or ValueError when it is no answer."""
    fields = {key: value for key, value in record.items() if key != "kind"}
    match record["kind"]:
        case "Said":
            reply = fields.pop("reply")
            calls = tuple(Call(*call) for call in reply["tool_calls"])
            return Said(Reply(reply["content"], reply["reasoning"], calls), **fields)
        case "Scored":
            return Scored(tuple(Span(int(a), int(b), float(c)) for a, b, c in fields["spans"]))
        case "Loads":
            return Loads(tuple(tuple(int(rows) for rows in layer) for layer in fields["layers"]))
        case "Drafted":
            return Drafted(dict(fields["found"]))
        case kind:
            raise ValueError(f"no answers of kind {kind!r}")
