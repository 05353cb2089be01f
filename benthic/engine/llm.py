"""LLM: the offline face of the loop. Load a model, hand it prompts or conversations, get completions or a stream."""

import hashlib
import json
import logging
import math
import platform
import secrets
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import metadata
from itertools import count
from os import sched_getaffinity
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, Protocol, cast, overload

import torch
from tqdm import tqdm

import benthic
from benthic.cache.manager import CacheManager, Pin
from benthic.cache.spec import BLOCK_TOKENS, block_layout, blocks_for
from benthic.cache.storage import Storage
from benthic.config import Config, load
from benthic.engine import first_steps
from benthic.engine.branch import branch_seed
from benthic.engine.cost import CostModel
from benthic.engine.graphs import NotCapturable
from benthic.engine.loop import Loop
from benthic.engine.receipt import Maker, Receipt, digest_of
from benthic.engine.runner import Model, Runner
from benthic.engine.sampler import Sampler
from benthic.engine.scheduler import Prefixes, Scheduler
from benthic.errors import (
    BadConfigKey,
    BadField,
    BadImage,
    BadReceipt,
    BadSetting,
    BenthicError,
    DeviceUnavailable,
    EngineClosed,
    MissingCheckpointFile,
    OutOfMemory,
    ReplyFailed,
)
from benthic.host import source_digest
from benthic.kernels.native import build as native
from benthic.kernels.triton import runtime as triton
from benthic.models.registry import family, model_dir
from benthic.models.weights import Checkpoint
from benthic.text.prompt import ChatEncoder, Prompt, PromptImage
from benthic.text.reply import Message, ReplyParser, ToolCallDelta
from benthic.text.stop import StopMatcher
from benthic.text.tokenizer import FILE_NAME, IncrementalDecoder, Tokenizer
from benthic.types import (
    CACHED,
    NUMERICS,
    Abort,
    CacheOptions,
    FinishReason,
    ImageInput,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    Usage,
)

_WORST_SECONDS = 1.0  # that the largest steps may take before the engine is ready, on a CPU
_PROGRESS_FROM = 8  # prompts from which a progress bar is worth its line

log = logging.getLogger(__name__)

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


# ---- results ---------------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """When a completion came, seconds since it was handed in."""

    ttft_seconds: float  # to its first token
    total_seconds: float  # to its end
    tpot_seconds: float  # per token after the first; 0 when there is none


@dataclass(frozen=True, slots=True)
class Choice:
    """One branch of a completion."""

    text: str  # without the token or string that ended it; of a conversation: the content
    token_ids: tuple[int, ...]  # with it
    finish_reason: str | None  # "stop", "length", "abort" or "tool_calls"; None: see error
    logprobs: tuple[TokenLogprobs, ...]  # raw, one for each token, when asked for
    timing: Timing
    message: Message | None = None  # of a conversation: reasoning, content and tool calls
    error: BenthicError | None = None
    receipt: Receipt | None = None  # when asked for


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt. `params.n` choices; the first one's fields can be read from here."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage  # the prompt counts once, completions are summed
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens 1, 2, ..., when asked for

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.choices[0].logprobs

    @property
    def timing(self) -> Timing:
        return self.choices[0].timing

    @property
    def message(self) -> Message | None:
        return self.choices[0].message

    @property
    def receipt(self) -> Receipt | None:
        return self.choices[0].receipt

    @property
    def error(self) -> BenthicError | None:
        return next((choice.error for choice in self.choices if choice.error is not None), None)


@dataclass(slots=True)  # frozen ones take four times as long to make, and there is one a token
class Piece:
    """What a stream yields. Pieces of a choice join to its text; none holds half a character or half a stop string."""

    prompt: int  # index of the prompt
    choice: int  # index of the choice
    text: str = ""
    reasoning: str = ""  # conversations only
    tool_call: ToolCallDelta | None = None  # conversations only
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # set on the choice's last piece, unless it has an error
    error: BenthicError | None = None
    completion: Completion | None = None  # set on the prompt's last piece


# ---- one request on its way ------------------------------------------------------------------------------------------


class _Reader(Protocol):
    """Token ids in, pieces of the answer out."""

    @property
    def patient(self) -> bool: ...  # nothing in the text ends it: where nobody looks, all ids may be pushed at the end
    @property
    def finished(self) -> bool: ...  # the text is complete by itself: a stop string, or the end of a reply
    def push(self, ids: Sequence[int], armed: bool, ended: bool) -> list[dict[str, Any]]: ...
    def finish(self, reason: FinishReason) -> list[dict[str, Any]]: ...
    def result(self) -> tuple[str, Message | None, str | None]: ...


