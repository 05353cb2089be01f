"""Hyper-connections against golden vectors, float64, and the laws of the Sinkhorn iteration."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benthic.errors import ShapeError
from benthic.kernels import fused
from benthic.kernels.hyper import Streams, hyper_collapse, hyper_expand, hyper_mixes, settle, sinkhorn
from benthic.kernels.norm import rms_norm
from benthic.testing.cases import ROWS
from benthic.testing.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16)
TRITON = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on a CPU under Triton's interpreter


@pytest.fixture
def few(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """At most 3 rows where Triton is interpreted: a row takes tens of milliseconds there."""
    interpreted = request.node.callspec.params["device"] == "interpreter"
    return lambda rows: min(rows, 3) if interpreted else rows


def exact_mixes(
    s: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    n = s.shape[1]
    v = s.double().flatten(1)
    z = (v @ fn.double().t()) / (v.square().mean(1, keepdim=True) + norm_eps).sqrt()
    factor = torch.cat([scale[0].expand(n), scale[1].expand(n), scale[2].expand(n * n)]).double()
    z = z * factor + base.double()
    c = z[:, 2 * n :].reshape(-1, n, n).softmax(2) + hc_eps
    for step in range(2 * iters - 1):
        c = c / (c.sum(1 + step % 2, keepdim=True) + hc_eps)
    return torch.sigmoid(z[:, :n]) + hc_eps, 2 * torch.sigmoid(z[:, n : 2 * n]), c


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(golden: Callable[[str], dict[str, Any]], device: torch.device, dtype: torch.dtype) -> None:
    data = golden("hyper")
    fn, scale, base = (torch.tensor(data[name], device=device) for name in ("fn", "scale", "base"))
    for case in data["cases"]:
        s = torch.tensor([case["s"]], dtype=dtype, device=device)
        pre, post, comb = hyper_mixes(s, fn, scale, base, data["norm_eps"], data["hc_eps"], case["iters"])
        for name, got in (("pre", pre), ("post", post), ("comb", comb)):
            assert got.dtype == torch.float32
            assert_close("hyper_mixes", got, torch.tensor([case[name]], dtype=torch.float64))
        size = float(s.abs().max()) + 4
        want = torch.tensor([case["collapsed"]], dtype=torch.float64)
        assert_close("hyper_collapse", hyper_collapse(s, pre), want, 10 * size)  # pre is itself near its golden value
        out = torch.tensor([case["out"]], dtype=dtype, device=device)
        want = torch.tensor([case["expanded"]], dtype=torch.float64)
        assert_close("hyper_expand", hyper_expand(out, s, post, comb), want, 10 * size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e3, 1e-8])
@pytest.mark.parametrize(("streams", "width"), [(4, 64), (4, 256), (2, 33), (1, 16)])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_mixes(
    device: torch.device,
    few: Callable[[int], int],
    rows: int,
    streams: int,
    width: int,
    size: float,
    dtype: torch.dtype,
) -> None:
    rows = few(rows)
    s = (size * torch.randn(rows, streams, width, device=device)).to(dtype)
    mixes = (2 + streams) * streams
    fn = torch.randn(mixes, streams * width, device=device) / (streams * width) ** 0.5
    scale, base = torch.randn(3, device=device), torch.randn(mixes, device=device)
    got = hyper_mixes(s, fn, scale, base, 1e-20, 1e-6, 20)
    for one, want in zip(got, exact_mixes(s, fn, scale, base, 1e-20, 1e-6, 20), strict=True):
        assert_close("hyper_mixes", one, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e3, 1e-8])
@pytest.mark.parametrize(("streams", "width"), [(4, 256), (2, 33), (1, 16)])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_read_and_write(
    device: torch.device,
    few: Callable[[int], int],
    rows: int,
    streams: int,
    width: int,
    size: float,
    dtype: torch.dtype,
) -> None:
    rows = few(rows)
    s = (size * torch.randn(rows, streams, 2 * width, device=device)).to(dtype)[..., width:]
    out = (size * torch.randn(rows, 3, width, device=device)).to(dtype)[:, 1]
    pre, post = torch.rand(2, rows, streams, device=device).unbind(0)
    comb = torch.rand(rows, streams, streams, device=device)
    largest = 6 * size
    y = hyper_collapse(s, pre)
    assert y.dtype == dtype
    assert_close("hyper_collapse", y, torch.einsum("ts,tsd->td", pre.double(), s.double()), largest)
    y = hyper_expand(out, s, post, comb)
    assert y.dtype == dtype
    want = post.double()[..., None] * out.double()[:, None]
    want = want + torch.einsum("tjk,tjd->tkd", comb.double(), s.double())
    assert_close("hyper_expand", y, want, largest)


def test_exchange_sums_over_the_input_stream(device: torch.device) -> None:
    """All of stream 0 goes to stream 1: the transposed reading would move stream 1 to stream 0."""
    s = torch.tensor([[[1.0, 2.0], [30.0, 40.0]]], device=device)
    comb = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]], device=device)
    zero = torch.zeros(1, 2, device=device)
    assert hyper_expand(zero, s, zero, comb).tolist() == [[[0.0, 0.0], [1.0, 2.0]]]


class Entry(NamedTuple):
    """A sublayer's entry: what is pending, and the arguments after it."""

    streams: Streams
    parameters: tuple[Tensor, Tensor, Tensor, Tensor, float, float, int]


