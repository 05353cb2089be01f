"""Every block that ftllm 1.9.0 dumps, beside the package's block fed with ftllm's own inputs.

Four departures of ftllm from profile R are met on its own ground. It cuts the result of a norm to bfloat16 where R
rounds, but for the latent's: the package's float32 norm is cut in the same way. `wo_a` reads FP8 activations, as in
profile P. The constant of the index weight is not rounded into it, and index scores stay float32.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benthic.kernels import attn_sparse, compress, gemm, hyper, indexer, moe_experts, moe_gate, norm, quant, rope
from benthic.models.modules import fp8_grid
from benthic.testing.tokenizers import build_raw_tokenizer
from tests.oracle import random_checkpoint
from tests.oracle.blocks import Pair
from tests.oracle.conftest import tokens
from tests.oracle.package import Package
from tests.oracle.slow_v41 import Array, engram_multipliers

PROMPT, STEPS = 149, 5  # an odd prompt: the first decode step closes a group that the prefill left open
TEXT = {"index_n_heads": 16, "index_topk": 64, "candidate_topk_blocks": 16}  # small, so that choices are made


@dataclass
class Run:
    """One run of ftllm: where its dumps are, the ids it read, the logits after the prompt and after each token."""

    folder: Path
    dumps: Path
    ids: list[int]
    logits: Array  # [STEPS, V]

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """Suffix, first position and rows of each forward."""
        return [("", 0, PROMPT)] + [(f"_p{p}", p, 1) for p in range(PROMPT, len(self.ids))]

    def part(self, name: str, suffix: str, *shape: int) -> Tensor:
        data = np.fromfile(self.dumps / f"fl_{name}{suffix}.bin", dtype=np.float32)
        return torch.from_numpy(data.reshape(shape))

    def rows(self, name: str, *shape: int) -> Tensor:
        """[T, *shape], the prompt's rows, then those of the decode steps."""
        return torch.cat([self.part(name, suffix, count, *shape) for suffix, _, count in self.parts])


def run(folder: Path) -> Run:
    """Write a checkpoint under `folder` and run ftllm on it, about a minute on one core."""
    checkpoint = random_checkpoint.write(folder / "checkpoint", "tiny_512", 0, TEXT)
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    build_raw_tokenizer(text["vocab_size"]).save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    layers, classes = text["engram_layer_ids"], text["engram_compressed_vocab_size"]
    mult = [[str(m) for m in engram_multipliers(layer, classes, text["engram_max_ngram_size"])] for layer in layers]
    meta = {"token_map": list(range(classes)), "compressed_vocab_size": classes, "pad_token_id": 2}
    (checkpoint / "engram_meta.json").write_text(json.dumps({**meta, "engram_layer_ids": layers, "multipliers": mult}))
    dumps = folder / "dumps"
    dumps.mkdir()
    prompt = tokens(PROMPT, 4)
    settings = {
        "FASTLLM_DSV41_REFERENCE_MATH": "1",
        "FASTLLM_DSV41_DUMP_DIR": str(dumps),
        "OMP_NUM_THREADS": "1",
        "PATH": os.defpath,
        "HOME": str(folder),
    }
    driver = Path(__file__).with_name("drive_ftllm.py")
    command = [sys.executable, str(driver), str(checkpoint), str(folder / "out.npz"), json.dumps(prompt), str(STEPS)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, errors="replace", timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "out.npz") as out:
        made, logits = out["tokens"].tolist(), out["logits"].astype(np.float64)
    return Run(checkpoint, dumps, prompt + made[: STEPS - 1], logits)


def cut(x: Tensor) -> Tensor:
    """float32 -> bfloat16 by dropping bits."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def cut_norm(x: Tensor, module: Any) -> Tensor:
    """The package's norm in float32 of bfloat16 values, cut."""
    return cut(norm.rms_norm(x.float(), module.weight, module.eps)).bfloat16()


def _pair(block: str, layer: int, got: Tensor, want: Tensor) -> Pair:
    return Pair(block, layer, got.double().numpy(), want.double().numpy())


def pairs(run: Run, package: Package) -> Iterator[Pair]:
    """`package` is of profile `reference` on `run.folder`."""
    text = package.config.text
    streams = run.rows("embed", text.hc_mult, text.hidden_size)
    yield _pair("embedding", -1, package.model.embed(torch.tensor(run.ids)).float(), streams[:, 0])
    first = torch.zeros(streams.shape[:2])
    first[:, 0] = 1
    pre = first
    shared: dict[str, Any] = {}
    for i, layer in enumerate(package.model.layers):
        yield from _layer(run, package, i, layer, streams, pre, shared)
        streams = run.rows(f"layer{i}", text.hc_mult, text.hidden_size)
        pre = run.rows(f"layer{i}_ffn_pre", text.hc_mult)


