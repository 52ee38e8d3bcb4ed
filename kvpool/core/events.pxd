"""What happened to nodes of the prefix cache: a ring of events in C, which Python is told of when it asks."""

cdef enum:
    STORED
    REMOVED
    CLEARED                     # a namespace, or all


cdef struct Note:               # one event; the tokens of a STORED one stand behind it
    uint8_t[16] key
    uint8_t[16] parent
    Name* name                  # STORED, CLEARED: it has this reference
    int32_t kind
    int32_t num_tokens
    int32_t group               # -1: of none
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
