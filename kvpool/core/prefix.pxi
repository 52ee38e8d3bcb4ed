"""The hash of contents: which nodes of the tree a prompt may find. A lookup costs about one cache miss per block, and
they overlap, because all hashes of a prompt need its tokens alone: the lines of candidates are fetched ahead of use.

A hash is chained from the root, and seeded per pool. It only finds candidates, so a collision costs a miss.
"""

cdef extern from *:
    """
    #include <string.h>
    static inline uint64_t kv_fold(uint64_t a, uint64_t b) {
        unsigned __int128 product = (unsigned __int128)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    static inline uint64_t kv_word(const int32_t *tokens) {
        uint64_t word;
        memcpy(&word, tokens, sizeof word);
        return word;
    }
    #define kv_prefetch(address) __builtin_prefetch(address)
    """
    uint64_t kv_fold(uint64_t a, uint64_t b) noexcept nogil
    uint64_t kv_word(const int32_t* tokens) noexcept nogil
    void kv_prefetch(const void* address) noexcept nogil

cdef enum:
    IN_FLIGHT = 32              # blocks whose lines are in flight together
    RAMP = 4                    # the same, at first: most lookups that miss, miss early


cdef int index_init(Index* ix, int64_t block_size, uint64_t seed, uint32_t keep, int64_t events) noexcept nogil:
    ix.block_size = block_size
    ix.seed = seed
    ix.secret[0] = mix(seed, 0x2D358DCCAA6C78A5ULL)
    ix.secret[1] = mix(ix.secret[0], 0x8BB84B93962EACC9ULL)
    ix.keep = keep
    ring_init(&ix.ring, events, block_size)
    return names_init(&ix.names, seed)


cdef void index_free(Index* ix) noexcept nogil:
    ring_free(&ix.ring)
    names_free(&ix.names)
    memset(ix, 0, sizeof(Index))


cdef inline uint32_t chain(const Index* ix, uint32_t before, const int32_t* tokens) noexcept nogil:
    """Hash of a prefix that is one block longer. The block's part does not wait for `before`.

    Both factors of a product are secret: tokens that choose one of them choose which bits of the other are lost.
    """
    cdef uint64_t part = ix.seed
    cdef uint64_t salt = ix.secret[0], other = ix.secret[1]
    cdef int64_t i, n = ix.block_size
    for i in range(0, n - 3, 4):
        part += kv_fold(kv_word(tokens + i) ^ salt, kv_word(tokens + i + 2) ^ other)
        salt += 0x9E3779B97F4A7C15ULL
    for i in range(n & ~<int64_t>3, n):
        part += kv_fold(<uint32_t>tokens[i] ^ salt, other)
        salt += 0x9E3779B97F4A7C15ULL
    part = kv_fold(before ^ 0xA0761D6478BD642FULL, part ^ 0xE7037ED1A0B428DBULL)
    return (<uint32_t>(part >> 32) ^ <uint32_t>part) & ix.keep
