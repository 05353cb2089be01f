"""From a corpus to token files: what is refused, what is dropped, how rows are packed, and that nothing is lost."""

import json
import lzma
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benthic.errors import BadConfigKey, BadTrainingData, MissingConfigKey
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.deepseek_v41_vision import geometry
from benthic.skills.base import SKILLS, Reply, Task, right
from benthic.skills.text import conversation
from benthic.testing.tokenizers import write_tokenizer
from benthic.text.reply import ReplyParser
from benthic.text.tokenizer import FILE_NAME, SPECIALS, Tokenizer
from benthic.train import data
from benthic.train.loss import Ids, response_weights
from tests.skills.small import MATERIAL, SPLITS
from tests.train.small import pairs, small_corpus, small_json, write_corpus, write_lines

BOS, PAD = 0, 2


def quiet(items: Any, what: str, total: int | None) -> Any:
    return items


# Corpus files


def test_pairs_are_read_in_order(tmp_path: Path) -> None:
    rows = [{"kind": "a", "prompt": "Ünïcode\n", "response": "", "more": 1}, *pairs(1, 3)]
    path = write_lines(tmp_path / "a.xz", [json.dumps(row) for row in rows])
    assert list(data.read_pairs(path)) == [data.Pair(r["kind"], r["prompt"], r["response"]) for r in rows]


