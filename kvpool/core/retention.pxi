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

cdef void ends_free(Ends* e) noexcept nogil:
    if e != NULL:
        xfree(e.until)
        xfree(e.link)
        xfree(e)


cdef void ends_reset(Ends* e, int64_t room) noexcept nogil:
    cdef int32_t i
    memset(e.until, 0, room * sizeof(int64_t))
    for i in range(TIME_BITS):
        line_init(&e.bucket[i])


cdef Ends* ends_new(int64_t room) noexcept nogil:
    """NULL: no memory."""
    cdef Ends* e = <Ends*>xcalloc(1, sizeof(Ends))
    if e == NULL:
        return NULL
    e.until = <int64_t*>xcalloc(room, sizeof(int64_t))
    e.link = <Link*>xcalloc(room, sizeof(Link))
    if e.until == NULL or e.link == NULL:
        ends_free(e)
        return NULL
    ends_reset(e, room)
    return e


cdef void keeping_free(Tree* t) noexcept nogil:
    if t.keeping != NULL:
        xfree(t.keeping.node)
        ends_free(t.keeping.ends)
        xfree(t.keeping)
        t.keeping = NULL


cdef int keeping_init(Tree* t) noexcept nogil:
    if t.keeping != NULL:
        return OK
    t.keeping = <Keeping*>xcalloc(1, sizeof(Keeping))
    if t.keeping == NULL:
        return NO_MEMORY
    t.keeping.node = <NodeKept*>xcalloc(t.room, sizeof(NodeKept))
    t.keeping.ends = ends_new(t.room)
    if t.keeping.node == NULL or t.keeping.ends == NULL:
        keeping_free(t)
        return NO_MEMORY
    keeping_reset(t)
    return OK


cdef void keeping_reset(Tree* t) noexcept nogil:
    """Nothing is kept; the nodes are new when they are used."""
    cdef Keeping* k = t.keeping
    cdef int32_t i
    ends_reset(k.ends, t.room)
    for i in range(PRIORITIES):
        line_init(&k.units[i])
        line_init(&k.checkpoints[i])
    k.num_kept = k.num_checkpoints = 0


cdef int pins_init(Tree* t, int32_t max_seqs) noexcept nogil:
    if t.pins == NULL:
        t.pins = ends_new(max_seqs)
    return OK if t.pins != NULL else NO_MEMORY


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


cdef bint evict_warm(Groups* gs, bint has_units, bint has_checkpoints) noexcept nogil:
    """`evict_next` where no unit is cold: what is kept is set aside, and leaves when nothing else is left."""
    cdef Tree* t = gs.tree
    cdef int32_t m, n, rank
    if t.keeping != NULL and evict_aside(gs, 0, has_units, has_checkpoints):
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
    for rank in range(1, PRIORITIES if t.keeping != NULL else 0):
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

cdef inline Line* bucket_until(const Ends* e, int64_t now, int64_t until) noexcept nogil:
    """Where something stands that ends then, which is later than now."""
    cdef uint64_t differs = <uint64_t>(until ^ now) >> 1
    cdef int32_t bit = 0
    while differs:
        differs >>= 1
        bit += 1
    return <Line*>&e.bucket[bit]


cdef void ends_insert(Ends* e, int64_t now, int32_t i, int64_t until, int32_t before) noexcept nogil:
    """Something that stands in no bucket ends then; it gets behind `before`, NO_NODE: it is the last one."""
    cdef Line* line = bucket_until(e, now, until)
    e.until[i] = until
    line_insert(line, e.link, i, before if before != NO_NODE else line.tail)


cdef void ends_remove(Ends* e, int64_t now, int32_t i) noexcept nogil:
    line_remove(bucket_until(e, now, e.until[i]), e.link, i)
    e.until[i] = 0


