"""Runs of ops under one name, for a backend that gains by taking them together: on a CPU a call costs as much as the
arithmetic of one token.

Each function returns None where nothing serves it. The caller then takes the steps one by one, and those steps are the
reference: the result has the same bits as the same backend's single ops. They serve the quantised profiles only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from benthic.kernels import backends, hyper, quant

_apart: ContextVar[bool] = ContextVar("apart", default=False)


@contextmanager
def apart(on: bool = True) -> Iterator[None]:
    """Inside this block nothing is taken together: each op is called by itself, for whoever watches or replaces one."""
    token = _apart.set(on)
    try:
        yield
    finally:
        _apart.reset(token)


def _pick(op: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    return None if _apart.get() else backends.pick(op, *tensors)


def hyper_read(
    streams: hyper.Streams,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, hyper.Streams] | None:
    """Entry of a sublayer: `settle`, `hyper_mixes`, `rms_norm` of `hyper_collapse` by the weights of the one before.

    streams   with what the last sublayer gave still pending, or settled.
    others    as `hyper_mixes`; weight [D] f32 of the norm, whose eps is norm_eps too.
    returns   h [T, D]; the settled streams, with this sublayer's weights and nothing pending yet.
    """
    run = _pick("hyper_read", streams.s, streams.pre, fn, scale, base, weight, streams.out)
    return None if run is None else run(streams, fn, scale, base, weight, norm_eps, hc_eps, iters)


def attention_inputs(
    h: Tensor,
    positions: Tensor,
    freqs: Tensor,
    wqkv_a: quant.Matrix,
    q_norm: Tensor,
    wq_b: quant.Matrix,
    kv_norm: Tensor,
    eps: float,
    one_scale: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What attention needs of its input. Section 2.5; every input of a product goes onto the FP8 grid.

    h          [T, D] bf16; positions [T] int64; freqs [dr/2] f32.
    wqkv_a     [R + dh, D], the rows of wq_a, then those of wkv; wq_b [H*dh, R]; q_norm [R], kv_norm [dh] f32.
    one_scale  inputs of products are carried by one scale a row (`quant.carry`).
    returns    q [T, H*dh] rotated head by head; qa [T, R] on the FP8 grid; kw [T, dh] rotated, on the FP8 grid.
    """
    run = _pick("attention_inputs", h, freqs, *_tensors(wqkv_a, wq_b), q_norm, kv_norm)
    return None if run is None else run(h, positions, freqs, wqkv_a, q_norm, wq_b, kv_norm, eps, one_scale)


def attention_output(
    o: Tensor,
    positions: Tensor,
    freqs: Tensor,
    wo_a: quant.Matrix,
    wo_b: quant.Matrix,
    groups: int,
    quantise_wo_a: bool,
    one_scale: bool,
) -> Tensor | None:
    """From what the heads found to the sublayer's result: turned back, grouped projection, output projection.

    o        [T, H, dh] bf16.
    wo_a     [G*R, H*dh/G], group after group; wo_b [D, G*R].
    returns  [T, D].
    """
    run = _pick("attention_output", o, freqs, *_tensors(wo_a, wo_b))
    return None if run is None else run(o, positions, freqs, wo_a, wo_b, groups, quantise_wo_a, one_scale)


def moe(
    h: Tensor,
    gate: Tensor,
    bias: Tensor,
    w13: quant.Matrix,
    w2: quant.Matrix,
    shared_w13: quant.Matrix,
    shared_w2: quant.Matrix,
    k: int,
    normalise: bool,
    scale: float,
    limit: float,
    round_hidden: bool,
    one_scale: bool,
) -> Tensor | None:
    """A whole mixture-of-experts sublayer: router, routed experts, shared expert, their sum. Section 2.12.

    h                      [T, D] bf16; gate [E, D] bf16 or f32; bias [E] or [T, E] f32.
    w13, w2                [E, 2*I, D], [E, D, I]; shared_w13, shared_w2 [2*I, D], [D, I].
    k, normalise, scale    as `route`; limit, round_hidden, one_scale as `experts`.
    returns                [T, D].
    """
    run = _pick("moe", h, gate, bias, *_tensors(w13, w2, shared_w13, shared_w2))
    if run is None:
        return None
    return run(h, gate, bias, w13, w2, shared_w13, shared_w2, k, normalise, scale, limit, round_hidden, one_scale)


def _tensors(*weights: quant.Matrix) -> list[Tensor]:
    """Those that could want a gradient."""
    return [weight for weight in weights if isinstance(weight, Tensor)]
