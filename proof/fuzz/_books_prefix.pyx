"""The judge's books: hits, commits, namespaces. See docs/prefix.md, which this follows word for word."""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from proof.fuzz._books cimport (
    AT_BLANK,
    AT_CACHE,
    E_CLEARED,
    NOBODY,
    V_CAPACITY,
    V_FULL,
    V_OK,
    V_SHORT,
    V_VALUE,
    Leaf,
    Line,
    all_blank,
    available,
    books_open,
    ceil_blocks,
    cut,
    done_length,
    in_flight,
    end_load,
    leave_live,
    leave_root,
    line_table,
    note_waiting,
    num_open,
    open_slot,
    spoil,
    take,
    to_blank,
    touch,
)
from proof.fuzz._books_index cimport enter_space, find_node, forget_node, insert_node, tell

# ---- open --------------------------------------------------------------------------------------------------

cdef int32_t books_hits(const Books* b, int32_t space, const int32_t* tokens, int64_t most, int32_t* ids,
                        int32_t* evictable) noexcept nogil:
    """Blocks of the longest cached prefix, at most `most`; how many of them are evictable."""
    cdef int64_t parent = b.root[space] if b.indexed else 0
    cdef int32_t n = 0, i
    evictable[0] = 0
    while parent and n < most and n < b.width:
        i = find_node(b, parent, tokens + n * b.block_size)
        if i == NOBODY:
            break
        ids[n] = i
        n += 1
        evictable[0] += b.page[i].place == AT_CACHE
        parent = b.leaf[i].node
    return n


cdef int books_judge_open(const Books* b, int64_t tokens, int32_t hits, int32_t evictable, bint takes) noexcept nogil:
    cdef int64_t need = ceil_blocks(b, tokens) - hits if takes else 0
    if tokens > b.capacity:
        return V_CAPACITY
    if need and need + b.watermark > available(b) - evictable:
        return V_SHORT
    return V_FULL if num_open(b) >= b.max_seqs else V_OK


cdef int32_t books_open_prompt(Books* b, int64_t tokens, int32_t space, const int32_t* ids, int32_t hits, bint takes,
                               bint asked) noexcept nogil:
    """Returns the slot. `asked`: it counts as a query."""
    cdef int32_t slot = books_open(b, hits * b.block_size, space), k
    cdef Line* line = &b.line[slot]
    cdef int32_t* table = line_table(b, slot)
    if b.indexed:
        line.root = root_of(b, space)
        enter_space(b, space)
        line.committed = line.done = line.length
        line.published = hits
    for k in range(hits):
        if b.page[ids[k]].place == AT_CACHE:
            b.revivals += 1
            b.reuse_gap += b.allocs - b.since[ids[k]]
        touch(b, ids[k])
        table[k] = ids[k]
    line.blocks = <int32_t>ceil_blocks(b, tokens) if takes else hits
    b.blocks += line.blocks
    for k in range(hits, line.blocks):
        table[k] = take(b)
    if asked:
        b.queries += 1
        b.query_tokens += tokens
        b.hit_tokens += line.length
    return slot


# ---- namespaces --------------------------------------------------------------------------------------------

cdef int64_t root_of(Books* b, int32_t space) noexcept nogil:
    if b.root[space] == 0:
        b.next_node += 1
        b.root[space] = b.next_node
        b.num_roots += 1
    return b.root[space]


cdef int64_t books_flush(Books* b, int32_t space) noexcept nogil:
    """Forget a namespace, or all of them (NOBODY); returns how many blocks became blank."""
    cdef int32_t i = b.lru.first, after
    cdef int64_t blank = 0
    cdef bint known = space == NOBODY or b.root[space]
    while known and i != NOBODY:
        after = b.page[i].after
        if space == NOBODY or b.leaf[i].space == space:
            forget_node(b, i)
            cut(b, &b.lru, i)
            to_blank(b, i)
            blank += 1
        i = after
    for i in range(b.num_blocks if known else 0):
        if b.page[i].final and b.leaf[i].node and (space == NOBODY or b.leaf[i].space == space):
            if b.page[i].own:
                forget_node(b, i)
            b.leaf[i].node = 0
    for i in range(num_open(b)):
        if space == NOBODY or b.line[open_slot(b, i)].space == space:
            leave_root(b, open_slot(b, i))
    tell(b, E_CLEARED, space, 0, 0, NULL)
    return blank


# ---- commit ------------------------------------------------------------------------------------------------

cdef void books_begin_batch(Books* b) noexcept nogil:
    """The rows that are judged from here on belong to one call."""
    b.batch += 1


