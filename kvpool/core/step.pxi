"""One step of a batch, and how a pending step ends.

A `Step` is what a plan did to lengths, a `StepPart` what it did to the tables of one
group: a `Change` for each row whose table changed, and a `Log` of the ids that were replaced, each
with a hold on the old block. An `Event` is a row that did more than put one token into its tails.

    log.size == sum of change.replaced, in the order of the changes
    hold of a block == log entries of pending steps that name it as old
    floor of a block == max of their tokens, 0 if it has no hold
    ids of pending steps ascend; oldest_pending and newest_pending of each arena are the ends

Why it is so:

- A row is steady if it has one token and needs no copy; it may take a block. `step_steady` judges a
  batch of such rows group by group, `step_check` every other batch, row by row.
- The check moves reference counts, holds and floors as if the rows had been served in order, because
  what a row may write depends on what the rows before it released. It takes no block. So a refusal
  undoes the log, and the commit cannot fail. `step_steady` moves lengths and tails, too, as it goes,
  and puts them back if a row is not steady, or if blocks are missing.
- The log of the check is the log of the rollback. It has the ids that were replaced alone: appended
  ones stand in `Change.appended`, and what a window lets go of, when a step passes, is in neither.
  `old_floor` undoes a check, which ends in reverse order at once. A step ends when others are
  pending, and the maximum of several copies cannot be undone from one of them: `step_settle`
  recomputes those that its log touched.
- A step is done in order. Blocks wait in limbo for the newest step, so an older one that is still
  out must hold them back; a `done` that comes early is noted until its turn.
- Only the newest step can be rolled back, since later ones build on its tables, and none of which a
  fork is open: the child shares what it would take back. O(max_seqs) where forks were made at all.
- A tail that was found own stays so until `turns` of its blocks grows or its table has a new version. A commit to the
  prefix cache is no turn: what it commits is full, and no row's tail.
- A steady row that takes no block has neither event nor change, so what a step keeps for its undo
  is a handle and a number per row.

The write rule (docs/core.md, Steps): a block is written in place iff it has one reference, is not
committed, and nothing that a pending copy reads from it would be overwritten. Holds of pending
plans do not count as references.
"""

cdef extern from *:             # a thread may ask for its plan while another one's `done` lets it pass
    """
    static inline int kv_flag(const int *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
    static inline void kv_set_flag(int *at, int value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
    #define kv_seldom(holds) __builtin_expect(!!(holds), 0)
    """
    bint flag "kv_flag"(const bint* at) noexcept nogil
    void set_flag "kv_set_flag"(bint* at, bint value) noexcept nogil
    int seldom "kv_seldom"(bint holds) noexcept nogil       # keeps what follows out of the registers of a loop


cdef int step_init(Step* p, int32_t max_rows) noexcept nogil:
    p.length = <int64_t*>xcalloc(max_rows, sizeof(int64_t))
    p.prev_step = <int64_t*>xcalloc(max_rows, sizeof(int64_t))
    p.event = <Event*>xcalloc(max_rows, sizeof(Event))
    p.max_rows = max_rows
    p.mixed_rows = NO_BATCH
    if p.length == NULL or p.prev_step == NULL or p.event == NULL:
        step_free(p)
        return NO_MEMORY
    return OK


cdef void step_free(Step* p) noexcept nogil:
    xfree(p.length)
    xfree(p.prev_step)
    xfree(p.event)
    memset(p, 0, sizeof(Step))


# ---- what a step replaces in a table -----------------------------------------------------------------------

cdef inline bint writable(const Blocks* b, int32_t i, int64_t first_offset) noexcept nogil:
    """The write rule."""
    cdef const Block* block = &b.block[i]
    return block.refcount == 1 and not block.committed and (block.hold == 0 or first_offset >= b.floor[i])


cdef inline bint is_own(const Block* block) noexcept nogil:
    """The write rule where no pending copy reads the block: all that a steady row asks."""
    return not ((block.refcount ^ 1) | block.hold | block.committed)


cdef int log_replacement(Log* log, Blocks* b, int32_t index, int32_t old, int32_t tokens) noexcept nogil:
    cdef Replaced* entry
    if log.size == log.room:
        entry = <Replaced*>xrealloc(log.entry, 2 * <size_t>log.room * sizeof(Replaced))
        if entry == NULL:
            return NO_MEMORY
        log.entry = entry
        log.room *= 2
    entry = &log.entry[log.size]
    entry.index = index
    entry.old = old
    entry.tokens = tokens
    entry.old_floor = b.floor[old]
    log.size += 1
    blocks_hold(b, old, tokens)
    return OK


cdef void log_undo(Log* log, Blocks* b, int32_t keep) noexcept nogil:
    """Take back what a check did to reference counts, down to `keep` entries."""
    while log.size > keep:
        log.size -= 1
        blocks_unhold(b, log.entry[log.size].old, log.entry[log.size].old_floor)


cdef inline int32_t note_copies(Log* log, Blocks* b, const int32_t* ids, int32_t columns, int64_t index, int64_t end,
                               int64_t offset) noexcept nogil:
    """Note the entries index .. end - 1 that may not be written in place, of `columns` ids each; returns how many ids.

    Writes begin at `offset` in the first. -1: no memory.
    """
    cdef int32_t replaced = 0, c
    cdef bint ours
    while index < end:
        ours = True
        for c in range(columns):
            ours &= writable(b, ids[index * columns + c], offset)
        if not ours:
            for c in range(columns):
                if log_replacement(log, b, <int32_t>(index * columns + c), ids[index * columns + c],
                                   <int32_t>offset) != OK:
                    return -1
            replaced += columns
        offset = 0
        index += 1
    return replaced


