"""The tree of the prefix cache: nodes, their entries, and what leaves first."""


# ---- memory ------------------------------------------------------------------------------------------------

cdef enum:
    SCRATCH_ARRAYS = 2
    MOST_ARRAYS = 15 + 2 * MAX_ARENAS


cdef struct TreeArray:
    void** memory
    int64_t count
    int64_t size                # bytes of an element


cdef inline void add_array(TreeArray** at, void* memory, int64_t count, int64_t size) noexcept nogil:
    """An array of the tree; `size` 0: it needs none."""
    if size:
        at[0].memory, at[0].count, at[0].size = <void**>memory, count, size
        at[0] += 1


cdef int32_t tree_arrays(const Groups* gs, int64_t nodes, int64_t checkpoints, const int32_t* blocks,
                         TreeArray* arrays) noexcept nogil:
    """The memory of a tree with room for so many nodes, checkpoints, and blocks of each arena, NULL: as it has.

    The first SCRATCH_ARRAYS are scratch. Returns how many there are.
    """
    cdef Tree* t = gs.tree
    cdef TreeArray* at = arrays
    cdef int64_t word = sizeof(int32_t), n
    cdef int32_t k
    add_array(&at, &t.path, min(nodes, gs.seq_tokens // t.block_size), word)
    add_array(&at, &t.scratch, t.grain, word)
    add_array(&at, &t.node, nodes, sizeof(Node))
    add_array(&at, &t.more, nodes, sizeof(NodeMore) if t.needs_checkpoints else 0)
    add_array(&at, &t.unit, nodes, sizeof(Link))
    add_array(&at, &t.tokens, nodes, t.block_size * word)
    add_array(&at, &t.entry, nodes, t.width * word if t.width > 1 else 0)
    add_array(&at, &t.key, nodes, 16 if t.index.ring.limit else 0)
    add_array(&at, &t.bucket, buckets_for(nodes), word)
    add_array(&at, &t.checkpoint, checkpoints, sizeof(Checkpoint))
    add_array(&at, &t.link, checkpoints, sizeof(Link))
    add_array(&at, &t.bundle, checkpoints, t.bundle_size * word)
    add_array(&at, &t.row, gs.seqs.max_seqs, sizeof(RowPlaces))
    for k in range(gs.num_arenas):
        n = blocks[k] if blocks != NULL else gs.arena[k].num_blocks
        add_array(&at, &t.stands[k], n, sizeof(Standing))
        add_array(&at, &t.column_after[k], n, word if t.has_columns[k] else 0)
        if t.state_group >= 0 and gs.group[t.state_group].arena == k:
            add_array(&at, &t.load, n, word)
            add_array(&at, &t.load_step, n, sizeof(int64_t))
    return <int32_t>(at - arrays)


cdef void tree_free(Groups* gs) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef TreeArray[MOST_ARRAYS] arrays
    cdef int32_t k
    for k in range(tree_arrays(gs, t.room, t.checkpoint_room, NULL, arrays)):
        xfree(arrays[k].memory[0])
    keeping_free(t)
    ends_free(t.pins)
    xfree(t)


cdef void tree_sizes(Tree* t, const Groups* gs, const int32_t* sizes, const int32_t* bundle_of) noexcept nogil:
    """What follows from the groups and the sizes of arenas; `bundle_of`: blocks of a checkpoint in each state group."""
    cdef const LayerGroup* g
    cdef double kv = 0
    cdef int64_t tails = 0
    cdef int32_t k
    t.block_size = gs.block_size
    t.grain = 1
    t.can_restore = True
    t.state_group = -1
    for k in range(gs.num_groups):
        g = &gs.group[k]
        t.needs_checkpoints |= g.kind != FULL_LAYERS
        if g.kind == STATE_LAYERS:
            t.has_checkpoints[0] |= bundle_of[k] > 0
            t.offset[k] = t.bundle_size
            t.span[k] = bundle_of[k]
            t.bundle_size += bundle_of[k]
            t.can_restore &= bundle_of[k] > 0
            if t.state_group < 0:
                t.state_group = k
            continue
        t.grain = max(t.grain, <int64_t>1 << g.scale)
        t.has_columns[g.arena] |= g.columns > 1
        t.offset[k] = t.width
        t.width += 1 if g.kind == FULL_LAYERS else 2
        if g.kind == FULL_LAYERS:
            kv += <double>g.columns / (1 << g.scale)
            t.has_units[g.arena] = True
        else:
            t.has_checkpoints[g.arena] = True
            tails += ((g.reach - 1 + g.block_size - 1) // g.block_size + g.kept) * g.columns
    t.grain *= gs.block_size
    if kv > 0 and t.bundle_size + tails:
        t.spacing = 1
        while t.spacing < gs.seq_tokens and t.spacing * kv < 3.0 * (t.bundle_size + tails) * gs.block_size:
            t.spacing *= 2
    t.room = nodes_for(t, gs, sizes)
    t.checkpoint_room = checkpoints_for(t, t.room, sizes)
    t.num_buckets = <uint32_t>buckets_for(t.room)


cdef int64_t buckets_for(int64_t room) noexcept nogil:
    return room + room // 2


cdef int32_t checkpoints_for(const Tree* t, int64_t room, const int32_t* sizes) noexcept nogil:
    """How many checkpoints there is room for, beside so many nodes."""
    cdef int64_t most = room // NODES_PER_CHECKPOINT + 1 if t.needs_checkpoints else 1
    return <int32_t>(min(most, <int64_t>(sizes[0] // t.bundle_size + 1)) if t.bundle_size else most)


cdef int32_t nodes_for(const Tree* t, const Groups* gs, const int32_t* sizes) noexcept nogil:
    """How many nodes are enough: as many as the blocks of full groups hold; a million if nothing else holds them."""
    cdef const LayerGroup* g
    cdef int64_t room = 0, most
    cdef int32_t arena, k
    for arena in range(gs.num_arenas):
        most = 0
        for k in range(gs.num_groups):
            g = &gs.group[k]
            if g.arena == arena and g.kind == FULL_LAYERS:
                most = max(most, <int64_t>sizes[arena] // g.columns << g.scale)
        room += most
    if room == 0:
        room = 1 << 20
    room += gs.seqs.max_seqs * (t.grain // gs.block_size)       # entries that are not full yet
    return <int32_t>min(room, <int64_t>1 << 30)


cdef int tree_init(Tree* t, const Groups* gs, Index* index, const int32_t* sizes,
                   const int32_t* bundle_of) noexcept nogil:
    """An empty tree. After NO_MEMORY the caller must `tree_free`."""
    cdef TreeArray[MOST_ARRAYS] arrays
    cdef int32_t k
    t.index = index
    tree_sizes(t, gs, sizes, bundle_of)
    ring_init(&index.ring, index.ring.limit, t.grain)
    for k in range(tree_arrays(gs, t.room, t.checkpoint_room, sizes, arrays)):
        arrays[k].memory[0] = xcalloc(arrays[k].count, arrays[k].size)
        if arrays[k].memory[0] == NULL:
            return NO_MEMORY
    t.stride = t.width
    if t.width <= 1:
        t.stride = <int32_t>(sizeof(Node) // sizeof(int32_t))
        t.entry = &t.node[0].entry
    tree_reset(t, gs)
    return OK


cdef void tree_reset(Tree* t, const Groups* gs) noexcept nogil:
    """No node and no checkpoint; all blocks are blank, and nobody asks which were dropped."""
    cdef int32_t k, i
    cdef Blocks* b
    memset(t.bucket, 0xFF, t.num_buckets * sizeof(int32_t))
    for k in range(gs.num_arenas):
        b = <Blocks*>gs.arena[k]
        memset(t.stands[k], NO_ROLE, b.num_blocks * sizeof(Standing))
        for i in range(b.num_dropped):
            b.block[b.dropped[i]].noted = 0
        b.num_dropped = 0
    if t.state_group >= 0:
        memset(t.load, 0xFF, gs.group[t.state_group].blocks.num_blocks * sizeof(int32_t))
    line_init(&t.cold)
    line_init(&t.warm)
    line_init(&t.listed[0])
    line_init(&t.listed[1])
    t.free_node = t.free_checkpoint = NO_NODE
    t.fresh_node = t.fresh_checkpoint = 0
    t.num_nodes = t.num_checkpoints = t.num_loads = t.num_saves = 0
    t.has_waiting = False
    if t.keeping != NULL:
        keeping_reset(t)
    if t.pins != NULL:
        ends_reset(t.pins, gs.seqs.max_seqs)


cdef int64_t tree_nbytes(const Groups* gs) noexcept nogil:
    cdef const Tree* t = gs.tree
    cdef TreeArray[MOST_ARRAYS] arrays
    cdef int64_t found = 0, per_end = sizeof(int64_t) + sizeof(Link)
    cdef int32_t k
    for k in range(SCRATCH_ARRAYS, tree_arrays(gs, t.room, t.checkpoint_room, NULL, arrays)):
        found += arrays[k].count * arrays[k].size
    if t.keeping != NULL:
        found += t.room * (per_end + <int64_t>sizeof(NodeKept))
    return found + (gs.seqs.max_seqs * per_end if t.pins != NULL else 0)


# ---- lines -------------------------------------------------------------------------------------------------

cdef void line_init(Line* line) noexcept nogil:
    line.head = line.tail = NO_NODE
    line.size = 0


cdef inline void line_remove(Line* line, Link* link, int32_t i) noexcept nogil:
    cdef int32_t before = link[i].prev, after = link[i].next
    if before == NO_NODE:
        line.head = after
    else:
        link[before].next = after
    if after == NO_NODE:
        line.tail = before
    else:
        link[after].prev = before
    line.size -= 1


cdef inline Line* line_of(const Tree* t, int32_t m) noexcept nogil:
    """The line of a checkpoint that may leave: see `Tree.listed`."""
    if seldom(t.checkpoint[m].aside):
        return &t.keeping.checkpoints[checkpoint_rank(t, m)]
    return <Line*>&t.listed[t.checkpoint[m].was_hit]


cdef inline void line_insert(Line* line, Link* link, int32_t i, int32_t before) noexcept nogil:
    """Put i behind `before`; NO_NODE: at the head, which leaves first."""
    cdef int32_t after = line.head if before == NO_NODE else link[before].next
    link[i].next = after
    link[i].prev = before
    if before == NO_NODE:
        line.head = i
    else:
        link[before].next = i
    if after == NO_NODE:
        line.tail = i
    else:
        link[after].prev = i
    line.size += 1


cdef inline Line* unit_line(Tree* t, int32_t n) noexcept nogil:
    if seldom(t.node[n].place == ASIDE):
        return &t.keeping.units[t.node[n].rank]
    return &t.cold if t.node[n].place == COLD else &t.warm


cdef inline void unit_remove(Tree* t, int32_t n) noexcept nogil:
    cdef Node* node = &t.node[n]
    if node.place != NOWHERE:
        line_remove(unit_line(t, n), t.unit, n)
        node.place = NOWHERE


cdef inline void unit_append(Tree* t, int32_t n) noexcept nogil:
    """The unit of a node, which is in no line, was used now, and something of it is idle."""
    cdef Node* node = &t.node[n]
    cdef bint is_warm = not t.needs_checkpoints or t.more[n].below
    cdef Line* line = &t.warm if is_warm else &t.cold
    t.clock += 1
    if t.more != NULL:
        t.more[n].stamp = t.clock
    node.place = WARM if is_warm else COLD
    line_insert(line, t.unit, n, line.tail)


cdef void unit_refresh(Tree* t, int32_t n) noexcept nogil:
    """The unit of a node was used now; if nothing of it is idle it is in no line."""
    unit_remove(t, n)
    if t.node[n].idle:
        unit_append(t, n)


# ---- nodes -------------------------------------------------------------------------------------------------

cdef inline int32_t* node_entry(const Tree* t, int32_t n, int32_t group) noexcept nogil:
    """Where the first block of a group's canonical entry at a node is. See `Tree.entry`."""
    return t.entry + <int64_t>n * t.stride + t.offset[group]


cdef inline uint8_t* node_key(const Tree* t, int32_t n) noexcept nogil:
    return t.key + 16 * <int64_t>n


cdef inline int32_t node_above(const Tree* t, int32_t n, int64_t depth) noexcept nogil:
    """The node of the first `depth` base blocks of a prefix that ends at n, of all if it has fewer; NO_NODE: none."""
    while n != NO_NODE and t.node[n].depth > depth:
        n = t.node[n].parent
    return n


cdef inline Name* name_of(const Tree* t, int32_t n) noexcept nogil:
    """The namespace of a node that is not flushed."""
    return t.index.names.slot[t.node[n].name]


cdef inline int32_t* bucket_of(const Tree* t, uint32_t hash) noexcept nogil:
    return t.bucket + (<uint64_t>hash * t.num_buckets >> 32)


cdef inline int32_t node_find(const Tree* t, int32_t name, int32_t parent, uint32_t hash,
                              const int32_t* tokens) noexcept nogil:
    """The node (parent, tokens), or NO_NODE. Its parent is held by it, so that equal numbers are the same node."""
    cdef int32_t n = bucket_of(t, hash)[0]
    cdef const Node* node
    while n != NO_NODE:
        node = &t.node[n]
        if (node.hash == hash and node.parent == parent and node.name == name
                and memcmp(t.tokens + n * t.block_size, tokens, t.block_size * sizeof(int32_t)) == 0):
            return n
        n = node.after
    return NO_NODE


cdef inline void bucket_add(Tree* t, int32_t n) noexcept nogil:
    """Whoever is oldest is the first in a bucket: it is what leaves next."""
    cdef int32_t* at = bucket_of(t, t.node[n].hash)
    while at[0] != NO_NODE:
        at = &t.node[at[0]].after
    at[0] = n
    t.node[n].after = NO_NODE


cdef inline void bucket_remove(Tree* t, int32_t n) noexcept nogil:
    cdef int32_t* at = bucket_of(t, t.node[n].hash)
    while at[0] != n:
        at = &t.node[at[0]].after
    at[0] = t.node[n].after


cdef void node_hide(Tree* t, int32_t n) noexcept nogil:
    """Nobody finds a node any more, and it is in no namespace."""
    bucket_remove(t, n)
    t.num_nodes -= 1
    if seldom(t.node[n].rank):
        node_let_go(t, n)
    name_leave(&t.index.names, name_of(t, n))
    t.node[n].name = NO_NAME


cdef void node_forget(Tree* t, int32_t n) noexcept nogil:
    """A node without users is forgotten, and its parent has a user less."""
    cdef Node* node
    while n != NO_NODE:
        node = &t.node[n]
        if seldom(node.rank):
            node_passes_on(t, n)
        if node.name != NO_NAME:
            node_hide(t, n)
        node.depth = 0
        t.unit[n].next = t.free_node
        t.free_node = n
        n = node.parent
        if n != NO_NODE:
            t.node[n].users -= 1
            if t.node[n].users:
                return


cdef inline void node_release(Tree* t, int32_t n) noexcept nogil:
    t.node[n].users -= 1
    if t.node[n].users == 0:
        node_forget(t, n)


cdef int32_t node_new(Groups* gs, Name* name, int32_t parent, uint32_t hash, const int32_t* tokens) noexcept nogil:
    """A node of a namespace below another, with one user. NO_NODE: no room, though all that may leave has left."""
    cdef Tree* t = gs.tree
    cdef Node* node
    cdef int32_t k, n
    while t.free_node == NO_NODE and t.fresh_node == t.room:
        if not evict_next(gs, True, True):
            return NO_NODE
    n = t.free_node
    if n != NO_NODE:
        t.free_node = t.unit[n].next
    else:
        n = t.fresh_node
        t.fresh_node += 1
    node = &t.node[n]
    memset(node, 0, sizeof(Node))
    node.hash = hash
    node.name = name.slot
    node.parent = parent
    node.depth = 1
    node.users = 1
    bucket_add(t, n)
    if t.more != NULL:
        t.more[n].below = 0
        t.more[n].checkpoint = NO_CHECKPOINT
    if t.keeping != NULL:
        t.keeping.node[n].reasons = t.keeping.ends.until[n] = 0
    if parent != NO_NODE:
        node.depth += t.node[parent].depth
        t.node[parent].users += 1
    memcpy(t.tokens + n * t.block_size, tokens, t.block_size * sizeof(int32_t))
    for k in range(t.width):
        t.entry[n * <int64_t>t.stride + k] = NO_BLOCK
    t.num_nodes += 1
    t.index.inserted += 1
    name.users += 1
    if t.key != NULL:
        sha256(node_key(t, parent) if parent != NO_NODE else name_key(name), tokens,
               t.block_size * sizeof(int32_t), node_key(t, n))
    return n


# ---- events ------------------------------------------------------------------------------------------------

cdef void tell_stored(Tree* t, const LayerGroup* g, int32_t k, int32_t n) noexcept nogil:
    """A group has an entry, or a state, at a node: its tokens are those of the entry, or of the node."""
    cdef int32_t size = 1 << g.scale, above = n, i
    if t.key == NULL:
        return
    for i in range(size - 1, -1, -1):
        memcpy(t.scratch + i * t.block_size, t.tokens + above * t.block_size, t.block_size * sizeof(int32_t))
        above = t.node[above].parent
    ring_add(&t.index.ring, STORED, node_key(t, n), node_key(t, above) if above != NO_NODE else NULL,
             name_of(t, n), t.scratch, size * t.block_size, k)


cdef void tell_removed(Tree* t, int32_t k, int32_t n) noexcept nogil:
    if t.key != NULL:
        ring_add(&t.index.ring, REMOVED, node_key(t, n), NULL, NULL, NULL, 0, k)


# ---- entries -----------------------------------------------------------------------------------------------

cdef inline bint ends_at(const LayerGroup* g, int64_t depth) noexcept nogil:
    """Whether an entry of a group ends with so many base blocks."""
    return g.kind != STATE_LAYERS and (g.scale == 0 or depth & ((<int64_t>1 << g.scale) - 1) == 0)


cdef inline bint row_waits(const Groups* gs, int32_t slot) noexcept nogil:
    """Whether a row has committed blocks that it has not published."""
    cdef const Seqs* s = gs.seqs
    return (s.life[slot].life == OPEN and s.prefix[slot].name != NULL
            and s.prefix[slot].published < s.prefix[slot].committed // gs.block_size)


cdef inline bint is_waiting(int32_t role) noexcept nogil:
    return WAITS < role <= 2 * MAX_GROUPS


cdef inline void entry_commit(Tree* t, LayerGroup* g, int32_t k, const int32_t* ids, int32_t n) noexcept nogil:
    """An entry in use stands for a node from now on. One of a full group waits."""
    cdef Standing* stands = t.stands[g.arena]
    cdef int32_t c
    for c in range(g.columns):
        g.blocks.block[ids[c]].committed = True
        stands[ids[c]].node = n
        stands[ids[c]].role = LATER_COLUMN if c else 1 + k
        if g.columns > 1:
            t.column_after[g.arena][ids[c]] = ids[c + 1] if c + 1 < g.columns else NO_BLOCK
    t.node[n].users += 1
    if g.kind == FULL_LAYERS:
        stands[ids[0]].role += WAITS


cdef inline void entry_admit(Tree* t, const LayerGroup* g, int32_t k, int32_t first) noexcept nogil:
    """An entry of a full group waits no more: it is the canonical one of its node if that has none."""
    cdef Standing* standing = &t.stands[g.arena][first]
    cdef int32_t* known = node_entry(t, standing.node, k)
    if not is_waiting(standing.role):
        return
    standing.role -= WAITS
    if known[0] == NO_BLOCK:
        known[0] = first
        if t.key != NULL:
            tell_stored(t, g, k, standing.node)
    else:
        t.index.duplicates += 1


cdef void entry_blank(Tree* t, LayerGroup* g, int32_t first) noexcept nogil:
    """An entry that nobody refers to leaves the tree: its blocks become blank, the last column first."""
    cdef Standing* stands = t.stands[g.arena]
    cdef int32_t n = stands[first].node, id = first, count
    cdef int32_t[MOST_COLUMNS] ids
    for count in range(g.columns):
        ids[count] = id
        id = t.column_after[g.arena][id] if g.columns > 1 else NO_BLOCK
    for count in range(g.columns - 1, -1, -1):
        stands[ids[count]].role = NO_ROLE
        blocks_drop(g.blocks, ids[count])
    node_release(t, n)


cdef inline bint stands_for(const Tree* t, const LayerGroup* g, int32_t k, int32_t first, int32_t n) noexcept nogil:
    """Whether an entry, which does not wait, is one of a node."""
    return t.stands[g.arena][first].role == 1 + k and t.stands[g.arena][first].node == n


cdef int32_t entry_of_a_loading_row(const Groups* gs, int32_t k, int32_t n) noexcept nogil:
    """The entry of a window or chunk that the first row with a load pending has at a node, NO_BLOCK: none has one."""
    cdef const Tree* t = gs.tree
    cdef const LayerGroup* g = &gs.group[k]
    cdef int64_t index = (t.node[n].depth >> g.scale) - 1
    cdef int32_t slot, state, first
    for slot in range(gs.seqs.max_seqs if t.num_loads else 0):
        state = gs.group[t.state_group].table[slot]
        if (state == NO_BLOCK or t.load[state] == NO_CHECKPOINT or g.kept <= index < g.seq[slot].gone
                or index >= entries_of(g, slot, gs.seqs.seq[slot].num_blocks)):
            continue
        first = group_row(g, slot)[index * g.columns]
        if stands_for(t, g, k, first, n) and g.blocks.block[first].refcount:
            return first
    return NO_BLOCK


cdef void entry_left(Groups* gs, int32_t k, int32_t first) noexcept nogil:
    """Nobody refers to a committed entry any more. One that waits may have no content: it is kept for nobody.

    Nothing of a checkpoint that is to be loaded may leave, so a row that loads has its own entry in place of this one.
    """
    cdef Tree* t = gs.tree
    cdef LayerGroup* g = &gs.group[k]
    cdef int32_t n = t.stands[g.arena][first].node, own
    cdef Node* node = &t.node[n]
    cdef int32_t* known = node_entry(t, n, k)
    cdef bint is_lost = node.name == NO_NAME or is_waiting(t.stands[g.arena][first].role)
    if is_lost or (g.kind != FULL_LAYERS and known[0] != first):
        entry_blank(t, g, first)
    elif g.kind != FULL_LAYERS:
        own = entry_of_a_loading_row(gs, k, n)
        if own != NO_BLOCK:
            known[0] = own
            entry_blank(t, g, first)
    if is_lost or g.kind != FULL_LAYERS:
        return
    if known[0] == NO_BLOCK:                    # the canonical one is gone: this one takes its place
        known[0] = first
        tell_stored(t, g, k, n)
    node.idle += known[0] == first
    unit_refresh(t, n)
    if known[0] != first:
        entry_blank(t, g, first)


cdef void tree_settle(Groups* gs) noexcept nogil:
    """Look at the blocks that became EVICTABLE since the last time, and take them off the LRU lists."""
    cdef int32_t k
    for k in range(gs.num_arenas):
        if gs.arena[k].lru.size:
            settle_arena(gs, k)


cdef void settle_arena(Groups* gs, int32_t arena) noexcept nogil:
    """The same in one arena. Most of what leaves is an entry that nobody else has: its unit is idle then."""
    cdef Tree* t = gs.tree
    cdef Blocks* b = gs.arena[arena]
    cdef const Standing* stands = t.stands[arena]
    cdef int32_t id = b.lru.head, after, role, k, n
    cdef Node* node
    while id != NO_BLOCK:
        b.block[id].fence = SETTLED
        id = b.block[id].next
    after = b.lru.head
    b.lru.head = b.lru.tail = NO_BLOCK
    b.lru.size = 0
    while after != NO_BLOCK:
        id = after
        after = b.block[id].next
        role = stands[id].role
        if b.block[id].place != EVICTABLE or role == LATER_COLUMN or role == BUNDLE:
            continue                    # it left with the first block of its entry, or will
        n = stands[id].node
        node = &t.node[n]
        k = role - 1
        if (k < gs.num_groups and gs.group[k].kind == FULL_LAYERS and node.name != NO_NAME and node.place == NOWHERE
                and node_entry(t, n, k)[0] == id):
            node.idle += 1
            unit_append(t, n)
        else:
            entry_left(gs, k % MAX_GROUPS, id)


cdef void share_entries(Tree* t, LayerGroup* g, int32_t k, int32_t* row, int64_t first, int64_t end) noexcept nogil:
    """A row takes a reference on the canonical entries `first` .. `end - 1` along `path`."""
    cdef Blocks* b = g.blocks
    cdef const int32_t* entry = t.entry + t.offset[k]
    cdef const int32_t* column_after = t.column_after[g.arena]
    cdef int64_t stride = t.stride, index
    cdef int32_t columns = g.columns, span = 1 << g.scale, n, id, c
    cdef bint is_full = g.kind == FULL_LAYERS
    for index in range(first, end):
        n = t.path[(index + 1) * span - 1]
        id = entry[n * stride]
        row[index * columns] = id
        if is_full and b.block[id].place == EVICTABLE:
            t.node[n].idle -= 1
            if t.node[n].idle == 0:
                unit_remove(t, n)
        touch(b, id)
        for c in range(1, columns):
            id = column_after[id]
            row[index * columns + c] = id
            touch(b, id)


# ---- making room -------------------------------------------------------------------------------------------

cdef inline void node_empty(Groups* gs, int32_t n, bint flushed) noexcept nogil:
    """The idle entries of a node leave, and its checkpoint if it may.

    `flushed`: nobody finds the node any more, and what of it is in use is blank when it is released.
    """
    cdef Tree* t = gs.tree
    cdef Node* node = &t.node[n]
    cdef LayerGroup* g
    cdef int32_t* known
    cdef int32_t k, first, m = t.more[n].checkpoint if t.more != NULL else NO_CHECKPOINT
    cdef bint is_idle
    node.users += 1
    if m != NO_CHECKPOINT and t.checkpoint[m].listed:
        t.evicted += not flushed
        checkpoint_drop(gs, m)
    elif m != NO_CHECKPOINT and flushed:        # it goes when it is loaded
        checkpoint_hide(gs, m)
        t.checkpoint[m].orphan = True
    unit_remove(t, n)
    node.idle = 0
    if flushed:
        node_hide(t, n)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind != FULL_LAYERS or not ends_at(g, node.depth):
            continue
        known = node_entry(t, n, k)
        first = known[0]
        is_idle = first != NO_BLOCK and g.blocks.block[first].place == EVICTABLE
        if is_idle or (flushed and first != NO_BLOCK):
            known[0] = NO_BLOCK
            tell_removed(t, k, n)
        if is_idle and not flushed:
            t.index.evicted += 1
            g.blocks.evictions += g.columns
        if is_idle:
            entry_blank(t, g, first)
    node_release(t, n)


cdef void unit_evict(Groups* gs, int32_t n) noexcept nogil:
    node_empty(gs, n, False)


cdef void checkpoint_evict(Groups* gs, int32_t m) noexcept nogil:
    gs.tree.evicted += 1
    checkpoint_drop(gs, m)


cdef inline int64_t checkpoint_age(const Tree* t, int32_t m) noexcept nogil:
    """Twice the age of a checkpoint, three times if it was never a hit. -1: there is none."""
    if m == NO_CHECKPOINT:
        return -1
    return (3 - t.checkpoint[m].was_hit) * (t.clock - t.checkpoint[m].stamp)


cdef int32_t oldest_checkpoint(const Tree* t) noexcept nogil:
    """The checkpoint that leaves first, NO_CHECKPOINT: none may leave."""
    cdef int32_t a = t.listed[0].head, b = t.listed[1].head
    return a if checkpoint_age(t, a) >= checkpoint_age(t, b) else b


cdef inline bint warm_is_next(const Tree* t, int32_t m) noexcept nogil:
    """Whether the first warm unit leaves before a checkpoint."""
    return m == NO_CHECKPOINT or 2 * (t.clock - t.more[t.warm.head].stamp) > checkpoint_age(t, m)


cdef inline bint evict_next(Groups* gs, bint has_units, bint has_checkpoints) noexcept nogil:
    """Evict what leaves first of the units, of the checkpoints, or of both. Returns whether anything may leave."""
    cdef Tree* t = gs.tree
    cdef int32_t n = t.cold.head if has_units else NO_NODE
    if has_units and not t.needs_checkpoints and t.keeping == NULL:
        n = t.warm.head                         # no unit is cold, and there are no checkpoints
    if n == NO_NODE:
        return evict_warm(gs, has_units, has_checkpoints)
    unit_evict(gs, n)
    return True


cdef extern from *:
    """
    #ifdef KVPOOL_DEBUG
    #include <assert.h>
    #define kv_assert(holds) assert(holds)
    #else
    #define kv_assert(holds) ((void)0)
    #endif
    """
    void debug_assert "kv_assert"(bint holds) noexcept nogil


cdef inline int32_t fetch_unit(const Groups* gs, int32_t n) noexcept nogil:
    """Fetch what the eviction of a unit looks at beside its node; returns the unit that leaves behind it."""
    cdef const Tree* t = gs.tree
    cdef int32_t k, first
    kv_prefetch(bucket_of(t, t.node[n].hash))
    for k in range(gs.num_groups):
        first = node_entry(t, n, k)[0] if gs.group[k].kind == FULL_LAYERS else NO_BLOCK
        if first != NO_BLOCK:
            kv_prefetch(&gs.group[k].blocks.block[first])
            kv_prefetch(&t.stands[gs.group[k].arena][first])
    return t.unit[n].next


cdef void tree_make_room(Groups* gs, int32_t arena, int64_t n) noexcept nogil:
    """At least n blocks of an arena are blank then. The caller has checked blocks_available.

    Units are fetched some evictions ahead, their nodes first: then misses overlap with each other, and with the work.
    """
    cdef const Tree* t = gs.tree
    cdef bint may_leave = True
    cdef int64_t lacking = n - gs.arena[arena].num_blank, count = 0, nodes = 0, units = 0
    cdef int32_t far = NO_NODE if lacking == 1 else t.cold.head if t.cold.size else t.warm.head, near = far
    while may_leave and gs.arena[arena].num_blank < n:
        while far != NO_NODE and nodes < min(count + IN_FLIGHT, lacking):
            kv_prefetch(&t.node[far])
            far = t.unit[far].next
            nodes += 1
        while near != NO_NODE and units < min(count + IN_FLIGHT // 2, lacking):
            near = fetch_unit(gs, near)
            units += 1
        count += 1
        may_leave = evict_next(gs, t.has_units[arena], t.has_checkpoints[arena])
    debug_assert(gs.arena[arena].num_blank >= n)        # else a block is taken behind the back of the tree


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t line_fingerprint(const Line* line, const Link* link, uint64_t h) noexcept nogil:
    cdef int32_t i = line.head
    while i != NO_NODE:
        h = mix(h, i)
        i = link[i].next
    return h


cdef uint64_t tree_fingerprint(const Tree* t, uint64_t h) noexcept nogil:
    cdef int32_t n
    cdef int64_t k
    h = mix(mix(mix(h, t.num_nodes), t.cold.size), t.warm.size)
    for n in range(t.fresh_node):
        if t.node[n].depth:
            h = mix(mix(mix(h, n), name_of(t, n).hash if t.node[n].name != NO_NAME else 0), t.node[n].users)
            if t.more != NULL:
                h = mix(h, t.more[n].below)
            for k in range(t.block_size):
                h = mix(h, t.tokens[n * t.block_size + k])
            for k in range(t.width):
                h = mix(h, <uint32_t>t.entry[<int64_t>n * t.stride + k])
    h = line_fingerprint(&t.cold, t.unit, h)
    h = line_fingerprint(&t.warm, t.unit, h)
    h = line_fingerprint(&t.listed[0], t.link, h)
    h = line_fingerprint(&t.listed[1], t.link, h)
    for n in range(t.fresh_checkpoint):
        h = mix(mix(h, t.checkpoint[n].position), <uint64_t>t.checkpoint[n].node)
    return names_fingerprint(&t.index.names, retention_fingerprint(t, mix(h, t.has_waiting)))


cdef void count_bundles(const Tree* t, int32_t* references) noexcept nogil:
    """References that loads and pending saves have on bundles."""
    cdef int32_t m, k, times
    for m in range(t.fresh_checkpoint):
        times = (t.checkpoint[m].loads > 0) + (t.checkpoint[m].step != 0)
        for k in range(t.bundle_size if t.checkpoint[m].position else 0):
            references[checkpoint_bundle(t, m)[k]] += times


cdef bint check_node(const Groups* gs, int32_t n, char* finding) noexcept nogil:
    cdef const Tree* t = gs.tree
    cdef const Node* node = &t.node[n]
    cdef const LayerGroup* g
    cdef int32_t k, first, idle = 0
    if node.parent != NO_NODE and (t.node[node.parent].depth != node.depth - 1):
        return found(finding, b"node %d has depth %d, the one above %d", n, node.depth, t.node[node.parent].depth)
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if not ends_at(g, node.depth):
            continue
        first = node_entry(t, n, k)[0]
        if first == NO_BLOCK:
            continue
        if not stands_for(t, g, k, first, n):
            return found(finding, b"block %d of arena %d is canonical at node %d, and stands for %d", first, g.arena, n,
                         t.stands[g.arena][first].node)
        if g.blocks.block[first].place == USED and unwritten(g.blocks, first):
            return found(finding, b"hits find block %d of arena %d, which a pending plan has to fill", first, g.arena)
        idle += g.kind == FULL_LAYERS and g.blocks.block[first].place == EVICTABLE
    if idle != node.idle or (node.place != NOWHERE) != (idle > 0):
        return found(finding, b"node %d has %d idle entries, counted %d, and place %d", n, node.idle, idle, node.place)
    if idle and (node.place == COLD) != (t.needs_checkpoints and t.more[n].below == 0):
        return found(finding, b"node %d with place %d is in the line of others", n, <int>node.place)
    return False


cdef bint check_users(const Groups* gs, int32_t* users, char* finding) noexcept nogil:
    """Who needs each node."""
    cdef const Tree* t = gs.tree
    cdef int32_t n, k, id, slot
    memset(users, 0, t.fresh_node * sizeof(int32_t))
    for n in range(t.fresh_node):
        if t.node[n].depth == 0:
            continue
        users[n] += t.more != NULL and t.more[n].checkpoint != NO_CHECKPOINT
        if t.node[n].parent != NO_NODE:
            users[t.node[n].parent] += 1
    for k in range(gs.num_arenas):
        for id in range(gs.arena[k].num_blocks):
            if 0 < t.stands[k][id].role <= 2 * MAX_GROUPS:
                users[t.stands[k][id].node] += 1
    for slot in range(gs.seqs.max_seqs):
        if seq_has_blocks(gs.seqs, slot) and t.row[slot].node != NO_NODE:
            users[t.row[slot].node] += 1
    for n in range(t.fresh_node):
        if users[n] != (t.node[n].users if t.node[n].depth else 0):
            return found(finding, b"node %d has %d users, it should have %d", n, t.node[n].users, users[n])
    return False


cdef bint check_below(const Tree* t, int32_t* sums, char* finding) noexcept nogil:
    """Checkpoints at each node and below it: its own and what its children say."""
    cdef int32_t n, checkpoints = 0
    memset(sums, 0, t.fresh_node * sizeof(int32_t))
    for n in range(t.fresh_node):
        if t.node[n].depth and t.node[n].parent != NO_NODE:
            sums[t.node[n].parent] += t.more[n].below
    for n in range(t.fresh_node):
        if t.node[n].depth == 0:
            continue
        sums[n] += t.more[n].checkpoint != NO_CHECKPOINT
        checkpoints += t.more[n].checkpoint != NO_CHECKPOINT
        if t.more[n].below != sums[n]:
            return found(finding, b"node %d has %d checkpoints at it or below, counted %d", n, t.more[n].below, sums[n])
    if checkpoints != t.num_checkpoints:
        return found(finding, b"counted %d published checkpoints, the counter says %d", checkpoints, t.num_checkpoints)
    return False


cdef bint check_tails(const Groups* gs, int32_t k, int32_t* needed, char* finding) noexcept nogil:
    """How many checkpoints need each entry of a window or chunk."""
    cdef const Tree* t = gs.tree
    cdef const LayerGroup* g = &gs.group[k]
    cdef int32_t m, n, first
    cdef int64_t index, low
    memset(needed, 0, t.fresh_node * sizeof(int32_t))
    for m in range(t.fresh_checkpoint):
        n = t.checkpoint[m].node if t.checkpoint[m].position else NO_NODE
        low = first_read(g, t.checkpoint[m].position)
        while n != NO_NODE and (g.kept or t.node[n].depth >> g.scale > low):
            index = (t.node[n].depth >> g.scale) - 1
            if ends_at(g, t.node[n].depth) and not g.kept <= index < low:
                needed[n] += 1
                first = node_entry(t, n, k)[0]
                if first != NO_BLOCK and not t.checkpoint[m].listed and g.blocks.block[first].place == EVICTABLE:
                    return found(finding, b"block %d of arena %d is evictable, checkpoint %d is not", first, g.arena, m)
            n = t.node[n].parent
    for n in range(t.fresh_node):
        if t.node[n].depth == 0 or not ends_at(g, t.node[n].depth):
            continue
        first = node_entry(t, n, k)[0]
        if (first != NO_BLOCK) != (needed[n] > 0) or (needed[n] and node_entry(t, n, k)[1] != needed[n]):
            return found(finding, b"node %d has entry %d of group %d for %d checkpoints, counted %d", n, first, k,
                         node_entry(t, n, k)[1], needed[n])
    return False


cdef bint check_line(const Line* line, const Link* link, int32_t room, const char* name, char* finding) noexcept nogil:
    cdef int32_t i = line.head, before = NO_NODE, count = 0
    while 0 <= i < room and count < line.size and link[i].prev == before:
        before = i
        i = link[i].next
        count += 1
    if i != NO_NODE or before != line.tail or count != line.size:
        return found(finding, b"the line of %s is broken at %d, behind %d of %d", name, i, count, line.size)
    return False


cdef bint check_unit_line(const Tree* t, const Line* line, int place, int32_t rank, int32_t* count,
                          char* finding) noexcept nogil:
    """The units of a line have its place, and its rank if they are ASIDE; all but cold ones are in order of use."""
    cdef int32_t n = line.head
    cdef int64_t last = 0
    if check_line(line, t.unit, t.fresh_node, b"units", finding):
        return True
    while (n != NO_NODE and t.node[n].depth and t.node[n].place == place and (place != ASIDE or t.node[n].rank == rank)
           and (place == COLD or t.more == NULL or t.more[n].stamp > last)):
        last = t.more[n].stamp if t.more != NULL else 0
        n = t.unit[n].next
    if n != NO_NODE:
        return found(finding, b"node %d with place %d is in a line that is not its own, or too early", n,
                     <int>t.node[n].place)
    count[0] += line.size
    return False


cdef bint check_units(const Tree* t, char* finding) noexcept nogil:
    """Each unit of which something is idle is in the line that its node says."""
    cdef int32_t n, k, count = 0
    if (check_unit_line(t, &t.cold, COLD, 0, &count, finding)
            or check_unit_line(t, &t.warm, WARM, 0, &count, finding)):
        return True
    for k in range(PRIORITIES if t.keeping != NULL else 0):
        if check_unit_line(t, &t.keeping.units[k], ASIDE, k, &count, finding):
            return True
    for n in range(t.fresh_node):
        count -= t.node[n].depth > 0 and t.node[n].place != NOWHERE
    if count:
        return found(finding, b"%d units are in no line", -count)
    return False


cdef bint check_found(const Tree* t, char* finding) noexcept nogil:
    """Every node that is not flushed is found by its tokens, and nothing else is."""
    cdef const Node* node
    cdef const int32_t* tokens
    cdef uint32_t at
    cdef int32_t n, count = 0, in_buckets = 0
    for n in range(t.fresh_node):
        node = &t.node[n]
        if node.depth == 0 or node.name == NO_NAME:
            continue
        count += 1
        tokens = t.tokens + n * t.block_size
        if node_find(t, node.name, node.parent, node.hash, tokens) != n or (
                node.parent != NO_NODE and node.hash != chain(t.index, t.node[node.parent].hash, tokens)):
            return found(finding, b"node %d cannot be found by its tokens", n)
    for at in range(t.num_buckets):
        n = t.bucket[at]
        while n != NO_NODE and in_buckets <= count:
            in_buckets += 1
            n = t.node[n].after
    if not in_buckets == count == t.num_nodes:
        return found(finding, b"counted %d nodes, %d in buckets, the counter says %d", count, in_buckets, t.num_nodes)
    return False


cdef bint check_kept(const Groups* gs, int32_t arena, char* finding) noexcept nogil:
    """What a committed block is for; each one that is EVICTABLE leaves when a unit or a checkpoint does."""
    cdef const Tree* t = gs.tree
    cdef const Blocks* b = gs.arena[arena]
    cdef int32_t id, k, left = b.num_evictable
    cdef int32_t role
    for id in range(b.num_blocks):
        role = t.stands[arena][id].role
        if role != NO_ROLE and not b.block[id].committed:
            return found(finding, b"block %d of arena %d has role %d, and is not committed", id, arena, <int>role)
        if b.block[id].place != EVICTABLE or role == LATER_COLUMN or role == BUNDLE:
            continue
        k = (role - 1) % MAX_GROUPS
        if role == NO_ROLE or is_waiting(role) or node_entry(t, t.stands[arena][id].node, k)[0] != id:
            return found(finding, b"block %d of arena %d is kept for nothing", id, arena)
        left -= gs.group[k].columns
    if arena == 0:
        left -= num_listed(t) * t.bundle_size
    if left:
        return found(finding, b"arena %d has %d evictable blocks more than entries and checkpoints", arena, left)
    return False


cdef bint check_names(const Groups* gs, char* finding) noexcept nogil:
    """Whether a namespace counts another number of users than it has. O(nodes + sequences + names)."""
    cdef const Tree* t = gs.tree
    cdef const Names* names = &t.index.names
    cdef int32_t i
    names_count_anew(names)
    for i in range(t.fresh_node):
        if t.node[i].depth and t.node[i].name >= 0 and names_count(names, t.node[i].name, finding):
            return True
    for i in range(gs.seqs.max_seqs):
        if (seq_has_blocks(gs.seqs, i) and gs.seqs.prefix[i].name != NULL
                and names_count(names, gs.seqs.prefix[i].name.slot, finding)):
            return True
    return names_check(names, finding)


cdef bint tree_check(const Groups* gs, int32_t* seen, char* finding) noexcept nogil:
    """The first invariant of the tree that does not hold, in words. O(nodes + blocks + windows).

    With a window that keeps its first tokens, O(checkpoints * depth). `seen`: room for a number a node or block.
    """
    cdef const Tree* t = gs.tree
    cdef int32_t n, k, slot
    if check_names(gs, finding) or check_found(t, finding) or check_users(gs, seen, finding):
        return True
    if t.needs_checkpoints and check_below(t, seen, finding):
        return True
    for n in range(t.fresh_node):
        if t.node[n].depth and check_node(gs, n, finding):
            return True
    for k in range(gs.num_groups):
        if gs.group[k].kind == WINDOW_LAYERS or gs.group[k].kind == CHUNK_LAYERS:
            if check_tails(gs, k, seen, finding):
                return True
    for k in range(gs.num_arenas):
        if check_kept(gs, k, finding):
            return True
    for slot in range(gs.seqs.max_seqs):
        if row_waits(gs, slot) and not t.has_waiting:
            return found(finding, b"sequence in slot %d waits to publish, and no plan will see it", slot)
    return check_units(t, finding) or check_checkpoints(gs, seen, finding) or check_retention(gs, seen, finding)