cdef void directive_end_at(Tree* t, int32_t n, int64_t until, int64_t number, int32_t below) noexcept nogil:
    """A directive ends at a node, if none does that ends later; in its bucket behind that of the node `below`."""
    cdef NodeKept* kept = &t.keeping.node[n]
    cdef Ends* e = t.keeping.ends
    if e.until[n] > until or (e.until[n] == until and kept.number > number):
        return
    if e.until[n]:
        ends_remove(e, t.now, n)
    else:
        kept.reasons += 1
    kept.number = number
    ends_insert(e, t.now, n, until, below)


cdef void directive_over(Tree* t, int32_t n) noexcept nogil:
    ends_remove(t.keeping.ends, t.now, n)
    node_lose_reason(t, n)


cdef void node_let_go(Tree* t, int32_t n) noexcept nogil:
    """A kept node leaves its namespace, and so does the directive that ends there."""
    if t.keeping.ends.until[n]:
        directive_over(t, n)
    name_of(t, n).kept -= t.node[n].rank > 0


cdef void node_passes_on(Tree* t, int32_t n) noexcept nogil:
    """A kept node without users is about to be forgotten: its directive ends at the node above."""
    cdef int32_t parent = t.node[n].parent
    if parent != NO_NODE and t.node[parent].name != NO_NAME:
        directive_end_at(t, parent, t.keeping.ends.until[n], t.keeping.node[n].number, n)
    directive_over(t, n)


cdef void row_keep(Groups* gs, int32_t slot, const Directive* keep) noexcept nogil:
    """Keep what a row has committed, as far as the directive and the namespace allow."""
    cdef Tree* t = gs.tree
    cdef int64_t most = keep.tokens // t.block_size
    cdef int32_t n, above
    cdef const Name* name
    gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_KEEP), untagged(gs.seqs, gs.seqs.seq[slot].handle))
    gs.arena[0].digest = mix(mix(mix(gs.arena[0].digest, keep.priority), keep.ttl), keep.tokens)
    n = above = node_above(t, t.row[slot].node, most)
    while above != NO_NODE and t.node[above].rank == 0:
        above = t.node[above].parent
    if n == NO_NODE:
        return
    name = name_of(t, n)
    most = (t.node[above].depth if above != NO_NODE else 0) + max(name.most_kept - name.kept, <int64_t>0)
    n = node_above(t, n, most)
    t.keeping.number += 1
    if n != NO_NODE:
        directive_end_at(t, n, t.now + keep.ttl, t.keeping.number, NO_NODE)
    while n != NO_NODE and t.node[n].rank < keep.priority:
        node_set_rank(t, n, keep.priority)
        n = t.node[n].parent


# ---- the clock ---------------------------------------------------------------------------------------------

cdef void bucket_passes(Groups* gs, Ends* e, int32_t bit) noexcept nogil:
    """It is the earliest time that a bucket can have: what ends now is over, the others move down."""
    cdef Tree* t = gs.tree
    cdef int32_t i = e.bucket[bit].head, after
    cdef int64_t until
    line_init(&e.bucket[bit])
    while i != NO_NODE:
        after = e.link[i].next
        until = e.until[i]
        e.until[i] = 0
        if until > t.now:
            ends_insert(e, t.now, i, until, NO_NODE)
        elif e == t.pins:
            groups_close(gs, i)
        else:
            node_lose_reason(t, i)
        i = after


