"""`Pool`: blocks, sequences and steps of one layer group, behind one call per step."""

cdef extern from *:
    """
    static inline void kv_add_reference(void *object) { Py_INCREF((PyObject *)object); }
    """
    void add_reference "kv_add_reference"(void* to) noexcept nogil      # for threads that are attached

cdef enum:
    FEW_PLANS = 16              # that pass at once without memory for their list


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
    All memory is taken here, about 48 bytes a block and 100 a sequence plus its table. A pool is thread-safe: a call
    waits until the pool's lock is free, without the GIL. Pools are independent of each other. See ``docs/core.md`` for
    the exact rules.

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

    __signature__ = signature(_signatures.Pool)

    def __cinit__(self, num_blocks, block_size, *, max_seqs=1024, max_blocks_per_seq=None, reserved_blocks=1,
                  watermark=0, in_order=False, seed=None, prefix_cache=False, events=0, record=0, _hash_bits=64):
        if not isinstance(in_order, bool):
            raise TypeError(f"[Pool] in_order must be a bool, not {type(in_order).__name__} ({in_order!r})")
        self.next_step = 1
        self.steps_pend = not in_order
        self.plans = []
        made(self)

    def __dealloc__(self):
        step_free(&self.scratch)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.shutdown()

    @property
    def blocks(self):
        """The blocks by name, for an engine with block tables and content keys of its own: a `PoolBlocks`.

        Raises
        ------
        AttributeError
            The pool has a prefix cache, which looks after its blocks.
        """
        return PoolBlocks(self)

    def __repr__(self):
        cdef int32_t used, sequences
        try:
            self.lock("repr")
        except PoolClosed:
            return "<kvpool.Pool, shut down>"
        used, sequences = self.all_blocks.num_used, self.seqs.num_open
        self.unlock()
        return (f"<kvpool.Pool of {self.all_blocks.num_blocks} blocks of {self.all_blocks.block_size} tokens, "
                f"{used} used by {sequences} sequences>")

    @property
    def num_blocks(self):
        """Blocks of the pool, reserved ones included."""
        return self.all_blocks.num_blocks

    @property
    def block_size(self):
        """Tokens per block."""
        return self.all_blocks.block_size

    @property
    def reserved_blocks(self):
        """Blocks that are never handed out."""
        return self.all_blocks.reserved

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
        cdef int32_t found
        self.lock("num_free")
        found = self.all_blocks.num_blank
        self.unlock()
        return found

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
        self.run(plan, handles, num_new, "step", True, partial, pad_to)

    def reserve(self, plan, handles, num_new):
        """Take the blocks for `num_new` more tokens per row, without the tokens: lengths do not move.

        Copies that shared blocks need are in the plan, which is pending like after `step`. Until a sequence is
        forked, steps inside its reservation cannot run out of blocks. Raises like `step`.
        """
        self.run(plan, handles, num_new, "reserve", False, False, None)

    cdef int run(self, object plan_, object handles, object num_new, str call, bint advance, object partial,
                 object pad_to) except -1:
        cdef Plan plan = self.check_plan(plan_, call)
        cdef Ints rows, new
        cdef int64_t pad_rows = 0, pad_tokens = -1
        ints_init(&rows, &self.spare)
        ints_init(&new, &self.spare)
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
            self.run_plan(plan, &rows, &new, call, advance, partial, pad_rows, pad_tokens)
        finally:
            ints_free(&rows)
            ints_free(&new)
        return 0

    cdef int run_plan(self, Plan plan, const Ints* rows, const Ints* new, str call, bint advance, bint partial,
                      int64_t pad_rows, int64_t pad_tokens) except -1:
        """A step of arguments that fit each other and the plan; `pad_tokens` -1: no padding asked for."""
        cdef Verdict v
        cdef int status = RETRY
        self.keep_plan(plan)
        try:
            self.lock(call)
            status = self.run_rows(plan, rows, new, advance, partial, pad_rows, pad_tokens, &v)
            self.unlock()
        finally:
            if status != OK:
                self.let_go_of_plan(plan)
        if status != OK:
            plan.refuse(&v, call, pad_tokens)
        return 0

    cdef int keep_plan(self, Plan plan) except -1:
        """Last thing that can fail before the lock is taken: a plan lives as long as its step is pending."""
        if self.steps_pend:
            self.plans.append(plan)
        return 0

    cdef int let_go_of_plan(self, Plan plan) except -1:
        if self.steps_pend:
            try:
                self.plans.remove(plan)
            except ValueError:              # the pool was shut down meanwhile
                pass
        return 0

    cdef int run_rows(self, Plan plan, const Ints* rows, const Ints* new, bint advance, bint partial,
                      int64_t pad_rows, int64_t pad_tokens, Verdict* v) noexcept nogil:
        """Judge a step, and carry it out."""
        cdef Limits limits
        cdef uint32_t* word = NULL
        cdef int status
        if plan.step.pending:
            return refused(v, PLAN_PENDING, -1, plan.step.id, 0, 0, 0)
        status = plan.judge_arrays(v)
        if status != OK:
            return status
        limits.max_tokens = plan.max_tokens_ if pad_tokens < 0 else pad_tokens
        limits.seq_tokens = min(plan.seq_limit, self.seqs.max_blocks * self.all_blocks.block_size)
        limits.table_width = plan.wire.table_width
        seqs_new_stamp(&self.seqs)
        status = step_check(&plan.step, &self.seqs, &self.all_blocks, rows, new, &limits, advance, partial, v)
        if status != OK:
            step_undo_check(&plan.step, &self.all_blocks, 0)
            return status
        if self.record.data != NULL:
            word = plan.write_step(&self.record, rows, new, advance, partial)
        self.carry_out(plan, <const int64_t*>rows.data, advance, pad_rows, max(pad_tokens, <int64_t>0))
        if self.record.data != NULL:
            record_end(&self.record, word, self.all_blocks.digest)
        return OK

    cdef void carry_out(self, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows,
                        int64_t pad_tokens) noexcept nogil:
        """Second half of a step: nothing here can fail."""
        cdef Step* p = &plan.step
        cdef Blocks* b = &self.all_blocks
        p.id = self.next_step
        p.noted_done = False
        self.next_step = p.id + 1
        if self.steps_pend:
            pending_add(&self.pending, p, b)
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
        cdef Verdict v
        cdef int status
        ints_init(&rows, &self.spare)
        ints_init(&new, &self.spare)
        try:
            ints_get(&rows, handles, "can", "handles", False, False)
            ints_get(&new, num_new, "can", "num_new", True, True)
            self.lock("can")
            status = self.can_rows(&rows, &new, &v)
            self.unlock()
        finally:
            ints_free(&rows)
            ints_free(&new)
        if status not in (OK, OUT_OF_BLOCKS, TABLE_TOO_WIDE, SEQ_TOO_LONG):
            refuse("can", &v)
        return status == OK

    cdef int can_rows(self, Ints* rows, const Ints* new, Verdict* v) noexcept nogil:
        cdef Limits limits
        cdef Py_ssize_t i
        cdef int status = seqs_judge(&self.seqs, rows, v)
        if status != OK:
            return status
        if new.size >= 0 and new.size != rows.size:
            return refused(v, BAD_SHAPE, -1, new.size, 0, 0, rows.size)
        for i in range(rows.size):
            if ints_at(new, i) < 0:
                return refused(v, NEGATIVE_NEW, i, ints_at(new, i), 0, 0, 0)
        if rows.size > self.scratch.max_rows:
            step_free(&self.scratch)
            if step_init(&self.scratch, <int32_t>rows.size) != OK:
                return refused(v, NO_MEMORY, -1, rows.size, 0, 0, 0)
        limits.max_tokens = INT64_MAX
        limits.seq_tokens = self.seqs.max_blocks * self.all_blocks.block_size
        limits.table_width = self.seqs.max_blocks
        seqs_new_stamp(&self.seqs)
        status = step_check(&self.scratch, &self.seqs, &self.all_blocks, rows, new, &limits, True, False, v)
        step_undo_check(&self.scratch, &self.all_blocks, 0)
        return status

    def done(self, plan):
        """Declare a pending plan executed. Plans finish in step order; an early `done` is noted until its turn.

        Raises
        ------
        PlanStateError
            The plan is not pending, or its `done` was noted already. State unchanged.
        """
        self.end_done(self.check_plan(plan, "done"), "done")

    cdef int end_done(self, Plan plan, str call) except -1:
        cdef void* few[FEW_PLANS]
        cdef void** passed = few
        cdef Verdict v
        cdef int32_t k, room = FEW_PLANS, count = 0
        cdef int status = RETRY
        try:
            while status == RETRY:
                self.lock(call)
                status = self.note_done(plan, passed, room, &count, &v)
                room = max(room, self.pending.size)
                self.unlock()
                if status == RETRY:
                    if passed != few:
                        xfree(passed)
                    passed = <void**>xcalloc(room, sizeof(void*))
                    if passed == NULL:
                        raise MemoryError(f"[{call}] no memory for {room} plans")
            if status != OK:
                refuse(call, &v)
            for k in range(count):
                self.let_go_of_plan(<Plan>passed[k])
                Py_DECREF(<Plan>passed[k])
        finally:
            if passed != few:
                xfree(passed)
        return 0

    cdef int note_done(self, Plan plan, void** passed, int32_t room, int32_t* count, Verdict* v) noexcept nogil:
        """Note that a plan was executed; it passes, and others that waited for it, oldest first.

        `passed`: the plans that did, with a reference each for the caller. RETRY: it has no room for all that may.
        """
        cdef Step* p = self.pending.oldest
        if not plan.step.pending:
            return refused(v, PLAN_NOT_PENDING, -1, plan.step.id, 0, 0, not self.steps_pend)
        if plan.step.noted_done:
            return refused(v, PLAN_NOTED, -1, plan.step.id, 0, 0, 0)
        if self.pending.size > room:
            return RETRY
        self.all_blocks.digest = mix(mix(self.all_blocks.digest, OP_DONE), self.next_step - plan.step.id)
        plan.step.noted_done = True
        while p != NULL and p.noted_done:
            passed[count[0]] = p.plan
            count[0] += 1
            add_reference(p.plan)
            self.pass_step(p)
            p = self.pending.oldest
        record_one(&self.record, OP_DONE, plan.record_number, self.all_blocks.digest)
        return OK

    cdef void pass_step(self, Step* p) noexcept nogil:
        cdef int32_t i, slot
        pending_remove(&self.pending, p, &self.all_blocks)
        if self.indexed:
            for i in range(p.num_rows):
                slot = seq_find(&self.seqs, p.handle[i])
                if slot >= 0:
                    self.seqs.prefix[slot].done = p.length[i]
        step_release_holds(p, &self.all_blocks)
        pending_settle(&self.pending, p, &self.all_blocks)
        if self.all_blocks.num_held:
            self.publish_waiting()
            self.all_blocks.digest = mix(mix(self.all_blocks.digest, OP_PUBLISH), self.index.next_uid)

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
        self.end_rollback(self.check_plan(plan, "rollback"), "rollback")

    cdef int end_rollback(self, Plan plan, str call) except -1:
        cdef Verdict v
        cdef int status
        self.lock(call)
        status = self.roll_back(plan, &v)
        self.unlock()
        if status != OK:
            refuse(call, &v)
        self.let_go_of_plan(plan)
        return 0

    cdef int roll_back(self, Plan plan, Verdict* v) noexcept nogil:
        cdef Step* p = &plan.step
        if not p.pending:
            return refused(v, PLAN_NOT_PENDING, -1, p.id, 0, 0, not self.steps_pend)
        if self.pending.newest != p:
            return refused(v, PLAN_NOT_NEWEST, -1, p.id, 0, 0, self.all_blocks.newest_pending)
        if p.noted_done:
            return refused(v, PLAN_NOTED, -1, p.id, 0, 0, 0)
        if step_has_children(p, &self.seqs):
            return refused(v, PLAN_HAS_CHILDREN, -1, p.id, 0, 0, 0)
        self.keep_known(p)
        pending_remove(&self.pending, p, &self.all_blocks)
        blocks_lower_fences(&self.all_blocks)
        step_rollback(p, &self.seqs, &self.all_blocks)
        wire_forget(&plan.wire, p.num_rows, False, False)
        pending_settle(&self.pending, p, &self.all_blocks)
        record_one(&self.record, OP_ROLLBACK, plan.record_number, self.all_blocks.digest)
        return OK

    # -- the whole pool

    def reset(self):
        """Close everything: sequences, raw references, pending plans, cached blocks. No KV data is touched.

        Every handle is stale afterwards; plans stay usable. The backend must be idle. O(num_blocks + max_seqs).
        """
        cdef int32_t room = 0, count = -1, k
        cdef void** plans = NULL
        try:
            while count < 0:                    # memory for the plans to let go of, before anything moves
                xfree(plans)
                plans = <void**>xcalloc(room + 1, sizeof(void*))
                if plans == NULL:
                    raise MemoryError(f"[reset] no memory for {room} plans")
                self.lock("reset")
                if self.pending.size <= room:
                    count = self.forget_all(plans)
                room = self.pending.size
                self.unlock()
            for k in range(count):
                self.let_go_of_plan(<Plan>plans[k])
                Py_DECREF(<Plan>plans[k])
        finally:
            xfree(plans)

    cdef int32_t forget_all(self, void** plans) noexcept nogil:
        """Make the pool as it was when it was new; `plans` were pending, with a reference each for the caller."""
        cdef Step* p = self.pending.oldest
        cdef int32_t count = 0
        while p != NULL:
            set_flag(&p.pending, False)
            p.log_size = 0
            wire_forget(<Wire*>p.wire, p.num_rows, False, False)
            plans[count] = p.plan
            add_reference(p.plan)
            count += 1
            p = p.newer
        memset(&self.pending, 0, sizeof(self.pending))
        self.all_blocks.newest_pending = self.all_blocks.oldest_pending = 0
        if self.indexed:
            self.flush_root(0)
        seqs_reset(&self.seqs)
        blocks_reset(&self.all_blocks)
        self.all_blocks.digest = mix(self.all_blocks.digest, OP_RESET)
        self.record_start()
        return count

    def shutdown(self):
        """Give back all memory; every later call raises `PoolClosed`. Idempotent."""
        cdef Step* p
        cdef int64_t tag
        self.lock_open_or_not("shutdown")
        tag = self.seqs.tag
        p = self.pending.oldest
        while p != NULL:
            set_flag(&p.pending, False)
            p = p.newer
        memset(&self.pending, 0, sizeof(self.pending))
        EvictPool.release_memory(self)
        self.unlock()
        if tag:
            tag_give_back(tag)      # takes the lock that a fork takes before those of pools
        self.plans.clear()

    def stats(self):
        """Counters, O(1); see `kvpool.stats.PoolStats`."""
        cdef Blocks b
        cdef Seqs s
        cdef int32_t pending
        cdef int64_t capacity
        self.lock("stats")
        b = self.all_blocks
        s = self.seqs
        pending = self.pending.size
        self.unlock()
        capacity = s.sum_blocks * b.block_size
        return PoolStats(
            b.num_blocks, b.reserved, b.num_blank, b.lru.size, b.limbo.size, b.num_used, b.num_shared, s.num_open,
            pending, b.cow_copies, b.cow_tokens, b.allocs, b.evictions, b.peak_used, s.sum_tokens, capacity,
            1.0 - s.sum_tokens / <double>capacity if capacity else 0.0, s.evicted_tokens)

    def digest(self):
        """64 bits chained over every call that changed something, and its results. O(1).

        Equal calls on equally built pools give equal digests, in any process and build: ranks that keep
        replicated tables compare 8 bytes instead of tables.
        """
        cdef uint64_t found
        self.lock("digest")
        found = self.all_blocks.digest
        self.unlock()
        return found

    def fingerprint(self):
        """64 bits recomputed from all that influences a later call, orders of lists included. O(state)."""
        cdef uint64_t h
        cdef const Step* p
        self.lock("fingerprint")
        h = blocks_fingerprint(&self.all_blocks, 0, self.next_step)
        h = seqs_fingerprint(&self.seqs, &self.all_blocks, h, self.next_step)
        if self.indexed:
            h = index_fingerprint(&self.index, &self.all_blocks, h)
        h = mix(mix(h, self.steps_pend), self.pending.size)
        p = self.pending.oldest
        while p != NULL:
            h = step_fingerprint(p, h, self.next_step)
            p = p.newer
        self.unlock()
        return h

    def check(self):
        """Recompute every invariant and every counter. O(state), for tests and for the worst of nights.

        Raises
        ------
        CorruptState
            Something does not hold; the message says what.
        """
        cdef char[FINDING] finding
        cdef bint wrong
        cdef int32_t* seen = <int32_t*>xcalloc(2 * <size_t>self.all_blocks.num_blocks + 1, sizeof(int32_t))
        if seen == NULL:
            raise MemoryError(f"[check] no memory for {self.all_blocks.num_blocks} blocks")
        try:
            self.lock("check")
            wrong = self.find_fault(seen, finding)
            self.unlock()
        finally:
            xfree(seen)
        if wrong:
            raise CorruptState(f"[check] {finding.decode()}")

    cdef bint find_fault(self, int32_t* seen, char* finding) noexcept nogil:
        """`seen` has two numbers for every block, all zero."""
        cdef size_t size = self.all_blocks.num_blocks * sizeof(int32_t)
        if blocks_check(&self.all_blocks, seen, finding) or seqs_check(&self.seqs, &self.all_blocks, seen, finding):
            return True
        if self.indexed and index_check(&self.index, &self.all_blocks, finding):
            return True
        memset(seen, 0, size)
        return self.check_pending(seen, seen + self.all_blocks.num_blocks, finding)

    cdef bint check_pending(self, int32_t* holds, int32_t* floors, char* finding) noexcept nogil:
        """Holds, floors and fences are those of the plans that are pending; these are in the order of their steps."""
        cdef Blocks* b = &self.all_blocks
        cdef const Step* p = self.pending.oldest
        cdef int64_t last = 0
        cdef int32_t k, size = 0, made = 0
        while p != NULL:
            if p.id <= last or not p.pending:
                return snprintf(finding, FINDING, b"step %lld is pending behind step %lld", <long long>p.id,
                                <long long>last) > 0
            for k in range(p.log_size):
                holds[p.log[k].old] += 1
                floors[p.log[k].old] = max(floors[p.log[k].old], p.log[k].tokens)
                made += b.block[p.log[k].new].place == USED and b.fence[p.log[k].new] == p.id
            last = p.id
            size += 1
            p = p.newer
        if size != self.pending.size or b.newest_pending != last or b.oldest_pending != (
                self.pending.oldest.id if size else 0):
            return snprintf(finding, FINDING, b"%d steps are pending up to %lld, the fences say %lld .. %lld", size,
                            <long long>last, <long long>b.oldest_pending, <long long>b.newest_pending) > 0
        for k in range(b.num_blocks):
            made -= b.block[k].place == USED and unwritten(b, k)
            if b.block[k].hold != holds[k] or b.floor[k] != floors[k]:
                return snprintf(finding, FINDING, b"block %d has hold %d and floor %d, pending plans say %d and %d", k,
                                b.block[k].hold, b.floor[k], holds[k], floors[k]) > 0
        if made != 0:
            return snprintf(finding, FINDING, b"%d more blocks are made by pending copies than wait for one", made) > 0
        return False

    def _corrupt(self, what, index):
        """For tests of `check`: break one piece of state. `index` is a block, or a slot of sequences."""
        cdef Blocks* b = &self.all_blocks
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
