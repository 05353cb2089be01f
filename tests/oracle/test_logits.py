"""Quantisers off: the package's logits against the slow float64 model, within 1e-4 (model specification, 6.4).

Nothing here is bit sensitive, so an excess is an error in the algebra, unless a choice of experts or entries was so
close that summation order turned it; the slow model notes those, and the failure names them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.conftest import DRAFTED, LONGEST, SMOOTH, SlowRun, run_slow, tokens
from tests.oracle.package import Package
from tests.oracle.slow_v41 import Array, SlowModel

TOLERANCE = 1e-4
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 130, 300)


def compare(got: Array, want: Array, run: SlowModel, what: str) -> None:
    """Rows within the tolerance; on excess, say whether a near tie came before it."""
    worst = np.abs(got - want).max(axis=1)
    bad = np.flatnonzero(~(worst <= TOLERANCE))
    if not len(bad):
        return
    first = int(bad[0])
    ties = [tie for tie in run.near_ties if tie.position <= first]
    told = "; ".join(f"{t.kind} of layer {t.layer} at {t.position}, gap {t.gap:.1e}" for t in ties) or "none"
    pytest.fail(
        f"{what}: {len(bad)} of {len(worst)} rows beyond {TOLERANCE}, first at position {first} with "
        f"{worst[first]:.2e}, worst {worst.max():.2e}; near ties up to there: {told}"
    )


@pytest.fixture(scope="module")
def package(checkpoint: Callable[[str], Path]) -> Callable[[str], Package]:
    made: dict[str, Package] = {}

    def get(name: str) -> Package:
        if name not in made:
            made[name] = Package(checkpoint(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", ["tiny", "tiny_512"])
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prefill(
    name: str, length: int, package: Callable[[str], Package], slow_run: Callable[[str], SlowRun]
) -> None:
    slow = slow_run(name)
    length = min(length, len(slow.ids))
    got = package(name).run(slow.ids[:length], [length])
    compare(got, slow.logits[:length], slow.model, f"{name}, {length} tokens at once")


@pytest.mark.parametrize(
    ("name", "length", "splits"),
    [
        ("tiny", 300, [37]),  # crosses groups, windows and candidate blocks at odd places
        ("tiny", 8, [1]),  # decode from nothing
        ("tiny", 9, [2, 1]),
        ("tiny", 70, [64, 1]),  # six decode steps from an even and from an odd split
        ("tiny", 71, [65, 1]),
        ("tiny", 137, [127, 2, 1, 3, 1]),
        ("tiny", 300, [293, 1]),  # past the candidate filter: 16 blocks of 8
        ("tiny_512", 130, [37]),
        ("tiny_512", 8, [1]),
        ("tiny_512", 130, [123, 1]),
    ],
    ids=str,
)
def test_prefill_and_decode(
    name: str,
    length: int,
    splits: list[int],
    package: Callable[[str], Package],
    slow_run: Callable[[str], SlowRun],
) -> None:
    slow = slow_run(name)
    got = package(name).run(slow.ids[:length], splits)
    compare(got, slow.logits[:length], slow.model, f"{name}, {length} tokens in {splits}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny_512"])
def test_700_tokens(name: str, package: Callable[[str], Package], checkpoint: Callable[[str], Path]) -> None:
    """Past the original context of YaRN, and for the wide config past the first dropped entry of ratio 1."""
    slow = run_slow(SlowModel(checkpoint(name)), tokens(*LONGEST[name]), DRAFTED)
    for splits in ([700], [37], [689, 1]):
        got = package(name).run(slow.ids, splits)
        compare(got, slow.logits, slow.model, f"{name}, 700 tokens in {splits}")


@pytest.mark.parametrize(("name", "length"), [("tiny", 90), ("tiny_512", 40)])
def test_without_choices(name: str, length: int, checkpoint: Callable[[str], Path]) -> None:
    """All experts, all entries, no candidate filter: no discontinuity is left."""
    slow = run_slow(SlowModel(checkpoint(name), text=SMOOTH), tokens(length))
    got = Package(checkpoint(name), text=SMOOTH).run(slow.ids, [17, 10, 1, 32])
    assert not slow.model.near_ties
    compare(got, slow.logits, slow.model, f"{name}, smooth")


@pytest.mark.parametrize("scale", [1e3, 1e-8])
def test_scaled_streams(scale: float, checkpoint: Callable[[str], Path]) -> None:
    """Embeddings so large or so small that the wrong epsilon, or half precision, shows."""
    folder = checkpoint("tiny")
    embed = SlowModel(folder).embed
    weights = {"embed.weight": (embed * scale).astype(np.float32).astype(np.float64)}
    package = Package(folder, weights=weights)
    weights["embed.weight"] = package.model.embed.weight.double().numpy()  # as rounded to bfloat16
    slow = SlowModel(folder, weights=weights)
    ids = tokens(24)
    compare(package.run(ids, [17, 1]), slow.run(ids), slow, f"embeddings times {scale}")


def image_sequence(width: int) -> tuple[list[int], Array, Array]:
    """Text, a span of image positions, text: ids, which are image positions, and rows for them."""
    random = np.random.default_rng(5)
    ids, images = tokens(40, seed=6), np.zeros(40, dtype=bool)
    images[7:19] = True
    images[30:32] = True
    ids = [4090 if image else token for token, image in zip(ids, images, strict=True)]
    return ids, images, random.standard_normal((40, width)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("splits", [[40], [9, 12, 1]], ids=str)
def test_image_positions(splits: Sequence[int], checkpoint: Callable[[str], Path]) -> None:
    """Image rows replace embeddings, take the image routing bias, break n-grams and skip the n-gram memory."""
    folder = checkpoint("tiny")
    package, slow = Package(folder), SlowModel(folder)
    ids, images, embeds = image_sequence(256)
    want = np.stack([slow.step(t, bool(i), e if i else None)[0] for t, i, e in zip(ids, images, embeds, strict=True)])
    rows, at, sizes = [], 0, list(splits)
    while at < len(ids):
        end = at + (sizes.pop(0) if len(sizes) > 1 else sizes[0])
        rows.append(package.step(ids[at:end], images[at:end], embeds[at:end]))
        at = end
    compare(np.concatenate(rows), want, slow, f"image span in {list(splits)}")


@pytest.mark.parametrize("name", ["tiny", "tiny_512"])
@pytest.mark.parametrize("length", DRAFTED)
def test_draft_block(
    name: str, length: int, package: Callable[[str], Package], slow_run: Callable[[str], SlowRun]
) -> None:
    """DSpark from contexts shorter than, as long as and longer than the window; after an odd chunk."""
    slow = slow_run(name)
    want_tokens, want_logits, want_confidence = slow.drafts[length]
    engine = package(name)
    engine.run(slow.ids[:length], [max(length - 3, 1), 1])
    got = engine.draft(slow.ids[length])
    assert np.abs(got.logits[0].double().numpy() - want_logits).max() <= TOLERANCE
    assert got.tokens[0].tolist() == want_tokens
    assert np.abs(got.confidence[0].double().sigmoid().numpy() - want_confidence).max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["reference", "production"])
@pytest.mark.parametrize("name", ["tiny", "tiny_512"])
def test_quantised_end_to_end(name: str, profile: str, checkpoint: Callable[[str], Path]) -> None:
    """Quantisers on, no choices: rounding over random weights is chaotic, so only the direction is bound (6.4)."""
    slow = run_slow(SlowModel(checkpoint(name), profile, SMOOTH), tokens(90))
    got = Package(checkpoint(name), profile, SMOOTH).run(slow.ids, [57, 1, 32])
    size = np.linalg.norm(got, axis=1) * np.linalg.norm(slow.logits, axis=1)
    cosine = (got * slow.logits).sum(1) / size
    assert cosine.min() >= 0.985
    assert np.median(cosine) >= 0.995


def test_near_tie_is_named(checkpoint: Callable[[str], Path]) -> None:
    """A tie that is there is noted, with its place; the comparison's failure names it."""
    folder = checkpoint("tiny")
    bias = SlowModel(folder).folder.get("layers.3.ffn.gate.bias")
    slow = SlowModel(
        folder, weights={"layers.3.ffn.gate.weight": np.zeros((16, 256)), "layers.3.ffn.gate.bias": bias * 0}
    )
    want = slow.run(tokens(3))
    ties = [(tie.position, tie.kind) for tie in slow.near_ties if tie.layer == 3]
    assert ties == [(0, "experts"), (1, "experts"), (2, "experts")]
    with pytest.raises(pytest.fail.Exception, match="experts of layer 3 at 0"):
        compare(want + 1, want, slow, "moved")
