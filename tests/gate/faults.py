"""Faults that are put into the installed code, weights or state one at a time, and what the quick gate says of each.

    python -m tests.gate.faults                   all of them on minnow, on a CPU
    python -m tests.gate.faults --out results     and keep what was found in results/<hardware>/gate-faults.json
    python -m tests.gate.faults --device cuda     those in kernels of the GPU backend
    python -m tests.gate.faults NAME ...          only these

A fault acts where its kind says: in the code of the model, in a kernel of the installed backend alone (the plain
references stay right), in the C sources, in what is loaded, in a file, in the engine, in the drafter's inputs.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benthic import gate
from benthic.bench import report
from benthic.cache import prefix
from benthic.cache.storage import Storage
from benthic.config import Config, load
from benthic.engine import batch as batches
from benthic.engine.llm import LLM
from benthic.engine.scheduler import Scheduler
from benthic.kernels import backends, engram, fused, hyper, moe_gate, sample
from benthic.kernels.native import build
from benthic.models import deepseek_v41
from benthic.models.deepseek_v41 import Attention, DeepseekV41, Engram, MoE
from benthic.models.deepseek_v41_vision import VisionTower
from benthic.models.memory import PagedLayer, PagedMemory, RatioStep
from benthic.models.modules import Embedding, RMSNorm
from benthic.models.registry import model_dir

Patch = pytest.MonkeyPatch
Call = Callable[..., Any]
SEED = 5


class Fault(NamedTuple):
    name: str
    kind: str
    change: Callable[[Patch, Any], None]  # what it is given: the LLM; before it is loaded, None; a folder for files
    when: str = "run"  # "load", "run", "files" or "source"
    guards: str = ""  # pitfall or section of the model specification


# ---- ways of breaking things -----------------------------------------------------------------------------------------


def around(patch: Patch, owner: Any, name: str, make: Callable[[Call], Call]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def kernel(op: str, make: Callable[[Call], Call]) -> Callable[[Patch, Any], None]:
    """Wrap what the installed backend serves for an op; the reference stays as it is."""

    def change(patch: Patch, llm: LLM | None) -> None:
        real = backends._load

        def loaded(path: str, name: str) -> Call | None:
            found = real(path, name)
            return make(found) if found is not None and name == op else found

        patch.setattr(backends, "_load", loaded)

    return change


def apart(*changes: Callable[[Patch, Any], None]) -> Callable[[Patch, Any], None]:
    """Runs of ops one by one, so that a change in the model's own code is what runs."""

    def change(patch: Patch, llm: LLM | None) -> None:
        for name in ("hyper_read", "attention_inputs", "attention_output", "moe"):
            patch.setattr(fused, name, lambda *_: None)
        for each in changes:
            each(patch, llm)

    return change


def method(owner: Any, name: str, make: Callable[[Call], Call]) -> Callable[[Patch, Any], None]:
    return lambda patch, llm: around(patch, owner, name, make)


def model_of(llm: LLM) -> Any:
    return llm.model


def layer_of(llm: LLM, index: int) -> Any:
    return model_of(llm).layers[index]


# ---- what is loaded --------------------------------------------------------------------------------------------------


class Renamed:
    """A source whose tensors come under other names, or changed."""

    def __init__(self, inner: Any, name: Callable[[str], str] = lambda n: n, value: Call = lambda n, x: x):
        self.inner, self.name, self.value = inner, name, value

    def tensor(self, name: str) -> Tensor:
        return self.value(name, self.inner.tensor(self.name(name)))


def sourced(owner: Any, name: Callable[[str], str] = lambda n: n, value: Call = lambda n, x: x) -> Any:
    def make(real: Call) -> Call:
        return lambda self, source, at: real(self, Renamed(source, name, value), at)

    return method(owner, "load", make)


def swapped(name: str) -> str:
    return name.replace(".w1.", ".w0.").replace(".w3.", ".w1.").replace(".w0.", ".w3.")


def high_nibble_first(name: str, value: Tensor) -> Tensor:
    if ".experts." in name and name.endswith("weight"):
        byte = value.view(torch.uint8)
        return ((byte << 4) | (byte >> 4)).view(value.dtype)
    return value


def doubled_scale(name: str, value: Tensor) -> Tensor:
    return value + 1 if name == "layers.3.attn.wo_b.scale" else value


def next_expert(name: str) -> str:
    return name.replace(".experts.3.", ".experts.0.") if ".experts.3." in name else name


