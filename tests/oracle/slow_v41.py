"""A slow DeepSeek-V4.1 text model and drafter: numpy, float64, one token at a time, dense, no code of the package.

Written from the model specification alone, to be read beside it: each function names its section. It reads an
official-format checkpoint folder with its own header parser and its own number decoding. Three arithmetics:

    None          no quantisers, no rounding: the algebra
    "reference"   profile R: bfloat16 where section 6.3 says, the round trips of 6.1, float64 elsewhere
    "production"  profile P: as R, with the differences of sections 2.5, 2.7, 2.12 and 6.2
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


# --- numbers (sections 5 and 6.1) -------------------------------------------------------------------------------


def _e4m3_values() -> Array:
    """Value of every E4M3 code: 4 exponent bits with bias 7, 3 mantissa bits, no infinity, all ones is NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size = np.where((code & 127) == 127, np.nan, size)
    return np.where(code >= 128, -size, size)


E4M3 = _e4m3_values()
_E4M3_SIZES = E4M3[:127]  # ascending, 0 to 448


def bf16(x: Array) -> Array:
    """Nearest bfloat16, ties to even, by way of float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64).reshape(np.shape(x))


def _nearest(sizes: Array, x: Array) -> Array:
    """Index of the nearest of ascending `sizes` to each |x|; ties to the even index."""
    x = np.abs(x)
    high = np.clip(np.searchsorted(sizes, x), 1, len(sizes) - 1)
    low = high - 1
    below, above = x - sizes[low], sizes[high] - x
    take_high = (above < below) | ((above == below) & (high % 2 == 0))
    return np.where(take_high, high, low)


def to_e4m3(x: Array) -> Array:
    """Nearest E4M3 value, saturating at 448."""
    return np.copysign(_E4M3_SIZES[_nearest(_E4M3_SIZES, np.minimum(np.abs(x), 448.0))], x)


def to_e2m1(x: Array) -> Array:
    return np.copysign(E2M1[_nearest(E2M1, np.minimum(np.abs(x), 6.0))], x)


def _power_above(ratio: Array) -> Array:
    """2^ceil(log2(ratio)) from the float32 bits."""
    bits = np.ascontiguousarray(ratio, dtype=np.float32).view(np.uint32).astype(np.int64)
    exponent = ((bits + 0x7FFFFF) >> 23) & 0xFF
    return 2.0 ** (exponent - 127)


def _groups(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:-1], -1, size)


def _largest(groups: Array, floor: float) -> Array:
    return np.maximum(np.abs(groups).max(-1, keepdims=True), floor).astype(np.float32)


def q8(x: Array) -> Array:
    """FP8 round trip, groups of 32, power-of-two scale."""
    g = _groups(x, 32)
    s = _power_above(_largest(g, 1e-4) / np.float32(448))
    return bf16((to_e4m3(g / s) * s).reshape(x.shape))


def q4m(x: Array) -> Array:
    """FP4 round trip, groups of 32, power-of-two scale."""
    g = _groups(x, 32)
    s = _power_above(_largest(g, 6 * 2.0**-126) / np.float32(6))
    return bf16((to_e2m1(g / s) * s).reshape(x.shape))


def q4n(x: Array) -> Array:
    """FP4 round trip, groups of 16, E4M3 scale."""
    g = _groups(x, 16)
    s = to_e4m3((_largest(g, 6 * 2.0**-9) / np.float32(6)).astype(np.float64))
    ratio = (g.astype(np.float32) / s.astype(np.float32)).astype(np.float64)
    return bf16((to_e2m1(ratio) * s).reshape(x.shape))


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@dataclass(frozen=True)
class Arithmetic:
    """What happens to a value at each place where a profile may round it."""

    profile: str | None

    def cut(self, x: Array) -> Array:
        return x if self.profile is None else bf16(x)

    def q8(self, x: Array) -> Array:
        return x if self.profile is None else q8(x)

    def q4m(self, x: Array) -> Array:
        return x if self.profile is None else q4m(x)

    def q4n(self, x: Array) -> Array:
        return x if self.profile is None else q4n(x)

    def linear(self, x: Array, weight: Array) -> Array:
        return self.cut(x @ weight.T)

    def linear8(self, x: Array, weight: Array) -> Array:
        return self.cut(self.q8(x) @ weight.T)

    def rms(self, x: Array, weight: Array, eps: float) -> Array:
        return self.cut(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight)


# --- the checkpoint (section 5) ---------------------------------------------------------------------------------


class Folder:
    """Tensors of a checkpoint folder as float64, dequantised."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        self._where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with file.open("rb") as f:
                length = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    self._where[name.removeprefix("model.")] = (file, 8 + length, entry)
        self.replaced: dict[str, Array] = {}  # tests put other values here, by name

    def names(self) -> list[str]:
        return sorted(self._where)

    def has(self, name: str) -> bool:
        return name in self._where

    def _raw(self, name: str) -> tuple[str, Array]:
        file, base, entry = self._where[name]
        begin, end = entry["data_offsets"]
        data = np.fromfile(file, dtype=np.uint8, count=end - begin, offset=base + begin)
        kinds = {"BF16": np.uint16, "F32": np.float32, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8}
        return entry["dtype"], data.view(kinds[entry["dtype"]]).reshape(entry["shape"])

    def get(self, name: str) -> Array:
        """A tensor by its name, without its scale."""
        if name in self.replaced:
            return self.replaced[name]
        kind, raw = self._raw(name)
        if kind == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if kind == "F32":
            return raw.astype(np.float64)
        if kind == "F8_E4M3":
            return E4M3[raw]
        if kind == "F8_E8M0":
            return 2.0 ** (raw.astype(np.int64) - 127)
        low, high = raw & 15, raw >> 4  # I8: two E2M1 codes, the even channel in the low nibble
        codes = np.stack([low, high], -1).reshape(raw.shape[0], -1)
        return np.where(codes >= 8, -1.0, 1.0) * E2M1[codes & 7]

    def weight(self, prefix: str) -> Array:
        """`prefix.weight` times `prefix.scale` where there is one."""
        name = f"{prefix}.weight"
        values = self.get(name)
        if name in self.replaced or not self.has(f"{prefix}.scale"):
            return values
        scale = self.get(f"{prefix}.scale")
        rows = 32 if self._where[name][2]["dtype"] == "F8_E4M3" else 1
        if ".engram.embed" in prefix:
            rows = 1
        scale = np.repeat(np.repeat(scale, rows, 0), 32, 1)
        return values * scale[: values.shape[0], : values.shape[1]]


