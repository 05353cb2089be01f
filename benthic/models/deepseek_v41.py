"""DeepSeek-V4.1-Flash, text backbone. Source: model specification, sections 2.1 to 2.9 and 2.12; names, 5.

T rows in the step, S residual streams, D hidden width, H heads, dh head width, Rq query rank, G groups that close in
the step, Hi and di index heads and width, E experts, I expert width, K experts per token, V vocabulary.

Which layer owns compressed KV, index keys or a selection is `layer_plan` of `deepseek_v41_config.py`; how a layer finds
what earlier steps stored is its `LayerMemory`. Nothing here knows about blocks, slots or chunks.
"""

import math
from collections.abc import Iterable
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benthic.cache.replay import Windows
from benthic.cache.spec import CacheSpec
from benthic.cache.storage import Storage
from benthic.errors import BadConfigKey, NoVision
from benthic.kernels import engram, fused, gemm, hyper, moe_experts, moe_gate, quant, rope, swiglu
from benthic.models.base import Batch, LayerMemory, Memory, Selection
from benthic.models.deepseek_v41_config import (
    LayerPlan,
    ModelConfig,
    TextConfig,
    VisionConfig,
    cache_spec,
    engram_tables,
    layer_plan,
    tensors,
)
from benthic.models.deepseek_v41_vision import (
    LEAST_TOKENS,
    Patches,
    VisionTower,
    geometry,
    largest_geometry,
    read_image,
    scaled,
)
from benthic.models.device_memory import DeviceMemory
from benthic.models.loading import StagedCheckpoint
from benthic.models.memory import PagedMemory
from benthic.models.modules import (
    Embedding,
    Linear,
    PackedTable,
    RMSNorm,
    Stack,
    TensorSource,
    activation_dtype,
    carried,
    check_finite,
    check_fp4,
    empty_fp4,
    fp8_grid,
    join,
    packs,
    parameter,
    product_grid,
    read_fp4,
    read_weight,
)
from benthic.models.weights import Checkpoint
from benthic.text.tokenizer import compress_vocabulary, load_raw
from benthic.types import ImageInput, Numerics


class Output(NamedTuple):
    hidden: Tensor  # [T, D], before the head
    taps: tuple[Tensor, ...]  # the drafter's inputs, [T, D] each: streams averaged at the entry of its target layers


# ---- rotary positions ------------------------------------------------------------------------------------------------


def rope_for(config: TextConfig, ratio: int) -> Tensor:
    """Rotation frequencies of a layer, f32 [dr/2]. Layers with compressed KV use their own base and YaRN. 2.4."""
    if ratio == 0:
        return rope.rope_frequencies(config.qk_rope_head_dim, config.rope_theta)
    scaling = config.rope_scaling
    yarn = (scaling.factor, scaling.beta_fast, scaling.beta_slow, scaling.original_max_position_embeddings)
    return rope.rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, yarn)


# ---- residual streams ------------------------------------------------------------------------------------------------


