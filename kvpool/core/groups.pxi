"""Layer groups: C functions on a `Groups` struct, which cannot fail where they change anything: callers judge first."""


cdef inline int64_t blocks_for(const Groups* gs, int64_t tokens) noexcept nogil:
    """Blocks of the pool that the entries for so many tokens have room for, in every group."""
    cdef int64_t size = gs.unit * gs.block_size
    return (tokens + size - 1) // size * gs.unit


cdef void tail_refresh(const Groups* gs, LayerGroup* g, int32_t slot, int64_t position) noexcept nogil:
    """Recompute where the token at a position of a row goes, the next one, as far as no step has to look."""
    cdef Tail* t = tail_of(g, slot)
    cdef int64_t held, index, room = gs.seqs.seq[slot].num_blocks * gs.block_size - position
    g.blocks.turns += 1
    t.next_slot = t.stop_slot = 0
    if g.kind == STATE_LAYERS or room <= 0:
        return
    held = held_of(g, slot, position)
    index = entry_at(g, held)
    t.block = group_row(g, slot)[index * g.columns]
    t.next_slot = (t.block - index) * g.block_size + held
    t.stop_slot = t.next_slot + min(room, (index + 1) * g.block_size - held)


cdef void tails_refresh(Groups* gs, int32_t slot) noexcept nogil:
    cdef int32_t k
    for k in range(gs.num_groups):
        tail_refresh(gs, &gs.group[k], slot, gs.seqs.seq[slot].num_tokens)


cdef void set_size(Groups* gs, int32_t slot, int64_t blocks, int64_t length) noexcept nogil:
    """A sequence has room for so many blocks of the pool, and so many tokens; its tables have it already."""
    cdef Seq* q = &gs.seqs.seq[slot]
    gs.seqs.sum_blocks += blocks - q.num_blocks
    gs.seqs.sum_tokens += length - q.num_tokens
    q.num_blocks = <int32_t>blocks
    q.num_tokens = length
    tails_refresh(gs, slot)


cdef inline void new_version(LayerGroup* g, int32_t slot) noexcept nogil:
    g.versions += 1
    tail_of(g, slot).version = g.versions


cdef void groups_free(Groups* gs) noexcept nogil:
    cdef int32_t k
    for k in range(MAX_GROUPS):
        xfree(gs.group[k].table)
        xfree(gs.group[k].tails)
        xfree(gs.group[k].seq)
        part_free(&gs.scratch[k])
    for k in range(1, gs.num_arenas):
        blocks_free(gs.arena[k])
    if gs.tree != NULL:
        tree_free(gs)
    xfree(gs)


cdef int group_init(LayerGroup* g, const Seqs* s, bint leads) noexcept nogil:
    cdef int32_t slot, max_seqs = s.max_seqs
    g.table = <int32_t*>xcalloc(max_seqs, g.width * sizeof(int32_t))
    g.seq = <GroupSeq*>xcalloc(max_seqs, sizeof(GroupSeq))
    if not leads:
        g.tails = <Tail*>xcalloc(max_seqs, sizeof(Tail))
    if g.table == NULL or g.seq == NULL or (g.tails == NULL and not leads):
        return NO_MEMORY
    g.tail = <char*>&s.seq[0].lead if leads else <char*>g.tails
    g.tail_stride = sizeof(Seq) if leads else sizeof(Tail)
    if g.kind == STATE_LAYERS:
        for slot in range(max_seqs):
            g.table[slot] = NO_BLOCK
    return OK


cdef int part_init(StepPart* part, int32_t max_rows) noexcept nogil:
    part.max_rows = max_rows
    part.change = <Change*>xcalloc(max_rows, sizeof(Change))
    part.slot = <int64_t*>xcalloc(max_rows, sizeof(int64_t))
    part.stale = <int32_t*>xcalloc(max_rows, sizeof(int32_t))
    part.taken = <int32_t*>xcalloc(max_rows, sizeof(int32_t))
    part.log.room = 16
    part.log.entry = <Replaced*>xcalloc(part.log.room, sizeof(Replaced))
    if (part.change == NULL or part.slot == NULL or part.stale == NULL or part.taken == NULL
            or part.log.entry == NULL):
        part_free(part)
        return NO_MEMORY
    return OK


cdef void part_free(StepPart* part) noexcept nogil:
    xfree(part.change)
    xfree(part.slot)
    xfree(part.stale)
    xfree(part.taken)
    xfree(part.log.entry)
    xfree(part.wire.row)
    xfree(part.wire.seen)
    memset(part, 0, sizeof(StepPart))


# ---- sequences ---------------------------------------------------------------------------------------------

cdef void group_unref(LayerGroup* g, int32_t slot, int32_t first, int32_t end) noexcept nogil:
    """Release entries first .. end - 1 of a row, the last first; holes have nothing to release."""
    cdef int32_t* row = group_row(g, slot)
    cdef int32_t gone = g.seq[slot].gone, low = max(first, gone), columns = g.columns
    if low < end:
        blocks_unref_many(g.blocks, row + <int64_t>low * columns, (end - low) * columns)
    end = min(end, g.kept)
    if gone and first < end:
        blocks_unref_many(g.blocks, row + <int64_t>first * columns, (end - first) * columns)


