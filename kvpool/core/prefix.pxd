"""What the prefix cache of a pool has beside its tree: the hash of contents, namespaces, events, counters."""


cdef struct Lookups:            # prompts that were looked up
    int64_t prompts
    int64_t tokens
    int64_t hit_tokens


cdef struct Index:
    uint32_t keep               # bits of the hash that count: all, fewer in tests
    uint64_t seed
    uint64_t[2] secret          # of the hash, from the seed: one for each factor of a product
    int64_t block_size          # tokens of a node
    int64_t inserted            # counters of use
    int64_t duplicates
    int64_t evicted
    Lookups[2] lookups          # [1]: of requests that were admitted before, and may find what they computed
    Names names
    Ring ring
