"""The prefix cache of a pool with layer groups: hits, units, checkpoints, and what leaves first.

A node is (parent node, tokens of one base block). It holds its parent, so a chain of nodes proves a whole prefix. What
a node has of full groups is its *unit*. A *mark* is a checkpoint: a bundle of blocks with the states, and the entries
of windows and chunks at the nodes before it, which count the marks that need them.

Blocks know nothing of this: a committed block that nobody refers to is CACHED, and `tree_settle` looks at what became
so. Nobody takes a CACHED block: `tree_make_room` turns enough of them blank before any is taken.
"""


# ---- memory ------------------------------------------------------------------------------------------------

cdef void tree_free(Tree* t) noexcept nogil:
    cdef int32_t k
    for k in range(MAX_ARENAS):
        xfree(t.stands_for[k])
        xfree(t.column_after[k])
        xfree(t.role[k])
        xfree(t.seen[k])
    xfree(t.node)
    xfree(t.tokens)
    xfree(t.ids)
    xfree(t.tails)
    xfree(t.slot)
    xfree(t.mark)
    xfree(t.bundle)
    xfree(t.row)
    xfree(t.path)
    xfree(t.scratch)
    xfree(t.load)
    xfree(t.load_step)
    xfree(t)


cdef void tree_sizes(Tree* t, const Groups* gs, const int32_t* bundle_of) noexcept nogil:
    """What follows from the groups; `bundle_of`: blocks of a checkpoint in each state group."""
    cdef const LayerGroup* g
    cdef double kv = 0
    cdef int64_t tails = 0, room = 0
    cdef int32_t k
    t.block_size = gs.block_size
    t.grain = 1
    t.can_restore = True
    t.state_group = -1
    for k in range(gs.num_groups):
        g = &gs.group[k]
        t.needs_marks |= g.kind != FULL_LAYERS
        if g.kind == STATE_LAYERS:
            t.offset[k] = t.bundle_size
            t.span[k] = bundle_of[k]
            t.bundle_size += bundle_of[k]
            t.can_restore &= bundle_of[k] > 0
            if t.state_group < 0:
                t.state_group = k
            continue
        t.span[k] = 1 << g.scale
        t.grain = max(t.grain, <int64_t>t.span[k])
        t.offset[k] = t.width
        t.width += g.columns
        if g.kind == FULL_LAYERS:
            kv += <double>g.columns / t.span[k]
        else:
            tails += ((g.reach - 1 + g.block_size - 1) // g.block_size + g.kept) * g.columns
    t.grain *= gs.block_size
    if kv > 0 and t.bundle_size + tails:
        t.spacing = 1
        while t.spacing * kv < 3.0 * (t.bundle_size + tails) * gs.block_size:
            t.spacing *= 2
    for k in range(gs.num_arenas):
        room += gs.arena[k].num_blocks
    t.room = <int32_t>min(room if kv > 0 else max(room, <int64_t>1 << 20), <int64_t>1 << 30)
    t.mark_room = gs.arena[0].num_blocks // t.bundle_size + 1 if t.bundle_size else t.room


cdef int tree_init(Tree* t, const Groups* gs, Index* index, const int32_t* bundle_of) noexcept nogil:
    """An empty tree. After NO_MEMORY the caller must `tree_free`."""
    cdef uint64_t slots = 8
    cdef int32_t k, n
    cdef int64_t longest
    t.index = index
    tree_sizes(t, gs, bundle_of)
    while slots * 3 < <uint64_t>t.room * 4:
        slots *= 2
    t.slot_mask = <uint32_t>(slots - 1)
    longest = min(<int64_t>gs.seqs.max_blocks, gs.seq_tokens // gs.block_size)
    t.node = <Node*>xcalloc(t.room, sizeof(Node))
    t.tokens = <int32_t*>xcalloc(t.room, t.block_size * sizeof(int32_t))
    t.ids = <int32_t*>xcalloc(t.room, max(t.width, 1) * sizeof(int32_t))
    t.tails = <int32_t*>xcalloc(t.room, MAX_GROUPS * sizeof(int32_t))
    t.slot = <int32_t*>xmalloc(slots * sizeof(int32_t))
    t.mark = <Mark*>xcalloc(t.mark_room, sizeof(Mark))
    t.bundle = <int32_t*>xcalloc(t.mark_room, max(t.bundle_size, 1) * sizeof(int32_t))
    t.row = <RowPlaces*>xcalloc(gs.seqs.max_seqs, sizeof(RowPlaces))
    t.path = <int32_t*>xcalloc(max(longest, <int64_t>1), sizeof(int32_t))
    t.scratch = <int32_t*>xcalloc(t.block_size, sizeof(int32_t))
    if (t.node == NULL or t.tokens == NULL or t.ids == NULL or t.tails == NULL or t.slot == NULL or t.mark == NULL
            or t.bundle == NULL or t.row == NULL or t.path == NULL or t.scratch == NULL):
        return NO_MEMORY
    for k in range(gs.num_arenas):
        n = gs.arena[k].num_blocks
        t.stands_for[k] = <int32_t*>xcalloc(n, sizeof(int32_t))
        t.column_after[k] = <int32_t*>xcalloc(n, sizeof(int32_t))
        t.role[k] = <uint8_t*>xcalloc(n, 1)
        t.seen[k] = <uint8_t*>xcalloc(n, 1)
        if t.stands_for[k] == NULL or t.column_after[k] == NULL or t.role[k] == NULL or t.seen[k] == NULL:
            return NO_MEMORY
    if t.state_group >= 0:
        n = gs.group[t.state_group].blocks.num_blocks
        t.load = <int32_t*>xmalloc(n * sizeof(int32_t))
        t.load_step = <int64_t*>xcalloc(n, sizeof(int64_t))
        if t.load == NULL or t.load_step == NULL:
            return NO_MEMORY
    tree_reset(t, gs)
    return OK


cdef void tree_reset(Tree* t, const Groups* gs) noexcept nogil:
    """No node and no mark."""
    cdef int32_t k
    memset(t.slot, 0xFF, (t.slot_mask + <size_t>1) * sizeof(int32_t))
    t.cold.head = t.cold.tail = t.warm.head = t.warm.tail = t.marks.head = t.marks.tail = NO_NODE
    t.cold.size = t.warm.size = t.marks.size = t.num_nodes = 0
    t.free_node = t.free_mark = NO_NODE
    for k in range(gs.num_arenas):
        memset(t.role[k], NO_ROLE, gs.arena[k].num_blocks)
        memset(t.seen[k], 0, gs.arena[k].num_blocks)
        gs.arena[k].num_dropped = 0
    if t.state_group >= 0:
        memset(t.load, 0xFF, gs.group[t.state_group].blocks.num_blocks * sizeof(int32_t))
    t.fresh_node = t.fresh_mark = 0


# ---- lines -------------------------------------------------------------------------------------------------

cdef void unit_unlink(Tree* t, int32_t n) noexcept nogil:
    cdef Node* node = &t.node[n]
    cdef Line* line = &t.cold if node.place == COLD else &t.warm
    if node.place == NOWHERE:
        return
    if node.prev == NO_NODE:
        line.head = node.next
    else:
        t.node[node.prev].next = node.next
    if node.next == NO_NODE:
        line.tail = node.prev
    else:
        t.node[node.next].prev = node.prev
    line.size -= 1
    node.place = NOWHERE


cdef void unit_insert(Tree* t, int32_t n, int place, int32_t after) noexcept nogil:
    """Put the unit of a node behind another one of a line; NO_NODE: at the cold end."""
    cdef Node* node = &t.node[n]
    cdef Line* line = &t.cold if place == COLD else &t.warm
    node.prev = after
    node.next = line.head if after == NO_NODE else t.node[after].next
    if node.prev == NO_NODE:
        line.head = n
    else:
        t.node[node.prev].next = n
    if node.next == NO_NODE:
        line.tail = n
    else:
        t.node[node.next].prev = n
    line.size += 1
    node.place = place


cdef void unit_refresh(Tree* t, int32_t n) noexcept nogil:
    """The unit of a node was used now; if nothing of it is idle it is in no line."""
    cdef Node* node = &t.node[n]
    unit_unlink(t, n)
    if node.idle:
        t.clock += 1
        node.stamp = t.clock
        if node.below or not t.needs_marks:
            unit_insert(t, n, WARM, t.warm.tail)
        else:
            unit_insert(t, n, COLD, t.cold.tail)


cdef void mark_unlink(Tree* t, int32_t m) noexcept nogil:
    cdef Mark* mark = &t.mark[m]
    if not mark.listed:
        return
    if mark.prev == NO_MARK:
        t.marks.head = mark.next
    else:
        t.mark[mark.prev].next = mark.next
    if mark.next == NO_MARK:
        t.marks.tail = mark.prev
    else:
        t.mark[mark.next].prev = mark.prev
    t.marks.size -= 1
    mark.listed = False


cdef void mark_refresh(Tree* t, int32_t m) noexcept nogil:
    """A mark was used now; it may leave unless it is loaded or not saved yet."""
    cdef Mark* mark = &t.mark[m]
    mark_unlink(t, m)
    t.clock += 1
    mark.stamp = t.clock
    if mark.loads == 0 and mark.step == 0:
        mark_list(t, m)


cdef void mark_list(Tree* t, int32_t m) noexcept nogil:
    """Put a mark, which may leave, where its stamp belongs. O(1) for a mark that was used now."""
    cdef Mark* mark = &t.mark[m]
    cdef int32_t after = t.marks.tail
    while after != NO_MARK and t.mark[after].stamp > mark.stamp:
        after = t.mark[after].prev
    mark.prev = after
    mark.next = t.marks.head if after == NO_MARK else t.mark[after].next
    if after == NO_MARK:
        t.marks.head = m
    else:
        t.mark[after].next = m
    if mark.next == NO_MARK:
        t.marks.tail = m
    else:
        t.mark[mark.next].prev = m
    t.marks.size += 1
    mark.listed = True


# ---- nodes -------------------------------------------------------------------------------------------------

cdef inline int32_t* node_ids(const Tree* t, int32_t n, int32_t group) noexcept nogil:
    """The canonical entry of a group at a node."""
    return t.ids + <int64_t>n * t.width + t.offset[group]


cdef inline int32_t* node_tails(const Tree* t, int32_t n) noexcept nogil:
    return t.tails + <int64_t>n * MAX_GROUPS


cdef int32_t node_find(const Tree* t, uint64_t root, int32_t parent, uint64_t hash, const int32_t* tokens) noexcept nogil:
    """The node (parent, tokens), or NO_NODE. Its parent is held by it, so that equal numbers are the same node."""
    cdef uint32_t at = key_of(hash) & t.slot_mask
    cdef const Node* node
    cdef int32_t n = t.slot[at]
    while n != NO_NODE:
        node = &t.node[n]
        if (node.hash == hash and node.parent == parent and node.root == root
                and memcmp(t.tokens + n * t.block_size, tokens, t.block_size * sizeof(int32_t)) == 0):
            return n
        at = (at + 1) & t.slot_mask
        n = t.slot[at]
    return NO_NODE


cdef void slot_remove(Tree* t, int32_t n) noexcept nogil:
    """Take a node out of the table; those behind it move up, so there are no tombstones."""
    cdef uint32_t at = key_of(t.node[n].hash) & t.slot_mask
    cdef uint32_t gap, home
    while t.slot[at] != n:
        at = (at + 1) & t.slot_mask
    gap = at
    while True:
        at = (at + 1) & t.slot_mask
        if t.slot[at] == NO_NODE:
            break
        home = key_of(t.node[t.slot[at]].hash) & t.slot_mask
        if ((at - home) & t.slot_mask) >= ((at - gap) & t.slot_mask):
            t.slot[gap] = t.slot[at]
            gap = at
    t.slot[gap] = NO_NODE


cdef void node_release(Tree* t, int32_t n) noexcept nogil:
    """A node has a user less. Without any it is forgotten, and its parent has a user less."""
    cdef Node* node
    while n != NO_NODE:
        node = &t.node[n]
        node.users -= 1
        if node.users:
            return
        if node.root:
            slot_remove(t, n)
            t.num_nodes -= 1
        node.depth = 0
        node.next = t.free_node
        t.free_node = n
        n = node.parent


cdef int32_t node_new(Groups* gs, uint64_t root, int32_t parent, uint64_t hash, const int32_t* tokens) noexcept nogil:
    """A node below another, with one user. NO_NODE: there is no room, though all that may leave has left."""
    cdef Tree* t = gs.tree
    cdef uint32_t at
    cdef Node* node
    cdef int32_t n
    while t.free_node == NO_NODE and t.fresh_node == t.room:
        if not evict_any(gs):
            return NO_NODE
    n = t.free_node
    if n != NO_NODE:
        t.free_node = t.node[n].next
    else:
        n = t.fresh_node
        t.fresh_node += 1
    node = &t.node[n]
    memset(node, 0, sizeof(Node))
    node.hash = hash
    node.root = root
    node.parent = parent
    node.depth = 1
    node.users = 1
    node.mark = NO_MARK
    if parent != NO_NODE:
        node.depth += t.node[parent].depth
        t.node[parent].users += 1
    memcpy(t.tokens + n * t.block_size, tokens, t.block_size * sizeof(int32_t))
    memset(t.ids + <int64_t>n * t.width, 0xFF, t.width * sizeof(int32_t))
    memset(node_tails(t, n), 0, MAX_GROUPS * sizeof(int32_t))
    at = key_of(hash) & t.slot_mask
    while t.slot[at] != NO_NODE:
        at = (at + 1) & t.slot_mask
    t.slot[at] = n
    t.num_nodes += 1
    t.index.inserted += 1
    return n


# ---- entries -----------------------------------------------------------------------------------------------

cdef inline bint ends_at(const Tree* t, const LayerGroup* g, int32_t k, int64_t depth) noexcept nogil:
    """Whether an entry of a group ends with so many base blocks."""
    return g.kind != STATE_LAYERS and depth % t.span[k] == 0


cdef void entry_commit(Tree* t, LayerGroup* g, int32_t k, const int32_t* ids, int32_t n) noexcept nogil:
    """An entry in use stands for a node from now on, and is its canonical one if it has none."""
    cdef int32_t* known = node_ids(t, n, k)
    cdef int32_t c
    for c in range(g.columns):
        g.blocks.block[ids[c]].committed = CANONICAL
        t.stands_for[g.arena][ids[c]] = n
        t.role[g.arena][ids[c]] = LATER_COLUMN if c else 1 + k
        t.column_after[g.arena][ids[c]] = ids[c + 1] if c + 1 < g.columns else NO_BLOCK
    t.node[n].users += 1
    if g.kind == FULL_LAYERS and known[0] == NO_BLOCK:
        memcpy(known, ids, g.columns * sizeof(int32_t))
    elif g.kind == FULL_LAYERS:
        t.index.duplicates += 1


cdef void entry_blank(Tree* t, LayerGroup* g, int32_t first) noexcept nogil:
    """An entry that nobody refers to is no part of the tree any more: its blocks become blank, the last column first."""
    cdef int32_t n = t.stands_for[g.arena][first], id = first, count = 0
    cdef int32_t[MOST_COLUMNS] ids
    while id != NO_BLOCK:
        ids[count] = id
        count += 1
        id = t.column_after[g.arena][id]
    while count:
        count -= 1
        t.role[g.arena][ids[count]] = NO_ROLE
        t.seen[g.arena][ids[count]] = 0
        blocks_drop(g.blocks, ids[count])
    node_release(t, n)


cdef void entry_left(Tree* t, LayerGroup* g, int32_t k, int32_t first) noexcept nogil:
    """Nobody refers to a committed entry any more."""
    cdef int32_t n = t.stands_for[g.arena][first], id = first, c
    cdef Node* node = &t.node[n]
    cdef int32_t* known = node_ids(t, n, k)
    if g.kind != FULL_LAYERS:
        if node.root == 0 or known[0] != first:
            entry_blank(t, g, first)
        return
    if node.root == 0:
        entry_blank(t, g, first)
        return
    if known[0] == NO_BLOCK:                    # the canonical one is gone: this one takes its place
        for c in range(g.columns):
            known[c] = id
            id = t.column_after[g.arena][id]
    if known[0] == first:
        node.idle += 1
        unit_refresh(t, n)
        return
    unit_refresh(t, n)
    entry_blank(t, g, first)


cdef void tree_settle(Groups* gs) noexcept nogil:
    """Look at the blocks that became CACHED since the last time. They are the newest of each list."""
    cdef Tree* t = gs.tree
    cdef Blocks* b
    cdef int32_t* left
    cdef int32_t k, i, id, count
    cdef uint8_t role
    for k in range(gs.num_arenas):
        b = gs.arena[k]
        left = b.dropped                # nobody drops a block behind the back of the tree
        count = 0
        id = b.lru.tail
        while id != NO_BLOCK and not t.seen[k][id]:
            t.seen[k][id] = 1
            role = t.role[k][id]
            if role != LATER_COLUMN and role != BUNDLE:
                left[count] = id
                count += 1
            id = b.block[id].prev
        for i in range(count - 1, -1, -1):
            entry_left(t, &gs.group[t.role[k][left[i]] - 1], t.role[k][left[i]] - 1, left[i])


cdef void entry_share(Tree* t, LayerGroup* g, int32_t k, int32_t n, int32_t* ids) noexcept nogil:
    """Another row refers to the canonical entry of a node."""
    cdef const int32_t* known = node_ids(t, n, k)
    cdef bint was_idle = g.blocks.block[known[0]].place == CACHED
    cdef int32_t c
    for c in range(g.columns):
        ids[c] = known[c]
        t.seen[g.arena][known[c]] = 0
        blocks_touch(g.blocks, known[c])
    if was_idle and g.kind == FULL_LAYERS:
        t.node[n].idle -= 1
        if t.node[n].idle == 0:
            unit_unlink(t, n)


# ---- what leaves first -------------------------------------------------------------------------------------

cdef void unit_evict(Groups* gs, int32_t n) noexcept nogil:
    """The idle entries of a node leave, and its checkpoint if it may."""
    cdef Tree* t = gs.tree
    cdef Node* node = &t.node[n]
    cdef LayerGroup* g
    cdef int32_t* known
    cdef int32_t k, first
    node.users += 1
    if node.mark != NO_MARK and t.mark[node.mark].listed:
        t.dropped += 1
        mark_drop(gs, node.mark)
    unit_unlink(t, n)
    node.idle = 0
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind != FULL_LAYERS or node.depth % t.span[k]:
            continue
        known = node_ids(t, n, k)
        first = known[0]
        if first != NO_BLOCK and g.blocks.block[first].place == CACHED:
            known[0] = NO_BLOCK
            t.index.evicted += 1
            g.blocks.evictions += g.columns
            entry_blank(t, g, first)
    node_release(t, n)


cdef bint evict_any(Groups* gs) noexcept nogil:
    """Evict what leaves first of all."""
    cdef Tree* t = gs.tree
    if t.cold.size:
        unit_evict(gs, t.cold.head)
    elif t.warm.size and (t.marks.size == 0 or t.node[t.warm.head].stamp < t.mark[t.marks.head].stamp):
        unit_evict(gs, t.warm.head)
    elif t.marks.size:
        t.dropped += 1
        mark_drop(gs, t.marks.head)
    else:
        return False
    return True


cdef void tree_make_room(Groups* gs, int32_t arena, int64_t n) noexcept nogil:
    """At least n blocks of an arena are blank then. The caller has checked blocks_available."""
    cdef Tree* t = gs.tree
    cdef Blocks* b = gs.arena[arena]
    cdef bint has_units = False, has_marks = arena == 0 and t.bundle_size > 0
    cdef int32_t k
    if b.num_blank >= n:
        return
    for k in range(gs.num_groups):
        if gs.group[k].arena == arena:
            has_units |= gs.group[k].kind == FULL_LAYERS
            has_marks |= gs.group[k].kind == WINDOW_LAYERS or gs.group[k].kind == CHUNK_LAYERS
    while b.num_blank < n:
        if has_units and t.cold.size:
            unit_evict(gs, t.cold.head)
        elif has_units and t.warm.size and (not has_marks or t.marks.size == 0
                                            or t.node[t.warm.head].stamp < t.mark[t.marks.head].stamp):
            unit_evict(gs, t.warm.head)
        else:
            t.dropped += 1
            mark_drop(gs, t.marks.head)


# ---- marks -------------------------------------------------------------------------------------------------

cdef inline int32_t* mark_bundle(const Tree* t, int32_t m) noexcept nogil:
    return t.bundle + <int64_t>m * t.bundle_size


cdef int32_t mark_new(Tree* t, int64_t position) noexcept nogil:
    """There is always a free one: each has a bundle, or a node of its own."""
    cdef int32_t m = t.free_mark
    if m != NO_MARK:
        t.free_mark = t.mark[m].next
    else:
        m = t.fresh_mark
        t.fresh_mark += 1
    memset(&t.mark[m], 0, sizeof(Mark))
    t.mark[m].node = NO_NODE
    t.mark[m].row = -1
    t.mark[m].position = position
    return m


cdef void bundle_keep(Tree* t, Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    """Blocks whose last user is gone, which no pending step touches: they are CACHED at once."""
    cdef int32_t k, i
    for k in range(n):
        i = ids[k]
        b.block[i].refcount -= 1
        b.num_shared -= b.block[i].refcount == 1
        if b.block[i].refcount == 0:
            b.num_used -= 1
            b.block[i].place = CACHED
            chain_push(b, &b.lru, i)


cdef void bundle_use(Tree* t, Blocks* b, const int32_t* ids, int32_t n) noexcept nogil:
    cdef int32_t k
    for k in range(n):
        t.seen[0][ids[k]] = 0
        blocks_touch(b, ids[k])


cdef bint needs_entry(const LayerGroup* g, int64_t index, int64_t position) noexcept nogil:
    """Whether a query at a position or later reads entry `index` of a window or chunk."""
    if g.kind == WINDOW_LAYERS:
        return index < g.kept or (index + 1) * g.block_size > position - g.reach + 1
    return (index + 1) * g.block_size > position // g.reach * g.reach


cdef void mark_tails(Groups* gs, int32_t m, int32_t slot) noexcept nogil:
    """Count (`slot` >= 0: the row that has them) or uncount the entries of windows and chunks that a mark needs."""
    cdef Tree* t = gs.tree
    cdef LayerGroup* g
    cdef int32_t* known
    cdef int32_t n = t.mark[m].node, k, first
    cdef int64_t index
    while n != NO_NODE:
        for k in range(gs.num_groups):
            g = &gs.group[k]
            if g.kind == FULL_LAYERS or not ends_at(t, g, k, t.node[n].depth):
                continue
            index = t.node[n].depth // t.span[k] - 1
            if not needs_entry(g, index, t.mark[m].position):
                continue
            known = node_ids(t, n, k)
            if slot >= 0:
                if known[0] == NO_BLOCK:
                    memcpy(known, group_row(g, slot) + index * g.columns, g.columns * sizeof(int32_t))
                node_tails(t, n)[k] += 1
                continue
            node_tails(t, n)[k] -= 1
            if node_tails(t, n)[k] == 0:
                first = known[0]
                known[0] = NO_BLOCK
                if g.blocks.block[first].place == CACHED:
                    entry_blank(t, g, first)    # the mark still holds the last node, and so all above it
        n = t.node[n].parent


cdef bint row_has_tails(const Groups* gs, int32_t slot, int64_t position) noexcept nogil:
    """Whether a row still has every entry of windows and chunks that a mark at a position needs."""
    cdef const LayerGroup* g
    cdef int64_t last
    cdef int32_t k
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == WINDOW_LAYERS or g.kind == CHUNK_LAYERS:
            last = min(<int64_t>g.seq[slot].gone, position // g.block_size) - 1     # hole before the position
            if last >= g.kept and needs_entry(g, last, position):
                return False
    return True


cdef void forget_taken(Tree* t, int32_t slot, int32_t m) noexcept nogil:
    """A mark is no longer one that a row has taken."""
    cdef int32_t j = 0
    while t.row[slot].taken[j] != m:
        j += 1
    while j + 1 < ROW_MARKS:
        t.row[slot].taken[j] = t.row[slot].taken[j + 1]
        j += 1
    t.row[slot].taken[j] = NO_MARK
    t.mark[m].row = -1


cdef void mark_drop(Groups* gs, int32_t m) noexcept nogil:
    """A mark is gone. If a pending step saves it, its blocks go to limbo."""
    cdef Tree* t = gs.tree
    cdef Mark* mark = &t.mark[m]
    cdef Blocks* b = gs.arena[0]
    cdef int32_t* ids = mark_bundle(t, m)
    cdef int32_t n = mark.node, k, last = NO_NODE, after
    mark_unlink(t, m)
    if mark.row >= 0:
        forget_taken(t, mark.row, m)
    for k in range(t.bundle_size):
        t.role[0][ids[k]] = NO_ROLE
        t.seen[0][ids[k]] = 0
        if b.block[ids[k]].place == CACHED:
            blocks_drop(b, ids[k])
        else:
            b.block[ids[k]].committed = PLAIN
            blocks_unref(b, ids[k])
    if n != NO_NODE:
        mark_tails(gs, m, -1)
        t.node[n].mark = NO_MARK
        while n != NO_NODE:                     # what lost its last mark leaves first, the deepest first of all
            t.node[n].below -= 1
            if t.node[n].below == 0 and t.node[n].place == WARM:
                unit_unlink(t, n)
                unit_insert(t, n, COLD, last)
                last = n
            n = t.node[n].parent
        node_release(t, mark.node)
    mark.node = NO_NODE
    mark.position = mark.loads = mark.step = 0
    mark.next = t.free_mark
    t.free_mark = m


cdef void mark_publish(Groups* gs, int32_t m, int32_t n, int32_t slot) noexcept nogil:
    """A mark can be found at a node, which has none; the row in `slot` has its entries of windows and chunks."""
    cdef Tree* t = gs.tree
    t.mark[m].node = n
    t.node[n].mark = m
    t.node[n].users += 1
    t.taken += 1
    mark_tails(gs, m, slot)
    mark_refresh(t, m)
    while n != NO_NODE:
        t.node[n].below += 1
        if t.node[n].below == 1 and t.node[n].place == COLD:
            unit_refresh(t, n)
        n = t.node[n].parent


# ---- hits --------------------------------------------------------------------------------------------------

cdef Hit tree_match(const Groups* gs, uint64_t root, uint64_t root_hash, const int32_t* tokens,
                    int64_t most) noexcept nogil:
    """The longest hit of a prompt of which at most so many base blocks count; its path is in `path`."""
    cdef const Tree* t = gs.tree
    cdef Hit hit
    cdef int64_t bs = t.block_size
    cdef uint64_t h = root_hash
    cdef int32_t n = NO_NODE, k, depth
    hit.known = hit.nodes = 0
    hit.mark = NO_MARK
    while hit.known < most:
        h = chain(t.index, h, tokens + hit.known * bs)
        n = node_find(t, root, n, h, tokens + hit.known * bs)
        if n == NO_NODE:
            break
        for k in range(gs.num_groups):
            if gs.group[k].kind == FULL_LAYERS and ends_at(t, &gs.group[k], k, hit.known + 1) and (
                    node_ids(t, n, k)[0] == NO_BLOCK):
                n = NO_NODE
                break
        if n == NO_NODE:
            break
        t.path[hit.known] = n
        hit.known += 1
    hit.digest = h
    for depth in range(hit.known, 0, -1):
        if depth * bs % t.grain == 0 and (not t.needs_marks or t.node[t.path[depth - 1]].mark != NO_MARK):
            hit.nodes = depth
            hit.mark = t.node[t.path[depth - 1]].mark if t.needs_marks else NO_MARK
            break
    return hit


cdef void count_own(const Groups* gs, const Hit* hit, int64_t* own) noexcept nogil:
    """Blocks of each arena that a hit takes out of what may leave."""
    cdef const Tree* t = gs.tree
    cdef const LayerGroup* g
    cdef int32_t k, n, i, first
    for i in range(hit.nodes):
        n = t.path[i]
        for k in range(gs.num_groups):
            g = &gs.group[k]
            if not ends_at(t, g, k, i + 1) or (g.kind != FULL_LAYERS and not needs_entry(
                    g, (i + 1) // t.span[k] - 1, hit.nodes * t.block_size)):
                continue
            first = node_ids(t, n, k)[0]
            if g.blocks.block[first].place == CACHED:
                own[g.arena] += g.columns
    if hit.mark != NO_MARK and t.bundle_size and gs.arena[0].block[mark_bundle(t, hit.mark)[0]].place == CACHED:
        own[0] += t.bundle_size


cdef int judge_open(Groups* gs, const Ints* tokens, const Hit* hit, bint take, int64_t* need, Verdict* v) noexcept nogil:
    """Whether every arena has what a prompt needs beside its hit."""
    cdef const LayerGroup* g
    cdef int64_t[MAX_ARENAS] own
    cdef int64_t size = gs.block_size, total = blocks_for(gs, tokens.size if take else hit.nodes * size)
    cdef int64_t spare, available
    cdef int32_t k
    memset(own, 0, sizeof(own))
    memset(need, 0, MAX_ARENAS * sizeof(int64_t))
    count_own(gs, hit, own)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == STATE_LAYERS:
            need[g.arena] += hit.nodes > 0
        else:
            need[g.arena] += (entries_for(g, total) - hit.nodes // gs.tree.span[k]) * <int64_t>g.columns
    for k in range(gs.num_arenas):
        spare = gs.seqs.watermark if k == 0 else 0
        available = blocks_available(gs.arena[k]) - own[k]
        if need[k] and need[k] + spare > available:
            blocks_short(gs.arena[k], v, k, -1, -1, need[k], need[k] + spare - available)
            v.evictable -= own[k]
            v.value, v.other, v.low = tokens.size, hit.nodes * size, spare
            return v.reason
    return OK


cdef void open_group(Groups* gs, int32_t k, int32_t slot, const Hit* hit) noexcept nogil:
    """The entries of a hit in the table of one group."""
    cdef Tree* t = gs.tree
    cdef LayerGroup* g = &gs.group[k]
    cdef int32_t* row = group_row(g, slot)
    cdef int64_t position = hit.nodes * gs.block_size, index, entries
    cdef int32_t gone = 0, c
    if g.kind == STATE_LAYERS:
        if hit.nodes:
            blocks_take_many(g.blocks, row, 1)
        return
    entries = hit.nodes // t.span[k]
    for index in range(entries):
        if g.kind == FULL_LAYERS or needs_entry(g, index, position):
            entry_share(t, g, k, t.path[(index + 1) * t.span[k] - 1], row + index * g.columns)
            continue
        for c in range(g.columns):
            row[index * g.columns + c] = g.hole
        gone = <int32_t>index + 1
    set_gone(g, slot, gone)


cdef void begin_load(Groups* gs, int32_t slot, int32_t m) noexcept nogil:
    """The states of a row come from a mark; the first step that reads its slots copies them."""
    cdef Tree* t = gs.tree
    cdef int32_t first = gs.group[t.state_group].table[slot]
    t.load[first] = m
    t.load_step[first] = 0
    t.num_loads += 1
    t.mark[m].loads += 1
    mark_unlink(t, m)
    if t.mark[m].loads == 1:
        bundle_use(t, gs.arena[0], mark_bundle(t, m), t.bundle_size)


cdef void end_load(Groups* gs, int32_t first) noexcept nogil:
    """Nobody needs the mark for a slot any more."""
    cdef Tree* t = gs.tree
    cdef int32_t m = t.load[first]
    t.load[first] = NO_MARK
    t.num_loads -= 1
    t.mark[m].loads -= 1
    if t.mark[m].loads:
        return
    bundle_keep(t, gs.arena[0], mark_bundle(t, m), t.bundle_size)
    if t.mark[m].orphan:                # flushed meanwhile
        mark_drop(gs, m)
    else:
        mark_list(t, m)


cdef void tree_begin(Groups* gs, int32_t slot, const Ints* tokens, const Hit* hit, const int64_t* need,
                     bint take) noexcept nogil:
    """Open the sequence in `slot` over a hit, with entries for the rest of the prompt."""
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef LayerGroup* g
    cdef int64_t blocks = blocks_for(gs, tokens.size if take else hit.nodes * gs.block_size)
    cdef int32_t k, have, entries
    seq_new(s)
    for k in range(gs.num_groups):      # what is found first: room must not be made of it
        g = &gs.group[k]
        g.seq[slot].epoch = 0
        g.seq[slot].evicted = 0
        forget_told(g, slot)
        set_gone(g, slot, 0)
        if g.kind != STATE_LAYERS:
            open_group(gs, k, slot, hit)
    if hit.mark != NO_MARK:
        t.used += not t.mark[hit.mark].used
        t.mark[hit.mark].used = True
        if t.state_group >= 0:
            open_group(gs, t.state_group, slot, hit)
            begin_load(gs, slot, hit.mark)
        mark_refresh(t, hit.mark)
    for k in range(gs.num_arenas):
        if need[k]:
            tree_make_room(gs, k, need[k])
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == STATE_LAYERS:
            if k != t.state_group:
                open_group(gs, k, slot, hit)
        else:
            have = hit.nodes // t.span[k]
            entries = entries_of(g, slot, blocks)
            blocks_take_many(g.blocks, group_row(g, slot) + <int64_t>have * g.columns, (entries - have) * g.columns)
        new_version(g, slot)
    s.seq[slot].num_blocks = <int32_t>blocks
    s.seq[slot].kv_len = hit.nodes * gs.block_size
    s.sum_blocks += blocks
    s.sum_tokens += s.seq[slot].kv_len


cdef int64_t next_place(const Tree* t, int32_t slot, int64_t length) noexcept nogil:
    """The next length above this one at which a row takes a checkpoint, -1: none."""
    cdef const RowPlaces* row = &t.row[slot]
    cdef int64_t least = -1, place, distance = t.spacing, low = max(length, row.hit)
    if not t.needs_marks or not t.can_restore or length >= row.cut:
        return -1
    place = row.cut // t.grain * t.grain
    if place > low:
        least = place
    place = row.junction // t.grain * t.grain
    if place > low and (least < 0 or place < least):
        least = place
    while distance and distance <= row.cut:
        place = distance // t.grain * t.grain
        if place > low and (least < 0 or place < least):
            least = place
        if place > low:
            break
        distance *= 2
    return least


# ---- steps -------------------------------------------------------------------------------------------------

cdef void tree_loads(Groups* gs, const Step* p, GroupPlan** part, bint advance) noexcept nogil:
    """Before the tables of a step change: states that its rows read and that nobody has copied yet."""
    cdef Tree* t = gs.tree
    cdef int32_t i, k, at = 0, slot, first
    for k in range(gs.num_groups):
        part[k].num_loads = part[k].num_saves = 0
    if t.num_loads == 0 or not advance:
        return
    for i in range(p.num_rows):
        if at < p.num_events and p.event[at].row == i:
            at += 1
            if p.event[at - 1].q_len == 0:
                continue
        slot = slot_of(p.handle[i])
        first = gs.group[t.state_group].table[slot]
        if first == NO_BLOCK or t.load[first] == NO_MARK or t.load_step[first]:
            continue
        t.load_step[first] = p.id
        for k in range(gs.num_groups):
            if gs.group[k].kind == STATE_LAYERS:
                transfer(t, k, gs.group[k].table[slot], t.load[first], part[k].loads, part[k].num_loads)
                part[k].num_loads += 1


cdef inline void transfer(const Tree* t, int32_t k, int32_t state, int32_t m, int32_t* out, int32_t at) noexcept nogil:
    """A row of state_loads or state_saves: a slot, and the blocks of its group in a bundle."""
    out += <int64_t>at * (1 + t.span[k])
    out[0] = state
    memcpy(out + 1, mark_bundle(t, m) + t.offset[k], t.span[k] * sizeof(int32_t))


cdef void tree_saves(Groups* gs, const Step* p, GroupPlan** part) noexcept nogil:
    """After the tables of a step have changed: rows that end where a checkpoint is wanted take a bundle."""
    cdef Tree* t = gs.tree
    cdef Blocks* b = gs.arena[0]
    cdef int64_t length
    cdef int32_t i, k, at = 0, slot, m, j, q_len
    if t.bundle_size == 0 or not t.can_restore:
        return
    for i in range(p.num_rows):
        q_len = 1
        if at < p.num_events and p.event[at].row == i:
            q_len = p.event[at].q_len
            at += 1
        slot = slot_of(p.handle[i])
        length = p.length[i]
        if q_len == 0 or length > t.row[slot].cut or next_place(t, slot, length - 1) != length:
            continue
        j = 0
        while j < ROW_MARKS and t.row[slot].taken[j] != NO_MARK and t.mark[t.row[slot].taken[j]].position != length:
            j += 1
        if j == ROW_MARKS or t.row[slot].taken[j] != NO_MARK or blocks_available(b) < t.bundle_size:
            t.skipped += 1
            continue
        tree_make_room(gs, 0, t.bundle_size)
        m = mark_new(t, length)
        t.row[slot].taken[j] = m
        t.mark[m].row = slot
        blocks_take_many(b, mark_bundle(t, m), t.bundle_size)
        for k in range(t.bundle_size):
            b.block[mark_bundle(t, m)[k]].committed = CANONICAL
            t.role[0][mark_bundle(t, m)[k]] = BUNDLE
        t.mark[m].step = p.id
        t.num_saves += 1
        for k in range(gs.num_groups):
            if gs.group[k].kind == STATE_LAYERS:
                transfer(t, k, gs.group[k].table[slot], m, part[k].saves, part[k].num_saves)
                part[k].num_saves += 1


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
        for j in range(ROW_MARKS):
            m = t.row[slot].taken[j]
            if m != NO_MARK and t.mark[m].step == p.id:
                t.mark[m].step = 0
                t.num_saves -= 1
                bundle_keep(t, gs.arena[0], mark_bundle(t, m), t.bundle_size)
                mark_refresh(t, m)
    if t.num_loads:
        for i in range(gs.group[t.state_group].blocks.num_blocks):
            if t.load[i] != NO_MARK and t.load_step[i] == p.id:
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
        if t.load[i] != NO_MARK and t.load_step[i] == p.id:
            t.load_step[i] = 0
            end_idle_load(gs, i)


cdef inline void end_idle_load(Groups* gs, int32_t first) noexcept nogil:
    """End the load of a slot that no row has."""
    cdef const Block* block = &gs.group[gs.tree.state_group].blocks.block[first]
    if gs.tree.load[first] != NO_MARK and gs.tree.load_step[first] == 0 and block.refcount + block.hold == 0:
        end_load(gs, first)


# ---- rows --------------------------------------------------------------------------------------------------

cdef void drop_taken(Groups* gs, int32_t slot, int64_t step, int64_t beyond) noexcept nogil:
    """Drop what a row took and has not published: of a step, or if `step` is 0 what lies beyond a length."""
    cdef Tree* t = gs.tree
    cdef int32_t j, m
    for j in range(ROW_MARKS - 1, -1, -1):
        m = t.row[slot].taken[j]
        if m != NO_MARK and ((t.mark[m].step == step) if step else (t.mark[m].position > beyond)):
            t.num_saves -= t.mark[m].step != 0
            mark_drop(gs, m)


cdef void row_leaves(Groups* gs, int32_t slot) noexcept nogil:
    """A row is about to be closed, or its namespace was flushed."""
    cdef Tree* t = gs.tree
    drop_taken(gs, slot, 0, -1)
    if t.row[slot].node != NO_NODE:
        node_release(t, t.row[slot].node)
    t.row[slot].node = NO_NODE


cdef void row_ends(Groups* gs, int32_t slot) noexcept nogil:
    """A row goes on without the tree."""
    row_leaves(gs, slot)
    gs.seqs.prefix[slot].root = 0
    gs.tree.row[slot].cut = 0


cdef void row_loses(Groups* gs, int32_t slot) noexcept nogil:
    """Tokens left a row: what its blocks hold follows from its tokens no more."""
    cdef SeqPrefix* prefix = &gs.seqs.prefix[slot]
    row_ends(gs, slot)
    prefix.committed = prefix.published = prefix.done = prefix.forked_at = 0


cdef void tree_fork(Groups* gs, int32_t parent, int32_t child) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef int32_t j
    s.prefix[child] = s.prefix[parent]
    s.prefix[child].done = seq_done(s, gs.arena[0], parent)
    s.prefix[child].forked_at = s.seq[parent].kv_len
    memcpy(s.partial + child * gs.block_size, s.partial + parent * gs.block_size,
           (s.prefix[parent].committed % gs.block_size) * sizeof(int32_t))
    t.row[child] = t.row[parent]
    for j in range(ROW_MARKS):
        t.row[child].taken[j] = NO_MARK
    if t.row[child].node != NO_NODE:
        t.node[t.row[child].node].users += 1


cdef void tree_truncate(Groups* gs, int32_t slot, int64_t length) noexcept nogil:
    """A sequence is about to be shortened."""
    cdef Tree* t = gs.tree
    cdef SeqPrefix* prefix = &gs.seqs.prefix[slot]
    cdef int64_t bs = gs.block_size
    cdef int32_t n = t.row[slot].node
    drop_taken(gs, slot, 0, length)
    if length < prefix.committed:
        while n != NO_NODE and t.node[n].depth * bs > length:
            if t.node[n].depth == length // bs + 1 and length % bs:     # a full block becomes the tail
                memcpy(gs.seqs.partial + slot * bs, t.tokens + n * bs, (length % bs) * sizeof(int32_t))
            n = t.node[n].parent
        if n != t.row[slot].node:
            if n != NO_NODE:
                t.node[n].users += 1
            node_release(t, t.row[slot].node)
            t.row[slot].node = n
        prefix.committed = length
    prefix.done = min(prefix.done, length)
    prefix.forked_at = min(prefix.forked_at, length)


# ---- commit ------------------------------------------------------------------------------------------------

cdef const int32_t* block_tokens(Tree* t, const Seqs* s, int32_t slot, int64_t depth,
                                 const int32_t* tokens) noexcept nogil:
    """The tokens of base block `depth` - 1 of a row that commits `tokens`."""
    cdef int64_t bs = t.block_size, told = s.prefix[slot].committed, start = (depth - 1) * bs - told
    if start >= 0:
        return tokens + start
    memcpy(t.scratch, s.partial + slot * bs, (told % bs) * sizeof(int32_t))
    memcpy(t.scratch + told % bs, tokens, (bs - told % bs) * sizeof(int32_t))
    return t.scratch


cdef int32_t token_at(const Tree* t, const Seqs* s, int32_t slot, const int32_t* tokens, int64_t position) noexcept nogil:
    """A token of a row that commits `tokens`, -1: nobody knows it."""
    cdef int64_t bs = t.block_size, told = s.prefix[slot].committed
    cdef int32_t n = t.row[slot].node
    if position >= told:
        return tokens[position - told]
    if position >= told // bs * bs:
        return s.partial[slot * bs + position % bs]
    while n != NO_NODE and t.node[n].depth > position // bs + 1:
        n = t.node[n].parent
    return t.tokens[n * bs + position % bs] if n != NO_NODE else -1


cdef bint same_entry(const Tree* t, const Seqs* s, const Ints* rows, const Ints* counts, const int32_t* all_tokens,
                     int32_t earlier, int32_t slot, const int32_t* tokens, int64_t first, int64_t end) noexcept nogil:
    """Whether an earlier row of the call says the same of the positions of an entry that both fill."""
    cdef int32_t other = slot_of(ints_at(rows, earlier)), row
    cdef int64_t position
    for row in range(earlier):
        all_tokens += ints_at(counts, row)
    for position in range(first, end):
        if token_at(t, s, other, all_tokens, position) != token_at(t, s, slot, tokens, position):
            return False
    return True


cdef int judge_tokens(Groups* gs, const Ints* rows, const Ints* counts, const int32_t* all_tokens, int32_t row, int64_t
                      at, Verdict* v) noexcept nogil:
    """Row `row` of a commit, whose tokens are those from `at` on, must not contradict what entries stand for."""
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef int32_t slot = slot_of(ints_at(rows, row)), n = t.row[slot].node, k, id
    cdef const int32_t* tokens = all_tokens + at
    cdef const int32_t* block
    cdef int64_t bs = t.block_size, told = s.prefix[slot].committed, depth, index
    cdef uint64_t root = s.prefix[slot].root, h = t.node[n].hash if n != NO_NODE else s.prefix[slot].root_hash
    cdef bint is_known = True
    cdef LayerGroup* g
    for depth in range(told // bs + 1, (told + ints_at(counts, row)) // bs + 1):
        if root and is_known:
            block = block_tokens(t, s, slot, depth, tokens)
            h = chain(t.index, h, block)
            n = node_find(t, root, n, h, block)
            is_known = n != NO_NODE
        for k in range(gs.num_groups):
            g = &gs.group[k]
            if not ends_at(t, g, k, depth):
                continue
            index = depth // t.span[k] - 1
            if g.kept <= index < g.seq[slot].gone:
                continue
            id = group_row(g, slot)[index * g.columns]
            if t.role[g.arena][id] != NO_ROLE:
                if root and t.node[t.stands_for[g.arena][id]].root and t.stands_for[g.arena][id] != n:
                    return refused(v, OTHER_TOKENS, row, id, 0, 0, 0)
            elif g.blocks.mark[id] == g.blocks.stamp:
                if not same_entry(t, s, rows, counts, all_tokens, t.stands_for[g.arena][id], slot, tokens,
                                  index * g.block_size, (index + 1) * g.block_size):
                    return refused(v, OTHER_TOKENS, row, id, 0, 0, 0)
            elif g.blocks.block[id].refcount > 1:
                g.blocks.mark[id] = g.blocks.stamp
                t.stands_for[g.arena][id] = row         # of no meaning before the entry is committed
    return OK


cdef void publish_place(Groups* gs, int32_t slot, int32_t n, int64_t position) noexcept nogil:
    """A row has committed as far as a place where a checkpoint is wanted."""
    cdef Tree* t = gs.tree
    cdef int32_t* taken = t.row[slot].taken
    cdef int32_t j = 0, m = NO_MARK
    if next_place(t, slot, position - 1) != position:
        return
    while j < ROW_MARKS and (taken[j] == NO_MARK or t.mark[taken[j]].position != position):
        j += 1
    if j < ROW_MARKS:
        m = taken[j]
        forget_taken(t, slot, m)
    elif t.bundle_size:
        return                              # no bundle was to be had
    if t.node[n].mark != NO_MARK:
        mark_refresh(t, t.node[n].mark)
    elif row_has_tails(gs, slot, position):
        mark_publish(gs, m if m != NO_MARK else mark_new(t, position), n, slot)
        return
    else:
        t.skipped += 1
    if m != NO_MARK:
        mark_drop(gs, m)


cdef void commit_block(Groups* gs, int32_t slot, int64_t depth, const int32_t* block) noexcept nogil:
    """Base block `depth` - 1 of a row is full and known: it becomes a node, and its entries stand for it."""
    cdef Tree* t = gs.tree
    cdef SeqPrefix* prefix = &gs.seqs.prefix[slot]
    cdef int32_t above = t.row[slot].node, n, k
    cdef uint64_t h = chain(t.index, t.node[above].hash if above != NO_NODE else prefix.root_hash, block)
    cdef LayerGroup* g
    cdef const int32_t* ids
    cdef int64_t index
    n = node_find(t, prefix.root, above, h, block)
    if n != NO_NODE:
        t.node[n].users += 1
    else:
        n = node_new(gs, prefix.root, above, h, block)
    if n == NO_NODE:                        # no room: the row goes on without the tree
        row_ends(gs, slot)
        return
    if above != NO_NODE:
        node_release(t, above)
    t.row[slot].node = n
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if ends_at(t, g, k, depth):
            index = depth // t.span[k] - 1
            ids = group_row(g, slot) + index * g.columns
            if not g.kept <= index < g.seq[slot].gone and t.role[g.arena][ids[0]] == NO_ROLE:
                entry_commit(t, g, k, ids, n)
    publish_place(gs, slot, n, depth * t.block_size)


cdef void tree_commit_row(Groups* gs, int32_t slot, const int32_t* tokens, int64_t count) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef SeqPrefix* prefix = &s.prefix[slot]
    cdef int64_t bs = t.block_size, told = prefix.committed, depth, tail
    for depth in range(told // bs + 1, (told + count) // bs + 1):
        if prefix.root:
            commit_block(gs, slot, depth, block_tokens(t, s, slot, depth, tokens))
    tail = min((told + count) % bs, count)      # of the last block, which is not full, those that are new
    memcpy(s.partial + slot * bs + (told + count) % bs - tail, tokens + count - tail, tail * sizeof(int32_t))
    prefix.committed = told + count


# ---- flush -------------------------------------------------------------------------------------------------

cdef void node_flush(Groups* gs, int32_t n) noexcept nogil:
    """Nobody finds a node any more: what is idle of it becomes blank, what is in use is blank when it is released."""
    cdef Tree* t = gs.tree
    cdef LayerGroup* g
    cdef int32_t* known
    cdef int32_t k, first, m = t.node[n].mark
    t.node[n].users += 1
    if m != NO_MARK and (t.mark[m].loads or t.mark[m].step):
        mark_orphan(gs, m)
    elif m != NO_MARK:
        mark_drop(gs, m)
    unit_unlink(t, n)
    t.node[n].idle = 0
    slot_remove(t, n)
    t.node[n].root = 0
    t.num_nodes -= 1
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == FULL_LAYERS and ends_at(t, g, k, t.node[n].depth):
            known = node_ids(t, n, k)
            first = known[0]
            known[0] = NO_BLOCK
            if first != NO_BLOCK and g.blocks.block[first].place == CACHED:
                entry_blank(t, g, first)
    node_release(t, n)


cdef void mark_orphan(Groups* gs, int32_t m) noexcept nogil:
    """A mark whose bundle is still read cannot be found any more."""
    cdef Tree* t = gs.tree
    cdef int32_t last = t.mark[m].node, n = last
    mark_tails(gs, m, -1)
    t.mark[m].node = NO_NODE
    t.mark[m].orphan = True
    t.node[n].mark = NO_MARK
    while n != NO_NODE:
        t.node[n].below -= 1
        n = t.node[n].parent
    node_release(t, last)


cdef void tree_flush(Groups* gs, uint64_t root) noexcept nogil:
    """Forget every node below a root, 0: all. O(nodes + sequences)."""
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef int32_t n, slot
    for slot in range(s.max_seqs):
        if s.life[slot].life == OPEN and s.prefix[slot].root and (root == 0 or s.prefix[slot].root == root):
            row_ends(gs, slot)
    for n in range(t.fresh_node):
        if t.node[n].depth and t.node[n].root and (root == 0 or t.node[n].root == root):
            node_flush(gs, n)


cdef int32_t cached_of(const Groups* gs, int32_t m) noexcept nogil:
    """Blocks of the bundle of a mark that may leave."""
    cdef const Tree* t = gs.tree
    if m == NO_MARK or t.bundle_size == 0 or gs.arena[0].block[mark_bundle(t, m)[0]].place != CACHED:
        return 0
    return t.bundle_size


cdef int32_t tree_evictable(const Groups* gs, uint64_t root) noexcept nogil:
    """Blocks that a flush of a root makes blank, 0: of all. O(blocks)."""
    cdef const Tree* t = gs.tree
    cdef int32_t k, id, n, m, j, slot, found = 0
    for k in range(gs.num_arenas):
        for id in range(gs.arena[k].num_blocks):
            if gs.arena[k].block[id].place == CACHED and t.role[k][id] != BUNDLE:
                n = t.stands_for[k][id]
                found += root == 0 or t.node[n].root == root
    for m in range(t.fresh_mark):
        n = t.mark[m].node
        if t.mark[m].position and n != NO_NODE and (root == 0 or t.node[n].root == root):
            found += cached_of(gs, m)
    for slot in range(gs.seqs.max_seqs if t.bundle_size else 0):
        if gs.seqs.life[slot].life == OPEN and gs.seqs.prefix[slot].root and (
                root == 0 or gs.seqs.prefix[slot].root == root):
            for j in range(ROW_MARKS):
                found += cached_of(gs, t.row[slot].taken[j])
    return found


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t tree_fingerprint(const Tree* t, uint64_t h) noexcept nogil:
    cdef int32_t n
    cdef int64_t k
    h = mix(mix(mix(h, t.num_nodes), t.cold.size), t.warm.size)
    for n in range(t.fresh_node):
        if t.node[n].depth:
            h = mix(mix(mix(h, n), t.node[n].root), (<uint64_t>t.node[n].users << 32) | <uint32_t>t.node[n].below)
            for k in range(t.block_size):
                h = mix(h, t.tokens[n * t.block_size + k])
            for k in range(t.width):
                h = mix(h, <uint32_t>t.ids[<int64_t>n * t.width + k])
    n = t.cold.head
    while n != NO_NODE:
        h = mix(h, n)
        n = t.node[n].next
    n = t.warm.head
    while n != NO_NODE:
        h = mix(h, n)
        n = t.node[n].next
    n = t.marks.head
    while n != NO_MARK:
        h = mix(mix(h, n), t.mark[n].position)
        n = t.mark[n].next
    return h


cdef void count_bundles(const Tree* t, int32_t* references) noexcept nogil:
    """References that loads and pending saves have on bundles."""
    cdef int32_t m, k, times
    for m in range(t.fresh_mark):
        times = (t.mark[m].loads > 0) + (t.mark[m].step != 0)
        for k in range(t.bundle_size if t.mark[m].position else 0):
            references[mark_bundle(t, m)[k]] += times


cdef bint check_node(const Groups* gs, int32_t n, char* finding) noexcept nogil:
    """Entries and line of one node."""
    cdef const Tree* t = gs.tree
    cdef const Node* node = &t.node[n]
    cdef const LayerGroup* g
    cdef int32_t k, first, idle = 0
    if node.users <= 0:
        return snprintf(finding, FINDING, b"node %d has %d users", n, node.users) > 0
    if node.parent != NO_NODE and (t.node[node.parent].depth != node.depth - 1):
        return snprintf(finding, FINDING, b"node %d has depth %d, the one above %d", n, node.depth,
                        t.node[node.parent].depth) > 0
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if not ends_at(t, g, k, node.depth):
            continue
        first = node_ids(t, n, k)[0]
        if (first != NO_BLOCK) != (node_tails(t, n)[k] > 0) and g.kind != FULL_LAYERS:
            return snprintf(finding, FINDING, b"node %d has entry %d of group %d, which %d checkpoints need", n, first,
                            k, node_tails(t, n)[k]) > 0
        if first == NO_BLOCK:
            continue
        if t.stands_for[g.arena][first] != n or t.role[g.arena][first] != 1 + k:
            return snprintf(finding, FINDING, b"block %d of arena %d is canonical at node %d, and stands for %d", first,
                            g.arena, n, t.stands_for[g.arena][first]) > 0
        idle += g.kind == FULL_LAYERS and g.blocks.block[first].place == CACHED
    if idle != node.idle or (node.place != NOWHERE) != (idle > 0):
        return snprintf(finding, FINDING, b"node %d has %d idle entries, counted %d, and place %d", n, node.idle, idle,
                        node.place) > 0
    if idle and (node.place == COLD) != (t.needs_marks and node.below == 0):
        return snprintf(finding, FINDING, b"node %d has %d checkpoints below and place %d", n, node.below,
                        node.place) > 0
    return False


cdef bint tree_check(const Groups* gs, char* finding) noexcept nogil:
    """Whether an invariant of the tree does not hold; the first one, in words. O(nodes + blocks + path of each mark)."""
    cdef const Tree* t = gs.tree
    cdef int32_t n, count = 0, k, id, users = 0, held = 0, slot
    for n in range(t.fresh_node):
        if t.node[n].depth == 0:
            continue
        count += t.node[n].root != 0
        users += t.node[n].users
        held += (t.node[n].parent != NO_NODE) + (t.node[n].mark != NO_MARK)
        if check_node(gs, n, finding):
            return True
    for k in range(gs.num_arenas):
        for id in range(gs.arena[k].num_blocks):
            held += 0 < t.role[k][id] <= MAX_GROUPS
            if t.role[k][id] != NO_ROLE and not gs.arena[k].block[id].committed:
                return snprintf(finding, FINDING, b"block %d of arena %d has role %d, and is not committed", id, k,
                                <int>t.role[k][id]) > 0
            if gs.arena[k].block[id].place == CACHED and t.role[k][id] == NO_ROLE:
                return snprintf(finding, FINDING, b"block %d of arena %d is kept for nothing", id, k) > 0
    for slot in range(gs.seqs.max_seqs):
        held += gs.seqs.life[slot].life == OPEN and t.row[slot].node != NO_NODE
    if count != t.num_nodes or users != held:
        return snprintf(finding, FINDING, b"counted %d nodes with %d users, they should be %d with %d", count, users,
                        t.num_nodes, held) > 0
    return False
