"""Evaluations by a script: known shares come out, both subjects give one table, a broken run goes on where it was."""

import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benthic.bench.eval import run, tasks
from benthic.bench.eval.documents import Document, packaged, read_documents
from benthic.bench.eval.inside import normalised_entropy
from benthic.bench.eval.prepared import Plan, Sizes
from benthic.bench.eval.prose import repeats
from benthic.bench.eval.questions import Chat, Load, Loads, Missing, Question, Said, Score, Scored, Span
from benthic.bench.eval.remote import RemoteSubject
from benthic.bench.eval.run import Options
from benthic.bench.eval.suites import SUITES
from benthic.bench.eval.tasks import Target
from benthic.errors import BadRecord, BenchError
from benthic.skills.base import SKILLS, Material, Reply
from tests.bench.eval.loopback import serving
from tests.bench.eval.scripted import answered, as_engine, as_server

DOCUMENTS = tuple(read_documents(packaged(), 40))
SKILLS_ASKED = ("copy", "arithmetic", "thinking", "memory", "json", "tools")
SIZES = Sizes(documents=6, some=4, tasks=6, stories=3, rung=2, sequences=2, depths=(0.0, 1.0), longest=600)


def plan(**changes: Any) -> Plan:
    made = Plan(
        documents=DOCUMENTS,
        material=Material.of((document.prompt, document.response) for document in DOCUMENTS),
        sizes=SIZES,
        seed=0,
        context=1024,
        local=True,
        numerics="reference",
        length=lambda document: 100,
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "valid.jsonl.xz"
    path.write_bytes(lzma.compress("".join(json.dumps(d._asdict()) + "\n" for d in DOCUMENTS).encode()))
    return path


def options(corpus: Path, *suites: str, **changes: Any) -> Options:
    return replace(Options(suites, corpus, SIZES, 0), **changes)


class Scripted:
    """A subject whose answers are a function of the question."""

    def __init__(self, answer: Callable[[Question], Any], *, local: bool = True, context: int | None = 1024):
        self.answer, self.local, self.context = answer, local, context
        self.name, self.numerics = "scripted", "reference" if local else None
        self.asked: list[Question] = []
        self.closed = 0

    def identity(self) -> dict[str, Any]:
        return {"model": "scripted"}

    def length(self, document: Document) -> int:
        return 100

    def answers(self, questions: Sequence[Question]) -> Any:
        try:
            for question in questions:
                self.asked.append(question)
                yield question, self.answer(question)
        finally:
            self.closed += 1

    def close(self) -> None:
        pass


def rows(found: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["value"] for row in found["measures"]}


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    """What two runs have in common."""
    suites = {
        name: {key: value for key, value in suite.items() if key != "seconds"}
        for name, suite in found["suites"].items()
    }
    return {"suites": suites, "measures": found["measures"]}


# ---- skills ----------------------------------------------------------------------------------------------------------


def by_engine(pattern: Callable[[int, Target], bool | None], corpus: Path) -> dict[str, Any]:
    return run.run(as_engine(answered(plan(), SKILLS_ASKED, pattern)), options(corpus, *SKILLS_ASKED))


def by_server(pattern: Callable[[int, Target], bool | None], corpus: Path) -> dict[str, Any]:
    with serving(as_server(answered(plan(), SKILLS_ASKED, pattern))) as server:
        subject = RemoteSubject(server.server())
        try:
            return run.run(subject, options(corpus, *SKILLS_ASKED))
        finally:
            subject.close()


def test_all_right_is_one_and_all_wrong_is_none(corpus: Path) -> None:
    assert {rows(by_engine(lambda i, t: True, corpus))[name] for name in SKILLS_ASKED} == {1.0}
    assert {rows(by_engine(lambda i, t: False, corpus))[name] for name in SKILLS_ASKED} == {0.0}


@pytest.mark.parametrize("name", SKILLS_ASKED)
def test_the_share_is_of_the_turns_that_are_right(corpus: Path, name: str) -> None:
    made = answered(plan(), [name], lambda i, t: i % 4 != 0)
    found = run.run(as_engine(made), options(corpus, name))
    right = sum(i % 4 != 0 for i in range(len(made)))
    assert rows(found)[name] == pytest.approx(right / len(made)) != 0.5
    by_level = [row for row in found["measures"] if row["name"] != name]
    assert sum(row["n"] for row in by_level) == SIZES.tasks
    shown = found["suites"][name]["wrong"]
    assert len(shown) == min(len(made) - right, 10)
    assert all(entry["wanted"] != entry["got"] for entry in shown)


def test_a_checker_the_wrong_way_round_shows(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(by_engine(lambda i, t: True, corpus))["copy"]
    right = tasks.right
    monkeypatch.setattr(tasks, "right", lambda *args: not right(*args))
    assert whole == 1.0
    assert rows(by_engine(lambda i, t: True, corpus))["copy"] == 0.0


def test_both_subjects_give_one_table(corpus: Path) -> None:
    pattern: Callable[[int, Target], bool | None] = lambda i, t: None if i % 11 == 5 else i % 3 != 0  # noqa: E731
    here, there = timeless(by_engine(pattern, corpus)), timeless(by_server(pattern, corpus))
    assert here["measures"] == there["measures"]
    assert len(here["measures"]) > 20
    unanswered = 0
    for name in SKILLS_ASKED:
        a, b = here["suites"][name], there["suites"][name]
        counts = [sum(suite.pop("missing", {}).values()) for suite in (a, b)]
        assert counts[0] == counts[1]
        unanswered += counts[0]
        assert a == b
    assert unanswered >= 5


def test_answers_with_words_around_are_told_apart(corpus: Path) -> None:
    made = answered(plan(), ["memory"], lambda i, t: True)
    wordy = {k: {**said, "content": f"It is {said['content']}, I think."} for k, said in made.items() if said}
    (row, *_) = run.run(as_engine(wordy), options(corpus, "memory"))["measures"]
    assert row["value"] == 0.0
    assert row["note"] == "100% hold the answer, with words around it or not"


def test_what_a_server_ignores_is_skipped_and_not_counted_as_wrong(corpus: Path) -> None:
    made = answered(plan(local=False), ["thinking", "tools"], lambda i, t: True)
    names = ("reasoning_content", "tool_calls")
    plain = {k: {name: v for name, v in said.items() if name not in names} for k, said in made.items() if said}
    with serving(as_server(plain)) as server:
        subject = RemoteSubject(server.server())
        found = run.run(subject, options(corpus, "thinking", "tools"))
        subject.close()
    assert "replies held a tool call" in found["suites"]["tools"]["skipped"]
    thinking = [row for row in found["measures"] if row["name"].startswith("thinking")]
    assert [row["name"] for row in thinking] == ["thinking", "thinking, direct"]
    assert thinking[0]["value"] == 1.0
    assert "the server turns no thinking on" in thinking[0]["note"]
    here = run.run(as_engine(plain), options(corpus, "thinking", "tools"))
    assert rows(here)["tools"] < 1.0, "in this process it is the model that writes none"
    assert rows(here)["thinking"] < 1.0


def test_levels_stand_in_the_order_of_their_numbers(corpus: Path) -> None:
    found = run.run(as_engine(answered(plan(), ["copy"], lambda i, t: True)), options(corpus, "copy"))
    names = [row["name"] for row in found["measures"]][1:]
    assert names == sorted(names)


# ---- prose and the inside --------------------------------------------------------------------------------------------


def test_prose_and_inside_suites_do_their_sums(corpus: Path) -> None:
    def answer(question: Question) -> Any:
        if isinstance(question, Load):
            return Loads(((4, 4, 0, 0), (2, 2, 2, 2)))
        assert isinstance(question, Score)
        view = question.view
        cost = {"float": 1.0, None: 1.001, "production": 1.002, "fast": 1.01}[view.numerics] + (not view.engram)
        return Scored(tuple(Span(150 * i, 10, cost * 10) for i, _ in enumerate(question.documents)))

    found = run.run(Scripted(answer), options(corpus, "bits", "depth", "experts", "engram", "quantisation"))
    told = rows(found)
    size = sum(len(document.response.encode()) for document in DOCUMENTS[:6])
    assert told["bits per byte"] == pytest.approx(6 * 10.01 / 0.6931472 / size)
    assert told["perplexity"] == pytest.approx(2.71828183**1.001)
    some = sum(len(document.response.encode()) for document in DOCUMENTS[:4])
    assert told["what the tables are worth"] == pytest.approx(4 * 10 / 0.6931472 / some)
    assert told["perplexity, reference over float"] == pytest.approx(0.0010005, rel=1e-3)
    assert told["perplexity, fast over float"] == pytest.approx(0.01005, rel=1e-3)
    verdicts = {row["name"]: row.get("verdict") for row in found["measures"]}
    assert verdicts["perplexity, production over float"] == "met"
    assert verdicts["perplexity, fast over float"] is None
    assert told["expert load entropy, mean"] == pytest.approx(0.75)
    assert told["expert load entropy, layer 0"] == pytest.approx(0.5)
    assert told["largest load, layer 0"] == 2.0
    assert told["experts that are never used"] == 0.25
    assert [name for name in told if name.startswith("perplexity at")] == [
        "perplexity at 0 to 127",
        "perplexity at 128 to 255",
        "perplexity at 256 to 511",
        "perplexity at 512 to 599" if "perplexity at 512 to 599" in told else "perplexity at 512 to 1023",
    ]
    assert found["suites"]["depth"]["sequences"] == 2


def test_suites_that_ask_the_same_ask_once(corpus: Path) -> None:
    subject = Scripted(lambda question: Scored(tuple(Span(5, 2, 1.0) for _ in question.documents)))  # type: ignore[union-attr]
    run.run(subject, options(corpus, "bits", "engram", "quantisation"))
    assert len(subject.asked) == 6 + 4 + 3 * 4


def test_depth_fills_the_context_and_needs_to_know_it(corpus: Path) -> None:
    (question, _) = SUITES["depth"].prepare(plan(context=450)).questions
    assert isinstance(question, Score)
    assert len(question.documents) == 4
    asked = SUITES["depth"].prepare(plan(sizes=replace(SIZES, longest=None), context=10_000)).questions
    assert all(isinstance(q, Score) and len(q.documents) == 99 for q in asked), "documents come again and again"
    found = run.run(Scripted(lambda q: None, local=False, context=None), options(corpus, "depth"))
    assert found["suites"]["depth"]["skipped"].endswith("give --context")


def test_entropy() -> None:
    assert normalised_entropy([5, 5, 5, 5]) == pytest.approx(1.0)
    assert normalised_entropy([20, 0, 0, 0]) == 0.0


def test_repeats_are_counted_in_words() -> None:
    assert repeats("I can only have a ball, she said. " * 4)
    assert not repeats("I can only have a ball, she said. " * 2)
    assert not repeats(" ".join(str(i) for i in range(200)))


def test_stories_are_told_at_two_temperatures(corpus: Path) -> None:
    def answer(question: Question) -> Said:
        assert isinstance(question, Chat)
        return Said(Reply("so it was and so it went on, " * 9 if question.temperature == 0 else "Once. The end."))

    subject = Scripted(answer)
    found = run.run(subject, options(corpus, "stories"))
    assert rows(found) == {"stories that loop, T = 0.8": 0.0, "stories that loop, T = 0": 1.0}
    assert [q.seed for q in subject.asked if isinstance(q, Chat)] == [0, 1, 2] * 2
    assert len(found["suites"]["stories"]["samples"]) == 6


# ---- the ladder ------------------------------------------------------------------------------------------------------


def test_the_ladder_by_length_depth_and_sight(corpus: Path) -> None:
    wanted: dict[str, str] = {}

    def answer(question: Question) -> Said:
        assert isinstance(question, Chat)
        content = question.request["messages"][0]["content"]
        where = content.index(wanted[content]) / len(content)
        held = question.view.sight == "dense" or (question.view.sight == "indexer" and where < 0.5)
        return Said(Reply(wanted[content] if held else "?"), prompt_tokens=len(content) // 4)

    for tokens in (128, 256, 512):
        for at in SIZES.depths:
            for i in range(SIZES.rung):
                task = SKILLS["needle"].make(
                    plan().random("ladder", tokens, at, i), plan().material, "held_out",
                    tokens=tokens, needles=4, questions=1, depth=at,
                )  # fmt: skip
                wanted[task.messages[0]["content"]] = task.messages[1]["content"]
    found = run.run(Scripted(answer), options(corpus, "ladder"))
    told = rows(found)
    for tokens in (128, 256, 512):
        assert told[f"needle among {tokens} tokens"] == 0.5
        assert told[f"needle among {tokens} tokens, dense"] == 1.0
        assert told[f"needle among {tokens} tokens, random"] == 0.0
    grid = found["suites"]["ladder"]["by depth"]
    assert grid["served"]["256"] == {"0": 1.0, "1": 0.0}
    verdicts = {row["name"]: row.get("verdict") for row in found["measures"]}
    assert verdicts["needle among 512 tokens"] == "missed"
    assert verdicts["needle among 512 tokens, random"] == "met"
    assert verdicts["needle among 128 tokens, random"] is None
    assert found["suites"]["ladder"]["prompt tokens"]["512"] == pytest.approx(512, rel=0.2)
    assert "512 tokens" in run.text(found)


def test_the_ladder_of_a_server_is_as_served_and_within_its_context() -> None:
    questions = SUITES["ladder"].prepare(plan(local=False, context=512)).questions
    assert {question.view.sight for question in questions if isinstance(question, Chat)} == {"indexer"}
    assert len(questions) == 2 * 2 * 2, "128 and 256 tokens: 512 leaves no room for the question"


# ---- what is not answered --------------------------------------------------------------------------------------------


def test_a_suite_that_is_refused_is_skipped_after_a_few_questions(corpus: Path) -> None:
    subject = Scripted(lambda question: Missing("no logprobs"))
    found = run.run(subject, options(corpus, "bits"))
    assert found["suites"]["bits"]["skipped"] == "no logprobs"
    assert found["measures"] == []
    assert len(subject.asked) == subject.closed == 3
    assert "skipped: no logprobs" in run.text(found)


def test_a_suite_whose_server_breaks_is_given_up(corpus: Path) -> None:
    answers = iter([Scored((Span(5, 2, 1.0),)), *[Missing("HTTP 500", refused=False)] * 99])
    subject = Scripted(lambda question: next(answers))
    found = run.run(subject, options(corpus, "bits", sizes=replace(SIZES, documents=None)))
    assert len(subject.asked) == 7
    assert found["suites"]["bits"]["answered"] == 1
    assert found["measures"][0]["note"].endswith("39 questions without an answer")


def test_what_looks_inside_is_skipped_for_a_server(corpus: Path) -> None:
    found = run.run(Scripted(lambda question: None, local=False), options(corpus, "experts", "engram", "drafts"))
    assert all("takes the engine in this process" in suite["skipped"] for suite in found["suites"].values())


def test_suites_by_name() -> None:
    assert run.chosen("") == tuple(SUITES)
    assert run.chosen(" needle,bits ,needle") == ("needle", "bits")
    with pytest.raises(ValueError, match="no suites bytes; there are bits, stories"):
        run.chosen("bits,bytes")


def test_no_documents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(BenchError, match="holds no documents"):
        run.run(Scripted(lambda question: None), options(tmp_path / "none.jsonl", "bits"))


# ---- going on --------------------------------------------------------------------------------------------------------


class Crash(Exception):
    pass


def test_a_run_that_broke_off_goes_on_and_ends_the_same(corpus: Path, tmp_path: Path) -> None:
    names, path = ("copy", "json", "memory"), tmp_path / "answers.jsonl"
    made = answered(plan(), names, lambda i, t: i % 3 != 0)
    uninterrupted = run.run(as_engine(made), options(corpus, *names))

    subject = as_engine(made)
    plain = subject.answers

    def crashing(questions: Sequence[Question]) -> Any:
        for count, pair in enumerate(plain(questions)):
            if len(asked) >= 17 and count == 3:
                raise Crash
            asked.append(pair[0])
            yield pair

    asked: list[Question] = []
    subject.answers = crashing  # type: ignore[method-assign]
    with pytest.raises(Crash):
        run.run(subject, options(corpus, *names, record=path))
    first = len(path.read_text().splitlines()) - 1
    assert first == len(asked) >= 17

    again = as_engine(made)
    found = run.run(again, options(corpus, *names, record=path))
    assert timeless(found) == timeless(uninterrupted)
    engine: Any = again._llm
    assert len(engine.asked) == len(made) - first, "what was answered is asked again"
    once_more = as_engine({})
    assert timeless(run.run(once_more, options(corpus, *names, record=path))) == timeless(uninterrupted)


def test_other_settings_do_not_mix(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    subject = Scripted(lambda question: Scored((Span(5, 2, 1.0),)))
    run.run(subject, options(corpus, "bits", record=path))
    with pytest.raises(BadRecord, match="seed was 0, is 1"):
        run.run(subject, options(corpus, "bits", record=path, seed=1))
    with pytest.raises(BadRecord, match="documents was"):
        run.run(subject, options(packaged(), "bits", record=path))


def test_more_questions_of_the_same_kind_go_on_too(corpus: Path, tmp_path: Path) -> None:
    subject = Scripted(lambda question: Scored((Span(5, 2, 1.0),)))
    run.run(subject, options(corpus, "bits", record=tmp_path / "a.jsonl"))
    run.run(subject, options(corpus, "bits", record=tmp_path / "a.jsonl", sizes=replace(SIZES, documents=9)))
    assert len(subject.asked) == 9


def test_progress_counts_all_work(corpus: Path) -> None:
    class Bar:
        total = done = 0
        seen: list[str] = []  # noqa: RUF012

        def begin(self, total: int) -> None:
            self.total = total

        def step(self, suite: str, done: int, of: int, work: int) -> None:
            self.done += work
            self.seen.append(f"{suite} {done}/{of}")

    bar = Bar()
    names = ("copy", "memory")
    run.run(as_engine(answered(plan(), names, lambda i, t: True)), options(corpus, *names), bar)
    assert bar.done == bar.total > 0
    assert bar.seen[0].startswith("copy 1/")
