"""What a plan hands to a backend: one step in every wire format that was asked for.

A `Field` is one array. A `Wire` has those of a layer group; the arrays that all groups share are
the plan's. A `WireRow` is what row i of the arrays holds, whoever's it is in the next step.

    seen[i] == version of the table that row i shows, or 0: it has to be looked at
    written == ids of the row that may be other than pad
    dirty == rows that show another table than before this step, or are carried, ascending

Why it is so:

- Consumers keep the arrays from step to step, and so does the plan. A row is written when the table
  that it shows is another one (handle), or lost or exchanged an entry (epoch). When the table grew,
  only its new ids are, and when a window let go, only its new holes. So a steady decode step is
  O(rows), not O(blocks).
- `seen` is an array of its own, because it is all that a steady step reads of a row.
- `carried`: after a rollback or a rebind the consumer may have copied what is true no more. So a
  row is dirty once more whatever it shows, padding too.
- CSR has no gaps: behind the first row whose number of entries changed, or whose table did, all
  move, so they are written anew from there.
"""


cdef inline Event event_of(const Step* p, int32_t row, int32_t* at) noexcept nogil:
    """What a row of a step did; asked of each row in turn, `at` is the next event."""
    cdef Event plain
    if at[0] < p.num_events and p.event[at[0]].row == row:
        at[0] += 1
        return p.event[at[0] - 1]
    plain.row, plain.q_len, plain.appended, plain.served = row, 1, 0, 1
    return plain


cdef inline int64_t prev_of(const Step* p, int32_t row) noexcept nogil:
    return p.all_prev if p.all_prev >= 0 else p.prev_step[row]


cdef int wire_init(Wire* w, int32_t max_rows) noexcept nogil:
    w.row = <WireRow*>xcalloc(max_rows, sizeof(WireRow))
    w.seen = <uint64_t*>xcalloc(max_rows, sizeof(uint64_t))
    if w.row == NULL or w.seen == NULL:
        return NO_MEMORY
    wire_forget(w, max_rows, False)
    return OK


cdef void wire_forget(Wire* w, int32_t rows, bint tables) noexcept nogil:
    """Make rows dirty in the next step. `tables`: that array was rebound, so it may hold anything."""
    cdef int32_t i
    for i in range(rows):
        w.seen[i] = 0
        w.row[i].handle = -1
        w.row[i].csr_entries = -1
        w.row[i].carried = 1
        if tables:
            w.row[i].written = w.table_width


cdef inline void write_one(const Field* f, int64_t i, int64_t value) noexcept nogil:
    if f.width == 4:
        (<int32_t*>f.data)[i] = <int32_t>value
    elif f.width == 8:
        (<int64_t*>f.data)[i] = value


cdef void write_pad(const Field* f, int64_t first, int64_t end) noexcept nogil:
    if f.width == 0:
        return
    for first in range(first, end):
        write_one(f, first, f.pad)


cdef void write_slots(const Field* f, int64_t at, const LayerGroup* g, const int32_t* ids, int64_t first,
                      int64_t end) noexcept nogil:
    """Slots of places first .. end - 1 of a row in one column, whose ids are `columns` apart, from index `at` on."""
    cdef int64_t bs = g.block_size, index = entry_at(g, first), offset = first - index * bs, stop, base
    while first < end:
        stop = bs if end - first > bs - offset else offset + end - first
        base = ids[index * g.columns] * bs
        first += stop - offset
        while offset < stop:
            write_one(f, at, base + offset)
            at += 1
            offset += 1
        offset = 0
        index += 1


cdef void write_range(const Field* f, int64_t at, int64_t first, int64_t end) noexcept nogil:
    if f.width == 0:
        return
    for first in range(first, end):
        write_one(f, at, first)
        at += 1


cdef inline void write_all(const Field* f, const int64_t* values, int32_t n, int64_t shift) noexcept nogil:
    """values[i] + shift for every row; the compiler makes one vector loop of each branch."""
    cdef int32_t i
    if f.width == 4:
        for i in range(n):
            (<int32_t*>f.data)[i] = <int32_t>(values[i] + shift)
    elif f.width == 8:
        for i in range(n):
            (<int64_t*>f.data)[i] = values[i] + shift


