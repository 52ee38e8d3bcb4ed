"""The fuzzer's driver: the prefix cache, and what is told of it."""
from libc.stdint cimport int32_t, int64_t

from proof.fuzz._fuzz_base cimport Word
from proof.fuzz._fuzz_evict cimport Evictions


cdef class Prefixes(Evictions):
    cdef object said            # tokens that a commit says instead of those that are true
    cdef int32_t* lie           # memory of `said`
    cdef int64_t seen_events    # of those in the books, how many have their keys
    cdef object events          # that are due, as many as the pool keeps
    cdef int64_t lost_events
    cdef int32_t choose_commit(self, const Word* w) noexcept
    cdef int judge_commit(self, int32_t n, bint lying) noexcept
    cdef int op_commit(self, const Word* w) except -1
    cdef int commit(self, const Word* w, int32_t n) except -1
    cdef bint choose_untold(self, int32_t at) noexcept
    cdef int op_unshare_untold(self, const Word* w) except -1
    cdef int op_match(self, const Word* w) except -1
    cdef int op_flush(self, const Word* w) except -1
    cdef int note_events(self) except -1
    cdef int op_events(self) except -1
    cdef int check_events(self) except -1
    cdef int op_ranks(self, const Word* w) except -1
