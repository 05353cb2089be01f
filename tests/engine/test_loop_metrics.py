"""What a run leaves in the metrics is what it did."""

from time import sleep
from types import SimpleNamespace

import pytest

from benthic import metrics
from benthic.cache.storage import Storage
from benthic.engine import loop as engine
from benthic.models.base import Batch
from benthic.types import Abort, FinishReason, Request
from tests.engine.fake import FakeModel, fake_loop, greedy


def value(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


def test_metrics_follow_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TELL_SECONDS", 0.0)
    names = ("device_busy_seconds_total", "step_host_seconds_count", "step_host_seconds_sum")
    names += ("generation_tokens_total", "computed_tokens_total", "preemptions_total", "step_seconds_count")
    before = {name: value("benthic_" + name) for name in names}
    reasons = {reason: value("benthic_requests_finished_total", reason=reason) for reason in (*FinishReason, "error")}

    loop = fake_loop(blocks=14, slots=4, model=FakeModel())
    for i in range(3):
        loop.inbox.put(Request(i, (1, 2, 3, 4, 5), greedy(max_tokens=25, ignore_eos=True), seed=i))
    loop.inbox.put(Request(3, (), greedy(), seed=0))  # refused: empty
    loop.inbox.put(Request(4, (1, 2), greedy(max_tokens=30), seed=0))
    loop.inbox.put(Abort(4))
    events, steps, computed = [], 0, 0
    loop.step()
    assert value("benthic_num_requests_running") == len(loop.scheduler.running) > 0
    assert value("benthic_kv_blocks") == 13
    assert value("benthic_kv_blocks_used") == 13 - loop.scheduler.cache.free_blocks > 0
    while loop.busy:
        loop.step()
    events = loop.outbox.take()
    steps, computed = len(loop.times), sum(times.tokens for times in loop.times)

    gained = {name: value("benthic_" + name) - before[name] for name in names}
    assert gained["generation_tokens_total"] == sum(len(event.tokens) for event in events) == 75
    assert gained["computed_tokens_total"] == computed
    assert gained["step_seconds_count"] == gained["step_host_seconds_count"] == steps
    assert gained["step_host_seconds_sum"] == pytest.approx(sum(times.plan + times.commit for times in loop.times))
    assert gained["device_busy_seconds_total"] == pytest.approx(sum(times.device for times in loop.times))
    for times in loop.times:  # nothing else takes a step's time, and the device is busy only while somebody waits
        assert 0 < times.device <= times.run
        assert times.period >= times.run + times.plan
    assert gained["preemptions_total"] == loop.scheduler.preemptions > 0
    ended = {reason: value("benthic_requests_finished_total", reason=reason) - n for reason, n in reasons.items()}
    assert ended == {"stop": 0, "length": 3, "abort": 1, "error": 1}
    assert value("benthic_num_requests_running") == value("benthic_num_requests_waiting") == 0
    assert value("benthic_kv_blocks_used") == 0


def test_between_tellings_a_run_costs_the_metrics_nothing() -> None:
    """At rest all is told, whatever the time since the last telling."""
    before = value("benthic_generation_tokens_total"), value("benthic_computed_tokens_total")
    loop = fake_loop(model=FakeModel())
    loop._told = engine.perf_counter() + 1e6
    loop.inbox.put(Request(0, (1, 2, 3), greedy(max_tokens=9, ignore_eos=True), seed=0))
    for _ in range(8):
        loop.step()
    assert value("benthic_generation_tokens_total") == before[0]
    loop.step()
    assert not loop.busy
    assert value("benthic_generation_tokens_total") - before[0] == 9
    assert value("benthic_computed_tokens_total") - before[1] == 3 + 8


def test_the_idle_share_is_the_time_between_steps() -> None:
    """A device that takes 4 ms a step and a host that takes 4 ms more: half of the time, or little of it, is idle."""
    shares: dict[bool, float] = {}
    for ahead in (False, True):
        loop = fake_loop(ahead=ahead, model=Slow())
        for again in range(2):
            loop.inbox.put(Request(again, (1, 2, 3), greedy(max_tokens=40, ignore_eos=True), seed=0))
            while loop.busy:
                loop.step()
                sleep(0.004)
            sleep(0.2)  # a pause without requests is no idle time
        loop.close()
        shares[ahead] = 1 - sum(times.device for times in loop.times) / sum(times.period for times in loop.times)
        assert value("benthic_device_idle_ratio") == pytest.approx(shares[ahead], abs=0.2)
    assert 0.25 < shares[False] < 0.6
    assert shares[True] < 0.7 * shares[False]


class Slow(FakeModel):
    def forward(self, batch: Batch, memory: Storage) -> SimpleNamespace:
        sleep(0.004)
        return super().forward(batch, memory)
