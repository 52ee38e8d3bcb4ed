"""Sequences of a pool: fork, truncate, close, and tags so that handles of two pools cannot be confused."""


cdef int64_t ONLY_GROUP = INT64_MIN


cdef int64_t take_tag(int64_t* generation) except -1:
    cdef int64_t tag = tag_take(generation)
    if tag == 0:
        gc.collect()            # pools that only a cycle keeps, with their pending plans
        tag = tag_take(generation)
    if tag == 0:
        raise ValueError(f"[Pool] {MAX_TAG} pools are alive in this process, the limit: shut down those that are not "
                         "used (one that gave out more than 2^31 generations of a handle counts for ever)")
    return tag


cdef int pool_fork(State* pool, int64_t handle, int64_t count, int64_t* children, Verdict* v) noexcept nogil:
    cdef Seqs* s = &pool.seqs
    cdef int32_t parent = seq_judge(s, handle, -1, v)
    if parent < 0:
        return v.reason
    if count > s.num_free_slots:
        return refused(v, OUT_OF_SEQUENCES, -1, count, 0, s.max_seqs, s.num_open)
    groups_fork(pool.groups, parent, <int32_t>count, children)
    return OK


cdef int judge_pending(const State* pool, int32_t slot, Py_ssize_t row, Verdict* v) noexcept nogil:
    """Tokens leave no sequence that is a row of a pending plan."""
    cdef int64_t step = pool.seqs.seq[slot].last_step
    if pool.blocks.newest_pending and step >= pool.blocks.oldest_pending:
        return refused(v, PENDING_ROW, row, step, 0, 0, 0)
    return OK


cdef int pool_truncate(State* pool, Ints* batch, const Ints* lengths, Verdict* v) noexcept nogil:
    cdef Seqs* s = &pool.seqs
    cdef Py_ssize_t k
    cdef int64_t length
    cdef int32_t slot
    cdef Seq* q
    cdef int status = seqs_judge(s, batch, lengths, False, v)
    if status != OK:
        return status
    for k in range(batch.size):
        slot = slot_of(ints_at(batch, k))
        q = &s.seq[slot]
        length = ints_at(lengths, k)
        if not s.life[slot].point <= length <= q.num_tokens:
            return refused(v, BAD_LENGTH, k, length, s.life[slot].point, q.num_tokens, 0)
        if judge_pending(pool, slot, k, v) != OK or groups_judge_length(pool.groups, k, slot, length, v) != OK:
            return v.reason
    for k in range(batch.size):
        groups_truncate(pool.groups, slot_of(ints_at(batch, k)), ints_at(lengths, k))
    return OK


cdef int pool_close(State* pool, Ints* batch, Verdict* v) noexcept nogil:
    cdef Py_ssize_t k
    cdef int status = seqs_judge(&pool.seqs, batch, NULL, True, v)
    if status != OK:
        return status
    for k in range(batch.size):
        close_slot(pool, slot_of(ints_at(batch, k)))
    return OK


cdef int pool_loaded(State* pool, int64_t handle, int64_t length, bint* is_open, Verdict* v) noexcept nogil:
    """The bytes of the first `length` tokens are there, 0: no more than at the beginning. A closed one is closed."""
    cdef Seqs* s = &pool.seqs
    cdef Blocks* b = &pool.blocks
    cdef int32_t slot = seq_loading(s, handle)
    cdef int64_t least, most
    cdef Seq* q
    if slot < 0:
        return refused(v, NOT_LOADING, -1, handle, 0, 0, 0) if seq_judge(s, handle, -1, v) >= 0 else v.reason
    q = &s.seq[slot]
    least, most = q.num_tokens, q.num_blocks * b.block_size
    if has_tree(pool) and pool.groups.tree.needs_checkpoints:
        least = most = pool.groups.tree.row[slot].cut
    if length and not least <= length <= most:
        return refused(v, BAD_LOAD, -1, length, least, most, 0)
    is_open[0] = q.handle != ~slot
    s.life[slot].life = OPEN
    q.handle = seq_made(s, slot)
    b.digest = mix(mix(mix(b.digest, OP_LOADED), untagged(s, handle)), length)
    if not is_open[0]:
        close_slot(pool, slot)
    elif has_tree(pool):
        groups_loaded(pool.groups, slot, length)
    elif length:
        set_size(pool.groups, slot, q.num_blocks, length)
    return OK


cdef int pool_table(State* pool, int64_t handle, int64_t group, const int32_t** ids, int64_t* n, int32_t* columns,
                    Verdict* v) noexcept nogil:
    """Where the ids of a sequence are, and how many. Columns 0: a state has none."""
    cdef int32_t slot = seq_judge_any(&pool.seqs, handle, -1, v)
    cdef const LayerGroup* g
    if slot < 0:
        return v.reason
    if group == ONLY_GROUP and pool.groups.num_groups > 1:
        return refused(v, SEVERAL_GROUPS, -1, pool.groups.num_groups, 0, 0, 0)
    group = 0 if group == ONLY_GROUP else group
    if not 0 <= group < pool.groups.num_groups:
        return refused(v, NO_SUCH_GROUP, -1, group, 0, pool.groups.num_groups - 1, 0)
    columns[0] = 0
    g = &pool.groups.group[group]
    ids[0] = group_row(g, slot)
    n[0] = <int64_t>entries_of(g, slot, pool.seqs.seq[slot].num_blocks) * g.columns
    if g.kind != STATE_LAYERS:
        columns[0] = g.columns
    return OK


ctypedef int (*FindIds)(State* pool, int64_t handle, int64_t group, const int32_t** ids, int64_t* n, int32_t* columns,
                        Verdict* v) noexcept nogil


cdef object copy_ids(State* pool, int64_t handle, int64_t group, str call, FindIds find, int32_t* columns):
    """A copy of the ids that `find` tells of a sequence and a group."""
    cdef int64_t found = -1
    cdef int64_t room = -1
    cdef const int32_t* ids = NULL
    cdef int32_t* data = NULL
    cdef Verdict v
    cdef int status = RETRY
    copy = None
    while status == RETRY:
        room = found
        if room >= 0:
            copy = empty(room, INT32)
            data = <int32_t*>array_data(copy)
        pool_enter(pool, call)
        status = find(pool, handle, group, &ids, &found, columns, &v)
        if status == OK and found != room:
            status = RETRY
        elif status == OK and found:
            memcpy(data, ids, room * sizeof(int32_t))
        pool_end(pool, status, &v, call)
    return copy
