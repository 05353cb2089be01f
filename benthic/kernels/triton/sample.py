"""Triton version of `sample_rows` of `kernels/sample.py`; the contract and the definition of every step are there.

A row is cut into 256 runs of neighbouring ids, a run into 16 cells. Four kernels:

1. `_scan`    the one pass over all logits, eight runs a program. Each cell leaves its largest logit; each run of a row
              that is drawn leaves a rough sum of weights, in float32.
2. `_choose`  one program a row. Greedy: the first cell that holds the peak, and where. Drawn without filters: the run
              where the rough sums say that the point falls, and in it the token, by exact weights. With filters: from
              the cells' largest follows a bound that all who can stay reach; where that is many, one more logit of
              each cell stands for its others, and a higher bound is guessed. What reaches it is gathered from its
              cells, and among that lies the exact answer.
              A token is taken only if the exact sums must give the same one, whatever the rough ones have lost and
              whatever was guessed.
3. `_sums`    the rows that are left, few of them: the exact sum of each run.
4. `_exact`   their tokens. Where more can stay than is gathered, a window of keys is guessed in which the last one that
              does must lie; one pass over the row tells whether it does, and leaves what is inside.

A weight is 2^40 * 2^z, z = (logit - peak) * log2(e) / temperature; 2^z is a polynomial in float64, 13 operations in
all, error 2^-44. Sums that decide are of integers, so nothing depends on their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two

RUNS = tl.constexpr(256)  # of a row
EACH = tl.constexpr(16)  # cells a run
CELLS = tl.constexpr(4096)
TOGETHER = tl.constexpr(8)  # runs a program
NARROW = tl.constexpr(1024)  # up to so many cells are searched without a guess
AT_ONCE = tl.constexpr(4096)  # logits of those at a time
FEW, SOME = tl.constexpr(512), tl.constexpr(8192)  # gathered logits: the usual room, and the most; at least RUNS
INSIDE = tl.constexpr(4096)  # keys of a window
PIECE = tl.constexpr(32)  # neighbouring ids of a tile whose pieces lie all over the row
PATIENCE = tl.constexpr(6)  # windows that may be guessed before halves are taken
TILE, WARPS = 2048, 8  # logits of a row at a time, and warps, of the kernels with one program a row
ROUGH = tl.constexpr(2.0**-17)  # bound of a rough sum's relative error; by the terms it is made of, 4.4e-6

_UNIT = tl.constexpr(1099511627776.0)  # 2^40
_LOG2_E = tl.constexpr(1.4426950408889634)
_REACH = tl.constexpr(28.5)  # e^-28.5 * 2^40 < 1
_SHIFTER = tl.constexpr(
    6755399441055784.0
)  # 1.5 * 2^52 + 40: adding it leaves the nearest integer + 40 in the low bits
_LARGEST = tl.constexpr(3.4028234663852886e38)
_NO_KEY = tl.constexpr(-2147483648)  # below every key
_FAR = tl.constexpr(1 << 62)
_GREEDY = tl.constexpr(0)
_WHOLE = tl.constexpr(1)
_FILTERED = tl.constexpr(2)


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
    least = tl.maximum(tl.minimum(near, _value(_key(peak) - 1)), -_LARGEST)
    reach = peak.to(tl.float64) - least.to(tl.float64)
    return least, tl.minimum(_LOG2_E / temperature, 900.0 / reach)  # z is -900 at `least` where floats are far apart


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
def _bits(seed, position):
    """53 random bits."""
    x = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    x = _mix(x + (position * 3 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (x >> 11).to(tl.int64)


@triton.jit
def _point(seed, position, total):
    """Where in 0 .. total-1 the draw falls. total int64 > 0."""
    share = _bits(seed, position).to(tl.float64) * 1.1102230246251565e-16
    return tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)


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
def _parts(row_ptr, vocab, other, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """[COUNT] what is known of each part of a row, SIZE ids each; `other` for those behind the last id."""
    part = tl.arange(0, COUNT)
    return tl.load(row_ptr + part, mask=part * SIZE < vocab, other=other)


@triton.jit
def _filters(top_k, top_p, vocab):
    """Is there a top-k, is there a top-p."""
    return (top_k > 0) & (top_k < vocab), top_p < 1


@triton.jit
def _kind(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab):
    has_k, has_p = _filters(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), vocab)
    filtered = has_k | has_p | (tl.load(min_p_ptr + row) > 0)
    return tl.where(tl.load(temperature_ptr + row) == 0, _GREEDY, tl.where(filtered, _FILTERED, _WHOLE))


@triton.jit
def _floor(min_p_ptr, row):
    """Weights below it are dropped by min-p."""
    return _ceil(tl.load(min_p_ptr + row) * _UNIT)


# ---- the pass over all logits ----------------------------------------------------------------------------------------


@triton.jit
def _scan(
    logits_ptr,
    mask_ptr,
    best_ptr,
    rough_ptr,
    temperature_ptr,
    vocab,
    row_stride,
    MASKED: tl.constexpr,
    RUN: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    run = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = _logits(logits_ptr + row * row_stride, mask_ptr, at, at < vocab, MASKED)
    x = tl.where(x == x, x, float("inf"))  # a NaN spoils its row as an infinity does
    best = tl.max(tl.reshape(x, (TOGETHER, EACH, RUN // EACH)), axis=2)
    tl.store(best_ptr + row * CELLS + run[:, None] * EACH + tl.arange(0, EACH)[None, :], best)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        top = tl.minimum(tl.maximum(tl.max(best, axis=1), -_LARGEST), _LARGEST)
        low = tl.maximum(top.to(tl.float64) - 64.0 * temperature, -_LARGEST).to(tl.float32)  # below it nothing counts
        z = tl.minimum(tl.maximum(x, low[:, None]), _LARGEST) - top[:, None]
        share = tl.exp2(z * tl.minimum(_LOG2_E / temperature, 1e30).to(tl.float32))
        tl.store(rough_ptr + row * RUNS + run, tl.sum(share, axis=1))


# ---- the choice ------------------------------------------------------------------------------------------------------


@triton.jit
def _choose(
    logits_ptr,
    mask_ptr,
    best_ptr,
    rough_ptr,
    cells_ptr,
    few_x_ptr,
    few_id_ptr,
    count_ptr,
    bound_ptr,
    open_ptr,
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
    CELL: tl.constexpr = RUN // EACH
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    best = _parts(best_ptr + row * CELLS, vocab, float("-inf"), CELLS, CELL)
    peak = tl.max(best)
    kind = _kind(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    token, certain = tl.zeros((), tl.int32), tl.full((), 1, tl.int32)
    if (peak == float("inf")) | (peak == float("-inf")):
        token = tl.zeros((), tl.int32)
    elif kind == _GREEDY:
        cell = tl.min(tl.where(best == peak, tl.arange(0, CELLS), CELLS))
        at = cell * CELL + tl.arange(0, CELL)
        x = _logits(row_ptr, mask_ptr, at, at < vocab, MASKED)
        token = tl.min(tl.where(x == peak, at, vocab))
    else:
        temperature = tl.load(temperature_ptr + row)
        least, rate = _scale(peak, temperature)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        top = tl.max(tl.reshape(best, (RUNS, EACH)), axis=1)
        z = tl.maximum((tl.maximum(top, least).to(tl.float64) - peak.to(tl.float64)) * rate, -100.0)
        rough = _parts(rough_ptr + row * RUNS, vocab, 0.0, RUNS, RUN).to(tl.float64) * tl.exp2(z) * _UNIT
        whole = tl.sum(rough)
        if kind == _WHOLE:
            point = _bits(seed, position).to(tl.float64) * 1.1102230246251565e-16 * whole
            run = tl.minimum(tl.sum((tl.cumsum(rough) <= point).to(tl.int32)), RUNS - 1)
            here = point - tl.sum(tl.where(tl.arange(0, RUNS) < run, rough, 0.0))
            at = run * RUN + tl.arange(0, RUN)
            w = _weights(_logits(row_ptr, mask_ptr, at, at < vocab, MASKED), peak, least, rate)
            after = tl.cumsum(w).to(tl.float64)
            lost = 2 * ROUGH * whole + 2
            early, late = tl.sum((after <= here - lost).to(tl.int32)), tl.sum((after <= here + lost).to(tl.int32))
            certain = ((early == late) & (here >= lost) & (late < RUN)).to(tl.int32)
            token = run * RUN + late
        else:
            top_k, top_p, floor = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), _floor(min_p_ptr, row)
            whole_low, whole_high = (whole * (1 - ROUGH)).to(tl.int64), (whole * (1 + ROUGH)).to(tl.int64) + 1
            low, high = _key(least), _key(peak)
            keys = tl.where(tl.arange(0, CELLS) * CELL < vocab, _key(best), _NO_KEY)
            has_k, has_p = _filters(top_k, top_p, vocab)
            line = _ceil(top_p * whole_high.to(tl.float64))
            if has_k:
                bound, _ = _edge_few(keys, tl.full((CELLS,), 1, tl.int64), low, high, top_k)
            elif has_p:
                bound, _ = _edge_few(keys, _weights(best, peak, least, rate), low, high, line)
            else:
                reach = -tl.log(tl.load(min_p_ptr + row)) * temperature
                bound = tl.maximum(_key((peak.to(tl.float64) - reach).to(tl.float32)) - 16, low)
            count = tl.sum((keys >= bound).to(tl.int32))
            if count > NARROW:
                other = _others(row_ptr, mask_ptr, best, vocab, MASKED, CELL)
                if has_k:
                    both, values = _estimates(best, other, peak, least, rate, False, CELL)
                    guess, _ = _edge_few(both, values, low, high, top_k + _spread(top_k, CELL))
                    bound = tl.maximum(bound, guess)
                elif has_p:
                    both, values = _estimates(best, other, peak, least, rate, True, CELL)
                    middle, scarce = _middle(values, line, whole_high)
                    guess, _ = _edge_few(both, values, low, high, middle + scarce // 5)
                    bound = tl.maximum(bound, guess)
                count = tl.sum((keys >= bound).to(tl.int32)) + CELL * tl.sum((_key(other) >= bound).to(tl.int32))
            if count > SOME + SOME // 4:  # as it seems
                count = tl.full((), SOME + 1, tl.int32)
            else:
                count = _gather(
                    row_ptr, mask_ptr, keys, bound, cells_ptr + row * CELLS, few_x_ptr + row * SOME,
                    few_id_ptr + row * SOME, vocab, MASKED, CELL,
                )  # fmt: skip
            tl.store(count_ptr + row, count)
            tl.store(bound_ptr + row, bound)
            token, certain = _draw_gathered(
                few_x_ptr + row * SOME, few_id_ptr + row * SOME, count, bound, vocab, peak, least, rate, floor, seed,
                position, top_k, top_p, whole_low, whole_high,
            )  # fmt: skip
    tl.store(peaks_ptr + row, peak)
    tl.store(tokens_ptr + row, token)
    tl.store(open_ptr + row, 1 - certain)


@triton.jit
def _gather(
    row_ptr, mask_ptr, keys, bound, cells_ptr, few_x_ptr, few_id_ptr, vocab, MASKED: tl.constexpr, CELL: tl.constexpr
):
    """Leave the logits that reach the bound, and their ids, in the order of ids; how many. keys: of the cells' best."""
    WIDE: tl.constexpr = AT_ONCE // CELL if AT_ONCE // CELL < CELLS else CELLS  # cells at a time
    listed = keys >= bound
    tl.store(cells_ptr + tl.cumsum(listed.to(tl.int32)) - 1, tl.arange(0, CELLS), mask=listed)
    tl.debug_barrier()
    num_listed, count, start = tl.sum(listed.to(tl.int32)), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    at_next, live_next, x_next = _cells(
        row_ptr, mask_ptr, cells_ptr, start, num_listed, vocab, MASKED, CELL, WIDE
    )  # fmt: skip
    while (start < num_listed) & (count <= SOME):
        at, live, x = at_next, live_next, x_next
        at_next, live_next, x_next = _cells(  # while this part is worked on
            row_ptr, mask_ptr, cells_ptr, start + WIDE, num_listed, vocab, MASKED, CELL, WIDE
        )
        found = (live & (_key(x) >= bound)).to(tl.int32)
        held = tl.sum(found, axis=1)  # of each cell
        place = tl.cumsum(found, axis=1) - 1 + (tl.cumsum(held) - held)[:, None] + count
        kept = (found > 0) & (place < SOME)
        tl.store(few_x_ptr + place, x, mask=kept)
        tl.store(few_id_ptr + place, at, mask=kept)
        count += tl.sum(held)
        start += WIDE
    tl.debug_barrier()
    return count


