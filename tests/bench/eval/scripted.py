"""Answers by a script, through either subject: an engine without a model, and a server without an engine.

A script has, for every question that a plan asks, the assistant message that comes back, right or wrong by a pattern.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from benthic.bench.eval.local import LocalSubject
from benthic.bench.eval.prepared import Plan
from benthic.bench.eval.tasks import Target, targets
from benthic.config import Config, load
from benthic.engine.llm import LLM, Choice, Completion, Piece, Timing
from benthic.errors import BadMessages
from benthic.skills.base import SKILLS
from benthic.text.reply import Message, ToolCall
from benthic.types import SamplingParams, Usage
from tests.bench.eval.loopback import Script, Wire, chat

Messages = Mapping[str, dict[str, Any] | None]  # question -> assistant message, None: it is refused


def key(messages: Sequence[Mapping[str, Any]], thinking: bool) -> str:
    return json.dumps([list(messages), thinking], sort_keys=True)


def wrong(message: Mapping[str, Any]) -> dict[str, Any]:
    """Something else of the same form."""
    changed = {**message, "content": f"not {message.get('content') or ''}"}
    if message.get("tool_calls"):
        call = message["tool_calls"][0]
        odd = {**call, "function": {**call["function"], "arguments": '{"not": "this"}'}}
        changed = {**message, "tool_calls": [odd, *message["tool_calls"][1:]]}
    return changed


def answered(plan: Plan, skills: Sequence[str], right: Callable[[int, Target], bool | None]) -> Messages:
    """Every turn of every task of some suites; `right` is asked with the number of the turn. None: no answer."""
    found: dict[str, dict[str, Any] | None] = {}
    number = 0
    for name in skills:
        for i in range(plan.sizes.tasks):
            task = SKILLS[name].make(plan.random(name, i), plan.material, "held_out")
            for target in targets(task):
                message = dict(task.messages[target.turn])
                verdict = right(number, target)
                said = None if verdict is None else message if verdict else wrong(message)
                found[key(target.question.request["messages"], task.thinking)] = said
                number += 1
    return found


# ---- a server --------------------------------------------------------------------------------------------------------


def as_server(messages: Messages) -> Script:
    def script(path: str, body: dict[str, Any]) -> Any:
        assert path == "chat/completions", path
        said = messages[key(body["messages"], body["thinking"]["type"] == "enabled")]
        if said is None:
            return Wire({"error": {"message": "it says nothing"}}, 400)
        fields = {name: value for name, value in said.items() if name not in ("role", "content")}
        return chat(said.get("content") or "", **fields)

    return script


# ---- an engine -------------------------------------------------------------------------------------------------------


class ScriptedEngine:
    """As much of an LLM as conversations need."""

    def __init__(self, messages: Messages, settings: Config):
        self.messages, self.config = messages, settings
        self.path, self.device, self.tokenizer = SimpleNamespace(iterdir=list), "cpu", object()
        self.model = SimpleNamespace(max_positions=1024)
        self.asked: list[str] = []

    def chat(
        self, messages: Any, params: SamplingParams, *, stream: bool, thinking: bool, **rest: Any
    ) -> Iterator[Piece]:
        self.asked.append(key(messages, thinking))
        said = self.messages[key(messages, thinking)]
        if said is None:
            raise BadMessages("conversation", "it says nothing")
        return self._pieces(said)

    def _pieces(self, said: Mapping[str, Any]) -> Iterator[Piece]:
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in said.get("tool_calls") or ()
        )
        message = Message(said.get("reasoning_content") or "", said.get("content") or "", calls)
        choice = Choice(message.content, (), "stop", (), Timing(0.0, 0.0, 0.0), message)
        yield Piece(0, 0, text="...")
        yield Piece(0, 0, finish_reason="stop", completion=Completion((), (choice,), Usage(11, 2)))

    def close(self) -> None:
        pass


def as_engine(messages: Messages) -> LocalSubject:
    return LocalSubject(load(environ={}), lambda settings: cast(LLM, ScriptedEngine(messages, settings)))
