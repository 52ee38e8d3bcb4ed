"""Tokens leave a sequence that goes on: compaction, whole blocks, and blocks of its own before."""


cdef int judge_full(const State* pool, int64_t group, Verdict* v) noexcept nogil:
    cdef const Groups* gs = pool.groups
    cdef int32_t k
    if not 0 <= group < gs.num_groups:
        return refused(v, NO_SUCH_GROUP, -1, group, 0, gs.num_groups - 1, 0)
    if gs.group[group].kind == FULL_LAYERS:
        return OK
    for k in range(gs.num_groups):
        if gs.group[k].kind == FULL_LAYERS:
            return refused(v, NOT_FULL, -1, group, gs.group[group].kind, 0, k)
    return refused(v, NO_FULL_GROUP, -1, group, gs.group[group].kind, 0, 0)


cdef inline int64_t held_in(const State* pool, int32_t group, int32_t slot) noexcept nogil:
    return held_of(&pool.groups.group[group], slot, pool.seqs.seq[slot].num_tokens)


cdef int pool_kv_len(State* pool, int64_t handle, int64_t group, int64_t* length, Verdict* v) noexcept nogil:
    cdef int32_t slot = seq_judge_any(&pool.seqs, handle, -1, v)
    if slot < 0:
        return v.reason
    if not 0 <= group < pool.groups.num_groups:
        return refused(v, NO_SUCH_GROUP, -1, group, 0, pool.groups.num_groups - 1, 0)
    length[0] = held_in(pool, <int32_t>group, slot)
    return OK


cdef int pool_unshare(State* pool, Plan plan, int64_t group, const Ints* rows, const Ints* lengths, int64_t first,
                      Verdict* v) noexcept nogil:
    """RETRY: the plan has no room for the copies, of which there are `v.value`."""
    cdef Limits limits
    cdef int status = judge_full(pool, group, v)
    if status != OK:
        return status
    if plan.step.pending:
        return refused(v, PLAN_PENDING, -1, plan.step.id, 0, 0, 0)
    limits_of(pool, plan, 0, &limits)
    status = step_check_unshare(pool.groups, &plan.step, <int32_t>group, rows, lengths, first, &limits,
                                pool.next_step, v)
    if status != OK:
        step_undo_check(pool.groups, &plan.step, <const int64_t*>rows.data, False)
        return status
    carry_out(pool, plan, <const int64_t*>rows.data, False, 0, 0)
    return OK


cdef int judge_rewrites(State* pool, int32_t group, int32_t slot, int64_t first, int64_t length, Py_ssize_t row,
                        Verdict* v) noexcept nogil:
    """Nobody else reads what compaction of a sequence to `length` tokens rewrites."""
    cdef const LayerGroup* g = &pool.groups.group[group]
    cdef const int32_t* ids = group_row(g, slot)
    cdef const Block* block
    cdef int64_t place = group_rewritten(g, slot, held_in(pool, group, slot), first, length, 0)
    if place < 0:
        return OK
    block = &g.blocks.block[ids[place]]
    return refused(v, NOT_REWRITABLE, row, ids[place], block.refcount, block.committed, 0)


cdef int pool_compact(State* pool, int64_t group, Ints* batch, const Ints* lengths, int64_t first,
                      Verdict* v) noexcept nogil:
    cdef int64_t length, held
    cdef Py_ssize_t k
    cdef int32_t slot
    cdef int status = judge_full(pool, group, v)
    if status == OK:
        status = seqs_judge(&pool.seqs, batch, lengths, False, v)
    if status != OK:
        return status
    for k in range(batch.size):
        slot = slot_of(ints_at(batch, k))
        length = ints_at(lengths, k)
        held = held_in(pool, <int32_t>group, slot)
        if not 0 <= length <= held:
            return refused(v, BAD_LENGTH, k, length, 0, held, 0)
        if (judge_pending(pool, slot, k, v) != OK
                or judge_rewrites(pool, <int32_t>group, slot, first, length, k, v) != OK):
            return v.reason
    for k in range(batch.size):
        groups_compact(pool.groups, <int32_t>group, slot_of(ints_at(batch, k)), ints_at(lengths, k))
    return OK


cdef int pool_evict_blocks(State* pool, int64_t handle, int64_t group, Ints* places, Verdict* v) noexcept nogil:
    cdef int64_t size, full, place
    cdef int32_t slot
    cdef Py_ssize_t k
    cdef int status = judge_full(pool, group, v)
    if status != OK:
        return status
    slot = seq_judge(&pool.seqs, handle, -1, v)
    if slot < 0:
        return v.reason
    size = pool.groups.group[group].block_size
    full = held_in(pool, <int32_t>group, slot) // size
    for k in range(places.size):
        place = ints_at(places, k)
        if not 0 <= place < full:
            return refused(v, BAD_INDEX, k, place, 0, full, 0)
        if k and place <= ints_at(places, k - 1):
            return refused(v, INDEX_ORDER, k, place, 0, 0, ints_at(places, k - 1))
    if judge_pending(pool, slot, -1, v) != OK:
        return v.reason
    groups_evict(pool.groups, <int32_t>group, slot, places)
    return OK
