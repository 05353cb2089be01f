"""One rank of an expert-parallel deployment at full depth on one GPU: its step by part, beside the floor.

The model classes are the real ones, the weights random and packed, each layer with its own, so that nothing but what
a real step finds in the cache is there. The rank owns 1/N of the experts and as many routed rows as tokens times
experts a token, in the skew that minnow shows. What would go to other ranks and come back is copied inside the device
instead, the same number of bytes. The drafter and the network are not counted. The head's weights are scaled so that
logits are as far apart as a language model's, and top-p leaves a few hundred tokens to draw from.

A decode step (backbone, head, draw) is one CUDA graph; its parts are timed by events in a second graph of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benthic import plots
from benthic.bench import report
from benthic.bench.cases import LOGITS, RELEASE, SMALL, Case, Cases
from benthic.bench.operands import Operands, RandomSource, block_tables, decode_rows, spread_loads
from benthic.bench.parts import Parts, time_parts
from benthic.bench.report import Measure
from benthic.bench.timing import Ceilings, Run, Timer, capture, measure_ceilings, release, trace
from benthic.cache.spec import block_layout, blocks_for
from benthic.config import GpuConfig
from benthic.engine import batch as batches
from benthic.engine.graphs import CudaRecorder, Graphs, Record, Recorded
from benthic.errors import BenchError, MissingDependency
from benthic.kernels import backends, sample
from benthic.models import deepseek_v41
from benthic.models.base import Batch
from benthic.models.deepseek_v41 import DeepseekV41, MoE
from benthic.models.deepseek_v41_config import ModelConfig, TextConfig, layer_plan
from benthic.models.device_memory import DeviceLayer
from benthic.models.modules import Stack
from benthic.testing.checkpoints import tiny_config
from benthic.types import NUMERICS, Chunk, StepPlan

# Loads of minnow's 16 experts over the mean, sorted; 24 steps of about 500 held-out rows, mean of 10 layers.
SKEW = (1.83, 1.52, 1.41, 1.28, 1.18, 1.11, 1.04, 0.97, 0.91, 0.86, 0.81, 0.75, 0.69, 0.63, 0.56, 0.48)
LARGEST_GRAPH = "all layers as in the largest graph, launched"
SHORT_CHUNKS = "all layers in short chunks"
REPLAYED = "all layers in short chunks, replayed"
Place = tuple[int, int]  # of a chunk: first position, rows
PREFILLS = ("encoder", "all layers", LARGEST_GRAPH, SHORT_CHUNKS, REPLAYED)
DRAFTED = 6  # rows of a request that verifies five drafts
ACCEPTED = 3.5  # tokens such a step gives, assumed
NEEDED = ("attend", "select_records", "write_records", "ring_write", "linear", "experts", "route", "sample_rows")
STEP_TARGET = 1.5  # times the floor
RATE_TARGET, USER_TARGET, PREFILL_TARGET = 5000.0, 80.0, 20000.0  # tokens/s of a GPU, of a user; prompt tokens/s


@dataclass(frozen=True, slots=True)
class Options:
    ranks: int = 8
    rows: tuple[int, ...] = (64, 192, 384, 1536)
    contexts: tuple[int, ...] = (4096, 32768, 131072, 1048576)
    prefill: int = 32768  # prompt tokens; 0: leave out
    chunk: int = 4096
    numerics: str = "production"
    pool_bytes: int = 56 << 30  # most that blocks take, of a tiny model a thousandth; longer tables share blocks
    budget_seconds: float = 420.0  # steps that would begin later are left out
    tiny: bool = False
    device: str = "cuda"
    seed: int = 0


# ---- the rank --------------------------------------------------------------------------------------------------------


def rank_config(ranks: int, tiny: bool) -> dict[str, Any]:
    """A configuration with the experts of one rank and n-gram tables that fit beside them."""
    if tiny:
        return tiny_config("tiny", vision_config=None, n_routed_experts=16, max_position_embeddings=1 << 20)
    whole = tiny_config("v41_flash", vision_config=None)
    experts = whole["text_config"]["n_routed_experts"] // ranks
    return tiny_config("v41_flash", vision_config=None, n_routed_experts=experts, engram_vocab_size=500_000)


class Rank:
    """The model, its cache, and the stand-in for the network."""

    def __init__(self, options: Options, device: torch.device):
        self.options, self.device = options, device
        self.json = rank_config(options.ranks, options.tiny)
        self.config = ModelConfig.from_json(self.json)
        text = self.config.text
        self.make = Operands(device, options.seed)
        classes = torch.arange(text.vocab_size, device=device) % text.engram_compressed_vocab_size
        with torch.device(device):
            self.model = DeepseekV41(self.config, NUMERICS[options.numerics], classes).eval()
        self.model.load(RandomSource(self.config, self.make))
        assert self.model.head.weight is not None
        self.model.head.weight.data.mul_(LOGITS["peaked"])  # else the spread of logits is 1
        self.requests = max(split_rows(rows)[0] for rows in options.rows)
        longest = max((*options.contexts, options.prefill + options.chunk))
        spec = self.model.cache_spec
        blocks = blocks_for(longest + DRAFTED)
        room = options.pool_bytes // (1000 if options.tiny else 1) // block_layout(spec.append).block_bytes
        slots = self.requests + 1
        self.storage = self.make.storage(
            spec, 1 + min(room, self.requests * blocks), slots, rollback=DRAFTED - 1, table_blocks=blocks
        )
        self.exchange = Exchange(self)

    def decode_batch(self, requests: int, per: int, context: int) -> Batch:
        """The next `per` rows of each request after `context` tokens; block tables are set to match."""
        storage, text = self.storage, self.config.text
        blocks = blocks_for(context + per)
        tables = block_tables(requests, blocks, storage.num_blocks, self.device)
        storage.tables.zero_()
        storage.tables[: requests + 1, :blocks] = tables
        rows = decode_rows(requests, per, context, self.device)
        ids = self.make.integers(64, text.vocab_size - 64, requests * per)
        every = torch.arange(requests * per, device=self.device)
        return Batch.on_device(ids, storage.history[rows.slots], rows, every, chunked=per >= 4)

    def prefill_batch(self, before: int, rows: int) -> Batch:
        """One chunk of a long prompt, in slot 1."""
        batch = self.decode_batch(1, rows, before)
        table = tuple(self.storage.tables[1, : blocks_for(before + rows)].tolist())
        return replace(batch, starts=(0, rows), firsts=(before,), slots=(1,), tables=(table,))

    def step(self, batch: Batch) -> Run:
        """Backbone, head and draw of every row."""
        count = batch.ids.shape[0]
        seeds = self.make.integers(0, 1 << 40, count)
        temperature, top_p, min_p = (
            torch.full((count,), x, dtype=torch.float64, device=self.device) for x in (0.8, 0.95, 0.0)
        )
        top_k = torch.zeros(count, dtype=torch.int64, device=self.device)

        def run() -> object:
            memory = self.model.memory(self.storage, batch)
            logits = self.model.logits(self.model.forward(batch, memory).hidden)
            return self.draw(logits, seeds, batch.positions + 1, temperature, top_k, top_p, min_p)

        return run

    def draw(self, logits: Tensor, *settings: Tensor) -> object:
        return sample.sample_rows(logits, *settings)

    def encode(self, batch: Batch) -> None:
        """What a prompt token needs whose own prediction nobody reads: layers below the split, and what the decoder
        will look up of it, which is made from the input of the split layer's attention."""
        model, split = self.model, self.config.text.split
        memory = model.memory(self.storage, batch)
        with first_layers(model, split):
            hidden = model.forward(batch, memory).hidden
        if split == len(model.plan):
            return
        layer, kv = list(model.layers)[split], memory.layer(split)
        attention = layer.attn
        assert attention.compressor is not None
        assert attention.indexer is not None
        latent = attention.compressor(layer.attn_norm(hidden), kv, attention.freqs)
        attention.indexer.store_keys(latent, kv, attention.freqs)


