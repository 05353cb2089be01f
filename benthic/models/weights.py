"""Checkpoint folders: config.json, safetensors shards, their index. Every tensor is accounted for, or nothing opens.

Layout, names and number formats: the model specification, section 5. The shards are parsed here and not by the
safetensors package, because its torch side does not know the dtype F8_E8M0, which all scales have, and because a
written file must be the same bytes for the same tensors. The format is 8 bytes of header length, a JSON header, and
the data.
"""

import hashlib
import json
import math
import mmap
import os
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from benthic.errors import (
    BadConfigJSON,
    BadIndex,
    BadShard,
    CheckpointExists,
    CheckpointNotWritten,
    DuplicateTensor,
    MissingCheckpointFile,
    MissingShard,
    MissingTensor,
    TruncatedFile,
    UnknownTensor,
    WrongDtype,
    WrongShape,
)
from benthic.models.deepseek_v41_config import DTYPE_BYTES, ModelConfig, TensorSpec, read_json, tensors
from benthic.models.registry import model_dir

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PREFIX = "model."  # tolerated in front of every name
HEADER_LIMIT_BYTES = 100_000_000  # of one shard, as the format says
SHARD_BYTES = 11 << 30  # default size of a written shard

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # the byte is the biased exponent
    "I8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor lies."""

    shard: Path
    offset: int  # bytes from the start of the file
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


# Reading


def _read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one shard, by the names in the file. Raises BadShard, TruncatedFile."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise TruncatedFile(path, 8, size)
            (length,) = struct.unpack("<Q", start)
            if length > HEADER_LIMIT_BYTES:
                raise BadShard(path, f"its header claims {length} bytes, the limit is {HEADER_LIMIT_BYTES}")
            if 8 + length > size:
                raise TruncatedFile(path, 8 + length, size)
            raw = file.read(length)
    except OSError as error:
        raise BadShard(path, str(error)) from None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a name stands twice in the header")
        return out

    try:
        header: object = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadShard(path, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadShard(path, "its header is not an object")
    out: dict[str, Stored] = {}
    for name, entry in cast("dict[str, object]", header).items():
        if name != "__metadata__":
            out[name] = _entry(path, name, entry, 8 + length)
    end = 8 + length
    for name, stored in sorted(out.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != end:
            raise BadShard(path, f"tensor {name} begins at byte {stored.offset}, want {end}: gap or overlap")
        end += stored.nbytes
    if size < end:
        raise TruncatedFile(path, end, size)
    if size > end:
        raise BadShard(path, f"it has {size} bytes, its header describes {end}")
    return out


def _entry(path: Path, name: str, entry: object, data_start: int) -> Stored:
    def whole(value: object, count: int | None = None) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise BadShard(path, f"tensor {name}: {value!r} is not a list of integers")
        items = cast("list[object]", value)
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in items) or count not in (
            None,
            len(items),
        ):
            raise BadShard(path, f"tensor {name}: {value!r} is not a list of integers >= 0")
        return tuple(cast("list[int]", items))

    if not isinstance(entry, dict):
        raise BadShard(path, f"tensor {name} is described by {entry!r}, want an object")
    fields = cast("dict[str, object]", entry)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str):
        raise BadShard(path, f"tensor {name} has dtype {dtype!r}, want a string")
    shape = whole(fields.get("shape"))
    begin, end = whole(fields.get("data_offsets"), 2)
    if end < begin or (dtype in DTYPE_BYTES and end - begin != math.prod(shape) * DTYPE_BYTES[dtype]):
        raise BadShard(path, f"tensor {name} of {dtype} {list(shape)} cannot lie in {end - begin} bytes")
    return Stored(path, data_start + begin, end - begin, dtype, shape)


