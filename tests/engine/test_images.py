"""Images through the engine: whatever is cut, batched, preempted or ended, the answer and what is kept are the same.

The real model, tiny, without quantisers. Against the slow model: `tests/oracle/test_images.py`.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benthic import metrics
from benthic.cache.manager import CacheManager
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.loop import Loop
from benthic.engine.runner import Model, Runner
from benthic.engine.sampler import Sampler
from benthic.engine.scheduler import Scheduler
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS, Abort, CacheOptions, Chunk, FinishReason, ImageInput, Request, SamplingParams
from tests.engine.test_graphs import FakeRecorder
from tests.engine.test_prefix_equalities import Engine, distance

TOLERANCE = 1e-5
BLOCK = 16
IMAGE_ID = 4090
SMOOTH = {"index_topk": 512, "candidate_topk_blocks": 128, "num_experts_per_tok": 16}  # no choice that may turn


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    return from_checkpoint(Checkpoint.open(make_tiny(tmp_path_factory.mktemp("model") / "tiny")), NUMERICS["float"])


def noise(width: int, height: int, seed: int = 0) -> bytes:
    """A picture whose every pixel matters."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


SMALL, WIDE, TALL = noise(84, 84, 1), noise(126, 60, 2), noise(50, 200, 3)


def request(number: int, model: DeepseekV41, parts: Sequence[int | bytes], **params: Any) -> Request:
    """A prompt of text, so many tokens, and images."""
    generator = torch.Generator().manual_seed(number)
    ids: list[int] = []
    images: list[ImageInput] = []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(3, 4000, (part,), generator=generator).tolist()
            continue
        patches = model.read_image(part)
        images.append(ImageInput(len(ids), patches.geometry.tokens, str(hash(part)), patches))
        ids += [IMAGE_ID] * patches.geometry.tokens
    wanted = {"temperature": 0, "max_tokens": 5, "logprobs": 0, "prompt_logprobs": 0} | params
    return Request(number, tuple(ids), SamplingParams(**wanted), seed=7 * number, images=tuple(images))


@dataclass
class Answers:
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    prompt: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[tuple[int, int], FinishReason | None] = field(default_factory=dict)
    read: int = 0  # images that went through the tower
    most: int = 0  # image rows kept at a time
    preempted: list[int] = field(default_factory=list)  # image rows that were kept before each step with a preemption


Form = Callable[[Model, Storage, Sampler], Runner]