# --- rotary embedding (2.4) -------------------------------------------------------------------------------------


def frequencies(dim: int, theta: float, yarn: dict[str, Any] | None) -> Array:
    one = np.float32(1)
    f = one / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    if yarn is None:
        return f

    def turn(n: float) -> float:
        return dim * math.log(yarn["original_max_position_embeddings"] / (n * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turn(yarn["beta_fast"])), 0)
    high = min(math.ceil(turn(yarn["beta_slow"])), dim - 1)
    i = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((i - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1).astype(np.float32)
    return f / np.float32(yarn["factor"]) * ramp + f * (one - ramp)


def rotate(x: Array, position: int, f: Array, inverse: bool = False) -> Array:
    """The last 2*len(f) channels of x [..., n], adjacent pairs, by the angles position * f."""
    angle = (np.float32(position) * f).astype(np.float32).astype(np.float64)
    turn = np.exp(-1j * angle) if inverse else np.exp(1j * angle)
    n = 2 * len(f)
    pairs = x[..., -n:].reshape(*x.shape[:-1], -1, 2)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    out = x.copy()
    out[..., -n:] = np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], n)
    return out


# --- hyper-connections (2.2) ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hyper:
    fn: Array
    base: Array
    scale: Array


def mixes(s: Array, hc: Hyper, norm_eps: float, hc_eps: float, iterations: int) -> tuple[Array, Array, Array]:
    """s [m, D] -> read weights [m], write weights [m], mixing matrix [m_in, m_out]."""
    m = s.shape[0]
    v = s.reshape(-1)
    z = (hc.fn @ v) / np.sqrt(np.mean(v * v) + norm_eps)
    pre = sigmoid(z[:m] * hc.scale[0] + hc.base[:m]) + hc_eps
    post = 2 * sigmoid(z[m : 2 * m] * hc.scale[1] + hc.base[m : 2 * m])
    a = (z[2 * m :] * hc.scale[2] + hc.base[2 * m :]).reshape(m, m)
    c = np.exp(a - a.max(1, keepdims=True))
    c = c / c.sum(1, keepdims=True) + hc_eps
    c = c / (c.sum(0, keepdims=True) + hc_eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(1, keepdims=True) + hc_eps)
        c = c / (c.sum(0, keepdims=True) + hc_eps)
    return pre, post, c


