"""`bench/numerics.py`: schemes by their definitions, the guard, products noted in a model, profiles compared."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import benthic
from benthic.bench import compare, numerics
from benthic.cli import bench, main
from benthic.config import Config
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.kernels import backends, gemm, moe_experts, quant
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.skills.text import CHARACTERS_PER_TOKEN
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS

CPU = torch.device("cpu")
IDS = (0, 5, 300, 17, 2000, 44, 9, 812, 3, 77, 1500, 6)


def uneven(rows: int, groups: int, binades: int) -> Tensor:
    x = torch.randn(rows, groups, 32) * torch.exp2(-torch.randint(0, binades + 1, (rows, groups, 1)).float())
    return quant.roundtrip_fp8(x.flatten(1).bfloat16())


# ---- schemes ---------------------------------------------------------------------------------------------------------


def test_requantised_blocks_by_definition() -> None:
    x = torch.randn(3, 256) * 5
    got = numerics.blocks_requantised(x, 128)
    for row in range(3):
        for start in (0, 128):
            part = x[row, start : start + 128]
            scale = float(part.abs().max()) / 448
            want = torch.tensor([v / scale for v in part.tolist()]).to(quant.E4M3).float() * scale
            torch.testing.assert_close(got[row, start : start + 128], want, rtol=1e-6, atol=0)
    assert torch.equal(numerics.blocks_requantised(torch.zeros(1, 128), 0), torch.zeros(1, 128))


@pytest.mark.parametrize("binades", [0, 5, 12, 20])
def test_what_a_carried_row_loses_is_bounded(binades: int) -> None:
    """The module's first paragraph: 2^-10 s, s at most a 224th of the largest value; nothing above 2^-6 s."""
    x = uneven(40, 16, binades).float()
    top = x.abs().amax(-1, keepdim=True)
    off = (numerics.blocks_carried(x, 0) - x).abs()
    assert bool((off <= 2.0**-10 / 224 * top).all())
    assert bool((off[x.abs() >= 2.0**-6 / 224 * top] == 0).all())
    assert bool(off.any()) == (binades >= 5)


def test_carried_blocks_are_carried_alone() -> None:
    x = uneven(4, 16, 18)
    want = torch.cat([quant.roundtrip_carry(part) for part in x.split(128, dim=1)], dim=1)
    assert torch.equal(numerics.blocks_carried(x, 128), want.float())


@pytest.mark.parametrize("binades", [0, 7, 14, 18])
def test_two_carried_rows_hold_a_token(binades: int) -> None:
    x = uneven(40, 16, binades).float()
    assert torch.equal(numerics.in_two(x), x)


# ---- the guard -------------------------------------------------------------------------------------------------------


def test_distance() -> None:
    rows = [
        [1.0] * 32 + [2.0**-7] * 32 + [0.0] * 32,  # zeros do not count
        [1.9] + [0.0] * 31 + [1.0] * 64,
        [0.0] * 96,
        [0.0] * 64 + [3.0] * 32,
    ]
    assert numerics.distance(torch.tensor(rows)).tolist() == [7, 0, 0, 0]


def test_guarded_tokens_keep_their_values() -> None:
    x = uneven(64, 8, 16).float()
    far = numerics.distance(x) > 12
    got = numerics.guarded(x, 12)
    assert 0 < int(far.sum()) < 64
    assert torch.equal(got[far], x[far])
    assert torch.equal(got[~far], numerics.blocks_carried(x[~far], 0))
    assert not torch.equal(numerics.blocks_carried(x, 0)[far], x[far])


def test_spread_counts_tokens() -> None:
    far = [0, 7, 9, 9, 13, 30]
    x = torch.stack([torch.tensor([1.0] * 32 + [2.0**-d] * 32) for d in far])
    spread = numerics.Spread.of(x)
    assert spread.tokens == 6
    assert spread.farthest == 30
    assert spread.above == {guard: pytest.approx(sum(d > guard for d in far) / len(far)) for guard in numerics.GUARDS}
    assert spread.lost == pytest.approx(math.sqrt(32) * 2.0**-30 / math.sqrt(32 + 32 * 2.0**-60))
    json.dumps(spread.json())


