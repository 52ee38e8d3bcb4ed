"""Namespaces of the prefix cache: bytes, below which a tree of nodes stands. C functions on a `Names` struct."""

cdef enum:
    LEAST_NAMES = 16            # names that there is room for at first; a power of two


cdef inline const char* name_bytes(const Name* name) noexcept nogil:
    return <const char*>(name + 1)


cdef int names_init(Names* names, uint64_t seed) noexcept nogil:
    memset(names, 0, sizeof(Names))
    names.seed = seed
    return names_grow(names, LEAST_NAMES)


cdef void names_free(Names* names) noexcept nogil:
    cdef int32_t i
    for i in range(names.size + names.num_free):
        name_let_go(names.slot[i])
    xfree(names.bucket)
    xfree(names.slot)
    xfree(names.free_slot)
    memset(names, 0, sizeof(Names))


# ---- tables ------------------------------------------------------------------------------------------------

cdef void put_name(const Names* names, Name* name) noexcept nogil:
    cdef Name** bucket = &names.bucket[<uint32_t>name.hash & names.mask]
    name.next, bucket[0] = bucket[0], name


cdef int names_grow(Names* names, uint32_t room) noexcept nogil:
    """Room for so many names, a power of two."""
    cdef Names old = names[0]
    cdef int32_t i
    names.bucket = <Name**>xcalloc(room, sizeof(Name*))
    names.slot = <Name**>xcalloc(room, sizeof(Name*))
    names.free_slot = <int32_t*>xcalloc(room, sizeof(int32_t))
    if names.bucket == NULL or names.slot == NULL or names.free_slot == NULL:
        xfree(names.bucket)
        xfree(names.slot)
        xfree(names.free_slot)
        names[0] = old
        return NO_MEMORY
    names.mask = room - 1
    for i in range(old.size):               # no slot is free: it grows because all are in use
        names.slot[i] = old.slot[i]
        put_name(names, old.slot[i])
    xfree(old.bucket)
    xfree(old.slot)
    xfree(old.free_slot)
    return OK


cdef Name* names_find(const Names* names, uint64_t hash, const void* data, int64_t size) noexcept nogil:
    cdef Name* name = names.bucket[<uint32_t>hash & names.mask]
    while name != NULL and (name.hash != hash or name.size != size or memcmp(name_bytes(name), data, size) != 0):
        name = name.next
    return name


# ---- names -------------------------------------------------------------------------------------------------

cdef uint64_t names_hash(const Names* names, const void* data, int64_t size) noexcept nogil:
    return mix_bytes(names.seed, <const unsigned char*>data, size)


cdef Name* name_new(Names* names, uint64_t hash, const void* data, int64_t size) noexcept nogil:
    """A name with one reference, which is not known yet; NULL: no memory."""
    cdef Name* name = <Name*>xmalloc(sizeof(Name) + <size_t>size)
    if name == NULL:
        return NULL
    name.hash = hash
    name.size = size
    name.users = name.counted = name.kept = 0
    name.most_kept = NO_LIMIT
    name.references = 1
    name.has_key = False
    memcpy(<char*>name_bytes(name), data, size)
    return name


cdef const uint8_t* name_key(Name* name) noexcept nogil:
    """Its key, which it gets when it is asked for first: most requests of a namespace need none."""
    if not name.has_key:
        sha256(NULL, name_bytes(name), name.size, name.key)
        name.has_key = True
    return name.key


cdef void name_let_go(Name* name) noexcept nogil:
    if name != NULL:
        name.references -= 1
        if name.references == 0:
            xfree(name)


cdef int names_add(Names* names, Name* name) noexcept nogil:
    """Make a namespace known, which the caller uses at once."""
    if <uint32_t>names.size > names.mask and names_grow(names, 2 * (names.mask + 1)) != OK:
        return NO_MEMORY
    name.slot = names.size
    if names.num_free:
        names.num_free -= 1
        name.slot = names.free_slot[names.num_free]
    names.slot[name.slot] = name
    put_name(names, name)
    names.size += 1
    return OK


cdef void name_leave(Names* names, Name* name) noexcept nogil:
    cdef Name** place
    name.users -= 1
    if name.users == 0:
        place = &names.bucket[<uint32_t>name.hash & names.mask]
        while place[0] != name:
            place = &place[0].next
        place[0] = name.next
        names.slot[name.slot] = NULL
        names.free_slot[names.num_free] = name.slot
        names.num_free += 1
        names.size -= 1
        name_let_go(name)


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t names_fingerprint(const Names* names, uint64_t h) noexcept nogil:
    """Whatever their slots."""
    cdef uint64_t all_names = 0
    cdef int32_t i
    for i in range(names.size + names.num_free):
        if names.slot[i] != NULL:
            all_names += mix(0, names.slot[i].hash)
            if names.slot[i].most_kept != NO_LIMIT:
                all_names += mix(names.slot[i].hash, names.slot[i].most_kept)
    return mix(mix(h, names.size), all_names)


cdef void names_count_anew(const Names* names) noexcept nogil:
    """Begin to count users for `names_check`, whatever an earlier count has left."""
    cdef int32_t i
    for i in range(names.size + names.num_free):
        if names.slot[i] != NULL:
            names.slot[i].counted = names.slot[i].most_kept != NO_LIMIT


cdef bint names_count(const Names* names, int32_t slot, char* finding) noexcept nogil:
    """Count a user, a sequence or a node, for `names_check`; whether its namespace is not known."""
    if not 0 <= slot < names.size + names.num_free or names.slot[slot] == NULL:
        return found(finding, b"namespace %d is in use, and forgotten", slot)
    names.slot[slot].counted += 1
    return False


cdef bint names_check(const Names* names, char* finding) noexcept nogil:
    """Whether the names are not as they should be, after `names_count` for each user."""
    cdef const Name* name
    cdef int64_t at
    cdef int32_t i, size = 0, places = 0
    for i in range(names.size + names.num_free):
        name = names.slot[i]
        if name == NULL:
            continue
        size += 1
        if (name.slot != i or names_find(names, name.hash, name_bytes(name), name.size) != name
                or name.users != name.counted):
            return found(finding, b"namespace %d has %lld users, counted %lld", i, <long long>name.users,
                         <long long>name.counted)
    for at in range(names.mask + <int64_t>1):
        name = names.bucket[at]
        while name != NULL:
            places += 1
            name = name.next
    if size != names.size or places != size:
        return found(finding, b"%d namespaces are known in %d places, the counter says %d", size, places, names.size)
    return False
