"""Characters <-> token ids, from a checkpoint folder's `tokenizer.json`. Source: online API specification, section 2.1.

Two rules shape this file. Plain text never becomes a control token: user text is encoded without the added vocabulary,
so a spelling such as `<think>` stays ordinary characters. And half a character is never emitted: tokens are bytes, and
a character may span several of them.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, normalizers

from benthic.errors import BadField, BadTokenizer, MissingCheckpointFile

FILE_NAME = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Special:
    """One special token of the V4.1 format."""

    spelling: str
    needed_for: str  # what there is none of without it
    control: bool  # structure that only a prompt may hold: the model must never produce it


SPECIALS: Mapping[str, Special] = MappingProxyType(
    {
        "bos": Special("<｜begin▁of▁sentence｜>", "prompt", control=True),
        "eos": Special("<｜end▁of▁sentence｜>", "end of an answer, and no history", control=False),
        "pad": Special("<｜▁pad▁｜>", "Engram history before the first token", control=True),
        "system": Special("<｜System｜>", "thinking, system message, tool or response format", control=True),
        "fim_hole": Special("<｜fim▁hole｜>", "fill-in-the-middle completion", control=True),
        "fim_begin": Special("<｜fim▁begin｜>", "fill-in-the-middle completion", control=True),
        "fim_end": Special("<｜fim▁end｜>", "fill-in-the-middle completion", control=True),
        "user": Special("<｜User｜>", "conversation", control=True),
        "assistant": Special("<｜Assistant｜>", "conversation", control=True),
        "think_open": Special("<think>", "thinking and no tool", control=False),
        "think_close": Special("</think>", "assistant turn", control=False),
        "dsml": Special("｜DSML｜", "tool call", control=False),
        "reminder": Special("<｜latest_reminder｜>", "reminder message", control=True),
        "image": Special("<｜image｜>", "image", control=True),
        "ref_open": Special("<｜ref｜>", "grounding in an answer", control=False),
        "ref_close": Special("<｜/ref｜>", "grounding in an answer", control=False),
        "box_open": Special("<｜box｜>", "grounding in an answer", control=False),
        "box_close": Special("<｜/box｜>", "grounding in an answer", control=False),
        "point_open": Special("<｜point｜>", "grounding in an answer", control=False),
        "point_close": Special("<｜/point｜>", "grounding in an answer", control=False),
        "polygon_open": Special("<｜polygon｜>", "grounding in an answer", control=False),
        "polygon_close": Special("<｜/polygon｜>", "grounding in an answer", control=False),
    }
)

_PLACEHOLDERS = ("place▁holder", "place_holder")  # added tokens that stand for nothing; part of their spelling


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of a byte-level vocabulary: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A byte-level BPE tokenizer whose special tokens were checked at start-up."""

    def __init__(self, path: Path):
        """path is a `tokenizer.json`. Raises MissingCheckpointFile, BadTokenizer."""
        self.path = path
        self._full = load_raw(path)
        self._plain = tokenizers.Tokenizer(self._full.model)  # shares the vocabulary, without the added tokens
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (value := getattr(self._full, part)) is not None:
                setattr(self._plain, part, value)
        self._bytes: dict[int, bytes] = {}
        added = self._full.get_added_tokens_decoder()
        spelled = {token.content: id for id, token in added.items()}
        for special in SPECIALS.values():
            if special.spelling not in spelled:
                raise BadTokenizer(
                    path,
                    f"special token {special.spelling} is not among its {len(added)} added tokens, and without it "
                    f"there is no {special.needed_for}; use the file that ships with the V4.1 checkpoint",
                )
        self.special_ids: Mapping[str, int] = MappingProxyType(
            {name: spelled[special.spelling] for name, special in SPECIALS.items()}
        )
        self.added_ids: Mapping[str, int] = MappingProxyType(spelled)  # every added token, by spelling
        self.control_ids: tuple[int, ...] = tuple(
            sorted(
                {self.special_ids[name] for name, special in SPECIALS.items() if special.control}
                | {id for spelling, id in spelled.items() if any(part in spelling for part in _PLACEHOLDERS)}
            )
        )
        self.bos_id, self.eos_id = self.special_ids["bos"], self.special_ids["eos"]

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint folder."""
        return cls(Path(path) / FILE_NAME)

    def __len__(self) -> int:
        """Ids in the vocabulary, added tokens included."""
        return self._full.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of plain text; no spelling in `text` yields a control id. bos puts the begin-of-sentence id first.

        Raises BadField when `text` holds half of a surrogate pair, which no UTF-8 can carry.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"half of a surrogate pair, U+{ord(text[error.start]):04X} at character {error.start}"
            raise BadField("text", half, "valid Unicode") from error
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if bos else ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for: UTF-8 text, or a part of a character. An id outside the vocabulary has none."""
        found = self._bytes.get(id)
        if found is None:
            spelling = self._full.id_to_token(id) if id >= 0 else None
            found = self._bytes[id] = b"" if spelling is None else _spelling_bytes(spelling)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens spelled out. Bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def engram_classes(self) -> NDArray[np.int64]:
        """See `compress_vocabulary`."""
        return compress_vocabulary(self._full)


class IncrementalDecoder:
    """Token ids in, text out as soon as its characters are whole. O(1) amortised per token.

    The pieces joined equal `Tokenizer.decode` of all ids, whatever the ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._bytes_of = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that became whole with these ids; "" while a character is still open."""
        return self._utf8.decode(b"".join(map(self._bytes_of, ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character. The decoder then starts anew."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def load_raw(path: Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json` as the `tokenizers` package sees it. Raises MissingCheckpointFile, BadTokenizer."""
    if not path.is_file():
        raise MissingCheckpointFile(path, f"a checkpoint folder holds its tokenizer as {FILE_NAME}")
    try:
        raw = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception for every fault of the file
        raise BadTokenizer(path, str(error)) from error
    if not isinstance(raw.decoder, decoders.ByteLevel):
        raise BadTokenizer(path, f"its decoder is {type(raw.decoder).__name__}, want ByteLevel: V4.1 is byte-level BPE")
    return raw


def compress_vocabulary(raw: tokenizers.Tokenizer) -> NDArray[np.int64]:
    """Token id -> Engram class: ids whose text differs only in case, accents or width share a class.

    returns  [len(vocabulary)] int64, classes in order of first appearance; max + 1 is the number C of classes.
    Source   model specification, section 2.9 (token compression). Half a second for 129280 ids.
    """
    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(tokenizers.Regex(r"^ $"), "\ue000"),  # keeps a lone space through the strip
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    ).normalize_str
    size = raw.get_vocab_size(with_added_tokens=True)
    classes = np.empty(size, dtype=np.int64)
    seen: dict[str, int] = {}
    for id, text in enumerate(raw.decode_batch([[id] for id in range(size)], skip_special_tokens=False)):
        key = (raw.id_to_token(id) or text) if "\ufffd" in text else (normalise(text) or text)
        classes[id] = seen.setdefault(key, len(seen))
    return classes


def _spelling_bytes(spelling: str) -> bytes:
    """Bytes of a vocabulary entry: by the byte alphabet, or as UTF-8 when a character of it is outside the alphabet."""
    try:
        return bytes([_BYTE_OF[character] for character in spelling])
    except KeyError:
        return spelling.encode()