class _TextReader:
    """Plain text: incremental decode, then stop strings."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]):
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._text: list[str] = []
        self.patient = not stop

    @property
    def finished(self) -> bool:
        return self._matcher.matched is not None

    def push(self, ids: Sequence[int], armed: bool, ended: bool) -> list[dict[str, Any]]:
        if self._decoder is None:
            return []
        return self._show(self._matcher.push(self._decoder.push(ids[:-1] if ended else ids), armed))

    def finish(self, reason: FinishReason) -> list[dict[str, Any]]:
        # an unfinished character at the end is dropped: it is no text
        return self._show(self._matcher.flush())

    def result(self) -> tuple[str, Message | None, str | None]:
        return "".join(self._text), None, None

    def _show(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        self._text.append(text)
        return [{"text": text}]


class _ReplyReader:
    """A turn of a conversation."""

    patient = False

    def __init__(self, encoder: ChatEncoder, prompt: Prompt):
        self._parser = ReplyParser(encoder, prompt)

    @property
    def finished(self) -> bool:
        return self._parser.finished

    def push(self, ids: Sequence[int], armed: bool, ended: bool) -> list[dict[str, Any]]:
        return self._show(self._parser.push(ids[:-1] if ended else ids))

    def finish(self, reason: FinishReason) -> list[dict[str, Any]]:
        return self._show(self._parser.finish(reason))

    def result(self) -> tuple[str, Message | None, str | None]:
        message = self._parser.message
        return message.content, message, self._parser.finish_reason

    def _show(self, deltas: Iterable[Any]) -> list[dict[str, Any]]:
        return [{"text": d.content, "reasoning": d.reasoning, "tool_call": d.tool_call} for d in deltas]


class _Stream:
    """One branch: from events to pieces to a choice. Where nobody looks before it is done, pieces come at its end."""

    def __init__(
        self, prompt: int, choice: int, params: SamplingParams, reader: _Reader, started: float, watched: bool
    ):
        self.prompt, self.choice, self.params, self.reader, self.started = prompt, choice, params, reader, started
        self._watched, self._late = watched, not watched and reader.patient
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.digests: list[bytes] = []
        self.first = 0.0
        self.stopped = False  # ended by its text
        self.done: Choice | None = None
        self.usage = Usage(0, 0)

    def take(self, event: TokenEvent) -> list[Piece]:
        shown: list[dict[str, Any]] = []
        if event.tokens and not self.stopped:
            if not self.tokens:
                self.first = perf_counter()
            self.tokens += event.tokens
            self.logprobs += event.logprobs
            self.digests += event.digests
            if not self._late:
                armed = len(self.tokens) >= self.params.min_tokens
                shown = self.reader.push(event.tokens, armed, event.finish is FinishReason.STOP)
                self.stopped = self.reader.finished
        if event.usage is None:
            if not self._watched:
                return []
            if event.tokens and len(shown) < 2:  # as good as every token
                fields = shown[0] if shown else {}
                return [Piece(self.prompt, self.choice, token_ids=event.tokens, logprobs=event.logprobs, **fields)]
        last: dict[str, Any] = {}
        if event.usage is not None:
            if self._late and self.tokens:
                self.reader.push(self.tokens, True, bool(event.tokens) and event.finish is FinishReason.STOP)
            reason = FinishReason.STOP if self.stopped else event.finish
            if reason is not None:
                shown += self.reader.finish(reason)
            text, message, finish = self.reader.result()
            finish_reason = None if event.error is not None else finish or str(reason)
            self.usage = event.usage
            self.done = Choice(
                text, tuple(self.tokens), finish_reason, tuple(self.logprobs), self._timing(), message, event.error
            )
            last = {"finish_reason": finish_reason, "error": event.error}
        if not shown and (event.tokens or last):
            shown = [{}]
        if shown:
            shown[0] |= {"token_ids": event.tokens, "logprobs": event.logprobs}
            shown[-1] |= last
        return [Piece(self.prompt, self.choice, **fields) for fields in shown]

    def fail(self, event: TokenEvent, prompt_tokens: int, error: Exception) -> list[Piece]:
        """It ends here, since what was to be made of its tokens raised."""
        failure = ReplyFailed(event.request, len(self.tokens), error)
        self.usage = event.usage or Usage(prompt_tokens, len(self.tokens))
        self.done = Choice("", tuple(self.tokens), None, tuple(self.logprobs), self._timing(), None, failure)
        return [Piece(self.prompt, self.choice, error=failure)]

    def _timing(self) -> Timing:
        now = perf_counter()
        first, total = (self.first or now) - self.started, now - self.started
        later = len(self.tokens) - 1
        return Timing(first, total, (total - first) / later if later > 0 else 0.0)


class _Session:
    """The requests of one call. Ends them all when it is closed before they are done.

    watched  somebody looks at the pieces as they come. Else there are only those of each choice's end, and text that
             nothing can end is made when all of it is there: in a large batch that is half of the host's time.
    """

    def __init__(self, llm: "LLM", watched: bool):
        self.llm, self.watched = llm, watched
        self.pieces: deque[Piece] = deque()
        self.requests: dict[int, Request] = {}
        self.streams: dict[int, list[_Stream]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.order: list[int] = []

    def add(self, request: Request, readers: Sequence[_Reader]) -> None:
        started = perf_counter()
        self.requests[request.id] = request
        self.prompt_logprobs[request.id] = []
        self.streams[request.id] = [
            _Stream(len(self.order), i, request.params, reader, started, self.watched)
            for i, reader in enumerate(readers)
        ]
        self.order.append(request.id)

    @property
    def unfinished(self) -> bool:
        return any(stream.done is None for streams in self.streams.values() for stream in streams)

    def take(self, event: TokenEvent) -> list[Abort]:
        """News of one branch; what has to be told to the engine in turn."""
        stream = self.streams[event.request][event.branch]
        if event.branch == 0:
            self.prompt_logprobs[event.request] += event.prompt_logprobs
        if stream.done is not None:
            return []
        was_stopped, failed = stream.stopped, False
        request = self.requests[event.request]
        try:
            pieces = stream.take(event)
            if request.params.receipt and stream.done is not None and stream.done.error is None:
                receipt = self.llm._receipt(request, event.branch, stream)
                stream.done = replace(stream.done, receipt=receipt)
        except Exception as error:  # of this answer alone: those of others are in the same hands
            log.exception("an answer could not be read", extra={"request": event.request, "branch": event.branch})
            pieces, failed = stream.fail(event, len(request.prompt), error), True
        if pieces and all(s.done is not None for s in self.streams[event.request]):
            pieces[-1] = replace(pieces[-1], completion=self.completion(event.request))
        self.pieces += pieces
        if failed and event.usage is None:
            return [Abort(event.request, event.branch)]
        if stream.stopped and not was_stopped and stream.done is None:
            return [Abort(event.request, event.branch, FinishReason.STOP)]
        return []

    def completion(self, id: int) -> Completion:
        streams = self.streams[id]
        return Completion(
            self.requests[id].prompt,
            tuple(stream.done for stream in streams if stream.done is not None),
            streams[0].usage._replace(completion_tokens=sum(stream.usage.completion_tokens for stream in streams)),
            tuple(self.prompt_logprobs[id]),
        )

    def __iter__(self) -> Generator[Piece, None, None]:
        self.llm._enter(self)
        try:
            while True:
                while self.pieces:
                    yield self.pieces.popleft()
                if not self.unfinished:
                    return
                self.llm._pump(self)
        finally:
            self.llm._leave(self)


# ---- the engine in this process --------------------------------------------------------------------------------------


class LLM:
    """A model ready to generate, in this process.

    with LLM("minnow") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=60))[0].text)

    Calls may overlap, from several threads or as several open streams: all their requests share the same steps.
    """

    def __init__(
        self, model: str | Path = "", *, numerics: str | None = None, config: Config | None = None, **settings: Any
    ):
        """Open the checkpoint and carve the cache.

        model      a packaged model's name or a checkpoint folder; empty: the configuration's.
        numerics   "reference", "production" or "float"; None: the configuration's.
        config     the whole configuration; None: defaults and environment.
        settings   single settings, spelled with two underscores for the dot: `scheduler__max_running=8`.
        Raises     ConfigError, CheckpointError, UnknownModel, DeviceUnavailable, OutOfMemory, HostMemoryNotLocked.
        """
        overrides: dict[str, object] = {key.replace("__", "."): value for key, value in settings.items()}
        if model:
            overrides["model"] = str(model)
        if numerics is not None:
            overrides["numerics"] = numerics
        if config is None:
            config = load(overrides=overrides)
        elif overrides:
            raise BadField(
                "config", "given", f"either a configuration or single settings, not {', '.join(overrides)} too"
            )
        self.config = config
        self.device = device_of(config.device)
        torch.set_num_threads(config.cpu.threads or len(sched_getaffinity(0)))
        if self.device.type == "cpu":
            native.setup(config.cpu.native, config.cpu.compiler, config.cpu.cache_dir)
        checkpoint = self._checkpoint = Checkpoint.open(config.model)
        self.path = checkpoint.path
        self.tokenizer = None if checkpoint.tokenizer_path is None else Tokenizer(checkpoint.tokenizer_path)
        module = family(checkpoint.config.architectures[0])
        with tqdm(
            total=0 if self.device.type == "cpu" else sum(stored.nbytes for stored in checkpoint.stored.values()),
            desc="weights",
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            disable=True if self.device.type == "cpu" else None,  # on a CPU nothing is copied
            leave=False,
        ) as bar:
            self.model: Model = module.from_checkpoint(
                checkpoint,
                NUMERICS[config.numerics],
                self.device,
                tables_on_host=config.gpu.engram_tables == "host",
                progress=bar,
            )
        self.loop = build_loop(
            self.model,
            config,
            self.device,
            eos_ids=(checkpoint.config.eos_token_id,),
            never=() if self.tokenizer is None else self.tokenizer.control_ids,
        )
        self._encoder: ChatEncoder | None = None
        self._numbers = count()
        self._sessions: dict[int, _Session] = {}  # by request id
        self._lock = threading.RLock()
        self._closed = False

    # ---- generate ----------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        progress: bool | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline_seconds: float | None = None,
        cache: CacheOptions = CACHED,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        progress: bool | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline_seconds: float | None = None,
        cache: CacheOptions = CACHED,
    ) -> Iterator[Piece]: ...
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        progress: bool | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline_seconds: float | None = None,
        cache: CacheOptions = CACHED,
    ) -> list[Completion] | Iterator[Piece]:
        """Continue text.

        prompts   one string or one list of token ids, or a list of either. Text gets the begin-of-sentence id in front.
                  Images come through `chat` alone, so ids must not hold the model's image token.
        params    for all prompts, or one for each.
        stream    False: a list of completions in the order of the prompts. True: an iterator of pieces as they come;
                  closing it ends what has not finished. Steps are taken as somebody asks for pieces. Those that others'
                  steps bring wait here, max_tokens for a completion at most, and hold nobody up.
        progress  a progress bar on standard error; None: when there are many prompts and a terminal.
        priority  smaller runs first, see `scheduler.patience_seconds`.
        tenant    who asks: tenants get equal shares of the engine's time, however many requests each has.
        deadline_seconds
                  a prompt that has not begun by then ends with the error DeadlinePassed; None: it waits.
        cache     what to do with prefixes that are cached, for all prompts.
        Raises    RequestError, before anything runs, if any of the requests cannot be served. An error on the way
                  stands in its completion's `error`; with a single prompt it is raised.
        """
        session = _Session(self, stream)
        todo = self._prompts(prompts)
        for i, (ids, p) in enumerate(zip(todo, _matched(params, len(todo)), strict=True)):
            if p.stop and self.tokenizer is None:
                raise BadField("stop", p.stop, f"no stop strings: the checkpoint has no {FILE_NAME}")
            request = self._request(ids, p, priority, i, (), cache, tenant, deadline_seconds)
            session.add(request, [_TextReader(self.tokenizer, p.stop) for _ in range(p.n)])
        if stream:
            return iter(session)
        many = len(session.order) >= _PROGRESS_FROM and sys.stderr.isatty()
        return self._finish(session, many if progress is None else progress)

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline_seconds: float | None = None,
        cache: CacheOptions = CACHED,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline_seconds: float | None = None,
        cache: CacheOptions = CACHED,
    ) -> Iterator[Piece]: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline_seconds: float | None = None,
        cache: CacheOptions = CACHED,
    ) -> Completion | Iterator[Piece]:
        """The assistant's next turn of a conversation.

        messages   OpenAI chat form, see `text/prompt.py`; so are thinking, effort, tools, tool_choice and
                   response_format, which is told to the model and not enforced. Images come as image_url parts with
                   data URLs; their pixels are read here, on the caller's thread.
        stream     as in `generate`, and so are priority, tenant, deadline_seconds and cache; pieces carry reasoning,
                   content (`text`) and tool calls apart.
        returns    a completion whose choices have a `message`. Stop strings match in the content only, and there also
                   before `min_tokens`.
        Raises     RequestError, before anything runs: BadMessages, BadImage, NoVision, PromptTooLong and the like.
        """
        params = params or SamplingParams()
        params.validate(self.model.vocab_size)
        prompt = self.encoder.encode(
            messages,
            thinking=thinking,
            effort=effort,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            stop=params.stop,
            spans=self.model.image_tokens,
        )
        session = _Session(self, stream)
        request = self._request(prompt.ids, params, priority, 0, prompt.images, cache, tenant, deadline_seconds)
        session.add(request, [_ReplyReader(self.encoder, prompt) for _ in range(params.n)])
        return iter(session) if stream else self._finish(session, False)[0]

    @property
    def encoder(self) -> ChatEncoder:
        """Made on first use. Raises MissingCheckpointFile if the checkpoint has no tokenizer, BadConfigKey if it has
        another model's.
        """
        if self._encoder is None:
            tokenizer, image_id = self._text(), self.model.image_token_id
            if image_id not in (None, known := tokenizer.special_ids["image"]):
                raise BadConfigKey("image_token_id", image_id, f"{known}, the image token of {tokenizer.path.name}")
            self._encoder = ChatEncoder(tokenizer)
        return self._encoder

    def session(
        self, prompt: str | Sequence[int] = "", *, cache: CacheOptions = CACHED, lease_seconds: float = 600.0
    ) -> "Session":
        """A sequence that grows, is branched and taken back, and whose beginning stays cached meanwhile.

        prompt         what it begins with, text or ids; more comes with `append`.
        lease_seconds  how long its blocks stay after its last use; a new use renews it.
        """
        return Session(self, self._prompts(prompt)[0] if len(prompt) else (), cache, lease_seconds)

    def replay(self, receipt: Receipt) -> Receipt:
        """Produce the answer of a receipt again, and its receipt of now. Raises BadReceipt: another model's."""
        maker = self.maker
        if maker.model != receipt.made_by.model:
            raise BadReceipt("model", f"it is of checkpoint {receipt.made_by.model[:16]}, this is {maker.model[:16]}")
        count = len(receipt.tokens)
        params = replace(
            receipt.params,
            n=1,
            seed=receipt.seed,
            stop=(),
            max_tokens=max(count, 1),
            min_tokens=min(receipt.params.min_tokens, count),
            receipt=True,
        )
        found = self.generate([receipt.prompt], params, progress=False)[0].receipt
        assert found is not None, "an answer came without the receipt it was asked for"
        return found

    @cached_property
    def maker(self) -> Maker:
        """What decides the bits of this engine's answers. Cost: reads the checkpoint once."""
        native_build = native.status().detail if self.device.type == "cpu" else ""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        return Maker(
            model=self._checkpoint.digest(),
            numerics=self.config.numerics,
            deterministic=self.config.deterministic,
            cache=f"{self.config.cache.mode}, {self.config.cache.truncation}" if self.config.cache.prefix else "off",
            device=f"{self.device.type} {name}",
            benthic=benthic.__version__,
            torch=str(torch.__version__),
            kernels=native_build or "triton",
        )

    # ---- lifetime ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End what is unfinished and give the memory back. May be called again; nothing else may."""
        with self._lock:
            if self._closed:
                return
            for id in list(self._sessions):
                self.loop.inbox.put(Abort(id))
            self._settle()
            self.loop.close()
            self._closed = True
            del self.model, self.loop

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- within ------------------------------------------------------------------------------------------------------

    def _receipt(self, request: Request, branch: int, stream: _Stream) -> Receipt:
        return Receipt(
            made_by=self.maker,
            prompt=request.prompt,
            params=replace(request.params, receipt=False),
            seed=branch_seed(request.seed, branch),
            tokens=tuple(stream.tokens),
            digest=digest_of(stream.digests),
        )

    def _text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise MissingCheckpointFile(self.path / FILE_NAME, "without it prompts must be token ids")
        return self.tokenizer

    def _prompts(self, prompts: Prompts) -> list[tuple[int, ...]]:
        if isinstance(prompts, str):
            return [tuple(self._text().encode(prompts))]
        items = list(prompts)
        if items and all(isinstance(item, int) for item in items):
            return [tuple(cast(list[int], items))]
        return [
            tuple(self._text().encode(item)) if isinstance(item, str) else tuple(cast(Sequence[int], item))
            for item in items
        ]

    def _request(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        index: int,
        images: Sequence[PromptImage] = (),
        cache: CacheOptions = CACHED,
        tenant: str = "",
        deadline_seconds: float | None = None,
    ) -> Request:
        """A request that can be served. Pixels are read once the rest of it is known to be fine."""
        if self._closed:
            raise EngineClosed
        if not images and self.model.image_token_id in ids:
            raise BadImage(
                f"prompts[{index}] holds the image token, {self.model.image_token_id}, and ids bring no image along; "
                "use chat, with the image as an image_url part"
            )
        if params.seed is not None:
            seed = params.seed
        elif self.config.seed is not None:
            seed = branch_seed(self.config.seed, index)
        else:
            seed = secrets.randbits(63)
        if images and params.receipt:
            raise BadField("receipt", True, "no receipt for a prompt with images: it would have to hold them")
        if deadline_seconds is not None and not 0 < deadline_seconds < math.inf:
            raise BadField("deadline_seconds", deadline_seconds, "a number of seconds above 0")
        deadline = None if deadline_seconds is None else self.loop.clock() + deadline_seconds
        places = tuple(ImageInput(image.first, image.tokens, _digest(image)) for image in images)
        request = Request(
            id=next(self._numbers),
            prompt=ids,
            params=params,
            seed=seed,
            priority=priority,
            arrival_seconds=perf_counter(),
            images=places,
            cache=cache,
            tenant=tenant,
            deadline=deadline,
        )
        self.loop.scheduler.check(request)
        read: dict[str, object] = {}
        for image, place in zip(images, places, strict=True):
            if place.digest not in read:
                read[place.digest] = self.model.read_image(image.source, image.longest, image.where)
        request.images = tuple(replace(place, patches=read[place.digest]) for place in places)
        return request

    def _finish(self, session: _Session, progress: bool) -> list[Completion]:
        tokens = 0
        with tqdm(total=len(session.order), disable=not progress, unit="prompt", file=sys.stderr) as bar:
            for piece in session:
                if piece.completion is not None:
                    tokens += piece.completion.usage.completion_tokens
                    bar.set_postfix(tokens=tokens, refresh=False)
                    bar.update()
        completions = [session.completion(id) for id in session.order]
        if len(completions) == 1 and (error := completions[0].error) is not None:
            raise error
        return completions

    def _enter(self, session: _Session) -> None:
        with self._lock:
            if self._closed:
                raise EngineClosed
            for request in session.requests.values():
                self._sessions[request.id] = session
                self.loop.inbox.put(request)

    def _pump(self, session: _Session) -> None:
        """One step for everybody, unless another thread has brought this session news meanwhile."""
        with self._lock:
            if session.pieces or not session.unfinished:
                return
            if self._closed:
                raise EngineClosed
            with _interrupts_after_the_step():
                self.loop.step()
                self._route()

    def _route(self) -> None:
        """Hand events to their sessions; what these ask of the engine in turn happens before the next step."""
        while events := self.loop.outbox.take():
            for event in events:
                session = self._sessions.get(event.request)
                for abort in session.take(event) if session is not None else ():
                    self.loop.inbox.put(abort)
            if len(self.loop.inbox):
                self.loop.settle()

    def _settle(self) -> None:
        self.loop.settle()
        self._route()

    def _leave(self, session: _Session) -> None:
        with self._lock:
            if not self._closed:
                for id in session.order:
                    if any(stream.done is None for stream in session.streams[id]):
                        self.loop.inbox.put(Abort(id))
                self._settle()
            for id in session.order:
                self._sessions.pop(id, None)


