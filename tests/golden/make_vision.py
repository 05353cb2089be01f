"""Makes vision.json: canvas, placement and token count of 40 image sizes, for the release's vision settings.

    python -m tests.golden.make_vision

From the slow geometry of `tests/oracle/slow_vision.py`, which shares no code with the package.
"""

import json
from dataclasses import asdict
from pathlib import Path

from tests.oracle.slow_vision import geometry

RELEASE = {
    "patch_size": 14,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}
SIDES = [1, 10, 41, 42, 43, 126, 543, 544, 545, 1000]
SIZES = [
    *[(side, side) for side in SIDES],
    *[(640, 480), (480, 640), (1024, 1024), (1344, 1344), (1345, 1345), (1920, 1080), (1080, 1920), (4000, 3000)],
    *[(1, 4000), (4000, 1), (2, 4000), (3, 9000), (20000, 7), (16384, 16384), (13, 546), (546, 13), (15, 15)],
    *[(700, 423), (423, 700), (800, 370), (1333, 800), (800, 1333), (2048, 137), (137, 2048), (555, 534)],
    *[(1302, 1302), (1260, 1302), (1302, 1260), (999, 1777), (5000, 400)],
]

if __name__ == "__main__":
    assert len(SIZES) == 40, len(SIZES)
    rows = [{"image": size, **asdict(geometry(*size, RELEASE))} for size in SIZES]
    out = Path(__file__).with_name("vision.json")
    out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
