"""`Core`: the state of a scheduler and the moves between states. No policy, no arguments to check."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool._core import Plan, Pool
from kvpool.scheduler.queue import WaitingQueue
from kvpool.scheduler.request import Output, Request, Times
from kvpool.scheduler.rows import Rows
from kvpool.scheduler.sequence import DECODING, FINISHED, PREFILLING, SPILLED, WAITING, Group, Sequence

if TYPE_CHECKING:
    from kvpool.eviction import Evictor

REMEMBERED = 4096


class Batch:
    """The sequences that decode, until one comes or goes: what a step of them needs, gathered once.

    Attributes
    ----------
    slots : intp ``[S]``
        In order of admission.
    plain : bool
        Each samples one token: no beam, no samples to be forked.
    """

    __slots__ = ("handles", "index", "limit", "plain", "shared", "slots", "slots32", "watch", "width")

    def __init__(self, rows: Rows, unforked: int) -> None:
        slots = self.slots = rows.running(DECODING)
        self.slots32 = slots.astype(np.int32)
        self.handles = rows.handle[slots]
        self.index = rows.index[slots]
        self.width = rows.width[slots]
        self.watch = rows.watch[slots]
        self.limit = rows.limit[slots]
        self.shared = bool(rows.shared[slots].any())
        for array in (self.slots32, self.handles, self.index, self.width):
            array.flags.writeable = False  # the steps show them
        self.plain = not self.width.any() and not (
            unforked and any(not rows.sequence(slot).group.forked for slot in slots.tolist())
        )


class Core:
    """What a scheduler knows. Parameters as of `Scheduler`."""

    def __init__(
        self,
        pool: Pool,
        max_running: int,
        max_step_tokens: int,
        prefill_chunk: int,
        mixed: bool,
        watermark: int | None,
        policy: str,
        tier: Any,
        clock: Callable[[], float],
        eviction: Evictor | None = None,
    ) -> None:
        self.pool = pool
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.chunk = min(prefill_chunk, max_step_tokens)
        self.mixed = mixed
        self.watermark = watermark
        self.policy = policy
        self.tier = tier
        self.clock = clock
        self.eviction = eviction
        self.findable = 2**31 - 1  # tokens of a prompt that are looked up and published at most
        if eviction is not None:  # a sequence begins below its budget: what leaves has been looked at
            self.findable = (eviction.policy.max_kv - 1) // pool.block_size * pool.block_size
        self.prefix = pool.prefix
        self.rows = Rows(max_running)
        self.queue = WaitingQueue()
        self.spilled: dict[Sequence, None] = {}  # oldest first
        self.groups: dict[Hashable, Group] = {}
        self.ended: dict[Hashable, None] = {}  # ids of the latest, for messages
        self.beams: list[Any] = []  # running ones
        self.next_id = 0
        self.next_admission = 0
        self.alone_until = 0  # `next_admission` after the last admission at which nobody ran
        self.count = [0] * 5  # sequences by state, as they are now; FINISHED: by themselves, ever
        self.cancelled = self.rejected = self.admissions = self.preemptions = self.spills = self.steps = 0
        self.decode_tokens = self.prefill_tokens = self.recomputed_tokens = self.hit_tokens = self.sampled_tokens = 0
        self.evicted_tokens = 0
        self.idle_steps = 0  # steps that lost rows to a cancellation: they may have sampled nothing
        self.setbacks = 0  # failed steps, and what other users of the pool took away: preemptions without progress
        self.chunks_allowed = 0  # sum over admissions of ceil(tokens to compute / chunk)
        self.unforked = 0  # requests with samples that are not forked yet
        self.step_out = False
        self.was_chunk = False  # the last step was a chunk (not mixed)
        self.dead: list[int] = []  # slots whose sequence was cancelled while the step is out
        self.changed = True  # which sequences decode
        self.growing = -1  # decodes of this step that may take a block, -1: not counted yet
        self._batch = Batch(self.rows, 0)
        self._length_plan: Plan | None = None

    # -- who decodes

    def batch(self) -> Batch:
        """Who decodes, as it is now."""
        if self.changed:
            self._batch = Batch(self.rows, self.unforked)
            self.changed = False
        return self._batch

    def available(self) -> int:
        """Blocks that a call could take."""
        stats = self.pool.stats()
        return stats.free

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.pool.block_size)

    # -- moves

    def move(self, sequence: Sequence, state: int) -> None:
        """Change the state of a sequence, and the counters with it."""
        self.count[sequence.state] -= 1
        self.count[state] += 1
        sequence.state = state
        if sequence.slot >= 0:
            self.rows.state[sequence.slot] = state
        self.changed = True

    def wait(self, sequence: Sequence, *, front: bool = False) -> None:
        """A sequence that is in no list waits from now on."""
        self.queue.push(sequence, front=front)

    def start(self, sequence: Sequence, slot: int, handle: int, computed: int, admitted: int) -> None:
        """A sequence gets a slot (taken already) and a handle."""
        self.rows.put(slot, sequence, handle, computed, admitted)
        if self.eviction is not None:
            self.eviction.memory.start(slot)
        self.move(sequence, PREFILLING)
        self.set_phase(slot)

    def admission_number(self, n: int = 1) -> int:
        """First of n consecutive numbers."""
        if not self.count[PREFILLING] + self.count[DECODING]:
            self.alone_until = self.next_admission + n
        self.next_admission += n
        return self.next_admission - n

    def set_phase(self, slot: int) -> None:
        """PREFILLING or DECODING, by what is left to compute. A beam's sequences decode together."""
        sequence = self.rows.sequence(slot)
        beam = sequence.group.beam
        if beam is not None and len(beam.live) > 1:
            return
        state = DECODING if self.rows.remaining(slot) == 1 else PREFILLING
        if sequence.state != state:
            self.move(sequence, state)

    def commit(self, slot: int) -> None:
        """Publish what is computed in a slot; nothing without a prefix cache, or where tokens were evicted."""
        rows = self.rows
        begin, end = int(rows.committed[slot]), min(int(rows.computed[slot]), self.findable)
        size = self.pool.block_size
        if self.prefix is None or rows.gone[slot] or end // size <= begin // size:
            return
        self.prefix.commit(int(rows.handle[slot]), rows.known(slot, begin, end))
        rows.committed[slot] = end

    def leave(self, sequence: Sequence, state: int) -> None:
        """Take a running sequence off its slot, its numbers with it. The handle is the caller's."""
        rows, slot = self.rows, sequence.slot
        sequence.tokens = rows.generated_of(slot)
        sequence.logprobs = rows.logprobs_of(slot)
        sequence.computed = int(rows.computed[slot])
        sequence.high = max(sequence.high, sequence.computed)
        rows.leave(slot)
        self.move(sequence, state)

    def was_alone(self) -> bool:
        """Whether the request that runs alone has done so since it was admitted."""
        return self.next_admission == self.alone_until

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence loses its blocks and waits, first of its priority; with a beam all of it."""
        beam = sequence.group.beam
        if beam is not None:
            beam.preempt(self)
            return
        slot = sequence.slot
        self.commit(slot)
        self.pool.close(int(self.rows.handle[slot]))
        self.leave(sequence, WAITING)
        sequence.preemptions += 1
        self.preemptions += 1
        self.wait(sequence, front=True)

    def output(self, sequence: Sequence, reason: str, now: float, score: float | None = None) -> Output:
        """What a sequence that has left its slot hands back."""
        group = sequence.group
        times = Times(group.arrived, group.admitted, group.first_token, now)
        return Output(
            *(group.id, sequence.index, sequence.tokens, sequence.logprobs, score, reason),
            *(group.num_cached, sequence.preemptions, times),
        )

    def finish(self, sequence: Sequence, reason: str, now: float) -> Output:
        """End a sequence that runs, or never had to: publish it, close it, and its request with the last one."""
        if sequence.slot >= 0:
            self.commit(sequence.slot)
            self.pool.close(int(self.rows.handle[sequence.slot]))
            self.leave(sequence, FINISHED)
        else:
            self.move(sequence, FINISHED)
        self.close_group(sequence.group, 1)
        return self.output(sequence, reason, now)

    def create(self, group: Group, index: int) -> Sequence:
        """A new sequence, in state WAITING and in no list."""
        self.count[WAITING] += 1
        return Sequence(group, index)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence; its slot stays taken, its handle is the caller's."""
        self.count[sequence.state] -= 1
        self.changed = True
        if sequence.slot >= 0:
            self.rows.vacate(sequence.slot)

    def close_group(self, group: Group, ended: int) -> None:
        """So many more sequences of a request have ended."""
        group.unfinished -= ended
        if group.unfinished == 0:
            del self.groups[group.id]
            self.ended[group.id] = None
            if len(self.ended) > REMEMBERED:
                del self.ended[next(iter(self.ended))]

    def new_group(self, request: Request) -> Group:
        """A request arrives."""
        name = request.id
        if name is None:
            while self.next_id in self.groups:
                self.next_id += 1
            name = self.next_id
            self.next_id += 1
        self.ended.pop(name, None)
        group = Group(request, name, self.clock())
        self.groups[name] = group
        self.unforked += not group.forked
        self.count[WAITING] += 1
        self.wait(group.sequences[0])
        return group

    def release(self, sequence: Sequence) -> None:
        """A sequence is cancelled: drop what it has, in whatever state. Its slot stays until the step is in."""
        state, slot = sequence.state, sequence.slot
        if state == WAITING:
            self.queue.discard(sequence)
        elif state == SPILLED:
            del self.spilled[sequence]
            sequence.kept = None
        if slot >= 0:
            rows = self.rows
            self.pool.close(int(rows.handle[slot]))
            sequence.tokens, sequence.logprobs = rows.generated_of(slot), rows.logprobs_of(slot)
            rows.handle[slot] = -1
            if self.step_out:
                self.dead.append(slot)
            else:
                rows.leave(slot)
        self.move(sequence, FINISHED)
        self.count[FINISHED] -= 1
        self.cancelled += 1
        if slot >= 0 and self.step_out:
            self.rows.state[slot] = WAITING

    def bury(self) -> None:
        """The step is in: slots of what was cancelled meanwhile are free."""
        for slot in self.dead:
            self.rows.leave(slot)
        self.dead.clear()

    def set_length(self, handle: int, tokens: int) -> None:
        """Let a sequence have a length, its blocks being there: their content comes from a tier."""
        if self._length_plan is None:
            self._length_plan = Plan(self.pool, 1, 2**31 - 1, formats=("seq_lens",))
        self.pool.step(self._length_plan, [handle], tokens)
        if not self.pool.options.in_order:
            self.pool.done(self._length_plan)
