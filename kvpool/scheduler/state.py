"""`Core`: the state of a scheduler and the moves between states. It checks no arguments and decides nothing.

`check` recomputes every counter and invariant of the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush, nsmallest
from operator import attrgetter, sub
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import float32, int32, int64
from numpy.typing import NDArray

from kvpool._core import Plan, Pool
from kvpool.errors import CorruptState
from kvpool.retention import Keep
from kvpool.scheduler.needs import Needs
from kvpool.scheduler.request import (
    DECODING,
    FINISHED,
    PREFILLING,
    SPILLED,
    WAITING,
    Output,
    Request,
    RequestGroup,
    Sequence,
    Times,
    WaitingQueue,
)

if TYPE_CHECKING:
    from kvpool.eviction import Evictor


def add(row: NDArray[int32], lanes: np.ndarray, more: NDArray[int32] | int) -> None:
    """Add to some lanes of a row, each once.

    `take` and `put` cost a step of few rows some microseconds. Indexing by an array sets an iterator up, which takes
    memory, and the first one after MLX has freed much of it takes a hundred.
    """
    row.put(lanes, row.take(lanes) + more)


class LaneRows:
    """Arrays over the lanes: the numbers of running sequences."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.handle = np.full(size, -1, np.int64)  # in the pool; -1 in a free lane
        self.state = np.zeros(size, np.int8)  # PREFILLING, DECODING, or WAITING in a free lane
        self.admitted = np.zeros(size, np.int64)  # number of the admission; it determines the order of rows
        self.prompt = np.zeros(size, np.int32)  # tokens of the prompt
        self.generated = np.zeros(size, np.int32)
        self.computed = np.zeros(size, np.int32)  # tokens whose KV was computed
        self.committed = np.zeros(size, np.int32)  # tokens given to `PrefixCache.commit`
        self.found = np.zeros(size, np.int32)  # tokens that the prefix cache had when the sequence was admitted
        self.gone = np.zeros(size, np.int32)  # computed tokens that were evicted
        self.common = np.zeros(size, np.int32)  # leading tokens whose blocks count for another lane of the same beam
        self.high = np.zeros(size, np.int32)  # most tokens that were computed before the admission
        self.limit = np.zeros(size, np.int32)  # most tokens to generate
        self.last = np.zeros(size, np.int32)  # last known token, the input of the next decode
        self.shared = np.zeros(size, np.bool_)  # a fork may share the tail: the next token may take a block for a copy
        # Tokens that may end the sequence, padded with -1: eos, and the last ones of stop sequences. There are less
        # than twice as many columns as a running sequence needs. `watched`: how many a lane has, 0 in a free one.
        self.watch = np.full((size, 1), -1, np.int32)
        self.watched = np.zeros(size, np.int32)
        self.width = np.zeros(size, np.int32)  # of the beam; 0: no beam
        self.index = np.zeros(size, np.int32)  # number of the sequence in its request
        self.tokens = np.zeros((size, 64), np.int32)  # generated; columns double when a sequence needs it
        self.logprobs: NDArray[float32] | None = None  # as wide as `tokens`; None until `update` gets some
        self.ones = np.ones(size, np.int64)  # `Step.num_new` of decodes
        self.order = np.arange(size, dtype=np.int32)
        self.ones.flags.writeable = self.order.flags.writeable = False
        self.sequences: list[Sequence | None] = [None] * size
        self.free = list(range(size))
        heapify(self.free)

    def take(self) -> int:
        """Reserve the lowest free lane. `put` puts a sequence in it."""
        return heappop(self.free)

    def put(self, lane: int, sequence: Sequence, handle: int, computed: int, admitted: int) -> None:
        request = sequence.group.request
        self.handle[lane] = handle
        self.state[lane] = PREFILLING
        self.admitted[lane] = admitted
        self.prompt[lane] = request.prompt.size
        self.computed[lane] = self.committed[lane] = self.found[lane] = computed
        self.gone[lane] = self.common[lane] = 0
        self.high[lane] = sequence.high
        self.limit[lane] = request.max_tokens
        self.shared[lane] = False
        ends = sorted({*request.eos, *(stop[-1] for stop in request.stop)})
        self.watched[lane] = len(ends)
        if len(ends) > self.watch.shape[1]:
            self._fit_watch()
        self.watch[lane] = -1
        self.watch[lane, : len(ends)] = ends
        self.width[lane] = request.beam_width
        self.index[lane] = sequence.index
        tokens, logprobs, length = sequence.tokens, sequence.logprobs, len(sequence.tokens)
        self.make_room(length + 1)
        self.tokens[lane, :length] = tokens
        self.generated[lane] = length
        self.last[lane] = tokens[-1] if length else request.prompt[-1]
        if self.logprobs is not None or logprobs is not None:
            kept = self.need_logprobs()
            kept[lane] = np.nan
            if logprobs is not None:
                kept[lane, : len(logprobs)] = logprobs
        self.sequences[lane] = sequence
        sequence.lane = lane
        sequence.tokens, sequence.logprobs = tokens[:0], None

    def _fit_watch(self) -> None:
        now, most = self.watch.shape[1], max(1, int(self.watched.max()))
        if not most <= now < 2 * most:
            old, self.watch = self.watch, np.full((self.size, most), -1, np.int32)
            self.watch[:, :now] = old[:, :most]

    def make_room(self, width: int) -> None:
        """Let the token buffers hold `width` tokens per lane."""
        old = self.tokens.shape[1]
        if width <= old:
            return
        tokens = np.zeros((self.size, max(width, 2 * old)), np.int32)
        tokens[:, :old] = self.tokens
        self.tokens, logprobs = tokens, self.logprobs
        if logprobs is not None:
            self.logprobs = np.full(tokens.shape, np.nan, np.float32)
            self.logprobs[:, :old] = logprobs

    def need_logprobs(self) -> NDArray[float32]:
        """Return the buffer of logprobs. Make it if there is none."""
        if self.logprobs is None:
            self.logprobs = np.full(self.tokens.shape, np.nan, np.float32)
        return self.logprobs

    def generated_of(self, lane: int) -> NDArray[int32]:
        """Return a copy of the generated tokens of a lane."""
        return self.tokens[lane, : self.generated[lane]].copy()

    def logprobs_of(self, lane: int) -> NDArray[float32] | None:
        """Return a copy of the logprobs of a lane, None if there are none."""
        mine = None if self.logprobs is None else self.logprobs[lane, : self.generated[lane]]
        return None if mine is None or np.isnan(mine).all() else mine.copy()

    def known(self, lane: int, begin: int, end: int) -> NDArray[int32]:
        """Return the tokens at positions begin .. end - 1 of prompt and generated ones."""
        prompt = self.sequence(lane).group.request.prompt
        n = len(prompt)
        if end <= n:
            return prompt[begin:end]
        if begin >= n:
            return self.tokens[lane, begin - n : end - n]
        return np.concatenate([prompt[begin:], self.tokens[lane, : end - n]])

    def leave(self, lane: int) -> None:
        """Remove the sequence from a lane and free the lane."""
        self.vacate(lane)
        self.give(lane)

    def give(self, lane: int) -> None:
        """Free a lane without a sequence."""
        heappush(self.free, lane)
        self.watched[lane] = 0
        if self.watch.shape[1] > 1:
            self._fit_watch()

    def vacate(self, lane: int) -> None:
        """Remove the sequence from a lane, which stays taken."""
        sequence = self.sequences[lane]
        if sequence is not None:
            sequence.lane = -1
        self.sequences[lane] = None
        self.handle[lane] = -1
        self.state[lane] = WAITING

    def running(self, state: int = -1) -> NDArray[np.intp]:
        """Return the lanes in a state (any running one by default), in order of admission."""
        (chosen,) = (self.state == state if state >= 0 else self.state != WAITING).nonzero()
        return chosen[self.admitted[chosen].argsort()]

    def sequence(self, lane: int) -> Sequence:
        """Return the sequence of a lane that is not free."""
        sequence = self.sequences[lane]
        assert sequence is not None
        return sequence

    def requests(self, lanes: NDArray[int32]) -> list[Request]:
        """Return the requests of lanes that are not free."""
        sequences: list[Any] = self.sequences
        return [sequences[lane].group.request for lane in lanes.tolist()]

    def kv_lens(self, lanes: NDArray[np.intp]) -> NDArray[int32]:
        """Return how many computed tokens of these lanes the pool still holds in the group that evicts."""
        lens: NDArray[int32] = self.computed[lanes] - self.gone[lanes]
        return lens

    def remaining(self, lane: int) -> int:
        """Return the number of known tokens that are not computed."""
        return int(self.prompt[lane] + self.generated[lane] - self.computed[lane])


