"""Sequences over blocks: C functions on a `Seqs` struct. They cannot fail: callers check first, then commit.

A fork is metadata: it copies the block table and adds a reference per block. What a write to a shared block
means is decided in `step`, when the write is planned.
"""

cdef int64_t GENERATIONS = <int64_t>1 << 32

# ---- handles -----------------------------------------------------------------------------------------------

cdef inline int64_t seq_made(const Seqs* s, int32_t slot) noexcept nogil:
    """The handle of the current generation of a slot."""
    return s.base + ((<int64_t>s.life[slot].generation << SLOT_BITS) | slot)


cdef inline int64_t seq_next_handle(const Seqs* s) noexcept nogil:
    """What `seq_new` will return the slot of. The caller has checked that there is one."""
    return seq_made(s, s.free_slot[s.first_free])


cdef inline int64_t untagged(const Seqs* s, int64_t handle) noexcept nogil:
    """The handle as digests see it: equal pools in one process differ in their tags, and in where generations begin."""
    return handle - s.base


cdef int64_t seqs_fresh_generation(const Seqs* s) noexcept nogil:
    """A generation that no slot has given out, nor any later one. O(max_seqs)."""
    cdef int64_t fresh = 0
    cdef int32_t slot
    for slot in range(s.max_seqs):
        fresh = max(fresh, s.life[slot].generation + <int64_t>(s.life[slot].life != FREE_SLOT))
    return s.first_generation + fresh


cdef inline void seq_new_version(Seqs* s, Seq* q) noexcept nogil:
    s.versions += 1
    q.version = s.versions


cdef int32_t seq_judge(const Seqs* s, int64_t handle, Py_ssize_t row, Verdict* v) noexcept nogil:
    """Slot of a live handle, or -1 and why it has none (row -1: not in a batch)."""
    cdef int32_t slot = seq_find(s, handle)
    if slot >= 0:
        return slot
    slot = slot_of(handle)
    if handle < 0:
        refused(v, NEGATIVE_HANDLE, row, handle, 0, 0, 0)
    elif handle >> TAG_SHIFT != s.tag:
        refused(v, FOREIGN_HANDLE, row, handle, 0, 0, 0)
    elif slot >= s.max_seqs:
        refused(v, NO_SUCH_SEQUENCE, row, handle, 0, s.max_seqs, slot)
    elif s.seq[slot].handle == ~handle:
        refused(v, LOADING_ROW, row, handle, 0, 0, 0)
    else:
        refused(v, STALE_HANDLE, row, handle, 0, 0,
                s.first_generation + s.life[slot].generation + (s.life[slot].life == LOADING))
    return -1


cdef int32_t seq_judge_any(const Seqs* s, int64_t handle, Py_ssize_t row, Verdict* v) noexcept nogil:
    """`seq_judge` for calls that take a sequence also while it is being loaded."""
    cdef int32_t slot = seq_judge(s, handle, row, v)
    return slot_of(handle) if slot < 0 and v.reason == LOADING_ROW else slot


cdef void seqs_new_stamp(Seqs* s) noexcept nogil:
    cdef int32_t slot
    s.stamp += 1
    if s.stamp == 0:
        for slot in range(s.max_seqs):
            s.seq[slot].mark = 0
        s.stamp = 1


cdef int seqs_judge(Seqs* s, Ints* batch, bint any_, Verdict* v) noexcept nogil:
    """Handles of a call: live, no duplicates. `any_`: those being loaded too."""
    cdef Py_ssize_t k, row
    cdef int64_t handle
    cdef int32_t slot
    cdef bint alone = ints_alone(batch)
    seqs_new_stamp(s)
    for k in range(batch.size):
        row = -1 if alone else k
        handle = ints_at(batch, k)
        slot = seq_judge_any(s, handle, row, v) if any_ else seq_judge(s, handle, row, v)
        if slot < 0:
            return v.reason
        if s.seq[slot].mark == s.stamp:
            return refused(v, DUPLICATE_HANDLE, k, ints_at(batch, k), 0, 0, 0)
        s.seq[slot].mark = s.stamp
    return OK


# ---- one sequence ------------------------------------------------------------------------------------------

