"""A slow vision tower, aligner and image geometry in numpy float64, from section 2.11 of the model specification."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.slow_v41 import Array, Folder, silu


@dataclass(frozen=True)
class Canvas:
    """Where an image lands: canvas in pixels, resized image inside it, merged grid, and the span's token count."""

    width: int
    height: int
    inner_width: int
    inner_height: int
    left: int
    top: int
    grid_width: int
    grid_height: int
    tokens: int


def _merged(width: int, height: int, patch: int, merge: int) -> tuple[int, int]:
    return math.ceil(width / patch / merge), math.ceil(height / patch / merge)


def geometry(width: int, height: int, vision: dict[str, Any]) -> Canvas:
    """The integer rules in their order, for an image of width x height pixels."""
    patch, merge, most = vision["patch_size"], vision["downsample_ratio"], vision["max_image_tokens"]
    w, h = width, height
    stretched = False
    if vision.get("max_wh_ratio") and w > h * vision["max_wh_ratio"]:
        w, stretched = int(h * vision["max_wh_ratio"]), True
    if 0 < w * h < vision["min_pixels"]:
        f = math.sqrt(vision["min_pixels"] / (w * h))
        w, h = int(w * f), int(h * f)
    big_w, big_h = math.ceil(w / patch) * patch, math.ceil(h / patch) * patch
    nw, nh = _merged(big_w, big_h, patch, merge)
    if nh * (nw + 1) + 2 > most:
        a = h / w
        fw = math.sqrt((most - 2) / a + 0.25) - 0.5
        fh = fw * a
        cell = patch * merge
        if fw < 1:
            big_w, big_h = cell, ((most - 2) // 2) * cell
        elif fh < 1:
            big_w, big_h = (most - 3) * cell, cell
        else:
            b = min(math.floor(fw) * cell / w, math.floor(fh) * cell / h)
            big_w, big_h = math.floor(w * b / patch) * patch, math.floor(h * b / patch) * patch
    nw, nh = _merged(big_w, big_h, patch, merge)
    inner_w, inner_h = big_w, big_h
    if not stretched:  # contain: one side fits, the other is rounded
        if width / height > big_w / big_h:
            inner_h = round(height / width * big_w)
        elif width / height < big_w / big_h:
            inner_w = round(width / height * big_h)
        if inner_w == 0 or inner_h == 0:
            inner_w, inner_h = big_w, big_h
    left, top = round((big_w - inner_w) / 2), round((big_h - inner_h) / 2)
    return Canvas(big_w, big_h, inner_w, inner_h, left, top, nw, nh, nh * (nw + 1) + 2)


def patches(pixels: Array, patch: int) -> Array:
    """[height, width, 3] bytes -> [n, 3 * patch * patch], row-major; each channel, row, column."""
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    x = (pixels.astype(np.float64) / 255 - 0.5) / 0.5
    x = x.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return x.reshape(rows * columns, -1)


def _rms(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


class SlowVision:
    def __init__(self, folder: str | Path):
        self.folder = Folder(folder)
        self.vision: dict[str, Any] = self.folder.config["vision_config"]

    def _linear(self, x: Array, name: str) -> Array:
        y = x @ self.folder.weight(name).T
        return y + self.folder.get(f"{name}.bias") if self.folder.has(f"{name}.bias") else y

    def tower(self, x: Array, rows: int, columns: int) -> Array:
        """Patches [rows * columns, 588] -> features [rows * columns, width]."""
        v = self.vision
        heads = v["num_attention_heads"]
        dh = v["hidden_size"] // heads
        f = v["rope_theta"] ** (-np.arange(dh // 4) / (dh // 4))
        row, column = np.divmod(np.arange(rows * columns), columns)
        angle = np.concatenate([row[:, None] * f, column[:, None] * f], 1)[:, None, :]  # [n, 1, dh/2]

        def turn(z: Array) -> Array:
            low, high = z[..., : dh // 2], z[..., dh // 2 :]
            return np.concatenate(
                [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], -1
            )

        x = self._linear(x, "vision.patch_embed.proj")
        for b in range(v["num_hidden_layers"]):
            name = f"vision.blocks.{b}"
            qkv = self._linear(_rms(x, self.folder.get(f"{name}.norm1.weight")), f"{name}.attn.wqkv")
            q, k, value = qkv.reshape(len(x), 3, heads, dh).transpose(1, 0, 2, 3)
            logit = np.einsum("ihd,jhd->hij", turn(q), turn(k)) * dh**-0.5
            p = np.exp(logit - logit.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            o = np.einsum("hij,jhd->ihd", p, value).reshape(len(x), -1)
            x = x + self._linear(o, f"{name}.attn.wo")
            gu = self._linear(_rms(x, self.folder.get(f"{name}.norm2.weight")), f"{name}.mlp.w1")
            gate, up = np.split(gu, 2, axis=-1)
            x = x + self._linear(silu(gate) * up, f"{name}.mlp.w2")
        return _rms(x, self.folder.get("vision.norm.weight"))

    def align(self, features: Array, rows: int, columns: int) -> Array:
        """Features [rows * columns, width] -> [ceil(rows/3) * ceil(columns/3), D], row-major."""
        d = self.vision["downsample_ratio"]
        width = features.shape[1]
        big_r, big_c = math.ceil(rows / d), math.ceil(columns / d)
        grid = np.zeros((big_r * d, big_c * d, width))
        grid[:rows, :columns] = features.reshape(rows, columns, width)
        x = grid.reshape(big_r, d, big_c, d, width).transpose(0, 2, 4, 1, 3).reshape(big_r * big_c, -1)
        x = self._linear(x, "aligner.w1")
        x = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return self._linear(x, "aligner.w2")

    def span(self, features: Array, grid_width: int, grid_height: int) -> Array:
        """Aligner rows -> the embeddings of the whole span, delimiters included: [tokens, D]."""
        out = [self.folder.get("image_start")]
        for r in range(grid_height):
            out += [*features[r * grid_width : (r + 1) * grid_width], self.folder.get("image_newline")]
        return np.stack([*out, self.folder.get("image_end")])