class Session:
    """What `LLM.session` returns. Its tokens are the caller's: appended, answered, forked and taken back.

    with llm.session("Once upon a time") as story:
        story.generate(SamplingParams(max_tokens=40))
        other = story.fork()
    """

    def __init__(self, llm: LLM, tokens: Sequence[int], cache: CacheOptions, lease_seconds: float):
        self.llm, self.tokens, self.cache, self.lease_seconds = llm, tuple(tokens), cache, lease_seconds
        self._pin: Pin | None = None

    def append(self, more: str | Sequence[int]) -> None:
        """Text (without a begin-of-sentence id, unless it is the first) or ids behind what is there."""
        if isinstance(more, str):
            more = self.llm._text().encode(more, bos=not self.tokens)
        self.tokens = (*self.tokens, *more)

    def generate(self, params: SamplingParams | None = None, *, priority: int = 0) -> Completion:
        """Go on from here. The first choice's tokens belong to the session from now on. Raises RequestError."""
        params = params or SamplingParams()
        (done,) = self.llm.generate([self.tokens], params, progress=False, priority=priority, cache=self.cache)
        self.tokens = (*self.tokens, *done.token_ids)
        self._keep()
        return done

    def fork(self) -> "Session":
        """Another session with the same tokens. Both share what is cached."""
        other = Session(self.llm, self.tokens, self.cache, self.lease_seconds)
        other._keep()
        return other

    def rewind(self, tokens: int) -> None:
        """Keep the first `tokens` tokens. Raises BadField."""
        if not 0 <= tokens <= len(self.tokens):
            raise BadField("tokens", tokens, f"a number in [0, {len(self.tokens)}]")
        self.tokens = self.tokens[:tokens]
        self._keep()

    def close(self) -> None:
        """Its blocks may go. May be called again."""
        with self.llm._lock:
            if not self.llm._closed:
                self.llm.loop.scheduler.unpin(self._pin)
            self._pin = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self) -> None:
        with self.llm._lock:
            if self.llm._closed:
                raise EngineClosed
            scheduler, before = self.llm.loop.scheduler, self._pin
            self._pin = scheduler.pin(self.tokens, self.cache, self.lease_seconds)
            scheduler.unpin(before)


