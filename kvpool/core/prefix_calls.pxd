"""`PrefixCache`: the prefix cache of a pool."""


cdef class PrefixCache:
    cdef readonly Pool pool
    cdef State* state


cdef int64_t pool_next_handle(State* pool) noexcept nogil
cdef int pool_open(State* pool, const Ints* tokens, const char* space, int64_t size, int64_t cut, bint take,
                   bint reserve, bint load, bint again, bint asked, const Directive* keep, Verdict* v) noexcept nogil
cdef int pool_commit(State* pool, Ints* rows, Ints* counts, const Ints* tokens, bint even,
                     const Directive* keep, Verdict* v) noexcept nogil
cdef int pool_tick(State* pool, int64_t now, Verdict* v) noexcept nogil
cdef int pool_limit_kept(State* pool, const char* space, int64_t size, int64_t blocks, Verdict* v) noexcept nogil
