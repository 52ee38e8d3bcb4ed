"""Rows in the prefix cache: they open over a hit, commit their tokens, wait for copies, and are flushed."""


# ---- hits --------------------------------------------------------------------------------------------------

cdef inline bint has_full(const Groups* gs, int32_t n, int64_t depth) noexcept nogil:
    """Whether a node has the entries of full groups that end there."""
    cdef const Tree* t = gs.tree
    cdef const LayerGroup* g
    cdef int32_t k, first
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == FULL_LAYERS and ends_at(g, depth):
            first = node_entry(t, n, k)[0]
            if first == NO_BLOCK:
                return False
            kv_prefetch(&g.blocks.block[first])
    return True


cdef inline Hit no_hit(uint64_t digest) noexcept nogil:
    cdef Hit hit
    hit.known = hit.nodes = 0
    hit.checkpoint = NO_CHECKPOINT
    hit.digest = digest
    return hit


cdef Hit tree_match(const Groups* gs, int32_t name, uint32_t root_hash, const int32_t* tokens,
                    int64_t most) noexcept nogil:
    """The longest hit of a prompt of which at most so many base blocks count; its path is in `path`.

    In passes, so that memory is fetched while others are looked at: hash, and fetch the buckets; fetch the candidates;
    prove, and fetch what a hit changes.
    """
    cdef const Tree* t = gs.tree
    cdef Hit hit = no_hit(root_hash)
    cdef uint32_t[IN_FLIGHT] hashes
    cdef uint32_t h = root_hash
    cdef int64_t bs = t.block_size, first = 0, size
    cdef int32_t n = NO_NODE, at, k, depth
    while hit.known == first < most:
        size = min(most - first, <int64_t>(IN_FLIGHT if first else RAMP))
        for k in range(size):
            hashes[k] = h = chain(t.index, h, tokens + (first + k) * bs)
            kv_prefetch(bucket_of(t, h))
        for k in range(size):
            at = bucket_of(t, hashes[k])[0]
            if at == NO_NODE:
                size = k + 1                # proved a miss: nothing behind it can hit
                break
            kv_prefetch(&t.node[at])
            kv_prefetch(t.tokens + at * bs)     # these may begin in one line and end in the next
            kv_prefetch(t.tokens + at * bs + bs - 1)
            kv_prefetch(&t.unit[at])
            if t.width > 1:
                kv_prefetch(t.entry + <int64_t>at * t.width)
        for k in range(size):
            n = node_find(t, name, n, hashes[k], tokens + hit.known * bs)
            if n == NO_NODE or not has_full(gs, n, hit.known + 1):
                break
            t.path[hit.known] = n
            hit.known += 1
        first += size
    hit.digest = h
    for depth in range(hit.known, 0, -1):
        n = t.path[depth - 1]
        if depth * bs % t.grain == 0 and (not t.needs_checkpoints or t.more[n].checkpoint != NO_CHECKPOINT):
            hit.nodes = depth
            hit.checkpoint = t.more[n].checkpoint if t.needs_checkpoints else NO_CHECKPOINT
            break
    return hit


cdef void count_own(const Groups* gs, const Hit* hit, int64_t* own) noexcept nogil:
    """Blocks of each arena that a hit takes out of what may leave."""
    cdef const Tree* t = gs.tree
    cdef const LayerGroup* g
    cdef int64_t index, low
    cdef int32_t k, first
    for k in range(gs.num_groups):
        g = &gs.group[k]
        low = first_read(g, hit.nodes * gs.block_size)
        for index in range(hit.nodes >> g.scale if g.kind != STATE_LAYERS else 0):
            if g.kept <= index < low:
                continue
            first = node_entry(t, t.path[((index + 1) << g.scale) - 1], k)[0]
            if g.blocks.block[first].place == EVICTABLE:
                own[g.arena] += g.columns
    if hit.checkpoint != NO_CHECKPOINT and t.checkpoint[hit.checkpoint].listed:
        own[0] += t.bundle_size


cdef int judge_load(const Groups* gs, int64_t length, Verdict* v) noexcept nogil:
    cdef const Tree* t = gs.tree
    if not t.needs_checkpoints:
        return OK
    if not t.can_restore:
        return refused(v, CANNOT_LOAD, -1, 0, 0, 0, 0)
    if length > INT32_MAX:                      # it ends with this length, which no plan steps
        return refused(v, PROMPT_TOO_LONG, -1, length, 0, INT32_MAX, 0)
    if length == 0 or length % t.grain:
        return refused(v, UNEVEN_LOAD, -1, length, 0, t.grain, 0)
    if (t.bundle_size and t.free_checkpoint == NO_CHECKPOINT and t.fresh_checkpoint == t.checkpoint_room
            and num_listed(t) == 0):
        return refused(v, NO_CHECKPOINTS, -1, 1, 0, t.checkpoint_room, 0)
    return OK


