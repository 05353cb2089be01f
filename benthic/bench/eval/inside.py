"""Suites that look inside the model: how evenly experts are used, and what the drafter is worth."""

import math
from collections.abc import Sequence

from benthic.bench import drafts
from benthic.bench.eval.measures import Estimate, judged, measure
from benthic.bench.eval.prepared import Answers, Measured, Plan, Prepared
from benthic.bench.eval.prose import STORY_TOKENS, story_prompts
from benthic.bench.eval.questions import Draft, Drafted, Load, Loads

_LOAD_DOCUMENTS = 16  # of one question about experts


def experts(plan: Plan) -> Prepared:
    some = plan.some
    questions = [Load(some[i : i + _LOAD_DOCUMENTS]) for i in range(0, len(some), _LOAD_DOCUMENTS)]

    def measured(answers: Answers) -> Measured:
        found = [answer for question in questions if isinstance(answer := answers(question), Loads)]
        layers = [
            [sum(column) for column in zip(*rows, strict=True)] for rows in zip(*(a.layers for a in found), strict=True)
        ]
        entropies = [normalised_entropy(load) for load in layers]
        peaks = [max(load) * len(load) / sum(load) for load in layers]
        unused = sum(rows == 0 for load in layers for rows in load) / sum(map(len, layers))
        lowest = min(range(len(layers)), key=entropies.__getitem__)
        highest = max(range(len(layers)), key=peaks.__getitem__)
        count = len(some)
        rows = [
            measure("expert load entropy, mean", Estimate(sum(entropies) / len(layers), None, count), "of its maximum"),
            measure(f"expert load entropy, layer {lowest}", Estimate(entropies[lowest], None, count), "of its maximum"),
            measure(f"largest load, layer {highest}", Estimate(peaks[highest], None, count), "times the mean"),
            measure("experts that are never used", Estimate(unused, None, count), "share"),
        ]
        return Measured(rows, {"loads": layers, "entropies": entropies})

    return Prepared(questions, measured)


def drafter(plan: Plan) -> Prepared:
    prompts = tuple(story_prompts(plan))
    questions = [Draft(prompts, t, STORY_TOKENS, plan.seed) for t in drafts.BARS]

    def measured(answers: Answers) -> Measured:
        found = [answer.found for question in questions if isinstance(answer := answers(question), Drafted)]
        whole = {"texts": len(prompts), "temperatures": found}
        rows = [judged({**row, "n": len(prompts)}) for row in drafts.measures(whole)]
        return Measured(rows, {"drafts": whole})

    return Prepared(questions, measured)


def normalised_entropy(load: Sequence[int]) -> float:
    """Of the shares that the experts have; 1: all alike, 0: one takes all."""
    total = sum(load)
    shares = [rows / total for rows in load if rows]
    return -math.fsum(p * math.log(p) for p in shares) / math.log(len(load))