def _shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The shard files, and the index (tensor -> file name) if there is one."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise MissingCheckpointFile(folder / INDEX, f"the weights are missing; neither it nor {SINGLE} is there")
        return [folder / SINGLE], None
    try:
        where: object = read_json(index).get("weight_map")
    except BadConfigJSON as error:
        raise BadIndex(index, str(error)) from None
    if not isinstance(where, dict) or not where:
        raise BadIndex(index, "weight_map is missing or empty")
    counts: dict[str, int] = {}
    for name, file in cast("dict[str, object]", where).items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise BadIndex(index, f"tensor {name} is in {file!r}, want the name of a .safetensors file in this folder")
        counts[file] = counts.get(file, 0) + 1
    for file, count in counts.items():
        if not (folder / file).is_file():
            raise MissingShard(folder / file, index, count)
    return [folder / file for file in sorted(counts)], cast("dict[str, str]", where)


def _locate(folder: Path, specs: Mapping[str, TensorSpec]) -> dict[str, Stored]:
    """Every tensor of the inventory in the files of a folder, all headers checked. No data is mapped here."""
    shards, index = _shards(folder)
    found: dict[str, Stored] = {}
    listed: set[str] = set()
    for shard in shards:
        for stored_name, stored in _read_header(shard).items():
            bare = stored_name.removeprefix(PREFIX)
            name = stored_name if stored_name in specs else bare
            if name not in specs:
                raise UnknownTensor(stored_name, shard, _similar(bare, specs))
            if name in found:
                raise DuplicateTensor(name, found[name].shard, shard)
            if index is not None:
                if index.get(stored_name) != shard.name:
                    told = index.get(stored_name, "no file")
                    raise BadIndex(folder / INDEX, f"it puts tensor {stored_name} into {told}, it is in {shard.name}")
                listed.add(stored_name)
            _check_tensor(name, stored.shape, stored.dtype, specs[name])
            found[name] = stored
    for name in index or ():
        if name not in listed:
            file = cast("dict[str, str]", index)[name]
            if name.removeprefix(PREFIX) not in specs:
                raise UnknownTensor(name, folder / INDEX, _similar(name.removeprefix(PREFIX), specs))
            raise BadIndex(folder / INDEX, f"it puts tensor {name} into {file}, which does not hold it")
    _check_complete(found, specs)
    return found


def _check_tensor(name: str, shape: tuple[int, ...], dtype: str, spec: TensorSpec) -> None:
    if dtype != spec.dtype:
        raise WrongDtype(name, spec.dtype, dtype)
    if shape != spec.shape:
        raise WrongShape(name, spec.shape, shape)


def _check_complete(found: Iterable[str], specs: Mapping[str, TensorSpec]) -> None:
    have = set(found)
    missing = [name for name in specs if name not in have]
    if missing:
        spec = specs[missing[0]]
        raise MissingTensor(missing[0], f"{spec.dtype} {list(spec.shape)}", len(missing))


def _similar(name: str, specs: Mapping[str, TensorSpec]) -> list[str]:
    """Known names worth comparing with an unknown one: its own layer's, or those outside of layers."""
    head = name.split(".")[:2]
    return [n for n in specs if n.split(".")[:2] == head] or [n for n in specs if n.count(".") < 2]


