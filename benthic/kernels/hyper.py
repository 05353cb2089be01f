"""Hyper-connections on a manifold: how a sublayer reads and writes the residual streams, and how streams exchange.

Source: model specification, section 2.2. T rows, S streams, D hidden width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends


def _want_streams(op: str, s: Tensor) -> None:
    if s.ndim != 3:
        raise ShapeError(f"{op}: s", want="[T, S, D]", got=tuple(s.shape))


def sinkhorn(a: Tensor, eps: float, iters: int) -> Tensor:
    """Logits [..., S_in, S_out] f32 -> nearly doubly stochastic; the last step makes the sums over S_in one."""
    c = torch.softmax(a, dim=-1) + eps
    c = c / (c.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(dim=-1, keepdim=True) + eps)
        c = c / (c.sum(dim=-2, keepdim=True) + eps)
    return c


def hyper_mixes_reference(
    s: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    streams = s.shape[1]
    v = s.flatten(1).float()
    z = (v @ fn.float().t()) * torch.rsqrt(v.square().mean(dim=-1, keepdim=True) + norm_eps)
    z_pre, z_post, z_comb = z.split([streams, streams, streams * streams], dim=-1)
    b_pre, b_post, b_comb = base.split([streams, streams, streams * streams])
    pre = torch.sigmoid(z_pre * scale[0] + b_pre) + hc_eps
    post = 2 * torch.sigmoid(z_post * scale[1] + b_post)
    comb = sinkhorn((z_comb * scale[2] + b_comb).unflatten(-1, (streams, streams)), hc_eps, iters)
    return pre, post, comb


def hyper_mixes(
    s: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Read, write and exchange weights of one sublayer, from the streams at its entry.

    s         [T, S, D] bf16 or f32. One root-mean-square statistic a row, over all streams together.
    fn        [(2+S)S, S*D] f32; columns stream-major. Rows: S read, S write, S*S exchange (row-major, input first).
    scale     [3] f32, base [(2+S)S] f32.
    norm_eps  added to the mean square; hc_eps to the read weight and to every Sinkhorn sum; iters >= 1.
    returns   pre [T, S] = sigmoid + hc_eps, post [T, S] = 2 sigmoid, comb [T, S_in, S_out]; f32 throughout.
              Columns of comb (sums over S_in) are 1 up to hc_eps, rows nearly so.
    Error     1e-6 absolute against the reference at |logits| <= 10, summation order of the product only.
    Cost      2*T*S*D*(2+S)*S FLOP; reads s and fn once.
    Raises    ShapeError.
    """
    _want_streams("hyper_mixes", s)
    streams, width = s.shape[1], s.shape[1] * s.shape[2]
    mixes = (2 + streams) * streams
    if fn.shape != (mixes, width):
        raise ShapeError("hyper_mixes: fn", want=(mixes, width), got=tuple(fn.shape))
    if base.shape != (mixes,) or scale.shape != (3,):
        raise ShapeError("hyper_mixes: base, scale", want=((mixes,), (3,)), got=(tuple(base.shape), tuple(scale.shape)))
    run = backends.pick("hyper_mixes", s, fn, scale, base) or hyper_mixes_reference
    return run(s, fn, scale, base, norm_eps, hc_eps, iters)


def hyper_collapse_reference(s: Tensor, pre: Tensor) -> Tensor:
    return (pre.float().unsqueeze(1) @ s.float()).squeeze(1).to(s.dtype)


def hyper_collapse(s: Tensor, pre: Tensor) -> Tensor:
    """What a sublayer reads: sum over streams of pre[j] * s[j], in float32, rounded once.

    s        [T, S, D] bf16 or f32.
    pre      [T, S] f32.
    returns  [T, D], dtype of s.
    Error    at most 1 unit in the last place of the dtype of s against the reference.
    Cost     memory bound: reads s once.
    Raises   ShapeError.
    """
    _want_streams("hyper_collapse", s)
    if pre.shape != s.shape[:2]:
        raise ShapeError("hyper_collapse: pre", want=tuple(s.shape[:2]), got=tuple(pre.shape))
    run = backends.pick("hyper_collapse", s, pre) or hyper_collapse_reference
    return run(s, pre)


def hyper_expand_reference(out: Tensor, s: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = comb.float().transpose(1, 2) @ s.float()  # [T, S_out, D]
    return (post.float().unsqueeze(-1) * out.float().unsqueeze(1) + mixed).to(s.dtype)


def hyper_expand(out: Tensor, s: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a sublayer: s'[k] = post[k] * out + sum over j of comb[j, k] * s[j], in float32, rounded once.

    out      [T, D] the sublayer's result, bf16 or f32.
    s        [T, S, D] the streams at its entry.
    post     [T, S] f32; comb [T, S_in, S_out] f32: the sum runs over the input stream.
    returns  [T, S, D], dtype of s.
    Error    at most 1 unit in the last place of the dtype of s against the reference.
    Cost     memory bound: reads s and out once, writes s once.
    Raises   ShapeError.
    """
    _want_streams("hyper_expand", s)
    rows, streams, width = s.shape
    if out.shape != (rows, width):
        raise ShapeError("hyper_expand: out", want=(rows, width), got=tuple(out.shape))
    if post.shape != (rows, streams) or comb.shape != (rows, streams, streams):
        raise ShapeError(
            "hyper_expand: post, comb",
            want=((rows, streams), (rows, streams, streams)),
            got=(tuple(post.shape), tuple(comb.shape)),
        )
    run = backends.pick("hyper_expand", out, s, post, comb) or hyper_expand_reference
    return run(out, s, post, comb)


class Streams(NamedTuple):
    """The residual streams between two sublayers: what the last one gave may still have to be written into them."""

    s: Tensor  # [T, S, D] at the entry of the sublayer that gave `out`; as they are where nothing is pending
    pre: Tensor  # [T, S] f32, how the next sublayer reads them
    out: Tensor | None = None  # [T, D], the pending result
    post: Tensor | None = None  # [T, S] f32, how it is written
    comb: Tensor | None = None  # [T, S, S] f32, how the streams exchange meanwhile

    def at(self, rows: Tensor) -> "Streams":
        """The same of some rows."""
        s, pre, *pending = self
        rest = [None if x is None else x.index_select(0, rows) for x in pending]  # it copies whole rows, [] elements
        return Streams(s.index_select(0, rows), pre.index_select(0, rows), *rest)


def settle(streams: Streams) -> Tensor:
    """[T, S, D]: the streams with what is pending written into them."""
    if streams.out is None:
        return streams.s
    assert streams.post is not None, "a pending result without write weights"
    assert streams.comb is not None, "a pending result without exchange weights"
    return hyper_expand(streams.out, streams.s, streams.post, streams.comb)
