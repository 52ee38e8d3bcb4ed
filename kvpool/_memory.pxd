"""Where all memory of the core comes from: libc's functions, which a build with KVPOOL_FAULTS makes fail on demand."""
from libc.stdlib cimport calloc, free, malloc, realloc

cdef extern from *:
    """
    #ifdef KVPOOL_FAULTS
    #define KV_FAULTS 1
    #else
    #define KV_FAULTS 0
    #endif
    """
    const bint FAULTS "KV_FAULTS"       # a constant: without faults the compiler leaves plain calls of libc


cdef bint refused() noexcept nogil
cdef void counted(int blocks) noexcept nogil


cdef inline void* xmalloc(size_t size) noexcept nogil:
    if FAULTS and refused():
        return NULL
    return malloc(size)


cdef inline void* xcalloc(size_t count, size_t size) noexcept nogil:
    if FAULTS and refused():
        return NULL
    return calloc(count, size)


cdef inline void* xrealloc(void* memory, size_t size) noexcept nogil:
    """Like the others: `memory` stays as it was when there is none."""
    if FAULTS:
        if refused():
            return NULL
        if memory != NULL:
            counted(-1)                 # one block before, one after
    return realloc(memory, size)


cdef inline void xfree(void* memory) noexcept nogil:
    if FAULTS and memory != NULL:
        counted(-1)
    free(memory)