def make_entry(device: torch.device, rows: int, streams: int, width: int, dtype: torch.dtype) -> Entry:
    mixes = (2 + streams) * streams
    fn = torch.randn(mixes, streams * width, device=device) / (streams * width) ** 0.5
    scale, base, weight = (torch.randn(n, device=device) for n in (3, mixes, width))
    pre, post = torch.rand(2, rows, streams, device=device).unbind(0)
    s = torch.randn(rows, streams, width, device=device).to(dtype)
    out = torch.randn(rows, 2, width, device=device).to(dtype)[:, 1]
    comb = torch.rand(rows, streams, streams, device=device)
    return Entry(Streams(s, pre, out, post, comb), (fn, scale, base, weight, 1e-20, 1e-6, 20))


def enter(entry: Entry) -> tuple[Tensor, Streams]:
    """At once where a backend does that, else step by step."""
    at_once = fused.hyper_read(entry.streams, *entry.parameters)
    if at_once is not None:
        return at_once
    fn, scale, base, weight, norm_eps, hc_eps, iters = entry.parameters
    s = settle(entry.streams)
    pre, post, comb = hyper_mixes(s, fn, scale, base, norm_eps, hc_eps, iters)
    return rms_norm(hyper_collapse(s, entry.streams.pre), weight, norm_eps), Streams(s, pre, None, post, comb)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize(("streams", "width"), [(4, 64), (2, 33)])
@pytest.mark.parametrize("rows", [r.rows for r in ROWS])
def test_entry_of_a_sublayer(
    device: torch.device,
    few: Callable[[int], int],
    rows: int,
    streams: int,
    width: int,
    pending: bool,
    dtype: torch.dtype,
) -> None:
    entry = make_entry(device, few(rows), streams, width, dtype)
    before = entry.streams if pending else entry.streams._replace(out=None, post=None, comb=None)
    h, after = enter(entry._replace(streams=before))
    assert after.out is None
    assert h.dtype == after.s.dtype == dtype
    fn, scale, base, weight = entry.parameters[:4]
    s = before.s.double()
    if pending:
        out, post, comb = (x.double() for x in before[2:] if x is not None)
        s = post[..., None] * out[:, None] + torch.einsum("tjk,tjd->tkd", comb, s)
        assert_close("hyper_expand", after.s, s, 20.0)
    wants = exact_mixes(after.s, fn, scale, base, 1e-20, 1e-6, 20)  # from the streams as they were rounded
    for got, want in zip((after.pre, after.post, after.comb), wants, strict=True):
        assert got is not None
        assert_close("hyper_mixes", got, want)
    read = torch.einsum("ts,tsd->td", before.pre.double(), after.s.double()).to(dtype).double()
    want = read / (read.square().mean(1, keepdim=True) + 1e-20).sqrt() * weight.double()
    unit = 2.0**-8 if dtype is torch.bfloat16 else 1e-6  # twice: what is read may round the other way before the norm
    assert ((h.double() - want).abs() <= 2.01 * unit * want.abs() + 1e-5).all()


