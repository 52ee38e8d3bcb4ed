"""Index of committed blocks by content: exact. A lookup costs about one cache miss per block, and they overlap.

A node is (parent node, tokens of one block). Its uid is handed out once and never reused, so "same parent uid, same
tokens" proves by induction that the whole prefix is the same, whatever the hash says: the chained hash, seeded per
pool, only finds candidates, and a collision costs a miss. All hashes of a prompt need its tokens alone, so the
cache lines of the buckets and of the tokens are fetched in groups, ahead of their use.
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
    AHEAD = 12                  # evicted blocks whose buckets are in flight while one is forgotten
    RAMP = 4                    # the same, at first: most lookups that miss, miss early


# ---- memory ------------------------------------------------------------------------------------------------

cdef int index_init(Index* ix, const Blocks* b, uint64_t seed, uint64_t keep, int64_t events) noexcept nogil:
    cdef uint64_t buckets = 8
    cdef size_t n = b.num_blocks
    while buckets * 3 < <uint64_t>n * 4:
        buckets *= 2
    ix.mask = <uint32_t>(buckets - 1)
    ix.bucket = <Bucket*>xmalloc(buckets * sizeof(Bucket))
    ix.hash = <uint64_t*>xcalloc(n, sizeof(uint64_t))
    ix.uid = <uint64_t*>xcalloc(n, sizeof(uint64_t))
    ix.root = <uint64_t*>xcalloc(n, sizeof(uint64_t))
    ix.tokens = <int32_t*>xcalloc(n, b.block_size * sizeof(int32_t))
    ix.key = <uint8_t*>xcalloc(n, 16) if events else NULL
    ix.block_size = b.block_size
    ix.seed = seed
    ix.secret[0] = mix(seed, 0x2D358DCCAA6C78A5ULL)
    ix.secret[1] = mix(ix.secret[0], 0x8BB84B93962EACC9ULL)
    ix.keep = keep
    ix.next_uid = 1
    ring_init(&ix.ring, events, b.block_size)
    if (names_init(&ix.names, seed, events > 0) != OK or ix.bucket == NULL or ix.hash == NULL or ix.uid == NULL
            or ix.root == NULL or ix.tokens == NULL or (events and ix.key == NULL)):
        index_free(ix)
        return NO_MEMORY
    memset(ix.bucket, 0xFF, buckets * sizeof(Bucket))
    return OK


cdef void index_free(Index* ix) noexcept nogil:
    xfree(ix.bucket)
    xfree(ix.hash)
    xfree(ix.uid)
    xfree(ix.root)
    xfree(ix.tokens)
    xfree(ix.key)
    ring_free(&ix.ring)
    names_free(&ix.names)
    memset(ix, 0, sizeof(Index))


cdef int64_t index_nbytes(const Index* ix, const Blocks* b) noexcept nogil:
    """Bytes of the index itself, the canonical references in `Blocks` included."""
    if ix.bucket == NULL:
        return 0
    return ((ix.mask + <int64_t>1) * sizeof(Bucket)
            + b.num_blocks * (28 + ix.block_size * <int64_t>sizeof(int32_t) + (16 if ix.key != NULL else 0)))


# ---- hash --------------------------------------------------------------------------------------------------

cdef inline uint64_t chain(const Index* ix, uint64_t before, const int32_t* tokens) noexcept nogil:
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
    return kv_fold(before ^ 0xA0761D6478BD642FULL, part ^ 0xE7037ED1A0B428DBULL) & ix.keep


cdef inline uint32_t key_of(uint64_t h) noexcept nogil:
    return <uint32_t>(h >> 32) ^ <uint32_t>h


# ---- buckets -----------------------------------------------------------------------------------------------

cdef inline uint32_t find(const Index* ix, uint32_t at, uint32_t key, uint64_t parent,
                          const int32_t* tokens) noexcept nogil:
    """Position of the node (parent, tokens), probing from `at` on; or of the empty bucket that ends the search."""
    cdef const Bucket* bucket = &ix.bucket[at]
    while bucket.id != NO_BLOCK:
        if (bucket.key == key and bucket.parent == parent
                and memcmp(ix.tokens + bucket.id * ix.block_size, tokens, ix.block_size * sizeof(int32_t)) == 0):
            return at
        at = (at + 1) & ix.mask
        bucket = &ix.bucket[at]
    return at


cdef void remove_bucket(Index* ix, int32_t id) noexcept nogil:
    """Take out the bucket of a canonical block; those behind it move up, so there are no tombstones."""
    cdef uint32_t at = key_of(ix.hash[id]) & ix.mask
    cdef uint32_t gap, home
    while ix.bucket[at].id != id:
        at = (at + 1) & ix.mask
    gap = at
    while True:
        at = (at + 1) & ix.mask
        if ix.bucket[at].id == NO_BLOCK:
            break
        home = ix.bucket[at].key & ix.mask
        if ((at - home) & ix.mask) >= ((at - gap) & ix.mask):
            ix.bucket[gap] = ix.bucket[at]
            gap = at
    ix.bucket[gap].id = NO_BLOCK
    ix.num_nodes -= 1


cdef inline uint8_t* key_at(const Index* ix, int32_t id) noexcept nogil:
    return ix.key + 16 * <int64_t>id


cdef void make_key(Index* ix, int32_t id, int32_t before, Name* name) noexcept nogil:
    """The content key of a block, from that of the block before it; NO_BLOCK: it is the first of its namespace."""
    cdef const uint8_t* start
    if before == NO_BLOCK:
        start = name.key
    else:
        start = key_at(ix, before)
    sha256(start, ix.tokens + id * ix.block_size, ix.block_size * sizeof(int32_t), key_at(ix, id))


cdef void insert(Index* ix, Blocks* b, int32_t id, uint64_t parent, int32_t before, Name* name) noexcept nogil:
    """Make block `id`, whose hash and tokens are set, the canonical block of a new node below block `before`."""
    cdef uint32_t at = key_of(ix.hash[id]) & ix.mask
    while ix.bucket[at].id != NO_BLOCK:
        at = (at + 1) & ix.mask
    ix.uid[id] = ix.next_uid
    ix.next_uid += 1
    ix.bucket[at].key = key_of(ix.hash[id])
    ix.bucket[at].id = id
    ix.bucket[at].parent = parent
    ix.num_nodes += 1
    ix.inserted += 1
    name.users += 1
    b.block[id].committed = CANONICAL
    b.canonical[id] = NO_BLOCK
    if ix.key != NULL:
        make_key(ix, id, before, name)
        ring_add(&ix.ring, STORED, key_at(ix, id),
                 key_at(ix, before) if before != NO_BLOCK else NULL,
                 name, ix.tokens + id * ix.block_size, ix.block_size, -1)


# ---- lookup ------------------------------------------------------------------------------------------------

cdef Match index_match(const Index* ix, const Blocks* b, uint64_t root, uint64_t root_hash, const int32_t* tokens,
                       int32_t max_blocks, int32_t* ids) noexcept nogil:
    """Canonical blocks of the longest cached prefix, at most `max_blocks`; `ids` may be NULL.

    Three passes over a few blocks at a time: hash and fetch the buckets; find candidates and fetch their tokens; prove.
    """
    cdef Match found
    cdef uint64_t[IN_FLIGHT] hashes
    cdef uint32_t[IN_FLIGHT] at
    cdef int32_t first = 0, size, k, id
    cdef int64_t bs = ix.block_size
    cdef uint64_t parent = root, h = root_hash
    found.blocks = found.evictable = 0
    found.hash = root_hash
    while first < max_blocks:
        size = min(max_blocks - first, IN_FLIGHT if first else RAMP)
        for k in range(size):
            h = chain(ix, h, tokens + (first + k) * bs)
            hashes[k] = h
            at[k] = key_of(h) & ix.mask
            kv_prefetch(&ix.bucket[at[k]])
        found.hash = h
        for k in range(size):
            while ix.bucket[at[k]].id != NO_BLOCK and ix.bucket[at[k]].key != key_of(hashes[k]):
                at[k] = (at[k] + 1) & ix.mask
            id = ix.bucket[at[k]].id
            if id == NO_BLOCK:
                size = k + 1                # proved a miss: nothing behind it can hit
                break
            kv_prefetch(ix.tokens + id * bs)
            kv_prefetch(&b.block[id])
            kv_prefetch(&ix.uid[id])
        for k in range(size):
            at[k] = find(ix, at[k], key_of(hashes[k]), parent, tokens + (first + k) * bs)
            id = ix.bucket[at[k]].id
            if id == NO_BLOCK:
                return found
            parent = ix.uid[id]
            found.evictable += b.block[id].place == EVICTABLE
            if ids != NULL:
                ids[found.blocks] = id
            found.blocks += 1
        first += size
    return found


# ---- commit ------------------------------------------------------------------------------------------------

cdef void index_tell(Index* ix, Blocks* b, int32_t id, const int32_t* tokens) noexcept nogil:
    """A full block's tokens are known: it is immutable from here on, and waits to be published."""
    if b.block[id].committed:
        return                              # shared, and committed by another sequence with the same tokens
    memcpy(ix.tokens + id * ix.block_size, tokens, ix.block_size * sizeof(int32_t))
    b.block[id].committed = WAITING
    b.num_waiting += 1
    b.canonical[id] = NO_BLOCK
    ix.uid[id] = 0


