"""Who gives way when blocks are short: the cheapest of the worst level, by a count of one's own; and what it keeps."""

from collections import Counter

import pytest

from benthic.cache.replay import Windows
from benthic.engine.branch import Branch
from benthic.engine.cost import Coefficients, CostModel
from benthic.engine.loop import Loop
from benthic.engine.scheduler import Prefixes
from benthic.types import CacheOptions, Request
from tests.engine.fake import WINDOW, expected, fake_loop, greedy
from tests.engine.test_prefixes import prompt

COST = Coefficients(fixed=1e-3, decode=2e-4, row=1e-4, context=1e-6, pair=1e-6)
WINDOWS = Windows(WINDOW, storing=2, others=1)


def crowded(blocks: int, mode: str = "exact", **settings: object) -> tuple[Loop, list[Request]]:
    """More sequences than there is room for, of different lengths; some publish nothing."""
    prefixes = Prefixes(windows=WINDOWS, mode=mode)
    scheduling = {"cost": CostModel(COST), **settings}
    loop = fake_loop(blocks=blocks, slots=7, budget=40, prefixes=prefixes, scheduling=scheduling)
    loop._learn = lambda plan, seconds: None  # type: ignore[method-assign]
    requests = []
    for i in range(9):
        ids = prompt(8, 0) + prompt((3, 20, 7, 31, 15)[i % 5], i + 1)
        params = greedy(max_tokens=(40, 52, 61)[i % 3], ignore_eos=True)
        cache = CacheOptions(write=i % 4 != 3)
        requests.append(Request(i, ids, params, i, priority=int(i > 6), cache=cache))
        loop.inbox.put(requests[-1])
    return loop, requests


def finish(loop: Loop, requests: list[Request]) -> None:
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    for _ in range(4000):
        if not loop.busy:
            break
        loop.step()
        loop.scheduler.check_invariants()
        for event in loop.outbox.take():
            tokens[event.request] += event.tokens
    assert not loop.busy
    for request in requests:
        assert tokens[request.id] == expected(request, 0)


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("blocks", [34, 45])
def test_the_one_that_costs_least_for_each_block_gives_way(blocks: int, mode: str):
    loop, requests = crowded(blocks, mode)
    scheduler = loop.scheduler
    choose, choices, unlike_the_last = scheduler._victim, 0, 0

    def price(b: Branch) -> float:
        owners = Counter(block for other in scheduler.running for block in other.lease.blocks)
        own = sum(owners[block] == 1 for block in b.lease.blocks)
        shared = 0
        while shared < b.lease.cached and owners[b.lease.blocks[shared]] > 1:
            shared += 1
        start = 0
        if shared and requests[b.request].cache.read:
            replay = mode == "replay" and not b.output_tokens
            start = WINDOWS.start(4 * shared, len(b.tokens), "replay" if replay else "exact", WINDOW)
        start = min(max(start, 0), b.computed)
        # row by row: what it reads, and once for the chunk its context
        rows = sum(COST.row + COST.pair * (position + 0.5) for position in range(start, b.computed))
        return (rows + COST.context * b.computed) / own if own else float("inf")

    def watched(b: Branch) -> Branch:
        nonlocal choices, unlike_the_last
        victim = choose(b)
        worse = [other for other in scheduler.running if other.rank > b.rank]
        if not worse:
            assert victim is b
            return victim
        level = max(other.rank[0] for other in worse)
        allowed = [other for other in worse if other.rank[0] == level]
        assert victim in allowed
        assert price(victim) <= min(map(price, allowed)) * (1 + 1e-9)
        choices += len(allowed) > 1
        unlike_the_last += victim is not scheduler.running[-1]
        return victim

    scheduler._victim = watched  # type: ignore[method-assign]
    finish(loop, requests)
    assert choices > 1
    assert unlike_the_last > 0 or mode == "replay"


def test_the_best_ranked_is_never_taken_from_and_so_all_end():
    loop, requests = crowded(34)
    scheduler = loop.scheduler
    preempt = scheduler._preempt

    def watched(b: Branch) -> None:
        assert b is not scheduler.running[0] or len(scheduler.running) == 1
        preempt(b)

    scheduler._preempt = watched  # type: ignore[method-assign]
    finish(loop, requests)
    assert scheduler.preemptions > 3


def test_a_victim_goes_on_behind_what_it_published():
    """Two sequences that do not fit together: the second computes far less again than it had computed."""
    prefixes = Prefixes(windows=Windows(WINDOW, storing=1, others=0))
    loop = fake_loop(blocks=31, slots=4, budget=200, prefixes=prefixes, scheduling={"cost": CostModel(COST)})
    requests = [Request(i, prompt(40, i), greedy(max_tokens=60 - 40 * i, ignore_eos=True), i) for i in range(2)]
    for request in requests:
        loop.inbox.put(request)
    scheduler = loop.scheduler
    lost, again = [], []
    preempt, begin = scheduler._preempt, scheduler._begin

    def watched(b: Branch) -> None:
        lost.append((b.request, b.computed))
        preempt(b)

    def begun(b: Branch, lease, match) -> None:
        begin(b, lease, match)
        if b.begun:
            again.append((b.request, b.computed))

    scheduler._preempt, scheduler._begin = watched, begun  # type: ignore[method-assign]
    scheduler.admit(loop.inbox.drain())
    for _ in range(3):
        loop.step()
    scheduler.discard(scheduler.plan())  # a step that fails: all give their blocks back, none of which is needed now
    assert [request for request, _ in lost] == [0, 1]
    while loop.busy:
        loop.step()
        loop.scheduler.check_invariants()
    for (request, computed), (same, start) in zip(lost, again[:2], strict=True):
        assert request == same
        assert computed - start < 4 + WINDOW
