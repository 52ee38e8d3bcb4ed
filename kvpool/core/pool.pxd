"""`Pool`. Other extension modules may hold one, but not reach into it."""


cdef class Pool(EvictPool):
    cdef Step scratch           # rows of dry runs
    cdef int64_t next_step
    cdef bint steps_pend        # not in_order
    cdef Pending pending
    cdef list plans             # the Plans of these steps, which must live as long; in no order

    cdef int run(self, object plan, object handles, object num_new, str call, bint advance, object partial,
                 object pad_to) except -1
    cdef int run_plan(self, Plan plan, const Ints* rows, const Ints* new, str call, bint advance, bint partial,
                      int64_t pad_rows, int64_t pad_tokens) except -1
    cdef int run_rows(self, Plan plan, const Ints* rows, const Ints* new, bint advance, bint partial,
                      int64_t pad_rows, int64_t pad_tokens, Verdict* v) noexcept nogil
    cdef int keep_plan(self, Plan plan) except -1
    cdef int let_go_of_plan(self, Plan plan) except -1
    cdef void carry_out(self, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows,
                        int64_t pad_tokens) noexcept nogil
    cdef int can_rows(self, Ints* rows, const Ints* new, Verdict* v) noexcept nogil
    cdef int end_done(self, Plan plan, str call) except -1
    cdef int note_done(self, Plan plan, void** passed, int32_t room, int32_t* count, Verdict* v) noexcept nogil
    cdef void pass_step(self, Step* p) noexcept nogil
    cdef int end_rollback(self, Plan plan, str call) except -1
    cdef int roll_back(self, Plan plan, Verdict* v) noexcept nogil
    cdef int32_t forget_all(self, void** plans) noexcept nogil
    cdef bint find_fault(self, int32_t* seen, char* finding) noexcept nogil
    cdef bint check_pending(self, int32_t* holds, int32_t* floors, char* finding) noexcept nogil
