"""Index of committed blocks by content: exact, and one overlapped cache line per block."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvpool._blocks cimport Blocks
from kvpool._events cimport Ring
from kvpool._names cimport Name, Names


cdef struct Slot:               # open addressing, linear probing, home position = key & mask
    uint32_t key                # upper half of the chained hash
    int32_t id                  # canonical block, NO_BLOCK: empty
    uint64_t parent             # uid of the parent node


# Invariants, recomputed by index_check:
#   uid[i] != 0 and committed == CANONICAL   <=>  block i is canonical: exactly one slot has id == i
#   num_nodes == number of canonical blocks == number of slots that are not empty
#   no two slots have the same parent and equal tokens
cdef struct Index:
    Slot* slot                  # [mask + 1]
    uint64_t* hash              # [num_blocks] chained hash up to and including the block
    uint64_t* uid               # [num_blocks] node that the block stands for, its own or its canonical's; 0: none
    uint64_t* root              # [num_blocks] uid of its namespace's root
    int32_t* tokens             # [num_blocks, block_size]
    uint8_t* key                # [num_blocks, 16] content keys; NULL: no events wanted
    uint32_t mask
    uint64_t next_uid           # 64 bits: at 10^9 nodes a second they last for 500 years
    uint64_t keep               # bits of the hash that count: all, fewer in tests
    uint64_t seed
    int64_t block_size
    int32_t num_nodes
    int64_t inserted            # counters of use
    int64_t duplicates
    int64_t evicted
    int64_t queries
    int64_t query_tokens
    int64_t hit_tokens
    Names names
    Ring ring


cdef struct Match:              # what index_match found
    int32_t blocks
    int32_t evictable           # of these, on the LRU list
    uint64_t hash               # of the last block looked at, for digests


cdef int index_init(Index* ix, const Blocks* b, uint64_t seed, uint64_t keep, int64_t events) noexcept nogil
cdef void index_free(Index* ix) noexcept nogil
cdef int64_t index_nbytes(const Index* ix, const Blocks* b) noexcept nogil
cdef uint64_t index_root_hash(const Index* ix, const unsigned char* name, Py_ssize_t size) noexcept nogil
cdef Match index_match(const Index* ix, const Blocks* b, uint64_t root, uint64_t root_hash, const int32_t* tokens,
                       int32_t max_blocks, int32_t* ids) noexcept nogil
cdef void index_tell(Index* ix, Blocks* b, int32_t id, const int32_t* tokens) noexcept nogil
cdef void index_publish(Index* ix, Blocks* b, const int32_t* table, int32_t at, uint64_t root,
                        uint64_t root_hash) noexcept nogil
cdef void index_drain(Index* ix, Blocks* b) noexcept nogil
cdef int32_t index_evictable(const Index* ix, const Blocks* b, uint64_t root) noexcept nogil
cdef void index_flush(Index* ix, Blocks* b, uint64_t root) noexcept nogil
cdef uint64_t index_fingerprint(const Index* ix, const Blocks* b, uint64_t h) noexcept nogil
cdef bint index_check(const Index* ix, const Blocks* b, char* finding) noexcept nogil
