"""`Scheduler`: continuous batching over a pool, one step at a time. Checks arguments; its parts do the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import int32
from numpy.typing import NDArray

from kvpool._core import Plan, Pool
from kvpool.errors import OutOfBlocks, OutOfSequences, RequestRejected, UnknownRequest
from kvpool.scheduler import results
from kvpool.scheduler.admission import admit_next
from kvpool.scheduler.beams import Beam
from kvpool.scheduler.check import check
from kvpool.scheduler.core import Batch, Core
from kvpool.scheduler.eviction import blocks_alone, keep_budgets, most_tokens
from kvpool.scheduler.eviction import judge as judge_eviction
from kvpool.scheduler.request import Output, Request, integer
from kvpool.scheduler.room import POLICIES, make_room
from kvpool.scheduler.sequence import DECODING, PREFILLING, SPILLED, WAITING, Group, Sequence
from kvpool.scheduler.stats import SchedulerStats
from kvpool.scheduler.step import Step

if TYPE_CHECKING:
    from kvpool.eviction import Evictor

FORMATS = ("block_tables", "seq_lens", "slot_mapping", "cu_q_lens", "positions")
PadTo = tuple[int, int] | Callable[[int, int], tuple[int, int]] | None


class Scheduler:
    """Continuous batching as policy over a pool: no tensors, no model. ``docs/scheduling.md`` has every rule.

    Parameters
    ----------
    pool : Pool
        May be used by others beside the scheduler.
    max_running : int, default 256
        Sequences that run at a time, at most; each has a slot below it.
    max_step_tokens : int, default 2048
        Token budget of a step. Decodes are never held back by it, prefill chunks take what they leave.
    prefill_chunk : int, default 512
        Prompt tokens of one sequence in one step, at most.
    mixed : bool, default True
        Decodes and chunks in one step. False, for runners without a ragged forward: decodes only, or one chunk.
    watermark : int, optional
        Blocks that an admission leaves free. Default: one per running sequence.
    preempt : {"last", "longest", "grower", "priority"}
        Who is recomputed when blocks run out.
    max_waiting : int, optional
        Requests beyond so many waiting sequences are rejected.
    max_model_len : int, optional
        Tokens of a sequence, at most.
    formats : sequence of str
        Of the plans, see `Plan`.
    pad_to : (int, int) or callable, optional
        Static shape ``(rows, tokens)`` of the plan's arrays; a callable is given the batch's and returns the shape.
    tier : object, optional
        ``spill_to_host(handle, blocks)`` and ``prefetch(kept, handle, blocks)``.
    clock : callable, default `time.monotonic`
        Fills the times of outputs, decides nothing.
    plans : int, default 1
        Plans that steps use in turn: with 2, a step's arrays hold until the one after the next.
    eviction : kvpool.eviction.Evictor, optional
        Keeps sequences within a budget of tokens: between two steps some leave.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong type or out of range.

    Examples
    --------
    >>> from kvpool._core import Pool, Request, Scheduler
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
        if preempt not in POLICIES:
            raise ValueError(f"[{call}] no such policy of preemption ({preempt!r}), there are {', '.join(POLICIES)}")
        self._max_waiting = None if max_waiting is None else integer(call, "max_waiting", max_waiting, 0)
        self._max_model_len = None if max_model_len is None else integer(call, "max_model_len", max_model_len, 1)
        if tier is not None and not (hasattr(tier, "spill_to_host") and hasattr(tier, "prefetch")):
            raise TypeError(f"[{call}] tier must have spill_to_host and prefetch, {type(tier).__name__} has not")
        if not callable(clock):
            raise TypeError(f"[{call}] clock must be callable, not {type(clock).__name__}")
        _check_evictor(call, eviction, pool)
        numbers = (max_running, max_step_tokens, chunk, mixed, watermark, preempt)
        self._core = Core(pool, *numbers, tier, clock, eviction)
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
        self._out: Step | None = None
        self._turn = 0

    def __repr__(self) -> str:
        count = self._core.count
        return (
            f"<kvpool.Scheduler: {count[WAITING]} waiting, {count[PREFILLING]} prefilling, "
            f"{count[DECODING]} decoding, {count[SPILLED]} spilled>"
        )

    # -- requests

    def add(self, request: Request) -> Hashable:
        """Queue a request; legal at any time, also while a step is out.

        Returns
        -------
        hashable
            Its id.

        Raises
        ------
        RequestRejected
            It could never run, or the queue is full; `reason` says which. State unchanged.
        ValueError
            The id is in use. State unchanged.
        TypeError
            Not a `Request`. State unchanged.
        """
        if not isinstance(request, Request):
            raise TypeError(f"[add] request must be a kvpool.Request, not {type(request).__name__}")
        if request.id is not None and request.id in self._core.groups:
            raise ValueError(f"[add] the id is in use ({request.id!r})")
        try:
            self._judge(request)
        except RequestRejected:
            self._core.rejected += 1
            raise
        group = self._core.new_group(request)
        if request.beam_width:
            group.beam = Beam(group)
        return group.id

    def _judge(self, request: Request) -> None:
        core, pool = self._core, self._core.pool
        prompt = len(request.prompt)
        tokens = prompt + request.max_tokens - 1  # nothing reads the KV of the last one: it is never written
        judge_eviction(core, request)
        need = blocks_alone(core, tokens)
        width = request.beam_width
        if self._max_model_len is not None and tokens > self._max_model_len:
            raise RequestRejected(
                f"[add] {prompt} prompt tokens and {request.max_tokens} more, the model takes {self._max_model_len}",
                "too_long",
            )
        own = core.blocks(most_tokens(core, tokens))
        if own > pool.options.max_blocks_per_seq:
            raise RequestRejected(
                f"[add] {tokens} tokens need {own} blocks, a sequence has at most {pool.options.max_blocks_per_seq}",
                "too_large",
            )
        if width > min(core.max_running, pool.options.max_seqs):
            raise RequestRejected(
                f"[add] a beam of {width} sequences, {min(core.max_running, pool.options.max_seqs)} may run",
                "too_large",
            )
        usable = pool.num_blocks - pool.options.reserved_blocks - pool.options.watermark
        shared = prompt // pool.block_size
        if width > 1:
            need = shared + width * (need - shared + 1)
        if need > usable:
            raise RequestRejected(
                f"[add] {tokens} tokens{f' in a beam of {width}' if width > 1 else ''} need {need} blocks, "
                f"the pool has {usable}",
                "too_large",
            )
        if self._max_waiting is not None and len(core.queue) >= self._max_waiting:
            raise RequestRejected(
                f"[add] {len(core.queue)} sequences wait, the limit is {self._max_waiting}", "queue_full"
            )

    def _find(self, call: str, name: Hashable) -> Group:
        group = self._core.groups.get(name)
        if group is None:
            known = (
                "has finished" if name in self._core.ended else "is not there: it was never added, or ended long ago"
            )
            raise UnknownRequest(f"[{call}] request {name!r} {known}")
        return group

    def cancel(self, id: Hashable) -> list[Output]:
        """Drop a request in whatever state; its blocks are free at once (fences protect a step that is out).

        Returns
        -------
        list of Output
            One for each sequence that had not ended, with what it had so far.

        Raises
        ------
        UnknownRequest
            It has finished, or was never added. State unchanged.
        """
        return results.cancel(self._core, self._find("cancel", id))

    # -- steps

    def schedule(self) -> Step | None:
        """Decide the next step and take its blocks: one allocator transaction for the whole batch.

        Returns
        -------
        Step or None
            None when no request is left.

        Raises
        ------
        RuntimeError
            A step is out: `update` or `fail` comes first. State unchanged.
        OutOfBlocks, OutOfSequences
            Nothing can run, because others of the pool hold what the first in line needs. Nothing is lost.

        Notes
        -----
        The order of decisions is that of docs/scheduling.md: decodes, room for them, chunks, top-up. Iteration-level
        scheduling is Orca's idea, chunks that never stall a decode are Sarathi-Serve's.
        """
        if self._out is not None:
            raise RuntimeError("[schedule] a step is out; call update or fail first")
        core = self._core
        if not core.groups:
            return None
        if core.eviction is not None:
            keep_budgets(core)
        plan = self._plans[self._turn]
        if core.beams:
            for beam in list(core.beams):
                beam.spread(core)
        batch, chunks = self._decide(plan)
        if batch is None and not chunks:  # all that was admitted may be a beam that only has to decode
            batch, chunks = self._decide(plan)
        if batch is None and not chunks:
            self._explain_idle()
        step = self._build(plan, batch, chunks)
        self._turn = (self._turn + 1) % len(self._plans)
        self._out = step
        core.step_out = True
        core.was_chunk = batch is None
        return step

    def _decide(self, plan: Plan) -> tuple[Batch | None, list[tuple[int, int]]]:
        """Who decodes, and (slot, tokens) of the chunks."""
        core = self._core
        if not core.mixed and not (core.was_chunk and core.count[DECODING]):
            chunks = self._chunks(core.max_step_tokens, 1)
            if chunks:
                return None, chunks
        if not core.count[DECODING]:
            return None, self._chunks(core.max_step_tokens, core.max_running) if core.mixed else []
        make_room(core, plan)
        if not core.count[DECODING]:  # the policy named every decode; who stays goes on, or nobody would
            return None, self._chunks(core.max_step_tokens, core.max_running if core.mixed else 1)
        batch = core.batch()  # who is admitted now is a chunk, not a decode
        return batch, self._chunks(core.max_step_tokens - len(batch.slots), core.max_running) if core.mixed else []

    def _chunks(self, budget: int, most: int) -> list[tuple[int, int]]:
        """Running prefills go on, then the budget that is left goes to admissions."""
        core, rows = self._core, self._core.rows
        chunks: list[tuple[int, int]] = []
        core.growing = -1
        if core.count[PREFILLING]:
            for slot in rows.running(PREFILLING).tolist():
                if budget <= 0 or len(chunks) == most:
                    return chunks
                new = min(self._wanted(slot), core.chunk, budget)
                if new:
                    chunks.append((slot, new))
                    budget -= new
        while budget > 0 and len(chunks) < most and (core.queue or core.spilled):
            admitted = admit_next(core)
            if admitted is None:
                break
            new = min(self._wanted(admitted.slot), core.chunk, budget)
            if new:
                chunks.append((admitted.slot, new))
                budget -= new
        return chunks

    def _wanted(self, slot: int) -> int:
        """Tokens that a prefilling sequence may compute now."""
        sequence = self._core.rows.sequence(slot)
        beam = sequence.group.beam
        return self._core.rows.remaining(slot) if beam is None else beam.wanted(self._core, sequence)

    def _explain_idle(self) -> None:
        """Nothing runs and nothing can be admitted: others hold the pool."""
        stats = self._core.pool.stats()
        if stats.sequences == self._core.pool.options.max_seqs:
            raise OutOfSequences(f"[schedule] nothing runs, and all {stats.sequences} sequences of the pool are open")
        raise OutOfBlocks(
            f"[schedule] nothing runs and the first in line finds no room: {stats.blank} blocks blank, "
            f"{stats.evictable} evictable, {stats.limbo} in limbo, {stats.sequences} sequences open; "
            f"others of the pool hold the rest",
            blank=stats.blank,
            evictable=stats.evictable,
            limbo=stats.limbo,
        )

    def _build(self, plan: Plan, batch: Batch | None, chunks: list[tuple[int, int]]) -> Step:
        """One allocator transaction, and the arrays for it."""
        rows = self._core.rows
        if batch is not None and not chunks:
            n = len(batch.slots)
            tokens = rows.last[batch.slots]
            self._take_blocks(plan, batch.handles, 1, n)
            arrays = (batch.slots32, batch.handles, rows.ones[:n])
            if batch.plain:
                samples: tuple[np.ndarray, ...] = (rows.order[:n], batch.slots32, batch.index, batch.width)
                return Step(rows, plan, batch, tokens, n, *arrays, *samples)
            return Step(rows, plan, None, tokens, n, *arrays, *self._samples(rows.order[:n], batch.slots32))
        slots = np.array([slot for slot, _ in chunks], np.int32)
        num_new = np.array([new for _, new in chunks], np.int64)
        begin = rows.computed[slots]
        parts = [rows.known(slot, at, at + new) for (slot, new), at in zip(chunks, begin.tolist(), strict=True)]
        sampled = begin + num_new == rows.prompt[slots] + rows.generated[slots]
        decodes = 0 if batch is None else len(batch.slots)
        at = (num_new.cumsum() + (decodes - 1))[sampled].astype(np.int32)
        of = slots[sampled]
        handles = rows.handle[slots]
        if batch is not None:
            parts.insert(0, rows.last[batch.slots])
            slots, num_new = np.concatenate([batch.slots32, slots]), np.concatenate([rows.ones[:decodes], num_new])
            at, of = np.concatenate([rows.order[:decodes], at]), np.concatenate([batch.slots32, of])
            handles = np.concatenate([batch.handles, handles])
        tokens = np.concatenate(parts)
        self._take_blocks(plan, handles, num_new, len(tokens))
        plain = batch if batch is not None and batch.plain else None
        return Step(rows, plan, plain, tokens, decodes, slots, handles, num_new, *self._samples(at, of))

    def _samples(self, at: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, ...]:
        """Where, for which slot and sample, of which width of beam."""
        core = self._core
        index = core.rows.index[slot]
        if core.unforked:
            at, slot, index = results.fan_out(core, at, slot, index)
        return at, slot, index, core.rows.width[slot]

    def _take_blocks(self, plan: Plan, handles: np.ndarray, num_new: int | np.ndarray, tokens: int) -> None:
        """The one step of the pool."""
        pad_to = self._pad_to(len(handles), tokens) if callable(self._pad_to) else self._pad_to
        self._core.pool.step(plan, handles, num_new, pad_to=pad_to)

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
            The one that is out.
        tokens : int32 ``[M]``
            One for each of ``step.sample_at``; those of beams do not matter.
        logprobs : float32 ``[M]``, optional
            Of these tokens.
        beams : (int32 ``[Mb, K]``, float32 ``[Mb, K]``), optional
            For the Mb samples of beams, in order: K >= 2 * width best continuations and their logprobs (-inf: none).

        Returns
        -------
        list of Output
            Sequences that ended, in order of rows.

        Raises
        ------
        TypeError, ValueError
            Wrong shapes or dtypes, tokens out of range, NaN. State unchanged, the step is still out.
        RuntimeError
            This step is not out. State unchanged.
        """
        self._check_out("update", step)
        given = results.read(step, tokens, logprobs, beams)
        if not self._core.pool.options.in_order:
            self._core.pool.done(step.plan)
        self._out = None
        return results.take(self._core, step, given)

    def fail(self, step: Step) -> None:
        """Take back a step that the backend did not execute: every sequence is as before `schedule`.

        Admissions stay; requests cancelled meanwhile stay cancelled. A pool with ``in_order=True`` cannot roll back:
        there the sequences of the step are preempted, and will be recomputed.

        Raises
        ------
        RuntimeError
            This step is not out. State unchanged.
        """
        self._check_out("fail", step)
        core = self._core
        if not core.pool.options.in_order:
            core.pool.rollback(step.plan)
        self._out = None
        core.step_out = False
        core.setbacks += 1
        if core.eviction is not None:
            core.eviction.forget()
        core.bury()
        if core.pool.options.in_order:
            results.give_up(core, step)

    def _check_out(self, call: str, step: Step) -> None:
        if not isinstance(step, Step):
            raise TypeError(f"[{call}] step must be a kvpool.scheduler.Step, not {type(step).__name__}")
        if step is not self._out:
            raise RuntimeError(f"[{call}] this step is not out: it was updated or failed, or another scheduler made it")

    # -- questions

    def tokens_of(self, id: Hashable, index: int = 0) -> NDArray[int32]:
        """Tokens that a sequence of a request has generated so far, a copy.

        Raises
        ------
        UnknownRequest
            No such request.
        ValueError
            The request has no such sequence (yet).
        """
        group = self._find("tokens_of", id)
        sequences = group.sequences
        index = integer("tokens_of", "index", index, 0, len(sequences) - 1)
        sequence = sequences[index]
        return self._core.rows.generated_of(sequence.slot) if sequence.slot >= 0 else sequence.tokens.copy()

    def request_of(self, slot: int) -> Request:
        """The request that runs in a slot; ValueError if none does."""
        slot = integer("request_of", "slot", slot, 0, self._core.max_running - 1)
        sequence: Sequence | None = self._core.rows.sequences[slot]
        if sequence is None:
            raise ValueError(f"[request_of] nothing runs in slot {slot}")
        return sequence.group.request

    def stats(self) -> SchedulerStats:
        """Counters, O(1)."""
        core = self._core
        counters = (
            *(core.cancelled, core.rejected, core.admissions, core.preemptions, core.spills, core.steps),
            *(core.decode_tokens, core.prefill_tokens, core.recomputed_tokens, core.hit_tokens, core.sampled_tokens),
            core.evicted_tokens,
        )
        return SchedulerStats._make((*core.count, *counters))

    def check(self) -> None:
        """Recompute every counter and invariant, those of the pool too; legal at any time.

        Raises
        ------
        CorruptState
            Something does not hold.
        """
        self._core.pool.check()
        check(self._core, self._out)


def _check_evictor(call: str, eviction: Any, pool: Pool) -> None:
    if eviction is None:
        return
    from kvpool.eviction import Evictor

    if not isinstance(eviction, Evictor):
        raise TypeError(f"[{call}] eviction must be a kvpool.eviction.Evictor, not {type(eviction).__name__}")
    if eviction.pool is not pool:
        raise ValueError(f"[{call}] the evictor is on another pool ({eviction.pool!r})")