class Checkpoint:
    """An opened checkpoint folder. Tensors are views of the mapped files and stay valid as long as they are held."""

    def __init__(self, path: Path, config: ModelConfig, config_json: Mapping[str, Any], stored: Mapping[str, Stored]):
        self.path, self.config, self.config_json = path, config, config_json
        self.specs = tensors(config)
        self.stored = stored
        self._maps: dict[Path, mmap.mmap] = {}
        for shard in {s.shard for s in stored.values()}:
            with shard.open("rb") as file:  # copy on write: torch wants a writable buffer, the file never changes
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Check config.json and the headers of all shards, then map them.

        path     checkpoint folder, or the name of a packaged model
        Raises   UnknownModel, or the CheckpointError that says what is wrong and where.
        """
        folder = model_dir(path)
        config_json = read_json(folder / "config.json")
        config = ModelConfig.from_json(config_json, str(folder / "config.json"))
        return cls(folder, config, config_json, _locate(folder, tensors(config)))

    @property
    def tokenizer_path(self) -> Path | None:
        """tokenizer.json, or None: a test checkpoint may have none."""
        path = self.path / "tokenizer.json"
        return path if path.is_file() else None

    def tensor(self, name: str) -> Tensor:
        """One tensor in its stored dtype (F8_E8M0 as uint8), without a copy if its bytes are aligned. CPU.

        Writing to it changes this process's view only. KeyError: no such name in the inventory.
        """
        stored = self.stored[name]
        dtype = TORCH_DTYPES[stored.dtype]
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=dtype)
        raw = torch.frombuffer(self._maps[stored.shard], dtype=torch.uint8, count=stored.nbytes, offset=stored.offset)
        if stored.offset % DTYPE_BYTES[stored.dtype]:
            raw = raw.clone()
        return raw.view(dtype).reshape(stored.shape)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in inventory order."""
        return ((name, self.tensor(name)) for name in self.specs)

    def digest(self) -> str:
        """SHA-256 over configuration and all tensors, as hex: equal for equal models, however they are sharded.

        A root over one hash per tensor (name, dtype, shape, bytes). Cost: reads every byte once, then remembered.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        root = hashlib.sha256(b"benthic.weights.1")
        root.update(json.dumps(self.config_json, sort_keys=True).encode())
        for name in sorted(self.stored):
            stored = self.stored[name]
            leaf = hashlib.sha256(f"{name}\0{stored.dtype}\0{list(stored.shape)}\0".encode())
            with memoryview(self._maps[stored.shard]) as data:
                leaf.update(data[stored.offset : stored.offset + stored.nbytes])
            root.update(leaf.digest())
        return root.hexdigest()


# Other files of tensors, beside a checkpoint

PLAIN_DTYPES = {"F32": torch.float32, "I32": torch.int32, "U8": torch.uint8}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file, copied. Raises BadShard, TruncatedFile; MissingCheckpointFile."""
    if not path.is_file():
        raise MissingCheckpointFile(path)
    stored, out = _read_header(path), dict[str, Tensor]()
    data = path.read_bytes()
    for name, where in stored.items():
        dtype = PLAIN_DTYPES.get(where.dtype)
        if dtype is None or math.prod(where.shape) * dtype.itemsize != where.nbytes:
            raise BadShard(path, f"tensor {name} of {where.dtype} {list(where.shape)} lies in {where.nbytes} bytes")
        raw = bytearray(data[where.offset : where.offset + where.nbytes])
        value = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        out[name] = value.reshape(where.shape)
    return out


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of f32, i32 and uint8 tensors; the same tensors give the same bytes."""
    names = {dtype: name for name, dtype in PLAIN_DTYPES.items()}
    entries: dict[str, object] = {}
    offset = 0
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # all aligned
    for name in order:
        size = tensors[name].numel() * tensors[name].dtype.itemsize
        entries[name] = {
            "dtype": names[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = [tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for name in order]
    path.write_bytes(b"".join((struct.pack("<Q", len(text)), text, *parts)))


# Writing


def _plan_shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """Names per shard, in file order. Unless all fits in one, each Engram table has a shard to itself, at the end."""
    if sum(spec.nbytes for spec in specs.values()) <= shard_bytes:
        groups = [list(specs)]
    else:
        groups: list[list[str]] = []
        used = shard_bytes
        for name, spec in specs.items():
            if spec.group == "engram.tables":
                continue
            if used + spec.nbytes > shard_bytes:
                groups.append([])
                used = 0
            groups[-1].append(name)
            used += spec.nbytes
        tables: dict[str, list[str]] = {}
        for name, spec in specs.items():
            if spec.group == "engram.tables":
                tables.setdefault(name.rpartition(".")[0], []).append(name)
        groups += tables.values()
    # wide dtypes first: then every tensor is aligned and can be read in place
    return [sorted(names, key=lambda n: -DTYPE_BYTES[specs[n].dtype]) for names in groups]


def _header(names: list[str], specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """Header bytes of a shard, and where each tensor begins in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at: dict[str, int] = {}
    offset = 0
    for name in names:
        spec = specs[name]
        at[name] = offset
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + begin for name, begin in at.items()}


