"""C version of `kernels/attn_sparse.py`; the contract is there. Rows in float32 take the reference."""

import torch
from torch import Tensor

from benthic.kernels import attn_sparse as plain
from benthic.kernels import kv_copy
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available
from benthic.kernels.native.quant import FORMATS

_attention = build.function("benthic_sink_attention", "pppppllliplpplllfii", build.INT)


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
    total, heads, width = q.shape
    if (
        q.dtype is not build.BF16
        or rows.dtype is not build.BF16
        or width % 64
        or width > 1024
        or isinstance(paged, Tensor)
        or (paged is not None and paged.format not in ("fp8", "nvfp4"))
    ):
        return plain.sink_attention_reference(q, rows, begin, count, paged, records, sink, scale, round_probs)
    q, rows, sink = q.contiguous(), rows.contiguous(), sink.float().contiguous()
    begin, count = begin.long().contiguous(), count.long().contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    pool, stride, offset, entries, form, listed, num_listed = 0, 0, 0, 1, 0, 0, 0
    if paged is not None and records is not None:
        records = records.long().contiguous()
        pool, stride, offset, entries = paged.pool.data_ptr(), paged.pool.stride(0), paged.data_offset, paged.entries
        form, listed, num_listed = FORMATS[paged.format], records.data_ptr(), records.shape[1]
    build.check(
        _attention(
            q.data_ptr(),
            rows.data_ptr(),
            begin.data_ptr(),
            count.data_ptr(),
            pool,
            stride,
            offset,
            entries,
            form,
            listed,
            num_listed,
            sink.data_ptr(),
            out.data_ptr(),
            total,
            heads,
            width,
            scale,
            round_probs,
            build.threads(),
        )
    )
    return out