cdef inline int32_t replace_ids(Replaced* entry, int32_t n, Blocks* b, int32_t* ids, int64_t step_id, int32_t* copies,
                                int32_t num_copies, uint64_t* digest) noexcept nogil:
    """Take the blocks that replace n ids of a row, fenced until they are copied; returns how many copies there are."""
    cdef int32_t k
    for k in range(n):
        entry[k].new = blocks_take(b)
        b.block[entry[k].new].fence = step_id
        ids[entry[k].index] = entry[k].new
        if entry[k].tokens:
            copies[3 * <int64_t>num_copies] = entry[k].old
            copies[3 * <int64_t>num_copies + 1] = entry[k].new
            copies[3 * <int64_t>num_copies + 2] = entry[k].tokens
            num_copies += 1
            b.cow_copies += 1
            b.cow_tokens += entry[k].tokens
        digest[0] = mix(digest[0], (<uint64_t>entry[k].index << 32) | <uint32_t>entry[k].new)
    return num_copies


cdef inline void undo_replaced(const Replaced* entry, int32_t n, Blocks* b, int32_t* ids) noexcept nogil:
    """Put back what a step replaced in a row, the last first."""
    cdef int32_t k
    for k in range(n - 1, -1, -1):
        ids[entry[k].index] = entry[k].old
        b.block[entry[k].old].hold -= 1
        ref(b, entry[k].old)
        b.block[entry[k].new].fence = 0             # its copy will never be made
        unref(b, entry[k].new)


cdef inline void drop_replaced(const Replaced* entry, int32_t n, Blocks* b) noexcept nogil:
    """The same for a row that was closed since: it has no table to put anything back into."""
    cdef int32_t k
    for k in range(n - 1, -1, -1):
        b.block[entry[k].old].hold -= 1
        blocks_settle(b, entry[k].old)
        if b.block[entry[k].new].place == USED:     # somebody else has a reference
            b.block[entry[k].new].fence = 0


cdef void log_release(const Log* log, Blocks* b) noexcept nogil:
    """The copies of a step were made: let go of their sources, in the order they were taken."""
    cdef int32_t k
    cdef Block* block
    for k in range(log.size):
        block = &b.block[log.entry[k].old]
        block.hold -= 1
        if block.hold == 0:
            b.floor[log.entry[k].old] = 0
            blocks_settle(b, log.entry[k].old)


cdef inline void raise_floors(const Log* log, Blocks* b) noexcept nogil:
    """Floors are no lower than what the copies of this log read."""
    cdef const Replaced* entry
    cdef int32_t k
    for k in range(log.size):
        entry = &log.entry[k]
        b.floor[entry.old] = max(b.floor[entry.old], entry.tokens)


# ---- rows that are steady ----------------------------------------------------------------------------------

cdef inline bint other_columns_own(const LayerGroup* g, int32_t slot, int64_t position) noexcept nogil:
    """`is_own` of all columns but the first of the entry of a position."""
    cdef const int32_t* ids = group_row(g, slot) + entry_at(g, held_of(g, slot, position)) * g.columns
    cdef int32_t c
    for c in range(1, g.columns):
        if not is_own(&g.blocks.block[ids[c]]):
            return False
    return True


cdef inline bint fits_in_tail(const LayerGroup* g, const Tail* t, int32_t slot, int64_t position) noexcept nogil:
    """Whether the token at a position goes into the tail of a row, and nobody else refers to that."""
    return t.next_slot < t.stop_slot and is_own(&g.blocks.block[t.block]) and (
        g.columns == 1 or other_columns_own(g, slot, position))


cdef int64_t left_by_all(const Groups* gs, int32_t slot) noexcept nogil:
    """Tokens of a sequence that were evicted from every group of blocks."""
    cdef int64_t least = INT64_MAX
    cdef int32_t k
    if gs.seqs.evicted_tokens == 0:
        return 0
    for k in range(gs.num_groups):
        if gs.group[k].kind != STATE_LAYERS:
            least = min(least, gs.group[k].seq[slot].evicted)
    return least if least != INT64_MAX else 0


cdef bint within(const Groups* gs, const Step* p, const Seq* q, const Limits* limits) noexcept nogil:
    """Whether a row may have one token more in the tables that it has."""
    cdef int32_t k, slot = slot_of(q.handle)
    if q.num_tokens >= limits.length or q.num_tokens - left_by_all(gs, slot) >= limits.seq_tokens:
        return False
    if gs.seqs.evicted_tokens == 0:
        return q.num_blocks <= limits.table_blocks
    for k in range(gs.num_groups):      # a row that lost a part of a block has one entry more
        if gs.group[k].kind != STATE_LAYERS and entries_of(&gs.group[k], slot, q.num_blocks) > p.part[k].width:
            return False
    return True


cdef inline bint is_exact(const Groups* gs, const Limits* limits) noexcept nogil:
    """Whether a row may pass a limit while there is room in its last block."""
    cdef int64_t most = gs.most_blocks * gs.block_size
    return gs.seqs.evicted_tokens != 0 or limits.length < most or limits.seq_tokens < most


cdef inline bint is_narrow(const Groups* gs, const Limits* limits) noexcept nogil:
    """Whether a row that has room in its tables may be past a limit."""
    return is_exact(gs, limits) or limits.table_blocks < gs.most_blocks


