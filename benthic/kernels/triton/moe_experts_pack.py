"""FP4 weights of experts in the order that `moe_experts_hopper.py` streams them in, made once when they are loaded.

A weight keeps its 0.53 bytes. Blocks of 128 rows and 128 columns lie together: [128 rows, 4 threads, 4 words] of codes,
block after block along K, then along N, then over experts, and one word of four scale bytes a row and block.

Of a row's 128 columns, thread q of the four that share the row in a matrix instruction has 32 codes, four words of 8:

    exact      Columns 16 j + 2 q + (0, 1, 8, 9), as the instruction has them. Words 2h and 2h+1 hold the 8 pairs of
               columns 64h and on. A pair belongs at bits 15 (sign) and 8..6 (magnitude) of both halves of a register:
               rotated, three pairs find room in a word, and what two words have left, put together, holds two more.
               Scale bytes: 253 less the group's distance below the row's largest scale, the exponent of a bf16.
    carried    Columns 32 q and on: the group q, so that a thread has one scale. Rows of a product are in the order of
               `columns`. A word has two groups of four codes: magnitudes in bits 2..0 of its nibbles, group after
               group; signs in their bits 3, the first group's in the odd nibbles.
               Scale bytes: which of `tables`, by the group's exponent over the row's scale.

E experts, N weight rows, K columns.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import quant
from benthic.kernels.triton.quant import bound, carry_byte, e2m1_value, e8m0_value
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv

BLOCK = 128  # weight rows, and columns, that lie together

KEPT = 0x81C081C0  # where a pair's bits belong
TURNS = (0, 10, 6)  # left rotation of a word that brings a pair there
REST = 0x0C180C18  # bits of a word that no such pair takes; the second word's go two places higher
REST_TURNS = (12, 2)  # of both words' rest

TOP, TABLES = 9, 24  # largest exponent of a group over its row's scale, and how many below it until all is zero


class Packed(NamedTuple):
    """A stack of expert matrices, packed."""

    shape: torch.Size  # of the values: [E, N, K]
    words: Tensor  # [E * N/128 * K/128 * 64, 32] int32
    scales: Tensor  # [E * N/128 * K/128 * 128] int32, four bytes a row and block
    base: Tensor  # [E, N] f32, a power of two a row
    carried: bool


@cache
def tables(device: torch.device) -> Tensor:
    """[24] int64: E4M3 codes of 0 .5 1 1.5 2 3 4 6 times 2^9, 2^8, ..., as bytes, the first lowest."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    values = sizes * torch.exp2(TOP - torch.arange(TABLES, device=device).float())[:, None]
    return values.clamp(max=quant.FP8_MAX).to(quant.E4M3).view(torch.int64).squeeze(-1)


def columns(carried: bool, device: torch.device | None = None) -> Tensor:
    """[128] int64: the column that each place of a block of K holds; rows of a product are in this order."""
    if not carried:
        return torch.arange(BLOCK, device=device)
    return torch.arange(BLOCK, device=device).view(4, 8, 4).transpose(0, 1).flatten()


