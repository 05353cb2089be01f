"""Who is asked: the engine in this process (`local.py`), or a server that speaks the OpenAI protocol (`remote.py`)."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from benthic.bench.eval.documents import Document
from benthic.bench.eval.questions import Answer, Missing, Question


class Subject(Protocol):
    @property
    def name(self) -> str: ...  # of the model, for tables and file names
    @property
    def local(self) -> bool: ...  # whether views and looks inside are possible
    @property
    def context(self) -> int | None: ...  # most tokens of prompt and completion together; None: not known
    @property
    def numerics(self) -> str | None: ...  # the profile it serves with; None: not known

    def identity(self) -> dict[str, Any]:
        """What answers depend on, as JSON: answers of another identity are never mixed with these."""
        ...

    def length(self, document: Document) -> int:
        """Tokens of a document as it is scored: prompt, response and all marks. At least so many, where it guesses."""
        ...

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[Question, Answer | Missing]]:
        """Each question once with what came, as it comes. Closing the iterator ends what is under way.

        Raises  what makes further asking useless: no such model, no access, nobody there.
        """
        ...

    def close(self) -> None: ...