def _around(run: Run, i: int, part: str, layer: Any, s: Tensor, pre: Tensor, after: str) -> Iterator[Pair]:
    """The residual streams around one sublayer. s [T, S, D] float32 holding bfloat16 values."""
    streams, width = s.shape[1:]
    mixed = getattr(layer, f"hc_{part}")(s.bfloat16())
    for k, (name, shape) in enumerate((("pre", (streams,)), ("post", (streams,)), ("comb", (streams, streams)))):
        yield _pair(f"mixes: {name}", i, mixed[k], run.rows(f"layer{i}_{part}_{name}", *shape))
    read = hyper.hyper_collapse(s.bfloat16(), pre).float()
    wanted = run.rows(f"layer{i}_{part}_in", width)
    yield _pair("sublayer norm", i, cut_norm(read, getattr(layer, f"{part}_norm")), wanted)
    out = run.rows(f"layer{i}_{part}", width).bfloat16()
    post, comb = run.rows(f"layer{i}_{part}_post", streams), run.rows(f"layer{i}_{part}_comb", streams, streams)
    yield _pair("expand", i, hyper.hyper_expand(out, s.bfloat16(), post, comb).float(), run.rows(after, streams, width))


def _layer(
    run: Run, package: Package, i: int, layer: Any, s: Tensor, pre: Tensor, shared: dict[str, Any]
) -> Iterator[Pair]:
    text, numerics = package.config.text, package.numerics
    heads, width = text.num_attention_heads, text.head_dim
    ids = torch.tensor(run.ids)
    at = torch.arange(len(ids))
    if layer.engram is not None:  # not dumped: shows in the mixes and in the streams behind it
        past = torch.nn.functional.pad(ids, (3, 0), value=2)
        ngrams = torch.stack([past[3 - k : len(past) - k] for k in range(4)], 1)
        s = layer.engram(s.bfloat16(), ngrams, None).float()
    yield from _around(run, i, "attn", layer, s, pre, f"layer{i}_hidden_attn")

    a: Any = layer.attn
    h = run.rows(f"layer{i}_attn_in", text.hidden_size).bfloat16()
    h8 = fp8_grid(h, numerics)
    qr = run.rows(f"layer{i}_qr", text.q_lora_rank)
    qnorm = run.rows(f"layer{i}_qnorm", text.q_lora_rank)
    qproj = run.rows(f"layer{i}_qproj", heads, width)
    q = run.rows(f"layer{i}_q", heads, width)
    yield _pair("wq_a", i, a.wq_a(h8), qr)
    yield _pair("q_norm", i, cut_norm(qr, a.q_norm), qnorm)
    qa8 = fp8_grid(qnorm.bfloat16(), numerics)
    yield _pair("wq_b", i, a.wq_b(qa8).unflatten(-1, (heads, width)), qproj)
    yield _pair("query rotation", i, rope.rotate(qproj.bfloat16(), at, a.freqs), q)
    kproj, knorm = run.rows(f"layer{i}_kv_proj", width), run.rows(f"layer{i}_kv_norm", width)
    kw = run.rows(f"layer{i}_kv", width)
    yield _pair("wkv", i, a.wkv(h8), kproj)
    yield _pair("kv_norm", i, cut_norm(kproj, a.kv_norm), knorm)
    yield _pair("window row", i, fp8_grid(rope.rotate(knorm.bfloat16(), at, a.freqs), numerics), kw)

    if layer.plan.ratio:
        yield from _compressed(run, package, i, layer, h, qa8, shared)

    o = run.rows(f"layer{i}_attn_o", heads, width)
    raw = run.rows(f"layer{i}_attn_o_raw", heads, width)
    yield _pair("attention", i, _attend(run, package, layer, q, kw, shared), raw)
    turned = rope.rotate(raw.bfloat16(), at, a.freqs, inverse=True)
    yield _pair("inverse rotation", i, quant.roundtrip_fp8(turned), o)
    groups = o.bfloat16().reshape(len(ids), text.o_groups, -1)
    woa = run.rows(f"layer{i}_woa", text.o_groups, text.o_lora_rank)
    yield _pair("wo_a", i, gemm.grouped_linear(groups, a.wo_a.weight.unflatten(0, (text.o_groups, -1))), woa)
    got = a.wo_b(fp8_grid(woa.flatten(1).bfloat16(), numerics))
    yield _pair("wo_b", i, got, run.rows(f"layer{i}_attn", text.hidden_size))

    s = run.rows(f"layer{i}_hidden_attn", text.hc_mult, text.hidden_size)
    yield from _around(run, i, "ffn", layer, s, run.rows(f"layer{i}_attn_pre", text.hc_mult), f"layer{i}")
    f: Any = layer.ffn
    h = run.rows(f"layer{i}_ffn_in", text.hidden_size).bfloat16()
    chosen = run.rows(f"layer{i}_expert_idx", f.experts_per_token).long()
    weights = run.rows(f"layer{i}_expert_score", f.experts_per_token)
    got, got_weights = moe_gate.route(h, f.gate.weight, f.bias, f.experts_per_token, f.normalise, f.routed_scale)
    yield _pair("chosen experts", i, got, chosen)
    yield _pair("expert weights", i, got_weights, weights)
    h8 = fp8_grid(h, numerics)
    routed = moe_experts.experts(h8, chosen, weights, f.w13, f.w2, f.limit, numerics.quantise, numerics.round_hidden)
    out = (routed + f.shared(h8).float()).bfloat16()
    yield _pair("experts", i, out, run.rows(f"layer{i}_ffn", text.hidden_size))


