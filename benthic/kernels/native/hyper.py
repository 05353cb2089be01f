"""C versions of `kernels/hyper.py`; the contracts are there. Other than 4 or 8 streams take the reference."""

import torch
from torch import Tensor

from benthic.kernels import hyper as plain
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_mixes = build.function("benthic_hyper_mixes", "ppppppplllffiii", build.INT)
_collapse = build.function("benthic_hyper_collapse", "ppplllii")
_expand = build.function("benthic_hyper_expand", "pppppllliii")


def hyper_mixes(
    s: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, streams, width = s.shape
    wide = build.wide(s)
    if wide is None or streams not in (4, 8) or width % 16 or not all(_plain_f32(x) for x in (fn, scale, base)):
        return plain.hyper_mixes_reference(s, fn, scale, base, norm_eps, hc_eps, iters)
    s = s.contiguous()
    pre, post = torch.empty(rows, streams), torch.empty(rows, streams)
    comb = torch.empty(rows, streams, streams)
    build.check(
        _mixes(
            s.data_ptr(),
            fn.data_ptr(),
            scale.data_ptr(),
            base.data_ptr(),
            pre.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
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
    return pre, post, comb


def hyper_collapse(s: Tensor, pre: Tensor) -> Tensor:
    rows, streams, width = s.shape
    wide = build.wide(s)
    if wide is None or streams > 8 or width % 16:
        return plain.hyper_collapse_reference(s, pre)
    s, pre = s.contiguous(), pre.float().contiguous()
    out = torch.empty((rows, width), dtype=s.dtype)
    _collapse(s.data_ptr(), pre.data_ptr(), out.data_ptr(), rows, streams, width, wide, build.threads())
    return out


def hyper_expand(out: Tensor, s: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    rows, streams, width = s.shape
    wide, wide_out = build.wide(s), build.wide(out)
    if wide is None or wide_out is None or streams > 8 or width % 16:
        return plain.hyper_expand_reference(out, s, post, comb)
    out, s, post, comb = out.contiguous(), s.contiguous(), post.float().contiguous(), comb.float().contiguous()
    result = torch.empty(s.shape, dtype=s.dtype)
    _expand(
        out.data_ptr(),
        s.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
        result.data_ptr(),
        rows,
        streams,
        width,
        wide,
        wide_out,
        build.threads(),
    )
    return result


def _plain_f32(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()
