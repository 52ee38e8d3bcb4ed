"""Another number of blocks, or of state slots, for a pool that goes on.

A resize comes between two steps, so limbo is empty, nobody holds a block, and no log names one: what has a place of
its own are blocks in use and cached ones. With `end` for the new size:

    num_blank >= num_blocks - end once what leaves first was evicted
    sources of moves == blocks >= end that are not blank
    destinations == the blank blocks < end that would be taken first

Why it is so:

- Memory is asked for first, and only where a pool grows. `realloc` keeps what is there, so a call that finds none has
  changed nothing that anybody can see.
- Blank blocks that a pool grows by are taken last, the lowest id first: so they are blank for as long as they can be,
  and the pool can become smaller again without a move.
- The tree keeps its room for nodes and checkpoints when a pool becomes smaller, because a node's number stands for a
  prefix and does not change.
- `mark` of a source is its destination: no call is running that could have marked it, and it is cut off at the end.
"""

cdef int regrow(void** memory, size_t size) noexcept nogil:
    cdef void* found = xrealloc(memory[0], size)
    if found == NULL:
        return NO_MEMORY
    memory[0] = found
    return OK


cdef int blocks_room(Blocks* b, int64_t n) noexcept nogil:
    if (regrow(<void**>&b.block, n * sizeof(Block)) or regrow(<void**>&b.floor, n * sizeof(int32_t))
            or regrow(<void**>&b.blank, n * sizeof(int32_t)) or regrow(<void**>&b.dropped, n * sizeof(int32_t))
            or regrow(<void**>&b.mark, n * sizeof(uint32_t))):
        return NO_MEMORY
    return OK


cdef int tree_fit(Groups* gs, int64_t nodes, int64_t checkpoints, const int32_t* blocks) noexcept nogil:
    """Memory for so many nodes, checkpoints, and blocks of each arena. After NO_MEMORY some may have grown."""
    cdef Tree* t = gs.tree
    cdef TreeArray[MOST_ARRAYS] arrays
    cdef int32_t k
    cdef int status = OK
    for k in range(tree_arrays(gs, nodes, checkpoints, blocks, arrays)):
        if regrow(arrays[k].memory, arrays[k].count * arrays[k].size) != OK:
            status = NO_MEMORY
    if t.keeping != NULL and (regrow(<void**>&t.keeping.node, nodes * sizeof(NodeKept))
                              or regrow(<void**>&t.keeping.ends.until, nodes * sizeof(int64_t))
                              or regrow(<void**>&t.keeping.ends.link, nodes * sizeof(Link))):
        status = NO_MEMORY
    if t.width <= 1:
        t.entry = &t.node[0].entry              # the nodes may lie elsewhere, also where other memory was missing
    return status


cdef int tree_room(Groups* gs, const int32_t* sizes) noexcept nogil:
    """Memory for what a tree over arenas of such sizes has, where that is more. Nodes and checkpoints stay."""
    cdef Tree* t = gs.tree
    cdef int64_t nodes = max(nodes_for(t, gs, sizes), <int64_t>t.room)
    cdef int64_t checkpoints = max(checkpoints_for(t, nodes, sizes), t.checkpoint_room)
    cdef int32_t[MAX_ARENAS] blocks
    cdef int32_t k
    cdef bint grows = nodes > t.room or checkpoints > t.checkpoint_room
    for k in range(gs.num_arenas):
        blocks[k] = max(sizes[k], gs.arena[k].num_blocks)
        grows |= sizes[k] > gs.arena[k].num_blocks
    if grows and tree_fit(gs, nodes, checkpoints, blocks) != OK:
        return NO_MEMORY
    t.checkpoint_room = <int32_t>checkpoints
    if nodes > t.room:
        t.room = <int32_t>nodes
        tree_rehash(t)
    return OK


