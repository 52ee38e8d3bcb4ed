"""`Scheduler`: continuous batching over a pool, one step at a time. It checks arguments; other modules do the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import int32, int64
from numpy.typing import NDArray

from kvpool._core import Plan, Pool
from kvpool.errors import OutOfBlocks, OutOfSequences, RequestRejected, UnknownRequest
from kvpool.scheduler import drafts, policy, results
from kvpool.scheduler.beams import Beam
from kvpool.scheduler.request import (
    DECODING,
    END_TOKENS,
    ENDS,
    FINISHED,
    PREFILLING,
    SAMPLES,
    WAITING,
    Output,
    Request,
    RequestGroup,
    SchedulerStats,
    TenantStats,
    WaitingQueue,
    integer,
    real,
)
from kvpool.scheduler.state import NOBODY, Core, DecodeBatch, Step, add, check

if TYPE_CHECKING:
    from kvpool.eviction import Evictor


def may_plan_ahead(core: Core, step: Step) -> bool:
    """Return whether the tokens of a step that is out decide nothing but which of its sequences end.

    False also where the next step may need a call of the pool that the step could not be taken back from.
    """
    if core.beams or core.spilled or core.eviction is not None or core.needs.lets_go:
        return False
    return not (core.unforked and (np.diff(step.sample_at) == 0).any())  # it ends no prompt that has samples


@contextmanager
def executed(core: Core, step: Step) -> Iterator[None]:
    """Make every sequence, inside the block, what it is after a step that is out, but for its newest token.

    A sequence that gets its last token has FINISHED there. All others go on: nobody knows yet whether they end.
    """
    rows = core.rows
    alive = results.alive(core, step)
    lanes, new, sampled = step.lanes, step.num_new.astype(np.int32), step.sample_lane
    if not alive.all():
        lanes, new = lanes[alive], new[alive]
        sampled = sampled[np.isin(sampled, lanes)]
    add(rows.computed, lanes, new)
    add(rows.generated, sampled, 1)
    chunks = step.lanes[step.num_decodes :][alive[step.num_decodes :]].tolist()
    last = sampled[rows.generated.take(sampled) >= rows.limit.take(sampled)].tolist()
    states = {sequence: sequence.state for sequence in map(rows.sequence, chunks + last)}
    for lane in chunks:
        core.set_phase(lane)
    for lane in last:
        core.move(rows.sequence(lane), FINISHED)
    core.is_ahead = True
    try:
        yield
    finally:
        core.is_ahead = False
        add(rows.computed, lanes, -new)
        add(rows.generated, sampled, -1)
        for sequence, state in states.items():
            if sequence.state != state:
                core.move(sequence, state)


_counters_of = attrgetter(*SchedulerStats._fields[5:])  # the others are sequences by state
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "cu_q_lens", "positions")
PadTo = tuple[int, int] | Callable[[int, int], tuple[int, int]] | None


class Scheduler:
    """Continuous batching over a pool, without tensors and without a model. ``docs/scheduling.md`` has every rule.

    Parameters
    ----------
    pool : Pool
        Others may use it beside the scheduler.
    max_running : int, default 256
        Most sequences that run at a time. Each has a lane, ``0 .. max_running - 1``.
    max_step_tokens : int, default 2048
        Token budget of a step. It never holds decodes back. Prefill chunks take what decodes leave.
    prefill_chunk : int, default 512
        Prompt tokens of one sequence in one step, at most.
    mixed : bool, default True
        Decodes and chunks share a step. False is for runners without a ragged forward pass: a step is decodes only, or
        one chunk.
    watermark : int, optional
        Blocks that an admission leaves free. Default: one per running sequence.
    preempt : {"last", "longest", "grower", "priority"}
        Selects the sequence to preempt and recompute when blocks run out.
    max_waiting : int, optional
        Reject requests when so many new ones wait. A tenant in `weights` may use its share of them.
    weights : mapping of tenants to numbers, optional
        What part of the service a tenant gets while several have requests that wait: 0.001 .. 1000. Others have 1.
    ageing : int, default 256
        Admissions of a tenant that make up for one level of priority: later requests of a higher one go first only if
        they come before so many for each level.
    overtake : int, default 16
        Requests that may overtake a new one which finds no room, at most.
    max_model_len : int, optional
        Tokens of a sequence, at most.
    formats : sequence of str
        Of the plans, see `Plan`.
    pad_to : (int, int) or callable, optional
        Static shape ``(rows, tokens)`` of the plan's arrays. A callable gets the shape of the batch and returns it.
    tier : object, optional
        ``spill_to_host(handle, blocks)`` and ``prefetch(kept, handle, blocks)``.
    clock : callable, default `time.monotonic`
        Fills the times of outputs, and says when a deadline has passed. Otherwise it has no influence on decisions.
    plans : int, default 1
        Plans that steps use in turn. With 2, the next step can be planned while one is out, and the arrays of a step
        stay valid during the next one.
    eviction : kvpool.eviction.Evictor, optional
        Evicts tokens of its layer group between two steps, so that each sequence stays within a budget.
    speculate : callable, optional
        Gets a list of `Decoding`, returns drafts for each: tokens that may come next. A decode computes its drafts in
        the same step, and `update` keeps those that are equal to the sampled tokens.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong type or out of range.

    Examples
    --------
    >>> from kvpool import Pool, Request, Scheduler
    >>> scheduler = Scheduler(Pool(num_blocks=16, block_size=4), max_running=4)
    >>> scheduler.add(Request([1, 2, 3], max_tokens=2))
    0
    >>> while (step := scheduler.schedule()) is not None:
    ...     outputs = scheduler.update(step, step.sample_position + 7)
    >>> outputs[0].tokens.tolist(), outputs[0].finish_reason
    ([7, 8], 'length')
    """

    def __init__(
        self,
        pool: Pool,
        *,
        max_running: int = 256,
        max_step_tokens: int = 2048,
        prefill_chunk: int = 512,
        mixed: bool = True,
        watermark: int | None = None,
        preempt: str = "last",
        max_waiting: int | None = None,
        max_model_len: int | None = None,
        formats: tuple[str, ...] = FORMATS,
        pad_to: PadTo = None,
        tier: Any = None,
        clock: Callable[[], float] = time.monotonic,
        plans: int = 1,
        eviction: Evictor | None = None,
        speculate: drafts.Propose | None = None,
        weights: Mapping[Hashable, float] = MappingProxyType({}),
        ageing: int = 256,
        overtake: int = 16,
    ) -> None:
        call = "Scheduler"
        if not isinstance(pool, Pool):
            raise TypeError(f"[{call}] pool must be a kvpool.Pool, not {type(pool).__name__}")
        max_running = integer(call, "max_running", max_running, 1, 2**20)
        max_step_tokens = integer(call, "max_step_tokens", max_step_tokens, 1)
        chunk = integer(call, "prefill_chunk", prefill_chunk, 1)
        plans = integer(call, "plans", plans, 1, 1024)
        if not isinstance(mixed, bool):
            raise TypeError(f"[{call}] mixed must be a bool, not {type(mixed).__name__} ({mixed!r})")
        if watermark is not None:
            watermark = integer(call, "watermark", watermark, 0)
        if preempt not in policy.POLICIES:
            known = ", ".join(policy.POLICIES)
            raise ValueError(f"[{call}] no such policy of preemption ({preempt!r}), there are {known}")
        self._max_waiting = None if max_waiting is None else integer(call, "max_waiting", max_waiting, 0)
        self._max_model_len = None if max_model_len is None else integer(call, "max_model_len", max_model_len, 1)
        if tier is not None and not (hasattr(tier, "spill_to_host") and hasattr(tier, "prefetch")):
            raise TypeError(f"[{call}] tier must have spill_to_host and prefetch, {type(tier).__name__} has not")
        if not callable(clock):
            raise TypeError(f"[{call}] clock must be callable, not {type(clock).__name__}")
        kinds = [group.kind for group in pool.options.groups]
        if tier is not None and set(kinds) != {"full"}:
            raise ValueError(f"[{call}] a tier moves blocks of full groups, this pool has others ({', '.join(kinds)})")
        _check_evictor(call, eviction, pool)
        drafts.check_proposer(call, speculate, pool, eviction)
        self._propose = speculate
        numbers = (max_running, max_step_tokens, chunk, mixed, watermark, preempt)
        self._core = Core(pool, *numbers, tier, clock, eviction, _queue(call, weights, ageing, overtake))
        self._pad_to = pad_to
        rows, tokens = max_running, max(max_step_tokens, max_running)
        if pad_to is not None and not callable(pad_to):
            try:
                pad_rows, pad_tokens = pad_to
            except (TypeError, ValueError):
                raise TypeError(f"[{call}] pad_to must be (rows, tokens) or callable, not {pad_to!r}") from None
            rows = integer(call, "pad_to[0]", pad_rows, rows)
            tokens = integer(call, "pad_to[1]", pad_tokens, tokens)
        width = pool.options.max_blocks_per_seq
        if self._max_model_len is not None:
            width = min(width, -(-self._max_model_len // pool.block_size))
        self._plans = [Plan(pool, rows, tokens, formats=formats, table_width=width) for _ in range(plans)]
        self._out, self._turn = list[Step](), 0  # oldest first

    def __repr__(self) -> str:
        counts = zip(SchedulerStats._fields[:4], self._core.count, strict=False)
        return f"<kvpool.Scheduler: {', '.join(f'{count} {state}' for state, count in counts)}>"

    # -- requests

    def add(self, request: Request, *, held: bool = False) -> Hashable:
        """Queue a request. Legal at any time, also while a step is out.

        With `held` it has its place in the queue, and others pass it until `release`: something that it needs comes
        from elsewhere, such as blocks of its prompt from a store.

        Returns
        -------
        hashable
            Its id.

        Raises
        ------
        RequestRejected
            The request could never run, or the queue is full. `reason` says which. State unchanged.
        ValueError, TypeError
            The id is in use; not a `Request`. State unchanged.
        """
        if not isinstance(request, Request):
            raise TypeError(f"[add] request must be a kvpool.Request, not {type(request).__name__}")
        if request.id is not None and request.id in self._core.groups:
            raise ValueError(f"[add] the id is in use ({request.id!r})")
        try:
            for reason, text in self._objections(request):
                raise RequestRejected(f"[add] {text}", reason)
            self._judge_queue(request.tenant)
        except RequestRejected:
            self._core.rejected += 1
            raise
        group = self._core.new_group(request, held)
        if request.beam_width:
            group.beam = Beam(group)
        return group.id

    def release(self, id: Hashable) -> None:
        """Let a request run that was added with `held`. Nothing happens if it is not held, or has ended."""
        group = self._core.held.pop(id, None)
        if group is not None:
            self._core.queue.push(group.sequences[0])  # at the place that it had when it came

    def _objections(self, request: Request) -> Iterator[tuple[str, str]]:
        """Yield why a request could never run: reasons and texts."""
        core, pool = self._core, self._core.pool
        prompt, width = len(request.prompt), request.beam_width
        tokens = prompt + request.max_tokens - 1  # the KV of the last token is never read, so never written
        if core.eviction is not None and width:
            yield "beam", f"a beam keeps every token (beam_width {width}), this scheduler evicts: ask for samples"
        for name, number in (("eos", len(request.eos)), ("stop", len(request.stop))):
            if number > ENDS:  # more than a step should look for
                yield "too_large", f"{name} has {number} entries, the limit is {ENDS}"
        if (longest := max(map(len, request.stop), default=0)) > END_TOKENS:
            yield "too_large", f"a stop sequence has {longest} tokens, the limit is {END_TOKENS}"
        if request.n > (most := max(SAMPLES, core.max_running)):
            yield "too_large", f"n is {request.n}, a request has at most {most} samples"
        if self._max_model_len is not None and tokens > self._max_model_len:
            more = request.max_tokens
            yield "too_long", f"{prompt} prompt tokens and {more} more, the model takes {self._max_model_len}"
        own, most = core.needs.widest(tokens), pool.options.max_blocks_per_seq
        if own > most:
            yield "too_large", f"{tokens} tokens need {own} blocks, a sequence has at most {most}"
        if width > (most := min(core.max_running, pool.options.max_seqs)):
            yield "too_large", f"a beam of {width} sequences, {most} may run"
        need = self._need(request)
        usable = core.needs.usable()
        arena = core.needs.short(need, usable)
        if arena >= 0:
            text = f"{tokens} tokens{f' in a beam of {width}' if width > 1 else ''} need {need[arena]} "
            yield "too_large", f"{text}{core.needs.name(arena)}, the pool has {usable[arena]}"
        if request.deadline is not None and request.deadline <= (now := core.clock()):
            yield "deadline", f"the deadline has passed ({request.deadline} <= {now})"

    def require_fit(self, call: str, num_blocks: Mapping[int, int]) -> None:
        """Raise OutOfBlocks if a request that has not ended could not run in arenas of so many blocks. O(requests)."""
        core = self._core
        core.tick()  # a smaller pool evicts; directives may have ended since the last step
        usable = core.needs.usable(num_blocks)
        for group in core.groups.values():
            need = self._need(group.request)
            arena = core.needs.short(need, usable)
            if arena >= 0:
                text = f"request {group.request.id!r} needs {need[arena]} {core.needs.name(arena)}"
                counts = {"needed": need[arena], "short_by": need[arena] - usable[arena], "arena": arena}
                raise OutOfBlocks(f"[{call}] {text}, {usable[arena]} would be left", **counts)

    def _need(self, request: Request) -> list[int]:
        """Return the most blocks of each arena that a request has at a time."""
        core, prompt, width = self._core, len(request.prompt), request.beam_width
        tokens = prompt + request.max_tokens - 1
        return core.needs.beam(tokens, prompt, width) if width > 1 else policy.blocks_alone(core, tokens)

    def _judge_queue(self, name: Hashable) -> None:
        queue, most = self._core.queue, self.places(name)
        if most is None:
            return
        tenant = queue.tenants.get(name)
        line, new = ([], 0) if tenant is None else (tenant.line, tenant.new)
        held = [group.tenant.name for group in self._core.held.values()]
        waiting, new = len(queue) + len(held), new + held.count(name)
        if waiting >= (self._max_waiting or 0):
            text = f"{waiting} requests wait, the limit is {self._max_waiting}"
        elif new >= most:
            text = f"{new} requests of this tenant wait, its share of {self._max_waiting} is {most}"
        else:
            return
        so_far = self._core.clock() - line[0].group.arrived if line else 0.0
        raise RequestRejected(f"[add] {text}", "queue_full", max(so_far, 0.0 if tenant is None else tenant.waited))

    def places(self, tenant: Hashable) -> int | None:
        """Return how many new requests of a tenant may wait, None if there is no limit."""
        return None if self._max_waiting is None else self._core.queue.share(tenant, self._max_waiting)

    def _find(self, call: str, name: Hashable) -> RequestGroup:
        group = self._core.groups.get(name)
        if group is None:
            unknown = "is not there: it was never added, or ended long ago"
            raise UnknownRequest(f"[{call}] request {name!r} {'has finished' if name in self._core.ended else unknown}")
        return group

    def cancel(self, id: Hashable) -> list[Output]:
        """Drop a request in any state. Its blocks are free at once. The pool protects those of a step that is out.

        Returns
        -------
        list of Output
            One for each sequence that had not ended, with its tokens so far.

        Raises
        ------
        UnknownRequest
            The request has finished, or was never added. State unchanged.
        """
        return results.cancel(self._core, self._find("cancel", id), self._core.clock())

    def expire(self) -> list[Output]:
        """End the requests whose deadline has passed. `update` does so, too. It is for times when no step is out."""
        return results.expire(self._core, self._core.clock()) if self._core.deadlines else []

    # -- steps

    def schedule(self) -> Step | None:
        """Decide the next step and take its blocks, in one allocator transaction for the whole batch.

        With two plans it may be called while a step is out. The next step is then planned before the tokens of this
        one are known (`Step.follows`).

        Returns
        -------
        Step or None
            None when no request is left, or all are held. While a step is out, None when the next one has to wait
            for it.

        Raises
        ------
        RuntimeError
            As many steps are out as may be: call `update` or `fail` first. State unchanged.
        OutOfBlocks, OutOfSequences
            Nothing can run, because other users of the pool hold what the first in line needs. Nothing is lost.

        Notes
        -----
        docs/scheduling.md has the order of decisions. Iteration-level scheduling is from Orca, chunks that never stall
        a decode are from Sarathi-Serve.
        """
        core, out, most = self._core, len(self._out), min(2, len(self._plans))
        if out == most:
            what = "a step is out" if most == 1 else "two steps are out"
            raise RuntimeError(f"[schedule] {what}; call update or fail first")
        if core.keeps:
            core.tick()
        if out:
            return self._ahead(self._out[0])
        if len(core.groups) == len(core.held):
            return None
        if core.eviction is not None:
            policy.keep_budgets(core)
        plan = self._plans[self._turn]
        if core.beams:
            for beam in list(core.beams):
                beam.spread(core)
        batch, chunks = self._decide()
        if batch is None and not chunks:  # a beam may have been admitted that only has to decode
            batch, chunks = self._decide()
        if chunks:
            batch, chunks = self._keep_promises(batch, chunks)
        if batch is None and not chunks:
            self._explain_idle()
        new = None
        if self._propose is not None and batch is not None:
            new = drafts.ask(core, self._propose, batch, chunks)
        return self._build(plan, batch, chunks, new)

    def _ahead(self, before: Step) -> Step | None:
        """Plan the step after one that is out. Return None if it has to wait for the tokens."""
        core = self._core
        if self._propose is not None or not may_plan_ahead(core, before):
            return None
        with suppress(policy.MustWait), executed(core, before):
            if core.has_room(core.batch()):
                plan = self._plans[self._turn]
                batch, chunks = self._decide()
                if (batch is not None or chunks) and self._finds_blocks(batch, chunks):
                    return self._build(plan, batch, chunks, before=before)
        return None

    def _decide(self) -> tuple[DecodeBatch | None, list[tuple[int, int]]]:
        """Return the batch that decodes, and (lane, tokens) of the chunks."""
        core = self._core
        core.newest = core.next_admission
        if not core.mixed and not (core.was_chunk and core.count[DECODING]):
            chunks = self._prefill_chunks(core.max_step_tokens, 1)
            if chunks:
                return None, chunks
        if not core.count[DECODING]:
            return None, self._prefill_chunks(core.max_step_tokens, core.max_running) if core.mixed else []
        batch = core.batch()  # taken before admissions, which are chunks, not decodes
        if not core.has_room(batch):
            batch = policy.make_room(core)
        if not core.count[DECODING]:  # every decode was preempted, so the step must have a chunk
            return None, self._prefill_chunks(core.max_step_tokens, core.max_running if core.mixed else 1)
        if not core.mixed:
            return batch, []
        if not (core.count[PREFILLING] or core.count[WAITING] or core.spilled):
            core.growing = None
            return batch, []
        return batch, self._prefill_chunks(core.max_step_tokens - len(batch.lanes), core.max_running)

    def _keep_promises(
        self, batch: DecodeBatch | None, chunks: list[tuple[int, int]]
    ) -> tuple[DecodeBatch | None, list[tuple[int, int]]]:
        """Leave out the last chunks of a step if others of the pool took promised blocks. If none is left, make way."""
        core = self._core
        while not self._finds_blocks(batch, chunks):
            chunks.pop()
            if not chunks and batch is None:
                policy.make_way(core, "its next chunk", max(0, core.needs.short(core.promised(), core.needs.free())))
                batch, chunks = self._decide()
        return batch, chunks

    def _finds_blocks(self, batch: DecodeBatch | None, chunks: list[tuple[int, int]]) -> bool:
        """Return whether the chunks of a step, if it has any, find their blocks beside the decodes."""
        if not chunks:
            return True
        handles = [] if batch is None else batch.handles.tolist()
        num_new = [1] * len(handles) + [new for _, new in chunks]
        return self._core.pool.can([*handles, *(int(self._core.rows.handle[lane]) for lane, _ in chunks)], num_new)

    def _prefill_chunks(self, budget: int, most: int) -> list[tuple[int, int]]:
        """Continue running prefills, then spend the rest of the budget on admissions."""
        core = self._core
        chunks: list[tuple[int, int]] = []
        core.growing = None
        if not (core.count[PREFILLING] or core.count[WAITING] or core.spilled):
            return chunks
        running = core.rows.running(PREFILLING).tolist() if core.count[PREFILLING] else []
        lanes = chain(running, (sequence.lane for sequence in iter(partial(policy.admit_next, core), None)))
        while budget > 0 and len(chunks) < most and (lane := next(lanes, None)) is not None:
            new = min(self._wanted(lane), core.chunk, budget)
            if new:
                chunks.append((lane, new))
                budget -= new
        return chunks

    def _wanted(self, lane: int) -> int:
        """Return how many tokens a prefilling sequence may compute now."""
        core = self._core
        sequence = core.rows.sequence(lane)
        beam = sequence.group.beam
        most = core.rows.remaining(lane) if beam is None else beam.wanted(core, sequence)
        return core.until_checkpoint(lane, most)

    def _explain_idle(self) -> None:
        """Raise: nothing runs and nothing can be admitted, because others hold the pool."""
        core = self._core
        stats = core.pool.stats()
        if stats.sequences == core.pool.options.max_seqs:
            raise OutOfSequences(f"[schedule] nothing runs, and all {stats.sequences} sequences of the pool are open")
        arena, head = 0, core.queue.head()
        if head is not None:
            arena = max(0, core.needs.short(core.needs.alone(len(policy.known_tokens(head))), core.needs.free()))
            stats = core.pool.stats(arena)
        text = (
            f"nothing runs and the first in line finds no room: {stats.blank} {core.needs.name(arena)} are blank, "
            f"{stats.evictable} evictable, {stats.limbo} in limbo, {stats.sequences} sequences open; "
            "others of the pool hold the rest"
        )
        raise policy.out_of_blocks(text, stats, arena)

    def _build(
        self,
        plan: Plan,
        batch: DecodeBatch | None,
        chunks: list[tuple[int, int]],
        new: NDArray[int64] | None = None,
        before: Step | None = None,
    ) -> Step:
        """Step the pool once. `new`: tokens of each decode, if there are drafts. `before`: a step that is out."""
        core, rows = self._core, self._core.rows
        decodes, plain = (0, None) if batch is None else (len(batch.lanes), batch if batch.plain else None)
        if batch is None or chunks or new is not None:
            tokens, arrays, samples = self._mixed(batch, new, chunks)
        else:
            tokens, arrays = rows.last[batch.lanes], (batch.lanes32, batch.handles, rows.ones[:decodes])
            samples = rows.order[:decodes], batch.lanes32
            samples = (*samples, batch.index, batch.width) if plain else self._samples(*samples)
        pad_to = self._pad_to(len(arrays[0]), len(tokens)) if callable(self._pad_to) else self._pad_to
        step = Step(rows, plan, plain, tokens, decodes, *arrays, *samples)
        if new is not None:
            step.count_drafts()
        if before is not None:
            step.follow(before)
        core.newest = NOBODY
        try:
            self._out, self._turn = [*self._out, step], (self._turn + 1) % len(self._plans)
            core.pool.step(plan, arrays[1], 1 if len(tokens) == decodes else arrays[2], pad_to=pad_to)
            core.was_chunk = batch is None
            return step
        except BaseException:  # of the pool, which changes nothing then; or a signal, perhaps behind its step
            if step in self._out and self._has_run(step):
                self.fail(step)
            elif step in self._out:
                self._out, self._turn = self._out[:-1], (self._turn - 1) % len(self._plans)
            raise

    def _has_run(self, step: Step) -> bool:
        """Whether the pool has made the step that is the last one out."""
        pool, handle = self._core.pool, int(step.handles[0])
        if not pool.options.in_order:
            return step.plan.is_pending
        due = int(self._core.rows.computed[step.lanes[0]])
        due += sum(int(one.num_new[one.handles == handle].sum()) for one in self._out[:-1])
        return pool.is_open(handle) and pool.num_tokens(handle) > due

    def _mixed(
        self, batch: DecodeBatch | None, new: NDArray[int64] | None, chunks: list[tuple[int, int]]
    ) -> tuple[NDArray[int32], Any, Any]:
        """Return the tokens of a step with chunks or drafts, the arrays of its rows, and those of its samples."""
        rows = self._core.rows
        lanes = np.array([lane for lane, _ in chunks], np.int32)
        num_new = np.array([count for _, count in chunks], np.int64)
        parts, begin = self._inputs(lanes, num_new), rows.computed[lanes]
        sampled = begin + num_new == rows.prompt[lanes] + rows.generated[lanes]
        at, of, handles = num_new.cumsum()[sampled] - 1, lanes[sampled], rows.handle[lanes]
        if batch is not None:
            decodes = len(batch.lanes)
            if new is None:
                first, own, sampled = [rows.last[batch.lanes]], rows.ones[:decodes], batch.lanes32
            else:
                first, own, sampled = self._inputs(batch.lanes32, new), new, np.repeat(batch.lanes32, new)
            parts = [*first, *parts]
            at = np.concatenate([np.arange(len(sampled)), at + len(sampled)])
            of, lanes = np.concatenate([sampled, of]), np.concatenate([batch.lanes32, lanes])
            num_new, handles = np.concatenate([own, num_new]), np.concatenate([batch.handles, handles])
        return np.concatenate(parts), (lanes, handles, num_new), self._samples(at.astype(np.int32), of)

    def _inputs(self, lanes: NDArray[int32], num_new: NDArray[int64]) -> list[NDArray[int32]]:
        """Return the next so many tokens of each lane."""
        rows = self._core.rows
        begin = rows.computed[lanes]
        pieces = zip(lanes.tolist(), begin.tolist(), (begin + num_new).tolist(), strict=True)
        return [rows.known(*piece) for piece in pieces]

    def _samples(self, at: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return positions, lanes, sample numbers and beam widths of the samples."""
        core = self._core
        index = core.rows.index[lane]
        if core.unforked:
            at, lane, index = results.fan_out(core, at, lane, index)
        return at, lane, index, core.rows.width[lane]

    def update(
        self,
        step: Step,
        tokens: NDArray[int32],
        logprobs: NDArray[np.float32] | None = None,
        beams: tuple[NDArray[int32], NDArray[np.float32]] | None = None,
    ) -> list[Output]:
        """Take the sampled tokens of a step that was executed.

        Parameters
        ----------
        step : Step
            The one that is out, of two the first.
        tokens : int32 ``[M]``
            One for each of ``step.sample_at``. Those of beams are ignored.
        logprobs : float32 ``[M]``, optional
            Logprobs of these tokens.
        beams : (int32 ``[Mb, K]``, float32 ``[Mb, K]``), optional
            For the Mb samples of beams, in order: the K >= 2 * width best continuations and their logprobs. -inf marks
            a missing continuation.

        Returns
        -------
        list of Output
            The sequences that ended, in order of rows, then those whose deadline has passed.

        Raises
        ------
        TypeError, ValueError
            Wrong shapes or dtypes, tokens out of range, NaN. State unchanged, the step is still out.
        RuntimeError
            This step is not out, or not the first of two. State unchanged.
        PlanStateError, StaleHandle
            Somebody has reset the pool. State unchanged, the step is still out: call `fail`, and `cancel` what ran.
        """
        if not self._out or step is not self._out[0]:
            self._check_out("update", step)
            raise RuntimeError("[update] the step before this one is out: update or fail it first")
        given = results.read(step, tokens, logprobs, beams)
        now = self._core.clock()  # it may raise, so it comes before any change
        if self._core.pool.options.in_order:
            self._core.pool.can(step.handles[results.alive(self._core, step)], 0)  # raises if the pool was reset
        else:
            self._core.pool.done(step.plan)
        del self._out[0]
        if step.num_drafts:
            step, given = drafts.settle(self._core, step, given)
        outputs = results.take(self._core, step, given, now)
        return outputs + results.expire(self._core, now) if self._core.deadlines else outputs

    def fail(self, step: Step) -> None:
        """Take back a step that the backend did not execute, and one that was planned while it was out.

        Every sequence is as before `schedule`. Admissions and cancellations stay. A pool with ``in_order=True`` cannot
        roll back: there the sequences of the step are preempted and recomputed.

        Raises
        ------
        RuntimeError
            This step is not out. State unchanged.
        """
        self._check_out("fail", step)
        core, first = self._core, self._out.index(step)
        failed = self._out[first:]
        del self._out[first:]
        self._turn = (self._turn - len(failed)) % len(self._plans)
        core.setbacks += len(failed)
        if core.eviction is not None:
            core.eviction.forget()
        if core.pool.options.in_order:
            results.give_up(core, failed)
        for one in reversed(failed):
            if one.plan.is_pending:  # not in order, and nobody has reset the pool
                core.pool.rollback(one.plan)

    def _check_out(self, call: str, step: Step) -> None:
        if not isinstance(step, Step):
            raise TypeError(f"[{call}] step must be a kvpool.scheduler.Step, not {type(step).__name__}")
        if step not in self._out:
            raise RuntimeError(f"[{call}] this step is not out: it was updated or failed, or another scheduler made it")

    # -- questions

    @property
    def out(self) -> tuple[Step, ...]:
        """The steps that are out, oldest first: also one whose `schedule` was interrupted when it was made."""
        return tuple(self._out)

    @property
    def handles(self) -> NDArray[int64]:
        """The sequences in the pool that have a lane, in order of lanes: all that hold a state."""
        handles = self._core.rows.handle
        held: NDArray[int64] = handles[handles >= 0]
        return held

    def tokens_of(self, id: Hashable, index: int = 0) -> NDArray[int32]:
        """Return a copy of the tokens that a sequence has generated so far.

        Raises
        ------
        UnknownRequest, ValueError
            No such request; it has no such sequence (yet).
        """
        sequences = self._find("tokens_of", id).sequences
        sequence = sequences[integer("tokens_of", "index", index, 0, len(sequences) - 1)]
        return self._core.rows.generated_of(sequence.lane) if sequence.lane >= 0 else sequence.tokens.copy()

    def request_of(self, lane: int) -> Request:
        """Return the request that runs in a lane, with its id. ValueError if none does."""
        lane = integer("request_of", "lane", lane, 0, self._core.max_running - 1)
        sequence = self._core.rows.sequences[lane]
        if sequence is None:
            raise ValueError(f"[request_of] nothing runs in lane {lane}")
        return sequence.group.request

    def waiting(self, most: int) -> list[Request]:
        """Return the request of each sequence that waits, `most` of them."""
        return [sequence.group.request for sequence in islice(self._core.queue, most)]

    def stats(self) -> SchedulerStats:
        """Return the counters, in O(1)."""
        return SchedulerStats(*self._core.count, *_counters_of(self._core))

    def tenants(self) -> dict[Hashable, TenantStats]:
        """Return what each tenant of `weights` has and got, by name."""
        queue = self._core.queue
        known = ((name, queue.tenants[name]) for name in queue.weights)
        return {name: TenantStats(one.new, one.requests, one.served) for name, one in known}

    def check(self) -> None:
        """Recompute every counter and invariant, also those of the pool. CorruptState if one is wrong."""
        self._core.pool.check()
        check(self._core, self._out)


def _queue(call: str, weights: Mapping[Hashable, float], ageing: int, overtake: int) -> WaitingQueue:
    if not isinstance(weights, Mapping):
        raise TypeError(f"[{call}] weights must be a mapping, not {type(weights).__name__}")
    shares = {name: real(call, f"weights[{name!r}]", weight, 0.001, 1000) for name, weight in weights.items()}
    return WaitingQueue(shares, integer(call, "ageing", ageing, 1), integer(call, "overtake", overtake, 0))


def _check_evictor(call: str, eviction: Any, pool: Pool) -> None:
    if eviction is None:
        return
    from kvpool.eviction import Evictor

    if not isinstance(eviction, Evictor):
        raise TypeError(f"[{call}] eviction must be a kvpool.eviction.Evictor, not {type(eviction).__name__}")
    if eviction.pool is not pool:
        raise ValueError(f"[{call}] the evictor is on another pool ({eviction.pool!r})")
