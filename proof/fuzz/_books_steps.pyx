"""The judge's books: steps, and how they end. See docs/core.md, which this follows word for word."""
from libc.stdint cimport int32_t, int64_t

from proof.fuzz._books cimport (
    NOBODY,
    V_CAPACITY,
    V_OK,
    V_SHORT,
    V_STATE,
    V_VALUE,
    Entry,
    Line,
    Page,
    add_ref,
    available,
    books_find,
    ceil_blocks,
    drain_limbo,
    drop_ref,
    line_table,
    release,
    take,
    waits_for_step,
)
from proof.fuzz._books_prefix cimport publish_waiting

# ---- what a batch will do ----------------------------------------------------------------------------------

cdef void replace(Books* b, Pending* p, int32_t row, int32_t index, int32_t old, int32_t tokens) noexcept nogil:
    """A table entry will be replaced: the rows behind see that, until the judgement is taken back."""
    cdef Entry* entry = &p.entry[p.num_entries]
    cdef Page* page = &b.page[old]
    entry.row = row
    entry.index = index
    entry.old = old
    entry.tokens = tokens
    b.undo[p.num_entries] = page.floor
    p.num_entries += 1
    page.refs -= 1
    if tokens > page.floor:
        page.floor = tokens


cdef void take_back(Books* b, Pending* p, int32_t entries) noexcept nogil:
    """The judgement of the entries from `entries` on was only one; they stay on the list of the plan."""
    cdef int32_t k
    for k in range(p.num_entries - 1, entries - 1, -1):
        b.page[p.entry[k].old].refs += 1
        b.page[p.entry[k].old].floor = b.undo[k]


cdef int64_t judge_writes(Books* b, Pending* p, int32_t row, int32_t slot, int64_t new) noexcept nogil:
    """The blocks that one row takes for `new` > 0 more tokens."""
    cdef const Line* line = &b.line[slot]
    cdef int64_t index = line.length // b.block_size, end = ceil_blocks(b, line.length + new), need = 0
    cdef int32_t valid = <int32_t>(line.length - index * b.block_size), i
    cdef const Page* page
    p.appended[row] = <int32_t>max(end - line.blocks, 0)
    while index < end and index < line.blocks:
        i = line_table(b, slot)[index]
        page = &b.page[i]
        if page.refs != 1 or page.final or valid < page.floor:
            replace(b, p, row, <int32_t>index, i, valid)
            need += 1
        valid = 0
        index += 1
    return need + p.appended[row]


cdef int books_judge_step(Books* b, Pending* p, int32_t n, const int32_t* rows, const int64_t* new, int64_t max_tokens,
                          bint advance, bint partial) noexcept nogil:
    """What a batch will meet; who is served, and what is replaced and appended for him, stands in the plan."""
    cdef int64_t free_blocks = available(b), asked = 0, needed = 0, need
    cdef int32_t row, entries
    cdef int verdict = V_OK
    p.num_entries = 0
    for row in range(n):
        p.served[row] = 1
        p.appended[row] = 0
        entries = p.num_entries
        asked += new[row] if advance else 0
        if new[row] > b.capacity - b.line[rows[row]].length or asked > max_tokens:
            verdict = V_CAPACITY
            break
        need = judge_writes(b, p, row, rows[row], new[row]) if new[row] else 0
        if needed + need <= free_blocks:
            needed += need
        elif partial:
            take_back(b, p, entries)
            p.num_entries = entries
            p.served[row] = 0
            p.appended[row] = 0
        else:
            needed += need
            verdict = V_SHORT
    take_back(b, p, 0)
    return verdict


cdef inline bint is_own(const Page* page) noexcept nogil:
    """Whether a block may be rewritten as a whole."""
    return page.refs == 1 and not page.final and page.floor == 0


