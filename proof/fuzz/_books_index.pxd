"""The judge's books: the index of the prefix cache, and its events."""
from libc.stdint cimport int32_t, int64_t

from proof.fuzz._books cimport Books

cdef int32_t find_node(const Books* b, int64_t parent, const int32_t* tokens) noexcept nogil
cdef void insert_node(Books* b, int32_t i, int64_t parent) noexcept nogil
cdef void enter_space(Books* b, int32_t space) noexcept nogil
cdef void leave_space(Books* b, int32_t space) noexcept nogil
cdef void forget_node(Books* b, int32_t i) noexcept nogil
cdef void tell(Books* b, int32_t kind, int32_t space, int64_t node, int64_t parent,
               const int32_t* tokens) noexcept nogil
