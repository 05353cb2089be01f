"""Steps in their GPU form, here on CPU tensors, recorded and not: the same answers as steps that the host describes."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benthic.cache.manager import CacheManager
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine import runner as runners
from benthic.engine.graphs import CudaRecorder, Graphs, NotCapturable, Recorded, prompt_sizes, sizes
from benthic.engine.loop import Loop
from benthic.engine.runner import Decided, Model, Runner
from benthic.engine.sampler import Sampler
from benthic.engine.scheduler import Scheduler
from benthic.errors import BenthicError, NoAllowedToken, NonFiniteLogits
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import (
    NUMERICS,
    PENDING,
    Abort,
    Chunk,
    Draw,
    FinishReason,
    Request,
    SamplingParams,
    Score,
    StepPlan,
    TokenLogprobs,
)

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    return from_checkpoint(Checkpoint.open(make_tiny(tmp_path_factory.mktemp("model") / "tiny")), NUMERICS["float"])


class FakeRecorder:
    """What a CUDA graph does, without one: a replay computes again and leaves the result in the first one's tensors."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], Decided]) -> Recorded[Decided]:
        result = run()

        def replay() -> None:
            self.replays += 1
            for mine, now in zip(result, run(), strict=True):
                mine.copy_(now)

        return Recorded(result, replay)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "want"), [(1, (1,)), (2, (1, 2)), (32, (1, 2, 4, 8, 16, 32)), (40, (1, 2, 4, 8, 16, 32, 40))]
)
def test_sizes_double_up_to_the_most(most: int, want: tuple[int, ...]):
    assert sizes(most) == want


@pytest.mark.parametrize(
    ("most", "want"),
    [
        (0, ()),
        (15, ()),
        (100, (16, 32, 64)),
        (512, (16, 32, 64, 128, 256, 384, 512)),
        (1600, (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536)),
    ],
)
def test_sizes_of_steps_with_prompts(most: int, want: tuple[int, ...]):
    assert prompt_sizes(most) == want


def test_a_step_runs_in_the_smallest_size_that_holds_it():
    order: list[int] = []

    def step(columns: Tensor) -> Tensor:
        assert len(order) > 3 or not columns.any()  # recorded with nothing but padding
        order.append(columns.shape[1])
        return columns * 1

    graphs = Graphs(torch.full((3, 6), 9), sizes(6), step, lambda run: Recorded(run(), run))
    assert order == [6, 4, 2, 1]  # the largest first
    assert [graphs.size(n) for n in range(8)] == [None, 1, 2, 4, 4, 6, 6, None]
    graphs.columns(4).copy_(torch.arange(12).view(3, 4))
    graphs.run(4)
    assert order[4:] == [4]
    assert graphs.columns(2).tolist() == [[0, 1], [2, 3], [4, 5]]  # a smaller size is a prefix of the same memory


def test_a_rehearsal_takes_every_size_and_length_that_fits(model: DeepseekV41, monkeypatch: pytest.MonkeyPatch):
    storage = Storage(model.cache_spec, 9, 5, block_tokens=BLOCK, table_blocks=4)
    runner = Runner(model, storage, Sampler(model.vocab_size, storage.device), on_device=True)
    rows: list[int] = []
    compute = runner._compute

    def counted(step: batches.Step) -> Decided:
        rows.append(step.batch.ids.shape[0])
        return compute(step)

    monkeypatch.setattr(runner, "_compute", counted)
    runner.rehearse((1, 2, 3, 4, 12, 4 * BLOCK, 4 * BLOCK + 1))
    known = [
        1,
        2,
        3,
        4,
        4,
        12,
        12,
        4 * BLOCK,
    ]  # whole, and as four pieces at most; what is longer than a table not at all
    of_three = [3, 3, 3, 3]  # behind a hit, with a beginning skipped; at the end of two blocks and of a table
    assert rows == [4, 2, 1, *known, *of_three]


