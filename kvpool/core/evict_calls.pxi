"""Calls that let tokens leave a sequence while it goes on: compaction, whole blocks, and blocks of its own before.

After an eviction a sequence has two lengths. `num_tokens` counts all it ever had and gives positions; `kv_len` counts
those that still have a slot and gives the lengths and slots of plans.
"""


cdef class EvictPool(PrefixPool):
    """The calls that shorten what a sequence keeps; see `kvpool.Pool`."""

    # -- what `kvpool.Pool` does, where steps are

    cdef void carry_out(self, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows,
                        int64_t pad_tokens) noexcept nogil:
        pass

    cdef int keep_plan(self, Plan plan) except -1:
        raise NotImplementedError

    cdef int let_go_of_plan(self, Plan plan) except -1:
        raise NotImplementedError

    cdef Plan check_plan(self, object plan, str call):
        if type(plan) is not Plan:
            raise TypeError(f"[{call}] plan must be a kvpool.Plan, not {type(plan).__name__}")
        if (<Plan>plan).pool is not self:
            raise ValueError(f"[{call}] the plan belongs to another pool ({(<Plan>plan).pool!r})")
        return <Plan>plan

    # -- verbs

    cdef int judge_eviction(self, int32_t slot, int64_t leaving, Py_ssize_t row, Verdict* v) noexcept nogil:
        """Refuse what no eviction may touch; row -1: not in a batch."""
        cdef Seqs* s = &self.seqs
        cdef Blocks* b = &self.all_blocks
        cdef int64_t most = s.max_blocks * b.block_size
        if b.newest_pending and s.seq[slot].last_step >= b.oldest_pending:
            return refused(v, PENDING_ROW, row, s.seq[slot].last_step, 0, 0, 0)
        if leaving and s.life[slot].evicted + leaving + most > INT32_MAX:
            return refused(v, LOST_TOO_MANY, row, s.life[slot].evicted + leaving, 0, INT32_MAX, most)
        return OK

    def unshare(self, plan, handles, lens, first=0):
        """Give sequences blocks of their own where `compact` is going to rewrite them: a step without tokens.

        Parameters
        ----------
        plan : Plan
            A plan of this pool that is not pending. Its copies have to be made; it is pending like after `step`.
        handles : ints
            Open sequences, int64, shape ``(S,)``, no duplicates.
        lens, first : as `compact` will get them

        Raises
        ------
        OutOfBlocks
            The blocks are not there. State unchanged.
        StaleHandle, ForeignHandle, PlanStateError, CapacityExceeded, ValueError, TypeError
            As `step` raises; a length that is not in ``0 .. kv_len``. State unchanged.

        Notes
        -----
        Replaces each block that `compact` with the same arguments would refuse to rewrite by a copy: blocks that
        others refer to, committed ones, ones that a pending copy reads. What the others read never changes. Rows
        are judged in order, so each but the last of the sequences that share a block gets a copy, and the last too
        while the copies are pending. O(blocks).
        """
        cdef Plan p = self.check_plan(plan, "unshare")
        cdef Ints rows, lengths
        cdef Verdict v
        cdef int64_t keep
        cdef int status = RETRY
        ints_init(&rows, &self.spare)
        ints_init(&lengths, &self.spare)
        p.refuse_pending("unshare")
        try:
            ints_get(&rows, handles, "unshare", "handles", False, False)
            ints_get(&lengths, lens, "unshare", "lens", True, True)
            keep = to_int(first, "unshare", "first", 0, INT64_MAX)
            if lengths.size >= 0 and lengths.size != rows.size:
                raise ValueError(f"[unshare] {lengths.size} lens for {rows.size} handles")
            p.refuse_rows(rows.size, "unshare")
            self.keep_plan(p)
            try:
                v.value = 0
                while status == RETRY:
                    p.room_for_copies(v.value)
                    self.lock("unshare")
                    status = self.unshare_rows(p, &rows, &lengths, keep, &v)
                    self.unlock()
            finally:
                if status != OK:
                    self.let_go_of_plan(p)
        finally:
            ints_free(&rows)
            ints_free(&lengths)
        if status != OK:
            p.refuse(&v, "unshare", -1)

    cdef int unshare_rows(self, Plan plan, const Ints* rows, const Ints* lengths, int64_t first,
                          Verdict* v) noexcept nogil:
        """RETRY: the plan has no room for the copies, of which there are `v.value`."""
        cdef Limits limits
        cdef uint32_t* word = NULL
        cdef int status
        if plan.step.pending:
            return refused(v, PLAN_PENDING, -1, plan.step.id, 0, 0, 0)
        status = plan.judge_arrays(v)
        if status != OK:
            return status
        limits.max_tokens = 0
        limits.seq_tokens = min(plan.seq_limit, self.seqs.max_blocks * self.all_blocks.block_size)
        limits.table_width = plan.wire.table_width
        seqs_new_stamp(&self.seqs)
        status = step_check_unshare(&plan.step, &self.seqs, &self.all_blocks, rows, lengths, first, &limits, v)
        if status == OK and plan.step.log_size > plan.copies_room:
            v.value = plan.step.log_size
            status = RETRY
        if status != OK:
            step_undo_check(&plan.step, &self.all_blocks, 0)
            return status
        if self.record.data != NULL:
            word = record_begin(&self.record, OP_UNSHARE, 3 + 2 * BATCH + rows.size + 2 * lengths.size)
            if word != NULL:
                word = put_wide(put(word, plan.number_in(&self.record)), first)
                word = put_ints(put_slots(word, rows), lengths)
        self.carry_out(plan, <const int64_t*>rows.data, False, 0, 0)
        self.copy_known(&plan.step)
        if self.record.data != NULL:
            record_end(&self.record, word, self.all_blocks.digest)
        return OK

    cdef void copy_known(self, const Step* p) noexcept nogil:
        """A copy is not committed, but a `truncate` into it has to know which tokens are left in front.

        By the copies, as a pool that executes in order has emptied the log.
        """
        cdef int64_t bs = self.all_blocks.block_size
        cdef int32_t k
        if not self.indexed:
            return
        for k in range(p.num_copies):
            memcpy(self.index.tokens + p.copies[3 * <int64_t>k + 1] * bs,
                   self.index.tokens + p.copies[3 * <int64_t>k] * bs,
                   bs * sizeof(int32_t))

    cdef void keep_known(self, const Step* p) noexcept nogil:
        """The same before a rollback puts the sources of its copies back: what was told of the copies is known of them.

        A source that is committed has its own tokens.
        """
        cdef int64_t bs = self.all_blocks.block_size
        cdef const Replaced* entry
        cdef int32_t k
        if not self.indexed:
            return
        for k in range(p.log_size):
            entry = &p.log[k]
            if (seq_find(&self.seqs, p.handle[entry.row]) >= 0 and self.all_blocks.block[entry.new].committed == HELD
                    and not self.all_blocks.block[entry.old].committed):
                memcpy(self.index.tokens + entry.old * bs, self.index.tokens + entry.new * bs, bs * sizeof(int32_t))

    def compact(self, handles, lens, first=0):
        """Keep `lens` tokens of each sequence, moved to the front of its table; the blocks behind them are released.

        Parameters
        ----------
        handles : int or ints
            Open sequences, int64, shape ``(n,)``, no duplicates.
        lens : int or ints
            Tokens that stay, int32 or int64, shape ``(n,)``; each ``0 <= len <= kv_len``. A sequence that keeps all
            is left alone.
        first : int, default 0
            Leading tokens that stay where they are, in all of these sequences: the whole blocks of them may be
            shared.

        Raises
        ------
        PlanStateError
            A sequence is a row of a pending plan. State unchanged.
        ValueError
            A length is out of range; a block that would be rewritten has another reference, is committed, or a
            pending copy reads it: call `unshare` first. State unchanged.
        CapacityExceeded
            The tokens that left and `max_blocks_per_seq` blocks pass position 2^31 - 1. State unchanged.

        Notes
        -----
        The pool moves numbers. The data is moved by the backend, `KVBackend.compact`, in the blocks of the table as
        it was, before the next step is executed. `num_tokens` stays, `kv_len` is the new length; blocks are
        released youngest first, through limbo while steps are pending. From here on the sequence commits no more
        blocks, and cannot be truncated below the `num_tokens` it has now. O(blocks).
        """
        cdef Ints batch, lengths
        cdef Verdict v
        cdef int64_t keep
        cdef int status
        ints_init(&batch, &self.spare)
        ints_init(&lengths, &self.spare)
        try:
            ints_get(&batch, handles, "compact", "handles", True, False)
            ints_get(&lengths, lens, "compact", "lens", True, True)
            keep = to_int(first, "compact", "first", 0, INT64_MAX)
            self.lock("compact")
            status = self.compact_rows(&batch, &lengths, keep, &v)
            self.unlock()
        finally:
            ints_free(&batch)
            ints_free(&lengths)
        if status != OK:
            refuse("compact", &v)

    cdef int judge_compact(self, Ints* batch, const Ints* lengths, int64_t first, Verdict* v) noexcept nogil:
        cdef Seqs* s = &self.seqs
        cdef const Block* block
        cdef int64_t length
        cdef Py_ssize_t k
        cdef int32_t slot, index, id
        cdef int status = seqs_judge(s, batch, v)
        if status != OK:
            return status
        if lengths.size >= 0 and lengths.size != batch.size:
            return refused(v, BAD_SHAPE, -1, lengths.size, 0, 0, batch.size)
        for k in range(batch.size):
            slot = slot_of(ints_at(batch, k))
            length = ints_at(lengths, k)
            if not 0 <= length <= s.seq[slot].num_tokens:
                return refused(v, BAD_LENGTH, k, length, 0, s.seq[slot].num_tokens, 0)
            status = self.judge_eviction(slot, s.seq[slot].num_tokens - length, k, v)
            if status != OK:
                return status
            index = seq_rewritten(s, &self.all_blocks, slot, first, length, 0)
            if index >= 0:
                id = seq_table(s, slot)[index]
                block = &self.all_blocks.block[id]
                return refused(v, NOT_REWRITABLE, k, id, block.refcount, block.committed, 0)
        return OK

    cdef int compact_rows(self, Ints* batch, const Ints* lengths, int64_t first, Verdict* v) noexcept nogil:
        cdef Py_ssize_t k
        cdef uint32_t* word
        cdef int status = self.judge_compact(batch, lengths, first, v)
        if status != OK:
            return status
        for k in range(batch.size):
            seq_compact(&self.seqs, &self.all_blocks, slot_of(ints_at(batch, k)), ints_at(lengths, k))
        if self.record.data != NULL:
            word = record_begin(&self.record, OP_COMPACT,
                                2 + 2 * BATCH + batch.size + 2 * max(lengths.size, <Py_ssize_t>0))
            if word != NULL:
                word = put_ints(put_slots(put_wide(word, first), batch), lengths)
            record_end(&self.record, word, self.all_blocks.digest)
        return OK

    def evict_blocks(self, handle, indices):
        """Whole blocks leave the table of a sequence; no data moves, and shared blocks stay as others read them.

        Parameters
        ----------
        handle : int
            An open sequence.
        indices : ints
            Places in its table, int32 or int64, shape ``(n,)``, ascending. Each must be full:
            ``0 <= index < kv_len // block_size``.

        Raises
        ------
        PlanStateError
            The sequence is a row of a pending plan. State unchanged.
        ValueError
            The indices do not ascend, or one is out of range. State unchanged.
        StaleHandle, ForeignHandle, CapacityExceeded
            As in `compact`. State unchanged.

        Notes
        -----
        What `compact` says of lengths, `truncate` and `commit` holds here too. O(blocks).
        """
        cdef int64_t wanted = self.get_handle(handle, "evict_blocks")
        cdef Ints places
        cdef Verdict v
        cdef int status
        ints_init(&places, &self.spare)
        try:
            ints_get(&places, indices, "evict_blocks", "indices", False, True)
            self.lock("evict_blocks")
            status = self.evict_places(wanted, &places, &v)
            self.unlock()
        finally:
            ints_free(&places)
        if status != OK:
            refuse("evict_blocks", &v)

    cdef int evict_places(self, int64_t handle, Ints* places, Verdict* v) noexcept nogil:
        cdef int32_t slot = seq_judge(&self.seqs, handle, -1, v)
        cdef int64_t full, place
        cdef Py_ssize_t k
        cdef uint32_t* word
        cdef int status
        if slot < 0:
            return v.reason
        full = whole_blocks(&self.all_blocks, self.seqs.seq[slot].num_tokens)
        for k in range(places.size):
            place = ints_at(places, k)
            if not 0 <= place < full:
                return refused(v, BAD_INDEX, k, place, 0, full, 0)
            if k and place <= ints_at(places, k - 1):
                return refused(v, INDEX_ORDER, k, place, 0, 0, ints_at(places, k - 1))
        status = self.judge_eviction(slot, places.size * self.all_blocks.block_size, -1, v)
        if status != OK:
            return status
        seq_evict(&self.seqs, &self.all_blocks, slot, places)
        if self.record.data != NULL:
            word = record_begin(&self.record, OP_EVICT_BLOCKS, 1 + BATCH + 2 * places.size)
            if word != NULL:
                word = put_ints(put(word, slot), places)
            record_end(&self.record, word, self.all_blocks.digest)
        return OK