@dataclass(eq=False, repr=False, slots=True)
class Step:
    """One batch of S rows, T tokens and M samples. The arrays hold until `update` or `fail`."""

    _rows: LaneRows
    plan: Plan  #: of the pool's step: copies, writes, reads
    batch: DecodeBatch | None  # the decodes, if each samples one token
    tokens: NDArray[int32]  #: int32 ``[T]``, inputs, row after row; -1: not known yet, see `follows`
    num_decodes: int  #: they are the first rows: one token each, and its drafts; prefill chunks follow
    lanes: NDArray[int32]  #: int32 ``[S]``, the scheduler's lane of each row
    handles: NDArray[int64]  #: int64 ``[S]``
    num_new: NDArray[int64]  #: int64 ``[S]``, new tokens of each row
    sample_at: NDArray[int32]  #: int32 ``[M]``, which of the T positions are sampled, ascending, once per sample
    sample_lane: NDArray[int32]  #: int32 ``[M]``, the scheduler's lane
    sample_index: NDArray[int32]  #: int32 ``[M]``, number of the sample in its request
    beam_width: NDArray[int32]  #: int32 ``[M]``, of the request; 0: no beam
    sample_position: NDArray[int32] = field(init=False)  #: int32 ``[M]``, tokens that the sample has generated so far
    requests: list[Request] = field(init=False)  #: of each sample; an `id` is what `Scheduler.add` has returned
    #: ``[T]``, of a step that was planned while another one is out: which sample of that step each input is. -1:
    #: `tokens` has it. None: the step waits for no other.
    follows: NDArray[int32] | None = None
    num_drafts: int = 0  #: inputs of decodes that are drafts (`Scheduler`, ``speculate``)
    #: ``[M]``, which sampled tokens `update` has taken: not those of rows that had ended or were cancelled, nor those
    #: behind a wrong draft or an end. None: all.
    taken: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        batch = self.batch
        self.sample_position = self._rows.generated.take(self.sample_lane)
        is_batch = batch is not None and len(self.sample_at) == len(batch.lanes)
        self.requests = batch.requests if batch is not None and is_batch else self._rows.requests(self.sample_lane)

    def count_drafts(self) -> None:
        """Count the tokens that decodes have beside their first, and let samples of such decodes count them, too."""
        ends = self.num_new.cumsum()
        row = np.searchsorted(ends, self.sample_at, "right")
        place = self.sample_at - (ends - self.num_new)[row]
        self.sample_position += np.where(row < self.num_decodes, place, 0).astype(np.int32)
        self.num_drafts = int(self.num_new[: self.num_decodes].sum()) - self.num_decodes

    def follow(self, before: Step) -> None:
        """Mark the inputs that a step which is out has still to sample."""
        sample = np.full(self._rows.size, -1, np.int32)
        sample.put(before.sample_lane, np.arange(len(before.sample_lane), dtype=np.int32))
        is_other = self._rows.handle.take(before.lanes) != before.handles
        sample.put(before.lanes[is_other], -1)  # cancelled: the lane has another
        self.follows = np.full(len(self.tokens), -1, np.int32)
        self.follows[: self.num_decodes] = sample.take(self.lanes[: self.num_decodes])
        self.tokens[self.follows >= 0] = -1

    def __repr__(self) -> str:
        return (
            f"<kvpool.scheduler.Step of {self.num_decodes} decodes and {len(self.lanes) - self.num_decodes} chunks, "
            f"{len(self.tokens)} tokens, {len(self.sample_at)} samples>"
        )

    @property
    def evicted(self) -> NDArray[int32]:
        """Evicted tokens of each row, ``[S]``. A token's position is its place in the table plus this number."""
        gone: NDArray[int32] = self._rows.gone[self.lanes]
        return gone

    def generated(self, at: int) -> NDArray[int32]:
        """Return the generated tokens before a sample, with the drafts before it."""
        tokens: NDArray[int32] = self._rows.tokens[self.sample_lane[at], : self.sample_position[at]]
        return tokens


