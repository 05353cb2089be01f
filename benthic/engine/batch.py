"""StepPlan -> Batch: the tensors of one step.

On a CPU a step carries its chunks as tuples. A GPU step (`Uploads`) is device tensors of fixed shape alone, and all the
host knows goes over in one copy: ids, where rows stand, what is new in block tables, how rows are drawn. What the
device already has (each slot's block table, last ids, last drawn token) stays there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benthic.cache.storage import Storage
from benthic.kernels.kv_copy import Rows
from benthic.kernels.rows import begin_rows, end_rows
from benthic.models.base import Batch, Cut
from benthic.types import PENDING, Chunk, Draw, ImageInput, SamplingParams, StepPlan


class ImageRows(NamedTuple):
    """What the vision tower made of a request's images, as long as its steps read it."""

    images: tuple[ImageInput, ...]
    rows: Tensor  # [sum of the images' tokens, D] on the device, one image after another


class Placement(NamedTuple):
    """Which rows of a step are image rows, and what stands there."""

    places: np.ndarray  # [T] int64: row of `rows`, -1 for text
    rows: Tensor  # [at least one, D] on the device


def place(chunks: Sequence[Chunk], kept: Mapping[int, ImageRows]) -> Placement | None:
    """Where the image rows of a step's chunks come from; None: all its rows are text. kept: by request id."""
    if not kept:
        return None
    pieces: list[Tensor] = []
    places: list[np.ndarray] = []
    count = 0
    for chunk in chunks:
        of_chunk = np.full(len(chunk.tokens), -1, dtype=np.int64)
        places.append(of_chunk)
        if chunk.request not in kept:
            continue
        images, rows = kept[chunk.request]
        start, end, at = chunk.start, chunk.start + len(chunk.tokens), 0
        for image in images:
            low, high = max(image.first, start), min(image.first + image.tokens, end)
            if low < high:
                pieces.append(rows[at + low - image.first : at + high - image.first])
                of_chunk[low - start : high - start] = np.arange(count, count + high - low)
                count += high - low
            at += image.tokens
    if not pieces:
        return None
    return Placement(np.concatenate(places), pieces[0] if len(pieces) == 1 else torch.cat(pieces))


