"""Calls of the prefix cache; the layer between `EventPool` and `kvpool.Pool`."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvpool._args cimport Ints
from kvpool._prefix_events cimport EventPool


cdef struct Tokens:             # tokens of a call as int32, checked
    const int32_t* data
    int64_t size
    int32_t* owned              # memory of converted tokens
    Ints ints


cdef class PrefixPool(EventPool):
    cdef readonly object seed
    cdef dict roots             # namespace -> uid of its root
    cdef Py_ssize_t sweep_at    # namespaces at which dead ones are looked for

    cdef int get_tokens(self, Tokens* tokens, object value, str call) except -1
    cdef int check_tokens(self, Tokens* tokens, str call) except -1
    cdef int refuse_unindexed(self) except -1
    cdef int commit_all(self, Ints* rows, Ints* counts, const Tokens* tokens, bint even) except -1
    cdef uint32_t find_root(self, bytes namespace, uint64_t* root_hash)
    cdef uint32_t make_root(self, bytes namespace)
    cdef void sweep_namespaces(self)
    cdef object open_prompt(self, Tokens* tokens, bytes namespace, str call, bint take)
    cdef void record_open(self, const Tokens* tokens, bytes namespace, int32_t slot, bint take) noexcept
    cdef void record_commit(self, const Ints* rows, const Ints* counts, const Tokens* tokens) noexcept
    cdef int judge_commit(self, int32_t slot, const int32_t* tokens, int64_t count, Py_ssize_t row) except -1
    cdef void commit_row(self, int32_t slot, const int32_t* tokens, int64_t count)
    cdef void note_done(self, const int64_t* handles, const int64_t* lengths, int32_t n)
    cdef int32_t flush_root(self, uint32_t root) except -1
    cdef int catch_up(self) except -1
    cdef object with_tokens(self, object tokens, object namespace, str call, bint take)
    cdef bint same_tail(self, int32_t slot, int32_t id, const int32_t* tokens, int64_t start) noexcept
