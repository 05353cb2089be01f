"""`benthic doctor`: what this machine can run, and why not. Each finding is one line, with a remedy where one helps.

It loads no weights. Exit code 0: Benthic can generate text here; 1: something it needs is missing.

`benthic doctor --compare cpu,cuda` runs the model on both and compares op by op, layer by layer, logits and greedy text
(`bench/compare.py`). `benthic doctor --ranges` looks at a model's own activations and weights before the profile `fast`
is trusted with them. Exit code 1: a line is beyond its bound.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path

import benthic
from benthic import config
from benthic.errors import BadField, BenthicError, NativeBuildError
from benthic.host import memory_bytes
from benthic.types import NUMERICS

GIB = 1 << 30
RANGE_PROMPTS = 8  # documents that --ranges looks at


class Status(StrEnum):
    OK = "ok"
    ABSENT = "absent"  # optional and not there
    SLOW = "slow"  # works, but slower than it could
    FAILED = "failed"  # Benthic cannot run without


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "target", nargs="?", metavar="MODEL", help="with --compare: model to run (default: the setting)"
    )
    parser.add_argument(
        "--compare", metavar="A,B", help="compare two places: devices such as cpu,cuda; cpu:reference is plain torch"
    )
    parser.add_argument(
        "--ranges", action="store_true", help="do the model's values fit under one scale, as the profile fast has it"
    )
    parser.add_argument("--profiles", default="float,reference,production", help="with --compare: numerics to compare")
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="documents: their prompts are continued, or --ranges looks at them"
    )
    parser.add_argument(
        "--prompts", type=int, default=0, metavar="N", help="of the documents (--ranges: 8 where it is 0)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="with --compare: by N tokens (default 64)")
    parser.add_argument(
        "--levels", default="op,layer,logits,text", metavar="LEVEL,LEVEL", help="with --compare: which (default all)"
    )
    parser.add_argument(
        "--texts", type=Path, metavar="DIR", help="with --compare: keep the first place's completions here, or use them"
    )
    config.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = config.from_arguments(args)
    if args.compare is not None:
        return _compare(args, settings)
    if args.ranges:
        return _ranges(args, settings)
    findings = examine(settings)
    able = all(finding.status is not Status.FAILED for finding in findings)
    if args.json:
        body = {"version": benthic.__version__, "able": able, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(body, ensure_ascii=False))
    else:
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            print(f"{finding.status:<7} {finding.name:<9} {finding.detail}{remedy}")
        print("Benthic can run here." if able else "Benthic cannot run here until the lines marked failed are mended.")
    return 0 if able else 1


def _compare(args: argparse.Namespace, settings: config.Config) -> int:
    from benthic.bench import compare
    from benthic.testing.ops import place

    names = args.compare.split(",")
    if len(names) != 2:
        raise BadField("compare", args.compare, "two places, such as cpu,cuda")
    profiles = args.profiles.split(",")
    for name in profiles:
        if name not in NUMERICS:
            raise BadField("profiles", name, f"one of {', '.join(NUMERICS)}")
    levels = args.levels.split(",")
    for level in levels:
        if level not in compare.LEVELS:
            raise BadField("levels", level, f"one of {', '.join(compare.LEVELS)}")
    left, right = map(place, names)
    model = args.target or settings.model
    documents = [] if args.data is None else compare.prompts_of(model, args.data, args.prompts)
    found = compare.compare(
        model,
        left,
        right,
        profiles,
        compare.probe(model),
        lambda text: print(f"{text} ...", file=sys.stderr, flush=True),
        texts=documents,
        tokens=args.tokens,
        folder=args.texts,
        levels=levels,
    )
    if args.json:
        body = {"places": names, "model": model, "profiles": {n: [asdict(x) for x in xs] for n, xs in found.items()}}
        print(json.dumps(body | {"passed": compare.passed(found)}, ensure_ascii=False))
    else:
        print(compare.render(found, left, right))
    return 0 if compare.passed(found) else 1


def _ranges(args: argparse.Namespace, settings: config.Config) -> int:
    from benthic.bench import compare, numerics
    from benthic.models.weights import Checkpoint

    model = args.target or settings.model
    texts = compare.probe(model)
    if args.data is not None:
        texts = compare.prompts_of(model, args.data, args.prompts or RANGE_PROMPTS)
    lines = numerics.ranges(Checkpoint.open(model), texts)
    fits = all(line.passed for line in lines)
    if args.json:
        print(json.dumps({"model": model, "lines": [asdict(line) for line in lines], "passed": fits}))
    else:
        print(compare.table("ranges", lines))
        print("One scale holds them." if fits else "One scale does not hold them: use numerics production, not fast.")
    return 0 if fits else 1


def examine(settings: config.Config) -> list[Finding]:
    """All findings, in the order in which one rests on another."""
    torch_found = _torch()
    found = [_python(), *_packages(), torch_found, _cpu(), _memory(), _compiler(settings.cpu.compiler)]
    if torch_found.status is not Status.FAILED:
        found += [_native(settings), _gpu()]
    return [*found, _triton(), _model(settings.model)]


def _python() -> Finding:
    return Finding("python", Status.OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Iterable[Finding]:
    """What Benthic needs at run time, torch apart, from the package's own metadata."""
    found: list[str] = []
    for requirement in metadata.requires("benthic") or []:
        if "extra ==" in requirement:
            continue
        name = requirement.split(";")[0].split("=")[0].split(">")[0].split("<")[0].strip()
        exact = requirement.split("==")[1].strip() if "==" in requirement else None
        if name == "torch":
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, Status.FAILED, "not installed", f"pip install '{requirement}'")
            continue
        if exact is not None and version != exact:
            yield Finding(name, Status.FAILED, f"{version}, but {exact} is needed", f"pip install '{requirement}'")
        found.append(f"{name} {version}")
    yield Finding("packages", Status.OK, ", ".join(found))


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", Status.FAILED, f"cannot be imported: {error}", "pip install 'torch>=2.11'")
    version = str(torch.__version__)
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < (2, 11):
        return Finding("torch", Status.FAILED, version, "pip install 'torch>=2.11'")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", Status.OK, f"{version}, {build}, {torch.get_num_threads()} threads")


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    here = [flag for flag in known if flag in flags]
    detail = f"{cores} cores, {' '.join(here) or 'no vector extensions known to Benthic'}"
    if not {"avx512_bf16", "amx_bf16", "bf16"} & flags:
        return Finding("cpu", Status.SLOW, detail, "no bfloat16 instructions, products run through float32")
    return Finding("cpu", Status.OK, detail)