cdef void tree_rehash(Tree* t) noexcept nogil:
    """Put all nodes that are found into as many buckets as `room` asks for."""
    cdef int32_t n
    t.num_buckets = <uint32_t>buckets_for(t.room)
    memset(t.bucket, 0xFF, t.num_buckets * sizeof(int32_t))
    for n in range(t.fresh_node):
        if t.node[n].depth and t.node[n].name != NO_NAME:
            bucket_add(t, n)


# ---- growing -----------------------------------------------------------------------------------------------

cdef void arena_grow(Groups* gs, int32_t arena, int32_t n) noexcept nogil:
    """So many blocks from now on: the fresh ones are blank. There is memory for them."""
    cdef Blocks* b = gs.arena[arena]
    cdef Tree* t = gs.tree
    cdef int32_t first = b.num_blocks, added = n - b.num_blocks, k
    memset(b.block + first, 0, added * sizeof(Block))
    memset(b.floor + first, 0, added * sizeof(int32_t))
    memset(b.mark + first, 0, added * sizeof(uint32_t))
    memmove(b.blank + added, b.blank, b.num_blank * sizeof(int32_t))
    for k in range(added):
        b.blank[k] = n - 1 - k
    b.num_blank += added
    b.num_blocks = n
    if t == NULL:
        return
    memset(t.stands[arena] + first, NO_ROLE, added * sizeof(Standing))
    if t.column_after[arena] != NULL:
        memset(t.column_after[arena] + first, 0, added * sizeof(int32_t))
    if t.state_group >= 0 and gs.group[t.state_group].arena == arena:
        memset(t.load + first, 0xFF, added * sizeof(int32_t))
        memset(t.load_step + first, 0, added * sizeof(int64_t))


# ---- shrinking ---------------------------------------------------------------------------------------------

cdef inline int32_t place_of(const Blocks* b, int32_t end, int32_t id) noexcept nogil:
    return <int32_t>b.mark[id] if id >= end else id


cdef void block_move(Blocks* b, int32_t id, int32_t to) noexcept nogil:
    """`to`, which was blank, is what block `id` was."""
    cdef Block* block = &b.block[to]
    block[0] = b.block[id]
    block.noted = 0
    if block.place == EVICTABLE and block.fence != SETTLED:
        if block.prev == NO_BLOCK:
            b.lru.head = to
        else:
            b.block[block.prev].next = to
        if block.next == NO_BLOCK:
            b.lru.tail = to
        else:
            b.block[block.next].prev = to


cdef int32_t blocks_move(Blocks* b, int32_t end, int32_t* moves) noexcept nogil:
    """Empty the blocks from `end` on; returns how many moves there are."""
    cdef int32_t id, to, k, kept = 0, count = 0
    for k in range(b.num_blank):
        if b.blank[k] < end:
            b.blank[kept] = b.blank[k]
            kept += 1
    for id in range(end, b.num_blocks):
        if b.block[id].place != BLANK:
            kept -= 1
            to = b.blank[kept]
            block_move(b, id, to)
            b.mark[id] = <uint32_t>to
            moves[2 * count] = id
            moves[2 * count + 1] = to
            count += 1
    b.num_blank = kept
    kept = 0
    for k in range(b.num_dropped):
        if b.dropped[k] < end and b.block[b.dropped[k]].noted:
            b.dropped[kept] = b.dropped[k]
            kept += 1
    b.num_dropped = kept
    return count


cdef void tables_move(Groups* gs, int32_t arena, int32_t end) noexcept nogil:
    """Rows name the blocks where they are now. O(entries)."""
    cdef LayerGroup* g
    cdef int32_t* ids
    cdef int32_t k, slot
    cdef int64_t i, size
    cdef bint changed
    for k in range(gs.num_groups):
        g = &gs.group[k]
        for slot in range(gs.seqs.max_seqs if g.arena == arena else 0):
            if not seq_has_blocks(gs.seqs, slot):
                continue
            ids = group_row(g, slot)
            size = <int64_t>entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns
            changed = False
            for i in range(size):
                if ids[i] >= end:
                    ids[i] = place_of(g.blocks, end, ids[i])
                    changed = True
            if changed:
                tail_of(g, slot).epoch += 1
                new_version(g, slot)
                tail_refresh(gs, g, slot, gs.seqs.seq[slot].num_tokens)


