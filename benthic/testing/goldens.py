"""Goldens of a checkpoint: what its answers are, in two small files beside its weights.

`goldens.json` says of which weights they are and holds small numbers; `goldens.safetensors` holds digests, the rows
that layers are fed with, and sketches of what they compute. Everything is made on a CPU by the plain torch references,
so that no kernel takes part in what kernels are measured by.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

import benthic
from benthic.cache.spec import BLOCK_TOKENS, blocks_for
from benthic.cache.storage import Storage
from benthic.config import Config, SchedulerConfig
from benthic.engine import batch as batches
from benthic.engine.llm import LLM
from benthic.errors import BadGoldens, BenthicError
from benthic.kernels import backends, hyper, moe_experts, quant
from benthic.models import deepseek_v41_dspark
from benthic.models.deepseek_v41 import DeepseekV41, Layer, MoE
from benthic.models.deepseek_v41_config import read_json
from benthic.models.modules import Linear, PackedTable
from benthic.models.weights import Checkpoint, read_tensors, write_tensors
from benthic.testing import answers, layers
from benthic.testing.layers import CHOICES, Rows, Values

JSON, TENSORS = "goldens.json", "goldens.safetensors"
FORMAT = 1
PROFILES = ("reference", "production", "float")
SEED = 20260101
TOKENS = 32  # of each greedy text
DRAFT_FROM = 24  # tokens before the first draft
LEAST_ACCEPTED = 0.2  # of first drafts: below it the drafter counts as untrained
DIGEST_BYTES = 8
EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)  # positions between which perplexity is told


# ---- sketches --------------------------------------------------------------------------------------------------------


def sketch(values: Tensor) -> Tensor:
    """[R, n] -> [R, 3] f32: two projections on fixed signs, as large as the row is, and its norm."""
    n = values.shape[1]
    bits = torch.from_numpy((layers.random_words(n, 2 * n) >> np.uint64(63)).astype("float64")).view(n, 2)
    wide = values.double()
    return torch.cat([wide @ (2 * bits - 1), wide.norm(dim=1, keepdim=True)], dim=1).float()


def apart(want: Tensor, got: Tensor) -> Tensor:
    """Sketches [R, 3] -> [R] about the norm of the rows' difference, over that of the wanted row; inf: not a number."""
    want, got = want.double(), got.double()
    size = want[:, 2].clamp(min=1e-30)
    difference = (got - want) / size[:, None]
    moved = difference[:, :2].square().mean(1).sqrt()
    return torch.maximum(moved, difference[:, 2].abs()).nan_to_num(nan=torch.inf)


