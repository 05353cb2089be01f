"""DeepSeek-V4.1-Flash, vision tower and aligner. Source: model specification, section 2.11.

An image is scaled and padded to a grid of patches, read by a bidirectional tower, merged 3 x 3 into rows of the text
width, and placed in the prompt as one span: START, rows of IMAGE and a NEWLINE each, END. Every position of the span
carries `image_token_id`.

P images, n patches (gh x gw), d merge factor, D text width, C tower width.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benthic.errors import BadImage
from benthic.kernels import gemm, norm, rope
from benthic.models.deepseek_v41_config import ModelConfig, VisionConfig
from benthic.models.modules import Stack, TensorSource, activation_dtype, parameter
from benthic.text import images as files
from benthic.types import Numerics

if TYPE_CHECKING:
    from PIL import Image

NORM_EPS = 1e-6  # fixed; the config has no key for it
LEAST_TOKENS = 4  # of a span: START, one IMAGE, NEWLINE, END
GREY = 127  # canvas around the picture


class Geometry(NamedTuple):
    """What an image of some size becomes. Pixels, patches, merged cells, tokens."""

    width: int  # of the scaled source, before fitting
    height: int
    canvas_width: int  # multiples of the patch size
    canvas_height: int
    grid_h: int  # patches
    grid_w: int
    cells_h: int  # merged cells
    cells_w: int
    tokens: int  # of the span, delimiters included


def geometry(width: int, height: int, config: VisionConfig) -> Geometry:
    """Canvas and token count of an image of width x height pixels, both >= 1. Integer rules in the order of 2.11."""
    if width < 1 or height < 1:
        raise BadImage(f"image is {width} x {height} pixels; both sides must be at least 1")
    patch, merge, limit = config.patch_size, config.downsample_ratio, config.max_image_tokens
    if config.max_wh_ratio and width > height * config.max_wh_ratio:
        width = int(height * config.max_wh_ratio)
    if 0 < width * height < config.min_pixels:
        factor = math.sqrt(config.min_pixels / (width * height))
        width, height = int(width * factor), int(height * factor)
    canvas_w, canvas_h = math.ceil(width / patch) * patch, math.ceil(height / patch) * patch

    def cells(pixels: int) -> int:
        return math.ceil((pixels // patch) / merge)

    def tokens(w: int, h: int) -> int:
        return cells(h) * (cells(w) + 1) + 2

    if tokens(canvas_w, canvas_h) > limit:
        aspect, cell = height / width, patch * merge
        fit_w = math.sqrt((limit - 2) / aspect + 0.25) - 0.5
        fit_h = fit_w * aspect
        if fit_w < 1:
            canvas_w, canvas_h = cell, ((limit - 2) // 2) * cell
        elif fit_h < 1:
            canvas_w, canvas_h = (limit - 3) * cell, cell
        else:
            shrink = min(math.floor(fit_w) * cell / width, math.floor(fit_h) * cell / height)
            canvas_w = math.floor(width * shrink / patch) * patch
            canvas_h = math.floor(height * shrink / patch) * patch
    return Geometry(
        width,
        height,
        canvas_w,
        canvas_h,
        canvas_h // patch,
        canvas_w // patch,
        cells(canvas_h),
        cells(canvas_w),
        tokens(canvas_w, canvas_h),
    )


def largest_geometry(config: VisionConfig, tokens: int) -> Geometry:
    """Of all images whose span has at most so many tokens, at least LEAST_TOKENS, one of most patches."""
    limited = replace(config, max_image_tokens=min(config.max_image_tokens, tokens))
    body, cell = limited.max_image_tokens - 2, config.patch_size * config.downsample_ratio
    shapes = [geometry((body // high - 1) * cell, high * cell, limited) for high in range(1, body // 2 + 1)]
    return max(shapes, key=lambda geo: geo.grid_h * geo.grid_w)


class Patches(NamedTuple):
    """An image on its way to the tower."""

    pixels: Tensor  # [n, 3 patch^2] uint8, as `pixel_patches` cuts them
    geometry: Geometry


def read_image(source: bytes, config: VisionConfig, longest: int | None = None, where: str = "image") -> Patches:
    """PNG, JPEG, GIF or WebP -> patches. longest: pixels the longer side is brought down to first; None: as it is.

    Raises BadImage naming `where`; MissingDependency without Pillow.
    """
    image = files.open_lazily(source, where)
    from PIL import Image  # is there, or the line before had said so

    size = files.scaled(image.width, image.height, longest)
    try:
        image = on_white(image)
        image = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    except Exception as error:  # the decoder's answer to bytes that may be anything
        raise BadImage(f"{where} cannot be decoded: {error}; is the file whole?") from error
    pixels, geo = pixel_patches(image, config)
    return Patches(torch.from_numpy(pixels), geo)


def on_white(image: "Image.Image") -> "Image.Image":
    """RGB, 8 bits a channel; what is transparent shows white, as deepseek-recipe's preprocessor has it."""
    from PIL import Image

    image.load()
    if image.mode.startswith("I"):  # grey of 16 bits, which a plain conversion would clip
        return Image.fromarray((np.asarray(image).astype(np.int32) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    over = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")


def patches(image: "Image.Image", config: VisionConfig) -> tuple[Tensor, Geometry]:
    """An image -> bf16 [n, 3 patch^2] in -1..1, row-major over the grid; each row flattens channel, row, column."""
    pixels, geo = pixel_patches(image, config)
    return scaled(torch.from_numpy(pixels)), geo


def scaled(pixels: Tensor) -> Tensor:
    """Bytes of pixels -> what the tower reads, bf16 in -1..1. The same bits on every device."""
    white = torch.full((), 255.0, device=pixels.device)  # a division by a number is a product with its inverse on CUDA
    return ((pixels.float() / white - 0.5) / 0.5).to(torch.bfloat16)


def pixel_patches(image: "Image.Image", config: VisionConfig) -> tuple[NDArray[np.uint8], Geometry]:
    """`patches` as bytes, before they are scaled: [n, 3 patch^2]."""
    from PIL import Image, ImageOps

    geo = geometry(image.width, image.height, config)
    canvas_size = (geo.canvas_width, geo.canvas_height)
    image = image.convert("RGB")
    scale = min(geo.canvas_width / image.width, geo.canvas_height / image.height)
    too_wide = config.max_wh_ratio is not None and image.width >= image.height * config.max_wh_ratio
    if too_wide or min(round(image.width * scale), round(image.height * scale)) < 1:
        fitted = image.resize(canvas_size, Image.Resampling.BICUBIC)
    else:
        fitted = ImageOps.contain(image, canvas_size, Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", canvas_size, (GREY, GREY, GREY))
    canvas.paste(
        fitted, (round((geo.canvas_width - fitted.width) / 2), round((geo.canvas_height - fitted.height) / 2))
    )  # round() is half to even
    size = config.patch_size
    grid = np.array(canvas).reshape(geo.grid_h, size, geo.grid_w, size, 3)
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3)).reshape(geo.grid_h * geo.grid_w, -1), geo


class Places(NamedTuple):
    """Where the patches of one image stand, and which of them make a cell.

    at     [n, 2] f32, row and column in the grid
    cells  [cells, d^2] int64, the patches of each cell, row by row; n where the grid has none
    """

    at: Tensor
    cells: Tensor


def places(grid_h: int, grid_w: int, merge: int) -> Places:
    row, column = torch.meshgrid(torch.arange(grid_h), torch.arange(grid_w), indexing="ij")
    number = F.pad(row * grid_w + column, (0, -grid_w % merge, 0, -grid_h % merge), value=grid_h * grid_w)
    cells = number.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2)  # [cells_h, cells_w, d, d]
    return Places(torch.stack([row, column], -1).flatten(0, 1).float(), cells.reshape(-1, merge * merge))


