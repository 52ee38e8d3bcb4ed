"""The judge's books: which block a hit gets, by the node above it and its tokens; and what consumers are told.

A node is named by a number that is never used again. Its block is in the bucket of (number of the parent, tokens).
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from proof.fuzz._books cimport E_REMOVED, E_STORED, NOBODY, Leaf, Told


cdef inline const int32_t* told(const Books* b, int32_t i) noexcept nogil:
    return b.told + i * b.block_size


cdef inline uint32_t bucket_of(const Books* b, int64_t parent, const int32_t* tokens) noexcept nogil:
    cdef uint64_t h = <uint64_t>parent * 0x9E3779B97F4A7C15ULL
    cdef int64_t k
    for k in range(b.block_size):
        h = (h ^ <uint32_t>tokens[k]) * 0xFF51AFD7ED558CCDULL
        h ^= h >> 32
    return <uint32_t>h & b.mask


cdef int32_t find_node(const Books* b, int64_t parent, const int32_t* tokens) noexcept nogil:
    """The block that has the node, or NOBODY."""
    cdef int32_t i = b.bucket[bucket_of(b, parent, tokens)]
    while i != NOBODY and (b.leaf[i].parent != parent
                           or memcmp(told(b, i), tokens, b.block_size * sizeof(int32_t)) != 0):
        i = b.leaf[i].chain
    return i


cdef void insert_node(Books* b, int32_t i, int64_t parent) noexcept nogil:
    """Block i, committed with tokens that nobody has below this parent, gets a new node."""
    cdef uint32_t at = bucket_of(b, parent, told(b, i))
    cdef Leaf* leaf = &b.leaf[i]
    b.next_node += 1
    leaf.node = b.next_node
    leaf.parent = parent
    leaf.original = NOBODY
    leaf.chain = b.bucket[at]
    b.bucket[at] = i
    b.page[i].own = 1
    b.nodes += 1
    b.inserted += 1
    enter_space(b, leaf.space)
    tell(b, E_STORED, leaf.space, leaf.node, 0 if parent == b.root[leaf.space] else parent, told(b, i))


cdef void enter_space(Books* b, int32_t space) noexcept nogil:
    """A namespace has a user more."""
    b.users[space] += 1


cdef void leave_space(Books* b, int32_t space) noexcept nogil:
    """It has a user less, and is forgotten without any."""
    b.users[space] -= 1
    if b.users[space] == 0:
        b.root[space] = 0
        b.num_roots -= 1
        b.forgotten += 1


cdef void forget_node(Books* b, int32_t i) noexcept nogil:
    """The node of block i is gone."""
    cdef int32_t* link = &b.bucket[bucket_of(b, b.leaf[i].parent, told(b, i))]
    while link[0] != i:
        link = &b.leaf[link[0]].chain
    link[0] = b.leaf[i].chain
    tell(b, E_REMOVED, b.leaf[i].space, b.leaf[i].node, 0, NULL)
    b.leaf[i].node = 0
    b.page[i].own = 0
    b.nodes -= 1
    leave_space(b, b.leaf[i].space)


cdef void tell(Books* b, int32_t kind, int32_t space, int64_t node, int64_t parent,
               const int32_t* tokens) noexcept nogil:
    """An event, the newest `event_room` of which are kept."""
    cdef Told* event
    cdef int64_t at
    if b.event_room == 0:
        return
    at = b.events_made % b.event_room
    event = &b.event[at]
    event.kind = kind
    event.space = space
    event.node = node
    event.parent = parent
    if tokens != NULL:
        memcpy(b.event_tokens + at * b.block_size, tokens, b.block_size * sizeof(int32_t))
    b.events_made += 1
