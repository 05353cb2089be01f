"""The training run of the drafter: whole rows through the frozen target, blocks after many anchors of each row.

The graph is the package's own `DSpark`; in place of rings its stages read `AnchorMemory`, the context rows of a whole
step with their gradient. The target runs as it serves, top-k and quantisers in force, and gets no gradient. Losses and
anchors: speculation specification, sections 5.2 and 5.3; optimiser and schedule: those of the backbone.

B rows of L tokens, T = B L; A anchors a row, N = B A; S slots a block; W context rows; V vocabulary.
"""

import csv
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benthic import plots
from benthic.errors import BadSetting, BadTrainingState
from benthic.kernels import fused
from benthic.models.base import Batch, Selection
from benthic.models.deepseek_v41 import DeepseekV41, Engram, from_checkpoint
from benthic.models.deepseek_v41_config import ModelConfig, TextConfig, read_json, tensors
from benthic.models.deepseek_v41_dspark import DSpark
from benthic.models.modules import Linear, activation_dtype
from benthic.models.weights import Checkpoint, write_checkpoint
from benthic.testing.acceptance import Rounds, calibration, expected_error, survival
from benthic.train import backbone, data, generate, loop, pack
from benthic.train.kernels import TrainingKernels
from benthic.train.loss import Ids, history, response_weights
from benthic.train.memory import Mode, RowMemory, RowShapes
from benthic.train.optim import Optimiser
from benthic.train.rows import RowBatch
from benthic.train.settings import Form, Phase
from benthic.train.settings import Settings as RowSettings
from benthic.types import NUMERICS, Numerics

log = logging.getLogger(__name__)

GENERATED = "generated"  # the part of text that the target wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RowSettings):
    """One run. Rows of one length, no pictures; the phases are before and after `quantise_from`, of the drafter."""

    rows: int = 24
    parts: str = "prose,needle=1,recall=1,copy=1,json=1,tools=1"
    anchors: int = 96  # blocks a row
    seconds: float = 220.0
    quantise_from: float = 0.7
    token_weight: float = 0.1  # cross entropy of the text's token
    distance_weight: float = 0.9  # total variation between the two distributions, 0 to 2
    confidence_weight: float = 1.0
    slot_decay: float = 4.0  # a slot weighs exp(-1/slot_decay) of the one before

    # what a backbone has beside
    shapes_rows: int = 0
    long_parts: str = ""
    weights: str = ""
    index_rows: int = 0
    images_from: float = 1.0
    topk_from: float = 0.0  # the target's, always
    long_from: float = 1.0

    def check(self) -> None:
        """Raises BadSetting."""
        RowSettings.check(self)

        def need(ok: bool, key: str, want: str) -> None:
            if not ok:
                raise BadSetting(key, getattr(self, key), want, "the settings of the run")

        need(1 <= self.anchors <= self.length, "anchors", f"a number in [1, length], length is {self.length}")
        for key in ("token_weight", "distance_weight", "confidence_weight"):
            need(0 <= getattr(self, key) < math.inf, key, "a number of at least 0")
        need(0 < self.slot_decay < math.inf, "slot_decay", "a number above 0")


OPTIONS = (
    "rows", "length", "parts", "anchors", "seconds", "quantise_from", "warm_up", "flat_until", "floor", "token_weight",
    "distance_weight", "confidence_weight", "slot_decay", "balance_weight", "bias_step", "seed",
)  # fmt: skip
"""The settings that are a drafter's."""


def with_generated(folder: Path, manifest: data.Manifest, file: Path, special: Ids) -> data.Manifest:
    """The manifest of a data folder with a file of generated text as one more part. Raises BadTrainingData."""
    ids = generate.read(file, special, manifest.vocab_size)
    return replace(
        manifest,
        parts=manifest.parts | {GENERATED: [str(file.resolve())]},  # an absolute name is taken as it is
        tokens=manifest.tokens | {GENERATED: len(ids)},
        documents=manifest.documents | {GENERATED: int((ids == special.bos).sum())},
    )


