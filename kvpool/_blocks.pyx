"""Blocks of one layer group: who holds them, which are free, which may be evicted, which still wait for a step.

C functions on a `Blocks` struct. They cannot fail: callers check first, then commit.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from kvpool._types cimport NO_BLOCK, mix

# ---- lists -------------------------------------------------------------------------------------------------

cdef void chain_push(Blocks* b, Chain* chain, int32_t i) noexcept nogil:
    b.next[i] = NO_BLOCK
    b.prev[i] = chain.tail
    if chain.tail == NO_BLOCK:
        chain.head = i
    else:
        b.next[chain.tail] = i
    chain.tail = i
    chain.size += 1


cdef void chain_unlink(Blocks* b, Chain* chain, int32_t i) noexcept nogil:
    if b.prev[i] == NO_BLOCK:
        chain.head = b.next[i]
    else:
        b.next[b.prev[i]] = b.next[i]
    if b.next[i] == NO_BLOCK:
        chain.tail = b.prev[i]
    else:
        b.prev[b.next[i]] = b.prev[i]
    chain.size -= 1


# ---- taking and giving back --------------------------------------------------------------------------------

cdef int32_t blocks_available(const Blocks* b) noexcept nogil:
    return b.num_blank + b.lru.size


cdef void drop_oldest(Blocks* b, int32_t i) noexcept nogil:
    """Take block i, the oldest evictable one, off the LRU list and note that its content is gone."""
    chain_unlink(b, &b.lru, i)
    b.block[i].committed = 0
    b.evictions += 1
    b.block[i].noted = 1        # it was not: a noted block cannot be committed
    b.dropped[b.num_dropped] = i
    b.num_dropped += 1


cdef int32_t blocks_take(Blocks* b) noexcept nogil:
    """A block with one reference. The caller has checked blocks_available."""
    cdef int32_t i
    if b.num_blank > 0:
        b.num_blank -= 1
        i = b.blank[b.num_blank]
    else:
        i = b.lru.head
        drop_oldest(b, i)
    b.block[i].refcount = 1
    b.block[i].place = USED
    b.allocs += 1
    b.num_used += 1
    if b.num_used > b.peak_used:
        b.peak_used = b.num_used
    return i


cdef void blocks_take_many(Blocks* b, int32_t* out, int32_t n) noexcept nogil:
    cdef int32_t k, i, blank = n if n < b.num_blank else b.num_blank
    for k in range(blank):
        i = b.blank[b.num_blank - 1 - k]
        b.block[i].refcount = 1
        b.block[i].place = USED
        out[k] = i
    b.num_blank -= blank
    b.allocs += blank
    b.num_used += blank
    if b.num_used > b.peak_used:
        b.peak_used = b.num_used
    for k in range(blank, n):
        out[k] = blocks_take(b)


cdef inline void leave_use(Blocks* b, int32_t i) noexcept nogil:
    """Nobody refers to block i any more: to limbo while a step is pending, else where it belongs."""
    b.num_used -= 1
    if b.newest_pending:
        b.block[i].place = LIMBO
        b.fence[i] = b.newest_pending
        chain_push(b, &b.limbo, i)
    else:
        settle(b, i)
    if b.block[i].canonical_held:
        b.block[i].canonical_held = 0
        unref(b, b.canonical[i])


cdef inline void settle(Blocks* b, int32_t i) noexcept nogil:
    if b.block[i].committed == 1:
        b.block[i].place = CACHED
        b.fence[i] = b.allocs
        chain_push(b, &b.lru, i)
    else:
        b.block[i].committed = 0
        b.block[i].place = BLANK
        b.blank[b.num_blank] = i
        b.num_blank += 1


cdef void blocks_settle(Blocks* b, int32_t i) noexcept nogil:
    """Release block i if its last reference and its last hold are gone."""
    if b.block[i].refcount == 0 and b.block[i].hold == 0:
        leave_use(b, i)


cdef inline void unref(Blocks* b, int32_t i) noexcept nogil:
    cdef Block* block = &b.block[i]
    block.refcount -= 1
    if block.refcount == 0:
        if block.hold == 0:
            leave_use(b, i)
    elif block.refcount == 1:
        b.num_shared -= 1


cdef inline void ref(Blocks* b, int32_t i, int32_t times) noexcept nogil:
    b.num_shared += b.block[i].refcount <= 1 and b.block[i].refcount + times > 1
    b.block[i].refcount += times


cdef void blocks_ref(Blocks* b, int32_t i, int32_t times) noexcept nogil:
    ref(b, i, times)


cdef void blocks_ref_many(Blocks* b, const int32_t* ids, int32_t n, int32_t times) noexcept nogil:
    cdef Block* block = b.block
    cdef int32_t k, before, shared = 0
    for k in range(n):
        before = block[ids[k]].refcount
        shared += before <= 1 and before + times > 1
        block[ids[k]].refcount = before + times
    b.num_shared += shared


cdef void blocks_unref(Blocks* b, int32_t i) noexcept nogil:
    unref(b, i)


cdef void blocks_unref_many(Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    """Drop one reference on each id, the last id first: children leave before their parents."""
    cdef int32_t k
    for k in range(n - 1, -1, -1):
        unref(b, ids[k])


cdef void blocks_hold(Blocks* b, int32_t i, int32_t tokens) noexcept nogil:
    """A table entry gave up block i, but the plan that replaced it still reads `tokens` tokens of it."""
    cdef Block* block = &b.block[i]
    block.refcount -= 1
    b.num_shared -= block.refcount == 1
    block.hold += 1
    if tokens > b.floor[i]:
        b.floor[i] = tokens


cdef void blocks_unhold(Blocks* b, int32_t i, int32_t old_floor) noexcept nogil:
    """Undo blocks_hold."""
    b.block[i].hold -= 1
    b.floor[i] = old_floor
    ref(b, i, 1)


cdef void blocks_drain_limbo(Blocks* b) noexcept nogil:
    """Let go of every block whose fence has passed. O(blocks that leave)."""
    cdef int32_t i
    while b.limbo.size:
        i = b.limbo.head
        if b.newest_pending and b.fence[i] >= b.oldest_pending:
            return
        chain_unlink(b, &b.limbo, i)
        settle(b, i)


cdef void blocks_lower_fences(Blocks* b) noexcept nogil:
    """The newest step was rolled back: what waited for it waits for the newest one left. O(limbo)."""
    cdef int32_t i = b.limbo.tail
    while i != NO_BLOCK and b.fence[i] > b.newest_pending:
        b.fence[i] = b.newest_pending
        i = b.prev[i]


cdef void blocks_touch(Blocks* b, int32_t i) noexcept nogil:
    """One more reference on a committed block, wherever it is. O(1)."""
    cdef Block* block = &b.block[i]
    if block.place != USED:
        chain_unlink(b, &b.lru if block.place == CACHED else &b.limbo, i)
        block.place = USED
        b.num_used += 1
        if b.num_used > b.peak_used:
            b.peak_used = b.num_used
    ref(b, i, 1)


cdef void blocks_revive(Blocks* b, int32_t i) noexcept nogil:
    blocks_touch(b, i)
    b.block[i].raw += 1


cdef void blocks_drop(Blocks* b, int32_t i) noexcept nogil:
    """Clear an evictable block to blank; who indexed it knows."""
    chain_unlink(b, &b.lru, i)
    b.block[i].committed = 0
    settle(b, i)


cdef int32_t blocks_evict(Blocks* b) noexcept nogil:
    """Clear the oldest evictable block to blank; there must be one."""
    cdef int32_t i = b.lru.head
    drop_oldest(b, i)
    settle(b, i)
    return i


cdef void blocks_reset(Blocks* b) noexcept nogil:
    """Every unreserved block blank, the lowest id on top; committed ones are noted as dropped."""
    cdef int32_t i
    b.num_blank = b.num_used = b.num_shared = 0
    b.newest_pending = b.oldest_pending = 0
    b.lru.head = b.lru.tail = b.limbo.head = b.limbo.tail = NO_BLOCK
    b.lru.size = b.limbo.size = 0
    memset(b.floor, 0, b.num_blocks * sizeof(int32_t))
    for i in range(b.reserved, b.num_blocks):
        if b.block[i].committed and not b.block[i].noted:
            b.block[i].noted = 1
            b.dropped[b.num_dropped] = i
            b.num_dropped += 1
        b.block[i].refcount = b.block[i].raw = b.block[i].hold = 0
        b.block[i].committed = b.block[i].canonical_held = 0
        b.block[i].place = BLANK
    for i in range(b.num_blocks - 1, b.reserved - 1, -1):
        b.blank[b.num_blank] = i
        b.num_blank += 1


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t blocks_fingerprint(const Blocks* b, uint64_t h, int64_t next_step) noexcept nogil:
    """Hash of everything about blocks that a later call can see, in O(num_blocks)."""
    cdef int32_t i
    cdef const Block* block
    h = mix(mix(mix(h, b.num_blocks), b.reserved), b.block_size)
    h = mix(mix(mix(h, b.num_blank), b.num_dropped), b.num_used)
    for i in range(b.num_blocks):
        block = &b.block[i]
        h = mix(h, (<uint64_t><uint32_t>block.refcount << 32) | <uint32_t>block.raw)
        h = mix(h, (<uint64_t><uint32_t>block.hold << 32) | <uint32_t>b.floor[i])
        h = mix(h, block.place | (block.committed << 8) | (block.noted << 16) | (block.canonical_held << 24))
    for i in range(b.num_blank):
        h = mix(h, b.blank[i])
    for i in range(b.num_dropped):
        h = mix(h, b.dropped[i])
    h = mix(h, b.lru.size)
    i = b.lru.head
    while i != NO_BLOCK:
        h = mix(h, i)
        i = b.next[i]
    h = mix(h, b.limbo.size)
    i = b.limbo.head
    while i != NO_BLOCK:
        h = mix(mix(h, i), next_step - b.fence[i])
        i = b.next[i]
    return h


cdef str check_chain(const Blocks* b, const Chain* chain, uint8_t place, str name):
    cdef int32_t i = chain.head, previous = NO_BLOCK, count = 0
    while i != NO_BLOCK:
        if i < b.reserved or i >= b.num_blocks or count > b.num_blocks:
            return f"{name} list is broken at block {i}"
        if b.block[i].place != place:
            return f"block {i} is on the {name} list, but its place is {b.block[i].place}"
        if b.prev[i] != previous:
            return f"{name} list: block {i} does not point back at {previous}"
        if place == LIMBO and (b.fence[i] > b.newest_pending
                               or (previous != NO_BLOCK and b.fence[i] < b.fence[previous])):
            return f"limbo is not in the order of its fences at block {i}"
        previous = i
        i = b.next[i]
        count += 1
    if previous != chain.tail or count != chain.size:
        return f"{name} list has {count} blocks, its counter says {chain.size}"
    return None


cdef str blocks_check(const Blocks* b):
    """The first invariant that does not hold, in words, or None. O(num_blocks)."""
    cdef int32_t i, used = 0, shared = 0
    cdef int32_t[5] places
    cdef const Block* block
    if not (0 <= b.num_blank <= b.num_blocks and 0 <= b.num_dropped <= b.num_blocks):
        return f"the blank stack has {b.num_blank} entries and the dropped list {b.num_dropped}"
    for i in range(5):
        places[i] = 0
    for i in range(b.num_blocks):
        if i & 0xFFFF == 0:
            PyErr_CheckSignals()            # a check of a million blocks takes a second
        block = &b.block[i]
        if block.place > RESERVED or (block.place == RESERVED) != (i < b.reserved):
            return f"block {i} has place {block.place}"
        places[block.place] += 1
        if block.refcount < 0 or block.raw < 0 or block.hold < 0 or block.raw > block.refcount:
            return f"block {i} has refcount {block.refcount}, raw {block.raw}, hold {block.hold}"
        if (block.place == USED) != (block.refcount + block.hold > 0):
            return f"block {i} has place {block.place} with refcount {block.refcount} and hold {block.hold}"
        if block.noted and block.committed:
            return f"block {i} is committed, and in the dropped list"
        if block.place == BLANK and block.committed:
            return f"block {i} is blank and committed"
        if block.place == CACHED and block.committed != 1:
            return f"block {i} is evictable, but not committed"
        if b.floor[i] and not block.hold:
            return f"block {i} has floor {b.floor[i]} without a hold"
        used += block.place == USED
        shared += block.refcount > 1
    if used != b.num_used or shared != b.num_shared or b.num_used > b.peak_used:
        return f"counted {used} used and {shared} shared blocks, the counters say {b.num_used} and {b.num_shared}"
    for i in range(b.num_blank):
        if b.blank[i] < b.reserved or b.blank[i] >= b.num_blocks or b.block[b.blank[i]].place != BLANK:
            return f"blank stack holds block {b.blank[i]} at {i}"
    PyErr_CheckSignals()
    if len({b.blank[i] for i in range(b.num_blank)}) != b.num_blank or places[BLANK] != b.num_blank:
        return f"blank stack has {b.num_blank} entries for {places[BLANK]} blank blocks"
    PyErr_CheckSignals()
    if sorted([b.dropped[i] for i in range(b.num_dropped)]) != [i for i in range(b.num_blocks) if b.block[i].noted]:
        return "the dropped list and the notes in the blocks differ"
    PyErr_CheckSignals()
    if b.limbo.size and (b.newest_pending == 0 or b.fence[b.limbo.head] < b.oldest_pending):
        return f"limbo holds {b.limbo.size} blocks that no pending step can use"
    return (check_chain(b, &b.lru, CACHED, "LRU") or check_chain(b, &b.limbo, LIMBO, "limbo")
            or (None if places[CACHED] == b.lru.size and places[LIMBO] == b.limbo.size
                else "a block is on no list"))
