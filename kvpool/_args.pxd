"""From Python arguments to C integers: one place that decides what is accepted and how refusals read."""
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t


cdef struct Ints:
    # A batch of integers that came as one int, a list or tuple, or a 1-D int32 / int64 buffer.
    int64_t scalar
    const void* data            # NULL: every element is `scalar`
    Py_ssize_t size             # -1: a scalar for any number of rows
    int width                   # bytes per element: 4 or 8
    void* owned                 # memory of a converted list
    bint held                   # `view` must be released
    Py_buffer view


cdef int64_t to_int(object value, str call, str name, int64_t low, int64_t high, type huge=*) except? -1
cdef int ints_get(Ints* ints, object value, str call, str name, bint scalar, bint narrow,
                  type huge=*) except -1
cdef void ints_free(Ints* ints) noexcept
cdef str show(object value)
cdef object new_int32(Py_ssize_t size)
cdef object new_int64(Py_ssize_t size)
cdef void* array_data(object array) except NULL


cdef inline int64_t ints_at(const Ints* ints, Py_ssize_t i) noexcept nogil:
    if ints.data == NULL:
        return ints.scalar
    if ints.width == 8:
        return (<const int64_t*>ints.data)[i]
    return (<const int*>ints.data)[i]
