"""The memory of a GPU step, here on CPU tensors: the same logits as the host-described form, chunk for chunk."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.kernels import backends
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.device_memory import DeviceMemory
from benthic.models.memory import PagedMemory
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS, Chunk, Draw, SamplingParams, StepPlan

BLOCK = 16
TOLERANCE = 1e-5
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], DeepseekV41]:
    @cache
    def make(preset: str, numerics: str) -> DeepseekV41:
        folder = tmp_path_factory.mktemp("checkpoint") / f"{preset}-{numerics}"
        return from_checkpoint(Checkpoint.open(make_tiny(folder, preset, seed=0)), NUMERICS[numerics])

    return make


class Sequences:
    """Prompts that are fed to slots 1, 2, ... in chunks; a block table grows by blocks from all over the pool."""

    def __init__(self, lengths: Sequence[int], seed: int = 0):
        self.random = random.Random(seed)
        self.ids = [[self.random.randrange(3, 4000) for _ in range(n)] for n in lengths]
        self.done = [0] * len(lengths)
        self.tables: list[tuple[int, ...]] = [()] * len(lengths)
        count = sum(-(-n // BLOCK) for n in lengths)
        self.free = list(range(1, count + 1))
        self.random.shuffle(self.free)
        self.num_blocks, self.num_slots = count + 1, len(lengths) + 1

    def storage(self, model: DeepseekV41) -> Storage:
        storage = Storage(model.cache_spec, self.num_blocks, self.num_slots, block_tokens=BLOCK)
        storage.poison()
        storage.history.fill_(17)
        return storage

    def plan(self, counts: Sequence[tuple[int, int]]) -> StepPlan:
        """(sequence, tokens) of each chunk."""
        chunks: list[Chunk] = []
        for i, count in counts:
            start, end = self.done[i], self.done[i] + count
            assert end <= len(self.ids[i])
            missing = -(-end // BLOCK) - len(self.tables[i])
            if missing > 0:
                self.tables[i] += tuple(self.free.pop() for _ in range(missing))
            chunks.append(Chunk(i, start, tuple(self.ids[i][start:end]), 0, True, i + 1, self.tables[i]))
            self.done[i] = end
        draws = tuple(Draw(GREEDY, 0, (), None, 0) for c in chunks)
        return StepPlan(0, tuple(chunks), draws)


def as_host(model: DeepseekV41, storage: Storage, plans: Sequence[StepPlan]) -> Iterator[Tensor]:
    for plan in plans:
        batch = batches.build(plan, storage)
        memory = model.memory(storage, batch)
        assert isinstance(memory, PagedMemory)
        yield model.logits(model.forward(batch, memory).hidden)
        batches.remember(batch, storage)


def as_device(model: DeepseekV41, storage: Storage, plans: Sequence[StepPlan]) -> Iterator[Tensor]:
    uploads = batches.Uploads(storage)
    for plan in plans:
        step = uploads.step(plan)
        memory = model.memory(storage, step.batch)
        assert isinstance(memory, DeviceMemory)
        yield model.logits(model.forward(step.batch, memory).hidden)
        batches.finish(step, storage, None)


def as_graph(model: DeepseekV41, storage: Storage, plans: Sequence[StepPlan]) -> Iterator[Tensor]:
    """Steps of one-row chunks as a graph has them: padded to 8 rows, all from the columns."""
    uploads = batches.Uploads(storage)
    for plan in plans:
        if plan.tokens == len(plan.chunks):
            columns = torch.full((batches.COLUMNS, 8), -7)
            uploads.decode(plan, columns)
            step = batches.unpack(columns, storage)
        else:
            step = uploads.step(plan)
        hidden = model.forward(step.batch, model.memory(storage, step.batch)).hidden
        yield model.logits(hidden)[: plan.tokens]
        batches.finish(step, storage, None)


STEPS: dict[str, tuple[list[int], list[list[tuple[int, int]]]]] = {
    "whole": ([151], [[(0, 151)]]),
    "chunks": ([151], [[(0, 37)], [(0, 1)], [(0, 64)], [(0, 2)], [(0, 47)]]),
    "token by token": ([70, 5], [[(0, 60)], *([[(0, 1), (1, 1)]] * 5), *([[(0, 1)]] * 5)]),
    "mixed": (
        [140, 3, 66, 9],
        [
            [(0, 100), (1, 1)],
            [(1, 1), (2, 33), (0, 1)],
            [(0, 1), (1, 1), (2, 32), (3, 7)],
            [(0, 1), (2, 1), (3, 1)],
            [(3, 1), (0, 37)],
        ],
    ),
}


def plans_of(name: str) -> tuple[Sequences, list[StepPlan]]:
    lengths, steps = STEPS[name]
    sequences = Sequences(lengths)
    return sequences, [sequences.plan(counts) for counts in steps]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("form", [as_device, as_graph])
@torch.inference_mode()
def test_a_device_step_is_a_host_step(
    load: Callable[[str, str], DeepseekV41], name: str, form: Callable[..., Iterator[Tensor]]
):
    model = load("tiny", "float")
    sequences, plans = plans_of(name)
    want = as_host(model, sequences.storage(model), plans)
    got = form(model, sequences.storage(model), plans)
    for step, (a, b) in enumerate(zip(want, got, strict=True)):
        assert float((a - b).abs().max()) <= TOLERANCE, f"step {step}"


@pytest.mark.parametrize("preset", ["tiny", "tiny_512"])
@torch.inference_mode()
def test_in_a_quantised_profile(load: Callable[[str, str], DeepseekV41], preset: str):
    """A last bit that falls on the other side of a grid line spreads (model specification, 6.4), to some rows."""
    model = load(preset, "production")
    sequences, plans = plans_of("mixed")
    host, device = sequences.storage(model), sequences.storage(model)
    with backends.reference():
        want = torch.cat(list(as_host(model, host, plans)))
        got = torch.cat(list(as_graph(model, device, plans)))
    assert got.isfinite().all()
    same = (want - got).abs().amax(dim=1) < TOLERANCE
    assert torch.equal(host.rings[0][1:], device.rings[0][1:])
    assert float(same.float().mean()) > 0.5
    assert float((host.pool[1:] == device.pool[1:]).float().mean()) > 0.95
    assert float((want.argmax(-1) == got.argmax(-1)).float().mean()) > 0.9


@torch.inference_mode()
def test_what_is_stored_is_the_same(load: Callable[[str, str], DeepseekV41]):
    model = load("tiny", "float")
    sequences, plans = plans_of("mixed")
    host, device = sequences.storage(model), sequences.storage(model)
    for _ in zip(as_host(model, host, plans), as_graph(model, device, plans), strict=True):
        pass
    assert torch.equal(host.history[1:], device.history[1:])
    close = {"rtol": 0.0, "atol": TOLERANCE, "equal_nan": True}
    torch.testing.assert_close(host.pool[1:].view(torch.float32), device.pool[1:].view(torch.float32), **close)
    for layer in host.rings:
        a, b = host.rings[layer][1:].view(torch.float32), device.rings[layer][1:].view(torch.float32)
        torch.testing.assert_close(a, b, **close)
    for layer in host.carry:
        torch.testing.assert_close(host.carry[layer][1:], device.carry[layer][1:], **close)


@torch.inference_mode()
def test_a_pending_token_is_the_one_drawn_last(load: Callable[[str, str], DeepseekV41]):
    model = load("tiny", "float")
    sequences = Sequences([20, 20])
    plans = [sequences.plan(counts) for counts in ([(0, 9), (1, 12)], [(0, 1), (1, 1)], [(0, 2), (1, 1)])]
    want = list(as_host(model, sequences.storage(model), plans))
    storage, uploads = sequences.storage(model), None
    got: list[Tensor] = []
    uploads = batches.Uploads(storage)
    for i, plan in enumerate(plans):
        known = plan.chunks
        if i:  # the first token of each chunk is still on the device
            plan = StepPlan(
                0,
                tuple([Chunk(c.request, c.start, (-1, *c.tokens[1:]), 0, True, c.slot, c.blocks) for c in known]),
                plan.draws,
            )
        if plan.tokens == len(plan.chunks):
            columns = torch.zeros(batches.COLUMNS, 4, dtype=torch.int64)
            uploads.decode(plan, columns)
            step = batches.unpack(columns, storage)
        else:
            step = uploads.step(plan)
        got.append(model.logits(model.forward(step.batch, model.memory(storage, step.batch)).hidden)[: plan.tokens])
        drawn = [sequences.ids[c.request][c.start + len(c.tokens)] for c in known]
        padding = [0] * (step.draws.slots.shape[0] - len(drawn))
        batches.finish(step, storage, torch.tensor(drawn + padding))
    for a, b in zip(want, got, strict=True):
        assert float((a - b).abs().max()) <= TOLERANCE
