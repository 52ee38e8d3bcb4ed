"""One step of a batch: check everything, then commit; and how a pending step ends.

A `Step` is what a plan did to lengths, a `StepPart` (groups.pxd) what it did to the tables of one
group: a `Change` for each row whose table changed, and a `Log` of the ids that were replaced, each
with a hold on the old block. An `Event` is a row that did more than put one token into its tails.

    log.size == sum of change.replaced, in the order of the changes
    hold of a block == log entries of pending steps that name it as old
    floor of a block == max of their tokens, 0 if it has no hold
    ids of pending steps ascend; oldest_pending and newest_pending of each arena are the ends

Why it is so:

- Two passes. The check moves reference counts, holds and floors as if the rows had been served in
  order, because what a row may write depends on what the rows before it gave up. It takes nothing.
  So a refusal undoes the log, and the commit cannot fail.
- The log of the check is the log of the rollback. `old_floor` undoes a check, which ends in reverse
  order at once. A step ends when others are pending, and the maximum of several copies cannot be
  undone from one of them: `clear_floors` and `raise_floors` recompute those that its log touched.
- A step is done in order. Blocks wait in limbo for the newest step, so an older one that is still
  out must hold them back; a `done` that comes early is noted until its turn.
- Only the newest step can be rolled back, since later ones build on its tables, and none of which a
  fork is open: the child shares what it would take back. O(max_seqs) where forks were made at all.
- A steady batch (one token for each row, into tails that only it uses) has neither events nor
  changes, so what a step keeps for its undo is a handle and a number per row.
- `give_up_copy`: a block in use whose fill was rolled back must not look as if it waited for one.
"""


cdef struct Event:              # a row that did more than put one token into its tails
    int32_t row
    int32_t q_len               # tokens served
    int32_t appended            # blocks of the pool for which its tables got room
    uint8_t served


cdef struct Replaced:           # undo log: a table entry that a step changed
    int32_t row
    int32_t index               # in the table
    int32_t old
    int32_t new
    int32_t tokens              # to be copied from old to new
    int32_t old_floor           # floor of `old` before


cdef struct Log:                # what a step replaced in the tables of a layer group, in order
    Replaced* entry             # [room], size valid; grows, never shrinks
    int32_t size
    int64_t room


cdef struct StepPart            # what a step does in one layer group


# Rows without an event were served one token. What a step writes and what undoes it stands in arrays by row.
cdef struct Step:
    int64_t* handle             # [max_rows], memory of the plan's array
    int64_t* length             # [max_rows] tokens after the step
    int64_t* prev_step          # [max_rows] last_step of the sequence before, while pending
    Event* event                # [max_rows], num_events valid, by row
    StepPart** part             # one per layer group
    int32_t max_rows
    int32_t num_rows
    int32_t num_events
    int64_t num_tokens          # tokens served
    int64_t id                  # 0: never stepped
    bint uniform                # every row was served one token
    bint pending                # read by `flag` where the lock is not held, so written by `set_flag`
    bint noted_done             # done was called while an older plan was pending
    Step* newer                 # the next pending step, NULL: this is the newest
    Step* older
    void* plan                  # the Plan whose step this is


cdef struct Pending:            # the steps that are neither done nor rolled back
    Step* oldest
    Step* newest
    int32_t size


cdef struct Limits:             # what the plan at hand can take
    int64_t max_tokens          # of a batch
    int64_t seq_tokens          # that a sequence holds after the step
    int64_t length              # of a sequence after the step, evicted tokens included
    int64_t table_blocks        # of the pool, for which its tables have room


cdef void log_release(const Log* log, Blocks* b) noexcept nogil