cdef inline uint64_t node_above(const Index* ix, const Blocks* b, const int32_t* table, int32_t at,
                                uint64_t root) noexcept nogil:
    """Parent of the node of table[at]; 0 if the block before it is not committed (a copy that `unshare` made)."""
    if at == 0:
        return root
    return ix.uid[table[at - 1]] if b.block[table[at - 1]].committed else 0


cdef bint adopt(Index* ix, Blocks* b, int32_t id, uint64_t parent) noexcept nogil:
    """Make block `id` a duplicate if the node (parent, its tokens) exists."""
    cdef uint32_t at = find(ix, key_of(ix.hash[id]) & ix.mask, key_of(ix.hash[id]), parent,
                            ix.tokens + id * ix.block_size)
    cdef int32_t known = ix.bucket[at].id
    if known == NO_BLOCK:
        return False
    ix.uid[id] = ix.uid[known]
    b.block[id].committed = UNINDEXED
    b.canonical[id] = known
    if ix.key != NULL:
        memcpy(key_at(ix, id), key_at(ix, known), 16)
    return True


cdef void hold_canonicals(Index* ix, Blocks* b, const int32_t* table, int32_t at, Name* name) noexcept nogil:
    """Prepare to insert a node below table[at - 1].

    Duplicates right above it take a reference on their canonical blocks, so that no parent is evicted under a live
    child. If a canonical block is gone, the duplicate is indexed in its place, and so are the duplicates after it. If
    the parent is gone too, they stop being duplicates of anything.
    """
    cdef int32_t first = at, id
    cdef uint64_t parent
    cdef bint broken = False
    while first > 0 and b.block[table[first - 1]].committed == UNINDEXED and b.canonical[table[first - 1]] != NO_BLOCK:
        first -= 1
    for first in range(first, at):
        id = table[first]
        if b.block[id].canonical_held:
            continue
        if not broken and ix.uid[b.canonical[id]] != ix.uid[id]:
            broken = True
        if broken:
            parent = node_above(ix, b, table, first, name.uid)
            if parent == 0:
                ix.uid[id] = 0
                b.canonical[id] = NO_BLOCK
                continue
            if not adopt(ix, b, id, parent):
                insert(ix, b, id, parent, table[first - 1] if first else NO_BLOCK, name)
                continue
        blocks_touch(b, b.canonical[id])
        b.block[id].canonical_held = 1


