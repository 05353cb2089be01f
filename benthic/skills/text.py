"""Skills of plain text: copy a line, find codes in prose, recall items of a list, reckon, think in steps, remember.

Answers are short and closed, so that a right one is right to the character; the wording of everything else varies, so
that the skill is learned and not a sentence.
"""

import math
import random
from collections.abc import Iterator
from typing import Any

from benthic.skills.base import Material, Split, Task, belongs
from benthic.skills.words import ANIMALS, CITIES, COLOURS, COUNTED, FOODS, NAMES, OBJECTS

CHARACTERS_PER_TOKEN = 3.88  # of prose, a little below what minnow's tokenizer needs, so that lengths are kept


def conversation(skill: str, turns: list[tuple[str, str]], **fields: Any) -> Task:
    """A task of plain turns: (user, answer)."""
    messages: list[dict[str, Any]] = []
    for user, answer in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return Task(skill, tuple(messages), **fields)


def bucket(value: float, edges: tuple[int, ...], unit: str) -> str:
    """The level of a size: the first edge that it does not pass."""
    return f"{next((edge for edge in edges if value <= edge), edges[-1])} {unit}"


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


# ---- copy ------------------------------------------------------------------------------------------------------------

COPY_ASKS = ("Repeat line {n}.", "Write line {n} again.", "Copy line {n} exactly.", "What does line {n} say?")


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

NEEDLE_TOKENS = (100, 4000)  # shortest and longest text when no length is asked for
NEEDLE_LEVELS = (128, 256, 512, 1024, 2048, 4000)
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
    length = tokens or log_uniform(rng, *NEEDLE_TOKENS)
    count = needles or rng.randint(1, 6)
    asked = min(count, questions or rng.randint(1, 4))
    keys = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in OBJECTS], count)
    codes = [code(rng, split) for _ in keys]
    hidden = [rng.choice(STATEMENTS).format(key=k, code=c) for k, c in zip(keys, codes, strict=True)]
    prose = filler(rng, material, round(length * CHARACTERS_PER_TOKEN) - sum(map(len, hidden)) - 150)
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
    return conversation(
        "needle", turns, level=f"{tokens} tokens" if tokens else bucket(length, NEEDLE_LEVELS, "tokens")
    )


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


# ---- recall ----------------------------------------------------------------------------------------------------------

RECALL_ITEMS = (5, 100)
RECALL_LEVELS = (10, 20, 50, 100)
MARKS = ("{n}. ", "{n}) ", "{n}: ", "Item {n}: ")
RECALL_ASKS = ("What is item {n}?", "Which item is number {n}?", "Tell me item {n} of the list.", "What is number {n}?")
PLACE_ASKS = ("Which number has {item}?", "What is the number of {item}?", "Where in the list is {item}?")


def recall(
    rng: random.Random,
    material: Material,
    split: Split,
    *,
    items: int | None = None,
    long: bool | None = None,
) -> Task:
    """A numbered list, then up to 4 items asked for by number, and now and then a number by its item.

    items  how many, default log-uniform from 5 to 100
    long   whether a sentence follows each item, so that 100 items take some 3000 tokens; default: one list in five
    """
    count = items or log_uniform(rng, *RECALL_ITEMS)
    while True:
        things = _different(rng, material, count)
        if belongs(split, "recall", *things):
            break
    mark = rng.choice(MARKS)
    lines = [mark.format(n=i) + thing for i, thing in enumerate(things, 1)]
    if rng.random() < 0.2 if long is None else long:
        lines = [f"{line}. {rng.choice(material.sentences)}" for line in lines]
        listing = "\n".join(lines)
    else:
        listing = rng.choice(("\n", ", ")).join(lines)
    ask, place_ask = rng.choice(RECALL_ASKS), rng.choice(PLACE_ASKS)
    turns: list[tuple[str, str]] = []
    for i in rng.sample(range(count), min(count, rng.randint(1, 4))):
        by_number = rng.random() < 0.75
        turns.append((ask.format(n=i + 1), things[i]) if by_number else (place_ask.format(item=things[i]), str(i + 1)))
    turns[0] = (f"{listing}\n\n{turns[0][0]}", turns[0][1])
    return conversation("recall", turns, level=f"{items} items" if items else bucket(count, RECALL_LEVELS, "items"))


