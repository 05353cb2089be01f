"""Keys, the index and the eviction order, against a slow model that compares tokens."""

import hashlib
import struct
from array import array
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.cache import prefix
from benthic.cache.eviction import POLICIES, S3Fifo
from benthic.cache.manager import CacheManager, Lease
from benthic.types import Miss

ROOT = prefix.root(prefix.namespace(b"weights", b"tokenizer"))
BLOCK = 2


def keys_of(ids: list[int] | tuple[int, ...], root: bytes = ROOT) -> list[bytes]:
    return prefix.chain(root, ids, BLOCK)


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_is_what_the_specification_says():
    ids = list(range(1000, 1300))
    before = hashlib.sha256(b"benthic.kv.1" + prefix.namespace(b"a", b"b")).digest()
    found = prefix.chain(prefix.root(prefix.namespace(b"a", b"b")), ids, 128)
    assert len(found) == 2
    for i, key in enumerate(found):
        before = hashlib.sha256(before + struct.pack("<128I", *ids[128 * i : 128 * (i + 1)])).digest()
        assert key == before


def test_ids_may_come_in_any_form_and_stay_as_they_are():
    ids = list(range(2**32 - 300, 2**32))
    packed = array("I", ids)
    found = prefix.chain(ROOT, ids, 128)
    assert prefix.chain(ROOT, tuple(ids), 128) == prefix.chain(ROOT, packed, 128) == found
    assert packed.tolist() == ids
    assert prefix.chain(ROOT, packed[:127], 128) == []


def test_a_chain_can_be_continued_anywhere():
    ids = list(range(50))
    whole = keys_of(ids)
    for cut in range(0, 50, 2):
        head = keys_of(ids[:cut])
        assert head + prefix.chain(head[-1] if head else ROOT, ids[cut:], BLOCK) == whole


