"""Every layer of a model on streams of our choosing, so that an error shows in the layer that makes it.

Rounding is chaotic end to end in the quantised profiles (model specification, 6.4); blocks fed with equal inputs agree.
Here each layer reads streams that follow from a few stored rows and a seed, whatever the layer before it made of its
own. What a layer stores for later steps is its own: windows wrap, groups stay open across chunks, an indexer has to
choose. What it computes is kept at named sites, in the order of `SITES`. Where all values of another run are there, it
may go on from that run's at the sites of `FED`, so that what its sums moved before them moves no choice behind them.

T rows of all requests together, S streams, D hidden width.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from benthic.cache.spec import Part, blocks_for
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.kernels import hyper, kv_copy, quant
from benthic.models.base import Batch, LayerMemory, Memory, Selection
from benthic.models.deepseek_v41 import DeepseekV41, Layer
from benthic.models.deepseek_v41_config import LayerPlan, ModelConfig, TextConfig
from benthic.models.deepseek_v41_vision import Patches, geometry
from benthic.models.device_memory import DeviceLayer
from benthic.types import Chunk, Draw, SamplingParams, StepPlan

KEPT_ROWS = 4  # real rows stored of each layer
MOST_ROWS = 1200  # of the longest request: a large model's top-k is passed, its candidates are not
QUIET, LOUD = 2.0**-27, 2.0**10  # sizes that show a wrong epsilon, and float16
SITES = (
    "image",
    "embedding",
    "n-gram memory",
    "mixes",
    "attention input",
    "query",
    "window row",
    "latent",
    "stored entry",
    "stored key",
    "entries",
    "candidates",
    "attention",
    "attention output",
    "experts input",
    "experts",
    "streams",
    "head",
)
CHOICES = ("entries", "candidates")  # sites whose rows are sets of numbers, -1 padded
APART = ("image", "stored entry", "stored key", "head")  # sites whose rows are not those of the probe
EXACT = ("mixes",)  # float32 throughout
FED = ("n-gram memory", "experts input")  # what comes next chooses, or passes on in float32 what bfloat16 rounded
ROUNDED = ("embedding", "n-gram memory", "attention input")  # one or two roundings away from equal inputs


# ---- numbers that are the same everywhere ----------------------------------------------------------------------------


def random_words(seed: int, count: int) -> np.ndarray:
    """[count] uint64, the SplitMix64 sequence of a seed; of no library whose next version could change it."""
    with np.errstate(over="ignore"):
        x = np.uint64(seed % 2**64) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def uniform(seed: int, *shape: int) -> Tensor:
    """f32 in [0, 1)."""
    words = random_words(seed, math.prod(shape)) >> np.uint64(40)
    return torch.from_numpy(words.astype(np.float32)).view(shape) / 2**24


def integers(seed: int, count: int, high: int) -> list[int]:
    return [int(word >> np.uint64(11)) % high for word in random_words(seed, count)]


# ---- streams ---------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Streams of a few tokens at the entry of one layer, as they are stored. The last one drives the shared expert."""

    codes: Tensor  # [K, S, D] E4M3 bytes, of the row over its scale
    scales: Tensor  # [K] f32
    pre: Tensor  # [K, S] f32, how they are read

    @classmethod
    def of(cls, streams: Tensor, pre: Tensor) -> "Rows":
        scales = streams.float().abs().amax((1, 2)).clamp(min=1e-30) / 448
        codes = (streams.float() / scales[:, None, None]).to(quant.E4M3)
        return cls(codes.view(torch.uint8), scales, pre.float())

    def values(self) -> Tensor:
        """[K, S, D] f32."""
        return self.codes.view(quant.E4M3).float() * self.scales[:, None, None]


