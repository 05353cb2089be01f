"""The gate: are answers computed here the model's? What fails is named, and nothing is served.

Levels, each resting on those before it; the first one that fails ends the run:

    bytes   what was loaded, read back from the form it has on the device, and the files it came from
    ops     each op as the installed backend serves it, beside its plain reference, on inputs it has in the model
    layers  each layer on streams that follow from stored rows: what passes between its parts, beside goldens
    text    greedy tokens, probabilities along them, and draws from fixed logits, through the engine
    depth   perplexity by depth and needles, as deep as the context goes
    state   in chunks, in a batch, in a slot used before, preempted, behind a cached prefix: equal to alone and whole
    drafts  what the drafter sees, what it proposes, and how much of that is accepted

Goldens lie beside the weights (`testing/goldens.py`). Without them the first levels use references made here, on some
layers of a large model; levels that need goldens are skipped, and say so.
"""

import hashlib
import json
import math
import os
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, cast

import torch
from torch import Tensor

import benthic
from benthic.cache.manager import CacheManager
from benthic.cache.storage import Storage
from benthic.config import Config, user_cache_dir
from benthic.engine.llm import LLM, build_loop, device_of
from benthic.engine.loop import Loop
from benthic.engine.runner import Runner
from benthic.engine.sampler import Sampler
from benthic.engine.scheduler import Scheduler
from benthic.errors import BadGoldens, GateFailed
from benthic.host import source_digest
from benthic.kernels import backends, hyper, quant
from benthic.kernels.native import build as native
from benthic.models import deepseek_v41_dspark
from benthic.models.deepseek_v41 import DeepseekV41, Layer
from benthic.models.modules import packed_weights
from benthic.models.registry import model_dir
from benthic.models.weights import Checkpoint
from benthic.skills.base import SKILLS, Material
from benthic.testing import answers, goldens, layers, ops
from benthic.testing.goldens import SEED, Goldens
from benthic.testing.ops import Line
from benthic.testing.tolerances import SUMS, regridded
from benthic.types import NUMERICS, CacheOptions, Request, SamplingParams, TokenEvent

Depth = Literal["quick", "full"]
DEPTHS: tuple[Depth, ...] = ("quick", "full")

ROW_MEDIAN = 2.0**-8  # most median relative difference of rows after a part of a layer: a unit of bfloat16
ROW_TAIL, TAIL = 0.05, 0.125  # and most of all but this share of them: choices at near ties, codes at their edges
ROW_FP8 = regridded(
    SUMS, 3
)  # the median where a matrix unit adds up FP8 products; three times that of most, twice TIES
ROW_ROUNDED = 2.0**-11  # the median where nothing but one or two roundings lie between: a few turn, no more
TURNED = 0.05  # share of an op's bfloat16 results that may round the other way
ROW_FLOAT = 1e-5  # the same in float32, without quantisers
MIXES = 2e-5  # most relative difference of mixing weights: float32, order of one sum
TIES = 0.05  # share of chosen entries that may be others, one row with another
FREQUENCY = 1e-6  # most relative difference of a rotation's frequency
KL_FLOOR = 1e-6  # nats
MARGIN = 5.0  # end to end: how many times the noise that goldens were made with
NATS, NATS_FLOAT = 0.01, 1e-4  # a token, beyond that: where a model is sure, its noise is next to nothing
ANSWERED = 0.1  # nats a token: below it a needle counts as found
LOST = 0.5  # most of fresh needles that are not found, at lengths at which stored ones were
LARGE_BYTES = 4 << 30  # a checkpoint from which on the gate looks at some layers instead of all
LENGTHS = (400, 1500, 3000)  # of documents, tokens, about
QUICK_TOKENS = 2048  # longest document of the quick gate


