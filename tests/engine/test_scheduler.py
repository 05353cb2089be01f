"""The scheduler and the loop, driven with a model that checks what it reads."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benthic.cache.manager import CacheManager
from benthic.engine.branch import branch_seed
from benthic.engine.loop import Loop
from benthic.engine.scheduler import Scheduler
from benthic.errors import (
    BadField,
    CapacityError,
    DeadlinePassed,
    EmptyPrompt,
    NonFiniteLogits,
    PromptTooLong,
    RequestError,
    TokenOutOfRange,
)
from benthic.types import Abort, Draw, FinishReason, Request, SamplingParams, StepPlan, StepResult, TokenEvent
from tests.engine.fake import EOS, VOCAB, FakeModel, expected, fake_loop, greedy


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((i * i * 31 + i * 7 + salt * 13) % (VOCAB - 10) + 10 for i in range(length))


def drive(loop: Loop, limit: int = 3000) -> dict[tuple[int, int], list[TokenEvent]]:
    """Step until nothing is left; every event by branch."""
    events: dict[tuple[int, int], list[TokenEvent]] = defaultdict(list)
    for _ in range(limit):
        if not loop.busy:
            break
        loop.step()
        loop.scheduler.check_invariants()
        for event in loop.outbox.take():
            events[event.request, event.branch].append(event)
    assert not loop.busy, f"still busy after {limit} steps"
    for branch, news in events.items():
        assert [e.usage is not None for e in news] == [False] * (len(news) - 1) + [True], f"{branch} ended not once"
    cache = loop.scheduler.cache
    assert cache.free_blocks == cache.blocks.usable
    assert cache.slots.free == cache.slots.usable
    return events


def tokens_of(news: list[TokenEvent]) -> list[int]:
    return [token for event in news for token in event.tokens]


# ---- one request -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 37, 63, 64, 65, 150])
def test_tokens_are_those_of_the_model_alone(length: int):
    loop = fake_loop(blocks=60)
    request = Request(1, prompt(length), greedy(max_tokens=9, ignore_eos=True), seed=0)
    loop.inbox.put(request)
    news = drive(loop)[1, 0]
    assert tokens_of(news) == expected(request, 0)
    assert news[-1].finish is FinishReason.LENGTH
    assert news[-1].usage[:2] == (length, 9)


@pytest.mark.parametrize("budget", [5, 7, 37, 128, 1000])
def test_chunk_size_changes_nothing(budget: int):
    loop = fake_loop(blocks=200, budget=budget)
    requests = [Request(i, prompt(90 + i, i), SamplingParams(max_tokens=12), seed=i) for i in range(4)]
    for request in requests:
        loop.inbox.put(request)
    events = drive(loop)
    for request in requests:
        assert tokens_of(events[request.id, 0]) == expected(request, 0)


def test_prefill_shares_its_steps_with_decode():
    loop = fake_loop(blocks=200, budget=16)
    loop.inbox.put(Request(1, prompt(3), greedy(max_tokens=40, ignore_eos=True), seed=0))
    loop.step()
    loop.inbox.put(Request(2, prompt(100), greedy(max_tokens=2, ignore_eos=True), seed=0))
    mixed = 0
    while loop.busy:
        loop.step()
        if loop.times[-1].requests == 2 and loop.times[-1].tokens > 2:
            assert loop.times[-1].tokens <= 16
            mixed += 1
    assert mixed == 7  # 100 tokens, 15 a step beside the decode row


def test_end_of_sequence_and_stop_ids_end_it_and_are_counted():
    for ends in ({}, {"stop_ids": (11, 12, 13), "ignore_eos": True}):
        loop = fake_loop(blocks=200)
        request = Request(1, prompt(5), SamplingParams(max_tokens=300, temperature=5.0, **ends), seed=3)
        loop.inbox.put(request)
        news = drive(loop)[1, 0]
        tokens = tokens_of(news)
        assert tokens == expected(request, 0)
        assert tokens[-1] in (ends["stop_ids"] if ends else (EOS,))
        assert news[-1].finish is FinishReason.STOP
        assert news[-1].usage is not None
        assert news[-1].usage.completion_tokens == len(tokens)


def test_a_branch_draws_with_one_record_until_something_of_it_changes():
    """Whoever prepares draws may know them again by what they are."""
    loop = fake_loop(blocks=60)
    asked = {
        1: SamplingParams(max_tokens=20, ignore_eos=True),
        2: SamplingParams(max_tokens=20, min_tokens=3, stop_ids=(60,), ignore_eos=True),
        3: SamplingParams(max_tokens=20, presence_penalty=0.5, ignore_eos=True),
    }
    seen: dict[int, list[Draw]] = {number: [] for number in asked}
    start = loop.runner.start

    def watched(plan: StepPlan) -> Callable[[], StepResult]:
        for chunk, draw in zip(plan.drawn, plan.draws, strict=True):
            seen[chunk.request].append(draw)
        return start(plan)

    loop.runner.start = watched  # type: ignore[method-assign]
    for number, params in asked.items():
        loop.inbox.put(Request(number, prompt(5, number), params, seed=number))
    drive(loop)
    assert len(seen[1]) == 20
    assert len({id(draw) for draw in seen[1]}) == 1
    assert [draw.blocked for draw in seen[2][:4]] == [(60,), (60,), (60,), ()]
    assert len({id(draw) for draw in seen[2][3:]}) == 1
    assert [len(draw.context or ()) for draw in seen[3]] == list(range(5, 25))


def test_min_tokens_keeps_the_ends_away():
    loop = fake_loop(blocks=200)
    request = Request(1, prompt(5), SamplingParams(max_tokens=400, min_tokens=60, temperature=5.0), seed=3)
    loop.inbox.put(request)
    tokens = tokens_of(drive(loop)[1, 0])
    assert tokens == expected(request, 0)
    assert EOS not in tokens[:60]
    assert len(tokens) >= 60


# ---- limits ----------------------------------------------------------------------------------------------------------


def rejected(request: Request, **world: int) -> RequestError:
    loop = fake_loop(**world)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        loop.scheduler.check(request)
    loop.inbox.put(request)
    news = drive(loop)[request.id, 0]
    assert len(news) == 1
    assert type(news[0].error) is type(caught.value)
    assert news[0].finish is None
    return caught.value


def test_what_can_never_run_is_refused_at_once():
    assert isinstance(rejected(Request(1, (), greedy(), seed=0)), EmptyPrompt)
    assert isinstance(rejected(Request(1, (3, VOCAB), greedy(), seed=0)), TokenOutOfRange)
    assert isinstance(rejected(Request(1, (-1,), greedy(), seed=0)), TokenOutOfRange)
    error = rejected(Request(1, prompt(51), greedy(max_tokens=1), seed=0), context=50)
    assert isinstance(error, PromptTooLong)
    assert (error.prompt_tokens, error.limit_tokens) == (51, 50)
    error = rejected(Request(1, prompt(30), greedy(max_tokens=20), seed=0), blocks=13)
    assert isinstance(error, CapacityError)
    assert (error.need, error.have) == (13, 12)
    assert isinstance(rejected(Request(1, prompt(3), greedy(top_p=0.0), seed=0)), BadField)
    assert isinstance(rejected(Request(1, prompt(3), greedy(n=0), seed=0)), BadField)


def test_an_id_in_use_is_refused():
    loop = fake_loop()
    loop.scheduler.admit([Request(1, prompt(3), greedy(), seed=0)])
    with pytest.raises(BadField, match="id is 1"):
        loop.scheduler.check(Request(1, prompt(3), greedy(), seed=0))


def test_a_request_that_just_fits_runs():
    loop = fake_loop(blocks=13)  # 12 blocks of 4 positions; the last token is never stored
    request = Request(1, prompt(30), greedy(max_tokens=19, ignore_eos=True), seed=0)
    loop.inbox.put(request)
    assert tokens_of(drive(loop)[1, 0]) == expected(request, 0)


@pytest.mark.parametrize(("length", "tokens"), [(1, 50), (48, 3), (49, 2), (50, 1)])
def test_the_context_limit_ends_with_length(length: int, tokens: int):
    loop = fake_loop(context=50)
    request = Request(1, prompt(length), greedy(max_tokens=1000, ignore_eos=True), seed=0)
    loop.inbox.put(request)
    news = drive(loop)[1, 0]
    assert news[-1].finish is FinishReason.LENGTH
    assert len(tokens_of(news)) == tokens
    assert tokens_of(news) == expected(request, 0, 50)


def test_a_budget_below_the_slots_is_refused():
    with pytest.raises(BadField, match=r"scheduler\.token_budget is 3, want at least scheduler\.max_running, 4"):
        Scheduler(CacheManager(10, 5), token_budget=3, max_context_tokens=9, vocab_size=9)


# ---- many requests ---------------------------------------------------------------------------------------------------


def test_more_requests_than_slots_all_finish_in_order():
    loop = fake_loop(blocks=100, slots=3)
    requests = [Request(i, prompt(6, i), greedy(max_tokens=3, ignore_eos=True), seed=i) for i in range(9)]
    for request in requests:
        loop.inbox.put(request)
    ended: list[int] = []
    while loop.busy:
        loop.step()
        ended += [e.request for e in loop.outbox.take() if e.usage]
    assert ended == list(range(9))


def test_priority_runs_first():
    loop = fake_loop(blocks=100, slots=2)
    for i, priority in enumerate([1, 1, 0, -5]):
        loop.inbox.put(Request(i, prompt(4, i), greedy(max_tokens=2, ignore_eos=True), seed=i, priority=priority))
    ended: list[int] = []
    while loop.busy:
        loop.step()
        ended += [e.request for e in loop.outbox.take() if e.usage]
    assert ended == [3, 2, 0, 1]


def test_preemption_loses_nothing():
    loop = fake_loop(blocks=14, slots=5)  # room for 52 positions
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True),
        greedy(max_tokens=30, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(max_tokens=30, ignore_eos=True, frequency_penalty=0.7, min_tokens=10, stop_ids=(20, 21)),
        greedy(max_tokens=30, ignore_eos=True),
    ]
    requests = [Request(i, prompt(7 + i, i), p, seed=i) for i, p in enumerate(params)]
    for request in requests:
        loop.inbox.put(request)
    events = drive(loop)
    assert loop.scheduler.preemptions > 0
    for request in requests:
        assert tokens_of(events[request.id, 0]) == expected(request, 0)


def test_the_worst_rank_is_preempted_and_the_best_never():
    loop = fake_loop(blocks=14, slots=5)
    priorities = {0: 0, 1: 3, 2: 3, 3: -1}
    for i, priority in priorities.items():
        loop.inbox.put(Request(i, prompt(7, i), greedy(max_tokens=38, ignore_eos=True), seed=i, priority=priority))
    victims: list[int] = []
    ended: list[int] = []
    running: list[int] = []
    while loop.busy:
        loop.step()
        ended += [e.request for e in loop.outbox.take() if e.usage]
        now = [b.request for b in loop.scheduler.running]
        victims += [request for request in running if request not in now and request not in ended]
        running = now
    assert victims
    assert victims[0] == 2  # last come of the worst priority
    assert 3 not in victims
    assert ended[0] == 3
    assert ended.index(0) < ended.index(1)


def test_prompt_logprobs_survive_chunks_and_preemption():
    def scored(**world: int) -> list[tuple]:
        loop = fake_loop(**world)  # type: ignore[arg-type]
        for i in range(3):
            params = SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=2, logprobs=1)
            loop.inbox.put(Request(i, prompt(13 + i, i), params, seed=i))
        events = drive(loop)
        assert (loop.scheduler.preemptions > 0) == (world["blocks"] < 30)
        return [
            (
                [entry for e in events[i, 0] for entry in e.prompt_logprobs],
                [entry for e in events[i, 0] for entry in e.logprobs],
            )
            for i in range(3)
        ]

    calm = scored(blocks=100, budget=1000)
    assert scored(blocks=12, budget=6) == calm
    for i, (of_prompt, of_output) in enumerate(calm):
        assert [entry.token for entry in of_prompt] == list(prompt(13 + i, i)[1:])
        assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.top[1][1] for entry in of_prompt)
        assert len(of_output) == 20


def test_branches_are_one_request_with_their_own_seeds():
    loop = fake_loop(blocks=100, slots=6)
    request = Request(1, prompt(9), SamplingParams(max_tokens=8, n=4, ignore_eos=True), seed=5)
    loop.inbox.put(request)
    events = drive(loop)
    assert sorted(events) == [(1, i) for i in range(4)]
    outputs = [tokens_of(events[1, i]) for i in range(4)]
    assert outputs == [expected(request, i) for i in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    assert branch_seed(5, 0) == 5
    assert all(0 <= branch_seed(2**63 - 1, i) < 2**63 for i in range(128))


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_logits_that_are_not_numbers_fail_their_request_alone():
    model = FakeModel()
    model.poisoned = {3}
    loop = fake_loop(blocks=100, model=model)
    good = Request(1, prompt(9), greedy(max_tokens=5, ignore_eos=True, banned_ids=(3,)), seed=0)
    loop.inbox.put(good)
    loop.inbox.put(Request(2, (10, 3, 11), SamplingParams(max_tokens=5, logprobs=2), seed=0))
    events = drive(loop)
    assert tokens_of(events[1, 0]) == expected(good, 0)
    assert isinstance(events[2, 0][-1].error, NonFiniteLogits)
    assert tokens_of(events[2, 0]) == []


def test_abort_between_the_chunks_of_a_prefill():
    loop = fake_loop(blocks=100, budget=8)
    loop.inbox.put(Request(1, prompt(50), greedy(), seed=0))
    loop.step()
    loop.step()
    loop.inbox.put(Abort(1))
    loop.inbox.put(Abort(99))
    news = drive(loop)[1, 0]
    assert news[-1].finish is FinishReason.ABORT
    assert news[-1].usage[:2] == (50, 0)


def test_abort_while_its_step_runs_keeps_the_blocks_until_the_step_is_over():
    loop = fake_loop(blocks=100)
    scheduler = loop.scheduler
    scheduler.admit([Request(i, prompt(9, i), greedy(), seed=0) for i in range(2)])
    plan = scheduler.plan()
    held = scheduler.cache.free_blocks
    scheduler.abort(1)
    scheduler.abort(1)
    assert scheduler.cache.free_blocks == held
    scheduler.check_invariants()
    events = scheduler.commit(plan, loop.runner.run(plan))
    assert {(e.request, e.finish) for e in events} == {(0, None), (1, FinishReason.ABORT)}
    assert scheduler.cache.free_blocks > held
    scheduler.check_invariants()


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_step_that_fails_is_computed_again(step: int):
    model = FakeModel()
    model.fail_at = step
    loop = fake_loop(blocks=100, budget=9, model=model)
    requests = [Request(i, prompt(20, i), SamplingParams(max_tokens=6), seed=i) for i in range(3)]
    for request in requests:
        loop.inbox.put(request)
    seen: dict[int, list[int]] = defaultdict(list)
    failed = 0
    while loop.busy:
        try:
            loop.step()
        except RuntimeError:
            failed += 1
        loop.scheduler.check_invariants()
        for e in loop.outbox.take():
            seen[e.request] += e.tokens
    assert failed == 1
    assert all(seen[r.id] == expected(r, 0) for r in requests)


def test_a_step_can_end_its_requests_with_an_error():
    loop = fake_loop(blocks=100)
    scheduler = loop.scheduler
    scheduler.admit([Request(1, prompt(9), greedy(), seed=0), Request(2, prompt(9), greedy(), seed=0)])
    plan = scheduler.plan()
    scheduler.abort(2)
    scheduler.discard(plan, NonFiniteLogits(1, 9))
    scheduler.check_invariants()
    events = scheduler.commit(scheduler.plan(), StepResult([]))
    assert [(e.request, e.finish, e.error is not None) for e in events] == [
        (2, FinishReason.ABORT, False),
        (1, None, True),
    ]
    assert scheduler.unfinished == 0


# ---- anything at any time --------------------------------------------------------------------------------------------

some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0, 3.0]),
    max_tokens=st.integers(1, 14),
    min_tokens=st.just(0) | st.just(1),
    stop_ids=st.sampled_from([(), (20, 21, 22)]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    banned_ids=st.sampled_from([(), (30, 31)]),
    logprobs=st.sampled_from([None, None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    n=st.integers(1, 3),
)


class AnyOrder(RuleBasedStateMachine):
    """Requests, aborts, failures and steps in any order; tiny pools, so that preemption is common."""

    @initialize(blocks=st.integers(16, 40), slots=st.integers(2, 6), budget=st.integers(6, 40))
    def start(self, blocks: int, slots: int, budget: int):
        self.model = FakeModel(60)
        self.loop = fake_loop(blocks=blocks, slots=slots, budget=budget, context=60, model=self.model)
        self.now = 0.0
        self.loop.clock = self.tick
        plan = self.loop.scheduler.plan
        self.loop.scheduler.plan = lambda: self.watched(plan)  # type: ignore[method-assign]
        self.requests: dict[int, Request] = {}
        self.output: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[int, int], TokenEvent] = {}

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def watched(self, plan: Callable[[], StepPlan]) -> StepPlan:
        """Who begins beside others never leaves them without the blocks they are known to need."""
        scheduler = self.loop.scheduler
        before = {(b, b.started) for b in scheduler.running}
        made = plan()
        now = {(b, b.started) for b in scheduler.running}
        if now - before and len(now) > 1:
            promised = sum(scheduler._promised(b) for b in scheduler.running)
            assert promised <= scheduler.cache.free_blocks, "more was promised than there is"
        assert len(scheduler.running) <= scheduler.cache.slots.usable
        assert made.tokens <= scheduler.token_budget
        assert not made.chunks or scheduler.planned_tokens == made.tokens
        return made

    def take(self, events: list[TokenEvent]) -> None:
        for e in events:
            key = (e.request, e.branch)
            assert key not in self.ended, f"{key} goes on after its end"
            self.output[key] += e.tokens
            if e.usage is not None:
                assert (e.finish is None) != (e.error is None)
                assert e.usage.completion_tokens == len(self.output[key])
                self.ended[key] = e

    @rule(
        length=st.integers(0, 64),
        params=some_params,
        priority=st.integers(0, 2),
        seed=st.integers(0, 2**63 - 1),
        tenant=st.sampled_from("ab"),
        hurry=st.sampled_from([None, None, 5.0, 40.0]),
    )
    def arrive(self, length: int, params: SamplingParams, priority: int, seed: int, tenant: str, hurry: float | None):
        number = len(self.requests)
        deadline = None if hurry is None else self.now + hurry
        self.requests[number] = Request(
            number, prompt(length, number), params, seed, priority, tenant=tenant, deadline=deadline
        )
        self.loop.inbox.put(self.requests[number])

    @rule(steps=st.integers(1, 8))
    def steps(self, steps: int):
        for _ in range(steps):
            self.loop.step()
            self.take(self.loop.outbox.take())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject):
        self.loop.inbox.put(Abort(data.draw(st.integers(0, len(self.requests)))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), branch=st.sampled_from([None, 0, 1]), fails=st.booleans())
    def abort_within_a_step(self, data: st.DataObject, branch: int | None, fails: bool):
        scheduler = self.loop.scheduler
        scheduler.admit(self.loop.inbox.drain())
        plan = scheduler.plan()
        result = self.loop.runner.run(plan)
        scheduler.abort(data.draw(st.integers(0, len(self.requests) - 1)), branch)
        scheduler.check_invariants()
        if fails:
            scheduler.discard(plan)
        else:
            self.take(scheduler.commit(plan, result))

    @rule()
    def the_device_fails(self):
        self.model.fail_at = self.model.steps + 1
        with suppress(RuntimeError):
            self.loop.step()
        self.model.fail_at = None
        self.take(self.loop.outbox.take())

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "loop"):
            self.loop.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        for _ in range(4000):
            if not self.loop.busy:
                break
            self.loop.step()
            self.take(self.loop.outbox.take())
        assert not self.loop.busy, "requests that never end"
        cache = self.loop.scheduler.cache
        assert cache.free_blocks == cache.blocks.usable
        assert cache.slots.free == cache.slots.usable
        for number, request in self.requests.items():
            for branch in range(request.params.n):
                end, output = self.ended.pop((number, branch)), self.output[number, branch]
                if end.error is not None:
                    kinds = EmptyPrompt | PromptTooLong | CapacityError
                    assert isinstance(end.error, kinds if request.deadline is None else kinds | DeadlinePassed)
                    assert not output
                    continue
                want = expected(request, branch, 60)
                assert output == (want if end.finish is not FinishReason.ABORT else want[: len(output)])
        assert not self.ended, "an end that nobody asked for"


AnyOrder.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_order = AnyOrder.TestCase
