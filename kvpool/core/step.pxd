"""One step of a batch: check everything, then commit; and how a pending step ends."""


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


cdef struct Log:                # what a step replaced in tables over one set of blocks, in order
    Replaced* entry             # [room], size valid; grows, never shrinks
    int32_t size
    int64_t room


# Rows without an event were served one token. What a step writes and what undoes it stands in arrays by row.
cdef struct Step:
    int64_t* handle             # [max_rows], memory of the plan's array
    int64_t* length             # [max_rows] tokens after the step
    int64_t* slot               # [max_rows] slot of the new token, rows that were served one
    uint64_t* seen              # [max_rows] version of the table that the plan shows in the row, memory of the wire
    int32_t* changed            # [max_rows], num_changed valid: rows, ascending, whose tables are other versions now
    int64_t* prev_step          # [max_rows] last_step of the sequence before, while pending
    Event* event                # [max_rows], num_events valid, by row
    Log log
    int32_t* copies             # [max_rows or more, 3] = (src, dst, num_tokens), memory of the plan's array
    int32_t max_rows
    int32_t num_rows
    int32_t num_events
    int32_t num_changed
    int32_t newest              # block that the last row which begins one will get
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
    void* parts                 # its StepPart*, one per layer group


cdef struct Pending:            # the steps that are neither done nor rolled back
    Step* oldest
    Step* newest
    int32_t size


cdef struct Limits:             # what the plan at hand can take
    int64_t max_tokens          # of a batch
    int64_t seq_tokens          # of a sequence after the step
    int32_t table_width         # blocks of a sequence


cdef int step_check(Step* p, Seqs* s, Blocks* b, const Ints* handles, const Ints* num_new, const Limits* limits,
                    bint advance, bint partial, Verdict* verdict) noexcept nogil
cdef void step_commit(Step* p, Seqs* s, Blocks* b, const int64_t* handles, bint advance, bint pends) noexcept nogil
cdef void log_release(const Log* log, Blocks* b) noexcept nogil
