"""Layer groups: C functions on a `Groups` struct. They cannot fail where they change anything: callers judge first.

Handles and lengths are those of `Seqs`, common to all groups; every group has its own table. A `Step` is common to all
groups too (rows, tokens, lengths); what it did to tables stands in one `StepPart` per group: a `Change` for each row
whose table changed, and a `Log`, with which holds, floors and undo work as for one table, in the arena of the group.
A row that puts one token into tails that only it uses has neither an event nor a change. A state is a table of one
entry that every step replaces as a whole.
"""


cdef inline int64_t blocks_for(const Groups* gs, int64_t tokens) noexcept nogil:
    """Blocks of the pool that the entries for so many tokens have room for, in every group."""
    cdef int64_t size = gs.unit * gs.block_size
    return (tokens + size - 1) // size * gs.unit


cdef inline void new_version(LayerGroup* g, int32_t slot) noexcept nogil:
    g.versions += 1
    g.seq[slot].version = g.versions


cdef void groups_free(Groups* gs) noexcept nogil:
    cdef int32_t k
    for k in range(MAX_GROUPS):
        xfree(gs.group[k].table)
        xfree(gs.group[k].seq)
        part_free(&gs.scratch[k])
    for k in range(1, gs.num_arenas):
        blocks_free(gs.arena[k])
    if gs.tree != NULL:
        tree_free(gs.tree)
    xfree(gs.more)
    xfree(gs)


cdef int group_init(LayerGroup* g, int32_t max_seqs) noexcept nogil:
    """Memory of a group whose numbers are there."""
    cdef int32_t slot
    g.table = <int32_t*>xcalloc(max_seqs, g.width * sizeof(int32_t))
    g.seq = <GroupSeq*>xcalloc(max_seqs, sizeof(GroupSeq))
    if g.table == NULL or g.seq == NULL:
        return NO_MEMORY
    if g.kind == STATE_LAYERS:
        for slot in range(max_seqs):
            g.table[slot] = NO_BLOCK
    return OK


cdef int part_init(StepPart* part, int32_t max_rows) noexcept nogil:
    """What a step does to so many rows of a group."""
    part.max_rows = max_rows
    part.change = <Change*>xcalloc(max_rows, sizeof(Change))
    return OK if log_init(&part.log) == OK and part.change != NULL else NO_MEMORY


cdef void part_free(StepPart* part) noexcept nogil:
    xfree(part.change)
    xfree(part.log.entry)
    part.change = NULL
    part.log.entry = NULL


cdef inline StepPart** parts_of(const Step* p) noexcept nogil:
    return <StepPart**>p.parts


# ---- sequences ---------------------------------------------------------------------------------------------

cdef void group_unref(LayerGroup* g, int32_t slot, int32_t first, int32_t end) noexcept nogil:
    """Release entries first .. end - 1 of a row, the last first; holes have nothing to release."""
    cdef int32_t* row = group_row(g, slot)
    cdef int32_t gone = g.seq[slot].gone, low = max(first, gone), columns = g.columns
    if low < end:
        blocks_unref_many(g.blocks, row + <int64_t>low * columns, (end - low) * columns)
    end = min(end, g.kept)
    if gone and first < end:
        blocks_unref_many(g.blocks, row + <int64_t>first * columns, (end - first) * columns)


cdef void group_ref(LayerGroup* g, int32_t slot, int32_t end, int32_t times) noexcept nogil:
    """So many references more on the first `end` entries of a row."""
    cdef int32_t* row = group_row(g, slot)
    cdef int32_t low = g.seq[slot].gone, kept = min(end, g.kept), columns = g.columns
    blocks_ref_many(g.blocks, row + <int64_t>low * columns, (end - low) * columns, times)
    if low:
        blocks_ref_many(g.blocks, row, kept * columns, times)


cdef int groups_open(Groups* gs, const Ints* tokens, bint asked, Verdict* v) noexcept nogil:
    """A new sequence with entries for a number of tokens. `asked`: see `pool_open`."""
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
            need[g.arena] += <int64_t>entries_for(g, blocks) * g.columns
    for k in range(gs.num_arenas):
        spare = s.watermark if k == 0 else 0
        if need[k] and need[k] + spare > blocks_available(gs.arena[k]):
            blocks_short(gs.arena[k], v, k, -1, -1, need[k], need[k] + spare - blocks_available(gs.arena[k]))
            v.value, v.low = tokens.size, spare
            return v.reason
        taken += need[k]
    if s.num_free_slots == 0:
        return refused(v, OUT_OF_SEQUENCES, -1, 1, 0, s.max_seqs, s.num_open)
    if asked:
        return OK
    slot = seq_new(s)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        g.seq[slot].evicted = 0
        n = entries_of(g, slot, blocks)
        blocks_take_many(g.blocks, group_row(g, slot), n * g.columns)
        g.seq[slot].epoch = 0
        set_gone(g, slot, 0)
        new_version(g, slot)
    s.seq[slot].num_blocks = <int32_t>blocks
    s.sum_blocks += blocks
    gs.arena[0].digest = mix(mix(mix(gs.arena[0].digest, OP_OPEN), taken), untagged(s, s.seq[slot].handle))
    return OK