def collapse(s: Array, pre: Array) -> Array:
    return pre @ s


def expand(out: Array, s: Array, post: Array, comb: Array) -> Array:
    return post[:, None] * out[None, :] + comb.T @ s


# --- attention (2.5) --------------------------------------------------------------------------------------------


def sink_attention(q: Array, rows: Array, live: Array, sink: Array, scale: float, rounded: bool) -> Array:
    """q [H, dh] over rows [n, dh] of which `live` [n] count. `rounded`: 64 rows a step, probabilities in bfloat16."""
    logit = np.where(live[None, :], scale * (q @ rows.T), -np.inf)
    size = 64 if rounded else max(rows.shape[0], 1)
    best = np.full(q.shape[0], -1e30)
    total = np.zeros(q.shape[0])
    acc = np.zeros_like(q)
    for begin in range(0, rows.shape[0], size):
        part = logit[:, begin : begin + size]
        new = np.maximum(best, part.max(1))
        p = np.exp(part - new[:, None])
        shrink = np.exp(best - new)
        total = total * shrink + p.sum(1)
        acc = acc * shrink[:, None] + (bf16(p) if rounded else p) @ rows[begin : begin + size]
        best = new
    return acc / (total + np.exp(sink - best))[:, None]


def top(scores: Array, count: int) -> Array:
    """Indices of the `count` largest, lowest index first among equals, ascending; -inf never counts."""
    order = np.argsort(-scores, kind="stable")[:count]
    return np.sort(order[scores[order] > -np.inf])


def margin(scores: Array, count: int) -> tuple[float, float]:
    """The last score taken and the first left out; (inf, -inf) when everything is taken."""
    finite = np.sort(scores[scores > -np.inf])[::-1]
    return (float(finite[count - 1]), float(finite[count])) if 0 < count < len(finite) else (math.inf, -math.inf)


# --- n-gram memory (2.9) ----------------------------------------------------------------------------------------


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def engram_primes(layers: int, sizes: int, heads: int, start: int) -> Array:
    """[layers, sizes, heads] bucket counts: ascending primes, each handed out once over all layers and sizes."""
    used: set[int] = set()
    out = np.zeros((layers, sizes, heads), dtype=np.int64)
    for at in np.ndindex(layers, sizes):
        running = start - 1
        for head in range(heads):
            running += 1
            while running in used or not _is_prime(running):
                running += 1
            used.add(running)
            out[(*at, head)] = running
    return out


def engram_multipliers(layer: int, classes: int, count: int) -> Array:
    bound = (2**63 - 1) // classes // 2
    return 2 * np.random.default_rng(10007 * layer).integers(0, bound, size=count, dtype=np.int64) + 1


# --- experts (2.12) ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expert:
    w1: Array
    w2: Array
    w3: Array


@dataclass
class Layer:
    """One block's weights and what it remembers."""

    index: int
    prefix: str
    ratio: int
    attn_hc: Hyper
    ffn_hc: Hyper
    weights: dict[str, Array]
    experts: list[Expert]
    shared: Expert
    top_experts: int
    freqs: Array
    window: list[Array] = field(default_factory=list)  # kw rows, newest last, at most `sliding_window`
    open_rows: list[tuple[Array, Array]] = field(default_factory=list)  # (a, b) of the group that has not closed
    entries: list[Array] = field(default_factory=list)  # compressed KV
    keys: list[Array] = field(default_factory=list)  # index keys


