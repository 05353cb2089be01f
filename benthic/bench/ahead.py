"""What the benches of a GPU will compile, found on any machine and compiled side by side before they run.

The wrappers of the kernels run on memory of the right shapes that nobody touches, and launches are only noted
(`kernels/triton/warm.py`). So the work is that of Python alone, and the same on a machine without a GPU, whose Triton
cache then serves one with a GPU and the same Triton.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from triton.runtime import driver

from benthic.bench import report, tune
from benthic.bench.cases import RELEASE, Case, Cases, Sizes
from benthic.bench.operands import Operands
from benthic.cache.spec import CacheSpec, blocks_for
from benthic.cache.storage import Storage
from benthic.config import Config, GpuConfig, SchedulerConfig
from benthic.engine.runner import Runner
from benthic.engine.sampler import Sampler
from benthic.errors import KernelBuildError
from benthic.kernels import backends, moe_experts, quant
from benthic.kernels.cuda import build as cuda_build
from benthic.kernels.cuda import experts as cuda_experts
from benthic.kernels.triton import moe_experts as triton_experts
from benthic.kernels.triton import runtime, tuning, warm
from benthic.models.deepseek_v41 import from_checkpoint
from benthic.models.modules import packed_weights
from benthic.models.weights import Checkpoint
from benthic.types import NUMERICS

DEVICE = "nvidia-h200"  # whose table of configurations holds
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Options:
    kernels: bool = True  # cases of `bench kernel` and `bench invariance`
    candidates: bool = True  # those of `bench tune` in each case
    models: tuple[str, ...] = ("minnow",)  # steps of each
    profiles: tuple[str, ...] = tuple(NUMERICS)  # of the models
    op: str | None = None  # only cases whose op contains this
    workers: int | None = None  # processes; None: one a core


class Untouched(Operands):
    """Memory of the right shape. Integers have values, since the host may read them."""

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def rows(self, count: int, width: int) -> Tensor:
        return torch.empty(count, width, dtype=torch.bfloat16)

    def random_bytes(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def fp4_scales(self, *shape: int) -> Tensor:
        return self.random_bytes(*shape)

    def fp8_codes(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=quant.E4M3)

    def storage(
        self, spec: CacheSpec, num_blocks: int, num_slots: int, rollback: int, table_blocks: int | None = None
    ) -> Storage:
        return Storage(spec, num_blocks, num_slots, self.device, rollback=rollback, table_blocks=table_blocks)


class OnDevice(Cases):
    """Cases with weights as a GPU holds them."""

    def __init__(self, sizes: Sizes):
        super().__init__(sizes, CPU, 0)
        self.make = Untouched(CPU, 0)

    def rows(self, rows: int, width: int, fast: bool) -> Tensor:
        return self.make.rows(rows, width)

    def matrix(self, n: int, k: int, fast: bool) -> quant.Matrix:
        codes = self.make.fp8_codes(n, k)
        blocks = self.make.random_bytes(-(-n // 32), -(-k // 32))
        return quant.RowMatrix(codes, torch.empty(n)) if fast else quant.Fp8Matrix(codes, blocks)

    def expert_weights(self, fast: bool) -> tuple[Any, Any]:
        c = self.c
        shapes = ((2 * c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size))

        def make() -> Any:
            w13, w2 = (self.make.fp4(c.n_routed_experts, n, k) for n, k in shapes)
            return moe_experts.prepare(w13, w2, NUMERICS["fast" if fast else "production"])

        return self.keep(("prepared", fast), make)


@contextmanager
def pretending() -> Iterator[None]:
    """Inside this block the wrappers of the kernels take CPU tensors for those of a Hopper GPU."""
    names, experts = tuning.device_name, triton_experts._hopper
    hopper = import_module("benthic.kernels.triton.moe_experts_hopper")
    driver.set_active(cast("Any", warm.Hopper()))
    tuning.device_name = lambda: DEVICE  # pyright: ignore[reportAttributeAccessIssue]
    triton_experts._hopper = lambda: hopper  # pyright: ignore[reportAttributeAccessIssue]
    backends._load.cache_clear()
    try:
        with runtime.compiling_elsewhere(), backends.use("triton"), torch.inference_mode():
            yield
    finally:
        tuning.device_name, triton_experts._hopper = names, experts
        backends._load.cache_clear()


# ---- what will be compiled -------------------------------------------------------------------------------------------


def of_case(case: Case, listed: list[tune.Choice] | None = None) -> None:
    """Launch the kernels of a case, and, where `listed` is given, those of every candidate of its configurations."""
    with tuning.trying() as trial:
        work = case.build()
        work()
    if case.variant != "invariant":
        with backends.invariant():
            work()
    if listed is None:
        return
    questions: dict[str, dict[str, tuning.Asked]] = {}
    for (op, key), question in trial.asked.items():
        questions.setdefault(op, {})[key] = question
    for op, keys in questions.items():
        for answers in candidates(op, keys, listed):
            with tuning.trying(answers):
                work()


def candidates(
    op: str, keys: dict[str, tuning.Asked], listed: list[tune.Choice]
) -> Iterator[dict[tuple[str, str], tuning.Config]]:
    """The answers that tuning tries at first: each candidate for all keys of an op, then for each of them alone."""
    defaults = {key: question.default for key, question in keys.items()}
    rounds = [tuple(keys)] + ([(key,) for key in keys] if len(keys) > 1 else [])
    for some in rounds:
        for choice in tune.fitting(listed, op, defaults[some[0]]):
            yield {(op, key): defaults[key] | choice.config for key in some}


def of_model(checkpoint: Checkpoint, numerics: str, slots: int, lengths: Iterable[int]) -> None:
    """Launch the kernels that a model is loaded with, and those of its steps."""
    profile = NUMERICS[numerics]
    with packed_weights():
        model = from_checkpoint(checkpoint, profile)
    longest = blocks_for(checkpoint.config.text.max_position_embeddings)
    storage = Storage(model.cache_spec, 1 + max(slots, 64), slots + 1, CPU, table_blocks=longest)
    sampler = Sampler(model.vocab_size, CPU)
    rows = min(GpuConfig().graph_rows, SchedulerConfig().token_budget)
    Runner(model, storage, sampler, on_device=True, graph_rows=rows).rehearse(lengths)


# ---- the run ---------------------------------------------------------------------------------------------------------


def run(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Find and compile; `say` hears how far it is. What does not compile is listed."""
    started = perf_counter()
    jobs = found(options, say)
    traced = perf_counter() - started
    say(f"{len(jobs)} kernels, found in {traced:.0f} s")
    every = max(len(jobs) // 20, 1)
    failures = warm.build(
        jobs, options.workers, lambda done, of: say(f"{done} of {of}") if done % every == 0 or done == of else None
    )
    failed = [{"kernel": failure.job.kernel, "error": failure.error} for failure in failures]
    return {
        "bench": "compile",
        "commit": report.commit(),
        "kernels": len(jobs),
        "found_seconds": traced,
        "seconds": perf_counter() - started,
        "failed": failed + in_cuda(options, say),
    }


def in_cuda(options: Options, say: Callable[[str], None]) -> list[dict[str, str]]:
    """Compile the candidates that are CUDA C++ into their own cache; returns what did not compile."""
    wanted = options.kernels and options.candidates and (options.op or "experts") in "experts"
    if not wanted or cuda_build.nvrtc() is None:
        return []
    experts = OnDevice(RELEASE).c.n_routed_experts
    try:
        for form, shapes in cuda_experts.SHAPES.items():
            cuda_experts.compile_together(shapes, form == "carried", experts)
            say(f"experts in CUDA C++, {form}: {len(shapes)} shapes")
    except KernelBuildError as error:
        return [{"kernel": "stream_experts", "error": str(error)}]
    return []


def found(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[warm.Job, None]:
    """Everything that the options ask for."""
    jobs: dict[warm.Job, None] = {}
    with pretending(), warm.noted(jobs):
        if options.kernels:
            listed = tune.choices() if options.candidates else None
            for case in OnDevice(RELEASE).all():
                if case.on_host or not (options.op is None or options.op in case.op):
                    continue
                try:
                    of_case(case, listed)
                except Exception as error:  # the bench will say so too
                    say(f"{case.name}: {type(error).__name__}: {error}"[:200])
        for name in options.models:
            checkpoint = Checkpoint.open(name)
            for numerics in options.profiles:
                say(f"{name}, {numerics}")
                of_model(checkpoint, numerics, 32, tuning.buckets(Config().scheduler.token_budget))
    return jobs


def text(found: dict[str, Any]) -> str:
    lines = [f"{found['kernels']} kernels in {found['seconds']:.0f} s, {len(found['failed'])} do not compile"]
    return "\n".join(lines + [f"{each['kernel']}: {each['error']}" for each in found["failed"]])