def _embeds(places: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """places [T] on the device -> [T] bool, is it an image row; [T, D], meaningful where it is."""
    return places >= 0, rows[places.clamp(min=0)]


def build(plan: StepPlan, storage: Storage, placement: Placement | None = None) -> Batch:
    """The step's batch, described by the host. Reads `storage.history`, and writes it for slots that begin anew.

    Cost: a few tensor operations, whatever the number of chunks.
    """
    chunks, device = plan.chunks, storage.device
    anew, ids_before = new_histories(chunks, storage.history.shape[1])
    if anew:
        known = torch.tensor(ids_before, dtype=torch.int64).reshape(len(anew), -1)
        storage.history[torch.tensor(anew).to(device)] = known.to(device)
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
        if PENDING in ids:
            token_ids = _known(token_ids, slot_of_row, storage)
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
        if any([chunk.tokens[-1] == PENDING for chunk in chunks]):
            token_ids = _known(token_ids, of_row[1], storage)
        history = _history(token_ids, positions, of_row[:2], storage)
        wanted = torch.tensor(logit_rows, dtype=torch.int64).to(device, non_blocking=True)
    images = embeds = None
    if placement is not None:
        images, embeds = _embeds(torch.from_numpy(placement.places).to(device), placement.rows)
    batch = Batch(
        ids=token_ids,
        positions=positions,
        history=history,
        images=images,
        embeds=embeds,
        starts=tuple(starts),
        firsts=firsts,
        slots=slots,
        tables=tuple([chunk.blocks for chunk in chunks]),
        logit_rows=wanted,
    )
    if not any([chunk.low or chunk.stored or chunk.cuts for chunk in chunks]):
        return batch
    lows, stored = tuple([chunk.low for chunk in chunks]), tuple([chunk.stored for chunk in chunks])
    batch = below = replace(batch, lows=lows, stored=stored)
    cuts: list[Cut] = []
    for kept in kept_rows(chunks):
        columns = [torch.from_numpy(column).to(device) for column in kept.columns(chunks)]
        cuts.append(_cut(below, chunks, kept, *columns))
        below = cuts[-1].batch
    return replace(batch, cuts=tuple(cuts))


class Run(NamedTuple):
    """Rows of a chunk, one after another."""

    chunk: int
    first: int  # position
    end: int
    low: int  # position below which they see no window row


class Kept(NamedTuple):
    """The rows of a step that are computed from one layer on."""

    layer: int
    runs: list[Run]  # in the order of the step
    begin: list[int]  # number of each run's first row among the rows of the layer below

    @property
    def starts(self) -> list[int]:
        """Number of each run's first row, and how many rows there are."""
        return [0, *accumulate([run.end - run.first for run in self.runs])]

    def columns(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Of each row: its number in the layer below, position and number of its run's first row, lowest position.
        Then the numbers of those that are drawn from."""
        starts = self.starts
        firsts, lows = [run.first for run in self.runs], [run.low for run in self.runs]
        of_run = np.array([self.begin, firsts, starts[:-1], lows], dtype=np.int64)
        numbers, first, start, low = np.repeat(of_run, np.diff(starts), axis=1)
        last = {run.chunk: end - 1 for run, end in zip(self.runs, starts[1:], strict=True)}
        wanted = np.array([last[c] for c, chunk in enumerate(chunks) if chunk.sample], dtype=np.int64)
        return [numbers + np.arange(len(start)) - start, first, start, low, wanted]


def kept_rows(chunks: Sequence[Chunk]) -> list[Kept]:
    """Where rows end. A chunk that is masked becomes two runs, and nobody reads the rows of the first."""
    cuts = {c: dict(chunk.cuts) for c, chunk in enumerate(chunks) if chunk.cuts}
    if not cuts:
        return []
    runs = [Run(c, chunk.start, chunk.start + len(chunk.tokens), chunk.low) for c, chunk in enumerate(chunks)]
    found: list[Kept] = []
    for layer in sorted({layer for of_chunk in cuts.values() for layer in of_chunk}):
        kept, row = Kept(layer, [], []), 0
        for run in runs:
            edge = cuts[run.chunk].get(layer, 0) if run.chunk in cuts else 0
            first = min(max(run.first, edge), run.end)
            if first > run.first and chunks[run.chunk].masked:
                kept.runs.append(run._replace(end=first))
                kept.begin.append(row)
            if first < run.end:
                kept.runs.append(run._replace(first=first, low=max(run.low, edge)))
                kept.begin.append(row + first - run.first)
            row += run.end - run.first
        if kept.runs != runs:
            found.append(kept)
        runs = kept.runs
    return found


def _cut(
    below: Batch,
    chunks: Sequence[Chunk],
    kept: Kept,
    numbers: Tensor,
    firsts: Tensor,
    starts: Tensor,
    lows: Tensor,
    wanted: Tensor,
) -> Cut:
    """Some rows of the batch below; the columns are those of `Kept.columns`, on the device."""
    positions, rows, runs, offsets = below.positions[numbers], below.rows, kept.runs, kept.starts
    batch = replace(
        below,
        ids=below.ids[numbers],
        positions=positions,
        history=below.history[numbers],
        images=None if below.images is None else below.images[numbers],
        embeds=None,
        starts=tuple(offsets),
        firsts=tuple([run.first for run in runs]),
        slots=tuple([chunks[run.chunk].slot for run in runs]),
        tables=tuple([chunks[run.chunk].blocks for run in runs]),
        logit_rows=wanted,
        rows=None if rows is None else Rows(rows.slots[numbers], positions, firsts, starts, lows),
        lows=tuple([run.low for run in runs]),
        stored=tuple([chunks[run.chunk].stored for run in runs]),
        floors=None if below.floors is None else below.floors[numbers],
    )
    of_chunk = {run.chunk: start for run, start in reversed([*zip(runs, offsets, strict=False)])}
    return Cut(kept.layer, numbers, batch, of_chunk)


def new_histories(chunks: Sequence[Chunk], n: int) -> tuple[list[int], list[int]]:
    """Slots whose sequence begins in its middle, and the n ids before it, latest first, one slot after another."""
    anew = [chunk for chunk in chunks if chunk.before is not None]
    ids = [(*reversed(chunk.before or ()), *(-1,) * n)[:n] for chunk in anew]
    return [chunk.slot for chunk in anew], list(chain.from_iterable(ids))


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
    _remember(storage, torch.tensor(batch.slots, device=device), batch.ids[last], batch.history[last])


def _remember(storage: Storage, slots: Tensor, ids: Tensor, history: Tensor) -> None:
    storage.history[slots] = torch.cat([ids[:, None], history[:, :-1]], dim=1)


# ---- a step on a GPU -------------------------------------------------------------------------------------------------


class Draws(NamedTuple):
    """How R rows of logits become tokens, on the device: what `kernels/sample.py` takes, and whose rows they are."""

    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64, absolute, of the token that is drawn
    seeds: Tensor  # [R] int64
    temperature: Tensor  # [R] f64, 0: greedy
    top_k: Tensor  # [R] int64
    top_p: Tensor  # [R] f64
    min_p: Tensor  # [R] f64


class Step(NamedTuple):
    """A batch on the device, and what is needed at its end."""

    batch: Batch
    last: Tensor | None  # [C] int64 last row of each chunk; None: each row is one
    draws: Draws  # of the R rows in `batch.logit_rows`


class Ends(NamedTuple):
    """What a step with prompts needs behind the backbone."""

    last: Tensor  # [C] int64 last row of each chunk
    logit_rows: Tensor  # [R] int64
    draws: Draws  # of these rows


COLUMNS = 10  # of a decode step: id, position, slot; place and value of a table entry; `_SETTINGS`
_SETTINGS = 5  # seed, temperature, top_k, top_p, min_p
# of a step with prompts: id, position, slot; position and number of its chunk's first row; position below which it
# stores no entry; then of each layer the position below which it sees no window row
PROMPT_COLUMNS = 6


class _Told(NamedTuple):
    """Chunks as the device is told of them."""

    rows: np.ndarray  # [5, T] int64: id, position, slot; position and number of its chunk's first row
    lengths: np.ndarray  # [C] int64
    ends: np.ndarray  # [C] int64, behind the last row
    drawn: list[int]  # chunks whose last row yields a token

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "_Told":
        lengths = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)
        ends = lengths.cumsum()
        of_chunk = np.stack([[c.slot for c in chunks], [c.start for c in chunks], ends - lengths])
        rows = np.empty((5, int(ends[-1])), dtype=np.int64)
        rows[2:] = np.repeat(of_chunk, lengths, axis=1)
        rows[0] = np.fromiter(chain.from_iterable([chunk.tokens for chunk in chunks]), np.int64, rows.shape[1])
        rows[1] = np.arange(rows.shape[1]) - rows[4] + rows[3]
        return cls(rows, lengths, ends, [i for i, chunk in enumerate(chunks) if chunk.sample])


class Uploads:
    """Host to device, a step at a time. Knows what the device already has.

    The host's side is pinned memory, used in turn, so that a copy may still be on its way while the next step is
    written.
    """

    def __init__(self, storage: Storage):
        self.storage = storage
        self._pinned = storage.device.type == "cuda"
        self._buffers = [self._buffer(COLUMNS * storage.num_slots) for _ in range(2)]
        self._sent = [torch.cuda.Event() if self._pinned else None for _ in range(2)]
        self._turn = 0
        self._params: list[SamplingParams | None] = [None] * storage.num_slots  # of the draw each slot had last
        self._seeds = [0] * storage.num_slots
        self._settings = np.zeros((_SETTINGS, storage.num_slots), dtype=np.int64)  # bits that follow from both
        self._tables: list[tuple[int, ...]] = [()] * storage.num_slots  # as the device has them

    def forget(self) -> None:
        """A step failed on its way: what the device has is not known any more."""
        self._tables = [()] * self.storage.num_slots

    def decode(self, plan: StepPlan, columns: Tensor) -> None:
        """Send a step of one-row chunks to `columns` [COLUMNS, n], which `unpack` reads on the device.

        n is at least the number of chunks; the rows beyond are padding.
        """
        chunks, count, rows = plan.chunks, len(plan.chunks), columns.shape[1]
        places, blocks = self._table_changes(chunks)
        if len(places) > rows:
            _write_tables(self.storage, *self._send(places, blocks))
            places, blocks = [], []
        host = self._room(columns.numel()).reshape(columns.shape)
        host[:, count:] = 0
        slots = [chunk.slot for chunk in chunks]
        host[0, :count] = [chunk.tokens[0] for chunk in chunks]
        host[1, :count] = [chunk.start for chunk in chunks]
        host[2, :count] = slots
        host[3:5] = 0  # slot 0 is padding: what its table holds does not matter
        host[3, : len(places)], host[4, : len(places)] = places, blocks
        if len(plan.draws) == count:
            host[5:, :count] = self._settings_of(slots, plan.draws)
        else:
            host[5:, :count] = 0
            drawn = [i for i, chunk in enumerate(chunks) if chunk.sample]
            host[5:, drawn] = self._settings_of([slots[i] for i in drawn], plan.draws)
        self._copy(columns.view(-1))

    def prompts(self, plan: StepPlan, columns: Tensor) -> Ends:
        """Send a step of text to `columns` [PROMPT_COLUMNS + layers, n], for `unpack_prompts`.

        n is at least the number of rows; the rows beyond are padding. What cuts leave out is computed, and seen by
        nobody.
        """
        chunks, of_rows, width = plan.chunks, _Told.of(plan.chunks), columns.shape[1]
        ends, count = of_rows.ends, of_rows.rows.shape[1]
        of_chunk = np.array([(c.stored, c.low) for c in chunks], dtype=np.int64)
        told = np.zeros(columns.shape, dtype=np.int64)
        told[:5, :count], told[4, count:] = of_rows.rows, np.arange(count, width)
        told[5:7, :count] = np.repeat(of_chunk.T, of_rows.lengths, axis=1)
        told[7:] = told[6]
        for chunk, start, end in zip(chunks, (ends - of_rows.lengths).tolist(), ends.tolist(), strict=True):
            if chunk.cuts:
                _lows(chunk, told[1, start:end], told[PROMPT_COLUMNS:, start:end])
        sent = self._send(
            told.reshape(-1),
            ends - 1,
            ends[of_rows.drawn] - 1,
            *self._settings_of([chunks[i].slot for i in of_rows.drawn], plan.draws),
            *self._table_changes(chunks),
            *new_histories(chunks, self.storage.history.shape[1]),
        )
        columns.view(-1).copy_(sent[0])
        self._prepare(*sent[3 + _SETTINGS :])
        logit_rows = sent[2]
        draws = Draws(columns[2][logit_rows], columns[1][logit_rows] + 1, *_as_settings(sent[3 : 3 + _SETTINGS]))
        return Ends(sent[1], logit_rows, draws)

    def _prepare(self, places: Tensor, blocks: Tensor, anew: Tensor, before: Tensor) -> None:
        """Bring up block tables, and the last ids of slots whose sequence begins in its middle."""
        _write_tables(self.storage, places, blocks)
        if anew.shape[0]:
            self.storage.history[anew] = before.view(anew.shape[0], -1)

    def step(self, plan: StepPlan, placement: Placement | None = None) -> Step:
        """Send any step and prepare it on the device. Cost: one copy and some twenty small kernels."""
        chunks, storage, told = plan.chunks, self.storage, _Told.of(plan.chunks)
        lengths, ends, drawn = told.lengths, told.ends, told.drawn
        settings = self._settings_of([chunks[i].slot for i in drawn], plan.draws)
        places = np.zeros(0, dtype=np.int64) if placement is None else placement.places
        limits = [(chunk.low, chunk.stored) for chunk in chunks]
        limited = [np.repeat(column, lengths) for column in zip(*limits, strict=True)] if any(map(any, limits)) else []
        kept = kept_rows(chunks)
        sent = self._send(
            *told.rows,
            ends - 1,
            ends[drawn] - 1,
            places,
            *settings,
            *self._table_changes(chunks),
            *new_histories(chunks, storage.history.shape[1]),
            *limited,
            *chain.from_iterable([of_layer.columns(chunks) for of_layer in kept]),
        )
        token_ids, positions, row_slots, row_firsts, row_starts, last, logit_rows, row_places = sent[:8]
        drawing, sent = sent[8 : 8 + _SETTINGS], sent[8 + _SETTINGS :]
        self._prepare(*sent[:4])
        lows, floors = sent[4:6] if limited else (None, None)
        columns = sent[6 if limited else 4 :]
        token_ids = _known(token_ids, row_slots, storage)
        images, embeds = (None, None) if placement is None else _embeds(row_places, placement.rows)
        batch = Batch(
            ids=token_ids,
            positions=positions,
            history=_history(token_ids, positions, torch.stack((row_firsts, row_slots)), storage),
            images=images,
            embeds=embeds,
            starts=(0, *ends.tolist()),
            firsts=tuple([chunk.start for chunk in chunks]),
            slots=tuple([chunk.slot for chunk in chunks]),
            tables=tuple([chunk.blocks for chunk in chunks]),
            logit_rows=logit_rows,
            rows=Rows(row_slots, positions, row_firsts, row_starts, lows),
            floors=floors,
        )
        draws = Draws(row_slots[logit_rows], positions[logit_rows] + 1, *_as_settings(drawing))
        cuts: list[Cut] = []
        for i, of_layer in enumerate(kept):
            below = cuts[-1].batch if cuts else batch
            cuts.append(_cut(below, chunks, of_layer, *columns[5 * i : 5 * i + 5]))
        return Step(replace(batch, cuts=tuple(cuts)) if cuts else batch, last, draws)

    def _table_changes(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        """Entries of `storage.tables`, flat, that the device does not have yet, and their blocks."""
        places: list[int] = []
        blocks: list[int] = []
        for chunk in chunks:
            known, table = self._tables[chunk.slot], chunk.blocks
            if known is table:
                continue
            same = len(known) if table[: len(known)] == known else 0
            start = chunk.slot * self.storage.table_blocks
            places += range(start + same, start + len(table))
            blocks += table[same:]
            self._tables[chunk.slot] = table
        return places, blocks

    def _settings_of(self, slots: list[int], draws: Sequence[Draw]) -> np.ndarray:
        """[_SETTINGS, R] int64 bits. A slot's settings are worked out when they change, which is seldom."""
        table, known, seeds = self._settings, self._params, self._seeds
        for slot, draw in zip(slots, draws, strict=True):
            params = draw.params
            if known[slot] is not params or seeds[slot] != draw.seed:
                known[slot], seeds[slot] = params, draw.seed
                table[0, slot], table[2, slot] = draw.seed, params.top_k
                table.view(np.float64)[[1, 3, 4], slot] = params.temperature, params.top_p, params.min_p
        return table[:, slots]

    # ---- copies ------------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Room for copies of so many numbers: to make it takes the time of many steps."""
        for turn, buffer in enumerate(self._buffers):
            if buffer.shape[0] < size:
                self._buffers[turn] = self._buffer(size)

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)

    def _room(self, size: int) -> np.ndarray:
        """The host's side of the next copy."""
        self._turn ^= 1
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()  # the copy before the last one; long done
        if self._buffers[self._turn].shape[0] < size:
            self._buffers[self._turn] = self._buffer(2 * size)
        return self._buffers[self._turn][:size].numpy()

    def _copy(self, target: Tensor) -> None:
        target.copy_(self._buffers[self._turn][: target.shape[0]], non_blocking=True)
        event = self._sent[self._turn]
        if event is not None:
            event.record()

    def _send(self, *columns: Sequence[int] | np.ndarray) -> tuple[Tensor, ...]:
        """New device tensors of these numbers, in one copy. Each begins at 16 bytes: kernels are compiled for that."""
        sizes = [len(column) for column in columns]
        host, at = self._room(sum(size + size % 2 for size in sizes)), 0
        for column, size in zip(columns, sizes, strict=True):
            host[at : at + size] = column
            at += size + size % 2
        target = torch.empty(at, dtype=torch.int64, device=self.storage.device)
        self._copy(target)
        return tuple(
            [column[:size] for column, size in zip(target.split([n + n % 2 for n in sizes]), sizes, strict=True)]
        )


def unpack(columns: Tensor, storage: Storage) -> Step:
    """What `Uploads.decode` sent, as a step. On the device alone, so a graph may hold it. columns [COLUMNS, n]."""
    positions, slots = columns[1], columns[2]
    begun = begin_rows(columns[:5], storage.tables, storage.last_token, storage.history)
    rows = Rows(slots, positions, positions, begun.numbers)
    batch = Batch.on_device(begun.ids, begun.history, rows, begun.numbers)
    return Step(batch, None, Draws(slots, begun.following, *_as_settings(columns[5:].unbind(0))))


def _lows(chunk: Chunk, positions: np.ndarray, found: np.ndarray) -> None:
    """Of each row of a chunk with cuts, the position below which it sees no window row, layer by layer.

    A cut hides what is below it. Rows below it belong to nobody from there on, unless they are masked: they see
    themselves, so that nothing is read that was not written.

    found  [layers, rows], written.
    """
    edges, lows = dict(chunk.cuts), found[0].copy()
    for layer, of_layer in enumerate(found):
        if layer in edges:
            edge = edges[layer]
            lows = np.where(positions >= edge, np.maximum(lows, edge), lows if chunk.masked else positions)
        of_layer[:] = lows


def unpack_prompts(columns: Tensor, storage: Storage, storing: int | None = None) -> Batch:
    """What `Uploads.prompts` sent, as a batch without logit rows. On the device alone, so a graph may hold it.

    columns  [PROMPT_COLUMNS + layers, n].
    storing  no row is needed from this layer on; None: in all layers.
    """
    told, positions, slots, firsts, starts, floors = columns[:PROMPT_COLUMNS]
    ids, rows = _known(told, slots, storage), Rows(slots, positions, firsts, starts)
    history = _history(ids, positions, torch.stack((firsts, slots)), storage)
    batch = Batch.on_device(ids, history, rows, positions[:0], chunked=True)
    batch = replace(batch, floors=floors, layer_lows=columns[PROMPT_COLUMNS:])
    if storing is None:
        return batch
    return replace(batch, cuts=(Cut(storing, torch.arange(0, device=columns.device), batch, {}),))


def beside_columns(storage: Storage) -> int:
    """Numbers that go with the columns of a step with prompts, as a rule at most: of each slot its ends, settings and
    history and a few blocks, and one whole block table."""
    slots, history = storage.num_slots + 1, storage.history.shape[1]
    return slots * (3 + _SETTINGS + history + 2 * 8) + 2 * storage.tables.shape[1]


def prompt_step(columns: Tensor, ids: Tensor, history: Tensor, ends: Ends) -> Step:
    """What is left of a step when its backbone has been computed."""
    _, positions, slots, firsts, starts = columns[:5]
    batch = Batch.on_device(ids, history, Rows(slots, positions, firsts, starts), ends.logit_rows, chunked=True)
    return Step(batch, ends.last, ends.draws)


def finish(step: Step, storage: Storage, tokens: Tensor | None, peaks: Tensor | None = None) -> Tensor | None:
    """Leave for the next step what it may ask for: each slot's last ids, and the tokens [R] drawn in this one.

    peaks    [R] f32, the largest logits.
    returns  with peaks, what the host wants of the draw: [2, R] int64, tokens and bits of the peaks as float64.
    """
    batch, rows = step.batch, step.batch.rows
    assert rows is not None
    if step.last is None and tokens is not None and peaks is not None:
        last, kept = storage.last_token, storage.history
        return end_rows(batch.ids, batch.history, rows.slots, tokens, peaks, last, kept)
    if tokens is not None:
        storage.last_token[step.draws.slots] = tokens
    if storage.history.shape[1]:
        slots, ids, history = rows.slots, batch.ids, batch.history
        if step.last is not None:
            slots, ids, history = slots[step.last], ids[step.last], history[step.last]
        _remember(storage, slots, ids, history)
    return None if tokens is None or peaks is None else torch.stack((tokens, peaks.double().view(torch.int64)))


def _as_settings(columns: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    seeds, temperature, top_k, top_p, min_p = columns
    return seeds, temperature.view(torch.float64), top_k, top_p.view(torch.float64), min_p.view(torch.float64)


def _write_tables(storage: Storage, places: Tensor, blocks: Tensor) -> None:
    storage.tables.view(-1)[places] = blocks.to(torch.int32)


def _known(ids: Tensor, slots: Tensor, storage: Storage) -> Tensor:
    """ids with those that are PENDING taken from where sampling left them."""
    return torch.where(ids < 0, storage.last_token[slots], ids)
