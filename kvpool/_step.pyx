"""One step of a batch: check everything, then commit; and how a pending step ends.

A step runs in two passes over its rows. `step_check` validates, counts the blocks that are needed and decides which
shared blocks must be replaced; all it moves are reference counts, as if the rows had been served in order, and
`step_undo_check` takes that back. `step_commit` cannot fail: it takes the blocks and moves the lengths.

The write rule (DESIGN 3.7 of the docs): a block is written in place iff it has one reference, is not committed, and
nothing that a pending copy reads from it would be overwritten. Holds of pending plans do not count as references.
"""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

from kvpool._args cimport Ints, ints_at
from kvpool._blocks cimport (
    Block,
    Blocks,
    blocks_available,
    blocks_hold,
    blocks_ref,
    blocks_settle,
    blocks_take,
    blocks_take_many,
    blocks_unhold,
    blocks_unref,
    blocks_unref_many,
)
from kvpool._sequence cimport OPEN, Seq, Seqs, seq_find, seq_refresh, seq_table, untagged
from kvpool._types cimport BAD_ROW, NO_MEMORY, OK, SHORT, mix

cdef enum:                   # continues the words of kvpool._sequence
    OP_STEP = 32
    OP_RESERVE
    OP_ROLLBACK


cdef int step_init(Step* p, int32_t max_rows) noexcept nogil:
    p.row = <StepRow*>calloc(max_rows, sizeof(StepRow))
    p.log_room = 16
    p.log = <Replaced*>calloc(p.log_room, sizeof(Replaced))
    p.max_rows = max_rows
    return OK if p.row != NULL and p.log != NULL else NO_MEMORY


cdef void step_free(Step* p) noexcept nogil:
    free(p.row)
    free(p.log)
    p.row = NULL
    p.log = NULL


# ---- pass 1: check -----------------------------------------------------------------------------------------

cdef inline bint writable(const Blocks* b, int32_t i, int64_t first_offset) noexcept nogil:
    """The write rule."""
    cdef const Block* block = &b.block[i]
    return block.refcount == 1 and not block.committed and (block.hold == 0 or first_offset >= b.floor[i])


cdef int log_replacement(Step* p, Blocks* b, int32_t row, int32_t index, int32_t old, int32_t tokens) noexcept nogil:
    cdef Replaced* log
    if p.log_size == p.log_room:
        log = <Replaced*>realloc(p.log, 2 * <size_t>p.log_room * sizeof(Replaced))
        if log == NULL:
            return NO_MEMORY
        p.log = log
        p.log_room *= 2
    log = &p.log[p.log_size]
    log.row = row
    log.index = index
    log.old = old
    log.tokens = tokens
    log.old_floor = b.floor[old]
    p.log_size += 1
    blocks_hold(b, old, tokens)
    return OK


cdef int check_writes(Step* p, const Seqs* s, Blocks* b, int32_t row, int64_t num_new) noexcept nogil:
    """Which blocks one row replaces and how many it appends, for `num_new` > 0 more tokens."""
    cdef StepRow* r = &p.row[row]
    cdef const Seq* q = &s.seq[r.seq]
    cdef const int32_t* table = seq_table(s, r.seq)
    cdef int64_t bs = b.block_size
    cdef int64_t total = (q.num_tokens + num_new + bs - 1) // bs
    cdef int64_t index = q.num_tokens // bs
    cdef int64_t offset = q.num_tokens - index * bs
    while index < total and index < q.num_blocks:
        if not writable(b, table[index], offset):
            if log_replacement(p, b, row, <int32_t>index, table[index], <int32_t>offset) != OK:
                return NO_MEMORY
            r.replaced += 1
        offset = 0
        index += 1
    r.appended = <int32_t>(total - q.num_blocks) if total > q.num_blocks else 0
    return OK


cdef inline int refuse(Verdict* v, Py_ssize_t row, int reason, int64_t value) noexcept nogil:
    v.row = row
    v.reason = reason
    v.value = value
    return BAD_ROW


