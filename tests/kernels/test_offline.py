"""Triton kernels compiled for SM90 at the release's sizes, on a machine without a GPU: nothing spills, no block wants
more shared memory than there is, and what multiplies matrices does so with warp-group instructions, none of whose
registers are written to while it reads them.

pytest's own process interprets Triton, so the compiling is done by this file as a script, in processes of their own:

    python tests/kernels/test_offline.py linear "linear head" --invariant      ops, or beginnings of cases' names

prints one JSON line a kernel; with --candidates also those of every configuration that `benthic bench tune` tries.
Cases are those of `benthic bench kernel`; operands are never touched.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

SHARED_MOST = 232448  # bytes of shared memory that a block may have on SM90
PRODUCTS = {  # ops that multiply matrices: of each case one kernel must do so with warp-group instructions
    "linear",
    "grouped_linear",
    "attention_inputs",
    "attention_output",
    "attend",
    "select_records",
    "compress_store",
    "route",
    "experts",
    "moe",
}
STACK_MOST = {  # bytes a thread, of kernels that may keep anything in memory
    # has all 255 registers there are. What is left over does not change while it runs: its loop has 1400 instructions
    # for 128 keys, of which 5 to 17 read such a value back and none stores one
    "attend": 88,
    # `_choose` was fastest so on an H200: with 4 warps, 4 % before 8 that keep nothing in memory
    "_choose": 104,
}
QUICK = ("rms_norm 64", "linear wqkv_a 1792x5120 M=16")
GROUPS = (  # what one process compiles
    ("rms_norm", "rotate", "roundtrip_fp8", "ring_write", "table_rows", "engram_gate", "hyper_read"),
    ("linear", "grouped_linear"),
    ("linear", "grouped_linear", "--invariant"),
    ("attention_inputs", "attention_output"),
    ("attention_inputs", "attention_output", "--invariant"),
    ("attend", "compress_store"),
    ("select_records",),
    ("route", "experts"),
    ("experts R=384", "--candidates"),
    ("moe",),
    ("sample_rows",),
)


# ---- the child: compile ----------------------------------------------------------------------------------------------


def compiled(names: list[str]) -> Iterator[dict[str, Any]]:
    """The kernels of each case whose op is named, or whose name begins so."""
    from benthic.bench.ahead import OnDevice, pretending
    from benthic.bench.cases import RELEASE
    from benthic.kernels import backends
    from benthic.kernels.triton import tuning
    from benthic.testing.offline import compiling

    sizes = replace(
        RELEASE,
        rows=(16, 64, 384, 4096),
        small_rows=(64, 4096),
        moe_rows=(8, 64, 2048),
        contexts=((131072, 64, 1), (131072, 64, 6), (1048448, 4, 1)),
        attend=((64, 1), (64, 6)),
        head_rows=(64,),
        pool_blocks=65,
        table_rows=4096,
    )
    with pretending(), backends.invariant("--invariant" in names):
        cases = OnDevice(sizes)
        for case in chain(cases.all(), attend_variants(cases)):
            if not any(case.op == name or case.name.startswith(name) for name in names):
                continue
            if case.op not in backends.SERVES["triton"] and case.op in backends.FILES:
                continue
            about = {"op": case.op, "case": case.name}
            try:
                with compiling() as kernels, tuning.trying() as trial:
                    work = case.build()
                    work()
                for answers in tried(trial) if "--candidates" in names else ():
                    with compiling() as more, tuning.trying(answers):
                        work()
                    kernels += more
            except Exception as error:
                yield about | {"error": f"{type(error).__name__}: {error}"[:500]}
                continue
            if not kernels:
                yield about | {"error": "no kernel was launched"}
            for kernel in kernels:
                told = {key: value for key, value in kernel._asdict().items() if key != "asm"}
                yield about | told | {"overwritten": faults_of(kernel)}


def tried(trial: Any) -> Iterator[Any]:
    """Each candidate's answers to the questions that a case has put."""
    from benthic.bench import ahead, tune

    listed = tune.choices()
    for op in {op for op, _ in trial.asked}:
        yield from ahead.candidates(op, {key: asked for (its, key), asked in trial.asked.items() if its == op}, listed)


