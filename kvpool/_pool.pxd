"""`Pool`. Other extension modules may hold one, but not reach into it."""
from libc.stdint cimport int32_t, int64_t

from kvpool._args cimport Ints
from kvpool._evict_calls cimport EvictPool
from kvpool._plan cimport Plan
from kvpool._step cimport Step


cdef class Pool(EvictPool):
    cdef Step scratch           # rows of dry runs
    cdef int64_t next_step
    cdef bint steps_pend        # not in_order
    cdef list pending           # plans, oldest first

    cdef int run(self, object plan, object handles, object num_new, str call, bint advance, object partial,
                 object pad_to) except -1
    cdef int run_rows(self, Plan plan, const Ints* rows, const Ints* new, str call, bint advance, bint partial,
                      int64_t pad_rows, int64_t pad_tokens) except -1
    cdef int note_pending(self, Plan plan) except -1
    cdef void carry_out(self, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows, int64_t pad_tokens)
    cdef int end_done(self, Plan plan) except -1
    cdef int end_rollback(self, Plan p) except -1
    cdef str why_not_pending(self)
    cdef void finish(self, Plan plan)
    cdef void unlist(self, Plan plan)