@given(st.integers(1, 5), st.integers(2, 20), st.floats(0.1, 2.0), st.integers(0, 2**31))
def test_sinkhorn_ends_on_columns(streams: int, iters: int, spread: float, seed: int) -> None:
    a = spread * torch.randn(3, streams, streams, generator=torch.Generator().manual_seed(seed))
    c = sinkhorn(a, 1e-6, iters)
    assert (c > 0).all()
    # columns are exact but for the eps in the last division, 1e-6 of a sum that may be small; rows only converge
    torch.testing.assert_close(c.sum(1), torch.ones(3, streams), atol=1e-3, rtol=0)


@given(st.integers(2, 5), st.integers(0, 2**31))
def test_sinkhorn_is_nearly_doubly_stochastic(streams: int, seed: int) -> None:
    a = 0.5 * torch.randn(3, streams, streams, generator=torch.Generator().manual_seed(seed))
    c = sinkhorn(a, 1e-6, 20)
    torch.testing.assert_close(c.sum(2), torch.ones(3, streams), atol=1e-4, rtol=0)


def equal(a: tuple[Tensor, Streams], b: tuple[Tensor, Streams]) -> bool:
    pairs = zip((a[0], *a[1]), (b[0], *b[1]), strict=True)
    return all(torch.equal(x, y) for x, y in pairs if x is not None and y is not None)


