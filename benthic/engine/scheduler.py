"""Waiting and running requests -> StepPlan; StepResult -> TokenEvents. No torch, no clock.

A step may be planned while the one before it runs. What that one draws is not known yet: the token is PENDING in the
plan, and the device fills it in. A sequence whose next draw needs the token on the host (penalties, masks of its own),
or that ends with it by length, sits the step out. What a step computes for a sequence that turns out to have ended is
dropped. A sequence's `planned` tokens are ahead of its `computed` ones by what is in flight.

How a step is filled, in this order, until the token budget is used:
1. every running sequence that has one token to compute (decode), best rank first;
2. of those that have more (prefill, or recompute after a preemption) the first in the order of `engine/queue.py`: what
   completes it, or half of what is left;
3. the others of them, those with the fewest tokens left first, likewise;
4. waiting sequences, in the order of the queue; the first that does not fit stops the search, so none is overtaken for
   ever. Those that have more to compute than an incomplete first of 2. are passed over until that one is done;
5. the first of 2. again.
So a long prompt holds up nobody for long, and nobody holds it up by more than as much again.

Rank is (level when it began, arrival, branch): who gives way when memory is short.

Beside decode rows, prompts get as many rows as keep the step within its latency target, as the cost model tells
(`engine/cost.py`), but never fewer than a floor, so that they go on whatever the target is. Without decode rows the
token budget is the only limit. Where more prompts come than the target leaves time for, they would wait ever longer; so
a prompt that takes too long makes the target give way, unless slots or blocks were what it waited for.

When a running sequence needs a block and none is free, a running sequence of a worse rank is preempted, one of the
worst level: among these the one that costs least to compute again for each block that it frees; blocks that others
hold too are neither freed nor lost. It gives its blocks and slot back and waits again, with all its tokens; what it
published stays cached as long as nobody needs the room, and it goes on behind that. A sequence without worse ones
gives way itself. Since the best-ranked running sequence is never the victim of another, it always finishes. Draws
depend on seed and position only, so a preempted sequence goes on as if nothing had happened.

A waiting sequence is admitted when the pool holds all its tokens, all that running prefills still need, and one block
for each sequence that may grow; when nobody holds any, it is admitted at once.

It begins behind the longest prefix that is cached (`cache/prefix.py`), some tokens earlier than that, for its windows
(`cache/replay.py`). Where a running sequence is computing the next block it could have found, it waits for that, and
others may pass. Branches of one request share its prompt: as soon as one has computed it, the others go on from a copy
of its state.

Images. A plan names the requests whose image rows have to be made in its step, all that a request still has to compute
at once, before the first of them is computed. The rows stay while a running sequence of the request has image tokens to
compute; the next plan says that they are over. A preempted sequence has its rows made again. Since rows belong to
running sequences alone, `image_tokens` bounds them, and whoever waits for room gets it once those have gone on to text.
"""

import heapq
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from benthic.cache import prefix
from benthic.cache.manager import CacheManager, Lease, Match, Pin
from benthic.cache.prefix import Key
from benthic.cache.replay import Windows
from benthic.engine.branch import Branch
from benthic.engine.cost import CostModel, Shape
from benthic.engine.queue import Queue
from benthic.errors import (
    BadField,
    BenthicError,
    CapacityError,
    DeadlinePassed,
    EmptyPrompt,
    PromptTooLong,
    RequestError,
    TokenOutOfRange,
)
from benthic.types import (
    MODES,
    PENDING,
    TRUNCATIONS,
    Abort,
    CacheOptions,
    Chunk,
    Draw,
    FinishReason,
    ImageInput,
    Miss,
    Request,
    Score,
    SlotCopy,
    StepPlan,
    StepResult,
    TokenEvent,
    Usage,
)

_UNKNOWN = (PENDING,)  # ids of a row whose token is being drawn
MOST_IN_FLIGHT = 2  # one runs, one waits behind it
_PROMPT_SECONDS = 2.0  # that any prompt may take
_LONG_PASSED = 16  # waiting prompts that a step looks at in vain because a shorter one is under way
HISTORY_IDS = 16  # ids before a sequence's first row that a model may want to know


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """How the engine treats cached prefixes: its model's windows, and the defaults of `types.CacheOptions`."""

    windows: Windows
    namespace: bytes = b""
    mode: str = "replay"
    truncation: str = "halo"
    replay_rows: int = 0  # 0: one window
    kept_rows: int = 0  # of truncations "compact" and "mask"; 0: one window

    def root(self, salt: str, mode: str) -> Key:
        """Blocks behind an approximate replay are found only by those who accept one."""
        kind = b"replayed" if mode == "replay" else b"exact"
        return prefix.root(prefix.namespace(self.namespace, kind), salt.encode())


def _images_in(images: Sequence[ImageInput], size: int, first: int, block: int) -> bytes:
    """What else than ids decides what block `first + block` of `size` tokens holds: the images whose spans reach it."""
    start = (first + block) * size
    there = [i for i in images if i.first < start + size and i.first + i.tokens > start]
    if not there:
        return b""
    parts = [part for i in there for part in (i.digest.encode(), f"{i.first - start} {i.tokens}".encode())]
    return prefix.namespace(*parts)


