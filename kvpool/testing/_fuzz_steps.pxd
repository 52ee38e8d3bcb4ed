"""The fuzzer's driver, its middle: steps, and how they end."""
from libc.stdint cimport int32_t, int64_t

from kvpool._plan cimport Plan
from kvpool.testing._fuzz_base cimport Base, Word
from kvpool.testing._shadow cimport Pending


cdef class Steps(Base):
    cdef int32_t choose_rows(self, const Word* w) noexcept
    cdef int32_t free_plan(self, const Word* w) noexcept
    cdef int judge_batch(self, int32_t n, int64_t max_tokens, bint advance, bint partial) noexcept
    cdef int64_t judge_row(self, int32_t slot, int64_t new, bint undo) noexcept
    cdef int op_step(self, const Word* w, bint advance) except -1
    cdef int direct_step(self, Plan plan, int32_t n, bint advance, bint partial) except -100
    cdef int stepped(self, int32_t k, int32_t n, bint advance) except -1
    cdef int grown(self, Pending* p, int32_t row, int32_t slot, int64_t new) except -1
    cdef int unshared(self, Pending* p, int32_t row, int32_t slot) except -1
    cdef void replaced(self, Pending* p, int32_t* entry, int32_t now, int32_t valid) noexcept
    cdef int check_plan_arrays(self, Plan plan, Pending* p) except -1
    cdef int check_lengths(self, Plan plan, Pending* p) except -1
    cdef int check_formats(self, Plan plan, Pending* p) except -1
    cdef int run_plan(self, Pending* p) except -1
    cdef int run_until(self, int32_t k) except -1
    cdef void leave_queue(self, int32_t at) noexcept
    cdef int op_execute(self) except -1
    cdef int op_done(self, const Word* w, bint anyone) except -1
    cdef int pass_plans(self) except -1
    cdef object judge_rollback(self, int32_t k)
    cdef int op_rollback(self, const Word* w) except -1
    cdef int taken_back(self, int32_t k) except -1
    cdef void unwrite(self, Pending* p) noexcept
    cdef int settle_all(self) except -1
