"""One step of a batch: check everything, then commit; and how a pending step ends."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvpool._args cimport Ints
from kvpool._blocks cimport Blocks
from kvpool._sequence cimport Seqs


cdef struct StepRow:            # what a step did to one sequence: enough to report it and to undo it
    int64_t handle
    int64_t prev_step           # last_step of the sequence before
    int64_t slot                # physical slot of the new token, rows with q_len 1 that took nothing
    int32_t seq                 # the sequence's slot in the pool
    int32_t q_len               # tokens served
    int32_t appended            # blocks added at the end of the table
    int32_t replaced            # entries of the undo log that belong to this row
    uint8_t served
    uint8_t simple              # one token into the tail, nothing taken


cdef struct Replaced:           # undo log: a table entry that a step changed
    int32_t row
    int32_t index               # in the table
    int32_t old
    int32_t new
    int32_t tokens              # to be copied from old to new
    int32_t old_floor           # floor of `old` before


cdef struct Step:
    StepRow* row                # [max_rows]
    Replaced* log               # [log_size], [log_room] allocated; grows, never shrinks
    int32_t* copies             # [max_rows, 3] = (src, dst, num_tokens), memory of the plan's array
    int32_t max_rows
    int32_t num_rows
    int32_t log_size
    int32_t log_room
    int32_t num_copies
    int64_t num_tokens          # tokens served
    int64_t id                  # 0: never stepped
    bint pending
    bint noted_done             # done was called while an older plan was pending
    bint advance                # step, not reserve


cdef struct Limits:             # what the plan at hand can take
    int64_t max_tokens          # of a batch
    int64_t seq_tokens          # of a sequence after the step
    int32_t table_width         # blocks of a sequence


cdef struct Verdict:            # why a batch is refused
    Py_ssize_t row              # -1: none
    int reason
    int64_t value
    int64_t needed              # blocks, of all rows
    Py_ssize_t short_row        # first row that does not fit, -1: all fit

cdef enum:
    BAD_HANDLE = 1
    DUPLICATE
    NEGATIVE
    SEQ_TOO_LONG
    TABLE_TOO_WIDE
    TOO_MANY_TOKENS


cdef int step_init(Step* p, int32_t max_rows) noexcept nogil
cdef void step_free(Step* p) noexcept nogil
cdef int step_check(Step* p, Seqs* s, Blocks* b, const Ints* handles, const Ints* num_new, Py_ssize_t n,
                    const Limits* limits, bint advance, bint partial, Verdict* verdict) noexcept nogil
cdef void step_undo_check(Step* p, Blocks* b, int32_t keep) noexcept nogil
cdef void step_commit(Step* p, Seqs* s, Blocks* b, int64_t step_id, bint advance) noexcept nogil
cdef void step_release_holds(Step* p, Blocks* b) noexcept nogil
cdef bint step_has_children(const Step* p, const Seqs* s) noexcept nogil
cdef void step_rollback(Step* p, Seqs* s, Blocks* b) noexcept nogil
cdef uint64_t step_fingerprint(const Step* p, const Seqs* s, uint64_t h, int64_t next_step) noexcept nogil