cdef void groups_fork(Groups* gs, int32_t parent, int32_t n, int64_t* children) noexcept nogil:
    """n new sequences over the parent's filled entries. The caller has checked that there are n free slots."""
    cdef Seqs* s = gs.seqs
    cdef Blocks* b = gs.arena[0]
    cdef const Seq* p = &s.seq[parent]
    cdef LayerGroup* g
    cdef int64_t blocks = blocks_for(gs, p.kv_len), inherited = max(p.last_step, s.life[parent].fork_step)
    cdef int32_t i, k, child, entries
    b.digest = mix(mix(mix(b.digest, OP_FORK), untagged(s, p.handle)), n)
    for k in range(gs.num_groups if n else 0):
        g = &gs.group[k]
        group_ref(g, parent, entries_of(g, parent, blocks), n)
    for i in range(n):
        child = seq_new(s)
        s.seq[child].kv_len = p.kv_len
        s.seq[child].num_blocks = <int32_t>blocks
        s.life[child].point = s.life[parent].point
        if b.newest_pending and inherited >= b.oldest_pending:
            s.life[child].fork_step = inherited
            s.newest_fork_step = max(s.newest_fork_step, inherited)
        for k in range(gs.num_groups):
            g = &gs.group[k]
            entries = entries_of(g, parent, blocks)
            memcpy(group_row(g, child), group_row(g, parent), <size_t>entries * g.columns * sizeof(int32_t))
            g.seq[child] = g.seq[parent]
            g.seq[child].epoch = 0
            new_version(g, child)
        if gs.tree != NULL:
            tree_fork(gs, parent, child)
        children[i] = s.seq[child].handle
        b.digest = mix(b.digest, untagged(s, children[i]))
    s.sum_tokens += n * p.kv_len
    s.sum_blocks += n * blocks


cdef void groups_empty(Groups* gs, int32_t slot) noexcept nogil:
    """Release every entry of a sequence that was loaded in vain, as if it had been opened without blocks."""
    cdef Seq* q = &gs.seqs.seq[slot]
    cdef LayerGroup* g
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        group_unref(g, slot, 0, entries_of(g, slot, q.num_blocks))
        if g.kind == STATE_LAYERS:
            g.table[slot] = NO_BLOCK
        g.seq[slot].epoch += 1
        set_gone(g, slot, 0)
        new_version(g, slot)
    gs.seqs.sum_blocks -= q.num_blocks
    gs.seqs.sum_tokens -= q.kv_len
    q.num_blocks = 0
    q.kv_len = 0


cdef void groups_close(Groups* gs, int32_t slot) noexcept nogil:
    """Release every entry, group by group, the last first."""
    cdef Seqs* s = gs.seqs
    cdef Seq* q = &s.seq[slot]
    cdef LayerGroup* g
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        group_unref(g, slot, 0, entries_of(g, slot, q.num_blocks))
    if gs.tree != NULL:
        tree_close(gs, slot)
    for k in range(gs.num_groups):
        if gs.group[k].kind == STATE_LAYERS:
            gs.group[k].table[slot] = NO_BLOCK
    s.sum_tokens -= q.kv_len
    s.sum_blocks -= q.num_blocks
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_CLOSE), untagged(s, q.handle))
    seq_retire_handle(s, slot)