cdef int step_check(Step* p, Seqs* s, Blocks* b, const Ints* handles, const Ints* num_new, Py_ssize_t n,
                    const Limits* limits, bint advance, bint partial, Verdict* v) noexcept nogil:
    """Fill `p.row` for a batch and judge it. Unless it returns OK the caller must `step_undo_check`."""
    cdef Py_ssize_t i
    cdef int64_t handle, new, end, asked = 0, need, available = blocks_available(b)
    cdef int32_t slot, log_before
    cdef Seq* q
    cdef StepRow* r
    v.row = v.short_row = -1
    v.needed = 0
    p.num_rows = <int32_t>n
    p.log_size = 0
    p.num_tokens = 0
    for i in range(n):
        handle = ints_at(handles, i)
        new = ints_at(num_new, i)
        slot = seq_find(s, handle)
        if slot < 0:
            return refuse(v, i, BAD_HANDLE, handle)
        q = &s.seq[slot]
        if q.mark == s.stamp:
            return refuse(v, i, DUPLICATE, handle)
        q.mark = s.stamp
        r = &p.row[i]
        r.handle = handle
        r.seq = slot
        r.served = 1
        r.appended = 0
        r.replaced = 0
        if new == 1 and advance and q.room > 0 and writable(b, q.tail, q.next_slot - q.tail * b.block_size):
            r.simple = 1
            r.q_len = 1
            asked += 1
            p.num_tokens += 1
            if q.num_tokens >= limits.seq_tokens:
                return refuse(v, i, SEQ_TOO_LONG, q.num_tokens + 1)
            if q.num_blocks > limits.table_width:
                return refuse(v, i, TABLE_TOO_WIDE, q.num_blocks)
            continue
        r.simple = 0
        r.q_len = 0
        if new < 0:
            return refuse(v, i, NEGATIVE, new)
        if new > limits.seq_tokens - q.num_tokens:
            return refuse(v, i, SEQ_TOO_LONG, new if new > INT64_MAX - q.num_tokens else q.num_tokens + new)
        log_before = p.log_size
        if new and check_writes(p, s, b, <int32_t>i, new) != OK:
            return NO_MEMORY
        if q.num_blocks + r.appended > limits.table_width:
            return refuse(v, i, TABLE_TOO_WIDE, q.num_blocks + r.appended)
        need = r.replaced + r.appended
        if advance:
            if new > limits.max_tokens - asked:
                return refuse(v, i, TOO_MANY_TOKENS, asked + new)
            asked += new
        if v.needed + need > available:
            if partial:
                step_undo_check(p, b, log_before)
                r.served = 0
                r.replaced = 0
                r.appended = 0
                if v.short_row < 0:
                    v.short_row = i
                continue
            if v.short_row < 0:
                v.short_row = i
        v.needed += need
        if advance:
            r.q_len = <int32_t>new
            p.num_tokens += new
    if asked > limits.max_tokens:
        return refuse(v, n - 1, TOO_MANY_TOKENS, asked)
    return SHORT if v.short_row >= 0 and not partial else OK


cdef void step_undo_check(Step* p, Blocks* b, int32_t keep) noexcept nogil:
    """Take back what step_check did to reference counts, down to `keep` log entries."""
    while p.log_size > keep:
        p.log_size -= 1
        blocks_unhold(b, p.log[p.log_size].old, p.log[p.log_size].old_floor)


# ---- pass 2: commit ----------------------------------------------------------------------------------------

cdef void commit_blocks(Step* p, Seqs* s, Blocks* b, StepRow* r, Replaced* log) noexcept nogil:
    """Take the blocks of one row: replacements by ascending index, then the new ones at the end."""
    cdef Seq* q = &s.seq[r.seq]
    cdef int32_t* table = seq_table(s, r.seq)
    cdef int32_t k
    for k in range(r.replaced):
        log[k].new = blocks_take(b)
        table[log[k].index] = log[k].new
        if log[k].tokens:
            p.copies[3 * p.num_copies] = log[k].old
            p.copies[3 * p.num_copies + 1] = log[k].new
            p.copies[3 * p.num_copies + 2] = log[k].tokens
            p.num_copies += 1
            b.cow_copies += 1
            b.cow_tokens += log[k].tokens
        b.digest = mix(b.digest, (<uint64_t>log[k].index << 32) | <uint32_t>log[k].new)
    q.epoch += r.replaced > 0
    if r.appended:
        blocks_take_many(b, table + q.num_blocks, r.appended)
        for k in range(r.appended):
            b.digest = mix(b.digest, table[q.num_blocks + k])
        q.num_blocks += r.appended
        s.sum_blocks += r.appended


