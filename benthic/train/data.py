"""From text to training rows: read the corpus, render through the official encoding, filter loops, write token files.

A data folder holds the tokenizer, the completed model config, compressed token files by part and `data.json`. A
token file is little-endian uint16 ids, xz; every document begins with BOS. Loss goes to what stands between `</think>`
and EOS, EOS included. Rendering needs the deepseek-recipe package; reading a data folder does not.
"""

import json
import lzma
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benthic.errors import BadTrainingData
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.skills.base import SKILLS, Material, Split, Task
from benthic.skills.loops import looping
from benthic.text.tokenizer import FILE_NAME, Tokenizer
from benthic.train import tokenizer_bpe

Ids = NDArray[np.uint16]

MANIFEST = "data.json"
FORMAT = 1
MAX_VOCAB = 1 << 16  # ids are stored as uint16
NEEDLE_LADDER = (120, 270, 520, 930)  # tokens of the held-out needle prompts


class Pair(NamedTuple):
    kind: str
    prompt: str
    response: str


def read_pairs(path: Path) -> Iterator[Pair]:
    """One corpus file, `{"kind", "prompt", "response"}` a line, xz. Raises BadTrainingData."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    pair = Pair(row["kind"], row["prompt"], row["response"])
                    "".join(pair).encode()  # strings all three, and no half of a surrogate pair
                except (ValueError, KeyError, TypeError) as error:
                    want = 'an object with the strings "kind", "prompt" and "response"'
                    detail = f"{type(error).__name__}: {error}"
                    raise BadTrainingData(path, f"line {number} is no corpus line ({detail}), want {want}") from error
                yield pair
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise BadTrainingData(path, str(error)) from error


def corpus_files(folder: Path) -> tuple[list[Path], Path]:
    """Training files and the validation file of a corpus folder. Raises BadTrainingData."""
    train, valid = sorted(folder.glob("train-*.jsonl.xz")), folder / "valid.jsonl.xz"
    if not train or not valid.is_file():
        raise BadTrainingData(folder, "want train-*.jsonl.xz and valid.jsonl.xz in it")
    return train, valid


def material_of(path: Path) -> Material:
    """What the skills are built from, out of one corpus file. Raises BadTrainingData when it is too little."""
    material = Material.of((pair.prompt, pair.response) for pair in read_pairs(path))
    if material.lacks:
        raise BadTrainingData(path, material.lacks)
    return material


class Renderer:
    """Conversations -> token ids, by deepseek-recipe's V4.1 encoding, so that training and serving share a template."""

    def __init__(self, tokenizer_file: Path):
        import deepseek_recipe as recipe

        self._recipe = recipe
        tokenizer = recipe.Tokenizer.from_file(str(tokenizer_file))
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)

    def ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A whole conversation, non-thinking, up to the end token of its last answer."""
        kinds = {"user": self._recipe.UserMessage, "assistant": self._recipe.AssistantMessage}
        turns: list[Any] = [kinds[message["role"]](message["content"]) for message in messages]
        ids = self._encoding.encode(self._recipe.Conversation(turns, thinking_mode=False))
        return ids[:-2]  # without the header of the next answer that the encoding always opens


def template_texts() -> list[str]:
    """Text that the encoding itself writes (effort line, tools section, response format), without special tokens."""
    import deepseek_recipe as recipe

    encoding = recipe.DeepseekV41Encoding()
    tool = recipe.ToolDefinition(
        "get_weather",
        "Get the weather of a city.",
        {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "name of the city"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    )
    call = recipe.ToolCall("1", "get_weather", '{"city": "Paris", "days": 3}')
    user, answer = recipe.UserMessage("What is the weather in Paris?"), recipe.AssistantMessage("It is sunny.")
    system = recipe.SystemMessage("You are a helpful assistant.")
    called = recipe.AssistantMessage("", "I should look it up.", [call])
    result = recipe.ToolMessage('{"weather": "sunny"}', "1")
    conversations = [
        recipe.Conversation([system, user], thinking_mode=True, reasoning_effort=effort)
        for effort in ("low", "high", "max")
    ]
    conversations += [
        recipe.Conversation([system, user, called, result], thinking_mode=thinking, tools=[tool])
        for thinking in (True, False)
    ]
    conversations += [
        recipe.Conversation([system, user, answer, user], thinking_mode=False, response_format="json_object"),
        recipe.Conversation(
            [user],
            thinking_mode=False,
            response_schema={
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "number"}},
                "required": ["name", "age"],
            },
        ),
    ]
    texts: list[str] = []
    for conversation in conversations:
        rendered = encoding.render_conversation(conversation)
        at = 0
        for start, end in [*rendered.special_ranges, (len(rendered.prompt), len(rendered.prompt))]:
            if rendered.prompt[at:start]:
                texts.append(rendered.prompt[at:start])
            at = end
    return texts


# ---- token files -----------------------------------------------------------------------------------------------------


def write_ids(path: Path, ids: Ids) -> None:
    path.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=6))


def read_ids(path: Path) -> Ids:
    """Raises BadTrainingData."""
    try:
        raw = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise BadTrainingData(path, str(error)) from error
    if len(raw) % 2:
        raise BadTrainingData(path, f"it holds {len(raw)} bytes, want whole uint16 ids")
    return np.frombuffer(raw, dtype="<u2").astype(np.uint16, copy=False)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `data.json` says about a data folder."""

    format: int
    seed: int
    vocab_size: int
    parts: dict[str, list[str]]  # part -> its token files
    tokens: dict[str, int]  # part -> tokens
    documents: dict[str, int]
    looping_dropped: int

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            manifest = cls(**values)
        except FileNotFoundError:
            raise BadTrainingData(path, "no such file; make the folder with `benthic train data`") from None
        except (OSError, ValueError, TypeError) as error:
            raise BadTrainingData(path, f"{error}; make the folder again with `benthic train data`") from error
        if manifest.format != FORMAT:
            raise BadTrainingData(path, f"format {manifest.format}, want {FORMAT}; make the folder again")
        return manifest

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_part(folder: Path, manifest: Manifest, part: str) -> Ids:
    """All ids of one part; its files are decompressed side by side. Raises BadTrainingData."""
    if part not in manifest.parts:
        raise BadTrainingData(folder, f"no part {part!r}; it has {', '.join(manifest.parts)}")
    with ThreadPoolExecutor() as pool:
        ids = np.concatenate(list(pool.map(read_ids, [folder / name for name in manifest.parts[part]])))
    if len(ids) != manifest.tokens[part] or (len(ids) and ids.max() >= manifest.vocab_size):
        raise BadTrainingData(
            folder,
            f"part {part} holds {len(ids)} ids up to {ids.max(initial=0)}, {MANIFEST} says {manifest.tokens[part]} ids "
            f"below {manifest.vocab_size}; make the folder again with `benthic train data`",
        )
    return ids


