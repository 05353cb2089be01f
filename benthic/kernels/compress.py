"""Pooling of neighbouring tokens into one compressed entry, and what is stored of it.

Source: model specification, sections 2.6 (latent, compressed KV) and 2.7 (index key). T rows, dh head width, di index
width.
"""

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, kv_copy, norm, rope


def pool_groups_reference(a: Tensor, b: Tensor) -> Tensor:
    return (torch.softmax(b.float(), dim=1) * a.float()).sum(dim=1)


def pool_groups(a: Tensor, b: Tensor) -> Tensor:
    """Weighted mean of a over each group; weights are a softmax of b over the group, separately for each channel.

    a, b     [G, r, dh] f32: values and gate logits of the r tokens of each group. G may be 0.
    returns  [G, dh] f32. The caller rounds it to the activation dtype before the norm.
    Error    2e-7 relative to max |a| against the reference.
    Cost     memory bound: reads a and b once.
    Raises   ShapeError.
    """
    if a.ndim != 3 or a.shape[1] < 1:
        raise ShapeError("pool_groups: a", want="[G, r, dh] with r >= 1", got=tuple(a.shape))
    if b.shape != a.shape:
        raise ShapeError("pool_groups: b", want=tuple(a.shape), got=tuple(b.shape))
    run = backends.pick("pool_groups", a, b) or pool_groups_reference
    return run(a, b)


# ---- stored entries --------------------------------------------------------------------------------------------------


def _first_positions(rows: kv_copy.Rows, ratio: int) -> Tensor:
    """[T] position of the first token of the group that ends at each row."""
    return (rows.positions + 1 - ratio).clamp(min=0)


def compress_store_reference(
    a: Tensor,
    b: Tensor | None,
    carry: Tensor | None,
    rows: kv_copy.Rows,
    ratio: int,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    paged: kv_copy.Paged,
    ids: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    if b is None or carry is None:
        pooled = a
    else:
        pooled = pool_groups_reference(*kv_copy.close_groups_reference(a, b, carry, rows, ratio))
    latent = norm.rms_norm_reference(pooled.to(dtype), weight, eps)
    turned = rope.rotate_reference(latent, _first_positions(rows, ratio), freqs)
    kv_copy.write_records_reference(paged, ids, turned)
    return latent


def compress_store(
    a: Tensor,
    b: Tensor | None,
    carry: Tensor | None,
    rows: kv_copy.Rows,
    ratio: int,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    paged: kv_copy.Paged,
    ids: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """`close_groups`, `pool_groups`, norm, rotation at the group's first token, `write_records`: for all rows at once.

    a, b       [T, dh] this step's products, f32. Ratio 1: b and carry are None, a is in any float dtype. T may be 0.
    carry      [slots, n, 2, dh] f32, as `close_groups`; brought up afterwards.
    rows       where the rows stand.
    weight     [dh] of the norm, eps its addend; freqs [dr/2] f32.
    paged      where compressed KV lies; ids [T] int64: the record of the group that ends at a row, -1 where none does.
    dtype      the pooled row, the latent and the rotated latent are rounded to it.
    returns    latent [T, dh], normed, not rotated; of no meaning for a row that ends no group.
    Error      latent: pooling 2e-7 of max |a|, then 1 unit in the last place. Bytes: those of its rotation.
    Cost       memory bound.
    Raises     ShapeError.
    """
    pooled = ratio > 1
    if a.ndim != 2 or a.shape[1] != paged.channels or (b is None) == pooled or (carry is None) == pooled:
        got = (tuple(a.shape), b is not None, carry is not None)
        raise ShapeError(
            "compress_store: a, b, carry", want=f"[T, {paged.channels}]; both for a ratio above 1", got=got
        )
    if b is not None and b.shape != a.shape:
        raise ShapeError("compress_store: b", want=tuple(a.shape), got=tuple(b.shape))
    if carry is not None and (carry.ndim != 4 or carry.shape[2:] != (2, a.shape[1]) or carry.shape[1] < ratio):
        want = f"[slots, at least {ratio}, 2, {a.shape[1]}]"
        raise ShapeError("compress_store: carry", want=want, got=tuple(carry.shape))
    if ids.shape != a.shape[:1] or weight.shape != a.shape[1:] or 2 * freqs.shape[0] > a.shape[1]:
        got = (tuple(ids.shape), tuple(weight.shape), tuple(freqs.shape))
        want = f"[{a.shape[0]}], [{a.shape[1]}], at most [{a.shape[1] // 2}]"
        raise ShapeError("compress_store: ids, weight, freqs", want=want, got=got)
    run = backends.pick("compress_store", a, b, carry, weight) or compress_store_reference
    return run(a, b, carry, rows, ratio, weight, eps, freqs, paged, ids, dtype)


def key_store_reference(
    k: Tensor,
    rows: kv_copy.Rows,
    ratio: int,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    paged: kv_copy.Paged,
    ids: Tensor,
) -> None:
    turned = rope.rotate_reference(norm.rms_norm_reference(k, weight, eps), _first_positions(rows, ratio), freqs)
    kv_copy.write_records_reference(paged, ids, turned)


def key_store(
    k: Tensor,
    rows: kv_copy.Rows,
    ratio: int,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    paged: kv_copy.Paged,
    ids: Tensor,
) -> None:
    """Norm, rotation at the group's first token and storing of index keys.

    k                             [T, di] the latents' product, bf16 or f32; each step is rounded to its dtype.
    rows, ratio, ids, and others  as `compress_store`; paged: where index keys lie.
    Error                         1 unit in the last place before the rotation, and 1 after it; then exact bytes.
    Raises                        ShapeError.
    """
    if k.ndim != 2 or k.shape[1] != paged.channels or ids.shape != k.shape[:1]:
        got = (tuple(k.shape), tuple(ids.shape))
        raise ShapeError("key_store: k, ids", want=f"[T, {paged.channels}], [T]", got=got)
    if weight.shape != k.shape[1:] or 2 * freqs.shape[0] > k.shape[1]:
        got = (tuple(weight.shape), tuple(freqs.shape))
        raise ShapeError("key_store: weight, freqs", want=f"[{k.shape[1]}], at most [{k.shape[1] // 2}]", got=got)
    run = backends.pick("key_store", k, weight) or key_store_reference
    run(k, rows, ratio, weight, eps, freqs, paged, ids)
