"""The trained tokenizer: every special token at its place, digits one by one, any text there and back."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from benthic.text.tokenizer import FILE_NAME, SPECIALS, Tokenizer
from benthic.train import tokenizer_bpe
from tests.train.small import pairs

SIZE = 400
TEXTS = [row["response"] for row in pairs(1, 60)] + [
    "The year 1234 12345 1234.",
    "naïve 你好世界 Straße",
    "f(x) -> {'a': 1}",
] * 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "made" / FILE_NAME
    tokenizer_bpe.save(tokenizer_bpe.train_tokenizer(TEXTS, SIZE), path)
    return Tokenizer(path)


def test_it_has_exactly_the_ids_asked_for(tokenizer: Tokenizer) -> None:
    assert len(tokenizer) == SIZE
    assert all(tokenizer.token_bytes(id) for id in range(SIZE))


def test_special_tokens_stand_first_and_last(tokenizer: Tokenizer) -> None:
    ids = dict(tokenizer.special_ids)
    assert [ids.pop(name) for name in ("bos", "eos", "pad")] == [0, 1, 2]
    assert sorted(ids.values()) == list(range(SIZE - len(ids), SIZE))
    assert len(SPECIALS) == 22
    for name, id in tokenizer.special_ids.items():
        assert tokenizer.decode([id]) == SPECIALS[name].spelling


def test_special_spellings_are_one_token_for_the_encoding_and_plain_text_for_users(tokenizer: Tokenizer) -> None:
    raw = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    for name, special in SPECIALS.items():
        assert raw.encode(special.spelling).ids == [tokenizer.special_ids[name]]
        assert not set(tokenizer.encode(special.spelling, bos=False)) & set(tokenizer.special_ids.values())


def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    for text in ("1234", "12345", "0000", "x1234y", "3.14", "٣٤"):
        pieces = [tokenizer.token_bytes(id) for id in tokenizer.encode(text, bos=False)]
        for piece in pieces:
            digits = sum(character.isdigit() for character in piece.decode("utf-8", "ignore"))
            assert digits <= 1
            assert not digits or len(piece.decode()) == 1, (text, pieces)


def test_what_is_frequent_becomes_one_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" painted", bos=False)) == 1
    assert len(tokenizer.encode(" zyxwvut", bos=False)) > 3


def test_a_text_weighs_as_often_as_it_stands() -> None:
    rare, often = ["quixotic zebra"] * 2, ["common ground"] * 50
    made = tokenizer_bpe.train_tokenizer([*rare, *often], 290)
    assert made.encode(" ground").tokens == ["Ġground"]
    assert len(made.encode(" zebra").tokens) > 1


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n  \t", "naïve 你好 😀👩‍👩‍👧", "\0\x7f\u200b", "a\u0301 ﬁ Å", "<think> </think>", "don't"]
)
def test_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


@given(text=st.text(max_size=40))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_training_is_repeatable() -> None:
    first, again = (tokenizer_bpe.train_tokenizer(TEXTS, SIZE).to_str() for _ in range(2))
    assert first == again


def test_too_little_text_gives_fewer_ids() -> None:
    """The caller compares with the model config."""
    assert tokenizer_bpe.train_tokenizer(["ab ab"], 4096).get_vocab_size() < 300


def test_the_official_encoding_takes_it(tokenizer: Tokenizer) -> None:
    recipe = pytest.importorskip("deepseek_recipe")
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(tokenizer.path)))
    tool = recipe.ToolDefinition("f", "d", {"type": "object", "properties": {}})
    messages = [
        recipe.SystemMessage("Be brief."),
        recipe.UserMessage("Hi 12"),
        recipe.AssistantMessage("Yes."),
        recipe.UserMessage("Go"),
    ]
    for thinking in (True, False):
        ids = list(encoding.encode(recipe.Conversation(messages, thinking_mode=thinking, tools=[tool])))
        assert max(ids) < SIZE
        assert {"bos", "system", "user", "assistant", "think_close", "eos"} <= {
            name for name, id in tokenizer.special_ids.items() if id in ids
        }
