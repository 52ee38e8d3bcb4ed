"""One step of a batch: check everything, then commit; and how a pending step ends.

A step runs in two passes over its rows. `step_check` validates, counts the blocks that are needed and decides which
shared blocks must be replaced; all it moves are reference counts, holds and floors, as if the rows had been served in
order, and `log_undo` takes that back. `step_commit` cannot fail: it takes the blocks and moves the lengths.

A steady batch, where each row has one token that needs no copy, is served by `step_steady` in one pass.

What stands in a `Log` is the same for one table and for the table of a layer group, so groups call its functions too.

The write rule (docs/core.md, Steps): a block is written in place iff it has one reference, is not committed, and
nothing that a pending copy reads from it would be overwritten. Holds of pending plans do not count as references.
"""

cdef extern from *:             # a thread may ask for its plan while another one's `done` lets it pass
    """
    static inline int kv_flag(const int *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
    static inline void kv_set_flag(int *at, int value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
    """
    bint flag "kv_flag"(const bint* at) noexcept nogil
    void set_flag "kv_set_flag"(bint* at, bint value) noexcept nogil


cdef int step_init(Step* p, int32_t max_rows) noexcept nogil:
    p.length = <int64_t*>xcalloc(max_rows, sizeof(int64_t))
    p.slot = <int64_t*>xcalloc(max_rows, sizeof(int64_t))
    p.prev_step = <int64_t*>xcalloc(max_rows, sizeof(int64_t))
    p.changed = <int32_t*>xcalloc(max_rows, sizeof(int32_t))
    p.event = <Event*>xcalloc(max_rows, sizeof(Event))
    p.max_rows = max_rows
    if (log_init(&p.log) != OK or p.length == NULL or p.slot == NULL or p.prev_step == NULL or p.changed == NULL
            or p.event == NULL):
        step_free(p)
        return NO_MEMORY
    return OK


cdef void step_free(Step* p) noexcept nogil:
    xfree(p.length)
    xfree(p.slot)
    xfree(p.prev_step)
    xfree(p.changed)
    xfree(p.event)
    xfree(p.log.entry)
    memset(p, 0, sizeof(Step))


# ---- what a step replaces in a table -----------------------------------------------------------------------

cdef int log_init(Log* log) noexcept nogil:
    log.room = 16
    log.entry = <Replaced*>xcalloc(log.room, sizeof(Replaced))
    return OK if log.entry != NULL else NO_MEMORY


cdef inline bint writable(const Blocks* b, int32_t i, int64_t first_offset) noexcept nogil:
    """The write rule."""
    cdef const Block* block = &b.block[i]
    return block.refcount == 1 and not block.committed and (block.hold == 0 or first_offset >= b.floor[i])


cdef int log_replacement(Log* log, Blocks* b, int32_t row, int32_t index, int32_t old, int32_t tokens) noexcept nogil:
    cdef Replaced* entry
    if log.size == log.room:
        entry = <Replaced*>xrealloc(log.entry, 2 * <size_t>log.room * sizeof(Replaced))
        if entry == NULL:
            return NO_MEMORY
        log.entry = entry
        log.room *= 2
    entry = &log.entry[log.size]
    entry.row = row
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


cdef inline int32_t note_copies(Log* log, Blocks* b, int32_t row, const int32_t* ids, int32_t columns, int64_t index,
                               int64_t end, int64_t offset) noexcept nogil:
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
                if log_replacement(log, b, row, <int32_t>(index * columns + c), ids[index * columns + c],
                                   <int32_t>offset) != OK:
                    return -1
            replaced += columns
        offset = 0
        index += 1
    return replaced


cdef inline int32_t replace_ids(Replaced* entry, int32_t n, Blocks* b, int32_t* ids, int64_t step_id, int32_t* copies,
                                int32_t num_copies, uint64_t* digest) noexcept nogil:
    """Take the blocks that replace n ids of a row; returns how many copies there are now.

    A replacement holds older tokens, and its copy is made when the pending step runs. Its fence is that step, so that
    nobody reads or commits it before.
    """
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


