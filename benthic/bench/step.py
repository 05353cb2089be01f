"""Speed and memory of the engine on one machine: start-up, prefill, decode, peak memory, time by operation; on a GPU
where a decode step's time goes, between host and device.

Everything runs through `engine.llm.LLM`, as a user's request would; tokens are random but seeded, since speed does not
depend on what they say. Beside each number stands an estimate made first, from the bytes and operations the model needs
and three rates of this machine: memory reading, matrix products, and the cost of one kernel call. On a GPU that is done
for decode steps alone.
"""

import importlib
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benthic.bench import report
from benthic.bench.report import Measure
from benthic.bench.timing import Ceilings, Timer, Trace, measure_ceilings, release, seen, watch
from benthic.cache.storage import block_layout
from benthic.config import Config
from benthic.engine.batch import Draws
from benthic.engine.llm import LLM
from benthic.engine.loop import StepTimes
from benthic.engine.sampler import Sampler
from benthic.errors import BenchError
from benthic.kernels import gemm, norm
from benthic.models.deepseek_v41_config import ModelConfig, TextConfig, cache_spec
from benthic.models.registry import model_dir
from benthic.text.tokenizer import FILE_NAME
from benthic.types import NUMERICS, SamplingParams

CPU_TARGETS = {  # on two cores, with the packaged model
    "first token": 5.0,
    "prefill": 4000.0,
    "decode 1": 100.0,
    "decode 32": 1000.0,
    "peak memory": 1.2,
}
PEER_TARGETS = {  # times the peer's speed, on a CPU
    "decode": 2.0,
    "prefill": 10.0,
}
FIRST_WORDS = "Once upon a time"
BATCHES = {"cpu": (1, 8, 32), "cuda": (1, 8, 32, 64, 256)}
WATCHED_STEPS = 16  # of a trace, at most
LAUNCHES = 23  # kernels of a layer's two sublayers on a GPU, and of what some layers have beside them
COMPRESSOR_LAUNCHES, INDEXER_LAUNCHES, ENGRAM_LAUNCHES, END_LAUNCHES = 5, 9, 7, 15

OPS = {  # kernels whose time is told apart
    "fused": ("hyper_read", "attention_inputs", "attention_output", "moe"),
    "norm": ("rms_norm",),
    "rope": ("rotate",),
    "quant": ("roundtrip_fp8", "roundtrip_mxfp4", "roundtrip_nvfp4", "dequantise_fp8"),
    "gemm": ("linear", "grouped_linear"),
    "swiglu": ("swiglu",),
    "hyper": ("hyper_mixes", "hyper_collapse", "hyper_expand"),
    "compress": ("pool_groups",),
    "engram": ("ngram_rows", "engram_gate"),
    "moe_gate": ("route",),
    "moe_experts": ("experts",),
    "kv_copy": ("write_records", "window_rows", "ring_write"),
    "attn_sparse": ("sink_attention",),
    "indexer": ("index_select",),
}


@dataclass(frozen=True, slots=True)
class Options:
    prompts: tuple[int, ...] = (512, 4096)
    batches: tuple[int, ...] | None = None  # None: those of `BATCHES` for the device
    tokens: int = 64  # new tokens a request in the decode runs
    repeats: int = 3  # medians are reported
    start_ups: int = 3  # fresh processes; 0: leave out
    ops: bool = True
    peer: str | None = None  # "ftllm"
    peer_python: str = ".venv-oracles/bin/python"
    seed: int = 0


# ---- estimates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does, measured in a fraction of a second."""

    read_bytes: float  # per second, weights streamed from memory
    multiply_adds: float  # per second, the products of a prefill chunk
    call_seconds: float  # one kernel call on one row


