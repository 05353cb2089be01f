"""`benthic replay RECEIPT`: produce an answer again from its receipt, and say what differs.

Exit code 0: the same tokens from the same logits, bit for bit. 1: something differs; where the machine, a version or a
setting does, that is said first. 2: the receipt cannot be read, or is of another model.
"""

import argparse
import json
from pathlib import Path

from benthic import config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", type=Path, metavar="RECEIPT", help="JSON file with a receipt")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    config.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from benthic.engine import receipt
    from benthic.engine.llm import LLM

    wanted = receipt.read(args.receipt)
    settings = config.from_arguments(args)
    settings = replace(settings, numerics=wanted.made_by.numerics, deterministic=wanted.made_by.deterministic)
    with LLM(config=settings) as llm:
        got = llm.replay(wanted)
    found = receipt.differences(wanted, got)
    same = receipt.same_answer(found)
    if args.json:
        print(
            json.dumps(
                {"same": same, "differences": [dict(zip(("what", "receipt", "now"), d, strict=True)) for d in found]}
            )
        )
    else:
        for what, before, now in found:
            print(f"{what}: {before} in the receipt, {now} now")
        count = len(wanted.tokens)
        print(f"the same {count} tokens from the same logits" if same else "not the same answer")
    return 0 if same else 1
