"""The backend that the fuzzer plays: what slots hold, by the books, and whether everybody reads his own tokens.

A token's stamp follows from all tokens before it, as the KV of a real model does: so a hit that holds anything but
what these tokens wrote is seen, whatever the rules say.
"""
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from proof.fuzz._books cimport LOADS, line_table


cdef int storage_init(Storage* s, const Books* b) noexcept nogil:
    """Returns 0, or -1 without memory; `storage_free` in either case."""
    cdef size_t slots = b.num_blocks * b.block_size, places = b.max_seqs * b.capacity
    cdef int32_t i
    memset(s, 0, sizeof(Storage))
    s.stamp = <uint64_t*>calloc(places, sizeof(uint64_t))
    s.token = <int32_t*>calloc(places, sizeof(int32_t))
    s.real = <uint64_t*>calloc(slots, sizeof(uint64_t))
    s.virt = <uint64_t*>calloc(slots if b.full else 1, sizeof(uint64_t))
    s.raw_stamp = <uint64_t*>calloc(slots if b.full else 1, sizeof(uint64_t))
    if s.stamp == NULL or s.token == NULL or s.real == NULL or s.virt == NULL or s.raw_stamp == NULL:
        return -1
    for i in range(b.num_blocks):
        storage_poison(s, b, i)
    return 0


cdef void storage_free(Storage* s) noexcept nogil:
    free(s.stamp)
    free(s.token)
    free(s.real)
    free(s.virt)
    free(s.raw_stamp)
    memset(s, 0, sizeof(Storage))


cdef int found(Finding* finding, const char* what, int64_t a, int64_t b, int64_t c, int64_t d) noexcept nogil:
    """Keep the first finding."""
    if finding.what == NULL:
        finding.what = what
        finding.a = a
        finding.b = b
        finding.c = c
        finding.d = d
    return -1


# ---- what a backend does -----------------------------------------------------------------------------------

cdef void storage_poison(Storage* s, const Books* b, int32_t block) noexcept nogil:
    """The pool gave this block away, or may at any time: whoever still reads it reads this."""
    cdef int64_t slot, first = block * b.block_size
    for slot in range(first, first + b.block_size):
        s.real[slot] = poison(slot)
        if b.full:
            s.virt[slot] = poison(slot)


cdef void storage_execute(Storage* s, const Books* b, const Pending* p, uint64_t* store) noexcept nogil:
    """What a backend does with a plan: copies, then writes."""
    cdef int32_t k
    cdef int64_t t, bs = b.block_size
    for k in range(p.num_entries):
        memcpy(store + p.entry[k].new * bs, store + p.entry[k].old * bs, p.entry[k].tokens * sizeof(uint64_t))
    for t in range(p.tokens):
        store[p.slot[t]] = p.stamp[t]


cdef void storage_unwrite(Storage* s, const Books* b, const Pending* p, int32_t num_entries) noexcept nogil:
    """A plan will never run: `virt` is built again without it."""
    cdef const Pending* other
    cdef int32_t i
    cdef int64_t t, slot
    memcpy(s.virt, s.real, b.num_blocks * b.block_size * sizeof(uint64_t))
    for i in range(b.num_queue):
        other = &b.plan[b.queue[i]]
        if not other.executed:
            storage_execute(s, b, other, s.virt)
    for t in range(p.tokens):
        s.raw_stamp[p.slot[t]] = s.virt[p.slot[t]]
    for i in range(num_entries):
        for t in range(p.entry[i].tokens):
            slot = p.entry[i].new * b.block_size + t
            s.raw_stamp[slot] = s.virt[slot]


cdef void storage_load(Storage* s, const Books* b, int32_t slot, int64_t length) noexcept nogil:
    """A loader has written all blocks of a sequence: what they have to hold up to `length`, and whatever behind it."""
    cdef int64_t position, at, bs = b.block_size
    cdef uint64_t stamp
    for position in range(b.line[slot].length, b.line[slot].blocks * bs):
        at = line_table(b, slot)[position // bs] * bs + position % bs
        stamp = line_stamp(s, b, slot)[position] if position < length else ~poison(at)
        s.real[at] = stamp
        if b.full:
            s.virt[at] = s.raw_stamp[at] = stamp


# ---- what everybody reads ----------------------------------------------------------------------------------

cdef int read_tokens(Storage* s, const Books* b, const uint64_t* store, const int32_t* table, const uint64_t* expect,
                     int64_t length, const char* what, int64_t who) noexcept nogil:
    """A context, block by block, against what it has to be."""
    cdef int64_t position = 0, end, slot, bs = b.block_size
    cdef int32_t index = 0
    while position < length:
        slot = table[index] * bs
        end = position + bs if length - position > bs else length
        while position < end:
            if store[slot] != expect[position]:
                return found(&s.finding, what, who, position, table[index], 0)
            slot += 1
            position += 1
        index += 1
    return 0


cdef int storage_read(Storage* s, const Books* b, const Pending* p) noexcept nogil:
    """What a backend reads for the rows of a plan that runs now, by the tables of its consumer."""
    cdef int32_t i
    for i in range(p.rows):
        if read_tokens(s, b, s.real, p.mirror + <int64_t>i * b.width, p.expect + i * b.capacity, p.length[i],
                       b"a row of a plan that runs late does not read its own tokens: "
                       b"handle %lld, position %lld, block %lld", p.handle[i]):
            return -1
    return 0


cdef int check_content(Storage* s, const Books* b, const uint64_t* store) noexcept nogil:
    """Every open sequence, and every block with raw references, holds what it has to."""
    cdef int32_t i, slot
    cdef int64_t k, first
    for i in range(b.num_live):
        slot = b.live[i]
        if read_tokens(s, b, store, line_table(b, slot), line_stamp(s, b, slot), b.line[slot].length,
                       b"a sequence does not read its own tokens: handle %lld, position %lld, block %lld",
                       b.line[slot].handle):
            return -1
    for i in range(b.num_loading):
        slot = b.loading[i]
        if b.line[slot].loads == LOADS and read_tokens(
                s, b, store, line_table(b, slot), line_stamp(s, b, slot), b.line[slot].length,
                b"a sequence that is loaded does not read its hits: handle %lld, position %lld, block %lld",
                b.line[slot].handle):
            return -1
    if not b.full:
        return 0
    for i in range(b.reserved, b.num_blocks):
        if b.page[i].raw:
            first = i * b.block_size
            for k in range(b.block_size):
                if store[first + k] != s.raw_stamp[first + k]:
                    return found(&s.finding, b"block %lld with raw references was overwritten at %lld (%lld "
                                 b"references)", i, k, b.page[i].refs, 0)
    return 0


cdef int storage_check(Storage* s, const Books* b) noexcept nogil:
    """0, or -1 with `finding` set."""
    if b.full and check_content(s, b, s.virt):
        return -1
    return check_content(s, b, s.real) if b.num_queue == 0 else 0
