"""What the bounds of FP8 sums are derived from, simulated."""

import pytest
import torch

from benthic.kernels import quant
from benthic.testing import ops
from benthic.testing.tolerances import SUMS, regridded


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grids_in_a_row(seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    near = far = torch.randn(512, 512, generator=make)
    for grids in range(4):
        weight = torch.randn(512, 512, generator=make) / 512**0.5
        near, far = near @ weight, far @ weight
        if grids == 0:
            far = far + SUMS * torch.randn(far.shape, generator=make)
        apart = ((far - near).norm() / near.norm()).item()
        expected = regridded(SUMS, grids)
        assert 0.7 * expected < apart < 1.1 * expected, grids
        near, far = quant.roundtrip_fp8(near), quant.roundtrip_fp8(far)


def test_only_products_of_codes_under_one_scale_a_row_have_fp8_sums() -> None:
    blocks = quant.Fp8Matrix(*quant.quantise_weight_fp8(torch.randn(64, 64)))
    x = torch.randn(2, 64)
    assert ops._fp8("linear", (x, quant.by_row(blocks)))
    assert not ops._fp8("linear", (x, blocks))
    assert not ops._fp8("rotate", (x, x))
    assert ops._rule("linear", (x, quant.by_row(blocks)), True)[0] == "linear_fp8"
    assert ops._rule("linear", (x, quant.by_row(blocks)), False)[0] == "linear"
