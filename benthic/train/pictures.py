"""The pictures of a run: drawn once, ahead, in threads; kept on the device as bytes; gathered there for each batch.

A picture's patches have the geometry that serving gives them. In a batch all pictures are filled up to one size, so
that every step has the same shapes. P pictures in a batch, n patches and c cells of the largest picture, D text width.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benthic.models.deepseek_v41_config import VisionConfig
from benthic.models.deepseek_v41_vision import Geometry, VisionTower, geometry, pixel_patches, places, scaled
from benthic.skills.shapes import Picture, draw

THREADS = 4  # more would keep the interpreter from the thread that launches kernels
PORTION = 64  # pictures a thread draws at a time

# what stands at a place of a span: a cell by its number, or one of these
_START, _NEWLINE, _END, _NOTHING = -1, -2, -3, -4


class Shown(NamedTuple):
    """The pictures of one batch, and which tokens they give."""

    pixels: Tensor  # [P, n, 3 patch^2] uint8
    at: Tensor  # [P, n, 2] f32, row and column
    real: Tensor  # [P, n] bool
    cells: Tensor  # [P, c, d^2] int64
    tokens: Tensor  # [m] int64, of the last m tokens of the batch: number in `table`

    def embeds(self, tower: VisionTower, count: int) -> Tensor:
        """[count, D], rows for image positions; zero elsewhere. The gradient goes into the tower."""
        cells = tower.align(tower.features(scaled(self.pixels), self.at, self.real), self.cells)
        marks = torch.stack([tower.start, tower.newline, tower.end])
        table = F.pad(torch.cat([cells.flatten(0, 1), marks]), (0, 0, 0, 1))  # the last stands for no image
        return F.pad(table[self.tokens], (0, 0, count - len(self.tokens), 0))


class Pictures:
    """Pictures of one part, by number. Drawing begins at once and goes on in threads until `store` is asked for."""

    def __init__(self, pictures: Sequence[Picture], vision: VisionConfig, device: torch.device):
        self.pictures, self.vision, self.device = pictures, vision, device
        geometries = [geometry(picture.width, picture.height, vision) for picture in pictures]
        self.tokens = np.array([geo.tokens for geo in geometries], dtype=np.int64)
        patches = np.array([geo.grid_h * geo.grid_w for geo in geometries], dtype=np.int64)
        self._first = np.concatenate([[0], np.cumsum(patches)])
        forms = {(geo.grid_h, geo.grid_w): geo for geo in geometries}
        numbers = {form: number for number, form in enumerate(forms)}
        self._form = np.array([numbers[geo.grid_h, geo.grid_w] for geo in geometries], dtype=np.int64)
        merge, most = vision.downsample_ratio, int(patches.max(initial=1))
        most += -most % 8  # what attention kernels like
        all_places = [places(*form, merge) for form in forms]
        self._cells = max((len(cells) for _, cells in all_places), default=1)
        self._at = torch.stack([F.pad(at, (0, 0, 0, most - len(at))) for at, _ in all_places]).to(device)
        self._real = torch.stack([torch.arange(most) < len(at) for at, _ in all_places]).to(device)
        self._merged = torch.stack(
            [
                F.pad(torch.where(cells == len(at), most, cells), (0, 0, 0, self._cells - len(cells)), value=most)
                for at, cells in all_places
            ]
        ).to(device)
        codes = [_codes(geo) for geo in forms.values()]
        self._code_first = np.concatenate([[0], np.cumsum([len(code) for code in codes])])
        self._codes = np.concatenate(codes)
        self._bytes = np.empty((int(self._first[-1]) + most, 3 * vision.patch_size**2), dtype=np.uint8)
        self._bytes[self._first[-1] :] = 0  # behind the last picture, so that every one can be read as the largest
        self._store: Tensor | None = None
        pool = ThreadPoolExecutor(THREADS)
        self._drawn: list[Future[None]] = [
            pool.submit(self._draw, range(first, min(first + PORTION, len(pictures))))
            for first in range(0, len(pictures), PORTION)
        ]
        pool.shutdown(wait=False)

    def _draw(self, numbers: range) -> None:
        for number in numbers:
            rows, _ = pixel_patches(draw(self.pictures[number]), self.vision)
            self._bytes[self._first[number] : self._first[number + 1]] = rows

    @property
    def store(self) -> Tensor:
        """All patches on the device, [N, 3 patch^2] uint8. Waits for the threads the first time."""
        if self._store is None:
            for portion in self._drawn:
                portion.result()
            self._store = torch.from_numpy(self._bytes).to(self.device)
        return self._store

    def show(self, numbers: NDArray[np.int64], offsets: NDArray[np.int64], room: int) -> Shown:
        """Pictures for the last m tokens of a batch.

        numbers  [m] the picture that each token belongs to, -1: none; at most `room` different ones
        offsets  [m] place of the token in the picture's span
        """
        shown, slot = np.unique(numbers[numbers >= 0], return_inverse=True)
        assert len(shown) <= room, f"{len(shown)} pictures in a batch with room for {room}"
        chosen = np.zeros(room, dtype=np.int64)
        chosen[: len(shown)] = shown
        tokens = np.full(len(numbers), room * self._cells - 1 - _NOTHING, dtype=np.int64)
        inside = numbers >= 0
        code = self._codes[self._code_first[self._form[numbers[inside]]] + offsets[inside]]
        tokens[inside] = np.where(code >= 0, slot * self._cells + code, room * self._cells - 1 - code)
        firsts, form, index = (self._moved(values) for values in (self._first[chosen], self._form[chosen], tokens))
        rows = firsts.unsqueeze(1) + torch.arange(self._at.shape[1], device=self.device)
        return Shown(self.store[rows], self._at[form], self._real[form], self._merged[form], index)

    def _moved(self, values: NDArray[np.int64]) -> Tensor:
        """On the device, without waiting for it."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _codes(geo: Geometry) -> NDArray[np.int64]:
    """What stands at each place of a span."""
    lines = np.full((geo.cells_h, geo.cells_w + 1), _NEWLINE, dtype=np.int64)
    lines[:, :-1] = np.arange(geo.cells_h * geo.cells_w).reshape(geo.cells_h, geo.cells_w)
    return np.concatenate([[_START], lines.ravel(), [_END]])