cdef void index_publish(Index* ix, Blocks* b, const int32_t* table, int32_t at, const SeqPrefix* of) noexcept nogil:
    """Offer a waiting block of a sequence, whose content exists, to the index; after a flush it may not be found."""
    cdef int32_t id = table[at]
    cdef uint64_t parent, now, root = of.root
    ix.hash[id] = chain(ix, ix.hash[table[at - 1]] if at else of.root_hash, ix.tokens + id * ix.block_size)
    ix.root[id] = root
    b.block[id].committed = UNINDEXED
    b.num_waiting -= 1
    parent = node_above(ix, b, table, at, root)
    if root == 0 or parent == 0:
        return
    if adopt(ix, b, id, parent):
        ix.duplicates += 1
        return
    hold_canonicals(ix, b, table, at, of.name)
    now = node_above(ix, b, table, at, root)
    if now == 0:
        return
    if now != parent:
        parent = now
        if adopt(ix, b, id, parent):
            ix.duplicates += 1
            return
    insert(ix, b, id, parent, table[at - 1] if at else NO_BLOCK, of.name)


# ---- forgetting --------------------------------------------------------------------------------------------

cdef void forget(Index* ix, int32_t id) noexcept nogil:
    """The content of a canonical block is gone."""
    remove_bucket(ix, id)
    if ix.key != NULL:
        ring_add(&ix.ring, REMOVED, key_at(ix, id), NULL, NULL, NULL, 0, -1)
    ix.uid[id] = 0
    name_leave(&ix.names, names_by_uid(&ix.names, ix.root[id]))


