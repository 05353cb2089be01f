"""The tokenizer against the `tokenizers` package and the rules of UTF-8. The V4 vocabulary: `tests/oracles_public`."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import deepseek_recipe
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from benthic.errors import BadField, BadTokenizer, MissingCheckpointFile
from benthic.testing.tokenizers import build_raw_tokenizer, build_tokenizer, write_tokenizer
from benthic.text.tokenizer import SPECIALS, IncrementalDecoder, Tokenizer, compress_vocabulary, load_raw


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_special_spellings_are_those_of_the_protocol_package() -> None:
    names = [name for name in vars(deepseek_recipe.SpecialToken) if name[0].isupper()]
    spellings = {getattr(deepseek_recipe.SpecialToken, name).default_str() for name in names}
    ours = {special.spelling for name, special in SPECIALS.items() if name != "pad" and not name.startswith("fim_")}
    assert spellings == ours
    assert (len(ours), len(SPECIALS)) == (18, 22)


def test_ids_and_control_ids(tokenizer: Tokenizer) -> None:
    raw = load_raw(tokenizer.path)
    assert len(tokenizer) == raw.get_vocab_size() == len(set(raw.get_vocab().values()))
    assert [tokenizer.special_ids[name] for name in ("bos", "eos", "pad")] == [0, 1, 2]
    names = {"bos", "pad", "system", "fim_hole", "fim_begin", "fim_end", "user", "assistant", "reminder", "image"}
    assert set(tokenizer.control_ids) == {tokenizer.special_ids[name] for name in names}
    assert list(tokenizer.control_ids) == sorted(tokenizer.control_ids)


def test_placeholders_are_control_ids(tmp_path: Path) -> None:
    raw = build_raw_tokenizer()
    raw.add_tokens(["<｜place▁holder▁no▁7｜>", "<|place_holder_mm_span_0021|>", "<|EOT|>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_dir(tmp_path)
    assert {loaded.added_ids["<｜place▁holder▁no▁7｜>"], loaded.added_ids["<|place_holder_mm_span_0021|>"]} <= set(
        loaded.control_ids
    )
    assert loaded.added_ids["<|EOT|>"] not in loaded.control_ids


@pytest.mark.parametrize("name", list(SPECIALS))
def test_user_text_never_yields_a_control_token(tokenizer: Tokenizer, name: str) -> None:
    spelling = SPECIALS[name].spelling
    for text in (spelling, f"a{spelling}b", f" {spelling}{spelling}\n"):
        ids = tokenizer.encode(text, bos=False)
        assert not set(ids) & set(tokenizer.added_ids.values())
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == [tokenizer.bos_id, *ids]


@given(text=st.text())
def test_encode_then_decode_is_the_identity(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_encode_equals_the_package_on_text_without_spellings(tokenizer: Tokenizer) -> None:
    text = 'Once upon a time, Lily said "no" 1234 times.\r\n\n\t Über naïve 你好 😀  '
    assert tokenizer.encode(text, bos=False) == load_raw(tokenizer.path).encode(text, add_special_tokens=False).ids


def test_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("", bos=False) == []
    assert tokenizer.decode([]) == ""


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadField, match=r"U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d")


@given(data=st.data())
def test_decode_equals_the_package_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    expected = load_raw(tokenizer.path).decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == expected


@given(data=st.data())
def test_incremental_pieces_join_to_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=60))
    decoder, pieces, at = IncrementalDecoder(tokenizer), [], 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        pieces.append(decoder.push(ids[at : at + step]))
        at += step
    pieces.append(decoder.flush())
    assert "".join(pieces) == tokenizer.decode(ids)


def test_half_a_character_is_never_emitted(tokenizer: Tokenizer) -> None:
    text = "a€😀é\u0301z"
    singles = [
        id for byte in text.encode() for id in range(len(tokenizer)) if tokenizer.token_bytes(id) == bytes([byte])
    ]
    decoder, shown = IncrementalDecoder(tokenizer), ""
    for id in singles:
        piece = decoder.push([id])
        assert "\ufffd" not in piece
        shown += piece
        assert text.startswith(shown)
    assert shown + decoder.flush() == text


def test_unfinished_character_becomes_one_replacement_on_flush(tokenizer: Tokenizer) -> None:
    ids = [
        id for byte in "😀".encode()[:3] for id in range(len(tokenizer)) if tokenizer.token_bytes(id) == bytes([byte])
    ]
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push(ids) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(tokenizer.encode("ok", bos=False)) == "ok"


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([len(tokenizer), 10**9, -1]) == ""


def test_decoding_cost_does_not_grow_with_what_was_decoded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Once upon a time there was a little dog. ", bos=False)

    def seconds(decoder: IncrementalDecoder) -> float:
        start = time.perf_counter()
        for _ in range(300):
            for id in ids:
                decoder.push([id])
        return time.perf_counter() - start

    decoder = IncrementalDecoder(tokenizer)
    first = min(seconds(decoder) for _ in range(3))
    for _ in range(20):
        decoder.push(ids * 500)
    assert min(seconds(decoder) for _ in range(3)) < 10 * first  # quadratic work would be hundreds of times slower


# Faults of the file


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointFile, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", "\x00"])
def test_unreadable_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadTokenizer):
        Tokenizer.from_dir(tmp_path)


def test_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(MissingCheckpointFile):
        Tokenizer.from_dir(tmp_path)


def test_vocabulary_that_is_not_byte_level(tmp_path: Path) -> None:
    body = json.loads(write_tokenizer(tmp_path).read_text())
    body["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(BadTokenizer, match="ByteLevel"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("name", list(SPECIALS))
def test_missing_special_token_is_named_with_what_it_breaks(tmp_path: Path, name: str) -> None:
    body = json.loads(write_tokenizer(tmp_path).read_text())
    special = SPECIALS[name]
    body["added_tokens"] = [token for token in body["added_tokens"] if token["content"] != special.spelling]
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(BadTokenizer) as caught:
        Tokenizer.from_dir(tmp_path)
    assert all(part in str(caught.value) for part in (special.spelling, special.needed_for))


# Engram classes


def by_definition(raw: tokenizers.Tokenizer) -> Iterator[str]:
    """The key of each id, from the rules with Python's own Unicode tables (no final sigma in the small vocabulary)."""
    import re
    import unicodedata

    for id in range(raw.get_vocab_size()):
        text = raw.decode([id], skip_special_tokens=False)
        if "\ufffd" in text:
            yield raw.id_to_token(id) or ""
            continue
        key = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        key = "".join(character for character in key if unicodedata.category(character) != "Mn").lower()
        key = re.sub(r"[ \t\r\n]+", " ", key)
        yield (" " if key == " " else key.strip(" \t\n\r\x0b\x0c\x85\u2028\u2029")) or text


