"""The sampling kernels against slow answers: exact integers, a sorted reference, chi-square."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.errors import ShapeError
from benthic.kernels import backends, sample

UNIT = 2**40


def slow_mix(x: int) -> int:
    m = 2**64 - 1
    x &= m
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m
    return x ^ (x >> 31)


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40), purpose=st.integers(0, 2))
def test_random_bits_are_splitmix_in_64_bits(seed: int, position: int, purpose: int):
    golden = 0x9E3779B97F4A7C15
    want = slow_mix(slow_mix(seed + golden) + (3 * position + purpose + 1) * golden) >> 11
    got = sample.random_bits(torch.tensor([seed]), torch.tensor([position]), purpose)
    assert got.tolist() == [want]


def test_random_bits_look_uniform_and_differ_by_key():
    keys = torch.arange(20000)
    streams = [
        sample.random_bits(torch.zeros_like(keys), keys),
        sample.random_bits(keys, torch.zeros_like(keys)),
        sample.random_bits(keys, torch.zeros_like(keys), sample.ACCEPT),
    ]
    for bits in streams:
        counts = np.bincount((bits >> 47).numpy(), minlength=64)
        assert ((counts - 312.5) ** 2 / 312.5).sum() < 110  # chi-square, 63 degrees of freedom, 1 in 5000
        assert len(set(bits.tolist())) == 20000
    assert not set(streams[1].tolist()) & set(streams[2].tolist())


# ---- the draw --------------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float):
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.5, -math.inf, 3.0, -4.0, 1.0]])
    weights = sample.token_weights(logits, logits.max(1).values, torch.tensor([temperature], dtype=torch.float64))
    draws = 1_000_000
    bits = sample.random_bits(torch.arange(draws), torch.full((draws,), 9))
    counts = np.zeros(8)
    for part in bits.split(100_000):
        counts += np.bincount(sample.draw(weights.expand(len(part), -1).contiguous(), part).numpy(), minlength=8)
    want = torch.softmax(logits.double() / temperature, 1)[0].numpy()
    assert chi_square(counts, want) < 26  # 6 degrees of freedom, 1 in 5000


@given(
    weights=st.lists(st.integers(0, UNIT), min_size=1, max_size=40).filter(any),
    bits=st.integers(0, 2**53 - 1),
)
def test_the_draw_inverts_the_cumulative_sum(weights: list[int], bits: int):
    got = int(sample.draw(torch.tensor([weights]), torch.tensor([bits]))[0])
    point = min(int(float(bits) * 2.0**-53 * float(sum(weights))), sum(weights) - 1)
    running = 0
    for want, weight in enumerate(weights):
        running += weight
        if running > point:
            assert got == want
            assert weight > 0
            return
    pytest.fail("the reference found nothing")


def test_the_ends_of_the_unit_interval():
    weights = torch.tensor([[0, 3, 0, UNIT, 0]] * 2)
    assert sample.draw(weights, torch.tensor([0, 2**53 - 1])).tolist() == [1, 3]


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(3)
    logits = torch.randn(33, 1031) * 4
    temperature = torch.rand(33, dtype=torch.float64) + 0.2
    bits = sample.random_bits(torch.arange(33) * 7919, torch.arange(33))
    top_k, top_p = [5 + i for i in range(33)], [0.5 + i / 70 for i in range(33)]

    def tokens(rows: list[int]) -> list[tuple[int, int]]:
        x = logits[rows]
        k, p = [top_k[i] for i in rows], [top_p[i] for i in rows]
        ids, weights = sample.narrow(x, x.max(1).values, temperature[rows], k, p, [0.01] * len(rows))
        some = ids.gather(1, sample.draw(weights, bits[rows])[:, None])[:, 0]
        every = sample.draw(sample.token_weights(x, x.max(1).values, temperature[rows]), bits[rows])
        return list(zip(some.tolist(), every.tolist(), strict=True))

    together = tokens(list(range(33)))
    assert [tokens([i])[0] for i in range(33)] == together
    order = torch.randperm(33).tolist()
    assert tokens(order) == [together[i] for i in order]


def test_extreme_logits_and_temperatures():
    logits = torch.tensor([[3e38, -3e38, 3e38, 0.0], [-3e38, -3.1e38, -3e38, -math.inf], [1e-40, 0.0, -1e-40, -1.0]])
    for temperature in (1e-6, 1.0, 100.0):
        t = torch.full((3,), temperature, dtype=torch.float64)
        weights = sample.token_weights(logits, logits.max(1).values, t)
        assert weights.min() >= 0
        assert weights.max() == UNIT
        assert weights[0, 0] == weights[0, 2] == weights[1, 0] == weights[1, 2] == weights[2, 0] == UNIT
        assert weights[0, 1] == weights[1, 3] == 0


def test_no_rows_and_bad_shapes():
    none = torch.zeros(0, 7, dtype=torch.int64)
    assert sample.draw(none, torch.zeros(0, dtype=torch.int64)).shape == (0,)
    empty = sample.narrow(torch.zeros(0, 7), torch.zeros(0), torch.ones(0, dtype=torch.float64), [], [], [])
    assert empty.ids.shape[0] == empty.weights.shape[0] == 0
    assert sample.keep_share(none, []).shape == (0, 7)
    assert sample.rank_logprobs(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), 3).ids.shape == (0, 0)
    with pytest.raises(ShapeError):
        sample.draw(none, torch.zeros(1, dtype=torch.int64))


# ---- filters ---------------------------------------------------------------------------------------------------------


def slow_filter(logits: list[float], weights: list[int], k: int, p: float, min_p: float) -> set[int]:
    """Ids that stay, by a stable sort and running sums."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < k < len(order):
        order = order[:k]
    if p < 1:
        total, running, kept = sum(weights[i] for i in order), 0, []
        for i in order:
            if kept and running >= p * total:
                break
            kept.append(i)
            running += weights[i]
        order = kept
    return {i for i in order if weights[i] and weights[i] >= min_p * UNIT}