def interleave(inner: int, device: torch.device | None = None) -> Tensor:
    """[2*I] int64: 8 gate rows, then the 8 up rows of the same channels, and so on; both are then in one thread."""
    rows = torch.arange(2 * inner, device=device).view(2, inner // 8, 8)
    return rows.transpose(0, 1).flatten()


@triton.jit
def _row_scales(
    codes_ptr,  # [E, N, K/2]
    scales_ptr,  # [E, N, K/32]
    order_ptr,  # [N] int64
    bytes_ptr,  # [E, N] uint8
    base_ptr,  # [E, N] f32
    N,
    K,
    CARRIED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The largest scale of each row, or the scale that carries it."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    source = tl.program_id(0).to(tl.int64) * N + tl.load(order_ptr + row, mask=row < N, other=0)
    byte = tl.zeros((ROWS,), tl.int32)
    number = tl.full((ROWS,), 1, tl.int32)
    for first in range(0, bound(K // 32), GROUPS):
        group = first + tl.arange(0, GROUPS)
        inside = (row < N)[:, None] & (group < K // 32)[None, :]
        scale = tl.load(scales_ptr + source[:, None] * (K // 32) + group[None, :], mask=inside, other=0).to(tl.int32)
        number = tl.minimum(number, tl.min((scale != 255).to(tl.int32), axis=1))
        if CARRIED:
            at = (source[:, None] * (K // 32) + group[None, :])[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            pair = tl.load(codes_ptr + at, mask=inside[:, :, None], other=0).to(tl.int32)
            size = tl.max(tl.maximum(pair & 7, (pair >> 4) & 7), axis=2)
            value = e2m1_value(size) * e8m0_value(scale)
            byte = tl.maximum(byte, carry_byte(tl.max(value.to(tl.int32, bitcast=True), axis=1)))
        else:
            byte = tl.maximum(byte, tl.max(scale, axis=1))
    to = tl.program_id(0).to(tl.int64) * N + row
    tl.store(bytes_ptr + to, byte.to(tl.uint8), mask=row < N)
    tl.store(base_ptr + to, tl.where(number == 1, e8m0_value(byte), float("nan")), mask=row < N)


@triton.jit
def _rotated(x, by):
    """uint32 x, to the left by 0 .. 31 bits."""
    return (x << by) | tl.where(by == 0, 0, x >> ((32 - by) & 31))


@triton.jit
def _exact_words(codes_at, REST: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr):
    """Addresses of rows' 64 bytes of a block [N] -> words [N, 4, 2, 2]: thread, half, which of two."""
    place = tl.arange(0, 64)  # half, pair in it, thread
    pair = (place >> 2) & 7
    at = (place >> 5) * 32 + (pair >> 1) * 8 + (pair & 1) * 4 + (place & 3)
    both = tl.load(codes_at[:, None] + at[None, :]).to(tl.uint32)
    bits = ((both & 7) << 6) | ((both & 8) << 12) | ((both & 0x70) << 18) | ((both & 0x80) << 24)
    kind = (pair % 3)[None, :]
    pair = pair[None, :]
    back = tl.where(kind == 0, 0, tl.where(kind == 1, 32 - T1, 32 - T2))
    back = tl.where(pair == 6, 32 - R0, tl.where(pair == 7, 32 - R1, back)).to(tl.uint32)
    bits = _rotated(bits, back)
    first = tl.where(pair < 3, bits, tl.where(pair < 6, 0, bits & REST))
    second = tl.where(pair < 3, 0, tl.where(pair < 6, bits, _rotated(bits & (0xFFFFFFFF - REST), 30)))
    shape: tl.constexpr = (codes_at.shape[0], 2, 8, 4)
    first = tl.sum(tl.reshape(first, shape).to(tl.int32, bitcast=True), axis=2)  # no two have a bit in common
    second = tl.sum(tl.reshape(second, shape).to(tl.int32, bitcast=True), axis=2)
    return tl.join(tl.permute(first, (0, 2, 1)), tl.permute(second, (0, 2, 1)))


@triton.jit
def _carried_words(codes_at):
    """Addresses of rows' 64 bytes of a block [N] -> words [N, 16]: thread, word."""
    place = tl.arange(0, 64)  # thread, word, byte
    both = tl.load(codes_at[:, None] + place[None, :]).to(tl.uint32)
    low, high = both & 15, both >> 4
    group = ((place >> 1) & 1)[None, :].to(tl.uint32)  # of four codes in the word
    size = (place & 1)[None, :].to(tl.uint32) * 8 + group * 16
    sign = (place & 1)[None, :].to(tl.uint32) * 16 + 7 - group * 4
    bits = ((low & 7) << size) | ((high & 7) << (size + 4)) | ((low >> 3) << sign) | ((high >> 3) << (sign + 8))
    return tl.sum(tl.reshape(bits.to(tl.int32, bitcast=True), (codes_at.shape[0], 16, 4)), axis=2)


@triton.jit
def _pack_block(
    codes_ptr,  # [E, N, K/2]
    scales_ptr,  # [E, N, K/32]
    order_ptr,  # [N] int64
    bytes_ptr,  # [E, N] uint8
    words_ptr,  # [E, N/128, K/128, 128, 16] int32
    out_ptr,  # [E, N/128, K/128, 128, 4] uint8
    N,
    K,
    CARRIED: tl.constexpr,
    REST: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    R0: tl.constexpr,
    R1: tl.constexpr,
    TOP: tl.constexpr,
    TABLES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of one block."""
    expert, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    block, inside = tl.program_id(1) // (128 // ROWS), tl.program_id(1) % (128 // ROWS) * ROWS
    line = inside + tl.arange(0, ROWS)
    source = expert * N + tl.load(order_ptr + block * 128 + line)
    codes_at = codes_ptr + source * (K // 2) + part * 64
    to = ((expert * (N // 128) + block) * (K // 128) + part) * 128 + line
    if CARRIED:
        words = _carried_words(codes_at)
    else:
        words = tl.reshape(_exact_words(codes_at, REST, T1, T2, R0, R1), (ROWS, 16))
    tl.store(words_ptr + to[:, None] * 16 + tl.arange(0, 16)[None, :], words)
    group = tl.arange(0, 4)
    scale = tl.load(scales_ptr + source[:, None] * (K // 32) + part * 4 + group[None, :]).to(tl.int32)
    row = tl.load(bytes_ptr + expert * N + block * 128 + line).to(tl.int32)[:, None]
    if CARRIED:
        offset = tl.minimum(tl.maximum(TOP - (scale - row), 0), TABLES - 1)
    else:
        offset = tl.maximum(253 - (row - scale), 0)
    tl.store(out_ptr + to[:, None] * 4 + group[None, :], offset.to(tl.uint8))


def pack(weight: quant.Fp4Matrix, carried: bool, rows: Tensor | None = None) -> Packed:
    """Reorder a stack [E, N, K], N and K multiples of 128.

    rows     [N] int64, order of the weight rows; None: as they are.
    carried  for rows with one scale each, else for bf16 rows.
    Cost     reads the weights once or twice and writes them once.
    """
    experts, n, k = weight.shape
    assert n % BLOCK == 0, f"{n} weight rows are no blocks of {BLOCK}"
    assert k % BLOCK == 0, f"{k} columns are no blocks of {BLOCK}"
    codes, scales = weight.codes.view(torch.uint8).contiguous(), weight.scales.contiguous()
    device = codes.device
    tables(device)  # made now: a graph that is captured later must not
    order = torch.arange(n, device=device) if rows is None else rows
    words = torch.empty((experts * n * k // 256, 32), dtype=torch.int32, device=device)
    offsets = torch.empty(experts * n * k // 32, dtype=torch.uint8, device=device)
    tops = torch.empty((experts, n), dtype=torch.uint8, device=device)
    base = torch.empty((experts, n), dtype=torch.float32, device=device)
    _row_scales[(experts, cdiv(n, 16))](
        codes, scales, order, tops, base, n, k, CARRIED=carried, ROWS=16, GROUPS=16, num_warps=4
    )
    _pack_block[(experts, n // 32, k // BLOCK)](
        codes,
        scales,
        order,
        tops,
        words,
        offsets,
        n,
        k,
        CARRIED=carried,
        REST=REST,
        T1=TURNS[1],
        T2=TURNS[2],
        R0=REST_TURNS[0],
        R1=REST_TURNS[1],
        TOP=TOP,
        TABLES=TABLES,
        ROWS=32,
        num_warps=4,
    )
    return Packed(weight.shape, words, offsets.view(torch.int32), base, carried)


def unpack(packed: Packed, expert: int) -> Tensor:
    """One matrix of what `pack` was given, in the order of rows that it has here: [N, K] bf16; carried ones as carried.

    Plain torch, bit by bit, exact: for whoever checks what lies on a device.
    """
    experts, n, k = packed.shape
    words = packed.words.view(experts, n // BLOCK, k // BLOCK, BLOCK, 4, 4)[expert].long() & 0xFFFFFFFF
    offsets = packed.scales.view(torch.uint8).view(experts, n // BLOCK, k // BLOCK, BLOCK, 4)[expert].long()
    if packed.carried:
        codes = _carried_codes(words)
        sizes = tables(packed.words.device).view(torch.uint8).view(TABLES, 8)
        column = torch.arange(BLOCK, device=words.device)
        size = sizes[offsets.gather(-1, (column // 32).expand(*codes.shape[:-1], BLOCK)), codes & 7]
        value = (size | ((codes & 8) << 4).to(torch.uint8)).view(quant.E4M3).float()
    else:
        codes = _exact_codes(words)
        value = quant._decode_e2m1(codes.to(torch.uint8))
        value = value.double() * torch.exp2((offsets - 253).double()).repeat_interleave(32, dim=-1)
    value = value.transpose(1, 2).reshape(n, k)  # from [N/128, K/128, 128, 128]
    return (value.double() * packed.base[expert, :, None]).to(torch.bfloat16)


def _left(x: Tensor, by: int) -> Tensor:
    """Words of 32 bits in int64, rotated."""
    return ((x << by) | (x >> (32 - by))) & 0xFFFFFFFF if by else x


def _exact_codes(words: Tensor) -> Tensor:
    """[..., 4 threads, 4 words] -> E2M1 codes [..., 128] of a row, column after column."""
    pairs: list[Tensor] = []
    for half in range(2):
        first, second = words[..., 2 * half], words[..., 2 * half + 1]
        rest = (first & REST) | (_left(second, 2) & (0xFFFFFFFF - REST))
        turned = [*(_left(first, turn) for turn in TURNS), *(_left(second, turn) for turn in TURNS)]
        pairs += [*turned, *(_left(rest, turn) for turn in REST_TURNS)]
    bits = torch.stack(pairs, -1) & KEPT  # [..., thread, half and pair]
    low = ((bits >> 6) & 7) | ((bits >> 12) & 8)
    high = ((bits >> 22) & 7) | ((bits >> 28) & 8)
    both = torch.stack((low, high), -1).unflatten(-2, (2, 8))  # thread, half, pair, which
    thread, half, pair = (torch.arange(count, device=words.device) for count in (4, 2, 8))
    byte = half[None, :, None] * 32 + (pair >> 1) * 8 + (pair & 1) * 4 + thread[:, None, None]
    return both.flatten(-4, -2)[..., byte.flatten().argsort(), :].flatten(-2)


def _carried_codes(words: Tensor) -> Tensor:
    """As `_exact_codes`, of words that hold magnitudes and signs apart."""
    place = torch.arange(16, device=words.device)  # of a thread's bytes: word, byte
    word, group, inside = place >> 2, (place >> 1) & 1, place & 1
    bits = words[..., word]
    size, sign = inside * 8 + group * 16, inside * 16 + 7 - group * 4
    low = ((bits >> size) & 7) | (((bits >> sign) & 1) << 3)
    high = ((bits >> (size + 4)) & 7) | (((bits >> (sign + 8)) & 1) << 3)
    return torch.stack((low, high), -1).flatten(-3)