cdef void index_drain(Index* ix, Blocks* b) noexcept nogil:
    """Forget the nodes of blocks that were taken for other use in the running call."""
    cdef int64_t k
    cdef int32_t id, ahead
    for k in range(-2 * AHEAD, b.num_dropped):
        if k + 2 * AHEAD < b.num_dropped:
            ahead = b.dropped[k + 2 * AHEAD]
            kv_prefetch(&b.block[ahead])
            kv_prefetch(&ix.uid[ahead])
            kv_prefetch(&ix.hash[ahead])
        if k + AHEAD >= 0 and k + AHEAD < b.num_dropped:
            kv_prefetch(&ix.bucket[key_of(ix.hash[b.dropped[k + AHEAD]]) & ix.mask])
        if k < 0:
            continue
        id = b.dropped[k]
        b.block[id].noted = 0
        if ix.uid[id]:
            forget(ix, id)
            ix.evicted += 1
    b.num_dropped = 0


cdef int32_t index_evictable(const Index* ix, const Blocks* b, uint64_t root) noexcept nogil:
    """Evictable blocks below `root` (0: all): what `index_flush` will make blank. O(evictable blocks)."""
    cdef int32_t id = b.lru.head, found = 0
    while id != NO_BLOCK:
        found += root == 0 or ix.root[id] == root
        id = b.block[id].next
    return found


cdef void index_flush(Index* ix, Blocks* b, uint64_t root) noexcept nogil:
    """Forget every node below `root` (0: all nodes). O(num_blocks)."""
    cdef int32_t id, next_id
    id = b.lru.head
    while id != NO_BLOCK:
        next_id = b.block[id].next
        if root == 0 or ix.root[id] == root:
            forget(ix, id)
            blocks_drop(b, id)
        id = next_id
    for id in range(b.num_blocks):
        if ix.uid[id] and (root == 0 or ix.root[id] == root):
            if b.block[id].committed == CANONICAL:
                forget(ix, id)
                b.block[id].committed = UNINDEXED
            ix.uid[id] = 0


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t index_fingerprint(const Index* ix, const Blocks* b, uint64_t h) noexcept nogil:
    cdef int32_t i
    cdef int64_t k
    h = mix(mix(h, ix.next_uid), ix.num_nodes)
    for i in range(b.num_blocks):
        if b.block[i].committed == 0:
            continue
        h = mix(mix(mix(h, ix.uid[i]), ix.root[i]), <uint32_t>b.canonical[i])
        for k in range(ix.block_size):
            h = mix(h, ix.tokens[i * ix.block_size + k])
    return names_fingerprint(&ix.names, h)


cdef bint index_check(const Index* ix, const Blocks* b, char* finding) noexcept nogil:
    """Whether an invariant does not hold; the first one, in words. O(num_blocks + buckets)."""
    cdef int32_t i, canonical = 0
    cdef int64_t at, buckets = 0
    for at in range(ix.mask + <int64_t>1):
        i = ix.bucket[at].id
        if i == NO_BLOCK:
            continue
        buckets += 1
        if i < b.reserved or i >= b.num_blocks or ix.uid[i] == 0 or b.block[i].committed != CANONICAL:
            return snprintf(finding, FINDING, b"bucket %lld of the index names block %d, which is not canonical",
                            <long long>at, i) > 0
        if find(ix, key_of(ix.hash[i]) & ix.mask, ix.bucket[at].key, ix.bucket[at].parent,
                ix.tokens + i * ix.block_size) != at:          # it finds the first of two that are equal
            return snprintf(finding, FINDING, b"block %d cannot be found in the index", i) > 0
    for i in range(b.num_blocks):
        canonical += b.block[i].committed == CANONICAL
        if b.block[i].canonical_held and (b.block[i].committed != UNINDEXED or b.canonical[i] == NO_BLOCK):
            return snprintf(finding, FINDING, b"block %d holds a canonical block, but is no duplicate", i) > 0
    if not buckets == canonical == ix.num_nodes:
        return snprintf(finding, FINDING, b"the index has %lld buckets for %d canonical blocks, its counter says %d",
                        <long long>buckets, canonical, ix.num_nodes) > 0
    return False
