"""What happened to nodes of the prefix cache: a ring of events in C, which Python is told of when it asks."""
from libc.stdint cimport int32_t, int64_t, uint8_t

from kvpool._names cimport Name

cdef enum:
    STORED
    REMOVED
    CLEARED                     # a namespace
    CLEARED_ALL


cdef struct Note:               # one event; the tokens of a STORED one stand behind it
    uint8_t[16] key
    uint8_t[16] parent
    Name* name                  # STORED, CLEARED: it has this user
    int32_t kind
    bint has_parent


# Invariant: 0 <= size <= room <= limit; the notes are first, first + 1, ... first + size - 1, modulo room.
cdef struct Ring:
    char* data                  # [room] notes of `stride` bytes
    int64_t stride
    int64_t limit               # notes that are kept, 0: nobody wants events
    int64_t room
    int64_t first
    int64_t size
    int64_t lost                # notes that had to make room, or that there was no memory for
    int64_t taken               # notes that a call is turning into events
    unsigned process            # in which it does so


cdef void ring_init(Ring* ring, int64_t limit, int64_t block_size) noexcept nogil
cdef void ring_free(Ring* ring) noexcept nogil
cdef void ring_add(Ring* ring, int kind, const uint8_t* key, const uint8_t* parent, Name* name, const int32_t* tokens,
                   int64_t num_tokens) noexcept nogil
cdef Ring ring_take(Ring* ring) noexcept nogil
cdef void ring_told(Ring* ring, const Ring* taken, int64_t lost) noexcept nogil
cdef object ring_event(const Ring* ring, int64_t k, int64_t block_size)