class _Flight(NamedTuple):
    """A step that runs."""

    step: int
    # of each chunk; the plan says the same, but a step later its records are in no cache any more
    branches: list[Branch]
    shapes: list[tuple[int, bool]] | None  # tokens, and is one drawn; None: each has one, and draws one
    saved: list[tuple[Branch, int, int]]  # branch, tokens before the state, slot it is saved to
    images: list[int]  # requests whose image rows it makes
    lost: set[Branch]  # preempted since: what it computes for them does not count


class _Room:
    """What a step may still take on: rows, and seconds that rows of prompts may add to it."""

    __slots__ = ("floor", "seconds", "tokens")

    def __init__(self, tokens: int, seconds: float = math.inf, floor: int = 0):
        self.tokens, self.seconds, self.floor = tokens, seconds, floor

    def half(self) -> "_Room":
        return _Room(self.tokens - self.tokens // 2, self.seconds / 2, self.floor - self.floor // 2)

    def take(self, count: int, seconds: float) -> None:
        self.tokens -= count
        self.floor -= count
        self.seconds -= seconds


class Scheduler:
    """Continuous batching: prefill chunks and decode rows in one step under one token budget."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        token_budget: int,
        max_context_tokens: int,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        image_tokens: int = 131072,
        prefixes: Prefixes | None = None,
        cost: CostModel | None = None,
        itl_seconds: float = 0.0,
        itl_stretch: float = 0.0,
        prefill_floor: int = 16,
        grid: int = 1,
        prompt_slowdown: float = 0.0,
        patience: float = 30.0,
    ):
        """As many sequences run as the cache has slots.

        token_budget        most rows in one step; at least one for each slot, so that no decode row waits.
        max_context_tokens  most tokens the model reads of one sequence. The token drawn after the last of them may
                            still be delivered; then the sequence ends with LENGTH.
        image_tokens        most image rows that are kept at a time, over all requests.
        cost                what steps cost; None: not known, and no step is cut short for its time.
        itl_seconds         a step with decode rows takes no longer, as far as that depends on rows of prompts; 0: no
                            longer than `itl_stretch` times what it takes without them; both 0: no such limit.
        prefill_floor       rows of prompts that a step takes all the same.
        prompt_slowdown     a prompt may take so many times what it takes alone, and 2 s; while one takes longer, the
                            target of a step grows in proportion. 0: it does not.
        grid                chunks that do not end their prompt end at multiples of this position, where that leaves
                            them a row; else of half of it, and so on. A power of two.
        patience            seconds of waiting that make up for one step of priority, see `engine/queue.py`.
        """
        if token_budget < cache.slots.usable:
            raise BadField(
                "scheduler.token_budget", token_budget, f"at least scheduler.max_running, {cache.slots.usable}"
            )
        self.cache, self.token_budget, self.vocab_size = cache, token_budget, vocab_size
        self.max_context_tokens, self.image_tokens = max_context_tokens, image_tokens
        self.eos_ids = frozenset(eos_ids)
        self.prefixes = prefixes
        self.cost = cost or CostModel()
        self.itl_seconds, self.itl_stretch = itl_seconds, itl_stretch
        self.prefill_floor, self.prompt_slowdown, self.grid = prefill_floor, prompt_slowdown, grid
        self.now = 0.0  # seconds on the loop's clock, set before each step
        self._full_at = -math.inf  # when somebody last waited for a slot or for blocks
        self.running: list[Branch] = []  # best rank first
        self.preemptions = 0
        self.planned_tokens = 0  # of the step planned last
        self.queue: Queue[Branch] = Queue(patience)
        self._deadlines: list[tuple[float, int, int, Branch]] = []  # a heap
        self._live: dict[int, list[Branch]] = {}  # request id -> branches that have not ended
        self._flights: deque[_Flight] = deque()  # steps that run, oldest first
        self._parked: list[Branch] = []  # ended ones whose state their siblings want
        self._events: list[TokenEvent] = []  # to go out with the next commit
        self._rows_of: dict[int, int] = {}  # requests whose image rows the runner keeps -> of how many images, the last
        self._rows_over: set[int] = set()  # of failed steps: whether the runner keeps theirs is not known
        self._order = 0
        self._step = 0

    # ---- requests in -------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Branches that have not ended."""
        return len(self.running) + len(self.queue)

    @property
    def in_flight(self) -> int:
        """Steps that were planned and not committed or discarded."""
        return len(self._flights)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def has_news(self) -> bool:
        """Are there events that the next commit sends, step or no step?"""
        return bool(self._events)

    def check(self, request: Request) -> None:
        """Can this request ever be served? Raises the RequestError that says why not."""
        prompt, params = request.prompt, request.params
        params.validate(self.vocab_size)
        if request.id in self._live:
            raise BadField("id", request.id, "an id that no unfinished request has")
        if not prompt:
            raise EmptyPrompt
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            at = next(i for i, token in enumerate(prompt) if not 0 <= token < self.vocab_size)
            raise TokenOutOfRange(f"prompt[{at}]", prompt[at], self.vocab_size)
        if len(prompt) > self.max_context_tokens:
            raise PromptTooLong(len(prompt), self.max_context_tokens)
        end = 0
        for i, image in enumerate(request.images):
            if image.tokens < 1 or not end <= image.first <= len(prompt) - image.tokens:
                span = f"{image.tokens} tokens from {image.first} on"
                raise BadField(f"images[{i}]", span, f"a span within [{end}, {len(prompt)})")
            end = image.first + image.tokens
        if request.image_tokens > self.image_tokens:
            raise CapacityError("image tokens", request.image_tokens, self.image_tokens, "scheduler.image_tokens")
        most = min(len(prompt) + params.max_tokens - 1, self.max_context_tokens)  # the last token is not computed
        options = request.cache
        if options.mode not in (None, *MODES):
            raise BadField("cache.mode", options.mode, f"one of {', '.join(MODES)}")
        if options.truncation not in (None, *TRUNCATIONS):
            raise BadField("cache.truncation", options.truncation, f"one of {', '.join(TRUNCATIONS)}")
        need = self.cache.blocks_for(most)
        if need > self.cache.blocks.usable:
            raise CapacityError("cache blocks", need, self.cache.blocks.usable, "cache.blocks or cache.bytes")

    def admit(self, messages: Iterable[Request | Abort]) -> None:
        """Take new requests and aborts. A request that can never run ends at once, with its error as its event."""
        for message in messages:
            if isinstance(message, Abort):
                self.abort(message.request, message.branch, message.reason)
                continue
            try:
                self.check(message)
            except RequestError as error:
                usage = Usage(len(message.prompt), 0)
                branches = message.params.n if message.params.n in range(1, 129) else 1
                self._events += [TokenEvent(message.id, i, error=error, usage=usage) for i in range(branches)]
                continue
            self._enqueue(message)

    def abort(self, request: int, branch: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, or one branch, now: also between two chunks, while waiting, or while its step runs."""
        for b in list(self._live.get(request, ())):
            if branch is None or b.index == branch:
                self._end(b, reason=reason)

    def pin(self, ids: Sequence[int], options: CacheOptions, seconds: float) -> Pin | None:
        """Keep what is cached of `ids` for so long, or until `unpin`. None: no prefixes are kept."""
        if self.prefixes is None or self.cache.prefix is None:
            return None
        root = self.prefixes.root(options.salt, options.mode or self.prefixes.mode)
        keys = prefix.chain(root, ids, self.cache.block_tokens)
        return self.cache.pin(keys, self.now, self.now + seconds)

    def unpin(self, pin: Pin | None) -> None:
        if pin is not None:
            self.cache.unpin(pin)

    def take_news(self) -> list[TokenEvent]:
        """Events that need no step to be known: refusals and aborts. Otherwise the next commit brings them."""
        events, self._events = self._events, []
        return events

    # ---- a step ------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the next step. Of the plans in flight, each is committed or discarded before the next but one."""
        assert len(self._flights) < MOST_IN_FLIGHT, f"{len(self._flights)} steps are still running"
        self.cache.tick(self.now)
        if self._deadlines and self._deadlines[0][0] <= self.now:
            self._refuse_late()
        rows: dict[Branch, int] = {}  # in the order of the step
        prefills: list[Branch] = []
        grow, preempted = self.cache.grow, self.preemptions
        for b in tuple(self.running):
            lease, after = b.lease, b.planned + 1
            if lease is None:
                continue  # preempted for a better one a moment ago
            length = after if b.steady else b.length
            if b.pending and (b.by_host or length >= b.limit):
                continue
            if length > after:
                prefills.append(b)
            elif length <= lease.capacity or grow(lease, length) or self._make_room(b, length, rows):
                rows[b] = 1
        if self.queue and not self.cache.slots.free:
            self._full_at = self.now
        if prefills or self.queue:
            self._add_prompts(rows, prefills, self._room(rows, prefills), preempted)
        return self._plan_of(rows)

    def plan_over(self) -> StepPlan | None:
        """A step that computes nothing and lets go of image rows; None: there are none to let go of."""
        over = self._take_over()
        return StepPlan(self._step, (), (), (), over) if over else None

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Advance every branch of the step by what it computed, end those that are done, and say what happened.

        The plan is the oldest one in flight. One without chunks is not in flight.
        """
        events, self._events = self._events, []
        if not plan.chunks:
            return events
        flight = self._flights.popleft()
        assert flight.step == plan.step, f"step {plan.step} is not the oldest in flight, {flight.step} is"
        tokens, failures, logprobs, scores = result.tokens, result.failures, result.logprobs, result.scores
        digests, size, draw = result.digests, self.cache.block_tokens, -1
        plain = not (failures or logprobs or scores or digests)  # tokens, and nothing else
        lost, new_event = flight.lost, TokenEvent.__new__  # called directly, it takes two thirds of the time
        shapes = flight.shapes
        for i, b in enumerate(flight.branches):
            count, sample = (1, True) if shapes is None else shapes[i]
            draw += sample
            if lost and b in lost:
                continue  # it will compute this again
            b.pending -= sample
            if b.ended:
                if not self._flies(b):
                    self._release(b)
                continue
            if sample and not plain and draw in failures:  # nobody is to go on from what this step left of it
                self._end(b, error=failures[draw])
                events.append(self._events.pop())
                continue
            b.computed = computed = b.computed + count
            if computed % size < count:
                self._publish(b)
            prompt_logprobs = () if plain else scores.get(i, ())
            if prompt_logprobs:
                b.scored += len(prompt_logprobs)
            if not sample:
                if prompt_logprobs:
                    events.append(TokenEvent(b.request, b.index, prompt_logprobs=prompt_logprobs))
                continue
            token = tokens[draw]
            b.tokens.append(token)
            b.newest = newest = (token,)
            finish = None
            if token in b.ends:
                finish = FinishReason.STOP
            elif computed + 1 >= b.limit:
                finish = FinishReason.LENGTH
            if plain and finish is None:
                events.append(new_event(TokenEvent, b.request, b.index, newest))
                continue
            usage = None
            if finish is not None:
                usage = self._usage(b)
                self._forget(b)
            new = (logprobs[draw],) if draw in logprobs else ()
            bits = (digests[draw],) if draw in digests else ()
            events.append(TokenEvent(b.request, b.index, newest, new, prompt_logprobs, finish, None, usage, bits))
        for b, end, slot in flight.saved:
            if b not in lost and b.computed >= end:
                self.cache.snapshots.keep(self._keys(b, end // self.cache.block_tokens)[-1], slot)
            else:
                self.cache.snapshots.free(slot)
        return events

    def discard(self, plan: StepPlan, error: BenthicError | None = None) -> None:
        """A step brought no result. Its branches end with `error`, or without one are computed again.

        What a half-run step left in rings and carries is not usable, so even one chunk means a fresh start. A step that
        was planned behind it has run on that, so it is discarded too.
        """
        self._rows_over.update(plan.over)
        if not plan.chunks:
            return
        gone = [flight for flight in self._flights if flight.step >= plan.step]
        self._flights = deque(flight for flight in self._flights if flight.step < plan.step)
        for flight in gone:
            self._rows_over.update(flight.images)
            for request in flight.images:
                self._rows_of.pop(request, None)
            for _, _, slot in flight.saved:
                self.cache.snapshots.free(slot)
            for b in flight.branches:
                if b in flight.lost or b.lease is None:
                    continue  # seen to already
                if b.ended:
                    if not self._flies(b):
                        self._release(b)
                elif error is not None and flight.step == plan.step:
                    self._end(b, error=error)
                else:
                    self._preempt(b)

    def check_invariants(self) -> None:
        """For tests: blocks have as many owners as they say, slots one, and every branch is in exactly one place."""
        self.cache.check()
        flying = {b for flight in self._flights for b in flight.branches if b not in flight.lost}
        holders = [b for b in {*self.running, *flying, *self._parked} if b.lease is not None]
        owners = Counter(block for b in holders if b.lease for block in b.lease.blocks)
        owners += Counter(self.cache.pinned)
        found = {block: count for block, count in enumerate(self.cache.blocks.references) if count}
        assert owners == found, f"owners by block {dict(owners)}, counted {found}"
        assert len(holders) + self.cache.slots.free == self.cache.slots.usable, "a slot has no owner"
        assert all(b.lease is not None and not b.ended for b in self.running), "a running branch holds nothing"
        reading = {b.request: b.images for b in self.running if b.computed < b.images_end}
        rows = sum(image.tokens for images in reading.values() for image in images)
        assert rows <= self.image_tokens, f"{rows} image rows may be read, {self.image_tokens} kept"
        waiting = list(self.queue)
        assert len(waiting) == len(self.queue), f"{len(waiting)} wait, {len(self.queue)} counted"
        assert all(b.lease is None for b in waiting), "a waiting branch holds blocks"
        live = {b for branches in self._live.values() for b in branches}
        assert live == {*self.running, *waiting}, "a branch is lost"
        for b in self.running:
            assert not b.steady or b.length == b.planned + 1, (
                f"{b.planned} of {b.length} tokens of a decode row planned"
            )
            assert not b.steady or b.pending or b.newest == (b.tokens[-1],), "a decode row's token is another one"
        counted = Counter(b.tenant.name for b in live)
        assert counted == {t.name: t.live for t in self.queue.tenants.values() if t.live}, "a tenant's count is off"

    # ---- within ------------------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        params = request.params
        ends: frozenset[int] = frozenset() if params.ignore_eos else self.eos_ids  # most share one: it stays in caches
        if params.stop_ids:
            ends |= frozenset(params.stop_ids)
        limit = min(len(request.prompt) + params.max_tokens, self.max_context_tokens + 1)
        branches = [Branch(request, i, self._order, ends, limit) for i in range(params.n)]
        if self.prefixes is not None:
            mode = request.cache.mode or self.prefixes.mode
            root = self.prefixes.root(request.cache.salt, mode)
            for b in branches:
                b.mode, b.root = mode, root
                b.truncation = request.cache.truncation or self.prefixes.truncation
        self._order += 1
        self._live[request.id] = list(branches)
        tenant, due = self.queue.join(request.tenant, len(branches)), self.queue.due(self.now, request.deadline)
        for b in branches:
            b.tenant, b.since, b.due = tenant, self.now, due
            self.queue.push(b)
            if b.deadline is not None:
                heapq.heappush(self._deadlines, (b.deadline, b.order, b.index, b))

    def _refuse_late(self) -> None:
        """End those whose deadline is over and whose request has not begun."""
        while self._deadlines and self._deadlines[0][0] <= self.now:
            deadline, _, _, b = heapq.heappop(self._deadlines)
            if not b.ended and not any(other.lease is not None or other.begun for other in self._live[b.request]):
                self._end(b, error=DeadlinePassed(b.request, self.now - b.since, self.now - deadline))

    def _victim(self, b: Branch) -> Branch:
        """Who gives way when `b` needs a block: `b` itself when all others are better."""
        worst = self.running[-1]
        if worst is b:
            return b
        best, least = worst, math.inf
        for other in reversed(self.running):
            if other.rank[0] != worst.rank[0] or other.rank <= b.rank:
                break
            freed, seconds = self._worth(other)
            if freed and seconds / freed < least:
                best, least = other, seconds / freed
        return best

    def _worth(self, b: Branch) -> tuple[int, float]:
        """What taking its blocks back would bring and cost: blocks that nobody else holds, and seconds to compute what
        is then gone. Its published blocks may well stay cached, but they count as gone: blocks are short."""
        lease, prefixes, references = b.lease, self.prefixes, self.cache.blocks.references
        assert lease is not None
        freed, start, shared = sum([references[block] == 1 for block in lease.blocks]), 0, 0
        while shared < lease.cached and references[lease.blocks[shared]] > 1:
            shared += 1
        if shared and prefixes is not None and b.cache.read and b.params.prompt_logprobs is None:
            start = min(max(self._start(b, prefixes, shared * self.cache.block_tokens), 0), b.computed)
        return freed, self.cost.chunk_seconds(start, b.computed - start)

    def _make_room(self, b: Branch, tokens: int, rows: dict[Branch, int]) -> bool:
        """Room for `tokens` of `b`, taken from worse-ranked ones if need be. False: `b` itself had to give way."""
        assert b.lease is not None
        while not self.cache.grow(b.lease, tokens):
            victim = self._victim(b)
            if victim is self.running[0] and self.cache.give_way():
                continue
            rows.pop(victim, None)
            self._preempt(victim)
            if victim is b:
                return False
        return True

    def _room(self, rows: dict[Branch, int], prefills: Sequence[Branch]) -> _Room:
        """What is left beside the decode rows of a step, with these prompts under way."""
        decodes, left = len(rows), self.token_budget - len(rows)
        if not decodes or not self.cost.ready or not (self.itl_seconds or self.itl_stretch):
            return _Room(left)
        least = self.cost.now.prompt  # with a row of a prompt
        least += self.cost.seconds(Shape(decodes, context=sum([b.length for b in rows]), logits=decodes))
        most = self.itl_seconds or self.itl_stretch * least
        if self.prompt_slowdown:
            most *= max([1.0, *(self._late(b) for b in prefills if not b.output_tokens)])
        return _Room(left, most - least, self.prefill_floor)

    def _late(self, b: Branch) -> float:
        """How long ago a prompt could have begun, as far as slots and blocks go, over the time it may take.

        At least how long ago it did begin.
        """
        alone = self.cost.chunk_seconds(b.hit, b.prompt_tokens - b.hit)
        return (self.now - min(max(b.since, self._full_at), b.started)) / (
            _PROMPT_SECONDS + self.prompt_slowdown * alone
        )

    def _add_prompts(self, rows: dict[Branch, int], prefills: list[Branch], room: _Room, preempted: int) -> None:
        """Rows of prompts beside the decode rows of a step, those that run in `prefills`. See 2. to 5. above.

        preempted  how many had been when the step was begun; if there are more, nobody begins.
        """
        first, most, kept = None, math.inf, 0
        if len(prefills) > 1:
            prefills.sort(key=lambda b: (b.rank[0], b.tenant.served, b.due, b.rank))
        for i, b in enumerate(prefills):
            if b.lease is None:
                continue
            if first is None:
                first, left, others = b, b.length - b.planned, prefills[i + 1 :]
                shared = self._chunk_rows(b, room) < left and (others or (self.queue and self.cache.slots.free))
                most = left if shared else math.inf
                kept = self._take(b, rows, room.half() if shared else room, room)
                for other in sorted(others, key=lambda b: b.length - b.planned):
                    if other.lease is not None:
                        done = self._chunk_rows(other, room) >= other.length - other.planned
                        self._take(other, rows, room if done else room.half(), room)
                break
        if self.queue and self.preemptions == preempted:
            self._start_waiting(rows, room, most)
        if first is not None and most < math.inf and first.lease is not None and first in rows:
            room.take(-kept, -self.cost.chunk_seconds(first.planned, kept))
            count = self._chunk_rows(first, room)
            if count > kept and self.cache.grow(first.lease, first.planned + count):
                rows[first] = count

    def _take(self, b: Branch, rows: dict[Branch, int], share: _Room, room: _Room) -> int:
        """A chunk of `b` within its share of the room. Returns its rows."""
        count = self._chunk_rows(b, share)
        if not count or not self._make_room(b, b.planned + count, rows):
            return 0
        rows[b] = count
        room.take(count, self.cost.chunk_seconds(b.planned, count))
        return count

    def _is_open(self, room: _Room) -> bool:
        """May another prompt begin in this step?"""
        return room.tokens > 0 and (room.floor > 0 or self.cost.rows_within(room.seconds, 0) > 0)

    def _start_waiting(self, rows: dict[Branch, int], room: _Room, most: float = math.inf) -> None:
        """Begin waiting sequences, as far as the room goes. Those with more than `most` tokens to compute wait on."""
        promised = 0
        for b in self.running:
            promised += self._promised(b)
        passed: list[Branch] = []  # those that wait for what others compute
        long = 0
        while self.cache.slots.free and self._is_open(room) and long < _LONG_PASSED:
            b = self.queue.pop(self.now)
            if b is None:
                break
            source = self._sibling(b)
            match = Match() if source is not None else self._find(b)
            if match.miss is Miss.IN_FLIGHT or (source is not None and source.planned < b.prompt_tokens):
                passed.append(b)
                continue
            if source is None and most < math.inf and self._left(b, match) > most:
                passed.append(b)
                long += 1
                continue
            shared = len(match.nodes) if source is None else b.prompt_tokens // self.cache.block_tokens
            own = self.cache.blocks_for(len(b.tokens))
            own += (own < self._most_blocks(b)) - shared
            held = self.running or self._flights or self._parked  # an ended one may hold blocks for a step yet
            while own + promised > self.cache.free_blocks - self.cache.idle_blocks(match):
                if held or not self.cache.give_way():
                    break
            full = held and own + promised > self.cache.free_blocks - self.cache.idle_blocks(match)
            if full:
                self._full_at = self.now
            if full or (source is None and b.images and not self._room_for_images(b)):
                passed.append(b)
                break
            b.lease = lease = self.cache.open()
            assert lease is not None, "a free slot could not be had"
            if source is None:
                self._begin(b, lease, match)
            else:
                self._fork(b, lease, source)
            b.begun, b.started, b.planned = True, self.now, b.computed
            b.rank = (b.level, b.order, b.index)
            insort(self.running, b, key=attrgetter("rank"))
            count = max(self._chunk_rows(b, room), 1)
            grown = self.cache.grow(lease, b.planned + count)
            assert grown, f"{count} tokens do not fit into {self.cache.free_blocks} free blocks"
            rows[b] = count
            room.take(count, self.cost.chunk_seconds(b.planned, count))
            promised += self._promised(b)
        for b in passed:
            self.queue.push(b)

    def _left(self, b: Branch, match: Match) -> int:
        """Tokens that a waiting sequence will have to compute before it draws, about: replays are not counted."""
        return len(b.tokens) - len(match.nodes) * self.cache.block_tokens

    def _chunk_rows(self, b: Branch, room: _Room) -> int:
        """Rows of the next chunk, 0 when the step has no room. It ends where a state is to be kept."""
        start = b.planned
        end = b.checkpoint if b.checkpoint > start else b.length
        count = min(room.tokens, end - start)
        if room.seconds < math.inf:
            count = min(count, max(self.cost.rows_within(room.seconds, start), room.floor, 0))
        if self.grid > 1 and 0 < count < end - start:
            grid = self.grid
            while (start + count) // grid * grid <= start:
                grid //= 2
            count = (start + count) // grid * grid - start
        return count

    # ---- prefixes ----------------------------------------------------------------------------------------------------

    def _keys(self, b: Branch, blocks: int) -> list[Key]:
        """Keys of its first `blocks` blocks, all of them complete."""
        size, known = self.cache.block_tokens, len(b.keys)
        if known < blocks:
            ids = b.tokens[known * size : blocks * size]
            extras = partial(_images_in, b.images, size, known) if known * size < b.images_end else None
            b.keys += prefix.chain(b.keys[-1] if known else b.root, ids, size, extras)
        return b.keys if len(b.keys) == blocks else b.keys[:blocks]

    def _find(self, b: Branch) -> Match:
        """What it could begin with now. IN_FLIGHT: it is worth waiting."""
        prefixes, size = self.prefixes, self.cache.block_tokens
        if prefixes is None or not b.cache.read or b.params.prompt_logprobs is not None:
            return Match()
        blocks = (len(b.tokens) - 1) // size  # the last token is always computed
        if not blocks:
            return Match(miss=Miss.TOO_SHORT)
        match = self.cache.find(self._keys(b, blocks), self.now)
        if match.miss is Miss.IN_FLIGHT and self._start(b, prefixes, blocks * size) <= 0:
            match = Match(match.nodes, Miss.TOO_SHORT)
        if not match.nodes and match.miss is Miss.NEVER_SEEN and self.cache.seen_elsewhere(b.tokens[:size], b.root):
            return Match(miss=Miss.OTHER_NAMESPACE)
        return match

    def _goes_on(self, b: Branch) -> str:
        """How it is computed again behind a hit: one that was preempted must go on as if it had not been."""
        return "exact" if b.output_tokens or b.mode != "replay" else "replay"

    def _whole_at(self, b: Branch) -> tuple[int, int]:
        """Where its state is first to be kept, 0: nowhere; up to where rows that nobody sees are not computed."""
        size, length = self.cache.block_tokens, len(b.tokens)
        checkpoint = (length - 1) // size * size if b.keeps_states and self.cache.snapshots.slots else 0
        return checkpoint, checkpoint or length

    def _start(self, b: Branch, prefixes: Prefixes, hit: int) -> int:
        windows, (_, end) = prefixes.windows, self._whole_at(b)
        return windows.start(hit, end, self._goes_on(b), prefixes.replay_rows or windows.tokens)

    def _begin(self, b: Branch, lease: Lease, match: Match) -> None:
        """Its first step, or the first one after a preemption, begins behind `match`."""
        prefixes, size, length = self.prefixes, self.cache.block_tokens, len(b.tokens)
        b.computed = b.low = b.stored = b.marked = b.checkpoint = 0
        b.cuts = ()
        b.steady = False
        b.copy, b.fresh = None, False
        if prefixes is None:
            b.miss = Miss.DISABLED
            return
        windows, again = prefixes.windows, False
        b.checkpoint, end = self._whole_at(b)
        hit, miss = len(match.nodes) * size, match.miss
        if match.nodes:
            self.cache.attach(lease, match, self.now)
            b.stored, start = hit, self._start(b, prefixes, hit)
            kept = self.cache.snapshots.find(b.keys[: hit // size]) if b.mode == "snapshot" else None
            if kept is not None and kept[0] * size > start:
                start, b.copy = kept[0] * size, SlotCopy(kept[1], lease.slot)
            if start <= 0:
                hit, miss = 0, Miss.TOO_SHORT  # its blocks are shared, and computed again all the same
            else:
                b.computed, b.fresh = start, True
                b.low = 0 if b.copy is not None else start
                again = b.copy is None and self._goes_on(b) == "exact"
        if b.params.prompt_logprobs is None:
            b.cuts = windows.cuts(b.computed, again, end, b.truncation, prefixes.kept_rows or windows.tokens)
        begin_late = [b.low, *(position for _, position in b.cuts)]
        b.marked = max(b.stored, *(at + windows.tokens for at in begin_late if at), 0)
        if not b.output_tokens:
            b.hit, b.miss = min(hit, b.prompt_tokens), miss
        if b.cache.write:
            self.cache.announce(lease, self._keys(b, length // size)[len(match.nodes) :])

    def _sibling(self, b: Branch) -> Branch | None:
        """A running branch of the same request whose prompt b can go on from, now or soon."""
        if b.output_tokens:
            return None
        for other in (*self._live[b.request], *self._parked):
            if other.request == b.request and other.lease is not None and other.planned <= b.prompt_tokens:
                return other
        return None

    def _fork(self, b: Branch, lease: Lease, source: Branch) -> None:
        """Its state is a copy of what `source` has after the prompt; it computes the prompt's last token once more."""
        assert source.lease is not None
        blocks = self.cache.fork(lease, source.lease, b.prompt_tokens)
        b.copy = SlotCopy(source.lease.slot, lease.slot, blocks)
        b.computed, b.stored, b.fresh = b.prompt_tokens - 1, b.prompt_tokens, True
        b.low = b.checkpoint = 0
        b.cuts = ()
        b.marked, b.steady = b.stored, False
        b.keys = list(source.keys)
        size = self.cache.block_tokens
        b.hit, b.miss = b.prompt_tokens // size * size, None

    def _publish(self, b: Branch) -> None:
        lease = b.lease
        assert lease is not None
        blocks = b.computed // self.cache.block_tokens
        if blocks > lease.cached and self.prefixes is not None and b.cache.write:
            self.cache.publish(lease, self._keys(b, blocks), self.now)

    def _usage(self, b: Branch) -> Usage:
        return Usage(b.prompt_tokens, b.output_tokens, b.hit, b.miss)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def _room_for_images(self, b: Branch) -> bool:
        """May this branch begin, as far as the image rows of those that run allow? The first of them always may."""
        reading = {r.request: r.images for r in self.running if r.planned < r.images_end}
        reading[b.request] = b.images
        return sum(image.tokens for images in reading.values() for image in images) <= self.image_tokens

    def _take_over(self) -> tuple[int, ...]:
        """Requests whose rows the runner may still keep and no running branch reads; they count as told."""
        read = {b.request for b in self.running if b.planned < b.images_end}
        over = self._rows_over | (self._rows_of.keys() - read)
        self._rows_of = {request: count for request, count in self._rows_of.items() if request in read}
        self._rows_over = set()
        return tuple(sorted(over))

    def _most_blocks(self, b: Branch) -> int:
        return self.cache.blocks_for(b.limit - 1)

    def _promised(self, b: Branch) -> int:
        """Blocks kept for a running branch: its known tokens, and one more if it may grow beyond them."""
        assert b.lease is not None
        known = self.cache.blocks_for(len(b.tokens))
        return max(known, len(b.lease.blocks)) - len(b.lease.blocks) + (known < self._most_blocks(b))

    def _plan_of(self, rows: dict[Branch, int]) -> StepPlan:
        chunks: list[Chunk] = []
        draws: list[Draw] = []
        scores: list[tuple[int, Score]] = []
        images: list[tuple[int, tuple[ImageInput, ...]]] = []
        over = self._take_over() if self._rows_of or self._rows_over else ()
        contested = self.queue.contested
        copies: list[SlotCopy] = []
        saves: list[SlotCopy] = []
        saved: list[tuple[Branch, int, int]] = []
        new_chunk = Chunk.__new__
        window, size = 0 if self.prefixes is None else self.prefixes.windows.tokens, self.cache.block_tokens
        for b, count in rows.items():
            lease, start, pending = b.lease, b.planned, b.pending
            assert lease is not None
            b.planned = end = start + count
            if b.steady and end % size and not contested:  # most rows, and nothing else to say of them
                ids = _UNKNOWN if pending else b.newest
                chunks.append(new_chunk(Chunk, b.request, start, ids, 0, True, lease.slot, lease.table, b.index))
                draws.append(b.draw)
                b.pending = pending + 1
                continue
            tokens = b.tokens
            if start < b.images_end:
                ahead = tuple([image for image in b.images if image.first + image.tokens > start])
                if end > ahead[0].first and len(ahead) > self._rows_of.get(b.request, 0):
                    self._rows_of[b.request] = len(ahead)
                    images.append((b.request, ahead))
            params, length = b.params, len(tokens) + pending
            sample = end == length
            if count == 1 and sample:
                ids = _UNKNOWN if pending else (tokens[-1],)
            else:
                ids = tuple(tokens[start:end]) + (PENDING,) * (end - len(tokens))
            if b.asked < b.prompt_tokens:
                assert params.prompt_logprobs is not None
                first, last = max(start, b.asked - 1), min(end, b.prompt_tokens - 1)
                if first < last:
                    b.asked = last + 1
                    targets = tuple(tokens[first + 1 : last + 1])
                    scores.append((len(chunks), Score(first - start, targets, params.prompt_logprobs)))
            chunk = Chunk(b.request, start, ids, 0, sample, lease.slot, lease.table, b.index)
            if start < b.marked or b.fresh:
                chunk = chunk._replace(
                    low=b.low if start < b.low + window else 0,
                    stored=b.stored if start < b.stored else 0,
                    cuts=tuple([cut for cut in b.cuts if start < cut[1] + window]),
                    masked=b.truncation == "mask",
                    before=tuple(tokens[max(start - HISTORY_IDS, 0) : start]) if b.fresh else None,
                )
                b.fresh = False
            chunks.append(chunk)
            if b.copy is not None:
                copies.append(b.copy)
                b.copy = None
            if not end % size and end >= b.checkpoint and b.keeps_states:
                place = self.cache.snapshots.reserve()
                if place is not None:
                    saves.append(SlotCopy(lease.slot, place))
                    saved.append((b, end, place))
            if sample:
                draw = b.draw
                if b.blocked and length - b.prompt_tokens < params.min_tokens:
                    draw = draw._replace(blocked=b.blocked)
                if b.penalised:
                    draw = draw._replace(context=tokens[:])
                draws.append(draw)
                b.pending = pending + 1
                b.steady = not (b.penalised or b.blocked) and end >= b.marked
            if contested:
                alone = count == 1
                spent = self.cost.decode_seconds(start) if alone else self.cost.chunk_seconds(start, count)
                b.tenant.served += spent
        for b in self._parked:
            self._release(b)  # copies of its state are made before anything of this plan, or a later one, is written
        self._parked.clear()
        self._step += 1
        if rows:
            self.planned_tokens = sum(rows.values())
            alike = self.planned_tokens == len(chunks) == len(draws)
            shapes = None if alike else [(len(chunk.tokens), chunk.sample) for chunk in chunks]
            made = [request for request, _ in images]
            self._flights.append(_Flight(self._step, list(rows), shapes, saved, made, set()))
        edges = tuple(copies), tuple(saves)
        return StepPlan(self._step, tuple(chunks), tuple(draws), tuple(scores), over, tuple(images), *edges)

    def _preempt(self, b: Branch) -> None:
        self.running.remove(b)
        self._release(b)
        b.computed = b.planned = b.pending = 0
        b.asked = b.scored
        for flight in self._flights:
            flight.lost.add(b)
        self.preemptions += 1
        self.queue.push(b)

    def _end(self, b: Branch, *, reason: FinishReason | None = None, error: BenthicError | None = None) -> None:
        usage = self._usage(b)
        self._events.append(TokenEvent(b.request, b.index, finish=reason, error=error, usage=usage))
        self._forget(b)

    def _forget(self, b: Branch) -> None:
        """Take an ended branch out of every place. Its blocks stay until the step that writes them is over."""
        b.ended = True
        live = self._live[b.request]
        live.remove(b)
        if not live:
            del self._live[b.request]
        self.queue.leave(b, waiting=b.lease is None)
        if b.lease is None:
            return
        self.running.remove(b)
        if self._flies(b):
            return
        if b.computed == b.prompt_tokens and any(other.lease is None and not other.output_tokens for other in live):
            self._parked.append(b)  # they go on from its state with the next step
        else:
            self._release(b)

    def _flies(self, b: Branch) -> bool:
        """Does a step in flight compute something for it?"""
        return any(b in flight.branches and b not in flight.lost for flight in self._flights)

    def _release(self, b: Branch) -> None:
        assert b.lease is not None
        self.cache.close(b.lease)
        b.lease = None
