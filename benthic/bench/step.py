"""Speed and memory of the engine on one machine: start-up, prefill, decode, peak memory, time by operation.

Everything runs through `engine.llm.LLM`, as a user's request would; tokens are random but seeded, since speed does not
depend on what they say. Beside each number stands an estimate made first, from the bytes and operations the model needs
and three rates of this machine: memory reading, matrix products, and the cost of one kernel call.
"""

import importlib
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benthic.bench import report
from benthic.bench.report import Measure
from benthic.config import Config
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.kernels import gemm, norm
from benthic.models.deepseek_v41_config import ModelConfig, TextConfig
from benthic.models.registry import model_dir
from benthic.text.tokenizer import FILE_NAME
from benthic.types import NUMERICS, SamplingParams

TARGETS = {  # on two cores, with the packaged model
    "first token": 5.0,
    "prefill": 4000.0,
    "decode 1": 100.0,
    "decode 32": 1000.0,
    "peak memory": 1.2,
    "peer decode": 2.0,
    "peer prefill": 10.0,
}
FIRST_WORDS = "Once upon a time"

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
    batches: tuple[int, ...] = (1, 8, 32)
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


def decode_rate(llm: LLM, prompts: Prompts, batch: int, prompt: int, tokens: int) -> tuple[float, list[float]]:
    """(tokens a second of all requests together, seconds of each step), while all `batch` requests run."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    begun: set[int] = set()
    started: float | None = None
    emitted, ended = 0, 0.0
    llm.loop.times.clear()
    for piece in llm.generate([prompts.draw(prompt) for _ in range(batch)], params, stream=True):
        ended = perf_counter()
        if started is not None:
            emitted += len(piece.token_ids)
        elif piece.token_ids:
            begun.add(piece.prompt)
            started = ended if len(begun) == batch else None
        if piece.completion is not None:
            break  # from here on fewer run
    assert started is not None, f"{batch} requests never ran together"
    steps = [times.plan + times.run + times.commit for times in llm.loop.times if times.tokens == batch]
    return emitted / max(ended - started, 1e-9), steps


def first_token(config: Config, model: Path) -> float:
    """Seconds from starting a command to the first byte of its text."""
    if (model / FILE_NAME).is_file():
        words = ["generate", "--prompt", FIRST_WORDS, "--max-tokens", "1", "--temperature", "0"]
        words += ["--model", str(model), "--numerics", config.numerics, "--device", config.device]
        words += ["--cpu.threads", str(config.cpu.threads), "--cpu.native", config.cpu.native]
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
    measures: list[Measure] = []
    ops: dict[str, Any] = {}

    if options.start_ups:
        say("start-up")
        took = [first_token(config, model) for _ in range(options.start_ups)]
        measures.append(
            Measure(
                name="start to first token",
                value=median(took),
                unit="s",
                target=TARGETS["first token"],
                better="less",
                samples=took,
                note="a fresh process; the C kernels were compiled before",
            )
        )
    with LLM(config=config) as llm:
        threads = torch.get_num_threads()
        rates = measure_rates(threads)
        prompts = Prompts(text.text.vocab_size, options.seed)
        longest = llm.model.max_positions - 1
        lengths = list(dict.fromkeys(min(length, longest) for length in options.prompts))
        for length in lengths:
            say(f"prefill {length}")
            budget = config.scheduler.token_budget
            chunks = [(at, min(at + budget, length)) for at in range(0, length, budget)]
            expected = sum(
                seconds(estimate_work(text, config.numerics, to - at, [(at + to) / 2], 0), rates) for at, to in chunks
            )
            samples = prefill_rate(llm, prompts, length, options.repeats)
            measures.append(
                Measure(
                    name=f"prefill, {length} tokens",
                    value=median(samples),
                    unit="tokens/s",
                    estimate=length / expected,
                    target=TARGETS["prefill"],
                    better="more",
                    samples=samples,
                )
            )
        for batch in options.batches:
            say(f"decode at batch {batch}")
            context = min(64, longest - options.tokens)
            work = estimate_work(text, config.numerics, batch, [context + options.tokens / 2], batch)
            decode_rate(llm, prompts, batch, context, min(8, options.tokens))
            runs = [decode_rate(llm, prompts, batch, context, options.tokens) for _ in range(options.repeats)]
            samples, steps = [rate for rate, _ in runs], sorted(1e3 * step for _, times in runs for step in times)
            measures.append(
                Measure(
                    name=f"decode, batch {batch}",
                    value=median(samples),
                    unit="tokens/s",
                    estimate=batch / seconds(work, rates),
                    target=TARGETS.get(f"decode {batch}"),
                    better="more",
                    samples=samples,
                    note=f"step p50 {steps[len(steps) // 2]:.2f} ms, p90 {steps[9 * len(steps) // 10]:.2f} ms",
                )
            )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        measures.append(
            Measure(name="peak memory", value=peak, unit="GiB", target=TARGETS["peak memory"], better="less")
        )
        if options.ops:
            say("time by operation")
            one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            many = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
            length = lengths[0] if lengths else 128
            ops[f"prefill, {length} tokens"] = op_shares(
                lambda: llm.generate(prompts.draw(length), one, progress=False)
            )
            for batch in (options.batches[0], options.batches[-1]) if options.batches else ():
                todo = [prompts.draw(8) for _ in range(batch)]
                ops[f"decode, batch {batch}"] = op_shares(lambda todo=todo: llm.generate(todo, many, progress=False))
        if options.peer:
            say(f"peer {options.peer}")
            measures += _against_peer(llm, model, options)
    return head | {
        "versions": report.versions(),
        "threads": threads,
        "rates": {
            "read_bytes_per_second": rates.read_bytes,
            "multiply_adds_per_second": rates.multiply_adds,
            "kernel_call_seconds": rates.call_seconds,
        },
        "measures": measures,
        "ops": ops,
    }


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
            target=TARGETS["peer prefill"],
            better="more",
        ),
        Measure(name="decode, 1 thread", value=decode, unit="tokens/s"),
        Measure(name=f"decode, 1 thread, {name}", value=theirs["decode"], unit="tokens/s"),
        Measure(
            name=f"decode against {name}",
            value=decode / theirs["decode"],
            unit="times",
            target=TARGETS["peer decode"],
            better="more",
        ),
    ]
