"""The runs of ops that `kernels/fused.py` names, gathered from the files they are in."""

from benthic.kernels.triton.hyper import hyper_read as hyper_read
from benthic.kernels.triton.moe_experts import moe as moe
from benthic.kernels.triton.projections import attention_inputs as attention_inputs
from benthic.kernels.triton.projections import attention_output as attention_output
from benthic.kernels.triton.runtime import available as available
