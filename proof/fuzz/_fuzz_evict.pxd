"""The fuzzer's driver: tokens that leave sequences."""
from libc.stdint cimport int32_t, int64_t, uint64_t

from proof.fuzz._fuzz_base cimport Word
from proof.fuzz._fuzz_steps cimport Steps


cdef class Evictions(Steps):
    cdef int64_t shorter(self, int32_t slot, uint64_t word) noexcept
    cdef int op_unshare(self, const Word* w) except -1
    cdef int unshare(self, int32_t k, int32_t n) except -1
    cdef int op_compact(self, const Word* w) except -1
    cdef int move_tokens(self, int32_t slot, int64_t length, uint64_t salt) except -1
    cdef int op_leave(self, const Word* w) except -1
