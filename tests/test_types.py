"""Sampling parameters: every range, and the error that names field, value and range."""

from dataclasses import replace

import pytest

from benthic.errors import BadField, RequestError, TokenOutOfRange
from benthic.types import SamplingParams

GOOD = [
    {"temperature": 0},
    {"temperature": 0.0, "top_k": 2**31 - 1, "top_p": 1e-9, "min_p": 0.999},
    {"temperature": 100.0, "repetition_penalty": 1e-3, "presence_penalty": -2, "frequency_penalty": 2},
    {"logit_bias": ((0, -100.0), (9, 100)), "allowed_ids": (0, 9), "banned_ids": (3,), "stop_ids": (9,)},
    {"stop": ("x" * 1024,) * 16, "max_tokens": 1, "min_tokens": 1, "n": 128, "seed": 2**63 - 1},
    {"logprobs": 0, "prompt_logprobs": 10, "ignore_eos": True, "seed": 0},
]
BAD = [
    ("temperature", -0.1, "[0, 100]"),
    ("temperature", float("nan"), "[0, 100]"),
    ("temperature", float("inf"), "[0, 100]"),
    ("temperature", True, "[0, 100]"),
    ("temperature", "1", "[0, 100]"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_p", 1.01, "(0, 1]"),
    ("min_p", 1.0, "[0, 1)"),
    ("min_p", -0.1, "[0, 1)"),
    ("top_k", -1, "[0, 2147483647]"),
    ("top_k", 1.5, "[0, 2147483647]"),
    ("repetition_penalty", 0.0, "(0, 10]"),
    ("repetition_penalty", 10.5, "(0, 10]"),
    ("presence_penalty", 2.1, "[-2, 2]"),
    ("frequency_penalty", -2.1, "[-2, 2]"),
    ("max_tokens", 0, "[1, 2147483647]"),
    ("min_tokens", 257, "[0, 256]"),
    ("min_tokens", -1, "[0, 256]"),
    ("n", 0, "[1, 128]"),
    ("n", 129, "[1, 128]"),
    ("seed", -1, "[0, 9223372036854775807]"),
    ("seed", 2**63, "[0, 9223372036854775807]"),
    ("logprobs", 11, "[0, 10]"),
    ("prompt_logprobs", -1, "[0, 10]"),
    ("ignore_eos", 1, "true or false"),
    ("stop", "END", "tuple of strings"),
    ("stop", ("a",) * 17, "at most 16"),
    ("stop", ("a", ""), "1 to 1024 bytes"),
    ("stop", ("é" * 513,), "1 to 1024 bytes"),
    ("stop", (3,), "1 to 1024 bytes"),
    ("allowed_ids", (1.0,), "integer token id"),
    ("banned_ids", 4, "tuple of token ids"),
    ("logit_bias", {3: 1.0}, "tuple of pairs"),
    ("logit_bias", ((3, 1.0, 2.0),), "pair (token id, bias)"),
    ("logit_bias", ((3, 100.5),), "[-100, 100]"),
    ("logit_bias", ((3, float("nan")),), "[-100, 100]"),
]


@pytest.mark.parametrize("fields", GOOD)
def test_what_is_in_range_passes(fields: dict[str, object]):
    SamplingParams(**fields).validate(10)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value", "want"), BAD)
def test_what_is_not_is_named_with_its_range(field: str, value: object, want: str):
    with pytest.raises(BadField) as caught:
        replace(SamplingParams(), **{field: value}).validate(10)
    text = str(caught.value)
    assert text.startswith(field)
    assert want in text
    assert caught.value.status == 400


@pytest.mark.parametrize("field", ["allowed_ids", "banned_ids", "stop_ids"])
@pytest.mark.parametrize("token", [-1, 10])
def test_ids_outside_the_vocabulary(field: str, token: int):
    with pytest.raises(TokenOutOfRange, match=rf"{field}\[1\] is token id {token}, want an id in \[0, 9\]"):
        replace(SamplingParams(), **{field: (3, token)}).validate(10)
    if token > 0:
        replace(SamplingParams(), **{field: (3, token)}).validate()  # the vocabulary is not known here
    with pytest.raises(RequestError):
        replace(SamplingParams(), logit_bias=((token, 1.0),)).validate(10)
