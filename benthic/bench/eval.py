"""What a model's text is worth, measured as a user would: bits per byte of held-out responses, and sampled stories.

Everything runs through `engine.llm.LLM` on the checkpoint as it is packed. A response is scored as the continuation of
its rendered prompt; its end token counts as a token and has no bytes.
"""

import json
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benthic.bench import report
from benthic.bench.report import Measure
from benthic.config import Config
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.skills.loops import loops
from benthic.text.prompt import ChatEncoder
from benthic.types import SamplingParams

STORY_TOKENS = 300
STORY_TEMPERATURE = 0.8
_GROUP = 64  # documents handed to the engine at a time


@dataclass(frozen=True, slots=True)
class Options:
    """data: JSON lines of {"kind", "prompt", "response"}, plain or .xz; documents: of it, from the start; None: all."""

    data: Path
    documents: int | None
    stories: int
    seed: int


@dataclass(slots=True)
class Bits:
    documents: int = 0
    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    @property
    def per_byte(self) -> float:
        return self.nats / math.log(2) / max(self.bytes, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / max(self.tokens, 1))


def read_documents(path: Path, limit: int | None = None) -> Iterator[dict[str, str]]:
    """Documents of a corpus file. Raises BenchError naming the file, or the line that is not a document."""
    opened = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, limit), 1):
                try:
                    document = json.loads(line)
                    yield {key: str(document[key]) for key in ("kind", "prompt", "response")}
                except (ValueError, KeyError, TypeError) as error:
                    raise BenchError(
                        "text", f"{path}, line {number} is no JSON object with kind, prompt and response: {error!r}"
                    ) from error
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise BenchError("text", f"cannot read the documents {path}: {error}") from error


def bits(llm: LLM, documents: Iterator[dict[str, str]], progress: Callable[[int], None]) -> Bits:
    """Score the responses. progress is called with the number of documents done."""
    tokenizer = _tokenizer(llm)
    encoder, total = ChatEncoder(tokenizer), Bits()
    only_prompt = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    while group := list(islice(documents, _GROUP)):
        rows: list[list[int]] = []
        heads: list[int] = []
        for document in group:
            head = encoder.encode([{"role": "user", "content": document["prompt"]}]).ids
            rows.append([*head, *tokenizer.encode(document["response"], bos=False), tokenizer.eos_id])
            heads.append(len(head))
            total.bytes += len(document["response"].encode())
        for head, done in zip(heads, llm.generate(rows, only_prompt, progress=False), strict=True):
            if done.error is not None:
                raise done.error
            scored = done.prompt_logprobs[head - 1 :]  # entry i is the token at position i + 1
            total.nats -= math.fsum(entry.logprob for entry in scored)
            total.tokens += len(scored)
        total.documents += len(group)
        progress(total.documents)
    return total


def stories(llm: LLM, prompts: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """One sample a prompt at STORY_TEMPERATURE, as it comes."""
    encoder = ChatEncoder(_tokenizer(llm))
    params = [
        SamplingParams(temperature=STORY_TEMPERATURE, max_tokens=STORY_TOKENS, seed=seed + i)
        for i in range(len(prompts))
    ]
    rows = [encoder.encode([{"role": "user", "content": prompt}]).ids for prompt in prompts]
    return [
        {
            "prompt": prompt,
            "seed": seed + i,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "tokens": len(done.token_ids),
            "loops": loops(done.token_ids),
        }
        for i, (prompt, done) in enumerate(zip(prompts, llm.generate(rows, params, progress=False), strict=True))
    ]


def run(settings: Config, options: Options, progress: Callable[[str, int], None]) -> dict[str, Any]:
    """The whole report, ready for `report.save`. progress is called with a stage and how far it is."""
    found = report.header("eval", options.seed, {"model": str(settings.model), "numerics": settings.numerics})
    with LLM(config=settings) as llm:
        scored = bits(llm, read_documents(options.data, options.documents), lambda n: progress("documents", n))
        prompts = [d["prompt"] for d in read_documents(options.data) if d["kind"] == "story"][: options.stories]
        told = stories(llm, prompts, options.seed)
        progress("stories", len(told))
    measures: list[Measure] = [
        {"name": "bits per byte", "value": scored.per_byte, "unit": "bits/byte", "target": 0.68, "better": "less"},
        {"name": "perplexity", "value": scored.perplexity, "unit": "per token"},
    ]
    if told:
        looping = sum(story["loops"] for story in told) / len(told)
        measures.append({"name": "stories that loop", "value": looping, "unit": "share"})
    return found | {
        "versions": report.versions(),
        "documents": scored.documents,
        "tokens": scored.tokens,
        "bytes": scored.bytes,
        "measures": measures,
        "stories": told,
    }


def _tokenizer(llm: LLM) -> Any:
    if llm.tokenizer is None:
        raise BenchError("text", f"{llm.path} has no tokenizer.json")
    return llm.tokenizer
