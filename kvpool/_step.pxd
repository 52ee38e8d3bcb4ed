"""One step of a batch: check everything, then commit; and how a pending step ends."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kvpool._args cimport Ints
from kvpool._blocks cimport Blocks
from kvpool._sequence cimport Seqs
from kvpool._types cimport Verdict

cdef extern from *:             # a thread may ask for its plan while another one's `done` lets it pass
    """
    static inline int kv_flag(const int *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
    static inline void kv_set_flag(int *at, int value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
    """
    bint flag "kv_flag"(const bint* at) noexcept nogil
    void set_flag "kv_set_flag"(bint* at, bint value) noexcept nogil


cdef struct Event:              # a row that did more than put one token into its tail
    int32_t row
    int32_t q_len               # tokens served
    int32_t appended            # blocks added at the end of the table
    int32_t replaced            # entries of the undo log that belong to this row
    uint8_t served


cdef struct Replaced:           # undo log: a table entry that a step changed
    int32_t row
    int32_t index               # in the table
    int32_t old
    int32_t new
    int32_t tokens              # to be copied from old to new
    int32_t old_floor           # floor of `old` before


# Rows without an event were served one token. What a step writes and what undoes it stands in arrays by row.
cdef struct Step:
    int64_t* handle             # [max_rows], memory of the plan's array
    int64_t* length             # [max_rows] tokens after the step
    int64_t* slot               # [max_rows] slot of the new token, rows that were served one
    uint64_t* version           # [max_rows] of the sequence's table after the step
    int64_t* prev_step          # [max_rows] last_step of the sequence before, while pending
    Event* event                # [max_rows], num_events valid, by row
    Replaced* log               # [log_room], log_size valid; grows, never shrinks
    int32_t* copies             # [max_rows or more, 3] = (src, dst, num_tokens), memory of the plan's array
    int32_t max_rows
    int32_t num_rows
    int32_t num_events
    int32_t log_size
    int64_t log_room
    int32_t num_copies
    int64_t num_tokens          # tokens served
    int64_t id                  # 0: never stepped
    bint uniform                # every row was served one token
    bint pending                # read by `flag` where the lock is not held, so written by `set_flag`
    bint noted_done             # done was called while an older plan was pending
    Step* newer                 # the next pending step, NULL: this is the newest
    Step* older
    void* plan                  # the Plan whose step this is
    void* wire                  # its Wire


cdef struct Pending:            # the steps that are neither done nor rolled back
    Step* oldest
    Step* newest
    int32_t size


cdef struct Limits:             # what the plan at hand can take
    int64_t max_tokens          # of a batch
    int64_t seq_tokens          # of a sequence after the step
    int32_t table_width         # blocks of a sequence


cdef int step_init(Step* p, int32_t max_rows) noexcept nogil
cdef void step_free(Step* p) noexcept nogil
cdef int step_check(Step* p, Seqs* s, Blocks* b, const Ints* handles, const Ints* num_new, const Limits* limits,
                    bint advance, bint partial, Verdict* verdict) noexcept nogil
cdef int step_check_unshare(Step* p, Seqs* s, Blocks* b, const Ints* handles, const Ints* lens, int64_t first,
                            const Limits* limits, Verdict* verdict) noexcept nogil
cdef void step_undo_check(Step* p, Blocks* b, int32_t keep) noexcept nogil
cdef void step_commit(Step* p, Seqs* s, Blocks* b, const int64_t* handles, bint advance, bint pends) noexcept nogil
cdef void pending_add(Pending* pending, Step* p, Blocks* b) noexcept nogil
cdef void pending_remove(Pending* pending, Step* p, Blocks* b) noexcept nogil
cdef void pending_settle(const Pending* pending, Step* p, Blocks* b) noexcept nogil
cdef void step_release_holds(Step* p, Blocks* b) noexcept nogil
cdef bint step_has_children(const Step* p, const Seqs* s) noexcept nogil
cdef void step_rollback(Step* p, Seqs* s, Blocks* b) noexcept nogil
cdef uint64_t step_fingerprint(const Step* p, uint64_t h, int64_t next_step) noexcept nogil
