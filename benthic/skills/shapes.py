"""Pictures of coloured shapes on a plain ground. A `Picture` is the record, drawn anew wherever it is needed."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

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
