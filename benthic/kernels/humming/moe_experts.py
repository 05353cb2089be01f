"""The routed experts on the grouped GEMMs of the package `humming-kernels` (Apache-2.0), for SM90.

The package compiles CUDA C++ for each shape when it is first asked for one (NVRTC, about 1.5 s a kernel, kept in
~/.humming/cache). It takes FP4 weights in its own order, so they are prepared once, when they are loaded. Routing,
activation, quantisers and the sum are this package's ops around it, and the values are those of the reference:

    exact     BF16 activations, weights widened in registers: the reference's values but for the order of sums
    carry     FP8 activations and one power-of-two scale a row on both sides (`one_scale`)

Two more are what the package's users run. They quantise unrounded activations anew and give the routing weight to the
sum, so their values differ from the checkpoint's semantics; they stand here to be measured against:

    group     FP8 activations with one float32 scale per 128 channels, weights with one base an expert
    token     FP8 activations with one float32 scale a row, weights with one base an expert

In all FP8 variants a weight is E4M3 against a power-of-two base; its group's scale may lie 11 binades below the largest
one of that base's group before codes lose bits (`outside_window`).

T rows, k experts a row, P = T*k pairs, E experts, D hidden width, I expert width.
"""

import json
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import backends, quant, swiglu
from benthic.kernels import moe_experts as plain
from benthic.types import Numerics

BUCKETS = (
    *(8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12288, 16384, 24576, 32768, 49152, 65536),
)  # pairs; the schedule of the next larger one serves what lies between
WINDOW = 11  # binades below its base that a group's scale may lie
_LOCKS = 4096  # counters for the package's split sums, each left at zero
_GROUPED = "grouped_contiguous"


class Variant(NamedTuple):
    activations: str  # the package's name of their type
    group: int  # channels under one activation scale; 0: a row has one
    row_base: bool  # a weight row has its own base, else an expert has one


VARIANTS = {
    "exact": Variant("bfloat16", 0, False),
    "carry": Variant("float8e4m3", 0, True),
    "group": Variant("float8e4m3", 128, False),
    "token": Variant("float8e4m3", 0, False),
}


class Prepared(NamedTuple):
    """A stack of expert matrices in the package's order."""

    shape: torch.Size  # of the values: [E, N, K]
    variant: str
    layer: str  # what the package wants to know of them, JSON
    weight: Tensor
    scale: Tensor
    base: Tensor | None
    locks: Tensor  # [4096] int32; matrices that may run at the same time must not share them


@cache
def available() -> bool:
    return (
        torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and find_spec("humming") is not None
    )


def _package(module: str) -> Any:
    """A module of the package, which is optional, has no types, and starts processes when it is imported."""
    return import_module(f"humming.{module}")


# ---- weights ---------------------------------------------------------------------------------------------------------


def outside_window(weight: quant.Fp4Matrix, row_base: bool) -> Tensor:
    """How many groups' scales lie so far below their base that an FP8 variant may round their codes.

    returns  [E] int64. Groups of zeros count too.
    """
    scales = weight.scales.int()  # [E, N, K/32]
    top = scales.amax(-1, keepdim=True)
    top = top if row_base else top.amax(-2, keepdim=True)
    return (top - scales > WINDOW).sum((-2, -1))


def prepare(w13: quant.Fp4Matrix, w2: quant.Fp4Matrix, numerics: Numerics) -> tuple[Prepared, Prepared]:
    """Both matrices of the experts of a layer, as `experts` wants them for this profile. The arguments may then go."""
    variant = "carry" if numerics.one_scale else "exact"
    return pack(w13, variant), pack(w2, variant)


