"""C version of `kernels/moe_experts.py`; the contract is there.

The float profile, packed weights and one scale a row take the reference.
"""

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import moe_experts as plain
from benthic.kernels import quant
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_experts = build.function("benthic_experts", "pppppplllllfiii", build.INT)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: quant.Matrix,
    w2: quant.Matrix,
    limit: float,
    quantise: bool,
    round_hidden: bool = True,
    one_scale: bool = False,
) -> Tensor:
    if one_scale or not isinstance(w13, Tensor) or not isinstance(w2, Tensor):
        return plain.experts_reference(x, ids, weights, w13, w2, limit, quantise, round_hidden, one_scale)
    rows, width = x.shape
    count, inner, k = w13.shape[0], w2.shape[2], ids.shape[1]
    plain_bf16 = all(t.dtype is build.BF16 and t.is_contiguous() for t in (w13, w2)) and x.dtype is build.BF16
    # an expert's hidden row is bfloat16 here: unrounded it would have to be on the grid
    if not plain_bf16 or width % 32 or inner % 32 or width < 16 or k == 0 or not (quantise or round_hidden):
        return plain.experts_reference(x, ids, weights, w13, w2, limit, quantise, round_hidden)
    x, ids, weights = x.contiguous(), ids.long().contiguous(), weights.float().contiguous()
    out = torch.empty((rows, width), dtype=torch.float32)
    if rows == 0:
        return out
    code = _experts(
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        w13.data_ptr(),
        w2.data_ptr(),
        out.data_ptr(),
        rows,
        k,
        count,
        width,
        inner,
        limit,
        quantise,
        round_hidden,
        build.threads(),
    )
    if code == 2:
        raise ShapeError("experts: ids", want=f"0 to {count - 1}", got=(int(ids.min()), int(ids.max())))
    build.check(code)
    return out
