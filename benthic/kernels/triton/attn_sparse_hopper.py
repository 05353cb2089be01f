"""The Hopper form of `_attend` in attn_sparse.py, at 64 heads a program and a width of 512, over FP8 and NVFP4 records.

Triton proper runs unpacking, products and softmax one after another. Here, in Triton's explicit dialect (Gluon), they
overlap. 128 keys lie in shared memory; a quarter of them is overwritten with the next keys as soon as it has been
multiplied with its probabilities, while the quarters behind it still are.

    shared memory   q [64, 512] 64 KB, keys [128, 512] 128 KB, probabilities [64, 128] 16 KB, all bf16
    two warpgroups  each computes the scores of 64 of the 128 keys, then 256 of the 512 output channels of all heads

Per 128 keys: 2048 + 2048 cycles of products at the full rate, and as many of shared memory's. Beside them a warp runs
1300 instructions, 5 for every four channels that it unpacks from NVFP4. About 900 cycles of softmax stand alone.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from benthic.kernels.triton.quant import E2M1_PAIRS

# Everywhere below: 512 channels, 64 heads a program, 128 keys a step, of which PART = 32 are unpacked at a time.

_PEAK_START: gl.constexpr = gl.constexpr(-1e30)
_LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)

# How 256 threads hold PART records. Eight neighbouring threads have eight records, so that their 16-byte stores fall
# into different banks; four of them read 64 adjacent bytes.
_RECORDS = [[1, 0], [2, 0], [4, 0]]
_CODES: gl.constexpr = gl.constexpr(  # words [PART, 64], eight E2M1 codes each
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32]], [*_RECORDS, [0, 4], [0, 8]], [[8, 0], [16, 0], [0, 16]], [], [32, 64]
    )
)
_SCALES: gl.constexpr = gl.constexpr(  # [PART, pair of scales, scale, word of its two]
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 1, 0], [0, 8, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0]],
        [[8, 0, 0, 0], [16, 0, 0, 0], [0, 4, 0, 0]],
        [],
        [32, 16, 2, 2],
    )
)
_OCTETS: gl.constexpr = gl.constexpr(  # words [PART, 128], four E4M3 codes each
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32], [0, 64]], [*_RECORDS, [0, 4], [0, 8]], [[8, 0], [16, 0], [0, 16]], [], [32, 128]
    )
)
_WORD_PAIRS: gl.constexpr = gl.constexpr(  # the same, [PART, 64] times two neighbours
    gl.DistributedLinearLayout(
        [[0, 1], [0, 16], [0, 32]], [*_RECORDS, [0, 2], [0, 4]], [[8, 0], [16, 0], [0, 8]], [], [32, 64]
    )
)
_EXPONENTS: gl.constexpr = gl.constexpr(  # [PART, scale, pair of words of its four]
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 4, 0], [0, 8, 0]],
        [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 0, 2], [0, 1, 0]],
        [[8, 0, 0], [16, 0, 0], [0, 2, 0]],
        [],
        [32, 16, 4],
    )
)
_PAIRS: gl.constexpr = gl.constexpr(  # pairs of bf16 [PART, 256]
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 64], [0, 128]],
        [*_RECORDS, [0, 8], [0, 16]],
        [[8, 0], [16, 0], [0, 32]],
        [],
        [32, 256],
    )
)
_UNPACKED: gl.constexpr = gl.constexpr(  # the same, as they come from `_CODES`
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 128]],
        [*_RECORDS, [0, 16], [0, 32]],
        [[8, 0], [16, 0], [0, 64]],
        [],
        [32, 256],
    )
)
_ROWS: gl.constexpr = gl.constexpr(
    gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0])
)  # bf16 [64, 512], 16 bytes a thread
_SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
_VALUES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_SUMS: gl.constexpr = gl.constexpr(  # what each thread has of a row's sum: [64, warpgroup, lane of four]
    gl.DistributedLinearLayout(
        [[8, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0], [0, 1, 0]],
        [],
        [64, 2, 4],
    )
)
_SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_SHARED_PAIRS: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))

# Keys have their channels in an order that is cheap to unpack: of each eight, 0 4 1 5 2 6 3 7. So a pair is two
# channels four apart, which lie 16 bits apart in a word of E2M1 codes. q is brought into this order, the output out of
# it. NVFP4 keys are 2^-8 of their value, which saves a multiplication: bf16 reads a code's bits in place as the number
# times 2^-126, and while 2^118 times any scale is a bf16 number, 2^126 times it is not.

# Two E4M3 scales -> each times 2^118 as bf16, twice in a register.
_SPREAD_E4M3: gl.constexpr = gl.constexpr("""
{
.reg .b32 both;
.reg .b16 low, high;
.reg .f32 x, y;
cvt.rn.f16x2.e4m3x2 both, $2;
mov.b32 {low, high}, both;
cvt.f32.f16 x, low;
cvt.f32.f16 y, high;
mul.f32 x, x, 0f7A800000;
mul.f32 y, y, 0f7A800000;
cvt.rn.bf16x2.f32 $0, x, x;
cvt.rn.bf16x2.f32 $1, y, y;
}
""")

# Two words of four E4M3 codes and their scale, twice in a register -> four pairs. A code's sign goes to bit 15, the
# rest to bits 10..4, where bf16 reads the number times 2^-120.
_UNPACK_E4M3: gl.constexpr = gl.constexpr("""
{
.reg .b32 a, b, c, d, e, unit;
mov.b32 unit, 0x7B807B80;
prmt.b32 a, $4, $5, 0x4000;
prmt.b32 b, $4, $5, 0x5010;
prmt.b32 c, $4, $5, 0x6020;
prmt.b32 d, $4, $5, 0x7030;
shr.u32 e, a, 4;
and.b32 a, a, 0x80008000;
and.b32 e, e, 0x07F007F0;
or.b32 a, a, e;
shr.u32 e, b, 4;
and.b32 b, b, 0x80008000;
and.b32 e, e, 0x07F007F0;
or.b32 b, b, e;
shr.u32 e, c, 4;
and.b32 c, c, 0x80008000;
and.b32 e, e, 0x07F007F0;
or.b32 c, c, e;
shr.u32 e, d, 4;
and.b32 d, d, 0x80008000;
and.b32 e, e, 0x07F007F0;
or.b32 d, d, e;
mul.rn.bf16x2 a, a, unit;
mul.rn.bf16x2 b, b, unit;
mul.rn.bf16x2 c, c, unit;
mul.rn.bf16x2 d, d, unit;
mul.rn.bf16x2 $0, a, $6;
mul.rn.bf16x2 $1, b, $6;
mul.rn.bf16x2 $2, c, $6;
mul.rn.bf16x2 $3, d, $6;
}
""")

# Two pairs of neighbours, four channels apart -> two pairs of channels four apart.
_PAIR_UP: gl.constexpr = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


@gluon.jit
def _four(a, b, c, d):
    """Pairs 0 to 3 of each eight channels, [PART, 64] each -> [PART, 256]."""
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [32, 256])


@gluon.jit
def _ordered(x, OUT: gl.constexpr):
    """Rows [64, 512] in `_ROWS`: channels as they come -> in the order of the keys; OUT: the other way."""
    eight = gl.reshape(x, [64, 64, 4, 2] if OUT else [64, 64, 2, 4])
    return gl.convert_layout(gl.reshape(gl.permute(eight, (0, 1, 3, 2)), [64, 512]), _ROWS, assert_trivial=True)


@gluon.jit
def _find(records_ptr, left, PLACE: gl.constexpr):
    """Ids PLACE .. PLACE + PART - 1 of a list; -1 from `left` on."""
    at = PLACE + gl.arange(0, 32, layout=gl.SliceLayout(1, _CODES))
    return gl.load(records_ptr + at, mask=at < left, other=-1)


@gluon.jit
def _ask(words_ptr, record, offset, stride, ENTRY_BITS: gl.constexpr):
    """Codes [PART, 64] and scales, two in 16 bits [PART, 16], of records; zeros where the id is -1."""
    live = record >= 0
    start = (record >> ENTRY_BITS).to(gl.int64) * stride + ((record & ((1 << ENTRY_BITS) - 1)) * 72 + offset)
    start = gl.multiple_of(start, 4)
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, _CODES))
    codes = gl.load(words_ptr + (start[:, None] + word[None, :]), mask=live[:, None], other=0)
    pairs: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, _SCALES))
    start = gl.convert_layout(start, gl.SliceLayout(1, pairs), assert_trivial=True) * 2 + 128
    live = gl.convert_layout(live, gl.SliceLayout(1, pairs), assert_trivial=True)
    pair = gl.arange(0, 16, layout=gl.SliceLayout(0, pairs))
    halves_ptr = words_ptr.cast(gl.pointer_type(gl.int16), bitcast=True)
    scales = gl.load(halves_ptr + (start[:, None] + pair[None, :]), mask=live[:, None], other=0)
    return codes, scales


@gluon.jit
def _unpack(codes, scales):
    """What `_ask` gave -> pairs of bf16 [PART, 256] in `_UNPACKED`."""
    low, high = gl.inline_asm_elementwise(
        _SPREAD_E4M3, "=&r,=&r,h", [scales], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    spread = gl.convert_layout(gl.join(low, high), gl.SliceLayout(3, _SCALES), assert_trivial=True)
    spread = gl.expand_dims(spread, 3).broadcast_to([32, 16, 2, 2])
    spread = gl.convert_layout(gl.reshape(spread, [32, 64]), _CODES, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        E2M1_PAIRS, "=&r,=&r,=&r,=&r,r,r", [codes, spread], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )
    return gl.convert_layout(_four(a, b, c, d), _UNPACKED, assert_trivial=True)


@gluon.jit
def _ask_own(kw_ptr, place, stored, count, base):
    """Pairs of bf16 [PART, 256] of the window's rows from `place` on, as far as they are in kw; zeros elsewhere."""
    at = place + gl.arange(0, 32, layout=gl.SliceLayout(1, _PAIRS))
    pair = gl.arange(0, 256, layout=gl.SliceLayout(0, _PAIRS))
    start = gl.multiple_of((base + at).to(gl.int64) * 256, 256)
    own = (at >= stored) & (at < count)
    values = gl.load(kw_ptr + (start[:, None] + pair[None, :]), mask=own[:, None], other=0)
    low, high = gl.split(gl.permute(gl.reshape(values, [32, 64, 2, 2]), (0, 1, 3, 2)))
    a, b = gl.inline_asm_elementwise(_PAIR_UP, "=&r,=&r,r,r", [low, high], dtype=(gl.int32,) * 2, is_pure=True, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(a, b), [32, 256]), _PAIRS, assert_trivial=True)


