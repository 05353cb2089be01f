"""Attention over a window and selected compressed entries, one latent as key and value, with a sink per head.

Source: model specification, section 2.5. T rows, H heads, dh head width, K selected entries a row.
"""

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, kv_copy

GROUP = 64  # listed rows per step of the running maximum, which decides how probabilities are rounded
PEAK_START = -1e30
TILE_ELEMENTS = 1 << 20  # most elements of one temporary: 4 MB of float32
TILE_ROWS = 64  # neighbours whose windows overlap enough for one shared product


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _distinct(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Values of `ids` that occur, ascending, and for each id its place among them. Ids are 0 to size-1."""
    seen = torch.zeros(size, dtype=torch.bool, device=ids.device)
    seen[ids.flatten()] = True
    values = seen.nonzero().squeeze(1)
    places = torch.empty(size, dtype=torch.int64, device=ids.device)
    places[values] = torch.arange(values.shape[0], device=ids.device)
    return values, places[ids]


def _softmax(scores: Tensor, sink: Tensor, round_probs: bool) -> Tensor:
    """scores [T, H, J] f32, -inf where there is no row, J a multiple of GROUP -> what multiplies the values."""
    groups = scores.unflatten(-1, (-1, GROUP))
    running = groups.detach().amax(dim=-1).clamp(min=PEAK_START).cummax(dim=-1).values  # [T, H, J/GROUP]
    peak = running[..., -1]
    if round_probs:
        p = torch.exp(groups - running.unsqueeze(-1))
        shrink = torch.exp(running - peak.unsqueeze(-1))
        total = (p.sum(dim=-1) * shrink).sum(dim=-1)
        p = (p.bfloat16().float() * shrink.unsqueeze(-1)).flatten(-2)
    else:
        p = torch.exp(scores - peak.unsqueeze(-1))
        total = p.sum(dim=-1)
    return p / (total + torch.exp(sink - peak)).unsqueeze(-1)


def _attend_tile(q: Tensor, table: Tensor, listed: Tensor, sink: Tensor, round_probs: bool) -> Tensor:
    """q [t, H, dh] f32, scaled; table [N+1, dh] f32, last row zero; listed [t, J] rows of it, N where none."""
    t, heads, width = q.shape
    none = table.shape[0] - 1
    rows, place = _distinct(listed, none + 1)
    absent = (listed == none).unsqueeze(1)
    if rows.shape[0] > 2 * listed.shape[1]:  # queries share few rows: one small product each
        own = table[listed]  # [t, J, dh]
        weights = _softmax((q @ own.transpose(1, 2)).masked_fill(absent, -torch.inf), sink, round_probs)
        return weights @ own
    shared = table[rows]  # [U, dh]
    place = place.unsqueeze(1).expand(-1, heads, -1)
    scores = (q.reshape(t * heads, width) @ shared.t()).unflatten(0, (t, heads)).gather(2, place)
    weights = _softmax(scores.masked_fill(absent, -torch.inf), sink, round_probs)
    spread = weights.new_zeros(t, heads, shared.shape[0]).scatter(2, place, weights)
    return (spread.flatten(0, 1) @ shared).unflatten(0, (t, heads))


def sink_attention_reference(
    q: Tensor,
    rows: Tensor,
    begin: Tensor,
    count: Tensor,
    paged: kv_copy.Paged | Tensor | None,
    records: Tensor | None,
    sink: Tensor,
    scale: float,
    round_probs: bool,
) -> Tensor:
    total, heads, width = q.shape
    if total == 0:
        return torch.empty_like(q)
    parts = [rows.float()]
    entries = None
    none = rows.shape[0]
    if records is not None and records.shape[1]:
        if isinstance(paged, Tensor):
            parts.append(paged.float())
            entries = records + rows.shape[0]
        else:
            assert paged is not None
            size = paged.pool.shape[0] * paged.entries
            used, place = _distinct(torch.where(records < 0, size, records).long(), size + 1)
            used = torch.where(used == size, -1, used)
            parts.append(kv_copy.read_records_reference(paged, used))
            entries = place + rows.shape[0]
        none += parts[1].shape[0]
        entries = torch.where(records < 0, none, entries)
        entries = torch.nn.functional.pad(entries, (0, -records.shape[1] % GROUP), value=none)
    table = torch.cat([*parts, rows.new_zeros(1, width, dtype=torch.float32)])
    slots = torch.arange(_round_up(max(int(count.max()), 1), GROUP), device=q.device)
    listed = torch.where(slots < count.unsqueeze(1), begin.unsqueeze(1) + slots, none)
    if entries is not None:
        listed = torch.cat([listed, entries], dim=1)
    tile = min(max(TILE_ELEMENTS // (listed.shape[1] * max(heads, width)), 1), TILE_ROWS)
    outputs = [
        _attend_tile(some_q.float() * scale, table, some_listed, sink.float(), round_probs)
        for some_q, some_listed in zip(q.split(tile), listed.split(tile), strict=True)
    ]
    return torch.cat(outputs).to(q.dtype)


def sink_attention(
    q: Tensor,
    rows: Tensor,
    begin: Tensor,
    count: Tensor,
    paged: kv_copy.Paged | Tensor | None,
    records: Tensor | None,
    sink: Tensor,
    scale: float,
    round_probs: bool,
) -> Tensor:
    """softmax(scale * <q, k_j>, with exp(sink) in the denominator) @ k_j over each row's window and records.

    q            [T, H, dh] bf16 or f32. T may be 0.
    rows         [N, dh] bf16 or f32, as `kv_copy.window_rows` lays them.
    begin,count  [T] int64: row t's window is rows[begin : begin+count], oldest first; count >= 0.
    paged        where the compressed entries are; a tensor [n, dh] serves too; None: window only.
    records      [T, K] ids in it, ascending, -1 (skipped) at the end; None: window only.
    sink         [H] f32, a raw logit; it takes probability and gives no value.
    scale        of the dot products, dh^-0.5.
    round_probs  unnormalised probabilities are rounded to bf16 for the value product, not for the denominator. They
                 are taken against the maximum so far, 64 listed rows at a time: the window from its oldest row, filled
                 up to a multiple of 64, then the records.
    returns      [T, H, dh], dtype of q; scores, softmax and sums in f32, one rounding. A row that sees nothing is 0.
    Error        at most 1 unit in the last place of bf16, or 1e-5 of max |k| in f32, against the reference.
    Cost         4*T*H*(window+K)*dh FLOP; temporaries stay below a few times 4 MB beside the rows themselves.
    Raises       ShapeError.
    """
    if q.ndim != 3 or rows.ndim != 2 or rows.shape[1] != q.shape[2]:
        got = (tuple(q.shape), tuple(rows.shape))
        raise ShapeError("sink_attention: q, rows", want="[T, H, dh], [N, dh]", got=got)
    if begin.shape != q.shape[:1] or count.shape != q.shape[:1] or sink.shape != q.shape[1:2]:
        got = (tuple(begin.shape), tuple(count.shape), tuple(sink.shape))
        raise ShapeError("sink_attention: begin, count, sink", want="[T], [T], [H]", got=got)
    if (paged is None) != (records is None):
        raise ShapeError("sink_attention: paged, records", want="both or none", got=(paged is None, records is None))
    if records is not None and (records.ndim != 2 or records.shape[0] != q.shape[0]):
        raise ShapeError("sink_attention: records", want=f"[{q.shape[0]}, K]", got=tuple(records.shape))
    if paged is not None:
        channels = paged.shape[-1] if isinstance(paged, Tensor) else paged.channels
        if channels != q.shape[2]:
            raise ShapeError("sink_attention: paged channels", want=q.shape[2], got=channels)
    pool = paged if paged is None or isinstance(paged, Tensor) else paged.pool
    run = None if isinstance(paged, Tensor) else backends.pick("sink_attention", q, rows, sink, pool)
    return (run or sink_attention_reference)(q, rows, begin, count, paged, records, sink, scale, round_probs)


def attend_reference(
    q: Tensor,
    kw: Tensor,
    ring: kv_copy.Ring,
    rows: kv_copy.Rows,
    window: int,
    paged: kv_copy.Paged | None,
    records: Tensor | None,
    sink: Tensor,
    scale: float,
    round_probs: bool,
) -> Tensor:
    total = q.shape[0]
    if total == 0:
        return torch.empty_like(q)
    row = torch.arange(total, device=q.device)
    back = torch.arange(window - 1, -1, -1, device=q.device)
    at = rows.positions[:, None] - back  # [T, window] positions
    stored = kv_copy.read_ring_reference(ring, rows.slots[:, None].expand_as(at), at.clamp(min=0)).to(kw.dtype)
    own = kw[(row[:, None] - back).clamp(min=0)]
    found = torch.where((at >= rows.firsts[:, None])[..., None], own, stored)  # [T, window, dh]
    low = 0 if rows.lows is None else rows.lows[:, None]
    found = torch.where((at >= low)[..., None], found, 0.0)
    count = (rows.positions + 1 if rows.lows is None else rows.positions + 1 - rows.lows).clamp(max=window)
    begin = row * window + window - count
    return sink_attention_reference(q, found.flatten(0, 1), begin, count, paged, records, sink, scale, round_probs)


def attend(
    q: Tensor,
    kw: Tensor,
    ring: kv_copy.Ring,
    rows: kv_copy.Rows,
    window: int,
    paged: kv_copy.Paged | None,
    records: Tensor | None,
    sink: Tensor,
    scale: float,
    round_probs: bool,
) -> Tensor:
    """`sink_attention` that finds window rows on the device: in this step's rows or, from before them, in the ring.

    q            [T, H, dh]; kw [T, dh] this step's rows, chunk after chunk; bf16 or f32. T may be 0.
    ring         read only; call `kv_copy.ring_write` for kw afterwards. It has at least window - 1 rows.
    rows         where the rows stand; row t sees positions max(low, p-window+1) .. p of its slot, low <= p.
    others       as `sink_attention`; paged is a `Paged` or None.
    returns      [T, H, dh], dtype of q. A padding row (slot 0, position 0) attends to itself.
    Error, Cost  as `sink_attention`; the reference holds T*window rows.
    Raises       ShapeError.
    """
    if q.ndim != 3 or kw.shape != (q.shape[0], q.shape[2]) or ring.channels != q.shape[2]:
        got = (tuple(q.shape), tuple(kw.shape), ring.channels)
        raise ShapeError("attend: q, kw, ring channels", want="[T, H, dh], [T, dh], dh", got=got)
    if sink.shape != q.shape[1:2] or any(part is not None and part.shape != q.shape[:1] for part in rows):
        got = (tuple(sink.shape), *(None if part is None else tuple(part.shape) for part in rows))
        raise ShapeError("attend: sink, rows", want="[H], [T] each", got=got)
    if not 1 <= window <= ring.bytes.shape[1] + 1:
        raise ShapeError("attend: window", want=f"1 to {ring.bytes.shape[1] + 1}", got=window)
    if (paged is None) != (records is None):
        raise ShapeError("attend: paged, records", want="both or none", got=(paged is None, records is None))
    if records is not None and (records.ndim != 2 or records.shape[0] != q.shape[0]):
        raise ShapeError("attend: records", want=f"[{q.shape[0]}, K]", got=tuple(records.shape))
    if paged is not None and paged.channels != q.shape[2]:
        raise ShapeError("attend: paged channels", want=q.shape[2], got=paged.channels)
    run = backends.pick("attend", q, kw, sink) or attend_reference
    return run(q, kw, ring, rows, window, paged, records, sink, scale, round_probs)
