"""Every metric, declared once: name, base unit, labels from closed sets, and where it is measured.

The engine brings its own up to date twice a second and whenever it comes to rest.

They are prometheus-client objects in a registry of their own; `exposition` is what a scraper reads. Names follow the
ones that users of other engines know, with the prefix `benthic_`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY = CollectorRegistry(auto_describe=True)


class Declared(NamedTuple):
    """One row of docs/metrics.md."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


DECLARED: list[Declared] = []


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    DECLARED.append(Declared(name, "counter", tuple(labels), help))
    return Counter(name, help, labels, registry=REGISTRY)


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    DECLARED.append(Declared(name, "gauge", tuple(labels), help))
    return Gauge(name, help, labels, registry=REGISTRY)


def histogram(name: str, help: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    DECLARED.append(Declared(name, "histogram", tuple(labels), help))
    return Histogram(name, help, labels, buckets=buckets, registry=REGISTRY)


SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)

REQUESTS_WAITING = gauge("benthic_num_requests_waiting", "completions in the queue, after a step is committed")
REQUESTS_RUNNING = gauge("benthic_num_requests_running", "completions that hold a slot, after a step is committed")
KV_BLOCKS_USED = gauge("benthic_kv_blocks_used", "blocks of the KV pool in use, after a step is committed")
KV_BLOCKS = gauge("benthic_kv_blocks", "blocks of the KV pool, set with every step")
PREEMPTIONS = counter("benthic_preemptions_total", "running completions whose blocks were taken back by the scheduler")
IMAGES_READ = counter(
    "benthic_images_read_total", "images that went through the vision tower, repeats in a request once"
)
COMPUTED_TOKENS = counter("benthic_computed_tokens_total", "rows the model computed, recomputed ones included")
GENERATION_TOKENS = counter("benthic_generation_tokens_total", "tokens produced, counted as their step is committed")
PROMPT_TOKENS = counter("benthic_prompt_tokens_total", "prompt tokens of completions that ended")
CACHED_PROMPT_TOKENS = counter(
    "benthic_cached_prompt_tokens_total", "of these, tokens whose blocks were found in the cache"
)
PREFIX_MISSES = counter(
    "benthic_prefix_misses_total",
    "completions that ended and had found less than all of their prompt, by what stopped the search",
    ["reason"],
)
EVICTIONS = counter("benthic_evicted_blocks_total", "cached blocks given up to make room")
CACHED_BLOCKS = gauge("benthic_cached_blocks", "blocks that a later prompt may find, after a step is committed")
REQUESTS_FINISHED = counter(
    "benthic_requests_finished_total",
    "completions that ended, as their last event is made; reason: stop, length, abort or error",
    ["reason"],
)
STEP_SECONDS = histogram("benthic_step_seconds", "one engine step, from plan to commit", SECONDS)
HOST_SECONDS = histogram(
    "benthic_step_host_seconds",
    "what the loop itself adds to a step: messages, plan, commit, events; the runner left out",
    (2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1),
)
DEVICE_SECONDS = counter("benthic_device_busy_seconds_total", "time in which the device was busy with steps")
DEVICE_IDLE = gauge(
    "benthic_device_idle_ratio",
    "share of the time between the ends of steps in which the device was not busy, over about the last 50 steps; "
    "time without requests does not count",
)
STEP_COST_ERROR = gauge(
    "benthic_step_cost_error_ratio",
    "how far a step's time usually is from the predicted one, over the predicted; as steps are committed",
)


def exposition() -> str:
    """All metrics in the text format that Prometheus reads."""
    return generate_latest(REGISTRY).decode()


def markdown() -> str:
    """The page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- generated from benthic/metrics.py by `make docs`; edit there -->",
        "",
        "`benthic.metrics.exposition()` returns all of them in the Prometheus text format. Units are seconds, tokens,",
        "blocks and requests. The engine brings its own up to date twice a second and whenever it comes to rest.",
        "",
        "| name | kind | labels | measured |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels) or '-'} | {row.help} |"
        for row in DECLARED
    ]
    return "\n".join(lines) + "\n"
