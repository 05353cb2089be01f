"""The sampler: parameters to tokens, one row at a time and all at once."""

import math
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.engine.sampler import Sampler
from benthic.errors import NoAllowedToken, NonFiniteLogits
from benthic.kernels import sample
from benthic.types import Draw, SamplingParams

VOCAB = 23


def draw_of(params: SamplingParams, **changes: object) -> Draw:
    penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
    context = array("I", [1, 2, 2, 5, 5, 5, 7]) if penalised else None
    return Draw(params, 11, (), context, 3)._replace(**changes)


def slow(logits: list[float], d: Draw, position: int) -> int:
    """One token, by the order of operations as it is written down."""
    p, x = d.params, list(logits)
    if d.context is not None:
        for v in set(d.context):
            x[v] = x[v] / p.repetition_penalty if x[v] > 0 else x[v] * p.repetition_penalty
        output = list(d.context)[d.prompt_tokens :]
        for v in set(output):
            x[v] -= p.presence_penalty + p.frequency_penalty * output.count(v)
    for v, bias in p.logit_bias:
        x[v] += bias
    x = [
        -math.inf if v in p.banned_ids or v in d.blocked or (p.allowed_ids and v not in p.allowed_ids) else y
        for v, y in enumerate(x)
    ]
    peak = max(x)
    if p.temperature == 0:
        return x.index(peak)
    weights = [int(math.exp((y - peak) / p.temperature) * 2**40) for y in x]
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))
    if p.top_k:
        order = order[: p.top_k]
    total, running, kept = sum(weights[v] for v in order), 0, set()
    for v in order:
        if running < p.top_p * total or p.top_p == 1:
            kept.add(v)
        running += weights[v]
    kept = {v for v in kept if weights[v] >= p.min_p * 2**40}
    total = sum(weights[v] for v in kept)
    bits = int(sample.random_bits(torch.tensor([d.seed]), torch.tensor([position]))[0])
    point, running = min(int(bits * 2.0**-53 * total), total - 1), 0
    for v in sorted(kept):
        running += weights[v]
        if running > point:
            return v
    raise AssertionError("nothing drawn")


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 4, 100]),
    top_p=st.sampled_from([1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -1.0]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (3, -1.0), (9, -100.0))]),
    allowed_ids=st.sampled_from([(), (1, 2, 3, 5, 8)]),
    banned_ids=st.sampled_from([(), (5, 6)]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=150, deadline=None)