def build_loop(
    model: Model,
    config: Config,
    device: torch.device,
    *,
    eos_ids: Sequence[int] = (),
    never: Sequence[int] = (),
    namespace: bytes = b"",
) -> Loop:
    """Scheduler, cache, sampler and runner around a model, sized by the configuration.

    never      token ids that no request may produce.
    namespace  what else than the model's numbers decides what a block of tokens holds, see `cache/prefix.py`.
    """
    scheduler = build_scheduler(model, config, CostModel(), eos_ids=eos_ids, namespace=namespace)
    cache, cost, limit = scheduler.cache, scheduler.cost, scheduler.max_context_tokens
    blocks, slots, states = cache.blocks.usable, cache.slots.usable, len(cache.snapshots.slots)
    longest = min(blocks_for(limit), blocks)
    storage = Storage(model.cache_spec, blocks + 1, slots + 1, device, table_blocks=longest, states=states)
    sampler = Sampler(model.vocab_size, device, never)
    ahead = config.scheduler.ahead == "on" or (config.scheduler.ahead == "auto" and device.type == "cuda")
    graphs = device.type == "cuda" and config.gpu.graphs
    rows = min(config.gpu.graph_rows, config.scheduler.token_budget) if graphs else 0
    runner = Runner(model, storage, sampler, deterministic=config.deterministic, ahead=ahead, graph_rows=rows)
    if device.type == "cuda":
        _compile(runner, config, device)
    captured = graphs and _capture(runner)
    limits = first_steps.Limits(
        slots, longest, BLOCK_TOKENS, config.scheduler.token_budget, limit, config.scheduler.image_tokens
    )
    if config.scheduler.worst_first:
        _take_the_worst(runner, limits)
    if config.scheduler.itl_target_ms or config.scheduler.itl_stretch:
        first_steps.calibrate(cost, runner.run, limits)
    log.info(
        "ready",
        extra={
            "model": config.model,
            "numerics": config.numerics,
            "device": str(device),
            "context_tokens": limit,
            "token_budget": config.scheduler.token_budget,
            "blocks": blocks,
            "slots": slots,
            "cache_bytes": storage.bytes,
            "graphs": captured,
            "native": native.status().detail if device.type == "cpu" else "",
        },
    )
    return Loop(scheduler, runner, ahead=ahead)


