"""What one run is: the rows of a batch, the phases by share of the time, weights and rates. No torch.

A batch has `rows` x `length` tokens. It is counted in units, pieces of `length` tokens that hold one part each. A long
row is several units end to end; parts named in `long_parts` are packed into whole long rows instead.
Source of the settings: the minnow specification, sections 2, 3, 5.3 and 5.5.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from benthic.errors import BadSetting

MAX_LENGTH = (1 << 14) - 2  # of a row, tokens: how many entries of a row are compared in one go
PROSE, SHAPES = "prose", "shapes"


class Form(NamedTuple):
    """Which rows a batch is made of."""

    long: bool = False
    images: bool = False  # with rows of pictures


class Run(NamedTuple):
    """Rows of one part that stand together in a batch, packed to a length in tokens."""

    part: str
    rows: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. Skills take about 30 % of the tokens.

    The first quarter of a batch has the index loss, so what needs the indexers comes first, and then prose. In `parts`
    prose has no number: it gets the rows that are left.
    """

    rows: int = 64  # a batch, of `length` tokens each
    length: int = 1024
    parts: str = "needle=5,recall=2,prose,copy=3,arithmetic=2,thinking=1,memory=1,json=2,tools=2"  # rows, in order
    shapes_rows: int = 3  # from `images_from` on, of the rows of prose
    long_length: int = 4096  # tokens a row from `long_from` on; as many tokens a batch as before
    long_parts: str = "needle=2,recall=1"  # whole rows of that length, in place of the short ones
    weights: str = "needle=4,recall=4,copy=2,arithmetic=4,json=2,tools=2,shapes=4"  # of a response token; others 1
    index_rows: int = 16  # first rows of `length` tokens on which the index loss is taken
    seconds: float = 1080.0  # training time; the shares below are of it
    images_from: float = 0.4
    topk_from: float = 0.5  # top-k in force
    long_from: float = 0.7
    quantise_from: float = 0.75  # quantisers in force
    warm_up: float = 0.04  # learning rate: linear up,
    flat_until: float = 0.4  # flat, then linear down
    floor: float = 0.03  # to this factor
    balance_weight: float = 1e-3
    index_weight: float = 1.0
    bias_step: float = 2e-3  # router bias, a batch
    seed: int = 0

    def check(self) -> None:
        """Raises BadSetting."""

        def need(ok: bool, key: str, want: str) -> None:
            if not ok:
                raise BadSetting(key, getattr(self, key), want, "the settings of the run")

        need(self.rows >= 1, "rows", "at least 1")
        need(2 <= self.length <= MAX_LENGTH and self.length % 2 == 0, "length", f"an even number in [2, {MAX_LENGTH}]")
        need(self.shapes_rows >= 0, "shapes_rows", "at least 0")
        for key in ("parts", "long_parts", "weights"):
            text = getattr(self, key)
            if key == "parts":
                found = f",{text},".replace(" ", "").split(f",{PROSE},")
                need(len(found) == 2, key, f"one entry {PROSE!r} without a number, beside NAME=ROWS, by commas")
                text = ",".join(found)
            try:
                named = _numbers(text)
            except ValueError:
                named = {"": -1.0}
            whole = key == "weights" or all(n.is_integer() and n >= 1 for n in named.values())
            want = "NAME=NUMBER, separated by commas" if key == "weights" else "NAME=ROWS, separated by commas"
            need(whole and all(0 <= n < math.inf for n in named.values()), key, want)
            need(key == "weights" or not named.keys() & {PROSE, SHAPES}, key, f"rows of {SHAPES} in shapes_rows")
        need(_numbers(self.long_parts).keys() <= set(self._short), "long_parts", f"some of {', '.join(self._short)}")
        need(_numbers(self.weights).keys() <= {*self.names, SHAPES}, "weights", f"some of {', '.join(self.names)}")
        if self.goes_long:
            per = self.long_length // self.length
            fits = 2 * self.length <= self.long_length <= MAX_LENGTH and self.long_length % self.length == 0
            need(fits, "long_length", f"a multiple of length, {self.length}, up to {MAX_LENGTH}")
            need(self.rows % per == 0, "rows", f"a multiple of {per}, the rows that make one of long_length")
            need(
                self.index_rows % per == 0, "index_rows", f"a multiple of {per}, the rows that make one of long_length"
            )
        need(0 <= self.index_rows <= self.rows, "index_rows", f"a number in [0, rows], rows is {self.rows}")
        need(0 < self.seconds < math.inf, "seconds", "a time above 0")
        for key in ("images_from", "topk_from", "long_from", "quantise_from", "floor"):
            need(0 <= getattr(self, key) <= 1, key, "a number in [0, 1]")
        for form in {Form(), Form(images=self.shows), Form(self.goes_long, self.shows)}:
            prose = next(run.rows for run in self.layout(form) if run.part == PROSE)
            need(prose > 0, "rows", f"more than the {self.rows - prose} of skills, so that there is a row of prose")
        need(0 <= self.flat_until < 1, "flat_until", "a number in [0, 1)")
        need(0 <= self.warm_up <= self.flat_until, "warm_up", f"a number in [0, flat_until], that is {self.flat_until}")
        for key in ("balance_weight", "index_weight", "bias_step"):
            need(0 <= getattr(self, key) < math.inf, key, "a number of at least 0")
        need(0 <= self.seed < 2**63, "seed", "a number in [0, 2**63)")

    @property
    def goes_long(self) -> bool:
        return self.long_from < 1

    @property
    def shows(self) -> bool:
        return self.shapes_rows > 0 and self.images_from < 1

    @property
    def _short(self) -> dict[str, int]:
        """Rows of each part, 0 of prose, in order."""
        return {name: int(count) for name, count in _numbers(self.parts.replace(PROSE, f"{PROSE}=0")).items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The parts."""
        return (*self._short, *([SHAPES] if self.shows else []))

    def layout(self, form: Form) -> tuple[Run, ...]:
        """What stands in a batch, in order; long rows first."""
        rows, long = self._short, _numbers(self.long_parts) if form.long else {}
        runs = [Run(name, int(count), self.long_length) for name, count in long.items()]
        runs += [Run(name, count, self.length) for name, count in rows.items() if name not in long]
        if form.images and self.shows:
            runs.append(Run(SHAPES, self.shapes_rows, self.length))
        left = self.rows - sum(run.rows * run.length // self.length for run in runs)
        return tuple(run._replace(rows=left) if run.part == PROSE else run for run in runs)

    def weight(self, part: str) -> float:
        return _numbers(self.weights).get(part, 1.0)


def _numbers(text: str) -> dict[str, float]:
    """ "a=1,b=2.5" -> {"a": 1.0, "b": 2.5}; nothing for an empty text. Raises ValueError."""
    pairs = [pair.split("=") for pair in text.replace(" ", "").split(",") if pair]
    if any(len(pair) != 2 or not pair[0] for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        raise ValueError(text)
    return {name: float(number) for name, number in pairs}


class Phase(NamedTuple):
    topk: bool
    quantised: bool
    form: Form = Form()


def phase_at(share: float, settings: Settings) -> Phase:
    """share: training time spent, of all."""
    images = settings.shows and share >= settings.images_from
    form = Form(settings.goes_long and share >= settings.long_from, images)
    return Phase(share >= settings.topk_from, share >= settings.quantise_from, form)


def phases_from(share: float, settings: Settings) -> list[Phase]:
    """The phases that are still to come, the present one first."""
    marks = sorted((settings.images_from, settings.topk_from, settings.long_from, settings.quantise_from))
    return list(dict.fromkeys(phase_at(at, settings) for at in (share, *(m for m in marks if share < m < 1))))


def rate_factor(share: float, settings: Settings) -> float:
    """Learning rate factor after `share` of the training time."""
    if share < settings.warm_up:
        return max(share / settings.warm_up, 0.01)
    if share < settings.flat_until:
        return 1.0
    down = (min(share, 1.0) - settings.flat_until) / (1.0 - settings.flat_until)
    return 1.0 + (settings.floor - 1.0) * down