# ---- what comes of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """One level."""

    level: str
    lines: tuple[Line, ...]
    seconds: float
    skipped: str = ""  # why, where it could not be done

    @property
    def passed(self) -> bool:
        return all(line.passed for line in self.lines)

    @property
    def deviates(self) -> Line | None:
        """The first line beyond its bound, in the order of the computation."""
        return next((line for line in self.lines if not line.passed), None)

    @property
    def closest(self) -> Line | None:
        """The first line that fails, else the one with the least room left."""
        bounded = [line for line in self.lines if line.bound is not None]
        return self.deviates or min(bounded, key=lambda line: line.margin, default=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of one combination of weights, machine and settings."""

    model: str
    depth: Depth
    key: Mapping[str, Any]  # the combination
    seed: int  # of fresh inputs
    outcomes: tuple[Outcome, ...]
    remembered: bool = False  # passed earlier; nothing was run now

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    def require(self) -> "Verdict":
        """Itself. Raises GateFailed naming the first op or layer that deviates."""
        for outcome in self.outcomes:
            if (line := outcome.deviates) is not None:
                detail = f"{line.error:.3g} {line.unit}, at most {line.bound:.3g}"
                raise GateFailed(self.model, outcome.level, line.name, detail)
        return self


class Skipped(Exception):
    """Why a level cannot be done here; never leaves this file."""


# ---- what is looked at -----------------------------------------------------------------------------------------------


class Subject:
    """An engine that is to serve, and what is known of its checkpoint."""

    def __init__(self, llm: LLM, depth: Depth, progress: Callable[[str], None], seed: int):
        self.llm, self.depth, self.progress, self.seed = llm, depth, progress, seed
        self.full = depth == "full"
        self.checkpoint = Checkpoint.open(llm.path)
        self.numerics = NUMERICS[llm.config.numerics]
        self.goldens: Goldens | None = goldens.read(llm.path)
        assert isinstance(llm.model, DeepseekV41), f"the gate knows no way into a {type(llm.model).__name__}"
        self.model = llm.model
        self.device = llm.device
        self.on_device = llm.device.type == "cuda"  # the form of steps
        self.fp8 = self.on_device and self.numerics.one_scale  # a matrix unit adds up FP8 products
        self.large = sum(stored.nbytes for stored in self.checkpoint.stored.values()) > LARGE_BYTES

    @property
    def profile(self) -> Mapping[str, Any]:
        """Goldens of the served profile. Raises Skipped."""
        if self.goldens is None:
            raise Skipped("the checkpoint has no goldens; `benthic verify --make-goldens` makes them")
        found = self.goldens.profile(self.numerics.name)
        if found is None:
            raise Skipped(f"the goldens have no profile {self.numerics.name}")
        return found

    def golden(self, name: str) -> Tensor:
        assert self.goldens is not None, "asked for after `profile`"
        return self.goldens.tensors[f"{self.numerics.name}.{name}"]

    @cached_property
    def rows(self) -> list[layers.Rows]:
        """What layers are fed with: of the goldens, or of no model in particular."""
        if self.goldens is not None:
            return self.goldens.rows()
        return layers.plain_rows(self.checkpoint.config.text)

    @cached_property
    def watched(self) -> list[int] | None:
        """Layers that are looked at; None: all. Of a large model one of each kind, the last, and what they read."""
        if not self.large or self.full:
            return None
        kinds = {(plan.kind, plan.ratio, plan.engram is not None): plan.index for plan in reversed(self.model.plan)}
        return layers.closure(self.model.plan, [*kinds.values(), self.model.plan[-1].index])

    def reference_layer(self, index: int) -> Layer:
        """A layer of its own, on the CPU, from the files: packed where the model is large."""
        config = self.checkpoint.config
        text = config.text
        with torch.device("cpu"), packed_weights(self.large), backends.reference():
            layer = Layer(
                config, self.model.plan[index], text.n_routed_experts, text.num_experts_per_tok, self.numerics
            )
            layer.load(self.checkpoint, f"layers.{index}")
        return layer.eval()


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_level(s: Subject) -> Iterator[Line]:
    """What was loaded is what the checkpoint says, value by value, whatever form it has on the device."""
    if s.goldens is not None:
        yield from _files(s, s.goldens)
    s.progress("bytes: loaded")
    found = [(item.name, goldens.digest(item.value)) for item in goldens.loaded(s.model) if item.value is not None]
    known = s.goldens is not None and s.goldens.about["loaded"] == goldens.names_digest(found)
    if s.goldens is not None and known and not s.numerics.one_scale:
        yield _same_digests("loaded", found, s.goldens.tensors["digests.loaded"])
    else:
        yield from _loaded_beside_files(s)
    if s.goldens is not None:
        want, got = s.goldens.tensors["frequencies"], goldens.frequencies(s.model)
        if want.shape == got.shape:
            error, bad = _largest((got - want).abs() / want.abs())
            yield Line("bytes", f"loaded, layers.{bad}.attn.freqs", got.numel(), error, FREQUENCY, "relative")


def _files(s: Subject, known: Goldens) -> Iterator[Line]:
    s.progress("bytes: files")
    found = [(name, goldens.digest(value)) for name, value in s.checkpoint.items()]
    yield _same_digests("file", found, known.tensors["digests.file"])
    same = s.checkpoint.digest() == known.about["checkpoint"]
    yield Line("bytes", "file, config.json and names", 1, float(not same), 0.0, "goldens are of another checkpoint")
    same = goldens.tokenizer_digest(s.checkpoint) == known.about["tokenizer"]
    yield Line("bytes", "file, tokenizer.json", 1, float(not same), 0.0, "goldens are of another tokenizer")


def _same_digests(what: str, found: Sequence[tuple[str, bytes]], want: Tensor) -> Line:
    names = sorted(name for name, _ in found)
    got = goldens.digests(iter(found))
    if got.shape != want.shape:
        return Line("bytes", what, len(names), math.inf, 0.0, f"tensors, the goldens know {len(want)}")
    other = (got != want).any(1).nonzero()[:, 0].tolist()
    name = f"{what}, {names[other[0]]}" if other else what
    return Line("bytes", name, len(names), float(len(other)), 0.0, "tensors that differ")


def _loaded_beside_files(s: Subject) -> Iterator[Line]:
    """Layers that are looked at, and what is outside of layers, beside the same layers loaded here by the reference."""
    indices = list(range(len(s.model.plan))) if s.watched is None else s.watched
    for index in indices:
        s.progress(f"bytes: layer {index}")
        mine, theirs = (
            {item.name: item for item in goldens.loaded(layer)}
            for layer in (s.reference_layer(index), s.model.layers[index])
        )
        bad: list[str] = []
        for name, item in theirs.items():
            want = mine[name].value
            if item.value is None or want is None:
                continue
            want = quant.roundtrip_carry(want) if item.carried and not mine[name].carried else want
            if goldens.digest(want) != goldens.digest(item.value):
                bad.append(name)
        name = f"loaded, layers.{index}" + (f".{bad[0]}" if bad else "")
        yield Line("bytes", name, len(theirs), float(len(bad)), 0.0, "tensors that differ from their file")
    for name, weight in (
        ("embed.weight", s.model.embed.weight),
        ("norm.weight", s.model.norm.weight),
        ("head.weight", s.model.head.weight),
    ):
        differs = goldens.digest(weight) != goldens.digest(s.checkpoint.tensor(name).to(weight.dtype))
        yield Line("bytes", f"loaded, {name}", 1, float(differs), 0.0, "tensors that differ from their file")


def _largest(x: Tensor) -> tuple[float, int]:
    """The largest value of [n, ...] and the row it is in; inf where one is no number."""
    rows = x.nan_to_num(nan=torch.inf).flatten(1).amax(1)
    return float(rows.max()), int(rows.argmax())


# ---- ops -------------------------------------------------------------------------------------------------------------


class Found:
    """Findings of many calls, op by op."""

    def __init__(self, fp8: bool) -> None:
        self.fp8, self.calls = fp8, 0
        self.worst: dict[str, list[ops.Finding]] = {}
        self.rows: dict[str, list[Tensor]] = {}
        self.turned: dict[str, list[float]] = {}  # how many values of bfloat16 results differ, of how many
        self.first: dict[str, int] = {}  # the call that first went far beyond what is allowed

    def add(self, one: ops.Finding) -> None:
        self.worst.setdefault(one.name, []).append(one)
        if one.error > one.bound:
            self.first.setdefault(one.name, self.calls)

    def add_rows(self, name: str, errors: Tensor) -> None:
        self.rows.setdefault(name, []).append(errors)
        if float(errors.max()) > (3 * ROW_FP8 if self.fp8 else ROW_TAIL):
            self.first.setdefault(name, self.calls)

    def lines(self) -> list[Line]:
        """Those that deviate first came first."""
        found = list(self._lines())
        return sorted(found, key=lambda line: math.inf if line.passed else self.first.get(line.name, math.inf))

    def _lines(self) -> Iterator[Line]:
        for name, found in self.worst.items():
            if name.endswith(("choice", "codes")):  # near ties: a call may have one row, which takes the other
                share = sum(f.error for f in found) / len(found)
                yield Line("ops", name, len(found), share, found[0].bound, ops.unit(name))
                continue
            worst = max(found, key=lambda f: f.error / f.bound if f.bound else f.error)
            yield Line("ops", name, len(found), worst.error, worst.bound, ops.unit(name))
        for name, (other, count) in self.turned.items():
            yield Line("ops", f"{name}: rounding", int(count), other / count, TURNED, "share that rounds otherwise")
        for name, found in self.rows.items():
            if ": mixes" in name:
                yield _exact_line("ops", name, torch.cat(found))
            else:
                yield _row_line("ops", name, torch.cat(found), ": streams" in name or ": input" in name, self.fp8)

    def turn(self, name: str, want: Any, got: Any) -> None:
        """Count what rounds otherwise; choices at near ties and quantised values have rules of their own."""
        if name in ("experts", "compress_store", "roundtrip_fp8", "roundtrip_mxfp4") or not isinstance(want, Tensor):
            return
        if want.dtype == torch.bfloat16 and want.numel():
            sums = self.turned.setdefault(name, [0.0, 0.0])
            sums[0] += float((want != got.cpu()).sum())
            sums[1] += want.numel()


def _exact_line(level: str, name: str, errors: Tensor) -> Line:
    """Relative differences [R] of rows in float32."""
    return Line(level, name, len(errors), float(errors.max()), MIXES, "relative, at most")


def _row_line(level: str, name: str, errors: Tensor, rounded: bool, fp8: bool) -> Line:
    """Relative differences [R] of rows, in units of what is allowed: of their median, and of most of them."""
    median, most = (ROW_FP8, 3 * ROW_FP8) if fp8 else (ROW_MEDIAN, ROW_TAIL)
    middle = float(errors.median()) / (ROW_ROUNDED if rounded else median)
    share = max(middle, float(errors.quantile(1 - TAIL)) / most)
    return Line(level, name, len(errors), share, 1.0, "of the rows' tolerance")


def ops_level(s: Subject) -> Iterator[Line]:
    """Every op on inputs that it has in the model, twice: from a fixed seed and from a fresh one."""
    found, cpu = Found(s.fp8), torch.device("cpu")
    experts = _Experts(s)

    def around(name: str, op: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        found.calls += 1
        given = experts.plain(name, args)
        theirs = ops.moved(given, cpu)
        got = op(*args, **options)
        if name in ops.RUN_NAMES:
            if got is not None:  # else it is not taken together here, and its parts come one by one
                for part, errors in ops.run_errors(name, theirs, got):
                    found.add_rows(f"{part}, {_rows_kind(args[0])}", errors)
            return got
        with backends.reference():
            want = ops.reference(name)(*theirs, **ops.moved_options(options, cpu))
        for one in ops.findings(name, given, theirs, args, want, got):
            found.add(one)
        # sums of products against one scale have fewer bits; a GPU rounds probabilities against other running maxima
        if not (s.numerics.one_scale or (s.on_device and s.numerics.round_probs and name == "attend")):
            found.turn(name, want, got)
        return got

    for seed in dict.fromkeys((SEED, s.seed)):
        s.progress(f"ops: seed {seed}")
        probe = layers.probe(s.checkpoint.config, seed)
        with torch.inference_mode(), ops.watching(around, runs=True):
            layers.run(s.model, probe, s.rows, seed, layers=s.watched, keep=False, on_device=s.on_device)
    yield from found.lines()


def _rows_kind(first: Any) -> str:
    """Of a run by its first argument: kernels for one row are others than those for many."""
    rows = (first.s if isinstance(first, hyper.Streams) else first).shape[0]
    return "one row" if rows == 1 else "few rows" if rows < 16 else "many rows"


class _Experts:
    """Expert weights that a device holds in a form of its own, as the reference can read them."""

    def __init__(self, s: Subject):
        self.subject = s
        self.layers = {
            id(layer.ffn.w13): layer.plan.index
            for layer in s.model.layers
            if not isinstance(layer.ffn.w13, Tensor | quant.Fp4Matrix)
        }
        self.known: dict[int, tuple[Any, Any]] = {}

    def plain(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a call with such weights replaced by values from the file."""
        at = {"experts": 3, "moe": 3}.get(name)
        if at is None or id(args[at]) not in self.layers:
            return args
        index = self.layers[id(args[at])]
        if index not in self.known:
            self.known.clear()  # layers come one after another
            layer = self.subject.reference_layer(index)
            self.known[index] = (layer.ffn.w13, layer.ffn.w2)
        return (*args[:at], *self.known[index], *args[at + 2 :])


# ---- layers ----------------------------------------------------------------------------------------------------------


def layers_level(s: Subject) -> Iterator[Line]:
    """What passes between the parts of each layer, beside goldens, or beside the reference run here, which also says
    what memory and experts go on from (`layers.FED`)."""
    probe = layers.probe(s.checkpoint.config, SEED)
    stored = s.goldens is not None and s.goldens.profile(s.numerics.name) is not None
    s.progress("layers")
    with torch.inference_mode():
        if stored:
            theirs, indices, fed = _stored_sites(s), None, None
        else:
            whole = _reference_run(s, probe)
            theirs, indices = goldens.sampled(whole, probe), s.watched
            fed = {at: values for at, values in whole.items() if at[1] in layers.FED}
            del whole  # of a large model gigabytes
        mine = layers.run(s.model, probe, s.rows, SEED, layers=indices, on_device=s.on_device, fed=fed)
        mine = goldens.sampled(mine, probe)
    order = {site: i for i, site in enumerate(layers.SITES)}
    for index, site in sorted(theirs, key=lambda at: (at[0], order[at[1]])):
        got = mine.get((index, site), torch.empty(0))
        yield from _site_lines(s, probe, index, site, theirs[index, site], got)


def _stored_sites(s: Subject) -> dict[tuple[int, str], Tensor]:
    assert s.goldens is not None, "goldens that are not there"
    found: dict[tuple[int, str], Tensor] = {}
    for name, value in s.goldens.tensors.items():
        profile, *rest = name.split(".", 2)
        if profile == s.numerics.name and len(rest) == 2 and rest[1] in layers.SITES:
            found[int(rest[0]), rest[1]] = value
    return found


def _reference_run(s: Subject, probe: layers.Probe) -> layers.Values:
    """The same layers from their files, one after another, on the CPU."""
    config, numerics = s.checkpoint.config, s.numerics
    with torch.device("meta"):
        frame = DeepseekV41(config, numerics)
    frame.register_buffer("classes", s.model.classes.cpu(), persistent=False)
    indices = list(range(len(s.model.plan))) if s.watched is None else s.watched
    with backends.reference():
        return layers.run(
            frame,
            probe,
            s.rows,
            SEED,
            layers=indices,
            layer=s.reference_layer,
            progress=lambda index: s.progress(f"layers: reference of layer {index}"),
        )


def _site_lines(s: Subject, probe: layers.Probe, index: int, site: str, want: Tensor, got: Tensor) -> Iterator[Line]:
    last = len(s.model.plan)
    name = site if index in (-1, last) else f"layer {index}, {site}"
    if want.shape != got.shape:
        yield Line("layers", name, len(want), math.inf, 0.0, f"shape {tuple(got.shape)}, want {tuple(want.shape)}")
        return
    if site in layers.CHOICES:
        a, b = goldens.bits(want), goldens.bits(got)
        most = float((a.sum(1) - b.sum(1)).abs().max())
        yield Line("layers", f"{name}, how many", len(a), most, 0.0, "more or fewer in a row")
        shares = (a & ~b).sum(1) / a.sum(1).clamp(min=1)
        ties = TIES * (2 if s.fp8 else 1)
        yield Line("layers", name, len(a), float(shares.mean()), ties, "share of those chosen")
        yield Line("layers", f"{name}, in one row", len(a), float(shares.max()), 3 * ties, "share of those chosen")
        return
    errors = goldens.apart(want, got)
    if site in layers.EXACT:
        yield _exact_line("layers", name, errors)
        return
    kinds = probe.kinds if len(errors) == len(probe.sampled) else {"plain": slice(None)}
    for kind, at in kinds.items():
        if kind != "plain":
            if len(errors[at]):
                middle = float(errors[at].median())
                bound = 3 * ROW_FP8 if s.fp8 else ROW_TAIL
                yield Line("layers", f"{name}, {kind} rows", len(errors[at]), middle, bound, "relative, median")
        elif s.numerics.wide:
            yield _float_line("layers", name, errors[at])
        else:
            yield _row_line("layers", name, errors[at], site in layers.ROUNDED, s.fp8)


def _float_line(level: str, name: str, errors: Tensor) -> Line:
    """Without quantisers only near ties may move a row."""
    share = max(float(errors.median()) / ROW_FLOAT, float(errors.quantile(1 - TAIL)) / (100 * ROW_FLOAT))
    return Line(level, name, len(errors), share, 1.0, "of the rows' tolerance")


# ---- text ------------------------------------------------------------------------------------------------------------


def text_level(s: Subject) -> Iterator[Line]:
    """Greedy tokens and probabilities beside goldens, and draws, through the engine that will serve."""
    known, about = s.profile, s.goldens.about if s.goldens is not None else {}
    prompts, noise = about["prompts"], known["noise"]
    s.progress("text: draws")
    sampler = _sampler(s)
    drawn, want = answers.draws(sampler, SEED), known["draws"]
    wrong = sum(a != b for a, b in zip(drawn, want, strict=True))
    yield Line("text", "draws from fixed logits", len(want), float(wrong), 0.0, "other tokens")
    s.progress("text: probabilities")
    ids, gaps = s.golden("text.ids"), s.golden("text.gaps")
    rows = [[*prompt, *text] for prompt, text in zip(prompts, ids.tolist(), strict=True)]
    scores = answers.Scores(
        s.golden("scores.nats").double(), s.golden("scores.ids").long(), s.golden("scores.logprobs").double()
    )
    got = goldens.joined(answers.score(s.llm, rows, [len(prompt) for prompt in prompts], answers.SEEN))
    kl = float(answers.divergence(scores, got).mean())
    yield Line("text", "probabilities", len(got.nats), kl, MARGIN * noise["kl"] + KL_FLOOR, "nats, mean divergence")
    lead = float(answers.lead(scores, got).max())
    tie = MARGIN * noise["lead"] + 0.01
    yield Line("text", "best token, near ties apart", len(got.nats), lead, tie, "nats ahead of the golden one, most")
    s.progress("text: greedy")
    texts = answers.greedy(s.llm, prompts, ids.shape[1])
    other, at_ties = 0, 0
    for want_ids, want_gaps, text in zip(ids.tolist(), gaps.tolist(), texts, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(want_ids, text.ids, strict=True)) if a != b), None)
        if at is not None:
            other += want_gaps[at] > tie
            at_ties += want_gaps[at] <= tie
    yield Line("text", "greedy text, near ties apart", len(texts), float(other), 0.0, "texts that go another way")
    yield Line("text", "greedy text at near ties", len(texts), float(at_ties), None, "texts that go another way")
    yield from _seeded(s, prompts)


