"""Request traces: when prompts arrive, what they share, how much is answered. Seeded generators, and the Mooncake form.

A prompt is written in runs: (token id, how many). Prompts that begin with the same runs begin alike, so that a prefix
cache finds of them what it would find of real ones. Ids are made up; nothing is ever computed from them.

The Mooncake form is JSON lines: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and
`hash_ids`, one for each 512 tokens of the prompt, the last one possibly for fewer; equal ids stand for equal tokens
behind equal ones.
"""

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benthic.errors import BadTrace

HASHED_TOKENS = 512
VOCAB_SIZE = 1 << 31
_REPLIES = 1 << 30  # ids of answers begin here

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at: float  # seconds from the beginning
    prompt: Runs
    output: int  # tokens of its answer
    reply: int  # the id that its answer repeats
    kind: str = ""  # what it is told apart by in reports
    tenant: str = ""
    priority: int = 0
    patience: float | None = None  # seconds after which it is refused if it has not begun

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)

    def ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for token, count in self.prompt:
            found += [token] * count
        return tuple(found)


# ---- made up ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """Middles of log-normal lengths, tokens, and the longest there is."""

    prompt: float = 400
    output: float = 250
    most: int = 16384


class _Maker:
    """Seeded draws, and ids that no other maker of the same trace has."""

    def __init__(self, seed: int, name: str):
        self.random = random.Random(f"{seed} {name}")
        self._next = 1 + random.Random(name).randrange(1 << 9) * (1 << 20)

    def id(self) -> int:
        self._next += 1
        return self._next

    def length(self, middle: float, spread: float, most: int) -> int:
        return max(1, min(most, round(self.random.lognormvariate(math.log(middle), spread))))

    def one(self, at: float, lengths: Lengths, kind: str, tenant: str = "", patience: float | None = None) -> Arrival:
        prompt, output = self.length(lengths.prompt, 0.8, lengths.most), self.length(lengths.output, 0.6, lengths.most)
        return Arrival(at, ((self.id(), prompt),), output, _REPLIES + self.id(), kind, tenant, patience=patience)


def poisson(
    seed: int, *, seconds: float, rate: float, lengths: Lengths = Lengths(), kind: str = "chat", tenant: str = ""
) -> list[Arrival]:
    """Prompts that share nothing, `rate` a second on average."""
    maker = _Maker(seed, f"{kind} {tenant}")
    found: list[Arrival] = []
    at = maker.random.expovariate(rate)
    while at < seconds:
        found.append(maker.one(at, lengths, kind, tenant))
        at += maker.random.expovariate(rate)
    return found


def bursts(seed: int, *, seconds: float, every: float, size: int, lengths: Lengths = Lengths()) -> list[Arrival]:
    """`size` prompts at once, every so many seconds."""
    maker = _Maker(seed, "burst")
    times = [every * (i + 0.5) for i in range(int(seconds / every))]
    return [maker.one(at, lengths, "burst") for at in times for _ in range(size)]


def long_prompts(seed: int, *, seconds: float, every: float, tokens: int, output: float = 100) -> list[Arrival]:
    """A prompt of `tokens` tokens every so many seconds."""
    maker = _Maker(seed, "long")
    times = [every * (i + 0.5) for i in range(int(seconds / every))]
    return [
        Arrival(at, ((maker.id(), tokens),), maker.length(output, 0.6, 4096), _REPLIES + maker.id(), "long")
        for at in times
    ]


def agents(
    seed: int,
    *,
    seconds: float,
    sessions: int,
    turns: int = 8,
    system: int = 3000,
    new: float = 400,
    output: float = 150,
    pause: float = 8.0,
    most: int = 60000,
) -> list[Arrival]:
    """Sessions over four system prompts; every turn's prompt is all that came before, its own answers too, and some
    new tokens. A turn comes `pause` seconds after the one before it, on average."""
    maker = _Maker(seed, "agent")
    roots = [(maker.id(), system) for _ in range(4)]
    found: list[Arrival] = []
    for _ in range(sessions):
        at = maker.random.uniform(0, seconds)
        prompt: Runs = (maker.random.choice(roots),)
        for _ in range(1 + min(int(maker.random.expovariate(1 / turns)), 4 * turns)):
            prompt = (*prompt, (maker.id(), maker.length(new, 0.8, 8000)))
            answer, reply = maker.length(output, 0.6, 4000), _REPLIES + maker.id()
            if sum(count for _, count in prompt) + answer > most or at >= seconds:
                break
            found.append(Arrival(at, prompt, answer, reply, "agent"))
            prompt = (*prompt, (reply, answer))
            at += 1.0 + maker.random.expovariate(1 / pause)
    return merged(found)


