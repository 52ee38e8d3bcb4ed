"""What a plan hands to a backend: one step in every wire format that was asked for.

A table row is rewritten when it shows another sequence, or when entries of its sequence changed (a new epoch). When
the sequence has gained blocks, only these are written. So a steady decode step is O(rows), not O(blocks).
"""


cdef int wire_init(Wire* w, int32_t max_rows) noexcept nogil:
    cdef int32_t i
    w.row = <WireRow*>xcalloc(max_rows, sizeof(WireRow))
    w.seen = <uint64_t*>xcalloc(max_rows, sizeof(uint64_t))
    if w.row == NULL or w.seen == NULL:
        return NO_MEMORY
    w.max_rows = max_rows
    for i in range(max_rows):
        w.row[i].handle = -1
        w.row[i].carried = 1
    return OK


cdef void wire_free(Wire* w) noexcept nogil:
    xfree(w.row)
    xfree(w.seen)
    w.row = NULL
    w.seen = NULL


cdef void wire_forget(Wire* w, int32_t rows, bint tables) noexcept nogil:
    """Make rows dirty in the next step. `tables`: block_tables was rebound, so it may hold anything."""
    cdef int32_t i
    for i in range(rows):
        w.seen[i] = 0
        w.row[i].handle = -1
        w.row[i].csr_blocks = -1
        w.row[i].carried = 1
        if tables:
            w.row[i].written = w.table_width


cdef inline void write_one(const Field* f, int64_t i, int64_t value) noexcept nogil:
    if f.width == 4:
        (<int32_t*>f.data)[i] = <int32_t>value
    elif f.width == 8:
        (<int64_t*>f.data)[i] = value


cdef void write_pad(const Field* f, int64_t first, int64_t end) noexcept nogil:
    cdef int64_t i
    if f.width:
        for i in range(first, end):
            write_one(f, i, f.pad)


cdef void write_slots(const Field* f, int64_t at, const int32_t* table, int64_t bs, int64_t first,
                      int64_t end) noexcept nogil:
    """Slots of positions first .. end - 1 of one sequence, from index `at` on."""
    cdef int64_t index = first // bs, offset = first - index * bs, stop, base
    while first < end:
        stop = bs if end - first > bs - offset else offset + end - first
        base = table[index] * bs
        first += stop - offset
        while offset < stop:
            write_one(f, at, base + offset)
            at += 1
            offset += 1
        offset = 0
        index += 1


cdef void write_range(const Field* f, int64_t at, int64_t first, int64_t end) noexcept nogil:
    if f.width:
        for first in range(first, end):
            write_one(f, at, first)
            at += 1


cdef void write_all(const Field* f, const int64_t* values, int32_t n, int64_t shift) noexcept nogil:
    """values[i] + shift for every row; the compiler makes one vector loop of each branch."""
    cdef int32_t i
    if f.width == 4:
        for i in range(n):
            (<int32_t*>f.data)[i] = <int32_t>(values[i] + shift)
    elif f.width == 8:
        for i in range(n):
            (<int64_t*>f.data)[i] = values[i] + shift


cdef inline void show_row(Wire* w, int32_t i, int64_t handle, uint32_t epoch, uint64_t version, const int32_t* table,
                          int32_t n) noexcept nogil:
    """Bring the block_tables row i up to date with the n entries of a table, and call it dirty."""
    cdef WireRow* row = &w.row[i]
    cdef const Field* f = &w.field[BLOCK_TABLES]
    cdef int64_t at = <int64_t>i * w.table_width
    cdef int32_t k, first = 0
    if row.handle == handle and row.epoch == epoch:
        first = row.written
    else:
        row.csr_blocks = -1
    if f.width:
        for k in range(first, n):
            write_one(f, at + k, table[k])
        write_pad(f, at + n, at + row.written)
    w.seen[i] = version
    row.handle = handle
    row.epoch = epoch
    row.written = n
    row.carried = 0
    w.dirty[w.num_dirty] = i
    w.num_dirty += 1


cdef void sync_rows(Wire* w, const Step* p, const Seqs* s) noexcept nogil:
    """Rewrite the rows whose tables changed."""
    cdef int32_t k, i, slot
    cdef const Seq* q
    for k in range(p.num_changed):
        i = p.changed[k]
        slot = slot_of(p.handle[i])
        q = &s.seq[slot]
        show_row(w, i, q.handle, q.epoch, q.version, seq_table(s, slot), q.num_blocks)


cdef void pad_row(Wire* w, int32_t i) noexcept nogil:
    """Row i shows no sequence."""
    cdef WireRow* row = &w.row[i]
    cdef int64_t at = <int64_t>i * w.table_width
    write_one(&w.field[SEQ_LENS], i, w.field[SEQ_LENS].pad)
    write_one(&w.field[SLOT_IDS], i, w.field[SLOT_IDS].pad)
    write_one(&w.field[LAST_PAGE_LEN], i, w.field[LAST_PAGE_LEN].pad)
    if not w.tracks or (row.handle == -1 and not row.carried):
        return
    write_pad(&w.field[BLOCK_TABLES], at, at + row.written)
    w.seen[i] = 0
    row.handle = -1
    row.written = 0
    row.csr_blocks = -1
    row.carried = 0
    w.dirty[w.num_dirty] = i
    w.num_dirty += 1


