"""The one table that says which implementation serves an op on a device.

Every public op of `kernels/` asks `pick` and runs its own plain torch reference when the answer is None. A backend is
a folder; its module `<file>.py` has a function of the op's name and signature, and `available()`, which is False where
the module cannot run (no compiler, no driver).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

FILES: dict[str, str] = {  # op -> the file it is in, the same in every backend
    "rms_norm": "norm",
    "rotate": "rope",
    "roundtrip_fp8": "quant",
    "roundtrip_mxfp4": "quant",
    "roundtrip_nvfp4": "quant",
    "dequantise_fp8": "quant",
    "linear": "gemm",
    "grouped_linear": "gemm",
    "swiglu": "swiglu",
    "hyper_mixes": "hyper",
    "hyper_collapse": "hyper",
    "hyper_expand": "hyper",
    "ngram_ids": "engram",
    "ngram_rows": "engram",
    "table_rows": "engram",
    "engram_gate": "engram",
    "route": "moe_gate",
    "experts": "moe_experts",
    "pool_groups": "compress",
    "compress_store": "compress",
    "key_store": "compress",
    "close_groups": "kv_copy",
    "write_records": "kv_copy",
    "read_records": "kv_copy",
    "ring_write": "kv_copy",
    "read_ring": "kv_copy",
    "window_rows": "kv_copy",
    "sink_attention": "attn_sparse",
    "attend": "attn_sparse",
    "index_select": "indexer",
    "select_records": "indexer",
    "select_entries": "indexer",
    "candidate_blocks": "indexer",
    "sample_rows": "sample",
    "begin_rows": "rows",
    "end_rows": "rows",
    "group_records": "rows",
    "hyper_read": "fused",
    "attention_inputs": "fused",
    "attention_output": "fused",
    "moe": "fused",
}

SERVES: dict[str, frozenset[str]] = {  # backend -> ops it has
    "native": frozenset(FILES)
    - {"table_rows", "pool_groups", "compress_store", "key_store", "close_groups", "attend", "sample_rows"}
    - {"select_records", "select_entries", "candidate_blocks", "ngram_ids", "begin_rows", "end_rows", "group_records"},
    "humming": frozenset({"experts"}),  # a peer to measure against: picked by `use` alone
    "triton": frozenset(
        {
            "rms_norm",
            "rotate",
            "swiglu",
            "roundtrip_fp8",
            "roundtrip_mxfp4",
            "roundtrip_nvfp4",
            "dequantise_fp8",
            "sink_attention",
            "attend",
            "hyper_mixes",
            "hyper_collapse",
            "hyper_expand",
            "hyper_read",
            "ngram_ids",
            "ngram_rows",
            "table_rows",
            "engram_gate",
            "linear",
            "grouped_linear",
            "attention_inputs",
            "attention_output",
            "route",
            "experts",
            "moe",
            "sample_rows",
            "begin_rows",
            "end_rows",
            "group_records",
            "write_records",
            "read_records",
            "ring_write",
            "read_ring",
            "close_groups",
            "pool_groups",
            "compress_store",
            "key_store",
            "select_records",
            "select_entries",
            "candidate_blocks",
        }
    ),
}

ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("native",),
    "cuda": ("triton",),
}  # device type -> backends, first choice first

_forced: ContextVar[str | None] = ContextVar("forced", default=None)
_invariant: ContextVar[bool] = ContextVar("invariant", default=False)
_REFERENCE = "reference"


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Inside this block every op that `backend` has runs there, whatever the device; the others run their reference."""
    assert backend == _REFERENCE or backend in SERVES, f"{backend} is no backend: {', '.join(SERVES)}"
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def reference() -> Any:
    """Inside this block every op runs its plain torch reference, whatever the table says."""
    return use(_REFERENCE)


@contextmanager
def invariant(on: bool = True) -> Iterator[None]:
    """Inside this block the bits of a row do not depend on how many rows there are, where a backend has a choice."""
    token = _invariant.set(on)
    try:
        yield
    finally:
        _invariant.reset(token)


def is_invariant() -> bool:
    return _invariant.get()


def pick(op: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """The implementation of `op` for the device of the first tensor, or None for the reference.

    Implementations have no backward pass, so a tensor that wants a gradient also means the reference.
    """
    forced = _forced.get()
    if forced == _REFERENCE:
        return None
    first = tensors[0]
    assert first is not None, op
    backends = ORDER.get(first.device.type, ()) if forced is None else (forced,)
    for backend in backends:
        if op in SERVES[backend]:
            if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
                return None
            found = _load(f"benthic.kernels.{backend}.{FILES[op]}", op)
            if found is not None:
                return found
    return None


@cache
def _load(path: str, op: str) -> Callable[..., Any] | None:
    module = import_module(path)
    return getattr(module, op) if module.available() else None
