"""Conversation -> prompt token ids, by the deepseek-recipe package alone. Source: online API specification, section 2.

The prompt is encoded piece by piece from the conversation, never rendered to one string and tokenised: text of the user
cannot become a control token that way. This file and `reply.py` are the only users of the package.

An image is one id in what the package encodes; here it becomes its span, as long as the model says.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import deepseek_recipe as recipe

from benthic.errors import BadField, BadMessages, BadTokenizer, ImageTooLarge
from benthic.text import images
from benthic.text.tokenizer import Tokenizer

MODEL = "DeepSeek-V4.1-Flash"  # selects the V4.1 form; not the name clients see
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")


class Start(Enum):
    """Where the reply begins, as the prompt leaves it."""

    REASONING = "reasoning"  # the prompt ends with <think>
    CONTENT = "content"  # the prompt ends with </think>, or with the beginning of an answer
    TOOL_CALLS = "tool_calls"  # the prompt opened a block of tool calls


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer must look like. The format states it to the model; a grammar has to enforce it."""

    kind: str  # "json", "regex", "tool_call" or "tool_call_required"
    schema: str  # JSON schema, expression or tool list; empty: any JSON value


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, and the span of ids that stands for it."""

    first: int  # position of the span's first id
    tokens: int  # its length; every id of it is the tokenizer's image token
    source: bytes = field(repr=False)  # PNG, JPEG, GIF or WebP; its header was read, its pixels were not
    longest: int | None = None  # pixels: the longer side is brought down to so many first; None: as it is
    where: str = "image"  # for the text of an error, as in "messages[0], image 1"


Spans = Callable[[int, int], int]  # width and height of an image in pixels -> tokens of its span


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded conversation, and what a parser of the reply has to know about it."""

    ids: tuple[int, ...]
    thinking: bool
    start: Start
    constraint: Constraint | None
    request: recipe.ConversationRequest  # for `reply.ReplyParser`
    images: tuple[PromptImage, ...] = ()  # in the order of their spans


