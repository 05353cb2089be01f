"""Skill documents: the same from the same seed, held-out ones apart from training, answers that can be checked."""

import random
import re

import pytest

from benthic.train import skills
from benthic.train.skills import Document, Split
from tests.train.small import DEEDS, NAMES, THINGS, story

WORDS = sorted({*THINGS, *DEEDS})
SENTENCES = skills.sentences_of(story(random.Random(5), 200))
SPLITS: tuple[Split, ...] = ("train", "held_out")
STATEMENT = re.compile("|".join(s.format(key="(?:the )?([a-z]+ [a-z]+)", code=r"(\d{4})") for s in skills.STATEMENTS))


def needle(seed: int, split: Split = "train", characters: int = 1500, **options: int) -> Document:
    return skills.needle(random.Random(seed), SENTENCES, split, characters=characters, **options)


def copy(seed: int, split: Split = "train") -> Document:
    return skills.copy(random.Random(seed), WORDS, SENTENCES, split)


@pytest.mark.parametrize("make", [needle, copy])
def test_seeded(make) -> None:
    assert [make(seed) for seed in range(20)] == [make(seed) for seed in range(20)]
    assert len({make(seed).turns for seed in range(20)}) == 20


@pytest.mark.parametrize("make", [needle, copy])
def test_held_out_codes_never_stand_in_training(make) -> None:
    codes = {
        split: {c for s in range(300) for t in make(s, split).turns for c in _codes(t.user, t.answer)}
        for split in SPLITS
    }
    assert all(code.endswith("7") for code in codes["held_out"])
    assert not any(code.endswith("7") for code in codes["train"])
    assert {code[-1] for code in codes["train"]} == set("012345689")
    assert len(codes["held_out"]) > 100


def _codes(*texts: str) -> list[str]:
    return [code for text in texts for code in re.findall(r"\b\d{4}\b", text)]


def test_every_held_out_line_to_copy_has_a_held_out_code() -> None:
    for seed in range(200):
        for turn in copy(seed, "held_out").turns:
            assert re.search(r"\b\d{3}7\b", turn.answer), turn.answer


@pytest.mark.parametrize("split", SPLITS)
def test_a_needle_is_said_once_and_asked_for_by_its_key(split: Split) -> None:
    for seed in range(200):
        document = needle(seed, split)
        said = [
            (a or b or c or d, e or f or g or h) for a, e, b, f, c, g, d, h in STATEMENT.findall(document.turns[0].user)
        ]
        codes = dict(said)
        assert 1 <= len(said) == len(codes) <= 6
        assert 1 <= len(document.turns) <= min(4, len(codes))
        asked: list[str] = []
        for turn in document.turns:
            question = turn.user.rpartition("\n\n")[2]
            (key,) = (key for key in codes if re.search(rf"\b{key}\b", question))
            assert turn.answer == codes[key]
            assert skills.correct(f" {codes[key]}\n", turn.answer)
            asked.append(key)
        assert len(set(asked)) == len(asked)


def test_needles_and_questions_can_be_set() -> None:
    document = needle(3, "held_out", needles=4, questions=1)
    assert len(STATEMENT.findall(document.turns[0].user)) == 4
    assert len(document.turns) == 1


@pytest.mark.parametrize("characters", [400, 1000, 3600])
def test_needle_documents_are_about_as_long_as_asked(characters: int) -> None:
    for seed in range(50):
        length = len(needle(seed, characters=characters, needles=4, questions=1).turns[0].user)
        assert abs(length - characters) <= 250, (seed, length)


def test_no_room_leaves_the_needles_alone() -> None:
    text = needle(1, characters=0, needles=2, questions=1).turns[0].user
    assert not any(name in text for name in NAMES)
    assert len(STATEMENT.findall(text)) == 2


def test_needles_stand_at_any_depth() -> None:
    places = []
    for seed in range(200):
        text = needle(seed, characters=3000, needles=1, questions=1).turns[0].user
        found = STATEMENT.search(text)
        assert found is not None
        places.append(found.start() / len(text))
    assert min(places) < 0.1
    assert max(places) > 0.85
    assert 0.4 < sum(places) / len(places) < 0.6


def test_training_lengths_are_log_uniform() -> None:
    rng = random.Random(0)
    lengths = sorted(skills.needle_characters(rng) for _ in range(2000))
    assert lengths[0] >= 400
    assert lengths[-1] <= 3600
    assert abs(lengths[1000] - 1200) < 100  # the geometric mean of the ends


@pytest.mark.parametrize("split", SPLITS)
def test_a_line_is_copied_by_its_number(split: Split) -> None:
    for seed in range(200):
        document = copy(seed, split)
        lines = dict(re.findall(r"^(\d)\. (.*)$", document.turns[0].user, re.MULTILINE))
        assert 2 <= len(lines) <= 8
        numbers = []
        for turn in document.turns:
            ask = turn.user.rpartition("\n\n")[2]
            (number,) = re.findall(r"line (\d)", ask)
            assert turn.answer == lines[number]
            numbers.append(number)
        assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("answer", ["1234", " 1234", "1234\n", "\t1234 "])
def test_checker_accepts(answer: str) -> None:
    assert skills.correct(answer, "1234")


@pytest.mark.parametrize("answer", ["", "123", "12345", "1235", "1234.", "the code is 1234", "12 34", "1234 1234"])
def test_checker_refuses(answer: str) -> None:
    assert not skills.correct(answer, "1234")


def test_checker_tells_case_and_inner_space_apart() -> None:
    assert not skills.correct("Red box", "red box")
    assert not skills.correct("red  box", "red box")


def test_sentences_are_cut_at_their_ends_and_kept_by_length() -> None:
    short, long = "Too short.", "x" * 200 + "."
    kept = ["This one is long enough.", "And is it really so?", "And this is not one 3.5 m long!"]
    assert skills.sentences_of(" ".join([short, kept[0], long]) + "\n\n" + " ".join(kept[1:])) == kept
    assert skills.sentences_of("") == []