cdef void seq_refresh(const Seqs* s, const Blocks* b, int32_t slot) noexcept nogil:
    """Recompute where the next token of a sequence goes."""
    cdef Seq* q = &s.seq[slot]
    cdef int64_t index = whole_blocks(b, q.kv_len)
    if index < q.num_blocks:
        q.tail = seq_table(s, slot)[index]
        q.stop_slot = (q.tail + <int64_t>1) * b.block_size
        q.next_slot = q.stop_slot - (index + 1) * b.block_size + q.kv_len
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
    q.kv_len = q.next_slot = q.stop_slot = 0
    q.num_blocks = 0
    q.epoch = 0
    q.last_step = 0
    seq_new_version(s, q)
    if s.prefix != NULL:
        memset(&s.prefix[slot], 0, sizeof(SeqPrefix))
    return slot


cdef void seq_leave_root(const Seqs* s, int32_t slot) noexcept nogil:
    """A sequence is in no namespace any more: nothing of it is indexed from here on."""
    cdef SeqPrefix* prefix = &s.prefix[slot]
    if prefix.root:
        name_leave(s.names, prefix.name)
        prefix.name = NULL
        prefix.root = 0


cdef void seq_retire_handle(Seqs* s, int32_t slot) noexcept nogil:
    """Make the slot's handle stale and the slot free, or retired after its last generation."""
    cdef SeqLife* life = &s.life[slot]
    cdef int32_t end
    if s.prefix != NULL:
        seq_leave_root(s, slot)
    s.num_open -= 1
    s.seq[slot].handle = -1
    s.seq[slot].next_slot = s.seq[slot].stop_slot = 0      # no token goes into a closed sequence
    if s.first_generation + life.generation + 1 == GENERATIONS:
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
    s.sum_tokens -= q.kv_len
    s.sum_blocks -= q.num_blocks
    b.digest = mix(mix(b.digest, OP_CLOSE), untagged(s, s.seq[slot].handle))
    seq_retire_handle(s, slot)


# ---- loads -------------------------------------------------------------------------------------------------

cdef void seq_begin_load(Seqs* s, int32_t slot) noexcept nogil:
    """The bytes of a sequence are being loaded: nobody but `loaded` ends that."""
    s.life[slot].life = LOADING
    s.seq[slot].handle = ~s.seq[slot].handle


cdef int32_t seq_loading(const Seqs* s, int64_t handle) noexcept nogil:
    """Slot of a sequence that is being loaded, also if it was closed meanwhile. -1: there is none of this handle."""
    cdef int32_t slot = slot_of(handle)
    if handle < 0 or slot >= s.max_seqs or s.life[slot].life != LOADING:
        return -1
    return slot if handle == seq_made(s, slot) else -1


cdef void seq_end_load(Seqs* s, int32_t slot) noexcept nogil:
    s.life[slot].life = OPEN
    s.seq[slot].handle = seq_made(s, slot)


cdef void seq_truncate(Seqs* s, Blocks* b, int32_t slot, int64_t length) noexcept nogil:
    cdef Seq* q = &s.seq[slot]
    cdef int32_t keep = <int32_t>whole_blocks(b, length + b.block_size - 1)
    if keep < q.num_blocks:
        blocks_unref_many(b, seq_table(s, slot) + keep, q.num_blocks - keep)
        s.sum_blocks -= q.num_blocks - keep
        q.num_blocks = keep
        q.epoch += 1
        seq_new_version(s, q)
    s.sum_tokens -= q.kv_len - length
    q.kv_len = length
    seq_refresh(s, b, slot)
    b.digest = mix(mix(mix(b.digest, OP_TRUNCATE), untagged(s, s.seq[slot].handle)), length)


# ---- eviction ----------------------------------------------------------------------------------------------