cdef inline void give_up_copy(Blocks* b, int32_t new) noexcept nogil:
    """The copy that was to fill a block will never be made."""
    if b.canonical != NULL:                 # NULL: an engine has its own index, says what is committed, and is told
        b.num_waiting -= b.block[new].committed == WAITING
        b.block[new].committed = PLAIN
    b.block[new].fence = 0


cdef inline void undo_replaced(const Replaced* entry, int32_t n, Blocks* b, int32_t* ids) noexcept nogil:
    """Put back what a step replaced in a row, the last first."""
    cdef int32_t k
    for k in range(n - 1, -1, -1):
        ids[entry[k].index] = entry[k].old
        b.block[entry[k].old].hold -= 1
        blocks_ref(b, entry[k].old, 1)
        give_up_copy(b, entry[k].new)
        blocks_unref(b, entry[k].new)


cdef inline void drop_replaced(const Replaced* entry, int32_t n, Blocks* b) noexcept nogil:
    """The same for a row that was closed since: it has no table to put anything back into."""
    cdef int32_t k
    for k in range(n - 1, -1, -1):
        b.block[entry[k].old].hold -= 1
        blocks_settle(b, entry[k].old)
        if b.block[entry[k].new].place == USED:     # somebody else has a reference
            give_up_copy(b, entry[k].new)


cdef void log_release(const Log* log, Blocks* b) noexcept nogil:
    """The copies of a step were made: let go of their sources, in the order they were taken.

    A block that other pending plans hold too keeps a floor; the caller recomputes it from their logs.
    """
    cdef int32_t k
    cdef Block* block
    for k in range(log.size):
        block = &b.block[log.entry[k].old]
        block.hold -= 1
        if block.hold == 0:
            b.floor[log.entry[k].old] = 0
            blocks_settle(b, log.entry[k].old)


cdef inline void clear_floors(const Log* log, Blocks* b) noexcept nogil:
    cdef int32_t k
    for k in range(log.size):
        b.floor[log.entry[k].old] = 0


cdef inline void raise_floors(const Log* log, Blocks* b) noexcept nogil:
    """Floors are no lower than what the copies of this log read."""
    cdef const Replaced* entry
    cdef int32_t k
    for k in range(log.size):
        entry = &log.entry[k]
        b.floor[entry.old] = max(b.floor[entry.old], entry.tokens)


cdef uint64_t log_fingerprint(const Log* log, uint64_t h) noexcept nogil:
    cdef const Replaced* entry
    cdef int32_t i
    for i in range(log.size):
        entry = &log.entry[i]
        h = mix(mix(h, entry.index), (<uint64_t>entry.old << 32) | <uint32_t>entry.new)
        h = mix(h, entry.tokens)
    return h


# ---- pass 1: check -----------------------------------------------------------------------------------------
cdef int check_writes(Step* p, const Seqs* s, Blocks* b, Event* event, int32_t slot, int64_t num_new) noexcept nogil:
    """Which blocks one row replaces and how many it appends, for `num_new` > 0 more tokens."""
    cdef const Seq* q = &s.seq[slot]
    cdef int64_t total = whole_blocks(b, q.kv_len + num_new + b.block_size - 1)
    cdef int64_t index = whole_blocks(b, q.kv_len)
    event.replaced = note_copies(&p.log, b, event.row, seq_table(s, slot), 1, index, min(total, <int64_t>q.num_blocks),
                                q.kv_len - index * b.block_size)
    event.appended = <int32_t>(total - q.num_blocks) if total > q.num_blocks else 0
    return OK if event.replaced >= 0 else NO_MEMORY