@gluon.jit
def _ask_stored(words_ptr, bytes_ptr, place, stored, oldest, slot_at, ring_rows):
    """Codes [PART, 128] and exponents [PART, 16] of the window's rows from `place` on; zeros from `stored` on."""
    at = place + gl.arange(0, 32, layout=gl.SliceLayout(1, _OCTETS))
    old = at < stored
    start = gl.multiple_of(slot_at + ((oldest + at) % ring_rows) * 132, 4)
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, _OCTETS))
    codes = gl.load(words_ptr + (start[:, None] + word[None, :]), mask=old[:, None], other=0)
    groups: gl.constexpr = gl.SliceLayout(2, _EXPONENTS)
    start = gl.convert_layout(start, gl.SliceLayout(1, groups), assert_trivial=True) * 4 + 512
    old = gl.convert_layout(old, gl.SliceLayout(1, groups), assert_trivial=True)
    group = gl.arange(0, 16, layout=gl.SliceLayout(0, groups))
    return codes, gl.load(bytes_ptr + (start[:, None] + group[None, :]), mask=old[:, None], other=0)


@gluon.jit
def _unpack_stored(codes, exponents):
    """What `_ask_stored` gave -> pairs of bf16 [PART, 256]."""
    byte = exponents.to(gl.int32)
    scale = gl.where(byte == 0, 0x0040, gl.where(byte == 255, 0x7FC0, byte << 7)) * 0x10001
    scale = gl.expand_dims(scale, 2).broadcast_to([32, 16, 4])
    scale = gl.convert_layout(gl.reshape(scale, [32, 64]), _WORD_PAIRS, assert_trivial=True)
    low, high = gl.split(gl.reshape(codes, [32, 64, 2]))
    low = gl.convert_layout(low, _WORD_PAIRS, assert_trivial=True)
    high = gl.convert_layout(high, _WORD_PAIRS, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        _UNPACK_E4M3, "=&r,=&r,=&r,=&r,r,r,r", [low, high, scale], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )
    return gl.convert_layout(_four(a, b, c, d), _PAIRS, assert_trivial=True)


