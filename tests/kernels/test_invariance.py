"""With `backends.invariant()` a row has the same bits alone and in any batch, at any place of it.

Every op of a step, at the release's sizes on a GPU and at small ones on a CPU, where the native kernels make the same
promise with or without being asked. Each row is computed alone; then batches of many sizes hold rows in an order of
their own, with padding between them, and each row is compared with what it was alone. Chunks of one request, whose rows
see each other, are cut in several ways.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from benthic.bench.cases import RELEASE, SMALL, Cases
from benthic.bench.operands import block_tables, decode_rows, routing
from benthic.kernels import (
    attn_sparse,
    backends,
    compress,
    engram,
    fused,
    gemm,
    hyper,
    indexer,
    kv_copy,
    moe_experts,
    moe_gate,
    norm,
    quant,
    rope,
    sample,
)
from benthic.kernels.native import build

GPU = torch.cuda.is_available()
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BATCHES = (2, 3, 16, 17, 63, 64, 65, 128, 200, 256)
SIZES = replace(RELEASE, attend=((257, 1),), contexts=((4096, 257, 1),), pool_blocks=1025, table_rows=1 << 16)
SMALL_SIZES = replace(SMALL, attend=((10, 1),), contexts=((256, 10, 1),))

Rowwise = Callable[[Tensor], tuple[Tensor, ...]]  # numbers of rows -> what the op gives for each of them
Make = Callable[[Cases, int], Rowwise]  # with this many rows to choose from; row 0 is padding

# ---- the ops: operands of all rows, and a run on some of them ----


def rms_norm(c: Cases, rows: int, width: int) -> Rowwise:
    x, weight = c.make.normal(rows, width), c.ones(width)
    return lambda at: (norm.rms_norm(x[at], weight, c.c.rms_norm_eps),)


def rotate(c: Cases, rows: int) -> Rowwise:
    x, positions, freqs = c.make.normal(rows, c.c.num_attention_heads, c.c.head_dim), c.positions(rows), c.freqs(1)
    return lambda at: (rope.rotate(x[at], positions[at], freqs),)


def roundtrips(c: Cases, rows: int) -> Rowwise:
    x = c.make.normal(rows, c.c.hidden_size)

    def run(at: Tensor) -> tuple[Tensor, ...]:
        return quant.roundtrip_fp8(x[at]), quant.roundtrip_mxfp4(x[at]), quant.roundtrip_nvfp4(x[at])

    return run


def linear(c: Cases, rows: int, name: str, fast: bool) -> Rowwise:
    n, k = c.matrices()[name]
    x, weight = c.rows(rows, k, fast), c.matrix(n, k, fast)
    return lambda at: (gemm.linear(x[at], weight),)


def dense(c: Cases, rows: int, n: int, k: int) -> Rowwise:
    """A weight in bf16, results in f32: the head, the router, the compressor."""
    x, weight = c.make.normal(rows, k), c.make.dense(n, k)
    return lambda at: (gemm.linear(x[at], weight, torch.float32),)


def grouped_linear(c: Cases, rows: int, fast: bool) -> Rowwise:
    groups, rank = c.c.o_groups, c.c.o_lora_rank
    k = c.c.num_attention_heads * c.c.head_dim // groups
    x = c.rows(rows * groups, k, fast).unflatten(0, (rows, groups))
    weight = quant.grouped(c.matrix(groups * rank, k, fast), groups)
    return lambda at: (gemm.grouped_linear(x[at], weight),)


def attention_inputs(c: Cases, rows: int, fast: bool) -> Rowwise:
    rank, width, inner = c.c.q_lora_rank, c.c.head_dim, c.c.num_attention_heads * c.c.head_dim
    h, positions, freqs = c.make.normal(rows, c.c.hidden_size), c.positions(rows), c.freqs(1)
    wqkv_a, wq_b = c.matrix(rank + width, c.c.hidden_size, fast), c.matrix(inner, rank, fast)
    rest = (wqkv_a, c.ones(rank), wq_b, c.ones(width), c.c.rms_norm_eps, fast)
    return lambda at: served(fused.attention_inputs(h[at], positions[at], freqs, *rest))


def attention_output(c: Cases, rows: int, fast: bool) -> Rowwise:
    heads, width, groups = c.c.num_attention_heads, c.c.head_dim, c.c.o_groups
    ranks = groups * c.c.o_lora_rank
    o, positions, freqs = c.make.normal(rows, heads, width), c.positions(rows), c.freqs(1)
    wo_a, wo_b = c.matrix(ranks, heads * width // groups, fast), c.matrix(c.c.hidden_size, ranks, fast)
    rest = (freqs, wo_a, wo_b, groups, True, fast)
    return lambda at: served(fused.attention_output(o[at], positions[at], *rest))


def route(c: Cases, rows: int) -> Rowwise:
    count, hidden = 8 * c.c.n_routed_experts, c.c.hidden_size
    h, gate, bias = c.make.normal(rows, hidden), c.make.dense(count, hidden), c.make.normal(count, dtype=torch.float32)
    return lambda at: moe_gate.route(h[at], gate, bias, c.c.num_experts_per_tok, True, c.c.routed_scaling_factor)


def experts(c: Cases, rows: int, fast: bool) -> Rowwise:
    k = c.c.num_experts_per_tok
    x = c.make.rows(rows, c.c.hidden_size)
    ids = routing(c.make, rows, k, torch.linspace(1, 4, c.c.n_routed_experts))
    weights = c.make.normal(rows, k, dtype=torch.float32).softmax(1)
    rest = (*c.expert_weights(fast), c.c.swiglu_limit, True, False, fast)
    return lambda at: (moe_experts.experts(x[at], ids[at], weights[at], *rest),)


def moe(c: Cases, rows: int, fast: bool) -> Rowwise:
    count, hidden, inner = c.c.n_routed_experts, c.c.hidden_size, c.c.moe_intermediate_size
    h, gate, bias = c.make.normal(rows, hidden), c.make.dense(count, hidden), c.make.normal(count, dtype=torch.float32)
    shared = (c.matrix(2 * inner, hidden, fast), c.matrix(hidden, inner, fast))
    router = (c.c.num_experts_per_tok, True, c.c.routed_scaling_factor)
    rest = (gate, bias, *c.expert_weights(fast), *shared, *router, c.c.swiglu_limit, False, fast)
    return lambda at: served(fused.moe(h[at], *rest))


def hyper_read(c: Cases, rows: int, pending: bool) -> Rowwise:
    streams, hidden = c.c.hc_mult, c.c.hidden_size
    mixes = (2 + streams) * streams
    s, out = c.make.normal(rows, streams, hidden), c.make.normal(rows, hidden)
    pre, post = (c.make.normal(rows, streams, dtype=torch.float32).sigmoid() for _ in range(2))
    comb = c.make.normal(rows, streams, streams, dtype=torch.float32).softmax(1)
    fn = c.make.normal(mixes, streams * hidden, dtype=torch.float32, scale=(streams * hidden) ** -0.5)
    base, eps = c.make.normal(mixes, dtype=torch.float32), (c.c.rms_norm_eps, c.c.hc_eps, c.c.hc_sinkhorn_iters)

    def run(at: Tensor) -> tuple[Tensor, ...]:
        state = hyper.Streams(s[at], pre[at])
        if pending:
            state = hyper.Streams(s[at], pre[at], out[at], post[at], comb[at])
        h, after = served(fused.hyper_read(state, fn, c.ones(3), base, c.ones(hidden), *eps))
        settled = hyper.settle(state)
        return h, after.s, after.pre, after.post, after.comb, settled, hyper.hyper_collapse(settled, pre[at])

    return run


def engram_rows(c: Cases, rows: int) -> Rowwise:
    """N-gram rows of the table, and the gate."""
    streams, hidden, per = c.c.hc_mult, c.c.hidden_size, c.c.engram_rows_per_token
    codes, scales = c.table("device")
    ids = c.make.integers(0, codes.shape[0], rows, per)
    s, keys = (c.make.normal(rows, streams, hidden) for _ in range(2))
    value, weight = c.make.normal(rows, hidden), c.make.normal(streams, hidden, dtype=torch.float32)

    def run(at: Tensor) -> tuple[Tensor, ...]:
        found = engram.table_rows(codes, scales, ids[at].flatten(), torch.bfloat16)
        return found.unflatten(0, (-1, per)), engram.engram_gate(s[at], keys[at], value[at], weight, c.c.rms_norm_eps)

    return run


def attend(c: Cases, rows: int) -> Rowwise:
    """Each row a request of its own, some shorter than the window; its window row is stored as well."""
    heads, width, topk = c.c.num_attention_heads, c.c.head_dim, c.c.index_topk
    storage, layer, where = c.storage(), c.source(1), requests(c, rows, 4 * c.c.sliding_window)
    q, kw = c.make.normal(rows, heads, width), c.make.rows(rows, width)
    main, ring = c.paged(storage, layer, "main"), kv_copy.Ring(storage.rings[layer], width, "fp8")
    records = c.make.integers(main.entries, storage.num_blocks * main.entries, rows, topk).int()
    records[rows // 2 :, topk // 3 :] = -1
    rest = (main, c.make.normal(heads, dtype=torch.float32), width**-0.5)
    before = storage.rings[layer].clone()

    def run(at: Tensor) -> tuple[Tensor, ...]:
        storage.rings[layer].copy_(before)
        here = alone(where, at)
        o = attn_sparse.attend(q[at], kw[at], ring, here, c.c.sliding_window, rest[0], records[at], *rest[1:], False)
        kv_copy.ring_write(ring, kw[at], here.slots, here.positions)
        return o, storage.rings[layer][here.slots]

    return run


def select(c: Cases, rows: int, restricted: bool) -> Rowwise:
    heads, width, topk = c.c.index_n_heads, c.c.index_head_dim, c.c.index_topk
    emit, size = c.c.candidate_topk_blocks, c.c.candidate_block_size
    storage = c.storage()
    blocks = min(storage.table_blocks, 64)
    longest = blocks * storage.block_tokens
    where, tables = requests(c, rows, longest), block_tables(rows - 1, blocks, storage.num_blocks, c.device)
    q = quant.roundtrip_mxfp4_reference(c.make.normal(rows, heads, width))
    w = c.make.normal(rows, heads, scale=(heads * width) ** -0.5)
    keys, candidates = c.paged(storage, c.source(1), "index"), c.candidates(rows, longest // size)

    def run(at: Tensor) -> tuple[Tensor, ...]:
        here = alone(where, at)
        some = candidates[at] if restricted else None
        rest = (topk, False, some, 0 if restricted else emit, size)
        records, blocks = indexer.select_records(q[at], w[at], keys, tables, here, here.positions + 1, *rest)
        return (records,) if blocks is None else (records, blocks)

    return run


def compressor(c: Cases, rows: int) -> Rowwise:
    """Both records of a group that ends at a row, and what is carried on."""
    ratio, width, key = 2, c.c.head_dim, c.c.index_head_dim
    storage, layer, where = c.storage(), c.source(ratio), requests(c, rows, 4 * c.c.sliding_window)
    a, b = (c.make.normal(rows, width, dtype=torch.float32) for _ in range(2))
    wk, ones, key_ones, freqs, eps = c.make.dense(key, width), c.ones(width), c.ones(key), c.freqs(ratio), 1e-6
    main, index = c.paged(storage, layer, "main"), c.paged(storage, layer, "index")
    each = main.entries + torch.arange(rows, device=c.device)
    ids = torch.where((where.positions + 1) % ratio == 0, each, -1)
    carry, pool = storage.carry[layer].clone(), storage.pool.clone()

    def run(at: Tensor) -> tuple[Tensor, ...]:
        storage.carry[layer].copy_(carry)
        storage.pool.copy_(pool)
        here, ends = alone(where, at), (ids[at] >= 0)
        rest = (ones, eps, freqs, main, ids[at], torch.bfloat16)
        latent = compress.compress_store(a[at], b[at], storage.carry[layer], here, ratio, *rest)
        latent = latent.masked_fill(~ends[:, None], 0.0)  # other rows are whatever memory held, infinities too
        compress.key_store(gemm.linear(latent, wk), here, ratio, key_ones, eps, freqs, index, ids[at])
        stored = [kv_copy.read_records(part, ids[at].clamp(min=0)) for part in (main, index)]
        kept = [torch.where(ends[:, None], x, torch.zeros_like(x)) for x in (latent, *stored)]
        return *kept, storage.carry[layer][here.slots]

    return run


def sample_rows(c: Cases, rows: int) -> Rowwise:
    logits = c.make.normal(rows, c.c.vocab_size, dtype=torch.float32, scale=3.0)
    seeds, positions = c.make.integers(0, 1 << 40, rows), c.positions(rows)
    every = torch.arange(rows, device=c.device)
    temperature, top_p = torch.where(every % 3 > 0, 0.8, 0.0).double(), torch.where(every % 2 > 0, 0.95, 1.0).double()
    top_k, min_p = every % 5 * 10, torch.where(every % 7 > 5, 0.01, 0.0).double()
    columns = (logits, seeds, positions, temperature, top_k, top_p, min_p)
    return lambda at: sample.sample_rows(*(column[at] for column in columns))


def requests(c: Cases, rows: int, longest: int) -> kv_copy.Rows:
    """Row i is of request i, at a position of its own below `longest`; row 0 is padding."""
    where = decode_rows(rows, 1, 0, c.device, first_slot=0)
    positions = torch.arange(rows, device=c.device) * (longest - 1) // max(rows - 1, 1)
    return where._replace(positions=positions, firsts=positions)


def alone(where: kv_copy.Rows, at: Tensor) -> kv_copy.Rows:
    """These rows as a step of one-row chunks."""
    return kv_copy.Rows(*(x[at] for x in where[:3]), torch.arange(at.shape[0], device=at.device))


def served(result: Any) -> tuple[Any, ...]:
    assert result is not None, "no backend takes it together"
    return result if isinstance(result, tuple) else (result,)


PRODUCTS = ("wqkv_a", "wq_b", "wo_b", "shared w13", "shared w2", "indexer wq_b", "engram wkv")
OPS: dict[str, Make] = {
    "rms_norm": lambda c, rows: rms_norm(c, rows, c.c.hidden_size),
    "rms_norm of a rank": lambda c, rows: rms_norm(c, rows, c.c.q_lora_rank),
    "rotate": rotate,
    "round trips": roundtrips,
    "head": lambda c, rows: dense(c, rows, c.c.vocab_size, c.c.hidden_size),
    "compressor's product": lambda c, rows: dense(c, rows, c.c.head_dim, c.c.hidden_size),
    "route": route,
    "hyper_read": partial(hyper_read, pending=True),
    "hyper_read, nothing pending": partial(hyper_read, pending=False),
    "n-gram rows": engram_rows,
    "attend": attend,
    "select": partial(select, restricted=False),
    "select, restricted": partial(select, restricted=True),
    "compressor": compressor,
    "sample_rows": sample_rows,
}
for _fast in (False, True):
    _mode = ", fast" if _fast else ""
    OPS |= {f"linear {name}{_mode}": partial(linear, name=name, fast=_fast) for name in PRODUCTS}
    OPS |= {
        f"grouped_linear{_mode}": partial(grouped_linear, fast=_fast),
        f"attention_inputs{_mode}": partial(attention_inputs, fast=_fast),
        f"attention_output{_mode}": partial(attention_output, fast=_fast),
        f"experts{_mode}": partial(experts, fast=_fast),
        f"moe{_mode}": partial(moe, fast=_fast),
    }


# ---- rows in batches -------------------------------------------------------------------------------------------------


NOT_NATIVE = ("attend", "select", "select, restricted", "compressor", "sample_rows", "n-gram rows")
NOT_NATIVE += tuple(f"{op}, fast" for op in ("attention_inputs", "attention_output", "moe"))
QUICK = ("rms_norm", "rms_norm of a rank", "rotate", "round trips", "route", "attend", "compressor")  # interpreted

PLACES = {"native": [op for op in OPS if op not in NOT_NATIVE]} if build.status().available else {}
if GPU:
    PLACES["cuda"] = list(OPS)
elif find_spec("triton") is not None:
    PLACES["interpreter"] = list(QUICK)
PLACED = [
    pytest.param(place, op, marks=pytest.mark.gpu) if place == "cuda" else (place, op)
    for place, ops in PLACES.items()
    for op in ops
]


@pytest.fixture(scope="module")
def cases() -> Callable[[str], Cases]:
    return cache(lambda place: Cases(*((SIZES, CUDA) if place == "cuda" else (SMALL_SIZES, CPU)), 0))


@pytest.mark.parametrize(("place", "op"), PLACED)
def test_a_row_alone_is_the_row_in_a_batch(place: str, op: str, cases: Callable[[str], Cases]) -> None:
    rows, batches = {"cuda": (257, BATCHES), "native": (10, (2, 3, 5, 9)), "interpreter": (5, (2, 4))}[place]
    made = cases(place)
    with backends.use("triton") if place == "interpreter" else nullcontext():
        try:
            with backends.invariant(), torch.inference_mode():
                same_bits(OPS[op](made, rows), rows, batches, made.device)
        finally:
            made.forget()


def same_bits(run: Rowwise, rows: int, batches: Iterable[int], device: torch.device) -> None:
    """Rows 1 and up in any order; every fifth of a batch is padding, row 0."""
    every = torch.arange(rows, device=device)
    want = [torch.cat(column) for column in zip(*(run(row[None]) for row in every), strict=True)]
    order = 1 + torch.randperm(rows - 1, device=device)
    for size in batches:
        for shift in (0, size // 2, -1):
            at = order.roll(shift)[:size].clone()
            at[4::5] = 0
            for got, alone_ in zip(run(at), want, strict=True):
                assert torch.equal(as_bytes(got), as_bytes(alone_[at])), f"{size} rows, shifted by {shift}"


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


# ---- rows of one request in chunks -----------------------------------------------------------------------------------

Chunked = Callable[[int, int, kv_copy.Rows, bool], tuple[Tensor, ...]]  # rows a .. b-1 of a request


def attend_chunk(c: Cases, rows: int) -> Chunked:
    """Window and entries; the rows of the chunk itself are not in the ring yet."""
    heads, width, topk = c.c.num_attention_heads, c.c.head_dim, c.c.index_topk
    storage, layer = c.storage(), c.source(1)
    q, kw = c.make.normal(rows, heads, width), c.make.rows(rows, width)
    main, ring = c.paged(storage, layer, "main"), kv_copy.Ring(storage.rings[layer], width, "fp8")
    records = c.make.integers(main.entries, storage.num_blocks * main.entries, rows, topk).int()
    rest = (c.make.normal(heads, dtype=torch.float32), width**-0.5, False)
    before = storage.rings[layer].clone()

    def run(a: int, b: int, where: kv_copy.Rows, chunked: bool) -> tuple[Tensor, ...]:
        if a == 0:
            storage.rings[layer].copy_(before)
        o = attn_sparse.attend(q[a:b], kw[a:b], ring, where, c.c.sliding_window, main, records[a:b], *rest)
        kv_copy.ring_write(ring, kw[a:b], where.slots, where.positions)
        return (o,)

    return run


def select_chunk(c: Cases, rows: int) -> Chunked:
    heads, width, topk = c.c.index_n_heads, c.c.index_head_dim, c.c.index_topk
    emit, size = c.c.candidate_topk_blocks, c.c.candidate_block_size
    storage = c.storage()
    tables = block_tables(1, min(storage.table_blocks, 64), storage.num_blocks, c.device)
    q = quant.roundtrip_mxfp4_reference(c.make.normal(rows, heads, width))
    w, keys = c.make.normal(rows, heads, scale=(heads * width) ** -0.5), c.paged(storage, c.source(1), "index")

    def run(a: int, b: int, where: kv_copy.Rows, chunked: bool) -> tuple[Tensor, ...]:
        rest = (where.positions + 1, topk, False, None, emit, size, chunked)
        records, blocks = indexer.select_records(q[a:b], w[a:b], keys, tables, where, *rest)
        assert blocks is not None
        return records, blocks

    return run


def compressor_chunk(c: Cases, rows: int) -> Chunked:
    ratio, width = 2, c.c.head_dim
    storage, layer = c.storage(), c.source(ratio)
    a_, b_ = (c.make.normal(rows, width, dtype=torch.float32) for _ in range(2))
    main = c.paged(storage, layer, "main")
    ids, none = main.entries + torch.arange(rows, device=c.device), torch.full((rows,), -1, device=c.device)
    rest = (c.ones(width), 1e-6, c.freqs(ratio), main)
    carry = storage.carry[layer].clone()

    def run(a: int, b: int, where: kv_copy.Rows, chunked: bool) -> tuple[Tensor, ...]:
        if a == 0:
            storage.carry[layer].copy_(carry)
        ends = (where.positions + 1) % ratio == 0
        here = torch.where(ends, ids[a:b], none[a:b])
        latent = compress.compress_store(
            a_[a:b], b_[a:b], storage.carry[layer], where, ratio, *rest, here, torch.bfloat16
        )
        stored = kv_copy.read_records(main, here)
        return torch.where(ends[:, None], latent, 0.0), stored

    return run


CHUNKED: dict[str, Callable[[Cases, int], Chunked]] = {
    "attend": attend_chunk,
    "select": select_chunk,
    "compressor": compressor_chunk,
}


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize(
    "place",
    [pytest.param("cuda", marks=pytest.mark.gpu)] if GPU else [p for p in PLACES if p == "interpreter"],
)
def test_chunks_of_any_size_are_the_whole(place: str, op: str, cases: Callable[[str], Cases]) -> None:
    made = cases(place)
    rows, first, sizes = (300, 700, (1, 2, 17, 64, 65, 127, 128, 200)) if place == "cuda" else (7, 13, (1, 3))
    with backends.use("triton") if place == "interpreter" else nullcontext():
        try:
            with backends.invariant(), torch.inference_mode():
                run = CHUNKED[op](made, rows)
                whole = in_chunks(run, rows, first, rows, made.device)
                for size in sizes:
                    for got, want in zip(in_chunks(run, rows, first, size, made.device), whole, strict=True):
                        assert torch.equal(as_bytes(got), as_bytes(want)), f"chunks of {size}"
        finally:
            made.forget()


def in_chunks(run: Chunked, rows: int, first: int, size: int, device: torch.device) -> list[Tensor]:
    parts: list[tuple[Tensor, ...]] = []
    for a in range(0, rows, size):
        b = min(a + size, rows)
        where = decode_rows(1, b - a, first + a, device)
        parts.append(run(a, b, where, b - a > 1))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


# ---- configurations --------------------------------------------------------------------------------------------------


def test_slices_of_a_product_do_not_depend_on_its_rows() -> None:
    kernels = pytest.importorskip("benthic.kernels.triton.gemm")
    c = Cases(RELEASE, CPU, 0)
    shapes = set(c.matrices().values()) | {(c.c.vocab_size, c.c.hidden_size), (8 * 48, c.c.hidden_size), (640, 512)}
    plans: dict[Any, set[Any]] = {}
    with backends.invariant():
        for n, k in shapes:
            for kind in kernels.CANDIDATES:
                for rows in (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 200, 4096, 1 << 17):
                    plan = kernels._plan(kind, rows, n, k)
                    plans.setdefault((kind, n, k), set()).add((plan.slices, plan.steps, plan.config["BLOCK_K"]))
    assert {key: found for key, found in plans.items() if len(found) > 1} == {}


@pytest.mark.parametrize("kind", ["blocks", "values", "rows"])
def test_tiles_of_any_configuration_fit_in_shared_memory(kind: str) -> None:
    """A table's entry for 16 rows is used for up to 64, with a tile as high as they need."""
    kernels = pytest.importorskip("benthic.kernels.triton.gemm")
    from benthic.kernels.triton import tuning

    n, k = 1792, 5120
    for config in kernels.CANDIDATES[kind].values():
        with tuning.trying({(f"linear_{kind}", f"{n}x{k}"): config}), backends.invariant():
            for rows in (1, 16, 17, 64):
                tile = kernels._plan(kind, rows, n, k).config
                x, weight = (1 if kind == "rows" else 2), (2 if kind == "values" else 1)
                stage = (x * tile["BLOCK_M"] + weight * tile["BLOCK_N"]) * tile["BLOCK_K"]
                assert rows <= tile["BLOCK_M"] <= 64
                assert 2 <= tile["num_stages"] <= config["num_stages"]
                assert stage * tile["num_stages"] <= 192 << 10


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["32x128_ring", "64x256_ring", "64x64"])
@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_any_kernel_of_a_product_gives_the_bits_of_the_others(kind: str, name: str, cases: Callable[[str], Cases]):
    """What a table may say for few rows decides the slices; above 64 rows another kernel goes through them."""
    from benthic.kernels.triton import gemm as kernels
    from benthic.kernels.triton import tuning

    c = cases("cuda")
    n, k = c.matrices()["wqkv_a"]
    config = kernels.CANDIDATES[kind].get(name)
    if config is None:  # the narrowest ring of this kind
        config = kernels.CANDIDATES[kind]["64x128_ring"]
    x, weight = c.rows(257, k, kind == "rows"), c.matrix(n, k, kind == "rows")
    with tuning.trying({(f"linear_{kind}", f"{n}x{k}"): config}), backends.invariant(), torch.inference_mode():
        same_bits(lambda at: (gemm.linear(x[at], weight),), 257, BATCHES, CUDA)


