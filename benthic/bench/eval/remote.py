"""A server that speaks the OpenAI protocol as the subject of an evaluation.

Chat completions answer conversations. Log-probabilities of given text come from completions, in either of two forms:
`echo` with `logprobs`, or `prompt_logprobs`. Before either is believed it is compared with what the server says while
it generates the same tokens, since some servers echo the numbers one token late.

What is tried again: no connection, a reply that breaks off or is no JSON, status 408, 425, 429 and 500 upwards, after
growing waits or the one that the server asks for. Any other refusal is final, and the suite says so.
"""

import asyncio
import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

from benthic.bench.eval import rendering
from benthic.bench.eval.documents import Document
from benthic.bench.eval.questions import SERVED, Answer, Chat, Missing, Question, Said, Score
from benthic.bench.eval.rendering import TEMPLATES
from benthic.errors import MissingDependency, ServerRefused, ServerUnreachable, nearest
from benthic.skills.base import Reply
from benthic.text.prompt import ChatEncoder

try:
    import httpx2 as http
except ImportError as error:
    raise MissingDependency("httpx2", "eval") from error

T = TypeVar("T")

CONNECT_SECONDS = 10.0
WAIT_SECONDS = 0.5  # before the second try; it doubles
LONGEST_WAIT_SECONDS = 60.0
CHARACTERS_PER_TOKEN = 3.0  # of prose, low, so that a guessed length is not too short
_AGAIN = (408, 425, 429)
_CHECK_TOKENS = 4  # produced to compare log-probabilities with
_CHECK_NATS = 0.1  # how far the two may differ: batches and kernels differ between prompt and decode

THINKING = ("deepseek", "template", "none")  # how a request turns thinking on and off


@dataclass(frozen=True, slots=True)
class Server:
    """Where and how to ask.

    base_url     ends in /v1 for most; completions and chat/completions are under it
    model        empty: the only one the server lists
    concurrency  requests under way at a time
    timeout      seconds until a reply is whole
    tries        of one request; of one that ran into the timeout two
    thinking     "deepseek": {"thinking": {"type": ...}}; "template": chat_template_kwargs; "none": it is not asked for
    template     of TEMPLATES, for text that is scored; not used with an encoder
    encoder      of the checkpoint's own tokenizer: text that is scored goes as token ids
    """

    base_url: str
    model: str = ""
    api_key: str = ""
    concurrency: int = 8
    timeout: float = 600.0
    tries: int = 5
    thinking: str = "deepseek"
    template: str = "plain"
    encoder: ChatEncoder | None = None
    wait_seconds: float = WAIT_SECONDS


class _Refused(Exception):
    """A final no, for this request."""


class _Broken(Exception):
    """No usable reply after every try."""


class Token(NamedTuple):
    """One token of a scored text."""

    offset: int  # where it begins and ends, in characters
    end: int
    logprob: float | None  # None: not told, as of the first token, which nothing predicts
    whole: bool = True  # its text is known: not part of a character