def merged(*traces: Iterable[Arrival]) -> list[Arrival]:
    """Several traces as one, in order of time."""
    return sorted((arrival for trace in traces for arrival in trace), key=lambda arrival: arrival.at)


# ---- the Mooncake form -----------------------------------------------------------------------------------------------


def conversations(seed: int, *, seconds: float, rate: float, most: int = 60000) -> list[dict[str, Any]]:
    """Lines in the Mooncake form, made up: chats that come back with all they said before, over a few system prompts;
    inputs of 6000 tokens in the middle with a long tail, answers of 300."""
    maker = _Maker(seed, "mooncake")
    roots = [[maker.id() for _ in range(maker.random.randrange(1, 9))] for _ in range(6)]
    lines: list[dict[str, Any]] = []
    at = maker.random.expovariate(rate)
    while at < seconds:
        begun, hashes = at, list(maker.random.choice(roots))
        length = len(hashes) * HASHED_TOKENS
        for _ in range(1 + min(int(maker.random.expovariate(0.5)), 12)):
            length = min(length + maker.length(2500, 1.2, most), most)
            while len(hashes) < -(-length // HASHED_TOKENS):
                hashes.append(maker.id())
            output = maker.length(300, 0.7, 4000)
            lines.append(
                {
                    "timestamp": round(1e3 * begun),
                    "input_length": length,
                    "output_length": output,
                    "hash_ids": list(hashes),
                }
            )
            if length % HASHED_TOKENS:
                hashes.pop()  # the next turn's block there holds more tokens
            length += output
            begun += 4.0 + maker.random.expovariate(1 / 20)
            if begun >= seconds or length >= most:
                break
        at += maker.random.expovariate(rate)
    return sorted(lines, key=lambda line: line["timestamp"])


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read(path: Path) -> list[Arrival]:
    """A trace in the Mooncake form. Raises BadTrace: the line, and what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(path, 0, str(error)) from error
    lines: list[object] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise BadTrace(path, number, str(error)) from error
    return parse(lines, path)


def parse(lines: Sequence[object], where: object = "trace") -> list[Arrival]:
    """Lines of the Mooncake form, in any order of time. Raises BadTrace."""
    found: list[Arrival] = []
    names: dict[int, int] = {}  # hash id -> token id
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict):
            raise BadTrace(where, number, "want an object")
        fields = cast(dict[str, object], line)
        at = _number(fields, "timestamp", 0, where, number) / 1e3
        length = int(_number(fields, "input_length", 1, where, number))
        output = int(_number(fields, "output_length", 1, where, number))
        hashes = fields.get("hash_ids")
        if not isinstance(hashes, list) or not all(isinstance(h, int) for h in cast(list[object], hashes)):
            raise BadTrace(where, number, f"hash_ids is {hashes!r}, want a list of integers")
        hashes = cast(list[int], hashes)
        if len(hashes) != -(-length // HASHED_TOKENS):
            want = f"{-(-length // HASHED_TOKENS)} for {length} tokens, {HASHED_TOKENS} each"
            raise BadTrace(where, number, f"hash_ids has {len(hashes)} entries, want {want}")
        counts = [HASHED_TOKENS] * (len(hashes) - 1) + [length - HASHED_TOKENS * (len(hashes) - 1)]
        tokens = [names.setdefault(h, len(names)) for h in hashes]
        found.append(Arrival(at, tuple(zip(tokens, counts, strict=True)), output, _REPLIES + number, "trace"))
    return merged(found)


def _number(fields: dict[str, object], name: str, low: int, where: object, number: int) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < 1 << 40:
        raise BadTrace(where, number, f"{name} is {value!r}, want a number of at least {low}")
    return value