@gluon.jit
def _fill_window(key_pairs, kw_ptr, ring_words_ptr, ring_bytes_ptr, stored, count, base, oldest, slot_at, ring_rows):
    """The window's rows into shared memory, oldest first, zeros from `count` on."""
    v0 = _ask_own(kw_ptr, 0, stored, count, base)
    v1 = _ask_own(kw_ptr, 32, stored, count, base)
    v2 = _ask_own(kw_ptr, 64, stored, count, base)
    v3 = _ask_own(kw_ptr, 96, stored, count, base)
    if stored > 0:
        c0, e0 = _ask_stored(ring_words_ptr, ring_bytes_ptr, 0, stored, oldest, slot_at, ring_rows)
        c1, e1 = _ask_stored(ring_words_ptr, ring_bytes_ptr, 32, stored, oldest, slot_at, ring_rows)
        c2, e2 = _ask_stored(ring_words_ptr, ring_bytes_ptr, 64, stored, oldest, slot_at, ring_rows)
        c3, e3 = _ask_stored(ring_words_ptr, ring_bytes_ptr, 96, stored, oldest, slot_at, ring_rows)
        v0 |= _unpack_stored(c0, e0)
        v1 |= _unpack_stored(c1, e1)
        v2 |= _unpack_stored(c2, e2)
        v3 |= _unpack_stored(c3, e3)
    key_pairs.slice(0, 32).store(v0)
    key_pairs.slice(32, 32).store(v1)
    key_pairs.slice(64, 32).store(v2)
    key_pairs.slice(96, 32).store(v3)