class HyperConnection(nn.Module):
    """Learned read, write and exchange of the residual streams around one sublayer. 2.2."""

    def __init__(self, config: TextConfig):
        super().__init__()
        streams = config.hc_mult
        mixes = (2 + streams) * streams
        self.fn = parameter(mixes, streams * config.hidden_size)
        self.base = parameter(mixes)
        self.scale = parameter(3)
        self.eps, self.hc_eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s [T, S, D] -> how to read [T, S], how to write [T, S], how streams exchange [T, S, S]; all f32."""
        return hyper.hyper_mixes(s, self.fn, self.scale, self.base, self.eps, self.hc_eps, self.iterations)

    @cached_property  # a module finds its parameters slowly; so in the other classes
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.fn, self.scale, self.base

    def read(self, streams: hyper.Streams, norm: RMSNorm) -> tuple[Tensor, hyper.Streams]:
        """Entry of a sublayer: its input [T, D], and the settled streams with the weights to write its result by."""
        taken = fused.hyper_read(streams, *self.weights, norm.weight, self.eps, self.hc_eps, self.iterations)
        if taken is not None:
            return taken
        s = hyper.settle(streams)
        pre, post, comb = self(s)
        return norm(hyper.hyper_collapse(s, streams.pre)), hyper.Streams(s, pre, None, post, comb)

    def load(self, source: TensorSource, name: str) -> None:
        for part in ("fn", "base", "scale"):
            getattr(self, part).data.copy_(source.tensor(f"{name}_{part}"))


# ---- n-gram memory ---------------------------------------------------------------------------------------------------


class Engram(nn.Module):
    """Hashed recent tokens -> table rows -> gated addition to every stream. 2.9."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, config: ModelConfig, index: int, numerics: Numerics):
        super().__init__()
        text = config.text
        table = engram_tables(config)[index]
        self.numerics, self.eps = numerics, text.rms_norm_eps
        self.streams, self.width = text.hc_mult, text.hidden_size
        rows_per_token = (text.engram_max_ngram_size - 1) * text.engram_n_heads
        self.embed = PackedTable(table.rows, text.engram_head_dim, numerics)
        self.wkv = Linear(rows_per_token * text.engram_head_dim, (self.streams + 1) * self.width, "fp8", numerics)
        self.q_weight = parameter(self.streams, self.width)
        self.k_weight = parameter(self.streams, self.width)
        self.register_buffer("multipliers", torch.tensor(table.multipliers, dtype=torch.int64), persistent=False)
        self.register_buffer("primes", torch.tensor(table.primes, dtype=torch.int64), persistent=False)
        self.register_buffer("offsets", torch.tensor(table.offsets, dtype=torch.int64), persistent=False)

    def lookup(self, ngrams: Tensor) -> Tensor:
        """ngrams [T, n] compressed ids, newest first -> what the table has for them [T, (n-1) heads width]."""
        rows = engram.ngram_rows(ngrams, self.multipliers, self.primes, self.offsets)  # [T, (n-1) heads]
        return self.embed(rows).flatten(1)

    def forward(self, s: Tensor, ngrams: Tensor, images: Tensor | None, found: Tensor | None = None) -> Tensor:
        """s [T, S, D]; ngrams [T, n]; found: what `lookup` gave for them, where it ran ahead -> [T, S, D]."""
        e = self.lookup(ngrams) if found is None else found
        keys, value = self.wkv(product_grid(e, self.numerics)).split([self.streams * self.width, self.width], dim=-1)
        keys = keys.unflatten(-1, (self.streams, self.width))  # [T, S, D]
        return engram.engram_gate(s, keys, value, self.gate_weight(), self.eps, images)

    def gate_weight(self) -> Tensor:
        """[S, D] f32: of the two weights only their product counts. Whoever trains them has it each time."""
        return self.q_weight * self.k_weight if self.q_weight.requires_grad else self._gate_weight

    @cached_property
    def _gate_weight(self) -> Tensor:
        return self.q_weight * self.k_weight

    def load(self, source: TensorSource, name: str) -> None:
        self.embed.load(source, f"{name}.embed")
        self.wkv.load(source, f"{name}.wkv")
        self.q_weight.data.copy_(source.tensor(f"{name}.q_weight"))
        self.k_weight.data.copy_(source.tensor(f"{name}.k_weight"))


# ---- attention -------------------------------------------------------------------------------------------------------


