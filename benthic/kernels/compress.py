"""Pooling of neighbouring tokens into one compressed entry. Source: model specification, section 2.6."""

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends


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
