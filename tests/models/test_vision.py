"""The vision tower: geometry against golden tables, patches and tower against the slow float64 one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benthic.errors import BadImage
from benthic.models.deepseek_v41_config import ModelConfig, VisionConfig
from benthic.models.deepseek_v41_vision import VisionTower, geometry, patches, pixel_patches, places, scaled
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
