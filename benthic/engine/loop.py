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

TELL_SECONDS = 0.5  # that metrics may lag behind while steps run
_STEPS_KEPT = 4096
_IDLE_STEPS = 50  # over which the idle share is averaged
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


class StepTimes(NamedTuple):
    """Where one step's time went, seconds; how large it was."""

    requests: int
    tokens: int
    plan: float  # messages taken, and what to compute decided
    begin: float  # until the runner had begun it; on a CPU, without steps begun ahead, that is all its work
    wait: float  # for its result
    commit: float  # result taken, events made and sent
    device: float  # that the device was busy with it
    period: float  # from the end of the step before, or, when there was nothing to do, from its own beginning

    @property
    def run(self) -> float:
        """What the runner took of the loop's time."""
        return self.begin + self.wait

    @property
    def own(self) -> float:
        """The loop's own cost: planned and committed."""
        return self.plan + self.commit

    @property
    def rest(self) -> float:
        """Between steps: what is done with their events, text above all."""
        return max(self.period - self.own - self.run, 0.0)


class _Flight(NamedTuple):
    """A step that runs."""

    plan: StepPlan
    tokens: int  # rows of it
    result: Callable[[], StepResult]
    began: float
    plan_seconds: float
    begin_seconds: float


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
        self._since = 0.0  # from when on there has been something to do without a pause, or the last step ended
        self.times: deque[StepTimes] = deque(maxlen=_STEPS_KEPT)  # the last steps, newest last
        self._idle = 0.0  # share of the time, over the last steps, in which the device had nothing to do
        # what the metrics do not say yet, and since when
        self._told = 0.0
        self._tokens = self._preemptions = self._evictions = 0
        self._ended: list[TokenEvent] = []
        self._steps: list[tuple[StepTimes, float]] = []  # times, and seconds from plan to commit

    @property
    def busy(self) -> bool:
        """Would a step do anything?"""
        return bool(len(self.inbox) or self.scheduler.unfinished or self.scheduler.has_news or self._flight)

    def settle(self) -> None:
        """Take messages and send what they cause, without a step."""
        self.scheduler.admit(self.inbox.drain())
        self._let_go()
        self._send(self.scheduler.take_news())
        if not self.scheduler.unfinished:
            self._tell(perf_counter())

    def step(self) -> None:
        """One step further. If the runner raises, the step's sequences wait to be computed again and the error goes on.

        Ahead, that is: the next step is begun, and the one that runs is waited for and committed.
        """
        begun = perf_counter()
        if self._flight is None and not self.scheduler.unfinished:
            self._since = begun
        self.scheduler.now = self.clock()
        messages = self.inbox.drain()
        if messages:
            self.scheduler.admit(messages)
        plan = self.scheduler.plan()
        planned = perf_counter()
        before, self._flight = self._flight, None
        try:
            result = self.runner.start(plan)
        except BaseException:
            self.scheduler.discard(plan)
            self._flight = before
            raise
        new = None
        if plan.chunks:
            tokens, now = self.scheduler.planned_tokens, perf_counter()
            new = _Flight(plan, tokens, result, begun, planned - begun, now - planned)
        if not self.ahead:
            self._land(new)
        else:
            self._flight = new
            self._land(before)
        at_rest = self._flight is None and not self.scheduler.unfinished  # no other plan may come
        if at_rest:
            self._let_go()
        if at_rest or begun - self._told > TELL_SECONDS:
            self._tell(begun)

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
        if plan.images:
            metrics.IMAGES_READ.inc(sum(len({image.digest for image in images}) for _, images in plan.images))
        if flight.tokens > len(plan.chunks) or plan.step % _DECODES_SHOWN == 0:  # decode steps are many and alike
            self._learn(plan, ran - max(flight.began, self._landed))
        period, self._since, self._landed = ran - self._since, ran, ran
        done = perf_counter()
        spent = flight.plan_seconds, flight.begin_seconds, ran - waited, done - ran, result.device_seconds, period
        times = StepTimes(len(plan.chunks), flight.tokens, *spent)
        self.times.append(times)
        self._steps.append((times, done - flight.began))

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """Show the cost model a step that is over."""
        cost = self.scheduler.cost
        if cost.ready and not plan.images:
            cost.observe(Shape.of(plan), seconds)

    def _let_go(self) -> None:
        """Tell the runner of image rows that nobody reads any more."""
        plan = self.scheduler.plan_over()
        if plan is not None:
            self.runner.start(plan)()

    def _send(self, events: list[TokenEvent]) -> None:
        self.outbox.send(events)
        tokens = 0
        for event in events:
            tokens += len(event.tokens)
            if event.usage is not None:
                self._ended.append(event)
        self._tokens += tokens

    def _tell(self, now: float) -> None:
        """Bring the metrics up to date. Not with every step: it costs as much as planning one."""
        self._told = now
        metrics.GENERATION_TOKENS.inc(self._tokens)
        self._tokens = 0
        for event in self._ended:
            assert event.usage is not None
            metrics.PROMPT_TOKENS.inc(event.usage.prompt_tokens)
            metrics.CACHED_PROMPT_TOKENS.inc(event.usage.cached_tokens)
            if event.usage.miss is not None:
                metrics.PREFIX_MISSES.labels(event.usage.miss.value).inc()
            reason = "error" if event.finish is None else event.finish.value
            metrics.REQUESTS_FINISHED.labels(reason).inc()
        self._ended.clear()
        for times, seconds in self._steps:
            metrics.COMPUTED_TOKENS.inc(times.tokens)
            metrics.STEP_SECONDS.observe(seconds)
            metrics.HOST_SECONDS.observe(times.own)
            metrics.DEVICE_SECONDS.inc(times.device)
            idle = max(1.0 - times.device / max(times.period, 1e-9), 0.0)
            self._idle += (idle - self._idle) / _IDLE_STEPS
        self._steps.clear()
        metrics.DEVICE_IDLE.set(self._idle)
        scheduler, cache = self.scheduler, self.scheduler.cache
        metrics.REQUESTS_WAITING.set(scheduler.waiting)
        metrics.REQUESTS_RUNNING.set(len(scheduler.running))
        metrics.KV_BLOCKS.set(cache.blocks.usable)
        metrics.KV_BLOCKS_USED.set(cache.blocks.usable - cache.blocks.free)
        metrics.CACHED_BLOCKS.set(cache.cached_blocks)
        metrics.PREEMPTIONS.inc(scheduler.preemptions - self._preemptions)
        metrics.EVICTIONS.inc(cache.evictions - self._evictions)
        self._preemptions, self._evictions = scheduler.preemptions, cache.evictions
        if scheduler.cost.ready:
            metrics.STEP_COST_ERROR.set(scheduler.cost.error)
