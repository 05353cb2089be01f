"""Every block of the package beside the slow block fed with the package's own inputs, so that nothing accumulates.

Where a block has a memory (windows, groups, entries), the memory too is what the package stored.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.oracle.package import Package, Recorder, as_array
from tests.oracle.slow_v41 import Array, Layer, SlowModel, collapse, expand, rotate


class Pair(NamedTuple):
    block: str
    layer: int
    got: Array  # [T, ...]
    want: Array


KINDS = {
    "chosen experts": "exact",
    "n-gram rows": "exact",
    "stored entry": "exact",
    "stored index key": "exact",
    "mixes: pre": "float",
    "mixes: post": "float",
    "mixes: comb": "float",
    "expert weights": "float",
    "collapse": "rounded",
    "sublayer norm": "rounded",
    "expand": "rounded",
    "query latent": "rounded",
    "query": "rounded",
    "latent": "rounded",
    "rotated latent": "rounded",
    "index weight": "rounded",
    "n-gram keys, value": "rounded",
    "n-gram gate": "rounded",
    "attention": "rounded",
    "taps": "rounded",
    "window row": "chained",
    "index key": "chained",
    "index query": "chained",
    "output projection": "chained",
    "experts": "chained",
}
MIN_SHARE = {"rounded": 0.998, "chained": 0.99}
MIN_SHARE_ATTENTION = 0.995
MAX_STEPS = 1.0  # bfloat16 steps, rounded blocks
MAX_FLOAT_STEPS = 2e-3  # of a bfloat16 step: 8e-6 relative
MAX_CHAINED_RMS = 5e-3  # root mean square of the difference, relative to that of the block: a turned FP8 code or two


def ulp(x: Array) -> Array:
    """Distance between neighbouring bfloat16 values at |x|."""
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126))) - 7)


def equal_share(pair: Pair) -> float:
    return float((pair.got == pair.want).mean()) if pair.got.size else 1.0


def distance(pair: Pair) -> float:
    """Largest difference, in bfloat16 steps at the value or at its row's root mean square, whichever is larger."""
    if not pair.got.size:
        return 0.0
    want, got = (x.reshape(len(x), -1).astype(np.float64) for x in (pair.want, pair.got))
    size = np.maximum(np.abs(want), np.sqrt((want * want).mean(1, keepdims=True)))
    return float((np.abs(got - want) / ulp(size)).max())


def relative_rms(pair: Pair) -> float:
    return float(np.sqrt(((pair.got - pair.want) ** 2).mean() / (pair.want**2).mean()))


def check(pair: Pair) -> None:
    """One block within the bound of its kind."""
    kind = KINDS[pair.block]
    where = f"{pair.block}, layer {pair.layer}"
    assert pair.got.shape == pair.want.shape, where
    assert np.isfinite(pair.got).all(), f"{where}: not finite"
    if kind == "exact":
        assert (pair.got == pair.want).all(), f"{where}: {equal_share(pair):.5f} equal"
    elif kind == "float":
        assert distance(pair) <= MAX_FLOAT_STEPS, f"{where}: {distance(pair):.2g} steps apart"
    else:
        least = MIN_SHARE_ATTENTION if pair.block == "attention" else MIN_SHARE[kind]
        turned = round((1 - equal_share(pair)) * pair.got.size)
        assert turned <= max(2, (1 - least) * pair.got.size), f"{where}: {equal_share(pair):.5f} equal"
        if kind == "rounded":
            assert distance(pair) <= MAX_STEPS, f"{where}: {distance(pair):.2g} steps apart"
        else:
            assert relative_rms(pair) <= MAX_CHAINED_RMS, f"{where}: relative rms {relative_rms(pair):.2g}"


def _rows(function: Any, *inputs: Array) -> Array:
    return np.stack([function(*row) for row in zip(*inputs, strict=True)])


def _two(r: Recorder, layer: int, name: str) -> list[tuple[Array, ...]]:
    """A block that each layer runs twice a step, first around attention, then around the experts."""
    calls = r.calls[layer, name]
    return [
        tuple(np.concatenate([as_array(value) for value in part]) for part in zip(*calls[i::2], strict=True))
        for i in (0, 1)
    ]


def pairs(package: Package, r: Recorder, slow: SlowModel, layers: Collection[int] | None = None) -> Iterator[Pair]:
    """All blocks of all layers and what follows them, or those of some layers."""
    for layer in slow.layers:
        if layers is not None and layer.index not in layers:
            continue
        yield from _streams(r, slow, layer)
        if layer.index in slow.engram_ids:
            yield from _engram(package, r, slow, layer)
        yield from _attention(package, r, slow, layer)
        yield from _experts(r, slow, layer)
    if layers is not None:
        return
    s, pre, y = r.get(-1, "collapse")
    yield Pair("collapse", -1, y, _rows(lambda a, b: slow.math.cut(collapse(a, b)), s, pre))
    taps = np.concatenate(package.taps)
    wanted = [r.get(i, "attn_mixes")[0] for i in slow.text["dspark_target_layer_ids"]]
    yield Pair("taps", -1, taps, np.stack([slow.math.cut(streams.mean(1)) for streams in wanted], 1))