# ---- rows ------------------------------------------------------------------------------------------------------------


def document_starts(ids: Ids, bos: int) -> NDArray[np.int64]:
    """[N + 1] where each document begins, and the end."""
    return np.append(np.flatnonzero(ids == bos), len(ids)).astype(np.int64)


def pack_rows(ids: Ids, starts: NDArray[np.int64], length: int, pad: int, rng: np.random.Generator) -> Ids:
    """Whole documents into rows [n, length], shuffled; what is left of a row is padding. A longer document is cut.

    Best fit within windows of 8192 documents: each row takes the longest document that still fits, again and again.
    """
    order = rng.permutation(len(starts) - 1)
    sizes = np.minimum(np.diff(starts), length)
    rows: list[Ids] = []
    for begin in range(0, len(order), 8192):
        window = sorted((int(sizes[d]), int(d)) for d in order[begin : begin + 8192])
        while window:
            row = np.full(length, pad, dtype=np.uint16)
            room = length
            while window:
                at = bisect_right(window, (room, len(starts))) - 1
                if at < 0:
                    break
                size, document = window.pop(at)
                row[length - room : length - room + size] = ids[starts[document] : starts[document] + size]
                room -= size
            rows.append(row)
    packed = np.stack(rows)
    return packed[rng.permutation(len(packed))]


def one_per_row(ids: Ids, starts: NDArray[np.int64], length: int, pad: int) -> Ids:
    """Each document in a row of its own [N, length], for evaluation."""
    rows = np.full((len(starts) - 1, length), pad, dtype=np.uint16)
    for row, begin, end in zip(rows, starts[:-1], starts[1:], strict=True):
        size = min(int(end - begin), length)
        row[:size] = ids[begin : begin + size]
    return rows


# ---- making a data folder --------------------------------------------------------------------------------------------

Progress = Callable[[Iterable[Any], str, int | None], Iterable[Any]]


class Collected:
    """Token ids of many documents, kept flat."""

    def __init__(self) -> None:
        self._ids: list[Ids] = []
        self._lengths: list[int] = []

    def add(self, ids: Sequence[int]) -> None:
        self._ids.append(np.asarray(ids, dtype=np.uint16))
        self._lengths.append(len(ids))

    def flat(self) -> tuple[Ids, NDArray[np.int64]]:
        starts = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        return (np.concatenate(self._ids) if self._ids else np.empty(0, np.uint16)), starts


def without_loops(ids: Ids, starts: NDArray[np.int64]) -> tuple[Ids, int, int]:
    """Documents that do not loop, flat; how many are kept and how many dropped."""
    bad = looping(ids, starts)
    keep = np.repeat(~bad, np.diff(starts))
    return ids[keep], int((~bad).sum()), int(bad.sum())


