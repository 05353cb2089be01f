"""Sequences that begin with what others computed: the same tokens, fewer rows, and nothing of anybody overwritten.

The model of these tests reads every id of its context back from the blocks, and checks each block, window row and
history that it is given; so a wrong hit fails by itself.
"""

import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace

import pytest

from benthic.cache.replay import Windows
from benthic.engine.loop import Loop
from benthic.engine.scheduler import Prefixes
from benthic.types import (
    MODES,
    TRUNCATIONS,
    Abort,
    CacheOptions,
    FinishReason,
    ImageInput,
    Miss,
    Request,
    SamplingParams,
    TokenEvent,
)
from tests.engine.fake import EOS, VOCAB, WINDOW, FakeModel, expected, fake_loop, greedy

BLOCK = 4
WINDOWS = Windows(WINDOW, storing=2, others=1)


def prefixes(**changes: object) -> Prefixes:
    return Prefixes(windows=WINDOWS, **changes)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.choice([t for t in range(VOCAB) if t != EOS]) for _ in range(length))


def drive(loop: Loop) -> tuple[dict[tuple[int, int], list[TokenEvent]], int]:
    """Step until nothing is left: events by branch, rows computed."""
    events: dict[tuple[int, int], list[TokenEvent]] = defaultdict(list)
    rows = 0
    for _ in range(3000):
        if not loop.busy:
            break
        loop.step()
        loop.scheduler.check_invariants()
        rows += loop.times[-1].tokens
        for event in loop.outbox.take():
            events[event.request, event.branch].append(event)
    assert not loop.busy
    cache = loop.scheduler.cache
    assert cache.free_blocks == cache.blocks.usable
    assert cache.slots.free == cache.slots.usable
    return events, rows


def ask(loop: Loop, request: Request) -> tuple[list[list[int]], TokenEvent, int]:
    """Alone: tokens of each branch, the first one's last event, rows computed."""
    loop.inbox.put(request)
    events, rows = drive(loop)
    found = [[t for e in events[request.id, i] for t in e.tokens] for i in range(request.params.n)]
    return found, events[request.id, 0][-1], rows


def request(number: int, ids: tuple[int, ...], tokens: int = 3, n: int = 1, **cache: object) -> Request:
    params = greedy(max_tokens=tokens, ignore_eos=True, n=n)
    return Request(number, ids, params, seed=number, cache=CacheOptions(**cache))  # type: ignore[arg-type]


# ---- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 13, 30, 33, 61])
def test_the_second_request_computes_what_its_mode_says(mode: str, length: int):
    loop = fake_loop(blocks=60, prefixes=prefixes(mode=mode), snapshots=3)
    ids = prompt(length)
    first, one, cold = ask(loop, request(1, ids))
    second, two, rows = ask(loop, request(2, ids))
    assert first == second == [expected(request(1, ids), 0)]
    assert cold == length + 2
    assert one.usage is not None
    assert one.usage.cached_tokens == 0
    assert one.usage.miss is (Miss.TOO_SHORT if length <= BLOCK else Miss.NEVER_SEEN)
    hit = (length - 1) // BLOCK * BLOCK
    start = hit - WINDOW
    if mode != "replay":
        start = min(hit, length - 1 - (WINDOW - 1)) - 2 * (WINDOW - 1)
    if mode == "snapshot":
        start = hit
    assert two.usage is not None
    if start > 0:
        assert rows == cold - start
        assert (two.usage.cached_tokens, two.usage.miss) == (hit, None)
    else:
        assert rows == cold
        assert (two.usage.cached_tokens, two.usage.miss) == (0, Miss.TOO_SHORT)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_rows_that_some_layers_skip(truncation: str):
    """The layers behind the last source get the rows of the prompt's end, whatever the chunks are."""
    kept = {"off": None, "halo": WINDOW, "compact": 6, "mask": 6}[truncation]
    for budget in (8, 9, 16, 64):
        loop = fake_loop(blocks=60, budget=budget, prefixes=prefixes(truncation=truncation, kept_rows=6))
        seen: list[tuple[int, bool]] = []  # positions that come out of the last layer, and whether they see less
        forward = FakeModel.forward

        def watch(self: FakeModel, batch, memory, forward=forward, seen=seen):  # type: ignore[no-untyped-def]
            out = batch.outputs
            lows = out.lows or (0,) * len(out.slots)
            for c, low in enumerate(lows):
                rows = range(out.starts[c], out.starts[c + 1])
                seen += [(int(out.positions[row]), low == 30 - 6) for row in rows]
            return forward(self, batch, memory)

        loop.runner.model.forward = watch.__get__(loop.runner.model)  # type: ignore[attr-defined]
        ids = prompt(30)
        assert ask(loop, request(1, ids))[0] == [expected(request(1, ids), 0)]
        positions = [p for p, _ in seen]
        assert positions == list(range(0 if kept is None or truncation == "mask" else 30 - kept, 32))
        if truncation in ("compact", "mask"):
            assert [p for p, limited in seen if limited and p < 30] == list(range(24, 30))