def test_engram_classes_follow_the_definition(tokenizer: Tokenizer) -> None:
    seen: dict[str, int] = {}
    expected = [seen.setdefault(key, len(seen)) for key in by_definition(load_raw(tokenizer.path))]
    classes = tokenizer.engram_classes()
    assert (classes.dtype, classes.shape) == (np.int64, (len(tokenizer),))
    assert classes.tolist() == expected
    assert classes.max() + 1 == len(seen) < len(tokenizer)


def test_engram_classes_on_hand_made_entries() -> None:
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    same = [
        ("Zürich", "zurich"),
        ("\uff3aurich", "zurich"),  # full-width Z
        (" zurich", "zurich"),
        ("\t\r\n", "  "),
        ("\u0391\u03a3", "\u03b1\u03c3"),  # capital sigma has no final form
        ("\ufb01n", "fin"),  # ligature fi
        ("x  y", "x\ty"),
    ]
    different = [
        ("\u03b1\u03c2", "\u03b1\u03c3"),  # a final sigma that was there stays
        ("\x0b", "\x0c"),  # white space outside the four: strips to nothing, so each is itself
        ("\x0b", "  "),
        ("\u0301", "\u0300"),  # accents alone strip to nothing
        ("fin", "zurich"),
        ("x  y", "fin"),
    ]
    texts = list(dict.fromkeys(text for pair in same + different for text in pair))
    spellings = ["".join(piece for piece, _ in byte_level.pre_tokenize_str(text)) for text in texts]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({spelling: id for id, spelling in enumerate(spellings)}, []))
    raw.decoder = tokenizers.decoders.ByteLevel()
    assert [raw.decode([id]) for id in range(len(texts))] == texts
    classes = dict(zip(texts, compress_vocabulary(raw).tolist(), strict=True))
    for left, right in same:
        assert classes[left] == classes[right], (left, right)
    for left, right in different:
        assert classes[left] != classes[right], (left, right)
    assert [classes[text] for text in texts[:2]] == [0, 0]  # numbered in order of first appearance


def test_engram_classes_keep_broken_bytes_apart(tokenizer: Tokenizer) -> None:
    classes = tokenizer.engram_classes()
    high = [id for id in range(len(tokenizer)) if tokenizer.token_bytes(id) in [bytes([b]) for b in range(128, 256)]]
    assert len(high) == len(set(classes[high])) == 128


def test_engram_classes_of_4096_ids_take_a_tenth_of_a_second(tokenizer: Tokenizer) -> None:
    raw = build_raw_tokenizer()
    raw.add_tokens([f"word number {i}" for i in range(4096 - raw.get_vocab_size())])

    def seconds() -> float:
        start = time.perf_counter()
        assert len(compress_vocabulary(raw)) == 4096
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.1
