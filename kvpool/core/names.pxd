"""Namespaces of the prefix cache, and the roots they stand for."""


cdef struct Name:               # a namespace, whose bytes stand behind it
    uint64_t uid                # of its root
    uint64_t hash               # of its bytes
    int64_t size
    int64_t room                # bytes that there is room for
    int64_t users               # open sequences and nodes; without any it is forgotten
    int64_t references          # the tables of names, and events that tell of it; without any its memory is freed
    int64_t counted             # users that `check` found
    uint8_t[16] key             # SHA-256 of its bytes, cut: what the content key of a first block begins with


# Invariants: a namespace that is known has users, and stands once in each table, where linear probing finds it;
#   `last` is one of them, if `last_uid` is not 0
cdef struct Names:
    Name** by_bytes             # [mask + 1], NULL: empty
    Name** by_uid               # [mask + 1]
    int32_t size
    uint32_t mask
    uint64_t last_uid           # of the name that `names_by_uid` gave last, 0: none, or it was forgotten
    Name* last                  # that name
    uint64_t seed               # of their hash, so that nobody can choose names that collide
    Name* spare                 # the last one that was forgotten, in no table; NULL: none
    bint has_keys               # events tell of names


cdef uint64_t names_hash(const Names* names, const void* data, int64_t size) noexcept nogil
cdef Name* names_find(const Names* names, uint64_t hash, const void* data, int64_t size) noexcept nogil
cdef Name* names_by_uid(Names* names, uint64_t uid) noexcept nogil
cdef void name_leave(Names* names, Name* name) noexcept nogil
