"""Sequences over blocks: C functions on a `Seqs` struct. They cannot fail: callers check first, then commit.

A fork is metadata: it copies the block table and adds a reference per block. What a write to a shared block
means is decided in `_step`, when the write is planned.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from kvpool._blocks cimport Block, Blocks, blocks_ref_many, blocks_unref, blocks_unref_many, whole_blocks
from kvpool._types cimport OP_CLOSE, OP_COMPACT, OP_EVICT_BLOCKS, OP_FORK, OP_TRUNCATE, mix

cdef uint64_t GENERATIONS = 1ULL << 32

# ---- one sequence ------------------------------------------------------------------------------------------

cdef void seq_refresh(const Seqs* s, const Blocks* b, int32_t slot) noexcept nogil:
    """Recompute where the next token of a sequence goes."""
    cdef Seq* q = &s.seq[slot]
    cdef int64_t index = whole_blocks(b, q.num_tokens)
    if index < q.num_blocks:
        q.tail = seq_table(s, slot)[index]
        q.stop_slot = (q.tail + <int64_t>1) * b.block_size
        q.next_slot = q.stop_slot - (index + 1) * b.block_size + q.num_tokens
    else:
        q.next_slot = q.stop_slot = 0


cdef int32_t seq_new(Seqs* s) noexcept nogil:
    """Open the oldest free slot. The caller has checked that there is one."""
    cdef int32_t slot = s.free_slot[s.first_free]
    cdef Seq* q = &s.seq[slot]
    q.handle = seq_next_handle(s)
    s.first_free = s.first_free + 1 if s.first_free + 1 < s.max_seqs else 0
    s.num_free_slots -= 1
    s.num_open += 1
    s.life[slot].life = OPEN
    s.life[slot].fork_step = s.life[slot].evicted = s.life[slot].point = 0
    q.num_tokens = q.next_slot = q.stop_slot = 0
    q.num_blocks = 0
    q.epoch = 0
    q.last_step = 0
    seq_new_version(s, q)
    if s.prefix != NULL:
        memset(&s.prefix[slot], 0, sizeof(SeqPrefix))
    return slot


cdef void seq_retire_handle(Seqs* s, int32_t slot) noexcept nogil:
    """Make the slot's handle stale and the slot free, or retired after its last generation."""
    cdef SeqLife* life = &s.life[slot]
    cdef int32_t end
    s.num_open -= 1
    s.seq[slot].handle = -1
    s.seq[slot].next_slot = s.seq[slot].stop_slot = 0      # no token goes into a closed sequence
    if <uint64_t>life.generation + 1 == GENERATIONS:
        life.life = RETIRED
        return
    life.generation += 1
    life.life = FREE_SLOT
    end = s.first_free + s.num_free_slots
    s.free_slot[end if end < s.max_seqs else end - s.max_seqs] = slot
    s.num_free_slots += 1


cdef void seq_close(Seqs* s, Blocks* b, int32_t slot) noexcept nogil:
    """Release every block, youngest first. O(blocks)."""
    cdef Seq* q = &s.seq[slot]
    blocks_unref_many(b, seq_table(s, slot), q.num_blocks)
    s.sum_tokens -= q.num_tokens
    s.sum_blocks -= q.num_blocks
    b.digest = mix(mix(b.digest, OP_CLOSE), untagged(s.seq[slot].handle))
    seq_retire_handle(s, slot)


cdef void seq_truncate(Seqs* s, Blocks* b, int32_t slot, int64_t length) noexcept nogil:
    cdef Seq* q = &s.seq[slot]
    cdef int32_t keep = <int32_t>whole_blocks(b, length + b.block_size - 1)
    if keep < q.num_blocks:
        blocks_unref_many(b, seq_table(s, slot) + keep, q.num_blocks - keep)
        s.sum_blocks -= q.num_blocks - keep
        q.num_blocks = keep
        q.epoch += 1
        seq_new_version(s, q)
    s.sum_tokens -= q.num_tokens - length
    q.num_tokens = length
    seq_refresh(s, b, slot)
    b.digest = mix(mix(mix(b.digest, OP_TRUNCATE), untagged(s.seq[slot].handle)), length)


