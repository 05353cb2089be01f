"""The routed experts. Source: model specification, sections 2.12 and 6.2.

T rows, k experts a row, E experts, D hidden width, I expert width.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, gemm, quant, swiglu
from benthic.types import Numerics


def experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: quant.Matrix,
    w2: quant.Matrix,
    limit: float,
    quantise: bool,
    round_hidden: bool,
    one_scale: bool = False,
) -> Tensor:
    x = quant.roundtrip_carry(x) if one_scale else x
    k = ids.shape[1]
    chosen, order = torch.sort(ids.flatten(), stable=True)  # pairs (row, slot), grouped by expert
    counts = torch.bincount(chosen, minlength=w13.shape[0]).tolist()
    rows = x[order // k]  # [T*k, D]
    pair_weights = weights.flatten()[order]
    hidden_dtype = x.dtype if round_hidden else torch.float32
    outputs: list[Tensor] = []
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        here = slice(start, start + count)
        gate, up = gemm.linear(rows[here], _expert(w13, expert, one_scale, x.dtype)).chunk(2, dim=-1)
        y = swiglu.swiglu(gate, up, limit, pair_weights[here], hidden_dtype)
        y = quant.roundtrip_fp8(y) if quantise else y
        y = quant.roundtrip_carry(y) if one_scale else y
        outputs.append(gemm.linear(y.to(x.dtype), _expert(w2, expert, one_scale, x.dtype)))
        start += count
    if not outputs:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    parts = torch.cat(outputs)[back].unflatten(0, (-1, k)).float()  # [T, k, D]
    total = parts[:, 0]
    for slot in range(1, k):
        total = total + parts[:, slot]
    return total


def _expert(weight: quant.Matrix, expert: int, one_scale: bool, dtype: torch.dtype) -> Tensor:
    """The values of one expert's matrix."""
    if not isinstance(weight, Tensor):
        weight = quant.values(type(weight)(*(part[expert] for part in weight)), dtype)
    else:
        weight = weight[expert]
    return quant.roundtrip_carry(weight) if one_scale else weight


def prepare(w13: quant.Fp4Matrix, w2: quant.Fp4Matrix, numerics: Numerics) -> tuple[Any, Any]:
    """Expert weights as the `experts` of their device reads them fastest, which is that backend's own form.

    Called once, when weights are loaded; the arguments may then go. Where no backend has another form, they come back.
    Whatever comes back has the `shape` of the values, goes into `experts` and `fused.moe`, and nowhere else.
    """
    run = backends.pick("experts", w13.codes)
    own = None if run is None else getattr(import_module(run.__module__), "prepare", None)
    return (w13, w2) if own is None else own(w13, w2, numerics)


def unprepare(w13: quant.Matrix | Any, w2: quant.Matrix | Any, expert: int) -> tuple[Tensor, Tensor] | None:
    """The values of one expert, [2*I, D] and [D, I], in whatever form `prepare` left them; a check of what was loaded.

    None: the backend cannot read its own form back.
    """
    if isinstance(w13, Tensor | quant.Fp4Matrix):
        return _expert(w13, expert, False, torch.bfloat16), _expert(w2, expert, False, torch.bfloat16)
    owner = type(w13).__module__.rpartition(".")[0]
    own = getattr(import_module(f"{owner}.moe_experts"), "unprepare", None)
    return None if own is None else own(w13, w2, expert)


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
    """Sum over each row's experts of w2 @ (swiglu(w13 @ x) * routing weight).

    x             [T, D] bf16 or f32, already on the FP8 grid when `quantise`. T may be 0.
    ids, weights  [T, k] int64 in 0 .. E-1, and f32.
    w13           [E, 2*I, D] gate rows, then up rows; w2 [E, D, I]; in the dtype of x, on their own grids, or packed.
    limit         clamp of the activation; <= 0: none.
    quantise      the weighted activation goes onto the FP8 grid before w2.
    round_hidden  it is rounded to the dtype of x before that.
    one_scale     activations and weight rows are carried by one power-of-two scale each (`quant.carry`).
    returns       [T, D] f32, summed in f32 in the order of the k slots; each expert's output rounded to the dtype of x.
    Error         one rounding of an expert's output, per slot, against the reference; more only where a value sits on a
                  boundary of the FP8 grid.
    Cost          6*T*k*D*I FLOP; reads the weights of every expert that is hit once.
    Raises        ShapeError.
    """
    if x.ndim != 2 or ids.ndim != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        got = (tuple(x.shape), tuple(ids.shape), tuple(weights.shape))
        raise ShapeError("experts: x, ids, weights", want="[T, D], [T, k], [T, k]", got=got)
    width = x.shape[1]
    if len(w13.shape) != 3 or w13.shape[1] % 2 or w13.shape[2] != width:
        raise ShapeError("experts: w13", want=f"[E, 2*I, {width}]", got=tuple(w13.shape))
    if w2.shape != (w13.shape[0], width, w13.shape[1] // 2):
        raise ShapeError("experts: w2", want=(w13.shape[0], width, w13.shape[1] // 2), got=tuple(w2.shape))
    plain = [w for w in (w13, w2) if isinstance(w, Tensor)]
    run = backends.pick("experts", x, weights, *plain) or experts_reference
    return run(x, ids, weights, w13, w2, limit, quantise, round_hidden, one_scale)
