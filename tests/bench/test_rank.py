"""The rank bench: its floors, the skew of loads, the parts it tells apart, and a whole run of the small model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benthic.bench import rank
from benthic.bench.cases import LOGITS
from benthic.bench.operands import Operands, RandomSource, block_tables, decode_rows, routing, spread_loads
from benthic.bench.parts import Marks, Span, marked, time_parts
from benthic.bench.rank import EXCHANGE, REST, SKEW, Options, Rank, floors, rank_config, split_rows
from benthic.bench.timing import Ceilings, covered
from benthic.cli.main import main
from benthic.errors import BenchError
from benthic.kernels import backends, kv_copy
from benthic.models.deepseek_v41 import MoE
from benthic.models.deepseek_v41_config import ModelConfig, cache_spec, tensors

CPU = torch.device("cpu")
H200 = Ceilings(4.15e12, 4.26e12, bf16_flops=730e12, fp8_flops=1250e12, link_bytes=55e9, launch_seconds=1e-6)
SMALL = Options(
    rows=(4, 12),
    contexts=(512,),
    prefill=48,
    chunk=32,
    pool_bytes=8 << 30,
    tiny=True,
    device="cpu",
    numerics="production",
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with backends.reference():
        return rank.run(SMALL)


# ---- floors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "numerics", "ms"),
    [
        (64, "production", 10.4),
        (64, "fast", 10.4),
        (384, "production", 15.7),
        (384, "fast", 10.6),
        (1536, "fast", 37.0),
    ],
)
def test_floor_of_a_step(rows: int, numerics: str, ms: float) -> None:
    """Section 3 of the kernel specification, without q, outputs and index work, which it leaves out."""
    requests, per = split_rows(rows)
    found = floors(Options(numerics=numerics), H200, requests, per, 131072, hit=48.0)
    counted = sum(found[part] for part in ("attention inputs", "attention output", "experts"))
    assert 1e3 * counted == pytest.approx(ms, rel=0.16)
    assert set(found) >= {"streams", "attention", EXCHANGE, "index selection", "compressor, keys", "head", "draw"}


def test_floor_follows_experts_hit_and_context() -> None:
    options = Options()
    whole, half = (floors(options, H200, 64, 1, 4096, hit)["experts"] for hit in (48.0, 24.0))
    assert whole - half == pytest.approx(40 * 24 * 3 * 5120 * 2304 * (0.5 + 1 / 32) / 4.15e12)
    near, far = (floors(options, H200, 64, 1, context, 48.0)["index selection"] for context in (4096, 1 << 20))
    assert far > 20 * near


def test_prefill_floor_is_that_of_an_encoder_token() -> None:
    """15.8 GFLOP for a token that no decoder layer sees."""
    text = ModelConfig.from_json(rank_config(8, tiny=False)).text
    flops = rank.prefill_floor(text, "production", H200, text.split) * H200.bf16_flops
    assert flops == pytest.approx(15.8e9, rel=0.02)


def test_bytes_between_ranks() -> None:
    text = ModelConfig.from_json(rank_config(8, tiny=False)).text
    there, back = rank.exchanged_bytes(text, 8)
    reached = 8 * (1 - (7 / 8) ** 6)
    assert there == pytest.approx(reached * (5120 + 160))
    assert back == pytest.approx(reached * 10240)


@pytest.mark.parametrize(("rows", "split"), [(64, (64, 1)), (192, (32, 6)), (384, (64, 6)), (1536, (256, 6))])
def test_rows_of_requests(rows: int, split: tuple[int, int]) -> None:
    assert split_rows(rows) == split


# ---- operands --------------------------------------------------------------------------------------------------------


def test_loads_have_the_measured_skew() -> None:
    loads = spread_loads(SKEW, 48)
    assert loads.mean() == pytest.approx(1.0, abs=1e-6)
    assert loads.max() == pytest.approx(max(SKEW), rel=0.01)
    assert loads.min() == pytest.approx(min(SKEW), rel=0.01)
    ids = routing(Operands(CPU, 0), 4000, 6, loads)
    assert all(len(set(row)) == 6 for row in ids[:100].tolist())
    share = torch.bincount(ids.flatten(), minlength=48) / (4000 * 6 / 48)
    assert torch.corrcoef(torch.stack([share, loads]))[0, 1] > 0.97


def test_tables_and_rows() -> None:
    apart = block_tables(3, 4, pool_blocks=13, device=CPU)
    assert apart.shape == (4, 4)
    assert apart[0].eq(0).all()  # padding
    assert sorted(apart[1:].flatten().tolist()) == list(range(1, 13))
    shared = block_tables(3, 10, pool_blocks=13, device=CPU)
    assert 1 <= shared[1:].min() <= shared.max() <= 12
    assert all(len(set(column)) == 3 for column in shared[1:].t().tolist())  # never at one place at the same time
    rows = decode_rows(2, 3, 100, CPU)
    assert rows.slots.tolist() == [1, 1, 1, 2, 2, 2]
    assert rows.positions.tolist() == [100, 101, 102, 100, 101, 102]
    assert rows.firsts.tolist() == [100] * 6
    assert rows.starts.tolist() == [0, 0, 0, 3, 3, 3]


def test_random_source_answers_to_every_name() -> None:
    config = ModelConfig.from_json(rank_config(8, tiny=True))
    source = RandomSource(config, Operands(CPU, 0))
    for name, spec in tensors(config).items():
        if name.startswith("mtp."):
            continue
        tensor = source.tensor(name)
        assert tuple(tensor.shape) == spec.shape, name
        if tensor.is_floating_point():
            assert tensor.float().isfinite().all(), name


def test_caches_hold_numbers() -> None:
    config = ModelConfig.from_json(rank_config(8, tiny=True))
    storage = Operands(CPU, 0).storage(cache_spec(config, drafter=False), 5, 3, rollback=2)
    for part in storage.layout.parts:
        paged = kv_copy.Paged(
            storage.pool, part.data_offset, part.scale_offset, part.entries, part.channels, part.format
        )
        values = kv_copy.read_records(paged, torch.arange(5 * part.entries))
        assert values.isfinite().all()
        assert 0.05 < values.square().mean() < 50, part
    for layer, ring in storage.rings.items():
        where = storage.slot_layout.rings[layer]
        values = kv_copy.read_ring_reference(
            kv_copy.Ring(ring, where.channels, where.format), torch.tensor([0, 2]), torch.tensor([0, 5])
        )
        assert 0.05 < values.square().mean() < 50


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_own_time_of_parts_inside_parts() -> None:
    marks = Marks(CPU)
    marks.spans = [
        Span("a", 0, 0.0, 10.0),
        Span("b", 1, 1.0, 4.0),
        Span("c", 2, 2.0, 3.0),
        Span("b", 1, 5.0, 6.0),
        Span("d", 0, 11.0, 12.0),
    ]
    assert marks.seconds() == {"a": 6.0, "b": 3.0, "c": 1.0, "d": 1.0}


def test_marks_are_taken_away_again() -> None:
    class Thing:
        def outer(self) -> int:
            return self.inner() + 1

        def inner(self) -> int:
            return 1

        def fail(self) -> float:
            return 1 / 0

    plain = Thing.outer
    parts = {(Thing, "outer"): "out", (Thing, "inner"): "in"}
    with marked(parts, Marks(CPU)):
        assert Thing.outer is not plain
    assert Thing.outer is plain
    failing = {(Thing, "fail"): "fail"}
    with pytest.raises(ZeroDivisionError), marked(failing, Marks(CPU)):
        Thing().fail()
    assert Thing.fail.__name__ == "fail"
    thing = Thing()
    seconds = time_parts(lambda: thing.outer(), parts, CPU)
    assert set(seconds) == {"out", "in"}
    assert all(took > 0 for took in seconds.values())


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_whole_run(found: dict[str, Any]) -> None:
    assert {"commit", "command", "seed", "hardware", "versions", "ceilings", "model"} <= set(found)
    assert "skew_error" not in found
    assert [(step["rows"], step["requests"]) for step in found["steps"]] == [(4, 4), (12, 2)]
    for step in found["steps"]:
        assert "error" not in step, step
        assert sum(step["floors_ms"].values()) == pytest.approx(step["floor_ms"])
        assert set(step["floors_ms"]) == set(step["parts_ms"]) - {REST}
        assert 0 < step["experts_hit"] <= 16
    drafted = found["steps"][1]
    assert drafted["tokens_per_second_a_user"] == pytest.approx(3.5e3 / drafted["step_ms"])
    assert drafted["tokens_per_second"] == pytest.approx(2 * 3.5e3 / drafted["step_ms"])
    prefill = found["prefill"]
    assert prefill["encoder"]["floor_seconds"] < prefill["all layers"]["floor_seconds"]
    assert prefill.keys() >= set(rank.PREFILLS)
    assert all(0 < prefill[way]["launch_seconds"] <= prefill[way]["seconds"] for way in rank.PREFILLS)
    assert [prefill[way]["tokens"] for way in rank.PREFILLS] == [48, 48, 48, SMALL.chunk, SMALL.chunk]
    assert prefill[rank.SHORT_CHUNKS]["chunk"] == SMALL.chunk // 8
    assert json.loads(json.dumps(found)) is not None


def test_run_leaves_no_marks(found: dict[str, Any]) -> None:
    assert MoE.forward.__qualname__ == "MoE.forward"


def test_routers_follow_the_skew() -> None:
    """At the rows that the biases were set with, each layer's loads are those wanted, up to whole rows."""
    with backends.reference(), torch.inference_mode():
        some = Rank(SMALL, CPU)
        batch = some.decode_batch(2, 6, 512)
        with some.exchange.installed():
            some.exchange.shape, some.exchange.counts = True, []
            some.step(batch)()
    counts = torch.stack(some.exchange.counts)
    wanted = spread_loads(SKEW, 16) * 12 * 4 / 16
    assert counts.sum(dim=1).tolist() == [48.0] * len(some.model.plan)
    assert (counts - wanted).abs().mean() < 1.0
    assert (counts - wanted).abs().max() < 4.0


