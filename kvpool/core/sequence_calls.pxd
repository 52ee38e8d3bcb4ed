"""Calls on sequences; the layer between `BlockPool` and `kvpool.Pool`."""


cdef class SequencePool(BlockPool):
    cdef Seqs seqs
    cdef int64_t* deferred      # [deferred_room] handles whose owners were finalized, num_deferred valid
    cdef int64_t num_deferred
    cdef int64_t deferred_room

    cdef int defer(self, int64_t handle, Verdict* v) noexcept nogil
    cdef int64_t get_handle(self, object handle, str call) except? -1
    cdef int read(self, object handle, str call, Seq* q, SeqLife* life) except -1
    cdef int make_children(self, int64_t handle, int64_t count, int64_t* children, Verdict* v) noexcept nogil
    cdef int judge_truncate(self, Ints* batch, const Ints* lengths, Verdict* v) noexcept nogil
    cdef int truncate_rows(self, Ints* batch, const Ints* lengths, Verdict* v) noexcept nogil
    cdef int close_rows(self, Ints* batch, Verdict* v) noexcept nogil
    cdef int close_marked(self, Ints* batch, const unsigned char* finished, Verdict* v) noexcept nogil
    cdef void uncommit(self, int32_t slot, int64_t length) noexcept nogil
    cdef void record_start(self) noexcept nogil