cdef inline int64_t let_go_by(const LayerGroup* g, int64_t length) noexcept nogil:
    """Entries that a row which begins with this length does without. A full group needs all of them."""
    return 0 if g.kind == FULL_LAYERS else max(first_read(g, length) - g.kept, <int64_t>0)


cdef int judge_open(Groups* gs, const Ints* tokens, const Hit* hit, bint reserve, bint load, int64_t* need,
                    Verdict* v) noexcept nogil:
    """Whether every arena has what a prompt needs beside its hit."""
    cdef const LayerGroup* g
    cdef int64_t[MAX_ARENAS] own
    cdef int64_t size = gs.block_size, total = blocks_for(gs, tokens.size if reserve else hit.nodes * size)
    cdef int64_t spare, short_by
    cdef int32_t k
    cdef bint is_counted = False
    memset(need, 0, MAX_ARENAS * sizeof(int64_t))
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind == STATE_LAYERS:
            need[g.arena] += hit.nodes > 0 or load
        else:
            need[g.arena] += (entries_for(g, total) - (hit.nodes >> g.scale)) * <int64_t>g.columns
            if load:
                need[g.arena] -= let_go_by(g, tokens.size) * g.columns
    if load and gs.tree != NULL:
        need[0] += gs.tree.bundle_size
    for k in range(gs.num_arenas):
        spare = gs.seqs.watermark if k == 0 else 0
        if need[k] == 0 or need[k] + spare <= gs.arena[k].num_blank:
            continue                            # whatever the hit takes
        if not is_counted:
            memset(own, 0, sizeof(own))
            count_own(gs, hit, own)
            is_counted = True
        short_by = need[k] + spare - (blocks_available(gs.arena[k]) - own[k])
        if short_by > 0:
            blocks_short(gs.arena[k], v, k, -1, -1, need[k], short_by)
            v.evictable -= own[k]
            v.value, v.other, v.low = tokens.size, hit.nodes * size, spare
            return v.reason
    return OK


cdef void open_group(Groups* gs, int32_t k, int32_t slot, const Hit* hit) noexcept nogil:
    """A row gets what is found of it, in a group of entries."""
    cdef LayerGroup* g = &gs.group[k]
    cdef int32_t* row = group_row(g, slot)
    cdef int64_t entries = hit.nodes >> g.scale, kept = min(<int64_t>g.kept, entries), i
    cdef int64_t low = first_read(g, hit.nodes * gs.block_size)
    share_entries(gs.tree, g, k, row, 0, kept)
    for i in range(kept * g.columns, low * g.columns):
        row[i] = g.hole
    share_entries(gs.tree, g, k, row, max(kept, low), entries)
    set_gone(g, slot, <int32_t>low if low > kept else 0)


cdef void take_entries(LayerGroup* g, int32_t slot, int32_t have, int32_t entries, int64_t length) noexcept nogil:
    """Entries of a row behind the first `have`. `length` > 0: it has none and begins there, with what a query reads."""
    cdef int32_t* row = group_row(g, slot)
    cdef int64_t i, gone = g.kept + let_go_by(g, length)
    if gone > g.kept:
        blocks_take_many(g.blocks, row, g.kept * g.columns)
        for i in range(g.kept * g.columns, gone * g.columns):
            row[i] = g.hole
        set_gone(g, slot, <int32_t>gone)
        have = <int32_t>gone
    blocks_take_many(g.blocks, row + <int64_t>have * g.columns, (entries - have) * g.columns)