cdef int books_judge_commit(Books* b, int32_t slot, const int32_t* said, int64_t n) noexcept nogil:
    """One row, behind those of the same call. `said`: the sequence's tokens from position 0 on."""
    cdef const Line* line = &b.line[slot]
    cdef int64_t bs = b.block_size, index, k
    cdef int32_t i
    cdef const int32_t* known
    if n and (line.evicted or n > done_length(b, line) - line.committed):
        return V_VALUE
    for index in range(line.committed // bs, (line.committed + n) // bs):
        i = line_table(b, slot)[index]
        known = b.told + i * bs if b.page[i].final else NULL
        if b.full and known == NULL:
            if b.claim[i] == b.batch:
                known = b.claimed + i * bs
            else:
                b.claim[i] = b.batch
                memcpy(b.claimed + i * bs, said + index * bs, bs * sizeof(int32_t))
        if known != NULL:
            for k in range(bs):
                if known[k] != said[index * bs + k]:
                    return V_VALUE
    return V_OK


cdef void books_commit(Books* b, int32_t slot, const int32_t* said, int64_t n) noexcept nogil:
    """One row that was judged."""
    cdef Line* line = &b.line[slot]
    cdef int64_t bs = b.block_size, index
    cdef int32_t i
    for index in range(line.committed // bs, (line.committed + n) // bs):
        i = line_table(b, slot)[index]
        if b.page[i].final:
            continue
        memcpy(b.told + i * bs, said + index * bs, bs * sizeof(int32_t))
        b.page[i].final = b.page[i].back = 1
        b.leaf[i].node = 0
    line.committed += n
    publish(b, slot)


cdef void publish(Books* b, int32_t slot) noexcept nogil:
    """Offer the index what is full, known and written; what is not yet, and all behind it, waits."""
    cdef Line* line = &b.line[slot]
    cdef int32_t i
    while line.published < line.committed // b.block_size:
        i = line_table(b, slot)[line.published]
        if not b.page[i].final or (b.page[i].back and b.leaf[i].made_by and in_flight(b, b.leaf[i].made_by)):
            break
        if b.page[i].back:
            b.page[i].back = 0
            offer(b, slot, line.published)
        line.published += 1
    note_waiting(b, slot)


cdef void publish_waiting(Books* b) noexcept nogil:
    """A plan passed: every sequence that waits, by ascending slot."""
    cdef int32_t slot = NOBODY, k, following = NOBODY
    while True:
        following = NOBODY
        for k in range(b.num_waiting):
            if b.waiting[k] > slot and (following == NOBODY or b.waiting[k] < following):
                following = b.waiting[k]
        if following == NOBODY:
            return
        slot = following
        publish(b, slot)


cdef inline int64_t above(const Books* b, int32_t slot, int64_t index) noexcept nogil:
    """The node below which a table entry belongs, 0 if there is none."""
    cdef int32_t i
    if index == 0:
        return b.line[slot].root
    i = line_table(b, slot)[index - 1]
    return b.leaf[i].node if b.page[i].final else 0


cdef bint repeat(Books* b, int32_t i, int64_t parent) noexcept nogil:
    """Make block i a duplicate, if its node exists."""
    cdef int32_t original = find_node(b, parent, b.told + i * b.block_size)
    if original == NOBODY:
        return False
    b.leaf[i].node = b.leaf[original].node
    b.leaf[i].original = original
    return True


cdef void offer(Books* b, int32_t slot, int64_t index) noexcept nogil:
    """The full block at a table entry: a new node, a duplicate, or nothing where its sequence is cut off."""
    cdef int32_t i = line_table(b, slot)[index]
    cdef int64_t parent = above(b, slot, index)
    b.leaf[i].space = b.line[slot].space
    b.leaf[i].node = 0
    b.leaf[i].original = NOBODY
    if b.line[slot].root == 0 or parent == 0:
        return
    if repeat(b, i, parent):
        b.duplicates += 1
        return
    keep_originals(b, slot, index)
    parent = above(b, slot, index)
    if parent == 0:
        return
    if repeat(b, i, parent):
        b.duplicates += 1
        return
    insert_node(b, i, parent)


cdef void keep_originals(Books* b, int32_t slot, int64_t at) noexcept nogil:
    """A node is due below the table entry `at` - 1: duplicates right above keep their canonical blocks."""
    cdef const int32_t* table = line_table(b, slot)
    cdef int64_t index = at, parent
    cdef bint broken = False
    cdef int32_t i
    cdef Leaf* leaf
    while index and b.page[table[index - 1]].final and not b.page[table[index - 1]].own and (
            b.leaf[table[index - 1]].node):
        index -= 1
    for index in range(index, at):
        i = table[index]
        leaf = &b.leaf[i]
        if b.page[i].keeps:
            continue
        broken = broken or not b.page[leaf.original].own or b.leaf[leaf.original].node != leaf.node
        if broken:
            parent = above(b, slot, index)
            leaf.node = 0
            if parent == 0:
                continue
            if not repeat(b, i, parent):
                insert_node(b, i, parent)
                continue
        touch(b, leaf.original)
        b.page[i].keeps = 1


# ---- everything --------------------------------------------------------------------------------------------

cdef void books_reset(Books* b) noexcept nogil:
    """Nothing is open, cached or pending; generations and counters of use go on."""
    cdef int32_t i, k
    for k in range(b.num_queue):
        b.plan[b.queue[k]].step = 0
        for i in range(b.plan[b.queue[k]].rows):
            b.plan[b.queue[k]].shown[i] = -2
    b.num_queue = 0
    if b.indexed:
        books_flush(b, NOBODY)
    while b.num_loading:
        end_load(b, b.loading[0])
    while b.num_live:
        leave_live(b, b.live[b.num_live - 1])
    b.first_free = 0
    for i in range(b.max_seqs):
        b.free_slot[i] = i
    for i in range(b.reserved, b.num_blocks):
        if b.page[i].final and not b.indexed and not b.page[i].noted:
            b.page[i].noted = 1
            b.dropped[b.num_dropped] = i
            b.num_dropped += 1
        b.page[i].refs = b.page[i].raw = b.page[i].holds = b.page[i].floor = 0
        b.page[i].final = b.page[i].own = b.page[i].back = b.page[i].keeps = 0
        b.page[i].place = AT_BLANK
        spoil(b, i)
    b.lru.first = b.lru.last = b.limbo.first = b.limbo.last = NOBODY
    b.lru.size = b.limbo.size = 0
    b.used = b.shared = b.tokens = b.blocks = 0
    all_blank(b)
