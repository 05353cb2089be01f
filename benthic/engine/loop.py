"""The heartbeat: receive, plan, run, commit, emit. The caller decides when; steps follow each other in one order."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, perf_counter
from typing import NamedTuple, Protocol

from benthic import metrics
from benthic.engine.cost import Shape
from benthic.engine.scheduler import Scheduler
from benthic.types import Abort, Request, StepPlan, StepResult, TokenEvent

_STEPS_KEPT = 4096
_DECODES_SHOWN = 4  # one decode step in so many is shown to the cost model


class Inbox:
    """Messages that wait for the next step, in order of arrival."""

    def __init__(self) -> None:
        self._messages: deque[Request | Abort] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Request | Abort) -> None:
        self._messages.append(message)

    def drain(self) -> list[Request | Abort]:
        messages = list(self._messages)
        self._messages.clear()
        return messages


class Outbox:
    """Events that the caller has not taken yet."""

    def __init__(self) -> None:
        self._events: list[TokenEvent] = []

    def send(self, events: list[TokenEvent]) -> None:
        self._events += events

    def take(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events


class Runs(Protocol):
    """What computes plans: `runner.Runner`, or a scripted stand-in."""

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; what is returned waits for its result."""
        ...

    def close(self) -> None: ...


class _Flight(NamedTuple):
    """A step that runs."""

    plan: StepPlan
    result: Callable[[], StepResult]
    plan_seconds: float
    began: float


class StepTimes(NamedTuple):
    """Where one step's time went, seconds; how large it was."""

    requests: int
    tokens: int
    plan: float
    run: float
    commit: float


class Loop:
    """Steps, one after another, or each begun while the one before it runs."""

    def __init__(
        self, scheduler: Scheduler, runner: Runs, *, ahead: bool = False, clock: Callable[[], float] = monotonic
    ):
        """How steps follow each other.

        ahead  a step is planned and begun while the one before it runs, so that the device never waits for the host.
        clock  seconds that only go forward, for what lives a certain time.
        """
        self.scheduler, self.runner, self.ahead, self.clock = scheduler, runner, ahead, clock
        self._flight: _Flight | None = None  # the step that runs
        self.inbox, self.outbox = Inbox(), Outbox()
        self._landed = 0.0  # when the last step's result was there
        self.times: deque[StepTimes] = deque(maxlen=_STEPS_KEPT)  # the last steps, newest last
        self._preemptions = self._evictions = 0  # as far as they are counted

    @property
    def busy(self) -> bool:
        """Would a step do anything?"""
        return bool(len(self.inbox) or self.scheduler.unfinished or self.scheduler.has_news or self._flight)

    def settle(self) -> None:
        """Take messages and send what they cause, without a step."""
        self.scheduler.admit(self.inbox.drain())
        self._let_go()
        self._send(self.scheduler.take_news())

    def step(self) -> None:
        """One step further. If the runner raises, the step's sequences wait to be computed again and the error goes on.

        Ahead, that is: the next step is begun, and the one that runs is waited for and committed.
        """
        begun = perf_counter()
        self.scheduler.now = self.clock()
        self.scheduler.admit(self.inbox.drain())
        plan = self.scheduler.plan()
        planned = perf_counter()
        before, self._flight = self._flight, None
        try:
            result = self.runner.start(plan)
        except BaseException:
            self.scheduler.discard(plan)
            self._flight = before
            raise
        new = _Flight(plan, result, planned - begun, begun) if plan.chunks else None
        if not self.ahead:
            self._land(new)
        else:
            self._flight = new
            self._land(before)
        if not self.scheduler.unfinished and self._flight is None:  # no other plan may come
            self._let_go()

    def close(self) -> None:
        """Wait for what runs, and begin nothing any more."""
        flight, self._flight = self._flight, None
        self._land(flight)
        self.runner.close()

    def _land(self, flight: _Flight | None) -> None:
        """Wait for a step and say what it brought."""
        if flight is None:
            self._send(self.scheduler.take_news())
            return
        plan, waited = flight.plan, perf_counter()
        try:
            result = flight.result()
        except BaseException:
            behind, self._flight = self._flight, None
            if behind is not None:  # it ran on what this one left; once it is over, nothing of it counts
                with suppress(Exception):
                    behind.result()
            self.scheduler.discard(plan)
            raise
        ran = perf_counter()
        self._send(self.scheduler.commit(plan, result))
        done = perf_counter()
        self._learn(plan, ran - max(flight.began, self._landed))
        self._landed = ran
        self.times.append(StepTimes(len(plan.chunks), plan.tokens, flight.plan_seconds, ran - waited, done - ran))
        self._measure(plan, done - flight.began)

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """Show the cost model a step that is over. Of decode steps, which are many and alike, some are enough."""
        cost = self.scheduler.cost
        if not cost.ready or plan.images or (plan.tokens == len(plan.chunks) and plan.step % _DECODES_SHOWN):
            return
        cost.observe(Shape.of(plan), seconds)
        metrics.STEP_COST_ERROR.set(cost.error)

    def _let_go(self) -> None:
        """Tell the runner of image rows that nobody reads any more."""
        plan = self.scheduler.plan_over()
        if plan is not None:
            self.runner.start(plan)()

    def _send(self, events: list[TokenEvent]) -> None:
        self.outbox.send(events)
        metrics.GENERATION_TOKENS.inc(sum(len(event.tokens) for event in events))
        for event in events:
            if event.usage is not None:
                metrics.PROMPT_TOKENS.inc(event.usage.prompt_tokens)
                metrics.CACHED_PROMPT_TOKENS.inc(event.usage.cached_tokens)
                if event.usage.miss is not None:
                    metrics.PREFIX_MISSES.labels(event.usage.miss.value).inc()
            if event.finish is not None or event.error is not None:
                reason = "error" if event.finish is None else event.finish.value
                metrics.REQUESTS_FINISHED.labels(reason).inc()

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        scheduler, blocks = self.scheduler, self.scheduler.cache.blocks
        metrics.REQUESTS_WAITING.set(scheduler.waiting)
        metrics.REQUESTS_RUNNING.set(len(scheduler.running))
        metrics.KV_BLOCKS.set(blocks.usable)
        metrics.KV_BLOCKS_USED.set(blocks.usable - blocks.free)
        metrics.PREEMPTIONS.inc(scheduler.preemptions - self._preemptions)
        self._preemptions = scheduler.preemptions
        cache = scheduler.cache
        metrics.EVICTIONS.inc(cache.evictions - self._evictions)
        self._evictions = cache.evictions
        metrics.CACHED_BLOCKS.set(cache.cached_blocks)
        metrics.COMPUTED_TOKENS.inc(plan.tokens)
        metrics.STEP_SECONDS.observe(seconds)