cdef int64_t least_length(const LayerGroup* g, int32_t slot, int64_t length) noexcept nogil:
    """The least length from this one on at which the group holds all that a query there reads."""
    cdef int64_t end = g.seq[slot].gone * g.block_size      # of the tokens that were let go
    if end == 0 or length < g.kept * g.block_size:
        return length
    if g.kind == WINDOW_LAYERS:
        return max(length, end + g.reach - 1)
    return max(length, (end + g.reach - 1) // g.reach * g.reach)


cdef int groups_judge_length(const Groups* gs, Py_ssize_t row, int32_t slot, int64_t length, Verdict* v) noexcept nogil:
    """Whether a sequence can go back to a length, which is not above its own."""
    cdef int64_t least = length, before = -1
    cdef int32_t k, first = -1
    for k in range(gs.num_groups):
        if gs.group[k].kind == STATE_LAYERS and length != gs.seqs.seq[slot].kv_len:
            return refused(v, STATE_IS_GONE, row, length, 0, gs.seqs.seq[slot].kv_len, k)
    while least != before:
        before = least
        for k in range(gs.num_groups):
            least = least_length(&gs.group[k], slot, least)
            if least != length and first < 0:
                first = k
    return OK if first < 0 else refused(v, WINDOW_IS_GONE, row, length, least, gs.seqs.seq[slot].kv_len, first)


cdef void groups_truncate(Groups* gs, int32_t slot, int64_t length) noexcept nogil:
    cdef Seqs* s = gs.seqs
    cdef Seq* q = &s.seq[slot]
    cdef LayerGroup* g
    cdef int64_t blocks = blocks_for(gs, length)
    cdef int32_t k, keep, entries
    if gs.tree != NULL:
        tree_truncate(gs, slot, length)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        keep = entries_of(g, slot, blocks)      # of a state: it stays, the length is the same
        entries = entries_of(g, slot, q.num_blocks)
        if keep < entries:
            group_unref(g, slot, keep, entries)
            g.seq[slot].epoch += 1
            new_version(g, slot)
        if keep <= g.kept:
            set_gone(g, slot, 0)
    s.sum_blocks -= q.num_blocks - blocks
    s.sum_tokens -= q.kv_len - length
    q.num_blocks = <int32_t>blocks
    q.kv_len = length
    gs.arena[0].digest = mix(mix(mix(gs.arena[0].digest, OP_TRUNCATE), untagged(s, q.handle)), length)


# ---- a step: check -----------------------------------------------------------------------------------------

cdef inline bint owns_tail(const LayerGroup* g, int32_t slot, int64_t position) noexcept nogil:
    """Whether the token at a position, for which there is room, goes into blocks that nobody else refers to."""
    cdef const int32_t* ids = group_row(g, slot) + entry_at(g, held_of(g, slot, position)) * g.columns
    cdef const Block* block
    cdef int32_t c
    for c in range(g.columns):
        block = &g.blocks.block[ids[c]]
        if (block.refcount ^ 1) | block.hold | block.committed:
            return False
    return True


cdef inline bint has_slot(const Groups* gs, const int64_t* needed, const int64_t* available) noexcept nogil:
    """Whether every state group has a slot for one row more."""
    cdef int32_t k
    for k in range(gs.num_groups):
        if gs.group[k].kind == STATE_LAYERS and needed[gs.group[k].arena] >= available[gs.group[k].arena]:
            return False
    return True


cdef int move_states(Groups* gs, StepPart** part, int32_t row, int32_t slot, int64_t* needed) noexcept nogil:
    """Each state of a row goes to another slot."""
    cdef LayerGroup* g
    cdef Change* change
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == STATE_LAYERS:
            change = &part[k].change[part[k].num_changes]
            change.row = row
            change.replaced = 1
            change.appended = 0
            if log_replacement(&part[k].log, g.blocks, row, 0, g.table[slot], 0) != OK:
                return NO_MEMORY
            part[k].num_changes += 1
            needed[g.arena] += 1
    return OK


cdef int32_t check_steady(Groups* gs, StepPart** part, const int64_t* handle, int32_t first, int32_t end, int64_t
                          seq_tokens, int64_t num_blocks, int64_t* needed, const int64_t* available) noexcept nogil:
    """Return the first row from `first` on that does more than put a token into its own tails, and move its states.

    Mark those before it. A table has room for `num_blocks` blocks of the pool. -1: no memory.
    """
    cdef Seq* seq = gs.seqs.seq
    cdef uint32_t stamp = gs.seqs.stamp
    cdef int64_t bs = gs.block_size
    cdef int32_t k, slot, max_seqs = gs.seqs.max_seqs, num_groups = gs.num_groups
    cdef bint moves = gs.has_states and gs.pends
    cdef const LayerGroup* g
    cdef Seq* q
    while first < end:
        slot = slot_of(handle[first])
        if slot >= max_seqs:
            return first
        q = &seq[slot]
        if q.handle != handle[first] or q.mark == stamp or q.num_blocks > num_blocks or q.kv_len >= seq_tokens or (
                q.kv_len >= q.num_blocks * bs) or (gs.has_states and q.kv_len == 0):
            return first
        for k in range(num_groups):
            g = &gs.group[k]
            if not (moves and g.kind == STATE_LAYERS) and not owns_tail(g, slot, q.kv_len):
                return first
        if moves:
            if not has_slot(gs, needed, available):
                return first
            if move_states(gs, part, first, slot, needed) != OK:
                return -1
        q.mark = stamp
        first += 1
    return first


cdef int32_t check_in_group(const Groups* gs, LayerGroup* g, StepPart* part, const Seq* q, int32_t row, int64_t new,
                            int64_t blocks, bint advance) noexcept nogil:
    """What `new` > 0 more tokens of one row do in one group stands in a change; returns the ids that are needed.

    `blocks` of the pool are what the sequence has room for then. -1: no memory.
    """
    cdef Change* change = &part.change[part.num_changes]
    cdef int32_t slot = slot_of(q.handle)
    cdef int64_t index, entries, held
    change.row = row
    change.replaced = change.appended = 0
    if g.kind != STATE_LAYERS:
        held = held_of(g, slot, q.kv_len)
        index = entry_at(g, held)
        entries = entries_of(g, slot, q.num_blocks)
        change.replaced = note_copies(&part.log, g.blocks, row, group_row(g, slot), g.columns, index,
                                     min(entry_at(g, held + new + g.block_size - 1), entries),
                                     held - index * g.block_size)
        change.appended = <int32_t>(entries_of(g, slot, blocks) - entries) * g.columns
    elif not advance:
        return 0
    elif g.table[slot] == NO_BLOCK:
        change.appended = 1
    elif gs.pends or not owns_tail(g, slot, q.kv_len):
        change.replaced = 1
        if log_replacement(&part.log, g.blocks, row, 0, g.table[slot], 0) != OK:
            return -1
    if change.replaced < 0:
        return -1
    part.num_changes += change.replaced + change.appended != 0
    return change.replaced + change.appended


cdef int check_group_row(Groups* gs, Step* p, StepPart** part, int32_t row, int32_t slot, int64_t new,
                         const Limits* limits, bint advance, int64_t* needed, Verdict* v) noexcept nogil:
    """Judge a row that may do more than a steady one. Its event and its changes record what will happen to it."""
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef Event* event = &p.event[p.num_events]
    cdef LayerGroup* g
    cdef int64_t entries, blocks = q.num_blocks
    cdef int32_t k, ids
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
        ids = check_in_group(gs, g, part[k], q, row, new, blocks, advance) if new else 0
        if ids < 0:
            return refused(v, NO_MEMORY, row, part[k].log.room, 0, 0, 0)
        needed[g.arena] += ids
        if g.kind != STATE_LAYERS:
            entries = entries_of(g, slot, blocks)
            if entries > part[k].width:
                return refused(v, TABLE_TOO_WIDE, row, entries, 0, part[k].width, 0)
    event.appended = <int32_t>(blocks - q.num_blocks)
    p.num_events += 1
    return OK


cdef inline int short_arena(const Groups* gs, const int64_t* needed, const int64_t* available) noexcept nogil:
    """The lowest arena that is short, or -1."""
    cdef int k
    for k in range(gs.num_arenas):
        if needed[k] > available[k]:
            return k
    return -1


cdef void skip_row(Groups* gs, Step* p, StepPart** part, int64_t* needed) noexcept nogil:
    """The last row that was checked gets nothing, in no group."""
    cdef Event* event = &p.event[p.num_events - 1]
    cdef const Change* change
    cdef int32_t k
    event.served = 0
    event.q_len = event.appended = 0
    for k in range(gs.num_groups):
        if part[k].num_changes == 0:
            continue
        change = &part[k].change[part[k].num_changes - 1]
        if change.row == event.row:
            needed[gs.group[k].arena] -= change.replaced + change.appended
            log_undo(&part[k].log, gs.group[k].blocks, part[k].log.size - change.replaced)
            part[k].num_changes -= 1


cdef int64_t most_blocks(const Groups* gs, StepPart** part) noexcept nogil:
    """Blocks of the pool of a sequence that the tables of a plan have room for in all groups."""
    cdef int64_t most = INT64_MAX
    cdef int32_t k
    for k in range(gs.num_groups):
        if gs.group[k].kind != STATE_LAYERS:
            most = min(most, <int64_t>part[k].width << gs.group[k].scale)
    return most


cdef int groups_check_step(Groups* gs, Step* p, StepPart** part, const Ints* handles, const Ints* num_new,
                           const Limits* limits, bint advance, bint partial, Verdict* v) noexcept nogil:
    """Judge a batch in all groups. Unless it returns OK the caller must `groups_undo_check`."""
    cdef Seqs* s = gs.seqs
    cdef const int64_t* handle = <const int64_t*>handles.data
    cdef int64_t[MAX_ARENAS] available, needed
    cdef int64_t new, asked = 0, unserved = 0, widest = most_blocks(gs, part)
    cdef int32_t i = 0, k, slot, ones = 0, steady, rows = <int32_t>handles.size, short_row = -1, arena = -1, lacking
    cdef int status
    memset(needed, 0, sizeof(needed))
    for k in range(gs.num_arenas):
        available[k] = blocks_available(gs.arena[k])
    for k in range(gs.num_groups):
        part[k].num_changes = part[k].log.size = 0
    p.num_rows = rows
    p.num_events = p.log.size = 0
    while i < rows:
        if advance:
            ones = <int32_t>run_of_ones(num_new, max(i, ones), rows)
            steady = <int32_t>min(<int64_t>ones, i + min(limits.max_tokens - asked, <int64_t>rows))
            steady = check_steady(gs, part, handle, i, steady, limits.seq_tokens, widest, needed, available)
            if steady < 0:
                return refused(v, NO_MEMORY, i, rows, 0, 0, 0)
            asked += steady - i
            i = steady
            if i == rows:
                break
        slot = seq_judge(s, handle[i], i, v)
        if slot < 0:
            return v.reason
        if s.seq[slot].mark == s.stamp:
            return refused(v, DUPLICATE_HANDLE, i, handle[i], 0, 0, 0)
        s.seq[slot].mark = s.stamp
        new = ints_at(num_new, i)
        status = check_group_row(gs, p, part, i, slot, new, limits, advance, needed, v)
        if status != OK:
            return status
        if advance:
            if new > limits.max_tokens - asked:
                return refused(v, TOO_MANY_TOKENS, i, asked + new, 0, limits.max_tokens, 0)
            asked += new
            p.event[p.num_events - 1].q_len = <int32_t>new
        lacking = short_arena(gs, needed, available)
        if lacking >= 0 and short_row < 0:
            short_row = i
            arena = lacking
        if lacking >= 0 and partial:
            skip_row(gs, p, part, needed)
            unserved += new
        i += 1
    p.num_tokens = asked - unserved
    memcpy(gs.needed, needed, sizeof(needed))
    if short_row >= 0 and not partial:
        blocks_short(gs.arena[arena], v, arena, short_row, handle[short_row], needed[arena],
                     needed[arena] - available[arena])
        return v.reason
    return OK


cdef void groups_undo_check(Groups* gs, StepPart** part) noexcept nogil:
    cdef int32_t k
    for k in range(gs.num_groups):
        log_undo(&part[k].log, gs.group[k].blocks, 0)


# ---- a step: commit ----------------------------------------------------------------------------------------

cdef void commit_group(Groups* gs, LayerGroup* g, StepPart* part, const Step* p) noexcept nogil:
    """Take the blocks of all rows in one group: in a row replacements by ascending index, then the new entries."""
    cdef Blocks* b = g.blocks
    cdef uint64_t digest = gs.arena[0].digest
    cdef Replaced* log = part.log.entry
    cdef const Change* change
    cdef int32_t* ids
    cdef int32_t i, k, slot
    part.num_copies = 0
    for i in range(part.num_changes):
        change = &part.change[i]
        slot = slot_of(p.handle[change.row])
        ids = group_row(g, slot)
        part.num_copies = replace_ids(log, change.replaced, b, ids, p.id if gs.pends else 0, part.copies,
                                      part.num_copies, &digest)
        if change.replaced:
            g.seq[slot].epoch += 1
        log += change.replaced
        ids += <int64_t>entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns
        blocks_take_many(b, ids, change.appended)
        for k in range(change.appended):
            digest = mix(digest, ids[k])
        new_version(g, slot)
    gs.arena[0].digest = digest


cdef void groups_commit(Groups* gs, Step* p, StepPart** part, const int64_t* handles, bint advance) noexcept nogil:
    """Carry out a batch that groups_check_step accepted."""
    cdef Seqs* s = gs.seqs
    cdef Blocks* b = gs.arena[0]
    cdef int64_t step_id = p.id if gs.pends else 0
    cdef const Event* event
    cdef int32_t i, k, done = 0
    cdef Seq* q
    p.num_copies = p.num_changed = 0
    p.uniform = advance
    b.digest = mix(mix(b.digest, OP_STEP if advance else OP_RESERVE), p.num_rows)
    memmove(p.handle, handles, p.num_rows * sizeof(int64_t))    # the batch may be a part of the plan's own array
    if gs.tree != NULL:
        tree_loads(gs, p, part, advance)
        for k in range(gs.num_arenas):
            tree_make_room(gs, k, gs.needed[k])
    for k in range(gs.num_groups):
        commit_group(gs, &gs.group[k], part[k], p)
    for k in range(p.num_events):
        event = &p.event[k]
        i = event.row
        commit_simple(p, s, b, p.handle, done, i, step_id)
        done = i + 1
        q = &s.seq[slot_of(p.handle[i])]
        q.num_blocks += event.appended
        q.kv_len += event.q_len
        s.sum_blocks += event.appended
        p.uniform &= event.q_len == 1
        p.length[i] = q.kv_len
        p.prev_step[i] = q.last_step
        q.last_step = step_id
        if event.q_len != 1:
            b.digest = mix(b.digest, (<uint64_t>event.q_len << 1) | event.served)
        b.digest = mix(b.digest, <uint64_t>untagged(s, p.handle[i]) ^ (<uint64_t>q.kv_len << 20))
    commit_simple(p, s, b, p.handle, done, p.num_rows, step_id)
    s.sum_tokens += p.num_tokens
    if gs.tree != NULL and advance:
        tree_saves(gs, p, part)


cdef void groups_set_fences(Groups* gs, const Pending* pending) noexcept nogil:
    cdef int32_t k
    for k in range(gs.num_arenas):
        set_fences(pending, gs.arena[k])


# ---- how a step ends ---------------------------------------------------------------------------------------

cdef inline int64_t first_read(const LayerGroup* g, int64_t position) noexcept nogil:
    """The first entry, apart from kept ones, that a query at a position or behind it reads."""
    if g.kind == WINDOW_LAYERS:
        return entry_at(g, max(position - g.reach + 1, <int64_t>0))
    return entry_at(g, position // g.reach * g.reach) if g.kind == CHUNK_LAYERS else 0


cdef void free_behind_window(LayerGroup* g, int32_t slot, int64_t length) noexcept nogil:
    """Release the entries that no query reads after a step that ended at a length, which is due."""
    cdef int64_t end = first_read(g, length - g.lookahead), index
    cdef int32_t* ids = group_row(g, slot)
    cdef int32_t first = max(g.kept, g.seq[slot].gone)
    for index in range(first * <int64_t>g.columns, end * g.columns):
        blocks_unref(g.blocks, ids[index])
        ids[index] = g.hole
    set_gone(g, slot, <int32_t>end)
    g.seq[slot].epoch += 1
    new_version(g, slot)


cdef void groups_release(Groups* gs, const Step* p) noexcept nogil:
    """The step was executed: let go of what it read last, then of what no later query of its rows reads."""
    cdef StepPart** part = parts_of(p)
    cdef int32_t[MAX_GROUPS] letting
    cdef int32_t i, k, slot, n = 0
    if gs.tree != NULL:
        tree_pass(gs, p)
    for k in range(gs.num_groups):
        log_release(&part[k].log, gs.group[k].blocks)
        if gs.group[k].kind == WINDOW_LAYERS or gs.group[k].kind == CHUNK_LAYERS:
            letting[n] = k
            n += 1
    for i in range(p.num_rows if n else 0):
        slot = slot_of(p.handle[i])
        for k in range(n):
            if p.length[i] >= gs.group[letting[k]].seq[slot].due and seq_find(gs.seqs, p.handle[i]) >= 0:
                free_behind_window(&gs.group[letting[k]], slot, p.length[i])


cdef void groups_settle(Groups* gs, const Pending* pending, const Step* p) noexcept nogil:
    """A step has ended: recompute the floors that its logs touched, then let blocks out of limbo."""
    cdef StepPart** part = parts_of(p)
    cdef const Step* other
    cdef int32_t k
    for k in range(gs.num_groups):
        clear_floors(&part[k].log, gs.group[k].blocks)
        other = pending.oldest
        while part[k].log.size and other != NULL:
            raise_floors(&parts_of(other)[k].log, gs.group[k].blocks)
            other = other.newer
        part[k].num_changes = part[k].log.size = 0
    for k in range(gs.num_arenas):
        blocks_drain_limbo(gs.arena[k])


cdef void groups_pass(Groups* gs, const Pending* pending, const Step* p) noexcept nogil:
    """The oldest pending step has passed; it is off the list already."""
    groups_set_fences(gs, pending)
    groups_release(gs, p)
    groups_settle(gs, pending, p)
    if gs.tree != NULL:
        tree_publish(gs)


cdef void rollback_group(LayerGroup* g, const StepPart* part, const Step* p, const Seqs* s) noexcept nogil:
    """Undo the newest step in one group; the sequences have their lengths of before already."""
    cdef const Replaced* log = part.log.entry + part.log.size
    cdef const Change* change
    cdef int32_t* ids
    cdef int64_t at
    cdef int32_t i, slot
    for i in range(part.num_changes - 1, -1, -1):
        change = &part.change[i]
        log -= change.replaced
        slot = seq_find(s, p.handle[change.row])
        if slot < 0:
            drop_replaced(log, change.replaced, g.blocks)
            continue
        ids = group_row(g, slot)
        at = 0 if g.kind == STATE_LAYERS else <int64_t>entries_of(g, slot, s.seq[slot].num_blocks) * g.columns
        blocks_unref_many(g.blocks, ids + at, change.appended)
        if g.kind == STATE_LAYERS and change.appended:
            ids[0] = NO_BLOCK
        undo_replaced(log, change.replaced, g.blocks, ids)
        g.seq[slot].epoch += 1
        new_version(g, slot)


cdef void groups_rollback(Groups* gs, const Pending* pending, const Step* p) noexcept nogil:
    """Undo the newest step, which is off the list already: the last group first."""
    cdef StepPart** part = parts_of(p)
    cdef Seqs* s = gs.seqs
    cdef const Event* event
    cdef Event plain
    cdef int32_t i, k, slot, at = 0
    plain.q_len = 1
    plain.appended = 0
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_ROLLBACK), p.num_rows)
    if gs.tree != NULL:
        tree_undo(gs, p)
    groups_set_fences(gs, pending)
    for k in range(gs.num_arenas):
        blocks_lower_fences(gs.arena[k])
    for i in range(p.num_rows):
        event = &plain
        if at < p.num_events and p.event[at].row == i:
            event = &p.event[at]
            at += 1
        slot = seq_find(s, p.handle[i])
        if slot >= 0:
            s.seq[slot].last_step = p.prev_step[i]
            s.seq[slot].kv_len -= event.q_len
            s.seq[slot].num_blocks -= event.appended
            s.sum_tokens -= event.q_len
            s.sum_blocks -= event.appended
    for k in range(gs.num_groups - 1, -1, -1):
        rollback_group(&gs.group[k], part[k], p, s)
        wire_forget(&part[k].wire, p.num_rows, False)
    groups_settle(gs, pending, p)
    if gs.tree != NULL:
        tree_undone(gs, p)
        tree_publish(gs)