REMEMBERED = 4096
NOBODY = 2**62  # no admission has a number so high


class DecodeBatch:
    """The sequences that decode. It has what a step needs of them, gathered once until one joins or leaves."""

    def __init__(self, rows: LaneRows, unforked: int) -> None:
        lanes = self.lanes = rows.running(DECODING)  # in order of admission
        self.lanes32 = lanes.astype(np.int32)
        self.handles = rows.handle[lanes]
        self.index = rows.index[lanes]
        self.width = rows.width[lanes]
        self.watch = rows.watch[lanes]
        self.limit = rows.limit[lanes]
        self.shared = bool(rows.shared[lanes].any())
        self.requests = rows.requests(self.lanes32)
        for array in (self.lanes32, self.handles, self.index, self.width):
            array.flags.writeable = False  # steps expose them
        sequences = map(rows.sequences.__getitem__, lanes.tolist())
        self.tenants = list(Counter(map(attrgetter("group.tenant"), sequences)).items())  # with how many each has
        # Each sequence samples one token: there are no beams and no samples to fork.
        self.plain = not self.width.any() and not (
            unforked and any(not rows.sequence(lane).group.forked for lane in lanes.tolist())
        )


# Reads all fields of an object of a class.
fields_of: Callable[[Any], Callable[[Any], tuple[Any, ...]]] = cache(lambda kind: attrgetter(*kind.__slots__))


