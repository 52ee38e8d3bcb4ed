"""Namespaces of the prefix cache: bytes that stand for a root. C functions on a `Names` struct."""

ctypedef Name* Entry            # of the list

cdef enum:
    LEAST_NAMES = 16            # names that there is room for at first; a power of two
    SWEEP = 1024                # fewest names that are looked through for dead ones


cdef inline const char* name_bytes(const Name* name) noexcept nogil:
    return <const char*>(name + 1)


cdef int names_init(Names* names, uint64_t seed) noexcept nogil:
    names.list = <Name**>xmalloc(LEAST_NAMES * sizeof(Entry))
    names.table = <int32_t*>xmalloc(2 * LEAST_NAMES * sizeof(int32_t))
    if names.list == NULL or names.table == NULL:
        names_free(names)
        return NO_MEMORY
    names.room = LEAST_NAMES
    names.mask = 2 * LEAST_NAMES - 1
    names.size = 0
    names.sweep_at = SWEEP
    names.seed = seed
    rebuild(names)
    return OK


cdef void names_free(Names* names) noexcept nogil:
    names_clear(names)
    xfree(names.list)
    xfree(names.table)
    memset(names, 0, sizeof(Names))


cdef void rebuild(Names* names) noexcept nogil:
    """Make the table anew from the list."""
    cdef int32_t k
    memset(names.table, 0xFF, (names.mask + <size_t>1) * sizeof(int32_t))
    for k in range(names.size):
        enter(names, k)


cdef void enter(Names* names, int32_t k) noexcept nogil:
    cdef uint32_t at = <uint32_t>names.list[k].hash & names.mask
    while names.table[at] >= 0:
        at = (at + 1) & names.mask
    names.table[at] = k


cdef Name* names_find(const Names* names, const void* data, int64_t size) noexcept nogil:
    """A namespace by its bytes; NULL: it has no root."""
    cdef uint64_t h = mix_bytes(names.seed, <const unsigned char*>data, size)
    cdef uint32_t at = <uint32_t>h & names.mask
    cdef Name* name
    while names.table[at] >= 0:
        name = names.list[names.table[at]]
        if name.hash == h and name.size == size and memcmp(name_bytes(name), data, size) == 0:
            return name
        at = (at + 1) & names.mask
    return NULL


cdef Name* names_by_uid(const Names* names, uint64_t uid) noexcept nogil:
    """A namespace by the uid of its root; NULL: it was forgotten. O(log names)."""
    cdef int32_t low = 0, high = names.size, middle
    while low < high:
        middle = low + (high - low) // 2
        if names.list[middle].uid < uid:
            low = middle + 1
        else:
            high = middle
    return names.list[low] if low < names.size and names.list[low].uid == uid else NULL


cdef int names_grow(Names* names) noexcept nogil:
    cdef Name** list_ = <Name**>xrealloc(names.list, 2 * <size_t>names.room * sizeof(Entry))
    cdef int32_t* table
    if list_ == NULL:
        return NO_MEMORY
    names.list = list_
    table = <int32_t*>xrealloc(names.table, 4 * <size_t>names.room * sizeof(int32_t))
    if table == NULL:
        return NO_MEMORY
    names.table = table
    names.room *= 2
    names.mask = 2 * <uint32_t>names.room - 1
    rebuild(names)
    return OK


cdef Name* name_new(const Names* names, const void* data, int64_t size) noexcept nogil:
    """A name with one user, in no table; NULL: no memory."""
    cdef Name* name = <Name*>xmalloc(sizeof(Name) + <size_t>size)
    if name == NULL:
        return NULL
    name.uid = 0
    name.hash = mix_bytes(names.seed, <const unsigned char*>data, size)
    name.size = size
    name.users = 1
    name.live = False
    memcpy(<char*>name_bytes(name), data, size)
    sha256(NULL, data, size, name.key)
    return name


cdef void name_let_go(Name* name) noexcept nogil:
    if name != NULL:
        name.users -= 1
        if name.users == 0:
            xfree(name)


cdef int names_reserve(Names* names) noexcept nogil:
    """See to it that there is room for one more."""
    return names_grow(names) if names.size == names.room else OK


cdef void names_add(Names* names, Name* name, uint64_t uid) noexcept nogil:
    """Give a namespace that has none a root, `uid`, the largest so far. The caller has reserved the room."""
    name.uid = uid
    names.list[names.size] = name
    enter(names, names.size)
    names.size += 1


cdef void names_remove(Names* names, Name* name) noexcept nogil:
    cdef int32_t k
    for k in range(names.size):
        names.list[k].live = names.list[k] != name
    drop_dead(names)


cdef void names_keep_live(Names* names) noexcept nogil:
    """Forget the names that were not marked; look for such again when there are twice as many."""
    drop_dead(names)
    names.sweep_at = max(<int64_t>SWEEP, 2 * <int64_t>names.size)


cdef void drop_dead(Names* names) noexcept nogil:
    cdef int32_t k, kept = 0
    for k in range(names.size):
        if names.list[k].live:
            names.list[k].live = False
            names.list[kept] = names.list[k]
            kept += 1
        else:
            name_let_go(names.list[k])
    names.size = kept
    rebuild(names)


cdef void names_clear(Names* names) noexcept nogil:
    cdef int32_t k
    for k in range(names.size):
        name_let_go(names.list[k])
    names.size = 0
    if names.table != NULL:
        rebuild(names)
