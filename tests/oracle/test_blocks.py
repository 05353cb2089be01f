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
from tests.oracle.blocks import KINDS, Pair, check, check_wiring, pairs, selections, ulp
from tests.oracle.conftest import tokens
from tests.oracle.package import Package, Recorder, recording
from tests.oracle.slow_v41 import Array, SlowModel, collapse

RUNS = {"tiny": (140, [67, 60, 1, 12]), "tiny_512": (46, [19, 20, 1, 3])}


@dataclass
class Recorded:
    package: Package
    recorder: Recorder
    slow: SlowModel
    by_block: dict[str, list[Pair]]
    logits: Array
    splits: list[int]


@pytest.fixture(
    scope="module", params=[(n, p) for n in RUNS for p in ("reference", "production")], ids=lambda p: f"{p[0]}-{p[1]}"
)
def recorded(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Recorded:
    name, profile = request.param
    count, splits = RUNS[name]
    package, slow = Package(checkpoint(name), profile), SlowModel(checkpoint(name), profile)
    with recording(package) as recorder:
        logits = package.run(tokens(count), splits)
    by_block: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs(package, recorder, slow):
        by_block[pair.block].append(pair)
    return Recorded(package, recorder, slow, by_block, logits, splits)


@pytest.mark.parametrize("block", KINDS)
def test_block(block: str, recorded: Recorded) -> None:
    found = recorded.by_block[block]
    assert found, f"no call of {block} was recorded"
    for pair in found:
        check(pair)


def test_every_block_has_a_bound(recorded: Recorded) -> None:
    assert set(recorded.by_block) == set(KINDS)


def test_runs_of_blocks(recorded: Recorded) -> None:
    """Blocks that a backend takes together give the bits of the blocks one by one, which are those compared above."""
    package = Package(recorded.slow.folder.path, recorded.package.numerics.name)
    got = package.run(recorded.package.ids, recorded.splits)
    assert (got == recorded.logits).all()


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
    check_wiring(recorded.package, recorded.recorder)


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
