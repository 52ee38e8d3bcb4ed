"""Namespaces of the prefix cache."""

cdef enum:
    NO_LIMIT = 0x7FFFFFFF


cdef struct Name:               # a namespace, whose bytes stand behind it
    Name* next                  # of its bucket
    uint64_t hash               # of its bytes
    int64_t size
    int64_t users               # open sequences, nodes, a limit; without any it is forgotten
    int64_t references          # the table of names, and events that tell of it; without any its memory is freed
    int64_t counted             # users that `check` found
    int64_t kept                # nodes that a directive keeps,
    int64_t most_kept           # and how many these may be, NO_LIMIT
    int32_t slot                # its place in Names.slot
    bint has_key
    uint8_t[16] key             # SHA-256 of its bytes, cut, if it has one: what the key of a first block begins with


# Invariants: a namespace that is known has users, a slot of its own, and stands in the bucket of its hash
cdef struct Names:
    Name** bucket               # [mask + 1]
    Name** slot                 # [mask + 1] what nodes name a namespace by, NULL: not in use
    int32_t* free_slot          # [mask + 1] of the slots that were ever in use, num_free that are not
    int32_t num_free
    int32_t size
    uint32_t mask
    uint64_t seed               # of their hash, so that nobody can choose names that collide
