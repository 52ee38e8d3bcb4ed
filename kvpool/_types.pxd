"""Integer types, limits and the mixing function that every module of the core shares."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    NO_BLOCK = -1
    MAX_REFCOUNT = 1 << 30      # incref refuses to pass it; sequences add at most 2**20 more

cdef enum:                   # what a nogil function reports; the Python face turns it into an exception
    OK = 0
    NO_MEMORY = -1
    SHORT = -2                  # not enough blocks
    BAD_ROW = -3                # the batch is refused; details in the caller's state


cdef enum:                      # first word of every digest entry: which call it was
    OP_ALLOC = 1
    OP_INCREF
    OP_DECREF
    OP_FREE
    OP_COMMIT
    OP_REVIVE
    OP_EVICT
    OP_DRAIN
    OP_OPEN
    OP_FORK
    OP_TRUNCATE
    OP_CLOSE
    OP_STEP
    OP_RESERVE
    OP_ROLLBACK
    OP_DONE
    OP_RESET
    OP_COMPACT
    OP_EVICT_BLOCKS
    OP_UNSHARE


cdef inline uint64_t mix(uint64_t state, uint64_t value) noexcept nogil:
    """One step of the chained digest: rotate, xor, multiply, so that order and position matter."""
    return (((state << 27) | (state >> 37)) ^ value) * 0x9E3779B97F4A7C15ULL
