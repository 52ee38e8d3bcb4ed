"""The judge's books: layer groups. See docs/groups.md, which this follows word for word."""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from proof.fuzz._books cimport (
    NOBODY, V_CAPACITY, V_FULL, V_OK, V_SHORT, V_STATE, V_VALUE, Line, Page, Pending,
    add_ref, available, books_find, books_fork_line, books_free, books_free_line, books_init, books_open, drain_limbo,
    drop_ref, release, room, take, waits_for_step,
)
from proof.fuzz._books_prefix cimport books_reset

# ---- memory ------------------------------------------------------------------------------------------------

cdef int group_books_init(GroupBooks* gb, Books* head) noexcept nogil:
    """`head` is there; the sizes stand in the arenas of `more` and in the groups. 0, or -1 without memory."""
    cdef int32_t k, p, a
    cdef int64_t ids, seqs = head.max_seqs
    cdef Layers* g
    cdef Moves* m
    gb.arena[0] = head
    for a in range(1, gb.num_arenas):
        gb.arena[a] = &gb.more[a - 1]
        gb.arena[a].block_size = gb.arena[a].max_seqs = gb.arena[a].width = 1
        gb.arena[a].max_rows = gb.arena[a].max_tokens = gb.arena[a].num_spaces = 1
        gb.arena[a].steps_pend = head.steps_pend
        if books_init(gb.arena[a]):
            return -1
    gb.passed = <int64_t*>room(head, seqs, sizeof(int64_t))
    for k in range(gb.num_groups):
        g = &gb.layers[k]
        g.width = 1 if g.kind == STATE_KIND else <int32_t>ceil_entries(g, head.capacity)
        ids = <int64_t>g.width * g.columns
        g.table = <int32_t*>room(head, seqs * ids, sizeof(int32_t))
        g.entries = <int32_t*>room(head, seqs, sizeof(int32_t))
        for p in range(MAX_PLANS):
            m = &g.moves[p]
            m.entry = <Entry*>room(head, head.max_rows * ids, sizeof(Entry))
            m.undo = <int32_t*>room(head, head.max_rows * ids, sizeof(int32_t))
            m.appended = <int32_t*>room(head, head.max_rows, sizeof(int32_t))
            m.mirror = <int32_t*>room(head, head.max_rows * ids, sizeof(int32_t))
    return -1 if head.starved else 0


cdef void group_books_free(GroupBooks* gb) noexcept nogil:
    """All but arena 0."""
    cdef int32_t a
    for a in range(1, gb.num_arenas):
        books_free(gb.arena[a])


# ---- sequences ---------------------------------------------------------------------------------------------

cdef int groups_judge_open(GroupBooks* gb, int64_t tokens) noexcept nogil:
    cdef Books* b = gb.arena[0]
    cdef int64_t need
    cdef int32_t a, k
    if tokens > b.capacity:
        return V_CAPACITY
    for a in range(gb.num_arenas):
        need = 0
        for k in range(gb.num_groups):
            if gb.layers[k].arena == a and gb.layers[k].kind != STATE_KIND:
                need += ceil_entries(&gb.layers[k], tokens) * gb.layers[k].columns
        if need and need + (b.watermark if a == 0 else 0) > available(gb.arena[a]):
            gb.lack.arena, gb.lack.row, gb.lack.needed = a, -1, need
            return V_SHORT
    return V_FULL if b.num_live == b.max_seqs else V_OK


cdef void append(GroupBooks* gb, Layers* g, int32_t slot, int64_t entries) noexcept nogil:
    cdef int64_t k
    cdef int32_t* ids = row_of(g, slot) + <int64_t>g.entries[slot] * g.columns
    for k in range(entries * g.columns):
        ids[k] = take(gb.arena[g.arena])
    g.entries[slot] += <int32_t>entries


cdef void pop(GroupBooks* gb, Layers* g, int32_t slot, int64_t keep) noexcept nogil:
    """Entries leave the table, the last first, columns descending."""
    cdef int32_t* ids = row_of(g, slot)
    cdef int64_t k
    for k in range(<int64_t>g.entries[slot] * g.columns - 1, keep * g.columns - 1, -1):
        if ids[k] != GONE:
            drop_ref(gb.arena[g.arena], ids[k])
    g.entries[slot] = <int32_t>min(<int64_t>g.entries[slot], keep)


