"""Output token ids -> reasoning, content and tool calls. Source: online API specification, sections 2.6 and 5.

Ids, never text, reach the parser: a control token and the same characters spelled out are different things there.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from benthic.text.prompt import ChatEncoder, Prompt
from benthic.text.tokenizer import Tokenizer
from benthic.types import FinishReason


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call. The first piece of a call carries id and name; arguments join to JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one push added. Exactly one of the three is not empty."""

    reasoning: str = ""
    content: str = ""
    tool_call: ToolCallDelta | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text, as the model wrote it; cut short when the reply ended by length


@dataclass(frozen=True, slots=True)
class Message:
    """The whole reply, as far as it came."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The turn in OpenAI chat form, ready to stand in the history of the next request."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return turn


class ReplyParser:
    """Parses the reply to one prompt; make one for each completion.

    `finished` is true once the reply is complete by itself: an end-of-sequence or control id came, the block of tool
    calls closed, or a stop string matched. The engine's request should then be aborted; later ids are ignored.
    """

    def __init__(self, encoder: ChatEncoder, prompt: Prompt):
        tokenizer = encoder.tokenizer
        self._block = _BlockEnd(tokenizer) if prompt.request.parsing_options.parse_tool_calls else None
        self._ends = frozenset((tokenizer.eos_id, *tokenizer.control_ids))
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt.request, "", "")
        self._stream = recipe.StreamProcessor(generator, prompt.request.parsing_options, encoder.recipe_tokenizer)
        self._stream.push(recipe.InferenceChunk.ready())
        self._ended = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self.finish_reason: str | None = None  # "stop", "length", "tool_calls" or "abort", once the reply is over

    @property
    def finished(self) -> bool:
        return self._ended or self._stream.finished

    @property
    def message(self) -> Message:
        """The reply as far as it came. Cost: its length."""
        calls = [ToolCall(id, name, "".join(arguments)) for id, name, arguments in self._calls]
        return Message("".join(self._reasoning), "".join(self._content), tuple(calls))

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """What these ids add. Characters and markers that are not whole yet wait for the next push."""
        if self.finished or not ids:
            return []
        deltas: list[Delta] = []
        start = 0
        for i, id in enumerate(ids):
            if id in self._ends:
                deltas += self._feed(ids[start:i])
                return deltas + self._end()
            if self._block is not None and self._block.push(id):
                deltas += self._feed(ids[start : i + 1])
                if self._last_call_is_whole():
                    return deltas + self._end()
                start = i + 1
        return deltas + self._feed(ids[start:])

    def finish(self, reason: FinishReason = FinishReason.STOP) -> list[Delta]:
        """The completion is over: what was held back comes out, and `finish_reason` is set. May be called again."""
        if self.finish_reason is not None:
            return []
        deltas = self._close(reason)
        if reason is FinishReason.ABORT:
            self.finish_reason = "abort"
        return deltas

    def _feed(self, ids: Sequence[int]) -> list[Delta]:
        if not ids or self._stream.finished:
            return []
        return self._deltas(self._stream.push(recipe.InferenceChunk.tokens(ids)))

    def _end(self) -> list[Delta]:
        self._ended = True
        return self._close(FinishReason.STOP)

    def _last_call_is_whole(self) -> bool:
        """A closing tag inside an argument closes nothing; the arguments of the last call tell."""
        if not self._calls:
            return False
        try:
            json.loads("".join(self._calls[-1][2]))
        except ValueError:
            return False
        return True

    def _close(self, reason: FinishReason) -> list[Delta]:
        if self._stream.finished:
            return self._deltas(self._stream.finish())
        ending = recipe.InferenceFinishReason
        last = recipe.InferenceChunk.finish(ending.Length if reason is FinishReason.LENGTH else ending.Stop)
        return self._deltas([*self._stream.push(last), *self._stream.finish()])

    def _deltas(self, chunks: Sequence[Any]) -> list[Delta]:
        """Chat chunks -> deltas, which `message` collects."""
        deltas: list[Delta] = []
        for chunk in chunks:
            (choice,) = json.loads(chunk.to_json())["choices"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            delta = choice["delta"]
            if text := delta.get("reasoning_content"):
                self._reasoning.append(text)
                deltas.append(Delta(reasoning=text))
            if text := delta.get("content"):
                self._content.append(text)
                deltas.append(Delta(content=text))
            for call in delta.get("tool_calls") or ():
                piece = ToolCallDelta(
                    call["index"],
                    call.get("id") or "",
                    call["function"].get("name") or "",
                    call["function"].get("arguments") or "",
                )
                if piece.index == len(self._calls):
                    self._calls.append((piece.id, piece.name, []))
                self._calls[piece.index][2].append(piece.arguments)
                deltas.append(Delta(tool_call=piece))
        return deltas


_BLOCK_END = b" calls>"


class _BlockEnd:
    """Recognises the end of a block of tool calls in token ids: `</`, the marker id, then ` calls>`.

    The stream parser drops what follows the block but does not report the end, measured with version 0.2.0.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._bytes_of = tokenizer.token_bytes
        self._marker = tokenizer.special_ids["dsml"]
        self._before = b""  # the last two bytes
        self._tag: bytes | None = None  # bytes since the marker of a closing tag

    def push(self, id: int) -> bool:
        """True for the id that completes the end of a block."""
        data = self._bytes_of(id)
        if id == self._marker:
            self._tag = b"" if self._before == b"</" else None
        elif self._tag is not None:
            self._tag += data
            if self._tag.startswith(_BLOCK_END):
                self._tag = None
                return True
            if not _BLOCK_END.startswith(self._tag):
                self._tag = None
        self._before = (self._before + data)[-2:]
        return False