@triton.jit
def _cells(
    row_ptr, mask_ptr, cells_ptr, start, num_listed, vocab, MASKED: tl.constexpr, CELL: tl.constexpr, WIDE: tl.constexpr
):
    """[WIDE, CELL] of the listed cells from `start` on: ids, whether there are such, logits."""
    entry = start + tl.arange(0, WIDE)
    cell = tl.load(cells_ptr + entry, mask=entry < num_listed, other=0)
    at = cell[:, None] * CELL + tl.arange(0, CELL)[None, :]
    live = (entry < num_listed)[:, None] & (at < vocab)
    return at, live, _logits(row_ptr, mask_ptr, at, live, MASKED)


@triton.jit
def _others(row_ptr, mask_ptr, best, vocab, MASKED: tl.constexpr, CELL: tl.constexpr):
    """[CELLS] one logit of each cell, from a place that changes from cell to cell; -inf where that is its largest."""
    cell = tl.arange(0, CELLS)
    at = cell * CELL + (((cell * 40503) >> 5) & (CELL - 1))
    x = _logits(row_ptr, mask_ptr, at, at < vocab, MASKED)
    return tl.where(x < best, x, float("-inf"))


@triton.jit
def _estimates(best, other, peak, least, rate, WEIGHTS: tl.constexpr, CELL: tl.constexpr):
    """[CELLS, 2] keys and values, 1 or (WEIGHTS) weights, of the cells' largest, and of the others, for CELL each: what
    is below a key, or above it, sums up to about as much as in the row."""
    if WEIGHTS:
        each, more = _weights(best, peak, least, rate), _weights(other, peak, least, rate)
    else:
        each = tl.full((CELLS,), 1, tl.int64)
        more = each
    return tl.join(_key(best), _key(other)), tl.join(each, more * CELL)