cdef int32_t seq_rewritten(const Seqs* s, const Blocks* b, int32_t slot, int64_t first, int64_t length,
                           int32_t from_) noexcept nogil:
    """First table index, `from_` at least, that compacting to `length` tokens rewrites and must not; -1: none.

    The first `first` tokens stay where they are. A block may be rewritten iff a token could be written at its
    beginning: one reference, not committed, and no pending copy reads it (the write rule of `step`).
    """
    cdef const int32_t* table = seq_table(s, slot)
    cdef int64_t index = max(whole_blocks(b, first), <int64_t>from_)
    cdef int64_t end = whole_blocks(b, length + b.block_size - 1)
    cdef const Block* block
    if length == s.seq[slot].kv_len:
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
    s.life[slot].point = q.kv_len + s.life[slot].evicted
    s.life[slot].evicted += n
    s.evicted_tokens += n
    s.sum_tokens -= n
    q.kv_len -= n
    q.epoch += 1
    seq_new_version(s, q)
    if s.prefix != NULL:
        s.prefix[slot].committed = s.prefix[slot].published = s.prefix[slot].done = s.prefix[slot].forked_at = 0
        seq_leave_root(s, slot)


cdef void seq_compact(Seqs* s, Blocks* b, int32_t slot, int64_t length) noexcept nogil:
    """The sequence keeps `length` of its tokens, at the front of its table. O(blocks that leave)."""
    cdef Seq* q = &s.seq[slot]
    cdef int32_t keep = <int32_t>whole_blocks(b, length + b.block_size - 1)
    b.digest = mix(mix(mix(b.digest, OP_COMPACT), untagged(s, q.handle)), length)
    if length == q.kv_len:
        return
    if keep < q.num_blocks:
        blocks_unref_many(b, seq_table(s, slot) + keep, q.num_blocks - keep)
        s.sum_blocks -= q.num_blocks - keep
        q.num_blocks = keep
    lose_tokens(s, slot, q.kv_len - length)
    seq_refresh(s, b, slot)


cdef void seq_evict(Seqs* s, Blocks* b, int32_t slot, const Ints* places) noexcept nogil:
    """Full blocks leave the table, at `places`, ascending; what is behind them moves up. O(blocks)."""
    cdef Seq* q = &s.seq[slot]
    cdef int32_t* table = seq_table(s, slot)
    cdef int32_t k, n = <int32_t>places.size, at = 0
    b.digest = mix(mix(mix(b.digest, OP_EVICT_BLOCKS), untagged(s, q.handle)), n)
    if n == 0:
        return
    for k in range(n - 1, -1, -1):
        b.digest = mix(b.digest, ints_at(places, k))
        blocks_unref(b, table[ints_at(places, k)])
    for k in range(q.num_blocks):
        if at < n and ints_at(places, at) == k:
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
        return s.seq[slot].kv_len
    return max(prefix.done, prefix.forked_at) if fork_step < oldest else prefix.done


cdef void seq_fork(Seqs* s, Blocks* b, int32_t parent, int32_t n, int64_t* children) noexcept nogil:
    """n new sequences over the parent's filled blocks. The caller has checked that there are n free slots."""
    cdef const Seq* p = &s.seq[parent]
    cdef int32_t shared = <int32_t>whole_blocks(b, p.kv_len + b.block_size - 1)
    cdef int64_t inherited = max(p.last_step, s.life[parent].fork_step)
    cdef int32_t k, child
    cdef Seq* q
    b.digest = mix(mix(mix(b.digest, OP_FORK), untagged(s, p.handle)), n)
    if n:
        blocks_ref_many(b, seq_table(s, parent), shared, n)
    for k in range(n):
        child = seq_new(s)
        q = &s.seq[child]
        q.kv_len = p.kv_len
        q.num_blocks = shared
        s.life[child].evicted = s.life[parent].evicted
        s.life[child].point = s.life[parent].point
        memcpy(seq_table(s, child), seq_table(s, parent), shared * sizeof(int32_t))
        if b.newest_pending and inherited >= b.oldest_pending:
            s.life[child].fork_step = inherited
            s.newest_fork_step = max(s.newest_fork_step, inherited)
        if s.prefix != NULL:
            s.prefix[child] = s.prefix[parent]
            if s.prefix[child].root:
                s.prefix[child].name.users += 1
            s.prefix[child].done = seq_done(s, b, parent)
            s.prefix[child].forked_at = p.kv_len
            memcpy(s.partial + child * b.block_size, s.partial + parent * b.block_size,
                   (s.prefix[parent].committed % b.block_size) * sizeof(int32_t))
        seq_refresh(s, b, child)
        children[k] = q.handle
        b.digest = mix(b.digest, untagged(s, q.handle))
    s.sum_tokens += n * p.kv_len
    s.sum_blocks += <int64_t>n * shared


