"""The pictures of a batch against the serving path: one picture at a time, through `patches` and the tower's span."""

import numpy as np
import pytest
import torch

from benthic.kernels import backends
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.deepseek_v41_vision import VisionTower, patches
from benthic.skills.shapes import draw
from benthic.train import backbone
from benthic.train.pictures import Pictures
from benthic.types import NUMERICS
from tests.train.small import pictures, small_json

CPU = torch.device("cpu")
CONFIG = ModelConfig.from_json(small_json())
assert CONFIG.vision is not None
MADE = pictures(3, 12)


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    made = backbone.build_tower(CONFIG, NUMERICS["float"])
    assert made is not None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(
                torch.randn(value.shape, generator=generator) * (value.shape[-1] ** -0.5 if value.ndim > 1 else 1)
            )
    return made


def some_tokens(book: Pictures) -> tuple[np.ndarray, np.ndarray]:
    """Three pictures among other tokens, one of them twice."""
    numbers, offsets = [-1] * 5, [0] * 5
    for number in (7, 2, 7, 11):
        numbers += [number] * int(book.tokens[number]) + [-1] * 3
        offsets += [*range(int(book.tokens[number])), 0, 0, 0]
    return np.array(numbers), np.array(offsets)


@pytest.mark.parametrize("room", [3, 8])
def test_rows_and_gradients_are_those_of_one_picture_at_a_time(tower: VisionTower, room: int) -> None:
    assert CONFIG.vision is not None
    book = Pictures(MADE, CONFIG.vision, CPU)
    numbers, offsets = some_tokens(book)
    count = len(numbers) + 17
    got = book.show(numbers, offsets, room).embeds(tower, count)
    assert got.shape == (count, CONFIG.text.hidden_size)
    want = torch.zeros_like(got)
    with backends.reference():
        at = 17 + 5
        for number in (7, 2, 7, 11):
            span = tower(*patches(draw(MADE[number]), CONFIG.vision))
            assert len(span) == book.tokens[number]
            want = torch.cat([want[:at], span, want[at + len(span) :]])
            at += len(span) + 3
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(got)
    parameters = list(tower.parameters())
    mine, theirs = torch.autograd.grad(got, parameters, grad), torch.autograd.grad(want, parameters, grad)
    for (name, _), a, b in zip(tower.named_parameters(), mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4, msg=name)
        assert b.any(), name


def test_no_picture_at_all(tower: VisionTower) -> None:
    """A batch of a phase with pictures always has the same shapes, and may show none."""
    assert CONFIG.vision is not None
    book = Pictures(MADE, CONFIG.vision, CPU)
    shown = book.show(np.full(9, -1), np.zeros(9, dtype=np.int64), 4)
    full = book.show(*(part[:9] for part in some_tokens(book)), 4)
    assert [part.shape for part in shown] == [part.shape for part in full]
    got = shown.embeds(tower, 20)
    assert not got.any()
    got.sum().backward()
    for value in tower.parameters():
        assert value.grad is None or not value.grad.any()
        value.grad = None


def test_too_many_pictures_for_the_room() -> None:
    assert CONFIG.vision is not None
    book = Pictures(MADE, CONFIG.vision, CPU)
    with pytest.raises(AssertionError, match="3 pictures in a batch with room for 2"):
        book.show(*some_tokens(book), 2)


def test_what_is_kept_is_what_serving_reads() -> None:
    """Of every picture, and one of its own size from the largest on."""
    assert CONFIG.vision is not None
    book = Pictures(MADE, CONFIG.vision, CPU)
    for number, picture in enumerate(MADE):
        tokens = int(book.tokens[number])
        shown = book.show(np.full(tokens, number), np.arange(tokens), 1)
        rows, geo = patches(draw(picture), CONFIG.vision)
        assert torch.equal((shown.pixels[0, : len(rows)].float() / 255 - 0.5).div(0.5).bfloat16(), rows)
        assert shown.real[0].sum() == len(rows) == geo.grid_h * geo.grid_w
        assert shown.pixels.shape[1] % 8 == 0
