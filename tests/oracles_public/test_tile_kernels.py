"""tile-kernels 2.1.0: the torch references of DeepSeek's kernels, op by op with equal inputs."""

import pytest
import torch

pytest.importorskip("tile_kernels", reason="tile-kernels 2.1.0 is not installed; `make test-oracles` installs it")

from tests.oracle.blocks import distance, equal_share
from tests.oracles_public import tile_kernels_ops

pytestmark = pytest.mark.oracles

FLOAT = ("mHC read weights", "mHC write weights", "mHC Sinkhorn", "router: weights")
EXACT = ("n-gram rows", "router: experts", "FP8 scale", "FP8 code", "MXFP4 scale", "MXFP4 byte", "NVFP4 scale")
EXACT_TOO = ("FP8 weight, 32 x 32", "FP8 weight, read back")
MIN_SHARE = 0.9995
MIN_SHARE_NVFP4 = 0.998  # it multiplies by a rounded reciprocal, which turns ties


def test_ops() -> None:
    seen: set[str] = set()
    with torch.inference_mode():
        for pair in tile_kernels_ops.pairs():
            seen.add(pair.block)
            assert pair.got.shape == pair.want.shape, pair.block
            if pair.block in EXACT + EXACT_TOO:
                assert equal_share(pair) == 1, pair.block
            elif pair.block in FLOAT:
                assert distance(pair) <= 2e-3, pair.block
            elif pair.block == "NVFP4 byte":
                assert equal_share(pair) >= MIN_SHARE_NVFP4
            else:
                assert equal_share(pair) >= MIN_SHARE, pair.block
                assert distance(pair) <= 1, pair.block
    assert len(seen) == 20
