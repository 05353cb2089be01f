"""The training graph is the serving model: same weights, same logits; and every leaf has its official place."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benthic.cache.storage import Storage
from benthic.models.base import Batch
from benthic.models.deepseek_v41 import from_checkpoint
from benthic.models.deepseek_v41_config import tensors
from benthic.models.weights import Checkpoint
from benthic.train import backbone, loop
from benthic.train.memory import Mode
from benthic.types import NUMERICS
from tests.train.conftest import LENGTH, ROWS


def serve(folder: Path, ids: Tensor) -> Tensor:
    """Logits [L, V] of one sequence through the paged memory, in chunks."""
    model = from_checkpoint(Checkpoint.open(folder), NUMERICS["float"])
    storage = Storage(model.cache_spec, 4, 2)
    storage.poison()
    logits: list[Tensor] = []
    padded = torch.cat([torch.full((3,), -1), ids])
    for first, last in ((0, 37), (37, 100), (100, len(ids))):
        count = last - first
        batch = Batch(
            ids=ids[first:last],
            positions=torch.arange(first, last),
            history=torch.stack([padded[first + 2 - i : last + 2 - i] for i in range(3)], dim=1),
            images=None,
            embeds=None,
            starts=(0, count),
            firsts=(first,),
            slots=(1,),
            tables=((3, 1, 2),),
            logit_rows=torch.arange(count),
        )
        with torch.inference_mode():
            out = model(batch, model.memory(storage, batch))
            logits.append(model.logits(out.hidden))
    return torch.cat(logits)


@pytest.mark.parametrize("seed", [0, 1])
def test_training_graph_equals_serving(trainer: loop.Trainer, packed: Path, seed: int):
    ids = torch.randint(6, 4000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    with trainer.kernels.installed():
        hidden, _ = trainer.hidden(ids, Mode(topk=True, index_rows=0))
        logits = torch.nn.functional.linear(hidden, trainer.model.head.weight).unflatten(0, (ROWS, LENGTH)).detach()
    for row in range(ROWS):
        want = serve(packed, ids[row])
        difference = (logits[row] - want).abs().amax(-1)
        # a near tie in a top-k may fall the other way in single rows and move those (and rows behind them)
        assert difference.median() < 1e-5
        assert difference.max() < 1e-4, difference
    assert logits.std() > 0.5


def test_every_leaf_has_its_place(trainer: loop.Trainer):
    specs = tensors(trainer.config)
    named = trainer.optimiser.masters() | trainer.biases()
    made = [official for name, value in named.items() for official, _ in backbone.official_parts(name, value)]
    rest = [name for name, _ in backbone.untrained(trainer.config, 0)]
    assert len(made) == len(set(made))
    assert sorted(made + rest) == sorted(name for name in specs if not name.endswith(".scale"))
