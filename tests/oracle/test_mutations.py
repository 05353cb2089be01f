"""Each pitfall of the model specification, 6.5, that a tiny model can show: introduced, it must fail a named check.

A row names the pitfall, the check that catches it and the change, made by patching one function, buffer or setting of
the package for the length of the test. The checks are those of the tests beside this file; every one of them passes
on the package as it is. All run on the plain torch references, so that a patched function is the one that runs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.kernels import (
    attn_sparse,
    backends,
    compress,
    engram,
    hyper,
    indexer,
    kv_copy,
    moe_experts,
    moe_gate,
    quant,
    rope,
    swiglu,
)
from benthic.models import deepseek_v41, deepseek_v41_dspark
from benthic.models.deepseek_v41 import DeepseekV41, MoE
from benthic.models.memory import PagedLayer, RatioStep
from tests.oracle import random_checkpoint
from tests.oracle.blocks import check, check_wiring, pairs
from tests.oracle.conftest import SlowRun, run_slow, tokens
from tests.oracle.package import Package, recording
from tests.oracle.slow_v41 import Array, SlowModel
from tests.oracle.test_logits import TOLERANCE, compare, image_sequence

Patch = pytest.MonkeyPatch
FAILURES = (AssertionError, pytest.fail.Exception)

# ---- the checks ------------------------------------------------------------------------------------------------------


class Bench:
    """Slow answers, and packages that a mutation may reuse."""

    def __init__(self, checkpoint: Callable[[str], Path], slow_run: Callable[[str], SlowRun], scratch: Path):
        self.folder, self.slow, self.scratch = checkpoint("tiny"), slow_run("tiny"), scratch
        self.kept: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def package(self, change: "Mutation | None", **arguments: Any) -> Package:
        """A package; a fresh one where the change acts while it is built."""
        if change is not None and change.fresh:
            text = {**arguments.pop("text", {}), **change.text}
            return Package(**{"folder": self.folder, "text": text, **arguments})
        key = repr([(k, list(v) if k == "weights" else v) for k, v in sorted(arguments.items())])
        return self.once(key, lambda: Package(**{"folder": self.folder, **arguments}))


def _logits(bench: Bench, change: "Mutation | None", length: int, splits: list[int]) -> None:
    package = bench.package(change)
    with applied(change, package):
        got = package.run(bench.slow.ids[:length], splits)
    compare(got, bench.slow.logits[:length], bench.slow.model, "logits")


def logits_72(bench: Bench, change: "Mutation | None") -> None:
    _logits(bench, change, 72, [37, 28, 1, 6])


def logits_141(bench: Bench, change: "Mutation | None") -> None:
    """Decode steps past the first dropped entry of ratio 2, at even and at odd positions."""
    _logits(bench, change, 141, [133, 1])


def logits_300(bench: Bench, change: "Mutation | None") -> None:
    """Past the candidate filter."""
    _logits(bench, change, 300, [37])


def _own(
    bench: Bench, change: "Mutation | None", key: str, count: int, fit: Callable[[SlowModel], None], **own: Any
) -> None:
    """Logits under settings of their own, on both sides."""

    def run() -> SlowRun:
        model = SlowModel(own.get("folder", bench.folder), text=own.get("text"), weights=own.get("weights"))
        fit(model)
        return run_slow(model, tokens(count))

    slow = bench.once(("slow", key), run)
    package = bench.package(change, **own)
    with applied(change, package):
        got = package.run(slow.ids, [count - 4, 1, 3])
    compare(got, slow.logits, slow.model, key)


def tiny_streams(bench: Bench, change: "Mutation | None") -> None:
    """Embeddings of 1e-8, as `test_scaled_streams`."""
    embed = bench.once("embed", lambda: torch.from_numpy(bench.slow.model.embed * 1e-8).bfloat16().double().numpy())
    _own(bench, change, "embeddings of 1e-8", 8, lambda _: None, weights={"embed.weight": embed})


def clamped(bench: Bench, change: "Mutation | None") -> None:
    """A limit that random activations reach."""
    _own(bench, change, "swiglu_limit 0.5", 8, lambda _: None, text={"swiglu_limit": 0.5})


def mapped(bench: Bench, change: "Mutation | None") -> None:
    """A token map that is not the identity."""
    classes = np.random.default_rng(8).permutation(4096)

    def fit(model: SlowModel) -> None:
        model.token_map = classes

    _own(bench, change, "token classes", 8, fit, classes=classes)


def engram_first(bench: Bench, change: "Mutation | None") -> None:
    """An n-gram layer before the first read, so that the streams differ there."""
    text = {"engram_layer_ids": [0, 4]}
    folder = bench.once("folder", lambda: random_checkpoint.write(bench.scratch / "first", "tiny", 0, text))
    _own(bench, change, "engram in layer 0", 8, lambda _: None, folder=folder)


def image_span(bench: Bench, change: "Mutation | None") -> None:
    """As `test_image_positions`."""
    ids, images, embeds = image_sequence(256)
    rows = [(t, bool(i), e if i else None) for t, i, e in zip(ids, images, embeds, strict=True)]

    def run() -> tuple[SlowModel, Array]:
        model = SlowModel(bench.folder)
        return model, np.stack([model.step(*row)[0] for row in rows])

    model, want = bench.once("images", run)
    package = bench.package(change)
    package.reset()
    with applied(change, package):
        got = package.step(ids, images, embeds)
    compare(got, want, model, "image span")


def draft(bench: Bench, change: "Mutation | None") -> None:
    """As `test_draft_block`."""
    package = bench.package(change)
    with applied(change, package):
        package.run(bench.slow.ids[:65], [65])
        got = package.draft(bench.slow.ids[65])
    worst = np.abs(got.logits[0].double().numpy() - bench.slow.drafts[65][1]).max()
    assert worst <= TOLERANCE, f"draft logits {worst:.2e} apart"


def blocks(bench: Bench, change: "Mutation | None") -> None:
    """Profile `reference`, layers 2 and 6, as `test_block`."""
    package = bench.package(change, numerics="reference")
    slow = bench.once("reference", lambda: SlowModel(bench.folder, "reference"))
    with applied(change, package), recording(package) as recorder:
        package.run(tokens(24), [19, 1, 4])
    for pair in pairs(package, recorder, slow, layers=(2, 6)):
        check(pair)


def wiring(bench: Bench, change: "Mutation | None") -> None:
    """As `test_wiring`."""
    package = bench.package(change)
    with applied(change, package), recording(package) as recorder:
        package.run(tokens(3), [3])
    check_wiring(package, recorder)


def silent_router(bench: Bench, change: "Mutation | None") -> None:
    """Scores that all underflow leave weights of 0, not NaN."""
    h = torch.ones(1, 256)
    with applied(change, None):
        _, weights = moe_gate.route(h, -h.expand(16, -1), torch.zeros(16), 4, True, 1.5)
    assert (weights == 0).all(), f"weights {weights.tolist()}"


# ---- the changes -----------------------------------------------------------------------------------------------------


class Mutation(NamedTuple):
    name: str
    pitfall: str  # number in 6.5, or the section that states the rule
    check: Callable[[Bench, "Mutation | None"], None]
    change: Callable[[Patch, Any], None] = lambda patch, package: None
    text: dict[str, Any] = {}  # noqa: RUF012
    fresh: bool = False  # acts while weights are loaded or the model is built


@contextmanager
def applied(change: Mutation | None, package: Package | None) -> Iterator[None]:
    """The change in force inside this block, on the references."""
    with Patch.context() as patch, backends.reference():
        if change is not None and not change.fresh:
            change.change(patch, package)
        yield


def around(patch: Patch, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def layers(package: Package) -> Any:
    return package.model.layers


def per_head_query_norm(patch: Patch, package: Package) -> None:
    for layer in layers(package):

        def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(x: Tensor) -> Tensor:
                q = real(x).unflatten(-1, (16, -1))
                return (q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-20)).flatten(-2)

            return call

        around(patch, layer.attn.wq_b, "forward", make)


def half_precision_streams(patch: Patch, package: Package) -> None:
    around(patch, package.model.embed, "forward", lambda real: lambda ids: real(ids).half().float())


def stale_index_keys(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: PagedLayer, *args: Any) -> Any:
            if self.plan.ratio == 2 and not len(self.memory.ratio(2).closing):
                self.plan = dataclasses.replace(self.plan, keys_from=6)
            return real(self, *args)

        return call

    around(patch, PagedLayer, "select", make)


def swapped_rope_tables(patch: Patch, package: Package) -> None:
    around(patch, deepseek_v41, "rope_for", lambda real: lambda config, ratio: real(config, 0 if ratio else 2))


def last_token_of_group(patch: Patch, package: Package) -> None:
    def positions(self: RatioStep) -> Tensor:
        return self.memory.batch.positions[self.closing]

    patch.setattr(RatioStep, "group_positions", property(positions))


def no_inverse_rotation(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, at, freqs, inverse=False: x if inverse else real(x, at, freqs)

    around(patch, rope, "rotate", make)


def first_channels_rotate(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, at: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
            return real(x.roll(64, -1), at, freqs, inverse).roll(-64, -1)

        return call

    around(patch, rope, "rotate", make)


def half_split_pairs(patch: Patch, package: Package) -> None:
    """Channel c pairs with c + dr/2."""

    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, at: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
            plain, turned = x.split([x.shape[-1] - 64, 64], -1)
            pairs_ = turned.unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2)
            out = real(torch.cat([plain, pairs_], -1), at, freqs, inverse)
            plain, turned = out.split([x.shape[-1] - 64, 64], -1)
            return torch.cat([plain, turned.unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2)], -1)

        return call

    around(patch, rope, "rotate", make)


def yarn_magnitude(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, rows: Tensor, begin: Tensor, count: Tensor, paged: Any, *rest: Any) -> Tensor:
            records, sink, scale, rounded = rest
            factor = 1.0 if paged is None else (0.1 * np.log(16) + 1) ** 2
            return real(q, rows, begin, count, paged, records, sink, scale * factor, rounded)

        return call

    around(patch, attn_sparse, "sink_attention", make)


def change_sink(new: Callable[[Tensor], Tensor]) -> Callable[[Patch, Package], None]:
    def change(patch: Patch, package: Package) -> None:
        for layer in layers(package):
            patch.setitem(layer.attn._parameters, "attn_sink", new(layer.attn.attn_sink))

    return change


def sink_in_numerator(patch: Patch, package: Package) -> None:
    """The sink counts as a copy of the newest row."""

    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, rows: Tensor, begin: Tensor, count: Tensor, paged: Any, *rest: Any) -> Tensor:
            o = real(q, rows, begin, count, paged, *rest)
            bare = real(q, rows, begin, count, paged, rest[0], torch.full_like(rest[1], -1e30), *rest[2:])
            share = (o.norm(dim=-1) / bare.norm(dim=-1))[..., None]
            return o + (1 - share) * rows[begin + count - 1][:, None]

        return call

    around(patch, attn_sparse, "sink_attention", make)


def no_duplicates(patch: Patch, package: Package) -> None:
    """Compressed entries whose tokens the window holds are left out."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: PagedLayer, q: Tensor, kw: Tensor, selection: Any, sink: Tensor) -> Tensor:
            if selection is not None:
                step = self.memory.ratio(self.plan.ratio)
                first = (self.memory.batch.positions - 63).clamp(min=0) // self.plan.ratio
                keep = torch.arange(int(step.visible.max()) if len(step.visible) else 0)
                inside = step.locate(keep.expand(len(first), -1), self.memory.chunk_of_row[:, None])
                inside = torch.where(keep >= first[:, None], inside, -2)
                hit = (selection.entries[:, :, None] == inside[:, None, :]).any(-1)
                selection = selection._replace(entries=torch.where(hit, -1, selection.entries))
            return real(self, q, kw, selection, sink)

        return call

    around(patch, PagedLayer, "attend", make)


