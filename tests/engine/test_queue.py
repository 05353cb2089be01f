"""Who begins next: against a list that is sorted anew each time, and what no order of arrivals may do."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.engine.cost import Coefficients, CostModel
from benthic.engine.queue import Queue, Tenant
from benthic.errors import DeadlinePassed
from benthic.types import Request
from tests.engine.fake import expected, fake_loop, greedy
from tests.engine.test_scheduler import drive, prompt, tokens_of


@dataclass(eq=False)
class Waits:
    tenant: Tenant
    priority: int
    since: float
    due: float
    order: int
    index: int = 0
    ended: bool = False
    level: int = 0


@dataclass
class World:
    """A queue, and what it should hold."""

    patience: float = 10.0
    now: float = 0.0
    come: int = 0
    there: list[Waits] = field(default_factory=list)

    def __post_init__(self):
        self.queue: Queue[Waits] = Queue(self.patience)

    def arrive(self, tenant: str = "", priority: int = 0, deadline: float | None = None) -> Waits:
        self.come += 1
        due = self.queue.due(self.now, deadline)
        b = Waits(self.queue.join(tenant, 1), priority, self.now, due, self.come)
        self.there.append(b)
        self.queue.push(b)
        return b

    def end(self, b: Waits, waiting: bool) -> None:
        b.ended = True
        if waiting:
            self.there.remove(b)
        self.queue.leave(b, waiting)

    def take(self) -> Waits | None:
        b = self.queue.pop(self.now)
        if b is not None:
            self.there.remove(b)
        return b


def slow(world: World) -> Waits | None:
    """The next one, by comparing all."""

    def key(b: Waits) -> tuple[float, ...]:
        aged = b.priority - ((world.now - b.since) // world.patience if world.patience else 0)
        return max(aged, min(b.priority for b in world.there)), b.tenant.served, b.due, b.order

    heads: dict[tuple[str, int], Waits] = {}  # within a tenant and a priority only the due time counts
    for b in sorted(world.there, key=lambda b: (b.due, b.order)):
        heads.setdefault((b.tenant.name, b.priority), b)
    return min(heads.values(), key=key, default=None)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0.0, 3.0, 10.0]))
def test_the_next_one_is_that_of_a_sorted_list(seed: int, patience: float):
    rng, world = random.Random(seed), World(patience)
    running: list[Waits] = []
    for _ in range(60):
        act = rng.random()
        if act < 0.45:
            deadline = world.now + rng.uniform(0, 30) if rng.random() < 0.4 else None
            world.arrive(rng.choice("abc"), rng.randrange(-1, 3), deadline)
        elif act < 0.7:
            want = slow(world)
            got = world.take()
            assert got is want
            if got is not None:
                got.tenant.served += rng.random()
                running.append(got)
        elif act < 0.8 and world.there:
            world.end(rng.choice(world.there), waiting=True)
        elif act < 0.9 and running:
            b = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.5:
                world.end(b, waiting=False)
            else:  # preempted
                world.there.append(b)
                world.queue.push(b)
        world.now += rng.choice([0.0, 0.5, 4.0])
        assert len(world.queue) == len(world.there)
        assert set(world.queue) == set(world.there)


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_longer_than_the_bound_whoever_comes(seed: int):
    """Work for twice what can be done arrives, all of it looking better: priority, deadlines, new tenants."""
    rng, world = random.Random(seed), World(patience=10.0)
    mine = world.arrive("mine", priority=2)
    first_of_others = [world.arrive(rng.choice("abcd"), 0) for _ in range(20)]
    assert first_of_others
    bound = (2 - 0 + 1) * 10.0
    served_after_bound = 0
    while True:
        for _ in range(2):
            name = f"new {world.come}" if rng.random() < 0.3 else rng.choice("abcd")
            world.arrive(name, 0, world.now + rng.uniform(0.1, 1.0))
        b = world.take()
        assert b is not None
        if b is mine:
            break
        served_after_bound += world.now > bound
        assert served_after_bound < 200, "it waits for ever"
        b.tenant.served += 0.1
        world.end(b, waiting=False)
        world.now += 0.1


def test_a_far_deadline_is_no_reason_to_wait():
    world = World(patience=10.0)
    far = world.arrive(deadline=900.0)
    world.now = 5.0
    later = world.arrive()
    soon = world.arrive(deadline=9.0)
    assert [world.take() for _ in range(3)] == [soon, far, later]


def test_a_tenants_backlog_puts_it_ahead_of_nobody():
    world = World(patience=10.0)
    old = [world.arrive("flood") for _ in range(50)]
    old[0].tenant.served = 100.0
    world.now = 500.0
    fresh = world.arrive("other", 0)
    fresh.tenant.served = 1.0
    low = world.arrive("other", 1)
    assert world.take() is fresh
    assert world.take() is old[0]
    world.now = 510.0
    assert world.take() is low  # as good as the others by now
    assert low.level == 0


def test_without_patience_priorities_are_strict():
    world = World(patience=0.0)
    low = world.arrive(priority=1)
    world.now = 1e6
    high = world.arrive(priority=0)
    assert (world.take(), world.take()) == (high, low)


def test_time_away_is_no_credit_and_a_debt_stays():
    world = World()
    a, b = world.arrive("a"), world.arrive("b")
    a.tenant.served, b.tenant.served = 50.0, 30.0
    world.end(a, waiting=True)
    assert world.arrive("c").tenant.served == 30.0  # not 0: what c did not ask for then is gone
    assert world.arrive("a").tenant.served == 50.0
    b.tenant.served = world.queue.tenants["c"].served = 70.0
    for one in list(world.there):
        if one.tenant.name == "a":
            world.end(one, waiting=True)
    assert world.arrive("a").tenant.served == 70.0


def test_tenants_without_requests_are_forgotten():
    world = World()
    for i in range(1000):
        world.end(world.arrive(str(i)), waiting=True)
    world.arrive("last")
    assert len(world.queue.tenants) <= 2


# ---- in the scheduler ------------------------------------------------------------------------------------------------

COST = Coefficients(fixed=1e-3, decode=1e-4, row=1e-4, context=1e-7, logit=1e-5)


def test_a_tenant_that_floods_gets_no_more_than_its_half():
    loop = fake_loop(blocks=300, slots=4, budget=24, scheduling={"cost": CostModel(COST)})
    rng = random.Random(0)
    for i in range(120):  # a hundred of one, then twenty of the other, of other sizes
        length, tokens = (rng.randrange(5, 30), 6) if i < 100 else (rng.randrange(40, 70), 9)
        tenant = "flood" if i < 100 else "drop"
        loop.inbox.put(Request(i, prompt(length, i), greedy(max_tokens=tokens, ignore_eos=True), i, tenant=tenant))
    loop.step()
    tenants = loop.scheduler.queue.tenants
    beside = 0
    most = 70 * COST.row + 9 * (COST.decode + COST.logit) + 1e-3  # of one request
    furthest, both, ended = 0.0, 0, [0, 0]
    while loop.busy:
        loop.step()
        for event in loop.outbox.take():
            ended[event.request >= 100] += event.usage is not None
        if ended[1] == 20 and not beside:
            beside = ended[0]
        if len(tenants) == 2 and all(tenant.queues.get(0) for tenant in tenants.values()):
            both += 1
            furthest = max(furthest, abs(tenants["flood"].served - tenants["drop"].served))
    assert both > 30
    assert 20 < beside < 80  # requests of the flood that ended while the other's twenty did
    assert furthest <= 4 * most  # no more than what four slots hold


def ends_of(loop) -> list[int]:
    ended = []
    while loop.busy:
        loop.step()
        loop.scheduler.check_invariants()
        ended += [e.request for e in loop.outbox.take() if e.usage and e.error is None]
    return ended


def test_the_earliest_deadline_comes_first_within_a_priority():
    loop = fake_loop(slots=2)
    loop.clock = lambda: 0.0
    for i, (deadline, priority) in enumerate([(None, 0), (900.0, 0), (20.0, 0), (25.0, 0), (1.0, 1)]):
        request = Request(i, prompt(4, i), greedy(max_tokens=2, ignore_eos=True), 0, priority, deadline=deadline)
        loop.inbox.put(request)
    assert ends_of(loop) == [2, 3, 0, 1, 4]  # a far deadline is no hurry, and none is one of 30 s


def test_a_request_that_cannot_begin_in_time_is_refused_and_one_that_began_is_not():
    loop = fake_loop(slots=2)
    now = 0.0
    loop.clock = lambda: now
    long = Request(1, prompt(4, 1), greedy(max_tokens=30, ignore_eos=True), 0, deadline=0.5)
    late = Request(2, prompt(4, 2), greedy(max_tokens=2, n=2), 0, deadline=4.0)
    for request in (long, late, Request(3, prompt(4, 3), greedy(max_tokens=2, ignore_eos=True), 0)):
        loop.inbox.put(request)
    events = []
    while loop.busy:
        loop.step()
        loop.scheduler.check_invariants()
        events += loop.outbox.take()
        now += 1.0
    refused = [e for e in events if e.request == 2]
    assert [e.branch for e in refused] == [0, 1]
    assert all(isinstance(e.error, DeadlinePassed) for e in refused)
    assert all(e.usage is not None and e.tokens == () for e in refused)
    assert "waited 4.000 s" in str(refused[0].error)
    assert refused[0].error.retryable
    assert [t for e in events if e.request == 1 for t in e.tokens] == expected(long, 0)
    assert any(e.request == 3 and e.finish for e in events)


@pytest.mark.parametrize("deadline", range(3, 100, 6))
def test_a_preempted_request_is_past_its_deadline_and_goes_on(deadline: int):
    loop = fake_loop(blocks=14, slots=5)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    loop.clock = clock
    requests = [
        Request(i, prompt(7 + i, i), greedy(max_tokens=30, ignore_eos=True), i, deadline=deadline) for i in range(3)
    ]
    for request in requests:
        loop.inbox.put(request)
    events = drive(loop)
    assert loop.scheduler.preemptions > 0
    for request in requests:
        assert tokens_of(events[request.id, 0]) == expected(request, 0)


def test_a_short_prompt_does_not_wait_for_a_long_one_to_end():
    loop = fake_loop(blocks=400, slots=6, budget=20)
    loop.inbox.put(Request(1, prompt(390, 1), greedy(max_tokens=2), 0))
    loop.step()
    loop.step()
    loop.inbox.put(Request(2, prompt(390, 2), greedy(max_tokens=2), 0))  # as long, and later
    loop.inbox.put(Request(3, prompt(30, 3), greedy(max_tokens=2), 0))
    first: dict[int, int] = {}
    began: dict[int, int] = {}
    for step in range(200):
        loop.step()
        loop.scheduler.check_invariants()
        for b in loop.scheduler.running:
            began.setdefault(b.request, step)
        for event in loop.outbox.take():
            if event.tokens:
                first.setdefault(event.request, step)
    assert first[3] <= 3  # ten rows of each step's twenty
    assert first[1] <= 390 / 20 + 3
    assert began[2] >= first[1] - 1
    assert first[2] <= 2 * 390 / 20 + 5
