"""Retention: directives keep nodes, and what is to leave goes past them; pins with a ttl end. docs/prefix.md is the
contract.

Why it is so:

- A kept unit or checkpoint stands in line like any other. Only when it is its turn to leave it is *set aside*, in the
  line of its priority. So what is kept changes no order, an end costs nothing for what was not to leave yet, and what
  was set aside and is kept no longer leaves first: without the directive it would have left before.
- The priority of a node does not fall before the node is kept by nothing. So one count per node says when that is, and
  no parent has a lower priority than a node below it.
- A directive ends at one node, and those above are kept because of it. When that node is forgotten, the one above has
  the directive: blocks that left because nothing else was there do not let go of the rest of their prefix.
- One loop stops the clock for directives and for pins: so a tick is all ticks between the last one and it, in order.
"""


# ---- memory ------------------------------------------------------------------------------------------------

cdef void keeping_free(Tree* t) noexcept nogil:
    if t.keeping != NULL:
        xfree(t.keeping.node)
        xfree(t.keeping.link)
        xfree(t.keeping)
        t.keeping = NULL


cdef int keeping_init(Tree* t) noexcept nogil:
    if t.keeping != NULL:
        return OK
    t.keeping = <Keeping*>xcalloc(1, sizeof(Keeping))
    if t.keeping == NULL:
        return NO_MEMORY
    t.keeping.node = <NodeKept*>xcalloc(t.room, sizeof(NodeKept))
    t.keeping.link = <Link*>xcalloc(t.room, sizeof(Link))
    if t.keeping.node == NULL or t.keeping.link == NULL:
        keeping_free(t)
        return NO_MEMORY
    keeping_reset(t.keeping)
    return OK


cdef void keeping_reset(Keeping* k) noexcept nogil:
    """Nothing is kept; the nodes are new when they are used."""
    cdef int32_t i
    for i in range(TIME_BITS):
        line_init(&k.bucket[i])
    for i in range(PRIORITIES):
        line_init(&k.units[i])
        line_init(&k.checkpoints[i])
    k.num_kept = k.num_checkpoints = 0


# ---- what is set aside -------------------------------------------------------------------------------------

cdef void unit_set_aside(Tree* t, int32_t n) noexcept nogil:
    """The unit of a node, which is in no line, leaves as the last of those that were set aside with its priority."""
    cdef Line* line = &t.keeping.units[t.node[n].rank]
    t.keeping.turn += 1
    if t.more != NULL:
        t.more[n].stamp = t.keeping.turn
    line_insert(line, t.unit, n, line.tail)
    t.node[n].place = ASIDE


cdef void checkpoint_set_aside(Tree* t, int32_t m) noexcept nogil:
    """The same for a checkpoint that may leave."""
    cdef Line* line = &t.keeping.checkpoints[checkpoint_rank(t, m)]
    t.keeping.num_checkpoints += t.checkpoint[m].aside == 0
    t.keeping.turn += 1
    t.checkpoint[m].stamp = t.keeping.turn
    t.checkpoint[m].aside = True
    line_insert(line, t.link, m, line.tail)


cdef bint evict_aside(Groups* gs, int32_t rank, bint has_units, bint has_checkpoints) noexcept nogil:
    """Evict the first that was set aside with a priority. Returns whether there is one."""
    cdef Tree* t = gs.tree
    cdef int32_t n = t.keeping.units[rank].head if has_units else NO_NODE
    cdef int32_t m = t.keeping.checkpoints[rank].head if has_checkpoints else NO_CHECKPOINT
    if n != NO_NODE and (m == NO_CHECKPOINT or t.more[n].stamp < t.checkpoint[m].stamp):
        unit_evict(gs, n)
    elif m != NO_CHECKPOINT:
        checkpoint_evict(gs, m)
    else:
        return False
    return True