# ---- errors of products ----------------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    """One token, one weight row, values that carry exactly but for the last group, which is flushed."""
    x = torch.tensor([[1.0] * 32 + [2.0**-20] * 96])
    weight = torch.tensor([[0.0] * 32 + [1.0] * 96])
    found = numerics.errors([numerics.Product("one", x, x, weight)])
    assert found["schemes"]["exact"] == {"error": 0.0, "rounded": 0.0, "worst": 0.0}
    assert found["schemes"]["carried"]["error"] == 1.0
    assert found["guards"]["14"]["error"] == 0.0
    assert found["in two"]["error"] == 0.0
    assert found["spread"]["farthest"] == 20


def test_synthetic_products_say_what_the_module_says() -> None:
    """The exact scheme is exact, carrying costs next to nothing but where outliers are muted, and the guard helps."""
    products = {p.name: p for p in numerics.synthetic(CPU, 0, 16, 32, 1024)}
    assert len(products) == 18
    found = {name: numerics.errors([product]) for name, product in products.items()}
    for name, values in found.items():
        assert values["schemes"]["exact"]["error"] == 0, name
        assert values["in two"]["error"] < 1e-9, name
        carried = values["schemes"]["carried"]["error"]
        if "muted" not in name:
            assert carried < 3e-4, name
            assert carried < values["schemes"]["per 128"]["error"] / 50, name
    worst = found["outlier channels x 30000, muted"]
    assert worst["schemes"]["carried"]["error"] > 0.01
    assert worst["guards"]["10"]["error"] < 1e-3
    kernels = numerics.kernel_errors(list(products.values()))
    for name, values in kernels.items():
        assert values["carried"] == pytest.approx(found[name]["schemes"]["carried"]["rounded"], rel=0.02), name
        assert values.get("exact", 2e-3) < 2.5e-3, name


def test_a_narrow_sum_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = numerics.sum_errors(CPU, 0, 8, 64, 1024)
    assert {way for ways in found.values() for way in ways} == {"bf16 operands", "FP8 operands"}
    assert all(error < 1e-6 for ways in found.values() for error in ways.values())
    plain = gemm.linear

    def narrow(x: Tensor, weight: quant.Matrix, out_dtype: torch.dtype) -> Tensor:
        """Each 32 products more, the sum is cut to 14 bits."""
        sums = torch.zeros(x.shape[0], weight.shape[0])
        for part, columns in zip(x.split(32, 1), quant.values(weight).split(32, 1), strict=True):
            mantissa, exponent = torch.frexp(sums + plain(part, columns, out_dtype))
            sums = torch.ldexp((mantissa * 2**14).trunc() / 2**14, exponent)
        return sums

    monkeypatch.setattr(gemm, "linear", narrow)
    found = numerics.sum_errors(CPU, 0, 8, 64, 1024)
    assert all(error > 1e-4 for ways in found.values() for error in ways.values())


# ---- in a model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(Path(benthic.__file__).parent / "minnow")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> DeepseekV41:
    return from_checkpoint(checkpoint, NUMERICS["production"])


def test_every_quantised_product_is_noted(model: DeepseekV41) -> None:
    before = (gemm.linear, gemm.grouped_linear, quant.roundtrip_fp8, moe_experts.experts)
    seen: list[numerics.Product] = []
    plain = numerics.forward(model, IDS)
    with numerics.watched(model, seen):
        watched = numerics.forward(model, IDS)
    assert (gemm.linear, gemm.grouped_linear, quant.roundtrip_fp8, moe_experts.experts) == before
    assert torch.equal(watched.logits, plain.logits)
    layers = len(model.layers)
    count: dict[str, int] = {}
    for product in seen:
        count[product.name] = count.get(product.name, 0) + 1
        assert torch.equal(quant.roundtrip_fp8(product.raw.float()), product.x.float()), product.name
        assert product.x.shape[1] == product.weight.shape[1], product.name
    once = {"attn.wo_b", "ffn.shared_w13", "ffn.shared_w2", "attn.wq_b"}
    assert {name for name in count if count[name] == layers} >= once
    assert count["attn.wo_a"] == layers * model.config.text.o_groups
    assert count["experts.w13"] == count["experts.w2"]
    rows = sum(len(product.x) for product in seen if product.name == "experts.w2")
    assert rows == layers * len(IDS) * model.config.text.num_experts_per_tok
    stored = {name for name, module in model.named_modules() if getattr(module, "store", None) == "fp8"}
    assert {name.split(".", 2)[2] for name in stored} | {"experts.w13", "experts.w2"} == set(count)


