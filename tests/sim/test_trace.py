"""Traces: what generators promise, and the Mooncake form there and back."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benthic.errors import BadTrace
from benthic.sim import trace
from benthic.sim.trace import HASHED_TOKENS, VOCAB_SIZE, Arrival, Lengths


def line(**changes: object) -> dict[str, object]:
    return {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 2], **changes}


def test_a_line_becomes_its_tokens():
    (first, second) = trace.parse([line(hash_ids=[4, 9, 3]), line(timestamp=20, input_length=1024, hash_ids=[4, 9])])
    assert (first.at, second.at) == (0.02, 1.5)  # in order of time
    assert len(first.ids()) == first.prompt_tokens == 1024
    assert second.ids()[:1024] == first.ids()
    assert len(second.ids()) == 1100
    assert second.output == 7
    assert len({second.reply, first.reply} & set(second.ids())) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"timestamp": -1}, "timestamp is -1"),
        ({"input_length": 0}, "input_length is 0"),
        ({"output_length": None}, "output_length is None"),
        ({"output_length": True}, "output_length is True"),
        ({"hash_ids": [1, 2]}, "hash_ids has 2 entries, want 3 for 1100 tokens"),
        ({"hash_ids": [1, 2, "3"]}, "want a list of integers"),
    ],
)
def test_a_bad_line_is_named(changes: dict[str, object], says: str, tmp_path: Path):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps(line()) + "\n" + json.dumps(line(**changes)) + "\n")
    with pytest.raises(BadTrace, match=says) as caught:
        trace.read(file)
    assert "line 2" in str(caught.value)


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(BadTrace, match=r"nowhere\.jsonl is no trace"):
        trace.read(tmp_path / "nowhere.jsonl")
    (tmp_path / "x").write_text("{}\n{\n")
    with pytest.raises(BadTrace, match="line 2"):
        trace.read(tmp_path / "x")
    with pytest.raises(BadTrace, match="want an object"):
        trace.parse([[]])


def test_made_up_conversations_come_back_with_what_they_said(tmp_path: Path):
    lines = trace.conversations(3, seconds=600, rate=0.3)
    trace.write(tmp_path / "deep" / "t.jsonl", lines)
    arrivals = trace.read(tmp_path / "deep" / "t.jsonl")
    assert len(arrivals) == len(lines) > 100
    assert lines == trace.conversations(3, seconds=600, rate=0.3)
    assert lines != trace.conversations(4, seconds=600, rate=0.3)
    seen: set[int] = set()
    again = tokens = 0
    for one in lines:
        again += HASHED_TOKENS * len(seen.intersection(one["hash_ids"]))
        tokens += one["input_length"]
        seen.update(one["hash_ids"])
    assert 0.2 < again / tokens < 0.8


def everything(seed: int) -> list[Arrival]:
    lengths = Lengths(50, 20, 400)
    return trace.merged(
        trace.poisson(seed, seconds=40, rate=5.0, lengths=lengths),
        trace.poisson(seed, seconds=40, rate=1.0, lengths=lengths, tenant="other"),
        trace.bursts(seed, seconds=40, every=10, size=6, lengths=lengths),
        trace.long_prompts(seed, seconds=40, every=15, tokens=5000),
        trace.agents(seed, seconds=40, sessions=20),
    )


def test_generators_are_seeded_and_in_order_and_share_only_what_they_should():
    arrivals = everything(1)
    assert arrivals == everything(1) != everything(2)
    assert [a.at for a in arrivals] == sorted(a.at for a in arrivals)
    assert all(0 <= token < VOCAB_SIZE and count > 0 for a in arrivals for token, count in a.prompt)
    owners: dict[int, set[str]] = {}
    for a in arrivals:
        for token, _ in a.prompt:
            owners.setdefault(token, set()).add(a.kind + a.tenant)
    assert all(len(kinds) == 1 for kinds in owners.values())
    alone = [a.prompt[0][0] for a in arrivals if a.kind != "agent"]
    assert len(set(alone)) == len(alone)
    assert len({a.reply for a in arrivals}) == len(arrivals)
    assert 120 < sum(a.kind == "chat" and not a.tenant for a in arrivals) < 280


def test_an_agents_turn_begins_with_the_one_before_it_and_its_answer():
    sessions: dict[tuple[int, int], list[Arrival]] = {}
    for a in trace.agents(5, seconds=200, sessions=20):
        sessions.setdefault(a.prompt[1], []).append(a)
    assert max(map(len, sessions.values())) > 3
    for turns in sessions.values():
        for before, after in pairwise(turns):
            assert after.at > before.at
            assert after.prompt[: len(before.prompt) + 1] == (*before.prompt, (before.reply, before.output))
