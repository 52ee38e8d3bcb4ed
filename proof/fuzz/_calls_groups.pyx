"""What is read of a pool with layer groups, held against the books; no expectation comes from here.

Arrays of plans are read as any consumer reads them. Tables and counters are taken from the pool's memory, as a call
for each would be slow.
"""
from libc.stdint cimport int32_t, int64_t

from kvpool._core cimport Blocks, LayerGroup, Pool, Seq, array_data, entries_of, group_row
from proof.fuzz._books cimport Books, Line, Page, Pending, line_table
from proof.fuzz._books_groups cimport GONE, STATE_KIND, Layers, Moves, ceil_entries, row_of
from proof.fuzz._storage cimport found



cdef inline int differs(Finding* f, const char* what, int64_t a, int64_t b, int64_t is_, int64_t due) noexcept nogil:
    """0 if it is what is due. `what` names two numbers, then the two that differ."""
    return 0 if is_ == due else found(f, what, a, b, is_, due)


cdef inline int32_t hole_of(const GroupBooks* gb) noexcept nogil:
    return 0 if gb.arena[0].reserved else -1


# ---- the pool ----------------------------------------------------------------------------------------------

cdef int compare_arena(const Blocks* o, const Books* b, int32_t a, Finding* f) noexcept nogil:
    """What `stats(arena)` says, and who refers to each block."""
    cdef int32_t i
    if (differs(f, b"arena %lld%lld: %lld blocks are free, not %lld", a, -1, o.num_blank, b.num_blank)
            or differs(f, b"arena %lld%lld: %lld blocks are in limbo, not %lld", a, -1, o.limbo.size, b.limbo.size)
            or differs(f, b"arena %lld%lld: %lld blocks are evictable, not %lld", a, -1, o.lru.size, b.lru.size)
            or differs(f, b"arena %lld%lld: evictions is %lld, not %lld", a, -1, o.evictions, b.evictions)
            or differs(f, b"arena %lld%lld: %lld blocks are used, not %lld", a, -1, o.num_used, b.used)
            or differs(f, b"arena %lld%lld: %lld blocks are in some place, not %lld", a, -1,
                       o.num_blank + o.lru.size + o.limbo.size + o.num_used, b.num_blocks - b.reserved)
            or differs(f, b"arena %lld%lld: %lld blocks are shared, not %lld", a, -1, o.num_shared, b.shared)
            or differs(f, b"arena %lld%lld: allocs is %lld, not %lld", a, -1, o.allocs, b.allocs)
            or differs(f, b"arena %lld%lld: peak_used is %lld, not %lld", a, -1, o.peak_used, b.peak_used)
            or differs(f, b"arena %lld%lld: cow_copies is %lld, not %lld", a, -1, o.cow_copies, b.cow_copies)
            or differs(f, b"arena %lld%lld: cow_tokens is %lld, not %lld", a, -1, o.cow_tokens, b.cow_tokens)):
        return -1
    for i in range(b.reserved, b.num_blocks):
        if differs(f, b"arena %lld: block %lld has %lld references, not %lld", a, i, o.block[i].refcount,
                   b.page[i].refs):
            return -1
        if differs(f, b"arena %lld: block %lld is cached: %lld, not %lld", a, i, o.block[i].committed,
                   b.page[i].final):
            return -1
    return 0


cdef int compare_row(const LayerGroup* mine, const Seq* seq, const GroupBooks* gb, int32_t g, int32_t slot,
                     Finding* f) noexcept nogil:
    """One table."""
    cdef const Layers* due = &gb.layers[g]
    cdef const int32_t* ids = group_row(mine, slot)
    cdef const int32_t* row = row_of(due, slot)
    cdef int32_t hole = hole_of(gb), i
    if differs(f, b"group %lld: the sequence in slot %lld has %lld entries, not %lld", g, slot,
               entries_of(mine, slot, seq.num_blocks), due.entries[slot]):
        return -1
    for i in range(due.entries[slot] * due.columns):
        if ids[i] != (hole if row[i] == GONE else row[i]):
            return found(f, b"group %lld: id %lld of a sequence is %lld, not %lld", g, i, ids[i], row[i])
    return 0


