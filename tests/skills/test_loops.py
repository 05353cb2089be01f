"""Texts that repeat themselves, against plain counting."""

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benthic.skills.loops import LOOP_TIMES, LOOP_TOKENS, looping, loops


def counted(text: list[int]) -> bool:
    pieces = Counter(tuple(text[i : i + LOOP_TOKENS]) for i in range(len(text) - LOOP_TOKENS + 1))
    return bool(pieces) and max(pieces.values()) >= LOOP_TIMES


def flat(texts: list[list[int]], dtype: Any = np.uint16) -> tuple[Any, Any]:
    starts = np.cumsum([0, *map(len, texts)])
    return np.array([id for text in texts for id in text], dtype=dtype), starts


@given(st.lists(st.lists(st.integers(0, 1), max_size=60), max_size=6))
def test_loops_are_found_as_by_counting(texts: list[list[int]]) -> None:
    want = [counted(text) for text in texts]
    assert list(looping(*flat(texts))) == want
    assert [loops(text) for text in texts] == want


def test_the_edge_of_a_loop() -> None:
    piece = [65535, 1, 2, 3, 4, 5, 6, 7]
    apart = [[*piece, 100 + i] for i in range(4)]
    three, four = [id for part in apart[:3] for id in part], [id for part in apart for id in part]
    short = [9] * 10  # three pieces
    across = [piece, piece, piece, piece]  # one in each text
    texts = [three, four, short, [9] * 11, *across, [], [5]]
    assert list(looping(*flat(texts))) == [False, True, False, True, *[False] * 6]


def test_ids_of_a_large_vocabulary() -> None:
    piece = [129_279, 65_536, 0, 131_071, 65_537, 1, 2, 3]
    texts = [piece * 4, piece * 3, [id % 65_536 for id in piece] * 2 + piece * 2]
    assert list(looping(*flat(texts, np.int64))) == [True, False, False]
    assert [loops(text) for text in texts] == [True, False, False]


def test_no_texts() -> None:
    assert looping(*flat([])).shape == (0,)
    assert not loops([])
