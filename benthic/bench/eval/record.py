"""Answers kept in a file as they come, so that a run that broke off goes on where it was.

JSON lines: first whose answers these are, then one answer a line under its question's digest. A line cut short by a
crash is the only damage that is repaired, by asking that question again.
"""

import fcntl
import json
from pathlib import Path
from typing import IO, Any

from benthic.bench.eval import questions
from benthic.bench.eval.questions import Answer, Question
from benthic.errors import BadRecord

FORMAT = 1


class Record:
    """Answers by question, in memory and, with a path, on disk."""

    def __init__(self, path: Path | None, identity: dict[str, Any]):
        """Open or begin a file. Raises BadRecord: it belongs to another subject or settings, is in use or damaged."""
        self.path = path
        self._answers: dict[str, Answer] = {}
        self._file: IO[str] | None = None
        if path is None:
            return
        head = {"format": FORMAT, **identity}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise BadRecord(path, str(error)) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(file, head)
        except BlockingIOError as error:
            file.close()
            raise BadRecord(path, "another run is writing it") from error
        except BaseException:
            file.close()
            raise
        self._file = file

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, question: Question) -> Answer | None:
        return self._answers.get(questions.digest(question))

    def add(self, question: Question, answer: Answer) -> None:
        key = questions.digest(question)
        self._answers[key] = answer
        if self._file is not None:
            self._write({"question": key, "answer": questions.as_json(answer)})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, row: dict[str, Any]) -> None:
        assert self._file is not None, "the record is closed"
        self._put(self._file, row)

    @staticmethod
    def _put(file: IO[str], row: dict[str, Any]) -> None:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()

    def _read(self, file: IO[str], head: dict[str, Any]) -> None:
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            file.seek(0)
            file.truncate(len(whole.encode()))
        rows = whole.split("\n")[:-1]  # not splitlines: text may hold other line ends
        if not rows:
            self._put(file, head)
            return
        for number, line in enumerate(rows, 1):
            try:
                row = dict(json.loads(line))
                if number > 1:
                    self._answers[str(row["question"])] = questions.of_json(row["answer"])
            except (ValueError, KeyError, TypeError) as error:
                raise BadRecord(self.path, f"line {number} is no answer: {error!r}; begin another file") from error
            if number == 1:
                self._same(row, head)

    def _same(self, found: dict[str, Any], head: dict[str, Any]) -> None:
        def show(value: object) -> str:
            return "absent" if value is None else json.dumps(value, ensure_ascii=False)

        keys = [key for key in {**head, **found} if found.get(key) != head.get(key)]
        if keys:
            told = "; ".join(f"{key} was {show(found.get(key))}, is {show(head.get(key))}" for key in keys)
            raise BadRecord(self.path, f"its answers are of another run: {told}; begin another file")
