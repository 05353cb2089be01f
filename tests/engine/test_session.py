"""Sessions: a growing sequence answers as its tokens do, and what it had stays cached."""

from pathlib import Path

import pytest

from benthic.engine.llm import LLM
from benthic.errors import BadField, EngineClosed
from benthic.testing.checkpoints import make_tiny
from benthic.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = make_tiny(tmp_path_factory.mktemp("session") / "tiny", sliding_window=8)
    with LLM(folder, numerics="float", cpu__threads=1, cache__blocks=12, scheduler__max_running=2) as llm:
        yield llm


def test_a_session_is_its_tokens(llm: LLM):
    ids = list(range(10, 210))
    with llm.session(ids) as session:
        first = session.generate(GREEDY)
        assert session.tokens == (*ids, *first.token_ids)
        session.append([5, 6, 7])
        second = session.generate(GREEDY)
        assert second.usage.cached_tokens == 128
        fork = session.fork()
        assert fork.generate(GREEDY).token_ids == session.generate(GREEDY).token_ids
        fork.close()
        fork.close()
        session.rewind(len(ids) + len(first.token_ids) + 3)
        assert session.generate(GREEDY).token_ids == second.token_ids
        with pytest.raises(BadField, match="tokens"):
            session.rewind(len(session.tokens) + 1)
    alone = llm.generate([[*ids, *first.token_ids, 5, 6, 7]], GREEDY, progress=False)[0]
    assert alone.token_ids == second.token_ids


def test_what_a_session_had_stays_when_others_need_room(llm: LLM):
    ids = list(range(1000, 1400))
    with llm.session(ids) as session:
        session.generate(GREEDY)
        for seed in range(4):
            llm.generate([list(range(seed * 300 + 2, seed * 300 + 602))], GREEDY, progress=False)
        session.append([9])
        assert session.generate(GREEDY).usage.cached_tokens == 384
    assert llm.loop.scheduler.cache.pinned == []


def test_a_session_outlives_its_engine_without_harm(llm: LLM):
    session = llm.session([1, 2, 3])
    session.close()
    closed = LLM(llm.path, numerics="float", cpu__threads=1)
    other = closed.session([1, 2, 3])
    closed.close()
    other.close()
    with pytest.raises(EngineClosed):
        other.generate(GREEDY)