@given(
    many=st.lists(st.tuples(some_params, st.integers(0, 2**63 - 1), st.booleans()), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_rows_are_the_slow_answer_alone_and_together(many: list[tuple[SamplingParams, int, bool]], seed: int):
    logits = torch.randn(len(many), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    kept = logits.clone()
    draws = [draw_of(p, seed=s, blocked=(0, 4) if b else ()) for p, s, b in many]
    positions = [s % 1000 for _, s, _ in many]
    together = Sampler(VOCAB)(logits, draws, positions)
    assert torch.equal(logits, kept), "the logits were changed"
    assert not together.failures
    for i, d in enumerate(draws):
        assert together.tokens[i] == slow(logits[i].tolist(), d, positions[i])
        alone = Sampler(VOCAB)(logits[i : i + 1], [d], positions[i : i + 1])
        assert alone.tokens == [together.tokens[i]]
        assert alone.logprobs.get(0) == together.logprobs.get(i)
    back = Sampler(VOCAB)(logits.flip(0), draws[::-1], positions[::-1])
    assert back.tokens == together.tokens[::-1]


def test_logprobs_are_raw():
    logits = torch.randn(2, VOCAB)
    exact = logits.double().log_softmax(1)
    wild = SamplingParams(temperature=0.1, top_k=2, banned_ids=(0, 1), logit_bias=((3, 50.0),), logprobs=4)
    found = Sampler(VOCAB)(logits, [draw_of(wild), draw_of(replace(wild, logprobs=0))], [7, 7])
    for i, entry in found.logprobs.items():
        assert entry.token == found.tokens[i] == 3
        assert entry.logprob == pytest.approx(float(exact[i, 3]), abs=1e-5)
    order = exact[0].argsort(descending=True)[:4].tolist()
    assert [v for v, _ in found.logprobs[0].top] == order
    assert [lp for _, lp in found.logprobs[0].top] == pytest.approx(exact[0, order].tolist(), abs=1e-5)
    assert found.logprobs[1].top == ()
    assert Sampler(VOCAB).score(logits, [3, 4], 4)[0].top == found.logprobs[0].top


def test_greedy_takes_the_lowest_of_equal_ones():
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = logits[1, 9] = 5.0
    logits[2, VOCAB - 1] = 1.0
    greedy = draw_of(SamplingParams(temperature=0))
    assert Sampler(VOCAB)(logits, [greedy] * 3, [7] * 3).tokens == [0, 4, VOCAB - 1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(banned_ids=(5,)),
        SamplingParams(temperature=0, allowed_ids=(1, 2)),
    ],
)
def test_a_row_that_is_not_finite_fails_alone(value: float, params: SamplingParams):
    logits = torch.randn(4, VOCAB)
    want = Sampler(VOCAB)(logits, [draw_of(params, seed=i) for i in range(4)], [7] * 4).tokens
    logits[2, 5] = value
    found = Sampler(VOCAB)(
        logits, [draw_of(replace(params, logprobs=2), seed=i) for i in range(4)], [7] * 4, [7, 8, 9, 10]
    )
    assert set(found.failures) == {2}
    assert isinstance(found.failures[2], NonFiniteLogits)
    assert "request 9: the logits at position 7" in str(found.failures[2])
    assert [found.tokens[i] for i in (0, 1, 3)] == [want[i] for i in (0, 1, 3)]
    assert set(found.logprobs) == {0, 1, 3}


def test_a_request_that_leaves_no_token_fails_alone():
    logits = torch.randn(3, VOCAB)
    nothing = SamplingParams(allowed_ids=(3, 4), banned_ids=(3, 4))
    found = Sampler(VOCAB)(logits, [draw_of(SamplingParams()), draw_of(nothing), draw_of(SamplingParams())], [7] * 3)
    assert isinstance(found.failures[1], NoAllowedToken)
    assert len(found.failures) == 1


def test_ids_that_are_never_produced():
    logits = torch.zeros(40, VOCAB)
    logits[:, 6] = 30.0
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3)):
        found = Sampler(VOCAB, never=(6, 0))(logits, [draw_of(params, seed=i) for i in range(40)], [7] * 40)
        assert not {6, 0} & set(found.tokens)
    only = draw_of(SamplingParams(temperature=0, allowed_ids=(6,)))
    assert isinstance(Sampler(VOCAB, never=(6,))(logits[:1], [only], [7]).failures[0], NoAllowedToken)


def test_nothing_to_draw():
    assert Sampler(VOCAB)(torch.zeros(0, VOCAB), [], []).tokens == []


def test_many_parameter_sets_are_forgotten_in_turn():
    sampler = Sampler(VOCAB)
    logits = torch.zeros(1, VOCAB)
    for i in range(2100):
        token = i % VOCAB
        wants = draw_of(SamplingParams(temperature=0, logit_bias=((token, 1.0),)))
        assert sampler(logits, [wants], [7]).tokens == [token]
    assert len(sampler._recipes) <= 1024


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens():
    """Same logits, same tokens: everything that is summed is an integer."""
    torch.manual_seed(8)
    logits = torch.randn(40, 4096) * 3
    logits[7, 9] = math.nan
    sets = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.9, temperature=0.7, logprobs=3),
        SamplingParams(top_k=40, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.5),
        SamplingParams(banned_ids=(4, 5), logit_bias=((7, 2.0),), allowed_ids=tuple(range(2000))),
    ]
    draws = [draw_of(sets[i % len(sets)], seed=i) for i in range(40)]
    here = Sampler(4096, never=(1,))(logits, draws, range(40))
    there = Sampler(4096, "cuda", never=(1,))(logits.cuda(), draws, range(40))
    assert set(here.failures) == set(there.failures) == {7}
    assert [t for i, t in enumerate(here.tokens) if i != 7] == [t for i, t in enumerate(there.tokens) if i != 7]
    for i, entry in here.logprobs.items():
        assert [v for v, _ in entry.top] == [v for v, _ in there.logprobs[i].top]
        assert entry.logprob == pytest.approx(there.logprobs[i].logprob, abs=1e-5)