def measure_rates(threads: int) -> Rates:
    generator = torch.Generator().manual_seed(0)
    big = torch.ones(48 << 20, dtype=torch.uint8).view(torch.int64)
    read = min(_clock(lambda: big.sum()) for _ in range(3))
    x = torch.randn(512, 256, generator=generator).bfloat16()
    w = torch.randn(1024, 256, generator=generator).bfloat16()
    product = min(_clock(lambda: gemm.linear(x, w)) for _ in range(10))
    row, weight = x[:1], torch.ones(256)

    def calls() -> None:
        for _ in range(100):
            norm.rms_norm(row, weight, 1e-6)

    call = min(_clock(calls) for _ in range(5)) / 100
    return Rates(big.nbytes / read, 512 * 1024 * 256 / product, call)


@torch.inference_mode()
def _clock(run: Callable[[], object]) -> float:
    started = perf_counter()
    run()
    return perf_counter() - started


@dataclass(frozen=True, slots=True)
class Work:
    """What the model needs for a step."""

    multiply_adds: float
    weight_bytes: float
    calls: int


def estimate_work(config: ModelConfig, numerics: str, rows: int, contexts: Sequence[float], logits: int) -> Work:
    """A step of `rows` tokens, each at the given context lengths (the mean counts), `logits` of them sampled."""
    t = config.text
    item = 4 if NUMERICS[numerics].wide else 2
    dense, experts, expert = _weights(t)
    touched = experts * (1 - (1 - t.num_experts_per_tok / experts) ** rows) if experts else 0
    context = sum(contexts) / max(len(contexts), 1)
    layers = t.num_hidden_layers
    row_products = dense + layers * t.num_experts_per_tok * expert
    for layer in range(layers):
        ratio = t.compress_ratios[layer]
        listed = min(context, t.sliding_window)
        if ratio:
            entries = context / ratio
            listed += min(entries, t.index_topk)
            if layer in t.index_source_layer_ids:
                candidates = t.candidate_source_layer_id
                if candidates is not None and 0 <= candidates < layer:
                    entries = min(entries, t.candidate_topk_blocks * t.candidate_block_size)
                row_products += t.index_n_heads * t.index_head_dim * entries
        row_products += 2 * t.num_attention_heads * t.head_dim * listed
    head = t.vocab_size * t.hidden_size
    calls = 10 * layers + 14 * len(t.index_source_layer_ids) + 8 * len(t.engram_layer_ids)
    weight_bytes = item * (dense + layers * touched * expert) + 4 * head
    return Work(rows * row_products + logits * head, weight_bytes, calls)


def _weights(t: TextConfig) -> tuple[float, int, float]:
    """Weights that every token passes, head and tables apart; experts a layer; weights of one expert."""
    d, dh, heads = t.hidden_size, t.head_dim, t.num_attention_heads
    attention = d * t.q_lora_rank + t.q_lora_rank * heads * dh + d * dh
    attention += heads * dh * t.o_lora_rank + t.o_groups * t.o_lora_rank * d
    expert = 3 * d * t.moe_intermediate_size
    mixes = 2 * (2 + t.hc_mult) * t.hc_mult * t.hc_mult * d
    dense = t.num_hidden_layers * (attention + expert + mixes + t.n_routed_experts * d)
    width = (t.engram_max_ngram_size - 1) * t.engram_n_heads * t.engram_head_dim
    dense += len(t.engram_layer_ids) * width * (t.hc_mult + 1) * d
    dense += len(t.kv_source_layer_ids) * 2 * d * dh
    dense += len(t.index_source_layer_ids) * t.q_lora_rank * t.index_n_heads * t.index_head_dim
    return dense, t.n_routed_experts, expert


def seconds(work: Work, rates: Rates) -> float:
    """The larger of arithmetic and reading, and the calls around them."""
    return max(work.multiply_adds / rates.multiply_adds, work.weight_bytes / rates.read_bytes) + (
        work.calls * rates.call_seconds
    )


