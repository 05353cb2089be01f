"""What is predicted and with what weight, against slow loops and torch's own cross entropy."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from benthic.train.loss import Ids, head_loss, head_scores, history, response_weights, targets

USER, ASSISTANT, THINK, OPEN, CLOSE, PAD = 3, 4, 6, 5, 1, 2
SPECIAL = Ids(bos=0, eos=CLOSE, pad=PAD, assistant=ASSISTANT, think_open=THINK, think_close=OPEN, image=7)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 9)])
def test_history_is_what_stands_before_in_the_row(shape: tuple[int, int], n: int) -> None:
    ids = torch.randint(0, 100, shape)
    want = [[int(row[p - 1 - i]) if p - 1 - i >= 0 else -1 for i in range(n)] for row in ids for p in range(shape[1])]
    assert history(ids, n).tolist() == want


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 9)])
def test_targets_are_the_next_ids(shape: tuple[int, int]) -> None:
    ids = torch.randint(1, 100, shape)
    want = [int(row[p + 1]) if p + 1 < shape[1] else 0 for row in ids for p in range(shape[1])]
    assert targets(ids).tolist() == want


def weights_by_reading(row: list[int]) -> list[float]:
    """Walk along the row: is the next token part of a response?"""
    out: list[float] = []
    inside, before = False, -1
    for p, id in enumerate(row):
        if id in (OPEN, THINK) and before == ASSISTANT:
            inside = True
        elif id in (CLOSE, SPECIAL.bos):
            inside = False
        out.append(float(inside and p + 1 < len(row) and row[p + 1] != SPECIAL.bos))
        before = id
    return out


text = st.lists(st.sampled_from([10, 11, OPEN, THINK, ASSISTANT]), max_size=4)
turn = st.tuples(text, st.sampled_from([OPEN, THINK]), text, st.booleans())


@given(st.lists(st.tuples(st.booleans(), turn), max_size=5), st.integers(1, 40))
def test_responses_and_their_end_count(turns: list[tuple[bool, tuple[list[int], int, list[int], bool]]], length: int):
    """Several turns and documents in a row, cut anywhere, padded where it is short; some answers have no end."""
    row: list[int] = []
    for begins, (user, mode, answer, ends) in turns:
        row += [*([0] if begins else []), USER, *user, ASSISTANT, mode, *answer, *([CLOSE] if ends else [])]
    row = (row + [PAD] * length)[:length]
    assert response_weights(torch.tensor([row]), SPECIAL).tolist() == [weights_by_reading(row)]


def test_a_row_by_hand() -> None:
    """A thinking turn, its answer, a plain turn of another document, and an answer cut before a third document."""
    row = [0, USER, 10, ASSISTANT, THINK, 11, OPEN, 12, CLOSE, 0, USER, OPEN, ASSISTANT, OPEN, CLOSE, PAD]
    want = [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0]
    cut = [0, USER, ASSISTANT, OPEN, 11, 12, 0, USER, 13, ASSISTANT, OPEN, 14, CLOSE, PAD, PAD, PAD]
    after = [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert response_weights(torch.tensor([row, cut]), SPECIAL).tolist() == [want, after]


def test_head_loss_is_cross_entropy() -> None:
    hidden, head = torch.randn(50, 16, requires_grad=True), torch.randn(90, 16, requires_grad=True)
    wanted, weights = torch.randint(0, 90, (50,)), torch.rand(50) * (torch.rand(50) < 0.5)
    total, nats = head_loss(hidden, head, wanted, weights)
    got = torch.autograd.grad(total, (hidden, head))
    each = F.cross_entropy(hidden @ head.T, wanted, reduction="none")
    want = torch.autograd.grad((each * weights).sum(), (hidden, head))
    torch.testing.assert_close(nats, each.detach())
    torch.testing.assert_close(total, (each * weights).sum())
    torch.testing.assert_close(got, want)
    assert not nats.requires_grad
    assert not got[0][weights == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_loss_stands_large_logits(dtype: torch.dtype) -> None:
    hidden = torch.tensor([[1e4, 0.0], [-1e4, 0.0]], dtype=dtype)
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    total, nats = head_loss(hidden, head, torch.tensor([0, 0]), torch.ones(2))
    torch.testing.assert_close(nats, torch.tensor([0.0, 1e4]), rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(total, nats.sum())


def test_head_scores_tell_which_are_best() -> None:
    hidden, head = torch.randn(40, 16), torch.randn(30, 16)
    logits = hidden @ head.T
    wanted = torch.where(torch.arange(40) % 2 == 0, logits.argmax(-1), (logits.argmax(-1) + 1) % 30)
    nats, right = head_scores(hidden.bfloat16(), head, wanted)
    assert right.dtype == torch.bool
    exact = hidden.bfloat16().float() @ head.T
    torch.testing.assert_close(nats, F.cross_entropy(exact, wanted, reduction="none"))
    assert torch.equal(right, exact.argmax(-1) == wanted)
    assert 10 <= int(right.sum()) <= 22
