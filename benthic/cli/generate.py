"""`benthic generate`: complete prompts from the command line, from files or from standard input.

A prompt is plain text that the model continues (`--raw`, the default), or with `--chat` one user turn that it answers.
Files hold one prompt a line, or one JSON object a line: `{"prompt": TEXT}` or `{"messages": [...]}`, with sampling
fields that hold for this line only and an optional "id" that comes back with the answer; other keys are not read.
Pictures come with `--chat`: from files with `--image`, or in messages as image_url parts with data URLs.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from tqdm import tqdm

from benthic import config
from benthic.errors import BadField, BenthicError, InputFileError, InvalidJSON
from benthic.text import images
from benthic.text.prompt import EFFORTS
from benthic.types import SamplingParams

if TYPE_CHECKING:  # loads torch
    from benthic.engine.llm import Choice, Completion, Piece

_FIELDS = {field.name for field in fields(SamplingParams)}
PROGRESS_FROM = 8  # prompts from which JSON into a file shows a bar on the terminal
_LIST_FIELDS = ("stop", "stop_ids", "allowed_ids", "banned_ids")
# what a terminal would obey instead of show: C0 but tab and newline, DEL, C1
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Engine(Protocol):
    """What the commands need of `engine.llm.LLM`."""

    def generate(
        self, prompts: Sequence[str], params: Sequence[SamplingParams], *, stream: bool
    ) -> "Iterator[Piece]": ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        stream: bool,
        thinking: bool,
        effort: str | None,
    ) -> "Iterator[Piece]": ...


def open_engine(settings: config.Config) -> AbstractContextManager[Engine]:
    """Load the model, and say so where its answers were never checked here.

    Imported here, so that `--help` and a mistyped flag need no torch.
    """
    from typing import cast

    from benthic import gate
    from benthic.engine.llm import LLM

    llm = LLM(config=settings)
    if (text := gate.notice(settings)) is not None:
        print(text, file=sys.stderr)
    return cast(AbstractContextManager[Engine], llm)


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a run."""

    prompt: str | None  # raw text; None: messages
    messages: tuple[Mapping[str, Any], ...]
    params: SamplingParams
    id: Any = None  # the caller's own name for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "Without --prompt and FILE, prompts are read from standard input. The text is written as it comes, the speed\n"
        "to standard error. Exit code: 0 done, 2 wrong input, 130 interrupted, 1 anything else."
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="file of prompts, one a line or JSON lines; - is stdin"
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--raw", action="store_true", help="continue the prompt as plain text (the default)")
    mode.add_argument("--chat", action="store_true", help="answer the prompt as a user's turn")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument(
        "--image",
        action="append",
        metavar="PATH",
        default=[],
        help=f"{images.FORMATS} file that every prompt is about, with --chat; may be given several times",
    )
    parser.add_argument("--think", action="store_true", help="think before answering, with --chat")
    parser.add_argument("--effort", choices=[*EFFORTS], help="how hard to think, with --think")
    parser.add_argument(
        "--input-format",
        choices=["auto", "text", "jsonl"],
        default="auto",
        help="form of FILE; auto: jsonl when its name ends so or its first line begins with { (default: auto)",
    )
    add_sampling_arguments(parser)
    parser.add_argument("--n", type=int, default=1, help="completions of each prompt (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")
    parser.add_argument(
        "--receipts",
        type=Path,
        metavar="FOLDER",
        help="write a receipt for each completion, to be produced again by `benthic replay`",
    )
    parser.add_argument("--no-echo", action="store_true", help="leave the prompt out before its continuation")
    config.add_arguments(parser, skip=("seed",))


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int = 256) -> None:
    """The flags that `sampling_params` reads; `chat` has them too."""
    default = SamplingParams()
    group = parser.add_argument_group("sampling")

    def number(flag: str, kind: type, text: str, value: float | None) -> None:
        shown = "a new one each time" if value is None else f"{value:g}"
        group.add_argument(flag, type=kind, default=value, metavar="NUMBER", help=f"{text} (default: {shown})")

    number("--max-tokens", int, "most tokens to produce", max_tokens)
    number("--min-tokens", int, "no end before so many tokens", default.min_tokens)
    number("--temperature", float, "0: always the likeliest token", default.temperature)
    number("--top-p", float, "keep the likeliest tokens of this total probability", default.top_p)
    number("--top-k", int, "keep this many of the likeliest tokens; 0: all", default.top_k)
    number("--min-p", float, "keep tokens with this share of the best one's probability", default.min_p)
    number("--repetition-penalty", float, "above 1: seen tokens become less likely", default.repetition_penalty)
    number("--presence-penalty", float, "taken from the logit of every token produced", default.presence_penalty)
    number("--frequency-penalty", float, "the same, for each time it was produced", default.frequency_penalty)
    number("--seed", int, "the same seed gives the same text", None)
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=[],
        help="text that ends the answer; may be given several times",
    )