def _sampler(s: Subject) -> Sampler:
    return cast("Any", s.llm.loop.runner).sampler


def _seeded(s: Subject, prompts: Sequence[Sequence[int]]) -> Iterator[Line]:
    """The same seed gives the same tokens alone and beside others; another seed gives others."""
    s.progress("text: seeds")
    one = SamplingParams(temperature=1.0, max_tokens=12, seed=11, ignore_eos=True)
    alone = s.llm.generate([list(prompts[0])], one, progress=False, cache=answers.COLD)[0].token_ids
    params = [one, replace(one, seed=12), replace(one, temperature=0.0)]
    beside = s.llm.generate([list(prompts[0])] * 3, params, progress=False, cache=answers.COLD)
    same, other = beside[0].token_ids, beside[1].token_ids
    exact = _keeps_bits(s) and (s.device.type == "cpu" or s.llm.config.deterministic)
    first = next((i for i, (a, b) in enumerate(zip(alone, same, strict=True)) if a != b), len(alone))
    if exact:
        yield Line("text", "a seed's tokens, beside others", 12, float(len(alone) - first), 0.0, "tokens that differ")
    yield Line("text", "another seed's tokens", 12, float(other == same), 0.0, "the same for two seeds")


# ---- depth -----------------------------------------------------------------------------------------------------------


