"""The judge's books: blocks and sequences. See docs/core.md, which this follows word for word."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove, memset

from proof.fuzz._books_index cimport enter_space, forget_node, leave_space

# ---- memory ------------------------------------------------------------------------------------------------

cdef void* room(Books* b, int64_t n, size_t size) noexcept nogil:
    """Zeros; what there is no memory for is noted."""
    cdef void* memory = calloc(n if n > 0 else 1, size)
    b.memory[b.num_memory] = memory
    b.num_memory += 1
    b.starved |= memory == NULL
    return memory


cdef void plan_init(Books* b, Pending* p) noexcept nogil:
    cdef int64_t rows = b.max_rows
    cdef int32_t i
    p.handle = <int64_t*>room(b, rows, sizeof(int64_t))
    p.length = <int64_t*>room(b, rows, sizeof(int64_t))
    p.before = <int64_t*>room(b, rows, sizeof(int64_t))
    p.row_step = <int64_t*>room(b, rows, sizeof(int64_t))
    p.blocks = <int32_t*>room(b, rows, sizeof(int32_t))
    p.appended = <int32_t*>room(b, rows, sizeof(int32_t))
    p.served = <uint8_t*>room(b, rows, 1)
    p.entry = <Entry*>room(b, b.entry_room, sizeof(Entry))
    p.slot = <int64_t*>room(b, b.max_tokens, sizeof(int64_t))
    p.stamp = <uint64_t*>room(b, b.max_tokens, sizeof(uint64_t))
    p.expect = <uint64_t*>room(b, rows * b.capacity if b.full else 1, sizeof(uint64_t))
    p.mirror = <int32_t*>room(b, rows * b.width, sizeof(int32_t))
    p.shown = <int64_t*>room(b, rows, sizeof(int64_t))
    p.shown_epoch = <uint32_t*>room(b, rows, sizeof(uint32_t))
    p.shown_blocks = <int32_t*>room(b, rows, sizeof(int32_t))
    if not b.starved:
        for i in range(b.max_rows):
            p.shown[i] = -2


cdef int books_init(Books* b) noexcept nogil:
    """The books of a new pool; the sizes stand in them. 0, or -1 without memory; `books_free` in either case."""
    cdef int64_t n = b.num_blocks, seqs = b.max_seqs, leaves = n if b.indexed else 1
    cdef int32_t i
    b.capacity = b.width * b.block_size
    b.entry_room = <int32_t>min(<int64_t>b.max_rows * b.width, <int64_t>1 << 20)
    b.page = <Page*>room(b, n, sizeof(Page))
    b.leaf = <Leaf*>room(b, leaves, sizeof(Leaf))
    b.since = <int64_t*>room(b, n, sizeof(int64_t))
    b.blank = <int32_t*>room(b, n, sizeof(int32_t))
    b.dropped = <int32_t*>room(b, n, sizeof(int32_t))
    b.spoilt = <int32_t*>room(b, 2 * n + 2, sizeof(int32_t))
    b.line = <Line*>room(b, seqs, sizeof(Line))
    b.live = <int32_t*>room(b, seqs, sizeof(int32_t))
    b.loading = <int32_t*>room(b, seqs, sizeof(int32_t))
    b.table = <int32_t*>room(b, seqs * b.width, sizeof(int32_t))
    b.generation = <int64_t*>room(b, seqs, sizeof(int64_t))
    b.free_slot = <int32_t*>room(b, seqs, sizeof(int32_t))
    b.deferred = <int64_t*>room(b, DEFERRED, sizeof(int64_t))
    b.undo = <int32_t*>room(b, b.entry_room, sizeof(int32_t))
    b.told = <int32_t*>room(b, leaves * b.block_size, sizeof(int32_t))
    b.claimed = <int32_t*>room(b, leaves * b.block_size if b.full else 1, sizeof(int32_t))
    b.claim = <int32_t*>room(b, leaves if b.full else 1, sizeof(int32_t))
    b.root = <int64_t*>room(b, b.num_spaces, sizeof(int64_t))
    b.users = <int64_t*>room(b, b.num_spaces, sizeof(int64_t))
    b.waiting = <int32_t*>room(b, seqs, sizeof(int32_t))
    b.event = <Told*>room(b, b.event_room, sizeof(Told))
    b.event_tokens = <int32_t*>room(b, b.event_room * b.block_size, sizeof(int32_t))
    b.mask = 1
    while b.mask < 2 * leaves:
        b.mask *= 2
    b.bucket = <int32_t*>room(b, b.mask, sizeof(int32_t))
    b.mask -= 1
    for i in range(MAX_PLANS):
        plan_init(b, &b.plan[i])
    if b.starved:
        return -1
    memset(b.bucket, 0xFF, (b.mask + <int64_t>1) * sizeof(int32_t))
    b.lru.first = b.lru.last = b.limbo.first = b.limbo.last = NOBODY
    b.next_step = 1
    for i in range(b.num_blocks):
        b.page[i].place = AT_BLANK if i >= b.reserved else AT_RESERVE
    all_blank(b)
    for i in range(b.max_seqs):
        b.line[i].handle = -1
        b.free_slot[i] = i
    return 0


cdef void books_free(Books* b) noexcept nogil:
    cdef int32_t i
    for i in range(b.num_memory):
        free(b.memory[i])
    memset(b, 0, sizeof(Books))


# ---- lists -------------------------------------------------------------------------------------------------

cdef void push(Books* b, Queue* queue, int32_t i) noexcept nogil:
    """At the new end."""
    b.page[i].before = queue.last
    b.page[i].after = NOBODY
    if queue.size:
        b.page[queue.last].after = i
    else:
        queue.first = i
    queue.last = i
    queue.size += 1


cdef void cut(Books* b, Queue* queue, int32_t i) noexcept nogil:
    cdef int32_t before = b.page[i].before, after = b.page[i].after
    if before == NOBODY:
        queue.first = after
    else:
        b.page[before].after = after
    if after == NOBODY:
        queue.last = before
    else:
        b.page[after].before = before
    queue.size -= 1


cdef void spoil(Books* b, int32_t i) noexcept nogil:
    """Whoever still reads this block reads what somebody else may write."""
    if b.num_spoilt < 2 * <int64_t>b.num_blocks:
        b.spoilt[b.num_spoilt] = i
        b.num_spoilt += 1


cdef void to_blank(Books* b, int32_t i) noexcept nogil:
    b.page[i].final = b.page[i].back = 0
    b.page[i].place = AT_BLANK
    b.blank[b.num_blank] = i
    b.num_blank += 1
    spoil(b, i)


cdef void all_blank(Books* b) noexcept nogil:
    """The lowest id on top."""
    cdef int32_t i
    b.num_blank = 0
    for i in range(b.num_blocks - 1, b.reserved - 1, -1):
        b.blank[b.num_blank] = i
        b.num_blank += 1


# ---- blocks ------------------------------------------------------------------------------------------------

cdef void begin_use(Books* b, int32_t i) noexcept nogil:
    b.page[i].place = AT_WORK
    b.used += 1
    if b.used > b.peak_used:
        b.peak_used = b.used


cdef int32_t give_up_oldest(Books* b) noexcept nogil:
    """The oldest evictable block loses what it holds."""
    cdef int32_t i = b.lru.first
    cut(b, &b.lru, i)
    b.page[i].final = 0
    b.evictions += 1
    if b.indexed:
        forget_node(b, i)
        b.evicted_nodes += 1
    elif not b.page[i].noted:
        b.page[i].noted = 1
        b.dropped[b.num_dropped] = i
        b.num_dropped += 1
    return i


cdef int32_t take(Books* b) noexcept nogil:
    """A block with one reference; there is one."""
    cdef int32_t i
    if b.num_blank:
        b.num_blank -= 1
        i = b.blank[b.num_blank]
    else:
        i = give_up_oldest(b)
    b.page[i].refs = 1
    b.page[i].final = b.page[i].back = 0
    if b.indexed:
        b.leaf[i].made_by = 0
    b.allocs += 1
    begin_use(b, i)
    spoil(b, i)
    return i


cdef void add_ref(Books* b, int32_t i) noexcept nogil:
    b.page[i].refs += 1
    b.shared += b.page[i].refs == 2


cdef void drop_ref(Books* b, int32_t i) noexcept nogil:
    b.page[i].refs -= 1
    b.shared -= b.page[i].refs == 1
    release(b, i)


cdef void release(Books* b, int32_t i) noexcept nogil:
    """If nobody refers to it or holds it any more."""
    if b.page[i].refs or b.page[i].holds:
        return
    b.used -= 1
    if b.num_queue:
        b.page[i].place = AT_LIMBO
        b.since[i] = b.plan[b.queue[b.num_queue - 1]].step
        push(b, &b.limbo, i)
    else:
        settle(b, i)
    if b.page[i].keeps:
        b.page[i].keeps = 0
        drop_ref(b, b.leaf[i].original)


cdef void settle(Books* b, int32_t i) noexcept nogil:
    """Out of limbo, or past it: to the LRU with what a later call may find again, else to the blank stack."""
    if b.page[i].final and (b.page[i].own or not b.indexed):
        b.page[i].place = AT_CACHE
        b.since[i] = b.allocs
        push(b, &b.lru, i)
    else:
        to_blank(b, i)


cdef void touch(Books* b, int32_t i) noexcept nogil:
    """One more reference on a committed block, wherever it is."""
    if b.page[i].place != AT_WORK:
        cut(b, &b.lru if b.page[i].place == AT_CACHE else &b.limbo, i)
        begin_use(b, i)
    add_ref(b, i)


cdef void drain_limbo(Books* b) noexcept nogil:
    cdef int32_t i
    while b.limbo.size:
        i = b.limbo.first
        if b.num_queue and b.since[i] >= oldest_step(b):
            return
        cut(b, &b.limbo, i)
        settle(b, i)


cdef int64_t books_evict(Books* b, int64_t n) noexcept nogil:
    """How many of the oldest evictable blocks were cleared."""
    cdef int64_t k
    n = min(n, <int64_t>b.lru.size)
    for k in range(n):
        to_blank(b, give_up_oldest(b))
    return n


# ---- sequences ---------------------------------------------------------------------------------------------

cdef int64_t books_next_handle(const Books* b, int32_t k) noexcept nogil:
    """Handle of the k-th sequence that is opened from here on, without the pool's tag."""
    cdef int32_t slot = b.free_slot[(b.first_free + <int64_t>k) % b.max_seqs]
    return b.generation[slot] << 20 | slot