cdef void tree_tick(Groups* gs, int64_t now) noexcept nogil:
    """It is `now`, which is not earlier than before: end what is over. Amortised O(1) for each directive and pin.

    The clock stops at the earliest time that the first bucket can have, where all that it has ends or moves down.
    """
    cdef Tree* t = gs.tree
    cdef Ends* directives = t.keeping.ends if t.keeping != NULL else NULL
    cdef bint has_directives, has_pins
    cdef int32_t bit = 0 if directives != NULL or t.pins != NULL else TIME_BITS
    cdef int64_t begin
    while bit < TIME_BITS:
        has_directives = directives != NULL and directives.bucket[bit].size > 0
        has_pins = t.pins != NULL and t.pins.bucket[bit].size > 0
        if not has_directives and not has_pins:
            bit += 1
            continue
        begin = ((t.now >> bit) | 1) << bit
        if begin > now:
            break
        t.now = begin
        if has_directives:
            bucket_passes(gs, directives, bit)
        if has_pins:
            bucket_passes(gs, t.pins, bit)
        bit = 0
    t.now = now


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t retention_fingerprint(const Tree* t, uint64_t h) noexcept nogil:
    """`h` as it is, where nobody has told the time, kept anything, or pinned it for a time."""
    cdef const Keeping* k = t.keeping
    cdef int32_t i, n
    if t.now:
        h = mix(h, t.now)
    for n in range(t.fresh_node if k != NULL and k.num_kept else 0):
        if t.node[n].depth and t.node[n].rank:
            h = mix(mix(mix(h, n), t.node[n].rank), k.ends.until[n])
    for i in range(PRIORITIES if k != NULL and k.num_kept else 0):
        h = line_fingerprint(&k.checkpoints[i], t.link, line_fingerprint(&k.units[i], t.unit, h))
    for i in range(TIME_BITS if t.pins != NULL else 0):
        n = t.pins.bucket[i].head
        while n != NO_NODE:
            h = mix(mix(h, n), t.pins.until[n])
            n = t.pins.link[n].next
    return h


cdef bint check_kept_nodes(const Tree* t, int32_t* reasons, char* finding) noexcept nogil:
    """Why each node is kept, and how many are in all."""
    cdef const Keeping* k = t.keeping
    cdef int32_t n, count = 0
    memset(reasons, 0, t.fresh_node * sizeof(int32_t))
    for n in range(t.fresh_node):
        if t.node[n].depth and t.node[n].rank and t.node[n].parent != NO_NODE:
            reasons[t.node[n].parent] += 1
    for n in range(t.fresh_node):
        if t.node[n].depth == 0:
            continue
        reasons[n] += k.ends.until[n] > 0
        count += t.node[n].rank > 0
        if k.node[n].reasons != reasons[n] or (t.node[n].rank > 0) != (reasons[n] > 0) or (
                t.node[n].parent != NO_NODE and t.node[t.node[n].parent].rank < t.node[n].rank):
            return found(finding, b"node %d has priority %d for %d reasons, counted %d, or the one above has "
                         b"less", n, <int>t.node[n].rank, k.node[n].reasons, reasons[n])
    if count != k.num_kept:
        return found(finding, b"counted %d kept nodes, the counter says %d", count, k.num_kept)
    return False


cdef bint check_ends(const Ends* e, int64_t now, int32_t room, const Seqs* s, char* finding) noexcept nogil:
    """Each directive of a node, or pin of an open row (`s` not NULL), stands where its end, later than now, says."""
    cdef int32_t bit, i, listed = 0
    for bit in range(TIME_BITS):
        if check_line(&e.bucket[bit], e.link, room, b"ends", finding):
            return True
        listed += e.bucket[bit].size
        i = e.bucket[bit].head
        while i != NO_NODE:
            if (e.until[i] <= now or bucket_until(e, now, e.until[i]) != &e.bucket[bit]
                    or (s != NULL and s.life[i].life != OPEN)):
                return found(finding, b"node or slot %d, until %lld, is in bucket %d at %lld, or closed", i,
                             <long long>e.until[i], bit, <long long>now)
            i = e.link[i].next
    for i in range(room):
        listed -= e.until[i] != 0
    if listed:
        return found(finding, b"%d directives or pins stand in no bucket", -listed)
    return False


cdef bint check_retention(const Groups* gs, int32_t* seen, char* finding) noexcept nogil:
    """Directives and pins; `check_units` and `check_checkpoints` look at what was set aside."""
    cdef const Tree* t = gs.tree
    if t.keeping != NULL and (check_kept_nodes(t, seen, finding)
                              or check_ends(t.keeping.ends, t.now, t.fresh_node, NULL, finding)):
        return True
    return t.pins != NULL and check_ends(t.pins, t.now, gs.seqs.max_seqs, gs.seqs, finding)
