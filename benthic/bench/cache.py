"""The prefix cache: what keys and look-ups cost, what a hit is worth, which blocks to keep, what approximations change.

`keys` and `eviction` need no model. A hit is timed against the same prompt on an empty cache; a trace of agents whose
turns grow is run with the cache and without, by the same engine. Approximate modes are compared with a cold start on
held-out documents: the distribution of the token behind the prompt, and the greedy text that follows.
"""

import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benthic import plots
from benthic.bench import report
from benthic.bench.numerics import answers
from benthic.bench.report import Measure
from benthic.cache import prefix
from benthic.cache.manager import CacheManager
from benthic.cache.replay import Windows
from benthic.config import Config
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.types import MODES, SamplingParams

PARTS = ("keys", "eviction", "hits", "agents", "modes")
LONG_TOKENS = 1_000_000
BLOCK = 128
TOP = 20  # alternatives whose probabilities are compared; what is left is one more


@dataclass(frozen=True, slots=True)
class Options:
    parts: tuple[str, ...] = PARTS
    prompt: int = 4000  # tokens of the prompt that is hit
    repeats: int = 5
    agents: int = 8
    turns: int = 8
    documents: int = 48  # of the comparison of modes
    data: Path | None = None  # held-out documents
    needles: tuple[tuple[str, str], ...] = ()  # prompts that hide a code, and the code
    seed: int = 0


# ---- keys ------------------------------------------------------------------------------------------------------------


def keys(seed: int, tokens: int = LONG_TOKENS) -> list[Measure]:
    """Hashing a prompt as a request holds it and as a list, beside what SHA-256 alone takes for as many bytes; finding
    all of it."""
    rng = random.Random(seed)
    listed = [rng.randrange(129280) for _ in range(tokens)]
    ids, root = array("I", listed), prefix.root(prefix.namespace(b"bench"))
    hashing = [_timed(lambda: prefix.chain(root, ids, BLOCK)) for _ in range(5)]
    reading = [_timed(lambda: prefix.chain(root, listed, BLOCK)) for _ in range(5)]
    chain, content = prefix.chain(root, ids, BLOCK), bytes(len(root) + 4 * BLOCK)
    floor = [_timed(lambda: [sha256(content).digest() for _ in chain]) for _ in range(5)]
    cache = CacheManager(len(chain) + 2, 2, BLOCK, prefix=True)
    lease = cache.open()
    assert lease is not None
    assert cache.grow(lease, tokens)
    cache.publish(lease, chain, 0.0)
    finding = [_timed(lambda: cache.find(chain, 0.0)) for _ in range(5)]
    a_block, of_list, least = ([1e6 * each / len(chain) for each in taken] for taken in (hashing, reading, floor))
    return [
        _measure("hash a block of 128", a_block, "us", target=2.0),
        _measure("hash a block of a list", of_list, "us"),
        _measure("SHA-256 alone", least, "us"),
        _measure(f"look up {tokens} tokens", [1e3 * each for each in finding], "ms", target=20.0),
    ]


# ---- which blocks to keep --------------------------------------------------------------------------------------------


def requests_of_a_day(seed: int, sessions: int = 400, once: int = 2000) -> Iterator[list[int]]:
    """Prompts as block numbers: agents and chats over a few system prompts whose turns grow, and prompts that are
    seen once. A number stands for a block of tokens, equal numbers for equal ones."""
    rng = random.Random(seed)
    fresh = iter(range(10**6, 10**9))
    systems = [[next(fresh) for _ in range(rng.randrange(8, 40))] for _ in range(12)]
    events: list[tuple[float, int]] = []
    lengths: dict[int, list[int]] = {}
    for s in range(sessions):
        system = systems[min(int(rng.expovariate(0.5)), len(systems) - 1)]
        lengths[s] = list(system)
        at = rng.random()
        for _ in range(1 + int(rng.expovariate(1 / 8))):
            events.append((at, s))
            at += rng.expovariate(60.0)
    events += [(rng.random(), -1) for _ in range(once)]
    for _, s in sorted(events):
        if s < 0:
            yield [next(fresh) for _ in range(rng.randrange(4, 60))]
        else:
            lengths[s] += [next(fresh) for _ in range(rng.randrange(1, 9))]
            yield list(lengths[s])


def hit_share(prompts: Sequence[Sequence[int]], eviction: str, blocks: int) -> float:
    """Share of all blocks that were found, in a pool of so many."""
    cache = CacheManager(blocks + 1, 2, 1, prefix=True, eviction=eviction)
    root = prefix.root(prefix.namespace(b"bench"))
    found = asked = 0
    for now, prompt in enumerate(prompts):
        if len(prompt) > blocks:
            continue
        chain = prefix.chain(root, prompt, 1)
        lease = cache.open()
        assert lease is not None
        match = cache.find(chain, float(now))
        cache.attach(lease, match, float(now))
        grown = cache.grow(lease, len(prompt))
        assert grown
        cache.publish(lease, chain, float(now))
        cache.close(lease)
        found, asked = found + len(match.nodes), asked + len(prompt)
    return found / asked