GOOD = json.dumps({"kind": "a", "prompt": "b", "response": "c"})


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "7",
        '"text"',
        "null",
        '{"kind": "a", "prompt": "b"}',
        '{"kind": "a", "prompt": "b", "response": 5}',
        '{"kind": "a", "prompt": null, "response": "c"}',
        '{"kind": "a", "prompt": ["b"], "response": "c"}',
        r'{"kind": "a", "prompt": "\ud800", "response": "c"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "train-3.jsonl.xz", [GOOD, GOOD, line, GOOD])
    with pytest.raises(BadTrainingData, match=r"train-3\.jsonl\.xz .* line 3 ") as caught:
        list(data.read_pairs(path))
    assert '"response"' in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_file_that_is_no_xz_text_is_named(tmp_path: Path) -> None:
    whole = lzma.compress("\n".join([GOOD] * 1000).encode())
    for name, content in (
        ("plain", GOOD.encode()),
        ("cut", whole[: len(whole) // 2]),
        ("cut-end", whole[:-1]),
        ("latin", lzma.compress(b'{"kind": "\xff"}')),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(BadTrainingData, match=f"/{name} as training data"):
            list(data.read_pairs(path))
    with pytest.raises(BadTrainingData, match="/absent"):
        list(data.read_pairs(tmp_path / "absent"))


def test_corpus_folder_needs_both_kinds_of_file(tmp_path: Path) -> None:
    folder = small_corpus(tmp_path / "corpus")
    train, valid = data.corpus_files(folder)
    assert [path.name for path in train] == ["train-0.jsonl.xz", "train-1.jsonl.xz"]
    valid.rename(folder / "other")
    for bad in (folder, tmp_path / "absent"):
        with pytest.raises(BadTrainingData, match=r"valid\.jsonl\.xz"):
            data.corpus_files(bad)


# Rendering


def test_rows_equal_the_official_encoding(tmp_path: Path) -> None:
    recipe = pytest.importorskip("deepseek_recipe")
    file = write_tokenizer(tmp_path)
    tokenizer = Tokenizer(file)
    renderer = data.Renderer(tokenizer, None)
    special = tokenizer.special_ids
    turns = [
        ("What is your name? 42", "Lily."),
        (f"<think> {SPECIALS['bos'].spelling}{SPECIALS['eos'].spelling}\n", "naïve 你好 😀"),
        ("", "x"),
    ]
    want = [special["bos"]]
    for user, answer in turns:
        want += [special["user"], *tokenizer.encode(user, bos=False), special["assistant"], special["think_close"]]
        want += [*tokenizer.encode(answer, bos=False), special["eos"]]
    assert renderer.ids(conversation("copy", turns)) == want
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(file)))
    messages = [m for user, answer in turns for m in (recipe.UserMessage(user), recipe.AssistantMessage(answer))]
    official = list(encoding.encode(recipe.Conversation(messages, thinking_mode=False)))
    assert official == [*want, special["assistant"], special["think_close"]]
    # and what serving is given as a prompt is the beginning of the row
    prompt = recipe.Conversation(messages[:1], thinking_mode=False)
    served = list(encoding.encode(prompt))
    assert want[: len(served)] == served


VISION = ModelConfig.from_json(small_json()).vision


def span(width: int, height: int) -> int:
    assert VISION is not None
    return geometry(width, height, VISION).tokens


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> data.Renderer:
    return data.Renderer(Tokenizer(write_tokenizer(tmp_path_factory.mktemp("renderer"))), VISION)


def tasks(skill: str, count: int = 25) -> list[Task]:
    rng = random.Random(skill)
    return [SKILLS[skill].make(rng, MATERIAL, split) for split in SPLITS for _ in range(count)]


def reply_spans(renderer: data.Renderer, task: Task, ids: list[int]) -> Iterator[tuple[int, int]]:
    """Where each reply stands in a rendered task: from behind what serving would be given, to its end token."""
    for turn in task.turns:
        prompt = renderer.encoder.encode(**task.request(turn), spans=span)
        assert ids[: len(prompt.ids)] == list(prompt.ids)
        yield len(prompt.ids), ids.index(renderer.eos_id, len(prompt.ids)) + 1


@pytest.mark.parametrize("skill", SKILLS)
def test_each_reply_in_a_row_parses_into_the_right_answer(renderer: data.Renderer, skill: str) -> None:
    for task in tasks(skill):
        ids = renderer.ids(task)
        end = 0
        for turn, (begin, end) in zip(task.turns, reply_spans(renderer, task, ids), strict=True):
            prompt = renderer.encoder.encode(**task.request(turn), spans=span)
            parser = ReplyParser(renderer.encoder, prompt)
            parser.push(ids[begin:end])
            parser.finish()
            message = parser.message.as_dict()
            assert right(task, turn, Reply.of(message)), (task.messages[turn], message)
            for key in ("content", "reasoning_content"):
                assert message.get(key, "") == task.messages[turn].get(key, "")
        assert end == len(ids)
        assert ids.count(renderer.eos_id) == len(task.turns)


@pytest.mark.parametrize("skill", SKILLS)
def test_loss_falls_on_replies_and_their_end_alone(renderer: data.Renderer, skill: str) -> None:
    """The rule of the loss, told from the text that the encoding renders."""
    special = Ids.of(renderer.encoder.tokenizer)
    for task in tasks(skill, 10):
        ids = renderer.ids(task)
        wanted = np.zeros(len(ids), dtype=np.float32)
        for begin, end in reply_spans(renderer, task, ids):
            wanted[begin - 1 : end - 1] = 1  # where each is predicted
        got = response_weights(torch.tensor([ids]), special)[0]
        assert got.tolist() == wanted.tolist(), task
        assert 0 < wanted.sum() < len(ids)


def test_image_spans_are_as_long_as_the_pictures_geometry(renderer: data.Renderer) -> None:
    image = renderer.encoder.tokenizer.special_ids["image"]
    for task in tasks("shapes"):
        (picture,) = task.pictures
        ids = renderer.ids(task)
        first = ids.index(image)
        count = span(picture.width, picture.height)
        assert ids[first : first + count] == [image] * count
        assert ids.count(image) == count


def test_thinking_is_kept_and_only_where_it_belongs(renderer: data.Renderer) -> None:
    special = renderer.encoder.tokenizer.special_ids
    for task in tasks("thinking"):
        ids = renderer.ids(task)
        assert ids.count(special["think_open"]) == task.thinking
        text = renderer.encoder.tokenizer.decode(ids)
        assert (f"Reasoning Effort: { {'low': 50, None: 75, 'max': 100}[task.effort] }" in text) == task.thinking


def test_template_texts_are_the_encodings_own_words() -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
    messages = ({"role": "system", "content": "Be kind."}, *data.plain("Naïve 😀?", "It is sunny.").messages)
    texts = data.template_texts([Task("prose", messages, tools=(tool,), thinking=True)], None)
    assert not any(special.spelling in text for text in texts for special in SPECIALS.values())
    joined = "\n".join(texts)
    for part in ("Be kind.", "get_weather", "Naïve 😀?", "It is sunny.", "Reasoning Effort: 75", "## Tools"):
        assert part in joined


def flat(documents: list[list[int]]) -> tuple[data.Ids, Any]:
    collected = data.Collected()
    for document in documents:
        collected.add(document)
    return collected.flat()


def test_documents_that_loop_are_dropped() -> None:
    piece = [65535, 1, 2, 3, 4, 5, 6, 7]
    documents = [piece * 3, piece * 4, [], [5]]
    ids, kept, dropped = data.without_loops(*flat(documents))
    assert (kept, dropped) == (3, 1)
    assert ids.tolist() == [*piece * 3, 5]
    assert data.without_loops(*flat([]))[1:] == (0, 0)


# Token files


@pytest.mark.parametrize("ids", [[], [0], [0, 1, 65535, 256, 255]])
def test_token_files_come_back(tmp_path: Path, ids: list[int]) -> None:
    path = tmp_path / "a.ids.xz"
    data.write_ids(path, np.array(ids, dtype=np.uint16))
    back = data.read_ids(path)
    assert back.dtype == np.uint16
    assert back.tolist() == ids
    assert lzma.decompress(path.read_bytes()) == b"".join(id.to_bytes(2, "little") for id in ids)


def test_large_parts_are_compressed_piece_by_piece_in_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE_BYTES", 1000)
    ids = np.arange(9001, dtype=np.uint16)
    seen: list[Any] = []

    def progress(items: Any, what: str, total: int | None) -> Any:
        seen.append((what, total, list(items)))
        return items

    data.write_ids(tmp_path / "a.ids.xz", ids, progress)
    data.write_ids(tmp_path / "b.ids.xz", ids[:100], progress)
    assert (data.read_ids(tmp_path / "a.ids.xz") == ids).all()
    assert (data.read_ids(tmp_path / "b.ids.xz") == ids[:100]).all()
    assert seen == [("a.ids.xz", 19, list(range(0, 18_002, 1000)))]


def test_a_damaged_token_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ids.xz"
    for content in (b"", b"plain", lzma.compress(b"abc"), lzma.compress(bytes(1000))[:-9]):
        path.write_bytes(content)
        with pytest.raises(BadTrainingData, match=r"a\.ids\.xz"):
            data.read_ids(path)
    path.unlink()
    with pytest.raises(BadTrainingData, match=r"a\.ids\.xz"):
        data.read_ids(path)


def manifest(**changes: Any) -> data.Manifest:
    values: dict[str, Any] = {
        "format": data.FORMAT,
        "seed": 4,
        "vocab_size": 512,
        "parts": {"prose": ["b", "a"]},
        "tokens": {"prose": 5},
        "documents": {"prose": 2},
        "looping_dropped": 1,
    }
    return data.Manifest(**values | changes)


def test_manifest_comes_back(tmp_path: Path) -> None:
    manifest().write(tmp_path)
    assert data.Manifest.read(tmp_path) == manifest()


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"format": 1, "other": 2}'])
def test_a_bad_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / data.MANIFEST).write_text(text)
    with pytest.raises(BadTrainingData, match=r"data\.json.*benthic train data"):
        data.Manifest.read(tmp_path)