cdef int32_t books_open(Books* b, int64_t length, int32_t space) noexcept nogil:
    """A sequence without blocks; returns its slot. There is a free one."""
    cdef int32_t slot = b.free_slot[b.first_free]
    cdef Line* line = &b.line[slot]
    memset(line, 0, sizeof(Line))
    line.handle = b.generation[slot] << 20 | slot
    line.length = length
    line.space = space
    line.at = b.num_live
    b.first_free = (b.first_free + 1) % b.max_seqs
    b.live[b.num_live] = slot
    b.num_live += 1
    b.tokens += length
    return slot


cdef void leave_root(Books* b, int32_t slot) noexcept nogil:
    """A sequence is in no namespace any more."""
    if b.line[slot].root:
        b.line[slot].root = 0
        leave_space(b, b.line[slot].space)


cdef void leave_live(Books* b, int32_t slot) noexcept nogil:
    cdef int32_t at = b.line[slot].at, last = b.live[b.num_live - 1]
    b.live[at] = last
    b.line[last].at = at
    b.num_live -= 1
    b.tokens -= b.line[slot].length
    b.blocks -= b.line[slot].blocks
    b.generation[slot] += 1
    b.line[slot].handle = -1
    leave_root(b, slot)
    b.line[slot].committed = b.line[slot].published = 0
    note_waiting(b, slot)