def depth_level(s: Subject) -> Iterator[Line]:
    """Perplexity by depth along stored documents, and the needle in each; in full also fresh needles."""
    known, about = s.profile, s.goldens.about if s.goldens is not None else {}
    limit = s.llm.config.scheduler.max_context_tokens or s.model.max_positions
    most = limit if s.full else min(limit, QUICK_TOKENS)
    done = 0
    for document, want in zip(about["documents"], known["documents"], strict=True):
        count = len(document["ids"])
        if count > most:
            continue
        done += 1
        s.progress(f"depth: document of {count} tokens")
        (nats,) = (found.nats for found in answers.score(s.llm, [document["ids"]], [1], 1))
        for part, at in goldens.parts(document):
            error = float((nats[at].mean() - want[part]["nats"]).abs())
            bound = MARGIN * want[part]["noise"] + (NATS_FLOAT if s.numerics.wide else NATS)
            name = f"needle at {count} tokens" if part == "answer" else f"of {count} tokens, {part}"
            yield Line("depth", name, len(nats[at]), error, bound, "nats a token from the golden")
    if not done:
        raise Skipped(f"the context of {limit} tokens holds none of the stored documents")
    if s.full and s.llm.tokenizer is not None:
        yield from _ladder(s, limit, _reached(about["documents"], known["documents"]))


