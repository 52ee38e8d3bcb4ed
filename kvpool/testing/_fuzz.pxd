"""The fuzzer's driver."""
from libc.stdint cimport int32_t, int64_t, uint32_t

from kvpool.testing._fuzz_base cimport Word
from kvpool.testing._fuzz_evict cimport Evictions


cdef class Driver(Evictions):
    cdef void draw(self, int64_t at, Word* w) noexcept nogil
    cdef int observe(self) except -1
    cdef int apply(self, const Word* w) except -1
    cdef uint32_t eased(self, const Word* w) noexcept
    cdef int on_sequences(self, const Word* w, uint32_t op) except -1
    cdef int on_pool(self, const Word* w, uint32_t op) except -1
    cdef int on_blocks(self, const Word* w, uint32_t op) except -1
    cdef int op_fork(self, const Word* w) except -1
    cdef int direct_fork(self, int32_t parent, int64_t n) except -1
    cdef int op_truncate(self, const Word* w) except -1
    cdef int op_close(self, const Word* w, uint32_t op) except -1
    cdef int op_commit(self, const Word* w) except -1
    cdef int direct_commit(self, int64_t handle, int64_t n) except -1
    cdef int op_match(self, const Word* w) except -1
    cdef int op_evict(self, const Word* w) except -1
    cdef int op_flush(self, const Word* w) except -1
    cdef int op_alloc(self, const Word* w) except -1
    cdef int32_t find_block(self, uint32_t start, uint32_t op) noexcept
    cdef int op_reference(self, const Word* w, uint32_t op) except -1
    cdef int op_can(self, const Word* w) except -1
    cdef int op_reset(self) except -1
    cdef int op_misuse(self, const Word* w) except -1