def gpu_step_seconds(config: ModelConfig, numerics: str, rows: int, context: float, ceilings: Ceilings) -> float:
    """A decode step as a CUDA graph: its kernels one after another, and its bytes or operations."""
    t = config.text
    dense, experts, expert = _weights(t)
    touched = experts * (1 - (1 - t.num_experts_per_tok / experts) ** rows) if experts else 0
    weight, fp4 = (4, 4) if NUMERICS[numerics].wide else (1, 17 / 32)
    read = weight * dense + fp4 * t.num_hidden_layers * touched * expert + 2 * t.vocab_size * t.hidden_size
    flops = 2 * estimate_work(config, numerics, rows, [context], rows).multiply_adds
    return gpu_step_launches(t) * ceilings.launch_seconds + ceilings.floor(read, flops)


def gpu_step_launches(t: TextConfig) -> int:
    """Kernels of a decode step."""
    launches = LAUNCHES * t.num_hidden_layers + COMPRESSOR_LAUNCHES * len(t.kv_source_layer_ids) + END_LAUNCHES
    return launches + INDEXER_LAUNCHES * len(t.index_source_layer_ids) + ENGRAM_LAUNCHES * len(t.engram_layer_ids)


# ---- the runs ----------------------------------------------------------------------------------------------------


class Prompts:
    """Seeded random token ids, none of them special: ids of the ends of the vocabulary are left out."""

    def __init__(self, vocab_size: int, seed: int):
        self.low, self.high = min(64, vocab_size // 4), vocab_size - min(64, vocab_size // 4)
        self.random = random.Random(seed)

    def draw(self, length: int) -> list[int]:
        return [self.random.randrange(self.low, self.high) for _ in range(length)]


def prefill_rate(llm: LLM, prompts: Prompts, length: int, repeats: int) -> list[float]:
    """Prompt tokens a second, from handing in to the first token, one request at a time."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    found: list[float] = []
    for _ in range(repeats + 1):  # the first warms caches up and is dropped
        (done,) = llm.generate(prompts.draw(length), params, progress=False)
        found.append(length / done.timing.ttft_seconds)
    return found[1:]


def running_together(llm: LLM, prompts: Prompts, batch: int, prompt: int, tokens: int) -> Generator[int, None, None]:
    """Tokens as they come while all `batch` requests run: 0 once the last has begun, counts up to the first end."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    begun: set[int] = set()
    llm.loop.times.clear()
    for piece in llm.generate([prompts.draw(prompt) for _ in range(batch)], params, stream=True):
        if len(begun) == batch:
            yield len(piece.token_ids)
        elif piece.token_ids:
            begun.add(piece.prompt)
            if len(begun) == batch:
                yield 0
        if piece.completion is not None:
            break  # from here on fewer run
    if len(begun) < batch:
        raise BenchError(
            f"decode at batch {batch}", f"they never ran together for want of time; give more than {tokens} tokens"
        )


def decode_rate(llm: LLM, prompts: Prompts, batch: int, prompt: int, tokens: int) -> tuple[float, list[StepTimes]]:
    """(tokens a second of all requests together, times of each step), while all `batch` requests run."""
    counts = running_together(llm, prompts, batch, prompt, tokens)
    emitted = next(counts)
    started = ended = perf_counter()
    for count in counts:
        ended = perf_counter()
        emitted += count
    return emitted / max(ended - started, 1e-9), [times for times in llm.loop.times if times.tokens == batch]


@dataclass(frozen=True, slots=True)
class Watched:
    """Decode steps on a GPU, as a profiler saw them."""

    trace: Trace  # of a step
    steps: int
    seconds: float  # of a step, by the clock, while watched

    @property
    def idle(self) -> float:
        """Share of the time in which the GPU did nothing."""
        return max(1 - self.trace.busy / self.seconds, 0.0)

    def shares(self, most: int = 20) -> dict[str, dict[str, float]]:
        """Share of the time of the longest kernels, as `op_shares`."""
        kernels = sorted(self.trace.kernels.items(), key=lambda item: -item[1][1])[:most]
        found: dict[str, dict[str, float]] = {
            name[:60]: {"share": took / self.seconds, "calls": round(calls), "us_per_call": 1e6 * took / calls}
            for name, (calls, took) in kernels
        }
        return found | {"other": {"share": 1 - sum(kernel["share"] for kernel in found.values())}}


def watch_decode(llm: LLM, prompts: Prompts, batch: int, prompt: int, tokens: int) -> Watched:
    """Some decode steps while all `batch` requests run."""
    counts = running_together(llm, prompts, batch, prompt, tokens)
    next(counts)
    before = len(llm.loop.times)
    profiler = watch()
    started = perf_counter()
    for _ in counts:
        if len(llm.loop.times) - before >= WATCHED_STEPS:
            break
    took, steps = perf_counter() - started, len(llm.loop.times) - before
    trace = seen(profiler, max(steps, 1))
    counts.close()
    if not steps:
        raise BenchError(f"decode at batch {batch}", f"no step was left to watch; give more than {tokens} tokens")
    return Watched(trace, steps, took / steps)


def sampler_seconds(llm: LLM, batch: int, timer: Timer) -> float:
    """Drawing `batch` greedy tokens, from a CUDA graph: what follows the logits in every step."""
    vocab, device = llm.model.vocab_size, timer.device
    logits = torch.randn(batch, vocab, generator=torch.Generator(device).manual_seed(0), device=device)
    whole = torch.arange(batch, device=device)
    zeros, ones = torch.zeros(batch, dtype=torch.float64, device=device), torch.ones(batch, device=device).double()
    draws = Draws(whole, whole, whole, zeros, torch.zeros_like(whole), ones, zeros)
    sampler = Sampler(vocab, device)
    return timer.time(lambda: sampler.draw_rows(logits, draws)).warm


def first_token(config: Config, model: Path) -> float:
    """Seconds from starting a command to the first byte of its text."""
    if (model / FILE_NAME).is_file():
        words = ["generate", "--prompt", FIRST_WORDS, "--max-tokens", "1", "--temperature", "0"]
        words += ["--model", str(model), "--numerics", config.numerics, "--device", config.device]
        words += ["--cpu.threads", str(config.cpu.threads), "--cpu.native", config.cpu.native]
        words += ["--gpu.graphs", str(config.gpu.graphs).lower(), "--gpu.engram-tables", config.gpu.engram_tables]
        words += ["--deterministic", str(config.deterministic).lower()]
        command = [sys.executable, "-m", "benthic.cli.main", *words]
    else:  # a checkpoint without text: token ids instead
        code = (
            "import sys; from benthic.engine.llm import LLM; from benthic.types import SamplingParams; "
            "print(LLM(sys.argv[1], numerics=sys.argv[2], device=sys.argv[3], cpu__threads=int(sys.argv[4]))"
            ".generate([5, 6, 7, 8], SamplingParams(max_tokens=1, temperature=0.0))[0].token_ids, flush=True)"
        )
        command = [sys.executable, "-c", code, str(model), config.numerics, config.device, str(config.cpu.threads)]
    started = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        took = perf_counter() - started
        _, errors = process.communicate()
    if process.returncode or not byte:
        raise BenchError("the start-up run", errors.decode(errors="replace").strip() or f"exit {process.returncode}")
    return took


# ---- time by operation -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Spent:
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    inner: list[float] = field(default_factory=list)  # time of kernels that a running kernel called


@contextmanager
def timed_ops(spent: Spent) -> Iterator[None]:
    """Inside this block every public kernel adds its own time, without that of kernels it calls."""
    restore: list[tuple[Any, str, Any]] = []
    for file, names in OPS.items():
        module = importlib.import_module(f"benthic.kernels.{file}")
        for name in names:
            restore.append((module, name, getattr(module, name)))
            setattr(module, name, _timed(getattr(module, name), name, spent))
    try:
        yield
    finally:
        for module, name, run in restore:
            setattr(module, name, run)


def _timed(run: Callable[..., Any], name: str, spent: Spent) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        spent.inner.append(0.0)
        started = perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            took = perf_counter() - started
            own = took - spent.inner.pop()
            if spent.inner:
                spent.inner[-1] += took
            spent.seconds[name] = spent.seconds.get(name, 0.0) + own
            spent.calls[name] = spent.calls.get(name, 0) + 1

    return timed


def op_shares(run: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Share of wall time and calls of each kernel during `run`; "other" is everything around them."""
    spent = Spent()
    with timed_ops(spent):
        started = perf_counter()
        run()
        total = perf_counter() - started
    shares = {
        name: {"share": took / total, "calls": spent.calls[name], "us_per_call": 1e6 * took / spent.calls[name]}
        for name, took in sorted(spent.seconds.items(), key=lambda item: -item[1])
    }
    return shares | {"other": {"share": 1 - sum(spent.seconds.values()) / total}}


# ---- the peer --------------------------------------------------------------------------------------------------------


def run_peer(name: str, python: str, model: Path, prompt: int, tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    """Prefill and decode of another engine on the same checkpoint, one thread, in its own environment.

    Raises  BenchError that says how to get it.
    """
    if name != "ftllm":
        raise BenchError(f"the peer {name}", "only ftllm is known")
    found = shutil.which(python) or python
    script = Path(__file__).with_name("peer_ftllm.py")
    try:
        probe = subprocess.run(
            [found, "-c", "import ftllm, transformers"], capture_output=True, timeout=120, check=False
        )
        ready = probe.returncode == 0
    except OSError:
        ready = False
    if not ready:
        raise BenchError(
            "the peer ftllm",
            f"{python} does not have it; make it with `make .venv-oracles/.done`, or with python -m venv DIR, "
            "pip install torch numpy transformers, pip install --no-deps ftllm==1.9.0; name it in --peer-python",
        )
    with tempfile.TemporaryDirectory() as room:
        for file in model.iterdir():
            (Path(room) / file.name).symlink_to(file.resolve())
        settings = Path(room) / "tokenizer_config.json"
        if not settings.exists():  # it insists on one
            settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        words = [found, str(script), room, str(prompt), str(tokens), str(repeats), str(seed)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=1800, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if done.returncode or not lines:
        tail = (done.stderr or done.stdout).replace("\r", "\n").strip().splitlines()[-3:]
        raise BenchError("the peer ftllm", " / ".join(line[-200:] for line in tail) or f"exit {done.returncode}")
    return json.loads(lines[-1])


# ---- all of it -------------------------------------------------------------------------------------------------------


def run(config: Config, options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; `say` hears what is being done. Raises BenchError and what LLM raises."""
    model = model_dir(config.model)
    text = ModelConfig.from_json(model)
    head = report.header("step", options.seed, {"model": config.model, "numerics": config.numerics})
    gpu = _gpu(config)
    batches = BATCHES["cpu" if gpu is None else "cuda"] if options.batches is None else options.batches
    targets: dict[str, float] = CPU_TARGETS if gpu is None else {}
    measures: list[Measure] = []
    ops: dict[str, Any] = {}

    if options.start_ups:
        say("start-up")
        if gpu is not None:
            first_token(config, model)  # compiles kernels
        took = [first_token(config, model) for _ in range(options.start_ups)]
        measures.append(
            Measure(
                name="start to first token",
                value=median(took),
                unit="s",
                target=targets.get("first token"),
                better="less",
                samples=took,
                note="a fresh process; "
                + ("the C kernels were" if gpu is None else "graphs are captured, kernels were")
                + " compiled before",
            )
        )
    ceilings = None if gpu is None else _ceilings(gpu)
    with LLM(config=with_room(config, text, max(batches, default=1))) as llm:
        threads = torch.get_num_threads()
        rates = measure_rates(threads) if gpu is None else None
        timer = None if gpu is None else Timer(gpu)
        prompts = Prompts(text.text.vocab_size, options.seed)
        longest = llm.model.max_positions - 1
        lengths = list(dict.fromkeys(min(length, longest) for length in options.prompts))
        budget = config.scheduler.token_budget
        for length in lengths:
            say(f"prefill {length}")
            samples = prefill_rate(llm, prompts, length, options.repeats)
            expected = (
                None if rates is None else length / _prefill_seconds(text, config.numerics, length, budget, rates)
            )
            measures.append(
                Measure(
                    name=f"prefill, {length} tokens",
                    value=median(samples),
                    unit="tokens/s",
                    estimate=expected,
                    target=targets.get("prefill"),
                    better="more",
                    samples=samples,
                )
            )
        for batch in batches:
            say(f"decode at batch {batch}")
            context = min(64, longest - options.tokens)
            until_all_run = 2 * -(-batch * context // budget)  # steps
            reached = context + options.tokens / 2
            if ceilings is not None:
                expected = gpu_step_seconds(text, config.numerics, batch, reached, ceilings)
            else:
                assert rates is not None
                expected = seconds(estimate_work(text, config.numerics, batch, [reached], batch), rates)
            decode_rate(llm, prompts, batch, context, min(8 + until_all_run, options.tokens))
            runs = [decode_rate(llm, prompts, batch, context, options.tokens) for _ in range(options.repeats)]
            samples, times = [rate for rate, _ in runs], [step for _, steps in runs for step in steps]
            steps = sorted(1e3 * (step.plan + step.run + step.commit) for step in times)
            measures.append(
                Measure(
                    name=f"decode, batch {batch}",
                    value=median(samples),
                    unit="tokens/s",
                    estimate=batch / expected,
                    target=targets.get(f"decode {batch}"),
                    better="more",
                    samples=samples,
                    note=f"step p50 {steps[len(steps) // 2]:.2f} ms, p90 {steps[9 * len(steps) // 10]:.2f} ms",
                )
            )
            if timer is not None:
                watched = watch_decode(llm, prompts, batch, context, options.tokens)
                measures += _on_gpu(batch, watched, batch / median(samples), times, sampler_seconds(llm, batch, timer))
                if options.ops:
                    ops[f"decode, batch {batch}"] = watched.shares()
        measures += _memory(gpu, targets)
        if options.ops and gpu is None:
            say("time by operation")
            one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            many = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
            length = lengths[0] if lengths else 128
            ops[f"prefill, {length} tokens"] = op_shares(
                lambda: llm.generate(prompts.draw(length), one, progress=False)
            )
            for batch in (batches[0], batches[-1]) if batches else ():
                todo = [prompts.draw(8) for _ in range(batch)]
                ops[f"decode, batch {batch}"] = op_shares(lambda todo=todo: llm.generate(todo, many, progress=False))
        if options.peer:
            say(f"peer {options.peer}")
            measures += _against_peer(llm, model, options)
    found = head | {"versions": report.versions(), "threads": threads}
    if rates is not None:
        found["rates"] = {
            "read_bytes_per_second": rates.read_bytes,
            "multiply_adds_per_second": rates.multiply_adds,
            "kernel_call_seconds": rates.call_seconds,
        }
    if ceilings is not None:
        found["ceilings"] = ceilings.json()
    return found | {"measures": measures, "ops": ops}


def _gpu(config: Config) -> torch.device | None:
    """The GPU that the engine will run on."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name) if name.startswith("cuda") and torch.cuda.is_available() else None


def _ceilings(gpu: torch.device) -> Ceilings:
    """Measured before there is an engine; what that took is not counted as its memory."""
    found = measure_ceilings(Timer(gpu))
    release(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    return found


def with_room(config: Config, text: ModelConfig, batch: int) -> Config:
    """The configuration, with room for `batch` requests of two blocks at least."""
    running = max(config.scheduler.max_running, batch)
    budget = max(config.scheduler.token_budget, running)
    room = 2 * batch * block_layout(cache_spec(text, drafter=False).append).block_bytes
    cache = config.cache if config.cache.blocks else replace(config.cache, bytes=max(config.cache.bytes, room))
    # nobody waits for a token here, and all are to run together soon
    scheduler = replace(config.scheduler, max_running=running, token_budget=budget, itl_target_ms=0.0, itl_stretch=0.0)
    return replace(config, scheduler=scheduler, cache=cache)


def _prefill_seconds(text: ModelConfig, numerics: str, length: int, budget: int, rates: Rates) -> float:
    chunks = [(at, min(at + budget, length)) for at in range(0, length, budget)]
    return sum(seconds(estimate_work(text, numerics, to - at, [(at + to) / 2], 0), rates) for at, to in chunks)


def _on_gpu(batch: int, watched: Watched, period: float, times: list[StepTimes], sampler: float) -> list[Measure]:
    """Where a decode step's time goes: idle share of the GPU, the sampler on it, and the host's parts.

    period  seconds of a step that nobody watched.
    """
    unwatched = max(1 - watched.trace.busy / period, 0.0)
    note = f"of {watched.steps} steps, from a trace; against steps that nobody watched {100 * unwatched:.1f} %"
    found = [
        Measure(name=f"idle share, batch {batch}", value=100 * watched.idle, unit="%", better="less", note=note),
        Measure(
            name=f"sampler, batch {batch}", value=1e6 * sampler, unit="us", better="less", note="greedy; in a graph"
        ),
    ]
    notes = {
        "plan": "of the host",
        "begin": "of the host: copies, launch",
        "wait": "for the GPU",
        "commit": "of the host",
        "rest": "of the host: text handed out, between steps",
    }
    for part, note in notes.items():
        took = 1e6 * median(getattr(step, part) for step in times)
        found.append(Measure(name=f"{part}, batch {batch}", value=took, unit="us", better="less", note=note))
    return found


def _memory(gpu: torch.device | None, targets: dict[str, float]) -> list[Measure]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    found = [Measure(name="peak memory", value=peak, unit="GiB", target=targets.get("peak memory"), better="less")]
    if gpu is not None:
        reserved = torch.cuda.max_memory_reserved(gpu) / (1 << 30)
        note = "allocator's reserve: weights, cache, graphs, scratch, and 0.25 GiB of this bench's own"
        found.append(Measure(name="peak device memory", value=reserved, unit="GiB", better="less", note=note))
    return found


def _against_peer(llm: LLM, model: Path, options: Options) -> list[Measure]:
    """Both on one thread, one after the other, the same number of tokens."""
    assert options.peer is not None
    prompt, tokens = 256, options.tokens
    theirs = run_peer(options.peer, options.peer_python, model, prompt, tokens, options.repeats, options.seed)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prompts = Prompts(llm.model.vocab_size, options.seed)
        prefill = median(prefill_rate(llm, prompts, prompt, options.repeats))
        decode = median(decode_rate(llm, prompts, 1, prompt, tokens)[0] for _ in range(options.repeats))
    finally:
        torch.set_num_threads(before)
    name = options.peer
    return [
        Measure(name=f"prefill {prompt}, 1 thread", value=prefill, unit="tokens/s"),
        Measure(name=f"prefill {prompt}, 1 thread, {name}", value=theirs["prefill"], unit="tokens/s"),
        Measure(
            name=f"prefill against {name}",
            value=prefill / theirs["prefill"],
            unit="times",
            target=PEER_TARGETS["prefill"],
            better="more",
        ),
        Measure(name="decode, 1 thread", value=decode, unit="tokens/s"),
        Measure(name=f"decode, 1 thread, {name}", value=theirs["decode"], unit="tokens/s"),
        Measure(
            name=f"decode against {name}",
            value=decode / theirs["decode"],
            unit="times",
            target=PEER_TARGETS["decode"],
            better="more",
        ),
    ]