def spread(rows: Rows, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Stored rows -> streams [count, S, D] f32 with bf16 values, and their read weights [count, S] f32.

    Each is between two of the rows, and half as much is noise, so that no two are alike. A few are very quiet or very
    loud, which norms must undo, and one is the row that drives the shared expert.
    """
    values, driven = rows.values(), rows.codes.shape[0] - 1
    first = torch.tensor(integers(seed, count, driven))
    second = torch.tensor(integers(seed + 1, count, driven))
    share = uniform(seed + 2, count, 1, 1)
    size = values.square().mean(-1, keepdim=True).sqrt()[first]
    noise = (uniform(seed + 3, count, *values.shape[1:]) - 0.5) * (math.sqrt(3) * size)
    s = values[first] * (1 - share) + values[second] * share + noise
    s[special("quiet", count)] *= QUIET
    s[special("loud", count)] *= LOUD
    pre = rows.pre[first]
    there = special("driven", count)
    s[there], pre[there] = values[driven], rows.pre[driven]
    return s.bfloat16().float(), pre


SPECIAL = {"quiet": (59, 5), "loud": (83, 20), "driven": (61, 30)}  # one row in so many, from this one on


def special(kind: str, count: int) -> Tensor:
    """[n] int64: rows below `count` of one kind; the first three of each are of no other."""
    every, first = SPECIAL[kind]
    return torch.arange(first, max(count, first), every)


def plain_rows(config: TextConfig) -> list[Rows]:
    """Rows of no model in particular, for one whose own are not known: even noise, every stream read alike."""
    shape = (KEPT_ROWS + 1, config.hc_mult, config.hidden_size)
    pre = torch.full(shape[:2], 1 / config.hc_mult)
    return [Rows.of(uniform(7 * i + 1, *shape) - 0.5, pre) for i in range(config.num_hidden_layers + 1)]


def driving(layer: Layer, pre: Tensor) -> Tensor:
    """[S, D] f32 streams whose read, normed, sends some channel of the shared expert beyond its clamp, if any can."""
    ffn, norm = layer.ffn, layer.ffn_norm.weight.float().cpu()
    w13 = quant.values(ffn.shared_w13.matrix).float().cpu()
    unit = torch.nn.functional.normalize(w13, dim=1)
    gate, up = unit.chunk(2)
    wanted = gate + up  # [I, D]
    read = wanted / torch.where(norm.abs() < 1e-3, 1e-3, norm)
    h = read * torch.rsqrt(read.square().mean(1, keepdim=True)) * norm
    a, b = (h @ w13.t()).chunk(2, dim=1)
    limit = ffn.limit if ffn.limit > 0 else torch.inf
    free = torch.nn.functional.silu(a) * b
    held = torch.nn.functional.silu(a.clamp(max=limit)) * b.clamp(-limit, limit)
    best = int((free - held).norm(dim=1).argmax())
    return read[best].expand(pre.shape[-1], -1) * (LOUD / read[best].abs().max())


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """Three requests side by side: a long one past every choice that is made, a short one, and one token."""

    prompts: tuple[tuple[int, ...], ...]
    steps: tuple[StepPlan, ...]
    images: Tensor  # [rows] bool: rows of an image span
    sampled: Tensor  # [R] int64 rows whose sites are kept, numbered request after request: plain ones, then special
    kinds: dict[str, slice]  # of those rows: "plain", "quiet", "loud", "driven", "image"
    entries: Tensor  # [E] int64 entries of the long request whose records are kept

    @property
    def rows(self) -> int:
        return sum(map(len, self.prompts))


def probe(model: ModelConfig, seed: int) -> Probe:
    """Chunks of odd size, then decode steps; blocks lie out of order, slots too. The short one holds an image."""
    config = model.text
    candidates = config.candidate_topk_blocks * config.candidate_block_size if config.index_source_layer_ids else 0
    ratios = [ratio for ratio in config.compress_ratios if ratio] or [1]
    long = min(max(max(ratios) * config.index_topk, candidates, 2 * config.sliding_window) + 43, MOST_ROWS)
    lengths = (long, min(37, long), 1)
    ids = integers(seed, sum(lengths), config.vocab_size - 3)
    prompts: list[tuple[int, ...]] = []
    for length in lengths:
        prompts.append(tuple(3 + token for token in ids[:length]))
        ids = ids[length:]
    images = torch.zeros(sum(lengths), dtype=torch.bool)
    if model.vision is not None and lengths[1] > 16:
        images[long + 8 : long + 16] = True
        prompts[1] = (*prompts[1][:8], *([model.image_token_id] * 8), *prompts[1][16:])
    steps = plans(prompts, 75, 8)
    unusual = {kind: special(kind, long).tolist()[:3] for kind in SPECIAL}
    taken = set().union(*(special(kind, sum(lengths)).tolist() for kind in SPECIAL))
    unusual["image"] = [row for row in images.nonzero()[:, 0].tolist() if row not in taken][:3]
    edges = {1, 63, 65, 75, 128, config.sliding_window, long - 30, long - 12, *range(long - 4, long)}
    rows = sorted(row for row in edges - taken if 0 <= row < long)
    rows += sorted({long, long + min(20, lengths[1] - 1), long + lengths[1] - 1, long + lengths[1]})
    kinds = {"plain": slice(0, len(rows))}
    for kind, some in unusual.items():
        kinds[kind] = slice(len(rows), len(rows) + len(some))
        rows += some
    kept = torch.tensor(sorted(set(integers(seed + 1, 12, long // max(ratios)))))
    return Probe(tuple(prompts), steps, images, torch.tensor(rows), kinds, kept)


def picture(config: ModelConfig, seed: int) -> Patches:
    """Noise, three cells wide and two high."""
    assert config.vision is not None, "a picture for a model that reads text only"
    vision = config.vision
    cell = vision.patch_size * vision.downsample_ratio
    where = geometry(3 * cell, 2 * cell, vision)
    count = where.grid_h * where.grid_w
    words = random_words(seed, count * 3 * vision.patch_size**2) >> np.uint64(56)
    return Patches(torch.from_numpy(words.astype(np.uint8)).view(count, -1), where)


def plans(prompts: Sequence[Sequence[int]], chunk: int, decode: int) -> tuple[StepPlan, ...]:
    """Steps that bring up the prompts in chunks, side by side, the last `decode` tokens of each one by one."""
    greedy = SamplingParams(temperature=0)
    done = [0] * len(prompts)
    blocks = [blocks_for(len(ids)) for ids in prompts]
    free = sorted(range(1, sum(blocks) + 1), key=lambda block: block * 7919 % 31)  # out of order
    tables: list[tuple[int, ...]] = []
    for count in blocks:
        tables.append(tuple(free[:count]))
        free = free[count:]
    steps: list[StepPlan] = []
    while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
        chunks: list[Chunk] = []
        for i, ids in enumerate(prompts):
            start = done[i]
            if start == len(ids):
                continue
            whole = max(len(ids) - decode, 1)
            end = min(start + chunk, whole) if start < whole else start + 1
            table = tables[i][: blocks_for(end)]
            chunks.append(Chunk(i, start, tuple(ids[start:end]), 0, True, len(prompts) - i, table))
            done[i] = end
        draws = tuple(Draw(greedy, 0, (), None, 0) for _ in chunks)
        steps.append(StepPlan(len(steps), tuple(chunks), draws))
    return tuple(steps)


# ---- sites -----------------------------------------------------------------------------------------------------------

Values = dict[tuple[int, str], Tensor]  # layer, site -> [T, n] of all rows, or [E, n] records; on the CPU


class _Watched:
    """A layer's memory that tells what goes through it."""

    def __init__(self, inner: LayerMemory, see: Callable[[str, Tensor], None]):
        self.inner, self.see = inner, see

    def compress(self, a: Tensor, b: Tensor | None, norm: Any, freqs: Tensor, dtype: torch.dtype) -> Tensor:
        latent = self.inner.compress(a, b, norm, freqs, dtype)
        if isinstance(self.inner, DeviceLayer):  # rows that end no group mean nothing, and nobody shall compare them
            ends = self.inner.memory.entries(self.inner.plan.ratio).records >= 0
            latent = torch.where(ends[:, None], latent, 0)
        self.see("latent", latent)
        return latent

    def store_keys(self, k: Tensor, norm: Any, freqs: Tensor) -> None:
        self.inner.store_keys(k, norm, freqs)

    def select(self, q: Tensor, weights: Tensor, shared: Selection | None) -> Selection:
        chosen = self.inner.select(q, weights, shared)
        self.see("entries", chosen.entries)
        if chosen.candidates is not None and chosen.candidates is not (shared and shared.candidates):
            self.see("candidates", chosen.candidates)
        return chosen

    def attend(self, q: Tensor, kw: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
        self.see("query", q.flatten(1))
        self.see("window row", kw)
        o = self.inner.attend(q, kw, selection, sink)
        self.see("attention", o.flatten(1))
        return o


@contextmanager
def _seeing(layer: Layer, see: Callable[[str, Tensor], None], feed: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Inside this block the layer tells what passes between its parts, and its experts read what `feed` gives them."""

    def into(site: str) -> Callable[..., tuple[Any, ...]]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            see(site, args[0])
            return (feed(site, args[0]), *args[1:])

        return hook

    def out_of(site: str) -> Callable[..., None]:
        return lambda _, args, out: see(site, out[0] if isinstance(out, tuple) else out)

    read = layer.hc_attn.read

    def told(*args: Any) -> Any:
        h, streams = read(*args)
        assert streams.post is not None, "a read that does not say how its result is written"
        assert streams.comb is not None, "a read that does not say how the streams exchange"
        see("mixes", torch.cat([streams.pre, streams.post, streams.comb.flatten(1)], dim=1))
        return h, streams

    with ExitStack() as undo:
        for part, inside, outside in (
            (layer.attn, "attention input", "attention output"),
            (layer.ffn, "experts input", "experts"),
        ):
            undo.callback(part.register_forward_pre_hook(into(inside)).remove)
            undo.callback(part.register_forward_hook(out_of(outside)).remove)
        vars(layer.hc_attn)["read"] = told
        undo.callback(vars(layer.hc_attn).pop, "read")
        yield


@dataclass(frozen=True, slots=True)
class Step:
    batch: Batch
    memory: Memory
    rows: Tensor  # [T'] int64 which rows of the probe these are


def prepare(model: DeepseekV41, probe: Probe, device: torch.device, on_device: bool) -> list[Step]:
    """The steps of a probe on a cache of its own, which reads as NaN where nothing was written.

    on_device  in the form of a GPU's steps.
    """
    blocks = sum(blocks_for(len(ids)) for ids in probe.prompts)
    storage = Storage(model.cache_spec, blocks + 1, len(probe.prompts) + 1, device)
    storage.poison()
    uploads = batches.Uploads(storage) if on_device else None
    first = [sum(map(len, probe.prompts[:i])) for i in range(len(probe.prompts))]
    steps: list[Step] = []
    for plan in probe.steps:
        if uploads is None:
            batch = batches.build(plan, storage)
            batches.remember(batch, storage)
        else:
            step = uploads.step(plan)
            batch = step.batch
            batches.finish(step, storage, None)
        rows = torch.cat([first[c.request] + c.start + torch.arange(len(c.tokens)) for c in plan.chunks])
        if bool(probe.images[rows].any()):  # as an engine has it: a step without images says nothing of them
            batch = replace(batch, images=probe.images[rows].to(device))
        steps.append(Step(batch, model.memory(storage, batch), rows))
    return steps


def run(
    model: DeepseekV41,
    probe: Probe,
    stored: Sequence[Rows],
    seed: int,
    *,
    layers: Sequence[int] | None = None,
    layer: Callable[[int], Layer] | None = None,
    keep: bool = True,
    on_device: bool | None = None,
    fed: Values | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Values:
    """Every layer, one after another, over all steps.

    model      its own memory, embedding and head are used.
    stored     rows of each layer.
    layers     which ones, with those whose entries they read (`closure`); None: all, embedding and head too.
    layer      where layers come from; None: the model's own.
    keep       collect values; off for whoever watches the ops instead.
    on_device  steps in their GPU form; None: when the model is on a GPU.
    fed        values of another run at the sites of `FED`, from which layers go on there; None: from their own.
    """
    found: dict[tuple[int, str], list[Tensor]] = {}
    device = model.classes.device
    steps = prepare(model, probe, device, device.type == "cuda" if on_device is None else on_device)
    shared: list[Selection | None] = [None] * len(steps)
    order = torch.cat([step.rows for step in steps]).argsort()
    dtype = torch.float32 if model.numerics.wide else torch.bfloat16

    def see(index: int, site: str, value: Tensor) -> None:
        if keep:
            found.setdefault((index, site), []).append(
                value.detach().float().cpu() if value.is_floating_point() else value.cpu()
            )

    def feed(index: int, rows: Tensor, site: str, own: Tensor) -> Tensor:
        return own if fed is None or site not in FED else fed[index, site][rows].view(own.shape).to(own)

    if layers is None:
        if model.vision is not None and keep:
            see(-1, "image", model.image_rows(picture(model.config, seed)))
        for step in steps:
            see(-1, "embedding", model.embed(step.batch.ids))
    last = len(model.plan)
    for index in range(last) if layers is None else layers:
        part = model.layers[index] if layer is None else layer(index)
        part = cast("Layer", part)
        s, pre = (value.to(device) for value in spread(stored[index], probe.rows, seed + 100 * index))
        for i, step in enumerate(steps):
            rows = step.rows.to(device)
            told, given = partial(see, index), partial(feed, index, step.rows)
            streams = hyper.Streams(s[rows].to(dtype), pre[rows])
            entered = part.recall(streams, model.ngrams(step.batch), step.batch.images, None)
            if part.engram is not None:
                told("n-gram memory", entered.s.flatten(1))
                entered = entered._replace(s=given("n-gram memory", entered.s))
            watched = _Watched(step.memory.layer(index), told)
            with _seeing(part, told, given):
                out, shared[i] = part(entered, step.batch, cast("LayerMemory", watched), shared[i])
            told("streams", hyper.settle(out).flatten(1))
        if keep:
            for site, name in (("stored entry", "main"), ("stored key", "index")):
                if part.attn.compressor is not None:
                    found[index, site] = [_records(steps[-1], probe, model.plan[index], cast("Part", name))]
        progress(index)
    if layers is None:
        s, pre = (value.to(device) for value in spread(stored[-1], probe.rows, seed - 100))
        for step in steps:
            rows = step.rows.to(device)[step.batch.logit_rows]
            read = hyper.hyper_collapse(s[rows].to(dtype), pre[rows])
            see(last, "head", model.logits(read))
    return {at: _in_order(at[1], parts, order, model.plan, at[0], steps) for at, parts in found.items()}


def _records(step: Step, probe: Probe, plan: LayerPlan, part: Part) -> Tensor:
    """[E, n] what the long request stored."""
    paged = cast("Any", step.memory).paged(plan.index, part)
    table = torch.tensor(max((c.blocks for s in probe.steps for c in s.chunks if c.request == 0), key=len))
    ids = table[probe.entries // paged.entries] * paged.entries + probe.entries % paged.entries
    return kv_copy.read_records_reference(paged, ids.to(paged.pool.device)).cpu()


def _in_order(
    site: str, parts: list[Tensor], order: Tensor, plans: Sequence[LayerPlan], index: int, steps: Sequence[Step]
) -> Tensor:
    """Values by row of the probe. Latents are those of rows that end a group; head rows stay in the order of steps."""
    values = torch.cat(parts)
    if site in APART:
        return values
    if site != "latent":
        return values[order]
    ratio = plans[index].ratio
    ends = torch.cat([(step.batch.positions.cpu() + 1) % ratio == 0 for step in steps])
    if len(values) == len(order):  # a memory that works on all rows
        values = values[ends]
    rows = torch.cat([step.rows for step in steps])[ends]
    return values[rows.argsort()]


def closure(plan: Sequence[LayerPlan], wanted: Sequence[int]) -> list[int]:
    """The layers wanted, and those whose keys, entries, choices or candidates they read."""
    todo, found = list(wanted), set[int]()
    while todo:
        index = todo.pop()
        if index in found:
            continue
        found.add(index)
        here = plan[index]
        todo += [at for at in (here.kv_from, here.topk_from, here.keys_from, here.candidates_from) if at is not None]
    return sorted(found)