cdef inline bint has_columns(const Groups* gs, int32_t role) noexcept nogil:
    """Whether `column_after` of a block with such a role says anything."""
    return role == LATER_COLUMN or (0 < role <= 2 * MAX_GROUPS and gs.group[(role - 1) % MAX_GROUPS].columns > 1)


cdef void tree_move(Groups* gs, int32_t arena, int32_t end, const int32_t* moves, int32_t count) noexcept nogil:
    """What the tree knows of blocks that moved. O(blocks + blocks of checkpoints)."""
    cdef Tree* t = gs.tree
    cdef const Blocks* b = gs.arena[arena]
    cdef Standing* stands = t.stands[arena]
    cdef int32_t* column_after = t.column_after[arena]
    cdef int32_t* known
    cdef int32_t i, m, k, id, to
    cdef bint loads = t.state_group >= 0 and gs.group[t.state_group].arena == arena
    for i in range(count):
        id, to = moves[2 * i], moves[2 * i + 1]
        stands[to] = stands[id]
        if column_after != NULL:
            column_after[to] = column_after[id]
        if loads:
            t.load[to], t.load_step[to] = t.load[id], t.load_step[id]
        if 0 < stands[to].role <= 2 * MAX_GROUPS:
            known = node_entry(t, stands[to].node, (stands[to].role - 1) % MAX_GROUPS)
            if known[0] == id:
                known[0] = to
    for id in range(end if column_after != NULL else 0):
        if has_columns(gs, stands[id].role) and column_after[id] >= end:
            column_after[id] = place_of(b, end, column_after[id])
    for m in range(t.fresh_checkpoint if arena == 0 else 0):
        for k in range(t.bundle_size if t.checkpoint[m].position else 0):
            checkpoint_bundle(t, m)[k] = place_of(b, end, checkpoint_bundle(t, m)[k])


cdef int32_t arena_shrink(Groups* gs, int32_t arena, int32_t end, int32_t* moves) noexcept nogil:
    """So many blocks from now on; returns how many blocks moved. `judge_resize` has said that they fit."""
    cdef Blocks* b = gs.arena[arena]
    cdef int32_t count
    if gs.tree != NULL:
        tree_make_room(gs, arena, b.num_blocks - end)
    while b.num_blank < b.num_blocks - end:
        blocks_evict(b)
    count = blocks_move(b, end, moves)
    tables_move(gs, arena, end)
    if gs.tree != NULL:
        tree_move(gs, arena, end, moves, count)
    b.num_blocks = end
    blocks_room(b, end)                 # memory that cannot be given back stays
    return count


# ---- the call ----------------------------------------------------------------------------------------------

