"""The smallest things that train: a model config, a trainer, a corpus."""

import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.deepseek_v41_vision import geometry
from benthic.skills.shapes import Picture, Shape
from benthic.testing.checkpoints import tiny_config
from benthic.train import backbone, data, loop
from benthic.train.loss import Ids
from benthic.train.settings import Settings
from benthic.types import Numerics

IMAGE = 503
IDS = Ids(bos=0, eos=1, pad=2, assistant=4, think_open=6, think_close=5, image=IMAGE)


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
    config = tiny_config(**keys | overrides)
    vision = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
    geometry = {"min_pixels": 1764, "max_image_tokens": 20}  # 4 tokens and more
    return config | {"image_token_id": IMAGE, "vision_config": config["vision_config"] | vision | geometry}


def only_prose(**values: Any) -> Settings:
    """Settings of a run with nothing but prose in rows of one length."""
    plain: dict[str, Any] = {"parts": "prose", "weights": "", "long_parts": "", "index_rows": 0}
    return Settings(**plain | {"images_from": 1.0, "long_from": 1.0} | values)


def small_trainer(settings: Settings, ids: Ids = IDS, numerics: Numerics = backbone.PLAIN) -> loop.Trainer:
    config = ModelConfig.from_json(small_json())
    classes = torch.arange(config.text.vocab_size)
    return loop.Trainer(config, classes, ids, settings, torch.device("cpu"), numerics)


# What is small enough to train in a test: a data folder with every kind of row.

SMALL = Settings(
    rows=6,
    length=32,
    parts="needle=1,prose,copy=1",
    shapes_rows=1,
    long_length=64,
    long_parts="needle=1",
    weights="needle=4,shapes=2",
    index_rows=2,
    seconds=10.0,
    images_from=0.3,
    topk_from=0.5,
    long_from=0.7,
    quantise_from=0.8,
)
COUNTS = {"needle": 5, "prose": 40, "copy": 4, "shapes": 9}
COLOURS = ((220, 30, 30), (30, 60, 220), (20, 170, 60))


def pictures(seed: int, count: int) -> list[Picture]:
    """A shape on a plain ground; 42 to 130 pixels a side."""
    rng = random.Random(seed)
    out: list[Picture] = []
    for _ in range(count):
        width, height = rng.randint(42, 130), rng.randint(42, 130)
        shape = Shape(rng.choice(("circle", "square")), rng.choice(COLOURS), width / 2, height / 2, 18.0)
        out.append(Picture(width, height, (240, 240, 240), (shape,)))
    return out


def write_folder(path: Path, seed: int = 0, vocab_size: int = 512, **counts: int) -> tuple[Path, data.Manifest]:
    """Documents of 6 to 21 ids, needles up to 60: [BOS, part, number, (image), Assistant, </think>, answer, EOS].

    The second id says which part, the third which document. An answer repeats the number; of a picture it names the
    colour.
    """
    vision = ModelConfig.from_json(small_json()).vision
    assert vision is not None
    rng = np.random.default_rng(seed)
    manifest = data.Manifest(data.FORMAT, seed, vocab_size, {}, {}, {}, 0)
    for number, (part, count) in enumerate((COUNTS | counts).items()):
        shown = pictures(seed, count) if part == "shapes" else []
        ids: list[int] = []
        for i in range(count):
            body = rng.integers(10, vocab_size - 20, int(rng.integers(2, 17))).tolist()
            answer = [10 + i, *body]
            middle: list[int] = []
            if part == "needle" and i % 2:  # the longer half fits into long rows alone
                middle = [200 + i] * 30
            if shown:
                middle = [IMAGE] * geometry(shown[i].width, shown[i].height, vision).tokens
                answer = [300 + COLOURS.index(shown[i].shapes[0].colour)]
            ids += [IDS.bos, 10 + number, 10 + i, *middle, IDS.assistant, IDS.think_close, *answer, IDS.eos]
        (path / f"{part}.ids.xz").write_bytes(lzma.compress(np.array(ids, dtype="<u2").tobytes()))
        if shown:
            lines = [json.dumps(picture.as_json()) for picture in shown]
            write_lines(data.pictures_file(path, part), lines)
        manifest.parts[part] = [f"{part}.ids.xz"]
        manifest.tokens[part], manifest.documents[part] = len(ids), count
    return path, manifest
