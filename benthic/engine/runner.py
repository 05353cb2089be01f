"""Batch -> StepResult on this rank: forward, log-probabilities of prompts, sample, one copy back."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from benthic.cache.replay import Windows
from benthic.cache.spec import CacheSpec, blocks_for
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.graphs import CudaRecorder, Graphs, Record, prompt_sizes, sizes
from benthic.engine.sampler import Sampler
from benthic.kernels import backends
from benthic.models.base import Batch, Memory
from benthic.types import Chunk, Draw, ImageInput, SamplingParams, StepPlan, StepResult, TokenLogprobs

_SCORE_ROWS = 512  # prompt rows whose logits exist at the same time
_BEGINNING_ROWS = 512  # from so many rows on it matters that a prompt's beginning passes some layers only


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
    @property
    def image_token_id(self) -> int | None: ...  # None: it reads text only
    def image_tokens(self, width: int, height: int) -> int: ...  # of an image of so many pixels; raises NoVision
    def read_image(self, source: bytes, longest: int | None, where: str) -> object: ...  # for `image_rows`
    @property
    def windows(self) -> Windows: ...
    def memory(self, storage: Storage, batch: Batch) -> Memory: ...
    def forward(self, batch: Batch, memory: Memory) -> Forward: ...
    def logits(self, hidden: Tensor) -> Tensor: ...  # [R, D] -> f32 [R, V]
    def image_rows(self, patches: object) -> Tensor: ...  # of one `ImageInput` -> [its tokens, D], on the device
    def largest_image(self, tokens: int) -> ImageInput | None: ...  # of at most so many tokens; None: there is none


class Decided(NamedTuple):
    """What a step leaves on the device: R rows, decided as far as they ask for nothing special."""

    hidden: Tensor  # [T, D]
    logits: Tensor  # [R, V] f32
    drawn: Tensor  # [2, R] int64: tokens; bits of the peaks as float64


class Passed(NamedTuple):
    """What a step with prompts leaves of the backbone. Where no row comes out of the last layer, hidden is empty."""

    hidden: Tensor  # [T, D]
    ids: Tensor  # [T] int64, none pending
    history: Tensor  # [T, n] int64


class Runner:
    """Computes plans. What lasts from one to the next is the storage, and image rows until a plan says they are over.

    On a GPU a step is enqueued whole, and the host waits once, for the tokens. There, after `capture`, steps of one-row
    chunks are replays of a CUDA graph, and so is the backbone of the other steps of text, where they are small enough
    for the host to be slower than the GPU. What is left is launched kernel by kernel, on the same stream.
    """

    def __init__(
        self,
        model: Model,
        storage: Storage,
        sampler: Sampler,
        *,
        on_device: bool | None = None,
        deterministic: bool = False,
        ahead: bool = False,
        graph_rows: int = 0,
    ):
        """How steps run.

        on_device      in their GPU form; None: when the storage is on a GPU.
        graph_rows     of the largest step with prompts that is recorded.
        deterministic  the bits of a row do not depend on what else is in the step.
        ahead          steps may be begun before the one before them is over: on a CPU, by a thread of the runner's own.
        """
        self.model, self.storage, self.sampler, self.deterministic = model, storage, sampler, deterministic
        on_device = storage.device.type == "cuda" if on_device is None else on_device
        self._uploads = batches.Uploads(storage) if on_device else None
        self._graphs: Graphs[Decided] | None = None
        self._whole: Graphs[Passed] | None = None
        self._beginnings: Graphs[Passed] | None = None  # of steps of which nothing passes the last source
        self._prompt_sizes = prompt_sizes(graph_rows)
        self._images: dict[int, batches.ImageRows] = {}  # by request
        self._backs = [_Back(storage.num_slots, storage.device) for _ in range(2)]  # one for each step in flight
        self._watch = _Watch(storage.device)
        self._ahead = ahead
        self._worker = ThreadPoolExecutor(1, "benthic-step") if ahead and not on_device else None

    @property
    def captured(self) -> bool:
        """Whether decode steps are replays, in which no Python of the model runs."""
        return self._graphs is not None

    @torch.inference_mode()
    def capture(self, record: Record | None = None) -> None:
        """Record decode steps for every size up to the number of slots, and the backbone of steps with prompts.

        Raises NotCapturable.
        """
        storage = self.storage
        most = max(storage.num_slots - 1, 1)
        columns = torch.zeros(batches.COLUMNS, most, dtype=torch.int64, device=storage.device)
        step: Callable[[Tensor], Decided] = lambda told: self._compute(batches.unpack(told, storage))  # noqa: E731
        record = record or CudaRecorder(storage.device)
        with backends.invariant(self.deterministic):
            if self._prompt_sizes:
                told = self._prompt_columns()
                large = [size for size in self._prompt_sizes if size >= _BEGINNING_ROWS]
                if large and self.model.windows.others:
                    self._beginnings = Graphs(told, large, lambda told: self._pass(told, beginning=True), record)
                self._whole = Graphs(told, self._prompt_sizes, self._pass, record)
                if self._uploads is not None:
                    self._uploads.reserve(told.numel() + batches.beside_columns(storage))
            self._graphs = Graphs(columns, sizes(most), step, record)
        if storage.device.type == "cuda":
            torch.cuda.empty_cache()  # the allocator keeps what runs before each capture took, for their stream alone

    def _prompt_columns(self) -> Tensor:
        columns = batches.PROMPT_COLUMNS + self.model.windows.layers
        return torch.zeros(columns, self._prompt_sizes[-1], dtype=torch.int64, device=self.storage.device)

    def _pass(self, columns: Tensor, beginning: bool = False) -> Passed:
        """The backbone of what `Uploads.prompts` sent.

        beginning  no row is needed behind the last layer that stores entries.
        """
        batch = batches.unpack_prompts(columns, self.storage, self.model.windows.storing if beginning else None)
        hidden = self.model.forward(batch, self.model.memory(self.storage, batch)).hidden
        return Passed(hidden, batch.ids, batch.history)

    @torch.inference_mode()
    def rehearse(self, lengths: Iterable[int] = ()) -> None:
        """Take a step of each kind before there is a request, so that the kernels of all are known.

        lengths  rows of prompts in a step: as one chunk, behind a cached prefix, with a beginning that layers skip,
                 as chunks of three rows; some of them behind long contexts. In the first slots and block 1; those that
                 do not fit are left out. What they leave there is what an ended request leaves.
        """
        storage, lengths = self.storage, tuple(lengths)
        most = max(storage.num_slots - 1, 1)
        columns = torch.zeros(batches.COLUMNS, most, dtype=torch.int64, device=storage.device)
        uploads = batches.Uploads(storage)

        def take(sizes: Sequence[int], skipped: int = 0, start: int = 0, hit: bool = False) -> None:
            """A step of chunks of so many rows, all in block 1. Some layers skip the first rows of the only one."""
            blocks = (1,) * blocks_for(start + max(sizes), storage.block_tokens)
            if len(sizes) <= most and len(blocks) <= storage.table_blocks and storage.num_blocks > 1:
                cuts, before = ((self.model.windows.storing, skipped),) if skipped else (), () if start else None
                draws = (Draw(SamplingParams(temperature=0.0), 0, (), None, 0),) * len(sizes)
                of = Chunk(
                    0, start, (), 0, True, 0, blocks, low=start * hit, stored=start * hit, cuts=cuts, before=before
                )
                chunks = [of._replace(request=i, tokens=(0,) * n, slot=1 + i) for i, n in enumerate(sizes)]
                self._compute(uploads.step(StepPlan(0, tuple(chunks), draws)))

        longest = storage.table_blocks * storage.block_tokens
        contexts = [n for n in (2**i * storage.block_tokens for i in range(1, 24)) if n < longest] + [longest]
        with backends.invariant(self.deterministic):
            for size in reversed(sizes(most)):
                self._compute(batches.unpack(columns[:, :size].contiguous(), storage))
            for size in reversed(self._prompt_sizes):
                self._pass(self._prompt_columns()[:, :size].contiguous())
            for length in lengths:
                take([length])
                if length > 3:
                    take([3] * (length // 3) + [length % 3] * (length % 3 > 0))
            for length in (*lengths[2:-1:4], *lengths[-1:]):
                take([length], start=storage.block_tokens, hit=True)
                take([length], length // 2)
                for context in contexts:
                    if length < context:
                        take([length], start=context - length)

    def close(self) -> None:
        """No step comes any more."""
        if self._worker is not None:
            self._worker.shutdown()

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. A plan without chunks computes nothing."""
        return self.start(plan)()

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step, behind those begun before it. What is returned waits for what it decided.

        At most two steps are begun and not waited for.
        """
        if self._worker is None:
            return self._begin(plan)
        begun = self._worker.submit(self._begin, plan)
        return lambda: begun.result()()

    @torch.inference_mode()
    def _begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        for request in plan.over:
            self._images.pop(request, None)
        if not plan.chunks:
            return lambda: StepResult([])
        for copy in plan.copies:
            self.storage.copy(*copy)
        decided = self._decide(plan)
        for save in plan.saves:
            self.storage.copy(*save)
        return decided

    def _decide(self, plan: StepPlan) -> Callable[[], StepResult]:
        with backends.invariant(self.deterministic):
            try:
                for request, images in plan.images:
                    self._images[request] = self._read(images)
                if self._uploads is not None:
                    return self._start_on_device(plan, self._uploads)
                result = self._run_here(plan)
                return lambda: result
            except BaseException:
                if self._uploads is not None:
                    self._uploads.forget()
                raise

    @property
    def image_tokens(self) -> int:
        """Image rows that are kept now."""
        return sum(kept.rows.shape[0] for kept in self._images.values())

    def _read(self, images: Sequence[ImageInput]) -> batches.ImageRows:
        """A request's images through the vision tower, each by itself: its rows have the same bits beside any others.

        An image that comes twice is read once. Beside the rows that are kept there are never those of more than one.
        """
        kept: Tensor | None = None
        places: dict[str, int] = {}  # by digest
        at = 0
        for image in images:
            first = places.setdefault(image.digest, at)
            if kept is None or first == at:
                rows = self.model.image_rows(image.patches)
            else:
                rows = kept[first : first + image.tokens]
            assert len(rows) == image.tokens, f"the vision tower made {len(rows)} rows for a span of {image.tokens}"
            if kept is None:
                kept = rows if len(images) == 1 else rows.new_empty(sum(i.tokens for i in images), *rows.shape[1:])
            if kept is not rows:
                kept[at : at + image.tokens] = rows
            at += image.tokens
        assert kept is not None, "a request without images has none to read"
        return batches.ImageRows(tuple(images), kept)

    def _run_here(self, plan: StepPlan) -> StepResult:
        started = perf_counter()
        batch = batches.build(plan, self.storage, batches.place(plan.chunks, self._images))
        hidden = self.model.forward(batch, self.model.memory(self.storage, batch)).hidden  # [T, D]
        batches.remember(batch, self.storage)
        scores = self._scores(plan, batch, hidden) if plan.scores else {}
        if not plan.draws:
            return StepResult([], scores=scores, device_seconds=perf_counter() - started)
        rows = hidden if len(plan.draws) == hidden.shape[0] else hidden[batch.outputs.logit_rows]
        logits = self.model.logits(rows)  # [R, V]
        drawn = plan.drawn
        sampled = self.sampler(logits, plan.draws, *_places(drawn))
        if self._ahead:
            slots = torch.tensor([chunk.slot for chunk in drawn])
            self.storage.last_token[slots] = torch.tensor(sampled.tokens)
        took = perf_counter() - started
        return StepResult(sampled.tokens, sampled.failures, sampled.logprobs, scores, sampled.digests, took)

    # ---- on a GPU ----------------------------------------------------------------------------------------------------

    def _start_on_device(self, plan: StepPlan, uploads: batches.Uploads) -> Callable[[], StepResult]:
        self._watch.begin()
        chunks, scores = plan.chunks, {}
        placement = batches.place(chunks, self._images)
        rows = list(range(len(plan.draws)))  # of each draw
        graphs = self._recorded(plan) if placement is None and not plan.scores else None
        size = None if graphs is None else graphs.size(plan.tokens)
        if graphs is None or size is None:
            step = uploads.step(plan, placement)
            decided = self._compute(step)
            scores = self._scores(plan, step.batch, decided.hidden) if plan.scores else {}
        elif self._graphs is not None and graphs is self._graphs:
            uploads.decode(plan, graphs.columns(size))
            decided = self._graphs.run(size)
            rows = [i for i, chunk in enumerate(chunks) if chunk.sample]
        else:
            ends = uploads.prompts(plan, graphs.columns(size))
            passed = cast("Graphs[Passed]", graphs).run(size)
            step = batches.prompt_step(graphs.columns(size), passed.ids, passed.history, ends)
            decided = self._decided(passed.hidden, step)
        self._watch.end()
        if not plan.draws:
            return lambda: StepResult([], scores=scores)
        self._backs.reverse()
        back = self._backs[0]
        back.start(decided.drawn)
        special = self.sampler.special(plan.draws)
        logits = decided.logits  # a graph's are overwritten by the next replay
        if special:
            logits = logits[torch.tensor([rows[i] for i in special], device=logits.device)]

        @torch.inference_mode()
        def result() -> StepResult:
            places = _places(plan.drawn)
            tokens, peaks = back.wait()
            busy = self._watch.seconds()
            sampled = self.sampler.finish_rows(tokens, peaks, logits, rows, plan.draws, *places, special)
            return StepResult(sampled.tokens, sampled.failures, sampled.logprobs, scores, sampled.digests, busy)

        return result

    def _recorded(self, plan: StepPlan) -> "Graphs[Decided] | Graphs[Passed] | None":
        """What holds a step of text like this one; None: it is launched."""
        chunks, storing = plan.chunks, self.model.windows.storing
        if all([len(chunk.tokens) == 1 and chunk.before is None for chunk in chunks]):
            return self._graphs
        large = self._beginnings is not None and plan.tokens > _BEGINNING_ROWS // 2
        if large and all([not c.masked and dict(c.cuts).get(storing, 0) >= c.end for c in chunks]):
            return self._beginnings
        return self._whole

    def _compute(self, step: batches.Step) -> Decided:
        """The whole step on the device: backbone, head, draw, and what the next step may ask for."""
        batch, storage = step.batch, self.storage
        return self._decided(self.model.forward(batch, self.model.memory(storage, batch)).hidden, step)

    def _decided(self, hidden: Tensor, step: batches.Step) -> Decided:
        """hidden [T, D], what came out of the last layer."""
        batch, storage = step.batch, self.storage
        rows = hidden if step.last is None else hidden[batch.outputs.logit_rows]
        if not rows.shape[0]:
            batches.finish(step, storage, None)
            none = torch.zeros(2, 0, dtype=torch.int64, device=hidden.device)
            return Decided(hidden, torch.zeros(0, self.model.vocab_size, device=hidden.device), none)
        logits = self.model.logits(rows)  # [R, V]
        tokens, peaks = self.sampler.draw_rows(logits, step.draws)
        drawn = batches.finish(step, storage, tokens, peaks)
        assert drawn is not None
        return Decided(hidden, logits, drawn)

    def _scores(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        for index, score in plan.scores:
            first = (batch.cuts[-1] if batch.cuts else batch).starts[index] + score.first
            entries: list[TokenLogprobs] = []
            for at in range(0, len(score.targets), _SCORE_ROWS):
                targets = score.targets[at : at + _SCORE_ROWS]
                logits = self.model.logits(hidden[first + at : first + at + len(targets)])
                entries += self.sampler.score(logits, targets, score.top)
            scores[index] = tuple(entries)
        return scores


def _places(drawn: Sequence[Chunk]) -> tuple[list[int], list[int]]:
    """Of each chunk that draws: the position of its token, its request."""
    return [chunk.end for chunk in drawn], [chunk.request for chunk in drawn]


class _Watch:
    """How long the device was busy with steps, read without waiting for it."""

    def __init__(self, device: torch.device):
        self._timed = device.type == "cuda"
        self._began = 0.0
        self._mark = self._event() if self._timed else None
        self._taken = 0.0  # seconds not told yet, where the host itself computes
        self._steps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # not told yet

    def begin(self) -> None:
        self._began = perf_counter()
        if self._timed:
            self._mark = self._event()
            self._mark.record()

    def end(self) -> None:
        if self._mark is not None:
            over = self._event()
            over.record()
            self._steps.append((self._mark, over))
        else:
            self._taken += perf_counter() - self._began

    def seconds(self) -> float:
        """Of all steps that are over and were not told yet."""
        taken, self._taken = self._taken, 0.0
        while self._steps and self._steps[0][1].query():
            began, over = self._steps.popleft()
            taken += began.elapsed_time(over) / 1e3
        return taken

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)


class _Back:
    """Device to host, what a step decided: one copy into pinned memory."""

    def __init__(self, most: int, device: torch.device):
        self._pinned = device.type == "cuda"
        self._host = torch.empty(2 * most, dtype=torch.int64, pin_memory=self._pinned)
        self._event = torch.cuda.Event() if self._pinned else None
        self._shape = (2, 0)

    def start(self, drawn: Tensor) -> None:
        """drawn [2, R] int64: tokens; bits of the peaks."""
        self._shape = drawn.shape
        self._host[: drawn.numel()].view(drawn.shape).copy_(drawn, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> tuple[list[int], np.ndarray]:
        if self._event is not None:
            self._event.synchronize()
        tokens, peaks = self._host[: 2 * self._shape[1]].view(self._shape).unbind(0)
        return tokens.tolist(), peaks.view(torch.float64).numpy()
