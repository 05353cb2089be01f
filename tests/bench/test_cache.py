"""The cache bench on small sizes: numbers that must be what they say, and that see the cache at all."""

from pathlib import Path

import pytest

from benthic.bench import cache
from benthic.config import load
from benthic.testing.checkpoints import make_tiny


def values(measures: list) -> dict[str, float]:
    return {m["name"]: m["value"] for m in measures}


def test_keys_of_a_short_prompt():
    found = values(cache.keys(seed=0, tokens=12_800))
    assert 0 < found["SHA-256 alone"] < found["hash a block of 128"] < 1000
    assert 0 < found["look up 12800 tokens"] < 1000


def test_a_day_is_the_same_every_time_and_larger_pools_find_more():
    prompts = list(cache.requests_of_a_day(3, sessions=40, once=100))
    assert prompts == list(cache.requests_of_a_day(3, sessions=40, once=100))
    for eviction in ("lru", "s3-fifo"):
        shares = [cache.hit_share(prompts, eviction, blocks) for blocks in (100, 400, 20_000)]
        assert 0 < shares[0] < shares[1] < shares[2] < 1
    exact = 0  # an unlimited pool finds the longest beginning that came before
    seen: set[tuple[int, ...]] = set()
    for prompt in prompts:
        exact += max((n for n in range(len(prompt) + 1) if tuple(prompt[:n]) in seen), default=0)
        seen |= {tuple(prompt[:n]) for n in range(1, len(prompt) + 1)}
    assert shares[2] == exact / sum(map(len, prompts))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cache") / "tiny", sliding_window=8)


def test_a_hit_takes_less_time_and_agents_find_their_turns(tiny: Path):
    config = load(overrides={"model": str(tiny), "numerics": "float", "cpu.threads": 1})
    options = cache.Options(prompt=700, repeats=1, agents=2, turns=2)
    found = values(cache.hits(config, options, lambda _: None))
    assert found["hit over cold, snapshot"] < 0.6
    assert found["hit over cold, replay"] < 0.6
    trace = values(cache.agents(config, options, lambda _: None))
    assert 0.3 < trace["agents, prompt tokens found"] < 1
    assert trace["agents, on over off"] > 1


def test_divergence_and_agreement():
    even = [(1, -0.6931471805599453), (2, -0.6931471805599453)]
    assert cache._divergence(even, even) == pytest.approx(0.0, abs=1e-6)
    skew = [(1, -0.2876820724517809), (2, -1.3862943611198906)]  # 3/4, 1/4
    assert cache._divergence(skew, even) == pytest.approx(0.1438410362, abs=1e-4)
    assert cache._agreed([1, 2, 3], [1, 2, 4]) == 2
    assert cache._agreed([1, 2], [1, 2]) == 2


def test_ways_to_answer_behind_a_hit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "WAYS", (("snapshot", "halo"), ("replay", "halo")))
    documents = Path(cache.__file__).parent / "eval" / "documents.jsonl.xz"
    text = "The cat sat by the door. " * 40
    needles = ((f"{text} The code of the red box is 4711. {text} What is the code of the red box?", "4711"),)
    options = cache.Options(documents=3, data=documents, needles=needles)
    found = values(cache.modes(load(overrides={"model": "minnow", "cpu.threads": 1}), options, lambda _: None))
    assert found["snapshot, halo: KL of the next token"] == 0
    assert found["snapshot, halo: greedy tokens alike of 32"] == 32
    assert found["snapshot, halo: needles of 1 found"] == found["cold: needles of 1 found"]
    assert 0 < found["replay, halo: KL of the next token"] < 1
    assert 0 < found["replay, halo: bits per byte it adds"] < found["replay, halo: KL of the next token"]
    assert found["replay, halo: tokens found"] > 0.5
