"""Layer groups: C functions on a `Groups` struct. They cannot fail where they change anything: callers judge first.

Handles and lengths are those of `Seqs`, common to all groups; every group has its own table. A `Step` is common to all
groups too (rows, tokens, lengths); what it replaced and appended stands in one more `Step` per group, so that holds,
floors and undo work as for one group, in the arena of the group. A state is a table of one entry that every step
replaces as a whole.
"""


cdef inline int64_t blocks_for(const Groups* gs, int64_t tokens) noexcept nogil:
    """Blocks of the pool that the entries for so many tokens have room for, in every group."""
    cdef int64_t size = gs.unit * gs.block_size
    return (tokens + size - 1) // size * gs.unit


cdef inline void new_version(LayerGroup* g, int32_t slot) noexcept nogil:
    g.versions += 1
    g.version[slot] = g.versions


cdef void groups_free(Groups* gs) noexcept nogil:
    cdef int32_t k
    for k in range(MAX_GROUPS):
        xfree(gs.group[k].table)
        xfree(gs.group[k].gone)
        xfree(gs.group[k].epoch)
        xfree(gs.group[k].version)
        step_free(&gs.scratch[k].step)
    step_free(&gs.rows)
    for k in range(1, gs.num_arenas):
        blocks_free(gs.arena[k])
    xfree(gs.more)
    xfree(gs)


cdef int group_init(LayerGroup* g, int32_t max_seqs) noexcept nogil:
    """Memory of a group whose numbers are there."""
    cdef int32_t slot
    g.table = <int32_t*>xcalloc(max_seqs, g.width * sizeof(int32_t))
    g.gone = <int32_t*>xcalloc(max_seqs, sizeof(int32_t))
    g.epoch = <uint32_t*>xcalloc(max_seqs, sizeof(uint32_t))
    g.version = <uint64_t*>xcalloc(max_seqs, sizeof(uint64_t))
    if g.table == NULL or g.gone == NULL or g.epoch == NULL or g.version == NULL:
        return NO_MEMORY
    if g.kind == STATE_LAYERS:
        for slot in range(max_seqs):
            g.table[slot] = NO_BLOCK
    return OK


# ---- sequences ---------------------------------------------------------------------------------------------

cdef void group_unref(LayerGroup* g, int32_t slot, int32_t first, int32_t end) noexcept nogil:
    """Release entries first .. end - 1 of a row, the last first; holes have nothing to release."""
    cdef int32_t* row = group_row(g, slot)
    cdef int32_t low = first, columns = g.columns
    if g.gone[slot]:
        low = max(first, g.gone[slot])
    if low < end:
        blocks_unref_many(g.blocks, row + <int64_t>low * columns, (end - low) * columns)
    end = min(end, g.kept)
    if g.gone[slot] and first < end:
        blocks_unref_many(g.blocks, row + <int64_t>first * columns, (end - first) * columns)


cdef void group_ref(LayerGroup* g, int32_t slot, int32_t end, int32_t times) noexcept nogil:
    """So many references more on the first `end` entries of a row."""
    cdef int32_t* row = group_row(g, slot)
    cdef int32_t low = g.gone[slot], kept = min(end, g.kept), columns = g.columns
    if low < end:
        blocks_ref_many(g.blocks, row + <int64_t>low * columns, (end - low) * columns, times)
    if low:
        blocks_ref_many(g.blocks, row, kept * columns, times)


cdef int groups_open(Groups* gs, const Ints* tokens, Verdict* v) noexcept nogil:
    """A new sequence with entries for a number of tokens."""
    cdef Seqs* s = gs.seqs
    cdef LayerGroup* g
    cdef int64_t[MAX_ARENAS] need
    cdef int64_t taken = 0, spare, blocks = blocks_for(gs, tokens.size if gs.has_entries else 0)
    cdef int32_t k, slot, n
    if tokens.data != NULL:
        return refused(v, PROMPT_IN_GROUPS, -1, tokens.size, 0, 0, 0)
    if tokens.size > gs.seq_tokens:
        return refused(v, PROMPT_TOO_LONG, -1, tokens.size, 0, gs.seq_tokens, 0)
    memset(need, 0, sizeof(need))
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind != STATE_LAYERS:
            need[g.arena] += <int64_t>entries_of(g, 0, blocks) * g.columns
    for k in range(gs.num_arenas):
        spare = s.watermark if k == 0 else 0
        if need[k] and need[k] + spare > blocks_available(gs.arena[k]):
            blocks_short(gs.arena[k], v, -1, -1, need[k], need[k] + spare - blocks_available(gs.arena[k]))
            v.value, v.low, v.arena = tokens.size, spare, k
            return v.reason
        taken += need[k]
    if s.num_free_slots == 0:
        return refused(v, OUT_OF_SEQUENCES, -1, 1, 0, s.max_seqs, s.num_open)
    slot = seq_new(s)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        n = entries_of(g, slot, blocks)
        blocks_take_many(g.blocks, group_row(g, slot), n * g.columns)
        g.gone[slot] = g.epoch[slot] = 0
        new_version(g, slot)
    s.seq[slot].num_blocks = <int32_t>blocks
    s.sum_blocks += blocks
    gs.arena[0].digest = mix(mix(mix(gs.arena[0].digest, OP_OPEN), taken), untagged(s.seq[slot].handle))
    return OK


