"""C versions of `kernels/fused.py`; the contracts are there. Shapes that fill no vector, packed weights and one
scale a row are declined with None."""

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import hyper, quant
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_hyper_read = build.function("benthic_hyper_read", "pppppppppp" + "lllffiii", build.INT)
_inputs = build.function("benthic_attention_inputs", "ppppppppppp" + "llllllfi", build.INT)
_output = build.function("benthic_attention_output", "pppppp" + "lllllllii", build.INT)
_moe = build.function("benthic_moe", "pipplpppppllllliffiii", build.INT)


def hyper_read(
    pending: hyper.Streams,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, hyper.Streams] | None:
    rows, streams, width = pending.s.shape
    pre = pending.pre
    wide = build.wide(pending.s)
    if wide is None or streams not in (4, 8) or width % 16 or not pending.s.is_contiguous():
        return None
    if not (_f32(pre) and _f32(fn) and _f32(scale) and _f32(base) and _f32(weight)):
        return None
    s = hyper.settle(pending)
    h = torch.empty((rows, width), dtype=s.dtype)
    # one allocation for the three small results
    room = torch.empty(rows * streams * (2 + streams))
    next_pre, post, comb = room.split([rows * streams, rows * streams, rows * streams * streams])
    at = room.data_ptr()
    size = 4 * rows * streams
    build.check(
        _hyper_read(
            s.data_ptr(),
            pre.data_ptr(),
            fn.data_ptr(),
            scale.data_ptr(),
            base.data_ptr(),
            weight.data_ptr(),
            h.data_ptr(),
            at,
            at + size,
            at + 2 * size,
            rows,
            streams,
            width,
            norm_eps,
            hc_eps,
            iters,
            wide,
            build.threads(),
        )
    )
    shape = (rows, streams)
    return h, hyper.Streams(s, next_pre.view(shape), None, post.view(shape), comb.view(*shape, streams))


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
    if one_scale or not isinstance(wqkv_a, Tensor) or not isinstance(wq_b, Tensor):
        return None
    rows, width = h.shape
    rank, inner, channels, pairs = q_norm.shape[0], wq_b.shape[0], kv_norm.shape[0], freqs.shape[0]
    wq_a, wkv = wqkv_a[:rank], wqkv_a[rank:]
    if width % 32 or rank % 32 or channels % 32 or inner % channels or pairs % 8 or pairs > 128:
        return None
    if not (_bf16(h) and _bf16(wq_a) and _bf16(wq_b) and _bf16(wkv)):
        return None
    if not (_f32(freqs) and _f32(q_norm) and _f32(kv_norm) and _int64(positions)):
        return None
    q = torch.empty((rows, inner), dtype=h.dtype)
    qa = torch.empty((rows, rank), dtype=h.dtype)
    kw = torch.empty((rows, channels), dtype=h.dtype)
    build.check(
        _inputs(
            h.data_ptr(),
            positions.data_ptr(),
            freqs.data_ptr(),
            wq_a.data_ptr(),
            q_norm.data_ptr(),
            wq_b.data_ptr(),
            wkv.data_ptr(),
            kv_norm.data_ptr(),
            q.data_ptr(),
            qa.data_ptr(),
            kw.data_ptr(),
            rows,
            width,
            rank,
            inner // channels,
            channels,
            pairs,
            eps,
            build.threads(),
        )
    )
    return q, qa, kw


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
    if one_scale or not isinstance(wo_a, Tensor) or not isinstance(wo_b, Tensor):
        return None
    rows, heads, channels = o.shape
    rank, width, pairs = wo_a.shape[0] // groups, wo_b.shape[0], freqs.shape[0]
    if channels % 32 or rank % 32 or width < 16 or pairs % 8 or pairs > 128 or heads % groups:
        return None
    if not (_bf16(o) and _bf16(wo_a) and _bf16(wo_b) and _f32(freqs) and _int64(positions)):
        return None
    y = torch.empty((rows, width), dtype=o.dtype)
    build.check(
        _output(
            o.data_ptr(),
            positions.data_ptr(),
            freqs.data_ptr(),
            wo_a.data_ptr(),
            wo_b.data_ptr(),
            y.data_ptr(),
            rows,
            heads,
            channels,
            pairs,
            groups,
            rank,
            width,
            quantise_wo_a,
            build.threads(),
        )
    )
    return y


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
    if one_scale or not (isinstance(w13, Tensor) and isinstance(w2, Tensor)):
        return None
    if not (isinstance(shared_w13, Tensor) and isinstance(shared_w2, Tensor)):
        return None
    rows, width = h.shape
    experts, inner = gate.shape[0], w2.shape[2]
    if width % 32 or inner % 32 or shared_w13.shape[0] != 2 * inner:
        return None
    if not (_bf16(h) and _bf16(w13) and _bf16(w2) and _bf16(shared_w13) and _bf16(shared_w2)):
        return None
    if not ((_f32(gate) or _bf16(gate)) and _f32(bias)):
        return None
    y = torch.empty((rows, width), dtype=h.dtype)
    code = _moe(
        h.data_ptr(),
        int(gate.dtype is torch.float32),
        gate.data_ptr(),
        bias.data_ptr(),
        0 if bias.ndim == 1 else experts,
        w13.data_ptr(),
        w2.data_ptr(),
        shared_w13.data_ptr(),
        shared_w2.data_ptr(),
        y.data_ptr(),
        rows,
        k,
        experts,
        width,
        inner,
        normalise,
        scale,
        limit,
        1,
        round_hidden,
        build.threads(),
    )
    if code == 2:
        raise ShapeError(
            "moe: router", want=f"experts 0 to {experts - 1}", got="others, from scores that are no numbers"
        )
    build.check(code)
    return y


def _bf16(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and x.is_contiguous()


def _f32(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()


def _int64(x: Tensor) -> bool:
    return x.dtype is torch.int64 and x.is_contiguous()
