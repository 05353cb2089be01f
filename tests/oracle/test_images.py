"""A prompt with images through the engine against the slow tower and the slow model, token by token, quantisers off.

Nothing is shared but the checkpoint's bytes and Pillow: geometry, canvas, patches, tower, span, routing bias and n-gram
rule are the slow ones on one side, the whole engine in chunks that end inside the spans on the other.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benthic.cache.manager import CacheManager
from benthic.cache.storage import Storage
from benthic.engine.loop import Loop
from benthic.engine.runner import Runner
from benthic.engine.scheduler import Scheduler
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.types import NUMERICS, ImageInput, Request, SamplingParams, TokenLogprobs
from tests.engine.test_equalities import Watching
from tests.oracle import slow_vision
from tests.oracle.conftest import tokens
from tests.oracle.slow_v41 import Array, SlowModel, bf16
from tests.oracle.slow_vision import SlowVision
from tests.oracle.test_logits import TOLERANCE, compare

SIZES = ((84, 84), (150, 61), (30, 110))  # as it is; scaled down with odd margins; scaled up, more tall than wide
TEXT = (7, 3, 30)  # tokens before each image


def picture(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def slow_span(vision: SlowVision, image: Image.Image) -> Array:
    """Embedding rows of an image's span: [tokens, D]."""
    at = slow_vision.geometry(*image.size, vision.vision)
    canvas = np.full((at.height, at.width, 3), 127, dtype=np.uint8)
    inner = image.resize((at.inner_width, at.inner_height), Image.Resampling.BICUBIC)
    canvas[at.top : at.top + at.inner_height, at.left : at.left + at.inner_width] = np.asarray(inner)
    rows, columns = at.height // 14, at.width // 14
    features = vision.tower(bf16(slow_vision.patches(canvas, 14)), rows, columns)
    return vision.span(vision.align(features, rows, columns), at.grid_width, at.grid_height)


class Prompt:
    """Ids with a span for each image, and what stands there."""

    def __init__(self, folder: Path):
        vision = SlowVision(folder)
        self.image_id: int = vision.folder.config["image_token_id"]
        self.ids: list[int] = []
        self.embeds: dict[int, Array] = {}
        self.first: list[int] = []
        words = iter(tokens(sum(TEXT) + 6, 3))
        for count, size in zip(TEXT, SIZES, strict=True):
            self.ids += [next(words) for _ in range(count)]
            self.first.append(len(self.ids))
            for row in slow_span(vision, picture(size)):
                self.embeds[len(self.ids)] = row
                self.ids.append(self.image_id)
        self.ids += list(words)


@pytest.fixture(scope="module")
def prompt(checkpoint: Callable[[str], Path]) -> Prompt:
    return Prompt(checkpoint("tiny"))


@pytest.fixture(scope="module")
def slow(checkpoint: Callable[[str], Path], prompt: Prompt) -> tuple[SlowModel, Array, list[int]]:
    """The slow model, logits of the whole prompt and of three greedy tokens, and these tokens."""
    model, rows, drawn = SlowModel(checkpoint("tiny")), [], []
    for at, token in enumerate(prompt.ids):
        rows.append(model.step(token, at in prompt.embeds, prompt.embeds.get(at))[0])
    for _ in range(3):
        drawn.append(int(np.argmax(rows[-1])))
        rows.append(model.step(drawn[-1])[0])
    return model, np.stack(rows), drawn


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> DeepseekV41:
    return from_checkpoint(Checkpoint.open(checkpoint("tiny")), NUMERICS["float"])


class All(Watching):
    """Keeps the logits of prompt rows too."""

    def __init__(self, vocab_size: int):
        super().__init__(vocab_size)
        self.prompt_rows: list[Tensor] = []

    def score(self, logits: Tensor, targets: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
        self.prompt_rows.append(logits.clone())
        return super().score(logits, targets, top)


@pytest.mark.parametrize("budget", [4096, 11, 1])
def test_the_engine_is_the_slow_model(
    model: DeepseekV41, prompt: Prompt, slow: tuple[SlowModel, Array, list[int]], budget: int
) -> None:
    images = []
    for first, size in zip(prompt.first, SIZES, strict=True):
        out = io.BytesIO()
        picture(size).save(out, "PNG")
        patches = model.read_image(out.getvalue())
        images.append(ImageInput(first, patches.geometry.tokens, str(size), patches))
    storage = Storage(model.cache_spec, 9, 2)
    storage.poison()
    scheduler = Scheduler(CacheManager(9, 2), token_budget=budget, max_context_tokens=1000, vocab_size=4096)
    sampler = All(model.vocab_size)
    loop = Loop(scheduler, Runner(model, storage, sampler))
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    loop.inbox.put(Request(1, tuple(prompt.ids), params, seed=0, images=tuple(images)))
    got: list[int] = []
    while loop.busy:
        loop.step()
        got += [token for event in loop.outbox.take() for token in event.tokens]
    slow_model, want, drawn = slow
    assert got[:3] == drawn
    rows = torch.cat(sampler.prompt_rows).numpy()
    last = torch.stack([row for _, row in sorted(sampler.rows.items())]).numpy()
    compare(
        np.concatenate([rows, last]).astype(np.float64), want, slow_model, f"{len(prompt.ids)} tokens, {budget} a step"
    )


def test_the_slow_model_sees_its_images(prompt: Prompt, slow: tuple[SlowModel, Array, list[int]]) -> None:
    """With the token's own embedding in their place its logits are others: the comparison above is not one of text."""
    model = SlowModel(slow[0].folder.path)
    for at, token in enumerate(prompt.ids[: prompt.first[0] + 3]):
        logits, _ = model.step(token, at in prompt.embeds, None)
    assert np.abs(logits - slow[1][prompt.first[0] + 2]).max() > 100 * TOLERANCE
