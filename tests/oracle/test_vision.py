"""The vision tower, the aligner and the geometry rules against the slow versions of section 2.11."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.deepseek_v41_vision import Geometry, VisionTower, geometry, patches, places
from benthic.types import NUMERICS
from tests.oracle import slow_vision
from tests.oracle.package import Source
from tests.oracle.random_checkpoint import CONFIGS
from tests.oracle.slow_vision import SlowVision

SIZES = [
    *[(1, 1), (1, 2000), (2000, 1), (7, 7), (13, 14), (14, 14), (15, 41), (42, 42), (100, 100), (224, 224)],
    *[(320, 240), (336, 336), (480, 640), (500, 375), (512, 512), (543, 545), (544, 544), (545, 543), (640, 480)],
    *[(768, 1024), (800, 600), (1000, 300), (1024, 768), (1024, 1024), (1200, 1), (1280, 720), (1344, 1344)],
    *[(1366, 768), (1600, 1200), (1920, 1080), (2048, 2048), (2560, 1440), (3000, 50), (50, 3000), (3840, 2160)],
    *[(4000, 3000), (8000, 20), (20, 8000), (10000, 10000), (16000, 1)],
]


def vision_config(name: str, **changes: Any) -> tuple[ModelConfig, dict[str, Any]]:
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    raw["vision_config"] |= changes
    return ModelConfig.from_json(raw), raw["vision_config"]


def test_there_are_forty_sizes() -> None:
    assert len(set(SIZES)) == 40


@pytest.mark.parametrize(("name", "changes"), [("v41_flash", {}), ("tiny", {}), ("v41_flash", {"max_wh_ratio": 4})])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_geometry(size: tuple[int, int], name: str, changes: dict[str, Any]) -> None:
    config, raw = vision_config(name, **changes)
    assert config.vision is not None
    got, want = geometry(*size, config.vision), slow_vision.geometry(*size, raw)
    assert (got.canvas_width, got.canvas_height) == (want.width, want.height)
    assert (got.cells_w, got.cells_h, got.tokens) == (want.grid_width, want.grid_height, want.tokens)
    assert got.tokens <= raw["max_image_tokens"]
    assert got.grid_w * 14 == want.width
    assert got.grid_h * 14 == want.height


@pytest.mark.parametrize("size", [(1, 2000), (13, 14), (97, 61), (300, 200), (1000, 300)], ids=str)
def test_patches(size: tuple[int, int]) -> None:
    """Resizing, padding and cutting, against Pillow's own fit-and-pad."""
    config, raw = vision_config("tiny")
    assert config.vision is not None
    random = np.random.default_rng(size[0])
    image = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    got, geo = patches(image, config.vision)
    want = slow_vision.geometry(*size, raw)
    if (want.inner_width, want.inner_height) == (want.width, want.height):
        canvas = image.resize((want.width, want.height), Image.Resampling.BICUBIC)
    else:
        canvas = ImageOps.pad(image, (want.width, want.height), Image.Resampling.BICUBIC, color=(127, 127, 127))
        row = np.asarray(canvas)[want.top - 1] if want.top else np.asarray(canvas)[:, want.left - 1]
        assert (row == 127).all(), "outside the picture the canvas is grey"
    rows = slow_vision.patches(np.asarray(canvas), 14)
    assert geo.tokens == want.tokens
    assert np.abs(got.double().numpy() - rows).max() <= 2.0**-9  # one bfloat16 rounding of values in -1..1


@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (4, 5), (7, 2)], ids=str)
def test_tower_and_aligner(grid: tuple[int, int], checkpoint: Callable[[str], Path]) -> None:
    """Quantisers off: features, aligner rows and the span with its delimiters, within 1e-4."""
    rows, columns = grid
    folder = checkpoint("tiny")
    slow = SlowVision(folder)
    config = ModelConfig.from_json(slow.folder.config)
    tower = VisionTower(config, NUMERICS["float"])
    tower.load(Source(folder, {}))
    x = np.random.default_rng(rows).standard_normal((rows * columns, 588)).astype(np.float32)
    features = slow.tower(x.astype(np.float64), rows, columns)
    cells = slow.align(features, rows, columns)
    cells_h, cells_w = -(-rows // 3), -(-columns // 3)
    geo = Geometry(0, 0, columns * 14, rows * 14, rows, columns, cells_h, cells_w, cells_h * (cells_w + 1) + 2)
    with torch.inference_mode():
        at, merged = (part[None] for part in places(rows, columns, 3))
        got_features = tower.features(torch.from_numpy(x)[None], at)
        got_cells = tower.align(got_features, merged)[0]
        got = tower(torch.from_numpy(x), geo)
    assert np.abs(got_features[0].double().numpy() - features).max() <= 1e-4
    assert np.abs(got_cells.double().numpy() - cells).max() <= 1e-4
    want = slow.span(cells, cells_w, cells_h)
    assert got.shape == want.shape == (geo.tokens, 256)
    assert np.abs(got.double().numpy() - want).max() <= 1e-4
