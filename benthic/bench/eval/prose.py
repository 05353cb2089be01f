"""Suites on held-out documents: bits per byte as served, by profile, without Engram and by depth; sampled stories."""

import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from benthic.bench.eval.documents import Document
from benthic.bench.eval.measures import Estimate, exp, measure, ratio, share
from benthic.bench.eval.prepared import Answers, Measured, Plan, Prepared, Skip
from benthic.bench.eval.questions import SERVED, Chat, Said, Score, Scored, Span, View
from benthic.bench.report import Measure
from benthic.skills.loops import loops
from benthic.types import NUMERICS

STORY_TOKENS = 300
STORY_TEMPERATURE = 0.8
DEPTH_FROM = 128  # tokens; buckets of `depth` double from here


# ---- held-out documents ----------------------------------------------------------------------------------------------


def _spans(questions: Sequence[Score], answers: Answers) -> list[tuple[Document, Span]]:
    """Every scored document that was answered, once for each question it stands in."""
    found: list[tuple[Document, Span]] = []
    for question in questions:
        answer = answers(question)
        if isinstance(answer, Scored):
            found += zip(question.documents, answer.spans, strict=True)
    return found


def _pairs(some: Sequence[Score], others: Sequence[Score], answers: Answers) -> list[tuple[Document, Span, Span]]:
    """Documents that both of two views scored. Every question has one document."""
    found: list[tuple[Document, Span, Span]] = []
    for one, other in zip(some, others, strict=True):
        mine, theirs = answers(one), answers(other)
        if isinstance(mine, Scored) and isinstance(theirs, Scored):
            found.append((one.documents[0], mine.spans[0], theirs.spans[0]))
    return found


def _bits_per_byte(spans: Sequence[tuple[Document, Span]]) -> Estimate:
    sizes = [len(document.response.encode()) for document, _ in spans]
    return ratio([span.nats / math.log(2) for _, span in spans], sizes)


def _perplexity(spans: Iterable[Span]) -> Estimate:
    found = list(spans)
    return exp(ratio([span.nats for span in found], [span.tokens for span in found]))


def bits(plan: Plan) -> Prepared:
    questions = [Score((document,)) for document in plan.scored]

    def measured(answers: Answers) -> Measured:
        spans = _spans(questions, answers)
        whole = "" if len(spans) == len(plan.documents) else f"{len(spans)} of {len(plan.documents)} documents"
        rows = [
            measure("bits per byte", _bits_per_byte(spans), "bits/byte", most=0.62, note=whole),
            measure("perplexity", _perplexity(span for _, span in spans), "per token", note=whole),
        ]
        tokens, size = sum(span.tokens for _, span in spans), sum(len(d.response.encode()) for d, _ in spans)
        return Measured(rows, {"documents": len(spans), "tokens": tokens, "bytes": size})

    return Prepared(questions, measured)


def quantisation(plan: Plan) -> Prepared:
    """Each profile against float on the same documents; the error is of the difference, document by document."""
    profiles = [name for name in NUMERICS if name != "float"]
    views = {name: View(None if name == plan.numerics else name) for name in ("float", *profiles)}
    questions = {name: [Score((d,), view) for d in plan.some] for name, view in views.items()}

    def measured(answers: Answers) -> Measured:
        rows: list[Measure] = []
        for name in questions:
            spans = _spans(questions[name], answers)
            if spans:
                rows.append(measure(f"bits per byte, {name}", _bits_per_byte(spans), "bits/byte"))
        for name in profiles:
            pairs = _pairs(questions[name], questions["float"], answers)
            if pairs:
                lost = ratio([a.nats - b.nats for _, a, b in pairs], [a.tokens for _, a, _ in pairs])
                bar = None if name == "fast" else 0.005
                rows.append(measure(f"perplexity, {name} over float", exp(lost, less_one=True), "share", most=bar))
        return Measured(rows)

    return Prepared([question for some in questions.values() for question in some], measured)


