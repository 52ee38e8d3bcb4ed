"""Steps of a pool."""


cdef int pool_step(State* pool, Plan plan, const Ints* rows, const Ints* new, bint advance, bint partial,
                   int64_t pad_rows, int64_t pad_tokens, Verdict* v) noexcept nogil
