"""`State`: all that the calls of a pool read and change, and the lock around it."""


cdef struct State:
    Lock mutex
    Spare spare                 # memory for arguments
    Blocks blocks
    Seqs seqs
    Groups* groups              # layer groups
    int32_t[MAX_ARENAS] sizes   # blocks of each arena, num_arenas valid: here, for who has not taken the pool
    int32_t num_arenas
    Index index
    int64_t* deferred           # [deferred_room] handles whose owners were finalized, num_deferred valid
    int64_t num_deferred
    int64_t deferred_room
    Step scratch                # rows of dry runs
    int64_t next_step
    bint steps_pend             # not in_order
    Pending pending


cdef class Plan


cdef class Pool:                # here, as its parts are other classes' business; the calls stand in pool.pxi
    cdef State state
    cdef list plans             # the Plans of pending steps, which must live as long; in no order
    cdef readonly object options
    cdef object __weakref__

    cdef int init(self, tuple given) except -1
    cdef Plan check_plan(self, object plan, str call)
    cdef int keep_plan(self, Plan plan) except -1
    cdef int let_go_of_plan(self, Plan plan) except -1
    cdef int run(self, object plan, object handles, object num_new, str call, bint advance, object partial,
                 object pad_to) except -1
    cdef int run_plan(self, Plan plan, const Ints* rows, const Ints* new, str call, bint advance, bint partial,
                      int64_t pad_rows, int64_t pad_tokens) except -1
    cdef int end_done(self, Plan plan) except -1
    cdef int end_rollback(self, Plan plan) except -1
    cdef dict resize_arenas(self, object num_blocks, object arena, int32_t* to, int64_t room_there)


cdef int refuse(str call, const Verdict* v) except -1
cdef int pool_enter(State* pool, str call) except -1
cdef void pool_leave(State* pool) noexcept nogil
