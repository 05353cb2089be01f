"""Looks inside a running model, and single parts of it switched off, without a line for it in the model.

Each is a context manager around an engine whose steps are computed, not replayed from CUDA graphs: a replay runs none
of the Python that a probe hangs on. The engine keeps no prefixes, so that nothing computed outside the block is read
inside it or the other way round. Outside the block nothing is left of it.

    with probe.sees(llm, probe.everything):
        llm.generate(...)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benthic.cache.storage import Storage
from benthic.engine.llm import LLM
from benthic.engine.runner import Runner
from benthic.errors import BenchError
from benthic.kernels import indexer, moe_gate
from benthic.models.base import Batch, Memory, Selection
from benthic.models.deepseek_v41 import DeepseekV41, MoE
from benthic.models.device_memory import DeviceLayer, DeviceMemory
from benthic.models.memory import PagedLayer, PagedMemory


class Sight(NamedTuple):
    """The rows of a step as one layer's indexer meets them."""

    layer: int
    ids: Tensor  # [T] int64 token ids
    positions: Tensor  # [T] int64
    visible: Tensor  # [T] int64: row t may see entries 0 .. visible[t]-1 of its sequence
    topk: int  # entries that the indexer would choose


Choose = Callable[[Sight], Tensor]  # -> [T, K] entries each row attends to, ascending, -1 padded


def everything(sight: Sight) -> Tensor:
    """Dense visibility: all entries that a row may see."""
    entries = torch.arange(max(int(sight.visible.max()), 1), device=sight.visible.device)
    return torch.where(entries < sight.visible[:, None], entries, -1)


def at_random(seed: int) -> Choose:
    """As many entries as the indexer would choose, by chance: the same for a token at its place in any batch."""

    def choose(sight: Sight) -> Tensor:
        entries = torch.arange(max(int(sight.visible.max()), 1), device=sight.visible.device)
        row = _mixed(_mixed(sight.positions * 1_000_003 + sight.ids) + sight.layer * 7919 + seed * 104_729)
        chance = (_mixed(row[:, None] + entries * 15_485_863) & 0xFFFFFF).float()  # 24 bits, exact in float32
        return indexer.select_entries(chance, sight.visible, sight.topk)

    return choose


def _mixed(x: Tensor) -> Tensor:
    """int64 -> int64, every input bit felt in every output bit; products wrap."""
    for factor in (-7046029254386353131, -4658895280553007687):
        x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * factor
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@contextmanager
def sees(llm: LLM, choose: Choose) -> Iterator[None]:
    """Inside this block attention reads the entries that `choose` names; the indexer is not asked."""
    model = _watchable(llm)

    def memory(storage: Storage, batch: Batch) -> Memory:
        form = _Paged if batch.rows is None else _Device
        made = form(model.config, model.plan, model.numerics, storage, batch)
        made.choose = choose
        return made

    before = vars(model).get("memory")
    vars(model)["memory"] = memory
    try:
        yield
    finally:
        if before is None:
            del vars(model)["memory"]
        else:
            vars(model)["memory"] = before


class _Paged(PagedMemory):
    choose: Choose

    def layer(self, index: int) -> PagedLayer:
        return _PagedLayer(self, self.plan[index])


class _PagedLayer(PagedLayer):
    def select(self, q: Tensor, weights: Tensor, shared: Selection | None) -> Selection:
        memory, step = self.memory, self.memory.ratio(self.plan.ratio)
        assert isinstance(memory, _Paged), type(memory)
        batch = memory.batch
        sight = Sight(self.plan.index, batch.ids, batch.positions, step.visible, memory.config.index_topk)
        return Selection(step.locate(memory.choose(sight), memory.chunk_of_row[:, None]), None)


class _Device(DeviceMemory):
    choose: Choose

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.ids: Tensor = parts[-1].ids

    def layer(self, index: int) -> DeviceLayer:
        return _DeviceLayer(self, self.plan[index])


class _DeviceLayer(DeviceLayer):
    def select(self, q: Tensor, weights: Tensor, shared: Selection | None) -> Selection:
        memory, ratio = self.memory, self.plan.ratio
        assert isinstance(memory, _Device), type(memory)
        rows, visible = memory.rows, memory.entries(ratio).visible
        entries = memory.choose(Sight(self.plan.index, memory.ids, rows.positions, visible, memory.config.index_topk))
        per_block = memory.storage.block_tokens // ratio
        at = entries.clamp(min=0).long()
        blocks = memory.tables[rows.slots[:, None], at // per_block].long()
        records = torch.where(entries < 0, -1, blocks * per_block + at % per_block)
        return Selection(records.int(), None)


@contextmanager
def without_engram(llm: LLM) -> Iterator[None]:
    """Inside this block nothing is added from the n-gram tables."""
    layers = [layer for layer in _watchable(llm).layers if layer.engram is not None]
    saved = [(layer, layer.engram) for layer in layers]
    for layer in layers:
        layer.engram = None
    try:
        yield
    finally:
        for layer, engram in saved:
            layer.engram = engram


@contextmanager
def expert_loads(llm: LLM) -> Iterator[list[Tensor]]:
    """Inside this block the rows that go to each expert are counted: int64 [E] for every layer, growing."""
    model = _watchable(llm)
    loads = [torch.zeros_like(layer.ffn.bias, dtype=torch.int64) for layer in model.layers]

    def count(into: Tensor) -> Callable[[MoE, tuple[Any, ...]], None]:
        def hook(moe: MoE, args: tuple[Any, ...]) -> None:
            h, images = args
            router = (moe.experts_per_token, moe.normalise, moe.routed_scale)
            ids, _ = moe_gate.route(h, moe.gate.weight, moe.choice_bias(images), *router)
            into.add_(torch.bincount(ids.flatten(), minlength=len(into)))

        return hook

    hooks = [layer.ffn.register_forward_pre_hook(count(load)) for layer, load in zip(model.layers, loads, strict=True)]
    try:
        yield loads
    finally:
        for hook in hooks:
            hook.remove()


def _watchable(llm: LLM) -> DeepseekV41:
    model = llm.model
    if not isinstance(model, DeepseekV41):
        raise BenchError("the inside of the model", f"{type(model).__name__} has no probe")
    if isinstance(llm.loop.runner, Runner) and llm.loop.runner.captured:
        raise BenchError("the inside of the model", "its decode steps are CUDA graphs; set gpu.graphs to false")
    if llm.config.cache.prefix:
        raise BenchError("the inside of the model", "what is computed stays in the cache; set cache.prefix to false")
    return model