cdef int32_t groups_open(GroupBooks* gb, int64_t tokens) noexcept nogil:
    """Returns the slot."""
    cdef int32_t slot = books_open(gb.arena[0], 0, 0), k
    cdef Layers* g
    gb.passed[slot] = 0
    for k in range(gb.num_groups):
        g = &gb.layers[k]
        g.entries[slot] = 0
        append(gb, g, slot, 0 if g.kind == STATE_KIND else ceil_entries(g, tokens))
    return slot


cdef void groups_fork(GroupBooks* gb, int32_t parent, int32_t n, int32_t* children) noexcept nogil:
    """The children share the entries below the parent's length that are no holes, and the state."""
    cdef Books* b = gb.arena[0]
    cdef Layers* g
    cdef int32_t i, k, slot
    cdef int64_t at, entries
    for i in range(n):
        slot = children[i] = books_fork_line(b, parent)
        gb.passed[slot] = gb.passed[parent]
        for k in range(gb.num_groups):
            g = &gb.layers[k]
            entries = g.entries[parent]
            if g.kind != STATE_KIND:
                entries = min(entries, ceil_entries(g, b.line[parent].length))
            g.entries[slot] = <int32_t>entries
            for at in range(entries * g.columns):
                row_of(g, slot)[at] = row_of(g, parent)[at]
                if row_of(g, slot)[at] != GONE:
                    add_ref(gb.arena[g.arena], row_of(g, slot)[at])


cdef void groups_close(GroupBooks* gb, int32_t slot) noexcept nogil:
    cdef int32_t k
    for k in range(gb.num_groups):
        pop(gb, &gb.layers[k], slot, 0)
    books_free_line(gb.arena[0], slot)


cdef bint reads_hole(const GroupBooks* gb, const Layers* g, int32_t slot, int64_t position) noexcept nogil:
    """Whether a query there reads a token that was let go."""
    cdef int64_t at
    for at in range(g.entries[slot]):
        if row_of(g, slot)[at * g.columns] != GONE or at * g.size > position:
            continue
        if (at + 1) * g.size > first_read(g, position) or at * g.size < g.keep:
            return True
    return False


cdef int groups_judge_truncate(const GroupBooks* gb, int32_t slot, int64_t length) noexcept nogil:
    cdef const Books* b = gb.arena[0]
    cdef const Line* line = &b.line[slot]
    cdef int32_t k
    if length < 0 or length > line.length:
        return V_VALUE
    if waits_for_step(b, line):
        return V_STATE
    for k in range(gb.num_groups):
        if gb.layers[k].kind == STATE_KIND:
            if length != line.length:
                return V_VALUE
        elif reads_hole(gb, &gb.layers[k], slot, length):
            return V_VALUE
    return V_OK


cdef void groups_truncate(GroupBooks* gb, int32_t slot, int64_t length) noexcept nogil:
    cdef Books* b = gb.arena[0]
    cdef int32_t k
    for k in range(gb.num_groups):
        if gb.layers[k].kind != STATE_KIND:
            pop(gb, &gb.layers[k], slot, ceil_entries(&gb.layers[k], length))
    b.tokens -= b.line[slot].length - length
    b.line[slot].length = length
    b.line[slot].known = <int32_t>length
    b.line[slot].done = min(b.line[slot].done, length)
    gb.passed[slot] = min(gb.passed[slot], length + gb.lookahead)


# ---- what a batch will do ----------------------------------------------------------------------------------

cdef void replace(GroupBooks* gb, Layers* g, Moves* m, int32_t row, int32_t index, int32_t old, int32_t
                  tokens) noexcept nogil:
    """An id will be replaced: the rows behind see that, until the judgement is taken back."""
    cdef Page* page = &gb.arena[g.arena].page[old]
    cdef Entry* entry = &m.entry[m.num]
    entry.row, entry.index, entry.old, entry.tokens = row, index, old, tokens
    m.undo[m.num] = page.floor
    m.num += 1
    page.refs -= 1
    page.floor = max(page.floor, tokens)


cdef void take_back(GroupBooks* gb, Layers* g, Moves* m, int32_t first) noexcept nogil:
    """The judgement of the ids from `first` on was only one; they stay on the list of the plan."""
    cdef int32_t k
    for k in range(m.num - 1, first - 1, -1):
        gb.arena[g.arena].page[m.entry[k].old].refs += 1
        gb.arena[g.arena].page[m.entry[k].old].floor = m.undo[k]