def test_a_turn_finds_the_answer_of_the_turn_before():
    loop = fake_loop(blocks=60, prefixes=prefixes())
    ids = prompt(10)
    (answer,), _, _ = ask(loop, request(1, ids, tokens=15))
    later = (*ids, *answer, *prompt(5, seed=9))
    _, last, rows = ask(loop, request(2, later))
    assert last.usage is not None
    assert last.usage.cached_tokens == (len(ids) + len(answer) - 1) // BLOCK * BLOCK == 24
    assert rows == len(later) - (24 - WINDOW) + 2


def test_another_prompt_finds_the_common_beginning():
    loop = fake_loop(blocks=60, prefixes=prefixes())
    common = prompt(22)
    ask(loop, request(1, (*common, *prompt(20, seed=1))))
    found, last, _ = ask(loop, request(2, (*common, *prompt(20, seed=2))))
    assert found == [expected(request(2, (*common, *prompt(20, seed=2))), 0)]
    assert last.usage is not None
    assert last.usage[2:] == (20, Miss.NEVER_SEEN)


# ---- who may find what -----------------------------------------------------------------------------------------------


def test_salts_modes_and_switches():
    ids = prompt(40)
    loop = fake_loop(blocks=90, prefixes=prefixes())
    ask(loop, request(1, ids))

    def hit(number: int, **cache: object) -> tuple[int, Miss | None]:
        usage = ask(loop, request(number, ids, **cache))[1].usage
        assert usage is not None
        return usage.cached_tokens, usage.miss

    assert hit(2) == (36, None)
    assert hit(3, salt="tenant") == (0, Miss.OTHER_NAMESPACE)
    assert hit(4, salt="tenant") == (36, None)
    assert hit(5, mode="exact") == (0, Miss.OTHER_NAMESPACE)  # what stands behind an approximate replay is not exact
    assert hit(6, mode="exact") == (36, None)
    assert hit(7, mode="snapshot") == (36, None)
    assert hit(8, read=False) == (0, Miss.DISABLED)
    assert hit(9, salt="other", write=False) == (0, Miss.OTHER_NAMESPACE)
    assert hit(10, salt="other") == (0, Miss.OTHER_NAMESPACE)
    off = fake_loop(blocks=90)
    ask(off, request(1, ids))
    usage = ask(off, request(2, ids))[1].usage
    assert usage is not None
    assert usage[2:] == (0, Miss.DISABLED)


def test_prompt_logprobs_are_those_of_every_token():
    loop = fake_loop(blocks=60, prefixes=prefixes())
    ids = prompt(30)
    ask(loop, request(1, ids))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    loop.inbox.put(Request(2, ids, params, seed=0))
    events, rows = drive(loop)
    assert sum(len(event.prompt_logprobs) for event in events[2, 0]) == 29
    assert rows == 30
    usage = events[2, 0][-1].usage
    assert usage is not None
    assert usage.miss is Miss.DISABLED