cdef void note_waiting(Books* b, int32_t slot) noexcept nogil:
    """Whether a sequence has full blocks that the index was not offered."""
    cdef Line* line = &b.line[slot]
    cdef bint waits = line.published < line.committed // b.block_size
    cdef int32_t k
    if waits == line.waits:
        return
    line.waits = waits
    if waits:
        b.waiting[b.num_waiting] = slot
        b.num_waiting += 1
        return
    for k in range(b.num_waiting):
        if b.waiting[k] == slot:
            b.num_waiting -= 1
            b.waiting[k] = b.waiting[b.num_waiting]
            return


cdef void drop_blocks(Books* b, int32_t slot, int32_t keep) noexcept nogil:
    """Blocks from the index `keep` on leave the table, youngest first."""
    cdef Line* line = &b.line[slot]
    while line.blocks > keep:
        line.blocks -= 1
        b.blocks -= 1
        drop_ref(b, line_table(b, slot)[line.blocks])


cdef void books_close(Books* b, int32_t slot) noexcept nogil:
    if b.line[slot].loads == LOADS:         # somebody writes its blocks
        b.line[slot].loads = LOADS_IN_VAIN
        return
    drop_blocks(b, slot, 0)
    books_free_line(b, slot)


cdef void books_free_line(Books* b, int32_t slot) noexcept nogil:
    """A sequence without blocks is closed."""
    b.free_slot[(b.first_free + <int64_t>b.max_seqs - num_open(b)) % b.max_seqs] = slot
    leave_live(b, slot)


