"""Sequences: handles and lengths. C functions on a `Seqs` struct, which cannot fail: callers check first."""

cdef int64_t GENERATIONS = <int64_t>1 << 32

# ---- handles -----------------------------------------------------------------------------------------------

cdef inline int64_t seq_made(const Seqs* s, int32_t slot) noexcept nogil:
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


cdef int seqs_judge(Seqs* s, Ints* batch, const Ints* each, bint any_, Verdict* v) noexcept nogil:
    """Handles of a call: live, no duplicates; `each`, NULL: none, has one number or one for each. `any_`: those being
    loaded too."""
    cdef Py_ssize_t k, row
    cdef int64_t handle
    cdef int32_t slot
    cdef bint alone = batch.data == &batch.scalar       # it came as one int
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
    if each != NULL and each.size >= 0 and each.size != batch.size:
        return refused(v, BAD_SHAPE, -1, each.size, 0, 0, batch.size)
    return OK


# ---- one sequence ------------------------------------------------------------------------------------------

cdef int32_t seq_new(Seqs* s) noexcept nogil:
    """Open the oldest free slot. The caller has checked that there is one."""
    cdef int32_t slot = s.free_slot[s.first_free]
    cdef Seq* q = &s.seq[slot]
    q.handle = seq_next_handle(s)
    s.first_free = s.first_free + 1 if s.first_free + 1 < s.max_seqs else 0
    s.num_free_slots -= 1
    s.num_open += 1
    s.life[slot].life = OPEN
    s.life[slot].late = False
    s.life[slot].fork_step = s.life[slot].point = 0
    q.num_tokens = q.last_step = 0
    q.num_blocks = 0
    if s.prefix != NULL:
        memset(&s.prefix[slot], 0, sizeof(SeqPrefix))
    return slot


cdef void seq_leave_name(const Seqs* s, int32_t slot) noexcept nogil:
    """A sequence is in no namespace any more: nothing of it is indexed from here on."""
    cdef SeqPrefix* prefix = &s.prefix[slot]
    if prefix.name != NULL:
        name_leave(s.names, prefix.name)
        prefix.name = NULL


cdef void seq_retire_handle(Seqs* s, int32_t slot) noexcept nogil:
    """Make the slot's handle stale and the slot free, or retired after its last generation."""
    cdef SeqLife* life = &s.life[slot]
    cdef int32_t end
    if s.prefix != NULL:
        seq_leave_name(s, slot)
    s.num_open -= 1
    s.num_late -= life.late
    life.late = False
    s.seq[slot].handle = ~slot
    if s.first_generation + life.generation + 1 == GENERATIONS:
        life.life = RETIRED
        return
    life.generation += 1
    life.life = FREE_SLOT
    end = s.first_free + s.num_free_slots
    s.free_slot[end if end < s.max_seqs else end - s.max_seqs] = slot
    s.num_free_slots += 1


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


cdef int64_t seq_done(const Seqs* s, const Blocks* b, int32_t slot) noexcept nogil:
    """Leading tokens of a sequence that no pending step still has to write."""
    cdef const SeqPrefix* prefix = &s.prefix[slot]
    cdef int64_t fork_step = s.life[slot].fork_step, oldest = b.oldest_pending
    if oldest == 0 or (s.seq[slot].last_step < oldest and fork_step < oldest):
        return s.seq[slot].num_tokens
    return max(prefix.done, prefix.forked_at) if fork_step < oldest else prefix.done


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
            h = mix(h, q.handle == ~slot)
        h = mix(mix(mix(h, q.num_tokens), q.num_blocks), s.life[slot].point)
        if b.newest_pending and q.last_step >= b.oldest_pending:
            h = mix(h, next_step - q.last_step)
        if b.newest_pending and s.life[slot].fork_step >= b.oldest_pending:
            h = mix(h, ~(next_step - s.life[slot].fork_step))
        if s.prefix != NULL:
            h = mix(mix(mix(h, s.prefix[slot].committed), s.prefix[slot].done), s.prefix[slot].forked_at)
            h = mix(mix(h, s.prefix[slot].name.hash if s.prefix[slot].name != NULL else 0), s.prefix[slot].published)
            for k in range(s.prefix[slot].committed % b.block_size):
                h = mix(h, s.partial[slot * b.block_size + k])
    return h


cdef bint check_handle(const Seqs* s, int32_t slot, int32_t* num_open, int32_t* retired, char* finding) noexcept nogil:
    """A slot has the handle that its life says. It is counted by its life."""
    cdef int64_t handle = s.seq[slot].handle, made = seq_made(s, slot)
    num_open[0] += seq_has_blocks(s, slot)
    retired[0] += s.life[slot].life == RETIRED
    if handle == made if s.life[slot].life == OPEN else (
            handle == ~slot or (handle == ~made and s.life[slot].life == LOADING)):
        return False
    return found(finding, b"slot %d has life %d and handle %lld", slot, <int>s.life[slot].life, <long long>handle)


cdef bint check_free_slots(const Seqs* s, int32_t num_open, int32_t retired, char* finding) noexcept nogil:
    """Each free slot stands on the list once: there are as many as free slots, all free, none twice."""
    cdef int32_t k, slot, at, listed = 0
    if num_open != s.num_open:
        return found(finding, b"%d sequences are open, the counter says %d", num_open, s.num_open)
    if num_open + retired + s.num_free_slots != s.max_seqs:
        return found(finding, b"%d open, %d retired and %d free slots of %d", num_open, retired, s.num_free_slots,
                     s.max_seqs)
    for k in range(s.num_free_slots):
        at = (s.first_free + k) % s.max_seqs
        slot = s.free_slot[at]
        if slot < 0 or slot >= s.max_seqs or s.life[slot].life != FREE_SLOT:
            return found(finding, b"a slot that is not free is on the list of free slots")
        s.seq[slot].mark = 0
    for k in range(s.num_free_slots):
        slot = s.free_slot[(s.first_free + k) % s.max_seqs]
        listed += s.seq[slot].mark == 0
        s.seq[slot].mark = ~<uint32_t>0
    for slot in range(s.max_seqs):
        if s.life[slot].life == FREE_SLOT:
            s.seq[slot].mark = 0
    if listed != s.num_free_slots:
        return found(finding, b"the list of free slots names %d slots, the counter says %d", listed, s.num_free_slots)
    return False