cdef inline Py_ssize_t run_of_ones(const Ints* num_new, Py_ssize_t i, Py_ssize_t n) noexcept nogil:
    """First row from i on that has not exactly one new token."""
    if num_new.data == NULL:
        return n if num_new.scalar == 1 else i
    while i < n and ints_at(num_new, i) == 1:
        i += 1
    return i


# ---- pass 1: check -----------------------------------------------------------------------------------------

cdef inline void note_change(StepPart* part, int32_t row, int32_t replaced, int32_t appended) noexcept nogil:
    cdef Change* change = &part.change[part.num_changes]
    change.row = row
    change.replaced = replaced
    change.appended = appended
    part.num_changes += 1


cdef int move_states(Groups* gs, const Step* p, int32_t row, int32_t slot) noexcept nogil:
    cdef LayerGroup* g
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == STATE_LAYERS:
            if log_replacement(&p.part[k].log, g.blocks, 0, g.table[slot], 0) != OK:
                return NO_MEMORY
            note_change(p.part[k], row, 1, 0)
            gs.needed[g.arena] += 1
    return OK


cdef int check_in_tails(Groups* gs, Step* p, const int64_t* handle, int32_t end, const Limits* limits,
                        int64_t step_id) noexcept nogil:
    """Judge the rows before `end` that do no more than put a token into their own tails, and move their states."""
    cdef Seq* seq = gs.seqs.seq
    cdef int32_t i, k, slot, max_seqs = gs.seqs.max_seqs, num_groups = gs.num_groups
    cdef bint moves = gs.has_states and gs.pends, narrow = is_narrow(gs, limits)
    cdef const LayerGroup* g
    cdef Seq* q
    for i in range(p.num_rows, end):
        slot = slot_of(handle[i])
        if slot >= max_seqs:
            return OK
        q = &seq[slot]
        if q.handle != handle[i] or q.last_step == step_id or (narrow and not within(gs, p, q, limits)):
            return OK
        for k in range(num_groups):
            g = &gs.group[k]
            if g.kind != STATE_LAYERS:
                if not fits_in_tail(g, tail_of(g, slot), slot, q.num_tokens):
                    return OK
            elif (q.num_tokens == 0 or q.num_tokens == q.num_blocks * gs.block_size
                  or not (gs.needed[g.arena] < blocks_available(g.blocks) if moves
                          else is_own(&g.blocks.block[g.table[slot]]))):
                return OK
        if moves and move_states(gs, p, i, slot) != OK:
            return NO_MEMORY
        p.prev_step[i] = q.last_step
        q.last_step = step_id
        p.num_rows = i + 1
    return OK


cdef int32_t check_in_group(const Groups* gs, LayerGroup* g, StepPart* part, const Seq* q, int32_t row, int64_t new,
                            int64_t blocks, bint advance) noexcept nogil:
    """What `new` > 0 more tokens of one row do in one group stands in a change; returns the ids that are needed.

    `blocks` of the pool are what the sequence has room for then. -1: no memory.
    """
    cdef int32_t slot = slot_of(q.handle), replaced = 0, appended = 0
    cdef int64_t index, entries, held
    if g.kind != STATE_LAYERS:
        held = held_of(g, slot, q.num_tokens)
        index = entry_at(g, held)
        entries = entries_of(g, slot, q.num_blocks)
        replaced = note_copies(&part.log, g.blocks, group_row(g, slot), g.columns, index,
                               min(entry_at(g, held + new + g.block_size - 1), entries), held - index * g.block_size)
        appended = <int32_t>(entries_of(g, slot, blocks) - entries) * g.columns
    elif not advance:
        return 0
    elif g.table[slot] == NO_BLOCK:
        appended = 1
    elif gs.pends or not is_own(&g.blocks.block[g.table[slot]]):
        replaced = 1 if log_replacement(&part.log, g.blocks, 0, g.table[slot], 0) == OK else -1
    if replaced < 0:
        return -1
    if replaced + appended:
        note_change(part, row, replaced, appended)
    return replaced + appended


cdef int32_t judge_handle(const Seqs* s, int64_t handle, int32_t row, int64_t step_id, Verdict* v) noexcept nogil:
    """Slot of a row that is open, and that the step has not had yet; else -1."""
    cdef int32_t slot = seq_judge(s, handle, row, v)
    if slot >= 0 and s.seq[slot].last_step == step_id:
        refused(v, DUPLICATE_HANDLE, row, handle, 0, 0, 0)
        return -1
    return slot


cdef int check_row(Groups* gs, Step* p, int32_t slot, int64_t new, const Limits* limits, bint advance, int64_t step_id,
                   Verdict* v) noexcept nogil:
    """Judge the next row, which may do more than a steady one. Its event and changes say what will happen to it."""
    cdef Seq* q = &gs.seqs.seq[slot]
    cdef Event* event = &p.event[p.num_events]
    cdef LayerGroup* g
    cdef int64_t entries, blocks = q.num_blocks, held = q.num_tokens - left_by_all(gs, slot)
    cdef int32_t k, ids, row = p.num_rows
    event.row = row
    event.q_len = event.appended = 0
    event.served = 1
    if new < 0:
        return refused(v, NEGATIVE_NEW, row, new, 0, 0, 0)
    if new > limits.seq_tokens - held:
        return refused(v, SEQ_TOO_LONG, row, new if new > INT64_MAX - held else held + new, 0, limits.seq_tokens, 0)
    if new > limits.length - q.num_tokens:
        return refused(v, SEQ_TOO_LONG, row, q.num_tokens + new, 0, limits.length, 0)
    if q.num_tokens + new > blocks * gs.block_size and (advance or gs.has_entries):
        blocks = blocks_for(gs, q.num_tokens + new)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        ids = check_in_group(gs, g, p.part[k], q, row, new, blocks, advance) if new else 0
        if ids < 0:
            return refused(v, NO_MEMORY, row, p.part[k].log.room, 0, 0, 0)
        gs.needed[g.arena] += ids
        if g.kind != STATE_LAYERS:
            entries = entries_of(g, slot, blocks)
            if entries > p.part[k].width:
                return refused(v, TABLE_TOO_WIDE, row, entries, 0, p.part[k].width, 0)
    event.appended = <int32_t>(blocks - q.num_blocks)
    p.num_events += 1
    p.num_rows += 1
    p.prev_step[row] = q.last_step
    q.last_step = step_id
    return OK


