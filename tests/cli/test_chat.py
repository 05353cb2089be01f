"""`benthic chat`: turns, commands, interrupts, and what a pipe and a terminal see."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benthic.cli import chat
from benthic.cli.main import main
from tests.cli.scripted import Buffered, Piece, ScriptedEngine

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[Any]"]
SCRIPTED = [sys.executable, "-m", "tests.cli.scripted", "chat"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    engine = ScriptedEngine()
    monkeypatch.setattr(chat, "open_engine", lambda settings: engine)
    return engine


@pytest.fixture
def say(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def talk(text: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main(["chat", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return talk


def asked(engine: ScriptedEngine) -> list[list[tuple[str, str]]]:
    """Role and content of the messages of every call."""
    return [[(message["role"], message["content"]) for message in messages] for messages, _, _ in engine.asked]


def test_turns_build_a_conversation(engine: ScriptedEngine, say: Any) -> None:
    code, out, err = say("Hi\n\n  \nAnd you?\n", "--temperature", "0", "--max-tokens", "30", "--seed", "4")
    assert (code, out, err) == (0, " answer 0 to Hi\n answer 0 to And you?\n", "")
    first = [("user", "Hi")]
    assert asked(engine) == [first, [*first, ("assistant", " answer 0 to Hi"), ("user", "And you?")]]
    params, options = engine.asked[0][1:]
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, 30, 4)
    assert options == {"stream": True, "thinking": False, "effort": None}
    assert engine.closed == 1


def test_answer_is_shown_as_it_comes(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Buffered()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    seen: list[str] = []
    original = engine.chat

    def watched(*arguments: Any, **options: Any) -> Any:
        for piece in original(*arguments, **options):
            seen.append(shown.flushed)
            yield piece

    monkeypatch.setattr(engine, "chat", watched)
    main(["chat"])
    assert seen == ["", " answer", " answer 0", " answer 0 to", " answer 0 to Hi"]


def test_last_line_without_its_end_counts(engine: ScriptedEngine, say: Any) -> None:
    say("Hi")
    assert asked(engine) == [[("user", "Hi")]]


def test_thinking_stands_apart_and_goes_into_the_history(engine: ScriptedEngine, say: Any) -> None:
    _, out, _ = say("a\n/think off\nb\n/think on\nc\n/think\n", "--think", "--effort", "max")
    think = "<think>\nlet me think\n</think>\n"
    assert out == (
        f"{think} answer 0 to a\n(thinking off)\n answer 0 to b\n"
        f"(thinking on)\n{think} answer 0 to c\n(thinking is on; /think on or /think off)\n"
    )
    assert [options for _, _, options in engine.asked] == [
        {"stream": True, "thinking": thinking, "effort": "max" if thinking else None}
        for thinking in (True, False, True)
    ]
    turn = engine.asked[1][0][1]
    assert turn == {"role": "assistant", "content": " answer 0 to a", "reasoning_content": "let me think"}


def test_system_and_reset(engine: ScriptedEngine, say: Any) -> None:
    _, out, _ = say("a\n/system  Be brief. \nb\n/reset\nc\n/system\nd\n", "--system", "First.")
    history = [("user", "a"), ("assistant", " answer 0 to a")]
    assert asked(engine) == [
        [("system", "First."), ("user", "a")],
        [("system", "Be brief."), *history, ("user", "b")],
        [("system", "Be brief."), ("user", "c")],
        [("user", "c"), ("assistant", " answer 0 to c"), ("user", "d")],
    ]
    assert "(system message set)\n" in out
    assert "(the conversation is empty)\n" in out
    assert "(no system message)\n" in out


def test_commands_that_only_talk(engine: ScriptedEngine, say: Any) -> None:
    _, out, _ = say("/help\n/nope\n/think maybe\n")
    assert chat.HELP in out
    assert "(no command /nope;" in out
    assert "(thinking is off;" in out
    assert engine.asked == []


def test_line_with_a_space_before_the_slash_is_a_turn(engine: ScriptedEngine, say: Any) -> None:
    say(" /exit\n")
    assert asked(engine) == [[("user", " /exit")]]


def test_exit_leaves_at_once(engine: ScriptedEngine, say: Any) -> None:
    code, out, _ = say("/exit\nHi\n")
    assert (code, out, engine.asked) == (0, "", [])


def test_refused_turn_is_not_kept(engine: ScriptedEngine, say: Any) -> None:
    code, out, err = say("a\nlong\nb\n")
    assert code == 2  # something in the pipe failed
    assert err == f"benthic: {err[9:].splitlines()[0]}\n"
    assert "prompt is 100 tokens" in err
    assert "/reset" in err
    assert asked(engine)[-1] == [("user", "a"), ("assistant", " answer 0 to a"), ("user", "b")]
    assert out.endswith(" answer 0 to b\n")


def test_broken_engine_ends_the_conversation(engine: ScriptedEngine, say: Any) -> None:
    code, out, err = say("fail\nb\n")
    assert (code, out) == (1, " answer 0 to fail\n")
    assert "the engine is closed" in err
    assert len(engine.asked) == 1


def test_interrupt_stops_the_answer_and_keeps_what_came(
    engine: ScriptedEngine, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = engine._pieces

    def interrupted(*arguments: Any, **options: Any) -> Any:
        for count, piece in enumerate(pieces(*arguments, **options)):
            if arguments[1].startswith("forever") and count == 3:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(engine, "_pieces", interrupted)
    code, out, err = say("forever\nb\n")
    assert (code, err) == (0, "")
    assert out == "on and on on and on on and on \n(stopped)\n answer 0 to b\n"
    assert asked(engine)[-1] == [("user", "forever"), ("assistant", "on and on " * 3), ("user", "b")]


def test_interrupt_before_the_first_token_drops_the_turn(
    engine: ScriptedEngine, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine.chat

    def interrupted(messages: Any, params: Any, **options: Any) -> Any:
        if messages[-1]["content"] == "a":
            raise KeyboardInterrupt
        return original(messages, params, **options)

    monkeypatch.setattr(engine, "chat", interrupted)
    _, out, _ = say("a\nb\n")
    assert out == "(stopped)\n answer 0 to b\n"
    assert asked(engine) == [[("user", "b")]]


def test_interrupt_while_thinking_closes_the_mark(
    engine: ScriptedEngine, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thinking(*arguments: Any, **options: Any) -> Any:
        yield Piece(0, 0, reasoning="hm", token_ids=(3,))
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_pieces", thinking)
    assert say("a\n", "--think")[1] == "<think>\nhm\n</think>\n(stopped)\n"


# Whole processes


def test_interrupt_of_a_process_that_reads_a_pipe(start: Start) -> None:
    process = start(SCRIPTED, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"forever\nb\n")
    process.stdin.flush()
    assert process.stdout.read(10) == b"on and on "
    process.send_signal(signal.SIGINT)
    rest = b""
    while b"answer 0 to b\n" not in rest:
        rest += os.read(process.stdout.fileno(), 4096)
    assert b"\n(stopped)\n answer 0 to b\n" in rest
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)  # now it waits for a line
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"benthic: interrupted\n")


def test_reader_that_goes_away(start: Start) -> None:
    process = start(SCRIPTED, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"forever\n")
    process.stdin.flush()
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stdin.close()
    process.stderr.close()
    assert process.wait(timeout=20) == 141


class TerminalSession:
    """The command on a pseudo-terminal."""

    def __init__(self, *arguments: str):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [*SCRIPTED, *arguments], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def until(self, text: str) -> str:
        """Everything up to `text`, which must come within 20 seconds."""
        end = time.monotonic() + 20
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
        before, self.seen = (
            self.seen[: self.seen.index(text) + len(text)],
            self.seen[self.seen.index(text) + len(text) :],
        )
        return before

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")

    def interrupt(self) -> None:
        time.sleep(0.5)  # a prompt is written just before the wait for its line; a signal between the two is seen late
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        return self.process.wait(timeout=20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., TerminalSession]]:
    sessions: list[TerminalSession] = []

    def start(*arguments: str) -> TerminalSession:
        sessions.append(TerminalSession(*arguments))
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()


def test_terminal_shows_thinking_dim_and_the_speed(terminal: Callable[..., TerminalSession]) -> None:
    session = terminal("--think")
    assert "/help lists the commands" in session.until("> ")
    session.type("Hi")
    assert "\x1b[2mlet me think\x1b[0m\r\n\r\n answer 0 to Hi\r\n" in session.until("to Hi\r\n\x1b[2m")
    session.until("tokens/s\x1b[0m")
    session.until("> ")
    session.type("/exit")
    assert session.end() == 0


def test_terminal_interrupts(terminal: Callable[..., TerminalSession]) -> None:
    session = terminal()
    session.until("> ")
    session.type("forever")
    session.until("on and on ")
    session.interrupt()
    session.until("(stopped)")
    session.until("> ")
    session.interrupt()
    session.until("(Ctrl-C again or /exit leaves)")
    session.until("> ")
    session.type("b")
    session.until("answer 0 to b")
    session.until("> ")
    session.interrupt()  # the turn between them makes this one the first again
    session.until("leaves)")
    session.until("> ")
    session.interrupt()
    session.until("benthic: interrupted")
    assert session.end() == 130


def test_end_of_input_on_a_terminal_leaves(terminal: Callable[..., TerminalSession]) -> None:
    session = terminal()
    session.until("> ")
    os.write(session.master, b"\x04")
    assert session.end() == 0
