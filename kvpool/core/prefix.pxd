"""What the prefix cache of a pool has beside its tree: the hash of contents, namespaces, events, counters."""


cdef struct Index:
    uint32_t keep               # bits of the hash that count: all, fewer in tests
    uint64_t seed
    uint64_t[2] secret          # of the hash, from the seed: one for each factor of a product
    int64_t block_size          # tokens of a node
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