def eviction(seed: int) -> list[Measure]:
    """Hit shares of both orders over pools of different sizes, beside what a pool without limit finds."""
    prompts = list(requests_of_a_day(seed))
    measures: list[Measure] = []
    for blocks in (500, 1000, 2000, 4000, 8000, 200_000):
        for name in ("lru", "s3-fifo"):
            share = hit_share(prompts, name, blocks)
            measures.append({"name": f"hits, {blocks} blocks, {name}", "value": share, "unit": "share"})
    return measures


# ---- what a hit is worth ---------------------------------------------------------------------------------------------


def hits(config: Config, options: Options, say: Callable[[str], None]) -> list[Measure]:
    """Time to first token of a prompt that is cached but for its end, in every mode, over the same prompt cold."""
    measures: list[Measure] = []
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for mode in MODES:
        say(f"hits, {mode}")
        rng = random.Random(options.seed)
        with LLM(config=_with(config, mode=mode)) as llm:
            cold, warm, words = [], [], _words(llm)
            for _ in range(options.repeats):
                ids, fresh = rng.choices(words, k=options.prompt), options.prompt % BLOCK or BLOCK
                cold.append(_ttft(llm, ids, one))
                ids[-fresh:] = rng.choices(words, k=fresh)
                warm.append(_ttft(llm, ids, one))
        measures += [
            _measure(f"{options.prompt} tokens cold, {mode}", [1e3 * each for each in cold], "ms"),
            _measure(f"{options.prompt} tokens hit, {mode}", [1e3 * each for each in warm], "ms"),
            _measure(f"hit over cold, {mode}", [w / c for w, c in zip(warm, cold, strict=True)], "ratio", target=0.15),
        ]
    return measures


def _words(llm: LLM) -> list[int]:
    """Ids that prompts are made of: all but the first few and the image token."""
    return [token for token in range(3, llm.model.vocab_size) if token != llm.model.image_token_id]


def _ttft(llm: LLM, ids: list[int], params: SamplingParams) -> float:
    return llm.generate([ids], params, progress=False)[0].timing.ttft_seconds


def agents(config: Config, options: Options, say: Callable[[str], None]) -> list[Measure]:
    """Agents over one system prompt, a turn at a time each, all at once: seconds with the cache and without."""
    spent: dict[bool, float] = {}
    hit = prompt_tokens = 0
    for cached in (False, True):
        say(f"agents, cache {'on' if cached else 'off'}")
        rng = random.Random(options.seed)
        with LLM(config=_with(config, prefix=cached)) as llm:
            words = _words(llm)
            system = rng.choices(words, k=640)
            contexts = [list(system) for _ in range(options.agents)]
            begun = perf_counter()
            for _ in range(options.turns):
                for context in contexts:
                    context += rng.choices(words, k=rng.randrange(40, 200))
                params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
                for context, done in zip(contexts, llm.generate(contexts, params, progress=False), strict=True):
                    context += done.token_ids
                    if cached:
                        hit += done.usage.cached_tokens
                        prompt_tokens += done.usage.prompt_tokens
            spent[cached] = perf_counter() - begun
    tokens = options.agents * options.turns * 16
    return [
        {"name": "agents, cache off", "value": tokens / spent[False], "unit": "tokens/s"},
        {"name": "agents, cache on", "value": tokens / spent[True], "unit": "tokens/s"},
        {
            "name": "agents, on over off",
            "value": spent[False] / spent[True],
            "unit": "ratio",
            "target": 3.0,
            "better": "more",
        },
        {"name": "agents, prompt tokens found", "value": hit / max(prompt_tokens, 1), "unit": "share"},
    ]


# ---- what approximations change --------------------------------------------------------------------------------------

WAYS = (("snapshot", "halo"), ("exact", "halo"), ("exact", "off"), ("replay", "halo"), ("replay", "compact"))


