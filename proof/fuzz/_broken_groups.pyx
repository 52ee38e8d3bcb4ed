"""Pools with layer groups that have one planted bug each; `proof.fuzz._broken` is the same for pools without groups.

Each bug is put in around a call of a sound `kvpool.Pool`, by changing its memory before or after the call.
"""
from libc.stdint cimport int32_t, int64_t

from kvpool._core cimport (
    CHUNK_LAYERS, STATE_LAYERS, WINDOW_LAYERS, Blocks, Groups, LayerGroup, Plan, Pool, blocks_drain_limbo, entries_of,
    group_row, seq_find, set_gone,
)

from proof.fuzz._broken import around


def _shift(kind):
    """Windows (or chunks) are one token shorter while entries are let go."""
    def before(pool, *_):
        cdef Groups* gs = (<Pool>pool).state.groups
        kept = [_shorten(&gs.group[k], <int>kind) for k in range(gs.num_groups)]
        _renew_due(gs)
        return kept

    def after(pool, kept, *_):
        cdef Groups* gs = (<Pool>pool).state.groups
        for k, n in enumerate(kept):
            gs.group[<int32_t>k].reach += n
        _renew_due(gs)
    return before, after, after


cdef int64_t _shorten(LayerGroup* g, int kind):
    cdef int64_t n = g.kind == kind and g.reach > 1
    g.reach -= n
    return n


def _take_lookahead(pool, *_):
    cdef Groups* gs = (<Pool>pool).state.groups
    kept = gs.group[0].lookahead
    _set_lookahead(gs, 0)
    return kept


def _put_lookahead(pool, kept, *_):
    _set_lookahead((<Pool>pool).state.groups, kept)


cdef void _set_lookahead(Groups* gs, int64_t lookahead):
    cdef int32_t k
    for k in range(gs.num_groups):
        gs.group[k].lookahead = lookahead
    _renew_due(gs)


cdef void _renew_due(Groups* gs):
    """The lengths at which rows let go are those of the groups as they are now."""
    cdef int32_t k, slot
    for k in range(gs.num_groups):
        if gs.group[k].kind != STATE_LAYERS:
            for slot in range(gs.seqs.max_seqs):
                set_gone(&gs.group[k], slot, gs.group[k].seq[slot].gone)


def _take_kept(pool, *_):
    cdef Groups* gs = (<Pool>pool).state.groups
    cdef int32_t k
    kept = [gs.group[k].kept for k in range(gs.num_groups)]
    for k in range(gs.num_groups):
        gs.group[k].kept = 0
    _renew_due(gs)
    return kept


def _put_kept(pool, kept, *_):
    cdef Groups* gs = (<Pool>pool).state.groups
    for k, n in enumerate(kept):
        gs.group[<int32_t>k].kept = n
    _renew_due(gs)


def _freed_early(pool, kept, *_):
    """Limbo lets go of blocks that the oldest pending step still has to read."""
    cdef Groups* gs = (<Pool>pool).state.groups
    cdef int64_t oldest
    cdef int32_t k
    for k in range(gs.num_arenas):
        oldest = gs.arena[k].oldest_pending
        if oldest:
            gs.arena[k].oldest_pending = oldest + 1
            blocks_drain_limbo(gs.arena[k])
            gs.arena[k].oldest_pending = oldest


def _state_in_place(pool, kept, plan, *_):
    """A row writes the state that others have too."""
    for part in (<Plan>plan).groups:
        src, dst = getattr(part, "state_src", None), getattr(part, "state_dst", None)
        if src is not None:
            dst[src >= 0] = src[src >= 0]


def _swap_arena(pool, *_):
    """One group takes its blocks from arena 0, where that has enough of them."""
    cdef Groups* gs = (<Pool>pool).state.groups
    cdef Blocks* first = gs.arena[0]
    cdef int32_t k
    for k in range(gs.num_groups):
        if (gs.group[k].kind != STATE_LAYERS and gs.group[k].arena and gs.group[k].blocks.num_blocks <= first.num_blocks
                and first.num_blank > 24):
            gs.group[k].blocks = first
            return k
    return None


def _swap_back(pool, kept, *_):
    cdef Groups* gs = (<Pool>pool).state.groups
    if kept is not None:
        gs.group[<int32_t>kept].blocks = gs.arena[gs.group[<int32_t>kept].arena]