def sampling_params(args: argparse.Namespace, **more: Any) -> SamplingParams:
    """The flags as parameters, checked. Raises BadField."""
    params = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        **more,
    )
    params.validate()
    return params


def run(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    for flag in ("system", "think", "image"):
        if not args.chat and (value := getattr(args, flag)) not in (None, False, []):
            raise BadField(f"--{flag}", value, "--chat beside it")
    items = read_items(args, sampling_params(args, n=args.n, receipt=args.receipts is not None))
    if args.receipts is not None:
        args.receipts.mkdir(parents=True, exist_ok=True)
    began = perf_counter()
    with open_engine(settings) as engine:
        loaded = perf_counter()
        streams = _streams(engine, items, args)  # every prompt is checked here, before anything runs
        writer = _JsonWriter(items) if args.json else _TextWriter(items, echo=not args.no_echo)
        try:
            for index, piece in streams:
                writer.take(index, piece)
                if args.receipts is not None and piece.completion is not None:
                    _write_receipts(args.receipts, index, piece.completion)
        except KeyboardInterrupt:
            if not args.json:
                print(flush=True)  # leave the line the text stands in
            raise
        finally:
            writer.close()
        if isinstance(writer, _TextWriter):
            print(
                f"{speed(writer.tokens, perf_counter() - loaded)}; loading took {loaded - began:.1f} s", file=sys.stderr
            )
    return max((error.exit_code for error in writer.errors), default=0)


def _write_receipts(folder: Path, index: int, completion: "Completion") -> None:
    """FOLDER/<number of the prompt>-<number of the completion>.json."""
    for number, choice in enumerate(completion.choices):
        if choice.receipt is not None:
            text = json.dumps(choice.receipt.to_json(), ensure_ascii=False, indent=1)
            (folder / f"{index}-{number}.json").write_text(text + "\n", encoding="utf-8")


def _streams(engine: Engine, items: Sequence[Item], args: argparse.Namespace) -> "Iterator[tuple[int, Piece]]":
    """The pieces of all items as they come, with the index of their item."""
    raw = [i for i, item in enumerate(items) if item.prompt is not None]
    texts = [item.prompt for item in items if item.prompt is not None]
    pieces = engine.generate(texts, [items[i].params for i in raw], stream=True) if raw else iter(())
    chats = [
        (i, engine.chat(item.messages, item.params, stream=True, thinking=args.think, effort=args.effort))
        for i, item in enumerate(items)
        if item.prompt is None
    ]
    return _merged(pieces, raw, chats)


def _merged(
    pieces: "Iterator[Piece]", raw: Sequence[int], chats: "list[tuple[int, Iterator[Piece]]]"
) -> "Iterator[tuple[int, Piece]]":
    """One piece of each open stream in turn, so that all of them are on their way at the same time."""
    open_streams: list[tuple[int | None, Iterator[Piece]]] = [*([(None, pieces)] if raw else []), *chats]
    while open_streams:
        for entry in list(open_streams):
            index, stream = entry
            piece = next(stream, None)
            if piece is None:
                open_streams.remove(entry)
            else:
                yield (raw[piece.prompt] if index is None else index), piece


# Output


class _JsonWriter:
    """One object for each choice, in the order of the prompts."""

    def __init__(self, items: Sequence[Item]):
        self.items = items
        self.errors: list[BenthicError] = []
        self._ready: dict[int, Completion] = {}
        self._next = 0
        many = len(items) >= PROGRESS_FROM and not sys.stdout.isatty()
        self._bar = tqdm(total=len(items), unit="prompt", file=sys.stderr, disable=None if many else True)

    def take(self, index: int, piece: "Piece") -> None:
        if piece.completion is None:
            return
        self._bar.update()
        self._ready[index] = piece.completion
        while (completion := self._ready.pop(self._next, None)) is not None:
            for choice, result in enumerate(completion.choices):
                if result.error is not None:
                    self.errors.append(result.error)
                body = _json_body(self.items[self._next], self._next, choice, completion, result)
                print(json.dumps(body, ensure_ascii=False), flush=True)
            self._next += 1

    def close(self) -> None:
        self._bar.close()


def _json_body(item: Item, index: int, number: int, completion: "Completion", choice: "Choice") -> dict[str, Any]:
    body: dict[str, Any] = {"index": index, "choice": number}
    if item.id is not None:
        body["id"] = item.id
    if item.prompt is not None:
        body["prompt"] = item.prompt
    if choice.error is not None:
        error = choice.error
        return body | {"error": {"code": error.code, "message": str(error), "retryable": error.retryable}}
    body |= {"text": choice.text, "token_ids": list(choice.token_ids), "finish_reason": choice.finish_reason}
    if choice.message is not None:
        body["message"] = choice.message.as_dict()
    prompt_tokens, tokens = completion.usage.prompt_tokens, len(choice.token_ids)
    body["usage"] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "cached_tokens": completion.usage.cached_tokens,
        "miss": completion.usage.miss,
    }
    body["timing"] = choice.timing._asdict()
    return body


