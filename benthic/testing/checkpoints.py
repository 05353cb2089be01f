"""Seeded random checkpoints in the official format, small enough for any test. Model specification, section 8.

Values come from numpy, tensor by tensor from (seed, name), so that they are the same on every torch version and a
changed key moves only the tensors it concerns. They have the spread that section 8 advises: nothing saturates, every
gate, sink, bias and scale differs from its neutral value.
"""

import json
import math
import zlib
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benthic.kernels.quant import quantise_fp8, quantise_weight_fp8
from benthic.models.deepseek_v41_config import ModelConfig, TensorSpec, engram_constants, tensors
from benthic.models.weights import SHARD_BYTES, write_checkpoint

CONFIGS = ("tiny", "tiny_512", "v41_flash")


def config_path(name: str) -> Path:
    """The config.json of `tiny`, `tiny_512` (head width 512) or `v41_flash` (the release)."""
    assert name in CONFIGS, f"{name!r} is none of {CONFIGS}"
    with as_file(files("benthic.testing") / "configs" / f"{name}.json") as path:
        return path


def tiny_config(name: str = "tiny", **overrides: Any) -> dict[str, Any]:
    """A tiny configuration as parsed JSON, with keys of text_config replaced.

    Overriding an Engram key recomputes `engram_num_embeddings`, unless that is given. The key `vision_config` replaces
    the vision part; None drops it.
    """
    data: dict[str, Any] = json.loads(config_path(name).read_text())
    if "vision_config" in overrides:
        vision = overrides.pop("vision_config")
        data.pop("vision_config")
        if vision is not None:
            data["vision_config"] = vision
    text = data["text_config"]
    text.update(overrides)
    if "engram_num_embeddings" not in overrides and any(key.startswith("engram") for key in overrides):
        tables = engram_constants(
            tuple(text["engram_layer_ids"]),
            text["engram_max_ngram_size"],
            text["engram_n_heads"],
            text["engram_vocab_size"],
            text["engram_compressed_vocab_size"],
        )
        text["engram_num_embeddings"] = [table.rows for table in tables]
    return data


def make_tiny(
    path: str | Path, name: str = "tiny", seed: int = 0, *, shard_bytes: int = SHARD_BYTES, **overrides: Any
) -> Path:
    """Write a random checkpoint folder; the same arguments give the same bytes. It has no tokenizer.

    name, overrides   as in `tiny_config`
    Cost              about 2 s for 37 M parameters on one core, 33 MB of disk.
    """
    data = tiny_config(name, **overrides)
    return write_checkpoint(path, data, random_tensors(ModelConfig.from_json(data), seed), shard_bytes=shard_bytes)


def random_tensors(config: ModelConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the inventory with random content."""
    for name, spec in tensors(config).items():
        if not name.endswith(".scale"):  # a scale comes with its weight
            yield from _draw(name, spec, np.random.default_rng([seed, zlib.crc32(name.encode())]), config)


def _draw(name: str, spec: TensorSpec, rng: np.random.Generator, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    scale_name = name.removesuffix(".weight") + ".scale"
    fan_in = spec.shape[-1]
    if spec.dtype == "I8":
        codes, scales = _random_fp4(spec.shape, rng)
        yield name, codes
        yield scale_name, scales
    elif spec.dtype == "F8_E4M3":
        values = _normal(rng, spec.shape)
        table = spec.group == "engram.tables"
        codes, scales = quantise_fp8(values) if table else quantise_weight_fp8(values / math.sqrt(fan_in))
        yield name, codes
        yield scale_name, scales
    elif spec.dtype == "F32":
        yield name, _float_parameter(name, spec.shape, rng, config)
    elif len(spec.shape) == 2 and not name.endswith(("q_weight", "k_weight")):
        embedding = name.endswith("embed.weight")
        yield name, (_normal(rng, spec.shape) / (1.0 if embedding else math.sqrt(fan_in))).bfloat16()
    elif name.endswith(".bias"):
        yield name, (0.1 * _normal(rng, spec.shape)).bfloat16()
    elif name.startswith("image_"):
        yield name, _normal(rng, spec.shape).bfloat16()
    else:  # norms, and the Engram gate's two weights
        yield name, (1 + 0.1 * _normal(rng, spec.shape)).bfloat16()


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def _random_fp4(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Any of the 256 bytes, under scales of two neighbouring powers of two that keep activations out of the clamp."""
    rows, half = shape
    exponent = min(-5, round(math.log2(1 / (2.9 * math.sqrt(2 * half)))))  # 2.9: spread of the 16 codes
    codes = rng.integers(-128, 128, shape, dtype=np.int8)
    scales = (127 + exponent - rng.integers(0, 2, (rows, 2 * half // 32))).astype(np.uint8)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def _float_parameter(name: str, shape: tuple[int, ...], rng: np.random.Generator, config: ModelConfig) -> Tensor:
    if name.endswith("_fn"):
        return _normal(rng, shape) / math.sqrt(shape[-1])
    if name.endswith("_base"):
        return _hyper_base(config.text.hc_mult, int(name.split(".")[1]))
    if name.endswith("_scale"):
        return torch.from_numpy(np.exp(rng.uniform(math.log(0.01), 0.0, shape)).astype(np.float32))
    if name.endswith("attn_sink"):
        return 0.5 * _normal(rng, shape)
    if name.endswith("bias_vl"):
        return 0.3 * _normal(rng, shape)  # far enough from `bias` that mixing the two up shows
    assert name.endswith(".bias"), name
    return 0.1 * _normal(rng, shape)


def _hyper_base(streams: int, layer: int) -> Tensor:
    """Read mostly copy (layer mod streams), write to all alike, keep the streams mostly apart."""
    pre = torch.full((streams,), -3.0)
    pre[layer % streams] = 3.0
    comb = torch.full((streams, streams), -3.0).fill_diagonal_(3.0)
    return torch.cat([pre, torch.zeros(streams), comb.flatten()])
