"""Receipts: an answer is produced again bit for bit, and what differs is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benthic.cli.main import main
from benthic.engine import receipt
from benthic.engine.llm import LLM
from benthic.engine.receipt import Receipt
from benthic.errors import BadReceipt
from benthic.kernels.native import build
from benthic.testing.checkpoints import make_tiny
from benthic.types import SamplingParams

pytestmark = pytest.mark.skipif(not build.status().available, reason="plain torch promises no bits")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("receipt") / "tiny", sliding_window=8)


def engine(tiny: Path, **settings: object) -> LLM:
    return LLM(tiny, **{"deterministic": True, "cpu__threads": 1, "scheduler__max_running": 64, **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(tiny: Path) -> list[Receipt]:
    """Of 64 answers in one batch, the prompts of various lengths and beginnings."""
    prompts = [[*range(10, 10 + 2 * (i % 7)), *range(500 + i, 520 + i)] for i in range(64)]
    params = [
        SamplingParams(
            temperature=1.0 if i % 2 else 0.0,
            max_tokens=5,
            seed=i,
            receipt=True,
            presence_penalty=0.5 if i % 5 == 0 else 0.0,
            logit_bias=((7, 1.5),) if i % 3 == 0 else (),
        )
        for i in range(64)
    ]
    with engine(tiny) as llm:
        found = [done.receipt for done in llm.generate(prompts, params, progress=False)]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def test_an_answer_from_a_batch_of_64_is_produced_again_alone(tiny: Path, made: list[Receipt], tmp_path: Path):
    with engine(tiny, scheduler__max_running=3, scheduler__token_budget=16, cache__prefix=False) as llm:
        for i in (0, 13, 30, 63):
            again = llm.replay(made[i])
            found = receipt.differences(made[i], again)
            assert receipt.same_answer(found)
            assert [what for what, _, _ in found] == ["cache"]
    assert len({each.digest for each in made}) == 64
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(made[30].to_json()))
    assert receipt.read(file) == made[30]
    assert main(["replay", str(file), "--model", str(tiny), "--cpu.threads", "1"]) == 0


def test_from_a_cached_prefix_and_from_nothing_the_bits_are_the_same(tiny: Path):
    ids = list(range(100, 500))
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=3, receipt=True)
    for mode in ("snapshot", "exact"):
        with engine(tiny, cache__mode=mode) as llm:
            cold = llm.generate([ids], params, progress=False)[0]
            warm = llm.generate([ids], params, progress=False)[0]
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 384)
        assert cold.receipt == warm.receipt


def test_what_differs_is_named(tiny: Path, made: list[Receipt], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wrong = replace(made[1], tokens=(*made[1].tokens[:-1], made[1].tokens[-1] ^ 1), digest="0" * 64)
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(wrong.to_json()))
    assert main(["replay", str(file), "--model", str(tiny), "--json", "--cpu.threads", "1"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert not shown["same"]
    assert [entry["what"] for entry in shown["differences"]] == ["token 4", "digest of the logits"]
    with engine(tiny) as llm, pytest.raises(BadReceipt, match="of checkpoint ffff"):
        llm.replay(replace(made[1], made_by=replace(made[1].made_by, model="f" * 64)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[1]", "no object"),
        ('{"receipt": 2}', "no object with receipt: 1"),
        ('{"receipt": 1}', "KeyError: 'params'"),
        ('{"receipt": 1, "params": {"temprature": 1}}', "temprature"),
    ],
)
def test_what_is_no_receipt_is_refused(tmp_path: Path, text: str, says: str):
    file = tmp_path / "receipt.json"
    file.write_text(text)
    with pytest.raises(BadReceipt, match=says):
        receipt.read(file)
    with pytest.raises(BadReceipt):
        receipt.read(tmp_path / "none.json")
