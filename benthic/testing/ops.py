"""Every op of a running model on the inputs it has there: what one implementation gives, beside what another gives.

`watching` puts a function around each call of an op; `findings` says how far two results of the same call are apart, in
units of what `tolerances.py` allows. `reference` is the plain torch answer to any of them, runs of ops included.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benthic.errors import BadField
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
    rows,
    swiglu,
)
from benthic.testing.tolerances import MOVED_RMS, TOLERANCES, excess

FEW = 32  # rows of which the mean may be far from what is expected
TIES = 0.01  # share of rows whose choice (experts, entries) may differ: near ties


class Place(NamedTuple):
    """Where one side runs."""

    name: str
    device: torch.device
    reference: bool

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with backends.reference() if self.reference else ExitStack(), torch.inference_mode():
            yield


def place(text: str) -> Place:
    """`cuda`, `cpu:reference` -> where that is. Raises BadField."""
    kind, _, kernels = text.partition(":")
    reference = kernels == "reference"
    try:
        device = torch.device(kind if reference or not kernels else text)
    except RuntimeError:
        raise BadField("compare", text, "a device such as cpu, cuda or cuda:1, or one with :reference") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadField("compare", text, "a device that is here; torch sees no CUDA device")
    return Place(text, device, reference)


@dataclass(frozen=True, slots=True)
class Line:
    """One finding. It passes when `error` is at most `bound`; a line without a bound only informs."""

    level: str
    name: str
    cases: int
    error: float
    bound: float | None
    unit: str

    @property
    def passed(self) -> bool:
        return self.bound is None or self.error <= self.bound

    @property
    def margin(self) -> float:
        """How much of the bound is left: 1 all of it, 0 none, below 0 it failed."""
        if self.bound is None or self.error == 0:
            return 1.0
        return 1 - self.error / self.bound if self.bound else -math.inf


def moved(value: Any, device: torch.device) -> Any:
    """The same structure with its tensors on `device`, copied even when they are there: ops write in place."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in cast("tuple[Any, ...]", value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def moved_options(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: moved(value, device) for key, value in options.items()}


# ---- calls -----------------------------------------------------------------------------------------------------------

OPS: tuple[tuple[ModuleType, str], ...] = (
    (norm, "rms_norm"),
    (rope, "rotate"),
    (quant, "roundtrip_fp8"),
    (quant, "roundtrip_mxfp4"),
    (gemm, "linear"),
    (gemm, "grouped_linear"),
    (swiglu, "swiglu"),
    (hyper, "hyper_mixes"),
    (hyper, "hyper_collapse"),
    (hyper, "hyper_expand"),
    (engram, "ngram_ids"),
    (engram, "ngram_rows"),
    (engram, "table_rows"),
    (engram, "engram_gate"),
    (moe_gate, "route"),
    (moe_experts, "experts"),
    (rows, "group_records"),
    (compress, "compress_store"),
    (compress, "key_store"),
    (kv_copy, "ring_write"),
    (indexer, "select_records"),
    (attn_sparse, "attend"),
)
HOST_OPS: tuple[tuple[ModuleType, str], ...] = (  # of steps that the host describes
    (compress, "pool_groups"),
    (kv_copy, "write_records"),
    (kv_copy, "window_rows"),
    (indexer, "index_select"),
    (attn_sparse, "sink_attention"),
)
RUNS: tuple[tuple[ModuleType, str], ...] = (
    (fused, "hyper_read"),
    (fused, "attention_inputs"),
    (fused, "attention_output"),
    (fused, "moe"),
)

RUN_NAMES = frozenset(name for _, name in RUNS)


@contextmanager
def watching(
    around: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any], *, runs: bool = False
) -> Iterator[None]:
    """Inside this block every op of the model is called through `around(name, op, args, options)`, which returns its
    result. What an op, or `around` itself, calls in turn is left alone.

    runs  runs of ops are left together, and watched as one; else they are taken apart.
    """
    inside = False

    with fused.apart(not runs), ExitStack() as undo:
        for module, name in (*OPS, *HOST_OPS, *(RUNS if runs else ())):
            real = getattr(module, name)

            def told(*args: Any, _name: str = name, _real: Callable[..., Any] = real, **options: Any) -> Any:
                nonlocal inside
                if inside:
                    return _real(*args, **options)
                inside = True
                try:
                    return around(_name, _real, args, options)
                finally:
                    inside = False

            setattr(module, name, told)
            undo.callback(setattr, module, name, real)
        yield


