"""The few modules that model families share: linears with their number format, norms, quantised lookup tables.

What a weight is on disk is its `store`: "fp8", "fp4", "bf16" or "f32". On a GPU a quantised weight keeps its bytes and
is widened inside the product. On a CPU it lives in a compute form: bfloat16, which holds every E4M3 x 2^k and E2M1 x
2^k exactly, and float32 in the `float` profile. `packs` decides, from where tensors are being made and the profile.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from benthic.errors import NonFiniteTensor
from benthic.kernels import engram, gemm, norm, quant
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


def product_grid(x: Tensor, numerics: Numerics) -> Tensor:
    """x as it enters a quantised product: on the FP8 grid, and carried by one scale a row where the profile says so."""
    return carried(fp8_grid(x, numerics), numerics)


def carried(x: Tensor, numerics: Numerics) -> Tensor:
    """What is on the FP8 grid already, as `product_grid` has it."""
    return quant.roundtrip_carry(x) if numerics.one_scale else x


_packed: ContextVar[bool | None] = ContextVar("packed", default=None)


@contextmanager
def packed_weights(on: bool = True) -> Iterator[None]:
    """Inside this block models are built with (or without) packed weights, whatever the device: for tests."""
    token = _packed.set(on)
    try:
        yield
    finally:
        _packed.reset(token)


def packs(numerics: Numerics) -> bool:
    """Do quantised weights made now keep their bytes? On a GPU, in the quantised profiles."""
    forced = _packed.get()
    on_gpu = torch.get_default_device().type == "cuda"
    return numerics.quantise and (on_gpu if forced is None else forced)


def read_weight(source: TensorSource, name: str, store: Store) -> Tensor:
    """The values of `name`.weight in float32 or bfloat16, whatever its format on disk."""
    weight = source.tensor(f"{name}.weight")
    if store == "fp8":
        return quant.dequantise_weight_fp8(weight, source.tensor(f"{name}.scale"))
    if store == "fp4":
        return quant.dequantise_weight_fp4(weight, source.tensor(f"{name}.scale"))
    return weight


def read_fp4(source: TensorSource, name: str, into: quant.Fp4Matrix) -> None:
    """Copy an expert's matrix `name` as it is in the file, [N, K/2] and [N, K/32]."""
    into.codes.copy_(source.tensor(f"{name}.weight").view(torch.uint8))
    into.scales.copy_(source.tensor(f"{name}.scale").view(torch.uint8))


