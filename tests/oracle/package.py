"""The package's model over a token list in chosen chunks, and a recorder of what its blocks read and wrote."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.cache.spec import Part
from benthic.cache.storage import Storage
from benthic.kernels import engram, fused, hyper, kv_copy, moe_gate
from benthic.models.base import Batch
from benthic.models.deepseek_v41 import DeepseekV41
from benthic.models.deepseek_v41_config import ModelConfig, cache_spec, layer_plan
from benthic.models.deepseek_v41_dspark import Draft, DSpark
from benthic.models.memory import PagedLayer, PagedMemory
from benthic.models.weights import Checkpoint
from benthic.types import NUMERICS
from tests.oracle.slow_v41 import Array, Folder

SLOT = 1
TABLE = (3, 1, 2, 5, 4, 7, 6, 8)  # blocks out of order, so that order in the pool cannot matter


class Source:
    """A checkpoint whose tensors may be replaced by float64 arrays, cast to the stored dtype."""

    def __init__(self, folder: Path, weights: dict[str, Array]):
        self.checkpoint, self.weights = Checkpoint.open(folder), weights

    def tensor(self, name: str) -> Tensor:
        stored = self.checkpoint.tensor(name)
        return torch.from_numpy(self.weights[name]).to(stored.dtype) if name in self.weights else stored


class Package:
    """One sequence through the package's own storage, weights and model."""

    def __init__(
        self,
        folder: Path,
        numerics: str = "float",
        text: dict[str, Any] | None = None,
        weights: dict[str, Array] | None = None,
        classes: Array | None = None,
    ):
        raw = Folder(folder).config
        self.config = ModelConfig.from_json({**raw, "text_config": raw["text_config"] | (text or {})})
        self.numerics = NUMERICS[numerics]
        source = Source(folder, weights or {})
        self.model = DeepseekV41(self.config, self.numerics, None if classes is None else torch.from_numpy(classes))
        self.model.load(source)
        self.drafter = DSpark(self.config, self.numerics)
        self.drafter.load(source)
        self.plan = layer_plan(self.config)
        self.storage = Storage(cache_spec(self.config, packed=self.numerics.quantise), len(TABLE) + 1, 2, rollback=7)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence; what was stored reads as NaN, so that nothing stale can look right."""
        self.storage.poison()
        self.ids: list[int] = []
        self.taps: list[Array] = []

    def step(self, ids: Sequence[int], images: Array | None = None, embeds: Array | None = None) -> Array:
        """One chunk of one request -> logits [T, V]."""
        first, count = len(self.ids), len(ids)
        past = [-1] * 8 + self.ids + list(ids)
        width = self.config.text.engram_max_ngram_size - 1
        history = [[past[8 + p - 1 - i] for i in range(width)] for p in range(first, first + count)]
        batch = Batch(
            ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.arange(first, first + count),
            history=torch.tensor(history, dtype=torch.int64).reshape(count, width),
            images=None if images is None else torch.from_numpy(images),
            embeds=None if embeds is None else torch.from_numpy(embeds).float(),
            starts=(0, count),
            firsts=(first,),
            slots=(SLOT,),
            tables=(TABLE,),
            logit_rows=torch.arange(count),
        )
        memory = PagedMemory(self.config, self.plan, self.numerics, self.storage, batch)
        with torch.inference_mode():
            out = self.model(batch, memory, taps=True)
            rings = [memory.ring(plan.index) for plan in self.drafter.plan]
            self.drafter.observe(rings, out.taps, torch.full((count,), SLOT), batch.positions)
            logits = self.model.logits(out.hidden)
        self.taps.append(np.stack([as_array(tap) for tap in out.taps], 1))  # [T, targets, D]
        self.ids += list(ids)
        return logits.numpy().astype(np.float64)

    def run(self, ids: Sequence[int], splits: Sequence[int]) -> Array:
        """A whole sequence in chunks of the given sizes; the last size repeats until the sequence ends."""
        self.reset()
        rows, at = [], 0
        sizes = list(splits)
        while at < len(ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            rows.append(self.step(ids[at : at + size]))
            at += size
        return np.concatenate(rows)

    def draft(self, anchor: int) -> Draft:
        memory = PagedMemory(self.config, self.plan, self.numerics, self.storage, empty_batch())
        rings = [memory.ring(plan.index) for plan in self.drafter.plan]
        with torch.inference_mode():
            return self.drafter.draft(
                self.model,
                rings,
                torch.tensor([SLOT]),
                torch.tensor([anchor]),
                torch.tensor([len(self.ids) - 1]),
                lambda logits, _: logits.argmax(-1),
            )

    def stored(self, layer: int, part: Part, count: int) -> Array:
        """The first `count` entries of a layer as they are read back from the pool."""
        where = self.storage.layout.part(layer, part)
        per_block = where.entries
        ids = [TABLE[j // per_block] * per_block + j % per_block for j in range(count)]
        memory = PagedMemory(self.config, self.plan, self.numerics, self.storage, empty_batch())
        return kv_copy.read_records(memory.paged(layer, part), torch.tensor(ids, dtype=torch.int64)).double().numpy()

    def entries_of(self, layer: int, records: Array) -> Array:
        """Record ids of a selection -> entry numbers of the sequence."""
        per_block = self.storage.layout.part(layer, "main").entries
        order = {block: i for i, block in enumerate(TABLE)}
        return np.array([order[int(r) // per_block] * per_block + int(r) % per_block for r in records], dtype=np.int64)


def empty_batch() -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(none, none, none.reshape(0, 0), None, None, (0,), (), (), (), none)


@dataclass
class Recorder:
    """What went in and out of each block, by (layer, block), rows of all steps one after another.

    The final read of the streams and the head have layer -1.
    """

    calls: dict[tuple[int, str], list[tuple[Any, ...]]] = field(default_factory=dict)
    layer: int = -1

    def add(self, name: str, *values: Any) -> None:
        self.calls.setdefault((self.layer, name), []).append(values)

    def get(self, layer: int, name: str) -> tuple[Array, ...]:
        """Each recorded value of a block as one float64 array [T, ...]."""
        parts = zip(*self.calls[layer, name], strict=True)
        return tuple(np.concatenate([as_array(value) for value in part]) for part in parts)

    def has(self, layer: int, name: str) -> bool:
        return (layer, name) in self.calls


def as_array(x: Any) -> Array:
    x = x.detach()
    return x.double().numpy() if x.is_floating_point() else x.numpy()


@contextmanager
def recording(package: Package) -> Iterator[Recorder]:
    """Record every block of the model's steps inside this block; runs of blocks are taken apart for it."""
    r = Recorder()
    handles: list[Any] = []

    def wrap(patch: pytest.MonkeyPatch, module: Any, name: str, keep: Any) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = real(*args, **kwargs)
            keep(args, out)
            return out

        patch.setattr(module, name, call)

    def hook(module: Any, name: str) -> None:
        def keep(_: Any, args: tuple[Any, ...], out: Any) -> None:
            r.add(name, args[0], out[0] if isinstance(out, tuple) else out)

        handles.append(module.register_forward_hook(keep))

    def enter(index: int) -> Any:
        def keep(_: Any, __: tuple[Any, ...]) -> None:
            r.layer = index

        return keep

    write = hyper.hyper_expand  # before it is wrapped: what is looked at here is no call of the model

    def settled(streams: hyper.Streams) -> Any:
        return streams.s if streams.out is None else write(streams.out, streams.s, streams.post, streams.comb)

    def leave(index: int) -> Any:
        def keep(_: Any, args: tuple[Any, ...], out: tuple[Any, ...]) -> None:
            r.add("layer", settled(args[0]), args[0].pre, settled(out[0]), out[0].pre)
            r.layer = -1

        return keep

    for layer in package.model.layers:
        index = layer.plan.index
        if layer.engram is not None:
            handles.append(layer.engram.register_forward_pre_hook(enter(index)))
            hook(layer.engram.wkv, "engram_kv")
        handles.append(layer.register_forward_pre_hook(enter(index)))
        handles.append(layer.register_forward_hook(leave(index)))
        hook(layer.attn_norm, "attn_norm")
        hook(layer.ffn_norm, "ffn_norm")
        hook(layer.attn, "attn")
        hook(layer.attn.q_norm, "qa")
        hook(layer.attn.wo_b, "wo_b")
        hook(layer.ffn, "ffn")
        if layer.attn.compressor is not None:
            hook(layer.attn.compressor, "latent")
        for part in ("attn", "ffn"):

            def keep_mixes(_: Any, args: tuple[Any, ...], out: tuple[Any, ...], part: str = part) -> None:
                r.add(f"{part}_mixes", args[0], *out)

            handles.append(getattr(layer, f"hc_{part}").register_forward_hook(keep_mixes))

    def keep_attend(args: tuple[Any, ...], out: Any) -> None:
        memory, q, kw, selection, _ = args
        r.add("attend", q, kw, out)
        if selection is not None:
            r.add("reads", selection.entries)
        assert memory.plan.index == r.layer

    writes = itertools.cycle([layer.plan.index for layer in package.model.layers for _ in ("attn", "ffn")])

    def keep_expand(args: tuple[Any, ...], out: Any) -> None:
        """A layer's last write happens when the next one reads; it is told apart by its turn in the step."""
        here, r.layer = r.layer, next(writes)
        r.add("expand", *args, out)
        r.layer = here

    with pytest.MonkeyPatch.context() as patch, fused.apart():
        wrap(patch, hyper, "hyper_collapse", lambda a, out: r.add("collapse", a[0], a[1], out))
        wrap(patch, hyper, "hyper_expand", keep_expand)
        wrap(patch, moe_gate, "route", lambda a, out: r.add("route", a[0], *out))
        wrap(patch, engram, "ngram_rows", lambda a, out: r.add("ngram_rows", out))
        wrap(patch, engram, "engram_gate", lambda a, out: r.add("engram_gate", a[0], a[1], a[2], out))
        wrap(patch, PagedLayer, "store", lambda a, out: r.add(f"store {a[1]}", a[2]))
        wrap(patch, PagedLayer, "attend", keep_attend)

        def keep_select(a: tuple[Any, ...], out: Any) -> None:
            r.add("select", a[1], a[2], out.entries)
            if out.candidates is not None:
                r.add("candidates", out.candidates)

        wrap(patch, PagedLayer, "select", keep_select)
        try:
            yield r
        finally:
            for handle in handles:
                handle.remove()