# ---- the plain answer ------------------------------------------------------------------------------------------------


def reference(name: str) -> Callable[..., Any]:
    """The plain torch form of an op, called under `backends.reference()`."""
    module = next(module for module, op in (*OPS, *HOST_OPS) if op == name)
    return getattr(module, f"{name}_reference")


def _hyper_read(
    streams: hyper.Streams,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, hyper.Streams]:
    s = hyper.settle(streams)
    pre, post, comb = hyper.hyper_mixes(s, fn, scale, base, norm_eps, hc_eps, iters)
    h = norm.rms_norm(hyper.hyper_collapse(s, streams.pre), weight, norm_eps)
    return h, hyper.Streams(s, pre, None, post, comb)


def on_grid(x: Tensor, one_scale: bool) -> Tensor:
    """x as a product takes it: on the FP8 grid, and carried where the weight has one scale a row."""
    x = quant.roundtrip_fp8(x)
    return quant.roundtrip_carry(x) if one_scale else x


def _attention_inputs(
    h: Tensor,
    positions: Tensor,
    freqs: Tensor,
    wqkv_a: quant.Matrix,
    q_norm: Tensor,
    wq_b: quant.Matrix,
    kv_norm: Tensor,
    eps: float,
    one_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rank, channels = q_norm.shape[0], kv_norm.shape[0]
    both = gemm.linear(on_grid(h, one_scale), wqkv_a)
    qa = quant.roundtrip_fp8(norm.rms_norm(both[:, :rank], q_norm, eps))
    q = gemm.linear(quant.roundtrip_carry(qa) if one_scale else qa, wq_b)
    q = q.unflatten(1, (q.shape[1] // channels, channels))
    kw = rope.rotate(norm.rms_norm(both[:, rank:], kv_norm, eps), positions, freqs)
    return rope.rotate(q, positions, freqs).flatten(1), qa, quant.roundtrip_fp8(kw)


def _attention_output(
    o: Tensor,
    positions: Tensor,
    freqs: Tensor,
    wo_a: quant.Matrix,
    wo_b: quant.Matrix,
    groups: int,
    quantise_wo_a: bool,
    one_scale: bool,
) -> Tensor:
    rows, heads, channels = o.shape
    back = rope.rotate(o, positions, freqs, inverse=True).reshape(rows, groups, heads * channels // groups)
    back = on_grid(back, one_scale) if quantise_wo_a else back
    u = gemm.grouped_linear(back, quant.grouped(wo_a, groups))
    return gemm.linear(on_grid(u.flatten(1), one_scale), wo_b)


def _moe(
    h: Tensor,
    gate: Tensor,
    bias: Tensor,
    w13: quant.Matrix,
    w2: quant.Matrix,
    shared_w13: quant.Matrix,
    shared_w2: quant.Matrix,
    k: int,
    normalise: bool,
    scale: float,
    limit: float,
    round_hidden: bool,
    one_scale: bool,
) -> Tensor:
    ids, weights = moe_gate.route(h, gate, bias, k, normalise, scale)
    h8 = quant.roundtrip_fp8(h)
    routed = moe_experts.experts(h8, ids, weights, w13, w2, limit, True, round_hidden, one_scale)
    a, b = gemm.linear(quant.roundtrip_carry(h8) if one_scale else h8, shared_w13).chunk(2, dim=-1)
    y = swiglu.swiglu(a, b, limit, out_dtype=h.dtype if round_hidden else torch.float32)
    return (routed + gemm.linear(on_grid(y, one_scale).to(h.dtype), shared_w2).float()).to(h.dtype)


# runs of ops, taken apart: what `fused.<name>` has to give, with the ops of whatever backend is in force
ONE_BY_ONE: dict[str, Callable[..., Any]] = {
    "hyper_read": _hyper_read,
    "attention_inputs": _attention_inputs,
    "attention_output": _attention_output,
    "moe": _moe,
}


# ---- results ---------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """How far two results of one call are apart."""

    name: str  # the op, and which part of its result
    error: float
    bound: float


def findings(
    name: str, args: tuple[Any, ...], mine: tuple[Any, ...], theirs: tuple[Any, ...], want: Any, got: Any
) -> Iterator[Finding]:
    """The results `want` of op(*mine) and `got` of op(*theirs), and what was written into those arguments.

    args  as they were before the call; `mine` and `theirs` are copies of them.
    """
    if (bytes_ := _copied(name, mine)) is not None:
        other = _copied(name, theirs)
        assert other is not None
        live = slice(1, None)  # block and slot 0 hold padding rows, which nobody reads
        # by value of the raw bytes: NaN patterns count too
        here, there = (t.view(torch.uint8)[live].cpu() for t in (bytes_, other))
        yield Finding(f"{name}: bytes", _share(here != there), 0.0)
    yield from _stored(name, mine, theirs)
    yield from _differences(name, args, want, got, _fp8(name, args) and any(_on_gpu(each) for each in (mine, theirs)))


def run_errors(name: str, args: tuple[Any, ...], got: Any) -> Iterator[tuple[str, Tensor]]:
    """(which part, [T] relative difference) of what a run of ops gave, from the plain answer to its arguments.

    Quantisers inside a run may take other codes, so rows are compared by their norm. The weights that `hyper_read`
    gives have none: they are compared for the streams that it settled itself.
    """
    with backends.reference():
        if name == "hyper_read":
            (h, streams), pending = moved(got, torch.device("cpu")), args[0]
            yield f"{name}: streams", relative(hyper.settle(pending), streams.s)
            want_h, want = ONE_BY_ONE[name](hyper.Streams(streams.s, pending.pre), *args[1:])
            mixes = [torch.cat([s.pre, s.post, s.comb.flatten(1)], dim=1) for s in (want, streams)]
            yield f"{name}: mixes", relative(*mixes)
            yield f"{name}: input", relative(want_h, h)
            return
        want = ONE_BY_ONE[name](*args)
    if name == "attention_inputs":
        for part, a, b in zip(("query", "query latent", "window row"), want, got, strict=True):
            yield f"{name}: {part}", relative(a, b)
    else:
        yield name, relative(want, got)


def relative(want: Tensor, got: Tensor) -> Tensor:
    """[T, ...] -> [T] f64 on the CPU: norm of the difference of each row over the row's; inf where it is no number."""
    a, b = want.detach().cpu().double().flatten(1), got.detach().cpu().double().flatten(1)
    return ((b - a).norm(dim=1) / a.norm(dim=1).clamp(min=1e-30)).nan_to_num(nan=torch.inf)


def unit(name: str) -> str:
    """Of a finding with this name."""
    if name.endswith("shape"):
        return "another shape"
    if name.endswith("bytes"):
        return "share of bytes that differ"
    if name.endswith("codes"):
        return "share of values with another code"
    if "all rows" in name:
        return "relative, rms"
    return "share of rows that choose otherwise" if name.endswith("choice") else "of the op's tolerance"


def _copied(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """Where an op puts a copy of what it is given: every place has the same bytes there."""
    if name == "ring_write":
        return args[0].bytes
    if name == "write_records":
        return args[0].pool
    return args[2] if name == "compress_store" else None


def _paged(name: str, args: tuple[Any, ...]) -> tuple[kv_copy.Paged, Tensor] | None:
    """Where an op stores what it computes, and the records [T]."""
    if name == "compress_store":
        return args[8], args[9]
    return (args[6], args[7]) if name == "key_store" else None


def _stored(name: str, mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> Iterator[Finding]:
    """Of the records that one call stored, read back: floats by value, packed ones by code."""
    here, there = _paged(name, mine), _paged(name, theirs)
    if here is None or there is None:
        return
    want, got = (kv_copy.read_records_reference(paged, ids[ids >= 0]).cpu() for paged, ids in (here, there))
    if here[0].format == "f32":
        yield Finding(f"{name}: records", excess("rotate", got, want.double(), largest(want)), 4.0)
    else:
        yield Finding(f"{name}: codes", _share(want != got), TIES)


def _fp8(name: str, args: tuple[Any, ...]) -> bool:
    """Are both operands of the op's products FP8 codes under one scale a row?"""
    if name == "experts":
        return bool(args[8])
    return name in ("linear", "grouped_linear") and isinstance(args[1], quant.RowMatrix)


def _on_gpu(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.is_cuda for x in args)


def _differences(name: str, args: tuple[Any, ...], want: Any, got: Any, fp8: bool) -> Iterator[Finding]:
    """fp8: one side's matrix unit has added up FP8 products."""
    if want is None:
        return
    got = moved(got, torch.device("cpu"))
    want = moved(want, torch.device("cpu"))
    pairs: list[Any] = list(zip(want, got, strict=True)) if isinstance(want, tuple) else [(want, got)]
    if any(a is not None and a.shape != b.shape for a, b in pairs):
        yield Finding(f"{name}: shape", math.inf, 0.0)
        return
    if name == "route":
        ids, weights = want
        same = (ids == got[0]).all(dim=1)
        yield Finding("route: choice", _share(~same), TIES)
        yield Finding("route", excess("route", got[1][same], weights[same]), 1.0)
    elif name in ("select_records", "index_select"):
        for which, a, b in zip(("entries", "candidates"), want, got, strict=True):
            if a is not None:
                a, b = a.sort(dim=1).values, b.sort(dim=1).values
                yield Finding(f"{name}: {which}, choice", _share((a != b).any(dim=1)), TIES)
    elif name in ("ngram_ids", "ngram_rows", "roundtrip_fp8", "roundtrip_mxfp4", "table_rows"):
        both = cast("list[Tensor]", [want, got])
        a, b = (t.float() if t.dtype == torch.bfloat16 else t for t in both)
        equal = (a == b) | ((a != a) & (b != b))
        yield Finding(name, _share(~equal), 0.0)
    elif name in ("group_records", "window_rows"):
        yield Finding(name, max(_share((a != b) & ~((a != a) & (b != b))) for a, b in pairs), 0.0)
    elif name == "compress_store":
        ends = (args[9] >= 0).cpu()  # the other rows mean nothing
        # on each side the pooled row rounds, then the normed one
        yield Finding(name, excess("rotate", got[ends], want[ends].double(), largest(want[ends])), 4.0)
    else:
        rule, scale = _rule(name, args, fp8)
        for a, b in pairs:
            size = largest(a) if scale is None else scale.cpu()
            # each side may be one tolerance from the exact value
            yield Finding(name, excess(rule, b, a.double(), size), 2.0)
            if fp8 and name == "experts" and len(a) >= FEW:
                off = (b.double() - a.double()).norm() / a.double().norm()
                yield Finding("experts: all rows", float(off), MOVED_RMS)


def _rule(name: str, args: tuple[Any, ...], fp8: bool) -> tuple[str, Tensor | None]:
    """The tolerance that holds, and the size of what was summed; None: the largest of the row."""
    if name in ("linear", "grouped_linear"):
        x, weight = args[0].float().abs(), quant.values(args[1]).float()
        size = x @ weight.abs().mT if name == "linear" else torch.einsum("tgk,gnk->tgn", x, weight.abs())
        return ("linear_fp8" if fp8 else "linear"), size.double()
    if name == "experts":
        return ("experts_fp8" if fp8 else "experts_rounded" if args[6] else "experts"), None
    if name == "engram_gate":
        return name, _gate_size(*args[:5])
    if name in ("attend", "sink_attention"):
        return ("sink_attention_rounded" if args[-1] else "sink_attention"), None
    return (name if name in TOLERANCES else "linear"), None


def _gate_size(s: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, S, D] of an Engram gate: the largest of the row, and what the order of its dot moves through a root, which is
    steep near zero and has another sign on its other side."""
    stream, key, added = s.double(), keys.double(), value.double()[:, None]
    norms = (stream.square().mean(dim=-1) + eps).rsqrt() * (key.square().mean(dim=-1) + eps).rsqrt()
    terms = stream * weight.double() * key * (norms * s.shape[-1] ** -0.5)[..., None]
    dot, reach = terms.sum(dim=-1), TOLERANCES["linear"].absolute * terms.abs().sum(dim=-1)
    floor = engram.GATE_FLOOR
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=floor).sqrt(), dot))
    moved = 0.125 * reach * (dot.abs() - reach).clamp(min=floor).rsqrt()
    moved += torch.where(dot.abs() <= reach, 0.5 * floor**0.5, 0.0)
    room = moved[..., None] * added.abs() / TOLERANCES["engram_gate"].absolute
    return largest(stream + gate[..., None] * added) + room


def largest(x: Tensor) -> Tensor:
    """[..., 1] float64: the largest size in each row."""
    return x.double().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)


def _share(mask: Tensor) -> float:
    return float(mask.float().mean()) if mask.numel() else 0.0
