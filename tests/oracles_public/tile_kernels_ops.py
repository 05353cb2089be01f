"""Each op that the torch references of tile-kernels 2.1.0 cover, beside the package's op on the same inputs."""

from collections.abc import Callable, Iterator

import torch
from tile_kernels import torch as tile  # pyright: ignore[reportMissingImports]
from torch import Tensor

from benthic.kernels import engram, hyper, moe_gate, norm, quant, rope, swiglu
from tests.oracle.blocks import Pair
from tests.oracle.slow_v41 import engram_multipliers, engram_primes

Normal = Callable[..., Tensor]
ROWS, STREAMS, WIDTH = 37, 4, 1280
EPS, HC_EPS, ITERATIONS = 1e-20, 1e-6, 20


def _pair(op: str, got: Tensor, want: Tensor) -> Pair:
    return Pair(op, -1, got.double().numpy(), want.double().numpy())


def pairs(seed: int = 0) -> Iterator[Pair]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    yield from _hyper(normal)
    yield from _engram(normal, g)
    yield from _experts(normal, g)
    yield from _simple(normal)
    yield from _casts(normal)


def _hyper(normal: Normal) -> Iterator[Pair]:
    mixes = (2 + STREAMS) * STREAMS
    s = (3 * normal(ROWS, STREAMS, WIDTH)).bfloat16()
    fn, base, scale = normal(mixes, STREAMS * WIDTH) / (STREAMS * WIDTH) ** 0.5, normal(mixes), normal(3)
    pre, post, comb = hyper.hyper_mixes(s, fn, scale, base, EPS, HC_EPS, ITERATIONS)
    z = tile.mhc_pre_norm_fn_ref(s[None], fn, None, EPS)
    want = tile.mhc_pre_split_mixes_ref(z, scale, base, STREAMS, 2.0, HC_EPS)
    yield _pair("mHC read weights", pre, want[0][0, ..., 0])
    yield _pair("mHC write weights", post, want[1][0, ..., 0])
    yield _pair("mHC Sinkhorn", comb, tile.sinkhorn_normalize_ref(want[2], ITERATIONS, HC_EPS)[0])
    got = hyper.hyper_collapse(s, pre).float()
    yield _pair("mHC collapse", got, tile.mhc_pre_apply_mix_ref(s.float()[None], pre[None, ..., None])[0])
    out = normal(ROWS, WIDTH).bfloat16()
    got = hyper.hyper_expand(out, s, post, comb).float()
    yield _pair("mHC expand", got, tile.mhc_post_ref(out[None], s[None], post[None, ..., None], comb[None])[0])


def _engram(normal: Normal, g: torch.Generator) -> Iterator[Pair]:
    classes, start, layers = 99092, 16000000, (1, 14)
    primes = torch.from_numpy(engram_primes(2, 3, 8, start))
    offsets = tile.make_offsets(primes.int())
    mult = torch.stack([torch.from_numpy(engram_multipliers(layer, classes, 4)) for layer in layers])
    ids = torch.randint(0, classes, (ROWS, 4), generator=g)
    want = tile.engram_hash_ref(ids.int(), mult, primes.int(), offsets)
    for i in range(2):
        got = engram.ngram_rows(ids, mult[i], primes[i], offsets[i].long().unflatten(0, (3, 8)))
        yield _pair("n-gram rows", got, want[i])
    s = normal(ROWS, STREAMS, WIDTH).bfloat16()
    kv = normal(ROWS, STREAMS + 1, WIDTH).bfloat16()
    q_weight, k_weight = (1 + 0.1 * normal(STREAMS, WIDTH)).bfloat16(), (1 + 0.1 * normal(STREAMS, WIDTH)).bfloat16()
    images = torch.rand(ROWS, generator=g) < 0.3
    weight = q_weight.float() * k_weight.float()
    got = engram.engram_gate(s, kv[:, :STREAMS], kv[:, STREAMS], weight, EPS, images).float()
    yield _pair("n-gram gate", got, tile.engram_gate_ref(s, kv, q_weight, k_weight, 1e-6, EPS, image_token_mask=images))


