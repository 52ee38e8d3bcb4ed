"""From Python arguments to C integers: one place that decides what is accepted and how refusals read."""
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, int64_t

cdef enum:
    SMALL = 16                  # integers that an argument holds without memory of its own
    SPARES = 2


cdef struct Spare:              # memory that the arguments of the next call will use, so that a call asks for none
    void* memory[SPARES]


cdef struct Ints:
    # A copy of a batch of integers that came as one int, a list or tuple, or a 1-D int32 / int64 buffer.
    int64_t scalar
    const void* data            # NULL: every element is `scalar`
    Py_ssize_t size             # -1: a scalar for any number of rows
    int width                   # bytes per element: 4 or 8
    Spare* spare                # where `owned` comes from
    void* owned                 # NULL: `small` has them
    int64_t[SMALL] small


cdef int64_t to_int(object value, str call, str name, int64_t low, int64_t high, type huge=*) except? -1
cdef int ints_get(Ints* ints, object value, str call, str name, bint scalar, bint narrow,
                  type huge=*) except -1
cdef int buffer_judge(const Py_buffer* view, str call, str name, bint narrow) except -1
cdef void* ints_room(Ints* ints, Py_ssize_t size, int width, str call, str name) except NULL
cdef int ints_copy(Ints* ints, const void* data, Py_ssize_t size, int width, str call, str name) except -1
cdef int ints_tokens(Ints* tokens, str call) except -1
cdef void* ints_room(Ints* ints, Py_ssize_t size, int width, str call, str name) except NULL
cdef void ints_free(Ints* ints) noexcept nogil
cdef void spare_free(Spare* spare) noexcept nogil
cdef str show(object value)
cdef object new_int32(Py_ssize_t size)
cdef object new_int64(Py_ssize_t size)
cdef void* array_data(object array) except NULL


cdef inline void ints_init(Ints* ints, Spare* spare) noexcept nogil:
    """Nothing read yet: one for every row, which some calls have as their default."""
    ints.scalar = 1
    ints.data = NULL
    ints.size = -1
    ints.width = 8
    ints.spare = spare
    ints.owned = NULL


cdef inline int64_t ints_at(const Ints* ints, Py_ssize_t i) noexcept nogil:
    if ints.data == NULL:
        return ints.scalar
    if ints.width == 8:
        return (<const int64_t*>ints.data)[i]
    return (<const int32_t*>ints.data)[i]