cdef inline int32_t short_arena(const Groups* gs) noexcept nogil:
    """The lowest arena that has not the blocks that the rows so far need, or -1."""
    cdef int32_t k
    for k in range(gs.num_arenas):
        if gs.needed[k] > blocks_available(gs.arena[k]):
            return k
    return -1


cdef void skip_row(Groups* gs, Step* p) noexcept nogil:
    """The last row that was checked gets nothing, in no group."""
    cdef Event* event = &p.event[p.num_events - 1]
    cdef StepPart* part
    cdef const Change* change
    cdef int32_t k
    event.served = 0
    event.q_len = event.appended = 0
    for k in range(gs.num_groups):
        part = p.part[k]
        if part.num_changes and part.change[part.num_changes - 1].row == event.row:
            part.num_changes -= 1
            change = &part.change[part.num_changes]
            gs.needed[gs.group[k].arena] -= change.replaced + change.appended
            log_undo(&part.log, gs.group[k].blocks, part.log.size - change.replaced)


cdef inline void begin_check(Groups* gs, Step* p) noexcept nogil:
    cdef StepPart* part
    cdef int32_t k
    for k in range(gs.num_groups):
        part = p.part[k]
        part.num_changes = part.num_stale = part.log.size = 0
    memset(gs.needed, 0, sizeof(gs.needed))
    p.num_rows = 0
    p.num_events = 0
    p.num_tokens = 0
    p.all_prev = -1


cdef int step_check(Groups* gs, Step* p, const Ints* handles, const Ints* num_new, const Limits* limits, bint advance,
                    bint partial, int64_t step_id, Verdict* v) noexcept nogil:
    """Judge a batch in all groups, and note what it will do. Unless it returns OK the caller must `step_undo_check`."""
    cdef const int64_t* handle = <const int64_t*>handles.data
    cdef int64_t new, asked = 0, unserved = 0
    cdef int32_t i = 0, slot, ones = 0, end, rows = <int32_t>handles.size, short_row = -1, arena = -1, lacking
    cdef int status
    begin_check(gs, p)
    while i < rows:
        if advance:
            ones = <int32_t>run_of_ones(num_new, max(i, ones), rows)
            end = <int32_t>min(<int64_t>ones, i + min(limits.max_tokens - asked, <int64_t>rows))
            if check_in_tails(gs, p, handle, end, limits, step_id) != OK:
                return refused(v, NO_MEMORY, i, rows, 0, 0, 0)
            asked += p.num_rows - i
            i = p.num_rows
            if i == rows:
                break
        slot = judge_handle(gs.seqs, handle[i], i, step_id, v)
        if slot < 0:
            return v.reason
        new = ints_at(num_new, i)
        status = check_row(gs, p, slot, new, limits, advance, step_id, v)
        if status != OK:
            return status
        if advance:
            if new > limits.max_tokens - asked:
                return refused(v, TOO_MANY_TOKENS, i, asked + new, 0, limits.max_tokens, 0)
            asked += new
            p.event[p.num_events - 1].q_len = <int32_t>new
        lacking = short_arena(gs)
        if lacking >= 0 and short_row < 0:
            short_row = i
            arena = lacking
        if lacking >= 0 and partial:
            skip_row(gs, p)
            unserved += new
        i += 1
    p.num_tokens = asked - unserved
    if short_row >= 0 and not partial:
        return blocks_short(gs.arena[arena], v, arena, short_row, handle[short_row], gs.needed[arena],
                            gs.needed[arena] - blocks_available(gs.arena[arena]))
    return OK


cdef void step_undo_check(Groups* gs, const Step* p, const int64_t* handle, bint served) noexcept nogil:
    """Put back what was noted of the rows that were judged. `served`: each has got its token already."""
    cdef int32_t i, k, slot
    for k in range(gs.num_groups):
        log_undo(&p.part[k].log, gs.group[k].blocks, 0)
    for i in range(p.num_rows):
        slot = slot_of(handle[i])
        gs.seqs.seq[slot].last_step = prev_of(p, i)
        if served:
            gs.seqs.seq[slot].num_tokens -= 1
            tails_refresh(gs, slot)


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
    cdef const int32_t* ids = group_row(g, slot)
    cdef int64_t held = held_of(g, slot, gs.seqs.seq[slot].num_tokens), place, index, k
    cdef int32_t replaced = 0
    if not 0 <= length <= held:
        return refused(v, BAD_LENGTH, row, length, 0, held, 0)
    place = group_rewritten(g, slot, held, first, length, 0)
    while place >= 0:
        index = place // g.columns
        for k in range(index * g.columns, (index + 1) * g.columns):
            if log_replacement(&part.log, g.blocks, <int32_t>k, ids[k],
                               <int32_t>min(g.block_size, held - index * g.block_size)) != OK:
                return refused(v, NO_MEMORY, row, part.log.room, 0, 0, 0)
        replaced += g.columns
        place = group_rewritten(g, slot, held, first, length, index + 1)
    if replaced:
        note_change(part, row, replaced, 0)
    return OK