class ChatEncoder:
    """Encodes conversations with one tokenizer. Building it reads the tokenizer file once more (0.2 s for V4.1)."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.recipe_tokenizer = recipe.Tokenizer.from_file(str(tokenizer.path))
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self.recipe_tokenizer)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        spans: Spans | None = None,
    ) -> Prompt:
        """The prompt of a conversation whose next turn is the assistant's.

        messages         OpenAI chat form: {"role", "content"}, assistant turns also "reasoning_content", "tool_calls"
                         and "prefix": true (to be continued), tool turns "tool_call_id"; "developer" means "system".
        thinking         whether the model thinks first; effort: one of EFFORTS, None is high.
        tools            OpenAI function tools; tool_choice: "auto", "none", "required" or one function.
        response_format  {"type": "text" | "json_object" | "json_schema" | "regex", ...}.
        stop             strings that end the answer; matched in the answer only, not in thinking or tool calls.
        spans            how many tokens an image of some width and height takes. With it user, system and tool messages
                         may hold `image_url` parts with data URLs; "detail": "low" reads a smaller picture.
        Raises           BadMessages, BadField, BadImage; MissingDependency for an image without Pillow.
        """
        if effort is not None and effort not in EFFORTS:
            raise BadField("effort", effort, f"one of {', '.join(EFFORTS)}")
        if effort not in (None, "none") and not thinking:
            raise BadField("effort", effort, "no effort while thinking is off")
        turns = _checked(messages)
        if spans is not None:
            images.check_parts(turns)
        body: dict[str, Any] = {"model": MODEL, "messages": turns}
        body["thinking"] = {"type": "enabled" if thinking and effort != "none" else "disabled"}
        if effort not in (None, "none"):
            body["reasoning_effort"] = effort
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        if tool_choice is not None:
            body["tool_choice"] = tool_choice
        if response_format is not None:
            body["response_format"] = dict(response_format)
        if stop:
            body["stop"] = list(stop)
        try:
            request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
        except (recipe.ConversionError, ValueError, TypeError) as error:
            raise BadMessages("conversation", str(error).removeprefix("invalid request body: ")) from error
        holders = [i for i, message in enumerate(request.conversation.messages) if message.image_sources]
        if holders and spans is None:
            raise BadMessages(f"messages[{holders[0]}].content", "holds an image, this entry point takes text only")
        try:
            ids = self._encoding.encode(request.conversation)
        except RuntimeError as error:
            raise BadTokenizer(self.tokenizer.path, str(error)) from error
        found: tuple[PromptImage, ...] = ()
        if holders and spans is not None:
            # the prompt's order of images, which may differ from the messages': tool results stand as their calls do
            sources = self._encoding.render_conversation(request.conversation).image_sources
            ids, found = _with_spans(ids, self.tokenizer.special_ids["image"], sources, spans)
        parsing, wanted = request.parsing_options, request.inference_options.output_constraint
        return Prompt(
            ids=tuple(ids),
            thinking=request.conversation.thinking_mode,
            start=_start(parsing),
            constraint=None if wanted is None else Constraint(wanted.kind, wanted.schema),
            request=request,
            images=found,
        )


def _with_spans(
    ids: Sequence[int], image_id: int, sources: Sequence[recipe.ImageSource], spans: Spans
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Ids with one image id for each source -> ids with a span for each, and where they stand."""
    places = [i for i, id in enumerate(ids) if id == image_id]
    assert len(places) == len(sources), f"{len(places)} image ids for {len(sources)} images"
    longer: list[int] = []
    found: list[PromptImage] = []
    seen: Counter[str] = Counter()
    pixels = done = 0
    for place, source in zip(places, sources, strict=True):
        message = source.path.removeprefix(".")
        seen[message] += 1
        where = f"{message}, image {seen[message]}"
        data = images.from_data_url(source.data_url or "", where)
        picture = images.open_lazily(data, where)
        pixels += picture.width * picture.height
        if pixels > images.MAX_PIXELS:
            raise ImageTooLarge(f"{where} brings the images to {pixels} pixels", f"{images.MAX_PIXELS} pixels in all")
        longest = images.LOW_DETAIL_SIDE if source.detail == "low" else None
        longer += ids[done:place]
        tokens = spans(*images.scaled(picture.width, picture.height, longest))
        found.append(PromptImage(len(longer), tokens, data, longest, where))
        longer += [image_id] * tokens
        done = place + 1
    return [*longer, *ids[done:]], tuple(found)


def _start(parsing: recipe.ParsingOptions) -> Start:
    if parsing.starts_in_tool_calls:
        return Start.TOOL_CALLS
    stage = parsing.thinking_initial_stage
    return Start.REASONING if stage is not None and stage.starts_in_reasoning() else Start.CONTENT


def _checked(messages: object) -> list[dict[str, Any]]:
    """The messages as plain dicts, faults named by their place; what is left is checked by the package."""
    if not isinstance(messages, list | tuple):
        raise BadMessages("messages", f"is {type(messages).__name__}, want a list of messages")
    if not messages:
        raise BadMessages("messages", "is empty, want at least one message")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(cast(Sequence[object], messages)):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadMessages(where, f"is {type(message).__name__}, want an object with role and content")
        turn = dict(cast(Mapping[str, Any], message))
        if turn.get("role") not in ROLES:
            raise BadMessages(f"{where}.role", f"is {turn.get('role')!r}, want one of {', '.join(ROLES)}")
        content = turn.get("content")
        if content is None and turn["role"] != "assistant":
            raise BadMessages(f"{where}.content", "is missing")
        if content is not None and not isinstance(content, str | list):
            raise BadMessages(f"{where}.content", f"is {type(content).__name__}, want text or a list of parts")
        if turn["role"] == "developer":
            turn["role"] = "system"
        checked.append(turn)
    return checked
