"""The state of a pool: its lock, what a call does first, and its memory.

Every call reads its arguments, enters, judges and moves in C, leaves, and only then raises or makes its result: no
Python object is made under the lock.
"""

cdef inline bint has_tree(const State* pool) noexcept nogil:
    return pool.groups.tree != NULL


cdef int pool_enter(State* pool, str call) except -1:
    """Take the pool: no Python code may run from here to `pool_leave`. What earlier calls left to do is done first."""
    pool_enter_any(pool, call)
    if pool.blocks.block == NULL:
        pool_leave(pool)
        raise PoolClosed(f"[{call}] the pool was shut down")
    if pool.num_deferred:
        close_deferred(pool)
    if has_tree(pool):              # and what they let go of may be kept
        tree_settle(pool.groups)
    return 0


cdef int pool_enter_any(State* pool, str call) except -1:
    """The lock alone, also of a pool that was shut down."""
    if not lock_try(&pool.mutex) and not lock_wait(&pool.mutex):
        raise ConcurrentUse(f"[{call}] this thread is inside another call on the pool")
    return 0


cdef void pool_leave(State* pool) noexcept nogil:
    lock_release(&pool.mutex)


cdef int pool_end(State* pool, int status, const Verdict* v, str call) except -1:
    """Leave, and only then raise what a call was refused for. RETRY is no refusal."""
    pool_leave(pool)
    return refuse(call, v) if status != OK and status != RETRY else 0


cdef inline void close_slot(State* pool, int32_t slot) noexcept nogil:
    if pool.seqs.life[slot].life == LOADING:    # somebody writes its blocks: they stay until `loaded`
        pool.blocks.digest = mix(mix(pool.blocks.digest, OP_CLOSE), untagged(&pool.seqs, seq_made(&pool.seqs, slot)))
        pool.seqs.seq[slot].handle = ~slot
    else:
        groups_close(pool.groups, slot)


cdef void close_deferred(State* pool) noexcept nogil:
    """Close what finalizers left behind, in the order in which they did; a handle that is dead is skipped."""
    cdef int64_t k
    cdef int32_t slot
    cdef Verdict v
    for k in range(pool.num_deferred):
        slot = seq_judge_any(&pool.seqs, pool.deferred[k], -1, &v)
        if slot >= 0:
            close_slot(pool, slot)
    pool.num_deferred = 0


cdef int pool_defer(State* pool, int64_t handle, Verdict* v) noexcept nogil:
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


cdef int32_t audit_room(const State* pool) noexcept nogil:
    """Blocks of the largest arena, or nodes of a tree."""
    cdef int32_t k, most = 0
    for k in range(pool.groups.num_arenas):
        most = max(most, pool.groups.arena[k].num_blocks)
    return max(most, pool.groups.tree.room) if has_tree(pool) else most


cdef void pool_free(State* pool) noexcept nogil:
    """Give back all memory but the lock's and the arguments'."""
    cdef Seqs* s = &pool.seqs
    if pool.groups != NULL:
        groups_free(pool.groups)
        pool.groups = NULL
    blocks_free(&pool.blocks)
    xfree(s.memory)
    xfree(s.life)
    xfree(s.prefix)
    xfree(s.partial)
    xfree(s.free_slot)
    memset(s, 0, sizeof(Seqs))
    index_free(&pool.index)
    xfree(pool.deferred)
    pool.deferred = NULL
    pool.num_deferred = pool.deferred_room = 0


cdef inline int64_t get_handle(object handle, str call) except? -1:
    return to_int(handle, call, "handle", INT64_MIN, INT64_MAX)
