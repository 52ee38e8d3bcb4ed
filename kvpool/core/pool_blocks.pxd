"""`PoolBlocks`: the blocks of a pool for an engine with block tables and content keys of its own."""


cdef class PoolBlocks:
    cdef BlockPool pool

    cdef int run(self, object ids, str call, int op, bint oldest) except -1