cdef bint evict_beside_kept(Groups* gs, bint has_units, bint has_checkpoints) noexcept nogil:
    """`evict_next` where no unit is cold: what is kept is set aside, and leaves when nothing else is left."""
    cdef Tree* t = gs.tree
    cdef int32_t m, n, rank
    if evict_aside(gs, 0, has_units, has_checkpoints):
        return True
    while True:
        m = oldest_checkpoint(t) if has_checkpoints else NO_CHECKPOINT
        if has_units and t.warm.size and warm_is_next(t, m):
            n = t.warm.head
            if t.node[n].rank == 0:
                unit_evict(gs, n)
                return True
            line_remove(&t.warm, t.unit, n)
            unit_set_aside(t, n)
        elif m == NO_CHECKPOINT:
            break
        elif checkpoint_rank(t, m) == 0:
            checkpoint_evict(gs, m)
            return True
        else:
            line_remove(line_of(t, m), t.link, m)
            checkpoint_set_aside(t, m)
    for rank in range(1, PRIORITIES):
        if evict_aside(gs, rank, has_units, has_checkpoints):
            return True
    return False


# ---- priorities --------------------------------------------------------------------------------------------

cdef void node_set_rank(Tree* t, int32_t n, int32_t rank) noexcept nogil:
    """Change the priority of a node, and tell its namespace and the node above whether it is kept. O(1)."""
    cdef Node* node = &t.node[n]
    cdef int32_t m = t.more[n].checkpoint if t.more != NULL else NO_CHECKPOINT
    cdef int32_t more = (rank > 0) - (node.rank > 0)
    cdef bint has_checkpoint = m != NO_CHECKPOINT and t.checkpoint[m].aside
    if node.place == ASIDE:
        line_remove(unit_line(t, n), t.unit, n)
    if has_checkpoint:
        line_remove(line_of(t, m), t.link, m)
    node.rank = <uint8_t>rank
    if node.place == ASIDE:
        unit_set_aside(t, n)
    if has_checkpoint:
        checkpoint_set_aside(t, m)
    t.keeping.num_kept += more
    if node.name != NO_NAME:
        name_of(t, n).kept += more
    if node.parent != NO_NODE:
        t.keeping.node[node.parent].reasons += more


cdef void node_lose_reason(Tree* t, int32_t n) noexcept nogil:
    """A directive is over that ends at a node: who is kept by nothing else has no priority."""
    t.keeping.node[n].reasons -= 1
    while n != NO_NODE and t.keeping.node[n].reasons == 0:
        node_set_rank(t, n, 0)
        n = t.node[n].parent


# ---- directives --------------------------------------------------------------------------------------------

cdef inline Line* bucket_until(Line* bucket, int64_t now, int64_t until) noexcept nogil:
    """Where a directive or a pin stands that ends then, which is later than now."""
    cdef uint64_t differs = <uint64_t>(until ^ now) >> 1
    cdef int32_t bit = 0
    while differs:
        differs >>= 1
        bit += 1
    return &bucket[bit]


cdef void directive_remove(Tree* t, int32_t n) noexcept nogil:
    line_remove(bucket_until(t.keeping.bucket, t.now, t.keeping.node[n].until), t.keeping.link, n)
    t.keeping.node[n].until = 0


cdef void directive_end_at(Tree* t, int32_t n, int64_t until, int64_t number, int32_t below) noexcept nogil:
    """A directive ends at a node, if none does that ends later; in its bucket behind that of the node `below`."""
    cdef NodeKept* kept = &t.keeping.node[n]
    cdef Line* line = bucket_until(t.keeping.bucket, t.now, until)
    if kept.until > until or (kept.until == until and kept.number > number):
        return
    if kept.until:
        directive_remove(t, n)
    else:
        kept.reasons += 1
    kept.until, kept.number = until, number
    line_insert(line, t.keeping.link, n, below if below != NO_NODE else line.tail)


cdef void node_let_go(Tree* t, int32_t n) noexcept nogil:
    """A kept node leaves its namespace, and so does the directive that ends there."""
    if t.keeping.node[n].until:
        directive_remove(t, n)
        node_lose_reason(t, n)
    name_of(t, n).kept -= t.node[n].rank > 0