cdef void groups_fork(Groups* gs, int32_t parent, int32_t n, int64_t* children) noexcept nogil:
    """n new sequences over the parent's filled entries. The caller has checked that there are n free slots."""
    cdef Seqs* s = gs.seqs
    cdef Blocks* b = gs.arena[0]
    cdef const Seq* p = &s.seq[parent]
    cdef LayerGroup* g
    cdef int64_t blocks = blocks_for(gs, p.kv_len), inherited = max(p.last_step, s.life[parent].fork_step)
    cdef int32_t i, k, child, entries
    b.digest = mix(mix(mix(b.digest, OP_FORK), untagged(p.handle)), n)
    for k in range(gs.num_groups if n else 0):
        g = &gs.group[k]
        group_ref(g, parent, entries_of(g, parent, blocks), n)
    for i in range(n):
        child = seq_new(s)
        s.seq[child].kv_len = p.kv_len
        s.seq[child].num_blocks = <int32_t>blocks
        if b.newest_pending and inherited >= b.oldest_pending:
            s.life[child].fork_step = inherited
            s.newest_fork_step = max(s.newest_fork_step, inherited)
        for k in range(gs.num_groups):
            g = &gs.group[k]
            entries = entries_of(g, parent, blocks)
            memcpy(group_row(g, child), group_row(g, parent), <size_t>entries * g.columns * sizeof(int32_t))
            g.gone[child] = g.gone[parent]
            g.epoch[child] = 0
            new_version(g, child)
        children[i] = s.seq[child].handle
        b.digest = mix(b.digest, untagged(children[i]))
    s.sum_tokens += n * p.kv_len
    s.sum_blocks += n * blocks


cdef void groups_close(Groups* gs, int32_t slot) noexcept nogil:
    """Release every entry, group by group, the last first."""
    cdef Seqs* s = gs.seqs
    cdef Seq* q = &s.seq[slot]
    cdef LayerGroup* g
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        group_unref(g, slot, 0, entries_of(g, slot, q.num_blocks))
        if g.kind == STATE_LAYERS:
            g.table[slot] = NO_BLOCK
    s.sum_tokens -= q.kv_len
    s.sum_blocks -= q.num_blocks
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_CLOSE), untagged(q.handle))
    seq_retire_handle(s, slot)


