"""C version of `index_select` of `kernels/indexer.py`; the contract is there. Scores stay 16 bits wide throughout.

Keys other than packed MXFP4, and queries in float32, take the reference.
"""

import ctypes
from itertools import pairwise

import torch
from torch import Tensor

from benthic.kernels import indexer as plain
from benthic.kernels import kv_copy
from benthic.kernels.native import build
from benthic.kernels.native.build import available as available

_select = build.function("benthic_index_select", "ppplllllplplplliplppllli", build.INT)


def index_select(
    q: Tensor,
    w: Tensor,
    keys: kv_copy.Paged,
    tables: Tensor,
    starts: tuple[int, ...],
    visible: Tensor,
    topk: int,
    round_scores: bool,
    restrict: Tensor | None = None,
    emit: int = 0,
    block_size: int = 8,
) -> tuple[Tensor, Tensor | None]:
    rows, heads, width = q.shape
    if (
        q.dtype is not build.BF16
        or keys.format != "mxfp4"
        or width % 128
        or width > 512
        or (restrict is not None and emit)
    ):
        return plain.index_select_reference(
            q, w, keys, tables, starts, visible, topk, round_scores, restrict, emit, block_size
        )
    q, w = q.contiguous(), w.float().contiguous()
    tables, visible = tables.long().contiguous(), visible.long().contiguous()
    entries = torch.empty((rows, topk), dtype=torch.int32)
    emitted = torch.empty((rows, emit), dtype=torch.int32) if emit else None
    if rows == 0:
        return entries, emitted
    if restrict is not None:
        restrict = restrict.int().contiguous()
    flat = [x for start, end in pairwise(starts) for x in (start, end - start)]
    chunks = (ctypes.c_int64 * len(flat))(*flat)
    build.check(
        _select(
            q.data_ptr(),
            w.data_ptr(),
            keys.pool.data_ptr(),
            keys.pool.stride(0),
            keys.data_offset,
            keys.scale_offset,
            keys.entries,
            width,
            tables.data_ptr(),
            tables.shape[1],
            ctypes.addressof(chunks),
            len(starts) - 1,
            visible.data_ptr(),
            heads,
            topk,
            round_scores,
            None if restrict is None else restrict.data_ptr(),
            0 if restrict is None else restrict.shape[1],
            entries.data_ptr(),
            None if emitted is None else emitted.data_ptr(),
            emit,
            block_size,
            int(visible.max()),
            build.threads(),
        )
    )
    return entries, emitted