cdef int judge_arena(const State* pool, int32_t arena, int32_t size, Verdict* v) noexcept nogil:
    cdef const Groups* gs = pool.groups
    cdef const Blocks* b = gs.arena[arena]
    cdef int64_t least = 1, slots = 1
    cdef int32_t k, id
    if arena == 0:
        least = max(least, pool.seqs.watermark)
        if gs.tree != NULL:
            least = max(least, <int64_t>gs.tree.bundle_size)
    if size - b.reserved < least:
        return refused(v, TOO_FEW_BLOCKS, -1, size, b.reserved + least, 0, arena)
    for k in range(gs.num_groups):
        if gs.group[k].arena == arena and gs.group[k].kind != STATE_LAYERS:
            slots = max(slots, gs.group[k].block_size)
    if size > b.num_blocks and size * slots > INT32_MAX >= b.num_blocks * slots:
        return refused(v, TOO_MANY_SLOTS, -1, size, slots, INT32_MAX // slots, arena)
    if b.num_used > size - b.reserved:
        blocks_short(b, v, arena, -1, -1, b.num_used, b.num_used - (size - b.reserved))
        return v.reason
    for id in range(size, b.num_blocks):
        if b.block[id].raw:
            return refused(v, RAW_ABOVE, -1, id, 0, size, b.block[id].raw)
    return OK


cdef int judge_resize(const State* pool, const int32_t* sizes, const int32_t* room, Verdict* v) noexcept nogil:
    """`sizes`: blocks of each arena; `room`: moves of each that there is room for. RETRY: there may be more."""
    cdef const Groups* gs = pool.groups
    cdef int32_t k, slot, status
    if pool.pending.size:
        return refused(v, STEP_PENDING, -1, pool.blocks.newest_pending, 0, 0, 0)
    for slot in range(pool.seqs.max_seqs):
        if pool.seqs.life[slot].life == LOADING:
            return refused(v, LOADING_ROW, -1, seq_made(&pool.seqs, slot), 0, 0, 0)
    for k in range(gs.num_arenas):
        status = judge_arena(pool, k, sizes[k], v)
        if status != OK:
            return status
    for k in range(gs.num_arenas):
        if blocks_behind(gs.arena[k], sizes[k]) > room[k]:
            return RETRY
    return OK


cdef int32_t blocks_behind(const Blocks* b, int32_t end) noexcept nogil:
    """Blocks from `end` on that are not blank."""
    cdef int32_t id, count = 0
    for id in range(end, b.num_blocks):
        count += b.block[id].place != BLANK
    return count


cdef int pool_resize(State* pool, const int32_t* sizes, int32_t** moves, const int32_t* room, int32_t* counts,
                     Verdict* v) noexcept nogil:
    """All arenas, or none. `counts`: how many moves each has. RETRY: see `judge_resize`."""
    cdef Groups* gs = pool.groups
    cdef uint64_t digest
    cdef int32_t k, i, grown = 0
    cdef int status = judge_resize(pool, sizes, room, v)
    if status != OK:
        return status
    for k in range(gs.num_arenas):
        if sizes[k] > gs.arena[k].num_blocks:
            grown = k
            if blocks_room(gs.arena[k], sizes[k]) != OK:
                return refused(v, NO_MEMORY, -1, sizes[k], 0, 0, 0)
    if gs.tree != NULL and tree_room(gs, sizes) != OK:
        return refused(v, NO_MEMORY, -1, sizes[grown], 0, 0, 0)
    for k in range(gs.num_arenas):
        if sizes[k] > gs.arena[k].num_blocks:
            arena_grow(gs, k, sizes[k])
    digest = mix(pool.blocks.digest, OP_RESIZE)
    for k in range(gs.num_arenas):
        counts[k] = 0
        if sizes[k] < gs.arena[k].num_blocks:
            counts[k] = arena_shrink(gs, k, sizes[k], moves[k])
        pool.sizes[k] = sizes[k]
        digest = mix(digest, <uint64_t>sizes[k])
        for i in range(2 * counts[k]):
            digest = mix(digest, <uint64_t>moves[k][i])
    if gs.tree != NULL:
        tree_fit(gs, gs.tree.room, gs.tree.checkpoint_room, NULL)
    pool.blocks.digest = digest
    return OK


cdef dict read_sizes(object num_blocks, object arena, int32_t num_arenas):
    """The sizes that a call asks for: arena -> blocks."""
    wanted = {}
    for key, value in list((num_blocks if isinstance(num_blocks, dict) else {arena: num_blocks}).items()):
        number = to_int(key, "resize", "arena", 0, num_arenas - 1)
        wanted[number] = to_int(value, "resize", "num_blocks", 1, (<int64_t>1 << 31) - 1)
    return wanted