cdef void groups_reset(Groups* gs) noexcept nogil:
    """Make all arenas and tables as they were when they were new."""
    cdef int32_t k, slot
    for k in range(1, gs.num_arenas):
        blocks_reset(gs.arena[k])
    for k in range(gs.num_groups):
        for slot in range(gs.seqs.max_seqs if gs.group[k].kind == STATE_LAYERS else 0):
            gs.group[k].table[slot] = NO_BLOCK
    if gs.tree != NULL:
        tree_reset(gs.tree, gs)


# ---- tokens leave a sequence that goes on ------------------------------------------------------------------

cdef int64_t group_rewritten(const LayerGroup* g, int32_t slot, int64_t held, int64_t first, int64_t length,
                             int64_t from_) noexcept nogil:
    """Place of the first id, in entry `from_` or later, that compacting `held` tokens must not rewrite; -1: none."""
    cdef const int32_t* ids = group_row(g, slot)
    cdef int64_t index = max(entry_at(g, first), from_), end = entry_at(g, length + g.block_size - 1)
    cdef int32_t c
    if length == held:
        return -1                           # nothing leaves, so nothing moves
    while index < end:
        for c in range(g.columns):
            if not writable(g.blocks, ids[index * g.columns + c], 0):
                return index * g.columns + c
        index += 1
    return -1


