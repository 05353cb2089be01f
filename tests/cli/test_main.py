"""The command's frame: dispatch, exit codes, and one line for every error."""

import argparse
import json
import os
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import benthic
from benthic import config
from benthic.cli import main as cli
from benthic.errors import EngineClosed, PromptTooLong

BENTHIC = [sys.executable, "-m", "benthic.cli.main"]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch):
    """Add a verb whose run() does what the test says."""

    def add(run: Any, settings: bool = False) -> None:
        module = ModuleType("benthic.cli.probe")

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--json", action="store_true")
            if settings:
                config.add_arguments(parser)

        module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "benthic.cli.probe", module)
        monkeypatch.setitem(cli.VERBS, "probe", "do what the test says")

    return add


def fail(error: BaseException) -> Any:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_the_verb_returns_the_exit_code(verb) -> None:
    verb(lambda args: 7)
    assert cli.main(["probe"]) == 7


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_has_its_file_and_help(name: str) -> None:
    done = subprocess.run([*BENTHIC, name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"benthic {name}" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"benthic {benthic.__version__}\n"


@pytest.mark.parametrize("argv", [["nothing"], ["doctor", "--nothing"], ["--nothing"]])
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "nothing" in capsys.readouterr().err


def test_no_verb_shows_the_help_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "generate" in shown.err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PromptTooLong(12, 10), 2, "benthic: prompt is 12 tokens, 2 over the limit of 10"),
        (EngineClosed(), 1, "benthic: the engine is closed"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 1, "a.txt"),
        (ValueError("two\nlines"), 1, "ValueError: two lines (this is a fault in Benthic"),
    ],
)
def test_an_error_is_one_line(verb, capsys: pytest.CaptureFixture[str], error: Exception, code: int, text: str) -> None:
    verb(fail(error))
    assert cli.main(["probe"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("argv", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback(verb, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    verb(fail(ValueError("broken")))
    assert cli.main(argv) == 1
    assert "Traceback" in capsys.readouterr().err


def test_with_json_an_error_is_an_object(verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(fail(PromptTooLong(12, 10)))
    assert cli.main(["probe", "--json"]) == 2
    body = json.loads(capsys.readouterr().err)
    assert body["error"]["code"] == "prompt_too_long"
    assert body["error"]["retryable"] is False
    assert "over the limit" in body["error"]["message"]


def test_a_bad_setting_stops_before_the_verb_runs(
    verb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb(fail(AssertionError("must not run")), settings=True)
    assert cli.main(["probe", "--cache.blocks", "-3"]) == 2
    assert "cache.blocks is -3" in capsys.readouterr().err
    monkeypatch.setenv("BENTHIC_CACHE__BLOKCS", "3")
    assert cli.main(["probe"]) == 2
    assert "did you mean BENTHIC_CACHE__BLOCKS?" in capsys.readouterr().err


def test_interrupted_is_130(verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(fail(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "benthic: interrupted\n"


PROBE = """
import sys, time, types
from benthic.cli import main as cli
probe = types.ModuleType("benthic.cli.probe")
probe.add_arguments = lambda parser: None
def run(args):
    print("started", flush=True)
    {body}
    return 0
probe.run = run
sys.modules["benthic.cli.probe"] = probe
cli.VERBS["probe"] = "probe"
sys.exit(cli.main(["probe"]))
"""


def test_ctrl_c_in_a_real_process() -> None:
    code = PROBE.format(body="time.sleep(30)")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == "benthic: interrupted\n"


@pytest.mark.parametrize(
    "body", ["[print('x' * 100, flush=True) for _ in range(10000)]", "time.sleep(0.3); print('y')"]
)
def test_a_reader_that_goes_away_is_quiet(body: str) -> None:
    """Both while the verb writes, and at the last flush."""
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", PROBE.format(body=body)], stdout=write, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(write)
        with os.fdopen(read) as reader:
            assert reader.readline() == "started\n"
        _, err = process.communicate(timeout=20)
    assert err == ""
    assert process.returncode == 141
