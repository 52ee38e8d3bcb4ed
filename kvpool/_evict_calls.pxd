"""Calls that let tokens leave a sequence; the layer between `PrefixPool` and `kvpool.Pool`."""
from libc.stdint cimport int32_t, int64_t

from kvpool._plan cimport Plan
from kvpool._prefix_calls cimport PrefixPool


cdef class EvictPool(PrefixPool):
    cdef int judge_eviction(self, int32_t slot, int64_t leaving, str call, Py_ssize_t row) except -1
    cdef Plan check_plan(self, object plan, str call)
    cdef int note_pending(self, Plan plan) except -1
    cdef void carry_out(self, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows, int64_t pad_tokens)
    cdef int explain_shared(self, int32_t id, Py_ssize_t row) except -1
    cdef void copy_known(self, Plan p) noexcept
