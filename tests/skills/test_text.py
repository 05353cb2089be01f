"""Skills of plain text: held-out tasks apart from training, what is asked for stands there, lengths, depths."""

import random
import re
from typing import Any

import pytest

from benthic.skills import text
from benthic.skills.base import SKILLS, Split, Task
from tests.skills.small import MATERIAL, SPLITS
from tests.train.small import NAMES

STATEMENT = re.compile("|".join(s.format(key="(?:the )?([a-z]+ [a-z]+)", code=r"(\d{4})") for s in text.STATEMENTS))


def make(skill: str, seed: int, split: Split = "train", **options: Any) -> Task:
    return SKILLS[skill].make(random.Random(seed), MATERIAL, split, **options)


def turns(task: Task) -> list[tuple[str, str]]:
    contents = [message["content"] for message in task.messages]
    return list(zip(contents[::2], contents[1::2], strict=True))


# Copy and needle


@pytest.mark.parametrize("skill", ["needle", "copy"])
def test_held_out_codes_never_stand_in_training(skill: str) -> None:
    codes = {
        split: {c for seed in range(300) for turn in turns(make(skill, seed, split)) for c in _codes(*turn)}
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
        for _, answer in turns(make("copy", seed, "held_out")):
            assert re.search(r"\b\d{3}7\b", answer), answer


@pytest.mark.parametrize("split", SPLITS)
def test_a_needle_is_said_once_and_asked_for_by_its_key(split: Split) -> None:
    for seed in range(200):
        asked_for = turns(make("needle", seed, split, tokens=400))
        said = [(a or b or c or d, e or f or g or h) for a, e, b, f, c, g, d, h in STATEMENT.findall(asked_for[0][0])]
        codes = dict(said)
        assert 1 <= len(said) == len(codes) <= 6
        assert 1 <= len(asked_for) <= min(4, len(codes))
        asked: list[str] = []
        for user, answer in asked_for:
            question = user.rpartition("\n\n")[2]
            (key,) = (key for key in codes if re.search(rf"\b{key}\b", question))
            assert answer == codes[key]
            asked.append(key)
        assert len(set(asked)) == len(asked)


def needle_text(seed: int, **options: Any) -> str:
    return make("needle", seed, **options).messages[0]["content"]


def test_needles_and_questions_can_be_set() -> None:
    task = make("needle", 3, "held_out", needles=4, questions=1)
    assert len(STATEMENT.findall(task.messages[0]["content"])) == 4
    assert task.turns == (1,)


@pytest.mark.parametrize("tokens", [100, 270, 1000, 4000])
def test_needle_texts_are_about_as_long_as_asked(tokens: int) -> None:
    for seed in range(50):
        length = len(needle_text(seed, tokens=tokens, needles=4, questions=1))
        assert abs(length - tokens * text.CHARACTERS_PER_TOKEN) <= 250, (seed, length)


def test_no_room_leaves_the_needles_alone() -> None:
    alone = needle_text(1, tokens=1, needles=2, questions=1)
    assert not any(name in alone for name in NAMES)
    assert len(STATEMENT.findall(alone)) == 2


def place(seed: int, **options: Any) -> float:
    """Where the code that is asked for first stands, as a share of the text."""
    task = make("needle", seed, **options)
    user, answer = turns(task)[0]
    return user.index(answer) / user.rindex("\n\n")


def test_needles_stand_at_any_depth() -> None:
    places = [place(seed, tokens=800, needles=1) for seed in range(200)]
    assert min(places) < 0.1
    assert max(places) > 0.85
    assert 0.4 < sum(places) / len(places) < 0.6


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_depth_of_the_needle_that_is_asked_for_can_be_set(depth: float) -> None:
    for seed in range(50):
        assert abs(place(seed, tokens=2000, needles=4, depth=depth) - depth) < 0.05


def test_training_lengths_are_log_uniform() -> None:
    lengths = sorted(int(make("needle", seed).level.split()[0]) for seed in range(1000))
    low, high = text.NEEDLE_TOKENS
    assert low <= lengths[0] < 1.05 * low
    assert 0.95 * high < lengths[-1] <= high
    assert abs(lengths[500] / (low * high) ** 0.5 - 1) < 0.15  # the geometric mean of the ends


@pytest.mark.parametrize("split", SPLITS)
def test_a_line_is_copied_by_its_number(split: Split) -> None:
    for seed in range(200):
        asked_for = turns(make("copy", seed, split))
        lines = dict(re.findall(r"^(\d)\. (.*)$", asked_for[0][0], re.MULTILINE))
        assert 2 <= len(lines) <= 8
        numbers = []
        for user, answer in asked_for:
            (number,) = re.findall(r"line (\d)", user.rpartition("\n\n")[2])
            assert answer == lines[number]
            numbers.append(number)
        assert len(set(numbers)) == len(numbers)
