"""Calls of the prefix cache; the layer between `SequencePool` and `kvpool.Pool`."""


cdef class PrefixPool(SequencePool):
    cdef Index index
    cdef readonly object seed

    cdef int make_root(self, const char* space, int64_t size, uint64_t* root, Verdict* v) noexcept nogil
    cdef void sweep_namespaces(self) noexcept nogil
    cdef object with_tokens(self, object tokens, object namespace, str call, bint take)
    cdef int64_t next_handle(self) noexcept nogil
    cdef int open_prompt(self, const Ints* tokens, const char* space, int64_t space_size, bint take,
                         Verdict* v) noexcept nogil
    cdef void begin(self, int32_t slot, const Ints* tokens, const Match* found, int32_t need, uint64_t root,
                    uint64_t root_hash, bint take) noexcept nogil
    cdef void record_open(self, const Ints* tokens, const char* space, int64_t space_size, int32_t slot,
                          bint take) noexcept nogil
    cdef int64_t match_tokens(self, const Ints* prompt, const char* space, int64_t space_size) noexcept nogil
    cdef int commit_all(self, Ints* rows, Ints* counts, const Ints* tokens, bint even, Verdict* v) noexcept nogil
    cdef int judge_commit(self, const Ints* rows, const Ints* counts, const int32_t* tokens, Py_ssize_t row,
                          int64_t at, Verdict* v) noexcept nogil
    cdef int32_t token_of(self, int32_t slot, int64_t index, const int32_t* tokens, int64_t k) noexcept nogil
    cdef bint same_block(self, int32_t slot, int64_t index, const int32_t* tokens, const int32_t* known) noexcept nogil
    cdef bint same_rows(self, const Ints* rows, const Ints* counts, const int32_t* tokens, int32_t earlier,
                        int32_t slot, int64_t index, const int32_t* own) noexcept nogil
    cdef void commit_row(self, int32_t slot, const int32_t* tokens, int64_t count) noexcept nogil
    cdef void publish(self, int32_t slot) noexcept nogil
    cdef void publish_waiting(self) noexcept nogil
    cdef void record_commit(self, const Ints* rows, const Ints* counts, const Ints* tokens) noexcept nogil
    cdef int flush_blocks(self, const char* space, int64_t size, int32_t* count, Verdict* v) noexcept nogil
    cdef int flush_name(self, Name* name, const char* space, int64_t size, Verdict* v) noexcept nogil
    cdef void flush_root(self, uint64_t root) noexcept nogil