cdef int step_check_unshare(Groups* gs, Step* p, int32_t group, const Ints* handles, const Ints* lens, int64_t first,
                            const Limits* limits, int64_t step_id, Verdict* v) noexcept nogil:
    """Judge a batch that gets blocks of its own in a group. Unless it returns OK: `step_undo_check`."""
    cdef LayerGroup* g = &gs.group[group]
    cdef StepPart* one = p.part[group]
    cdef int64_t available = blocks_available(g.blocks)
    cdef int32_t i, slot, short_row = -1
    begin_check(gs, p)
    for i in range(<int32_t>handles.size):
        slot = judge_handle(gs.seqs, ints_at(handles, i), i, step_id, v)
        if (slot < 0 or check_unshare_row(gs, g, one, i, slot, first, ints_at(lens, i), v) != OK
                or check_row(gs, p, slot, 0, limits, False, step_id, v) != OK):
            return v.reason
        if one.log.size > available and short_row < 0:
            short_row = i
    if short_row >= 0:
        return blocks_short(g.blocks, v, g.arena, short_row, ints_at(handles, short_row), one.log.size,
                            one.log.size - available)
    if one.log.size > one.copies_room:
        v.value = one.log.size
        return RETRY
    gs.needed[g.arena] = one.log.size
    return OK


# ---- pass 2: commit ----------------------------------------------------------------------------------------

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
        if change.replaced:
            part.num_copies = replace_ids(log, change.replaced, b, ids, p.id if gs.pends else 0, part.copies,
                                          part.num_copies, &digest)
            log += change.replaced
            tail_of(g, slot).epoch += 1
        if g.kind != STATE_LAYERS:
            ids += <int64_t>entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns - change.appended
        if change.appended:
            blocks_take_many(b, ids, change.appended)
        for k in range(change.appended):
            digest = mix(digest, ids[k])
        new_version(g, slot)
    gs.arena[0].digest = digest


cdef inline void note_changed(StepPart* part, int32_t row) noexcept nogil:
    """The plan shows another table than the row has, or gets in this step."""
    part.stale[part.num_stale] = row
    part.num_stale += 1


cdef inline void put_in_tail(StepPart* part, Tail* t, int32_t row) noexcept nogil:
    part.slot[row] = t.next_slot
    t.next_slot += 1
    if seldom(part.wire.seen[row] != t.version):
        note_changed(part, row)


cdef void commit_simple(Groups* gs, const Step* p, int32_t first, int32_t end) noexcept nogil:
    """Serve rows that put a token into their tails."""
    cdef const Seqs* s = gs.seqs
    cdef uint64_t digest = gs.arena[0].digest
    cdef int32_t i, k
    cdef Seq* q
    if first == end:
        return
    for i in range(first, end):
        q = &s.seq[slot_of(p.handle[i])]
        q.num_tokens += 1
        p.length[i] = q.num_tokens
        digest = mix(digest, <uint64_t>untagged(s, p.handle[i]) ^ (<uint64_t>q.num_tokens << 20))
    gs.arena[0].digest = digest
    for k in range(gs.num_groups):
        for i in range(first, end if gs.group[k].kind != STATE_LAYERS else 0):
            put_in_tail(p.part[k], tail_of(&gs.group[k], slot_of(p.handle[i])), i)


cdef void enter_tail(const Groups* gs, LayerGroup* g, StepPart* part, const Step* p, const Event* event,
                     bint steady) noexcept nogil:
    """The tail of a row that did more, whose blocks are taken and whose length has moved."""
    cdef int32_t slot = slot_of(p.handle[event.row])
    cdef int64_t length = p.length[event.row]
    cdef bint served = event.q_len > 0
    cdef Tail* t = tail_of(g, slot)
    if g.kind == STATE_LAYERS:
        return
    tail_refresh(gs, g, slot, length - served)
    part.slot[event.row] = t.next_slot
    t.next_slot += served
    if steady:                              # it was noted by `begin_entry`
        return
    if t.next_slot == t.stop_slot:          # there may be room in the entry behind
        tail_refresh(gs, g, slot, length)
    if part.wire.seen[event.row] != t.version:
        note_changed(part, event.row)


cdef inline void begin_commit(Groups* gs, const Step* p) noexcept nogil:
    """Make room for the blocks that rows need, and say that they have them."""
    cdef int32_t k
    for k in range(gs.num_arenas if gs.tree != NULL else 0):
        tree_make_room(gs, k, gs.needed[k])
    for k in range(p.num_events):
        gs.seqs.seq[slot_of(p.handle[p.event[k].row])].num_blocks += p.event[k].appended
        gs.seqs.sum_blocks += p.event[k].appended


