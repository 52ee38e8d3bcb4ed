"""The fuzzer's driver: every call that no other part of it makes."""
from libc.stdint cimport int32_t, int64_t, uint32_t

from proof.fuzz._fuzz_base cimport Word
from proof.fuzz._fuzz_prefix cimport Prefixes


cdef class Others(Prefixes):
    cdef int op_fork(self, const Word* w) except -1
    cdef void fork_books(self, int32_t parent, int32_t n, int32_t* children) noexcept
    cdef void close_books(self, int32_t slot) noexcept
    cdef void reset_books(self) noexcept
    cdef int64_t telling_length(self, int32_t* slot, uint32_t word) noexcept
    cdef int op_truncate(self, const Word* w) except -1
    cdef int op_close(self, const Word* w, uint32_t op) except -1
    cdef int op_defer(self, const Word* w) except -1
    cdef int settle_deferred(self) except -1
    cdef int op_loaded(self, const Word* w) except -1
    cdef int op_evict(self, const Word* w) except -1
    cdef int op_alloc(self, const Word* w) except -1
    cdef int32_t find_block(self, uint32_t start, uint32_t op) noexcept
    cdef int op_reference(self, const Word* w, uint32_t op) except -1
    cdef int op_can(self, const Word* w) except -1
    cdef int op_reset(self) except -1
    cdef int op_misuse(self, const Word* w) except -1
    cdef int op_read(self, const Word* w) except -1
