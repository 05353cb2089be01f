"""Answers on disk: they come back as they were, a cut line is repaired, everything else that is wrong is refused."""

import json
from pathlib import Path

import pytest

from benthic.bench.eval import questions
from benthic.bench.eval.documents import Document
from benthic.bench.eval.questions import (
    Answer,
    Chat,
    Draft,
    Drafted,
    Load,
    Loads,
    Question,
    Said,
    Score,
    Scored,
    Span,
    View,
)
from benthic.bench.eval.record import Record
from benthic.errors import BadRecord
from benthic.skills.base import Call, Reply

DOCUMENT = Document("qa", "2 + 2?", "4 — quatre\u2028")
ANSWERS: dict[str, tuple[Question, Answer]] = {
    "said": (
        Chat({"messages": ({"role": "user", "content": "x\u2028y"},), "thinking": False}, 9),
        Said(Reply("a\nb\u2028", "hm", (Call("f", '{"x": 1}'),)), "stop", 3, None),
    ),
    "scored": (Score((DOCUMENT,)), Scored((Span(3, 4, 0.1 + 0.2),))),
    "loads": (Load((DOCUMENT,), View(numerics="float")), Loads(((1, 2), (3, 0)))),
    "drafted": (Draft(("x",), 1.0, 5, 0), Drafted({"temperature": 1.0, "all": {"slots": [{"slot": 1}]}})),
}
IDENTITY = {"model": "m", "digest": "d", "seed": 0}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_a_json_form(name: str) -> None:
    _, answer = ANSWERS[name]
    assert questions.of_json(json.loads(json.dumps(questions.as_json(answer)))) == answer


def test_digests_differ_with_anything_that_an_answer_depends_on() -> None:
    chat = ANSWERS["said"][0]
    assert isinstance(chat, Chat)
    different: list[Question] = [question for question, _ in ANSWERS.values()]
    different += [
        Chat(chat.request, 10),
        Chat(chat.request, 9, 0.5),
        Chat(chat.request, 9, seed=1),
        Chat(chat.request, 9, view=View(sight="dense")),
        Chat({**chat.request, "thinking": True}, 9),
        Load((DOCUMENT,)),
        Score((DOCUMENT, DOCUMENT)),
        Score((DOCUMENT._replace(response="5"),)),
    ]
    assert len({questions.digest(question) for question in different}) == len(different)
    assert questions.digest(Score((DOCUMENT,))) == questions.digest(Score((Document(*DOCUMENT),)))


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "answers.jsonl"
    record = Record(path, IDENTITY)
    for question, answer in ANSWERS.values():
        assert record.get(question) is None
        record.add(question, answer)
        assert path.read_text().count("\n") == 1 + len(record), "each answer is on disk at once"
    record.close()
    again = Record(path, IDENTITY)
    assert len(again) == len(ANSWERS)
    assert all(again.get(question) == answer for question, answer in ANSWERS.values())
    again.close()


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = Record(None, IDENTITY)
    record.add(*ANSWERS["scored"])
    record.close()
    assert record.get(ANSWERS["scored"][0]) == ANSWERS["scored"][1]
    assert list(tmp_path.iterdir()) == []


def filled(path: Path) -> Path:
    record = Record(path, IDENTITY)
    for pair in ANSWERS.values():
        record.add(*pair)
    record.close()
    return path


def test_a_line_cut_short_is_asked_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "a.jsonl")
    whole = path.read_bytes()
    for missing in (1, 5, 30):
        path.write_bytes(whole[:-missing])
        record = Record(path, IDENTITY)
        assert len(record) == len(ANSWERS) - 1
        record.add(*ANSWERS["drafted"])
        record.close()
        assert path.read_bytes() == whole


def test_an_empty_file_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    Record(path, IDENTITY).close()
    assert json.loads(path.read_text())["digest"] == "d"


@pytest.mark.parametrize(
    ("identity", "told"),
    [
        ({**IDENTITY, "digest": "e"}, 'digest was "d", is "e"'),
        ({**IDENTITY, "seed": 1, "model": "n"}, 'model was "m", is "n"; seed was 0, is 1'),
        ({**IDENTITY, "template": "plain"}, 'template was absent, is "plain"'),
        ({"model": "m", "seed": 0}, 'digest was "d", is absent'),
    ],
)
def test_another_run_is_not_mixed_in(tmp_path: Path, identity: dict[str, object], told: str) -> None:
    path = filled(tmp_path / "a.jsonl")
    before = path.read_bytes()
    with pytest.raises(BadRecord, match=f"answers are of another run: {told}; begin another file"):
        Record(path, identity)
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["{", "[]", '{"question": "x"}', '{"question": "x", "answer": {"kind": "Odd"}}'])
def test_damage_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = filled(tmp_path / "a.jsonl")
    lines = path.read_text().split("\n")
    lines[2] = line
    path.write_text("\n".join(lines))
    with pytest.raises(BadRecord, match=r"a\.jsonl: line 3 is no answer"):
        Record(path, IDENTITY)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first = Record(path, IDENTITY)
    with pytest.raises(BadRecord, match="another run is writing it"):
        Record(path, IDENTITY)
    first.close()
    Record(path, IDENTITY).close()


def test_a_folder_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(BadRecord, match="cannot go on from"):
        Record(tmp_path, IDENTITY)