def _reached(stored: Sequence[Mapping[str, Any]], scored: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of the longest stored document whose needle the goldens' maker found; 0: there is none."""
    found = zip(stored, scored, strict=True)
    nothing = {"nats": math.inf}
    return max((len(one["ids"]) for one, parts in found if parts.get("answer", nothing)["nats"] < ANSWERED), default=0)


def _ladder(s: Subject, limit: int, reached: int) -> Iterator[Line]:
    """Fresh needles at every length up to the context; a bound on those up to the longest stored one that was found."""
    material = prose(s.llm, s.seed)
    if material is None:
        return
    within = lost = 0
    for length in (250, 500, 1000, 2000, 4000, 8000, 16000):
        if 1.15 * length > limit:
            break
        s.progress(f"depth: needles at {length} tokens")
        found = [needle(s.llm, material, length, (i + 0.5) / 4, s.seed + i) for i in range(4)]
        rows = [d.ids[: d.answer[0]] for d in found]
        params = SamplingParams(temperature=0, max_tokens=12)
        done = s.llm.generate(rows, params, progress=False, cache=answers.COLD)
        right = sum(list(c.token_ids) == d.ids[d.answer[0] :] for c, d in zip(done, found, strict=True))
        yield Line("depth", f"fresh needles at {length} tokens", 4, 1 - right / 4, None, "share not found")
        if length <= reached:
            within, lost = within + 4, lost + 4 - right
    if within:
        yield Line("depth", f"fresh needles to {reached} tokens", within, lost / within, LOST, "share not found")


def documents(llm: LLM) -> list[answers.Document]:
    """Texts with a needle in each, of the model's own prose; seeded ids where there is no tokenizer."""
    lengths = [length for length in LENGTHS if 1.15 * length < llm.model.max_positions]
    material = None if llm.tokenizer is None else prose(llm, SEED)
    if material is None:
        return [answers.Document(answers.any_ids(llm, SEED + n, n), (n, n)) for n in lengths]
    return [needle(llm, material, length, (i + 1) / (len(lengths) + 1), SEED + i) for i, length in enumerate(lengths)]


def needle(llm: LLM, material: Material, tokens: int, depth: float, seed: int) -> answers.Document:
    """One document of about so many tokens; the code that is asked for stands at this depth, 0 to 1."""
    assert llm.tokenizer is not None, "a document of text for a model without a tokenizer"
    options: dict[str, Any] = {"tokens": tokens, "needles": 3, "questions": 1, "depth": depth}
    task = SKILLS["needle"].make(random.Random(seed), material, "held_out", **options)
    turn = task.turns[0]
    head = list(llm.encoder.encode(**task.request(turn)).ids)
    answer = [*llm.tokenizer.encode(task.messages[turn]["content"], bos=False), llm.tokenizer.eos_id]
    return answers.Document(head + answer, (len(head), len(head) + len(answer)))


def prose(llm: LLM, seed: int) -> Material | None:
    """Sentences of the model's own, so that they are of the kind it knows; None: it writes none."""
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=160, seed=seed % 2**62)
    rows = [list(llm.encoder.encode([{"role": "user", "content": text}]).ids) for text in answers.QUESTIONS]
    texts = [done.text for done in llm.generate(rows * 2, params, progress=False, cache=answers.COLD)]
    material = Material.of((text, text) for text in texts)
    return None if material.lacks else material