cdef int32_t open_row(Groups* gs, const Ints* tokens, const Hit* hit, const int64_t* need, bint reserve, bint take,
                      bint load) noexcept nogil:
    """A new sequence over a hit. `reserve`: with entries for the rest of the prompt; `take`: the hit counts."""
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef LayerGroup* g
    cdef int64_t blocks = blocks_for(gs, tokens.size if reserve and gs.has_entries else hit.nodes * gs.block_size)
    cdef int32_t k, restored = -1, slot = seq_new(s)
    if t != NULL:                       # what is found first: room must not be made of it
        t.row[slot].node = t.path[hit.nodes - 1] if hit.nodes else NO_NODE
        if hit.nodes:
            t.node[t.row[slot].node].users += 1
    for k in range(gs.num_groups):
        row_begin(&gs.group[k], slot)
        if hit.nodes and gs.group[k].kind != STATE_LAYERS:
            open_group(gs, k, slot, hit)
    if hit.checkpoint != NO_CHECKPOINT:
        restored = t.state_group
        if take:
            checkpoint_use(t, hit.checkpoint)
        if restored >= 0:
            blocks_take_many(gs.group[restored].blocks, group_row(&gs.group[restored], slot), 1)
            begin_load(gs, slot, hit.checkpoint)
        checkpoint_refresh(t, hit.checkpoint)
    for k in range(gs.num_arenas if t != NULL else 0):
        if need[k] and (t.has_units[k] or t.has_checkpoints[k]):    # the row may have its slot of an arena of states
            tree_make_room(gs, k, need[k])
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if g.kind != STATE_LAYERS:
            take_entries(g, slot, hit.nodes >> g.scale, entries_of(g, slot, blocks), tokens.size if load else 0)
        elif load or (hit.nodes and k != restored):
            blocks_take_many(g.blocks, group_row(g, slot), 1)
    set_size(gs, slot, blocks, hit.nodes * gs.block_size)
    return slot


# ---- rows --------------------------------------------------------------------------------------------------

cdef void row_parts(Groups* gs, int32_t slot) noexcept nogil:
    cdef Tree* t = gs.tree
    if t.row[slot].node != NO_NODE:
        node_release(t, t.row[slot].node)
    t.row[slot].node = NO_NODE


cdef void tree_close(Groups* gs, int32_t slot) noexcept nogil:
    """A sequence, whose blocks are released, is closed; what it has not loaded nobody will."""
    cdef Tree* t = gs.tree
    drop_taken(gs, slot, 0, -1)
    row_parts(gs, slot)
    if seldom(t.pins != NULL) and t.pins.until[slot]:
        ends_remove(t.pins, t.now, slot)
    if t.num_loads and gs.group[t.state_group].table[slot] != NO_BLOCK:
        end_idle_load(gs, gs.group[t.state_group].table[slot])


cdef void row_ends(Groups* gs, int32_t slot) noexcept nogil:
    """A row goes on without the tree."""
    drop_taken(gs, slot, 0, -1)
    row_parts(gs, slot)
    seq_leave_name(gs.seqs, slot)
    gs.tree.row[slot].cut = 0


cdef void tree_fork(Groups* gs, int32_t parent, int32_t child) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef const Seqs* s = gs.seqs
    cdef int64_t bs = gs.block_size
    cdef int32_t j
    s.prefix[child] = s.prefix[parent]
    if s.prefix[child].name != NULL:
        s.prefix[child].name.users += 1
    s.prefix[child].done = seq_done(s, gs.arena[0], parent)
    s.prefix[child].forked_at = s.seq[parent].num_tokens
    memcpy(s.partial + child * bs, s.partial + parent * bs, (s.prefix[parent].committed % bs) * sizeof(int32_t))
    t.row[child] = t.row[parent]
    for j in range(MOST_TAKEN):
        t.row[child].taken[j] = NO_CHECKPOINT
    if t.row[child].node != NO_NODE:
        t.node[t.row[child].node].users += 1