cdef void seqs_reset(Seqs* s) noexcept nogil:
    """Make every handle stale; slots are free in ascending order, as in a new pool."""
    cdef int32_t slot
    for slot in range(s.max_seqs):
        if seq_has_blocks(s, slot):
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
        if not seq_has_blocks(s, slot):
            continue
        if s.life[slot].life == LOADING:
            h = mix(h, q.handle == -1)
        h = mix(mix(mix(h, q.kv_len), q.num_blocks), q.epoch)
        if s.life[slot].evicted:
            h = mix(mix(h, ~s.life[slot].evicted), s.life[slot].point)
        if b.newest_pending and q.last_step >= b.oldest_pending:
            h = mix(h, next_step - q.last_step)
        if b.newest_pending and s.life[slot].fork_step >= b.oldest_pending:
            h = mix(h, ~(next_step - s.life[slot].fork_step))
        for k in range(q.num_blocks if s.table != NULL else 0):         # else groups have tables
            h = mix(h, seq_table(s, slot)[k])
        if s.prefix != NULL:
            h = mix(mix(mix(h, s.prefix[slot].committed), s.prefix[slot].done), s.prefix[slot].forked_at)
            h = mix(mix(h, s.prefix[slot].root), s.prefix[slot].published)
            for k in range(s.prefix[slot].committed % b.block_size):
                h = mix(h, s.partial[slot * b.block_size + k])
    return h


