"""Choice by score: exact against the reference, with ties everywhere."""

import pytest
import torch
from torch import Tensor

from benthic.kernels import indexer, kv_copy
from benthic.kernels.native import indexer as native
from benthic.kernels.native import kv_copy as native_kv


def keys_of(values: Tensor) -> kv_copy.Paged:
    blocks = -(-values.shape[0] // 64) + 1
    keys = kv_copy.Paged(torch.full((blocks, 64 * 70), 0xFF, dtype=torch.uint8), 32, 32 + 64 * 64, 64, 128, "mxfp4")
    native_kv.write_records(keys, torch.arange(values.shape[0]) + 64, values)
    return keys


@pytest.mark.parametrize("heads", [1, 8, 12, 32])
@pytest.mark.parametrize("round_scores", [True, False])
@pytest.mark.parametrize("level", ["random", "few levels", "all zero", "negative"])
def test_choice(heads: int, round_scores: bool, level: str) -> None:
    generator = torch.Generator().manual_seed(heads)
    entries = 300
    values = torch.zeros(entries, 128)
    q = torch.zeros(9, heads, 128, dtype=torch.bfloat16)
    w = torch.rand(9, heads, generator=generator).bfloat16() + 0.5
    if level == "random":
        values = torch.randn(entries, 128, generator=generator)
        q = torch.randn(9, heads, 128, generator=generator).bfloat16()
    else:
        values[:, 0] = torch.randint(0, 3, (entries,), generator=generator).float()
        q[:, :, 0] = 0.0 if level == "all zero" else 1.0
        w = torch.full_like(w, -1.0 if level == "negative" else 1.0)
    keys = keys_of(values.bfloat16())
    tables = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 0], [1, 0, 0, 0, 0]])
    starts = (0, 7, 8, 9)
    visible = torch.tensor([0, 1, 17, 40, 129, 299, 300, 255, 33])
    arguments = (q, w, keys, tables, starts, visible, 17, round_scores)
    got, got_blocks = native.index_select(*arguments, emit=6)
    want, want_blocks = indexer.index_select_reference(*arguments, emit=6)
    assert got_blocks is not None
    assert want_blocks is not None
    same = 1.0 if level != "random" else 0.99  # order of the sums may move a score over a rounding boundary
    assert (got == want).float().mean() >= same
    assert (got_blocks == want_blocks).float().mean() >= same
    got, none = native.index_select(*arguments, restrict=want_blocks)
    want, _ = indexer.index_select_reference(*arguments, restrict=want_blocks)
    assert none is None
    assert (got == want).float().mean() >= same


def test_all_of_them_when_few() -> None:
    """No scores are needed, so not even unwritten keys can change the answer."""
    keys = keys_of(torch.zeros(0, 128))
    q, w = torch.full((2, 8, 128), torch.nan, dtype=torch.bfloat16), torch.ones(2, 8)
    visible = torch.tensor([3, 0])
    entries, blocks = native.index_select(q, w, keys, torch.zeros(1, 1).long(), (0, 2), visible, 4, True, emit=2)
    assert entries.tolist() == [[0, 1, 2, -1], [-1] * 4]
    assert blocks is not None
    assert blocks.tolist() == [[0, -1], [-1, -1]]
