"""Block-level calls, for engines that keep their own block tables; the base of `kvpool.Pool`."""
from libc.stdint cimport int32_t

from kvpool._args cimport Ints
from kvpool._blocks cimport Blocks
from kvpool._record cimport Record


cdef class BlockPool:
    cdef Blocks blocks
    cdef Record record          # of the calls that changed something
    cdef unsigned busy          # 0, or the number of the process that is inside a call
    cdef bint indexed           # an index of our own looks after committed blocks
    cdef object __weakref__

    cdef int enter(self, str call) except -1
    cdef int refuse_indexed(self, str call) except -1
    cdef int get_ids(self, Ints* ids, object value, str call) except -1
    cdef void release_memory(self)
    cdef void alloc_raw(self, int32_t* ids, int32_t count)
    cdef int drop(self, object ids, str call, bint last) except -1
