"""`benthic inspect MODEL`: what a checkpoint is, worked out from its config.json and checked against its files.

MODEL is a packaged name, a checkpoint folder, a folder with a config.json alone, or a config.json. Nothing is stored:
names, bytes and parameters come from the configuration, and with weights present every tensor is held against them.
With --fit the memory plan of a GPU layout is printed instead; it exits 1 when the model does not fit.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from benthic import plan
from benthic.cache.spec import block_layout, slot_layout
from benthic.models.deepseek_v41_config import (
    LayerPlan,
    ModelConfig,
    cache_spec,
    draft_plan,
    kv_bytes_per_token,
    layer_plan,
    tensors,
)
from benthic.models.registry import model_dir


class Count(TypedDict):
    tensors: int
    parameters: int
    bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="packaged name, checkpoint folder, or path of a config.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--fit", metavar="GPU:N", help="print what each of N cards would hold, such as H200:8, and nothing else"
    )
    parser.add_argument("--running", type=int, default=256, help="with --fit: requests at a time on each GPU")
    parser.add_argument(
        "--tables", choices=("host", "device"), default="host", help="with --fit: where n-gram tables lie"
    )


def run(args: argparse.Namespace) -> int:
    if args.fit is not None:
        gpu, count = plan.parse_gpus(args.fit)
        path = Path(args.model)
        config = ModelConfig.from_json(path if path.is_file() else model_dir(args.model))
        fitted = plan.fit(config, gpu, count, running=args.running, tables_on_host=args.tables == "host")
        print(json.dumps(plan.as_json(fitted), indent=2) if args.json else plan.render(fitted))
        return 0 if fitted.free_bytes >= 0 else 1
    report = inspect(args.model)
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def inspect(model: str | Path) -> dict[str, Any]:
    """The report as plain data. Raises UnknownModel, or the CheckpointError that says what is wrong."""
    path = Path(model)
    if path.is_file():
        config, weights = ModelConfig.from_json(path), None
    else:
        path = model_dir(model)
        config = ModelConfig.from_json(path)
        weights = _check_weights(path)
    t = config.text
    spec = cache_spec(config)
    block, slot = block_layout(spec.append), slot_layout(spec)
    return {
        "model": str(path),
        "architecture": config.architectures[0],
        "weights": weights or "absent",
        "layers": [_layer(p) for p in layer_plan(config)],
        "draft_layers": [p.index for p in draft_plan(config)],
        "split": t.split,
        "candidates": None
        if t.candidate_source is None
        else {"source": t.candidate_source, "blocks": t.candidate_topk_blocks, "block_size": t.candidate_block_size},
        "vision": config.vision is not None,
        "cache": {
            "kv_bytes_per_token": kv_bytes_per_token(config),
            "block_tokens": block.tokens,
            "block_bytes": block.block_bytes,
            "slot_bytes": slot.slot_bytes,
            "context_tokens": t.max_position_embeddings,
        },
        **_counts(config),
    }


def _check_weights(folder: Path) -> str | None:
    """Open the weights of a folder; None if it has none."""
    from benthic.models import weights  # needs torch, a config alone does not

    if not any(folder.glob("*.safetensors")) and not (folder / weights.INDEX).exists():
        return None
    weights.Checkpoint.open(folder)
    return "complete"


def _layer(p: LayerPlan) -> dict[str, Any]:
    return {
        "index": p.index,
        "kind": p.kind,
        "ratio": p.ratio,
        "window": p.window,
        "kv_from": p.kv_from,
        "keys_from": p.keys_from,
        "topk_from": p.topk_from,
        "candidates_from": p.candidates_from,
        "makes_candidates": p.makes_candidates,
        "engram": p.engram,
        "decoder": p.decoder,
    }


def _counts(config: ModelConfig) -> dict[str, Any]:
    """Totals, by section (backbone, engram, ...) and by group (backbone.attention, ...)."""
    sections: dict[str, Count] = {}
    groups: dict[str, Count] = {}
    total = Count(tensors=0, parameters=0, bytes=0)
    for spec in tensors(config).values():
        section = spec.group.partition(".")[0]
        for count in (
            sections.setdefault(section, Count(tensors=0, parameters=0, bytes=0)),
            groups.setdefault(spec.group, Count(tensors=0, parameters=0, bytes=0)),
            total,
        ):
            count["tensors"] += 1
            count["parameters"] += spec.parameters
            count["bytes"] += spec.nbytes
    return {"total": total, "sections": sections, "groups": groups}


# Text


def render(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    cache, total = report["cache"], report["total"]
    lines = [
        f"model         {report['model']}",
        f"architecture  {report['architecture']}",
        f"weights       {_WEIGHTS[report['weights']]}",
        f"tensors       {total['tensors']:,}".replace(",", " "),
        f"parameters    {_amount(total['parameters'])}",
        f"bytes         {total['bytes']:,}".replace(",", " "),
        f"KV cache      {cache['kv_bytes_per_token']} bytes a token; "
        f"{cache['block_bytes']} bytes a block of {cache['block_tokens']} tokens; "
        f"{cache['slot_bytes']} bytes of state a running request",
        f"context       {cache['context_tokens']} tokens",
        f"split         encoder layers below {report['split']}, decoder layers from {report['split']} on",
        "",
        "layers        kind     ratio  KV of  keys of  top-k of  remarks",
    ]
    lines += [_row(*run) for run in _runs(report["layers"])]
    if report["draft_layers"]:
        draft = {"index": report["draft_layers"][0], "kind": "draft", "ratio": 0}
        draft |= {"kv_from": None, "keys_from": None, "topk_from": None}
        lines.append(_row(draft, report["draft_layers"][-1], "DSpark stages, window only"))
    lines += ["", f"{'group':<28}{'tensors':>9}{'parameters':>14}{'bytes':>18}"]
    for section, count in report["sections"].items():
        lines.append(_count_row(section, count))
        parts = {name: c for name, c in report["groups"].items() if name.startswith(f"{section}.")}
        lines += [_count_row(f"  {name.partition('.')[2]}", c) for name, c in parts.items()]
    lines.append(_count_row("total", total))
    return "\n".join(lines)


_WEIGHTS = {"complete": "complete, every tensor accounted for", "absent": "absent, figures from config.json alone"}


def _runs(layers: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], int, str]]:
    """Neighbouring layers that do the same, as (first, last index, remarks)."""
    out: list[tuple[dict[str, Any], int, str]] = []
    split_seen = False
    for layer in layers:
        remarks = _remarks(layer, first_decoder=layer["decoder"] and not split_seen)
        split_seen = split_seen or layer["decoder"]
        same = ("kind", "ratio", "kv_from", "topk_from")
        if out and not remarks and not out[-1][2] and all(layer[key] == out[-1][0][key] for key in same):
            out[-1] = (out[-1][0], layer["index"], "")
        else:
            out.append((layer, layer["index"], remarks))
    return out


def _remarks(layer: dict[str, Any], *, first_decoder: bool) -> str:
    parts: list[str] = []
    if layer["engram"] is not None:
        parts.append(f"Engram table {layer['engram']}")
    if first_decoder:
        parts.append("first decoder layer")
    if layer["makes_candidates"]:
        parts.append("candidate source")
    if layer["candidates_from"] is not None:
        parts.append(f"selects among candidates of {layer['candidates_from']}")
    return ", ".join(parts)


def _row(layer: dict[str, Any], last: int, remarks: str) -> str:
    def show(value: int | None) -> str:
        return "-" if value is None else str(value)

    span = _span(layer["index"], last)
    text = f"{span:<13} {layer['kind']:<8} {layer['ratio']:>5}  {show(layer['kv_from']):>5}  "
    return (text + f"{show(layer['keys_from']):>7}  {show(layer['topk_from']):>8}  {remarks}").rstrip()


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _count_row(name: str, count: Count) -> str:
    size = f"{count['bytes']:,}".replace(",", " ")
    return f"{name:<28}{count['tensors']:>9}{_amount(count['parameters']):>14}{size:>18}"


def _amount(parameters: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3f} {name}"
    return str(parameters)
