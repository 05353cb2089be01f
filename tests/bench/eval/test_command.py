"""`benthic bench eval` as it is called: its report on disk and on the terminal, here and against a server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benthic.cli import main
from benthic.engine.llm import LLM
from benthic.types import SamplingParams
from tests.bench.eval.loopback import Loopback, Wire, chat, complete, serving

QUICK = ["--quick", "--documents", "2", "--tasks", "1", "--cpu.threads", "1"]


def bench(tmp_path: Path, *words: str) -> int:
    return main.main(["bench", "eval", *words, "--out", str(tmp_path / "results")])


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = (tmp_path / "results").rglob("*.json")
    return path, json.loads(path.read_text())


def test_the_list_names_every_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][:2] == ["bits", "stories"]
    assert {line.split()[0] for line in lines} >= {"needle", "tools", "ladder", "experts", "drafts", "quantisation"}
    assert not (tmp_path / "results").exists()


def test_a_report_as_json_and_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--suite", "bits,copy", *QUICK, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    path, kept = saved(tmp_path)
    assert path.name == "eval-minnow-reference-bits-copy-quick.json"
    assert kept == found
    assert found["bench"] == "eval"
    assert found["settings"]["model"] == "minnow"
    assert found["suites"]["bits"]["documents"] == 2
    (bits, *_) = found["measures"]
    assert bits["name"] == "bits per byte"
    assert 0.1 < bits["value"] < 2
    assert bits["verdict"] in ("met", "missed")


def test_a_table_for_a_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--suite", "bits", *QUICK, "--no-save", "--name", "x") == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    assert "<= 0.62" in out
    assert "2 of 256 documents" in out
    assert not (tmp_path / "results").exists()


def test_an_unknown_suite_is_told_with_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--suite", "bytes") == 2
    assert "no suites bytes; there are bits" in capsys.readouterr().err


def test_own_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"kind": "qa", "prompt": "What is 2 + 2?", "response": "4, that is four."})
    (tmp_path / "own.jsonl").write_text(line + "\n")
    words = ["--suite", "bits,stories,copy", *QUICK, "--data", str(tmp_path / "own.jsonl"), "--json", "--no-save"]
    assert bench(tmp_path, *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["suites"]["bits"]["documents"] == 1
    assert found["suites"]["stories"]["skipped"] == "the documents hold no story prompts"
    assert "skills need" in found["suites"]["copy"]["skipped"]


# ---- against a server ------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted() -> Iterator[Loopback]:
    with serving(lambda path, body: complete(body) if path == "completions" else chat("no idea")) as server:
        yield server


def test_a_server_is_asked_and_its_key_is_kept_to_it(
    tmp_path: Path, scripted: Loopback, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    monkeypatch.setattr("sys.argv", ["benthic", "bench", "eval", "--api-key", "s3cret"])
    words = ["--base-url", scripted.url, "--api-key-env", "SOME_KEY", "--suite", "bits,copy,experts", *QUICK]
    assert bench(tmp_path, *words) == 0
    path, found = saved(tmp_path)
    assert path.name == "eval-scripted-at-127.0.0.1-bits-copy-experts-quick.json"
    assert "s3cret" not in path.read_text()
    assert all(headers["authorization"] == "Bearer s3cret" for _, _, headers in scripted.asked)
    assert found["suites"]["experts"]["skipped"].startswith("it looks inside the model")
    assert found["suites"]["copy"]["answered"] > 0
    assert "skipped: it looks inside" in capsys.readouterr().out


def test_a_key_that_is_not_there(tmp_path: Path, scripted: Loopback, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--base-url", scripted.url, "--api-key-env", "NO_SUCH_KEY_HERE") == 2
    assert "NO_SUCH_KEY_HERE" in capsys.readouterr().err


def test_a_run_that_ends_early_says_where_its_answers_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "answers.jsonl"
    left = [complete] * 5

    def script(path: str, body: dict[str, Any]) -> Any:
        return left.pop()(body) if left else Wire({"error": {"message": "expired"}}, 401)

    with serving(script) as server:
        words = ["--base-url", server.url, "--suite", "bits", "--quick", "--concurrency", "1"]
        assert bench(tmp_path, *words, "--resume", str(answers)) == 2
        err = capsys.readouterr().err
        assert f"answers so far are kept in {answers}; the same command goes on from there" in err
        assert "refuses: completions: HTTP 401: expired" in err
        kept = len(answers.read_text().splitlines()) - 1
        assert kept == 3, "two requests went into the check of the log-probabilities"
        left += [complete] * 99
        before = len(server.asked)
        assert bench(tmp_path, *words, "--resume", str(answers)) == 0
        assert len(server.asked) - before == 24 - kept + 2


def test_the_same_model_behind_a_server_gives_the_same_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine answers both ways, text scored as ids: equal to the last digit but for sums of float32 prompts."""
    suites = ["--suite", "bits,copy,memory", *QUICK, "--tasks", "2", "--json", "--no-save"]
    with LLM("minnow", numerics="reference", cpu__threads=1) as llm:

        def script(path: str, body: dict[str, Any]) -> Any:
            if path == "completions":
                params = SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], prompt_logprobs=0, logprobs=0)
                (done,) = llm.generate([body["prompt"]], params, progress=False)
                said = [
                    entry.logprob for entry in (*(done.prompt_logprobs if body.get("echo") else ()), *done.logprobs)
                ]
                words = [done.text] if not body.get("echo") else []
                told = {"tokens": [*words, *[""] * (len(said) - len(words))], "token_logprobs": said}
                if body.get("echo"):
                    told = {"tokens": [""] * (len(said) + 1), "token_logprobs": [None, *said]}
                return {
                    "choices": [{"text": done.text, "logprobs": {**told, "text_offset": [0] * len(told["tokens"])}}]
                }
            params = SamplingParams(temperature=0.0, max_tokens=body["max_tokens"])
            done = llm.chat(body["messages"], params, thinking=body["thinking"]["type"] == "enabled")
            assert done.message is not None
            return chat(**{k: v for k, v in done.message.as_dict().items() if k != "role"})

        with serving(script) as server:
            words = ["--base-url", server.url, "--concurrency", "1", "--tokenizer", "minnow"]
            assert bench(tmp_path, *words, *suites) == 0
    there = json.loads(capsys.readouterr().out)
    assert bench(tmp_path, *suites) == 0
    here = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in here["measures"]] == [row["name"] for row in there["measures"]]
    assert len(here["measures"]) >= 6
    for mine, theirs in zip(here["measures"], there["measures"], strict=True):
        assert mine["value"] == pytest.approx(theirs["value"], rel=1e-4), mine["name"]
