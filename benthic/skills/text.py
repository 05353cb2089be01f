"""Skills of plain text: copy a line, find codes in prose.

Answers are short and closed, so that a right one is right to the character; the wording of everything else varies, so
that the skill is learned and not a sentence.
"""

import math
import random
from typing import Any

from benthic.skills.base import Material, Split, Task

CHARACTERS_PER_TOKEN = 3.8  # of prose, a little below what minnow's tokenizer needs, so that lengths are kept

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
NEEDLE_TOKENS = (100, 1000)  # shortest and longest text when no length is asked for
COPY_ASKS = ("Repeat line {n}.", "Write line {n} again.", "Copy line {n} exactly.", "What does line {n} say?")


def conversation(skill: str, turns: list[tuple[str, str]], **fields: Any) -> Task:
    """A task of plain turns: (user, answer)."""
    messages: list[dict[str, Any]] = []
    for user, answer in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return Task(skill, tuple(messages), **fields)


# ---- copy ------------------------------------------------------------------------------------------------------------


def copy(rng: random.Random, material: Material, split: Split) -> Task:
    """2 to 8 numbered lines, then up to 3 of them asked for. Held-out lines contain a number that ends in 7."""
    lines = [_line(rng, material, split) for _ in range(rng.randint(2, 8))]
    listing = "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))
    chosen = rng.sample(range(len(lines)), min(len(lines), rng.randint(1, 3)))
    ask = rng.choice(COPY_ASKS)
    turns = [(ask.format(n=i + 1), lines[i]) for i in chosen]
    turns[0] = (f"{listing}\n\n{turns[0][0]}", turns[0][1])
    return conversation("copy", turns, level=f"{len(lines)} lines")


def _line(rng: random.Random, material: Material, split: Split) -> str:
    kind = rng.random()
    if split == "train" and kind < 0.3:
        return rng.choice(material.sentences)
    words = rng.sample(material.words, rng.randint(2, 7))
    if split == "held_out" or kind < 0.65:
        words.insert(rng.randrange(len(words) + 1), code(rng, split))
    return " ".join(words)


def code(rng: random.Random, split: Split) -> str:
    """Four digits; a code whose last digit is 7 is held out, every other belongs to training."""
    last = "7" if split == "held_out" else rng.choice("012345689")
    return f"{rng.randrange(1000):03d}{last}"


# ---- needle ----------------------------------------------------------------------------------------------------------


def needle(
    rng: random.Random,
    material: Material,
    split: Split,
    *,
    tokens: int | None = None,
    needles: int | None = None,
    questions: int | None = None,
    depth: float | None = None,
) -> Task:
    """Codes hidden in prose, then questions, one a turn.

    tokens     about the length of the text in minnow's tokenizer; default: log-uniform between NEEDLE_TOKENS
    needles    codes, default 1 to 6; questions: at most so many, default 1 to 4
    depth      where the code that is asked for first stands, from 0, the beginning, to 1; default: anywhere
    """
    if tokens is None:
        low, high = NEEDLE_TOKENS
        tokens = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    count = needles or rng.randint(1, 6)
    asked = min(count, questions or rng.randint(1, 4))
    keys = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in OBJECTS], count)
    codes = [code(rng, split) for _ in keys]
    hidden = [rng.choice(STATEMENTS).format(key=k, code=c) for k, c in zip(keys, codes, strict=True)]
    prose = filler(rng, material, round(tokens * CHARACTERS_PER_TOKEN) - sum(map(len, hidden)) - 150)
    chosen = rng.sample(range(count), asked)
    places = [rng.randrange(len(prose) + 1) for _ in hidden]
    if depth is not None:
        places[chosen[0]] = round(depth * len(prose))
    for place, i in sorted(((place, i) for i, place in enumerate(places)), reverse=True):
        prose.insert(place, hidden[i])
    ask = rng.choice(QUESTIONS)
    first = "\n\n".join(part for part in (rng.choice(OPENINGS), " ".join(prose)) if part)
    turns = [(ask.format(key=keys[i]), codes[i]) for i in chosen]
    turns[0] = (f"{first}\n\n{turns[0][0]}", turns[0][1])
    return conversation("needle", turns, level=f"{tokens} tokens")


def filler(rng: random.Random, material: Material, characters: int) -> list[str]:
    """Sentences of about so many characters in all, in runs that belong together."""
    prose: list[str] = []
    room, at = characters, rng.randrange(len(material.sentences))
    while room > 0:
        if rng.random() < 0.08:
            at = rng.randrange(len(material.sentences))
        sentence = material.sentences[at % len(material.sentences)]
        prose.append(sentence)
        room -= len(sentence) + 1
        at += 1
    return prose
