"""`benthic VERB`: find the verb's file, let it parse its own arguments, and turn errors into one line and an exit code.

A verb is one file `cli/<verb>.py` with `add_arguments(parser)` and `run(args) -> int`. It is imported when it is
called, so that `benthic --help` needs no torch.

    exit code  0    done
               1    the command failed
               2    the input is wrong: usage, configuration, request, checkpoint name
               130  interrupted
               141  the reader of the output went away
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import benthic
from benthic import config, log
from benthic.errors import BenthicError

VERBS = {
    "generate": "complete prompts from the command line, a file or standard input",
    "chat": "talk to the model in the terminal",
    "replay": "produce an answer again from its receipt, and say what differs",
    "inspect": "show a checkpoint's layer plan, parameters and bytes",
    "bench": "measure speed and memory on this machine",
    "train": "train the small model that ships with Benthic",
    "verify": "check that answers computed here are the model's",
    "doctor": "tell what this machine can run, and why not",
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(argv)
        sys.stdout.flush()  # here, where a reader that went away can still be handled
        return code
    except KeyboardInterrupt:
        print("benthic: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # what is left in the buffer has no reader; without this the interpreter would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        _report(error, debug="--debug" in argv, as_json="--json" in argv)
        return error.exit_code if isinstance(error, BenthicError) else 1


def _run(argv: list[str]) -> int:
    verb = _verb(argv)
    parser = _parser(verb)
    args = parser.parse_args(argv)
    if args.verb is None:
        parser.print_help(sys.stderr)
        return 2
    log.setup(config.from_arguments(args).log_level)
    return import_module(f"benthic.cli.{args.verb}").run(args)


def _verb(argv: list[str]) -> str | None:
    """The verb, which stands before every other word: the options of `benthic` itself take no values."""
    return next((word for word in argv if not word.startswith("-")), None)


def _parser(verb: str | None) -> argparse.ArgumentParser:
    """The whole parser, with the arguments of one verb."""
    parser = argparse.ArgumentParser(prog="benthic", description=_first_line(benthic.__doc__), allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"benthic {benthic.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, text in VERBS.items():
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name == verb:
            import_module(f"benthic.cli.{name}").add_arguments(sub)
    return parser


def _report(error: Exception, debug: bool, as_json: bool) -> None:
    """One line on standard error; an object with `--json`."""
    if debug:
        traceback.print_exception(error)
    known = isinstance(error, BenthicError)
    code, retryable = (error.code, error.retryable) if known else ("internal_error", False)
    text = str(error) if known or isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    if not known and not isinstance(error, OSError) and not debug:
        text += " (this is a fault in Benthic; --debug shows where)"
    if as_json:
        body = {"code": code, "message": text, "retryable": retryable}
        print(json.dumps({"error": body}, ensure_ascii=False), file=sys.stderr)
    else:
        print(f"benthic: {text}", file=sys.stderr)


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