@pytest.mark.parametrize("count", [255 * 2, 256 * 2, 256 * 2 + 1, 700 * 2])
def test_a_long_chain_is_its_blocks_one_by_one(count: int):
    """Beyond what is converted together, with extras by the number of the block."""
    ids = [(7 * i) % 4000 for i in range(count)]
    wanted, before = [], ROOT
    for number in range(count // BLOCK):
        (before,) = prefix.chain(before, ids[BLOCK * number : BLOCK * (number + 1)], BLOCK, lambda _: b"%d" % number)  # noqa: B023
        wanted.append(before)
    assert prefix.chain(ROOT, ids, BLOCK, lambda number: b"%d" % number) == wanted


def test_whatever_decides_what_a_block_holds_changes_its_key():
    ids = [1, 2, 3, 4]
    images = prefix.chain(ROOT, ids, BLOCK, lambda i: b"digest" if i == 1 else b"")
    plain = keys_of(ids)
    assert images[0] == plain[0]
    assert images[1] != plain[1]
    space = prefix.namespace(b"weights", b"tokenizer")
    roots = {
        ROOT,
        prefix.root(space, b"tenant"),
        prefix.root(space, b"other tenant"),
        prefix.root(prefix.namespace(b"weightst", b"okenizer")),
        prefix.root(prefix.namespace(b"weights", b"tokenizer", b"")),
    }
    assert len(roots) == 5
    assert len({tuple(keys_of(ids, each)) for each in roots}) == 5
    assert keys_of([2, 1, 3, 4])[1] != plain[1]  # the second block's tokens are the same


# ---- what is found is what was stored --------------------------------------------------------------------------------


class Sequence:
    """A running sequence of the model: its ids and what its blocks hold."""

    def __init__(self, lease: Lease, ids: list[int], done: int):
        self.lease, self.ids, self.done = lease, ids, done


@settings(deadline=None, max_examples=200)
@given(data=st.data(), eviction=st.sampled_from(sorted(POLICIES)), size=st.integers(2, 9), ttl=st.sampled_from([0, 5]))
def test_against_a_model_that_compares_tokens(data: st.DataObject, eviction: str, size: int, ttl: int):
    cache = CacheManager(size, 4, BLOCK, prefix=True, eviction=eviction, ttl_seconds=float(ttl))
    holds: dict[int, tuple[int, ...]] = {}  # block -> all ids up to its end
    running: list[Sequence] = []
    pins = []
    now = 0.0
    for _ in range(data.draw(st.integers(1, 50))):
        move = data.draw(st.sampled_from(["begin", "grow", "grow", "end", "pin", "wait"]))
        if move == "begin":
            ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2 * size))
            lease = cache.open()
            if lease is None:
                continue
            match = cache.find(keys_of(ids), now)
            for i, node in enumerate(match.nodes):
                assert holds[node.block] == tuple(ids[: BLOCK * (i + 1)])
            free, idle = cache.free_blocks, cache.idle_blocks(match)
            cache.attach(lease, match, now)
            assert cache.free_blocks == free - idle
            cache.announce(lease, keys_of(ids)[len(match.nodes) :])
            running.append(Sequence(lease, ids, BLOCK * len(match.nodes)))
        elif move == "grow" and running:
            s = data.draw(st.sampled_from(running))
            if s.done == len(s.ids):
                s.ids.append(data.draw(st.integers(0, 1)))
            upto = data.draw(st.integers(s.done + 1, len(s.ids)))
            need = cache.blocks_for(upto) - len(s.lease.blocks)
            free = cache.free_blocks
            shared = s.lease.blocks[: s.lease.cached]
            assert cache.grow(s.lease, upto) == (need <= free)
            if need <= free:
                assert s.lease.blocks[: s.lease.cached] == shared
                for b in range(s.done // BLOCK, upto // BLOCK):
                    holds[s.lease.blocks[b]] = tuple(s.ids[: BLOCK * (b + 1)])
                s.done = upto
                cache.publish(s.lease, keys_of(s.ids[:upto]), now)
        elif move == "end" and running:
            cache.close(running.pop(data.draw(st.integers(0, len(running) - 1))).lease)
        elif move == "pin":
            ids = data.draw(st.lists(st.integers(0, 1), max_size=2 * size))
            pins.append(cache.pin(keys_of(ids), now, now + data.draw(st.integers(0, 6))))
            if data.draw(st.booleans()):
                cache.unpin(pins.pop(0))
        else:
            now += data.draw(st.integers(0, 4))
            cache.tick(now)
        cache.check()
        for s in running:
            assert s.lease.table == tuple(s.lease.blocks)
            for b in range(s.done // BLOCK):  # nobody overwrote what a running sequence still reads
                assert holds[s.lease.blocks[b]] == tuple(s.ids[: BLOCK * (b + 1)])
    for s in running:
        cache.close(s.lease)
    cache.tick(float("inf"))
    cache.check()
    assert cache.free_blocks == cache.blocks.usable
    assert cache.prefix is not None
    assert not cache.prefix._flying


def run(cache: CacheManager, ids: list[int], now: float = 0.0) -> int:
    """One sequence from its beginning to its end. Returns how many blocks it found."""
    lease = cache.open()
    assert lease is not None
    match = cache.find(keys_of(ids), now)
    cache.attach(lease, match, now)
    assert cache.grow(lease, len(ids))
    cache.publish(lease, keys_of(ids), now)
    cache.close(lease)
    return len(match.nodes)


def test_why_a_block_was_missed():
    cache = CacheManager(4, 4, BLOCK, prefix=True, ttl_seconds=10.0)
    ids = [1, 2, 3, 4]
    assert cache.find(keys_of(ids), 0.0).miss is Miss.NEVER_SEEN
    producer = cache.open()
    assert producer is not None
    cache.announce(producer, keys_of(ids))
    assert cache.find(keys_of(ids), 0.0).miss is Miss.IN_FLIGHT
    assert cache.grow(producer, 4)
    cache.publish(producer, keys_of(ids)[:1], 0.0)
    found = cache.find(keys_of(ids), 0.0)
    assert (len(found.nodes), found.miss) == (1, Miss.IN_FLIGHT)
    cache.close(producer)
    assert cache.find(keys_of(ids), 0.0).miss is Miss.NEVER_SEEN
    assert run(cache, ids) == 1
    assert cache.find(keys_of(ids), 9.0).miss is None
    assert cache.find(keys_of(ids), 10.0).miss is Miss.EXPIRED
    assert cache.find(keys_of(ids), 10.0).miss is Miss.EXPIRED  # and is remembered
    assert cache.free_blocks == cache.blocks.free == 3
    assert run(cache, ids, 11.0) == 0
    assert run(cache, [7, 7, 8, 8, 9, 9], 11.0) == 0
    assert cache.find(keys_of(ids), 11.0).miss is Miss.EVICTED
    assert CacheManager(4, 4, BLOCK).find(keys_of(ids), 0.0).miss is Miss.DISABLED


def test_the_same_tokens_under_another_root():
    cache = CacheManager(4, 4, BLOCK, prefix=True)
    index = cache.prefix
    assert index is not None
    other = prefix.root(b"another")
    assert not index.seen_elsewhere([1, 2], ROOT)
    assert not index.seen_elsewhere([1, 2], ROOT)
    assert index.seen_elsewhere([1, 2], other)
    assert not index.seen_elsewhere([2, 1], other)


def test_two_that_compute_the_same_block_end_with_one():
    cache = CacheManager(5, 3, BLOCK, prefix=True)
    one, two = cache.open(), cache.open()
    assert one is not None
    assert two is not None
    ids = [1, 2, 3]
    for lease in (one, two):
        assert cache.grow(lease, 3)
    cache.publish(one, keys_of(ids), 0.0)
    cache.publish(two, keys_of(ids), 0.0)
    assert one.blocks[0] == two.blocks[0]
    assert one.blocks[1] != two.blocks[1]
    assert cache.free_blocks == 1
    cache.check()
    cache.close(one)
    assert two.blocks[0] not in (cache.blocks.take(1) or [])
    cache.check()


def test_a_pin_keeps_its_blocks_until_its_time_is_over():
    cache = CacheManager(4, 3, BLOCK, prefix=True)
    run(cache, [1, 2, 3, 4])
    cache.pin(keys_of([1, 2, 3, 4]), 0.0, until=10.0)
    assert cache.free_blocks == 1
    lease = cache.open()
    assert lease is not None
    assert not cache.grow(lease, 4)
    cache.tick(9.0)
    assert cache.find(keys_of([1, 2, 3, 4]), 9.0).miss is None
    cache.tick(10.0)
    assert cache.grow(lease, 6)
    assert cache.find(keys_of([1, 2]), 10.0).miss is Miss.EVICTED


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_the_end_of_a_sequence_goes_before_its_beginning(eviction: str):
    cache = CacheManager(7, 3, BLOCK, prefix=True, eviction=eviction)
    run(cache, [1, 2, 3, 4, 5, 6])
    run(cache, [1, 2, 9, 9])  # the shared beginning was used again
    lease = cache.open()
    assert lease is not None
    left: list[tuple[int, int]] = []
    while cache.grow(lease, lease.capacity + BLOCK):
        left.append(tuple(len(cache.find(keys_of(ids), 0.0).nodes) for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 9, 9])))
    assert left == [(3, 2), (3, 2), (2, 2), (1, 2), (1, 1), (0, 0)]