def test_evicted_and_expired():
    ids = prompt(40)
    loop = fake_loop(blocks=14, prefixes=prefixes(), ttl_seconds=5.0)
    loop.clock = lambda: 0.0
    ask(loop, request(1, ids))
    ask(loop, request(2, prompt(40, seed=1)))
    usage = ask(loop, request(3, ids))[1].usage
    assert usage is not None
    assert usage.miss is Miss.EVICTED
    loop.clock = lambda: 6.0
    usage = ask(loop, request(4, ids))[1].usage
    assert usage is not None
    assert usage[2:] == (0, Miss.EXPIRED)


# ---- at the same time ------------------------------------------------------------------------------------------------


def test_who_comes_while_a_prefix_is_computed_waits_for_it():
    loop = fake_loop(blocks=90, budget=16, slots=6, prefixes=prefixes())
    common = prompt(64)
    requests = [request(i, (*common, *prompt(6, seed=i))) for i in range(3)]
    other = request(9, prompt(7, seed=99))
    for each in (*requests, other):
        loop.inbox.put(each)
    events, rows = drive(loop)
    for each in (*requests, other):
        assert [t for e in events[each.id, 0] for t in e.tokens] == expected(each, 0)
    assert rows == (70 + 2) + 2 * (70 - (64 - WINDOW) + 2) + 9
    assert [events[i, 0][-1].usage[2:] for i in range(3)] == [
        (0, Miss.NEVER_SEEN),
        (64, Miss.NEVER_SEEN),
        (64, Miss.NEVER_SEEN),
    ]  # type: ignore[index]


def test_the_follower_goes_on_when_the_producer_is_aborted():
    loop = fake_loop(blocks=90, budget=16, prefixes=prefixes())
    ids = prompt(64)
    loop.inbox.put(request(1, ids))
    loop.inbox.put(request(2, ids))
    loop.step()
    loop.step()
    loop.inbox.put(Abort(1))
    events, rows = drive(loop)
    assert [t for e in events[2, 0] for t in e.tokens] == expected(request(2, ids), 0)
    assert events[1, 0][-1].finish is FinishReason.ABORT
    assert rows < 64


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11, 30])
@pytest.mark.parametrize("tokens", [1, 6])
def test_branches_share_their_prompt(cached: bool, length: int, tokens: int):
    loop = fake_loop(blocks=90, slots=6, prefixes=prefixes() if cached else None)
    params = SamplingParams(temperature=1.5, max_tokens=tokens, n=4, ignore_eos=True)
    asked = Request(1, prompt(length), params, seed=5)
    loop.inbox.put(asked)
    events, rows = drive(loop)
    for i in range(4):
        assert [t for e in events[1, i] for t in e.tokens] == expected(asked, i)
    assert rows == length + 3 + 4 * (tokens - 1)


