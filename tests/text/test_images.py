"""What is told from an image's header, and which files are refused before a pixel is decoded."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benthic.errors import BadImage, ImageTooLarge
from benthic.text import images


def encoded(kind: str, size: tuple[int, int] = (13, 7), mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, 1 if mode in ("P", "L", "1") else None).save(out, kind, **options)
    return out.getvalue()


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    return out.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds almost nothing."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def webp_of(width: int, height: int) -> bytes:
    """A WebP whose extended header declares a canvas."""
    body = b"\0\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    rest = b"VP8X" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(rest)) + b"WEBP" + rest


GOOD = {
    "png": lambda: encoded("PNG"),
    "png palette": lambda: encoded("PNG", mode="P"),
    "png one bit": lambda: encoded("PNG", mode="1"),
    "jpeg": lambda: encoded("JPEG"),
    "jpeg progressive": lambda: encoded("JPEG", progressive=True),
    "jpeg cmyk": lambda: encoded("JPEG", mode="CMYK"),
    "gif": lambda: encoded("GIF", mode="P"),
    "webp lossy": lambda: encoded("WEBP"),
    "webp lossless": lambda: encoded("WEBP", lossless=True),
    "webp extended": lambda: encoded("WEBP", mode="RGBA", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"),
}
KINDS = {"png": "image/png", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}


@pytest.mark.parametrize("name", GOOD)
def test_size_and_kind(name: str) -> None:
    data = GOOD[name]()
    assert images.media_type(data) == KINDS[name.split()[0]]
    assert images.open_lazily(data).size == (13, 7)
    url = images.data_url(data)
    assert url.startswith(f"data:{KINDS[name.split()[0]]};base64,")
    assert images.from_data_url(url) == data


def test_the_declared_type_does_not_matter() -> None:
    url = images.data_url(encoded("JPEG")).replace("image/jpeg", "image/png").replace(",/9", ",\n/9")
    assert images.from_data_url(url) == encoded("JPEG")


@pytest.mark.parametrize("name", GOOD)
def test_no_pixel_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any) -> None:
        raise AssertionError("pixels were asked for")

    data = GOOD[name]()
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    assert images.open_lazily(data).size == (13, 7)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_refused(kind: str) -> None:
    with pytest.raises(BadImage, match="is animated, at most 1 frame"):
        images.open_lazily(animated(kind))


@pytest.mark.parametrize("make", [png_of, webp_of])
@pytest.mark.parametrize("size", [(60000, 60000), (8193, 1), (1, 8193), (16384, 16384)])
def test_bombs_are_told_by_their_header(make: Callable[[int, int], bytes], size: tuple[int, int]) -> None:
    with pytest.raises(ImageTooLarge, match=f"{size[0]} x {size[1]} pixels, at most 8192 pixels a side"):
        images.open_lazily(make(*size))


def test_the_largest_size_is_read() -> None:
    assert images.open_lazily(png_of(8192, 8192)).size == (8192, 8192)


def test_a_gif_whose_frame_is_larger_than_its_screen() -> None:
    data = bytearray(encoded("GIF", (50, 40), mode="P"))
    data[6:10] = struct.pack("<HH", 3, 3)
    assert images.open_lazily(bytes(data)).size == (50, 40)


@pytest.mark.parametrize("make", [lambda: png_of(0, 5), lambda: png_of(5, 0)])
def test_an_image_without_pixels(make: Callable[[], bytes]) -> None:
    with pytest.raises(BadImage):
        images.open_lazily(make())


@pytest.mark.parametrize(
    "data", [b"", b"BM" + bytes(60), b"%PDF-1.4", b"<svg/>", b"II*\0" + bytes(60), b"RIFF\0\0\0\0WAVEfmt "]
)
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(BadImage, match="PNG, JPEG, GIF or WebP"):
        images.open_lazily(data)
    with pytest.raises(BadImage, match="PNG, JPEG, GIF or WebP"):
        images.data_url(data)


def test_a_file_of_too_many_bytes() -> None:
    with pytest.raises(ImageTooLarge, match=f"{(32 << 20) + 1} bytes, at most {32 << 20} bytes"):
        images.open_lazily(b"\x89PNG\r\n\x1a\n" + bytes((32 << 20) - 7))


def test_a_url_that_is_too_long_is_not_decoded() -> None:
    url = "data:image/png;base64," + "A" * (44 << 20)
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(ImageTooLarge, match="characters"):
        images.check_parts([{"role": "user", "content": [part]}])


@pytest.mark.parametrize("name", GOOD)
def test_a_header_cut_anywhere_is_typed(name: str) -> None:
    data = GOOD[name]()
    for end in range(min(len(data), 200)):
        try:
            images.open_lazily(data[:end])
        except BadImage:
            continue


@given(st.sampled_from(sorted(GOOD)), st.integers(0, 2**31), st.integers(1, 8))
def test_damaged_headers_are_typed(name: str, seed: int, count: int) -> None:
    import random

    data, rng = bytearray(GOOD[name]()), random.Random(seed)
    for _ in range(count):
        data[rng.randrange(min(len(data), 120))] = rng.randrange(256)
    try:
        image = images.open_lazily(bytes(data))
    except BadImage:
        return
    assert 1 <= min(image.size) <= max(image.size) <= images.MAX_SIDE


@pytest.mark.parametrize(
    ("size", "longest", "want"),
    [
        ((10, 20), None, (10, 20)),
        ((10, 20), 20, (10, 20)),
        ((4000, 3000), 512, (512, 384)),
        ((3, 4000), 512, (1, 512)),
        ((700, 701), 512, (511, 512)),
    ],
)
def test_scaled(size: tuple[int, int], longest: int | None, want: tuple[int, int]) -> None:
    assert images.scaled(*size, longest) == want


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:image/png,AA", "data:image/png;base64,A", "x"])
def test_a_url_that_holds_no_base64(url: str) -> None:
    with pytest.raises(BadImage):
        images.from_data_url(url)