cdef list _last_columns(Pool pool):
    """(group, slot, entry, block) of the last column of every entry of several columns."""
    cdef Groups* gs = pool.state.groups
    cdef LayerGroup* g
    cdef int32_t k, slot, i
    found = []
    for k in range(gs.num_groups):
        g = &gs.group[k]
        for slot in range(gs.seqs.max_seqs if g.columns > 1 else 0):
            for i in range(entries_of(g, slot, gs.seqs.seq[slot].num_blocks) if gs.seqs.seq[slot].handle >= 0 else 0):
                if i < g.kept or i >= g.seq[slot].gone:
                    found.append((k, slot, i, group_row(g, slot)[(i + 1) * g.columns - 1]))
    return found


def _hold_columns(pool, *_):
    """The last column of an entry has a reference more."""
    cdef Groups* gs = (<Pool>pool).state.groups
    found = _last_columns(pool)
    for k, _, _, block in found:
        gs.group[<int32_t>k].blocks.block[<int32_t>block].refcount += 1
    return found


def _drop_columns(pool, kept, *_):
    """It keeps that if the entry was let go."""
    cdef Groups* gs = (<Pool>pool).state.groups
    left = set(_last_columns(pool))
    for at in kept:
        if at in left:
            gs.group[<int32_t>at[0]].blocks.block[<int32_t>at[3]].refcount -= 1


def _later_tables(pool, kept, plan, *_):
    """Plans that are pending show the tables of now."""
    cdef Groups* gs = (<Pool>pool).state.groups
    for old in (<Pool>pool).plans:
        if old is plan:
            continue
        for row, handle in enumerate(old.handles.tolist()):
            for k, part in enumerate(old.groups if pool.is_open(handle) else ()):
                if gs.group[<int32_t>k].kind != STATE_LAYERS:
                    table = pool.table(handle, k)
                    part.block_tables[row, :len(table)] = table


def _column_not_replaced(pool, kept, plan, *_):
    """A step that replaces an entry forgets its last column: the plan writes where others read."""
    for part in (<Plan>plan).groups:
        copies = getattr(part, "copies", None)
        if copies is not None and len(copies) > 1 and part.slot_mapping.shape[0] > 1:
            src, dst, _ = copies[len(part.slot_mapping) - 1].tolist()
            part.block_tables[part.block_tables == dst] = src


def _forget_cached(pool, *_):
    """Nobody sees that blocks of later arenas are cached."""
    cdef Groups* gs = (<Pool>pool).state.groups
    cdef Blocks* o
    cdef int32_t k, i
    kept = []
    for k in range(1, gs.num_arenas):
        o = gs.arena[k]
        for i in range(o.num_blocks):
            if o.block[i].committed and o.block[i].refcount:
                kept.append((k, i))
                o.block[i].committed = 0
    return kept


def _know_cached(pool, kept, *_):
    cdef Groups* gs = (<Pool>pool).state.groups
    for k, i in kept:
        gs.arena[<int32_t>k].block[<int32_t>i].committed = 1


def _first_arena_alone(pool, *_):
    """All arenas but the first have room for everything."""
    cdef Groups* gs = (<Pool>pool).state.groups
    cdef int32_t k
    kept = [gs.arena[k].num_blank for k in range(1, gs.num_arenas)]
    for k in range(1, gs.num_arenas):
        gs.arena[k].num_blank = 1 << 30
    return kept


def _true_arenas(pool, kept, *_):
    for k, n in enumerate(kept):
        (<Pool>pool).state.groups.arena[<int32_t>k + 1].num_blank = n


#: name -> (methods, before the call, after it, where the call was refused)
GROUP_FAULTS = {
    "window off by one": (("done", "step"), *_shift(WINDOW_LAYERS)),
    "chunk off by one": (("done", "step"), *_shift(CHUNK_LAYERS)),
    "block freed one step early": (("done", "close", "truncate"), None, _freed_early, None),
    "state shared after a step": (("step",), None, _state_in_place, None),
    "wrong arena": (("step",), _swap_arena, _swap_back, _swap_back),
    "one column of a block left behind": (("done",), _hold_columns, _drop_columns, _drop_columns),
    "one column not replaced": (("step",), None, _column_not_replaced, None),
    "lookahead forgotten": (("done", "step"), _take_lookahead, _put_lookahead, _put_lookahead),
    "kept tokens forgotten": (("done", "step"), _take_kept, _put_kept, _put_kept),
    "a later copy-on-write seen by an earlier plan": (("step",), None, _later_tables, None),
    "cached block of a later arena written": (("step",), _forget_cached, _know_cached, _know_cached),
    "can asks the first arena alone": (("can",), _first_arena_alone, _true_arenas, _true_arenas),
}


def broken_groups(fault):
    """A class of pools with one planted bug, by its name in `GROUP_FAULTS`."""
    methods, before, after, refused = GROUP_FAULTS[fault]
    calls = {name: around(getattr(Pool, name), before, after, refused) for name in methods}
    return type("BrokenPool", (Pool,), calls)
