"""Steps of a pool: make one, ask for one, end one."""

cdef extern from *:
    """
    static inline void kv_add_reference(void *object) { Py_INCREF((PyObject *)object); }
    """
    void add_reference "kv_add_reference"(void* to) noexcept nogil      # for threads that are attached


cdef void begin_step(State* pool, Step* p) noexcept nogil:
    """Number a step that was accepted; it is pending from here on."""
    p.id = pool.next_step
    p.noted_done = False
    pool.next_step = p.id + 1
    if pool.steps_pend:
        pending_add(&pool.pending, p)
        set_fences(pool.groups, &pool.pending)


cdef inline void show_step(State* pool, Plan plan, int64_t pad_rows, int64_t pad_tokens, bint steady) noexcept nogil:
    """Fill the arrays of a plan after its step; `steady`: a step that replaced nothing."""
    cdef Step* p = &plan.step
    emit_step(plan.field, plan.served_, p, <int32_t>pad_rows, pad_tokens)
    emit_groups(pool.groups, p, <int32_t>pad_rows, pad_tokens)
    plan.rows = p.num_rows
    plan.tokens = p.num_tokens
    plan.shown_rows = max(p.num_rows, <int32_t>pad_rows)
    plan.shown_tokens = max(p.num_tokens, pad_tokens)
    if not pool.steps_pend and not (steady and not pool.groups.lets_go):     # else there is nothing to let go of
        step_release(pool.groups, p)
        step_settle(pool.groups, &pool.pending, p)


cdef void carry_out(State* pool, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows, int64_t
                    pad_tokens) noexcept nogil:
    """Second half of a step: nothing here can fail."""
    begin_step(pool, &plan.step)            # first, as a replacement gets the new step's fence
    step_commit(pool.groups, &plan.step, handles, advance)
    show_step(pool, plan, pad_rows, pad_tokens, False)


cdef inline void limits_of(const State* pool, Plan plan, int64_t max_tokens, Limits* limits) noexcept nogil:
    limits.max_tokens = max_tokens
    limits.seq_tokens = pool.groups.seq_tokens
    limits.length = min(plan.seq_limit, pool.groups.longest)
    limits.table_blocks = plan.table_blocks


cdef int pool_step(State* pool, Plan plan, const Ints* rows, const Ints* new, bint advance, bint partial, int64_t
                   pad_rows, int64_t pad_tokens, Verdict* v) noexcept nogil:
    cdef Limits limits
    cdef Step* p = &plan.step
    cdef int status
    if p.pending:
        return refused(v, PLAN_PENDING, -1, p.id, 0, 0, 0)
    limits_of(pool, plan, plan.max_tokens_ if pad_tokens < 0 else pad_tokens, &limits)
    if advance and step_steady(pool.groups, p, rows, new, &limits, pool.next_step):
        begin_step(pool, p)
        show_step(pool, plan, pad_rows, max(pad_tokens, <int64_t>0), True)
        return OK
    status = step_check(pool.groups, p, rows, new, &limits, advance, partial, pool.next_step, v)
    if status != OK:
        step_undo_check(pool.groups, p, <const int64_t*>rows.data, False)
        return status
    carry_out(pool, plan, <const int64_t*>rows.data, advance, pad_rows, max(pad_tokens, <int64_t>0))
    return OK


cdef int room_for_dry_run(State* pool, int32_t rows, Verdict* v) noexcept nogil:
    cdef Groups* gs = pool.groups
    cdef int32_t k
    if rows > pool.scratch.max_rows:
        step_free(&pool.scratch)
        if step_init(&pool.scratch, rows) != OK:
            return refused(v, NO_MEMORY, -1, rows, 0, 0, 0)
    for k in range(gs.num_groups):
        gs.dry[k] = &gs.scratch[k]
        if rows > gs.scratch[k].max_rows:
            part_free(&gs.scratch[k])
            if part_init(&gs.scratch[k], rows) != OK:
                return refused(v, NO_MEMORY, -1, rows, 0, 0, 0)
        gs.scratch[k].width = INT32_MAX
    pool.scratch.part = gs.dry
    return OK