COUNTED = (  # at an admission, also at one that a beam takes back
    *("admissions", "next_admission", "alone_until", "hit_tokens", "again_hit_tokens", "chunks_allowed"),
    *("preemptions", "setbacks"),
)


class Attempt:
    """An admission that has begun: what it may change, as it was, so that an exception in it changes nothing."""

    def __init__(self, core: Core, sequence: Sequence) -> None:
        group = sequence.group  # the first sequence of a beam stands for all
        self._core, self._sequence = core, sequence
        self._front = core.queue.is_back(sequence)
        self.again = group.admitted is not None  # it may find what it has computed itself
        self._count, self._numbers = core.count.copy(), {name: getattr(core, name) for name in COUNTED}
        changed = [sequence] if group.beam is None else [*group.beam.live, group.beam]
        self._fields = [(one, fields_of(type(one))(one)) for one in (group, group.tenant, *changed)]
        width = group.request.beam_width
        self._lanes = nsmallest(width, core.rows.free) if width > 1 else core.rows.free[:1]
        self._opened: list[int] = []

    def open(self, how: Callable[..., int], *arguments: Any, **options: Any) -> int:
        """Return the handle that a call of the pool opens. It is closed if the admission raises."""
        self._opened.append(how(*arguments, **options))
        return self._opened[-1]

    def undo(self) -> None:
        """Let the sequence wait where it was, without lane and blocks."""
        core, rows, sequence = self._core, self._core.rows, self._sequence
        core.close([*self._opened, *rows.handle[self._lanes].tolist()])
        for lane in self._lanes:
            rows.vacate(lane)
            if lane not in rows.free:
                rows.give(lane)
        core.count[:] = self._count
        vars(core).update(self._numbers)
        for one, values in self._fields:
            for name, value in zip(one.__slots__, values, strict=True):
                setattr(one, name, value)
        core.beams = [beam for beam in core.beams if beam is not sequence.group.beam]
        if sequence.state == SPILLED:
            core.spilled = {sequence: None, **core.spilled}
        else:
            core.queue.put_back(sequence, front=self._front)
        core.changed = True


