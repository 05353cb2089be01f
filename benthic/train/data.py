"""From text to training rows: read the corpus, render through the serving encoding, filter loops, write token files.

A data folder (format 2) holds the tokenizer, the completed model config, one token file a part and `data.json`. A token
file is little-endian uint16 ids, xz; every document begins with BOS. Parts are `prose` and the skills, each with a
held-out part that ends in `.valid`, and held-out needles of given lengths. A part with pictures has a file of their
records beside it, one picture a document, in the order of the documents. Rendering needs the deepseek-recipe package;
reading a data folder does not.
"""

import json
import lzma
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benthic.errors import BadTrainingData
from benthic.models.deepseek_v41_config import ModelConfig, VisionConfig, read_json
from benthic.skills.base import SKILLS, Material, Split, Task
from benthic.skills.loops import looping
from benthic.text.tokenizer import FILE_NAME, SPECIALS, Tokenizer
from benthic.train import tokenizer_bpe

if TYPE_CHECKING:
    from benthic.skills.shapes import Picture

Ids = NDArray[np.uint16]

MANIFEST = "data.json"
FORMAT = 2
MAX_VOCAB = 1 << 16  # ids are stored as uint16
PIECE_BYTES = 1 << 20  # of a part, between two signs of progress while it is compressed
LONGEST = 4096  # tokens of a skill's document; one that comes out longer is drawn again
SKILL_TOKENS = {  # of training; about 30 % of all, beside 60 million of prose
    "copy": 2_000_000,
    "needle": 9_000_000,
    "recall": 2_500_000,
    "arithmetic": 1_500_000,
    "thinking": 1_500_000,
    "memory": 1_000_000,
    "json": 2_000_000,
    "tools": 6_000_000,
    "shapes": 4_000_000,
}
NEEDLE_LADDER = (512, 2048, 4000)  # tokens of the held-out needles of given lengths: four codes, one asked for
LADDER_DOCUMENTS = 64
HELD_OUT_DOCUMENTS = 256  # of each skill
SYSTEMS = ("You are a helpful assistant.", "You are a friendly assistant.", "Help the user.", "Be kind and clear.")
SYSTEM_EVERY = 20  # one pair of training prose in so many has a system message, which says nothing of the answer
FILLER_PAIRS = 2500  # whose sentences the skills are built from: few, so that their documents pack small


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
    """What the skills are built from, out of the beginning of a corpus file. Raises BadTrainingData: too little."""
    material = Material.of((pair.prompt, pair.response) for pair in islice(read_pairs(path), FILLER_PAIRS))
    if material.lacks:
        raise BadTrainingData(path, material.lacks)
    return material


class Renderer:
    """Conversations -> token ids, by the encoding that serving uses."""

    def __init__(self, tokenizer: Tokenizer, vision: VisionConfig | None):
        from benthic.models.deepseek_v41_vision import geometry
        from benthic.text.prompt import ChatEncoder

        self.encoder, self.eos_id = ChatEncoder(tokenizer), tokenizer.eos_id
        self._spans = None if vision is None else lambda width, height: geometry(width, height, vision).tokens

    def ids(self, task: Task) -> list[int]:
        """A whole conversation, up to the end token of its last answer."""
        request = task.request()
        if task.thinking and not task.tools:
            # reasoning is kept where the answer is to be continued, and nowhere else
            *before, last = task.messages
            assert not any("reasoning_content" in message for message in before), f"{task.skill}: thinks more than once"
            request["messages"] = (*before, {**last, "prefix": True})
            return [*self.encoder.encode(**request, spans=self._spans).ids, self.eos_id]
        # without the header of the next answer that the encoding always opens
        return list(self.encoder.encode(**request, spans=self._spans).ids[:-2])


def plain(text: str, answer: str) -> Task:
    """One question and its answer."""
    return Task("prose", ({"role": "user", "content": text}, {"role": "assistant", "content": answer}))


