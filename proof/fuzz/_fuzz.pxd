"""The fuzzer's driver."""
from libc.stdint cimport int64_t, uint32_t

from proof.fuzz._fuzz_base cimport Word
from proof.fuzz._fuzz_calls cimport Others


cdef class Driver(Others):
    cdef void draw(self, int64_t at, Word* w) noexcept nogil
    cdef int observe(self) except -1
    cdef int apply(self, const Word* w) except -1
    cdef int dispatch(self, const Word* w, uint32_t op) except -1
    cdef uint32_t eased(self, const Word* w) noexcept
    cdef int on_sequences(self, const Word* w, uint32_t op) except -1
    cdef int on_pool(self, const Word* w, uint32_t op) except -1
    cdef int on_blocks(self, const Word* w, uint32_t op) except -1