def test_a_manifest_of_another_format_or_none(tmp_path: Path) -> None:
    with pytest.raises(BadTrainingData, match=r"data\.json.*no such file.*benthic train data"):
        data.Manifest.read(tmp_path)
    manifest(format=data.FORMAT + 1).write(tmp_path)
    with pytest.raises(BadTrainingData, match=f"format {data.FORMAT + 1}, want {data.FORMAT}"):
        data.Manifest.read(tmp_path)


def test_a_part_is_its_files_in_order(tmp_path: Path) -> None:
    data.write_ids(tmp_path / "a", np.array([0, 7], dtype=np.uint16))
    data.write_ids(tmp_path / "b", np.array([0, 8, 511], dtype=np.uint16))
    assert data.read_part(tmp_path, manifest(), "prose").tolist() == [0, 8, 511, 0, 7]
    with pytest.raises(BadTrainingData, match="no part 'copy'; it has prose"):
        data.read_part(tmp_path, manifest(), "copy")
    with pytest.raises(BadTrainingData, match=r"5 ids up to 511, data\.json says 6 ids below 512"):
        data.read_part(tmp_path, manifest(tokens={"prose": 6}), "prose")
    with pytest.raises(BadTrainingData, match=r"ids up to 511, data\.json says 5 ids below 511"):
        data.read_part(tmp_path, manifest(vocab_size=511), "prose")
    (tmp_path / "a").unlink()
    with pytest.raises(BadTrainingData, match="/a as training data"):
        data.read_part(tmp_path, manifest(), "prose")


