"""Steps of a pool: make one, ask for one, end one; and what `check` looks at."""

cdef extern from *:
    """
    static inline void kv_add_reference(void *object) { Py_INCREF((PyObject *)object); }
    """
    void add_reference "kv_add_reference"(void* to) noexcept nogil      # for threads that are attached


cdef inline void show_step(Plan plan, int64_t pad_rows, int64_t pad_tokens) noexcept nogil:
    """How much of its arrays a plan shows after a step."""
    cdef const Step* p = &plan.step
    plan.rows = p.num_rows
    plan.tokens = p.num_tokens
    plan.copies_made = p.num_copies
    plan.shown_rows = max(p.num_rows, <int32_t>pad_rows)
    plan.shown_tokens = max(p.num_tokens, pad_tokens)


cdef void begin_step(State* pool, Step* p) noexcept nogil:
    """Number a step that was accepted; it is pending from here on."""
    p.id = pool.next_step
    p.noted_done = False
    pool.next_step = p.id + 1
    if pool.steps_pend:
        pending_add(&pool.pending, p)
        if pool.groups != NULL:
            groups_set_fences(pool.groups, &pool.pending)
        else:
            set_fences(&pool.pending, &pool.blocks)


cdef void show_rows(State* pool, Plan plan, int64_t pad_rows, int64_t pad_tokens) noexcept nogil:
    """Fill the arrays of a plan after its step."""
    cdef Step* p = &plan.step
    wire_emit(&plan.wire, p, &pool.seqs, &pool.blocks, <int32_t>pad_rows, pad_tokens)
    show_step(plan, pad_rows, pad_tokens)
    if not pool.steps_pend:
        log_release(&p.log, &pool.blocks)
        p.log.size = 0


cdef void carry_out(State* pool, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows, int64_t
                    pad_tokens) noexcept nogil:
    """Second half of a step: nothing here can fail."""
    begin_step(pool, &plan.step)            # first, as a replacement gets the new step's fence
    step_commit(&plan.step, &pool.seqs, &pool.blocks, handles, advance, pool.steps_pend)
    show_rows(pool, plan, pad_rows, pad_tokens)


cdef void carry_out_groups(State* pool, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows, int64_t
                           pad_tokens) noexcept nogil:
    """The same in a pool with layer groups."""
    cdef Step* p = &plan.step
    begin_step(pool, p)
    groups_commit(pool.groups, p, plan.part, handles, advance)
    wire_emit(&plan.wire, p, &pool.seqs, &pool.blocks, <int32_t>pad_rows, pad_tokens)
    groups_emit(pool.groups, p, <int32_t>pad_rows, pad_tokens)
    show_step(plan, pad_rows, pad_tokens)
    if not pool.steps_pend:
        groups_release(pool.groups, p)
        groups_settle(pool.groups, &pool.pending, p)


cdef int step_groups(State* pool, Plan plan, const Ints* rows, const Ints* new, const Limits* limits, bint advance,
                     bint partial, int64_t pad_rows, int64_t pad_tokens, Verdict* v) noexcept nogil:
    """Judge a step in a pool with layer groups, and carry it out."""
    cdef int status = groups_check_step(pool.groups, &plan.step, plan.part, rows, new, limits, advance, partial, v)
    if status != OK:
        groups_undo_check(pool.groups, plan.part)
        return status
    carry_out_groups(pool, plan, <const int64_t*>rows.data, advance, pad_rows, max(pad_tokens, <int64_t>0))
    return OK


cdef int can_groups(State* pool, const Ints* rows, const Ints* new, const Limits* limits, Verdict* v) noexcept nogil:
    cdef StepPart* part[MAX_GROUPS]
    cdef int32_t k
    cdef int status
    for k in range(pool.groups.num_groups):
        part[k] = &pool.groups.scratch[k]
        part[k].width = 0x7FFFFFFF
        if rows.size > part[k].max_rows:
            part_free(part[k])
            part[k].max_rows = 0
            if part_init(part[k], <int32_t>rows.size) != OK:
                part_free(part[k])
                part[k].max_rows = 0
                return refused(v, NO_MEMORY, -1, rows.size, 0, 0, 0)
    status = groups_check_step(pool.groups, &pool.scratch, part, rows, new, limits, True, False, v)
    groups_undo_check(pool.groups, part)
    return status


