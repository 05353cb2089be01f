"""How long a step will take, from what is in it: a small linear model, fitted at start (`first_steps.py`) and kept up
while steps run. No torch, no clock.

    seconds = fixed + decode rows + prompt rows + context + pairs + logits + prompt     each times a coefficient >= 0

`prompt` is 1 where there are prompt rows at all: the host has more to say of such a step and launches a part of it, or
all of it where no graph holds it, and may take longer for that than the device. `context` counts the tokens that the
step's chunks read, each chunk once (a decode row scans what its request has); `pairs` counts, for every row of a
prompt, the tokens before it.

Each step that is over adds one equation. Older ones fade, by `MEMORY` steps, and all weigh by relative error, so that a
long prefill does not drown the decode steps. The coefficients are those of least squares with none below zero, found by
descent along one coordinate at a time from the last ones; what no step shows any more stays where it is. A step that
took far longer than the usual error allows (a stalled machine, a compilation) pulls like one at the edge of it, and
no more: one is forgotten soon, many in a row are the new truth.
"""

import math
from typing import NamedTuple

from benthic.types import StepPlan

MEMORY = 300  # steps after which an equation weighs 1/e
SOLVE_EVERY = 16  # steps
SWEEPS = 12  # of the descent, each time
EDGE = 3.0  # usual errors beyond which a step pulls no harder
ERROR_MEMORY = 50  # steps
LEAST_ERROR = 0.02  # relative; clocks and caches are no better


class Shape(NamedTuple):
    """What a step's time depends on."""

    decodes: int = 0  # rows of chunks of one row
    rows: int = 0  # rows of longer chunks
    context: int = 0  # tokens that the chunks read, those of the chunk included
    pairs: float = 0.0  # over the rows of longer chunks: tokens up to the middle of their chunk
    logits: int = 0  # rows whose logits are made

    @classmethod
    def of(cls, plan: StepPlan) -> "Shape":
        decodes = rows = context = 0
        pairs = 0.0
        for chunk in plan.chunks:
            count = len(chunk.tokens)
            context += chunk.start + count
            if count == 1:
                decodes += 1
            else:
                rows += count
                pairs += count * (chunk.start + count / 2)
        logits = len(plan.draws)
        if plan.scores:
            logits += sum(len(score.targets) for _, score in plan.scores)
        return cls(decodes, rows, context, pairs, logits)


class Coefficients(NamedTuple):
    """Seconds for each unit of a shape."""

    fixed: float = 0.0
    decode: float = 1e-3
    row: float = 1e-3
    context: float = 0.0
    pair: float = 0.0
    logit: float = 0.0
    prompt: float = 0.0


class CostModel:
    """Predicts the seconds of a step, and learns from those that are over."""

    def __init__(self, known: Coefficients | None = None, memory: float = MEMORY):
        """known   what is believed before the first step; None: nothing, and `ready` is False until steps are seen.
        memory  steps after which an equation weighs 1/e; infinity: all weigh alike.
        """
        self._keep = 1.0 - 1.0 / memory
        self.now = known or Coefficients()
        self.ready = known is not None
        self.error = 0.1  # usual relative error of a prediction
        self.seen = 0  # steps
        size = len(self.now)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size

    def seconds(self, shape: Shape) -> float:
        """A step of this shape."""
        c = self.now
        return (
            c.fixed
            + c.decode * shape.decodes
            + c.row * shape.rows
            + c.context * shape.context
            + c.pair * shape.pairs
            + c.logit * shape.logits
            + c.prompt * (shape.rows > 0)
        )

    def chunk_seconds(self, start: int, count: int) -> float:
        """What a chunk of a prompt adds to a step that has one."""
        c = self.now
        return c.row * count + c.context * (start + count) + c.pair * count * (start + count / 2)

    def decode_seconds(self, context: int) -> float:
        """What a decode row adds to a step."""
        c = self.now
        return c.decode + c.logit + c.context * context

    def rows_within(self, seconds: float, start: int) -> int:
        """Most rows of a chunk at position `start` that add no more than that to a step with prompt rows. 0: none."""
        c = self.now
        if seconds == math.inf:
            return 10**9
        linear, left = c.row + c.context + c.pair * start, seconds - c.context * start
        if left <= 0.0:
            return 0
        if c.pair <= 0.0:
            return int(min(left / linear, 1e9)) if linear > 0.0 else 10**9
        # pair / 2 * n * n + linear * n = left, in the form that does not cancel
        return int(min(2.0 * left / (linear + math.sqrt(linear * linear + 2.0 * c.pair * left)), 1e9))

    def observe(self, shape: Shape, seconds: float) -> float:
        """A step of this shape took so long. Returns the relative error of what was predicted, below 0: too high."""
        if seconds <= 0.0:
            return 0.0
        told = self.seconds(shape)
        off = seconds / told - 1.0 if told > 0.0 else 1.0
        edge = EDGE * max(self.error, LEAST_ERROR)
        known = self.ready
        weight = 1.0 if not known or abs(off) <= edge else edge / abs(off)
        if known:
            self.error += (min(abs(off), edge) - self.error) / ERROR_MEMORY
        scale = max(told, 1e-9) if known else seconds
        weight /= scale * scale
        keep = self._keep
        terms = (1.0, *shape, float(shape.rows > 0))
        for i, term in enumerate(terms):
            row = self._products[i]
            weighted = weight * term
            for j in range(i, len(terms)):
                row[j] = keep * row[j] + weighted * terms[j]
            self._targets[i] = keep * self._targets[i] + weighted * seconds
        self.seen += 1
        if known and self.seen % SOLVE_EVERY == 0:
            self._solve(SWEEPS)
        return off

    def settle(self) -> None:
        """Fit what has been seen until now, thoroughly; predictions count from here on."""
        if self.seen:
            self._solve(1000)
            self.ready = True

    def _solve(self, sweeps: int) -> None:
        """Non-negative least squares, one coefficient at a time, from the present ones."""
        products, targets, now = self._products, self._targets, list(self.now)
        indices = range(len(now))
        for _ in range(sweeps):
            moved = 0.0
            for i in indices:
                own = products[i][i]
                if own <= 0.0:
                    continue
                rest = targets[i]
                for j in indices:
                    if j != i:
                        rest -= (products[i][j] if i < j else products[j][i]) * now[j]
                new = max(rest / own, 0.0)
                moved = max(moved, (new - now[i]) ** 2 * own)
                now[i] = new
            if moved <= 1e-12 * products[0][0] * now[0] * now[0]:
                break
        self.now = Coefficients(*now)
