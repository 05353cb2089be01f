"""`benthic generate`: prompts from everywhere, text and JSON out, endings and exit codes."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benthic.cli import generate
from benthic.cli.main import main
from benthic.types import SamplingParams
from tests.cli import scripted
from tests.cli.scripted import ScriptedEngine

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[Any]"]
SCRIPTED = [sys.executable, "-m", "tests.cli.scripted"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    engine = ScriptedEngine()
    monkeypatch.setattr(generate, "open_engine", lambda settings: engine)
    return engine


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["generate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# Text


def test_prompt_is_continued_as_plain_text(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--prompt", "Once", "--max-tokens", "60", "--temperature", "0", "--seed", "3")
    assert (code, out) == (0, "Once answer 0 to Once\n")
    assert "tokens in" in err
    assert "tokens/s" in err
    assert err.startswith("4 tokens ")
    prompt, params, _ = engine.asked[0]
    assert prompt == "Once"
    assert (params.max_tokens, params.temperature, params.seed, params.n) == (60, 0.0, 3, 1)
    assert engine.closed == 1


def test_no_echo_leaves_the_prompt_out(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--prompt", "Once", "--no-echo")[1] == " answer 0 to Once\n"


def test_several_prompts_and_choices_stand_in_order(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--prompt", "a", "--prompt", "b", "--n", "2")
    blocks = [
        f"--- prompt {i + 1} of 2, choice {choice + 1} of 2\n{name} answer {choice} to {name}\n"
        for i, name in enumerate("ab")
        for choice in range(2)
    ]
    assert out == "\n".join(blocks)


def test_chat_answers_a_turn(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--chat", "--system", "Be brief.", "--think", "--effort", "low", "--prompt", "Hi")
    assert (code, out) == (0, "<think>\nlet me think\n</think>\n answer 0 to Hi\n")
    messages, _, options = engine.asked[0]
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert options == {"stream": True, "thinking": True, "effort": "low"}


def test_text_is_shown_as_it_comes(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = scripted.Buffered()
    monkeypatch.setattr(sys, "stdout", shown)
    seen: list[str] = []
    original = engine.generate

    def watched(*arguments: Any, **options: Any) -> Any:
        for piece in original(*arguments, **options):
            seen.append(shown.flushed)
            yield piece

    monkeypatch.setattr(engine, "generate", watched)
    main(["generate", "--prompt", "Once"])
    assert seen == ["Once", "Once answer", "Once answer 0", "Once answer 0 to", "Once answer 0 to Once"]


def test_terminal_gets_no_control_characters(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    main(["generate", "--prompt", "a\x1b[31m\x9b\x07\tb"])
    assert terminal.getvalue() == "a\ufffd[31m\ufffd\ufffd\tb answer 0 to a\ufffd[31m\ufffd\ufffd\tb\n"


def test_pipe_gets_the_text_unchanged(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--prompt", "a\x1bb", "--no-echo")[1] == " answer 0 to a\x1bb\n"


# JSON


def test_json_has_one_object_for_each_choice(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--json", "--prompt", "a", "--prompt", "ü", "--n", "2")
    found = objects(out)
    assert (code, err) == (0, "")
    assert [(body["index"], body["choice"]) for body in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[3] == {
        "index": 1,
        "choice": 1,
        "prompt": "ü",
        "text": " answer 1 to ü",
        "token_ids": [7, 7, 7, 7],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "total_tokens": 8,
            "cached_tokens": 0,
            "miss": None,
        },
        "timing": {"ttft_seconds": 0.25, "total_seconds": 1.5, "tpot_seconds": 0.125},
    }
    assert "ü" in out


def test_json_of_a_conversation_has_its_message(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    body = objects(run(capsys, "--json", "--chat", "--think", "--prompt", "Hi")[1])[0]
    assert body["message"] == {
        "role": "assistant",
        "content": " answer 0 to Hi",
        "reasoning_content": "let me think",
    }
    assert "prompt" not in body


@pytest.mark.parametrize(("prompts", "shown"), [(7, False), (8, True)])
def test_long_batch_into_a_file_shows_a_bar_on_the_terminal(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, prompts: int, shown: bool
) -> None:
    out, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["generate", "--json", *["--prompt", "a"] * prompts]) == 0
    assert ("8/8" in terminal.getvalue()) == shown
    assert len(objects(out.getvalue())) == prompts
    terminal.truncate(0)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["generate", "--json", *["--prompt", "a"] * prompts]) == 0
    assert "prompt" not in terminal.getvalue()


# Where prompts come from


def test_text_file_holds_a_prompt_a_line(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffone\r\n\n  two \nthree".encode())
    code, out, _ = run(capsys, "--json", "--prompt", "zero", str(tmp_path / "p.txt"))
    assert code == 0
    assert [body["prompt"] for body in objects(out)] == ["zero", "one", "  two ", "three"]


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_json_lines(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    lines = [
        {"prompt": "a", "id": "x1", "max_tokens": 7, "stop": "end", "note": 1},
        {"messages": [{"role": "user", "content": "b"}], "logit_bias": {"5": -1}, "stop_ids": [3]},
        {"prompt": "c", "stop": ["u", "v"], "seed": 9},
    ]
    (tmp_path / name).write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    code, out, _ = run(capsys, "--json", "--temperature", "0.5", str(tmp_path / name))
    found = objects(out)
    assert code == 0
    assert [body.get("id") for body in found] == ["x1", None, None]
    assert [body.get("prompt") for body in found] == ["a", None, "c"]
    asked = {str(what): params for what, params, _ in engine.asked}
    assert asked["a"] == SamplingParams(max_tokens=7, stop=("end",), temperature=0.5)
    assert asked["c"] == SamplingParams(stop=("u", "v"), seed=9, temperature=0.5)
    chat = next(params for what, params, _ in engine.asked if isinstance(what, list))
    assert chat == SamplingParams(logit_bias=((5, -1),), stop_ids=(3,), temperature=0.5)


def test_name_alone_says_json_lines(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('  {"prompt": "a"}\n')
    assert objects(run(capsys, "--json", str(tmp_path / "p.jsonl"))[1])[0]["prompt"] == "a"


def test_input_format_can_be_said(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('{"prompt": "a"}\n')
    _, out, _ = run(capsys, "--json", "--input-format", "text", str(tmp_path / "p.txt"))
    assert objects(out)[0]["prompt"] == '{"prompt": "a"}'


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    stdin(monkeypatch, b"one\ntwo\n")
    assert [body["prompt"] for body in objects(run(capsys, "--json", *arguments)[1])] == ["one", "two"]


# Wrong input: one line, exit code 2, nothing runs


def refused(capsys: pytest.CaptureFixture[str], engine: ScriptedEngine, *arguments: str) -> str:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("benthic: ")
    assert engine.asked == []
    return err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{bad", "not valid JSON"),
        ("[1]", "want an object"),
        ("{}", "exactly one of prompt and messages"),
        ('{"prompt": "a", "messages": []}', "exactly one of prompt and messages"),
        ('{"prompt": 3}', "want text"),
        ('{"messages": "hi"}', "want a list of messages"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature is 'hot'"),
        ('{"prompt": "a", "top_p": 2}', "top_p is 2"),
        ('{"prompt": "a", "stop": [1]}', "stop[0] is 1"),
        ('{"prompt": "a", "max_tokens": null}', "max_tokens is None"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        ('{"prompt": "a", "logit_bias": 4}', "logit_bias"),
        ('{"prompt": "a", "stop_ids": 4}', "stop_ids"),
    ],
)
def test_bad_json_line_is_named(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, says: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    err = refused(capsys, engine, str(path))
    assert f"{path}, line 3" in err
    assert says in err


def test_missing_file(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in refused(capsys, engine, str(tmp_path / "absent.txt"))
    assert "directory" in refused(capsys, engine, str(tmp_path))


def test_file_that_is_not_text(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"fine\n\xff\xfe\n")
    assert "line 2 is not UTF-8" in refused(capsys, engine, str(tmp_path / "p.txt"))


def test_nothing_to_do(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, b"\n  \n")
    assert "at least one prompt in standard input" in refused(capsys, engine)
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "--prompt TEXT, a FILE" in refused(capsys, engine)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--n", "129"], "n is 129"),
        (["--stop", ""], "stop[0]"),
        (["--system", "x"], "--chat"),
        (["--think"], "--chat"),
        (["--numerics", "guess"], "numerics"),
    ],
)
def test_bad_option(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in refused(capsys, engine, "--prompt", "a", *arguments)


def test_refused_prompt_stops_the_run_before_it_starts(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--json", "--prompt", "a", "--prompt", "long")
    assert (code, out) == (2, "")
    assert json.loads(err)["error"]["code"] == "prompt_too_long"


def test_unknown_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "--model", str(tmp_path / "absent"), "--prompt", "a")
    assert (code, out) == (2, "")
    assert "no model" in err
    assert err.count("\n") == 1


# On the way


def test_error_of_one_prompt_leaves_the_others(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--prompt", "fail", "--prompt", "b")
    assert code == 1
    assert "b answer 0 to b" in out
    assert "benthic: prompt 1: the engine is closed" in err
    code, out, _ = run(capsys, "--json", "--prompt", "fail", "--prompt", "b")
    found = objects(out)
    assert code == 1
    assert found[0]["error"]["code"] == "engine_closed"
    assert found[1]["text"] == " answer 0 to b"


def test_interrupt_ends_with_130(start: Start) -> None:
    process = start(
        [*SCRIPTED, "generate", "--prompt", "forever"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(20) == b"foreveron and on on "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err == b"benthic: interrupted\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_reader_that_goes_away_ends_with_141(form: list[str], tmp_path: Path, start: Start) -> None:
    (tmp_path / "many.txt").write_text("a prompt\n" * 20000)
    process = start(
        [*SCRIPTED, "generate", *form, str(tmp_path / "many.txt")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert err == b""


def test_scripted_pieces_have_the_fields_of_the_engine() -> None:
    from benthic.engine import llm

    for ours, theirs in ((scripted.Piece, llm.Piece), (scripted.Choice, llm.Choice)):
        assert {field.name for field in fields(ours)} <= {field.name for field in fields(theirs)}
    assert {field.name for field in fields(scripted.Completion)} <= {field.name for field in fields(llm.Completion)}
    assert scripted.Timing._fields == llm.Timing._fields


def test_real_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The whole way, in a process of its own: text, JSON lines and a conversation beside each other, one seed."""
    from benthic.testing.checkpoints import make_tiny
    from benthic.testing.tokenizers import build_tokenizer, write_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    classes = build_tokenizer(tmp_path_factory.mktemp("tokenizer"), 4096).engram_classes()
    model = make_tiny(folder / "tiny", engram_compressed_vocab_size=int(classes.max()) + 1)
    write_tokenizer(model, 4096)
    command = [sys.executable, "-m", "benthic.cli.main", "generate", "--model", str(model), "--cpu.threads", "1"]
    command += ["--max-tokens", "4", "--json", "--seed", "5"]
    lines = "Once upon a time\n" + json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n"
    (folder / "p.txt").write_text(lines.splitlines()[0] + "\n")
    (folder / "c.jsonl").write_text(lines.splitlines()[1] + "\n")
    started = time.perf_counter()
    done = subprocess.run(
        [*command, str(folder / "p.txt"), str(folder / "c.jsonl"), "--prompt", "Once upon a time"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second, chat = objects(done.stdout)
    assert first["prompt"] == second["prompt"] == "Once upon a time"
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] > 1
    assert chat["message"]["role"] == "assistant"
    for body in (first, second, chat):
        assert body["finish_reason"] in ("length", "stop")
        assert 1 <= len(body["token_ids"]) == body["usage"]["completion_tokens"] <= 4
        timing = body["timing"]
        assert 0 < timing["ttft_seconds"] <= timing["total_seconds"] < time.perf_counter() - started
