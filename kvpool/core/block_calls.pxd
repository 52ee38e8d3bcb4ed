"""`BlockAPI`: the blocks of a pool by id."""


cdef class BlockAPI:
    cdef readonly Pool pool
    cdef State* state
    cdef int32_t number         # of the arena

    cdef Blocks* at(self) noexcept nogil
    cdef int64_t room(self) noexcept nogil
    cdef int run(self, object ids, str call, int op, bint option) except -1
    cdef object each(self, object ids, str call, bint content)
    cdef object alloc_into(self, object out, int64_t count)
    cdef int alloc_to(self, int32_t* out, Py_ssize_t room, int64_t count) except -1
