"""The state of a pool: its lock, what a call does first, and its memory.

Every call reads its arguments, enters, judges and moves in C, leaves, and only then raises or makes its result: no
Python object is made under the lock.
"""

cdef int pool_enter(State* pool, str call) except -1:
    """Take the pool: no Python code may run from here to `pool_leave`. What earlier calls left to do is done first."""
    pool_enter_any(pool, call)
    if pool.blocks.block == NULL:
        pool_leave(pool)
        raise PoolClosed(f"[{call}] the pool was shut down")
    if pool.num_deferred:
        close_deferred(pool)
    if pool.indexed and pool.blocks.num_dropped:        # the calls before took cached blocks
        index_drain(&pool.index, &pool.blocks)
    return 0


cdef int pool_enter_any(State* pool, str call) except -1:
    """The lock alone, also of a pool that was shut down."""
    if not lock_try(&pool.mutex) and not lock_wait(&pool.mutex):
        raise ConcurrentUse(f"[{call}] this thread is inside another call on the pool")
    return 0


cdef void pool_leave(State* pool) noexcept nogil:
    lock_release(&pool.mutex)


cdef void close_deferred(State* pool) noexcept nogil:
    """Close what finalizers left behind, in the order in which they did; a handle that is dead is skipped."""
    cdef int64_t k
    cdef int32_t slot
    for k in range(pool.num_deferred):
        slot = seq_find(&pool.seqs, pool.deferred[k])
        if slot >= 0:
            seq_close(&pool.seqs, &pool.blocks, slot)
            record_one(&pool.record, DEFERRED, slot, pool.blocks.digest)
    pool.num_deferred = 0


cdef int pool_defer(State* pool, int64_t handle, Verdict* v) noexcept nogil:
    """Close a sequence in the next call."""
    cdef int64_t room = max(2 * pool.deferred_room, <int64_t>16)
    cdef int64_t* deferred
    if pool.num_deferred == pool.deferred_room:
        deferred = <int64_t*>xrealloc(pool.deferred, room * sizeof(int64_t))
        if deferred == NULL:
            return refused(v, NO_MEMORY, -1, room, 0, 0, 0)
        pool.deferred = deferred
        pool.deferred_room = room
    pool.deferred[pool.num_deferred] = handle
    pool.num_deferred = pool.num_deferred + 1
    return OK


cdef void record_start(State* pool) noexcept nogil:
    """The pool was reset: a replay may begin here, with what a reset leaves as it is."""
    cdef Seqs* s = &pool.seqs
    cdef Record* r = &pool.record
    cdef uint32_t* at
    cdef int32_t slot, used = 0
    if r.data == NULL:
        return
    r.epoch += 1
    for slot in range(s.max_seqs):
        used += s.life[slot].generation != 0
    at = record_begin(r, START, 3 + BATCH + 2 * <int64_t>used + pool.blocks.num_dropped)
    if at != NULL:
        at = put_wide(at, <int64_t>pool.blocks.digest)
        at = put(put_words(at, pool.blocks.dropped, pool.blocks.num_dropped), used)
        for slot in range(s.max_seqs):
            if s.life[slot].generation:
                at = put(put(at, slot), s.life[slot].generation)
    record_end(r, at, pool.blocks.digest)


cdef void pool_free(State* pool) noexcept nogil:
    """Give back all memory but the lock's and the arguments'."""
    cdef Blocks* b = &pool.blocks
    cdef Seqs* s = &pool.seqs
    xfree(b.block)
    xfree(b.next)
    xfree(b.prev)
    xfree(b.fence)
    xfree(b.floor)
    xfree(b.blank)
    xfree(b.dropped)
    xfree(b.mark)
    xfree(b.canonical)
    memset(b, 0, sizeof(Blocks))
    xfree(s.memory)
    xfree(s.life)
    xfree(s.prefix)
    xfree(s.partial)
    xfree(s.table)
    xfree(s.free_slot)
    memset(s, 0, sizeof(Seqs))
    index_free(&pool.index)
    pool.indexed = False
    xfree(pool.record.data)
    memset(&pool.record, 0, sizeof(Record))
    xfree(pool.deferred)
    pool.deferred = NULL
    pool.num_deferred = pool.deferred_room = 0


cdef int64_t get_handle(object handle, str call) except? -1:
    return to_int(handle, call, "handle", INT64_MIN, INT64_MAX)
