"""Skill documents made by seeded generators: what each teaches, a held-out split, an exact checker.

copy    repeat one of several numbered lines: attention, window, rotary positions.
needle  codes hidden in prose, asked for at the end: compressor, indexer, top-k sharing, candidates, prefix cache.

Source: the minnow specification, sections 2 and 5.3.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "grey", "golden", "silver", "purple")
OBJECTS = (
    "box", "door", "key", "chest", "bag", "safe", "locker", "gate", "drawer", "case", "jar", "cup",
    "book", "boat", "house", "car", "tent", "lamp", "clock", "basket", "bottle", "suitcase", "cabinet", "tower",
)  # fmt: skip
STATEMENTS = (
    "The code of the {key} is {code}.",
    "Remember: the code of the {key} is {code}.",
    "The {key} has the code {code}.",
    "The code for the {key} is {code}.",
)
QUESTIONS = (
    "What is the code of the {key}?",
    "Tell me the code of the {key}.",
    "Which code does the {key} have?",
    "What is the code for the {key}?",
)
OPENINGS = (
    "Read the text and answer the question.",
    "Here is a text with some codes in it.",
    "Find the code in this text.",
    "",
)
MAX_LINE_WORDS = 7  # of a line to copy
COPY_ASKS = ("Repeat line {n}.", "Write line {n} again.", "Copy line {n} exactly.", "What does line {n} say?")


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """One conversation. The answers are what the model must produce, exactly."""

    skill: str
    turns: tuple[Turn, ...]


def correct(answer: str, want: str) -> bool:
    """The exact checker of both skills: the same characters, but for white space at the ends."""
    return answer.strip() == want


def needle(
    rng: random.Random,
    sentences: Sequence[str],
    split: Split,
    *,
    characters: int,
    needles: int | None = None,
    questions: int | None = None,
) -> Document:
    """`needles` codes (1 to 6) in about `characters` of prose, then up to 4 questions, one a turn.

    A code whose last digit is 7 belongs to the held-out split, every other code to training.
    """
    count = needles or rng.randint(1, 6)
    asked = min(count, questions or rng.randint(1, 4))
    keys = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in OBJECTS], count)
    codes = [_code(rng, split) for _ in keys]
    hidden = [rng.choice(STATEMENTS).format(key=k, code=c) for k, c in zip(keys, codes, strict=True)]
    room = max(characters - sum(map(len, hidden)) - 150, 0)
    prose: list[str] = []
    at = rng.randrange(len(sentences))
    while sum(len(s) + 1 for s in prose) < room:
        if rng.random() < 0.08:
            at = rng.randrange(len(sentences))
        prose.append(sentences[at % len(sentences)])
        at += 1
    places = sorted(rng.randrange(len(prose) + 1) for _ in hidden)
    for place, sentence in reversed(list(zip(places, hidden, strict=True))):
        prose.insert(place, sentence)
    chosen = rng.sample(range(count), asked)
    ask = rng.choice(QUESTIONS)
    first = "\n\n".join(part for part in (rng.choice(OPENINGS), " ".join(prose)) if part)
    turns = [Turn(ask.format(key=keys[i]), codes[i]) for i in chosen]
    turns[0] = Turn(f"{first}\n\n{turns[0].user}", turns[0].answer)
    return Document("needle", tuple(turns))


def needle_characters(rng: random.Random, low: int = 400, high: int = 3600) -> int:
    """Length of a training needle document in characters, log-uniform."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def copy(rng: random.Random, words: Sequence[str], sentences: Sequence[str], split: Split) -> Document:
    """2 to 8 numbered lines, then up to 3 of them asked for. Held-out lines contain a number that ends in 7."""
    lines = [_line(rng, words, sentences, split) for _ in range(rng.randint(2, 8))]
    listing = "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))
    chosen = rng.sample(range(len(lines)), min(len(lines), rng.randint(1, 3)))
    ask = rng.choice(COPY_ASKS)
    turns = [Turn(ask.format(n=i + 1), lines[i]) for i in chosen]
    turns[0] = Turn(f"{listing}\n\n{turns[0].user}", turns[0].answer)
    return Document("copy", tuple(turns))


def _line(rng: random.Random, words: Sequence[str], sentences: Sequence[str], split: Split) -> str:
    code = _code(rng, split)
    kind = rng.random()
    if split == "train" and kind < 0.3:
        return rng.choice(sentences)
    chosen = rng.sample(words, rng.randint(2, MAX_LINE_WORDS))
    if split == "held_out" or kind < 0.65:
        chosen.insert(rng.randrange(len(chosen) + 1), code)
    return " ".join(chosen)


def _code(rng: random.Random, split: Split) -> str:
    last = "7" if split == "held_out" else rng.choice("012345689")
    return f"{rng.randrange(1000):03d}{last}"


def sentences_of(text: str) -> list[str]:
    """Sentences of one response, 20 to 200 characters each, for use as filler."""
    parts = re.split(r"(?<=[.!?])\s+", text)
    return [part for part in parts if 20 <= len(part) <= 200]