cdef int check_row(Step* p, const Seqs* s, Blocks* b, Event* event, Py_ssize_t i, int32_t slot, int64_t new,
                   const Limits* limits, Verdict* v) noexcept nogil:
    """Judge a row that may do more than put one token into its tail. Its event records what will happen to it."""
    cdef const Seq* q = &s.seq[slot]
    event.row = <int32_t>i
    event.q_len = event.appended = event.replaced = 0
    event.served = 1
    if new < 0:
        return refused(v, NEGATIVE_NEW, i, new, 0, 0, 0)
    if new > limits.seq_tokens - q.kv_len:
        return refused(v, SEQ_TOO_LONG, i, new if new > INT64_MAX - q.kv_len else q.kv_len + new, 0,
                       limits.seq_tokens, 0)
    if new and check_writes(p, s, b, event, slot, new) != OK:
        return refused(v, NO_MEMORY, i, p.log.room, 0, 0, 0)
    if q.num_blocks + event.appended > limits.table_width:
        return refused(v, TABLE_TOO_WIDE, i, q.num_blocks + event.appended, 0, limits.table_width, 0)
    return OK


cdef Py_ssize_t check_simple(const Seqs* s, const Blocks* b, const int64_t* handle, Py_ssize_t first, Py_ssize_t end,
                             const Limits* limits) noexcept nogil:
    """Return the first row from `first` on that is not one token into a tail of its own. Mark the rows before it.

    In a mixed batch most rows are of this kind: everything that this loop and commit_simple read is in locals.
    """
    cdef Seq* seq = s.seq
    cdef const Block* block = b.block
    cdef int64_t max_seqs = s.max_seqs, seq_tokens = limits.seq_tokens
    cdef int32_t table_width = limits.table_width
    cdef bint narrow = table_width < s.max_blocks or seq_tokens < s.max_blocks * b.block_size
    cdef uint32_t stamp = s.stamp
    cdef const Block* tail
    cdef int64_t slot
    cdef Seq* q
    while first < end:
        slot = handle[first] & (MAX_SEQS - 1)
        if slot >= max_seqs:
            break
        q = &seq[slot]
        if q.handle != handle[first] or q.mark == stamp or q.next_slot >= q.stop_slot:
            break
        tail = &block[q.tail]
        if (tail.refcount ^ 1) | tail.hold | tail.committed:
            break
        if narrow and (q.kv_len >= seq_tokens or q.num_blocks > table_width):
            break
        q.mark = stamp
        first += 1
    return first


cdef inline Py_ssize_t run_of_ones(const Ints* num_new, Py_ssize_t i, Py_ssize_t n) noexcept nogil:
    """First row from i on that has not exactly one new token."""
    if num_new.data == NULL:
        return n if num_new.scalar == 1 else i
    while i < n and ints_at(num_new, i) == 1:
        i += 1
    return i


cdef int step_check(Step* p, Seqs* s, Blocks* b, const Ints* handles, const Ints* num_new, const Limits* limits,
                    bint advance, bint partial, Verdict* v) noexcept nogil:
    """Judge a batch and note what it will do. Unless it returns OK the caller must `log_undo`.

    Rows i .. simple - 1 take the fast path: one token into a tail that only they use. `room` is how many more rows
    may do so within the limit of tokens.
    """
    cdef Py_ssize_t i = 0, simple, room, ones = 0       # rows i .. ones - 1 have one new token each
    cdef Py_ssize_t short_row = -1
    cdef const int64_t* handle = <const int64_t*>handles.data
    cdef int64_t new, need, asked = 0, unserved = 0, available = blocks_available(b)
    cdef int32_t slot, log_before
    cdef int status
    cdef Event* event
    v.needed = 0
    p.num_rows = <int32_t>handles.size
    p.num_events = p.log.size = 0
    while i < handles.size:
        if advance:
            ones = run_of_ones(num_new, max(i, ones), handles.size)
            room = <Py_ssize_t>min(limits.max_tokens - asked, <int64_t>(handles.size - i))
            simple = check_simple(s, b, handle, i, min(ones, i + room), limits)
            asked += simple - i
            i = simple
            if i == handles.size:
                break
        slot = seq_judge(s, handle[i], i, v)
        if slot < 0:
            return v.reason
        if s.seq[slot].mark == s.stamp:
            return refused(v, DUPLICATE_HANDLE, i, handle[i], 0, 0, 0)
        s.seq[slot].mark = s.stamp
        new = ints_at(num_new, i)
        event = &p.event[p.num_events]
        log_before = p.log.size
        status = check_row(p, s, b, event, i, slot, new, limits, v)
        if status != OK:
            return status
        p.num_events += 1
        if advance:
            if new > limits.max_tokens - asked:
                return refused(v, TOO_MANY_TOKENS, i, asked + new, 0, limits.max_tokens, 0)
            asked += new
            event.q_len = <int32_t>new
        need = event.replaced + event.appended
        if v.needed + need > available:
            if short_row < 0:
                short_row = i
            if partial:
                log_undo(&p.log, b, log_before)
                event.served = 0
                event.q_len = event.replaced = event.appended = 0
                unserved += new
                need = 0
        v.needed += need
        i += 1
    p.num_tokens = asked - unserved
    if short_row >= 0 and not partial:
        return blocks_short(b, v, 0, short_row, handle[short_row], v.needed, v.needed - available)
    return OK