def host(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    return Runner(model, storage, sampler)


def eager(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    return Runner(model, storage, sampler, on_device=True)


def recorded(model: Model, storage: Storage, sampler: Sampler) -> Runner:
    runner = Runner(model, storage, sampler, on_device=True, graph_rows=128)
    runner.capture(FakeRecorder())
    return runner


def engine(
    model: Model,
    form: Form = host,
    *,
    budget: int = 4096,
    blocks: int = 80,
    slots: int = 1,
    image_tokens: int = 4096,
    device: str = "cpu",
) -> Loop:
    storage = Storage(model.cache_spec, blocks + 1, slots + 1, device, block_tokens=BLOCK)
    storage.poison()
    scheduler = Scheduler(
        CacheManager(blocks + 1, slots + 1, BLOCK),
        token_budget=budget,
        max_context_tokens=model.max_positions,
        vocab_size=model.vocab_size,
        image_tokens=image_tokens,
    )
    return Loop(scheduler, form(model, storage, Sampler(model.vocab_size, device)))


def kept(loop: Loop) -> int:
    assert isinstance(loop.runner, Runner)
    return loop.runner.image_tokens


def read_so_far() -> float:
    return metrics.REGISTRY.get_sample_value("benthic_images_read_total") or 0.0


def drive(loop: Loop, requests: Sequence[Request], aborts: dict[int, Abort] | None = None) -> Answers:
    """Run it all. aborts: number of the step before which they come. Nothing is kept when all is over."""
    for r in requests:
        loop.inbox.put(r)
    found, step, before = Answers(), 0, read_so_far()
    while loop.busy:
        if aborts and step in aborts:
            loop.inbox.put(aborts[step])
        rows, preemptions = kept(loop), loop.scheduler.preemptions
        loop.step()
        step += 1
        found.preempted += [rows] * (loop.scheduler.preemptions - preemptions)
        loop.scheduler.check_invariants()
        found.most = max(found.most, kept(loop))
        for event in loop.outbox.take():
            assert event.error is None, event.error
            key = event.request, event.branch
            found.tokens.setdefault(key, []).extend(event.tokens)
            found.logprobs.setdefault(key, []).extend(entry.logprob for entry in event.logprobs)
            found.prompt.setdefault(event.request, []).extend(entry.logprob for entry in event.prompt_logprobs)
            if event.usage is not None:
                found.ends[key] = event.finish
    assert kept(loop) == 0
    found.read = int(read_so_far() - before)
    return found


def answer(model: Model, requests: Sequence[Request], form: Form = host, **sizes: Any) -> Answers:
    return drive(engine(model, form, **sizes), requests)


_ALONE: dict[object, Answers] = {}


def alone(model: DeepseekV41, r: Request) -> Answers:
    """The request whole, with nothing beside it. The same one is asked once."""
    key = (id(model), r.prompt, r.params, r.seed, tuple(image.digest for image in r.images))
    if key not in _ALONE:
        _ALONE[key] = answer(model, [r], slots=r.params.n)
    return _ALONE[key]


def assert_same(got: Answers, want: Answers, number: int, tolerance: float = TOLERANCE) -> None:
    keys = [key for key in want.tokens if key[0] == number]
    assert keys
    for key in keys:
        assert got.tokens[key] == want.tokens[key]
        assert got.logprobs[key] == pytest.approx(want.logprobs[key], abs=tolerance)
    assert got.prompt[number] == pytest.approx(want.prompt[number], abs=tolerance)


# ---- what must not change an answer ----------------------------------------------------------------------------------


def test_an_image_is_seen(model: DeepseekV41):
    """Another picture of the same size: another answer from its first row on. No picture: from the span's start on."""
    one = answer(model, [request(1, model, [9, SMALL, 6])])
    other = answer(model, [request(1, model, [9, noise(84, 84, 5), 6])])
    blank = request(1, model, [9, SMALL, 6])
    blank.images = ()
    without = answer(model, [blank])
    for different, first in ((other, 10), (without, 9)):  # every image's row 9 is the same: the start vector
        moved = np.abs(np.subtract(different.prompt[1], one.prompt[1]))  # entry i: what row i says of token i + 1
        assert moved[:first].max() <= TOLERANCE
        assert moved[first:].min() > 1e-3


@pytest.mark.parametrize(
    ("form", "cuts"),
    [(host, range(10, 21)), (eager, range(2, 12)), pytest.param(host, range(1, 31), marks=pytest.mark.slow)],
    ids=["second", "first", "all"],
)
def test_a_cut_at_every_offset_of_a_span(model: DeepseekV41, form: Form, cuts: range):
    """Three images, two of which touch, in two chunks."""
    r = request(1, model, [2, SMALL, 1, WIDE, SMALL, 2], max_tokens=1)
    whole = alone(model, r)
    assert len(r.prompt) == 31
    for cut in cuts:
        loop = engine(model, form, budget=cut)
        loop.inbox.put(r)
        loop.step()
        loop.scheduler.token_budget = 4096
        rest = drive(loop, [])
        assert rest.logprobs[1, 0] == pytest.approx(whole.logprobs[1, 0], abs=TOLERANCE), f"cut before token {cut}"
        assert rest.tokens == whole.tokens
        assert rest.prompt[1] == pytest.approx(whole.prompt[1][-len(rest.prompt[1]) :], abs=TOLERANCE)


@pytest.mark.parametrize("size", [2, 5, 7, 16])
def test_chunks_of_one_size(model: DeepseekV41, size: int):
    """The tower runs once, however many chunks there are."""
    r = request(1, model, [3, SMALL, 2, WIDE, TALL, 4], max_tokens=2)
    cut = answer(model, [r], budget=size)
    assert cut.read == 3
    assert_same(cut, alone(model, r), 1)


@pytest.mark.parametrize("form", [host, eager, recorded])
def test_token_by_token(model: DeepseekV41, form: Form):
    """One row a step, image rows among them: such a step is no decode step, whether or not its row is scored."""
    r = request(1, model, [3, SMALL, 2], max_tokens=2)
    assert_same(answer(model, [r], form, budget=1), alone(model, r), 1)
    r.params = replace(r.params, prompt_logprobs=None)
    assert_same(answer(model, [r], form, budget=1), alone(model, r), 1)


@pytest.mark.parametrize(
    "parts",
    [[SMALL, 5], [5, SMALL], [SMALL], [SMALL, SMALL], [70, TALL, 70, WIDE, 3]],
    ids=["first", "last", "alone", "twice", "far"],
)
def test_an_image_anywhere(model: DeepseekV41, parts: list[int | bytes]):
    r = request(1, model, parts)
    assert_same(answer(model, [r], budget=7), alone(model, r), 1)


@pytest.mark.parametrize("form", [host, eager, recorded])
def test_beside_others_as_alone(model: DeepseekV41, form: Form):
    mix: list[list[int | bytes]] = [[40], [9, SMALL, 6], [2], [TALL, 30, SMALL, 5], [12, WIDE], [65]]
    requests = [request(i, model, parts, max_tokens=3) for i, parts in enumerate(mix)]
    together = answer(model, requests, form, budget=23, slots=6)
    for r in requests:
        assert_same(together, alone(model, r), r.id)


@pytest.mark.parametrize("form", [host, eager])
def test_preempted_while_it_decodes(model: DeepseekV41, form: Form):
    requests = [request(0, model, [10], max_tokens=18), request(1, model, [4, SMALL, 4], max_tokens=18)]
    tight = answer(model, requests, form, blocks=4, slots=2)
    assert tight.preempted == [0], "its rows were let go of when the prompt was read"
    assert tight.read == 2
    for r in requests:
        assert_same(tight, alone(model, r), r.id)


@pytest.mark.parametrize("form", [host, eager])
def test_preempted_inside_a_span(model: DeepseekV41, form: Form):
    """Those that decode take the block that the other's image needs next."""
    requests = [request(i, model, [15], max_tokens=24) for i in range(2)]
    requests.append(request(2, model, [20, TALL, 4], max_tokens=1))
    tight = answer(model, requests, form, budget=4, blocks=8, slots=3)
    assert tight.preempted == [17], "one preemption, while the rows of its image were kept"
    assert tight.read == 2
    for r in requests:
        assert_same(tight, alone(model, r), r.id)


def test_the_order_of_images_matters(model: DeepseekV41):
    there, back = (answer(model, [request(1, model, [4, a, 4, b, 4])]) for a, b in ((SMALL, WIDE), (WIDE, SMALL)))
    assert there.tokens != back.tokens or there.prompt != back.prompt


def test_the_same_image_twice_is_read_once(model: DeepseekV41):
    counting, parts = Failing(model), [4, WIDE, 2, SMALL, 4, SMALL, 4]
    twice = answer(counting, [request(1, model, parts)])  # pyright: ignore[reportArgumentType]
    assert twice.read == counting.towers == 2
    apart = request(1, model, parts)
    apart.images = tuple(replace(image, digest=str(i)) for i, image in enumerate(apart.images))
    want = answer(model, [apart])
    assert want.read == 3
    assert_same(twice, want, 1, 0.0)


def test_an_earlier_turn(model: DeepseekV41):
    """A prompt that goes on after an image's turn: its first part has the log-probabilities that it had alone."""
    long, short = request(1, model, [5, SMALL, 9, 7]), request(1, model, [5, SMALL, 9])
    first, later = answer(model, [short]), answer(model, [long], budget=11)
    count = len(short.prompt) - 1
    assert later.prompt[1][:count] == pytest.approx(first.prompt[1], abs=TOLERANCE)


@pytest.mark.parametrize("form", [host, eager])
def test_branches_share_their_rows(model: DeepseekV41, form: Form):
    r = request(1, model, [6, SMALL, 6, WIDE, 6], n=3, temperature=1.0, max_tokens=2)
    at_once = answer(model, [r], form, budget=9, slots=3)
    assert len(at_once.tokens) == 3
    assert at_once.read == 2
    in_turn = answer(model, [r], budget=9, slots=1)
    assert in_turn.read == 6, "let go of with each branch's prefill, and made again for the next"
    assert_same(at_once, in_turn, 1)


@pytest.mark.parametrize("numerics", ["reference", "production"])
def test_the_forms_agree_in_a_quantised_profile(tmp_path_factory: pytest.TempPathFactory, numerics: str):
    """Roundings differ, the picture does not: another one moves an answer several times as far."""
    folder = make_tiny(tmp_path_factory.mktemp("model") / "tiny", **SMOOTH)
    quantised = from_checkpoint(Checkpoint.open(folder), NUMERICS[numerics])
    r = request(1, quantised, [9, SMALL, 4, TALL, 6], max_tokens=3)
    want = answer(quantised, [r])
    got = answer(quantised, [r], eager)
    other = answer(quantised, [request(1, quantised, [9, noise(84, 84, 5), 4, TALL, 6], max_tokens=3)], eager)
    near, far = (np.abs(np.subtract(x.prompt[1], want.prompt[1])).mean() for x in (got, other))
    assert near < 0.25 * far
    assert quantised.image_rows(r.images[0].patches).dtype == torch.bfloat16


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_rows_go_when_the_prompt_is_read(model: DeepseekV41):
    loop = engine(model, budget=10)
    r = request(1, model, [4, SMALL, 4, SMALL, 9], max_tokens=6)  # 33 tokens, images up to 24
    loop.inbox.put(r)
    counts = []
    while loop.busy:
        loop.step()
        counts.append(kept(loop))
    assert counts[:4] == [16, 16, 16, 0], "made with the first step, gone when the first step without them begins"
    assert not any(counts[4:])


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_an_abort_frees_at_any_moment(model: DeepseekV41, steps: int):
    loop = engine(model, budget=10)
    loop.inbox.put(request(1, model, [14, SMALL, 4, SMALL, 9], max_tokens=30))
    for _ in range(steps):
        loop.step()
    assert kept(loop) == (16 if 2 <= steps <= 4 else 0)
    loop.inbox.put(Abort(1))
    loop.settle()
    assert kept(loop) == 0


def test_an_abort_of_one_branch_leaves_the_other_its_rows(model: DeepseekV41):
    r = request(1, model, [14, SMALL, 4], n=2)
    want = answer(model, [r], slots=2)
    loop = engine(model, budget=20, slots=2)
    got = drive(loop, [r], {2: Abort(1, 0)})
    assert got.ends[1, 0] is FinishReason.ABORT
    assert got.tokens[1, 1] == want.tokens[1, 1]


def test_one_that_ends_with_its_prompt(model: DeepseekV41):
    loop = engine(model)
    loop.inbox.put(request(1, model, [4, SMALL, 4], max_tokens=1))
    loop.step()
    assert not loop.busy
    assert kept(loop) == 0


class Failing:
    """A model whose forward pass, or tower, raises once. Otherwise the model."""

    def __init__(self, model: DeepseekV41, *, forward_at: int = -1, tower_at: int = -1):
        self.model, self.forward_at, self.tower_at = model, forward_at, tower_at
        self.forwards = self.towers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Any, memory: Any) -> Any:
        self.forwards += 1
        if self.forwards == self.forward_at:
            raise RuntimeError("the device is gone")
        return self.model.forward(batch, memory)

    def image_rows(self, patches: object) -> Tensor:
        self.towers += 1
        if self.towers == self.tower_at:
            raise RuntimeError("the device is gone")
        return self.model.image_rows(patches)


@pytest.mark.parametrize("form", [host, eager])
@pytest.mark.parametrize("where", [{"forward_at": 1}, {"forward_at": 2}, {"tower_at": 1}, {"tower_at": 2}], ids=str)
def test_a_step_that_fails_is_computed_again(model: DeepseekV41, form: Form, where: dict[str, int]):
    failing = Failing(model, **where)
    requests = [request(1, model, [4, SMALL, 4, WIDE, 9], max_tokens=2), request(2, model, [30], max_tokens=2)]
    loop = engine(failing, form, budget=21, slots=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match="gone"):
        drive(loop, requests)
    got = drive(loop, [])
    for r in requests:
        want = alone(model, r)
        tokens = {key: tokens for key, tokens in got.tokens.items() if key[0] == r.id}
        assert tokens == want.tokens


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("form", [host, eager])
def test_a_failed_request_leaves_nothing(model: DeepseekV41, form: Form, step: int):
    loop = engine(Failing(model, forward_at=step), form, budget=9)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match="gone"):
        drive(loop, [request(1, model, [4, SMALL, 4, WIDE, 9])])
    loop.inbox.put(Abort(1))
    loop.settle()
    assert kept(loop) == 0
    assert not loop.busy


