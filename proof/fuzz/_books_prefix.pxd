"""The judge's books: hits, commits, namespaces."""
from libc.stdint cimport int32_t, int64_t

from proof.fuzz._books cimport Books

cdef int32_t books_hits(const Books* b, int32_t space, const int32_t* tokens, int64_t most, int32_t* ids,
                        int32_t* evictable) noexcept nogil
cdef int books_judge_open(const Books* b, int64_t tokens, int32_t hits, int32_t evictable, bint takes) noexcept nogil
cdef int32_t books_open_prompt(Books* b, int64_t tokens, int32_t space, const int32_t* ids, int32_t hits, bint takes,
                               bint asked) noexcept nogil
cdef void books_begin_batch(Books* b) noexcept nogil
cdef int books_judge_commit(Books* b, int32_t slot, const int32_t* said, int64_t n) noexcept nogil
cdef void books_commit(Books* b, int32_t slot, const int32_t* said, int64_t n) noexcept nogil
cdef void publish(Books* b, int32_t slot) noexcept nogil
cdef void publish_waiting(Books* b) noexcept nogil
cdef int64_t books_flush(Books* b, int32_t space) noexcept nogil
cdef void books_reset(Books* b) noexcept nogil
