"""Damaged files: whatever happened to a byte, there is a typed error before any answer, or a level that names it.

Faults of one kind each, by name, are in tests/models/test_weights.py; here damage is drawn at random.
"""

import ast
import json
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

import benthic
from benthic import gate
from benthic.engine.llm import LLM
from benthic.errors import BenthicError, CheckpointError, MissingCheckpointFile, NonFiniteTensor, UnknownModel
from benthic.models.weights import INDEX, TORCH_DTYPES, Checkpoint, read_tensors, write_tensors
from benthic.testing import goldens
from benthic.testing.tokenizers import write_tokenizer
from benthic.text.tokenizer import Tokenizer
from tests.gate.conftest import settings

# a folder of its own for each example is what these tests make
drawn = hypothesis(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHARD = "model-00001-of-00001.safetensors"


def header_bytes(shard: Path) -> int:
    with shard.open("rb") as file:
        return 8 + struct.unpack("<Q", file.read(8))[0]


def flip(path: Path, at: int, mask: int) -> Callable[[], None]:
    """Change a byte; what is returned puts it back."""
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(1)[0]
        file.seek(at)
        file.write(bytes([before ^ mask]))

    def undo() -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([before]))

    return undo


def bytes_line(folder: Path) -> str:
    """What the first level says of a folder; empty: nothing deviates."""
    with LLM(config=settings(folder)) as llm:
        subject = gate.Subject(llm, "quick", lambda _: None, 1)
        return next((line.name for line in gate.bytes_level(subject) if not line.passed), "")


@drawn
@given(st.data())
def test_a_flipped_byte_of_a_header_is_a_typed_error_or_changes_nothing(copy: Path, data: st.DataObject) -> None:
    shard = copy / SHARD
    at = data.draw(st.integers(0, header_bytes(shard) - 1))
    undo = flip(shard, at, data.draw(st.integers(1, 255)))
    try:
        opened = Checkpoint.open(copy)
    except CheckpointError:
        return
    finally:
        undo()
    known = goldens.read(copy)
    assert known is not None
    assert opened.digest() == known.about["checkpoint"], "it opens only where nothing that counts was changed"


@drawn
@given(st.data())
def test_a_flipped_byte_of_config_or_index_is_a_typed_error_or_told_by_the_digest(
    copy: Path, data: st.DataObject
) -> None:
    path = copy / data.draw(st.sampled_from(["config.json", INDEX]))
    known, want = goldens.read(copy), json.loads(path.read_text())
    assert known is not None
    undo = flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(1, 255)))
    try:
        opened = Checkpoint.open(copy)
        same = path.name == INDEX or json.loads(path.read_text()) == want
        assert (opened.digest() == known.about["checkpoint"]) == same
    except CheckpointError:
        pass
    finally:
        undo()


@hypothesis(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_byte_of_the_data_is_named(copy: Path, data: st.DataObject) -> None:
    shard = copy / SHARD
    opened = Checkpoint.open(copy)
    name = data.draw(st.sampled_from(sorted(n for n, stored in opened.stored.items() if stored.nbytes)))
    stored = opened.stored[name]
    undo = flip(shard, stored.offset + data.draw(st.integers(0, stored.nbytes - 1)), 1 << data.draw(st.integers(0, 7)))
    try:
        assert bytes_line(copy) == f"file, {name}"
    except NonFiniteTensor:
        pass  # found while loading
    finally:
        undo()


@drawn
@given(st.integers(0, 2**63 - 1), st.integers(0, 400))
def test_lengths_and_cuts_are_typed_errors(copy: Path, length: int, cut: int) -> None:
    shard = copy / SHARD
    raw = shard.read_bytes()[:600]
    shard.write_bytes(struct.pack("<Q", length) + raw[8 : 8 + cut])
    with pytest.raises(CheckpointError):
        Checkpoint.open(copy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.3.attn.wo_b.scale", 255),
        ("layers.5.ffn.experts.2.w2.scale", 255),
        ("layers.0.ffn.shared_experts.w1.weight", 0x7F),
    ],
)
def test_scales_and_codes_that_are_no_numbers(copy: Path, name: str, value: int) -> None:
    stored = Checkpoint.open(copy).stored[name]
    with (copy / SHARD).open("r+b") as file:
        file.seek(stored.offset + 5)
        file.write(bytes([value]))
    for numerics in ("reference", "float"):
        with pytest.raises(NonFiniteTensor, match=name.rsplit(".", 3)[0].split(".experts")[0]):
            LLM(config=settings(copy, numerics=numerics))


