"""A ring of calls: 32-bit words, the call and its flags first, the low half of the digest second, then what it names.

Only calls that changed something are written, after they did; sequences are named by their slots and blocks by their
ids, so that a replay on a new pool, whose handles have another tag, names the same ones. Words and not bytes of as many
bits as a number needs: they are stored and copied many at a time.

A batch begins with a word that says in its low two bits what follows: so many values of one word each, so many of two
words each, one value for all in the other 30 bits, or one in the next two words. A half of the ring is no larger than
2^30 words, so 30 bits have room for the size of any batch in it.
"""

cdef int64_t SLOT = (1 << 20) - 1

cdef enum:                      # the low bits of a batch
    NARROW
    WIDE
    SCALAR
    WIDE_SCALAR


cdef inline uint32_t* record_begin(Record* r, int call, int64_t words) noexcept nogil:
    """Where the words of a call go, of which there are at most so many; NULL: they are too many."""
    cdef uint32_t* at = r.data + r.active * r.half + r.size[r.active]
    if r.size[r.active] + HEAD + words > r.half:
        at = record_turn(r, HEAD + words)
        if at == NULL:
            return NULL
    at[0] = call
    return at + HEAD


cdef inline void record_end(Record* r, uint32_t* at, uint64_t digest) noexcept nogil:
    """The call is made, and `at` is behind its last word."""
    cdef uint32_t* half = r.data + r.active * r.half
    if at == NULL:
        record_too_large(r)
        return
    half[r.size[r.active] + 1] = <uint32_t>digest
    r.size[r.active] = (<int64_t>at - <int64_t>half) // <int64_t>sizeof(uint32_t)
    r.calls[r.active] += 1


cdef inline uint32_t* put(uint32_t* at, int64_t value) noexcept nogil:
    """A number of 32 bits."""
    at[0] = <uint32_t>value
    return at + 1


cdef inline uint32_t* put_wide(uint32_t* at, int64_t value) noexcept nogil:
    """A number of 64 bits."""
    return put(put(at, value), value >> 32)


cdef inline void record_one(Record* r, int call, int64_t value, uint64_t digest) noexcept nogil:
    """A call with one number of 64 bits."""
    cdef uint32_t* at
    if r.data != NULL:
        at = record_begin(r, call, 2)
        record_end(r, put_wide(at, value) if at != NULL else NULL, digest)


cdef inline void record_slots(Record* r, int call, const Ints* handles, uint64_t digest) noexcept nogil:
    """A call with a batch of handles."""
    cdef uint32_t* at
    if r.data != NULL:
        at = record_begin(r, call, handles.size + BATCH)
        record_end(r, put_slots(at, handles) if at != NULL else NULL, digest)


cdef inline void record_blocks(Record* r, int call, const Ints* ids, uint64_t digest) noexcept nogil:
    """A call with a batch of blocks."""
    cdef uint32_t* at
    if r.data != NULL:
        at = record_begin(r, call, 2 * ids.size + BATCH)
        record_end(r, put_ints(at, ids) if at != NULL else NULL, digest)


cdef uint32_t* record_turn(Record* r, int64_t words) noexcept nogil:
    """The older half makes room, unless the call is larger than it."""
    if words > r.half:
        return NULL
    r.active ^= 1
    r.lost += r.calls[r.active]
    r.size[r.active] = r.calls[r.active] = 0
    return r.data + r.active * r.half


cdef void record_too_large(Record* r) noexcept nogil:
    """What came before the call leads nowhere any more."""
    r.lost += r.calls[0] + r.calls[1] + 1
    r.size[0] = r.size[1] = r.calls[0] = r.calls[1] = 0


cdef uint32_t* put_scalar(uint32_t* at, int64_t value) noexcept nogil:
    if value < 1 << 29:
        return put(at, value * 4 + SCALAR)
    return put_wide(put(at, WIDE_SCALAR), value)


cdef uint32_t* put_ints(uint32_t* at, const Ints* values) noexcept nogil:
    """A batch of integers, one word for each where all fit; at most two words for each and BATCH."""
    cdef Py_ssize_t k, n = values.size
    cdef int64_t over = 0
    cdef const int64_t* wide = <const int64_t*>values.data
    cdef int32_t* narrow = <int32_t*>(at + 1)
    if n != 0 and wide == NULL:
        return put_scalar(at, values.scalar)
    if values.width == 4:
        return put_words(at, values.data, n)
    for k in range(n):
        narrow[k] = <int32_t>wide[k]
        over |= wide[k] ^ <int64_t>narrow[k]
    if over == 0:
        at[0] = <uint32_t>(n * 4 + NARROW)
        return at + 1 + n
    at[0] = <uint32_t>(n * 4 + WIDE)
    memcpy(at + 1, wide, n * sizeof(int64_t))
    return at + 1 + 2 * n


cdef uint32_t* put_slots(uint32_t* at, const Ints* handles) noexcept nogil:
    """A batch of slots of handles, one word for each and BATCH."""
    cdef Py_ssize_t k, n = handles.size
    cdef const int64_t* wide = <const int64_t*>handles.data
    if n != 0 and wide == NULL:
        return put_scalar(at, handles.scalar & SLOT)
    at[0] = <uint32_t>(n * 4 + NARROW)
    for k in range(n):
        at[1 + k] = <uint32_t>wide[k] & <uint32_t>SLOT
    return at + 1 + n


cdef uint32_t* put_words(uint32_t* at, const void* data, int64_t size) noexcept nogil:
    """A batch of integers that are 32-bit words already."""
    at[0] = <uint32_t>(size * 4 + NARROW)
    memcpy(at + 1, data, size * sizeof(uint32_t))
    return at + 1 + size


cdef uint32_t* put_bytes(uint32_t* at, const void* data, int64_t size) noexcept nogil:
    """So many bytes and their number, zeros up to a whole word: at most size // 4 + 2 words."""
    cdef int64_t words = (size + 3) // 4
    at[words] = 0
    at[0] = <uint32_t>size
    memcpy(at + 1, data, size)
    return at + 1 + words