def pack(weight: quant.Fp4Matrix, variant: str) -> Prepared:
    """Reorder a stack [E, N, K] for one of VARIANTS.

    Cost    reads and writes the weights a few times; needs room for a second copy.
    Raises  ShapeError.
    """
    experts, n, k = weight.shape
    if n % 64 or k % 128:
        raise ShapeError("pack: weight", want="[E, N, K], N a multiple of 64, K of 128", got=tuple(weight.shape))
    kind = VARIANTS[variant]
    schema = _package("schema")
    codes = weight.codes.contiguous().view(torch.int32)
    layer, tensors = _package("transform").prepare_and_transform_humming_tensors(
        {
            "weight": codes if variant == "exact" else codes.clone(),  # the package shifts codes where they are
            "weight_scale": weight.scales.contiguous().view(torch.float8_e8m0fnu),
        },
        shape_n=n,
        shape_k=k,
        weight_schema=schema.HummingWeightSchema(
            b_dtype="float4e2m1",
            bs_dtype="float8e8m0",
            weight_scale_group_size=quant.MX_GROUP,
            weight_scale_2_type="channel" if kind.row_base else None,
        ),
        input_schema=schema.HummingInputSchema(a_dtype=kind.activations, input_scale_group_size=kind.group),
        num_experts=experts,
        torch_dtype=torch.bfloat16,
        device=codes.device,
    )
    return Prepared(
        weight.shape,
        variant,
        layer.to_str(),
        tensors["weight"],
        tensors["weight_scale"],
        tensors.get("weight_scale_2"),
        torch.zeros(_LOCKS, dtype=torch.int32, device=codes.device),
    )


# ---- products --------------------------------------------------------------------------------------------------------


@cache
def _kernels(layer: str, invariant: bool, device: torch.device, buckets: tuple[int, ...]) -> Tensor:
    """The package's launch table [4 * n] int64 on the CPU: from, to, kernel, SMs. Compiles what is not in its cache.

    invariant  kernels whose sums over K have one order whatever the number of rows; the others split some sums as SMs
               come free, and a second run may differ in the last bit.
    """
    tune = _package("tune")
    table: list[list[Any]] = []
    for rows in buckets:
        config = tune.get_heuristics_config(
            json.loads(layer), shape_m=rows, use_batch_invariant=invariant, gemm_type=_GROUPED, device=device
        )
        if table and table[-1][2] == config:
            table[-1][1] = rows
        else:
            table.append([table[-1][1] if table else 0, rows, config])
    table[-1][1] = 1 << 30
    compute = {"gemm_type": _GROUPED, "use_batch_invariant": invariant}
    return _package("kernel.humming").HummingKernel.prepare_kernels(
        layer, json.dumps(compute), json.dumps(table), device
    )


def grouped_gemm(
    x: Tensor, scales: Tensor | None, matrix: Prepared, offsets: Tensor, buckets: tuple[int, ...] = BUCKETS
) -> Tensor:
    """Rows offsets[e] .. offsets[e+1]-1 times matrix e, transposed.

    x        [P, K] bf16 or float8_e4m3fn, as the variant says, contiguous; P > 0.
    scales   f32 [P, 1], or [P, K/128] of the variant "group"; None with bf16.
    offsets  [E+1] int32 or int64 on the device, ascending.
    returns  [P, N] bf16; rows before offsets[0] and from offsets[E] on hold anything.
    """
    out = torch.empty(x.shape[0], matrix.shape[1], dtype=torch.bfloat16, device=x.device)
    return _package("ops").launch_kernel(
        configs=_kernels(matrix.layer, backends.is_invariant(), x.device, buckets),
        inputs=x,
        weight=matrix.weight,
        weight_scale=matrix.scale,
        weight_scale_2=matrix.base,
        input_scale=scales,
        outputs=out,
        expert_layout=offsets,
        locks=matrix.locks,
        valid_shape_m=x.shape[0],
    )


# ---- the op ----------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Pairs (row, slot) grouped by expert, in the order of rows within one."""

    order: Tensor  # [P] int64: place -> pair, counted row by row
    back: Tensor  # [P] int64: pair -> place
    offsets: Tensor  # [E+1] int64: first place of each expert


def plan(ids: Tensor, experts: int) -> Plan:
    """ids [T, k] int64 in 0 .. E-1, T*k > 0."""
    chosen, order = torch.sort(ids.flatten(), stable=True)
    places = torch.arange(order.shape[0], device=ids.device)
    bounds = torch.arange(experts + 1, device=ids.device)
    return Plan(order, torch.empty_like(order).scatter_(0, order, places), torch.searchsorted(chosen, bounds))