def build_scheduler(
    model: Model, config: Config, cost: CostModel, *, eos_ids: Sequence[int] = (), namespace: bytes = b""
) -> Scheduler:
    """The part of a loop that decides, and its cache's bookkeeping. cost: what it believes of steps, and goes on to."""
    limit = config.scheduler.max_context_tokens or model.max_positions
    if limit > model.max_positions:
        want = f"at most the model's {model.max_positions} positions"
        raise BadSetting("scheduler.max_context_tokens", limit, want, "configuration")
    if config.scheduler.token_budget < config.scheduler.max_running:
        want = f"at least scheduler.max_running, {config.scheduler.max_running}"
        raise BadSetting("scheduler.token_budget", config.scheduler.token_budget, want, "configuration")
    block_bytes = block_layout(model.cache_spec.append).block_bytes
    blocks = config.cache.blocks or config.cache.bytes // block_bytes
    if blocks < 1:
        want = f"at least one block of {BLOCK_TOKENS} tokens, {block_bytes} bytes"
        raise BadSetting("cache.bytes", config.cache.bytes, want, "configuration")
    slots = config.scheduler.max_running
    states = config.cache.snapshots if config.cache.prefix and config.cache.mode == "snapshot" else 0
    cache = CacheManager(
        blocks + 1,
        slots + 1,
        prefix=config.cache.prefix,
        eviction=config.cache.eviction,
        ttl_seconds=config.cache.ttl_seconds,
        snapshots=states,
    )
    return Scheduler(
        cache,
        token_budget=config.scheduler.token_budget,
        max_context_tokens=limit,
        vocab_size=model.vocab_size,
        eos_ids=eos_ids,
        image_tokens=config.scheduler.image_tokens,
        prefixes=_prefixes(model, config, namespace),
        cost=cost,
        itl_seconds=config.scheduler.itl_target_ms / 1e3,
        itl_stretch=config.scheduler.itl_stretch,
        prefill_floor=config.scheduler.prefill_floor,
        grid=BLOCK_TOKENS if config.deterministic else 1,
        prompt_slowdown=config.scheduler.prompt_slowdown,
        patience=config.scheduler.patience_seconds,
    )


