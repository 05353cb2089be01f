"""Documents as one text to be scored, and where in it their responses stand.

As token ids, by the official encoding, where the tokenizer is at hand: every engine that serves the checkpoint then
scores the same ids. Else as characters in a plain form or that of a known chat template, for a server to split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benthic.bench.eval.documents import Document
from benthic.bench.eval.questions import Scored, Span
from benthic.text.prompt import ChatEncoder


@dataclass(frozen=True, slots=True)
class Row:
    """ids of one text, and for each response its first token and one past its end token."""

    ids: tuple[int, ...]
    responses: tuple[tuple[int, int], ...]

    def scored(self, logprobs: Sequence[float]) -> Scored:
        """logprobs: of tokens 1, 2, ..., as `Completion.prompt_logprobs`."""
        spans = (Span(a, b - a, -math.fsum(logprobs[a - 1 : b - 1])) for a, b in self.responses)
        return Scored(tuple(spans))


def row(encoder: ChatEncoder, documents: Sequence[Document]) -> Row:
    """Whole conversations, one after another, each from its begin-of-sentence id to its end token."""
    tokenizer = encoder.tokenizer
    ids: list[int] = []
    responses: list[tuple[int, int]] = []
    for document in documents:
        ids += encoder.encode([{"role": "user", "content": document.prompt}]).ids
        first = len(ids)
        ids += [*tokenizer.encode(document.response, bos=False), tokenizer.eos_id]
        responses.append((first, len(ids)))
    return Row(tuple(ids), tuple(responses))


class Template(NamedTuple):
    """What stands around a prompt and a response; `end` is scored with the response, as its end token."""

    before: str
    between: str
    end: str
    after: str


TEMPLATES = {
    "plain": Template("", "\n\n", "", "\n\n"),
    "chatml": Template("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "\n"),
    "llama3": Template(
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
    ),
    "deepseek": Template("<｜User｜>", "<｜Assistant｜></think>", "<｜end▁of▁sentence｜>", ""),
}


@dataclass(frozen=True, slots=True)
class Characters:
    """One text, and for each response its first character and one past its end."""

    text: str
    responses: tuple[tuple[int, int], ...]

    def scored(self, offsets: Sequence[int], logprobs: Sequence[float | None]) -> Scored | None:
        """Where each token of the text begins, ascending, and its log-probability; None: a response has no token.

        A token that begins before a response and reaches into it is counted: what it costs is part of the response's.
        """
        ends = [*offsets[1:], len(self.text)]
        spans: list[Span] = []
        for first, end in self.responses:
            inside = [
                i for i, (a, b) in enumerate(zip(offsets, ends, strict=True)) if (first <= a < end) or (a < first < b)
            ]
            found = [value for value in (logprobs[i] for i in inside) if value is not None]
            if not found or len(found) < len(inside):
                return None
            spans.append(Span(inside[0], len(found), -math.fsum(found)))
        return Scored(tuple(spans))


def characters(template: Template, documents: Sequence[Document]) -> Characters:
    text = ""
    responses: list[tuple[int, int]] = []
    for i, document in enumerate(documents):
        text += (template.after if i else "") + template.before + document.prompt + template.between
        first = len(text)
        text += document.response + template.end
        responses.append((first, len(text)))
    return Characters(text, tuple(responses))