def empty_fp4(experts: int, outputs: int, inputs: int) -> quant.Fp4Matrix:
    """Room for [experts, outputs, inputs]."""
    codes = torch.empty(experts, outputs, inputs // 2, dtype=torch.uint8)
    return quant.Fp4Matrix(codes, torch.empty(experts, outputs, inputs // quant.MX_GROUP, dtype=torch.uint8))


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """An unset parameter; gradients are switched on by whoever trains."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x @ weight^T, float32 accumulation, one rounding.

    wide    the result stays in float32: compressor inputs, router and head, which the model computes in float32 from
            bfloat16 operands. Until weights are loaded they are float32, for whoever trains them.
    matrix  what products read: the parameter, or the packed bytes in its place.
    """

    def __init__(self, inputs: int, outputs: int, store: Store, numerics: Numerics, *, wide: bool = False):
        super().__init__()
        self.store: Store = store
        self.wide, self.numerics = wide, numerics
        self.dtype = activation_dtype(numerics)
        self.packed: quant.Fp8Matrix | quant.RowMatrix | None = None
        if store == "fp8" and packs(numerics):
            blocks = (-(-outputs // quant.WEIGHT_BLOCK), -(-inputs // quant.WEIGHT_BLOCK))
            codes = torch.empty(outputs, inputs, dtype=quant.E4M3)
            if numerics.one_scale:
                self.packed = quant.RowMatrix(codes, torch.empty(outputs))
            else:
                self.packed = quant.Fp8Matrix(codes, torch.empty(blocks, dtype=torch.uint8))
            self.register_parameter("weight", None)
        else:
            self.weight = parameter(outputs, inputs, dtype=torch.float32 if wide else self.dtype)

    @property
    def matrix(self) -> quant.Matrix:
        return self.weight if self.packed is None else self.packed

    def forward(self, x: Tensor) -> Tensor:
        return gemm.linear(x, self.matrix, out_dtype=torch.float32 if self.wide else None)

    def load(self, source: TensorSource, name: str) -> None:
        """Take the weight `name` from the file, whole."""
        self.load_rows(source, name, 0)

    def load_rows(self, source: TensorSource, name: str, start: int) -> None:
        """Take the weight `name` as the rows from `start` on: two matrices that share their input may lie in one."""
        if self.packed is None:
            if self.weight.dtype != self.dtype:  # holds what is in the file, in half the bytes of float32
                self.weight.data = self.weight.data.to(self.dtype)
            weight = read_weight(source, name, self.store)
            if self.store == "fp8" and self.numerics.one_scale:
                weight = quant.roundtrip_carry(weight)
            self.weight.data[start : start + weight.shape[0]] = weight
            return
        file = quant.Fp8Matrix(source.tensor(f"{name}.weight"), source.tensor(f"{name}.scale").view(torch.uint8))
        rows = file.shape[0]
        device = self.packed.codes.device
        if isinstance(self.packed, quant.RowMatrix):
            file = quant.by_row(quant.Fp8Matrix(*(part.to(device) for part in file)))
        for mine, theirs in zip(quant.rows_of(self.packed, start, start + rows), file, strict=True):
            mine.copy_(theirs)


def join(a: Linear, b: Linear) -> quant.Matrix:
    """One matrix of the rows of both. Their weights become views of it, so nothing is held twice."""
    end, count = a.matrix.shape[0], a.matrix.shape[0] + b.matrix.shape[0]
    if a.packed is None or b.packed is None:
        weight = torch.cat([a.weight.detach(), b.weight.detach()])
        a.weight.data, b.weight.data = weight[:end], weight[end:]
        return weight
    whole = type(a.packed)(*(torch.cat(parts) for parts in zip(a.packed, b.packed, strict=True)))
    a.packed, b.packed = quant.rows_of(whole, 0, end), quant.rows_of(whole, end, count)
    return whole


def check_finite(model: nn.Module) -> None:
    """What was loaded are numbers: a scale that is none makes a whole block of weights so.

    Raises  NonFiniteTensor, naming the first weight. Lookup tables are left out: they are not read whole; so are packed
            experts, which are looked at before they take a form of their device's own (`check_fp4`).
    Cost    one pass over the weights; waits for the device once.
    """
    names: list[str] = []
    sums: list[Tensor] = []
    for name, module in model.named_modules():
        for part, value in module.named_parameters(name, recurse=False):
            names.append(part)
            sums.append(value.detach().sum(dtype=torch.float32))
        if isinstance(module, Linear) and module.packed is not None:
            names.append(f"{name}.weight")
            weight = module.packed
            if isinstance(weight, quant.Fp8Matrix):
                bad = (weight.scales == 255).any() | ((weight.codes.view(torch.uint8) & 0x7F) == 0x7F).any()
                sums.append(torch.where(bad, torch.nan, 0.0))
            else:
                sums.append(weight.scales.sum())
    finite = torch.isfinite(torch.stack(sums)).tolist() if sums else []
    for name, fine in zip(names, finite, strict=True):
        if not fine:
            raise NonFiniteTensor(name)


def check_fp4(name: str, parts: Sequence[str], weight: quant.Fp4Matrix) -> None:
    """The scales of a stack of experts are numbers; any FP4 code is one.

    name    of the experts in the file, as in "layers.5.ffn.experts".
    parts   which matrices an expert's rows are, as in ("w1", "w3"): one behind the other, of equal height.
    Raises  NonFiniteTensor, naming the first scale.
    Cost    reads the scales once; waits for the device.
    """
    tops = weight.scales.unflatten(1, (len(parts), -1)).flatten(2).amax(2)  # [E, parts]
    for expert, part in (tops == 255).nonzero().tolist():
        raise NonFiniteTensor(f"{name}.{expert}.{parts[part]}.scale")


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
    the checkpoint's own, which may be a memory map. For a model on a GPU they lie beside it, or in locked host memory.
    """

    def __init__(self, rows: int, channels: int, numerics: Numerics):
        super().__init__()
        self.shape = (rows, channels)
        self.dtype = activation_dtype(numerics)
        self.codes = torch.empty(0, channels, dtype=torch.float8_e4m3fn)
        self.scales = torch.empty(0, channels // 32, dtype=torch.uint8)
        self.device = self.codes.device  # of the model
        self.on_host = False

    @property
    def over_link(self) -> bool:
        """Does reading a row cross the link between host and device?"""
        return self.on_host and self.device.type == "cuda"

    def forward(self, rows: Tensor) -> Tensor:
        """rows [...] int64 -> [..., channels] in the activation dtype."""
        return engram.table_rows(self.codes, self.scales, rows, self.dtype)

    def load(self, source: TensorSource, name: str) -> None:
        codes, scales = source.tensor(f"{name}.weight"), source.tensor(f"{name}.scale").view(torch.uint8)
        if self.over_link:
            assert codes.is_pinned(), f"a GPU cannot read {name}.weight where it lies"
            assert scales.is_pinned(), f"a GPU cannot read {name}.scale where it lies"
            self.codes, self.scales = codes, scales
        else:
            self.codes, self.scales = codes.to(self.device), scales.to(self.device)