cdef int step_check_unshare(Step* p, Seqs* s, Blocks* b, const Ints* handles, const Ints* lens, int64_t first,
                            const Limits* limits, Verdict* v) noexcept nogil:
    """Judge a batch that gets blocks of its own for compaction to `lens` tokens; like `step_check` otherwise."""
    cdef int64_t available = blocks_available(b), length
    cdef int32_t i, slot, index, short_row = -1
    cdef const Seq* q
    cdef Event* event
    v.needed = 0
    p.num_rows = <int32_t>handles.size
    p.num_events = p.log.size = 0
    p.num_tokens = 0
    for i in range(p.num_rows):
        slot = seq_judge(s, ints_at(handles, i), i, v)
        if slot < 0:
            return v.reason
        q = &s.seq[slot]
        if q.mark == s.stamp:
            return refused(v, DUPLICATE_HANDLE, i, q.handle, 0, 0, 0)
        s.seq[slot].mark = s.stamp
        length = ints_at(lens, i)
        if length < 0 or length > q.kv_len:
            return refused(v, BAD_LENGTH, i, length, 0, q.kv_len, 0)
        if q.kv_len > limits.seq_tokens:
            return refused(v, SEQ_TOO_LONG, i, q.kv_len, 0, limits.seq_tokens, 0)
        if q.num_blocks > limits.table_width:
            return refused(v, TABLE_TOO_WIDE, i, q.num_blocks, 0, limits.table_width, 0)
        event = &p.event[i]
        event.row = i
        event.q_len = event.appended = event.replaced = 0
        event.served = 1
        p.num_events += 1
        index = seq_rewritten(s, b, slot, first, length, 0)
        while index >= 0:
            if log_replacement(&p.log, b, i, index, seq_table(s, slot)[index], <int32_t>min(
                    b.block_size, q.kv_len - index * b.block_size)) != OK:
                return refused(v, NO_MEMORY, i, p.log.room, 0, 0, 0)
            event.replaced += 1
            index = seq_rewritten(s, b, slot, first, length, index + 1)
        v.needed += event.replaced
        if v.needed > available and short_row < 0:
            short_row = i
    if short_row >= 0:
        return blocks_short(b, v, 0, short_row, ints_at(handles, short_row), v.needed, v.needed - available)
    return OK


# ---- pass 2: commit ----------------------------------------------------------------------------------------

cdef void commit_blocks(Step* p, Seqs* s, Blocks* b, const Event* event, int32_t slot, Replaced* log,
                        int64_t step_id) noexcept nogil:
    """Take the blocks of one row: replacements by ascending index, then the new ones at the end."""
    cdef Seq* q = &s.seq[slot]
    cdef int32_t* table = seq_table(s, slot)
    cdef int32_t k
    p.num_copies = replace_ids(log, event.replaced, b, table, step_id, p.copies, p.num_copies, &b.digest)
    q.epoch += event.replaced > 0
    if event.appended:
        blocks_take_many(b, table + q.num_blocks, event.appended)
        for k in range(event.appended):
            b.digest = mix(b.digest, table[q.num_blocks + k])
        q.num_blocks += event.appended
        s.sum_blocks += event.appended
    if event.replaced or event.appended:
        seq_new_version(s, q)
    q.kv_len += event.q_len
    seq_refresh(s, b, slot)


