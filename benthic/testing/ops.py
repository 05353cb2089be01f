"""Every op of a running model on the inputs it has there: what one implementation gives, beside what another gives.

`watching` puts a function around each call of an op; `findings` says how far two results of the same call are apart, in
units of what `tolerances.py` allows. `reference` is the plain torch answer to any of them, runs of ops included.
"""

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
from benthic.testing.tolerances import TOLERANCES, excess

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


@contextmanager
def watching(around: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Inside this block every op of the model is called through `around(name, op, args, options)`, which returns its
    result. Runs of ops are taken apart; what an op, or `around` itself, calls in turn is left alone."""
    inside = False

    with fused.apart(), ExitStack() as undo:
        for module, name in OPS:
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
    yield from _differences(name, args, want, got)


def unit(name: str) -> str:
    """Of a finding with this name."""
    if name.endswith("bytes"):
        return "share of bytes that differ"
    if name.endswith("codes"):
        return "share of values with another code"
    return "share of rows that choose otherwise" if name.endswith("choice") else "of the op's tolerance"


def _copied(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """Where an op puts a copy of what it is given: every place has the same bytes there."""
    if name == "ring_write":
        return args[0].bytes
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


def _differences(name: str, args: tuple[Any, ...], want: Any, got: Any) -> Iterator[Finding]:
    if want is None:
        return
    got = moved(got, torch.device("cpu"))
    want = moved(want, torch.device("cpu"))
    if name == "route":
        ids, weights = want
        same = (ids == got[0]).all(dim=1)
        yield Finding("route: choice", _share(~same), TIES)
        yield Finding("route", excess("route", got[1][same], weights[same]), 1.0)
    elif name == "select_records":
        for which, a, b in zip(("entries", "candidates"), want, got, strict=True):
            if a is not None:
                a, b = a.sort(dim=1).values, b.sort(dim=1).values
                yield Finding(f"select_records: {which}, choice", _share((a != b).any(dim=1)), TIES)
    elif name in ("ngram_ids", "ngram_rows", "roundtrip_fp8", "roundtrip_mxfp4", "table_rows"):
        a, b = (t.float() if t.dtype == torch.bfloat16 else t for t in (want, got))
        equal = (a == b) | ((a != a) & (b != b))
        yield Finding(name, _share(~equal), 0.0)
    elif name == "group_records":
        yield Finding(name, max(_share(a != b) for a, b in zip(want, got, strict=True)), 0.0)
    elif name == "compress_store":
        ends = (args[9] >= 0).cpu()  # the other rows mean nothing
        # on each side the pooled row rounds, then the normed one
        yield Finding(name, excess("rotate", got[ends], want[ends].double(), largest(want[ends])), 4.0)
    else:
        pairs = list(zip(want, got, strict=True)) if isinstance(want, tuple) else [(want, got)]
        rule, scale = _rule(name, args)
        for a, b in pairs:
            size = largest(a) if scale is None else scale.cpu()
            # each side may be one tolerance from the exact value
            yield Finding(name, excess(rule, b, a.double(), size), 2.0)


def _rule(name: str, args: tuple[Any, ...]) -> tuple[str, Tensor | None]:
    """The tolerance that holds, and the size of what was summed; None: the largest of the row."""
    if name in ("linear", "grouped_linear"):
        x, weight = args[0].float().abs(), quant.values(args[1]).float()
        size = x @ weight.abs().mT if name == "linear" else torch.einsum("tgk,gnk->tgn", x, weight.abs())
        return "linear", size.double()
    if name == "experts":
        return ("experts_rounded" if args[6] else "experts"), None
    if name == "attend":
        return ("sink_attention_rounded" if args[9] else "sink_attention"), None
    return (name if name in TOLERANCES else "linear"), None


def largest(x: Tensor) -> Tensor:
    """[..., 1] float64: the largest size in each row."""
    return x.double().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)


def _share(mask: Tensor) -> float:
    return float(mask.float().mean()) if mask.numel() else 0.0
