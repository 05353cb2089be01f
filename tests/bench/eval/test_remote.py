"""Asking a server: what goes over the wire, what is tried again, what is final, how log-probabilities are read."""

import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benthic.bench.eval import remote, rendering
from benthic.bench.eval.documents import Document
from benthic.bench.eval.questions import Answer, Chat, Load, Missing, Question, Said, Score, Scored, View
from benthic.bench.eval.remote import RemoteSubject
from benthic.errors import ServerRefused, ServerUnreachable
from benthic.skills.base import Call, Reply
from benthic.testing.tokenizers import build_tokenizer
from benthic.text.prompt import ChatEncoder
from tests.bench.eval.loopback import MODEL, Loopback, Script, Wire, chat, complete, logprobs, pieces, serving

USER = ({"role": "user", "content": "2 + 2?"},)
ASK = Chat({"messages": USER, "thinking": False}, 20)
DOCUMENTS = (
    Document("story", "Tell me of a fox.", "A fox ran home."),
    Document("qa", "What is 2 + 2?", "4, that is four, or quatre."),
)
Ask = Callable[..., tuple[list[Answer | Missing], Loopback]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Put questions to a script; the answers in the order of the questions."""
    with_servers: list[Any] = []

    def run(
        script: Script, questions: list[Question], serve: dict[str, Any] | None = None, **settings: Any
    ) -> tuple[list[Answer | Missing], Loopback]:
        context = serving(script, **(serve or {}))
        server = context.__enter__()
        with_servers.append(context)
        subject = RemoteSubject(server.server(**settings))
        try:
            came = list(subject.answers(questions))
        finally:
            subject.close()
        assert sorted(id(question) for question, _ in came) == sorted(map(id, questions))
        return [next(answer for other, answer in came if other is question) for question in questions], server

    yield run
    for context in with_servers:
        context.__exit__(None, None, None)


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation_goes_out_as_it_is_and_comes_back_read(ask: Ask) -> None:
    tools = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = (
        {"role": "user", "content": [picture, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [{"id": "a", "function": {}}]},
        {"role": "tool", "tool_call_id": "a", "content": "{}"},
    )
    request = {"messages": messages, "thinking": True, "effort": "low", "tools": tools, "response_format": form}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (said,), server = ask(
        lambda path, body: chat("", reasoning_content="so", tool_calls=[call]), [Chat(request, 9)], api_key="k"
    )
    assert said == Said(Reply("", "so", (Call("f", '{"x": 1}'),)), "tool_calls", 11, 2)
    ((path, body, headers),) = server.asked
    assert path == "chat/completions"
    assert headers["authorization"] == "Bearer k"
    assert body == {
        "model": MODEL,
        "messages": json.loads(json.dumps(messages)),
        "tools": list(tools),
        "response_format": form,
        "temperature": 0.0,
        "max_tokens": 9,
        "stream": False,
        "reasoning_effort": "low",
        "thinking": {"type": "enabled"},
    }


def test_a_seed_goes_out_where_something_is_drawn(ask: Ask) -> None:
    _, server = ask(lambda path, body: chat("x"), [replace(ASK, temperature=0.8, seed=5)])
    assert server.bodies("chat/completions")[0]["seed"] == 5


@pytest.mark.parametrize(
    ("message", "want"),
    [
        ({"content": None}, Reply("")),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, Reply("ab")),
        ({"content": "b", "reasoning": "a"}, Reply("b", "a")),
        ({"content": "\n<think>a</think>b"}, Reply("b", "a")),
        ({"content": "<think>never closed"}, Reply("<think>never closed")),
        (
            {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
            Reply("", "", (Call("f", '{"x": 1}'),)),
        ),
    ],
)
def test_other_spellings_of_a_reply(ask: Ask, message: dict[str, Any], want: Reply) -> None:
    (said,), _ = ask(lambda path, body: chat(**message), [ASK])
    assert isinstance(said, Said)
    assert said.reply == want


# ---- what is tried again ---------------------------------------------------------------------------------------------


def in_turn(*answers: Any) -> Script:
    left = list(answers)
    return lambda path, body: left.pop(0)


@pytest.mark.parametrize(
    "first",
    [
        Wire({"error": {"message": "slow down"}}, 429, {"retry-after": "0"}),
        Wire({"error": {"message": "oops"}}, 500),
        Wire(None, 503, raw=b"<html>bad gateway</html>"),
        Wire(chat("4"), cut=20),
        Wire(None, raw=b'{"choices": [{"mess'),
        Wire({"choices": []}),
        Wire({"choices": [{"message": {"tool_calls": [{"function": {}}]}}]}),
    ],
    ids=["429", "500", "503", "cut", "half JSON", "no choice", "bad call"],
)
def test_what_may_pass_is_tried_again(ask: Ask, first: Wire) -> None:
    (said,), server = ask(in_turn(first, first, chat("4")), [ASK])
    assert said == Said(Reply("4"), "stop", 11, 2)
    assert len(server.asked) == 3


def test_after_every_try_the_question_has_no_answer_and_a_reason(ask: Ask) -> None:
    broken = Wire({"error": {"message": "out of  memory"}}, 500)
    came, server = ask(lambda path, body: broken, [ASK])
    assert came == [Missing("chat/completions: HTTP 500: out of memory (4 tries)", refused=False)]
    assert len(server.asked) == 4


def test_a_wait_that_the_server_asks_for_is_kept(ask: Ask) -> None:
    _, server = ask(in_turn(Wire({}, 429, {"retry-after": "0.3"}), chat("4")), [ASK])
    assert server.times[1] - server.times[0] >= 0.3


def test_waits_grow() -> None:
    with serving(lambda path, body: Wire({}, 500)) as server:
        subject = RemoteSubject(server.server(wait_seconds=0.1))
        list(subject.answers([ASK]))
        subject.close()
    first, second, third = (b - a for a, b in pairwise(server.times))
    assert first >= 0.1
    assert second >= 0.2
    assert third >= 0.4


def test_a_reason_is_short_and_tells_no_folders(ask: Ask) -> None:
    error = {"detail": f'at "/srv/app/server/main.py", see https://host/a/b {"x" * 999}'}
    ((missing,), _) = ask(lambda path, body: Wire(error, 422), [ASK])
    assert isinstance(missing, Missing)
    assert missing.reason.startswith('chat/completions: HTTP 422: at "main.py", see https://host/a/b xxx')
    assert len(missing.reason) < 340


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
def test_a_final_no_is_not_asked_again(ask: Ask, status: int) -> None:
    came, server = ask(lambda path, body: Wire({"error": {"message": "no tools here"}}, status), [ASK])
    assert came == [Missing(f"chat/completions: HTTP {status}: no tools here")]
    assert len(server.asked) == 1


def test_a_reply_that_is_late_is_asked_for_twice(ask: Ask) -> None:
    came, server = ask(lambda path, body: Wire(chat("4"), delay=0.5), [ASK], timeout=0.1)
    assert came == [Missing("chat/completions: no whole reply within 0.1 s (2 tries)", refused=False)]
    assert len(server.asked) == 2


def test_no_access_ends_it(ask: Ask) -> None:
    with pytest.raises(ServerRefused, match="HTTP 401: bad key"):
        ask(lambda path, body: Wire({"error": {"message": "bad key"}}, 401), [ASK])


def test_nobody_there_ends_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    with pytest.raises(ServerUnreachable, match=rf"127.0.0.1:{port}/v1 cannot be reached.*\(2 tries\)"):
        RemoteSubject(remote.Server(url, tries=2, wait_seconds=0.01))


def test_requests_run_side_by_side_up_to_the_limit(ask: Ask) -> None:
    _, server = ask(
        lambda path, body: Wire(chat("4"), delay=0.05), [replace(ASK, seed=i) for i in range(9)], concurrency=3
    )
    assert server.most == 3
    assert len(server.asked) == 9


def test_closing_ends_what_is_under_way() -> None:
    with serving(lambda path, body: Wire(chat("4"), delay=0.0 if "first" in str(body) else 20.0)) as server:
        subject = RemoteSubject(server.server(concurrency=2))
        first = Chat({"messages": ({"role": "user", "content": "first"},), "thinking": False}, 5)
        stream = subject.answers([first, ASK, ASK])
        begun = time.monotonic()
        assert next(stream)[0] is first
        stream.close()  # type: ignore[attr-defined]
        subject.close()
        assert time.monotonic() - begun < 5


# ---- which model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "wanted", "found"),
    [(("a",), "", "a"), (("a", "b"), "b", "b"), (None, "z", "z"), ((), "z", "z")],
)
def test_the_model_is_named_or_the_only_one(listed: tuple[str, ...] | None, wanted: str, found: str) -> None:
    with serving(complete_only, models=listed) as server:
        subject = RemoteSubject(server.server(model=wanted))
        subject.close()
        assert subject.name == found


@pytest.mark.parametrize(
    ("listed", "wanted", "text"),
    [
        (("a", "b"), "", "no model is named, and it serves a, b; give --model"),
        (None, "", "no model is named, and it lists none; give --model"),
        (("minnow", "whale"), "minow", "no model 'minow'; did you mean minnow?"),
    ],
)
def test_a_model_that_is_not_there(listed: tuple[str, ...] | None, wanted: str, text: str) -> None:
    with serving(complete_only, models=listed) as server, pytest.raises(ServerRefused, match=text.replace("?", r"\?")):
        RemoteSubject(server.server(model=wanted))


def test_the_context_is_what_the_server_says() -> None:
    with serving(complete_only, max_model_len=4096) as server:
        subject = RemoteSubject(server.server())
        subject.close()
        assert subject.context == 4096


def test_a_user_in_the_address_is_not_told_on() -> None:
    with serving(complete_only) as server:
        subject = RemoteSubject(replace(server.server(), base_url=server.url.replace("//", "//me:secret@")))
        subject.close()
        assert subject.identity()["base_url"] == server.url


# ---- thinking --------------------------------------------------------------------------------------------------------


def test_a_server_that_does_not_know_thinking_is_asked_without(ask: Ask) -> None:
    def script(path: str, body: dict[str, Any]) -> Any:
        if "thinking" in body:
            return Wire({"error": {"message": "Unrecognized request argument supplied: thinking"}}, 400)
        return chat("4")

    thinks = replace(ASK, request={**ASK.request, "thinking": True})
    (plain, thought), server = ask(script, [ASK, thinks], concurrency=1)
    assert isinstance(plain, Said)
    assert isinstance(thought, Missing)
    assert "thinking is not asked for" in thought.reason
    assert len(server.asked) == 2


def test_thinking_by_the_template(ask: Ask) -> None:
    _, server = ask(lambda path, body: chat("4"), [ASK], thinking="template")
    assert server.bodies("chat/completions")[0]["chat_template_kwargs"] == {"thinking": False, "enable_thinking": False}


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def complete_only(path: str, body: dict[str, Any]) -> Any:
    return complete(body) if path == "completions" else Wire({"error": "no chat"}, 404)


def expected(template: str, documents: tuple[Document, ...]) -> list[tuple[int, int, float]]:
    """Of each response: its first token, its tokens and nats, by going through the tokens of the whole text."""
    frame = rendering.TEMPLATES[template]
    text, borders = "", []
    for i, document in enumerate(documents):
        text += (frame.after if i else "") + frame.before + document.prompt + frame.between
        borders.append((len(text), len(text) + len(document.response) + len(frame.end)))
        text += document.response + frame.end
    tokens = pieces(text)
    values = logprobs(tokens)
    spans = []
    for first, end in borders:
        at, inside = 0, []
        for i, token in enumerate(tokens):
            if at < end and at + len(token) > first:
                inside.append(i)
            at += len(token)
        spans.append((inside[0], len(inside), -sum(values[i] for i in inside)))
    return spans


def only(form: str) -> Script:
    """A server that has one of the two forms."""

    def script(path: str, body: dict[str, Any]) -> Any:
        if form != "echo" and body.get("echo"):
            return Wire({"error": {"message": "echo is not supported"}}, 400)
        if form != "prompt_logprobs":
            body.pop("prompt_logprobs", None)
        return complete(body)

    return script


@pytest.mark.parametrize("template", ["plain", "chatml", "llama3", "deepseek"])
@pytest.mark.parametrize("form", ["echo", "prompt_logprobs"])
def test_responses_are_scored_in_either_form(ask: Ask, form: str, template: str) -> None:
    questions: list[Question] = [Score(DOCUMENTS[:1]), Score(DOCUMENTS[1:]), Score(DOCUMENTS)]
    came, _ = ask(only(form), questions, template=template)
    for question, scored in zip(questions, came, strict=True):
        assert isinstance(question, Score)
        assert isinstance(scored, Scored), scored
        want = expected(template, question.documents)
        assert [(span.first, span.tokens) for span in scored.spans] == [(first, count) for first, count, _ in want]
        assert [span.nats for span in scored.spans] == pytest.approx([nats for *_, nats in want])


@pytest.mark.parametrize("form", ["echo", "prompt_logprobs"])
def test_with_a_tokenizer_ids_are_scored(ask: Ask, form: str, tmp_path: Path) -> None:
    encoder = ChatEncoder(build_tokenizer(tmp_path))

    def script(path: str, body: dict[str, Any]) -> Any:
        """Produced tokens come back as the ids of their text, so the arithmetic has to know these."""
        answer = only(form)(path, body)
        if isinstance(answer, Wire) or body["max_tokens"] == 1:
            return answer
        new = encoder.tokenizer.encode(" wawbwc", bos=False)
        values = logprobs([f"<{id}>" for id in [*body["prompt"], *new]])[-len(new) :]
        answer["choices"][0]["logprobs"] = {"tokens": [" wawbwc", *[""] * (len(new) - 1)], "token_logprobs": values}
        return answer

    came, _ = ask(script, [Score(DOCUMENTS)], encoder=encoder)
    (scored,) = came
    assert isinstance(scored, Scored), scored
    row = rendering.row(encoder, DOCUMENTS)
    values = logprobs([f"<{id}>" for id in row.ids])
    for span, (first, end) in zip(scored.spans, row.responses, strict=True):
        assert span[:2] == (first, end - first)
        assert span.nats == pytest.approx(-sum(values[first:end]))


def spoiled(change: Callable[[dict[str, Any]], None]) -> Script:
    def script(path: str, body: dict[str, Any]) -> Any:
        body.pop("prompt_logprobs", None)
        answer = complete(body)
        if body.get("echo"):
            change(answer["choices"][0]["logprobs"])
        return answer

    return script


def late(told: dict[str, Any]) -> None:
    """Each number stands one token too early, as some servers echo them."""
    told["token_logprobs"] = [None, *told["token_logprobs"][2:], -1.0]


def without_numbers(told: dict[str, Any]) -> None:
    told["token_logprobs"] = []


def without_marks(told: dict[str, Any]) -> None:
    """Tokens in front have no text."""
    told["text_offset"] = [max(at - 12, 0) for at in told["text_offset"]]


def falling(told: dict[str, Any]) -> None:
    told["text_offset"].reverse()


def positive(told: dict[str, Any]) -> None:
    told["token_logprobs"][3] = 1.5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (late, "echo: its log-probabilities of given tokens are off by"),
        (without_numbers, "echo: an echoed prompt has no log-probabilities"),
        (without_marks, "echo: its tokens spell"),
        (falling, "echo: its text offsets do not rise"),
        (positive, "log-probability 1.5"),
    ],
)
def test_numbers_that_cannot_be_right_are_not_taken(
    ask: Ask, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    came, _ = ask(spoiled(change), [Score(DOCUMENTS[:1]), Score(DOCUMENTS)])
    for missing in came:
        assert isinstance(missing, Missing)
        assert missing.refused
        assert reason in missing.reason
        assert "prompt_logprobs: no prompt_logprobs come back" in missing.reason


def test_without_log_probabilities_nothing_is_scored(ask: Ask) -> None:
    def script(path: str, body: dict[str, Any]) -> Any:
        return Wire({"error": {"message": "logprobs are not enabled"}}, 400)

    came, server = ask(script, [Score((document,)) for document in DOCUMENTS])
    reason = "no log-probabilities of given text; " + "; ".join(
        f"{form}: completions: HTTP 400: logprobs are not enabled" for form in ("echo", "prompt_logprobs")
    )
    assert came == [Missing(reason)] * 2
    assert len(server.asked) == 2


def test_what_lies_inside_is_not_asked(ask: Ask) -> None:
    came, server = ask(complete_only, [replace(ASK, view=View(engram=False)), Load(DOCUMENTS)])
    assert all(isinstance(missing, Missing) and "inside the model" in missing.reason for missing in came)
    assert not server.asked


def test_lengths_are_guessed_high_without_a_tokenizer() -> None:
    with serving(complete_only) as server:
        subject = RemoteSubject(server.server())
        subject.close()
    for document in DOCUMENTS:
        assert subject.length(document) > len(pieces(document.prompt + document.response)) / 2
    assert math.isfinite(subject.length(Document("", "", "")))