# ---- eviction ----------------------------------------------------------------------------------------------

cdef int32_t seq_rewritten(const Seqs* s, const Blocks* b, int32_t slot, int64_t first, int64_t length,
                           int32_t from_) noexcept nogil:
    """First table index, `from_` at least, that compacting to `length` tokens rewrites and must not; -1: none.

    The first `first` tokens stay where they are. A block may be rewritten iff a token could be written at its
    beginning: one reference, not committed, and no pending copy reads it (the write rule of `_step`).
    """
    cdef const int32_t* table = seq_table(s, slot)
    cdef int64_t index = max(whole_blocks(b, first), <int64_t>from_)
    cdef int64_t end = whole_blocks(b, length + b.block_size - 1)
    cdef const Block* block
    if length == s.seq[slot].num_tokens:
        return -1                           # nothing leaves, so nothing moves
    while index < end:
        block = &b.block[table[index]]
        if block.refcount != 1 or block.committed or b.floor[table[index]]:
            return <int32_t>index
        index += 1
    return -1


cdef void lose_tokens(Seqs* s, int32_t slot, int64_t n) noexcept nogil:
    """n > 0 tokens left the table. What a block holds follows from its tokens no more: the prefix cache forgets."""
    cdef Seq* q = &s.seq[slot]
    s.life[slot].point = q.num_tokens + s.life[slot].evicted
    s.life[slot].evicted += n
    s.evicted_tokens += n
    s.sum_tokens -= n
    q.num_tokens -= n
    q.epoch += 1
    seq_new_version(s, q)
    if s.prefix != NULL:
        s.prefix[slot].committed = s.prefix[slot].done = s.prefix[slot].forked_at = 0
        s.prefix[slot].root = 0


cdef void seq_compact(Seqs* s, Blocks* b, int32_t slot, int64_t length) noexcept nogil:
    """The sequence keeps `length` of its tokens, at the front of its table. O(blocks that leave)."""
    cdef Seq* q = &s.seq[slot]
    cdef int32_t keep = <int32_t>whole_blocks(b, length + b.block_size - 1)
    b.digest = mix(mix(mix(b.digest, OP_COMPACT), untagged(q.handle)), length)
    if length == q.num_tokens:
        return
    if keep < q.num_blocks:
        blocks_unref_many(b, seq_table(s, slot) + keep, q.num_blocks - keep)
        s.sum_blocks -= q.num_blocks - keep
        q.num_blocks = keep
    lose_tokens(s, slot, q.num_tokens - length)
    seq_refresh(s, b, slot)


cdef void seq_evict(Seqs* s, Blocks* b, int32_t slot, const int32_t* indices, int32_t n) noexcept nogil:
    """Full blocks leave the table, `indices` ascending; what is behind them moves up. O(blocks)."""
    cdef Seq* q = &s.seq[slot]
    cdef int32_t* table = seq_table(s, slot)
    cdef int32_t k, at = 0
    b.digest = mix(mix(mix(b.digest, OP_EVICT_BLOCKS), untagged(q.handle)), n)
    if n == 0:
        return
    for k in range(n - 1, -1, -1):
        b.digest = mix(b.digest, indices[k])
        blocks_unref(b, table[indices[k]])
    for k in range(q.num_blocks):
        if at < n and indices[at] == k:
            at += 1
        else:
            table[k - at] = table[k]
    q.num_blocks -= n
    s.sum_blocks -= n
    lose_tokens(s, slot, n * b.block_size)
    seq_refresh(s, b, slot)


cdef int64_t seq_done(const Seqs* s, const Blocks* b, int32_t slot) noexcept nogil:
    """Leading tokens of a sequence that no pending step still has to write."""
    cdef const SeqPrefix* prefix = &s.prefix[slot]
    cdef int64_t fork_step = s.life[slot].fork_step, oldest = b.oldest_pending
    if oldest == 0 or (s.seq[slot].last_step < oldest and fork_step < oldest):
        return s.seq[slot].num_tokens
    return max(prefix.done, prefix.forked_at) if fork_step < oldest else prefix.done


