"""Calls on sequences; the layer between `BlockPool` and `kvpool.Pool`."""
from libc.stdint cimport int32_t, int64_t

from kvpool._args cimport Ints
from kvpool._block_calls cimport BlockPool
from kvpool._sequence cimport Seqs


cdef class SequencePool(BlockPool):
    cdef Seqs seqs
    cdef list deferred          # handles whose owners were finalized

    cdef int32_t find(self, int64_t handle, str call, Py_ssize_t row) except -1
    cdef int32_t get_one(self, object handle, str call) except -1
    cdef int check_batch(self, Ints* batch, str call) except -1
    cdef int check_slots(self, int64_t count) except -1
    cdef void make_children(self, int32_t parent, int64_t count, int64_t* children) noexcept
    cdef int truncate_rows(self, Ints* batch, const Ints* lengths) except -1
    cdef int close_rows(self, Ints* batch) except -1
    cdef void drain(self)
    cdef void uncommit(self, int32_t slot, int64_t length)
    cdef void record_start(self) noexcept
    cdef void next_stamp(self) noexcept