def _compressed(
    run: Run, package: Package, i: int, layer: Any, h: Tensor, qa8: Tensor, shared: dict[str, Any]
) -> Iterator[Pair]:
    text, ratio, a = package.config.text, layer.plan.ratio, layer.attn
    groups = len(run.ids) // ratio
    first = torch.arange(groups) * ratio
    last = run.parts[-1][0]
    if a.compressor is not None:
        entries = run.part(f"layer{i}_ckv", last, -1, text.head_dim)[:groups]
        keys = run.part(f"layer{i}_idxk", last, -1, text.index_head_dim)[:groups]
        c = a.compressor
        if ratio == 1:
            latent = c.norm(c.wkv(h))
        else:
            part = slice(0, groups * ratio)
            pooled = compress.pool_groups(*(w(h[part]).unflatten(0, (groups, ratio)) for w in (c.wkv, c.wgate)))
            latent = c.norm(pooled.to(h.dtype))
        yield _pair("compressed entry", i, quant.roundtrip_nvfp4(rope.rotate(latent, first, a.freqs)), entries)
        key = rope.rotate(cut_norm(a.indexer.wk(latent), a.indexer.k_norm), first, a.freqs)
        yield _pair("index key", i, quant.roundtrip_mxfp4(key), keys)
        shared |= {"entries": entries, "keys": keys, "candidates": None}
    if a.indexer is None:
        return
    at = torch.arange(len(run.ids))
    qi, _ = a.indexer.query(h, qa8, at, a.freqs)
    dumped = run.rows(f"layer{i}_idxq", a.indexer.heads, a.indexer.width)
    weights = run.rows(f"layer{i}_idxw", a.indexer.heads)
    yield _pair("index query", i, qi, dumped)
    constant = a.indexer.width**-0.5 * a.indexer.heads**-0.5
    yield _pair("index weight", i, a.indexer.weights_proj(h).float() * constant, weights)
    chosen: list[Tensor] = []
    kept: list[Tensor] = []
    source, size = text.candidate_source_layer_id, text.candidate_block_size
    for suffix, start, count in run.parts:
        visible = (torch.arange(start, start + count) + 1) // ratio
        width = int(visible.max())
        scores = run.part(f"layer{i}_score", suffix, count, -1)
        part = slice(start, start + count)
        mine = indexer.index_scores(dumped[part], weights[part], shared["keys"][:width], False)
        limit = None if i <= source else shared["candidates"][start : start + count]
        seen = torch.arange(width) < visible[:, None]
        if limit is not None:
            seen &= indexer._in_candidates(limit, width, size)
        yield _pair("index score", i, mine[seen], scores[:, :width][seen])
        clean = scores[:, :width].masked_fill(~seen, 0.0)
        entries_ = indexer.select_entries(clean, visible, text.index_topk, limit, size)
        top = run.part(f"layer{i}_topk", suffix, count, -1).int()
        wide = torch.full_like(entries_, -1)
        wide[:, : min(top.shape[1], text.index_topk)] = top[:, : text.index_topk]
        yield _pair("chosen entries", i, entries_, wide)
        chosen.append(wide)
        if i == source:
            blocks = indexer.candidate_blocks(clean, visible, text.candidate_topk_blocks, size)
            mask = run.part(f"layer{i}_cand", suffix, count, -1)
            got = torch.zeros(count, mask.shape[1] + 1)
            got.scatter_(1, torch.where(blocks < 0, mask.shape[1], blocks).long(), 1.0)
            yield _pair("candidate blocks", i, got[:, :-1], mask)
            kept.append(blocks)
    shared["chosen"] = torch.cat(chosen)
    if i == source:
        shared["candidates"] = torch.cat(kept)


def _attend(run: Run, package: Package, layer: Any, q: Tensor, kw: Tensor, shared: dict[str, Any]) -> Tensor:
    text = package.config.text
    at = torch.arange(len(run.ids))
    begin = (at + 1 - text.sliding_window).clamp(min=0)
    entries, records = (shared["entries"], shared["chosen"]) if layer.plan.ratio else (None, None)
    return attn_sparse.sink_attention(
        q.bfloat16(),
        kw.bfloat16(),
        begin,
        at + 1 - begin,
        entries,
        None if records is None else records.long(),
        layer.attn.attn_sink,
        text.head_dim**-0.5,
        package.numerics.round_probs,
    )