cdef int compare_groups(Pool pool, const GroupBooks* gb, Finding* f) noexcept:
    """Everything that calls tell about sequences, tables and arenas. 0, or -1 with a finding."""
    cdef const Books* b = gb.arena[0]
    cdef const Line* line
    cdef const Seq* seq
    cdef int32_t i, k, slot
    for i in range(b.num_live):
        slot = b.live[i]
        line, seq = &b.line[slot], &pool.state.seqs.seq[slot]
        if (differs(f, b"sequence %lld%lld: the handle is %lld, not %lld", line.handle, -1,
                    seq.handle - pool.state.seqs.base, line.handle)
                or differs(f, b"sequence %lld%lld: num_tokens is %lld, not %lld", line.handle, -1, seq.kv_len,
                           line.length)):
            return -1
        for k in range(gb.num_groups):
            if compare_row(&pool.state.groups.group[k], seq, gb, k, slot, f):
                return -1
    for k in range(gb.num_arenas):
        if compare_arena(pool.state.groups.arena[k], gb.arena[k], k, f):
            return -1
    if (differs(f, b"%lld%lld%lld sequences are open, not %lld", -1, -1, pool.state.seqs.num_open, b.num_live)
            or differs(f, b"%lld%lld%lld tokens are in all sequences, not %lld", -1, -1, pool.state.seqs.sum_tokens,
                       b.tokens)):
        return -1
    return differs(f, b"%lld%lld%lld steps are pending, not %lld", -1, -1, pool.state.pending.size, b.num_queue)


# ---- a plan ------------------------------------------------------------------------------------------------

cdef int read_arrays(object groups, const GroupBooks* gb, int32_t k, Shown* shown) except -1:
    """Where the arrays of plan k are. A consumer copies the rows that are dirty, and no other."""
    cdef int32_t g, i, row
    cdef int64_t ids, at
    cdef const int32_t* dirty
    for g in range(gb.num_groups):
        arrays = groups[g]
        if gb.layers[g].kind == STATE_KIND:
            shown[g].src = <const int32_t*>array_data(arrays.state_src)
            shown[g].dst = <const int32_t*>array_data(arrays.state_dst)
            continue
        tables, slots, copies, rows = arrays.block_tables, arrays.slot_mapping, arrays.copies, arrays.dirty_rows
        shown[g].tables = <const int32_t*>array_data(tables)
        shown[g].width = <int32_t>(tables.shape[1] * tables.shape[2])
        shown[g].slots = <const int32_t*>array_data(slots)
        shown[g].stride = slots.shape[1]
        shown[g].copies = <const int32_t*>array_data(copies)
        shown[g].num_copies = <int32_t>len(copies)
        shown[g].starts = <const int32_t*>array_data(arrays.kv_starts)
        dirty = <const int32_t*>array_data(rows)
        ids = gb.layers[g].width * gb.layers[g].columns
        for i in range(<int32_t>len(rows)):
            row = dirty[i]
            for at in range(min(ids, <int64_t>shown[g].width)):
                gb.layers[g].moves[k].mirror[row * ids + at] = shown[g].tables[row * <int64_t>shown[g].width + at]
    return 0


cdef int compare_states(const GroupBooks* gb, int32_t g, int32_t k, const Shown* shown, int32_t rows,
                        Finding* f) noexcept nogil:
    """Which slot every row reads and writes."""
    cdef const Pending* p = &gb.arena[0].plan[k]
    cdef const Moves* m = &gb.layers[g].moves[k]
    cdef int32_t i, at = 0, src, dst
    for i in range(rows):
        src = dst = -1
        if i < p.rows and p.length[i] > p.before[i]:
            dst = row_of(&gb.layers[g], <int32_t>(p.handle[i] & 0xFFFFF))[0]
            if at < m.num and m.entry[at].row == i:
                src = m.entry[at].old
                at += 1
            elif m.appended[i] == 0:
                src = dst
        if (differs(f, b"group %lld: state_src[%lld] is %lld, not %lld", g, i, shown.src[i], src)
                or differs(f, b"group %lld: state_dst[%lld] is %lld, not %lld", g, i, shown.dst[i], dst)):
            return -1
    return 0