cdef int32_t books_find(const Books* b, int64_t handle) noexcept nogil:
    """Slot of an open sequence, -1 if there is none."""
    cdef int64_t slot = handle & 0xFFFFF
    if slot >= b.max_seqs or handle < 0 or b.line[slot].handle != handle or b.line[slot].loads == LOADS_IN_VAIN:
        return NOBODY
    return <int32_t>slot


cdef void books_defer(Books* b, int64_t handle) noexcept nogil:
    b.deferred[b.num_deferred] = handle
    b.num_deferred += 1


cdef void books_drain(Books* b) noexcept nogil:
    """The next call began: what was deferred is closed, in the order in which it was asked for."""
    cdef int32_t k, slot
    for k in range(b.num_deferred):
        slot = books_find(b, b.deferred[k])
        if slot != NOBODY:
            books_close(b, slot)
    b.num_deferred = 0


cdef int32_t books_fork_line(Books* b, int32_t parent) noexcept nogil:
    """A child without blocks; returns its slot."""
    cdef Line* p = &b.line[parent]
    cdef int32_t slot = books_open(b, p.length, p.space)
    cdef Line* line = &b.line[slot]
    line.known = p.known
    line.committed = p.committed
    line.published = p.published
    line.evicted = p.evicted
    line.point = p.point
    line.root = p.root
    if line.root:
        enter_space(b, line.space)
    line.done = done_length(b, p)
    line.inherit = max(p.row_step, p.inherit)
    if not in_flight(b, line.inherit):
        line.inherit = 0
    b.newest_inherit = max(b.newest_inherit, line.inherit)
    return slot


cdef void books_fork(Books* b, int32_t parent, int32_t n, int32_t* children) noexcept nogil:
    cdef Line* line
    cdef int32_t k, i, slot
    for k in range(n):
        slot = children[k] = books_fork_line(b, parent)
        line = &b.line[slot]
        line.blocks = <int32_t>ceil_blocks(b, line.length)
        b.blocks += line.blocks
        memcpy(line_table(b, slot), line_table(b, parent), line.blocks * sizeof(int32_t))
        for i in range(line.blocks):
            add_ref(b, line_table(b, slot)[i])
        note_waiting(b, slot)


# ---- loads -------------------------------------------------------------------------------------------------

cdef void books_load(Books* b, int32_t slot) noexcept nogil:
    """The newest sequence is loaded: only its close and `loaded` find it."""
    b.num_live -= 1
    b.line[slot].loads = LOADS
    b.line[slot].at = b.num_loading
    b.loading[b.num_loading] = slot
    b.num_loading += 1