def test_a_rehearsal_leaves_nothing_that_counts(model: DeepseekV41):
    """Requests get the same tokens after it."""
    answers: list[list[tuple[int, ...]]] = []
    for rehearsed in (False, True):
        storage = Storage(model.cache_spec, 9, 5, block_tokens=BLOCK, table_blocks=4)
        runner = Runner(model, storage, Sampler(model.vocab_size, storage.device), on_device=True)
        if rehearsed:
            runner.rehearse((3, BLOCK + 1))
        plan = plan_of(chunk(1, 0, (7, 8, 9), (1,)), chunk(2, 0, (40,) * 20, (2, 3)))
        first = runner.run(plan).tokens
        after = plan_of(chunk(1, 3, (first[0],), (1,)), chunk(2, 20, (first[1],), (2, 3)))
        answers.append([tuple(first), tuple(runner.run(after).tokens)])
    assert answers[0] == answers[1]


# ---- what is sent ----------------------------------------------------------------------------------------------------


def chunk(slot: int, start: int, tokens: tuple[int, ...], blocks: tuple[int, ...], **changes: Any) -> Chunk:
    return Chunk(
        **{"request": slot, "drafts": 0, "sample": True} | changes, start=start, tokens=tokens, slot=slot, blocks=blocks
    )


def plan_of(*chunks: Chunk, params: SamplingParams | None = None, seed: int = 5) -> StepPlan:
    params = params or SamplingParams()
    draws = [Draw(params, seed + c.slot, (), None, 1) for c in chunks if c.sample]
    return StepPlan(0, chunks, tuple(draws))


@pytest.fixture
def storage(model: DeepseekV41) -> Storage:
    return Storage(model.cache_spec, 9, 5, block_tokens=BLOCK, table_blocks=4)


def decode(uploads: batches.Uploads, plan: StepPlan, rows: int) -> batches.Step:
    columns = torch.full((batches.COLUMNS, rows), -7)
    uploads.decode(plan, columns)
    return batches.unpack(columns, uploads.storage)


def test_rows_of_a_mixed_step(storage: Storage):
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125)
    plan = plan_of(
        chunk(2, 17, (40,), (8, 3)),
        chunk(1, 0, (7, 8, 9), (5,), sample=False),
        chunk(4, 2, (1, 2), (6,)),
        params=params,
    )
    storage.history[:] = torch.tensor([11, 12, 13])
    step = batches.Uploads(storage).step(plan)
    batch = step.batch
    assert batch.rows is not None
    assert batch.ids.tolist() == [40, 7, 8, 9, 1, 2]
    assert batch.positions.tolist() == batch.rows.positions.tolist() == [17, 0, 1, 2, 2, 3]
    assert batch.rows.slots.tolist() == [2, 1, 1, 1, 4, 4]
    assert batch.rows.firsts.tolist() == [17, 0, 0, 0, 2, 2]
    assert batch.rows.starts.tolist() == [0, 1, 1, 1, 4, 4]
    assert batch.history.tolist() == [
        [11, 12, 13], [-1, -1, -1], [7, -1, -1], [8, 7, -1], [11, 12, -1], [1, 11, 12],
    ]  # fmt: skip
    assert (batch.starts, batch.firsts, batch.slots) == ((0, 1, 4, 6), (17, 0, 2), (2, 1, 4))
    assert batch.logit_rows.tolist() == [0, 5]
    assert step.last is not None
    assert step.last.tolist() == [0, 3, 5]
    got = [column.tolist() for column in step.draws]
    assert got == [[2, 4], [18, 4], [7, 9], [0.5, 0.5], [3, 3], [0.25, 0.25], [0.125, 0.125]]
    assert storage.tables[1:].tolist() == [[5, 0, 0, 0], [8, 3, 0, 0], [0, 0, 0, 0], [6, 0, 0, 0]]
    batches.finish(step, storage, torch.tensor([100, 200]))
    assert storage.last_token[[2, 4]].tolist() == [100, 200]
    assert storage.history[[2, 1, 4]].tolist() == [[40, 11, 12], [9, 8, 7], [2, 1, 11]]


def test_padding_is_slot_0_position_0_block_0(storage: Storage):
    step = decode(batches.Uploads(storage), plan_of(chunk(3, 20, (9,), (1, 2))), 4)
    assert step.batch.rows is not None
    assert step.batch.ids.tolist() == [9, 0, 0, 0]
    assert step.batch.rows.slots.tolist() == [3, 0, 0, 0]
    assert step.batch.positions.tolist() == [20, 0, 0, 0]
    assert step.batch.history[1:].tolist() == [[-1, -1, -1]] * 3
    assert step.draws.temperature.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert storage.tables.tolist() == [[0] * 4, [0] * 4, [0] * 4, [1, 2, 0, 0], [0] * 4]