# ---- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_mixture(seed: int, ahead: bool):
    """Requests that share beginnings in every mode, with aborts, a failing step and too few blocks."""
    rng = random.Random(seed)
    loop = fake_loop(
        blocks=rng.choice([24, 40, 70]),
        slots=rng.choice([3, 5, 8]),
        budget=rng.choice([8, 16, 33, 64]),
        prefixes=prefixes(
            mode=rng.choice(MODES), truncation=rng.choice(TRUNCATIONS), kept_rows=rng.choice([WINDOW, 9])
        ),
        snapshots=rng.choice([0, 1, 3]),
        eviction=rng.choice(["lru", "s3-fifo"]),
        ttl_seconds=rng.choice([0.0, 30.0]),
        ahead=ahead,
    )
    stems = [prompt(rng.randrange(1, 40), seed=100 + i) for i in range(3)]
    requests: list[Request] = []
    events: dict[tuple[int, int], list[TokenEvent]] = defaultdict(list)
    aborted: set[int] = set()
    failing = rng.randrange(5, 60)
    for step in range(2000):
        loop.clock = lambda step=step: float(step)
        while len(requests) < 40 and rng.random() < 0.4:
            stem = stems[rng.randrange(3)]
            if requests and rng.random() < 0.3:  # the next turn of an earlier one
                before = rng.choice(requests)
                stem = (*before.prompt, *(t for e in events[before.id, 0] for t in e.tokens))[:70]
            ids = (*stem[: rng.randrange(1, len(stem) + 1)], *prompt(rng.randrange(0, 12), seed=rng.randrange(99)))
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=rng.randrange(1, 12),
                n=rng.choice([1, 1, 1, 3]),
                min_tokens=rng.choice([0, 0, 0, 1]),
                presence_penalty=rng.choice([0.0, 0.0, 0.0, 1.5]),
            )
            options = CacheOptions(
                read=rng.random() < 0.9,
                write=rng.random() < 0.9,
                salt=rng.choice(["", "", "tenant"]),
                mode=rng.choice([None, *MODES]),
                truncation=rng.choice([None, *TRUNCATIONS]),
            )
            requests.append(Request(len(requests), ids, params, seed=rng.randrange(2**40), cache=options))
            loop.inbox.put(requests[-1])
        if requests and rng.random() < 0.03:
            aborted.add(rng.choice(requests).id)
            loop.inbox.put(Abort(max(aborted)))
            aborted.add(max(aborted))
        if step == failing:
            model = loop.runner.model  # type: ignore[attr-defined]
            model.fail_at = model.steps + 1
        with suppress(RuntimeError):  # the one that was asked for
            loop.step()
        loop.scheduler.check_invariants()
        for event in loop.outbox.take():
            assert event.error is None
            events[event.request, event.branch].append(event)
        if len(requests) == 40 and not loop.busy:
            break
    assert not loop.busy
    hits = 0
    for each in requests:
        for i in range(each.params.n):
            news = events[each.id, i]
            assert [e.usage is not None for e in news] == [False] * (len(news) - 1) + [True]
            assert news[-1].usage is not None
            hits += news[-1].usage.cached_tokens
            got, want = [t for e in news for t in e.tokens], expected(each, i)
            if news[-1].finish is FinishReason.ABORT:
                assert each.id in aborted
                assert got == want[: len(got)]
            else:
                assert got == want
    assert hits > 0
    cache = loop.scheduler.cache
    assert cache.free_blocks == cache.blocks.usable
    assert cache.slots.free == cache.slots.usable


def test_an_image_is_more_than_its_place():
    """The same ids with other pixels, or the same pixels elsewhere, are another prefix."""
    ids = prompt(24)

    def pictured(number: int, *images: tuple[int, int, str]) -> Request:
        return replace(request(number, ids), images=tuple(ImageInput(*image) for image in images))

    loop = fake_loop(blocks=90, prefixes=prefixes(mode="exact"))
    scheduler = loop.scheduler
    roots = {}
    for number, images in enumerate([(), ((6, 4, "a"),), ((6, 4, "b"),), ((7, 4, "a"),), ((6, 4, "a"), (18, 3, "c"))]):
        scheduler.admit([pictured(number, *images)])
        (branch,) = scheduler._live[number]
        roots[number] = scheduler._keys(branch, 6)
    assert [len({keys[i] for keys in roots.values()}) for i in range(6)] == [1, 4, 4, 4, 5, 5]
    assert roots[1][:4] == roots[4][:4]


def test_pins_keep_blocks_until_nobody_could_go_on():
    ids = prompt(40)
    loop = fake_loop(blocks=22, prefixes=prefixes())
    ask(loop, request(1, ids))
    pin = loop.scheduler.pin(ids, CacheOptions(), 100.0)
    assert pin is not None
    for number in range(2, 6):  # would push the prefix out
        loop.inbox.put(request(number, prompt(30, seed=number)))
        while loop.busy:
            loop.step()
            loop.scheduler.check_invariants()
        loop.outbox.take()
    assert len(pin.blocks) == 10
    large = request(9, prompt(70, seed=9))
    loop.inbox.put(large)
    events, _ = drive(loop)
    assert [t for e in events[9, 0] for t in e.tokens] == expected(large, 0)
    assert not pin.blocks