cdef inline void show_row(Wire* w, int32_t i, int64_t handle, uint32_t epoch, const LayerGroup* g, int32_t slot,
                          int32_t n) noexcept nogil:
    """Bring the block_tables row i up to date with the n ids of a table, and call it dirty."""
    cdef WireRow* row = &w.row[i]
    cdef const Field* f = &w.field[BLOCK_TABLES]
    cdef const int32_t* table = group_row(g, slot)
    cdef int64_t at = <int64_t>i * w.table_width
    cdef int32_t k, first = 0, gone = g.seq[slot].gone
    if row.handle == handle and row.epoch == epoch:
        first = row.written
    else:
        row.csr_entries = -1
    if row.gone != gone:
        row.csr_entries = -1
        for k in range(row.gone * g.columns, min(gone * g.columns, first) if f.width else 0):
            write_one(f, at + k, table[k])
        row.gone = gone
    if f.width:
        for k in range(first, n):
            write_one(f, at + k, table[k])
        write_pad(f, at + n, at + row.written)
    row.handle = handle
    row.epoch = epoch
    row.written = n
    row.carried = 0
    w.dirty[w.num_dirty] = i
    w.num_dirty += 1


cdef void sync_rows(const Groups* gs, const LayerGroup* g, StepPart* part, const Step* p) noexcept nogil:
    cdef Wire* w = &part.wire
    cdef int32_t k, i, slot
    cdef const Tail* t
    for k in range(part.num_stale):
        i = part.stale[k]
        slot = slot_of(p.handle[i])
        t = tail_of(g, slot)
        if part.kv_starts != NULL:
            part.kv_starts[i] = <int32_t>(g.seq[slot].gone * g.block_size)
        if w.tracks:
            show_row(w, i, p.handle[i], t.epoch, g, slot,
                     entries_of(g, slot, gs.seqs.seq[slot].num_blocks) * g.columns)
        w.seen[i] = t.version


cdef void pad_row(StepPart* part, int32_t i) noexcept nogil:
    cdef Wire* w = &part.wire
    cdef WireRow* row = &w.row[i]
    cdef int64_t at = <int64_t>i * w.table_width
    write_one(&w.field[SEQ_LENS], i, w.field[SEQ_LENS].pad)
    write_one(&w.field[LAST_PAGE_LEN], i, w.field[LAST_PAGE_LEN].pad)
    if part.kv_starts != NULL:
        part.kv_starts[i] = 0
    w.seen[i] = 0
    if not w.tracks or (row.handle == -1 and not row.carried):
        return
    write_pad(&w.field[BLOCK_TABLES], at, at + row.written)
    row.handle = -1
    row.written = 0
    row.csr_entries = -1
    row.carried = 0
    w.dirty[w.num_dirty] = i
    w.num_dirty += 1


cdef void emit_lens(const Groups* gs, const LayerGroup* g, const Field* f, const Step* p) noexcept nogil:
    cdef int32_t i
    if gs.seqs.evicted_tokens == 0:
        write_all(f, p.length, p.num_rows, 0)
        return
    for i in range(p.num_rows):
        write_one(f, i, held_of(g, slot_of(p.handle[i]), p.length[i]))


cdef void emit_csr(const LayerGroup* g, StepPart* part, const Step* p, int32_t pad_rows) noexcept nogil:
    """indptr, indices, last_page_len of the entries that are no holes. Behind the first row that changed all moves."""
    cdef Wire* w = &part.wire
    cdef const int32_t* ids
    cdef int32_t i, k, slot, entries, holes, first = p.num_rows
    cdef int64_t at = 0, held         # counted, not read back: the arrays are in the hands of others
    for i in range(p.num_rows):
        slot = slot_of(p.handle[i])
        held = held_of(g, slot, p.length[i])
        entries = <int32_t>entry_at(g, held + g.block_size - 1)
        write_one(&w.field[LAST_PAGE_LEN], i, held - (entries - 1) * g.block_size if entries else 0)
        entries -= max(g.seq[slot].gone - g.kept, 0)
        if (w.row[i].csr_entries != entries or i >= w.csr_rows) and i < first:
            first = i
        if first == p.num_rows:
            at += entries
        w.row[i].csr_entries = entries
    if first == 0:
        write_one(&w.field[INDPTR], 0, 0)
    for i in range(first, p.num_rows):
        slot = slot_of(p.handle[i])
        ids = group_row(g, slot)
        holes = max(g.seq[slot].gone - g.kept, 0)
        for k in range(w.row[i].csr_entries * g.columns):
            write_one(&w.field[INDICES], at * g.columns + k,
                      ids[k if k < g.kept * g.columns else k + <int64_t>holes * g.columns])
        at += w.row[i].csr_entries
        write_one(&w.field[INDPTR], i + 1, at)
    for i in range(p.num_rows, pad_rows):
        write_one(&w.field[INDPTR], i + 1, at)
    w.csr_rows = p.num_rows
    w.nnz = at


