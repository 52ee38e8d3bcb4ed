"""Blocks of one arena. C functions on a `Blocks` struct, which cannot fail: callers check first."""

cdef extern from *:
    """
    #include <stdarg.h>
    #define KV_COLD __attribute__((cold))       /* for size, and so is what only such functions call */
    enum { KV_FINDING = 256 };                  /* bytes of what a check found, in words */
    static KV_COLD int kv_found(char *finding, const char *text, ...) {
        va_list values;
        va_start(values, text);
        vsnprintf(finding, KV_FINDING, text, values);
        va_end(values);
        return 1;
    }
    """
    enum: FINDING "KV_FINDING"
    bint found "kv_found"(char* finding, const char* text, ...) noexcept nogil     # put in words what a check found


cdef inline bint unwritten(const Blocks* b, int32_t i) noexcept nogil:
    """Whether a block in use is the dst of a copy that a pending plan still has to make."""
    return b.oldest_pending != 0 and b.block[i].fence >= b.oldest_pending


# ---- memory ------------------------------------------------------------------------------------------------

cdef int blocks_init(Blocks* b, int32_t n, int32_t reserved, int64_t block_size) noexcept nogil:
    """n blocks, of which the first are reserved. After NO_MEMORY the caller must `blocks_free`."""
    cdef int32_t i
    b.num_blocks = n
    b.reserved = reserved
    b.block_size = block_size
    b.floor = <int32_t*>xcalloc(n, sizeof(int32_t))
    b.blank = <int32_t*>xcalloc(n, sizeof(int32_t))
    b.dropped = <int32_t*>xcalloc(n, sizeof(int32_t))
    b.mark = <uint32_t*>xcalloc(n, sizeof(uint32_t))
    b.block = <Block*>xcalloc(n, sizeof(Block))
    if b.block == NULL or b.floor == NULL or b.blank == NULL or b.dropped == NULL or b.mark == NULL:
        return NO_MEMORY
    for i in range(reserved):
        b.block[i].place = RESERVED
    blocks_reset(b)
    return OK


cdef void blocks_free(Blocks* b) noexcept nogil:
    xfree(b.block)
    xfree(b.floor)
    xfree(b.blank)
    xfree(b.dropped)
    xfree(b.mark)
    memset(b, 0, sizeof(Blocks))


# ---- lists -------------------------------------------------------------------------------------------------

cdef void chain_push(Blocks* b, Chain* chain, int32_t i) noexcept nogil:
    b.block[i].next = NO_BLOCK
    b.block[i].prev = chain.tail
    if chain.tail == NO_BLOCK:
        chain.head = i
    else:
        b.block[chain.tail].next = i
    chain.tail = i
    chain.size += 1


cdef void chain_unlink(Blocks* b, Chain* chain, int32_t i) noexcept nogil:
    cdef const Block* block = &b.block[i]
    if block.prev == NO_BLOCK:
        chain.head = block.next
    else:
        b.block[block.prev].next = block.next
    if block.next == NO_BLOCK:
        chain.tail = block.prev
    else:
        b.block[block.next].prev = block.prev
    chain.size -= 1


# ---- taking and giving back --------------------------------------------------------------------------------

cdef int32_t blocks_available(const Blocks* b) noexcept nogil:
    return b.num_blank + b.num_evictable


cdef void blocks_new_stamp(Blocks* b) noexcept nogil:
    b.stamp += 1
    if b.stamp == 0:
        memset(b.mark, 0, b.num_blocks * sizeof(uint32_t))
        b.stamp = 1


cdef int blocks_short(const Blocks* b, Verdict* v, int32_t arena, Py_ssize_t row, int64_t handle, int64_t needed,
                      int64_t short_by) noexcept nogil:
    """Refuse a call for want of blocks; `row` is the first that does not fit, -1: the call has no rows."""
    v.arena = arena
    v.needed = needed
    v.short_by = short_by
    v.blank = b.num_blank
    v.evictable = b.num_evictable
    v.limbo = b.limbo.size
    return refused(v, OUT_OF_BLOCKS, row, -1, 0, handle, 0)


