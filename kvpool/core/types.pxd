"""Integer types, limits, verdicts and the mixing functions that every module of the core shares."""

cdef enum:
    NO_BLOCK = -1
    MAX_REFCOUNT = 1 << 30      # incref refuses to pass it; sequences add at most 2**20 more

cdef enum:                      # what a C function reports: OK, NO_MEMORY, RETRY, or why the call is refused
    OK = 0
    NO_MEMORY
    RETRY                       # the pool changed since the caller looked: nothing was done, look again
    OUT_OF_BLOCKS
    OUT_OF_SEQUENCES
    NEGATIVE_HANDLE
    FOREIGN_HANDLE
    NO_SUCH_SEQUENCE
    STALE_HANDLE
    DUPLICATE_HANDLE
    NO_SUCH_BLOCK
    RESERVED_BLOCK
    DUPLICATE_BLOCK
    UNREFERENCED                # a block without a reference
    REFERENCE_LIMIT
    NO_RAW_REFERENCE
    STILL_SHARED
    NOT_DRAINED                 # its content was evicted, drain_evicted has not told so
    INDEXED                     # a block-level call in a pool whose prefix cache looks after committed blocks
    NOT_INDEXED
    BAD_SHAPE
    BAD_LENGTH
    PENDING_ROW
    LOADING_ROW                 # a sequence that is being loaded
    NOT_LOADING
    BAD_LOAD
    CANNOT_LOAD                 # no hit is possible in this pool
    UNEVEN_LOAD
    NO_STATE_GROUP
    NO_CHECKPOINTS              # of all that there is room for, none may leave
    NEGATIVE_NEW
    SEQ_TOO_LONG
    TABLE_TOO_WIDE
    TOO_MANY_TOKENS
    PROMPT_TOO_LONG
    PLAN_PENDING
    PLAN_NOT_PENDING
    PLAN_NOT_NEWEST
    PLAN_NOTED
    PLAN_HAS_CHILDREN
    NEGATIVE_COUNT
    EVICTED_ROW
    NOT_DONE_YET
    OTHER_TOKENS
    TOO_FEW_TOKENS
    TOO_MANY_LEFT
    UNEVEN_TOKENS
    NOT_REWRITABLE
    BAD_INDEX
    INDEX_ORDER
    NOT_KEPT                    # a block that is blank, or in limbo without content
    NAMED_TWICE                 # a block, in a release
    HAS_CONTENT                 # a block that is committed already
    STEP_PENDING
    SEVERAL_GROUPS              # a call for pools with one layer group
    NOT_FULL                    # tokens are to leave a group that is not full
    NO_FULL_GROUP
    NOT_ALLOCATED
    NO_SUCH_GROUP
    TOO_FEW_BLOCKS
    TOO_MANY_SLOTS
    RAW_ABOVE                   # a block that would have to move, and that a caller refers to
    WINDOW_IS_GONE
    STATE_IS_GONE
    CLOCK_BACK


cdef struct Verdict:            # why a call is refused: what the text of the exception needs, `refuse` writes it
    int reason
    Py_ssize_t row              # of the batch, -1: the argument is no batch
    int64_t value               # what is wrong
    int64_t low                 # the limits, or what else a text of `refuse` names
    int64_t high
    int64_t other
    int32_t arena               # OUT_OF_BLOCKS: of which blocks are missing
    int64_t needed              # blocks, of all rows
    int64_t short_by
    int64_t blank
    int64_t evictable
    int64_t limbo


cdef enum:                      # first word of every digest entry: which call it was
    OP_ALLOC = 1
    OP_INCREF
    OP_DECREF
    OP_FREE
    OP_COMMIT
    OP_EVICT = 7
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
    OP_FLUSH = 21
    OP_TAKE
    OP_TOUCH = 24
    OP_RELEASE
    OP_MARK_CACHED
    OP_UNCACHE
    OP_LOADED
    OP_RESIZE
    OP_KEEP
    OP_TICK
    OP_LIMIT_KEPT
    OP_PIN_TTL
    OPTION = 1 << 8             # beside OP_TOUCH: `blank`, OP_UNCACHE: `keep_place`


cdef inline int refused(Verdict* v, int reason, Py_ssize_t row, int64_t value, int64_t low, int64_t high,
                        int64_t other) noexcept nogil:
    """Write down why a call is refused; returns the reason."""
    v.reason = reason
    v.row = row
    v.value = value
    v.low = low
    v.high = high
    v.other = other
    return reason


cdef inline uint64_t mix(uint64_t state, uint64_t value) noexcept nogil:
    """One step of the chained digest: rotate, xor, multiply, so that order and position matter."""
    return (((state << 27) | (state >> 37)) ^ value) * 0x9E3779B97F4A7C15ULL


cdef inline uint64_t mix_tokens(uint64_t state, const int32_t* tokens, int64_t n) noexcept nogil:
    """A digest of tokens, two lanes of two tokens each, the same in every pool."""
    cdef uint64_t first = state, second = <uint64_t>n
    cdef int64_t i, paired = n & ~<int64_t>3
    for i in range(0, paired, 4):
        first = mix(first, (<uint64_t><uint32_t>tokens[i] << 32) | <uint32_t>tokens[i + 1])
        second = mix(second, (<uint64_t><uint32_t>tokens[i + 2] << 32) | <uint32_t>tokens[i + 3])
    for i in range(paired, n):
        first = mix(first, <uint32_t>tokens[i])
    return mix(first, second)


cdef inline uint64_t mix_bytes(uint64_t state, const unsigned char* data, int64_t n) noexcept nogil:
    cdef int64_t i
    state = mix(state, <uint64_t>n)
    for i in range(n):
        state = mix(state, data[i])
    return state