# ---- the order -------------------------------------------------------------------------------------------------------


def test_prompts_seen_once_do_not_push_out_what_is_shared():
    """A scan of fresh prompts between uses of a shared one: S3-FIFO keeps the shared one, LRU loses it."""
    hits = {}
    for eviction in POLICIES:
        cache = CacheManager(41, 3, BLOCK, prefix=True, eviction=eviction)
        shared, fresh, hits[eviction] = [5, 5] * 10, 0, 0
        run(cache, shared)
        run(cache, shared)
        for _ in range(10):
            for _ in range(8):
                fresh += 1
                run(cache, [fresh // 100, fresh % 100] * 6)
            hits[eviction] += run(cache, shared)
    assert hits == {"lru": 0, "s3-fifo": 100}


@given(st.lists(st.tuples(st.sampled_from("ihd"), st.integers(0, 6)), max_size=80))
def test_s3_fifo_knows_what_is_idle(moves: list[tuple[str, int]]):
    policy, idle = S3Fifo(4), OrderedDict[bytes, None]()
    for move, number in moves:
        key = bytes([number])
        if move == "i" and key not in idle:
            policy.idle(key, number % 3)
            idle[key] = None
        elif move == "h" and key in idle:
            policy.hold(key)
            del idle[key]
        elif move == "d" and idle:
            key = policy.victim()
            assert key in idle
            policy.drop(key)
            del idle[key]
        assert len(policy) == len(idle)