cdef inline void leave_evictable(Blocks* b, int32_t i) noexcept nogil:
    if b.block[i].fence != SETTLED:
        chain_unlink(b, &b.lru, i)
    b.block[i].fence = 0
    b.num_evictable -= 1


cdef inline int32_t give_up(Blocks* b, int32_t i) noexcept nogil:
    """The content of an evictable block is gone. 0: that was gone before (`uncache`), else 1."""
    cdef int32_t lost = b.block[i].committed        # 1, or 0
    leave_evictable(b, i)
    b.block[i].committed = False
    b.evictions += lost
    return lost


cdef void drop_oldest(Blocks* b, int32_t i) noexcept nogil:
    """Take block i, the oldest evictable one, off the LRU list and note that its content is gone, if it is by that."""
    cdef int32_t lost = give_up(b, i)
    b.block[i].noted = lost     # it was 0: no block is noted while it is evictable
    b.dropped[b.num_dropped] = i
    b.num_dropped += lost


cdef inline void now_used(Blocks* b, int32_t n) noexcept nogil:
    b.num_used += n
    if b.num_used > b.peak_used:
        b.peak_used = b.num_used


cdef inline void own(Blocks* b, int32_t i, bint raw) noexcept nogil:
    b.block[i].refcount = 1
    if raw:
        b.block[i].raw = 1
    b.block[i].place = USED


cdef inline void take(Blocks* b, int32_t* out, int32_t n, bint raw, bint note) noexcept nogil:
    """n blocks with one reference each; the caller has checked blocks_available. `raw`: it is a raw one, `note`: of
    cached blocks it is noted that their content is gone."""
    cdef const int32_t* top = b.blank + b.num_blank
    cdef int32_t k, i, blank = n if n < b.num_blank else b.num_blank
    for k in range(blank):
        i = top[-1 - k]
        own(b, i, raw)
        out[k] = i
    b.num_blank -= blank
    for k in range(blank, n):
        i = b.lru.head
        if note:
            drop_oldest(b, i)
        else:
            give_up(b, i)
        own(b, i, raw)
        out[k] = i
    b.allocs += n
    now_used(b, n)


cdef int32_t blocks_take(Blocks* b) noexcept nogil:
    cdef int32_t i
    take(b, &i, 1, False, True)
    return i


cdef void blocks_take_many(Blocks* b, int32_t* out, int32_t n) noexcept nogil:
    take(b, out, n, False, True)


cdef inline void leave_use(Blocks* b, int32_t i) noexcept nogil:
    """Nobody refers to block i any more: to limbo while a step is pending, else where it belongs."""
    b.num_used -= 1
    if b.newest_pending:
        b.block[i].place = LIMBO
        b.block[i].fence = b.newest_pending
        chain_push(b, &b.limbo, i)
    else:
        settle(b, i)


cdef inline void settle(Blocks* b, int32_t i) noexcept nogil:
    if b.block[i].committed:
        b.block[i].place = EVICTABLE
        b.block[i].fence = 0
        chain_push(b, &b.lru, i)
        b.num_evictable += 1
    else:
        b.block[i].place = BLANK
        b.blank[b.num_blank] = i
        b.num_blank += 1


cdef void blocks_settle(Blocks* b, int32_t i) noexcept nogil:
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


cdef inline void ref(Blocks* b, int32_t i) noexcept nogil:
    b.num_shared += b.block[i].refcount == 1
    b.block[i].refcount += 1
    b.turns += 1


cdef void blocks_ref_many(Blocks* b, const int32_t* ids, int32_t n, int32_t times) noexcept nogil:
    cdef Block* block = b.block
    cdef int32_t k, before, shared = 0
    for k in range(n):
        before = block[ids[k]].refcount
        shared += before <= 1 and before + times > 1
        block[ids[k]].refcount = before + times
    b.num_shared += shared
    b.turns += 1