# Rows


def documents_of(sizes: list[int]) -> tuple[data.Ids, Any]:
    """Documents of these lengths, told apart by their second id, if they have one."""
    return flat([[BOS, *[100 + i] * (size - 1)] for i, size in enumerate(sizes)])


def split_row(row: list[int]) -> list[tuple[int, ...]]:
    while row and row[-1] == PAD:
        row.pop()
    starts = [i for i, id in enumerate(row) if id == BOS]
    assert starts[:1] == [0]
    return [tuple(row[a:b]) for a, b in zip(starts, [*starts[1:], len(row)], strict=True)]


@pytest.mark.parametrize("sizes", [[1], [16], [17], [40], [1] * 33, [16, 16, 1], [9, 8, 8, 7, 5, 5, 3, 3, 40, 17, 1]])
def test_every_document_is_packed_once_and_whole(sizes: list[int]) -> None:
    length = 16
    ids, starts = documents_of(sizes)
    assert data.document_starts(ids, BOS).tolist() == starts.tolist()
    rows = data.pack_rows(ids, starts, length, PAD, np.random.default_rng(1))
    assert rows.ids.shape[1] == length
    got = sorted(document for row in rows.ids.tolist() for document in split_row(row))
    assert got == sorted((BOS, *[100 + i] * (min(size, length) - 1)) for i, size in enumerate(sizes))


def test_packing_wastes_little_and_depends_on_the_seed_alone() -> None:
    sizes = np.random.default_rng(0).integers(20, 400, 10_000).tolist()  # more than one window
    ids, starts = documents_of(sizes)
    first, again, other = (
        data.pack_rows(ids, starts, 1024, PAD, np.random.default_rng(seed)).ids for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert first.shape != other.shape or (first != other).any()
    assert sum(sizes) / first.size > 0.98
    assert Counter(first.flatten().tolist())[PAD] == first.size - sum(sizes)


def test_rows_say_which_documents_they_hold() -> None:
    sizes = [9, 8, 8, 7, 5, 5, 3, 3, 12, 40, 2]
    ids, starts = documents_of(sizes)
    rows = data.pack_rows(ids, starts, 16, PAD, np.random.default_rng(1))
    assert sorted(rows.documents.tolist()) == list(range(len(sizes)))
    assert len(rows.firsts) == len(rows.ids) + 1
    for row, (a, b) in zip(rows.ids.tolist(), pairwise(rows.firsts), strict=True):
        assert [document[1] for document in split_row(row)] == [100 + d for d in rows.documents[a:b]]


def test_some_documents_can_be_packed_alone() -> None:
    ids, starts = documents_of([9, 8, 30, 7, 5])
    chosen = np.flatnonzero(np.diff(starts) <= 16)
    rows = data.pack_rows(ids, starts, 16, PAD, np.random.default_rng(1), chosen)
    assert sorted(rows.documents.tolist()) == [0, 1, 3, 4]
    assert not (rows.ids == 102).any()


def test_one_document_a_row() -> None:
    ids, starts = documents_of([3, 1, 6])
    assert data.one_per_row(ids, starts, 4, PAD).tolist() == [
        [BOS, 100, 100, PAD],
        [BOS, PAD, PAD, PAD],
        [BOS, 102, 102, 102],
    ]
    assert data.one_per_row(ids[:0], starts[:1], 4, PAD).shape == (0, 4)


# The whole folder


SKILL_TOKENS = dict.fromkeys(SKILLS, 1500) | {"needle": 4000, "tools": 3000}


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "HELD_OUT_DOCUMENTS", 8)
        patch.setattr(data, "LADDER_DOCUMENTS", 3)
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, data.Manifest, dict[str, Any]]:
    root = tmp_path_factory.mktemp("built")
    looping = {"kind": "story", "prompt": "Go on.", "response": "The dog ran to the house and back. " * 12}
    corpus = write_corpus(root / "corpus", [pairs(1, 60), [*pairs(2, 20), looping]], [*pairs(3, 12), looping])
    return root, *make(corpus, root / "out")


