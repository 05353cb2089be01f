"""`benthic train data | backbone | pack`: the small model that ships with Benthic, from a corpus to a packed checkpoint."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stages = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    data = stages.add_parser("data", help="corpus -> tokenizer, model config and token files", allow_abbrev=False)
    data.add_argument("--corpus", type=Path, required=True, help="folder with train-*.jsonl.xz and valid.jsonl.xz")
    data.add_argument("--out", type=Path, required=True, help="data folder to write")
    data.add_argument("--config", type=Path, help="model config to complete; default: the packaged minnow's")
    data.add_argument("--needle-tokens", type=_count, default=6_000_000, help="training tokens of the needle skill")
    data.add_argument("--copy-tokens", type=_count, default=2_000_000, help="training tokens of the copy skill")
    data.add_argument("--seed", type=int, default=0)
    data.set_defaults(run_stage=_data)
    for stage in (data,):
        stage.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    return args.run_stage(args)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    return tqdm(items, desc=what, total=total, unit="doc", file=sys.stderr, disable=None)


def _data(args: argparse.Namespace) -> int:
    from benthic.models.deepseek_v41_config import read_json
    from benthic.train import data

    template = read_json(args.config or Path(data.__file__).with_name("minnow.json"))
    skill_tokens = {"needle": args.needle_tokens, "copy": args.copy_tokens}
    manifest, config = data.build(args.corpus, args.out, dict(template), args.seed, skill_tokens, _progress)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    result = {
        "folder": str(args.out),
        "bytes": size,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "looping_dropped": manifest.looping_dropped,
        "engram_compressed_vocab_size": config["text_config"]["engram_compressed_vocab_size"],
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{args.out}: {size / 1e6:.1f} MB, {sum(manifest.tokens.values())} tokens")
        for part, count in manifest.tokens.items():
            print(f"  {part:16} {manifest.documents[part]:8} documents {count:10} tokens")
        print(f"  {manifest.looping_dropped} looping documents dropped")
    return 0