cdef void node_passes_on(Tree* t, int32_t n) noexcept nogil:
    """A kept node without users is about to be forgotten: its directive ends at the node above."""
    cdef const NodeKept* kept = &t.keeping.node[n]
    cdef int32_t parent = t.node[n].parent
    if parent != NO_NODE and t.node[parent].name != NO_NAME:
        directive_end_at(t, parent, kept.until, kept.number, n)
    directive_remove(t, n)
    node_lose_reason(t, n)


cdef void row_keep(Groups* gs, int32_t slot, const Directive* keep) noexcept nogil:
    """Keep what a row has committed, as far as the directive and the namespace allow."""
    cdef Tree* t = gs.tree
    cdef int64_t most = keep.tokens // t.block_size
    cdef int32_t n = t.row[slot].node, above
    cdef const Name* name
    if keep.priority == 0:
        return
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_KEEP), untagged(gs.seqs, gs.seqs.seq[slot].handle))
    gs.arena[0].digest = mix(mix(mix(gs.arena[0].digest, keep.priority), keep.ttl), keep.tokens)
    while n != NO_NODE and t.node[n].depth > most:
        n = t.node[n].parent
    above = n
    while above != NO_NODE and t.node[above].rank == 0:
        above = t.node[above].parent
    if n == NO_NODE:
        return
    name = name_of(t, n)
    most = (t.node[above].depth if above != NO_NODE else 0) + max(name.most_kept - name.kept, <int64_t>0)
    while n != NO_NODE and t.node[n].depth > most:
        n = t.node[n].parent
    t.keeping.number += 1
    if n != NO_NODE:
        directive_end_at(t, n, t.now + keep.ttl, t.keeping.number, NO_NODE)
    while n != NO_NODE and t.node[n].rank < keep.priority:
        node_set_rank(t, n, keep.priority)
        n = t.node[n].parent


cdef void directives_end(Tree* t, int32_t bit) noexcept nogil:
    """It is the earliest time that a bucket can have: end the directives that end now, and let the others move down."""
    cdef Keeping* k = t.keeping
    cdef int32_t n = k.bucket[bit].head, after
    cdef Line* line
    line_init(&k.bucket[bit])
    while n != NO_NODE:
        after = k.link[n].next
        if k.node[n].until == t.now:
            k.node[n].until = 0
            node_lose_reason(t, n)
        else:
            line = bucket_until(k.bucket, t.now, k.node[n].until)
            line_insert(line, k.link, n, line.tail)
        n = after


# ---- pins --------------------------------------------------------------------------------------------------

cdef void pins_free(Tree* t) noexcept nogil:
    if t.pins != NULL:
        xfree(t.pins.until)
        xfree(t.pins.link)
        xfree(t.pins)
        t.pins = NULL


cdef int pins_init(Tree* t, int32_t max_seqs) noexcept nogil:
    if t.pins != NULL:
        return OK
    t.pins = <Pins*>xcalloc(1, sizeof(Pins))
    if t.pins == NULL:
        return NO_MEMORY
    t.pins.until = <int64_t*>xcalloc(max_seqs, sizeof(int64_t))
    t.pins.link = <Link*>xcalloc(max_seqs, sizeof(Link))
    if t.pins.until == NULL or t.pins.link == NULL:
        pins_free(t)
        return NO_MEMORY
    pins_reset(t.pins, max_seqs)
    return OK


cdef void pins_reset(Pins* p, int32_t max_seqs) noexcept nogil:
    cdef int32_t i
    memset(p.until, 0, max_seqs * sizeof(int64_t))
    for i in range(TIME_BITS):
        line_init(&p.bucket[i])


cdef void pin_until(Groups* gs, int32_t slot, int64_t ttl) noexcept nogil:
    cdef Tree* t = gs.tree
    cdef int64_t until = t.now + ttl
    cdef Line* line = bucket_until(t.pins.bucket, t.now, until)
    t.pins.until[slot] = until
    line_insert(line, t.pins.link, slot, line.tail)
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_PIN_TTL), ttl)


