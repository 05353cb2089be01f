"""Attention over packed records against the plain version: several groups of 64, maxima that move, padding."""

import pytest
import torch
from torch import Tensor

from benthic.kernels import kv_copy
from benthic.kernels.attn_sparse import sink_attention_reference
from benthic.kernels.native import attn_sparse
from benthic.kernels.native import kv_copy as native_kv
from benthic.testing.tolerances import assert_close


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("round_probs", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])  # from 16 rows on, records are unpacked together
@pytest.mark.parametrize(
    ("heads", "width", "form", "window", "listed"),
    [
        (16, 128, "nvfp4", 64, 64),
        (16, 128, "nvfp4", 65, 129),
        (8, 512, "nvfp4", 128, 200),
        (5, 64, "fp8", 130, 1),
        (33, 128, "fp8", 1, 65),
        (4, 128, "nvfp4", 150, 0),
    ],
)
@pytest.mark.parametrize("size", [1.0, 6.0])  # at 6 a softmax is nearly one-hot, and maxima move from group to group
def test_against_the_reference(
    heads: int, width: int, form: str, window: int, listed: int, rows: int, round_probs: bool, size: float
) -> None:
    q = (draw(rows, heads, width, seed=1) * size).bfloat16()
    table = draw(rows + window, width, seed=2).bfloat16()
    begin = torch.arange(rows)
    count = (torch.arange(rows) * 7 + window).clamp(max=window)
    count[0] = max(window - 70, 0)
    paged, records = None, None
    if listed:
        paged = kv_copy.Paged(torch.full((8, 64 * 600), 0xFF, dtype=torch.uint8), 96, 0, 64, width, form)
        native_kv.write_records(paged, torch.arange(8 * 64), draw(8 * 64, width, seed=3))
        generator = torch.Generator().manual_seed(4)
        records = torch.stack([torch.randperm(512, generator=generator)[:listed].sort().values for _ in range(rows)])
        records[-1, listed // 2 :] = -1
    sink = draw(heads, seed=5)
    arguments = (q, table, begin, count, paged, records, sink, width**-0.5, round_probs)
    got = attn_sparse.sink_attention(*arguments)
    want = sink_attention_reference(q.float(), table.float(), *arguments[2:])  # not rounded at the end
    assert got.dtype == torch.bfloat16
    name = "sink_attention_rounded" if round_probs else "sink_attention"
    assert_close(name, got, want, float(table.float().abs().max()))
    assert (got != want.bfloat16()).float().mean() < 0.1


def test_nothing_is_read_behind_the_window() -> None:
    """Rows outside a window, and records nobody lists, may hold NaN."""
    table = torch.full((10, 128), torch.nan).bfloat16()
    table[3:5] = 1.0
    q = torch.ones(1, 4, 128).bfloat16()
    arguments = (torch.tensor([3]), torch.tensor([2]), None, None, torch.full((4,), -torch.inf), 0.1, True)
    assert attn_sparse.sink_attention(q, table, *arguments).eq(1).all()
    # the sink takes its share: two rows of equal score s against exp(sink) = 2 exp(s)
    level = torch.full((4,), 128 * 0.1 + torch.log(torch.tensor(2.0)).item())
    arguments = (torch.tensor([3]), torch.tensor([2]), None, None, level, 0.1, True)
    assert attn_sparse.sink_attention(q, table, *arguments).float().sub(0.5).abs().max() < 0.01
