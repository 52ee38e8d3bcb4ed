"""Calls on sequences: open, fork, truncate, close, and handles that cannot be confused."""


cdef int64_t take_tag() except -1:
    """A tag that no live pool of this process has."""
    cdef int64_t tag = tag_take()
    if tag == 0:
        gc.collect()            # pools that only a cycle keeps, with their pending plans
        tag = tag_take()
    if tag == 0:
        raise ValueError(f"[Pool] {MAX_TAG} pools are alive in this process, the limit")
    return tag


cdef bytes get_mask(object mask, Py_ssize_t n):
    """A copy of a bool or uint8 mask of n entries."""
    if isinstance(mask, (list, tuple)) and all(isinstance(m, bool) for m in mask):
        mask = bytes(mask)
    try:
        view = memoryview(mask)
    except TypeError:
        raise TypeError(f"[close_finished] mask must be a bool or uint8 array, not {type(mask).__name__}") from None
    if view.format not in ("?", "B"):
        raise TypeError(f"[close_finished] mask must have dtype bool or uint8 (format {view.format!r})")
    if view.ndim != 1 or view.shape[0] != n or not view.c_contiguous:
        raise ValueError(f"[close_finished] mask has shape {view.shape}, it must be contiguous with {n} entries")
    return view.tobytes()