def test_rows_are_bounded(model: DeepseekV41):
    """Images of 17 tokens: two at a time where both fit, and one after the other where they do not."""
    requests = [request(i, model, [TALL, 3]) for i in range(3)]
    requests.append(request(3, model, [4]))
    wide, narrow = (answer(model, requests, budget=12, slots=4, image_tokens=rows) for rows in (34, 33))
    assert (wide.most, narrow.most) == (34, 17)
    for r in requests:
        assert_same(narrow, wide, r.id)


# ---- behind what is cached -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    """Short windows, so that a beginning that is skipped is not computed again for their sake."""
    folder = make_tiny(tmp_path_factory.mktemp("model") / "narrow", sliding_window=8, **SMOOTH)
    return from_checkpoint(Checkpoint.open(folder), NUMERICS["float"])


def cacheable(number: int, model: DeepseekV41, ids_of: int, parts: Sequence[int | bytes], mode: str) -> Request:
    """The same text for the same `ids_of`, whatever the number."""
    r = request(ids_of, model, parts, prompt_logprobs=None, logprobs=None, ignore_eos=True)
    return replace(r, id=number, cache=CacheOptions(mode=mode))


@pytest.mark.parametrize(
    ("mode", "form", "ahead"),
    [
        ("exact", "recorded", True),
        ("snapshot", "host", False),
        pytest.param("exact", "host", False, marks=pytest.mark.slow),
        pytest.param("snapshot", "device", True, marks=pytest.mark.slow),
    ],
)
def test_behind_a_cached_beginning(narrow: DeepseekV41, mode: str, form: str, ahead: bool):
    """Blocks of 16: an image before the hit, one it ends in, one behind it, and another picture in the same place."""
    other = noise(50, 200, 9)
    asked = [
        cacheable(1, narrow, 1, [20, SMALL, 9, TALL, 60], mode),  # spans 20 to 27 and 37 to 53
        cacheable(2, narrow, 1, [20, SMALL, 9, TALL, 60, SMALL, 5], mode),
        cacheable(3, narrow, 1, [20, SMALL, 9, other, 60], mode),
        cacheable(4, narrow, 1, [20, SMALL, 9, TALL, 3, WIDE, 2], mode),
    ]
    cold, warm = Engine(narrow, cached=False), Engine(narrow, form=form, ahead=ahead, budget=23)
    read: list[float] = []
    for r in asked:
        cold.ask(r)
        before = read_so_far()
        warm.ask(r)
        assert distance(warm, cold, r.id) < TOLERANCE
        read.append(read_so_far() - before)
    assert isinstance(warm.loop.runner, Runner)
    assert warm.loop.runner.image_tokens == 0
    warm.loop.close()
    if mode == "snapshot":
        assert read[:3] == [2, 1, 2], "of the second prompt only the new image is behind what is kept"
    assert sum(read) < 2 + 3 + 2 + 3


