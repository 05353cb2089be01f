"""Where the loop's time goes: steps one by one beside steps begun ahead, the deterministic mode beside the usual one.

All engines stand side by side and take turns, so that what else the machine does falls on all of them alike. What is
measured is what users run: `engine.llm.LLM`, requests that decode together, and a prompt.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benthic.bench import report
from benthic.bench.report import Measure
from benthic.bench.step import Prompts, decode_rate, prefill_rate, with_room
from benthic.config import Config
from benthic.engine import batch as batches
from benthic.engine.llm import LLM
from benthic.engine.loop import StepTimes
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.registry import model_dir

OWN_BATCH, OWN_TARGET = 32, 150.0  # requests, and us a step that the loop itself may take then, on a CPU
CONTEXT = 64  # tokens of a prompt in the decode runs


@dataclass(frozen=True, slots=True)
class Options:
    batches: tuple[int, ...] = (1, 8, 32)
    tokens: int = 64  # new tokens a request
    prompt: int = 2048  # tokens of the prompt whose speed is measured
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the engines that are compared."""

    ahead: bool
    deterministic: bool

    @property
    def name(self) -> str:
        return ("ahead" if self.ahead else "one by one") + (", deterministic" if self.deterministic else "")


ARMS = tuple(Arm(ahead, deterministic) for deterministic in (False, True) for ahead in (False, True))


def run(config: Config, options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; `say` hears what is being done. Raises BenchError and what LLM raises."""
    text = ModelConfig.from_json(model_dir(config.model))
    head = report.header("loop", options.seed, {"model": config.model, "numerics": config.numerics})
    config = with_room(config, text, max(options.batches))
    measures: list[Measure] = []
    with ExitStack() as open_engines:
        say("engines")
        engines = {arm: open_engines.enter_context(LLM(config=_of(config, arm))) for arm in ARMS}
        threads, cpu = torch.get_num_threads(), engines[ARMS[0]].device.type == "cpu"
        prompts = Prompts(text.text.vocab_size, options.seed)
        for batch in options.batches:
            say(f"decode at batch {batch}")
            rates: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
            times: dict[Arm, list[StepTimes]] = {arm: [] for arm in ARMS}
            built: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
            for turn in range(options.repeats + 1):
                for arm, llm in engines.items():
                    with _building(built[arm]):
                        rate, steps = decode_rate(llm, prompts, batch, CONTEXT, options.tokens)
                    if turn:  # the first warms caches up
                        rates[arm].append(rate)
                        times[arm] += steps[1:]
            for arm in ARMS:
                measures += _of_steps(arm, batch, rates[arm], times[arm], built[arm], cpu)
        length = min(options.prompt, engines[ARMS[0]].model.max_positions - 1)
        say(f"prefill {length}")
        prefills: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
        for turn in range(options.repeats + 1):
            for arm, llm in engines.items():
                prefills[arm] += prefill_rate(llm, prompts, length, 1)[: 1 if turn else 0]
        for arm in ARMS:
            measures.append(_measure(f"prefill, {length} tokens, {arm.name}", prefills[arm], "tokens/s"))
    table = _rows(measures)
    return head | {"versions": report.versions(), "threads": threads, "measures": measures, "table": table}


def _of(config: Config, arm: Arm) -> Config:
    scheduler = replace(config.scheduler, ahead="on" if arm.ahead else "off")
    cache = replace(config.cache, prefix=False)  # the same prompt twice would be a hit
    return replace(config, scheduler=scheduler, cache=cache, deterministic=arm.deterministic)


@contextmanager
def _building(seconds: list[float]) -> Iterator[None]:
    """Inside this block `seconds` gets what each batch took to build, on a CPU."""
    build = batches.build

    def timed(*arguments: Any) -> Any:
        started = perf_counter()
        built = build(*arguments)
        seconds.append(perf_counter() - started)
        return built

    batches.build = timed
    try:
        yield
    finally:
        batches.build = build


def _of_steps(
    arm: Arm, batch: int, rates: list[float], times: list[StepTimes], built: list[float], cpu: bool
) -> list[Measure]:
    """What the steps of one engine at one batch say. Medians; us but for rates and shares."""
    own = [1e6 * step.own for step in times]
    idle = [100 * max(1 - step.device / step.period, 0.0) for step in times]
    rest = [1e6 * step.rest for step in times]
    target = OWN_TARGET if cpu and batch == OWN_BATCH else None
    found = [
        _measure(f"decode, batch {batch}, {arm.name}", rates, "tokens/s"),
        _measure(f"device idle, batch {batch}, {arm.name}", idle, "%", better="less"),
        _measure(
            f"planned and committed, batch {batch}, {arm.name}",
            own,
            "us",
            better="less",
            target=target,
            note="messages, blocks, chunks and draws; results, ends, keys of whole blocks, events",
        ),
        _measure(f"plan, batch {batch}, {arm.name}", [1e6 * step.plan for step in times], "us", better="less"),
        _measure(f"commit, batch {batch}, {arm.name}", [1e6 * step.commit for step in times], "us", better="less"),
        _measure(
            f"text, batch {batch}, {arm.name}",
            rest,
            "us",
            better="less",
            note="outside the loop: tokens to text, stop strings, pieces of streams, metrics",
        ),
    ]
    if built:
        took = [1e6 * each for each in built]
        found.append(_measure(f"batch built, batch {batch}, {arm.name}", took, "us", better="less", note="tensors"))
    return found


def _measure(
    name: str, samples: list[float], unit: str, *, better: str = "more", target: float | None = None, note: str = ""
) -> Measure:
    found = Measure(name=name, value=median(samples), unit=unit, better=better, n=len(samples))
    if target is not None:
        found["target"] = target
    if note:
        found["note"] = note
    if unit == "tokens/s":
        found["samples"] = samples
    return found


# ---- for a terminal and the pages ------------------------------------------------------------------------------------


def _rows(measures: list[Measure]) -> dict[str, dict[str, float]]:
    """Quantity, batch and unit -> engine -> value, in the order in which they were measured."""
    table: dict[str, dict[str, float]] = {}
    names = sorted([arm.name for arm in ARMS], key=len, reverse=True)
    for measure in measures:
        name = next(name for name in names if measure["name"].endswith(f", {name}"))
        table.setdefault(f"{measure['name'].removesuffix(f', {name}')}, {measure['unit']}", {})[name] = measure["value"]
    return table


def text(found: dict[str, Any]) -> str:
    """Both loops and both modes side by side."""
    machine, names = found["hardware"], [arm.name for arm in ARMS]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {found['threads']} threads, torch {found['versions']['torch']}",
        f"load before {found['load_before']:.1f}; other work on the machine spoils the numbers",
        "",
        f"{'':<38}" + "".join(f"{name:>26}" for name in names),
    ]
    for row, values in found["table"].items():
        lines.append(f"{row:<38}" + "".join(f"{values[name]:>26,.1f}" for name in names))
    return "\n".join(lines)