cdef class SequencePool(BlockPool):
    """Sequences on top of blocks. See `kvpool.Pool`."""

    def __cinit__(self, num_blocks, block_size, *, max_seqs=1024, max_blocks_per_seq=None, reserved_blocks=1,
                  watermark=0, in_order=False, seed=None, prefix_cache=False, events=0, record=0, _hash_bits=64):
        cdef Seqs* s = &self.seqs
        cdef int32_t usable = self.all_blocks.num_blocks - self.all_blocks.reserved
        cdef int32_t slot
        s.max_seqs = <int32_t>to_int(max_seqs, "Pool", "max_seqs", 1, MAX_SEQS)
        if max_blocks_per_seq is None:
            s.max_blocks = min(usable, max(1, (1 << 27) // s.max_seqs))
        else:
            s.max_blocks = <int32_t>to_int(max_blocks_per_seq, "Pool", "max_blocks_per_seq", 1, (<int64_t>1 << 31) - 1)
        s.watermark = to_int(watermark, "Pool", "watermark", 0, usable)
        s.memory = xcalloc(s.max_seqs + 1, sizeof(Seq))
        s.life = <SeqLife*>xcalloc(s.max_seqs, sizeof(SeqLife))
        s.table = <int32_t*>xcalloc(s.max_seqs, s.max_blocks * sizeof(int32_t))
        s.free_slot = <int32_t*>xcalloc(s.max_seqs, sizeof(int32_t))
        if s.memory == NULL or s.life == NULL or s.table == NULL or s.free_slot == NULL:
            SequencePool.release_memory(self)
            raise MemoryError(f"[Pool] no memory for {s.max_seqs} sequences of {s.max_blocks} blocks")
        s.seq = <Seq*>((<size_t>s.memory + sizeof(Seq) - 1) // sizeof(Seq) * sizeof(Seq))
        for slot in range(s.max_seqs):
            s.free_slot[slot] = slot
            s.seq[slot].handle = -1
        s.num_free_slots = s.max_seqs
        s.tag = take_tag()

    def __dealloc__(self):
        if self.seqs.tag:
            tag_give_back(self.seqs.tag)
        SequencePool.release_memory(self)

    cdef void release_memory(self) noexcept nogil:
        cdef Seqs* s = &self.seqs
        xfree(s.memory)
        xfree(s.life)
        xfree(s.prefix)
        xfree(s.partial)
        xfree(s.table)
        xfree(s.free_slot)
        memset(s, 0, sizeof(Seqs))
        xfree(self.deferred)
        self.deferred = NULL
        self.num_deferred = self.deferred_room = 0
        BlockPool.release_memory(self)

    # -- closes that finalizers left behind

    def defer_close(self, handle):
        """Ask for a sequence to be closed by the next public call. Never mutates: for finalizers.

        A handle that is dead by then is skipped, so it is safe to call for a sequence that was closed, and for a
        pool that was shut down.
        """
        cdef int64_t closing = to_int(handle, "defer_close", "handle", INT64_MIN, INT64_MAX)
        cdef int status = OK
        cdef Verdict v
        self.lock_open_or_not("defer_close")
        if self.all_blocks.block != NULL:
            status = self.defer(closing, &v)
        self.unlock()
        if status != OK:
            refuse("defer_close", &v)

    cdef int defer(self, int64_t handle, Verdict* v) noexcept nogil:
        cdef int64_t room = max(2 * self.deferred_room, <int64_t>16)
        cdef int64_t* deferred
        if self.num_deferred == self.deferred_room:
            deferred = <int64_t*>xrealloc(self.deferred, room * sizeof(int64_t))
            if deferred == NULL:
                return refused(v, NO_MEMORY, -1, room, 0, 0, 0)
            self.deferred = deferred
            self.deferred_room = room
        self.deferred[self.num_deferred] = handle
        self.num_deferred = self.num_deferred + 1
        return OK

    cdef void catch_up(self) noexcept nogil:
        """Close what finalizers left behind, in the order in which they did; a handle that is dead is skipped."""
        cdef int64_t k
        cdef int32_t slot
        for k in range(self.num_deferred):
            slot = seq_find(&self.seqs, self.deferred[k])
            if slot >= 0:
                seq_close(&self.seqs, &self.all_blocks, slot)
                record_one(&self.record, DEFERRED, slot, self.all_blocks.digest)
        self.num_deferred = 0

    cdef int64_t get_handle(self, object handle, str call) except? -1:
        return to_int(handle, call, "handle", INT64_MIN, INT64_MAX)

    cdef void uncommit(self, int32_t slot, int64_t length) noexcept nogil:
        """A sequence is about to be shortened; for the layer that knows about tokens."""

    cdef void record_start(self) noexcept nogil:
        """The pool was reset: a replay may begin here, with what a reset leaves as it is."""
        cdef Seqs* s = &self.seqs
        cdef Record* r = &self.record
        cdef uint32_t* at
        cdef int32_t slot, used = 0
        if r.data == NULL:
            return
        r.epoch += 1
        for slot in range(s.max_seqs):
            used += s.life[slot].generation != 0
        at = record_begin(r, START, 3 + BATCH + 2 * <int64_t>used + self.all_blocks.num_dropped)
        if at != NULL:
            at = put_wide(at, <int64_t>self.all_blocks.digest)
            at = put(put_words(at, self.all_blocks.dropped, self.all_blocks.num_dropped), used)
            for slot in range(s.max_seqs):
                if s.life[slot].generation:
                    at = put(put(at, slot), s.life[slot].generation)
        record_end(r, at, self.all_blocks.digest)

    # -- verbs

    def fork(self, handle, n=1):
        """`n` new sequences that share every filled block of an open one. No KV data moves until one of them writes.

        Parameters
        ----------
        handle : int
            The parent; it may be a row of a pending plan.
        n : int, default 1
            Number of children, >= 0.

        Returns
        -------
        ndarray, int64, shape ``(n,)``
            Handles of the children. Blocks reserved beyond the parent's length stay with the parent.

        Raises
        ------
        OutOfSequences
            Fewer than `n` slots are free. State unchanged.
        StaleHandle, ForeignHandle
            `handle` is not open in this pool. State unchanged.

        Notes
        -----
        O(blocks of the parent * n).
        """
        cdef int64_t parent = self.get_handle(handle, "fork")
        cdef int64_t count = to_int(n, "fork", "n", 0, INT64_MAX)
        cdef int64_t* made
        cdef Verdict v
        cdef int status
        children = new_int64(count if count <= self.seqs.max_seqs else 0)       # more will be refused
        made = <int64_t*>array_data(children)   # asks for memory: nothing may fail once the fork is made
        self.lock("fork")
        status = self.make_children(parent, count, made, &v)
        self.unlock()
        if status != OK:
            refuse("fork", &v)
        return children

    cdef int make_children(self, int64_t handle, int64_t count, int64_t* children, Verdict* v) noexcept nogil:
        cdef Seqs* s = &self.seqs
        cdef uint32_t* at
        cdef int64_t k
        cdef int32_t parent = seq_judge(s, handle, -1, v)
        if parent < 0:
            return v.reason
        if count > s.num_free_slots:
            return refused(v, OUT_OF_SEQUENCES, -1, count, 0, s.max_seqs, s.num_open)
        seq_fork(s, &self.all_blocks, parent, <int32_t>count, children)
        if self.record.data != NULL:
            at = record_begin(&self.record, OP_FORK, 2 + count)
            if at != NULL:
                at = put(put(at, parent), count)
                for k in range(count):
                    at[k] = slot_of(children[k])
                at += count
            record_end(&self.record, at, self.all_blocks.digest)
        return OK

    def truncate(self, handles, lens):
        """Shorten sequences; blocks beyond the new length are released, youngest first, reserved ones too.

        Parameters
        ----------
        handles : int or ints
            Open sequences, int64, shape ``(n,)``, no duplicates.
        lens : int or ints
            New lengths in tokens as `num_tokens` counts them, int32 or int64, shape ``(n,)``; each
            ``0 <= len <= num_tokens``.

        Raises
        ------
        PlanStateError
            A sequence is a row of a pending plan. State unchanged.
        ValueError
            A length is negative or above the current one, or below the length at which tokens were evicted last;
            the shapes differ. State unchanged.
        """
        cdef Ints batch, lengths
        cdef Verdict v
        cdef int status
        ints_init(&batch, &self.spare)
        ints_init(&lengths, &self.spare)
        try:
            ints_get(&batch, handles, "truncate", "handles", True, False)
            ints_get(&lengths, lens, "truncate", "lens", True, True)
            self.lock("truncate")
            status = self.truncate_rows(&batch, &lengths, &v)
            self.unlock()
        finally:
            ints_free(&batch)
            ints_free(&lengths)
        if status != OK:
            refuse("truncate", &v)

    cdef int judge_truncate(self, Ints* batch, const Ints* lengths, Verdict* v) noexcept nogil:
        cdef Seqs* s = &self.seqs
        cdef Blocks* b = &self.all_blocks
        cdef Py_ssize_t k
        cdef int64_t length
        cdef int32_t slot
        cdef Seq* q
        cdef SeqLife* life
        cdef int status = seqs_judge(s, batch, v)
        if status != OK:
            return status
        if lengths.size >= 0 and lengths.size != batch.size:
            return refused(v, BAD_SHAPE, -1, lengths.size, 0, 0, batch.size)
        for k in range(batch.size):
            slot = slot_of(ints_at(batch, k))
            q = &s.seq[slot]
            life = &s.life[slot]
            length = ints_at(lengths, k)
            if length < life.point or length > q.num_tokens + life.evicted:
                return refused(v, BAD_LENGTH, k, length, life.point, q.num_tokens + life.evicted, 0)
            if b.newest_pending and q.last_step >= b.oldest_pending:
                return refused(v, PENDING_ROW, k, q.last_step, 0, 0, 0)
        return OK

    cdef int truncate_rows(self, Ints* batch, const Ints* lengths, Verdict* v) noexcept nogil:
        cdef Seqs* s = &self.seqs
        cdef Py_ssize_t k
        cdef int64_t length
        cdef int32_t slot
        cdef uint32_t* word
        cdef int status = self.judge_truncate(batch, lengths, v)
        if status != OK:
            return status
        for k in range(batch.size):
            slot = slot_of(ints_at(batch, k))
            length = ints_at(lengths, k) - s.life[slot].evicted
            self.uncommit(slot, length)
            seq_truncate(s, &self.all_blocks, slot, length)
        if self.record.data != NULL:
            word = record_begin(&self.record, OP_TRUNCATE, 2 * BATCH + batch.size + 2 * lengths.size)
            if word != NULL:
                word = put_ints(put_slots(word, batch), lengths)
            record_end(&self.record, word, self.all_blocks.digest)
        return OK

    def close(self, handles):
        """End sequences, in the order given; their blocks are released youngest first. Legal while a plan is pending.

        Raises
        ------
        StaleHandle, ForeignHandle
            A handle is not open in this pool. State unchanged.
        ValueError
            Duplicate handles. State unchanged.
        """
        cdef Ints batch
        cdef Verdict v
        cdef int status
        ints_init(&batch, &self.spare)
        try:
            ints_get(&batch, handles, "close", "handles", True, False)
            self.lock("close")
            status = self.close_rows(&batch, &v)
            self.unlock()
        finally:
            ints_free(&batch)
        if status != OK:
            refuse("close", &v)

    cdef int close_rows(self, Ints* batch, Verdict* v) noexcept nogil:
        cdef Py_ssize_t k
        cdef int status = seqs_judge(&self.seqs, batch, v)
        if status != OK:
            return status
        for k in range(batch.size):
            seq_close(&self.seqs, &self.all_blocks, slot_of(ints_at(batch, k)))
        record_slots(&self.record, OP_CLOSE, batch, self.all_blocks.digest)
        return OK

    def close_finished(self, handles, mask):
        """Close the sequences whose mask byte is not zero; returns how many.

        Parameters
        ----------
        handles : ints
            int64, shape ``(n,)``, no duplicates.
        mask : buffer
            bool or uint8, shape ``(n,)``; read before anything is closed.

        Raises
        ------
        StaleHandle, ForeignHandle, ValueError, TypeError
            A handle is not open, duplicates, shapes that differ, another dtype. State unchanged.
        """
        cdef Ints batch
        cdef Verdict v
        cdef bytes done
        cdef object closed
        cdef int status
        cdef const unsigned char* finished
        ints_init(&batch, &self.spare)
        try:
            ints_get(&batch, handles, "close_finished", "handles", False, False)
            done = get_mask(mask, batch.size)
            finished = done
            closed = batch.size - done.count(b"\0")     # made before anything moves
            self.lock("close_finished")
            status = self.close_marked(&batch, finished, &v)
            self.unlock()
        finally:
            ints_free(&batch)
        if status != OK:
            refuse("close_finished", &v)
        return closed

    cdef int close_marked(self, Ints* batch, const unsigned char* finished, Verdict* v) noexcept nogil:
        cdef Py_ssize_t k
        cdef uint32_t* word
        cdef int status = seqs_judge(&self.seqs, batch, v)
        if status != OK:
            return status
        for k in range(batch.size):
            if finished[k]:
                seq_close(&self.seqs, &self.all_blocks, slot_of(ints_at(batch, k)))
        if self.record.data != NULL:
            word = record_begin(&self.record, CLOSE_FINISHED, BATCH + 2 + batch.size + batch.size // 4)
            if word != NULL:
                word = put_bytes(put_slots(word, batch), finished, batch.size)
            record_end(&self.record, word, self.all_blocks.digest)
        return OK

    # -- reading

    def table(self, handle):
        """Block ids of a sequence in order, reserved ones included; int32 ``(blocks,)``, a copy."""
        cdef int64_t wanted = self.get_handle(handle, "table")
        cdef int32_t room = -1, found = -1, slot = -1
        cdef int32_t* data = NULL
        cdef Verdict v
        cdef int status = RETRY
        ids = None
        while status == RETRY:
            room = found
            if room >= 0:
                ids = new_int32(room)
                data = <int32_t*>array_data(ids)
            self.lock("table")
            slot = seq_judge(&self.seqs, wanted, -1, &v)
            if slot < 0:
                status = v.reason
            else:
                found = self.seqs.seq[slot].num_blocks
                if found == room:
                    memcpy(data, seq_table(&self.seqs, slot), room * sizeof(int32_t))
                    status = OK
            self.unlock()
        if status != OK:
            refuse("table", &v)
        return ids

    cdef int read(self, object handle, str call, Seq* q, SeqLife* life) except -1:
        """A copy of what the pool knows of a sequence."""
        cdef int64_t wanted = self.get_handle(handle, call)
        cdef int32_t slot
        cdef Verdict v
        self.lock(call)
        slot = seq_judge(&self.seqs, wanted, -1, &v)
        if slot >= 0:
            q[0] = self.seqs.seq[slot]
            life[0] = self.seqs.life[slot]
        self.unlock()
        if slot < 0:
            refuse(call, &v)
        return 0

    def num_tokens(self, handle):
        """Length of a sequence in tokens, evicted ones included: the position of the next one. O(1)."""
        cdef Seq q
        cdef SeqLife life
        self.read(handle, "num_tokens", &q, &life)
        return q.num_tokens + life.evicted

    def kv_len(self, handle):
        """Tokens of a sequence that still have a slot: `num_tokens` without those that were evicted. O(1)."""
        cdef Seq q
        cdef SeqLife life
        self.read(handle, "kv_len", &q, &life)
        return q.num_tokens

    def capacity(self, handle):
        """Tokens that the blocks of a sequence can hold. O(1)."""
        cdef Seq q
        cdef SeqLife life
        self.read(handle, "capacity", &q, &life)
        return q.num_blocks * self.all_blocks.block_size

    def is_open(self, handle):
        """Whether a handle names an open sequence of this pool. O(1)."""
        cdef int64_t wanted = to_int(handle, "is_open", "handle", 0, INT64_MAX)
        cdef bint found
        self.lock("is_open")
        found = seq_find(&self.seqs, wanted) >= 0
        self.unlock()
        return found

    def _set_generation(self, slot, generation):
        """For tests: the generation that the next sequence in a free slot gets."""
        cdef int64_t i = to_int(slot, "_set_generation", "slot", 0, self.seqs.max_seqs - 1)
        cdef int64_t value = to_int(generation, "_set_generation", "generation", 0, (<int64_t>1 << 32) - 1)
        if self.seqs.life[i].life != FREE_SLOT:
            raise ValueError(f"[_set_generation] slot {i} is not free")
        self.seqs.life[i].generation = <uint32_t>value
