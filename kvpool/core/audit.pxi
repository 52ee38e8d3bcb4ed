"""What `check` recomputes of sequences, groups and steps, and what a fingerprint is made of."""


cdef uint64_t step_fingerprint(const Step* p, const Seqs* s, uint64_t h, int64_t next_step) noexcept nogil:
    """Hash of a pending step: what its end will do."""
    cdef int32_t i, at = 0
    cdef Event event
    h = mix(mix(mix(h, next_step - p.id), p.num_rows), p.noted_done)
    for i in range(p.num_rows):
        event = event_of(p, i, &at)
        h = mix(h, untagged(s, p.handle[i]))
        h = mix(h, next_step - prev_of(p, i) if prev_of(p, i) else 0)
        h = mix(mix(h, event.q_len), event.appended)
    return h


cdef bint check_fences(const Blocks* b, const Pending* pending, char* finding) noexcept nogil:
    """Pending steps must be in their order, and the fences of blocks those of the oldest and newest."""
    cdef const Step* p = pending.oldest
    cdef int64_t last = 0
    cdef int32_t size = 0
    while p != NULL:
        if p.id <= last or not p.pending:
            return found(finding, b"step %lld is pending behind step %lld", <long long>p.id, <long long>last)
        last = p.id
        size += 1
        p = p.newer
    if size != pending.size or b.newest_pending != last or b.oldest_pending != (pending.oldest.id if size else 0):
        return found(finding, b"%d steps are pending up to %lld, the fences say %lld .. %lld", size, <long long>last,
                     <long long>b.oldest_pending, <long long>b.newest_pending)
    return False


cdef void count_holds(const Log* log, const Blocks* b, int64_t id, int32_t* holds, int32_t* floors, int32_t*
                      made) noexcept nogil:
    cdef const Replaced* entry
    cdef int32_t k
    for k in range(log.size):
        entry = &log.entry[k]
        holds[entry.old] += 1
        floors[entry.old] = max(floors[entry.old], entry.tokens)
        made[0] += b.block[entry.new].place == USED and b.block[entry.new].fence == id


cdef bint compare_holds(const Blocks* b, const int32_t* holds, const int32_t* floors, int32_t made, char*
                        finding) noexcept nogil:
    """Holds and floors of blocks are those that were counted; `made` blocks are dst of pending copies."""
    cdef int32_t k
    for k in range(b.num_blocks):
        made -= b.block[k].place == USED and unwritten(b, k)
        if b.block[k].hold != holds[k] or b.floor[k] != floors[k]:
            return found(finding, b"block %d has hold %d and floor %d, pending plans say %d and %d", k, b.block[k].hold,
                         b.floor[k], holds[k], floors[k])
    if made != 0:
        return found(finding, b"%d more blocks are made by pending copies than wait for one", made)
    return False


cdef uint64_t part_fingerprint(const StepPart* part, uint64_t h) noexcept nogil:
    cdef const Replaced* entry
    cdef int32_t i
    for i in range(part.num_changes):
        h = mix(mix(h, part.change[i].row),
                (<uint64_t>part.change[i].appended << 32) | <uint32_t>part.change[i].replaced)
    for i in range(part.log.size):
        entry = &part.log.entry[i]
        h = mix(mix(h, entry.index), (<uint64_t>entry.old << 32) | <uint32_t>entry.new)
        h = mix(h, entry.tokens)
    return h


@cython.callspec("KV_COLD")
cdef uint64_t groups_fingerprint(const Groups* gs, const Pending* pending, uint64_t h, int64_t
                                 next_step) noexcept nogil:
    """Hash of what the groups have beside arena 0 and the sequences."""
    cdef const LayerGroup* g
    cdef const Step* p
    cdef int32_t k, slot
    cdef int64_t i
    h = mix(h, gs.num_groups)
    if gs.tree != NULL:
        h = tree_fingerprint(gs.tree, h)
    for k in range(1, gs.num_arenas):
        h = blocks_fingerprint(gs.arena[k], h, next_step)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        h = mix(mix(mix(h, g.kind), g.reach), (<uint64_t>g.columns << 32) | <uint32_t>g.kept)
        h = mix(mix(mix(h, g.arena), g.block_size), g.lookahead)
        for slot in range(gs.seqs.max_seqs):
            if not seq_has_blocks(gs.seqs, slot):
                continue
            h = mix(mix(h, (<uint64_t>g.seq[slot].evicted << 32) | <uint32_t>g.seq[slot].gone),
                    tail_of(g, slot).epoch)
            for i in range(<int64_t>entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns):
                h = mix(h, group_row(g, slot)[i])
        p = pending.oldest
        while p != NULL:
            h = part_fingerprint(p.part[k], h)
            p = p.newer
    return h


