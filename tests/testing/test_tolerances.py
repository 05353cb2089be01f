"""What the bounds of FP8 sums are derived from, simulated."""

import pytest
import torch

from benthic.kernels import engram, quant
from benthic.testing import ops
from benthic.testing.tolerances import MOVED_RMS, SUMS, excess, regridded


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


@pytest.mark.parametrize("inner", [64, 2304])
def test_experts_whose_first_sums_are_off(inner: int) -> None:
    """One value's next code may be much of a short row; all rows together stay within the bound of moved codes."""
    make = torch.Generator().manual_seed(inner)
    gate, up, off = torch.randn(3, 4096, inner, generator=make)
    weight = torch.randn(inner, 256, generator=make) / inner**0.5

    def rows(times: float) -> torch.Tensor:
        hidden = torch.nn.functional.silu(gate + times * SUMS * off) * (up + times * SUMS * off.flip(0))
        return quant.roundtrip_fp8(hidden.bfloat16().float()) @ weight

    want, got = rows(0), rows(1)
    assert 0.3 * MOVED_RMS < (got - want).norm() / want.norm() < MOVED_RMS
    assert (rows(15) - want).norm() / want.norm() > MOVED_RMS  # as where sums stay in the matrix unit
    assert excess("experts_fp8", got, want, ops.largest(want)) <= 2


def test_only_products_of_codes_under_one_scale_a_row_have_fp8_sums() -> None:
    blocks = quant.Fp8Matrix(*quant.quantise_weight_fp8(torch.randn(64, 64)))
    x = torch.randn(2, 64)
    assert ops._fp8("linear", (x, quant.by_row(blocks)))
    assert not ops._fp8("linear", (x, blocks))
    assert not ops._fp8("rotate", (x, x))
    assert ops._rule("linear", (x, quant.by_row(blocks)), True)[0] == "linear_fp8"
    assert ops._rule("linear", (x, quant.by_row(blocks)), False)[0] == "linear"


def test_a_gate_whose_dot_is_next_to_nothing() -> None:
    """Another order of the dot's sum moves the gate by much there, and is no fault; the other sign elsewhere is one."""
    make = torch.Generator().manual_seed(0)
    s, keys = torch.randn(2, 4000, 1, 96, generator=make).unbind(0)
    value, weight = torch.randn(4000, 96, generator=make), torch.ones(1, 96)
    dot = (s * keys).sum(dim=-1, keepdim=True)
    near = torch.logspace(-9, -2, 4000)[:, None, None] * keys.norm(dim=-1, keepdim=True)
    s = s + (near - dot) * keys / keys.square().sum(dim=-1, keepdim=True)  # dots from 1e-9 up
    args = (s, keys, value, weight, 1e-6)
    order = torch.randperm(96, generator=make)
    want = engram.engram_gate_reference(*args)
    mixed = engram.engram_gate_reference(s[..., order], keys[..., order], value[:, order], weight[:, order], 1e-6)
    got = torch.empty_like(mixed)
    got[..., order] = mixed
    assert excess("engram_gate", got, want.double(), ops.largest(want)) > 2  # by the size of the result alone
    (found,) = ops.findings("engram_gate", args, args, args, want, got)
    assert found.error < 1
    turned = engram.engram_gate_reference(-s, keys, value, weight, 1e-6) + 2 * s
    far = slice(2000, None)  # the larger dots
    args = (s[far], keys[far], value[far], weight, 1e-6)
    (found,) = ops.findings("engram_gate", args, args, args, want[far], turned[far])
    assert found.error > 2
