"""Random operands of a model's sizes: packed weights, rows, filled caches. Made on the device, fast, from one seed.

Values look like those of a model, since a GPU's power and so its clock depend on them: weights are normal under scales
that keep a product's spread at one, cached vectors are normal, codes fill their grids. Nothing is shared between two
calls, so what one kernel read is not in the cache for the next one by accident.
"""

import math

import torch
from torch import Tensor

from benthic.cache.spec import CacheSpec
from benthic.cache.storage import Storage
from benthic.kernels import kv_copy, quant
from benthic.models.deepseek_v41_config import ModelConfig, TensorSpec, tensors

CODE_SPREAD = 100.0  # standard deviation of E4M3 codes: a block's largest of 1024 is near 3.3 of them, below 448
FP4_SPREAD = 2.9  # of E2M1 codes when all 16 are equally likely
TILE = 1 << 28  # elements of one temporary


class Operands:
    """Makes tensors on one device, from a generator of its own."""

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.host = torch.Generator().manual_seed(seed)

    # ---- plain values ----

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        x = torch.empty(*shape, dtype=dtype, device=self.device)
        return x.normal_(0.0, scale, generator=self.generator)

    def rows(self, count: int, width: int) -> Tensor:
        """[count, width] bf16 on the FP8 grid: what a quantised product reads."""
        return quant.roundtrip_fp8_reference(self.normal(count, width))

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """low .. high-1."""
        return torch.randint(low, high, shape, dtype=dtype, device=self.device, generator=self.generator)

    def random_bytes(self, *shape: int) -> Tensor:
        """uint8. Eight at a time, since a byte at a time takes eight times as long."""
        count = math.prod(shape)
        words = torch.empty(-(-count // 8), dtype=torch.int64, device=self.device)
        words.random_(-(2**63), None, generator=self.generator)
        return words.view(torch.uint8)[:count].view(shape)

    # ---- weights ----

    def dense(self, rows: int, width: int) -> Tensor:
        """[rows, width] bf16."""
        return self.normal(rows, width, scale=width**-0.5)

    def fp8(self, *shape: int) -> quant.Fp8Matrix:
        """A dense weight [..., N, K] with 32x32 blocks."""
        *batch, n, k = shape
        exponent = 127 - round(math.log2(CODE_SPREAD * math.sqrt(k)))
        scales = self.integers(exponent - 1, exponent + 1, *batch, -(-n // 32), -(-k // 32), dtype=torch.uint8)
        return quant.Fp8Matrix(self.fp8_codes(*shape), scales)

    def fp8_codes(self, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=quant.E4M3, device=self.device)
        for part in out.view(-1).split(TILE):
            part.copy_(self.normal(part.shape[0], scale=CODE_SPREAD).clamp_(-quant.FP8_MAX, quant.FP8_MAX))
        return out

    def fp4(self, experts: int, n: int, k: int) -> quant.Fp4Matrix:
        """Weights of routed experts [E, N, K]."""
        return quant.Fp4Matrix(self.random_bytes(experts, n, k // 2), self.fp4_scales(experts, n, k // 32))

    def fp4_scales(self, *shape: int) -> Tensor:
        exponent = 127 - round(math.log2(FP4_SPREAD * math.sqrt(32 * shape[-1])))
        return self.integers(exponent - 1, exponent + 1, *shape, dtype=torch.uint8)

    # ---- caches ----

    def storage(
        self, spec: CacheSpec, num_blocks: int, num_slots: int, rollback: int, table_blocks: int | None = None
    ) -> Storage:
        """A cache whose every byte was written by somebody: codes at random, scales near one."""
        storage = Storage(spec, num_blocks, num_slots, self.device, rollback=rollback, table_blocks=table_blocks)
        for some in storage.pool.split(max(1, (TILE // max(storage.pool.shape[1], 1)))):
            some.copy_(self.random_bytes(*some.shape))
        for part in storage.layout.parts:
            data, scale = (
                kv_copy.data_bytes(part.channels, part.format),
                kv_copy.scale_bytes(part.channels, part.format),
            )
            if scale:  # "f32" has none, and keeps what it has
                view = storage.pool.as_strided(
                    (num_blocks, part.entries, scale),
                    (storage.pool.stride(0), part.scale_stride, 1),
                    part.scale_offset,
                )
                low, high = _scale_codes(part.format)
                self._fill(view, low, high)
            if part.format == "fp8":
                view = storage.pool.as_strided(
                    (num_blocks, part.entries, data), (storage.pool.stride(0), part.data_stride, 1), part.data_offset
                )
                view.bitwise_and_(0xF7)  # no NaN among the codes
        for ring in storage.slot_layout.rings:
            self._fill_ring(storage.rings[ring.layer], ring.channels, ring.format)
        for carry in storage.carry.values():
            carry.normal_(generator=self.generator)
        storage.history.random_(0, 1000, generator=self.generator)
        return storage

    def _fill(self, view: Tensor, low: int, high: int) -> None:
        """Random bytes low .. high-1 into a strided view, some blocks at a time."""
        for some in view.split(max(1, TILE // max(math.prod(view.shape[1:]), 1))):
            some.copy_(self.integers(low, high, *some.shape, dtype=torch.uint8))

    def _fill_ring(self, ring: Tensor, channels: int, form: str) -> None:
        data = kv_copy.data_bytes(channels, form)
        if form == "f32":
            ring.view(torch.float32).normal_(generator=self.generator)
            return
        ring[..., :data] = self.fp8_codes(*ring.shape[:2], data).view(torch.uint8)
        self._fill(ring[..., data:], *_scale_codes(form))


def _scale_codes(form: str) -> tuple[int, int]:
    """Bytes of scales that bring codes near one."""
    return {"fp8": (119, 121), "mxfp4": (125, 127), "nvfp4": (0x28, 0x30)}[form]  # 2^-8, 2^-2, E4M3 0.25 .. 0.5


class RandomSource:
    """A checkpoint that is nowhere: every official tensor of a config, made when it is asked for.

    Norm weights are near one, hyper-connections are those of `testing/checkpoints.py`, so that activations stay sane
    over the whole depth. Two requests for one name give two draws; a loader asks once.
    """

    def __init__(self, config: ModelConfig, operands: Operands):
        self.config, self.operands = config, operands
        self.specs = tensors(config)

    def tensor(self, name: str) -> Tensor:
        spec, make = self.specs[name], self.operands
        if spec.dtype == "I8":
            return make.random_bytes(*spec.shape).view(torch.int8)
        if spec.dtype == "F8_E8M0":
            return self._scales(name, spec)
        if spec.dtype == "F8_E4M3":
            return make.fp8_codes(*spec.shape)
        if spec.dtype == "F32":
            return self._float(name, spec)
        if len(spec.shape) == 1 or name.endswith(("q_weight", "k_weight")):
            return 1 + make.normal(*spec.shape, scale=0.1)
        return make.normal(*spec.shape, scale=1.0 if name == "embed.weight" else spec.shape[-1] ** -0.5)

    def _scales(self, name: str, spec: TensorSpec) -> Tensor:
        weight = self.specs[name.removesuffix(".scale") + ".weight"]
        make = self.operands
        if weight.dtype == "I8":
            return make.fp4_scales(*spec.shape)
        width = 1 if weight.group == "engram.tables" else weight.shape[-1]
        exponent = 127 - round(math.log2(CODE_SPREAD * math.sqrt(width)))
        return make.integers(exponent - 1, exponent + 1, *spec.shape, dtype=torch.uint8)

    def _float(self, name: str, spec: TensorSpec) -> Tensor:
        make = self.operands
        if name.endswith("_fn"):
            return make.normal(*spec.shape, dtype=torch.float32, scale=spec.shape[-1] ** -0.5)
        if name.endswith("_scale"):
            return make.normal(*spec.shape, dtype=torch.float32).abs_().mul_(0.1)
        if name.endswith("_base"):
            streams = self.config.text.hc_mult
            base = torch.zeros(spec.shape)
            base[:streams] = -3.0
            base[int(name.split(".")[1]) % streams] = 3.0
            base[2 * streams :] = torch.full((streams, streams), -3.0).fill_diagonal_(3.0).flatten()
            return base.to(make.device)
        return make.normal(*spec.shape, dtype=torch.float32, scale=0.1)


def routing(operands: Operands, rows: int, k: int, loads: Tensor) -> Tensor:
    """ids [rows, k] int64, distinct in a row: experts drawn without replacement, `loads` [E] as probabilities."""
    noise = torch.empty(rows, loads.shape[0], device=operands.device).exponential_(generator=operands.generator)
    return (loads.to(operands.device).log() - noise.log()).topk(k, dim=1).indices


def spread_loads(measured: tuple[float, ...], experts: int) -> Tensor:
    """Relative loads [experts] f32 with the distribution of the measured ones, mean 1, in a fixed random order."""
    at = (torch.arange(experts, dtype=torch.float64) + 0.5) / experts * len(measured) - 0.5
    low = at.floor().clamp(0, len(measured) - 1).long()
    high = (low + 1).clamp(max=len(measured) - 1)
    values = torch.tensor(measured, dtype=torch.float64)
    loads = torch.lerp(values[low], values[high], (at - low).clamp(0, 1))
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    return (loads / loads.mean())[order].float()


def decode_rows(
    requests: int, per_request: int, context: int, device: torch.device, first_slot: int = 1
) -> kv_copy.Rows:
    """Each request's next `per_request` positions after `context` tokens; request i has slot first_slot + i."""
    request = torch.arange(requests, device=device).repeat_interleave(per_request)
    within = torch.arange(per_request, device=device).repeat(requests)
    firsts = torch.full_like(request, context)
    return kv_copy.Rows(request + first_slot, firsts + within, firsts, request * per_request)


def block_tables(requests: int, blocks: int, pool_blocks: int, device: torch.device) -> Tensor:
    """int32 [requests + 1, blocks]: a run of blocks for each of the slots 1 and up; slot 0 has padding only.

    Where the pool is smaller than all runs together they overlap, with starts evenly apart, so that two requests that
    are read side by side are not at the same place.
    """
    usable = pool_blocks - 1
    stride = blocks if requests * blocks <= usable else max(usable // requests, 1)
    first = torch.arange(requests, device=device)[:, None] * stride
    tables = (first + torch.arange(blocks, device=device)) % usable + 1
    return torch.cat([tables.new_zeros(1, blocks), tables]).int()
