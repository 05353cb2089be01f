"""`benthic chat`: talk to the model in the terminal. Answers stream; thinking is shown apart.

Ctrl-C stops the answer that is being written, and what came of it stays in the conversation. A second one, or one at
the empty prompt that is not followed by anything, leaves. Lines from a pipe work too.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from time import perf_counter
from typing import Any, cast

from benthic import config
from benthic.cli.generate import (
    Engine,
    add_sampling_arguments,
    image_part,
    open_engine,
    printable,
    sampling_params,
    speed,
    user_turn,
)
from benthic.errors import BenthicError, RequestError
from benthic.text.images import FORMATS
from benthic.text.prompt import EFFORTS

HELP = """\
/reset         forget the conversation; the system message stays
/system TEXT   set the system message from the next answer on; without TEXT: remove it
/think on|off  think before answering, or not
/image PATH    show a picture with the next message; may be said several times
/help          this list
/exit          leave; so does the end of input"""

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"in the conversation:\n{HELP}"
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        action="append",
        metavar="PATH",
        default=[],
        help=f"{FORMATS} file to show with the first message; may be given several times",
    )
    parser.add_argument("--think", action="store_true", help="think before answering")
    parser.add_argument("--effort", choices=[*EFFORTS], help="how hard to think, when thinking is on")
    add_sampling_arguments(parser, max_tokens=1024)
    config.add_arguments(parser, skip=("seed",))


def run(args: argparse.Namespace) -> int:
    params, settings = sampling_params(args), config.from_arguments(args)
    pictures = [image_part(path) for path in args.image]
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with open_engine(settings) as engine:
        if terminal:
            print(f"{settings.model}; /help lists the commands, /exit leaves")
        conversation = Conversation(engine, params, args.system, args.think, args.effort)
        conversation.pictures = pictures
        return _converse(conversation, terminal)


def _converse(conversation: "Conversation", terminal: bool) -> int:
    interrupted = False
    while True:
        try:
            line = _read_line(terminal)
            interrupted = False
            if line is None or not conversation.take(line):
                return 0 if terminal else conversation.exit_code
        except KeyboardInterrupt:  # while reading: `take` handles its own first one
            if interrupted or not terminal:
                raise
            interrupted = True
            print("\n(Ctrl-C again or /exit leaves)")


def _read_line(terminal: bool) -> str | None:
    """One line of the user without its end; None at the end of input."""
    if not terminal:
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    with suppress(ImportError):  # some Pythons are built without it; input() still reads then
        import readline  # noqa: F401  once it is loaded, input() edits lines and keeps a history
    try:
        return input("> ")
    except EOFError:
        print()
        return None


class Conversation:
    """The turns so far, and the commands."""

    def __init__(self, engine: Engine, params: Any, system: str | None, thinking: bool, effort: str | None):
        self.engine, self.params = engine, params
        self.system, self.thinking, self.effort = system, thinking, effort
        self.turns: list[dict[str, Any]] = []
        self.pictures: list[dict[str, Any]] = []  # to go with the next turn
        self.exit_code = 0  # of the last answer that failed
        self._dim = sys.stdout.isatty()

    def take(self, line: str) -> bool:
        """Act on one line of the user. False: leave."""
        if line.startswith("/"):
            return self._command(*line.partition(" ")[::2])
        if line.strip():
            self._answer(line)
        return True

    def _command(self, name: str, rest: str) -> bool:
        name, rest = name.rstrip(), rest.strip()
        if name == "/exit":
            return False
        if name == "/help":
            print(HELP)
        elif name == "/reset":
            self.turns.clear()
            self.pictures.clear()
            print("(the conversation is empty)")
        elif name == "/system":
            self.system = rest or None
            print("(system message set)" if rest else "(no system message)")
        elif name == "/image" and rest:
            self._show(rest)
        elif name == "/image":
            print(f"({len(self.pictures)} pictures go with the next message; /image PATH adds one)")
        elif name == "/think" and rest in ("on", "off"):
            self.thinking = rest == "on"
            print(f"(thinking {rest})")
        elif name == "/think":
            print(f"(thinking is {'on' if self.thinking else 'off'}; /think on or /think off)")
        else:
            print(f"(no command {name}; /help lists them, a line that should begin with / takes a space before it)")
        sys.stdout.flush()
        return True

    def _show(self, path: str) -> None:
        try:
            self.pictures.append(image_part(path))
        except RequestError as error:
            self.exit_code = error.exit_code
            print(f"benthic: {error}", file=sys.stderr)
        else:
            print(f"({path} goes with the next message)")

    def _answer(self, text: str) -> None:
        """Stream the answer to one turn. A turn that nothing came back to is not kept; its pictures wait for the next
        one, unless they may be why."""
        pictures, self.pictures = self.pictures, []
        self.turns.append(user_turn(text, pictures))
        shown = _Shown(self._dim)
        began = perf_counter()
        try:
            with closing(cast(Any, self._stream())) as stream:
                for piece in stream:
                    shown.take(piece.reasoning, piece.text, len(piece.token_ids))
                    if piece.error is not None:
                        raise piece.error
        except KeyboardInterrupt:
            shown.end()
            if shown.turn() is None:
                self.pictures = pictures
            print("(stopped)", flush=True)
        except RequestError as error:
            shown.end()
            self.exit_code = error.exit_code
            print(f"benthic: {error} (/reset forgets the conversation)", file=sys.stderr)
        except BenthicError:
            shown.end()
            raise
        else:
            shown.end()
            if self._dim:
                print(f"{_DIM}{speed(shown.tokens, perf_counter() - began)}{_PLAIN}", file=sys.stderr)
        turn = shown.turn()
        if turn is None:
            self.turns.pop()
        else:
            self.turns.append(turn)

    def _stream(self) -> Iterator[Any]:
        system: list[Mapping[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        effort = self.effort if self.thinking else None
        return self.engine.chat([*system, *self.turns], self.params, stream=True, thinking=self.thinking, effort=effort)


class _Shown:
    """Writes an answer as it comes. On a terminal thinking is dim; elsewhere it stands between two marker lines."""

    def __init__(self, dim: bool):
        self._dim = dim
        self._open, self._close = (_DIM, f"{_PLAIN}\n\n") if dim else ("<think>\n", "\n</think>\n")
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._thinking = False  # is an opening mark still open
        self._fresh = True  # nothing stands in the line yet
        self.tokens = 0

    def take(self, reasoning: str, content: str, tokens: int) -> None:
        self.tokens += tokens
        if reasoning:
            self._reasoning.append(reasoning)
            self._write(("" if self._thinking else self._open), reasoning)
            self._thinking = True
        if content:
            self._content.append(content)
            self._write(self._close if self._thinking else "", content)
            self._thinking = False

    def end(self) -> None:
        """Close what is open and leave the line."""
        if self._thinking:
            self._write(self._close.rstrip("\n") if self._dim else self._close, "")
            self._thinking = False
        if not self._fresh:
            self._write("\n", "")

    def turn(self) -> dict[str, Any] | None:
        """The turn for the history; None when nothing came."""
        if not self._reasoning and not self._content:
            return None
        turn = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            turn["reasoning_content"] = "".join(self._reasoning)
        return turn

    def _write(self, mark: str, text: str) -> None:
        written = mark + (printable(text) if self._dim else text)
        if written:
            self._fresh = written.endswith("\n")
            print(written, end="", flush=True)