cdef void group_ref(LayerGroup* g, int32_t slot, int32_t end, int32_t times) noexcept nogil:
    """So many references more on the first `end` entries of a row."""
    cdef int32_t* row = group_row(g, slot)
    cdef int32_t low = g.seq[slot].gone, kept = min(end, g.kept), columns = g.columns
    blocks_ref_many(g.blocks, row + <int64_t>low * columns, (end - low) * columns, times)
    if low:
        blocks_ref_many(g.blocks, row, kept * columns, times)


cdef void row_begin(LayerGroup* g, int32_t slot) noexcept nogil:
    g.seq[slot].evicted = 0
    tail_of(g, slot).epoch = 0
    set_gone(g, slot, 0)
    new_version(g, slot)


cdef void groups_fork(Groups* gs, int32_t parent, int32_t n, int64_t* children) noexcept nogil:
    """n new sequences over the parent's filled entries. The caller has checked that there are n free slots."""
    cdef Seqs* s = gs.seqs
    cdef Blocks* b = gs.arena[0]
    cdef const Seq* p = &s.seq[parent]
    cdef LayerGroup* g
    cdef int64_t blocks = blocks_for(gs, p.num_tokens), inherited = max(p.last_step, s.life[parent].fork_step)
    cdef int32_t i, k, child, entries
    b.digest = mix(mix(mix(b.digest, OP_FORK), untagged(s, p.handle)), n)
    for k in range(gs.num_groups if n else 0):
        g = &gs.group[k]
        group_ref(g, parent, entries_of(g, parent, blocks), n)
    for i in range(n):
        child = seq_new(s)
        s.seq[child].num_tokens = p.num_tokens
        s.seq[child].num_blocks = <int32_t>blocks
        s.life[child].point = s.life[parent].point
        if b.newest_pending and inherited >= b.oldest_pending:
            s.life[child].fork_step = inherited
            s.newest_fork_step = max(s.newest_fork_step, inherited)
        for k in range(gs.num_groups):
            g = &gs.group[k]
            entries = entries_of(g, parent, blocks)
            memcpy(group_row(g, child), group_row(g, parent), <size_t>entries * g.columns * sizeof(int32_t))
            g.seq[child] = g.seq[parent]
            if i == 0:
                tail_refresh(gs, g, child, p.num_tokens)
            else:
                tail_of(g, child)[0] = tail_of(g, slot_of(children[0]))[0]
            tail_of(g, child).epoch = 0
            new_version(g, child)
            s.life[child].late |= g.kind != STATE_LAYERS and p.num_tokens >= g.seq[child].due
        s.num_late += s.life[child].late
        if gs.tree != NULL:
            tree_fork(gs, parent, child)
        children[i] = s.seq[child].handle
        b.digest = mix(b.digest, untagged(s, children[i]))
    s.sum_tokens += n * p.num_tokens
    s.sum_blocks += n * blocks


cdef void groups_empty(Groups* gs, int32_t slot) noexcept nogil:
    """Release every entry of a sequence that was loaded in vain, as if it had been opened without blocks."""
    cdef LayerGroup* g
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        group_unref(g, slot, 0, entries_of(g, slot, gs.seqs.seq[slot].num_blocks))
        if g.kind == STATE_LAYERS:
            g.table[slot] = NO_BLOCK
        tail_of(g, slot).epoch += 1
        set_gone(g, slot, 0)
        new_version(g, slot)
    set_size(gs, slot, 0, 0)


cdef void groups_close(Groups* gs, int32_t slot) noexcept nogil:
    """Release every entry, group by group, the last first."""
    cdef Seqs* s = gs.seqs
    cdef Seq* q = &s.seq[slot]
    cdef LayerGroup* g
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        group_unref(g, slot, 0, entries_of(g, slot, q.num_blocks))
    if gs.tree != NULL:
        tree_close(gs, slot)
    for k in range(gs.num_groups):
        if gs.group[k].kind == STATE_LAYERS:
            gs.group[k].table[slot] = NO_BLOCK
    s.sum_tokens -= q.num_tokens
    s.sum_blocks -= q.num_blocks
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_CLOSE), untagged(s, q.handle))
    seq_retire_handle(s, slot)


