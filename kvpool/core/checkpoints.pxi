"""Checkpoints: what a hit needs beside the entries of full groups. A step of a row saves its states in blocks of arena
0, the *bundle*; `commit` publishes the checkpoint at a node; a hit loads it.
"""


# ---- bundles -----------------------------------------------------------------------------------------------

cdef void bundle_keep(Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    """Blocks whose last user is gone, which no pending step touches: they are EVICTABLE at once."""
    cdef int32_t k, i
    for k in range(n):
        i = ids[k]
        b.block[i].refcount -= 1
        b.num_used -= 1
        b.block[i].place = EVICTABLE
        b.block[i].fence = SETTLED
        b.num_evictable += 1


cdef void checkpoint_unlist(Tree* t, int32_t m) noexcept nogil:
    if t.checkpoint[m].listed:
        line_remove(line_of(t, m), t.link, m)
        t.checkpoint[m].listed = False
        if t.checkpoint[m].aside:
            t.keeping.num_checkpoints -= 1
            t.checkpoint[m].aside = False


cdef void checkpoint_list(Tree* t, int32_t m) noexcept nogil:
    """Put a checkpoint, which may leave, where its stamp belongs. O(1) for one that was used now."""
    cdef Line* line = line_of(t, m)
    cdef int32_t before = line.tail
    while before != NO_CHECKPOINT and t.checkpoint[before].stamp > t.checkpoint[m].stamp:
        before = t.link[before].prev
    line_insert(line, t.link, m, before)
    t.checkpoint[m].listed = True


cdef void checkpoint_refresh(Tree* t, int32_t m) noexcept nogil:
    """A checkpoint was used now; it may leave unless it is loaded or not saved yet."""
    cdef Checkpoint* checkpoint = &t.checkpoint[m]
    checkpoint_unlist(t, m)
    t.clock += 1
    checkpoint.stamp = t.clock
    if checkpoint.loads == 0 and checkpoint.step == 0:
        checkpoint_list(t, m)


cdef void checkpoint_use(Tree* t, int32_t m) noexcept nogil:
    checkpoint_unlist(t, m)
    if not t.checkpoint[m].was_hit:
        t.checkpoint[m].was_hit = True
        t.used += 1


# ---- from taking to dropping -------------------------------------------------------------------------------

cdef int32_t checkpoint_new(Groups* gs, int64_t position) noexcept nogil:
    """A free one. If there is none, the one that leaves first is evicted for it. NO_CHECKPOINT: none may leave."""
    cdef Tree* t = gs.tree
    cdef int32_t m
    if t.free_checkpoint == NO_CHECKPOINT and t.fresh_checkpoint == t.checkpoint_room:
        if not evict_next(gs, False, True):
            return NO_CHECKPOINT
    m = t.free_checkpoint
    if m != NO_CHECKPOINT:
        t.free_checkpoint = t.link[m].next
    else:
        m = t.fresh_checkpoint
        t.fresh_checkpoint += 1
    memset(&t.checkpoint[m], 0, sizeof(Checkpoint))
    t.checkpoint[m].node = NO_NODE
    t.checkpoint[m].row = -1
    t.checkpoint[m].position = position
    return m


cdef void checkpoint_tails(Groups* gs, int32_t m, int32_t slot) noexcept nogil:
    """Count (`slot` >= 0: the row that has them) or uncount what a checkpoint needs of windows and chunks.

    If that row has still to load the checkpoint, its own entries become canonical: nothing of it may leave.
    """
    cdef Tree* t = gs.tree
    cdef LayerGroup* g
    cdef int32_t* known
    cdef int32_t n = t.checkpoint[m].node, k, first, own = NO_BLOCK
    cdef int64_t index
    while n != NO_NODE:
        for k in range(gs.num_groups):
            g = &gs.group[k]
            if g.kind == FULL_LAYERS or not ends_at(g, t.node[n].depth):
                continue
            index = (t.node[n].depth >> g.scale) - 1
            if g.kept <= index < first_read(g, t.checkpoint[m].position):
                continue
            known = node_entry(t, n, k)
            first = known[0]
            if slot >= 0:
                own = group_row(g, slot)[index * g.columns]
            if slot >= 0 and first == NO_BLOCK:
                known[0] = own
                known[1] = 0
                tell_stored(t, g, k, n)
            elif slot >= 0 and t.checkpoint[m].loads and stands_for(t, g, k, own, n):
                known[0] = own
                if first != own and g.blocks.block[first].place == EVICTABLE:
                    entry_blank(t, g, first)
            known[1] += 1 if slot >= 0 else -1
            if known[1] == 0:
                first = known[0]
                known[0] = NO_BLOCK
                tell_removed(t, k, n)
                if g.blocks.block[first].place == EVICTABLE:
                    entry_blank(t, g, first)    # the checkpoint still holds the last node, and so all above it
        n = t.node[n].parent


cdef void checkpoint_states(Groups* gs, int32_t n, bint stored) noexcept nogil:
    """A node has the states of a checkpoint, or has them no more."""
    cdef int32_t k
    for k in range(gs.num_groups):
        if gs.group[k].kind == STATE_LAYERS and stored:
            tell_stored(gs.tree, &gs.group[k], k, n)
        elif gs.group[k].kind == STATE_LAYERS:
            tell_removed(gs.tree, k, n)


cdef bint row_has_tails(const Groups* gs, int32_t slot, int64_t position) noexcept nogil:
    """Whether a row still has every entry of windows and chunks that a checkpoint at a position needs."""
    cdef const LayerGroup* g
    cdef int64_t last
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == WINDOW_LAYERS or g.kind == CHUNK_LAYERS:
            last = min(<int64_t>g.seq[slot].gone, position // g.block_size) - 1     # hole before the position
            if last >= max(<int64_t>g.kept, first_read(g, position)):
                return False
    return True


cdef void forget_taken(Tree* t, int32_t slot, int32_t m) noexcept nogil:
    cdef int32_t j = 0
    while t.row[slot].taken[j] != m:
        j += 1
    while j + 1 < MOST_TAKEN:
        t.row[slot].taken[j] = t.row[slot].taken[j + 1]
        j += 1
    t.row[slot].taken[j] = NO_CHECKPOINT
    t.checkpoint[m].row = -1


cdef void checkpoint_hide(Groups* gs, int32_t m) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef int32_t n = t.checkpoint[m].node, last = NO_NODE
    t.num_checkpoints -= 1
    checkpoint_tails(gs, m, -1)
    checkpoint_states(gs, n, False)
    t.more[n].checkpoint = NO_CHECKPOINT
    while n != NO_NODE:                         # units without a checkpoint leave first, the deepest before all
        t.more[n].below -= 1
        if t.more[n].below == 0 and t.node[n].place >= WARM:
            line_remove(unit_line(t, n), t.unit, n)
            line_insert(&t.cold, t.unit, n, last)
            t.node[n].place = COLD
            last = n
        n = t.node[n].parent
    node_release(t, t.checkpoint[m].node)
    t.checkpoint[m].node = NO_NODE


cdef void checkpoint_drop(Groups* gs, int32_t m) noexcept nogil:
    """A checkpoint is gone. If a pending step saves it, its blocks go to limbo."""
    cdef Tree* t = gs.tree
    cdef Checkpoint* checkpoint = &t.checkpoint[m]
    cdef Blocks* b = gs.arena[0]
    cdef int32_t* ids = checkpoint_bundle(t, m)
    cdef int32_t k
    checkpoint_unlist(t, m)
    if checkpoint.row >= 0:
        forget_taken(t, checkpoint.row, m)
    for k in range(t.bundle_size):
        t.stands[0][ids[k]].role = NO_ROLE
        if b.block[ids[k]].place == EVICTABLE:
            blocks_drop(b, ids[k])
        else:
            b.block[ids[k]].committed = False
            unref(b, ids[k])
    if checkpoint.node != NO_NODE:
        checkpoint_hide(gs, m)
    checkpoint.position = 0
    t.link[m].next = t.free_checkpoint
    t.free_checkpoint = m


cdef void checkpoint_publish(Groups* gs, int32_t m, int32_t n, int32_t slot) noexcept nogil:
    """A checkpoint can be found at a node, which has none; the row in `slot` has its entries of windows and chunks."""
    cdef Tree* t = gs.tree
    t.checkpoint[m].node = n
    t.more[n].checkpoint = m
    t.node[n].users += 1
    t.published += 1
    t.num_checkpoints += 1
    checkpoint_tails(gs, m, slot)
    checkpoint_states(gs, n, True)
    checkpoint_refresh(t, m)
    while n != NO_NODE:
        t.more[n].below += 1
        if t.more[n].below == 1 and t.node[n].place == COLD:
            unit_refresh(t, n)
        n = t.node[n].parent


cdef void checkpoint_give_up(Groups* gs, int32_t m) noexcept nogil:
    """A checkpoint that no row has taken is not published. If it came from elsewhere, a slot may still need it."""
    if gs.tree.checkpoint[m].loads:
        gs.tree.checkpoint[m].orphan = True
    else:
        checkpoint_drop(gs, m)


cdef void drop_taken(Groups* gs, int32_t slot, int64_t step, int64_t beyond) noexcept nogil:
    """Drop what a row took and has not published: of a step, or if `step` is 0 what lies beyond a length."""
    cdef Tree* t = gs.tree
    cdef int32_t j, m
    for j in range(MOST_TAKEN - 1, -1, -1):
        m = t.row[slot].taken[j]
        if m == NO_CHECKPOINT or (t.checkpoint[m].step != step if step else t.checkpoint[m].position <= beyond):
            continue
        forget_taken(t, slot, m)
        t.num_saves -= t.checkpoint[m].step != 0
        checkpoint_give_up(gs, m)


# ---- where they are taken ----------------------------------------------------------------------------------

cdef int64_t next_checkpoint(const Tree* t, int32_t slot, int64_t length) noexcept nogil:
    """The next length above this one at which a row takes a checkpoint, -1: none."""
    cdef const RowPlaces* row = &t.row[slot]
    cdef int64_t least = -1, place, distance = t.spacing, low = max(length, row.hit)
    if not t.needs_checkpoints or not t.can_restore or length >= row.cut:
        return -1
    place = row.cut // t.grain * t.grain
    if place > low:
        least = place
    place = row.junction // t.grain * t.grain       # not behind the cut
    if place > low:
        least = place
    while distance and distance <= row.cut:
        place = distance // t.grain * t.grain
        if place > low:
            least = min(least, place)
            break
        distance *= 2
    return least


cdef void publish_checkpoint(Groups* gs, int32_t slot, int32_t n, int64_t position) noexcept nogil:
    """A row has committed as far as a place where a checkpoint is wanted."""
    cdef Tree* t = gs.tree
    cdef int32_t* taken = t.row[slot].taken
    cdef int32_t j = 0, m = NO_CHECKPOINT
    cdef bint is_new
    if next_checkpoint(t, slot, position - 1) != position:
        return
    while j < MOST_TAKEN and (taken[j] == NO_CHECKPOINT or t.checkpoint[taken[j]].position != position):
        j += 1
    if j < MOST_TAKEN:
        m = taken[j]
        forget_taken(t, slot, m)
    elif t.bundle_size:
        return                              # no bundle was to be had
    is_new = t.more[n].checkpoint == NO_CHECKPOINT and row_has_tails(gs, slot, position)
    if is_new and m == NO_CHECKPOINT:
        m = checkpoint_new(gs, position)
    if is_new and m != NO_CHECKPOINT:
        checkpoint_publish(gs, m, n, slot)
    elif m != NO_CHECKPOINT:
        checkpoint_give_up(gs, m)
    if t.more[n].checkpoint == NO_CHECKPOINT:
        t.skipped += 1
    elif not is_new:
        checkpoint_refresh(t, t.more[n].checkpoint)


# ---- loads -------------------------------------------------------------------------------------------------

cdef void begin_load(Groups* gs, int32_t slot, int32_t m) noexcept nogil:
    """The states of a row come from a checkpoint; the first step that reads its slots copies them."""
    cdef Tree* t = gs.tree
    cdef int32_t first = gs.group[t.state_group].table[slot], k
    t.load[first] = m
    t.load_step[first] = 0
    t.num_loads += 1
    t.checkpoint[m].loads += 1
    checkpoint_unlist(t, m)
    for k in range(t.bundle_size if t.checkpoint[m].loads == 1 else 0):
        touch(gs.arena[0], checkpoint_bundle(t, m)[k])


cdef void end_load(Groups* gs, int32_t first) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef int32_t m = t.load[first]
    t.load[first] = NO_CHECKPOINT
    t.num_loads -= 1
    t.checkpoint[m].loads -= 1
    if t.checkpoint[m].loads:
        return
    bundle_keep(gs.arena[0], checkpoint_bundle(t, m), t.bundle_size)
    if t.checkpoint[m].orphan:                  # flushed meanwhile
        checkpoint_drop(gs, m)
    else:
        checkpoint_list(t, m)


cdef inline void end_idle_load(Groups* gs, int32_t first) noexcept nogil:
    """End the load of a slot that no row has."""
    cdef const Block* block = &gs.group[gs.tree.state_group].blocks.block[first]
    if gs.tree.load[first] != NO_CHECKPOINT and gs.tree.load_step[first] == 0 and block.refcount + block.hold == 0:
        end_load(gs, first)


# ---- from elsewhere ----------------------------------------------------------------------------------------

cdef void bundle_take(Groups* gs, int32_t m, int32_t slot, int64_t step) noexcept nogil:
    """A checkpoint of a row has its blocks, which a step saves, or SAVED_ELSEWHERE."""
    cdef Tree* t = gs.tree
    cdef Blocks* b = gs.arena[0]
    cdef int32_t* ids = checkpoint_bundle(t, m)
    cdef int32_t j = 0, k
    while t.row[slot].taken[j] != NO_CHECKPOINT:
        j += 1
    t.row[slot].taken[j] = m
    t.checkpoint[m].row = slot
    t.checkpoint[m].step = step
    t.num_saves += 1
    blocks_take_many(b, ids, t.bundle_size)
    for k in range(t.bundle_size):
        b.block[ids[k]].committed = True
        t.stands[0][ids[k]].node, t.stands[0][ids[k]].role = m, BUNDLE


cdef void bundle_saved(Groups* gs, int32_t m) noexcept nogil:
    cdef Tree* t = gs.tree
    t.checkpoint[m].step = 0
    t.num_saves -= 1
    bundle_keep(gs.arena[0], checkpoint_bundle(t, m), t.bundle_size)
    checkpoint_refresh(t, m)


cdef void groups_loaded(Groups* gs, int32_t slot, int64_t length) noexcept nogil:
    """The bytes of a row are there, 0: they will not come. One that was flushed has those of other weights."""
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef SeqPrefix* prefix = &s.prefix[slot]
    cdef int32_t k, m = t.row[slot].taken[0]
    if prefix.name == NULL or (t.needs_checkpoints and length == 0):
        drop_taken(gs, slot, 0, -1)
        groups_empty(gs, slot)
        t.row[slot].cut = t.row[slot].cut if prefix.name != NULL else 0
        prefix.committed = prefix.published = prefix.done = prefix.forked_at = 0
        return
    if length:
        s.sum_tokens += length - s.seq[slot].num_tokens
        s.seq[slot].num_tokens = prefix.done = length
    if not gs.has_entries:                      # its states alone have room for them
        s.seq[slot].num_blocks = <int32_t>blocks_for(gs, length)
        s.sum_blocks += s.seq[slot].num_blocks
    tails_refresh(gs, slot)
    if m != NO_CHECKPOINT:
        bundle_saved(gs, m)
        begin_load(gs, slot, m)


# ---- steps -------------------------------------------------------------------------------------------------

cdef inline void transfer(const Tree* t, int32_t k, int32_t state, int32_t m, int32_t* out, int32_t at) noexcept nogil:
    """A row of state_loads or state_saves: a slot, and the blocks of its group in a bundle."""
    out += <int64_t>at * (1 + t.span[k])
    out[0] = state
    memcpy(out + 1, checkpoint_bundle(t, m) + t.offset[k], t.span[k] * sizeof(int32_t))


cdef void tree_loads(Groups* gs, const Step* p, bint advance) noexcept nogil:
    """Before the tables of a step change: states that its rows read and that nobody has copied yet."""
    cdef Tree* t = gs.tree
    cdef int32_t i, k, at = 0, slot, first
    for k in range(gs.num_groups):
        p.part[k].num_loads = p.part[k].num_saves = 0
    if t.num_loads == 0 or not advance:
        return
    for i in range(p.num_rows):
        if event_of(p, i, &at).q_len == 0:
            continue
        slot = slot_of(p.handle[i])
        first = gs.group[t.state_group].table[slot]
        if first == NO_BLOCK or t.load[first] == NO_CHECKPOINT or t.load_step[first]:
            continue
        t.load_step[first] = p.id
        # Canonical entries of a row that was closed before could leave while this step is pending: its row's own stay.
        checkpoint_tails(gs, t.load[first], slot)
        checkpoint_tails(gs, t.load[first], -1)
        for k in range(gs.num_groups):
            if gs.group[k].kind == STATE_LAYERS:
                transfer(t, k, gs.group[k].table[slot], t.load[first], p.part[k].loads, p.part[k].num_loads)
                p.part[k].num_loads += 1


cdef void checkpoint_take(Groups* gs, const Step* p, int32_t slot, int64_t length) noexcept nogil:
    """A row ends where a checkpoint is wanted: its states go to a bundle, if there are blocks for one."""
    cdef Tree* t = gs.tree
    cdef int32_t k, m = NO_CHECKPOINT
    if t.row[slot].taken[MOST_TAKEN - 1] == NO_CHECKPOINT and blocks_available(gs.arena[0]) >= t.bundle_size:
        m = checkpoint_new(gs, length)
    if m == NO_CHECKPOINT:
        t.skipped += 1
        return
    tree_make_room(gs, 0, t.bundle_size)        # may drop one that the row has taken
    bundle_take(gs, m, slot, p.id)
    t.taken += 1
    for k in range(gs.num_groups):
        if gs.group[k].kind == STATE_LAYERS:
            transfer(t, k, gs.group[k].table[slot], m, p.part[k].saves, p.part[k].num_saves)
            p.part[k].num_saves += 1


cdef void tree_saves(Groups* gs, const Step* p) noexcept nogil:
    """After the tables of a step have changed: rows that end where a checkpoint is wanted take one."""
    cdef Tree* t = gs.tree
    cdef int32_t i, at = 0, slot
    cdef int64_t length
    if t.bundle_size == 0 or not t.can_restore:
        return
    for i in range(p.num_rows):
        if event_of(p, i, &at).q_len == 0:
            continue
        slot = slot_of(p.handle[i])
        length = p.length[i]
        if length <= t.row[slot].cut and next_checkpoint(t, slot, length - 1) == length:
            checkpoint_take(gs, p, slot, length)


cdef void tree_pass(Groups* gs, const Step* p) noexcept nogil:
    """A step was executed: its bundles are saved, its loads are done."""
    cdef Tree* t = gs.tree
    cdef int32_t i, j, slot, m
    for i in range(p.num_rows):
        slot = seq_find(gs.seqs, p.handle[i])
        if slot >= 0:
            gs.seqs.prefix[slot].done = p.length[i]
        if slot < 0 or t.num_saves == 0:
            continue
        for j in range(MOST_TAKEN):
            m = t.row[slot].taken[j]
            if m != NO_CHECKPOINT and t.checkpoint[m].step == p.id:
                bundle_saved(gs, m)
    if t.num_loads:
        for i in range(gs.group[t.state_group].blocks.num_blocks):
            if t.load[i] != NO_CHECKPOINT and t.load_step[i] == p.id:
                end_load(gs, i)


cdef void tree_undo(Groups* gs, const Step* p) noexcept nogil:
    """Before a step is rolled back: what it would have saved is dropped."""
    cdef Tree* t = gs.tree
    cdef int32_t i, slot
    for i in range(p.num_rows if t.num_saves else 0):
        slot = seq_find(gs.seqs, p.handle[i])
        if slot >= 0:
            drop_taken(gs, slot, p.id, 0)


cdef void tree_undone(Groups* gs, const Step* p) noexcept nogil:
    """After it: its loads are to be done again, if anybody still has the slot."""
    cdef Tree* t = gs.tree
    cdef int32_t i
    for i in range(gs.group[t.state_group].blocks.num_blocks if t.num_loads else 0):
        if t.load[i] != NO_CHECKPOINT and t.load_step[i] == p.id:
            t.load_step[i] = 0
            end_idle_load(gs, i)


# ---- audit -------------------------------------------------------------------------------------------------

cdef bint check_checkpoint(const Groups* gs, int32_t m, int32_t loads, char* finding) noexcept nogil:
    """One checkpoint in use, which so many slots have to load."""
    cdef const Tree* t = gs.tree
    cdef const Checkpoint* one = &t.checkpoint[m]
    cdef bint may_leave = one.loads == 0 and one.step == 0, is_taken = False
    cdef int32_t k, id
    if one.loads != loads or one.listed != may_leave:
        return found(finding, b"checkpoint %d has %d loads, counted %d, step %lld, and listed is %d", m, one.loads,
                     loads, <long long>one.step, <int>one.listed)
    if one.node != NO_NODE and (t.more[one.node].checkpoint != m
                                or t.node[one.node].depth * t.block_size != one.position):
        return found(finding, b"checkpoint %d of %lld tokens is at node %d, which has checkpoint %d", m,
                     <long long>one.position, one.node, t.more[one.node].checkpoint)
    for k in range(MOST_TAKEN if one.row >= 0 else 0):
        is_taken |= t.row[one.row].taken[k] == m
    if (is_taken + one.orphan + (one.node != NO_NODE) != 1 or is_taken != (one.row >= 0)
            or (one.orphan and may_leave)):
        return found(finding, b"checkpoint %d is at node %d, of row %d, orphan is %d: that is not one", m, one.node,
                     one.row, <int>one.orphan)
    for k in range(t.bundle_size):
        id = checkpoint_bundle(t, m)[k]
        if (t.stands[0][id].role != BUNDLE or t.stands[0][id].node != m
                or gs.arena[0].block[id].place != (EVICTABLE if may_leave else USED)):
            return found(finding, b"block %d has role %d and place %d, it is of checkpoint %d", id,
                         <int>t.stands[0][id].role, <int>gs.arena[0].block[id].place, m)
    return False


cdef bint check_bundles(const Groups* gs, int32_t* named, char* finding) noexcept nogil:
    """Each block of a bundle is of one checkpoint."""
    cdef const Tree* t = gs.tree
    cdef int32_t m, k, id
    memset(named, 0, gs.arena[0].num_blocks * sizeof(int32_t))
    for m in range(t.fresh_checkpoint):
        for k in range(t.bundle_size if t.checkpoint[m].position else 0):
            named[checkpoint_bundle(t, m)[k]] += 1
    for id in range(gs.arena[0].num_blocks):
        if named[id] != (t.stands[0][id].role == BUNDLE):
            return found(finding, b"block %d has role %d, %d checkpoints name it", id, <int>t.stands[0][id].role,
                         named[id])
    return False


cdef bint check_checkpoint_line(const Tree* t, const Line* line, int32_t* count, char* finding) noexcept nogil:
    """Each checkpoint of a line may leave, belongs there, and was used after the one before it."""
    cdef int32_t m = line.head
    cdef int64_t last = 0
    if check_line(line, t.link, t.fresh_checkpoint, b"checkpoints", finding):
        return True
    while m != NO_CHECKPOINT and t.checkpoint[m].listed and t.checkpoint[m].stamp > last and line_of(t, m) == line:
        last = t.checkpoint[m].stamp
        m = t.link[m].next
    if m != NO_CHECKPOINT:
        return found(finding, b"checkpoint %d is in a line that is not its own, or too early", m)
    count[0] += line.size
    return False


cdef bint check_checkpoints(const Groups* gs, int32_t* loads, char* finding) noexcept nogil:
    """All checkpoints, their lines and their counters; `loads` counts in turn for checkpoints and for blocks."""
    cdef const Tree* t = gs.tree
    cdef int32_t slots = gs.group[t.state_group].blocks.num_blocks if t.state_group >= 0 else 0
    cdef int32_t m, k, saves = 0, listed = 0, in_lines = 0, num_loads = 0
    memset(loads, 0, t.fresh_checkpoint * sizeof(int32_t))
    for k in range(slots):
        if t.load[k] != NO_CHECKPOINT:
            loads[t.load[k]] += 1
            num_loads += 1
    for m in range(t.fresh_checkpoint):
        saves += (t.checkpoint[m].position > 0) & (t.checkpoint[m].step != 0)
        listed += (t.checkpoint[m].position > 0) & t.checkpoint[m].listed
        if t.checkpoint[m].position and check_checkpoint(gs, m, loads[m], finding):
            return True
    for k in range(2):
        if check_checkpoint_line(t, &t.listed[k], &in_lines, finding):
            return True
    for k in range(PRIORITIES if t.keeping != NULL else 0):
        if check_checkpoint_line(t, &t.keeping.checkpoints[k], &in_lines, finding):
            return True
    if num_loads != t.num_loads or saves != t.num_saves or not listed == in_lines == num_listed(t):
        return found(finding, b"counted %d loads, %d saves and %d checkpoints that may leave, the counters say %d, %d "
                     b"and %d", num_loads, saves, listed, t.num_loads, t.num_saves, num_listed(t))
    return check_bundles(gs, loads, finding)
