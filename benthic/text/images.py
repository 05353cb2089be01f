"""Images on their way into a prompt: data URL -> bytes, bytes -> format, size and frames, from the header alone.

Source: online API specification, sections 2.8 and 4.3. Nothing here decodes a pixel, and nothing is fetched. A file is
told by its first bytes, whatever its name or declared type says, and only that format's reader sees it. Transparency is
shown on white and EXIF is not read, as the official service does it (measured with deepseek-recipe 0.2.0).
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

from benthic.errors import BadImage, ImageNotFetched, ImageTooLarge, MissingDependency, TooManyImages

if TYPE_CHECKING:
    from PIL import Image

MAX_IMAGES = 600  # of one conversation
MAX_IMAGE_BYTES = 32 << 20  # of one file
MAX_SIDE = 8192  # pixels
MAX_PIXELS = 1 << 31  # of one conversation, as the headers declare them: some 20 s of decoding
LOW_DETAIL_SIDE = 512  # pixels, the longer side of an image of detail "low"
FORMATS = "PNG, JPEG, GIF or WebP"

_URL_BYTES = MAX_IMAGE_BYTES * 4 // 3 + 1024  # base64, its head and some line breaks


def media_type(data: bytes) -> str | None:
    """What the first bytes say; None: none of `FORMATS`."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def data_url(data: bytes, where: str = "image") -> str:
    """An encoded image as the URL that a message holds. Raises BadImage, ImageTooLarge."""
    kind = _media_type(data, where)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def from_data_url(url: str, where: str = "image") -> bytes:
    """The bytes in a base64 data URL. Raises BadImage."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadImage(f"{where} is no base64 data URL; want data:image/png;base64,...")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"{where} is not valid base64: {error}") from error


def open_lazily(data: bytes, where: str = "image") -> "Image.Image":
    """The image with its header read and within the limits; its pixels come when they are asked for.

    Raises BadImage, ImageTooLarge; MissingDependency without Pillow.
    """
    kind = _media_type(data, where)
    try:
        from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
    except ImportError as error:
        raise MissingDependency("pillow", "vision") from error
    readers: Mapping[str, type[Any]] = {
        "image/png": PngImagePlugin.PngImageFile,
        "image/jpeg": JpegImagePlugin.JpegImageFile,
        "image/gif": GifImagePlugin.GifImageFile,
        "image/webp": WebPImagePlugin.WebPImageFile,
    }
    if kind == "image/webp":  # its reader makes room for the whole canvas at once
        _check_size(*_webp_size(data, where), where)
    try:
        image = cast("Image.Image", readers[kind](BytesIO(data)))
        _check_size(image.width, image.height, where)
        animated = bool(getattr(image, "is_animated", False))
    except BadImage:
        raise
    except Exception as error:  # the reader's answer to bytes that may be anything
        raise BadImage(f"{where} cannot be read as {kind}: {error}; is the file whole?") from error
    if animated:
        raise BadImage(f"{where} is animated, at most 1 frame is read; send the frame that is meant")
    return image


def scaled(width: int, height: int, longest: int | None) -> tuple[int, int]:
    """Pixels after the longer side is brought down to `longest`; None, or an image that is smaller: as they are."""
    side = max(width, height)
    if longest is None or side <= longest:
        return width, height
    return max(round(width * longest / side), 1), max(round(height * longest / side), 1)


def check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what a look at the image parts tells: too many, no data URL, too long. Before anything is decoded.

    Parts that are malformed otherwise are left to whoever converts the conversation.
    Raises TooManyImages, ImageNotFetched, ImageTooLarge.
    """
    count = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list | tuple):
            continue
        here = 0
        for part in cast(Sequence[object], content):
            url = _url(part)
            if url is None:
                continue
            count, here = count + 1, here + 1
            where = f"messages[{index}], image {here}"
            if count > MAX_IMAGES:
                raise TooManyImages(where, MAX_IMAGES)
            scheme, colon, _ = url[:32].strip().partition(":")
            if not colon or scheme.lower() != "data":
                raise ImageNotFetched(where, scheme.lower() if colon else "")
            if len(url) > _URL_BYTES:
                raise ImageTooLarge(f"{where} is a URL of {len(url)} characters", f"{MAX_IMAGE_BYTES} bytes of image")


def _url(part: object) -> str | None:
    if not isinstance(part, Mapping) or cast(Mapping[str, Any], part).get("type") != "image_url":
        return None
    body = cast(Mapping[str, Any], part).get("image_url")
    url = cast(Mapping[str, Any], body).get("url") if isinstance(body, Mapping) else body
    return url if isinstance(url, str) else None


def _media_type(data: bytes, where: str) -> str:
    if not data:
        raise BadImage(f"{where} has 0 bytes; want {FORMATS}")
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageTooLarge(f"{where} has {len(data)} bytes", f"{MAX_IMAGE_BYTES} bytes")
    kind = media_type(data)
    if kind is None:
        raise BadImage(f"{where} begins with {data[:8]!r}, which is none of {FORMATS}")
    return kind


def _check_size(width: int, height: int, where: str) -> None:
    if min(width, height) < 1:
        raise BadImage(f"{where} is {width} x {height} pixels; both sides must be at least 1")
    if max(width, height) > MAX_SIDE:
        raise ImageTooLarge(f"{where} is {width} x {height} pixels", f"{MAX_SIDE} pixels a side")


def _webp_size(data: bytes, where: str) -> tuple[int, int]:
    """Width and height as the first chunk of a WebP file declares them."""
    chunk, body = data[12:16], data[20:30]
    if len(body) == 10:
        if chunk == b"VP8X":
            return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
        if chunk == b"VP8L":
            bits = int.from_bytes(body[1:5], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if chunk == b"VP8 ":
            return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise BadImage(f"{where} cannot be read as image/webp: its header is cut short or unknown; is the file whole?")
