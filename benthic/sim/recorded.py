"""A trace that the real engine answers, beside simulations of that very run.

The engine is given the trace's requests at their times, and its steps are timed. A cost model is fitted to these steps,
and simulations of the same trace on the same scheduler take its word for what a step costs, off by what recorded steps
were off by, in pieces of a hundred or so. What differs between both is then what such a model does not know.
"""

import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from benthic import plots
from benthic.cache.spec import blocks_for
from benthic.config import Config
from benthic.engine.cost import CostModel, Shape
from benthic.engine.llm import LLM, build_scheduler
from benthic.engine.loop import Runs, StepTimes
from benthic.errors import BenchError
from benthic.sim.engine import Life, Machine, Outcome, request, simulate
from benthic.sim.policies import Policy, World
from benthic.sim.scenarios import measures, quantile, tail
from benthic.sim.trace import Arrival
from benthic.types import StepPlan, StepResult

TOLD = {  # of `measures`: name, unit, factor
    "itl_p50": ("ITL p50", "ms", 1e3),
    "itl_p99": ("ITL p99", "ms", 1e3),
    "itl_max": ("longest gap", "ms", 1e3),
    "ttft_p50": ("TTFT p50", "s", 1.0),
    "ttft_p99": ("TTFT p99", "s", 1.0),
    "output_tokens_per_second": ("throughput", "tokens/s", 1.0),
    "steps": ("steps", "", 1.0),
    "cost_error": ("usual error of the scheduler's cost model", "share", 1.0),
}


class Recording(NamedTuple):
    outcome: Outcome
    steps: list[tuple[Shape, float]]  # seconds of the machine's time
    host: float  # seconds of a step beside that, usually


def spelt(trace: Sequence[Arrival], words: Sequence[int]) -> list[Arrival]:
    """The same trace in a model's ids: prompts that begin alike still do, and no prompt holds an answer.

    words  the ids that prompts are made of.
    """
    found: list[Arrival] = []
    for arrival in trace:
        ids: list[int] = []
        for run, count in arrival.prompt:
            ids += random.Random(run).choices(words, k=count)
        prompt = tuple([(token, 1) for token in ids])
        rest = arrival.output, words[0], arrival.kind, arrival.tenant, arrival.priority, arrival.patience
        found.append(Arrival(arrival.at, prompt, *rest))
    return found


class _Watch:
    """A runner that says what it is given."""

    def __init__(self, runner: Runs, told: Callable[[StepPlan], None]):
        self._runner, self._told = runner, told

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._told(plan)
        return self._runner.start(plan)

    def close(self) -> None:
        self._runner.close()


def record(llm: LLM, trace: Sequence[Arrival]) -> Recording:
    """Answer the requests of a trace of the model's ids, each at its time. Nobody else may use the engine meanwhile."""
    loop, runner = llm.loop, llm.loop.runner
    lives = [Life(arrival) for arrival in trace]
    outcome, steps, beside = Outcome("recorded", lives), list[tuple[Shape, float]](), list[float]()
    begun: deque[Shape] = deque()
    last: StepTimes | None = loop.times[-1] if loop.times else None
    preempted, begin, now, coming = loop.scheduler.preemptions, loop.clock(), 0.0, 0

    def told(plan: StepPlan) -> None:
        if not plan.chunks:
            return
        begun.append(Shape.of(plan))
        for chunk in plan.chunks:
            if lives[chunk.request].begun is None:
                lives[chunk.request].begun = loop.clock() - begin

    loop.runner = _Watch(runner, told)
    try:
        with tqdm(total=len(trace), unit="request", file=sys.stderr, disable=None, leave=False) as bar:
            while coming < len(trace) or loop.busy:
                now = loop.clock() - begin
                while coming < len(trace) and trace[coming].at <= now:
                    loop.inbox.put(request(coming, trace[coming], begin))
                    coming += 1
                if not loop.busy:
                    time.sleep(trace[coming].at - now)
                    continue
                loop.step()
                now = loop.clock() - begin
                if loop.times and loop.times[-1] is not last:
                    last, shape = loop.times[-1], begun.popleft()
                    assert last.tokens == shape.rows + shape.decodes, f"a step of {last.tokens} rows, told as {shape}"
                    took = last.period if loop.ahead else last.run  # ahead, the host's work is not in between
                    steps.append((shape, took))
                    beside.append(last.period - took)
                    outcome.rows += last.tokens
                for event in loop.outbox.take():
                    life = lives[event.request]
                    life.tokens += [now] * len(event.tokens)
                    if event.usage is not None:
                        life.ended, life.error, life.cached = now, event.error, event.usage.cached_tokens
                        bar.update()
    finally:
        loop.runner = runner
    outcome.seconds, outcome.steps = now, len(steps)
    outcome.preemptions, outcome.cost_error = loop.scheduler.preemptions - preempted, loop.scheduler.cost.error
    return Recording(outcome, steps, median(beside) if beside else 0.0)