cdef void step_commit(Groups* gs, Step* p, const int64_t* handles, bint advance) noexcept nogil:
    cdef Blocks* b = gs.arena[0]
    cdef const Event* event
    cdef int32_t i, k, done = 0
    cdef Seq* q
    p.uniform = advance
    b.digest = mix(mix(b.digest, OP_STEP if advance else OP_RESERVE), p.num_rows)
    memmove(p.handle, handles, p.num_rows * sizeof(int64_t))    # the batch may be a part of the plan's own array
    p.mixed_rows = NO_BATCH
    if gs.tree != NULL:
        tree_loads(gs, p, advance)
    begin_commit(gs, p)
    for k in range(gs.num_groups):
        commit_group(gs, &gs.group[k], p.part[k], p)
    for i in range(p.num_events):
        event = &p.event[i]
        commit_simple(gs, p, done, event.row)
        done = event.row + 1
        q = &gs.seqs.seq[slot_of(p.handle[event.row])]
        q.num_tokens += event.q_len
        p.length[event.row] = q.num_tokens
        for k in range(gs.num_groups):
            enter_tail(gs, &gs.group[k], p.part[k], p, event, False)
        p.uniform &= event.q_len == 1
        if event.q_len != 1:
            b.digest = mix(b.digest, (<uint64_t>event.q_len << 1) | event.served)
        b.digest = mix(b.digest, <uint64_t>untagged(gs.seqs, q.handle) ^ (<uint64_t>q.num_tokens << 20))
    commit_simple(gs, p, done, p.num_rows)
    gs.seqs.sum_tokens += p.num_tokens
    if gs.tree != NULL and advance:
        tree_saves(gs, p)


# ---- a steady batch ----------------------------------------------------------------------------------------

cdef inline bint grows_by_one(const Groups* gs, const LayerGroup* g) noexcept nogil:
    """Whether a row that needs room for more appends just one id behind its blocks."""
    return gs.unit == 1 and g.scale == 0 and g.columns == 1 and gs.seqs.evicted_tokens == 0


cdef inline void append_to(Groups* gs, const LayerGroup* g, StepPart* part, int32_t slot, int32_t row, int32_t entries,
                           int32_t n) noexcept nogil:
    """Note that a row gets n entries behind those that it has."""
    note_change(part, row, 0, n * g.columns)
    note_changed(part, row)
    if gs.needed[g.arena] < g.blocks.num_blank:
        kv_prefetch(&g.blocks.block[g.blocks.blank[g.blocks.num_blank - 1 - gs.needed[g.arena]]])
    gs.needed[g.arena] += n * g.columns
    kv_prefetch(group_row(g, slot) + <int64_t>entries * g.columns)


cdef bint begin_entry(Groups* gs, const LayerGroup* g, StepPart* part, int32_t slot, int32_t row,
                      int64_t position) noexcept nogil:
    """A row gets room for `unit` blocks more: what it appends in a group. False: it is not steady there."""
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef int32_t entries = entries_of(g, slot, q.num_blocks), more = entries_of(g, slot, q.num_blocks + gs.unit)
    cdef int64_t index = entry_at(g, held_of(g, slot, position))
    if more > part.width:
        return False
    if index < entries:                         # a block of several of the pool's: there is room in it
        if not is_own(&g.blocks.block[group_row(g, slot)[index * g.columns]]):
            return False
        if not other_columns_own(g, slot, position):
            return False
    if more > entries:
        append_to(gs, g, part, slot, row, entries, more - entries)
    elif part.wire.seen[row] != tail_of(g, slot).version:
        note_changed(part, row)
    return True


@cython.callspec("__attribute__((always_inline))")      # else one row pays for the call
cdef inline Py_ssize_t steady_rows(Groups* gs, Step* p, const int64_t* handle, Py_ssize_t n, const Limits* limits,
                                   int64_t step_id) noexcept nogil:
    """Serve one token to each row in the first group, up to the first row that is not steady: its number is returned.

    This loop is the whole cost of a steady step of one group: it touches every sequence once, and all it reads is in
    locals. A row that comes twice shows by its step, which is not what all rows had before.
    """
    cdef Seqs* s = gs.seqs
    cdef Seq* seq = s.seq
    cdef const LayerGroup* g = &gs.group[0]
    cdef StepPart* part = p.part[0]
    cdef const Block* block = g.blocks.block
    cdef const uint64_t* seen = part.wire.seen
    cdef int64_t* slots = part.slot
    cdef int64_t* lengths = p.length
    cdef int64_t max_seqs = s.max_seqs
    cdef bint exact = is_exact(gs, limits), narrow = is_narrow(gs, limits), wide = g.columns > 1
    cdef bint looked = exact or wide or part.own_turns != g.blocks.turns or part.own_rows < n
    cdef bint by_one = grows_by_one(gs, g) and not exact
    cdef int64_t most = min(<int64_t>part.width, gs.most_blocks), bs = gs.block_size
    cdef int64_t row, slot, length, at, prev = -1
    cdef Py_ssize_t i
    cdef Event* event
    cdef Seq* q
    for i in range(n):
        row = handle[i]
        slot = row & (MAX_SEQS - 1)
        if slot >= max_seqs:
            break
        q = &seq[slot]
        if q.handle != row:
            break
        if seldom(q.last_step != prev):
            if i:
                break
            prev = q.last_step
        at = q.lead.next_slot
        length = q.num_tokens + 1
        if not seldom(at >= q.lead.stop_slot):
            if seldom(looked or seen[i] != q.lead.version):     # what the plan shows was within its limits, and own
                if not is_own(&block[q.lead.block]):
                    break
                if narrow and not within(gs, p, q, limits):
                    break
                if wide and not other_columns_own(g, <int32_t>slot, q.num_tokens):
                    break
                if seen[i] != q.lead.version:
                    note_changed(part, <int32_t>i)
            slots[i] = at
            q.lead.next_slot = at + 1
        else:
            if q.num_tokens != q.num_blocks * bs:
                break
            if by_one and q.num_blocks < most:
                append_to(gs, g, part, <int32_t>slot, <int32_t>i, q.num_blocks, 1)
            elif not (within(gs, p, q, limits)
                      and begin_entry(gs, g, part, <int32_t>slot, <int32_t>i, q.num_tokens)):
                break
            event = &p.event[p.num_events]
            event.row = <int32_t>i
            event.q_len = event.served = 1
            event.appended = gs.unit
            p.num_events += 1
        q.num_tokens = length
        lengths[i] = length
        q.last_step = step_id
    else:
        i = n
    p.all_prev = prev
    return i