@cache
def faults_in(cubin: bytes) -> list[str]:
    from benthic.testing import sass

    return sass.overwritten(sass.listing(cubin))


def faults_of(kernel: Any) -> list[str]:
    return faults_in(kernel.asm["cubin"]) if kernel.wgmma else []


def attend_variants(cases: Any) -> Iterator[Any]:
    """Every form of `attend` that a step can choose: spans and whole rows, with and without entries, both rounds."""
    for rows, entries, ratio, rounded in product((1, 8, 64), (True, False), (1, 2), (True, False)):
        if entries or ratio == 1:
            case = cases.attend(rows, 1, "decode", entries, ratio, rounded)
            yield replace(case, shape=f"{case.shape}, entries {entries}, ratio {ratio}, rounded {rounded}")


# ---- the tests -------------------------------------------------------------------------------------------------------


def compile_there(*names: str) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, __file__, *names],
        capture_output=True,
        text=True,
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(kernels: list[dict[str, Any]]) -> list[str]:
    """What is wrong, a line each."""
    found: list[str] = []
    for kernel in kernels:
        if "error" in kernel:
            found.append(f"{kernel['case']}: {kernel['error']}")
            continue
        name = f"{kernel['case']}: {kernel['name']}"
        if kernel["stack_bytes"] > STACK_MOST.get(kernel["name"], 0):
            found.append(f"{name} keeps {kernel['stack_bytes']} bytes a thread in memory")
        if kernel["shared_bytes"] > SHARED_MOST:
            found.append(f"{name} wants {kernel['shared_bytes']} bytes of shared memory")
        found += [f"{name} overwrites what is read: {fault}" for fault in kernel["overwritten"]]
    whole = [kernel for kernel in kernels if "error" not in kernel and kernel["op"] in PRODUCTS]
    with_products = {kernel["case"] for kernel in whole if kernel["wgmma"]}
    for case in {kernel["case"]: None for kernel in whole if kernel["case"] not in with_products}:
        found.append(f"{case} has no warp-group product")
    return found


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_two_kernels() -> None:
    kernels = compile_there(*QUICK)
    assert {kernel["case"] for kernel in kernels} == {
        "rms_norm 64x1280",
        "linear wqkv_a 1792x5120 M=16",
        "linear wqkv_a 1792x5120 M=16, fast",
    }
    assert faults(kernels) == []


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_kernels(group: tuple[str, ...]) -> None:
    found = faults(compile_there(*group))
    assert not found, "\n".join(found)


def test_faults_are_seen() -> None:
    good = {"op": "linear", "case": "a", "name": "_product", "stack_bytes": 0, "shared_bytes": SHARED_MOST, "wgmma": 4}
    good["overwritten"] = []
    other = good | {"op": "rms_norm", "case": "b", "wgmma": 0}
    sums = good | {"name": "_sum_parts", "wgmma": 0}
    assert faults([good, sums, other]) == []
    assert faults([good | {"stack_bytes": 8}]) == ["a: _product keeps 8 bytes a thread in memory"]
    assert faults([good | {"name": "attend", "stack_bytes": STACK_MOST["attend"]}]) == []
    assert faults([other | {"shared_bytes": SHARED_MOST + 1}]) == ["b: _product wants 232449 bytes of shared memory"]
    assert faults([good | {"overwritten": ["IADD3 before HGMMA"]}]) == [
        "a: _product overwrites what is read: IADD3 before HGMMA"
    ]
    assert faults([sums, sums, other]) == ["a has no warp-group product"]
    assert faults([{"op": "moe", "case": "c", "error": "KeyError: 1"}]) == ["c: KeyError: 1"]


if __name__ == "__main__":
    for line in compiled(sys.argv[1:]):
        print(json.dumps(line), flush=True)