cdef void seq_fork(Seqs* s, Blocks* b, int32_t parent, int32_t n, int64_t* children) noexcept nogil:
    """n new sequences over the parent's filled blocks. The caller has checked that there are n free slots."""
    cdef const Seq* p = &s.seq[parent]
    cdef int32_t shared = <int32_t>whole_blocks(b, p.num_tokens + b.block_size - 1)
    cdef int64_t inherited = max(p.last_step, s.life[parent].fork_step)
    cdef int32_t k, child
    cdef Seq* q
    b.digest = mix(mix(mix(b.digest, OP_FORK), untagged(p.handle)), n)
    if n:
        blocks_ref_many(b, seq_table(s, parent), shared, n)
    for k in range(n):
        child = seq_new(s)
        q = &s.seq[child]
        q.num_tokens = p.num_tokens
        q.num_blocks = shared
        s.life[child].evicted = s.life[parent].evicted
        s.life[child].point = s.life[parent].point
        memcpy(seq_table(s, child), seq_table(s, parent), shared * sizeof(int32_t))
        if b.newest_pending and inherited >= b.oldest_pending:
            s.life[child].fork_step = inherited
            s.newest_fork_step = max(s.newest_fork_step, inherited)
        if s.prefix != NULL:
            s.prefix[child] = s.prefix[parent]
            s.prefix[child].done = seq_done(s, b, parent)
            s.prefix[child].forked_at = p.num_tokens
            memcpy(s.partial + child * b.block_size, s.partial + parent * b.block_size,
                   (s.prefix[parent].committed % b.block_size) * sizeof(int32_t))
        seq_refresh(s, b, child)
        children[k] = q.handle
        b.digest = mix(b.digest, untagged(q.handle))
    s.sum_tokens += n * p.num_tokens
    s.sum_blocks += <int64_t>n * shared


cdef void seqs_reset(Seqs* s) noexcept nogil:
    """Make every handle stale; slots are free in ascending order, as in a new pool."""
    cdef int32_t slot
    for slot in range(s.max_seqs):
        if s.life[slot].life == OPEN:
            seq_retire_handle(s, slot)
    s.first_free = s.num_free_slots = s.num_open = 0
    s.sum_tokens = s.sum_blocks = 0
    for slot in range(s.max_seqs):
        if s.life[slot].life == FREE_SLOT:
            s.free_slot[s.num_free_slots] = slot
            s.num_free_slots += 1


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t seqs_fingerprint(const Seqs* s, const Blocks* b, uint64_t h, int64_t next_step) noexcept nogil:
    """Hash of everything about sequences that a later call can see."""
    cdef int32_t slot, k
    cdef const Seq* q
    h = mix(mix(mix(h, s.max_seqs), s.max_blocks), s.watermark)
    for k in range(s.num_free_slots):
        slot = (s.first_free + k) % s.max_seqs
        h = mix(h, s.free_slot[slot])
    for slot in range(s.max_seqs):
        q = &s.seq[slot]
        h = mix(h, (<uint64_t>s.life[slot].generation << 2) | s.life[slot].life)
        if s.life[slot].life != OPEN:
            continue
        h = mix(mix(mix(h, q.num_tokens), q.num_blocks), q.epoch)
        if s.life[slot].evicted:
            h = mix(mix(h, ~s.life[slot].evicted), s.life[slot].point)
        if b.newest_pending and q.last_step >= b.oldest_pending:
            h = mix(h, next_step - q.last_step)
        if b.newest_pending and s.life[slot].fork_step >= b.oldest_pending:
            h = mix(h, ~(next_step - s.life[slot].fork_step))
        for k in range(q.num_blocks):
            h = mix(h, seq_table(s, slot)[k])
        if s.prefix != NULL:
            h = mix(mix(mix(h, s.prefix[slot].committed), s.prefix[slot].done), s.prefix[slot].forked_at)
            h = mix(h, s.prefix[slot].root)
            for k in range(s.prefix[slot].committed % b.block_size):
                h = mix(h, s.partial[slot * b.block_size + k])
    return h


