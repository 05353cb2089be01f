"""StepPlan -> Batch: the tensors of one step.

Host to device goes one small integer tensor; what the device already knows (each slot's last ids) is gathered there.
"""

from itertools import chain

import torch
from torch import Tensor

from benthic.cache.storage import Storage
from benthic.models.base import Batch
from benthic.types import StepPlan


def build(plan: StepPlan, storage: Storage) -> Batch:
    """The step's batch. Reads `storage.history`; writes nothing.

    Cost: a few tensor operations, whatever the number of chunks.
    """
    chunks = plan.chunks
    device = storage.device
    starts = [0]
    rows = 0
    for chunk in chunks:
        rows += len(chunk.tokens)
        starts.append(rows)
    firsts = tuple([chunk.start for chunk in chunks])
    slots = tuple([chunk.slot for chunk in chunks])
    logit_rows = [end - 1 for chunk, end in zip(chunks, starts[1:], strict=True) if chunk.sample]
    ids = list(chain.from_iterable([chunk.tokens for chunk in chunks]))
    if rows == len(chunks):  # decode rows only
        table = torch.tensor((ids, firsts, slots), dtype=torch.int64).to(device, non_blocking=True)
        token_ids, positions, slot_of_row = table.unbind(0)
        history = (
            storage.history[slot_of_row] if 0 not in firsts else _history(token_ids, positions, table[1:], storage)
        )
        wanted = torch.tensor(logit_rows, dtype=torch.int64).to(device, non_blocking=True)
    else:
        token_ids = torch.tensor(ids, dtype=torch.int64).to(device, non_blocking=True)
        lengths = [len(chunk.tokens) for chunk in chunks]
        table = torch.tensor((lengths, firsts, slots, starts[:-1]), dtype=torch.int64).to(device, non_blocking=True)
        of_row = table[1:].repeat_interleave(
            table[0], dim=1, output_size=rows
        )  # [3, T] first position, slot, first row
        positions = of_row[0] + torch.arange(rows, device=device) - of_row[2]
        history = _history(token_ids, positions, of_row[:2], storage)
        wanted = torch.tensor(logit_rows, dtype=torch.int64).to(device, non_blocking=True)
    return Batch(
        ids=token_ids,
        positions=positions,
        history=history,
        images=None,
        embeds=None,
        starts=tuple(starts),
        firsts=firsts,
        slots=slots,
        tables=tuple([chunk.blocks for chunk in chunks]),
        logit_rows=wanted,
    )


def _history(ids: Tensor, positions: Tensor, of_row: Tensor, storage: Storage) -> Tensor:
    """[T, n] ids before each row: from the chunk where it reaches back far enough, else from the slot; -1 before 0."""
    n = storage.history.shape[1]
    first, slot = of_row[0][:, None], of_row[1][:, None]
    back = torch.arange(n, device=ids.device)
    before = positions[:, None] - 1 - back  # [T, n] the position each cell asks for
    row = torch.arange(len(ids), device=ids.device)[:, None] - 1 - back
    here = before >= first
    stored = storage.history[slot, (first - 1 - before).clamp(min=0, max=max(n - 1, 0))] if n else ids[row.clamp(min=0)]
    found = torch.where(here, ids[row.clamp(min=0)], stored)
    return torch.where(before < 0, -1, found)


def remember(batch: Batch, storage: Storage) -> None:
    """Store each slot's last ids, for the step after this one. Call once the step has been computed."""
    if not storage.history.shape[1] or not batch.slots:
        return
    device = batch.ids.device
    last = torch.tensor(batch.starts[1:], device=device) - 1
    slots = torch.tensor(batch.slots, device=device)
    storage.history[slots] = torch.cat([batch.ids[last, None], batch.history[last, :-1]], dim=1)