@triton.jit
def _spread(count, CELL: tl.constexpr):
    """Four deviations of an estimated count."""
    return (4 * tl.sqrt(CELL * count.to(tl.float32))).to(tl.int64) + 1


@triton.jit
def _middle(values, limit, whole):
    """Which sum of estimated weights stands for the limit; and the smaller of what is below and above that."""
    left = whole - limit
    return tl.where(limit < left, limit, tl.sum(values) - left), tl.minimum(limit, left)


@triton.jit
def _draw_gathered(
    few_x_ptr, few_id_ptr, count, bound, vocab, peak, least, rate, floor, seed, position, top_k, top_p, whole_low,
    whole_high,
):  # fmt: skip
    """`_draw_few` in the room it takes."""
    token, certain = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    if count <= FEW:
        token, certain = _draw_few(
            few_x_ptr, few_id_ptr, count, bound, vocab, peak, least, rate, floor, seed, position, top_k, top_p,
            whole_low, whole_high, FEW,
        )  # fmt: skip
    elif count <= SOME:
        token, certain = _draw_few(
            few_x_ptr, few_id_ptr, count, bound, vocab, peak, least, rate, floor, seed, position, top_k, top_p,
            whole_low, whole_high, SOME,
        )  # fmt: skip
    return token, certain