cdef int check_unshare_row(Groups* gs, LayerGroup* g, StepPart* part, int32_t row, int32_t slot, int64_t first,
                           int64_t length, Verdict* v) noexcept nogil:
    """Note the entries of a row that compaction to `length` tokens rewrites and must not."""
    cdef Change* change = &part.change[part.num_changes]
    cdef const int32_t* ids = group_row(g, slot)
    cdef int64_t held = held_of(g, slot, gs.seqs.seq[slot].kv_len), place, index, k
    if not 0 <= length <= held:
        return refused(v, BAD_LENGTH, row, length, 0, held, 0)
    change.row = row
    change.replaced = change.appended = 0
    place = group_rewritten(g, slot, held, first, length, 0)
    while place >= 0:
        index = place // g.columns
        for k in range(index * g.columns, (index + 1) * g.columns):
            if log_replacement(&part.log, g.blocks, row, <int32_t>k, ids[k],
                               <int32_t>min(g.block_size, held - index * g.block_size)) != OK:
                return refused(v, NO_MEMORY, row, part.log.room, 0, 0, 0)
        change.replaced += g.columns
        place = group_rewritten(g, slot, held, first, length, index + 1)
    part.num_changes += change.replaced != 0
    return OK


cdef int groups_check_unshare(Groups* gs, Step* p, StepPart** part, int32_t group, const Ints* handles, const Ints*
                              lens, int64_t first, const Limits* limits, Verdict* v) noexcept nogil:
    """Judge a batch that gets blocks of its own in a group. Unless it returns OK: `groups_undo_check`."""
    cdef Seqs* s = gs.seqs
    cdef LayerGroup* g = &gs.group[group]
    cdef StepPart* one = part[group]
    cdef int64_t[MAX_ARENAS] needed
    cdef int64_t available = blocks_available(g.blocks)
    cdef int32_t i, k, slot, short_row = -1
    memset(needed, 0, sizeof(needed))
    for k in range(gs.num_groups):
        part[k].num_changes = part[k].log.size = 0
    p.num_rows = <int32_t>handles.size
    p.num_events = p.log.size = 0
    p.num_tokens = 0
    for i in range(p.num_rows):
        slot = seq_judge(s, ints_at(handles, i), i, v)
        if slot < 0:
            return v.reason
        if s.seq[slot].mark == s.stamp:
            return refused(v, DUPLICATE_HANDLE, i, s.seq[slot].handle, 0, 0, 0)
        s.seq[slot].mark = s.stamp
        if (check_unshare_row(gs, g, one, i, slot, first, ints_at(lens, i), v) != OK
                or check_group_row(gs, p, part, i, slot, 0, limits, False, needed, v) != OK):
            return v.reason
        if one.log.size > available and short_row < 0:
            short_row = i
    if short_row >= 0:
        return blocks_short(g.blocks, v, g.arena, short_row, ints_at(handles, short_row), one.log.size,
                            one.log.size - available)
    if one.log.size > one.copies_room:
        v.value = one.log.size
        return RETRY
    memset(gs.needed, 0, sizeof(gs.needed))
    gs.needed[g.arena] = one.log.size
    return OK