def skill_documents(
    kind: str, split: Split, tokens: int, render: Callable[[Sequence[Mapping[str, Any]]], list[int]],
    material: Material, seed: int,
) -> Iterator[list[int]]:  # fmt: skip
    """Rendered documents of one skill until `tokens` ids are made."""
    rng = random.Random(f"{kind}/{split}/{seed}")
    made = 0
    while made < tokens:
        ids = render(SKILLS[kind].make(rng, material, split).messages)
        made += len(ids)
        yield ids


def ladder(material: Material, tokens: int, count: int, seed: int) -> Iterator[Task]:
    """Held-out needle prompts of about so many tokens: four codes each, one asked for."""
    rng = random.Random(f"ladder/{tokens}/{seed}")
    for _ in range(count):
        yield SKILLS["needle"].make(rng, material, "held_out", tokens=tokens, needles=4, questions=1)


def build(
    corpus: Path,
    out: Path,
    config_template: dict[str, Any],
    seed: int,
    skill_tokens: dict[str, int],
    progress: Progress,
) -> tuple[Manifest, dict[str, Any]]:
    """Make a data folder from a corpus folder. Returns its manifest and the completed model config.

    config_template  a whole model config; what follows from the tokenizer is replaced
    Raises           BadTrainingData; the errors of ModelConfig.from_json
    """
    train_files, valid_file = corpus_files(corpus)
    vocab_size = ModelConfig.from_json(config_template, "the model config").text.vocab_size
    if vocab_size > MAX_VOCAB:
        raise BadTrainingData("the model config", f"vocab_size is {vocab_size}, token files hold ids below {MAX_VOCAB}")
    first = list(read_pairs(train_files[0]))
    out.mkdir(parents=True, exist_ok=True)
    texts = [text for pair in first for text in (pair.prompt, pair.response)]
    templates = template_texts()
    texts += templates * max(1, len(first) // 100)  # enough that their words become whole tokens
    tokenizer_file = out / FILE_NAME
    tokenizer_bpe.save(tokenizer_bpe.train_tokenizer(texts, vocab_size), tokenizer_file)
    config = complete_config(config_template, Tokenizer(tokenizer_file))
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    renderer = Renderer(tokenizer_file)
    parts: dict[str, list[str]] = {}
    tokens: dict[str, int] = {}
    documents: dict[str, int] = {}
    dropped = 0

    def write(part: str, name: str, ids: Ids, count: int) -> None:
        write_ids(out / name, ids)
        parts.setdefault(part, []).append(name)
        tokens[part] = tokens.get(part, 0) + len(ids)
        documents[part] = documents.get(part, 0) + count

    for part, files in (("prose", train_files), ("valid", [valid_file])):
        for number, path in enumerate(files):
            collected = Collected()
            for pair in progress(read_pairs(path), path.name, None):
                collected.add(
                    renderer.ids(
                        [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.response}]
                    )
                )
            ids, starts = collected.flat()
            count = len(starts) - 1
            if part == "prose":
                ids, count, bad = without_loops(ids, starts)
                dropped += bad
            write(part, f"{part}-{number}.ids.xz", ids, count)
    materials: dict[Split, Material] = {"train": material_of(train_files[0]), "held_out": material_of(valid_file)}
    for kind, budget in skill_tokens.items():
        for split, material in materials.items():
            collected = Collected()
            size = budget if split == "train" else budget // 40
            rendered = skill_documents(kind, split, size, renderer.ids, material, seed)
            for ids in progress(rendered, f"{kind} {split}", None):
                collected.add(ids)
            flat, starts = collected.flat()
            part = kind if split == "train" else f"{kind}-held-out"
            write(part, f"{part}.ids.xz", flat, len(starts) - 1)
    for tokens_wanted in NEEDLE_LADDER:
        collected = Collected()
        for task in ladder(materials["held_out"], tokens_wanted, 64, seed):
            collected.add(renderer.ids(task.messages))
        flat, starts = collected.flat()
        write(f"ladder-{tokens_wanted}", f"ladder-{tokens_wanted}.ids.xz", flat, len(starts) - 1)
    manifest = Manifest(FORMAT, seed, vocab_size, parts, tokens, documents, dropped)
    manifest.write(out)
    return manifest, config


def complete_config(template: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The model config with what follows from the tokenizer: token ids and the number of Engram classes."""
    config: dict[str, Any] = json.loads(json.dumps(template))
    text, ids = config["text_config"], tokenizer.special_ids
    if len(tokenizer) != text["vocab_size"]:
        raise BadTrainingData(
            tokenizer.path,
            f"it has {len(tokenizer)} ids, the model config {text['vocab_size']}; the text it was trained on holds too "
            "little for more: use a larger corpus or a smaller vocab_size",
        )
    config |= {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["pad"]}
    config["image_token_id"] = ids["image"]
    text["engram_pad_token_id"], text["dspark_noise_token_id"] = ids["pad"], ids["system"]
    text["engram_compressed_vocab_size"] = int(tokenizer.engram_classes().max()) + 1
    ModelConfig.from_json(config)
    return config
