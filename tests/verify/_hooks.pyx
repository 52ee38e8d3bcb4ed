"""What tests change inside a pool: a word that `check` must find wrong, counters that take years to grow, the lock."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvpool._core cimport (
    FREE_SLOT, WINDOW_LAYERS, Blocks, Groups, LayerGroup, Pool, Seqs, Tree, checkpoint_bundle, group_row,
    lock_release, lock_try, tail_of,
)

OF_CHECKPOINTS = ("line", "stamp", "position", "step", "slot_loads", "row", "bundle", "may_leave")
OF_ROWS = (
    "published", "committed_tokens", "table", "blocks", "length", "next_slot", "tail", "stop_slot", "free_slot", "gone",
    "due", "evicted", "point", "life", "handle", "pin_until",
)


def set_generation(Pool pool, int32_t slot, int64_t generation):
    """The generation that the next sequence in a free slot gets."""
    cdef int64_t after = generation - pool.state.seqs.first_generation
    assert 0 <= slot < pool.state.seqs.max_seqs and pool.state.seqs.life[slot].life == FREE_SLOT
    assert 0 <= after and generation < 1 << 32
    pool.state.seqs.life[slot].generation = <uint32_t>after


def set_stamps(Pool pool, uint32_t stamp):
    """What the next calls mark rows and blocks with is one more."""
    pool.state.seqs.stamp = pool.state.blocks.stamp = stamp


def take_lock(Pool pool):
    """Whether the lock of a pool was free: it is no longer."""
    return lock_try(&pool.state.mutex)


def release_lock(Pool pool):
    """End what `take_lock` began."""
    lock_release(&pool.state.mutex)


def corrupt(Pool pool, str what, int32_t index, int32_t by=1):
    """Add `by` to one word, of rows in the last group; returns what it was. `index`: block, slot, node, checkpoint.

    "" returns the names of the words.
    """
    cdef Blocks* b = &pool.state.blocks
    cdef Seqs* s = &pool.state.seqs
    cdef const LayerGroup* last = &pool.state.groups.group[pool.state.groups.num_groups - 1]
    cdef int32_t i = index
    cdef int64_t room = s.max_seqs if what in OF_ROWS else b.num_blocks
    if pool.state.groups.tree != NULL and what in OF_CHECKPOINTS:
        room = pool.state.groups.tree.checkpoint_room
    assert 0 <= i < room
    cdef dict fields = {
        "refcount": <size_t>&b.block[i].refcount, "raw": <size_t>&b.block[i].raw,
        "hold": <size_t>&b.block[i].hold, "floor": <size_t>&b.floor[i], "blank": <size_t>&b.blank[i],
        "next": <size_t>&b.block[i].next, "prev": <size_t>&b.block[i].prev, "num_blank": <size_t>&b.num_blank,
        "num_used": <size_t>&b.num_used, "num_shared": <size_t>&b.num_shared, "lru": <size_t>&b.lru.size,
        "limbo": <size_t>&b.limbo.size, "num_dropped": <size_t>&b.num_dropped,
        "blocks": <size_t>&s.seq[i].num_blocks, "length": <size_t>&s.seq[i].num_tokens,
        "next_slot": <size_t>&tail_of(last, i).next_slot, "tail": <size_t>&tail_of(last, i).block,
        "stop_slot": <size_t>&tail_of(last, i).stop_slot,
        "sum_tokens": <size_t>&s.sum_tokens, "sum_blocks": <size_t>&s.sum_blocks,
        "num_open": <size_t>&s.num_open, "free_slot": <size_t>&s.free_slot[i],
        "table": <size_t>group_row(last, i), "gone": <size_t>&last.seq[i].gone, "due": <size_t>&last.seq[i].due,
        "evicted": <size_t>&last.seq[i].evicted, "point": <size_t>&s.life[i].point, "life": <size_t>&s.life[i].life,
        "handle": <size_t>&s.seq[i].handle, "num_late": <size_t>&s.num_late,
        "num_free_slots": <size_t>&s.num_free_slots, "place": <size_t>&b.block[i].place,
        "committed": <size_t>&b.block[i].committed, "noted": <size_t>&b.block[i].noted,
        "fence": <size_t>&b.block[i].fence, "num_evictable": <size_t>&b.num_evictable,
        "newest_pending": <size_t>&b.newest_pending, "oldest_pending": <size_t>&b.oldest_pending,
        "num_pending": <size_t>&pool.state.pending.size,
    }
    if pool.state.pending.oldest != NULL:
        fields["pending"] = <size_t>&pool.state.pending.oldest.pending
    if what == "namespace":                 # users of the one that a row is in
        fields[what] = <size_t>&s.prefix[i].name.users
    if pool.state.groups.tree != NULL:
        fields |= tree_fields(pool.state.groups, i)
        fields["published"] = <size_t>&s.prefix[i].published
        fields["committed_tokens"] = <size_t>&s.prefix[i].committed
        fields["num_names"] = <size_t>&s.names.size
    if what == "":
        return tuple(fields)
    cdef int32_t* word = <int32_t*><size_t>fields[what]
    word[0] += by
    return word[0] - by


cdef dict tree_fields(const Groups* gs, int32_t i):
    """Where the words of a tree are; of the first window, if there is one."""
    cdef const Tree* t = gs.tree
    cdef int32_t k
    cdef dict fields = {
        "users": <size_t>&t.node[i].users, "below": <size_t>&t.more[i].below, "parent": <size_t>&t.node[i].parent,
        "node_stamp": <size_t>&t.more[i].stamp, "hash": <size_t>&t.node[i].hash, "unit": <size_t>&t.unit[i].next,
        "at_node": <size_t>&t.more[i].checkpoint, "tokens": <size_t>(t.tokens + i * t.block_size),
        "bucket": <size_t>&t.num_nodes, "cold": <size_t>&t.cold.size, "warm": <size_t>&t.warm.size,
        "role": <size_t>&t.stands[0][i].role, "stands_for": <size_t>&t.stands[0][i].node,
        "checkpoints": <size_t>&t.num_checkpoints, "loads": <size_t>&t.num_loads, "saves": <size_t>&t.num_saves,
        "line": <size_t>&t.link[i].next,
        "listed": <size_t>&t.listed[0].size, "stamp": <size_t>&t.checkpoint[i].stamp,
        "position": <size_t>&t.checkpoint[i].position, "step": <size_t>&t.checkpoint[i].step,
        "slot_loads": <size_t>&t.checkpoint[i].loads, "row": <size_t>&t.checkpoint[i].row,
        "bundle": <size_t>checkpoint_bundle(t, i), "may_leave": <size_t>&t.checkpoint[i].listed,
        "depth": <size_t>&t.node[i].depth, "name": <size_t>&t.node[i].name, "idle": <size_t>&t.node[i].idle,
        "node_place": <size_t>&t.node[i].place, "has_waiting": <size_t>&t.has_waiting,
        "cold_head": <size_t>&t.cold.head, "cold_tail": <size_t>&t.cold.tail,
        "warm_head": <size_t>&t.warm.head, "warm_tail": <size_t>&t.warm.tail,
        "entry": <size_t>(t.entry + <int64_t>i * t.stride + t.offset[0] if t.stride else &t.node[i].entry),
    }
    for k in range(gs.num_groups):
        if gs.group[k].kind == WINDOW_LAYERS:
            fields["needed"] = <size_t>(t.entry + <int64_t>i * t.stride + t.offset[k] + 1)
    if t.keeping != NULL:
        fields |= {
            "rank": <size_t>&t.node[i].rank, "reasons": <size_t>&t.keeping.node[i].reasons,
            "until": <size_t>&t.keeping.ends.until[i], "num_kept": <size_t>&t.keeping.num_kept,
            "now": <size_t>&t.now,
        }
    if t.pins != NULL:
        fields |= {"pin_until": <size_t>&t.pins.until[i], "now": <size_t>&t.now}
    return fields
