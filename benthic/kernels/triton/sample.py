"""Triton version of `sample_rows` of `kernels/sample.py`; the contract and the definition of every step are there.

A row is taken as up to 256 runs of neighbouring ids, eight of them a program. Four kernels:

1. `_peaks`   every row: the largest logit of each run.
2. `_sums`    drawn rows without top-k: the sum of weights of each run. Rows come in reverse, since the last ones read
              by `_peaks` are still in the cache.
3. `_choose`  one program a row. Greedy: the first run that holds the peak, and where. Drawn: the cumulative sum over
              runs, then inside one of them.
4. `_filter`  one program a row with top-k or top-p, instead. A bound is found that all who can stay reach, and what
              reaches it is gathered; halving the range of logits then finds the last one that stays. Where thousands
              can stay the row is not gathered but read again each time.

A weight is 2^40 * 2^z, z = (logit - peak) * log2(e) / temperature; 2^z is a polynomial in float64, 13 operations in
all, error 2^-44. Sums are of integers, so nothing depends on their order. Cost: one pass over logits of greedy rows,
two over those of the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels.triton.runtime import available as available

RUNS = tl.constexpr(256)  # of a row
TOGETHER = tl.constexpr(8)  # runs a program
FEW = tl.constexpr(2048)  # tokens that filters may keep without the long search

_UNIT = tl.constexpr(1099511627776.0)  # 2^40
_LOG2_E = tl.constexpr(1.4426950408889634)
_REACH = tl.constexpr(28.5)  # e^-28.5 * 2^40 < 1
_SHIFTER = tl.constexpr(
    6755399441055784.0
)  # 1.5 * 2^52 + 40: adding it leaves the nearest integer + 40 in the low bits
_LEAST_KEY = tl.constexpr(-2139095041)  # of -inf
_NO_KEY = tl.constexpr(-2147483648)
_FAR = tl.constexpr(1 << 62)


# ---- one value -------------------------------------------------------------------------------------------------------


@triton.jit
def _key(x):
    """float32 -> int32 in the same order; -0 as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scale(peak, temperature):
    """What makes weights of a row's logits: a float32 from which on down they are 0, and the rate of z."""
    exact = peak.to(tl.float64) - _REACH * temperature
    near = exact.to(tl.float32)
    near = tl.where(near.to(tl.float64) > exact, _value(_key(near) - 1), near)
    least = tl.maximum(tl.minimum(near, _value(_key(peak) - 1)), -3.4028234663852886e38)
    reach = peak.to(tl.float64) - least.to(tl.float64)
    return least, tl.minimum(
        _LOG2_E / temperature, 900.0 / reach
    )  # where floats are far apart, `least` is 0 all the more


