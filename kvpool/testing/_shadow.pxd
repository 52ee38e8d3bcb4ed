"""What the fuzzer believes about a pool: lengths, tables, references, and what every slot of a storage holds."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvpool._blocks cimport Blocks
from kvpool._sequence cimport Seqs

cdef enum:
    MAX_PLANS = 4
    POISON_LOW = 0x0BADC0DE     # what a freed block holds, below the block's id


cdef struct Line:               # one open sequence; its index is its slot in the pool
    int64_t handle              # -1: none
    int64_t length
    int32_t blocks              # in its table
    int32_t known               # tokens of it that are decided: the prompt, or all that were written
    int64_t committed           # tokens made known to the prefix cache
    int64_t done                # tokens that no pending step still has to write, while it is part of one
    int64_t forked_at
    int64_t evicted             # tokens that left
    int64_t point               # length, these included, when they did
    int64_t row_step            # newest step that it was a row of
    int64_t inherit             # pending step whose work it got by a fork
    int32_t space               # its namespace
    int32_t at                  # its place in `live`


cdef struct Pending:            # one plan
    int64_t step                # the driver's own number, 0: not pending
    bint executed
    bint noted
    int32_t rows
    int64_t tokens
    int64_t* handle             # [max_rows]
    int64_t* length             # [max_rows] after the step
    int64_t* before             # [max_rows] before it
    int64_t* row_step           # [max_rows] of the sequences before it
    int32_t* blocks             # [max_rows] in the tables before it
    int32_t* table              # [max_rows, width] tables before it, full mode
    int32_t* mirror             # [max_rows, width] tables as a consumer of dirty_rows has them
    int32_t* copies             # [hold_room, 3] as they are due
    int32_t* held               # [hold_room] blocks that the step replaced
    int32_t* held_tokens        # [hold_room] tokens that it reads of each
    int64_t* slot               # [max_tokens] where each new token goes
    uint64_t* stamp             # [max_tokens] what it is
    uint64_t* expect            # [max_rows, width * block_size] what each row has to read, full mode
    int32_t num_copies
    int32_t num_held


cdef struct Finding:            # why a check failed; the words are made by who reports it
    const char* what
    int64_t a
    int64_t b
    int64_t c


cdef struct Shadow:
    Line* line                  # [max_seqs]
    int32_t* live               # [max_seqs] slots of open sequences
    int32_t num_live
    int32_t* table              # [max_seqs, width]
    uint64_t* stamp             # [max_seqs, width * block_size] what each position has to read
    int32_t* token              # [max_seqs, width * block_size]
    uint64_t* real              # [num_blocks * block_size] the storage, as the backend has filled it
    uint64_t* virt              # the same as if every pending plan had run; full mode
    uint64_t* raw_stamp         # what blocks with raw references have to hold; full mode
    int32_t* raw                # [num_blocks] raw references
    int32_t* count              # [num_blocks] references, recomputed
    int32_t* hold               # [num_blocks] holds, recomputed
    int32_t* floor              # [num_blocks] floors, recomputed
    int64_t* entered            # [num_blocks] when a block became evictable
    uint8_t* place              # [num_blocks] before the last call
    uint8_t* seen               # [num_blocks]
    Pending[MAX_PLANS] plan
    int32_t[MAX_PLANS] queue    # pending plans, oldest first
    int32_t num_queue
    int32_t num_blocks
    int32_t reserved
    int32_t max_seqs
    int32_t width               # blocks of a table
    int32_t max_rows
    int32_t max_tokens
    int32_t hold_room
    int64_t block_size
    int64_t capacity            # tokens of a sequence
    int64_t clock               # calls so far
    int32_t low_blank           # blank blocks after the call before
    bint full                   # check everything after every call
    Finding finding


cdef inline uint64_t poison(int64_t slot) noexcept nogil:
    return (<uint64_t>POISON_LOW << 32) | <uint64_t>slot


cdef inline int32_t* line_table(const Shadow* s, int32_t slot) noexcept nogil:
    return s.table + <int64_t>slot * s.width


cdef inline uint64_t* line_stamp(const Shadow* s, int32_t slot) noexcept nogil:
    return s.stamp + slot * s.capacity


cdef inline int32_t* line_token(const Shadow* s, int32_t slot) noexcept nogil:
    return s.token + slot * s.capacity


cdef int shadow_init(Shadow* s, const Blocks* b, const Seqs* q, int32_t max_rows, int32_t max_tokens,
                     bint full) noexcept nogil
cdef void shadow_free(Shadow* s) noexcept nogil
cdef void shadow_poison(Shadow* s, int32_t block) noexcept nogil
cdef void shadow_execute(Shadow* s, Pending* p, uint64_t* store) noexcept nogil
cdef int shadow_read(Shadow* s, Pending* p) noexcept nogil
cdef void shadow_observe(Shadow* s, const Blocks* b) noexcept nogil
cdef int shadow_check(Shadow* s, const Blocks* b, const Seqs* q) noexcept nogil
cdef int found(Shadow* s, const char* what, int64_t a, int64_t b, int64_t c) noexcept nogil