def _compile(runner: Runner, config: Config, device: torch.device) -> None:
    """Compile what steps will need, side by side: one after another, at first use, it takes minutes.

    What that is takes seconds to find out, and is kept.
    """
    from benthic.kernels.triton import tuning, warm  # need triton, which a CPU install need not have

    told = (model_dir(config.model) / "config.json").read_text(encoding="utf-8")
    settings = {name: of for name, of in asdict(config).items() if name not in ("model", "seed", "log_level", "gate")}
    versions = (source_digest(), str(torch.__version__), metadata.version("triton"))
    name = torch.cuda.get_device_name(device)
    lengths = tuning.buckets(config.scheduler.token_budget)
    jobs = warm.kept(json.dumps([versions, name, settings, told]), lambda: runner.rehearse(lengths))
    with tqdm(desc="kernels", unit="kernel", file=sys.stderr, disable=None, leave=False) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        for failure in warm.build(jobs, done=progress):
            log.warning("kernel does not compile", extra={"kernel": failure.job.kernel, "error": failure.error})


def _take_the_worst(runner: Runner, limits: first_steps.Limits) -> None:
    """The largest steps, so that what they need is there before anybody asks. Raises OutOfMemory."""
    device = runner.storage.device
    seconds = math.inf if device.type == "cuda" else _WORST_SECONDS
    try:
        first_steps.take_largest(runner.run, limits, seconds, blank=runner.model.largest_image)
    except (torch.OutOfMemoryError, MemoryError) as error:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
        raise OutOfMemory(
            f"a step of {limits.token_budget} rows, or of {limits.slots} requests at {limits.max_context_tokens} "
            f"tokens, or with {limits.image_tokens} rows of images, beside weights and cache",
            total - free,
            free,
            "lower cache.bytes, scheduler.token_budget, scheduler.image_tokens or scheduler.max_running",
        ) from error