cdef int64_t last_slot(const Seqs* s, const Blocks* b, int32_t slot) noexcept nogil:
    """Where the last token of a sequence is, -1 for an empty one."""
    cdef int64_t position = s.seq[slot].kv_len - 1
    cdef int64_t index = whole_blocks(b, position)
    return (seq_table(s, slot)[index] - index) * b.block_size + position if position >= 0 else -1


cdef inline void note_changed(Step* p, int32_t row) noexcept nogil:
    """The plan shows another table than the row has now."""
    p.changed[p.num_changed] = row
    p.num_changed += 1


cdef void commit_simple(Step* p, Seqs* s, Blocks* b, const int64_t* handles, int32_t first, int32_t end,
                        int64_t step_id) noexcept nogil:
    """One token into the tail of each row."""
    cdef Seq* seq = s.seq
    cdef int64_t* length = p.length
    cdef int64_t* slot = p.slot
    cdef const uint64_t* seen = p.seen
    cdef uint64_t digest = b.digest
    cdef int32_t i
    cdef Seq* q
    for i in range(first, end):
        q = &seq[handles[i] & (MAX_SEQS - 1)]
        slot[i] = q.next_slot
        q.next_slot += 1
        q.kv_len += 1
        length[i] = q.kv_len
        if seen[i] != q.version:
            note_changed(p, i)
        if step_id:
            p.prev_step[i] = q.last_step
            q.last_step = step_id
        digest = mix(digest, <uint64_t>untagged(s, handles[i]) ^ (<uint64_t>length[i] << 20))
    b.digest = digest


cdef void step_commit(Step* p, Seqs* s, Blocks* b, const int64_t* handles, bint advance, bint pends) noexcept nogil:
    """Carry out a batch that step_check accepted."""
    cdef int32_t i, k, slot, done = 0, log_at = 0
    cdef int64_t step_id = p.id if pends else 0
    cdef const Event* event
    cdef Seq* q
    p.num_copies = p.num_changed = 0
    p.uniform = advance
    b.digest = mix(mix(b.digest, OP_STEP if advance else OP_RESERVE), p.num_rows)
    memmove(p.handle, handles, p.num_rows * sizeof(int64_t))    # the batch may be a part of the plan's own array
    handles = p.handle
    for k in range(p.num_events):
        event = &p.event[k]
        i = event.row
        commit_simple(p, s, b, handles, done, i, step_id)
        done = i + 1
        slot = slot_of(handles[i])
        commit_blocks(p, s, b, event, slot, p.log.entry + log_at, step_id)
        log_at += event.replaced
        p.uniform &= event.q_len == 1
        q = &s.seq[slot]
        p.slot[i] = last_slot(s, b, slot)
        p.length[i] = q.kv_len
        if p.seen[i] != q.version:
            note_changed(p, i)
        p.prev_step[i] = q.last_step
        q.last_step = step_id
        if event.q_len != 1:
            b.digest = mix(b.digest, (<uint64_t>event.q_len << 1) | event.served)
        b.digest = mix(b.digest, <uint64_t>untagged(s, handles[i]) ^ (<uint64_t>q.kv_len << 20))
    commit_simple(p, s, b, handles, done, p.num_rows, step_id)
    s.sum_tokens += p.num_tokens


# ---- a steady batch ----------------------------------------------------------------------------------------

