"""Checkpoint folders: what is written reads back to the byte, and every kind of damage is refused by name."""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.errors import (
    BadConfigJSON,
    BadConfigKey,
    BadIndex,
    BadShard,
    CheckpointError,
    CheckpointExists,
    CheckpointNotWritten,
    DuplicateTensor,
    MissingCheckpointFile,
    MissingShard,
    MissingTensor,
    TruncatedFile,
    UnknownModel,
    UnknownTensor,
    WrongDtype,
    WrongShape,
)
from benthic.kernels import quant
from benthic.models.deepseek_v41_config import DTYPE_BYTES, ModelConfig, tensors
from benthic.models.weights import INDEX, SINGLE, TORCH_DTYPES, Checkpoint, write_checkpoint
from benthic.testing.checkpoints import config_path, make_tiny, random_tensors, tiny_config

# small enough that a hundred damaged copies cost nothing
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 2,
    "vocab_size": 4096,
    "moe_intermediate_size": 128,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "dspark_n_routed_experts": 2,
    "engram_n_heads": 1,
    "engram_head_dim": 128,
    "dspark_markov_rank": 7,  # odd: not every order of the tensors keeps them aligned
}
SHARD_BYTES = 1 << 20


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("weights") / "small", shard_bytes=SHARD_BYTES, **SMALL)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_header(shard: Path) -> tuple[dict[str, Any], bytes]:
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(shard: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data)


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_header(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the shard that holds a tensor."""
    shard = shard_of(folder, name)
    header, data = read_header(shard)
    change(header)
    write_header(shard, header, data)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def rename(folder: Path, old: str, new: str) -> None:
    def in_header(header: dict[str, Any]) -> None:
        header[new] = header.pop(old)

    def in_index(index: dict[str, str]) -> None:
        index[new] = index.pop(old)

    edit_header(folder, old, in_header)
    edit_index(folder, in_index)


# Reading what was written


def test_write_of_read_is_the_same_bytes(original: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(original)
    again = write_checkpoint(tmp_path / "again", opened.config_json, opened.items(), shard_bytes=SHARD_BYTES)
    names = sorted(p.name for p in original.iterdir())
    assert names == sorted(p.name for p in again.iterdir())
    for name in names:
        assert (original / name).read_bytes() == (again / name).read_bytes(), name


def test_the_order_of_the_tensors_given_does_not_matter(original: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(original)
    backwards = reversed(list(opened.items()))
    again = write_checkpoint(tmp_path / "again", opened.config_json, backwards, shard_bytes=SHARD_BYTES)
    assert all((original / p.name).read_bytes() == p.read_bytes() for p in again.iterdir())


def test_values_read_back(original: Path) -> None:
    opened = Checkpoint.open(original)
    count = 0
    for name, want in random_tensors(opened.config, seed=0):
        got = opened.tensor(name)
        assert got.dtype == TORCH_DTYPES[opened.specs[name].dtype]
        assert got.shape == want.shape
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
        count += 1
    assert count == len(opened.specs) == len(list(opened.items()))


def test_the_safetensors_package_reads_the_same(original: Path) -> None:
    """An independent reader, for the dtypes it knows."""
    from safetensors import safe_open

    opened = Checkpoint.open(original)
    with safe_open(shard_of(original, "embed.weight"), framework="pt") as file:
        assert torch.equal(file.get_tensor("embed.weight"), opened.tensor("embed.weight"))
    with safe_open(shard_of(original, "layers.1.engram.embed.weight"), framework="pt") as file:
        got = file.get_tensor("layers.1.engram.embed.weight")
        assert torch.equal(got.view(torch.uint8), opened.tensor("layers.1.engram.embed.weight").view(torch.uint8))


def test_tensors_are_views_of_the_file(original: Path) -> None:
    opened = Checkpoint.open(original)
    first, second = opened.tensor("embed.weight"), opened.tensor("embed.weight")
    assert first.data_ptr() == second.data_ptr()
    before = shard_of(original, "embed.weight").read_bytes()
    first.zero_()
    assert shard_of(original, "embed.weight").read_bytes() == before, "the file never changes"
    kept = Checkpoint.open(original).tensor("norm.weight")
    assert kept.float().mean() == pytest.approx(1, abs=0.1), "a tensor outlives its checkpoint"


def test_written_tensors_are_aligned(original: Path) -> None:
    for shard in shards(original):
        raw = shard.read_bytes()[:8]
        start = 8 + struct.unpack("<Q", raw)[0]
        assert start % 8 == 0
        for name, entry in read_header(shard)[0].items():
            if name != "__metadata__":
                assert (start + entry["data_offsets"][0]) % DTYPE_BYTES[entry["dtype"]] == 0


def test_unaligned_tensors_read_the_same(folder: Path) -> None:
    """A header of odd length shifts everything; the format allows it."""
    want = Checkpoint.open(folder).digest()
    for shard in shards(folder):
        header, data = read_header(shard)
        text = json.dumps(header).encode()
        write_header(shard, text + b" " * ((len(text) + 1) % 2), data)
    opened = Checkpoint.open(folder)
    assert opened.digest() == want
    for name, tensor in opened.items():
        assert tensor.data_ptr() % tensor.element_size() == 0, name


def test_shards_respect_their_size_and_engram_tables_come_last(original: Path) -> None:
    assert len(shards(original)) > 4
    for shard in shards(original):
        assert len(read_header(shard)[1]) <= SHARD_BYTES + 4096
    for shard, layer in zip(shards(original)[-2:], (1, 4), strict=True):
        names = set(read_header(shard)[0]) - {"__metadata__"}
        assert names == {f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"}


def test_digest_ignores_sharding_and_sees_one_bit(original: Path, folder: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(original)
    whole = write_checkpoint(tmp_path / "whole", opened.config_json, opened.items())
    assert len(shards(whole)) == 1
    assert Checkpoint.open(whole).digest() == opened.digest() == opened.digest()
    shard = shard_of(folder, "layers.3.ffn.experts.1.w2.weight")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert Checkpoint.open(folder).digest() != opened.digest()


def test_a_single_file_without_index(original: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(original)
    whole = write_checkpoint(tmp_path / "whole", opened.config_json, opened.items())
    shards(whole)[0].rename(whole / SINGLE)
    (whole / INDEX).unlink()
    assert Checkpoint.open(whole).digest() == opened.digest()


def test_the_model_prefix_is_tolerated(folder: Path) -> None:
    want = Checkpoint.open(folder).digest()
    for name in list(tensors(Checkpoint.open(folder).config))[:40]:
        rename(folder, name, f"model.{name}")
    opened = Checkpoint.open(folder)
    assert opened.digest() == want
    assert "embed.weight" in dict(opened.items())


def test_tokenizer_path(original: Path, folder: Path) -> None:
    assert Checkpoint.open(original).tokenizer_path is None
    (folder / "tokenizer.json").write_text("{}")
    assert Checkpoint.open(folder).tokenizer_path == folder / "tokenizer.json"


# Damage

NAME = "layers.2.attn.compressor.wkv.weight"


def drop(folder: Path, name: str) -> None:
    """Take a tensor out of header, data and index."""
    shard = shard_of(folder, name)
    header, data = read_header(shard)
    begin, end = header.pop(name)["data_offsets"]
    for entry in header.values():
        if entry.get("data_offsets", [0])[0] >= end:
            entry["data_offsets"] = [at - (end - begin) for at in entry["data_offsets"]]
    write_header(shard, header, data[:begin] + data[end:])
    edit_index(folder, lambda index: index.pop(name))


def test_missing_tensors(folder: Path) -> None:
    drop(folder, NAME)
    with pytest.raises(MissingTensor, match=r"compressor\.wkv\.weight.*BF16 \[128, 128\]"):
        Checkpoint.open(folder)
    drop(folder, "layers.2.attn.q_norm.weight")
    with pytest.raises(MissingTensor, match=r"q_norm.*1 more"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "name", ["layers.0.hc_attn_norm.weight", "layers.2.attn.compressor.ape", "hc_head_fn", "model.extra.weight"]
)
def test_unknown_tensors(folder: Path, name: str) -> None:
    """Among them the separate hyper-connection norms of another format, which must not be dropped silently."""

    def add(header: dict[str, Any]) -> None:
        header[name] = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}

    shard = shard_of(folder, NAME)
    edit_header(folder, NAME, add)
    edit_index(folder, lambda index: index.update({name: shard.name}))
    with pytest.raises(UnknownTensor) as caught:
        Checkpoint.open(folder)
    assert caught.value.name == name
    assert str(shard) in str(caught.value)


def test_an_unknown_tensor_names_the_nearest(folder: Path) -> None:
    rename(folder, NAME, "layers.2.attn.compressor.wkvs.weight")
    with pytest.raises(UnknownTensor, match=r"nearest known tensor is layers\.2\.attn\.compressor\.wkv\.weight"):
        Checkpoint.open(folder)


def set_entry(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[NAME][key] = value

    return change


def test_wrong_shape_and_dtype(folder: Path, original: Path) -> None:
    edit_header(folder, NAME, set_entry("shape", [64, 256]))
    with pytest.raises(WrongShape, match=r"compressor\.wkv.*\[64, 256\], expected \[128, 128\]"):
        Checkpoint.open(folder)
    edit_header(folder, NAME, set_entry("shape", [128, 128]))
    for dtype in ("F16", "I16"):
        edit_header(folder, NAME, set_entry("dtype", dtype))
        with pytest.raises(WrongDtype, match=f"compressor.wkv.*{dtype}, expected BF16"):
            Checkpoint.open(folder)


@pytest.mark.parametrize("dtype", ["U8", "F8_E4M3", "I8"])
def test_scales_must_be_scales(folder: Path, dtype: str) -> None:
    name = "layers.2.attn.wq_a.scale"
    edit_header(folder, name, lambda header: header[name].update(dtype=dtype))
    with pytest.raises(WrongDtype, match=f"wq_a.scale.*{dtype}, expected F8_E8M0"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_truncated_shard(folder: Path, cut: int) -> None:
    shard = shard_of(folder, NAME)
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-cut])
    with pytest.raises(TruncatedFile) as caught:
        Checkpoint.open(folder)
    for part in (str(shard), str(len(raw)), str(len(raw) - cut)):
        assert part in str(caught.value)


@pytest.mark.parametrize("keep", [0, 7, 8, 50])
def test_a_shard_cut_inside_its_header(folder: Path, keep: int) -> None:
    shard = shard_of(folder, NAME)
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(TruncatedFile):
        Checkpoint.open(folder)


def test_headers_that_are_no_headers(folder: Path) -> None:
    shard = shard_of(folder, NAME)
    good = shard.read_bytes()
    header, data = read_header(shard)
    entry = header[NAME]
    begin, end = entry["data_offsets"]
    bad: list[tuple[Any, str]] = [
        (b"{" * 8, "not JSON"),
        (b"\xff" * 8, "not JSON"),
        (b"[]", "not an object"),
        (b'{"a": {}, "a": {}}', "twice"),
        (header | {NAME: 7}, "want an object"),
        (header | {NAME: entry | {"dtype": None}}, "want a string"),
        (header | {NAME: entry | {"shape": [128, -1]}}, "integers >= 0"),
        (header | {NAME: entry | {"shape": 128}}, "not a list"),
        (header | {NAME: entry | {"shape": [True, 128]}}, "integers >= 0"),
        (header | {NAME: entry | {"shape": [128, 64]}}, "cannot lie in"),
        (header | {NAME: entry | {"data_offsets": [begin]}}, "integers >= 0"),
        (header | {NAME: entry | {"data_offsets": [end, begin]}}, "cannot lie in"),
        (header | {NAME: entry | {"data_offsets": [begin + 2, end + 2]}}, "gap or overlap"),
    ]
    for content, detail in bad:
        write_header(shard, content, data)
        with pytest.raises(BadShard, match=detail):
            Checkpoint.open(folder)
    write_header(shard, header, data + b"\0")
    with pytest.raises(BadShard, match="its header describes"):
        Checkpoint.open(folder)
    shard.write_bytes(struct.pack("<Q", 1 << 60) + good[8:])
    with pytest.raises(BadShard, match="limit"):
        Checkpoint.open(folder)


def test_an_index_that_names_an_absent_shard(folder: Path) -> None:
    shard = shard_of(folder, NAME)
    shard.unlink()
    with pytest.raises(MissingShard, match=f"{shard.name}"):
        Checkpoint.open(folder)


def test_an_index_that_contradicts_the_shards(folder: Path) -> None:
    good = (folder / INDEX).read_text()
    other = next(s.name for s in shards(folder) if s != shard_of(folder, NAME))
    cases: list[tuple[Callable[[dict[str, str]], Any], type[CheckpointError], str]] = [
        (lambda index: index.update({NAME: other}), BadIndex, "compressor.wkv"),
        (lambda index: index.pop(NAME), BadIndex, "compressor.wkv"),
        (lambda index: index.update({"model.embed.weight": other}), BadIndex, "does not hold it"),
        (lambda index: index.update({"extra.weight": other}), UnknownTensor, "extra.weight"),
        (lambda index: index.update({NAME: "../" + other}), BadIndex, "in this folder"),
        (lambda index: index.update({NAME: 3}), BadIndex, "in this folder"),  # type: ignore[dict-item]
        (lambda index: index.update({NAME: "weights.bin"}), BadIndex, "in this folder"),
        (lambda index: index.clear(), BadIndex, "missing or empty"),
    ]
    for change, error, detail in cases:
        (folder / INDEX).write_text(good)
        edit_index(folder, change)
        with pytest.raises(error, match=detail):
            Checkpoint.open(folder)
    for content in ("{", "[]", "{}", '{"weight_map": []}'):
        (folder / INDEX).write_text(content)
        with pytest.raises(BadIndex):
            Checkpoint.open(folder)


def test_the_same_tensor_twice(folder: Path) -> None:
    """Once with and once without the prefix."""

    shard = shard_of(folder, NAME)
    (folder / INDEX).unlink()
    for other in shards(folder):
        if other != shard:
            other.unlink()
    shard.rename(folder / SINGLE)
    header, data = read_header(folder / SINGLE)
    size = 2 * 128 * 128
    header[f"model.{NAME}"] = {"dtype": "BF16", "shape": [128, 128], "data_offsets": [len(data), len(data) + size]}
    write_header(folder / SINGLE, header, data + bytes(size))
    with pytest.raises(DuplicateTensor, match=r"compressor\.wkv"):
        Checkpoint.open(folder)


def test_folders_without_files(folder: Path, tmp_path: Path) -> None:
    for shard in shards(folder):
        shard.unlink()
    (folder / INDEX).unlink()
    with pytest.raises(MissingCheckpointFile, match="weights are missing"):
        Checkpoint.open(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(BadConfigJSON):
        Checkpoint.open(folder)
    (folder / "config.json").unlink()
    with pytest.raises(MissingCheckpointFile, match=r"config\.json"):
        Checkpoint.open(folder)
    with pytest.raises(UnknownModel):
        Checkpoint.open(tmp_path / "absent")


def test_nothing_is_mapped_before_all_headers_are_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shards(folder)[-1]
    shard.write_bytes(shard.read_bytes()[:-1])

    def mapped(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a shard was mapped")

    monkeypatch.setattr("benthic.models.weights.mmap.mmap", mapped)
    with pytest.raises(TruncatedFile):
        Checkpoint.open(folder)


# Writing


def small_tensors() -> tuple[dict[str, Any], dict[str, Tensor]]:
    data = tiny_config(**SMALL)
    return data, dict(random_tensors(ModelConfig.from_json(data)))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    data, content = small_tensors()
    norm = content["norm.weight"]
    cases: list[tuple[Iterator[tuple[str, Tensor]] | list[tuple[str, Tensor]], type[CheckpointError], str]] = [
        ([(n, t) for n, t in content.items() if n != "norm.weight"], MissingTensor, r"norm\.weight"),
        ([*content.items(), ("extra", norm)], UnknownTensor, "extra"),
        ([*content.items(), ("norm.weight", norm)], DuplicateTensor, r"norm\.weight"),
        (list((content | {"norm.weight": norm[1:]}).items()), WrongShape, r"norm\.weight"),
        (list((content | {"norm.weight": norm.float()}).items()), WrongDtype, r"norm\.weight.*F32"),
        (list((content | {"norm.weight": norm.half()}).items()), WrongDtype, "float16"),
    ]
    for source, error, detail in cases:
        with pytest.raises(error, match=detail):
            write_checkpoint(tmp_path / "out", data, source)
        assert list(tmp_path.iterdir()) == []
    bad = tiny_config(**SMALL) | {"dtype": "float16"}
    with pytest.raises(BadConfigKey):
        write_checkpoint(tmp_path / "out", bad, content.items())
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    data, content = small_tensors()

    def source() -> Iterator[tuple[str, Tensor]]:
        yield from list(content.items())[:50]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "out", data, source())
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    data, content = small_tensors()
    out = write_checkpoint(tmp_path / "out", data, content.items(), extra={"tokenizer.json": b"{}"})
    assert (out / "tokenizer.json").read_bytes() == b"{}"
    with pytest.raises(CheckpointExists):
        write_checkpoint(out, data, content.items())
    content["norm.weight"] = content["norm.weight"] * 2
    before = Checkpoint.open(out)
    write_checkpoint(out, data, content.items(), replace=True)
    assert torch.equal(Checkpoint.open(out).tensor("norm.weight"), content["norm.weight"])
    assert not (out / "tokenizer.json").exists()
    assert torch.equal(before.tensor("norm.weight") * 2, content["norm.weight"]), "an open reader keeps the old file"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("keep me")
    with pytest.raises(CheckpointExists):
        write_checkpoint(tmp_path / "home", data, content.items(), replace=True)
    assert (tmp_path / "home" / "letter.txt").exists()


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    data, content = small_tensors()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten, match="cannot write"):
        write_checkpoint(tmp_path / "file" / "out", data, content.items())
    with pytest.raises(CheckpointNotWritten):
        write_checkpoint(tmp_path / "out", data, content.items(), extra={"config.json": b"twice"})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_scales_and_fp4_bytes_may_come_as_either_byte(tmp_path: Path) -> None:
    data, content = small_tensors()
    scale, code = "layers.0.attn.wq_a.scale", "layers.0.ffn.experts.0.w1.weight"
    plain = write_checkpoint(tmp_path / "a", data, content.items())
    content[scale] = content[scale].view(torch.float8_e8m0fnu)
    content[code] = content[code].view(torch.uint8)
    content["head.weight"] = content["head.weight"].T.contiguous().T  # not contiguous
    other = write_checkpoint(tmp_path / "b", data, content.items())
    for file in plain.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes()


# The random checkpoints that all other tests use


def test_random_checkpoints_are_reproducible_and_seeded(tmp_path: Path) -> None:
    first = Checkpoint.open(make_tiny(tmp_path / "a", **SMALL)).digest()
    assert Checkpoint.open(make_tiny(tmp_path / "b", **SMALL)).digest() == first
    assert Checkpoint.open(make_tiny(tmp_path / "c", seed=1, **SMALL)).digest() != first


@pytest.mark.parametrize("name", ["tiny", "tiny_512"])
def test_random_checkpoints_have_the_advised_spread(name: str, tmp_path: Path) -> None:
    opened = Checkpoint.open(make_tiny(tmp_path / "tiny", name))
    assert len(opened.specs) == 1586
    assert opened.config == ModelConfig.from_json(config_path(name))

    def dense(name: str) -> Tensor:
        return quant.dequantise_weight_fp8(
            opened.tensor(f"{name}.weight"), opened.tensor(f"{name}.scale"), torch.float32
        )

    assert dense("layers.3.attn.wq_b").std() == pytest.approx(128**-0.5, rel=0.05)
    codes, scales = opened.tensor("layers.3.ffn.experts.2.w1.weight"), opened.tensor("layers.3.ffn.experts.2.w1.scale")
    expert = quant.dequantise_weight_fp4(codes, scales, torch.float32)
    assert 0.3 / 16 < expert.std() < 1.5 / 16
    assert scales.max() <= 127 - 5
    assert len(scales.unique()) == 2
    table = quant.dequantise_fp8(
        opened.tensor("layers.4.engram.embed.weight"), opened.tensor("layers.4.engram.embed.scale")
    )
    assert table.std() == pytest.approx(1, abs=0.02)
    assert opened.tensor("layers.0.attn.q_norm.weight").float().mean() == pytest.approx(1, abs=0.05)
    base = opened.tensor("layers.6.hc_attn_base")
    assert base[:4].tolist() == [-3, -3, 3, -3]
    assert base[4:8].tolist() == [0] * 4
    assert base[8:].reshape(4, 4).diagonal().tolist() == [3] * 4
    scale = opened.tensor("layers.6.hc_ffn_scale")
    assert ((scale >= 0.01) & (scale <= 1)).all()
    bias, image_bias = opened.tensor("layers.5.ffn.gate.bias"), opened.tensor("layers.5.ffn.gate.bias_vl")
    assert (bias - image_bias).abs().mean() > 0.1
    assert np.isfinite([t.float().abs().max().item() for _, t in opened.items()]).all()


def test_overriding_an_engram_key_resizes_the_tables() -> None:
    config = ModelConfig.from_json(tiny_config(engram_vocab_size=2000))
    assert all(rows > 24_000 for rows in config.text.engram_num_embeddings)