class Affine(nn.Module):
    """x @ weight^T + bias; bias added before the one rounding."""

    def __init__(self, inputs: int, outputs: int, numerics: Numerics, *, bias: bool = True):
        super().__init__()
        dtype = activation_dtype(numerics)
        self.weight = parameter(outputs, inputs, dtype=dtype)
        self.bias = parameter(outputs, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return gemm.linear(x, self.weight)
        return F.linear(x, self.weight, self.bias)

    def load(self, source: TensorSource, name: str) -> None:
        self.weight.data.copy_(source.tensor(f"{name}.weight"))
        if self.bias is not None:
            self.bias.data.copy_(source.tensor(f"{name}.bias"))


class Block(nn.Module):
    """Bidirectional attention inside one image, then SwiGLU; residuals in the activation dtype."""

    def __init__(self, config: VisionConfig, numerics: Numerics):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm1, self.norm2 = parameter(width), parameter(width)
        self.wqkv = Affine(width, 3 * width, numerics)
        self.wo = Affine(width, width, numerics)
        self.w1 = Affine(width, 2 * config.intermediate_size, numerics, bias=False)
        self.w2 = Affine(config.intermediate_size, width, numerics, bias=False)

    def forward(self, x: Tensor, angles: Tensor, real: Tensor | None) -> Tensor:
        """x [P, n, C]; angles [P, 1, n, head width / 2] f32; real [P, 1, 1, n] bool, the patches that are there."""
        y = self.wqkv(norm.rms_norm(x, self.norm1, NORM_EPS)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in y.unbind(2))  # [P, heads, n, w]
        o = F.scaled_dot_product_attention(rotate_half(q, angles), rotate_half(k, angles), v, attn_mask=real)
        x = x + self.wo(o.transpose(1, 2).flatten(2))
        gate, up = self.w1(norm.rms_norm(x, self.norm2, NORM_EPS)).float().chunk(2, dim=-1)
        return x + self.w2((F.silu(gate) * up).to(x.dtype))

    def load(self, source: TensorSource, name: str) -> None:
        self.norm1.data.copy_(source.tensor(f"{name}.norm1.weight"))
        self.norm2.data.copy_(source.tensor(f"{name}.norm2.weight"))
        self.wqkv.load(source, f"{name}.attn.wqkv")
        self.wo.load(source, f"{name}.attn.wo")
        self.w1.load(source, f"{name}.mlp.w1")
        self.w2.load(source, f"{name}.mlp.w2")


def rotate_half(x: Tensor, angles: Tensor) -> Tensor:
    """Channel c pairs with c + w/2. x [..., n, w], angles [..., n, w/2] f32; float32 inside, rounded once."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class VisionTower(nn.Module):
    """Patches -> embedding rows of the text width, ready to stand in the prompt."""

    freqs: Tensor

    def __init__(self, config: ModelConfig, numerics: Numerics):
        super().__init__()
        vision, hidden = config.vision, config.text.hidden_size
        assert vision is not None, "this checkpoint has no vision tower"
        self.config, self.numerics = vision, numerics
        dtype = activation_dtype(numerics)
        merged = vision.hidden_size * vision.downsample_ratio**2
        self.patch_embed = Affine(3 * vision.patch_size**2, vision.hidden_size, numerics)
        self.blocks = Stack(Block(vision, numerics) for _ in range(vision.num_hidden_layers))
        self.norm = parameter(vision.hidden_size)
        self.aligner_w1 = Affine(merged, hidden, numerics)
        self.aligner_w2 = Affine(hidden, hidden, numerics)
        self.start, self.end, self.newline = (parameter(hidden, dtype=dtype) for _ in range(3))
        axis = vision.hidden_size // vision.num_attention_heads // 2  # rotated pairs, half by row, half by column
        self.register_buffer("freqs", rope.rope_frequencies(axis, vision.rope_theta), persistent=False)

    def features(self, rows: Tensor, at: Tensor, real: Tensor | None = None) -> Tensor:
        """Patches [P, n, 3 patch^2] of P images, at [P, n, 2] f32 -> [P, n, C] after the last norm.

        real  [P, n] bool: the patches that are there, where images of several sizes stand side by side; None: all.
        """
        angles = (at.unsqueeze(-1) * self.freqs).flatten(-2).unsqueeze(1)  # [P, 1, n, head width / 2]
        mask = None if real is None else real[:, None, None]
        x = self.patch_embed(rows.to(activation_dtype(self.numerics)))
        for block in self.blocks:
            x = block(x, angles, mask)
        return norm.rms_norm(x, self.norm, NORM_EPS)

    def align(self, features: Tensor, cells: Tensor) -> Tensor:
        """[P, n, C], cells [P, c, d^2] -> [P, c, D]: merge channel-major, two linears with exact GELU between.

        A cell's place number n is outside of the grid, and counts as zero.
        """
        images, _, width = features.shape
        padded = F.pad(features, (0, 0, 0, 1))  # [P, n + 1, C]
        x = padded.gather(1, cells.flatten(1).unsqueeze(-1).expand(-1, -1, width))
        x = x.view(images, *cells.shape[1:], width).transpose(2, 3).flatten(2)  # [P, c, C d^2]
        return self.aligner_w2(F.gelu(self.aligner_w1(x).float()).to(x.dtype))

    def forward(self, rows: Tensor, geo: Geometry) -> Tensor:
        """Patches of one image -> [tokens, D], the embedding of its whole span."""
        at, cells = (
            part.to(rows.device)[None] for part in places(geo.grid_h, geo.grid_w, self.config.downsample_ratio)
        )
        merged = self.align(self.features(rows[None], at), cells)[0]
        lines = merged.unflatten(0, (geo.cells_h, geo.cells_w))  # [cells_h, cells_w, D]
        ends = self.newline.expand(geo.cells_h, 1, -1)
        body = torch.cat([lines, ends], dim=1).flatten(0, 1)
        return torch.cat([self.start[None], body, self.end[None]])

    def load(self, source: TensorSource) -> None:
        self.patch_embed.load(source, "vision.patch_embed.proj")
        for b, block in enumerate(self.blocks):
            block.load(source, f"vision.blocks.{b}")
        self.norm.data.copy_(source.tensor("vision.norm.weight"))
        self.aligner_w1.load(source, "aligner.w1")
        self.aligner_w2.load(source, "aligner.w2")
        for part in ("start", "end", "newline"):
            getattr(self, part).data.copy_(source.tensor(f"image_{part}"))