def _different(rng: random.Random, material: Material, count: int) -> list[str]:
    """Items, each a word or two, no two the same."""
    found: dict[str, None] = {}
    while len(found) < count:
        first, second = rng.sample(material.words, 2)
        found[first if rng.random() < 0.6 and count <= len(material.words) // 2 else f"{first} {second}"] = None
    return list(found)


# ---- arithmetic ------------------------------------------------------------------------------------------------------

ARITHMETIC = {"addition": 5, "subtraction": 2, "comparison": 2, "counting": 2}  # how often, to each other
ADD_ASKS = ("What is {a} + {b}?", "{a} + {b} =", "Add {a} and {b}.", "How much is {a} plus {b}?", "{a} plus {b}?")
SUBTRACT_ASKS = ("What is {a} - {b}?", "{a} - {b} =", "Take {b} from {a}.", "How much is {a} minus {b}?")
LARGER_ASKS = ("Which is larger, {a} or {b}?", "Which number is greater: {a} or {b}?", "Name the larger one: {a}, {b}.")
SMALLER_ASKS = ("Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?", "Name the smaller one: {a}, {b}.")
GREATER_ASKS = ("Is {a} larger than {b}?", "Is {a} greater than {b}?", "Is {a} more than {b}?")
OFTEN_ASKS = (
    "How often does {word} stand in this list? {listing}",
    "Count the word {word}: {listing}",
    "{listing}\nHow many times is {word} there?",
)
COUNT_ASKS = ("Count from {a} to {b}.", "Write the numbers from {a} to {b}.")


def arithmetic(rng: random.Random, material: Material, split: Split, *, kind: str | None = None) -> Task:
    """1 to 6 questions of one kind of ARITHMETIC, default by their weights. Held-out sums have two digits each."""
    kind = kind or rng.choices(list(ARITHMETIC), list(ARITHMETIC.values()))[0]
    questions = {"addition": _addition, "subtraction": _subtraction, "comparison": _comparison, "counting": _counting}
    drawn = questions[kind](rng, split)
    return conversation("arithmetic", [next(drawn) for _ in range(rng.randint(1, 6))], level=kind)


def _addition(rng: random.Random, split: Split) -> Iterator[tuple[str, str]]:
    while True:
        low = 1 if split == "train" and rng.random() < 0.1 else 10
        a, b = rng.randint(low, 99), rng.randint(low, 99)
        if belongs(split, "addition", min(a, b), max(a, b)):
            yield rng.choice(ADD_ASKS).format(a=a, b=b), str(a + b)


def _subtraction(rng: random.Random, split: Split) -> Iterator[tuple[str, str]]:
    while True:
        b, a = sorted((rng.randint(1, 99), rng.randint(1, 99)))
        if belongs(split, "subtraction", a, b):
            yield rng.choice(SUBTRACT_ASKS).format(a=a, b=b), str(a - b)


def _comparison(rng: random.Random, split: Split) -> Iterator[tuple[str, str]]:
    while True:
        a = rng.randrange(1000) if rng.random() < 0.5 else rng.randrange(100)
        b = max(a + rng.randint(-12, 12), 0) if rng.random() < 0.4 else rng.randrange(1000)
        if a == b or not belongs(split, "comparison", min(a, b), max(a, b)):
            continue
        kind = rng.randrange(3)
        if kind == 0:
            yield rng.choice(LARGER_ASKS).format(a=a, b=b), str(max(a, b))
        elif kind == 1:
            yield rng.choice(SMALLER_ASKS).format(a=a, b=b), str(min(a, b))
        else:
            yield rng.choice(GREATER_ASKS).format(a=a, b=b), "yes" if a > b else "no"


def _counting(rng: random.Random, split: Split) -> Iterator[tuple[str, str]]:
    while True:
        if rng.random() < 0.3:
            a = rng.randint(1, 94)
            b = a + rng.randint(2, 5)
            if belongs(split, "count", a, b):
                yield rng.choice(COUNT_ASKS).format(a=a, b=b), ", ".join(map(str, range(a, b + 1)))
            continue
        kinds = rng.sample(ANIMALS + FOODS, rng.randint(2, 4))
        words = [rng.choice(kinds) for _ in range(rng.randint(3, 10))]
        word = rng.choice(words)
        if belongs(split, "often", word, *words):
            yield rng.choice(OFTEN_ASKS).format(word=word, listing=", ".join(words)), str(words.count(word))


# ---- thinking --------------------------------------------------------------------------------------------------------

GAINS = (
    "{name} buys {n} more",
    "{name} finds {n} more",
    "{other} gives {name} {n} more",
    "then {name} gets {n} from {other}",
)
LOSSES = ("{name} gives {n} to {other}", "{name} loses {n}", "{name} sells {n}", "then {other} takes {n} of them")
EFFORTS = ("low", None, "max")  # of the tasks that think; None is high


def thinking(rng: random.Random, material: Material, split: Split, *, think: bool | None = None) -> Task:
    """Something gained or lost twice, and how much is left. The derivation names both steps.

    think  whether it is to be thought about first, default: two tasks in three. More effort, more words: "low" writes
           the two steps, high says what it starts from, "max" checks them by going back.
    """
    while True:
        start = rng.randint(5, 60)
        first, second = (rng.randint(1, 30) * rng.choice((1, -1)) for _ in range(2))
        middle, end = start + first, start + first + second
        if middle >= 0 and end >= 0 and belongs(split, "thinking", start, first, second):
            break
    (name, other), things = rng.sample(NAMES, 2), rng.choice(COUNTED)
    steps = [rng.choice(GAINS if n > 0 else LOSSES).format(name=name, other=other, n=abs(n)) for n in (first, second)]
    story = f"{name} has {start} {things}. " + " ".join(f"{step[0].upper()}{step[1:]}." for step in steps)
    question = rng.choice(("How many {things} does {name} have now?", "How many {things} are left for {name}?"))
    user = f"{story} {question.format(things=things, name=name)}"
    answer: dict[str, Any] = {"role": "assistant", "content": str(end)}
    if not (rng.random() < 2 / 3 if think is None else think):
        return Task("thinking", ({"role": "user", "content": user}, answer), level="direct")
    effort = rng.choice(EFFORTS)
    answer["reasoning_content"] = _derivation(effort, start, first, middle, second, end)
    level = f"thinking, {effort or 'high'}"
    return Task("thinking", ({"role": "user", "content": user}, answer), thinking=True, effort=effort, level=level)


def _derivation(effort: str | None, start: int, first: int, middle: int, second: int, end: int) -> str:
    forward = f"{_step(start, first)}. {_step(middle, second)}."
    if effort == "low":
        return forward
    said = f"At first there are {start}. {forward}"
    return f"{said} Check: {_step(end, -second)}. {_step(middle, -first)}." if effort == "max" else said


def _step(value: int, change: int) -> str:
    return f"{value} {'+' if change > 0 else '-'} {abs(change)} = {value + change}"


# ---- memory ----------------------------------------------------------------------------------------------------------

FACTS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (  # what is said, what is asked, values
    (("My favourite colour is {x}.", "I like the colour {x} best."), ("What is my favourite colour?",), COLOURS),
    (("I live in {x}.", "My home is in {x}."), ("Where do I live?", "In which city do I live?"), CITIES),
    (("My favourite food is {x}.", "I like to eat {x} best."), ("What is my favourite food?",), FOODS),
    (("I have a {x} at home.", "My pet is a {x}."), ("Which pet do I have?", "What kind of pet do I have?"), ANIMALS),
    (("I have lost my {x}.", "I cannot find my {x}."), ("What have I lost?", "What am I looking for?"), OBJECTS),
)
GREETINGS = ("Hello, my name is {x}.", "Hi, I am {x}.", "My name is {x}.", "Good morning! I am {x}.")
NAME_ASKS = ("What is my name?", "Do you remember my name?", "Who am I?")
NOTED = "I will remember that."


def memory(rng: random.Random, material: Material, split: Split, *, turns: int | None = None) -> Task:
    """The user's name and one fact, said at first and asked for at the end, over `turns` user turns, default 2 to 6."""
    said_forms, ask_forms, values = rng.choice(FACTS)
    while True:
        name, value = rng.choice(NAMES), rng.choice(values)
        if belongs(split, "memory", name, value):
            break
    count = turns or rng.randint(2, 6)
    greeting, said = rng.choice(GREETINGS).format(x=name), rng.choice(said_forms).format(x=value)
    hello = f"Hello, {name}!"
    asks = [(rng.choice(NAME_ASKS), name), (rng.choice(ask_forms), value)]
    rng.shuffle(asks)
    apart = count >= 4 or (count == 3 and rng.random() < 0.5)
    said_turns = [(greeting, hello), (said, NOTED)] if apart else [(f"{greeting} {said}", hello)]
    asks = asks[: count - len(said_turns)]
    between = count - len(said_turns) - len(asks)
    return conversation(
        "memory",
        [*said_turns, *(_small_talk(rng, material) for _ in range(between)), *asks],
        level=f"{count} turns",
    )


def _small_talk(rng: random.Random, material: Material) -> tuple[str, str]:
    kind = rng.randrange(4)
    if kind == 0:
        word = rng.choice(ANIMALS + FOODS + COLOURS)
        return f"Say the word {word}.", word
    if kind == 1:
        return rng.choice(("Thank you.", "Thanks a lot.")), "You are welcome."
    if kind == 2:
        return rng.choice(("How are you?", "Are you well?")), "I am fine, thank you."
    text = " ".join(filler(rng, material, rng.randint(100, 1200)))
    return f"Read this text. {text}", "I have read it."