cdef void tree_truncate(Groups* gs, int32_t slot, int64_t length) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef SeqPrefix* prefix = &gs.seqs.prefix[slot]
    cdef int64_t bs = gs.block_size
    cdef int32_t n = node_above(t, t.row[slot].node, length // bs + 1)
    drop_taken(gs, slot, 0, length)
    if length < prefix.committed:
        if n != NO_NODE and t.node[n].depth > length // bs:     # a full block becomes the tail
            memcpy(gs.seqs.partial + slot * bs, t.tokens + n * bs, (length % bs) * sizeof(int32_t))
            n = t.node[n].parent
        if n != NO_NODE:
            t.node[n].users += 1
        row_parts(gs, slot)
        t.row[slot].node = n
        prefix.committed = length
    prefix.published = min(prefix.published, length // bs)
    prefix.done = min(prefix.done, length)
    prefix.forked_at = min(prefix.forked_at, length)


# ---- commit ------------------------------------------------------------------------------------------------

cdef inline const int32_t* block_tokens(Tree* t, const Seqs* s, int32_t slot, int64_t depth,
                                        const int32_t* tokens) noexcept nogil:
    """The tokens of base block `depth` - 1 of a row that commits `tokens`."""
    cdef int64_t bs = t.block_size, told = s.prefix[slot].committed, start = (depth - 1) * bs - told
    if start >= 0:
        return tokens + start
    memcpy(t.scratch, s.partial + slot * bs, (told % bs) * sizeof(int32_t))
    memcpy(t.scratch + told % bs, tokens, (bs - told % bs) * sizeof(int32_t))
    return t.scratch


cdef int32_t token_at(const Tree* t, const Seqs* s, int32_t slot, const int32_t* tokens,
                      int64_t position) noexcept nogil:
    """A token of a row that commits `tokens`, -1: nobody knows it."""
    cdef int64_t bs = t.block_size, told = s.prefix[slot].committed
    cdef int32_t n
    if position >= told:
        return tokens[position - told]
    if position >= told // bs * bs:
        return s.partial[slot * bs + position % bs]
    n = node_above(t, t.row[slot].node, position // bs + 1)
    return t.tokens[n * bs + position % bs] if n != NO_NODE else -1


cdef int64_t same_nodes(const Tree* t, const Seqs* s, int32_t other, int32_t slot) noexcept nogil:
    """Positions that two rows have both committed, -1: they say different things of these. A flushed row says none."""
    cdef int64_t depth = min(s.prefix[other].committed, s.prefix[slot].committed) // t.block_size
    cdef int32_t one = node_above(t, t.row[other].node, depth), two = node_above(t, t.row[slot].node, depth)
    return -1 if one != two and one != NO_NODE and two != NO_NODE else depth * t.block_size


cdef bint same_tokens(const Tree* t, const Seqs* s, const Ints* rows, const Ints* counts, const int32_t* all_tokens,
                      int32_t earlier, int32_t slot, const int32_t* tokens, int64_t first, int64_t end) noexcept nogil:
    """Whether an earlier row of the call says the same of the positions `first` .. `end` - 1, where both know."""
    cdef int32_t other = slot_of(ints_at(rows, earlier)), row, one, two
    cdef int64_t position
    for row in range(earlier):
        all_tokens += ints_at(counts, row)
    for position in range(first, end):
        one = token_at(t, s, other, all_tokens, position)
        two = token_at(t, s, slot, tokens, position)
        if one != two and one >= 0 and two >= 0:
            return False
    return True


cdef int judge_tokens(Groups* gs, const Ints* rows, const Ints* counts, const int32_t* all_tokens, int32_t row,
                      int64_t at, Verdict* v) noexcept nogil:
    """Row `row` of a commit, whose tokens are those from `at` on, must not contradict what entries stand for.

    Nor what an earlier row says of the tokens up to the end of an entry that both fill.
    """
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef int32_t slot = slot_of(ints_at(rows, row)), n = t.row[slot].node, k, id, earlier = -1
    cdef const int32_t* tokens = all_tokens + at
    cdef const int32_t* block
    cdef int64_t bs = t.block_size, told = s.prefix[slot].committed, depth, index, end, same = 0
    cdef int64_t found = told // bs                 # base blocks that n is the node of, as long as there is one
    cdef uint32_t h = t.node[n].hash if n != NO_NODE else s.prefix[slot].root_hash
    cdef const Name* name = s.prefix[slot].name
    cdef LayerGroup* g
    for depth in range(told // bs + 1, (told + ints_at(counts, row)) // bs + 1):
        for k in range(gs.num_groups):
            g = &gs.group[k]
            if not ends_at(g, depth):
                continue
            index = (depth >> g.scale) - 1
            if g.kept <= index < g.seq[slot].gone:
                continue
            id = group_row(g, slot)[index * g.columns]
            if t.stands[g.arena][id].role != NO_ROLE:
                while name != NULL and found < depth and (n != NO_NODE or found == told // bs):
                    found += 1
                    block = block_tokens(t, s, slot, found, tokens)
                    h = chain(t.index, h, block)
                    n = node_find(t, name.slot, n, h, block)
                if name != NULL and t.stands[g.arena][id].node != n:
                    return refused(v, OTHER_TOKENS, row, id, 0, 0, 0)
            elif g.blocks.mark[id] == g.blocks.stamp:
                if t.stands[g.arena][id].node != earlier:
                    earlier = t.stands[g.arena][id].node
                    same = same_nodes(t, s, slot_of(ints_at(rows, earlier)), slot)
                end = (index + 1) * g.block_size
                if same < 0 or not same_tokens(t, s, rows, counts, all_tokens, earlier, slot, tokens, same, end):
                    return refused(v, OTHER_TOKENS, row, id, 0, 0, 0)
                same = max(same, end)
            elif g.blocks.block[id].refcount > 1:
                g.blocks.mark[id] = g.blocks.stamp
                t.stands[g.arena][id].node = row         # of no meaning before the entry is committed
    return OK


cdef void commit_block(Groups* gs, int32_t slot, int64_t depth, uint32_t h, const int32_t* block) noexcept nogil:
    """Base block `depth` - 1 of a row is full and known: it becomes a node, and its entries stand for it."""
    cdef Tree* t = gs.tree
    cdef SeqPrefix* prefix = &gs.seqs.prefix[slot]
    cdef int32_t above = t.row[slot].node, n, k
    cdef bint waits = prefix.published < depth - 1 or gs.arena[0].oldest_pending and held_back(gs, slot, depth, True)
    cdef LayerGroup* g
    cdef const int32_t* ids
    cdef int64_t index
    n = node_find(t, prefix.name.slot, above, h, block)
    if n != NO_NODE:
        t.node[n].users += 1
    else:
        n = node_new(gs, prefix.name, above, h, block)
    if n == NO_NODE:                        # no room: the row goes on without the tree
        row_ends(gs, slot)
        return
    if above != NO_NODE:
        node_release(t, above)
    t.row[slot].node = n
    for k in range(gs.num_groups):
        g = &gs.group[k]
        if not ends_at(g, depth):
            continue
        index = (depth >> g.scale) - 1
        ids = group_row(g, slot) + index * g.columns
        if g.kept <= index < g.seq[slot].gone:
            continue
        if t.stands[g.arena][ids[0]].role == NO_ROLE:
            entry_commit(t, g, k, ids, n)
        if not waits:
            entry_admit(t, g, k, ids[0])
    if waits:
        t.has_waiting = True
    else:
        published(gs, slot, depth, n)


cdef inline int32_t full_entry(const LayerGroup* g, int32_t slot, int64_t depth) noexcept nogil:
    """The first block of what a row has of a full group that ends with base block `depth` - 1, NO_BLOCK: no entry."""
    if g.kind != FULL_LAYERS or not ends_at(g, depth):
        return NO_BLOCK
    return group_row(g, slot)[((depth >> g.scale) - 1) * g.columns]


cdef bint held_back(const Groups* gs, int32_t slot, int64_t depth, bint commits) noexcept nogil:
    """Whether what a row has at its base block `depth` - 1 goes on to wait.

    A pending plan has to copy an entry of a full group; or one has no role, unless the row commits it now. That is a
    copy that was made after its tokens were committed, or what a rollback put back: nobody said what it holds.
    """
    cdef const LayerGroup* g
    cdef int32_t k, first
    for k in range(gs.num_groups):
        g = &gs.group[k]
        first = full_entry(g, slot, depth)
        if first != NO_BLOCK and (unwritten(g.blocks, first) or (
                not commits and gs.tree.stands[g.arena][first].role == NO_ROLE)):
            return True
    return False


cdef inline void published(Groups* gs, int32_t slot, int64_t depth, int32_t n) noexcept nogil:
    """Hits may find what a row has at the node of its base block `depth` - 1, and all before it."""
    gs.seqs.prefix[slot].published = depth
    if gs.tree.needs_checkpoints:
        publish_checkpoint(gs, slot, n, depth * gs.block_size)


cdef void publish_row(Groups* gs, int32_t slot) noexcept nogil:
    """Publish what waits in a row, in order, as far as its content exists: of a node all of it, or none."""
    cdef Tree* t = gs.tree
    cdef const SeqPrefix* prefix = &gs.seqs.prefix[slot]
    cdef int64_t depth = prefix.committed // t.block_size, full = depth
    cdef int32_t n = t.row[slot].node, k, first
    while depth > prefix.published:
        t.path[depth - 1] = n
        n = t.node[n].parent
        depth -= 1
    for depth in range(depth + 1, full + 1):
        if held_back(gs, slot, depth, False):
            t.has_waiting = True
            return
        for k in range(gs.num_groups):
            first = full_entry(&gs.group[k], slot, depth)
            if first != NO_BLOCK:
                entry_admit(t, &gs.group[k], k, first)
        published(gs, slot, depth, t.path[depth - 1])


cdef void tree_publish(Groups* gs) noexcept nogil:
    """A plan has ended: rows that waited for it go on. O(max_seqs), where a row waits."""
    cdef int32_t slot
    if not gs.tree.has_waiting:
        return
    gs.tree.has_waiting = False                 # `publish_row` finds those that still do
    for slot in range(gs.seqs.max_seqs):
        if row_waits(gs, slot):
            publish_row(gs, slot)


cdef void tree_commit_row(Groups* gs, int32_t slot, const int32_t* tokens, int64_t count) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef SeqPrefix* prefix = &s.prefix[slot]
    cdef int64_t bs = t.block_size, told = prefix.committed, depth = told // bs, end = (told + count) // bs, tail
    cdef int32_t n = t.row[slot].node, k, size
    cdef uint32_t[IN_FLIGHT] hashes
    cdef uint32_t h = t.node[n].hash if n != NO_NODE else prefix.root_hash
    cdef uint64_t digest = mix(mix(gs.arena[0].digest, OP_COMMIT), untagged(s, s.seq[slot].handle))
    if row_waits(gs, slot):
        publish_row(gs, slot)
    while depth < end and prefix.name != NULL:
        size = <int32_t>min(end - depth, <int64_t>IN_FLIGHT)
        for k in range(size):
            hashes[k] = h = chain(t.index, h, block_tokens(t, s, slot, depth + k + 1, tokens))
            kv_prefetch(bucket_of(t, h))
        for k in range(size):
            n = bucket_of(t, hashes[k])[0]
            if n != NO_NODE:
                kv_prefetch(&t.node[n])
        for k in range(size):
            depth += 1
            if prefix.name != NULL:
                commit_block(gs, slot, depth, hashes[k], block_tokens(t, s, slot, depth, tokens))
    tail = min((told + count) % bs, count)      # of the last block, which is not full, those that are new
    memcpy(s.partial + slot * bs + (told + count) % bs - tail, tokens + count - tail, tail * sizeof(int32_t))
    prefix.committed = told + count
    if prefix.name == NULL:                     # else the hash of the last full block has all before the tail
        digest = mix_tokens(digest, tokens, count)
    gs.arena[0].digest = mix_tokens(mix(mix(digest, h), count), tokens + count - tail, tail)


# ---- flush -------------------------------------------------------------------------------------------------

cdef inline bint row_is_of(const Seqs* s, int32_t slot, const Name* name) noexcept nogil:
    """Whether a row is in a namespace, NULL: in any."""
    return s.prefix[slot].name != NULL and (name == NULL or s.prefix[slot].name == name)


cdef inline bint is_of(const Tree* t, int32_t n, const Name* name) noexcept nogil:
    """Whether a node is in use and in a namespace, NULL: in any."""
    return t.node[n].depth > 0 and t.node[n].name != NO_NAME and (name == NULL or t.node[n].name == name.slot)


cdef void tree_flush(Groups* gs, const Name* name) noexcept nogil:
    """Forget every node of a namespace, NULL: all; rows go on without the tree. O(nodes + sequences)."""
    cdef Tree* t = gs.tree
    cdef Seqs* s = gs.seqs
    cdef int32_t n, slot
    for slot in range(s.max_seqs):
        if not seq_has_blocks(s, slot) or not row_is_of(s, slot, name):
            continue
        if s.life[slot].life == OPEN:
            row_ends(gs, slot)
        else:                           # its bundle stays: somebody writes there
            row_parts(gs, slot)
            seq_leave_name(s, slot)
    for n in range(t.fresh_node):
        if is_of(t, n, name):
            node_empty(gs, n, True)
    if name == NULL:
        ring_add(&t.index.ring, CLEARED, NULL, NULL, NULL, NULL, 0, -1)


cdef int32_t tree_evictable(const Groups* gs, const Name* name) noexcept nogil:
    """Blocks that a flush of a namespace makes blank, NULL: of all. O(blocks)."""
    cdef const Tree* t = gs.tree
    cdef int32_t k, id, n, m, found = 0
    for k in range(gs.num_arenas):
        for id in range(gs.arena[k].num_blocks):
            if gs.arena[k].block[id].place != EVICTABLE:
                continue
            n = m = t.stands[k][id].node
            if t.stands[k][id].role == BUNDLE:
                n = t.checkpoint[m].node
            found += is_of(t, n, name) if n != NO_NODE else row_is_of(gs.seqs, t.checkpoint[m].row, name)
    return found
