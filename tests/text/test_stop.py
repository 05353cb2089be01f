"""Stop strings against a naive search over the whole text."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benthic.text.stop import StopMatcher

letters = st.text("abc", min_size=1, max_size=5)


@given(text=st.text("abc", max_size=40), stops=st.lists(letters, max_size=4), cuts=st.lists(st.integers(0, 40)))
@example(text="aab", stops=["ab", "aab"], cuts=[1, 2])
@example(text="abcc", stops=["abcc", "bc"], cuts=[])
@example(text="abcab", stops=["cab", "bcab", "cab"], cuts=[])
def test_any_split_gives_the_text_up_to_the_earliest_match(text: str, stops: list[str], cuts: list[int]):
    matcher = StopMatcher(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    for begin, end in pairwise(edges):
        shown += matcher.push(text[begin:end])
        if matcher.matched is not None:
            break
        pending = text[len(shown) : end]
        assert len(pending) < max(map(len, stops), default=1), "more is held back than may be needed"
        assert not pending or any(stop.startswith(pending) for stop in stops), "text is held back for nothing"
    want = first_complete(text, stops)
    if want is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
    else:
        assert (shown, matcher.matched) == want
        assert matcher.flush() == matcher.push("more") == ""


def first_complete(text: str, stops: list[str]) -> tuple[str, str] | None:
    """Text before the first match, and the match: character by character."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return None


def test_no_part_of_a_stop_string_leaks_character_by_character():
    matcher = StopMatcher(["</answer>", "END"])
    shown = [matcher.push(c) for c in "so </answ, EN</answer> never"]
    assert "".join(shown) == "so </answ, EN"
    assert matcher.matched == "</answer>"


def test_text_before_the_least_length_takes_no_part():
    matcher = StopMatcher(["ab"])
    assert matcher.push("xaba", armed=False) == "xaba"
    assert matcher.push("b") == "b"  # the a came too early
    assert matcher.push("a") == ""
    assert matcher.push("", armed=False) == "a"
    assert matcher.push("ab!") == ""


def test_an_empty_stop_string_is_a_mistake():
    with pytest.raises(AssertionError):
        StopMatcher([""])