cdef bint check_holes(const LayerGroup* g, int32_t slot, const Seq* q, int64_t point, char* finding) noexcept nogil:
    """A row has no more holes than its length allows, and a state iff it has tokens; only full groups lose tokens."""
    cdef int64_t least = 0, evicted = g.seq[slot].evicted
    cdef int32_t gone = g.seq[slot].gone
    if evicted and not (g.kind == FULL_LAYERS and 0 < evicted <= point <= q.num_tokens):
        return found(finding, b"sequence in slot %d lost %lld tokens, the last one at %lld of %lld", slot,
                     <long long>evicted, <long long>point, <long long>q.num_tokens)
    if g.kind == STATE_LAYERS:
        if (g.table[slot] != NO_BLOCK) != (q.num_tokens > 0):
            return found(finding, b"sequence in slot %d has %lld tokens and state slot %d", slot,
                         <long long>q.num_tokens, g.table[slot])
        return False
    if g.kind == WINDOW_LAYERS:
        least = q.num_tokens - g.reach + 1
    elif g.kind == CHUNK_LAYERS:
        least = q.num_tokens // g.reach * g.reach
    if gone and not (g.kept < gone and gone * g.block_size <= least):
        return found(finding, b"sequence in slot %d let go of entries up to %d, it reads from %lld on", slot, gone,
                     <long long>least)
    if g.seq[slot].due != due_of(g, gone):
        return found(finding, b"sequence in slot %d lets go at length %lld, its holes say %lld", slot,
                     <long long>g.seq[slot].due, <long long>due_of(g, gone))
    return False


cdef bint check_tail(const Groups* gs, const LayerGroup* g, int32_t slot, char* finding) noexcept nogil:
    cdef const Seq* q = &gs.seqs.seq[slot]
    cdef const Tail* t = tail_of(g, slot)
    cdef int64_t held = held_of(g, slot, q.num_tokens), index = held // g.block_size, block, room
    if t.next_slot == t.stop_slot and (g.kind == STATE_LAYERS or held % g.block_size == 0
                                       or q.num_tokens == q.num_blocks * gs.block_size):
        return False                            # the next step looks the table up, or takes a block
    block = group_row(g, slot)[index * g.columns]
    room = min((index + 1) * g.block_size - held, q.num_blocks * gs.block_size - q.num_tokens)
    if g.kind == STATE_LAYERS or index >= entries_of(g, slot, q.num_blocks) or t.block != block:
        return found(finding, b"sequence in slot %d has tail %d, its table says otherwise", slot, t.block)
    if t.next_slot != block * g.block_size + held % g.block_size:
        return found(finding, b"sequence in slot %d would write its next token to slot %lld", slot,
                     <long long>t.next_slot)
    if t.stop_slot != t.next_slot + room:
        return found(finding, b"sequence in slot %d has a tail that ends at slot %lld", slot, <long long>t.stop_slot)
    return False


