"""What every slot of a storage holds, and what every sequence has to read there."""
from libc.stdint cimport int32_t, int64_t, uint64_t

from proof.fuzz._books cimport Books, Pending

cdef enum:
    POISON_LOW = 0x0BADC0DE     # what a freed block holds, below the block's id


cdef struct Finding:            # why a check failed; the words are made by who reports it
    const char* what
    int64_t a
    int64_t b
    int64_t c
    int64_t d


cdef struct Storage:
    uint64_t* stamp             # [max_seqs, width * block_size] what each position has to read
    int32_t* token              # [max_seqs, width * block_size]
    uint64_t* real              # [num_blocks * block_size] the storage, as the backend has filled it
    uint64_t* virt              # the same as if every pending plan had run; full mode
    uint64_t* raw_stamp         # what blocks with raw references have to hold; full mode
    Finding finding


cdef inline uint64_t poison(int64_t slot) noexcept nogil:
    return (<uint64_t>POISON_LOW << 32) | <uint64_t>slot


cdef inline uint64_t* line_stamp(const Storage* s, const Books* b, int32_t slot) noexcept nogil:
    return s.stamp + slot * b.capacity


cdef inline int32_t* line_token(const Storage* s, const Books* b, int32_t slot) noexcept nogil:
    return s.token + slot * b.capacity


cdef int storage_init(Storage* s, const Books* b) noexcept nogil
cdef void storage_free(Storage* s) noexcept nogil
cdef void storage_poison(Storage* s, const Books* b, int32_t block) noexcept nogil
cdef void storage_execute(Storage* s, const Books* b, const Pending* p, uint64_t* store) noexcept nogil
cdef void storage_unwrite(Storage* s, const Books* b, const Pending* p, int32_t num_entries) noexcept nogil
cdef void storage_load(Storage* s, const Books* b, int32_t slot, int64_t length) noexcept nogil
cdef int storage_read(Storage* s, const Books* b, const Pending* p) noexcept nogil
cdef int storage_check(Storage* s, const Books* b) noexcept nogil
cdef int found(Finding* finding, const char* what, int64_t a, int64_t b, int64_t c,
               int64_t d) noexcept nogil
