"""What every block and state slot of a pool with layer groups holds, and what every query has to read there."""
from libc.stdint cimport int32_t, int64_t, uint64_t

from proof.fuzz._books_groups cimport MOST_ARENAS, MOST_GROUPS, GroupBooks
from proof.fuzz._storage cimport Finding, Storage

cdef struct Shown:              # the arrays of one group of a plan, as a backend gets them; it reads them late
    const int32_t* tables
    int32_t width               # ids of a row
    const int32_t* slots
    int64_t stride              # tokens of a column of `slots`
    const int32_t* copies
    int32_t num_copies
    const int32_t* starts
    const int32_t* src
    const int32_t* dst


cdef struct Content:
    uint64_t* cell[MOST_ARENAS]     # [num_blocks, room]
    int64_t room                    # tokens of a block that has most
    int64_t more                    # tokens that queries read before those of the contract: a planted fault
    Finding finding


cdef int content_init(Content* c, const GroupBooks* gb) noexcept nogil
cdef void content_free(Content* c) noexcept nogil
cdef void content_poison(Content* c, GroupBooks* gb) noexcept nogil
cdef int content_execute(Content* c, const GroupBooks* gb, int32_t k, const Shown* shown) noexcept nogil
cdef int content_check(Content* c, const GroupBooks* gb, const Storage* s) noexcept nogil