cdef int32_t begin_block(Step* p, const Seqs* s, const Blocks* b, int32_t slot, Py_ssize_t i,
                         const Limits* limits) noexcept nogil:
    """Point row i, whose table is full, at the block that it will get, and note an event; NO_BLOCK: not steady."""
    cdef Seq* q = &s.seq[slot]
    cdef Event* event = &p.event[p.num_events]
    if (q.kv_len != q.num_blocks * b.block_size or q.kv_len >= limits.seq_tokens
            or q.num_blocks >= limits.table_width or p.num_events == blocks_available(b)):
        return NO_BLOCK
    q.tail = blocks_after(b, p.num_events, p.newest)
    q.next_slot = q.tail * b.block_size
    q.stop_slot = q.next_slot + b.block_size
    event.row = <int32_t>i
    event.q_len = event.appended = 1
    event.replaced = 0
    event.served = 1
    p.num_events += 1
    p.newest = q.tail
    kv_prefetch(seq_table(s, slot) + q.num_blocks)
    return q.tail


cdef void take_begun(Step* p, Seqs* s, Blocks* b, const int64_t* handle) noexcept nogil:
    """Take the blocks that rows have begun, in their order."""
    cdef int32_t k, slot
    cdef Seq* q
    for k in range(p.num_events):
        slot = slot_of(handle[p.event[k].row])
        q = &s.seq[slot]
        seq_table(s, slot)[q.num_blocks] = blocks_take(b)
        q.num_blocks += 1
        seq_new_version(s, q)
    s.sum_blocks += p.num_events


cdef inline Py_ssize_t steady_rows(Step* p, const Seqs* s, const Blocks* b, const int64_t* handle, Py_ssize_t n,
                                   const Limits* limits, int64_t step_id, uint64_t* digest,
                                   bint pends) noexcept nogil:
    """Serve one token to each row, up to the first row that is not steady, whose number is returned.

    This loop is the whole cost of a steady step: it touches every sequence once, and all it reads is in locals. The
    compiler makes a loop for each value of `pends`. In a step that pends, a row that comes twice shows by its step.
    """
    cdef Seq* seq = s.seq
    cdef const Block* block = b.block
    cdef const uint64_t* seen = p.seen
    cdef int64_t* slots = p.slot
    cdef int64_t* lengths = p.length
    cdef int64_t* prev = p.prev_step
    cdef int64_t max_seqs = s.max_seqs, seq_tokens = limits.seq_tokens
    cdef int32_t table_width = limits.table_width, id
    cdef bint narrow = table_width < s.max_blocks or seq_tokens < s.max_blocks * b.block_size, changed
    cdef uint32_t stamp = s.stamp
    cdef uint64_t h = digest[0]
    cdef const Block* tail
    cdef int64_t row, slot, length
    cdef Py_ssize_t i
    cdef Seq* q
    p.num_events = p.num_changed = 0
    p.newest = NO_BLOCK
    for i in range(n):
        row = handle[i]
        slot = row & (MAX_SEQS - 1)
        if slot >= max_seqs:
            break
        q = &seq[slot]
        if q.handle != row or (q.last_step == step_id if pends else q.mark == stamp):
            break
        if q.next_slot < q.stop_slot:
            tail = &block[q.tail]
            if (tail.refcount ^ 1) | tail.hold | tail.committed:
                break
            if narrow and (q.kv_len >= seq_tokens or q.num_blocks > table_width):
                break
            changed = seen[i] != q.version
        else:
            id = begin_block(p, s, b, <int32_t>slot, i, limits)
            if id == NO_BLOCK:
                break
            h = mix(h, id)
            changed = True
        if changed:
            note_changed(p, <int32_t>i)
        slots[i] = q.next_slot
        q.next_slot += 1
        length = q.kv_len + 1
        q.kv_len = length
        lengths[i] = length
        if pends:
            prev[i] = q.last_step
            q.last_step = step_id
        else:
            q.mark = stamp
        h = mix(h, <uint64_t>untagged(s, row) ^ (<uint64_t>length << 20))
    else:
        i = n
    digest[0] = h
    return i


