"""What plans say of image rows, against a runner that keeps books: none is missing, none stays, none too many."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.cache.manager import CacheManager
from benthic.engine.loop import Loop
from benthic.engine.scheduler import Scheduler
from benthic.errors import BadField, CapacityError
from benthic.types import Abort, ImageInput, Request, SamplingParams, StepPlan, StepResult

VOCAB = 50


class Books:
    """A runner that computes nothing and knows what it would have to have."""

    def __init__(self, fail_at: Sequence[int] = (), when: str = "running"):
        """fail_at: steps that fail; when: before anything is done, "running", or only as the result is asked for."""
        self.kept: dict[int, tuple[ImageInput, ...]] = {}
        self.made: list[tuple[int, tuple[int, ...]]] = []  # request, first positions of the images made
        self.most = self.steps = 0
        self.fail_at, self.when = fail_at, when
        self.spans: dict[int, tuple[ImageInput, ...]] = {}

    @property
    def rows(self) -> int:
        return sum(image.tokens for images in self.kept.values() for image in images)

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        if plan.chunks:
            self.steps += 1
        fails = bool(plan.chunks) and self.steps in self.fail_at
        if fails and self.when == "before":
            raise RuntimeError("before it began")
        result = self._run(plan, fails and self.when == "running")

        def wait() -> StepResult:
            if fails:
                raise RuntimeError("the device was gone")
            return result

        return wait

    def _run(self, plan: StepPlan, fails: bool) -> StepResult:
        for request in plan.over:
            self.kept.pop(request, None)
        for request, images in plan.images:
            assert request not in self.kept or len(images) > len(self.kept[request]), "made for nothing"
            self.kept[request] = images
            self.made.append((request, tuple(image.first for image in images)))
        self.most = max(self.most, self.rows)
        for chunk in plan.chunks:
            here = range(chunk.start, chunk.start + len(chunk.tokens))
            for image in self.spans.get(chunk.request, ()):
                if set(here) & set(range(image.first, image.first + image.tokens)):
                    assert image in self.kept.get(chunk.request, ()), f"no rows for {image} in step {self.steps}"
        if fails:
            for request, _ in plan.images:
                self.kept.pop(request, None)
            raise RuntimeError("the device is gone")
        return StepResult([chunk.end % VOCAB for chunk in plan.drawn])


def request(number: int, parts: Sequence[int | str], **params: Any) -> Request:
    """parts: tokens of text; "8": an image of so many."""
    images, at = [], 0
    for part in parts:
        if isinstance(part, str):
            images.append(ImageInput(at, int(part), f"{number}.{at}"))
        at += int(part)
    params = {"max_tokens": 3, "temperature": 0} | params
    return Request(number, (5,) * at, SamplingParams(**params), 0, images=tuple(images))


def loop_of(
    books: Books, *, budget: int = 8, blocks: int = 40, slots: int = 4, image_tokens: int = 100, ahead: bool = False
) -> Loop:
    scheduler = Scheduler(
        CacheManager(blocks + 1, slots + 1, 4),
        token_budget=budget,
        max_context_tokens=400,
        vocab_size=VOCAB,
        image_tokens=image_tokens,
    )
    return Loop(scheduler, books, ahead=ahead)


def put(loop: Loop, books: Books, r: Request) -> None:
    books.spans[r.id] = r.images
    loop.inbox.put(r)


def drive(loop: Loop, books: Books, *requests: Request) -> Books:
    for r in requests:
        put(loop, books, r)
    for _ in range(2000):
        if not loop.busy:
            break
        with suppress(RuntimeError):
            loop.step()
        loop.scheduler.check_invariants()
    assert not loop.busy
    assert books.kept == {}
    return books


def test_rows_are_made_with_the_first_step_that_reads_one():
    books = Books()
    loop = loop_of(books)
    put(loop, books, request(1, [9, "8", 2, "6", 3]))
    made = []
    while loop.busy:
        loop.step()
        made.append((len(books.made), books.rows))
    assert made == [(0, 0), (1, 14), (1, 14), (1, 14), (1, 0), (1, 0)]  # 28 tokens, images from 9 to 24


def test_an_image_that_begins_with_the_next_chunk_waits_for_it():
    books = drive(loop_of(one := Books()), one, request(1, [8, "8", 8]))
    assert books.made == [(1, (8,))]
    assert books.steps == 5


def test_a_prompt_of_text_has_no_part_in_it():
    books = drive(loop_of(one := Books()), one, request(1, [40]), request(2, [3]))
    assert (books.made, books.most) == ([], 0)


def test_two_images_at_a_time_and_no_more():
    requests = [request(i, ["20", 1]) for i in range(4)]
    assert drive(loop_of(wide := Books(), budget=12), wide, *requests).most == 40
    assert drive(loop_of(narrow := Books(), budget=12, image_tokens=39), narrow, *requests).most == 20
    assert len(wide.made) == len(narrow.made) == 4


def test_nobody_overtakes_one_that_waits_for_rows():
    books = Books()
    loop = loop_of(books, budget=12, image_tokens=20)
    for r in (request(1, ["20", 1]), request(2, ["20", 1]), request(3, [2])):
        put(loop, books, r)
    order = []
    while loop.busy:
        loop.step()
        order += [event.request for event in loop.outbox.take() if event.usage is None and event.tokens]
    first = {number: order.index(number) for number in (1, 2, 3)}
    assert first[1] < first[2] < first[3]


def test_more_rows_than_may_be_kept_are_refused():
    loop = loop_of(Books(), image_tokens=15)
    with pytest.raises(CapacityError, match=r"needs 16 image tokens, the engine has 15.*scheduler\.image_tokens"):
        loop.scheduler.check(request(1, [1, "8", "8"]))
    loop.scheduler.check(request(1, [1, "8", "7"]))


@pytest.mark.parametrize(
    ("first", "tokens", "says"),
    [(3, 0, "0 tokens from 3"), (9, 4, "4 tokens from 9"), (-1, 4, "4 tokens from -1"), (1, 4, r"\[5, 12\)")],
)
def test_spans_that_do_not_fit_the_prompt(first: int, tokens: int, says: str):
    r = request(1, [2, "3", 7])
    r.images = (*r.images, ImageInput(first, tokens, "x"))
    with pytest.raises(BadField, match=rf"images\[1\] is .*{says}"):
        loop_of(Books()).scheduler.check(r)


def test_a_later_start_makes_what_is_still_to_come():
    """As with a prompt whose beginning is in the cache already."""
    books = Books()
    loop = loop_of(books, slots=2)
    put(loop, books, request(1, ["4", 4, "8", 4, "8", 4]))
    loop.step()
    (late,) = loop.scheduler.running
    late.computed = 10  # inside of the second image
    loop.scheduler._rows_of.clear()
    books.kept.clear()
    books.made.clear()
    loop.step()
    assert books.made == [(1, (8, 20))]
    drive(loop, books)
    assert books.made[1:] == []


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    part = st.one_of(st.integers(1, 12), st.integers(1, 9).map(str))
    requests = draw(
        st.lists(st.tuples(st.lists(part, min_size=1, max_size=5), st.integers(1, 3)), min_size=1, max_size=6)
    )
    return {
        "requests": requests,
        "max_tokens": draw(st.integers(1, 14)),
        "budget": draw(st.integers(4, 30)),
        "blocks": draw(st.integers(19, 40)),
        "limit": draw(st.integers(45, 80)),
        "fail_at": draw(st.lists(st.integers(1, 12), max_size=3)),
        "when": draw(st.sampled_from(["before", "running", "after"])),
        "ahead": draw(st.booleans()),
        "aborts": draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 2)), max_size=4)),
    }


@given(cases())
@settings(max_examples=300)
def test_whatever_happens(case: dict[str, Any]):
    """Preemption, aborts, failed steps, branches: rows are there when they are read, bounded, and gone at the end."""
    books = Books(case["fail_at"], case["when"])
    sizes = {"budget": case["budget"], "blocks": case["blocks"], "image_tokens": case["limit"]}
    loop = loop_of(books, **sizes, ahead=case["ahead"])
    for i, (parts, n) in enumerate(case["requests"]):
        put(loop, books, request(i, parts, n=n, max_tokens=case["max_tokens"]))
    for step in range(3000):
        if not loop.busy:
            break
        for at, number, branch in case["aborts"]:
            if at == step:
                loop.inbox.put(Abort(number, branch))
        with suppress(RuntimeError):
            loop.step()
        loop.scheduler.check_invariants()
        assert books.most <= case["limit"]
    assert not loop.busy
    assert books.kept == {}
