"""The one table that says which implementation serves an op on a device.

Every public op of `kernels/` asks `pick` and runs its own plain torch reference when the answer is None. An
implementation module has a function of the op's name and signature, and `available()`, which is False where the module
cannot run (no compiler, no driver).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_NATIVE = "benthic.kernels.native."
TABLE: dict[str, dict[str, str]] = {  # op -> {device type: module path}
    "rms_norm": {"cpu": _NATIVE + "norm"},
    "rotate": {"cpu": _NATIVE + "rope"},
    "roundtrip_fp8": {"cpu": _NATIVE + "quant"},
    "roundtrip_mxfp4": {"cpu": _NATIVE + "quant"},
    "roundtrip_nvfp4": {"cpu": _NATIVE + "quant"},
    "dequantise_fp8": {"cpu": _NATIVE + "quant"},
    "linear": {"cpu": _NATIVE + "gemm"},
    "grouped_linear": {"cpu": _NATIVE + "gemm"},
    "swiglu": {"cpu": _NATIVE + "swiglu"},
    "hyper_mixes": {"cpu": _NATIVE + "hyper"},
    "hyper_collapse": {"cpu": _NATIVE + "hyper"},
    "hyper_expand": {"cpu": _NATIVE + "hyper"},
    "ngram_rows": {"cpu": _NATIVE + "engram"},
    "engram_gate": {"cpu": _NATIVE + "engram"},
    "route": {"cpu": _NATIVE + "moe_gate"},
    "experts": {"cpu": _NATIVE + "moe_experts"},
    "write_records": {"cpu": _NATIVE + "kv_copy"},
    "read_records": {"cpu": _NATIVE + "kv_copy"},
    "ring_write": {"cpu": _NATIVE + "kv_copy"},
    "read_ring": {"cpu": _NATIVE + "kv_copy"},
    "window_rows": {"cpu": _NATIVE + "kv_copy"},
    "sink_attention": {"cpu": _NATIVE + "attn_sparse"},
    "index_select": {"cpu": _NATIVE + "indexer"},
    "hyper_read": {"cpu": _NATIVE + "fused"},
    "attention_inputs": {"cpu": _NATIVE + "fused"},
    "attention_output": {"cpu": _NATIVE + "fused"},
    "moe": {"cpu": _NATIVE + "fused"},
}

_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


@contextmanager
def reference() -> Iterator[None]:
    """Inside this block every op runs its plain torch reference, whatever the table says."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def pick(op: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """The implementation of `op` for the device of the first tensor, or None for the reference.

    Implementations have no backward pass, so a tensor that wants a gradient also means the reference.
    """
    devices = TABLE.get(op)
    if devices is None or _reference_only.get():
        return None
    first = tensors[0]
    assert first is not None, op
    path = devices.get(first.device.type)
    if path is None:
        return None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return None
    return _load(path, op)


@cache
def _load(path: str, op: str) -> Callable[..., Any] | None:
    module = import_module(path)
    return getattr(module, op) if module.available() else None
