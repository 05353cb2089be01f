"""Pictures: where the pixels of each shape are, and that records come back."""

import base64
import io
import json
import math

import pytest
from PIL import Image

from benthic.skills.shapes import KINDS, Picture, Shape, data_url, draw, png

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