cdef void group_loses(Groups* gs, LayerGroup* g, int32_t slot, int64_t n) noexcept nogil:
    """n > 0 tokens left a row."""
    cdef Seqs* s = gs.seqs
    s.life[slot].point = s.seq[slot].kv_len
    s.evicted_tokens += n
    if gs.tree != NULL:
        row_loses(gs, slot)
    g.seq[slot].evicted += n
    g.seq[slot].epoch += 1
    new_version(g, slot)


cdef void groups_compact(Groups* gs, int32_t group, int32_t slot, int64_t length) noexcept nogil:
    """The row keeps `length` of its tokens, at the front of its table."""
    cdef LayerGroup* g = &gs.group[group]
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef int64_t leaving = held_of(g, slot, q.kv_len) - length
    cdef int32_t entries = entries_of(g, slot, q.num_blocks), stay
    gs.arena[0].digest = mix(mix(mix(mix(gs.arena[0].digest, OP_COMPACT), group), untagged(gs.seqs, q.handle)), length)
    if leaving == 0:
        return
    stay = entries - <int32_t>(entry_at(g, g.seq[slot].evicted + leaving) - entry_at(g, g.seq[slot].evicted))
    group_unref(g, slot, stay, entries)
    group_loses(gs, g, slot, leaving)


cdef void groups_evict(Groups* gs, int32_t group, int32_t slot, const Ints* places) noexcept nogil:
    """Full entries leave a row, at `places`, ascending; what is behind them moves up."""
    cdef LayerGroup* g = &gs.group[group]
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef int32_t* ids = group_row(g, slot)
    cdef int64_t index, k, at = 0, n = places.size
    cdef uint64_t digest = mix(mix(mix(gs.arena[0].digest, OP_EVICT_BLOCKS), group), untagged(gs.seqs, q.handle))
    digest = mix(digest, n)
    for k in range(n - 1, -1, -1):
        index = ints_at(places, k)
        digest = mix(digest, index)
        group_unref(g, slot, <int32_t>index, <int32_t>index + 1)
    for index in range(entries_of(g, slot, q.num_blocks) if n else 0):
        if at < n and ints_at(places, at) == index:
            at += 1
        else:
            memmove(ids + (index - at) * g.columns, ids + index * g.columns, g.columns * sizeof(int32_t))
    gs.arena[0].digest = digest
    if n:
        group_loses(gs, g, slot, n * g.block_size)


