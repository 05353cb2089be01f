"""The smallest things that train: a model config, a trainer, a corpus."""

import json
import lzma
import random
from pathlib import Path
from typing import Any

import torch

from benthic.models.deepseek_v41_config import ModelConfig
from benthic.testing.checkpoints import tiny_config
from benthic.train import backbone, loop
from benthic.types import Numerics

IDS = loop.Ids(bos=0, eos=1, pad=2, think_close=5)

NAMES = ("Lily", "Tom", "Anna", "Ben", "Mia", "Sam")
THINGS = ("dog", "boat", "kite", "garden", "letter", "river", "lamp", "apple", "song", "window")
DEEDS = ("found", "painted", "lost", "carried", "watched", "wanted", "borrowed", "repaired")
PLACES = ("near the sea", "in the old house", "behind the hill", "under a tree", "at the market", "by the bridge")


def story(rng: random.Random, sentences: int = 4) -> str:
    return " ".join(
        f"{rng.choice(NAMES)} {rng.choice(DEEDS)} a {rng.choice(THINGS)} {rng.choice(PLACES)}."
        for _ in range(sentences)
    )


def pairs(seed: int, count: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    out: list[dict[str, str]] = []
    for _ in range(count):
        first, second = rng.sample(THINGS, 2)
        prompt = f"Write a short story with the words {first} and {second}, and {rng.choice(DEEDS)}."
        out.append({"kind": "story", "prompt": prompt, "response": story(rng)})
    return out


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    return path


def write_corpus(folder: Path, train: list[list[dict[str, str]]], valid: list[dict[str, str]]) -> Path:
    folder.mkdir(parents=True)
    for number, part in enumerate(train):
        write_lines(folder / f"train-{number}.jsonl.xz", [json.dumps(row) for row in part])
    write_lines(folder / "valid.jsonl.xz", [json.dumps(row) for row in valid])
    return folder


def small_corpus(folder: Path) -> Path:
    return write_corpus(folder, [pairs(1, 60), pairs(2, 20)], pairs(3, 12))


def small_json(**overrides: Any) -> dict[str, Any]:
    """A model config as small as the checks allow: four layers, every kind of layer, 512 ids."""
    keys: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_groups": 1,
        "o_lora_rank": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 2, 1, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 16,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 8,
        "hc_sinkhorn_iters": 4,
        "engram_layer_ids": [1],
        "engram_vocab_size": 100,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": 440,  # of the 512 ids of `testing.tokenizers`
        "num_nextn_predict_layers": 1,
        "dspark_noise_token_id": 494,
        "dspark_target_layer_ids": [2, 3],
        "dspark_n_routed_experts": 4,
    }
    data = tiny_config(**keys | overrides)
    return data | {"image_token_id": 503}


def small_trainer(settings: loop.Settings, ids: loop.Ids = IDS, numerics: Numerics = backbone.PLAIN) -> loop.Trainer:
    config = ModelConfig.from_json(small_json())
    classes = torch.arange(config.text.vocab_size)
    return loop.Trainer(config, classes, ids, settings, torch.device("cpu"), numerics)
