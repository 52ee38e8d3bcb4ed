"""Tokens leave a sequence that goes on: compaction, whole blocks, and blocks of its own before.

After an eviction a sequence has two lengths. `num_tokens` counts all it ever had and gives positions; `kv_len` counts
those that still have a slot and gives the lengths and slots of plans.
"""


cdef int judge_full(const State* pool, int64_t group, Verdict* v) noexcept nogil:
    """Tokens leave full groups only."""
    cdef const Groups* gs = pool.groups
    cdef int64_t most = gs.num_groups - 1 if gs != NULL else 0
    cdef int32_t k
    if not 0 <= group <= most:
        return refused(v, NO_SUCH_GROUP, -1, group, 0, most, 0)
    if gs == NULL or gs.group[group].kind == FULL_LAYERS:
        return OK
    for k in range(gs.num_groups):
        if gs.group[k].kind == FULL_LAYERS:
            return refused(v, NOT_FULL, -1, group, gs.group[group].kind, 0, k)
    return refused(v, NO_FULL_GROUP, -1, group, gs.group[group].kind, 0, 0)


cdef inline int64_t held_in(const State* pool, int32_t group, int32_t slot) noexcept nogil:
    """Tokens that a sequence holds in a group: its kv_len there."""
    cdef int64_t length = pool.seqs.seq[slot].kv_len
    return length if pool.groups == NULL else held_of(&pool.groups.group[group], slot, length)


cdef int pool_kv_len(State* pool, int64_t handle, int64_t group, int64_t* length, Verdict* v) noexcept nogil:
    cdef int64_t most = pool.groups.num_groups - 1 if pool.groups != NULL else 0
    cdef int32_t slot = seq_judge_any(&pool.seqs, handle, -1, v)
    if slot < 0:
        return v.reason
    if not 0 <= group <= most:
        return refused(v, NO_SUCH_GROUP, -1, group, 0, most, 0)
    length[0] = held_in(pool, <int32_t>group, slot)
    return OK


cdef int judge_eviction(State* pool, int32_t slot, int64_t leaving, Py_ssize_t row, Verdict* v) noexcept nogil:
    """Refuse what no eviction may touch; row -1: not in a batch."""
    cdef Seqs* s = &pool.seqs
    cdef Blocks* b = &pool.blocks
    cdef int64_t most = s.max_blocks * b.block_size
    if b.newest_pending and s.seq[slot].last_step >= b.oldest_pending:
        return refused(v, PENDING_ROW, row, s.seq[slot].last_step, 0, 0, 0)
    if pool.groups == NULL and leaving and s.life[slot].evicted + leaving + most > INT32_MAX:
        return refused(v, LOST_TOO_MANY, row, s.life[slot].evicted + leaving, 0, INT32_MAX, most)
    return OK


cdef void copy_known(State* pool, const Step* p) noexcept nogil:
    """A copy is not committed, but a `truncate` into it has to know which tokens are left in front.

    By the copies, as a pool that executes in order has emptied the log.
    """
    cdef int64_t bs = pool.blocks.block_size
    cdef int32_t k
    if not pool.indexed:
        return
    for k in range(p.num_copies):
        memcpy(pool.index.tokens + p.copies[3 * <int64_t>k + 1] * bs,
               pool.index.tokens + p.copies[3 * <int64_t>k] * bs,
               bs * sizeof(int32_t))


cdef int pool_unshare(State* pool, Plan plan, int64_t group, const Ints* rows, const Ints* lengths, int64_t first,
                      Verdict* v) noexcept nogil:
    """RETRY: the plan has no room for the copies, of which there are `v.value`."""
    cdef Limits limits
    cdef int status = judge_full(pool, group, v)
    if status != OK:
        return status
    if plan.step.pending:
        return refused(v, PLAN_PENDING, -1, plan.step.id, 0, 0, 0)
    status = plan.judge_arrays(v)
    if status != OK:
        return status
    limits.max_tokens = 0
    limits.seq_tokens = min(plan.seq_limit, pool.seqs.max_blocks * pool.blocks.block_size)
    limits.table_width = plan.wire.table_width
    seqs_new_stamp(&pool.seqs)
    if pool.groups != NULL:
        status = groups_check_unshare(pool.groups, &plan.step, plan.part, <int32_t>group, rows, lengths, first,
                                      &limits, v)
        if status != OK:
            groups_undo_check(pool.groups, plan.part)
        else:
            carry_out_groups(pool, plan, <const int64_t*>rows.data, False, 0, 0)
        return status
    status = step_check_unshare(&plan.step, &pool.seqs, &pool.blocks, rows, lengths, first, &limits, v)
    if status == OK and plan.step.log.size > plan.copies_room:
        v.value = plan.step.log.size
        status = RETRY
    if status != OK:
        log_undo(&plan.step.log, &pool.blocks, 0)
        return status
    carry_out(pool, plan, <const int64_t*>rows.data, False, 0, 0)
    copy_known(pool, &plan.step)
    return OK


