"""The gate bites: faults of `faults.py`, each against the level that has to see it.

A handful runs here on a small random checkpoint. All of them, on minnow, through the whole quick gate, are the slow
tests below, and `python -m tests.gate.faults`, whose result is kept and stands in docs/correctness.md.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from benthic import gate
from benthic.config import load
from benthic.engine.llm import LLM
from benthic.kernels import backends
from benthic.kernels.native import build
from benthic.models.registry import model_dir
from benthic.testing import goldens, ops
from tests.gate.conftest import settings
from tests.gate.faults import BY_NAME, FAULTS, ON_DEVICE, SEED, Fault, Patch, try_fault, try_on_device

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results" / "amd-epyc-2-cores" / "gate-faults.json"

needs_native = pytest.mark.skipif(not build.status().available, reason=f"no native kernels: {build.status().detail}")

LOADED = (
    ("FP4 nibbles high first", "loaded, layers.0.ffn.w13, expert 0"),
    ("w1 and w3 swapped", "loaded, layers.0.ffn.shared_w13.weight"),
    ("an expert in another's place", "loaded, layers.0.ffn.w13, expert 3"),
    ("scales of one matrix a power too high", "loaded, layers.3.attn.wo_b.weight"),
    ("embedding rows shifted by one", "loaded, embed.weight"),
    ("n-gram table rows shifted by one", "loaded, layers.1.engram.embed.codes"),
    ("rotation without YaRN", "loaded, layers.2.attn.freqs"),
)
WHILE_RUNNING = (
    ("layers", "no inverse rotation", "layer 0, attention output"),
    ("layers", "comb transposed", "layer 0, mixes"),
    ("layers", "own mix instead of the one before", "layer 0, attention input"),
    ("layers", "four Sinkhorn iterations", "layer 0, mixes"),
    ("layers", "routing weights not normalised", "layer 0, experts"),
    ("layers", "products without their quantiser", "layer 0, query"),
    ("layers", "groups placed at their last token", "layer 2, stored entry"),
    ("layers", "compressed entries of another layer", "layer 5, attention"),
    ("layers", "window one row short", "layer 3, attention"),
    ("layers", "one entry too few", "layer 2, entries, how many"),
    ("layers", "candidates ignored", "layer 8, entries"),
    ("layers", "epsilon 1e-6", "layer 0, mixes"),
    ("layers", "head 5 % too large", "head"),
    ("layers", "block tables shifted in decode", "layer"),
)
IN_KERNELS = (
    ("kernel: n-gram row before", "ngram_rows"),
    ("kernel: ring one place on", "ring_write: bytes"),
    ("kernel: one expert too few for single rows", "moe, one row"),
    ("kernel: routing scale off by 2 %", "moe, "),
)


@pytest.fixture(scope="module")
def llm(golden: Path) -> Iterator[LLM]:
    with LLM(config=settings(golden)) as engine:
        yield engine


def first_line(llm: LLM, level: str, fault: Fault | None) -> str:
    """The first that deviates at one level; empty when nothing does."""
    with Patch.context() as patch:
        if fault is not None:
            fault.change(patch, llm)
        subject = gate.Subject(llm, "quick", lambda _: None, SEED)
        return next((line.name for line in gate.LEVELS[level](subject) if not line.passed), "")


@pytest.mark.parametrize(("name", "line"), LOADED, ids=[name for name, _ in LOADED])
def test_what_is_loaded_wrongly_is_named(golden: Path, name: str, line: str) -> None:
    with Patch.context() as patch:
        BY_NAME[name].change(patch, None)
        with LLM(config=settings(golden)) as engine:
            assert first_line(engine, "bytes", None) == line


@pytest.mark.parametrize(("level", "name", "line"), WHILE_RUNNING, ids=[name for _, name, _ in WHILE_RUNNING])
def test_a_layer_that_computes_wrongly_is_named(llm: LLM, level: str, name: str, line: str) -> None:
    assert first_line(llm, level, BY_NAME[name]).startswith(line)


@needs_native
def test_kernels_that_compute_wrongly_are_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed is enough here."""
    monkeypatch.setattr(gate, "SEED", SEED)
    for name, line in IN_KERNELS:
        assert first_line(llm, "ops", BY_NAME[name]).startswith(line), name