@settings(max_examples=300, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 40), rows=st.integers(1, 4))
def test_filters_against_a_sorted_reference(data: st.DataObject, vocab: int, rows: int):
    value = st.sampled_from([0.0, 1.0, 1.5, -2.0, 3.0]) | st.floats(-5, 5, width=32)  # ties are common
    logits = torch.tensor(
        data.draw(st.lists(st.lists(value, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows))
    )
    top_k = data.draw(st.lists(st.integers(0, vocab + 2), min_size=rows, max_size=rows))
    top_p = data.draw(st.lists(st.sampled_from([1.0, 0.9, 0.5, 1e-6, 0.999]), min_size=rows, max_size=rows))
    min_p = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.5]), min_size=rows, max_size=rows))
    check_filters(logits, top_k, top_p, min_p)


def check_filters(logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> None:
    one = torch.ones(len(logits), dtype=torch.float64)
    weights = sample.token_weights(logits, logits.max(1).values, one)
    ids, kept = sample.narrow(logits, logits.max(1).values, one, top_k, top_p, min_p)
    assert (ids.diff(dim=1) > 0).all()
    for r in range(len(logits)):
        want = slow_filter(logits[r].tolist(), weights[r].tolist(), top_k[r], top_p[r], min_p[r])
        got = {i: w for i, w in zip(ids[r].tolist(), kept[r].tolist(), strict=True) if w}
        assert set(got) == want
        assert all(abs(got[i] - int(weights[r, i])) <= 1 for i in want)


def test_min_p_alone():
    logits = torch.randn(3, 50)
    weights = sample.token_weights(logits, logits.max(1).values, torch.ones(3, dtype=torch.float64))
    got = sample.keep_share(weights, [0.0, 0.3, 0.99])
    for r, share in enumerate([0.0, 0.3, 0.99]):
        assert got[r].tolist() == [w if w >= share * UNIT else 0 for w in weights[r].tolist()]


@pytest.mark.parametrize("vocab", [513, 2000])
def test_top_p_beyond_the_first_candidates(vocab: int):
    torch.manual_seed(5)
    logits = torch.randn(6, vocab) * 0.1  # flat: the nucleus is most of the vocabulary
    logits[1] *= 100  # peaked: it is a few tokens
    logits[4] = 0.0  # all equal
    check_filters(logits, [0, 0, 700, 3, 0, 0], [0.9, 0.9, 0.95, 0.5, 0.25, 1.0], [0.0] * 6)
    check_filters(logits[:5], [0, 0, 700, 3, 0], [0.9, 0.9, 0.95, 0.5, 0.25], [0.0] * 5)
    check_filters(logits[1:2], [0], [0.9], [0.1])


# ---- penalties, log-probabilities ------------------------------------------------------------------------------------


def test_penalties_against_a_loop():
    torch.manual_seed(1)
    logits = torch.randn(60) * 3
    counts = torch.randint(0, 3, (60,)).float()
    repetition = torch.tensor([1.0, 1.7, 0.4]).repeat(20)
    presence, frequency = torch.tensor([0.0, 1.5, -2.0, 0.3]).repeat(15), torch.tensor([0.3, 0, 2]).repeat(20)
    got = sample.apply_penalties(logits, counts, repetition, presence, frequency)
    for i in range(60):
        x = float(logits[i])
        x = x / float(repetition[i]) if x > 0 else x * float(repetition[i])
        x -= float(frequency[i]) * float(counts[i])
        x -= float(presence[i]) if counts[i] else 0.0
        assert float(got[i]) == pytest.approx(x, abs=1e-6)


@pytest.mark.parametrize("k", [0, 1, 3, 9])
def test_logprobs_are_a_log_softmax_with_ties_by_lowest_id(k: int):
    logits = torch.tensor([[1.0, 2.0, 2.0, -math.inf, 0.0, 2.0, 1.0, 1.0, -3.0], [0.0] * 9])
    ranked = sample.rank_logprobs(logits, torch.tensor([4, 8]), k)
    exact = torch.log_softmax(logits.double(), 1)
    assert torch.allclose(ranked.chosen.double(), exact[[0, 1], [4, 8]], atol=1e-6)
    for r in range(2):
        want = sorted(range(9), key=lambda i: (-float(logits[r, i]), i))[:k]
        assert ranked.ids[r].tolist() == want
        assert torch.allclose(ranked.top[r].double(), exact[r, want], atol=1e-6)


def test_logprobs_of_damaged_rows_do_not_fail():
    logits = torch.full((2, 5), math.nan)
    logits[1, 2] = 1.0
    ranked = sample.rank_logprobs(logits, torch.tensor([0, 2]), 2)
    assert ranked.ids.shape == (2, 2)


def test_non_contiguous_rows():
    torch.manual_seed(2)
    wide = torch.randn(4, 2 * 97)
    logits = wide[:, ::2]
    temperature = torch.ones(4, dtype=torch.float64)
    a = sample.token_weights(logits, logits.max(1).values, temperature)
    b = sample.token_weights(logits.contiguous(), logits.max(1).values, temperature)
    assert torch.equal(a, b)
    check_filters(logits, [7] * 4, [0.7] * 4, [0.0] * 4)


# ---- whole rows, on every device -------------------------------------------------------------------------------------


class Row(NamedTuple):
    """How one row is drawn."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 7
    position: int = 3


def run_rows(
    logits: torch.Tensor, rows: Sequence[Row], device: torch.device, mask: torch.Tensor | None = None
) -> tuple[list[int], torch.Tensor]:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)

    whole, real = torch.int64, torch.float64
    tokens, peaks = sample.sample_rows(
        logits.to(device),
        column("seed", whole),
        column("position", whole),
        column("temperature", real),
        column("top_k", whole),
        column("top_p", real),
        column("min_p", real),
        mask=None if mask is None else mask.to(device),
    )
    assert tokens.dtype == torch.int64
    return tokens.tolist(), peaks.cpu()


def slow_token(logits: torch.Tensor, row: Row) -> int:
    """One token by the steps as they are written down; logits [V] finite or -inf."""
    if row.temperature == 0:
        return int(logits.argmax())
    peak, temperature = logits.max()[None], torch.tensor([row.temperature], dtype=torch.float64)
    weights = sample.token_weights(logits[None], peak, temperature)[0].tolist()
    kept = slow_filter(logits.tolist(), weights, row.top_k, row.top_p, row.min_p)
    bits = int(sample.random_bits(torch.tensor([row.seed]), torch.tensor([row.position]))[0])
    total = sum(weights[i] for i in kept)
    point, running = min(int(float(bits) * 2.0**-53 * float(total)), total - 1), 0
    for i in sorted(kept):
        running += weights[i]
        if running > point:
            return i
    raise AssertionError("nothing was kept")


KINDS = [
    Row(temperature=0.0, top_k=3, top_p=0.1),
    Row(),
    Row(temperature=1.5, min_p=0.5),
    Row(temperature=100.0),
    Row(top_k=3),
    Row(top_p=0.5),
    Row(temperature=2.5, top_k=60, top_p=0.9, min_p=0.6),
    Row(top_k=10**6, min_p=0.01),
]


def is_interpreted(on_cpu: torch.Tensor) -> bool:
    return not torch.cuda.is_available() and backends.pick("sample_rows", on_cpu) is not None


def kinds(vocab: int, *rows: Row, scale: float = 3.0) -> tuple[torch.Tensor, list[Row]]:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    return logits, [row._replace(seed=1000 * i + vocab, position=i) for i, row in enumerate(rows)]


def check_rows(logits: torch.Tensor, rows: Sequence[Row], device: torch.device, mask: torch.Tensor | None = None):
    before = logits.clone()
    tokens, peaks = run_rows(logits, rows, device, mask)
    assert torch.equal(logits, before)
    seen = logits if mask is None else logits + mask
    assert tokens == [slow_token(some, row) for some, row in zip(seen, rows, strict=True)]
    assert torch.equal(peaks, seen.max(dim=1).values)


@pytest.mark.parametrize("vocab", [1, 4096])
def test_rows_of_every_kind(device: torch.device, vocab: int):
    check_rows(*kinds(vocab, *KINDS), device)


def test_rows_under_a_mask(device: torch.device):
    mask = torch.zeros(300)
    mask[::2] = -math.inf
    logits, rows = kinds(300, Row(temperature=0.0), Row(), Row(top_k=4), Row(top_p=0.7))
    check_rows(logits, rows, device, mask)


def test_rows_with_min_p(device: torch.device):
    """Kept and dropped ids stand side by side in one run."""
    check_rows(*kinds(14, *[Row(temperature=2.0, min_p=0.3)] * 8, *[Row(top_k=9, min_p=0.3)] * 4, scale=1.5), device)


@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_flat_rows_and_ties(device: torch.device, scale: float):
    """All equal, or nearly: ties at the edge of a filter go to the lowest ids, and the nucleus is a share of them."""
    rows = [Row(top_k=5), Row(top_p=0.25), Row(top_k=400, top_p=0.5), Row()]
    check_rows(*kinds(700, *rows, scale=scale), device)


def test_filters_that_keep_hundreds(device: torch.device):
    check_rows(*kinds(20_000, Row(top_k=700), Row(top_p=0.5), scale=1.0), device)


def test_filters_that_keep_thousands(device: torch.device):
    logits, rows = kinds(2500, Row(top_p=0.97), Row(top_k=2300, top_p=0.99), scale=0.2)
    check_rows(logits, rows, device)
    logits = (8 * logits).round() / 8  # ties from end to end
    check_rows(logits, rows, device)
    logits[:, 1:] = -40.0  # nothing else has a weight, however many may stay
    check_rows(logits, rows, device)


def test_rows_that_rough_sums_leave_open(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """The interpreter is told that sums of weights in float32 are worth little: what they decided is decided again."""
    logits, rows = kinds(900, Row(), Row(temperature=3.0), Row(top_p=0.9), Row(top_p=0.4), Row(top_k=5, top_p=0.8))
    if is_interpreted(logits):
        tl = pytest.importorskip("triton.language")
        monkeypatch.setattr("benthic.kernels.triton.sample.ROUGH", tl.constexpr(0.5))
    check_rows(logits, rows, device)


# ---- rows of which thousands stay ------------------------------------------------------------------------------------

WIDE = [
    Row(top_p=0.9),
    Row(top_k=900),
    Row(top_p=0.5, min_p=0.02),
    Row(top_k=1500, top_p=0.8, min_p=0.01),
    Row(top_k=1200, top_p=0.999),
    Row(temperature=1e-3, top_p=0.9),
    Row(temperature=30.0, top_p=0.95),
    Row(temperature=0.0, top_p=0.5),
    Row(min_p=0.001),
    Row(),
    Row(top_k=5, top_p=0.7),
]
LITTLE_ROOM = {"SOME": 256, "FEW": 32, "INSIDE": 64, "NARROW": 16, "PATIENCE": 2}


ASTRAY = [pytest.param(name, marks=pytest.mark.slow) for name in ("windows too low", "windows too high")]


@pytest.fixture(params=["room for all", "room for few", *ASTRAY])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter is told that there is less room than on a GPU, so that rows of a few thousand logits go the way
    of long ones; at last also that the edge is where it is not."""
    if not is_interpreted(torch.zeros(1, 1)):
        if request.param != "room for all":
            pytest.skip("the room is compiled in")
        return request.param
    tl, module = pytest.importorskip("triton.language"), "benthic.kernels.triton.sample"
    for constant, value in LITTLE_ROOM.items() if request.param != "room for all" else ():
        monkeypatch.setattr(f"{module}.{constant}", tl.constexpr(value))

    def window(row, mask, best, vocab, low, *_: object):  # type: ignore[no-untyped-def]
        left = low.to(tl.int64) + (1 << 40 if request.param == "windows too high" else 0)
        return left, left + 1

    if request.param.startswith("windows"):
        monkeypatch.setattr(f"{module}._first_window", window)
    return request.param


def test_wide_rows_of_every_kind(device: torch.device, room: str):
    logits, rows = kinds(2600, *WIDE, scale=1.2)
    check_rows(logits, rows, device)


def test_wide_rows_with_ties(device: torch.device, room: str):
    """Few levels, each with hundreds of ids: the edge of every filter lies inside one."""
    logits, rows = kinds(2600, *WIDE[:4], scale=1.0)
    logits = (2 * logits).round() / 2
    logits[2] = -1.5  # a single level
    check_rows(logits, rows, device)


def test_wide_rows_under_a_mask(device: torch.device, room: str):
    logits, rows = kinds(2600, *WIDE[:5], scale=0.7)
    logits[:, 700:1400] = -math.inf
    mask = torch.zeros(2600)
    mask[3::3] = -math.inf
    logits[3:, 600:] = -math.inf  # fewer than top-k asks for
    check_rows(logits, rows, device, mask)


def test_wide_rows_in_order(device: torch.device, room: str):
    """Falling and rising with the id, as no sample expects; and all but one far below."""
    x = torch.linspace(3, 0, 2600)
    far = torch.full((2600,), -20.0)
    far[1800] = 2.0
    logits = torch.stack([x, x.flip(0), x, x.flip(0), far])
    rows = [Row(top_p=0.9), Row(top_p=0.6), Row(top_k=1111), Row(top_k=999, top_p=0.7), Row(top_k=1300)]
    check_rows(logits, [row._replace(seed=i) for i, row in enumerate(rows)], device)


@pytest.mark.parametrize(
    "left", [-2, 0, pytest.param(-1, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_window_beside_the_edge(device: torch.device, monkeypatch: pytest.MonkeyPatch, left: int):
    """The first window holds one key, at the level where half of the ids lie, or next to it: what a pass says of the
    keys outside must neither lose that level nor keep what is below."""
    if not is_interpreted(torch.zeros(1, 1)):
        pytest.skip("the room is compiled in")
    tl, module = pytest.importorskip("triton.language"), "benthic.kernels.triton.sample"
    for constant, value in LITTLE_ROOM.items():
        monkeypatch.setattr(f"{module}.{constant}", tl.constexpr(value))
    first = int(torch.tensor(0.25).view(torch.int32)) + left

    def window(row, mask, best, vocab, low, *_: object):  # type: ignore[no-untyped-def]
        return low.to(tl.int64) * 0 + first, low.to(tl.int64) * 0 + first + 1

    monkeypatch.setattr(f"{module}._first_window", window)
    x = torch.full((2600,), 0.25)
    x[::2] = torch.linspace(0.3, 1.0, 1300)
    x[::5] = torch.linspace(-1.0, 0.2, 520)
    rows = [Row(top_k=count, seed=seed) for count in (1100, 1900) for seed in (1, 4)]
    check_rows(x.expand(len(rows), -1).contiguous(), rows, device)


@cache
def last_seed() -> int:
    """A seed with which the last id that stays is drawn, at position 3."""
    seeds = torch.arange(1 << 22)
    bits = sample.random_bits(seeds, torch.full_like(seeds, 3))
    assert float(bits.max()) > (1 - 1e-6) * 2.0**53
    return int(bits.argmax())


def test_the_last_that_stays(device: torch.device, room: str):
    """Logits fall with the id, at times by a single unit in the last place, and the token shows where they were cut."""
    x = torch.randn(2600, generator=torch.Generator().manual_seed(8)).sort(descending=True).values
    near = (torch.ones(40).view(torch.int32) - torch.arange(40, dtype=torch.int32)).view(torch.float32)
    near = near.repeat_interleave(65)
    rows = [Row(top_p=0.9), Row(top_k=900), Row(top_k=1500, top_p=0.8), Row(top_p=0.95, min_p=0.02)]
    rows += [Row(top_p=share) for share in (0.551, 0.8)] + [Row(top_k=count) for count in (777, 1300, 1301)]
    rows = [row._replace(seed=last_seed()) for row in rows]
    check_rows(torch.stack([x] * 4 + [near] * 5), rows, device)


def test_ties_before_the_last_that_stays(device: torch.device, room: str):
    """Ties that are left out stand in the same run before the id that is drawn."""
    logits = torch.zeros(2, 2600)
    logits[:, -1] = 1.0
    check_rows(logits, [row._replace(seed=last_seed()) for row in (Row(top_k=2597), Row(top_p=0.998))], device)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [4.0, 3.0, 1.4, 0.01, 0.0])
def test_whole_vocabulary(scale: float):
    """The cases of the bench and flatter ones, against the reference on the device."""
    count, vocab = 160, 129280
    generator = torch.Generator("cuda").manual_seed(3)
    logits = torch.randn(count, vocab, device="cuda", generator=generator) * scale
    logits[1::8] = (logits[1::8] * 4).round() / 4
    columns = (
        torch.arange(count) * 977,
        torch.arange(count),
        torch.full((count,), 0.8, dtype=torch.float64),
        torch.tensor([0, 0, 0, 40, 5000, 60_000, 0, 90_000] * (count // 8)),
        torch.tensor([0.95, 0.95, 0.7, 0.95, 1.0, 0.9, 1.0, 0.999] * (count // 8), dtype=torch.float64),
        torch.tensor([0.0, 0.0, 1e-4, 0.0, 0.0, 1e-3, 1e-5, 0.0] * (count // 8), dtype=torch.float64),
    )
    columns = tuple(column.cuda() for column in columns)
    tokens, peaks = sample.sample_rows(logits, *columns)
    for some in range(0, count, 32):
        part = slice(some, some + 32)
        want, top = sample.sample_rows_reference(logits[part], *(column[part] for column in columns))
        assert torch.equal(peaks[part], top)
        same = tokens[part] == want
        # the reference's exponential is the device's: a weight may differ by 1, which moves one draw in a million
        assert bool(same.all()), f"rows {(some + (~same).nonzero()[:, 0]).tolist()}"


def test_points_next_to_a_boundary(device: torch.device):
    """Both halves of a row have the same sum, and these seeds fall within 3e-9 of the middle, on either side."""
    seeds = (74213521, 91372368, 119523118, 224851639)
    half = torch.randn(len(seeds), 1500, generator=torch.Generator().manual_seed(0)) * 2
    rows = [Row(seed=seed, position=3) for seed in seeds]
    check_rows(torch.cat([half, half], dim=1), rows, device)
    tokens, _ = run_rows(torch.zeros(len(seeds), 3000), rows, device)
    assert tokens == [1500, 1500, 1500, 1499]


def test_extreme_rows(device: torch.device):
    low, high = -math.inf, 3e38
    logits = torch.tensor(
        [
            [high, -high, high, 0.0, low],
            [-high, -3.1e38, -high, low, -high],
            [1e-40, 0.0, -0.0, -1.0, low],
            [low, low, 5.0, low, low],
            [2.0**100, 2.0**100 * (1 + 2.0**-23), low, 0.0, 2.0**99],
        ]
    )
    settings = [Row(), Row(temperature=1e-6, top_k=2), Row(temperature=100.0, top_p=0.4)]
    for first in range(2 if is_interpreted(logits) else 3):
        check_rows(logits, [settings[(first + i) % 3]._replace(seed=i) for i in range(5)], device)


def test_damaged_rows_do_no_harm(device: torch.device):
    logits, rows = kinds(90, *[Row(), Row(temperature=0.0), Row(top_k=2)] * 3, Row())
    logits[:3, 50] = math.nan
    logits[3:6] = -math.inf
    logits[6:9, 4] = math.inf
    tokens, peaks = run_rows(logits, rows, device)
    assert tokens[:9] == [0] * 9
    assert tokens[9] == slow_token(logits[9], rows[9])
    assert not peaks[:9].isfinite().any()
    assert (peaks[3:6] == -math.inf).all()
    assert peaks[9] == logits[9].max()


def test_no_rows_and_rows_apart(device: torch.device):
    assert run_rows(torch.zeros(0, 9), [], device)[0] == []
    wide, rows = kinds(2 * 97, Row(), Row(temperature=0.0), Row(top_p=0.6))
    check_rows(wide[:, :97], rows, device)  # rows that do not touch
    tokens, _ = run_rows(wide[:, ::2], rows, device)  # neighbours that do not
    assert tokens == [slow_token(some, row) for some, row in zip(wide[:, ::2], rows, strict=True)]
    with pytest.raises(ShapeError):
        sample.sample_rows(torch.zeros(2, 5), *[torch.zeros(3)] * 6)


def test_rows_do_not_depend_on_their_batch(device: torch.device):
    logits, rows = kinds(513, *KINDS)  # also from other runs than the first
    together, _ = run_rows(logits, rows, device)
    order = [6, 1]
    assert run_rows(logits[order], [rows[i] for i in order], device)[0] == [together[i] for i in order]


def test_rows_follow_the_softmax(device: torch.device):
    logits = torch.tensor([2.0, -1.0, 0.5, 0.5, -math.inf, 3.0, -4.0, 1.0])
    if is_interpreted(logits):
        pytest.skip("needs thousands of rows")
    draws = 20_000
    rows = [Row(temperature=2.0, seed=i, position=9) for i in range(draws)]
    counts = np.bincount(run_rows(logits.repeat(draws, 1), rows, device)[0], minlength=8)
    assert chi_square(counts, torch.softmax(logits.double() / 2.0, 0).numpy()) < 26


@pytest.mark.gpu
def test_rows_beyond_2_31_elements():
    """The second row starts behind 2^31 logits."""
    memory = torch.zeros(2**31 + 4096, device="cuda")
    logits = memory.as_strided((2, 1000), (2**31 + 100, 1))
    logits[1] = torch.arange(1000, device="cuda") / 100
    rows = [Row(temperature=0.0), Row(top_k=5)]
    assert run_rows(logits, rows, memory.device)[0][1] == slow_token(logits[1].cpu(), rows[1])
    rows = [Row(), Row(temperature=0.0)]
    assert run_rows(logits, rows, memory.device)[0][1] == 999
