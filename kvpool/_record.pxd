"""The calls that changed a pool, as bytes in a ring: what `kvpool.replay.calls` writes to a file and replays."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvpool._args cimport Ints

cdef enum:
    START = 32                  # beside the OP_* of _types: the pool is new or was reset, a replay may begin here
    FLUSH                       # shares OP_COMMIT in digests
    CLOSE_FINISHED
    DEFERRED

cdef enum:                      # how a step is written
    SAME_ROWS = 1               # as in the step before on this plan
    PARTIAL = 2


# The ring is two halves: calls go to one until it is full, then the older half is given up.
cdef struct Record:
    uint8_t* data               # [2, half], NULL: nothing is recorded
    int64_t half                # bytes
    int64_t[2] size             # bytes of each half
    int64_t[2] calls
    int64_t lost                # calls that were given up
    int64_t next_plan           # number of the next plan
    uint32_t epoch              # of the START that plans were numbered since
    int active
    int64_t at                  # byte of `data` at which the running call goes on; -1: it does not fit


cdef void record_begin(Record* r, int call, int64_t values) noexcept nogil
cdef void record_int(Record* r, int64_t value) noexcept nogil
cdef void record_ints(Record* r, const Ints* values, bint slots) noexcept nogil
cdef void record_array(Record* r, const int32_t* values, int64_t n) noexcept nogil
cdef void record_end(Record* r, uint64_t digest) noexcept nogil
cdef void record_batch(Record* r, int call, const Ints* values, bint slots, uint64_t digest) noexcept nogil
cdef void record_two(Record* r, int call, const Ints* rows, const Ints* values, uint64_t digest) noexcept nogil
cdef void record_one(Record* r, int call, int64_t value, uint64_t digest) noexcept nogil