@dataclass(eq=False, repr=False)
class Core:
    """The state of a scheduler. Parameters: see `Scheduler`."""

    pool: Pool
    max_running: int
    max_step_tokens: int
    prefill_chunk: int
    mixed: bool
    watermark: int | None
    policy: str
    tier: Any
    clock: Callable[[], float]
    eviction: Evictor | None
    queue: WaitingQueue

    def __post_init__(self) -> None:
        pool, eviction = self.pool, self.eviction
        self.chunk = min(self.prefill_chunk, self.max_step_tokens)
        self.needs = Needs(pool, self.chunk, eviction)
        self.findable = 2**31 - 1  # most tokens of a prompt that are looked up and committed
        if eviction is not None:  # a sequence begins below its budget
            self.findable = (eviction.policy.max_kv - 1) // self.needs.unit * self.needs.unit
        self.prefix = pool.prefix
        self.has_checkpoints = pool.prefix is not None and self.needs.lets_go
        self.rows = LaneRows(self.max_running)
        self.spilled: dict[Sequence, None] = {}  # oldest first
        self.groups: dict[Hashable, RequestGroup] = {}
        self.held: dict[Hashable, RequestGroup] = {}  # of these, requests that wait outside the queue
        self.deadlines: list[tuple[float, int, Hashable]] = []  # heap: time, number of the arrival, id
        self.ended: dict[Hashable, None] = {}  # ids of the latest, for messages
        self.beams: list[Any] = []  # running ones
        self.attempt: Attempt | None = None  # the admission that has begun
        self.next_id = 0
        self.next_admission = 0
        self.newest = NOBODY  # number of the first admission of the step that is being decided
        self.alone_until = 0  # `next_admission` after the last admission at which nothing ran
        self.told = 0  # the second that the prefix cache was told last
        self.keeps = False  # some request had a `keep`
        self.count = [0] * 5  # sequences by state, now; FINISHED: all that ended without cancellation
        self.cancelled = self.expired = self.rejected = 0
        self.admissions = self.preemptions = self.spills = self.steps = 0
        self.decode_tokens = self.prefill_tokens = self.recomputed_tokens = self.hit_tokens = self.sampled_tokens = 0
        self.again_hit_tokens = self.evicted_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self.idle_steps = 0  # steps that lost rows to a cancellation: they may have sampled nothing
        self.setbacks = 0  # preemptions without progress: failed steps, blocks that other users of the pool took
        self.chunks_allowed = 0  # sum over admissions of ceil(tokens to compute / chunk)
        self.unforked = 0  # requests with samples that are not forked yet
        self.was_chunk = False  # the last step was a chunk (not mixed)
        self.is_ahead = False  # a step is being decided while another one is out
        self.changed = True  # the set of sequences that decode has changed
        self.growing: list[int] | None = None  # blocks that decodes of this step may take; None: not counted yet
        self._batch = DecodeBatch(self.rows, 0)
        self._length_plan: Plan | None = None

    def kept(self, request: Request) -> Keep | None:
        """Return the directive of a request, None without a prefix cache."""
        return None if self.prefix is None else request.keep

    def tick(self) -> None:
        """Tell the prefix cache the time, if any request so far had a `keep`."""
        if self.keeps and self.prefix is not None and (now := int(self.clock())) > self.told:
            self.prefix.tick(now)
            self.told = now

    def batch(self) -> DecodeBatch:
        if self.changed:
            self._batch = DecodeBatch(self.rows, self.unforked)
            self.changed = False
        return self._batch

    def has_room(self, batch: DecodeBatch, new: NDArray[int64] | int = 1) -> bool:
        """Return whether the `new` next tokens of decodes find their blocks, without those promised to others."""
        is_promised = self.count[PREFILLING] or self.newest < self.next_admission
        promised = self.promised() if is_promised else self.needs.nothing
        if not any(promised) or not len(batch.lanes):
            return self.pool.can(batch.handles, new)
        return self.needs.short(self.growth(batch.lanes, new), self.needs.free(), promised) < 0

    def available(self) -> list[int]:
        """Return the blocks of each arena that are neither taken nor promised."""
        return list(map(sub, self.needs.free(), self.promised()))

    def promised(self) -> list[int]:
        """Return the blocks of each arena that running sequences will take until their known tokens are computed."""
        needs, rows = self.needs, self.rows
        if not self.count[PREFILLING] and self.newest >= self.next_admission:
            return needs.nothing
        (lanes,) = ((rows.state == PREFILLING) | (rows.state != WAITING) & (rows.admitted >= self.newest)).nonzero()
        most = needs.most(rows.prompt[lanes] + rows.generated[lanes], rows.common[lanes], rows.width[lanes] > 1)
        held = needs.held(rows.computed[lanes], rows.common[lanes], rows.found[lanes], rows.gone[lanes])
        found: list[int] = np.maximum(most - held, 0).sum(axis=0).tolist()
        return found

    def growth(self, lanes: NDArray[np.intp], new: NDArray[int64] | int = 1) -> list[int]:
        """Return the most blocks of each arena that the `new` next tokens of these lanes take."""
        return self.needs.next_tokens(self.rows.computed[lanes], self.rows.shared[lanes], new)

    def tables(self, handle: int, tokens: int) -> Any:
        """Return the blocks of the first tokens of a sequence: in a pool of several groups an array for each."""
        pool = self.pool
        sizes = [group.block_size or pool.block_size for group in pool.options.groups]
        found = [pool.table(handle, number)[: -(-tokens // size)] for number, size in enumerate(sizes)]
        return found if len(found) > 1 else pool.table(handle)[: len(found[0])]

    # -- moves

    def move(self, sequence: Sequence, state: int) -> None:
        """Change the state of a sequence, and the counters with it."""
        self.count[sequence.state] -= 1
        self.count[state] += 1
        sequence.state = state
        if sequence.lane >= 0:
            self.rows.state[sequence.lane] = state
        self.changed = True

    def start(self, sequence: Sequence, lane: int, handle: int, computed: int, admitted: int) -> None:
        """Give a sequence a lane, which was taken, and a handle."""
        self.rows.put(lane, sequence, handle, computed, admitted)
        if self.eviction is not None:
            self.eviction.memory.start(lane)
        self.move(sequence, PREFILLING)
        self.set_phase(lane)

    def admission_number(self, n: int = 1) -> int:
        """Return the first of n new consecutive numbers."""
        if not (self.is_ahead or self.count[PREFILLING] + self.count[DECODING]):
            self.alone_until = self.next_admission + n
        self.next_admission += n
        return self.next_admission - n

    def set_phase(self, lane: int) -> None:
        """Set PREFILLING or DECODING, by the tokens left to compute. A beam's sequences decode together."""
        sequence = self.rows.sequence(lane)
        beam = sequence.group.beam
        state = DECODING if self.rows.remaining(lane) == 1 else PREFILLING
        if sequence.state != state and (beam is None or len(beam.live) == 1):
            self.move(sequence, state)

    def commit(self, lane: int) -> None:
        """Commit the computed tokens of a lane to the prefix cache, unless tokens were evicted."""
        rows = self.rows
        begin, end = int(rows.committed[lane]), min(int(rows.computed[lane]), self.findable)
        size = self.pool.block_size
        if self.prefix is None or rows.gone[lane] or end // size <= begin // size:
            return
        self.prefix.commit(int(rows.handle[lane]), rows.known(lane, begin, end))
        rows.committed[lane] = end

    def until_checkpoint(self, lane: int, most: int) -> int:
        """Return how many of the next `most` tokens of a prefilling sequence one step may compute.

        A step ends where the pool takes a checkpoint.
        """
        if self.prefix is not None and self.has_checkpoints:
            due = int(self.prefix.wanted([self.rows.handle[lane]])[0]) - int(self.rows.computed[lane])
            if 0 < due < most:
                self.chunks_allowed += 1
                return due
        return most

    def leave(self, sequence: Sequence, state: int) -> None:
        """Remove a running sequence from its lane and save its numbers. The caller owns the handle."""
        rows, lane = self.rows, sequence.lane
        sequence.tokens = rows.generated_of(lane)
        sequence.logprobs = rows.logprobs_of(lane)
        sequence.computed = int(rows.computed[lane])
        sequence.high = max(sequence.high, sequence.computed)
        sequence.paid = max(sequence.paid, sequence.computed)
        rows.leave(lane)
        self.move(sequence, state)

    def was_alone(self) -> bool:
        """Return whether the request that runs alone has run alone since its admission."""
        return self.next_admission == self.alone_until

    def preempt(self, sequence: Sequence) -> None:
        """Close a running sequence and queue it before all others. A beam is preempted as a whole."""
        beam, lane = sequence.group.beam, sequence.lane
        if beam is not None:
            return beam.preempt(self)
        self.commit(lane)
        self.pool.close(int(self.rows.handle[lane]))
        self.leave(sequence, WAITING)
        sequence.preemptions += 1
        self.preemptions += 1
        self.queue.push(sequence, front=True)

    def output(self, sequence: Sequence, reason: str, now: float, score: float | None = None) -> Output:
        """Return the output of a sequence that has left its lane."""
        group = sequence.group
        times = Times(group.arrived, group.admitted, group.first_token, now)
        return Output(
            *(group.id, sequence.index, sequence.tokens, sequence.logprobs, score, reason),
            *(group.num_cached, sequence.preemptions, times),
        )

    def finish(self, sequence: Sequence, reason: str, now: float) -> Output:
        """End a sequence: commit and close it if it runs. The last one ends its request."""
        if sequence.lane >= 0:
            self.commit(sequence.lane)
            self.pool.close(int(self.rows.handle[sequence.lane]))
            self.leave(sequence, FINISHED)
        else:
            self.move(sequence, FINISHED)
        self.close_group(sequence.group, 1)
        return self.output(sequence, reason, now)

    def close_group(self, group: RequestGroup, ended: int) -> None:
        """Count `ended` more sequences of a request as ended. Forget the request after the last one."""
        group.unfinished -= ended
        if group.unfinished == 0:
            del self.groups[group.id]
            self.held.pop(group.id, None)
            group.tenant.requests -= 1
            self.ended[group.id] = None
            if len(self.ended) > REMEMBERED:
                del self.ended[next(iter(self.ended))]

    def new_group(self, request: Request, held: bool) -> RequestGroup:
        """Register a new request, and queue it unless it is held."""
        now, name = self.clock(), request.id
        if name is None:
            while self.next_id in self.groups:
                self.next_id += 1
            name = self.next_id
            self.next_id += 1
            request = copy(request)
            object.__setattr__(request, "id", name)  # requests are frozen
        self.ended.pop(name, None)
        group = RequestGroup(request, now)
        self.groups[name] = group
        self.unforked += not group.forked
        self.count[WAITING] += 1
        self.queue.enroll(group)
        if request.deadline is not None:
            self.remind(group, request.deadline)
        self.keeps = self.keeps or self.kept(request) is not None
        if held:
            self.held[name] = group
        else:
            self.queue.push(group.sequences[0])
        return group

    def remind(self, group: RequestGroup, deadline: float) -> None:
        """Note the deadline of a request. Those of requests that have ended leave when they are most."""
        if len(self.deadlines) > 64 + 2 * len(self.groups):
            self.deadlines = [one for one in self.deadlines if self.group_of(one) is not None]
            heapify(self.deadlines)
        heappush(self.deadlines, (deadline, group.rank[1], group.id))

    def group_of(self, reminder: tuple[float, int, Hashable]) -> RequestGroup | None:
        """Return the request of a deadline, None if it has ended."""
        group = self.groups.get(reminder[2])
        return group if group is not None and group.rank[1] == reminder[1] else None

    def close(self, handles: Iterable[int]) -> None:
        """Close those of the handles that are open, which none is after ``Pool.reset``. -1 is no handle."""
        self.pool.close([one for one in dict.fromkeys(handles) if one >= 0 and self.pool.is_open(one)])

    def release(self, sequence: Sequence) -> None:
        """Cancel a sequence in any state."""
        if sequence.lane >= 0:
            self.close([int(self.rows.handle[sequence.lane])])
            self.leave(sequence, FINISHED)
        else:
            self.queue.discard(sequence)
            self.spilled.pop(sequence, None)
            sequence.kept = None
            self.move(sequence, FINISHED)
        self.count[FINISHED] -= 1
        self.cancelled += 1

    def set_length(self, handle: int, tokens: int) -> None:
        """Set the length of a sequence that has its blocks. Their content comes from a tier: nothing is computed."""
        if self._length_plan is None:
            self._length_plan = Plan(self.pool, 1, 2**31 - 1, formats=("seq_lens",))
        plan = self._length_plan
        try:
            self.pool.step(plan, [handle], tokens)
            if plan.is_pending:
                self.pool.done(plan)
        except BaseException:
            if plan.is_pending:
                self.pool.rollback(plan)
            raise


# ---------------------------------------------------------------------- check

NAMES = ("waiting", "prefilling", "decoding", "spilled", "finished")


def check(core: Core, out: list[Step]) -> None:
    """Raise `CorruptState` for the first invariant that does not hold. `out` are the steps that are out."""
    sequences = live_sequences(core)
    check_states(core, sequences)
    check_lanes(core, sequences)
    new: Counter[int] = Counter()
    for step in out:
        new.update(dict(zip(step.handles.tolist(), step.num_new.tolist(), strict=True)))
    named: set[tuple[int, int]] = set()
    for sequence in sequences:
        if sequence.lane >= 0:
            check_running(core, sequence, new)
            named |= core.needs.named(int(core.rows.handle[sequence.lane]))
        else:
            require(len(sequence.tokens) < sequence.group.request.max_tokens, f"{name(sequence)} waits with all tokens")
    for arena, blocks in Counter(arena for arena, _ in named).items():
        used = core.pool.stats(arena).used
        require(blocks <= used, f"{blocks} blocks of arena {arena} are in tables, {used} in use")
    check_progress(core, out)


def require(holds: object, what: str) -> None:
    if not holds:
        raise CorruptState(f"[check] {what}")


def name(sequence: Sequence) -> str:
    return f"request {sequence.group.id!r}[{sequence.index}]"


def live_sequences(core: Core) -> list[Sequence]:
    """Return all sequences that have not ended. Those of a beam are its unfinished hypotheses."""
    found = []
    for key, group in core.groups.items():
        require(key == group.id, f"request {group.id!r} is filed as {key!r}")
        mine = [sequence for sequence in group.sequences if sequence.state != FINISHED]
        if group.beam is None:
            require(len(mine) == group.unfinished, f"request {key!r} counts {group.unfinished}, has {len(mine)}")
        require(mine, f"request {key!r} has ended and is still there")
        found += mine
    unforked = sum(not group.forked for group in core.groups.values())
    require(unforked == core.unforked, f"{core.unforked} requests count as not forked, {unforked} are")
    return found


def check_states(core: Core, sequences: list[Sequence]) -> None:
    """Check the counters of states, and the lists by state."""
    states = Counter(sequence.state for sequence in sequences)
    for state in (WAITING, PREFILLING, DECODING, SPILLED):
        require(states[state] == core.count[state], f"{core.count[state]} count as {NAMES[state]}, {states[state]} are")
    waiting = {s for s in sequences if s.state == WAITING and (s.group.beam is None or s.group.beam.live[0] is s)}
    held = {group.sequences[0] for group in core.held.values()}
    require(held <= waiting, "somebody is held who does not wait")
    waiting -= held
    queued = list(core.queue)
    require(set(queued) == waiting, "the queue is not who waits")
    require(len(core.queue) == sum(s.group.admitted is None for s in queued), "the queue miscounts new requests")
    require(len(set(queued)) == len(queued), "somebody waits twice")
    check_tenants(core)
    require(set(core.spilled) == {s for s in sequences if s.state == SPILLED}, "spilled is not who is spilled")


def check_tenants(core: Core) -> None:
    """Check the lines of the tenants, their turns, and what they have used."""
    queue = core.queue
    requests = Counter(group.tenant.name for group in core.groups.values())
    for name, tenant in queue.tenants.items():
        require(tenant.requests == requests.pop(name, 0), f"tenant {name!r} counts {tenant.requests} requests")
        ranks = [(sequence.group.rank, sequence.index) for sequence in tenant.line]
        new = sum(sequence.group.admitted is None for sequence in tenant.line)
        require(tenant.new == new, f"tenant {name!r} counts {tenant.new} new requests, {new} are")
        require(ranks == sorted(ranks), f"the line of tenant {name!r} is out of order")
        require(tenant.is_listed or not ranks, f"tenant {name!r} waits and gets no turn")
    require(not requests, f"tenants are forgotten that have requests: {sorted(map(repr, requests))}")
    most = max((group.passed for group in core.groups.values()), default=0)
    require(most <= queue.overtake, f"{most} requests passed one that found no room, {queue.overtake} may")


def check_lanes(core: Core, sequences: list[Sequence]) -> None:
    """Check that each lane is free, spare in a beam, or of one sequence, and that handles are distinct."""
    rows = core.rows
    used = [sequence.lane for sequence in sequences if sequence.lane >= 0]
    spare = [lane for beam in core.beams for lane in beam.spare]
    places = sorted([*used, *spare, *rows.free])
    require(places == list(range(core.max_running)), f"lanes are lost or used twice: {places}")
    for sequence in sequences:
        runs = sequence.state in (PREFILLING, DECODING)
        require(runs == (sequence.lane >= 0), f"{name(sequence)} is {NAMES[sequence.state]} in lane {sequence.lane}")
        if runs:
            require(rows.sequences[sequence.lane] is sequence, f"lane {sequence.lane} is not of {name(sequence)}")
            require(rows.state[sequence.lane] == sequence.state, f"lane {sequence.lane} has another state")
    width, most = rows.watch.shape[1], max(1, int(rows.watched.max()))
    require(most <= width < 2 * most, f"{width} tokens are watched for, {most} are the most of a lane")
    require(not rows.watched[rows.free].any(), "tokens are watched for in a free lane")
    handles = rows.handle[used].tolist()
    require(all(core.pool.is_open(handle) for handle in handles), "the handle of a running sequence is closed")
    require(len(set(handles)) == len(handles), "two sequences have one handle")
    idle = np.setdiff1d(np.arange(core.max_running), used)
    require((rows.handle[idle] == -1).all() and (rows.state[idle] == WAITING).all(), "a free lane has a handle")


def check_running(core: Core, sequence: Sequence, new: dict[int, int]) -> None:
    """Check the lengths of one running sequence."""
    rows, lane = core.rows, sequence.lane
    handle, computed, remaining = int(rows.handle[lane]), int(rows.computed[lane]), rows.remaining(lane)
    length = core.pool.num_tokens(handle) - new.get(handle, 0)
    require(length == computed, f"{name(sequence)} has {computed} computed tokens, the pool {length}")
    group = 0 if core.eviction is None else core.eviction.group
    held, gone = core.pool.kv_len(handle, group) - new.get(handle, 0), int(rows.gone[lane])
    require(held == computed - gone, f"{name(sequence)} has lost {gone} of {computed} tokens, the pool has {held}")
    if core.needs.evicting is not None:
        most = core.needs.evicting.budget
        require(held <= most, f"{name(sequence)} holds {held} tokens, {most} are the most")
    require(remaining >= 1, f"{name(sequence)} has computed more than it knows ({remaining} left)")
    require(rows.generated[lane] < sequence.group.request.max_tokens, f"{name(sequence)} runs with all tokens")
    beam = sequence.group.beam
    if beam is None or len(beam.live) == 1:
        require((sequence.state == DECODING) == (remaining == 1), f"{name(sequence)} has {remaining} left to compute")
    else:
        require(sequence.state != DECODING or remaining == 1, f"{name(sequence)} decodes with {remaining} left")
        require(len({s.state for s in beam.live}) == 1, f"the beam of {sequence.group.id!r} is not in lockstep")


def check_progress(core: Core, out: list[Step]) -> None:
    """Check for livelock: progress bounds the number of steps and preemptions (docs/scheduling.md)."""
    steps = core.steps - core.idle_steps
    most = core.sampled_tokens + core.chunks_allowed + core.spills
    require(steps <= most, f"{steps} steps for {core.sampled_tokens} tokens, at most {most}")
    turns = core.sampled_tokens + core.idle_steps + core.setbacks + len(out)
    require(
        core.preemptions <= core.max_running * turns,
        f"{core.preemptions} preemptions for {core.sampled_tokens} tokens and {core.max_running} lanes",
    )