@gluon.jit
def _multiply(probs, rests, keys, acc, PLACE: gl.constexpr, ROUND: gl.constexpr):
    """Begin acc + probabilities @ PART keys."""
    acc = warpgroup_mma(probs.slice(PLACE, 32, dim=1), keys.slice(PLACE, 32), acc, is_async=True)
    if not ROUND:
        acc = warpgroup_mma(rests.slice(PLACE, 32, dim=1), keys.slice(PLACE, 32), acc, is_async=True)
    return acc


@gluon.jit(do_not_specialize=["spans", "span_tiles"])
def attend(
    q_ptr,  # [T, H, 512] bf16
    kw_ptr,  # [T, 256] pairs of bf16
    ring_words_ptr,
    ring_bytes_ptr,
    pool_ptr,  # words
    slots_ptr,
    positions_ptr,
    firsts_ptr,
    starts_ptr,
    lows_ptr,
    records_ptr,
    sink_ptr,
    out_ptr,
    part_ptr,  # [T, spans, H, 512] f32, peaks and sums [T, spans, H] f32
    peaks_ptr,
    sums_ptr,
    heads,
    ring_rows,
    ring_stride,  # words
    pool_stride,
    pool_offset,
    listed,
    scale,
    spans,
    span_tiles,
    WINDOW: gl.constexpr,
    LOWS: gl.constexpr,
    ENTRY_BITS: gl.constexpr,
    WHOLE: gl.constexpr,  # one span
    ROUND: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = gl.program_id(0)
    begin = t * 0
    if not WHOLE:
        begin = t % spans * span_tiles
        t = t // spans
    head = gl.program_id(1) * 64

    row = t.to(gl.int64) * heads + head
    q_at = gl.arange(0, 64, layout=gl.SliceLayout(1, _ROWS))[:, None] * 512
    q_at += gl.arange(0, 512, layout=gl.SliceLayout(0, _ROWS))[None, :]
    q = _ordered(gl.load(q_ptr + row * 512 + q_at), False)

    # where the window's rows are, and how many records there are
    position = gl.load(positions_ptr + t).to(gl.int32)
    first = gl.load(firsts_ptr + t).to(gl.int32)
    base = gl.load(starts_ptr + t).to(gl.int32)
    slot_at = gl.load(slots_ptr + t) * ring_stride
    oldest = gl.maximum(position - (WINDOW - 1), gl.load(lows_ptr + t).to(gl.int32) if LOWS else 0)
    count = position - oldest + 1
    stored = gl.minimum(gl.maximum(first - oldest, 0), count)
    base += oldest - first
    line: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    records_ptr += t.to(gl.int64) * listed
    found = gl.full([1024], 0, gl.int32, layout=line)
    for place in range(0, listed, 1024):
        at = place + gl.arange(0, 1024, layout=line)
        found += (gl.load(records_ptr + at, mask=at < listed, other=-1) >= 0).to(gl.int32)
    end = gl.sum(found, axis=0)

    q_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 512], _SHARED, q)
    keys = gl.allocate_shared_memory(gl.bfloat16, [128, 512], _SHARED)
    key_pairs = keys._reinterpret(gl.int32, [128, 256], _SHARED_PAIRS)
    probs = gl.allocate_shared_memory(gl.bfloat16, [64, 128], _SHARED)
    rests = probs if ROUND else gl.allocate_shared_memory(gl.bfloat16, [64, 128], _SHARED)
    last = gl.minimum(begin + span_tiles, 1 + gl.cdiv(end, 128))
    if WHOLE:
        _fill_window(key_pairs, kw_ptr, ring_words_ptr, ring_bytes_ptr, stored, count, base, oldest, slot_at, ring_rows)
    else:
        if begin == 0:
            _fill_window(
                key_pairs, kw_ptr, ring_words_ptr, ring_bytes_ptr, stored, count, base, oldest, slot_at, ring_rows
            )
        elif begin < last:
            here, left = records_ptr + (begin * 128 - 128), end - (begin * 128 - 128)
            c0, s0 = _ask(pool_ptr, _find(here, left, 0), pool_offset, pool_stride, ENTRY_BITS)
            c1, s1 = _ask(pool_ptr, _find(here, left, 32), pool_offset, pool_stride, ENTRY_BITS)
            c2, s2 = _ask(pool_ptr, _find(here, left, 64), pool_offset, pool_stride, ENTRY_BITS)
            c3, s3 = _ask(pool_ptr, _find(here, left, 96), pool_offset, pool_stride, ENTRY_BITS)
            key_pairs.slice(0, 32).store(_unpack(c0, s0))
            key_pairs.slice(32, 32).store(_unpack(c1, s1))
            key_pairs.slice(64, 32).store(_unpack(c2, s2))
            key_pairs.slice(96, 32).store(_unpack(c3, s3))
    fence_async_shared()
    gl.thread_barrier()

    peak = gl.full([64], _PEAK_START, gl.float32, layout=gl.SliceLayout(1, _SCORES))
    sums = gl.full([64, 2, 4], 0.0, gl.float32, layout=_SUMS)
    acc = gl.full([64, 512], 0.0, gl.float32, layout=_VALUES)
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, _SCORES))
    for tile in range(begin, last):
        live = gl.where(tile == 0, count, end - (tile * 128 - 128))
        # the window's keys are their value: their probabilities are scaled down instead
        shift = gl.where(tile == 0, 8.0, 0.0)
        larger = gl.where(tile == 0, 256.0, 1.0)
        log_scale = scale * _LOG2E * (256.0 / larger)
        scores = gl.full([64, 128], 0.0, gl.float32, layout=_SCORES)
        scores = warpgroup_mma(q_shared, keys.permute((1, 0)), scores, use_acc=False, is_async=True)
        # the next keys' bytes travel while the scores are computed
        more = tile + 1 < last
        here, left = records_ptr + tile * 128, gl.where(more, end - tile * 128, 0)
        r0, r1 = _find(here, left, 0), _find(here, left, 32)
        r2, r3 = _find(here, left, 64), _find(here, left, 96)
        c0, s0 = _ask(pool_ptr, r0, pool_offset, pool_stride, ENTRY_BITS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where((column < live)[None, :], scores, -float("inf"))
        higher = gl.maximum(peak, gl.max(scores, axis=1) * log_scale)
        shrink = gl.exp2(peak - higher)
        peak = higher
        p = gl.exp2(scores * log_scale - (peak + shift)[:, None])
        probs.store(p.to(gl.bfloat16))
        if not ROUND:
            rests.store((p - p.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16))
        fence_async_shared()
        sums = sums * gl.expand_dims(
            gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(2, _SUMS))), 1), 2
        )
        mine = gl.sum(gl.sum(gl.reshape(p, [64, 2, 8, 4, 2]), axis=4), axis=2)
        sums += gl.convert_layout(mine, _SUMS, assert_trivial=True) * larger
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, _VALUES))[:, None]
        gl.thread_barrier()
        acc = _multiply(probs, rests, keys, acc, 0, ROUND)
        acc = _multiply(probs, rests, keys, acc, 32, ROUND)
        acc = _multiply(probs, rests, keys, acc, 64, ROUND)
        acc = _multiply(probs, rests, keys, acc, 96, ROUND)
        c1, s1 = _ask(pool_ptr, r1, pool_offset, pool_stride, ENTRY_BITS)
        c2, s2 = _ask(pool_ptr, r2, pool_offset, pool_stride, ENTRY_BITS)
        part = gl.full([32, 256], 0, gl.int32, layout=_UNPACKED)
        if more:
            part = _unpack(c0, s0)
        EACH: gl.constexpr = 1 if ROUND else 2
        acc = warpgroup_mma_wait(3 * EACH, deps=[acc])
        gl.thread_barrier()
        key_pairs.slice(0, 32).store(part)
        c3, s3 = _ask(pool_ptr, r3, pool_offset, pool_stride, ENTRY_BITS)
        if more:
            part = _unpack(c1, s1)
        acc = warpgroup_mma_wait(2 * EACH, deps=[acc])
        gl.thread_barrier()
        key_pairs.slice(32, 32).store(part)
        if more:
            part = _unpack(c2, s2)
        acc = warpgroup_mma_wait(EACH, deps=[acc])
        gl.thread_barrier()
        key_pairs.slice(64, 32).store(part)
        if more:
            part = _unpack(c3, s3)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        key_pairs.slice(96, 32).store(part)
        fence_async_shared()
        gl.thread_barrier()

    lines: gl.constexpr = gl.SliceLayout(1, _VALUES)
    total = gl.convert_layout(gl.sum(gl.sum(sums, axis=2), axis=1), lines)
    peak = gl.convert_layout(peak, lines)
    line = gl.arange(0, 64, layout=lines)
    if WHOLE:
        sink = gl.load(sink_ptr + head + line).to(gl.float32)
        total += gl.exp2(gl.minimum(sink * _LOG2E - peak, 126.0))
        q_shared.store((acc * (256.0 / total)[:, None]).to(gl.bfloat16))
        gl.store(out_ptr + row * 512 + q_at, _ordered(q_shared.load(_ROWS), True))
    else:
        part = gl.program_id(0).to(gl.int64) * heads + head
        to = line[:, None] * 512 + gl.arange(0, 512, layout=gl.SliceLayout(0, _VALUES))[None, :]
        gl.store(part_ptr + part * 512 + to, acc * 256.0)
        gl.store(peaks_ptr + part + line, peak)
        gl.store(sums_ptr + part + line, total)