class Compressor(nn.Module):
    """One latent per `ratio` tokens, from the unquantised attention input. 2.6."""

    def __init__(self, config: TextConfig, ratio: int, numerics: Numerics):
        super().__init__()
        self.ratio = ratio
        pooled = ratio > 1
        self.wkv = Linear(config.hidden_size, config.head_dim, "bf16", numerics, wide=pooled)
        self.wgate = Linear(config.hidden_size, config.head_dim, "bf16", numerics, wide=True) if pooled else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, h: Tensor, kv: LayerMemory, freqs: Tensor) -> Tensor:
        """h [T, D] -> [G, dh], one normed, unrotated latent for every group that closes in this step.

        Rotated at the group's first token it is stored as compressed KV.
        """
        return kv.compress(*self.products(h), self.norm, freqs, h.dtype)

    def products(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """h [T, D] -> what is pooled and how its rows weigh, [T, dh] f32 each; at ratio 1 only a latent, as h is."""
        if self.wgate is None:
            return self.wkv(h), None
        if self.wkv.weight.requires_grad:
            return self.wkv(h), self.wgate(h)
        both = gemm.linear(h, self.both, out_dtype=torch.float32)
        width = both.shape[1] // 2
        return both[:, :width], both[:, width:]

    @cached_property
    def both(self) -> quant.Matrix:
        assert self.wgate is not None
        return join(self.wkv, self.wgate)  # one input, one product

    def load(self, source: TensorSource, name: str) -> None:
        self.wkv.load(source, f"{name}.wkv")
        if self.wgate is not None:
            self.wgate.load(source, f"{name}.wgate")
        self.norm.load(source, f"{name}.norm")


class Indexer(nn.Module):
    """Scores compressed entries for each query and chooses which ones attention reads. 2.7, 2.8."""

    def __init__(self, config: TextConfig, plan: LayerPlan, numerics: Numerics):
        super().__init__()
        self.numerics = numerics
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, "fp8", numerics)
        self.weights_proj = Linear(config.hidden_size, self.heads, "bf16", numerics)
        self.owns_keys = plan.keys_from == plan.index
        if self.owns_keys:
            self.wk = Linear(config.head_dim, self.width, "bf16", numerics)
            self.k_norm = RMSNorm(self.width, config.rms_norm_eps)

    def store_keys(self, latent: Tensor, kv: LayerMemory, freqs: Tensor) -> None:
        """latent [G, dh] -> index keys [G, di], normed, rotated at the group's first token and stored."""
        kv.store_keys(self.wk(latent), self.k_norm, freqs)

    def query(self, h: Tensor, qa8: Tensor, positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        """h [T, D], qa8 [T, Rq] -> queries [T, Hi, di] on the FP4 grid, head weights [T, Hi]."""
        q = rope.rotate(
            self.wq_b(carried(qa8, self.numerics)).unflatten(-1, (self.heads, self.width)), positions, freqs
        )
        q = quant.roundtrip_mxfp4(q) if self.numerics.quantise else q
        if self.weights_proj.weight.requires_grad or self.scaled is None:
            return q, self.weights_proj(h) * self.factor
        return q, gemm.linear(h, self.scaled)

    @property
    def factor(self) -> float:
        return self.width**-0.5 * self.heads**-0.5

    @cached_property
    def scaled(self) -> Tensor | None:
        """The head weights' projection times the factor; None where that would round, as a power of two does not."""
        factor = torch.tensor(self.factor)  # f32, as it multiplies
        exact = math.frexp(factor.item())[0] == 0.5
        return self.weights_proj.weight.detach() * factor.to(self.weights_proj.weight) if exact else None

    def load(self, source: TensorSource, name: str) -> None:
        self.wq_b.load(source, f"{name}.wq_b")
        self.weights_proj.load(source, f"{name}.weights_proj")
        if self.owns_keys:
            self.wk.load(source, f"{name}.wk")
            self.k_norm.load(source, f"{name}.k_norm")


class Attention(nn.Module):
    """Window and selected compressed entries in one softmax with a sink; one latent is both key and value. 2.5."""

    freqs: Tensor

    def __init__(self, config: TextConfig, plan: LayerPlan, numerics: Numerics):
        super().__init__()
        self.plan, self.numerics = plan, numerics
        self.heads, self.width, self.groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.eps = config.rms_norm_eps
        hidden, rank, inner = config.hidden_size, config.q_lora_rank, config.num_attention_heads * config.head_dim
        self.wq_a = Linear(hidden, rank, "fp8", numerics)
        self.q_norm = RMSNorm(rank, config.rms_norm_eps)
        self.wq_b = Linear(rank, inner, "fp8", numerics)
        self.wkv = Linear(hidden, config.head_dim, "fp8", numerics)
        self.kv_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn_sink = parameter(self.heads)
        self.wo_a = Linear(inner // self.groups, self.groups * config.o_lora_rank, "fp8", numerics)
        self.wo_b = Linear(self.groups * config.o_lora_rank, hidden, "fp8", numerics)
        self.compressor = Compressor(config, plan.ratio, numerics) if plan.kv_from == plan.index else None
        self.indexer = Indexer(config, plan, numerics) if plan.topk_from == plan.index else None
        self.register_buffer("freqs", rope_for(config, plan.ratio), persistent=False)

    def forward(
        self, h: Tensor, batch: Batch, kv: LayerMemory, shared: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """h [T, D] -> [T, D], and the selection that the following layers reuse."""
        q, qa8, kw = self.inputs(h, batch.positions)  # [T, H, dh], [T, Rq], [T, dh]

        if self.compressor is not None and self.indexer is not None:
            latent = self.compressor(h, kv, self.freqs)  # [G, dh]
            self.indexer.store_keys(latent, kv, self.freqs)
        if self.indexer is not None:
            shared = kv.select(*self.indexer.query(h, qa8, batch.positions, self.freqs), shared)

        o = kv.attend(q, kw, shared if self.plan.ratio else None, self.attn_sink)  # [T, H, dh]
        return self.output(o, batch.positions), shared

    @cached_property
    def input_weights(self) -> tuple[quant.Matrix, Tensor, quant.Matrix, Tensor]:
        both = join(self.wq_a, self.wkv)  # one input, one product
        return both, self.q_norm.weight, self.wq_b.matrix, self.kv_norm.weight

    @cached_property
    def output_weights(self) -> tuple[quant.Matrix, quant.Matrix]:
        return self.wo_a.matrix, self.wo_b.matrix

    def inputs(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [T, D] -> queries [T, H, dh], what they come from [T, Rq], and the window row [T, dh]."""
        numerics = self.numerics
        if numerics.quantise:
            taken = fused.attention_inputs(h, positions, self.freqs, *self.input_weights, self.eps, numerics.one_scale)
            if taken is not None:
                return taken[0].unflatten(-1, (self.heads, self.width)), taken[1], taken[2]
        h8 = product_grid(h, numerics)
        qa8 = fp8_grid(self.q_norm(self.wq_a(h8)), numerics)  # [T, Rq]
        q = self.wq_b(carried(qa8, numerics)).unflatten(-1, (self.heads, self.width))  # [T, H, dh]
        return rope.rotate(q, positions, self.freqs), qa8, self.window_row(h8, positions)

    def output(self, o: Tensor, positions: Tensor) -> Tensor:
        """o [T, H, dh] -> [T, D]: turned back at the query's position, a projection a group of heads, one over all."""
        numerics = self.numerics
        if numerics.quantise:
            wo_a = numerics.quantise_wo_a
            taken = fused.attention_output(
                o, positions, self.freqs, *self.output_weights, self.groups, wo_a, numerics.one_scale
            )
            if taken is not None:
                return taken
        o = rope.rotate(o, positions, self.freqs, inverse=True)
        o = o.reshape(o.shape[0], self.groups, -1)  # [T, groups, H/groups dh]
        o = product_grid(o, numerics) if numerics.quantise_wo_a else o
        u = gemm.grouped_linear(o, quant.grouped(self.wo_a.matrix, self.groups))  # [T, groups, rank]
        return self.wo_b(product_grid(u.flatten(1), numerics))

    def window_row(self, h8: Tensor, positions: Tensor) -> Tensor:
        """h8 [T, D] as products take it -> [T, dh], key and value of a token inside the window, on the FP8 grid."""
        return fp8_grid(rope.rotate(self.kv_norm(self.wkv(h8)), positions, self.freqs), self.numerics)

    def load(self, source: TensorSource, name: str) -> None:
        for part in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"):
            getattr(self, part).load(source, f"{name}.{part}")
        self.attn_sink.data.copy_(source.tensor(f"{name}.attn_sink"))
        if self.compressor is not None:
            self.compressor.load(source, f"{name}.compressor")
        if self.indexer is not None:
            self.indexer.load(source, f"{name}.indexer")


# ---- mixture of experts ----------------------------------------------------------------------------------------------


class MoE(nn.Module):
    """Routed experts chosen per token and one shared expert. 2.12."""

    def __init__(
        self, config: TextConfig, num_experts: int, experts_per_token: int, numerics: Numerics, *, images: bool
    ):
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        shared = inner * config.n_shared_experts
        dtype = activation_dtype(numerics)
        self.numerics, self.limit, self.experts_per_token = numerics, config.swiglu_limit, experts_per_token
        self.normalise, self.routed_scale = config.norm_topk_prob, config.routed_scaling_factor
        self.gate = Linear(hidden, num_experts, "bf16", numerics, wide=True)
        self.bias = parameter(num_experts)
        self.bias_vl = parameter(num_experts) if images else None  # used for image tokens; absent without a tower
        self.w13: Tensor | quant.Fp4Matrix
        self.w2: Tensor | quant.Fp4Matrix
        if packs(numerics):
            self.w13 = empty_fp4(num_experts, 2 * inner, hidden)
            self.w2 = empty_fp4(num_experts, hidden, inner)
        else:
            self.w13 = parameter(num_experts, 2 * inner, hidden, dtype=dtype)  # gate rows, then up rows
            self.w2 = parameter(num_experts, hidden, inner, dtype=dtype)
        self.shared_w13 = Linear(hidden, 2 * shared, "fp8", numerics)
        self.shared_w2 = Linear(shared, hidden, "fp8", numerics)

    def forward(self, h: Tensor, images: Tensor | None) -> Tensor:
        """h [T, D] -> [T, D]."""
        bias = self.choice_bias(images)
        if self.numerics.quantise:
            router = (self.experts_per_token, self.normalise, self.routed_scale)
            gate, w13, w2, shared_w13, shared_w2 = self.weights
            matrices = (w13, w2, shared_w13, shared_w2)
            rounding = (self.numerics.round_hidden, self.numerics.one_scale)
            taken = fused.moe(h, gate, bias, *matrices, *router, self.limit, *rounding)
            if taken is not None:
                return taken
        ids, weights = moe_gate.route(
            h, self.gate.weight, bias, self.experts_per_token, self.normalise, self.routed_scale
        )  # [T, K] each
        h8 = fp8_grid(h, self.numerics)
        numerics = self.numerics
        routed = moe_experts.experts(
            h8,
            ids,
            weights,
            self.w13,
            self.w2,
            self.limit,
            numerics.quantise,
            numerics.round_hidden,
            numerics.one_scale,
        )  # [T, D] f32
        return (routed + self.shared(h8).float()).to(h.dtype)

    def choice_bias(self, images: Tensor | None) -> Tensor:
        """What moves the choice of experts and not their weight: [E], or [T, E] where the step holds images."""
        if images is None or self.bias_vl is None:
            return self.bias
        return torch.where(images[:, None], self.bias_vl, self.bias)

    @cached_property
    def weights(self) -> tuple[Tensor, quant.Matrix, quant.Matrix, quant.Matrix, quant.Matrix]:
        return self.gate.weight, self.w13, self.w2, self.shared_w13.matrix, self.shared_w2.matrix

    def shared(self, h8: Tensor) -> Tensor:
        gate, up = self.shared_w13(carried(h8, self.numerics)).chunk(2, dim=-1)
        y = swiglu.swiglu(gate, up, self.limit, out_dtype=h8.dtype if self.numerics.round_hidden else torch.float32)
        return self.shared_w2(product_grid(y, self.numerics).to(h8.dtype))

    def load(self, source: TensorSource, name: str) -> None:
        self.gate.load(source, f"{name}.gate")
        self.bias.data.copy_(source.tensor(f"{name}.gate.bias"))
        if self.bias_vl is not None:
            self.bias_vl.data.copy_(source.tensor(f"{name}.gate.bias_vl"))
        inner = self.w2.shape[2]
        for e in range(self.w13.shape[0]):
            expert = f"{name}.experts.{e}"
            if isinstance(self.w13, quant.Fp4Matrix) and isinstance(self.w2, quant.Fp4Matrix):
                both = quant.expert(self.w13, e)
                read_fp4(source, f"{expert}.w1", quant.rows_of(both, 0, inner))
                read_fp4(source, f"{expert}.w3", quant.rows_of(both, inner, 2 * inner))
                read_fp4(source, f"{expert}.w2", quant.expert(self.w2, e))
            elif isinstance(self.w13, Tensor) and isinstance(self.w2, Tensor):
                self.w13.data[e, :inner] = read_weight(source, f"{expert}.w1", "fp4")
                self.w13.data[e, inner:] = read_weight(source, f"{expert}.w3", "fp4")
                self.w2.data[e] = read_weight(source, f"{expert}.w2", "fp4")
        if isinstance(self.w13, quant.Fp4Matrix) and isinstance(self.w2, quant.Fp4Matrix):
            check_fp4(f"{name}.experts", ("w1", "w3"), self.w13)
            check_fp4(f"{name}.experts", ("w2",), self.w2)
            self.w13, self.w2 = moe_experts.prepare(self.w13, self.w2, self.numerics)
        self.shared_w13.load_rows(source, f"{name}.shared_experts.w1", 0)
        self.shared_w13.load_rows(source, f"{name}.shared_experts.w3", self.shared_w13.matrix.shape[0] // 2)
        self.shared_w2.load(source, f"{name}.shared_experts.w2")


# ---- the model -------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention and experts on the residual streams; each read of the streams is decided one sublayer earlier. 2.2."""

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        num_experts: int,
        experts_per_token: int,
        numerics: Numerics,
    ):
        super().__init__()
        text = config.text
        self.plan = plan
        self.engram = Engram(config, plan.engram, numerics) if plan.engram is not None else None
        self.hc_attn = HyperConnection(text)
        self.attn_norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.attn = Attention(text, plan, numerics)
        self.hc_ffn = HyperConnection(text)
        self.ffn_norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.ffn = MoE(text, num_experts, experts_per_token, numerics, images=config.vision is not None)

    def recall(
        self, streams: hyper.Streams, ngrams: Tensor, images: Tensor | None, found: Tensor | None
    ) -> hyper.Streams:
        if self.engram is None:
            return streams
        return hyper.Streams(self.engram(hyper.settle(streams), ngrams, images, found), streams.pre)

    def forward(
        self, streams: hyper.Streams, batch: Batch, kv: LayerMemory, shared: Selection | None
    ) -> tuple[hyper.Streams, Selection | None]:
        """The streams, read by weights of the sublayer before; their last write is left to whoever reads them next."""
        h, streams = self.hc_attn.read(streams, self.attn_norm)  # h [T, D]
        o, shared = self.attn(h, batch, kv, shared)  # [T, D]
        h, streams = self.hc_ffn.read(streams._replace(out=o), self.ffn_norm)  # h [T, D]
        return streams._replace(out=self.ffn(h, batch.images)), shared

    def load(self, source: TensorSource, name: str) -> None:
        for part in ("attn_norm", "attn", "ffn_norm", "ffn"):
            getattr(self, part).load(source, f"{name}.{part}")
        self.hc_attn.load(source, f"{name}.hc_attn")
        self.hc_ffn.load(source, f"{name}.hc_ffn")
        if self.engram is not None:
            self.engram.load(source, f"{name}.engram")


class Ahead:
    """Lookups in tables on the other side of the link, begun when the step begins and taken where they are needed."""

    def __init__(self, layers: Iterable[Layer], ngrams: Tensor):
        self._found: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self._kept: Tensor | None = None
        far = [layer for layer in layers if layer.engram is not None and layer.engram.embed.over_link]
        if not far:
            return
        here, side = torch.cuda.current_stream(ngrams.device), _side_stream(ngrams.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for layer in far:
                assert layer.engram is not None
                found, done = layer.engram.lookup(ngrams), torch.cuda.Event()
                done.record(side)
                found.record_stream(here)
                self._found[layer.plan.index] = (found, done)

    def keep(self, rows: Tensor) -> None:
        """From here on only these of the rows that were kept before are asked for."""
        self._kept = rows if self._kept is None else self._kept[rows]

    def take(self, layer: int) -> Tensor | None:
        """[T, (n-1) heads width] for this layer, ready for the current stream; None: not begun here."""
        if layer not in self._found:
            return None
        found, done = self._found.pop(layer)
        torch.cuda.current_stream(found.device).wait_event(done)
        return found if self._kept is None else found[self._kept]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class DeepseekV41(nn.Module):
    """The text backbone, and the vision tower where `from_checkpoint` has loaded one.

    classes  [ids] int64: compressed id of every token id, for the n-gram memory; None: the identity, which fits only
             when the config's compressed vocabulary is the vocabulary.
    """

    classes: Tensor
    entry: Tensor

    def __init__(self, config: ModelConfig, numerics: Numerics, classes: Tensor | None = None):
        super().__init__()
        text = config.text
        self.config, self.numerics = config, numerics
        self.vision: VisionTower | None = None
        self.plan = layer_plan(config)
        self.last_source = max((plan.index for plan in self.plan if plan.kv_from == plan.index), default=-1)
        assert all(plan.engram is None for plan in self.plan[self.last_source + 1 :]), "n-gram layers stand before it"
        self.embed = Embedding(text.vocab_size, text.hidden_size, numerics)
        self.layers = Stack(
            Layer(config, plan, text.n_routed_experts, text.num_experts_per_tok, numerics) for plan in self.plan
        )
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.head = Linear(text.hidden_size, text.vocab_size, "bf16", numerics, wide=True)
        classes = torch.arange(text.vocab_size) if classes is None else classes.to(torch.get_default_device())
        self.register_buffer("classes", classes, persistent=False)
        first = torch.zeros(text.hc_mult, dtype=torch.float32)
        first[0] = 1.0
        self.register_buffer("entry", first, persistent=False)  # the first read is the first stream alone

    def forward(self, batch: Batch, memory: Memory, *, taps: bool = False) -> Output:
        text = self.config.text
        x = self.embed(batch.ids)  # [T, D]
        if batch.images is not None and batch.embeds is not None:
            x = torch.where(batch.images[:, None], batch.embeds.to(x.dtype), x)
        s = x[:, None].expand(-1, text.hc_mult, -1).contiguous()  # [T, S, D]
        pre = self.entry.expand(s.shape[0], -1).contiguous()
        ngrams = self.ngrams(batch) if text.engram_layer_ids else batch.history
        streams = hyper.Streams(s, pre)
        shared: Selection | None = None
        tapped: list[Tensor] = []
        ahead, cuts = Ahead(self.layers, ngrams), {cut.layer: cut for cut in batch.cuts}
        for plan, layer in zip(self.plan, self.layers, strict=True):
            if plan.index in cuts:  # the other rows are read by nobody from here on. 2.10
                kept, batch = cuts[plan.index].kept, cuts[plan.index].batch
                if not kept.shape[0]:
                    return Output(streams.s.new_empty(0, text.hidden_size), ())
                memory, ngrams, streams = memory.of(batch), ngrams[kept], streams.at(kept)
                shared = None if shared is None else shared.at(kept)
                ahead.keep(kept)
            streams = layer.recall(streams, ngrams, batch.images, ahead.take(plan.index))
            if taps and plan.index in text.dspark_target_layer_ids:
                streams = hyper.Streams(hyper.settle(streams), streams.pre)
                tapped.append(streams.s.float().mean(dim=1).to(s.dtype))  # [T, D]
            streams, shared = layer(streams, batch, memory.layer(plan.index), shared)
        return Output(hyper.hyper_collapse(hyper.settle(streams), streams.pre), tuple(tapped))

    def ngrams(self, batch: Batch) -> Tensor:
        """[T, n] compressed ids at p, p-1, ...; the pad class from the first image token or sequence start on. 2.9."""
        text = self.config.text
        history = batch.history[:, : text.engram_max_ngram_size - 1]
        pad, image = text.engram_pad_token_id, self.config.image_token_id
        return engram.ngram_ids(batch.ids, history, self.classes, pad, image)

    # ---- images ------------------------------------------------------------------------------------------------------

    @property
    def image_token_id(self) -> int | None:
        """The id at every position of an image span; None: the model reads text only."""
        return None if self.config.vision is None else self.config.image_token_id

    def image_tokens(self, width: int, height: int) -> int:
        """Tokens of the span of an image, pixels in. Raises NoVision, BadImage."""
        return geometry(width, height, self._vision_config).tokens

    def read_image(self, source: bytes, longest: int | None = None, where: str = "image") -> Patches:
        """An encoded image -> what `image_rows` takes, on the CPU. Raises NoVision, BadImage."""
        return read_image(source, self._vision_config, longest, where)

    def image_rows(self, patches: object) -> Tensor:
        """The rows [tokens, D] that stand in the place of an image's span."""
        assert self.vision is not None, "the vision tower is not loaded"
        assert isinstance(patches, Patches), f"{type(patches).__name__} is not what `read_image` returns"
        return self.vision(scaled(patches.pixels.to(self.classes.device)), patches.geometry)

    def largest_image(self, tokens: int) -> ImageInput | None:
        """A blank image of as many patches as any whose span has at most so many tokens. None: there is none."""
        if self.vision is None or tokens < LEAST_TOKENS:
            return None
        geo = largest_geometry(self._vision_config, tokens)
        pixels = torch.zeros(geo.grid_h * geo.grid_w, 3 * self._vision_config.patch_size**2, dtype=torch.uint8)
        return ImageInput(0, geo.tokens, "", Patches(pixels, geo))

    @property
    def _vision_config(self) -> VisionConfig:
        if self.config.vision is None:
            raise NoVision
        return self.config.vision

    # ---- what the engine asks ----------------------------------------------------------------------------------------

    @property
    def cache_spec(self) -> CacheSpec:
        """Bytes the backbone stores per request; float32 records where the profile has no quantisers."""
        return cache_spec(self.config, packed=self.numerics.quantise, drafter=False)

    @property
    def windows(self) -> Windows:
        storing = self.last_source + 1
        return Windows(self.config.text.sliding_window, storing, len(self.plan) - storing)

    @property
    def max_positions(self) -> int:
        return self.config.text.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        return self.config.text.vocab_size

    def memory(self, storage: Storage, batch: Batch) -> Memory:
        form = PagedMemory if batch.rows is None else DeviceMemory
        return form(self.config, self.plan, self.numerics, storage, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> f32 [R, V]."""
        return self.head(self.norm(hidden))

    def load(self, source: TensorSource) -> None:
        """Fill every parameter from official tensors. 5."""
        self.embed.load(source, "embed")
        self.norm.load(source, "norm")
        self.head.load(source, "head")
        for plan, layer in zip(self.plan, self.layers, strict=True):
            layer.load(source, f"layers.{plan.index}")
        if self.vision is not None:
            self.vision.load(source)


def from_checkpoint(
    checkpoint: Checkpoint,
    numerics: Numerics,
    device: torch.device | str = "cpu",
    *,
    tables_on_host: bool = False,
    progress: Any = None,
) -> DeepseekV41:
    """The backbone of an opened checkpoint on `device`, with its vision tower if it has one.

    tables_on_host  for a model on a GPU: its n-gram tables stay in host memory, locked, which takes their bytes and no
                    more.
    progress        has `update(bytes)`, called as tensors are taken; None: silent.
    Raises NonFiniteTensor, BadTokenizer, or BadConfigKey when the checkpoint's vocabulary does not compress to the
    configured size; OutOfMemory or HostMemoryNotLocked when the host cannot hold the tables.
    """
    config, device = checkpoint.config, torch.device(device)
    with device:
        model = DeepseekV41(config, numerics, token_classes(checkpoint))
        if config.vision is not None:
            model.vision = VisionTower(config, numerics)
    for layer in model.layers:
        if layer.engram is not None:
            layer.engram.embed.on_host = tables_on_host
    if device.type == "cuda":
        names = [*backbone_names(config), *vision_names(config)]
        tables = {name for name in names if tables_on_host and ".engram.embed." in name}
        names = [name for name in names if name not in tables]
        with StagedCheckpoint(checkpoint, device, names, progress, tables=tables) as source:
            model.load(source)
    else:
        model.load(checkpoint)
    check_finite(model)
    return model.eval()


def backbone_names(config: ModelConfig) -> list[str]:
    """The official tensors that the backbone is loaded from, in inventory order."""
    return [name for name, spec in tensors(config).items() if not spec.group.startswith(("dspark", "vision"))]


def vision_names(config: ModelConfig) -> list[str]:
    """The official tensors of vision tower, aligner and delimiters; empty for a model that reads text only."""
    return [name for name, spec in tensors(config).items() if spec.group.startswith("vision")]


def token_classes(checkpoint: Checkpoint) -> Tensor | None:
    """[ids] int64 compressed id of every token id; None (the identity) for a checkpoint without a tokenizer. 2.9."""
    config, path = checkpoint.config, checkpoint.tokenizer_path
    key, want = "text_config.engram_compressed_vocab_size", config.text.engram_compressed_vocab_size
    if path is None:
        if want != config.text.vocab_size:
            raise BadConfigKey(key, want, f"{config.text.vocab_size}, the vocabulary, as there is no tokenizer.json")
        return None
    classes = torch.from_numpy(compress_vocabulary(load_raw(path)))
    found = int(classes.max()) + 1
    if found != want:
        raise BadConfigKey(key, want, f"{found}, what the vocabulary of {path.name} compresses to")
    if len(classes) < config.text.vocab_size:  # ids without a token: a padded vocabulary; they stand for padding
        pad = classes[config.text.engram_pad_token_id].expand(config.text.vocab_size - len(classes))
        classes = torch.cat([classes, pad])
    return classes
