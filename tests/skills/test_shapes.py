"""Pictures: where the pixels of each shape are, that records come back, and what is asked about them."""

import base64
import io
import json
import math
import random
import re
from itertools import combinations
from typing import Any

import pytest
from PIL import Image

from benthic.skills import shapes
from benthic.skills.base import SKILLS, Split, Task
from benthic.skills.shapes import KINDS, Picture, Shape, data_url, draw, png
from tests.skills.small import MATERIAL, SPLITS

GROUND, RED, BLUE = (200, 200, 190), (220, 30, 40), (20, 30, 200)


def inside(kind: str, dx: float, dy: float) -> bool:
    """Is a place in a shape that reaches 1 from its middle: y points down."""
    if kind == "circle":
        return math.hypot(dx, dy) <= 1
    if kind == "ring":
        return 0.6 <= math.hypot(dx, dy) <= 1
    if kind == "square":
        return max(abs(dx), abs(dy)) <= math.sqrt(0.5)
    if kind == "triangle":
        return dy <= 0.5 and abs(dx) <= (dy + 1) / math.sqrt(3)
    return (abs(dx) <= 0.3 and abs(dy) <= 1) or (abs(dy) <= 0.3 and abs(dx) <= 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "height", "x", "y", "reach"), [(64, 64, 30, 33, 20), (300, 100, 200.5, 50, 45)])
def test_each_shape_covers_its_place(kind: str, width: int, height: int, x: float, y: float, reach: float) -> None:
    image = draw(Picture(width, height, GROUND, (Shape(kind, RED, x, y, reach),)))
    assert (image.size, image.mode) == ((width, height), "RGB")
    wrong = sum(
        (image.getpixel((i, j)) == RED) != inside(kind, (i - x) / reach, (j - y) / reach)
        for i in range(width)
        for j in range(height)
    )
    assert wrong < 9 * reach  # along the edge alone
    assert {colour for _, colour in image.getcolors() or ()} == {GROUND, RED}


def test_later_shapes_lie_over_earlier_ones() -> None:
    image = draw(Picture(64, 64, GROUND, (Shape("circle", RED, 30, 30, 20), Shape("square", BLUE, 30, 30, 5))))
    assert image.getpixel((30, 30)) == BLUE
    assert image.getpixel((30, 15)) == RED


def test_records_and_files_come_back() -> None:
    picture = Picture(80, 64, GROUND, (Shape("ring", RED, 30.25, 30, 20), Shape("cross", BLUE, 60, 40, 11.5)))
    assert Picture.of_json(json.loads(json.dumps(picture.as_json()))) == picture
    file = Image.open(io.BytesIO(png(picture)))
    assert (file.format, file.tobytes()) == ("PNG", draw(picture).tobytes())
    kind, _, payload = data_url(picture).partition(";base64,")
    assert (kind, base64.b64decode(payload)) == ("data:image/png", png(picture))


@pytest.mark.parametrize("change", [{"shapes": [["blob", RED, 1, 2, 3]]}, {"shapes": [[]]}, {"ground": [1, 2]}])
def test_a_bad_record_is_refused(change: dict[str, object]) -> None:
    record = Picture(80, 64, GROUND, ()).as_json()
    with pytest.raises((ValueError, TypeError, KeyError)):
        Picture.of_json(record | change)


# The skill


def make(seed: int, split: Split = "train", **options: Any) -> Task:
    return SKILLS["shapes"].make(random.Random(seed), MATERIAL, split, **options)


def nearest_ink(colour: tuple[int, int, int]) -> str:
    return min(shapes.INK, key=lambda name: math.dist(shapes.INK[name], colour))


def place(shape: Shape, picture: Picture) -> str:
    def third(at: float, side: int) -> int:
        return 0 if at < 0.36 * side else 2 if at > 0.64 * side else 1

    words = (
        ("top", "", "bottom")[third(shape.y, picture.height)],
        ("left", "", "right")[third(shape.x, picture.width)],
    )
    return " ".join(filter(None, words)) or "middle"