cdef bint steady_tails(Groups* gs, const Step* p, int32_t k, const int64_t* handle) noexcept nogil:
    """The same rows in group `k`, behind the first: whether all are steady there."""
    cdef LayerGroup* g = &gs.group[k]
    cdef StepPart* part = p.part[k]
    cdef const Block* block = g.blocks.block
    cdef bint wide = g.columns > 1, looked = wide or part.own_turns != g.blocks.turns or part.own_rows < p.num_rows
    cdef int32_t i, slot, at = 0, begins = p.event[0].row if p.num_events else -1
    cdef Tail* t
    for i in range(p.num_rows):
        slot = slot_of(handle[i])
        t = tail_of(g, slot)
        if seldom(i == begins):
            if not begin_entry(gs, g, part, slot, i, p.length[i] - 1):
                return False
            at += 1
            begins = p.event[at].row if at < p.num_events else -1
            continue
        if t.next_slot >= t.stop_slot:
            return False
        if seldom(looked or part.wire.seen[i] != t.version):
            if not is_own(&block[t.block]) or (wide and not other_columns_own(g, slot, p.length[i] - 1)):
                return False
        put_in_tail(part, t, i)
    return True


cdef void take_begun(Groups* gs, LayerGroup* g, StepPart* part, const Step* p) noexcept nogil:
    """`commit_group` and `enter_tail` for rows that each append one id in a group that grows by one."""
    cdef int64_t* slots = part.slot
    cdef int64_t at, bs = g.block_size
    cdef uint64_t digest = gs.arena[0].digest, version = g.versions
    cdef int32_t i, slot, block
    cdef Tail* t
    blocks_take_many(g.blocks, part.taken, p.num_events)
    g.versions += p.num_events
    for i in range(p.num_events):
        slot = slot_of(p.handle[p.event[i].row])
        t = tail_of(g, slot)
        block = part.taken[i]
        group_row(g, slot)[gs.seqs.seq[slot].num_blocks - 1] = block
        digest = mix(digest, block)
        at = block * bs
        slots[p.event[i].row] = at
        t.block = block
        t.version = version + i + 1
        t.next_slot = at + 1
        t.stop_slot = at + bs
    gs.arena[0].digest = digest


cdef void keep_handles(const Seqs* s, Step* p, const int64_t* handle, int32_t n) noexcept nogil:
    """The handles of a batch, and their digest. Most steps of a plan are of the same rows, and keep both."""
    cdef int32_t i
    if p.mixed_rows == n and memcmp(p.handle, handle, n * sizeof(int64_t)) == 0:
        return
    memmove(p.handle, handle, n * sizeof(int64_t))          # the batch may be a part of the plan's own array
    p.mixed_rows = n
    p.mixed = n
    for i in range(n):
        p.mixed = mix(p.mixed, untagged(s, handle[i]))


cdef bint step_steady(Groups* gs, Step* p, const Ints* handles, const Ints* num_new, const Limits* limits,
                      int64_t step_id) noexcept nogil:
    """Serve a batch in one pass, if every row is steady and the blocks are there. If not, all is as it was."""
    cdef const int64_t* handle = <const int64_t*>handles.data
    cdef Py_ssize_t n = handles.size
    cdef int32_t i, k = 1
    if gs.has_states or n > limits.max_tokens or run_of_ones(num_new, 0, n) != n:
        return False
    begin_check(gs, p)
    p.num_rows = <int32_t>steady_rows(gs, p, handle, n, limits, step_id)
    while p.num_rows == n and k < gs.num_groups and steady_tails(gs, p, k, handle):
        k += 1
    if p.num_rows < n or k < gs.num_groups or short_arena(gs) >= 0:
        step_undo_check(gs, p, handle, True)
        return False
    keep_handles(gs.seqs, p, handle, <int32_t>n)
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_STEP), p.mixed)
    p.num_tokens = n
    p.uniform = True
    gs.seqs.sum_tokens += n
    begin_commit(gs, p)
    for k in range(gs.num_groups):
        p.part[k].num_copies = 0
        if p.num_events and grows_by_one(gs, &gs.group[k]):
            take_begun(gs, &gs.group[k], p.part[k], p)
        elif p.num_events:
            commit_group(gs, &gs.group[k], p.part[k], p)
            for i in range(p.num_events):
                enter_tail(gs, &gs.group[k], p.part[k], p, &p.event[i], True)
        p.part[k].own_turns = gs.group[k].blocks.turns
        p.part[k].own_rows = <int32_t>n
    return True


# ---- how a pending step ends -------------------------------------------------------------------------------

cdef void set_fences(Groups* gs, const Pending* pending) noexcept nogil:
    """Blocks that are released from now on wait for the steps that are pending now."""
    cdef int32_t k
    for k in range(gs.num_arenas):
        gs.arena[k].oldest_pending = pending.oldest.id if pending.oldest != NULL else 0
        gs.arena[k].newest_pending = pending.newest.id if pending.newest != NULL else 0


cdef void pending_add(Pending* pending, Step* p) noexcept nogil:
    set_flag(&p.pending, True)
    p.older = pending.newest
    p.newer = NULL
    if pending.newest != NULL:
        pending.newest.newer = p
    else:
        pending.oldest = p
    pending.newest = p
    pending.size += 1


