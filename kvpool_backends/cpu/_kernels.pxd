"""`BlockStore` for other Cython code."""
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t

from kvpool_backends.cpu._arguments cimport Arguments, Bases, Scratch
from kvpool_backends.cpu.kvcpu cimport kv_isa, kv_layer


cdef class BlockStore:
    cdef readonly object spec
    cdef readonly int64_t num_blocks
    cdef const kv_isa* kernels
    cdef int num_threads                # 0: as many as the process uses
    cdef kv_layer* layers               # [num_layers]
    cdef int64_t num_layers
    cdef Bases bases
    cdef Arguments arguments
    cdef Scratch lists                  # integers and options of a call, as the kernels want them
    cdef Scratch tables                 # and its block ids
    cdef Scratch work                   # what kv_attend asks for
    cdef int64_t scores_nbytes          # of `work`, the most that a call's scores took
    cdef object __weakref__
    cdef int threads(self) noexcept
    cdef const kv_layer* layer_of(self, object layer) except NULL
    cdef int64_t* block_list(self, object blocks, int64_t* count) except NULL
    cdef const Py_buffer* take_rows(self, object value, str name, int64_t num_blocks) except NULL
    cdef int check_distinct(self, const int64_t* ids, int64_t n, int64_t* ordered) except -1
    cdef int check_copies(self, const int64_t* rows, int64_t n, int64_t* ordered) except -1