cdef bint check_sequence(const Seqs* s, const Blocks* b, int32_t slot, char* finding) noexcept nogil:
    """An open sequence: lengths, and where its next token goes."""
    cdef const Seq* q = &s.seq[slot]
    cdef const SeqLife* life = &s.life[slot]
    cdef const SeqPrefix* prefix
    cdef int64_t due
    if q.kv_len < 0 or q.kv_len > q.num_blocks * b.block_size or not 0 <= q.num_blocks <= s.max_blocks:
        return snprintf(finding, FINDING, b"sequence in slot %d has %lld tokens in %d blocks", slot,
                        <long long>q.kv_len, q.num_blocks) > 0
    if not 0 <= life.evicted <= life.point <= q.kv_len + life.evicted:
        return snprintf(finding, FINDING, b"sequence in slot %d has %lld tokens, %lld left by %lld", slot,
                        <long long>q.kv_len, <long long>life.evicted, <long long>life.point) > 0
    if s.prefix != NULL:
        prefix = &s.prefix[slot]
        if life.evicted and (prefix.committed or prefix.root):
            return snprintf(finding, FINDING, b"sequence in slot %d was evicted from, and has %lld tokens made known",
                            slot, <long long>prefix.committed) > 0
        if not (0 <= prefix.published <= prefix.committed // b.block_size and prefix.committed <= q.kv_len):
            return snprintf(finding, FINDING, b"sequence in slot %d has %lld blocks published of %lld tokens known",
                            slot, <long long>prefix.published, <long long>prefix.committed) > 0
    if q.next_slot < q.stop_slot:
        due = q.tail * b.block_size + q.kv_len % b.block_size
        if q.kv_len // b.block_size >= q.num_blocks or q.tail != seq_table(s, slot)[q.kv_len // b.block_size]:
            return snprintf(finding, FINDING, b"sequence in slot %d has tail %d, its table says otherwise", slot,
                            q.tail) > 0
        if q.stop_slot != (q.tail + <int64_t>1) * b.block_size:
            return snprintf(finding, FINDING, b"sequence in slot %d has a tail that ends at slot %lld", slot,
                            <long long>q.stop_slot) > 0
    else:                                   # looked up by the next step, legal only at the end of a block
        due = q.next_slot if q.kv_len % b.block_size == 0 else -1
    if q.next_slot != due:
        return snprintf(finding, FINDING, b"sequence in slot %d would write its next token to slot %lld", slot,
                        <long long>q.next_slot) > 0
    return False


cdef bint check_handle(const Seqs* s, int32_t slot, int32_t* num_open, int32_t* retired, char* finding) noexcept nogil:
    """A slot has the handle that its life says. It is counted by its life."""
    cdef int64_t handle = s.seq[slot].handle, made = seq_made(s, slot)
    num_open[0] += seq_has_blocks(s, slot)
    retired[0] += s.life[slot].life == RETIRED
    if handle == made if s.life[slot].life == OPEN else (
            handle == -1 or (handle == ~made and s.life[slot].life == LOADING)):
        return False
    return snprintf(finding, FINDING, b"slot %d has life %d and handle %lld", slot, <int>s.life[slot].life,
                    <long long>handle) > 0


cdef bint check_references(const Blocks* b, int32_t* references, char* finding) noexcept nogil:
    """`references` has the entries of tables; duplicates that hold a block are added here."""
    cdef int32_t k
    for k in range(b.num_blocks):
        if b.block[k].canonical_held:
            references[b.canonical[k]] += 1
    for k in range(b.reserved, b.num_blocks):
        if b.block[k].refcount != references[k] + b.block[k].raw:
            return snprintf(finding, FINDING,
                            b"block %d has refcount %d, tables name it %d times and raw references are %d", k,
                            b.block[k].refcount, references[k], b.block[k].raw) > 0
    return False


cdef bint check_free_slots(const Seqs* s, int32_t num_open, int32_t retired, char* finding) noexcept nogil:
    """Each free slot stands on the list once: there are as many as free slots, all free, none twice."""
    cdef int32_t k, slot, at, listed = 0
    if num_open != s.num_open:
        return snprintf(finding, FINDING, b"%d sequences are open, the counter says %d", num_open, s.num_open) > 0
    if num_open + retired + s.num_free_slots != s.max_seqs:
        return snprintf(finding, FINDING, b"%d open, %d retired and %d free slots of %d", num_open, retired,
                        s.num_free_slots, s.max_seqs) > 0
    for k in range(s.num_free_slots):
        at = (s.first_free + k) % s.max_seqs
        slot = s.free_slot[at]
        if slot < 0 or slot >= s.max_seqs or s.life[slot].life != FREE_SLOT:
            return snprintf(finding, FINDING, b"a slot that is not free is on the list of free slots") > 0
        s.seq[slot].mark = 0
    for k in range(s.num_free_slots):
        slot = s.free_slot[(s.first_free + k) % s.max_seqs]
        listed += s.seq[slot].mark == 0
        s.seq[slot].mark = ~<uint32_t>0
    for slot in range(s.max_seqs):
        if s.life[slot].life == FREE_SLOT:
            s.seq[slot].mark = 0
    if listed != s.num_free_slots:
        return snprintf(finding, FINDING, b"the list of free slots names %d slots, the counter says %d", listed,
                        s.num_free_slots) > 0
    return False


cdef bint seqs_check(const Seqs* s, const Blocks* b, int32_t* references, char* finding) noexcept nogil:
    """Whether an invariant does not hold; the first one, in words. `references` is zero for every block.

    O(sum of table lengths + num_blocks + max_seqs).
    """
    cdef int32_t slot, k, block, num_open = 0, retired = 0
    cdef int64_t tokens = 0, blocks = 0
    for slot in range(s.max_seqs):
        if check_handle(s, slot, &num_open, &retired, finding):
            return True
        if not seq_has_blocks(s, slot):
            continue
        if check_sequence(s, b, slot, finding):
            return True
        tokens += s.seq[slot].kv_len
        blocks += s.seq[slot].num_blocks
        for k in range(s.seq[slot].num_blocks):
            block = seq_table(s, slot)[k]
            if block < b.reserved or block >= b.num_blocks:
                return snprintf(finding, FINDING, b"sequence in slot %d has block %d in its table", slot, block) > 0
            references[block] += 1
    if check_references(b, references, finding):
        return True
    if tokens != s.sum_tokens or blocks != s.sum_blocks:
        return snprintf(finding, FINDING, b"counted %lld tokens in %lld blocks, the counters say %lld and %lld",
                        <long long>tokens, <long long>blocks, <long long>s.sum_tokens, <long long>s.sum_blocks) > 0
    return check_free_slots(s, num_open, retired, finding)