class _TextWriter:
    """The text as it comes: the first choice that is not over is shown live, the others wait for their turn."""

    def __init__(self, items: Sequence[Item], echo: bool, out: TextIO | None = None):
        self.items, self.echo = items, echo
        self.errors: list[BenthicError] = []
        self.out = out or sys.stdout
        self._live = self.out.isatty()
        self._order = [(i, choice) for i, item in enumerate(items) for choice in range(item.params.n)]
        self._at = 0
        self._reasoning = False  # is the text shown last a part of the thinking
        self._waiting: dict[tuple[int, int], list[Piece]] = {}
        self.tokens = 0
        self._start()

    def take(self, index: int, piece: "Piece") -> None:
        self.tokens += len(piece.token_ids)
        key = (index, piece.choice)
        if key != self._order[self._at]:
            self._waiting.setdefault(key, []).append(piece)
            return
        self._show(piece)
        while self._at < len(self._order) and (held := self._waiting.pop(self._order[self._at], None)):
            for piece in held:
                self._show(piece)

    def _show(self, piece: "Piece") -> None:
        if piece.reasoning:
            self._write(("" if self._reasoning else "<think>\n") + piece.reasoning)
            self._reasoning = True
        if piece.text:
            self._write(("\n</think>\n" if self._reasoning else "") + piece.text)
            self._reasoning = False
        if piece.tool_call is not None:
            call = piece.tool_call
            self._write((f"\n[tool call {call.index}] {call.name} " if call.name else "") + call.arguments)
        if piece.finish_reason is not None or piece.error is not None:
            self._write("\n")
            if piece.error is not None:
                self.errors.append(piece.error)
                print(f"benthic: prompt {self._order[self._at][0] + 1}: {piece.error}", file=sys.stderr)
            self._at, self._reasoning = self._at + 1, False
            self._start()

    def _start(self) -> None:
        """The heading of the next choice, when there are several, and its prompt."""
        if self._at == len(self._order):
            return
        index, choice = self._order[self._at]
        item = self.items[index]
        if len(self._order) > 1:
            of_n = f", choice {choice + 1} of {item.params.n}" if item.params.n > 1 else ""
            self._write(f"{chr(10) if self._at else ''}--- prompt {index + 1} of {len(self.items)}{of_n}\n")
        if self.echo and item.prompt is not None:
            self._write(item.prompt)

    def _write(self, text: str) -> None:
        self.out.write(printable(text) if self._live else text)
        self.out.flush()

    def close(self) -> None:
        """Nothing is held back: what was shown was flushed."""