def make(corpus: Path, out: Path, **changes: Any) -> tuple[data.Manifest, dict[str, Any]]:
    options: dict[str, Any] = {"seed": 3, "skill_tokens": SKILL_TOKENS, "progress": quiet}
    return data.build(corpus, out, small_json(), **options | changes)


def test_folder_is_described_by_its_manifest(built: Any) -> None:
    root, manifest, config = built
    out = root / "out"
    assert data.Manifest.read(out) == manifest
    ladder = {f"needle-{n}.valid": data.LADDER_DOCUMENTS for n in data.NEEDLE_LADDER}
    held_out = {f"{skill}.valid": data.HELD_OUT_DOCUMENTS for skill in SKILLS}
    counts = {"prose": 80, "prose.valid": 13, **ladder, **held_out}
    assert counts.items() <= manifest.documents.items()
    assert manifest.parts.keys() == counts.keys() | SKILLS.keys()
    assert manifest.looping_dropped == 1
    for skill, tokens in SKILL_TOKENS.items():
        assert tokens <= manifest.tokens[skill] < tokens + data.LONGEST
    listed = [name for names in manifest.parts.values() for name in names]
    listed += ["shapes.pictures.jsonl.xz", "shapes.valid.pictures.jsonl.xz"]
    assert sorted([*listed, FILE_NAME, "config.json", data.MANIFEST]) == sorted(p.name for p in out.iterdir())
    assert json.loads((out / "config.json").read_text()) == config
    for part in manifest.parts:
        ids = data.read_part(out, manifest, part)
        assert len(data.document_starts(ids, config["bos_token_id"])) - 1 == manifest.documents[part]