def test_a_configuration_that_decides_bits_is_one_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = pytest.importorskip("benthic.kernels.triton.tuning")
    device = "a-test"
    made = {"op": {"key": [[8, {"knob": 1}], [64, {"knob": 2}], [1 << 30, {"knob": 3}]]}}
    monkeypatch.setattr(tuning, "table", lambda name: made if name == device else {})
    monkeypatch.setattr(tuning, "device_name", lambda: device)

    def knobs(**changes: bool) -> list[int]:
        return [tuning.config("op", "key", rows, {"knob": 0}, **changes)["knob"] for rows in (1, 9, 65, 1 << 31)]

    assert knobs() == knobs(decides_bits=True) == [1, 2, 3, 3]
    with backends.invariant():
        assert knobs() == [1, 2, 3, 3]
        assert knobs(decides_bits=True) == [3, 3, 3, 3]


def test_a_remembered_decision_is_made_once_for_what_it_rests_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = pytest.importorskip("benthic.kernels.triton.tuning")
    device = "one"
    monkeypatch.setattr(tuning, "device_name", lambda: device)
    made: list[tuple[str, int, bool]] = []

    @tuning.remembered
    def decide(rows: int) -> int:
        made.append((device, rows, backends.is_invariant()))
        return tuning.config("op", "key", rows, {"knob": rows})["knob"]

    assert [decide(rows) for rows in (1, 2, 1, 2)] == [1, 2, 1, 2]
    with backends.invariant():
        assert [decide(1), decide(1)] == [1, 1]
    device = "other"
    assert decide(1) == 1
    once = [("one", 1, False), ("one", 2, False), ("one", 1, True), ("other", 1, False)]
    assert made == once
    with tuning.trying({("op", "key"): {"knob": 7}}) as trial:  # asked anew, and not remembered
        assert [decide(1), decide(1)] == [7, 7]
    assert ("op", "key") in trial.asked
    assert decide(1) == 1
    assert made == [*once, ("other", 1, False), ("other", 1, False)]


def test_numbers_of_wrappers() -> None:
    runtime = pytest.importorskip("benthic.kernels.triton.runtime")
    for a in range(200):
        for b in (1, 2, 3, 64, 100):
            assert runtime.cdiv(a, b) == (a + b - 1) // b
    for n in range(1, 300):
        power = runtime.power_of_two(n)
        assert power >= n > power // 2
        assert power.bit_count() == 1