# ---- where rows stand in a step --------------------------------------------------------------------------------------


def chunk(request: int, start: int, count: int) -> Chunk:
    return Chunk(request, start, (5,) * count, 0, False, slot=1, blocks=(1,))


def test_placement_of_a_mixed_step():
    rows = torch.arange(10.0)[:, None]  # images of 4 and 6 tokens
    images = (ImageInput(3, 4, "a"), ImageInput(9, 6, "b"))
    other = batches.ImageRows((ImageInput(0, 2, "c"),), torch.tensor([[20.0], [21.0]]))
    placed = batches.place(
        [chunk(7, 5, 1), chunk(1, 5, 6), chunk(2, 1, 2)], {1: batches.ImageRows(images, rows), 2: other}
    )
    assert placed is not None
    assert placed.places.tolist() == [-1, 0, 1, -1, -1, 2, 3, 4, -1]
    assert placed.rows[:, 0].tolist() == [2, 3, 4, 5, 21]


def test_text_steps_have_no_placement():
    kept = {1: batches.ImageRows((ImageInput(3, 4, "a"),), torch.zeros(4, 1))}
    assert batches.place([chunk(1, 0, 3), chunk(1, 7, 2), chunk(2, 3, 4)], kept) is None
    assert batches.place([chunk(1, 3, 1)], {}) is None


