"""Batch -> StepResult on this rank: forward, log-probabilities of prompts, sample, one copy back."""

from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from benthic.cache.spec import CacheSpec
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.sampler import Sampler
from benthic.models.base import Batch, Memory
from benthic.types import StepPlan, StepResult, TokenLogprobs

_SCORE_ROWS = 512  # prompt rows whose logits exist at the same time


class Forward(Protocol):
    """What a forward pass returns."""

    @property
    def hidden(self) -> Tensor: ...  # [T, D], before the head


class Model(Protocol):
    """What the runner needs of a model family."""

    @property
    def cache_spec(self) -> CacheSpec: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    def memory(self, storage: Storage, batch: Batch) -> Memory: ...
    def forward(self, batch: Batch, memory: Memory) -> Forward: ...
    def logits(self, hidden: Tensor) -> Tensor: ...  # [R, D] -> f32 [R, V]


class Runner:
    """Computes plans. The storage is the only thing that lasts from one to the next."""

    def __init__(self, model: Model, storage: Storage, sampler: Sampler):
        self.model, self.storage, self.sampler = model, storage, sampler
        self.forward_seconds = 0.0  # of the last step: batch, forward and logits
        self.sample_seconds = 0.0  # of the last step

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. An empty plan computes nothing."""
        if not plan.chunks:
            self.forward_seconds = self.sample_seconds = 0.0
            return StepResult([])
        started = perf_counter()
        batch = batches.build(plan, self.storage)
        hidden = self.model.forward(batch, self.model.memory(self.storage, batch)).hidden  # [T, D]
        batches.remember(batch, self.storage)
        scores = self._scores(plan, batch, hidden) if plan.scores else {}
        if not plan.draws:
            self.forward_seconds, self.sample_seconds = perf_counter() - started, 0.0
            return StepResult([], scores=scores)
        rows = hidden if len(plan.draws) == hidden.shape[0] else hidden[batch.logit_rows]
        logits = self.model.logits(rows)  # [R, V]
        computed = perf_counter()
        sampled = self.sampler(logits, plan.draws, [chunk.request for chunk in plan.chunks if chunk.sample])
        self.forward_seconds, self.sample_seconds = computed - started, perf_counter() - computed
        return StepResult(sampled.tokens, sampled.failures, sampled.logprobs, scores)

    def _scores(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        for index, score in plan.scores:
            first = batch.starts[index] + score.first
            entries: list[TokenLogprobs] = []
            for at in range(0, len(score.targets), _SCORE_ROWS):
                targets = score.targets[at : at + _SCORE_ROWS]
                logits = self.model.logits(hidden[first + at : first + at + len(targets)])
                entries += self.sampler.score(logits, targets, score.top)
            scores[index] = tuple(entries)
        return scores
