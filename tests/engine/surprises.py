"""Which kernels do random steps ask for that a rehearsal did not? None is compiled or launched, and no GPU is needed.
And which operations of the steps that graphs hold would wait for the device, or send it a constant?

Run by test_rehearsal.py in a process of its own: PROFILE STEPS CONTEXT. What images need is not among it: the largest
steps before the first request have some.
"""

import json
import random
import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import jit

from benthic.bench import ahead
from benthic.cache.spec import blocks_for
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.runner import Runner
from benthic.engine.sampler import Sampler
from benthic.kernels.triton import tuning, warm
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.modules import packed_weights
from benthic.models.registry import model_dir
from benthic.models.weights import Checkpoint
from benthic.types import NUMERICS, Chunk, Draw, SamplingParams, StepPlan

BUDGET, SLOTS = 1024, 40
DRAW = Draw(SamplingParams(temperature=0.0), 0, (), None, 0)

asked: Counter[str] = Counter()  # kernels that would be compiled


class Kernel:
    """What Triton takes for a compiled kernel; a launch does nothing."""

    function = packed_metadata = launch_metadata = run = staticmethod(lambda *_: None)


class Waits(TorchDispatchMode):
    """Notes what no graph can hold: values that are read back, shapes that depend on them, constants of the host."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "lift_fresh", "repeat_interleave.Tensor")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(op) for name in self.REFUSED):
            self.seen.add(str(op))
        return op(*args, **(kwargs or {}))


def waits(runner: Runner) -> list[str]:
    """Of the steps that graphs hold, once whatever they set up on first use is there."""
    told, columns = runner._prompt_columns()[:, :16].contiguous(), torch.zeros(batches.COLUMNS, 16, dtype=torch.int64)
    with Waits() as found:
        runner._pass(told)
        runner._pass(told, beginning=True)
        runner._compute(batches.unpack(columns, runner.storage))
    return sorted(found.seen)


def compiled(self: Any, key: str, signature: object, device: int, *_: object) -> Kernel:
    asked[self.fn.__qualname__] += 1
    return self.device_caches[device][0].setdefault(key, Kernel())


def random_plan(rng: random.Random, model: DeepseekV41, storage: Storage) -> StepPlan:
    """Decode rows and prompts as a scheduler mixes them: behind hits, with skipped beginnings."""
    chunks: list[Chunk] = []
    longest, left = storage.table_blocks * storage.block_tokens, BUDGET
    prompts = rng.choice((0, 1, 1, 2, 3))
    decodes = rng.choice((0, 0, 1, 3, 17, SLOTS - 3)) if prompts else rng.randrange(1, SLOTS)
    for i in range(decodes + prompts):
        rows = 1 if i < decodes else rng.randrange(1, max(min(left, rng.choice((8, 40, 200, BUDGET))), 2))
        left -= rows
        start = rng.choice((0, 0, 128, rng.randrange(longest - rows))) if i >= decodes else rng.randrange(longest)
        hit = start > 0 and rows > 1 and rng.random() < 0.4
        first = start + rows // 2
        cuts = ((model.windows.storing, first),) if rows > 2 and rng.random() < 0.5 else ()
        chunks.append(
            Chunk(
                i, start, (0,) * rows, 0, i < decodes or rng.random() < 0.6, 1 + i,
                (1,) * blocks_for(start + rows, storage.block_tokens),
                low=start if hit else 0, stored=start + rows // 2 if hit else 0, cuts=cuts,
                masked=bool(cuts) and rng.random() < 0.3, before=() if start else None,
            )
        )  # fmt: skip
    return StepPlan(0, tuple(chunks), (DRAW,) * sum(chunk.sample for chunk in chunks))


def main(numerics: str, steps: int, context: int) -> None:
    jit.JITFunction._do_compile = compiled  # pyright: ignore[reportAttributeAccessIssue]
    rng = random.Random(0)
    with ahead.pretending(), warm._Zeroed():
        with packed_weights():
            model = from_checkpoint(Checkpoint.open(model_dir("minnow")), NUMERICS[numerics])
        storage = Storage(model.cache_spec, 64, SLOTS + 1, torch.device("cpu"), table_blocks=context // 128)
        sampler = Sampler(model.vocab_size, storage.device)
        runner = Runner(model, storage, sampler, on_device=True, graph_rows=BUDGET)
        runner.rehearse(tuning.buckets(BUDGET))
        rehearsed, waiting = sum(asked.values()), waits(runner)
        asked.clear()
        uploads = batches.Uploads(storage)
        for _ in range(steps):
            runner._compute(uploads.step(random_plan(rng, model, storage)))
    print(json.dumps({"rehearsed": rehearsed, "surprises": asked, "waits": waiting}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
