"""LLM: prompts in, completions out; streams, stop strings, conversations, limits, interruption."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benthic import SamplingParams
from benthic.config import Config
from benthic.engine import llm as engine
from benthic.engine.llm import LLM, Completion, Piece
from benthic.errors import (
    BadField,
    BadMessages,
    BadSetting,
    DeadlinePassed,
    DeviceUnavailable,
    EmptyPrompt,
    EngineClosed,
    MissingCheckpointFile,
    NonFiniteLogits,
    PromptTooLong,
    ReplyFailed,
    TokenOutOfRange,
    UnknownKey,
    UnknownModel,
)
from benthic.testing.checkpoints import make_tiny
from benthic.testing.tokenizers import write_tokenizer
from benthic.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    scratch = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(scratch, 4096)
    classes = int(Tokenizer.from_dir(scratch).engram_classes().max()) + 1
    make_tiny(path, engram_compressed_vocab_size=classes)
    write_tokenizer(path, 4096)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, cpu__threads=1, scheduler__max_context_tokens=300, cache__blocks=20) as llm:
        yield llm


def at_rest(llm: LLM) -> bool:
    llm.loop.scheduler.check_invariants()
    return not llm.loop.scheduler.unfinished and llm.loop.scheduler.cache.slots.free == 32 and not llm._sessions


# ---- completions -----------------------------------------------------------------------------------------------------


def test_a_completion(llm: LLM):
    (done,) = llm.generate("Once upon a time", replace(GREEDY, logprobs=2, prompt_logprobs=0))
    assert llm.tokenizer is not None
    assert done.prompt_token_ids == tuple(llm.tokenizer.encode("Once upon a time"))
    assert len(done.token_ids) == 12
    assert done.text == llm.tokenizer.decode(done.token_ids)
    assert done.finish_reason == "length"
    assert done.usage[:2] == (len(done.prompt_token_ids), 12)
    assert [entry.token for entry in done.logprobs] == list(done.token_ids)
    assert all(entry.top[0] == (entry.token, entry.logprob) for entry in done.logprobs)  # greedy: the best
    assert [entry.token for entry in done.prompt_logprobs] == list(done.prompt_token_ids[1:])
    assert 0 < done.timing.ttft_seconds < done.timing.total_seconds
    assert done.timing.tpot_seconds > 0
    assert done.error is None
    assert done.message is None
    assert at_rest(llm)


def test_forms_of_prompts(llm: LLM):
    ids = list(llm.generate("the sea", GREEDY)[0].prompt_token_ids)
    want = llm.generate(ids, GREEDY)[0].token_ids
    many = llm.generate(["the sea", "a dog"], GREEDY)
    assert [done.token_ids for done in llm.generate([ids, many[1].prompt_token_ids], GREEDY)] == [
        done.token_ids for done in many
    ]
    assert many[0].token_ids == want
    assert llm.generate([], GREEDY) == []
    one, two = llm.generate(["the sea", "the sea"], [GREEDY, replace(GREEDY, max_tokens=3)])
    assert two.token_ids == one.token_ids[:3]


def test_branches(llm: LLM):
    (done,) = llm.generate("the sea", SamplingParams(max_tokens=6, n=3, seed=4, prompt_logprobs=0))
    assert len(done.prompt_logprobs) == len(done.prompt_token_ids) - 1
    assert len({choice.token_ids for choice in done.choices}) == 3
    assert done.usage.completion_tokens == sum(len(choice.token_ids) for choice in done.choices)
    assert llm.generate("the sea", SamplingParams(max_tokens=6, seed=4))[0].token_ids == done.token_ids


def test_seeds(llm: LLM):
    params = SamplingParams(max_tokens=6)
    drawn = {llm.generate("a", params)[0].token_ids for _ in range(3)}
    assert len(drawn) == 3, "each request draws its own seed"
    llm.config = replace(llm.config, seed=9)
    try:
        first, second = llm.generate(["a", "a"], params)
        assert first.token_ids != second.token_ids
        assert llm.generate("a", params)[0].token_ids == first.token_ids
        assert llm.generate("a", replace(params, seed=9))[0].token_ids == first.token_ids
    finally:
        llm.config = replace(llm.config, seed=None)


def test_the_token_that_ends_it_is_counted_and_not_shown(llm: LLM):
    free = llm.generate("a", GREEDY)[0]
    assert llm.tokenizer is not None
    at = next(i for i, token in enumerate(free.token_ids) if i and token not in free.token_ids[:i])
    (done,) = llm.generate("a", replace(GREEDY, stop_ids=(free.token_ids[at],)))
    assert done.token_ids == free.token_ids[: at + 1]
    assert done.text == llm.tokenizer.decode(free.token_ids[:at])
    assert done.finish_reason == "stop"
    (later,) = llm.generate("a", replace(GREEDY, stop_ids=(free.token_ids[at],), min_tokens=12))
    assert len(later.token_ids) == 12


def test_stop_strings(llm: LLM):
    free = llm.generate("a", GREEDY)[0]
    stop = free.text[9:15]
    at = free.text.index(stop)
    for stream in (False, True):
        pieces: list[Piece] = []
        if stream:
            pieces = list(llm.generate("a", replace(GREEDY, stop=("zzzz", stop)), stream=True))
            done = pieces[-1].completion
            assert "".join(piece.text for piece in pieces) == free.text[:at]
            assert all(stop[:1] not in piece.text or free.text[:at] for piece in pieces)
        else:
            (done,) = llm.generate("a", replace(GREEDY, stop=("zzzz", stop)))
        assert done is not None
        assert done.text == free.text[:at]
        assert done.finish_reason == "stop"
        assert len(done.token_ids) < 12, "it went on after the stop string"
        assert done.usage.completion_tokens == len(done.token_ids)
        assert at_rest(llm)
    (early,) = llm.generate("a", replace(GREEDY, stop=(free.text[0],), min_tokens=4))
    assert early.text.startswith(free.text[:3])


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_joins_to_the_completion(llm: LLM):
    prompts = ["Once upon a time", "the sea", "你好 😀"]
    params = replace(GREEDY, logprobs=0, n=2)
    want = llm.generate(prompts, params)
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], str] = {}
    whole: dict[int, Completion] = {}
    for piece in llm.generate(prompts, params, stream=True):
        key = (piece.prompt, piece.choice)
        assert key not in ends
        assert len(piece.logprobs) == len(piece.token_ids)
        texts[key] = texts.get(key, "") + piece.text
        tokens.setdefault(key, []).extend(piece.token_ids)
        if piece.finish_reason:
            ends[key] = piece.finish_reason
        if piece.completion is not None:
            whole[piece.prompt] = piece.completion
    for i, done in enumerate(want):
        for c, choice in enumerate(done.choices):
            assert texts[i, c] == choice.text
            assert tuple(tokens[i, c]) == choice.token_ids
            assert ends[i, c] == choice.finish_reason
        assert [choice.token_ids for choice in whole[i].choices] == [choice.token_ids for choice in done.choices]
    assert at_rest(llm)


def test_streams_interleave_with_each_other_and_with_calls(llm: LLM):
    want = {text: llm.generate(text, GREEDY)[0].token_ids for text in ("a", "b", "c")}
    one, two = llm.generate("a", GREEDY, stream=True), llm.generate("b", GREEDY, stream=True)
    got: dict[str, list[int]] = {"a": [], "b": []}
    got["a"] += next(one).token_ids
    got["b"] += next(two).token_ids
    assert llm.generate("c", GREEDY)[0].token_ids == want["c"]
    for _ in range(11):
        got["b"] += next(two).token_ids
        got["a"] += next(one).token_ids
    assert next(one, None) is None
    assert next(two, None) is None
    assert {text: tuple(ids) for text, ids in got.items()} == {text: want[text] for text in ("a", "b")}
    assert at_rest(llm)


def test_threads_share_the_steps(llm: LLM):
    texts = ["a", "b", "the sea", "Once"]
    want = [llm.generate(text, GREEDY)[0].token_ids for text in texts]
    got: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        got[i] = llm.generate(texts[i], GREEDY)[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(texts))] == want
    assert at_rest(llm)


def test_a_stream_that_is_dropped_frees_everything(llm: LLM):
    stream = llm.generate("a", replace(GREEDY, max_tokens=200, n=3), stream=True)
    for _ in range(5):
        next(stream)
    assert not at_rest(llm)
    stream.close()  # type: ignore[attr-defined]
    assert at_rest(llm)
    llm.generate("never started", GREEDY, stream=True)
    assert at_rest(llm)


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation(llm: LLM):
    messages = [{"role": "user", "content": "What is your name?"}]
    done = llm.chat(messages, GREEDY)
    assert done.prompt_token_ids == llm.encoder.encode(messages).ids
    assert done.message is not None
    assert done.text == done.message.content
    assert done.finish_reason in ("length", "stop")
    pieces = list(llm.chat(messages, GREEDY, stream=True))
    assert "".join(piece.text for piece in pieces) == done.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == done.token_ids
    thought = llm.chat(messages, GREEDY, thinking=True)
    assert thought.message is not None
    assert thought.message.reasoning
    assert not thought.text
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    shaped = llm.chat(messages, GREEDY, response_format=form)
    assert shaped.prompt_token_ids == llm.encoder.encode(messages, response_format=form).ids != done.prompt_token_ids
    with pytest.raises(BadMessages):
        llm.chat([{"role": "robot", "content": "x"}])
    assert at_rest(llm)


def test_a_stop_id_is_no_part_of_a_reply(llm: LLM):
    messages = [{"role": "user", "content": "What is your name?"}]
    free = llm.chat(messages, GREEDY)
    assert llm.tokenizer is not None
    at = next(i for i, token in enumerate(free.token_ids) if i > 2 and token not in free.token_ids[:i])
    done = llm.chat(messages, replace(GREEDY, stop_ids=(free.token_ids[at],)))
    assert done.text == llm.tokenizer.decode(free.token_ids[:at])
    assert done.finish_reason == "stop"


def test_a_reply_that_is_complete_stops_the_engine(llm: LLM):
    assert llm.tokenizer is not None
    bias = ((llm.tokenizer.eos_id, 100.0),)
    done = llm.chat([{"role": "user", "content": "x"}], replace(GREEDY, logit_bias=bias))
    assert done.token_ids == (llm.tokenizer.eos_id,)
    assert (done.text, done.finish_reason) == ("", "stop")


# ---- limits and trouble ----------------------------------------------------------------------------------------------


def test_what_cannot_run_is_refused_before_anything_runs(llm: LLM):
    steps = len(llm.loop.times)
    with pytest.raises(EmptyPrompt):
        llm.generate([[5], []], GREEDY)
    with pytest.raises(PromptTooLong, match="prompt is 301 tokens, 1 over the limit of 300"):
        llm.generate([[5] * 301, [5]], GREEDY)
    with pytest.raises(TokenOutOfRange):
        llm.generate([4096], GREEDY)
    with pytest.raises(BadField, match="top_p is 0"):
        llm.generate("a", SamplingParams(top_p=0.0))
    with pytest.raises(BadField, match="number of params is 1, want one set, or one for each of the 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert len(llm.loop.times) == steps
    assert at_rest(llm)


def test_at_the_context_limit(llm: LLM):
    for length, tokens in ((299, 2), (300, 1)):
        (done,) = llm.generate([5] * length, replace(GREEDY, ignore_eos=True))
        assert len(done.token_ids) == tokens
        assert done.finish_reason == "length"


def test_control_tokens_are_never_produced(llm: LLM):
    assert llm.tokenizer is not None
    bias = tuple((token, 100.0) for token in llm.tokenizer.control_ids)
    (done,) = llm.generate("a", replace(GREEDY, logit_bias=bias))
    assert not set(done.token_ids) & set(llm.tokenizer.control_ids)


def test_damaged_logits_are_an_error_of_their_request(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    logits = llm.model.logits
    calls = 0

    def damaged(hidden):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        found = logits(hidden)
        if calls == 4:
            found[0, 0] = float("nan")
        return found

    monkeypatch.setattr(llm.model, "logits", damaged)
    bad, good = llm.generate(["a", "b"], GREEDY)
    assert isinstance(bad.error, NonFiniteLogits)
    assert bad.finish_reason is None
    assert len(bad.token_ids) == 3
    assert good.error is None
    assert len(good.token_ids) == 12
    calls = 0
    with pytest.raises(NonFiniteLogits):
        llm.generate("a", GREEDY)
    calls = 0
    assert isinstance(list(llm.generate("a", GREEDY, stream=True))[-1].error, NonFiniteLogits)
    assert at_rest(llm)


def completions(llm: LLM, prompts: list[str], params: SamplingParams, watched: bool) -> list[Completion]:
    """In the order of the prompts; over a stream, or without anybody who looks meanwhile."""
    if not watched:
        return llm.generate(prompts, params)
    ended = [piece for piece in llm.generate(prompts, params, stream=True) if piece.completion is not None]
    return [piece.completion for piece in sorted(ended, key=lambda piece: piece.prompt) if piece.completion]


@pytest.mark.parametrize(("stop", "reasons"), [((), {"length", "stop"}), (("e",), {"stop"})])
def test_an_answer_is_the_same_whether_somebody_looks_or_not(llm: LLM, stop: tuple[str, ...], reasons: set[str]):
    """Ended by length, by the end token, by a stop string; some with half a character at the end."""
    assert llm.tokenizer is not None
    bias, found = ((llm.tokenizer.eos_id, 6.0),), set[str]()
    for seed in range(4):
        params = replace(GREEDY, temperature=1.5, seed=seed, max_tokens=30, stop=stop, n=2, logprobs=1, logit_bias=bias)
        seen, unseen = (completions(llm, ["a", "b", "once"], params, watched) for watched in (True, False))
        for one, other in zip(seen, unseen, strict=True):
            assert replace(one, choices=()) == replace(other, choices=())
            for a, b in zip(one.choices, other.choices, strict=True):
                assert replace(a, timing=b.timing) == b
                assert 0 < b.timing.ttft_seconds <= b.timing.total_seconds
                found.add(str(b.finish_reason))
    assert found == reasons


@pytest.mark.parametrize(("watched", "at"), [(True, 1), (True, 5), (True, 12), (False, 1)])
def test_an_answer_that_cannot_be_read_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, watched: bool, at: int
):
    """Whatever makes text of tokens raises at a token of one of three requests in the same steps, or at its end."""
    want = [done.token_ids for done in llm.generate(["a", "b", "c"], GREEDY)]
    pushed: dict[int, int] = {}
    push = engine._TextReader.push

    def raising(self: engine._TextReader, *arguments: Any) -> list[dict[str, Any]]:
        count = pushed[id(self)] = pushed.get(id(self), 0) + 1
        if list(pushed).index(id(self)) == 0 and count == at:
            raise ZeroDivisionError("no text")
        return push(self, *arguments)

    monkeypatch.setattr(engine._TextReader, "push", raising)
    bad, *good = completions(llm, ["a", "b", "c"], GREEDY, watched)
    at = at if watched else len(want[0])  # its text is made of all tokens together
    assert isinstance(bad.error, ReplyFailed)
    assert bad.error.code == "reply_failed"
    assert f"after {at} tokens, ZeroDivisionError: no text" in str(bad.error)
    assert bad.token_ids == want[0][:at]
    assert (bad.usage.prompt_tokens, bad.usage.completion_tokens) == (len(bad.prompt_token_ids), at)
    assert [done.token_ids for done in good] == want[1:]
    assert [done.error for done in good] == [None, None]
    assert "ZeroDivisionError: no text" in caplog.text  # with its traceback
    assert at_rest(llm)


def test_a_consumer_that_raises_ends_its_own_stream(llm: LLM):
    want = {text: llm.generate(text, GREEDY)[0].token_ids for text in ("a", "b")}
    other, got = llm.generate("b", GREEDY, stream=True), list[int]()
    got += next(other).token_ids

    def consume() -> None:
        for _ in llm.generate("a", replace(GREEDY, max_tokens=200), stream=True):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert len(llm.loop.scheduler.running) == 1
    for piece in other:
        got += piece.token_ids
    assert tuple(got) == want["b"]
    assert at_rest(llm)


def test_a_slow_consumer_holds_nobody_up(llm: LLM):
    """Its pieces wait, as many as it asked for tokens at most; the others take as many steps as without it."""
    long = replace(GREEDY, max_tokens=60, ignore_eos=True)
    want = llm.generate("a", long)[0].token_ids

    def steps(texts: list[str]) -> int:
        before = llm.loop.scheduler._step
        llm.generate(texts, GREEDY)
        return llm.loop.scheduler._step - before

    alone = steps(["b", "c"])
    slow = llm.generate("a", long, stream=True)
    got = list(next(slow).token_ids)
    (session,) = {id(session): session for session in llm._sessions.values()}.values()
    assert steps(["b", "c"]) == alone
    assert 0 < len(session.pieces) <= alone
    for _ in range(8):
        steps(["b", "c"])
    assert not llm.loop.busy
    assert len(session.pieces) <= long.max_tokens
    for piece in slow:
        got += piece.token_ids
    assert tuple(got) == want
    assert at_rest(llm)


@pytest.mark.parametrize("where", ["start", "commit"])
def test_ctrl_c_ends_the_call_and_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str):
    want = llm.generate("b", GREEDY)[0].token_ids
    other = llm.generate("b", GREEDY, stream=True)
    got = list(next(other).token_ids)
    owner = llm.loop.runner if where == "start" else llm.loop.scheduler
    usual, calls = getattr(owner, where), 0

    def interrupted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return usual(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", replace(GREEDY, max_tokens=200))
    assert calls == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for piece in other:
        got += piece.token_ids
    assert tuple(got) == want
    assert at_rest(llm)


def test_a_device_that_fails_loses_one_call(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    want = llm.generate("a", GREEDY)[0].token_ids

    def fails(batch, memory):  # type: ignore[no-untyped-def]
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "forward", fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            llm.generate("a", GREEDY)
    assert at_rest(llm)
    assert llm.generate("a", GREEDY)[0].token_ids == want


# ---- start and end ---------------------------------------------------------------------------------------------------


def test_settings_that_do_not_fit(folder: Path):
    with pytest.raises(UnknownModel):
        LLM("no such model")
    with pytest.raises(UnknownKey, match=r"scheduler\.max_runing"):
        LLM(folder, cpu__threads=1, scheduler__max_runing=3)
    with pytest.raises(BadSetting, match=r"scheduler\.max_context_tokens is 5000"):
        LLM(folder, cpu__threads=1, scheduler__max_context_tokens=5000)
    with pytest.raises(BadSetting, match=r"scheduler\.token_budget is 4"):
        LLM(folder, cpu__threads=1, scheduler__token_budget=4)
    with pytest.raises(BadSetting, match=r"cache\.bytes is 65536"):
        LLM(folder, cpu__threads=1, numerics="float", cache__bytes=65536)
    with pytest.raises(DeviceUnavailable):
        LLM(folder, cpu__threads=1, device="tpu")
    with pytest.raises(BadField, match="either a configuration or single settings"):
        LLM(folder, config=Config())


def test_without_a_tokenizer_and_after_the_end(tmp_path: Path):
    llm = LLM(make_tiny(tmp_path / "bare"), numerics="float", config=None, cpu__threads=1)
    (done,) = llm.generate([5, 6], replace(GREEDY, max_tokens=2))
    assert (len(done.token_ids), done.text) == (2, "")
    with pytest.raises(MissingCheckpointFile):
        llm.generate("text")
    with pytest.raises(MissingCheckpointFile):
        llm.chat([{"role": "user", "content": "x"}])
    with pytest.raises(BadField, match="stop is"):
        llm.generate([5], replace(GREEDY, stop=("x",)))
    stream = llm.generate([5], GREEDY, stream=True)
    next(stream)
    never_started = llm.generate([5], GREEDY, stream=True)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate([5])
    assert [piece.finish_reason for piece in stream] == ["abort"]
    with pytest.raises(EngineClosed):
        list(never_started)


def test_who_asks_and_until_when(llm: LLM):
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    late = llm.generate([[5, 6], [7, 8]], params, deadline_seconds=1e-9)
    assert [type(done.error) for done in late] == [DeadlinePassed, DeadlinePassed]
    with pytest.raises(DeadlinePassed, match="had not begun when its deadline passed"):
        llm.generate([[5, 6]], params, deadline_seconds=1e-9)
    stream = llm.generate([[5, 6]], params, tenant="somebody", deadline_seconds=60.0, stream=True)
    next(stream)
    assert [t.live for t in llm.loop.scheduler.queue.tenants.values() if t.name == "somebody"] == [1]
    assert sum(len(piece.token_ids) for piece in stream) >= 2
    for value in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(BadField, match="deadline_seconds"):
            llm.generate([[5, 6]], params, deadline_seconds=value)
    assert at_rest(llm)
