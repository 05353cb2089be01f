"""Pictures of one or two coloured shapes on a plain ground: what is there, in which colour, where, how many.

A `Picture` is the record, drawn anew wherever it is needed. Each shape stands in a cell of a 3 x 3 grid, with room to
its neighbours, so that its place has a name.
"""

import base64
import io
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from benthic.skills.base import Material, Split, Task, belongs

RGB = tuple[int, int, int]

KINDS = ("circle", "square", "triangle", "cross", "ring")


class Shape(NamedTuple):
    """One of KINDS; its middle and how far it reaches from there, in pixels."""

    kind: str
    colour: RGB
    x: float
    y: float
    reach: float


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes on a plain ground; width and height in pixels."""

    width: int
    height: int
    ground: RGB
    shapes: tuple[Shape, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> "Picture":
        """The inverse of `as_json`. Raises KeyError, TypeError or ValueError when it is no such record."""
        shapes = tuple(
            Shape(str(kind), _rgb(colour), float(x), float(y), float(reach))
            for kind, colour, x, y, reach in record["shapes"]
        )
        unknown = {shape.kind for shape in shapes} - set(KINDS)
        if unknown:
            raise ValueError(f"no such shapes: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
        return cls(int(record["width"]), int(record["height"]), _rgb(record["ground"]), shapes)


def _rgb(values: Sequence[int]) -> RGB:
    red, green, blue = values
    return int(red), int(green), int(blue)


def draw(picture: Picture) -> Image.Image:
    """RGB, width x height pixels; later shapes over earlier ones."""
    image = Image.new("RGB", (picture.width, picture.height), picture.ground)
    pen = ImageDraw.Draw(image)
    for kind, colour, x, y, r in picture.shapes:
        box = (x - r, y - r, x + r, y + r)
        if kind == "circle":
            pen.ellipse(box, fill=colour)
        elif kind == "ring":
            pen.ellipse(box, outline=colour, width=max(round(r * 0.4), 1))
        elif kind == "square":
            side = r * math.sqrt(0.5)
            pen.rectangle((x - side, y - side, x + side, y + side), fill=colour)
        elif kind == "triangle":
            half = r * math.sqrt(0.75)
            pen.polygon([(x, y - r), (x + half, y + r / 2), (x - half, y + r / 2)], fill=colour)
        else:
            arm = r * 0.3
            pen.rectangle((x - r, y - arm, x + r, y + arm), fill=colour)
            pen.rectangle((x - arm, y - r, x + arm, y + r), fill=colour)
    return image


def png(picture: Picture) -> bytes:
    """The file, for whatever reads pictures as files."""
    file = io.BytesIO()
    draw(picture).save(file, "PNG")
    return file.getvalue()


def data_url(picture: Picture) -> str:
    """The file in a `data:` URL, as image_url parts carry it."""
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode('ascii')}"


# ---- the skill -------------------------------------------------------------------------------------------------------

SIDES = (64, 512)  # pixels
LONGEST_ASPECT = 3
INK: dict[str, RGB] = {
    "red": (215, 40, 40),
    "green": (40, 155, 60),
    "blue": (40, 80, 215),
    "yellow": (245, 215, 40),
    "orange": (245, 140, 30),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
GROUNDS: tuple[RGB, ...] = (
    (200, 200, 200), (95, 95, 95), (225, 210, 180), (170, 200, 230), (175, 220, 185), (120, 85, 60), (235, 190, 205),
)  # fmt: skip
JITTER = 12  # of each channel of a colour
CONTRAST = 90  # least distance between a shape's colour and the ground's
CELLS = (0.22, 0.5, 0.78)  # of a side
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
COUNTS = ("one", "two")
ASKS = {
    "colour": ("What colour is the {kind}?", "Which colour does the {kind} have?"),
    "shape": ("Which shape is {colour}?", "What is the shape of the {colour} one?"),
    "position": ("Where is the {kind}?", "Where is the {colour} shape?"),
    "count": ("How many shapes are there?", "How many shapes do you see?"),
    "picture": ("What is in the picture?", "Describe the picture."),
}


class Seen(NamedTuple):
    """What there is to be said of a shape."""

    colour: str
    kind: str
    row: int  # of the grid, from the top
    column: int

    @property
    def place(self) -> str:
        words = [word for word in (ROWS[self.row], COLUMNS[self.column]) if word != "middle"]
        return " ".join(words) or "middle"

    @property
    def name(self) -> str:
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.colour} {self.kind}"


def shapes(
    rng: random.Random,
    material: Material,
    split: Split,
    *,
    count: int | None = None,
    ask: str | None = None,
) -> Task:
    """A picture, then 1 to 3 questions of different kinds. Pictures of a held-out width and height are held out.

    count  shapes in the picture, 1 or 2, default either
    ask    one of ASKS: a single question of this kind
    """
    number = count or rng.randint(1, 2)
    while True:
        width, height = (round(math.exp(rng.uniform(*map(math.log, SIDES)))) for _ in range(2))
        if max(width, height) <= LONGEST_ASPECT * min(width, height) and belongs(split, "shapes", width, height):
            break
    seen = _place(rng, number)
    picture = _paint(rng, width, height, seen)
    kinds = [ask] if ask else rng.sample(list(ASKS), rng.randint(1, 3))
    turns = [_question(rng, kind, seen) for kind in kinds]
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}},
        {"type": "text", "text": turns[0][0]},
    ]
    if rng.random() < 0.3:
        parts.reverse()
    messages: list[dict[str, Any]] = []
    for i, (user, answer) in enumerate(turns):
        messages += [{"role": "user", "content": user if i else parts}, {"role": "assistant", "content": answer}]
    level = f"{number} shape{'s' if number > 1 else ''}"
    return Task("shapes", tuple(messages), level=f"{ask}, {level}" if ask else level, pictures=(picture,))


def _place(rng: random.Random, number: int) -> list[Seen]:
    """Different shapes in different colours, two of them at opposite sides, in reading order along that way."""
    colours, kinds = rng.sample(list(INK), number), rng.sample(KINDS, number)
    if number == 1:
        return [Seen(colours[0], kinds[0], rng.randrange(3), rng.randrange(3))]
    sides, others = (0, 2), (rng.randrange(3), rng.randrange(3))
    cells = list(zip(others, sides, strict=True)) if rng.random() < 0.5 else list(zip(sides, others, strict=True))
    return [Seen(colour, kind, *cell) for colour, kind, cell in zip(colours, kinds, cells, strict=True)]


def _paint(rng: random.Random, width: int, height: int, seen: list[Seen]) -> Picture:
    inks = [_near(rng, INK[shape.colour]) for shape in seen]
    ground = _near(rng, rng.choice([g for g in GROUNDS if all(math.dist(g, ink) >= CONTRAST for ink in inks)]))
    drawn: list[Shape] = []
    for shape, ink in zip(seen, inks, strict=True):
        sides = ((width, shape.column), (height, shape.row))
        room = min(side * (0.3 if cell == 1 else 0.17) for side, cell in sides)
        reach = room * rng.uniform(0.75, 1)
        x, y = (side * (CELLS[cell] + rng.uniform(-0.04, 0.04)) for side, cell in sides)
        drawn.append(Shape(shape.kind, ink, round(x), round(y), round(reach)))
    return Picture(width, height, ground, tuple(drawn))


def _near(rng: random.Random, colour: RGB) -> RGB:
    red, green, blue = (min(max(channel + rng.randint(-JITTER, JITTER), 0), 255) for channel in colour)
    return red, green, blue


def _question(rng: random.Random, kind: str, seen: list[Seen]) -> tuple[str, str]:
    shape = rng.choice(seen)
    ask = rng.choice(ASKS[kind]).format(kind=shape.kind, colour=shape.colour)
    if kind == "picture":
        return ask, " and ".join(shape.name for shape in seen)
    return ask, {
        "colour": shape.colour,
        "shape": shape.kind,
        "position": shape.place,
        "count": COUNTS[len(seen) - 1],
    }[kind]
