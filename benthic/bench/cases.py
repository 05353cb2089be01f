"""The kernels of a step at the sizes of a model: what each must move and compute, and how to run it.

One method a kernel; it returns a `Case`, which says first how many bytes and operations there are and allocates nothing
before it is built. `Cases.all` is the list, row by row of the kernel table.

T rows, D hidden width, S streams, H heads, dh head width, W window, K selected entries, n entries of a sequence,
Rq query rank, G groups of the output projection, E experts on this rank, I expert width, R rows routed to them, V
vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benthic.bench.operands import Operands, block_tables, decode_rows, routing
from benthic.bench.timing import Run, scaled_mm
from benthic.cache.spec import Part, blocks_for
from benthic.cache.storage import Storage
from benthic.errors import BenchError
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
from benthic.models.deepseek_v41_config import ModelConfig, cache_spec, layer_plan
from benthic.models.loading import locked
from benthic.testing.checkpoints import tiny_config
from benthic.types import NUMERICS

FP8 = 1 + 1 / 1024  # bytes a weight, scales counted
FP4 = 0.5 + 1 / 32
CHAIN_US = {48: 150.0, 384: 232.0, 1152: 262.0, 12288: 1000.0}  # most for the experts' chain of the release, by R
VARIANTS = ("exact", "fast", "invariant")
LOGITS = {  # standard deviation of normal logits; how many tokens stay of 129280, at temperature 0.8 under top-p 0.95
    "peaked": 4.0,  # some 250, as many as a language model ever leaves
    "broad": 3.0,  # 2700
    "flat": 1.4,  # 59000
}
PLACES = ("device", "host", "staged")  # of an n-gram table; staged: the host gathers its rows and sends them


class Target(NamedTuple):
    """What the project wants of a case; each part that is given must hold."""

    share: float | None = None  # of the floor in the time taken
    us: float | None = None  # at most
    tflops: float | None = None  # at least


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size."""

    row: str  # of the kernel table
    op: str  # the public function
    shape: str
    phase: str  # "decode" or "prefill"
    nbytes: float
    flops: float
    build: Callable[[], Run]
    kind: str = "bf16"  # whose ceiling the operations are held against
    variant: str = "exact"  # "fast": one scale a row; "invariant": tiling that does not depend on the rows
    target: Target = field(default_factory=Target)
    over_link: float = 0.0  # bytes that come from the host
    on_host: bool = False  # the host has a part in it, so that no graph can hold it
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict[str, Callable[[], Run]])

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape}" + ("" if self.variant == "exact" else f", {self.variant}")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Which sizes the cases have."""

    config: dict[str, Any]
    rows: tuple[int, ...]  # of products
    small_rows: tuple[int, ...]  # of ops that move a few bytes
    moe_rows: tuple[int, ...]  # tokens of the rank; R is as many times the experts a token
    attend: tuple[tuple[int, int], ...]  # requests, rows of each
    contexts: tuple[tuple[int, int, int], ...]  # tokens, requests, rows of each
    prefill: tuple[int, int]  # rows of a chunk, tokens before it
    head_rows: tuple[int, ...]
    pool_blocks: int
    table_rows: int  # of the n-gram table
    decode_rows: int  # up to so many rows a product counts as decoding


RELEASE = Sizes(
    config=tiny_config("v41_flash", n_routed_experts=48, vision_config=None),
    rows=(1, 16, 64, 192, 384, 1536, 4096),
    small_rows=(64, 384, 4096),
    moe_rows=(8, 24, 64, 192, 512, 2048, 8192),
    attend=((64, 1), (32, 6), (64, 6), (256, 6)),
    contexts=((4096, 64, 1), (32768, 64, 1), (131072, 64, 1), (131072, 64, 6), (1048448, 4, 1)),
    prefill=(4096, 28672),
    head_rows=(64, 256),
    pool_blocks=65537,
    table_rows=1 << 23,
    decode_rows=384,
)
SMALL = Sizes(  # so that a machine without a GPU runs each kind of case
    config=tiny_config("tiny", vision_config=None),
    rows=(5,),
    small_rows=(3,),
    moe_rows=(3,),
    attend=((2, 3),),
    contexts=((256, 2, 1),),
    prefill=(12, 128),
    head_rows=(2,),
    pool_blocks=17,
    table_rows=4096,
    decode_rows=8,
)


