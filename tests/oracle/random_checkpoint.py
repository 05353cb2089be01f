"""Seeded random checkpoints in the official layout, written without the package: names, shapes and initialisation from
sections 5 and 8 of the model specification. The package's reader must accept these bytes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.slow_v41 import _E4M3_SIZES, Array, _nearest, engram_primes

CONFIGS = Path(__file__).parents[2] / "benthic" / "testing" / "configs"


class _Writer:
    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.tensors: dict[str, tuple[str, Array]] = {}

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape)

    def f32(self, name: str, x: Array) -> None:
        self.tensors[name] = ("F32", np.ascontiguousarray(x, dtype=np.float32))

    def bf16(self, name: str, x: Array) -> None:
        self.tensors[name] = (
            "BF16",
            (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16),
        )

    def norm(self, name: str, width: int) -> None:
        self.bf16(name, 1 + 0.1 * self.normal(width))

    def linear16(self, name: str, out: int, width: int, gain: float = 1.0) -> None:
        self.bf16(f"{name}.weight", gain * self.normal(out, width) / math.sqrt(width))

    def linear8(self, name: str, out: int, width: int, rows: int = 32, std: float | None = None) -> None:
        """FP8 codes from a normal of width 64 and scales that differ from block to block."""
        x = 64 * self.normal(out, width)
        codes = _nearest(_E4M3_SIZES, np.minimum(np.abs(x), 448)) | np.where(x < 0, 128, 0)
        middle = round(math.log2((std or width**-0.5) / 64))
        shape = (math.ceil(out / rows), width // 32)
        exponents = middle + self.random.integers(-1, 2, shape)
        self.tensors[f"{name}.weight"] = ("F8_E4M3", codes.astype(np.uint8))
        self.tensors[f"{name}.scale"] = ("F8_E8M0", (exponents + 127).astype(np.uint8))

    def linear4(self, name: str, out: int, width: int) -> None:
        self.tensors[f"{name}.weight"] = ("I8", self.random.integers(0, 256, (out, width // 2)).astype(np.uint8))
        exponents = round(math.log2(width**-0.5 / 3)) + self.random.integers(-1, 1, (out, width // 32))
        self.tensors[f"{name}.scale"] = ("F8_E8M0", (exponents + 127).astype(np.uint8))

    def save(self, folder: Path, config: dict[str, Any]) -> None:
        """Two shards and an index, so that readers meet both."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        names = sorted(self.tensors)
        parts = [names[::2], names[1::2]]
        weight_map: dict[str, str] = {}
        for i, part in enumerate(parts):
            file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
            header: dict[str, Any] = {}
            at = 0
            for name in part:
                kind, data = self.tensors[name]
                header[name] = {"dtype": kind, "shape": list(data.shape), "data_offsets": [at, at + data.nbytes]}
                at += data.nbytes
                weight_map[name] = file
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            with (folder / file).open("wb") as f:
                f.write(len(text).to_bytes(8, "little") + text)
                for name in part:
                    f.write(self.tensors[name][1].tobytes())
        total = sum(data.nbytes for _, data in self.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _block(w: _Writer, t: dict[str, Any], name: str, layer: int, experts: int, images: bool) -> None:
    d, m, rank = t["hidden_size"], t["hc_mult"], t["q_lora_rank"]
    inner, dh = t["num_attention_heads"] * t["head_dim"], t["head_dim"]
    w.norm(f"{name}.attn_norm.weight", d)
    w.norm(f"{name}.ffn_norm.weight", d)
    for part in ("attn", "ffn"):
        base = np.concatenate([np.full(m, -3.0), np.zeros(m), np.where(np.eye(m).ravel() > 0, 3.0, -3.0)])
        base[layer % m] = 3.0
        w.f32(f"{name}.hc_{part}_fn", w.normal((2 + m) * m, m * d) / math.sqrt(m * d))
        w.f32(f"{name}.hc_{part}_base", base)
        w.f32(f"{name}.hc_{part}_scale", w.random.uniform(0.3, 1.0, 3))
    a = f"{name}.attn"
    w.f32(f"{a}.attn_sink", 0.5 * w.normal(t["num_attention_heads"]))
    w.linear8(f"{a}.wq_a", rank, d)
    w.norm(f"{a}.q_norm.weight", rank)
    w.norm(f"{a}.kv_norm.weight", dh)
    w.linear8(f"{a}.wq_b", inner, rank)
    w.linear8(f"{a}.wkv", dh, d)
    w.linear8(f"{a}.wo_a", t["o_groups"] * t["o_lora_rank"], inner // t["o_groups"])
    w.linear8(f"{a}.wo_b", d, t["o_groups"] * t["o_lora_rank"])
    f = f"{name}.ffn"
    w.linear16(f"{f}.gate", experts, d)
    w.f32(f"{f}.gate.bias", 0.1 * w.normal(experts))
    if images:
        w.f32(f"{f}.gate.bias_vl", 0.5 * w.normal(experts))
    for e in range(experts):
        w.linear4(f"{f}.experts.{e}.w1", t["moe_intermediate_size"], d)
        w.linear4(f"{f}.experts.{e}.w3", t["moe_intermediate_size"], d)
        w.linear4(f"{f}.experts.{e}.w2", d, t["moe_intermediate_size"])
    shared = t["moe_intermediate_size"] * t["n_shared_experts"]
    w.linear8(f"{f}.shared_experts.w1", shared, d)
    w.linear8(f"{f}.shared_experts.w3", shared, d)
    w.linear8(f"{f}.shared_experts.w2", d, shared)


def write(folder: Path, name: str = "tiny", seed: int = 0, text: dict[str, Any] | None = None) -> Path:
    """A checkpoint of the named config (`tiny`, `tiny_512`), with values of text_config replaced by `text`."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    config["text_config"] |= text or {}
    t, v = config["text_config"], config.get("vision_config")
    w = _Writer(seed)
    d, m, dh, di = t["hidden_size"], t["hc_mult"], t["head_dim"], t["index_head_dim"]
    w.bf16("embed.weight", w.normal(t["vocab_size"], d))
    w.linear16("head", t["vocab_size"], d)
    w.norm("norm.weight", d)
    depth = t["num_hidden_layers"]
    for i in range(depth):
        _block(w, t, f"layers.{i}", i, t["n_routed_experts"], v is not None)
        a = f"layers.{i}.attn"
        if i in t["kv_source_layer_ids"]:
            w.linear16(f"{a}.compressor.wkv", dh, d)
            if t["compress_ratios"][i] > 1:
                w.linear16(f"{a}.compressor.wgate", dh, d)
            w.norm(f"{a}.compressor.norm.weight", dh)
            w.linear16(f"{a}.indexer.wk", di, dh)
            w.norm(f"{a}.indexer.k_norm.weight", di)
        if i in t["index_source_layer_ids"]:
            w.linear8(f"{a}.indexer.wq_b", t["index_n_heads"] * di, t["q_lora_rank"])
            w.linear16(f"{a}.indexer.weights_proj", t["index_n_heads"], d)
    sizes, heads = t["engram_max_ngram_size"] - 1, t["engram_n_heads"]
    primes = engram_primes(len(t["engram_layer_ids"]), sizes, heads, t["engram_vocab_size"])
    for layer, rows in zip(t["engram_layer_ids"], primes, strict=True):
        e = f"layers.{layer}.engram"
        w.linear8(f"{e}.embed", int(rows.sum()), t["engram_head_dim"], rows=1, std=1.0)
        w.linear8(f"{e}.wkv", (m + 1) * d, sizes * heads * t["engram_head_dim"])
        w.bf16(f"{e}.q_weight", 1 + 0.1 * w.normal(m, d))
        w.bf16(f"{e}.k_weight", 1 + 0.1 * w.normal(m, d))
    stages = t["num_nextn_predict_layers"]
    for i in range(stages):
        _block(w, t, f"mtp.{i}", depth + i, t["dspark_n_routed_experts"], v is not None)
    if stages:
        w.linear8("mtp.0.main_proj", d, d * len(t["dspark_target_layer_ids"]))
        w.norm("mtp.0.main_norm.weight", d)
        last = f"mtp.{stages - 1}"
        w.norm(f"{last}.norm.weight", d)
        w.bf16(f"{last}.markov_head.embed.weight", w.normal(t["vocab_size"], t["dspark_markov_rank"]))
        w.linear16(f"{last}.markov_head.head", t["vocab_size"], t["dspark_markov_rank"])
        w.linear16(f"{last}.confidence_head.proj", 1, d + t["dspark_markov_rank"], gain=0.2)
    if v is not None:
        for part in ("start", "end", "newline"):
            w.bf16(f"image_{part}", w.normal(d))
        dv, inner = v["hidden_size"], v["intermediate_size"]

        def biased(name: str, out: int, width: int) -> None:
            w.linear16(name, out, width)
            w.bf16(f"{name}.bias", 0.1 * w.normal(out))

        biased("vision.patch_embed.proj", dv, 3 * v["patch_size"] ** 2)
        for b in range(v["num_hidden_layers"]):
            w.norm(f"vision.blocks.{b}.norm1.weight", dv)
            w.norm(f"vision.blocks.{b}.norm2.weight", dv)
            biased(f"vision.blocks.{b}.attn.wqkv", 3 * dv, dv)
            biased(f"vision.blocks.{b}.attn.wo", dv, dv)
            w.linear16(f"vision.blocks.{b}.mlp.w1", 2 * inner, dv)
            w.linear16(f"vision.blocks.{b}.mlp.w2", dv, inner)
        w.norm("vision.norm.weight", dv)
        biased("aligner.w1", d, dv * v["downsample_ratio"] ** 2)
        biased("aligner.w2", d, d)
    w.save(folder, config)
    return folder