cdef int books_judge_unshare(Books* b, Pending* p, int32_t n, const int32_t* rows, const int64_t* lens,
                             int64_t first) noexcept nogil:
    cdef int64_t index, bs = b.block_size, length, end
    cdef int32_t row, i
    cdef int verdict = V_OK
    p.num_entries = 0
    for row in range(n):
        length = b.line[rows[row]].length
        p.served[row] = 1
        p.appended[row] = 0
        if not 0 <= lens[row] <= length:
            verdict = V_VALUE
            break
        end = ceil_blocks(b, lens[row]) if lens[row] < length else 0
        for index in range(first // bs, end):
            i = line_table(b, rows[row])[index]
            if not is_own(&b.page[i]):
                replace(b, p, row, <int32_t>index, i, <int32_t>min(bs, length - index * bs))
    if verdict == V_OK and p.num_entries > available(b):
        verdict = V_SHORT
    take_back(b, p, 0)
    return verdict


cdef int books_judge_compact(const Books* b, int32_t slot, int64_t length, int64_t first) noexcept nogil:
    cdef int64_t index
    if not 0 <= length <= b.line[slot].length:
        return V_VALUE
    if waits_for_step(b, &b.line[slot]):
        return V_STATE
    if length < b.line[slot].length:
        for index in range(first // b.block_size, ceil_blocks(b, length)):
            if not is_own(&b.page[line_table(b, slot)[index]]):
                return V_VALUE
    return V_OK


# ---- a step ------------------------------------------------------------------------------------------------

cdef void hold(Books* b, int32_t i, int32_t tokens) noexcept nogil:
    """A table gave the block up, the plan reads it still."""
    b.page[i].refs -= 1
    b.shared -= b.page[i].refs == 1
    b.page[i].holds += 1
    if tokens > b.page[i].floor:
        b.page[i].floor = tokens


cdef void books_step(Books* b, int32_t k, int32_t n, const int32_t* rows, const int64_t* new,
                     bint advance) noexcept nogil:
    """Carry out what was judged for plan k; `new` are the tokens of each row. `slot`, `stamp` are the driver's."""
    cdef Pending* p = &b.plan[k]
    cdef Line* line
    cdef Entry* entry
    cdef int32_t row, at = 0, i
    cdef bint replaced
    p.step = b.next_step
    b.next_step += 1
    p.executed = p.noted = False
    p.rows = n
    if b.steps_pend:
        b.queue[b.num_queue] = k
        b.num_queue += 1
    for i in range(p.num_entries):
        hold(b, p.entry[i].old, p.entry[i].tokens)
    for row in range(n):
        line = &b.line[rows[row]]
        p.handle[row] = line.handle
        p.before[row] = line.length
        p.row_step[row] = line.row_step
        p.blocks[row] = line.blocks
        replaced = False
        while at < p.num_entries and p.entry[at].row == row:
            entry = &p.entry[at]
            entry.new = take(b)
            line_table(b, rows[row])[entry.index] = entry.new
            if entry.tokens:
                b.cow_copies += 1
                b.cow_tokens += entry.tokens
                if b.indexed:
                    b.leaf[entry.new].made_by = p.step
            replaced = True
            at += 1
        line.epoch += replaced
        for i in range(p.appended[row]):
            line_table(b, rows[row])[line.blocks] = take(b)
            line.blocks += 1
            b.blocks += 1
        if advance and p.served[row]:
            line.length += new[row]
            b.tokens += new[row]
        p.length[row] = line.length
        line.row_step = p.step if b.steps_pend else 0


cdef bint books_show(Books* b, Pending* p, int32_t row, bint padded) noexcept nogil:
    """The plan shows a row (or padding) there; whether that is to be in dirty_rows."""
    cdef const Line* line
    cdef bint dirty
    if padded:
        dirty = p.shown[row] != -1
        p.shown[row] = -1
        return dirty
    line = &b.line[p.handle[row] & 0xFFFFF]
    dirty = (p.shown[row] != line.handle or p.shown_epoch[row] != line.epoch or p.shown_blocks[row] != line.blocks)
    p.shown[row] = line.handle
    p.shown_epoch[row] = line.epoch
    p.shown_blocks[row] = line.blocks
    return dirty


# ---- how a step ends ---------------------------------------------------------------------------------------

cdef void let_go(Books* b, Pending* p) noexcept nogil:
    """The copies of a plan were made: its holds are released in the order in which they were made."""
    cdef int32_t k
    for k in range(p.num_entries):
        b.page[p.entry[k].old].holds -= 1
        release(b, p.entry[k].old)
    lower_floors(b, p)


cdef void lower_floors(Books* b, Pending* p) noexcept nogil:
    """What the plan read is read by others that are pending, or by nobody."""
    cdef const Pending* other
    cdef const Entry* entry
    cdef int32_t k, j
    for k in range(p.num_entries):
        b.page[p.entry[k].old].floor = 0
    if p.num_entries:
        for j in range(b.num_queue):
            other = &b.plan[b.queue[j]]
            for k in range(other.num_entries):
                entry = &other.entry[k]
                if entry.tokens > b.page[entry.old].floor:
                    b.page[entry.old].floor = entry.tokens
    p.num_entries = 0


cdef void books_pass_at_once(Books* b, Pending* p) noexcept nogil:
    """In a pool that executes in order a step is done when it returns."""
    let_go(b, p)
    p.step = 0


cdef void books_done(Books* b, int32_t k) noexcept nogil:
    """Plan k is declared done; the oldest leave as far as they were."""
    cdef Pending* p
    cdef int32_t i
    b.plan[k].noted = True
    while b.num_queue and b.plan[b.queue[0]].noted:
        p = &b.plan[b.queue[0]]
        b.num_queue -= 1
        for i in range(b.num_queue):
            b.queue[i] = b.queue[i + 1]
        p.step = 0
        let_go(b, p)
        drain_limbo(b)
        if b.num_waiting:
            publish_waiting(b)


cdef int books_judge_rollback(const Books* b, int32_t k) noexcept nogil:
    cdef int32_t i
    if b.plan[k].noted or b.queue[b.num_queue - 1] != k:
        return V_STATE
    if b.newest_inherit < b.plan[k].step:
        return V_OK
    for i in range(b.num_live):
        if b.line[b.live[i]].inherit == b.plan[k].step:
            return V_STATE
    return V_OK


cdef void books_rollback(Books* b, int32_t k) noexcept nogil:
    """The newest plan is taken back, its rows in reverse order."""
    cdef Pending* p = &b.plan[k]
    cdef Line* line
    cdef Entry* entry
    cdef int32_t row, at = p.num_entries, slot, i
    cdef bint live
    b.num_queue -= 1
    p.step = 0
    for row in range(p.rows - 1, -1, -1):
        p.shown[row] = -2
        slot = books_find(b, p.handle[row])
        live = slot != NOBODY
        if live:
            line = &b.line[slot]
            b.tokens -= line.length - p.before[row]
            if line.blocks > p.blocks[row] or (at > 0 and p.entry[at - 1].row == row):
                line.epoch += 1
            line.length = p.before[row]
            line.row_step = p.row_step[row]
            while line.blocks > p.blocks[row]:
                line.blocks -= 1
                b.blocks -= 1
                drop_ref(b, line_table(b, slot)[line.blocks])
        while at and p.entry[at - 1].row == row:
            at -= 1
            entry = &p.entry[at]
            b.page[entry.old].holds -= 1
            if not live:
                release(b, entry.old)
                continue
            line_table(b, slot)[entry.index] = entry.old
            add_ref(b, entry.old)
            i = entry.new
            if b.indexed:
                b.page[i].final = b.page[i].back = 0
                b.leaf[i].made_by = 0
            drop_ref(b, i)
    lower_floors(b, p)
    drain_limbo(b)
