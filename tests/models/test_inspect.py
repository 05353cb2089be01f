"""`benthic inspect`: the printed plan and figures, from a configuration alone and from a whole checkpoint."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benthic.cli import inspect
from benthic.errors import BadConfigKey, MissingShard, TruncatedFile, UnknownModel
from benthic.models import registry
from benthic.testing.checkpoints import config_path, make_tiny

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASE = config_path("v41_flash")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    assert inspect.run(parser.parse_args(words)) == 0
    return capsys.readouterr().out


def test_the_release_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(call(capsys, str(RELEASE), "--json"))
    assert report["total"] == {"tensors": 96_085, "parameters": 763_205_315_794, "bytes": 510_286_023_000}
    assert report["cache"]["kv_bytes_per_token"] == 890
    assert report["cache"]["block_bytes"] == 113_920
    assert report["weights"] == "absent"
    assert report["split"] == 20
    assert report["candidates"] == {"source": 20, "blocks": 2048, "block_size": 8}
    assert report["draft_layers"] == [40, 41, 42]
    assert report["layers"] == json.loads((GOLDEN / "layer_plan.json").read_text())["v41_flash"]
    for table in (report["sections"], report["groups"]):
        for key in ("tensors", "parameters", "bytes"):
            assert sum(count[key] for count in table.values()) == report["total"][key]
    experts = report["groups"]["backbone.experts"]
    assert experts["tensors"] == 40 * 384 * 6
    assert experts["parameters"] == 40 * 384 * 3 * 2304 * 5120
    assert experts["bytes"] == experts["parameters"] * 17 // 32


PLAN = """\
layers        kind     ratio  KV of  keys of  top-k of  remarks
0             window       0      -        -         -
1             window       0      -        -         -  Engram table 0
2             full         2      2        2         2
3-7           reuse        2      2        -         2
8             full         2      8        8         8
9-13          reuse        2      8        -         8
14            full         2     14       14        14  Engram table 1
15-19         reuse        2     14        -        14
20            full         1     20       20        20  first decoder layer, candidate source
21-23         reuse        1     20        -        20
24            reindex      1     20       20        24  selects among candidates of 20
25-27         reuse        1     20        -        24
28            reindex      1     20       20        28  selects among candidates of 20
29-31         reuse        1     20        -        28
32            reindex      1     20       20        32  selects among candidates of 20
33-35         reuse        1     20        -        32
36            reindex      1     20       20        36  selects among candidates of 20
37-39         reuse        1     20        -        36
40-42         draft        0      -        -         -  DSpark stages, window only
"""


def test_the_release_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = call(capsys, str(RELEASE))
    assert PLAN in text
    for part in ("96 085", "763.205 B", "510 286 023 000", "890 bytes a token", "absent", "layers from 20 on"):
        assert part in text


def test_a_folder_with_a_config_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_path("tiny").read_text())
    report = json.loads(call(capsys, str(tmp_path), "--json"))
    assert report["weights"] == "absent"
    assert report["total"]["tensors"] == 1586


def test_a_whole_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", shard_bytes=8 << 20)
    report: dict[str, Any] = json.loads(call(capsys, str(folder), "--json"))
    assert report["weights"] == "complete"
    stored = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert 0 < stored - report["total"]["bytes"] < 0.02 * stored, "the files hold the counted bytes and their headers"
    assert "every tensor accounted for" in call(capsys, str(folder))
    shard = sorted(folder.glob("*.safetensors"))[0]
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1])
    with pytest.raises(TruncatedFile):
        call(capsys, str(folder))
    shard.unlink()
    with pytest.raises(MissingShard):
        call(capsys, str(folder))
    for rest in folder.glob("*.safetensors"):
        rest.unlink()
    with pytest.raises(MissingShard):  # an index without shards is a failed download, not a config alone
        call(capsys, str(folder))


def test_without_vision_drafter_and_candidates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = json.loads(config_path("tiny").read_text())
    del data["vision_config"]
    text = data["text_config"]
    text.update(
        num_nextn_predict_layers=0, candidate_source_layer_id=None, engram_layer_ids=[], engram_num_embeddings=[]
    )
    text["compress_ratios"] = text["compress_ratios"][:10]
    (tmp_path / "config.json").write_text(json.dumps(data))
    report = json.loads(call(capsys, str(tmp_path), "--json"))
    assert set(report["sections"]) == {"backbone"}
    assert report["candidates"] is None
    assert report["vision"] is False
    shown = call(capsys, str(tmp_path))
    assert "0-1 " in shown
    assert "DSpark" not in shown
    assert "candidate" not in shown


def test_a_packaged_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_path("tiny").read_text())
    monkeypatch.setitem(registry.PACKAGED, "guppy", str(tmp_path))
    assert json.loads(call(capsys, "guppy", "--json"))["total"]["tensors"] == 1586


def test_bad_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(UnknownModel):
        call(capsys, "no-such-model")
    data = json.loads(config_path("tiny").read_text())
    data["text_config"]["head_dim"] = 100
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(BadConfigKey, match="head_dim"):
        call(capsys, str(tmp_path))
