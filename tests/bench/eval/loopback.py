"""An OpenAI-compatible server on this machine that answers by a script. Standard library only.

A script is called with path and body and returns the JSON of a 200, or a `Wire`: a status, headers, a delay, bytes cut
short. What was asked is kept, and how many requests were under way at a time.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("httpx2", reason="a model behind a server is asked through httpx2, of the extra `eval`")

from benthic.bench.eval.remote import Server

MODEL = "scripted"


@dataclass(frozen=True)
class Wire:
    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    cut: int | None = None  # bytes of the body that are sent, of those that are announced
    raw: bytes | None = None  # instead of JSON


Script = Callable[[str, dict[str, Any]], Any]


class Loopback(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, script: Script, models: tuple[str, ...] | None = (MODEL,), max_model_len: int | None = None):
        """models: what it lists; None: it has no list."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.models, self.max_model_len = script, models, max_model_len
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.times: list[float] = []  # when each was asked
        self.lock = threading.Lock()
        self.now = self.most = 0  # requests under way, at present and at most

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def server(self, **settings: Any) -> Server:
        """Settings of a subject that asks here, without long waits."""
        return Server(self.url, **{"wait_seconds": 0.01, "tries": 4, **settings})

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body, _ in self.asked if where == path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Loopback

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.models is None:
            return self._send(Wire({"error": "nothing here"}, 404))
        entries: list[dict[str, Any]] = [{"id": name, "object": "model"} for name in self.server.models]
        for entry in entries:
            if self.server.max_model_len is not None:
                entry["max_model_len"] = self.server.max_model_len
        return self._send(Wire({"object": "list", "data": entries}))

    def do_POST(self) -> None:
        path = self.path.removeprefix("/v1/")
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.asked.append((path, body, dict(self.headers)))
            server.times.append(time.monotonic())
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            answer = server.script(path, body)
            wire = answer if isinstance(answer, Wire) else Wire(answer)
            time.sleep(wire.delay)
        finally:
            with server.lock:
                server.now -= 1
        self._send(wire)

    def _send(self, wire: Wire) -> None:
        data = json.dumps(wire.body).encode() if wire.raw is None else wire.raw
        self.send_response(wire.status)
        for name, value in {"content-type": "application/json", **wire.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: wire.cut])
        if wire.cut is not None:
            self.close_connection = True


@contextmanager
def serving(script: Script, **settings: Any) -> Iterator[Loopback]:
    server = Loopback(script, **settings)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chat(content: str | None = "", **message: Any) -> dict[str, Any]:
    """A chat completion."""
    calls = message.get("tool_calls")
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": "tool_calls" if calls else "stop",
    }
    return {"object": "chat.completion", "choices": [choice], "usage": {"prompt_tokens": 11, "completion_tokens": 2}}


# ---- a model made of arithmetic --------------------------------------------------------------------------------------


def pieces(text: str) -> list[str]:
    """Tokens: letters with a space before them, or one other character."""
    found: list[str] = []
    for character in text:
        if found and character.isalpha() and (found[-1][-1].isalpha() or found[-1] == " "):
            found[-1] += character
        else:
            found.append(character)
    return found


def logprobs(tokens: list[str]) -> list[float]:
    """Of each token given all before it: any fixed function will do."""
    found: list[float] = []
    state = 7
    for token in tokens:
        state = (state * 1_000_003 + sum(token.encode()) * 31 + len(token)) % 65_521
        found.append(-0.05 - 4 * state / 65_521)
    return found


def complete(body: dict[str, Any]) -> dict[str, Any]:
    """/completions in both forms, as servers that do it right answer."""
    prompt = body["prompt"]
    given = pieces(prompt) if isinstance(prompt, str) else [f"<{id}>" for id in prompt]
    new = [f" w{'abcd'[i % 4]}" for i in range(body["max_tokens"])]
    new = [piece for word in new for piece in pieces(word)][: body["max_tokens"]]
    tokens = [*given, *new]
    found = logprobs(tokens)
    shown = 0 if body.get("echo") else len(given)
    starts = [0]
    for token in tokens:
        starts.append(starts[-1] + len(token))
    choice: dict[str, Any] = {"index": 0, "text": "".join(tokens[shown:]), "finish_reason": "length"}
    if body.get("logprobs") is not None:
        told: list[float | None] = [*found]
        told[0] = None
        choice["logprobs"] = {
            "tokens": tokens[shown:],
            "token_logprobs": told[shown:],
            "text_offset": starts[shown : len(tokens)],
            "top_logprobs": None,
        }
    if body.get("prompt_logprobs") is not None:
        choice["prompt_logprobs"] = [
            {str(i): {"logprob": found[i], "rank": 1, "decoded_token": token}} if i else None
            for i, token in enumerate(given)
        ]
    usage = {"prompt_tokens": len(given), "completion_tokens": len(new)}
    return {"object": "text_completion", "choices": [choice], "usage": usage}
