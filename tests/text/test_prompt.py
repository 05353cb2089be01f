"""Prompt encoding against the facts of the conversation format. Expected texts are built from spellings, not copied."""

import ast
import base64
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest
from PIL import Image

from benthic.errors import BadField, BadImage, BadMessages, ImageNotFetched, ImageTooLarge, TooManyImages
from benthic.testing.tokenizers import build_tokenizer
from benthic.text import prompt as prompt_module
from benthic.text import reply as reply_module
from benthic.text.prompt import EFFORTS, ChatEncoder, Prompt, Start
from benthic.text.tokenizer import SPECIALS, Tokenizer

B, E, S, U, A = (SPECIALS[name].spelling for name in ("bos", "eos", "system", "user", "assistant"))
THINK, DONE, DSML = (SPECIALS[name].spelling for name in ("think_open", "think_close", "dsml"))
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(arguments: str, name: str = "weather", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(build_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def tokenizer(encoder: ChatEncoder) -> Tokenizer:
    return encoder.tokenizer


def text_of(tokenizer: Tokenizer, prompt: Prompt) -> str:
    return tokenizer.decode(prompt.ids)


# Layout of turns


def test_one_user_turn_without_thinking(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    prompt = encoder.encode([user("Hi there")])
    ids = tokenizer.special_ids
    expected = [ids["bos"], ids["user"], *tokenizer.encode("Hi there", bos=False), ids["assistant"], ids["think_close"]]
    assert list(prompt.ids) == expected
    assert (prompt.thinking, prompt.start, prompt.constraint) == (False, Start.CONTENT, None)


@pytest.mark.parametrize("effort", [*EFFORTS, None])
def test_thinking_header_and_effort(encoder: ChatEncoder, tokenizer: Tokenizer, effort: str | None) -> None:
    prompt = encoder.encode([user("Hi")], thinking=True, effort=effort)
    text = text_of(tokenizer, prompt)
    if effort == "none":
        assert (text, prompt.thinking) == (f"{B}{U}Hi{A}{DONE}", False)
        return
    number = {"minimal": 50, "low": 50, "max": 100, "ultra": 100}.get(effort or "high", 75)
    assert text.startswith(f"{B}{S}Reasoning Effort: {number} (")
    assert text.endswith(f")\n\n{U}Hi{A}{THINK}")
    assert (prompt.thinking, prompt.start) == (True, Start.REASONING)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_message(encoder: ChatEncoder, tokenizer: Tokenizer, role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}, user("Hi")]
    assert text_of(tokenizer, encoder.encode(messages)) == f"{B}{S}Be brief.{U}Hi{A}{DONE}"
    text = text_of(tokenizer, encoder.encode(messages, thinking=True))
    assert text.startswith(f"{B}{S}Reasoning Effort: 75 (")
    assert text.endswith(f")\n\nBe brief.{U}Hi{A}{THINK}")


def test_multi_turn(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    messages = [user("a"), assistant("b", reasoning_content="why"), user("c"), user("d")]
    assert text_of(tokenizer, encoder.encode(messages)) == f"{B}{U}a{A}{DONE}b{E}{U}c\n\nd{A}{DONE}"
    thinking = text_of(tokenizer, encoder.encode(messages, thinking=True))
    assert thinking.endswith(f"{U}a{A}{DONE}b{E}{U}c\n\nd{A}{THINK}")  # reasoning before the last user turn is dropped
    with_tools = text_of(tokenizer, encoder.encode(messages, thinking=True, tools=[TOOL]))
    assert with_tools.endswith(f"{U}a{A}{THINK}why{DONE}b{E}{U}c\n\nd{A}{THINK}")  # with tools all of it stays


def test_history_that_ends_with_an_answer_opens_a_new_turn(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    assert text_of(tokenizer, encoder.encode([user("a"), assistant("b")])) == f"{B}{U}a{A}{DONE}b{E}{A}{DONE}"


def test_prefix_continues_the_answer_or_the_thinking(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    prompt = encoder.encode([user("a"), assistant("b", prefix=True)])
    assert (text_of(tokenizer, prompt), prompt.start) == (f"{B}{U}a{A}{DONE}b", Start.CONTENT)
    prompt = encoder.encode([user("a"), assistant("b", reasoning_content="r", prefix=True)], thinking=True)
    assert (text_of(tokenizer, prompt)[-20:], prompt.start) == (f"{A}{THINK}r{DONE}b"[-20:], Start.CONTENT)
    prompt = encoder.encode([user("a"), assistant("", reasoning_content="r", prefix=True)], thinking=True)
    assert (text_of(tokenizer, prompt)[-8:], prompt.start) == (f"{THINK}r", Start.REASONING)


def test_reminder_and_parts(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "latest_reminder", "content": "r"}]
    reminder = SPECIALS["reminder"].spelling
    assert text_of(tokenizer, encoder.encode(messages)) == f"{B}{U}a\n\nb{reminder}r{A}{DONE}"


# Tools and response formats


def test_tools_section_and_calls(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    messages = [
        user("Paris?"),
        assistant("", reasoning_content="look", tool_calls=[call('{"city": "Paris", "days": 2}')]),
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    prompt = encoder.encode(messages, thinking=True, tools=[TOOL])
    text = text_of(tokenizer, prompt)
    assert text.count("## Tools") == 1
    schema = '{"type": "object", "properties": {"city": {"type": "string"}}}'
    assert f'{{"name": "weather", "description": "tells the weather", "parameters": {schema}}}' in text
    calls = (
        f'\n\n<{DSML} calls>\n<{DSML} invoke name="weather">\n'
        f'<{DSML} parameter name="city" string="true">Paris</{DSML} parameter>\n'
        f'<{DSML} parameter name="days" string="false">2</{DSML} parameter>\n'
        f"</{DSML} invoke>\n</{DSML} calls>"
    )
    result = "<tool_result>sunny</tool_result>"
    assert text.endswith(f"{U}Paris?{A}{THINK}look{DONE}{calls}{E}{U}{result}{A}{THINK}")
    assert prompt.constraint is not None
    assert prompt.constraint.kind == "tool_call"


def test_tool_results_stand_in_the_order_of_the_calls(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    messages = [
        user("x"),
        assistant("", tool_calls=[call("{}", id="c1"), call("{}", id="c2")]),
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
    ]
    text = text_of(tokenizer, encoder.encode(messages, tools=[TOOL]))
    assert text.endswith(f"{U}<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>{A}{DONE}")


def test_reasoning_of_a_tool_turn_without_declared_tools_is_dropped(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    """Where the package and the model's own encoder differ; a new version of the package that changes it shows here."""
    messages = [
        user("x"),
        assistant("", reasoning_content="why", tool_calls=[call("{}")]),
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    text = text_of(tokenizer, encoder.encode(messages, thinking=True))
    assert f"{A}{DONE}\n\n<{DSML} calls>" in text
    assert "why" not in text


def test_required_tool_choice_opens_the_block(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    prompt = encoder.encode([user("x")], tools=[TOOL], tool_choice="required")
    assert text_of(tokenizer, prompt).endswith(f"{A}{DONE}\n\n<{DSML} calls>\n")
    assert prompt.start is Start.TOOL_CALLS
    assert prompt.constraint is not None
    assert prompt.constraint.kind == "tool_call_required"
    without = encoder.encode([user("x")], tools=[TOOL], tool_choice="none")
    assert text_of(tokenizer, without) == f"{B}{U}x{A}{DONE}"


def test_response_formats(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    prompt = encoder.encode([user("as JSON")], response_format=wanted)
    text = text_of(tokenizer, prompt)
    assert text.startswith(f"{B}{S}\n\n## Response Format")
    assert '{"type": "object", "properties": {"n": {"type": "integer"}}}' + f"{U}as JSON" in text
    assert prompt.constraint is not None
    assert (prompt.constraint.kind, "integer" in prompt.constraint.schema) == ("json", True)
    prompt = encoder.encode([user("as JSON")], response_format={"type": "json_object"})
    assert '{"type": "json_object"}' + U in text_of(tokenizer, prompt)
    plain = encoder.encode([user("x")], response_format={"type": "text"})
    assert plain.ids == encoder.encode([user("x")]).ids


# User text cannot become control


def everywhere(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation with `text` in every place a caller can write to."""
    schema = {"type": "object", "properties": {f"k{text}": {"type": "string", "description": text}}}
    tool = {"type": "function", "function": {"name": "weather", "description": text, "parameters": schema}}
    arguments = json.dumps({f"k{text}": text, "n": [text]})
    messages = [
        {"role": "system", "content": f"s{text}"},
        user(f"{text}u{text}"),
        assistant(f"a{text}", reasoning_content=f"r{text}", tool_calls=[call(arguments)]),
        {"role": "tool", "tool_call_id": "c1", "content": f"t{text}"},
        {"role": "latest_reminder", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}]},
    ]
    return messages, {"tools": [tool], "thinking": True}


GROUNDING = [name for name in SPECIALS if name.split("_")[0] in ("ref", "box", "point", "polygon")]


@pytest.mark.parametrize("name", [name for name in SPECIALS if name not in GROUNDING])
def test_no_spelling_in_any_place_becomes_control(encoder: ChatEncoder, tokenizer: Tokenizer, name: str) -> None:
    added = set(tokenizer.added_ids.values())

    def control(text: str) -> list[int]:
        messages, options = everywhere(text)
        return [id for id in encoder.encode(messages, **options).ids if id in added]

    assert control(SPECIALS[name].spelling) == control("x")
    assert len(control("x")) > 10


@pytest.mark.parametrize("name", GROUNDING)
def test_grounding_spellings_are_tokens_only_in_answers(encoder: ChatEncoder, tokenizer: Tokenizer, name: str) -> None:
    spelling, id = SPECIALS[name].spelling, tokenizer.special_ids[name]
    assert id not in encoder.encode([{"role": "system", "content": spelling}, user(spelling)]).ids
    assert id in encoder.encode([user("x"), assistant(spelling), user("y")]).ids


# Faults


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages: "),
        ("hello", "messages: "),
        ({"role": "user"}, "messages: "),
        (["hello"], r"messages\[0\]: "),
        ([{"role": "bot", "content": "x"}], r"messages\[0\]\.role: .*'bot'"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\]\.content: is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: is int"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "conversation: "),
        ([{"role": "user", "content": "\ud800"}], "conversation: "),
        ([{"role": "tool", "content": "x"}], "conversation: "),
        ([user("x"), {"role": "assistant", "content": "", "tool_calls": [{"id": object()}]}], "conversation: "),
    ],
)
def test_bad_messages(encoder: ChatEncoder, messages: Any, where: str) -> None:
    with pytest.raises(BadMessages, match=where):
        encoder.encode(messages)


def test_images_are_refused(encoder: ChatEncoder) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(BadMessages, match=r"messages\[1\]\.content: holds an image"):
        encoder.encode([user("x"), {"role": "user", "content": [image]}])


def test_bad_options(encoder: ChatEncoder) -> None:
    with pytest.raises(BadField, match="effort is 'huge'"):
        encoder.encode([user("x")], thinking=True, effort="huge")
    with pytest.raises(BadField, match="effort is 'high'"):
        encoder.encode([user("x")], effort="high")
    for options in (
        {"tools": [{"type": "function"}]},
        {"tool_choice": "sometimes"},
        {"response_format": {"type": "x"}},
    ):
        with pytest.raises(BadMessages):
            encoder.encode([user("x")], **options)


# Images

IMAGE = SPECIALS["image"].spelling


def png(width: int, height: int, colour: tuple[int, int, int] = (9, 8, 7)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


def image(data: bytes, **more: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def area(width: int, height: int) -> int:
    """Tokens of a span that give its size away."""
    return width * 10 + height


def spans_of(tokenizer: Tokenizer, prompt: Prompt) -> list[tuple[int, int]]:
    """Where runs of the image id stand, as (first, length); spans that touch are one run."""
    ids = [id == tokenizer.special_ids["image"] for id in prompt.ids]
    starts = [i for i, here in enumerate(ids) if here and (i == 0 or not ids[i - 1])]
    return [(i, next((j for j in range(i, len(ids)) if not ids[j]), len(ids)) - i) for i in starts]


def test_an_image_becomes_its_span(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    small, wide = png(3, 2), png(5, 4)
    prompt = encoder.encode(
        [{"role": "user", "content": [text("a"), image(small), text("b"), image(wide)]}], spans=area
    )
    assert [(i.first, i.tokens) for i in prompt.images] == spans_of(tokenizer, prompt)
    assert [i.tokens for i in prompt.images] == [32, 54]
    assert [i.source for i in prompt.images] == [small, wide]
    first, second = IMAGE * 32, IMAGE * 54
    assert text_of(tokenizer, prompt) == f"{B}{U}a\n\n{first}\n\nb\n\n{second}{A}{DONE}"


def test_text_around_an_image_is_encoded_as_without_it(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": [text("Look!"), image(png(3, 2)), text("What is it?")]}]
    prompt = encoder.encode(messages, spans=lambda width, height: 1)
    request = deepseek_recipe.ChatCompletionRequest(
        {"model": "DeepSeek-V4.1-Flash", "messages": messages, "thinking": {"type": "disabled"}}
    ).convert(deepseek_recipe.ConversionOptions())
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(encoder.recipe_tokenizer)
    assert list(prompt.ids) == encoding.encode(request.conversation)


def test_images_in_every_role_that_may_hold_one(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    """Tool results stand in the order of the calls, so their images do too."""
    messages = [
        {"role": "system", "content": [text("s"), image(png(1, 1))]},
        {"role": "user", "content": [image(png(1, 2))]},
        assistant("", tool_calls=[call("{}", id="c1"), call("{}", id="c2")]),
        {"role": "tool", "tool_call_id": "c2", "content": [text("two"), image(png(1, 4))]},
        {"role": "tool", "tool_call_id": "c1", "content": [image(png(1, 3)), text("one")]},
    ]
    prompt = encoder.encode(messages, spans=area, tools=[TOOL])
    assert [i.tokens for i in prompt.images] == [11, 12, 13, 14]
    assert [(i.first, i.tokens) for i in prompt.images] == spans_of(tokenizer, prompt)
    assert [i.where for i in prompt.images] == [f"messages[{n}], image 1" for n in (0, 1, 4, 3)]


def test_an_earlier_turn_keeps_its_image(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": [image(png(2, 2)), text("?")]}, assistant("a box")]
    first, later = encoder.encode(turns[:1], spans=area), encoder.encode([*turns, user("sure?")], spans=area)
    assert later.ids[: len(first.ids)] == first.ids
    assert later.images == first.images


def test_spans_that_touch(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    turn = {"role": "tool", "tool_call_id": "c1", "content": [image(png(1, 1)), image(png(1, 1))]}
    prompt = encoder.encode([user("x"), assistant("", tool_calls=[call("{}")]), turn], spans=area)
    (one, two), ids = prompt.images, tokenizer.special_ids["image"]
    assert two.first >= one.first + one.tokens
    assert [i for i, id in enumerate(prompt.ids) if id == ids] == [
        *range(one.first, one.first + 11),
        *range(two.first, two.first + 11),
    ]


def test_low_detail_is_a_smaller_picture(encoder: ChatEncoder) -> None:
    asked: list[tuple[int, int]] = []

    def spans(width: int, height: int) -> int:
        asked.append((width, height))
        return 5

    content = [image(png(1024, 300), detail=detail) for detail in ("low", "high", "auto", "original")]
    content += [
        image(png(300, 2000), detail="low"),
        image(png(512, 9), detail="low"),
        image(png(3000, 1), detail="low"),
    ]
    prompt = encoder.encode([{"role": "user", "content": content}], spans=spans)
    assert asked == [(512, 150), *[(1024, 300)] * 3, (77, 512), (512, 9), (512, 1)]
    assert [i.longest for i in prompt.images] == [512, None, None, None, 512, 512, 512]


@pytest.mark.parametrize("words", [IMAGE, f"{IMAGE} {IMAGE}", f"a{IMAGE}b"])
def test_text_that_spells_the_image_token_is_no_span(encoder: ChatEncoder, tokenizer: Tokenizer, words: str) -> None:
    messages, options = everywhere(words)
    messages[1] = {"role": "user", "content": [text(words), image(png(2, 1)), text(words), image(png(2, 2))]}
    prompt = encoder.encode(messages, **options, spans=area)
    assert [i.tokens for i in prompt.images] == [21, 22]
    assert [(i.first, i.tokens) for i in prompt.images] == spans_of(tokenizer, prompt)
    assert prompt.ids.count(tokenizer.special_ids["image"]) == 43
    before = tokenizer.decode(prompt.ids[: prompt.images[0].first])
    assert before.endswith(f"{words}\n\n"), "the text stands where it was written"


def part(url: str) -> list[dict[str, Any]]:
    return [user("x"), {"role": "user", "content": [text("y"), {"type": "image_url", "image_url": {"url": url}}]}]


@pytest.mark.parametrize("url", ["http://a/b.png", "https://a/b.png", "file:///etc/passwd", "FTP://a", "b.png", ""])
def test_nothing_is_fetched(encoder: ChatEncoder, url: str) -> None:
    with pytest.raises(ImageNotFetched, match=r"messages\[1\], image 1 is .*nothing is fetched here"):
        encoder.encode(part(url), spans=area)


def test_too_many_images(encoder: ChatEncoder) -> None:
    messages = [{"role": "user", "content": [image(png(1, 1))] * 300}, assistant("a")]
    messages.append({"role": "user", "content": [image(png(1, 1))] * 301})
    with pytest.raises(TooManyImages, match=r"messages\[2\], image 301 .* at most 600"):
        encoder.encode(messages, spans=area)
    messages[2]["content"].pop()
    assert len(encoder.encode(messages, spans=area).images) == 600


def test_images_that_are_too_much_together(encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benthic.text.images.MAX_PIXELS", 100)
    turn = {"role": "user", "content": [image(png(5, 10)), image(png(5, 10)), image(png(1, 1))]}
    with pytest.raises(ImageTooLarge, match=r"messages\[0\], image 3 .*101 pixels.*at most 100 pixels in all"):
        encoder.encode([turn], spans=area)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,", "0 bytes"),
        ("data:image/png;base64,AAAA", "none of PNG, JPEG, GIF or WebP"),
        ("data:image/png;base64," + base64.b64encode(png(9, 9)[:20]).decode(), "is the file whole"),
    ],
)
def test_a_bad_image_is_named_by_its_place(encoder: ChatEncoder, url: str, says: str) -> None:
    with pytest.raises(BadImage, match=rf"messages\[1\], image 1 .*{says}"):
        encoder.encode(part(url), spans=area)


@pytest.mark.parametrize("url", ["data:image/png;base64,!!", "data:image/png,AA", "data:text/plain;base64,AAAA"])
def test_a_data_url_that_the_package_refuses(encoder: ChatEncoder, url: str) -> None:
    with pytest.raises(BadMessages, match=r"messages\[1\]"):
        encoder.encode(part(url), spans=area)


def test_an_answer_holds_no_image(encoder: ChatEncoder) -> None:
    with pytest.raises(BadMessages, match="assistant"):
        encoder.encode([user("x"), {"role": "assistant", "content": [image(png(1, 1))]}], spans=area)


def test_without_images_spans_change_nothing(encoder: ChatEncoder) -> None:
    plain = encoder.encode([user("x")])
    assert plain.images == ()
    assert encoder.encode([user("x")], spans=area).ids == plain.ids


# The package


def names_used(path: Path) -> set[str]:
    """Attributes read from the module that is imported as `recipe`, and what they are read for in turn."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted, inner = node.attr, node.value
            while isinstance(inner, ast.Attribute):
                dotted, inner = f"{inner.attr}.{dotted}", inner.value
            if isinstance(inner, ast.Name) and inner.id == "recipe":
                found.add(dotted)
    return found


CONTRACT: Mapping[str, Callable[[], object]] = {
    "Tokenizer": lambda: deepseek_recipe.Tokenizer.from_str,
    "Tokenizer.from_file": lambda: deepseek_recipe.Tokenizer.from_file,
    "DeepseekV41Encoding": lambda: deepseek_recipe.DeepseekV41Encoding().with_tokenizer,
    "ConversationRequest": lambda: (
        deepseek_recipe.ConversationRequest.conversation,
        deepseek_recipe.ConversationRequest.parsing_options,
        deepseek_recipe.ConversationRequest.inference_options,
    ),
    "ChatCompletionRequest": lambda: deepseek_recipe.ChatCompletionRequest.convert,
    "ChatCompletionRequest.chunk_generator": lambda: deepseek_recipe.ChatCompletionRequest.chunk_generator,
    "ConversionOptions": lambda: deepseek_recipe.ConversionOptions(),
    "ImageSource": lambda: (
        deepseek_recipe.ImageSource.path,
        deepseek_recipe.ImageSource.detail,
        deepseek_recipe.ImageSource.data_url,
        deepseek_recipe.DeepseekV41Encoding.render_conversation,
    ),
    "ConversionError": lambda: deepseek_recipe.ConversionError,
    "ParsingOptions": lambda: (
        deepseek_recipe.ParsingOptions().starts_in_tool_calls,
        deepseek_recipe.ParsingOptions().thinking_initial_stage,
        deepseek_recipe.ThinkingInitialStage.ReasoningStart.starts_in_reasoning(),
    ),
    "StreamProcessor": lambda: (
        deepseek_recipe.StreamProcessor.push,
        deepseek_recipe.StreamProcessor.finish,
        deepseek_recipe.StreamProcessor.finished,
    ),
    "InferenceChunk.ready": lambda: deepseek_recipe.InferenceChunk.ready(),
    "InferenceChunk.tokens": lambda: deepseek_recipe.InferenceChunk.tokens([1]),
    "InferenceChunk.finish": lambda: deepseek_recipe.InferenceChunk.finish(deepseek_recipe.InferenceFinishReason.Stop),
    "InferenceChunk": lambda: deepseek_recipe.InferenceChunk,
    "InferenceFinishReason": lambda: (
        deepseek_recipe.InferenceFinishReason.Stop,
        deepseek_recipe.InferenceFinishReason.Length,
    ),
}


def test_every_name_used_is_in_the_contract() -> None:
    used = names_used(Path(prompt_module.__file__)) | names_used(Path(reply_module.__file__))
    assert used == set(CONTRACT)
    for name, probe in CONTRACT.items():
        assert probe() is not None, name
    assert deepseek_recipe.__version__ == "0.2.0"


def test_nobody_else_uses_the_package() -> None:
    root = Path(prompt_module.__file__).parents[1]
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"^\s*(import|from) deepseek_recipe", path.read_text(), re.MULTILINE)
    }
    users -= {"train/data.py"}  # renders training rows, which end where no prompt ends
    assert users == {"text/prompt.py", "text/reply.py"}