cdef void pin_closes(Tree* t, int32_t slot) noexcept nogil:
    if t.pins.until[slot]:
        line_remove(bucket_until(t.pins.bucket, t.now, t.pins.until[slot]), t.pins.link, slot)
        t.pins.until[slot] = 0


cdef void pins_end(Groups* gs, int32_t bit) noexcept nogil:
    """`directives_end` for pins: a row whose time is over is closed."""
    cdef Tree* t = gs.tree
    cdef Pins* p = t.pins
    cdef int32_t slot = p.bucket[bit].head, after
    cdef Line* line
    line_init(&p.bucket[bit])
    while slot != NO_NODE:
        after = p.link[slot].next
        if p.until[slot] == t.now:
            p.until[slot] = 0
            groups_close(gs, slot)
        else:
            line = bucket_until(p.bucket, t.now, p.until[slot])
            line_insert(line, p.link, slot, line.tail)
        slot = after


# ---- the clock ---------------------------------------------------------------------------------------------

cdef void tree_tick(Groups* gs, int64_t now) noexcept nogil:
    """It is `now`, which is not earlier than before: end what is over. Amortised O(1) for each directive and pin.

    The clock stops at the earliest time that the first bucket can have, where all that it has ends or moves down.
    """
    cdef Tree* t = gs.tree
    cdef const Line* directives = &t.keeping.bucket[0] if t.keeping != NULL else NULL
    cdef const Line* pins = &t.pins.bucket[0] if t.pins != NULL else NULL
    cdef bint has_directives, has_pins
    cdef int32_t bit = 0 if directives != NULL or pins != NULL else TIME_BITS
    cdef int64_t begin
    while bit < TIME_BITS:
        has_directives = directives != NULL and directives[bit].size > 0
        has_pins = pins != NULL and pins[bit].size > 0
        if not has_directives and not has_pins:
            bit += 1
            continue
        begin = ((t.now >> bit) | 1) << bit
        if begin > now:
            break
        t.now = begin
        if has_directives:
            directives_end(t, bit)
        if has_pins:
            pins_end(gs, bit)
        bit = 0
    t.now = now


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t keeping_fingerprint(const Tree* t, uint64_t h) noexcept nogil:
    """`h` as it is, where nobody has told the time or kept anything."""
    cdef int32_t n
    if t.now:
        h = mix(h, t.now)
    if t.keeping == NULL or t.keeping.num_kept == 0:
        return h
    for n in range(t.fresh_node):
        if t.node[n].depth and t.node[n].rank:
            h = mix(mix(mix(h, n), t.node[n].rank), t.keeping.node[n].until)
    for n in range(PRIORITIES):
        h = line_fingerprint(&t.keeping.checkpoints[n], t.link, line_fingerprint(&t.keeping.units[n], t.unit, h))
    return h


cdef bint check_kept_nodes(const Tree* t, int32_t* reasons, char* finding) noexcept nogil:
    """Why each node is kept, and how many are in all. `reasons` is zero for each node, and is again."""
    cdef const Keeping* k = t.keeping
    cdef int32_t n, due, count = 0
    for n in range(t.fresh_node):
        if t.node[n].depth and t.node[n].rank and t.node[n].parent != NO_NODE:
            reasons[t.node[n].parent] += 1
    for n in range(t.fresh_node):
        due = reasons[n]
        reasons[n] = 0
        if t.node[n].depth == 0:
            continue
        due += k.node[n].until > 0
        count += t.node[n].rank > 0
        if k.node[n].reasons != due or (t.node[n].rank > 0) != (due > 0) or (
                t.node[n].parent != NO_NODE and t.node[t.node[n].parent].rank < t.node[n].rank):
            return snprintf(finding, FINDING, b"node %d has priority %d for %d reasons, counted %d, or the one above "
                            b"has less", n, <int>t.node[n].rank, k.node[n].reasons, due) > 0
        if k.node[n].until and k.node[n].until <= t.now:
            return snprintf(finding, FINDING, b"node %d is kept until %lld, it is %lld", n,
                            <long long>k.node[n].until, <long long>t.now) > 0
    if count != k.num_kept:
        return snprintf(finding, FINDING, b"counted %d kept nodes, the counter says %d", count, k.num_kept) > 0
    return False