cdef int pool_step(State* pool, Plan plan, const Ints* rows, const Ints* new, bint advance, bint partial, int64_t
                   pad_rows, int64_t pad_tokens, Verdict* v) noexcept nogil:
    """Judge a step, and carry it out."""
    cdef Limits limits
    cdef int status
    if plan.step.pending:
        return refused(v, PLAN_PENDING, -1, plan.step.id, 0, 0, 0)
    status = plan.judge_arrays(v)
    if status != OK:
        return status
    limits.max_tokens = plan.max_tokens_ if pad_tokens < 0 else pad_tokens
    limits.seq_tokens = min(plan.seq_limit, pool.seqs.max_blocks * pool.blocks.block_size)
    limits.table_width = plan.wire.table_width
    seqs_new_stamp(&pool.seqs)
    if pool.groups != NULL:
        return step_groups(pool, plan, rows, new, &limits, advance, partial, pad_rows, pad_tokens, v)
    if advance and step_steady(&plan.step, &pool.seqs, &pool.blocks, rows, new, &limits,
                               pool.next_step if pool.steps_pend else 0):
        begin_step(pool, &plan.step)
        show_rows(pool, plan, pad_rows, max(pad_tokens, <int64_t>0))
        return OK
    status = step_check(&plan.step, &pool.seqs, &pool.blocks, rows, new, &limits, advance, partial, v)
    if status != OK:
        log_undo(&plan.step.log, &pool.blocks, 0)
        return status
    carry_out(pool, plan, <const int64_t*>rows.data, advance, pad_rows, max(pad_tokens, <int64_t>0))
    return OK


cdef int pool_can(State* pool, Ints* rows, const Ints* new, Verdict* v) noexcept nogil:
    cdef Limits limits
    cdef Py_ssize_t i
    cdef int status = seqs_judge(&pool.seqs, rows, False, v)
    if status != OK:
        return status
    if new.size >= 0 and new.size != rows.size:
        return refused(v, BAD_SHAPE, -1, new.size, 0, 0, rows.size)
    for i in range(rows.size):
        if ints_at(new, i) < 0:
            return refused(v, NEGATIVE_NEW, i, ints_at(new, i), 0, 0, 0)
    if rows.size > pool.scratch.max_rows:
        step_free(&pool.scratch)
        if step_init(&pool.scratch, <int32_t>rows.size) != OK:
            return refused(v, NO_MEMORY, -1, rows.size, 0, 0, 0)
    limits.max_tokens = INT64_MAX
    limits.seq_tokens = pool.seqs.max_blocks * pool.blocks.block_size
    limits.table_width = pool.seqs.max_blocks
    seqs_new_stamp(&pool.seqs)
    if pool.groups != NULL:
        return can_groups(pool, rows, new, &limits, v)
    status = step_check(&pool.scratch, &pool.seqs, &pool.blocks, rows, new, &limits, True, False, v)
    log_undo(&pool.scratch.log, &pool.blocks, 0)
    return status


cdef void pass_step(State* pool, Step* p) noexcept nogil:
    cdef int32_t i, slot
    pending_remove(&pool.pending, p)
    if pool.groups != NULL:
        groups_pass(pool.groups, &pool.pending, p)
        return
    set_fences(&pool.pending, &pool.blocks)
    if pool.indexed:
        for i in range(p.num_rows):
            slot = seq_find(&pool.seqs, p.handle[i])
            if slot >= 0:
                pool.seqs.prefix[slot].done = p.length[i]
    log_release(&p.log, &pool.blocks)
    pending_settle(&pool.pending, p, &pool.blocks)
    if pool.blocks.num_waiting:
        publish_waiting(pool)
        pool.blocks.digest = mix(mix(pool.blocks.digest, OP_PUBLISH), pool.index.next_uid)


cdef int pool_done(State* pool, Plan plan, void** passed, int32_t room, int32_t* count, Verdict* v) noexcept nogil:
    """Note that a plan was executed; it passes, and others that waited for it, oldest first.

    `passed`: the plans that did, with a reference each for the caller. RETRY: it has no room for all that may.
    """
    cdef Step* p = pool.pending.oldest
    if not plan.step.pending:
        return refused(v, PLAN_NOT_PENDING, -1, plan.step.id, 0, 0, not pool.steps_pend)
    if plan.step.noted_done:
        return refused(v, PLAN_NOTED, -1, plan.step.id, 0, 0, 0)
    if pool.pending.size > room:
        return RETRY
    pool.blocks.digest = mix(mix(pool.blocks.digest, OP_DONE), pool.next_step - plan.step.id)
    plan.step.noted_done = True
    while p != NULL and p.noted_done:
        passed[count[0]] = p.plan
        count[0] += 1
        add_reference(p.plan)
        pass_step(pool, p)
        p = pool.pending.oldest
    return OK


