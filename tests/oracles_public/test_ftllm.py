"""ftllm 1.9.0, a whole V4.1 text engine of its own, on the same checkpoint bytes.

Block by block with its own inputs, and loosely end to end, where FP8 over random weights is chaotic.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ftllm", reason="ftllm 1.9.0 is not installed; `make test-oracles` installs it")

from tests.oracle.blocks import Pair, distance, equal_share
from tests.oracle.package import Package
from tests.oracles_public import ftllm_blocks
from tests.oracles_public.ftllm_blocks import PROMPT, Run

pytestmark = pytest.mark.oracles

EXACT = ("embedding", "chosen experts", "chosen entries", "candidate blocks")
FLOAT = ("mixes: pre", "mixes: post", "mixes: comb", "expert weights")
MIN_SHARE = 0.999  # of all values of a kind of block
MIN_SHARE_ATTENTION = 0.998  # its running maximum takes other groups of rows
MAX_FLOAT_STEPS = 1e-2  # of a bfloat16 step: 4e-5 relative


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ftllm_blocks.run(tmp_path_factory.mktemp("ftllm"))


@pytest.fixture(scope="module")
def package(run: Run) -> Package:
    return Package(run.folder, "reference")


def test_blocks(run: Run, package: Package) -> None:
    by_block: dict[str, list[Pair]] = defaultdict(list)
    with torch.inference_mode():
        for pair in ftllm_blocks.pairs(run, package):
            assert pair.got.shape == pair.want.shape, (pair.block, pair.layer)
            by_block[pair.block].append(pair)
    assert len(by_block) == 27
    for block, found in by_block.items():
        values = sum(pair.got.size for pair in found)
        share = sum(equal_share(pair) * pair.got.size for pair in found) / values
        if block in EXACT:
            assert share == 1, block
        elif block in FLOAT:
            assert max(distance(pair) for pair in found) <= MAX_FLOAT_STEPS, block
        elif block == "index score":
            assert max(distance(pair) for pair in found) <= 1, block
        else:
            assert share >= (MIN_SHARE_ATTENTION if block == "attention" else MIN_SHARE), f"{block}: {share}"


@pytest.mark.parametrize("profile", ["reference", "production"])
def test_end_to_end(run: Run, profile: str) -> None:
    """Cosine of the logits after the prompt and after each decode step."""
    got = Package(run.folder, profile).run(run.ids, [PROMPT, 1])[PROMPT - 1 :]
    cosine = (got * run.logits).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(run.logits, axis=1)
    assert cosine.min() >= 0.98


def test_both_read_the_same_ids(run: Run) -> None:
    assert Path(run.dumps / "fl_embed.bin").exists()
    assert len(run.ids) == PROMPT + len(run.logits) - 1