cdef void emit_csr(Wire* w, const Step* p, const Seqs* s, const Blocks* b, int32_t pad_rows) noexcept nogil:
    """indptr, indices, last_page_len. Everything behind the first row that changed moves."""
    cdef int32_t i, full, first = p.num_rows
    cdef int64_t at = 0         # counted, not read back: the arrays are in the hands of others
    for i in range(p.num_rows):
        full = <int32_t>whole_blocks(b, p.length[i] + b.block_size - 1)
        write_one(&w.field[LAST_PAGE_LEN], i, p.length[i] - (full - 1) * b.block_size if full else 0)
        if (w.row[i].csr_blocks != full or i >= w.csr_rows) and i < first:
            first = i
        if first == p.num_rows:
            at += full
        w.row[i].csr_blocks = full
    if first == 0:
        write_one(&w.field[INDPTR], 0, 0)
    for i in range(first, p.num_rows):
        write_blocks(&w.field[INDICES], at, seq_table(s, slot_of(p.handle[i])), w.row[i].csr_blocks)
        at += w.row[i].csr_blocks
        write_one(&w.field[INDPTR], i + 1, at)
    for i in range(p.num_rows, pad_rows):
        write_one(&w.field[INDPTR], i + 1, at)
    w.csr_rows = p.num_rows
    w.nnz = at


cdef void write_blocks(const Field* f, int64_t at, const int32_t* table, int32_t n) noexcept nogil:
    cdef int32_t k
    for k in range(n):
        write_one(f, at + k, table[k])


cdef inline int64_t moved(const Seqs* s, int64_t handle) noexcept nogil:
    """How much a token's position is ahead of its place in the table: what was evicted before it."""
    return s.life[slot_of(handle)].evicted if s.evicted_tokens else 0


cdef void emit_slots_and_positions(Wire* w, const Step* p, const Seqs* s, const Blocks* b) noexcept nogil:
    """slot_mapping, positions, cu_q_lens of a batch in which some row has more or less than one new token."""
    cdef int32_t i, q_len, at = 0
    cdef int64_t t = 0, ahead
    for i in range(p.num_rows):
        q_len = 1
        ahead = moved(s, p.handle[i])
        if at < p.num_events and p.event[at].row == i:
            q_len = p.event[at].q_len
            at += 1
        if q_len == 1:
            write_one(&w.field[SLOT_MAPPING], t, p.slot[i])
            write_one(&w.field[POSITIONS], t, ahead + p.length[i] - 1)
        elif q_len:
            if w.field[SLOT_MAPPING].width:         # with layer groups there is no table here
                write_slots(&w.field[SLOT_MAPPING], t, seq_table(s, slot_of(p.handle[i])), b.block_size,
                            p.length[i] - q_len, p.length[i])
            write_range(&w.field[POSITIONS], t, ahead + p.length[i] - q_len, ahead + p.length[i])
        t += q_len
        write_one(&w.field[CU_Q_LENS], i + 1, t)


cdef void wire_emit(Wire* w, const Step* p, const Seqs* s, const Blocks* b, int32_t pad_rows,
                    int64_t pad_tokens) noexcept nogil:
    """Write a committed step into the arrays; rows and tokens up to pad_rows, pad_tokens are padding."""
    cdef int32_t i
    w.num_dirty = 0
    write_one(&w.field[CU_Q_LENS], 0, 0)
    if p.uniform:
        write_all(&w.field[SLOT_MAPPING], p.slot, p.num_rows, 0)
        if s.evicted_tokens == 0:
            write_all(&w.field[POSITIONS], p.length, p.num_rows, -1)
        else:
            for i in range(p.num_rows):
                write_one(&w.field[POSITIONS], i, p.length[i] + moved(s, p.handle[i]) - 1)
        write_range(&w.field[CU_Q_LENS], 1, 1, p.num_rows + 1)
    else:
        emit_slots_and_positions(w, p, s, b)
    write_all(&w.field[SEQ_LENS], p.length, p.num_rows, 0)
    if w.field[SLOT_IDS].width:
        for i in range(p.num_rows):
            write_one(&w.field[SLOT_IDS], i, slot_of(p.handle[i]))
    memset(w.served, 1, p.num_rows)
    for i in range(p.num_events):
        w.served[p.event[i].row] = p.event[i].served
    if w.tracks:
        sync_rows(w, p, s)
    for i in range(p.num_rows, pad_rows):
        pad_row(w, i)
        write_one(&w.field[CU_Q_LENS], i + 1, p.num_tokens)
    write_pad(&w.field[SLOT_MAPPING], p.num_tokens, pad_tokens)
    write_pad(&w.field[POSITIONS], p.num_tokens, pad_tokens)
    if w.field[INDPTR].width:
        emit_csr(w, p, s, b, pad_rows)
