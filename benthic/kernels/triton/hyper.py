"""Triton versions of `kernels/hyper.py`, and the whole entry of a sublayer; contracts are there and in `fused.py`.

The entry of a sublayer (`hyper_read`) is two kernels, so that the streams are read once and written once:

    _enter   a program has BLOCK channels of every stream and goes down the rows, ROWS at a time: writes the last result
             into the streams, and from what it wrote takes the channels' share of the products with `fn`, of the two
             sums of squares and of the weighted sum that the sublayer reads.
    _finish  one warp for a row's weights (adds the shares, sigmoids, Sinkhorn), others for the norm of what is read.

The products are float32's. The streams are bf16, and `fn` is the exact sum of three bf16 matrices, so three bf16
products with float32 sums lose nothing but the order of the sum. A share covers S * BLOCK terms, and shares are added
in one order: a row has the same bits whatever T is.

Cost of `hyper_read`: memory bound. A row is (2*S + 2) * D elements of floor, 2 * D more for the read that passes from
kernel to kernel, and 4 * ((2+S)*S + 2) bytes a share.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benthic.kernels import hyper as plain
from benthic.kernels.triton import hyper_hopper, tuning
from benthic.kernels.triton.gemm import launch, start
from benthic.kernels.triton.quant import FLOATS, INTERPRETED, bound, narrow, widen
from benthic.kernels.triton.runtime import available as available
from benthic.kernels.triton.runtime import cdiv, power_of_two
from benthic.kernels.triton.swiglu import exponential

BLOCK = 64  # channels of each stream in a share
ROWS, WARPS = 16, 4  # rows a program takes at a time, and how many warps share them
# of `_enter`, or where `ring` of hyper_hopper.py; more rows than for so many programs: each goes farther
DEFAULTS = {"programs": 480, "num_stages": 1, "ring": False, "ring_programs": 264, "ring_stages": 3}
# the plain ones and the ring differ in the order of sums
CANDIDATES = {
    "hyper_read": {
        "plain": DEFAULTS,
        "plain, few programs": DEFAULTS | {"programs": 240},
        "plain, many programs": DEFAULTS | {"programs": 960},
        "ring": DEFAULTS | {"ring": True},
        "ring, deep": DEFAULTS | {"ring": True, "ring_stages": 5},
        "ring, shallow": DEFAULTS | {"ring": True, "ring_stages": 2},
        "ring, few programs": DEFAULTS | {"ring": True, "ring_programs": 132, "ring_stages": 6},
        "ring, many programs": DEFAULTS | {"ring": True, "ring_programs": 396},
    }
}
NORM_ROWS, NORM_BLOCK = 2, 1024  # rows and channels of a norm's warp
SHARES = 16  # added at a time


@triton.jit
def _parts(x):
    """f32 -> three bf16, high to low, whose sum it is exactly."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = x - high
    middle = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def _once(x, dtype: tl.constexpr):
    """`narrow`, in a form that the compiler may not repeat: else each warp works the streams out for its products."""
    if INTERPRETED or dtype != tl.bfloat16:
        y = narrow(x, dtype)
    else:
        pair: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        y = tl.inline_asm_elementwise(pair, "=r,r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return y


@triton.jit(do_not_specialize=["rows"])
def _enter(
    s_ptr,
    out_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    settled_ptr,
    read_ptr,
    products_ptr,
    squares_ptr,
    rows,
    width,
    s_row,
    s_stream,
    out_row,
    S: tl.constexpr,
    MIXES: tl.constexpr,
    MIX_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    PENDING: tl.constexpr,
    READ: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and not AHEAD:
        start(PDL)
    elif PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    kind: tl.constexpr = s_ptr.dtype.element_ty
    split: tl.constexpr = kind == tl.bfloat16 and not INTERPRETED
    col = chunk * BLOCK + tl.arange(0, BLOCK)
    mix = tl.arange(0, MIX_BLOCK)
    weights = ()
    for k in tl.static_range(S):
        inside = (mix < MIXES)[:, None] & (col < width)[None, :] if MASKED else (mix < MIXES)[:, None]
        part = tl.load(fn_ptr + mix[:, None] * (S * width) + k * width + col[None, :], mask=inside, other=0.0)
        weights = weights + (_parts(part) if split else (part, part, part),)  # noqa: RUF005

    if PDL and AHEAD:  # `fn` does not come from the kernel before, and was fetched while that one ended
        tl.extra.cuda.gdc_wait()
    for tile in range(bound(tl.program_id(1)), bound(tl.cdiv(rows, ROWS)), bound(tl.num_programs(1))):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        live = row < rows
        here = live[:, None] & (col < width)[None, :] if MASKED else live[:, None]
        streams, reads, writes = (), (), ()  # all loads first
        for j in tl.static_range(S):
            at = row[:, None] * s_row + j * s_stream + col[None, :]
            streams = streams + (tl.load(s_ptr + at, mask=here, other=0.0),)  # noqa: RUF005
        if PENDING:
            out = tl.load(out_ptr + row[:, None] * out_row + col[None, :], mask=here, other=0.0)
            for k in tl.static_range(S):
                post = tl.load(post_ptr + row[:, None] * S + k, mask=live[:, None], other=0.0)
                writes = writes + (post,)  # noqa: RUF005
            for jk in tl.static_range(S * S):
                comb = tl.load(comb_ptr + row[:, None] * (S * S) + jk, mask=live[:, None], other=0.0)
                writes = writes + (comb,)  # noqa: RUF005
        if READ:
            for k in tl.static_range(S):
                pre = tl.load(pre_ptr + row[:, None] * S + k, mask=live[:, None], other=0.0)
                reads = reads + (pre,)  # noqa: RUF005

        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        read = tl.zeros((ROWS, BLOCK), tl.float32)
        entering = ()
        for k in tl.static_range(S):
            stream = streams[k]
            if PENDING:
                mixed = writes[k] * widen(out)
                for j in tl.static_range(S):
                    mixed += writes[S + j * S + k] * widen(streams[j])
                stream = _once(mixed, kind)
                tl.store(settled_ptr + row[:, None] * (S * width) + k * width + col[None, :], stream, mask=here)
            entering = entering + (stream,)  # noqa: RUF005
            value = widen(stream)
            squares += value * value
            if READ:
                read += reads[k] * value

        products = tl.zeros((ROWS, MIX_BLOCK), tl.float32)
        details = tl.zeros((ROWS, MIX_BLOCK), tl.float32)
        for k in tl.static_range(S):
            if split:
                products = tl.dot(entering[k], tl.trans(weights[k][0]), products)
                details = tl.dot(entering[k], tl.trans(weights[k][1]), details)
                details = tl.dot(entering[k], tl.trans(weights[k][2]), details)
            else:
                products = tl.dot(widen(entering[k]), tl.trans(weights[k][0]), products, input_precision="ieee")
        share = row * chunks + chunk
        tl.store(
            products_ptr + share[:, None] * MIXES + mix[None, :],
            products + details,
            (mix < MIXES)[None, :] & live[:, None],
        )
        tl.store(squares_ptr + 2 * share, tl.sum(squares, axis=1), mask=live)
        if READ:
            rounded = narrow(read, kind)
            tl.store(read_ptr + row[:, None] * width + col[None, :], rounded, mask=here)
            tl.store(squares_ptr + 2 * share + 1, tl.sum(widen(rounded) * widen(rounded), axis=1), mask=live)


@triton.jit
def _inverse(x):
    """1/x for normal x, within one unit in the last place."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + exponential(-x))


@triton.jit
def _sum_of_shares(
    ptr, item, inside, CHUNKS: tl.constexpr, EACH: tl.constexpr, STEP: tl.constexpr, SHARES: tl.constexpr
):
    """ptr[c * STEP + item] summed over the shares c of a row, those EACH of a chunk first; item [N]."""
    total = tl.zeros((SHARES, item.shape[0]), tl.float32)
    for first in tl.static_range(0, CHUNKS, SHARES):
        chunk = (first + tl.arange(0, SHARES))[:, None]
        live = (chunk < CHUNKS) & inside[None, :]
        part = tl.load(ptr + chunk * (EACH * STEP) + item[None, :], mask=live, other=0.0)
        for share in tl.static_range(1, EACH):
            part += tl.load(ptr + (chunk * EACH + share) * STEP + item[None, :], mask=live, other=0.0)
        total += part
    return tl.sum(total, axis=0)


@triton.jit
def _scaled(c, eps, GROUP: tl.constexpr, STEP: tl.constexpr, S: tl.constexpr):
    """c, a tuple of S*S, with every row (GROUP S, STEP 1) or column (1, S) divided by its sum and eps."""
    inverse = ()
    for i in tl.static_range(S):
        if S == 4:
            total = (c[i * GROUP] + c[i * GROUP + STEP]) + (c[i * GROUP + 2 * STEP] + c[i * GROUP + 3 * STEP])
        elif S == 2:
            total = c[i * GROUP] + c[i * GROUP + STEP]
        else:
            total = c[i * GROUP]
        inverse = inverse + (_inverse(total + eps),)  # noqa: RUF005
    scaled = ()
    for ij in tl.static_range(S * S):
        scaled = scaled + (c[ij] * inverse[ij // S if STEP == 1 else ij % S],)  # noqa: RUF005
    return scaled


@triton.jit
def _row_weights(
    row,
    products_ptr,
    squares_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    width,
    norm_eps,
    hc_eps,
    iters,
    S: tl.constexpr,
    CHUNKS: tl.constexpr,
    EACH: tl.constexpr,
    SHARES: tl.constexpr,
):
    """The exchange weights are scalars, that every thread has all of: the iterations wait for no other thread."""
    mixes: tl.constexpr = (2 + S) * S
    mix = tl.arange(0, triton.next_power_of_2(mixes))
    inside = mix < mixes
    only = tl.arange(0, 1)
    total = _sum_of_shares(squares_ptr + row * (2 * CHUNKS * EACH), only, only == 0, CHUNKS, EACH, 2, SHARES)
    z = _sum_of_shares(products_ptr + row * (mixes * CHUNKS * EACH), mix, inside, CHUNKS, EACH, mixes, SHARES)
    kind = tl.where(mix < S, 0, tl.where(mix < 2 * S, 1, 2))
    z = z * tl.rsqrt(tl.sum(total) / (S * width) + norm_eps)
    z = z * tl.load(scale_ptr + kind) + tl.load(base_ptr + mix, mask=inside, other=0.0)
    gate = _sigmoid(z)
    tl.store(pre_ptr + row * S + mix, gate + hc_eps, mask=mix < S)
    tl.store(post_ptr + row * S + mix - S, 2 * gate, mask=(mix >= S) & (mix < 2 * S))

    c = ()
    for i in tl.static_range(S):
        logits = ()
        for j in tl.static_range(S):
            logits = logits + (tl.sum(tl.where(mix == 2 * S + i * S + j, z, 0.0)),)  # noqa: RUF005
        most = logits[0]
        for j in tl.static_range(1, S):
            most = tl.maximum(most, logits[j])
        for j in tl.static_range(S):
            c = c + (exponential(logits[j] - most),)  # noqa: RUF005
    c = _scaled(c, 0.0, S, 1, S)
    shifted = ()
    for ij in tl.static_range(S * S):
        shifted = shifted + (c[ij] + hc_eps,)  # noqa: RUF005
    c = _scaled(shifted, hc_eps, 1, S, S)
    for _ in range(bound(iters) - 1):
        c = _scaled(_scaled(c, hc_eps, S, 1, S), hc_eps, 1, S, S)
    found = tl.zeros((S * S,), tl.float32)
    for ij in tl.static_range(S * S):
        found = tl.where(tl.arange(0, S * S) == ij, c[ij], found)
    tl.store(comb_ptr + row * (S * S) + tl.arange(0, S * S), found)


@triton.jit(do_not_specialize=["rows"])
def _finish(
    products_ptr,
    squares_ptr,
    scale_ptr,
    base_ptr,
    weight_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    read_ptr,
    rows,
    width,
    norm_eps,
    hc_eps,
    iters,
    S: tl.constexpr,
    CHUNKS: tl.constexpr,
    EACH: tl.constexpr,
    SHARES: tl.constexpr,
    PIECES: tl.constexpr,
    NORM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    program = tl.program_id(0).to(tl.int64)
    if program < rows:  # first, since they take longest
        _row_weights(
            program,
            products_ptr,
            squares_ptr,
            scale_ptr,
            base_ptr,
            pre_ptr,
            post_ptr,
            comb_ptr,
            width,
            norm_eps,
            hc_eps,
            iters,
            S,
            CHUNKS,
            EACH,
            SHARES,
        )
    elif PIECES > 0:  # the norm of a piece of what some rows read
        program -= rows
        row = program // PIECES * NORM_ROWS + tl.arange(0, NORM_ROWS)
        col = (program % PIECES).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        live = (row < rows)[:, None] & (col < width)[None, :]
        at = row[:, None] * width + col[None, :]
        read = tl.load(read_ptr + at, mask=live, other=0.0)
        weight_at = col[None, :]
        weight = widen(tl.load(weight_ptr + weight_at, mask=(col < width)[None, :], other=0.0))
        total = _sum_of_shares(squares_ptr + 1, row * (2 * CHUNKS * EACH), row < rows, CHUNKS, EACH, 2, SHARES)
        statistic = tl.rsqrt(total / width + norm_eps)
        y = widen(read) * statistic[:, None] * weight
        tl.store(read_ptr + at, narrow(y, read_ptr.dtype.element_ty), mask=live)


@triton.jit
def _collapse(s_ptr, pre_ptr, y_ptr, width, s_row, s_stream, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(S):
        stream = tl.load(s_ptr + row * s_row + j * s_stream + col, mask=col < width, other=0.0)
        y += tl.load(pre_ptr + row * S + j) * widen(stream)
    tl.store(y_ptr + row * width + col, narrow(y, y_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def _expand(
    out_ptr, s_ptr, post_ptr, comb_ptr, y_ptr, width, out_row, s_row, s_stream, S: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = widen(tl.load(out_ptr + row * out_row + col, mask=col < width, other=0.0))
    streams = ()
    for j in tl.static_range(S):
        stream = tl.load(s_ptr + row * s_row + j * s_stream + col, mask=col < width, other=0.0)
        streams = streams + (stream,)  # noqa: RUF005
    for k in tl.static_range(S):
        y = tl.load(post_ptr + row * S + k) * out
        for j in tl.static_range(S):
            y += tl.load(comb_ptr + row * (S * S) + j * S + k) * widen(streams[j])
        tl.store(y_ptr + (row * S + k) * width + col, narrow(y, y_ptr.dtype.element_ty), mask=col < width)


def _serves(s: Tensor) -> bool:
    """The kernels take 1, 2 or 4 streams; the shares of `fn` for 8 would not fit into shared memory."""
    return s.shape[1] in (1, 2, 4) and s.dtype in FLOATS


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _f32(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _is_hopper(device: torch.device) -> bool:
    """Off a GPU kernels are only compiled, for Hopper."""
    return not INTERPRETED.value and (device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9)


@tuning.remembered
def _config(rows: int, streams: int, width: int) -> tuning.Config:
    return tuning.config("hyper_read", f"{streams}x{width}", tuning.bucket(rows), DEFAULTS, decides_bits=True)


def _shares(
    pending: plain.Streams, fn: Tensor, settled: Tensor | None, read: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """Runs `_enter`: products [T, E*C, M] and squares [T, E*C, 2] f32 of C chunks a row, E shares each, and C."""
    s, pre, out, post, comb = pending
    rows, streams, width = s.shape
    mixes, chunks = (2 + streams) * streams, cdiv(width, BLOCK)
    config = _config(rows, streams, width)
    ring = config["ring"] and _is_hopper(s.device) and hyper_hopper.serves(s, out, pre, post, comb)
    each = hyper_hopper.shares_each(rows, chunks, config["ring_programs"]) if ring else 1
    products = torch.empty((rows, chunks * each, mixes), dtype=torch.float32, device=s.device)
    squares = torch.empty((rows, chunks * each, 2), dtype=torch.float32, device=s.device)
    if rows == 0:
        return products, squares, chunks
    out, wide = _adjacent(out) if out is not None else None, _f32(fn)
    if ring:
        weights = (_f32(x) if x is not None else None for x in (pre if read is not None else None, post, comb))
        most, stages = config["ring_programs"], config["ring_stages"]
        hyper_hopper.enter(s, out, *weights, wide, settled, read, products, squares, most, stages, launch())
        return products, squares, chunks
    down = min(cdiv(rows, ROWS), max(config["programs"] // chunks, 1))
    _enter[(chunks, down)](
        s,
        out,
        _f32(pre) if read is not None else None,
        _f32(post) if post is not None else None,
        _f32(comb) if comb is not None else None,
        wide,
        settled,
        read,
        products,
        squares,
        rows,
        width,
        s.stride(0),
        s.stride(1),
        out.stride(0) if out is not None else 0,
        S=streams,
        MIXES=mixes,
        MIX_BLOCK=max(power_of_two(mixes), 16),
        ROWS=ROWS,
        BLOCK=BLOCK,
        MASKED=width % BLOCK != 0,
        PENDING=out is not None,
        READ=read is not None,
        AHEAD=wide is fn,
        num_warps=WARPS,
        num_stages=config["num_stages"],
        **launch(),
    )
    return products, squares, chunks


def _weights(
    s: Tensor,
    shares: tuple[Tensor, Tensor, int],
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    read: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `_finish`: pre, post, comb; and the norm of `read`, in place."""
    rows, streams, width = s.shape
    pre, post = (torch.empty((rows, streams), dtype=torch.float32, device=s.device) for _ in range(2))
    comb = torch.empty((rows, streams, streams), dtype=torch.float32, device=s.device)
    products, squares, chunks = shares
    block = min(power_of_two(width), NORM_BLOCK)
    pieces = cdiv(width, block) if read is not None else 0
    if rows == 0:
        return pre, post, comb
    _finish[(rows + cdiv(rows, NORM_ROWS) * pieces,)](
        products,
        squares,
        scale,
        base,
        weight,
        pre,
        post,
        comb,
        read,
        rows,
        width,
        norm_eps,
        hc_eps,
        iters,
        S=streams,
        CHUNKS=chunks,
        EACH=products.shape[1] // chunks,
        SHARES=SHARES,
        PIECES=pieces,
        NORM_ROWS=NORM_ROWS,
        BLOCK=block,
        num_warps=1,
        **launch(),
    )
    return pre, post, comb


def hyper_read(
    pending: plain.Streams,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, plain.Streams] | None:
    """As `fused.hyper_read`; None for a number of streams or a dtype that the kernels lack."""
    s = _adjacent(pending.s)
    if not _serves(s):
        return None
    rows, _, width = s.shape
    read = torch.empty((rows, width), dtype=s.dtype, device=s.device)
    settled = torch.empty(s.shape, dtype=s.dtype, device=s.device) if pending.out is not None else None
    shares = _shares(pending._replace(s=s), fn, settled, read)
    pre, post, comb = _weights(s, shares, _f32(scale), _f32(base), weight.contiguous(), read, norm_eps, hc_eps, iters)
    return read, plain.Streams(s if settled is None else settled, pre, None, post, comb)


def hyper_mixes(
    s: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not _serves(s):
        return plain.hyper_mixes_reference(s, fn, scale, base, norm_eps, hc_eps, iters)
    s = _adjacent(s)
    shares = _shares(plain.Streams(s, s), fn, None, None)
    return _weights(s, shares, _f32(scale), _f32(base), None, None, norm_eps, hc_eps, iters)


def hyper_collapse(s: Tensor, pre: Tensor) -> Tensor:
    if not _serves(s):
        return plain.hyper_collapse_reference(s, pre)
    s = _adjacent(s)
    rows, streams, width = s.shape
    y = torch.empty((rows, width), dtype=s.dtype, device=s.device)
    if y.numel():
        block = min(power_of_two(width), 1024)
        _collapse[(rows, cdiv(width, block))](
            s, _f32(pre), y, width, s.stride(0), s.stride(1), S=streams, BLOCK=block, num_warps=max(block // 256, 1)
        )
    return y


def hyper_expand(out: Tensor, s: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    if not _serves(s) or out.dtype not in FLOATS:
        return plain.hyper_expand_reference(out, s, post, comb)
    out, s = _adjacent(out), _adjacent(s)
    rows, streams, width = s.shape
    y = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    if y.numel():
        block = min(power_of_two(width), 1024)
        _expand[(rows, cdiv(width, block))](
            out,
            s,
            _f32(post),
            _f32(comb),
            y,
            width,
            out.stride(0),
            s.stride(0),
            s.stride(1),
            S=streams,
            BLOCK=block,
            num_warps=max(block // 256, 1),
        )
    return y