cdef void undo_steady(const Step* p, const Seqs* s, const Blocks* b, const int64_t* handle, Py_ssize_t n,
                      int64_t step_id) noexcept nogil:
    """Take back what `steady_rows` did to n rows."""
    cdef Py_ssize_t i
    cdef int32_t k
    cdef Seq* q
    for i in range(n):
        q = &s.seq[slot_of(handle[i])]
        q.next_slot -= 1
        q.kv_len -= 1
        if step_id:
            q.last_step = p.prev_step[i]
    for k in range(p.num_events):
        seq_refresh(s, b, slot_of(handle[p.event[k].row]))


cdef bint step_steady(Step* p, Seqs* s, Blocks* b, const Ints* handles, const Ints* num_new, const Limits* limits,
                      int64_t step_id) noexcept nogil:
    """Serve a batch in one pass, if each row has one token that needs no copy. If not, nothing has happened.

    The result is that of `step_check` and `step_commit`.
    """
    cdef const int64_t* handle = <const int64_t*>handles.data
    cdef uint64_t digest = mix(mix(b.digest, OP_STEP), handles.size)
    cdef Py_ssize_t served
    if handles.size > limits.max_tokens or run_of_ones(num_new, 0, handles.size) != handles.size:
        return False
    if step_id:
        served = steady_rows(p, s, b, handle, handles.size, limits, step_id, &digest, True)
    else:
        served = steady_rows(p, s, b, handle, handles.size, limits, step_id, &digest, False)
    if served < handles.size:
        undo_steady(p, s, b, handle, served, step_id)
        seqs_new_stamp(s)
        return False
    take_begun(p, s, b, handle)
    memmove(p.handle, handle, handles.size * sizeof(int64_t))       # the batch may be a part of the plan's own array
    b.digest = digest
    p.num_rows = <int32_t>handles.size
    p.num_tokens = handles.size
    p.num_copies = 0
    p.log.size = 0
    p.uniform = True
    s.sum_tokens += handles.size
    return True


# ---- how a pending step ends -------------------------------------------------------------------------------

cdef inline void set_fences(const Pending* pending, Blocks* b) noexcept nogil:
    """Blocks that are released from now on wait for the steps that are pending now."""
    b.oldest_pending = pending.oldest.id if pending.oldest != NULL else 0
    b.newest_pending = pending.newest.id if pending.newest != NULL else 0


cdef void pending_add(Pending* pending, Step* p) noexcept nogil:
    """A step is the newest pending one."""
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
    """A step is pending no more."""
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


cdef void pending_settle(const Pending* pending, Step* p, Blocks* b) noexcept nogil:
    """A step has ended: recompute the floors that its log touched, then let blocks out of limbo."""
    cdef const Step* other = pending.oldest
    clear_floors(&p.log, b)
    while p.log.size and other != NULL:
        raise_floors(&other.log, b)
        other = other.newer
    p.log.size = 0
    blocks_drain_limbo(b)


cdef bint step_has_children(const Step* p, const Seqs* s) noexcept nogil:
    """Whether an open sequence inherited work of this step by a fork. O(max_seqs) if one ever did."""
    cdef int32_t slot
    if s.newest_fork_step < p.id:
        return False
    for slot in range(s.max_seqs):
        if s.life[slot].life == OPEN and s.life[slot].fork_step == p.id:
            return True
    return False


cdef void rollback_row(Seqs* s, Blocks* b, int32_t slot, int32_t q_len, int32_t appended, const Replaced* log,
                       int32_t replaced) noexcept nogil:
    cdef Seq* q = &s.seq[slot]
    cdef int32_t* table = seq_table(s, slot)
    q.kv_len -= q_len
    s.sum_tokens -= q_len
    q.num_blocks -= appended
    s.sum_blocks -= appended
    blocks_unref_many(b, table + q.num_blocks, appended)
    undo_replaced(log, replaced, b, table)
    if replaced or appended:
        q.epoch += 1
        seq_new_version(s, q)
    seq_refresh(s, b, slot)