def printable(text: str) -> str:
    """Text for a terminal: control characters that the model produced are shown as U+FFFD instead of obeyed."""
    return text.translate(_CONTROLS)


def speed(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds if seconds > 0 else 0.0:.1f} tokens/s"


# Prompts


def read_items(args: argparse.Namespace, params: SamplingParams) -> list[Item]:
    """The prompts of this run, in order: --prompt first, then the files. Raises RequestError naming file and line."""
    pictures = [image_part(path) for path in args.image]
    items = [_text_item(text, args, params, pictures) for text in args.prompt or ()]
    sources = list(args.files)
    if not items and not sources:
        if sys.stdin.isatty():
            raise BadField("prompt", None, "--prompt TEXT, a FILE, or text on standard input")
        sources = ["-"]
    for source in sources:
        items += _read_file(source, args, params, pictures)
    if not items:
        raise BadField("prompt", None, f"at least one prompt in {', '.join(map(_name, sources))}")
    return items


Pictures = Sequence[Mapping[str, Any]]  # parts that stand before a user's text


def image_part(path: str) -> dict[str, Any]:
    """A picture file as a part of a user's turn. Raises InputFileError; BadImage naming the file."""
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(images.MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise InputFileError(path, error.strerror or str(error)) from error
    images.open_lazily(data, path).close()  # here a fault can be told by the file's name
    return {"type": "image_url", "image_url": {"url": images.data_url(data, path)}}


def user_turn(text: str, pictures: Pictures = ()) -> dict[str, Any]:
    """What a user says, behind the pictures it is about."""
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}] if pictures else text}


def _text_item(text: str, args: argparse.Namespace, params: SamplingParams, pictures: Pictures) -> Item:
    if not args.chat:
        return Item(text, (), params)
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return Item(None, (*system, user_turn(text, pictures)), params)


def _read_file(source: str, args: argparse.Namespace, params: SamplingParams, pictures: Pictures) -> Iterator[Item]:
    name = _name(source)
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise InputFileError(name, error.strerror or str(error)) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputFileError(name, f"line {line} is not UTF-8 text; convert the file") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    as_json = args.input_format == "jsonl" or (
        args.input_format == "auto" and (source.endswith(".jsonl") or (bool(lines) and lines[0][1].startswith("{")))
    )
    for number, line in lines:
        if as_json:
            yield _json_item(line, f"{name}, line {number}", args, params, pictures)
        else:
            yield _text_item(line.removesuffix("\r"), args, params, pictures)


def _name(source: str) -> str:
    return "standard input" if source == "-" else source


def _json_item(line: str, where: str, args: argparse.Namespace, params: SamplingParams, pictures: Pictures) -> Item:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise InvalidJSON(where, str(error)) from error
    if not isinstance(body, dict):
        raise InvalidJSON(where, f"it is {type(body).__name__}, want an object with prompt or messages")
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidJSON(where, "want exactly one of prompt and messages")
    if prompt is not None and not isinstance(prompt, str):
        raise BadField(f"{where}: prompt", prompt, "text")
    if prompt is None and not isinstance(messages, list):
        raise BadField(f"{where}: messages", messages, "a list of messages")
    own = {key: _listed(key, value) for key, value in body.items() if key in _FIELDS}
    try:
        mine = replace(params, **own)
        mine.validate()
    except BadField as error:
        raise BadField(f"{where}: {error.field}", error.value, error.want) from error
    item = Item(None, tuple(messages or ()), mine) if prompt is None else _text_item(prompt, args, mine, pictures)
    return replace(item, id=body.get("id"))


def _listed(key: str, value: Any) -> Any:
    """JSON lists and objects as the tuples that SamplingParams holds."""
    if key == "stop" and isinstance(value, str):
        return (value,)
    if key in _LIST_FIELDS and isinstance(value, list):
        return tuple(value)
    if key == "logit_bias" and isinstance(value, dict):
        return tuple((int(token) if token.isdecimal() else token, bias) for token, bias in value.items())
    return value
