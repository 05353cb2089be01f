"""A request may end at any moment of its life, and the clock may jump: nobody else notices, nothing leaks."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import benthic
from benthic.cache.replay import Windows
from benthic.engine.branch import Branch
from benthic.engine.loop import Loop
from benthic.engine.scheduler import Prefixes
from benthic.errors import NonFiniteLogits
from benthic.types import Abort, CacheOptions, FinishReason, Miss, Request, SamplingParams, TokenEvent
from tests.engine.fake import WINDOW, FakeModel, expected, fake_loop, greedy
from tests.engine.test_prefixes import prompt

Events = dict[tuple[int, int], list[TokenEvent]]


def crowd() -> list[Request]:
    """Six requests: a shared beginning, branches, penalties, one that is preempted, one that waits for another."""
    stem = prompt(21)
    return [
        Request(0, (*stem, *prompt(9, 1)), greedy(max_tokens=9), seed=0),
        Request(1, (*stem, *prompt(4, 2)), SamplingParams(temperature=1.0, max_tokens=8, n=3), seed=1),
        Request(2, prompt(40, 3), greedy(max_tokens=12), seed=2, cache=CacheOptions(mode="exact")),
        Request(3, stem, SamplingParams(temperature=1.0, max_tokens=10, presence_penalty=1.0), seed=3),
        Request(4, prompt(3, 4), greedy(max_tokens=1), seed=4),
        Request(5, (*stem, *prompt(30, 5)), greedy(max_tokens=6, min_tokens=2), seed=5),
    ]


def cramped() -> list[Request]:
    """Three that outgrow a pool of 14 blocks together: two of them are preempted."""
    return [Request(i, prompt(5, i), greedy(max_tokens=21, ignore_eos=True), seed=i) for i in range(3)]


def loop_of(ahead: bool, model: FakeModel | None = None, blocks: int = 30) -> Loop:
    prefixes = Prefixes(windows=Windows(WINDOW, storing=2, others=1), mode="snapshot")
    return fake_loop(blocks=blocks, slots=6, budget=16, prefixes=prefixes, snapshots=2, ahead=ahead, model=model)


def run(loop: Loop, requests: list[Request], aborts: dict[int, Abort] | None = None) -> tuple[Events, int]:
    events: Events = defaultdict(list)
    for request in requests:
        loop.inbox.put(request)
    step = 0
    while loop.busy and step < 500:
        if aborts and step in aborts:
            loop.inbox.put(aborts[step])
        loop.step()
        step += 1
        loop.scheduler.check_invariants()
        for event in loop.outbox.take():
            events[event.request, event.branch].append(event)
    assert not loop.busy
    cache = loop.scheduler.cache
    assert cache.free_blocks == cache.blocks.usable
    assert cache.slots.free == cache.slots.usable
    for news in events.values():
        assert [e.usage is not None for e in news] == [False] * (len(news) - 1) + [True]
    return events, step


def tokens_of(news: list[TokenEvent]) -> list[int]:
    return [token for event in news for token in event.tokens]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, int], list[int]]:
    return {(r.id, i): expected(r, i) for r in crowd() for i in range(r.params.n)}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("victim", range(6))
def test_an_abort_at_every_step(victim: int, ahead: bool, answers: dict[tuple[int, int], list[int]]):
    _, steps = run(loop_of(ahead), crowd())
    for at in range(steps + 1):
        events, _ = run(loop_of(ahead), crowd(), {at: Abort(victim)})
        for key, news in events.items():
            got = tokens_of(news)
            if key[0] != victim:
                assert got == answers[key], f"aborting {victim} before step {at} changed {key}"
            else:
                assert got == answers[key][: len(got)]
                assert got == answers[key] or news[-1].finish is FinishReason.ABORT


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("victim", range(3))
def test_an_abort_at_every_step_of_preempted_ones(victim: int, ahead: bool):
    answers = {request.id: expected(request, 0) for request in cramped()}
    loop = loop_of(ahead, blocks=14)
    _, steps = run(loop, cramped())
    assert loop.scheduler.preemptions > 0
    for at in range(steps + 1):
        events, _ = run(loop_of(ahead, blocks=14), cramped(), {at: Abort(victim)})
        for (request, _), news in events.items():
            got = tokens_of(news)
            assert got == answers[request][: None if request != victim else len(got)]


@pytest.mark.parametrize("ahead", [False, True])
def test_one_branch_at_every_step(ahead: bool, answers: dict[tuple[int, int], list[int]]):
    _, steps = run(loop_of(ahead), crowd())
    for at in range(0, steps + 1, 2):
        for branch in range(3):
            events, _ = run(loop_of(ahead), crowd(), {at: Abort(1, branch)})
            for key, news in events.items():
                if key != (1, branch):
                    assert tokens_of(news) == answers[key]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_poisoned_request_fails_alone(ahead: bool, answers: dict[tuple[int, int], list[int]]):
    """A context that makes NaN logits: its request ends with an error, its batch mates and its followers do not."""
    for victim in (0, 2, 5):
        model = FakeModel()
        others = {token for r in crowd() if r.id != victim for token in r.prompt}
        mine = [token for token in crowd()[victim].prompt if token not in others]
        drawn = {token for key, tokens in answers.items() if key[0] != victim for token in tokens}
        poison = next((token for token in mine if token not in drawn), None)
        if poison is None:
            poison = 60
            requests = crowd()
            requests[victim].prompt = (*requests[victim].prompt[:-1], poison)
            if poison in drawn | others:
                continue
        else:
            requests = crowd()
        model.poisoned = {poison}
        events, _ = run(loop_of(ahead, model), requests)
        for key, news in events.items():
            if key[0] == victim:
                assert isinstance(news[-1].error, NonFiniteLogits)
            else:
                assert tokens_of(news) == answers[key]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_fails_at_every_place(ahead: bool, answers: dict[tuple[int, int], list[int]]):
    _, steps = run(loop_of(ahead), crowd())
    for at in range(1, steps + 1, 3):
        model = FakeModel()
        model.fail_at = at
        loop = loop_of(ahead, model)
        events: Events = defaultdict(list)
        for request in crowd():
            loop.inbox.put(request)
        failed = 0
        for _ in range(600):
            if not loop.busy:
                break
            try:
                loop.step()
            except RuntimeError:
                failed += 1
            loop.scheduler.check_invariants()
            for event in loop.outbox.take():
                events[event.request, event.branch].append(event)
        assert not loop.busy
        assert failed == (model.steps >= at)
        assert {key: tokens_of(news) for key, news in events.items()} == answers


@pytest.mark.parametrize("ahead", [False, True])
def test_a_clock_that_jumps(ahead: bool, answers: dict[tuple[int, int], list[int]]):
    """Blocks that live five seconds, pins, and a clock that stands, leaps and goes back."""
    prefixes = Prefixes(windows=Windows(WINDOW, storing=2, others=1), mode="exact")
    loop = fake_loop(blocks=40, slots=6, budget=16, prefixes=prefixes, ahead=ahead, ttl_seconds=5.0)
    times = iter([0.0, 1e9, 0.0, -5.0, 3.0, 3.0, 3.0, 1e12, 4.0] * 100)
    loop.clock = lambda: next(times)
    pin = loop.scheduler.pin(prompt(21), CacheOptions(), 10.0)
    events, _ = run(loop, crowd())
    assert {key: tokens_of(news) for key, news in events.items()} == answers
    assert pin is not None


# ---- what the tests above meet ---------------------------------------------------------------------------------------


def moment(loop: Loop, request: int) -> set[str]:
    """Where the branches of a request stand, in words."""
    scheduler = loop.scheduler
    branches = scheduler._live.get(request)
    if branches is None:
        known = any(b.request == request for f in scheduler._flights for b in f.branches)
        return {"ended, its step still runs" if known else "ended or not there yet"}
    found: set[str] = set()
    for b in branches:
        if b.lease is None:
            sibling = any(other.lease is not None for other in branches)
            waits = "for its prompt's state" if sibling else "for what others compute" if waits_for(loop, b) else ""
            found.add(f"waiting {waits}".strip() if not b.begun else "preempted")
        elif b.computed < b.prompt_tokens:
            found.add("mid-prefill, in flight" if b.planned > b.computed else "mid-prefill")
        else:
            found.add("decoding, a step ahead" if b.planned > b.computed else "decoding")
            if len(b.tokens) + b.pending >= b.limit:
                found.add("in its last step")
        if b.lease is not None and any(scheduler.cache.blocks.references[block] > 1 for block in b.lease.blocks):
            found.add("sharing blocks")
    return found


def waits_for(loop: Loop, b: Branch) -> bool:
    return loop.scheduler._find(b).miss is Miss.IN_FLIGHT


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_are_met_at_every_point_of_a_life(ahead: bool):
    """An abort before each step of these runs finds a request at every one of these; that is what makes it a proof."""
    seen: set[str] = set()
    for loop, todo in ((loop_of(ahead), crowd()), (loop_of(ahead, blocks=14), cramped())):
        for request in todo:
            loop.inbox.put(request)
        while loop.busy:
            loop.step()
            for request in todo:
                seen |= moment(loop, request.id)
    want = {
        "waiting",
        "waiting for what others compute",
        "waiting for its prompt's state",
        "preempted",
        "sharing blocks",
        "ended or not there yet",
    }
    if ahead:
        want |= {"mid-prefill, in flight", "decoding, a step ahead", "in its last step", "ended, its step still runs"}
    else:
        want |= {"mid-prefill", "decoding"}
    assert seen >= want, f"never met: {sorted(want - seen)}"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("blocks", [16, 17, 20, 24])
def test_out_of_blocks(ahead: bool, blocks: int, answers: dict[tuple[int, int], list[int]]):
    """Barely room for the longest alone, pins on what is cached, an abort now and then: all others finish, exactly."""
    prefixes = Prefixes(windows=Windows(WINDOW, storing=2, others=1), mode="snapshot")
    for at in range(0, 40, 5):
        loop = fake_loop(blocks=blocks, slots=6, budget=16, prefixes=prefixes, snapshots=2, ahead=ahead)
        scheduler = loop.scheduler
        events, step = defaultdict(list[TokenEvent]), 0
        for request in crowd():
            loop.inbox.put(request)
        while loop.busy:
            assert step < 2000, "it does not go on"
            if step == at:
                loop.inbox.put(Abort(2))
            if step % 7 == 3:
                scheduler.pin(prompt(21), CacheOptions(), 1e9)
            loop.step()
            step += 1
            scheduler.check_invariants()
            for event in loop.outbox.take():
                events[event.request, event.branch].append(event)
        for key, news in events.items():
            got = tokens_of(news)
            assert got == (answers[key] if key[0] != 2 else answers[key][: len(got)])
        while scheduler.cache.give_way():
            pass
        scheduler.check_invariants()
        assert scheduler.cache.free_blocks == scheduler.cache.blocks.usable


def test_nothing_here_reads_the_wall_clock():
    """It jumps. What lives a certain time counts on the loop's clock, which only goes forward."""
    for folder in ("engine", "cache"):
        for file in (Path(benthic.__file__).parent / folder).glob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module == "time":
                    assert {name.name for name in node.names} <= {"monotonic", "perf_counter"}, file.name
                names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
                assert not {"time", "datetime"} & set(names), file.name
                assert not (isinstance(node, ast.ImportFrom) and node.module == "datetime"), file.name
