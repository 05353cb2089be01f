"""Whole numbers of a step on a device, row by row: what the host told, and where compressed entries are stored.

T rows, n ids kept before each row. Exact everywhere. Each op is a dozen operations on a few numbers a row, which a
backend does in one kernel: at a few rows a step's time goes by kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends


class Begun(NamedTuple):
    """One-row chunks at the beginning of a step, all int64."""

    ids: Tensor  # [T] none pending
    history: Tensor  # [T, n] the id at position p-1-i, -1 before the start
    numbers: Tensor  # [T] 0, 1, ...
    following: Tensor  # [T] p + 1


def begin_rows_reference(told: Tensor, tables: Tensor, last_token: Tensor, history: Tensor) -> Begun:
    ids, positions, slots, places, blocks = told
    tables.view(-1)[places] = blocks.to(tables.dtype)
    back = torch.arange(history.shape[1], device=told.device)
    return Begun(
        torch.where(ids < 0, last_token[slots], ids),
        torch.where(positions[:, None] > back, history[slots], -1),
        torch.arange(ids.shape[0], device=told.device),
        positions + 1,
    )


def begin_rows(told: Tensor, tables: Tensor, last_token: Tensor, history: Tensor) -> Begun:
    """Rows as the host tells them, made whole with what the device has; block tables are brought up.

    told        [5, T] int64: id (below 0: pending, the slot's last token), position, state slot, and for any T places
                of the flat tables the block that is there from now on. Padding: slot 0, position 0, place 0.
    tables      [slots, blocks] int32, contiguous; written.
    last_token  [slots] int64; history [slots, n] int64, the ids before each slot's next position.
    Raises      ShapeError.
    """
    if told.ndim != 2 or told.shape[0] != 5 or told.dtype != torch.int64:
        raise ShapeError("begin_rows: told", want="[5, T] int64", got=(tuple(told.shape), told.dtype))
    slots = tables.shape[0]
    if tables.ndim != 2 or last_token.shape != (slots,) or history.ndim != 2 or history.shape[0] != slots:
        got = (tuple(tables.shape), tuple(last_token.shape), tuple(history.shape))
        raise ShapeError("begin_rows: tables, last_token, history", want="[slots, B], [slots], [slots, n]", got=got)
    run = backends.pick("begin_rows", told) or begin_rows_reference
    return run(told, tables, last_token, history)


def group_records_reference(
    positions: Tensor, slots: Tensor, tables: Tensor, tokens: int, ratio: int
) -> tuple[Tensor, Tensor]:
    ends = positions + 1
    block = tables[slots, positions // tokens].long()
    record = block * (tokens // ratio) + positions % tokens // ratio
    return ends // ratio, torch.where(ends % ratio == 0, record, -1)


def group_records(positions: Tensor, slots: Tensor, tables: Tensor, tokens: int, ratio: int) -> tuple[Tensor, Tensor]:
    """Where the group of `ratio` tokens that ends at each row is stored.

    positions, slots  [T] int64.
    tables            [slots, B] int32: blocks of `tokens` tokens, a multiple of ratio.
    returns           visible [T] int64, entries whose last token is at or before the row; record [T] int64, -1 where no
                      group ends.
    Raises            ShapeError.
    """
    if positions.ndim != 1 or slots.shape != positions.shape:
        raise ShapeError("group_records: positions, slots", want="[T], [T]", got=(positions.shape, slots.shape))
    if ratio < 1 or tokens % ratio:
        raise ShapeError("group_records: tokens, ratio", want="a multiple of ratio", got=(tokens, ratio))
    run = backends.pick("group_records", positions) or group_records_reference
    return run(positions, slots, tables, tokens, ratio)


def end_rows_reference(
    ids: Tensor, before: Tensor, slots: Tensor, tokens: Tensor, peaks: Tensor, last_token: Tensor, history: Tensor
) -> Tensor:
    last_token[slots] = tokens
    if history.shape[1]:
        history[slots] = torch.cat([ids[:, None], before[:, :-1]], dim=1)
    return torch.stack((tokens, peaks.double().view(torch.int64)))


def end_rows(
    ids: Tensor, before: Tensor, slots: Tensor, tokens: Tensor, peaks: Tensor, last_token: Tensor, history: Tensor
) -> Tensor:
    """What one-row chunks leave for their slots' next step, and for the host.

    ids, slots         [T] int64; slots differ, but for 0, which is padding's.
    before             [T, n] int64: the ids before each row, the nearest first.
    tokens, peaks      [T] int64 and f32: drawn, and the largest logit.
    last_token         [slots] int64 takes the tokens; history [slots, n] int64 the ids up to each row's own.
    returns            [2, T] int64: tokens; bits of the peaks as float64.
    Raises             ShapeError.
    """
    rows = ids.shape[0]
    if not (ids.shape == slots.shape == tokens.shape == peaks.shape == (rows,)) or peaks.dtype != torch.float32:
        got = (tuple(ids.shape), tuple(slots.shape), tuple(tokens.shape), tuple(peaks.shape), peaks.dtype)
        raise ShapeError("end_rows: ids, slots, tokens, peaks", want="[T] each, peaks f32", got=got)
    if before.shape != (rows, history.shape[1]) or last_token.shape != history.shape[:1]:
        got = (tuple(before.shape), tuple(last_token.shape), tuple(history.shape))
        raise ShapeError("end_rows: before, last_token, history", want="[T, n], [slots], [slots, n]", got=got)
    run = backends.pick("end_rows", ids) or end_rows_reference
    return run(ids, before, slots, tokens, peaks, last_token, history)
