"""Sinkhorn and its exact backward, one Triton kernel each: a tile of rows stays in registers through all iterations.

Each half iteration divides by sums; the forward keeps those sums (S numbers a row), so that the backward can undo one
half iteration after the other. References: `kernels.hyper.sinkhorn` and its autograd.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # rows a program


@triton.jit
def _forward(a_ptr, c_ptr, d_ptr, rows, eps, S: tl.constexpr, ITERS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None, None]
    i = tl.arange(0, S)[None, :, None]
    j = tl.arange(0, S)[None, None, :]
    live = row < rows
    sums = d_ptr + row * ((2 * ITERS - 1) * S)  # [rows, 2 * ITERS - 1, S]: columns, then (rows, columns) each iteration
    a = tl.load(a_ptr + row * (S * S) + i * S + j, mask=live, other=0.0)
    c = tl.exp(a - tl.max(a, axis=2, keep_dims=True))
    c = c / tl.sum(c, axis=2, keep_dims=True) + eps
    d = tl.sum(c, axis=1, keep_dims=True) + eps
    tl.store(sums + j, d, mask=live)
    c = c / d
    for n in range(1, ITERS):
        d = tl.sum(c, axis=2, keep_dims=True) + eps
        tl.store(sums + (2 * n - 1) * S + i, d, mask=live)
        c = c / d
        d = tl.sum(c, axis=1, keep_dims=True) + eps
        tl.store(sums + 2 * n * S + j, d, mask=live)
        c = c / d
    tl.store(c_ptr + row * (S * S) + i * S + j, c, mask=live)


@triton.jit
def _backward(c_ptr, d_ptr, g_ptr, out_ptr, rows, eps, S: tl.constexpr, ITERS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None, None]
    i = tl.arange(0, S)[None, :, None]
    j = tl.arange(0, S)[None, None, :]
    live = row < rows
    sums = d_ptr + row * ((2 * ITERS - 1) * S)
    at = row * (S * S) + i * S + j
    c = tl.load(c_ptr + at, mask=live, other=0.0)
    g = tl.load(g_ptr + at, mask=live, other=0.0)
    for back in range(1, ITERS):
        n = ITERS - back
        d = tl.load(sums + 2 * n * S + j, mask=live, other=1.0)
        g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / d
        c = c * d
        d = tl.load(sums + (2 * n - 1) * S + i, mask=live, other=1.0)
        g = (g - tl.sum(g * c, axis=2, keep_dims=True)) / d
        c = c * d
    d = tl.load(sums + j, mask=live, other=1.0)
    g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / d
    p = c * d - eps  # the softmax
    tl.store(out_ptr + at, p * (g - tl.sum(g * p, axis=2, keep_dims=True)), mask=live)


def forward(logits: Tensor, eps: float, iters: int) -> tuple[Tensor, Tensor]:
    """logits [T, S, S] f32, S a power of two -> the same shape, nearly doubly stochastic; sums [T, 2 iters - 1, S]."""
    logits = logits.contiguous()
    rows, streams = logits.shape[0], logits.shape[1]
    comb, sums = torch.empty_like(logits), logits.new_empty(rows, 2 * iters - 1, streams)
    if rows:
        _forward[(triton.cdiv(rows, BLOCK),)](logits, comb, sums, rows, eps, streams, iters, BLOCK)
    return comb, sums


def backward(comb: Tensor, sums: Tensor, grad: Tensor, eps: float) -> Tensor:
    """comb and its gradient [T, S, S] f32, sums of the forward -> gradient of the logits."""
    grad = grad.contiguous()
    rows, streams = comb.shape[0], comb.shape[1]
    iters = (sums.shape[1] + 1) // 2
    out = torch.empty_like(comb)
    if rows:
        _backward[(triton.cdiv(rows, BLOCK),)](comb, sums, grad, out, rows, eps, streams, iters, BLOCK)
    return out
