"""N-gram memory: recent token ids -> table rows, and the gate that adds what was found to the streams.

Source: model specification, section 2.9. T rows, S streams, D hidden width, n longest n-gram, h hash heads.
"""

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, quant

GATE_FLOOR = 1e-6  # least magnitude of the dot product under the square root


def ngram_ids_reference(ids: Tensor, history: Tensor, classes: Tensor, pad: int, image: int) -> Tensor:
    ids = torch.cat([ids[:, None], history], dim=1)
    broken = ((ids < 0) | (ids == image)).cumsum(dim=1) > 0
    return torch.where(broken, classes[pad], classes[ids.clamp(min=0)])


def ngram_ids(ids: Tensor, history: Tensor, classes: Tensor, pad: int, image: int) -> Tensor:
    """Compressed ids at p, p-1, ...; the pad class from the first image token or sequence start on.

    ids      [T] int64 token ids; history [T, n-1] int64 those before each, newest first, -1 before the start.
    classes  [ids] int64, the compressed id of every token id.
    pad      id whose class stands for what is not there; image: id of image tokens.
    returns  [T, n] int64. Exact.
    Raises   ShapeError.
    """
    if ids.ndim != 1 or history.ndim != 2 or history.shape[0] != ids.shape[0]:
        raise ShapeError("ngram_ids: ids, history", want="[T], [T, n-1]", got=(tuple(ids.shape), tuple(history.shape)))
    run = backends.pick("ngram_ids", ids) or ngram_ids_reference
    return run(ids, history, classes, pad, image)


def ngram_rows_reference(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    products = ids * multipliers  # [T, n]
    mixed = products[:, 0]
    rows: list[Tensor] = []
    for size in range(1, ids.shape[1]):
        mixed = mixed ^ products[:, size]
        rows.append(mixed.unsqueeze(1) % primes[size - 1] + offsets[size - 1])  # [T, h]
    return torch.cat(rows, dim=1)


def ngram_rows(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of the 2-grams to n-grams that end at each token.

    ids          [T, n] int64 compressed token ids: column 0 the token itself, column i the i-th before it. Ids before
                 the start of the sequence or behind an image token are already the pad class. T may be 0.
    multipliers  [n] int64, so small that id * multiplier stays below 2^63.
    primes       [n-1, h] int64 bucket counts; offsets [n-1, h] int64 first table row of each bucket run.
    returns      [T, (n-1)*h] int64, n-gram size major, then head. Exact.
    Cost         T * n * h integer operations.
    Raises       ShapeError.
    """
    if ids.ndim != 2 or ids.shape[1] < 2 or ids.dtype != torch.int64:
        raise ShapeError("ngram_rows: ids", want="[T, n] int64, n >= 2", got=(tuple(ids.shape), ids.dtype))
    n = ids.shape[1]
    if multipliers.shape != (n,):
        raise ShapeError("ngram_rows: multipliers", want=(n,), got=tuple(multipliers.shape))
    if primes.ndim != 2 or primes.shape[0] != n - 1 or offsets.shape != primes.shape:
        got = (tuple(primes.shape), tuple(offsets.shape))
        raise ShapeError("ngram_rows: primes, offsets", want=f"[{n - 1}, h] both", got=got)
    run = backends.pick("ngram_rows", ids) or ngram_rows_reference
    return run(ids, multipliers, primes, offsets)


def table_rows_reference(codes: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    at = rows.to(codes.device)
    found = codes.view(torch.uint8)[at].view(torch.float8_e4m3fn)
    return quant.dequantise_fp8(found, scales[at], dtype).to(rows.device)


def table_rows(codes: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a quantised table, widened.

    codes    [N, W] float8_e4m3fn; scales [N, W/32] uint8 UE8M0. On the device of `rows`, or in locked host memory
             (pinned or registered), which a GPU reads over the link.
    rows     [...] int64, 0 to N-1; may be empty.
    returns  [..., W] dtype, exact.
    Cost     memory bound: W * 33/32 bytes a row, at random places.
    Raises   ShapeError.
    """
    if codes.ndim != 2 or scales.shape != (codes.shape[0], codes.shape[1] // 32):
        got = (tuple(codes.shape), tuple(scales.shape))
        raise ShapeError("table_rows: codes, scales", want="[N, W], [N, W/32]", got=got)
    run = backends.pick("table_rows", rows) or table_rows_reference
    return run(codes, scales, rows, dtype)


def engram_gate_reference(
    s: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float, images: Tensor | None = None
) -> Tensor:
    stream, key = s.float(), keys.float()
    dot = (stream * weight.float() * key).sum(dim=-1)  # [T, S]
    dot = dot * torch.rsqrt(stream.square().mean(dim=-1) + eps) * torch.rsqrt(key.square().mean(dim=-1) + eps)
    dot = dot * s.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=GATE_FLOOR).sqrt(), dot))
    out = (stream + gate.unsqueeze(-1) * value.float().unsqueeze(1)).to(s.dtype)
    return out if images is None else torch.where(images[:, None, None], s, out)


def engram_gate(
    s: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float, images: Tensor | None = None
) -> Tensor:
    """Add the looked-up value to every stream, as far as the stream and its key agree.

    s        [T, S, D] residual streams, bf16 or f32. T may be 0.
    keys     [T, S, D] one key a stream; value [T, D], shared by the streams.
    weight   [S, D] f32, product of the two norm weights.
    eps      added to the mean square of each stream and of each key, one statistic per stream.
    images   [T] bool: rows that stay as they are; None: no such row.
    returns  [T, S, D], dtype of s, rounded once: s + sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)) * value,
             d the cosine-like dot times sqrt(D). A dot of exactly 0 counts as positive.
    Error    at most 1 unit in the last place of the dtype of s, where |d| is above 1e-5; below that the sign of d may
             differ, which moves the gate by up to 2e-3.
    Cost     memory bound: reads s and keys once, writes s once.
    Raises   ShapeError.
    """
    if s.ndim != 3 or keys.shape != s.shape:
        raise ShapeError("engram_gate: keys", want=f"[T, S, D] as s {tuple(s.shape)}", got=tuple(keys.shape))
    rows, streams, width = s.shape
    if value.shape != (rows, width):
        raise ShapeError("engram_gate: value", want=(rows, width), got=tuple(value.shape))
    if weight.shape != (streams, width):
        raise ShapeError("engram_gate: weight", want=(streams, width), got=tuple(weight.shape))
    if images is not None and images.shape != (rows,):
        raise ShapeError("engram_gate: images", want=(rows,), got=tuple(images.shape))
    run = backends.pick("engram_gate", s, keys, value, weight) or engram_gate_reference
    return run(s, keys, value, weight, eps, images)
