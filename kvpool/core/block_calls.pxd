"""Block-level calls, for engines that keep their own block tables; the base of `kvpool.Pool`."""


cdef class BlockPool:
    cdef Lock mutex
    cdef Spare spare            # memory for arguments
    cdef Blocks all_blocks
    cdef Record record          # of the calls that changed something
    cdef bint indexed           # an index of our own looks after committed blocks
    cdef object __weakref__

    cdef int lock(self, str call) except -1
    cdef int lock_open_or_not(self, str call) except -1
    cdef void unlock(self) noexcept nogil
    cdef void catch_up(self) noexcept nogil
    cdef void release_memory(self) noexcept nogil
    cdef int32_t next_block(self) noexcept nogil
    cdef object alloc_into(self, object out, int64_t count)
    cdef int alloc_raw(self, int32_t* ids, int64_t count, Verdict* v) noexcept nogil
    cdef int incref_ids(self, Ints* ids, Verdict* v) noexcept nogil
    cdef int drop(self, object ids, str call, bint last) except -1
    cdef int drop_ids(self, Ints* ids, bint last, Verdict* v) noexcept nogil
    cdef int mark_committed_ids(self, Ints* ids, Verdict* v) noexcept nogil
    cdef int revive_ids(self, Ints* ids, Verdict* v) noexcept nogil
    cdef void evict_oldest(self, int64_t count) noexcept nogil
    cdef int drain_dropped(self, int32_t* ids, int32_t count, Verdict* v) noexcept nogil
    cdef int64_t count_references(self, int64_t* counts, int64_t size) noexcept nogil