def _prefixes(model: Model, config: Config, namespace: bytes) -> Prefixes:
    """How the engine treats cached prefixes. Also without a cache prompts need not be computed whole."""
    cache, windows = config.cache, model.windows
    for key, rows in (("cache.kept_rows", cache.kept_rows), ("cache.replay_rows", cache.replay_rows)):
        if 0 < rows < windows.tokens:
            raise BadSetting(key, rows, f"at least the model's window of {windows.tokens} tokens", "configuration")
    return Prefixes(
        windows=windows,
        namespace=namespace,
        mode=cache.mode,
        truncation=cache.truncation,
        replay_rows=cache.replay_rows,
        kept_rows=cache.kept_rows,
    )


def _capture(runner: Runner) -> bool:
    """Record steps. Where an op waits for the device none can be recorded, and steps stay as they are."""
    try:
        runner.capture()
    except NotCapturable as error:
        log.warning("no graphs", extra={"reason": str(error)})
        return False
    return True


def _digest(image: PromptImage) -> str:
    return hashlib.sha256(f"{image.longest}\n".encode() + image.source).hexdigest()


def device_of(name: str) -> torch.device:
    """The device that a setting names. Raises DeviceUnavailable."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(name, "no such kind of device") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceUnavailable(name, "want cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise DeviceUnavailable(name, f"{torch.cuda.device_count()} CUDA devices are here")
    if device.type == "cuda" and not triton.available():  # plain torch would give the answers, a hundred times slower
        raise DeviceUnavailable(name, "the GPU kernels need triton: pip install 'benthic[gpu]'")
    return device


def _matched(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * prompts
    if len(params) != prompts:
        raise BadField("number of params", len(params), f"one set, or one for each of the {prompts} prompts")
    return list(params)


@contextmanager
def _interrupts_after_the_step() -> Iterator[None]:
    """Hold Ctrl-C back until the scheduler is at rest; the second one goes through at once. Main thread only."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield
        return
    pressed = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        raise KeyboardInterrupt