def test_ranges_are_those_of_the_worst_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model fits under one scale. With weights that cancel channels far above the rest it does not."""
    folder = make_tiny(tmp_path / "tiny")
    monkeypatch.setattr(compare, "probe", lambda model: [[5, 900, 33, 7, 12]])
    assert main.main(["doctor", str(folder), "--ranges"]) == 0
    told = capsys.readouterr().out
    assert "One scale holds them." in told
    assert "experts.w2" in told
    assert "FAILED" not in told
    real = numerics.watched

    @contextmanager
    def worse(model: DeepseekV41, seen: list[numerics.Product]) -> Iterator[None]:
        with real(model, seen):
            yield
        hard = {product.name: product for product in numerics.synthetic(CPU, 0, 16, 64, 2048)}
        seen += [hard["outlier channels x 300, muted"], hard["outlier channels x 30000, muted"]]

    monkeypatch.setattr(numerics, "watched", worse)
    assert main.main(["doctor", str(folder), "--ranges", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    failed = [line for line in found["lines"] if line["bound"] is not None and line["error"] > line["bound"]]
    assert [line["name"] for line in failed] == ["outlier channels x 30000, muted"]
    assert failed[0]["cases"] == 16
    assert not found["passed"]
    groups = {line["name"]: line["error"] for line in found["lines"] if line["bound"] is None}
    assert groups["outlier channels x 30000, muted: groups"] >= 15


def test_layers_fed_with_equal_streams(model: DeepseekV41) -> None:
    run = numerics.forward(model, IDS)
    again = numerics.forward(model, IDS, run.entries)
    assert torch.equal(again.logits, run.logits)
    assert numerics.layer_errors(again, run) == [0.0] * len(model.layers)
    other = run.entries[-1]._replace(s=torch.zeros_like(run.entries[-1].s))
    fed = numerics.forward(model, IDS, [*run.entries[:-1], other])
    assert [torch.equal(a, b) for a, b in zip(fed.exits, run.exits, strict=True)] == [True] * 9 + [False]
    device = numerics.forward(model, IDS, run.entries, on_device=True)  # other kernels: a value may take the next code
    assert all(error < 0.1 for error in numerics.layer_errors(device, run))
    bent = run._replace(exits=[run.exits[0], run.exits[1] + 1, *run.exits[2:]])
    found = numerics.layer_errors(bent, run)
    assert [error > 0 for error in found[:3]] == [False, True, False]


def test_logits_compared_by_hand() -> None:
    logits = numerics.Logits()
    want = torch.tensor([[0.0, math.log(3.0)], [2.0, 0.0]])
    got = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    logits.add(got, want)
    found = logits.json()
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # of (1/4, 3/4) from (1/2, 1/2)
    assert found["kl max"] == pytest.approx(kl)
    assert found["kl"] == pytest.approx(kl / 2)
    assert found["same first token"] == 0.5
    assert found["largest difference"] == pytest.approx(math.log(3.0))


def test_plain_torch_runs_on_weights_that_were_loaded_for_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend may keep weights in a form that only its own ops read."""
    loaded: dict[int, bool] = {}

    def plainly() -> bool:
        return backends._forced.get() == "reference"

    def load(*arguments: Any) -> DeepseekV41:
        model = from_checkpoint(*arguments)
        loaded[id(model)] = plainly()
        return model

    def run(model: DeepseekV41, *arguments: Any) -> numerics.Run:
        assert loaded[id(model)] == plainly()
        return numerics.Run(torch.zeros(1, 2), [], [])

    monkeypatch.setattr(numerics, "from_checkpoint", load)
    monkeypatch.setattr(numerics, "forward", run)
    found = numerics.compare(checkpoint, [[0, 5]], ("fast",), CPU)
    assert set(found) == {"reference : fast", "reference : plain torch", "fast : plain torch"}
    assert sorted(loaded.values()) == [False, False, True, True]