cdef inline bint writable(const Books* b, int32_t block, int64_t valid) noexcept nogil:
    return b.page[block].refs == 1 and not b.page[block].final and valid >= b.page[block].floor


cdef void judge_state(GroupBooks* gb, Layers* g, Moves* m, int32_t row, int32_t slot) noexcept nogil:
    """A new slot for the state; in a pool in order the old one is written, unless others have it or read it."""
    cdef Books* b = gb.arena[g.arena]
    if g.entries[slot] == 0:
        m.appended[row] = 1
    elif b.steps_pend or not writable(b, row_of(g, slot)[0], 0):
        replace(gb, g, m, row, 0, row_of(g, slot)[0], 1)


cdef void judge_entries(GroupBooks* gb, Layers* g, Moves* m, int32_t row, int32_t slot, int64_t new) noexcept nogil:
    """An entry is written in place iff all its columns may be."""
    cdef int64_t length = gb.arena[0].line[slot].length, end = ceil_entries(g, length + new), index = length // g.size
    cdef int64_t valid = length - index * g.size
    cdef int32_t c
    cdef bint ours
    cdef const int32_t* ids
    m.appended[row] = <int32_t>max(end - g.entries[slot], <int64_t>0)
    for index in range(index, min(end, <int64_t>g.entries[slot])):
        ids = row_of(g, slot) + index * g.columns
        ours = True
        for c in range(g.columns):
            ours &= writable(gb.arena[g.arena], ids[c], valid)
        for c in range(0 if ours else g.columns):
            replace(gb, g, m, row, <int32_t>(index * g.columns + c), ids[c], <int32_t>valid)
        valid = 0


cdef int judge_row(GroupBooks* gb, int32_t k, int32_t row, int32_t slot, int64_t new, bint advance, bint partial,
                   int64_t* needed) noexcept nogil:
    """One row in all groups; `needed` counts what the rows before it take of each arena."""
    cdef int32_t[MOST_GROUPS] before
    cdef int64_t[MOST_ARENAS] due
    cdef Layers* g
    cdef Moves* m
    cdef int32_t i, a, lacking = -1
    for a in range(gb.num_arenas):
        due[a] = needed[a]
    for i in range(gb.num_groups):
        g, m = &gb.layers[i], &gb.layers[i].moves[k]
        before[i] = m.num
        m.appended[row] = 0
        if new and g.kind != STATE_KIND:
            judge_entries(gb, g, m, row, slot, new)
        elif new and advance:
            judge_state(gb, g, m, row, slot)
        due[g.arena] += m.num - before[i] + m.appended[row] * g.columns
    for a in range(gb.num_arenas - 1, -1, -1):
        if due[a] > available(gb.arena[a]):
            lacking = a
    if lacking < 0 or not partial:
        for a in range(gb.num_arenas):
            needed[a] = due[a]
        return lacking
    for i in range(gb.num_groups):
        take_back(gb, &gb.layers[i], &gb.layers[i].moves[k], before[i])
        gb.layers[i].moves[k].num = before[i]
        gb.layers[i].moves[k].appended[row] = 0
    return lacking


cdef int groups_judge_step(GroupBooks* gb, int32_t k, int32_t n, const int32_t* rows, const int64_t* new,
                           int64_t max_tokens, bint advance, bint partial) noexcept nogil:
    """What a batch will meet; who is served, and what is replaced and appended for him, stands in the plan."""
    cdef Books* b = gb.arena[0]
    cdef Pending* p = &b.plan[k]
    cdef int64_t[MOST_ARENAS] needed
    cdef int64_t asked = 0
    cdef int32_t row, i, lacking
    cdef int verdict = V_OK
    memset(needed, 0, sizeof(needed))
    gb.lack.row = -1
    for i in range(gb.num_groups):
        gb.layers[i].moves[k].num = 0
    for row in range(n):
        asked += new[row] if advance else 0
        if new[row] > b.capacity - b.line[rows[row]].length or asked > max_tokens:
            verdict = V_CAPACITY
            break
        lacking = judge_row(gb, k, row, rows[row], new[row], advance, partial, needed)
        p.served[row] = lacking < 0 or not partial
        if lacking >= 0 and not partial and verdict == V_OK:
            verdict = V_SHORT
            gb.lack.row, gb.lack.arena = row, lacking
    gb.lack.needed = needed[gb.lack.arena]
    for i in range(gb.num_groups):
        take_back(gb, &gb.layers[i], &gb.layers[i].moves[k], 0)
    return verdict