def test_one_part_is_made_anew(built: Any, tmp_path: Path) -> None:
    """With more tokens: it begins with what it had, and nothing else changes."""
    root, manifest, config = built
    out = tmp_path / "out"
    shutil.copytree(root / "out", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    more = SKILL_TOKENS | {"shapes": 4000}
    again, same = make(root / "corpus", out, skill_tokens=more, only=["shapes"])
    assert same == config
    assert data.Manifest.read(out) == again
    changed = {path.name for path in out.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"shapes.ids.xz", "shapes.pictures.jsonl.xz", data.MANIFEST}
    was, now = data.read_part(root / "out", manifest, "shapes"), data.read_part(out, again, "shapes")
    assert len(now) >= 4000 > len(was)
    assert now[: len(was)].tolist() == was.tolist()
    pictures = data.read_pictures(out, again, "shapes")
    assert pictures[: manifest.documents["shapes"]] == data.read_pictures(root / "out", manifest, "shapes")
    assert len(pictures) == again.documents["shapes"] > manifest.documents["shapes"]


def test_what_cannot_be_made_anew(built: Any, tmp_path: Path) -> None:
    root, _, _ = built
    before = {path.name: path.read_bytes() for path in (root / "out").iterdir()}
    with pytest.raises(BadTrainingData, match="seed 3, not 4"):
        make(root / "corpus", root / "out", seed=4, only=["shapes"])
    with pytest.raises(BadTrainingData, match="nothing is asked of shapes"):
        make(root / "corpus", root / "out", skill_tokens=SKILL_TOKENS | {"shapes": 0}, only=["shapes"])
    with pytest.raises(BadTrainingData, match=data.MANIFEST):
        make(root / "corpus", tmp_path / "new", only=["shapes"])
    assert {path.name: path.read_bytes() for path in (root / "out").iterdir()} == before


def test_folder_holds_the_corpus(built: Any) -> None:
    root, manifest, _ = built
    tokenizer = Tokenizer.from_dir(root / "out")
    s = {name: special.spelling for name, special in SPECIALS.items()}
    text = tokenizer.decode(data.read_part(root / "out", manifest, "prose").tolist())
    systems = dict(zip(range(19, 80, 20), data.SYSTEMS, strict=True))
    want = "".join(
        f"{s['bos']}{s['system'] + systems[i] if i in systems else ''}{s['user']}{row['prompt']}"
        f"{s['assistant']}{s['think_close']}{row['response']}{s['eos']}"
        for i, row in enumerate([*pairs(1, 60), *pairs(2, 20)])
    )
    assert text == want
    valid = tokenizer.decode(data.read_part(root / "out", manifest, "prose.valid").tolist())
    assert s["system"] not in valid


def test_held_out_parts_share_nothing_with_training(built: Any) -> None:
    root, manifest, config = built
    tokenizer = Tokenizer.from_dir(root / "out")
    texts: dict[str, set[str]] = {}
    for part in manifest.parts:
        ids = data.read_part(root / "out", manifest, part)
        starts = data.document_starts(ids, config["bos_token_id"])
        texts[part] = {tokenizer.decode(ids[a:b].tolist()) for a, b in pairwise(starts)}
    for training, held_out in (
        ("prose", ["prose.valid"]),
        *((skill, [f"{skill}.valid"]) for skill in SKILLS if skill != "shapes"),  # pictures have words in common
        ("needle", [f"needle-{n}.valid" for n in data.NEEDLE_LADDER]),
    ):
        for part in held_out:
            assert texts[part]
            assert not texts[training] & texts[part]


def test_pictures_stand_in_the_order_of_the_documents(built: Any) -> None:
    root, manifest, config = built
    vision = ModelConfig.from_json(config).vision
    assert vision is not None
    for part in ("shapes", "shapes.valid"):
        pictures = data.read_pictures(root / "out", manifest, part)
        ids = data.read_part(root / "out", manifest, part)
        starts = data.document_starts(ids, config["bos_token_id"])
        spans = np.add.reduceat(ids == config["image_token_id"], starts[:-1])
        assert spans.tolist() == [geometry(p.width, p.height, vision).tokens for p in pictures]
        assert len(set(pictures)) == len(pictures)
    assert data.read_pictures(root / "out", manifest, "copy") == []


def test_damaged_pictures_are_named(built: Any, tmp_path: Path) -> None:
    root, manifest, _ = built
    path = data.pictures_file(tmp_path, "shapes")
    whole = data.pictures_file(root / "out", "shapes").read_bytes()
    lines = lzma.decompress(whole).splitlines(keepends=True)
    bad = [whole[:-9], b"", lzma.compress(b"[]\n"), lzma.compress(b"".join(lines[1:])), lzma.compress(b"{")]
    for content in bad:
        path.write_bytes(content)
        with pytest.raises(BadTrainingData, match=r"shapes\.pictures\.jsonl\.xz"):
            data.read_pictures(tmp_path, manifest, "shapes")


def test_prose_can_be_a_part_of_the_corpus(built: Any, tmp_path: Path) -> None:
    root, manifest, _ = built
    less, _ = make(root / "corpus", tmp_path / "out", skill_tokens={}, prose_tokens=1000)
    assert 1000 <= less.tokens["prose"] < 1200
    assert less.parts.keys() == {part for part in manifest.parts if part not in SKILLS} - {f"{s}.valid" for s in SKILLS}
    ids, whole = (data.read_part(f, m, "prose") for f, m in ((tmp_path / "out", less), (root / "out", manifest)))
    assert ids.tolist() == whole[: len(ids)].tolist()


def test_an_unknown_skill_is_refused_first(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "corpus")
    with pytest.raises(BadTrainingData, match="no skill juggling; there are copy, needle"):
        make(corpus, tmp_path / "out", skill_tokens={"juggling": 5})
    assert not (tmp_path / "out").exists()


def test_config_is_completed_from_the_tokenizer(built: Any) -> None:
    root, _, config = built
    tokenizer = Tokenizer.from_dir(root / "out")
    ids, text = tokenizer.special_ids, config["text_config"]
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        ids["bos"],
        ids["eos"],
        ids["pad"],
    )
    assert config["image_token_id"] == ids["image"]
    assert text["engram_pad_token_id"] == ids["pad"]
    assert text["dspark_noise_token_id"] == ids["system"]
    assert text["engram_compressed_vocab_size"] == len(set(tokenizer.engram_classes().tolist()))
    assert ModelConfig.from_json(config).text.vocab_size == len(tokenizer)


