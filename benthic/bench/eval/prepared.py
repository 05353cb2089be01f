"""A suite from the outside: what it is prepared from, the questions it asks, and what it makes of the answers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benthic.bench.eval.documents import Document
from benthic.bench.eval.questions import Answer, Question
from benthic.bench.report import Measure
from benthic.skills.base import Material

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a needle


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked.

    documents  scored by `bits` and `quantisation`; of them `engram` and `experts` take as many as `some`
    tasks      of each skill; stories: of each temperature; rung: needles of each length and depth
    sequences  long texts of `depth`
    """

    documents: int | None = None
    some: int = 256
    tasks: int = 128
    stories: int = 32
    rung: int = 8
    sequences: int = 4
    depths: tuple[float, ...] = DEPTHS
    longest: int | None = None  # tokens of ladder and depth; None: the context


QUICK = Sizes(documents=24, some=8, tasks=8, stories=2, rung=2, sequences=1, depths=(0.0, 0.5, 1.0), longest=1024)


@dataclass(frozen=True, slots=True)
class Plan:
    """What suites are prepared from.

    documents  held-out, all of them; material: of the same
    context    most tokens of prompt and completion together; None: not known
    local      whether the inside of the model can be looked at
    numerics   the profile that serves; None: not known
    length     tokens of a document as it is scored
    """

    documents: tuple[Document, ...]
    material: Material
    sizes: Sizes
    seed: int
    context: int | None
    local: bool
    numerics: str | None
    length: Callable[[Document], int]

    @property
    def scored(self) -> tuple[Document, ...]:
        return self.documents[: self.sizes.documents]

    @property
    def some(self) -> tuple[Document, ...]:
        return self.scored[: self.sizes.some]

    def random(self, *key: object) -> random.Random:
        """The same numbers for the same key, whatever else is asked."""
        return random.Random("/".join(map(str, (*key, self.seed))))


@dataclass(slots=True)
class Measured:
    """measures: rows of the table; details: whatever else a reader may want, as JSON."""

    measures: list[Measure]
    details: dict[str, Any] = field(default_factory=dict[str, Any])


class Skip(Exception):
    """The suite cannot be asked of this subject; the text says why."""


Answers = Callable[[Question], Answer | None]  # None: it was not answered


@dataclass(frozen=True, slots=True)
class Prepared:
    questions: Sequence[Question]
    measured: Callable[[Answers], Measured]  # may raise Skip: what came shows that it was not possible


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    text: str  # one line
    prepare: Callable[[Plan], Prepared]  # may raise Skip
    inside: bool = False  # needs the engine in this process