cdef void step_rollback(Step* p, Seqs* s, Blocks* b) noexcept nogil:
    """Undo the newest step. The plan is off the pending list already; the caller recomputes floors."""
    cdef int32_t i, slot, log_at = p.log.size, at = p.num_events - 1
    cdef Event plain
    cdef const Event* event
    plain.q_len = 1
    plain.appended = plain.replaced = 0
    b.digest = mix(mix(b.digest, OP_ROLLBACK), p.num_rows)
    for i in range(p.num_rows - 1, -1, -1):
        event = &plain
        if at >= 0 and p.event[at].row == i:
            event = &p.event[at]
            at -= 1
        log_at -= event.replaced
        slot = seq_find(s, p.handle[i])
        if slot >= 0:
            s.seq[slot].last_step = p.prev_step[i]
            rollback_row(s, b, slot, event.q_len, event.appended, p.log.entry + log_at, event.replaced)
        else:
            drop_replaced(p.log.entry + log_at, event.replaced, b)


cdef uint64_t step_fingerprint(const Step* p, const Seqs* s, uint64_t h, int64_t next_step) noexcept nogil:
    """Hash of a pending step: what its end will do."""
    cdef int32_t i, at = 0
    cdef Event plain
    cdef const Event* event
    plain.q_len = 1
    plain.appended = plain.replaced = 0
    h = mix(mix(mix(h, next_step - p.id), p.num_rows), p.noted_done)
    for i in range(p.num_rows):
        event = &plain
        if at < p.num_events and p.event[at].row == i:
            event = &p.event[at]
            at += 1
        h = mix(h, untagged(s, p.handle[i]))
        h = mix(h, next_step - p.prev_step[i] if p.prev_step[i] else 0)
        h = mix(mix(h, event.q_len), (<uint64_t>event.appended << 32) | <uint32_t>event.replaced)
    return log_fingerprint(&p.log, h)


cdef bint check_fences(const Blocks* b, const Pending* pending, char* finding) noexcept nogil:
    """Pending steps must be in their order, and the fences of blocks those of the oldest and newest."""
    cdef const Step* p = pending.oldest
    cdef int64_t last = 0
    cdef int32_t size = 0
    while p != NULL:
        if p.id <= last or not p.pending:
            return snprintf(finding, FINDING, b"step %lld is pending behind step %lld", <long long>p.id,
                            <long long>last) > 0
        last = p.id
        size += 1
        p = p.newer
    if size != pending.size or b.newest_pending != last or b.oldest_pending != (pending.oldest.id if size else 0):
        return snprintf(finding, FINDING, b"%d steps are pending up to %lld, the fences say %lld .. %lld", size,
                        <long long>last, <long long>b.oldest_pending, <long long>b.newest_pending) > 0
    return False


cdef void count_holds(const Log* log, const Blocks* b, int64_t id, int32_t* holds, int32_t* floors, int32_t*
                      made) noexcept nogil:
    """Add what a pending step holds in one set of blocks."""
    cdef const Replaced* entry
    cdef int32_t k
    for k in range(log.size):
        entry = &log.entry[k]
        holds[entry.old] += 1
        floors[entry.old] = max(floors[entry.old], entry.tokens)
        made[0] += b.block[entry.new].place == USED and b.block[entry.new].fence == id


cdef bint compare_holds(const Blocks* b, const int32_t* holds, const int32_t* floors, int32_t made, char*
                        finding) noexcept nogil:
    """Holds and floors of blocks are those that were counted; `made` blocks are dst of pending copies."""
    cdef int32_t k
    for k in range(b.num_blocks):
        made -= b.block[k].place == USED and unwritten(b, k)
        if b.block[k].hold != holds[k] or b.floor[k] != floors[k]:
            return snprintf(finding, FINDING, b"block %d has hold %d and floor %d, pending plans say %d and %d", k,
                            b.block[k].hold, b.floor[k], holds[k], floors[k]) > 0
    if made != 0:
        return snprintf(finding, FINDING, b"%d more blocks are made by pending copies than wait for one", made) > 0
    return False
