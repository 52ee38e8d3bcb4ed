"""A ring of calls: one byte for the call, integers as zigzag varints, the low half of the digest after it.

Only calls that changed something are written, after they did; sequences are named by their slots and blocks by their
ids, so that a replay on a new pool, whose handles have another tag, names the same ones.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvpool._args cimport Ints, ints_at

cdef int64_t SLOT = (1 << 20) - 1
cdef int64_t WORST = 10         # bytes of a varint


cdef void record_begin(Record* r, int call, int64_t values) noexcept nogil:
    """A call with at most so many integers. Where it does not fit, the older half makes room."""
    cdef int64_t room = (values + 4) * WORST + 8
    if r.size[r.active] + room > r.half:
        r.active ^= 1
        r.lost += r.calls[r.active]
        r.size[r.active] = r.calls[r.active] = 0
    r.at = r.active * r.half + r.size[r.active] if room <= r.half else -1
    if r.at >= 0:
        r.data[r.at] = <uint8_t>call
        r.at += 1


cdef void record_int(Record* r, int64_t value) noexcept nogil:
    cdef uint64_t bits = (<uint64_t>value << 1) ^ <uint64_t>(value >> 63)
    if r.at < 0:
        return
    while bits >= 128:
        r.data[r.at] = <uint8_t>(bits | 128)
        r.at += 1
        bits >>= 7
    r.data[r.at] = <uint8_t>bits
    r.at += 1


cdef void record_ints(Record* r, const Ints* values, bint slots) noexcept nogil:
    """Their number and the integers, or -1 and the one for all."""
    cdef Py_ssize_t k
    record_int(r, values.size)
    if values.size < 0:
        record_int(r, values.scalar & SLOT if slots else values.scalar)
    for k in range(values.size):
        record_int(r, ints_at(values, k) & SLOT if slots else ints_at(values, k))


cdef void record_array(Record* r, const int32_t* values, int64_t n) noexcept nogil:
    cdef int64_t k
    record_int(r, n)
    for k in range(n):
        record_int(r, values[k])


cdef void record_end(Record* r, uint64_t digest) noexcept nogil:
    cdef uint32_t low = <uint32_t>digest
    if r.at < 0:                # a call larger than a half: what came before leads nowhere any more
        r.lost += r.calls[0] + r.calls[1] + 1
        r.size[0] = r.size[1] = r.calls[0] = r.calls[1] = 0
        return
    memcpy(&r.data[r.at], &low, 4)
    r.size[r.active] = r.at + 4 - r.active * r.half
    r.calls[r.active] += 1


cdef void record_batch(Record* r, int call, const Ints* values, bint slots, uint64_t digest) noexcept nogil:
    """A call with one batch: slots of handles, or plain integers."""
    if r.data == NULL:
        return
    record_begin(r, call, values.size)
    record_ints(r, values, slots)
    record_end(r, digest)


cdef void record_two(Record* r, int call, const Ints* rows, const Ints* values, uint64_t digest) noexcept nogil:
    """A call with handles and an integer for each."""
    if r.data == NULL:
        return
    record_begin(r, call, rows.size + values.size)
    record_ints(r, rows, True)
    record_ints(r, values, False)
    record_end(r, digest)


cdef void record_one(Record* r, int call, int64_t value, uint64_t digest) noexcept nogil:
    if r.data == NULL:
        return
    record_begin(r, call, 1)
    record_int(r, value)
    record_end(r, digest)
