"""The trainable form of the package's backbone and vision tower: its modules, gradients on, tables swapped, values set.

A parameter of the model (a leaf) holds the compute form that serving would use: bfloat16, or float32 where the model
computes in float32. The float32 masters live in the optimiser. Source of the initialisation: the minnow specification,
section 5.3.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benthic.models.deepseek_v41 import DeepseekV41, Engram, HyperConnection, Indexer
from benthic.models.deepseek_v41_config import ModelConfig, TextConfig, tensors
from benthic.models.deepseek_v41_vision import VisionTower
from benthic.models.modules import activation_dtype
from benthic.train.kernels import TrainingKernels, lookup
from benthic.types import Numerics

Store = Literal["fp8", "fp4", "fp8_rows", "bf16", "f32"]
Group = Literal["text", "index", "vision"]

# bfloat16 activations, nothing quantised: the first part of a run. The last part uses NUMERICS["production"].
PLAIN = Numerics(
    "training",
    quantise=False,
    wide=False,
    quantise_wo_a=False,
    round_probs=False,
    round_scores=False,
    round_hidden=False,
    one_scale=False,
)


class Table(nn.Module):
    """A lookup table with a gradient, in place of `Embedding` and `PackedTable`."""

    over_link = False  # it lies beside the model

    def __init__(self, rows: int, channels: int, dtype: torch.dtype, kernels: TrainingKernels):
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(rows, channels, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        return self.kernels.piece(lookup)(rows, self.weight)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One trained parameter and how it is optimised and stored.

    matrix  rows of each matrix that Muon treats on its own (the leaf is a stack of them); 0: AdamW
    rate    AdamW learning rate
    group   what it is part of: the text model, an indexer (taught by a loss of its own), the vision tower. Gradient
            norms are taken and clipped by group, the indexers' not at all; those of "index" and "vision" may have no
            gradient in a step, and then they stay as they are.
    """

    name: str
    value: nn.Parameter
    store: Store
    matrix: int
    rate: float
    group: Group = "text"


def build(config: ModelConfig, classes: Tensor, numerics: Numerics, kernels: TrainingKernels) -> DeepseekV41:
    """The backbone with trainable tables and gradients on; values not set yet."""
    model = DeepseekV41(config, numerics, classes)
    dtype = activation_dtype(numerics)
    text = config.text
    model.embed = Table(text.vocab_size, text.hidden_size, dtype, kernels)  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Engram):
            module.embed = Table(*module.embed.shape, dtype, kernels)  # type: ignore[assignment]
        if isinstance(module, Indexer):
            for part in (module.wq_b, module.weights_proj, *([module.wk] if module.owns_keys else [])):
                part.register_forward_pre_hook(_detached)  # the index loss teaches the indexer alone
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith((".ffn.bias", ".ffn.bias_vl")))
    return model


def build_tower(config: ModelConfig, numerics: Numerics) -> VisionTower | None:
    """The vision tower with gradients on, values not set yet; None: the model has none."""
    return None if config.vision is None else VisionTower(config, numerics).requires_grad_()


def _detached(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.detach() if isinstance(a, Tensor) else a for a in args)


def set_numerics(model: nn.Module, numerics: Numerics) -> None:
    """Switch quantisers on or off in every module that has them."""
    for module in model.modules():
        if hasattr(module, "numerics"):
            assert numerics.wide == module.numerics.wide, "the dtype of activations cannot change"  # type: ignore[union-attr]
            module.numerics = numerics  # type: ignore[assignment]


def leaves(model: DeepseekV41) -> list[Leaf]:
    """Every trained parameter."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    return [leaf(model.config, name, value, next(official_parts(name, value.detach()))[0]) for name, value in named]


def leaf(config: ModelConfig, name: str, value: nn.Parameter, official: str) -> Leaf:
    """Stores follow the tensor inventory, rates the minnow specification, section 5.3.

    official: the name of the tensor, or of one of the tensors, that the parameter is stored as.
    """
    stores: dict[str, Store] = {"F8_E4M3": "fp8", "I8": "fp4", "BF16": "bf16", "F32": "f32"}
    text = config.text
    store = stores[tensors(config)[official].dtype] if not name.endswith("engram.embed.weight") else "fp8_rows"
    matrix, rate = 0, 4e-3  # head, norms, mHC base and scale, Engram q and k
    if name.endswith("embed.weight"):
        rate = 6e-3
    elif name.endswith(("ffn.gate.weight", ".fn", "weights_proj.weight", "confidence.weight")):
        rate = 2e-3
    elif name.endswith("attn_sink"):
        rate = 8e-3
    elif value.ndim >= 2 and not name.endswith(("head.weight", "q_weight", "k_weight")):
        matrix = value.shape[-2]
        if name.endswith("attn.wq_b.weight"):
            matrix = text.head_dim
        elif name.endswith("indexer.wq_b.weight"):
            matrix = text.index_head_dim
        elif name.endswith("wo_a.weight"):
            matrix = text.o_lora_rank
        elif name.endswith("w13") or name.endswith("shared_w13.weight"):
            matrix = value.shape[-2] // 2
        elif name.endswith("engram.wkv.weight"):
            matrix = text.hidden_size
    return Leaf(name, value, store, matrix, rate, "index" if ".indexer." in name else "text")


def tower_leaves(tower: VisionTower) -> list[Leaf]:
    """Every parameter of the tower; queries, keys and values are matrices of their own, and so are gate and up."""
    out: list[Leaf] = []
    for name, value in tower.named_parameters():
        parts = {"wqkv": 3, "w1": 2}.get(name.split(".")[-2] if value.ndim == 2 else "", 1)
        matrix = value.shape[0] // parts if value.ndim == 2 else 0
        out.append(Leaf(f"{TOWER}{name}", value, "bf16", matrix, 4e-3, "vision"))
    return out


@torch.no_grad()
def initialise(model: nn.Module, text: TextConfig, seed: int, first_sublayer: int = 0) -> None:
    """Values of every parameter; the same for the same seed on every device.

    model           the backbone, or layers that follow it; first_sublayer: how many sublayers there are before.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: nn.Parameter, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    zero = ("wo_b.weight", "ffn.w2", "shared_w2.weight", "head.weight", "wgate.weight", "attn_sink", "bias", "bias_vl")
    streams = text.hc_mult
    for name, parameter in model.named_parameters():
        if name.endswith(zero):
            parameter.zero_()
        elif name.endswith("embed.weight"):
            normal(parameter, 1.0)
        elif name.endswith((".fn", ".base", ".scale")):
            continue  # below
        elif parameter.ndim == 1 or name.endswith(("q_weight", "k_weight")):
            parameter.fill_(1.0)
        else:
            normal(parameter, parameter.shape[-1] ** -0.5)
        if name.endswith("engram.wkv.weight"):
            parameter[streams * text.hidden_size :] = 0.0  # the value rows
    hyper = (m for m in model.modules() if isinstance(m, HyperConnection))
    for sublayer, module in enumerate(hyper, first_sublayer):
        normal(module.fn, module.fn.shape[1] ** -0.5)
        module.scale.fill_(0.05)
        module.base.copy_(stream_bias(streams, sublayer))


