"""Configuration of the DeepSeek-V4.1-Flash family: config.json checked once, layer plan, every tensor's name. No torch.

Source: the model specification, sections 1 (keys and checks), 2.9 (Engram constants), 4 (cache), 5 (tensors) and
8 (divisibility).
Field names are the keys of config.json. D hidden width, H heads, dh head width, E experts, I expert width, S streams.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np

from benthic.cache.spec import AppendEntry, CacheSpec, CarryEntry, RingEntry
from benthic.errors import (
    BadConfigJSON,
    BadConfigKey,
    MissingCheckpointFile,
    MissingConfigKey,
    UnsupportedArchitecture,
    nearest,
)

T = TypeVar("T")

ARCHITECTURE = "DeepseekV41ForCausalLM"

# Keys that Hugging Face tools add to a config file and that say nothing about inference.
HARMLESS_KEYS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "chunk_size_feed_forward",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
    }
)


# How one key is read: `parse` returns the value to keep, or raises ValueError when it is not what `want` says.


class _Reject(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class _Kind:
    want: str
    parse: Callable[[object], Any]


def _integer(low: int, high: int | None = None, *, null: bool = False) -> _Kind:
    want = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"

    def parse(value: object) -> int | None:
        if value is None and null:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise _Reject
        return value

    return _Kind(f"{want} or null" if null else want, parse)


def _number(low: float, *, above: bool = False, null: bool = False) -> _Kind:
    want = "a number" if low == -math.inf else f"a number {'>' if above else '>='} {low:g}"

    def parse(value: object) -> float | None:
        if value is None and null:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Reject
        if value < low or (above and value == low):
            raise _Reject
        return float(value)

    return _Kind(f"{want} or null" if null else want, parse)


def _exactly(*allowed: object) -> _Kind:
    def parse(value: object) -> object:
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise _Reject
        return tuple(cast("list[object]", value)) if isinstance(value, list) else value

    return _Kind(" or ".join(json.dumps(a) for a in allowed), parse)


def _flag() -> _Kind:
    return _exactly(True, False)


def _text() -> _Kind:
    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise _Reject
        return value

    return _Kind("a string", parse)


def _integers(low: int, high: int | None = None, *, rising: bool = False) -> _Kind:
    want = f"a list of integers >= {low}" if high is None else f"a list of integers in [{low}, {high}]"

    def parse(value: object) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise _Reject
        values = cast("list[object]", value)
        one = _integer(low, high)
        out = tuple(one.parse(v) for v in values)
        if rising and any(b <= a for a, b in pairwise(out)):
            raise _Reject
        return out

    return _Kind(f"{want}, rising" if rising else want, parse)


def _numbers(low: float, *, above: bool = False) -> _Kind:
    one = _number(low, above=above)

    def parse(value: object) -> tuple[float, ...]:
        if not isinstance(value, list | tuple):
            raise _Reject
        return tuple(one.parse(v) for v in cast("list[object]", value))

    return _Kind(f"a list, each entry {one.want}", parse)


def _key(kind: _Kind, default: object = MISSING) -> Any:
    """A field read from the key of its name. A default makes the key optional."""
    meta = {"kind": kind}
    return field(metadata=meta) if default is MISSING else field(default=default, metadata=meta)


def _part(part: type, name: str) -> dict[str, object]:
    """Metadata of a field that is read from the object under key `name`."""
    return {"part": part, "name": name}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN. Source: `text_config.rope_scaling`."""

    rope_type: str = _key(_exactly("yarn"))
    factor: float = _key(_number(1))
    beta_fast: float = _key(_number(0, above=True))
    beta_slow: float = _key(_number(0, above=True))
    original_max_position_embeddings: int = _key(_integer(1))

    @property
    def yarn(self) -> tuple[float, float, float, float]:
        """(factor, beta_fast, beta_slow, original positions), the form `kernels.rope` takes."""
        return self.factor, self.beta_fast, self.beta_slow, float(self.original_max_position_embeddings)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """The one number format of the family: FP8 dense weights in 32x32 blocks, FP4 experts."""

    quant_method: str = _key(_exactly("fp8"))
    activation_scheme: str = _key(_exactly("dynamic"))
    weight_block_size: tuple[int, int] = _key(_exactly([32, 32]))
    scale_fmt: str = _key(_exactly("ue8m0"))
    expert_dtype: str = _key(_exactly("fp4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower and the geometry of image spans."""

    model_type: str = _key(_exactly("deepseek_v41_vision"), "deepseek_v41_vision")
    num_hidden_layers: int = _key(_integer(1))
    hidden_size: int = _key(_integer(1))
    num_attention_heads: int = _key(_integer(1))
    intermediate_size: int = _key(_integer(1))
    patch_size: int = _key(_integer(1))
    rope_theta: float = _key(_number(0, above=True))
    downsample_ratio: int = _key(_integer(1))
    max_image_tokens: int = _key(_integer(4))  # start, one image row with its newline, end
    min_pixels: int = _key(_integer(0))
    max_wh_ratio: float | None = _key(_number(0, above=True, null=True), None)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The text backbone and its DSpark drafter."""

    model_type: str = _key(_exactly("deepseek_v41_text"), "deepseek_v41_text")
    vocab_size: int = _key(_integer(1))
    hidden_size: int = _key(_integer(1))
    num_hidden_layers: int = _key(_integer(1))
    num_attention_heads: int = _key(_integer(1))
    num_key_value_heads: int = _key(_exactly(1))
    head_dim: int = _key(_integer(1))
    qk_rope_head_dim: int = _key(_integer(2))
    q_lora_rank: int = _key(_integer(1))
    o_groups: int = _key(_integer(1))
    o_lora_rank: int = _key(_integer(1))
    hidden_act: str = _key(_exactly("silu"))
    swiglu_limit: float = _key(_number(-math.inf))  # <= 0: no clamp
    rms_norm_eps: float = _key(_number(0, above=True))
    attention_bias: bool = _key(_exactly(False), False)
    attention_dropout: float = _key(_exactly(0, 0.0), 0.0)
    initializer_range: float = _key(_number(0), 0.02)  # no inference meaning
    use_cache: bool = _key(_flag(), True)  # no inference meaning
    tie_word_embeddings: bool = _key(_exactly(False))
    max_position_embeddings: int = _key(_integer(1))
    rope_theta: float = _key(_number(1, above=True))
    compress_rope_theta: float = _key(_number(1, above=True))
    rope_scaling: RopeScaling = field(metadata=_part(RopeScaling, "rope_scaling"))

    moe_intermediate_size: int = _key(_integer(1))
    n_routed_experts: int = _key(_integer(1))
    n_shared_experts: int = _key(_exactly(1))
    num_experts_per_tok: int = _key(_integer(1))
    scoring_func: str = _key(_exactly("sqrtsoftplus"))
    topk_method: str = _key(_exactly("noaux_tc"))
    norm_topk_prob: bool = _key(_flag())
    routed_scaling_factor: float = _key(_number(0, above=True))

    sliding_window: int = _key(_integer(1))
    compress_ratios: tuple[int, ...] = _key(_integers(0, 2))
    kv_source_layer_ids: tuple[int, ...] = _key(_integers(0, rising=True))
    index_source_layer_ids: tuple[int, ...] = _key(_integers(0, rising=True))
    index_k_source_layer_ids: tuple[int, ...] | None = _key(_integers(0, rising=True), None)  # None: the KV sources
    index_n_heads: int = _key(_integer(1))
    index_head_dim: int = _key(_integer(1))
    index_topk: int = _key(_integer(1))
    candidate_source_layer_id: int | None = _key(_integer(-(1 << 31), null=True), None)  # negative or None: off
    candidate_topk_blocks: int = _key(_integer(1), 2048)
    candidate_block_size: int = _key(_integer(1), 8)
    use_fp4_sparse_kv: bool = _key(_flag(), True)  # compressed KV in FP4; False: FP8

    hc_mult: int = _key(_integer(1))
    hc_sinkhorn_iters: int = _key(_integer(1))
    hc_eps: float = _key(_number(0, above=True))
    hc_shifted: bool = _key(_exactly(True), True)

    engram_layer_ids: tuple[int, ...] = _key(_integers(0, rising=True))
    engram_num_embeddings: tuple[int, ...] = _key(_integers(1))
    engram_max_ngram_size: int = _key(_integer(2))
    engram_vocab_size: int = _key(_integer(2, 1 << 31))
    engram_n_heads: int = _key(_integer(1))
    engram_head_dim: int = _key(_integer(1))
    engram_pad_token_id: int = _key(_integer(0))
    engram_compressed_vocab_size: int = _key(_integer(1))

    num_nextn_predict_layers: int = _key(_integer(0))  # DSpark stages; 0: no drafter
    dspark_block_size: int = _key(_integer(1), 5)
    dspark_noise_token_id: int = _key(_integer(0), 0)
    dspark_target_layer_ids: tuple[int, ...] = _key(_integers(0, rising=True), ())
    dspark_target_attn_input: bool = _key(_exactly(True), True)
    dspark_markov_rank: int = _key(_integer(1), 256)
    dspark_n_routed_experts: int = _key(_integer(1), 128)
    dspark_num_experts_per_tok: int = _key(_integer(1), 3)
    # what the confidence of each slot is divided by before the sigmoid; not in the release; empty: 1
    dspark_confidence_temperatures: tuple[float, ...] = _key(_numbers(0, above=True), ())

    @property
    def split(self) -> int:
        """Index of the first ratio-1 layer: layers below it are the encoder, the rest the decoder (section 1.5)."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    @property
    def candidate_source(self) -> int | None:
        """The candidate source layer, or None when candidates are off."""
        layer = self.candidate_source_layer_id
        return None if layer is None or layer < 0 else layer

    @property
    def engram_rows_per_token(self) -> int:
        """Table rows that one token reads in one Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """config.json of one checkpoint, checked. Made by `from_json`; hashable."""

    architectures: tuple[str, ...] = _key(_exactly([ARCHITECTURE]))
    model_type: str = _key(_exactly("deepseek_v41"))
    dtype: str = _key(_exactly("bfloat16"))
    bos_token_id: int = _key(_integer(0))
    eos_token_id: int = _key(_integer(0))
    pad_token_id: int = _key(_integer(0))
    image_token_id: int = _key(_integer(0))
    tokenizer_compatibility: str = _key(_text(), "release")
    quantization: QuantConfig = field(metadata=_part(QuantConfig, "quantization_config"))
    text: TextConfig = field(metadata=_part(TextConfig, "text_config"))
    vision: VisionConfig | None = field(default=None, metadata=_part(VisionConfig, "vision_config"))

    @classmethod
    def from_json(cls, source: Mapping[str, Any] | str | Path, name: str | None = None) -> "ModelConfig":
        """Read and check config.json.

        source   the parsed object, the file, or the folder that holds config.json
        name     how errors call the source; default: the path, or "config.json"
        Raises   MissingCheckpointFile, BadConfigJSON, UnsupportedArchitecture, MissingConfigKey, BadConfigKey.
        """
        if isinstance(source, Mapping):
            data, where = source, name or "config.json"
        else:
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            data, where = read_json(path), name or str(path)
        architectures: object = data.get("architectures")
        if architectures != [ARCHITECTURE] and isinstance(architectures, list) and architectures:
            raise UnsupportedArchitecture(str(cast("list[object]", architectures)[0]), [ARCHITECTURE])
        config = _build(cls, data, "", where)
        _check_present(config.text, data["text_config"], where)
        _check(config, where)
        return config


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file. Raises MissingCheckpointFile and BadConfigJSON; a repeated key is refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            repeated = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
            raise BadConfigJSON(path, f"key {repeated!r} stands twice in one object")
        return out

    try:
        data: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise MissingCheckpointFile(path) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: bad UTF-8 and bad JSON
        raise BadConfigJSON(path, str(error)) from None
    if not isinstance(data, dict):
        raise BadConfigJSON(path, f"it holds a {type(data).__name__}, want an object")
    return cast("dict[str, Any]", data)


def _json_name(f: Field[Any]) -> str:
    return f.metadata.get("name") or f.name


def _build(cls: type[T], data: object, prefix: str, where: str) -> T:
    """One dataclass from one JSON object; prefix is the path to it, with a dot at its end."""
    if not isinstance(data, Mapping):
        raise BadConfigKey(prefix.rstrip("."), data, "an object", where)
    source = cast("Mapping[str, object]", data)
    known = {_json_name(f): f for f in fields(cast("Any", cls))}
    for key in source:
        if key not in known and key not in HARMLESS_KEYS:
            close = nearest(key, known)
            hint = f"; did you mean {prefix}{close}?" if close else ""
            raise BadConfigKey(f"{prefix}{key}", source[key], f"no such key, it is unknown{hint}", where)
    values: dict[str, Any] = {}
    for key, f in known.items():
        part: type | None = f.metadata.get("part")
        kind: _Kind | None = f.metadata.get("kind")
        want = kind.want if kind else "an object"
        if key not in source:
            if f.default is MISSING:
                raise MissingConfigKey(f"{prefix}{key}", want, where)
            continue
        value = source[key]
        if part is not None:
            if value is not None or f.default is MISSING:  # an optional part may be null
                values[f.name] = _build(part, value, f"{prefix}{key}.", where)
            continue
        assert kind is not None, f"field {f.name} has no kind"
        try:
            values[f.name] = kind.parse(value)
        except _Reject:
            raise BadConfigKey(f"{prefix}{key}", value, want, where) from None
    return cls(**values)


# Checks across keys: sections 1.5 and 8.


def _check_present(t: TextConfig, data: Mapping[str, object], where: str) -> None:
    """Keys of a feature have defaults only so that they may be absent where the feature is off."""
    on = ("dspark_",) if t.num_nextn_predict_layers else ()
    on += ("candidate_topk_blocks", "candidate_block_size") if t.candidate_source is not None else ()
    for f in fields(t):
        optional = f.name in ("dspark_target_attn_input", "dspark_confidence_temperatures")
        if f.name.startswith(on) and f.name not in data and not optional:
            raise MissingConfigKey(f"text_config.{f.name}", f.metadata["kind"].want, where)


def _source_of(sources: tuple[int, ...], layer: int) -> int | None:
    """The latest source at or before a layer."""
    return max((s for s in sources if s <= layer), default=None)


def _check(config: ModelConfig, where: str) -> None:
    t = config.text

    def need(ok: bool, key: str, value: object, want: str) -> None:
        if not ok:
            raise BadConfigKey(key, value, want, where)

    def need_text(ok: bool, key: str, want: str) -> None:
        value: object = getattr(t, key)
        shown = list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
        need(ok, f"text_config.{key}", shown, want)

    layers, stages = t.num_hidden_layers, t.num_nextn_predict_layers
    below_vocab = f"an id below vocab_size ({t.vocab_size})"
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        need(getattr(config, key) < t.vocab_size, key, getattr(config, key), below_vocab)
    need_text(t.engram_pad_token_id < t.vocab_size, "engram_pad_token_id", below_vocab)
    need_text(t.dspark_noise_token_id < t.vocab_size, "dspark_noise_token_id", below_vocab)

    _check_divisibility(t, need_text)
    need_text(t.num_experts_per_tok <= t.n_routed_experts, "num_experts_per_tok", f"at most {t.n_routed_experts}")

    ratios = t.compress_ratios
    need_text(
        len(ratios) == layers + stages,
        "compress_ratios",
        f"{layers + stages} entries: {layers} backbone layers and {stages} DSpark stages",
    )
    need_text(not any(ratios[layers:]), "compress_ratios", f"0 for the last {stages} entries, the DSpark stages")
    _check_schedule(t, need_text)

    if stages:
        need_text(
            bool(t.dspark_target_layer_ids) and t.dspark_target_layer_ids[-1] < layers,
            "dspark_target_layer_ids",
            f"at least one layer, each below {layers}",
        )
        limit = t.dspark_n_routed_experts
        need_text(t.dspark_num_experts_per_tok <= limit, "dspark_num_experts_per_tok", f"at most {limit}")
        block = t.dspark_block_size
        need_text(
            len(t.dspark_confidence_temperatures) in (0, block),
            "dspark_confidence_temperatures",
            f"{block} entries, one a slot of the block, or none",
        )

    engram = t.engram_layer_ids
    need_text(
        not engram or engram[-1] < t.split,
        "engram_layer_ids",
        f"layers below the encoder-decoder split at layer {t.split}",
    )
    limit = t.vocab_size
    need_text(t.engram_compressed_vocab_size <= limit, "engram_compressed_vocab_size", f"at most vocab_size ({limit})")
    rows = [table.rows for table in engram_tables(config)]
    need_text(list(t.engram_num_embeddings) == rows, "engram_num_embeddings", f"{rows}, from the prime search")

    v = config.vision
    if v is not None:
        need(
            v.hidden_size % v.num_attention_heads == 0 and v.head_dim % 4 == 0,
            "vision_config.num_attention_heads",
            v.num_attention_heads,
            f"a divisor of hidden_size ({v.hidden_size}) that leaves a multiple of 4 channels a head",
        )


def _check_divisibility(t: TextConfig, need: Callable[[bool, str, str], None]) -> None:
    """Section 8: K of every quantised product a multiple of 128, its outputs of 32; cache rows of 32."""
    need(t.hidden_size % 128 == 0, "hidden_size", "a multiple of 128")
    need(t.q_lora_rank % 128 == 0, "q_lora_rank", "a multiple of 128")
    need(t.moe_intermediate_size % 128 == 0, "moe_intermediate_size", "a multiple of 128")
    need(t.head_dim % 32 == 0, "head_dim", "a multiple of 32")
    need(t.index_head_dim % 32 == 0, "index_head_dim", "a multiple of 32")
    need(t.o_lora_rank % 32 == 0, "o_lora_rank", "a multiple of 32")
    need(t.o_groups * t.o_lora_rank % 128 == 0, "o_lora_rank", "o_groups * o_lora_rank a multiple of 128")
    heads = t.num_attention_heads
    need(heads % t.o_groups == 0, "o_groups", f"a divisor of num_attention_heads ({heads})")
    need(heads * t.head_dim // t.o_groups % 128 == 0, "o_groups", "heads * head_dim / o_groups a multiple of 128")
    need(t.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even number")
    limit = min(t.head_dim, t.index_head_dim)
    need(t.qk_rope_head_dim <= limit, "qk_rope_head_dim", f"at most head_dim and index_head_dim ({limit})")
    need(t.engram_head_dim % 32 == 0, "engram_head_dim", "a multiple of 32")
    width = t.engram_rows_per_token * t.engram_head_dim
    need(width % 128 == 0, "engram_head_dim", f"rows per token * engram_head_dim a multiple of 128, it is {width}")


def _check_schedule(t: TextConfig, need: Callable[[bool, str, str], None]) -> None:
    """Section 1.5: who owns KV, index keys and candidates."""
    layers, ratios = t.num_hidden_layers, t.compress_ratios
    kv, index, candidate = t.kv_source_layer_ids, t.index_source_layer_ids, t.candidate_source
    for key, sources in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        for s in sources:
            need(s < layers, key, f"layers below num_hidden_layers ({layers})")
            need(ratios[s] > 0, key, f"layers with a compression ratio above 0, layer {s} has 0")
        for layer in range(layers):
            source = _source_of(sources, layer)
            if ratios[layer] == 0:
                continue
            need(source is not None, key, f"a source at or before layer {layer}, whose ratio is {ratios[layer]}")
            assert source is not None
            need(
                ratios[source] == ratios[layer],
                key,
                f"equal ratios for source {source} ({ratios[source]}) and its consumer {layer} ({ratios[layer]})",
            )
    need(set(kv) <= set(index), "kv_source_layer_ids", f"a subset of index_source_layer_ids {list(index)}")
    keys = t.index_k_source_layer_ids
    need(keys is None or keys == kv, "index_k_source_layer_ids", f"absent or equal to kv_source_layer_ids {list(kv)}")
    split = t.split
    need(split == layers or split in kv, "kv_source_layer_ids", f"the first ratio-1 layer, {split}, among them")
    need(not any(s > split for s in kv), "kv_source_layer_ids", f"no layer after the first ratio-1 layer, {split}")
    if candidate is None:
        return
    need(candidate in index, "candidate_source_layer_id", f"an index source, one of {list(index)}")
    for s in index:
        if s > candidate:
            want = f"a layer with the ratio of its consumer {s} ({ratios[s]})"
            need(ratios[s] == ratios[candidate], "candidate_source_layer_id", want)
    blocks, size = t.candidate_topk_blocks, t.candidate_block_size
    need(blocks % 8 == 0, "candidate_topk_blocks", "a multiple of 8")
    need(size in (8, 16), "candidate_block_size", "8 or 16")
    need(
        (blocks - 1) * size + 1 >= t.index_topk,  # the newest block is always kept and may hold one entry only
        "candidate_topk_blocks",
        f"(blocks - 1) * candidate_block_size + 1 >= index_topk ({t.index_topk})",
    )


# The layer plan: section 1.5.

Kind = Literal["window", "full", "reindex", "reuse", "draft"]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer does, worked out once. Layer numbers of DSpark stages go on from the backbone's."""

    index: int  # this layer
    kind: Kind  # window: no compressed part; full: owns KV and selects; reindex: selects; reuse; draft: DSpark stage
    ratio: int  # 0: window only; r: one compressed entry per r tokens
    window: int  # tokens of exact sliding-window attention, the query included
    kv_from: int | None  # layer whose compressed KV is read; itself if it writes
    keys_from: int | None  # layer whose index keys it scores against; None if it does not select
    topk_from: int | None  # layer whose selected entries are used; itself if it selects
    candidates_from: int | None  # layer whose candidate blocks limit its selection
    makes_candidates: bool  # chooses the candidate blocks of later layers
    engram: int | None  # number of its Engram table
    decoder: bool  # at or past the encoder-decoder split

    @property
    def owns_kv(self) -> bool:
        return self.kv_from == self.index

    @property
    def selects(self) -> bool:
        return self.topk_from == self.index


@cache
def layer_plan(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The plan of the backbone layers; `config.text.split` is the first decoder layer."""
    t = config.text
    plans: list[LayerPlan] = []
    for i in range(t.num_hidden_layers):
        ratio = t.compress_ratios[i]
        kv = _source_of(t.kv_source_layer_ids, i) if ratio else None
        topk = _source_of(t.index_source_layer_ids, i) if ratio else None
        selects = topk == i
        candidate = t.candidate_source
        kind: Kind = "window" if not ratio else "full" if kv == i else "reindex" if selects else "reuse"
        plans.append(
            LayerPlan(
                index=i,
                kind=kind,
                ratio=ratio,
                window=t.sliding_window,
                kv_from=kv,
                keys_from=kv if selects else None,
                topk_from=topk,
                candidates_from=candidate if selects and candidate is not None and i > candidate else None,
                makes_candidates=i == candidate,
                engram=t.engram_layer_ids.index(i) if i in t.engram_layer_ids else None,
                decoder=i >= t.split,
            )
        )
    return tuple(plans)


@cache
def draft_plan(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The plan of the DSpark stages: window-only layers, numbered after the backbone."""
    t = config.text
    return tuple(
        LayerPlan(
            index=t.num_hidden_layers + i,
            kind="draft",
            ratio=0,
            window=t.sliding_window,
            kv_from=None,
            keys_from=None,
            topk_from=None,
            candidates_from=None,
            makes_candidates=False,
            engram=None,
            decoder=True,
        )
        for i in range(t.num_nextn_predict_layers)
    )


# The cache: section 4.


@cache
def cache_spec(config: ModelConfig, *, packed: bool = True, drafter: bool = True) -> CacheSpec:
    """What each layer stores. packed: FP8 and FP4 records, else float32; drafter: with rings for the DSpark stages."""
    t = config.text
    main = "f32" if not packed else "nvfp4" if t.use_fp4_sparse_kv else "fp8"
    index, window = ("mxfp4", "fp8") if packed else ("f32", "f32")
    plans = layer_plan(config)
    append: list[AppendEntry] = []
    for p in plans:
        if p.owns_kv:
            append.append(AppendEntry(p.index, "main", t.head_dim, main, p.ratio))
            append.append(AppendEntry(p.index, "index", t.index_head_dim, index, p.ratio))
    rings = plans + (draft_plan(config) if drafter else ())
    return CacheSpec(
        append=tuple(append),
        rings=tuple(RingEntry(p.index, t.head_dim, window, p.window) for p in rings),
        carries=tuple(CarryEntry(p.index, t.head_dim, p.ratio) for p in plans if p.owns_kv and p.ratio > 1),
        history_ids=t.engram_max_ngram_size - 1 if t.engram_layer_ids else 0,
    )


def kv_bytes_per_token(config: ModelConfig) -> int | float:
    """Long-lived cache bytes of one token over all layers, packed. The release: 890."""
    size = cache_spec(config).bytes_per_token()
    return int(size) if size.denominator == 1 else float(size)


# Rotary positions: section 2.4.


def yarn_range(dim: int, theta: float, scaling: RopeScaling) -> tuple[int, int]:
    """(lo, hi): pairs up to lo keep their frequency, pairs from hi on have it divided. The release: (15, 25)."""

    def correction(turns: float) -> float:
        original = scaling.original_max_position_embeddings
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    return low, min(math.ceil(correction(scaling.beta_slow)), dim - 1)


# Engram constants: section 2.9.


@dataclass(frozen=True, slots=True)
class EngramTable:
    """The hash constants of one Engram layer. n: n-gram sizes 2..max, h: hash heads."""

    layer: int
    multipliers: tuple[int, ...]  # max n-gram size of them, odd, below 2**63 / compressed vocabulary
    primes: tuple[tuple[int, ...], ...]  # [n, h]
    offsets: tuple[tuple[int, ...], ...]  # [n, h] first row of each bucket range
    rows: int  # of the table: the sum of its primes


def _is_prime(n: int) -> bool:
    return n > 1 and (n < 4 or (n % 2 == 1 and all(n % d for d in range(3, math.isqrt(n) + 1, 2))))


def engram_tables(config: ModelConfig) -> tuple[EngramTable, ...]:
    """Multipliers, bucket primes and row offsets, in the order of `engram_layer_ids`."""
    t = config.text
    return engram_constants(
        t.engram_layer_ids,
        t.engram_max_ngram_size,
        t.engram_n_heads,
        t.engram_vocab_size,
        t.engram_compressed_vocab_size,
    )


@cache
def engram_constants(
    layers: tuple[int, ...], max_ngram: int, heads: int, first: int, vocab: int
) -> tuple[EngramTable, ...]:
    """The tables of a configuration to be: `engram_num_embeddings` must list their rows.

    first: engram_vocab_size, where the prime search starts; vocab: engram_compressed_vocab_size.
    """
    taken: set[int] = set()
    tables: list[EngramTable] = []
    bound = (2**63 - 1) // vocab // 2
    for layer in layers:
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
        primes: list[tuple[int, ...]] = []
        offsets: list[tuple[int, ...]] = []
        rows = 0
        for _ in range(2, max_ngram + 1):
            at, size_primes, size_offsets = first - 1, list[int](), list[int]()
            while len(size_primes) < heads:
                at += 1
                if at not in taken and _is_prime(at):
                    taken.add(at)
                    size_primes.append(at)
                    size_offsets.append(rows)
                    rows += at
            primes.append(tuple(size_primes))
            offsets.append(tuple(size_offsets))
        multipliers = tuple(2 * int(r) + 1 for r in draws)
        tables.append(EngramTable(layer, multipliers, tuple(primes), tuple(offsets), rows))
    return tuple(tables)


# The tensors of a checkpoint: section 5.

Dtype = Literal["BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"]
DTYPE_BYTES: Mapping[str, int] = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class TensorSpec(NamedTuple):
    """One stored tensor. dtype as safetensors spells it; I8 holds two FP4 codes a byte; F8_E8M0 holds scales."""

    shape: tuple[int, ...]
    dtype: Dtype
    group: str  # where it counts: "<section>.<part>", section one of backbone, engram, dspark, vision

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Weights it holds; scales count as none."""
        if self.dtype == "F8_E8M0":
            return 0
        return math.prod(self.shape) * (2 if self.dtype == "I8" else 1)


_Named = Iterator[tuple[str, TensorSpec]]


def _fp8(name: str, out: int, k: int, group: str) -> _Named:
    yield f"{name}.weight", TensorSpec((out, k), "F8_E4M3", group)
    yield f"{name}.scale", TensorSpec((-(-out // 32), -(-k // 32)), "F8_E8M0", group)


def _fp4(name: str, out: int, k: int, group: str) -> _Named:
    yield f"{name}.weight", TensorSpec((out, k // 2), "I8", group)
    yield f"{name}.scale", TensorSpec((out, k // 32), "F8_E8M0", group)


def _block(t: TextConfig, name: str, section: str, experts: int, vision: bool) -> _Named:
    """What every layer has, backbone or DSpark."""
    d, heads, dh, inter = t.hidden_size, t.num_attention_heads, t.head_dim, t.moe_intermediate_size
    s = t.hc_mult
    for part in ("attn", "ffn"):
        yield f"{name}.{part}_norm.weight", TensorSpec((d,), "BF16", f"{section}.norms")
        yield f"{name}.hc_{part}_fn", TensorSpec(((2 + s) * s, s * d), "F32", f"{section}.hyper")
        yield f"{name}.hc_{part}_base", TensorSpec(((2 + s) * s,), "F32", f"{section}.hyper")
        yield f"{name}.hc_{part}_scale", TensorSpec((3,), "F32", f"{section}.hyper")
    attn, group = f"{name}.attn", f"{section}.attention"
    yield f"{attn}.attn_sink", TensorSpec((heads,), "F32", group)
    yield from _fp8(f"{attn}.wq_a", t.q_lora_rank, d, group)
    yield f"{attn}.q_norm.weight", TensorSpec((t.q_lora_rank,), "BF16", group)
    yield from _fp8(f"{attn}.wq_b", heads * dh, t.q_lora_rank, group)
    yield from _fp8(f"{attn}.wkv", dh, d, group)
    yield f"{attn}.kv_norm.weight", TensorSpec((dh,), "BF16", group)
    yield from _fp8(f"{attn}.wo_a", t.o_groups * t.o_lora_rank, heads * dh // t.o_groups, group)
    yield from _fp8(f"{attn}.wo_b", d, t.o_groups * t.o_lora_rank, group)
    ffn = f"{name}.ffn"
    yield f"{ffn}.gate.weight", TensorSpec((experts, d), "BF16", f"{section}.router")
    yield f"{ffn}.gate.bias", TensorSpec((experts,), "F32", f"{section}.router")
    if vision:
        yield f"{ffn}.gate.bias_vl", TensorSpec((experts,), "F32", f"{section}.router")
    for e in range(experts):
        for w, out, k in (("w1", inter, d), ("w2", d, inter), ("w3", inter, d)):
            yield from _fp4(f"{ffn}.experts.{e}.{w}", out, k, f"{section}.experts")
    for w, out, k in (("w1", inter, d), ("w2", d, inter), ("w3", inter, d)):
        yield from _fp8(f"{ffn}.shared_experts.{w}", out, k, f"{section}.shared_experts")


def _layer(config: ModelConfig, plan: LayerPlan) -> _Named:
    t, name = config.text, f"layers.{plan.index}"
    yield from _block(t, name, "backbone", t.n_routed_experts, config.vision is not None)
    if plan.owns_kv:
        compressor, group = f"{name}.attn.compressor", "backbone.compressor"
        yield f"{compressor}.wkv.weight", TensorSpec((t.head_dim, t.hidden_size), "BF16", group)
        if plan.ratio > 1:
            yield f"{compressor}.wgate.weight", TensorSpec((t.head_dim, t.hidden_size), "BF16", group)
        yield f"{compressor}.norm.weight", TensorSpec((t.head_dim,), "BF16", group)
    if plan.selects:
        indexer, group = f"{name}.attn.indexer", "backbone.indexer"
        if plan.owns_kv:
            yield f"{indexer}.wk.weight", TensorSpec((t.index_head_dim, t.head_dim), "BF16", group)
            yield f"{indexer}.k_norm.weight", TensorSpec((t.index_head_dim,), "BF16", group)
        yield from _fp8(f"{indexer}.wq_b", t.index_n_heads * t.index_head_dim, t.q_lora_rank, group)
        yield f"{indexer}.weights_proj.weight", TensorSpec((t.index_n_heads, t.hidden_size), "BF16", group)
    if plan.engram is not None:
        engram, d, s = f"{name}.engram", t.hidden_size, t.hc_mult
        rows, width = t.engram_num_embeddings[plan.engram], t.engram_head_dim
        yield f"{engram}.embed.weight", TensorSpec((rows, width), "F8_E4M3", "engram.tables")
        yield f"{engram}.embed.scale", TensorSpec((rows, width // 32), "F8_E8M0", "engram.tables")
        yield from _fp8(f"{engram}.wkv", (s + 1) * d, t.engram_rows_per_token * width, "backbone.engram_projection")
        yield f"{engram}.q_weight", TensorSpec((s, d), "BF16", "backbone.engram_projection")
        yield f"{engram}.k_weight", TensorSpec((s, d), "BF16", "backbone.engram_projection")


def _drafter(config: ModelConfig) -> _Named:
    t = config.text
    stages, d, group = t.num_nextn_predict_layers, t.hidden_size, "dspark.heads"
    for i in range(stages):
        yield from _block(t, f"mtp.{i}", "dspark", t.dspark_n_routed_experts, config.vision is not None)
    if stages:
        yield from _fp8("mtp.0.main_proj", d, len(t.dspark_target_layer_ids) * d, group)
        yield "mtp.0.main_norm.weight", TensorSpec((d,), "BF16", group)
        last, rank = f"mtp.{stages - 1}", t.dspark_markov_rank
        yield f"{last}.norm.weight", TensorSpec((d,), "BF16", group)
        yield f"{last}.markov_head.embed.weight", TensorSpec((t.vocab_size, rank), "BF16", group)
        yield f"{last}.markov_head.head.weight", TensorSpec((t.vocab_size, rank), "BF16", group)
        yield f"{last}.confidence_head.proj.weight", TensorSpec((1, d + rank), "BF16", group)


def _vision(v: VisionConfig, d: int) -> _Named:
    def bf16(name: str, *shape: int) -> tuple[str, TensorSpec]:
        part = {"vision": "tower", "aligner": "aligner"}.get(name.partition(".")[0], "delimiters")
        return name, TensorSpec(shape, "BF16", f"vision.{part}")

    w = v.hidden_size
    yield bf16("image_start", d)
    yield bf16("image_end", d)
    yield bf16("image_newline", d)
    yield bf16("vision.patch_embed.proj.weight", w, 3 * v.patch_size**2)
    yield bf16("vision.patch_embed.proj.bias", w)
    for b in range(v.num_hidden_layers):
        name = f"vision.blocks.{b}"
        yield bf16(f"{name}.norm1.weight", w)
        yield bf16(f"{name}.norm2.weight", w)
        yield bf16(f"{name}.attn.wqkv.weight", 3 * w, w)
        yield bf16(f"{name}.attn.wqkv.bias", 3 * w)
        yield bf16(f"{name}.attn.wo.weight", w, w)
        yield bf16(f"{name}.attn.wo.bias", w)
        yield bf16(f"{name}.mlp.w1.weight", 2 * v.intermediate_size, w)
        yield bf16(f"{name}.mlp.w2.weight", w, v.intermediate_size)
    yield bf16("vision.norm.weight", w)
    yield bf16("aligner.w1.weight", d, w * v.downsample_ratio**2)
    yield bf16("aligner.w1.bias", d)
    yield bf16("aligner.w2.weight", d, d)
    yield bf16("aligner.w2.bias", d)


@cache
def tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Every tensor of the checkpoint by name, in storage order: backbone, drafter, vision, then the Engram tables."""
    t = config.text
    table = (t.vocab_size, t.hidden_size)
    out: dict[str, TensorSpec] = {"embed.weight": TensorSpec(table, "BF16", "backbone.embedding")}
    for plan in layer_plan(config):
        out.update(_layer(config, plan))
    out["norm.weight"] = TensorSpec((t.hidden_size,), "BF16", "backbone.norms")
    out["head.weight"] = TensorSpec(table, "BF16", "backbone.head")
    out.update(_drafter(config))
    if config.vision is not None:
        out.update(_vision(config.vision, t.hidden_size))
    for name in [name for name, spec in out.items() if spec.group == "engram.tables"]:
        out[name] = out.pop(name)
    return out