def bitmask(chosen: Tensor, count: int) -> Tensor:
    """[R, K] numbers below `count`, -1 padded -> [R, ceil(count / 8)] uint8."""
    mask = torch.zeros(chosen.shape[0], -(-count // 8) * 8 + 1, dtype=torch.uint8)
    at = torch.where((chosen < 0) | (chosen >= count), mask.shape[1] - 1, chosen).long()
    mask.scatter_(1, at, 1)
    weights = 2 ** torch.arange(8, dtype=torch.int32)
    return (mask[:, :-1].unflatten(1, (-1, 8)).int() * weights).sum(2).to(torch.uint8)


def bits(mask: Tensor) -> Tensor:
    """[R, n] uint8 -> bool [R, 8 n]."""
    return ((mask[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).bool().flatten(1)


# ---- digests ---------------------------------------------------------------------------------------------------------


def digest(value: Tensor) -> bytes:
    """Of dtype, shape and values. Floats that bfloat16 holds exactly count as bfloat16, whatever they are kept in."""
    value = value.detach().cpu().contiguous()
    if value.dtype == torch.float32 and torch.equal(value.bfloat16().float(), value):
        value = value.bfloat16()
    head = hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode())
    if value.numel():
        head.update(cast("Any", value.flatten().view(torch.uint8).numpy()).data)
    return head.digest()[:DIGEST_BYTES]


class Loaded(NamedTuple):
    """One tensor of a model as it will be read."""

    name: str
    value: Tensor | None  # None: in a form of its device that cannot be read back
    carried: bool = False  # rows were rounded onto one scale each


def loaded(model: nn.Module) -> Iterator[Loaded]:
    """Every weight and table of a model or layer, by its own names, read back from the form it has on its device."""
    for name, module in model.named_modules():
        for part, value in module.named_parameters(name, recurse=False):
            if not (isinstance(module, MoE) and part.endswith((".w13", ".w2"))):
                yield Loaded(part, value)
        for part, value in module.named_buffers(name, recurse=False):
            if not part.endswith("freqs"):  # a table of float32 functions: compared by value
                yield Loaded(part, value)
        if isinstance(module, Linear) and module.packed is not None:
            yield Loaded(f"{name}.weight", quant.values(module.packed), isinstance(module.packed, quant.RowMatrix))
        elif isinstance(module, PackedTable):
            yield Loaded(f"{name}.codes", module.codes.view(torch.uint8))
            yield Loaded(f"{name}.scales", module.scales)
        elif isinstance(module, MoE):
            for expert in range(module.w13.shape[0]):
                both = moe_experts.unprepare(module.w13, module.w2, expert)
                carried = getattr(module.w13, "carried", False)
                for part, value in zip(("w13", "w2"), both or (None, None), strict=True):
                    yield Loaded(f"{name}.{part}, expert {expert}", value, carried)


def frequencies(model: DeepseekV41) -> Tensor:
    """[layers, dr/2] f32 rotation of each layer."""
    return torch.stack([layer.attn.freqs.float().cpu() for layer in model.layers])


def digests(values: Iterator[tuple[str, bytes]]) -> Tensor:
    """[n, 8] uint8, in the order of the names."""
    found = sorted(values)
    return torch.tensor([list(value) for _, value in found], dtype=torch.uint8).reshape(len(found), DIGEST_BYTES)


def names_digest(found: Sequence[tuple[str, bytes]]) -> str:
    """Of the names alone: a later version may hold the same weights in other modules."""
    return hashlib.sha256("\n".join(sorted(name for name, _ in found)).encode()).hexdigest()[:16]


# ---- the files -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Goldens:
    """Both files, read."""

    about: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def digest(self) -> str:
        return self.about["tensors"]

    def profile(self, numerics: str) -> Mapping[str, Any] | None:
        return self.about["profiles"].get(numerics)

    def rows(self) -> list[Rows]:
        """Of each layer, and of the final streams."""
        count = sum(1 for name in self.tensors if name.startswith("rows.") and name.endswith(".codes"))
        return [Rows(*(self.tensors[f"rows.{i}.{part}"] for part in ("codes", "scales", "pre"))) for i in range(count)]


def read(folder: Path) -> Goldens | None:
    """The goldens of a checkpoint folder; None: it has none. Raises BadGoldens."""
    path = folder / JSON
    if not os.path.lexists(path) and not os.path.lexists(folder / TENSORS):  # a link that leads nowhere is damage
        return None
    try:
        about = read_json(path)
        if about.get("format") != FORMAT:
            raise BadGoldens(path, f"their format is {about.get('format')!r}, want {FORMAT}")
        raw = (folder / TENSORS).read_bytes()
        if hashlib.sha256(raw).hexdigest() != about["tensors"]:
            raise BadGoldens(folder / TENSORS, f"its bytes are not those that {JSON} was written with")
        return Goldens(about, read_tensors(folder / TENSORS))
    except BadGoldens:
        raise
    except (BenthicError, OSError, KeyError, TypeError) as error:
        raise BadGoldens(path, str(error)) from None


def write(folder: Path, about: dict[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Both files, the second one last and by renaming. Returns their bytes."""
    partial = [folder / f".{name}.{os.getpid()}.partial" for name in (TENSORS, JSON)]
    try:
        write_tensors(partial[0], tensors)
        about = about | {"tensors": hashlib.sha256(partial[0].read_bytes()).hexdigest()}
        partial[1].write_text(json.dumps(about, separators=(",", ":")) + "\n", encoding="utf-8")
        for path, name in zip(partial, (TENSORS, JSON), strict=True):
            path.rename(folder / name)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    return sum((folder / name).stat().st_size for name in (TENSORS, JSON))


# ---- making them -----------------------------------------------------------------------------------------------------


def make(
    config: Config,
    profiles: Sequence[str] = PROFILES,
    progress: Callable[[str], None] = lambda _: None,
    *,
    documents: Callable[[LLM], list[answers.Document]],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Goldens of a checkpoint in these profiles, on this CPU, by the references alone.

    documents  what is scored by depth.
    progress  is told what begins.
    Cost      about 20 ms a token of reference forward: some minutes for minnow.
    """
    checkpoint = Checkpoint.open(config.model)
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {
        "format": FORMAT,
        "checkpoint": checkpoint.digest(),
        "tokenizer": tokenizer_digest(checkpoint),
        "seed": SEED,
        "made": {"benthic": benthic.__version__, "torch": str(torch.__version__)},
        "profiles": {},
    }
    progress("bytes")
    tensors["digests.file"] = digests((name, digest(value)) for name, value in checkpoint.items())
    rows: list[Rows] = []
    fixed: dict[str, Any] = {}
    for numerics in profiles:
        own = config_for(config, numerics)
        with LLM(config=own) as llm:
            if not fixed:
                progress("prompts")
                fixed = {
                    "prompts": answers.prompts(llm, SEED),
                    "documents": [document._asdict() for document in documents(llm)],
                }
                about |= fixed
            with backends.reference():
                assert isinstance(llm.model, DeepseekV41)
                if not rows:
                    progress("rows")
                    rows = stored_rows(llm.model, fixed["prompts"][0])
                    for i, row in enumerate(rows):
                        tensors |= {f"rows.{i}.{part}": value for part, value in row._asdict().items()}
                    tensors["frequencies"] = frequencies(llm.model)
                    found = [(item.name, digest(item.value)) for item in loaded(llm.model) if item.value is not None]
                    tensors["digests.loaded"] = digests(iter(found))
                    about["loaded"] = names_digest(found)
                progress(f"{numerics}: layers")
                tensors |= layer_sketches(llm.model, rows, numerics)
                progress(f"{numerics}: text")
                about["profiles"][numerics], own_tensors = _profile(llm, checkpoint, fixed, numerics, progress)
                tensors |= own_tensors
    return about, tensors


def config_for(config: Config, numerics: str) -> Config:
    """The same checkpoint on a CPU, with room for the longest document."""
    return replace(config, numerics=numerics, device="cpu", scheduler=SchedulerConfig(token_budget=256, max_running=8))


def tokenizer_digest(checkpoint: Checkpoint) -> str | None:
    path = checkpoint.tokenizer_path
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def stored_rows(model: DeepseekV41, ids: Sequence[int]) -> list[Rows]:
    """Streams at the entry of each layer and at the end, at some tokens of a text, and one that drives the experts."""
    found: list[tuple[Tensor, Tensor]] = []

    def keep(streams: hyper.Streams) -> None:
        found.append((hyper.settle(streams).float(), streams.pre))

    probe = layers.plans([list(ids)], len(ids), 0)
    undo: list[Callable[[], Any]] = []
    for layer in model.layers:
        recall = layer.recall

        def told(streams: hyper.Streams, *rest: Any, _recall: Any = recall) -> hyper.Streams:
            keep(streams)
            return _recall(streams, *rest)

        vars(layer)["recall"] = told
        undo.append(lambda layer=layer: vars(layer).pop("recall"))
    handle = model.layers[len(model.plan) - 1].register_forward_hook(lambda _, __, out: keep(out[0]))
    try:
        with torch.inference_mode():
            storage = Storage(model.cache_spec, len(probe[0].chunks[0].blocks) + 1, 2)
            batch = batches.build(probe[0], storage)
            model.forward(batch, model.memory(storage, batch))
    finally:
        handle.remove()
        for each in undo:
            each()
    at = torch.linspace(1, len(ids) - 1, layers.KEPT_ROWS).long()
    rows: list[Rows] = []
    for i, (streams, pre) in enumerate(found):
        layer = cast("Layer", model.layers[min(i, len(model.plan) - 1)])
        driven = layers.driving(layer, pre)
        rows.append(Rows.of(torch.cat([streams[at], driven[None]]), torch.cat([pre[at], pre[at[:1]]])))
    return rows


def layer_sketches(model: DeepseekV41, rows: Sequence[Rows], numerics: str) -> dict[str, Tensor]:
    """What every layer makes of the fixed probe: `profile.layer.site` -> sketches of sampled rows, or bit masks."""
    probe = layers.probe(model.config, SEED)
    with torch.inference_mode():
        values = layers.run(model, probe, rows, SEED)
    return {f"{numerics}.{i}.{site}": kept for (i, site), kept in sampled(values, probe).items()}


def sampled(values: Values, probe: layers.Probe) -> dict[tuple[int, str], Tensor]:
    """Of each site the rows that are kept, as they are stored."""
    found: dict[tuple[int, str], Tensor] = {}
    for (index, site), value in values.items():
        rows = value if site in layers.APART else value[_rows_of(value, probe)]
        if site in CHOICES:
            found[index, site] = bitmask(rows, _highest(probe))
        else:
            found[index, site] = sketch(rows)
    return found


def _rows_of(value: Tensor, probe: layers.Probe) -> Tensor:
    """Sampled rows; latents have fewer, evenly taken."""
    if len(value) == probe.rows:
        return probe.sampled
    return torch.linspace(0, len(value) - 1, min(len(value), len(probe.sampled))).long()


def _highest(probe: layers.Probe) -> int:
    """Above every number that a choice can hold: records of the pool at one entry a token."""
    return BLOCK_TOKENS * (1 + sum(blocks_for(len(ids)) for ids in probe.prompts))


JITTER = {True: 2.0**-22, False: 2.0**-8}  # by whether activations are float32: a unit in the last place


def _profile(
    llm: LLM, checkpoint: Checkpoint, fixed: Mapping[str, Any], numerics: str, progress: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    model = llm.model
    assert isinstance(model, DeepseekV41)
    prompts, size = fixed["prompts"], JITTER[model.numerics.wide]
    texts = answers.greedy(llm, prompts, TOKENS)
    rows = [[*ids, *text.ids] for ids, text in zip(prompts, texts, strict=True)]
    firsts = [max(len(ids), 1) for ids in prompts]
    scores = joined(answers.score(llm, rows, firsts, answers.TOP))
    kl, leads = [], []
    for seed in (1, 2):
        with answers.jitter(model, size, seed):
            moved = joined(answers.score(llm, rows, firsts, answers.SEEN))
        kl.append(float(answers.divergence(scores, moved).mean()))
        leads.append(float(answers.lead(scores, moved).max()))
    tensors = {
        f"{numerics}.text.ids": torch.tensor([text.ids for text in texts], dtype=torch.int32),
        f"{numerics}.text.gaps": torch.tensor([text.gaps for text in texts]),
        f"{numerics}.scores.nats": scores.nats.float(),
        f"{numerics}.scores.ids": scores.ids.int(),
        f"{numerics}.scores.logprobs": scores.logprobs.float(),
    }
    found: dict[str, Any] = {
        "noise": {"kl": max(kl), "lead": max(leads)},
        "draws": answers.draws(llm.loop.runner.sampler, SEED),  # type: ignore[attr-defined]
        "documents": [],
    }
    for number, document in enumerate(fixed["documents"]):
        progress(f"{numerics}: document of {len(document['ids'])} tokens")
        found["documents"].append(_document(llm, document, size, number))
    if checkpoint.config.text.num_nextn_predict_layers:
        progress(f"{numerics}: drafts")
        drafter = deepseek_v41_dspark.from_checkpoint(checkpoint, model.numerics)
        made = answers.draft(model, drafter, rows, [min(DRAFT_FROM, len(row) // 2) for row in rows])
        with answers.jitter(model, size, 3):
            moved = answers.draft(model, drafter, rows, [min(DRAFT_FROM, len(row) // 2) for row in rows])
        tensors[f"{numerics}.drafts.tokens"] = made.tokens.int()
        tensors[f"{numerics}.drafts.taps"] = tap_sketches(model, made.taps)
        found["drafts"] = {
            "accepted": float(made.accepted.double().mean()),
            "first": float((made.accepted > 0).double().mean()),
            "noise": {
                "accepted": abs(float(made.accepted.double().mean() - moved.accepted.double().mean())),
                "tokens": float((made.tokens != moved.tokens).double().mean()),
                "taps": float(apart(tap_sketches(model, made.taps), tap_sketches(model, moved.taps)).median()),
            },
        }
    return found, tensors


def tap_sketches(model: DeepseekV41, taps: Tensor) -> Tensor:
    """[N, t * D] -> [N * t, 3]."""
    return sketch(taps.reshape(-1, model.config.text.hidden_size))


def joined(scores: Sequence[answers.Scores]) -> answers.Scores:
    return answers.Scores(*(torch.cat(parts) for parts in zip(*scores, strict=True)))


def _document(llm: LLM, document: Mapping[str, Any], size: float, seed: int) -> dict[str, Any]:
    """Mean nats by depth and of the answer, with the noise of each."""
    assert isinstance(llm.model, DeepseekV41)
    (nats,) = (s.nats for s in answers.score(llm, [document["ids"]], [1], 1))
    found: dict[str, Any] = {part: {"nats": float(nats[at].mean()), "noise": 0.0} for part, at in parts(document)}
    for run in (10, 40):
        with answers.jitter(llm.model, size, run + seed):
            (moved,) = (s.nats for s in answers.score(llm, [document["ids"]], [1], 1))
        for part, at in parts(document):
            found[part]["noise"] = max(found[part]["noise"], _noise((moved - nats)[at]))
    return found


def parts(document: Mapping[str, Any]) -> Iterator[tuple[str, slice]]:
    """Stretches of a document's scored tokens: by depth, then its answer. Token i is entry i - 1."""
    count = len(document["ids"])
    for low, high in zip(EDGES, (*EDGES[1:], math.inf), strict=True):
        if low + 16 < count:
            end = int(min(high, count))
            yield f"{low} to {end - 1}", slice(max(low - 1, 0), end - 1)
    first, last = document["answer"]
    if last > first:
        yield "answer", slice(first - 1, last - 1)


def _noise(difference: Tensor) -> float:
    """Of a mean over these, generously."""
    return float(difference.mean().abs() + difference.std(correction=0) / math.sqrt(max(len(difference), 1)))
