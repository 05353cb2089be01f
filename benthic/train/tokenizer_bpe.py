"""Train the small model's tokenizer: byte-level BPE with every special token of the V4.1 format.

The split pattern is V4's with digits taken singly, so that codes and sums are regular. Source: online API
specification, section 2.1 (spellings); the minnow specification, section 5.2 (ids, pattern, share of template text).
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benthic.text.tokenizer import SPECIALS

FIRST = ("bos", "eos", "pad")  # ids 0, 1, 2; the other special tokens stand at the end of the vocabulary

PATTERNS = (
    r"\p{N}",
    "[一-龥぀-ゟ\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer with `vocab_size` ids, special tokens included.

    texts  plain text without special spellings; a text that stands n times weighs n.
    """
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    last = [special.spelling for name, special in SPECIALS.items() if name not in FIRST]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(last),
        special_tokens=[_added(SPECIALS[name].spelling) for name in FIRST],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([_added(spelling) for spelling in last])
    return tokenizer


def save(tokenizer: Tokenizer, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def _added(spelling: str) -> AddedToken:
    return AddedToken(spelling, special=True, normalized=False)