@triton.jit
def _weights(x, peak, least, rate):
    """floor(2^(40 + z)) int64, z = (x - peak) * rate. x f32; least, rate as in `_scale`."""
    d = tl.maximum(x, least).to(tl.float64) - peak.to(tl.float64)
    shifted = d * rate + _SHIFTER
    n = shifted - _SHIFTER
    f = d * rate - n  # -0.5 to 0.5
    p = f * 1.0203121063391729e-07 + 1.3255224878668817e-06
    p = p * f + 1.525268684626772e-05
    p = p * f + 0.00015403455852453838
    p = p * f + 0.0013333558179043112
    p = p * f + 0.009618129159402558
    p = p * f + 0.055504108664760424
    p = p * f + 0.2402265069581299
    p = p * f + 0.6931471805599453
    p = p * f + 1.0
    scaled = p.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    return scaled.to(tl.float64, bitcast=True).to(tl.int64)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _point(seed, position, total):
    """Where in 0 .. total-1 the draw falls. total int64 > 0."""
    x = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    x = _mix(x + (position * 3 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    bits = (x >> 11).to(tl.int64)
    return tl.minimum((bits.to(tl.float64) * 1.1102230246251565e-16 * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _ceil(x):
    """float64 >= 0 -> the least int64 that is not below."""
    down = x.to(tl.int64)
    return down + (down.to(tl.float64) < x).to(tl.int64)


@triton.jit
def _logits(row_ptr, mask_ptr, at, live, MASKED: tl.constexpr):
    """Logits of a row at ids `at`, -inf where not live."""
    x = tl.load(row_ptr + at, mask=live, other=float("-inf"))
    if MASKED:
        x += tl.load(mask_ptr + at, mask=live, other=0.0)
    return x


@triton.jit
def _of_runs(row_ptr, vocab, other, RUN: tl.constexpr):
    """[RUNS] what is known of each run of a row; `other` for those behind the last id."""
    lane = tl.arange(0, RUNS)
    return tl.load(row_ptr + lane, mask=lane * RUN < vocab, other=other)


# ---- peaks and sums --------------------------------------------------------------------------------------------------


@triton.jit
def _peaks(logits_ptr, mask_ptr, best_ptr, vocab, row_stride, MASKED: tl.constexpr, RUN: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    run = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = _logits(logits_ptr + row * row_stride, mask_ptr, at, at < vocab, MASKED)
    x = tl.where(x == x, x, float("inf"))  # a NaN spoils its row as an infinity does
    tl.store(best_ptr + row * RUNS + run, tl.max(x, axis=1))


@triton.jit
def _sums(
    logits_ptr,
    mask_ptr,
    best_ptr,
    sums_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab,
    row_stride,
    MASKED: tl.constexpr,
    RUN: tl.constexpr,
):
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    if (temperature == 0) | ((top_k > 0) & (top_k < vocab)):
        return
    peak = tl.max(_of_runs(best_ptr + row * RUNS, vocab, float("-inf"), RUN))
    if (peak == float("inf")) | (peak == float("-inf")):
        return
    run = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = _logits(logits_ptr + row * row_stride, mask_ptr, at, at < vocab, MASKED)
    least, rate = _scale(peak, temperature)
    w = _weights(x, peak, least, rate)
    floor = _floor(min_p_ptr, row)
    if (floor > 0) & (tl.load(top_p_ptr + row) >= 1):  # top-p comes before, and takes its share of the whole
        w = tl.where(w < floor, 0, w)
    tl.store(sums_ptr + row * RUNS + run, tl.sum(w, axis=1))


@triton.jit
def _floor(min_p_ptr, row):
    """Weights below it are dropped by min-p."""
    return _ceil(tl.load(min_p_ptr + row) * _UNIT)


# ---- the choice ------------------------------------------------------------------------------------------------------


@triton.jit
def _choose(
    logits_ptr,
    mask_ptr,
    best_ptr,
    sums_ptr,
    seeds_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    tokens_ptr,
    peaks_ptr,
    vocab,
    row_stride,
    MASKED: tl.constexpr,
    RUN: tl.constexpr,
):
    """Rows without top-k and top-p, and what all rows have."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    lane, inside = tl.arange(0, RUNS), tl.arange(0, RUN)
    best = _of_runs(best_ptr + row * RUNS, vocab, float("-inf"), RUN)
    peak = tl.max(best)
    tl.store(peaks_ptr + row, peak)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    if (peak == float("inf")) | (peak == float("-inf")):
        tl.store(tokens_ptr + row, 0)
    elif temperature == 0:
        run = tl.min(tl.where(best == peak, lane, RUNS))
        at = run * RUN + inside
        x = _logits(row_ptr, mask_ptr, at, at < vocab, MASKED)
        tl.store(tokens_ptr + row, tl.min(tl.where(x == peak, at, vocab)))
    elif ((top_k <= 0) | (top_k >= vocab)) & (tl.load(top_p_ptr + row) >= 1):
        sums = _of_runs(sums_ptr + row * RUNS, vocab, 0, RUN)
        point = _point(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tl.sum(sums))
        run = tl.sum((tl.cumsum(sums) <= point).to(tl.int32))
        before = tl.sum(tl.where(lane < run, sums, 0))
        at = run * RUN + inside
        least, rate = _scale(peak, temperature)
        w = _weights(_logits(row_ptr, mask_ptr, at, at < vocab, MASKED), peak, least, rate)
        w = tl.where(w < _floor(min_p_ptr, row), 0, w)
        tl.store(tokens_ptr + row, run * RUN + tl.sum((tl.cumsum(w) + before <= point).to(tl.int32)))


# ---- top-k and top-p -------------------------------------------------------------------------------------------------


@triton.jit
def _filter(
    logits_ptr,
    mask_ptr,
    best_ptr,
    sums_ptr,
    runs_ptr,
    few_x_ptr,
    few_id_ptr,
    seeds_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    tokens_ptr,
    vocab,
    row_stride,
    MASKED: tl.constexpr,
    RUN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    has_k, has_p = (top_k > 0) & (top_k < vocab), top_p < 1
    if (temperature == 0) | ((has_k | has_p) == 0):
        return
    peak = tl.max(_of_runs(best_ptr + row * RUNS, vocab, float("-inf"), RUN))
    if (peak == float("inf")) | (peak == float("-inf")):
        return
    whole = tl.zeros((), tl.int64)
    if has_k == 0:
        whole = tl.sum(_of_runs(sums_ptr + row * RUNS, vocab, 0, RUN))
    least, rate = _scale(peak, temperature)
    token = _filtered(
        logits_ptr + row * row_stride, mask_ptr, best_ptr + row * RUNS, runs_ptr + row * RUNS, few_x_ptr + row * FEW,
        few_id_ptr + row * FEW, vocab, peak, least, rate, _floor(min_p_ptr, row), tl.load(seeds_ptr + row),
        tl.load(positions_ptr + row), has_k, has_p, top_k, top_p, whole, MASKED, RUN,
    )  # fmt: skip
    tl.store(tokens_ptr + row, token)


@triton.jit
def _filtered(
    row_ptr, mask_ptr, best_ptr, runs_ptr, few_x_ptr, few_id_ptr, vocab, peak, least, rate, floor, seed, position,
    has_k, has_p, top_k, top_p, whole, MASKED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A token of a row with top-k or top-p. whole: the sum of its weights where it has no top-k."""
    LONG: tl.constexpr = 1024 if TOGETHER * RUN < 1024 else TOGETHER * RUN  # logits at a time where all are read
    lane = tl.arange(0, RUNS)
    best = _key(_of_runs(best_ptr, vocab, float("-inf"), RUN))
    num_runs = (vocab + RUN - 1) // RUN
    larger = tl.zeros((RUNS,), tl.int32)  # runs with a larger best
    for i in range(0, RUNS, 32):
        other = i + tl.arange(0, 32)
        other = _key(tl.load(best_ptr + other, mask=other < num_runs, other=float("-inf")))
        larger += tl.sum((other[None, :] > best[:, None]).to(tl.int32), axis=1)
    line = _ceil(top_p * whole.to(tl.float64))  # top-p alone: what it keeps sums up to this

    # All that stays has to be gathered: what reaches a bound. Bounds to try: the `most`-th largest best of a run, since
    # so many tokens reach it at least; then one that is searched for; then (state 2) nothing is gathered.
    most = tl.where(has_k, top_k, 32).to(tl.int64)
    low, count, state = _key(peak), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while state == 0:
        if most <= num_runs:
            low = tl.min(tl.where(larger < most, best, 0x7FFFFFFF))
        else:
            low, state = _search(
                row_ptr, mask_ptr, vocab, _value(low), peak, least, rate, has_k, top_k, line, MASKED, LONG
            )  # fmt: skip
        if state == 0:
            listed = best >= low
            tl.debug_barrier()  # readers of the round before are done
            tl.store(runs_ptr + tl.cumsum(listed.to(tl.int32)) - 1, lane, mask=listed)
            tl.debug_barrier()
            num_listed, count, i = tl.sum(listed.to(tl.int32)), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
            while i < num_listed:
                entry = i + tl.arange(0, TOGETHER)
                run = tl.load(runs_ptr + entry, mask=entry < num_listed, other=0)
                at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
                live = (entry < num_listed)[:, None] & (at < vocab)
                x = _logits(row_ptr, mask_ptr, at, live, MASKED)
                found = tl.reshape((live & (_key(x) >= low)).to(tl.int32), (TOGETHER * RUN,))
                place = tl.reshape(tl.cumsum(found) + count - 1, (TOGETHER, RUN))
                kept = tl.reshape(found, (TOGETHER, RUN)) > 0
                tl.store(few_x_ptr + place, x, mask=kept & (place < FEW))
                tl.store(few_id_ptr + place, at, mask=kept & (place < FEW))
                count += tl.sum(found)
                i += TOGETHER
            tl.debug_barrier()
            if count > FEW:
                state = tl.full((), 2, tl.int32)
            elif has_k:
                state = tl.full((), 1, tl.int32)
            else:
                x, keys = _tile(few_x_ptr, mask_ptr, 0, count, False, FEW)
                held = tl.sum(tl.where(keys > _NO_KEY, _weights(x, peak, least, rate), 0))
                state = tl.where(held >= line, 1, tl.where(most > num_runs, 2, 0)).to(tl.int32)
            most = most * 4
    if state == 1:
        at = _select(
            few_x_ptr, mask_ptr, count, low, peak, least, rate, floor, seed, position, has_k, has_p, top_k, top_p, line,
            False, False, FEW,
        )  # fmt: skip
        token = tl.load(few_id_ptr + at).to(tl.int64)
    else:
        token = _select(
            row_ptr, mask_ptr, vocab, tl.full((), _LEAST_KEY, tl.int32), peak, least, rate, floor, seed, position,
            has_k, has_p, top_k, top_p, line, True, MASKED, LONG,
        ).to(tl.int64)  # fmt: skip
    return token


@triton.jit
def _search(
    row_ptr, mask_ptr, vocab, high, peak, least, rate, has_k, top_k, line, MASKED: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """A key that all reach who can stay, and not too many to gather; and 0, or 2 if there is none. Sums are rough."""
    above, below, low, state = high, least, least, tl.full((), 1, tl.int32)  # below `least` all weights are 0
    rough_rate, turn = tl.minimum(rate, 1e30).to(tl.float32), tl.zeros((), tl.int32)
    while state == 1:
        count, held, start = tl.zeros((), tl.int64), tl.zeros((), tl.float32), tl.zeros((), tl.int32)
        while start < vocab:
            x, _ = _tile(row_ptr, mask_ptr, start, vocab, MASKED, SIZE)
            count += tl.sum((x >= low).to(tl.int64))
            held += tl.sum(tl.where(x >= low, tl.exp2((tl.maximum(x, least) - peak) * rough_rate), 0.0))
            start += SIZE
        enough = tl.where(has_k, count >= top_k, held.to(tl.float64) * _UNIT >= line * 1.00001) | (turn == 0)
        turn += 1
        if enough & (count <= FEW):
            state = tl.zeros((), tl.int32)
        elif (turn == 20) | (count > FEW) & (enough == 0):
            state = tl.full((), 2, tl.int32)
        else:
            if enough:
                below = low
            else:
                above = low
            low = 0.5 * above + 0.5 * below
    return _key(low), state


@triton.jit
def _select(
    x_ptr, mask_ptr, n, low, peak, least, rate, floor, seed, position, has_k, has_p, top_k, top_p, line,
    LONG: tl.constexpr, MASKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Place among n logits, in the order of ids, of the token drawn from those that the filters keep.

    Their keys are at least `low`; with top-k there are at least so many of them. LONG: they are more than one tile, and
    read anew whenever they are looked at.
    """
    x, keys = _tile(x_ptr, mask_ptr, 0, n, MASKED, SIZE)
    w = _weights(x, peak, least, rate)
    each = tl.full((SIZE,), 1, tl.int64)
    # kept: every key above the edge, and the first `room` of those on it
    edge, room = low, tl.full((), _FAR, tl.int64)
    if has_k:
        edge, held = _edge(
            x_ptr, mask_ptr, n, low, top_k, peak, least, rate, keys, each, False, LONG, MASKED, SIZE
        )  # fmt: skip
        room = top_k - held
    if has_p:
        if has_k:
            more = _above(x_ptr, mask_ptr, n, edge, peak, least, rate, keys, w, True, LONG, MASKED, SIZE)
            line = _ceil(top_p * (more + room * _weight_of(edge, peak, least, rate)).to(tl.float64))
        last, held = _edge(x_ptr, mask_ptr, n, edge, line, peak, least, rate, keys, w, True, LONG, MASKED, SIZE)
        one = tl.maximum(_weight_of(last, peak, least, rate), 1)
        fits = (line - held + one - 1) // one
        room = tl.where(last == edge, tl.minimum(room, fits), fits)
        edge = last

    if not LONG:
        w, _ = _kept(keys, w, edge, room, floor)
        return tl.minimum(tl.sum((tl.cumsum(w) <= _point(seed, position, tl.sum(w))).to(tl.int32)), n - 1)
    total, ties, start = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    while start < n:
        x, keys = _tile(x_ptr, mask_ptr, start, n, MASKED, SIZE)
        w, level = _kept(keys, _weights(x, peak, least, rate), edge, room - ties, floor)
        total, ties, start = total + tl.sum(w), ties + level, start + SIZE
    point = _point(seed, position, total)
    before, ties, start = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    place = tl.zeros((), tl.int32)
    while start < n:
        x, keys = _tile(x_ptr, mask_ptr, start, n, MASKED, SIZE)
        w, level = _kept(keys, _weights(x, peak, least, rate), edge, room - ties, floor)
        place += tl.sum((tl.cumsum(w) + before <= point).to(tl.int32))
        before, ties, start = before + tl.sum(w), ties + level, start + SIZE
    return tl.minimum(place, n - 1)


@triton.jit
def _tile(x_ptr, mask_ptr, start, n, MASKED: tl.constexpr, SIZE: tl.constexpr):
    """Logits start .. start+SIZE-1 of n, and their keys; below every key there is where they are none."""
    at = start + tl.arange(0, SIZE)
    x = _logits(x_ptr, mask_ptr, at, at < n, MASKED)
    return x, tl.where(at < n, _key(x), _NO_KEY)


@triton.jit
def _edge(
    x_ptr, mask_ptr, n, low, limit, peak, least, rate, keys, values, WEIGHTS: tl.constexpr, LONG: tl.constexpr,
    MASKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The least key, `low` or above, such that what is larger stays below the limit; and how much that is."""
    under, over = low.to(tl.int64) - 1, _key(peak).to(tl.int64)
    held = tl.zeros((), tl.int64)  # above `over`
    while over - under > 1:
        middle = (under + over) >> 1
        found = _above(
            x_ptr, mask_ptr, n, middle.to(tl.int32), peak, least, rate, keys, values, WEIGHTS, LONG, MASKED, SIZE
        )  # fmt: skip
        if found < limit:
            over, held = middle, found
        else:
            under = middle
    return over.to(tl.int32), held


@triton.jit
def _above(
    x_ptr, mask_ptr, n, key, peak, least, rate, keys, values, WEIGHTS: tl.constexpr, LONG: tl.constexpr,
    MASKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """How many of n logits have a larger key, or (WEIGHTS) the sum of their weights; int64. keys, values: a tile."""
    if not LONG:
        return tl.sum(tl.where(keys > key, values, 0))
    total, start = tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    while start < n:
        x, keys = _tile(x_ptr, mask_ptr, start, n, MASKED, SIZE)
        if WEIGHTS:
            values = _weights(x, peak, least, rate)
        total += tl.sum(tl.where(keys > key, values, 0))
        start += SIZE
    return total


@triton.jit
def _kept(keys, w, edge, room, floor):
    """Weights of a tile, 0 for what is dropped; and how many of its keys are the edge itself."""
    level = (keys == edge).to(tl.int64)
    stays = (keys > edge) | ((level > 0) & (tl.cumsum(level) <= room))
    return tl.where(stays & (w >= floor), w, 0), tl.sum(level)


@triton.jit
def _weight_of(key, peak, least, rate):
    return tl.max(_weights(_value(key + tl.zeros((16,), tl.int32)), peak, least, rate))


def sample_rows(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    peaks = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return tokens, peaks
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    settings = [column.contiguous() for column in (seeds, positions, temperature, top_k, top_p, min_p)]
    runs, together, few = RUNS.value, TOGETHER.value, FEW.value
    best = torch.empty(rows, runs, dtype=torch.float32, device=device)
    sums = torch.empty(rows, runs, dtype=torch.int64, device=device)
    listed = torch.empty(rows, runs, dtype=torch.int32, device=device)
    few_x = torch.empty(rows, few, dtype=torch.float32, device=device)
    few_id = torch.empty(rows, few, dtype=torch.int32, device=device)
    run = max(triton.next_power_of_2(triton.cdiv(vocab, runs)), 16)
    warps = min(max(together * run // 1024, 1), 16)  # 32 logits a thread
    shape = {"MASKED": mask is not None, "RUN": run}
    grid = (triton.cdiv(triton.cdiv(vocab, run), together), rows)
    mask_or_any = logits if mask is None else mask
    _peaks[grid](logits, mask_or_any, best, vocab, logits.stride(0), **shape, num_warps=warps)
    _sums[grid](
        logits, mask_or_any, best, sums, *settings[2:], vocab, logits.stride(0), **shape, num_warps=warps
    )  # fmt: skip
    _choose[(rows,)](
        logits, mask_or_any, best, sums, *settings, tokens, peaks, vocab, logits.stride(0), **shape, num_warps=4
    )  # fmt: skip
    _filter[(rows,)](
        logits, mask_or_any, best, sums, listed, few_x, few_id, *settings, tokens, vocab, logits.stride(0), **shape,
        num_warps=8,
    )  # fmt: skip
    return tokens, peaks
