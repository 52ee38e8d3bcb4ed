"""The calls that changed a pool, as words in a ring: what `kvpool.replay.calls` writes to a file and replays.

A call is begun, its words are put one after the other, and it is ended with the digest it left; what is put is part of
the ring only then. Where a call is larger than the ring, `record_begin` gives NULL, nothing is put, and the end knows.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvpool._args cimport Ints

cdef enum:
    START = 32                  # beside the OP_* of _types: the pool is new or was reset, a replay may begin here
    FLUSH                       # shares OP_COMMIT in digests
    CLOSE_FINISHED
    DEFERRED

cdef enum:                      # flags of a call
    SAME_ROWS = 1               # step: as in the step before on this plan
    PARTIAL = 2                 # step
    ONE_EACH = 4                # step: a token for each row
    PIN = 1                     # open: only what is cached
    COUNT = 2                   # open: a number of tokens, not the tokens
    ALL = 1                     # flush: of all namespaces
    OLDEST = 1                  # release: committed blocks are evicted before all others

cdef enum:                      # words that a call needs beside its batches
    HEAD = 2                    # call and flags, digest
    BATCH = 3                   # of a batch beside its values: a size, or at most a wide scalar


# The ring is two halves: calls go to one until it is full, then the older half is given up.
cdef struct Record:
    uint32_t* data              # [2, half], NULL: nothing is recorded
    int64_t half                # words, at most 2^30
    int64_t[2] size             # words of each half
    int64_t[2] calls
    int64_t lost                # calls that were given up
    int64_t next_plan           # number of the next plan
    uint32_t epoch              # of the START that plans were numbered since
    int active


cdef uint32_t* record_turn(Record* r, int64_t words) noexcept nogil
cdef void record_too_large(Record* r) noexcept nogil
cdef uint32_t* put_ints(uint32_t* at, const Ints* values) noexcept nogil
cdef uint32_t* put_slots(uint32_t* at, const Ints* handles) noexcept nogil
cdef uint32_t* put_bytes(uint32_t* at, const void* data, int64_t size) noexcept nogil
cdef uint32_t* put_words(uint32_t* at, const void* data, int64_t size) noexcept nogil


cdef inline uint32_t* record_begin(Record* r, int call, int64_t words) noexcept nogil:
    """Where the words of a call go, of which there are at most so many; NULL: they are too many."""
    cdef uint32_t* at = r.data + r.active * r.half + r.size[r.active]
    if r.size[r.active] + HEAD + words > r.half:
        at = record_turn(r, HEAD + words)
        if at == NULL:
            return NULL
    at[0] = call
    return at + HEAD


cdef inline void record_end(Record* r, uint32_t* at, uint64_t digest) noexcept nogil:
    """The call is made, and `at` is behind its last word."""
    cdef uint32_t* half = r.data + r.active * r.half
    if at == NULL:
        record_too_large(r)
        return
    half[r.size[r.active] + 1] = <uint32_t>digest
    r.size[r.active] = (<int64_t>at - <int64_t>half) // <int64_t>sizeof(uint32_t)
    r.calls[r.active] += 1


cdef inline uint32_t* put(uint32_t* at, int64_t value) noexcept nogil:
    """A number of 32 bits."""
    at[0] = <uint32_t>value
    return at + 1


cdef inline uint32_t* put_wide(uint32_t* at, int64_t value) noexcept nogil:
    """A number of 64 bits."""
    return put(put(at, value), value >> 32)


cdef inline void record_one(Record* r, int call, int64_t value, uint64_t digest) noexcept nogil:
    """A call with one number of 64 bits."""
    cdef uint32_t* at
    if r.data != NULL:
        at = record_begin(r, call, 2)
        record_end(r, put_wide(at, value) if at != NULL else NULL, digest)


cdef inline void record_slots(Record* r, int call, const Ints* handles, uint64_t digest) noexcept nogil:
    """A call with a batch of handles."""
    cdef uint32_t* at
    if r.data != NULL:
        at = record_begin(r, call, handles.size + BATCH)
        record_end(r, put_slots(at, handles) if at != NULL else NULL, digest)


cdef inline void record_blocks(Record* r, int call, const Ints* ids, uint64_t digest) noexcept nogil:
    """A call with a batch of blocks."""
    cdef uint32_t* at
    if r.data != NULL:
        at = record_begin(r, call, 2 * ids.size + BATCH)
        record_end(r, put_ints(at, ids) if at != NULL else NULL, digest)
