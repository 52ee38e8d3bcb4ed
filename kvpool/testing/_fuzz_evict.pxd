"""The fuzzer's driver: tokens that leave sequences."""
from libc.stdint cimport int32_t, int64_t, uint64_t

from kvpool.testing._fuzz_base cimport Word
from kvpool.testing._fuzz_steps cimport Steps


cdef class Evictions(Steps):
    cdef int64_t rewritten_end(self, int32_t slot, int64_t length) noexcept
    cdef bint is_own(self, int32_t block) noexcept
    cdef int64_t shorter(self, int32_t slot, uint64_t word) noexcept
    cdef int look(self) except -1
    cdef object judge_unshare(self, int32_t n)
    cdef int op_unshare(self, const Word* w) except -1
    cdef int unshare(self, int32_t k, int32_t n) except -1
    cdef object judge_eviction(self, int32_t slot, int64_t length)
    cdef int op_compact(self, const Word* w) except -1
    cdef int compacted(self, int32_t slot, int64_t length, uint64_t salt) except -1
    cdef int op_leave(self, const Word* w) except -1
    cdef void lost(self, int32_t slot, int64_t left) noexcept
