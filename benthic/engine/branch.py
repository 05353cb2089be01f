"""What the scheduler knows of one completion of a request. No torch."""

from array import array

from benthic.cache.manager import Lease
from benthic.cache.prefix import Key
from benthic.engine.queue import Tenant
from benthic.types import Draw, Miss, Request, SamplingParams, SlotCopy

_MASK = 2**64 - 1


def branch_seed(seed: int, branch: int) -> int:
    """Seed of a branch, [0, 2**63). Branch 0 keeps the request's own, so that asking for more changes no answer."""
    if branch == 0:
        return seed
    x = (seed + branch * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


def _drawn_on_device(params: SamplingParams) -> bool:
    """Can a draw be made without the host, with the last token unknown to it?"""
    edited = params.logit_bias or params.allowed_ids or params.banned_ids
    return not (edited or params.min_tokens or params.logprobs is not None or params.receipt)


class _Often:
    """What each step of a branch reads and writes. Slots of a base stand side by side at an object's beginning: two
    cache lines, where the whole is seven, and between two steps the forward pass takes the caches for itself."""

    __slots__ = (
        "by_host",
        "computed",
        "draw",
        "ended",
        "ends",
        "index",
        "lease",
        "limit",
        "newest",
        "pending",
        "planned",
        "request",
        "steady",
        "tokens",
    )


class Branch(_Often):
    """One completion of a request: its tokens, how many of them the cache holds, and what it holds there."""

    __slots__ = (
        "asked",
        "begun",
        "blocked",
        "cache",
        "checkpoint",
        "copy",
        "cuts",
        "deadline",
        "due",
        "fresh",
        "hit",
        "images",
        "images_end",
        "keys",
        "level",
        "low",
        "marked",
        "miss",
        "mode",
        "order",
        "params",
        "penalised",
        "priority",
        "prompt_tokens",
        "rank",
        "root",
        "scored",
        "seed",
        "since",
        "started",
        "stored",
        "tenant",
        "truncation",
    )

    def __init__(self, request: Request, index: int, order: int, ends: frozenset[int], limit: int):
        params = request.params
        self.request, self.index, self.params = request.id, index, params
        self.priority, self.level, self.order = request.priority, request.priority, order
        self.tenant: Tenant  # set as it is put into the queue, with the next three
        self.since = self.due = self.started = 0.0  # seconds; started: when it last began
        self.deadline = request.deadline
        self.begun = False  # it ran, maybe until it was preempted
        self.rank = (request.priority, order, index)
        self.seed = branch_seed(request.seed, index)
        self.draw = Draw(params, self.seed, (), None, len(request.prompt))  # how its tokens are drawn, most of them
        self.tokens = array("I", request.prompt)  # prompt, then output; in the form of which keys are made
        self.newest: tuple[int, ...] = ()  # the last token, once one was drawn
        self.images = request.images
        self.images_end = max((i.first + i.tokens for i in request.images), default=0)  # only text from here on
        self.prompt_tokens = len(request.prompt)
        self.limit = limit  # it ends when it has so many tokens
        self.ends = ends  # ids that end it
        self.blocked = tuple(sorted(ends)) if params.min_tokens else ()
        self.penalised = (  # its draws need all its tokens
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.computed = 0  # tokens whose state is in the cache
        # prompt tokens whose log-probability is known, or not asked for: the first has none, one branch is enough
        self.scored = 1 if index == 0 and params.prompt_logprobs is not None else self.prompt_tokens
        self.lease: Lease | None = None
        self.planned = 0  # tokens that will be computed once all that is in flight is over
        self.pending = 0  # draws in flight
        self.asked = self.scored  # the same, once all that is in flight is over
        self.ended = False
        self.by_host = self.penalised or not _drawn_on_device(params)
        # what it found in the cache, and how it goes on from there
        self.cache, self.mode, self.truncation = request.cache, "", "off"
        self.root: Key = b""
        self.keys: list[Key] = []  # of its complete blocks, as far as somebody asked
        self.hit = 0  # prompt tokens found when it began
        self.miss: Miss | None = None  # and why not more
        self.low = self.stored = 0  # as in `types.Chunk`
        self.cuts: tuple[tuple[int, int], ...] = ()
        self.marked = 0  # chunks that begin before this position say so
        self.steady = False  # it decodes: all tokens but one are planned, and of the next row nothing else is to say
        self.fresh = False  # its slot does not know the ids before `computed`
        self.copy: SlotCopy | None = None  # where its state comes from, before its first step
        self.checkpoint = 0  # a chunk ends here, so that its state can be kept

    @property
    def length(self) -> int:
        """Tokens, those included that are being drawn."""
        return len(self.tokens) + self.pending

    @property
    def keeps_states(self) -> bool:
        """Are its states kept at the ends of blocks? Only whole ones are: no layer may have skipped what they show."""
        return self.mode == "snapshot" and self.cache.write and self.truncation in ("off", "halo")

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens
