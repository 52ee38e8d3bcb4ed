"""The fuzzer's driver, its middle: steps, and how they end."""
from libc.stdint cimport int32_t, int64_t

from proof.fuzz._books cimport Pending
from proof.fuzz._fuzz_base cimport Base, Word


cdef class Steps(Base):
    cdef int32_t choose_rows(self, const Word* w) noexcept
    cdef int32_t free_plan(self, const Word* w) noexcept
    cdef int judge_step(self, int32_t k, int32_t n, int64_t max_tokens, bint advance, bint partial) noexcept
    cdef int op_step(self, const Word* w, bint advance) except -1
    cdef int stepped(self, int32_t k, int32_t n, bint advance, bint padded) except -1
    cdef int check_plan(self, int32_t k, bint padded) except -1
    cdef int run_plan(self, Pending* p) except -1
    cdef int run_until(self, int32_t k) except -1
    cdef int op_execute(self) except -1
    cdef int op_done(self, const Word* w, bint anyone) except -1
    cdef int finish(self, int32_t k) except -1
    cdef void pass_plan(self, int32_t k) noexcept
    cdef int undo_plan(self, int32_t k) except -1
    cdef int op_rollback(self, const Word* w) except -1
    cdef int settle_all(self) except -1
