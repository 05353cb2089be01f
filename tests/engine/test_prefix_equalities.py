"""Hits, kept states and skipped rows on the real model, without quantisers: a hit answers as a cold start does.

Whole rows of logits are compared, at the tolerance of the design (section 3) for quantisers off. Memory that nobody
wrote reads as NaN. `smooth` selects every entry and every expert, so that near ties in choices play no part. Windows
are short, so that prompts of a hundred tokens reach beyond what all layers together see.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benthic.cache.manager import CacheManager
from benthic.cache.storage import Storage
from benthic.engine import runner as runners
from benthic.engine.loop import Loop
from benthic.engine.runner import Model, Runner
from benthic.engine.sampler import Sampled, Sampler
from benthic.engine.scheduler import Prefixes, Scheduler
from benthic.models.deepseek_v41 import from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS, CacheOptions, Draw, Request, SamplingParams

TOLERANCE = 1e-5
SMOOTH = {"index_topk": 512, "candidate_topk_blocks": 128, "n_routed_experts": 4, "num_experts_per_tok": 4}
BLOCK = 16
# described by the host; a GPU's form; what a GPU replays; the same where only small steps are replayed
FORMS = ("host", "device", "recorded", "small recorded")


@pytest.fixture(autouse=True)
def small_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings of prompts of this size have graphs of their own too. And there is little padding to be computed."""
    monkeypatch.setattr(runners, "_BEGINNING_ROWS", 32)
    monkeypatch.setattr(runners, "prompt_sizes", lambda most: tuple(range(16, most + 1, 16)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def load(name: str) -> Model:
        changes = {"sliding_window": 8} | (SMOOTH if name == "smooth" else {})
        folder = make_tiny(tmp_path_factory.mktemp("checkpoint") / name, **changes)
        return from_checkpoint(Checkpoint.open(folder), NUMERICS["float"])

    return load


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("smooth")


class Watching(Sampler):
    """Keeps the logits it is given."""

    def __init__(self, vocab_size: int):
        super().__init__(vocab_size)
        self.rows: dict[tuple[int, int], Tensor] = {}  # (request, position)

    def __call__(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], requests: Sequence[int] | None = None
    ) -> Sampled:
        assert requests is not None
        for row, number, position in zip(logits, requests, positions, strict=True):
            self.rows[number, position] = row.clone()
        return super().__call__(logits, draws, positions, requests)


class Computed:
    """What a recorder returns, recorded when it is first replayed."""

    def __init__(self, run: Callable[[], Any]):
        self.run, self.result = run, None

    def replay(self) -> None:
        self.result = self.run()


class Engine:
    def __init__(
        self,
        model: Model,
        *,
        form: str = "host",
        cached: bool = True,
        budget: int = 4096,
        blocks: int = 80,
        ahead: bool = False,
    ):
        self.storage = Storage(model.cache_spec, blocks + 1, 4, block_tokens=BLOCK, states=4)
        self.storage.poison()
        self.scheduler = Scheduler(
            CacheManager(blocks + 1, 4, BLOCK, prefix=cached, snapshots=4),
            token_budget=budget,
            max_context_tokens=model.max_positions,
            vocab_size=model.vocab_size,
            prefixes=Prefixes(
                windows=model.windows, mode="exact", truncation="off", kept_rows=model.windows.tokens + 2
            ),
        )
        self.sampler = Watching(model.vocab_size)
        rows = 32 if form == "small recorded" else 256
        runner = Runner(model, self.storage, self.sampler, on_device=form != "host", ahead=ahead, graph_rows=rows)
        if "recorded" in form:
            runner.capture(cast("Any", Computed))
        self.loop = Loop(self.scheduler, runner, ahead=ahead)
        self.rows = 0
        if form != "host":  # rows are decided there; these want to be looked at
            self.sampler.special = lambda draws: list(range(len(draws)))  # type: ignore[method-assign]

    def ask(self, *requests: Request) -> dict[int, list[int]]:
        for request in requests:
            self.loop.inbox.put(request)
        tokens: dict[int, list[int]] = defaultdict(list)
        while self.loop.busy:
            self.loop.step()
            self.rows += self.loop.times[-1].tokens if self.loop.times else 0
            for event in self.loop.outbox.take():
                assert event.error is None, event.error
                tokens[event.request] += event.tokens
        self.scheduler.check_invariants()
        return dict(tokens)


def ids_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 4000, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def request(number: int, ids: tuple[int, ...], tokens: int = 5, **cache: object) -> Request:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(number, ids, params, seed=0, cache=CacheOptions(**cache))  # type: ignore[arg-type]


def distance(got: Engine, want: Engine, number: int) -> float:
    """Largest difference of any logit of any drawn token."""
    rows = {key: row for key, row in want.sampler.rows.items() if key[0] == number}
    assert rows
    assert rows.keys() == {key for key in got.sampler.rows if key[0] == number}
    return max(float((got.sampler.rows[key] - row).abs().max()) for key, row in rows.items())


FIRST, NEXT = ids_of(150, 1), ids_of(30, 2)


@pytest.fixture(scope="module")
def cold(model: Model) -> Engine:
    """Answers of an engine that has seen nothing and computes everything."""
    engine = Engine(model, cached=False)
    engine.ask(request(1, FIRST))
    engine.ask(request(2, (*FIRST[:140], *NEXT)))
    engine.ask(request(3, FIRST[:100]))
    return engine


@pytest.mark.parametrize(
    ("form", "mode", "truncation", "budget"),
    [
        ("host", "exact", "off", 4096),
        ("host", "exact", "halo", 33),
        ("host", "snapshot", "halo", 4096),
        ("device", "snapshot", "off", 33),
        ("device", "exact", "halo", 4096),
        ("recorded", "exact", "halo", 33),
        ("recorded", "exact", "halo", 4096),
        ("recorded", "snapshot", "halo", 70),
        ("small recorded", "exact", "halo", 70),
        ("small recorded", "snapshot", "halo", 50),
    ],
)
def test_a_hit_answers_as_a_cold_start(model: Model, cold: Engine, form: str, mode: str, truncation: str, budget: int):
    how = {"mode": mode, "truncation": truncation}
    engine = Engine(model, form=form, budget=budget)
    first = engine.ask(request(1, FIRST, **how))[1]
    assert distance(engine, cold, 1) < TOLERANCE
    before = engine.rows
    engine.ask(request(2, (*FIRST[:140], *NEXT), **how))
    engine.ask(request(3, FIRST[:100], **how))
    computed = engine.rows - before
    assert distance(engine, cold, 2) < TOLERANCE
    assert distance(engine, cold, 3) < TOLERANCE
    assert computed < 170 + 100
    whole = Engine(model, cached=False)
    turn = (*FIRST, *first, *NEXT)
    whole.ask(request(4, turn))
    engine.ask(request(4, turn, **how))
    assert distance(engine, whole, 4) < TOLERANCE


@pytest.mark.parametrize(
    ("length", "budget", "form"),
    [
        (97, 4096, "host"),
        (112, 19, "device"),
        (129, 31, "host"),
        (150, 4096, "device"),
        (97, 4096, "recorded"),
        (129, 31, "recorded"),
        (150, 70, "recorded"),
        (150, 70, "small recorded"),
        (129, 50, "small recorded"),
        (97, 41, "small recorded"),
    ],
)
def test_hits_of_any_length_in_any_chunks(model: Model, length: int, budget: int, form: str):
    """Beside another prompt that begins cold; layers end where nobody reads their rows, each a window later."""
    ids, other = FIRST[:length], ids_of(90, 7)
    whole = Engine(model, cached=False)
    whole.ask(request(1, ids, truncation="off"), request(2, other, truncation="off"))
    engine = Engine(model, form=form, budget=budget)
    engine.ask(request(3, ids, truncation="halo"))
    engine.ask(request(1, ids, truncation="halo"), request(2, other, truncation="halo"))
    assert distance(engine, whole, 1) < TOLERANCE
    assert distance(engine, whole, 2) < TOLERANCE


def test_a_kept_state_is_gone_on_from_at_once(model: Model, cold: Engine):
    engine = Engine(model)
    engine.ask(request(1, FIRST, mode="snapshot", truncation="halo"))
    before = engine.rows
    engine.ask(request(2, (*FIRST[:144], *NEXT), mode="snapshot", truncation="halo"))
    assert engine.rows - before == 30 + 4
    whole = Engine(model, cached=False)
    whole.ask(request(2, (*FIRST[:144], *NEXT)))
    assert distance(engine, whole, 2) < TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_branches_and_followers(model: Model, form: str):
    """Four branches of one prompt, and a follower that comes while it is computed."""
    whole = Engine(model, cached=False)
    whole.ask(request(1, FIRST))
    params = SamplingParams(temperature=0, max_tokens=5, n=3, ignore_eos=True)
    engine = Engine(model, form=form, budget=64)
    forked = Request(1, FIRST, params, seed=0, cache=CacheOptions(mode="exact"))
    engine.loop.inbox.put(forked)
    tokens = engine.ask(request(2, FIRST, mode="exact"))
    want = whole.ask(request(2, FIRST))[2]
    assert tokens[2] == want
    assert distance(engine, whole, 1) < TOLERANCE
    assert distance(engine, whole, 2) < TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_compact_is_mask_in_any_chunks(model: Model, form: str):
    seen: dict[tuple[str, int], Engine] = {}
    for truncation in ("mask", "compact"):
        for budget in (4096, 37):
            engine = seen[truncation, budget] = Engine(model, form=form, budget=budget)
            engine.ask(request(1, FIRST, truncation=truncation), request(2, ids_of(70, 9), truncation=truncation))
    first = next(iter(seen.values()))
    for engine in seen.values():
        assert distance(engine, first, 1) < TOLERANCE
        assert distance(engine, first, 2) < TOLERANCE


def test_approximations_are_near_and_are_none_where_nothing_is_left_out(model: Model, cold: Engine):
    """`compact` and `replay` differ from a cold start; with as many rows as can be seen they do not."""
    window = model.windows
    compact, replay, wide = Engine(model), Engine(model), Engine(model)
    compact.ask(request(1, FIRST, truncation="compact"))
    assert TOLERANCE < distance(compact, cold, 1) < 3.0
    replay.ask(request(1, FIRST, mode="replay"))
    replay.ask(request(2, (*FIRST[:140], *NEXT), mode="replay"))
    assert TOLERANCE < distance(replay, cold, 2) < 3.0
    rows = window.reach_storing + window.reach_others + 1
    wide.scheduler.prefixes = Prefixes(windows=window, replay_rows=rows, kept_rows=window.reach_others + 1)
    wide.ask(request(1, FIRST, mode="replay", truncation="compact"))
    assert distance(wide, cold, 1) < TOLERANCE


@pytest.mark.parametrize("mode", ["replay", "exact", "snapshot"])
@pytest.mark.parametrize("form", FORMS)
def test_shared_blocks_are_only_read(model: Model, mode: str, form: str):
    engine = Engine(model, form=form)
    engine.ask(request(1, FIRST, mode=mode))
    index = engine.scheduler.cache.prefix
    assert index is not None
    held = {node.block: engine.storage.pool[node.block].clone() for node in index.nodes.values()}
    assert len(held) == 9
    engine.ask(request(2, (*FIRST[:140], *NEXT), mode=mode), request(3, FIRST[:100], mode=mode))
    for block, content in held.items():
        assert torch.equal(engine.storage.pool[block], content)


def test_preempted_and_found_again(model: Model):
    """Too few blocks: a sequence gives its blocks back, finds them again and goes on as if nothing had happened."""
    requests = [
        request(i, ids_of(40, i), tokens=30, mode=mode) for i, mode in enumerate(["replay", "exact", "snapshot"])
    ]
    whole = Engine(model, cached=False)
    want = {each.id: whole.ask(each)[each.id] for each in requests}
    engine = Engine(model, blocks=9)
    assert engine.ask(*requests) == want
    assert engine.scheduler.preemptions > 0
    for each in requests:
        assert distance(engine, whole, each.id) < TOLERANCE


def test_tiny_choices_survive_a_hit(models: Callable[[str], Model]):
    """The configuration as it is: the same greedy tokens from a hit, in every mode that is exact."""
    model = models("tiny")
    whole = Engine(model, cached=False)
    want = whole.ask(request(2, (*FIRST[:140], *NEXT), tokens=8))
    for mode in ("exact", "snapshot"):
        engine = Engine(model)
        engine.ask(request(1, FIRST, mode=mode))
        assert engine.ask(request(2, (*FIRST[:140], *NEXT), tokens=8, mode=mode)) == want


@pytest.mark.parametrize("form", ["host", pytest.param("device", marks=pytest.mark.slow)])
def test_steps_begun_ahead_are_the_same_steps(model: Model, form: str):
    """Three requests that share beginnings, stop and are preempted, each step begun while the one before runs."""
    requests = [request(i, (*FIRST[: 30 + 8 * i], *ids_of(5, i)), tokens=45) for i in range(3)]
    one_by_one = Engine(model, form=form, blocks=7)
    want = one_by_one.ask(*requests)
    ahead = Engine(model, form=form, blocks=7, ahead=True)
    if form != "host":  # draws that the host decides are never ahead
        del ahead.sampler.special
    assert ahead.ask(*requests) == want
    assert one_by_one.scheduler.preemptions > 0
    assert ahead.scheduler.preemptions > 0
    ahead.loop.close()
