"""What happened to nodes of the prefix cache: a ring of events in C, which Python is told of when it asks.

Notes are added under the lock of the pool. `ring_take` takes the whole ring away, under the lock too; its notes become
Python objects after that, while other threads go on.
"""

cdef enum:
    LEAST_NOTES = 64            # notes that there is room for at first


cdef void ring_init(Ring* ring, int64_t limit, int64_t block_size) noexcept nogil:
    memset(ring, 0, sizeof(Ring))
    ring.limit = limit
    ring.stride = (sizeof(Note) + block_size * <int64_t>sizeof(int32_t) + 7) & ~<int64_t>7


cdef inline Note* note_at(const Ring* ring, int64_t k) noexcept nogil:
    return <Note*>(ring.data + (ring.first + k) % ring.room * ring.stride)


cdef void ring_free(Ring* ring) noexcept nogil:
    cdef int64_t k
    for k in range(ring.size):
        name_let_go(note_at(ring, k).name)
    xfree(ring.data)
    ring.data = NULL
    ring.room = ring.first = ring.size = 0


cdef bint ring_grow(Ring* ring) noexcept nogil:
    cdef int64_t k, room = min(max(2 * ring.room, <int64_t>LEAST_NOTES), ring.limit)
    cdef char* data = <char*>xmalloc(room * ring.stride)
    if data == NULL:
        return False
    for k in range(ring.size):
        memcpy(data + k * ring.stride, note_at(ring, k), ring.stride)
    xfree(ring.data)
    ring.data = data
    ring.room = room
    ring.first = 0
    return True


cdef void ring_add(Ring* ring, int kind, const uint8_t* key, const uint8_t* parent, Name* name, const int32_t* tokens,
                   int64_t num_tokens, int32_t group) noexcept nogil:
    """Add a note. The oldest makes room where the ring is full; without memory this one is lost."""
    cdef Note* note
    if ring.limit == 0:
        return
    if ring.size == ring.room and ring.room < ring.limit and not ring_grow(ring):
        ring.lost += 1
        return
    if ring.size == ring.limit:
        name_let_go(note_at(ring, 0).name)
        ring.first = (ring.first + 1) % ring.room
        ring.size -= 1
        ring.lost += 1
    note = note_at(ring, ring.size)
    ring.size += 1
    note.kind = kind
    note.num_tokens = <int32_t>num_tokens
    note.group = group
    note.has_parent = parent != NULL
    note.name = name
    if name != NULL:
        name.references += 1
    if key != NULL:
        memcpy(note.key, key, 16)
    if parent != NULL:
        memcpy(note.parent, parent, 16)
    if num_tokens:
        memcpy(note + 1, tokens, num_tokens * sizeof(int32_t))


cdef Ring ring_take(Ring* ring) noexcept nogil:
    """All that is in the ring, for `ring_event`; the caller frees it."""
    cdef Ring taken = ring[0]
    ring.data = NULL
    ring.room = ring.first = ring.size = ring.lost = 0
    return taken


cdef object ring_event(const Ring* ring, int64_t k, tuple groups):
    """Note k as docs/prefix.md has it; `groups`: of the pool."""
    cdef const Note* note = note_at(ring, k)
    key = (<const char*>note.key)[:16]
    name = name_bytes(note.name)[:note.name.size] if note.name != NULL else None
    if note.kind == STORED:
        parent = (<const char*>note.parent)[:16] if note.has_parent else None
        group = groups[note.group]
        window = group.size if group.kind in ("window", "chunk") else None
        told = as_list(<const int32_t*>(note + 1), note.num_tokens)
        return ("stored", key, parent, told, note.num_tokens, name, note.group, group.kind, window)
    if note.kind == REMOVED:
        return ("removed", key, note.group)
    return ("cleared", name)
