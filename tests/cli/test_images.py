"""`--image` and `/image`: files become parts of a user's turn; faults are told by the file's name."""

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benthic.cli import chat, generate
from benthic.cli.main import main
from benthic.testing.checkpoints import make_tiny
from benthic.testing.tokenizers import build_tokenizer, write_tokenizer
from tests.cli.scripted import ScriptedEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    engine = ScriptedEngine()
    for command in (chat, generate):
        monkeypatch.setattr(command, "open_engine", lambda settings: engine)
    return engine


@pytest.fixture
def red(tmp_path: Path) -> str:
    path = tmp_path / "red.png"
    Image.new("RGB", (84, 84), "red").save(path)
    return str(path)


@pytest.fixture
def blue(tmp_path: Path) -> str:
    path = tmp_path / "blue.unknown"
    Image.new("RGB", (84, 84), "blue").save(path, "JPEG")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def say(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(capsys, "chat", *more)


def part(path: str, kind: str) -> dict[str, Any]:
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def turn(text: str, *pictures: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}] if pictures else text}


Capture = pytest.CaptureFixture[str]


def test_generate_shows_pictures_with_every_prompt(
    engine: ScriptedEngine, capsys: Capture, red: str, blue: str, tmp_path: Path
) -> None:
    lines = tmp_path / "more.jsonl"
    lines.write_text('{"prompt": "Two"}\n{"messages": [{"role": "user", "content": "Three"}]}\n')
    code, out, _ = run(capsys, "generate", "--chat", "--image", red, "--image", blue, "--prompt", "One", str(lines))
    assert code == 0
    assert "answer 0 to One" in out
    pictures = part(red, "png"), part(blue, "jpeg")
    assert [messages for messages, _, _ in engine.asked] == [
        [turn("One", *pictures)],
        [turn("Two", *pictures)],
        [turn("Three")],
    ]


def test_generate_without_chat_continues_text_alone(engine: ScriptedEngine, capsys: Capture, red: str) -> None:
    code, _, err = run(capsys, "generate", "--image", red, "--prompt", "One")
    assert code == 2
    assert "--image" in err
    assert "--chat" in err
    assert not engine.asked


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "0 bytes"), (b"hello", "none of PNG"), (b"\x89PNG\r\n\x1a\n", "whole")],
)
def test_a_file_that_is_no_picture(
    engine: ScriptedEngine, capsys: Capture, tmp_path: Path, command: str, content: bytes | None, says: str
) -> None:
    path = tmp_path / "thing.png"
    if content is not None:
        path.write_bytes(content)
    code, _, err = run(
        capsys, command, *(["--chat", "--prompt", "x"] if command == "generate" else []), "--image", str(path)
    )
    assert code == 2
    assert str(path) in err
    assert says in err
    assert engine.closed == 0, "it is told before the model is loaded"


def test_chat_shows_pictures_with_the_first_turn(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: Capture, red: str
) -> None:
    code, _, err = say("What?\nSure?\n", monkeypatch, capsys, "--image", red)
    assert (code, err) == (0, "")
    first = turn("What?", part(red, "png"))
    assert engine.asked[0][0] == [first]
    assert engine.asked[1][0] == [first, {"role": "assistant", "content": " answer 0 to What?"}, turn("Sure?")]


def test_chat_takes_pictures_on_the_way(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: Capture, red: str, blue: str
) -> None:
    code, out, err = say(f"Hi\n/image {red}\n/image {blue}\n/image\nBoth?\nNone?\n", monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert f"({blue} goes with the next message)" in out
    assert "(2 pictures go with the next message" in out
    asked = [messages[-1] for messages, _, _ in engine.asked]
    assert asked == [turn("Hi"), turn("Both?", part(red, "png"), part(blue, "jpeg")), turn("None?")]


def test_chat_goes_on_after_a_bad_picture(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    code, _, err = say(f"/image {tmp_path / 'none.png'}\nHi\n", monkeypatch, capsys)
    assert code == 2
    assert "none.png: No such file" in err
    assert engine.asked[0][0] == [turn("Hi")]


def test_reset_forgets_pictures(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: Capture, red: str
) -> None:
    say(f"/image {red}\n/reset\nHi\n", monkeypatch, capsys)
    assert engine.asked[0][0] == [turn("Hi")]


def test_a_refused_turn_takes_its_pictures_along(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: Capture, red: str
) -> None:
    say(f"/image {red}\nlong\nHi\n", monkeypatch, capsys)
    assert [messages for messages, _, _ in engine.asked] == [[turn("long", part(red, "png"))], [turn("Hi")]]


def test_real_engine(tmp_path: Path, capsys: Capture, red: str) -> None:
    """Span tokens are prompt tokens; the model is told of the picture."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    classes = build_tokenizer(scratch, 4096).engram_classes()
    model = make_tiny(tmp_path / "tiny", engram_compressed_vocab_size=int(classes.max()) + 1)
    write_tokenizer(model, 4096)
    command = [
        "generate",
        "--model",
        str(model),
        "--cpu.threads",
        "1",
        "--max-tokens",
        "3",
        "--json",
        "--temperature",
        "0",
    ]
    found = []
    for pictures in ([], ["--image", red]):
        code, out, err = run(capsys, *command, "--chat", "--prompt", "Hi", *pictures)
        assert code == 0, err
        found.append(json.loads(out)["usage"])
    plain, shown = found
    between = len(build_tokenizer(scratch, 4096).encode("\n\n", bos=False))
    assert shown["prompt_tokens"] == plain["prompt_tokens"] + 8 + between
    assert shown["total_tokens"] == shown["prompt_tokens"] + shown["completion_tokens"]


def test_an_interrupt_before_the_answer_keeps_the_pictures(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: Capture, red: str
) -> None:
    answers, calls = engine.chat, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return answers(*arguments, **options)

    monkeypatch.setattr(engine, "chat", interrupted)
    code, out, _ = say(f"/image {red}\nWhat?\nAgain\n", monkeypatch, capsys)
    assert code == 0
    assert "(stopped)" in out
    assert [messages for messages, _, _ in engine.asked] == [[turn("Again", part(red, "png"))]]
