"""The reply parser: fields, markers, endings, and independence of how the ids are split."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.testing.tokenizers import build_tokenizer
from benthic.text.prompt import ChatEncoder
from benthic.text.reply import Delta, Message, ReplyParser
from benthic.text.tokenizer import SPECIALS, Tokenizer
from benthic.types import FinishReason

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(build_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def parser(encoder: ChatEncoder, **options: Any) -> ReplyParser:
    return ReplyParser(encoder, encoder.encode([{"role": "user", "content": "x, as JSON"}], **options))


def ids_of(tokenizer: Tokenizer, *parts: str) -> list[int]:
    """Parts that name a special token become its id, the others text."""
    ids: list[int] = []
    for part in parts:
        ids += [tokenizer.special_ids[part]] if part in SPECIALS else tokenizer.encode(part, bos=False)
    return ids


def single_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    table = {tokenizer.token_bytes(id): id for id in range(len(tokenizer))}
    return [table[bytes([byte])] for byte in data]


def calls(tokenizer: Tokenizer) -> list[int]:
    return ids_of(
        tokenizer,
        *("Sure.\n\n<", "dsml", " calls>\n<", "dsml", ' invoke name="weather">\n<', "dsml"),
        *(' parameter name="city" string="true">Par"is\n😀</', "dsml", " parameter>\n<", "dsml"),
        *(' parameter name="days" string="false">3</', "dsml", " parameter>\n</", "dsml", " invoke>\n<", "dsml"),
        *(' invoke name="other">\n\n</', "dsml", " invoke>\n</", "dsml", " calls>"),
    )


def run(reply: ReplyParser, ids: Sequence[int], sizes: Sequence[int] = (1,), end: FinishReason = FinishReason.STOP):
    """Push ids in pieces of the given sizes, in turn; what came, joined by field, and the message."""
    deltas: list[Delta] = []
    at = turn = 0
    while at < len(ids) and not reply.finished:
        size = sizes[turn % len(sizes)]
        deltas += reply.push(ids[at : at + size])
        at, turn = at + size, turn + 1
    deltas += reply.finish(end)
    joined = Message(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        reply.message.tool_calls,
    )
    assert joined == reply.message
    for index, made in enumerate(reply.message.tool_calls):
        pieces = [delta.tool_call for delta in deltas if delta.tool_call and delta.tool_call.index == index]
        assert [(piece.id, piece.name) for piece in pieces] == [(made.id, made.name)] + [("", "")] * (len(pieces) - 1)
        assert "".join(piece.arguments for piece in pieces) == made.arguments
    for delta in deltas:
        assert sum(map(bool, (delta.reasoning, delta.content, delta.tool_call))) == 1
    return reply.message


def test_plain_answer(encoder: ChatEncoder) -> None:
    reply = parser(encoder)
    message = run(reply, ids_of(encoder.tokenizer, "\n\nHello 😀, <think> world.\n"))
    assert message == Message(content="Hello 😀, <think> world.\n")
    assert (reply.finish_reason, reply.finished) == ("stop", True)
    assert message.as_dict() == {"role": "assistant", "content": "Hello 😀, <think> world.\n"}


def test_thinking_then_answer(encoder: ChatEncoder) -> None:
    reply = parser(encoder, thinking=True)
    message = run(reply, ids_of(encoder.tokenizer, "\nhm 你好\n", "think_close", "\n\nyes", "think_close", "!"))
    assert message == Message(reasoning="hm 你好", content="yes!")
    assert message.as_dict()["reasoning_content"] == "hm 你好"


def test_spelled_out_markers_are_text(encoder: ChatEncoder) -> None:
    """The same characters in ordinary tokens close nothing: what a caller made the model repeat stays text."""
    message = run(parser(encoder, thinking=True), ids_of(encoder.tokenizer, "a</think>".replace("</", "</") + "b"))
    assert message == Message(reasoning="a</think>b")


@pytest.mark.parametrize("sizes", [(1,), (3,), (500,)])
def test_tool_calls(encoder: ChatEncoder, sizes: tuple[int, ...]) -> None:
    reply = parser(encoder, tools=[TOOL])
    message = run(reply, calls(encoder.tokenizer) + ids_of(encoder.tokenizer, "dropped"), sizes)
    assert message.content == "Sure."
    assert [call.name for call in message.tool_calls] == ["weather", "other"]
    assert json.loads(message.tool_calls[0].arguments) == {"city": 'Par"is\n😀', "days": 3}
    assert message.tool_calls[1].arguments == "{}"
    assert reply.finish_reason == "tool_calls"
    turn = message.as_dict()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in turn["tool_calls"]]
    again = encoder.encode([{"role": "user", "content": "x"}, turn, *results], tools=[TOOL])
    assert encoder.tokenizer.decode(calls(encoder.tokenizer)) in encoder.tokenizer.decode(again.ids)


def test_calls_end_the_reply_by_themselves(encoder: ChatEncoder) -> None:
    reply = parser(encoder, tools=[TOOL])
    *start, last = calls(encoder.tokenizer)
    reply.push(start)
    assert not reply.finished
    reply.push([last])
    assert (reply.finished, reply.finish_reason) == (True, "tool_calls")
    assert reply.push(ids_of(encoder.tokenizer, "more")) == []
    assert reply.message.content == "Sure."


def test_end_of_a_block_inside_an_argument_is_not_the_end(encoder: ChatEncoder) -> None:
    """The package closes the argument there and reads on; so must the reply, since the call is not whole."""
    tokenizer = encoder.tokenizer
    ids = calls(tokenizer)
    at = next(i for i, id in enumerate(ids) if tokenizer.token_bytes(id) == b"Par")
    reply = parser(encoder, tools=[TOOL])
    reply.push(ids[:at])
    reply.push(ids_of(tokenizer, "</", "dsml", " calls>"))
    assert not reply.finished
    reply.push(ids[at:])
    assert reply.finished
    assert [call.name for call in reply.message.tool_calls] == ["weather", "other"]
    whole = parser(encoder, tools=[TOOL])
    whole.push([*ids[:at], *ids_of(tokenizer, "</", "dsml", " calls>"), *ids[at:]])
    assert [call.arguments for call in whole.message.tool_calls] == [
        call.arguments for call in reply.message.tool_calls
    ]


def test_calls_inside_thinking_end_it(encoder: ChatEncoder) -> None:
    reply = parser(encoder, tools=[TOOL], thinking=True)
    message = run(reply, calls(encoder.tokenizer))
    assert (message.reasoning, message.content, len(message.tool_calls)) == ("Sure.", "", 2)


def test_reply_to_a_required_tool_starts_inside_the_block(encoder: ChatEncoder) -> None:
    reply = parser(encoder, tools=[TOOL], tool_choice="required")
    ids = calls(encoder.tokenizer)
    start = [i for i, id in enumerate(ids) if id == encoder.tokenizer.special_ids["dsml"]][1] - 1
    assert [call.name for call in run(reply, ids[start:]).tool_calls] == ["weather", "other"]


def test_without_tools_the_markup_is_content(encoder: ChatEncoder) -> None:
    message = run(parser(encoder), calls(encoder.tokenizer))
    assert message.content == encoder.tokenizer.decode(calls(encoder.tokenizer))
    assert message.tool_calls == ()


def test_length_inside_a_call_leaves_it_open(encoder: ChatEncoder) -> None:
    ids = calls(encoder.tokenizer)
    reply = parser(encoder, tools=[TOOL])
    message = run(reply, ids[: ids.index(encoder.tokenizer.encode("3", bos=False)[0])], end=FinishReason.LENGTH)
    assert reply.finish_reason == "length"
    assert message.tool_calls[0].arguments.startswith('{"city": "Par')
    assert not message.tool_calls[0].arguments.endswith("}")


@pytest.mark.parametrize("name", ["eos", "user", "system", "bos", "image", "pad"])
@pytest.mark.parametrize("sizes", [(1,), (100,)])
def test_end_and_control_ids_end_the_turn_and_are_not_shown(
    encoder: ChatEncoder, name: str, sizes: tuple[int, ...]
) -> None:
    reply = parser(encoder)
    message = run(reply, ids_of(encoder.tokenizer, "yes", name, "no"), sizes, end=FinishReason.LENGTH)
    assert message.content == "yes"
    assert (reply.finish_reason, reply.finished) == ("stop", True)


def test_nothing_at_all(encoder: ChatEncoder) -> None:
    for end in FinishReason:
        reply = parser(encoder)
        assert reply.push([]) == []
        assert run(reply, [], end=end) == Message()
        assert reply.finish_reason == end.value
        assert reply.finish() == []
    reply = parser(encoder)
    reply.push([encoder.tokenizer.eos_id])
    assert (reply.finished, reply.finish_reason) == (True, "stop")


def test_abort_keeps_what_came(encoder: ChatEncoder) -> None:
    reply = parser(encoder)
    assert run(reply, ids_of(encoder.tokenizer, "half an ans"), end=FinishReason.ABORT).content == "half an ans"
    assert reply.finish_reason == "abort"


def test_half_a_character_is_never_shown(encoder: ChatEncoder) -> None:
    reply = parser(encoder)
    smile = single_bytes(encoder.tokenizer, "😀".encode())
    assert [reply.push([id]) for id in smile] == [[], [], [], [Delta(content="😀")]]
    reply.push(smile[:3])
    reply.finish(FinishReason.LENGTH)
    assert reply.message.content == "😀"  # the official form drops an unfinished end


def test_look_alike_of_a_marker_is_held_and_then_shown(encoder: ChatEncoder) -> None:
    reply = parser(encoder, tools=[TOOL])
    shown = [delta.content for id in ids_of(encoder.tokenizer, "a\n\n<") for delta in reply.push([id])]
    assert "".join(shown) == "a"
    assert "".join(delta.content for delta in reply.finish()) == "\n\n<"


def test_call_block_that_was_only_begun_is_dropped(encoder: ChatEncoder) -> None:
    message = run(parser(encoder, tools=[TOOL]), ids_of(encoder.tokenizer, "a\n\n<", "dsml", " cal"))
    assert message == Message(content="a")


def test_stop_strings_end_the_answer_only(encoder: ChatEncoder) -> None:
    reply = parser(encoder, thinking=True, stop=["stop it", "never"])
    message = run(reply, ids_of(encoder.tokenizer, "stop it", "think_close", "do not stop it now"))
    assert message == Message("stop it", "do not ")
    assert (reply.finish_reason, reply.finished) == ("stop", True)


def test_json_object_is_cut_out_of_its_fence(encoder: ChatEncoder) -> None:
    reply = parser(encoder, response_format={"type": "json_object"})
    message = run(reply, ids_of(encoder.tokenizer, 'Here:\n```json\n{"a": 1}\n```\nDone'))
    assert json.loads(message.content) == {"a": 1}


@given(data=st.data())
def test_any_split_gives_the_same_reply(encoder: ChatEncoder, data: st.DataObject) -> None:
    tokenizer = encoder.tokenizer
    options = data.draw(
        st.sampled_from([{}, {"thinking": True}, {"tools": [TOOL]}, {"tools": [TOOL], "thinking": True}])
    )
    pieces = {
        "text": ids_of(tokenizer, "\n so 你好 <"),
        "close": ids_of(tokenizer, "think_close"),
        "calls": calls(tokenizer),
        "bytes": single_bytes(tokenizer, "😀é".encode()),
        "noise": [tokenizer.special_ids["dsml"], tokenizer.special_ids["ref_open"], len(tokenizer) + 5],
    }
    ids = [id for key in data.draw(st.lists(st.sampled_from(list(pieces)), max_size=6)) for id in pieces[key]]
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    whole, split = parser(encoder, **options), parser(encoder, **options)
    first, second = run(whole, ids, (len(ids) + 1,)), run(split, ids, sizes)
    assert (first.reasoning, first.content) == (second.reasoning, second.content)
    assert [(call.name, call.arguments) for call in first.tool_calls] == [
        (call.name, call.arguments) for call in second.tool_calls
    ]
    assert whole.finish_reason == split.finish_reason


@given(text=st.text(max_size=60))
def test_any_answer_text_comes_through(encoder: ChatEncoder, text: str) -> None:
    message = run(parser(encoder), ids_of(encoder.tokenizer, "a", text, "z") if text not in SPECIALS else [])
    assert message.content == (f"a{text}z" if text not in SPECIALS else "")