cdef void pending_remove(Pending* pending, Step* p) noexcept nogil:
    set_flag(&p.pending, False)
    if p.older != NULL:
        p.older.newer = p.newer
    else:
        pending.oldest = p.newer
    if p.newer != NULL:
        p.newer.older = p.older
    else:
        pending.newest = p.older
    pending.size -= 1


cdef bint step_has_children(const Step* p, const Seqs* s) noexcept nogil:
    """Whether an open sequence inherited work of this step by a fork. O(max_seqs) if one ever did."""
    cdef int32_t slot
    if s.newest_fork_step < p.id:
        return False
    for slot in range(s.max_seqs):
        if s.life[slot].life == OPEN and s.life[slot].fork_step == p.id:
            return True
    return False


cdef inline int64_t first_read(const LayerGroup* g, int64_t position) noexcept nogil:
    """The first entry, apart from kept ones, that a query at a position or behind it reads."""
    if g.kind == WINDOW_LAYERS:
        return entry_at(g, max(position - g.reach + 1, <int64_t>0))
    return entry_at(g, position // g.reach * g.reach) if g.kind == CHUNK_LAYERS else 0


cdef void make_holes(LayerGroup* g, int32_t slot, int64_t length) noexcept nogil:
    """Release the entries that no query reads after a step that ended at a length, which is due."""
    cdef int64_t end = first_read(g, length - g.lookahead), index
    cdef int32_t* ids = group_row(g, slot)
    cdef int32_t first = max(g.kept, g.seq[slot].gone)
    for index in range(first * <int64_t>g.columns, end * g.columns):
        unref(g.blocks, ids[index])
        ids[index] = g.hole
    set_gone(g, slot, <int32_t>end)
    new_version(g, slot)


cdef void let_go(Groups* gs, LayerGroup* g, const Step* p) noexcept nogil:
    """Let go of what no later query of the rows of a step reads in a window or chunk."""
    cdef int64_t first = g.phase, mask = g.period - 1 if p.uniform and gs.seqs.num_late == 0 else 0
    cdef int32_t i
    for i in range(p.num_rows):
        if (p.length[i] - first) & mask:
            continue
        if p.length[i] >= g.seq[slot_of(p.handle[i])].due and seq_find(gs.seqs, p.handle[i]) >= 0:
            make_holes(g, slot_of(p.handle[i]), p.length[i])


cdef void step_release(Groups* gs, const Step* p) noexcept nogil:
    """The step was executed: let go of what it read last, then of what no later query of its rows reads."""
    cdef int32_t i, k, slot
    if gs.tree != NULL:
        tree_pass(gs, p)
    for k in range(gs.num_groups):
        log_release(&p.part[k].log, gs.group[k].blocks)
    for k in range(gs.num_groups if gs.lets_go else 0):
        if gs.group[k].kind == WINDOW_LAYERS or gs.group[k].kind == CHUNK_LAYERS:
            let_go(gs, &gs.group[k], p)
    for i in range(p.num_rows if gs.seqs.num_late else 0):
        slot = seq_find(gs.seqs, p.handle[i])
        if slot >= 0:
            gs.seqs.num_late -= gs.seqs.life[slot].late
            gs.seqs.life[slot].late = False


cdef void step_settle(Groups* gs, const Pending* pending, const Step* p) noexcept nogil:
    """A step has ended: recompute the floors that its logs touched, then let blocks out of limbo."""
    cdef const Step* other
    cdef Log* log
    cdef int32_t k, i
    for k in range(gs.num_groups):
        log = &p.part[k].log
        for i in range(log.size):
            gs.group[k].blocks.floor[log.entry[i].old] = 0
        other = pending.oldest
        while log.size and other != NULL:
            raise_floors(&other.part[k].log, gs.group[k].blocks)
            other = other.newer
        p.part[k].num_changes = log.size = 0
    for k in range(gs.num_arenas):
        blocks_drain_limbo(gs.arena[k])


cdef void step_pass(Groups* gs, const Pending* pending, const Step* p) noexcept nogil:
    """The oldest pending step has passed; it is off the list already."""
    set_fences(gs, pending)
    step_release(gs, p)
    step_settle(gs, pending, p)
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
        tail_of(g, slot).epoch += 1
        new_version(g, slot)


cdef void step_rollback(Groups* gs, const Pending* pending, const Step* p) noexcept nogil:
    """Undo the newest step, which is off the list already: the last group first."""
    cdef Seqs* s = gs.seqs
    cdef Event event
    cdef int32_t i, k, slot, at = 0
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_ROLLBACK), p.num_rows)
    if gs.tree != NULL:
        tree_undo(gs, p)
    set_fences(gs, pending)
    for k in range(gs.num_arenas):
        blocks_lower_fences(gs.arena[k])
    for i in range(p.num_rows):
        event = event_of(p, i, &at)
        slot = seq_find(s, p.handle[i])
        if slot >= 0:
            s.seq[slot].last_step = prev_of(p, i)
            s.seq[slot].num_tokens -= event.q_len
            s.seq[slot].num_blocks -= event.appended
            s.sum_tokens -= event.q_len
            s.sum_blocks -= event.appended
    for k in range(gs.num_groups - 1, -1, -1):
        rollback_group(&gs.group[k], p.part[k], p, s)
        wire_forget(&p.part[k].wire, p.num_rows, False)
    for i in range(p.num_rows):
        if seq_find(s, p.handle[i]) >= 0:
            tails_refresh(gs, slot_of(p.handle[i]))
    step_settle(gs, pending, p)
    if gs.tree != NULL:
        tree_undone(gs, p)
        tree_publish(gs)