def _streams(r: Recorder, slow: SlowModel, layer: Layer) -> Iterator[Pair]:
    i = layer.index
    for part, hc, calls in (("attn", layer.attn_hc, 0), ("ffn", layer.ffn_hc, 1)):
        s, *got = r.get(i, f"{part}_mixes")
        want = [slow.mix(row, hc) for row in s]
        for k, name in enumerate(("pre", "post", "comb")):
            yield Pair(f"mixes: {name}", i, got[k], np.stack([w[k] for w in want]))
        s, pre, out = _two(r, i, "collapse")[calls]
        yield Pair("collapse", i, out, _rows(lambda a, b: slow.math.cut(collapse(a, b)), s, pre))
        x, h = r.get(i, f"{part}_norm")
        weight = layer.weights[f"{part}_norm"]
        yield Pair("sublayer norm", i, h, _rows(lambda a, w=weight: slow.math.rms(a, w, slow.eps), x))
        o, s, post, comb, out = _two(r, i, "expand")[calls]
        yield Pair("expand", i, out, _rows(lambda *a: slow.math.cut(expand(*a)), o, s, post, comb))


def _engram(package: Package, r: Recorder, slow: SlowModel, layer: Layer) -> Iterator[Pair]:
    i = layer.index
    (rows,) = r.get(i, "ngram_rows")
    slow.history, wanted = [], []
    for token in package.ids:
        slow.history.append((token, False))
        wanted.append(slow.engram_rows(layer))
    yield Pair("n-gram rows", i, rows, np.stack(wanted))
    _, kv = r.get(i, "engram_kv")
    yield Pair("n-gram keys, value", i, kv, _rows(lambda a: slow.engram_kv(layer, a), rows))
    s, keys, value, out = r.get(i, "engram_gate")
    flat = np.concatenate([keys.reshape(len(keys), -1), value], 1)
    yield Pair("n-gram gate", i, out, _rows(lambda a, b: slow.engram_gate(layer, a, b, False), s, flat))


