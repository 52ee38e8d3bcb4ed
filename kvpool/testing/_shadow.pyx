"""The fuzzer's two judges: invariants recomputed from scratch, and the content of every slot.

Nothing here asks the pool what it thinks of itself: references are counted from tables, raw references and holds;
every list is walked; and a storage of stamps stands for the KV data. A stamp is a hash over the namespace and all
tokens up to its position, so two slots hold the same stamp iff they stand for the same prefix. A write stores
stamps, a copy copies them, a block that becomes free is poisoned at once, and whoever reads must find its own.

There are two storages: `real` is what a backend has done so far, `virt` what it will have done once all pending
plans have run. After every call all open sequences must read right in `virt`; each row of a plan must read right in
`real` when the plan runs, however late that is.

C functions without allocation after `shadow_init`, cost O(state) per check.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from kvpool._blocks cimport BLANK, CACHED, LIMBO, RESERVED, USED, Block, Blocks, Chain
from kvpool._sequence cimport Seq, Seqs, seq_table
from kvpool._types cimport NO_BLOCK

# ---- memory ------------------------------------------------------------------------------------------------

cdef bint plan_init(Shadow* s, Pending* p) noexcept nogil:
    cdef size_t rows = s.max_rows, width = s.width
    p.handle = <int64_t*>calloc(rows, sizeof(int64_t))
    p.length = <int64_t*>calloc(rows, sizeof(int64_t))
    p.before = <int64_t*>calloc(rows, sizeof(int64_t))
    p.row_step = <int64_t*>calloc(rows, sizeof(int64_t))
    p.blocks = <int32_t*>calloc(rows, sizeof(int32_t))
    p.table = <int32_t*>calloc(rows * width, sizeof(int32_t))
    p.mirror = <int32_t*>calloc(rows * width, sizeof(int32_t))
    p.copies = <int32_t*>calloc(3 * <size_t>s.hold_room, sizeof(int32_t))
    p.held = <int32_t*>calloc(s.hold_room, sizeof(int32_t))
    p.held_tokens = <int32_t*>calloc(s.hold_room, sizeof(int32_t))
    p.slot = <int64_t*>calloc(s.max_tokens, sizeof(int64_t))
    p.stamp = <uint64_t*>calloc(s.max_tokens, sizeof(uint64_t))
    p.expect = <uint64_t*>calloc(rows * s.capacity if s.full else 1, sizeof(uint64_t))
    return (p.handle != NULL and p.length != NULL and p.before != NULL and p.row_step != NULL and p.blocks != NULL
            and p.table != NULL and p.mirror != NULL and p.copies != NULL and p.held != NULL
            and p.held_tokens != NULL and p.slot != NULL and p.stamp != NULL and p.expect != NULL)


cdef int shadow_init(Shadow* s, const Blocks* b, const Seqs* q, int32_t max_rows, int32_t max_tokens,
                     bint full) noexcept nogil:
    """Returns 0, or -1 without memory; `shadow_free` in either case."""
    cdef size_t n = b.num_blocks, slots = n * b.block_size, room
    cdef int32_t i
    cdef bint ok
    memset(s, 0, sizeof(Shadow))
    s.num_blocks = b.num_blocks
    s.reserved = b.reserved
    s.max_seqs = q.max_seqs
    s.width = q.max_blocks
    s.block_size = b.block_size
    s.capacity = q.max_blocks * b.block_size
    s.max_rows = max_rows
    s.max_tokens = max_tokens
    s.hold_room = b.num_blocks if b.num_blocks < 4096 else 4096
    s.full = full
    room = s.max_seqs * s.capacity
    s.line = <Line*>calloc(s.max_seqs, sizeof(Line))
    s.live = <int32_t*>calloc(s.max_seqs, sizeof(int32_t))
    s.table = <int32_t*>calloc(<size_t>s.max_seqs * s.width, sizeof(int32_t))
    s.stamp = <uint64_t*>calloc(room, sizeof(uint64_t))
    s.token = <int32_t*>calloc(room, sizeof(int32_t))
    s.real = <uint64_t*>calloc(slots, sizeof(uint64_t))
    s.virt = <uint64_t*>calloc(slots if full else 1, sizeof(uint64_t))
    s.raw_stamp = <uint64_t*>calloc(slots if full else 1, sizeof(uint64_t))
    s.raw = <int32_t*>calloc(n, sizeof(int32_t))
    s.count = <int32_t*>calloc(n, sizeof(int32_t))
    s.hold = <int32_t*>calloc(n, sizeof(int32_t))
    s.floor = <int32_t*>calloc(n, sizeof(int32_t))
    s.entered = <int64_t*>calloc(n, sizeof(int64_t))
    s.place = <uint8_t*>calloc(n, 1)
    s.seen = <uint8_t*>calloc(n, 1)
    ok = (s.line != NULL and s.live != NULL and s.table != NULL and s.stamp != NULL and s.token != NULL
          and s.real != NULL and s.virt != NULL and s.raw_stamp != NULL and s.raw != NULL and s.count != NULL
          and s.hold != NULL and s.floor != NULL and s.entered != NULL and s.place != NULL and s.seen != NULL)
    for i in range(MAX_PLANS):
        ok = plan_init(s, &s.plan[i]) and ok
    if not ok:
        return -1
    for i in range(s.max_seqs):
        s.line[i].handle = -1
    for i in range(s.num_blocks):
        s.place[i] = b.block[i].place
        shadow_poison(s, i)
    s.low_blank = b.num_blank
    return 0


cdef void shadow_free(Shadow* s) noexcept nogil:
    cdef int32_t i
    cdef Pending* p
    for i in range(MAX_PLANS):
        p = &s.plan[i]
        free(p.handle)
        free(p.length)
        free(p.before)
        free(p.row_step)
        free(p.blocks)
        free(p.table)
        free(p.mirror)
        free(p.copies)
        free(p.held)
        free(p.held_tokens)
        free(p.slot)
        free(p.stamp)
        free(p.expect)
    free(s.line)
    free(s.live)
    free(s.table)
    free(s.stamp)
    free(s.token)
    free(s.real)
    free(s.virt)
    free(s.raw_stamp)
    free(s.raw)
    free(s.count)
    free(s.hold)
    free(s.floor)
    free(s.entered)
    free(s.place)
    free(s.seen)
    memset(s, 0, sizeof(Shadow))


cdef int found(Shadow* s, const char* what, int64_t a, int64_t b, int64_t c) noexcept nogil:
    """Keep the first finding."""
    if s.finding.what == NULL:
        s.finding.what = what
        s.finding.a = a
        s.finding.b = b
        s.finding.c = c
    return -1


# ---- the storages ------------------------------------------------------------------------------------------

cdef void shadow_poison(Shadow* s, int32_t block) noexcept nogil:
    """The pool gave this block away, or may at any time: whoever still reads it reads this."""
    cdef int64_t slot, first = block * s.block_size
    for slot in range(first, first + s.block_size):
        s.real[slot] = poison(slot)
        if s.full:
            s.virt[slot] = poison(slot)


cdef void shadow_execute(Shadow* s, Pending* p, uint64_t* store) noexcept nogil:
    """What a backend does with a plan: copies, then writes."""
    cdef int32_t k
    cdef int64_t t, bs = s.block_size
    for k in range(p.num_copies):
        memcpy(store + p.copies[3 * k + 1] * bs, store + p.copies[3 * k] * bs,
               p.copies[3 * k + 2] * sizeof(uint64_t))
    for t in range(p.tokens):
        store[p.slot[t]] = p.stamp[t]


cdef int read_tokens(Shadow* s, const uint64_t* store, const int32_t* table, const uint64_t* expect, int64_t length,
                     const char* what, int64_t who) noexcept nogil:
    """A context, block by block, against what it has to be."""
    cdef int64_t position = 0, end, slot, bs = s.block_size
    cdef int32_t index = 0
    while position < length:
        slot = table[index] * bs
        end = position + bs if length - position > bs else length
        while position < end:
            if store[slot] != expect[position]:
                return found(s, what, who, position, table[index])
            slot += 1
            position += 1
        index += 1
    return 0


cdef int shadow_read(Shadow* s, Pending* p) noexcept nogil:
    """What a backend reads for the rows of a plan that runs now, by the tables of its consumer."""
    cdef int32_t i
    for i in range(p.rows):
        if read_tokens(s, s.real, p.mirror + <int64_t>i * s.width, p.expect + i * s.capacity, p.length[i],
                       b"a row of a plan that runs late does not read its own tokens: "
                       b"handle %lld, position %lld, block %lld", p.handle[i]):
            return -1
    return 0


cdef void shadow_observe(Shadow* s, const Blocks* b) noexcept nogil:
    """See which blocks changed their place in the last call; poison what became free."""
    cdef int32_t i
    cdef uint8_t place
    for i in range(s.reserved, s.num_blocks):
        place = b.block[i].place
        if place != s.place[i]:
            if place == BLANK:
                shadow_poison(s, i)
            elif place == CACHED:
                s.entered[i] = s.clock
            s.place[i] = place
    s.low_blank = b.num_blank


# ---- invariants --------------------------------------------------------------------------------------------

cdef int check_list(Shadow* s, const Blocks* b, const Chain* chain, uint8_t place) noexcept nogil:
    """Walk a list both ways: every block once, in its place, in the order in which blocks came."""
    cdef int32_t i = chain.head, previous = NO_BLOCK, n = 0
    while i != NO_BLOCK:
        if i < s.reserved or i >= s.num_blocks or s.seen[i] or n > s.num_blocks:
            return found(s, b"a list is broken: block %lld, position %lld, place %lld", i, n, place)
        if b.block[i].place != place or b.prev[i] != previous:
            return found(s, b"block %lld is on a list that is not its place (%lld, list of place %lld)", i,
                         b.block[i].place, place)
        if place == LIMBO and (b.fence[i] < b.oldest_pending or b.fence[i] > b.newest_pending
                               or (previous != NO_BLOCK and b.fence[i] < b.fence[previous])):
            return found(s, b"block %lld in limbo has fence %lld, oldest pending step %lld", i, b.fence[i],
                         b.oldest_pending)
        if place == CACHED and previous != NO_BLOCK and s.entered[i] < s.entered[previous]:
            return found(s, b"evictable block %lld came before block %lld, but is evicted after it (%lld)", i,
                         previous, n)
        s.seen[i] = 1
        previous = i
        i = b.next[i]
        n += 1
    if previous != chain.tail or n != chain.size:
        return found(s, b"a list has %lld blocks, its counter says %lld (place %lld)", n, chain.size, place)
    return 0


cdef int check_lists(Shadow* s, const Blocks* b) noexcept nogil:
    cdef int32_t i, k
    memset(s.seen, 0, s.num_blocks)
    if b.num_blank < 0 or b.num_blank > s.num_blocks:
        return found(s, b"%lld blank blocks of %lld (%lld)", b.num_blank, s.num_blocks, 0)
    for k in range(b.num_blank):
        i = b.blank[k]
        if i < s.reserved or i >= s.num_blocks or s.seen[i] or b.block[i].place != BLANK:
            return found(s, b"the blank stack names block %lld at %lld, whose place is %lld", i, k,
                         b.block[i].place if 0 <= i < s.num_blocks else -1)
        s.seen[i] = 1
    if check_list(s, b, &b.lru, CACHED) or check_list(s, b, &b.limbo, LIMBO):
        return -1
    if b.limbo.size and not b.newest_pending:
        return found(s, b"%lld blocks are in limbo, but no step is pending (%lld, %lld)", b.limbo.size, 0, 0)
    return 0


cdef int count_references(Shadow* s, const Blocks* b, const Seqs* q) noexcept nogil:
    """References from tables, raw references, duplicates; tables must be the ones we know."""
    cdef int32_t i, k, slot
    cdef const Line* line
    cdef const Seq* seq
    cdef const int32_t* table
    memcpy(s.count, s.raw, s.num_blocks * sizeof(int32_t))
    for i in range(s.num_live):
        slot = s.live[i]
        line = &s.line[slot]
        seq = &q.seq[slot]
        table = seq_table(q, slot)
        if seq.handle != line.handle or seq.num_tokens != line.length or seq.num_blocks != line.blocks:
            return found(s, b"sequence %lld has %lld tokens in %lld blocks, and should not", line.handle,
                         seq.num_tokens, seq.num_blocks)
        if q.life[slot].evicted != line.evicted or q.life[slot].point != line.point:
            return found(s, b"sequence %lld has lost %lld tokens up to %lld, and should not", line.handle,
                         q.life[slot].evicted, q.life[slot].point)
        for k in range(line.blocks):
            if table[k] != line_table(s, slot)[k]:
                return found(s, b"the table of sequence %lld changed at %lld to block %lld", line.handle, k, table[k])
            if table[k] < s.reserved or table[k] >= s.num_blocks:
                return found(s, b"sequence %lld has at %lld block %lld", line.handle, k, table[k])
            s.count[table[k]] += 1
    if q.num_open != s.num_live:
        return found(s, b"%lld sequences are open, the pool counts %lld (%lld)", s.num_live, q.num_open, 0)
    if b.canonical != NULL:
        for i in range(s.reserved, s.num_blocks):
            if b.block[i].canonical_held:
                if b.canonical[i] < s.reserved or b.canonical[i] >= s.num_blocks:
                    return found(s, b"block %lld repeats block %lld (%lld)", i, b.canonical[i], 0)
                s.count[b.canonical[i]] += 1
    return 0


cdef void count_holds(Shadow* s) noexcept nogil:
    cdef int32_t i, k, block
    cdef const Pending* p
    memset(s.hold, 0, s.num_blocks * sizeof(int32_t))
    memset(s.floor, 0, s.num_blocks * sizeof(int32_t))
    for i in range(s.num_queue):
        p = &s.plan[s.queue[i]]
        for k in range(p.num_held):
            block = p.held[k]
            s.hold[block] += 1
            if p.held_tokens[k] > s.floor[block]:
                s.floor[block] = p.held_tokens[k]


cdef int check_blocks(Shadow* s, const Blocks* b) noexcept nogil:
    """Each block against what was counted, and the partition of them all."""
    cdef int32_t i, used = 0, shared = 0
    cdef const Block* block
    for i in range(s.num_blocks):
        block = &b.block[i]
        if i < s.reserved:
            if block.place != RESERVED or block.refcount or block.raw or block.hold:
                return found(s, b"reserved block %lld is in use (%lld, %lld)", i, block.refcount, block.place)
            continue
        if block.refcount != s.count[i] or block.raw != s.raw[i]:
            return found(s, b"block %lld has %lld references, %lld are counted", i, block.refcount, s.count[i])
        if block.hold != s.hold[i] or b.floor[i] != s.floor[i]:
            return found(s, b"block %lld has hold %lld and floor %lld, and should not", i, block.hold, b.floor[i])
        if (block.place == USED) != (s.count[i] + s.hold[i] > 0) or block.place >= RESERVED:
            return found(s, b"block %lld is in place %lld with %lld references", i, block.place, s.count[i])
        used += block.place == USED
        shared += s.count[i] > 1
        if block.place != USED and not s.seen[i]:
            return found(s, b"block %lld (place %lld) is on no list (%lld)", i, block.place, 0)
    if used != b.num_used or shared != b.num_shared:
        return found(s, b"%lld blocks are used and %lld shared, the counter of used ones says %lld", used, shared,
                     b.num_used)
    if s.num_blocks - s.reserved != b.num_blank + b.lru.size + b.limbo.size + used:
        return found(s, b"%lld blocks are free, evictable or in limbo and %lld used, of %lld",
                     b.num_blank + b.lru.size + b.limbo.size, used, s.num_blocks - s.reserved)
    return 0


cdef int check_content(Shadow* s, const uint64_t* store) noexcept nogil:
    """Every open sequence, and every block with raw references, holds what it has to."""
    cdef int32_t i, slot
    cdef int64_t k, first
    for i in range(s.num_live):
        slot = s.live[i]
        if read_tokens(s, store, line_table(s, slot), line_stamp(s, slot), s.line[slot].length,
                       b"a sequence does not read its own tokens: handle %lld, position %lld, block %lld",
                       s.line[slot].handle):
            return -1
    if not s.full:
        return 0
    for i in range(s.reserved, s.num_blocks):
        if s.raw[i]:
            first = i * s.block_size
            for k in range(s.block_size):
                if store[first + k] != s.raw_stamp[first + k]:
                    return found(s, b"block %lld with raw references was overwritten at %lld (%lld references)", i, k,
                                 s.count[i])
    return 0


cdef int shadow_check(Shadow* s, const Blocks* b, const Seqs* q) noexcept nogil:
    """Everything, O(state). 0, or -1 with `finding` set."""
    count_holds(s)
    if count_references(s, b, q) or check_lists(s, b) or check_blocks(s, b):
        return -1
    if s.full and check_content(s, s.virt):
        return -1
    if s.num_queue == 0 and check_content(s, s.real):
        return -1
    return 0
