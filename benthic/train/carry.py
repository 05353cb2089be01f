"""A run in few bytes, to take it to another machine: masters as bfloat16 without momenta, in files of a limited size.

The two bytes of a bfloat16 lie apart, since only sign and exponent compress. About 1.5 bytes a parameter, where the
whole state has 9. A run that goes on from it is not bit for bit the same: momenta begin at zero.
"""

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benthic.errors import BadTrainingState

MAGIC = b"benthic carry 1\n"
FILE_BYTES = 15 << 20
PIECE = 4 << 20  # values compressed together


def files(folder: Path) -> list[Path]:
    """In order; none where nothing was carried."""
    return sorted(folder.glob("carry-*.bin"))


def write(folder: Path, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> int:
    """Returns the bytes written. extra: what JSON can hold."""
    shapes = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    flat = torch.cat([tensor.detach().flatten().float().bfloat16().cpu() for tensor in tensors.values()])
    planes = flat.view(torch.uint8).numpy().reshape(-1, 2).T  # low bytes, high bytes
    pieces = [np.ascontiguousarray(plane[at : at + PIECE]) for plane in planes for at in range(0, plane.size, PIECE)]
    with ThreadPoolExecutor() as pool:
        packed = list(pool.map(lambda piece: zlib.compress(piece, 1), pieces))
    header = json.dumps({"shapes": shapes, "pieces": [len(piece) for piece in packed], "extra": extra}).encode()
    body = b"".join([len(header).to_bytes(8, "little"), header, *packed])
    blob = MAGIC + zlib.crc32(body).to_bytes(4, "little") + body
    folder.mkdir(parents=True, exist_ok=True)
    for old in files(folder):
        old.unlink()
    for number, at in enumerate(range(0, len(blob), FILE_BYTES)):
        (folder / f"carry-{number:02}.bin").write_bytes(blob[at : at + FILE_BYTES])
    return len(blob)


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write` was given, f32. Raises BadTrainingState."""
    parts = files(folder)
    blob = b"".join(part.read_bytes() for part in parts)
    start = len(MAGIC) + 4
    if not blob.startswith(MAGIC) or zlib.crc32(blob[start:]) != int.from_bytes(blob[len(MAGIC) : start], "little"):
        raise BadTrainingState(folder, f"its {len(parts)} files carry-*.bin are no carried run, or not all of it")
    size = int.from_bytes(blob[start : start + 8], "little")
    header = json.loads(blob[start + 8 : start + 8 + size])
    ends = np.cumsum([start + 8 + size, *header["pieces"]])
    raw = b"".join(zlib.decompress(blob[a:b]) for a, b in pairwise(ends.tolist()))
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(2, -1)
    flat = torch.from_numpy(np.ascontiguousarray(planes.T)).view(torch.bfloat16).flatten().float()
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, shape in header["shapes"]:
        count = int(np.prod(shape))
        tensors[name] = flat[at : at + count].view(shape)
        at += count
    return tensors, header["extra"]