def test_the_same_arguments_give_the_same_bytes(built: Any) -> None:
    root, manifest, _ = built
    again, _ = make(root / "corpus", root / "again")
    assert again == manifest
    for path in (root / "out").iterdir():
        assert (root / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def build_from(folder: Path, train: list[dict[str, str]], valid: list[dict[str, str]], **overrides: Any) -> None:
    corpus = write_corpus(folder / "corpus", [train], valid)
    options: dict[str, Any] = {"seed": 0, "skill_tokens": {"copy": 100}, "progress": quiet}
    data.build(corpus, folder / "out", small_json(**overrides), **options)


def test_a_corpus_that_cannot_teach_is_refused(tmp_path: Path) -> None:
    good = pairs(1, 60)
    bad = [{**row, "response": "x"} for row in pairs(3, 5)]
    one = [{**row, "response": row["response"].replace(".", ";") * 2} for row in good]  # a single long sentence
    with pytest.raises(BadTrainingData, match=r"tokenizer\.json .* ids, the model config 4096; .*larger corpus"):
        build_from(tmp_path / "little", pairs(1, 12), good, vocab_size=4096)
    with pytest.raises(BadTrainingData, match=r"valid\.jsonl\.xz .*0 sentences of 20 to 200 characters"):
        build_from(tmp_path / "valid", good, bad)
    with pytest.raises(BadTrainingData, match=r"train-0\.jsonl\.xz .*0 sentences of 20 to 200 characters"):
        build_from(tmp_path / "train", one, good)
    with pytest.raises(BadTrainingData, match=r"train-0\.jsonl\.xz .*0 different words .*need 16"):
        build_from(tmp_path / "words", [{**row, "prompt": "Write it"} for row in good], good)
    for folder in ("little", "valid", "train", "words"):
        with pytest.raises(BadTrainingData):
            data.Manifest.read(tmp_path / folder / "out")


def test_a_bad_model_config_is_refused_first(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "corpus")
    template = small_json()
    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({}, MissingConfigKey),
        ({**template, "text_config": {**template["text_config"], "hidden_size": 100}}, BadConfigKey),
        ({**template, "text_config": {**template["text_config"], "vocab_size": 129_280}}, BadTrainingData),
    ]
    for config, error in cases:
        with pytest.raises(error, match="the model config"):
            data.build(corpus, tmp_path / "out", config, seed=0, skill_tokens={"copy": 100}, progress=quiet)
    assert not (tmp_path / "out").exists()
