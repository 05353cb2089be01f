"""Two places that should compute the same: op by op, sublayer by sublayer, layer by layer, logits, and greedy text.

A place is a device, or a device with another set of kernels: `cpu`, `cuda`, `cuda:1`, `cpu:reference`. All levels but
the last two feed both sides the same inputs, taken from the left one, so an error shows where it is made. What rounding
does end to end in the quantised profiles is chaotic (model specification, 6.4): there the distance is reported beside
the noise floor, the left side against itself with its sums in another order.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benthic.bench.eval import read_documents
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.llm import LLM
from benthic.errors import BadField, BenchError
from benthic.kernels import (
    attn_sparse,
    backends,
    compress,
    engram,
    fused,
    gemm,
    hyper,
    indexer,
    kv_copy,
    moe_experts,
    moe_gate,
    norm,
    quant,
    rope,
    rows,
    swiglu,
)
from benthic.models.base import Batch
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.modules import packed_weights
from benthic.models.registry import model_dir
from benthic.models.weights import Checkpoint
from benthic.testing.tolerances import TOLERANCES, excess
from benthic.text.prompt import ChatEncoder
from benthic.text.tokenizer import Tokenizer
from benthic.types import NUMERICS, Chunk, Draw, Numerics, SamplingParams, StepPlan

LOGITS = 1e-4  # most absolute difference of logits without quantisers
LAYER = 2.0**-8  # most median relative difference of a layer's streams where activations are bfloat16
LAYER_FLOAT = 1e-5
TIES = 0.01  # share of rows whose choice (experts, entries) may differ: near ties
BLOCKS = 64  # of the pool, at least


class Place(NamedTuple):
    """Where one side runs."""

    name: str
    device: torch.device
    reference: bool

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with backends.reference() if self.reference else ExitStack(), torch.inference_mode():
            yield


def place(text: str) -> Place:
    """`cuda`, `cpu:reference` -> where that is. Raises BadField."""
    kind, _, kernels = text.partition(":")
    reference = kernels == "reference"
    try:
        device = torch.device(kind if reference or not kernels else text)
    except RuntimeError:
        raise BadField("compare", text, "a device such as cpu, cuda or cuda:1, or one with :reference") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadField("compare", text, "a device that is here; torch sees no CUDA device")
    return Place(text, device, reference)


@dataclass(frozen=True, slots=True)
class Line:
    """One finding. It passes when `error` is at most `bound`; a line without a bound only informs."""

    level: str  # op, block, layer, logits, text
    name: str
    cases: int
    error: float
    bound: float | None
    unit: str

    @property
    def passed(self) -> bool:
        return self.bound is None or self.error <= self.bound


# ---- one side --------------------------------------------------------------------------------------------------------


class Side:
    """A model with its cache in one place."""

    def __init__(self, checkpoint: Checkpoint, numerics: str, where: Place, num_slots: int):
        self.where = where
        self.experts = Experts(numerics)
        # both sides in the form a GPU has, so that ops get the same arguments
        with where(), packed_weights(), self.experts.noted():
            self.model: DeepseekV41 = from_checkpoint(checkpoint, NUMERICS[numerics], where.device)
            self.storage = Storage(self.model.cache_spec, BLOCKS + 1, num_slots + 1, where.device)
            self.storage.history.fill_(-1)
        self.uploads = batches.Uploads(self.storage)


class Experts:
    """Expert weights of a model as they are in the file: what `moe_experts.prepare` makes of them fits one place."""

    def __init__(self, numerics: str):
        self.numerics = NUMERICS[numerics]
        self._files: dict[int, tuple[Any, tuple[quant.Fp4Matrix, quant.Fp4Matrix]]] = {}  # id of a prepared w13
        self._prepared: dict[tuple[int, str], tuple[Any, Any]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside this block what is prepared is remembered by its result."""
        real = moe_experts.prepare

        def prepare(w13: quant.Fp4Matrix, w2: quant.Fp4Matrix, numerics: Numerics) -> tuple[Any, Any]:
            prepared = real(w13, w2, numerics)
            self._files[id(prepared[0])] = (prepared[0], (w13, w2))
            return prepared

        moe_experts.prepare = prepare
        try:
            yield
        finally:
            moe_experts.prepare = real

    def at(self, where: Place, w13: Any, w2: Any) -> tuple[Any, Any]:
        """The model's w13 and w2 as `where` reads them; plain values, which nothing prepares, as copies there."""
        if id(w13) not in self._files:
            return moved((w13, w2), where.device)
        key = (id(w13), where.name)
        if key not in self._prepared:
            first, second = moved(self._files[id(w13)][1], where.device)
            with where():
                self._prepared[key] = moe_experts.prepare(first, second, self.numerics)
        return self._prepared[key]