# ---- arrays ------------------------------------------------------------------------------------------------

cdef void emit_states(const LayerGroup* g, StepPart* out, const Step* p, int32_t pad_rows) noexcept nogil:
    """state_src and state_dst of a step; rows without new tokens have neither."""
    cdef const Replaced* log = out.log.entry
    cdef const Change* change
    cdef int32_t i
    for i in range(p.num_rows):             # a state that is written in place, unless something below says more
        out.state_src[i] = out.state_dst[i] = g.table[slot_of(p.handle[i])]
    for i in range(p.num_events):
        if p.event[i].q_len == 0:
            out.state_src[p.event[i].row] = out.state_dst[p.event[i].row] = NO_BLOCK
    for i in range(out.num_changes):
        change = &out.change[i]
        out.state_src[change.row] = log.old if change.replaced else NO_BLOCK
        log += change.replaced
    for i in range(p.num_rows, pad_rows):
        out.state_src[i] = out.state_dst[i] = NO_BLOCK


cdef void emit_next_slots(const LayerGroup* g, StepPart* out, const Step* p) noexcept nogil:
    """slot_mapping of a batch in which every row has one new token: all that the loop reads is in locals."""
    cdef const int32_t* table = g.table
    cdef const int32_t* ids
    cdef int32_t* slots = out.slot_mapping
    cdef int64_t width = g.width, bs = g.block_size, shown = out.shown_tokens, position, index
    cdef int32_t columns = g.columns, rows = p.num_rows, i, c
    for i in range(rows):
        position = out.kv_lens[i] - 1
        index = entry_at(g, position)
        ids = table + slot_of(p.handle[i]) * width + index * columns
        position -= index * bs
        for c in range(columns):
            slots[c * shown + i] = <int32_t>(ids[c] * bs + position)


cdef void emit_slots(const LayerGroup* g, StepPart* out, const Step* p) noexcept nogil:
    """slot_mapping: where each new token goes, one row of all tokens per column."""
    cdef int32_t* slots = out.slot_mapping
    cdef const int32_t* ids
    cdef int64_t first, end, stop, index, shift
    cdef int32_t i, c, k, at = 0
    for i in range(p.num_rows):
        end = out.kv_lens[i]
        first = end - 1
        if at < p.num_events and p.event[at].row == i:
            first = end - p.event[at].q_len
            at += 1
        ids = group_row(g, slot_of(p.handle[i]))
        while first < end:
            index = entry_at(g, first)
            stop = min(end, (index + 1) * g.block_size)
            for c in range(g.columns):
                shift = (ids[index * g.columns + c] - index) * g.block_size + first
                for k in range(<int32_t>(stop - first)):
                    slots[c * out.shown_tokens + k] = <int32_t>(shift + k)
            slots += stop - first
            first = stop


cdef void emit_tables(const Groups* gs, const LayerGroup* g, StepPart* out, const Step* p, int32_t
                      pad_rows) noexcept nogil:
    """kv_lens of all rows; block_tables, dirty_rows and kv_starts of those whose table is not the one shown."""
    cdef const GroupSeq* q
    cdef int32_t i, slot
    for i in range(p.num_rows):
        slot = slot_of(p.handle[i])
        q = &g.seq[slot]
        out.kv_lens[i] = <int32_t>held_of(g, slot, p.length[i])
        if out.wire.seen[i] == q.version:
            continue
        out.kv_starts[i] = <int32_t>(q.gone * g.block_size)
        if out.wire.tracks:
            show_row(&out.wire, i, p.handle[i], q.epoch, q.version, group_row(g, slot),
                     entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns)
        out.wire.seen[i] = q.version
    for i in range(p.num_rows, pad_rows):
        out.kv_starts[i] = out.kv_lens[i] = 0
        pad_row(&out.wire, i)
        out.wire.seen[i] = 0


cdef void groups_emit(const Groups* gs, const Step* p, int32_t pad_rows, int64_t pad_tokens) noexcept nogil:
    """Write a committed step into the arrays of every group."""
    cdef const LayerGroup* g
    cdef StepPart* out
    cdef int64_t t
    cdef int32_t k, c
    for k in range(gs.num_groups):
        g = &gs.group[k]
        out = parts_of(p)[k]
        out.shown_rows = max(p.num_rows, pad_rows)
        out.shown_tokens = max(p.num_tokens, pad_tokens)
        out.wire.num_dirty = 0
        if g.kind == STATE_LAYERS:
            emit_states(g, out, p, pad_rows)
            continue
        emit_tables(gs, g, out, p, pad_rows)
        if out.slot_mapping == NULL:
            continue
        if p.uniform:
            emit_next_slots(g, out, p)
        else:
            emit_slots(g, out, p)
        for c in range(g.columns):
            for t in range(p.num_tokens, out.shown_tokens):
                out.slot_mapping[c * out.shown_tokens + t] = -1


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t part_fingerprint(const StepPart* part, uint64_t h) noexcept nogil:
    """Hash of what a pending step did in one group."""
    cdef int32_t i
    for i in range(part.num_changes):
        h = mix(mix(h, part.change[i].row),
                (<uint64_t>part.change[i].appended << 32) | <uint32_t>part.change[i].replaced)
    return log_fingerprint(&part.log, h)