@contextmanager
def first_layers(model: DeepseekV41, count: int) -> Iterator[None]:
    """Inside this block the model ends after `count` layers."""
    plan, layers = model.plan, model.layers
    model.plan, model.layers = plan[:count], Stack(list(layers)[:count])
    try:
        yield
    finally:
        model.plan, model.layers = plan, layers


def split_rows(rows: int) -> tuple[int, int]:
    """(requests, rows of each): rows that verify drafts come six a request."""
    return (rows // DRAFTED, DRAFTED) if rows % DRAFTED == 0 else (rows, 1)


def exchanged_bytes(text: TextConfig, ranks: int) -> tuple[float, float]:
    """What a token sends to its experts' ranks and gets back: FP8 with its scales there, bf16 back.

    Under even routing k experts are on N (1 - (1 - 1/N)^k) ranks.
    """
    reached = ranks * (1 - (1 - 1 / ranks) ** text.num_experts_per_tok)
    return reached * text.hidden_size * 33 / 32, reached * text.hidden_size * 2


class Exchange:
    """Stands in for dispatch and combine around each layer's experts, and shapes and counts their loads."""

    def __init__(self, rank: Rank):
        text, options = rank.config.text, rank.options
        self.there, self.back = exchanged_bytes(text, options.ranks)
        words = self.words(max(*options.rows, options.chunk) * max(self.there, self.back))
        self.room = [torch.zeros(words, dtype=torch.int64, device=rank.device) for _ in range(2)]
        self.loads = spread_loads(SKEW, text.n_routed_experts).to(rank.device)
        self.shape = False  # move each router's bias so that loads follow the skew
        self.counts: list[Tensor] | None = None  # loads of each layer, when wanted

    @staticmethod
    def words(size: float) -> int:
        return -(-int(size) // 8)

    def copy(self, size: float) -> None:
        """Read and write `size` bytes; a kernel, since a graph leaves a plain copy to slower copy engines."""
        words = self.words(size)
        torch.bitwise_not(self.room[1][:words], out=self.room[0][:words])

    def watch(self, moe: MoE, h: Tensor) -> None:
        if not self.shape and self.counts is None:
            return
        scores = F.softplus(h.float() @ moe.gate.weight.float().t()).sqrt()
        if self.shape:
            _shape(moe.bias.data, scores, moe.experts_per_token, self.loads)
        if self.counts is not None:
            self.counts.append(_loads(scores + moe.bias, moe.experts_per_token))

    @contextmanager
    def installed(self) -> Iterator[None]:
        plain = MoE.forward

        def forward(moe: MoE, h: Tensor, images: Tensor | None) -> Tensor:
            self.watch(moe, h)
            self.copy(h.shape[0] * self.there)
            out = plain(moe, h, images)
            self.copy(h.shape[0] * self.back)
            return out

        setattr(MoE, "forward", forward)  # noqa: B010
        try:
            yield
        finally:
            setattr(MoE, "forward", plain)  # noqa: B010


def _loads(scores: Tensor, k: int) -> Tensor:
    """[E] f32: how often each expert is among a row's best k."""
    ids = scores.topk(k, dim=1).indices
    return torch.zeros_like(scores).scatter_(1, ids, 1.0).sum(dim=0)


def _shape(bias: Tensor, scores: Tensor, k: int, loads: Tensor, rounds: int = 150) -> None:
    """Training's rule, with the skew for its aim: raise the bias of experts that get too little, lower the others'."""
    wanted = loads / loads.sum() * (scores.shape[0] * k)
    bias.zero_()
    for i in range(rounds):
        bias += 0.1 * 0.96**i * torch.sign(wanted - _loads(scores + bias, k))


# ---- parts -----------------------------------------------------------------------------------------------------------

EXCHANGE, DRAW, REST = "exchange copies", "draw", "rest"
PARTS: Parts = {
    (deepseek_v41.HyperConnection, "read"): "streams",
    (deepseek_v41.Engram, "forward"): "n-gram memory",
    (deepseek_v41.Attention, "inputs"): "attention inputs",
    (deepseek_v41.Compressor, "forward"): "compressor, keys",
    (deepseek_v41.Indexer, "store_keys"): "compressor, keys",
    (deepseek_v41.Indexer, "query"): "index selection",
    (DeviceLayer, "select"): "index selection",
    (DeviceLayer, "attend"): "attention",
    (deepseek_v41.Attention, "output"): "attention output",
    (deepseek_v41.MoE, "forward"): "experts",
    (Exchange, "copy"): EXCHANGE,
    (deepseek_v41.DeepseekV41, "logits"): "head",
    (Rank, "draw"): DRAW,
}


# ---- floors ----------------------------------------------------------------------------------------------------------


def floors(options: Options, ceilings: Ceilings, requests: int, per: int, context: int, hit: float) -> dict[str, float]:
    """Seconds that each part of a decode step cannot beat; the formulas are those of the kernel cases.

    hit  experts of a layer that some row goes to, as counted.
    """
    sizes = replace(SMALL if options.tiny else RELEASE, config=rank_config(options.ranks, options.tiny))
    cases = Cases(sizes, torch.device("cpu"), 0)
    rows, text, fast = requests * per, cases.c, NUMERICS[options.numerics].one_scale
    found: dict[str, float] = {}

    def add(part: str, case: Case, times: int = 1, fewer_bytes: float = 0.0) -> None:
        seconds = ceilings.floor(case.nbytes - fewer_bytes, case.flops, case.kind)
        found[part] = found.get(part, 0.0) + times * seconds

    plans = layer_plan(cases.config)
    layers = len(plans)
    untouched = (cases.hit(rows) - hit) * 3 * text.hidden_size * text.moe_intermediate_size * (0.5 + 1 / 32)
    add("streams", cases.hyper_read(rows), 2 * layers)
    add("attention inputs", cases.attention_inputs(rows, fast), layers)
    add("attention output", cases.attention_output(rows, fast), layers)
    for plan in plans:
        add("attention", cases.attend(requests, per, "decode", entries=plan.ratio > 0))
    add("experts", cases.moe(rows, fast), layers, untouched)
    found[EXCHANGE] = layers * 2 * rows * sum(exchanged_bytes(text, options.ranks)) / ceilings.copy_bytes
    for plan in plans:
        if plan.owns_kv:
            add("compressor, keys", cases.compressor(requests, per))
        if plan.selects:
            entries = context // plan.ratio
            add("index selection", cases.select_records(entries, requests, per, plan.candidates_from is not None))
            wide, heads = text.index_n_heads * text.index_head_dim, text.index_n_heads
            add("index selection", cases.linear("indexer wq_b", wide, text.q_lora_rank, rows, fast))
            found["index selection"] += ceilings.floor(2.0 * text.hidden_size * (heads + rows), 0.0)
        if plan.engram is not None:
            width = text.engram_rows_per_token * text.engram_head_dim
            add("n-gram memory", cases.table_rows(rows, "device"))
            add("n-gram memory", cases.linear("", (text.hc_mult + 1) * text.hidden_size, width, rows, fast))
            add("n-gram memory", cases.engram_gate(rows))
    add("head", cases.head(rows))
    add(DRAW, cases.sample_rows(rows))
    return found


def prefill_floor(c: TextConfig, numerics: str, ceilings: Ceilings, layers: int) -> float:
    """Seconds a prompt token's products take at the matrix ceiling of the profile; attention and indexer left out."""
    fast = NUMERICS[numerics].one_scale
    inner, ranks = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    attention = (c.q_lora_rank + c.head_dim) * c.hidden_size + inner * c.q_lora_rank
    attention += ranks * (inner // c.o_groups + c.hidden_size)
    experts = 3 * c.hidden_size * c.moe_intermediate_size * (c.num_experts_per_tok + 1)
    engram = len(c.engram_layer_ids) * (c.hc_mult + 1) * c.hidden_size * c.engram_rows_per_token * c.engram_head_dim
    flops = 2.0 * (layers * (attention + experts) + engram)
    return flops / (ceilings.fp8_flops if fast else ceilings.bf16_flops)


# ---- the runs --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def run(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; `say` hears what is being done. A step that fails is reported as such. Raises BenchError."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError("a rank on a GPU", "torch sees none; --tiny --device cpu runs a small one")
    missing = [
        op for op in NEEDED if device.type == "cuda" and backends.pick(op, torch.empty(0, device=device)) is None
    ]
    if missing:  # plain torch in their place would take minutes a step, and wait for the device
        raise BenchError("a rank on a GPU", f"no backend serves {', '.join(missing)}")
    settings = {
        "ranks": options.ranks,
        "numerics": options.numerics,
        "tiny": options.tiny,
        "accepted_tokens_per_step": ACCEPTED,
        "skew": SKEW,
    }
    head = report.header("rank", options.seed, settings)
    started = perf_counter()
    timer = Timer(device)
    say("ceilings")
    ceilings = measure_ceilings(timer)
    say("weights and cache")
    rank = Rank(options, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    built = perf_counter() - started
    say(f"built in {built:.0f} s")
    steps: list[dict[str, Any]] = []
    left_out: list[str] = []
    with rank.exchange.installed():
        compiled = _guarded(lambda: compile_kernels(rank, say)) if device.type == "cuda" else {}
        failed = _guarded(lambda: shape_loads(rank))
        for rows in options.rows:
            for context in options.contexts:
                name = f"{rows} rows at {short(context)}"
                if perf_counter() - started > options.budget_seconds:
                    left_out.append(name)
                    continue
                found: dict[str, Any] = {"rows": rows, "context": context}
                found |= _guarded(lambda rows=rows, context=context: decode(rank, timer, ceilings, rows, context))
                steps.append(found)
                say(step_line(found))
                release(device)
        prefill = _guarded(lambda: time_prefill(rank, ceilings)) if options.prefill else {}
    return (
        head
        | {
            "versions": report.versions(),
            "ceilings": ceilings.json(),
            "model": describe(rank),
            "built_seconds": built,
            "compiled": compiled,
            "seconds": perf_counter() - started,
            "steps": steps,
            "prefill": prefill,
            "left_out": left_out,
            "measures": measures(steps, prefill, targets=not options.tiny),
        }
        | ({"skew_error": failed["error"]} if failed else {})
    )


def _guarded(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return run()
    except Exception as error:  # the other steps still count
        return {"error": f"{type(error).__name__}: {error}"[:400]}


def compile_kernels(rank: Rank, say: Callable[[str], None]) -> dict[str, Any]:
    """What all steps need, side by side, before the first of them runs."""
    from benthic.kernels.triton import warm

    options, started = rank.options, perf_counter()
    jobs: dict[warm.Job, None] = {}
    with warm.noted(jobs):
        for rows in options.rows:
            for context in options.contexts:
                rank.step(rank.decode_batch(*split_rows(rows), context - DRAFTED))()
        if options.prefill:
            short_chunk = max(options.chunk // 8, 1)
            for rows in dict.fromkeys((options.chunk, largest_graph(options), short_chunk)):
                batch = rank.prefill_batch(0, min(rows, options.prefill))
                rank.model.forward(batch, rank.model.memory(rank.storage, batch))
                if rows == options.chunk:
                    rank.encode(batch)
            pass_columns(rank, prompt_columns(rank, short_chunk))
    failures = warm.build(jobs)
    seconds = perf_counter() - started
    say(f"{len(jobs)} kernels ready in {seconds:.0f} s" + (f", {len(failures)} do not compile" if failures else ""))
    return {"kernels": len(jobs), "failed": [failure.job.kernel for failure in failures], "seconds": seconds}


def shape_loads(rank: Rank) -> dict[str, Any]:
    """One forward pass at the most rows there will be, in which each router's bias is set."""
    requests, per = split_rows(max(rank.options.rows))
    batch = rank.decode_batch(requests, per, min(rank.options.contexts))
    rank.exchange.shape = True
    try:
        rank.step(batch)()
    finally:
        rank.exchange.shape = False
    return {}


def decode(rank: Rank, timer: Timer, ceilings: Ceilings, rows: int, context: int) -> dict[str, Any]:
    """One decode step: time, parts, floors, idle share."""
    requests, per = split_rows(rows)
    context -= DRAFTED  # so that 1M still has its last rows inside
    step = rank.step(rank.decode_batch(requests, per, context))
    rank.exchange.counts = []
    try:
        step()  # counts where the rows go
    finally:
        counts, rank.exchange.counts = torch.stack(rank.exchange.counts), None
    hit = (counts > 0).sum(dim=1).float().mean().item()
    floor = floors(rank.options, ceilings, requests, per, context, hit)
    timed = timer.time(step)
    took, total = timed.warm, sum(floor.values())
    tokens = requests * (ACCEPTED if per > 1 else 1.0)
    found: dict[str, Any] = {
        "requests": requests,
        "rows_a_request": per,
        "step_ms": 1e3 * took,
        "floor_ms": 1e3 * total,
        "times_floor": took / total,
        "in_graph": timed.captured,
        "tokens_per_second": tokens / took,
        "tokens_per_second_a_user": tokens / requests / took,
        "experts_hit": hit,
        "largest_load": (counts.amax(dim=1) / counts.mean(dim=1)).mean().item(),
        "floors_ms": {part: 1e3 * seconds for part, seconds in floor.items()},
    }
    parts = time_parts(step, PARTS, rank.device)
    found["parts_ms"] = {part: 1e3 * seconds for part, seconds in parts.items()}
    found["parts_ms"][REST] = 1e3 * max(took - sum(parts.values()), 0.0)
    if timed.captured:
        graph = capture([step], rank.device)
        seen = trace(graph.replay, 5)
        graph.reset()
        found["idle_share"] = max(1 - seen.busy / took, 0.0)
        found["times_kernels"] = took / max(seen.kernel_seconds, 1e-9)
        found["kernels"] = {
            name[:80]: {"launches": launches, "ms": 1e3 * seconds}
            for name, (launches, seconds) in sorted(seen.kernels.items(), key=lambda item: -item[1][1])[:25]
        }
    return found


def time_prefill(rank: Rank, ceilings: Ceilings) -> dict[str, Any]:
    """A prompt in chunks, launched as they come: the layers below the split alone, and all layers; these again with as
    many rows as the largest step has that the engine keeps a graph of, since larger ones are launched; and the last
    tokens of it in short chunks, as they come between decode rows, where what the host does for a launch shows:
    launched, and as the engine takes them, sent to a CUDA graph.

    launch_seconds  of the host, until the last chunk was launched: next to all of the time, it waits for the GPU; all
                    of it, the GPU waits for the host.
    """
    options, length = rank.options, rank.options.prefill
    found: dict[str, Any] = {"tokens": length, "chunk": options.chunk}
    split, every = rank.config.text.split, len(rank.model.plan)
    whole: Callable[[Batch], object] = lambda b: rank.model.forward(b, rank.model.memory(rank.storage, b))  # noqa: E731
    short_chunk, last = max(options.chunk // 8, 1), max(length - options.chunk, 0)

    def launched(forward: Callable[[Batch], object]) -> Callable[[Sequence[Place]], list[Run]]:
        return lambda places: [partial(forward, rank.prefill_batch(*place)) for place in places]

    ways: dict[str, tuple[int, Callable[[Sequence[Place]], list[Run]], int, int]] = {
        "encoder": (split, launched(rank.encode), 0, options.chunk),
        "all layers": (every, launched(whole), 0, options.chunk),
        LARGEST_GRAPH: (every, launched(whole), 0, largest_graph(options)),
        SHORT_CHUNKS: (every, launched(whole), last, short_chunk),
        REPLAYED: (every, partial(replayed, rank), last, short_chunk),
    }
    for name, (layers, prepared, begin, chunk) in ways.items():
        runs = prepared([(at, min(chunk, length - at)) for at in range(begin, length, chunk)])
        runs[0]()  # compiles
        _sync(rank.device)
        samples: list[tuple[float, float]] = []
        for _ in range(2 if rank.device.type == "cuda" else 1):
            started = perf_counter()
            for run in runs:
                run()
            launches = perf_counter() - started
            _sync(rank.device)
            samples.append((perf_counter() - started, launches))
        (took, launches), tokens = min(samples), length - begin
        found[name] = {
            "tokens": tokens,
            "chunk": chunk,
            "seconds": took,
            "launch_seconds": launches,
            "tokens_per_second": tokens / took,
            "floor_seconds": tokens * prefill_floor(rank.config.text, options.numerics, ceilings, layers),
        }
        del runs, prepared
    return found


def largest_graph(options: Options) -> int:
    """Rows of a chunk: larger ones are launched where an engine may take them."""
    return min(GpuConfig().graph_rows, options.chunk)


def prompt_columns(rank: Rank, rows: int) -> Tensor:
    count = batches.PROMPT_COLUMNS + rank.model.windows.layers
    return torch.zeros(count, rows, dtype=torch.int64, device=rank.device)


def pass_columns(rank: Rank, columns: Tensor) -> Tensor:
    """The backbone of a step with prompts in the form that graphs hold."""
    batch = batches.unpack_prompts(columns, rank.storage)
    return rank.model.forward(batch, rank.model.memory(rank.storage, batch)).hidden


def replayed(rank: Rank, places: Sequence[Place]) -> list[Run]:
    """Chunks of the prompt in slot 1 as the engine takes them: described by the host, one copy and one replay."""
    storage, most = rank.storage, max(rows for _, rows in places)
    uploads = batches.Uploads(storage)
    record: Record = CudaRecorder(rank.device) if rank.device.type == "cuda" else lambda run: Recorded(run(), run)
    graphs = Graphs(prompt_columns(rank, most), (most,), partial(pass_columns, rank), record)

    def take(plan: StepPlan) -> Tensor:
        uploads.prompts(plan, graphs.columns(most))
        return graphs.run(most)

    tables = [rank.prefill_batch(at, rows).tables[0] for at, rows in places]
    chunks = [Chunk(0, at, (64,) * rows, 0, False, 1, table) for (at, rows), table in zip(places, tables, strict=True)]
    return [partial(take, StepPlan(0, (chunk,), ())) for chunk in chunks]


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(rank: Rank) -> dict[str, Any]:
    text, storage = rank.config.text, rank.storage
    used = torch.cuda.memory_allocated(rank.device) if rank.device.type == "cuda" else 0
    return {
        "layers": text.num_hidden_layers,
        "experts": text.n_routed_experts,
        "ngram_table_rows": list(text.engram_num_embeddings),
        "pool_blocks": storage.num_blocks,
        "block_bytes": storage.layout.block_bytes,
        "device_bytes": used,
        "stand_ins": "routers know local experts only, exchange is copies, no drafter, n-gram tables are small, "
        f"logits are normal with a spread of {LOGITS['peaked']:g}",
    }


def measures(steps: Sequence[dict[str, Any]], prefill: dict[str, Any], targets: bool) -> list[Measure]:
    """The numbers with a target, and the other steps' times. targets: the model is one that has them."""
    found: list[Measure] = []
    for step in steps:
        if "error" in step:
            continue
        name = f"step, {step['rows']} rows at {short(step['context'])}"
        wanted = targets and step["rows"] in (64, 384)
        floor = step["floor_ms"]
        found.append(
            Measure(
                name=name,
                value=step["step_ms"],
                unit="ms",
                estimate=floor,
                target=STEP_TARGET * floor if wanted else None,
                better="less",
            )
        )
        if targets and step["rows_a_request"] == DRAFTED and step["requests"] == 64:
            for key, unit, target in (
                ("tokens_per_second", "tokens/s", RATE_TARGET),
                ("tokens_per_second_a_user", "tokens/s a user", USER_TARGET),
            ):
                found.append(
                    Measure(name=f"  {ACCEPTED} accepted", value=step[key], unit=unit, target=target, better="more")
                )
    for way in PREFILLS:
        if way in prefill:
            part = prefill[way]
            found.append(
                Measure(
                    name=f"prefill {short(part['tokens'])}, {way}",
                    value=part["tokens_per_second"],
                    unit="tokens/s",
                    estimate=part["tokens"] / part["floor_seconds"],
                    target=PREFILL_TARGET if targets and way == "encoder" else None,
                    better="more",
                )
            )
    return found


# ---- text and picture ------------------------------------------------------------------------------------------------


def short(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K" if tokens >= 1024 else str(tokens)


def step_line(step: dict[str, Any]) -> str:
    name = f"{step['rows']} rows at {short(step['context'])}"
    if "error" in step:
        return f"{name:<20} failed: {step['error']}"
    return (
        f"{name:<20}{step['step_ms']:>8.2f} ms, floor {step['floor_ms']:.2f}, {step['times_floor']:.2f} times; "
        f"{step['tokens_per_second']:.0f} tokens/s, {step['tokens_per_second_a_user']:.0f} a user"
    )


def table(found: dict[str, Any]) -> str:
    """Few lines for a terminal: steps against floors, then the parts of the first step of each row count."""
    lines = [report.table(found["measures"])]
    shown: set[int] = set()
    for step in found["steps"]:
        if "error" in step:
            lines.append(step_line(step))
        elif step["rows"] not in shown:
            shown.add(step["rows"])
            parts = sorted(step["parts_ms"].items(), key=lambda item: -item[1])
            told = ", ".join(f"{part} {ms:.2f}/{step['floors_ms'].get(part, 0.0):.2f}" for part, ms in parts)
            idle = f"; idle {100 * step['idle_share']:.1f} %" if "idle_share" in step else ""
            lines.append(f"{step['rows']} rows at {short(step['context'])}, ms measured/floor: {told}{idle}")
    if "error" in found["prefill"]:
        lines.append(f"prefill failed: {found['prefill']['error']}")
    if found["left_out"]:
        lines.append(f"left out for want of time: {', '.join(found['left_out'])}")
    return "\n".join(lines)


def picture(found: dict[str, Any], path: Path) -> Path | None:
    """A stacked bar a step, its parts from the largest, and the floor as a line across it. None without matplotlib."""
    steps = [step for step in found["steps"] if "error" not in step]
    if not steps:
        return None
    try:
        pyplot = plots.pyplot()
    except MissingDependency:
        return None
    parts = sorted({part for step in steps for part in step["parts_ms"]})
    parts.sort(key=lambda part: -sum(step["parts_ms"].get(part, 0.0) / step["step_ms"] for step in steps))
    counts = list(dict.fromkeys(step["rows"] for step in steps))
    figure, axes = pyplot.subplots(1, len(counts), figsize=(3.2 + 2.6 * len(counts), 5.2), squeeze=False)
    colours = pyplot.get_cmap("tab20").colors
    for axis, rows in zip(axes[0], counts, strict=True):
        here = [step for step in steps if step["rows"] == rows]
        base = [0.0] * len(here)
        for part, colour in zip(parts, colours, strict=False):
            heights = [step["parts_ms"].get(part, 0.0) for step in here]
            axis.bar(range(len(here)), heights, bottom=base, color=colour, label=part, width=0.7)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        for i, step in enumerate(here):
            axis.hlines(
                step["floor_ms"], i - 0.45, i + 0.45, colors="black", linewidth=2.5, label="floor" if not i else None
            )
            axis.text(i, base[i], f"{step['step_ms']:.1f}", ha="center", va="bottom", fontsize=9)
        axis.set_xticks(range(len(here)), [short(step["context"]) for step in here])
        axis.set_title(f"{rows} rows, {here[0]['requests']} requests", fontsize=10)
        axis.set_xlabel("context, tokens")
        # said outright: bars hold the axis to their ends, and the label of the highest would stand in the title
        axis.set_ylim(0, 1.1 * max(max(sum(step["parts_ms"].values()), step["floor_ms"]) for step in here))
    axes[0][0].set_ylabel("decode step, ms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="center right", fontsize=9, frameon=False)
    figure.suptitle(f"One rank of EP{found['settings']['ranks']}, {found['settings']['numerics']}, network not counted")
    figure.tight_layout(rect=(0, 0, 1 - 1.9 / figure.get_figwidth(), 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
