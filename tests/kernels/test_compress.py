"""Pooling of groups against golden vectors and float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benthic.errors import ShapeError
from benthic.kernels import kv_copy, norm, rope
from benthic.kernels.compress import compress_store, key_store, pool_groups
from benthic.testing.cases import ROWS
from benthic.testing.tolerances import assert_close


def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device) -> None:
    data = golden("compress")
    a, b = (torch.tensor(data[name], device=device) for name in ("a", "b"))
    assert_close("pool_groups", pool_groups(a, b), torch.tensor(data["y"], dtype=torch.float64), 100.0)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e-8])
@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("groups", [r.rows for r in ROWS])
def test_shapes(device: torch.device, groups: int, ratio: int, size: float) -> None:
    a, b = (torch.randn(groups, ratio, 66, device=device)[..., 1:65] for _ in range(2))
    a, b = a * size, b * 5
    weights = b.double().exp() / b.double().exp().sum(1, keepdim=True)
    y = pool_groups(a, b)
    assert y.dtype == torch.float32
    assert_close("pool_groups", y, (weights * a.double()).sum(1), 5 * size)


def test_each_channel_has_its_own_weights(device: torch.device) -> None:
    a = torch.tensor([[[1.0, 1.0], [5.0, 5.0]]], device=device)
    b = torch.tensor([[[90.0, -90.0], [-90.0, 90.0]]], device=device)
    assert pool_groups(a, b).tolist() == [[1.0, 5.0]]


def test_one_token_passes_unchanged(device: torch.device) -> None:
    a = torch.randn(5, 1, 32, device=device)
    assert torch.equal(pool_groups(a, 100 * torch.randn_like(a)), a[:, 0])


# ---- stored entries --------------------------------------------------------------------------------------------------

ENTRIES = 8  # records a block
CHUNKS = ((0, 5), (3, 1), (8, 2), (6, 4))  # (first position, rows); then two rows of padding


def step(ratio: int, device: torch.device) -> tuple[kv_copy.Rows, torch.Tensor]:
    """Rows of CHUNKS, and the records of the groups that end: those of chunk c are in block c."""
    where = [(c + 1, first + i, first, i) for c, (first, n) in enumerate(CHUNKS) for i in range(n)]
    where += [(0, 0, 0, 0)] * 2
    slots, positions, firsts, at = torch.tensor(where, device=device).unbind(1)
    starts = torch.arange(len(where), device=device) - at
    ends = (slots > 0) & ((positions + 1) % ratio == 0)
    records = torch.where(ends, slots * ENTRIES + positions // ratio % ENTRIES, -1)
    return kv_copy.Rows(slots, positions, firsts, starts), records


def store(form: str, channels: int, device: torch.device) -> kv_copy.Paged:
    data, scale = kv_copy.data_bytes(channels, form), kv_copy.scale_bytes(channels, form)
    block = 32 + ENTRIES * (data + scale) + 32
    pool = torch.full((len(CHUNKS) + 1, block), 0xFF, dtype=torch.uint8, device=device)
    return kv_copy.Paged(pool, 32, 32 + ENTRIES * data, ENTRIES, channels, form)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize(("form", "dtype"), [("nvfp4", torch.bfloat16), ("f32", torch.float32)])
@pytest.mark.parametrize("width", [128, 96])
def test_store_is_its_steps(device: torch.device, width: int, form: str, dtype: torch.dtype, ratio: int) -> None:
    rows, records = step(ratio, device)
    count = records.shape[0]
    products = torch.randn(count, 2 * width, device=device)
    a, b = products.split(width, dim=1)
    carry = torch.randn(len(CHUNKS) + 1, ratio + 3, 2, width, device=device)
    weight, freqs = 1 + 0.1 * torch.randn(width, device=device), rope.rope_frequencies(32, 10000.0).to(device)
    got, want = store(form, width, device), store(form, width, device)
    before = carry.clone()
    if ratio == 1:
        pooled = a.to(dtype)
        latent = compress_store(pooled, None, None, rows, 1, weight, 1e-20, freqs, got, records, dtype)
    else:
        latent = compress_store(a, b, carry, rows, ratio, weight, 1e-20, freqs, got, records, dtype)
        pooled = pool_groups(*kv_copy.close_groups(a, b, before, rows, ratio)).to(dtype)
        assert torch.equal(carry[1:], before[1:])  # padding rows share slot 0 and leave any of theirs there
    ends = records >= 0
    assert latent.dtype == dtype
    # the pooled row may round to the next value of its dtype, and then the latent is two roundings away
    exact = norm.rms_norm_reference(pooled[ends].double(), weight.double(), 1e-20)
    assert_close("rms_norm", latent[ends], exact, 1.0)
    at = (rows.positions + 1 - ratio).clamp(min=0)
    kv_copy.write_records(want, records, rope.rotate(latent, at, freqs))
    if form == "f32":  # sines of another instruction order
        found, meant = (kv_copy.read_records(x, records[ends]) for x in (got, want))
        assert_close("rotate", found, meant.double(), 4.0)
        assert (got.pool[0] == 0xFF).all()
    else:
        assert torch.equal(got.pool, want.pool)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("form", "dtype"), [("mxfp4", torch.bfloat16), ("f32", torch.float32)])
def test_key_store_is_its_steps(device: torch.device, form: str, dtype: torch.dtype, ratio: int) -> None:
    rows, records = step(ratio, device)
    k = torch.randn(records.shape[0], 64, device=device).to(dtype)
    weight, freqs = 1 + 0.1 * torch.randn(64, device=device), rope.rope_frequencies(64, 10000.0).to(device)
    got, want = store(form, 64, device), store(form, 64, device)
    key_store(k, rows, ratio, weight, 1e-20, freqs, got, records)
    at = (rows.positions + 1 - ratio).clamp(min=0)
    kv_copy.write_records(want, records, rope.rotate(norm.rms_norm(k, weight, 1e-20), at, freqs))
    ends = records >= 0
    found, meant = (kv_copy.read_records(x, records[ends]) for x in (got, want))
    if form == "f32":
        assert_close("rotate", found, meant.double(), 4.0)
    else:  # a value at the border between two codes may take the other
        assert int((found != meant).sum()) <= found.numel() // 200
    assert (got.pool[0] == 0xFF).all()


def test_stores_of_an_empty_step(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    rows = kv_copy.Rows(none, none, none, none)
    paged = store("nvfp4", 64, device)
    weight, freqs = torch.ones(64, device=device), rope.rope_frequencies(32, 10000.0).to(device)
    empty = torch.empty(0, 64, device=device)
    carry = torch.zeros(1, 2, 2, 64, device=device)
    latent = compress_store(empty, empty, carry, rows, 2, weight, 1e-20, freqs, paged, none, torch.bfloat16)
    assert (latent.shape, latent.dtype) == ((0, 64), torch.bfloat16)
    key_store(empty, rows, 2, weight, 1e-20, freqs, paged, none)
    assert (paged.pool == 0xFF).all()


def test_refuses_to_store() -> None:
    device = torch.device("cpu")
    rows, records = step(2, device)
    x, carry = torch.zeros(records.shape[0], 64), torch.zeros(5, 4, 2, 64)
    weight, freqs, paged = torch.ones(64), torch.ones(16), store("nvfp4", 64, device)
    with pytest.raises(ShapeError, match="compress_store: a, b, carry"):
        compress_store(x, None, None, rows, 2, weight, 0.0, freqs, paged, records, x.dtype)
    with pytest.raises(ShapeError, match="compress_store: a, b, carry"):
        compress_store(x, x, carry, rows, 1, weight, 0.0, freqs, paged, records, x.dtype)
    with pytest.raises(ShapeError, match="compress_store: b"):
        compress_store(x, x[1:], carry, rows, 2, weight, 0.0, freqs, paged, records, x.dtype)
    with pytest.raises(ShapeError, match="compress_store: carry"):
        compress_store(x, x, carry[:, :1], rows, 2, weight, 0.0, freqs, paged, records, x.dtype)
    with pytest.raises(ShapeError, match="compress_store: ids"):
        compress_store(x, x, carry, rows, 2, weight, 0.0, freqs, paged, records[1:], x.dtype)
    with pytest.raises(ShapeError, match="key_store: k"):
        key_store(x[:, :32], rows, 2, weight, 0.0, freqs, paged, records)
    with pytest.raises(ShapeError, match="key_store: weight"):
        key_store(x, rows, 2, weight[1:], 0.0, freqs, paged, records)


def test_refuses() -> None:
    with pytest.raises(ShapeError, match="pool_groups: a"):
        pool_groups(torch.zeros(2, 8), torch.zeros(2, 8))
    with pytest.raises(ShapeError, match="pool_groups: b"):
        pool_groups(torch.zeros(2, 2, 8), torch.zeros(2, 2, 7))
