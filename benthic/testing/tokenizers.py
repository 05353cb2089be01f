"""A small byte-level BPE tokenizer in the V4.1 form, built in milliseconds, for tests that need real token ids."""

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


def build_raw_tokenizer(vocab_size: int = 512) -> tokenizers.Tokenizer:
    """BOS, EOS, pad at ids 0 to 2, then 256 bytes, then merges, then the other 19 special tokens at the very end.

    vocab_size at least 278; exactly that many ids, or fewer when the built-in text has no more pairs to merge.
    """
    first = [SPECIALS[name].spelling for name in ("bos", "eos", "pad")]
    last = [special.spelling for name, special in SPECIALS.items() if name not in ("bos", "eos", "pad")]
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
        vocab_size=vocab_size - len(last),
        special_tokens=[tokenizers.AddedToken(spelling, special=True, normalized=False) for spelling in first],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_WORDS.splitlines(), trainer)
    raw.add_tokens([tokenizers.AddedToken(spelling, special=False, normalized=False) for spelling in last])
    return raw


def write_tokenizer(folder: Path, vocab_size: int = 512) -> Path:
    """Save the tokenizer into a checkpoint folder; returns the file."""
    path = folder / FILE_NAME
    build_raw_tokenizer(vocab_size).save(str(path))
    return path


def build_tokenizer(folder: Path, vocab_size: int = 512) -> Tokenizer:
    """The same, loaded."""
    return Tokenizer(write_tokenizer(folder, vocab_size))