cdef void blocks_unref_many(Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    """Drop one reference on each id, the last id first: children leave before their parents."""
    cdef int32_t k
    for k in range(n - 1, -1, -1):
        unref(b, ids[k])


cdef void blocks_hold(Blocks* b, int32_t i, int32_t tokens) noexcept nogil:
    """A table entry let go of block i, but the plan that replaced it still reads `tokens` tokens of it."""
    cdef Block* block = &b.block[i]
    block.refcount -= 1
    b.num_shared -= block.refcount == 1
    block.hold += 1
    if tokens > b.floor[i]:
        b.floor[i] = tokens


cdef void blocks_unhold(Blocks* b, int32_t i, int32_t old_floor) noexcept nogil:
    b.block[i].hold -= 1
    b.floor[i] = old_floor
    ref(b, i)


cdef void blocks_drain_limbo(Blocks* b) noexcept nogil:
    """Let go of every block whose fence has passed. O(blocks that leave)."""
    cdef int32_t i
    while b.limbo.size:
        i = b.limbo.head
        if b.newest_pending and b.block[i].fence >= b.oldest_pending:
            return
        chain_unlink(b, &b.limbo, i)
        settle(b, i)


cdef void blocks_lower_fences(Blocks* b) noexcept nogil:
    """The newest step was rolled back: what waited for it waits for the newest one left. O(limbo)."""
    cdef int32_t i = b.limbo.tail
    while i != NO_BLOCK and b.block[i].fence > b.newest_pending:
        b.block[i].fence = b.newest_pending
        i = b.block[i].prev


cdef inline void touch(Blocks* b, int32_t i) noexcept nogil:
    """One more reference on a committed block, wherever it is. O(1)."""
    cdef Block* block = &b.block[i]
    if block.place != USED:
        if block.place == EVICTABLE:
            leave_evictable(b, i)
        else:
            chain_unlink(b, &b.limbo, i)
            block.fence = 0
        block.place = USED
        now_used(b, 1)
    ref(b, i)


cdef void blocks_revive_many(Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    """A raw reference more on each of n blocks, in use or cached; counted in registers, as in `blocks_ref_many`."""
    cdef Block* block = b.block
    cdef int32_t k, i, shared = 0
    for k in range(n):
        i = ids[k]
        if block[i].place != USED:
            touch(b, i)
        else:
            shared += block[i].refcount == 1
            block[i].refcount += 1
        block[i].raw += 1
    b.num_shared += shared
    b.turns += 1


cdef void blocks_drop(Blocks* b, int32_t i) noexcept nogil:
    """Clear an evictable block to blank. The caller has removed it from the index."""
    leave_evictable(b, i)
    b.block[i].committed = False
    settle(b, i)


cdef int32_t blocks_evict(Blocks* b) noexcept nogil:
    """Clear the oldest evictable block to blank; there must be one."""
    cdef int32_t i = b.lru.head
    drop_oldest(b, i)
    settle(b, i)
    return i


# ---- blocks by name, for tables that are not ours ----------------------------------------------------------

cdef void blocks_unref_raw(Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    """A raw reference less on each of n blocks, in their order; what is counted stays in registers."""
    cdef Block* block
    cdef int32_t k, blank = b.num_blank, shared = 0
    cdef bint at_once = b.newest_pending == 0
    for k in range(n):
        block = &b.block[ids[k]]
        block.raw -= 1
        block.refcount -= 1
        shared += block.refcount == 1
        if block.refcount or block.hold:
            continue
        if at_once and not block.committed:
            block.place = BLANK
            b.blank[blank] = ids[k]
            blank += 1
        else:
            leave_use(b, ids[k])        # no blank block comes of that
    b.num_used -= blank - b.num_blank
    b.num_blank = blank
    b.num_shared -= shared


cdef inline bint is_empty(const Block* block) noexcept nogil:
    """Whether a block is free and holds nothing: it is blank, or `uncache` left it in its place."""
    return block.place == BLANK or (block.place == EVICTABLE and not block.committed)


cdef void blocks_take_empty(Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    """Use those of n blocks that are empty; the caller refers to them at once. O(n + blank ones taken before them)."""
    cdef int32_t k, i, at, to, found = 0, blank = 0
    for k in range(n):
        i = ids[k]
        if is_empty(&b.block[i]):
            found += 1
            if b.block[i].place == BLANK:
                blank += 1
            else:
                leave_evictable(b, i)
            b.block[i].place = USED
    b.allocs += found
    now_used(b, found)
    at = b.num_blank
    while blank:
        at -= 1
        blank -= b.block[b.blank[at]].place == USED
    to = at
    for k in range(at, b.num_blank):
        if b.block[b.blank[k]].place == BLANK:
            b.blank[to] = b.blank[k]
            to += 1
    b.num_blank = to


cdef void blocks_release(Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    """Drop a raw reference of each block. Blocks that lose their last one are reused in the order they are named."""
    cdef int32_t k
    for k in range(n - 1, -1, -1):              # on a stack the last one put is the first one taken
        if not b.block[ids[k]].committed:
            b.block[ids[k]].raw -= 1
            unref(b, ids[k])
    for k in range(n):
        if b.block[ids[k]].committed:
            b.block[ids[k]].raw -= 1
            unref(b, ids[k])


cdef void blocks_commit(Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    cdef int32_t k
    b.turns += 1
    for k in range(n):
        b.block[ids[k]].committed = True


cdef void blocks_uncommit(Blocks* b, const int32_t* ids, int32_t n, bint keep_place) noexcept nogil:
    """Clear committed bits: evictable blocks are blank now, the first named on top; others when they are released.

    keep_place: evictable ones stay on the LRU list.
    """
    cdef int32_t k
    cdef Block* block
    for k in range(n - 1, -1, -1):
        block = &b.block[ids[k]]
        if block.place == EVICTABLE and block.committed and keep_place:
            b.evictions += 1
        elif block.place == EVICTABLE and block.committed:
            give_up(b, ids[k])
            settle(b, ids[k])
        block.committed = False


cdef int32_t blocks_free_order(const Blocks* b, int32_t* out, int32_t n) noexcept nogil:
    """The next blocks that would be taken, n at the most; returns how many."""
    cdef int32_t k, i = b.lru.head
    cdef int32_t blank = n if n < b.num_blank else b.num_blank
    for k in range(blank):
        out[k] = b.blank[b.num_blank - 1 - k]
    k = blank
    while k < n and i != NO_BLOCK:
        out[k] = i
        i = b.block[i].next
        k += 1
    return k


cdef void blocks_reset(Blocks* b) noexcept nogil:
    """Every unreserved block blank, the lowest id on top; committed ones are noted as dropped."""
    cdef int32_t i
    b.num_blank = b.num_evictable = b.num_used = b.num_shared = 0
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
        b.block[i].fence = 0
        b.block[i].committed = False
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
        h = mix(h, block.place | (block.committed << 8) | (block.noted << 16))
    for i in range(b.num_blank):
        h = mix(h, b.blank[i])
    for i in range(b.num_dropped):
        h = mix(h, b.dropped[i])
    h = mix(mix(h, b.lru.size), b.num_evictable)
    i = b.lru.head
    while i != NO_BLOCK:
        h = mix(h, i)
        i = b.block[i].next
    h = mix(h, b.limbo.size)
    i = b.limbo.head
    while i != NO_BLOCK:
        h = mix(mix(h, i), next_step - b.block[i].fence)
        i = b.block[i].next
    return h


cdef bint check_chain(const Blocks* b, const Chain* chain, uint8_t place, const char* name,
                      char* finding) noexcept nogil:
    cdef int32_t i = chain.head, previous = NO_BLOCK, count = 0
    while i != NO_BLOCK:
        if i < b.reserved or i >= b.num_blocks or count > b.num_blocks:
            return found(finding, b"%s list is broken at block %d", name, i)
        if b.block[i].place != place or b.block[i].fence == SETTLED:
            return found(finding, b"block %d is on the %s list, but its place is %d", i, name, <int>b.block[i].place)
        if b.block[i].prev != previous:
            return found(finding, b"%s list: block %d does not point back at %d", name, i, previous)
        if place == LIMBO and (b.block[i].fence > b.newest_pending
                               or (previous != NO_BLOCK and b.block[i].fence < b.block[previous].fence)):
            return found(finding, b"limbo is not in the order of its fences at block %d", i)
        previous = i
        i = b.block[i].next
        count += 1
    if previous != chain.tail or count != chain.size:
        return found(finding, b"%s list has %d blocks, its counter says %d", name, count, chain.size)
    return False


cdef bint check_block(const Blocks* b, int32_t i, char* finding) noexcept nogil:
    cdef const Block* block = &b.block[i]
    if block.place > RESERVED or (block.place == RESERVED) != (i < b.reserved):
        return found(finding, b"block %d has place %d", i, <int>block.place)
    if block.refcount < 0 or block.raw < 0 or block.hold < 0 or block.raw > block.refcount:
        return found(finding, b"block %d has refcount %d, raw %d, hold %d", i, block.refcount, block.raw, block.hold)
    if (block.place == USED) != (block.refcount + block.hold > 0):
        return found(finding, b"block %d has place %d with refcount %d and hold %d", i, <int>block.place,
                     block.refcount, block.hold)
    if block.noted and block.committed:
        return found(finding, b"block %d is committed, and in the dropped list", i)
    if block.place == BLANK and block.committed:
        return found(finding, b"block %d is blank and committed", i)
    if b.floor[i] and not block.hold:
        return found(finding, b"block %d has floor %d without a hold", i, b.floor[i])
    return False


cdef bint check_ids(const Blocks* b, const int32_t* ids, int32_t n, bint noted, const char* name, int32_t* seen,
                    char* finding) noexcept nogil:
    """The blank stack, or the dropped list, names each of its blocks once."""
    cdef int32_t k, id
    memset(seen, 0, b.num_blocks * sizeof(int32_t))
    for k in range(n):
        id = ids[k]
        if (id < b.reserved or id >= b.num_blocks or seen[id]
                or (b.block[id].noted == 0 if noted else b.block[id].place != BLANK)):
            return found(finding, b"%s holds block %d at %d", name, id, k)
        seen[id] = 1
    return False


cdef bint blocks_check(const Blocks* b, int32_t* seen, char* finding) noexcept nogil:
    """Whether an invariant does not hold; the first one, in words. `seen`: room for a number a block. O(num_blocks)."""
    cdef int32_t i, shared = 0, settled = 0, noted = 0
    cdef int32_t[5] places
    if not (0 <= b.num_blank <= b.num_blocks and 0 <= b.num_dropped <= b.num_blocks):
        return found(finding, b"the blank stack has %d entries and the dropped list %d", b.num_blank, b.num_dropped)
    memset(places, 0, sizeof(places))
    for i in range(b.num_blocks):
        if check_block(b, i, finding):
            return True
        places[b.block[i].place] += 1
        shared += b.block[i].refcount > 1
        settled += b.block[i].place == EVICTABLE and b.block[i].fence == SETTLED
        noted += b.block[i].noted
    if places[USED] != b.num_used or shared != b.num_shared or b.num_used > b.peak_used:
        return found(finding, b"counted %d used and %d shared blocks, the counters say %d and %d", places[USED], shared,
                     b.num_used, b.num_shared)
    if (check_ids(b, b.blank, b.num_blank, False, b"blank stack", seen, finding)
            or check_ids(b, b.dropped, b.num_dropped, True, b"the dropped list", seen, finding)):
        return True
    if noted != b.num_dropped:
        return found(finding, b"the dropped list has %d entries, %d blocks are noted", b.num_dropped, noted)
    if places[BLANK] != b.num_blank:
        return found(finding, b"blank stack has %d entries for %d blank blocks", b.num_blank, places[BLANK])
    if b.limbo.size and (b.newest_pending == 0 or b.block[b.limbo.head].fence < b.oldest_pending):
        return found(finding, b"limbo holds %d blocks that no pending step can use", b.limbo.size)
    if check_chain(b, &b.lru, EVICTABLE, b"LRU", finding) or check_chain(b, &b.limbo, LIMBO, b"limbo", finding):
        return True
    if places[EVICTABLE] != b.num_evictable or settled + b.lru.size != b.num_evictable or places[LIMBO] != b.limbo.size:
        return found(finding, b"a block is on no list")
    return False
