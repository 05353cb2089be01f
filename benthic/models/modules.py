"""The few modules that model families share: linears with their number format, norms, quantised lookup tables.

Weights live in a compute form. In the quantised profiles that is bfloat16, which holds every E4M3 x 2^k and E2M1 x 2^k
exactly; in the `float` profile it is float32. What a weight is on disk is its `store`: "fp8", "fp4", "bf16" or "f32".
"""

from collections.abc import Iterable, Iterator
from typing import Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from benthic.kernels import gemm, norm, quant
from benthic.types import Numerics

Store = Literal["fp8", "fp4", "bf16", "f32"]


class TensorSource(Protocol):
    """Where weights come from: a checkpoint, or anything that answers to official names."""

    def tensor(self, name: str) -> Tensor: ...


M = TypeVar("M", bound=nn.Module)


class Stack(nn.ModuleList, Generic[M]):
    """A module list that knows what it holds."""

    def __init__(self, modules: Iterable[M]):
        super().__init__(modules)

    def __iter__(self) -> Iterator[M]:
        return cast("Iterator[M]", super().__iter__())


def activation_dtype(numerics: Numerics) -> torch.dtype:
    return torch.float32 if numerics.wide else torch.bfloat16


def fp8_grid(x: Tensor, numerics: Numerics) -> Tensor:
    """x on the FP8 grid, one power-of-two scale per 32 channels; x itself where the profile has no quantisers."""
    return quant.roundtrip_fp8(x) if numerics.quantise else x


def read_weight(source: TensorSource, name: str, store: Store) -> Tensor:
    """The values of `name`.weight in float32 or bfloat16, whatever its format on disk."""
    weight = source.tensor(f"{name}.weight")
    if store == "fp8":
        return quant.dequantise_weight_fp8(weight, source.tensor(f"{name}.scale"))
    if store == "fp4":
        return quant.dequantise_weight_fp4(weight, source.tensor(f"{name}.scale"))
    return weight


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """An unset parameter; gradients are switched on by whoever trains."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x @ weight^T, float32 accumulation, one rounding.

    wide  the result stays in float32: compressor inputs, router and head, which the model computes in float32 from
          bfloat16 operands. Until weights are loaded they are float32, for whoever trains them.
    """

    def __init__(self, inputs: int, outputs: int, store: Store, numerics: Numerics, *, wide: bool = False):
        super().__init__()
        self.store: Store = store
        self.wide = wide
        self.dtype = activation_dtype(numerics)
        self.weight = parameter(outputs, inputs, dtype=torch.float32 if wide else self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return gemm.linear(x, self.weight, out_dtype=torch.float32 if self.wide else None)

    def load(self, source: TensorSource, name: str) -> None:
        self.weight.data = self.weight.data.to(self.dtype)  # holds what is in the file, in half the bytes of float32
        self.weight.data.copy_(read_weight(source, name, self.store))


class RMSNorm(nn.Module):
    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = parameter(channels)

    def forward(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.weight, self.eps)

    def load(self, source: TensorSource, name: str) -> None:
        self.weight.data.copy_(source.tensor(f"{name}.weight"))


class Embedding(nn.Module):
    """Token embedding, bfloat16 on disk."""

    def __init__(self, rows: int, channels: int, numerics: Numerics):
        super().__init__()
        self.weight = parameter(rows, channels, dtype=activation_dtype(numerics))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]

    def load(self, source: TensorSource, name: str) -> None:
        self.weight.data.copy_(source.tensor(f"{name}.weight"))


class PackedTable(nn.Module):
    """A lookup table kept in its FP8 bytes, one power-of-two scale per 32 channels; rows dequantise on reading.

    The tables are the bulk of the parameters, so they are never expanded, and on the CPU never copied: the tensors are
    the checkpoint's own, which may be a memory map.
    """

    def __init__(self, rows: int, channels: int, numerics: Numerics):
        super().__init__()
        self.shape = (rows, channels)
        self.dtype = activation_dtype(numerics)
        self.codes = torch.empty(0, channels, dtype=torch.float8_e4m3fn)
        self.scales = torch.empty(0, channels // 32, dtype=torch.uint8)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [...] int64 -> [..., channels] in the activation dtype."""
        codes = self.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return quant.dequantise_fp8(codes, self.scales[rows], self.dtype)

    def load(self, source: TensorSource, name: str) -> None:
        device = self.codes.device  # the model's; on the CPU nothing moves
        self.codes = source.tensor(f"{name}.weight").to(device)
        self.scales = source.tensor(f"{name}.scale").view(torch.uint8).to(device)