# ---- a step ------------------------------------------------------------------------------------------------

cdef void share_queue(GroupBooks* gb) noexcept nogil:
    """All arenas know which steps are pending."""
    cdef Books* b = gb.arena[0]
    cdef Books* other
    cdef int32_t a, i
    for a in range(1, gb.num_arenas):
        other = gb.arena[a]
        other.num_queue = b.num_queue
        for i in range(b.num_queue):
            other.queue[i] = b.queue[i]
            other.plan[b.queue[i]].step = b.plan[b.queue[i]].step


cdef void move(GroupBooks* gb, Layers* g, int32_t k, int32_t n, const int32_t* rows) noexcept nogil:
    """Blocks are taken: rows in order; in a row replaced entries, then appended ones."""
    cdef Books* b = gb.arena[g.arena]
    cdef Moves* m = &g.moves[k]
    cdef Entry* entry
    cdef int32_t row, at = 0
    for row in range(n):
        while at < m.num and m.entry[at].row == row:
            entry = &m.entry[at]
            entry.new = take(b)
            row_of(g, rows[row])[entry.index] = entry.new
            if entry.tokens and g.kind != STATE_KIND:
                b.cow_copies += 1
                b.cow_tokens += entry.tokens
            at += 1
        append(gb, g, rows[row], m.appended[row])


cdef void groups_step(GroupBooks* gb, int32_t k, int32_t n, const int32_t* rows, const int64_t* new,
                      bint advance) noexcept nogil:
    """Carry out what was judged for plan k."""
    cdef Books* b = gb.arena[0]
    cdef Pending* p = &b.plan[k]
    cdef Line* line
    cdef Page* page
    cdef Entry* entry
    cdef int32_t row, i, j
    p.step = b.next_step
    b.next_step += 1
    p.executed = p.noted = False
    p.rows = n
    if b.steps_pend:
        b.queue[b.num_queue] = k
        b.num_queue += 1
        share_queue(gb)
    for i in range(gb.num_groups):
        for j in range(gb.layers[i].moves[k].num):      # tables give the blocks up, the plan reads them still
            entry = &gb.layers[i].moves[k].entry[j]
            page = &gb.arena[gb.layers[i].arena].page[entry.old]
            page.refs -= 1
            gb.arena[gb.layers[i].arena].shared -= page.refs == 1
            page.holds += 1
            page.floor = max(page.floor, entry.tokens)
    for i in range(gb.num_groups):
        move(gb, &gb.layers[i], k, n, rows)
    for row in range(n):
        line = &b.line[rows[row]]
        p.handle[row], p.before[row], p.row_step[row] = line.handle, line.length, line.row_step
        if advance and p.served[row]:
            line.length += new[row]
            b.tokens += new[row]
        p.length[row] = line.length
        line.row_step = p.step if b.steps_pend else 0


# ---- how a step ends ---------------------------------------------------------------------------------------

cdef void lower_floors(GroupBooks* gb, int32_t k) noexcept nogil:
    """What the plan read is read by others that are pending, or by nobody."""
    cdef Books* b = gb.arena[0]
    cdef Layers* g
    cdef Page* page
    cdef const Moves* m
    cdef int32_t i, j, at
    for i in range(gb.num_groups):
        g = &gb.layers[i]
        for at in range(g.moves[k].num):
            gb.arena[g.arena].page[g.moves[k].entry[at].old].floor = 0
        g.moves[k].num = 0
    for i in range(gb.num_groups):
        g = &gb.layers[i]
        for j in range(b.num_queue):
            m = &g.moves[b.queue[j]]
            for at in range(m.num):
                page = &gb.arena[g.arena].page[m.entry[at].old]
                page.floor = max(page.floor, m.entry[at].tokens)


