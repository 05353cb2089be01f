"""Where responses stand in a text, as characters and as ids."""

from pathlib import Path

import pytest

from benthic.bench.eval import rendering
from benthic.bench.eval.documents import Document
from benthic.bench.eval.questions import Scored, Span
from benthic.bench.eval.rendering import TEMPLATES, Characters, Row
from benthic.testing.tokenizers import build_tokenizer
from benthic.text.prompt import ChatEncoder

DOCUMENTS = (Document("story", "Tell me.", "A fox."), Document("qa", "2 + 2?", "4 — quatre"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_responses_are_found_again_in_the_characters(template: str) -> None:
    made = rendering.characters(TEMPLATES[template], DOCUMENTS)
    frame = TEMPLATES[template]
    assert [made.text[a:b] for a, b in made.responses] == [d.response + frame.end for d in DOCUMENTS]
    assert made.text.startswith(frame.before + "Tell me." + frame.between + "A fox.")


@pytest.mark.parametrize(
    ("offsets", "logprobs", "want"),
    [
        ([0, 4, 6, 8], [None, -1.0, -2.0, -4.0], Span(1, 2, 3.0)),  # tokens end where the response does
        ([0, 3, 6, 8], [None, -1.0, -2.0, -4.0], Span(1, 2, 3.0)),  # one reaches into it from before
        ([0, 5, 8, 9], [-8.0, -1.0, -2.0, -4.0], Span(0, 2, 9.0)),
        ([0, 4, 4, 8], [None, -1.0, -2.0, -4.0], Span(1, 2, 3.0)),  # a token without characters
        ([0, 4, 7, 8], [None, -1.0, None, -4.0], None),  # a number is missing
        ([0, 8, 8, 9], [None, -1.0, -2.0, -4.0], None),  # the first token, which nothing predicts, holds all of it
    ],
)
def test_tokens_of_a_response(offsets: list[int], logprobs: list[float | None], want: Span | None) -> None:
    text = Characters("01234567890", ((4, 8),))
    assert text.scored(offsets, logprobs) == (None if want is None else Scored((want,)))


def test_ids_are_the_official_conversation_and_the_response(tmp_path: Path) -> None:
    encoder = ChatEncoder(build_tokenizer(tmp_path))
    made = rendering.row(encoder, DOCUMENTS)
    whole: list[int] = []
    for document, (first, end) in zip(DOCUMENTS, made.responses, strict=True):
        whole += encoder.encode([{"role": "user", "content": document.prompt}]).ids
        assert first == len(whole)
        assert encoder.tokenizer.decode(made.ids[first : end - 1]) == document.response
        assert made.ids[end - 1] == encoder.tokenizer.eos_id
        whole += made.ids[first:end]
    assert list(made.ids) == whole


def test_spans_of_ids() -> None:
    row = Row((1, 2, 3, 4, 5, 6), ((2, 4), (5, 6)))
    assert row.scored([-1.0, -2.0, -4.0, -8.0, -16.0]) == Scored((Span(2, 2, 6.0), Span(5, 1, 16.0)))