class RemoteSubject:
    local = False
    numerics = None

    def __init__(self, server: Server):
        """Raises ServerUnreachable, ServerRefused: no such model, or no access."""
        self.server = server
        self.url = server.base_url.rstrip("/")
        self.shown = _without_user(self.url)
        self._thinking = server.thinking
        self._form: str | None = None  # how it gives log-probabilities, once that is known
        self._no_scores: str | None = None  # why it gives none
        self._jitter = random.Random(0)
        self._runner = asyncio.Runner()
        host = urlsplit(self.url).hostname or ""
        self._client = http.AsyncClient(
            timeout=http.Timeout(None, connect=CONNECT_SECONDS),
            limits=http.Limits(max_connections=server.concurrency),
            headers={"authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            trust_env=host not in ("localhost", "127.0.0.1", "::1"),  # no proxy on the way to this machine
        )
        try:
            listed = self._runner.run(self._models())
            self.name = self._model(listed)
        except BaseException:
            self.close()
            raise
        context = listed.get(self.name, {}).get("max_model_len")
        self.context: int | None = context if isinstance(context, int) and context > 0 else None

    def identity(self) -> dict[str, Any]:
        encoder = self.server.encoder
        text = self.server.template
        if encoder is not None:
            text = f"ids of tokenizer {hashlib.sha256(encoder.tokenizer.path.read_bytes()).hexdigest()[:16]}"
        return {"model": self.name, "base_url": self.shown, "thinking": self.server.thinking, "scored_text": text}

    def length(self, document: Document) -> int:
        if self.server.encoder is not None:
            return len(rendering.row(self.server.encoder, [document]).ids)
        return math.ceil((len(document.prompt) + len(document.response)) / CHARACTERS_PER_TOKEN) + 32

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[Question, Answer | Missing]]:
        loop = self._runner.get_loop()
        waiting = iter(questions)
        pending: set[asyncio.Task[tuple[Question, Answer | Missing]]] = set()
        if any(isinstance(question, Score) for question in questions):
            self._runner.run(self._find_form(next(q for q in questions if isinstance(q, Score))))
        try:
            while True:
                while len(pending) < self.server.concurrency and (question := next(waiting, None)) is not None:
                    pending.add(loop.create_task(self._answer(question)))
                if not pending:
                    return
                done, pending = self._runner.run(_first(pending))
                for task in done:
                    yield task.result()
        finally:
            self._runner.run(_cancelled(pending))

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    # ---- one question ------------------------------------------------------------------------------------------------

    async def _answer(self, question: Question) -> tuple[Question, Answer | Missing]:
        try:
            if question.view != SERVED or not isinstance(question, Chat | Score):
                raise _Refused("it looks inside the model, which takes the engine in this process")
            if isinstance(question, Chat):
                return question, await self._chat(question)
            return question, await self._score(question)
        except _Refused as refused:
            return question, Missing(str(refused))
        except _Broken as broken:
            return question, Missing(str(broken), refused=False)

    async def _chat(self, question: Chat) -> Said:
        asked = dict(question.request)
        thinks, effort = bool(asked.pop("thinking", False)), asked.pop("effort", None)
        body: dict[str, Any] = {"model": self.name, "temperature": question.temperature, **asked}
        body |= {"messages": list(asked["messages"]), "max_tokens": question.max_tokens, "stream": False}
        if question.temperature > 0:
            body["seed"] = question.seed
        if effort is not None:
            body["reasoning_effort"] = effort
        if self._thinking == "none":
            if thinks:
                raise _Refused("thinking is not asked for (--thinking none, or the server refuses the field)")
            return await self._post("chat/completions", body, _said)
        try:
            return await self._post("chat/completions", {**body, **self._mode(thinks)}, _said)
        except _Refused as refused:
            if thinks or not any(word in str(refused).lower() for word in ("thinking", "chat_template_kwargs")):
                raise
            self._thinking = "none"  # it knows no such field: nothing turns thinking on
            return await self._post("chat/completions", body, _said)

    def _mode(self, thinks: bool) -> dict[str, Any]:
        if self._thinking == "template":
            return {"chat_template_kwargs": {"thinking": thinks, "enable_thinking": thinks}}
        return {"thinking": {"type": "enabled" if thinks else "disabled"}}

    async def _score(self, question: Score) -> Answer:
        if self._no_scores is not None:
            raise _Refused(self._no_scores)
        assert self._form is not None, "the form is found before anything is scored"
        if self.server.encoder is not None:
            row = rendering.row(self.server.encoder, question.documents)
            tokens = await self._tokens(self._form, row.ids)
            logprobs = [token.logprob for token in tokens[1:]]
            known = [value for value in logprobs if value is not None]
            if len(known) < len(logprobs):
                raise _Broken(f"{len(logprobs) - len(known)} of {len(logprobs)} log-probabilities are missing")
            return row.scored(known)
        text = rendering.characters(TEMPLATES[self.server.template], question.documents)
        tokens = await self._tokens(self._form, text.text)
        scored = text.scored([token.offset for token in tokens], [token.logprob for token in tokens])
        if scored is None:
            raise _Broken("a response of the text has no log-probabilities")
        return scored

    # ---- log-probabilities -------------------------------------------------------------------------------------------

    async def _find_form(self, question: Score) -> None:
        """Which form of log-probabilities the server has, checked; or why none."""
        if self._form is not None or self._no_scores is not None:
            return
        reasons: list[str] = []
        for form in ("echo", "prompt_logprobs"):
            try:
                await self._check(form, question.documents[0])
            except (_Refused, _Broken) as error:
                reasons.append(f"{form}: {error}")
            else:
                self._form = form
                return
        self._no_scores = "no log-probabilities of given text; " + "; ".join(reasons)

    async def _check(self, form: str, document: Document) -> None:
        """Raises _Refused unless what the form says of produced tokens is what was said when they were produced."""
        encoder, template = self.server.encoder, TEMPLATES[self.server.template]
        for share in (2, 3, 4):  # of the response, for where one cut joins into other tokens
            begun = document.response[: max(len(document.response) // share, 1)].rpartition(" ")[0] or "The"
            half = document._replace(response=begun)
            if encoder is not None:
                prompt: str | list[int] = list(rendering.row(encoder, [half]).ids[:-1])  # without the end token
            else:
                prompt = rendering.characters(template, [half]).text.removesuffix(template.end)
            body = {**self._completion(prompt), "max_tokens": _CHECK_TOKENS, "logprobs": 1}
            words, said = await self._post("completions", body, _produced)
            if isinstance(prompt, str):
                tokens = await self._tokens(form, prompt + "".join(words))
                found = [token for token in tokens if token.offset >= len(prompt)]
            else:
                assert encoder is not None, "ids come from an encoder"
                tokens = await self._tokens(form, [*prompt, *encoder.tokenizer.encode("".join(words), bos=False)])
                found = tokens[len(prompt) :]
            if said and len(found) == len(said):
                break
        else:
            raise _Refused("the tokens it produces cannot be compared with the same ones given back")
        off = max(abs((token.logprob or 0.0) - value) for token, value in zip(found, said, strict=True))
        if off > _CHECK_NATS:
            raise _Refused(
                f"its log-probabilities of given tokens are off by {off:.2g} nats from those that it stated when it "
                "produced them"
            )

    async def _tokens(self, form: str, prompt: str | Sequence[int]) -> list[Token]:
        """What the server says of a prompt's tokens, the first included, and of no others."""
        body = {**self._completion(prompt), "max_tokens": 1}
        if form == "echo":
            tokens = await self._post("completions", {**body, "echo": True, "logprobs": 1}, _echoed)
        else:
            tokens = await self._post("completions", {**body, "prompt_logprobs": 0}, _prompt_logprobs)
        if isinstance(prompt, str):
            tokens = _placed(tokens, len(prompt)) if form == "prompt_logprobs" else tokens
            tokens = [token for token in tokens if token.offset < len(prompt)]
            if tokens and tokens[-1].end != len(prompt):
                raise _Refused(
                    f"its tokens spell {tokens[-1].end} of {len(prompt)} characters, so where the response begins is "
                    "not known: control tokens may have no text there, which --template plain does without"
                )
        else:
            tokens = tokens[: len(prompt)]
            if len(tokens) < len(prompt):
                raise _Broken(f"{len(tokens)} of {len(prompt)} tokens come back")
        if not tokens:
            raise _Broken("no token comes back")
        return tokens

    def _completion(self, prompt: str | Sequence[int]) -> dict[str, Any]:
        told = prompt if isinstance(prompt, str) else list(prompt)
        return {"model": self.name, "prompt": told, "temperature": 0.0, "stream": False}

    # ---- the wire ----------------------------------------------------------------------------------------------------

    async def _models(self) -> dict[str, dict[str, Any]]:
        """What the server lists; empty where it has no list."""
        try:
            return await self._send("GET", "models", None, _listed)
        except _Refused:
            return {}
        except _Broken as broken:
            raise ServerUnreachable(self.shown, str(broken)) from broken

    def _model(self, listed: Mapping[str, Any]) -> str:
        wanted = self.server.model
        if wanted in listed or (wanted and not listed):
            return wanted
        if not wanted and len(listed) == 1:
            return next(iter(listed))
        served = f"it serves {', '.join(sorted(listed))}" if listed else "it lists none"
        if not wanted:
            raise ServerRefused(self.shown, f"no model is named, and {served}; give --model")
        close = nearest(wanted, listed)
        raise ServerRefused(self.shown, f"no model {wanted!r}; " + (f"did you mean {close}?" if close else served))

    async def _post(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        return await self._send("POST", path, body, read)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        """`read` of the reply's JSON; tried again where that can help."""
        tries, made, late, last, unreachable = self.server.tries, 0, 0, "", False
        for made in range(1, tries + 1):
            wanted: float | None = None
            try:
                async with asyncio.timeout(self.server.timeout):
                    reply = await self._client.request(method, f"{self.url}/{path}", json=body)
                if reply.status_code < 300:
                    return read(json.loads(reply.content))
                unreachable, last = False, f"{path}: {_reason(reply)}"
                if reply.status_code in (401, 403):
                    raise ServerRefused(self.shown, last)
                if reply.status_code not in _AGAIN and (reply.status_code < 500 or reply.status_code == 501):
                    raise _Refused(last)
                wanted = _retry_after(reply.headers.get("retry-after"))
            except TimeoutError:
                late += 1
                unreachable, last = False, f"{path}: no whole reply within {self.server.timeout:g} s"
            except http.TransportError as error:
                unreachable = isinstance(error, http.ConnectError | http.ConnectTimeout)
                last = f"{path}: {_text(error)}"
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                unreachable, last = False, f"{path}: the reply is not of the protocol: {_text(error)}"
            if made == tries or late == 2:
                break
            grown = self.server.wait_seconds * 2 ** (made - 1) * (1 + self._jitter.random() / 4)
            await asyncio.sleep(min(grown if wanted is None else wanted, LONGEST_WAIT_SECONDS))
        if unreachable:
            raise ServerUnreachable(self.shown, f"{last} ({made} tries)")
        raise _Broken(f"{last} ({made} tries)")


async def _first(pending: set[Any]) -> tuple[set[Any], set[Any]]:
    return await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


async def _cancelled(pending: set[Any]) -> None:
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


# ---- replies ---------------------------------------------------------------------------------------------------------


def _said(body: Any) -> Said:
    choice, usage = body["choices"][0], body.get("usage") or {}
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    return Said(_reply(choice["message"]), choice.get("finish_reason"), *counts)


def _reply(message: dict[str, Any]) -> Reply:
    """The turn as `skills` reads it: other servers' spellings of reasoning, content in parts, arguments as objects."""
    turn = dict(message)
    content = turn.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    content = content or ""
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or ""
    if not reasoning and content.lstrip().startswith("<think>") and "</think>" in content:
        reasoning, content = content.lstrip().removeprefix("<think>").split("</think>", 1)
    calls = [dict(call) for call in turn.get("tool_calls") or ()]
    for call in calls:
        function = dict(call["function"])
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        call["function"] = function
    return Reply.of({"content": content, "reasoning_content": reasoning, "tool_calls": calls})


def _listed(body: Any) -> dict[str, dict[str, Any]]:
    return {str(entry["id"]): dict(entry) for entry in body["data"]}


def _produced(body: Any) -> tuple[list[str], list[float]]:
    """Tokens of a completion and their log-probabilities."""
    found = body["choices"][0].get("logprobs")
    if not found or not found.get("token_logprobs"):
        raise _Refused("completions give no log-probabilities")
    return [str(token) for token in found["tokens"]], [float(value) for value in found["token_logprobs"]]


def _echoed(body: Any) -> list[Token]:
    found = body["choices"][0].get("logprobs")
    if not found or not found.get("token_logprobs"):
        raise _Refused("an echoed prompt has no log-probabilities")
    offsets = [int(at) for at in found["text_offset"]]
    if any(a > b for a, b in pairwise(offsets)):
        raise _Refused("its text offsets do not rise")
    ends = [at + len(token) for at, token in zip(offsets, found["tokens"], strict=True)]
    return [Token(*place) for place in zip(offsets, ends, map(_logprob, found["token_logprobs"]), strict=True)]


def _prompt_logprobs(body: Any) -> list[Token]:
    found = body["choices"][0].get("prompt_logprobs") or body.get("prompt_logprobs")
    if not found:
        raise _Refused("no prompt_logprobs come back")
    tokens: list[Token] = []
    at = 0
    for entry in found:
        told = {"decoded_token": "", "logprob": None} if entry is None else next(iter(entry.values()))
        text = str(told["decoded_token"])
        tokens.append(Token(at, at + len(text), _logprob(told["logprob"]), "\ufffd" not in text))
        at += len(text)
    return tokens


def _placed(tokens: list[Token], length: int) -> list[Token]:
    """Of prompt_logprobs in a text: the first token's text is not told, so places are counted from the end."""
    if not all(token.whole for token in tokens):
        raise _Broken("a token is part of a character, so its place in the text is not known")
    lead = length - tokens[-1].end
    moved = [token._replace(offset=token.offset + lead, end=token.end + lead) for token in tokens]
    return [moved[0]._replace(offset=0), *moved[1:]]


def _logprob(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number) or number > 1e-3:
        raise ValueError(f"log-probability {number}")
    return number


def _reason(reply: Any) -> str:
    """Status and what the server says about it, in one short line without its folders."""
    try:
        error = json.loads(reply.content)
        for key in ("error", "detail", "message"):
            if isinstance(error, Mapping) and key in error:
                error = error[key]
    except ValueError:
        error = reply.text
    told = " ".join((error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)).split())
    told = re.sub(r"(?<![\w/])/(?:[\w.+-]+/)+", "", told)
    return f"HTTP {reply.status_code}" + (f": {told[:300]}" if told else "")


def _retry_after(value: str | None) -> float | None:
    """Seconds; a date or nonsense counts as nothing."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
