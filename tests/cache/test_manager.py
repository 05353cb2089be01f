"""Leases: what a running sequence holds."""

import pytest

from benthic.cache.manager import CacheManager


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (1024, 8), (1025, 9)])
def test_blocks_for(tokens: int, blocks: int):
    cache = CacheManager(20, 3)
    assert cache.blocks_for(tokens) == blocks
    lease = cache.open()
    assert lease is not None
    assert cache.grow(lease, tokens)
    assert len(lease.blocks) == len(lease.table) == blocks
    assert lease.capacity == 128 * blocks
    assert 0 not in lease.table
    assert cache.free_blocks == 19 - blocks
    cache.check()


def test_growing_is_all_or_nothing():
    cache = CacheManager(4, 3)
    one, two = cache.open(), cache.open()
    assert one is not None
    assert two is not None
    assert cache.open() is None
    assert cache.grow(one, 200)
    table = one.table
    assert not cache.grow(two, 130)
    assert two.blocks == []
    assert cache.grow(one, 256)
    assert one.table is table  # nothing changed: the same tuple goes into the next step
    assert cache.grow(two, 128)
    assert not cache.grow(one, 257)
    assert not set(one.table) & set(two.table)
    cache.close(one)
    cache.close(two)
    cache.check()
    assert cache.free_blocks == 3
    assert cache.usable_tokens == 384
