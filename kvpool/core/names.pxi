"""Namespaces of the prefix cache: bytes that stand for a root. C functions on a `Names` struct.

A namespace is known as long as it has users: the open sequences in it, and the nodes below its root.
"""

ctypedef Name* Entry            # of a table

cdef enum:
    LEAST_NAMES = 16            # names that there is room for at first; a power of two


cdef inline const char* name_bytes(const Name* name) noexcept nogil:
    return <const char*>(name + 1)


cdef int names_init(Names* names, uint64_t seed, bint has_keys) noexcept nogil:
    memset(names, 0, sizeof(Names))
    names.seed = seed
    names.has_keys = has_keys
    return names_grow(names, LEAST_NAMES)


cdef void names_free(Names* names) noexcept nogil:
    cdef int64_t at
    for at in range(names.mask + <int64_t>1 if names.by_bytes != NULL else 0):
        name_let_go(names.by_bytes[at])
    name_let_go(names.spare)
    xfree(names.by_bytes)
    xfree(names.by_uid)
    memset(names, 0, sizeof(Names))


# ---- tables ------------------------------------------------------------------------------------------------

cdef inline uint32_t home_of_uid(const Names* names, uint64_t uid) noexcept nogil:
    return <uint32_t>(mix(names.seed, uid) >> 32) & names.mask


cdef inline uint32_t home_of(const Names* names, Name** table, const Name* name) noexcept nogil:
    """Where the search for a name begins in one of the tables."""
    return <uint32_t>name.hash & names.mask if table == names.by_bytes else home_of_uid(names, name.uid)


cdef void put_name(const Names* names, Name** table, Name* name) noexcept nogil:
    cdef uint32_t at = home_of(names, table, name)
    while table[at] != NULL:
        at = (at + 1) & names.mask
    table[at] = name


cdef void take_out(const Names* names, Name** table, const Name* name) noexcept nogil:
    """Those behind it move up, so there are no tombstones."""
    cdef uint32_t at = home_of(names, table, name), gap
    while table[at] != name:
        at = (at + 1) & names.mask
    gap = at
    while True:
        at = (at + 1) & names.mask
        if table[at] == NULL:
            break
        if ((at - home_of(names, table, table[at])) & names.mask) >= ((at - gap) & names.mask):
            table[gap] = table[at]
            gap = at
    table[gap] = NULL


cdef int names_grow(Names* names, uint32_t room) noexcept nogil:
    """Tables for so many names, a power of two; they are half empty at least."""
    cdef Names old = names[0]
    cdef int64_t at
    names.by_bytes = <Name**>xcalloc(2 * <size_t>room, sizeof(Entry))
    names.by_uid = <Name**>xcalloc(2 * <size_t>room, sizeof(Entry))
    if names.by_bytes == NULL or names.by_uid == NULL:
        xfree(names.by_bytes)
        xfree(names.by_uid)
        names.by_bytes, names.by_uid = old.by_bytes, old.by_uid
        return NO_MEMORY
    names.mask = 2 * room - 1
    for at in range(old.mask + <int64_t>1 if old.by_bytes != NULL else 0):
        if old.by_bytes[at] != NULL:
            put_name(names, names.by_bytes, old.by_bytes[at])
            put_name(names, names.by_uid, old.by_bytes[at])
    xfree(old.by_bytes)
    xfree(old.by_uid)
    return OK


cdef Name* names_find(const Names* names, uint64_t hash, const void* data, int64_t size) noexcept nogil:
    """A namespace by its bytes and their hash; NULL: it has no root."""
    cdef uint32_t at = <uint32_t>hash & names.mask
    cdef Name* name = names.by_bytes[at]
    while name != NULL:
        if name.hash == hash and name.size == size and memcmp(name_bytes(name), data, size) == 0:
            return name
        at = (at + 1) & names.mask
        name = names.by_bytes[at]
    return NULL


cdef void names_look_up(Names* names, uint64_t uid) noexcept nogil:
    cdef uint32_t at = home_of_uid(names, uid)
    while names.by_uid[at].uid != uid:
        at = (at + 1) & names.mask
    names.last_uid = uid
    names.last = names.by_uid[at]


cdef inline Name* names_by_uid(Names* names, uint64_t uid) noexcept nogil:
    """A namespace that is known, by the uid of its root. Nodes that leave one after the other mostly share it."""
    if names.last_uid != uid:
        names_look_up(names, uid)
    return names.last


# ---- names -------------------------------------------------------------------------------------------------