cdef int64_t least_length(const LayerGroup* g, int32_t slot, int64_t length) noexcept nogil:
    """The least length from this one on at which the group holds all that a query there reads."""
    cdef int64_t end = g.gone[slot] * g.block_size      # of the tokens that were let go
    if end == 0 or length < g.kept * g.block_size:
        return length
    if g.kind == WINDOW_LAYERS:
        return max(length, end + g.reach - 1)
    return max(length, (end + g.reach - 1) // g.reach * g.reach)


cdef int groups_judge_length(const Groups* gs, Py_ssize_t row, int32_t slot, int64_t length, Verdict* v) noexcept nogil:
    """Whether a sequence can go back to a length, which is not above its own."""
    cdef int64_t least = length, before = -1
    cdef int32_t k
    for k in range(gs.num_groups):
        if gs.group[k].kind == STATE_LAYERS and length != gs.seqs.seq[slot].kv_len:
            return refused(v, STATE_IS_GONE, row, length, 0, gs.seqs.seq[slot].kv_len, k)
    while least != before:
        before = least
        for k in range(gs.num_groups):
            least = least_length(&gs.group[k], slot, least)
    return OK if least == length else refused(v, WINDOW_IS_GONE, row, length, least, gs.seqs.seq[slot].kv_len, 0)


cdef void groups_truncate(Groups* gs, int32_t slot, int64_t length) noexcept nogil:
    cdef Seqs* s = gs.seqs
    cdef Seq* q = &s.seq[slot]
    cdef LayerGroup* g
    cdef int64_t blocks = blocks_for(gs, length)
    cdef int32_t k, keep, entries
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == STATE_LAYERS:
            continue
        keep = entries_of(g, slot, blocks)
        entries = entries_of(g, slot, q.num_blocks)
        if keep < entries:
            group_unref(g, slot, keep, entries)
            g.epoch[slot] += 1
            new_version(g, slot)
        if keep <= g.kept:
            g.gone[slot] = 0
    s.sum_blocks -= q.num_blocks - blocks
    s.sum_tokens -= q.kv_len - length
    q.num_blocks = <int32_t>blocks
    q.kv_len = length
    gs.arena[0].digest = mix(mix(mix(gs.arena[0].digest, OP_TRUNCATE), untagged(q.handle)), length)


# ---- a step: check -----------------------------------------------------------------------------------------

cdef int check_entries(LayerGroup* g, Step* sub, Event* event, const Seq* q, int64_t new) noexcept nogil:
    """Which ids one row replaces and how many it appends, for `new` > 0 more tokens."""
    cdef int32_t slot = slot_of(q.handle), columns = g.columns, c
    cdef const int32_t* ids = group_row(g, slot)
    cdef int64_t index = entry_at(g, q.kv_len), entries = entries_of(g, slot, q.num_blocks), offset
    cdef int64_t total = entry_at(g, q.kv_len + new + g.block_size - 1)
    cdef bint ours
    offset = q.kv_len - index * g.block_size
    while index < total and index < entries:
        ours = True
        for c in range(columns):
            ours &= writable(g.blocks, ids[index * columns + c], offset)
        if not ours:
            for c in range(columns):
                if log_replacement(sub, g.blocks, event.row, <int32_t>(index * columns + c), ids[index * columns + c],
                                   <int32_t>offset) != OK:
                    return NO_MEMORY
            event.replaced += columns
        offset = 0
        index += 1
    event.appended = <int32_t>(total - entries) * columns if total > entries else 0
    return OK


cdef int check_in_group(Groups* gs, LayerGroup* g, Step* sub, const Seq* q, int32_t row, int64_t new,
                        bint advance) noexcept nogil:
    """What one row does in one group stands in its event."""
    cdef Event* event = &sub.event[row]
    cdef int32_t slot = slot_of(q.handle)
    event.row = row
    event.q_len = event.appended = event.replaced = 0
    event.served = 1
    if new == 0 or (g.kind == STATE_LAYERS and not advance):
        return OK
    if g.kind != STATE_LAYERS:
        return check_entries(g, sub, event, q, new)
    if g.table[slot] == NO_BLOCK:
        event.appended = 1
    elif gs.pends or not writable(g.blocks, g.table[slot], 0):
        event.replaced = 1              # "one token is read": nobody writes the slot before the step passed
        return log_replacement(sub, g.blocks, row, 0, g.table[slot], 1)
    return OK


cdef int check_group_row(Groups* gs, Step* p, GroupPlan** part, int32_t row, int32_t slot, int64_t new,
                         const Limits* limits, bint advance, Verdict* v) noexcept nogil:
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef Event* event = &p.event[row]
    cdef LayerGroup* g
    cdef int64_t entries, blocks = q.num_blocks
    cdef int32_t k
    event.row = row
    event.q_len = event.appended = event.replaced = 0
    event.served = 1
    if new < 0:
        return refused(v, NEGATIVE_NEW, row, new, 0, 0, 0)
    if new > limits.seq_tokens - q.kv_len:
        return refused(v, SEQ_TOO_LONG, row, new if new > INT64_MAX - q.kv_len else q.kv_len + new, 0,
                       limits.seq_tokens, 0)
    if q.kv_len + new > blocks * gs.block_size and (advance or gs.has_entries):
        blocks = blocks_for(gs, q.kv_len + new)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if check_in_group(gs, g, &part[k].step, q, row, new, advance) != OK:
            return refused(v, NO_MEMORY, row, part[k].step.log_room, 0, 0, 0)
        if g.kind != STATE_LAYERS:
            entries = entries_of(g, slot, blocks)
            if entries > part[k].width:
                return refused(v, TABLE_TOO_WIDE, row, entries, 0, part[k].width, 0)
    event.appended = <int32_t>(blocks - q.num_blocks)
    return OK


cdef int short_arena(const Groups* gs, GroupPlan** part, int32_t row, int64_t* needed, const int64_t*
                     available) noexcept nogil:
    """Add what a row needs to what the rows before it need; the lowest arena that is short then, or -1."""
    cdef const Event* event
    cdef int32_t k
    for k in range(gs.num_groups):
        event = &part[k].step.event[row]
        needed[gs.group[k].arena] += event.replaced + event.appended
    for k in range(gs.num_arenas):
        if needed[k] > available[k]:
            return k
    return -1


cdef void skip_row(Groups* gs, Step* p, GroupPlan** part, int32_t row, int64_t* needed) noexcept nogil:
    """A row of a partial step gets nothing, in no group."""
    cdef Event* event = &p.event[row]
    cdef LayerGroup* g
    cdef int32_t k
    event.served = 0
    event.q_len = event.appended = 0
    for k in range(gs.num_groups):
        g = &gs.group[k]
        event = &part[k].step.event[row]
        needed[g.arena] -= event.replaced + event.appended
        step_undo_check(&part[k].step, g.blocks, part[k].step.log_size - event.replaced)
        event.appended = event.replaced = 0


cdef int groups_check_step(Groups* gs, Step* p, GroupPlan** part, const Ints* handles, const Ints* num_new,
                           const Limits* limits, bint advance, bint partial, Verdict* v) noexcept nogil:
    """Judge a batch in all groups. Unless it returns OK the caller must `groups_undo_check`."""
    cdef Seqs* s = gs.seqs
    cdef int64_t[MAX_ARENAS] available, needed
    cdef int64_t new, asked = 0, unserved = 0
    cdef int32_t i, k, slot, rows = <int32_t>handles.size, short_row = -1, arena = -1, lacking
    cdef int status
    memset(needed, 0, sizeof(needed))
    for k in range(gs.num_arenas):
        available[k] = blocks_available(gs.arena[k])
    for k in range(gs.num_groups):
        part[k].step.num_rows = part[k].step.num_events = rows
        part[k].step.log_size = 0
    p.num_rows = p.num_events = rows
    p.log_size = 0
    for i in range(rows):
        slot = seq_judge(s, ints_at(handles, i), i, v)
        if slot < 0:
            return v.reason
        if s.seq[slot].mark == s.stamp:
            return refused(v, DUPLICATE_HANDLE, i, ints_at(handles, i), 0, 0, 0)
        s.seq[slot].mark = s.stamp
        new = ints_at(num_new, i)
        status = check_group_row(gs, p, part, i, slot, new, limits, advance, v)
        if status != OK:
            return status
        if advance:
            if new > limits.max_tokens - asked:
                return refused(v, TOO_MANY_TOKENS, i, asked + new, 0, limits.max_tokens, 0)
            asked += new
            p.event[i].q_len = <int32_t>new
        lacking = short_arena(gs, part, i, needed, available)
        if lacking >= 0 and short_row < 0:
            short_row = i
            arena = lacking
        if lacking >= 0 and partial:
            skip_row(gs, p, part, i, needed)
            unserved += new if advance else 0
    p.num_tokens = asked - unserved
    if short_row >= 0 and not partial:
        blocks_short(gs.arena[arena], v, short_row, ints_at(handles, short_row), needed[arena],
                     needed[arena] - available[arena])
        v.arena = arena
        return v.reason
    return OK


cdef void groups_undo_check(Groups* gs, GroupPlan** part) noexcept nogil:
    cdef int32_t k
    for k in range(gs.num_groups):
        step_undo_check(&part[k].step, gs.group[k].blocks, 0)


# ---- a step: commit ----------------------------------------------------------------------------------------

cdef void commit_group(Groups* gs, LayerGroup* g, Step* sub, const Step* p) noexcept nogil:
    """Take the blocks of all rows in one group: in a row replacements by ascending index, then the new entries."""
    cdef Blocks* b = g.blocks
    cdef uint64_t digest = gs.arena[0].digest
    cdef int32_t* ids
    cdef Replaced* log = sub.log
    cdef const Event* event
    cdef int64_t at
    cdef int32_t i, k, slot
    sub.id = p.id
    sub.handle = p.handle
    sub.num_copies = 0
    for i in range(p.num_rows):
        event = &sub.event[i]
        slot = slot_of(p.handle[i])
        ids = group_row(g, slot)
        for k in range(event.replaced):
            log[k].new = blocks_take(b)
            b.fence[log[k].new] = p.id if gs.pends else 0
            ids[log[k].index] = log[k].new
            if log[k].tokens and g.kind != STATE_LAYERS:
                sub.copies[3 * <int64_t>sub.num_copies] = log[k].old
                sub.copies[3 * <int64_t>sub.num_copies + 1] = log[k].new
                sub.copies[3 * <int64_t>sub.num_copies + 2] = log[k].tokens
                sub.num_copies += 1
                b.cow_copies += 1
                b.cow_tokens += log[k].tokens
            digest = mix(digest, (<uint64_t>log[k].index << 32) | <uint32_t>log[k].new)
        g.epoch[slot] += event.replaced > 0
        at = <int64_t>entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns
        blocks_take_many(b, ids + at, event.appended)
        for k in range(event.appended):
            digest = mix(digest, ids[at + k])
        if event.replaced or event.appended:
            new_version(g, slot)
        log += event.replaced
    gs.arena[0].digest = digest


cdef void groups_commit(Groups* gs, Step* p, GroupPlan** part, const int64_t* handles, bint advance) noexcept nogil:
    """Carry out a batch that groups_check_step accepted."""
    cdef Seqs* s = gs.seqs
    cdef Blocks* b = gs.arena[0]
    cdef const Event* event
    cdef int32_t i, k
    cdef Seq* q
    p.num_copies = 0
    p.uniform = advance
    b.digest = mix(mix(b.digest, OP_STEP if advance else OP_RESERVE), p.num_rows)
    memmove(p.handle, handles, p.num_rows * sizeof(int64_t))    # the batch may be a part of the plan's own array
    for k in range(gs.num_groups):
        commit_group(gs, &gs.group[k], &part[k].step, p)
    for i in range(p.num_rows):
        event = &p.event[i]
        q = &s.seq[slot_of(p.handle[i])]
        q.num_blocks += event.appended
        q.kv_len += event.q_len
        s.sum_blocks += event.appended
        p.uniform &= event.q_len == 1
        p.length[i] = q.kv_len
        p.prev_step[i] = q.last_step
        q.last_step = p.id if gs.pends else 0
        b.digest = mix(b.digest, (<uint64_t>event.q_len << 1) | event.served)
        b.digest = mix(b.digest, <uint64_t>untagged(p.handle[i]) ^ (<uint64_t>q.kv_len << 20))
    s.sum_tokens += p.num_tokens


cdef void groups_pend(Groups* gs, GroupPlan** part, int64_t id) noexcept nogil:
    """The step is the newest pending one in every group."""
    cdef int32_t k
    for k in range(gs.num_groups):
        part[k].step.id = id
        pending_add(&gs.group[k].pending, &part[k].step, gs.group[k].blocks)


# ---- how a step ends ---------------------------------------------------------------------------------------

cdef void let_go(LayerGroup* g, int32_t slot, int64_t position) noexcept nogil:
    """Release the entries that no query at `position` or later reads."""
    cdef int64_t end = 0, index
    cdef int32_t* ids = group_row(g, slot)
    cdef int32_t first = max(g.kept, g.gone[slot])
    if position < (first + <int64_t>1) * g.block_size:      # whatever the group reads
        return
    if g.kind == WINDOW_LAYERS and position >= g.reach:
        end = entry_at(g, position - g.reach + 1)
    elif g.kind == CHUNK_LAYERS:
        end = entry_at(g, position // g.reach * g.reach)
    if end <= first:
        return
    for index in range(first * <int64_t>g.columns, end * g.columns):
        blocks_unref(g.blocks, ids[index])
        ids[index] = g.hole
    g.gone[slot] = <int32_t>end
    g.epoch[slot] += 1
    new_version(g, slot)


cdef void groups_release(Groups* gs, Step* p, GroupPlan** part) noexcept nogil:
    """The step was executed: let go of what it read last, then of what no later query of its rows reads."""
    cdef int32_t i, k, slot
    for k in range(gs.num_groups):
        step_release_holds(&part[k].step, gs.group[k].blocks)
    for i in range(p.num_rows):
        slot = seq_find(gs.seqs, p.handle[i])
        for k in range(gs.num_groups if slot >= 0 else 0):
            let_go(&gs.group[k], slot, p.length[i] - gs.lookahead)


cdef void groups_pass(Groups* gs, Step* p) noexcept nogil:
    """The oldest pending step has passed; it is off the list of the pool already."""
    cdef GroupPlan** part = <GroupPlan**>p.parts
    cdef int32_t k
    for k in range(gs.num_groups):
        pending_remove(&gs.group[k].pending, &part[k].step, gs.group[k].blocks)
    groups_release(gs, p, part)
    for k in range(gs.num_groups):
        pending_settle(&gs.group[k].pending, &part[k].step, gs.group[k].blocks)


cdef void rollback_group(LayerGroup* g, Step* sub, const Seqs* s) noexcept nogil:
    """Undo the newest step in one group; the sequences have their lengths of before already."""
    cdef Blocks* b = g.blocks
    cdef const Event* event
    cdef const Replaced* log
    cdef int32_t* ids
    cdef int64_t at
    cdef int32_t i, k, slot, log_at = sub.log_size
    for i in range(sub.num_rows - 1, -1, -1):
        event = &sub.event[i]
        log_at -= event.replaced
        log = sub.log + log_at
        slot = seq_find(s, sub.handle[i])
        if slot < 0:
            for k in range(event.replaced - 1, -1, -1):
                b.block[log[k].old].hold -= 1
                blocks_settle(b, log[k].old)
                if b.block[log[k].new].place == USED:       # somebody else has a reference
                    give_up_copy(b, log[k].new)
            continue
        ids = group_row(g, slot)
        at = 0 if g.kind == STATE_LAYERS else <int64_t>entries_of(g, slot, s.seq[slot].num_blocks) * g.columns
        blocks_unref_many(b, ids + at, event.appended)
        if g.kind == STATE_LAYERS and event.appended:
            ids[0] = NO_BLOCK
        for k in range(event.replaced - 1, -1, -1):
            ids[log[k].index] = log[k].old
            b.block[log[k].old].hold -= 1
            blocks_ref(b, log[k].old, 1)
            give_up_copy(b, log[k].new)
            blocks_unref(b, log[k].new)
        if event.replaced or event.appended:
            g.epoch[slot] += 1
            new_version(g, slot)


cdef void groups_rollback(Groups* gs, Step* p) noexcept nogil:
    """Undo the newest step, which is off the list of the pool already: the last group first."""
    cdef GroupPlan** part = <GroupPlan**>p.parts
    cdef Seqs* s = gs.seqs
    cdef LayerGroup* g
    cdef int32_t i, k, slot
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_ROLLBACK), p.num_rows)
    for k in range(gs.num_groups):
        pending_remove(&gs.group[k].pending, &part[k].step, gs.group[k].blocks)
    for k in range(gs.num_arenas):
        blocks_lower_fences(gs.arena[k])
    for i in range(p.num_rows - 1, -1, -1):
        slot = seq_find(s, p.handle[i])
        if slot >= 0:
            s.seq[slot].last_step = p.prev_step[i]
            s.seq[slot].kv_len -= p.event[i].q_len
            s.seq[slot].num_blocks -= p.event[i].appended
            s.sum_tokens -= p.event[i].q_len
            s.sum_blocks -= p.event[i].appended
    for k in range(gs.num_groups - 1, -1, -1):
        g = &gs.group[k]
        rollback_group(g, &part[k].step, s)
        wire_forget(&part[k].wire, p.num_rows, False, False)
    for k in range(gs.num_groups):
        pending_settle(&gs.group[k].pending, &part[k].step, gs.group[k].blocks)


