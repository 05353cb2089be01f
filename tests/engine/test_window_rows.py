"""Which rows each layer computes of a prompt: enough that every row that is read saw its whole window, and no more.

The model of these tests has several window layers, and each remembers of every row whether it is what it would be had
all been computed: whether the layer below made it so, and whether its window held all rows, each of them so. The rings
live in the engine's own storage, so kept states, copies and stale rows of earlier sequences are part of it.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from benthic.cache.replay import Windows
from benthic.cache.spec import RingEntry
from benthic.cache.storage import Storage
from benthic.engine.loop import Loop
from benthic.engine.scheduler import Prefixes
from benthic.models.base import Batch
from benthic.types import CacheOptions, Request
from tests.engine.fake import EOS, VOCAB, WINDOW, FakeModel, expected, fake_loop, greedy

STORING, OTHERS = 3, 2
STEP = WINDOW - 1
BLOCK = 4


class Layered(FakeModel):
    """`FakeModel`, checked as it is, with a ring a layer of (position, is it exact)."""

    cache_spec = replace(
        FakeModel.cache_spec,
        rings=tuple(RingEntry(layer, 2, "f32", WINDOW) for layer in range(1 + STORING + OTHERS)),
    )
    windows = Windows(WINDOW, STORING, OTHERS)

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()  # by layer
        self.faults: list[str] = []

    def forward(self, batch: Batch, memory: Storage) -> SimpleNamespace:
        hidden = super().forward(batch, memory)
        cuts, exact = {cut.layer: cut for cut in batch.cuts}, torch.ones(len(batch.ids), dtype=torch.bool)
        for layer in range(STORING + OTHERS):
            if layer in cuts:
                exact, batch = exact[cuts[layer].kept], cuts[layer].batch
            self.rows[layer] += len(exact)
            exact = self._attend(layer, batch, memory.rings[1 + layer].view(torch.int32), exact)
        for row in batch.logit_rows.tolist():
            if not exact[row]:
                self.faults.append(f"a token is drawn from a row that is not exact, position {batch.positions[row]}")
        return hidden

    def _attend(self, layer: int, batch: Batch, ring: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        whole: list[bool] = []
        for c, (first, slot) in enumerate(zip(batch.firsts, batch.slots, strict=True)):
            low, stored = (limits[c] if limits else 0 for limits in (batch.lows, batch.stored))
            rows = exact[batch.starts[c] : batch.starts[c + 1]].tolist()
            seen = {p: ring[slot, p % WINDOW].tolist() == [p, 1] for p in range(max(first - STEP, low, 0), first)}
            seen |= {first + i: row for i, row in enumerate(rows)}
            for p in range(first, first + len(rows)):
                whole.append(all(seen.get(q, False) for q in range(max(p - STEP, 0), p + 1)))
                if layer < STORING and p >= stored and not seen[p]:
                    self.faults.append(f"layer {layer} stores what is not exact, position {p}")
            for p in range(max(first, first + len(rows) - WINDOW), first + len(rows)):
                ring[slot, p % WINDOW] = torch.tensor([p, int(seen[p])], dtype=torch.int32)
        return torch.tensor(whole, dtype=torch.bool)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.choice([t for t in range(VOCAB) if t != EOS]) for _ in range(length))


def build(budget: int, snapshots: int = 3) -> tuple[Loop, Layered]:
    model = Layered()
    prefixes = Prefixes(windows=model.windows)
    return fake_loop(blocks=90, budget=budget, model=model, prefixes=prefixes, snapshots=snapshots), model


def ask(loop: Loop, *requests: Request) -> None:
    for each in requests:
        loop.inbox.put(each)
    got: dict[int, list[int]] = {each.id: [] for each in requests}
    for _ in range(2000):
        if not loop.busy:
            break
        loop.step()
        loop.scheduler.check_invariants()
        for event in loop.outbox.take():
            assert event.error is None, event.error
            got[event.request] += event.tokens
    assert got == {each.id: expected(each, 0) for each in requests}


def request(number: int, ids: tuple[int, ...], mode: str, truncation: str = "halo", tokens: int = 3) -> Request:
    params, cache = greedy(max_tokens=tokens, ignore_eos=True), CacheOptions(mode=mode, truncation=truncation)
    return Request(number, ids, params, seed=number, cache=cache)


def drive(length: int, budget: int, truncation: str, snapshots: int = 3) -> Layered:
    """A prompt cold, hit, hit by one that wants a state and finds none, and hit with one; then the turn after it."""
    loop, model = build(budget, snapshots)
    ids = prompt(length)
    turn = (*ids, *expected(request(3, ids, "snapshot", tokens=7), 0), *prompt(3, 2))
    ask(loop, request(1, ids, "exact", truncation))
    ask(loop, request(2, ids, "exact", truncation))
    ask(loop, request(3, ids, "snapshot", truncation, 7), request(4, prompt(length, 1), "exact", truncation))
    ask(loop, request(5, ids[: (length - 1) // BLOCK * BLOCK + 1], "snapshot", truncation))  # sees most of that state
    ask(loop, request(6, turn, "snapshot", truncation))
    ask(loop, request(7, (*ids[: length - 7], *prompt(11, 3)), "exact", truncation))
    return model


@pytest.mark.parametrize("truncation", ["halo", "off"])
@pytest.mark.parametrize("length", range(24, 64, 3))
def test_every_row_that_is_read_saw_its_whole_window(length: int, truncation: str):
    for budget in (64, 5 + length % 11):
        assert drive(length, budget, truncation).faults == []


@dataclass(frozen=True, slots=True)
class Late(Windows):
    """One row too few, from the layer on that `late` names."""

    late: int = 0

    def cuts(
        self, start: int, again: bool, length: int, truncation: str, kept_rows: int
    ) -> tuple[tuple[int, int], ...]:
        cuts = Windows.cuts(self, start, again, length, truncation, kept_rows)
        return tuple((layer, position + (layer >= self.late)) for layer, position in cuts)


@pytest.mark.parametrize("late", range(1, STORING + OTHERS))
def test_one_row_too_few_is_seen(late: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Layered, "windows", Late(WINDOW, STORING, OTHERS, late))
    assert drive(45, 64, "halo").faults


def test_one_row_less_behind_a_hit_is_seen(monkeypatch: pytest.MonkeyPatch):
    start = Windows.start
    monkeypatch.setattr(Windows, "start", lambda *args: start(*args) + 1)
    assert drive(45, 64, "off").faults


@pytest.mark.parametrize("budget", [64, 13])
@pytest.mark.parametrize("truncation", ["halo", "off"])
def test_each_layer_computes_a_window_less_than_the_one_below(truncation: str, budget: int):
    """Behind a hit of 44 tokens of 46: what the last row sees, through all layers."""
    loop, model = build(budget)
    ids = prompt(46)
    ask(loop, request(1, ids, "exact", truncation, 1))
    model.rows.clear()
    ask(loop, request(2, ids, "exact", truncation, 1))
    last = OTHERS * STEP + 1
    storing = [last + (STORING - layer) * STEP for layer in range(STORING)]
    behind = [last - i * STEP for i in range(OTHERS)] if truncation == "halo" else [last + STEP] * OTHERS
    assert [model.rows[layer] for layer in range(STORING + OTHERS)] == storing + behind


def test_a_cold_prompt_ends_in_a_triangle_too():
    loop, model = build(budget=17)
    ask(loop, request(1, prompt(46), "exact", tokens=1))
    assert [model.rows[layer] for layer in range(STORING + OTHERS)] == [46] * STORING + [2 * STEP + 1, STEP + 1]
