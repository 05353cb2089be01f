"""One engine on a virtual clock: the real scheduler and cache, and a machine whose steps take what a cost model says.

Nothing is computed; a request's answer is one id, repeated. Steps follow each other without a pause while there is
work, and each takes the machine's time for its shape, some noise or errors that were seen, and the host's.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benthic.engine.cost import CostModel, Shape
from benthic.engine.first_steps import Limits, calibrate
from benthic.errors import BenchError, BenthicError
from benthic.sim.policies import Policy, World
from benthic.sim.trace import Arrival
from benthic.types import Request, SamplingParams, StepPlan, StepResult

HOST_SECONDS = 150e-6  # of a step, planned and committed
ERRORS_TOGETHER = 100  # of recorded steps, on average


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps really take; the scheduler's own cost model has to find that out."""

    name: str
    cost: CostModel
    noise: float = 0.03  # standard deviation of a step's time, relative
    stall: float = 0.001  # share of steps that take five times as long
    errors: tuple[float, ...] = ()  # instead of both: relative errors of steps that followed each other
    host: float = HOST_SECONDS

    def steps(self, rng: random.Random) -> Callable[[Shape], float]:
        """What steps take, one after another. Errors come in pieces of the sequence they are, since a machine that is
        slow in one step often is in the next."""
        at = rng.randrange(max(len(self.errors), 1))

        def seconds(shape: Shape) -> float:
            nonlocal at
            if self.errors:
                at = rng.randrange(len(self.errors)) if rng.random() * ERRORS_TOGETHER < 1.0 else at + 1
                return self.cost.seconds(shape) * (1.0 + self.errors[at % len(self.errors)])
            slow = 5.0 if rng.random() < self.stall else 1.0
            return self.cost.seconds(shape) * slow * max(rng.gauss(1.0, self.noise), 0.5)

        return seconds


@dataclass(slots=True)
class Life:
    """What became of a request, seconds on the virtual clock."""

    arrival: Arrival
    begun: float | None = None  # the first of its rows is in a step
    tokens: list[float] = field(default_factory=list[float])  # when each was there
    ended: float | None = None
    cached: int = 0  # prompt tokens that were found
    error: BenthicError | None = None

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival.at

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass(slots=True)
class Outcome:
    policy: str
    lives: list[Life]
    seconds: float = 0.0  # until the last answer is complete
    steps: int = 0
    rows: int = 0
    preemptions: int = 0
    cost_error: float = 0.0


def simulate(trace: Sequence[Arrival], policy: Policy, world: World, machine: Machine, seed: int = 0) -> Outcome:
    """Run a trace, in order of time, to its end. Raises BenchError where steps do nothing any more."""
    took = machine.steps(random.Random(seed))
    cost = CostModel()
    calibrated = [0.0]

    def run(plan: StepPlan) -> None:
        calibrated[0] += took(Shape.of(plan))

    limits = Limits(world.slots, world.blocks, 128, world.token_budget, world.context)
    calibrate(cost, run, limits, clock=lambda: calibrated[0])
    scheduler = policy.build(world, cost)
    lives = [Life(arrival) for arrival in trace]
    outcome, now, coming, idle = Outcome(policy.name, lives), 0.0, 0, 0
    while coming < len(trace) or scheduler.unfinished:
        if not scheduler.unfinished:
            now = max(now, trace[coming].at)
        while coming < len(trace) and trace[coming].at <= now:
            scheduler.now = trace[coming].at
            scheduler.admit([request(coming, trace[coming])])
            coming += 1
        scheduler.now = now
        plan = scheduler.plan()
        for chunk in plan.chunks:
            if lives[chunk.request].begun is None:
                lives[chunk.request].begun = now
        shape = Shape.of(plan)
        seconds = took(shape) if plan.chunks else 0.0
        now += seconds + machine.host
        outcome.rows += plan.tokens
        if plan.chunks:
            outcome.steps += 1
            cost.observe(shape, seconds)
            idle = 0
        else:
            idle += 1
            if idle > 1000:
                raise BenchError(f"{policy.name} on this trace", f"{scheduler.unfinished} requests do not go on")
        drawn = [trace[chunk.request].reply for chunk in plan.chunks if chunk.sample]
        for event in scheduler.commit(plan, StepResult(drawn)):
            life = lives[event.request]
            life.tokens += [now] * len(event.tokens)
            if event.usage is not None:
                life.ended, life.error, life.cached = now, event.error, event.usage.cached_tokens
    outcome.seconds, outcome.preemptions, outcome.cost_error = now, scheduler.preemptions, cost.error
    return outcome


def request(number: int, arrival: Arrival, begin: float = 0.0) -> Request:
    """What the engine is asked. begin: the trace's first second on the engine's clock."""
    params, at = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True), begin + arrival.at
    deadline = None if arrival.patience is None else at + arrival.patience
    return Request(number, arrival.ids(), params, 0, arrival.priority, at, tenant=arrival.tenant, deadline=deadline)