@triton.jit
def _draw_few(
    few_x_ptr, few_id_ptr, count, bound, vocab, peak, least, rate, floor, seed, position, top_k, top_p, whole_low,
    whole_high, SIZE: tl.constexpr,
):  # fmt: skip
    """The token of a filtered row, among all its logits that reach the bound; and whether it is certain.

    It is when all that can stay is there, and the sum of the row's weights, which lies between the two given, decides
    nothing.
    """
    has_k, has_p = _filters(top_k, top_p, vocab)
    slot = tl.arange(0, SIZE)
    live = slot < count
    x = tl.load(few_x_ptr + slot, mask=live, other=float("-inf"))
    keys = tl.where(live, _key(x), _NO_KEY)
    w = tl.where(live, _weights(x, peak, least, rate), 0)
    high = _key(peak)
    complete = bound <= _key(least)  # nothing else has a weight
    certain = complete | has_k | has_p | (_weight_of(_value(bound), peak, least, rate) < floor)

    # kept: every key above the edge, and the first `room` of those on it
    edge, room, total = bound, tl.full((), _FAR, tl.int64), tl.sum(w)
    if has_k:
        certain = certain & ((count >= top_k) | complete)
        edge, held = _edge_few(keys, live.to(tl.int64), bound, high, top_k)
        room = top_k - held
        total = tl.sum(tl.where(keys > edge, w, 0)) + room * tl.max(tl.where(keys == edge, w, 0))
        whole_low, whole_high = total, total
    elif has_p:
        whole_low, whole_high = tl.where(complete, total, whole_low), tl.where(complete, total, whole_high)
    if has_p:
        line, most = _ceil(top_p * whole_low.to(tl.float64)), _ceil(top_p * whole_high.to(tl.float64))
        last, held = _edge_few(keys, w, edge, high, line)
        each = tl.maximum(tl.max(tl.where(keys == last, w, 0)), 1)
        fits = (line - held + each - 1) // each
        reached = held + each * tl.sum((keys == last).to(tl.int64)) >= most
        certain = certain & (reached & ((most - held + each - 1) // each == fits) | complete | has_k)
        room = tl.where(last == edge, tl.minimum(room, fits), fits)
        edge = last
    w, _ = _kept(keys, w, edge, room, floor)
    place = tl.sum((tl.cumsum(w) <= _point(seed, position, tl.sum(w))).to(tl.int32))
    return tl.load(few_id_ptr + tl.minimum(place, SIZE - 1)), certain.to(tl.int32)


@triton.jit
def _edge_few(keys, values, low, high, limit):
    """The least key, `low` or above, such that the values of larger keys sum up to less than the limit; that sum."""
    under, over = low.to(tl.int64) - 1, high.to(tl.int64)
    held = tl.zeros((), tl.int64)  # above `over`
    while over - under > 1:
        middle = (under + over) >> 1
        found = tl.sum(tl.where(keys > middle.to(tl.int32), values, 0))
        if found < limit:
            over, held = middle, found
        else:
            under = middle
    return over.to(tl.int32), held


@triton.jit
def _kept(keys, w, edge, room, floor):
    """Weights with those that are dropped as 0; and how many keys are the edge itself."""
    level = (keys == edge).to(tl.int32)
    stays = (keys > edge) | ((level > 0) & (tl.cumsum(level) <= tl.minimum(room, 0x7FFFFFFF).to(tl.int32)))
    return tl.where(stays & (w >= floor), w, 0), tl.sum(level)


# ---- rows that need the exact sum, or more than was left -------------------------------------------------------------


@triton.jit
def _sums(
    logits_ptr,
    mask_ptr,
    best_ptr,
    sums_ptr,
    open_ptr,
    temperature_ptr,
    vocab,
    row_stride,
    MASKED: tl.constexpr,
    RUN: tl.constexpr,
    TURNS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(open_ptr + row) == 0:
        return
    peak = tl.max(_parts(best_ptr + row * CELLS, vocab, float("-inf"), CELLS, RUN // EACH))
    least, rate = _scale(peak, tl.load(temperature_ptr + row))
    for i in tl.static_range(TURNS):
        run = (tl.program_id(0) * TURNS + i) * TOGETHER + tl.arange(0, TOGETHER)
        at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
        w = _weights(_logits(logits_ptr + row * row_stride, mask_ptr, at, at < vocab, MASKED), peak, least, rate)
        tl.store(sums_ptr + row * RUNS + run, tl.sum(w, axis=1), mask=run < RUNS)


@triton.jit
def _exact(
    logits_ptr,
    mask_ptr,
    best_ptr,
    sums_ptr,
    few_x_ptr,
    few_id_ptr,
    count_ptr,
    bound_ptr,
    open_ptr,
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
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(open_ptr + row) == 0:
        return
    row_ptr = logits_ptr + row * row_stride
    peak = tl.max(_parts(best_ptr + row * CELLS, vocab, float("-inf"), CELLS, RUN // EACH))
    least, rate = _scale(peak, tl.load(temperature_ptr + row))
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    sums = _parts(sums_ptr + row * RUNS, vocab, 0, RUNS, RUN)
    whole = tl.sum(sums)
    if _kind(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab) == _WHOLE:
        point = _point(seed, position, whole)
        run = tl.sum((tl.cumsum(sums) <= point).to(tl.int32))
        before = tl.sum(tl.where(tl.arange(0, RUNS) < run, sums, 0))
        at = run * RUN + tl.arange(0, RUN)
        w = _weights(_logits(row_ptr, mask_ptr, at, at < vocab, MASKED), peak, least, rate)
        tl.store(tokens_ptr + row, run * RUN + tl.sum((tl.cumsum(w) + before <= point).to(tl.int32)))
    else:
        top_k, top_p, floor = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), _floor(min_p_ptr, row)
        token, certain = _draw_gathered(
            few_x_ptr + row * SOME, few_id_ptr + row * SOME, tl.load(count_ptr + row), tl.load(bound_ptr + row), vocab,
            peak, least, rate, floor, seed, position, top_k, top_p, whole, whole,
        )  # fmt: skip
        if certain == 0:
            token = _draw_long(
                row_ptr, mask_ptr, best_ptr + row * CELLS, sums_ptr + row * RUNS, few_x_ptr + row * SOME,
                few_id_ptr + row * SOME, vocab, peak, least, rate, floor, seed, position, top_k, top_p, whole, MASKED,
                RUN, SIZE,
            )  # fmt: skip
        tl.store(tokens_ptr + row, token)


@triton.jit
def _draw_long(
    row_ptr, mask_ptr, best_ptr, sums_ptr, few_x_ptr, ties_ptr, vocab, peak, least, rate, floor, seed, position, top_k,
    top_p, whole, MASKED: tl.constexpr, RUN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The token of a filtered row, from all its logits, SIZE of them at a time."""
    has_k, has_p = _filters(top_k, top_p, vocab)
    edge, room = _key(least), tl.full((), _FAR, tl.int64)  # at `least` and below weights are 0
    if has_k:
        edge, held = _edge_long(
            row_ptr, mask_ptr, best_ptr, few_x_ptr, vocab, edge, peak, least, rate, top_k, whole, False, MASKED, RUN,
            SIZE,
        )  # fmt: skip
        room = top_k - held
    if has_p:
        if has_k:
            whole, _, _ = _window(
                row_ptr, mask_ptr, few_x_ptr, vocab, edge, _key(peak), peak, least, rate, True, MASKED, SIZE
            )  # fmt: skip
            whole += tl.minimum(room, vocab) * _weight_of(_value(edge), peak, least, rate)
        line = _ceil(top_p * whole.to(tl.float64))
        last, held = _edge_long(
            row_ptr, mask_ptr, best_ptr, few_x_ptr, vocab, edge, peak, least, rate, line, whole, True, MASKED, RUN, SIZE
        )  # fmt: skip
        each = tl.maximum(_weight_of(_value(last), peak, least, rate), 1)
        fits = (line - held + each - 1) // each
        room = tl.where(last == edge, tl.minimum(room, fits), fits)
        edge = last
    # what each run keeps, and how many of its keys are the edge
    tl.debug_barrier()
    ties, start, at = tl.zeros((), tl.int64), tl.zeros((), tl.int32), tl.arange(0, SIZE)
    run = tl.arange(0, SIZE // RUN)
    x = _logits(row_ptr, mask_ptr, at, at < vocab, MASKED)
    while start < vocab:
        later = start + SIZE + at
        ahead = _logits(row_ptr, mask_ptr, later, later < vocab, MASKED)
        keys = _key(x)
        w, level = _kept(keys, _weights(x, peak, least, rate), edge, room - ties, floor)
        here = start // RUN + run
        tl.store(sums_ptr + here, tl.sum(tl.reshape(w, (SIZE // RUN, RUN)), axis=1), mask=here < RUNS)
        on = tl.sum(tl.reshape((keys == edge).to(tl.int32), (SIZE // RUN, RUN)), axis=1)
        tl.store(ties_ptr + here, on, mask=here < RUNS)
        x, ties, start = ahead, ties + level, start + SIZE
    tl.debug_barrier()
    runs = tl.arange(0, RUNS)
    sums, on = _parts(sums_ptr, vocab, 0, RUNS, RUN), _parts(ties_ptr, vocab, 0, RUNS, RUN)
    point = _point(seed, position, tl.sum(sums))
    chosen = tl.sum((tl.cumsum(sums) <= point).to(tl.int32))
    before = tl.sum(tl.where(runs < chosen, sums, 0))
    ties = tl.sum(tl.where(runs < chosen, on, 0)).to(tl.int64)
    at = chosen * RUN + tl.arange(0, RUN)
    x = _logits(row_ptr, mask_ptr, at, at < vocab, MASKED)
    w, _ = _kept(_key(x), _weights(x, peak, least, rate), edge, room - ties, floor)
    return tl.minimum(chosen * RUN + tl.sum((tl.cumsum(w) + before <= point).to(tl.int32)), vocab - 1)


@triton.jit
def _edge_long(
    row_ptr, mask_ptr, best_ptr, few_x_ptr, vocab, low, peak, least, rate, limit, whole, WEIGHTS: tl.constexpr,
    MASKED: tl.constexpr, RUN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """`_edge_few` over a whole row; values are 1, or (WEIGHTS) the weights, of which those from `low` on sum up to
    `whole`.

    A pass learns the exact sums above both ends of a window of keys, and leaves the keys inside. The first window is
    guessed by the cells. Where the edge is in it, it is found among these keys; where there are too many of them, they
    come from all over the row, and the next window is guessed by them. Where it is not, at least that is known.
    """
    under, over = low.to(tl.int64) - 1, _key(peak).to(tl.int64)
    held, turn = tl.zeros((), tl.int64), tl.zeros((), tl.int32)  # above `over`; passes
    left, right = _first_window(
        row_ptr, mask_ptr, best_ptr, vocab, low, peak, least, rate, limit, whole, WEIGHTS, MASKED, RUN // EACH
    )
    right = tl.minimum(tl.maximum(right, low.to(tl.int64) + 1), over)
    left = tl.maximum(tl.minimum(left, right - 1), low.to(tl.int64))
    while over - under > 1:
        tl.debug_barrier()
        above_left, above_right, count = _window(
            row_ptr, mask_ptr, few_x_ptr, vocab, left.to(tl.int32), right.to(tl.int32), peak, least, rate, WEIGHTS,
            MASKED, SIZE,
        )  # fmt: skip
        tl.debug_barrier()
        turn += 1
        if above_right >= limit:
            under, left, right = right, right, over
        elif above_left < limit:
            over, held = left, above_left
            left, right = tl.maximum(under, low.to(tl.int64)), over
        else:
            under, over, held = left, right, above_right
            slot = tl.arange(0, INSIDE)
            live = slot < count
            x = tl.load(few_x_ptr + slot, mask=live, other=float("-inf"))
            keys = tl.where(live, _key(x), _NO_KEY)
            values = tl.where(live, _weights(x, peak, least, rate), 0) if WEIGHTS else live.to(tl.int64)
            first = (under + 1).to(tl.int32)
            if count <= INSIDE:
                edge, more = _edge_few(keys, values, first, over.to(tl.int32), limit - held)
                over = edge.to(tl.int64)
                under, held = over - 1, held + more
            else:
                found = tl.sum(values)
                share = (limit - held).to(tl.float64) / (above_left - above_right).to(tl.float64)
                middle, near = (share * found.to(tl.float64)).to(tl.int64), found // 32 + 1
                right_key, _ = _edge_few(keys, values, first, over.to(tl.int32), middle - near)
                left_key, _ = _edge_few(keys, values, first, over.to(tl.int32), middle + near)
                left, right = left_key.to(tl.int64) - 1, right_key.to(tl.int64)
                if ((left == under) & (right == over)) | (turn >= PATIENCE):
                    left, right = (under + over) >> 1, over
    return over.to(tl.int32), held


@triton.jit
def _first_window(
    row_ptr, mask_ptr, best_ptr, vocab, low, peak, least, rate, limit, whole, WEIGHTS: tl.constexpr,
    MASKED: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """Two keys, int64: the edge is probably above the first one, and not above the second."""
    best = _parts(best_ptr, vocab, float("-inf"), CELLS, CELL)
    other = _others(row_ptr, mask_ptr, best, vocab, MASKED, CELL)
    keys, values = _estimates(best, other, peak, least, rate, WEIGHTS, CELL)
    if WEIGHTS:
        middle, scarce = _middle(tl.where(keys >= low, values, 0), limit, whole)
        near = scarce // 16
    else:
        middle, near = limit, _spread(limit, CELL)
    over, _ = _edge_few(keys, values, low, _key(peak), middle - near)
    under, _ = _edge_few(keys, values, low, _key(peak), middle + near)
    return under.to(tl.int64) - 1, over.to(tl.int64)


@triton.jit
def _window(
    row_ptr, mask_ptr, few_x_ptr, vocab, under, over, peak, least, rate, WEIGHTS: tl.constexpr, MASKED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The sums of the values of keys above each of two, int64; how many keys lie between, the second one included. The
    logits of the first INSIDE of those are left; a tile takes its pieces from all over the row."""
    tiles = tl.cdiv(vocab, SIZE)
    slot = tl.arange(0, SIZE)
    at = (slot // PIECE) * (tiles * PIECE) + slot % PIECE
    more, most = tl.zeros((SIZE,), tl.int64), tl.zeros((SIZE,), tl.int64)
    count, turn = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    x = _logits(row_ptr, mask_ptr, at, at < vocab, MASKED)
    while turn < tiles:
        later = at + (turn + 1) * PIECE
        ahead = _logits(row_ptr, mask_ptr, later, later < vocab, MASKED)  # while this tile is worked on
        keys = _key(x)
        values = _weights(x, peak, least, rate) if WEIGHTS else tl.full((SIZE,), 1, tl.int64)
        found = (keys > under) & (keys <= over)
        place = tl.cumsum(found.to(tl.int32)) - 1 + count
        tl.store(few_x_ptr + place, x, mask=found & (place < INSIDE))
        more += tl.where(keys > under, values, 0)
        most += tl.where(keys > over, values, 0)
        x, count, turn = ahead, count + tl.sum(found.to(tl.int32)), turn + 1
    return tl.sum(more), tl.sum(most), count


@triton.jit
def _weight_of(x, peak, least, rate):
    """The weight of one logit."""
    return tl.max(_weights(x + tl.zeros((16,), tl.float32), peak, least, rate))


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
    seeds, positions, *others = [column.contiguous() for column in (seeds, positions, temperature, top_k, top_p, min_p)]

    def scratch(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, width, dtype=dtype, device=device)

    runs, together, some = RUNS.value, TOGETHER.value, SOME.value
    best, rough = scratch(CELLS.value, torch.float32), scratch(runs, torch.float32)
    sums, cells = scratch(runs, torch.int64), scratch(CELLS.value, torch.int32)
    few = (
        scratch(some, torch.float32), scratch(some, torch.int32), scratch(1, torch.int32), scratch(1, torch.int32),
        scratch(1, torch.int32),
    )  # fmt: skip
    undecided = few[-1]
    run = max(power_of_two(cdiv(vocab, runs)), EACH.value)
    slices = cdiv(cdiv(vocab, run), together)
    warps = min(max(together * run // 1024, 1), 16)  # 32 logits a thread
    where = (logits, logits if mask is None else mask, best)
    last = (vocab, logits.stride(0), mask is not None, run)
    _scan[(slices, rows)](*where, rough, others[0], *last, num_warps=warps)
    _choose[(rows,)](*where, rough, cells, *few, seeds, positions, *others, tokens, peaks, *last, num_warps=WARPS)
    _sums[(cdiv(slices, 4), rows)](*where, sums, undecided, others[0], *last, 4, num_warps=warps)
    _exact[(rows,)](
        *where, sums, *few, seeds, positions, *others, tokens, *last, max(TILE, run), num_warps=WARPS
    )  # fmt: skip
    return tokens, peaks