def test_only_what_is_new_of_a_table_is_sent(storage: Storage):
    uploads = batches.Uploads(storage)
    table = (1, 2)
    assert uploads._table_changes([chunk(3, 20, (9,), table)]) == ([12, 13], [1, 2])
    assert uploads._table_changes([chunk(3, 21, (9,), table)]) == ([], [])
    assert uploads._table_changes([chunk(3, 32, (9,), (1, 2, 7)), chunk(1, 0, (1,), (4,))]) == ([14, 4], [7, 4])
    assert uploads._table_changes([chunk(3, 0, (9,), (1, 5))]) == ([12, 13], [1, 5])  # another sequence has the slot
    uploads.forget()
    assert uploads._table_changes([chunk(3, 1, (9,), (1, 5))]) == ([12, 13], [1, 5])


def test_more_new_blocks_than_rows(storage: Storage):
    decode(batches.Uploads(storage), plan_of(chunk(3, 50, (9,), (1, 2, 3, 4)), chunk(2, 33, (9,), (5, 6, 7))), 2)
    assert storage.tables[[2, 3]].tolist() == [[5, 6, 7, 0], [1, 2, 3, 4]]


def test_settings_of_a_slot_follow_its_draws(storage: Storage):
    uploads = batches.Uploads(storage)
    one, other = SamplingParams(temperature=0.25, top_k=9), SamplingParams(temperature=0)
    for params, seed in ((one, 5), (one, 6), (other, 6), (one, 5)):
        step = decode(uploads, plan_of(chunk(1, 3, (9,), (1,)), params=params, seed=seed), 1)
        got = (step.draws.seeds.item(), step.draws.temperature.item(), step.draws.top_k.item())
        assert got == (seed + 1, params.temperature, params.top_k)


def test_rows_that_are_not_drawn_have_no_settings(storage: Storage):
    plan = plan_of(
        chunk(1, 3, (9,), (1,), sample=False), chunk(2, 4, (8,), (2,)), chunk(3, 0, (8,), (2,), sample=False)
    )
    assert decode(batches.Uploads(storage), plan, 4).draws.temperature.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_rows_of_a_step_with_prompts_in_a_graph(storage: Storage):
    """A decode row, the end of a prompt that begins behind a hit and a skipped beginning, and a masked one; padding."""
    params = SamplingParams(temperature=0.5, top_k=3)
    storage.history[:] = torch.tensor([11, 12, 13])
    storage.last_token[2] = 41
    halo, masked = ((3, 17), (4, 18), (6, 19)), ((4, 1),)
    plan = plan_of(
        chunk(2, 17, (PENDING,), (8, 3)),
        chunk(1, 16, (7, 8, 9, 10), (5, 6), low=16, stored=17, cuts=halo, before=(1, 2, 3, 4, 5)),
        chunk(4, 0, (1, 2, 3), (7,), cuts=masked, masked=True, sample=False),
        params=params,
    )
    columns = torch.full((batches.PROMPT_COLUMNS + 7, 10), -7)
    ends = batches.Uploads(storage).prompts(plan, columns)
    batch = batches.unpack_prompts(columns, storage)
    assert batch.rows is not None
    assert batch.ids.tolist() == [41, 7, 8, 9, 10, 1, 2, 3, 0, 0]
    assert batch.positions.tolist() == batch.rows.positions.tolist() == [17, 16, 17, 18, 19, 0, 1, 2, 0, 0]
    assert batch.rows.slots.tolist() == [2, 1, 1, 1, 1, 4, 4, 4, 0, 0]
    assert batch.rows.firsts.tolist() == [17, 16, 16, 16, 16, 0, 0, 0, 0, 0]
    assert batch.rows.starts.tolist() == [0, 1, 1, 1, 1, 5, 5, 5, 8, 9]
    assert batch.floors is not None
    assert batch.floors.tolist() == [0, 17, 17, 17, 17, 0, 0, 0, 0, 0]
    assert batch.history[:3].tolist() == [[11, 12, 13], [5, 4, 3], [7, 5, 4]]
    assert batch.layer_lows is not None
    assert batch.layer_lows.tolist() == [
        *[[0, 16, 16, 16, 16, 0, 0, 0, 0, 0]] * 3,
        [0, 16, 17, 17, 17, 0, 0, 0, 0, 0],
        *[[0, 16, 17, 18, 18, 0, 1, 1, 0, 0]] * 2,
        [0, 16, 17, 18, 19, 0, 1, 1, 0, 0],
    ]
    assert batch.cuts == ()
    beginning = batches.unpack_prompts(columns, storage, 4)
    assert [(cut.layer, cut.kept.tolist()) for cut in beginning.cuts] == [(4, [])]
    assert (ends.last.tolist(), ends.logit_rows.tolist()) == ([0, 4, 7], [0, 4])
    got = [column.tolist() for column in ends.draws]
    assert got == [[2, 1], [18, 20], [7, 6], [0.5, 0.5], [3, 3], [1.0, 1.0], [0.0, 0.0]]
    assert storage.tables[1:].tolist() == [[5, 6, 0, 0], [8, 3, 0, 0], [0, 0, 0, 0], [7, 0, 0, 0]]
    step = batches.prompt_step(columns, batch.ids, batch.history, ends)
    batches.finish(step, storage, torch.tensor([100, 200]))
    assert storage.last_token[[2, 1]].tolist() == [100, 200]
    assert storage.history[[2, 1, 4]].tolist() == [[41, 11, 12], [10, 9, 8], [3, 2, 1]]


