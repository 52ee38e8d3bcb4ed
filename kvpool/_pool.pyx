"""`Pool`: blocks, sequences and steps of one layer group, behind one call per step."""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t

from kvpool._args cimport Ints, ints_at, ints_free, ints_get, to_int
from kvpool._blocks cimport (
    Blocks,
    blocks_check,
    blocks_drain_limbo,
    blocks_fingerprint,
    blocks_lower_fences,
    blocks_reset,
)
from kvpool._evict_calls cimport EvictPool
from kvpool._plan cimport Plan
from kvpool._sequence cimport seq_table, seqs_check, seqs_fingerprint, seqs_reset
from kvpool._prefix cimport index_check, index_fingerprint
from kvpool._record cimport record_end, record_one
from kvpool._step cimport (
    Limits,
    Replaced,
    Step,
    Verdict,
    step_check,
    step_commit,
    step_fingerprint,
    step_free,
    step_has_children,
    step_init,
    step_release_holds,
    step_rollback,
    step_undo_check,
)
from kvpool._types cimport NO_MEMORY, OK, OP_DONE, OP_RESET, OP_ROLLBACK, mix
from kvpool._wire cimport wire_emit, wire_forget

from kvpool.errors import CorruptState, PlanStateError
from kvpool.stats import PoolStats