cdef bint check_group(const Groups* gs, const LayerGroup* g, int32_t* references, char* finding) noexcept nogil:
    """The rows of one group; `references` counts what they name."""
    cdef const Blocks* b = g.blocks
    cdef const Seq* q
    cdef const int32_t* ids
    cdef int64_t i
    cdef int32_t slot, index
    for slot in range(gs.seqs.max_seqs):
        if not seq_has_blocks(gs.seqs, slot):
            continue
        q = &gs.seqs.seq[slot]
        if gs.seqs.life[slot].life == OPEN and (check_holes(g, slot, q, gs.seqs.life[slot].point, finding)
                                                or check_tail(gs, g, slot, finding)):
            return True
        ids = group_row(g, slot)
        for i in range(<int64_t>entries_of(g, slot, q.num_blocks) * g.columns):
            index = <int32_t>(i // g.columns)
            if g.kept <= index < g.seq[slot].gone:
                if ids[i] != g.hole:
                    return found(finding, b"sequence in slot %d has block %d in entry %d, which was let go", slot,
                                 ids[i], index)
                continue
            if ids[i] < b.reserved or ids[i] >= b.num_blocks:
                return found(finding, b"sequence in slot %d has block %d in its table of arena %d", slot, ids[i],
                             g.arena)
            references[ids[i]] += 1
    return False


cdef bint check_sequence(const Groups* gs, int32_t slot, char* finding) noexcept nogil:
    cdef const Seqs* s = gs.seqs
    cdef const Seq* q = &s.seq[slot]
    cdef const SeqPrefix* prefix = &s.prefix[slot] if s.prefix != NULL else NULL
    if not 0 <= q.num_tokens <= q.num_blocks * gs.block_size or q.num_blocks % gs.unit:
        return found(finding, b"sequence in slot %d has %lld tokens in %d blocks", slot, <long long>q.num_tokens,
                     q.num_blocks)
    if not 0 <= s.life[slot].point <= q.num_tokens:
        return found(finding, b"sequence in slot %d has %lld tokens, some left by %lld", slot, <long long>q.num_tokens,
                     <long long>s.life[slot].point)
    if prefix == NULL:
        return False
    if s.life[slot].point and (prefix.committed or prefix.name != NULL):
        return found(finding, b"sequence in slot %d was evicted from, and has %lld tokens made known", slot,
                     <long long>prefix.committed)
    if not (0 <= prefix.published <= prefix.committed // gs.block_size and prefix.committed <= q.num_tokens):
        return found(finding, b"sequence in slot %d has %lld blocks published of %lld tokens known", slot,
                     <long long>prefix.published, <long long>prefix.committed)
    return False


cdef bint seqs_check(const Groups* gs, char* finding) noexcept nogil:
    cdef const Seqs* s = gs.seqs
    cdef int64_t tokens = 0, blocks = 0
    cdef int32_t slot, num_open = 0, retired = 0, late = 0
    for slot in range(s.max_seqs):
        late += s.life[slot].late
        if check_handle(s, slot, &num_open, &retired, finding):
            return True
        if not seq_has_blocks(s, slot):
            continue
        if check_sequence(gs, slot, finding):
            return True
        tokens += s.seq[slot].num_tokens
        blocks += s.seq[slot].num_blocks
    if tokens != s.sum_tokens or blocks != s.sum_blocks:
        return found(finding, b"counted %lld tokens in %lld blocks, the counters say %lld and %lld", <long long>tokens,
                     <long long>blocks, <long long>s.sum_tokens, <long long>s.sum_blocks)
    if late != s.num_late:
        return found(finding, b"counted %d late sequences, the counter says %d", late, s.num_late)
    return check_free_slots(s, num_open, retired, finding)


cdef bint check_references(const Blocks* b, const int32_t* references, char* finding) noexcept nogil:
    """`references` has the entries of tables."""
    cdef int32_t k
    for k in range(b.reserved, b.num_blocks):
        if b.block[k].refcount != references[k] + b.block[k].raw:
            return found(finding, b"block %d has refcount %d, tables name it %d times and raw references are %d", k,
                         b.block[k].refcount, references[k], b.block[k].raw)
    return False


cdef bint check_arena(const Groups* gs, int32_t arena, const Pending* pending, int32_t* seen, int32_t* floors,
                      char* finding) noexcept nogil:
    """The blocks of one arena: what refers to them, and what pending steps hold."""
    cdef const Blocks* b = gs.arena[arena]
    cdef const Step* p = pending.oldest
    cdef int32_t k, made = 0
    if blocks_check(b, seen, finding) or check_fences(b, pending, finding):
        return True
    memset(seen, 0, b.num_blocks * sizeof(int32_t))
    for k in range(gs.num_groups):
        if gs.group[k].arena == arena and check_group(gs, &gs.group[k], seen, finding):
            return True
    if arena == 0 and gs.tree != NULL:
        count_bundles(gs.tree, seen)
    if check_references(b, seen, finding):
        return True
    memset(seen, 0, b.num_blocks * sizeof(int32_t))
    memset(floors, 0, b.num_blocks * sizeof(int32_t))
    while p != NULL:
        for k in range(gs.num_groups):
            if gs.group[k].arena == arena:
                count_holds(&p.part[k].log, b, p.id, seen, floors, &made)
        p = p.newer
    return compare_holds(b, seen, floors, made, finding)


@cython.callspec("KV_COLD")
cdef bint groups_check(const Groups* gs, const Pending* pending, int32_t* seen, int32_t room, char*
                       finding) noexcept nogil:
    """The first invariant of the groups that does not hold, in words. `seen`: twice `room` numbers, to count in."""
    cdef int32_t k
    if seqs_check(gs, finding):
        return True
    for k in range(gs.num_arenas):
        if check_arena(gs, k, pending, seen, seen + room, finding):
            return True
    return gs.tree != NULL and tree_check(gs, seen, finding)
