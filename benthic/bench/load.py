"""How fast a model is loaded: the link, the files alone, tensors staged to the device, and the whole to packed weights.

A checkpoint in the official layout is written first: the release's widths, as few layers, experts and words as make the
size asked for, random bytes of which every one is valid. Its files are in memory when they are read, as they were just
written; a disk is not measured. A run's first load makes pinned memory and compiles, and stands for itself; the others
give the rate.
"""

import math
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benthic.bench import report
from benthic.bench.report import Measure
from benthic.bench.timing import release
from benthic.errors import BenchError
from benthic.kernels.native import build
from benthic.kernels.quant import E4M3
from benthic.models import loading
from benthic.models.deepseek_v41_config import ModelConfig, TensorSpec, tensors
from benthic.models.registry import family
from benthic.models.weights import Checkpoint, write_checkpoint
from benthic.testing.checkpoints import tiny_config
from benthic.types import NUMERICS

WANT = 0.6  # of the link, for what is staged and for the whole
SHARD_BYTES = 1 << 30
MEMORY = Path("/dev/shm")  # files there are in memory
BLOCK = 64 << 20  # values drawn of each kind; tensors are cut out of them
LINK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Options:
    gigabytes: float = 12.0  # so much that what is paid once counts little
    folder: Path | None = None  # for the checkpoint; None: in memory if there is room, else among temporary files
    tiny: bool = False  # widths of a small model, which a CPU can do too
    numerics: str = "production"
    workers: tuple[int, ...] = (16, 12, 8, 4)  # tried besides the loader's own
    pieces: tuple[int, ...] = (4, 2, 1, 8)  # MiB, tried besides the loader's own
    repeats: int = 3
    budget_seconds: float = 60.0  # what is tried besides the loader's own ends then
    device: str = "cuda"
    seed: int = 0


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


def layout(gigabytes: float, tiny: bool) -> dict[str, Any]:
    """config.json of about that size: as many experts a layer as fill it, at least those that a token is sent to."""
    if tiny:
        changes: dict[str, Any] = {}
    else:
        changes = {
            "vocab_size": 16384,
            "num_hidden_layers": 3,
            "compress_ratios": [0, 2, 1],
            "kv_source_layer_ids": [1, 2],
            "index_source_layer_ids": [1, 2],
            "candidate_source_layer_id": None,
            "engram_layer_ids": [1],
            "engram_vocab_size": 20000,
            "engram_compressed_vocab_size": 16384,
            "num_nextn_predict_layers": 0,
            "dspark_noise_token_id": 0,
            "dspark_target_layer_ids": [],
        }

    def made(experts: int | None) -> dict[str, Any]:
        more = {} if experts is None else {"n_routed_experts": experts}
        found = tiny_config("tiny" if tiny else "v41_flash", vision_config=None, **changes, **more)
        return found | {"image_token_id": found["text_config"]["vocab_size"] - 1}

    def size(experts: int) -> int:
        return sum(spec.nbytes for spec in tensors(ModelConfig.from_json(made(experts))).values())

    least: int = made(None)["text_config"]["num_experts_per_tok"]
    each = size(least + 1) - size(least)
    return made(least + max(0, round((1e9 * gigabytes - size(least)) / each)))


