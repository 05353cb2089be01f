"""The k best of each row as a mask, one Triton program a row: its scores stay in registers through the whole search.

Reference: `memory.top_mask`, on scores that are bfloat16 values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 1 << 14  # entries a row: 32 a thread in 16 warps


@triton.jit
def _top_mask(scores_ptr, mask_ptr, n, k, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    i = tl.arange(0, N)
    score = tl.load(scores_ptr + row + i, mask=i < n, other=-float("inf")).to(tl.float32)
    bits = tl.where(score == 0.0, 0, score.to(tl.int32, bitcast=True))  # -0 counts as 0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> 16  # bfloat16 values differ in the upper half alone
    key = (order << 16) | (n - 1 - i)  # of equal scores the lowest index is the largest key
    key = tl.where(i < n, key, -2147483648)
    best = tl.where(tl.sum((key >= 0).to(tl.int32), axis=0) >= k, 0, -2147483648)  # at least k keys reach it, or none
    step = 1 << 30
    for _ in range(31):
        more = best + step
        best = tl.where(tl.sum((key >= more).to(tl.int32), axis=0) >= k, more, best)
        step = step >> 1
    taken = (key >= best) & (score > -float("inf"))
    tl.store(mask_ptr + row + i, taken.to(tl.uint8), mask=i < n)


def top_mask(scores: Tensor, k: int) -> Tensor:
    """scores [..., n] bf16, 1 <= n <= MOST -> bool: the k largest, lowest index first among equals, -inf never."""
    n = scores.shape[-1]
    assert scores.dtype is torch.bfloat16, f"keys hold bfloat16 scores, these are {scores.dtype}"
    assert 1 <= n <= MOST, f"{n} entries a row, {MOST} at most"
    scores = scores.contiguous()
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    rows, width = scores.numel() // n, triton.next_power_of_2(n)
    if rows:
        _top_mask[(rows,)](scores, mask.view(torch.uint8), n, k, width, num_warps=max(1, min(16, width // 1024)))
    return mask