@dataclass(frozen=True)
class NearTie:
    """A choice that a difference of `gap` in one score would turn."""

    position: int
    layer: int
    kind: str  # "entries", "candidates", "experts"
    gap: float


class SlowModel:
    """The backbone and the drafter. `text` replaces values of text_config; `weights` replaces tensors by name."""

    def __init__(
        self,
        folder: str | Path,
        quantise: str | None = None,
        text: dict[str, Any] | None = None,
        weights: dict[str, Array] | None = None,
    ):
        self.folder = Folder(folder)
        self.folder.replaced = dict(weights or {})
        self.text: dict[str, Any] = {**self.folder.config["text_config"], **(text or {})}
        self.math = Arithmetic(quantise)
        t = self.text
        self.eps = float(t["rms_norm_eps"])
        self.copies = int(t["hc_mult"])
        self.embed = self.folder.weight("embed")
        self.head = self.folder.weight("head")
        self.norm = self.folder.weight("norm")
        self.plain = frequencies(t["qk_rope_head_dim"], t["rope_theta"], None)
        self.far = frequencies(t["qk_rope_head_dim"], t["compress_rope_theta"], t["rope_scaling"])
        depth = t["num_hidden_layers"]
        self.layers = [
            self._layer(i, f"layers.{i}", t["compress_ratios"][i], t["n_routed_experts"]) for i in range(depth)
        ]
        for layer in self.layers:
            layer.top_experts = t["num_experts_per_tok"]
        self.stages: list[Layer] = []
        for i in range(t["num_nextn_predict_layers"]):
            stage = self._layer(depth + i, f"mtp.{i}", 0, t["dspark_n_routed_experts"])
            stage.top_experts = t["dspark_num_experts_per_tok"]
            self.stages.append(stage)
        self.engram_ids = list(t["engram_layer_ids"])
        sizes = t["engram_max_ngram_size"] - 1
        self.primes = engram_primes(len(self.engram_ids), sizes, t["engram_n_heads"], t["engram_vocab_size"])
        self.token_map: Array = np.arange(t["vocab_size"])  # tiny configs: the identity
        self.position = 0
        self.history: list[tuple[int, bool]] = []  # (raw id, is image), oldest first
        self.contexts: list[list[Array]] = [[] for _ in self.stages]  # per stage, rows of positions 0..p
        self.near_ties: list[NearTie] = []
        self.tie_gap = 1e-6

    # -- weights

    def _hyper(self, prefix: str) -> Hyper:
        get = self.folder.get
        return Hyper(get(f"{prefix}_fn"), get(f"{prefix}_base"), get(f"{prefix}_scale"))

    def _expert(self, prefix: str) -> Expert:
        w = self.folder.weight
        return Expert(w(f"{prefix}.w1"), w(f"{prefix}.w2"), w(f"{prefix}.w3"))

    def _layer(self, index: int, prefix: str, ratio: int, experts: int) -> Layer:
        weights: dict[str, Array] = {}
        for name in self.folder.names():
            if not name.startswith(f"{prefix}.") or ".experts." in name or ".shared_experts." in name:
                continue
            short = name.removeprefix(f"{prefix}.")
            if short.endswith(".weight"):
                weights[short.removesuffix(".weight")] = self.folder.weight(name.removesuffix(".weight"))
            elif not short.endswith(".scale"):
                weights[short] = self.folder.get(name)
        return Layer(
            index,
            prefix,
            ratio,
            self._hyper(f"{prefix}.hc_attn"),
            self._hyper(f"{prefix}.hc_ffn"),
            weights,
            [self._expert(f"{prefix}.ffn.experts.{e}") for e in range(experts)],
            self._expert(f"{prefix}.ffn.shared_experts"),
            0,
            self.far if ratio else self.plain,
        )

    def _source(self, key: str, layer: int) -> int:
        return max(s for s in self.text[key] if s <= layer)

    # -- pieces, each one token

    def mix(self, s: Array, hc: Hyper) -> tuple[Array, Array, Array]:
        return mixes(s, hc, self.eps, float(self.text["hc_eps"]), int(self.text["hc_sinkhorn_iters"]))

    def read(self, s: Array, pre: Array, norm: Array) -> Array:
        """Collapse and norm: the input of a sublayer."""
        return self.math.rms(self.math.cut(collapse(s, pre)), norm, self.eps)

    def write(self, out: Array, s: Array, post: Array, comb: Array) -> Array:
        return self.math.cut(expand(out, s, post, comb))

    def query_latent(self, layer: Layer, h: Array) -> Array:
        return self.math.rms(self.math.linear8(h, layer.weights["attn.wq_a"]), layer.weights["attn.q_norm"], self.eps)

    def query(self, layer: Layer, qa: Array, p: int) -> Array:
        q = self.math.linear8(qa, layer.weights["attn.wq_b"]).reshape(self.text["num_attention_heads"], -1)
        return self.math.cut(rotate(q, p, layer.freqs))

    def window_row(self, layer: Layer, h: Array, p: int) -> Array:
        kw = self.math.rms(self.math.linear8(h, layer.weights["attn.wkv"]), layer.weights["attn.kv_norm"], self.eps)
        return self.math.q8(self.math.cut(rotate(kw, p, layer.freqs)))

    def latent(self, layer: Layer, h: Array) -> Array | None:
        """The normed, unrotated latent of the group that this token closes, if it closes one (2.6)."""
        w = layer.weights
        if layer.ratio == 1:
            return self.math.rms(self.math.linear(h, w["attn.compressor.wkv"]), w["attn.compressor.norm"], self.eps)
        layer.open_rows.append((h @ w["attn.compressor.wkv"].T, h @ w["attn.compressor.wgate"].T))
        if len(layer.open_rows) < layer.ratio:
            return None
        a = np.stack([row[0] for row in layer.open_rows])
        b = np.stack([row[1] for row in layer.open_rows])
        layer.open_rows.clear()
        share = np.exp(b - b.max(0))
        pooled = (share / share.sum(0) * a).sum(0)
        return self.math.rms(self.math.cut(pooled), w["attn.compressor.norm"], self.eps)

    def entry(self, layer: Layer, latent: Array, j: int) -> Array:
        return self.math.q4n(self.math.cut(rotate(latent, j * layer.ratio, layer.freqs)))

    def index_key(self, layer: Layer, latent: Array, j: int) -> Array:
        w = layer.weights
        k = self.math.rms(self.math.linear(latent, w["attn.indexer.wk"]), w["attn.indexer.k_norm"], self.eps)
        return self.math.q4m(self.math.cut(rotate(k, j * layer.ratio, layer.freqs)))

    def index_query(self, layer: Layer, qa: Array, p: int) -> Array:
        qi = self.math.linear8(qa, layer.weights["attn.indexer.wq_b"]).reshape(self.text["index_n_heads"], -1)
        return self.math.q4m(self.math.cut(rotate(qi, p, layer.freqs)))

    def index_weight(self, layer: Layer, h: Array) -> Array:
        constant = self.text["index_head_dim"] ** -0.5 * self.text["index_n_heads"] ** -0.5
        return self.math.cut(self.math.linear(h, layer.weights["attn.indexer.weights_proj"]) * constant)

    def index_scores(self, qi: Array, w: Array, keys: Array) -> Array:
        """[n] scores of keys [n, di] (2.7)."""
        if self.math.profile == "reference":
            dot = bf16(qi @ keys.T)
            return bf16(bf16(np.maximum(dot, 0) * w[:, None]).sum(0))
        return self.math.cut(w @ np.maximum(qi @ keys.T, 0))

    def candidate_blocks(self, scores: Array, p: int, layer: int) -> Array:
        """Blocks the later indexers may choose from, ascending (2.8)."""
        size, count = self.text["candidate_block_size"], self.text["candidate_topk_blocks"]
        n = len(scores)
        if n == 0:
            return np.zeros(0, dtype=np.int64)
        best = np.array([scores[i : i + size].max() for i in range(0, n, size)])
        best[(n - 1) // size] = np.inf
        self._note(p, layer, "candidates", best, count)
        return top(best, count)

    def choose(self, scores: Array, p: int, layer: int, candidates: Array | None) -> Array:
        """Entries attended, ascending (2.7)."""
        if candidates is not None:
            block = np.arange(len(scores)) // self.text["candidate_block_size"]
            scores = np.where(np.isin(block, candidates), scores, -np.inf)
        self._note(p, layer, "entries", scores, self.text["index_topk"])
        return top(scores, self.text["index_topk"])

    def _note(self, p: int, layer: int, kind: str, scores: Array, count: int) -> None:
        last, first = margin(scores, count)
        if last - first < self.tie_gap and not last == first == 0.0:
            self.near_ties.append(NearTie(p, layer, kind, last - first))

    def attend(self, layer: Layer, q: Array, window: Array, chosen: Array) -> Array:
        """Window rows [w, dh], oldest first, and compressed rows, in one softmax; before the inverse rotation.

        A window that is still filling has its gaps behind its rows, which is the order R has in prefill.
        """
        gaps = np.zeros((self.text["sliding_window"] - len(window), q.shape[1]))
        rows = np.concatenate([window, gaps, chosen.reshape(-1, q.shape[1])])
        live = np.ones(len(rows), dtype=bool)
        live[len(window) : len(window) + len(gaps)] = False
        rounded = self.math.profile == "reference"
        scale = self.text["head_dim"] ** -0.5
        return self.math.cut(sink_attention(q, rows, live, layer.weights["attn.attn_sink"], scale, rounded))

    def project(self, layer: Layer, o: Array, p: int) -> Array:
        """Inverse rotation, grouped low-rank projection, output projection: [H, dh] -> [D]."""
        o = self.math.cut(rotate(o, p, layer.freqs, inverse=True))
        groups = self.text["o_groups"]
        g = o.reshape(groups, -1)
        if self.math.profile == "production":
            g = q8(g)
        wo_a = layer.weights["attn.wo_a"].reshape(groups, self.text["o_lora_rank"], -1)
        u = self.math.cut(np.einsum("gk,gnk->gn", g, wo_a))
        return self.math.linear8(u.reshape(-1), layer.weights["attn.wo_b"])

    def route(self, layer: Layer, h: Array, image: bool, p: int = -1) -> tuple[Array, Array]:
        """Chosen experts, ascending, and their weights (2.12)."""
        score = np.sqrt(softplus(layer.weights["ffn.gate"] @ h))
        rank = score + layer.weights["ffn.gate.bias_vl" if image else "ffn.gate.bias"]
        self._note(p, layer.index, "experts", rank, layer.top_experts)
        chosen = top(rank, layer.top_experts)
        weight = score[chosen]
        if self.text["norm_topk_prob"] and layer.top_experts > 1:
            weight = weight / (weight.sum() + 1e-20)
        return chosen, weight * self.text["routed_scaling_factor"]

    def expert(self, expert: Expert, x: Array, weight: float | None) -> Array:
        """x is on the FP8 grid already."""
        limit = self.text["swiglu_limit"]
        a, b = self.math.linear(x, expert.w1), self.math.linear(x, expert.w3)
        if limit > 0:
            a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
        y = silu(a) * b
        if weight is not None:
            y = y * weight
        if self.math.profile == "reference":
            y = bf16(y)
        return self.math.linear8(y, expert.w2)

    def moe(self, layer: Layer, h: Array, chosen: Array, weights: Array) -> Array:
        x = self.math.q8(h)
        out = self.expert(layer.shared, x, None)
        for e, weight in zip(chosen, weights, strict=True):
            out = out + self.expert(layer.experts[e], x, float(weight))
        return self.math.cut(out)

    def engram_rows(self, layer: Layer) -> Array:
        """Table rows of the newest token in `history`, size-major, then head."""
        n = self.text["engram_max_ngram_size"]
        ids: list[int] = []
        pad = int(self.token_map[self.text["engram_pad_token_id"]])
        broken = False
        for i in range(n):
            token, image = self.history[-1 - i] if i < len(self.history) else (0, True)
            broken = broken or image
            ids.append(pad if broken else int(self.token_map[token]))
        mult = engram_multipliers(layer.index, self.text["engram_compressed_vocab_size"], n)
        primes = self.primes[self.engram_ids.index(layer.index)]
        offsets = np.concatenate([[0], np.cumsum(primes.reshape(-1))[:-1]]).reshape(primes.shape)
        acc, rows = ids[0] * int(mult[0]), []
        for i in range(1, n):
            acc ^= ids[i] * int(mult[i])
            rows += [
                acc % int(prime) + int(offset) for prime, offset in zip(primes[i - 1], offsets[i - 1], strict=True)
            ]
        return np.array(rows)

    def engram_kv(self, layer: Layer, rows: Array) -> Array:
        e = self.math.cut(layer.weights["engram.embed"][rows].reshape(-1))
        return self.math.linear8(e, layer.weights["engram.wkv"])

    def engram_gate(self, layer: Layer, s: Array, kv: Array, image: bool) -> Array:
        if image:
            return s
        width = s.shape[1]
        keys, value = kv[:-width].reshape(s.shape), kv[-width:]
        product = layer.weights["engram.q_weight"] * layer.weights["engram.k_weight"]
        d = (s * product * keys).sum(1) / np.sqrt((s * s).mean(1) + self.eps)
        d = d / np.sqrt((keys * keys).mean(1) + self.eps) * width**-0.5
        gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(d), 1e-6)), d))
        return self.math.cut(s + gate[:, None] * value)

    def logits(self, y: Array) -> Array:
        return self.head @ self.math.rms(y, self.norm, self.eps)

    # -- one token through everything

    def step(self, token: int, image: bool = False, embed: Array | None = None) -> tuple[Array, dict[Any, Array]]:
        """Logits [V] after this token, and every intermediate under (layer, name)."""
        p, t, seen = self.position, self.text, {}
        self.history.append((token, image))
        x = self.embed[token] if embed is None else embed
        s = np.repeat(self.math.cut(x)[None], self.copies, 0)
        pre = np.eye(self.copies)[0]
        taps: list[Array] = []
        chosen: dict[int, Array] = {}
        candidates: Array | None = None
        for layer in self.layers:
            i = layer.index

            def keep(name: str, value: Array, i: int = i) -> Array:
                seen[i, name] = value
                return value

            if i in self.engram_ids:
                kv = keep("engram_kv", self.engram_kv(layer, keep("engram_rows", self.engram_rows(layer))))
                s = keep("engram", self.engram_gate(layer, s, kv, image))
            keep("stream_in", s)
            if i in t["dspark_target_layer_ids"]:
                taps.append(keep("tap", self.math.cut(s.mean(0))))
            a_pre, post, comb = self.mix(s, layer.attn_hc)
            h = keep("attn_in", self.read(s, pre if t.get("hc_shifted", True) else a_pre, layer.weights["attn_norm"]))
            qa = keep("qa", self.query_latent(layer, h))
            q = keep("q", self.query(layer, qa, p))
            layer.window.append(keep("kw", self.window_row(layer, h, p)))
            del layer.window[: -t["sliding_window"]]
            picked = np.zeros((0, t["head_dim"]))
            if layer.ratio:
                source = self.layers[self._source("kv_source_layer_ids", i)]
                if source is layer:
                    latent = self.latent(layer, h)
                    if latent is not None:
                        j = len(layer.entries)
                        keep("latent", latent)
                        layer.entries.append(keep("entry", self.entry(layer, latent, j)))
                        layer.keys.append(keep("key", self.index_key(layer, latent, j)))
                if i in t["index_source_layer_ids"]:
                    qi = keep("index_query", self.index_query(layer, qa, p))
                    w = keep("index_weight", self.index_weight(layer, h))
                    keys = np.array(source.keys).reshape(-1, t["index_head_dim"])
                    scores = keep("scores", self.index_scores(qi, w, keys))
                    source_of_blocks = t["candidate_source_layer_id"]  # None or negative: no filter
                    if source_of_blocks is not None and i == source_of_blocks:
                        candidates = keep("candidates", self.candidate_blocks(scores, p, i))
                    after = source_of_blocks is not None and 0 <= source_of_blocks < i
                    chosen[i] = keep("selected", self.choose(scores, p, i, candidates if after else None))
                picks = chosen[self._source("index_source_layer_ids", i)]
                picked = np.array([source.entries[j] for j in picks]).reshape(-1, t["head_dim"])
            o = keep("attn_core", self.attend(layer, q, np.array(layer.window), picked))
            out = keep("attn_out", self.project(layer, o, p))
            s = keep("attn_stream", self.write(out, s, post, comb))
            f_pre, post, comb = self.mix(s, layer.ffn_hc)
            h = keep("ffn_in", self.read(s, a_pre if t.get("hc_shifted", True) else f_pre, layer.weights["ffn_norm"]))
            ids, weights = self.route(layer, h, image, p)
            keep("experts", ids)
            keep("expert_weights", weights)
            s = keep("stream_out", self.write(keep("moe_out", self.moe(layer, h, ids, weights)), s, post, comb))
            pre = keep("pre", f_pre)
        y = self.math.cut(collapse(s, pre))
        logits = self.logits(y)
        if self.stages:
            self._remember_taps(np.concatenate(taps), p)
        self.position += 1
        return logits, seen

    def run(self, tokens: list[int]) -> Array:
        """Logits [T, V] of a whole sequence."""
        return np.stack([self.step(token)[0] for token in tokens])

    # -- the drafter (section 3)

    def _remember_taps(self, taps: Array, p: int) -> None:
        first = self.stages[0].weights
        main = self.math.rms(self.math.linear8(taps, first["main_proj"]), first["main_norm"], self.eps)
        for stage, rows in zip(self.stages, self.contexts, strict=True):
            rows.append(self.window_row(stage, main, p))

    def draft(self, anchor: int) -> tuple[list[int], Array, Array]:
        """Greedy block after the newest token with taps: draft ids, their logits [B, V], confidences [B]."""
        t = self.text
        size, width = t["dspark_block_size"], t["sliding_window"]
        p0 = self.position - 1
        ids = [anchor] + [t["dspark_noise_token_id"]] * (size - 1)
        streams = [np.repeat(self.embed[i][None], self.copies, 0) for i in ids]
        pres = [np.eye(self.copies)[0]] * size
        for stage, context in zip(self.stages, self.contexts, strict=True):
            mixed = [self.mix(s, stage.attn_hc) for s in streams]
            inputs = [self.read(s, pre, stage.weights["attn_norm"]) for s, pre in zip(streams, pres, strict=True)]
            block = [self.window_row(stage, h, p0 + 1 + k) for k, h in enumerate(inputs)]
            held = {q % width: context[q] for q in range(max(0, p0 + 1 - width), p0 + 1)}
            rows = np.array([held[slot] for slot in sorted(held)] + block)  # ring-slot order, then the block
            for k, h in enumerate(inputs):
                q = self.query(stage, self.query_latent(stage, h), p0 + 1 + k)
                o = sink_attention(
                    q,
                    rows,
                    np.ones(len(rows), dtype=bool),
                    stage.weights["attn.attn_sink"],
                    t["head_dim"] ** -0.5,
                    self.math.profile == "reference",
                )
                out = self.project(stage, self.math.cut(o), p0 + 1 + k)
                a_pre, post, comb = mixed[k]
                s = self.write(out, streams[k], post, comb)
                f_pre, post, comb = self.mix(s, stage.ffn_hc)
                h2 = self.read(s, a_pre, stage.weights["ffn_norm"])
                chosen, weights = self.route(stage, h2, image=False, p=p0 + 1 + k)
                streams[k] = self.write(self.moe(stage, h2, chosen, weights), s, post, comb)
                pres[k] = f_pre
        last = self.stages[-1].weights
        ys = [self.math.cut(collapse(s, pre)) for s, pre in zip(streams, pres, strict=True)]
        previous, tokens, rows_out, confidence = anchor, [], [], []
        for y in ys:
            markov = last["markov_head.embed"][previous]
            z = self.head @ self.math.rms(y, last["norm"], self.eps) + last["markov_head.head"] @ markov
            confidence.append(float(sigmoid(last["confidence_head.proj"][0] @ np.concatenate([y, markov]))))
            previous = int(np.argmax(z))
            tokens.append(previous)
            rows_out.append(z)
        return tokens, np.stack(rows_out), np.array(confidence)
