"""Tokens leave a sequence that goes on: compaction, whole blocks, and blocks of its own before.

After an eviction a sequence has two lengths. `num_tokens` counts all it ever had and gives positions; `kv_len` counts
those that still have a slot and gives the lengths and slots of plans.
"""


cdef int judge_eviction(State* pool, int32_t slot, int64_t leaving, Py_ssize_t row, Verdict* v) noexcept nogil:
    """Refuse what no eviction may touch; row -1: not in a batch."""
    cdef Seqs* s = &pool.seqs
    cdef Blocks* b = &pool.blocks
    cdef int64_t most = s.max_blocks * b.block_size
    if b.newest_pending and s.seq[slot].last_step >= b.oldest_pending:
        return refused(v, PENDING_ROW, row, s.seq[slot].last_step, 0, 0, 0)
    if leaving and s.life[slot].evicted + leaving + most > INT32_MAX:
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


cdef int pool_unshare(State* pool, Plan plan, const Ints* rows, const Ints* lengths, int64_t first, Verdict*
                      v) noexcept nogil:
    """RETRY: the plan has no room for the copies, of which there are `v.value`."""
    cdef Limits limits
    cdef int status
    if pool.groups != NULL:
        return refused(v, IN_GROUPS, -1, 0, 0, 0, 0)
    if plan.step.pending:
        return refused(v, PLAN_PENDING, -1, plan.step.id, 0, 0, 0)
    status = plan.judge_arrays(v)
    if status != OK:
        return status
    limits.max_tokens = 0
    limits.seq_tokens = min(plan.seq_limit, pool.seqs.max_blocks * pool.blocks.block_size)
    limits.table_width = plan.wire.table_width
    seqs_new_stamp(&pool.seqs)
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


cdef int judge_compact(State* pool, Ints* batch, const Ints* lengths, int64_t first, Verdict* v) noexcept nogil:
    cdef Seqs* s = &pool.seqs
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
        if not 0 <= length <= s.seq[slot].kv_len:
            return refused(v, BAD_LENGTH, k, length, 0, s.seq[slot].kv_len, 0)
        status = judge_eviction(pool, slot, s.seq[slot].kv_len - length, k, v)
        if status != OK:
            return status
        index = seq_rewritten(s, &pool.blocks, slot, first, length, 0)
        if index >= 0:
            id = seq_table(s, slot)[index]
            block = &pool.blocks.block[id]
            return refused(v, NOT_REWRITABLE, k, id, block.refcount, block.committed, 0)
    return OK


cdef int pool_compact(State* pool, Ints* batch, const Ints* lengths, int64_t first, Verdict* v) noexcept nogil:
    cdef Py_ssize_t k
    cdef int status = IN_GROUPS if pool.groups != NULL else judge_compact(pool, batch, lengths, first, v)
    if status == IN_GROUPS:
        return refused(v, IN_GROUPS, -1, 0, 0, 0, 0)
    if status != OK:
        return status
    for k in range(batch.size):
        seq_compact(&pool.seqs, &pool.blocks, slot_of(ints_at(batch, k)), ints_at(lengths, k))
    return OK


cdef int pool_evict_blocks(State* pool, int64_t handle, Ints* places, Verdict* v) noexcept nogil:
    cdef int32_t slot = seq_judge(&pool.seqs, handle, -1, v)
    cdef int64_t full, place
    cdef Py_ssize_t k
    cdef int status
    if pool.groups != NULL:
        return refused(v, IN_GROUPS, -1, 0, 0, 0, 0)
    if slot < 0:
        return v.reason
    full = whole_blocks(&pool.blocks, pool.seqs.seq[slot].kv_len)
    for k in range(places.size):
        place = ints_at(places, k)
        if not 0 <= place < full:
            return refused(v, BAD_INDEX, k, place, 0, full, 0)
        if k and place <= ints_at(places, k - 1):
            return refused(v, INDEX_ORDER, k, place, 0, 0, ints_at(places, k - 1))
    status = judge_eviction(pool, slot, places.size * pool.blocks.block_size, -1, v)
    if status != OK:
        return status
    seq_evict(&pool.seqs, &pool.blocks, slot, places)
    return OK