def engram(plan: Plan) -> Prepared:
    views = {"on": SERVED, "off": View(engram=False)}
    questions = {name: [Score((document,), view) for document in plan.some] for name, view in views.items()}

    def measured(answers: Answers) -> Measured:
        pairs = _pairs(questions["on"], questions["off"], answers)
        on, off = [(d, a) for d, a, _ in pairs], [(d, b) for d, _, b in pairs]
        if not pairs:
            return Measured([])
        sizes = [len(document.response.encode()) for document, _, _ in pairs]
        worth = ratio([(b.nats - a.nats) / math.log(2) for _, a, b in pairs], sizes)
        return Measured(
            [
                measure("bits per byte, Engram on", _bits_per_byte(on), "bits/byte"),
                measure("bits per byte, Engram off", _bits_per_byte(off), "bits/byte"),
                measure("what the tables are worth", worth, "bits/byte", note="off - on, document by document"),
            ]
        )

    return Prepared([question for some in questions.values() for question in some], measured)


def depth(plan: Plan) -> Prepared:
    """Conversations one after another up to the context; a response counts where its first token stands."""
    if plan.context is None:
        raise Skip("the server does not say how long a context it takes; give --context")
    limit = min(plan.context, plan.sizes.longest or plan.context)
    questions: list[Score] = []
    for i in range(plan.sizes.sequences):
        order = list(plan.documents)
        plan.random("depth", i).shuffle(order)
        some: list[Document] = []
        room = limit - 1
        for document in order * (1 + limit // 64 // max(len(order), 1)):
            room -= plan.length(document)
            if room < 0:
                break
            some.append(document)
        if some:
            questions.append(Score(tuple(some)))
    if not questions:
        raise Skip(f"no document fits into {limit} tokens")

    def measured(answers: Answers) -> Measured:
        spans = [span for _, span in _spans(questions, answers)]
        rows: list[Measure] = []
        low = 0
        while low < limit:
            high = max(2 * low, DEPTH_FROM)
            inside = [span for span in spans if low <= span.first < high]
            if inside:
                rows.append(measure(f"perplexity at {low} to {high - 1}", _perplexity(inside), "per token"))
            low = high
        return Measured(rows, {"sequences": len(questions), "tokens": sum(span.tokens for span in spans)})

    return Prepared(questions, measured)


# ---- samples ---------------------------------------------------------------------------------------------------------


def stories(plan: Plan) -> Prepared:
    prompts = story_prompts(plan)
    told = {t: [_story(prompt, t, plan.seed + i) for i, prompt in enumerate(prompts)] for t in (STORY_TEMPERATURE, 0.0)}

    def measured(answers: Answers) -> Measured:
        rows: list[Measure] = []
        samples: list[dict[str, Any]] = []
        for t, questions in told.items():
            said = [(q, a) for q in questions if isinstance(a := answers(q), Said)]
            looping = [repeats(a.reply.content) for _, a in said]
            if said:
                found = share([float(loop) for loop in looping], [1.0] * len(said))
                rows.append(measure(f"stories that loop, T = {t:g}", found, "share"))
            for (q, a), loop in zip(said, looping, strict=True):
                text = {"prompt": q.request["messages"][0]["content"], "temperature": t, "seed": q.seed}
                samples.append(text | {"text": a.reply.content, "finish": a.finish, "loops": loop})
        return Measured(rows, {"samples": samples})

    return Prepared([question for questions in told.values() for question in questions], measured)


def story_prompts(plan: Plan) -> list[str]:
    prompts = [document.prompt for document in plan.documents if document.kind == "story"][: plan.sizes.stories]
    if not prompts:
        raise Skip("the documents hold no story prompts")
    return prompts


def _story(prompt: str, temperature: float, seed: int) -> Chat:
    request = {"messages": ({"role": "user", "content": prompt},), "thinking": False}
    return Chat(request, STORY_TOKENS, temperature, seed)


def repeats(text: str) -> bool:
    """Does it fall into a loop, counted in words and marks, which every model has in common."""
    pieces = re.findall(r"\w+|[^\w\s]", text)
    return loops([zlib.crc32(piece.encode()) for piece in pieces])