# ---- the report ------------------------------------------------------------------------------------------------------


def test_answers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("minnow", cpu__threads=1) as llm:
        replies = iter([" 4821 ", "4822"])

        class Done:
            def __init__(self) -> None:
                self.text = next(replies)

        seen: list[list[list[int]]] = []

        def generate(rows: list[list[int]], *rest: object, **options: object) -> list[Done]:
            seen.append(rows)
            return [Done() for _ in rows]

        monkeypatch.setattr(llm, "generate", generate)
        assert numerics.answers(llm, [("one", "4821"), ("two", "4821")]) == 0.5
        assert len(seen[0]) == 2
        monkeypatch.setattr(llm, "tokenizer", None)
        with pytest.raises(BenchError, match=r"tokenizer\.json"):
            numerics.answers(llm, [("one", "1")])


@pytest.mark.slow
def test_the_whole_report(tmp_path: Path) -> None:
    data = tmp_path / "text.jsonl"
    data.write_text(json.dumps({"kind": "story", "prompt": "A fox.", "response": "The fox ran home."}) + "\n")
    options = numerics.Options(data=data, documents=1, tokens=24, profiles=("fast",), needles=(("Code 1?", "1"),))
    said: list[str] = []
    found = numerics.run(Config(model="minnow"), options, said.append)
    json.dumps(found)
    assert set(found["profiles"]) == {"reference : fast", "reference : plain torch", "fast : plain torch"}
    assert {m["name"] for m in found["measures"]} >= {"fast: bits per byte", "fast: needles", "reference : fast: KL"}
    assert "attn.wq_b" in numerics.text(found)
    assert said


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    response = "The fox ran home in the rain. Its den was warm and dry. No."
    path.write_text(json.dumps({"kind": "story", "prompt": "A fox.", "response": response}) + "\n")
    return path


def test_the_command_without_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "numerics", "--json", "--seed", "3", "--out", str(tmp_path)]
    assert main.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    (saved,) = tmp_path.rglob("numerics.json")
    assert json.loads(saved.read_text()) == found
    assert found["seed"] == 3
    assert len(found["synthetic"]) == len(found["kernels"]) == 18
    assert set(found["sums"]) == {"centred", "positive"}
    assert found["users"] == {}


def test_the_command_hides_codes_in_the_text(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[tuple[Config, numerics.Options]] = []

    def run(settings: Config, options: numerics.Options, say: object) -> dict[str, object]:
        taken.append((settings, options))
        return {"kernels": {}, "sums": {}, "measures": [], "hardware": {"gpu": "Some GPU"}}

    monkeypatch.setattr(numerics, "run", run)
    words = ["bench", "numerics", "--data", str(text), "--documents", "7", "--tokens", "48", "--profiles", "fast"]
    assert main.main([*words, "--needles", "2", "--device", "auto", "--out", str(tmp_path / "results")]) == 0
    assert "error against exact MXFP8" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "results" / "some-gpu").iterdir()] == ["numerics-minnow.json"]
    ((settings, options),) = taken
    assert (settings.model, settings.device) == ("minnow", "auto")
    assert (options.data, options.documents, options.tokens, options.profiles) == (text, 7, 48, ("fast",))
    assert len(options.needles) == 2 * len(bench.NEEDLE_TOKENS)
    for length, (prompt, answer) in zip(np.repeat(bench.NEEDLE_TOKENS, 2), options.needles, strict=True):
        assert abs(length * CHARACTERS_PER_TOKEN - len(prompt)) < 150
        assert answer in prompt
        assert answer.endswith("7")


def test_the_command_says_what_is_wrong(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", "numerics", "--profiles", "fast,quick"])
    assert "not of production, fast, float: 'fast,quick'" in capsys.readouterr().err
    text.write_text(json.dumps({"kind": "story", "prompt": "A fox.", "response": "No."}) + "\n")
    assert main.main(["bench", "numerics", "--data", str(text), "--no-save"]) == 1
    assert "no sentence of 20 to 200 characters" in capsys.readouterr().err
