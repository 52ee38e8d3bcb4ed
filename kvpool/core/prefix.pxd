"""Index of committed blocks by content: exact, and one overlapped cache line per block."""


cdef struct Bucket:             # open addressing, linear probing, home position = key & mask
    uint32_t key                # upper half of the chained hash
    int32_t id                  # canonical block, NO_BLOCK: empty
    uint64_t parent             # uid of the parent node


# Invariants, recomputed by index_check:
#   uid[i] != 0 and committed == CANONICAL   <=>  block i is canonical: exactly one bucket has id == i
#   num_nodes == number of canonical blocks == number of buckets that are not empty
#   no two buckets have the same parent and equal tokens
cdef struct Index:
    Bucket* bucket              # [mask + 1]
    uint64_t* hash              # [num_blocks] chained hash up to and including the block
    uint64_t* uid               # [num_blocks] node that the block stands for, its own or its canonical's; 0: none
    uint64_t* root              # [num_blocks] uid of its namespace's root
    int32_t* tokens             # [num_blocks, block_size]
    uint8_t* key                # [num_blocks, 16] content keys; NULL: no events wanted
    uint32_t mask
    uint64_t next_uid           # 64 bits: at 10^9 nodes a second they last for 500 years
    uint64_t keep               # bits of the hash that count: all, fewer in tests
    uint64_t seed
    uint64_t[2] secret          # of the hash, from the seed: one for each factor of a product
    int64_t block_size
    int32_t num_nodes
    int64_t inserted            # counters of use
    int64_t duplicates
    int64_t evicted
    int64_t queries
    int64_t query_tokens
    int64_t hit_tokens
    int64_t again_queries       # the same of requests that were admitted before
    int64_t again_query_tokens
    int64_t again_hit_tokens
    Names names
    Ring ring


cdef struct Match:              # what index_match found
    int32_t blocks
    int32_t evictable           # of these, on the LRU list
    uint64_t hash               # of the last block looked at, for digests