cdef int judge_rewrites(State* pool, int32_t group, int32_t slot, int64_t first, int64_t length, Py_ssize_t row,
                        Verdict* v) noexcept nogil:
    """Nobody else reads what compaction of a sequence to `length` tokens rewrites."""
    cdef const LayerGroup* g
    cdef const Blocks* b = &pool.blocks
    cdef const int32_t* ids
    cdef const Block* block
    cdef int64_t place
    if pool.groups == NULL:
        ids = seq_table(&pool.seqs, slot)
        place = seq_rewritten(&pool.seqs, b, slot, first, length, 0)
    else:
        g = &pool.groups.group[group]
        b = g.blocks
        ids = group_row(g, slot)
        place = group_rewritten(g, slot, held_in(pool, group, slot), first, length, 0)
    if place < 0:
        return OK
    block = &b.block[ids[place]]
    return refused(v, NOT_REWRITABLE, row, ids[place], block.refcount, block.committed, 0)


cdef int judge_compact(State* pool, int32_t group, Ints* batch, const Ints* lengths, int64_t first, Verdict*
                       v) noexcept nogil:
    cdef int64_t length, held
    cdef Py_ssize_t k
    cdef int32_t slot
    cdef int status = seqs_judge(&pool.seqs, batch, False, v)
    if status != OK:
        return status
    if lengths.size >= 0 and lengths.size != batch.size:
        return refused(v, BAD_SHAPE, -1, lengths.size, 0, 0, batch.size)
    for k in range(batch.size):
        slot = slot_of(ints_at(batch, k))
        length = ints_at(lengths, k)
        held = held_in(pool, group, slot)
        if not 0 <= length <= held:
            return refused(v, BAD_LENGTH, k, length, 0, held, 0)
        status = judge_eviction(pool, slot, held - length, k, v)
        if status == OK:
            status = judge_rewrites(pool, group, slot, first, length, k, v)
        if status != OK:
            return status
    return OK


cdef int pool_compact(State* pool, int64_t group, Ints* batch, const Ints* lengths, int64_t first, Verdict*
                      v) noexcept nogil:
    cdef Py_ssize_t k
    cdef int32_t slot
    cdef int status = judge_full(pool, group, v)
    if status == OK:
        status = judge_compact(pool, <int32_t>group, batch, lengths, first, v)
    if status != OK:
        return status
    for k in range(batch.size):
        slot = slot_of(ints_at(batch, k))
        if pool.groups != NULL:
            groups_compact(pool.groups, <int32_t>group, slot, ints_at(lengths, k))
        else:
            seq_compact(&pool.seqs, &pool.blocks, slot, ints_at(lengths, k))
    return OK


cdef int pool_evict_blocks(State* pool, int64_t handle, int64_t group, Ints* places, Verdict* v) noexcept nogil:
    cdef int64_t size = pool.blocks.block_size, full, place
    cdef int32_t slot
    cdef Py_ssize_t k
    cdef int status = judge_full(pool, group, v)
    if status != OK:
        return status
    slot = seq_judge(&pool.seqs, handle, -1, v)
    if slot < 0:
        return v.reason
    if pool.groups != NULL:
        size = pool.groups.group[group].block_size
    full = held_in(pool, <int32_t>group, slot) // size
    for k in range(places.size):
        place = ints_at(places, k)
        if not 0 <= place < full:
            return refused(v, BAD_INDEX, k, place, 0, full, 0)
        if k and place <= ints_at(places, k - 1):
            return refused(v, INDEX_ORDER, k, place, 0, 0, ints_at(places, k - 1))
    status = judge_eviction(pool, slot, places.size * size, -1, v)
    if status != OK:
        return status
    if pool.groups != NULL:
        groups_evict(pool.groups, <int32_t>group, slot, places)
    else:
        seq_evict(&pool.seqs, &pool.blocks, slot, places)
    return OK