def transposed_scales(name: str, value: Tensor) -> Tensor:
    """A square grid of block scales, read column first."""
    return value.t().contiguous() if name.endswith("attn.wo_b.scale") and value.shape[0] == value.shape[1] else value


def on_parameter(find: Callable[[Any], Tensor], new: Callable[[Tensor], Tensor]) -> Callable[[Patch, Any], None]:
    """Change a weight where it lies, after loading; the process ends with it."""

    def change(patch: Patch, llm: LLM) -> None:
        weight = find(llm.model)
        before = weight.detach().clone()
        with torch.inference_mode():
            weight.copy_(new(before))

    return change


def one_bit(x: Tensor) -> Tensor:
    raw = x.clone().contiguous().view(torch.uint8).flatten()
    raw[raw.numel() // 3] ^= 1
    return raw.view(x.dtype).reshape(x.shape)


def flipped_in_file(patch: Patch, folder: Path) -> None:
    """One bit of one weight."""
    (shard,) = folder.glob("model-*.safetensors")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size * 2 // 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))


def other_config(patch: Patch, folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    data["text_config"]["routed_scaling_factor"] = 1.4
    (folder / "config.json").write_text(json.dumps(data))


def other_tokenizer(patch: Patch, folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")


# ---- the model's code ------------------------------------------------------------------------------------------------


def replaced_plan(layer: int, **fields: Any) -> Callable[[Patch, Any], None]:
    """A layer that finds its memory by another plan."""

    def make(real: Call) -> Call:
        def call(self: PagedMemory, index: int) -> Any:
            found = real(self, index)
            if index == layer:
                found.plan = dataclasses.replace(found.plan, **fields)
            return found

        return call

    return method(PagedMemory, "layer", make)


def with_text(name: str, **fields: Any) -> Callable[[Patch, Any], None]:
    """A method of a layer's memory that sees another configuration."""

    def make(real: Call) -> Call:
        def call(self: PagedLayer, *args: Any) -> Any:
            text = self.memory.config
            self.memory.config = dataclasses.replace(text, **fields)
            try:
                return real(self, *args)
            finally:
                self.memory.config = text

        return call

    return method(PagedLayer, name, make)


def no_inverse_rotation(real: Call) -> Call:
    return lambda self, o, positions: real(self, o, positions * 0)


def transposed_comb(real: Call) -> Call:
    def call(*args: Any) -> Any:
        h, streams = real(*args)
        return h, streams._replace(comb=streams.comb.transpose(1, 2).contiguous())

    return call


def own_mix(real: Call) -> Call:
    """Each sublayer reads with the weights of its own mix, as V4 did."""

    def call(self: Any, streams: hyper.Streams, norm: Any) -> Any:
        s = hyper.settle(streams)
        pre, _, _ = self(s)
        return real(self, hyper.Streams(s, pre), norm)

    return call


def short_sinkhorn(patch: Patch, llm: LLM) -> None:
    for layer in model_of(llm).layers:
        patch.setattr(layer.hc_attn, "iterations", 4)
        patch.setattr(layer.hc_ffn, "iterations", 4)


def shared_unclamped(patch: Patch, llm: Any) -> None:
    def make(real: Call) -> Call:
        def call(self: Any, h8: Tensor) -> Tensor:
            own = SimpleNamespace(
                shared_w13=self.shared_w13, shared_w2=self.shared_w2, limit=0.0, numerics=self.numerics
            )
            return real(own, h8)

        return call

    around(patch, MoE, "shared", make)


def bias_in_weights(real: Call) -> Call:
    def call(h: Tensor, gate_: Tensor, bias: Tensor, k: int, normalise: bool, scale: float) -> Any:
        ids, _ = real(h, gate_, bias, k, normalise, scale)
        scores = torch.nn.functional.softplus(h.float() @ gate_.float().t()).sqrt() + bias
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * scale

    return call


def unbiased_images(real: Call) -> Call:
    """Experts of image tokens are ranked without a bias. To exchange minnow's two shows nothing: they are equal."""

    def call(self: MoE, images: Tensor | None) -> Tensor:
        bias = real(self, images)
        return bias if images is None else torch.where(images[:, None], 0.0, bias)

    return call


def column_major(real: Call) -> Call:
    """Cells column by column."""

    def call(self: Any, pixels: Tensor, where: Any) -> Tensor:
        rows = real(self, pixels, where)
        inner = rows[1:-1].unflatten(0, (where.cells_h, -1)).transpose(0, 1).flatten(0, 1)
        return torch.cat([rows[:1], inner, rows[-1:]])

    return call


def unnormalised(patch: Patch, llm: LLM) -> None:
    for layer in model_of(llm).layers:
        patch.setattr(layer.ffn, "normalise", False)


def no_quantiser(patch: Patch, llm: Any) -> None:
    """Linears that do not quantise what they read."""
    patch.setattr(deepseek_v41, "product_grid", lambda x, numerics: x)


def late_groups(patch: Patch, llm: Any) -> None:
    """A group is placed at its last token."""

    def positions(self: RatioStep) -> Tensor:
        return self.memory.batch.positions[self.closing]

    patch.setattr(RatioStep, "group_positions", property(positions))


def early_entries(real: Call) -> Call:
    """An entry is seen one token before its group is complete."""

    def call(self: RatioStep, memory: Any, ratio: int) -> None:
        real(self, memory, ratio)
        if ratio > 1:
            self.visible = (memory.batch.positions + 1 + ratio - 1) // ratio

    return call


def lost_carry(real: Call) -> Call:
    def call(self: PagedLayer, a: Tensor, b: Tensor) -> Any:
        self.memory.storage.carry[self.plan.index].zero_()
        return real(self, a, b)

    return call


def stale_keys(real: Call) -> Call:
    """Scores of a step that closes no group come from another layer's keys."""

    def call(self: PagedLayer, *args: Any) -> Any:
        if self.plan.ratio == 2 and not len(self.memory.ratio(2).closing):
            self.plan = dataclasses.replace(self.plan, keys_from=6)
        return real(self, *args)

    return call


def dropped_candidates(real: Call) -> Call:
    """The newest candidate block is lost on its way to the layers that use it."""

    def call(self: PagedLayer, q: Tensor, weights: Tensor, shared: Any) -> Any:
        if self.plan.candidates_from is not None and shared.candidates is not None:
            kept = shared.candidates.clone()
            last = (kept >= 0).sum(1) - 1
            kept[torch.arange(len(kept)), last.clamp(min=0)] = -1
            shared = shared._replace(candidates=kept.sort(1, descending=True).values)
        return real(self, q, weights, shared)

    return call


def scaled_query(real: Call) -> Call:
    return lambda self, q, kw, selection, sink: real(self, q * 1.03, kw, selection, sink)


def scaled_sink(real: Call) -> Call:
    return lambda self, q, kw, selection, sink: real(self, q, kw, selection, sink * q.shape[-1] ** -0.5)


def larger_eps(patch: Patch, llm: LLM) -> None:
    for module in model_of(llm).modules():
        if isinstance(module, RMSNorm):
            patch.setattr(module, "eps", 1e-6)
    for layer in model_of(llm).layers:
        for part in (layer.hc_attn, layer.hc_ffn, layer.attn):
            patch.setattr(part, "eps", 1e-6)


def scaled_head(real: Call) -> Call:
    return lambda self, hidden: real(self, hidden) * 1.05


def stream_mean(real: Call) -> Call:
    """The last read of the streams is their mean."""

    def call(self: Any, batch: Any, memory: Any, *, taps: bool = False) -> Any:
        seen: list[Any] = []
        last = self.layers[len(self.plan) - 1]
        handle = last.register_forward_hook(lambda _, __, out: seen.append(out[0]))
        out = real(self, batch, memory, taps=taps)
        handle.remove()
        return out._replace(hidden=hyper.settle(seen[0]).mean(1))

    return call


def even_first_read(real: Call) -> Call:
    """The first sublayer reads all streams alike, as if they were mixed already."""

    def call(self: Any, streams: hyper.Streams, *rest: Any) -> Any:
        if self.plan.index == 1:
            streams = streams._replace(pre=torch.full_like(streams.pre, 0.25))
        return real(self, streams, *rest)

    return call


def earlier_taps(patch: Patch, llm: LLM) -> None:
    model = model_of(llm)
    text = model.config.text
    ids = tuple(i - 1 for i in text.dspark_target_layer_ids)
    new = dataclasses.replace(model.config, text=dataclasses.replace(text, dspark_target_layer_ids=ids))
    patch.setattr(model, "config", new)


# ---- kernels of the backend ------------------------------------------------------------------------------------------


def blocks_of_eight(real: Call) -> Call:
    """The last entries are not scored, unless they fill a block."""

    def call(
        q: Tensor, w: Tensor, keys: Any, tables: Tensor, starts: Any, visible: Tensor, *rest: Any, **o: Any
    ) -> Any:
        return real(q, w, keys, tables, starts, torch.where(visible > 8, visible // 8 * 8, visible), *rest, **o)

    return call


def first_positions(real: Call) -> Call:
    """A ring is written one place too far."""
    return lambda ring, kw, slots, positions: real(ring, kw, slots, positions + 1)


def shorter_window(real: Call) -> Call:
    return lambda ring, kw, slots, firsts, starts, window: real(ring, kw, slots, firsts, starts, window - 1)


def other_row(real: Call) -> Call:
    return lambda ids, multipliers, primes, offsets: (real(ids, multipliers, primes, offsets) - 1).clamp(min=0)


def truncated(real: Call) -> Call:
    """The result of a norm is cut to bfloat16, not rounded."""

    def call(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = real(x.float(), weight, eps)
        return (y.contiguous().view(torch.int32) & -65536).view(torch.float32).to(x.dtype)

    return call


def wrong_one_row(real: Call) -> Call:
    """Right in prefill, wrong for a single row: one expert too few."""

    def call(h: Tensor, *args: Any) -> Any:
        if len(h) == 1:
            args = (*args[:6], args[6] - 1, *args[7:])
        return real(h, *args)

    return call


# ---- the engine ------------------------------------------------------------------------------------------------------


def stale_token(real: Call) -> Call:
    """A decode step computes the token before the one that was drawn."""

    def call(plan: Any, storage: Any) -> Any:
        batch = real(plan, storage)
        if len(plan.chunks) and batch.ids.shape[0] == len(plan.chunks) and min(batch.firsts) > 0:
            batch = dataclasses.replace(batch, ids=batch.history[:, 0].clamp(min=0))
        return batch

    return call


def shifted_table(patch: Patch, llm: Any) -> None:
    """Sequences of several blocks read them one place on when a step has one row a chunk."""
    real = PagedMemory.tables.func  # type: ignore[attr-defined]

    def tables(self: PagedMemory) -> Tensor:
        found = real(self)
        decode = len(self.batch.starts) - 1 == self.batch.ids.shape[0]
        return found.roll(1, 1) if decode and found.shape[1] > 1 else found

    patch.setattr(PagedMemory, "tables", property(tables))


def forgotten_history(patch: Patch, llm: Any) -> None:
    patch.setattr(batches, "remember", lambda batch, storage: None)


def kept_progress(real: Call) -> Call:
    """A preempted request goes on where it was, although its blocks are gone."""

    def call(self: Scheduler, b: Any, lease: Any, match: Any) -> None:
        real(self, b, lease, match)
        if b.output_tokens:
            b.computed = len(b.tokens) - 1

    return call


def loose_keys(real: Call) -> Call:
    """Blocks are found by their own tokens, whatever came before them."""

    def call(before: bytes, ids: Sequence[int], block_tokens: int, extras: Any = None) -> list[bytes]:
        some = range(0, len(ids) - block_tokens + 1, block_tokens)
        return [real(b"", ids[at : at + block_tokens], block_tokens)[0] for at in some]

    return call


def one_slot(real: Call) -> Call:
    """Rings of all requests of a batch in one slot."""

    def call(plan: Any, storage: Any) -> Any:
        batch = real(plan, storage)
        return dataclasses.replace(batch, slots=tuple(1 for _ in batch.slots))

    return call


def first_row_logits(real: Call) -> Call:
    """Logits of the first row of a chunk instead of its last."""

    def call(plan: Any, storage: Any) -> Any:
        batch = real(plan, storage)
        starts = [s for s, chunk in zip(batch.starts, plan.chunks, strict=False) if chunk.sample]
        return dataclasses.replace(batch, logit_rows=torch.tensor(starts, dtype=torch.int64))

    return call


# ---- the C sources ---------------------------------------------------------------------------------------------------


def source(file: str, old: str, new: str) -> Callable[[Patch, Any], None]:
    """Another text in a C file; the library is built from it."""

    def change(patch: Patch, folder: Path) -> None:
        path = folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times"
        path.write_text(text.replace(old, new))

    return change


# ---- the list --------------------------------------------------------------------------------------------------------

INTO_MODEL, INTO_KERNEL, INTO_C = "model code", "kernel", "C source"
INTO_WEIGHTS, INTO_FILE, INTO_ENGINE = "loading", "file", "engine"

FAULTS: tuple[Fault, ...] = (
    # loading
    Fault("FP4 nibbles high first", INTO_WEIGHTS, sourced(MoE, value=high_nibble_first), "load", "6.5, 11"),
    Fault("w1 and w3 swapped", INTO_WEIGHTS, sourced(MoE, name=swapped), "load", "2.12"),
    Fault("an expert in another's place", INTO_WEIGHTS, sourced(MoE, name=next_expert), "load", "2.12"),
    Fault("scales of one matrix a power too high", INTO_WEIGHTS, sourced(Attention, value=doubled_scale), "load", "5"),
    Fault("block scales transposed", INTO_WEIGHTS, sourced(Attention, value=transposed_scales), "load", "6.5, 11"),
    Fault(
        "embedding rows shifted by one",
        INTO_WEIGHTS,
        sourced(Embedding, value=lambda name, x: x.roll(1, 0)),
        "load",
        "2.1",
    ),
    Fault(
        "n-gram table rows shifted by one",
        INTO_WEIGHTS,
        sourced(Engram, value=lambda name, x: x.roll(1, 0) if ".embed." in name else x),
        "load",
        "6.5, 8",
    ),
    Fault(
        "rotation tables of the two kinds of layers swapped",
        INTO_WEIGHTS,
        method(deepseek_v41, "rope_for", lambda real: lambda config, ratio: real(config, 0 if ratio else 2)),
        "load",
        "6.5, 5",
    ),
    Fault(
        "rotation without YaRN",
        INTO_WEIGHTS,
        method(
            deepseek_v41,
            "rope_for",
            lambda real: (
                lambda config, ratio: (
                    real(dataclasses.replace(config, rope_theta=config.compress_rope_theta), 0)
                    if ratio
                    else real(config, 0)
                )
            ),
        ),
        "load",
        "6.5, 5",
    ),
    Fault(
        "one bit of a loaded weight",
        INTO_WEIGHTS,
        on_parameter(lambda m: m.layers[6].attn.wkv.weight, one_bit),
        guards="-",
    ),
    Fault(
        "sinks left out",
        INTO_WEIGHTS,
        on_parameter(lambda m: m.layers[4].attn.attn_sink, lambda x: torch.full_like(x, -1e30)),
        guards="2.5",
    ),
    Fault(
        "n-gram multipliers of another layer",
        INTO_WEIGHTS,
        on_parameter(lambda m: m.layers[4].engram.multipliers, lambda x: x.flip(0)),
        guards="6.5, 8",
    ),
    # files
    Fault("one bit of a weight in the file", INTO_FILE, flipped_in_file, "files", "-"),
    Fault("config.json of another model", INTO_FILE, other_config, "files", "-"),
    Fault("tokenizer.json of another model", INTO_FILE, other_tokenizer, "files", "-"),
    # the model's code
    Fault("no inverse rotation", INTO_MODEL, method(Attention, "output", no_inverse_rotation), guards="6.5, 5"),
    Fault(
        "comb transposed",
        INTO_MODEL,
        method(deepseek_v41.HyperConnection, "read", transposed_comb),
        guards="6.5, 12",
    ),
    Fault(
        "own mix instead of the one before",
        INTO_MODEL,
        apart(method(deepseek_v41.HyperConnection, "read", own_mix)),
        guards="2.2",
    ),
    Fault("four Sinkhorn iterations", INTO_MODEL, short_sinkhorn, guards="2.2"),
    Fault("shared expert unclamped", INTO_MODEL, apart(shared_unclamped), guards="6.5, 9"),
    Fault(
        "bias in the routing weights",
        INTO_MODEL,
        apart(method(moe_gate, "route", bias_in_weights)),
        guards="6.5, 10",
    ),
    Fault("routing weights not normalised", INTO_MODEL, unnormalised, guards="2.12"),
    Fault("products without their quantiser", INTO_MODEL, apart(no_quantiser), guards="6.2"),
    Fault("groups placed at their last token", INTO_MODEL, late_groups, guards="6.5, 5"),
    Fault("entries seen a token too early", INTO_MODEL, method(RatioStep, "__init__", early_entries), guards="2.6"),
    Fault(
        "open group lost between chunks", INTO_MODEL, method(PagedLayer, "close_groups", lost_carry), guards="6.5, 14"
    ),
    Fault("stale index keys on open groups", INTO_MODEL, method(PagedLayer, "select", stale_keys), guards="6.5, 4"),
    Fault(
        "newest candidate block dropped",
        INTO_MODEL,
        method(PagedLayer, "select", dropped_candidates),
        guards="6.5, 6",
    ),
    Fault("candidates ignored", INTO_MODEL, replaced_plan(8, candidates_from=None), guards="6.5, 6"),
    Fault("one entry too few", INTO_MODEL, with_text("select", index_topk=63), guards="2.7"),
    Fault("compressed entries of another layer", INTO_MODEL, replaced_plan(5, kv_from=2), guards="1.5"),
    Fault("window one row short", INTO_MODEL, replaced_plan(3, window=63), guards="2.5"),
    Fault("softmax scale 3 % off", INTO_MODEL, method(PagedLayer, "attend", scaled_query), guards="2.5"),
    Fault("sink scaled like a score", INTO_MODEL, method(PagedLayer, "attend", scaled_sink), guards="2.5"),
    Fault("epsilon 1e-6", INTO_MODEL, larger_eps, guards="6.5, 1"),
    Fault("head 5 % too large", INTO_MODEL, method(DeepseekV41, "logits", scaled_head), guards="2.1"),
    Fault(
        "last read is the mean of the streams", INTO_MODEL, method(DeepseekV41, "forward", stream_mean), guards="2.1"
    ),
    Fault(
        "n-grams without the pad class",
        INTO_MODEL,
        method(
            engram,
            "ngram_ids",
            lambda real: (
                lambda ids, history, classes, pad, image: real(ids, history, classes, int(classes[pad]) + 1, image)
            ),
        ),
        guards="6.5, 8",
    ),
    Fault("image bias ignored", INTO_MODEL, method(MoE, "choice_bias", unbiased_images), guards="2.12"),
    Fault(
        "n-gram gate open on images",
        INTO_MODEL,
        method(engram, "engram_gate", lambda real: lambda *a: real(*a[:5], None)),
        guards="6.5, 8",
    ),
    Fault(
        "rows of the picture in another order", INTO_MODEL, method(VisionTower, "forward", column_major), guards="2.11"
    ),
    # kernels of the backend
    Fault("kernel: n-gram row before", INTO_KERNEL, kernel("ngram_rows", other_row), guards="6.5, 8"),
    Fault("kernel: last entries not scored", INTO_KERNEL, kernel("index_select", blocks_of_eight), guards="2.7"),
    Fault("kernel: ring one place on", INTO_KERNEL, kernel("ring_write", first_positions), guards="2.5"),
    Fault("kernel: window one row short", INTO_KERNEL, kernel("window_rows", shorter_window), guards="2.5"),
    Fault(
        "kernel: comb transposed",
        INTO_KERNEL,
        kernel(
            "hyper_expand", lambda real: lambda o, s, post, comb: real(o, s, post, comb.transpose(1, 2).contiguous())
        ),
        guards="6.5, 12",
    ),
    Fault(
        "kernel: experts' ids off by one",
        INTO_KERNEL,
        kernel(
            "moe",
            lambda real: (
                lambda h, gate_, bias, w13, w2, *rest: real(h, gate_, bias, w13.roll(1, 0), w2.roll(1, 0), *rest)
            ),
        ),
        guards="2.12",
    ),
    Fault("kernel: one expert too few for single rows", INTO_KERNEL, kernel("moe", wrong_one_row), guards="2.12"),
    Fault(
        "kernel: routing scale off by 2 %",
        INTO_KERNEL,
        kernel("moe", lambda real: lambda *a: real(*a[:9], a[9] * 1.02, *a[10:])),
        guards="2.12",
    ),
    Fault(
        "kernel: probabilities not rounded",
        INTO_KERNEL,
        kernel("sink_attention", lambda real: lambda *a: real(*a[:-1], not a[-1])),
        guards="2.5",
    ),
    Fault(
        "kernel: stored entry of the wrong precision",
        INTO_KERNEL,
        kernel("write_records", lambda real: lambda paged, ids, values: real(paged, ids, values * 0.97)),
        guards="4.1",
    ),
    Fault("kernel: norm cut to bfloat16, not rounded", INTO_KERNEL, kernel("rms_norm", truncated), guards="2.3"),
    # C sources
    Fault(
        "C: sink left out",
        INTO_C,
        source("attention.c", "store_f(by, total + exp_v(load_f(own) - peak));", "store_f(by, total);"),
        "source",
        "2.5",
    ),
    Fault(
        "C: gate not clamped",
        INTO_C,
        source("experts.c", "gate = at_most(gate, splat(limit));", ""),
        "source",
        "6.5, 9",
    ),
    Fault(
        "C: no relu in index scores",
        INTO_C,
        source("indexer.c", "x = at_least(x, zeros()) * splat(w[h + i]);", "x = x * splat(w[h + i]);"),
        "source",
        "2.7",
    ),
    Fault(
        "C: output not turned back",
        INTO_C,
        source(
            "projections.c",
            "turn_of(&turn, positions[first + t], freqs, pairs, 1);",
            "turn_of(&turn, positions[first + t], freqs, pairs, 0);",
        ),
        "source",
        "6.5, 5",
    ),
    Fault(
        "C: FP4 scales of neighbours exchanged",
        INTO_C,
        source(
            "records.c",
            "pack_nvfp4(b, data + j / 2 + 8, scales + j / 16 + 1);",
            "pack_nvfp4(b, data + j / 2 + 8, scales + j / 16);",
        ),
        "source",
        "4.1",
    ),
    # the engine
    Fault("decode computes the token before", INTO_ENGINE, method(batches, "build", stale_token), guards="-"),
    Fault("block tables shifted in decode", INTO_ENGINE, shifted_table, guards="-"),
    Fault("n-gram history forgotten between steps", INTO_ENGINE, forgotten_history, guards="2.9"),
    Fault(
        "preempted request resumes without its blocks",
        INTO_ENGINE,
        method(Scheduler, "_begin", kept_progress),
        guards="-",
    ),
    Fault("cached blocks behind another beginning", INTO_ENGINE, method(prefix, "chain", loose_keys), guards="-"),
    Fault(
        "a cached prefix without its windows",
        INTO_ENGINE,
        method(Storage, "copy", lambda real: lambda *args: None),
        guards="-",
    ),
    Fault("requests share a slot", INTO_ENGINE, method(batches, "build", one_slot), guards="-"),
    Fault("logits of the wrong row", INTO_ENGINE, method(batches, "build", first_row_logits), guards="-"),
    Fault(
        "sampler ignores the seed",
        INTO_ENGINE,
        method(sample, "random_bits", lambda real: lambda seeds, *rest: real(seeds * 0, *rest)),
        guards="-",
    ),
    Fault(
        "sampler ignores the position",
        INTO_ENGINE,
        method(sample, "random_bits", lambda real: lambda seeds, at, *rest: real(seeds, at * 0, *rest)),
        guards="-",
    ),
    Fault(
        "top-p ignored",
        INTO_ENGINE,
        method(
            sample, "narrow", lambda real: lambda x, peak, t, k, p, floor: real(x, peak, t, k, [1.0] * len(p), floor)
        ),
        guards="-",
    ),
    # the drafter
    Fault("drafter's taps one layer early", "drafter", earlier_taps, guards="6.5, 13"),
)


def on_device(name: str, op: str, make: Callable[[Call], Call], guards: str) -> Fault:
    return Fault(name, f"kernel `{op}`", kernel(op, make), guards=guards)


def argument(at: int, new: Callable[[Any], Any]) -> Callable[[Call], Call]:
    """A kernel that is given something else in one place."""
    return lambda real: lambda *args, **options: real(*args[:at], new(args[at]), *args[at + 1 :], **options)


def without_images(real: Call) -> Call:
    return lambda s, keys, value, weight, eps, images=None: real(s, keys, value, weight, eps)


# in kernels that a GPU's steps call, whose names differ from those of a CPU's
ON_DEVICE: tuple[Fault, ...] = (
    on_device("n-gram row before", "ngram_rows", other_row, "6.5, 8"),
    on_device("n-gram gate open on images", "engram_gate", without_images, "6.5, 8"),
    on_device("ring one place on", "ring_write", first_positions, "2.5"),
    on_device("window one row short", "attend", argument(4, lambda window: window - 1), "2.5"),
    on_device("sink left out", "attend", argument(7, lambda sink: torch.full_like(sink, -1e30)), "2.5"),
    on_device("softmax scale 3 % off", "attend", argument(8, lambda scale: scale * 1.03), "2.5"),
    on_device(
        "last entries not scored",
        "select_records",
        argument(5, lambda visible: torch.where(visible > 8, visible // 8 * 8, visible)),
        "2.7",
    ),
    on_device("one entry too few", "select_records", argument(6, lambda topk: topk - 1), "2.7"),
    on_device("stored entry of the wrong precision", "compress_store", argument(5, lambda w: w * 0.97), "4.1"),
    on_device("groups placed without rotation", "compress_store", argument(7, torch.zeros_like), "6.5, 5"),
    on_device("index keys without rotation", "key_store", argument(5, torch.zeros_like), "2.7"),
    on_device("query and window row not rotated", "attention_inputs", argument(2, torch.zeros_like), "6.5, 5"),
    on_device("no inverse rotation", "attention_output", argument(1, torch.zeros_like), "6.5, 5"),
    on_device("comb transposed", "hyper_read", transposed_comb, "6.5, 12"),
    on_device("four Sinkhorn iterations", "hyper_read", argument(7, lambda iterations: 4), "2.2"),
    on_device("one expert too few for single rows", "moe", wrong_one_row, "2.12"),
    on_device("routing scale off by 2 %", "moe", argument(9, lambda scale: scale * 1.02), "2.12"),
    on_device("experts unclamped", "moe", argument(10, lambda limit: 0.0), "6.5, 9"),
    on_device("sampler ignores the seed", "sample_rows", argument(1, torch.zeros_like), "-"),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


# ---- one fault -------------------------------------------------------------------------------------------------------


class Caught(NamedTuple):
    level: str  # empty: it passed
    line: str


def verdict_with(fault: Fault | None, config: Config, levels: Sequence[str] = tuple(gate.LEVELS)) -> gate.Verdict:
    """The quick gate with one fault in force from before the model is loaded, or after. Not for "files", "source"."""
    with Patch.context() as patch:
        patch.setattr(gate, "LEVELS", {name: gate.LEVELS[name] for name in levels})
        if fault is not None and fault.when == "load":
            fault.change(patch, None)
        with LLM(config=config) as llm:
            if fault is not None and fault.when == "run":
                fault.change(patch, llm)
            return gate.run(llm, seed=SEED)


def caught(verdict: gate.Verdict) -> Caught:
    for outcome in verdict.outcomes:
        if (line := outcome.deviates) is not None:
            return Caught(outcome.level, line.name)
    return Caught("", "")


def try_fault(fault: Fault, config: Config) -> Caught:
    """In this process, but for faults of the C sources, which need a library of their own."""
    if fault.when == "files":
        with tempfile.TemporaryDirectory() as room:
            folder = Path(shutil.copytree(model_dir(config.model), Path(room) / "copy"))
            fault.change(Patch(), folder)
            own = dataclasses.replace(config, model=str(folder))
            return caught(verdict_with(None, own))
    if fault.when == "source":
        command = [sys.executable, "-m", "tests.gate.faults", "--child", fault.name]
        command += ["--model", config.model, "--numerics", config.numerics]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        return Caught(*json.loads(done.stdout.splitlines()[-1]))
    return caught(verdict_with(fault, config))


def try_on_device(some: Iterable[Fault], config: Config) -> Iterator[tuple[Fault, Caught]]:
    """Faults that are put in while a model runs and leave it as it was, one after another in one engine: that of a GPU
    takes a while to start."""
    with LLM(config=config) as llm:
        for fault in some:
            assert fault.when == "run", f"{fault.name} is no fault of a running model"
            with Patch.context() as patch:
                fault.change(patch, llm)
                yield fault, caught(gate.run(llm, seed=SEED))


def child(fault: Fault, config: Config) -> Caught:
    """A fault of the C sources, in a process that has loaded none of them yet."""
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "native"
        shutil.copytree(build.HERE, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        fault.change(Patch(), folder)
        build.HERE = folder
        cpu = dataclasses.replace(config.cpu, native="on", cache_dir=str(Path(room) / "cache"))
        return caught(verdict_with(None, dataclasses.replace(config, cpu=cpu)))


# ---- all of them -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gate.faults")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--model", default="minnow")
    parser.add_argument("--numerics", default="reference")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep what was found in DIR/<hardware>/gate-faults.json"
    )
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    chosen = {"model": args.model, "numerics": args.numerics, "device": args.device}
    config = load(overrides={**chosen, "log_level": "error", "cpu.threads": 1})
    if args.child:
        print(json.dumps(child(BY_NAME[args.child], config)))
        return 0
    known = FAULTS if args.device == "cpu" else ON_DEVICE
    some = [fault for fault in known if not args.names or fault.name in args.names]
    found: list[tuple[Fault, Caught]] = []
    cpu = args.device == "cpu"
    for fault, seen in ((one, try_fault(one, config)) for one in some) if cpu else try_on_device(some, config):
        found.append((fault, seen))
        print(f"{seen.level or 'NOT CAUGHT':<10} {fault.name}: {seen.line}", flush=True)
    hit = sum(bool(result.level) for _, result in found)
    print(f"{hit} of {len(found)} caught by the quick gate")
    if args.out:
        rows = [
            {"fault": f.name, "kind": f.kind, "guards": f.guards, "level": r.level or None, "line": r.line}
            for f, r in found
        ]
        body = report.header("gate faults", SEED, chosen) | {"command": "python -m tests.gate.faults"}
        report.save(body | {"versions": report.versions(), "caught": hit, "faults": rows}, args.out, "gate-faults")
    return 0 if hit == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