cdef bint check_keeping(const Tree* t, int32_t* seen, char* finding) noexcept nogil:
    """Directives, and what was set aside. `seen` is zero for each node, and is again."""
    cdef Keeping* k = t.keeping
    cdef int32_t i, n, m, units = 0, checkpoints = 0
    if k == NULL:
        return False
    if check_kept_nodes(t, seen, finding):
        return True
    for i in range(TIME_BITS):
        if check_line(&k.bucket[i], k.link, t.fresh_node, b"directives", finding):
            return True
        n = k.bucket[i].head
        while n != NO_NODE:
            if k.node[n].until == 0 or bucket_until(k.bucket, t.now, k.node[n].until) != &k.bucket[i]:
                return snprintf(finding, FINDING, b"node %d is in bucket %d until %lld", n, i,
                                <long long>k.node[n].until) > 0
            n = k.link[n].next
    for i in range(PRIORITIES):
        if (check_line(&k.units[i], t.unit, t.fresh_node, b"units set aside", finding)
                or check_line(&k.checkpoints[i], t.link, t.fresh_checkpoint, b"checkpoints set aside", finding)):
            return True
        n, m = k.units[i].head, k.checkpoints[i].head
        while n != NO_NODE and t.node[n].place == ASIDE and t.node[n].rank == i:
            n = t.unit[n].next
        while m != NO_CHECKPOINT and t.checkpoint[m].aside and checkpoint_rank(t, m) == i:
            m = t.link[m].next
        if n != NO_NODE or m != NO_CHECKPOINT:
            return snprintf(finding, FINDING, b"node %d, or checkpoint %d, is set aside with priority %d, not its own",
                            n, m, i) > 0
        units += k.units[i].size
        checkpoints += k.checkpoints[i].size
    for n in range(t.fresh_node):
        units -= (t.node[n].depth > 0) & (t.node[n].place == ASIDE)
    if units or checkpoints != k.num_checkpoints:
        return snprintf(finding, FINDING, b"%d units, or %d of %d checkpoints, are set aside in no line", -units,
                        checkpoints, k.num_checkpoints) > 0
    return False


cdef uint64_t pins_fingerprint(const Tree* t, uint64_t h) noexcept nogil:
    """`h` as it is, where no pin has a ttl."""
    cdef int32_t i, slot
    for i in range(TIME_BITS if t.pins != NULL else 0):
        slot = t.pins.bucket[i].head
        while slot != NO_NODE:
            h = mix(mix(h, slot), t.pins.until[slot])
            slot = t.pins.link[slot].next
    return h


cdef bint check_pins(const Groups* gs, char* finding) noexcept nogil:
    """Each pin with a ttl is open, and stands where its end, which is later than now, says."""
    cdef const Tree* t = gs.tree
    cdef Pins* p = t.pins
    cdef int32_t i, slot, listed = 0
    for i in range(TIME_BITS if p != NULL else 0):
        if check_line(&p.bucket[i], p.link, gs.seqs.max_seqs, b"pins", finding):
            return True
        listed += p.bucket[i].size
        slot = p.bucket[i].head
        while slot != NO_NODE:
            if (gs.seqs.life[slot].life != OPEN or p.until[slot] <= t.now
                    or bucket_until(p.bucket, t.now, p.until[slot]) != &p.bucket[i]):
                return snprintf(finding, FINDING, b"slot %d, a pin until %lld, is closed or in bucket %d at %lld", slot,
                                <long long>p.until[slot], i, <long long>t.now) > 0
            slot = p.link[slot].next
    for slot in range(gs.seqs.max_seqs if p != NULL else 0):
        listed -= p.until[slot] != 0
    if listed:
        return snprintf(finding, FINDING, b"%d pins with a ttl stand in no bucket", -listed) > 0
    return False