def test_what_a_step_on_a_device_is_told(model: DeepseekV41):
    storage = Storage(model.cache_spec, 9, 5, block_tokens=BLOCK, table_blocks=4)
    plan = _plan(chunk(1, 2, 3))._replace(images=((1, (ImageInput(3, 4, "a"),)),))
    rows = torch.arange(8.0).view(4, 2)
    placed = batches.place(plan.chunks, {1: batches.ImageRows(plan.images[0][1], rows)})
    for batch in (batches.Uploads(storage).step(plan, placed).batch, batches.build(plan, storage, placed)):
        assert batch.images is not None
        assert batch.embeds is not None
        assert batch.images.tolist() == [False, True, True]
        assert batch.embeds[1:].tolist() == [[0, 1], [2, 3]]
    for batch in (batches.Uploads(storage).step(plan).batch, batches.build(plan, storage)):
        assert (batch.images, batch.embeds) == (None, None)


def _plan(*chunks: Chunk) -> Any:
    from benthic.types import StepPlan

    return StepPlan(0, chunks, ())


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["float", "production"])
def test_a_gpu_answers_as_the_cpu_does(tmp_path_factory: pytest.TempPathFactory, numerics: str):
    folder = make_tiny(tmp_path_factory.mktemp("model") / "tiny", **SMOOTH)
    checkpoint = Checkpoint.open(folder)
    here, there = (from_checkpoint(checkpoint, NUMERICS[numerics], device) for device in ("cpu", "cuda"))
    mix: list[list[int | bytes]] = [[40], [9, SMALL, 6], [TALL, 30, SMALL, 5], [12, WIDE]]
    requests = [request(i, here, parts, max_tokens=3) for i, parts in enumerate(mix)]
    want = answer(here, requests, budget=23, slots=4)

    def captured(model: Model, storage: Storage, sampler: Sampler) -> Runner:
        runner = Runner(model, storage, sampler)
        runner.capture()
        return runner

    got = answer(there, requests, captured, budget=23, slots=4, device="cuda")
    assert got.read == want.read == 4
    for r in requests:
        if numerics == "float":
            assert_same(got, want, r.id, 1e-3)
        assert got.prompt[r.id] == pytest.approx(want.prompt[r.id], abs=1e-3 if numerics == "float" else 0.5)