cdef str seqs_check(const Seqs* s, const Blocks* b):
    """The first invariant that does not hold, in words, or None. O(sum of table lengths + num_blocks)."""
    cdef int32_t slot, k, num_open = 0, retired = 0
    cdef int64_t tokens = 0, blocks = 0
    cdef const Seq* q
    cdef dict references = {}
    for slot in range(s.max_seqs):
        q = &s.seq[slot]
        num_open += s.life[slot].life == OPEN
        retired += s.life[slot].life == RETIRED
        if (s.life[slot].life == OPEN) != (q.handle >= 0):
            return f"slot {slot} has life {s.life[slot].life} and handle {q.handle}"
        if s.life[slot].life != OPEN:
            continue
        if q.num_tokens < 0 or q.num_tokens > q.num_blocks * b.block_size or q.num_blocks > s.max_blocks:
            return f"sequence in slot {slot} has {q.num_tokens} tokens in {q.num_blocks} blocks"
        if not 0 <= s.life[slot].evicted <= s.life[slot].point <= q.num_tokens + s.life[slot].evicted:
            return (f"sequence in slot {slot} has {q.num_tokens} tokens, {s.life[slot].evicted} left by "
                    f"{s.life[slot].point}")
        if s.life[slot].evicted and s.prefix != NULL and (s.prefix[slot].committed or s.prefix[slot].root):
            return f"sequence in slot {slot} was evicted from, and has {s.prefix[slot].committed} tokens made known"
        if q.next_slot < q.stop_slot:
            due = q.tail * b.block_size + q.num_tokens % b.block_size
            if q.tail != seq_table(s, slot)[q.num_tokens // b.block_size]:
                return f"sequence in slot {slot} has tail {q.tail}, its table says otherwise"
            if q.stop_slot != (q.tail + <int64_t>1) * b.block_size:
                return f"sequence in slot {slot} has a tail that ends at slot {q.stop_slot}"
        else:                               # looked up by the next step, legal only at the end of a block
            due = q.next_slot if q.num_tokens % b.block_size == 0 else -1
        if q.next_slot != due:
            return f"sequence in slot {slot} would write its next token to slot {q.next_slot}"
        tokens += q.num_tokens
        blocks += q.num_blocks
        for k in range(q.num_blocks):
            if k & 0xFFFF == 0:
                PyErr_CheckSignals()
            block = seq_table(s, slot)[k]
            if block < b.reserved or block >= b.num_blocks:
                return f"sequence in slot {slot} has block {block} in its table"
            references[block] = references.get(block, 0) + 1
    PyErr_CheckSignals()
    for k in range(b.num_blocks):
        if b.block[k].canonical_held:
            references[b.canonical[k]] = references.get(b.canonical[k], 0) + 1
    for k in range(b.reserved, b.num_blocks):
        if k & 0xFFFF == 0:
            PyErr_CheckSignals()
        if b.block[k].refcount != references.get(k, 0) + b.block[k].raw:
            return (f"block {k} has refcount {b.block[k].refcount}, tables name it {references.get(k, 0)} times "
                    f"and raw references are {b.block[k].raw}")
    if tokens != s.sum_tokens or blocks != s.sum_blocks:
        return f"counted {tokens} tokens in {blocks} blocks, the counters say {s.sum_tokens} and {s.sum_blocks}"
    free_slots = {s.free_slot[(s.first_free + k) % s.max_seqs] for k in range(s.num_free_slots)}
    if len(free_slots) != s.num_free_slots or num_open != s.num_open:
        return f"{num_open} sequences are open, the counter says {s.num_open}"
    if any(s.life[slot].life != FREE_SLOT for slot in free_slots):
        return "a slot that is not free is on the list of free slots"
    if num_open + retired + s.num_free_slots != s.max_seqs:
        return f"{num_open} open, {retired} retired and {s.num_free_slots} free slots of {s.max_seqs}"
    return None
