"""A small byte-level BPE tokenizer in the V4.1 form, built in milliseconds, for tests that need real token ids."""

import random
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benthic.text.tokenizer import FILE_NAME, SPECIALS, Tokenizer

_WORDS = """
Once upon a time there was a little girl named Lily who lived in a small house near the sea. She had a big brother and
a dog, and every day they played in the garden. "What is your name?" she said. The sun was warm and the water was cold.
One day, the dog found a red box. "Look!" said Lily. They opened it and saw a letter with the number 42 on it, naïve.
You are a helpful assistant. Think step by step, then answer. The weather in Paris is sunny. {"city": "Paris", "n": 3}
Reasoning Effort: 75 calls invoke name parameter string true false ## Tools Response Format 你好世界。今天天气很好 😀
"""


# the order puts image at 4090 and system, the drafter's noise id, at 4089 of 4096, as the tiny configurations say
_FIRST = ("bos", "eos", "pad")
_LAST = (
    *("ref_open", "ref_close", "box_open", "box_close", "point_open", "point_close", "polygon_open", "polygon_close"),
    *("fim_hole", "fim_begin", "fim_end", "reminder", "system", "image"),
    *("user", "assistant", "think_open", "think_close", "dsml"),
)
SMALL = 512  # ids that the built-in text is enough for


def build_raw_tokenizer(vocab_size: int = SMALL) -> tokenizers.Tokenizer:
    """BOS, EOS, pad at ids 0 to 2, then 256 bytes, then merges, then the other 19 special tokens at the very end.

    vocab_size  from 278 to 16384; the tokenizer has exactly that many ids. Above 512 made-up words fill it.
    """
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(
                tokenizers.Regex(
                    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_LAST),
        special_tokens=[_token(name, special=True) for name in _FIRST],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([*_WORDS.splitlines(), *_made_up_words(max(0, vocab_size - SMALL))], trainer)
    raw.add_tokens([_token(name, special=False) for name in _LAST])
    assert raw.get_vocab_size() == vocab_size, f"{raw.get_vocab_size()} ids, want {vocab_size}"
    return raw


def _token(name: str, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(SPECIALS[name].spelling, special=special, normalized=False)


def _made_up_words(count: int) -> list[str]:
    """Different words of five syllables, each twice, so that each can become a token."""
    rng = random.Random(7)
    words = ["".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(5)) for _ in range(count)]
    return [f" {word}" for word in words for _ in range(2)]


def write_tokenizer(folder: Path, vocab_size: int = SMALL) -> Path:
    """Save the tokenizer into a checkpoint folder; returns the file."""
    path = folder / FILE_NAME
    build_raw_tokenizer(vocab_size).save(str(path))
    return path


def build_tokenizer(folder: Path, vocab_size: int = SMALL) -> Tokenizer:
    """The same, loaded."""
    return Tokenizer(write_tokenizer(folder, vocab_size))