def test_nothing_is_named_when_nothing_is_wrong(llm: LLM) -> None:
    assert not first_line(llm, "bytes", None)
    assert not first_line(llm, "layers", None)


@pytest.mark.parametrize("name", ["one bit of a weight in the file", "config.json of another model"])
def test_files_that_are_not_those_are_named(copy: Path, name: str) -> None:
    BY_NAME[name].change(Patch(), copy)
    with LLM(config=settings(copy)) as engine:
        assert first_line(engine, "bytes", None).startswith("file, ")


def test_every_fault_is_one() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 28
    assert {fault.kind for fault in FAULTS} >= {"loading", "file", "model code", "kernel", "C source", "engine"}


# ---- all of them, on minnow ------------------------------------------------------------------------------------------


def test_what_is_kept_is_of_these_faults() -> None:
    body = json.loads(RESULT.read_text())
    assert [one["fault"] for one in body["faults"]] == [fault.name for fault in FAULTS]
    assert body["caught"] == sum(one["level"] is not None for one in body["faults"]) >= 24 / 25 * len(FAULTS)


needs_goldens = pytest.mark.skipif(
    not (model_dir("minnow") / goldens.JSON).exists(), reason="the packaged model has no goldens"
)


def missed(some: Iterable[Fault]) -> list[str]:
    config = load(overrides={"model": "minnow", "log_level": "error", "cpu.threads": 1})
    return [fault.name for fault in some if not try_fault(fault, config).level]


@pytest.mark.slow
@needs_native
@needs_goldens
@pytest.mark.parametrize("when", ["load", "run", "files", "source"])
def test_the_quick_gate_catches_what_is_broken_in_minnow(when: str) -> None:
    """At least 24 of 25."""
    if when == "source" and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    some = [fault for fault in FAULTS if fault.when == when]
    found = missed(some)
    assert len(found) <= len(some) / 25, found


@pytest.mark.slow
@needs_native
def test_faults_in_kernels_of_a_gpu_are_named_in_the_form_of_its_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the plain references stand for its kernels. One seed is enough."""
    steps = {"attend", "select_records", "compress_store", "key_store"}
    load_ = backends._load
    monkeypatch.setattr(backends, "_load", lambda path, op: ops.reference(op) if op in steps else load_(path, op))
    monkeypatch.setitem(backends.SERVES, "native", backends.SERVES["native"] | steps)
    subject = gate.Subject(llm, "quick", lambda _: None, gate.SEED)
    subject.on_device = True
    missed: list[tuple[str, str]] = []
    for fault in ON_DEVICE:
        op = fault.kind.split("`")[1]
        if op == "sample_rows" or fault.name == "experts unclamped":
            continue  # a CPU samples in another way; nothing in a small random model reaches the clamp
        with Patch.context() as patch:
            fault.change(patch, llm)
            found = next((line.name for line in gate.ops_level(subject) if not line.passed), "nothing")
        if not found.startswith(op):
            missed.append((fault.name, found))
    assert not missed


@pytest.mark.gpu
@needs_goldens
def test_the_quick_gate_catches_what_is_broken_in_kernels_of_a_gpu() -> None:
    """And nothing where nothing is."""
    config = load(overrides={"model": "minnow", "log_level": "error", "device": "cuda"})
    nothing = Fault("nothing", "-", lambda patch, llm: None, guards="-")
    found = {fault.name: seen.level for fault, seen in try_on_device((nothing, *ON_DEVICE), config)}
    assert not found.pop("nothing")
    assert all(found.values()), found