def _dtype_name(tensor: Tensor, want: str) -> str:
    """The stored dtype of a tensor; scales and FP4 bytes may come as either kind of byte."""
    bytes_like = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
    if want in ("F8_E8M0", "I8") and tensor.dtype in bytes_like:
        return want
    for name, dtype in TORCH_DTYPES.items():
        if dtype == tensor.dtype:
            return name
    return str(tensor.dtype).removeprefix("torch.")


def write_checkpoint(
    path: str | Path,
    config_json: Mapping[str, Any],
    source: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
    extra: Mapping[str, bytes] | None = None,
    replace: bool = False,
    synced: bool = True,
) -> Path:
    """Write a checkpoint folder. It appears complete under its name, or not at all.

    config_json  config.json as parsed; checked first
    source       (name, tensor) of every tensor of the inventory, in any order, on any device; one is held at a time
    shard_bytes  upper size of a shard's data; a larger tensor gets its own
    extra        further files: name -> content (tokenizer.json, ...)
    replace      take the place of a checkpoint that is already there
    synced       wait until a disk has it; False for what is soon removed
    returns      the folder. The same arguments give the same bytes.
    Raises       the errors of ModelConfig.from_json; MissingTensor, UnknownTensor, DuplicateTensor, WrongShape,
                 WrongDtype; CheckpointExists; CheckpointNotWritten when the disk refuses.
    """
    assert sys.byteorder == "little", "the format is little-endian, this machine is not"
    folder = Path(path)
    specs = tensors(ModelConfig.from_json(config_json))
    if folder.exists() and (not replace or not _replaceable(folder)):
        raise CheckpointExists(folder)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _write_files(partial, config_json, specs, source, shard_bytes, extra or {}, synced)
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
    except OSError as error:
        raise CheckpointNotWritten(folder, str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))


def _write_files(
    folder: Path,
    config_json: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    source: Iterable[tuple[str, Tensor]],
    shard_bytes: int,
    extra: Mapping[str, bytes],
    synced: bool,
) -> None:
    plan = _plan_shards(specs, shard_bytes)
    places: dict[str, tuple[BinaryIO, int]] = {}
    files: list[BinaryIO] = []
    index: dict[str, str] = {}
    try:
        for number, names in enumerate(plan, 1):
            file_name = f"model-{number:05}-of-{len(plan):05}.safetensors"
            file = (folder / file_name).open("xb")
            files.append(file)
            header, at = _header(names, specs)
            file.write(header)
            file.truncate(len(header) + sum(specs[n].nbytes for n in names))
            places.update({name: (file, at[name]) for name in names})
            index.update(dict.fromkeys(names, file_name))
        written: set[str] = set()
        for name, tensor in source:
            if name not in specs:
                raise UnknownTensor(name, "the tensors to write", _similar(name, specs))
            if name in written:
                raise DuplicateTensor(name, "the tensors to write", "the tensors to write")
            _check_tensor(name, tuple(tensor.shape), _dtype_name(tensor, specs[name].dtype), specs[name])
            file, offset = places[name]
            file.seek(offset)
            file.write(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            written.add(name)
        _check_complete(written, specs)
    finally:
        for file in files:
            file.flush()
            if synced:
                os.fsync(file.fileno())
            file.close()
    total = sum(spec.nbytes for spec in specs.values())
    listing = {"metadata": {"total_size": total}, "weight_map": {name: index[name] for name in sorted(index)}}
    _write(folder / INDEX, (json.dumps(listing, indent=2) + "\n").encode(), synced)
    for name, content in extra.items():
        _write(folder / name, content, synced)
    _write(folder / "config.json", (json.dumps(config_json, indent=2) + "\n").encode(), synced)


def _write(path: Path, content: bytes, synced: bool) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        if synced:
            os.fsync(file.fileno())
