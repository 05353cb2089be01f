"""Two places that should compute the same: op by op, sublayer by sublayer, layer by layer, logits, and greedy text.

A place is a device, or a device with another set of kernels: `cpu`, `cuda`, `cuda:1`, `cpu:reference`. All levels but
the last two feed both sides the same inputs, taken from the left one, so an error shows where it is made. What rounding
does end to end in the quantised profiles is chaotic (model specification, 6.4): there the distance is reported beside
the noise floor, the left side against itself with its sums in another order.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benthic.bench.eval.documents import read_documents
from benthic.cache.spec import blocks_for
from benthic.cache.storage import Storage
from benthic.engine import batch as batches
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.kernels import backends, hyper, moe_experts, moe_gate, quant
from benthic.models.base import Batch
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.modules import packed_weights
from benthic.models.registry import model_dir
from benthic.models.weights import Checkpoint
from benthic.testing import layers
from benthic.testing.ops import Finding, Line, Place, findings, moved, moved_options, unit, watching
from benthic.testing.tolerances import MOVED_ROW, SUMS, regridded
from benthic.text.prompt import ChatEncoder
from benthic.text.tokenizer import Tokenizer
from benthic.types import NUMERICS, Chunk, Numerics, SamplingParams, StepPlan

LOGITS = 1e-4  # most absolute difference of logits without quantisers
NEAR = 2e-6  # of a router's scores, which are around 1: ten times what layers of devices differ by in float32
LAYER = 2.0**-8  # most median relative difference of a layer's streams where activations are bfloat16
LAYER_FLOAT = 1e-5
LAYER_FP8 = regridded(SUMS, 3)  # and where a matrix unit adds up FP8 products: a sublayer has three grids in a row
LAYER_CHUNK = 12  # rows of a request in a step of the layers' comparison
BLOCKS = 64  # of the pool, at least
LEVELS = ("op", "layer", "logits", "text")  # of a comparison, from where an error is made to what a user sees


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


def plans(prompts: Sequence[Sequence[int]], chunk: int, decode: int) -> Sequence[StepPlan]:
    """Steps that bring up the prompts in chunks, side by side, the last `decode` tokens of each one by one."""
    used = sum(blocks_for(len(ids)) for ids in prompts)
    assert used <= BLOCKS, f"the prompts need {used} blocks, {BLOCKS} are there"
    return layers.plans(prompts, chunk, decode)


# ---- ops -------------------------------------------------------------------------------------------------------------


def op_lines(checkpoint: Checkpoint, numerics: str, left: Place, right: Place, steps: Sequence[StepPlan]) -> list[Line]:
    """Each op on the inputs it has in a run of the left side: the left result against the right one."""
    worst: dict[str, list[Finding]] = {}
    side = Side(checkpoint, numerics, left, max(len(step.chunks) for step in steps))

    def around(name: str, op: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name == "experts":
            mine, theirs = (
                (*moved(args[:3], w.device), *side.experts.at(w, *args[3:5]), *args[5:]) for w in (left, right)
            )
        else:
            mine, theirs = moved(args, left.device), moved(args, right.device)
        with left():
            want = op(*mine, **options)
        with right():
            got = op(*theirs, **moved_options(options, right.device))
        for found in findings(name, args, mine, theirs, want, got):
            worst.setdefault(found.name, []).append(found)
        return op(*args, **options)

    with left(), watching(around):
        _run(side, steps)
    return [line for name, found in worst.items() for line in _op_lines(name, found)]


def _op_lines(name: str, found: Sequence[Finding]) -> Iterator[Line]:
    """Of the worst call. Where all rows are taken together, of all calls, and of the worst one what a single row may
    have: a code that moves in one large value is seen in the mean of a hundred narrow rows, and is no other kernel."""
    most, bound = max(f.error for f in found), max(f.bound for f in found)
    if name.endswith("all rows"):
        together = math.sqrt(sum(f.error**2 for f in found) / len(found))
        yield Line("op", name, len(found), together, bound, unit(name))
        name, bound = f"{name}, one call", MOVED_ROW
    yield Line("op", name, len(found), most, bound, unit(name))


def _run(side: Side, steps: Sequence[StepPlan]) -> None:
    for plan in steps:
        step = side.uploads.step(plan)
        side.model.forward(step.batch, side.model.memory(side.storage, step.batch))
        batches.finish(step, side.storage, None)


# ---- layers and logits -----------------------------------------------------------------------------------------------


def layer_lines(
    checkpoint: Checkpoint, numerics: str, left: Place, right: Place, steps: Sequence[StepPlan]
) -> list[Line]:
    """Each layer, both sides fed with the left side's streams and, at each step's begin, its cache.

    Within a step each side reads what it has stored itself: a value that takes another code moves all rows behind it
    that see it, so steps should be short (`LAYER_CHUNK`). Short steps cut a row's attention into spans, each of which
    rounds probabilities, where the profile rounds them, against a maximum of its own: one unit in the last place of a
    third of the outputs, which is more than this bound on layers. There both sides compute as in `deterministic` mode,
    whole rows.
    """
    count = max(len(step.chunks) for step in steps)
    a, b = (Side(checkpoint, numerics, where, count) for where in (left, right))
    profile, gpu = NUMERICS[numerics], "cuda" in (left.device.type, right.device.type)
    bound = LAYER_FP8 if profile.one_scale and gpu else LAYER if profile.quantise else LAYER_FLOAT
    whole = partial(backends.invariant, profile.round_probs)
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
            with left(), whole():
                if streams is None:
                    streams = _entry(a.model, at.batch)
                ngrams = a.model.ngrams(at.batch)
                entered = mine.recall(streams, ngrams, None, None)
                want, kept = mine(entered, at.batch, here.layer(i), shared)
                settled = hyper.settle(want)
            with right(), whole():
                entered = theirs.recall(moved(streams, right.device), b.model.ngrams(bt.batch), None, None)
                got, _ = theirs(entered, bt.batch, there.layer(i), moved(shared, right.device))
                other = hyper.settle(got).to(cpu)
            errors.setdefault(f"layer {i}", []).append(_relative(other, settled.to(cpu)))
            streams, shared = want, kept
        with left():
            batches.finish(at, a.storage, None)
        with right():
            batches.finish(bt, b.storage, None)
            for ours, others in zip(_cached(a.storage), _cached(b.storage), strict=True):
                others.copy_(ours)
    return [
        Line("layer", name, sum(len(e) for e in found), float(torch.cat(found).median()), bound, "median relative")
        for name, found in errors.items()
    ]


def _cached(storage: Storage) -> list[Tensor]:
    """All that layers keep for later steps."""
    return [storage.pool, *storage.rings.values(), *storage.carry.values()]


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


def behind_ties(checkpoint: Checkpoint, numerics: str, where: Place, steps: Sequence[StepPlan]) -> Tensor:
    """[R] bool of the rows that `logits` has: in the row, or in one before it that it may have read, a router's choice
    was so near that rounding decides. Another expert there is another result, by 1 and more."""
    side = Side(checkpoint, numerics, where, max(len(step.chunks) for step in steps))
    near: list[list[Tensor]] = []  # of each step, of each layer, [T]

    def around(name: str, op: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name == "route":
            near[-1].append((moe_gate.lead(*args[:4]) < NEAR).cpu())
        return op(*args, **options)

    first: dict[int, int] = {}  # position of a request's first tie
    with where(), watching(around):
        for plan in steps:
            near.append([])
            _run(side, [plan])
            tied = torch.stack(near[-1]).any(0).tolist()
            for chunk, at in _places(plan):
                if tied.pop(0):
                    first[chunk.request] = min(at, first.get(chunk.request, at))
    return torch.tensor([at >= first.get(c.request, at + 1) for plan in steps for c, at in _places(plan)])


def _places(plan: StepPlan) -> Iterator[tuple[Chunk, int]]:
    """Chunk and position of each row."""
    return ((chunk, chunk.start + i) for chunk in plan.chunks for i in range(len(chunk.tokens)))


def logit_lines(
    checkpoint: Checkpoint, numerics: str, left: Place, right: Place, steps: Sequence[StepPlan]
) -> list[Line]:
    """End to end. Without quantisers a bound; with them the distance and, where there is one, the noise floor."""
    mine = logits(checkpoint, numerics, left, steps)
    found = distance(mine, logits(checkpoint, numerics, right, steps))
    rows = len(found.largest)
    if not NUMERICS[numerics].quantise:
        behind = behind_ties(checkpoint, numerics, left, steps)
        top = found.largest[~behind].quantile(0.99) if not bool(behind.all()) else torch.inf
        return [
            Line("logits", "99 of 100 rows", rows - int(behind.sum()), float(top), LOGITS, "absolute"),
            Line("logits", "left out: behind a tie", rows, float(behind.sum()), None, "rows"),
            Line("logits", "largest, ties included", rows, float(found.largest.max()), None, "absolute"),
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
    """Without quantisers at most 1 of 100 completions may differ but for ties; with them, beside the noise floor, which
    is that of the first FORCED prompts: its other side is the slow one.

    folder  where completions of the left side are kept, or found, as `kept` says.
    """
    mine = kept(folder, model, numerics, left, prompts, tokens)
    theirs = greedy(model, numerics, right, prompts, tokens)
    found = agreement(model, numerics, left, right, prompts, tokens, mine, theirs)
    if not NUMERICS[numerics].quantise:
        return found.lines("", 0.01)
    other, few = replace_place(left), prompts[:FORCED]
    plain = kept(folder, model, numerics, other, few, tokens)
    floor = agreement(model, numerics, left, other, few, tokens, mine[:FORCED], plain)
    return found.lines("") + floor.lines(f" ({other.name})")


# ---- prompts ---------------------------------------------------------------------------------------------------------


def probe(model: str | Path, lengths: Sequence[int] = (150, 300, 37, 1)) -> list[list[int]]:
    """Seeded token ids of any model, long enough for its window, its top-k and an odd open group.

    The seed is one with which no row of the packaged model, nor of the two tiny ones, is behind a tie.
    """
    vocabulary = Checkpoint.open(model).config.text.vocab_size
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def prompts_of(model: str | Path, data: Path, count: int) -> list[list[int]]:
    """The prompts of the first `count` documents of a file of JSON lines, as the model sees them. Raises BenchError."""
    encoder = ChatEncoder(Tokenizer.from_dir(model_dir(model)))
    documents = read_documents(data, count)
    return [list(encoder.encode([{"role": "user", "content": document.prompt}]).ids) for document in documents]


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
    levels: Collection[str] = LEVELS,
) -> dict[str, list[Line]]:
    """Some of LEVELS for each profile. progress is told what begins.

    prompts  token ids, brought up side by side in chunks; they need at most 64 blocks of 128 tokens together.
    texts    prompts to continue greedily by `tokens` tokens; none: the level is left out.
    folder   keeps the left side's completions, or has them from an earlier run.
    Raises   CheckpointError, BadField.
    """
    checkpoint = Checkpoint.open(model)
    steps, short = plans(prompts, chunk, decode), plans(prompts, LAYER_CHUNK, decode)
    found: dict[str, list[Line]] = {}
    for numerics in profiles:
        lines: list[Line] = []
        for level, of, those in (
            ("op", op_lines, steps),
            ("layer", layer_lines, short),
            ("logits", logit_lines, steps),
        ):
            if level in levels:
                progress(f"{numerics}: {level}")
                lines += of(checkpoint, numerics, left, right, those)
        if texts and "text" in levels:
            progress(f"{numerics}: text")
            lines += text_lines(model, numerics, left, right, texts, tokens, folder)
        found[numerics] = lines
    return found


def render(found: dict[str, list[Line]], left: Place, right: Place) -> str:
    lines = [f"{left.name} and {right.name}"]
    for numerics, results in found.items():
        lines += ["", table(numerics, results)]
    return "\n".join(lines)


def table(name: str, results: Sequence[Line]) -> str:
    lines = [f"{name:<11}{'':<40}{'cases':>7}{'error':>12}{'bound':>12}"]
    for line in results:
        bound = "" if line.bound is None else f"{line.bound:.2e}"
        mark = "" if line.passed else "  FAILED"
        lines.append(
            f"  {line.level:<8} {line.name:<40}{line.cases:>7}{line.error:>12.3e}{bound:>12}  {line.unit}{mark}"
        )
    return "\n".join(lines)


def passed(found: dict[str, list[Line]]) -> bool:
    return all(line.passed for lines in found.values() for line in lines)
