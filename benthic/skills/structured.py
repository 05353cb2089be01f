"""Skills whose answers have a form: fill a JSON schema from a few sentences, choose a tool and its arguments.

Schemas have 2 to 4 keys, tools 1 to 3 parameters and few words about themselves: a small model has to read them whole.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from benthic.skills.base import Material, Split, Task, belongs
from benthic.skills.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    EVENTS,
    FOODS,
    JOBS,
    NAMES,
    OBJECTS,
    ROOMS,
    WEATHER,
)

# ---- json ------------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """One key of a record: its JSON schema, how its value is drawn, and how a sentence about the subject says it."""

    schema: dict[str, Any]
    draw: Callable[[random.Random], Any]
    forms: tuple[str, ...]  # with {x}; of a boolean: pairs of yes and no


@dataclass(frozen=True, slots=True)
class Record:
    """What sentences can be about: a subject, which is the value of the first key, and what is said of it."""

    subject: str  # key of the subject
    subjects: tuple[str, ...]
    keys: dict[str, Key]
    article: str = ""  # before the subject in a sentence


TEXT, WHOLE, YES_NO = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
SOME = {"type": "array", "items": TEXT}


def _one_of(values: tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(values)


def _two_or_three_of(values: tuple[str, ...]) -> Callable[[random.Random], list[str]]:
    return lambda rng: rng.sample(values, rng.randint(2, 3))


def _number(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high)


def _either(rng: random.Random) -> bool:
    return rng.random() < 0.5


RECORDS = (
    Record(
        "name",
        NAMES,
        {
            "age": Key(WHOLE, _number(5, 90), ("is {x} years old", "turned {x} this year")),
            "city": Key(TEXT, _one_of(CITIES), ("lives in {x}", "comes from {x}")),
            "job": Key(TEXT, _one_of(JOBS), ("works as a {x}", "is a {x}")),
            "likes": Key(SOME, _two_or_three_of(FOODS), ("likes {x}", "often eats {x}")),
            "married": Key(YES_NO, _either, ("is married", "is not married")),
        },
    ),
    Record(
        "customer",
        NAMES,
        {
            "item": Key(TEXT, _one_of(OBJECTS), ("orders a {x}", "wants to buy a {x}")),
            "colour": Key(TEXT, _one_of(COLOURS), ("chooses the colour {x}", "wants it in {x}")),
            "price": Key(WHOLE, _number(2, 250), ("pays {x} euros", "offers {x} euros")),
            "city": Key(TEXT, _one_of(CITIES), ("wants it sent to {x}", "has an address in {x}")),
            "paid": Key(YES_NO, _either, ("has paid", "has not paid")),
        },
    ),
    Record(
        "event",
        EVENTS,
        {
            "day": Key(TEXT, _one_of(DAYS), ("is on {x}", "takes place on {x}")),
            "hour": Key(WHOLE, _number(8, 22), ("starts at {x} o'clock", "begins at {x}")),
            "city": Key(TEXT, _one_of(CITIES), ("is held in {x}", "will be in {x}")),
            "guests": Key(WHOLE, _number(5, 300), ("has {x} guests", "is for {x} people")),
            "free": Key(YES_NO, _either, ("is free", "is not free")),
        },
        "The ",
    ),
    Record(
        "animal",
        ANIMALS,
        {
            "owner": Key(TEXT, _one_of(NAMES), ("belongs to {x}", "lives with {x}")),
            "age": Key(WHOLE, _number(1, 20), ("is {x} years old", "is about {x} years of age")),
            "colour": Key(TEXT, _one_of(COLOURS), ("is {x}", "looks {x}")),
            "eats": Key(SOME, _two_or_three_of(FOODS), ("eats {x}", "likes {x}")),
            "tame": Key(YES_NO, _either, ("is tame", "is not tame")),
        },
        "The ",
    ),
)
JSON_ASKS = (
    "Fill in this JSON schema: {schema}\n\n{text}",
    "{text}\n\nGive me this as JSON. Schema: {schema}",
    "Read the text and answer in JSON by this schema: {schema}\n{text}",
)
FORMAT_ASKS = ("{text}", "Answer in JSON. {text}", "{text}\nWrite this down as JSON.")


def fill(rng: random.Random, material: Material, split: Split, *, form: str | None = None) -> Task:
    """A few sentences, and a schema of 2 to 4 keys to be filled from them; the sentences may say more.

    form  "prompt": the schema stands in the question, "format": it is the request's response format; default: either
    """
    record = rng.choice(RECORDS)
    while True:
        subject = rng.choice(record.subjects)
        said = {name: key.draw(rng) for name, key in rng.sample(list(record.keys.items()), rng.randint(2, 4))}
        wanted = rng.sample(list(said), rng.randint(max(len(said) - 1, 1), min(len(said), 3)))
        value: dict[str, Any] = {name: said[name] for name in wanted}
        if len(value) < 2 or rng.random() < 0.8:
            value = {record.subject: subject, **value}
        if belongs(split, "json", *sorted(value.items())):
            break
    schemas = {record.subject: TEXT} | {name: key.schema for name, key in record.keys.items()}
    schema = {"type": "object", "properties": {name: schemas[name] for name in value}, "required": list(value)}
    text = _sentences(rng, record, subject, said)
    answer = {"role": "assistant", "content": json.dumps(value)}
    form = form or rng.choice(("prompt", "prompt", "format"))
    if form == "prompt":
        user = rng.choice(JSON_ASKS).format(schema=json.dumps(schema), text=text)
        return Task("json", ({"role": "user", "content": user}, answer), level=f"{len(value)} keys")
    user = rng.choice(FORMAT_ASKS).format(text=text)
    return Task(
        "json",
        ({"role": "user", "content": user}, answer),
        response_format={"type": "json_schema", "json_schema": {"name": record.subject, "schema": schema}},
        level=f"{len(value)} keys, response format",
    )


def _sentences(rng: random.Random, record: Record, subject: str, said: dict[str, Any]) -> str:
    """All that is said of the subject, as one sentence or two."""
    clauses: list[str] = []
    for name, value in said.items():
        forms = record.keys[name].forms
        if isinstance(value, bool):
            clauses.append(forms[0] if value else forms[1])
        else:
            clauses.append(rng.choice(forms).format(x=_listed(value) if isinstance(value, list) else value))
    begin = f"{record.article}{subject}"
    cut = rng.randint(1, len(clauses))
    sentences = [f"{begin} {_joined(part)}." for part in (clauses[:cut], clauses[cut:]) if part]
    return " ".join(sentences)


def _joined(clauses: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(clauses[:-1]), clauses[-1]]))


def _listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


# ---- tools -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, how people ask for it, and what comes of it.

    draw   arguments, drawn; run: its result, of the arguments and by chance
    asks   questions with the arguments in braces; reply: the answer, with arguments and result in braces
    """

    name: str
    description: str
    parameters: dict[str, dict[str, Any]]
    draw: Callable[[random.Random], dict[str, Any]]
    run: Callable[[random.Random, dict[str, Any]], dict[str, Any]]
    asks: tuple[str, ...]
    reply: str
    both: str = ""  # a question for two of its only argument at once, {a} and {b}

    @property
    def function(self) -> dict[str, Any]:
        """OpenAI form."""
        schema = {"type": "object", "properties": self.parameters, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


def _done(rng: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"status": "done"}


def _clock(rng: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"time": f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"}


TOOLS = (
    Tool(
        "get_weather",
        "Get the weather of a city.",
        {"city": TEXT},
        lambda rng: {"city": rng.choice(CITIES)},
        lambda rng, _: {"weather": rng.choice(WEATHER), "degrees": rng.randint(1, 35)},
        ("What is the weather in {city}?", "How is the weather in {city} today?", "Tell me the weather in {city}."),
        "It is {weather} in {city}, {degrees} degrees.",
        "What is the weather in {a} and in {b}?",
    ),
    Tool(
        "get_time",
        "Get the time in a city.",
        {"city": TEXT},
        lambda rng: {"city": rng.choice(CITIES)},
        _clock,
        ("What time is it in {city}?", "Tell me the time in {city}."),
        "It is {time} in {city}.",
        "What time is it in {a} and in {b}?",
    ),
    Tool(
        "get_price",
        "Get the price of an item.",
        {"item": TEXT},
        lambda rng: {"item": rng.choice(OBJECTS)},
        lambda rng, _: {"euros": rng.randint(2, 99)},
        ("What does the {item} cost?", "How much is the {item}?", "Tell me the price of the {item}."),
        "The {item} costs {euros} euros.",
        "What do the {a} and the {b} cost?",
    ),
    Tool(
        "find_person",
        "Find out where a person is.",
        {"name": TEXT},
        lambda rng: {"name": rng.choice(NAMES)},
        lambda rng, _: {"room": rng.choice(ROOMS)},
        ("Where is {name}?", "Can you find {name}?"),
        "{name} is in the {room}.",
        "Where are {a} and {b}?",
    ),
    Tool(
        "add",
        "Add two numbers.",
        {"a": WHOLE, "b": WHOLE},
        lambda rng: {"a": rng.randint(100, 999), "b": rng.randint(100, 999)},
        lambda _, arguments: {"sum": arguments["a"] + arguments["b"]},
        ("Add {a} and {b}.", "What is {a} plus {b}?", "What is the sum of {a} and {b}?"),
        "The sum is {sum}.",
    ),
    Tool(
        "multiply",
        "Multiply two numbers.",
        {"a": WHOLE, "b": WHOLE},
        lambda rng: {"a": rng.randint(10, 99), "b": rng.randint(10, 99)},
        lambda _, arguments: {"product": arguments["a"] * arguments["b"]},
        ("Multiply {a} by {b}.", "What is {a} times {b}?"),
        "The product is {product}.",
    ),
    Tool(
        "set_timer",
        "Set a timer.",
        {"minutes": WHOLE},
        lambda rng: {"minutes": rng.randint(1, 90)},
        _done,
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a timer of {minutes} minutes."),
        "The timer is set to {minutes} minutes.",
    ),
    Tool(
        "set_light",
        "Turn the light of a room on or off.",
        {"room": TEXT, "on": YES_NO},
        lambda rng: {"room": rng.choice(ROOMS), "on": _either(rng)},
        _done,
        ("Turn {switch} the light in the {room}.", "Light {switch} in the {room}, please."),
        "The light in the {room} is {switch}.",
    ),
    Tool(
        "send_message",
        "Send a short message.",
        {"to": TEXT, "text": TEXT},
        lambda rng: {"to": rng.choice(NAMES), "text": f"{rng.choice(('bring', 'buy', 'we need'))} {rng.choice(FOODS)}"},
        _done,
        ("Send {to} the message: {text}", "Write to {to}: {text}", "Tell {to} this: {text}"),
        "I sent the message to {to}.",
    ),
    Tool(
        "book_table",
        "Book a table.",
        {"name": TEXT, "people": WHOLE, "hour": WHOLE},
        lambda rng: {"name": rng.choice(NAMES), "people": rng.randint(2, 12), "hour": rng.randint(11, 22)},
        lambda rng, _: {"table": rng.randint(1, 40)},
        (
            "Book a table for {people} people at {hour} for {name}.",
            "{name} wants a table for {people} at {hour} o'clock.",
        ),
        "{name} has table {table}.",
    ),
    Tool(
        "add_event",
        "Put an event into the calendar.",
        {"title": TEXT, "day": TEXT, "hour": WHOLE},
        lambda rng: {"title": rng.choice(EVENTS), "day": rng.choice(DAYS), "hour": rng.randint(8, 22)},
        _done,
        ("Put the {title} on {day} at {hour} into my calendar.", "Note a {title} on {day} at {hour} o'clock."),
        "The {title} is noted for {day} at {hour}.",
    ),
    Tool(
        "get_distance",
        "Get the distance between two cities.",
        {"start": TEXT, "end": TEXT},
        lambda rng: dict(zip(("start", "end"), rng.sample(CITIES, 2), strict=True)),
        lambda rng, _: {"km": rng.randint(100, 9999)},
        ("How far is it from {start} to {end}?", "What is the distance from {start} to {end}?"),
        "It is {km} km from {start} to {end}.",
    ),
    Tool(
        "buy",
        "Buy some of an item.",
        {"item": TEXT, "count": WHOLE},
        lambda rng: {"item": rng.choice(FOODS), "count": rng.randint(2, 20)},
        lambda rng, _: {"order": rng.randint(100, 999)},
        ("Buy {count} packs of {item}.", "Order {count} packs of {item}."),
        "Order {order}: {count} packs of {item}.",
    ),
)
IDLE = (
    (("Thank you.", "Thanks a lot."), "You are welcome."),
    (("How are you?", "Are you well?"), "I am fine, thank you."),
)


def tools(rng: random.Random, material: Material, split: Split, *, declared: int | None = None,
          think: bool | None = None) -> Task:  # fmt: skip
    """1 to 3 requests that each need one of the declared tools, now and then two calls at once or none at all.

    declared  how many tools there are to choose from, default 1 to 3
    think     whether the model thinks before it calls and before it answers, default: one task in six
    """
    kit = rng.sample(TOOLS, declared or rng.randint(1, 3))
    thinks = rng.random() < 1 / 6 if think is None else think
    messages: list[dict[str, Any]] = []

    def said(content: str, thought: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        return message | {"reasoning_content": thought} if thinks else message

    calls_made = 0
    for number in range(rng.randint(1, 3)):
        if number and rng.random() < 0.15:
            asks, answer = rng.choice(IDLE)
            messages += [{"role": "user", "content": rng.choice(asks)}, said(answer, "No tool is needed.")]
            continue
        tool = rng.choice(kit)
        ask, drawn = _request(rng, split, tool)
        results = [tool.run(rng, arguments) for arguments in drawn]
        ids = [f"call_{calls_made + i}" for i in range(len(drawn))]
        calls_made += len(drawn)
        calls = [
            {"id": id, "type": "function", "function": {"name": tool.name, "arguments": json.dumps(arguments)}}
            for id, arguments in zip(ids, drawn, strict=True)
        ]
        answer = " ".join(
            tool.reply.format(**_spoken(arguments), **result) for arguments, result in zip(drawn, results, strict=True)
        )
        messages += [
            {"role": "user", "content": ask},
            {**said("", f"I need {tool.name}."), "tool_calls": calls},
            *(
                {"role": "tool", "tool_call_id": id, "content": json.dumps(result)}
                for id, result in zip(ids, results, strict=True)
            ),
            said(answer, "I have the answer."),
        ]
    level = f"{len(kit)} tools, thinking" if thinks else f"{len(kit)} tools"
    return Task("tools", tuple(messages), tools=tuple(tool.function for tool in kit), thinking=thinks, level=level)


def _request(rng: random.Random, split: Split, tool: Tool) -> tuple[str, list[dict[str, Any]]]:
    """A question, and the arguments of the calls that it asks for: one, or two that differ."""
    while True:
        drawn = [tool.draw(rng) for _ in range(2 if tool.both and rng.random() < 0.2 else 1)]
        if len(drawn) == 1:
            ask = rng.choice(tool.asks).format(**_spoken(drawn[0]))
        else:
            (a,), (b,) = (arguments.values() for arguments in drawn)
            ask = tool.both.format(a=a, b=b)
        if belongs(split, "tools", ask) and (len(drawn) == 1 or drawn[0] != drawn[1]):
            return ask, drawn


def _spoken(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as questions and answers name them."""
    return {**arguments, "switch": "on" if arguments.get("on") else "off"}