def _attention(package: Package, r: Recorder, slow: SlowModel, layer: Layer) -> Iterator[Pair]:
    i = layer.index
    positions = np.arange(len(package.ids))
    _, h = r.get(i, "attn_norm")
    _, qa = r.get(i, "qa")
    yield Pair("query latent", i, qa, _rows(lambda a: slow.query_latent(layer, a), h))
    q, kw, o = r.get(i, "attend")
    yield Pair("query", i, q, _rows(lambda a, p: slow.query(layer, a, p), qa, positions))
    yield Pair("window row", i, kw, _rows(lambda a, p: slow.window_row(layer, a, p), h, positions))
    if r.has(i, "latent"):
        groups = [calls[1] for calls in r.calls[i, "latent"]]
        latents = np.concatenate([as_array(g) for g in groups])
        layer.open_rows.clear()
        made = [slow.latent(layer, row) for row in h]
        yield Pair("latent", i, latents, np.array([m for m in made if m is not None]).reshape(latents.shape))
        at = np.arange(len(latents))
        (rotated,), (key,) = r.get(i, "store main"), r.get(i, "store index")
        want = _rows(lambda a, j: slow.math.cut(rotate(a, j * layer.ratio, layer.freqs)), latents, at)
        yield Pair("rotated latent", i, rotated, want)
        stored = package.stored(i, "main", len(at))
        yield Pair("stored entry", i, stored, _rows(slow.math.q4n, rotated))
        want = _rows(lambda a, j: slow.math.q4m(slow.index_key(layer, a, j)), latents, at)
        yield Pair("index key", i, _rows(slow.math.q4m, key), want)
        yield Pair("stored index key", i, package.stored(i, "index", len(at)), _rows(slow.math.q4m, key))
    if r.has(i, "select"):
        qi, weight, _ = r.get(i, "select")
        yield Pair("index query", i, qi, _rows(lambda a, p: slow.index_query(layer, a, p), qa, positions))
        yield Pair("index weight", i, weight, _rows(lambda a: slow.index_weight(layer, a), h))
    wanted = []
    entries = np.zeros((0, q.shape[2]))
    reads = [np.zeros(0, dtype=np.int64)] * len(positions)
    if layer.ratio:
        source = slow._source("kv_source_layer_ids", i)
        entries = package.stored(source, "main", len(positions) // layer.ratio)
        reads = chosen(package, r, i, source)
    for p in positions:
        window = kw[max(0, p + 1 - slow.text["sliding_window"]) : p + 1]
        wanted.append(slow.attend(layer, q[p], window, entries[reads[p]]))
    yield Pair("attention", i, o, np.stack(wanted))
    _, out = r.get(i, "attn")
    yield Pair("output projection", i, out, _rows(lambda a, p: slow.project(layer, a, p), o, positions))


def chosen(package: Package, r: Recorder, layer: int, source: int) -> list[Array]:
    """Entries each row of a layer read, ascending."""
    out: list[Array] = []
    for (entries,) in r.calls[layer, "reads"]:
        for row in as_array(entries):
            out.append(package.entries_of(source, row[row >= 0]))
    return out


def _experts(r: Recorder, slow: SlowModel, layer: Layer) -> Iterator[Pair]:
    i = layer.index
    h, ids, weights = r.get(i, "route")
    want = [slow.route(layer, row, image=False) for row in h]
    order = np.argsort(ids, axis=1)
    yield Pair("chosen experts", i, np.take_along_axis(ids, order, 1), np.stack([w[0] for w in want]))
    yield Pair("expert weights", i, np.take_along_axis(weights, order, 1), np.stack([w[1] for w in want]))
    h, out = r.get(i, "ffn")
    yield Pair("experts", i, out, _rows(lambda a, e, b: slow.moe(layer, a, e, b), h, ids, weights))


def selections(package: Package, r: Recorder, slow: SlowModel) -> Iterator[tuple[str, int, int, Array, Array, Array]]:
    """Every choice of entries and blocks: kind, layer, position, taken by the package, by the slow model, scores."""
    text = slow.text
    for layer in slow.layers:
        i = layer.index
        if not r.has(i, "select"):
            continue
        source = slow._source("kv_source_layer_ids", i)
        qi, weight, _ = r.get(i, "select")
        keys = package.stored(source, "index", len(package.ids) // layer.ratio)
        reads = chosen(package, r, i, source)
        blocks: list[Array] = []
        if r.has(i, "candidates"):
            for (part,) in r.calls[i, "candidates"]:
                blocks += [row[row >= 0] for row in as_array(part)]
        for p in range(len(package.ids)):
            scores = slow.index_scores(qi[p], weight[p], keys[: (p + 1) // layer.ratio])
            if i == text["candidate_source_layer_id"]:
                size = text["candidate_block_size"]
                best = np.array([scores[b : b + size].max() for b in range(0, len(scores), size)])
                best[-1] = np.inf
                yield "candidates", i, p, blocks[p], slow.candidate_blocks(scores, p, i), best
            after = 0 <= text["candidate_source_layer_id"] < i
            limit = blocks[p] if after else None
            if limit is not None:
                kept = np.isin(np.arange(len(scores)) // text["candidate_block_size"], limit)
                scores = np.where(kept, scores, -np.inf)
            yield "entries", i, p, reads[p], slow.choose(scores, p, i, None), scores


def check_wiring(package: Package, r: Recorder) -> None:
    """Who reads whose mix: attention the sublayer's before, the experts attention's; bit for bit."""
    previous, stream = None, None
    for i in range(len(package.plan)):
        s_in, pre_in, s_out, pre_out = r.get(i, "layer")
        s_attn, attn_pre, _, attn_comb = r.get(i, "attn_mixes")
        s_ffn, ffn_pre, ffn_post, _ = r.get(i, "ffn_mixes")
        collapses, expands = r.calls[i, "collapse"], r.calls[i, "expand"]

        def rows(calls: list[tuple[Any, ...]], value: int) -> Array:
            return np.concatenate([call[value].double().numpy() for call in calls])

        if previous is None:
            assert (pre_in == np.eye(4)[0]).all(), "the first read is the first stream alone"
        else:
            assert (pre_in == previous).all(), f"layer {i}: another mix than the one meant"
            if not r.has(i, "engram_gate"):
                assert stream is not None
                assert (s_in == stream).all(), f"layer {i}: another mix than the one meant"
        assert (s_attn == s_in).all(), f"layer {i}: another mix than the one meant"
        assert (rows(collapses[0::2], 1) == pre_in).all(), f"layer {i}: another mix than the one meant"
        assert (rows(collapses[1::2], 1) == attn_pre).all(), f"layer {i}: another mix than the one meant"
        assert (rows(collapses[1::2], 0) == s_ffn).all(), f"layer {i}: another mix than the one meant"
        assert (rows(expands[0::2], 3) == attn_comb).all(), f"layer {i}: another mix than the one meant"
        assert (rows(expands[1::2], 2) == ffn_post).all(), f"layer {i}: another mix than the one meant"
        assert (pre_out == ffn_pre).all(), f"layer {i}: another mix than the one meant"
        previous, stream = pre_out, s_out
    s, pre, _ = r.get(-1, "collapse")
    assert stream is not None
    assert (s == stream).all()
    assert (pre == previous).all()