def modes(config: Config, options: Options, say: Callable[[str], None]) -> list[Measure]:
    """Every way to answer behind a hit against a cold engine that computes everything.

    A document's first part is put into the cache, then the whole is asked: the distribution of the next token (its
    best, in nats), and 32 greedy tokens. Bits per byte rise by the divergence where the text is what the cold engine
    expects. Needle prompts are cut before the question.
    """
    if options.data is None:
        raise BenchError("modes", "needs held-out documents: --data FILE")
    from benthic.bench.eval.documents import read_documents  # at this place: it brings the prompt library

    measures: list[Measure] = []
    params = SamplingParams(temperature=0.0, max_tokens=32, logprobs=TOP, ignore_eos=True)
    texts = [document.response for document in islice(read_documents(options.data), 4 * options.documents)]
    with LLM(config=_with(config, prefix=False, truncation="off")) as llm:
        assert llm.tokenizer is not None
        joined = [" ".join(texts[4 * i : 4 * i + 4]) for i in range(options.documents)]
        ids_of = {text: llm.tokenizer.encode(text) for text in joined}
        windows: Windows = llm.model.windows
        least = windows.reach_storing + windows.reach_others + 2 * BLOCK
        chosen = [text for text in joined if len(ids_of[text]) >= least]
        prompts = [ids_of[text] for text in chosen]
        token_bytes = sum(len(text.encode()) for text in chosen) / max(sum(map(len, prompts)), 1)
        if not prompts:
            raise BenchError("modes", f"no four documents together have the {least} tokens that tell modes apart")
        say(f"modes, cold, {len(prompts)} prompts")
        cold = llm.generate(prompts, params, progress=False)
        if options.needles:
            right = answers(llm, options.needles)
            measures.append(_measure(f"cold: needles of {len(options.needles)} found", [right], "share"))
    for mode, truncation in WAYS:
        say(f"modes, {mode}, {truncation}")
        with LLM(config=_with(config, mode=mode, truncation=truncation, kept_rows=windows.tokens + 12)) as llm:
            llm.generate([ids[: len(ids) - 40] for ids in prompts], replace(params, max_tokens=1), progress=False)
            warm = llm.generate(prompts, params, progress=False)
            right = answers(llm, options.needles, asked_before=40) if options.needles else None
        apart = [_divergence(w.logprobs[0].top, c.logprobs[0].top) for w, c in zip(warm, cold, strict=True)]
        agreed = [_agreed(w.token_ids, c.token_ids) for w, c in zip(warm, cold, strict=True)]
        hit = sum(done.usage.cached_tokens for done in warm) / sum(map(len, prompts))
        kl = sum(apart) / len(apart)
        values = [
            ("KL of the next token", kl, "nats"),
            ("bits per byte it adds", kl / math.log(2) / token_bytes, "bits/byte"),
            ("same first token", sum(n > 0 for n in agreed) / len(agreed), "share"),
            ("greedy tokens alike of 32", sum(agreed) / len(agreed), "tokens"),
            ("tokens found", hit, "share"),
        ]
        if right is not None:
            values.append((f"needles of {len(options.needles)} found", right, "share"))
        measures += [_measure(f"{mode}, {truncation}: {what}", [value], unit) for what, value, unit in values]
    return measures


def _divergence(got: Sequence[tuple[int, float]], want: Sequence[tuple[int, float]]) -> float:
    """KL(want | got) over want's listed tokens and one for all others, nats. A token that got does not list counts as
    its least likely listed one."""
    known = dict(got)
    floor = min(known.values())
    rest_want = max(1.0 - math.fsum(math.exp(p) for _, p in want), 1e-9)
    rest_got = max(1.0 - math.fsum(math.exp(known.get(token, floor)) for token, _ in want), 1e-9)
    total = math.fsum(math.exp(p) * (p - known.get(token, floor)) for token, p in want)
    return max(total + rest_want * math.log(rest_want / rest_got), 0.0)


def _agreed(got: Sequence[int], want: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))


# ---- the run ---------------------------------------------------------------------------------------------------------


def run(config: Config, options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The report, ready for `report.save`."""
    found = report.header(
        "cache", options.seed, {"model": str(config.model), "numerics": config.numerics, "device": config.device}
    )
    measures: list[Measure] = []
    for part in options.parts:
        say(part)
        if part == "keys":
            measures += keys(options.seed)
        elif part == "eviction":
            measures += eviction(options.seed)
        else:
            measures += {"hits": hits, "agents": agents, "modes": modes}[part](config, options, say)
    return found | {"versions": report.versions(), "measures": measures}


def plot_eviction(measures: Sequence[Measure], path: Path) -> None:
    """Hit share over the size of the pool, a line an order."""
    pyplot = plots.pyplot()
    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in ("lru", "s3-fifo"):
        points = [
            (int(m["name"].split()[1]), m["value"])
            for m in measures
            if m["name"].startswith("hits, ") and name in m["name"]
        ]
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set(xscale="log", xlabel="blocks in the pool", ylabel="share of prompt blocks found", ylim=(0, 1))
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _with(config: Config, **changes: object) -> Config:
    return replace(config, cache=replace(config.cache, **changes))  # type: ignore[arg-type]


def _timed(run: Callable[[], object]) -> float:
    begun = perf_counter()
    run()
    return perf_counter() - begun


def _measure(name: str, samples: list[float], unit: str, target: float | None = None) -> Measure:
    measure: Measure = {"name": name, "value": median(samples), "unit": unit, "samples": samples}
    if target is not None:
        measure["target"], measure["better"] = target, "less"
    return measure
