"""Both pools: nothing is lost, nothing is handed out twice, number 0 never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.cache.blocks import BlockPool, SlotPool


@given(data=st.data(), size=st.integers(2, 12), moves=st.integers(0, 60))
def test_free_and_held_blocks_are_constant(data: st.DataObject, size: int, moves: int):
    pool = BlockPool(size)
    held: list[list[int]] = []
    for _ in range(moves):
        move = data.draw(st.sampled_from(["take", "release", "share"]))
        if move == "take":
            count = data.draw(st.integers(0, size))
            before = pool.free
            taken = pool.take(count)
            assert (taken is None) == (count > before)
            assert pool.free == before - len(taken or ())
            held += [taken] if taken else []
        elif held:
            which = data.draw(st.integers(0, len(held) - 1))
            if move == "share":
                pool.share(held[which])
                held.append(list(held[which]))
            else:
                pool.free_again(pool.release(held.pop(which)))
        pool.check()
        assert pool.free + len({b for blocks in held for b in blocks}) == pool.usable
        assert all(pool.references[b] == sum(b in blocks for blocks in held) for b in range(size))
    for blocks in held:
        pool.free_again(pool.release(blocks))
    assert pool.free == pool.usable == size - 1


def test_blocks_are_used_in_turn_and_the_beginning_of_a_sequence_last():
    pool = BlockPool(6)
    first = pool.take(3)
    assert first == [1, 2, 3]
    pool.free_again(pool.release(first))
    assert pool.take(5) == [4, 5, 3, 2, 1]


def test_misuse_is_caught():
    pool = BlockPool(3)
    (block,) = pool.take(1) or ()
    pool.share([block])
    assert pool.release([block]) == []
    with pytest.raises(AssertionError, match="1 owners"):
        pool.free_again([block])
    assert pool.release([block]) == [block]
    pool.check(idle=[block])
    with pytest.raises(AssertionError, match="released again"):
        pool.release([block])
    pool.free_again([block])
    with pytest.raises(AssertionError, match="idle and something else"):
        pool.check(idle=[block])
    with pytest.raises(AssertionError, match="none to hand out"):
        BlockPool(1)


def test_slots():
    pool = SlotPool(4)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3]
    assert pool.take() is None
    pool.release(2)
    pool.check()
    assert pool.take() == 2
    pool.release(3)
    with pytest.raises(AssertionError, match="released again"):
        pool.release(3)
    assert pool.free == 1
