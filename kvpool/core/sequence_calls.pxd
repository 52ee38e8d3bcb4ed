"""Sequences of a pool."""

cdef int64_t ONLY_GROUP             # no group was named: the one of a pool that has one


cdef int pool_fork(State* pool, int64_t handle, int64_t count, int64_t* children, Verdict* v) noexcept nogil
cdef int pool_truncate(State* pool, Ints* batch, const Ints* lengths, Verdict* v) noexcept nogil
cdef int pool_table(State* pool, int64_t handle, int64_t group, const int32_t** ids, int64_t* n, int32_t* columns,
                    Verdict* v) noexcept nogil
cdef int pool_close(State* pool, Ints* batch, Verdict* v) noexcept nogil
