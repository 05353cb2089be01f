"""Quantised profiles, block by block: the package's blocks against slow blocks fed with the same inputs.

End to end the profiles are chaotic (model specification, 6.4); block by block they are not. Bounds by kind of block:

    exact    integers, and what is stored, since quantisers are exact
    float    float32 results: summation order only
    rounded  one rounding to bfloat16 at the end: nearly all values equal, the rest one step away
    chained  a rounding, then a quantiser, then more: a turned rounding may turn a code, so no bound on single values
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benthic.kernels import engram, hyper
from tests.oracle.blocks import Pair, distance, equal_share, pairs, selections, ulp
from tests.oracle.conftest import tokens
from tests.oracle.package import Package, Recorder, recording
from tests.oracle.slow_v41 import Array, SlowModel, collapse

RUNS = {"tiny": (140, [67, 60, 1, 12]), "tiny_512": (46, [19, 20, 1, 3])}

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


@dataclass
class Recorded:
    package: Package
    recorder: Recorder
    slow: SlowModel
    by_block: dict[str, list[Pair]]


@pytest.fixture(
    scope="module", params=[(n, p) for n in RUNS for p in ("reference", "production")], ids=lambda p: f"{p[0]}-{p[1]}"
)
def recorded(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Recorded:
    name, profile = request.param
    count, splits = RUNS[name]
    package, slow = Package(checkpoint(name), profile), SlowModel(checkpoint(name), profile)
    with recording(package) as recorder:
        package.run(tokens(count), splits)
    by_block: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs(package, recorder, slow):
        by_block[pair.block].append(pair)
    return Recorded(package, recorder, slow, by_block)


def relative_rms(pair: Pair) -> float:
    return float(np.sqrt(((pair.got - pair.want) ** 2).mean() / (pair.want**2).mean()))


def check(pair: Pair) -> None:
    kind = KINDS[pair.block]
    where = f"{pair.block}, layer {pair.layer}"
    assert pair.got.shape == pair.want.shape, where
    assert np.isfinite(pair.got).all(), where
    if kind == "exact":
        assert (pair.got == pair.want).all(), where
    elif kind == "float":
        assert distance(pair) <= MAX_FLOAT_STEPS, where
    else:
        share = MIN_SHARE_ATTENTION if pair.block == "attention" else MIN_SHARE[kind]
        assert equal_share(pair) >= share, where
        if kind == "rounded":
            assert distance(pair) <= MAX_STEPS, where
        else:
            assert relative_rms(pair) <= MAX_CHAINED_RMS, where


@pytest.mark.parametrize("block", KINDS)
def test_block(block: str, recorded: Recorded) -> None:
    found = recorded.by_block[block]
    assert found, f"no call of {block} was recorded"
    for pair in found:
        check(pair)


def test_every_block_has_a_bound(recorded: Recorded) -> None:
    assert set(recorded.by_block) == set(KINDS)


def test_selections(recorded: Recorded) -> None:
    """Entries and candidate blocks: the same set, or sets that differ between equal scores and their neighbours."""
    counted = {"entries": 0, "candidates": 0}
    for kind, layer, position, got, want, scores in selections(recorded.package, recorded.recorder, recorded.slow):
        where = f"{kind} of layer {layer} at {position}"
        counted[kind] += 1
        assert len(got) == len(want), where
        assert (np.diff(got) > 0).all(), where
        mine, theirs = np.setdiff1d(got, want), np.setdiff1d(want, got)
        if len(mine):
            gap = scores[theirs].max() - scores[mine].min()
            assert gap <= 2 * ulp(scores[theirs].max()), f"{where}: gap {gap}"
    rows = len(recorded.package.ids)
    assert counted == {"entries": 4 * rows, "candidates": rows}


def test_wiring(recorded: Recorded) -> None:
    """Who reads whose mix: attention the sublayer's before, the experts attention's; bit for bit."""
    r, previous, stream = recorded.recorder, None, None
    for i in range(len(recorded.package.plan)):
        s_in, pre_in, s_out, pre_out = r.get(i, "layer")
        s_attn, attn_pre, _, attn_comb = r.get(i, "attn_mixes")
        s_ffn, ffn_pre, ffn_post, _ = r.get(i, "ffn_mixes")
        collapses, expands = r.calls[i, "collapse"], r.calls[i, "expand"]

        def rows(calls: list[tuple[torch.Tensor, ...]], value: int) -> Array:
            return np.concatenate([call[value].double().numpy() for call in calls])

        if previous is None:
            assert (pre_in == np.eye(4)[0]).all(), "the first read is the first stream alone"
        else:
            assert (pre_in == previous).all(), i
            if not r.has(i, "engram_gate"):
                assert stream is not None
                assert (s_in == stream).all(), i
        assert (s_attn == s_in).all(), i
        assert (rows(collapses[0::2], 1) == pre_in).all(), i
        assert (rows(collapses[1::2], 1) == attn_pre).all(), i
        assert (rows(collapses[1::2], 0) == s_ffn).all(), i
        assert (rows(expands[0::2], 3) == attn_comb).all(), i
        assert (rows(expands[1::2], 2) == ffn_post).all(), i
        assert (pre_out == ffn_pre).all(), i
        previous, stream = pre_out, s_out
    s, pre, _ = r.get(-1, "collapse")
    assert stream is not None
    assert (s == stream).all()
    assert (pre == previous).all()


def test_draft_context(recorded: Recorded) -> None:
    """The drafter's context rows, from the package's own taps."""
    taps, slow = np.concatenate(recorded.package.taps), recorded.slow
    slow.contexts = [[] for _ in slow.stages]
    for p, row in enumerate(taps):
        slow._remember_taps(row.reshape(-1), p)
    inputs = tuple(torch.from_numpy(tap).bfloat16() for tap in taps.transpose(1, 0, 2))
    with torch.inference_mode():
        got = recorded.package.drafter.context(inputs, torch.arange(len(taps)))
    for stage, (mine, want) in enumerate(zip(got, slow.contexts, strict=True)):
        pair = Pair("window row", stage, mine.double().numpy(), np.stack(want))
        check(pair)


def test_logits_of_equal_hidden_states(recorded: Recorded) -> None:
    hidden = recorded.recorder.get(-1, "collapse")[2]
    with torch.inference_mode():
        got = recorded.package.model.logits(torch.from_numpy(hidden).bfloat16()).double().numpy()
    want = np.stack([recorded.slow.logits(y) for y in hidden])
    assert np.abs(got - want).max() <= 2e-2  # a turned rounding of the last norm moves a logit by about a step of it
    assert np.sqrt(((got - want) ** 2).mean() / (want**2).mean()) <= 1e-3


@pytest.mark.parametrize("scale", [1e3, 1e-8])
def test_scaled_streams(scale: float, recorded: Recorded) -> None:
    """The epsilon of 1e-20 and float32 inside: blocks that normalise must not care about the size of the streams."""
    package, slow, r = recorded.package, recorded.slow, recorded.recorder
    for i in (0, 1, 4, 9):
        layer = slow.layers[i]
        mine: Any = package.model.layers[i]
        s = torch.from_numpy(r.get(i, "attn_mixes")[0][:16] * scale).bfloat16()
        wide = s.double().numpy()
        with torch.inference_mode():
            pre, post, comb = mine.hc_attn(s)
            y = hyper.hyper_collapse(s, pre)
            h = mine.attn_norm(y)
        want = [slow.mix(row, layer.attn_hc) for row in wide]
        for k, got in enumerate((pre, post, comb)):
            check(Pair("mixes: pre", i, got.double().numpy(), np.stack([w[k] for w in want])))
        y64 = y.double().numpy()
        weights = pre.double().numpy()
        reads = np.stack([slow.math.cut(collapse(a, b)) for a, b in zip(wide, weights, strict=True)])
        check(Pair("collapse", i, y64, reads))
        norms = np.stack([slow.math.rms(row, layer.weights["attn_norm"], slow.eps) for row in y64])
        check(Pair("sublayer norm", i, h.double().numpy(), norms))
        if i in slow.engram_ids:
            _, keys, value, _ = r.get(i, "engram_gate")
            tensors = [torch.from_numpy(x[:16]).bfloat16() for x in (keys, value)]
            weight = mine.engram.q_weight * mine.engram.k_weight
            with torch.inference_mode():
                got = engram.engram_gate(s, *tensors, weight, mine.engram.eps, None)
            flat = np.concatenate([keys[:16].reshape(16, -1), value[:16]], 1)
            rows = [slow.engram_gate(layer, a, b, False) for a, b in zip(wide, flat, strict=True)]
            check(Pair("n-gram gate", i, got.double().numpy(), np.stack(rows)))