def machine_of(name: str, recording: Recording) -> Machine:
    """The machine that took these steps: all of them weigh alike. Raises BenchError."""
    cost = CostModel(memory=math.inf)
    for shape, seconds in recording.steps:
        cost.observe(shape, seconds)
    cost.settle()
    if not cost.ready:
        raise BenchError("a recorded run", "the trace has no requests")
    errors = tuple([seconds / cost.seconds(shape) - 1.0 for shape, seconds in recording.steps])
    return Machine(name, cost, errors=errors, host=recording.host)


def run(
    config: Config,
    name: str,
    make: Callable[[], list[Arrival]],
    *,
    repeats: int = 5,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One trace both ways, as one object. name: of the trace, which `make` makes; repeats: simulations."""
    with LLM(config=config) as llm:
        model, scheduler = llm.model, llm.loop.scheduler
        trace = spelt(make(), [token for token in range(3, model.vocab_size) if token != model.image_token_id])
        for i, arrival in enumerate(trace):
            scheduler.check(request(i, arrival))
        say(f"recording {name}, {len(trace)} requests")
        recording = record(llm, trace)
        machine = machine_of(f"{Path(config.model).name} on {llm.device.type}", recording)
        limit, cache = scheduler.max_context_tokens, scheduler.cache
        blocks = min(blocks_for(limit), cache.blocks.usable)
        world = World(cache.slots.usable, blocks, scheduler.token_budget, limit, model.windows)
        policy = Policy("simulated", lambda _, cost: build_scheduler(model, config, cost))
        simulated: list[Outcome] = []
        for i in range(repeats):
            say(f"simulation {i + 1} of {repeats}")
            simulated.append(simulate(trace, policy, world, machine, seed + i))
    told, guessed = measures(recording.outcome), [measures(outcome) for outcome in simulated]
    ordered = sorted(machine.errors)
    return {
        "trace": {
            "name": name,
            "requests": len(trace),
            "prompt_tokens": sum(arrival.prompt_tokens for arrival in trace),
            "output_tokens": sum(arrival.output for arrival in trace),
        },
        "machine": {
            "name": machine.name,
            "coefficients": machine.cost.now._asdict(),
            "host": machine.host,
            "errors": {f"{share:g}": quantile(ordered, share) for share in (0.01, 0.1, 0.5, 0.9, 0.99)},
        },
        "recorded": told,
        "simulated": guessed,
        "tails": {
            what: {"recorded": _tail(values([recording.outcome])), "simulated": _tail(values(simulated))}
            for what, values in (("gap", _gaps), ("first", _firsts))
        },
        "measures": [_measure(key, told, guessed) for key in TOLD],
    }


def _tail(values: Sequence[float]) -> list[tuple[float, float]]:
    return tail(values, least=1 / max(len(values), 2))


def _gaps(outcomes: Sequence[Outcome]) -> list[float]:
    return [gap for outcome in outcomes for life in outcome.lives for gap in life.gaps]


def _firsts(outcomes: Sequence[Outcome]) -> list[float]:
    return [life.ttft for outcome in outcomes for life in outcome.lives if life.tokens]


def _measure(key: str, told: dict[str, float], guessed: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What was recorded, and as the estimate the middle of the simulations; their lowest and highest."""
    name, unit, factor = TOLD[key]
    values = [factor * each[key] for each in guessed]
    low, middle, high = min(values), median(values), max(values)
    return {"name": name, "value": factor * told[key], "unit": unit, "estimate": middle, "low": low, "high": high}


def table(found: dict[str, Any]) -> str:
    """Lines for a terminal."""
    trace = found["trace"]
    lines = [
        f"{trace['name']}: {trace['requests']} requests, {trace['prompt_tokens']} tokens of prompts, "
        f"{trace['output_tokens']} of answers; {found['machine']['name']}",
        f"{'':<45}{'recorded':>12}{'simulated':>12}{'from':>10}{'to':>10}{'ratio':>8}",
    ]
    for m in found["measures"]:
        numbers = f"{m['value']:>12.4g}{m['estimate']:>12.4g}{m['low']:>10.4g}{m['high']:>10.4g}"
        ratio = f"{m['estimate'] / m['value']:>8.2f}" if m["value"] else ""
        lines.append(f"{', '.join(filter(None, (m['name'], m['unit']))):<45}{numbers}{ratio}")
    return "\n".join(lines)


def picture(found: dict[str, Any], path: Path) -> Path:
    """Gaps between tokens, and first tokens: the share that is longer, both ways. Raises MissingDependency."""
    pyplot = plots.pyplot()
    from matplotlib.ticker import NullFormatter

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    labels = {"gap": ("gap between tokens, ms", 1e3), "first": ("time to first token, s", 1.0)}
    for axis, (what, (label, factor)) in zip(axes, labels.items(), strict=True):
        for way, style in (("recorded", {"color": "black"}), ("simulated", {"linestyle": "--"})):
            if points := found["tails"][what][way]:
                shares, values = zip(*points, strict=True)
                axis.plot([factor * value for value in values], shares, label=way, **style)
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="share that is longer")
        axis.xaxis.set_minor_formatter(NullFormatter())  # they run into each other within a decade or two
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(f"{found['machine']['name']}, {found['trace']['name']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