# ---- the engine ------------------------------------------------------------------------------------------------------


@dataclass
class Answers:
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[TokenLogprobs]] = field(default_factory=dict)
    prompt: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ends: dict[tuple[int, int], FinishReason | type[BenthicError] | None] = field(default_factory=dict)
    preemptions: int = 0


Form = Callable[[Model, Storage, Sampler], Runner]


def host(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    return Runner(model, storage, sampler)


def eager(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    return Runner(model, storage, sampler, on_device=True)


def recorded(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    runner = Runner(model, storage, sampler, on_device=True, graph_rows=64)
    runner.capture(FakeRecorder())
    return runner


def answer(
    model: Model,
    form: Form,
    requests: Sequence[Request],
    *,
    blocks: int = 60,
    slots: int = 6,
    budget: int = 64,
    never: Sequence[int] = (),
    aborts: dict[int, Abort] | None = None,
    device: str = "cpu",
) -> Answers:
    """Run it all. aborts: number of the step before which they come."""
    storage = Storage(model.cache_spec, blocks + 1, slots + 1, device, block_tokens=BLOCK)
    storage.poison()
    scheduler = Scheduler(
        CacheManager(blocks + 1, slots + 1, BLOCK),
        token_budget=budget,
        max_context_tokens=model.max_positions,
        vocab_size=model.vocab_size,
    )
    loop = Loop(scheduler, form(model, storage, Sampler(model.vocab_size, device, never)))
    for r in requests:
        loop.inbox.put(r)
    found, step = Answers(), 0
    while loop.busy:
        if aborts and step in aborts:
            loop.inbox.put(aborts[step])
        step += 1
        loop.step()
        for event in loop.outbox.take():
            key = event.request, event.branch
            found.tokens.setdefault(key, []).extend(event.tokens)
            found.logprobs.setdefault(key, []).extend(event.logprobs)
            found.prompt.setdefault(event.request, []).extend(event.prompt_logprobs)
            if event.usage is not None:
                found.ends[key] = event.finish if event.error is None else type(event.error)
    scheduler.check_invariants()
    found.preemptions = scheduler.preemptions
    return found


def request(number: int, length: int, **params: Any) -> Request:
    ids = torch.randint(3, 4000, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return Request(number, tuple(ids), SamplingParams(**{"max_tokens": 7, "temperature": 0} | params), seed=31 * number)


def assert_same(got: Answers, want: Answers) -> None:
    assert got.tokens == want.tokens
    assert got.ends == want.ends
    for key, entries in want.logprobs.items():
        assert [e.token for e in got.logprobs[key]] == [e.token for e in entries]
        assert [e.logprob for e in got.logprobs[key]] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    for number, entries in want.prompt.items():
        assert [e.logprob for e in got.prompt[number]] == pytest.approx([e.logprob for e in entries], abs=1e-4)


EVERYTHING = [
    request(1, 30),
    request(2, 1, temperature=1.0),
    request(3, 70, temperature=0.8, top_p=0.9, n=2),
    request(4, 5, temperature=1.5, top_k=5, min_p=0.01),
    request(5, 40, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5),
    request(6, 9, logprobs=2, prompt_logprobs=0),
    request(7, 33, temperature=1.0, banned_ids=tuple(range(0, 4000, 2)), logit_bias=((5, 3.0),)),
    request(8, 12, temperature=1.0, allowed_ids=(17, 18, 19)),
    request(9, 20, min_tokens=4, stop_ids=tuple(range(2000))),
]


@pytest.mark.parametrize("form", [eager, recorded])
def test_every_kind_of_request_in_one_batch(model: DeepseekV41, form: Form):
    want = answer(model, host, EVERYTHING, never=[1, 2, 3])
    assert_same(answer(model, form, EVERYTHING, never=[1, 2, 3]), want)


@pytest.mark.parametrize("form", [pytest.param(eager, marks=pytest.mark.slow), recorded])
def test_preempted_and_aborted(model: DeepseekV41, form: Form):
    requests = [request(i, 30 + i, temperature=1.0, max_tokens=45, n=1 + i % 2) for i in range(4)]
    aborts = {6: Abort(1), 9: Abort(3, 1)}
    want = answer(model, host, requests, blocks=8, slots=4, aborts=aborts)
    got = answer(model, form, requests, blocks=8, slots=4, aborts=aborts)
    assert want.preemptions == got.preemptions > 0
    assert set(want.ends.values()) == {FinishReason.LENGTH, FinishReason.ABORT}
    assert_same(got, want)


def test_a_decode_step_is_one_replay(model: DeepseekV41):
    recorder = FakeRecorder()

    def form(model: Model, storage: Storage, sampler: Sampler) -> Runner:
        runner = Runner(model, storage, sampler, on_device=True)
        runner.capture(recorder)
        return runner

    answer(model, form, [request(i, 20 + i, max_tokens=9) for i in range(3)])
    assert recorder.replays == 8  # the first token comes with the prompts' step


def test_which_steps_with_prompts_are_replays(model: DeepseekV41, monkeypatch: pytest.MonkeyPatch):
    """Up to `graph_rows` rows, without prompt log-probabilities. Beginnings of prompts have graphs of their own."""
    monkeypatch.setattr(runners, "_BEGINNING_ROWS", 32)
    storage = Storage(model.cache_spec, 9, 5, block_tokens=BLOCK)
    runner = Runner(model, storage, Sampler(model.vocab_size), on_device=True, graph_rows=40)
    runner.capture(FakeRecorder())
    assert runner._whole is not None
    assert runner._beginnings is not None
    taken: list[tuple[str, int]] = []
    for name, graphs in (("whole", runner._whole), ("beginning", runner._beginnings), ("decode", runner._graphs)):
        monkeypatch.setattr(graphs, "run", lambda n, name=name, run=graphs.run: taken.append((name, n)) or run(n))
    ended = ((model.windows.storing, 32),)
    table = (1, 2, 3)
    steps = [
        plan_of(chunk(1, 0, (5,) * 20, table, sample=False, cuts=ended)),
        plan_of(chunk(1, 0, (5,) * 12, table, sample=False, cuts=ended)),
        plan_of(chunk(1, 12, (5,) * 20, table, sample=False, cuts=ended, masked=True)),
        plan_of(chunk(1, 12, (5,) * 21, table, sample=False, cuts=ended)),
        plan_of(chunk(1, 0, (5,) * 33, table)),
        plan_of(chunk(1, 33, (5,), table)),
        plan_of(chunk(1, 33, (5,), table, before=(5,) * 3)),
        plan_of(chunk(1, 0, (5, 6), table))._replace(scores=((0, Score(0, (6,), 0)),)),
    ]
    seen = [(runner.run(plan), taken.copy(), taken.clear())[1] for plan in steps]
    whole = [("whole", n) for n in (16, 32, 32)]
    assert seen == [[("beginning", 32)], *[[one] for one in whole], [], [("decode", 1)], [("whole", 16)], []]


def test_no_step_that_is_recorded_makes_room_for_what_is_sent(model: DeepseekV41):
    """The most rows, the most chunks of a prompt, the longest table."""
    storage = Storage(model.cache_spec, 19, 17, block_tokens=BLOCK)
    runner = Runner(model, storage, Sampler(model.vocab_size), on_device=True, graph_rows=64)
    runner.capture(FakeRecorder())
    assert runner._uploads is not None
    room = [buffer.data_ptr() for buffer in runner._uploads._buffers]
    whole = chunk(1, 0, (5,) * 64, tuple(range(1, 1 + min(storage.table_blocks, 18))))
    for plan in (plan_of(whole), plan_of(*[chunk(1 + i, 0, (5,) * 4, (1 + i,), before=(5, 6)) for i in range(16)])) * 2:
        runner.run(plan)
    assert [buffer.data_ptr() for buffer in runner._uploads._buffers] == room


class Damaged:
    """A model whose logits are NaN for some last ids, and may fail altogether."""

    def __init__(self, model: DeepseekV41, bad: set[int]):
        self.model, self.bad, self.fail_at, self.steps = model, bad, -1, 0
        self.cache_spec, self.vocab_size, self.max_positions = model.cache_spec, model.vocab_size, model.max_positions
        self.memory, self.windows = model.memory, model.windows

    def forward(self, batch: Any, memory: Any) -> Any:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the device is gone")
        hidden = self.model.forward(batch, memory).hidden
        bad = torch.isin(batch.ids, torch.tensor(sorted(self.bad)))
        return replace_hidden(hidden.masked_fill(bad[:, None], torch.nan))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


@dataclass
class replace_hidden:
    hidden: Tensor


@pytest.mark.parametrize("form", [eager, recorded])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 1}], ids=["greedy", "drawn", "logprobs"])
def test_a_damaged_row_fails_alone(model: DeepseekV41, form: Form, params: dict[str, Any]):
    requests = [request(i, 11 + i, **params) for i in range(4)]
    whole = answer(model, host, requests)
    third = whole.tokens[2, 0][3]  # an id of one answer that the others do not have
    assert all(third not in tokens[:-1] for key, tokens in whole.tokens.items() if key != (2, 0))
    got = answer(Damaged(model, {third}), form, requests)  # pyright: ignore[reportArgumentType]
    assert got.ends == {**whole.ends, (2, 0): NonFiniteLogits}
    assert got.tokens == {**whole.tokens, (2, 0): whole.tokens[2, 0][:4]}


@pytest.mark.parametrize("form", [eager, recorded])
def test_a_row_with_nothing_allowed(model: DeepseekV41, form: Form):
    requests = [request(1, 9, allowed_ids=(4,)), request(2, 9)]
    got = answer(model, form, requests, never=[4])
    assert got.ends == {(1, 0): NoAllowedToken, (2, 0): FinishReason.LENGTH}


def test_after_a_failed_step_tables_are_sent_again(model: DeepseekV41):
    storage = Storage(model.cache_spec, 9, 3, block_tokens=BLOCK)
    damaged = Damaged(model, set())
    runner = Runner(damaged, storage, Sampler(model.vocab_size), on_device=True)  # pyright: ignore[reportArgumentType]
    plan = plan_of(chunk(1, 0, (5, 6), (3,)))
    runner.run(plan)
    damaged.fail_at = 2
    with pytest.raises(RuntimeError, match="gone"):
        runner.run(plan_of(chunk(1, 2, (5,), (3,))))
    storage.tables.zero_()
    runner.run(plan)
    assert storage.tables[1, 0] == 3


def test_an_empty_plan(model: DeepseekV41):
    storage = Storage(model.cache_spec, 3, 3, block_tokens=BLOCK)
    runner = recorded(model, storage, Sampler(model.vocab_size))
    assert runner.run(StepPlan(0, (), ())).tokens == []


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def eager_repeatable(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    return Runner(model, storage, sampler, deterministic=True)


def captured_repeatable(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    runner = Runner(model, storage, sampler, deterministic=True, graph_rows=64)
    runner.capture()
    return runner


def captured(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    runner = Runner(model, storage, sampler, graph_rows=64)
    runner.capture()
    return runner


@pytest.fixture(scope="module")
def on_gpu() -> Callable[[str, str], DeepseekV41]:
    @cache
    def load(numerics: str, device: str) -> DeepseekV41:
        return from_checkpoint(Checkpoint.open("minnow"), NUMERICS[numerics], device)

    return load


@pytest.mark.gpu
def test_a_gpu_answers_as_the_cpu_does(on_gpu: Callable[[str, str], DeepseekV41]):
    want = answer(on_gpu("float", "cpu"), host, EVERYTHING)
    assert_same(answer(on_gpu("float", "cuda"), host, EVERYTHING, device="cuda"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["reference", "production", "fast"])
def test_a_graph_gives_the_bits_of_single_launches(on_gpu: Callable[[str, str], DeepseekV41], numerics: str):
    """Padded to another number of rows, so where the bits of a row do not depend on that."""
    model = on_gpu(numerics, "cuda")
    want = answer(model, eager_repeatable, EVERYTHING, device="cuda")
    got = answer(model, captured_repeatable, EVERYTHING, device="cuda")
    assert got.tokens == want.tokens
    assert got.logprobs == want.logprobs
    assert got.ends == want.ends


@pytest.mark.gpu
def test_graphs_with_preemption_and_aborts(on_gpu: Callable[[str, str], DeepseekV41]):
    model = on_gpu("production", "cuda")
    requests = [request(i, 30 + i, temperature=1.0, max_tokens=25, n=1 + i % 2) for i in range(4)]
    aborts = {6: Abort(1), 9: Abort(3, 1)}
    want = answer(model, captured_repeatable, requests, device="cuda", slots=6, aborts=aborts)
    tight = answer(model, captured_repeatable, requests, device="cuda", slots=4, blocks=7, aborts=aborts)
    assert tight.preemptions > want.preemptions == 0
    whole = [key for key, end in tight.ends.items() if end is FinishReason.LENGTH]
    assert {key: tight.tokens[key] for key in whole} == {key: want.tokens[key] for key in whole}
    quick = answer(model, captured, requests, device="cuda")
    assert set(quick.ends.values()) == {FinishReason.LENGTH}


@pytest.mark.gpu
def test_a_step_that_waits_is_not_captured():
    def step(columns: Tensor) -> Tensor:
        return columns[0, : int(columns.sum()) + 1]

    recorder: Any = CudaRecorder(torch.device("cuda"))
    with pytest.raises(NotCapturable):
        Graphs(torch.zeros(2, 3, dtype=torch.int64, device="cuda"), (1, 2, 3), step, recorder)
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_graphs_of_an_engine_that_is_gone_are_not_freed_inside_a_capture():
    columns = torch.zeros(2, 3, dtype=torch.int64, device="cuda")
    kept: list[Any] = []

    def step(told: Tensor) -> Tensor:
        kept.extend([[i] for i in range(3 * gc.get_threshold()[0])])  # enough for a collection of all generations
        return told * 3

    before = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        for _ in range(5):
            graphs: Any = Graphs(columns, (1, 2, 3), step, CudaRecorder(columns.device))
            graphs.itself = graphs  # what only a collection frees
            assert graphs.run(2).tolist() == [[0, 0], [0, 0]]
            del graphs
    finally:
        gc.set_threshold(*before)


@pytest.mark.gpu
def test_a_replay_reads_what_was_sent():
    columns = torch.zeros(2, 6, dtype=torch.int64, device="cuda")
    recorder: Any = CudaRecorder(columns.device)
    graphs = Graphs(columns, sizes(6), lambda told: told * 3, recorder)
    for rows in (6, 1, 3):
        size = graphs.size(rows)
        assert size is not None
        told = torch.arange(2 * size).view(2, size) + rows
        graphs.columns(size).copy_(told)
        assert graphs.run(size).tolist() == (3 * told).tolist()