cdef void step_commit(Step* p, Seqs* s, Blocks* b, int64_t step_id, bint advance) noexcept nogil:
    """Carry out a batch that step_check accepted. `step_id` is 0 in a pool that keeps no step pending."""
    cdef int32_t i, log_at = 0
    cdef StepRow* r
    cdef Seq* q
    cdef uint64_t h
    p.num_copies = 0
    b.digest = mix(mix(b.digest, OP_STEP if advance else OP_RESERVE), p.num_rows)
    for i in range(p.num_rows):
        r = &p.row[i]
        q = &s.seq[r.seq]
        r.prev_step = q.last_step
        q.last_step = step_id
        if r.simple:
            r.slot = q.next_slot
            q.next_slot += 1
            q.num_tokens += 1
            q.room -= 1
        else:
            commit_blocks(p, s, b, r, p.log + log_at)
            log_at += r.replaced
            q.num_tokens += r.q_len
            seq_refresh(s, b, r.seq)
        h = (<uint64_t>r.q_len << 33) ^ (<uint64_t>r.served << 32)
        b.digest = mix(b.digest, <uint64_t>untagged(r.handle) ^ h ^ (<uint64_t>q.num_tokens << 20))
    s.sum_tokens += p.num_tokens


# ---- how a pending step ends -------------------------------------------------------------------------------

cdef void step_release_holds(Step* p, Blocks* b) noexcept nogil:
    """The copies of a step were made: let go of their sources, in the order they were taken.

    A block that other pending plans hold too keeps a floor; the caller recomputes it from their logs.
    """
    cdef int32_t k
    cdef Block* block
    for k in range(p.log_size):
        block = &b.block[p.log[k].old]
        block.hold -= 1
        if block.hold == 0:
            b.floor[p.log[k].old] = 0
            blocks_settle(b, p.log[k].old)


cdef bint step_has_children(const Step* p, const Seqs* s) noexcept nogil:
    """Whether an open sequence inherited work of this step by a fork. O(max_seqs), on the failure path only."""
    cdef int32_t slot
    for slot in range(s.max_seqs):
        if s.seq[slot].life == OPEN and s.seq[slot].fork_step == p.id:
            return True
    return False


cdef void rollback_row(Step* p, Seqs* s, Blocks* b, const StepRow* r, const Replaced* log) noexcept nogil:
    cdef Seq* q = &s.seq[r.seq]
    cdef int32_t* table = seq_table(s, r.seq)
    cdef int32_t k
    q.last_step = r.prev_step
    q.num_tokens -= r.q_len
    s.sum_tokens -= r.q_len
    q.num_blocks -= r.appended
    s.sum_blocks -= r.appended
    blocks_unref_many(b, table + q.num_blocks, r.appended)
    for k in range(r.replaced - 1, -1, -1):
        table[log[k].index] = log[k].old
        b.block[log[k].old].hold -= 1
        blocks_ref(b, log[k].old, 1)
        blocks_unref(b, log[k].new)
    q.epoch += r.replaced > 0 or r.appended > 0
    seq_refresh(s, b, r.seq)


cdef void step_rollback(Step* p, Seqs* s, Blocks* b) noexcept nogil:
    """Undo the newest step. The plan is off the pending list already; the caller recomputes floors."""
    cdef int32_t i, k, log_at = p.log_size
    cdef StepRow* r
    b.digest = mix(mix(b.digest, OP_ROLLBACK), p.num_rows)
    for i in range(p.num_rows - 1, -1, -1):
        r = &p.row[i]
        log_at -= r.replaced
        if seq_find(s, r.handle) >= 0:
            rollback_row(p, s, b, r, p.log + log_at)
            continue
        for k in range(log_at + r.replaced - 1, log_at - 1, -1):
            b.block[p.log[k].old].hold -= 1
            blocks_settle(b, p.log[k].old)


cdef uint64_t step_fingerprint(const Step* p, const Seqs* s, uint64_t h, int64_t next_step) noexcept nogil:
    """Hash of a pending step: what its end will do."""
    cdef int32_t i
    h = mix(mix(mix(h, next_step - p.id), p.num_rows), p.noted_done)
    for i in range(p.num_rows):
        h = mix(h, untagged(p.row[i].handle))
        h = mix(mix(h, p.row[i].q_len), (<uint64_t>p.row[i].appended << 32) | <uint32_t>p.row[i].replaced)
        h = mix(h, next_step - p.row[i].prev_step if p.row[i].prev_step else 0)
    for i in range(p.log_size):
        h = mix(mix(h, p.log[i].index), (<uint64_t>p.log[i].old << 32) | <uint32_t>p.log[i].new)
        h = mix(h, p.log[i].tokens)
    return h
