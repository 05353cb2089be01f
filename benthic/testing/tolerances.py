"""How far a kernel may be from its reference or from a float64 answer, op by op, each with its reason."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A value passes when |got - want| <= absolute * scale + relative * |want|.

    f32_relative  relative part for float32 results
    roundings     a bfloat16 result is this many roundings from the exact value, 2^-8 of it each
    absolute      of the scale that the caller names: the size of what was summed
    """

    f32_relative: float
    roundings: int
    absolute: float
    reason: str

    def relative(self, dtype: torch.dtype) -> float:
        return self.roundings * 1.01 * 2.0**-8 if dtype == torch.bfloat16 else self.f32_relative


TOLERANCES = {
    "rms_norm": Tolerance(2e-6, 1, 0.0, "order of one sum of squares, all terms positive; one rounding"),
    "rotate": Tolerance(1e-6, 1, 1e-6, "two products; cancellation is bounded by the size of the pair"),
    "rotate_far": Tolerance(
        1e-6, 1, 0.04, "angles are float32: at positions near 2^20 their last bit is 1/16 of a turn"
    ),
    "linear": Tolerance(1e-6, 1, 1e-6, "order of a sum of up to a few thousand float32 terms, relative to sum |x||w|"),
    "linear_fp8": Tolerance(
        1e-6, 1, 2.0**-11, "FP8 tensor cores add 128 products with about 13 bits, relative to sum |x||w|"
    ),
    "swiglu": Tolerance(2e-6, 1, 1e-30, "one exponential; products of floats"),
    "hyper_mixes": Tolerance(
        1e-5, 0, 2e-6, "order of one long dot, carried through exponentials and 39 normalisations"
    ),
    "hyper_collapse": Tolerance(1e-6, 1, 1e-6, "a sum of S products, relative to its largest term"),
    "hyper_expand": Tolerance(1e-6, 1, 1e-6, "a sum of S+1 products, relative to its largest term"),
    "pool_groups": Tolerance(1e-6, 1, 1e-6, "a softmax over r values, a weighted mean of as many"),
    "engram_gate": Tolerance(1e-6, 1, 1e-6, "one long dot inside a square root inside a sigmoid: the slope is bounded"),
    "route": Tolerance(5e-6, 0, 1e-30, "order of one dot; the normaliser divides by a sum of positive terms"),
    "experts": Tolerance(2e-6, 1, 2e-6, "two products in float32"),
    "experts_rounded": Tolerance(
        0.0, 0, 0.02, "a value may take the next FP8 code, 2^-4 of itself; it is one of I terms"
    ),
    "experts_fp8": Tolerance(
        0.0, 0, 2.0**-4, "a thousand times as many values take the next code; one of them may be nearly all of a row"
    ),
    "sink_attention": Tolerance(2e-6, 1, 1e-5, "order of the sums of one softmax, relative to the largest row"),
    "sink_attention_rounded": Tolerance(
        0.0, 1, 2.0**-8, "a probability may round the other way: half a unit of bfloat16 of the largest row"
    ),
    "index_scores": Tolerance(1e-6, 1, 1e-6, "order of two sums"),
    "index_scores_rounded": Tolerance(
        0.0, 1, 2.0**-7, "three roundings to bfloat16, relative to the largest head's part"
    ),
}

# Two products in a row where FP8 operands are added up in the matrix unit. The first one's sums are off by SUMS of
# their rms: 13 bits inside 128 columns, float32 beyond. That moves a value of its result over a boundary of the FP8
# grid with the probability error / step, and then by one step. Of normal values E|error| is 0.8 SUMS and the mean step
# 0.072, so the second product reads rows that differ by sqrt(0.8 SUMS * 0.072) = 0.24 % of their rms, and so does its
# result. Few of a row's values move, some by a step of a large one: of 40 000 rows of 512 the farthest is off by 1.6 %,
# by 1.8 % at three times the error. Sums that stay in the matrix unit are off by 0.15 %, their rows by 0.93 %.
SUMS = 1e-4
MOVED_RMS = 0.005  # most of all rows together: twice what is expected, half of what unmoved sums give
MOVED_ROW = 0.02  # most of one row of 512 values or more


def regridded(error: float, grids: int) -> float:
    """The rms difference of rows that were `error` of their rms apart and then went through so many FP8 grids, each
    behind a product: what moved on the first one makes more move on the next."""
    for _ in range(grids):
        error = math.sqrt(0.8 * error * 0.072)
    return error


def excess(op: str, got: Tensor, want: Tensor, scale: float | Tensor = 1.0) -> float:
    """Largest |got - want| in units of what `op` allows: at most 1 passes; infinite when only one side is NaN.

    got    any shape, float32 or bfloat16: its dtype says which relative part counts.
    want   the same shape; float64 keeps its digits.
    scale  multiplies the absolute part; a number or a tensor that broadcasts.
    """
    assert got.shape == want.shape, f"{op}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if got.numel() == 0:
        return 0.0
    rule = TOLERANCES[op]
    wide, target = got.double(), want.double().to(got.device)
    allowed = rule.absolute * torch.as_tensor(scale, dtype=torch.float64, device=got.device)
    allowed = (allowed + rule.relative(got.dtype) * target.abs()).expand_as(wide)
    distance = (wide - target).abs()
    distance = torch.where((wide == target) | (wide.isnan() & target.isnan()), 0.0, distance)
    share = torch.where(distance == 0, 0.0, distance / allowed.clamp(min=1e-300))
    return float(share.nan_to_num(nan=torch.inf).max())


def assert_close(op: str, got: Tensor, want: Tensor, scale: float | Tensor = 1.0) -> None:
    """AssertionError that says by how much, when `got` is farther from `want` than the table allows."""
    share = excess(op, got, want, scale)
    assert share <= 1, f"{op}: {share:.3g} times the tolerance ({TOLERANCES[op].reason}); got {got}, want {want}"