cdef void end_load(Books* b, int32_t slot) noexcept nogil:
    cdef int32_t at = b.line[slot].at
    b.num_loading -= 1
    b.loading[at] = b.loading[b.num_loading]
    b.line[b.loading[at]].at = at
    b.line[slot].loads = LOADS_NOT
    b.line[slot].at = b.num_live
    b.live[b.num_live] = slot
    b.num_live += 1


cdef int books_judge_loaded(const Books* b, int32_t slot, int64_t length) noexcept nogil:
    cdef const Line* line = &b.line[slot]
    return V_OK if length == 0 or line.length <= length <= line.blocks * b.block_size else V_VALUE


cdef void books_loaded(Books* b, int32_t slot, int64_t length) noexcept nogil:
    """Its first `length` tokens have come, 0: no more than it had. One that was closed meanwhile goes now."""
    cdef Line* line = &b.line[slot]
    cdef bint in_vain = line.loads == LOADS_IN_VAIN
    end_load(b, slot)
    if in_vain:
        books_close(b, slot)
    elif b.indexed and line.root == 0:      # flushed meanwhile
        books_truncate(b, slot, 0)
    elif length:
        b.tokens += length - line.length
        line.length = length


cdef int books_judge_truncate(const Books* b, int32_t slot, int64_t length) noexcept nogil:
    """`length` counts what has slots."""
    cdef const Line* line = &b.line[slot]
    if length < 0 or length > line.length or length + line.evicted < line.point:
        return V_VALUE
    return V_STATE if waits_for_step(b, line) else V_OK


cdef void books_truncate(Books* b, int32_t slot, int64_t length) noexcept nogil:
    cdef Line* line = &b.line[slot]
    cdef int32_t keep = <int32_t>ceil_blocks(b, length)
    line.epoch += keep < line.blocks
    drop_blocks(b, slot, keep)
    b.tokens -= line.length - length
    line.length = length
    line.known = <int32_t>length
    line.committed = min(line.committed, length)
    line.published = min(line.published, length // b.block_size)
    line.done = min(line.done, length)
    note_waiting(b, slot)


cdef int64_t done_length(const Books* b, const Line* line) noexcept nogil:
    """Leading tokens that no pending step still has to write."""
    cdef const Pending* p
    cdef int64_t done = line.length
    cdef int32_t i, k
    if not in_flight(b, line.row_step) and not in_flight(b, line.inherit):
        return done
    if in_flight(b, line.inherit):
        done = min(done, line.done)
    for i in range(b.num_queue):
        p = &b.plan[b.queue[i]]
        for k in range(p.rows):
            if p.handle[k] == line.handle:
                return min(done, p.before[k])
    return done


# ---- tokens that leave -------------------------------------------------------------------------------------

cdef void books_lose(Books* b, int32_t slot, int64_t tokens) noexcept nogil:
    """The sequence goes on with fewer tokens, and is none that a prompt could find."""
    cdef Line* line = &b.line[slot]
    line.point = line.length + line.evicted
    line.evicted += tokens
    line.length -= tokens
    line.known = <int32_t>line.length
    line.committed = line.published = 0
    leave_root(b, slot)
    line.epoch += 1
    b.evicted_tokens += tokens
    b.tokens -= tokens
    note_waiting(b, slot)


cdef void books_compact(Books* b, int32_t slot, int64_t length) noexcept nogil:
    if length == b.line[slot].length:
        return
    drop_blocks(b, slot, <int32_t>ceil_blocks(b, length))
    books_lose(b, slot, b.line[slot].length - length)


cdef void books_leave(Books* b, int32_t slot, const int32_t* indices, int32_t n) noexcept nogil:
    """Full blocks leave the table, the last first; those behind them move up."""
    cdef int32_t* table = line_table(b, slot)
    cdef int32_t k, i
    for k in range(n - 1, -1, -1):
        i = table[indices[k]]
        b.line[slot].blocks -= 1
        b.blocks -= 1
        memmove(table + indices[k], table + indices[k] + 1, (b.line[slot].blocks - indices[k]) * sizeof(int32_t))
        drop_ref(b, i)
    if n:
        books_lose(b, slot, n * b.block_size)