def with_systems(tasks: Iterable[Task]) -> Iterator[Task]:
    """One task in SYSTEM_EVERY has a system message."""
    for number, task in enumerate(tasks):
        if number % SYSTEM_EVERY == SYSTEM_EVERY - 1:
            system = {"role": "system", "content": SYSTEMS[number // SYSTEM_EVERY % len(SYSTEMS)]}
            task = replace(task, messages=(system, *task.messages))
        yield task


def template_texts(tasks: Iterable[Task], vision: VisionConfig | None) -> list[str]:
    """What the encoding makes of conversations, in pieces between special tokens."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / FILE_NAME
        tokenizer_bpe.save(tokenizer_bpe.train_tokenizer([], 256 + len(SPECIALS)), file)  # bytes alone
        tokenizer = Tokenizer(file)
        special = set(tokenizer.special_ids.values())
        renderer = Renderer(tokenizer, vision)
        texts: list[str] = []
        for task in tasks:
            pieces = groupby(renderer.ids(task), special.__contains__)
            texts += [tokenizer.decode(list(ids)) for is_special, ids in pieces if not is_special]
        return texts


# ---- token files -----------------------------------------------------------------------------------------------------


def write_ids(path: Path, ids: Ids, progress: "Progress | None" = None) -> None:
    """xz, tuned: an id is two bytes, and a dictionary that holds the whole part finds every repeat."""
    raw = memoryview(ids.astype("<u2").tobytes())
    room = min(max(1 << len(raw).bit_length(), 1 << 16), 128 << 20)
    coder = {"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 3, "lp": 1, "pb": 1, "dict_size": room}
    compressor = lzma.LZMACompressor(filters=[coder])
    pieces: Iterable[int] = range(0, len(raw), PIECE_BYTES)
    if progress is not None and len(pieces) > 16:  # a minute or more
        pieces = progress(pieces, path.name, len(pieces))
    with path.open("wb") as file:
        for at in pieces:
            file.write(compressor.compress(raw[at : at + PIECE_BYTES]))
        file.write(compressor.flush())


def read_ids(path: Path) -> Ids:
    """Raises BadTrainingData."""
    try:
        raw = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise BadTrainingData(path, str(error)) from error
    if len(raw) % 2:
        raise BadTrainingData(path, f"it holds {len(raw)} bytes, want whole uint16 ids")
    return np.frombuffer(raw, dtype="<u2").astype(np.uint16, copy=False)


@dataclass(slots=True)
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
    """All ids of one part. Raises BadTrainingData."""
    if part not in manifest.parts:
        raise BadTrainingData(folder, f"no part {part!r}; it has {', '.join(manifest.parts)}")
    ids = np.concatenate([read_ids(folder / name) for name in manifest.parts[part]])
    if len(ids) != manifest.tokens[part] or (len(ids) and ids.max() >= manifest.vocab_size):
        raise BadTrainingData(
            folder,
            f"part {part} holds {len(ids)} ids up to {ids.max(initial=0)}, {MANIFEST} says {manifest.tokens[part]} ids "
            f"below {manifest.vocab_size}; make the folder again with `benthic train data`",
        )
    return ids


def part_bytes(folder: Path, manifest: Manifest, part: str) -> int:
    """Of its files on disk, pictures included."""
    files = [*(folder / name for name in manifest.parts[part]), pictures_file(folder, part)]
    return sum(file.stat().st_size for file in files if file.is_file())


def pictures_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.pictures.jsonl.xz"


def read_pictures(folder: Path, manifest: Manifest, part: str) -> "list[Picture]":
    """The picture of each document of a part, empty for a part without. Raises BadTrainingData."""
    path = pictures_file(folder, part)
    if not path.is_file():
        return []
    from benthic.skills.shapes import Picture

    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            pictures = [Picture.of_json(json.loads(line)) for line in lines]
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise BadTrainingData(path, f"{error}; make the folder again with `benthic train data`") from error
    if len(pictures) != manifest.documents[part]:
        raise BadTrainingData(path, f"it has {len(pictures)} pictures for {manifest.documents[part]} documents")
    return pictures


# ---- rows ------------------------------------------------------------------------------------------------------------


def document_starts(ids: Ids, bos: int) -> NDArray[np.int64]:
    """[N + 1] where each document begins, and the end."""
    return np.append(np.flatnonzero(ids == bos), len(ids)).astype(np.int64)


class Rows(NamedTuple):
    ids: Ids  # [n, length]
    documents: NDArray[np.int64]  # numbers of the documents, in the order in which they stand in the rows
    firsts: NDArray[np.int64]  # [n + 1] where the documents of each row begin in `documents`


def pack_rows(
    ids: Ids,
    starts: NDArray[np.int64],
    length: int,
    pad: int,
    rng: np.random.Generator,
    chosen: NDArray[np.int64] | None = None,
) -> Rows:
    """Whole documents into rows, shuffled; what is left of a row is padding. A longer document is cut.

    chosen   numbers of the documents to pack; default: all
    Best fit within windows of 8192 documents: each row takes the longest document that still fits, again and again.
    """
    order = rng.permutation(len(starts) - 1 if chosen is None else chosen)
    sizes = np.minimum(np.diff(starts), length)
    members: list[list[int]] = []
    for begin in range(0, len(order), 8192):
        window = sorted((int(sizes[d]), int(d)) for d in order[begin : begin + 8192])
        while window:
            room, row = length, []
            while (at := bisect_right(window, (room, len(starts))) - 1) >= 0:
                size, document = window.pop(at)
                row.append(document)
                room -= size
            members.append(row)
    members = [members[i] for i in rng.permutation(len(members))]
    packed = np.full((len(members), length), pad, dtype=np.uint16)
    for row, documents in zip(packed, members, strict=True):
        at = 0
        for document in documents:
            size = sizes[document]
            row[at : at + size] = ids[starts[document] : starts[document] + size]
            at += size
    firsts = np.cumsum([0, *map(len, members)])
    return Rows(packed, np.array([d for row in members for d in row], dtype=np.int64), firsts.astype(np.int64))


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


class Document(NamedTuple):
    ids: list[int]
    pictures: "tuple[Picture, ...]"


def skill_documents(skill: str, split: Split, material: Material, render: Callable[[Task], list[int]], seed: int,
                    **options: Any) -> Iterator[Document]:  # fmt: skip
    """Rendered tasks of one skill, without end."""
    rng = random.Random(f"{skill}/{split}/{seed}/{options}")
    while True:
        task = SKILLS[skill].make(rng, material, split, **options)
        ids = render(task)
        if len(ids) <= LONGEST:
            yield Document(ids, task.pictures)


def until(documents: Iterable[Document], tokens: int) -> Iterator[Document]:
    """Documents until so many tokens are there."""
    made = 0
    for document in documents:
        if made >= tokens:
            return
        made += len(document.ids)
        yield document


def build(
    corpus: Path,
    out: Path,
    config_template: dict[str, Any],
    *,
    seed: int,
    skill_tokens: Mapping[str, int],
    progress: Progress,
    prose_tokens: int | None = None,
    only: Collection[str] = (),
) -> tuple[Manifest, dict[str, Any]]:
    """Make a data folder from a corpus folder. Returns its manifest and the completed model config.

    config_template  a whole model config; what follows from the tokenizer is replaced
    skill_tokens     training tokens of each skill; one that is not named or has 0 has no part
    prose_tokens     of prose, whole documents from the beginning; None: all
    only             skills that are made anew in a folder that is there, with its tokenizer and config; none: the whole
                     folder. With more tokens a part begins with the documents that it had.
    Raises           BadTrainingData; the errors of ModelConfig.from_json
    """
    train_files, valid_file = corpus_files(corpus)
    template = ModelConfig.from_json(config_template, "the model config")
    vocab_size = template.text.vocab_size
    if vocab_size > MAX_VOCAB:
        raise BadTrainingData("the model config", f"vocab_size is {vocab_size}, token files hold ids below {MAX_VOCAB}")
    if unknown := skill_tokens.keys() - SKILLS.keys():
        raise BadTrainingData("the skills", f"no skill {', '.join(sorted(unknown))}; there are {', '.join(SKILLS)}")
    if missing := set(only) - {skill for skill, budget in skill_tokens.items() if budget}:
        raise BadTrainingData(
            "the skills", f"nothing is asked of {', '.join(sorted(missing))}, which should be made anew"
        )
    materials: dict[Split, Material] = {"train": material_of(train_files[0]), "held_out": material_of(valid_file)}
    tokenizer_file = out / FILE_NAME
    if only:
        manifest = Manifest.read(out)
        if manifest.seed != seed:
            raise BadTrainingData(out, f"made with seed {manifest.seed}, not {seed}; its parts would not fit together")
        tokenizer = Tokenizer(tokenizer_file)
        config = dict(read_json(out / "config.json"))
    else:
        out.mkdir(parents=True, exist_ok=True)
        first = list(read_pairs(train_files[0]))
        texts = [text for pair in first for text in (pair.prompt, pair.response)]
        texts += template_texts(_samples(materials["train"], seed), template.vision) * max(1, len(first) // 1000)
        tokenizer_bpe.save(tokenizer_bpe.train_tokenizer(texts, vocab_size), tokenizer_file)
        tokenizer = Tokenizer(tokenizer_file)
        config = complete_config(config_template, tokenizer)
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        manifest = Manifest(FORMAT, seed, vocab_size, {}, {}, {}, 0)

    renderer = Renderer(tokenizer, ModelConfig.from_json(config).vision)

    def write(part: str, documents: Iterable[Document], *, drop_loops: bool = False) -> None:
        collected = Collected()
        pictures: list[Picture] = []
        for document in documents:
            collected.add(document.ids)
            pictures += document.pictures
        ids, starts = collected.flat()
        count = len(starts) - 1
        if drop_loops:
            ids, count, manifest.looping_dropped = without_loops(ids, starts)
        write_ids(out / f"{part}.ids.xz", ids, progress)
        if pictures:
            lines = "".join(json.dumps(picture.as_json()) + "\n" for picture in pictures)
            pictures_file(out, part).write_bytes(lzma.compress(lines.encode()))
        manifest.parts[part] = [f"{part}.ids.xz"]
        manifest.tokens[part], manifest.documents[part] = len(ids), count

    def prose(files: Sequence[Path]) -> Iterator[Task]:
        for path in files:
            for pair in progress(read_pairs(path), path.name, None):
                yield plain(pair.prompt, pair.response)

    def rendered(tasks: Iterable[Task]) -> Iterator[Document]:
        return (Document(renderer.ids(task), ()) for task in tasks)

    if not only:
        training = rendered(with_systems(prose(train_files)))
        write("prose", training if prose_tokens is None else until(training, prose_tokens), drop_loops=True)
        write("prose.valid", rendered(prose([valid_file])))
    for skill, budget in skill_tokens.items():
        if budget and (not only or skill in only):
            made = skill_documents(skill, "train", materials["train"], renderer.ids, seed)
            write(skill, progress(until(made, budget), skill, None))
            made = skill_documents(skill, "held_out", materials["held_out"], renderer.ids, seed)
            write(f"{skill}.valid", progress(islice(made, HELD_OUT_DOCUMENTS), f"{skill}.valid", HELD_OUT_DOCUMENTS))
    for tokens in NEEDLE_LADDER if not only else ():
        options = {"tokens": tokens, "needles": 4, "questions": 1}
        made = skill_documents("needle", "held_out", materials["held_out"], renderer.ids, seed, **options)
        write(f"needle-{tokens}.valid", islice(made, LADDER_DOCUMENTS))
    manifest.write(out)
    return manifest, config


def _samples(material: Material, seed: int) -> Iterator[Task]:
    """Conversations whose words should become whole tokens: what the encoding writes of itself, and every skill."""
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    asked = plain("What is the weather in Paris? Answer in JSON.", "It is sunny.").messages
    asked = ({"role": "system", "content": "You are a helpful assistant."}, *asked)
    for _ in range(4):
        yield Task("prose", asked)
        yield Task("prose", asked, tools=(tool,))
        yield Task("prose", asked, tools=(tool,), thinking=True)
        yield Task("prose", asked, response_format={"type": "json_object"})
        for effort in ("low", "high", "max"):
            yield Task("prose", asked, thinking=True, effort=effort)
    rng = random.Random(f"samples/{seed}")
    for name in SKILLS:
        yield from (SKILLS[name].make(rng, material, "train") for _ in range(30))


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