cdef int pool_can(State* pool, Ints* rows, const Ints* new, Verdict* v) noexcept nogil:
    cdef Limits limits
    cdef Py_ssize_t i
    cdef int status = seqs_judge(&pool.seqs, rows, new, False, v)
    if status != OK:
        return status
    for i in range(rows.size):
        if ints_at(new, i) < 0:
            return refused(v, NEGATIVE_NEW, i, ints_at(new, i), 0, 0, 0)
    if room_for_dry_run(pool, <int32_t>rows.size, v) != OK:
        return v.reason
    limits.max_tokens = limits.table_blocks = INT64_MAX
    limits.seq_tokens = pool.groups.seq_tokens
    limits.length = pool.groups.longest
    status = step_check(pool.groups, &pool.scratch, rows, new, &limits, True, False, pool.next_step, v)
    step_undo_check(pool.groups, &pool.scratch, <const int64_t*>rows.data, False)
    return status


cdef int pool_done(State* pool, Plan plan, void** passed, int32_t* count, Verdict* v) noexcept nogil:
    """Note that a plan was executed; it passes, and others that waited for it, oldest first.

    `passed`: the plans that did, with a reference each for the caller; it has room for all that are pending.
    """
    cdef Step* p = pool.pending.oldest
    if not plan.step.pending:
        return refused(v, PLAN_NOT_PENDING, -1, plan.step.id, 0, 0, not pool.steps_pend)
    if plan.step.noted_done:
        return refused(v, PLAN_NOTED, -1, plan.step.id, 0, 0, 0)
    pool.blocks.digest = mix(mix(pool.blocks.digest, OP_DONE), pool.next_step - plan.step.id)
    plan.step.noted_done = True
    while p != NULL and p.noted_done:
        passed[count[0]] = p.plan
        count[0] += 1
        add_reference(p.plan)
        pending_remove(&pool.pending, p)
        step_pass(pool.groups, &pool.pending, p)
        p = pool.pending.oldest
    return OK


cdef int pool_rollback(State* pool, Plan plan, Verdict* v) noexcept nogil:
    cdef Step* p = &plan.step
    if not p.pending:
        return refused(v, PLAN_NOT_PENDING, -1, p.id, 0, 0, not pool.steps_pend)
    if pool.pending.newest != p:
        return refused(v, PLAN_NOT_NEWEST, -1, p.id, 0, 0, pool.blocks.newest_pending)
    if p.noted_done:
        return refused(v, PLAN_NOTED, -1, p.id, 0, 0, 0)
    if step_has_children(p, &pool.seqs):
        return refused(v, PLAN_HAS_CHILDREN, -1, p.id, 0, 0, 0)
    pending_remove(&pool.pending, p)
    step_rollback(pool.groups, &pool.pending, p)
    return OK


cdef void pool_reset(State* pool, void** plans) noexcept nogil:
    """Make the pool as it was when it was new; `plans` were pending, with a reference each for the caller."""
    cdef Step* p = pool.pending.oldest
    cdef int32_t count = 0, k
    while p != NULL:
        set_flag(&p.pending, False)
        for k in range(pool.groups.num_groups):
            p.part[k].log.size = 0
            wire_forget(&p.part[k].wire, p.num_rows, False)
        plans[count] = p.plan
        add_reference(p.plan)
        count += 1
        p = p.newer
    memset(&pool.pending, 0, sizeof(pool.pending))
    pool.blocks.newest_pending = pool.blocks.oldest_pending = 0
    if has_tree(pool):
        tree_flush(pool.groups, NULL)
    seqs_reset(&pool.seqs)
    blocks_reset(&pool.blocks)
    groups_reset(pool.groups)
    pool.blocks.digest = mix(pool.blocks.digest, OP_RESET)