cdef void keep_known(State* pool, const Step* p) noexcept nogil:
    """Before a rollback: give the source of each copy the tokens that were committed for the copy.

    A source that is committed itself has its own tokens.
    """
    cdef int64_t bs = pool.blocks.block_size
    cdef const Replaced* entry
    cdef int32_t k
    if not pool.indexed:
        return
    for k in range(p.log.size):
        entry = &p.log.entry[k]
        if (seq_find(&pool.seqs, p.handle[entry.row]) >= 0 and pool.blocks.block[entry.new].committed == WAITING
                and not pool.blocks.block[entry.old].committed):
            memcpy(pool.index.tokens + entry.old * bs, pool.index.tokens + entry.new * bs, bs * sizeof(int32_t))


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
    keep_known(pool, p)
    pending_remove(&pool.pending, p)
    if pool.groups != NULL:
        groups_rollback(pool.groups, &pool.pending, p)
        return OK
    set_fences(&pool.pending, &pool.blocks)
    blocks_lower_fences(&pool.blocks)
    step_rollback(p, &pool.seqs, &pool.blocks)
    wire_forget(&plan.wire, p.num_rows, False)
    pending_settle(&pool.pending, p, &pool.blocks)
    return OK


cdef int32_t pool_reset(State* pool, void** plans) noexcept nogil:
    """Make the pool as it was when it was new; `plans` were pending, with a reference each for the caller."""
    cdef Step* p = pool.pending.oldest
    cdef int32_t count = 0, k
    while p != NULL:
        set_flag(&p.pending, False)
        p.log.size = 0
        wire_forget(<Wire*>p.wire, p.num_rows, False)
        for k in range(pool.groups.num_groups if pool.groups != NULL else 0):
            wire_forget(&parts_of(p)[k].wire, p.num_rows, False)
        plans[count] = p.plan
        add_reference(p.plan)
        count += 1
        p = p.newer
    memset(&pool.pending, 0, sizeof(pool.pending))
    pool.blocks.newest_pending = pool.blocks.oldest_pending = 0
    if has_cache(pool):
        flush_root(pool, 0)
    seqs_reset(&pool.seqs)
    blocks_reset(&pool.blocks)
    if pool.groups != NULL:
        groups_reset(pool.groups)
    pool.blocks.digest = mix(pool.blocks.digest, OP_RESET)
    return count


cdef bint check_pending(State* pool, int32_t* holds, int32_t* floors, char* finding) noexcept nogil:
    """Holds, floors and fences are those of the plans that are pending."""
    cdef const Step* p = pool.pending.oldest
    cdef int32_t made = 0
    if check_fences(&pool.blocks, &pool.pending, finding):
        return True
    while p != NULL:
        count_holds(&p.log, &pool.blocks, p.id, holds, floors, &made)
        p = p.newer
    return compare_holds(&pool.blocks, holds, floors, made, finding)


cdef int32_t audit_room(State* pool) noexcept nogil:
    """Blocks of the largest arena, or nodes of a tree."""
    cdef int32_t k, most = pool.blocks.num_blocks
    for k in range(pool.groups.num_arenas if pool.groups != NULL else 0):
        most = max(most, pool.groups.arena[k].num_blocks)
    return max(most, pool.groups.tree.room) if has_tree(pool) else most


cdef bint find_fault(State* pool, int32_t* seen, int32_t room, char* finding) noexcept nogil:
    """`seen` has twice `room` numbers, all zero."""
    if has_cache(pool) and check_names(pool, finding):
        return True
    if pool.groups != NULL:
        return groups_check(pool.groups, &pool.pending, seen, room, finding)
    if blocks_check(&pool.blocks, seen, finding) or seqs_check(&pool.seqs, &pool.blocks, seen, finding):
        return True
    if pool.indexed and index_check(&pool.index, &pool.blocks, finding):
        return True
    memset(seen, 0, room * sizeof(int32_t))
    return check_pending(pool, seen, seen + room, finding)
