"""The agreement with the slow model as Markdown: `python -m tests.oracle.report`, about five minutes on one core."""

import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from benthic.kernels import backends
from tests.oracle import random_checkpoint
from tests.oracle.blocks import KINDS, Pair, distance, equal_share, pairs, selections
from tests.oracle.conftest import DRAFTED, LONG, LONGEST, SEED, SMOOTH, SlowRun, run_slow, tokens
from tests.oracle.package import Package, recording
from tests.oracle.slow_v41 import Array, SlowModel
from tests.oracle.test_blocks import RUNS
from tests.oracle.test_mutations import FAILURES, MUTATIONS, Bench


def cosines(got: Array, want: Array) -> Array:
    return (got * want).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)


def logits(name: str, folder: Path, slow: SlowRun, splits: list[list[int]]) -> Iterable[str]:
    package = Package(folder)
    for split in splits:
        got = package.run(slow.ids, split)
        worst = np.abs(got - slow.logits).max()
        yield f"| {name} | {len(slow.ids)} in chunks of {', '.join(map(str, split))} | {worst:.1e} |"


def blocks(folder: Path, name: str, profile: str) -> tuple[dict[str, list[Pair]], int, int]:
    count, splits = RUNS[name]
    package, slow = Package(folder, profile), SlowModel(folder, profile)
    with recording(package) as recorder:
        package.run(tokens(count), splits)
    found: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs(package, recorder, slow):
        found[pair.block].append(pair)
    choices = [(len(a) == len(b) and bool((a == b).all())) for _, _, _, a, b, _ in selections(package, recorder, slow)]
    return found, len(choices), sum(choices)


def share(some: list[Pair]) -> str:
    values = sum(pair.got.size for pair in some)
    equal = sum(equal_share(pair) * pair.got.size for pair in some) / values
    return f"{100 * equal:.3f} % | {max(distance(pair) for pair in some):.2g}"


def end_to_end(folder: Path, name: str, profile: str, smooth: bool, count: int) -> str:
    """Package against slow model, and the package against itself in other chunks: the noise floor."""
    text = SMOOTH if smooth else None
    slow = run_slow(SlowModel(folder, profile, text), tokens(count))
    package = Package(folder, profile, text)
    whole = package.run(slow.ids, [count])
    with backends.reference():
        other = package.run(slow.ids, [37])
    cells = []
    for got, want in ((whole, slow.logits), (whole, other)):
        c = cosines(got, want)
        cells.append(f"{c.min():.4f} / {np.median(c):.4f}")
    kind = "all experts and entries" if smooth else "as configured"
    return f"| {name} | {profile} | {kind} | {cells[0]} | {cells[1]} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: random_checkpoint.write(Path(scratch) / name, name, SEED) for name in RUNS}
        slow = {name: run_slow(SlowModel(folders[name]), tokens(*LONG[name]), DRAFTED) for name in RUNS}
        print("### Logits, quantisers off\n\n| config | tokens | largest difference |\n| --- | --- | ---: |")
        for name, folder in folders.items():
            for line in logits(name, folder, slow[name], [[len(slow[name].ids)], [37], [len(slow[name].ids) - 9, 1]]):
                print(line)
            longest = run_slow(SlowModel(folder), tokens(*LONGEST[name]))
            for line in logits(name, folder, longest, [[700], [37]]):
                print(line)
            smooth = run_slow(SlowModel(folder, text=SMOOTH), tokens(90))
            got = Package(folder, text=SMOOTH).run(smooth.ids, [17, 10, 1, 32])
            print(f"| {name}, all experts and entries | 90 | {np.abs(got - smooth.logits).max():.1e} |")
            worst = 0.0
            package = Package(folder)
            for length, (_, want, _) in slow[name].drafts.items():
                package.run(slow[name].ids[:length], [length])
                draft = package.draft(slow[name].ids[length])
                worst = max(worst, float(np.abs(draft.logits[0].double().numpy() - want).max()))
            print(f"| {name}, draft blocks | after {', '.join(map(str, slow[name].drafts))} | {worst:.1e} |")

        print("\n### Blocks with equal inputs\n")
        columns = [(name, profile) for name in RUNS for profile in ("reference", "production")]
        results = {column: blocks(folders[column[0]], *column) for column in columns}
        heads = " | ".join(f"{name}, {profile}: equal | steps" for name, profile in columns)
        print(f"| block | {heads} |\n| --- |{' ---: |' * 2 * len(columns)}")
        for block in KINDS:
            print(f"| {block} | {' | '.join(share(results[column][0][block]) for column in columns)} |")
        same = " | ".join(f"{results[column][2]} of {results[column][1]} | " for column in columns)
        print(f"| chosen entries and blocks | {same} |")

        print("\n### End to end, quantised\n\n| config | profile | choices | slow model: cosine min / median ", end="")
        print("| itself, chunked, on references |\n| --- | --- | --- | ---: | ---: |")
        for name, profile in columns:
            for smooth_ in (False, True):
                print(end_to_end(folders[name], name, profile, smooth_, 90))

        print("\n### Mutations\n\n| pitfall | 6.5 or section | caught by | how |\n| --- | --- | --- | --- |")
        bench = Bench(lambda name: folders[name], lambda name: slow[name], Path(scratch))
        for change in MUTATIONS:
            with pytest.MonkeyPatch.context() as patch, backends.reference():
                if change.fresh:
                    change.change(patch, None)
                try:
                    change.check(bench, change)
                    told = "NOT CAUGHT"
                except FAILURES as failure:
                    told = str(failure).split("\n")[0].split("; near ties")[0]
                    told = re.sub(
                        r".* first at position (\d+) .*, worst (\S+)", r"logits \2 apart, from row \1 on", told
                    )
            print(f"| {change.name} | {change.pitfall} | `{change.check.__name__}` | {told} |")


if __name__ == "__main__":
    sys.exit(main())