cdef void emit_slots(const LayerGroup* g, const StepPart* part, const Step* p) noexcept nogil:
    """slot_mapping: where each new token goes, one row of all tokens per column."""
    cdef const Field* f = &part.wire.field[SLOT_MAPPING]
    cdef const int32_t* ids
    cdef int64_t end, place, t = 0
    cdef int32_t i, c, q_len, slot, at = 0
    if f.width == 0:
        return
    if p.uniform and g.columns == 1:
        write_all(f, part.slot, p.num_rows, 0)
        t = p.num_rows
    for i in range(p.num_rows if t == 0 else 0):
        q_len = event_of(p, i, &at).q_len
        slot = slot_of(p.handle[i])
        ids = group_row(g, slot)
        if q_len == 1 and g.columns == 1:
            write_one(f, t, part.slot[i])
        elif q_len:
            end = held_of(g, slot, p.length[i])
            for c in range(g.columns):
                write_slots(f, c * part.shown_tokens + t, g, ids + c, end - q_len, end)
        t += q_len
    for c in range(g.columns if t < part.shown_tokens else 0):
        write_pad(f, c * part.shown_tokens + t, c * part.shown_tokens + part.shown_tokens)


cdef void emit_states(const LayerGroup* g, StepPart* out, const Step* p, int32_t pad_rows) noexcept nogil:
    """state_src and state_dst of a step; rows without new tokens have neither."""
    cdef const Replaced* log = out.log.entry
    cdef const Change* change
    cdef int32_t i
    for i in range(p.num_rows):             # a state that is written in place, unless something below says more
        out.state_src[i] = out.state_dst[i] = g.table[slot_of(p.handle[i])]
    for i in range(p.num_events):
        if p.event[i].q_len == 0:
            out.state_src[p.event[i].row] = out.state_dst[p.event[i].row] = NO_BLOCK
    for i in range(out.num_changes):
        change = &out.change[i]
        out.state_src[change.row] = log.old if change.replaced else NO_BLOCK
        log += change.replaced
    for i in range(p.num_rows, pad_rows):
        out.state_src[i] = out.state_dst[i] = NO_BLOCK


cdef void emit_groups(const Groups* gs, const Step* p, int32_t pad_rows, int64_t pad_tokens) noexcept nogil:
    """Write a committed step into the arrays of every group; rows and tokens up to pad_rows, pad_tokens are padding."""
    cdef const LayerGroup* g
    cdef StepPart* part
    cdef int32_t k, i
    for k in range(gs.num_groups):
        g = &gs.group[k]
        part = p.part[k]
        part.shown_rows = max(p.num_rows, pad_rows)
        part.shown_tokens = max(p.num_tokens, pad_tokens)
        part.wire.num_dirty = 0
        emit_lens(gs, g, &part.wire.field[SEQ_LENS], p)
        if g.kind == STATE_LAYERS:
            emit_states(g, part, p, pad_rows)
        else:
            sync_rows(gs, g, part, p)
            emit_slots(g, part, p)
        for i in range(p.num_rows, pad_rows):
            pad_row(part, i)
        if part.wire.field[INDPTR].width:
            emit_csr(g, part, p, pad_rows)


cdef void emit_step(const Field* field, uint8_t* served, const Step* p, int32_t pad_rows,
                    int64_t pad_tokens) noexcept nogil:
    """Write what is common to all groups: positions, cu_q_lens, slot_ids, served."""
    cdef int32_t i, q_len, at = 0
    cdef int64_t t = 0
    write_one(&field[CU_Q_LENS], 0, 0)
    if p.uniform:
        write_all(&field[POSITIONS], p.length, p.num_rows, -1)
        write_range(&field[CU_Q_LENS], 1, 1, p.num_rows + 1)
    else:
        for i in range(p.num_rows):
            q_len = event_of(p, i, &at).q_len
            write_range(&field[POSITIONS], t, p.length[i] - q_len, p.length[i])
            t += q_len
            write_one(&field[CU_Q_LENS], i + 1, t)
    if field[SLOT_IDS].width:
        for i in range(p.num_rows):
            write_one(&field[SLOT_IDS], i, slot_of(p.handle[i]))
    memset(served, 1, p.num_rows)
    for i in range(0 if p.uniform else p.num_events):
        served[p.event[i].row] = p.event[i].served
    for i in range(p.num_rows, pad_rows):
        write_one(&field[SLOT_IDS], i, field[SLOT_IDS].pad)
        write_one(&field[CU_Q_LENS], i + 1, p.num_tokens)
    write_pad(&field[POSITIONS], p.num_tokens, pad_tokens)