@torch.no_grad()
def initialise_tower(tower: VisionTower, seed: int) -> None:
    """Values of every parameter; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in tower.named_parameters():
        if name.endswith(("wo.weight", ".w2.weight", "bias")):
            parameter.zero_()
        elif name in ("start", "end", "newline"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))  # as the embeddings beside them
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)


def stream_bias(streams: int, sublayer: int) -> Tensor:
    """mHC base: read mostly one stream, another for each sublayer; write to all; exchange little. [(2+S)S]."""
    read = torch.full((streams,), -3.0)
    read[sublayer % streams] = 3.0
    exchange = 6.0 * torch.eye(streams) - 3.0
    return torch.cat([read, torch.zeros(streams), exchange.flatten()])


# ---- official names --------------------------------------------------------------------------------------------------

TOWER = "vision."  # before the names of the tower's parameters
_TOWER_NAMES = {
    "patch_embed.": "vision.patch_embed.proj.",
    "aligner_w1.": "aligner.w1.",
    "aligner_w2.": "aligner.w2.",
    "start": "image_start",
    "end": "image_end",
    "newline": "image_newline",
}


def _tower_name(name: str) -> str:
    """The official name of a parameter of the tower."""
    for own, official in _TOWER_NAMES.items():
        if name.startswith(own):
            return official + name.removeprefix(own)
    module, _, part = name.rpartition(".")
    if part.startswith("norm"):
        return f"{TOWER}{name}.weight"
    block, _, linear = module.rpartition(".")
    return f"{TOWER}{block}.{'attn' if linear in ('wqkv', 'wo') else 'mlp'}.{linear}.{part}"


def official_parts(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A master by name -> official tensors, as the model and the tower load them; values not yet quantised."""
    if name.startswith(TOWER):
        yield _tower_name(name.removeprefix(TOWER)), value
        return
    name = name.replace("hc_attn.", "hc_attn_").replace("hc_ffn.", "hc_ffn_")
    layer, _, part = name.rpartition(".ffn.")
    ffn = f"{layer}.ffn"
    if not layer:
        yield name, value
    elif part in ("bias", "bias_vl"):
        yield f"{ffn}.gate.{part}", value
    elif part == "w13":
        for e, both in enumerate(value):
            w1, w3 = both.chunk(2)
            yield f"{ffn}.experts.{e}.w1.weight", w1
            yield f"{ffn}.experts.{e}.w3.weight", w3
    elif part == "w2":
        for e, w2 in enumerate(value):
            yield f"{ffn}.experts.{e}.w2.weight", w2
    elif part == "shared_w13.weight":
        w1, w3 = value.chunk(2)
        yield f"{ffn}.shared_experts.w1.weight", w1
        yield f"{ffn}.shared_experts.w3.weight", w3
    elif part == "shared_w2.weight":
        yield f"{ffn}.shared_experts.w2.weight", value
    else:
        yield name, value


def untrained(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Official tensors that no backbone run trains (the drafter's) at their initialisation, f32, not yet quantised."""
    generator = torch.Generator().manual_seed(seed)
    streams, layers = config.text.hc_mult, config.text.num_hidden_layers
    zero = ("wo_b.weight", "w2.weight", "markov_head.head.weight", "bias", "bias_vl", "attn_sink")
    for name, spec in tensors(config).items():
        if not spec.group.startswith("dspark") or name.endswith(".scale"):
            continue
        shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if spec.dtype == "I8" else spec.shape
        if name.endswith(("hc_attn_base", "hc_ffn_base")):
            stage, part = int(name.split(".")[1]), int(name.endswith("hc_ffn_base"))
            yield name, stream_bias(streams, 2 * (layers + stage) + part)
        elif name.endswith("_scale"):
            yield name, torch.full(shape, 0.05)
        elif name.endswith(zero):
            yield name, torch.zeros(shape)
        elif len(shape) == 1:
            yield name, torch.ones(shape)
        else:
            std = 1.0 if name.endswith("embed.weight") else 1.0 / math.sqrt(shape[-1])
            yield name, torch.randn(shape, generator=generator) * std