def test_wide_weights_that_are_no_numbers(copy: Path) -> None:
    stored = Checkpoint.open(copy).stored["layers.1.hc_attn_fn"]
    with (copy / SHARD).open("r+b") as file:
        file.seek(stored.offset + 8)
        file.write(struct.pack("<f", float("inf")))
    with pytest.raises(NonFiniteTensor, match="hc_attn"):
        LLM(config=settings(copy))


def test_links_that_lead_nowhere_or_to_themselves(copy: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(UnknownModel):
        Checkpoint.open(loop)
    for name in (SHARD, "config.json", INDEX):
        kept = (copy / name).read_bytes()
        (copy / name).unlink()
        for target in (copy / name, tmp_path / "nothing"):
            (copy / name).symlink_to(target)
            with pytest.raises(CheckpointError):
                Checkpoint.open(copy)
            (copy / name).unlink()
        (copy / name).write_bytes(kept)
    for name in (goldens.JSON, goldens.TENSORS):
        (copy / name).unlink()
        (copy / name).symlink_to(copy / name)
    with pytest.raises(CheckpointError):
        goldens.read(copy)


def test_folders_and_pipes_in_the_place_of_files(copy: Path) -> None:
    for name in (SHARD, "config.json", INDEX):
        kept = (copy / name).read_bytes()
        (copy / name).unlink()
        (copy / name).mkdir()
        with pytest.raises(CheckpointError):
            Checkpoint.open(copy)
        (copy / name).rmdir()
        (copy / name).write_bytes(kept)


@drawn
@given(st.data())
def test_a_flipped_byte_of_the_tokenizer_is_a_typed_error_or_another_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "tokenizer-to-damage.json"
    if not path.exists():
        write_tokenizer(path.parent).rename(path)
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    damaged = path.with_name("tokenizer.json")
    damaged.write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2]))])
    with suppress(BenthicError):
        Tokenizer(damaged)


def test_foreign_architectures_are_refused_before_anything_is_mapped(copy: Path) -> None:
    data = json.loads((copy / "config.json").read_text())
    data["architectures"] = ["LlamaForCausalLM"]
    (copy / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        LLM(config=settings(copy))


def test_a_folder_without_permission(copy: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (copy / SHARD).chmod(0)
    with pytest.raises(CheckpointError):
        Checkpoint.open(copy)


# ---- small files of tensors ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["f", "i", "u"]), st.lists(st.integers(0, 4), max_size=3)), max_size=5))
def test_tensors_read_back(tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[str, list[int]]]) -> None:
    path = tmp_path_factory.getbasetemp() / "tensors.safetensors"
    dtypes = {"f": torch.float32, "i": torch.int32, "u": torch.uint8}
    made = {f"{i}.{kind}": torch.randint(0, 200, shape).to(dtypes[kind]) for i, (kind, shape) in enumerate(shapes)}
    write_tensors(path, made)
    found = read_tensors(path)
    assert found.keys() == made.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in made.items())


def test_other_dtypes_and_missing_files_are_typed(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor .* lies in"):
        read_tensors(copy / SHARD)
    with pytest.raises(MissingCheckpointFile):
        read_tensors(copy / "absent.safetensors")
    assert set(TORCH_DTYPES) >= {"BF16", "I8"}


# ---- nothing that is read can run ------------------------------------------------------------------------------------


RUNS_CODE = {"cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}


def test_nothing_loads_pickle() -> None:
    """No module that reads a format which can hold code; a training state is read with weights alone allowed."""
    root = Path(benthic.__file__).parent
    loads: list[str] = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & RUNS_CODE, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in RUNS_CODE, path
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                assert node.attr == "UnpicklingError", path  # what torch raises
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                owner = ast.unparse(node.func.value)
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if owner == "torch":
                    assert options.get("weights_only") == "True", path
                    loads.append(path.relative_to(root).as_posix())
                elif owner in ("np", "numpy"):
                    assert options.get("allow_pickle", "False") == "False", path
                assert owner != "torch.jit", path
    assert loads == ["train/loop.py"]


def test_a_pickle_in_the_place_of_a_shard_is_not_read(copy: Path) -> None:
    torch.save({"embed.weight": torch.zeros(2)}, copy / SHARD)
    with pytest.raises(CheckpointError):
        Checkpoint.open(copy)


def test_copies_are_not_the_original(golden: Path, copy: Path) -> None:
    """These tests damage copies alone."""
    shutil.rmtree(copy)
    assert (golden / SHARD).is_file()
