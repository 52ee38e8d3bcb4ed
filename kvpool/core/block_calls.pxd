"""`BlockAPI`: the blocks of a pool by id."""


cdef class BlockAPI:
    cdef readonly Pool pool
    cdef State* state

    cdef int run(self, object ids, str call, int op, bint oldest) except -1
    cdef object alloc_into(self, object out, int64_t count)
