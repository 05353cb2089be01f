"""The Triton kernels in Triton's interpreter, in a process of their own, against the plain form and its autograd."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CHECK = """
import torch
from benthic.kernels import hyper
from benthic.train import sinkhorn

def check(rows, streams, iters, scale, eps=1e-6, strided=False):
    logits = torch.randn(rows, streams, 2 * streams if strided else streams) * scale
    logits = (logits[..., ::2] if strided else logits).requires_grad_()
    grad = torch.randn(rows, streams, streams).mT  # not contiguous
    want = hyper.sinkhorn(logits, eps, iters)
    (back,) = torch.autograd.grad(want, logits, grad)
    comb, sums = sinkhorn.forward(logits.detach(), eps, iters)
    assert comb.shape == want.shape and sums.shape == (rows, 2 * iters - 1, streams), (comb.shape, sums.shape)
    torch.testing.assert_close(comb, want.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sinkhorn.backward(comb, sums, grad, eps), back, atol=2e-5, rtol=2e-4)

torch.manual_seed(0)
for rows in (0, 1, 63, 64, 65, 130):
    check(rows, 4, 20, 1.0)
for streams in (1, 2, 4, 8):
    for iters in (1, 2, 5):
        check(7, streams, iters, 2.0)
check(9, 4, 20, 30.0)  # nearly a permutation
check(9, 4, 20, 0.0)
check(9, 4, 20, 1.0, strided=True)

# nothing outside the rows is written
comb, grad = torch.full((67, 4, 4), 7.0), torch.full((67, 4, 4), 7.0)
sums = torch.full((67, 5, 4), 7.0)
sinkhorn._forward[(2,)](torch.randn(65, 4, 4), comb[1:66], sums[1:66], 65, 1e-6, 4, 3, sinkhorn.BLOCK)
sinkhorn._backward[(2,)](comb[1:66], sums[1:66], torch.randn(65, 4, 4), grad[1:66], 65, 1e-6, 4, 3, sinkhorn.BLOCK)
for out in (comb, grad, sums):
    assert (out[0] == 7).all() and (out[66] == 7).all() and (out[1:66] != 7).all()
print("checked")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (pip install 'benthic[gpu]')")
def test_kernels_equal_the_plain_form_and_its_gradient() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "checked\n"
