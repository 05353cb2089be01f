"""The vision tower: geometry against golden tables, patches and tower against the slow float64 one."""

import io
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benthic.errors import BadImage, MissingDependency, NoVision
from benthic.kernels import backends
from benthic.models.deepseek_v41 import from_checkpoint
from benthic.models.deepseek_v41_config import ModelConfig, VisionConfig
from benthic.models.deepseek_v41_vision import (
    VisionTower,
    geometry,
    largest_geometry,
    patches,
    pixel_patches,
    places,
    read_image,
    scaled,
)
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import config_path, make_tiny
from benthic.types import NUMERICS
from tests.oracle.slow_vision import SlowVision
from tests.oracle.slow_vision import geometry as slow_geometry
from tests.oracle.slow_vision import patches as slow_patches

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "vision.json").read_text())


def vision_config(name: str = "v41_flash") -> VisionConfig:
    config = ModelConfig.from_json(config_path(name)).vision
    assert config is not None
    return config


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: "x".join(map(str, row["image"])))
def test_geometry_is_the_golden_table(row: dict[str, Any]) -> None:
    width, height = row["image"]
    geo = geometry(width, height, vision_config())
    got = (geo.canvas_width, geo.canvas_height, geo.cells_w, geo.cells_h, geo.tokens)
    assert got == (row["width"], row["height"], row["grid_width"], row["grid_height"], row["tokens"])
    assert geo.tokens <= 1024


@pytest.mark.parametrize(
    ("size", "canvas", "tokens"),
    [
        ((10, 10), (546, 546), 184),
        ((64, 64), (546, 546), 184),
        ((640, 480), (644, 490), 206),
        ((1024, 1024), (1036, 1036), 652),
        ((4000, 3000), (1512, 1134), 1001),
    ],
)
def test_geometry_is_what_the_official_counter_measured(
    size: tuple[int, int], canvas: tuple[int, int], tokens: int
) -> None:
    geo = geometry(*size, vision_config())
    assert ((geo.canvas_width, geo.canvas_height), geo.tokens) == (canvas, tokens)


@pytest.mark.parametrize("changes", [{}, {"max_wh_ratio": 3}, {"min_pixels": 30000}])
@pytest.mark.parametrize("tokens", [4, 5, 9, 20, 33, 1000])
def test_no_image_of_so_few_tokens_has_more_patches(tokens: int, changes: dict[str, Any]) -> None:
    config = replace(vision_config("tiny"), **changes)
    most = min(tokens, config.max_image_tokens)
    largest = largest_geometry(config, tokens)
    assert largest.tokens <= most
    limited = replace(config, max_image_tokens=most)
    sizes = [(width, height) for width in range(14, 42 * most, 28) for height in (*range(1, 400, 14), 42 * most)]
    found = max(geo.grid_h * geo.grid_w for geo in (geometry(*size, limited) for size in sizes))
    assert largest.grid_h * largest.grid_w >= found


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 3)])
def test_an_empty_image_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BadImage, match="at least 1"):
        geometry(*size, vision_config())


@pytest.mark.parametrize("size", [(84, 84), (120, 80), (40, 200)])
def test_patches_are_scaled_padded_and_cut_row_major(size: tuple[int, int]) -> None:
    config = vision_config("tiny")
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    rows, geo = patches(image, config)
    row = {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 7056, "max_wh_ratio": None}
    canvas = slow_geometry(*size, row)
    inner = image.resize((canvas.inner_width, canvas.inner_height), Image.Resampling.BICUBIC)
    whole = np.full((canvas.height, canvas.width, 3), 127, dtype=np.uint8)
    whole[canvas.top : canvas.top + inner.height, canvas.left : canvas.left + inner.width] = np.asarray(inner)
    want = torch.from_numpy(slow_patches(whole, 14)).to(torch.bfloat16)
    assert rows.shape == (geo.grid_h * geo.grid_w, 588)
    assert torch.equal(rows, want)
    pixels, same = pixel_patches(image, config)
    assert (pixels.dtype, same) == (np.uint8, geo)
    assert torch.equal(scaled(torch.from_numpy(pixels)), rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("vision") / "tiny", "tiny", seed=3)