def test_logits_are_peaked() -> None:
    """As spread out as those of the case that the draw's bar is for."""
    with backends.reference(), torch.inference_mode():
        some = Rank(SMALL, CPU)
        batch = some.decode_batch(4, 1, 512)
        logits = some.model.logits(some.model.forward(batch, some.model.memory(some.storage, batch)).hidden)
    assert float(logits.std()) == pytest.approx(LOGITS["peaked"], rel=0.1)


def test_every_step_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled ahead is what the steps of all rows and contexts and all ways of a prompt would launch."""
    warm = pytest.importorskip("benthic.kernels.triton.warm")
    built: list[Any] = []
    monkeypatch.setattr(warm, "build", lambda jobs: built.append(list(jobs)) or [])
    with backends.reference(), torch.inference_mode():
        some = Rank(SMALL, CPU)
        seen: list[int] = []
        plain = some.model.forward
        monkeypatch.setattr(some.model, "forward", lambda b, m: seen.append(b.ids.shape[0]) or plain(b, m))
        found = rank.compile_kernels(some, lambda text: None)
    assert built == [[]], "the references launch nothing"
    assert found["kernels"] == 0
    assert seen == [4] * len(SMALL.contexts) + [12] * len(SMALL.contexts) + [SMALL.chunk] * 2 + [SMALL.chunk // 8] * 2


def test_the_encoder_stores_what_the_decoder_looks_up() -> None:
    """Layers below the split alone leave the same bytes in the pool as the whole model."""
    with backends.reference(), torch.inference_mode():
        some = Rank(SMALL, CPU)
        batch = some.prefill_batch(0, 32)
        some.model.forward(batch, some.model.memory(some.storage, batch))
        whole = some.storage.pool.clone()
        some.storage.pool.zero_()
        for carry in some.storage.carry.values():
            carry.zero_()
        some.encode(batch)
    block = some.storage.tables[1, 0]
    for part in some.storage.layout.parts:
        size = 32 // part.ratio * part.data_stride
        here = slice(part.data_offset, part.data_offset + size)
        assert torch.equal(some.storage.pool[block, here], whole[block, here]), part


def test_failed_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no such kernel")

    monkeypatch.setattr(rank, "decode", broken)
    with backends.reference():
        found = rank.run(Options(**{**_fields(SMALL), "prefill": 0}))
    assert [step["error"] for step in found["steps"]] == ["ValueError: no such kernel"] * 2
    assert "failed: ValueError: no such kernel" in rank.table(found)
    assert found["measures"] == []


def _fields(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in Options.__slots__}


def test_table_and_picture(found: dict[str, Any], tmp_path: Path) -> None:
    text = rank.table(found)
    assert "step, 12 rows at 512" in text
    assert "12 rows at 512, ms measured/floor: " in text
    pytest.importorskip("matplotlib")
    path = rank.picture(found, tmp_path / "step.png")
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert rank.picture({**found, "steps": []}, tmp_path / "none.png") is None


def test_command(
    found: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    seen: list[Options] = []

    def run(options: Options, say: Any) -> dict[str, Any]:
        seen.append(options)
        return found

    monkeypatch.setattr(rank, "run", run)
    words = [
        "bench",
        "rank",
        "--tiny",
        "--device",
        "cpu",
        "--rows",
        "4,12",
        "--contexts",
        "512,1K,1M",
        "--prefill",
        "2K",
    ]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert seen[0].contexts == (512, 1024, 1 << 20)
    assert seen[0].rows == (4, 12)
    assert seen[0].prefill == 2048
    assert "step, 4 rows" in capsys.readouterr().out
    assert list(tmp_path.glob("*/rank-tiny-production.json"))
    assert main([*words, "--no-save", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "rank"
    with pytest.raises(SystemExit):
        main(["bench", "rank", "--contexts", "4Q"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(BenchError, match="--tiny --device cpu"):
        rank.run(Options())


def test_time_that_kernels_cover() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == pytest.approx(4)


def test_targets() -> None:
    step = {"rows": 384, "context": 4096, "step_ms": 20.0, "floor_ms": 16.0, "rows_a_request": 6, "requests": 64}
    step |= {"tokens_per_second": 5600.0, "tokens_per_second_a_user": 87.5}
    prefill = {"encoder": {"tokens": 32768, "tokens_per_second": 21000.0, "floor_seconds": 1.0}}
    found = rank.measures([step], prefill, targets=True)
    assert [(m["value"], m.get("target")) for m in found] == [
        (20.0, 24.0),
        (5600.0, 5000.0),
        (87.5, 80.0),
        (21000.0, 20000.0),
    ]
    assert all(m.get("target") is None for m in rank.measures([step], prefill, targets=False))