def answer(question: str, picture: Picture) -> str:
    """Worked out from the record of the picture alone."""
    named = [(nearest_ink(shape.colour), shape) for shape in picture.shapes]
    if question in shapes.ASKS["count"]:
        return ("one", "two")[len(named) - 1]
    if question in shapes.ASKS["picture"]:
        return " and ".join(f"{'an' if ink == 'orange' else 'a'} {ink} {shape.kind}" for ink, shape in named)
    ((ink, shape),) = [(i, s) for i, s in named if re.search(rf"\b({i}|{s.kind})\b", question)]
    if "colour" in question:
        return ink
    return place(shape, picture) if question.startswith("Where") else shape.kind


def question_of(message: dict[str, Any]) -> str:
    if isinstance(message["content"], str):
        return message["content"]
    (text,) = (part["text"] for part in message["content"] if part["type"] == "text")
    return text


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_what_the_picture_shows(split: Split) -> None:
    for seed in range(150):
        task = make(seed, split)
        (picture,) = task.pictures
        questions = [question_of(message) for message in task.messages[::2]]
        assert 1 <= len(questions) <= 3
        for question, message in zip(questions, task.messages[1::2], strict=True):
            assert message["content"] == answer(question, picture), (question, picture)
        (url,) = (p["image_url"]["url"] for p in task.messages[0]["content"] if p["type"] == "image_url")
        assert url == data_url(picture)
        assert task.level == f"{len(picture.shapes)} shape" + "s" * (len(picture.shapes) - 1)


def test_shapes_stand_apart_inside_the_picture_and_are_seen() -> None:
    for seed in range(200):
        (picture,) = make(seed).pictures
        assert min(picture.width, picture.height) >= 64
        assert max(picture.width, picture.height) <= min(512, 3 * min(picture.width, picture.height))
        for kind, colour, x, y, reach in picture.shapes:
            assert min(x, y, picture.width - x, picture.height - y) >= reach - 1, picture
            assert reach >= 0.12 * min(picture.width, picture.height) - 1
            assert math.dist(colour, picture.ground) > 50
            assert kind in KINDS
        if len(picture.shapes) == 2:
            a, b = picture.shapes
            assert math.dist(a[2:4], b[2:4]) > a.reach + b.reach
            assert a.kind != b.kind
            assert nearest_ink(a.colour) != nearest_ink(b.colour)


@pytest.mark.parametrize("pair", list(combinations(shapes.INK, 2)))
def test_every_pair_of_colours_has_a_ground(pair: tuple[str, str]) -> None:
    seen = [shapes.Seen(colour, kind, 1, column) for colour, kind, column in zip(pair, KINDS, (0, 2), strict=False)]
    assert len(shapes._paint(random.Random(0), 100, 100, seen).shapes) == 2


def test_every_answer_comes_up() -> None:
    answers = {message["content"] for seed in range(500) for message in make(seed).messages[1::2]}
    places = {" ".join(filter(None, (r, c))) or "middle" for r in ("top", "", "bottom") for c in ("left", "", "right")}
    assert {*shapes.INK, *KINDS, *places, "one", "two"} < answers


def test_count_and_question_can_be_set() -> None:
    for seed in range(20):
        for count in (1, 2):
            for ask in shapes.ASKS:
                task = make(seed, count=count, ask=ask)
                assert len(task.pictures[0].shapes) == count
                assert len(task.messages) == 2
                assert task.level.startswith(f"{ask}, {count} shape")


def test_no_size_of_a_held_out_picture_stands_in_training() -> None:
    sizes = {
        split: {(t.pictures[0].width, t.pictures[0].height) for t in (make(seed, split) for seed in range(300))}
        for split in SPLITS
    }
    assert len(sizes["held_out"]) > 250
    assert not sizes["train"] & sizes["held_out"]
