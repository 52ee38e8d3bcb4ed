"""Every call that the fuzzer makes into a pool, and everything that it reads of one."""
from libc.stdint cimport int32_t, int64_t

from kvpool._core cimport Pool
from proof.fuzz._books cimport Books, Pending
from proof.fuzz._storage cimport Finding

cdef class Calls:
    cdef Pool pool
    cdef bint counters              # they are compared, too
    cdef list plans
    cdef object do_open, do_fork, do_truncate, do_close, do_commit, do_done, do_rollback  # its methods, looked up once
    cdef int direct_step(self, int32_t k, const int64_t* handles, const int64_t* counts, int32_t n, bint advance,
                         bint partial) except -1
    cdef int direct_fork(self, int64_t handle, int64_t n, int64_t* children) except -1
    cdef int direct_commit(self, int64_t handle, const int32_t* tokens, int64_t n) except -1
    cdef int direct_drain(self) except -1
    cdef int compare_pool(self, const Books* b, Finding* f) noexcept
    cdef int compare_plan(self, int32_t k, const Books* b, const Pending* p, Finding* f) noexcept
    cdef int compare_formats(self, int32_t k, const Books* b, const Pending* p, Finding* f) noexcept
    cdef int update_mirror(self, int32_t k, const Books* b, Pending* p) noexcept
