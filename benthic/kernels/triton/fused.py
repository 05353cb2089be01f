"""The runs of ops that `kernels/fused.py` names, gathered from the files they are in."""

from benthic.kernels.triton.runtime import available as available
