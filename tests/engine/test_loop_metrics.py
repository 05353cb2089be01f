"""What a run leaves in the metrics is what it did."""

from benthic import metrics
from benthic.types import Abort, FinishReason, Request
from tests.engine.fake import FakeModel, fake_loop, greedy


def value(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


def test_metrics_follow_a_run() -> None:
    names = ("generation_tokens_total", "computed_tokens_total", "preemptions_total", "step_seconds_count")
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
    assert gained["step_seconds_count"] == steps
    assert gained["preemptions_total"] == loop.scheduler.preemptions > 0
    ended = {reason: value("benthic_requests_finished_total", reason=reason) - n for reason, n in reasons.items()}
    assert ended == {"stop": 0, "length": 3, "abort": 1, "error": 1}
    assert value("benthic_num_requests_running") == value("benthic_num_requests_waiting") == 0
    assert value("benthic_kv_blocks_used") == 0