def _experts(normal: Normal, g: torch.Generator) -> Iterator[Pair]:
    experts, k = 384, 6
    h, gate = normal(ROWS, WIDTH).bfloat16(), (normal(experts, WIDTH) / WIDTH**0.5).bfloat16()
    bias, image_bias = 0.1 * normal(experts), 0.5 * normal(experts)
    images = torch.rand(ROWS, generator=g) < 0.3
    both = torch.where(images[:, None], image_bias, bias)
    ids, weights = moe_gate.route(h, gate, both, k, True, 1.5)
    want_ids, want_weights = tile.moe_topk_gate_forward(
        h.float() @ gate.float().t(),
        k,
        False,
        0,
        1.5,
        0,
        "sqrtsoftplus",
        bias=bias,
        image_bias=image_bias,
        image_token_mask=images,
    )
    yield _pair("router: experts", ids, want_ids)
    yield _pair("router: weights", weights, want_weights)
    x, w = 8 * normal(ROWS, 2 * 256), torch.rand(ROWS, generator=g)
    gate_half, up_half = x.bfloat16().chunk(2, -1)
    got = swiglu.swiglu(gate_half, up_half, 10.0, w).float()
    with torch.compiler.set_stance("force_eager"):  # the reference asks for a compiler that a CPU need not have
        want = tile.swiglu_forward(x.bfloat16(), topk_weights=w, clamp_value=10.0)
    yield _pair("SwiGLU", got, want.bfloat16())


def _simple(normal: Normal) -> Iterator[Pair]:
    x, weight = normal(ROWS, WIDTH).bfloat16(), (1 + 0.1 * normal(WIDTH)).bfloat16()
    yield _pair("RMS norm", norm.rms_norm(x, weight, EPS).float(), tile.norm_forward_ref(x, weight, EPS)[0])
    freqs = rope.rope_frequencies(64, 160000, (16, 32, 1, 65536))
    at = torch.arange(ROWS) * 2003
    angle = at[:, None] * freqs
    for inverse in (False, True):
        q = normal(ROWS, 16, 128).bfloat16()
        turned = tile.rotary_embedding_ref(
            q[..., 64:].float(), angle.cos(), angle.sin(), interleaved=True, conjugate=inverse
        )
        want = torch.cat([q[..., :64], turned.bfloat16()], -1)
        yield _pair("rotation", rope.rotate(q, at, freqs, inverse=inverse).float(), want)


def _casts(normal: Normal) -> Iterator[Pair]:
    x = (normal(256, 1024) * torch.exp2(4 * normal(256, 1))).bfloat16()
    codes, scales = quant.quantise_fp8(x)
    want_codes, want_scales = tile.cast(x, "e4m3", (1, 32), round_sf=True)
    yield _pair("FP8 scale", quant.e8m0_value(scales), want_scales)
    yield _pair("FP8 code", codes.float(), want_codes.float())
    packed, scales = quant.quantise_mxfp4(x)
    want_codes, want_scales = tile.cast(x, "e2m1", (1, 32), round_sf=True)
    yield _pair("MXFP4 scale", quant.e8m0_value(scales), want_scales)
    yield _pair("MXFP4 byte", packed.view(torch.uint8), want_codes.view(torch.uint8))
    packed, scales = quant.quantise_nvfp4(x)
    want_codes, want_scales = tile.cast(x, "e2m1", (1, 16), use_e4m3_sf=True)
    yield _pair("NVFP4 scale", scales.float(), want_scales.float())
    yield _pair("NVFP4 byte", packed.view(torch.uint8), want_codes.view(torch.uint8))
    w = normal(96, 256)
    codes, scales = quant.quantise_weight_fp8(w)
    want_codes, want_scales = tile.cast(w, "e4m3", (32, 32), round_sf=True)
    yield _pair("FP8 weight, 32 x 32", codes.float(), want_codes.float())
    back = quant.dequantise_weight_fp8(codes, scales).float()
    yield _pair("FP8 weight, read back", back, tile.cast_back((want_codes, want_scales), "fp32", (32, 32)))