@pytest.mark.parametrize("grid", [(6, 9), (3, 3), (7, 4), (1, 1)])
def test_tower_and_aligner_equal_the_slow_ones(folder: Path, grid: tuple[int, int]) -> None:
    checkpoint = Checkpoint.open(folder)
    tower = VisionTower(checkpoint.config, NUMERICS["float"])
    tower.load(checkpoint)
    height, width = grid
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(height * width, 588, generator=generator)
    with torch.no_grad():
        at, cells = (part[None] for part in places(height, width, 3))
        features = tower.features(rows[None], at)
        cells = tower.align(features, cells)[0]
    slow = SlowVision(folder)
    want = slow.tower(rows.double().numpy(), height, width)
    assert np.abs(features[0].numpy() - want).max() < 1e-4
    assert np.abs(cells.numpy() - slow.align(want, height, width)).max() < 1e-4


def test_images_of_several_sizes_side_by_side_are_each_what_they_are_alone(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    tower = VisionTower(checkpoint.config, NUMERICS["float"])
    tower.load(checkpoint)
    grids = [(6, 9), (3, 3), (7, 4), (1, 1)]
    generator = torch.Generator().manual_seed(2)
    each = [(torch.randn(h * w, 588, generator=generator), *places(h, w, 3)) for h, w in grids]
    most, cells = 56, max(len(c) for *_, c in each)
    rows, at = torch.full((4, most, 588), 3.0), torch.full((4, most, 2), 5.0)  # what fills up must not matter
    real, merged = torch.zeros(4, most, dtype=torch.bool), torch.full((4, cells, 9), most)
    for i, (x, where, of) in enumerate(each):
        rows[i, : len(x)], at[i, : len(x)], real[i, : len(x)] = x, where, True
        merged[i, : len(of)] = torch.where(of == len(x), most, of)
    with torch.no_grad():
        together = tower.align(tower.features(rows, at, real), merged)
        for i, (x, where, of) in enumerate(each):
            alone = tower.align(tower.features(x[None], where[None]), of[None])[0]
            torch.testing.assert_close(together[i, : len(of)], alone, atol=1e-5, rtol=1e-5)


def test_span_has_delimiters_and_newlines(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    tower = VisionTower(checkpoint.config, NUMERICS["float"])
    tower.load(checkpoint)
    rows, geo = patches(Image.new("RGB", (120, 80), (200, 30, 90)), vision_config("tiny"))
    with torch.no_grad():
        span = tower(rows, geo)
    assert span.shape == (geo.tokens, checkpoint.config.text.hidden_size)
    assert torch.equal(span[0], checkpoint.tensor("image_start").float())
    assert torch.equal(span[-1], checkpoint.tensor("image_end").float())
    for line in range(geo.cells_h):
        assert torch.equal(span[(line + 1) * (geo.cells_w + 1)], checkpoint.tensor("image_newline").float())


# ---- from bytes ------------------------------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def rows_of(source: bytes, name: str = "tiny", longest: int | None = None) -> torch.Tensor:
    return scaled(read_image(source, vision_config(name), longest).pixels)


def picture(size: tuple[int, int], mode: str = "RGB", seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], len(mode)), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze())


@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("PNG", {"compress_level": 0})]
)
def test_bytes_become_the_patches_of_their_pixels(kind: str, options: dict[str, Any]) -> None:
    config, image = vision_config("tiny"), picture((120, 80))
    got, (rows, geo) = read_image(encoded(image, kind, **options), config), patches(image, config)
    assert got.geometry == geo
    assert torch.equal(scaled(got.pixels), rows)


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "WEBP"])
def test_lossy_formats_are_near(kind: str) -> None:
    config = vision_config("tiny")
    image = Image.linear_gradient("L").resize((120, 80)).convert("RGB")
    got, (want, _) = rows_of(encoded(image, kind)), patches(image, config)
    assert float((got.float() - want.float()).abs().mean()) < 0.05


