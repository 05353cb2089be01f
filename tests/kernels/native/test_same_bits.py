"""A row alone has the bits of the same row in any batch, whatever the threads; and 0 rows are fine."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from benthic.kernels import backends, kv_copy, moe_experts, quant, rope
from benthic.kernels.native import (
    attn_sparse,
    build,
    engram,
    gemm,
    hyper,
    indexer,
    moe_gate,
    norm,
    swiglu,
)
from benthic.kernels.native import kv_copy as native_kv
from benthic.kernels.native import moe_experts as native_experts
from benthic.kernels.native import rope as native_rope

if not build.available():
    pytest.skip(build.status().detail, allow_module_level=True)

ROWS = 70  # one past a tile of 64, not a multiple of 4 or 16


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape))).to(dtype)


S = draw(ROWS, 4, 256)
WEIGHTS = {
    "fn": draw(24, 1024, dtype=torch.float32) / 32,
    "base": draw(24, dtype=torch.float32),
    "scale": torch.tensor([0.3, 0.7, 1.1]),
    "norm": draw(256, dtype=torch.float32),
    "square": draw(256, 256),
    "tall": draw(40, 256),
    "wide": draw(56, 256, dtype=torch.float32),
    "groups": draw(4, 48, 64),
    "gate": draw(16, 256, dtype=torch.float32) / 16,
    "w13": draw(16, 192, 256, seed=3) / 16,
    "w2": draw(16, 256, 96, seed=4) / 11,
}
PRE, POST, COMB = hyper.hyper_mixes(S, WEIGHTS["fn"], WEIGHTS["scale"], WEIGHTS["base"], 1e-20, 1e-6, 20)
IDS, SHARES = moe_gate.route(S[:, 0], WEIGHTS["gate"], WEIGHTS["base"][:16], 4, True, 1.5)
FREQS = rope.rope_frequencies(64, 10000.0)
POSITIONS = torch.arange(ROWS) * 37

OPS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "rms_norm": lambda at: norm.rms_norm(S[at], WEIGHTS["norm"], 1e-20),
    "rotate": lambda at: native_rope.rotate(S[at], POSITIONS[at], FREQS),
    "linear": lambda at: gemm.linear(S[at, 0], WEIGHTS["square"]),
    "linear, partial block": lambda at: gemm.linear(S[at, 0], WEIGHTS["tall"], torch.float32),
    "linear, float32 weights": lambda at: gemm.linear(S[at, 0], WEIGHTS["wide"], torch.float32),
    "linear, float32": lambda at: gemm.linear(S[at, 0].float(), WEIGHTS["wide"]),
    "grouped_linear": lambda at: gemm.grouped_linear(S[at, 0].unflatten(1, (4, 64)), WEIGHTS["groups"]),
    "swiglu": lambda at: swiglu.swiglu(S[at, 0], S[at, 1], 10.0, SHARES[at, 0]),
    "hyper_mixes": lambda at: hyper.hyper_mixes(
        S[at], WEIGHTS["fn"], WEIGHTS["scale"], WEIGHTS["base"], 1e-20, 1e-6, 20
    ),
    "hyper_collapse": lambda at: hyper.hyper_collapse(S[at], PRE[at]),
    "hyper_expand": lambda at: hyper.hyper_expand(S[at, 2], S[at], POST[at], COMB[at]),
    "engram_gate": lambda at: engram.engram_gate(S[at], S[at].flip(1), S[at, 3], WEIGHTS["fn"][:4, :256], 1e-20),
    "route": lambda at: moe_gate.route(S[at, 0], WEIGHTS["gate"], WEIGHTS["base"][:16], 4, True, 1.5),
    "experts": lambda at: native_experts.experts(
        quant.roundtrip_fp8(S[at, 0]), IDS[at], SHARES[at], WEIGHTS["w13"], WEIGHTS["w2"], 10.0, True
    ),
}


def flat(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.parametrize("name", OPS)
def test_row_alone(name: str, threads: int) -> None:
    everything = flat(OPS[name](torch.arange(ROWS)))
    for row in (0, 1, 37, 64, ROWS - 1):
        for alone, among in zip(flat(OPS[name](torch.tensor([row]))), everything, strict=True):
            assert torch.equal(alone[0], among[row]), f"row {row}"
    for part, among in zip(flat(OPS[name](torch.arange(5, 24))), everything, strict=True):
        assert torch.equal(part, among[5:24])


@pytest.mark.parametrize("name", OPS)
def test_no_row(name: str) -> None:
    for part in flat(OPS[name](torch.arange(0))):
        assert part.shape[0] == 0


def attention(
    rows: int = ROWS, heads: int = 6, width: int = 128, form: str = "nvfp4"
) -> tuple[Tensor, Tensor, Tensor, Tensor, kv_copy.Paged, Tensor, Tensor]:
    """q, rows, begin, count, records of 6 blocks of 64, listed [rows, 70], sink."""
    window = draw(rows + 63, width, seed=1)
    paged = kv_copy.Paged(torch.zeros(6, 64 * 600, dtype=torch.uint8), 96, 0, 64, width, form)
    native_kv.write_records(paged, torch.arange(6 * 64), draw(6 * 64, width, seed=2))
    generator = torch.Generator().manual_seed(5)
    listed = torch.stack([torch.randperm(6 * 64, generator=generator)[:70].sort().values for _ in range(rows)])
    for row in range(rows):
        listed[row, row:] = -1  # 0 to 70 entries: none, one past a group
    begin, count = torch.arange(rows), torch.arange(rows).clamp(max=64)
    return draw(rows, heads, width, seed=6), window, begin, count, paged, listed, draw(heads, dtype=torch.float32)


@pytest.mark.parametrize("round_probs", [True, False])
@pytest.mark.parametrize(("heads", "width", "form"), [(16, 128, "nvfp4"), (6, 128, "fp8"), (18, 512, "nvfp4")])
def test_attention_rows(heads: int, width: int, form: str, round_probs: bool, threads: int) -> None:
    q, rows, begin, count, paged, listed, sink = attention(heads=heads, width=width, form=form)

    def run(at: Tensor) -> Tensor:
        return attn_sparse.sink_attention(
            q[at], rows, begin[at], count[at], paged, listed[at], sink, width**-0.5, round_probs
        )

    everything = run(torch.arange(ROWS))
    for row in (0, 1, 64, 65, ROWS - 1):
        assert torch.equal(run(torch.tensor([row]))[0], everything[row])
    assert everything[0].count_nonzero() == 0  # sees nothing
    assert run(torch.arange(0)).shape == (0, heads, width)


@pytest.mark.parametrize("round_scores", [True, False])
def test_index_rows(round_scores: bool, threads: int) -> None:
    keys = kv_copy.Paged(torch.zeros(8, 64 * 70, dtype=torch.uint8), 32, 32 + 64 * 64, 64, 128, "mxfp4")
    native_kv.write_records(keys, torch.arange(8 * 64), draw(8 * 64, 128))
    tables = torch.tensor([[3, 1, 7, 5, 2]])
    q, w = quant.roundtrip_mxfp4(draw(ROWS, 8, 128)), draw(ROWS, 8) / 32
    visible = torch.arange(ROWS) * 4 + 1

    def run(at: Tensor, **more: Tensor | int | None) -> tuple[Tensor, Tensor | None]:
        starts = (0, at.shape[0])
        return indexer.index_select(q[at], w[at], keys, tables, starts, visible[at], 24, round_scores, **more)  # type: ignore[arg-type]

    entries, blocks = run(torch.arange(ROWS), emit=5)
    assert blocks is not None
    narrow, none = run(torch.arange(ROWS), restrict=blocks)
    assert none is None
    for row in (0, 6, 30, ROWS - 1):
        at = torch.tensor([row])
        alone, alone_blocks = run(at, emit=5)
        assert alone_blocks is not None
        assert torch.equal(alone[0], entries[row])
        assert torch.equal(alone_blocks[0], blocks[row])
        assert torch.equal(run(at, restrict=blocks[at])[0][0], narrow[row])


def test_reference_agrees_on_experts() -> None:
    """One row to one expert, all rows to the same expert, and an expert that nobody chose."""
    x, w13, w2 = quant.roundtrip_fp8(S[:, 0]), WEIGHTS["w13"], WEIGHTS["w2"]
    for ids in (torch.full((ROWS, 2), 3), torch.arange(ROWS * 2).unflatten(0, (ROWS, 2)) % 15):
        weights = SHARES[:, :2].contiguous()
        for round_hidden in (True, False):
            got = native_experts.experts(x, ids, weights, w13, w2, 10.0, True, round_hidden)
            with backends.reference():
                want = moe_experts.experts(x, ids, weights, w13, w2, 10.0, True, round_hidden)
            assert (got - want).abs().max() <= 0.02 * want.abs().max()
            assert (got != want).float().mean() < 0.05