def combine(parts: Tensor, routed: Plan, k: int, weights: Tensor | None = None) -> Tensor:
    """parts [P, D] by place -> [T, D] f32, the sum over a row's slots in their order, each times its weight [T, k]."""
    slots = routed.back.view(-1, k)
    total = None
    for slot in range(k):
        part = parts[slots[:, slot]].float()
        part = part if weights is None else part * weights[:, slot, None]
        total = part if total is None else total + part
    assert total is not None, "k is 0"
    return total


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: quant.Matrix | Prepared,
    w2: quant.Matrix | Prepared,
    limit: float,
    quantise: bool,
    round_hidden: bool = True,
    one_scale: bool = False,
) -> Tensor:
    """As `kernels/moe_experts.py`. Weights that are not prepared are prepared in every call."""
    if not isinstance(w13, Prepared) and not isinstance(w2, Prepared):
        if not isinstance(w13, quant.Fp4Matrix) or not isinstance(w2, quant.Fp4Matrix) or x.dtype != torch.bfloat16:
            return plain.experts_reference(x, ids, weights, w13, w2, limit, quantise, round_hidden, one_scale)
        variant = "carry" if one_scale else "exact"
        w13, w2 = pack(w13, variant), pack(w2, variant)
    assert isinstance(w13, Prepared), "w2 is prepared, w13 is not"
    assert isinstance(w2, Prepared), "w13 is prepared, w2 is not"
    if ids.numel() == 0:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    with backends.use("triton") if x.is_cuda else nullcontext():  # whoever forced this backend meant the products
        return _experts(x, ids, weights, w13, w2, limit, quantise, round_hidden)


def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Prepared,
    w2: Prepared,
    limit: float,
    quantise: bool,
    round_hidden: bool,
) -> Tensor:
    k = ids.shape[1]
    routed = plan(ids, w13.shape[0])
    if w13.variant in ("group", "token"):
        return combine(_public(x.contiguous(), routed, k, w13, w2, limit), routed, k, weights)
    carried = w13.variant == "carry"
    rows = routed.order // k
    if carried:
        codes, scales = quant.carry(x)
        both = grouped_gemm(_take(codes, rows), scales[rows, None], w13, routed.offsets)
    else:
        both = grouped_gemm(x[rows], None, w13, routed.offsets)
    gate, up = both.chunk(2, dim=-1)
    hidden = torch.bfloat16 if round_hidden else torch.float32
    y = swiglu.swiglu(gate, up, limit, weights.flatten()[routed.order], hidden)
    y = quant.roundtrip_fp8(y) if quantise else y
    if carried:
        codes, scales = quant.carry(y)
        return combine(grouped_gemm(codes, scales[:, None], w2, routed.offsets), routed, k)
    return combine(grouped_gemm(y.to(torch.bfloat16), None, w2, routed.offsets), routed, k)


def _take(codes: Tensor, rows: Tensor) -> Tensor:
    return codes.view(torch.uint8)[rows].view(codes.dtype)


def _public(x: Tensor, routed: Plan, k: int, w13: Prepared, w2: Prepared, limit: float) -> Tensor:
    """Four launches: scatter and quantise, product, activate and quantise, product. -> [P, D] by place."""
    process_input = _package("ops").process_input
    group = VARIANTS[w13.variant].group
    how: dict[str, Any] = {
        "quant_mode": "dynamic_group" if group else "dynamic_token",
        "quant_dtype": "float8e4m3",
        "quant_group_size": group or None,
        "group_scale_dtype": "float32",
    }
    codes, groups, tokens = process_input(x, layout="scatter", scatter_idx=routed.back.view(-1, k), **how)
    both = grouped_gemm(codes, groups if group else tokens, w13, routed.offsets)
    codes, groups, tokens = process_input(
        both, activation_type="binary_split", activation_impl=activation(limit), **how
    )
    return grouped_gemm(codes, groups if group else tokens, w2, routed.offsets)


def activation(limit: float) -> str:
    """Clamped SwiGLU of the floats a and b, as CUDA C++."""
    a, b = ("a", "b") if limit <= 0 else (f"fminf(a, {limit!r}f)", f"fminf(fmaxf(b, {-limit!r}f), {limit!r}f)")
    return f"{a} / (1.f + expf(-{a})) * {b}"