cdef void groups_end(Groups* gs, Step* p) noexcept nogil:
    """A pending step of a pool that is reset: nothing of it is undone."""
    cdef GroupPlan** part = <GroupPlan**>p.parts
    cdef int32_t k
    for k in range(gs.num_groups):
        set_flag(&part[k].step.pending, False)
        part[k].step.log_size = 0
        wire_forget(&part[k].wire, p.num_rows, False, False)


cdef void groups_reset(Groups* gs) noexcept nogil:
    """Make all arenas and tables as they were when they were new."""
    cdef int32_t k, slot
    for k in range(1, gs.num_arenas):
        blocks_reset(gs.arena[k])
    for k in range(gs.num_groups):
        memset(&gs.group[k].pending, 0, sizeof(Pending))
        for slot in range(gs.seqs.max_seqs if gs.group[k].kind == STATE_LAYERS else 0):
            gs.group[k].table[slot] = NO_BLOCK


# ---- arrays ------------------------------------------------------------------------------------------------

cdef void emit_states(const LayerGroup* g, GroupPlan* out, const Step* p, int32_t pad_rows) noexcept nogil:
    """state_src and state_dst of a step; rows without new tokens have neither."""
    cdef const Event* event
    cdef int32_t i, at = 0
    for i in range(p.num_rows):
        event = &out.step.event[i]
        out.state_src[i] = out.state_dst[i] = NO_BLOCK
        if p.event[i].q_len:
            out.state_dst[i] = g.table[slot_of(p.handle[i])]
            if event.replaced:
                out.state_src[i] = out.step.log[at].old
            elif not event.appended:
                out.state_src[i] = out.state_dst[i]
        at += event.replaced
    for i in range(p.num_rows, pad_rows):
        out.state_src[i] = out.state_dst[i] = NO_BLOCK