cdef class Pool(EvictPool):
    """Blocks, sequences and steps of one layer group. Integers only: the pool never sees a tensor.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool, reserved ones included; 1 .. 2^31 - 1.
    block_size : int
        Tokens per block, >= 1.
    max_seqs : int, default 1024
        Sequences that may be open at a time, at most 2^20.
    max_blocks_per_seq : int, optional
        Blocks that a sequence may have. Default: all there are, as far as the tables stay below 2^27 entries.
    reserved_blocks : int, default 1
        Ids ``0 .. reserved_blocks - 1`` are never handed out: tables may be padded with them, padded writes may
        land there.
    watermark : int, default 0
        Blocks that `open` leaves for the growth of running sequences.
    in_order : bool, default False
        Every step counts as done when it returns: for backends that execute in order and need no rollback.
    seed : int, optional
        Seed of content hashes, random by default. Nothing else in a pool is random.
    prefix_cache : bool, default False
        Index committed blocks by content, so that `open` finds the prefixes that other sequences computed.
    events : int, default 0
        Keep up to this many events of the prefix cache for `drain_events`; 0: none.
    record : int, default 0
        Bytes of a ring that keeps the calls which changed something, for ``kvpool replay --ops``, 8 .. 2^33; 0: none.

    Raises
    ------
    ValueError, TypeError, MemoryError
        A parameter is out of range or of the wrong type; 2,047 pools are alive; no memory.

    Notes
    -----
    All memory is taken here, about 48 bytes a block and 84 a sequence plus its table. One caller at a time;
    pools are independent of each other. See ``docs/core.md`` for the exact rules.

    Examples
    --------
    >>> from kvpool import Plan, Pool
    >>> pool = Pool(num_blocks=8, block_size=4)
    >>> plan = Plan(pool, max_rows=2, max_tokens=8, table_width=2)
    >>> h = pool.open()
    >>> pool.step(plan, [h], 6)
    >>> plan.block_tables.tolist(), plan.slot_mapping.tolist()
    ([[1, 2]], [4, 5, 6, 7, 8, 9])
    >>> pool.done(plan)
    """

    def __cinit__(self, num_blocks, block_size, *, max_seqs=1024, max_blocks_per_seq=None, reserved_blocks=1,
                  watermark=0, in_order=False, seed=None, prefix_cache=False, events=0, record=0, _hash_bits=64):
        if not isinstance(in_order, bool):
            raise TypeError(f"[Pool] in_order must be a bool, not {type(in_order).__name__} ({in_order!r})")
        self.next_step = 1
        self.steps_pend = not in_order
        self.pending = []

    def __dealloc__(self):
        step_free(&self.scratch)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.shutdown()

    def __repr__(self):
        if self.blocks.block == NULL:
            return "<kvpool.Pool, shut down>"
        return (f"<kvpool.Pool of {self.blocks.num_blocks} blocks of {self.blocks.block_size} tokens, "
                f"{self.blocks.num_used} used by {self.seqs.num_open} sequences>")

    @property
    def num_blocks(self):
        """Blocks of the pool, reserved ones included."""
        return self.blocks.num_blocks

    @property
    def block_size(self):
        """Tokens per block."""
        return self.blocks.block_size

    @property
    def reserved_blocks(self):
        """Blocks that are never handed out."""
        return self.blocks.reserved

    @property
    def max_seqs(self):
        """Sequences that may be open at a time."""
        return self.seqs.max_seqs

    @property
    def max_blocks_per_seq(self):
        """Blocks that one sequence may have."""
        return self.seqs.max_blocks

    @property
    def watermark(self):
        """Blocks that `open` leaves for growth."""
        return self.seqs.watermark

    @property
    def in_order(self):
        """Whether every step counts as done when it returns."""
        return not self.steps_pend

    @property
    def num_free(self):
        """Blank blocks; `stats` has the rest."""
        self.enter("num_free")
        self.busy = False
        return self.blocks.num_blank

    # -- steps

    def step(self, plan, handles, num_new=1, *, partial=False, pad_to=None):
        """Grow every sequence of a batch and fill the plan: the one call per step.

        Parameters
        ----------
        plan : Plan
            A plan of this pool that is not pending.
        handles : ints
            The batch, int64, shape ``(S,)``, no duplicates. Keep a sequence in its row to stay O(S).
        num_new : int or ints, default 1
            New tokens, for all rows or per row (int32 or int64, shape ``(S,)``), each >= 0. 0 is a row that only reads.
        partial : bool, default False
            Serve rows in order and skip those whose blocks are not there, instead of raising.
        pad_to : (int, int), optional
            Static shape ``(rows, tokens)`` that the arrays show, padded.

        Raises
        ------
        OutOfBlocks
            The blocks are not there (without `partial`). State unchanged.
        StaleHandle, ForeignHandle
            A handle is not open in this pool. State unchanged.
        CapacityExceeded
            The batch does not fit the plan, or a sequence its table. State unchanged.
        PlanStateError
            The plan is pending. State unchanged.
        ValueError, TypeError
            Duplicate handles, negative counts, shapes that differ, a foreign plan. State unchanged.

        Notes
        -----
        O(S) for a decode step with unchanged rows, plus O(blocks) for rows that changed. No Python object per
        token, row or block. The plan is pending until `done` or `rollback`.
        """
        self.enter("step")
        try:
            self.run(plan, handles, num_new, "step", True, partial, pad_to)
        finally:
            self.busy = False

    def reserve(self, plan, handles, num_new):
        """Take the blocks for `num_new` more tokens per row, without the tokens: lengths do not move.

        Copies that shared blocks need are in the plan, which is pending like after `step`. Until a sequence is
        forked, steps inside its reservation cannot run out of blocks. Raises like `step`.
        """
        self.enter("reserve")
        try:
            self.run(plan, handles, num_new, "reserve", False, False, None)
        finally:
            self.busy = False

    cdef int run(self, object plan_, object handles, object num_new, str call, bint advance, object partial,
                 object pad_to) except -1:
        cdef Plan plan = self.check_plan(plan_, call)
        cdef Ints rows, new
        cdef int64_t pad_rows = 0, pad_tokens = -1
        rows.held = new.held = False
        rows.owned = new.owned = NULL
        plan.refuse_pending(call)
        if not isinstance(partial, bool):
            raise TypeError(f"[{call}] partial must be a bool, not {type(partial).__name__} ({partial!r})")
        try:
            ints_get(&rows, handles, call, "handles", False, False)
            ints_get(&new, num_new, call, "num_new", True, True)
            if new.size >= 0 and new.size != rows.size:
                raise ValueError(f"[{call}] {new.size} num_new for {rows.size} handles")
            plan.refuse_rows(rows.size, call)
            if pad_to is not None:
                plan.get_pad(pad_to, call, rows.size, &pad_rows, &pad_tokens)
            self.run_rows(plan, &rows, &new, call, advance, partial, pad_rows, pad_tokens)
        finally:
            ints_free(&rows)
            ints_free(&new)
        return 0

    cdef int run_rows(self, Plan plan, const Ints* rows, const Ints* new, str call, bint advance, bint partial,
                      int64_t pad_rows, int64_t pad_tokens) except -1:
        """A step of arguments that are read and fit each other and the plan; `pad_tokens` -1: no padding asked for."""
        cdef Limits limits
        cdef Verdict verdict
        cdef uint32_t* word = NULL
        cdef int status
        limits.max_tokens = plan.max_tokens_ if pad_tokens < 0 else pad_tokens
        limits.seq_tokens = min(plan.seq_limit, self.seqs.max_blocks * self.blocks.block_size)
        limits.table_width = plan.wire.table_width
        self.next_stamp()
        status = step_check(&plan.step, &self.seqs, &self.blocks, rows, new, &limits, advance, partial, &verdict)
        if status != OK:
            step_undo_check(&plan.step, &self.blocks, 0)
            plan.refuse(status, &verdict, rows, call, pad_tokens)
        self.note_pending(plan)
        if self.record.data != NULL:
            word = plan.write_step(&self.record, rows, new, advance, partial)
        self.carry_out(plan, <const int64_t*>rows.data, advance, pad_rows, max(pad_tokens, 0))
        if self.record.data != NULL:
            record_end(&self.record, word, self.blocks.digest)
        return 0

    cdef int note_pending(self, Plan plan) except -1:
        """Last thing that can fail before a judged step is carried out."""
        if self.steps_pend:
            try:
                self.pending.append(plan)
            except MemoryError:
                step_undo_check(&plan.step, &self.blocks, 0)
                raise
        return 0

    cdef void carry_out(self, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows, int64_t pad_tokens):
        """Second half of a step: nothing here can fail."""
        cdef Step* p = &plan.step
        cdef Blocks* b = &self.blocks
        p.id = self.next_step
        p.noted_done = False
        p.pending = self.steps_pend
        self.next_step += 1
        if self.steps_pend:
            b.newest_pending = p.id
            if b.oldest_pending == 0:
                b.oldest_pending = p.id
        step_commit(p, &self.seqs, b, handles, advance, self.steps_pend)
        wire_emit(&plan.wire, p, &self.seqs, b, <int32_t>pad_rows, pad_tokens)
        plan.rows = p.num_rows
        plan.tokens = p.num_tokens
        plan.copies_made = p.num_copies
        plan.shown_rows = max(p.num_rows, <int32_t>pad_rows)
        plan.shown_tokens = max(p.num_tokens, pad_tokens)
        if not self.steps_pend:
            step_release_holds(p, b)
            p.log_size = 0

    def can(self, handles, num_new=1):
        """Whether a `step` with these arguments would find its blocks and its table room. Nothing changes.

        Raises what `step` raises for bad handles and counts. O(S).
        """
        cdef Ints rows, new
        cdef Limits limits
        cdef Verdict verdict
        cdef Py_ssize_t i
        cdef int status
        self.enter("can")
        rows.held = new.held = False
        rows.owned = new.owned = NULL
        try:
            ints_get(&rows, handles, "can", "handles", False, False)
            ints_get(&new, num_new, "can", "num_new", True, True)
            self.check_batch(&rows, "can")
            if new.size >= 0 and new.size != rows.size:
                raise ValueError(f"[can] {new.size} num_new for {rows.size} handles")
            for i in range(rows.size):
                if ints_at(&new, i) < 0:
                    raise ValueError(f"[can] num_new[{i}] is negative ({ints_at(&new, i)})")
            if rows.size > self.scratch.max_rows:
                step_free(&self.scratch)
                if step_init(&self.scratch, <int32_t>rows.size) != OK:
                    raise MemoryError(f"[can] no memory for {rows.size} rows")
            limits.max_tokens = INT64_MAX
            limits.seq_tokens = self.seqs.max_blocks * self.blocks.block_size
            limits.table_width = self.seqs.max_blocks
            self.next_stamp()
            status = step_check(&self.scratch, &self.seqs, &self.blocks, &rows, &new, &limits, True, False, &verdict)
            step_undo_check(&self.scratch, &self.blocks, 0)
            if status == NO_MEMORY:
                raise MemoryError("[can] no memory for the undo log")
            return status == OK
        finally:
            ints_free(&rows)
            ints_free(&new)
            self.busy = False

    def done(self, plan):
        """Declare a pending plan executed. Plans finish in step order; an early `done` is noted until its turn.

        Raises
        ------
        PlanStateError
            The plan is not pending, or its `done` was noted already. State unchanged.
        """
        self.enter("done")
        try:
            self.end_done(self.check_plan(plan, "done"))
        finally:
            self.busy = False

    cdef int end_done(self, Plan plan) except -1:
        cdef Plan p
        if not plan.step.pending:
            raise PlanStateError(f"[done] the plan is not pending{self.why_not_pending()}")
        if plan.step.noted_done:
            raise PlanStateError(f"[done] step {plan.step.id} was declared done already, older steps are not")
        self.blocks.digest = mix(mix(self.blocks.digest, OP_DONE), self.next_step - plan.step.id)
        plan.step.noted_done = True
        while self.pending and (<Plan>self.pending[0]).step.noted_done:
            p = <Plan>self.pending[0]
            self.unlist(p)
            self.note_done(p.step.handle, p.step.length, p.step.num_rows)
            step_release_holds(&p.step, &self.blocks)
            self.finish(p)
        record_one(&self.record, OP_DONE, plan.record_number, self.blocks.digest)
        return 0

    def rollback(self, plan):
        """Take the newest pending step back: lengths, tables and references of its rows are as before it.

        The blocks it took go through limbo; evicted cache entries stay evicted; rows closed since are skipped. The
        caller has stopped the backend, or lets an older step be pending until it has. Every row of the plan is
        dirty in its next step.

        Raises
        ------
        PlanStateError
            The plan is not pending, not the newest, declared done, or a sequence that was forked from one of its
            rows since is open. State unchanged.
        """
        self.enter("rollback")
        try:
            self.end_rollback(self.check_plan(plan, "rollback"))
        finally:
            self.busy = False

    cdef int end_rollback(self, Plan p) except -1:
        if not p.step.pending:
            raise PlanStateError(f"[rollback] the plan is not pending{self.why_not_pending()}")
        if self.pending[len(self.pending) - 1] is not p:
            raise PlanStateError(f"[rollback] step {p.step.id} is not the newest, "
                                 f"step {self.blocks.newest_pending} is pending")
        if p.step.noted_done:
            raise PlanStateError(f"[rollback] step {p.step.id} was declared done")
        if step_has_children(&p.step, &self.seqs):
            raise PlanStateError(f"[rollback] a sequence forked from a row of step {p.step.id} is open")
        self.unlist(p)
        blocks_lower_fences(&self.blocks)
        step_rollback(&p.step, &self.seqs, &self.blocks)
        wire_forget(&p.wire, p.step.num_rows, False, False)
        self.finish(p)
        record_one(&self.record, OP_ROLLBACK, p.record_number, self.blocks.digest)
        return 0

    cdef str why_not_pending(self):
        return "" if self.steps_pend else ": in an in_order pool a step is done when it returns"

    cdef void unlist(self, Plan plan):
        """Take a plan off the pending list: from now on blocks do not wait for it."""
        self.pending.remove(plan)
        plan.step.pending = False
        self.blocks.oldest_pending = (<Plan>self.pending[0]).step.id if self.pending else 0
        self.blocks.newest_pending = (<Plan>self.pending[len(self.pending) - 1]).step.id if self.pending else 0

    cdef void finish(self, Plan plan):
        """Recompute the floors that the plan's log touched, then let blocks out of limbo."""
        cdef Plan other
        cdef const Replaced* entry
        cdef int32_t k
        for k in range(plan.step.log_size):
            self.blocks.floor[plan.step.log[k].old] = 0
        if plan.step.log_size:
            for other in self.pending:
                for k in range(other.step.log_size):
                    entry = &other.step.log[k]
                    self.blocks.floor[entry.old] = max(self.blocks.floor[entry.old], entry.tokens)
        plan.step.log_size = 0
        blocks_drain_limbo(&self.blocks)

    # -- the whole pool

    def reset(self):
        """Close everything: sequences, raw references, pending plans, cached blocks. No KV data is touched.

        Every handle is stale afterwards; plans stay usable. The backend must be idle. O(num_blocks + max_seqs).
        """
        cdef int32_t slot
        cdef Plan plan
        self.enter("reset")
        try:
            for plan in self.pending:
                plan.step.pending = False
                plan.step.log_size = 0
                wire_forget(&plan.wire, plan.step.num_rows, False, False)
            self.pending.clear()
            self.blocks.newest_pending = self.blocks.oldest_pending = 0
            if self.indexed:
                self.flush_root(0)
            seqs_reset(&self.seqs)
            blocks_reset(&self.blocks)
            self.blocks.digest = mix(self.blocks.digest, OP_RESET)
            self.record_start()
        finally:
            self.busy = False

    def shutdown(self):
        """Give back all memory; every later call raises `PoolClosed`. Idempotent."""
        cdef Plan plan
        if self.blocks.block == NULL:
            return
        self.enter("shutdown")
        try:
            for plan in self.pending:
                plan.step.pending = False
            self.pending.clear()
            self.deferred.clear()
            EvictPool.release_memory(self)
        finally:
            self.busy = False

    def stats(self):
        """Counters, O(1); see `kvpool.PoolStats`."""
        cdef Blocks* b = &self.blocks
        cdef int64_t capacity
        self.enter("stats")
        try:
            capacity = self.seqs.sum_blocks * b.block_size
            return PoolStats(
                b.num_blocks, b.reserved, b.num_blank, b.lru.size, b.limbo.size, b.num_used, b.num_shared,
                self.seqs.num_open, len(self.pending), b.cow_copies, b.cow_tokens, b.allocs, b.evictions, b.peak_used,
                self.seqs.sum_tokens, capacity, 1.0 - self.seqs.sum_tokens / <double>capacity if capacity else 0.0,
                self.seqs.evicted_tokens)
        finally:
            self.busy = False

    def digest(self):
        """64 bits chained over every call that changed something, and its results. O(1).

        Equal calls on equally built pools give equal digests, in any process and build: ranks that keep
        replicated tables compare 8 bytes instead of tables.
        """
        self.enter("digest")
        try:
            return self.blocks.digest
        finally:
            self.busy = False

    def fingerprint(self):
        """64 bits recomputed from all that influences a later call, orders of lists included. O(state)."""
        cdef uint64_t h
        cdef Plan plan
        self.enter("fingerprint")
        try:
            h = blocks_fingerprint(&self.blocks, 0, self.next_step)
            h = seqs_fingerprint(&self.seqs, &self.blocks, h, self.next_step)
            if self.indexed:
                h = index_fingerprint(&self.index, &self.blocks, h)
            h = mix(mix(h, self.steps_pend), len(self.pending))
            for plan in self.pending:
                h = step_fingerprint(&plan.step, h, self.next_step)
            return h
        finally:
            self.busy = False

    def check(self):
        """Recompute every invariant and every counter. O(state), for tests and for the worst of nights.

        Raises
        ------
        CorruptState
            Something does not hold; the message says what.
        """
        cdef Plan plan
        cdef int32_t k
        self.enter("check")
        try:
            finding = (blocks_check(&self.blocks) or seqs_check(&self.seqs, &self.blocks)
                       or (index_check(&self.index, &self.blocks) if self.indexed else None))
            if finding is None:
                holds, floors = {}, {}
                for plan in self.pending:
                    for k in range(plan.step.log_size):
                        old = plan.step.log[k].old
                        holds[old] = holds.get(old, 0) + 1
                        floors[old] = max(floors.get(old, 0), plan.step.log[k].tokens)
                for k in range(self.blocks.num_blocks):
                    if k & 0xFFFF == 0:
                        PyErr_CheckSignals()
                    if self.blocks.block[k].hold != holds.get(k, 0) or self.blocks.floor[k] != floors.get(k, 0):
                        finding = (f"block {k} has hold {self.blocks.block[k].hold} and floor {self.blocks.floor[k]}, "
                                   f"pending plans say {holds.get(k, 0)} and {floors.get(k, 0)}")
                        break
            if finding is None:
                ids = [plan.step.id for plan in self.pending]
                if ids != sorted(ids) or (min(ids, default=0), max(ids, default=0)) != (self.blocks.oldest_pending,
                                                                                       self.blocks.newest_pending):
                    finding = f"pending steps {ids} do not match the fences"
            if finding is not None:
                raise CorruptState(f"[check] {finding}")
        finally:
            self.busy = False

    def _corrupt(self, what, index):
        """For tests of `check`: break one piece of state. `index` is a block, or a slot of sequences."""
        cdef Blocks* b = &self.blocks
        cdef int64_t i = to_int(index, "_corrupt", "index", 0, b.num_blocks - 1)
        cdef dict fields = {
            "refcount": <size_t>&b.block[i].refcount, "raw": <size_t>&b.block[i].raw,
            "hold": <size_t>&b.block[i].hold, "floor": <size_t>&b.floor[i], "blank": <size_t>&b.blank[i],
            "next": <size_t>&b.next[i], "prev": <size_t>&b.prev[i], "num_blank": <size_t>&b.num_blank,
            "num_used": <size_t>&b.num_used, "num_shared": <size_t>&b.num_shared, "lru": <size_t>&b.lru.size,
            "limbo": <size_t>&b.limbo.size, "num_dropped": <size_t>&b.num_dropped,
            "table": <size_t>seq_table(&self.seqs, <int32_t>i), "blocks": <size_t>&self.seqs.seq[i].num_blocks,
            "length": <size_t>&self.seqs.seq[i].num_tokens, "next_slot": <size_t>&self.seqs.seq[i].next_slot,
            "sum_tokens": <size_t>&self.seqs.sum_tokens, "sum_blocks": <size_t>&self.seqs.sum_blocks,
            "tail": <size_t>&self.seqs.seq[i].tail, "stop_slot": <size_t>&self.seqs.seq[i].stop_slot,
            "num_open": <size_t>&self.seqs.num_open, "free_slot": <size_t>&self.seqs.free_slot[i],
        }
        if what in ("table", "blocks", "length", "next_slot", "tail", "stop_slot", "free_slot"):
            to_int(index, "_corrupt", "index", 0, self.seqs.max_seqs - 1)
        (<int32_t*><size_t>fields[what])[0] += 1
