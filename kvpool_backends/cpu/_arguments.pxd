"""The memory that one call is given: buffers taken, described and given back, integers read."""
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, int64_t, uintptr_t


cdef extern from *:             # words that several threads use at once; of gcc and clang
    const int RELAXED "__ATOMIC_RELAXED"
    const int ACQUIRE "__ATOMIC_ACQUIRE"
    const int RELEASE "__ATOMIC_RELEASE"
    int load_int "__atomic_load_n"(int* at, int order) nogil
    void store_int "__atomic_store_n"(int* at, int value, int order) nogil
    int64_t load_size "__atomic_load_n"(int64_t* at, int order) nogil
    void store_size "__atomic_store_n"(int64_t* at, int64_t value, int order) nogil


cdef enum Kind:                 # of the elements of a buffer
    OTHER
    FLOAT64
    FLOAT32
    FLOAT16
    BFLOAT16
    INT64
    INT32
    UINT8
    BOOL

cdef enum:
    MOST_BUFFERS = 9            # that a call takes: q, out, tables, two kinds of lengths, sinks, slopes, mask, scores


cdef struct Extent:
    uintptr_t begin, end        # bytes; equal when there are none


cdef struct Scratch:
    char* data                  # aligned to 64 bytes
    int64_t nbytes              # only the caller that is inside the store changes it, anybody may read it


cdef class Arguments:
    cdef Py_buffer[MOST_BUFFERS] views
    cdef int count
    cdef unsigned busy          # 0, or the number of the process that is inside a call
    cdef str call
    cdef const char* inside     # the same for other threads: its letters are a constant of the module
    cdef list names             # of the buffers
    cdef int begin(self, str call) except -1
    cdef void end(self) noexcept
    cdef void give_back(self) noexcept
    cdef Py_buffer* take(self, object value, str name, int ndim) except NULL
    cdef Py_buffer* take_ints(self, object value, str name, int ndim) except NULL
    cdef int check_shape(self, const Py_buffer* view, str name, int64_t a, int64_t b=*, int64_t c=*) except -1
    cdef int check_output(self, const Py_buffer* view) except -1


cdef class Bases:
    cdef Py_buffer* views
    cdef int64_t count
    cdef int take(self, str call, object arrays, bint writable, bint strided=*) except -1
    cdef int check_apart(self, Arguments arguments) except -1


cdef int kind_of(const Py_buffer* view) noexcept
cdef str format_of(const Py_buffer* view)
cdef str shape_of(const Py_buffer* view)
cdef Extent extent_of(const Py_buffer* view) noexcept nogil
cdef bint overlap(Extent a, Extent b) noexcept nogil
cdef void copy_ints(int64_t* out, const Py_buffer* view) noexcept nogil
cdef char* grow(Scratch* scratch, int64_t nbytes) except NULL
cdef int compare_ids(const void* a, const void* b) noexcept nogil
cdef bint any_outside(const int32_t* ids, int64_t n, int32_t num_blocks) noexcept nogil


cdef inline int64_t int_at(const char* at, int itemsize) noexcept nogil:
    return (<const int64_t*>at)[0] if itemsize == 8 else (<const int32_t*>at)[0]
