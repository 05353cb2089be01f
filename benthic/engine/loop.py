"""The heartbeat: receive, plan, run, commit, emit. One step at a time; the caller decides when."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import NamedTuple, Protocol

from benthic import metrics
from benthic.engine.scheduler import Scheduler
from benthic.types import Abort, Request, StepPlan, StepResult, TokenEvent

_STEPS_KEPT = 4096


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
    """What computes a plan: `runner.Runner`, or a scripted stand-in."""

    def run(self, plan: StepPlan) -> StepResult: ...


class StepTimes(NamedTuple):
    """Where one step's time went, seconds; how large it was."""

    requests: int
    tokens: int
    plan: float
    run: float
    commit: float


class Loop:
    """The synchronous loop."""

    def __init__(self, scheduler: Scheduler, runner: Runs, clock: Callable[[], float] = monotonic):
        """clock: seconds that only go forward, for what lives a certain time."""
        self.scheduler, self.runner, self.clock = scheduler, runner, clock
        self.inbox, self.outbox = Inbox(), Outbox()
        self.times: deque[StepTimes] = deque(maxlen=_STEPS_KEPT)  # the last steps, newest last
        self._preemptions = 0  # of the scheduler, as far as they are counted

    @property
    def busy(self) -> bool:
        """Would a step do anything?"""
        return bool(len(self.inbox) or self.scheduler.unfinished or self.scheduler.has_news)

    def settle(self) -> None:
        """Take messages and send what they cause, without a step."""
        self.scheduler.admit(self.inbox.drain())
        self._let_go()
        self._send(self.scheduler.take_news())

    def step(self) -> None:
        """One step. If the runner raises, the step's sequences wait to be computed again and the error goes on."""
        begun = perf_counter()
        self.scheduler.now = self.clock()
        self.scheduler.admit(self.inbox.drain())
        plan = self.scheduler.plan()
        planned = perf_counter()
        with self._discard_on_error(plan):
            result = self.runner.run(plan)
        ran = perf_counter()
        self._send(self.scheduler.commit(plan, result))
        if not self.scheduler.unfinished:  # no other plan may come
            self._let_go()
        done = perf_counter()
        self.times.append(StepTimes(len(plan.chunks), plan.tokens, planned - begun, ran - planned, done - ran))
        self._measure(plan, done - begun)

    def _let_go(self) -> None:
        """Tell the runner of image rows that nobody reads any more."""
        plan = self.scheduler.plan_over()
        if plan is not None:
            self.runner.run(plan)

    def _send(self, events: list[TokenEvent]) -> None:
        self.outbox.send(events)
        metrics.GENERATION_TOKENS.inc(sum(len(event.tokens) for event in events))
        for event in events:
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
        metrics.COMPUTED_TOKENS.inc(plan.tokens)
        metrics.STEP_SECONDS.observe(seconds)

    @contextmanager
    def _discard_on_error(self, plan: StepPlan) -> Iterator[None]:
        ran = False
        try:
            yield
            ran = True
        finally:
            if not ran:
                self.scheduler.discard(plan)