cdef int64_t least_length(const LayerGroup* g, int32_t slot, int64_t length) noexcept nogil:
    """The least length from this one on at which the group holds all that a query there reads."""
    cdef int64_t end = g.seq[slot].gone * g.block_size      # of the tokens that were let go
    if end == 0 or length < g.kept * g.block_size:
        return length
    if g.kind == WINDOW_LAYERS:
        return max(length, end + g.reach - 1)
    return max(length, (end + g.reach - 1) // g.reach * g.reach)


cdef int groups_judge_length(const Groups* gs, Py_ssize_t row, int32_t slot, int64_t length, Verdict* v) noexcept nogil:
    """Whether a sequence can go back to a length, which is not above its own."""
    cdef int64_t least = length, before = -1
    cdef int32_t k, first = -1
    for k in range(gs.num_groups):
        if gs.group[k].kind == STATE_LAYERS and length != gs.seqs.seq[slot].num_tokens:
            return refused(v, STATE_IS_GONE, row, length, 0, gs.seqs.seq[slot].num_tokens, k)
    while least != before:
        before = least
        for k in range(gs.num_groups):
            least = least_length(&gs.group[k], slot, least)
            if least != length and first < 0:
                first = k
    return OK if first < 0 else refused(v, WINDOW_IS_GONE, row, length, least, gs.seqs.seq[slot].num_tokens, first)


cdef void groups_truncate(Groups* gs, int32_t slot, int64_t length) noexcept nogil:
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef LayerGroup* g
    cdef int64_t blocks = blocks_for(gs, length)
    cdef int32_t k, keep, entries
    if gs.tree != NULL:
        tree_truncate(gs, slot, length)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        keep = entries_of(g, slot, blocks)      # of a state: it stays, the length is the same
        entries = entries_of(g, slot, q.num_blocks)
        if keep < entries:
            group_unref(g, slot, keep, entries)
            tail_of(g, slot).epoch += 1
            new_version(g, slot)
        if keep <= g.kept:
            set_gone(g, slot, 0)
    set_size(gs, slot, blocks, length)
    gs.arena[0].digest = mix(mix(mix(gs.arena[0].digest, OP_TRUNCATE), untagged(gs.seqs, q.handle)), length)


# ---- tokens leave a sequence that goes on ------------------------------------------------------------------

cdef void group_loses(Groups* gs, LayerGroup* g, int32_t slot, int64_t n) noexcept nogil:
    """n > 0 tokens left a row."""
    cdef Seqs* s = gs.seqs
    s.life[slot].point = s.seq[slot].num_tokens
    s.evicted_tokens += n
    if gs.tree != NULL:             # what its blocks hold follows from its tokens no more
        row_ends(gs, slot)
        s.prefix[slot].committed = s.prefix[slot].published = s.prefix[slot].done = s.prefix[slot].forked_at = 0
    g.seq[slot].evicted += n
    tail_of(g, slot).epoch += 1
    new_version(g, slot)
    tail_refresh(gs, g, slot, s.seq[slot].num_tokens)


cdef void groups_compact(Groups* gs, int32_t group, int32_t slot, int64_t length) noexcept nogil:
    cdef LayerGroup* g = &gs.group[group]
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef int64_t leaving = held_of(g, slot, q.num_tokens) - length
    cdef int32_t entries = entries_of(g, slot, q.num_blocks), stay
    gs.arena[0].digest = mix(mix(mix(mix(gs.arena[0].digest, OP_COMPACT), group), untagged(gs.seqs, q.handle)), length)
    if leaving == 0:
        return
    stay = entries - <int32_t>(entry_at(g, g.seq[slot].evicted + leaving) - entry_at(g, g.seq[slot].evicted))
    group_unref(g, slot, stay, entries)
    group_loses(gs, g, slot, leaving)


cdef void groups_evict(Groups* gs, int32_t group, int32_t slot, const Ints* places) noexcept nogil:
    """Full entries leave a row, at `places`, ascending; what is behind them moves up."""
    cdef LayerGroup* g = &gs.group[group]
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef int32_t* ids = group_row(g, slot)
    cdef int64_t index, k, at = 0, n = places.size
    cdef uint64_t digest = mix(mix(mix(gs.arena[0].digest, OP_EVICT_BLOCKS), group), untagged(gs.seqs, q.handle))
    digest = mix(digest, n)
    for k in range(n - 1, -1, -1):
        index = ints_at(places, k)
        digest = mix(digest, index)
        group_unref(g, slot, <int32_t>index, <int32_t>index + 1)
    for index in range(entries_of(g, slot, q.num_blocks) if n else 0):
        if at < n and ints_at(places, at) == index:
            at += 1
        else:
            memmove(ids + (index - at) * g.columns, ids + index * g.columns, g.columns * sizeof(int32_t))
    gs.arena[0].digest = digest
    if n:
        group_loses(gs, g, slot, n * g.block_size)


cdef void groups_reset(Groups* gs) noexcept nogil:
    cdef int32_t k, slot
    for k in range(1, gs.num_arenas):
        blocks_reset(gs.arena[k])
    for k in range(gs.num_groups):
        for slot in range(gs.seqs.max_seqs if gs.group[k].kind == STATE_LAYERS else 0):
            gs.group[k].table[slot] = NO_BLOCK
    if gs.tree != NULL:
        tree_reset(gs.tree, gs)
