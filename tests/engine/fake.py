"""A model without arithmetic: its next token is a hash of everything it reads back from the cache.

It stores ids and positions in blocks, ring and carry, and checks on every step that what it finds there, and the
history it is handed, is what the sequence really holds. A wrong table, slot, position or row fails at once.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benthic.cache.manager import CacheManager
from benthic.cache.replay import Windows
from benthic.cache.spec import AppendEntry, CacheSpec, CarryEntry, RingEntry
from benthic.cache.storage import Storage
from benthic.engine.branch import branch_seed
from benthic.engine.loop import Loop
from benthic.engine.runner import Runner
from benthic.engine.sampler import Sampler
from benthic.engine.scheduler import Prefixes, Scheduler
from benthic.models.base import Batch
from benthic.types import Draw, Request, SamplingParams

VOCAB = 61
WINDOW = 5
HISTORY = 3
EOS = 7
_R = np.int64(0x5851F42D4C957F2D)


def context_hash(ids: list[int] | np.ndarray) -> np.ndarray:
    """One hash per prefix of ids."""
    with np.errstate(over="ignore"):
        values = np.asarray(ids, dtype=np.int64) + 1
        powers = np.cumprod(np.full(len(values), _R, dtype=np.int64))
        return np.cumsum(values * powers, dtype=np.int64)


def hash_logits(hashes: np.ndarray, vocab: int = VOCAB) -> Tensor:
    """[R] hashes -> f32 [R, vocab], values in [0, 8) that look random."""
    with np.errstate(over="ignore"):
        x = (hashes[:, None] + np.arange(vocab, dtype=np.int64) * np.int64(-7046029254386353131)).astype(np.uint64)
        x ^= x >> np.uint64(29)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(32)
    return torch.from_numpy(((x >> np.uint64(40)).astype(np.float64) / 2**21).astype(np.float32))


class FakeModel:
    """Implements `runner.Model`."""

    cache_spec = CacheSpec(
        append=(AppendEntry(layer=0, part="main", channels=2, format="f32", ratio=1),),
        rings=(RingEntry(layer=0, channels=2, format="f32", window=WINDOW),),
        carries=(CarryEntry(layer=0, channels=1, ratio=2),),
        history_ids=HISTORY,
    )
    vocab_size = VOCAB
    windows = Windows(WINDOW, storing=1, others=0)

    def __init__(self, max_positions: int = 400):
        self.max_positions = max_positions
        self.poisoned: set[int] = set()  # a context that holds one of these ids has NaN logits
        self.fail_at: int | None = None  # forward pass that raises
        self.steps = 0

    def memory(self, storage: Storage, batch: Batch) -> Storage:
        return storage

    def forward(self, batch: Batch, memory: Storage) -> SimpleNamespace:
        self.steps += 1
        storage = memory
        part = storage.layout.part(0, "main")
        data = storage.pool[:, part.data_offset : part.data_offset + part.entries * 8].view(torch.int32)
        data = data.view(storage.num_blocks, part.entries, 2)
        ring = storage.rings[0].view(torch.int32)  # [slots, rows, 2]
        out: list[np.ndarray] = []
        half = self.steps == self.fail_at
        for c in range(len(batch.slots)):
            first, slot, table = batch.firsts[c], batch.slots[c], batch.tables[c]
            rows = slice(batch.starts[c], batch.starts[c + 1])
            ids, positions = batch.ids[rows], batch.positions[rows]
            end = first + len(ids)
            assert slot > 0
            assert all(block > 0 for block in table)
            assert positions.tolist() == list(range(first, end))
            low = batch.lows[c] if batch.lows else 0
            new = positions >= (batch.stored[c] if batch.stored else 0)
            blocks = torch.tensor(table)[positions // part.entries]
            held = torch.stack([ids, positions], 1).to(torch.int32)
            data[blocks[new], (positions % part.entries)[new]] = held[new]
            assert torch.equal(data[blocks, positions % part.entries], held), "a cached block holds other tokens"
            at = torch.arange(end)
            stored = data[torch.tensor(table)[at // part.entries], at % part.entries]
            assert stored[:, 1].tolist() == list(range(end)), "a block does not hold this sequence's positions"
            known = stored[:, 0].to(torch.int64)
            for row, p in enumerate(range(first, end)):
                want = [int(known[p - 1 - i]) if p - 1 - i >= 0 else -1 for i in range(HISTORY)]
                assert batch.history[batch.starts[c] + row].tolist() == want, f"history at position {p}"
            for p in range(max(low, first - WINDOW + 1), first):  # the window of the chunk's first row
                assert ring[slot, p % WINDOW].tolist() == [int(known[p]), p], f"ring row of position {p}"
            if first % 2 and first > low:
                assert storage.carry[0][slot, (first - 1) % 2, 0, 0] == float(known[first - 1]), "carry row"
            for p in range(max(first, end - WINDOW), end):
                ring[slot, p % WINDOW] = torch.tensor([int(known[p]), p], dtype=torch.int32)
                storage.carry[0][slot, p % 2] = float(known[p])
            hashes = context_hash(known.numpy())[first:]
            bad = np.isin(known.numpy(), list(self.poisoned)).cumsum()[first:] > 0
            out.append(np.where(bad, 0, hashes))
            if half:
                raise RuntimeError("the device is gone")
        hidden = torch.from_numpy(np.concatenate(out))[:, None]
        for cut in batch.cuts:
            hidden = hidden[cut.kept]
        return SimpleNamespace(hidden=hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        hashes = hidden[:, 0].numpy()
        logits = hash_logits(hashes)
        logits[torch.from_numpy(hashes == 0)] = float("nan")
        return logits


def fake_loop(
    *,
    blocks: int = 40,
    slots: int = 5,
    budget: int = 64,
    context: int = 400,
    block_tokens: int = 4,
    model: FakeModel | None = None,
    prefixes: Prefixes | None = None,
    snapshots: int = 0,
    ahead: bool = False,
    scheduling: dict[str, Any] | None = None,
    **cache: Any,
) -> Loop:
    model = model or FakeModel(context)
    storage = Storage(model.cache_spec, blocks, slots, block_tokens=block_tokens, states=snapshots)
    storage.poison()
    manager = CacheManager(blocks, slots, block_tokens, prefix=prefixes is not None, snapshots=snapshots, **cache)
    scheduler = Scheduler(
        manager,
        token_budget=budget,
        max_context_tokens=context,
        vocab_size=VOCAB,
        eos_ids=(EOS,),
        prefixes=prefixes,
        **(scheduling or {}),
    )
    return Loop(scheduler, Runner(model, storage, Sampler(VOCAB), ahead=ahead), ahead=ahead)


def expected(request: Request, branch: int, context: int = 400) -> list[int]:
    """The tokens of a branch, one at a time, with nothing else in the world."""
    sampler = Sampler(VOCAB)
    params = request.params
    tokens = list(request.prompt)
    ends = set(params.stop_ids) | (set() if params.ignore_eos else {EOS})
    penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    while True:
        output = len(tokens) - len(request.prompt)
        draw = Draw(
            params,
            branch_seed(request.seed, branch),
            tuple(ends) if output < params.min_tokens else (),
            array("I", tokens) if penalised else None,
            len(request.prompt),
        )
        token = sampler(hash_logits(context_hash(tokens)[-1:]), [draw], [len(tokens)]).tokens[0]
        tokens.append(token)
        if token in ends or output + 1 == params.max_tokens or len(tokens) > context:
            return tokens[len(request.prompt) :]


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **changes})  # type: ignore[arg-type]