# ---- the target ------------------------------------------------------------------------------------------------------


def frozen(checkpoint: Checkpoint, numerics: Numerics, kernels: TrainingKernels, device: torch.device) -> DeepseekV41:
    """The checkpoint's backbone in the form that training computes with, on `device`, without gradients."""
    model = from_checkpoint(checkpoint, numerics)  # on the CPU, where weights lie in their compute form
    dtype = activation_dtype(numerics)
    for module in model.modules():
        if isinstance(module, Linear) and module.wide:
            module.weight.data = module.weight.data.float()
        if isinstance(module, Engram):
            packed = module.embed
            table = backbone.Table(*packed.shape, dtype, kernels)
            table.weight.data = packed(torch.arange(packed.shape[0]))
            module.embed = table  # type: ignore[assignment]
    return model.requires_grad_(False).to(device)


def backbone_digest(config: ModelConfig, tensor: Callable[[str], Tensor]) -> str:
    """Of the backbone's stored tensors, by official name: a drafter belongs to the weights it was trained on."""
    found = hashlib.sha256()
    for name, spec in tensors(config).items():
        if not spec.group.startswith(("dspark", "vision")):
            found.update(name.encode())
            found.update(tensor(name).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# ---- attention of blocks over whole rows -----------------------------------------------------------------------------


class Places(NamedTuple):
    """Where N blocks find their context rows."""

    rows: Tensor  # [N, W] int64 among the T rows of the step, oldest first
    absent: Tensor  # [N, W] bool: before the row's start, or filling up the width

    @classmethod
    def of(cls, anchors: Tensor, length: int, window: int, block: int) -> "Places":
        """anchors [B, A] positions. W is the window, filled up so that W + S is a multiple of 8."""
        width = window + -(window + block) % 8
        back = torch.arange(width, 0, -1, device=anchors.device)
        at = anchors.unsqueeze(-1) - back  # [B, A, W] positions
        absent = (at < 0) | (back > window)
        first = torch.arange(anchors.shape[0], device=anchors.device)[:, None, None] * length
        return cls((at.clamp(min=0) + first).flatten(0, 1), absent.flatten(0, 1))


class AnchorMemory:
    """One stage's context rows of all rows of the step. Implements `BlockAttention`."""

    def __init__(self, context: Tensor, places: Places, block: int, kernels: TrainingKernels):
        self.context, self.places, self.block, self.kernels = context, places, block, kernels

    def attend(self, q: Tensor, kw: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
        return self.kernels.piece(attend_blocks)(q, kw, self.context, *self.places, sink, self.block)


def attend_blocks(
    q: Tensor, kw: Tensor, context: Tensor, rows: Tensor, absent: Tensor, sink: Tensor, block: int
) -> Tensor:
    """q [N S, H, dh], kw [N S, dh] over context [T, dh] rows and the own block -> [N S, H, dh]."""
    num, heads = rows.shape[0], q.shape[1]
    keys = torch.cat([F.embedding(rows, context), kw.unflatten(0, (num, block))], dim=1).float()  # [N, W + S, dh]
    folded = q.unflatten(0, (num, block)).flatten(1, 2).float()  # [N, S H, dh]
    scores = (folded @ keys.transpose(1, 2)) * q.shape[-1] ** -0.5
    hidden = F.pad(absent, (0, block)).unsqueeze(1)  # [N, 1, W + S]
    scores = scores.masked_fill(hidden, -torch.inf)
    total = torch.logaddexp(torch.logsumexp(scores, -1), sink.repeat(block))  # [N, S H]
    o = torch.exp(scores - total.unsqueeze(-1)) @ keys
    return o.unflatten(1, (block, heads)).flatten(0, 1).to(q.dtype)


# ---- losses ----------------------------------------------------------------------------------------------------------


def slot_losses(
    base: Tensor, correction: Tensor, target: Tensor, wanted: Tensor, confidence: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of M slots: cross entropy, distance and confidence, each a weighted sum; acceptance [M], detached.

    base, correction, target   [M, V] f32 logits, the drafter's being base + correction.
    wanted [M] ids; confidence [M] f32 logits; weights [M] f32.
    The distance is sum |q - p|, 0 to 2; acceptance is 1 minus half of it, and what the confidence learns.
    """
    log_q = torch.log_softmax(base + correction, -1)
    token = -log_q.gather(1, wanted.unsqueeze(1)).squeeze(1)
    distance = (log_q.exp() - torch.softmax(target, -1)).abs().sum(-1)
    accepted = (1 - distance / 2).clamp(0, 1).detach()
    sure = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    return (token * weights).sum(), (distance * weights).sum(), (sure * weights).sum(), accepted


class Blocks(NamedTuple):
    """Anchors of a batch, and what their slots are about: slot i predicts the token i + 1 places after the anchor."""

    anchors: Tensor  # [B, A] int64 positions; 1 where there is none
    previous: Tensor  # [N, S] ids of the tokens before the slots': the text's
    wanted: Tensor  # [N, S] the text's tokens
    rows: Tensor  # [N, S] int64 rows of the step where the target predicts them
    valid: Tensor  # [N, S] bool: the slot's token and those before it belong to one response


def choose_anchors(inside: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """inside [B, L]: the next token belongs to a response -> positions [B, A] int64, and whether there is one.

    An anchor is a response token that another one follows. Without replacement; places left over have position 1.
    """
    eligible = F.pad((inside[:, :-1] > 0) & (inside[:, 1:] > 0), (1, 0))
    keys = torch.rand(inside.shape, generator=generator, device=inside.device).masked_fill(~eligible, -1.0)
    best, at = keys.topk(count, dim=1)
    found = best >= 0
    return torch.where(found, at, 1), found


def blocks_of(ids: Tensor, inside: Tensor, anchors: Tensor, found: Tensor, block: int) -> Blocks:
    """ids, inside [B, L]; anchors, found [B, A]."""
    length = ids.shape[1]
    at = anchors.unsqueeze(-1) + torch.arange(block, device=ids.device)  # [B, A, S] positions of the tokens before
    kept = at.clamp(max=length - 1)

    def taken(values: Tensor, places: Tensor) -> Tensor:
        return values.gather(1, places.flatten(1)).unflatten(1, at.shape[1:]).flatten(0, 1)

    more = (taken(inside, kept) > 0) & found.flatten()[:, None]  # false at the end of a row: nothing follows
    first = torch.arange(ids.shape[0], device=ids.device)[:, None, None] * length
    return Blocks(
        anchors,
        taken(ids, kept),
        taken(ids, (at + 1).clamp(max=length - 1)),
        (kept + first).flatten(0, 1),
        more.cummin(1).values,
    )


# ---- the drafter -----------------------------------------------------------------------------------------------------


def build(config: ModelConfig, numerics: Numerics, kernels: TrainingKernels, seed: int) -> DSpark:
    """The drafter with a trainable table and gradients on, initialised."""
    model = DSpark(config, numerics)
    text = config.text
    rank, dtype = text.dspark_markov_rank, activation_dtype(numerics)
    model.markov_embed = backbone.Table(text.vocab_size, rank, dtype, kernels)  # type: ignore[assignment]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith((".ffn.bias", ".ffn.bias_vl")))
    backbone.initialise(model, text, seed, first_sublayer=2 * text.num_hidden_layers)
    return model


def leaves(model: DSpark, config: ModelConfig) -> list[backbone.Leaf]:
    """Every trained parameter."""
    out: list[backbone.Leaf] = []
    for name, value in model.named_parameters():
        if value.requires_grad:
            official, _ = next(backbone.official_parts(official_name(name, config.text), value.detach()))
            out.append(backbone.leaf(config, name, value, official))
    return out


def official_name(name: str, text: TextConfig) -> str:
    """A parameter of `DSpark` -> its name where `DSpark.load` reads it, stages still in the model's own parts."""
    last = f"mtp.{text.num_nextn_predict_layers - 1}"
    homes = {
        "main_proj": "mtp.0.main_proj",
        "main_norm": "mtp.0.main_norm",
        "norm": f"{last}.norm",
        "markov_embed": f"{last}.markov_head.embed",
        "markov_head": f"{last}.markov_head.head",
        "confidence": f"{last}.confidence_head.proj",
    }
    part, _, rest = name.partition(".")
    return f"mtp.{rest}" if part == "stages" else f"{homes[part]}.{rest}"


def official(config: ModelConfig, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masters by the drafter's parameter names, router biases included -> f32 by official names, for `pack`.

    Images are routed as text is: the drafter was trained on text.
    """
    out: dict[str, Tensor] = {}
    for name, value in masters.items():
        value = masters[name.removesuffix("_vl")] if name.endswith("bias_vl") else value
        out.update(backbone.official_parts(official_name(name, config.text), value.detach().float().cpu()))
    return out


# ---- the trainer -----------------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """What the drafter says about the slots of N blocks, given the text before them."""

    base: Tensor  # [N S, V] f32 logits without the Markov correction
    correction: Tensor  # [N S, V] f32
    confidence: Tensor  # [N S] f32


class Trainer:
    """Target, drafter, kernels, masters and what one step does with a batch. A `loop.Learner`."""

    kind = "drafter"

    def __init__(
        self,
        checkpoint: Checkpoint,
        ids: Ids,
        settings: Settings,
        device: torch.device,
        numerics: Numerics = backbone.PLAIN,
        target_numerics: Numerics = NUMERICS["production"],
    ):
        """numerics: the drafter's without quantisers; target_numerics: the target's, of the same width."""
        settings.check()
        self.config, self.ids, self.settings = checkpoint.config, ids, settings
        self.device, self.plain = device, numerics
        self.kernels = TrainingKernels(device, settings.rows)
        self.target = frozen(checkpoint, target_numerics, self.kernels, device)
        self.target_digest = backbone_digest(checkpoint.config, checkpoint.tensor)
        text = self.config.text
        self.block = text.dspark_block_size
        self.model = build(self.config, numerics, self.kernels, settings.seed).to(device)
        self.shapes = RowShapes(self.config, self.target.plan, settings.rows, settings.length, device, self.kernels)
        self.optimiser = Optimiser(leaves(self.model, self.config))
        self.steps = 0
        self.measures = (
            "token", "distance", "confidence", *(f"accept_{k + 1}" for k in range(self.block)), "length", "balance",
            "norm", "largest_load",
        )  # fmt: skip
        self._decay = torch.exp(-torch.arange(self.block, device=device) / settings.slot_decay)
        count = settings.rows * settings.length
        self._geometry: dict[str, Any] = dict(
            images=None,
            embeds=None,
            starts=tuple(range(0, count + 1, settings.length)),
            firsts=(0,) * settings.rows,
            slots=(),
            tables=(),
            logit_rows=torch.empty(0, dtype=torch.int64, device=device),
        )

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """ids [B, L] -> the target's taps [T, D] each, and its hidden rows [T, D] after the last norm."""
        memory = RowMemory(self.shapes, self.target.numerics, Mode(True, 0))
        past = history(ids, max(self.config.text.engram_max_ngram_size - 1, 0))
        batch = Batch(ids=ids.flatten(), positions=self.shapes.positions, history=past, **self._geometry)
        with fused.apart():
            output = self.target(batch, memory, taps=True)
        return output.taps, self.target.norm(output.hidden)

    def slots(self, taps: tuple[Tensor, ...], blocks: Blocks) -> Slots:
        """The drafter over all blocks of a batch."""
        self.kernels.clear()
        window = self.config.text.sliding_window
        places = Places.of(blocks.anchors, self.settings.length, window, self.block)
        context = self.model.context(taps, self.shapes.positions)
        memories = [AnchorMemory(rows, places, self.block, self.kernels) for rows in context]
        with fused.apart():
            y = self.model.blocks(
                self.target, blocks.previous[:, 0], blocks.anchors.flatten() - 1, memories, self.block
            )  # [N, S, D]
        base = self.model.base(self.target, y).flatten(0, 1)
        return Slots(base, *self.model.correct(y.flatten(0, 1), blocks.previous.flatten()))

    def blocks(self, ids: Tensor) -> Blocks:
        """The anchors of this step: of the settings' seed and the number of steps alone."""
        inside = response_weights(ids, self.ids)
        generator = torch.Generator(self.device).manual_seed((self.settings.seed * 1_000_003 + self.steps) % 2**63)
        return blocks_of(ids, inside, *choose_anchors(inside, self.settings.anchors, generator), self.block)

    def losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What is minimised, and f32 [S + 5]: token, distance, confidence, accept by slot, length, balance."""
        settings = self.settings
        blocks = self.blocks(ids)
        taps, hidden = self.read(ids)
        with torch.no_grad():
            target = self.target.head(hidden[blocks.rows.flatten()])  # [N S, V]
        slots = self.slots(taps, blocks)
        weights = blocks.valid * self._decay
        token, distance, confidence, accepted = self.kernels.piece(slot_losses)(
            slots.base, slots.correction, target, blocks.wanted.flatten(), slots.confidence, weights.flatten()
        )
        total = weights.sum().clamp(min=1e-6)
        balance = torch.stack(self.kernels.balance).mean()
        loss = (
            settings.token_weight * token
            + settings.distance_weight * distance
            + settings.confidence_weight * confidence
        ) / total + settings.balance_weight * balance * len(self.kernels.balance)
        with torch.no_grad():
            shares = accepted.unflatten(0, blocks.valid.shape)  # [N, S]
            count = blocks.valid.sum(0).clamp(min=1)
            by_slot = (shares * blocks.valid).sum(0) / count
            length = 1 + ((shares * blocks.valid).cumprod(1).sum(0) / count).sum()
            parts = torch.stack([token, distance, confidence]) / total
            values = torch.cat([parts, by_slot, torch.stack([length, balance])])
        return loss, values.detach()

    def step(self, batch: RowBatch, phase: Phase, factor: float) -> Tensor:
        """One update. Returns the values of `measures`, f32 on the device."""
        loss, values = self.losses(batch.ids)
        loss.backward()
        norm = self.optimiser.step(torch.full((), factor, device=self.device))
        largest = self.balance_router(factor)
        self.optimiser.publish(phase.quantised)
        self.steps += 1
        return torch.cat([values, torch.stack([norm, largest])]).float()

    @torch.no_grad()
    def balance_router(self, factor: float) -> Tensor:
        """Move router biases towards equal loads. Returns the largest expert load over the mean, all stages."""
        loads = torch.stack(self.kernels.loads)[:, 0]  # [stages, E], of text
        mean = loads.mean(-1, keepdim=True)
        steps = self.settings.bias_step * max(factor, 0.1) * torch.sign(mean - loads)
        for stage, step in zip(self.model.stages, steps, strict=True):
            stage.ffn.bias.add_(step)  # type: ignore[operator]
        return (loads / mean).max()

    def enter(self, phase: Phase) -> None:
        """Put the drafter's quantisers in force or take them out, in modules and leaves."""
        backbone.set_numerics(self.model, NUMERICS["production"] if phase.quantised else self.plain)
        self.optimiser.publish(phase.quantised)

    def warm_up(self, phases: Iterable[Phase], sample: Callable[[Form], RowBatch]) -> None:
        """Run each phase once without an update, so that everything is compiled before the clock starts."""
        for phase in phases:
            begin = time.monotonic()
            self.enter(phase)
            self.losses(sample(phase.form).ids)[0].backward()
            for leaf in self.optimiser.leaves:
                leaf.value.grad = None
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            log.info("phase compiled", extra={"quantised": phase.quantised, "seconds": time.monotonic() - begin})

    def biases(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if not p.requires_grad}

    def masters(self) -> dict[str, Tensor]:
        """f32 by the drafter's parameter names, router biases included."""
        return self.optimiser.masters() | self.biases()

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Everything that a run needs to go on."""
        state = {"optimiser": self.optimiser.state(), "biases": self.biases(), "steps": self.steps}
        partial = path.with_suffix(".partial")
        torch.save({"kind": self.kind, "target": self.target_digest, **state, **extra}, partial)
        partial.replace(path)

    @torch.no_grad()
    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Go on from a saved state. Raises BadTrainingState before anything is changed."""
        if not self.optimiser.fits(state["optimiser"]) or state["biases"].keys() != self.biases().keys():
            raise BadTrainingState(path, "its weights have other shapes than the drafter of the target's config")
        if state["target"] != self.target_digest:
            raise BadTrainingState(path, "it belongs to a target with other weights")
        self.optimiser.load_state(state["optimiser"])
        for name, bias in self.biases().items():
            bias.copy_(state["biases"][name])
        self.steps = state["steps"]


# ---- held-out measures, and the curve --------------------------------------------------------------------------------


def held_out(trainer: Trainer, ids: data.Ids, batches: int) -> dict[str, float]:
    """Means of the losses and of acceptance over rows of documents that were not trained on.

    Given the text before each slot, which is the corpus's: `bench.drafts` measures over text of the target's own.
    batches  of the run's rows, from the beginning; fewer when there are no more
    """
    settings, special = trainer.settings, trainer.ids
    rng = np.random.default_rng(settings.seed)
    rows = data.pack_rows(ids, data.document_starts(ids, special.bos), settings.length, special.pad, rng).ids
    found: list[Tensor] = []
    for begin in range(0, len(rows) - settings.rows + 1, settings.rows)[:batches]:
        batch = torch.from_numpy(rows[begin : begin + settings.rows].astype(np.int64)).to(trainer.device)
        # gradients stay on, though unused: without them every piece would be compiled a second time
        found.append(trainer.losses(batch)[1])
    if not found:
        return {}
    return dict(zip(trainer.measures, torch.stack(found).mean(0).tolist(), strict=False))


def plot(out: Path) -> Path:
    """Acceptance by slot and the losses of a log, as PNG; a line where quantisers begin."""
    draw = plots.pyplot()
    with (out / loop.LOG_FILE).open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    figure, (left, right) = draw.subplots(1, 2, figsize=(13, 4))
    seconds = [row["seconds"] for row in rows]
    slots = [name for name in rows[0] if name.startswith("accept_")]
    for axis, names, label in (
        (left, slots, "acceptance, given the text before the slot"),
        (right, ("token", "distance", "confidence"), "nats; distance 0 to 2"),
    ):
        for name in names:
            axis.plot(seconds, [row[name] for row in rows], label=name, linewidth=0.8)
        begin = next((s for s, row in zip(seconds, rows, strict=True) if row["quantised"]), None)
        if begin is not None:
            axis.axvline(begin, color="grey", linewidth=0.5)
        axis.set_xlabel("seconds")
        axis.set_ylabel(label)
        axis.legend()
    left.set_ylim(0, 1)
    right.set_ylim(0, 4)
    figure.tight_layout()
    figure.savefig(out / loop.PLOT_FILE, dpi=120)
    draw.close(figure)
    return out / loop.PLOT_FILE


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def from_run(config: ModelConfig, run: Path, backbone_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masters that a run folder holds, f32 by official names.

    backbone_tensors  of the checkpoint to be, by official names.
    Raises            BadTrainingState, also where those are not what the drafter was trained on.
    """
    path = run / loop.STATE_FILE
    cpu = torch.device("cpu")
    state = loop.read_state(path, cpu, Trainer.kind)
    model = build(config, backbone.PLAIN, TrainingKernels(cpu, 1), 0)
    optimiser = Optimiser(leaves(model, config))
    if not optimiser.fits(state["optimiser"]):
        raise BadTrainingState(path, "its weights have other shapes than the drafter of the model config")
    if state["target"] != backbone_digest(config, backbone_tensors.__getitem__):
        raise BadTrainingState(path, "it belongs to a target with other weights")
    optimiser.load_state(state["optimiser"])
    return official(config, optimiser.masters() | state["biases"])


def write(out: Path, target: Checkpoint, masters: Mapping[str, Tensor], *, replace: bool = False) -> int:
    """The target's checkpoint with a trained drafter in it, not calibrated yet. Returns the bytes of the folder."""
    text = {k: v for k, v in target.config_json["text_config"].items() if k != "dspark_confidence_temperatures"}
    config = {**target.config_json, "text_config": text}
    extra = {} if target.tokenizer_path is None else {target.tokenizer_path.name: target.tokenizer_path.read_bytes()}
    write_checkpoint(out, config, packed(target, masters), extra=extra, replace=replace)
    return sum(path.stat().st_size for path in out.iterdir())


def packed(checkpoint: Checkpoint, masters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint with a trained drafter in it. masters: f32 by official names, from `official`."""
    for name, value in masters.items():
        yield from pack.stored(name, value.contiguous(), checkpoint.specs[name])
    for name, value in checkpoint.items():
        if not checkpoint.specs[name].group.startswith("dspark"):
            yield name, value


# ---- calibration -----------------------------------------------------------------------------------------------------

GRID = tuple(round(1.03**i, 4) for i in range(-60, 61))  # temperatures that are tried: 0.17 to 5.9
FEWEST = 30  # rounds with, and rounds without all drafts up to a slot accepted; a slot with fewer keeps 1


def fit_temperatures(found: Rounds) -> tuple[float, ...]:
    """Sequential temperature scaling: slot after slot, the temperature under which survival is best calibrated.

    Survival of a slot is the product of its confidence and those before it, their temperatures fixed already. Of
    equally good temperatures the nearest to 1. Source: speculation specification, sections 1.6 and 5.5.
    """
    fitted: list[float] = []
    for k in range(found.confidence.shape[1]):
        checked = found.submitted > k
        happened = found.accepted[checked] > k
        errors: dict[float, float] = {}
        enough = min(happened.sum(), (~happened).sum()) >= FEWEST
        for temperature in sorted(GRID, key=lambda t: abs(math.log(t))) if enough else (1.0,):
            chance = survival(found, (*fitted, temperature))[checked, k]
            errors[temperature] = expected_error(chance, happened) or 0.0
        fitted.append(min(errors, key=lambda t: errors[t]))
    return tuple(fitted)


class Calibrated(NamedTuple):
    temperatures: tuple[float, ...]
    before: list[dict[str, Any]]  # of the rounds that were not fitted, as `acceptance.calibration` has them
    after: list[dict[str, Any]]


def calibrate(found: Rounds, texts: int) -> Calibrated:
    """Fit on the rounds of every other text, judge on the rest."""
    fitted, judged = (found.of(range(start, texts, 2)) for start in (0, 1))
    temperatures = fit_temperatures(fitted)
    one = [1.0] * len(temperatures)
    return Calibrated(temperatures, calibration(judged, one), calibration(judged, temperatures))


def store_temperatures(checkpoint: Path, temperatures: Sequence[float]) -> None:
    """Write them into a checkpoint's config.json."""
    path = checkpoint / "config.json"
    config = dict(read_json(path))
    config["text_config"] = dict(config["text_config"]) | {"dspark_confidence_temperatures": list(temperatures)}
    ModelConfig.from_json(config, str(path))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
