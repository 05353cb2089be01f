"""What the number formats of products cost in accuracy: product by product, layer by layer, in logits and in answers.

The checkpoint means products of MXFP8 activations (E4M3, one power-of-two scale per 32 channels of a token) with FP8 or
FP4 weights. On Hopper four ways compute them; here they are values, so that any device can say what each costs:

    exact       the products as they are, which bfloat16 operands hold: only the result is rounded
    per 128     activations quantised anew against one float32 scale per 128 channels, weights against one power of two
    per token   activations quantised anew against one float32 scale a token, weights against one power of two a row
    carried     the MXFP8 values against one power of two a token, weights against one a row (`quant.carry`)

Errors are ||y' - y|| / ||y|| against the exact product in float64. A carried value is off by at most 2^-10 s, where
s <= max|row| / 224: less than 4.4e-6 of the row's largest value, so at most sqrt(K) times that of the row's norm. What
this bound does not cover are products whose weights cancel just the channels that set the scale ("muted" below). What
a guard against those would do stands beside the errors; `ranges` finds whether a model has any.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benthic.bench import report
from benthic.bench.eval.documents import read_documents
from benthic.bench.eval.local import bits_per_byte
from benthic.bench.report import Measure
from benthic.cache.storage import Storage
from benthic.config import Config
from benthic.engine import batch as batches
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.kernels import backends, fused, gemm, hyper, moe_experts, quant, swiglu
from benthic.models.deepseek_v41 import Attention, Compressor, DeepseekV41, from_checkpoint
from benthic.models.modules import Linear
from benthic.models.weights import Checkpoint
from benthic.testing.ops import Line
from benthic.text.prompt import ChatEncoder
from benthic.text.tokenizer import Tokenizer
from benthic.types import NUMERICS, Chunk, SamplingParams, StepPlan

GUARDS = (6, 8, 10, 12, 14)  # binades
BLOCK = 128  # channels under one scale of the coarser schemes
REFERENCE = "reference"  # the profile that the others are held against
_SCALED = 448.0  # largest E4M3 number


@dataclass(frozen=True, slots=True)
class Options:
    """data, documents: as in `bench eval`; None: no text, synthetic products only.

    tokens     text tokens whose products and logits are compared
    profiles   held against REFERENCE; the floor is always among the results
    needles    (prompt, answer): a code hidden in the prompt, and the code
    seed       of synthetic values
    """

    data: Path | None
    documents: int = 200
    tokens: int = 1024
    profiles: tuple[str, ...] = ("production", "fast")
    needles: tuple[tuple[str, str], ...] = ()
    seed: int = 0


# ---- schemes ---------------------------------------------------------------------------------------------------------


def blocks_requantised(x: Tensor, width: int) -> Tensor:
    """E4M3 against one float32 scale, max/448, per `width` channels: x [..., K] -> f32. 0: a row has one."""
    parts = x.float().unflatten(-1, (-1, width or x.shape[-1]))
    scale = (parts.abs().amax(-1, keepdim=True) / _SCALED).clamp(min=torch.finfo(torch.float32).tiny)
    return ((parts / scale).clamp(-_SCALED, _SCALED).to(quant.E4M3).float() * scale).flatten(-2)


def blocks_carried(x: Tensor, width: int) -> Tensor:
    """One power-of-two scale per `width` channels: x [..., K] -> f32. 0: a row has one."""
    return quant.roundtrip_carry(x.float().unflatten(-1, (-1, width or x.shape[-1]))).flatten(-2)


class Scheme(NamedTuple):
    """What a product sees: activations from (raw [T, K], on the FP8 grid [T, K]), weights from [N, K]; all f32."""

    activations: Callable[[Tensor, Tensor], Tensor]
    weights: Callable[[Tensor], Tensor]


SCHEMES = {
    "exact": Scheme(lambda raw, x: x, lambda w: w),
    "per 128": Scheme(lambda raw, x: blocks_requantised(raw, BLOCK), lambda w: blocks_carried(w, BLOCK)),
    "per token": Scheme(lambda raw, x: blocks_requantised(raw, 0), lambda w: blocks_carried(w, 0)),
    "carried": Scheme(lambda raw, x: blocks_carried(x, 0), lambda w: blocks_carried(w, 0)),
}


def distance(x: Tensor) -> Tensor:
    """Binades from a row's largest value down to the largest one of its lowest group: x [T, K] -> [T] int.

    Groups of zeros do not count; their values are carried exactly.
    """
    tops = x.float().abs().unflatten(-1, (-1, quant.MX_GROUP)).amax(-1)  # [T, K/32]
    exponents = torch.frexp(tops).exponent
    highest = exponents.masked_fill(tops == 0, -1000).amax(-1)
    lowest = exponents.masked_fill(tops == 0, 1000).amin(-1)
    return (highest - lowest).clamp(min=0)


def guarded(x: Tensor, most: int) -> Tensor:
    """Carried, but for tokens whose `distance` is above `most`: those keep their values."""
    return torch.where((distance(x) > most)[:, None], x.float(), blocks_carried(x, 0))


def in_two(x: Tensor) -> Tensor:
    """A token as the sum of two carried rows: what one scale leaves over is carried by a second one."""
    high = blocks_carried(x, 0)
    return high + blocks_carried(x.float() - high, 0)


class Spread(NamedTuple):
    """How activations lie in the window of one scale."""

    tokens: int
    above: dict[int, float]  # guard -> share of tokens whose distance is above it
    farthest: int
    lost: float  # largest ||carried - x|| / ||x|| of a token

    @classmethod
    def of(cls, x: Tensor) -> "Spread":
        far = distance(x)
        lost = (blocks_carried(x, 0) - x.float()).norm(dim=-1) / x.float().norm(dim=-1).clamp(min=1e-30)
        return cls(
            x.shape[0],
            {guard: float((far > guard).float().mean()) for guard in GUARDS},
            int(far.max()),
            float(lost.max()),
        )

    def json(self) -> dict[str, Any]:
        return self._asdict() | {"above": {str(k): v for k, v in self.above.items()}}


# ---- errors of one product -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sums:
    """Squares summed over products of one name."""

    want: float = 0.0
    off: float = 0.0
    rounded: float = 0.0
    worst: float = 0.0

    def add(self, y: Tensor, want: Tensor) -> None:
        self.want += float(want.square().sum())
        self.off += float((y - want).square().sum())
        self.rounded += float((y.bfloat16().double() - want).square().sum())
        rows = (y - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-300)
        self.worst = max(self.worst, float(rows.max()) if rows.numel() else 0.0)

    def json(self) -> dict[str, float]:
        """error: of the sum; rounded: after it went to bfloat16; worst: largest error of a token, before that."""
        size = max(self.want, 1e-300)
        return {"error": math.sqrt(self.off / size), "rounded": math.sqrt(self.rounded / size), "worst": self.worst}


class Product(NamedTuple):
    name: str
    raw: Tensor  # [T, K] before its quantiser, where known; else on the grid
    x: Tensor  # [T, K] on the FP8 grid
    weight: Tensor  # [N, K] values
    packed: quant.Fp8Matrix | quant.Fp4Matrix | None = None


def errors(products: Sequence[Product]) -> dict[str, Any]:
    """Of products of one name: sums by scheme, by guard of the carried one, and carried in two; spread; how many."""
    schemes = {name: Sums() for name in SCHEMES}
    guards = {guard: Sums() for guard in GUARDS}
    two = Sums()
    for product in products:
        weight = product.weight.float()
        want = product.x.double() @ weight.double().T
        for name, scheme in SCHEMES.items():
            x = scheme.activations(product.raw, product.x.float())
            schemes[name].add(x.double() @ scheme.weights(weight).double().T, want)
        for guard in GUARDS:
            guards[guard].add(guarded(product.x, guard).double() @ weight.double().T, want)
        two.add(in_two(product.x).double() @ weight.double().T, want)
    return {
        "schemes": {name: sums.json() for name, sums in schemes.items()},
        "guards": {str(guard): sums.json() for guard, sums in guards.items()},
        "in two": two.json(),
        "spread": Spread.of(torch.cat([product.x for product in products])).json(),
        "products": len(products),
    }


# ---- synthetic products ----------------------------------------------------------------------------------------------


def synthetic(device: torch.device, seed: int, rows: int, outputs: int, inputs: int) -> Iterator[Product]:
    """Gaussian values with what is known to hurt: outlier channels and tokens, uneven groups, uneven weight rows."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device)
    base, weights = normal(rows, inputs), normal(outputs, inputs) / inputs**0.5
    channels = torch.randperm(inputs, generator=generator, device=device)[: max(1, inputs // 1000)]

    def product(name: str, x: Tensor, w: Tensor, *, fp4: bool = False) -> Product:
        raw = x.bfloat16()
        pack = quant.Fp4Matrix(*quant.quantise_mxfp4(w)) if fp4 else quant.Fp8Matrix(*quant.quantise_weight_fp8(w))
        return Product(name, raw, quant.roundtrip_fp8(raw), quant.values(pack), pack)

    yield product("normal", base, weights)
    for factor in (30, 300, 3000, 30000):
        x, muted = base.clone(), weights.clone()
        x[:, channels] *= factor
        muted[:, channels] /= factor  # a row of 32x32 blocks would hide it, so these weights are FP4
        yield product(f"outlier channels x {factor}", x, weights)
        yield product(f"outlier channels x {factor}, muted", x, muted, fp4=True)
    x = base.clone()
    x[:: max(1, rows // 8)] *= 1000
    yield product("outlier tokens x 1000", x, weights)
    for binades in (4, 8, 12, 16):
        yield product(f"activation groups over 2^{binades}", _uneven(base, binades, generator), weights)
    for binades in (4, 8, 12, 16):
        yield product(f"weight groups over 2^{binades}", base, _uneven(weights, binades, generator), fp4=True)


def _uneven(x: Tensor, binades: int, generator: torch.Generator) -> Tensor:
    """Each group of 32 times a power of two from 2^-binades to 1."""
    parts = x.unflatten(-1, (-1, quant.MX_GROUP))
    down = torch.randint(0, binades + 1, parts.shape[:-1], generator=generator, device=x.device)
    return (parts * torch.exp2(-down.float())[..., None]).flatten(-2)


def kernel_errors(products: Sequence[Product]) -> dict[str, dict[str, float]]:
    """What this device's `linear` makes of them: {name: {"exact", "carried"}}, errors of bfloat16 results.

    Here the accumulator counts too, which on some devices is narrower for FP8 operands than float32.
    """
    found: dict[str, dict[str, float]] = {}
    for product in products:
        want = product.x.double() @ product.weight.double().T
        assert product.packed is not None, product.name
        packs: dict[str, quant.Matrix] = {"carried": quant.by_row(product.packed)}
        if isinstance(product.packed, quant.Fp8Matrix):
            packs["exact"] = product.packed
        x = {"exact": product.x, "carried": quant.roundtrip_carry(product.x)}
        found[product.name] = {}
        for name, weight in packs.items():
            sums = Sums()
            sums.add(gemm.linear(x[name], weight).double(), want)
            found[product.name][name] = sums.json()["error"]
    return found


def sum_errors(device: torch.device, seed: int, rows: int, outputs: int, inputs: int) -> dict[str, dict[str, float]]:
    """How a product of E4M3 values is added up: {"centred", "positive"} -> {way: error}, scales all one.

    Operands are exact in every way, so that only sums are left and, by the vendor's library, the rounding to bfloat16.
    Positive values are normal around one: their sums grow, and a narrow accumulator shows.
    """
    generator = torch.Generator(device).manual_seed(seed)
    ones = torch.ones(outputs, device=device)
    blocks = torch.full((-(-outputs // 32), -(-inputs // 32)), 127, dtype=torch.uint8, device=device)
    found: dict[str, dict[str, float]] = {}
    for name, shift in (("centred", 0.0), ("positive", 1.0)):
        x, w = (
            (torch.randn(count, inputs, generator=generator, device=device) + shift).to(quant.E4M3)
            for count in (rows, outputs)
        )
        want = x.double() @ w.double().T
        packs = {"bf16 operands": quant.Fp8Matrix(w, blocks), "FP8 operands": quant.RowMatrix(w, ones)}
        ways = {way: partial(gemm.linear, x.bfloat16(), pack, torch.float32) for way, pack in packs.items()}
        if device.type == "cuda":
            product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
            vendor = partial(product, x, w.T, ones[0], ones[0], out_dtype=torch.bfloat16)
            ways |= {"library": vendor, "library, fast": partial(vendor, use_fast_accum=True)}
        found[name] = {way: float((run().double() - want).norm() / want.norm()) for way, run in ways.items()}
    return found


# ---- products of a model ---------------------------------------------------------------------------------------------


@contextmanager
def watched(model: DeepseekV41, seen: list[Product]) -> Iterator[None]:
    """Inside this block every product of a quantised input is noted, experts one by one. Nothing is fused."""
    names = {id(module): name for name, module in model.named_modules()}
    raws: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor on the grid -> itself, what it came from
    kinds = _kinds(model, names)

    def on_grid(x: Tensor, group: int = quant.MX_GROUP) -> Tensor:
        out = roundtrip(x, group)
        raws[id(out)] = (out, x)
        return out

    def note(name: str, x: Tensor, weight: Tensor, raw: Tensor) -> None:
        seen.append(Product(name, raw.detach(), x.detach(), weight))

    def linear(x: Tensor, weight: quant.Matrix, out_dtype: torch.dtype | None = None) -> Tensor:
        name = kinds.get(_place(weight))
        if name is not None:
            note(name, x, quant.values(weight), raws.get(id(x), (x, x))[1].view_as(x))
        return plain_linear(x, weight, out_dtype)

    def grouped(x: Tensor, weight: quant.Matrix) -> Tensor:
        name = kinds.get(_place(weight))
        if name is not None and id(x) in raws:  # the reference profile leaves this input alone
            values, raw = quant.values(weight), raws[id(x)][1]
            for g in range(x.shape[1]):
                note(name, x[:, g], values[g], raw[:, g])
        return plain_grouped(x, weight)

    def experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Any, w2: Any, limit: float, *rest: Any) -> Tensor:
        raw = raws.get(id(x), (x, x))[1]
        for e in range(w13.shape[0]):
            row, slot = (ids == e).nonzero(as_tuple=True)
            if len(row):
                first, second = _expert(w13, e), _expert(w2, e)
                note("experts.w13", x[row], first, raw[row])
                gate, up = plain_linear(x[row], first).chunk(2, dim=-1)
                y = swiglu.swiglu(gate, up, limit, weights[row, slot], torch.float32)
                note("experts.w2", roundtrip(y).to(x.dtype), second, y)
        return plain_experts(x, ids, weights, w13, w2, limit, *rest)

    roundtrip, plain_linear, plain_grouped = quant.roundtrip_fp8, gemm.linear, gemm.grouped_linear
    plain_experts = moe_experts.experts
    patches: list[tuple[Any, str, Any]] = [
        (quant, "roundtrip_fp8", on_grid),
        (gemm, "linear", linear),
        (gemm, "grouped_linear", grouped),
        (moe_experts, "experts", experts),
    ]
    saved = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, run in patches:
            setattr(module, name, run)
        with fused.apart():
            yield
    finally:
        for module, name, run in saved:
            setattr(module, name, run)


def _kinds(model: DeepseekV41, names: dict[int, str]) -> dict[int, str]:
    """First address of each FP8 weight -> the end of its module's name: "attn.wq_b" of every layer is one kind.

    Weights that a model joins at first use are joined now: what they leave free would be another tensor's address.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            _ = module.input_weights
        if isinstance(module, Compressor) and module.wgate is not None:
            _ = module.both
    kinds: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, Linear) and module.store == "fp8":
            kinds[_place(module.matrix)] = ".".join(names[id(module)].split(".")[2:])  # without "layers.7."
    return kinds


def _place(weight: quant.Matrix) -> int:
    return (weight if isinstance(weight, Tensor) else weight[0]).data_ptr()


def _expert(weight: quant.Matrix, index: int) -> Tensor:
    if isinstance(weight, quant.Fp4Matrix):
        return quant.values(quant.expert(weight, index))
    assert isinstance(weight, Tensor), type(weight)
    return weight[index]


def weight_errors(products: Sequence[Product]) -> dict[str, float]:
    """Weights alone, one scale a row: error of a matrix, and largest binades between groups of one row."""
    off = sum(float((blocks_carried(p.weight, 0) - p.weight.float()).double().square().sum()) for p in products)
    size = sum(float(p.weight.double().square().sum()) for p in products)
    return {"error": math.sqrt(off / size), "farthest": max(int(distance(p.weight).max()) for p in products)}


RANGE = 2.0**-8  # most that one scale may put a token's result off: what rounding it to bfloat16 does


def ranges(checkpoint: Checkpoint, texts: Sequence[Sequence[int]]) -> list[Line]:
    """Do a model's values fit under one scale a token and one a weight row? A line a kind of product, the worst token.

    Everything by value, on a CPU, in the activations that the model has in profile `production`.
    """
    worst: dict[str, float] = {}
    tokens: dict[str, int] = {}
    farthest: dict[str, int] = {}
    model = from_checkpoint(checkpoint, NUMERICS["production"])
    for ids in texts:
        seen: list[Product] = []
        with watched(model, seen):
            forward(model, ids)
        for product in seen:
            sums, weight, name = Sums(), product.weight.float(), product.name
            want = product.x.double() @ weight.double().T
            sums.add(blocks_carried(product.x, 0).double() @ blocks_carried(weight, 0).double().T, want)
            worst[name] = max(worst.get(name, 0.0), sums.worst)
            tokens[name] = tokens.get(name, 0) + len(want)
            farthest[name] = max(farthest.get(name, 0), int(distance(product.x).max()))
    unit = "of a token's result, one scale against exact"
    lines = [Line("range", name, tokens[name], worst[name], RANGE, unit) for name in sorted(worst)]
    return lines + [
        Line("range", f"{name}: groups", tokens[name], farthest[name], None, "binades from the largest to the lowest")
        for name in sorted(worst)
    ]


# ---- one forward over a text -----------------------------------------------------------------------------------------


class Run(NamedTuple):
    logits: Tensor  # [T, V] f32
    entries: list[hyper.Streams]  # what each layer read
    exits: list[Tensor]  # [T, S, D] what each layer left, settled


@torch.inference_mode()
def forward(
    model: DeepseekV41,
    ids: Sequence[int],
    fed: Sequence[hyper.Streams] | None = None,
    *,
    on_device: bool | None = None,
) -> Run:
    """The whole text in one step.

    fed        streams that each layer reads in place of those that reach it.
    on_device  in the GPU form of a step; None: when the model is on a GPU.
    """
    blocks = -(-len(ids) // 128)
    storage = Storage(model.cache_spec, blocks + 1, 2, model.embed.weight.device)
    plan = StepPlan(0, (Chunk(0, 0, tuple(ids), 0, False, 1, tuple(range(1, blocks + 1))),), ())
    on_device = storage.device.type == "cuda" if on_device is None else on_device
    batch = batches.Uploads(storage).step(plan).batch if on_device else batches.build(plan, storage)
    entries: list[hyper.Streams] = []
    exits: list[Tensor] = []

    def enter(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        streams = args[0] if fed is None else fed[len(entries)]
        entries.append(streams)
        return (streams, *args[1:])

    def leave(layer: Any, args: Any, out: Any) -> None:
        exits.append(hyper.settle(out[0]))

    hooks = [layer.register_forward_pre_hook(enter) for layer in model.layers]
    hooks += [layer.register_forward_hook(leave) for layer in model.layers]
    try:
        hidden = model(batch, model.memory(storage, batch)).hidden
    finally:
        for hook in hooks:
            hook.remove()
    return Run(model.logits(hidden), entries, exits)


@dataclass(slots=True)
class Logits:
    """Two sets of logits, position by position."""

    positions: int = 0
    kl: float = 0.0
    worst_kl: float = 0.0
    same: int = 0
    difference: float = 0.0
    cosines: list[Tensor] | None = None
    kls: list[Tensor] | None = None

    def add(self, got: Tensor, want: Tensor) -> None:
        p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        self.positions += len(kl)
        self.kl += float(kl.sum())
        self.same += int((got.argmax(-1) == want.argmax(-1)).sum())
        self.difference = max(self.difference, float((got - want).abs().max()))
        self.cosines = [*(self.cosines or []), torch.cosine_similarity(got.double(), want.double(), dim=-1)]
        self.kls = [*(self.kls or []), kl]

    def json(self) -> dict[str, float]:
        cosines, kls = torch.cat(self.cosines or []), torch.cat(self.kls or [])
        return {
            "kl": self.kl / self.positions,
            "kl 99 %": float(kls.quantile(0.99)),
            "kl max": float(kls.max()),
            "same first token": self.same / self.positions,
            "cosine median": float(cosines.median()),
            "cosine min": float(cosines.min()),
            "largest difference": self.difference,
        }


def layer_errors(got: Run, want: Run) -> list[float]:
    """Layer by layer: what it left differs by so much of what it added. Both must have read the same streams."""
    found: list[float] = []
    for mine, theirs, entry in zip(got.exits, want.exits, want.entries, strict=True):
        added = theirs.double() - hyper.settle(entry).double()
        found.append(float((mine.double() - theirs.double()).norm() / added.norm().clamp(min=1e-30)))
    return found


def compare(
    checkpoint: Checkpoint, texts: Sequence[Sequence[int]], profiles: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """Profiles against REFERENCE, and each against itself in plain torch: the same values in another order of sums.

    returns  {"a : b": {"logits", "layers"}}; layers fed with equal streams.
    """
    names = (REFERENCE, *profiles)
    models = {name: from_checkpoint(checkpoint, NUMERICS[name], device) for name in names}
    with backends.reference():  # loaded so too: a backend may keep weights in a form of its own
        plain = {name: from_checkpoint(checkpoint, NUMERICS[name], device) for name in names}
    pairs = [(REFERENCE, name) for name in profiles]
    if {"production", "fast"} <= models.keys():
        pairs.append(("production", "fast"))  # all that lies between them is one scale a row
    logits = {f"{a} : {b}": Logits() for a, b in pairs} | {f"{name} : plain torch": Logits() for name in models}
    layers: dict[str, list[list[float]]] = {name: [] for name in logits}
    for ids in texts:
        runs = {name: forward(model, ids) for name, model in models.items()}
        for a, b in pairs:
            logits[f"{a} : {b}"].add(runs[b].logits, runs[a].logits)
            layers[f"{a} : {b}"].append(layer_errors(forward(models[b], ids, runs[a].entries), runs[a]))
        for name, model in plain.items():
            with backends.reference():
                logits[f"{name} : plain torch"].add(forward(model, ids).logits, runs[name].logits)
                layers[f"{name} : plain torch"].append(
                    layer_errors(forward(model, ids, runs[name].entries), runs[name])
                )
    return {
        name: {
            "logits": found.json(),
            "layers": [
                math.sqrt(sum(x * x for x in column) / len(column)) for column in zip(*layers[name], strict=True)
            ],
        }
        for name, found in logits.items()
    }


# ---- what a user sees ------------------------------------------------------------------------------------------------


def answers(llm: LLM, needles: Sequence[tuple[str, str]], asked_before: int = 0) -> float:
    """Share of prompts whose greedy answer is exactly right, white space at the ends apart.

    asked_before  each prompt is sent once before without so many last tokens, and answered behind a hit; 0: it is not
    """
    if llm.tokenizer is None:
        raise BenchError("needles", f"{llm.path} has no tokenizer.json")
    encoder = ChatEncoder(llm.tokenizer)
    rows = [encoder.encode([{"role": "user", "content": prompt}]).ids for prompt, _ in needles]
    longest = max(len(llm.tokenizer.encode(answer, bos=False)) for _, answer in needles) + 2
    if asked_before:
        before = [ids[:-asked_before] for ids in rows if len(ids) > asked_before]
        llm.generate(before, SamplingParams(max_tokens=1), progress=False)
    done = llm.generate(rows, SamplingParams(temperature=0.0, max_tokens=longest), progress=False)
    return sum(d.text.strip() == answer for d, (_, answer) in zip(done, needles, strict=True)) / len(needles)


def users(settings: Config, options: Options, profile: str, say: Callable[[str], None]) -> dict[str, float]:
    """Bits per byte of held-out responses and answers to needles, through the engine."""
    found: dict[str, float] = {}
    with LLM(config=replace(settings, numerics=profile)) as llm:
        if options.data is not None and options.documents:
            documents = read_documents(options.data, options.documents)
            every = lambda n: None if n % 64 else say(f"{profile}: {n} documents")  # noqa: E731
            found["bits per byte"] = bits_per_byte(llm, documents, every)
        if options.needles:
            found["needles"] = answers(llm, options.needles)
            say(f"{profile}: {len(options.needles)} needles")
    return found


# ---- the report ------------------------------------------------------------------------------------------------------


def texts_of(checkpoint: Checkpoint, options: Options) -> list[list[int]]:
    """Held-out documents as token ids, `options.tokens` in all."""
    assert options.data is not None, "no documents"
    if checkpoint.tokenizer_path is None:
        raise BenchError("text", f"{checkpoint.path} has no tokenizer.json")
    tokenizer = Tokenizer(checkpoint.tokenizer_path)
    encoder = ChatEncoder(tokenizer)
    texts: list[list[int]] = []
    left = options.tokens
    for document in read_documents(options.data):
        head = encoder.encode([{"role": "user", "content": document.prompt}]).ids
        texts.append([*head, *tokenizer.encode(document.response, bos=False), tokenizer.eos_id][:left])
        left -= len(texts[-1])
        if left <= 0:
            break
    return texts


def model_products(model: DeepseekV41, texts: Sequence[Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Errors of the products of a model over some text, by the kind of weight."""
    seen: list[Product] = []
    for ids in texts:
        with watched(model, seen):
            forward(model, ids)
    kinds = sorted({product.name for product in seen})
    by_kind = {kind: [product for product in seen if product.name == kind] for kind in kinds}
    return {kind: errors(products) | {"weights": weight_errors(products)} for kind, products in by_kind.items()}


def run(settings: Config, options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The whole report, ready for `report.save`."""
    gpu = torch.cuda.is_available() and settings.device != "cpu"
    device = torch.device("cuda" if settings.device == "auto" and gpu else settings.device.replace("auto", "cpu"))
    found = report.header("numerics", options.seed, {"model": str(settings.model), "device": str(device)})
    rows, outputs, inputs = (512, 4608, 5120) if device.type == "cuda" else (64, 256, 2048)
    say("synthetic products")
    products = list(synthetic(device, options.seed, rows, outputs, inputs))
    found["synthetic"] = {product.name: errors([product]) for product in products}
    found["kernels"] = kernel_errors(products)
    found["sums"] = sum_errors(device, options.seed, rows, outputs, inputs)
    if options.data is not None:
        checkpoint = Checkpoint.open(settings.model)
        texts = texts_of(checkpoint, options)
        say(f"products of the model over {sum(map(len, texts))} tokens")
        found["products"] = model_products(from_checkpoint(checkpoint, NUMERICS["production"]), texts)  # by value
        say("profiles")
        found["profiles"] = compare(checkpoint, texts, options.profiles, device)
    names = (REFERENCE, *options.profiles)
    found["users"] = {name: users(settings, options, name, say) for name in names} if options.data else {}
    measures: list[Measure] = []
    units = {"bits per byte": "bits/byte", "needles": "share"}
    for name, values in found["users"].items():
        for what, value in values.items():
            measures.append({"name": f"{name}: {what}", "value": value, "unit": units[what]})
    for name, values in found.get("profiles", {}).items():
        logits = values["logits"]
        measures.append({"name": f"{name}: KL", "value": logits["kl"], "unit": "nats per token"})
        measures.append({"name": f"{name}: first token", "value": logits["same first token"], "unit": "share"})
    return found | {"versions": report.versions(), "measures": measures}


def text(found: dict[str, Any]) -> str:
    """The report for a terminal: errors in per cent."""
    lines = ["error against exact MXFP8 in float64, per cent; tokens with groups farther down than 10, 12 binades"]
    for part in ("synthetic", "products"):
        if part in found:
            lines += ["", f"{part:<36}{''.join(f'{name:>11}' for name in SCHEMES)}{'g 10':>9}{'> 10':>8}{'> 12':>8}"]
        for name, values in found.get(part, {}).items():
            cells = "".join(f"{_percent(values['schemes'][scheme]['error']):>11}" for scheme in SCHEMES)
            above = values["spread"]["above"]
            shares = "".join(f"{_percent(above[str(guard)]):>8}" for guard in (10, 12))
            lines.append(f"{name:<36}{cells}{_percent(values['guards']['10']['error']):>9}{shares}")
    lines += ["", f"{'this device, result in bfloat16':<36}{'exact':>11}{'carried':>11}"]
    for name, values in found["kernels"].items():
        cells = "".join(f"{_percent(values[kind]) if kind in values else '-':>11}" for kind in ("exact", "carried"))
        lines.append(f"{name:<36}{cells}")
    for name, ways in found["sums"].items():
        lines += ["", f"sums of FP8 products, {name}: " + ", ".join(f"{w} {_percent(e)}" for w, e in ways.items())]
    if "profiles" in found:
        heads = ("kl", "kl 99 %", "same first token", "cosine median", "cosine min")
        lines += ["", f"{'logits':<28}{''.join(f'{head:>18}' for head in heads)}{'layer error %':>16}"]
        for name, values in found["profiles"].items():
            cells = "".join(f"{values['logits'][head]:>18.6g}" for head in heads)
            lines.append(f"{name:<28}{cells}{_percent(max(values['layers'])):>16}")
    if found["measures"]:
        lines += ["", report.table(found["measures"])]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}"