cdef void emit_slots(const LayerGroup* g, GroupPlan* out, const Step* p) noexcept nogil:
    """slot_mapping: where each new token goes, one row of all tokens per column."""
    cdef int32_t* slots
    cdef const int32_t* ids
    cdef int64_t position, index, t
    cdef int32_t i, c
    for c in range(g.columns):
        slots = out.slot_mapping + c * out.shown_tokens
        t = 0
        for i in range(p.num_rows):
            ids = group_row(g, slot_of(p.handle[i]))
            for position in range(p.length[i] - p.event[i].q_len, p.length[i]):
                index = entry_at(g, position)
                slots[t] = <int32_t>(ids[index * g.columns + c] * g.block_size + position - index * g.block_size)
                t += 1
        for t in range(p.num_tokens, out.shown_tokens):
            slots[t] = -1


cdef void groups_emit(const Groups* gs, const Step* p, GroupPlan** part, int32_t pad_rows, int64_t
                      pad_tokens) noexcept nogil:
    """Write a committed step into the arrays of every group."""
    cdef const LayerGroup* g
    cdef const Seq* q
    cdef GroupPlan* out
    cdef int32_t i, k, slot
    for k in range(gs.num_groups):
        g = &gs.group[k]
        out = part[k]
        out.shown_rows = max(p.num_rows, pad_rows)
        out.shown_tokens = max(p.num_tokens, pad_tokens)
        out.wire.num_dirty = 0
        if g.kind == STATE_LAYERS:
            emit_states(g, out, p, pad_rows)
            continue
        for i in range(p.num_rows):
            slot = slot_of(p.handle[i])
            q = &gs.seqs.seq[slot]
            out.kv_starts[i] = <int32_t>(g.gone[slot] * g.block_size)
            if out.wire.tracks and out.wire.seen[i] != g.version[slot]:
                show_row(&out.wire, i, q.handle, g.epoch[slot], g.version[slot], group_row(g, slot),
                         entries_of(g, slot, q.num_blocks) * g.columns)
        for i in range(p.num_rows, pad_rows):
            out.kv_starts[i] = 0
            pad_row(&out.wire, i)
        if out.slot_mapping != NULL:
            emit_slots(g, out, p)


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t groups_fingerprint(const Groups* gs, uint64_t h, int64_t next_step) noexcept nogil:
    """Hash of what the groups have beside arena 0 and the sequences."""
    cdef const LayerGroup* g
    cdef const Step* p
    cdef int32_t k, slot
    cdef int64_t i
    h = mix(mix(h, gs.num_groups), gs.lookahead)
    for k in range(1, gs.num_arenas):
        h = blocks_fingerprint(gs.arena[k], h, next_step)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        h = mix(mix(mix(h, g.kind), g.reach), (<uint64_t>g.columns << 32) | <uint32_t>g.kept)
        h = mix(mix(h, g.arena), g.block_size)
        for slot in range(gs.seqs.max_seqs):
            if gs.seqs.life[slot].life != OPEN:
                continue
            h = mix(mix(h, g.gone[slot]), g.epoch[slot])
            for i in range(<int64_t>entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns):
                h = mix(h, group_row(g, slot)[i])
        p = g.pending.oldest
        while p != NULL:
            h = step_fingerprint(p, h, next_step)
            p = p.newer
    return h