def shorter_window(patch: Patch, package: Package) -> None:
    around(patch, kv_copy, "window_rows", lambda real: lambda *a: real(*a[:-1], a[-1] - 1))


def newest_block_free(patch: Patch, package: Package) -> None:
    """The newest block must win its place like any other."""

    def blocks_(scores: Tensor, visible: Tensor, count: int, size: int) -> Tensor:
        n = scores.shape[1]
        best = scores.masked_fill(torch.arange(n) >= visible[:, None], -torch.inf)
        best = torch.nn.functional.pad(best, (0, -n % size), value=-torch.inf).unflatten(1, (-1, size)).amax(2)
        exists = torch.arange(best.shape[1]) < ((visible + size - 1) // size)[:, None]
        return indexer._ascending(indexer._largest(best, exists, count), count)

    patch.setattr(indexer, "candidate_blocks_reference", blocks_)


def mean_of_block(patch: Patch, package: Package) -> None:
    """A block counts with its mean over all places, so that a partial one loses."""

    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(scores: Tensor, visible: Tensor, count: int, size: int) -> Tensor:
            n = scores.shape[1]
            seen = scores.masked_fill(torch.arange(n) >= visible[:, None], 0.0)
            means = torch.nn.functional.pad(seen, (0, -n % size)).unflatten(1, (-1, size)).mean(2)
            return real(means.repeat_interleave(size, 1)[:, :n], visible, count, size)

        return call

    around(patch, indexer, "candidate_blocks_reference", make)


def no_filter(patch: Patch, package: Package) -> None:
    around(
        patch,
        indexer,
        "index_select",
        lambda real: lambda *a, restrict=None, **k: real(*a, restrict=None, **k),
    )


def own_filter(patch: Patch, package: Package) -> None:
    """The candidate source restricts its own choice too."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, restrict: Tensor | None = None, emit: int = 0, block_size: int = 8) -> Any:
            entries, emitted = real(*args, restrict=restrict, emit=emit, block_size=block_size)
            return real(*args, restrict=emitted, emit=emit, block_size=block_size) if emit else (entries, emitted)

        return call

    around(patch, indexer, "index_select", make)


def no_relu(patch: Patch, package: Package) -> None:
    def scores(q: Tensor, w: Tensor, keys: Tensor, rounded: bool) -> Tensor:
        keys = keys if keys.ndim == 3 else keys.expand(len(q), -1, -1)
        return torch.einsum("thd,tnd,th->tn", q, keys, w)

    patch.setattr(indexer, "index_scores_reference", scores)


def raw_pad(patch: Patch, package: Package) -> None:
    classes = package.model.classes.clone()
    classes[2] = 2  # token 2 itself does not occur
    patch.setitem(package.model._buffers, "classes", classes)


def repeated_primes(patch: Patch, package: Package) -> None:
    first, second = layers(package)[1].engram, layers(package)[4].engram
    patch.setitem(second._buffers, "primes", first.primes)
    patch.setitem(second._buffers, "offsets", first.offsets)


def shared_multipliers(patch: Patch, package: Package) -> None:
    first, second = layers(package)[1].engram, layers(package)[4].engram
    patch.setitem(second._buffers, "multipliers", first.multipliers)


def images_in_ngrams(patch: Patch, package: Package) -> None:
    def ngrams(self: DeepseekV41, batch: Any) -> Tensor:
        ids = torch.cat([batch.ids[:, None], batch.history[:, :3]], dim=1)
        return torch.where(ids < 0, 2, ids.clamp(min=0))

    patch.setattr(DeepseekV41, "ngrams", ngrams)


def images_only_themselves(patch: Patch, package: Package) -> None:
    """An image token becomes the pad class, but what lies behind it still counts."""

    def ngrams(self: DeepseekV41, batch: Any) -> Tensor:
        ids = torch.cat([batch.ids[:, None], batch.history[:, :3]], dim=1)
        return torch.where((ids < 0) | (ids == 4090), 2, ids.clamp(min=0))

    patch.setattr(DeepseekV41, "ngrams", ngrams)


def gate_on_images(patch: Patch, package: Package) -> None:
    around(patch, engram, "engram_gate", lambda real: lambda *a: real(*a[:5], None))


def text_bias_on_images(patch: Patch, package: Package) -> None:
    for layer in layers(package):
        patch.setitem(layer.ffn._parameters, "bias_vl", None)


def joint_gate_norm(patch: Patch, package: Package) -> None:
    def gate(s: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float, images: Tensor | None) -> Tensor:
        d = (s * weight * keys).sum(-1) * s.shape[-1] ** -0.5
        for x in (s, keys):
            d = d * torch.rsqrt(x.square().mean((1, 2)) + eps)[:, None]
        return s + torch.sigmoid(torch.copysign(d.abs().clamp(min=1e-6).sqrt(), d))[..., None] * value[:, None]

    patch.setattr(engram, "engram_gate", gate)


def _clamp(low_gate: bool, high_up_only: bool) -> Callable[[Patch, Package], None]:
    def change(patch: Patch, package: Package) -> None:
        def call(gate: Tensor, up: Tensor, limit: float, weights: Any = None, out_dtype: Any = None) -> Tensor:
            gate = gate.clamp(-limit if low_gate else None, limit)
            up = up.clamp(None if high_up_only else -limit, limit)
            y = torch.nn.functional.silu(gate) * up
            return y if weights is None else y * weights[:, None]

        patch.setattr(swiglu, "swiglu", call)

    return change


def shared_unclamped(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(self: Any, h8: Tensor) -> Tensor:
            return real(
                SimpleNamespace(
                    shared_w13=self.shared_w13, shared_w2=self.shared_w2, limit=0.0, numerics=self.numerics
                ),
                h8,
            )

        return call

    around(patch, MoE, "shared", make)


def weight_after_w2(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> Tensor:
            one = torch.ones(len(x), 1)
            parts = [real(x, ids[:, k : k + 1], one, *rest) * weights[:, k : k + 1] for k in range(ids.shape[1])]
            return torch.stack(parts).sum(0)

        return call

    around(patch, moe_experts, "experts", make)


def bias_in_weights(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(h: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scale: float) -> Any:
            ids, _ = real(h, gate, bias, k, normalise, scale)
            scores = torch.nn.functional.softplus(h.float() @ gate.float().t()).sqrt() + bias
            weights = scores.gather(1, ids)
            return ids, weights / weights.sum(-1, keepdim=True) * scale

        return call

    around(patch, moe_gate, "route", make)


def sigmoid_router(patch: Patch, package: Package) -> None:
    """The scoring of V3."""

    def route(h: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scale: float) -> Any:
        scores = torch.sigmoid(h.float() @ gate.float().t())
        ids = (scores + bias).topk(k).indices
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * scale

    patch.setattr(moe_gate, "route", route)


def no_normaliser_floor(patch: Patch, package: Package) -> None:
    patch.setattr(moe_gate, "NORMALISER_FLOOR", 0.0)


def high_nibble_first(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(packed: Tensor, *rest: Any) -> Tensor:
            byte = packed.view(torch.uint8)
            return real((byte << 4) | (byte >> 4), *rest)

        return call

    around(patch, quant, "dequantise_weight_fp4", make)


def blocks_of_128(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(codes: Tensor, scales: Tensor, *rest: Any) -> Tensor:
            rows, columns = torch.arange(scales.shape[0]) // 4 * 4, torch.arange(scales.shape[1]) // 4 * 4
            return real(codes, scales.view(torch.uint8)[rows][:, columns].view(scales.dtype), *rest)

        return call

    around(patch, quant, "dequantise_weight_fp8", make)


def sinkhorn_ends_on_rows(patch: Patch, package: Package) -> None:
    around(
        patch,
        hyper,
        "sinkhorn",
        lambda real: lambda a, eps, n: (lambda c: c / (c.sum(-1, keepdim=True) + eps))(real(a, eps, n)),
    )


def transposed_comb(patch: Patch, package: Package) -> None:
    around(patch, hyper, "hyper_expand", lambda real: lambda o, s, post, comb: real(o, s, post, comb.transpose(1, 2)))


def uniform_first_read(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda streams, *rest: real(streams._replace(pre=torch.full_like(streams.pre, 0.25)), *rest)

    around(patch, layers(package)[0], "forward", make)


def unshifted(patch: Patch, package: Package) -> None:
    """Each sublayer reads with its own mix, as V4 did."""

    def forward(self: Any, streams: hyper.Streams, batch: Any, kv: Any, shared: Any) -> Any:
        s = hyper.settle(streams)
        own, post, comb = self.hc_attn(s)
        o, shared = self.attn(self.attn_norm(hyper.hyper_collapse(s, own)), batch, kv, shared)
        s = hyper.hyper_expand(o, s, post, comb)
        own, post, comb = self.hc_ffn(s)
        o = self.ffn(self.ffn_norm(hyper.hyper_collapse(s, own)), batch.images)
        return hyper.Streams(hyper.hyper_expand(o, s, post, comb), own), shared

    patch.setattr(deepseek_v41.Layer, "forward", forward)


def _taps(output: bool) -> Callable[[Patch, Package], None]:
    """What the drafter sees: the collapse at the entry of its target layers, or their plain mean at the exit."""

    def change(patch: Patch, package: Package) -> None:
        seen: list[Tensor] = []
        for i in (7, 8, 9):

            def make(real: Callable[..., Any]) -> Callable[..., Any]:
                def call(streams: hyper.Streams, *rest: Any) -> Any:
                    out = real(streams, *rest)
                    at = out[0] if output else streams
                    s = hyper.settle(at)
                    seen.append(s.mean(1) if output else hyper.hyper_collapse(s, at.pre))
                    return out

                return call

            around(patch, layers(package)[i], "forward", make)

        def observe(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(rings: Any, taps: Any, *rest: Any) -> None:
                real(rings, tuple(seen), *rest)
                seen.clear()

            return call

        around(patch, package.drafter, "observe", observe)

    return change


def causal_draft(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, rows, begin, count, *rest: real(q, rows, begin, count - 4 + torch.arange(5), *rest)

    around(patch, deepseek_v41_dspark, "sink_attention", make)


def sliding_draft_window(patch: Patch, package: Package) -> None:
    """The context shrinks with the offset inside the block."""

    def make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, rows: Tensor, begin: Tensor, count: Tensor, *rest: Any) -> Tensor:
            return real(q, rows, begin + torch.arange(5), count - torch.arange(5), *rest)

        return call

    around(patch, deepseek_v41_dspark, "sink_attention", make)


def lost_open_row(patch: Patch, package: Package) -> None:
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: PagedLayer, a: Tensor, b: Tensor) -> Any:
            self.memory.storage.carry[self.plan.index].zero_()
            return real(self, a, b)

        return call

    around(patch, PagedLayer, "close_groups", make)


def pooled_evenly(patch: Patch, package: Package) -> None:
    patch.setattr(compress, "pool_groups", lambda a, b: a.mean(1))


def one_gate_for_all_channels(patch: Patch, package: Package) -> None:
    around(patch, compress, "pool_groups", lambda real: lambda a, b: real(a, b.mean(-1, keepdim=True).expand_as(b)))


def rope_before_key(patch: Patch, package: Package) -> None:
    """The index key is made from the rotated latent."""

    def make(real: Callable[..., None]) -> Callable[..., None]:
        return lambda latent, kv, freqs: real(rope.rotate(latent, kv.group_positions(), freqs), kv, freqs)

    for i in (2, 4, 6):
        around(patch, layers(package)[i].attn.indexer, "store_keys", make)


def no_wo_b_quantiser(patch: Patch, package: Package) -> None:
    """A linear that forgets to quantise its input."""
    package_grid = deepseek_v41.fp8_grid

    def grid(x: Tensor, numerics: Any) -> Tensor:
        return x if x.shape[-1] == 256 and x.ndim == 2 else package_grid(x, numerics)

    patch.setattr(deepseek_v41, "fp8_grid", grid)


def unrounded_probabilities(patch: Patch, package: Package) -> None:
    around(patch, attn_sparse, "sink_attention", lambda real: lambda *a: real(*a[:-1], False))


MUTATIONS = [
    Mutation("epsilon 1e-6", "1", tiny_streams, text={"rms_norm_eps": 1e-6}, fresh=True),
    Mutation("streams through float16", "1, 3", tiny_streams, half_precision_streams),
    Mutation("per-head query norm", "2", logits_72, per_head_query_norm),
    Mutation("stale index keys on open groups", "4", logits_141, stale_index_keys),
    Mutation("rope tables swapped", "5", logits_72, swapped_rope_tables, fresh=True),
    Mutation("group at its last token's position", "5", logits_72, last_token_of_group),
    Mutation("no inverse rotation", "5", logits_72, no_inverse_rotation),
    Mutation("first channels rotate", "5, 2.4", logits_72, first_channels_rotate),
    Mutation("half-split pairs", "5, 2.4", logits_72, half_split_pairs),
    Mutation("YaRN magnitude in the scale", "5", logits_72, yarn_magnitude),
    Mutation("newest block not kept", "6", logits_300, newest_block_free),
    Mutation("mean of a candidate block", "6", logits_300, mean_of_block),
    Mutation("no candidate filter", "6", logits_300, no_filter),
    Mutation("candidate source filters itself", "6", logits_300, own_filter),
    Mutation("pad id not mapped", "8", mapped, raw_pad),
    Mutation("primes repeat across layers", "8", logits_72, repeated_primes),
    Mutation("multipliers shared by layers", "8", logits_72, shared_multipliers),
    Mutation("images take part in n-grams", "8", image_span, images_in_ngrams),
    Mutation("images do not break n-grams", "8", image_span, images_only_themselves),
    Mutation("n-gram gate open on images", "8", image_span, gate_on_images),
    Mutation("joint norm in the n-gram gate", "8", logits_72, joint_gate_norm),
    Mutation("gate clamped on both sides", "9", clamped, _clamp(True, False)),
    Mutation("up clamped from above only", "9", clamped, _clamp(False, True)),
    Mutation("shared expert unclamped", "9", clamped, shared_unclamped),
    Mutation("routing weight after w2", "10", blocks, weight_after_w2),
    Mutation("bias in the routing weight", "10", logits_72, bias_in_weights),
    Mutation("no 1e-20 in the normaliser", "10", silent_router, no_normaliser_floor),
    Mutation("image bias ignored", "2.12", image_span, text_bias_on_images),
    Mutation("sigmoid router", "2.12", logits_72, sigmoid_router),
    Mutation("high nibble first", "11", logits_72, high_nibble_first, fresh=True),
    Mutation("scales of 128 x 128 blocks", "11", logits_72, blocks_of_128, fresh=True),
    Mutation("Sinkhorn ends on rows", "12", logits_72, sinkhorn_ends_on_rows),
    Mutation("comb transposed", "12", logits_72, transposed_comb),
    Mutation("uniform first read", "13", engram_first, uniform_first_read),
    Mutation("uniform first read, as configured", "13", wiring, uniform_first_read),
    Mutation("tap is the collapse", "13", draft, _taps(output=False)),
    Mutation("tap is the layer's output", "13, 3", draft, _taps(output=True)),
    Mutation("draft block is causal", "3", draft, causal_draft),
    Mutation("draft window slides", "3", draft, sliding_draft_window),
    Mutation("chunks drop the open row", "14", logits_72, lost_open_row),
    Mutation("hc_shifted false", "2.2", logits_72, unshifted),
    Mutation("sink scaled", "2.5", logits_72, change_sink(lambda sink: sink * 128**-0.5)),
    Mutation("sink left out", "2.5", logits_72, change_sink(lambda sink: torch.full_like(sink, -1e30))),
    Mutation("sink gives a value", "2.5", logits_72, sink_in_numerator),
    Mutation("window and entries deduplicated", "2.5", logits_72, no_duplicates),
    Mutation("window one row short", "2.5", logits_72, shorter_window),
    Mutation("pooling without the gate", "2.6", logits_72, pooled_evenly),
    Mutation("one gate for all channels", "2.6", logits_72, one_gate_for_all_channels),
    Mutation("index key from the rotated latent", "2.7", logits_141, rope_before_key),
    Mutation("no relu in index scores", "2.7", logits_141, no_relu),
    Mutation("a linear without its quantiser", "6.2", blocks, no_wo_b_quantiser),
    Mutation("probabilities not rounded", "2.5", blocks, unrounded_probabilities),
]

# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(
    checkpoint: Callable[[str], Path],
    slow_run: Callable[[str], SlowRun],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bench:
    return Bench(checkpoint, slow_run, tmp_path_factory.mktemp("mutations"))


@pytest.fixture
def before_load(request: pytest.FixtureRequest) -> Iterator[Mutation]:
    """A change that acts while the package is built is in force for the whole test."""
    change: Mutation = request.param
    with Patch.context() as patch, backends.reference():
        if change.fresh:
            change.change(patch, None)
        yield change


CHECKS = sorted({change.check for change in MUTATIONS}, key=lambda check_: check_.__name__)


@pytest.mark.parametrize("name", [check_.__name__ for check_ in CHECKS])
def test_check_passes_on_the_package_as_it_is(name: str, bench: Bench) -> None:
    {check_.__name__: check_ for check_ in CHECKS}[name](bench, None)


@pytest.mark.parametrize("before_load", MUTATIONS, ids=lambda change: change.name, indirect=True)
def test_mutation_is_caught(before_load: Mutation, bench: Bench) -> None:
    change = before_load
    with pytest.raises(FAILURES):
        change.check(bench, change)


def test_names_are_unique() -> None:
    assert len({change.name for change in MUTATIONS}) == len(MUTATIONS)