cdef int compare_copies(const Layers* layers, int32_t g, const Moves* m, const Shown* shown, Finding* f) noexcept nogil:
    cdef const int32_t* copy = shown.copies
    cdef int32_t i, made = 0
    for i in range(m.num):
        made += m.entry[i].tokens > 0
    if differs(f, b"group %lld%lld: %lld copies, not %lld", g, -1, shown.num_copies, made):
        return -1
    for i in range(m.num):
        if m.entry[i].tokens == 0:
            continue
        if (differs(f, b"group %lld: a copy from block %lld%lld, not %lld", g, -1, copy[0], m.entry[i].old)
                or differs(f, b"group %lld: a copy of %lld to %lld, not %lld", g, copy[0], copy[1], m.entry[i].new)
                or differs(f, b"group %lld: a copy of %lld has %lld tokens, not %lld", g, copy[0], copy[2],
                           m.entry[i].tokens)):
            return -1
        copy += 3
    return 0


cdef int compare_slots(const GroupBooks* gb, int32_t g, int32_t k, const Shown* shown, Finding* f) noexcept nogil:
    """Where every new token goes."""
    cdef const Layers* layers = &gb.layers[g]
    cdef const Pending* p = &gb.arena[0].plan[k]
    cdef const int32_t* row
    cdef int64_t position, t = 0, due
    cdef int32_t i, c
    for i in range(p.rows):
        row = row_of(layers, <int32_t>(p.handle[i] & 0xFFFFF))
        for position in range(p.before[i], p.length[i]):
            for c in range(layers.columns):
                due = row[position // layers.size * layers.columns + c] * layers.size + position % layers.size
                if differs(f, b"group %lld: the slot of token %lld is %lld, not %lld", g, t,
                           shown.slots[c * shown.stride + t], due):
                    return -1
            t += 1
    for t in range(t, shown.stride):
        for c in range(layers.columns):
            if differs(f, b"group %lld: the slot of padding %lld is %lld, not %lld", g, t,
                       shown.slots[c * shown.stride + t], -1):
                return -1
    return 0


cdef int compare_tables(const GroupBooks* gb, int32_t g, int32_t k, const Shown* shown, int32_t rows,
                        Finding* f) noexcept nogil:
    """Tables as a consumer of dirty_rows has them, and where they have no hole."""
    cdef const Layers* layers = &gb.layers[g]
    cdef const Pending* p = &gb.arena[0].plan[k]
    cdef const int32_t* row
    cdef int32_t i, slot, hole = hole_of(gb), entries, last
    cdef int64_t at, ids = layers.width * layers.columns, due
    for i in range(rows):
        slot = <int32_t>(p.handle[i] & 0xFFFFF) if i < p.rows else 0
        row, entries, last = row_of(layers, slot), layers.entries[slot] if i < p.rows else 0, -1
        for at in range(ids):
            due = row[at] if at < entries * layers.columns else GONE
            if due == GONE and at < entries * layers.columns:
                last = <int32_t>(at // layers.columns)
            if layers.moves[k].mirror[i * ids + at] != (hole if due == GONE else due):
                return found(f, b"group %lld: row %lld of block_tables by dirty_rows has %lld, not %lld", g, i,
                             layers.moves[k].mirror[i * ids + at], due)
        if differs(f, b"group %lld: kv_starts[%lld] is %lld, not %lld", g, i, shown.starts[i],
                   (last + 1) * layers.size):
            return -1
    return 0


cdef int compare_arrays(const GroupBooks* gb, int32_t k, const Shown* shown, int32_t rows, Finding* f) noexcept:
    """The arrays of plan k, which has so many rows with padding."""
    cdef int32_t g
    for g in range(gb.num_groups):
        if gb.layers[g].kind == STATE_KIND:
            if compare_states(gb, g, k, &shown[g], rows, f):
                return -1
        elif (compare_copies(&gb.layers[g], g, &gb.layers[g].moves[k], &shown[g], f)
                or compare_slots(gb, g, k, &shown[g], f) or compare_tables(gb, g, k, &shown[g], rows, f)):
            return -1
    return 0
