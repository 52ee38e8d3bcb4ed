"""The judge's books: steps, and how they end."""
from libc.stdint cimport int32_t, int64_t

from proof.fuzz._books cimport Books, Pending

cdef int books_judge_step(Books* b, Pending* p, int32_t n, const int32_t* rows, const int64_t* new, int64_t max_tokens,
                          bint advance, bint partial) noexcept nogil
cdef int books_judge_unshare(Books* b, Pending* p, int32_t n, const int32_t* rows, const int64_t* lens,
                             int64_t first) noexcept nogil
cdef void books_step(Books* b, int32_t k, int32_t n, const int32_t* rows, const int64_t* new,
                     bint advance) noexcept nogil
cdef void books_pass_at_once(Books* b, Pending* p) noexcept nogil
cdef bint books_show(Books* b, Pending* p, int32_t row, bint padded) noexcept nogil
cdef void books_done(Books* b, int32_t k) noexcept nogil
cdef int books_judge_rollback(const Books* b, int32_t k) noexcept nogil
cdef void books_rollback(Books* b, int32_t k) noexcept nogil
cdef int books_judge_compact(const Books* b, int32_t slot, int64_t length, int64_t first) noexcept nogil