class Cases:
    """The case list of one set of sizes on one device."""

    def __init__(self, sizes: Sizes, device: torch.device, seed: int):
        self.sizes, self.device = sizes, device
        self.config = ModelConfig.from_json(sizes.config)
        self.c = self.config.text
        self.make = Operands(device, seed)
        self._kept: dict[object, Any] = {}

    def all(self, experts_first: bool = False) -> Iterator[Case]:
        """In the order of the kernel table; experts_first: for whom time may end, since a step is mostly theirs."""
        groups = [self._small, self._products, self._experts, self._cached, self._streams, self._end]
        if experts_first:
            groups.insert(0, groups.pop(2))
        for cases in groups:
            yield from cases()
            self.forget()

    def _small(self) -> Iterator[Case]:
        for rows in self.sizes.small_rows:
            yield self.rms_norm(rows)
            yield self.rotate(rows)
            yield self.roundtrip_fp8(rows)
            yield self.ring_write(rows)

    def _products(self) -> Iterator[Case]:
        for name, (n, k) in self.matrices().items():
            for rows in self.sizes.rows:
                for fast in (False, True):
                    yield self.linear(name, n, k, rows, fast)
            self.forget()
        for rows in self.sizes.rows:
            for fast in (False, True):
                yield self.attention_inputs(rows, fast)
                yield self.grouped_linear(rows, fast)
                yield self.attention_output(rows, fast)

    def _experts(self) -> Iterator[Case]:
        for rows in self.sizes.moe_rows:
            for variant in VARIANTS:
                yield self.experts(rows, variant)
            for fast in (False, True):
                yield self.moe(rows, fast)
            yield self.route(rows)

    def _cached(self) -> Iterator[Case]:
        rows, before = self.sizes.prefill
        for requests, per in self.sizes.attend:
            yield self.attend(requests, per, "decode")
        yield self.attend(1, rows, "prefill")
        for context, requests, per in self.sizes.contexts:
            for restricted in (False, True):
                yield self.select_records(context, requests, per, restricted)
        for restricted in (False, True):
            yield self.select_prefill(before, rows, restricted)
        for requests, per in (*self.sizes.attend, (1, rows)):
            yield self.compressor(requests, per)

    def _streams(self) -> Iterator[Case]:
        for rows in self.sizes.rows:
            yield self.hyper_read(rows)
        for rows in self.sizes.small_rows:
            for place in PLACES if self.device.type == "cuda" else PLACES[:1]:
                yield self.table_rows(rows, place)
            yield self.engram_gate(rows)

    def _end(self) -> Iterator[Case]:
        for rows in self.sizes.head_rows:
            yield self.head(rows)
            for logits in LOGITS:
                yield self.sample_rows(rows, logits)

    # ---- norm, rotation, quantisation, window store: the pieces of the table's first row, one launch each ----

    def piece(self, op: str, rows: int, width: int, nbytes: float, build: Callable[[], Run]) -> Case:
        phase = self.phase(rows)
        target = Target(share=0.75 if phase == "decode" else 0.80)
        return Case("norm, rope, Q8, window store", op, f"{rows}x{width}", phase, nbytes, 0.0, build, target=target)

    def rms_norm(self, rows: int) -> Case:
        width = self.c.q_lora_rank

        def build() -> Run:
            x, weight = self.make.normal(rows, width), self.ones(width)
            return lambda: norm.rms_norm(x, weight, self.c.rms_norm_eps)

        return self.piece("rms_norm", rows, width, 4.0 * rows * width, build)

    def rotate(self, rows: int) -> Case:
        heads, width = self.c.num_attention_heads, self.c.head_dim

        def build() -> Run:
            x, freqs, positions = self.make.normal(rows, heads, width), self.freqs(1), self.positions(rows)
            return lambda: rope.rotate(x, positions, freqs)

        return self.piece("rotate", rows, heads * width, 4.0 * rows * heads * width, build)

    def roundtrip_fp8(self, rows: int) -> Case:
        width = self.c.hidden_size

        def build() -> Run:
            x = self.make.normal(rows, width)
            return lambda: quant.roundtrip_fp8(x)

        return self.piece("roundtrip_fp8", rows, width, 4.0 * rows * width, build)

    def ring_write(self, rows: int) -> Case:
        width = self.c.head_dim
        record = kv_copy.data_bytes(width, "fp8") + kv_copy.scale_bytes(width, "fp8")

        def build() -> Run:
            at = decode_rows(-(-rows // 6), 6, 1000, self.device)
            stored = torch.zeros(
                -(-rows // 6) + 1, self.c.sliding_window + 5, record, dtype=torch.uint8, device=self.device
            )
            ring, kw = kv_copy.Ring(stored, width, "fp8"), self.make.rows(rows, width)
            return lambda: kv_copy.ring_write(ring, kw, at.slots[:rows], at.positions[:rows])

        return self.piece("ring_write", rows, width, rows * (2.0 * width + record), build)

    # ---- products with FP8 weights ----

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The FP8 weights of a layer: name -> rows, columns."""
        c = self.c
        shared = c.moe_intermediate_size * c.n_shared_experts
        return {
            "wqkv_a": (c.q_lora_rank + c.head_dim, c.hidden_size),
            "wq_b": (c.num_attention_heads * c.head_dim, c.q_lora_rank),
            "wo_b": (c.hidden_size, c.o_groups * c.o_lora_rank),
            "shared w13": (2 * shared, c.hidden_size),
            "shared w2": (c.hidden_size, shared),
            "indexer wq_b": (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            "engram wkv": ((c.hc_mult + 1) * c.hidden_size, c.engram_rows_per_token * c.engram_head_dim),
        }

    def product(
        self,
        row: str,
        op: str,
        shape: str,
        rows: int,
        fast: bool,
        weights: int,
        moved: int,
        target: Target,
        build: Callable[[], Run],
        peers: Mapping[str, Callable[[], Run]] | None = None,
    ) -> Case:
        """A case of `weights` FP8 weights, each used once a row; `moved` bf16 elements of activations a row."""
        return Case(
            row,
            op,
            shape,
            self.phase(rows),
            nbytes=weights * FP8 + 2.0 * rows * moved,
            flops=2.0 * rows * weights,
            build=build,
            kind="fp8" if fast else "bf16",
            variant="fast" if fast else "exact",
            target=target,
            peers=peers if peers and self.device.type == "cuda" else {},
        )

    def linear(self, name: str, n: int, k: int, rows: int, fast: bool) -> Case:
        def build() -> Run:
            x, weight = self.rows(rows, k, fast), self.matrix(n, k, fast)
            return lambda: gemm.linear(x, weight)

        def cublas_bf16() -> Run:
            x, weight = self.make.rows(rows, k), quant.values(self.fp8(n, k))
            return lambda: F.linear(x, weight)

        def cublas_fp8() -> Run:
            return scaled_mm(self.make.normal(-(-rows // 16) * 16, k), self.make.normal(n, k))

        decode = self.phase(rows) == "decode"
        share = 0.75 if decode and rows <= 64 else 0.65 if decode else 0.85
        peers = {"cuBLAS FP8": cublas_fp8} if fast else {"cuBLAS bf16": cublas_bf16}
        shape = f"{name} {n}x{k} M={rows}"
        return self.product("dense FP8", "linear", shape, rows, fast, n * k, n + k, Target(share), build, peers)

    def attention_inputs(self, rows: int, fast: bool) -> Case:
        c = self.c
        rank, width, inner = c.q_lora_rank, c.head_dim, c.num_attention_heads * c.head_dim

        def build() -> Run:
            h, positions, freqs = self.make.normal(rows, c.hidden_size), self.positions(rows), self.freqs(1)
            wqkv_a, wq_b = self.matrix(rank + width, c.hidden_size, fast), self.matrix(inner, rank, fast)
            q_norm, kv_norm = self.ones(rank), self.ones(width)
            weights = (wqkv_a, q_norm, wq_b, kv_norm)
            return lambda: served(fused.attention_inputs(h, positions, freqs, *weights, c.rms_norm_eps, fast))

        weights, moved = (rank + width) * c.hidden_size + inner * rank, c.hidden_size + inner + rank + width
        target = Target(0.75 if rows <= 64 else 0.65 if self.phase(rows) == "decode" else 0.80)
        return self.product(
            "attention inputs", "attention_inputs", f"T={rows}", rows, fast, weights, moved, target, build
        )

    def grouped_linear(self, rows: int, fast: bool) -> Case:
        c = self.c
        inner, groups, rank = c.num_attention_heads * c.head_dim, c.o_groups, c.o_lora_rank

        def build() -> Run:
            x = self.rows(rows * groups, inner // groups, fast).unflatten(0, (rows, groups))
            weight = quant.grouped(self.matrix(groups * rank, inner // groups, fast), groups)
            return lambda: gemm.grouped_linear(x, weight)

        target = Target(0.65 if self.phase(rows) == "decode" else 0.75)
        shape, weights = f"{groups}x{rank}x{inner // groups} T={rows}", rank * inner
        return self.product(
            "grouped wo_a", "grouped_linear", shape, rows, fast, weights, inner + groups * rank, target, build
        )

    def attention_output(self, rows: int, fast: bool) -> Case:
        """The grouped projection with the rotation back and both quantisations, and the projection over all groups."""
        c = self.c
        inner, groups, ranks = c.num_attention_heads * c.head_dim, c.o_groups, c.o_groups * c.o_lora_rank

        def build() -> Run:
            o, positions = self.make.normal(rows, c.num_attention_heads, c.head_dim), self.positions(rows)
            wo_a, wo_b = self.matrix(ranks, inner // groups, fast), self.matrix(c.hidden_size, ranks, fast)
            freqs = self.freqs(1)
            return lambda: served(fused.attention_output(o, positions, freqs, wo_a, wo_b, groups, True, fast))

        target = Target(0.65 if self.phase(rows) == "decode" else 0.75)
        weights, moved = ranks * (inner // groups + c.hidden_size), inner + c.hidden_size
        return self.product("grouped wo_a", "attention_output", f"T={rows}", rows, fast, weights, moved, target, build)

    # ---- experts; loads are even, as in the table of the peer ----

    def hit(self, rows: int) -> float:
        """Experts that at least one of `rows` rows goes to."""
        experts = self.c.n_routed_experts
        return experts * (1 - (1 - self.c.num_experts_per_tok / experts) ** rows)

    def experts(self, rows: int, variant: str) -> Case:
        """Permute, first product, SwiGLU x weight x Q8, second product, combine."""
        c, fast = self.c, variant == "fast"
        experts, k, one = c.n_routed_experts, c.num_experts_per_tok, 3 * c.hidden_size * c.moe_intermediate_size

        def build(peer: str | None = None) -> Run:
            """peer: one of the variants of the public kernel."""
            x = self.make.rows(rows, c.hidden_size)
            ids = routing(self.make, rows, k, torch.ones(experts))
            shares = torch.full((rows, k), 1 / k, device=self.device)
            w13, w2 = self.expert_weights(fast) if peer is None else self.peer_weights(peer)

            def run() -> Tensor:
                return moe_experts.experts(x, ids, shares, w13, w2, c.swiglu_limit, True, False, fast)

            if peer is not None:
                return lambda: _under(backends.use("humming"), run)
            return (lambda: _under(backends.invariant(), run)) if variant == "invariant" else run

        routed = rows * k
        phase = "decode" if routed <= 3072 else "prefill"
        us = CHAIN_US.get(routed) if self.sizes is RELEASE else None
        names = {"fast": ("carry", "group", "token"), "exact": ("exact",)}.get(variant, ())
        peers = {f"humming {name}": partial(build, name) for name in names}
        return Case(
            "MoE",
            "experts",
            f"R={routed} on {experts}",
            phase,
            nbytes=self.hit(rows) * one * FP4 + 6.0 * rows * c.hidden_size,
            flops=2.0 * routed * one,
            build=build,
            kind="fp8" if fast else "bf16",
            variant=variant,
            target=Target(
                share=0.70 if fast and phase == "prefill" else 0.75,
                us=us if us is None or variant != "invariant" else 1.1 * us,
            ),
            peers=peers if self.device.type == "cuda" else {},
        )

    def moe(self, rows: int, fast: bool) -> Case:
        """The whole sublayer; its router knows the experts of this rank only."""
        c = self.c
        experts, k, hidden = c.n_routed_experts, c.num_experts_per_tok, c.hidden_size
        inner, one = c.moe_intermediate_size, 3 * c.hidden_size * c.moe_intermediate_size

        def build() -> Run:
            h, gate = self.make.normal(rows, hidden), self.make.dense(experts, hidden)
            bias = self.make.normal(experts, dtype=torch.float32, scale=0.1)
            shared = (self.matrix(2 * inner, hidden, fast), self.matrix(hidden, inner, fast))
            weights = (*self.expert_weights(fast), *shared)
            router = (k, True, c.routed_scaling_factor)
            return lambda: served(fused.moe(h, gate, bias, *weights, *router, c.swiglu_limit, False, fast))

        phase = "decode" if rows * k <= 3072 else "prefill"
        nbytes = self.hit(rows) * one * FP4 + one * FP8 + 2.0 * experts * hidden + 4.0 * rows * hidden
        flops = 2.0 * rows * ((k + 1) * one + experts * hidden)
        kind, variant = ("fp8", "fast") if fast else ("bf16", "exact")
        target = Target(0.75 if phase == "decode" or not fast else 0.70)
        return Case("MoE", "moe", f"T={rows}, all of it", phase, nbytes, flops, build, kind, variant, target)

    def route(self, rows: int) -> Case:
        """The router over the experts of all eight ranks."""
        c = self.c
        experts, hidden = 8 * c.n_routed_experts, c.hidden_size

        def build() -> Run:
            h, gate = self.make.normal(rows, hidden), self.make.dense(experts, hidden)
            bias = self.make.normal(experts, dtype=torch.float32, scale=0.1)
            return lambda: moe_gate.route(h, gate, bias, c.num_experts_per_tok, True, c.routed_scaling_factor)

        nbytes, flops = 2.0 * hidden * (experts + rows), 2.0 * rows * experts * hidden
        return Case("MoE", "route", f"T={rows} of {experts}", self.phase(rows), nbytes, flops, build)

    # ---- what reads and writes the cache ----

    def attend(
        self, requests: int, per: int, phase: str, entries: bool = True, ratio: int = 1, rounded: bool = False
    ) -> Case:
        """Every row reads K entries of its own, or none; rows of one request share a window."""
        c = self.c
        heads, width, rows = c.num_attention_heads, c.head_dim, requests * per
        topk = c.index_topk if entries else 0
        record, entry = 33 * width / 32, 9 * width / 16  # bytes of a window row, of a compressed entry

        def build() -> Run:
            storage, at = self.storage(), decode_rows(requests, per, 4 * c.sliding_window, self.device)
            layer = self.source(ratio)
            q, kw = self.make.normal(rows, heads, width), self.make.rows(rows, width)
            paged, ring = self.paged(storage, layer, "main"), kv_copy.Ring(storage.rings[layer], width, "fp8")
            step = max((storage.num_blocks - 1) * paged.entries // max(topk, 1), 1)
            scattered = self.make.integers(0, step, rows, topk) + step * torch.arange(topk, device=self.device)
            records, main = ((scattered + paged.entries).int(), paged) if entries else (None, None)
            rest = (main, records, self.make.normal(heads, dtype=torch.float32), width**-0.5, rounded)
            return lambda: attn_sparse.attend(q, kw, ring, at, c.sliding_window, *rest)

        gathered = requests * c.sliding_window * record + rows * topk * entry
        flops = 4.0 * rows * heads * (c.sliding_window + topk) * width
        wanted = Target(tflops=400.0) if phase == "prefill" else Target(tflops=350.0) if rows > 64 else Target(0.70)
        return Case(
            "sparse MQA",
            "attend",
            f"T={rows}, {per} a request",
            phase,
            nbytes=gathered + 2.0 * rows * width * (2 * heads + 1),
            flops=flops,
            build=build,
            target=wanted,
        )

    def select_records(self, context: int, requests: int, per: int, restricted: bool) -> Case:
        """A decode step. Unrestricted, the candidate blocks of later layers are chosen too; restricted, from those."""
        rows, limit = requests * per, self.c.candidate_topk_blocks * self.c.candidate_block_size
        at = partial(decode_rows, requests, per, context, self.device)
        scored = min(context, limit) if restricted else context
        wanted = Target(tflops=350.0) if per > 1 and not restricted else Target(0.70)
        shape = f"n={_short(context)}, {requests} requests x {per}"
        readers = rows if restricted else requests  # each row has candidates of its own
        return self.selection(shape, "decode", at, context + per, per >= 4, restricted, readers * scored, rows, wanted)

    def select_prefill(self, before: int, rows: int, restricted: bool) -> Case:
        """One chunk: rows share the reading of keys."""
        limit = self.c.candidate_topk_blocks * self.c.candidate_block_size
        at = partial(decode_rows, 1, rows, before, self.device)
        scored = min(before + rows, limit if restricted else before + rows)
        shape, wanted = f"{rows} rows after {_short(before)}", Target(tflops=350.0)
        return self.selection(shape, "prefill", at, before + rows, True, restricted, scored, rows, wanted)

    def selection(
        self,
        shape: str,
        phase: str,
        where: Callable[[], kv_copy.Rows],
        longest: int,
        chunked: bool,
        restricted: bool,
        keys_read: int,
        rows: int,
        target: Target,
    ) -> Case:
        c = self.c
        heads, width, topk = c.index_n_heads, c.index_head_dim, c.index_topk
        emit, size = c.candidate_topk_blocks, c.candidate_block_size

        def build() -> Run:
            storage, at = self.storage(), where()
            requests, blocks = len(set(at.slots.tolist())), blocks_for(longest, storage.block_tokens)
            tables = block_tables(requests, blocks, storage.num_blocks, self.device)
            q = quant.roundtrip_mxfp4_reference(self.make.normal(rows, heads, width))
            w = self.make.normal(rows, heads, scale=(heads * width) ** -0.5)
            keys, visible = self.paged(storage, self.source(1), "index"), at.positions + 1
            candidates = self.candidates(rows, longest // size) if restricted else None
            rest = (topk, False, candidates, 0 if restricted else emit, size, chunked)
            return lambda: indexer.select_records(q, w, keys, tables, at, visible, *rest)

        per_row = min(longest, emit * size) if restricted else longest
        return Case(
            "candidates" if restricted else "indexer",
            "select_records",
            shape,
            phase,
            nbytes=keys_read * 17 * width / 32 + rows * (2.0 * heads * width + 4.0 * topk),
            flops=2.0 * rows * per_row * heads * width,
            build=build,
            target=target,
        )

    def candidates(self, rows: int, blocks: int) -> Tensor:
        """int32 [rows, emit] ascending, -1 padded: one block out of each of `emit` equal runs of the sequence."""
        emit = self.c.candidate_topk_blocks
        step = max(blocks // emit, 1)
        chosen = step * torch.arange(emit, device=self.device) + self.make.integers(0, step, rows, emit)
        return torch.where(chosen < blocks, chosen, -1).int()

    def compressor(self, requests: int, per: int) -> Case:
        """From the attention input to both records of the groups that close, at ratio 2: two products and two ops."""
        c, rows, ratio = self.c, requests * per, 2
        width, key, hidden = c.head_dim, c.index_head_dim, c.hidden_size

        def build() -> Run:
            storage, layer = self.storage(), self.source(ratio)
            at = decode_rows(requests, per, 4 * c.sliding_window, self.device)
            h, ones, key_ones = self.make.normal(rows, hidden), self.ones(width), self.ones(key)
            both, wk = self.make.dense(2 * width, hidden), self.make.dense(key, width)
            main, index = self.paged(storage, layer, "main"), self.paged(storage, layer, "index")
            each = torch.arange(rows, device=self.device) + main.entries
            ids = torch.where((at.positions + 1) % ratio == 0, each, -1)
            where, freqs, eps = (at, ratio), self.freqs(ratio), c.rms_norm_eps

            def run() -> None:
                a, b = gemm.linear(h, both, torch.float32).split(width, dim=1)
                rest = (ones, eps, freqs, main, ids, h.dtype)
                latent = compress.compress_store(a, b, storage.carry[layer], *where, *rest)
                compress.key_store(gemm.linear(latent, wk), *where, key_ones, eps, freqs, index, ids)

            return run

        weights = 2 * width * hidden + key * width
        stored = (9 * width / 16 + 17 * key / 32) / ratio
        return Case(
            "compressor, key, pack",
            "compress_store",
            f"T={rows}, ratio {ratio}",
            self.phase(rows),
            nbytes=2.0 * weights + rows * (2 * hidden + 16 * width + stored),
            flops=2.0 * rows * weights,
            build=build,
            target=Target(0.70 if self.phase(rows) == "decode" else 0.75),
        )

    # ---- streams and n-gram memory ----

    def hyper_read(self, rows: int) -> Case:
        """The last sublayer's result written, mixes, Sinkhorn, the next sublayer's input read and normed."""
        c = self.c
        streams, hidden, mixes = c.hc_mult, c.hidden_size, (2 + c.hc_mult) * c.hc_mult

        def build() -> Run:
            s, out = self.make.normal(rows, streams, hidden), self.make.normal(rows, hidden)
            pre, post = (self.make.normal(rows, streams, dtype=torch.float32).sigmoid() for _ in range(2))
            comb = torch.full((rows, streams, streams), 1 / streams, device=self.device)
            fn = self.make.normal(mixes, streams * hidden, dtype=torch.float32, scale=(streams * hidden) ** -0.5)
            base = self.make.normal(mixes, dtype=torch.float32)
            state = hyper.Streams(s, pre, out, post, comb)
            rest = (fn, self.ones(3), base, self.ones(hidden), c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters)
            return lambda: served(fused.hyper_read(state, *rest))

        moved = 2.0 * rows * hidden * (2 * streams + 2)
        flops = 2.0 * rows * mixes * streams * hidden
        nbytes = moved + 4.0 * mixes * streams * hidden
        target = Target(1 / 1.3)
        return Case("mHC", "hyper_read", f"T={rows}", self.phase(rows), nbytes, flops, build, target=target)

    def table_rows(self, rows: int, place: str) -> Case:
        """Random rows of a table: in the device's memory, in the host's and read over the link, or sent by the host."""
        count, width = rows * self.c.engram_rows_per_token, self.c.engram_head_dim
        record = 33 * width / 32

        def build() -> Run:
            codes, scales = self.table("device" if place == "device" else "host")
            ids = self.make.integers(0, codes.shape[0], count)
            if place != "staged":
                return lambda: engram.table_rows(codes, scales, ids, torch.bfloat16)
            at, each = ids.cpu(), torch.arange(count, device=self.device)
            parts = [codes.view(torch.uint8), scales]
            found = [torch.empty(count, part.shape[1], dtype=torch.uint8, pin_memory=True) for part in parts]
            here = [part.to(self.device) for part in found]

            def run() -> Tensor:
                for part, some, copy in zip(parts, found, here, strict=True):
                    torch.index_select(part, 0, at, out=some)
                    copy.copy_(some, non_blocking=True)
                return engram.table_rows(here[0].view(quant.E4M3), here[1], each, torch.bfloat16)

            return run

        return Case(
            "Engram gather",
            "table_rows",
            f"T={rows}, {place}",
            self.phase(rows),
            nbytes=count * (record + 2 * width),
            flops=0.0,
            build=build,
            target=Target(0.60) if place == "device" else Target(),
            over_link=0.0 if place == "device" else count * record,
            on_host=place == "staged",
        )

    def engram_gate(self, rows: int) -> Case:
        streams, hidden = self.c.hc_mult, self.c.hidden_size

        def build() -> Run:
            s, keys = (self.make.normal(rows, streams, hidden) for _ in range(2))
            value, weight = self.make.normal(rows, hidden), self.make.normal(streams, hidden, dtype=torch.float32)
            return lambda: engram.engram_gate(s, keys, value, weight, self.c.rms_norm_eps)

        nbytes = 2.0 * rows * hidden * (3 * streams + 1)
        target = Target(0.75)
        return Case("Engram gate", "engram_gate", f"T={rows}", self.phase(rows), nbytes, 0.0, build, target=target)

    # ---- the end of the step ----

    def head(self, rows: int) -> Case:
        vocab, hidden = self.c.vocab_size, self.c.hidden_size

        def build() -> Run:
            h, weight = self.make.normal(rows, hidden), self.keep("head", lambda: self.make.dense(vocab, hidden))
            return lambda: gemm.linear(h, weight, torch.float32)

        nbytes, flops = 2.0 * vocab * hidden + rows * (2.0 * hidden + 4.0 * vocab), 2.0 * rows * vocab * hidden
        return Case("head", "linear", f"head M={rows}", "decode", nbytes, flops, build, target=Target(0.80))

    def sample_rows(self, rows: int, logits: str = "peaked") -> Case:
        """logits  a name of `LOGITS`."""
        vocab, shape = self.c.vocab_size, f"R={rows}, top-p 0.95, {logits} logits"
        target = Target(us=60.0) if logits == "peaked" else Target()

        def build() -> Run:
            x = self.make.normal(rows, vocab, dtype=torch.float32, scale=LOGITS[logits])
            seeds, positions = self.make.integers(0, 1 << 40, rows), self.positions(rows)
            temperature, top_p, min_p = (
                torch.full((rows,), x, dtype=torch.float64, device=self.device) for x in (0.8, 0.95, 0.0)
            )
            top_k = torch.zeros(rows, dtype=torch.int64, device=self.device)
            return lambda: sample.sample_rows(x, seeds, positions, temperature, top_k, top_p, min_p)

        nbytes = 4.0 * rows * vocab
        return Case("sampling", "sample_rows", shape, "decode", nbytes, 0.0, build, target=target)

    # ---- operands that several cases share ----

    def keep(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once as long as cases of one kind are built."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def forget(self) -> None:
        self._kept.clear()

    def phase(self, rows: int) -> str:
        return "decode" if rows <= self.sizes.decode_rows else "prefill"

    def ones(self, count: int) -> Tensor:
        return torch.ones(count, device=self.device)

    def positions(self, rows: int) -> Tensor:
        return self.make.integers(0, 1000, rows)

    def rows(self, rows: int, width: int, fast: bool) -> Tensor:
        """An input of a product, on the grid of its profile."""
        x = self.make.rows(rows, width)
        return quant.roundtrip_carry(x) if fast else x

    def fp8(self, n: int, k: int) -> quant.Fp8Matrix:
        return self.keep(("fp8", n, k), lambda: self.make.fp8(n, k))

    def matrix(self, n: int, k: int, fast: bool) -> quant.Matrix:
        """A dense weight as a profile holds it on this device."""

        def make() -> quant.Matrix:
            weight = quant.by_row(self.fp8(n, k)) if fast else self.fp8(n, k)
            return weight if self.device.type == "cuda" else quant.values(weight)

        return self.keep(("matrix", n, k, fast), make)

    def plain_experts(self) -> list[quant.Fp4Matrix]:
        """w13 and w2 as a checkpoint has them."""
        c = self.c
        shapes = ((2 * c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size))
        return self.keep("experts", lambda: [self.make.fp4(c.n_routed_experts, n, k) for n, k in shapes])

    def expert_weights(self, fast: bool) -> tuple[Any, Any]:
        """w13 and w2 as the op of a profile reads them: a backend may have a `prepare` beside its `experts`."""
        plain = self.plain_experts()

        def make() -> Any:
            if self.device.type != "cuda":
                return [quant.values(weight) for weight in plain]
            run = backends.pick("experts", plain[0].codes)
            prepare = getattr(import_module(run.__module__), "prepare", None) if run is not None else None
            return prepare(*plain, NUMERICS["fast" if fast else "production"]) if prepare is not None else plain

        w13, w2 = self.keep(("prepared", fast), make)
        return w13, w2

    def peer_weights(self, variant: str) -> tuple[Any, Any]:
        """w13 and w2 for a variant of the public kernel. Raises BenchError where it does not run."""
        humming = import_module("benthic.kernels.humming.moe_experts")
        if not humming.available():
            raise BenchError("the backend humming", "it is not installed, or does not run on this device")
        w13, w2 = self.keep(
            ("peer", variant), lambda: [humming.pack(weight, variant) for weight in self.plain_experts()]
        )
        return w13, w2

    def freqs(self, ratio: int) -> Tensor:
        theta = self.c.compress_rope_theta if ratio else self.c.rope_theta
        return rope.rope_frequencies(self.c.qk_rope_head_dim, theta).to(self.device)

    def storage(self) -> Storage:
        spec, slots = cache_spec(self.config, drafter=False), 1 + max(requests for requests, _ in self.sizes.attend)
        slots = max(slots, 1 + max(requests for _, requests, _ in self.sizes.contexts))
        return self.keep("storage", lambda: self.make.storage(spec, self.sizes.pool_blocks, slots, rollback=5))

    def source(self, ratio: int) -> int:
        """A layer that stores entries of this ratio."""
        return next(plan.index for plan in layer_plan(self.config) if plan.owns_kv and plan.ratio == ratio)

    def paged(self, storage: Storage, layer: int, part: Part) -> kv_copy.Paged:
        at = storage.layout.part(layer, part)
        return kv_copy.Paged(storage.pool, at.data_offset, at.scale_offset, at.entries, at.channels, at.format)

    def on_host(self, part: Tensor) -> Tensor:
        """A copy in the memory that tables of a model have there."""
        flat = part.view(torch.uint8).flatten()
        room = locked(flat.nbytes, self.device, lambda room: torch.frombuffer(room, dtype=torch.uint8).copy_(flat))
        return room.view(part.dtype).view(part.shape)

    def table(self, place: str) -> tuple[Tensor, Tensor]:
        """Codes and scales of an n-gram table."""
        count, width = self.sizes.table_rows, self.c.engram_head_dim

        def make() -> list[Tensor]:
            scales = self.make.integers(119, 122, count, width // 32, dtype=torch.uint8)
            parts = [self.make.fp8_codes(count, width), scales]
            return parts if place == "device" else [self.on_host(part) for part in parts]

        codes, scales = self.keep(("table", place), make)
        return codes, scales


def _short(tokens: int) -> str:
    """128K for 131072; nearly a million counts as 1M."""
    millions, thousands = round(tokens / (1 << 20)), round(tokens / 1024)
    return f"{millions}M" if millions else f"{thousands}K" if thousands else str(tokens)


def served(result: Any) -> Any:
    """What a fused op gave. Raises BenchError when no backend has it here."""
    if result is None:
        raise BenchError("a run of ops", "no backend takes it together on this device")
    return result


def _under(context: Any, run: Run) -> Any:
    with context:
        return run()
