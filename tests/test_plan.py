"""The memory plan against arithmetic from the release's shapes, and the laws any plan obeys."""

import json

import pytest

from benthic import plan
from benthic.cli.main import main
from benthic.config import GpuConfig
from benthic.errors import BadField
from benthic.models.deepseek_v41_config import ModelConfig, tensors
from benthic.testing.checkpoints import config_path, tiny_config

RELEASE = config_path("v41_flash")
EXPERT = (4608 * 5120 + 5120 * 2304) * 17 // 32  # FP4 and a scale byte per 32: 17/32 bytes a weight


@pytest.fixture(scope="module")
def release() -> ModelConfig:
    return ModelConfig.from_json(RELEASE)


def parts(fitted: plan.Fit) -> dict[str, int]:
    return {part.name: part.bytes for part in fitted.parts}


def test_eight_cards(release: ModelConfig) -> None:
    fitted = plan.fit(release, plan.GPUS["H200"], 8)
    assert parts(fitted)["routed experts"] == 40 * 48 * EXPERT
    assert fitted.host_bytes == (384006168 + 384016682) * 264
    assert fitted.block_bytes == 128 * 890
    weights = sum(spec.nbytes for spec in tensors(release).values())
    held = parts(fitted)
    whole = held["dense weights"] + held["vision"] + 8 * held["routed experts"] + fitted.host_bytes
    assert whole + held["drafter"] + 7 * 3 * 16 * EXPERT == weights, "every tensor is somewhere, once"
    assert fitted.used_bytes + fitted.blocks * fitted.block_bytes <= fitted.gpu.memory_bytes
    assert fitted.tokens > 90_000_000
    graphs = plan.GRAPH_BYTES + plan.activation_bytes(release, GpuConfig().graph_rows, 256)
    assert (held["graphs"], held["activations"]) == (graphs, plan.activation_bytes(release, 8192, 256))


def test_laws(release: ModelConfig) -> None:
    few, many = (plan.fit(release, plan.GPUS["H200"], count) for count in (4, 8))
    assert many.tokens > few.tokens, "more cards, fewer experts on each"
    assert plan.fit(release, plan.GPUS["H100"], 8).tokens < many.tokens
    assert plan.fit(release, plan.GPUS["H200"], 8, running=512).tokens < many.tokens
    on_device = plan.fit(release, plan.GPUS["H200"], 8, tables_on_host=False)
    assert (on_device.host_bytes, many.host_bytes) == (0, parts(on_device)["n-gram tables"] * 8)
    assert plan.fit(release, plan.GPUS["H200"], 8, drafter=False).tokens > many.tokens


def test_image_rows(release: ModelConfig) -> None:
    fitted, more = (plan.fit(release, plan.GPUS["H200"], 8, image_tokens=n) for n in (131072, 262144))
    assert parts(fitted) == parts(plan.fit(release, plan.GPUS["H200"], 8)), "the engine's own default"
    assert parts(fitted)["image rows"] == 131072 * 5120 * 2
    assert fitted.free_bytes - more.free_bytes == 131072 * 5120 * 2
    text = ModelConfig.from_json(tiny_config(vision_config=None))
    assert "image rows" not in parts(plan.fit(text, plan.GPUS["H200"]))


def test_what_does_not_fit(release: ModelConfig, capsys: pytest.CaptureFixture[str]) -> None:
    fitted = plan.fit(release, plan.GPUS["H200"], 1)
    assert fitted.free_bytes < 0
    assert fitted.tokens == 0
    assert main(["inspect", str(RELEASE), "--fit", "H200"]) == 1
    assert "does not fit: 155" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "said"), [("B9:8", "H20-141"), ("H200:0", "H200:8"), ("H200:x", "H200:8")])
def test_unknown_cards(text: str, said: str) -> None:
    with pytest.raises(BadField, match=said):
        plan.parse_gpus(text)


def test_experts_must_divide(release: ModelConfig) -> None:
    with pytest.raises(BadField, match="n_routed_experts, 384"):
        plan.fit(release, plan.GPUS["H200"], 7)


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(RELEASE), "--fit", "h200:8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"]
    assert report["used_bytes"] == sum(report["parts"].values())
    assert main(["inspect", str(RELEASE), "--fit", "H200:8"]) == 0
    text = capsys.readouterr().out
    assert "36 097 228 800" in text
    assert "1/8 of 384 a layer" in text