def plans(prompts: Sequence[Sequence[int]], chunk: int, decode: int) -> list[StepPlan]:
    """Steps that bring up the prompts in chunks, side by side, the last `decode` tokens of each one by one."""
    greedy = SamplingParams(temperature=0)
    done, used = [0] * len(prompts), 0
    tables: list[tuple[int, ...]] = [()] * len(prompts)
    steps: list[StepPlan] = []
    while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
        chunks: list[Chunk] = []
        for i, ids in enumerate(prompts):
            start = done[i]
            if start == len(ids):
                continue
            whole = max(len(ids) - decode, 1)
            end = min(start + chunk, whole) if start < whole else start + 1
            missing = -(-end // 128) - len(tables[i])
            tables[i] += tuple(range(used + 1, used + 1 + missing))
            used += missing
            chunks.append(Chunk(i, start, tuple(ids[start:end]), 0, True, i + 1, tables[i]))
            done[i] = end
        draws = tuple(Draw(greedy, 0, c.start + len(c.tokens), (), None, 0) for c in chunks)
        steps.append(StepPlan(len(steps), tuple(chunks), draws))
    assert used <= BLOCKS, f"the prompts need {used} blocks, {BLOCKS} are there"
    return steps


def moved(value: Any, device: torch.device) -> Any:
    """The same structure with its tensors on `device`, copied even when they are there: ops write in place."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in cast("tuple[Any, ...]", value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


# ---- ops -------------------------------------------------------------------------------------------------------------

OPS: tuple[tuple[ModuleType, str], ...] = (
    (norm, "rms_norm"),
    (rope, "rotate"),
    (quant, "roundtrip_fp8"),
    (quant, "roundtrip_mxfp4"),
    (gemm, "linear"),
    (gemm, "grouped_linear"),
    (swiglu, "swiglu"),
    (hyper, "hyper_mixes"),
    (hyper, "hyper_collapse"),
    (hyper, "hyper_expand"),
    (engram, "ngram_ids"),
    (engram, "ngram_rows"),
    (engram, "table_rows"),
    (engram, "engram_gate"),
    (moe_gate, "route"),
    (moe_experts, "experts"),
    (rows, "group_records"),
    (compress, "compress_store"),
    (compress, "key_store"),
    (kv_copy, "ring_write"),
    (indexer, "select_records"),
    (attn_sparse, "attend"),
)


@contextmanager
def _watching(see: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Inside this block `see` is told of every op of the model before it runs. Runs of ops are taken apart."""
    inside = False  # an op that another one calls, or `see` itself, is not the model's

    with fused.apart(), ExitStack() as undo:
        for module, name in OPS:
            real = getattr(module, name)

            def told(*args: Any, _name: str = name, _real: Callable[..., Any] = real, **options: Any) -> Any:
                nonlocal inside
                if inside:
                    return _real(*args, **options)
                inside = True
                try:
                    see(_name, args, options)
                    return _real(*args, **options)
                finally:
                    inside = False

            setattr(module, name, told)
            undo.callback(setattr, module, name, real)
        yield


def _copied(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """Where an op puts a copy of what it is given: every place has the same bytes there."""
    if name == "ring_write":
        return args[0].bytes
    return args[2] if name == "compress_store" else None


def _paged(name: str, args: tuple[Any, ...]) -> tuple[kv_copy.Paged, Tensor] | None:
    """Where an op stores what it computes, and the records [T]."""
    if name == "compress_store":
        return args[8], args[9]
    return (args[6], args[7]) if name == "key_store" else None


def op_lines(checkpoint: Checkpoint, numerics: str, left: Place, right: Place, steps: Sequence[StepPlan]) -> list[Line]:
    """Each op on the inputs it has in a run of the left side: the left result against the right one."""
    worst: dict[str, list[tuple[float, float]]] = {}
    side = Side(checkpoint, numerics, left, max(len(step.chunks) for step in steps))
    functions = {name: getattr(module, name) for module, name in OPS}

    def see(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if name == "experts":
            mine, theirs = (
                (*moved(args[:3], w.device), *side.experts.at(w, *args[3:5]), *args[5:]) for w in (left, right)
            )
        else:
            mine, theirs = moved(args, left.device), moved(args, right.device)
        with left():
            want = functions[name](*mine, **options)
        with right():
            got = functions[name](*theirs, **moved_options(options, right.device))
        if (bytes_ := _copied(name, mine)) is not None:
            other = _copied(name, theirs)
            assert other is not None
            live = slice(1, None)  # block and slot 0 hold padding rows, which nobody reads
            # by value of the raw bytes: NaN patterns count too
            differing = (bytes_.view(torch.uint8)[live] != other.cpu().view(torch.uint8)[live].to(left.device)).float()
            worst.setdefault(f"{name}: bytes", []).append((float(differing.mean()), 0.0))
        for found in (*_stored(name, mine, theirs), *_differences(name, args, want, got)):
            worst.setdefault(found[0], []).append(found[1:])

    with left(), _watching(see):
        _run(side, steps)
    return [
        Line("op", name, len(found), max(e for e, _ in found), max(b for _, b in found), _unit(name))
        for name, found in worst.items()
    ]


def moved_options(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: moved(value, device) for key, value in options.items()}


def _stored(name: str, mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> Iterator[tuple[str, float, float]]:
    """(line, error, bound) of the records that one call stored, read back: floats by value, packed ones by code."""
    here, there = _paged(name, mine), _paged(name, theirs)
    if here is None or there is None:
        return
    want, got = (kv_copy.read_records_reference(paged, ids[ids >= 0]).cpu() for paged, ids in (here, there))
    if here[0].format == "f32":
        yield f"{name}: records", excess("rotate", got, want.double(), _largest(want)), 4.0
    else:
        yield f"{name}: codes", _share(want != got), TIES


def _unit(name: str) -> str:
    if name.endswith("bytes"):
        return "share of bytes that differ"
    if name.endswith("codes"):
        return "share of values with another code"
    return "share of rows that choose otherwise" if name.endswith("choice") else "of the op's tolerance"


def _differences(name: str, args: tuple[Any, ...], want: Any, got: Any) -> Iterator[tuple[str, float, float]]:
    """(line, error, bound) of one call."""
    if want is None:
        return
    got = moved(got, torch.device("cpu"))
    want = moved(want, torch.device("cpu"))
    if name == "route":
        ids, weights = want
        same = (ids == got[0]).all(dim=1)
        yield "route: choice", _share(~same), TIES
        yield "route", excess("route", got[1][same], weights[same]), 1.0
    elif name == "select_records":
        for which, a, b in zip(("entries", "candidates"), want, got, strict=True):
            if a is not None:
                a, b = a.sort(dim=1).values, b.sort(dim=1).values
                yield f"select_records: {which}, choice", _share((a != b).any(dim=1)), TIES
    elif name in ("ngram_ids", "ngram_rows", "roundtrip_fp8", "roundtrip_mxfp4", "table_rows"):
        a, b = (t.float() if t.dtype == torch.bfloat16 else t for t in (want, got))
        equal = (a == b) | ((a != a) & (b != b))
        yield name, _share(~equal), 0.0
    elif name == "group_records":
        yield name, max(_share(a != b) for a, b in zip(want, got, strict=True)), 0.0
    elif name == "compress_store":
        ends = (args[9] >= 0).cpu()  # the other rows mean nothing
        # on each side the pooled row rounds, then the normed one
        yield name, excess("rotate", got[ends], want[ends].double(), _largest(want[ends])), 4.0
    else:
        pairs = list(zip(want, got, strict=True)) if isinstance(want, tuple) else [(want, got)]
        rule, scale = _rule(name, args)
        for a, b in pairs:
            size = _largest(a) if scale is None else scale.cpu()
            yield name, excess(rule, b, a.double(), size), 2.0  # each side may be one tolerance from the exact value


def _rule(name: str, args: tuple[Any, ...]) -> tuple[str, Tensor | None]:
    """The tolerance that holds, and the size of what was summed; None: the largest of the row."""
    if name in ("linear", "grouped_linear"):
        x, weight = args[0].float().abs(), quant.values(args[1]).float()
        size = x @ weight.abs().mT if name == "linear" else torch.einsum("tgk,gnk->tgn", x, weight.abs())
        return "linear", size.double()
    if name == "experts":
        return ("experts_rounded" if args[6] else "experts"), None
    if name == "attend":
        return ("sink_attention_rounded" if args[9] else "sink_attention"), None
    return (name if name in TOLERANCES else "linear"), None


def _largest(x: Tensor) -> Tensor:
    """[..., 1] float64: the largest size in each row."""
    return x.double().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)


def _share(mask: Tensor) -> float:
    return float(mask.float().mean()) if mask.numel() else 0.0


def _run(side: Side, steps: Sequence[StepPlan]) -> None:
    for plan in steps:
        step = side.uploads.step(plan)
        side.model.forward(step.batch, side.model.memory(side.storage, step.batch))
        batches.finish(step, side.storage, None)


# ---- layers and logits -----------------------------------------------------------------------------------------------


def layer_lines(
    checkpoint: Checkpoint, numerics: str, left: Place, right: Place, steps: Sequence[StepPlan]
) -> list[Line]:
    """Each sublayer's input and each layer, both sides fed with the left side's streams; each side keeps its cache."""
    count = max(len(step.chunks) for step in steps)
    a, b = (Side(checkpoint, numerics, where, count) for where in (left, right))
    bound = LAYER if NUMERICS[numerics].quantise else LAYER_FLOAT
    errors: dict[str, list[Tensor]] = {}
    cpu = torch.device("cpu")
    for plan in steps:
        with left():
            at = a.uploads.step(plan)
            here = a.model.memory(a.storage, at.batch)
        with right():
            bt = b.uploads.step(plan)
            there = b.model.memory(b.storage, bt.batch)
        streams, shared = None, None
        for i, (mine, theirs) in enumerate(zip(a.model.layers, b.model.layers, strict=True)):
            with left():
                if streams is None:
                    streams = _entry(a.model, at.batch)
                ngrams = a.model.ngrams(at.batch)
                entered = mine.recall(streams, ngrams, None, None)
                want, kept = mine(entered, at.batch, here.layer(i), shared)
                settled = hyper.settle(want)
            with right():
                entered = theirs.recall(moved(streams, right.device), b.model.ngrams(bt.batch), None, None)
                got, _ = theirs(entered, bt.batch, there.layer(i), moved(shared, right.device))
                other = hyper.settle(got).to(cpu)
            errors.setdefault(f"layer {i}", []).append(_relative(other, settled.to(cpu)))
            streams, shared = want, kept
        with left():
            batches.finish(at, a.storage, None)
        with right():
            batches.finish(bt, b.storage, None)
    return [
        Line("layer", name, sum(len(e) for e in found), float(torch.cat(found).median()), bound, "median relative")
        for name, found in errors.items()
    ]


def _entry(model: DeepseekV41, batch: Batch) -> hyper.Streams:
    s = model.embed(batch.ids)[:, None].expand(-1, model.config.text.hc_mult, -1).contiguous()
    pre = torch.zeros(s.shape[:2], device=s.device)
    pre[:, 0] = 1.0
    return hyper.Streams(s, pre)


def _relative(got: Tensor, want: Tensor) -> Tensor:
    """[T]: rms difference of each row over its rms."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    return (got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)


class Distance(NamedTuple):
    """How far two sets of logits are, per row."""

    largest: Tensor  # [R] absolute
    cosine: Tensor  # [R]
    kl: Tensor  # [R] nats, of right from left
    same: Tensor  # [R] bool, the same best token


def distance(left: Tensor, right: Tensor) -> Distance:
    """left, right [R, V]."""
    a, b = left.double().cpu(), right.double().cpu()
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return Distance((a - b).abs().amax(-1), torch.cosine_similarity(a, b, dim=-1), kl, a.argmax(-1) == b.argmax(-1))


def logits(checkpoint: Checkpoint, numerics: str, where: Place, steps: Sequence[StepPlan]) -> Tensor:
    """[R, V] of every row of every step, on the CPU."""
    side = Side(checkpoint, numerics, where, max(len(step.chunks) for step in steps))
    found: list[Tensor] = []
    with where():
        for plan in steps:
            step = side.uploads.step(plan)
            hidden = side.model.forward(step.batch, side.model.memory(side.storage, step.batch)).hidden
            found.append(side.model.logits(hidden).cpu())
            batches.finish(step, side.storage, None)
    return torch.cat(found)


def logit_lines(
    checkpoint: Checkpoint, numerics: str, left: Place, right: Place, steps: Sequence[StepPlan]
) -> list[Line]:
    """End to end. Without quantisers a bound; with them the distance and, where there is one, the noise floor."""
    mine = logits(checkpoint, numerics, left, steps)
    found = distance(mine, logits(checkpoint, numerics, right, steps))
    rows = len(found.largest)
    if not NUMERICS[numerics].quantise:
        top = found.largest.quantile(0.99)
        return [
            Line("logits", "99 of 100 rows", rows, float(top), LOGITS, "absolute"),
            Line("logits", "largest (near ties spread)", rows, float(found.largest.max()), None, "absolute"),
        ]
    other = replace_place(left)
    floor = distance(mine, logits(checkpoint, numerics, other, steps))
    lines: list[Line] = []
    for name, d in (("", found), (f" floor ({other.name})", floor)):
        lines += [
            Line("logits", f"KL{name}", rows, float(d.kl.mean()), None, "nats, mean"),
            Line("logits", f"cosine{name}", rows, float(d.cosine.median()), None, "median"),
            Line("logits", f"first token{name}", rows, float(d.same.float().mean()), None, "share equal"),
        ]
    return lines


def replace_place(where: Place) -> Place:
    """The same device with its sums in another order: the reference kernels, or the others where it had those."""
    name = where.name.removesuffix(":reference") if where.reference else f"{where.name}:reference"
    return where._replace(name=name, reference=not where.reference)


# ---- greedy text -----------------------------------------------------------------------------------------------------

FORCED = 64  # prompts whose positions are compared by their distributions
Prompts = Sequence[Sequence[int]]
TIE = 2e-3  # nats between the two best tokens, below which another choice is a tie


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy completions of the same prompts in two places."""

    prompts: int
    tokens: int  # of each completion
    equal: float  # share of completions that are the same to the end
    first: float  # share whose first token is the same
    length: float  # mean tokens before the first difference
    ties: int  # of those that differ: the left side's two best tokens were closer than TIE there
    kl: float  # nats a position, right from left, along the left completions of the first prompts

    def lines(self, name: str, bound: float | None = None) -> list[Line]:
        ties = self.ties / self.prompts
        return [
            Line(
                "text", f"other text, ties apart{name}", self.prompts, 1 - self.equal - ties, bound, "share of prompts"
            ),
            Line("text", f"other text at a tie{name}", self.prompts, ties, None, f"share, gap below {TIE} nats"),
            Line("text", f"first token{name}", self.prompts, self.first, None, "share equal"),
            Line("text", f"agreed length{name}", self.prompts, self.length, None, f"mean of {self.tokens} tokens"),
            Line("text", f"KL{name}", min(self.prompts, FORCED) * self.tokens, self.kl, None, "nats a position"),
        ]


class Text(NamedTuple):
    """A greedy completion."""

    ids: list[int]
    gaps: list[float]  # nats between the two best tokens of each position


def greedy(model: str | Path, numerics: str, where: Place, prompts: Sequence[Sequence[int]], tokens: int) -> list[Text]:
    """Completions through the engine."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    with ExitStack() as stack:
        if where.reference:
            stack.enter_context(backends.reference())
        llm = stack.enter_context(LLM(model, numerics=numerics, device=str(where.device)))
        done = llm.generate([list(ids) for ids in prompts], params, progress=False)
    for completion in done:
        if completion.error is not None:
            raise completion.error
    return [Text(list(c.token_ids), [e.top[0][1] - e.top[1][1] for e in c.logprobs]) for c in done]


def kept(
    folder: Path | None, model: str | Path, numerics: str, where: Place, prompts: Prompts, tokens: int
) -> list[Text]:
    """`greedy`, from the file that an earlier run on the same checkpoint and prompts left in `folder`, or into it.

    Slow sides are made once, on a machine that has the time. Raises BenchError when the file is of something else.
    """
    if folder is None:
        return greedy(model, numerics, where, prompts, tokens)
    path = folder / f"greedy-{numerics}-{where.name.replace(':', '-')}.json"
    about = {"checkpoint": Checkpoint.open(model).digest(), "prompts": [list(ids) for ids in prompts], "tokens": tokens}
    if path.is_file():
        found = json.loads(path.read_text())
        if {key: found.get(key) for key in about} != about:
            raise BenchError("text", f"{path} holds completions of another checkpoint, other prompts or other lengths")
        return [Text(*text) for text in found["texts"]]
    texts = greedy(model, numerics, where, prompts, tokens)
    folder.mkdir(parents=True, exist_ok=True)
    rounded = [[text.ids, [round(gap, 5) for gap in text.gaps]] for text in texts]
    path.write_text(json.dumps(about | {"texts": rounded}, separators=(",", ":")) + "\n")
    return texts


def agreement(
    model: str | Path,
    numerics: str,
    left: Place,
    right: Place,
    prompts: Prompts,
    tokens: int,
    mine: list[Text],
    theirs: list[Text],
) -> Agreement:
    """Compare completions of the same prompts."""
    agreed: list[int] = []
    ties = 0
    for a, b in zip(mine, theirs, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), tokens)
        agreed.append(same)
        ties += same < tokens and a.gaps[same] < TIE
    checkpoint, kl = Checkpoint.open(model), []
    for at in range(0, min(len(prompts), FORCED), 8):
        rows = [[*ids, *done.ids] for ids, done in zip(prompts[at : at + 8], mine[at : at + 8], strict=False)]
        steps = plans(rows, 512, 0)
        p, q = (logits(checkpoint, numerics, where, steps) for where in (left, right))
        keep = torch.tensor(
            [
                c.start + i >= len(prompts[at + c.request]) - 1 and c.start + i < len(rows[c.request]) - 1
                for step in steps
                for c in step.chunks
                for i in range(len(c.tokens))
            ]
        )
        kl.append(distance(p[keep], q[keep]).kl)
    whole = [length == tokens for length in agreed]
    count = len(prompts)
    return Agreement(
        prompts=count,
        tokens=tokens,
        equal=sum(whole) / count,
        first=sum(length > 0 for length in agreed) / count,
        length=sum(agreed) / count,
        ties=ties,
        kl=float(torch.cat(kl).mean()),
    )


def text_lines(
    model: str | Path,
    numerics: str,
    left: Place,
    right: Place,
    prompts: Prompts,
    tokens: int,
    folder: Path | None = None,
) -> list[Line]:
    """Without quantisers at most 1 of 100 completions may differ but for ties; with them, beside the noise floor.

    folder  where completions of the left side are kept, or found, as `kept` says.
    """
    mine = kept(folder, model, numerics, left, prompts, tokens)
    theirs = greedy(model, numerics, right, prompts, tokens)
    found = agreement(model, numerics, left, right, prompts, tokens, mine, theirs)
    if not NUMERICS[numerics].quantise:
        return found.lines("", 0.01)
    other = replace_place(left)
    floor = agreement(
        model, numerics, left, other, prompts, tokens, mine, kept(folder, model, numerics, other, prompts, tokens)
    )
    return found.lines("") + floor.lines(f" ({other.name})")


# ---- prompts ---------------------------------------------------------------------------------------------------------


def probe(model: str | Path, lengths: Sequence[int] = (150, 300, 37, 1)) -> list[list[int]]:
    """Seeded token ids of any model, long enough for its window, its top-k and an odd open group."""
    vocabulary = Checkpoint.open(model).config.text.vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def prompts_of(model: str | Path, data: Path, count: int) -> list[list[int]]:
    """The prompts of the first `count` documents of a file of JSON lines, as the model sees them. Raises BenchError."""
    encoder = ChatEncoder(Tokenizer.from_dir(model_dir(model)))
    documents = read_documents(data, count)
    return [list(encoder.encode([{"role": "user", "content": document["prompt"]}]).ids) for document in documents]


# ---- the whole -------------------------------------------------------------------------------------------------------


def compare(
    model: str | Path,
    left: Place,
    right: Place,
    profiles: Sequence[str],
    prompts: Sequence[Sequence[int]],
    progress: Callable[[str], None],
    *,
    chunk: int = 96,
    decode: int = 8,
    texts: Sequence[Sequence[int]] = (),
    tokens: int = 64,
    folder: Path | None = None,
) -> dict[str, list[Line]]:
    """All levels for each profile. progress is told what begins.

    prompts  token ids, brought up side by side in chunks; they need at most 64 blocks of 128 tokens together.
    texts    prompts to continue greedily by `tokens` tokens; none: the level is left out.
    folder   keeps the left side's completions, or has them from an earlier run.
    Raises   CheckpointError, BadField.
    """
    checkpoint = Checkpoint.open(model)
    steps = plans(prompts, chunk, decode)
    found: dict[str, list[Line]] = {}
    for numerics in profiles:
        progress(f"{numerics}: ops")
        lines = op_lines(checkpoint, numerics, left, right, steps)
        progress(f"{numerics}: layers")
        lines += layer_lines(checkpoint, numerics, left, right, steps)
        progress(f"{numerics}: logits")
        lines += logit_lines(checkpoint, numerics, left, right, steps)
        if texts:
            progress(f"{numerics}: text")
            lines += text_lines(model, numerics, left, right, texts, tokens, folder)
        found[numerics] = lines
    return found


def render(found: dict[str, list[Line]], left: Place, right: Place) -> str:
    lines = [f"{left.name} and {right.name}"]
    for numerics, results in found.items():
        lines += ["", f"{numerics:<11}{'':<40}{'cases':>7}{'error':>12}{'bound':>12}"]
        for line in results:
            bound = "" if line.bound is None else f"{line.bound:.2e}"
            mark = "" if line.passed else "  FAILED"
            lines.append(
                f"  {line.level:<8} {line.name:<40}{line.cases:>7}{line.error:>12.3e}{bound:>12}  {line.unit}{mark}"
            )
    return "\n".join(lines)


def passed(found: dict[str, list[Line]]) -> bool:
    return all(line.passed for lines in found.values() for line in lines)