def content(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the inventory with random values that are numbers; long ones repeat themselves."""
    specs = tensors(config)
    count = min(BLOCK, max(math.prod(spec.shape) for spec in specs.values()) + 4096)
    rng = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 62), 1 << 62, (-(-count // 8),), generator=rng).view(torch.uint8)
    codes = torch.where((words & 0x7F) == 0x7F, words ^ 1, words)  # 0x7F and 0xFF are NaN
    values = torch.randn(count // 16, generator=rng) * 0.05
    blocks = {
        "I8": words.view(torch.int8),
        "F8_E4M3": codes.view(E4M3),
        "F8_E8M0": 112 + words % 12,  # 2^-15 to 2^-4
        "BF16": values.bfloat16(),
        "F32": values,
    }
    for name, spec in specs.items():
        yield name, cut(blocks[spec.dtype], name, spec)


def cut(block: Tensor, name: str, spec: TensorSpec) -> Tensor:
    """A tensor out of a block of values, beginning where its name says."""
    count = math.prod(spec.shape)
    start = zlib.crc32(name.encode()) % (len(block) // 2 + 1)
    flat = block[start : start + count]
    if len(flat) < count:
        times = -(-(start + count) // len(block))
        flat = block.view(torch.uint8).repeat(times).view(block.dtype)[start : start + count]
    return flat.view(spec.shape)


@contextmanager
def scratch(folder: Path | None, nbytes: int) -> Iterator[Path]:
    """A folder of its own that is gone afterwards, also when the process is told to end."""
    if folder is None:
        room = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
        folder = MEMORY if room > 1.2 * nbytes else Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 1.05 * nbytes:
        raise BenchError(
            "loading", f"{folder} has {free} bytes free, {nbytes} are to be written; name another --folder"
        )
    before = signal.getsignal(signal.SIGTERM)

    def ended(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    try:
        signal.signal(signal.SIGTERM, ended)
        main = True
    except ValueError:  # not the main thread
        main = False
    try:
        with tempfile.TemporaryDirectory(prefix="benthic-load-", dir=folder) as path:
            yield Path(path)
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


# ---- what is measured ------------------------------------------------------------------------------------------------


def link(device: torch.device, repeats: int) -> list[float]:
    """Seconds that LINK_BYTES of pinned host memory take to the device."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    seconds: list[float] = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(device)
        started = perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(perf_counter() - started)
    return seconds[1:]


def files_alone(checkpoint: Checkpoint, names: Sequence[str], workers: int) -> float:
    """Seconds to read all of them into pieces of memory that are used again and again, as the loader reads."""
    made = loading.batches(checkpoint.stored, names)
    jobs = [(tuple(batch.parts.values()), *span) for batch in made for span in batch.spans]
    files = loading.open_files(checkpoint)
    lanes = [loading.Lane(torch.device("cpu"), loading.usual_piece_bytes()) for _ in range(workers)]
    for lane in lanes:
        for piece in lane.pieces:
            piece.fill_(1)  # its pages are made now

    def work(number: int) -> None:
        for parts, start, end in jobs[number::workers]:
            lanes[number].fetch(files, parts, start, end, None)

    try:
        with ThreadPoolExecutor(workers) as pool:
            started = perf_counter()
            for done in [pool.submit(work, number) for number in range(workers)]:
                done.result()
            return perf_counter() - started
    finally:
        for file in files.values():
            os.close(file)


def staged(checkpoint: Checkpoint, names: Sequence[str], device: torch.device, workers: int, piece_bytes: int) -> float:
    """Seconds until every tensor was on the device; nothing is done with them."""
    started = perf_counter()
    with loading.StagedCheckpoint(checkpoint, device, names, workers=workers, piece_bytes=piece_bytes) as source:
        for name in names:
            source.tensor(name)
    wait(device)
    return perf_counter() - started


def mapped(checkpoint: Checkpoint, names: Sequence[str]) -> float:
    """Seconds to copy every tensor out of the mapped files, which is where a CPU's loader takes them from."""
    largest = max(checkpoint.stored[name].nbytes for name in names)
    room = torch.zeros(largest, dtype=torch.uint8)
    started = perf_counter()
    for name in names:
        flat = checkpoint.tensor(name).view(-1).view(torch.uint8)
        room[: len(flat)].copy_(flat)
    return perf_counter() - started


class Whole(NamedTuple):
    """Seconds of one load, and of them those before the first tensor was taken and after the last."""

    seconds: float
    before: float
    after: float


def whole(checkpoint: Checkpoint, numerics: str, device: torch.device) -> Whole:
    """Seconds until the model is there as the engine gets it, its weights packed and checked."""
    module = family(checkpoint.config.architectures[0])
    taken = Taken()
    started = perf_counter()
    model = module.from_checkpoint(checkpoint, NUMERICS[numerics], device, progress=taken)
    wait(device)
    ended = perf_counter()
    del model
    release(device)
    if taken.first is None:  # on a CPU nobody is told
        return Whole(ended - started, 0.0, 0.0)
    return Whole(ended - started, taken.first - started, ended - taken.last)


class Taken:
    """A progress bar that only looks at the clock."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0

    def update(self, nbytes: int) -> None:
        self.last = perf_counter()
        self.first = self.last if self.first is None else self.first


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the run ---------------------------------------------------------------------------------------------------------


def run(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Write a checkpoint, load it in parts and whole, and report; `say` hears each measure. Raises BenchError."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError("loading to a GPU", "torch sees none; --device cpu --tiny runs a small model")
    settings = {
        "device": device.type,
        "tiny": options.tiny,
        "numerics": options.numerics,
        "workers": loading.WORKERS,
        "piece_bytes": loading.usual_piece_bytes(),
        "native": build.available(),
        "job_bytes": loading.JOB_BYTES,
        "repeats": options.repeats,
        "tried": {"workers": options.workers, "piece_mib": options.pieces},
    }
    head = report.header("load", options.seed, settings)
    ends = perf_counter() + options.budget_seconds
    config_json = layout(options.gigabytes, options.tiny)
    config = ModelConfig.from_json(config_json)
    nbytes = sum(spec.nbytes for spec in tensors(config).values())
    with scratch(options.folder, nbytes) as folder:
        say(f"writing {nbytes / 1e9:.2f} GB")
        started = perf_counter()
        path = write_checkpoint(
            folder / "model", config_json, content(config, options.seed), shard_bytes=SHARD_BYTES, synced=False
        )
        wrote = perf_counter() - started
        started = perf_counter()
        checkpoint = Checkpoint.open(path)
        opened = perf_counter() - started
        measures = [*_measures(checkpoint, options, device, ends, say)]
        shards = len({stored.shard for stored in checkpoint.stored.values()})
        del checkpoint
    text = config.text
    written = {
        "bytes": nbytes,
        "tensors": len(tensors(config)),
        "shards": shards,
        "layers": text.num_hidden_layers,
        "experts": text.n_routed_experts,
        "write_seconds": wrote,
        "open_seconds": opened,  # config.json and the headers of all shards checked
    }
    return head | {"versions": report.versions(), "checkpoint": written, "measures": measures}


def _measures(
    checkpoint: Checkpoint, options: Options, device: torch.device, ends: float, say: Callable[[str], None]
) -> Iterator[Measure]:
    """In the order of what matters; what is only tried comes last, while there is time."""
    names = backbone(checkpoint)
    sizes = {name: checkpoint.stored[name].nbytes for name in names}
    total, repeats = sum(sizes.values()), options.repeats
    gpu = device.type == "cuda"

    def rate(name: str, nbytes: int, seconds: Sequence[float], **more: Any) -> Measure:
        rates = [nbytes / took / 1e9 for took in seconds]
        found = Measure(name=name, value=median(rates), unit="GB/s", better="more", samples=rates, **more)
        wanted = found.get("target")
        if wanted is not None:
            found["verdict"] = "met" if found["value"] >= wanted else "missed"
        say(line(found))
        return found

    limit, target = math.inf, None
    if gpu:
        found = rate("link", LINK_BYTES, link(device, repeats), note=f"pieces of {LINK_BYTES >> 20} MiB, pinned")
        yield found
        limit, target = found["value"], WANT * found["value"]

    def share(nbytes: int, seconds: Sequence[float]) -> str:
        return f"{100 * nbytes / median(seconds) / 1e9 / limit:.0f} % of the link; " if gpu else ""

    few = first_bytes(sizes, total // loading.WORKERS)
    one = rate("files, 1 worker", sum(sizes[name] for name in few), [
        files_alone(checkpoint, few, 1) for _ in range(repeats)
    ], note="into host memory, from files in memory")  # fmt: skip
    yield one
    workers = loading.WORKERS
    seconds = [files_alone(checkpoint, names, workers) for _ in range(repeats)]
    many = rate(f"files, {workers} workers", total, seconds, estimate=workers * one["value"])
    yield many
    if not gpu:
        yield rate("mapped", total, [mapped(checkpoint, names) for _ in range(repeats)], note="copied by one thread")
    best = min(limit, many["value"])

    def tried(count: int, piece: int, times: int) -> list[float]:
        return [staged(checkpoint, names, device, count, piece) for _ in range(times)]

    first, *seconds = tried(workers, loading.usual_piece_bytes(), repeats + 1)
    yield rate("staged, first", total, [first], note=f"{len(names)} tensors{'; pinned memory is made' if gpu else ''}")
    in_c = "" if build.available() else ", without C"
    told = f"{share(total, seconds)}{workers} workers, pieces of {loading.usual_piece_bytes() >> 20} MiB{in_c}"
    yield rate("staged", total, seconds, estimate=best, target=target, note=told)
    release(device)
    once, *loads = (whole(checkpoint, options.numerics, device) for _ in range(repeats + 1))
    told = f"{once.seconds:.2f} s{', kernels compiled in them' if gpu else ''}"
    yield rate("whole, first", total, [once.seconds], note=told)
    seconds = [load.seconds for load in loads]
    told = f"{share(total, seconds)}to {'packed' if gpu else 'computable'} weights, profile {options.numerics}"
    if gpu:
        ends_ms = [1e3 * median(times) for times in zip(*(load[1:] for load in loads), strict=True)]
        told += "; {:.0f} ms before the first tensor, {:.0f} after the last".format(*ends_ms)
    yield rate("whole", total, seconds, estimate=best, target=target, note=told)
    for count in options.workers:
        if count not in (1, workers) and perf_counter() < ends:
            yield rate(f"files, {count} workers", total, [files_alone(checkpoint, names, count) for _ in range(2)])
    for count in options.workers:
        for piece in options.pieces:
            if perf_counter() > ends:
                say("no time is left for other numbers of workers and pieces")
                return
            # the first makes the pinned memory
            seconds = tried(count, piece << 20, 3)[1:]
            yield rate(f"staged, {count} x {piece} MiB", total, seconds, note=share(total, seconds).rstrip("; "))


def backbone(checkpoint: Checkpoint) -> list[str]:
    """What `from_checkpoint` takes, in that order: all but a drafter."""
    module = family(checkpoint.config.architectures[0])
    return [*module.backbone_names(checkpoint.config), *module.vision_names(checkpoint.config)]


def first_bytes(sizes: Mapping[str, int], nbytes: int) -> list[str]:
    """The first names that have so many bytes together."""
    found: list[str] = []
    for name, size in sizes.items():
        found.append(name)
        nbytes -= size
        if nbytes <= 0:
            break
    return found


def line(measure: Measure) -> str:
    wanted, verdict = measure.get("target"), measure.get("verdict")
    asked = "" if wanted is None else f", at least {wanted:.1f}: {verdict}"
    note = measure.get("note", "")
    return f"{measure['name']:<24}{measure['value']:>8.2f} GB/s{asked}{'  ' if note else ''}{note}"


def table(found: dict[str, Any]) -> str:
    """For a terminal: what was loaded, a line a measure, and whether the two that have a target met it."""
    of = found["checkpoint"]
    lines = [f"{of['bytes'] / 1e9:.2f} GB, {of['tensors']} tensors in {of['shards']} shards, files in memory"]
    return "\n".join([*lines, *(line(measure) for measure in found["measures"])])
