"""The agreement with the public sources as Markdown: `.venv-oracles/bin/python -m tests.oracles_public.report`."""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from tests.oracle.blocks import Pair, distance, equal_share
from tests.oracle.package import Package
from tests.oracles_public import ftllm_blocks, tile_kernels_ops


def table(found: Iterable[Pair]) -> str:
    """One row a block: values compared, share equal, largest distance in bfloat16 steps."""
    by_block: dict[str, list[Pair]] = defaultdict(list)
    for pair in found:
        by_block[pair.block].append(pair)
    lines = ["| block | values | equal | largest distance, bf16 steps |", "| --- | ---: | ---: | ---: |"]
    for block, some in by_block.items():
        values = sum(pair.got.size for pair in some)
        share = sum(equal_share(pair) * pair.got.size for pair in some) / values
        lines.append(f"| {block} | {values} | {100 * share:.3f} % | {max(distance(pair) for pair in some):.2g} |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        print("### tile-kernels 2.1.0\n")
        print(table(tile_kernels_ops.pairs()))
        run = ftllm_blocks.run(Path(scratch))
        print("\n### ftllm 1.9.0\n")
        print(table(ftllm_blocks.pairs(run, Package(run.folder, "reference"))))
        for profile in ("reference", "production"):
            got = Package(run.folder, profile).run(run.ids, [ftllm_blocks.PROMPT, 1])[ftllm_blocks.PROMPT - 1 :]
            cosine = (got * run.logits).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(run.logits, axis=1)
            same = (got.argmax(1) == run.logits.argmax(1)).sum()
            print(f"\nEnd to end, profile {profile}: cosine {cosine.min():.4f} to {cosine.max():.4f}; ", end="")
            print(f"same greedy token at {same} of {len(cosine)} positions.")


if __name__ == "__main__":
    sys.exit(main())