cdef bint check_holes(const LayerGroup* g, int32_t slot, const Seq* q, char* finding) noexcept nogil:
    """A row has no more holes than its length allows, and a state iff it has tokens."""
    cdef int64_t least = 0
    if g.kind == STATE_LAYERS:
        if (g.table[slot] != NO_BLOCK) != (q.kv_len > 0):
            return snprintf(finding, FINDING, b"sequence in slot %d has %lld tokens and state slot %d", slot,
                            <long long>q.kv_len, g.table[slot]) > 0
        return False
    if g.kind == WINDOW_LAYERS:
        least = q.kv_len - g.reach + 1
    elif g.kind == CHUNK_LAYERS:
        least = q.kv_len // g.reach * g.reach
    if g.gone[slot] and not (g.kept < g.gone[slot] and g.gone[slot] * g.block_size <= least):
        return snprintf(finding, FINDING, b"sequence in slot %d let go of entries up to %d, it reads from %lld on",
                        slot, g.gone[slot], <long long>least) > 0
    return False


cdef bint check_group(const Groups* gs, const LayerGroup* g, int32_t* references, char* finding) noexcept nogil:
    """The rows of one group; `references` counts what they name."""
    cdef const Blocks* b = g.blocks
    cdef const Seq* q
    cdef const int32_t* ids
    cdef int64_t i
    cdef int32_t slot, index
    for slot in range(gs.seqs.max_seqs):
        if gs.seqs.life[slot].life != OPEN:
            continue
        q = &gs.seqs.seq[slot]
        if check_holes(g, slot, q, finding):
            return True
        ids = group_row(g, slot)
        for i in range(<int64_t>entries_of(g, slot, q.num_blocks) * g.columns):
            index = <int32_t>(i // g.columns)
            if g.kept <= index < g.gone[slot]:
                if ids[i] != g.hole:
                    return snprintf(finding, FINDING, b"sequence in slot %d has block %d in entry %d, which was let go",
                                    slot, ids[i], index) > 0
                continue
            if ids[i] < b.reserved or ids[i] >= b.num_blocks:
                return snprintf(finding, FINDING, b"sequence in slot %d has block %d in its table of arena %d", slot,
                                ids[i], g.arena) > 0
            references[ids[i]] += 1
    return False


cdef bint check_lengths(const Groups* gs, char* finding) noexcept nogil:
    """Handles, lengths and counters, which all groups share."""
    cdef const Seqs* s = gs.seqs
    cdef const Seq* q
    cdef int64_t tokens = 0, blocks = 0
    cdef int32_t slot, num_open = 0, retired = 0
    for slot in range(s.max_seqs):
        q = &s.seq[slot]
        num_open += s.life[slot].life == OPEN
        retired += s.life[slot].life == RETIRED
        if (s.life[slot].life == OPEN) != (q.handle >= 0):
            return snprintf(finding, FINDING, b"slot %d has life %d and handle %lld", slot, <int>s.life[slot].life,
                            <long long>q.handle) > 0
        if s.life[slot].life != OPEN:
            continue
        if not 0 <= q.kv_len <= q.num_blocks * gs.block_size or q.num_blocks % gs.unit or (
                q.num_blocks > blocks_for(gs, gs.seq_tokens)):
            return snprintf(finding, FINDING, b"sequence in slot %d has %lld tokens in %d blocks", slot,
                            <long long>q.kv_len, q.num_blocks) > 0
        tokens += q.kv_len
        blocks += q.num_blocks
    if tokens != s.sum_tokens or blocks != s.sum_blocks:
        return snprintf(finding, FINDING, b"counted %lld tokens in %lld blocks, the counters say %lld and %lld",
                        <long long>tokens, <long long>blocks, <long long>s.sum_tokens, <long long>s.sum_blocks) > 0
    return check_free_slots(s, num_open, retired, finding)


cdef bint groups_check(const Groups* gs, const Pending* pending, int32_t* seen, int32_t room, char*
                       finding) noexcept nogil:
    """Whether an invariant of the groups does not hold; the first one, in words.

    `seen` has two numbers for each of `room` blocks, as many as the largest arena has, all zero.
    """
    cdef const Blocks* b
    cdef const LayerGroup* g
    cdef int32_t a, k, made
    if check_lengths(gs, finding):
        return True
    for a in range(gs.num_arenas):
        b = gs.arena[a]
        if blocks_check(b, seen, finding):
            return True
        made = 0
        for k in range(gs.num_groups):
            if gs.group[k].arena == a and check_group(gs, &gs.group[k], seen, finding):
                return True
        if check_references(b, seen, finding):
            return True
        memset(seen, 0, 2 * <size_t>room * sizeof(int32_t))
        for k in range(gs.num_groups):
            g = &gs.group[k]
            if g.arena == a and count_holds(b, &g.pending, seen, seen + room, &made, finding):
                return True
            if g.pending.size != pending.size:
                return snprintf(finding, FINDING, b"%d steps are pending in group %d, %d in the pool",
                                g.pending.size, k, pending.size) > 0
        if compare_holds(b, seen, seen + room, made, finding):
            return True
        memset(seen, 0, 2 * <size_t>room * sizeof(int32_t))
    return False