def _cpu_flags() -> frozenset[str]:
    """Instruction set extensions as the kernel names them; empty where it does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith(("flags", "Features"))), "").split())


def _memory() -> Finding:
    total, free = memory_bytes()
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    if free < 2 * GIB:
        return Finding("memory", Status.SLOW, detail, "the packaged model wants 2 GiB; close other programs")
    return Finding("memory", Status.OK, detail)


def _compiler(command: str) -> Finding:
    path = shutil.which(command)
    if path is None:
        return Finding(
            "compiler",
            Status.SLOW,
            f"no C compiler {command!r}",
            "install gcc or clang, or name one in cpu.compiler; without it the kernels run in plain torch",
        )
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return Finding("compiler", Status.OK, (done.stdout or done.stderr).strip().splitlines()[0])


def _native(settings: config.Config) -> Finding:
    """Builds the C kernels if that was not done before, as the first start of an engine would."""
    from benthic.kernels.native import build

    cpu = settings.cpu
    try:
        status = build.setup(cpu.native, cpu.compiler, cpu.cache_dir)
    except NativeBuildError as error:
        return Finding("native", Status.FAILED, "cpu.native is on, but there are no C kernels", str(error))
    if not status.available:
        remedy = "set cpu.native to auto" if cpu.native == "off" else "mend the C compiler; plain torch runs, slower"
        return Finding("native", Status.SLOW, status.detail, remedy)
    return Finding("native", Status.OK, status.detail)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return Finding(
                "gpu", Status.ABSENT, "this torch is a CPU build", "for a GPU, install a CUDA build of torch"
            )
        return Finding("gpu", Status.ABSENT, "no CUDA device found", "check the driver with nvidia-smi")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    detail = ", ".join(f"{card.name} {card.total_memory / GIB:.0f} GiB sm_{card.major}{card.minor}" for card in cards)
    if all((card.major, card.minor) < (9, 0) for card in cards):
        return Finding("gpu", Status.SLOW, detail, "older than Hopper (sm_90): plain torch runs, kernels are not tuned")
    return Finding("gpu", Status.OK, detail)


def _triton() -> Finding:
    if util.find_spec("triton") is None:
        return Finding("triton", Status.ABSENT, "not installed", "only GPUs need it: pip install 'benthic[gpu]'")
    return Finding("triton", Status.OK, metadata.version("triton"))


def _model(name: str) -> Finding:
    from benthic.models import registry

    try:
        folder = registry.model_dir(name)
    except BenthicError as error:
        return Finding("model", Status.FAILED, str(error), "give --model a checkpoint folder")
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).is_file()]
    shards = sorted(folder.glob("*.safetensors"))
    if missing or not shards:
        lacking = ", ".join(missing or ["*.safetensors"])
        return Finding(
            "model", Status.FAILED, f"{name} lacks {lacking}", "reinstall Benthic or copy the checkpoint again"
        )
    size = sum(shard.stat().st_size for shard in shards)
    return Finding("model", Status.OK, f"{name}, {size / 1e6:.1f} MB in {len(shards)} files")