# ---- state -----------------------------------------------------------------------------------------------------------

BLOCK = 16  # tokens: small blocks, so that short requests have several
NEW = 34  # tokens that each request draws


class Ran:
    """What requests gave in one arrangement."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}  # of the prompt from its second token on, then of drawn tokens
        self.preemptions = 0


def state_level(s: Subject) -> Iterator[Line]:
    """The same requests in other arrangements: each must give what it gives alone, its prompt in one step."""
    requests = [
        Request(
            number,
            tuple(answers.any_ids(s.llm, SEED + number, length)),
            SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, prompt_logprobs=0),
            seed=0,
        )
        for number, length in enumerate((73, 65, 64))
    ]
    s.progress("state: alone")
    alone = Ran()
    for request in requests:
        _run(s, [request], alone, budget=4096, blocks=8, slots=1)
    arrangements: tuple[tuple[str, Sequence[Request], dict[str, int]], ...] = (
        ("in chunks of 5", requests[:1], {"budget": 5, "blocks": 8, "slots": 1}),
        ("in a batch, chunks of 64", requests, {"budget": 64, "blocks": 24, "slots": 3}),
        ("one after another in one slot", requests[1:], {"budget": 64, "blocks": 8, "slots": 1}),
        ("preempted and resumed", requests, {"budget": 64, "blocks": 18, "slots": 3}),
    )
    for name, some, how in arrangements:
        s.progress(f"state: {name}")
        found = Ran()
        _run(s, some, found, **how)
        if name.startswith("preempted"):
            yield Line("state", "a request was preempted", len(some), float(found.preemptions == 0), 0.0, "was not")
        yield from _state_lines(s, name, [request.id for request in some], alone, found)
    yield from _cached(s)


def _cached(s: Subject) -> Iterator[Line]:
    """Prompts that were seen before, or whose beginning was, beside the same without a cache.

    `mixed` begins like one prompt and goes on like another: its second block is in the cache, behind a block that is
    not its own.
    """
    config = s.llm.config
    exact = config.cache.mode in ("snapshot", "exact") and config.cache.truncation in ("off", "halo")
    if not config.cache.prefix or not exact:
        return  # nothing is promised
    s.progress("state: cached")
    own = replace(
        config,
        deterministic=True,
        scheduler=replace(config.scheduler, token_budget=256, max_running=2, max_context_tokens=0),
        cache=replace(config.cache, blocks=12, snapshots=4),
        gpu=replace(config.gpu, graphs=False),
    )
    loop = build_loop(s.model, own, s.device)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    prompt, other = (answers.any_ids(s.llm, SEED + n, 300) for n in (9, 10))
    branch, mixed = prompt[:256] + prompt[:30], other[:128] + prompt[128:]
    cold = [prompt, branch, mixed]
    warm = [(prompt, 0), (branch, 256), (prompt, 256), (other[:140], 0), (mixed, 128)]  # with the tokens to be found
    found, cached = Ran(), dict[int, int]()
    for number, ids in enumerate([*cold, *(ids for ids, _ in warm)]):
        kept = answers.COLD if number < len(cold) else CacheOptions()
        request = Request(number, tuple(ids), params, seed=0, cache=kept)
        loop.inbox.put(request)
        for event in _events(loop, found):
            if event.usage is not None:
                cached[event.request] = event.usage.cached_tokens
    loop.close()
    least = 1.0 if config.cache.mode == "snapshot" else 0.0  # without states short prompts are computed whole
    wrong = sum(not least * tokens <= cached[len(cold) + i] <= tokens for i, (_, tokens) in enumerate(warm))
    yield Line("state", "what is found in the cache", len(warm), float(wrong), 0.0, "prompts that find another length")
    want, got = Ran(), Ran()
    for i, (ids, tokens) in enumerate(warm):
        if tokens:
            want.logprobs[i] = found.logprobs[cold.index(ids)]
            got.logprobs[i] = found.logprobs[len(cold) + i]
    yield from _state_lines(s, "behind a cached prefix", list(want.logprobs), want, got)


def _run(s: Subject, requests: Sequence[Request], found: Ran, *, budget: int, blocks: int, slots: int) -> None:
    storage = Storage(s.model.cache_spec, blocks + 1, slots + 1, s.device, block_tokens=BLOCK)
    storage.poison()
    scheduler = Scheduler(
        CacheManager(blocks + 1, slots + 1, BLOCK),
        token_budget=budget,
        max_context_tokens=s.model.max_positions,
        vocab_size=s.model.vocab_size,
    )
    runner = Runner(s.model, storage, Sampler(s.model.vocab_size, s.device), deterministic=True)
    loop = Loop(scheduler, runner)
    for request in requests:
        loop.inbox.put(request)
    for _ in _events(loop, found):
        pass
    loop.close()
    found.preemptions = scheduler.preemptions


def _events(loop: Loop, found: Ran) -> Iterator[TokenEvent]:
    """Steps until nothing is left to do; what came of them is also added to `found`."""
    while loop.busy:
        loop.step()
        for event in loop.outbox.take():
            if event.error is not None:
                raise event.error
            found.tokens.setdefault(event.request, []).extend(event.tokens)
            entries = [*event.prompt_logprobs, *event.logprobs]
            found.logprobs.setdefault(event.request, []).extend(entry.logprob for entry in entries)
            yield event


def _keeps_bits(s: Subject) -> bool:
    """Do the installed kernels promise that what else is in a step changes no bit?"""
    return s.numerics.quantise and (s.device.type == "cuda" or native.status().available)


def _state_lines(s: Subject, name: str, requests: Sequence[int], want: Ran, got: Ran) -> Iterator[Line]:
    exact = _keeps_bits(s)
    differ, first, apart = 0, "", 0.0
    count = 0
    for request in requests:
        a, b = want.logprobs[request], got.logprobs.get(request, [])
        count += len(a)
        if len(a) != len(b):
            yield Line("state", f"{name}: request {request}", len(a), math.inf, 0.0, "positions are missing")
            return
        changed = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        differ += len(changed)
        if changed and not first:
            first = f", request {request} from position {changed[0] + 1} on"
        away = sorted(math.inf if x != x or y != y else abs(x - y) for x, y in zip(a, b, strict=True))
        apart = max(apart, away[len(away) // 2])
    if exact:
        yield Line("state", f"{name}{first}", count, float(differ), 0.0, "positions with other bits")
        return
    bound = 1e-4 if s.numerics.wide else 0.05
    yield Line("state", name, count, apart, bound, "nats, median difference")


# ---- drafts ----------------------------------------------------------------------------------------------------------


def drafts_level(s: Subject) -> Iterator[Line]:
    """What the drafter sees and proposes along the golden texts, and how many of its tokens are what follows."""
    text = s.checkpoint.config.text
    if not text.num_nextn_predict_layers:
        raise Skipped("the model has no drafter")
    known = s.profile.get("drafts")
    if known is None or s.goldens is None:
        raise Skipped("the goldens hold no drafts")
    s.progress("drafts")
    drafter = deepseek_v41_dspark.from_checkpoint(s.checkpoint, s.numerics, s.device)
    prompts, ids = s.goldens.about["prompts"], s.golden("text.ids")
    rows = [[*prompt, *tokens] for prompt, tokens in zip(prompts, ids.tolist(), strict=True)]
    firsts = [min(goldens.DRAFT_FROM, len(row) // 2) for row in rows]
    made, noise = answers.draft(s.model, drafter, rows, firsts), known["noise"]
    away = goldens.apart(s.golden("drafts.taps"), goldens.tap_sketches(s.model, made.taps))
    bound = MARGIN * noise["taps"] + ROW_MEDIAN
    yield Line("drafts", "what the drafter sees", len(away), float(away.median()), bound, "relative, median")
    other = float((made.tokens != s.golden("drafts.tokens")).double().mean())
    yield Line(
        "drafts", "drafted tokens", made.tokens.numel(), other, MARGIN * noise["tokens"] + 0.05, "share of others"
    )
    if known["first"] < goldens.LEAST_ACCEPTED:
        yield Line(
            "drafts", "accepted: the drafter is not trained", len(made.accepted), known["first"], None, "first drafts"
        )
        return
    accepted = float(made.accepted.double().mean())
    band = MARGIN * noise["accepted"] + 0.25
    yield Line("drafts", "accepted drafts", len(made.accepted), abs(accepted - known["accepted"]), band, "from golden")


# ---- the run ---------------------------------------------------------------------------------------------------------

LEVELS: dict[str, Callable[[Subject], Iterator[Line]]] = {
    "bytes": bytes_level,
    "ops": ops_level,
    "layers": layers_level,
    "text": text_level,
    "depth": depth_level,
    "state": state_level,
    "drafts": drafts_level,
}


def run(
    llm: LLM,
    depth: Depth = "quick",
    *,
    progress: Callable[[str], None] = lambda _: None,
    finished: Callable[[Outcome], None] = lambda _: None,
    seed: int | None = None,
) -> Verdict:
    """All levels, until one fails. Nothing is remembered.

    progress  is told what begins; finished of every level.
    seed      of fresh inputs; None: a new one.
    Raises    BadGoldens.
    """
    seed = secrets.randbits(31) if seed is None else seed
    subject = Subject(llm, depth, progress, seed)
    outcomes: list[Outcome] = []
    for name, level in LEVELS.items():
        began, lines, skipped = perf_counter(), list[Line](), ""
        try:
            for line in level(subject):
                lines.append(line)
        except Skipped as why:
            skipped = str(why)
        except BadGoldens:
            raise
        except Exception as error:  # what a level cannot even compute is its finding
            what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            lines.append(Line(name, what, 1, math.inf, 0.0, "error"))
        outcomes.append(Outcome(name, tuple(lines), perf_counter() - began, skipped))
        finished(outcomes[-1])
        if not outcomes[-1].passed:
            break
    return Verdict(llm.config.model, depth, combination(llm.config, depth), seed, tuple(outcomes))


# ---- memory ----------------------------------------------------------------------------------------------------------


def combination(config: Config, depth: Depth) -> dict[str, Any]:
    """What a verdict holds for: everything that decides which code computes which numbers."""
    folder, device = model_dir(config.model), device_of(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = {"benthic": benthic.__version__, "torch": str(torch.__version__), "source": source_digest()}
    for package in ("triton", "tokenizers", "deepseek-recipe"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    if device.type == "cpu":
        status = native.setup(config.cpu.native, config.cpu.compiler, config.cpu.cache_dir)
        versions["native"] = status.path.name if status.available and status.path is not None else ""
    return {
        "files": _fingerprint(folder),
        "device": f"{device.type}: {name}",
        "versions": versions,
        "numerics": config.numerics,
        "context": config.scheduler.max_context_tokens,
        "ahead": config.scheduler.ahead,
        "deterministic": config.deterministic,
        "cache": [config.cache.prefix, config.cache.mode, config.cache.truncation],
        "gpu": asdict(config.gpu) if device.type == "cuda" else None,
        "depth": depth,
    }


def _fingerprint(folder: Path) -> str:
    """Of every file of a checkpoint: small ones by content, shards by name, size, time and place on the disk.

    So a restart reads no weights; a shard that is written again counts as new.
    """
    found = hashlib.sha256(str(folder.resolve()).encode())
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        stat = path.stat()
        found.update(f"\0{path.name}\0{stat.st_size}\0".encode())
        if stat.st_size <= 1 << 20:
            found.update(path.read_bytes())
        else:
            found.update(f"{stat.st_mtime_ns}\0{stat.st_ino}".encode())
    return found.hexdigest()


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def _record(config: Config, key: Mapping[str, Any]) -> Path:
    folder = Path(config.gate.cache_dir) if config.gate.cache_dir else user_cache_dir() / "gate"
    return folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def recorded(config: Config, depth: Depth = "quick") -> Verdict | None:
    """A passed gate of at least this depth on record for this combination, else None."""
    same = combination(config, depth)
    for deeper in DEPTHS[DEPTHS.index(depth) :]:
        key = same | {"depth": deeper}
        path = _record(config, key)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["key"] != key:
                continue
            outcomes = tuple(
                Outcome(o["level"], tuple(Line(**line) for line in o["lines"]), o["seconds"], o["skipped"])
                for o in found["outcomes"]
            )
            verdict = Verdict(config.model, deeper, key, found["seed"], outcomes, remembered=True)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if verdict.passed:
            return verdict
    return None


def remember(config: Config, verdict: Verdict) -> None:
    """Keep a passed verdict. A cache folder that cannot be written costs the next start a gate, nothing else."""
    if not verdict.passed:
        return
    path = _record(config, verdict.key)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        body = {"key": verdict.key, "seed": verdict.seed, "outcomes": [asdict(outcome) for outcome in verdict.outcomes]}
        partial.write_text(json.dumps(body) + "\n", encoding="utf-8")
        partial.rename(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()


def ensure(
    subject: LLM | Config,
    depth: Depth = "quick",
    *,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    finished: Callable[[Outcome], None] = lambda _: None,
) -> Verdict:
    """The verdict on what would be served: the one on record, or that of a run now, which is then kept if it passed.

    subject  an engine that is loaded, or a configuration, for which one is loaded if there is nothing on record.
    fresh    do not look at records.
    Raises   what loading raises, and BadGoldens. A failed gate is a verdict; `Verdict.require` raises GateFailed.
    """
    config = subject if isinstance(subject, Config) else subject.config
    if not fresh and (found := recorded(config, depth)) is not None:
        return found
    if isinstance(subject, Config):
        progress("loading")
        with LLM(config=subject) as llm:
            verdict = run(llm, depth, progress=progress, finished=finished)
    else:
        verdict = run(subject, depth, progress=progress, finished=finished)
    remember(config, verdict)
    return verdict


def notice(config: Config) -> str | None:
    """One line for whoever uses a combination that no gate was run on; None where one has passed."""
    if recorded(config) is not None:
        return None
    return (
        f"benthic: no passed gate on record for {config.model} ({config.numerics}, {config.device}); "
        f"`benthic verify {config.model}` with the same settings checks its answers here"
    )
