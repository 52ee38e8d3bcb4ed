"""Namespaces of the prefix cache, and the roots they stand for."""


cdef struct Name:               # a namespace, whose bytes stand behind it
    uint64_t uid                # of its root
    uint64_t hash               # of its bytes
    int64_t size
    int64_t users               # the table of names, and events that tell of it
    uint8_t[16] key             # SHA-256 of its bytes, cut: what the content key of a first block begins with
    bint live                   # seen in the running sweep


# Invariant: list is in ascending order of uid, and table has the place of each name once.
cdef struct Names:
    Name** list                 # [room], size valid
    int32_t* table              # [mask + 1] places in list, -1: empty; linear probing
    int32_t size
    int32_t room
    uint32_t mask
    int64_t sweep_at            # names at which dead ones are looked for
    uint64_t seed               # of their hash, so that nobody can choose names that collide


cdef Name* names_find(const Names* names, const void* data, int64_t size) noexcept nogil
cdef void names_remove(Names* names, Name* name) noexcept nogil
