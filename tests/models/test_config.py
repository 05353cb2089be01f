"""config.json: the release's figures, the layer plan, the Engram constants, and what every bad key says."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benthic.errors import (
    BadConfigJSON,
    BadConfigKey,
    MissingCheckpointFile,
    MissingConfigKey,
    UnknownModel,
    UnsupportedArchitecture,
)
from benthic.models import registry
from benthic.models.deepseek_v41_config import (
    HARMLESS_KEYS,
    ModelConfig,
    draft_plan,
    engram_constants,
    engram_tables,
    layer_plan,
    tensors,
    yarn_range,
)
from benthic.testing.checkpoints import config_path, tiny_config
from tests.golden import make_layer_plan

GOLDEN = Path(__file__).parents[1] / "golden" / "layer_plan.json"
RELEASE = ModelConfig.from_json(config_path("v41_flash"))
TINY = ModelConfig.from_json(config_path("tiny"))


def test_the_golden_plan_is_what_its_script_makes() -> None:
    assert GOLDEN.read_text() == make_layer_plan.make()


@pytest.mark.parametrize("name", ["v41_flash", "tiny"])
def test_layer_plan(name: str) -> None:
    want = json.loads(GOLDEN.read_text())[name]
    config = ModelConfig.from_json(config_path(name))
    assert [asdict(plan) for plan in layer_plan(config)] == want


def test_split_and_draft_layers() -> None:
    assert RELEASE.text.split == 20
    assert TINY.text.split == 6
    assert [p.index for p in draft_plan(RELEASE)] == [40, 41, 42]
    assert {(p.kind, p.ratio, p.kv_from, p.topk_from) for p in draft_plan(RELEASE)} == {("draft", 0, None, None)}
    window_only = tiny_config(
        compress_ratios=[0] * 12, kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=None
    )
    config = ModelConfig.from_json(window_only)
    assert config.text.split == 10
    assert {p.kind for p in layer_plan(config)} == {"window"}


def test_tensor_inventory_of_the_release() -> None:
    inventory = tensors(RELEASE)
    assert len(inventory) == 96_085
    assert sum(spec.nbytes for spec in inventory.values()) == 510_286_023_000
    sections: dict[str, int] = {}
    for spec in inventory.values():
        section = spec.group.partition(".")[0]
        sections[section] = sections.get(section, 0) + spec.parameters
    assert {name: round(count / 1e9, 3) for name, count in sections.items()} == {
        "backbone": 551.881,
        "engram": 196.614,
        "dspark": 14.225,
        "vision": 0.485,
    }
    assert round(sum(sections.values()) / 1e9, 3) == 763.205
    layer = [spec for name, spec in inventory.items() if name.startswith("layers.5.")]
    assert round(sum(spec.parameters for spec in layer) / 1e9, 4) == 13.7545


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.0.hc_attn_fn", (24, 20480), "F32"),
        ("layers.39.attn.wo_a.scale", (256, 128), "F8_E8M0"),
        ("layers.8.attn.compressor.wgate.weight", (512, 5120), "BF16"),
        ("layers.24.attn.indexer.wq_b.weight", (4096, 1280), "F8_E4M3"),
        ("layers.3.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.3.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.1.engram.wkv.scale", (800, 192), "F8_E8M0"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("mtp.1.ffn.gate.bias_vl", (128,), "F32"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
    ],
)
def test_some_tensors_of_the_release(name: str, shape: tuple[int, ...], dtype: str) -> None:
    assert tensors(RELEASE)[name][:2] == (shape, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 pools nothing
        "layers.3.attn.indexer.wq_b.weight",
        "layers.24.attn.indexer.wk.weight",  # it reads the keys of layer 20
        "layers.0.hc_attn_norm.weight",
        "mtp.0.embed.weight",
        "mtp.1.main_proj.weight",
        "hc_head_fn",
    ],
)
def test_some_names_do_not_exist(name: str) -> None:
    assert name not in tensors(RELEASE)


def test_engram_tables_come_last() -> None:
    assert list(tensors(RELEASE))[-4:] == [
        f"layers.{layer}.engram.embed.{part}" for layer in (1, 14) for part in ("weight", "scale")
    ]


def test_without_vision_there_is_no_tower_and_no_image_bias() -> None:
    config = ModelConfig.from_json(tiny_config(vision_config=None))
    assert config.vision is None
    names = set(tensors(TINY)) - set(tensors(config))
    assert names == {n for n in tensors(TINY) if n.startswith(("vision.", "aligner.", "image_")) or "bias_vl" in n}


def test_without_drafter_there_is_no_mtp() -> None:
    data = tiny_config(num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1, 1])
    data["text_config"] = {k: v for k, v in data["text_config"].items() if not k.startswith("dspark_")}
    config = ModelConfig.from_json(data)
    assert draft_plan(config) == ()
    assert not any(name.startswith("mtp.") for name in tensors(config))


def test_engram_constants_of_the_release() -> None:
    first, second = engram_tables(RELEASE)
    assert (first.layer, second.layer) == (1, 14)
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert first.primes[0][:3] == (16000057, 16000079, 16000081)
    assert second.primes[-1][-3:] == (16000877, 16000879, 16000889)
    assert (first.rows, second.rows) == (384006168, 384016682)
    flat = [p for table in (first, second) for size in table.primes for p in size]
    assert len(set(flat)) == len(flat) == 48
    assert first.offsets[0][:2] == (0, 16000057)
    assert second.offsets[2][7] + second.primes[2][7] == second.rows
    bound = (2**63 - 1) // 99092 // 2
    assert bound == 46539438283891
    assert all(m * 99091 < 2**63 for m in first.multipliers + second.multipliers)


def test_primes_of_the_tiny_tables_by_sieve() -> None:
    limit = 2000
    sieve = [n for n in range(2, limit) if all(n % d for d in range(2, math.isqrt(n) + 1))]
    above = [p for p in sieve if p >= 500]
    taken = iter(above)
    # every (layer, size) restarts at 500, so in the end the primes above 500 are handed out in order
    want = [[[next(taken) for _ in range(4)] for _ in range(3)] for _ in range(2)]
    assert [[list(size) for size in table.primes] for table in engram_tables(TINY)] == want
    assert [table.rows for table in engram_tables(TINY)] == [6568, 7464]


def test_the_prime_search_may_return_its_own_start() -> None:
    (table,) = engram_constants((1,), max_ngram=2, heads=2, first=503, vocab=100)
    assert table.primes == ((503, 509),)
    assert table.offsets == ((0, 503),)
    assert len(table.multipliers) == 2


def test_yarn_range_of_the_release() -> None:
    text = RELEASE.text
    assert yarn_range(64, text.compress_rope_theta, text.rope_scaling) == (15, 25)
    assert text.rope_scaling.yarn == (16, 32, 1, 65536)


def test_absent_keys_have_their_defaults() -> None:
    text = RELEASE.text
    assert text.hc_shifted
    assert text.use_fp4_sparse_kv
    assert text.dspark_target_attn_input
    assert text.dspark_confidence_temperatures == ()
    assert text.index_k_source_layer_ids is None
    assert RELEASE.tokenizer_compatibility == "release"


@pytest.mark.parametrize("off", [None, -1, "absent"])
def test_candidates_can_be_off(off: Any) -> None:
    data = tiny_config(candidate_source_layer_id=off)
    if off == "absent":
        for key in ("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size"):
            del data["text_config"][key]
    config = ModelConfig.from_json(data)
    assert config.text.candidate_source is None
    assert not any(p.makes_candidates or p.candidates_from is not None for p in layer_plan(config))


def test_harmless_keys_are_ignored_everywhere() -> None:
    data = tiny_config()
    for part in (data, data["text_config"], data["vision_config"], data["quantization_config"]):
        part.update(dict.fromkeys(HARMLESS_KEYS, "x"))
    assert ModelConfig.from_json(data) == TINY


def edit(path: str, value: Any) -> dict[str, Any]:
    """The tiny configuration with one key set, or deleted with ...; dots go down."""
    data = copy.deepcopy(tiny_config())
    part, *rest = path.split(".")
    target: dict[str, Any] = data
    while rest:
        target = target[part]
        part, *rest = rest
    if value is ...:
        del target[part]
    else:
        target[part] = value
    return data


T = "text_config"
BAD: list[tuple[str, Any, str]] = [
    # one key by itself: type and range
    ("dtype", "float16", "bfloat16"),
    ("model_type", "deepseek_v4", "deepseek_v41"),
    ("image_token_id", 4096, "below vocab_size"),
    ("eos_token_id", -1, ">= 0"),
    (T, [], "an object"),
    ("vision_config", "no", "an object"),
    ("quantization_config", None, "an object"),
    ("quantization_config.weight_block_size", [128, 128], "[32, 32]"),
    ("quantization_config.scale_fmt", "float", "ue8m0"),
    ("quantization_config.expert_dtype", "fp8", "fp4"),
    (f"{T}.vocab_size", "4096", "an integer"),
    (f"{T}.vocab_size", True, "an integer"),
    (f"{T}.vocab_size", 4096.0, "an integer"),
    (f"{T}.num_key_value_heads", 2, "1"),
    (f"{T}.hidden_act", "gelu", "silu"),
    (f"{T}.attention_bias", True, "false"),
    (f"{T}.tie_word_embeddings", True, "false"),
    (f"{T}.norm_topk_prob", 1, "true or false"),
    (f"{T}.rms_norm_eps", 0, "> 0"),
    (f"{T}.rms_norm_eps", float("inf"), "a number"),
    (f"{T}.rope_scaling.rope_type", "linear", "yarn"),
    (f"{T}.rope_scaling.factor", 0.5, ">= 1"),
    (f"{T}.scoring_func", "sigmoid", "sqrtsoftplus"),
    (f"{T}.topk_method", "greedy", "noaux_tc"),
    (f"{T}.hc_shifted", False, "true"),
    (f"{T}.n_shared_experts", 2, "1"),
    (f"{T}.kv_source_layer_ids", [4, 2, 6], "rising"),
    (f"{T}.kv_source_layer_ids", 2, "a list"),
    (f"{T}.compress_ratios", [0, 0, 4, 4, 2, 2, 1, 1, 1, 1, 0, 0], "[0, 2]"),
    (f"{T}.engram_max_ngram_size", 1, ">= 2"),
    ("vision_config.max_image_tokens", 3, ">= 4"),
    ("vision_config.max_wh_ratio", 0, "> 0"),
    ("vision_config.num_attention_heads", 3, "divisor"),
    # divisibility
    (f"{T}.hidden_size", 320, "multiple of 128"),
    (f"{T}.q_lora_rank", 96, "multiple of 128"),
    (f"{T}.moe_intermediate_size", 96, "multiple of 128"),
    (f"{T}.head_dim", 136, "multiple of 32"),
    (f"{T}.index_head_dim", 72, "multiple of 32"),
    (f"{T}.o_lora_rank", 48, "multiple of 32"),
    (f"{T}.o_groups", 3, "multiple of 128"),
    (f"{T}.o_groups", 32, "divisor"),
    (f"{T}.qk_rope_head_dim", 63, "even"),
    (f"{T}.qk_rope_head_dim", 192, "at most"),
    (f"{T}.engram_head_dim", 48, "multiple of 32"),
    # counts that depend on each other
    (f"{T}.num_experts_per_tok", 17, "at most 16"),
    (f"{T}.dspark_num_experts_per_tok", 17, "at most 16"),
    (f"{T}.dspark_noise_token_id", 4096, "below vocab_size"),
    (f"{T}.dspark_target_layer_ids", [8, 9, 10], "below 10"),
    (f"{T}.dspark_target_layer_ids", [], "at least one"),
    (f"{T}.dspark_confidence_temperatures", [1.0] * 4, "5 entries"),
    (f"{T}.dspark_confidence_temperatures", [1, 1, 0, 1, 1], "> 0"),
    (f"{T}.dspark_confidence_temperatures", 1.0, "a list"),
    (f"{T}.engram_layer_ids", [1, 6], "split at layer 6"),
    (f"{T}.engram_num_embeddings", [6568, 7465], "[6568, 7464]"),
    (f"{T}.engram_pad_token_id", 4096, "below vocab_size"),
    (f"{T}.engram_compressed_vocab_size", 4097, "at most vocab_size"),
    # the schedule
    (f"{T}.compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1], "12 entries"),
    (f"{T}.compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 1], "DSpark"),
    (f"{T}.kv_source_layer_ids", [2, 4, 6, 12], "below num_hidden_layers"),
    (f"{T}.kv_source_layer_ids", [1, 2, 4, 6], "above 0"),
    (f"{T}.kv_source_layer_ids", [4, 6], "a source at or before layer 2"),
    (f"{T}.kv_source_layer_ids", [2, 4], "equal ratios"),
    (f"{T}.kv_source_layer_ids", [2, 3, 4, 6], "a subset"),
    (f"{T}.kv_source_layer_ids", [2, 4, 6, 8], "no layer after the first ratio-1 layer"),
    (f"{T}.index_source_layer_ids", [4, 6, 8], "a source at or before layer 2"),
    (f"{T}.index_k_source_layer_ids", [2, 6], "equal to kv_source_layer_ids"),
    (f"{T}.candidate_source_layer_id", 7, "an index source"),
    (f"{T}.candidate_source_layer_id", 4, "the ratio of its consumer 6"),
    (f"{T}.candidate_topk_blocks", 12, "multiple of 8"),
    (f"{T}.candidate_topk_blocks", 8, ">= index_topk"),
    (f"{T}.candidate_block_size", 4, "8 or 16"),
]


@pytest.mark.parametrize(("key", "value", "want"), BAD, ids=lambda v: str(v)[:40])
def test_a_bad_key_is_named_with_its_value_and_what_was_wanted(key: str, value: Any, want: str) -> None:
    with pytest.raises(BadConfigKey) as caught:
        ModelConfig.from_json(edit(key, value), "some/config.json")
    assert want in caught.value.want
    named = caught.value.key
    assert named.startswith(key.rsplit(".", 1)[0]), "the text names the key"
    assert "some/config.json" in str(caught.value)
    assert named in str(caught.value)
    if named == key:
        assert repr(caught.value.value) in str(caught.value)


def test_the_candidate_check_is_the_strict_one() -> None:
    """64 blocks of 8 hold 512 entries, but the newest block may hold one entry only."""
    for blocks, good in ((64, False), (72, True)):
        data = tiny_config("tiny_512", candidate_topk_blocks=blocks)
        if good:
            ModelConfig.from_json(data)
        else:
            with pytest.raises(BadConfigKey, match="candidate_topk_blocks"):
                ModelConfig.from_json(data)


OPTIONAL = {
    "attention_bias",
    "attention_dropout",
    "candidate_source_layer_id",
    "initializer_range",
    "model_type",
    "use_cache",
}


@pytest.mark.parametrize("part", ["", "text_config", "vision_config", "quantization_config", f"{T}.rope_scaling"])
def test_every_other_key_is_required(part: str) -> None:
    target = tiny_config()
    for step in filter(None, part.split(".")):
        target = target[step]
    for key in target:
        path = f"{part}.{key}".lstrip(".")
        required = key not in OPTIONAL | {"max_wh_ratio", "vision_config"} or path == "model_type"
        if required:
            with pytest.raises(MissingConfigKey) as caught:
                ModelConfig.from_json(edit(path, ...))
            assert caught.value.key == path
        else:
            ModelConfig.from_json(edit(path, ...))


@pytest.mark.parametrize(
    ("key", "hint"),
    [("text_config.hidden_sizes", "text_config.hidden_size"), ("vocab", ""), ("vision_config.patchsize", "patch_size")],
)
def test_an_unknown_key_names_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(BadConfigKey) as caught:
        ModelConfig.from_json(edit(key, 1))
    assert caught.value.key == key
    assert hint in str(caught.value)


def test_another_architecture_is_refused_first() -> None:
    with pytest.raises(UnsupportedArchitecture, match="LlamaForCausalLM"):
        ModelConfig.from_json({"architectures": ["LlamaForCausalLM"], "hidden_size": 7})
    for value in ([], "DeepseekV41ForCausalLM", None):
        with pytest.raises(BadConfigKey, match="architectures"):
            ModelConfig.from_json(edit("architectures", value))


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b"{", "config.json is not valid JSON"),
        (b"[1]", "an object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_file_that_is_not_json(tmp_path: Path, content: bytes, detail: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadConfigJSON, match=detail.replace("'", ".")):
        ModelConfig.from_json(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointFile, match=r"config\.json"):
        ModelConfig.from_json(tmp_path)


def test_model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.model_dir(tmp_path) == tmp_path
    assert registry.model_dir(str(tmp_path)) == tmp_path
    monkeypatch.setitem(registry.PACKAGED, "guppy", "testing/configs")
    assert (registry.model_dir("guppy") / "tiny.json").is_file()
    for name in ("gupy", "", str(tmp_path / "absent")):
        with pytest.raises(UnknownModel):
            registry.model_dir(name)
    with pytest.raises(UnknownModel, match="did you mean guppy"):
        registry.model_dir("gupy")


def test_family_of_an_unknown_architecture() -> None:
    with pytest.raises(UnsupportedArchitecture, match="DeepseekV41ForCausalLM"):
        registry.family("Other")


def test_configuration_needs_no_torch() -> None:
    code = (
        "import sys, benthic.models.registry, benthic.cli.inspect; "
        f"benthic.cli.inspect.inspect({str(config_path('v41_flash'))!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