cdef void let_row_go(GroupBooks* gb, Layers* g, int32_t slot, int64_t position) noexcept nogil:
    """Entries that no query at a position or later can read are let go."""
    cdef int64_t i, end
    cdef int32_t c
    cdef int32_t* ids
    if position < 0 or g.kind == FULL_KIND or g.kind == STATE_KIND:
        return
    end = position - g.reach + 1 if g.kind == WINDOW_KIND else g.reach * (position // g.reach)
    for i in range(ceil_entries(g, g.keep), g.entries[slot]):
        ids = row_of(g, slot) + i * g.columns
        if (i + 1) * g.size <= end and ids[0] != GONE:
            for c in range(g.columns):
                drop_ref(gb.arena[g.arena], ids[c])
                ids[c] = GONE
            gb.let_go += 1


cdef void through(GroupBooks* gb, int32_t k) noexcept nogil:
    """A step has passed; it is off the queue."""
    cdef Books* b = gb.arena[0]
    cdef Pending* p = &b.plan[k]
    cdef Layers* g
    cdef int32_t i, row, slot, at
    p.step = 0
    share_queue(gb)
    for i in range(gb.num_groups):
        g = &gb.layers[i]
        for at in range(g.moves[k].num):
            gb.arena[g.arena].page[g.moves[k].entry[at].old].holds -= 1
            release(gb.arena[g.arena], g.moves[k].entry[at].old)
    lower_floors(gb, k)
    for row in range(p.rows):
        slot = books_find(b, p.handle[row])
        if slot == NOBODY:
            continue
        gb.passed[slot] = max(gb.passed[slot], p.length[row])
        for i in range(gb.num_groups):
            let_row_go(gb, &gb.layers[i], slot, p.length[row] - gb.lookahead)
    for i in range(gb.num_arenas):
        drain_limbo(gb.arena[i])


cdef void groups_pass_at_once(GroupBooks* gb, int32_t k) noexcept nogil:
    """In a pool that executes in order a step is done when it returns."""
    through(gb, k)


cdef void groups_done(GroupBooks* gb, int32_t k) noexcept nogil:
    """Plan k is declared done; the oldest leave as far as they were."""
    cdef Books* b = gb.arena[0]
    cdef int32_t i, oldest
    b.plan[k].noted = True
    while b.num_queue and b.plan[b.queue[0]].noted:
        oldest = b.queue[0]
        b.num_queue -= 1
        for i in range(b.num_queue):
            b.queue[i] = b.queue[i + 1]
        through(gb, oldest)


cdef void undo(GroupBooks* gb, Layers* g, int32_t k) noexcept nogil:
    """The newest plan is taken back in one group, its rows in reverse order."""
    cdef Books* b = gb.arena[g.arena]
    cdef Pending* p = &gb.arena[0].plan[k]
    cdef Moves* m = &g.moves[k]
    cdef Entry* entry
    cdef int32_t row, slot, at = m.num
    for row in range(p.rows - 1, -1, -1):
        slot = books_find(gb.arena[0], p.handle[row])
        if slot != NOBODY:
            pop(gb, g, slot, g.entries[slot] - m.appended[row])
        while at and m.entry[at - 1].row == row:
            at -= 1
            entry = &m.entry[at]
            b.page[entry.old].holds -= 1
            if slot == NOBODY:
                release(b, entry.old)
                continue
            row_of(g, slot)[entry.index] = entry.old
            add_ref(b, entry.old)
            drop_ref(b, entry.new)


cdef void groups_rollback(GroupBooks* gb, int32_t k) noexcept nogil:
    """The newest plan is taken back: the last group first."""
    cdef Books* b = gb.arena[0]
    cdef Pending* p = &b.plan[k]
    cdef Line* line
    cdef int32_t row, i, slot
    b.num_queue -= 1
    p.step = 0
    share_queue(gb)
    for row in range(p.rows - 1, -1, -1):
        slot = books_find(b, p.handle[row])
        if slot != NOBODY:
            line = &b.line[slot]
            b.tokens -= line.length - p.before[row]
            line.length = p.before[row]
            line.known = <int32_t>line.length
            line.row_step = p.row_step[row]
    for i in range(gb.num_groups - 1, -1, -1):
        undo(gb, &gb.layers[i], k)
    lower_floors(gb, k)
    for i in range(gb.num_arenas):
        drain_limbo(gb.arena[i])


cdef void groups_reset(GroupBooks* gb) noexcept nogil:
    """Nothing is open or pending."""
    cdef int32_t a
    for a in range(gb.num_arenas):
        books_reset(gb.arena[a])