def test_triton_rows_do_not_depend_on_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on what was in memory before: a second tile of rows, and every buffer begins as NaN."""
    kernels = pytest.importorskip("benthic.kernels.triton.hyper")
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        x = empty(*args, **kwargs)
        x.view(torch.uint8).fill_(255)
        return x

    monkeypatch.setattr(torch, "empty", poisoned)
    rows, width = (300, 5120) if TRITON.type == "cuda" else (18, 80)
    entry = make_entry(TRITON, rows, 2 if TRITON.type == "cpu" else 4, width, torch.bfloat16)
    h, after = kernels.hyper_read(entry.streams, *entry.parameters)
    assert not any(x.isnan().any() for x in (h, *after) if x is not None)
    for start, end in ((0, 1), (rows - 1, rows), (3, 17)):
        part = Streams(*(None if x is None else x[start:end] for x in entry.streams))
        alone = kernels.hyper_read(part, *entry.parameters)
        assert equal(alone, (h[start:end], Streams(*(None if x is None else x[start:end] for x in after))))


@pytest.mark.gpu
@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (64, 5120), (65, 256), (300, 5120)])
def test_ring(rows: int, width: int, pending: bool) -> None:
    """Streams of the Hopper kernel are those of the other, its weights within tolerance; no row sees its neighbours."""
    from benthic.kernels.triton import hyper as kernels
    from benthic.kernels.triton import tuning

    entry = make_entry(TRITON, rows, 4, width, torch.bfloat16)
    before = entry.streams if pending else entry.streams._replace(out=None, post=None, comb=None)

    def read(ring: bool, first: int = 0) -> tuple[Tensor, Streams]:
        part = Streams(*(None if x is None else x[first:] for x in before))
        with tuning.trying({("hyper_read", f"4x{width}"): {"ring": ring}}):
            return kernels.hyper_read(part, *entry.parameters)

    h, after = read(ring=True)
    h_other, other = read(ring=False)
    assert torch.equal(after.s, other.s)
    assert ((h.double() - h_other.double()).abs() <= 2.01 * 2.0**-8 * h_other.abs() + 1e-5).all()
    fn, scale, base = entry.parameters[:3]
    wants = exact_mixes(after.s, fn, scale, base, 1e-20, 1e-6, 20)
    for got, want in zip((after.pre, after.post, after.comb), wants, strict=True):
        assert got is not None
        assert_close("hyper_mixes", got, want)
    last = Streams(*(None if x is None else x[-1:] for x in after))
    assert equal(read(ring=True, first=rows - 1), (h[-1:], last))


@pytest.mark.gpu
@pytest.mark.parametrize("ring", [True, False])
def test_triton_addresses_beyond_32_bits(ring: bool) -> None:
    from benthic.kernels.triton import hyper as kernels
    from benthic.kernels.triton import tuning

    entry = make_entry(TRITON, 110_000, 4, 5120, torch.bfloat16)  # 2.25e9 elements
    tail = Streams(*(None if x is None else x[-3:] for x in entry.streams))
    with tuning.trying({("hyper_read", "4x5120"): {"ring": ring}}):  # they differ in the order of sums
        h, after = kernels.hyper_read(entry.streams, *entry.parameters)
        small = kernels.hyper_read(tail, *entry.parameters)
    assert equal(small, (h[-3:], Streams(*(None if x is None else x[-3:] for x in after))))
    read = kernels.hyper_collapse(entry.streams.s, entry.streams.pre)
    assert torch.equal(read[-3:], kernels.hyper_collapse(tail.s, tail.pre))
    assert torch.equal(settle(entry.streams)[-3:], after.s[-3:])


def test_gradient(device: torch.device) -> None:
    def run(kind: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        s, fn, scale, base, out = (
            torch.randn(shape, generator=generator).to(device, kind).requires_grad_()
            for shape in ((2, 3, 8), (15, 24), (3,), (15,), (2, 8))
        )
        mixes = exact_mixes if kind == torch.float64 else hyper_mixes
        pre, post, comb = mixes(s, fn, scale, base, 1e-6, 1e-6, 5)
        if kind == torch.float64:
            read = torch.einsum("ts,tsd->td", pre, s)
            written = post[..., None] * out[:, None] + torch.einsum("tjk,tjd->tkd", comb, s)
        else:
            read, written = hyper_collapse(s, pre), hyper_expand(out, s, post, comb)
        (read.square().sum() + written.square().sum()).backward()
        return [x.grad for x in (s, fn, scale, base, out) if x.grad is not None]

    got, want = run(torch.float32), run(torch.float64)
    assert len(got) == len(want) == 5
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-3, rtol=1e-3)


def test_refuses() -> None:
    s, fn, scale, base = torch.zeros(2, 3, 8), torch.zeros(15, 24), torch.zeros(3), torch.zeros(15)
    with pytest.raises(ShapeError, match="hyper_mixes: s"):
        hyper_mixes(s[0], fn, scale, base, 1e-6, 1e-6, 2)
    with pytest.raises(ShapeError, match="hyper_mixes: fn"):
        hyper_mixes(s, fn[:-1], scale, base, 1e-6, 1e-6, 2)
    with pytest.raises(ShapeError, match="hyper_mixes: base"):
        hyper_mixes(s, fn, scale, base[1:], 1e-6, 1e-6, 2)
    with pytest.raises(ShapeError, match="hyper_collapse: pre"):
        hyper_collapse(s, torch.zeros(2, 2))
    with pytest.raises(ShapeError, match="hyper_expand: out"):
        hyper_expand(torch.zeros(2, 7), s, torch.zeros(2, 3), torch.zeros(2, 3, 3))
    with pytest.raises(ShapeError, match="hyper_expand: post"):
        hyper_expand(torch.zeros(2, 8), s, torch.zeros(2, 3), torch.zeros(2, 3, 2))
