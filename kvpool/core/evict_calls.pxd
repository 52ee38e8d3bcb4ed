"""Calls that let tokens leave a sequence; the layer between `PrefixPool` and `kvpool.Pool`."""


cdef class EvictPool(PrefixPool):
    cdef int judge_eviction(self, int32_t slot, int64_t leaving, Py_ssize_t row, Verdict* v) noexcept nogil
    cdef Plan check_plan(self, object plan, str call)
    cdef int keep_plan(self, Plan plan) except -1
    cdef int let_go_of_plan(self, Plan plan) except -1
    cdef void carry_out(self, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows,
                        int64_t pad_tokens) noexcept nogil
    cdef int unshare_rows(self, Plan plan, const Ints* rows, const Ints* lengths, int64_t first,
                          Verdict* v) noexcept nogil
    cdef void copy_known(self, const Step* p) noexcept nogil
    cdef void keep_known(self, const Step* p) noexcept nogil
    cdef int judge_compact(self, Ints* batch, const Ints* lengths, int64_t first, Verdict* v) noexcept nogil
    cdef int compact_rows(self, Ints* batch, const Ints* lengths, int64_t first, Verdict* v) noexcept nogil
    cdef int evict_places(self, int64_t handle, Ints* places, Verdict* v) noexcept nogil