def shown(image: Image.Image, **options: Any) -> tuple[int, ...]:
    """Colour of the middle of a picture of one colour, back from its patches."""
    rows = rows_of(encoded(image, **options)).float()
    middle = rows[len(rows) // 2].view(3, -1).mean(1)
    return tuple(round(float(value + 1) * 127.5) for value in middle)


def test_transparency_is_white() -> None:
    size = (84, 84)
    assert shown(Image.new("RGBA", size, (200, 0, 0, 0))) == (255, 255, 255)
    assert shown(Image.new("RGBA", size, (200, 0, 0, 255))) == (200, 0, 0)
    half = shown(Image.new("RGBA", size, (200, 0, 0, 128)))
    assert half == pytest.approx((227, 127, 127), abs=1)
    assert shown(Image.new("LA", size, (40, 0))) == (255, 255, 255)
    palette = Image.new("P", size, 1)
    palette.putpalette([0, 0, 0, 200, 0, 0])
    assert shown(palette) == (200, 0, 0)
    assert shown(palette, transparency=b"\xff\x00") == (255, 255, 255)


def test_other_depths() -> None:
    size = (84, 84)
    assert shown(Image.fromarray(np.full(size, 40000, np.uint16))) == (156, 156, 156)  # 40000 / 256
    assert shown(Image.new("1", size, 1)) == (255, 255, 255)
    assert shown(Image.new("L", size, 77)) == (77, 77, 77)
    assert shown(Image.new("CMYK", size, (0, 255, 255, 0)), kind="JPEG") == pytest.approx((255, 0, 0), abs=2)


def test_exif_does_not_turn_a_picture() -> None:
    """As in the official preprocessing."""
    image, exif = picture((120, 80)), Image.Exif()
    exif[0x112] = 6
    config = vision_config("tiny")
    assert torch.equal(rows_of(encoded(image, exif=exif)), patches(image, config)[0])


def test_the_longest_side_is_brought_down_first() -> None:
    config, image = vision_config("tiny"), picture((600, 300))
    small = image.resize((512, 256), Image.Resampling.BICUBIC)
    assert torch.equal(rows_of(encoded(image), longest=512), patches(small, config)[0])
    assert torch.equal(rows_of(encoded(image), longest=600), patches(image, config)[0])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_file_cut_anywhere_is_typed(kind: str) -> None:
    config, data = vision_config("tiny"), encoded(picture((64, 64)), kind)
    whole = read_image(data, config).pixels
    for end in range(0, len(data), max(len(data) // 60, 1)):
        found: Any = None
        with suppress(BadImage):
            found = read_image(data[:end], config).pixels
        assert found is None or found.shape == whole.shape
    with pytest.raises(BadImage, match=r"messages\[0\], image 1 cannot be"):
        read_image(data[: len(data) // 2], config, where="messages[0], image 1")


def test_without_pillow_an_image_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture((64, 64)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependency, match=r"pip install 'benthic\[vision\]'"):
        read_image(data, vision_config("tiny"))


def test_the_tower_needs_no_pillow() -> None:
    code = "import sys; sys.modules['PIL'] = None; import benthic.models.deepseek_v41"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- with the model --------------------------------------------------------------------------------------------------


def test_a_checkpoint_brings_its_tower(folder: Path) -> None:
    model = from_checkpoint(Checkpoint.open(folder), NUMERICS["float"])
    tower = VisionTower(model.config, NUMERICS["float"])
    tower.load(Checkpoint.open(folder))
    read = model.read_image(encoded(picture((120, 80))))
    with torch.no_grad():
        assert torch.equal(model.image_rows(read), tower(scaled(read.pixels), read.geometry))
    assert model.image_tokens(120, 80) == read.geometry.tokens
    assert model.image_token_id == 4090


def test_a_checkpoint_without_a_tower(tmp_path: Path) -> None:
    model = from_checkpoint(Checkpoint.open(make_tiny(tmp_path / "text", vision_config=None)), NUMERICS["float"])
    assert (model.vision, model.image_token_id) == (None, None)
    with pytest.raises(NoVision):
        model.image_tokens(5, 5)
    with pytest.raises(NoVision):
        model.read_image(encoded(picture((64, 64))))


@pytest.mark.parametrize("numerics", ["float", "production"])
def test_the_tower_on_the_kernels_of_a_gpu(folder: Path, numerics: str) -> None:
    """Triton's, under its interpreter."""
    pytest.importorskip("triton")
    model = from_checkpoint(Checkpoint.open(folder), NUMERICS[numerics])
    read = model.read_image(encoded(picture((120, 80))))
    with torch.inference_mode():
        want = model.image_rows(read).float()
        with backends.use("triton"):
            got = model.image_rows(read).float()
    assert float((got - want).abs().max()) < (1e-5 if numerics == "float" else 0.02) * float(want.abs().max())


@pytest.mark.gpu
def test_pixels_are_scaled_to_the_same_bits_on_a_gpu() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(scaled(levels.cuda()).cpu(), scaled(levels))


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["float", "production"])
def test_the_tower_on_a_gpu(folder: Path, numerics: str) -> None:
    here, there = (from_checkpoint(Checkpoint.open(folder), NUMERICS[numerics], device) for device in ("cpu", "cuda"))
    for size in ((84, 84), (120, 80), (40, 300)):
        read = here.read_image(encoded(picture(size)))
        with torch.inference_mode():
            got, want = there.image_rows(read).float().cpu(), here.image_rows(read).float()
        assert got.shape == want.shape
        assert float((got - want).abs().max()) < (1e-4 if numerics == "float" else 0.1) * float(want.abs().max())