cdef uint64_t names_hash(const Names* names, const void* data, int64_t size) noexcept nogil:
    return mix_bytes(names.seed, <const unsigned char*>data, size)


cdef Name* name_new(Names* names, uint64_t hash, const void* data, int64_t size) noexcept nogil:
    """A name with one reference, in no table; NULL: no memory."""
    cdef Name* name = names.spare
    if name != NULL and name.room >= size:
        names.spare = NULL
        if name.hash == hash and name.size == size and memcmp(name_bytes(name), data, size) == 0:
            return name
    else:
        name = <Name*>xmalloc(sizeof(Name) + <size_t>size)
        if name == NULL:
            return NULL
        name.room = size
    name.uid = 0
    name.hash = hash
    name.size = size
    name.users = name.counted = 0
    name.references = 1
    memcpy(<char*>name_bytes(name), data, size)
    if names.has_keys:
        sha256(NULL, data, size, name.key)
    return name


cdef void name_let_go(Name* name) noexcept nogil:
    if name != NULL:
        name.references -= 1
        if name.references == 0:
            xfree(name)


cdef int names_reserve(Names* names) noexcept nogil:
    """See to it that there is room for one more."""
    return names_grow(names, names.mask + 1) if 2 * <int64_t>names.size > names.mask else OK


cdef void names_add(Names* names, Name* name, uint64_t uid) noexcept nogil:
    """Give a namespace that has none a root, `uid`. The caller has reserved the room, and uses it at once."""
    name.uid = uid
    put_name(names, names.by_bytes, name)
    put_name(names, names.by_uid, name)
    names.size += 1


cdef void name_leave(Names* names, Name* name) noexcept nogil:
    """A sequence or a node less is in a namespace: without any it is forgotten."""
    name.users -= 1
    if name.users == 0:
        take_out(names, names.by_bytes, name)
        take_out(names, names.by_uid, name)
        names.last_uid = 0
        names.size -= 1
        if name.references == 1 and (names.spare == NULL or names.spare.room < name.room):
            name_let_go(names.spare)
            names.spare = name              # so who comes and goes alone does not allocate each time
        else:
            name_let_go(name)


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t names_fingerprint(const Names* names, uint64_t h) noexcept nogil:
    """Whatever the order in the tables."""
    cdef uint64_t all_names = 0
    cdef int64_t at
    for at in range(names.mask + <int64_t>1):
        if names.by_bytes[at] != NULL:
            all_names += mix(mix(0, names.by_bytes[at].uid), names.by_bytes[at].hash)
    return mix(mix(h, names.size), all_names)


cdef void names_count_anew(const Names* names) noexcept nogil:
    """Begin to count users for `names_check`, whatever an earlier count has left."""
    cdef int64_t at
    for at in range(names.mask + <int64_t>1):
        if names.by_bytes[at] != NULL:
            names.by_bytes[at].counted = 0


cdef bint names_count(const Names* names, uint64_t uid, char* finding) noexcept nogil:
    """Count a user, a sequence or a node, for `names_check`; whether its namespace is not known."""
    cdef uint32_t at = home_of_uid(names, uid)
    while names.by_uid[at] != NULL:
        if names.by_uid[at].uid == uid:
            names.by_uid[at].counted += 1
            return False
        at = (at + 1) & names.mask
    return snprintf(finding, FINDING, b"the namespace of root %llu is in use, and forgotten",
                    <unsigned long long>uid) > 0


cdef bint names_check(const Names* names, char* finding) noexcept nogil:
    """Whether the names are not as they should be, after `names_count` for each user."""
    cdef int64_t at, size = 0
    cdef Name* name
    cdef bint last_known = names.last_uid == 0
    for at in range(names.mask + <int64_t>1):
        name = names.by_bytes[at]
        if name == NULL:
            continue
        size += 1
        last_known |= name == names.last and name.uid == names.last_uid
        if names_find(names, name.hash, name_bytes(name), name.size) != name or name.users != name.counted:
            return snprintf(finding, FINDING, b"the namespace of root %llu has %lld users, counted %lld",
                            <unsigned long long>name.uid, <long long>name.users, <long long>name.counted) > 0
    if size != names.size:
        return snprintf(finding, FINDING, b"%lld namespaces are known, the counter says %d", <long long>size,
                        names.size) > 0
    if not last_known:
        return snprintf(finding, FINDING, b"the namespace of root %llu was used last, and forgotten",
                        <unsigned long long>names.last_uid) > 0
    return False