cdef uint64_t groups_fingerprint(const Groups* gs, const Pending* pending, uint64_t h, int64_t
                                 next_step) noexcept nogil:
    """Hash of what the groups have beside arena 0 and the sequences."""
    cdef const LayerGroup* g
    cdef const Step* p
    cdef int32_t k, slot
    cdef int64_t i
    h = mix(h, gs.num_groups)
    if gs.tree != NULL:
        h = tree_fingerprint(gs.tree, h)
    for k in range(1, gs.num_arenas):
        h = blocks_fingerprint(gs.arena[k], h, next_step)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        h = mix(mix(mix(h, g.kind), g.reach), (<uint64_t>g.columns << 32) | <uint32_t>g.kept)
        h = mix(mix(mix(h, g.arena), g.block_size), g.lookahead)
        for slot in range(gs.seqs.max_seqs):
            if not seq_has_blocks(gs.seqs, slot):
                continue
            h = mix(mix(h, (<uint64_t>g.seq[slot].evicted << 32) | <uint32_t>g.seq[slot].gone), g.seq[slot].epoch)
            for i in range(<int64_t>entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns):
                h = mix(h, group_row(g, slot)[i])
        p = pending.oldest
        while p != NULL:
            h = part_fingerprint(parts_of(p)[k], h)
            p = p.newer
    return h


cdef bint check_holes(const LayerGroup* g, int32_t slot, const Seq* q, int64_t point, char* finding) noexcept nogil:
    """A row has no more holes than its length allows, and a state iff it has tokens; only full groups lose tokens."""
    cdef int64_t least = 0, evicted = g.seq[slot].evicted
    cdef int32_t gone = g.seq[slot].gone
    if evicted and not (g.kind == FULL_LAYERS and 0 < evicted <= point <= q.kv_len):
        return snprintf(finding, FINDING, b"sequence in slot %d lost %lld tokens, the last one at %lld of %lld", slot,
                        <long long>evicted, <long long>point, <long long>q.kv_len) > 0
    if g.kind == STATE_LAYERS:
        if (g.table[slot] != NO_BLOCK) != (q.kv_len > 0):
            return snprintf(finding, FINDING, b"sequence in slot %d has %lld tokens and state slot %d", slot,
                            <long long>q.kv_len, g.table[slot]) > 0
        return False
    if g.kind == WINDOW_LAYERS:
        least = q.kv_len - g.reach + 1
    elif g.kind == CHUNK_LAYERS:
        least = q.kv_len // g.reach * g.reach
    if gone and not (g.kept < gone and gone * g.block_size <= least):
        return snprintf(finding, FINDING, b"sequence in slot %d let go of entries up to %d, it reads from %lld on",
                        slot, gone, <long long>least) > 0
    if g.seq[slot].due != due_of(g, gone):
        return snprintf(finding, FINDING, b"sequence in slot %d lets go at length %lld, its holes say %lld", slot,
                        <long long>g.seq[slot].due, <long long>due_of(g, gone)) > 0
    return False


cdef bint check_group(const Groups* gs, const LayerGroup* g, int32_t* references, char* finding) noexcept nogil:
    """The rows of one group; `references` counts what they name."""
    cdef const Blocks* b = g.blocks
    cdef const Seq* q
    cdef const int32_t* ids
    cdef int64_t i
    cdef int32_t slot, index
    for slot in range(gs.seqs.max_seqs):
        if not seq_has_blocks(gs.seqs, slot):
            continue
        q = &gs.seqs.seq[slot]
        if gs.seqs.life[slot].life == OPEN and check_holes(g, slot, q, gs.seqs.life[slot].point, finding):
            return True
        ids = group_row(g, slot)
        for i in range(<int64_t>entries_of(g, slot, q.num_blocks) * g.columns):
            index = <int32_t>(i // g.columns)
            if g.kept <= index < g.seq[slot].gone:
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
        if check_handle(s, slot, &num_open, &retired, finding):
            return True
        if not seq_has_blocks(s, slot):
            continue
        if not 0 <= q.kv_len <= min(q.num_blocks * gs.block_size, INT32_MAX) or q.num_blocks % gs.unit or (
                q.num_blocks > blocks_for(gs, gs.seq_tokens)):
            return snprintf(finding, FINDING, b"sequence in slot %d has %lld tokens in %d blocks", slot,
                            <long long>q.kv_len, q.num_blocks) > 0
        tokens += q.kv_len
        blocks += q.num_blocks
    if tokens != s.sum_tokens or blocks != s.sum_blocks:
        return snprintf(finding, FINDING, b"counted %lld tokens in %lld blocks, the counters say %lld and %lld",
                        <long long>tokens, <long long>blocks, <long long>s.sum_tokens, <long long>s.sum_blocks) > 0
    return check_free_slots(s, num_open, retired, finding)


cdef bint check_arena(const Groups* gs, int32_t arena, const Pending* pending, int32_t* seen, int32_t* floors,
                      char* finding) noexcept nogil:
    """The blocks of one arena: what refers to them, and what pending steps hold."""
    cdef const Blocks* b = gs.arena[arena]
    cdef const Step* p = pending.oldest
    cdef int32_t k, made = 0
    if blocks_check(b, seen, finding) or check_fences(b, pending, finding):
        return True
    for k in range(gs.num_groups):
        if gs.group[k].arena == arena and check_group(gs, &gs.group[k], seen, finding):
            return True
    if arena == 0 and gs.tree != NULL:
        count_bundles(gs.tree, seen)
    if check_references(b, seen, finding):
        return True
    memset(seen, 0, b.num_blocks * sizeof(int32_t))
    while p != NULL:
        for k in range(gs.num_groups):
            if gs.group[k].arena == arena:
                count_holds(&parts_of(p)[k].log, b, p.id, seen, floors, &made)
        p = p.newer
    return compare_holds(b, seen, floors, made, finding)


cdef bint groups_check(const Groups* gs, const Pending* pending, int32_t* seen, int32_t room, char*
                       finding) noexcept nogil:
    """Whether an invariant of the groups does not hold; the first one, in words.

    `seen` has twice `room` numbers, for the blocks of the largest arena and for the nodes of a tree, all zero.
    """
    cdef int32_t k
    if check_lengths(gs, finding):
        return True
    for k in range(gs.num_arenas):
        if check_arena(gs, k, pending, seen, seen + room, finding):
            return True
        memset(seen, 0, gs.arena[k].num_blocks * sizeof(int32_t))
        memset(seen + room, 0, gs.arena[k].num_blocks * sizeof(int32_t))
    return gs.tree != NULL and tree_check(gs, seen, finding)
