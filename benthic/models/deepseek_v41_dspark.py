"""DeepSeek-V4.1-Flash, DSpark draft layers. Source: model specification, section 3.

The drafter sees what the target saw: for every target token, the streams averaged at the entry of a few target layers,
projected and normed, give each stage one context row, kept in a window ring like any window KV. From the last token it
then proposes a block at once: [anchor, noise, ...] runs through the stages, every block row attending to the last
context rows and to the whole block, and a low-rank Markov head corrects each slot by the token before it.

N drafted requests, W context rows at most, B block length, D hidden width, V vocabulary, M Markov rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from benthic.errors import BadConfigKey
from benthic.kernels import hyper, kv_copy
from benthic.kernels.attn_sparse import sink_attention
from benthic.models.base import Batch, LayerMemory, Selection
from benthic.models.deepseek_v41 import DeepseekV41, Layer
from benthic.models.deepseek_v41_config import ModelConfig, draft_plan, tensors
from benthic.models.loading import StagedCheckpoint
from benthic.models.modules import Embedding, Linear, RMSNorm, Stack, TensorSource, check_finite, product_grid
from benthic.models.weights import Checkpoint
from benthic.types import Numerics

Choose = Callable[[Tensor, int], Tensor]
"""Corrected logits [N, V] f32 of one slot and its index -> the drafted ids [N]."""


class Draft(NamedTuple):
    tokens: Tensor  # [N, B] int64
    logits: Tensor  # [N, B, V] f32, Markov correction included
    confidence: Tensor  # [N, B] f32 before the sigmoid: is this draft right, given that those before it are


class BlockAttention(Protocol):
    """What a stage needs of a `LayerMemory`: it has a window only, and a block leaves nothing behind."""

    def attend(self, q: Tensor, kw: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
        """q [N B, H, dh], kw [N B, dh] -> [N B, H, dh]; every block row sees the same context and the whole block."""
        ...


class BlockMemory:
    """One stage's context rows in its ring. Implements `BlockAttention`."""

    def __init__(self, ring: kv_copy.Ring, slots: Tensor, last: Tensor, window: int, block: int, round_probs: bool):
        self.ring, self.slots, self.last = ring, slots, last
        self.window, self.block, self.round_probs = window, block, round_probs

    def attend(self, q: Tensor, kw: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
        num, channels = self.last.shape[0], kw.shape[-1]
        at = self.last[:, None] + torch.arange(1 - self.window, 1, device=kw.device)  # [N, W] positions, oldest first
        context = kv_copy.read_ring(self.ring, self.slots[:, None].expand_as(at), at)  # [N, W, dh] f32
        rows = torch.cat([context.to(kw.dtype), kw.unflatten(0, (num, self.block))], dim=1)  # [N, W + B, dh]
        width = self.window + self.block
        visible = (self.last + 1).clamp(max=self.window)  # context rows that exist
        begin = torch.arange(num, device=kw.device) * width + self.window - visible
        return sink_attention(
            q,
            rows.reshape(num * width, channels),
            begin.repeat_interleave(self.block),
            (visible + self.block).repeat_interleave(self.block),
            None,
            None,
            sink,
            channels**-0.5,
            self.round_probs,
        )


class DSpark(nn.Module):
    """Draft stages `mtp.0` .. `mtp.n-1`; embedding and head are the backbone's."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        super().__init__()
        text = config.text
        self.config, self.numerics = text, numerics
        self.plan = draft_plan(config)
        self.main_proj = Linear(len(text.dspark_target_layer_ids) * text.hidden_size, text.hidden_size, "fp8", numerics)
        self.main_norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.stages = Stack(
            Layer(config, plan, text.dspark_n_routed_experts, text.dspark_num_experts_per_tok, numerics)
            for plan in self.plan
        )
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.markov_embed = Embedding(text.vocab_size, text.dspark_markov_rank, numerics)
        self.markov_head = Linear(text.dspark_markov_rank, text.vocab_size, "bf16", numerics, wide=True)
        self.confidence = Linear(text.hidden_size + text.dspark_markov_rank, 1, "bf16", numerics, wide=True)

    def context(self, taps: tuple[Tensor, ...], positions: Tensor) -> list[Tensor]:
        """Target taps [T, D] each, at `positions` [T] -> per stage the context rows [T, dh], ready for its ring."""
        main = self.main_norm(self.main_proj(product_grid(torch.cat(taps, dim=-1), self.numerics)))  # [T, D]
        main8 = product_grid(main, self.numerics)
        return [stage.attn.window_row(main8, positions) for stage in self.stages]

    def observe(self, rings: list[kv_copy.Ring], taps: tuple[Tensor, ...], slots: Tensor, positions: Tensor) -> None:
        """Store the context rows of target tokens; rows of rejected tokens are overwritten by position later."""
        for ring, rows in zip(rings, self.context(taps, positions), strict=True):
            kv_copy.ring_write(ring, rows, slots, positions)

    def blocks(
        self, backbone: DeepseekV41, anchors: Tensor, last: Tensor, memories: Sequence[BlockAttention], block: int
    ) -> Tensor:
        """What the stages make of [anchor, noise, ...] -> y [N, B, D], before the last norm.

        anchors [N] ids of the newest tokens, at position last + 1; last [N]; memories: one a stage.
        """
        text, device, num = self.config, anchors.device, anchors.shape[0]
        ids = torch.full((num, block), text.dspark_noise_token_id, dtype=torch.int64, device=device)
        ids[:, 0] = anchors
        positions = last[:, None] + torch.arange(1, block + 1, device=device)  # [N, B]
        batch = Batch(
            ids=ids.flatten(),
            positions=positions.flatten(),
            history=ids.new_full((num * block, 0), -1),
            images=None,  # drafts use the text routing bias
            embeds=None,
            starts=tuple(range(0, num * block + 1, block)),
            firsts=(),
            slots=(),
            tables=(),
            logit_rows=torch.arange(num * block, device=device),
        )
        s = backbone.embed(batch.ids)[:, None].expand(-1, text.hc_mult, -1).contiguous()  # [N B, S, D]
        pre = torch.zeros(s.shape[:2], dtype=torch.float32, device=device)
        pre[:, 0] = 1.0
        streams = hyper.Streams(s, pre)
        for stage, memory in zip(self.stages, memories, strict=True):
            streams, _ = stage(streams, batch, cast("LayerMemory", memory), None)
        return hyper.hyper_collapse(hyper.settle(streams), streams.pre).unflatten(0, (num, block))

    def base(self, backbone: DeepseekV41, y: Tensor) -> Tensor:
        """y [N, B, D] -> logits [N, B, V] f32, before the Markov correction."""
        return backbone.head(self.norm(y.flatten(0, 1))).unflatten(0, y.shape[:2])

    def correct(self, y: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The Markov correction [M, V] f32 and the confidence [M] f32 of slots.

        y [M, D] of the slots; previous [M] ids of the tokens before theirs.
        """
        markov = self.markov_embed(previous)  # [M, r]
        return self.markov_head(markov), self.confidence(torch.cat([y, markov], dim=-1))[:, 0]

    def draft(
        self,
        backbone: DeepseekV41,
        rings: list[kv_copy.Ring],
        slots: Tensor,
        anchors: Tensor,
        last: Tensor,
        choose: Choose,
        block: int | None = None,
    ) -> Draft:
        """Propose `block` tokens (default: the trained length) after each anchor.

        slots [N] state slots; anchors [N] ids of the newest tokens, at position last + 1; last [N] the newest position
        with a context row. choose is called once a slot, in order, so that sampling keys stay the caller's.
        """
        text = self.config
        block = text.dspark_block_size if block is None else block
        rounded = self.numerics.round_probs
        memories = [BlockMemory(ring, slots, last, text.sliding_window, block, rounded) for ring in rings]
        y = self.blocks(backbone, anchors, last, memories, block)
        base = self.base(backbone, y)
        tokens, logits, confidence = [], [], []
        previous = anchors
        for i in range(block):
            correction, sure = self.correct(y[:, i], previous)
            confidence.append(sure)
            logits.append(base[:, i] + correction)
            previous = choose(logits[-1], i)
            tokens.append(previous)
        return Draft(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1))

    def load(self, source: TensorSource) -> None:
        last = len(self.plan) - 1
        for i, stage in enumerate(self.stages):
            stage.load(source, f"mtp.{i}")
        self.main_proj.load(source, "mtp.0.main_proj")
        self.main_norm.load(source, "mtp.0.main_norm")
        self.norm.load(source, f"mtp.{last}.norm")
        self.markov_embed.load(source, f"mtp.{last}.markov_head.embed")
        self.markov_head.load(source, f"mtp.{last}.markov_head.head")
        self.confidence.load(source, f"mtp.{last}.confidence_head.proj")


def from_checkpoint(
    checkpoint: Checkpoint, numerics: Numerics, device: torch.device | str = "cpu", *, progress: Any = None
) -> DSpark:
    """The drafter of an opened checkpoint on `device`.

    progress  has `update(bytes)`, called as tensors are taken; None: silent.
    Raises    NonFiniteTensor; BadConfigKey when the checkpoint has no drafter.
    """
    config, device = checkpoint.config, torch.device(device)
    if not config.text.num_nextn_predict_layers:
        raise BadConfigKey("text_config.num_nextn_predict_layers", 0, "at least 1: this checkpoint has no drafter")
    with device:
        drafter = DSpark(config, numerics)
    if device.type == "cuda":
        with StagedCheckpoint(checkpoint, device, drafter_names(config), progress) as source:
            drafter.load(source)
    else:
        drafter.load(checkpoint)
    check_finite(drafter)
    return drafter.eval()


def drafter_names(config: ModelConfig) -> list[str]:
    """The official tensors that the drafter is loaded from, in inventory order."""
    return [name for name, spec in tensors(config).items() if spec.group.startswith("dspark")]
