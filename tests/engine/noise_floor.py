"""How far whole, chunked and token by token lie apart end to end, in each profile. A report, not a test.

    python -m tests.engine.noise_floor

Rounding is chaotic end to end in the quantised profiles (model specification, section 6.4), so there is no bound to
assert, only figures to read beside the floor: what a mere change of the summation order does, here plain torch in the
place of the native kernels, on the same whole prompt.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.kernels import backends
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS, Chunk, StepPlan
from tests.engine.test_equalities import SMOOTH

TOKENS = 200
SIZES = (1, 2, 37, 128)


@torch.inference_mode()
def logits(model: DeepseekV41, ids: tuple[int, ...], size: int) -> Tensor:
    """Every position's logits, the prompt computed in chunks of `size`."""
    storage = Storage(model.cache_spec, 4, 2)
    storage.poison()
    rows: list[Tensor] = []
    for start in range(0, len(ids), size):
        chunk = Chunk(0, start, ids[start : start + size], 0, True, 1, (1, 2, 3))
        batch = batches.build(StepPlan(0, (chunk,), ()), storage)
        rows.append(model.logits(model.forward(batch, model.memory(storage, batch)).hidden))
        batches.remember(batch, storage)
    return torch.cat(rows)


def compare(a: Tensor, b: Tensor) -> str:
    cosine = torch.cosine_similarity(a.double(), b.double(), dim=1)
    same = int((a.argmax(1) == b.argmax(1)).sum())
    return (
        f"max difference {float((a - b).abs().max()):8.1e}, cosine min {float(cosine.min()):.4f} "
        f"median {float(cosine.median()):.4f}, same arg-max {same}/{len(a)}"
    )


def main() -> None:
    ids = tuple(torch.randint(3, 4000, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist())
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in (("tiny", {}), ("smooth", SMOOTH)):
            checkpoint = Checkpoint.open(make_tiny(Path(folder) / name, **overrides))
            for profile in ("float", "reference", "production"):
                model = from_checkpoint(checkpoint, NUMERICS[profile])
                whole = logits(model, ids, TOKENS)
                with backends.reference():
                    floor = compare(whole, logits(model, ids, TOKENS))
                print(f"{name:6} {profile:10} floor: plain torch {floor}")
                for size in SIZES:
                    print(f"{name:6} {profile:10} chunks of {size:<10}{compare(whole, logits(model, ids, size))}")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
